// Preact with templates in place of JSX. Text in a template is text: nothing here writes HTML from strings.

import htm from "../vendor/htm.mjs";
import { h } from "../vendor/preact.mjs";

export { Component, render } from "../vendor/preact.mjs";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.mjs";
export { computed, effect, signal } from "../vendor/signals.mjs";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => import("../vendor/preact.mjs").VNode<any>} */
export const html = /** @type {any} */ (htm.bind(h));

/** @param {Event} event Whether a key is part of a text. */
export function isTyping(event) {
  return [HTMLInputElement, HTMLSelectElement, HTMLTextAreaElement].some((kind) => event.target instanceof kind);
}
