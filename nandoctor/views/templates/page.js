"use strict";
(() => {
  const status = Object.assign(document.createElement("span"), { role: "status" });
  const said = document.getElementById("said") ?? document.body.appendChild(status);
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

  for (const button of document.querySelectorAll("button.copy")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await copy(button.previousElementSibling.textContent);
      button.textContent = "Copied";
      say("Copied to the clipboard");
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  // Scroll boxes wider than the screen to what matters: the expression at fault.
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

  const table = document.getElementById("layers");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];               // in the page's original order, that of execution
  const texts = rows.map(row => `${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase());
  const search = document.getElementById("search");
  const onlyNonfinite = document.getElementById("only-nonfinite");

  function show() {
    const wanted = search.value.trim().toLowerCase();
    let count = 0;
    rows.forEach((row, place) => {
      const found = texts[place].includes(wanted) && (!onlyNonfinite.checked || /row-(failed|first)/.test(row.className));
      row.hidden = !found;
      count += found;
    });
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
      if (now === "none") body.append(...rows); else sort(column, now === "ascending" ? 1 : -1);
    });
  });

  show();
  const first = body.querySelector("tr.row-first");
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
