// The Now part: what runs, what waits and why, what failed, and the newest tasks and sessions.

import { follow, problem, state } from "./live.js";
import { duration, number, size } from "./scales.js";
import { failureCauses, perMinute, waitingSessions } from "./standing.js";
import { Ago, DataTable, Reward, Wide } from "./table.js";
import { FirstTask, Tasks, counts } from "./tasks.js";
import { visible } from "./visible.js";
import { html, useEffect } from "./ui.js";

const SHOWN_SESSIONS = 100;

export function Now() {
  useEffect(follow, []);
  const current = state.value;
  return html`<main class="scroller now" tabindex="-1">
    ${problem.value !== "" && html`<p class="problem" role="alert">${problem.value}</p>`}
    ${current === null ? html`<p aria-busy="true">Reading the service's state ...</p>` : html`<${Standing} ...${current} />`}
  </main>`;
}

/** @param {import("./live.js").State} props */
function Standing({ status, tasks, isCut, sessions }) {
  return html`<h1>Now</h1>
    ${tasks.length === 0 && html`<${FirstTask} />`}
    <${Figures} status=${status} sessions=${sessions} />
    <${Waiting} status=${status} sessions=${sessions} />
    <${Failures} sessions=${sessions} />
    ${!status.tenant && html`<${Nodes} nodes=${status.nodes} />`}
    ${tasks.length > 0 && html`<${Tasks} tasks=${tasks} isCut=${isCut} now=${status.at} />`}
    ${sessions.length > 0 && html`<${Sessions} sessions=${sessions.slice(0, SHOWN_SESSIONS)} now=${status.at} />`}`;
}

/** @param {{status: import("./types").ServiceStatus, sessions: import("./types").SessionView[]}} props */
function Figures({ status, sessions }) {
  const sampled = status.nodes.reduce((sum, node) => sum + (node.metrics["sampled_tokens"] ?? 0), 0);
  /** @type {[string, string][]} */
  const figures = [
    ["tasks", counts(status.tasks)],
    ["sessions", counts(status.sessions)],
    ["stages", counts(status.stages)],
    ["ended in the last minute", amount(perMinute(sessions, status.at), "session")],
    ["sampled by the nodes", amount(sampled, "token")],
    ["callbacks", counts(status.callbacks)],
    ["results on disk", size(status.result_bytes)],
  ];
  return html`<dl class="figures">
    ${figures.map(
      ([name, value]) => html`<div>
        <dt>${name}</dt>
        <dd>${value}</dd>
      </div>`,
    )}
  </dl>`;
}

/**
 * @param {number} num
 * @param {string} unit
 */
function amount(num, unit) {
  return `${number(num)} ${unit}${num === 1 ? "" : "s"}`;
}

/** @param {{status: import("./types").ServiceStatus, sessions: import("./types").SessionView[]}} props */
function Waiting({ status, sessions }) {
  const waiting = waitingSessions(sessions, status);
  if (waiting.length === 0) return null;
  return html`<h2>Waiting for long</h2>
    <${Wide} label="Waiting for long">
      <${Table} titles=${["session", "since", "why"]}>
        ${waiting.slice(0, 20).map(
          ({ session, since_s, why }) => html`<tr key=${session.session_id}>
            <td><${SessionLink} session=${session} /></td>
            <td>${duration(since_s)}</td>
            <td class="wraps-anywhere">${visible(why)}</td>
          </tr>`,
        )}
      <//>
    <//>`;
}

/** @param {{sessions: import("./types").SessionView[]}} props */
function Failures({ sessions }) {
  const causes = failureCauses(sessions);
  if (causes.length === 0) return null;
  return html`<h2>Failures that share a cause</h2>
    <${Wide} label="Failures that share a cause">
      <${Table} titles=${["boundary", "cause", "sessions", "such as"]}>
        ${causes.slice(0, 20).map(
          ({ boundary, code, message, held }) => html`<tr key=${`${boundary} ${code} ${message}`}>
            <td>${boundary}</td>
            <td class="wraps-anywhere">${visible(message)} <small>${code}</small></td>
            <td>${number(held.length)}</td>
            <td><${SessionLink} session=${held[0]} /></td>
          </tr>`,
        )}
      <//>
    <//>`;
}

/** @param {import("./types").NodeView} node */
function nodeState(node) {
  if (node.draining) return " (draining)";
  const refused = Object.keys(node.metrics).find((name) => name.startsWith("heartbeat_refused_"));
  if (refused === "heartbeat_refused_disk_full") return " (the server's disk is full: its heartbeats are refused)";
  if (refused !== undefined) return " (its heartbeats fail)";
  return "disk_low_free_bytes" in node.metrics ? " (takes no session: disk low)" : "";
}

/** @param {{nodes: import("./types").NodeView[]}} props */
function Nodes({ nodes }) {
  return html`<h2>Nodes and engines</h2>
    ${nodes.length === 0 &&
    html`<p>No node has joined, so sessions wait. <code>gangline up</code> starts one with the server, <code>gangline node</code> one alone.</p>`}
    ${nodes.length > 0 &&
    html`<${Wide} label="Nodes and engines">
      <${Table} titles=${["node", "sessions", "heard", "calls in flight", "engines"]}>
        ${nodes.map(
          (node) => html`<tr key=${node.node_id}>
            <td>${visible(node.node_id)}<small>${nodeState(node)}</small></td>
            <td>${number(node.num_sessions)} of ${number(node.capacity)}</td>
            <td>${duration(node.age_s)} ago</td>
            <td>${number(node.metrics["calls_in_flight"] ?? null)}</td>
            <td class="wraps-anywhere">${node.backends.map((engine) => html`<div>${engineLine(engine)}</div>`)}</td>
          </tr>`,
        )}
      <//>
    <//>`}`;
}

/** @param {Record<string, any>} engine */
function engineLine(engine) {
  const error = engine["error"] ? `: ${engine["error"]}` : "";
  const role = engine["role"] ? `for role ${engine["role"]}` : "";
  const condition = engine["state"] === "healthy" && engine["num_failures"] > 0 ? "does not answer" : engine["state"];
  const facts = [role, engine["engine"], engine["model"], engine["url"], condition].filter((fact) => fact);
  const template = [...(engine["template_told"] ?? []), ...(engine["template_lacks"] ?? [])].join(", ");
  return visible(`${facts.join(" · ")}${error}${cacheOf(engine["cache"])}${template && ` · template: ${template}`}`);
}

/** @param {Record<string, any> | null | undefined} cache What `--session-places` knows of an engine's prefix cache. */
function cacheOf(cache) {
  if (!cache) return "";
  const hits = cache["hit_rate"] === null ? "" : `, ${Math.round(100 * cache["hit_rate"])} % of prompts in it`;
  return ` · cache: ${cache["num_held_tokens"]} of ${cache["num_tokens"]} tokens held by ${cache["num_places"]} sessions${hits}`;
}

/**
 * @param {number} now Unix time of the server.
 * @returns {import("./table.js").Column<import("./types").SessionView>[]}
 */
function columns(now) {
  return [
    { name: "session", title: "session", value: (session) => session.session_id, cell: (session) => html`<${SessionLink} session=${session} />` },
    { name: "state", title: "state", value: (session) => (session.outcome ?? session.stage ?? session.state).replaceAll("_", " ") },
    { name: "time", title: "changed", numeric: true, value: changedAt, cell: (session) => html`<${Ago} at=${changedAt(session)} now=${now} />` },
    { name: "seconds", title: "seconds", numeric: true, value: (session) => (session.ended_at === null || session.leased_at === null ? null : session.ended_at - session.leased_at) },
    { name: "tokens", title: "tokens sampled", numeric: true, value: (session) => session.num_sampled_tokens },
    { name: "reward", title: "reward", numeric: true, value: (session) => session.reward, cell: (session) => html`<${Reward} value=${session.reward} />` },
    { name: "attempt", title: "attempt", numeric: true, value: (session) => session.attempt, hidden: true },
    { name: "model", title: "model", value: (session) => session.model, hidden: true },
    { name: "node", title: "node", value: (session) => session.node_id ?? "" },
    { name: "failure", title: "failure", wraps: "anywhere", value: (session) => (session.failure === null ? "" : `${session.failure.boundary}: ${session.failure.message}`) },
  ];
}

/** @param {import("./types").SessionView} session */
function changedAt(session) {
  return session.ended_at ?? session.stage_at ?? session.leased_at ?? session.created_at;
}

/** @param {{sessions: import("./types").SessionView[], now: number}} props now: Unix time of the server. */
function Sessions({ sessions, now }) {
  return html`<h2>Sessions</h2>
    <${DataTable}
      name="sessions"
      label="sessions"
      columns=${columns(now)}
      rows=${sessions}
      keyOf=${(/** @type {import("./types").SessionView} */ session) => session.session_id}
    />`;
}

/** @param {{session: import("./types").SessionView}} props */
export function SessionLink({ session }) {
  if (session.state === "queued") return session.session_id;
  return html`<a href=${`#/sessions/${encodeURIComponent(session.session_id)}`}>${session.session_id}</a>`;
}

/**
 * @param {{titles: string[], children?: any}} props
 */
export function Table({ titles, children }) {
  return html`<table>
    <thead>
      <tr>
        ${titles.map((title) => html`<th scope="col">${title}</th>`)}
      </tr>
    </thead>
    <tbody>
      ${children}
    </tbody>
  </table>`;
}
