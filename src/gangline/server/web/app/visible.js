// Text of agents and tools, made safe to look at: every character that would be invisible, or that would move others,
// is shown as a sign. Escape sequences of terminals become plain text that way.

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

/**
 * The text with signs for control, bidirectional and zero-width characters. Line breaks and tabs stay.
 * @param {string} text
 */
export function visible(text) {
  return text.replaceAll("\r\n", "\n").toWellFormed().replace(HIDDEN, sign);
}

/** @param {string} char */
function sign(char) {
  const code = /** @type {number} */ (char.codePointAt(0));
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/**
 * Bytes for people: the text where they are UTF-8, else hexadecimal.
 * @param {Uint8Array} bytes
 */
export function shownBytes(bytes) {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
}
