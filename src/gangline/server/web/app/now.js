// The Now part: what runs, what waits and why, what failed, and the newest tasks and sessions.

import { follow, problem, state } from "./live.js";
import { duration, number, size } from "./scales.js";
import { failureCauses, perMinute, waitingSessions } from "./standing.js";
import { visible } from "./visible.js";
import { html, useEffect } from "./ui.js";

export function Now() {
  useEffect(follow, []);
  const current = state.value;
  return html`<main class="scroller now" tabindex="-1">
    ${problem.value !== "" && html`<p class="problem" role="alert">${problem.value}</p>`}
    ${current === null ? html`<p aria-busy="true">Reading the service's state ...</p>` : html`<${Standing} ...${current} />`}
  </main>`;
}

/** @param {import("./live.js").State} props */
function Standing({ status, tasks, sessions }) {
  return html`<h1>Now</h1>
    <${Figures} status=${status} sessions=${sessions} />
    <${Waiting} status=${status} sessions=${sessions} />
    <${Failures} sessions=${sessions} />
    <${Nodes} nodes=${status.nodes} />
    <${Tasks} tasks=${tasks} />
    <${Sessions} sessions=${sessions.slice(0, 100)} />`;
}

/** @param {{status: import("./types").ServiceStatus, sessions: import("./types").SessionView[]}} props */
function Figures({ status, sessions }) {
  const sampled = status.nodes.reduce((sum, node) => sum + (node.metrics["sampled_tokens"] ?? 0), 0);
  /** @type {[string, string][]} */
  const figures = [
    ["tasks", counts(status.tasks)],
    ["sessions", counts(status.sessions)],
    ["stages", counts(status.stages)],
    ["ended in the last minute", number(perMinute(sessions, status.at))],
    ["sampled by nodes", number(sampled)],
    ["callbacks", counts(status.callbacks)],
    ["results", size(status.result_bytes)],
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

/** @param {Record<string, number>} held */
function counts(held) {
  const told = Object.entries(held).filter(([, count]) => count > 0);
  return told.length === 0 ? "none" : told.map(([name, count]) => `${number(count)} ${name}`).join(", ");
}

/** @param {{status: import("./types").ServiceStatus, sessions: import("./types").SessionView[]}} props */
function Waiting({ status, sessions }) {
  const waiting = waitingSessions(sessions, status);
  if (waiting.length === 0) return null;
  return html`<h2>Waiting for long</h2>
    <${Table} titles=${["session", "since", "why"]}>
      ${waiting.slice(0, 20).map(
        ({ session, since_s, why }) => html`<tr key=${session.session_id}>
          <td><${SessionLink} session=${session} /></td>
          <td>${duration(since_s)}</td>
          <td>${visible(why)}</td>
        </tr>`,
      )}
    <//>`;
}

/** @param {{sessions: import("./types").SessionView[]}} props */
function Failures({ sessions }) {
  const causes = failureCauses(sessions);
  if (causes.length === 0) return null;
  return html`<h2>Failures that share a cause</h2>
    <${Table} titles=${["boundary", "cause", "sessions", "such as"]}>
      ${causes.slice(0, 20).map(
        ({ boundary, code, message, held }) => html`<tr key=${`${boundary} ${code} ${message}`}>
          <td>${boundary}</td>
          <td>${visible(message)} <small>${code}</small></td>
          <td class="number">${number(held.length)}</td>
          <td><${SessionLink} session=${held[0]} /></td>
        </tr>`,
      )}
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
    ${nodes.length === 0 && html`<p>No node has joined.</p>`}
    <${Table} titles=${["node", "sessions", "heard", "calls in flight", "engines"]}>
      ${nodes.map(
        (node) => html`<tr key=${node.node_id}>
          <td>${visible(node.node_id)}${nodeState(node)}</td>
          <td class="number">${number(node.num_sessions)} of ${number(node.capacity)}</td>
          <td>${duration(node.age_s)} ago</td>
          <td class="number">${number(node.metrics["calls_in_flight"] ?? null)}</td>
          <td>${node.backends.map((engine) => html`<div>${engineLine(engine)}</div>`)}</td>
        </tr>`,
      )}
    <//>`;
}

/** @param {Record<string, any>} engine */
function engineLine(engine) {
  const error = engine["error"] ? `: ${engine["error"]}` : "";
  const role = engine["role"] ? `for role ${engine["role"]}` : "";
  const condition = engine["state"] === "healthy" && engine["num_failures"] > 0 ? "does not answer" : engine["state"];
  const facts = [role, engine["engine"], engine["model"], engine["url"], condition].filter((fact) => fact);
  const template = [...(engine["template_told"] ?? []), ...(engine["template_lacks"] ?? [])].join(", ");
  return visible(`${facts.join(" · ")}${error}${template && ` · template: ${template}`}`);
}

/** @param {{tasks: import("./types").TaskSummary[]}} props */
function Tasks({ tasks }) {
  return html`<h2>Tasks</h2>
    <${Table} titles=${["task", "state", "sessions open", "mean reward", "outcomes"]}>
      ${tasks.map(
        (task) => html`<tr key=${task.task_id}>
          <td><a href=${`#/tasks/${encodeURIComponent(task.task_id)}`}>${task.task_id}</a></td>
          <td>${task.status}</td>
          <td class="number">${number(task.num_open)} of ${number(task.num_samples)}</td>
          <td class="number">${number(task.mean_reward)}</td>
          <td>${counts(task.outcomes)}</td>
        </tr>`,
      )}
    <//>`;
}

/** @param {{sessions: import("./types").SessionView[]}} props */
export function Sessions({ sessions }) {
  return html`<h2>Sessions</h2>
    <${Table} titles=${["session", "state", "reward", "attempt", "node", "failure"]}>
      ${sessions.map(
        (session) => html`<tr key=${session.session_id}>
          <td><${SessionLink} session=${session} /></td>
          <td>${(session.outcome ?? session.stage ?? session.state).replaceAll("_", " ")}</td>
          <td class="number">${number(session.reward)}</td>
          <td class="number">${session.attempt}</td>
          <td>${visible(session.node_id ?? "")}</td>
          <td>${session.failure === null ? "" : `${session.failure.boundary}: ${visible(session.failure.message)}`}</td>
        </tr>`,
      )}
    <//>`;
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
