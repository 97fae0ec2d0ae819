// The service's state after an event, as far as the event says it: a page reads the whole state more rarely.

/** @typedef {import("./types").TaskSummary} TaskSummary */
/** @typedef {import("./types").SessionView} SessionView */
/** @typedef {import("./types").ServiceEvent} ServiceEvent */
/** @typedef {import("./live.js").State} State */

const MOST_TASKS = 150;
const MOST_SESSIONS = 300;

/**
 * Any event may be in the state already, which may have been read after it. Counts in `status`, times and tokens stay as
 * they were read, and so do mean rewards of tasks of which not all sessions were.
 * @param {State} state
 * @param {ServiceEvent} event
 * @returns {State}
 */
export function afterEvent(state, event) {
  const { task_id, session_id } = event;
  const session = state.sessions.find((one) => one.session_id === session_id) ?? null;
  const ends = event.kind === "session.ended" && session !== null && session.state !== "ended";
  const tasks = changed(state.tasks, "task_id", task_id, (task) => taskAfter(task, event, ends));
  const isNew = tasks.length > state.tasks.length;
  const sessions = isNew ? [...newSessions(tasks[0]), ...state.sessions].slice(0, MOST_SESSIONS) : state.sessions;
  const after = changed(sessions, "session_id", session_id, (one) => one && sessionAfter(one, event));
  return {
    status: { ...state.status, at: Math.max(state.status.at, event.at) },
    tasks: (ends ? changed(tasks, "task_id", task_id, (task) => task && withMean(task, after)) : tasks).slice(0, MOST_TASKS),
    isCut: state.isCut || tasks.length > MOST_TASKS,
    sessions: after,
  };
}

/**
 * @param {TaskSummary} task
 * @param {SessionView[]} sessions
 */
function withMean(task, sessions) {
  const group = sessions.filter(({ task_id }) => task_id === task.task_id);
  if (group.length < task.num_samples) return task;
  const rewards = group.map(({ reward }) => reward).filter((reward) => reward !== null);
  return { ...task, mean_reward: rewards.length === 0 ? null : rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length };
}

/**
 * @param {TaskSummary} task
 * @returns {SessionView[]} The newest first.
 */
function newSessions({ task_id, num_samples, created_at }) {
  return Array.from({ length: Math.min(num_samples, MOST_SESSIONS) }, (_, index) => {
    const sample_index = num_samples - 1 - index;
    return {
      session_id: `${task_id}.${sample_index}`,
      task_id,
      sample_index,
      state: "queued",
      attempt: 1,
      node_id: null,
      stage: null,
      model: null,
      num_sampled_tokens: null,
      outcome: null,
      failure: null,
      reward: null,
      created_at,
      leased_at: null,
      stage_at: null,
      ended_at: null,
      ready_at: null,
      unplaced: null,
      waits_for: null,
    };
  });
}

/**
 * @template {object} T
 * @param {T[]} rows The newest first.
 * @param {keyof T} key
 * @param {unknown} id
 * @param {(row: T | null) => T | null} change Null where the row is unknown, and where nothing is to be shown.
 */
function changed(rows, key, id, change) {
  const at = rows.findIndex((row) => row[key] === id);
  const row = change(rows[at] ?? null);
  if (row === null) return rows;
  return at < 0 ? [row, ...rows] : rows.with(at, row);
}

/**
 * @param {TaskSummary | null} task
 * @param {ServiceEvent} event
 * @param {boolean} ends Whether one more of its sessions has ended.
 * @returns {TaskSummary | null}
 */
function taskAfter(task, { kind, at, task_id, data }, ends) {
  if (task === null) {
    if (kind !== "task.submitted" || task_id === null) return null;
    const { num_samples, harness, run = "" } = data;
    const open = { num_samples, num_open: num_samples, created_at: at, ended_at: null, outcomes: {}, mean_reward: null };
    return { task_id, status: "queued", ...open, submitter: "", run, harness, model: null, num_sampled_tokens: null, mean_session_s: null };
  }
  if (kind === "task.started" && task.status === "queued") return { ...task, status: "running" };
  if (kind === "task.ended") return { ...task, status: data.status, num_open: 0, ended_at: at };
  if (!ends) return task;
  const outcomes = { ...task.outcomes, [data.outcome]: (task.outcomes[data.outcome] ?? 0) + 1 };
  return { ...task, num_open: task.num_open - 1, outcomes };
}

/**
 * @param {SessionView} session
 * @param {ServiceEvent} event
 * @returns {SessionView}
 */
function sessionAfter(session, { kind, at, data }) {
  if (session.state === "ended") return session;
  const attempt = data.attempt ?? session.attempt;
  const { boundary, code, message } = data;
  const failure = code === undefined ? null : { boundary, code, message, retryable: kind === "session.requeued" };
  const free = { ...session, attempt, failure, stage: null, stage_at: null };
  switch (kind) {
    case "session.leased":
      return { ...session, state: "leased", node_id: data.node, attempt, stage: null, leased_at: at };
    case "session.stage":
      return { ...session, stage: data.stage, stage_at: at };
    case "session.requeued":
    case "session.released":
      return { ...free, state: "queued", ready_at: data.ready_at ?? null };
    case "session.ended":
      return { ...free, state: "ended", outcome: data.outcome, reward: data.reward ?? null, ended_at: at };
    default:
      return session;
  }
}
