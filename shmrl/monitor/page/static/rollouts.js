// Sampled rollouts: the conversation, and every token with its log-probability, mask size and expert load.
import { $, el, fill, get, number, percent } from "/static/dom.js";
import { draw, muted } from "/static/plots.js";

const VIEWS = {
  logprobs: { label: "Log-probability", note: "of the drawn token, by the sampler", low: "rgba(197,55,44,", worst: "unlikely", best: "certain" },
  mask: { label: "Mask size", note: "ids that the sampler kept; none: all of them", low: "rgba(47,111,192,", worst: "many", best: "few" },
  load: { label: "Expert load", note: "choices per expert that it went to, 1 = balance", low: "rgba(183,121,31,", worst: "crowded", best: "balanced" },
};
let steps = [], step = null, index = 0, view = "logprobs", shown = null;

export function start() {
  $("rollout-step").addEventListener("change", (event) => pick(Number(event.target.value)));
  $("rollout-back").addEventListener("click", () => move(-1));
  $("rollout-on").addEventListener("click", () => move(1));
  $("rollout-follow").addEventListener("change", update);
}

export async function update() {
  const found = (await get("/api/rollouts")).steps;
  if (found.length !== steps.length || found[found.length - 1] !== steps[steps.length - 1]) {
    steps = found;
    fill($("rollout-step"), ...steps.slice().reverse().map((one) => el("option", { value: one }, one)));
    if (step !== null) $("rollout-step").value = step;
  }
  $("rollouts-empty").hidden = steps.length > 0;
  const newest = steps[steps.length - 1];
  if (steps.length && (step === null || !steps.includes(step) || ($("rollout-follow").checked && step !== newest))) await load(newest);
}

function pick(one) { $("rollout-follow").checked = false; return load(one); }
function move(by) { const at = steps.indexOf(step) + by; if (at >= 0 && at < steps.length) pick(steps[at]); }

async function load(wanted) {
  step = wanted;
  $("rollout-step").value = step;
  const rows = (await get(`/api/rollouts/${step}`)).rollouts;
  if (step !== wanted) return;
  fill($("rollout-list"), ...rows.map((one) => el("li", {}, el("button", { type: "button", "data-index": one.index, onclick: () => open(one.index) },
    el("span", { class: "line" }, el("b", {}, one.source), el("span", {}, `reward ${number(one.reward)}`)),
    el("span", { class: "line muted" }, el("span", {}, one.task_id), el("span", {}, `${one.tokens} tokens`)),
    el("span", { class: "preview" }, one.preview)))));
  await open(Math.min(index, Math.max(0, rows.length - 1)));
}

async function open(wanted) {
  index = wanted;
  for (const button of $("rollout-list").querySelectorAll("button")) button.setAttribute("aria-current", String(Number(button.dataset.index) === index));
  shown = await get(`/api/rollouts/${step}/${index}`);
  render();
}

export function render() {
  if (!shown) return;
  const chip = (label, value) => el("span", { class: "chip" }, `${label} `, el("b", {}, value));
  const parts = [el("div", { class: "chips" }, chip("reward", number(shown.reward)), chip("advantage", number(shown.advantage)),
    chip("tokens", `${shown.sampled_tokens} of ${shown.tokens} sampled`), chip("turns", shown.num_turns), chip("end", shown.stop_reason ?? "–"),
    chip("policy", shown.version_start === shown.version_end ? shown.version_start : `${shown.version_start} – ${shown.version_end}`),
    ...Object.entries(shown.rewards ?? {}).map(([name, value]) => chip(name, number(value))))];
  for (const message of shown.messages ?? []) {
    const text = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? message, null, 1);
    parts.push(el("div", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("b", {}, message.role ?? ""), text));
  }
  if (shown.per_token) parts.push(...tokens(shown.per_token));
  else parts.push(el("p", { class: "muted" }, "Saved without its tokens."));
  fill($("rollout"), ...parts);
  if (shown.per_token) charts(shown.per_token);
}

function values(facts) { return facts[view]; }
function seen(facts, at) { return view === "load" ? facts.load && facts.load[at] > 0 : facts.sampled[at] && (view !== "mask" || facts.mask); }

function heat(facts) {
  const found = values(facts);
  if (!found) return () => 0;
  const here = found.filter((_, at) => seen(facts, at));
  const most = Math.max(...here.map(Math.abs), 1e-9);
  if (view === "logprobs") return (at) => Math.min(1, -found[at] / 5);
  if (view === "mask") return (at) => found[at] / most;
  return (at) => Math.max(0, Math.min(1, (found[at] - 1) / Math.max(most - 1, 1e-9)));
}

function tokens(facts) {
  const choice = el("select", { id: "rollout-view", onchange: (event) => { view = event.target.value; render(); } },
    ...Object.entries(VIEWS).map(([name, one]) => el("option", { value: name }, one.label)));
  choice.value = view;
  const { low, note, worst, best } = VIEWS[view], strength = heat(facts);
  const detail = el("span", { id: "token-detail", class: "muted" }, "Point at a token.");
  const cut = facts.start ? [el("span", { class: "muted" }, `… ${facts.start} earlier tokens are not saved. `)] : [];
  const spans = facts.ids.map((id, at) => el("span", {
    class: facts.sampled[at] ? "sampled" : "", "data-at": at,
    style: { background: seen(facts, at) ? `${low}${(0.75 * strength(at)).toFixed(3)})` : "transparent" },
    onmouseenter: () => { detail.textContent = about(facts, at); }, onclick: () => { detail.textContent = about(facts, at); },
  }, facts.text ? visible(facts.text[at]) : `${id} `));
  return [
    el("div", { class: "legend" }, el("label", {}, "colour by ", choice), el("span", { class: "muted" }, best),
      el("span", { class: "ramp", style: { background: `linear-gradient(90deg, transparent, ${low}0.75))` } }), el("span", { class: "muted" }, `${worst} (${note})`)),
    el("div", { class: "tokens mono", id: "tokens" }, ...cut, ...spans),
    el("p", { class: "detail" }, detail),
    el("div", { class: "token-charts" }, el("div", {}, el("h3", {}, VIEWS[view].label), el("div", { id: "token-chart", class: "plot" })),
      el("div", {}, el("h3", {}, "Choices per expert and layer"), el("div", { id: "expert-chart", class: "plot" }))),
  ];
}

function visible(text) { return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "·"; }

function about(facts, at) {
  const text = facts.text ? `${JSON.stringify(facts.text[at])}, id ` : "id ";
  const parts = [`${text}${facts.ids[at]} at ${facts.start + at}`];
  if (facts.sampled[at]) parts.push(`log-probability ${facts.logprobs[at].toFixed(3)} (${percent(Math.exp(facts.logprobs[at]))})`);
  else parts.push("not sampled");
  if (facts.mask && facts.sampled[at]) parts.push(facts.mask[at] ? `${facts.mask[at]} ids kept` : "no ids excluded");
  if (facts.load && facts.load[at] > 0) parts.push(`expert load ${facts.load[at].toFixed(2)}`);
  return parts.join(" · ");
}

function charts(facts) {
  const found = values(facts);
  const places = facts.ids.map((_, at) => at).filter((at) => found && seen(facts, at));
  draw($("token-chart"), [{ type: "bar", x: places.map((at) => facts.start + at), y: places.map((at) => found[at]),
    customdata: places.map((at) => (facts.text ? JSON.stringify(facts.text[at]).replace(/</g, "‹").replace(/%/g, "％") : facts.ids[at])),
    hovertemplate: "%{customdata}: %{y}<extra></extra>", marker: { color: `${VIEWS[view].low}0.85)` } }],
  { bargap: 0.05, showlegend: false, hovermode: "closest", xaxis: { title: { text: "position", font: { size: 11 } } }, annotations: places.length ? [] : [nothing("nothing was recorded")] });
  if (!facts.expert_load) { draw($("expert-chart"), [], { annotations: [nothing("no routing was captured")] }); return; }
  draw($("expert-chart"), [{ type: "heatmap", z: facts.expert_load, x: facts.expert_load[0].map((_, expert) => expert),
    y: facts.layers.map(String), colorscale: "Viridis", colorbar: { thickness: 8, outlinewidth: 0, tickfont: { size: 10 } },
    hovertemplate: "layer %{y}, expert %{x}: %{z} choices<extra></extra>" }],
  { hovermode: "closest", xaxis: { title: { text: "expert", font: { size: 11 } }, showgrid: false }, yaxis: { title: { text: "layer", font: { size: 11 } }, type: "category", autorange: "reversed", showgrid: false } });
}

function nothing(text) { return { text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: muted() } }; }
