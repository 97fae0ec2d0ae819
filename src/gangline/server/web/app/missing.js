// What stands where a session, a task or a run cannot be shown: why, what has a similar name, and where else to look.

import { json } from "./api.js";
import { isSaved } from "./saved.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

const NUM_NEAR = 5;
const ALIKE = 0.4;
/** Where the names of each kind are listed, what they are called, and the part of the page that shows one. */
const KINDS = {
  session: { path: "/v1/sessions?limit=300", list: "sessions", name: "session_id" },
  task: { path: "/v1/tasks?limit=300", list: "tasks", name: "task_id" },
  run: { path: "/v1/runs", list: "runs", name: "name" },
};

/**
 * The names most like a wanted one, or the first ones where none is like it.
 * @param {string} wanted
 * @param {string[]} names The newest first.
 * @returns {{names: string[], areAlike: boolean}}
 */
export function nearest(wanted, names) {
  const pairs = pairsOf(wanted);
  const scored = names.map((name) => ({ name, score: likeness(pairs, pairsOf(name)) }));
  const alike = scored.filter(({ score }) => score >= ALIKE).sort((a, b) => b.score - a.score);
  const chosen = alike.length > 0 ? alike.map(({ name }) => name) : names;
  return { names: chosen.slice(0, NUM_NEAR), areAlike: alike.length > 0 };
}

/** @param {string} text Its pairs of neighbouring characters, and the first one. */
function pairsOf(text) {
  const lower = ` ${text.toLowerCase()}`;
  return new Set(Array.from({ length: lower.length - 1 }, (_, at) => lower.slice(at, at + 2)));
}

/**
 * Share of pairs in common.
 * @param {Set<string>} a
 * @param {Set<string>} b
 */
function likeness(a, b) {
  const common = [...a].filter((pair) => b.has(pair)).length;
  return (2 * common) / Math.max(1, a.size + b.size);
}

/** @param {{what: keyof typeof KINDS, id: string, why: string}} props why: what the server said. */
export function Missing({ what, id, why }) {
  const [near, setNear] = useState({ names: /** @type {string[]} */ ([]), areAlike: false });
  const { path, list, name } = KINDS[what];
  useEffect(() => {
    let alive = true;
    const show = (/** @type {any} */ found) => alive && setNear(nearest(id, found[list].map((/** @type {any} */ one) => one[name])));
    if (!isSaved) json(path).then(show, () => {});
    return () => {
      alive = false;
    };
  }, [what, id]);
  return html`<main class="scroller now" tabindex="-1">
    <h1>${id === "" ? `A ${what} without a name` : `The ${what} ${visible(id)}`}</h1>
    <p class="problem" role="alert">${visible(why)}</p>
    ${near.names.length > 0 &&
    html`<p>${near.areAlike ? `${list[0].toUpperCase()}${list.slice(1)} with a similar name:` : `The newest ${list}:`}</p>
      <ul>
        ${near.names.map((one) => html`<li key=${one}><a href=${`#/${list}/${encodeURIComponent(one)}`}>${one}</a></li>`)}
      </ul>`}
    <${Elsewhere} />
  </main>`;
}

/** @param {{address: string}} props */
export function NoSuchPart({ address }) {
  return html`<main class="scroller now" tabindex="-1">
    <h1>Nothing is at this address</h1>
    <p class="problem" role="alert">The page has no part <code>${visible(address)}</code>.</p>
    <${Elsewhere} />
  </main>`;
}

function Elsewhere() {
  if (isSaved) return null;
  return html`<p>
    <a href="#/">Now</a> has the newest tasks and sessions, <a href="#/find">Find</a> searches all sessions that have ended, and
    ${" "}<a href="#/runs">Runs</a> lists the training runs.
  </p>`;
}
