// One stream of events for all open pages of a browser: a browser opens at most six connections to a server over
// HTTP/1.1, and twenty pages would take them all. The worker also keeps the service's state for all of them: it applies
// each event, and reads the state only while a page is in view, and the more rarely the longer a reading takes. A page
// gets the state if it shows the service, and else the events of the task or session that it shows.

import { afterEvent } from "./after_event.js";

const KINDS = [
  "task.submitted", "task.started", "task.ended", "session.leased", "session.stage", "session.requeued",
  "session.released", "session.ended", "node.joined", "node.left", "callback.delivered", "callback.expired",
];
/** The state is drawn once a second, and more rarely in many pages: their browser shares the server's processors. */
const SHOW_MS = 1000;
const PAGES_A_SECOND = 5;
const LEAST_MS = 5000;
const MOST_MS = 10_000;
/** Lists are read more rarely than the status after many events, which keep them current but for tokens and times. */
const LISTS_MS = 20_000;
const MANY_EVENTS = 50;
/** A reading is followed by a hundred times its own length without one, so that it costs the service a hundredth. */
const REST = 100;

/** The newest tasks, the newest of no run, and the newest sessions. */
const LISTS = ["/v1/tasks?limit=100", "/v1/tasks?limit=50&run=", "/v1/sessions?limit=300"];

/** @typedef {{port: MessagePort, visible: boolean, subject: string}} Viewer subject: what it shows; empty for all. */

/** @type {Set<Viewer>} */
const viewers = new Set();
/** @type {EventSource | null} */
let stream = null;
let lastEvent = "";
let mayReadAt = 0;
let timer = 0;
let shownAt = 0;
let showing = 0;
let listsReadAt = 0;
let numSinceLists = 0;
let reading = false;
/** @type {import("./types").ServiceEvent[]} Events since the reading in progress began: it may lack them. */
let meanwhile = [];
let again = false;
/** @type {import("./live.js").State | null} */
let latest = null;

/**
 * @param {object} message
 * @param {(viewer: Viewer) => boolean} [concerns] Left out, it is for all pages.
 */
function broadcast(message, concerns = () => true) {
  for (const viewer of viewers) if (concerns(viewer)) viewer.port.postMessage(message);
}

/** Open the stream while somebody looks, and close it when nobody does. */
function attend() {
  const wanted = [...viewers].some((viewer) => viewer.visible);
  if (wanted && stream === null) {
    stream = new EventSource(lastEvent === "" ? "/v1/events?calls=1" : `/v1/events?calls=1&after=${lastEvent}`);
    for (const kind of KINDS) stream.addEventListener(kind, happened);
    stream.addEventListener("session.calls", ({ data }) => {
      const counted = JSON.parse(data);
      broadcast({ calls: counted }, ({ subject }) => subject === counted.session_id);
    });
    stream.addEventListener("open", () => {
      broadcast({ connected: true });
      listsReadAt = 0; // what happened until now comes with no event
      read();
    });
    stream.addEventListener("error", () => {
      broadcast({ connected: false });
      if (latest === null) read();
    });
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
  broadcast({ event: what }, ({ subject }) => subject !== "" && [what.task_id, what.session_id].includes(subject));
  if (latest !== null) latest = afterEvent(latest, what);
  if (reading) meanwhile.push(what);
  numSinceLists += 1;
  const rest = SHOW_MS * Math.max(1, [...viewers].filter(seesAll).length / PAGES_A_SECOND);
  showing ||= setTimeout(show, Math.max(0, shownAt + rest - Date.now()));
  plan(Math.max(0, mayReadAt - Date.now()));
}

/** Give the state to all pages in view that show it, as one text: it is copied once for each. */
function show() {
  clearTimeout(showing);
  showing = 0;
  shownAt = Date.now();
  if (latest === null) return;
  const state = JSON.stringify(latest);
  broadcast({ state }, seesAll);
}

/** @param {Viewer} viewer */
function seesAll({ visible, subject }) {
  return visible && subject === "";
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
  meanwhile = [];
  const began = Date.now();
  try {
    const isQuiet = numSinceLists > 0 && numSinceLists < MANY_EVENTS;
    const withLists = latest === null || began - listsReadAt >= (isQuiet ? LEAST_MS : LISTS_MS);
    const paths = ["/v1/status", ...(withLists ? LISTS : [])];
    const answers = await Promise.all(paths.map((path) => fetch(path, { headers: { Accept: "application/json" } })));
    const refused = answers.find((answer) => !answer.ok);
    if (refused !== undefined) {
      broadcast({ problem: (await refused.json()).detail });
    } else {
      const [status, ...lists] = await Promise.all(answers.map((answer) => answer.json()));
      if (withLists) {
        listsReadAt = began;
        numSinceLists = meanwhile.length;
      }
      const held = withLists || latest === null ? fromLists(lists) : latest;
      latest = meanwhile.reduce(afterEvent, { ...held, status });
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

/**
 * @param {any[]} lists
 * @returns {Omit<import("./live.js").State, "status">}
 */
function fromLists([newest, own, sessions]) {
  const last = newest.tasks.at(-1)?.position ?? 0;
  const older = own.tasks.filter((/** @type {{position: number}} */ task) => task.position < last);
  return { tasks: [...newest.tasks, ...older], isCut: newest.next !== null, sessions: sessions.sessions };
}

globalThis.addEventListener("connect", (event) => {
  const port = /** @type {MessageEvent} */ (event).ports[0];
  /** @type {Viewer} */
  const viewer = { port, visible: false, subject: "" };
  viewers.add(viewer);
  port.onmessage = ({ data }) => {
    if (data === "gone") {
      viewers.delete(viewer);
    } else {
      const saw = seesAll(viewer);
      Object.assign(viewer, data);
      if (!saw && seesAll(viewer) && latest !== null) port.postMessage({ state: JSON.stringify(latest) });
    }
    attend();
  };
});
