// The training runs of the data folder: how far each is, and what it gained on held-out tasks.

import { json } from "./api.js";
import { Table } from "./now.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
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
  return html`<p>There is none in the data folder of this server. <code>gangline train run SPEC</code> with the same data folder makes one.</p>`;
}

/** @param {{runs: import("./types").RunSummary[]}} props */
function List({ runs }) {
  return html`<${Table} titles=${["run", "state", "steps", "reward", "held out", "difference", "algorithm", "changed"]}>
    ${runs.map(
      (run) => html`<tr key=${run.name}>
        <td><a href=${`#/runs/${encodeURIComponent(run.name)}`}>${run.name}</a></td>
        <td>${run.state}</td>
        <td class="number">${number(run.num_done)} of ${number(run.num_steps)}</td>
        <td class="number">${number(run.reward_mean)}</td>
        <td class="number">${heldOut(run)}</td>
        <td class="number">${difference(run.held_out_difference)}</td>
        <td>${visible(run.algorithm)}${run.control === "none" ? "" : `, ${run.control}`}</td>
        <td>${run.updated_at.slice(0, 16).replace("T", " ")}</td>
      </tr>`,
    )}
  <//>`;
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
