// A chart of a run: lines over steps, drawn by uPlot, which is loaded with the first one. The line of text below it has
// the numbers of the chosen step, for people who cannot see the canvas.

import { axisOf, isJoined, valueAt } from "./axis.js";
import { number } from "./scales.js";
import { Component, html } from "./ui.js";

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {number[]} steps
 * @property {(number | null)[]} values One for each step.
 * @property {number} hue Index of its colour.
 * @property {boolean} dashed
 * @property {boolean} points Whether it is measured at few steps, each of which gets a point.
 * @property {(number | null)[]} [errors] Standard error of each value.
 */

/** Hues that colour-blind people tell apart (Okabe and Ito), with enough contrast to the page. */
const HUES = { light: ["#0072b2", "#c65400", "#007a59"], dark: ["#56b4e9", "#e69f00", "#2fc79a"] };
const HEIGHT = 150;
/** Half the width of an error bar's ends, in pixels. */
const CAP = 4;
/** Distances of the labels under a chart: there are no half steps. */
const WHOLE = [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5].map((power) => one * 10 ** power)).sort((a, b) => a - b);
const DARK = matchMedia("(prefers-color-scheme: dark)");

/** @type {Promise<typeof import("../vendor/uplot.mjs").default> | undefined} */
let loaded;

function uplot() {
  if (loaded === undefined) {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("../vendor/uplot.css", import.meta.url).href;
    document.head.append(style);
    loaded = import("../vendor/uplot.mjs").then((module) => module.default);
  }
  return loaded;
}

/**
 * Lines over the steps of all of them.
 * @param {Line[]} lines
 * @returns {[number[], ...(number | null)[][]]}
 */
export function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    /** @type {(number | null)[]} */
    const column = new Array(steps.length).fill(null);
    line.steps.forEach((step, index) => (column[/** @type {number} */ (place.get(step))] = line.values[index]));
    return column;
  });
  return [steps, ...columns];
}

/**
 * @typedef {object} ChartProps
 * @property {string} title
 * @property {"share" | "reward"} [kind]
 * @property {Line[]} lines
 * @property {number} step The chosen one.
 * @property {(step: number) => void} onStep
 */

/** @extends {Component<ChartProps, {}>} */
export class Chart extends Component {
  /** @param {ChartProps} props */
  constructor(props) {
    super(props);
    /** @type {HTMLElement | null} */
    this.box = null;
    /** @type {InstanceType<typeof import("../vendor/uplot.mjs").default> | null} */
    this.plot = null;
    this.drawn = "";
    this.alive = true;
    this.redraw = () => this.draw(true);
    this.resize = new ResizeObserver(() => {
      if (this.plot !== null && this.box !== null) this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
    });
  }

  /** @override */
  componentDidMount() {
    DARK.addEventListener("change", this.redraw);
    this.draw(false);
  }

  /** @override */
  componentDidUpdate() {
    this.draw(false);
  }

  /** @override */
  componentWillUnmount() {
    this.alive = false;
    DARK.removeEventListener("change", this.redraw);
    this.resize.disconnect();
    this.plot?.destroy();
  }

  /** @param {boolean} anew Whether the colours have changed. */
  async draw(anew) {
    const { lines } = this.props;
    if (lines.length === 0) return;
    const UPlot = await uplot();
    if (!this.alive || this.box === null) return;
    const shape = JSON.stringify(lines.map((line) => [line.label, line.hue, line.dashed, isJoined(line), isAlone(line)]));
    const data = /** @type {any} */ (aligned(lines));
    if (this.plot !== null && shape === this.drawn && !anew) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.drawn = shape;
    this.resize.observe(this.box);
    this.plot = new UPlot(/** @type {any} */ (this.options(lines)), data, this.box);
  }

  /** @param {Line[]} lines */
  options(lines) {
    const style = getComputedStyle(document.documentElement);
    const faint = style.getPropertyValue("--faint").trim();
    const axis = { stroke: faint, grid: { stroke: style.getPropertyValue("--line").trim(), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const hues = HUES[DARK.matches ? "dark" : "light"];
    return {
      width: this.box?.clientWidth ?? 0,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, sync: { key: "run" }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: () => axisOf(this.props.lines, this.props.kind) } },
      axes: [{ ...axis, size: 28, incrs: WHOLE }, { ...axis, size: 56, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map(number) }],
      series: [
        {},
        ...lines.map((line) => ({
          label: line.label,
          stroke: hues[line.hue % hues.length],
          width: line.points ? 1 : 1.5,
          dash: line.dashed ? [6, 4] : [],
          points: line.points || isAlone(line) ? { show: true, size: 7 } : { show: false },
          spanGaps: true,
          ...(isJoined(line) ? {} : { paths: () => null }),
        })),
      ],
      hooks: {
        ready: [(/** @type {any} */ plot) => this.listen(plot)],
        draw: [(/** @type {any} */ plot) => this.mark(plot, faint), (/** @type {any} */ plot) => this.drawErrors(plot, hues)],
      },
    };
  }

  /** @param {any} plot */
  listen(plot) {
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) this.props.onStep(Math.max(1, plot.data[0][plot.cursor.idx]));
    });
  }

  /**
   * A line at the chosen step.
   * @param {any} plot
   * @param {string} colour
   */
  mark(plot, colour) {
    const x = Math.round(plot.valToPos(this.props.step, "x", true));
    plot.ctx.fillStyle = colour;
    plot.ctx.fillRect(x, plot.bbox.top, 1, plot.bbox.height);
  }

  /**
   * A bar from the value less its standard error to the value and its error.
   * @param {any} plot
   * @param {string[]} hues
   */
  drawErrors(plot, hues) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - CAP, bbox.top, bbox.width + 2 * CAP + 1, bbox.height); // the first and last step lie on its edges
    ctx.clip();
    for (const line of this.props.lines) {
      ctx.fillStyle = hues[line.hue % hues.length];
      line.steps.forEach((step, index) => {
        const [value, error] = [line.values[index], line.errors?.[index] ?? null];
        if (value === null || error === null) return;
        const x = Math.round(plot.valToPos(step, "x", true));
        const [top, bottom] = [value + error, value - error].map((end) => Math.round(plot.valToPos(end, "y", true)));
        ctx.fillRect(x, top, 1, bottom - top);
        for (const y of [top, bottom]) ctx.fillRect(x - CAP, y, 2 * CAP + 1, 1);
      });
    }
    ctx.restore();
  }

  /** @override */
  render() {
    const { title, lines, step } = this.props;
    if (lines.length === 0) {
      return html`<figure class="chart">
        <figcaption>${title}</figcaption>
        <p>The run does not record it.</p>
      </figure>`;
    }
    const hues = HUES[DARK.matches ? "dark" : "light"];
    return html`<figure class="chart" aria-label=${title}>
      <figcaption>${title} <small>step ${number(step)}</small></figcaption>
      <div class="plot" aria-hidden="true" ref=${(/** @type {HTMLElement | null} */ box) => (this.box = box)}></div>
      <p>
        ${lines.map(
          (line) => html`<span class="line" key=${line.label}>
            <span aria-hidden="true" style=${{ color: hues[line.hue % hues.length] }}>${line.dashed ? "╌" : "━"}</span> ${line.label}
            ${" "}<${Value} at=${valueAt(line, step)} step=${step} />
          </span> `,
        )}
      </p>
    </figure>`;
  }
}

/**
 * A value of the legend, with its step where that is an earlier one.
 * @param {{at: {value: number, error: number | null, step: number} | null, step: number}} props
 */
function Value({ at, step }) {
  if (at === null) return html`<b>–</b>`;
  const error = at.error === null ? "" : ` ± ${number(at.error)}`;
  return html`<b>${number(at.value)}${error}</b>${at.step === step ? "" : html` <small>of step ${number(at.step)}</small>`}`;
}

/** @param {Line} line Whether it has one value, which is no line. */
function isAlone(line) {
  return line.values.filter((value) => value !== null).length === 1;
}
