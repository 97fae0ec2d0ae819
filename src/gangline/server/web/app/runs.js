// The training runs of the data folder: how far each is, and what it gained on held-out tasks.

import { json } from "./api.js";
import { duration, number } from "./scales.js";
import { Ago, DataTable, Reward } from "./table.js";
import { html, useEffect, useState } from "./ui.js";

const AGAIN_MS = 10_000;

export function Runs() {
  const [runs, setRuns] = useState(/** @type {import("./types").RunSummary[] | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    const read = () => document.visibilityState === "visible" && json("/v1/runs").then((found) => setRuns(found.runs), (problem) => setError(problem.message));
    read();
    const timer = setInterval(read, AGAIN_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<main class="scroller now" tabindex="-1">
    <h1>Training runs</h1>
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`}
    ${runs === null ? html`<p aria-busy="true">Reading the runs ...</p>` : runs.length === 0 ? html`<${None} />` : html`<${List} runs=${runs} />`}
  </main>`;
}

function None() {
  return html`<p>
      There is none in the data folder of this server. <code>gangline train run SPEC</code> with the same data folder makes
      one.
    </p>
    <p><a href="#/">Now</a> shows the tasks, and <a href="#/find">Find</a> their sessions.</p>`;
}

/** @typedef {import("./types").RunSummary} RunSummary */

/**
 * @param {number} now Unix time.
 * @returns {import("./table.js").Column<RunSummary>[]}
 */
function columns(now) {
  const seconds = (/** @type {string} */ time) => Date.parse(time) / 1000;
  return [
    { name: "run", title: "run", value: (run) => run.name, cell: (run) => html`<a href=${`#/runs/${encodeURIComponent(run.name)}`}>${run.name}</a>` },
    { name: "state", title: "state", value: (run) => run.state },
    { name: "steps", title: "steps", numeric: true, value: (run) => run.num_done, cell: (run) => `${number(run.num_done)} of ${number(run.num_steps)}` },
    { name: "reward", title: "reward", numeric: true, value: (run) => run.reward_mean, cell: (run) => html`<${Reward} value=${run.reward_mean} />` },
    { name: "held out", title: "held out", numeric: true, value: (run) => run.last_evaluation, cell: heldOut },
    { name: "difference", title: "difference", numeric: true, value: (run) => run.held_out_difference?.mean ?? null, cell: (run) => difference(run.held_out_difference) },
    { name: "algorithm", title: "algorithm", value: (run) => `${run.algorithm}${run.control === "none" ? "" : `, ${run.control}`}` },
    { name: "model", title: "model", value: (run) => run.model, hidden: true },
    { name: "seed", title: "seed", numeric: true, value: (run) => run.seed, hidden: true },
    { name: "time", title: "time", numeric: true, value: (run) => run.wall_s, cell: (run) => duration(run.wall_s) },
    { name: "changed", title: "changed", numeric: true, value: (run) => seconds(run.updated_at), cell: (run) => html`<${Ago} at=${seconds(run.updated_at)} now=${now} />` },
  ];
}

/** @param {{runs: RunSummary[]}} props */
function List({ runs }) {
  return html`<${DataTable}
    name="runs"
    label="runs"
    columns=${columns(Date.now() / 1000)}
    rows=${runs}
    keyOf=${(/** @type {RunSummary} */ run) => run.name}
  />`;
}

/** @param {import("./types").RunSummary} run */
export function heldOut(run) {
  if (run.first_evaluation === null) return "–";
  return `${number(run.first_evaluation)} to ${number(run.last_evaluation)}`;
}

/** @param {import("./types").Difference | null} found */
export function difference(found) {
  if (found === null) return "–";
  const error = found.standard_error === null ? "" : ` ± ${number(found.standard_error)}`;
  return `${found.mean > 0 ? "+" : ""}${number(found.mean)}${error}`;
}
