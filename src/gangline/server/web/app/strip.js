// The token strip: the tokens of one call as a wrapped line on a canvas. Only the rows in view are drawn, each with one
// text per run of equal colour, so that the cost of a frame does not depend on the number of tokens.

import { background } from "./scales.js";

const FONT = "13px ui-monospace, 'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, monospace";
export const ROW = 19;
const SIMPLE = /^[\u0020-\u007e\u00a0-\u00ac\u00ae-\u02ff\u2190-\u21ff\u2400-\u2426]*$/;
const MARGIN_ROWS = 4;

/** @type {{context: CanvasRenderingContext2D, width: number} | undefined} */
let measured;

/** Width of one character, and a context to measure others. */
function measure() {
  if (measured === undefined) {
    const context = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
    context.font = FONT;
    measured = { context, width: context.measureText("M".repeat(100)).width / 100 };
  }
  return measured;
}

/** Where each token of a call lies, for one width. */
export class StripLayout {
  /**
   * @param {import("./tokens.js").CallTokens} tokens
   * @param {number} width Pixels.
   */
  constructor(tokens, width) {
    this.tokens = tokens;
    this.cell = measure().width;
    this.columns = Math.max(10, Math.floor(width / this.cell));
    /** Column of each token's beginning. */
    this.at = new Uint16Array(tokens.length);
    /** First token of each row. */
    this.rows = [0];
    /** @type {Map<number, {text: string, cells: number, breaks: number, simple: boolean}>} */
    this.drawn = new Map();
    this.wrap();
  }

  get height() {
    return this.rows.length * ROW;
  }

  wrap() {
    let column = 0;
    for (let index = 0; index < this.tokens.length; index++) {
      const { cells, breaks } = this.token(this.tokens.ids[index]);
      if (column > 0 && (column + cells > this.columns || index === this.tokens.sampled)) {
        this.rows.push(index);
        column = 0;
      }
      this.at[index] = column;
      column += cells;
      if (breaks > 0) {
        column = this.columns; // the next token begins a row
      }
    }
  }

  /** @param {number} id */
  token(id) {
    let found = this.drawn.get(id);
    if (found === undefined) {
      const label = this.tokens.vocabulary.label(id);
      const text = label.replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";
      const simple = SIMPLE.test(text);
      const cells = simple ? text.length : Math.ceil(measure().context.measureText(text).width / this.cell);
      found = { text, cells: Math.min(cells, this.columns), breaks: label.endsWith("\n") ? 1 : 0, simple };
      this.drawn.set(id, found);
    }
    return found;
  }

  /** @param {number} index */
  rowOf(index) {
    let low = 0;
    let high = this.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle] <= index) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /**
   * The token at a point; -1 for none.
   * @param {number} x
   * @param {number} y
   */
  tokenAt(x, y) {
    const row = Math.floor(y / ROW);
    if (row < 0 || row >= this.rows.length) return -1;
    const end = this.rows[row + 1] ?? this.tokens.length;
    for (let index = this.rows[row]; index < end; index++) {
      const from = this.at[index];
      if (x < (from + this.token(this.tokens.ids[index]).cells) * this.cell) return x >= from * this.cell ? index : -1;
    }
    return -1;
  }

  /**
   * Draw the rows between two heights.
   * @param {HTMLCanvasElement} canvas Its height is set to that of the rows.
   * @param {{from: number, to: number, scale: string, advantage: number | null, focus: number, colours: Colours}} view
   * @returns {number} Where the first drawn row begins.
   */
  draw(canvas, { from, to, scale, advantage, focus, colours }) {
    const first = Math.max(0, Math.floor(from / ROW) - MARGIN_ROWS);
    const last = Math.min(this.rows.length, Math.ceil(to / ROW) + MARGIN_ROWS);
    const ratio = window.devicePixelRatio || 1;
    const width = Math.ceil(this.columns * this.cell * ratio);
    const height = Math.max(1, last - first) * ROW * ratio;
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    for (let row = first; row < last; row++) {
      const top = (row - first) * ROW;
      const begin = this.rows[row];
      const end = this.rows[row + 1] ?? this.tokens.length;
      this.drawBackgrounds(context, begin, end, top, scale, advantage, focus, colours);
      this.drawTexts(context, begin, end, top + ROW / 2, colours);
    }
    return first * ROW;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} begin
   * @param {number} end
   * @param {number} top
   * @param {string} scale
   * @param {number | null} advantage
   * @param {number} focus
   * @param {Colours} colours
   */
  drawBackgrounds(context, begin, end, top, scale, advantage, focus, colours) {
    for (let index = begin; index < end; index++) {
      const cells = this.token(this.tokens.ids[index]).cells;
      const fill = background(scale, this.tokens, index, advantage);
      const x = this.at[index] * this.cell;
      if (fill !== "") {
        context.fillStyle = fill;
        context.fillRect(x, top + 1, cells * this.cell - 0.5, ROW - 2);
      }
      if (index === focus) {
        context.strokeStyle = colours.focus;
        context.lineWidth = 2;
        context.strokeRect(x + 1, top + 1, cells * this.cell - 2, ROW - 2);
      }
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} begin
   * @param {number} end
   * @param {number} middle
   * @param {Colours} colours
   */
  drawTexts(context, begin, end, middle, colours) {
    let run = "";
    let runAt = 0;
    let runFill = "";
    const flush = () => {
      if (run !== "") {
        context.fillStyle = runFill;
        context.fillText(run, runAt * this.cell, middle);
      }
      run = "";
    };
    for (let index = begin; index < end; index++) {
      const { text, cells, simple } = this.token(this.tokens.ids[index]);
      const fill = index < this.tokens.sampled ? colours.context : colours.text;
      if (!simple || text.length !== cells) {
        flush();
        context.fillStyle = fill;
        context.fillText(text, this.at[index] * this.cell, middle, cells * this.cell);
        continue;
      }
      if (run === "" || fill !== runFill) {
        flush();
        runAt = this.at[index];
        runFill = fill;
      }
      run += text;
    }
    flush();
  }
}

/** @typedef {{text: string, context: string, focus: string}} Colours */

/** Colours of the current theme. @returns {Colours} */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  return {
    text: style.getPropertyValue("--text").trim(),
    context: style.getPropertyValue("--faint").trim(),
    focus: style.getPropertyValue("--accent").trim(),
  };
}
