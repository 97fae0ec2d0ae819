// A task: its group of sessions, with the reward of each and how far it lies from the group's mean.

import { TaskActions } from "./actions.js";
import { Aligned } from "./aligned.js";
import { json } from "./api.js";
import { events, follow } from "./live.js";
import { Missing } from "./missing.js";
import { number } from "./scales.js";
import { SessionLink, Table } from "./now.js";
import { Outcome, Reward, RewardRow } from "./verdict.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

const READ_AT_ONCE = 16;

/**
 * Sampled tokens of each session, as far as they were read. A larger group is read once it has ended.
 * @param {import("./types").TaskView | null} task
 * @returns {Map<string, number>}
 */
function useSampled(task) {
  const [sampled, setSampled] = useState(/** @type {Map<string, number>} */ (new Map()));
  const ended = task === null ? -1 : task.num_samples - task.num_open;
  useEffect(() => {
    if (task === null || (task.num_open > 0 && task.num_samples > READ_AT_ONCE)) return undefined;
    let isWanted = true;
    const read = async () => {
      for (let first = 0; first < task.num_samples && isWanted; first += READ_AT_ONCE) {
        /** @type {import("./types").AlignedSamples} */
        const group = await json(`/v1/tasks/${encodeURIComponent(task.task_id)}/aligned?first=${first}&limit=${READ_AT_ONCE}`);
        setSampled((known) => new Map([...known, ...group.samples.map((one) => /** @type {[string, number]} */ ([one.session_id, one.num_sampled_ids]))]));
      }
    };
    read().catch(() => {}); // the numbers are left out
    return () => {
      isWanted = false;
    };
  }, [task?.task_id, ended]);
  return sampled;
}

/** @param {import("./types").SessionView} session */
function seconds(session) {
  return session.leased_at === null || session.ended_at === null ? null : Math.round(10 * (session.ended_at - session.leased_at)) / 10;
}

/** @param {{id: string}} props */
export function Task({ id }) {
  const [task, setTask] = useState(/** @type {import("./types").TaskView | null} */ (null));
  const [error, setError] = useState("");
  useEffect(follow, []);
  const sampled = useSampled(task);
  const changed = task !== null && task.ended_at !== null ? 0 : events.value;
  useEffect(() => {
    json(`/v1/tasks/${encodeURIComponent(id)}`).then(setTask, (problem) => setError(problem.message));
  }, [id, changed]);
  if (error !== "") return html`<${Missing} what="task" id=${id} why=${error} />`;
  if (task === null) return html`<main aria-busy="true"><p>Loading the task ...</p></main>`;
  const rewards = task.rewards.filter((reward) => reward !== null);
  const mean = rewards.length === 0 ? null : rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const instruction = task.request["instruction"];
  return html`<main class="scroller now" tabindex="-1">
    <h1>${task.task_id}</h1>
    <p>${task.status}, ${number(task.num_open)} of ${number(task.num_samples)} sessions open, mean reward ${number(mean)}</p>
    ${typeof instruction === "string" && html`<pre class="instruction">${visible(instruction.slice(0, 4000))}</pre>`}
    <${TaskActions} id=${task.task_id} running=${task.num_open > 0} />
    <h2>Samples</h2>
    <${RewardRow} sessions=${task.sessions} />
    <div class="sideways" role="region" aria-label="Samples" tabindex="0">
      <${Table} titles=${["sample", "session", "outcome", "reward", "less the mean", "seconds", "tokens", "failure"]}>
        ${task.sessions.map(
          (session) => html`<tr key=${session.session_id}>
            <td class="number">${session.sample_index}</td>
            <td><${SessionLink} session=${session} /></td>
            <td><${Outcome} outcome=${session.outcome ?? session.stage ?? session.state} /></td>
            <td class="number"><${Reward} reward=${session.reward} /></td>
            <td class="number">${session.reward === null || mean === null ? "–" : number(session.reward - mean)}</td>
            <td class="number">${number(seconds(session))}</td>
            <td class="number">${number(sampled.get(session.session_id))}</td>
            <td>${session.failure === null ? "" : `${session.failure.boundary}: ${visible(session.failure.message)}`}</td>
          </tr>`,
        )}
      <//>
    </div>
    <h2>Side by side</h2>
    <${Aligned} id=${id} numSamples=${task.num_samples} changed=${task.num_open} />
  </main>`;
}
