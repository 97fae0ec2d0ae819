// The samples of a task side by side, from where they differ: one column for each, one row for each call.

import { json } from "./api.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").AlignedSample} AlignedSample */

const AT_ONCE = 6;
const SHOWN_CALLS = 20;

/** @param {{id: string, numSamples: number, changed: number}} props changed: grows when the task did. */
export function Aligned({ id, numSamples, changed }) {
  const [first, setFirst] = useState(0);
  const [group, setGroup] = useState(/** @type {import("./types").AlignedSamples | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    json(`/v1/tasks/${encodeURIComponent(id)}/aligned?first=${first}&limit=${AT_ONCE}`).then(setGroup, (problem) => setError(problem.message));
  }, [id, first, changed]);
  if (error !== "") return html`<p class="problem" role="alert">${error}</p>`;
  if (group === null) return html`<p aria-busy="true">Comparing the samples ...</p>`;
  return html`${numSamples > AT_ONCE &&
    html`<div class="views tabs" role="group" aria-label="Samples that are compared">
      ${Array.from({ length: Math.ceil(numSamples / AT_ONCE) }, (_, page) => page * AT_ONCE).map(
        (start) => html`<button type="button" aria-pressed=${first === start} onClick=${() => setFirst(start)}>
          ${start} to ${Math.min(start + AT_ONCE, numSamples) - 1}
        </button>`,
      )}
    </div>`}
    ${group.samples.length === 0 ? html`<p>None has calls yet.</p>` : html`<${Columns} group=${group} />`}`;
}

/**
 * @param {object} props
 * @param {import("./types").AlignedSamples} props.group
 * @param {string} [props.label]
 * @param {(index: number) => string} [props.name] Of a sample.
 */
export function Columns({ group, label = "Samples side by side", name = (index) => `sample ${index}` }) {
  const { samples } = group;
  const numCalls = Math.max(...samples.map((sample) => sample.calls.length));
  const numRows = Math.min(SHOWN_CALLS, numCalls);
  return html`<p>The first ${number(group.num_alike_ids)} tokens of all are alike.</p>
    ${numRows < numCalls && html`<p>The next ${number(numRows)} calls are shown, of ${number(numCalls)}.</p>`}
    <div class="sideways" role="region" aria-label=${`${label}, scrolled sideways`} tabindex="0">
      <table class="aligned" aria-label=${label}>
        <thead>
          <tr>
            ${samples.map(
              (sample) => html`<th scope="col" key=${sample.session_id}>
                <a href=${`#/sessions/${encodeURIComponent(sample.session_id)}`}>${name(sample.sample_index)}</a>
                ${facts(sample, name).map((fact) => html`<div>${fact}</div>`)}
              </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          <tr>
            ${samples.map((sample) => html`<td key=${sample.session_id}><${Leaving} sample=${sample} /></td>`)}
          </tr>
          ${Array.from(
            { length: numRows },
            (_, row) => html`<tr key=${row}>
              ${samples.map((sample) => html`<td key=${sample.session_id}><${CallCell} sample=${sample} row=${row} /></td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
}

/**
 * @param {AlignedSample} sample
 * @param {(index: number) => string} name
 */
function facts(sample, name) {
  const advantage = sample.advantage === null ? "" : `, advantage ${number(sample.advantage)}`;
  return [
    `reward ${number(sample.reward)}${advantage}`,
    (sample.outcome ?? "runs").replaceAll("_", " "),
    `${number(sample.num_calls)} calls, ${number(sample.num_sampled_ids)} sampled`,
    sample.nearest === null ? "" : `${number(sample.num_like_nearest)} tokens as ${name(sample.nearest)}`,
  ].filter((fact) => fact !== "");
}

/** @param {{sample: AlignedSample}} props */
function Leaving({ sample }) {
  if (sample.leaves_in_call === null) return html`<p>It ends here.</p>`;
  const text = sample.next_text === "" ? `ids ${sample.next_ids.slice(0, 10).join(" ")} ...` : visible(sample.next_text);
  return html`<p>${sample.is_sampled ? "Sampled" : "Prompted"} in call ${sample.leaves_in_call}, token ${number(sample.leaves_at_token)}:</p>
    <pre>${text}</pre>`;
}

/** @param {{sample: AlignedSample, row: number}} props */
function CallCell({ sample, row }) {
  const call = sample.calls[row];
  if (call === undefined) return null;
  return html`<a href=${`#/sessions/${encodeURIComponent(sample.session_id)}?call=${call.number}`}>call ${call.number}</a>${" "}
    ${visible(call.preview)}${" "}
    ${call.tools.length > 0 && html`<small> calls ${visible(call.tools.join(", "))}</small>`}`;
}
