// The token strip in the page: the canvas of the rows in view, and under it one line of text about the token that the
// pointer or the keyboard is on. The line is what screen readers and tests read; a canvas has no text.

import { legend, number, SCALES } from "./scales.js";
import { ROW, StripLayout, themeColours } from "./strip.js";
import { shownBytes } from "./visible.js";
import { Component, html } from "./ui.js";

const NUM_UNLIKELY = 10;

/**
 * @typedef {object} StripProps
 * @property {number} call
 * @property {import("./tokens.js").SessionTokens} tokens
 * @property {string} scale
 * @property {number | null} advantage
 * @property {() => HTMLElement | null} scroller
 * @property {(scale: string) => void} onScale
 * @property {boolean} focused Whether the keyboard goes to the strip when it opens.
 */

/** @extends {Component<StripProps, {layout: StripLayout | null, focus: number, error: string}>} */
export class Strip extends Component {
  /** @param {StripProps} props */
  constructor(props) {
    super(props);
    /** @type {{layout: StripLayout | null, focus: number, error: string}} */
    this.state = { layout: null, focus: -1, error: "" };
    /** @type {HTMLElement | null} */
    this.box = null;
    /** @type {HTMLCanvasElement | null} */
    this.canvas = null;
    /** @type {HTMLElement | null} */
    this.scroller = null;
    this.frame = 0;
    this.alive = true;
    this.schedule = () => {
      if (this.frame === 0) this.frame = requestAnimationFrame(() => this.draw());
    };
    this.resize = new ResizeObserver(() => this.layOut());
    this.theme = matchMedia("(prefers-color-scheme: dark)");
  }

  /** @override */
  componentDidMount() {
    this.scroller = this.props.scroller();
    this.scroller?.addEventListener("scroll", this.schedule, { passive: true });
    this.theme.addEventListener("change", this.schedule);
    this.props.tokens.of(this.props.call).then(
      (tokens) => {
        if (!this.alive) return;
        this.tokens = tokens;
        this.layOut();
        if (this.box !== null) this.resize.observe(this.box);
        if (this.props.focused) this.box?.focus({ preventScroll: true });
      },
      (error) => this.alive && this.setState({ error: error.message }),
    );
  }

  /** @override */
  componentWillUnmount() {
    this.alive = false;
    this.scroller?.removeEventListener("scroll", this.schedule);
    this.theme.removeEventListener("change", this.schedule);
    this.resize.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** @override */
  componentDidUpdate() {
    this.schedule();
  }

  layOut() {
    if (this.tokens === undefined || this.box === null) return;
    const width = this.box.clientWidth;
    const columns = this.state.layout === null ? 0 : this.state.layout.columns;
    const layout = new StripLayout(this.tokens, width);
    if (layout.columns !== columns) this.setState({ layout });
  }

  draw() {
    this.frame = 0;
    const { layout, focus } = this.state;
    if (layout === null || this.box === null || this.canvas === null) return;
    const view = this.scroller?.getBoundingClientRect() ?? { top: 0, bottom: window.innerHeight };
    const top = this.box.getBoundingClientRect().top;
    const from = Math.max(0, view.top - top);
    const to = Math.min(layout.height, view.bottom - top);
    if (to < 0 || from > layout.height) return;
    const { scale, advantage } = this.props;
    const at = layout.draw(this.canvas, { from, to, scale, advantage, focus, colours: themeColours() });
    this.canvas.style.transform = `translateY(${at}px)`;
  }

  /** @param {number} focus */
  focusOn(focus) {
    const { layout } = this.state;
    if (layout === null) return;
    const held = Math.min(layout.tokens.length - 1, Math.max(0, focus));
    this.setState({ focus: held });
    const row = layout.rowOf(held) * ROW;
    const scroller = this.scroller;
    if (this.box === null || scroller === null) return;
    const top = this.box.getBoundingClientRect().top + row - scroller.getBoundingClientRect().top;
    if (top < ROW) scroller.scrollTop += top - ROW;
    else if (top > scroller.clientHeight - 3 * ROW) scroller.scrollTop += top - scroller.clientHeight + 3 * ROW;
  }

  /** The next of the least likely tokens. */
  nextUnlikely() {
    const { layout, focus } = this.state;
    if (layout === null) return;
    const order = layout.tokens.leastLikely(NUM_UNLIKELY);
    if (order.length > 0) this.focusOn(order[(order.indexOf(focus) + 1) % order.length]);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { layout, focus } = this.state;
    if (layout === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(0, focus);
    const row = layout.rowOf(at);
    switch (event.key) {
      case "ArrowRight":
        this.focusOn(focus + 1);
        break;
      case "ArrowLeft":
        this.focusOn(at - 1);
        break;
      case "ArrowDown":
        this.focusOn(layout.rows[row + 1] ?? at);
        break;
      case "ArrowUp":
        this.focusOn(layout.rows[row - 1] ?? at);
        break;
      case "Home":
        this.focusOn(0);
        break;
      case "End":
        this.focusOn(layout.tokens.length - 1);
        break;
      case "u":
        this.nextUnlikely();
        break;
      default:
        return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {MouseEvent} event */
  hover(event) {
    const { layout } = this.state;
    if (layout === null || this.box === null) return;
    const box = this.box.getBoundingClientRect();
    const focus = layout.tokenAt(event.clientX - box.left, event.clientY - box.top);
    if (focus >= 0 && focus !== this.state.focus) this.setState({ focus });
  }

  /** @override */
  render() {
    const { layout, error } = this.state;
    if (error !== "") return html`<p class="problem" role="alert">${error}</p>`;
    return html`<div class="strip">
      ${layout !== null && html`<${Scales} ...${this.props} callTokens=${layout.tokens} />`}
      <div
        class="strip-rows"
        ref=${(/** @type {HTMLElement | null} */ box) => (this.box = box)}
        style=${{ height: `${layout?.height ?? ROW}px` }}
        tabindex="0"
        role="application"
        aria-label=${`Tokens of call ${this.props.call}. Arrow keys move, u goes to the next unlikely token.`}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) => this.key(event)}
        onMouseMove=${(/** @type {MouseEvent} */ event) => this.hover(event)}
      >
        <canvas ref=${(/** @type {HTMLCanvasElement | null} */ canvas) => (this.canvas = canvas)} aria-hidden="true"></canvas>
      </div>
      <p class="token-line" aria-live="polite">${this.describe()}</p>
    </div>`;
  }

  describe() {
    const { layout, focus } = this.state;
    if (layout === null) return "Loading tokens ...";
    const { tokens } = layout;
    if (focus < 0) {
      const told = SCALES.find(({ name }) => name === this.props.scale)?.label;
      const unread = tokens.isUnread ? " Ids are shown: no connected engine has the tokenizer that knows their texts." : "";
      return `${number(tokens.sampled)} context, ${number(tokens.length - tokens.sampled)} sampled. Colour: ${told}.${unread}`;
    }
    const id = tokens.ids[focus];
    const bytes = tokens.vocabulary.bytes.get(id);
    const facts = [`${focus < tokens.sampled ? "context" : "sampled"} ${focus}`, `id ${id}`];
    if (bytes !== undefined) facts.push(`“${layout.token(id).text}”`, `bytes ${shownBytes(bytes)}`);
    if (focus >= tokens.sampled) {
      const logprob = tokens.logprobs[focus];
      facts.push(`log-prob ${logprob.toFixed(3)}`, `chance ${(100 * Math.exp(logprob)).toPrecision(3)} %`);
      facts.push(tokens.mask[focus] ? "trained on" : "masked");
      if (tokens.versions[focus] >= 0) facts.push(`version ${tokens.versions[focus]}`);
    }
    return facts.join(" · ");
  }
}

/**
 * The choice of a colour, and what it means.
 * @param {StripProps & {callTokens: import("./tokens.js").CallTokens}} props
 */
function Scales({ call, scale, advantage, onScale, callTokens }) {
  return html`<div class="views scales" role="group" aria-label=${`Colour of tokens of call ${call}`}>
      ${SCALES.map(
        ({ name, label }) => html`<button type="button" aria-pressed=${scale === name} onClick=${() => onScale(name)}>
          ${name === "advantage" && advantage !== null ? `${label} ${number(advantage)}` : label}
        </button>`,
      )}
    </div>
    <ul class="legend" aria-label="Colours">
      <li>${scale === "logprob" ? "grey: context; chance of a sampled token:" : "grey: context; sampled:"}</li>
      ${legend(scale, callTokens, advantage).map(
        ({ colour, label }) => html`<li><span class="swatch" style=${{ background: colour }}></span> ${label}</li>`,
      )}
    </ul>`;
}
