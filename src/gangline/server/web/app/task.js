// A task: its group of sessions, with the reward of each and how far it lies from the group's mean.

import { TaskActions } from "./actions.js";
import { Aligned } from "./aligned.js";
import { json } from "./api.js";
import { events, follow } from "./live.js";
import { number } from "./scales.js";
import { SessionLink, Table } from "./now.js";
import { visible } from "./visible.js";
import { html, useEffect, useState } from "./ui.js";

/** @param {{id: string}} props */
export function Task({ id }) {
  const [task, setTask] = useState(/** @type {import("./types").TaskView | null} */ (null));
  const [error, setError] = useState("");
  useEffect(follow, []);
  const changed = task !== null && task.ended_at !== null ? 0 : events.value;
  useEffect(() => {
    json(`/v1/tasks/${encodeURIComponent(id)}`).then(setTask, (problem) => setError(problem.message));
  }, [id, changed]);
  if (error !== "") return html`<main><p class="problem" role="alert">${error}</p></main>`;
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
    <${Table} titles=${["sample", "session", "outcome", "reward", "less the mean", "failure"]}>
      ${task.sessions.map(
        (session) => html`<tr key=${session.session_id}>
          <td class="number">${session.sample_index}</td>
          <td><${SessionLink} session=${session} /></td>
          <td>${(session.outcome ?? session.stage ?? session.state).replaceAll("_", " ")}</td>
          <td class="number">${number(session.reward)}</td>
          <td class="number">${session.reward === null || mean === null ? "–" : number(session.reward - mean)}</td>
          <td>${session.failure === null ? "" : `${session.failure.boundary}: ${visible(session.failure.message)}`}</td>
        </tr>`,
      )}
    <//>
    <h2>Side by side</h2>
    <${Aligned} id=${id} numSamples=${task.num_samples} changed=${task.num_open} />
  </main>`;
}
