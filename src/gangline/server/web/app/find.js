// Find: ended sessions by words, rewards, outcomes, causes and rules. What is looked for is in the address, so that a
// search can be sent and kept as a link.

import { Field } from "./actions.js";
import { json } from "./api.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const PAUSE_MS = 120;
const RULES = {
  tool_error: "tool errors",
  cut_at_length: "cut at length",
  repeated_action: "same action repeated",
  git_history: "git history read",
  test_edited: "test edited",
  empty_patch: "empty patch",
};
const FIELDS = [
  ["words", "Words"],
  ["min_reward", "Reward from"],
  ["max_reward", "to"],
  ["outcome", "Outcome"],
  ["cause", "Cause"],
  ["harness", "Harness"],
  ["version", "Policy version"],
  ["task_id", "Task"],
];

/** @param {{query: string}} props query: of the address. */
export function Find({ query }) {
  const [wanted, setWanted] = useState(() => Object.fromEntries(new URLSearchParams(query)));
  const [found, setFound] = useState(/** @type {import("./types").FindAnswer | null} */ (null));
  const [error, setError] = useState("");
  const newest = useRef(0);
  const form = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => form.current?.querySelector("input")?.focus(), []);
  useEffect(() => {
    const asked = ++newest.current;
    const given = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value !== "")).toString();
    history.replaceState(null, "", given === "" ? "#/find" : `#/find?${given}`);
    const show = (/** @type {import("./types").FindAnswer | null} */ answer, /** @type {string} */ problem) => {
      if (asked !== newest.current) return;
      if (answer !== null) setFound(answer);
      setError(problem);
    };
    const timer = setTimeout(() => json(`/v1/find?${given}`).then((answer) => show(answer, ""), (problem) => show(null, problem.message)), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [wanted]);
  const set = (/** @type {string} */ name, /** @type {string} */ value) => setWanted({ ...wanted, [name]: value });
  return html`<main class="scroller now" tabindex="-1">
    <h1>Find</h1>
    <div class="find" role="search" ref=${form}>
      ${FIELDS.map(
        ([name, label]) =>
          html`<${Field} key=${name} label=${label} value=${wanted[name] ?? ""} onValue=${(/** @type {string} */ value) => set(name, value)} />`,
      )}
    </div>
    <div class="views" role="group" aria-label="Rules">
      ${Object.entries(RULES).map(
        ([rule, label]) => html`<button
          type="button"
          aria-pressed=${wanted["rule"] === rule}
          onClick=${() => set("rule", wanted["rule"] === rule ? "" : rule)}
        >
          ${label}
        </button>`,
      )}
    </div>
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`} ${found !== null && html`<${Results} found=${found} />`}
  </main>`;
}

/** @param {{found: import("./types").FindAnswer}} props */
function Results({ found }) {
  const waiting = found.num_waiting === 0 ? "" : `, ${number(found.num_waiting)} are not in the index yet`;
  return html`<p role="status">
      ${found.sessions.length}${found.has_more ? " and more" : ""} of ${number(found.num_indexed)} sessions${waiting}
    </p>
    <ul class="found">
      ${found.sessions.map(
        (session) => html`<li key=${session.session_id}>
          <a href=${`#/sessions/${encodeURIComponent(session.session_id)}`}>${session.session_id}</a>${" "}
          <span>
            ${[
              `reward ${number(session.reward)}`,
              session.outcome.replaceAll("_", " "),
              visible(session.cause),
              visible(session.harness),
              session.versions.length === 0 ? "" : `version ${session.versions.join(", ")}`,
              ...session.rules.map((rule) => RULES[/** @type {keyof typeof RULES} */ (rule)] ?? rule),
            ]
              .filter((fact) => fact !== "")
              .join(", ")}
          </span>
          ${session.hits.map((hit) => html`<${Hit} id=${session.session_id} hit=${hit} />`)}
        </li>`,
      )}
    </ul>`;
}

/** @param {{id: string, hit: import("./types").Hit}} props */
function Hit({ id, hit }) {
  const address = `#/sessions/${encodeURIComponent(id)}${hit.call < 0 ? "" : `?call=${hit.call}`}`;
  return html`<p>
    <a href=${address}>${hit.call < 0 ? "" : `call ${hit.call}, `}${hit.kind.replace("_", " ")}</a>:${" "}
    ${hit.snippet.split("\u0002").flatMap((piece, index) => {
      if (index === 0) return [visible(piece)];
      const [word, ...rest] = piece.split("\u0003");
      return [html`<mark>${visible(word)}</mark>`, visible(rest.join(""))];
    })}
  </p>`;
}
