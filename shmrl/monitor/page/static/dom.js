// Elements, numbers and requests. Text always becomes a text node: what a model wrote is never markup.

export function $(id) { return document.getElementById(id); }

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return made;
}

export function fill(parent, ...children) { parent.replaceChildren(...children.filter((child) => child !== null)); }

export function row(cells, properties = {}, tag = "td") {
  return el("tr", properties, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el(tag, {}, cell))));
}

export function num(text, properties = {}) { return el("td", { class: "num", ...properties }, text); }

export async function get(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status} ${(await reply.text()).slice(0, 200)}`);
  return reply.headers.get("content-type").startsWith("application/json") ? reply.json() : reply.text();
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function percent(value) { return !isFinite(value) ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`; }

export function tile(label, value, note = "") {
  return el("div", { class: "tile" }, el("div", { class: "label", title: label }, label),
    el("div", { class: "value", title: value }, value), note ? el("div", { class: "note", title: note }, note) : null);
}

export const PALETTE = ["#3b76c4", "#d98c2b", "#4f9a62", "#c25450", "#8268b0", "#3d9ca0", "#b5639a", "#8a7a3f", "#5f7f9e", "#a86f4a", "#6f9440", "#7a7f87"];

export function colour(index) { return PALETTE[index % PALETTE.length]; }
