// Nodes of the page: tables and texts that are brought in line with data. Knows no daemon and asks for nothing.
// Texts only ever become the text of a node. Elements are kept and changed, not made anew.

export const MOST_ROWS = 500; // of one table
const LONG = 60; // seconds from which waiting is marked, as in `replicad top`

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  node.append(...children);
  return node;
}

export function put(node, text) {
  const wanted = String(text ?? "");
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Bring the children of a node in line with items: one child for each, found again by its key. */
export function keep(parent, items, keyOf, begin, update) {
  const present = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const kept = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = present.get(key) ?? begin(item);
    present.delete(key); // so that two items with one key get two children
    kept.add(child);
    child.dataset.key = key;
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
}

/**
 * A table in a node. A column has a title, and `of(row)`: a text, a number, `[text, class]`, or null for nothing. With
 * `fill(cell, row)` it makes its cells itself.
 */
export function table(parent, columns, rows, keyOf, nothing) {
  if (parent.querySelector(":scope > .scroll") === null) {
    const heads = columns.map((column) => make("th", { scope: "col", textContent: column.title }));
    const whole = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
    parent.append(make("div", { className: "scroll" }, whole), make("p", { className: "quiet" }));
  }
  const [scroll, remark] = [parent.querySelector(":scope > .scroll"), parent.querySelector(":scope > p")];
  const shown = rows.slice(0, MOST_ROWS);
  scroll.hidden = rows.length === 0;
  remark.hidden = rows.length === shown.length && rows.length > 0;
  put(remark, rows.length ? `and ${(rows.length - shown.length).toLocaleString("en")} more` : nothing);
  const begin = () => {
    const line = make("tr");
    for (const column of columns) {
      const cell = line.insertCell();
      cell.dataset.label = column.title;
    }
    return line;
  };
  keep(scroll.querySelector("tbody"), shown, keyOf, begin, (line, row) => {
    columns.forEach((column, place) => fillCell(line.cells[place], column, row));
  });
  const lines = [...scroll.querySelectorAll("tbody tr")]; // a heading stands above its numbers
  [...scroll.querySelectorAll("th")].forEach((head, place) => {
    head.classList.toggle("number", lines.some((line) => line.cells[place].classList.contains("number")));
  });
}

function fillCell(cell, column, row) {
  if (column.fill) {
    column.fill(cell, row);
    cell.classList.toggle("empty", cell.childNodes.length === 0);
    return;
  }
  const found = column.of(row);
  const [value, tone] = Array.isArray(found) ? found : [found, ""];
  const isNumber = typeof value === "number" || typeof value === "bigint";
  put(cell, isNumber ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : value);
  cell.className = [isNumber ? "number" : "", tone ?? "", cell.textContent === "" ? "empty" : ""].join(" ").trim();
}

const [WIDTH, HEIGHT] = [120, 24]; // as the viewBox of the template; the style stretches it

/** Lag (a line) and rate (an area) of the last hour, each up to its own highest value, which the text below names. */
export function chart(node, found, step, what) {
  if (found === undefined || !found.lag.some((one) => one !== null)) {
    node.replaceChildren();
    return;
  }
  if (node.childElementCount === 0) {
    node.classList.add("chart");
    node.append(document.getElementById("chart").content.cloneNode(true), make("span"));
  }
  const highest = (values) => values.reduce((high, one) => Math.max(high, one ?? 0), 0);
  const [lag, rate] = [highest(found.lag), highest(found.rate)];
  const minutes = Math.round((found.lag.length * step) / 60);
  const text = `lag up to ${duration(lag)}, ${rate.toLocaleString("en", { maximumFractionDigits: 1 })} ${what}/s`;
  const drawn = node.querySelector("svg");
  drawn.setAttribute("aria-label", `the last ${minutes} minutes: ${text}`);
  drawn.querySelector(".lag").setAttribute("d", line(found.lag, lag, false));
  drawn.querySelector(".rate").setAttribute("d", line(found.rate, rate, true));
  put(node.querySelector("span"), text);
}

/** The path of values; it is interrupted where nothing is known. `filled`: down to the bottom of the chart. */
function line(values, highest, filled) {
  const parts = [];
  let part = [];
  const x = (place) => ((place * WIDTH) / Math.max(1, values.length - 1)).toFixed(1);
  const end = () => {
    if (part.length > 0) {
      const [first, last] = [part[0][0], part[part.length - 1][0]];
      const points = part.map(([place, y]) => `${x(place)} ${y.toFixed(1)}`).join("L");
      parts.push(filled ? `M${x(first)} ${HEIGHT}L${points}L${x(last)} ${HEIGHT}Z` : `M${points}`);
    }
    part = [];
  };
  values.forEach((value, place) => {
    if (value === null) end();
    else part.push([place, HEIGHT - (highest > 0 ? (value / highest) * (HEIGHT - 1) : 0)]);
  });
  end();
  return parts.join("");
}

export const long = (value) => (value == null ? null : [duration(value), value >= LONG ? "warn" : ""]);

export function duration(seconds) {
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
}

/** Who holds something back, and the statement that ends it, with a button that copies it. */
export function holder(node, held) {
  if (held == null) {
    node.replaceChildren();
    return;
  }
  if (node.childElementCount === 0) {
    const button = make("button", { type: "button", textContent: "Copy" });
    const code = make("code");
    button.addEventListener("click", () => copy(code, button));
    node.append(make("div", {}, make("div", { className: "held" }), make("div", { className: "copy" }, code, button)));
  }
  const whose = held.prepared ? `prepared transaction ${held.prepared}` : held.pid ? `pid ${held.pid}` : held.kind;
  const name = held.application_name ? ` (${held.application_name})` : "";
  const text = node.querySelector(".held");
  put(text, `for ${duration(held.seconds)} by ${whose}${name}`);
  text.className = `held ${held.seconds >= LONG ? "bad" : "warn"}`;
  put(node.querySelector("code"), held.sql ?? held.end);
}

async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code); // the clipboard is for pages over TLS or of this machine only
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2_000);
}
