// What can be done with a task or a session: cancel it, save its result, copy the request for it, annotate it.

import { json } from "./api.js";
import { visible } from "./visible.js";
import { mayChange } from "./visitor.js";
import { html, useEffect, useState } from "./ui.js";

const VERDICTS = ["good", "bad", "unsure"];

/**
 * A button that asks once more.
 * @param {{label: string, sure: string, act: () => Promise<unknown>}} props
 */
function Careful({ label, sure, act }) {
  const [asked, setAsked] = useState(false);
  const [error, setError] = useState("");
  const press = () => {
    setAsked(!asked);
    if (asked) act().catch((problem) => setError(problem.message));
  };
  return html`<button type="button" onClick=${press} onBlur=${() => setAsked(false)}>${asked ? sure : label}</button>
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`}`;
}

/** @param {{path: string}} props */
function CopyCurl({ path }) {
  const [said, setSaid] = useState("Copy as curl");
  const command = `curl -H "Authorization: Bearer $GANGLINE_TOKEN" '${location.origin}${path}'`;
  const copy = () => {
    if (navigator.clipboard === undefined) setSaid(command); // not over plain HTTP to another machine
    else navigator.clipboard.writeText(command).then(() => setSaid("Copied"), () => setSaid(command));
  };
  return html`<button type="button" onClick=${copy}>${said}</button>`;
}

/** @param {{path: string, name: string}} props The result's route, and a name for the file. */
function Save({ path, name }) {
  return html`<a class="button" href=${path} download=${`${name}.json`}>Save as JSON</a>`;
}

/** @param {{id: string, running: boolean}} props */
export function TaskActions({ id, running }) {
  const path = `/v1/tasks/${encodeURIComponent(id)}`;
  const result = `${path}/result?partial=1`;
  return html`<div class="views do" role="group" aria-label="Do">
    <${Save} path=${result} name=${id} />
    <${CopyCurl} path=${result} />
    ${running &&
    mayChange.value &&
    html`<${Careful} label="Cancel the task" sure="Really cancel?" act=${() => json(path, { method: "DELETE" })} />`}
  </div>`;
}

/** @param {{id: string, running: boolean, call: number}} props call: the selected one. */
export function SessionActions({ id, running, call }) {
  const path = `/v1/sessions/${encodeURIComponent(id)}`;
  return html`<div class="views do" role="group" aria-label="Do">
      ${!running && html`<${Save} path=${`${path}/result`} name=${id} />`}
      <${CopyCurl} path=${running ? `${path}/outline` : `${path}/result`} />
      ${running &&
      mayChange.value &&
      html`<${Careful} label="Cancel the session" sure="Really cancel?" act=${() => json(path, { method: "DELETE" })} />`}
    </div>
    <${Annotations} id=${id} call=${call} />`;
}

/** @param {{id: string, call: number}} props */
function Annotations({ id, call }) {
  const [said, setSaid] = useState(/** @type {import("./types").Annotation[]} */ ([]));
  const [open, setOpen] = useState(false);
  const [problem, setProblem] = useState("");
  const read = () =>
    json(`/v1/annotations?session_id=${encodeURIComponent(id)}`).then(
      (page) => setSaid(page.annotations),
      (error) => setProblem(error.message),
    );
  useEffect(() => {
    read();
  }, [id]);
  const add = (/** @type {object} */ annotation) =>
    json(`/v1/sessions/${encodeURIComponent(id)}/annotations`, { method: "POST", body: annotation }).then(
      () => {
        setOpen(false);
        setProblem("");
        read();
      },
      (error) => setProblem(error.message),
    );
  return html`<section aria-label="Annotations">
    ${mayChange.value && html`<button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>Annotate</button>`}
    ${open && html`<${AnnotationForm} call=${call} onAdd=${add} />`}
    ${problem !== "" && html`<p class="problem" role="alert">${problem}</p>`}
    <ul class="annotations">
      ${said.map(
        (one) => html`<li key=${one.position}>
          <b>${one.verdict ?? "note"}</b>${one.call === null ? "" : `, call ${one.call}`}${one.dataset === "" ? "" : `, in ${one.dataset}`}: ${visible(one.note)}
          <small> ${one.by}</small>
        </li>`,
      )}
    </ul>
  </section>`;
}

/** @param {{call: number, onAdd: (annotation: object) => void}} props */
function AnnotationForm({ call, onAdd }) {
  const [verdict, setVerdict] = useState(/** @type {string | null} */ (null));
  const [note, setNote] = useState("");
  const [dataset, setDataset] = useState("");
  const [ofCall, setOfCall] = useState(false);
  const add = () => onAdd({ verdict, note, dataset, call: ofCall ? call : null });
  const enter = (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && add();
  return html`<div class="annotate">
    <div class="views" role="group" aria-label="Verdict">
      ${VERDICTS.map(
        (one) => html`<button type="button" aria-pressed=${verdict === one} onClick=${() => setVerdict(verdict === one ? null : one)}>
          ${one}
        </button>`,
      )}
      <button type="button" aria-pressed=${ofCall} onClick=${() => setOfCall(!ofCall)}>of call ${call}</button>
    </div>
    <${Field} label="Note" value=${note} onValue=${setNote} onEnter=${enter} />
    <${Field} label="Dataset" value=${dataset} onValue=${setDataset} onEnter=${enter} />
    <button type="button" onClick=${add}>Save the annotation</button>
  </div>`;
}

/**
 * @param {{label: string, value: string, onValue: (value: string) => void, onEnter?: (event: KeyboardEvent) => unknown}} props
 */
export function Field({ label, value, onValue, onEnter }) {
  return html`<label>
    ${label}
    <input
      value=${value}
      maxlength="1000"
      onInput=${(/** @type {InputEvent} */ event) => onValue(/** @type {HTMLInputElement} */ (event.target).value)}
      onKeyDown=${onEnter}
    />
  </label>`;
}
