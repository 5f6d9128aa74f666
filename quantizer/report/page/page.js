"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
  [...table.tHead.rows[0].cells].forEach((cell, at) => {
    const button = document.createElement("button");
    button.textContent = cell.textContent;
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => {
        const [x, y] = [value(a, at), value(b, at)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
for (const input of document.querySelectorAll("input.filter")) {
  input.hidden = false;
  input.addEventListener("input", () => {
    for (const row of document.querySelectorAll(`#${input.dataset.of} [data-name]`))
      row.hidden = !row.dataset.name.toLowerCase().includes(input.value.toLowerCase());
  });
}
