// What the newest sessions say about the service: which wait for long and why, and which failures share a cause.

/** @typedef {import("./types").SessionView} SessionView */

const LONG_WITH_REASON_S = 5;
const LONG_QUEUED_S = 60;
const LONG_IN_STAGE_S = 600;
const SILENT_NODE_S = 20;

/**
 * Sessions that have been in one place for long, the longest first.
 * @param {SessionView[]} sessions
 * @param {import("./types").ServiceStatus} status
 * @returns {{session: SessionView, since_s: number, why: string}[]}
 */
export function waitingSessions(sessions, status) {
  const nodes = new Map(status.nodes.map((node) => [node.node_id, node]));
  const hasRoom = status.nodes.some((node) => !node.draining && node.num_sessions < node.capacity);
  const found = [];
  for (const session of sessions) {
    if (session.state === "queued") {
      const since_s = status.at - session.created_at;
      if (session.ready_at !== null && session.ready_at > status.at) {
        const after = session.failure === null ? "a fault" : `${session.failure.boundary}: ${session.failure.message}`;
        found.push({ session, since_s, why: `rests for ${Math.ceil(session.ready_at - status.at)} s after ${after}` });
      } else if (session.unplaced !== null) {
        if (since_s > LONG_WITH_REASON_S) found.push({ session, since_s, why: session.unplaced });
      } else if (since_s > LONG_QUEUED_S) {
        found.push({ session, since_s, why: queuedBecause(status, hasRoom) });
      }
    } else if (session.state === "leased") {
      const since_s = status.at - (session.stage_at ?? session.leased_at ?? status.at);
      const node = nodes.get(session.node_id ?? "");
      const silent = node === undefined ? Infinity : node.age_s;
      if (silent > SILENT_NODE_S) {
        const heard = Number.isFinite(silent) ? `was not heard for ${Math.round(silent)} s` : "is not known any more";
        found.push({ session, since_s, why: `its node ${session.node_id} ${heard}` });
      } else if (session.stage === "init" && session.waits_for !== null) {
        if (since_s > LONG_WITH_REASON_S) found.push({ session, since_s, why: session.waits_for });
      } else if (since_s > LONG_IN_STAGE_S) {
        found.push({ session, since_s, why: inStageBecause(session, node) });
      }
    }
  }
  return found.sort((a, b) => b.since_s - a.since_s);
}

/**
 * @param {import("./types").ServiceStatus} status
 * @param {boolean} hasRoom
 */
function queuedBecause(status, hasRoom) {
  if (status.nodes.length === 0) return "no node has joined";
  return hasRoom ? "nodes have room, and have not asked for it yet" : "no node has room";
}

/**
 * @param {SessionView} session
 * @param {import("./types").NodeView | undefined} node
 */
function inStageBecause(session, node) {
  if ((node?.metrics["gate_closed"] ?? 0) > 0) return `stage ${session.stage}: its node holds model calls for a weight update`;
  const engines = node?.backends ?? [];
  const broken = engines.find((engine) => engine["error"]);
  if (broken !== undefined) return `stage ${session.stage}: engine ${broken["url"]}: ${broken["error"]}`;
  return `has been in stage ${session.stage} for long`;
}

/**
 * Failures grouped by boundary, code and message, numbers aside; the most frequent first.
 * @param {SessionView[]} sessions
 * @returns {{boundary: string, code: string, message: string, held: SessionView[]}[]}
 */
export function failureCauses(sessions) {
  /** @type {Map<string, {boundary: string, code: string, message: string, held: SessionView[]}>} */
  const causes = new Map();
  for (const session of sessions) {
    const failure = session.failure;
    if (failure === null) continue;
    const key = [failure.boundary, failure.code, failure.message.replaceAll(session.session_id, "").replace(/\d+/g, "#")].join("\n");
    const cause = causes.get(key);
    if (cause === undefined) causes.set(key, { boundary: failure.boundary, code: failure.code, message: failure.message, held: [session] });
    else cause.held.push(session);
  }
  return [...causes.values()].sort((a, b) => b.held.length - a.held.length);
}

/**
 * Sessions that ended in the last minute.
 * @param {SessionView[]} sessions
 * @param {number} at Unix time of the server.
 */
export function perMinute(sessions, at) {
  return sessions.filter((session) => session.ended_at !== null && at - session.ended_at < 60).length;
}
