// What is asked when: everything once, then only what is on the screen, while the tab is in front and the run goes on.
import { $, get, seconds } from "/static/dom.js";
import * as training from "/static/training.js";
import * as arena from "/static/arena.js";
import * as rollouts from "/static/rollouts.js";
import * as processes from "/static/processes.js";

const LIVE_MS = 2000, OVER_MS = 15000;
const EVERY = { run: 2, arena: 2, rollouts: 2, processes: 4 }; // ticks between two looks
let ticks = 0, run = {}, place = { file: "", next: 0 }, first = true, timer = null;
const onScreen = new Set();

async function metrics() {
  let changed = first;
  for (let more = true; more;) {
    const found = await get(`/api/metrics?from=${place.next}&file=${place.file}`);
    const restarted = place.file !== "" && (found.file !== place.file || found.next < place.next);
    changed ||= restarted || found.lines.length > 0;
    training.add(found.lines, restarted);
    place = { file: found.file, next: found.next };
    more = found.more && (found.lines.length > 0);
  }
  return changed;
}

async function tick() {
  timer = null;
  try {
    if (first || run.status !== "running" || ticks % EVERY.run === 0) run = await get("/api/run");
    if (await metrics()) training.show(run);
    head();
    for (const [name, part] of Object.entries({ arena, rollouts, processes })) if (first || (onScreen.has(name) && (run.status !== "running" || ticks % EVERY[name] === 0))) await part.update();
    ticks += 1;
    banner("");
    if (first) document.body.dataset.ready = "true";
    first = false;
  } catch (error) {
    console.warn(error);
    banner(error instanceof TypeError ? `The page's process does not answer. If the run has ended: shmrl page ${run.directory ?? "RUN_DIR"}` : String(error.message));
  }
  if (!document.hidden) timer = setTimeout(tick, run.status === "running" ? LIVE_MS : OVER_MS);
}

function banner(text) { $("banner").hidden = !text; $("banner").textContent = text; }

function head() {
  const step = training.lines.length ? training.lines[training.lines.length - 1].step : 0;
  const looks = { running: "live", finished: "good", failed: "bad", interrupted: "warn" };
  $("run-name").textContent = run.name ?? "a run by hand";
  $("run-status").textContent = run.status ?? "unknown";
  $("run-status").className = `pill ${looks[run.status] ?? ""}`;
  $("run-reason").textContent = run.reason ?? "";
  $("progress-bar").style.width = run.max_steps ? `${Math.min(100, 100 * step / run.max_steps)}%` : "0";
  const parts = [`step ${step}${run.max_steps ? ` of ${run.max_steps}` : ""}`];
  if (!step && run.warmup) parts.unshift(`warm-up step ${run.warmup.step} of ${run.warmup.steps}`);
  if (run.started) parts.push(`${run.ended ? "took" : "running for"} ${seconds((run.ended ?? run.now) - run.started)}`);
  if (run.attempt > 1) parts.push(`attempt ${run.attempt}`);
  parts.push(Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", "), run.directory);
  $("run-facts").textContent = parts.filter(Boolean).join("  ·  ");
  document.title = `${step}${run.max_steps ? `/${run.max_steps}` : ""} ${run.name ?? "shmrl"}`;
}

// --- theme: the system's unless one was chosen

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme(chosen) {
  if (chosen === "auto") localStorage.removeItem("theme"); else localStorage.setItem("theme", chosen);
  applyTheme();
}

function applyTheme() {
  const chosen = localStorage.getItem("theme");
  document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  $("theme").textContent = { light: "☀ light", dark: "☾ dark" }[chosen] ?? "◐ auto";
  if (!first) { training.show(run); rollouts.render(); }
}

$("theme").addEventListener("click", () => {
  const order = ["auto", "light", "dark"];
  theme(order[(order.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % order.length]);
});
dark.addEventListener("change", applyTheme);
applyTheme();

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) onScreen.add(entry.target.id); else onScreen.delete(entry.target.id);
}, { rootMargin: "100px" });
for (const id of ["arena", "rollouts", "processes"]) observer.observe($(id));
document.addEventListener("visibilitychange", () => { if (!document.hidden && timer === null) tick(); });
arena.start();
rollouts.start();
processes.start();
tick();
