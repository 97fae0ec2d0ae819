// The newest tasks: a reader's own on top, and those of a training run or an evaluation as one line that opens.

import { number } from "./scales.js";
import { Ago, DataTable, Reward } from "./table.js";
import { visible } from "./visible.js";
import { html } from "./ui.js";

/** An evaluation's id ends with the digest of its tasks. */
const EVALUATION = /-[0-9a-f]{12}$/;

/** @typedef {import("./types").TaskSummary} TaskSummary */

/**
 * A task, or the tasks of a run.
 * @typedef {TaskSummary & {tasks: TaskSummary[], isWhole: boolean}} Line
 */

/**
 * @param {TaskSummary[]} tasks The newest first.
 * @param {boolean} isCut Whether there are older ones.
 * @returns {Line[]} Those of no run first.
 */
export function lines(tasks, isCut) {
  /** @type {Map<string, TaskSummary[]>} */
  const runs = new Map();
  for (const task of tasks) if (task.run !== "") runs.set(task.run, [...(runs.get(task.run) ?? []), task]);
  const own = tasks.filter((task) => task.run === "").map((task) => ({ ...task, tasks: [], isWhole: true }));
  return [...own, ...[...runs].map(([run, mine]) => runLine(run, mine, !isCut))];
}

/**
 * What the tasks of a run have together; means are over its tasks.
 * @param {string} run
 * @param {TaskSummary[]} tasks
 * @param {boolean} isWhole Whether these are all of them.
 * @returns {Line}
 */
function runLine(run, tasks, isWhole) {
  /** @type {Record<string, number>} */
  const outcomes = {};
  for (const task of tasks) for (const [outcome, num] of Object.entries(task.outcomes)) outcomes[outcome] = (outcomes[outcome] ?? 0) + num;
  const num_open = sum(tasks.map((task) => task.num_open)) ?? 0;
  const one = (/** @type {"harness" | "model" | "submitter"} */ field) => [...new Set(tasks.map((task) => task[field] ?? "").filter((text) => text !== ""))].join(", ");
  return {
    task_id: run,
    run,
    tasks,
    isWhole,
    status: num_open === 0 ? "ended" : tasks.some((task) => task.status === "running") ? "running" : "queued",
    num_samples: sum(tasks.map((task) => task.num_samples)) ?? 0,
    num_open,
    created_at: tasks[0].created_at,
    ended_at: tasks[0].ended_at,
    outcomes,
    mean_reward: mean(tasks.map((task) => task.mean_reward)),
    mean_session_s: mean(tasks.map((task) => task.mean_session_s)),
    num_sampled_tokens: sum(tasks.map((task) => task.num_sampled_tokens)),
    harness: one("harness"),
    model: one("model"),
    submitter: one("submitter"),
  };
}

/** @param {(number | null)[]} values */
function sum(values) {
  const known = values.filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((total, value) => total + value, 0);
}

/** @param {(number | null)[]} values */
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length === 0 ? null : (sum(known) ?? 0) / known.length;
}

/** @param {Line} line */
function state({ status, num_open, num_samples }) {
  return num_open === 0 || status === "queued" ? status : `${status}, ${number(num_open)} of ${number(num_samples)} open`;
}

/** @param {Record<string, number>} held */
export function counts(held) {
  const told = Object.entries(held).filter(([, count]) => count > 0);
  return told.length === 0 ? "none" : told.map(([name, count]) => `${number(count)} ${name.replaceAll("_", " ")}`).join(", ");
}

/** @param {Line} line */
function title({ task_id, tasks, isWhole }) {
  if (tasks.length === 0) return html`<a href=${`#/tasks/${encodeURIComponent(task_id)}`}>${task_id}</a>`;
  const run = EVALUATION.test(task_id) ? html`<a href=${`#/evaluations/${encodeURIComponent(task_id)}`}>${task_id}</a>` : task_id;
  return html`${run} <small>${isWhole ? "" : "the newest "}${number(tasks.length)} ${tasks.length === 1 ? "task" : "tasks"}</small>`;
}

/**
 * @param {number} now Unix time of the server.
 * @returns {import("./table.js").Column<Line>[]}
 */
function columns(now) {
  return [
    { name: "task", title: "task", value: (line) => line.task_id, cell: title },
    { name: "state", title: "state", value: state },
    { name: "time", title: "submitted", numeric: true, value: (line) => line.created_at, cell: (line) => html`<${Ago} at=${line.created_at} now=${now} />` },
    { name: "harness", title: "harness", value: (line) => line.harness },
    { name: "model", title: "model", value: (line) => line.model },
    { name: "samples", title: "samples", numeric: true, value: (line) => line.num_samples },
    { name: "seconds", title: "seconds a session", numeric: true, value: (line) => line.mean_session_s },
    { name: "tokens", title: "tokens sampled", numeric: true, value: (line) => line.num_sampled_tokens },
    { name: "reward", title: "mean reward", numeric: true, value: (line) => line.mean_reward, cell: (line) => html`<${Reward} value=${line.mean_reward} />` },
    { name: "outcomes", title: "outcomes", wraps: "words", value: (line) => (line.num_open === line.num_samples ? "" : counts(line.outcomes)) },
    { name: "submitter", title: "submitter", hidden: true, value: (line) => visible(line.submitter) },
  ];
}

/** @param {{tasks: TaskSummary[], isCut: boolean, now: number}} props now: Unix time of the server. */
export function Tasks({ tasks, isCut, now }) {
  return html`<h2>Tasks</h2>
    <${DataTable}
      name="tasks"
      label="tasks"
      columns=${columns(now)}
      rows=${lines(tasks, isCut)}
      keyOf=${(/** @type {Line} */ line) => (line.tasks.length > 0 ? `run ${line.task_id}` : line.task_id)}
      innerOf=${(/** @type {Line} */ line) => line.tasks.map((task) => ({ ...task, tasks: [], isWhole: true }))}
    />`;
}

/** What a service without any task shows. */
export function FirstTask() {
  return html`<h2>No task yet</h2>
    <p>Two commands make one, in the folder in which <code>gangline up</code> runs:</p>
    <pre class="instruction">${"gangline init my-agent && (cd my-agent && python3 tasks.py)\ngangline submit my-agent/task.json --wait"}</pre>
    <p>The first prints what else its agent needs. The task appears here while it runs.</p>`;
}
