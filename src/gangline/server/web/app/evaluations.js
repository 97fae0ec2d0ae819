// The evaluations that were sent to this server, and how an evaluation's figures look: as `gangline eval` prints them.

import { json } from "./api.js";
import { Ago, DataTable } from "./table.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").EvaluationSummary} EvaluationSummary */
/** @typedef {import("./types").Estimate} Estimate */

export const AGAIN_MS = 5_000;

export function Evaluations() {
  const [found, setFound] = useState(/** @type {EvaluationSummary[] | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    const read = () =>
      document.visibilityState === "visible" &&
      json("/v1/evaluations").then(
        (answer) => (setFound(answer.evaluations), setError("")),
        (problem) => setError(problem.message),
      );
    read();
    const timer = setInterval(read, AGAIN_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<main class="scroller now" tabindex="-1">
    <h1>Evaluations</h1>
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`}
    ${found === null && error === "" && html`<p aria-busy="true">Reading the evaluations ...</p>`}
    ${found !== null && (found.length === 0 ? html`<${None} />` : html`<${List} evaluations=${found} />`)}
  </main>`;
}

function None() {
  return html`<p>
    There is none yet. <code>gangline eval FILE</code> runs an agent on the tasks of a file through this server, and shows its
    results here while it runs.
  </p>`;
}

/** @type {import("./table.js").Column<EvaluationSummary>[]} */
const COLUMNS = [
  {
    name: "evaluation",
    title: "evaluation",
    value: (one) => one.name,
    cell: (one) => html`<a href=${`#/evaluations/${encodeURIComponent(one.evaluation_id)}`}>${visible(one.name)}</a>`,
  },
  { name: "tasks", title: "tasks", numeric: true, value: (one) => one.whole.num_tasks, cell: (one) => tasksDone(one.whole.num_tasks, one.num_left) },
  { name: "sessions", title: "sessions", numeric: true, value: (one) => one.whole.num_sessions },
  { name: "counted", title: "counted", numeric: true, value: (one) => one.whole.num_counted },
  { name: "reward", title: "reward", numeric: true, value: (one) => one.whole.reward?.mean, cell: (one) => estimate(one.whole.reward) },
  { name: "passed", title: "passed", numeric: true, value: (one) => one.whole.passed?.mean, cell: (one) => estimate(one.whole.passed) },
  { name: "tokens", title: "tokens", numeric: true, value: (one) => one.whole.sampled_tokens, cell: (one) => amount(one.whole.sampled_tokens) },
  { name: "cost", title: "cost", numeric: true, value: (one) => one.whole.cost, cell: (one) => amount(one.whole.cost) },
  { name: "changed", title: "changed", numeric: true, value: (one) => one.updated_at, cell: (one) => html`<${Ago} at=${one.updated_at} now=${Date.now() / 1000} />` },
];

/** @param {{evaluations: EvaluationSummary[]}} props */
function List({ evaluations }) {
  return html`<${DataTable}
    name="evaluations"
    label="evaluations"
    columns=${COLUMNS}
    rows=${evaluations}
    keyOf=${(/** @type {EvaluationSummary} */ one) => one.evaluation_id}
  />`;
}

/**
 * @param {number} num Tasks with results.
 * @param {number} numLeft Tasks without.
 */
export function tasksDone(num, numLeft) {
  return numLeft === 0 ? number(num) : `${number(num)} of ${number(num + numLeft)}`;
}

/**
 * With three decimals. A number halfway between two goes to the even one, as Python rounds, so that page and terminal
 * show the same. Only odd sixteenths lie halfway.
 * @param {number} value
 */
export function fixed(value) {
  const thousands = value * 1000;
  const isHalfway = Number.isInteger(value * 16) && !Number.isInteger(thousands);
  if (!isHalfway) return value.toFixed(3);
  const below = Math.floor(thousands);
  return ((below % 2 === 0 ? below : below + 1) / 1000).toFixed(3);
}

/** @param {number} value */
export function signed(value) {
  return `${value < 0 ? "" : "+"}${fixed(value)}`;
}

/** @param {number | null | undefined} value A mean or a sum, to four digits. */
export function amount(value) {
  return value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

/** @param {Estimate | null | undefined} found A mean with its standard error, or with Wilson's interval. */
export function estimate(found) {
  if (found === null || found === undefined) return "–";
  if (found.interval !== null) return `${fixed(found.mean)} (${found.interval.map(fixed).join(" to ")})`;
  return fixed(found.mean) + (found.standard_error === null ? "" : ` ± ${fixed(found.standard_error)}`);
}

/**
 * A line of figures for each slice, in the columns of `gangline eval`.
 * @param {{label: string, slices: import("./types").EvaluationSlice[], numLeft?: number}} props label: what the slices
 *   are values of; empty for the whole alone.
 */
export function Figures({ label, slices, numLeft = 0 }) {
  const ks = [...new Set(slices.flatMap((one) => Object.keys(one.pass_at)))].filter((k) => k !== "1").sort((a, b) => Number(a) - Number(b));
  const hasCost = slices.some((one) => one.cost !== null);
  const titles = ["tasks", "sessions", "counted", "reward", "passed", ...ks.map((k) => `pass@${k}`), ...ks.map((k) => `pass^${k}`), "turns", "tokens", "seconds"];
  return html`<div class="data sideways" role="region" tabindex="0" aria-label=${label === "" ? "Figures" : `Figures by ${visible(label)}`}>
    <table>
      <thead>
        <tr>
          ${label !== "" && html`<th scope="col">${visible(label)}</th>`}
          ${[...titles, ...(hasCost ? ["cost"] : [])].map((title) => html`<th scope="col" class="number">${title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${slices.map(
          (one) => html`<tr key=${one.name}>
            ${label !== "" && html`<th scope="row">${visible(one.name)}</th>`}
            ${[
              tasksDone(one.num_tasks, numLeft),
              number(one.num_sessions),
              number(one.num_counted),
              estimate(one.reward),
              estimate(one.passed),
              ...ks.map((k) => estimate(one.pass_at[k])),
              ...ks.map((k) => estimate(one.pass_hat[k])),
              amount(one.turns),
              amount(one.sampled_tokens),
              amount(one.seconds),
              ...(hasCost ? [amount(one.cost)] : []),
            ].map((text) => html`<td class="number">${text}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
