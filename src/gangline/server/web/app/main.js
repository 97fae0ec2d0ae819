// The page: which part is shown, by the part of the address after `#`, and the keys that work everywhere.

import { Evaluation } from "./evaluation.js";
import { Evaluations } from "./evaluations.js";
import { Find } from "./find.js";
import { NoSuchPart } from "./missing.js";
import { Now } from "./now.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";
import { isSaved, saved } from "./saved.js";
import { Session } from "./session.js";
import { Task } from "./task.js";
import { html, isTyping, render, useEffect, useState } from "./ui.js";

const HELP = [
  ["g n", "now: tasks and sessions"],
  ["g r", "training runs"],
  ["g e", "evaluations"],
  ["/", "find sessions"],
  ["j, k", "next, previous"],
  ["Enter", "open"],
  ["t", "tokens of the call"],
  ["arrows, u", "in tokens: move, next unlikely token"],
  ["d", "drift of a call: how it departs from the call before"],
  ["c", "colour of tokens"],
  ["f", "follow a running session: the newest call, with its tokens"],
  ["e", "why this reward, and files"],
  ["[ ]", "previous, next chain"],
  ["?", "these keys"],
];

/** @param {string} hash */
function route(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  const [, kind = "", id = ""] = path.split("/");
  const call = new URLSearchParams(query).get("call");
  return { kind, query, path, id: decoded(id), call: call === null || !/^\d{1,9}$/.test(call) ? null : Number(call) };
}

/** @param {string} text Of the address, where anybody may have written anything. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function Page() {
  const [at, setAt] = useState(() => route(location.hash));
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const moved = () => setAt(route(location.hash));
    let leads = false;
    const key = (/** @type {KeyboardEvent} */ event) => {
      if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (leads && event.key === "n") location.hash = "#/";
      if (leads && event.key === "r") location.hash = "#/runs";
      if (leads && event.key === "e") location.hash = "#/evaluations";
      if (event.key === "/") {
        location.hash = "#/find";
        event.preventDefault();
      }
      if (event.key === "?") setHelp((shown) => !shown);
      if (event.key === "Escape") setHelp(false);
      leads = event.key === "g";
    };
    addEventListener("hashchange", moved);
    addEventListener("keydown", key);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("keydown", key);
    };
  }, []);
  useEffect(() => {
    document.title = at.id === "" ? "Gangline" : `${at.id} – Gangline`;
  }, [at.id]);
  return html`<header class="top">
      <a href="#/">Gangline</a>
      <span>${at.kind === "" ? "now" : at.kind.replace(/s$/, "")} ${at.id}</span>
      <a href="#/runs">Runs (g r)</a>
      <a href="#/evaluations">Evaluations (g e)</a>
      <a href="#/find">Find (/)</a>
      <button type="button" aria-expanded=${help} onClick=${() => setHelp(!help)}>Keys (?)</button>
    </header>
    ${help && html`<${Help} />`} ${part(at)}`;
}

/** @param {ReturnType<typeof route>} at */
function part({ kind, id, call, query, path }) {
  if (id === "" && (kind === "sessions" || kind === "tasks")) return html`<${NoSuchPart} address=${`#${path}`} />`;
  if (kind === "find") return html`<${Find} key=${query} query=${query} />`;
  if (kind === "sessions") return html`<${Session} key=${id} id=${id} call=${call} />`;
  if (kind === "runs") return id === "" ? html`<${Runs} />` : html`<${Run} key=${id} name=${id} query=${query} />`;
  if (kind === "evaluations") return id === "" ? html`<${Evaluations} />` : html`<${Evaluation} key=${id} id=${id} query=${query} />`;
  if (kind === "tasks") return html`<${Task} key=${id} id=${id} />`;
  return kind === "" ? html`<${Now} />` : html`<${NoSuchPart} address=${`#${path}`} />`;
}

function Help() {
  return html`<section class="help" aria-label="Keys">
    <dl>
      ${HELP.map(
        ([keys, meaning]) => html`<dt>${keys}</dt>
          <dd>${meaning}</dd>`,
      )}
    </dl>
  </section>`;
}

if (isSaved && location.hash === "") {
  const { id } = await saved();
  location.replace(`#/sessions/${encodeURIComponent(id)}`);
}
render(html`<${Page} />`, /** @type {HTMLElement} */ (document.getElementById("page")));
