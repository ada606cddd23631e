// Charts over steps, from metrics.jsonl. Lines come in once and are kept here; the server keeps nothing.
import { $, el, fill, tile, number, bytes, seconds, colour } from "/static/dom.js";
import { draw } from "/static/plots.js";

const MOST_POINTS = 1500;

export const lines = [];

const one = (metric, name, more = {}) => () => [{ metric, name, ...more }];
const CHARTS = [
  { id: "reward", title: "Reward", series: rewards },
  { id: "loss", title: "Loss", series: one("train/loss", "loss") },
  { id: "mismatch-kl", title: "Mismatch KL", series: one("train/mismatch_kl", "mismatch KL"), log: true },
  { id: "entropy", title: "Entropy", series: one("train/entropy", "entropy") },
  { id: "lag", title: "Off-policy lag", unit: "versions", series: () => [{ metric: "off_policy/mean", name: "mean" }, { metric: "off_policy/max", name: "max", thin: true }] },
  { id: "throughput", title: "Throughput", unit: "tokens/s", series: one("train/tokens_per_s", "tokens/s"), zero: true },
  { id: "step-time", title: "Step time", unit: "s", zero: true, series: () => [
    { metric: "time/step", name: "step" },
    ...["collect", "fetch_max", "assemble", "train", "publish"].map((part) => ({ metric: `time/${part}`, name: part.replace("_", " "), thin: true }))] },
  { id: "episodes", title: "Episodes", unit: "per step", bars: true, series: () =>
    ["shipped", "filtered", "stale", "failed", "cancelled", "timed_out"].map((end) => ({ metric: `episodes/${end}`, name: end.replace("_", " ") })) },
  { id: "arena-use", title: "Arena", unit: "bytes", zero: true, series: () => [{ metric: "arena/used_bytes", name: "used at the step's end" }, { metric: "arena/peak_bytes", name: "peak", thin: true }], bytes: true },
];

function rewards() {
  const names = new Set(lines.flatMap((line) => Object.keys(line)));
  const sources = [...names].filter((name) => name.startsWith("train/reward/")).sort();
  const evals = [...names].filter((name) => /^eval\/.*\/reward$/.test(name)).sort();
  return [{ metric: "train/reward", name: "train" },
    ...(sources.length > 1 ? sources.map((metric) => ({ metric, name: metric.slice("train/reward/".length), thin: true })) : []),
    ...evals.map((metric) => ({ metric, name: `eval ${metric.slice("eval/".length, -"/reward".length)}`, marks: true }))];
}

export function add(found, restarted) {
  if (restarted) lines.length = 0;
  lines.push(...found);
}

export function show(run) {
  $("training-empty").hidden = lines.length > 0;
  $("tiles").hidden = $("charts").hidden = !lines.length;
  if (!lines.length) return;
  tiles(run);
  const box = $("charts");
  for (const chart of CHARTS) {
    let plot = $(`chart-${chart.id}`);
    if (!plot) {
      plot = el("div", { id: `chart-${chart.id}`, class: "plot" });
      box.append(el("div", { class: "chart" }, el("h3", {}, chart.title, chart.unit ? el("span", { class: "muted" }, chart.unit) : null), plot));
    }
    draw(plot, traces(chart), axes(chart));
  }
}

function axes(chart) {
  const yaxis = chart.log ? { type: "log", exponentformat: "power", nticks: 5, minallowed: -9 } : { rangemode: chart.zero ? "tozero" : "normal" };
  return { yaxis: chart.bytes ? { ...yaxis, exponentformat: "SI", tickformat: ".3~s", ticksuffix: "B" } : yaxis,
    xaxis: { tickformat: "d", rangemode: "normal" }, barmode: "stack", bargap: 0.1,
    showlegend: chart.series().filter(present).length > 1 };
}

function present({ metric }) { return lines.some((line) => line[metric] !== null && line[metric] !== undefined && (!metric.startsWith("episodes/") || line[metric])); }

function traces(chart) {
  return chart.series().filter(present).map((series, index) => {
    const points = thinned(lines.filter((line) => typeof line[series.metric] === "number").map((line) => [line.step, line[series.metric]]));
    const common = { x: points.map((p) => p[0]), y: points.map((p) => p[1]), name: series.name };
    if (chart.bars) return { ...common, type: "bar", marker: { color: colour(index) } };
    const few = points.length < 30;
    return { ...common, type: "scatter", mode: series.marks || few ? "lines+markers" : "lines", connectgaps: true,
      marker: { size: series.marks ? 7 : 4, color: colour(index), symbol: series.marks ? "diamond" : "circle" },
      line: { width: series.thin ? 1.2 : 2, color: colour(index), dash: series.marks ? "dot" : "solid" } };
  });
}

function thinned(points) {
  const every = Math.ceil(points.length / MOST_POINTS);
  return every < 2 ? points : points.filter((_, index) => index % every === 0 || index === points.length - 1);
}

function latest(metric) {
  for (let at = lines.length - 1; at >= 0; at -= 1) if (typeof lines[at][metric] === "number") return lines[at][metric];
  return null;
}

function tiles(run) {
  const first = lines.find((line) => typeof line["train/reward"] === "number");
  const mean = recent("time/step");
  const left = run.max_steps && lines.length ? (run.max_steps - lines[lines.length - 1].step) * mean : null;
  fill($("tiles"),
    tile("Reward", number(latest("train/reward")), first ? `first step ${number(first["train/reward"])}` : ""),
    tile("Loss", number(latest("train/loss"))),
    tile("Mismatch KL", number(latest("train/mismatch_kl"))),
    tile("Entropy", number(latest("train/entropy"))),
    tile("Off-policy lag", number(latest("off_policy/mean")), `max ${number(latest("off_policy/max"))}, dropped ${number(latest("off_policy/dropped"))}`),
    tile("Tokens/s", number(latest("train/tokens_per_s"))),
    tile("Step time", seconds(latest("time/step")), run.status === "running" && left > 0 ? `about ${seconds(left)} left` : `mean ${seconds(mean)}`),
    tile("Arena peak", bytes(latest("arena/peak_bytes"))));
}

function recent(metric) {
  const found = lines.slice(-20).map((line) => line[metric]).filter((value) => typeof value === "number");
  return found.length ? found.reduce((a, b) => a + b, 0) / found.length : NaN;
}
