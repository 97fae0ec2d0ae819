// A table of records that its reader sorts, filters, and chooses the columns of. What is chosen stays in this browser.
//
// A record may hold others, which its row opens: they are sorted and filtered like the rest.

import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html, useState } from "./ui.js";

const FIRST_ROWS = 200;
const KEPT = "gangline.table.";
const ORDER = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/**
 * @template Row
 * @typedef {object} Column
 * @property {string} name Distinct in its table.
 * @property {string} title
 * @property {(row: Row) => string | number | null | undefined} value What it is sorted and filtered by. Null is unknown.
 * @property {(row: Row) => any} [cell] What is shown in place of the value.
 * @property {boolean} [numeric]
 * @property {"words" | "anywhere"} [wraps] Left out, a cell stays on one line.
 * @property {boolean} [hidden] Whether it is shown only once it is chosen.
 */

/**
 * @typedef {object} Choice
 * @property {string} sorted Name of a column; empty leaves the given order.
 * @property {boolean} falls Whether the largest comes first.
 * @property {Record<string, boolean>} columns name -> whether it is shown, where that was chosen.
 * @property {string} filter
 * @property {string[]} opened Keys of rows.
 */

/** @type {Map<string, Choice>} Of the tables that this page has shown. */
const choices = new Map();

/**
 * @param {string} name
 * @returns {Choice}
 */
function choiceOf(name) {
  const kept = choices.get(name);
  if (kept !== undefined) return kept;
  /** @type {any} */
  let stored = null;
  try {
    stored = JSON.parse(localStorage.getItem(KEPT + name) ?? "null");
  } catch {
    // Storage is closed to the page, or holds something else.
  }
  const columns = Object.entries(stored?.columns ?? {}).filter(([, shown]) => typeof shown === "boolean");
  return {
    sorted: typeof stored?.sorted === "string" ? stored.sorted : "",
    falls: stored?.falls === true,
    columns: /** @type {Record<string, boolean>} */ (Object.fromEntries(columns)),
    filter: "",
    opened: [],
  };
}

/**
 * @param {string} name
 * @param {Choice} choice
 */
function keep(name, choice) {
  choices.set(name, choice);
  try {
    localStorage.setItem(KEPT + name, JSON.stringify({ sorted: choice.sorted, falls: choice.falls, columns: choice.columns }));
  } catch {
    // It lasts as long as the page then.
  }
}

/**
 * The order of two values: numbers by size, texts as people count them, unknown ones last in either direction.
 * @param {string | number | null | undefined} a
 * @param {string | number | null | undefined} b
 * @param {boolean} falls
 */
export function compare(a, b, falls) {
  const known = [a, b].map((value) => value !== null && value !== undefined && value !== "" && !Number.isNaN(value));
  if (!known[0] || !known[1]) return Number(known[1]) - Number(known[0]);
  const order = typeof a === "number" && typeof b === "number" ? a - b : ORDER.compare(String(a), String(b));
  return falls ? -order : order;
}

/**
 * Whether each word is somewhere in the record.
 * @template Row
 * @param {Row} row
 * @param {Column<Row>[]} columns
 * @param {string} filter
 */
export function matches(row, columns, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const text = columns.map((column) => column.value(row) ?? "").join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/**
 * @template Row
 * @param {Row[]} rows
 * @param {Column<Row> | undefined} column
 * @param {boolean} falls
 */
function ordered(rows, column, falls) {
  return column === undefined ? rows : rows.toSorted((a, b) => compare(column.value(a), column.value(b), falls));
}

/**
 * The rows to show, in order: `inner` are those that a row holds and the filter leaves.
 * @template Row
 * @param {Row[]} rows
 * @param {{columns: Column<Row>[], choice: Choice, keyOf: (row: Row) => string, innerOf: (row: Row) => Row[]}} of
 * @returns {{row: Row, key: string, inner: Row[], isOpen: boolean, isInner: boolean}[]}
 */
export function arranged(rows, { columns, choice, keyOf, innerOf }) {
  const by = columns.find((column) => column.name === choice.sorted);
  return ordered(rows, by, choice.falls).flatMap((row) => {
    const key = keyOf(row);
    const isMatch = matches(row, columns, choice.filter);
    const inner = innerOf(row).filter((one) => isMatch || matches(one, columns, choice.filter));
    if (!isMatch && inner.length === 0) return [];
    const isOpen = inner.length > 0 && (!isMatch || choice.opened.includes(key));
    const within = isOpen ? ordered(inner, by, choice.falls) : [];
    return [
      { row, key, inner, isOpen, isInner: false },
      ...within.map((one) => ({ row: one, key: `${key}\n${keyOf(one)}`, inner: [], isOpen: false, isInner: true })),
    ];
  });
}

/**
 * @param {{
 *   name: string,
 *   label: string,
 *   columns: Column<any>[],
 *   rows: any[],
 *   keyOf: (row: any) => string,
 *   innerOf?: (row: any) => any[],
 * }} props name: its choice is kept under it. label: what it lists, for people who do not see it. innerOf: the records
 *   that a record holds.
 */
export function DataTable({ name, label, columns, rows, keyOf, innerOf = () => [] }) {
  const [choice, setChoice] = useState(() => choiceOf(name));
  const [numShown, setNumShown] = useState(FIRST_ROWS);
  const change = (/** @type {Partial<Choice>} */ changes) => {
    const changed = { ...choice, ...changes };
    keep(name, changed);
    setChoice(changed);
  };
  const shown = columns.filter((column) => isShown(column, choice));
  const found = arranged(rows, { columns, choice, keyOf, innerOf });
  const toggle = (/** @type {string} */ key) =>
    change({ opened: choice.opened.includes(key) ? choice.opened.filter((one) => one !== key) : [...choice.opened, key] });
  return html`<div class="data">
    <${Tools} label=${label} columns=${columns} choice=${choice} change=${change} found=${found} rows=${rows} innerOf=${innerOf} />
    <div class="sideways">
      <table aria-label=${label}>
        <thead>
          <tr>
            ${shown.map((column) => html`<${Heading} key=${column.name} column=${column} choice=${choice} change=${change} />`)}
          </tr>
        </thead>
        <tbody>
          ${found.slice(0, numShown).map(
            (one) => html`<tr key=${one.key} class=${one.isInner ? "inner" : one.inner.length > 0 ? "outer" : ""}>
              ${shown.map(
                (column, at) => html`<td key=${column.name} class=${cellClass(column)}>
                  ${at === 0 && one.inner.length > 0 && html`<${Opener} one=${one} onClick=${() => toggle(one.key)} />`}
                  ${column.cell === undefined ? plain(column.value(one.row)) : column.cell(one.row)}
                </td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${rows.length > 0 &&
    found.length === 0 &&
    html`<p>
      Nothing here has these words. <button type="button" onClick=${() => change({ filter: "" })}>Show all</button>
    </p>`}
    ${found.length > numShown &&
    html`<button type="button" onClick=${() => setNumShown(numShown + FIRST_ROWS)}>${number(found.length - numShown)} more</button>`}
  </div>`;
}

/**
 * Room for a plain table, which scrolls within itself where it is too wide.
 * @param {{label: string, children?: any}} props
 */
export function Wide({ label, children }) {
  return html`<div class="data sideways" role="region" aria-label=${label} tabindex="0">${children}</div>`;
}

/** @param {string | number | null | undefined} value */
function plain(value) {
  return typeof value === "string" ? visible(value) : number(value);
}

/**
 * @param {Column<any>} column
 * @param {Choice} choice
 */
function isShown(column, choice) {
  return choice.columns[column.name] ?? column.hidden !== true;
}

/** @param {Column<any>} column */
function cellClass(column) {
  return [column.numeric ? "number" : "", column.wraps === undefined ? "" : `wraps-${column.wraps}`].join(" ").trim();
}

/** @param {{one: {key: string, isOpen: boolean}, onClick: () => void}} props */
function Opener({ one, onClick }) {
  return html`<button type="button" class="opener" aria-expanded=${one.isOpen} aria-label=${`Rows of ${one.key}`} onClick=${onClick}>
    <span aria-hidden="true">${one.isOpen ? "▾" : "▸"}</span>
  </button> `;
}

/** @param {{column: Column<any>, choice: Choice, change: (changes: Partial<Choice>) => void}} props */
function Heading({ column, choice, change }) {
  const isSorted = choice.sorted === column.name;
  const first = column.numeric === true;
  const next = () => {
    if (!isSorted) change({ sorted: column.name, falls: first });
    else if (choice.falls === first) change({ falls: !first });
    else change({ sorted: "", falls: false });
  };
  return html`<th scope="col" class=${cellClass(column)} aria-sort=${isSorted ? (choice.falls ? "descending" : "ascending") : "none"}>
    <button type="button" onClick=${next}>
      ${column.title}<span aria-hidden="true">${isSorted ? (choice.falls ? " ↓" : " ↑") : ""}</span>
    </button>
  </th>`;
}

/**
 * The filter, how many records it leaves, and the choice of columns.
 * @param {{label: string, columns: Column<any>[], choice: Choice, change: (changes: Partial<Choice>) => void,
 *   found: {inner: any[], isInner: boolean}[], rows: any[], innerOf: (row: any) => any[]}} props
 */
function Tools({ label, columns, choice, change, found, rows, innerOf }) {
  const of = (/** @type {any[]} */ inner) => Math.max(1, inner.length);
  const num = rows.reduce((sum, row) => sum + of(innerOf(row)), 0);
  const left = found.reduce((sum, one) => sum + (one.isInner ? 0 : of(one.inner)), 0);
  return html`<div class="tools">
    <input
      type="search"
      aria-label=${`Filter ${label}`}
      placeholder="filter"
      value=${choice.filter}
      onInput=${(/** @type {Event} */ event) => change({ filter: /** @type {HTMLInputElement} */ (event.target).value })}
    />
    <span role="status">${left === num ? number(num) : `${number(left)} of ${number(num)}`}</span>
    <details>
      <summary>Columns</summary>
      ${columns.map(
        (column, at) => html`<label key=${column.name}>
          <input
            type="checkbox"
            checked=${isShown(column, choice)}
            disabled=${at === 0}
            onChange=${() => change({ columns: { ...choice.columns, [column.name]: !isShown(column, choice) } })}
          />
          ${column.title}
        </label>`,
      )}
    </details>
  </div>`;
}

/**
 * How a reward looks: blue and a full circle for 1 and above, orange and an empty one for 0 and below, between them a
 * half circle. The sign and the number say the same to people who do not see the colours.
 * @param {{value: number | null | undefined}} props
 */
export function Reward({ value }) {
  if (value === null || value === undefined) return "–";
  const [kind, sign] = value >= 1 ? ["good", "●"] : value <= 0 ? ["bad", "○"] : ["partly", "◐"];
  return html`<span class=${`reward ${kind}`}><span aria-hidden="true">${sign}</span> ${number(value)}</span>`;
}

/**
 * How long ago a time is, with the time itself as its title.
 * @param {{at: number | null, now: number}} props Unix times.
 */
export function Ago({ at, now }) {
  if (at === null) return "–";
  const date = new Date(at * 1000);
  return html`<time datetime=${date.toISOString()} title=${date.toLocaleString()}>${ago(now - at)}</time>`;
}

/** @param {number} seconds */
export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}
