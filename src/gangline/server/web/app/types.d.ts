// Records of the server as the page reads them. docs/reference/http.md describes each field.

export interface Certificate {
  prompt_source: string;
  context: "first" | "exact" | "diverged";
  logprobs: string;
  finish_reason: string;
  parse: string;
  first_divergence: number | null;
  cause: string | null;
  fallback: string | null;
  as_rendered: boolean | null;
  unlike_rendering: string | null;
  untrainable: string | null;
  stop_reason: string | null;
  sampling: Record<string, unknown>;
  engine: string;
  engine_version: string;
  tokenizer_digest: string;
}

export interface CallLine {
  number: number;
  completion_id: string;
  turn: number | null;
  chain: number;
  parent: number | null;
  role: string;
  agent_role: string | null;
  relation: string;
  origin: number | null;
  reason: string;
  status: string;
  model: string;
  started_at: number;
  finished_at: number;
  num_prompt_ids: number;
  num_new_ids: number;
  num_sampled_ids: number;
  mean_logprob: number | null;
  lowest_logprob: number | null;
  versions: number[];
  trace: string | null;
  masked: string | null;
  score: number | null;
  preview: string;
  tools: string[];
  unshown: string[];
  certificate: Certificate;
  num_forgotten_ids: number;
}

export interface ChainLine {
  number: number;
  role: string;
  relation: string;
  origin: number | null;
  reason: string;
  calls: number[];
  num_sampled_ids: number;
}

export interface Failure {
  boundary: string;
  code: string;
  message: string;
  retryable: boolean;
}

export interface Outline {
  session_id: string;
  task_id: string;
  attempt: number;
  node_id: string;
  stage: string | null;
  outcome: string | null;
  failure: Failure | null;
  reward: number | null;
  reward_details: Record<string, unknown>;
  harness_exit: { exit_code: number | null; signal: number | null; timed_out: boolean } | null;
  timings: [stage: string, started_at: number, ended_at: number][] | Timing[];
  usage: unknown;
  limits: Record<string, string>;
  unshown: string[];
  untrainable: Record<string, string>;
  files: { name: string; num_bytes: number }[];
  chains: ChainLine[];
  calls: CallLine[];
}

export interface Timing {
  stage: string;
  started_at: number;
  ended_at: number;
}

export type Part =
  | { type: "text"; text: string }
  | { type: "thinking"; text: string }
  | { type: "image" | "document"; url: string }
  | { type: "tool_call"; call_id: string; name: string; arguments: string }
  | { type: "tool_result"; call_id: string; content: Part[]; is_error?: boolean };

export interface Message {
  role: string;
  parts: Part[];
  name?: string | null;
}

export interface Tool {
  name: string;
  description: string | null;
  parameters: unknown;
  /** Of a tool that takes free text. */
  grammar: unknown;
}

export interface CallContent {
  number: number;
  new_messages: Message[];
  response: Message;
  tools: Tool[];
  num_cut_chars: number;
}

export interface Stretch {
  ids: number[];
  text: string;
  num_left_out: number;
}

export interface CallDrift {
  number: number;
  parent: number | null;
  prompt_source: "engine" | "stitched" | "rendered";
  cause: string | null;
  fallback: string | null;
  num_known_messages: number;
  sent: Message[];
  tokens: {
    first: number;
    in_call: number;
    is_sampled: boolean;
    num_context_ids: number;
    alike: Stretch;
    recorded: Stretch;
    prompted: Stretch;
  } | null;
  change: { origin: number; index: number | null; recorded: Message | null; sent: Message | null; tools: string[] } | null;
}

export interface SessionView {
  session_id: string;
  task_id: string;
  sample_index: number;
  state: "queued" | "leased" | "ended";
  attempt: number;
  node_id: string | null;
  stage: string | null;
  model: string | null;
  num_sampled_tokens: number | null;
  outcome: string | null;
  failure: Failure | null;
  reward: number | null;
  created_at: number;
  leased_at: number | null;
  stage_at: number | null;
  ended_at: number | null;
  ready_at: number | null;
  unplaced: string | null;
  waits_for: string | null;
}

export interface TaskSummary {
  task_id: string;
  status: string;
  num_samples: number;
  num_open: number;
  created_at: number;
  ended_at: number | null;
  submitter: string;
  run: string;
  harness: string;
  model: string | null;
  num_sampled_tokens: number | null;
  mean_session_s: number | null;
  outcomes: Record<string, number>;
  mean_reward: number | null;
}

export interface ServiceEvent {
  seq: number;
  at: number;
  kind: string;
  task_id: string | null;
  session_id: string | null;
  /** Its fields depend on the kind. */
  data: Record<string, any>;
}

export interface TaskView extends TaskSummary {
  rewards: (number | null)[];
  sessions: SessionView[];
  request: Record<string, unknown>;
}

export interface Hit {
  call: number;
  kind: string;
  snippet: string;
}

export interface FindAnswer {
  sessions: {
    session_id: string;
    task_id: string;
    outcome: string;
    reward: number | null;
    cause: string;
    rules: string[];
    num_calls: number;
    harness: string;
    versions: number[];
    hits: Hit[];
  }[];
  has_more: boolean;
  num_indexed: number;
  num_waiting: number;
  known: Partial<Record<string, string[]>>;
}

export interface AlignedSample {
  session_id: string;
  sample_index: number;
  outcome: string | null;
  reward: number | null;
  advantage: number | null;
  num_calls: number;
  num_sampled_ids: number;
  leaves_in_call: number | null;
  leaves_at_token: number | null;
  is_sampled: boolean;
  next_ids: number[];
  next_text: string;
  nearest: number | null;
  num_like_nearest: number;
  calls: { number: number; preview: string; tools: string[]; num_sampled_ids: number }[];
}

export interface AlignedSamples {
  task_id: string;
  num_alike_ids: number;
  samples: AlignedSample[];
}

export interface Annotation {
  session_id: string;
  call: number | null;
  verdict: string | null;
  note: string;
  dataset: string;
  by: string;
  at: number;
  position: number;
}

export interface Difference {
  mean: number;
  standard_error: number | null;
  num_tasks: number;
}

export interface RunSummary {
  name: string;
  state: "running" | "stopped" | "done";
  model: string;
  algorithm: string;
  control: string;
  seed: number;
  num_done: number;
  num_steps: number;
  started_at: string;
  updated_at: string;
  num_lives: number;
  reward_mean: number | null;
  first_evaluation: number | null;
  last_evaluation: number | null;
  held_out_difference: Difference | null;
  wall_s: number;
  folder: string;
}

export interface RunCurves {
  summary: RunSummary;
  every: number;
  steps: number[];
  versions: number[];
  wall_s: number[];
  curves: Record<string, (number | null)[]>;
  evaluations: { step: number; version: number; reward_mean: number; standard_error: number | null; num_tasks: number }[];
  settings: Record<string, unknown>;
}

export interface RunStep {
  run: string;
  record: { step: number; num_groups: number; num_sessions: number; early_ends: Record<string, number> };
  groups: { task_id: string; is_known: boolean; mean_reward: number | null; rewards: (number | null)[]; sessions: string[] }[];
}

export interface Comparison {
  arms: {
    runs: string[];
    seeds: number[];
    settings: Record<string, unknown>;
    reward_mean: number | null;
    deviation_of_seeds: number | null;
    difference: Difference | null;
  }[];
}

export interface NodeView {
  node_id: string;
  url: string;
  capacity: number;
  draining: boolean;
  num_sessions: number;
  backends: Record<string, unknown>[];
  metrics: Record<string, number>;
  age_s: number;
}

export interface ServiceStatus {
  version: string;
  at: number;
  tasks: Record<string, number>;
  sessions: Record<string, number>;
  stages: Record<string, number>;
  stage_ages_s: Record<string, number>;
  oldest_queued_s: number | null;
  callbacks: Record<string, number>;
  nodes: NodeView[];
  num_waiting: number;
  result_bytes: number;
  tenant: string;
}

export interface ForkNode {
  session_id: string;
  task_id: string;
  parent: string | null;
  depth: number;
  turn: number | null;
  edit: string | null;
  state: string;
  outcome: string | null;
  reward: number | null;
}

export interface ForkTree {
  nodes: ForkNode[];
  is_whole: boolean;
}

export interface Estimate {
  mean: number;
  standard_error: number | null;
  num_tasks: number;
  interval: [number, number] | null;
}

export interface EvaluationSlice {
  name: string;
  num_tasks: number;
  num_sessions: number;
  num_counted: number;
  reward: Estimate | null;
  passed: Estimate | null;
  pass_at: Record<string, Estimate>;
  pass_hat: Record<string, Estimate>;
  outcomes: Record<string, number>;
  failures: Record<string, number>;
  turns: number | null;
  prompt_tokens: number | null;
  sampled_tokens: number | null;
  seconds: number | null;
  cost: number | null;
}

export interface EvaluationSummary {
  evaluation_id: string;
  name: string;
  num_samples: number;
  num_left: number;
  whole: EvaluationSlice;
  updated_at: number;
}

export interface EvaluationTask {
  task: string;
  mean: number | null;
  samples: { session_id: string; outcome: string; reward: number | null; cause: string }[];
  outcomes: Record<string, number>;
  turns: number;
  sampled_tokens: number;
  seconds: number;
}

export interface EvaluationReport {
  evaluation_id: string;
  name: string;
  bar: number;
  num_samples: number;
  num_left: number;
  whole: EvaluationSlice;
  by: Record<string, EvaluationSlice[]>;
  lines: EvaluationTask[];
}

export interface EvaluationComparison {
  first: string;
  second: string;
  difference: Difference & { low: number; high: number; better: string[]; worse: string[] };
  wholes: [EvaluationSlice, EvaluationSlice];
  tasks: { task: string; gain: number; before: EvaluationTask | null; after: EvaluationTask | null }[];
  apart: string[];
}
