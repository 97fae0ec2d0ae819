// One model call in the timeline: what was new in its request, what the model answered, and its tokens on demand.

import { Drift, drifts } from "./drift.js";
import { ForkForm } from "./forks.js";
import { Messages } from "./parts.js";
import { duration, number } from "./scales.js";
import { Strip } from "./strip_view.js";
import { Tools } from "./tools.js";
import { visible } from "./visible.js";
import { html } from "./ui.js";

/** @typedef {import("./types").CallLine} CallLine */

/** A request with more new tokens opens folded. */
const LONG_TOKENS = 4000;

/**
 * @param {object} props
 * @param {CallLine} props.call
 * @param {import("./types").CallContent | undefined} props.content
 * @param {{number: number, content: import("./types").CallContent | undefined, isRepeat: boolean}} props.first The call
 * that its conversation began with, whose request had the tools of all; whether the call before had the same.
 * @param {(text: string) => boolean} props.isKnown Whether an earlier call had the text.
 * @param {boolean} props.selected
 * @param {boolean} props.opened Whether its tokens are shown.
 * @param {boolean} props.compared Whether its drift is shown.
 * @param {boolean} props.forking Whether the form of its forks is shown.
 * @param {string | null} props.forkable The session's id, where forks of it may be made.
 * @param {string} props.path Of the session's route.
 * @param {number | null} props.waited Seconds since the call before ended: the agent's own work.
 * @param {() => void} props.onSelect
 * @param {() => void} props.onToggle
 * @param {() => void} props.onCompare
 * @param {() => void} props.onFork
 * @param {Omit<import("./strip_view.js").StripProps, "call">} props.strip
 */
export function Turn({ call, content, first, isKnown, selected, opened, compared, forking, forkable, path, waited, onSelect, onToggle, onCompare, onFork, strip }) {
  const warnings = warningsOf(call);
  return html`<article
    class=${`turn${selected ? " selected" : ""}`}
    id=${`call-${call.number}`}
    aria-current=${selected ? "true" : undefined}
    aria-label=${`Call ${call.number}`}
    tabindex=${selected ? 0 : -1}
    onFocusIn=${onSelect}
    onMouseDown=${onSelect}
  >
    <header>
      <h2>Call ${call.number}</h2>
      <ul class="facts">
        ${factsOf(call, waited).map((fact) => html`<li>${fact}</li>`)}
      </ul>
      ${drifts(call) && html`<${Toggle} name="drift" open=${compared} onClick=${onCompare} />`}
      ${forkable !== null && call.turn !== null && html`<${Toggle} name="fork" open=${forking} onClick=${onFork} />`}
      <${Toggle} name="tokens" open=${opened} onClick=${onToggle} />
    </header>
    ${forking && forkable !== null && call.turn !== null && html`<${ForkForm} id=${forkable} turn=${call.turn} />`}
    ${warnings.map((warning) => html`<p class="warning">${warning}</p>`)}
    ${compared && html`<${Drift} call=${call.number} path=${path} />`}
    ${first.content !== undefined &&
    html`<${Tools}
      tools=${first.content.tools}
      call=${call.number}
      origin=${first.number}
      isRepeat=${first.isRepeat}
      isHidden=${call.unshown.some((what) => what.startsWith("its "))}
    />`}
    ${content === undefined
      ? html`<p class="preview">${visible(call.preview) || "..."}</p>`
      : html`<${Messages} messages=${[...content.new_messages, content.response]} isKnown=${isKnown} isLong=${call.num_new_ids > LONG_TOKENS} />
          ${content.num_cut_chars > 0 && html`<p class="warning">${number(content.num_cut_chars)} characters are left out; the
            result has them all.</p>`}`}
    ${opened && html`<${Strip} call=${call.number} ...${strip} />`}
  </article>`;
}

/** @param {{name: string, open: boolean, onClick: () => void}} props Opens something below the heading. */
function Toggle({ name, open, onClick }) {
  return html`<button type="button" class="toggle" aria-expanded=${open} onClick=${onClick}>
    <span aria-hidden="true">${open ? "▾" : "▸"}</span> ${name}
  </button>`;
}

/**
 * @param {CallLine} call
 * @param {number | null} waited
 */
function factsOf(call, waited) {
  const facts = [
    call.role === "main" ? "" : call.role.replace("_", " "),
    call.agent_role === null ? "" : visible(call.agent_role),
    `engine ${duration(Math.max(0, call.finished_at - call.started_at))}`,
    waited === null ? "" : `agent ${duration(Math.max(0, waited))} before`,
    `+${number(call.num_new_ids)} context`,
    `${number(call.num_sampled_ids)} sampled`,
    call.mean_logprob === null ? "" : `log-prob ${number(call.mean_logprob)} mean, ${number(call.lowest_logprob)} lowest`,
    call.versions.length === 0 ? "" : `version ${call.versions.join(", ")}`,
    call.certificate.context,
    call.certificate.as_rendered === true ? "as rendered" : "",
    call.certificate.finish_reason,
    call.score === null ? "" : `score ${number(call.score)}`,
  ];
  return facts.filter((fact) => fact !== "");
}

/** @param {CallLine} call */
function warningsOf(call) {
  const { certificate } = call;
  const found = [];
  if (call.status !== "complete") found.push(`${call.status}: the call ended before its reply did`);
  for (const what of call.unshown) found.push(`the model was not shown ${visible(what)}: its chat template does not render them`);
  if (call.masked !== null) found.push(`not trained on: ${visible(call.masked)}`);
  if (certificate.context === "diverged") {
    const at = certificate.first_divergence === null ? "" : ` at id ${number(certificate.first_divergence)}`;
    found.push(`does not continue call ${call.parent}${at}: ${certificate.cause ?? "unknown cause"}`);
  }
  if (call.relation === "changed") found.push(`the client changed the history of call ${call.origin}: ${visible(call.reason)}`);
  if (certificate.as_rendered === false) found.push(`not as the template renders it: ${visible(certificate.unlike_rendering ?? "")}`);
  if (certificate.fallback !== null) found.push(`rendered by the engine: ${visible(certificate.fallback)}`);
  if (certificate.parse !== "ok") found.push(`tool calls were read in part: ${certificate.parse}`);
  return found;
}
