const PREFIX = "transfuse:";
const LINE = /^transfuse:(\S+) (\S+)$/;

/** The samples of the server's own metrics, by name with labels. */
export type Samples = ReadonlyMap<string, number>;

export function readSamples(text: string): Samples {
  const samples = new Map<string, number>();
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const match = LINE.exec(line);
    if (match?.[1] !== undefined) samples.set(match[1], Number(match[2]));
  }
  return samples;
}

/** What a counter gained; null where it began anew. */
export function gain(before: Samples, after: Samples, name: string): number | null {
  const gained = (after.get(name) ?? 0) - (before.get(name) ?? 0);
  return gained < 0 ? null : gained;
}

/** A quantile of what a histogram took in between two readings, by straight lines between its bounds; null for nothing. */
export function quantile(before: Samples, after: Samples, name: string, share: number): number | null {
  const buckets: [number, number][] = [];
  const start = `${name}_bucket{le="`;
  for (const key of after.keys()) {
    if (!key.startsWith(start)) continue;
    const bound = key.slice(start.length, -2);
    buckets.push([bound === "+Inf" ? Infinity : Number(bound), gain(before, after, key) ?? 0]);
  }
  buckets.sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total === 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= share * total) {
      return bound === Infinity ? low : low + ((bound - low) * (share * total - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}
