// A training run at a glance: where it stands, what it gained, how its sessions end, and its configuration.

import { json } from "./api.js";
import { difference, heldOut } from "./runs.js";
import { duration, number } from "./scales.js";
import { Wide } from "./table.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./types").RunCurves} RunCurves */

const CUT = ["turn_limit", "token_limit", "agent_loop", "memory_limit"];

/**
 * The newest value of a curve, and how far it is from the first.
 * @param {(number | null)[] | undefined} curve
 * @returns {{now: number, gain: number} | null}
 */
export function gained(curve) {
  const known = (curve ?? []).filter((value) => value !== null);
  return known.length === 0 ? null : { now: known[known.length - 1], gain: known[known.length - 1] - known[0] };
}

/**
 * How the sessions of a step ended that did not complete, as shares of all.
 * @param {Record<string, number>} ends Outcome, with its failure's code in parentheses -> number of sessions.
 * @param {number} num Sessions.
 * @returns {{failed: number, cut: number, timedOut: number}}
 */
export function rates(ends, num) {
  const shares = { failed: 0, cut: 0, timedOut: 0 };
  for (const [end, count] of Object.entries(ends)) {
    const outcome = end.split(" ", 1)[0];
    shares[outcome === "agent_timeout" ? "timedOut" : CUT.includes(outcome) ? "cut" : "failed"] += count / Math.max(1, num);
  }
  return shares;
}

/** @param {number} share */
function percent(share) {
  return `${number(share * 100)} %`;
}

/** @param {{run: RunCurves}} props */
export function Tiles({ run }) {
  const { summary, curves, every } = run;
  const ends = useEnds(summary.name, run.steps.at(-1));
  const reward = gained(curves["rollout/reward_mean"]);
  const lag = gained(curves["rollout/lag_mean"]);
  const trained = (curves["rollout/num_trained_tokens"] ?? []).filter((value) => value !== null);
  /** @type {[name: string, value: string, more: string][]} */
  const tiles = [
    ["reward", number(reward?.now), reward === null ? "" : `${signed(reward.gain)} since the first step`],
    ["held out", heldOut(summary), summary.held_out_difference === null ? "" : `difference ${difference(summary.held_out_difference)}`],
    ["steps", `${number(summary.num_done)} of ${number(summary.num_steps)}`, summary.state],
    ["failed", ends === null ? "–" : percent(ends.failed), "of the last step's sessions"],
    ["cut by a limit", ends === null ? "–" : percent(ends.cut), "of the last step's sessions"],
    ["timed out", ends === null ? "–" : percent(ends.timedOut), "of the last step's sessions"],
    ["lag", number(lag?.now), "versions, mean of the last step"],
    every === 1
      ? ["tokens", number(trained.reduce((sum, value) => sum + value, 0)), "trained on so far"]
      : ["tokens", number(trained.at(-1)), "trained on in the last step"],
    ["time", duration(summary.wall_s), `${number(summary.num_lives)} ${summary.num_lives === 1 ? "start" : "starts"}`],
    ["algorithm", visible(summary.algorithm), `${visible(summary.model)}, seed ${summary.seed}`],
  ];
  return html`<dl class="figures tiles">
      ${tiles.map(
        ([name, value, more]) => html`<div key=${name}>
          <dt>${name}</dt>
          <dd>${value} <small>${more}</small></dd>
        </div>`,
      )}
    </dl>
    ${every > 1 && html`<p>The curves show every ${every}th step.</p>`}
    ${run.steps.length === 0 && html`<p>No step is done yet.</p>`}
    <${Configuration} settings=${run.settings} />`;
}

/** @param {number} value */
function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

/**
 * How the sessions of a step ended; null until it is known.
 * @param {string} name
 * @param {number | undefined} step
 */
function useEnds(name, step) {
  const [ends, setEnds] = useState(/** @type {ReturnType<typeof rates> | null} */ (null));
  useEffect(() => {
    let alive = true;
    if (step !== undefined) {
      json(`/v1/runs/${encodeURIComponent(name)}/steps/${step}`).then(
        (/** @type {import("./types").RunStep} */ { record }) => alive && setEnds(rates(record.early_ends, record.num_sessions)),
        () => {},
      );
    }
    return () => {
      alive = false;
    };
  }, [name, step]);
  return ends;
}

/** @param {{settings: Record<string, unknown>}} props */
function Configuration({ settings }) {
  const names = Object.keys(settings).sort();
  return html`<details class="configuration">
    <summary>Configuration: ${names.length} settings</summary>
    <${Wide} label="Settings">
      <table aria-label="Configuration">
        <thead>
          <tr>
            <th scope="col">setting</th>
            <th scope="col">value</th>
          </tr>
        </thead>
        <tbody>
          ${names.map(
            (name) => html`<tr key=${name}>
              <td>${visible(name)}</td>
              <td class="wraps-anywhere">${visible(JSON.stringify(settings[name]))}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  </details>`;
}
