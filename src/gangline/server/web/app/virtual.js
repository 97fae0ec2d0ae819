// A long list of rows of different heights, of which only those in view are in the document. Heights are estimated
// until a row was seen; a row above the view that turns out higher or lower does not move the view.

import { Component, html } from "./ui.js";

const BEYOND_PX = 600;

/** @extends {Component<{index: number, top: number, resize: ResizeObserver, children?: any}>} */
class Row extends Component {
  /** @type {HTMLElement | null} */
  element = null;

  /** @override */
  componentDidMount() {
    if (this.element !== null) this.props.resize.observe(this.element);
  }

  /** @override */
  componentWillUnmount() {
    if (this.element !== null) this.props.resize.unobserve(this.element);
  }

  /** @override */
  render() {
    const { index, top, children } = this.props;
    return html`<div
      class="row"
      data-index=${index}
      ref=${(/** @type {HTMLElement | null} */ element) => (this.element = element ?? this.element)}
      style=${{ transform: `translateY(${top}px)` }}
    >
      ${children}
    </div>`;
  }
}

/**
 * @typedef {object} VirtualProps
 * @property {number} count
 * @property {(index: number) => number} estimate Pixels.
 * @property {(index: number) => any} row
 * @property {(index: number) => string} name Key of a row.
 * @property {string} label For screen readers.
 * @property {(list: VirtualList) => void} onReady Is given the list, once: Preact gives a component's `ref` to nobody.
 * @property {boolean} [sticks] Whether the end stays in view when the list grows.
 */

/** @extends {Component<VirtualProps, {from: number, to: number}>} */
export class VirtualList extends Component {
  /** @param {VirtualProps} props */
  constructor(props) {
    super(props);
    this.state = { from: 0, to: 0 };
    /** @type {HTMLElement | null} */
    this.scroller = null;
    // One function for all renders, so that it is never null between them.
    this.holdScroller = (/** @type {HTMLElement | null} */ scroller) => {
      this.scroller = scroller ?? this.scroller;
    };
    /** @type {Map<string, number>} Heights that were seen, by key. */
    this.seen = new Map();
    /** @type {Float64Array} Where each row begins, and the end of the last. */
    this.tops = new Float64Array(1);
    this.frame = 0;
    /** @type {{index: number, below: number} | null} The row that was brought into view, and its pixels below the top. */
    this.held = null;
    this.release = () => {
      this.held = null;
    };
    this.resize = new ResizeObserver((entries) => this.measured(entries));
    this.schedule = () => {
      if (this.frame === 0) this.frame = requestAnimationFrame(() => this.look());
    };
  }

  /** @override */
  componentDidMount() {
    this.props.onReady(this);
    if (this.scroller !== null) this.resize.observe(this.scroller);
    this.look();
  }

  /** @override */
  componentWillUnmount() {
    this.resize.disconnect();
    cancelAnimationFrame(this.frame);
  }

  place() {
    const { count, estimate, name } = this.props;
    this.tops = new Float64Array(count + 1);
    for (let index = 0; index < count; index++) {
      this.tops[index + 1] = this.tops[index] + (this.seen.get(name(index)) ?? estimate(index));
    }
  }

  /** @param {ResizeObserverEntry[]} entries */
  measured(entries) {
    if (this.held !== null && this.held.index >= this.props.count) this.held = null;
    let moved = 0;
    let changed = false;
    const scroller = this.scroller;
    for (const entry of entries) {
      const index = Number(/** @type {HTMLElement} */ (entry.target).dataset["index"] ?? -1);
      if (index < 0 || index >= this.props.count || !entry.target.isConnected) continue;
      const height = entry.borderBoxSize[0].blockSize;
      const before = this.tops[index + 1] - this.tops[index];
      if (Math.abs(height - before) < 0.5) continue;
      this.seen.set(this.props.name(index), height);
      if (scroller !== null && this.tops[index + 1] <= scroller.scrollTop) moved += height - before;
      changed = true;
    }
    if (changed) {
      this.place();
      // Not earlier: until it is rendered the list is too short to be scrolled there.
      this.forceUpdate(() => {
        if (scroller === null) return;
        if (this.props.sticks) this.showEnd();
        else if (this.held !== null) scroller.scrollTop = this.tops[this.held.index] - this.held.below;
        else if (moved !== 0) scroller.scrollTop += moved;
      });
    }
    this.schedule();
  }

  look() {
    this.frame = 0;
    if (this.scroller === null) return;
    const top = this.scroller.scrollTop - BEYOND_PX;
    const bottom = this.scroller.scrollTop + this.scroller.clientHeight + BEYOND_PX;
    const from = this.rowAt(top);
    const to = Math.min(this.props.count, this.rowAt(bottom) + 1);
    if (from !== this.state.from || to !== this.state.to) this.setState({ from, to });
  }

  /** @param {number} y */
  rowAt(y) {
    let low = 0;
    let high = this.props.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return Math.max(0, low);
  }

  /**
   * Bring a row into view, and keep it where it is while rows above turn out higher or lower, until someone scrolls.
   * @param {number} index
   */
  show(index) {
    if (this.scroller === null || index < 0 || index >= this.props.count) return;
    const [top, bottom] = [this.tops[index], this.tops[index + 1]];
    const view = this.scroller;
    if (top < view.scrollTop || bottom - top > view.clientHeight) view.scrollTop = top;
    else if (bottom > view.scrollTop + view.clientHeight) view.scrollTop = bottom - view.clientHeight;
    this.held = { index, below: top - view.scrollTop };
    this.look();
  }

  showEnd() {
    if (this.scroller !== null) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** @override */
  componentDidUpdate() {
    if (this.props.sticks) this.showEnd();
    this.schedule();
  }

  /** @override */
  render() {
    this.place();
    const { count, row, name, label } = this.props;
    const { from } = this.state;
    const to = Math.min(this.state.to, count);
    const rows = [];
    for (let index = from; index < to; index++) {
      const key = name(index);
      rows.push(html`<${Row} key=${key} index=${index} top=${this.tops[index]} resize=${this.resize}>${row(index)}<//>`);
    }
    return html`<div
      class="scroller"
      ref=${this.holdScroller}
      onScroll=${this.schedule}
      onWheel=${this.release}
      onTouchMove=${this.release}
      onPointerDown=${this.release}
      onKeyDown=${this.release}
      role="feed"
      aria-label=${label}
      tabindex="-1"
    >
      <div class="rows" style=${{ height: `${this.tops[count]}px` }}>${rows}</div>
    </div>`;
  }
}
