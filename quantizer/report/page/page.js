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
    for (const table of document.querySelectorAll(`#${input.dataset.of} details table`))
      if (input.value) table.closest("details").open = !!table.querySelector("[data-name]:not([hidden])");
  });
}
for (const command of document.querySelectorAll(".command pre, td.line code")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy ${command.textContent}`);
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(command);
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected, press Ctrl+C";
    }
    button.removeAttribute("aria-label");
  });
  command.after(button);
}
for (const svg of document.querySelectorAll("svg[data-texts]")) {
  const positions = svg.dataset.positions.split(" ").map(Number), texts = svg.dataset.texts.split("\n");
  const { width, height } = svg.viewBox.baseVal;
  const readout = document.createElement("p");
  readout.className = "readout";
  readout.textContent = "Point at the drawing to read its values.";
  svg.after(readout);
  const line = document.createElementNS(svg.namespaceURI, "line");
  line.setAttribute("class", "pointer");
  line.setAttribute("y1", 0);
  line.setAttribute("y2", height);
  const show = (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
    const nearest = positions.reduce((best, at, index) => (Math.abs(at - x) < Math.abs(positions[best] - x) ? index : best), 0);
    for (const end of ["x1", "x2"]) line.setAttribute(end, positions[nearest]);
    svg.append(line);
    readout.textContent = svg.dataset.form.replace("{}", () => texts[nearest]);
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
}
