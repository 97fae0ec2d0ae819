// How a session ended, at its top, whatever is shown below: what it died of, with the end of its program's output, or the
// way to why it has no reward.

import { request } from "./api.js";
import { fileAddress, why } from "./evidence.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").Outline} Outline */

/** What each outcome other than `completed` means. */
const ENDS = {
  agent_timeout: "The agent ran out of time.",
  turn_limit: "The agent made all the model calls that its task allows.",
  token_limit: "A model call had no room: the task's limit of tokens, or the model's context, was full.",
  agent_loop: "The agent did the same again and again, and was stopped.",
  memory_limit: "The agent used more memory than it had.",
  agent_error: "The agent failed.",
  no_model_call: "The agent ended without a call of the model, so it is not graded.",
  infra_error: "What runs the agent failed, not the agent, so it is not graded.",
  cancelled: "The session was cancelled.",
};
const OUTPUT = ["harness.stderr", "harness.stdout"];
const MAX_READ_BYTES = 8_000_000;
const END_CHARS = 4000;
const END_LINES = 30;

/** @param {Outline} outline */
function hasFailed(outline) {
  return outline.failure !== null || outline.outcome !== "completed";
}

/** @param {{outline: Outline, path: string, onWhy: (() => void) | null}} props onWhy: shows the evidence; null where it is shown. */
export function Ending({ outline, path, onWhy }) {
  const { outcome, failure, reward, unshown } = outline;
  if (outcome === null) return null;
  const failed = hasFailed(outline);
  const asks = onWhy !== null && (failed || reward === null || reward <= 0);
  if (!failed && !asks && unshown.length === 0) return null;
  return html`<section class="ending" aria-label="How the session ended" tabindex="0">
    ${failed &&
    html`<h2>${ENDS[/** @type {keyof typeof ENDS} */ (outcome)] ?? "The session failed."} <small>${outcome.replaceAll("_", " ")}</small></h2>`}
    ${failure !== null && html`<p class="problem">failure: ${failure.boundary}, ${visible(failure.message.slice(0, END_CHARS))} <small>${failure.code}</small></p>`}
    ${unshown.map((line) => html`<p class="warning">${visible(line)}</p>`)}
    ${failed && html`<${OutputEnd} outline=${outline} path=${path} />`}
    ${asks && html`<button type="button" onClick=${onWhy}>${why(reward)}</button>`}
  </section>`;
}

/** @param {Outline} outline The file with the last words of its program. */
function lastWords(outline) {
  const written = outline.files.filter((file) => file.num_bytes > 0);
  const named = OUTPUT.map((name) => written.find((file) => file.name === name));
  return named.find((file) => file !== undefined) ?? written.find((file) => file.name.startsWith("harness.logs/"));
}

/** @param {{outline: Outline, path: string}} props */
function OutputEnd({ outline, path }) {
  const [text, setText] = useState("");
  const file = lastWords(outline);
  const address = file === undefined || file.num_bytes > MAX_READ_BYTES ? "" : fileAddress(path, file.name, outline.attempt);
  useEffect(() => {
    if (address === "") return;
    request(address, { accept: "application/octet-stream" })
      .then((response) => response.text())
      .then((whole) => setText(endOf(whole)), (error) => setText(error.message));
  }, [address]);
  if (file === undefined) return outline.files.some(({ name }) => OUTPUT.includes(name)) && html`<p>Its program wrote nothing.</p>`;
  if (address === "") return html`<p>${visible(file.name)} is too long to be read here.</p>`;
  return html`<h3>End of ${visible(file.name)}</h3>
    <pre>${visible(text)}</pre>`;
}

/** @param {string} text */
function endOf(text) {
  return text.trimEnd().slice(-END_CHARS).split("\n").slice(-END_LINES).join("\n");
}
