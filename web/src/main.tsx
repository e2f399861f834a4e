import { render } from "preact";

import { App } from "./app";
import { startWatching } from "./server";
import "./style.css";

const root = document.getElementById("page");
if (root !== null) {
  render(<App />, root);
  startWatching();
}
