// An evaluation: its figures, and its tasks with the reward of each session, the worst first. Compared with an earlier
// one: the tasks that got worse, then those that got better.

import { json } from "./api.js";
import { AGAIN_MS, amount, Figures, fixed, signed } from "./evaluations.js";
import { DataTable, Reward } from "./table.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").EvaluationReport} EvaluationReport */
/** @typedef {import("./types").EvaluationComparison} EvaluationComparison */
/** @typedef {import("./types").EvaluationTask} EvaluationTask */
/** @typedef {EvaluationComparison["tasks"][number]} TaskChange */

/** @param {{id: string, query: string}} props query: of the address: `with`. */
export function Evaluation({ id, query }) {
  const given = new URLSearchParams(query).get("with") ?? "";
  const [first, setFirst] = useState(given);
  useEffect(() => setFirst(given), [given]);
  const { report, comparison, error } = useEvaluation(id, first);
  useEffect(() => {
    history.replaceState(null, "", `#/evaluations/${encodeURIComponent(id)}${first === "" ? "" : `?with=${encodeURIComponent(first)}`}`);
  }, [id, first]);
  return html`<main class="scroller now" tabindex="-1">
    <h1>${visible(report?.name ?? id)}</h1>
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`}
    ${report === null && error === "" && html`<p aria-busy="true">Reading the evaluation ...</p>`}
    ${report !== null &&
    html`${first === "" && html`<${Whole} report=${report} />`}
      <${Others} id=${id} chosen=${first} onChoose=${setFirst} />
      ${first === "" && html`<${Tasks} report=${report} />`}
      ${first !== "" && comparison !== null && html`<${Compared} comparison=${comparison} />`}`}
  </main>`;
}

/**
 * The report and the comparison, read again while the evaluation runs.
 * @param {string} id
 * @param {string} first The evaluation to compare with; empty for none.
 */
function useEvaluation(id, first) {
  const [report, setReport] = useState(/** @type {EvaluationReport | null} */ (null));
  const [comparison, setComparison] = useState(/** @type {EvaluationComparison | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    let alive = true;
    let isRunning = true;
    setComparison(null);
    setError("");
    const path = `/v1/evaluations/${encodeURIComponent(id)}`;
    const read = async () => {
      if (!isRunning || document.visibilityState !== "visible") return;
      try {
        const found = /** @type {EvaluationReport} */ (await json(path));
        if (!alive) return;
        setReport(found);
        const compared = first === "" ? null : await json(`${path}/compared?with=${encodeURIComponent(first)}`);
        if (!alive) return;
        setComparison(compared);
        setError("");
        isRunning = found.num_left > 0;
      } catch (problem) {
        if (alive) setError(/** @type {Error} */ (problem).message);
      }
    };
    read();
    const timer = setInterval(read, AGAIN_MS);
    return () => {
      alive = false;
      clearInterval(timer);
    };
  }, [id, first]);
  return { report, comparison, error };
}

/** @param {{report: EvaluationReport}} props */
function Whole({ report }) {
  const { whole } = report;
  const [ended, failed] = [whole.outcomes, whole.failures].map(listed);
  return html`${report.num_left > 0 && html`<p role="status">${number(report.num_left)} tasks have not ended.</p>`}
    <${Figures} label="" slices=${[whole]} numLeft=${report.num_left} />
    <p>${ended === "" ? "No session has ended." : `Sessions: ${ended}.`}${failed !== "" && ` Failures: ${failed}.`}</p>
    ${Object.entries(report.by).map(([key, slices]) => html`<${Figures} key=${key} label=${key} slices=${slices} />`)}`;
}

/** @param {{id: string, chosen: string, onChoose: (id: string) => void}} props */
function Others({ id, chosen, onChoose }) {
  const [others, setOthers] = useState(/** @type {import("./types").EvaluationSummary[]} */ ([]));
  useEffect(() => {
    json("/v1/evaluations").then(
      (found) => setOthers(found.evaluations.filter((/** @type {{evaluation_id: string}} */ one) => one.evaluation_id !== id)),
      () => setOthers([]),
    );
  }, [id]);
  if (others.length === 0) return null;
  const isAlone = (/** @type {string} */ name) => others.filter((one) => one.name === name).length === 1;
  return html`<label class="beside">
    Compare with${" "}
    <select value=${chosen} onChange=${(/** @type {Event} */ event) => onChoose(/** @type {HTMLSelectElement} */ (event.target).value)}>
      <option value="">no other evaluation</option>
      ${others.map((one) => html`<option key=${one.evaluation_id} value=${one.evaluation_id}>${visible(isAlone(one.name) ? one.name : one.evaluation_id)}</option>`)}
    </select>
  </label>`;
}

/**
 * @param {{label: string, checked: boolean, onChange: (checked: boolean) => void}} props
 */
function Only({ label, checked, onChange }) {
  return html`<label>
    <input type="checkbox" checked=${checked} onChange=${() => onChange(!checked)} />${" "}${label}
  </label>`;
}

/** @type {import("./table.js").Column<EvaluationTask>[]} */
const TASK_COLUMNS = [
  { name: "task", title: "task", value: (task) => task.task, cell: (task) => html`<${TaskLink} name=${task.task} task=${task} />` },
  { name: "reward", title: "reward", numeric: true, value: (task) => task.mean, cell: (task) => (task.mean === null ? "–" : fixed(task.mean)) },
  { name: "sessions", title: "sessions", value: (task) => task.samples.map((one) => one.session_id).join(" "), cell: (task) => html`<${Rewards} task=${task} />`, wraps: "words" },
  { name: "outcomes", title: "outcomes", value: (task) => listed(task.outcomes), wraps: "words" },
  { name: "turns", title: "turns", numeric: true, value: (task) => task.turns, cell: (task) => amount(task.turns) },
  { name: "tokens", title: "tokens", numeric: true, value: (task) => task.sampled_tokens, cell: (task) => amount(task.sampled_tokens) },
  { name: "seconds", title: "seconds", numeric: true, value: (task) => task.seconds, cell: (task) => amount(task.seconds) },
];

/** @param {{report: EvaluationReport}} props */
function Tasks({ report }) {
  const [isOnly, setOnly] = useState(false);
  const isBelow = (/** @type {EvaluationTask} */ task) => task.samples.some((one) => one.reward === null || one.reward < report.bar);
  return html`<h2>Tasks, the worst first</h2>
    <${Only} label=${`only tasks with a session below ${number(report.bar)}`} checked=${isOnly} onChange=${setOnly} />
    <${DataTable}
      name="evaluation tasks"
      label="tasks"
      columns=${TASK_COLUMNS}
      rows=${isOnly ? report.lines.filter(isBelow) : report.lines}
      keyOf=${(/** @type {EvaluationTask} */ task) => task.task}
    />`;
}

/** @param {Record<string, number>} counts */
function listed(counts) {
  return Object.entries(counts)
    .map(([what, count]) => `${number(count)} ${visible(what)}`)
    .join(", ");
}

/** @param {{name: string, task: EvaluationTask | null}} props */
function TaskLink({ name, task }) {
  const session = task?.samples[0]?.session_id;
  if (session === undefined) return visible(name);
  return html`<a href=${`#/tasks/${encodeURIComponent(session.slice(0, session.lastIndexOf(".")))}`}>${visible(name)}</a>`;
}

/** @param {{task: EvaluationTask | null}} props The reward of each session, which is a link to it. */
function Rewards({ task }) {
  if (task === null) return "–";
  return html`<span class="samples">
    ${task.samples.map(
      (one, sample) => html`<a
          key=${one.session_id}
          href=${`#/sessions/${encodeURIComponent(one.session_id)}`}
          title=${visible(`${one.outcome} ${one.cause}`.trim())}
          aria-label=${one.reward === null ? `sample ${sample}, does not count: ${visible(one.cause || one.outcome)}` : `sample ${sample}, reward ${number(one.reward)}`}
        >
          <${Reward} value=${one.reward} />
        </a> `,
    )}
  </span>`;
}

/** @param {{comparison: EvaluationComparison}} props */
function Compared({ comparison }) {
  const [isOnly, setOnly] = useState(false);
  const { first, second, difference, wholes, tasks, apart } = comparison;
  const error = difference.standard_error === null ? "" : ` ± ${fixed(difference.standard_error)}`;
  const isVisible = difference.low > 0 || difference.high < 0;
  const names = [first, second];
  return html`<p role="status">
      ${`${visible(second)} minus ${visible(first)}: ${signed(difference.mean)}${error} over ${number(difference.num_tasks)} tasks, `}
      ${`95 % interval ${signed(difference.low)} to ${signed(difference.high)}.`}
      ${!isVisible && " No difference can be seen: the interval holds 0."}
      ${` ${number(difference.worse.length)} tasks worse, ${number(difference.better.length)} better.`}
      ${apart.length > 0 && ` ${number(apart.length)} tasks count in one of them only, and are not in the difference.`}
    </p>
    <${Figures} label="evaluation" slices=${wholes.map((one, at) => ({ ...one, name: names[at] }))} />
    <h2>Tasks, the largest loss first</h2>
    <${Only} label="only tasks that differ" checked=${isOnly} onChange=${setOnly} />
    <${DataTable}
      name="evaluation changes"
      label="tasks"
      columns=${changeColumns(first, second)}
      rows=${isOnly ? tasks.filter((change) => change.gain !== 0) : tasks}
      keyOf=${(/** @type {TaskChange} */ change) => change.task}
    />`;
}

/**
 * @param {string} first
 * @param {string} second
 * @returns {import("./table.js").Column<TaskChange>[]}
 */
function changeColumns(first, second) {
  return [
    { name: "task", title: "task", value: (change) => change.task, cell: (change) => html`<${TaskLink} name=${change.task} task=${change.after ?? change.before} />` },
    { name: "difference", title: "difference", numeric: true, value: (change) => change.gain, cell: (change) => signed(change.gain) },
    { name: "before", title: visible(first), value: (change) => change.before?.mean, cell: (change) => html`<${Rewards} task=${change.before} />`, wraps: "words" },
    { name: "after", title: visible(second), value: (change) => change.after?.mean, cell: (change) => html`<${Rewards} task=${change.after} />`, wraps: "words" },
  ];
}
