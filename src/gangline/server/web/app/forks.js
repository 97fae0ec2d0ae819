// Forks of a session: a form that makes some from a turn, the tree that it is in, and its parent beside it.

import { Field } from "./actions.js";
import { Columns } from "./aligned.js";
import { json } from "./api.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").ForkNode} ForkNode */

const PARAMETERS = [
  ["temperature", "Temperature"],
  ["top_p", "Top-p"],
  ["max_tokens", "Max tokens"],
];

/** @type {Record<string, string>} */
const LABELS = { samples: "Samples", ...Object.fromEntries(PARAMETERS) };

/** @param {{id: string, turn: number}} props turn: the last call that the forks repeat. */
export function ForkForm({ id, turn }) {
  const [samples, setSamples] = useState("1");
  const [sampling, setSampling] = useState(/** @type {Record<string, string>} */ ({}));
  const [edit, setEdit] = useState("");
  const [engine, setEngine] = useState("");
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const start = () => {
    const rules = Object.entries(sampling).filter(([, value]) => value.trim() !== "");
    // JSON has no NaN: it would be sent as null, and forked without the rule.
    const wrong = [["samples", samples], ...rules].find(([, value]) => !Number.isFinite(Number(value)));
    if (wrong !== undefined) {
      setProblem(`${LABELS[wrong[0]]} must be a number, such as 1 or 0.5, and is '${wrong[1]}'. Nothing was forked.`);
      return;
    }
    const body = {
      turn,
      samples: Number(samples),
      edit: edit === "" ? null : edit,
      engine: engine.trim() === "" ? null : engine.trim(),
      sampling: rules.length === 0 ? null : Object.fromEntries(rules.map(([name, value]) => [name, { override: Number(value) }])),
    };
    setProblem("");
    setBusy(true);
    json(`/v1/sessions/${encodeURIComponent(id)}/forks`, { method: "POST", body }).then(
      (submitted) => (location.hash = `#/tasks/${encodeURIComponent(submitted.task_id)}`),
      (error) => {
        setProblem(error.message);
        setBusy(false);
      },
    );
  };
  return html`<section class="annotate" aria-label=${`Fork behind turn ${turn}`}>
    <p>The agent runs again. Its calls up to this one are answered from the record, and the later ones are sampled.</p>
    <${Field} label="Samples" value=${samples} onValue=${setSamples} />
    ${PARAMETERS.map(
      ([name, label]) => html`<${Field}
        label=${label}
        value=${sampling[name] ?? ""}
        onValue=${(/** @type {string} */ value) => setSampling({ ...sampling, [name]: value })}
      />`,
    )}
    <${Field} label="Role whose engine answers" value=${engine} onValue=${setEngine} />
    <label>
      Instead of the newest tool result, or of the user's text
      <textarea
        rows="3"
        value=${edit}
        onInput=${(/** @type {InputEvent} */ event) => setEdit(/** @type {HTMLTextAreaElement} */ (event.target).value)}
      ></textarea>
    </label>
    <button type="button" disabled=${busy} onClick=${start}>Start the forks</button>
    ${problem !== "" && html`<p class="problem" role="alert">${visible(problem)}</p>`}
  </section>`;
}

/**
 * @param {{id: string, tree: import("./types").ForkTree}} props
 */
export function ForkTree({ id, tree }) {
  if (tree.nodes.length < 2) return null;
  return html`<nav class="forks" aria-label="Forks">
    <h2>Forks</h2>
    <ul>
      ${tree.nodes.map(
        (node) => html`<li key=${node.session_id} style=${{ paddingLeft: `${12 * node.depth}px` }}>
          <a href=${`#/sessions/${encodeURIComponent(node.session_id)}`} aria-current=${node.session_id === id ? "page" : undefined}>
            ${node.session_id}
          </a>
          <small> ${factsOf(node).join(", ")}</small>
        </li>`,
      )}
    </ul>
    ${!tree.is_whole && html`<p>There are more.</p>`}
  </nav>`;
}

/** @param {ForkNode} node */
function factsOf(node) {
  const from = node.turn === null ? [] : [`from turn ${node.turn}`];
  const edited = node.edit === null ? [] : ["edited"];
  const how = node.outcome === null ? node.state : `${node.outcome.replaceAll("_", " ")}${node.reward === null ? "" : `, reward ${number(node.reward)}`}`;
  return [...from, ...edited, how];
}

/** @param {{node: ForkNode, parent: string}} props The fork, and its parent's id. */
export function BesideParent({ node, parent }) {
  const [pair, setPair] = useState(/** @type {import("./types").AlignedSamples | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    json(`/v1/sessions/${encodeURIComponent(parent)}/beside?other=${encodeURIComponent(node.session_id)}`).then(setPair, (problem) => setError(problem.message));
  }, [node.session_id, parent]);
  if (error !== "") return html`<p class="problem" role="alert">${visible(error)}</p>`;
  if (pair === null) return html`<p aria-busy="true">Comparing with the parent ...</p>`;
  const names = [`parent ${parent}`, `fork ${node.session_id}`];
  return html`<section class="beside" aria-label="Beside its parent">
    <p>A fork behind turn ${node.turn}: calls up to it are answered from the parent's record. One that diverged ended before.</p>
    ${node.edit !== null && html`<p>Its edit, which the first sampled call has in the place of the newest result:</p>
      <pre>${visible(node.edit)}</pre>`}
    <${Columns} group=${pair} label="Parent and fork side by side" name=${(/** @type {number} */ index) => names[index]} />
  </section>`;
}
