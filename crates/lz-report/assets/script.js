"use strict";
// Sorting and searching the table of calls. Without this script the page shows the same.
(function () {
  const table = document.querySelector("table.sortable");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
  };
  const compare = (a, b, column, numbers) => {
    if (!numbers) return a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
    return value(a, column) - value(b, column);
  };

  heads.forEach((head, column) => {
    const numbers = head.classList.contains("n");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === (numbers ? "descending" : "ascending");
      const sign = down === numbers ? 1 : -1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const missing = (row) => numbers && value(row, column) === null;
      const sorted = rows.slice().sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : sign * compare(a, b, column, numbers)));
      body.append(...sorted);
    });
  });

  const search = document.getElementById("search");
  const others = document.getElementById("others");
  const shown = document.getElementById("shown");
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let n = 0;
    rows.forEach((row, i) => {
      const match = words.every((word) => texts[i].includes(word)) && (!others.checked || "other" in row.dataset);
      row.hidden = !match;
      if (match) n += 1;
    });
    shown.textContent = n === rows.length ? `${n} call${n === 1 ? "" : "s"}` : `${n} of ${rows.length} calls`;
  };
  search.addEventListener("input", filter);
  others.addEventListener("change", filter);
  document.querySelector(".tools").hidden = false;
})();
