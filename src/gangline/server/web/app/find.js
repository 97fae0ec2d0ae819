// Find: ended sessions by words, rewards, outcomes, causes and rules. What is looked for is in the address, so that a
// search can be sent and kept as a link.

import { json } from "./api.js";
import { number } from "./scales.js";
import { DataTable, Reward } from "./table.js";
import { visible } from "./visible.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const PAUSE_MS = 120;
/** Until the index has all sessions, a search is made again. */
const AGAIN_MS = 1000;
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
    let timer = setTimeout(read, PAUSE_MS);
    const show = (/** @type {import("./types").FindAnswer | null} */ answer, /** @type {string} */ problem) => {
      if (asked !== newest.current) return;
      if (answer !== null) setFound(answer);
      setError(problem);
      if (answer !== null && answer.num_waiting > 0) timer = setTimeout(read, AGAIN_MS);
    };
    function read() {
      json(`/v1/find?${given}`).then((answer) => show(answer, ""), (problem) => show(null, problem.message));
    }
    return () => {
      newest.current += 1;
      clearTimeout(timer);
    };
  }, [wanted]);
  const set = (/** @type {string} */ name, /** @type {string} */ value) => setWanted({ ...wanted, [name]: value });
  const isAny = Object.values(wanted).some((value) => value !== "");
  return html`<main class="scroller now" tabindex="-1">
    <h1>Find</h1>
    <div class="find" role="search" ref=${form}>
      ${FIELDS.map(
        ([name, label]) =>
          html`<${Condition}
            key=${name}
            name=${name}
            label=${label}
            value=${wanted[name] ?? ""}
            known=${found?.known[name] ?? []}
            onValue=${(/** @type {string} */ value) => set(name, value)}
          />`,
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
    ${error !== "" && html`<p class="problem" role="alert">${error}</p>`} ${found !== null && html`<${Results} found=${found} isAny=${isAny} onClear=${() => setWanted({})} />`}
  </main>`;
}

/**
 * @param {{name: string, label: string, value: string, known: string[], onValue: (value: string) => void}} props known:
 *   values in the index. There are few outcomes, so that one is chosen; elsewhere they are suggested.
 */
function Condition({ name, label, value, known, onValue }) {
  const onInput = (/** @type {Event} */ event) => onValue(/** @type {HTMLInputElement | HTMLSelectElement} */ (event.target).value);
  if (name === "outcome") {
    const outcomes = known.includes(value) || value === "" ? known : [...known, value];
    return html`<label>
      ${label}
      <select value=${value} onChange=${onInput}>
        <option value="">any</option>
        ${outcomes.map((outcome) => html`<option key=${outcome} value=${outcome}>${outcome.replaceAll("_", " ")}</option>`)}
      </select>
    </label>`;
  }
  return html`<label>
    ${label}
    <input type="text" value=${value} onInput=${onInput} ...${known.length > 0 ? { list: `known-${name}` } : {}} />
    ${known.length > 0 && html`<datalist id=${`known-${name}`}>${known.map((one) => html`<option key=${one} value=${one}></option>`)}</datalist>`}
  </label>`;
}

/** @typedef {import("./types").FindAnswer["sessions"][number]} FoundSession */

/** @type {import("./table.js").Column<FoundSession>[]} */
const COLUMNS = [
  { name: "session", title: "session", value: (session) => session.session_id, cell: sessionLink },
  { name: "reward", title: "reward", numeric: true, value: (session) => session.reward, cell: (session) => html`<${Reward} value=${session.reward} />` },
  { name: "outcome", title: "outcome", value: (session) => session.outcome.replaceAll("_", " ") },
  { name: "cause", title: "cause", value: (session) => session.cause },
  { name: "harness", title: "harness", value: (session) => session.harness },
  { name: "calls", title: "calls", numeric: true, value: (session) => session.num_calls },
  { name: "version", title: "version", value: (session) => session.versions.join(", ") },
  { name: "rules", title: "rules", wraps: "words", value: (session) => session.rules.map((rule) => RULES[/** @type {keyof typeof RULES} */ (rule)] ?? rule).join(", ") },
  { name: "task", title: "task", value: (session) => session.task_id, hidden: true },
  {
    name: "places",
    title: "where",
    wraps: "anywhere",
    value: (session) => session.hits.map((hit) => hit.snippet).join("\n"),
    cell: (session) => session.hits.map((hit) => html`<${Hit} id=${session.session_id} hit=${hit} />`),
  },
];

/** @param {FoundSession} session */
function sessionLink({ session_id }) {
  return html`<a href=${`#/sessions/${encodeURIComponent(session_id)}`}>${session_id}</a>`;
}

/** @param {{found: import("./types").FindAnswer, isAny: boolean, onClear: () => void}} props isAny: whether there is a condition. */
function Results({ found, isAny, onClear }) {
  const { sessions, num_indexed, num_waiting, has_more } = found;
  return html`<p role="status">${told(found)}</p>
    ${sessions.length === 0 && isAny && num_indexed > 0 && html`<p><button type="button" onClick=${onClear}>Drop all conditions</button></p>`}
    ${num_indexed === 0 && num_waiting === 0 && html`<p>A session is found once it has ended. <a href="#/">Now</a> shows those that run.</p>`}
    ${sessions.length > 0 &&
    html`<${DataTable}
      name="find"
      label="sessions found"
      columns=${COLUMNS}
      rows=${sessions}
      keyOf=${(/** @type {FoundSession} */ session) => session.session_id}
    />`}
    ${has_more && html`<p>There are more than these ${number(sessions.length)}: a further condition leaves fewer.</p>`}`;
}

/** @param {import("./types").FindAnswer} found */
function told({ sessions, has_more, num_indexed, num_waiting }) {
  const reading = `reading ${number(num_waiting)} ${num_waiting === 1 ? "session" : "sessions"} into the index ...`;
  if (num_indexed === 0) return num_waiting === 0 ? "No session has ended yet." : `The first search makes the index: ${reading}`;
  return `${number(sessions.length)}${has_more ? " and more" : ""} of ${number(num_indexed)} sessions${num_waiting === 0 ? "" : `; ${reading}`}`;
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
