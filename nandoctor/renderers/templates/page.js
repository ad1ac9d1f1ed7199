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

  for (const button of document.querySelectorAll("[data-copy]")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await copy(document.getElementById(button.dataset.copy).textContent);
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
  const rows = [...body.rows];               // in the page's original order: parents before children
  const texts = rows.map(row => `${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase());
  const search = document.getElementById("search");
  const onlyNonfinite = document.getElementById("only-nonfinite");
  let sorted = null;                         // the sorted column; null for the tree

  // The tree is made of the rows' dotted paths: a call lies in the first call of the nearest module around it.
  const paths = rows.map(row => row.cells[0].textContent.replace(/ ?\([^.]*\)$/, ""));
  const firstCalls = new Map(), parents = [], depths = [];
  paths.forEach((path, place) => {
    let around = path, parent = null;
    while (around && parent === null) {
      around = around.slice(0, Math.max(around.lastIndexOf("."), 0));
      parent = firstCalls.get(around) ?? null;
    }
    parents.push(parent);
    depths.push(parent === null ? 0 : depths[parent] + 1);
    if (!firstCalls.has(path)) firstCalls.set(path, place);
  });
  const first = body.querySelector("tr.row-first");
  const unfolded = new Set();                // of a large model, only the way to the first non-finite layer
  for (let place = rows.indexOf(first); place >= 0; place = parents[place] ?? -1) unfolded.add(place);
  const holders = new Set(parents);
  const folds = rows.map((row, place) => {
    const cell = row.cells[0], name = cell.textContent, owner = parents[place] === null ? "" : paths[parents[place]];
    const path = Object.assign(document.createElement("span"), { className: "path" });
    path.textContent = owner && name.startsWith(`${owner}.`) ? `${owner}.` : "";
    const mark = document.createElement(holders.has(place) ? "button" : "span");
    mark.className = holders.has(place) ? "fold" : "leaf";
    cell.style.setProperty("--depth", depths[place]);
    cell.replaceChildren(mark, path, name.slice(path.textContent.length));
    if (!holders.has(place)) return null;
    mark.ariaLabel = name;
    mark.ariaExpanded = String(rows.length <= 60 || parents[place] === null || unfolded.has(place));
    return mark;
  });

  function show() {
    const wanted = search.value.trim().toLowerCase();
    const flat = Boolean(wanted) || onlyNonfinite.checked || sorted !== null;
    const open = [];
    let count = 0;
    rows.forEach((row, place) => {
      const parent = parents[place];
      open[place] = parent === null || (open[parent] && folds[parent].ariaExpanded === "true");
      const found = texts[place].includes(wanted) && (!onlyNonfinite.checked || /row-(failed|first)/.test(row.className));
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
  show();
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
