import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const WEB = fileURLToPath(new URL(".", import.meta.url));
const OUTPUT = process.env.PAGE_OUTPUT ?? fileURLToPath(new URL("../src/transfuse/server/page", import.meta.url));
// Kept beside what was built: which sources it is of. tests/unit/server/test_page_build.py computes the same.
const RECORD = "build.json";
const SOURCES = ["index.html", "package-lock.json", "package.json", "public", "src", "tsconfig.json", "vite.config.js"];

function filesBelow(folder, prefix = "") {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? filesBelow(join(folder, entry.name), `${prefix}${entry.name}/`) : [`${prefix}${entry.name}`],
  );
}

function digests(folder, names) {
  const digest = (name) => createHash("sha256").update(readFileSync(join(folder, name))).digest("hex");
  return Object.fromEntries(names.sort().map((name) => [name, digest(name)]));
}

const recordSources = {
  name: "record-sources",
  closeBundle() {
    const sources = filesBelow(WEB).filter((name) => SOURCES.includes(name.split("/")[0]));
    const built = filesBelow(OUTPUT).filter((name) => name !== RECORD);
    const record = { sources: digests(WEB, sources), built: digests(OUTPUT, built) };
    writeFileSync(join(OUTPUT, RECORD), `${JSON.stringify(record, null, 2)}\n`);
  },
};

export default defineConfig({
  plugins: [recordSources],
  build: {
    outDir: OUTPUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    // Of what is part of the built files.
    license: { fileName: "licenses.md" },
    // Inlined files would be data: addresses, which the page's policy forbids.
    assetsInlineLimit: 0,
  },
});
