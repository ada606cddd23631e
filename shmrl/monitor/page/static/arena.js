// The arena: a gauge of the whole capacity, a map of what is used, the same as a table, and what may leak.
import { $, el, fill, row, num, tile, get, bytes, seconds, percent, number, colour } from "/static/dom.js";

const BY = ["source", "step", "holder", "field", "age"];
const OTHERS = /^\(\d+ others\)$/;
let found = null;

export function start() {
  fill($("arena-by"), ...BY.map((by) => el("option", { value: by }, by)));
  $("arena-by").addEventListener("change", draw);
}

export async function update() {
  found = await get("/api/arena");
  draw();
}

function draw() {
  if (!found) return;
  const gone = found.state !== "alive";
  $("arena").dataset.state = found.state;
  $("arena-by").disabled = gone;
  if (!gone && !$("arena-detail").textContent) $("arena-detail").textContent = "Point at an area: its block, who has it, how old it is.";
  $("arena-state").textContent = gone ? "not there: a run removes it at its end; what it held over the steps is among the charts above" : `${found.address}${found.live ? "" : " (no process is attached)"}`;
  if (gone) { empty(); return; }
  const groups = found.by[$("arena-by").value];
  tiles();
  gauge(groups);
  map(groups);
  table(groups);
  suspects();
  events();
}

function empty() {
  $("arena-detail").textContent = "";
  for (const id of ["arena-tiles", "arena-gauge", "arena-groups", "arena-suspects", "arena-events"]) fill($(id));
  $("arena-suspect-count").textContent = "";
  fill($("arena-map"), el("div", { class: "note" }, "No arena to look at. ", el("br"), found.why));
}

function name(text) { return text || found.unnamed[key()]; }

function tiles() {
  const f = found;
  fill($("arena-tiles"),
    tile("Used", bytes(f.used_bytes), percent(f.used_bytes / f.capacity_bytes)),
    tile("Peak", bytes(f.peak_bytes), percent(f.peak_bytes / f.capacity_bytes)),
    tile("Committed", bytes(f.committed_bytes)), tile("Capacity", bytes(f.capacity_bytes)),
    tile("Blocks", number(f.blocks), `${number(f.created - f.freed)} not freed`),
    tile("Created", number(f.created)), tile("Orphans", number(f.orphaned), f.orphaned ? bytes(f.orphaned_bytes) : ""),
    tile("Spilled", number(f.spilled), f.spilled ? bytes(f.spilled_bytes) : ""),
    tile("Waiting", number(f.waiting), f.waiting ? `for ${seconds(f.oldest_wait_s)}` : `${number(f.waits)} waits so far`));
}

function gauge(groups) {
  const at = (value) => `${Math.min(100, 100 * value / found.capacity_bytes)}%`;
  const mark = (value, label, side = "", meaning = "") => el("div", { class: `mark ${side} ${value < 0.25 * found.capacity_bytes ? "right" : ""}`, style: { left: at(value) }, title: `${label}: ${bytes(value)}${meaning ? `; ${meaning}` : ""}` }, el("span", {}, label));
  fill($("arena-gauge"),
    el("div", { class: "track" }, ...groups.map((group, index) => el("div", { class: "part", title: `${name(group[key()])}: ${bytes(group.bytes)}`, style: { width: at(group.bytes), background: shade(group, index) } }))),
    mark(found.committed_bytes, "committed", "below"), mark(found.peak_bytes, "peak"),
    mark(found.marks.low, "low mark", "below", "below it held-back groups start again"), mark(found.marks.high, "high mark", "", "above it no group of episodes starts"));
}

function key() { return $("arena-by").value; }
function shade(group, index) { return OTHERS.test(group[key()]) ? "#8b929b" : colour(index); }

// --- the map: squarified areas of the groups, and in each those of its largest blocks

function squarify(items, box) {
  const out = [];
  let { x, y, w, h } = box;
  let rest = items.filter((item) => item.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  let total = rest.reduce((sum, item) => sum + item.bytes, 0);
  while (rest.length && w > 0 && h > 0) {
    const side = Math.min(w, h), scale = w * h / total;
    let taken = 0, sum = 0, worst = Infinity;
    while (taken < rest.length) {
      const next = sum + rest[taken].bytes, depth = next * scale / side;
      const ratios = [rest[0], rest[taken]].map((item) => { const a = item.bytes * scale / depth; return Math.max(a / depth, depth / a); });
      if (Math.max(...ratios) > worst) break;
      worst = Math.max(...ratios); sum = next; taken += 1;
    }
    const depth = sum * scale / side;
    let offset = 0;
    for (const item of rest.slice(0, taken)) {
      const length = item.bytes * scale / depth;
      out.push(w >= h ? { item, x, y: y + offset, w: depth, h: length } : { item, x: x + offset, y, w: length, h: depth });
      offset += length;
    }
    if (w >= h) { x += depth; w -= depth; } else { y += depth; h -= depth; }
    total -= sum;
    rest = rest.slice(taken);
  }
  return out;
}

function place(area) { return { left: `${area.x}px`, top: `${area.y}px`, width: `${area.w}px`, height: `${area.h}px` }; }

function map(groups) {
  const box = $("arena-map");
  if (!found.used_bytes) { fill(box, el("div", { class: "note" }, "Empty: no block is in use.")); return; }
  const suspect = new Set(found.suspects.rows.map(id));
  const named = groups.map((group, index) => ({ ...group, index }));
  const areas = squarify(named, { x: 0, y: 0, w: box.clientWidth, h: box.clientHeight });
  fill(box, ...areas.map((area) => group(area, suspect)));
}

function id(block) { return `${block.slot}.${block.generation}`; }

function group(area, suspect) {
  const by = key(), label = area.item[by], background = shade(area.item, area.item.index);
  const blocks = by === "field" ? [] : found.largest.filter((block) => String(block[by] ?? "") === label && block.bytes);
  const known = blocks.reduce((sum, block) => sum + block.bytes, 0);
  const rest = area.item.bytes - known;
  const inside = squarify(rest > 0 && blocks.length ? [...blocks, { bytes: rest }] : blocks, { x: 0, y: 0, w: area.w, h: area.h });
  const title = `${by} ${name(label)}: ${bytes(area.item.bytes)} in ${area.item.blocks} blocks`;
  return el("div", { class: "group", style: { ...place(area), background }, title },
    area.w > 46 && area.h > 18 ? el("b", {}, name(label)) : null,
    ...inside.map((one) => one.item.slot === undefined
      ? el("div", { class: "rest", style: place(one), title: `${area.item.blocks - blocks.length} smaller blocks` })
      : el("div", { class: `block ${one.item.state} ${suspect.has(id(one.item)) ? "suspect" : ""}`, style: place(one), title: one.item.tag,
        onmouseenter: () => detail(one.item), onclick: () => detail(one.item) })));
}

function detail(block) {
  const readers = block.held_by.length ? `, read by ${block.held_by.join("; ")}` : "";
  const step = block.step === null ? "not shipped" : `step ${block.step}`;
  $("arena-detail").textContent = `${block.tag || "no tag"}: ${bytes(block.bytes)}, ${[block.state, ...block.flags].join(" ")}, ${step}, ${seconds(block.age_s)} old, owner ${block.holder}${readers}`;
}

// --- tables

function table(groups) {
  const total = groups.reduce((sum, group) => sum + group.bytes, 0);
  const shared = groups.some((group) => group.share !== undefined);
  const guaranteed = (group) => (group.share === undefined ? "" : ` of ${bytes(group.share)}${group.borrowed ? `, ${bytes(group.borrowed)} borrowed` : ""}`);
  fill($("arena-groups"),
    row([key(), el("th", { class: "num" }, "blocks"), el("th", { class: "num" }, "bytes"), el("th", { class: "num" }, "")], {}, "th"),
    ...groups.map((group, index) => row([
      el("td", { title: group[key()] }, el("span", { class: "swatch", style: { background: shade(group, index) } }), name(group[key()]), shared ? el("span", { class: "muted" }, guaranteed(group)) : null),
      num(number(group.blocks)), num(bytes(group.bytes), { "data-bytes": group.bytes }), num(total ? percent(group.bytes / total) : "")])),
    row([el("td", {}, "in use"), num(number(found.blocks)), num(bytes(total), { id: "arena-sum", "data-bytes": total }), num("")], { class: "sum" }));
}

function suspects() {
  const { blocks, rows } = found.suspects;
  $("arena-suspect-count").textContent = blocks ? String(blocks) : "nothing";
  $("arena-suspect-count").className = `pill ${blocks ? "bad" : "good"}`;
  fill($("arena-suspects"), ...(blocks ? [row(["block", "bytes", "age", "why"], {}, "th"),
    ...rows.map((one) => row([one.tag || `block ${id(one)}`, num(bytes(one.bytes)), num(seconds(one.age_s)), one.why.join("; ")]))] : []));
}

function events() {
  fill($("arena-events"), row(["ago", "process", "event", "block", "tag"], {}, "th"),
    ...found.events.slice().reverse().map((one) => row([num(seconds(one.age_s)), one.process, one.event, `${one.slot}.${one.generation}`, one.tag])));
}
