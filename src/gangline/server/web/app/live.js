// The state of the service, kept current by the worker that all pages of this browser share.

import { isSaved } from "./saved.js";
import { signal } from "./ui.js";

/**
 * @typedef {object} State
 * @property {import("./types").ServiceStatus} status
 * @property {import("./types").TaskSummary[]} tasks The newest first.
 * @property {boolean} isCut Whether there are older tasks of runs.
 * @property {import("./types").SessionView[]} sessions The newest first.
 */

/** @type {import("../vendor/signals.mjs").Signal<State | null>} */
export const state = signal(null);
export const problem = signal("");
/**
 * The newest word of a running session that somebody looks at.
 * @type {import("../vendor/signals.mjs").Signal<{session_id: string, num_calls: number} | null>}
 */
export const calls = signal(null);
/**
 * The newest event of the task or session that the page shows.
 * @type {import("../vendor/signals.mjs").Signal<{kind: string, session_id: string | null, task_id: string | null} | null>}
 */
export const latest = signal(null);
/** Grows with each of them. */
export const events = signal(0);

let started = false;

/** Follow the service from now on; once for a page. */
export function follow() {
  if (started || isSaved) return;
  started = true;
  const worker = new SharedWorker(address(), { type: "module", name: "gangline" });
  worker.port.onmessage = ({ data }) => {
    if (data.state !== undefined) {
      state.value = JSON.parse(data.state);
      problem.value = "";
    }
    if (data.problem !== undefined) problem.value = data.problem;
    if (data.connected === false) problem.value = "The connection is lost; trying again ...";
    if (data.connected === true) problem.value = "";
    if (data.calls !== undefined) calls.value = data.calls;
    if (data.event !== undefined) {
      events.value += 1;
      latest.value = data.event;
    }
  };
  const tell = () => worker.port.postMessage({ visible: document.visibilityState === "visible", subject: subject() });
  document.addEventListener("visibilitychange", tell);
  addEventListener("hashchange", tell);
  tell();
  addEventListener("pagehide", () => worker.port.postMessage("gone"));
  addEventListener("pageshow", (event) => event.persisted && location.reload());
}

/** The task or session that the page shows; empty for the service as a whole. */
function subject() {
  const [, kind = "", id = ""] = location.hash.split("?", 1)[0].split("/");
  try {
    return id === "" ? kind : decodeURIComponent(id);
  } catch {
    return id;
  }
}

/** The worker's address, beside this module, as a trusted one: the policy allows no other script to be named. */
function address() {
  const url = new URL("./live_worker.js", import.meta.url).href;
  const types = /** @type {any} */ (globalThis).trustedTypes;
  return types === undefined ? url : types.createPolicy("gangline", { createScriptURL: () => url }).createScriptURL(url);
}
