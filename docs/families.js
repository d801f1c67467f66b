// Filters of docs/families.md. Without this script the page has the whole tables.
// A table with the columns "kind" and "attention has" gets a line of controls above it.
"use strict";

for (const table of document.querySelectorAll("article table")) {
  const head = [...table.querySelectorAll("th")].map((cell) => cell.textContent.trim());
  const columns = ["kind", "attention has"].map((name) => head.indexOf(name));
  if (columns.includes(-1)) continue;

  const rows = [...table.tBodies[0].rows].map((row) => ({
    row,
    name: row.cells[0].textContent.toLowerCase(),
    tags: columns.flatMap((column) => row.cells[column].textContent.split(";")).map((tag) => tag.trim()),
  }));
  const tags = [...new Set(rows.flatMap(({ tags }) => tags))].filter(Boolean);

  const controls = document.createElement("p");
  controls.className = "filter";
  const search = document.createElement("input");
  search.type = "search";
  search.placeholder = "class";
  search.setAttribute("aria-label", "Part of the name of a class");
  const boxes = tags.map((tag) => {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.value = tag;
    return box;
  });
  const count = document.createElement("output");
  controls.append(search);
  for (const box of boxes) {
    const label = document.createElement("label");
    label.append(box, ` ${box.value}`);
    controls.append(label);
  }
  controls.append(count);

  // A class is shown if its name has the text, and if it has every tag that is checked.
  const show = () => {
    const asked = boxes.filter((box) => box.checked).map((box) => box.value);
    const text = search.value.trim().toLowerCase();
    let shown = 0;
    for (const { row, name, tags } of rows) {
      row.hidden = !(name.includes(text) && asked.every((tag) => tags.includes(tag)));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  controls.addEventListener("input", show);
  show();
  // The theme may wrap the table into a block that scrolls.
  (table.closest(".md-typeset__scrollwrap") ?? table).before(controls);
}
