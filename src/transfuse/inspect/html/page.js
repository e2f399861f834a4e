"use strict";
// The map of layers: arrow keys move between cells, and what a cell stands for is told below the table.
for (const map of document.querySelectorAll(".map")) {
  const told = map.parentElement.querySelector(".told");
  const rows = [...map.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td")]);
  let current = null;
  const tell = (cell) => { told.textContent = cell.title; };
  const select = (cell) => {
    if (current) current.tabIndex = -1;
    current = cell;
    cell.tabIndex = 0;
  };
  rows.forEach((cells, y) => cells.forEach((cell, x) => {
    cell.addEventListener("mouseenter", () => tell(cell));
    cell.addEventListener("focus", () => { select(cell); tell(cell); });
    cell.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const next = step && rows[y + step[0]] && rows[y + step[0]][x + step[1]];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }));
  if (rows.length && rows[0].length) select(rows[0][0]);
}
