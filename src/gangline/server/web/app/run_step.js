// The groups behind a step of a run: each with its rewards, and a link to each session.

import { json } from "./api.js";
import { Table } from "./now.js";
import { number } from "./scales.js";
import { Reward, Wide } from "./table.js";
import { html, useEffect, useState } from "./ui.js";

const PAUSE_MS = 150;

/** @param {{name: string, step: number}} props */
export function SessionGroups({ name, step }) {
  const [found, setFound] = useState(/** @type {import("./types").RunStep | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    let alive = true;
    const read = () =>
      json(`/v1/runs/${encodeURIComponent(name)}/steps/${step}`).then(
        (answer) => alive && (setFound(answer), setError("")),
        (problem) => alive && setError(problem.message),
      );
    const timer = setTimeout(read, PAUSE_MS);
    return () => {
      alive = false;
      clearTimeout(timer);
    };
  }, [name, step]);
  if (error !== "") return html`<p class="problem" role="alert">${error}</p>`;
  if (found === null || found.record.step !== step) return html`<p aria-busy="true">Reading the groups ...</p>`;
  const { record, groups } = found;
  return html`<p>${number(record.num_groups)} groups, ${number(record.num_sessions)} sessions trained on</p>
    ${groups.length === 0
      ? html`<p>The record does not name its groups: an earlier version wrote it.</p>`
      : html`<${Wide} label="Groups of the step">
          <${Table} titles=${["group", "mean reward", "samples by their reward"]}>
            ${groups.map((group) => html`<${Group} key=${group.task_id} group=${group} />`)}
          <//>
        <//>`}`;
}

/** @param {{group: import("./types").RunStep["groups"][number]}} props */
function Group({ group }) {
  if (!group.is_known) {
    return html`<tr>
      <td>${group.task_id}</td>
      <td>–</td>
      <td class="wraps-words">This server does not have the task, or not any more.</td>
    </tr>`;
  }
  return html`<tr>
    <td><a href=${`#/tasks/${encodeURIComponent(group.task_id)}`}>${group.task_id}</a></td>
    <td><${Reward} value=${group.mean_reward} /></td>
    <td class="samples wraps-words">
      ${group.sessions.map(
        (session, index) => html`<a href=${`#/sessions/${encodeURIComponent(session)}`} aria-label=${`sample ${index}, reward ${number(group.rewards[index])}`}>
          ${number(group.rewards[index])}
        </a> `,
      )}
    </td>
  </tr>`;
}
