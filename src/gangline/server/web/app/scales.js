// Colours of tokens. Two hues that colour-blind people tell apart (Okabe and Ito), never red against green; the value
// itself is in the text under the strip, so that no colour has to be read.

const VERSIONS = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"];
const SHADES = 24;
const TRAINED = "rgb(86 180 233 / 0.5)";
const ABOVE = "rgb(0 114 178 / 0.45)";
const BELOW = "rgb(213 94 0 / 0.45)";
const CHANCES = [1, 0.5, 0.1, 0.01, 0.001];

/** @type {{name: string, label: string}[]} */
export const SCALES = [
  { name: "logprob", label: "log-prob" },
  { name: "mask", label: "mask" },
  { name: "version", label: "version" },
  { name: "advantage", label: "advantage" },
];

const UNLIKELY = Array.from({ length: SHADES + 1 }, (_, step) => `rgb(213 94 0 / ${((step / SHADES) * 0.85).toFixed(3)})`);

/**
 * Background of a sampled token; empty for none.
 * @param {string} scale
 * @param {import("./tokens.js").CallTokens} tokens
 * @param {number} index
 * @param {number | null} advantage Of the session, where its group is known.
 */
export function background(scale, tokens, index, advantage) {
  if (index < tokens.sampled) return "";
  switch (scale) {
    case "logprob":
      return UNLIKELY[shade(tokens.logprobs[index])];
    case "mask":
      return tokens.mask[index] ? TRAINED : "";
    case "version":
      return tokens.versions[index] < 0 ? "" : versionColour(tokens.versions[index]);
    case "advantage":
      if (!tokens.mask[index] || advantage === null || advantage === 0) return "";
      return advantage > 0 ? ABOVE : BELOW;
    default:
      return "";
  }
}

/**
 * What the colours of a scale mean: each with its text, an empty colour for none.
 * @param {string} scale
 * @param {import("./tokens.js").CallTokens} tokens
 * @param {number | null} advantage
 * @returns {{colour: string, label: string}[]}
 */
export function legend(scale, tokens, advantage) {
  switch (scale) {
    case "logprob":
      return CHANCES.map((chance) => ({ colour: UNLIKELY[shade(Math.log(chance))], label: `${number(100 * chance)} %` }));
    case "mask":
      return [{ colour: TRAINED, label: "trained on" }, { colour: "", label: "not trained on" }];
    case "version": {
      const seen = [...new Set(tokens.versions.subarray(tokens.sampled))].filter((version) => version >= 0);
      return seen.map((version) => ({ colour: versionColour(version), label: `version ${version}` }));
    }
    default:
      if (advantage === null) return [{ colour: "", label: "no other sample has a reward" }];
      return [{ colour: ABOVE, label: "reward above the mean" }, { colour: BELOW, label: "below" }];
  }
}

/** @param {number} version */
function versionColour(version) {
  return `${VERSIONS[version % VERSIONS.length]}99`;
}

/**
 * 0 where the model was sure, `SHADES` where the token had a chance of one in a thousand or less. By the root, so that
 * a chance of a third is seen.
 * @param {number} logprob
 */
function shade(logprob) {
  const share = Math.sqrt(Math.min(1, Math.max(0, -logprob / 6.9)));
  return Number.isFinite(share) ? Math.round(share * SHADES) : SHADES;
}

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
}

/** @param {number} bytes */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toPrecision(3)} ${units[unit]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}
