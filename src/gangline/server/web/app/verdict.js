// A reward for the eye: by a sign and by one of two hues that colour-blind people tell apart, never by colour alone.

import { number } from "./scales.js";
import { html } from "./ui.js";

const SIGNS = { good: "✓", partly: "◐", bad: "✗", none: "" };

/** Outcomes, states and stages that are no failure. */
const GOES_ON = ["completed", "cancelled", "queued", "leased", "init", "ready", "run", "postrun", "ended"];

/** @param {number | null} reward */
function verdictOf(reward) {
  if (reward === null) return "none";
  return reward <= 0 ? "bad" : reward < 1 ? "partly" : "good";
}

/** @param {{reward: number | null, before?: string}} props before: text before the number. */
export function Reward({ reward, before = "" }) {
  const verdict = verdictOf(reward);
  return html`<span class=${`reward ${verdict}`}><span aria-hidden="true">${SIGNS[verdict]}</span> ${before}${number(reward)}</span>`;
}

/** @param {{outcome: string}} props */
export function Outcome({ outcome }) {
  return html`<span class=${GOES_ON.includes(outcome) ? "" : "warning"}>${outcome.replaceAll("_", " ")}</span>`;
}

/**
 * The rewards of a task's samples as a row of bars, each a link to its session.
 * @param {{sessions: import("./types").SessionView[]}} props
 */
export function RewardRow({ sessions }) {
  const most = Math.max(1, ...sessions.map((session) => Math.abs(session.reward ?? 0)));
  return html`<ol class="rewards" aria-label="Rewards by sample">
    ${sessions.map((session) => html`<li key=${session.session_id}><${Sample} session=${session} most=${most} /></li>`)}
  </ol>`;
}

/** @param {{session: import("./types").SessionView, most: number}} props most: reward of a full bar. */
function Sample({ session, most }) {
  const bar = html`<span class=${`bar ${verdictOf(session.reward)}`}>
      <span style=${{ height: `${(100 * Math.abs(session.reward ?? 0)) / most}%` }}></span>
    </span>
    <${Reward} reward=${session.reward} />`;
  if (session.state === "queued") return bar; // it has no page yet
  const name = `sample ${session.sample_index}: reward ${number(session.reward)}`;
  return html`<a href=${`#/sessions/${encodeURIComponent(session.session_id)}`} aria-label=${name}>${bar}</a>`;
}
