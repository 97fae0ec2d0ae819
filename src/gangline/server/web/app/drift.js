// Drift of one call: what the harness sent, what became of it as tokens, and where that first departs from the record.

import { json } from "./api.js";
import { Messages } from "./parts.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").CallDrift} CallDrift */

const CAUSES = {
  bpe_merge: "The same text, divided into other tokens: the template renders a reply's text anew, and the tokenizer merges it otherwise.",
  thinking_dropped: "The thinking of an earlier reply is left out.",
  tool_call_reserialised: "A tool call is written otherwise than it was sampled.",
  whitespace: "The same text but for white space.",
  system_changed: "The harness changed the system text.",
  tools_changed: "The harness changed the tools.",
  model_changed: "The harness asked for another model.",
  template_changed: "The template, or its arguments, changed.",
  history_edited: "The harness changed an earlier message.",
  special_token_in_text: "A text contains the name of a special token.",
  truncated_turn: "An earlier reply was cut off.",
  end_of_turn: "The template ends a reply otherwise than it was sampled.",
  template_rewrites: "The template writes earlier content otherwise once more follows it.",
  unknown: "The cause is not known.",
};
const MAKERS = {
  engine: "Rendered by the engine's template",
  rendered: "Rendered by Gangline with the model's template",
  stitched: "Stitched by Gangline",
};

/**
 * Whether a call has a difference to show.
 * @param {import("./types").CallLine | undefined} call
 */
export function drifts(call) {
  return call !== undefined && (call.certificate.context === "diverged" || call.relation === "changed");
}

/** @param {{call: number, path: string}} props path: of the session's route. */
export function Drift({ call, path }) {
  const [drift, setDrift] = useState(/** @type {CallDrift | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    json(`${path}/drift?call=${call}`).then(setDrift, (problem) => setError(problem.message));
  }, [call, path]);
  if (error !== "") return html`<p class="problem" role="alert">${error}</p>`;
  if (drift === null) return html`<p aria-busy="true">Comparing ...</p>`;
  const cause = CAUSES[/** @type {keyof typeof CAUSES} */ (drift.cause ?? "unknown")] ?? "";
  return html`<section class="drift" aria-label=${`Drift of call ${call}`}>
    <h3>Cause: ${(drift.cause ?? "unknown").replaceAll("_", " ")}</h3>
    <p>${cause}</p>
    ${drift.change !== null && html`<${Change} change=${drift.change} />`}
    <h3>Sent by the harness</h3>
    ${drift.num_known_messages > 0 &&
    html`<p>
      ${number(drift.num_known_messages)} messages that mean the same as those of call ${drift.parent}; their wording in this request is
      not recorded. After them:
    </p>`}
    ${drift.sent.length === 0 ? html`<p>No new message.</p>` : html`<${Messages} messages=${drift.sent} />`}
    ${drift.tokens === null
      ? html`<p>There are no tokens to compare: the request continues no recorded tokens.</p>`
      : html`<${Tokens} drift=${drift} tokens=${drift.tokens} />`}
  </section>`;
}

/** @param {{change: NonNullable<CallDrift["change"]>}} props */
function Change({ change }) {
  return html`<h3>Changed in the history of call ${change.origin}</h3>
    ${change.tools.length > 0 && html`<p>Other tools: ${visible(change.tools.join(", "))}.</p>`}
    ${change.index === null
      ? change.tools.length === 0 && html`<p>The change precedes all messages.</p>`
      : html`<div class="versus">
          <div><h4>Message ${change.index}, as recorded</h4><${OneMessage} message=${change.recorded} /></div>
          <div><h4>Message ${change.index}, as sent</h4><${OneMessage} message=${change.sent} /></div>
        </div>`}`;
}

/** @param {{message: import("./types").Message | null}} props */
function OneMessage({ message }) {
  return message === null ? html`<p>There is none.</p>` : html`<${Messages} messages=${[message]} />`;
}

/** @param {{drift: CallDrift, tokens: NonNullable<CallDrift["tokens"]>}} props */
function Tokens({ drift, tokens }) {
  const { first, recorded, prompted, alike } = tokens;
  return html`<h3>First difference</h3>
    <p>
      ${`Token ${number(first)} of ${number(tokens.num_context_ids)}, ${tokens.is_sampled ? "sampled in" : "prompted in"} call ${tokens.in_call}: `}
      ${recorded.ids.length === 0 ? "no id" : `id ${recorded.ids[0]}`} there, ${prompted.ids.length === 0 ? "no id" : `id ${prompted.ids[0]}`} here.
      ${drift.prompt_source !== "stitched" && ` Nothing was stitched: ${visible(drift.fallback ?? "the engine was sent messages")}.`}
    </p>
    <div class="versus">
      <div><h4>Recorded up to call ${drift.parent}, what stitching keeps</h4><${Stretch} alike=${alike} rest=${recorded} /></div>
      <div><h4>${MAKERS[drift.prompt_source] ?? drift.prompt_source} for call ${drift.number}</h4><${Stretch} alike=${alike} rest=${prompted} /></div>
    </div>`;
}

/** @param {{alike: import("./types").Stretch, rest: import("./types").Stretch}} props */
function Stretch({ alike, rest }) {
  const ids = rest.ids.slice(0, 12).join(" ");
  return html`<pre>${alike.num_left_out > 0 ? "... " : ""}${visible(alike.text)}<mark>${visible(rest.text)}</mark>${rest.num_left_out > 0 ? " ..." : ""}</pre>
    <p class="ids">ids ${ids}${rest.ids.length > 12 || rest.num_left_out > 0 ? " ..." : ""}</p>`;
}
