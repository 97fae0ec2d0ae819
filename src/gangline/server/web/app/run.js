// A training run: its curves, the evaluations on held-out tasks, the groups behind a step, and another run beside it.

import { json } from "./api.js";
import { Chart } from "./chart.js";
import { Missing } from "./missing.js";
import { SessionGroups } from "./run_step.js";
import { Tiles } from "./run_tiles.js";
import { difference } from "./runs.js";
import { number } from "./scales.js";
import { Wide } from "./table.js";
import { visible } from "./visible.js";
import { html, useEffect, useRef, useState } from "./ui.js";

/** @typedef {import("./types").RunCurves} RunCurves */

const AGAIN_MS = 10_000;
const HELD_OUT = "held out";

/**
 * The curves of each chart, by their names in trackers, and what they are called here.
 * @type {{title: string, kind?: "share" | "reward", curves: Record<string, string>}[]}
 */
const CHARTS = [
  { title: "Reward", kind: "reward", curves: { "rollout/reward_mean": "trained", "rollout/collected_reward_mean": "collected", [HELD_OUT]: HELD_OUT } },
  { title: "Lag in versions", curves: { "rollout/lag_mean": "mean" } },
  { title: "Length in trained tokens", curves: { "rollout/trained_tokens_per_session": "per session" } },
  { title: "Ratio", curves: { "learner/ratio_mean": "mean", "learner/ratio_max": "largest" } },
  { title: "KL", curves: { "learner/behaviour_kl": "from the engine", "learner/old_kl": "from the step's begin", "learner/reference_kl": "from the reference" } },
  { title: "Entropy", curves: { "learner/entropy": "mean" } },
  { title: "Clipped share", kind: "share", curves: { "learner/clipped_low": "low", "learner/clipped_high": "high" } },
  { title: "Weight update in seconds", curves: { "update/transfer_s": "transfer", "update/drain_s": "drain", "update/load_s": "load" } },
  { title: "Seconds", curves: { "rollout/waited_s": "waited", "rollout/trained_s": "trained", "update/total_s": "weight update" } },
];

/** @param {{name: string, query: string}} props query: of the address: `step` and `with`. */
export function Run({ name, query }) {
  const given = new URLSearchParams(query);
  const [other, setOther] = useState(given.get("with") ?? "");
  const [step, setStep] = useState(Number(given.get("step") ?? 0));
  const { found, error } = useCurves(name);
  const beside = useCurves(other);
  useEffect(() => {
    const kept = new URLSearchParams();
    if (step > 0) kept.set("step", String(step));
    if (other !== "") kept.set("with", other);
    history.replaceState(null, "", `#/runs/${encodeURIComponent(name)}${kept.size === 0 ? "" : `?${kept}`}`);
  }, [name, step, other]);
  const problem = error || beside.error;
  if (found === null && error !== "") return html`<${Missing} what="run" id=${name} why=${error} />`;
  return html`<main class="scroller now run" tabindex="-1">
    <h1>${name}</h1>
    ${problem !== "" && html`<p class="problem" role="alert">${problem}</p>`}
    ${found === null && problem === "" && html`<p aria-busy="true">Reading the run ...</p>`}
    ${found !== null &&
    html`<${Tiles} run=${found} />
      <${Others} name=${name} chosen=${other} onChoose=${setOther} />
      ${beside.found !== null && html`<${Compared} name=${name} other=${other} />`}
      ${found.steps.length > 0 && html`<${Steps} run=${found} beside=${beside.found} step=${step} onStep=${setStep} />`}`}
  </main>`;
}

/**
 * The charts, and the chosen step.
 * @param {{run: RunCurves, beside: RunCurves | null, step: number, onStep: (step: number) => void}} props step: 0 is the last.
 */
function Steps({ run, beside, step, onStep }) {
  const at = nearest(run.steps, step);
  const latest = useRef({ steps: run.steps, at });
  latest.current = { steps: run.steps, at };
  useEffect(() => {
    const key = (/** @type {KeyboardEvent} */ event) => {
      const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
      const move = { j: 1, k: -1 }[event.key];
      if (move === undefined) return;
      const { steps, at: now } = latest.current;
      onStep(steps[Math.min(steps.length - 1, Math.max(0, now + move))]);
      event.preventDefault();
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, []);
  return html`<div class="charts">
      ${CHARTS.map(
        ({ title, kind, curves }) => html`<${Chart}
          key=${title}
          title=${title}
          kind=${kind}
          lines=${lines(run, beside, curves)}
          step=${run.steps[at]}
          onStep=${onStep}
        />`,
      )}
    </div>
    <${Numbers} run=${run} at=${at} />
    <${SessionGroups} name=${run.summary.name} step=${run.steps[at]} />`;
}

/**
 * The curves of a run, read again while it trains.
 * @param {string} name Empty for none.
 * @returns {{found: RunCurves | null, error: string}}
 */
function useCurves(name) {
  const [state, setState] = useState(/** @type {{found: RunCurves | null, error: string}} */ ({ found: null, error: "" }));
  useEffect(() => {
    setState({ found: null, error: "" });
    if (name === "") return;
    let isRunning = true;
    let alive = true;
    const read = async () => {
      if (!isRunning || document.visibilityState !== "visible") return;
      try {
        const found = /** @type {RunCurves} */ (await json(`/v1/runs/${encodeURIComponent(name)}`));
        isRunning = found.summary.state === "running";
        if (alive) setState({ found, error: "" });
      } catch (problem) {
        if (alive) setState((before) => ({ ...before, error: /** @type {Error} */ (problem).message }));
      }
    };
    read();
    const timer = setInterval(read, AGAIN_MS);
    return () => {
      alive = false;
      clearInterval(timer);
    };
  }, [name]);
  return state;
}

/**
 * Index of the step, or of the last one where none is chosen.
 * @param {number[]} steps
 * @param {number} step
 */
function nearest(steps, step) {
  if (step <= 0) return steps.length - 1;
  const after = steps.findIndex((one) => one >= step);
  return after < 0 ? steps.length - 1 : after;
}

/**
 * What a chart draws: the run's lines, then the same of the other run.
 * @param {RunCurves} run
 * @param {RunCurves | null} beside
 * @param {Record<string, string>} curves
 * @returns {import("./chart.js").Line[]}
 */
function lines(run, beside, curves) {
  return [run, beside].flatMap((one, index) =>
    one === null
      ? []
      : Object.entries(curves).flatMap(([curve, label], hue) => {
          const isHeldOut = curve === HELD_OUT;
          const values = isHeldOut ? one.evaluations.map((evaluation) => evaluation.reward_mean) : one.curves[curve];
          if (values === undefined || values.every((value) => value === null)) return [];
          const steps = isHeldOut ? one.evaluations.map((evaluation) => evaluation.step) : one.steps;
          const errors = isHeldOut ? one.evaluations.map((evaluation) => evaluation.standard_error) : [];
          return [{ label: beside === null ? label : `${one.summary.name} ${label}`, steps, values, errors, hue, dashed: index > 0, points: isHeldOut }];
        }),
  );
}

/** @param {{name: string, chosen: string, onChoose: (name: string) => void}} props */
function Others({ name, chosen, onChoose }) {
  const [names, setNames] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    json("/v1/runs").then(
      (found) => setNames(found.runs.map((/** @type {import("./types").RunSummary} */ run) => run.name)),
      () => setNames([]),
    );
  }, [name]);
  const others = names.filter((one) => one !== name);
  if (others.length === 0) return null;
  return html`<label class="beside">
    Compare with
    <select value=${chosen} onChange=${(/** @type {Event} */ event) => onChoose(/** @type {HTMLSelectElement} */ (event.target).value)}>
      <option value="">no other run</option>
      ${others.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
    </select>
  </label>`;
}

/** @param {{name: string, other: string}} props */
function Compared({ name, other }) {
  const [found, setFound] = useState(/** @type {import("./types").Comparison | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    const path = `/v1/runs/${encodeURIComponent(name)}/compared?with=${encodeURIComponent(other)}`;
    json(path).then(setFound, (problem) => setError(problem.message));
  }, [name, other]);
  if (error !== "") return html`<p class="problem" role="alert">${error}</p>`;
  if (found === null) return null;
  const [base, changed] = found.arms;
  if (changed === undefined) return html`<p role="status">They differ in their seeds alone: ${base.seeds.join(", ")}.</p>`;
  const settings = Object.keys(base.settings);
  return html`<p role="status">
      ${changed.difference === null
        ? "Their held-out tasks cannot be compared: others, or none."
        : `On ${number(changed.difference.num_tasks)} held-out tasks ${other} has ${difference(changed.difference)} against ${name}.`}
    </p>
    ${settings.length > 0 &&
    html`<${Wide} label="What differs">
      <table class="settings" aria-label="Settings that differ">
        <thead>
          <tr>
            <th scope="col">setting</th>
            <th scope="col">${name}</th>
            <th scope="col">${other}</th>
          </tr>
        </thead>
        <tbody>
          ${settings.map(
            (setting) => html`<tr key=${setting}>
              <td>${visible(setting)}</td>
              <td class="wraps-anywhere">${visible(JSON.stringify(base.settings[setting]))}</td>
              <td class="wraps-anywhere">${visible(JSON.stringify(changed.settings[setting]))}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`}`;
}

/** @param {{run: RunCurves, at: number}} props */
function Numbers({ run, at }) {
  const [isOpen, setOpen] = useState(false);
  const names = Object.keys(run.curves);
  return html`<h2 id="step" aria-live="polite">Step ${number(run.steps[at])}, version ${number(run.versions[at])}</h2>
    <button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
      <span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> All ${names.length} numbers of the step
    </button>
    ${isOpen &&
    html`<dl class="figures">
      ${names.map(
        (name) => html`<div key=${name}>
          <dt>${visible(name)}</dt>
          <dd>${number(run.curves[name][at])}</dd>
        </div>`,
      )}
    </dl>`}`;
}
