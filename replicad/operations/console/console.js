// The console: asks for JSON every two seconds and shows it. Texts of others (names, errors, rows) only ever become the
// text of a node, never HTML. Elements are kept and changed, not made anew, so that the focus and selections stay.

import { DAEMONS, PARTITIONS, STREAMS } from "./console-columns.js";
import { MOST_ROWS, chart, duration, holder, keep, long, make, put, table } from "./console-nodes.js";

const PAUSE = 2_000; // milliseconds between two looks
const LONGEST_PAUSE = 30_000; // after failures
const PATIENCE = 15_000; // for an answer; the daemon answers within 10 s
const MOST_EVENTS = 200; // as many as the daemon keeps
const MOST_NUMBERS = 100; // of parked entries in one request

const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") ?? "";
let events = [];
let lastEvent = 0;
let daemonStart = null;
let history = { step: 30, at: -Infinity, of: new Map() }; // lag and rate of the last hour, by kind and name
const open = new Map(); // tubes whose parked entries are shown: name to what was answered last
const chosen = new Map(); // tube to the set of numbers that are ticked

// --- asking ---

class Refused extends Error {
  constructor(status, text) {
    super(text || `status ${status}`);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Refused(answer.status, (await answer.text()).trim());
  return JSON.parse(await answer.text(), exact);
}

/** Ids have 64 bits, and numbers 53: a larger one becomes a BigInt, where the browser tells its digits. */
function exact(key, value, context) {
  const tooLarge = Number.isInteger(value) && !Number.isSafeInteger(value);
  return tooLarge && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
}

async function look() {
  const status = await ask("status");
  const clients = await ask("clients");
  let news = await ask(`events?after=${lastEvent}`);
  if (news.started !== daemonStart) { // it was started again, and counts from 1
    if (lastEvent > 0) news = await ask("events?after=0");
    daemonStart = news.started;
    events = [];
  }
  lastEvent = news.last;
  events = [...events, ...news.events].slice(-MOST_EVENTS);
  if (performance.now() - history.at >= 1000 * history.step) {
    const found = await ask("history");
    const of = new Map(found.series.map((one) => [`${one.kind} ${one.name}`, one]));
    history = { step: found.step, at: performance.now(), of };
  }
  for (const tube of [...open.keys()]) {
    try {
      open.set(tube, await ask(`parked?tube=${encodeURIComponent(tube)}`));
    } catch (error) {
      if (error.status !== 404) throw error;
      open.delete(tube);
    }
  }
  return { status, clients };
}

async function run() {
  let pause = PAUSE;
  for (;;) {
    if (document.hidden) await happens(document, "visibilitychange");
    try {
      const seen = await look();
      pause = PAUSE;
      last = seen;
      $("sign").hidden = true;
      $("main").hidden = false;
      show(seen);
    } catch (error) {
      if (error.status === 401) {
        await signIn(error.message);
        continue;
      }
      pause = Math.min(2 * pause, LONGEST_PAUSE);
      say(`no news (${error.message}); trying again every ${Math.round(pause / 1000)} s`, "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function signIn(why) {
  $("main").hidden = true;
  $("sign").hidden = false;
  $("refused").textContent = token ? why : "";
  say("not signed in", "warn");
  $("token").focus();
  await happens($("sign"), "submit", (event) => event.preventDefault());
  token = $("token").value.trim();
  $("token").value = "";
  sessionStorage.setItem("token", token);
}

function say(text, tone) {
  put($("state"), text);
  $("state").className = tone;
}

const happens = (target, name, also = () => {}) =>
  new Promise((resolve) => target.addEventListener(name, (event) => resolve(also(event)), { once: true }));

// --- what is shown ---

const plain = (title, name) => ({ title, of: (row) => row[name] });
const label = (title, name) => ({ title, of: (row) => String(row[name]) }); // a number that counts nothing
const FORMS = { // of the columns that are declared in the daemon
  plain: (name) => plain("", name),
  label: (name) => label("", name),
  seconds: (name) => ({ of: (row) => long(row[name]) }),
  ago: (name) => ({ of: (row) => `${duration(row[name])} ago` }),
  time: (name) => ({ of: (row) => moment(row[name]) }),
  list: (name) => ({ of: (row) => row[name].join(", ") }),
  some: (name) => ({ of: (row) => row[name] || null }),
  failed: (name) => ({ of: (row) => (row[name] ? [row[name].toLocaleString("en"), "bad"] : null) }),
  state: (name) => ({ of: (row) => [row[name], tone(row[name])] }),
  alive: (name) => ({ of: (row) => [row[name], row.alive ? "good" : "bad"] }),
  holder: (name) => ({ fill: (cell, row) => holder(cell, row[name]) }),
  problem: (name) => ({ of: (row) => [row[name] ?? (row.late_rows ? `${row.late_rows} late rows` : null), "bad"] }),
  reader: (name) => ({ of: (row) => row[name] ?? (row.pods || row.backfill_pods ? ["no reader", "bad"] : ["none", "quiet"]) }),
  lease: (name) => ({ of: (row) => row.holder && (row[name] ? ["alive", "good"] : [`silent for ${duration(row.silent_seconds)}`, "bad"]) }),
  own_name: (name) => ({ of: (row) => (row.own ? `${row[name]} (this one)` : row[name]) }),
  host: (name) => ({ of: (row) => row[name] ?? "a socket" }),
};
const shown = (columns) => columns.map(({ title, name, form }) => ({ ...FORMS[form](name), title }));
const [STREAM, PARTITION, DAEMON] = [STREAMS, PARTITIONS, DAEMONS].map(shown);
STREAM.splice(3, 0, { title: "Last hour", fill: (cell, row) => lastHour(cell, "stream", row.name, "rows") });
const PARKED = [
  { title: "Choose", fill: tick },
  label("Number", "number"),
  label("Shard", "shard"),
  plain("Op", "op"),
  { title: "Ids", of: (row) => row.ids.join(", ") + (row.id_count > row.ids.length ? `, ... (${row.id_count})` : "") },
  plain("Tries", "tries"),
  { title: "Since", of: (row) => moment(row.at) },
  plain("Error", "error"),
];
const CLIENT = [
  label("Number", "number"),
  plain("Name", "name"),
  plain("Address", "peer"),
  plain("Client", "access"),
  { title: "Connected", of: (row) => duration(row.connected_s) },
  { title: "Sent", of: (row) => `${(row.sent / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB` },
  { title: "Follows", of: (row) => (row.known ? row.following.map(followed).join(", ") : ["newcomer", "quiet"]) },
  { title: "Behind", of: (row) => long(most(row.following.map((one) => one.behind_s))) },
];
const AGO = { title: "Ago", of: (row) => duration(row.ago_s) };
const CUT = [AGO, plain("Name", "name"), plain("Address", "peer"), plain("Client", "access"), plain("Reason", "reason"), plain("Why", "why")];
const TROUBLE = [
  { title: "Daemon", of: (row) => row.daemon ?? "this one" },
  { title: "What", of: (row) => `${row.kind} ${row.name}` },
  { title: "For", of: (row) => duration(row.lasting_seconds) },
  plain("Code", "code"),
  { title: "Reason", of: (row) => [row.reason, "bad"] },
];
const EVENT = [
  { title: "Time", of: (row) => moment(row.at) },
  { title: "Level", of: (row) => [row.level, row.level === "warning" ? "warn" : row.level === "info" ? "quiet" : "bad"] },
  plain("Event", "event"),
  { title: "Fields", of: (row) => Object.entries(row.fields).map(([name, value]) => `${name}=${value}`).join(" ") },
];

const tone = (state) => (state === "ok" ? "good" : state === "troubled" || state === "paused" ? "warn" : "bad");
const lastHour = (cell, kind, name, what) => chart(cell, history.of.get(`${kind} ${name}`), history.step, what);

// A time with its zone: the reader's machine and the daemon's may be in different ones.
const moment = (seconds) => new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "short", timeStyle: "long" });
const followed = (one) =>
  one.ids_left == null ? one.stream : `${one.stream} (catches up, ${one.ids_left.toLocaleString("en")} ids to go)`;
const most = (values) => values.reduce((high, one) => (one == null ? high : Math.max(high ?? 0, one)), null);

function show({ status, clients }) {
  const wanted = $("filter").value.trim().toLowerCase();
  const named = (row) => !wanted || [row.name, row.peer, row.access].some((one) => one?.toLowerCase().includes(wanted));
  const { streams = [], tubes = [], backfills = [], daemons = [], troubles = [], reports = [], obstacles, server } = status;
  put($("server"), status.server_name);
  const places = [...troubles, ...reports].map((one) => `${one.kind} ${one.name}`);
  for (const one of streams) if (one.state !== "ok" || one.late_rows) places.push(`stream ${one.name}`);
  for (const one of tubes) if (one.state !== "ok" || one.partitions.some(trouble)) places.push(`tube ${one.name}`);
  const number = new Set(places).size;
  document.title = `${status.ready && !number ? "" : "(!) "}${status.server_name} - replicad`;
  const faults = number ? `, with troubles in ${number} place${number === 1 ? "" : "s"}` : "";
  if (status.ready) {
    say(`ready${faults}`, faults ? "warn" : "good");
  } else {
    say(`not ready${obstacles.length ? `: ${obstacles.length} not served` : ""}`, "bad");
  }
  keep($("obstacles"), obstacles, (one) => `${one.kind} ${one.name} ${one.why}`, () => make("li"), (node, one) => put(node, one.why));
  table($("stream-list"), STREAM, streams.filter(named), (row) => row.name, "There are no streams: replicad streams add");
  showTubes(tubes.filter(named), backfills);
  put($("connected"), `${clients.connected.toLocaleString("en")} connected`);
  const inOrder = clients.clients.filter(named).sort((a, b) => a.number - b.number);
  table($("client-list"), CLIENT, inOrder, (row) => row.number, "Nobody is connected.");
  table($("cut-list"), CUT, clients.cuts.filter(named), (row) => `${row.at} ${row.peer}`, "Nobody was cut.");
  const ended = Object.entries(clients.closed).map(([reason, number]) => `${reason} ${number.toLocaleString("en")}`);
  put($("closed"), `Ended since the start: ${ended.join(", ") || "none"}`);
  showFacts(status, server);
  const life = (row) => [row.name, row.pid, row.host, row.started_at].join(" ");
  table($("daemon-list"), DAEMON, daemons.filter(named), life, "None has reported itself yet.");
  const place = (row) => [row.daemon, row.kind, row.name, row.cause].join(" ");
  table($("trouble-list"), TROUBLE, [...troubles, ...reports], place, "No daemon reports any.");
  table($("event-list"), EVENT, [...events].reverse(), (row) => row.number, "There are none yet.");
}

function showFacts(status, server) {
  const facts = [["This one", `${status.server_name}, replicad ${status.version}, up for ${duration(status.uptime_seconds)}`]];
  if (server.database) { // else it was not read lately
    facts.unshift(["Daemons", `${server.daemons} connected to this database`]);
    facts.push(["Database", `${server.database} at ${server.host}, PostgreSQL ${server.version}${server.standby ? " (a standby)" : ""}`]);
    facts.push(["Sessions", `${server.sessions} of ${server.max_sessions}, as role ${server.role}`]);
  }
  const parts = facts.flatMap(([name, text]) => [{ key: `${name}?`, tag: "dt", text: name }, { key: name, tag: "dd", text }]);
  keep($("facts"), parts, (one) => one.key, (one) => make(one.tag), (node, one) => put(node, one.text));
}

// --- tubes, and what is parked in them ---

function showTubes(tubes, backfills) {
  const list = $("tube-list");
  const items = tubes.length ? tubes.slice(0, MOST_ROWS) : [{ name: "", none: true }];
  keep(list, items, (one) => one.name, beginTube, (node, tube) => {
    if (tube.none) return;
    const part = (name) => node.querySelector(`.${name}`);
    put(part("name"), tube.name);
    put(part("state"), tube.state);
    part("state").className = `state ${tone(tube.state)}`;
    const more = tube.tables.length >= 10 ? " and more" : "";
    put(part("tables"), tube.tables.length ? `of ${tube.tables.join(", ")}${more}` : "");
    put(part("problem"), tube.problem);
    part("problem").className = `problem ${tone(tube.state)}`;
    lastHour(part("chart"), "tube", tube.name, "pods");
    put(part("pause"), tube.state === "paused" ? "Resume" : "Pause");
    holder(part("holder"), tube.held_back?.seconds >= 1 ? tube.held_back : null);
    table(part("partitions"), PARTITION, worstFirst(tube.partitions), (row) => row.partition, "");
    const own = backfills.filter((one) => one.name === tube.name);
    keep(part("backfills"), own, (one) => one.table, () => make("p", {}, make("progress"), make("span")), showBackfill);
    part("cancel").hidden = own.length === 0;
    const number = tube.partitions.reduce((sum, one) => sum + (one.parked ?? 0), 0);
    showParked(node, tube.name, number);
  });
}

function beginTube(tube) {
  if (tube.none) return make("p", { className: "quiet", textContent: "There are no tubes: replicad tubes create" });
  const div = (className) => make("div", { className });
  const button = (className, textContent = "") => make("button", { type: "button", className, textContent });
  const [toggle, pause] = [button("toggle"), button("pause", "Pause")];
  const [cancel, replay, drop] = [button("cancel", "Cancel backfills"), button("replay", "Replay what is ticked"), button("drop", "Drop what is ticked")];
  const result = make("p", { className: "result" });
  result.setAttribute("role", "status");
  const heading = make("h3", {}, make("span", { className: "name" }), " ", make("span", { className: "state" }), " ", make("span", { className: "tables quiet" }));
  toggle.addEventListener("click", () => toggleParked(tube.name));
  replay.addEventListener("click", () => replayChosen(tube.name, result));
  drop.addEventListener("click", () => dropChosen(tube.name, result));
  pause.addEventListener("click", () => pauseOrResume(tube.name, pause.textContent === "Resume", result));
  cancel.addEventListener("click", () => cancelBackfills(tube.name, result));
  const parked = make("div", { className: "parked" }, div("entries"), replay, " ", drop);
  const about = [make("p", { className: "problem" }), div("holder"), div("chart"), div("partitions"), div("backfills")];
  return make("article", {}, heading, ...about, pause, " ", cancel, " ", toggle, parked, result);
}

const worstFirst = (rows) =>
  rows.length <= MOST_ROWS ? rows : [...rows].sort((a, b) => trouble(b) - trouble(a) || a.partition - b.partition);
const trouble = (row) => (row.holder && !row.lease_alive) + (row.pods && !row.holder ? 2 : 0) + (row.parked ? 1 : 0);

function showBackfill(node, one) {
  const [bar, text] = node.children;
  if (one.of > 0) {
    bar.max = one.of;
    bar.value = Math.min(one.ids, one.of);
  }
  const of = one.of ? ` of about ${one.of.toLocaleString("en")}` : "";
  put(text, ` backfill of ${one.table}: ${one.ids.toLocaleString("en")}${of} ids, last ${duration(one.idle_seconds)} ago`);
}

function showParked(node, tube, number) {
  const toggle = node.querySelector(".toggle");
  const found = open.get(tube);
  toggle.hidden = number === 0 && found === undefined;
  put(toggle, found === undefined ? `Show ${number.toLocaleString("en")} parked` : "Hide what is parked");
  toggle.setAttribute("aria-expanded", String(found !== undefined));
  const parked = node.querySelector(".parked");
  parked.hidden = found === undefined;
  const entries = found?.parked ?? [];
  const ticked = chosen.get(tube) ?? new Set();
  for (const one of ticked) if (!entries.some((entry) => entry.number === one)) ticked.delete(one);
  const rows = entries.map((one) => ({ ...one, tube }));
  table(node.querySelector(".entries"), PARKED, rows, (row) => row.number, "Nothing is parked.");
  for (const name of [".replay", ".drop"]) node.querySelector(name).disabled = ticked.size === 0;
}

function tick(cell, row) {
  if (cell.childElementCount > 0) return;
  const box = make("input", { type: "checkbox", ariaLabel: `Choose ${row.number}` });
  box.addEventListener("change", () => {
    const ticked = chosen.get(row.tube) ?? new Set();
    chosen.set(row.tube, ticked);
    if (box.checked) ticked.add(row.number);
    else ticked.delete(row.number);
    for (const name of [".replay", ".drop"]) box.closest("article").querySelector(name).disabled = ticked.size === 0;
  });
  cell.append(box);
}

async function toggleParked(tube) {
  if (open.delete(tube)) return again();
  try {
    open.set(tube, await ask(`parked?tube=${encodeURIComponent(tube)}`));
  } catch (error) {
    say(error.message, "bad");
  }
  return again();
}

const chosenOf = (tube) => [...(chosen.get(tube) ?? [])].slice(0, MOST_NUMBERS);
const entries = (numbers) => `${numbers.length} parked ${numbers.length === 1 ? "entry" : "entries"}`;

async function replayChosen(tube, result) {
  const numbers = chosenOf(tube);
  const question = `Put ${entries(numbers)} back into tube ${tube}? Workers get them again.`;
  await change(result, question, "Replay", "replay", { tube, numbers }, (done) => `${done.replayed} put back`);
}

async function dropChosen(tube, result) {
  const numbers = chosenOf(tube);
  const question = `Delete ${entries(numbers)} of tube ${tube}? Their ids reach no worker any more.`;
  await change(result, question, "Delete", "drop", { tube, numbers }, (done) => `${done.dropped} deleted`);
}

async function pauseOrResume(tube, resume, result) {
  const question = resume
    ? `Resume tube ${tube}? Workers get its pods again.`
    : `Pause tube ${tube}? Changes are recorded, and workers get no pods until it is resumed.`;
  const label = resume ? "Resume it" : "Pause it";
  await change(result, question, label, resume ? "resume" : "pause", { tube }, () => (resume ? "resumed" : "paused"));
}

async function cancelBackfills(tube, result) {
  const question = `Cancel all backfills of tube ${tube}? Ids that are in the tube stay.`;
  await change(result, question, "Cancel them", "cancel", { tube }, (done) => `${done.cancelled} cancelled`);
}

/** Ask whether it is meant, send it, and say what was done. */
async function change(result, question, label, path, body, said) {
  put($("question"), question);
  put($("yes"), label);
  $("sure").returnValue = "no";
  $("sure").showModal();
  await happens($("sure"), "close");
  if ($("sure").returnValue !== "yes") return;
  try {
    const done = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    put(result, said(done));
    result.className = "result good";
    if (open.has(body.tube)) open.set(body.tube, await ask(`parked?tube=${encodeURIComponent(body.tube)}`));
  } catch (error) {
    put(result, error.message);
    result.className = "result bad";
  }
  again();
}

let last = null;
function again() {
  if (last !== null) show(last);
}

$("filter").addEventListener("input", again);
run();
