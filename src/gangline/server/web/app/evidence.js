// Why a session has its reward: outcome, failure, the evaluator's details, and the files behind them.

import { request } from "./api.js";
import { LongText } from "./parts.js";
import { duration, number, size } from "./scales.js";
import { isSaved } from "./saved.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").Outline} Outline */

/** Files of the evaluator up to this size are open at once. */
const SHOWN_BYTES = 20_000;

/** @param {{outline: Outline, path: string}} props */
export function Evidence({ outline, path }) {
  const { failure, harness_exit: exit } = outline;
  const scored = outline.calls.filter((call) => call.score !== null);
  const masked = outline.calls.filter((call) => call.masked !== null).length;
  return html`<div class="scroller evidence" tabindex="0" role="region" aria-label="Reward and evidence">
    <h2>${outline.outcome === null ? "The session runs; it has no reward yet." : why(outline.reward)}</h2>
    <dl>
      <dt>outcome</dt>
      <dd>${(outline.outcome ?? "none yet").replaceAll("_", " ")}</dd>
      ${failure !== null &&
      html`<dt>failure</dt>
        <dd class="warning">${failure.boundary}: ${visible(failure.message)} (${failure.code})</dd>`}
      ${exit !== null &&
      html`<dt>agent's program</dt>
        <dd>${exitOf(exit)}</dd>`}
      <dt>trained on</dt>
      <dd>${outline.calls.length === 0 ? "there was no model call" : `${number(outline.calls.length - masked)} of ${number(outline.calls.length)} calls`}</dd>
      ${Object.entries(outline.untrainable).map(
        ([trace, reason]) => html`<dt>${trace}</dt>
          <dd class="warning">not trained on: ${visible(reason)}</dd>`,
      )}
    </dl>
    <h3>What the evaluator says</h3>
    ${Object.keys(outline.reward_details).length === 0
      ? html`<p>It gave no details.</p>`
      : html`<${Details} value=${outline.reward_details} />`}
    ${scored.length > 0 &&
    html`<h3>Scores of calls</h3>
      <p>${scored.map((call) => `call ${call.number}: ${number(call.score)}`).join(", ")}</p>`}
    <h3>Time</h3>
    <${Timings} outline=${outline} />
    <h3>Files</h3>
    ${outline.files.length === 0 && html`<p>None was kept.</p>`}
    ${outline.files.map(
      (file) => html`<${File} key=${file.name} name=${file.name} bytes=${file.num_bytes} path=${path} attempt=${outline.attempt} />`,
    )}
  </div>`;
}

/**
 * Of a file that is kept with the result.
 * @param {string} path Of the session's route.
 * @param {string} name
 * @param {number} attempt
 */
export function fileAddress(path, name, attempt) {
  return `${path}/file?name=${encodeURIComponent(name)}&attempt=${attempt}`;
}

/** @param {number | null} reward */
export function why(reward) {
  if (reward === null) return "Why is there no reward?";
  return `Why is the reward ${number(reward)}?`;
}

/** @param {NonNullable<Outline["harness_exit"]>} exit */
function exitOf(exit) {
  if (exit.timed_out) return "ended by its time budget";
  if (exit.signal !== null) return `ended by signal ${exit.signal}`;
  return `exit code ${exit.exit_code}`;
}

/** @param {{value: unknown}} props */
function Details({ value }) {
  if (value === null || typeof value !== "object") return html`<${LongText} text=${String(value)} kind="detail" />`;
  const entries = Array.isArray(value) ? value.map((one, index) => [String(index), one]) : Object.entries(value);
  return html`<dl class="details">
    ${entries.map(
      ([name, one]) => html`<dt>${visible(String(name))}</dt>
        <dd><${Details} value=${one} /></dd>`,
    )}
  </dl>`;
}

/** @param {{outline: Outline}} props */
function Timings({ outline }) {
  const timings = outline.timings.map((timing) =>
    Array.isArray(timing) ? { stage: timing[0], started_at: timing[1], ended_at: timing[2] } : timing,
  );
  const engine = outline.calls.reduce((sum, call) => sum + Math.max(0, call.finished_at - call.started_at), 0);
  return html`<p>
    ${timings.map(({ stage, started_at, ended_at }) => `${stage} ${duration(Math.max(0, ended_at - started_at))}`).join(", ")}.
    All model calls together ${duration(engine)}.
  </p>`;
}

/** @param {{name: string, bytes: number, path: string, attempt: number}} props */
function File({ name, bytes, path, attempt }) {
  const [isOpen, setOpen] = useState(!name.startsWith("harness.") && bytes <= SHOWN_BYTES);
  const [text, setText] = useState(/** @type {string | null} */ (null));
  const address = fileAddress(path, name, attempt);
  useEffect(() => {
    if (!isOpen || text !== null) return;
    request(address, { accept: "application/octet-stream" })
      .then((response) => response.text())
      .then(setText, (error) => setText(error.message));
  }, [isOpen]);
  return html`<section class="part file">
    <button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
      <span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> ${visible(name)} (${size(bytes)})
    </button>
    ${!isSaved && html`<a href=${address} download=${visible(name).replaceAll("/", "_")}>save</a>`}
    ${isOpen && (text === null ? html`<p>Loading ...</p>` : html`<${LongText} text=${text} kind="file" />`)}
  </section>`;
}
