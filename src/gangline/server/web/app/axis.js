// The range of a chart's values: what a reader takes the height of a curve for.

/** @typedef {import("./chart.js").Line} Line */

const ROUNDING = 1e-9;
const MARGIN = 0.06;

/**
 * Lowest and highest value of the axis. A share, and a reward that stays between 0 and 1, has the axis 0 to 1. Others
 * begin at 0 unless that would leave most of the chart empty, and a curve that stays at one value is drawn at mid-height,
 * or at the bottom if it is 0.
 * @param {Pick<Line, "values" | "errors">[]} lines
 * @param {"share" | "reward" | undefined} kind
 * @returns {[number, number]}
 */
export function axisOf(lines, kind) {
  const values = lines.flatMap((line) => line.values).filter(isNumber);
  const isUnit = values.every((value) => value >= -ROUNDING && value <= 1 + ROUNDING);
  if (values.length === 0 || (kind !== undefined && isUnit)) return [0, 1];
  const ends = lines.flatMap(({ values: heights, errors = [] }) =>
    heights.flatMap((value, index) => (isNumber(value) ? [value - (errors[index] ?? 0), value + (errors[index] ?? 0)] : [])),
  );
  const low = ends.reduce((least, value) => Math.min(least, value), Infinity);
  const high = ends.reduce((most, value) => Math.max(most, value), -Infinity);
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, 2 * low] : [2 * low, 0];
  const margin = MARGIN * (high - low);
  if (low >= 0 && low <= high / 2) return [0, high + margin];
  if (high <= 0 && high >= low / 2) return [low - margin, 0];
  return [low - margin, high + margin];
}

/**
 * @param {number | null} value
 * @returns {value is number}
 */
function isNumber(value) {
  return value !== null && Number.isFinite(value);
}

/**
 * The value at a step, or the last one before it, with its step.
 * @param {Line} line
 * @param {number} step
 * @returns {{value: number, error: number | null, step: number} | null}
 */
export function valueAt(line, step) {
  let found = null;
  for (let index = 0; index < line.steps.length && line.steps[index] <= step; index++) {
    const value = line.values[index];
    if (value !== null && value !== undefined) found = { value, error: line.errors?.[index] ?? null, step: line.steps[index] };
  }
  return found;
}

/**
 * Whether a line is drawn from point to point. Two measurements say nothing of the way between them.
 * @param {Line} line
 */
export function isJoined(line) {
  return !line.points || line.values.filter(isNumber).length > 2;
}
