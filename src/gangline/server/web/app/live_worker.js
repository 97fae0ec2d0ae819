// One stream of events for all open pages of a browser: a browser opens at most six connections to a server over
// HTTP/1.1, and twenty pages would take them all. The worker also keeps the service's state for all of them: it applies
// each event, and reads the whole state only while a page is in view, and the more rarely the longer a reading takes.

import { afterEvent } from "./after_event.js";

const KINDS = [
  "task.submitted", "task.started", "task.ended", "session.leased", "session.stage", "session.requeued",
  "session.released", "session.ended", "node.joined", "callback.delivered", "callback.expired",
];
const SHOW_MS = 1000;
const LEAST_MS = 5000;
const MOST_MS = 10_000;
/** A reading is followed by a hundred times its own length without one, so that it costs the service a hundredth. */
const REST = 100;

/** @typedef {{port: MessagePort, visible: boolean}} Viewer */

/** @type {Set<Viewer>} */
const viewers = new Set();
/** @type {EventSource | null} */
let stream = null;
let lastEvent = "";
let mayReadAt = 0;
let timer = 0;
let shownAt = 0;
let showing = 0;
let reading = false;
let again = false;
/** @type {import("./live.js").State | null} */
let latest = null;

/** @param {object} message */
function broadcast(message) {
  for (const { port } of viewers) port.postMessage(message);
}

/** Open the stream while somebody looks, and close it when nobody does. */
function attend() {
  const wanted = [...viewers].some((viewer) => viewer.visible);
  if (wanted && stream === null) {
    stream = new EventSource(lastEvent === "" ? "/v1/events?calls=1" : `/v1/events?calls=1&after=${lastEvent}`);
    for (const kind of KINDS) stream.addEventListener(kind, happened);
    stream.addEventListener("session.calls", ({ data }) => broadcast({ calls: JSON.parse(data) }));
    stream.addEventListener("open", () => broadcast({ connected: true }));
    stream.addEventListener("error", () => broadcast({ connected: false }));
    read();
  } else if (!wanted && stream !== null) {
    stream.close();
    stream = null;
    clearTimeout(timer);
    timer = 0;
  }
}

/** @param {MessageEvent<string>} event */
function happened(event) {
  lastEvent = event.lastEventId;
  /** @type {import("./types").ServiceEvent} */
  const what = JSON.parse(event.data);
  broadcast({ event: what });
  if (latest !== null) latest = afterEvent(latest, what);
  showing ||= setTimeout(show, Math.max(0, shownAt + SHOW_MS - Date.now()));
  plan(Math.max(0, mayReadAt - Date.now()));
}

/** Give the state to all pages, once a second at most. */
function show() {
  showing = 0;
  shownAt = Date.now();
  if (latest !== null) broadcast({ state: latest });
}

/** @param {number} delay Milliseconds. */
function plan(delay) {
  clearTimeout(timer);
  timer = setTimeout(read, delay);
}

async function read() {
  if (reading) {
    again = true;
    return;
  }
  reading = true;
  const began = Date.now();
  try {
    const paths = ["/v1/status", "/v1/tasks?limit=100", "/v1/sessions?limit=300"];
    const answers = await Promise.all(paths.map((path) => fetch(path, { headers: { Accept: "application/json" } })));
    const refused = answers.find((answer) => !answer.ok);
    if (refused !== undefined) {
      broadcast({ problem: (await refused.json()).detail });
    } else {
      const [status, tasks, sessions] = await Promise.all(answers.map((answer) => answer.json()));
      latest = { status, tasks: tasks.tasks, sessions: sessions.sessions };
      show();
    }
  } catch (error) {
    broadcast({ problem: `The server does not answer (${error}).` });
  }
  reading = false;
  const rest = Math.min(MOST_MS, Math.max(LEAST_MS, REST * (Date.now() - began)));
  mayReadAt = Date.now() + rest;
  if (stream !== null) plan(again ? rest : MOST_MS);
  again = false;
}

globalThis.addEventListener("connect", (event) => {
  const port = /** @type {MessageEvent} */ (event).ports[0];
  /** @type {Viewer} */
  const viewer = { port, visible: true };
  viewers.add(viewer);
  port.onmessage = ({ data }) => {
    if (data === "gone") viewers.delete(viewer);
    else viewer.visible = data === "visible";
    attend();
  };
  if (latest !== null) port.postMessage({ state: latest });
  attend();
});
