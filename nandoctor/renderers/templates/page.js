"use strict";
(() => {
  const said = document.getElementById("said");
  const say = text => { said.textContent = text; };

  async function copy(text) {
    try { return await navigator.clipboard.writeText(text); } catch { /* no permission: fall back to execCommand */ }
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await copy(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
      say("Copied to the clipboard");
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  // Scroll boxes wider than the screen to what matters: the expression at fault, the first non-finite layer.
  function reveal(box, mark) {
    const from = box.getBoundingClientRect(), to = mark.getBoundingClientRect();
    if (to.right > from.right) box.scrollLeft += to.left - from.left - box.clientWidth / 4;
  }
  for (const source of document.querySelectorAll("pre.source")) {
    const caret = [...source.querySelectorAll(".caret")].find(line => line.textContent.includes("^"));
    if (!caret) continue;
    const range = document.createRange(), text = caret.firstChild, start = text.data.indexOf("^");
    range.setStart(text, start);
    range.setEnd(text, text.data.lastIndexOf("^") + 1);
    reveal(source, range);
  }
  for (const plot of document.querySelectorAll(".plot")) {
    const mark = [...plot.querySelectorAll("text")].find(text => text.textContent.startsWith("first non-finite:"));
    if (mark) reveal(plot, mark);
  }

  const table = document.getElementById("layers");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];               // in the page's original order: parents before children
  const texts = rows.map(row => row.dataset.search.toLowerCase());
  const search = document.getElementById("search");
  const onlyNonfinite = document.getElementById("only-nonfinite");
  let sorted = null;                         // the sorted column; null for the tree
  const folds = rows.map(row => row.querySelector(".fold"));
  const parents = rows.map(row => row.dataset.parent === "" ? null : Number(row.dataset.parent));

  function show() {
    const wanted = search.value.trim().toLowerCase();
    const flat = Boolean(wanted) || onlyNonfinite.checked || sorted !== null;
    const open = [];
    let count = 0;
    rows.forEach((row, place) => {
      const parent = parents[place];
      open[place] = parent === null || (open[parent] && folds[parent].ariaExpanded === "true");
      const found = texts[place].includes(wanted) && (!onlyNonfinite.checked || row.classList.contains("nonfinite"));
      row.hidden = flat ? !found : !open[place];
      count += !row.hidden;
    });
    table.classList.toggle("flat", flat);
    say(`${count} of ${rows.length} calls shown`);
  }

  const value = text => {
    if (/NaN|Inf/.test(text)) return Infinity;
    const number = parseFloat(text.replace(/[<,]/g, ""));
    return Number.isNaN(number) ? text.toLowerCase() : number;
  };

  function compare(a, b) {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  }

  function sort(column, direction) {
    const keys = new Map(rows.map(row => [row, value(row.cells[column].textContent.trim())]));
    const missing = row => keys.get(row) === "-";
    const order = [...rows].sort((a, b) =>
      missing(a) - missing(b) || direction * compare(keys.get(a), keys.get(b)));
    body.append(...order);
  }

  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const was = heading.getAttribute("aria-sort");
      const now = was === "none" ? "descending" : was === "descending" ? "ascending" : "none";
      headings.forEach(other => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", now);
      sorted = now === "none" ? null : column;
      if (sorted === null) body.append(...rows); else sort(column, now === "ascending" ? 1 : -1);
      show();
    });
  });

  const fold = (button, expanded) => { if (button) button.setAttribute("aria-expanded", String(expanded)); };
  body.addEventListener("click", event => {
    const button = event.target.closest(".fold");
    if (!button) return;
    fold(button, button.ariaExpanded !== "true");
    show();
  });
  document.getElementById("unfold").addEventListener("click", () => { folds.forEach(one => fold(one, true)); show(); });
  document.getElementById("fold").addEventListener("click", () => { folds.forEach(one => fold(one, false)); show(); });
  const first = body.querySelector("tr.first");
  if (first) {
    const frame = table.parentElement;
    frame.scrollTop = first.offsetTop - frame.clientHeight / 2;
  }
  search.addEventListener("input", show);
  onlyNonfinite.addEventListener("change", show);
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && document.activeElement === search) {
      search.value = "";
      show();
    }
  });
})();
