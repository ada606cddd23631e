// The process table and the end of each log.
import { $, el, fill, row, num, get, bytes, seconds } from "/static/dom.js";

let logs = {}, text = "";

export function start() {
  $("log-name").addEventListener("change", updateLog);
  $("log-filter").addEventListener("input", showLog);
}

export async function update() {
  const found = await get("/api/processes");
  const names = Object.keys(found.logs);
  if (names.join() !== Object.keys(logs).join()) {
    const before = $("log-name").value;
    fill($("log-name"), ...names.map((name) => el("option", { value: name }, name)));
    $("log-name").value = names.includes(before) ? before : names.includes("orchestrator") ? "orchestrator" : names[0] ?? "";
  }
  const grown = logs[$("log-name").value]?.bytes !== found.logs[$("log-name").value]?.bytes || $("log").dataset.name !== $("log-name").value;
  logs = found.logs;
  const sick = found.processes.filter((one) => one.health !== "alive").length;
  $("process-count").textContent = found.processes.length ? `${found.processes.length} of this run, ${sick ? `${sick} not well` : "all alive"}` : "none: the run is over";
  fill($("process-table"), ...(found.processes.length ? [heading(), ...found.processes.map((one) => process(one, found.now))] : []));
  if (grown) await updateLog();
}

function heading() {
  const spare = (label) => el("th", { class: "num spare" }, label);
  return row(["process", el("th", { class: "num" }, "pid"), el("th", { class: "num" }, "CPU"), el("th", { class: "num" }, "memory"), spare("shared"), spare("threads"), spare("since"), el("th", { class: "spare" }, "last log line")], {}, "th");
}

function process(one, now) {
  const log = logOf(one.role), there = logs[log];
  const cell = (value) => num(value, { class: "num spare" });
  const own = one.rss_bytes === undefined ? undefined : one.rss_bytes - one.shared_bytes;
  return row([
    el("td", { class: "wide", title: `${one.role} ${one.title ?? ""}` }, el("span", { class: `dot ${one.health}`, title: one.health }), part(one) || one.role || "–", one.health === "alive" ? null : el("span", { class: "muted" }, ` ${one.health}`)),
    num(one.pid), num(typeof one.cpu_percent !== "number" ? "–" : `${Math.round(one.cpu_percent)}%`), num(bytes(own), { title: "resident, without what is shared" }),
    cell(bytes(one.shared_bytes)), cell(one.threads ?? "–"), cell(one.started ? seconds(now - one.started) : "–"),
    el("td", { class: "spare muted" }, there ? `${seconds(Math.max(0, now - there.changed))} ago` : "")],
  { class: there ? "pick" : "", onclick: () => { if (there) { $("log-name").value = log; updateLog(); $("log").scrollIntoView({ block: "nearest" }); } } });
}

// What a process is within its role, as its title says it: a worker, a rank.
function part({ role, title }) {
  const called = title?.startsWith("shmrl:") ? title.slice("shmrl:".length) : "";
  return called === role || called.startsWith("env-server:") ? "" : called;
}

function logOf(role) {
  const server = role.match(/^env-server (.+)$/);
  return server ? `envs/${server[1]}` : role.split(":")[0];
}

async function updateLog() {
  const name = $("log-name").value;
  if (!name) return;
  const found = await get(`/api/logs/${name.split("/").map(encodeURIComponent).join("/")}`);
  if (found !== text || $("log").dataset.name !== name) { text = found; $("log").dataset.name = name; showLog(); }
}

function showLog() {
  const box = $("log"), wanted = $("log-filter").value;
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40 || !box.firstChild;
  const lines = text.split("\n").filter((line) => line && (!wanted || line.includes(wanted)));
  fill(box, ...lines.map((line) => el("div", { class: line.match(/^\d\d:\d\d:\d\d ([WE]) /)?.[1] ?? "" }, line)));
  if (atEnd) box.scrollTop = box.scrollHeight;
}
