// The session part: chains on the left, calls in the middle, tokens below each call, and the evidence of the reward.

import { SessionActions } from "./actions.js";
import { json } from "./api.js";
import { ChainTree } from "./chains.js";
import { drifts } from "./drift.js";
import { Ending } from "./ending.js";
import { Evidence } from "./evidence.js";
import { BesideParent, ForkTree } from "./forks.js";
import { calls, follow, latest } from "./live.js";
import { Missing } from "./missing.js";
import { SCALES } from "./scales.js";
import { isSaved } from "./saved.js";
import { SessionTokens } from "./tokens.js";
import { Turn } from "./turn.js";
import { Outcome, Reward } from "./verdict.js";
import { VirtualList } from "./virtual.js";
import { visible } from "./visible.js";
import { mayChange } from "./visitor.js";
import { Component, effect, html, isTyping } from "./ui.js";

const BLOCK = 16;
const CLOSED_PX = 180;
const PX_PER_CHAR = 0.12;
/** Shorter texts are not folded when they come again. */
const REPEATED_CHARS = 200;
/** A running session is asked for at least so often: the server follows those that are looked at. */
const LOOK_EVERY_MS = 20_000;

/**
 * @typedef {object} SessionState
 * @property {import("./types").Outline | null} outline
 * @property {string} error
 * @property {number | null} chain
 * @property {number} selected Number of a call.
 * @property {"calls" | "evidence" | "beside"} view
 * @property {import("./types").ForkTree | null} forks
 * @property {string} forksProblem Why they could not be read.
 * @property {number | null} forking Number of the call whose form of forks is shown.
 * @property {string} scale
 * @property {number | null} advantage
 * @property {boolean} unfolded Whether a narrow page shows what stands on the left of a wide one.
 * @property {boolean} follows Whether the newest call is shown, with its tokens.
 */

/** @extends {Component<{id: string, call: number | null}, SessionState>} */
export class Session extends Component {
  /** @param {{id: string, call: number | null}} props */
  constructor(props) {
    super(props);
    this.path = `/v1/sessions/${encodeURIComponent(props.id)}`;
    this.tokens = this.noTokens();
    /** @type {Map<number, import("./types").CallContent>} */
    this.contents = new Map();
    /** @type {Map<string, number>} Long text of a request -> the first call that has it. */
    this.firstWith = new Map();
    /** @type {Set<number>} First calls of the blocks that were asked for. */
    this.asked = new Set();
    /** @type {Set<number>} */
    this.opened = new Set();
    /** @type {Set<number>} Calls whose drift is shown. */
    this.compared = new Set();
    this.openedByKey = -1;
    /** @type {VirtualList | null} */
    this.list = null;
    /** @type {SessionState} */
    this.state = { outline: null, error: "", chain: null, selected: props.call ?? 0, view: "calls", forks: null, forksProblem: "", forking: null, scale: "logprob", advantage: null, unfolded: false, follows: props.call === null };
    this.reading = false;
    this.again = false;
    this.timer = 0;
    this.stop = () => {};
    this.onKey = (/** @type {KeyboardEvent} */ event) => this.key(event);
  }

  /** @override */
  componentDidMount() {
    addEventListener("keydown", this.onKey);
    follow();
    this.stop = effect(() => {
      const ended = latest.value?.kind.startsWith("session.") ? latest.value.session_id : null;
      if ([calls.value?.session_id, ended].includes(this.props.id) && this.isRunning) this.read();
    });
    this.timer = setInterval(() => document.visibilityState === "visible" && this.isRunning && this.read(), LOOK_EVERY_MS);
    this.read();
    if (!isSaved) json(`${this.path}/forks`).then((forks) => this.setState({ forks }), (problem) => this.setState({ forksProblem: problem.message }));
  }

  noTokens() {
    return new SessionTokens(this.path, (number_) => {
      const call = this.state.outline?.calls[number_];
      return call?.certificate.tokenizer_digest || (call?.model ?? "");
    });
  }

  /** What the tree of forks says of this session; null where it is a fork of none. */
  get ownFork() {
    return this.state.forks?.nodes.find((node) => node.session_id === this.props.id && node.parent !== null) ?? null;
  }

  get isRunning() {
    return this.state.outline !== null && this.state.outline.outcome === null;
  }

  /** Read the outline, and once more where something happened meanwhile. */
  async read() {
    if (this.reading) {
      this.again = true;
      return;
    }
    this.reading = true;
    try {
      do {
        this.again = false;
        this.show(await json(`${this.path}/outline`));
      } while (this.again);
    } catch (error) {
      if (this.state.outline === null) this.setState({ error: /** @type {Error} */ (error).message });
    }
    this.reading = false;
  }

  /** @param {import("./types").Outline} outline */
  show(outline) {
    const before = this.state.outline;
    if (before !== null && before.attempt !== outline.attempt) this.forget(0);
    else if (before !== null) this.forget(before.calls.length);
    if (before !== null && outline.outcome !== null) this.tokens = this.noTokens(); // masks are known now
    const follows = this.state.follows && outline.outcome === null && outline.calls.length > 0;
    if (follows) this.opened = new Set([outline.calls.length - 1]);
    this.setState({ outline, ...(hasNoCalls(outline) ? { view: /** @type {const} */ ("evidence") } : {}), ...(follows ? { selected: outline.calls.length - 1, chain: null } : {}) }, () => {
      if (before === null && this.props.call !== null) this.select(this.props.call);
    });
    if (outline.outcome !== null) this.findAdvantage(outline);
  }

  /**
   * Messages are asked for again from the block on that was not full.
   * @param {number} numCalls
   */
  forget(numCalls) {
    for (const first of this.asked) if (first + BLOCK > numCalls) this.asked.delete(first);
    if (numCalls === 0) {
      this.contents.clear();
      this.firstWith.clear();
      this.tokens = this.noTokens();
    }
  }

  /** @override */
  componentWillUnmount() {
    removeEventListener("keydown", this.onKey);
    clearInterval(this.timer);
    this.stop();
  }

  /**
   * The reward less the mean of the group, which is what most trainers begin with.
   * @param {import("./types").Outline} outline
   */
  async findAdvantage(outline) {
    if (outline.reward === null) return;
    /** @type {import("./types").TaskView | null} */
    const task = await json(`/v1/tasks/${encodeURIComponent(outline.task_id)}`).catch(() => null);
    const rewards = task?.rewards.filter((reward) => reward !== null) ?? [];
    if (rewards.length < 2) return;
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    this.setState({ advantage: outline.reward - mean });
  }

  /** Numbers of the calls that are listed. */
  shown() {
    const { outline, chain } = this.state;
    if (outline === null) return [];
    return chain === null ? outline.calls.map((call) => call.number) : outline.chains[chain].calls;
  }

  /** @param {number} call */
  fetch(call) {
    const first = call - (call % BLOCK);
    if (this.asked.has(first)) return;
    this.asked.add(first);
    json(`${this.path}/calls?first=${first}&limit=${BLOCK}`).then(
      (/** @type {import("./types").CallContent[]} */ contents) => {
        for (const content of contents) this.keep(content);
        this.forceUpdate();
      },
      () => this.asked.delete(first),
    );
  }

  /** @param {import("./types").CallContent} content */
  keep(content) {
    this.contents.set(content.number, content);
    for (const part of content.new_messages.flatMap((message) => message.parts)) {
      if (part.type !== "text" || part.text.length < REPEATED_CHARS) continue;
      if (content.number < (this.firstWith.get(part.text) ?? Infinity)) this.firstWith.set(part.text, content.number);
    }
  }

  /**
   * The tools that a call's request offered.
   * @param {import("./types").Outline} outline
   * @param {number} number_
   */
  toolsOf(outline, number_) {
    const { number: first } = firstOf(outline, outline.calls[number_]);
    this.fetch(first);
    const content = this.contents.get(first);
    const before = number_ === 0 ? undefined : this.contents.get(firstOf(outline, outline.calls[number_ - 1]).number);
    const isRepeat = content !== before && JSON.stringify(content?.tools) === JSON.stringify(before?.tools);
    return { number: first, content, isRepeat };
  }

  /** @param {number} call */
  select(call) {
    this.setState({ selected: call }, () => this.list?.show(this.shown().indexOf(call)));
  }

  /** @param {number} call */
  toggle(call) {
    if (!this.opened.delete(call)) this.opened.add(call);
    this.forceUpdate();
  }

  /** @param {number} call */
  compare(call) {
    if (!drifts(this.state.outline?.calls[call])) return;
    if (!this.compared.delete(call)) this.compared.add(call);
    this.forceUpdate();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
    const shown = this.shown();
    const at = shown.indexOf(this.state.selected);
    switch (event.key) {
      case "j":
        this.move(shown[Math.min(at + 1, shown.length - 1)]);
        break;
      case "k":
        this.move(shown[Math.max(at - 1, 0)]);
        break;
      case "t":
        this.openedByKey = this.state.selected;
        this.toggle(this.state.selected);
        break;
      case "d":
        this.compare(this.state.selected);
        break;
      case "c":
        this.nextScale();
        break;
      case "f":
        this.setFollowing(!this.state.follows);
        break;
      case "e":
        this.setState({ view: this.state.view === "calls" || hasNoCalls(this.state.outline) ? "evidence" : "calls" });
        break;
      case "]":
        this.moveChain(1);
        break;
      case "[":
        this.moveChain(-1);
        break;
      default:
        return;
    }
    event.preventDefault();
  }

  /** @param {boolean} follows */
  setFollowing(follows) {
    this.setState({ follows }, () => follows && this.isRunning && this.read());
  }

  /** @param {number | undefined} call */
  move(call) {
    if (call === undefined) return;
    this.setState({ follows: false });
    this.select(call);
    requestAnimationFrame(() => document.getElementById(`call-${call}`)?.focus({ preventScroll: true }));
  }

  nextScale() {
    const at = SCALES.findIndex(({ name }) => name === this.state.scale);
    this.setState({ scale: SCALES[(at + 1) % SCALES.length].name });
  }

  /** The button that leads there goes, and the keyboard with it. */
  showEvidence() {
    this.setState({ view: "evidence" }, () => /** @type {HTMLElement | null} */ (document.querySelector(".evidence"))?.focus());
  }

  /** @param {number} step */
  moveChain(step) {
    const { outline, chain } = this.state;
    if (outline === null) return;
    const next = (chain ?? -1) + step;
    this.choose(next < 0 ? null : Math.min(next, outline.chains.length - 1));
  }

  /** @param {number | null} chain */
  choose(chain) {
    const first = chain === null ? 0 : this.state.outline?.chains[chain].calls[0] ?? 0;
    this.setState({ chain, view: "calls", selected: first }, () => this.list?.show(0));
  }

  /** @override */
  render() {
    const { outline, error, chain, view } = this.state;
    if (error !== "") return html`<${Missing} what="session" id=${this.props.id} why=${error} />`;
    if (outline === null) return html`<main aria-busy="true"><p>Loading the session ...</p></main>`;
    return html`<main class="session">
      <aside>
        <h1>${outline.session_id}</h1>
        ${outline.outcome === null
          ? html`<p class="verdict"><b>runs${outline.stage === null ? "" : `: ${outline.stage}`}</b></p>`
          : html`<p class="verdict"><${Reward} reward=${outline.reward} before="reward " />, <${Outcome} outcome=${outline.outcome} /></p>`}
        <p>attempt ${outline.attempt} on ${outline.node_id || "no node"}</p>
        <p><a href=${`#/tasks/${encodeURIComponent(outline.task_id)}`}>task ${outline.task_id}</a></p>
        ${outline.outcome === null &&
        html`<button type="button" aria-pressed=${this.state.follows} onClick=${() => this.setFollowing(!this.state.follows)}>
          Follow the newest call
        </button>`}
        <div class="views tabs" role="group" aria-label="View">
          ${!hasNoCalls(outline) &&
          html`<button type="button" aria-pressed=${view === "calls"} onClick=${() => this.setState({ view: "calls" })}>Calls</button>`}
          <button type="button" aria-pressed=${view === "evidence"} onClick=${() => this.setState({ view: "evidence" })}>
            Why this reward, and files
          </button>
          ${this.ownFork !== null &&
          html`<button type="button" aria-pressed=${view === "beside"} onClick=${() => this.setState({ view: "beside" })}>
            Beside its parent
          </button>`}
        </div>
        <button type="button" class="unfold" aria-expanded=${this.state.unfolded} onClick=${() => this.setState({ unfolded: !this.state.unfolded })}>
          <span aria-hidden="true">${this.state.unfolded ? "▾" : "▸"}</span> Chains, forks and what can be done
        </button>
        <div class=${this.state.unfolded ? "unfolded" : "folded"}>
          ${!isSaved &&
          html`<${SessionActions} id=${outline.session_id} running=${outline.outcome === null} call=${this.state.selected} />`}
          ${outline.calls.length > 0 &&
          html`<${ChainTree} outline=${outline} chosen=${chain} onChoose=${(/** @type {number | null} */ one) => this.choose(one)} />`}
          ${this.state.forksProblem !== "" && html`<p class="problem" role="alert">Its forks could not be read: ${visible(this.state.forksProblem)}</p>`}
          ${this.state.forks !== null && html`<${ForkTree} id=${this.props.id} tree=${this.state.forks} />`}
        </div>
      </aside>
      <div class="middle">
        <${Ending} outline=${outline} path=${this.path} onWhy=${view === "evidence" ? null : () => this.showEvidence()} />
        ${this.chosenView(outline)}
      </div>
    </main>`;
  }

  /** @param {import("./types").Outline} outline */
  chosenView(outline) {
    const own = this.ownFork;
    if (this.state.view === "evidence") return html`<${Evidence} outline=${outline} path=${this.path} />`;
    if (this.state.view === "beside" && own !== null) return html`<${BesideParent} node=${own} parent=${own.parent ?? ""} />`;
    return this.timeline(outline);
  }

  /** @param {import("./types").Outline} outline */
  timeline(outline) {
    const shown = this.shown();
    if (shown.length === 0) return html`<p>No model call ${outline.outcome === null ? "is recorded yet" : "was recorded"}.</p>`;
    return html`<${VirtualList}
      key=${String(this.state.chain)}
      onReady=${(/** @type {VirtualList} */ list) => (this.list = list)}
      count=${shown.length}
      name=${(/** @type {number} */ index) => String(shown[index])}
      estimate=${(/** @type {number} */ index) => CLOSED_PX + PX_PER_CHAR * outline.calls[shown[index]].num_new_ids}
      row=${(/** @type {number} */ index) => this.row(outline, shown[index])}
      label="Model calls"
      sticks=${this.state.follows && this.isRunning}
    />`;
  }

  /**
   * @param {import("./types").Outline} outline
   * @param {number} number_
   */
  row(outline, number_) {
    this.fetch(number_);
    const call = outline.calls[number_];
    const before = call.parent === null ? null : outline.calls[call.parent];
    return html`<${Turn}
      call=${call}
      content=${this.contents.get(number_)}
      first=${this.toolsOf(outline, number_)}
      isKnown=${(/** @type {string} */ text) => (this.firstWith.get(text) ?? number_) < number_}
      selected=${this.state.selected === number_}
      opened=${this.opened.has(number_)}
      compared=${this.compared.has(number_)}
      forking=${this.state.forking === number_}
      forkable=${!isSaved && mayChange.value && outline.outcome !== null ? outline.session_id : null}
      path=${this.path}
      waited=${before === null ? null : call.started_at - before.finished_at}
      onSelect=${() => this.state.selected !== number_ && this.setState({ selected: number_ })}
      onToggle=${() => this.toggle(number_)}
      onCompare=${() => this.compare(number_)}
      onFork=${() => this.setState({ forking: this.state.forking === number_ ? null : number_ })}
      strip=${{
        tokens: this.tokens,
        scale: this.state.scale,
        advantage: this.state.advantage,
        onScale: (/** @type {string} */ scale) => this.setState({ scale }),
        scroller: () => this.list?.scroller ?? null,
        focused: this.openedByKey === number_,
      }}
    />`;
  }
}

/**
 * The call that a call's conversation began with.
 * @param {import("./types").Outline} outline
 * @param {import("./types").CallLine} call
 */
function firstOf(outline, call) {
  let first = call;
  while (first.parent !== null) first = outline.calls[first.parent];
  return first;
}

/** @param {import("./types").Outline | null} outline An ended session without calls has nothing to list but its evidence. */
function hasNoCalls(outline) {
  return outline !== null && outline.outcome !== null && outline.calls.length === 0;
}
