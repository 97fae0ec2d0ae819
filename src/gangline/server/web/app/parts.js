// Messages of a conversation: text, thinking, tool calls and tool results, each foldable, and long ones folded at first.

import { visible } from "./visible.js";
import { html, useState } from "./ui.js";

const FOLDED_CHARS = 1200;
/** Texts up to this length stay open in a long request. */
const SHORT_CHARS = 600;
/** What agents' programs put around their own notes to the model. */
const NOTE = /^\s*<[\w-]*(reminder|environment|context)[\w-]*>/i;
const SHOWN_CHARS = 50_000;

/** @typedef {import("./types").Part} Part */

/**
 * A text, folded where it is long.
 * @param {{text: string, kind: string}} props
 */
export function LongText({ text, kind }) {
  const [shown, setShown] = useState(FOLDED_CHARS);
  const left = text.length - shown;
  return html`<div class=${`text ${kind}`}>
    <pre>${visible(left > 0 ? text.slice(0, shown) : text)}</pre>
    ${left > 0 &&
    html`<button type="button" onClick=${() => setShown(shown + SHOWN_CHARS)}>
      ${left.toLocaleString("en")} more characters
    </button>`}
  </div>`;
}

/**
 * A foldable part with a heading.
 * @param {{title: string, peek?: string, badge?: string, kind: string, open: boolean, children?: any}} props peek: seen
 * of the content while it is folded. badge: a warning about it.
 */
export function Fold({ title, peek = "", badge = "", kind, open, children }) {
  const [isOpen, setOpen] = useState(open);
  return html`<section class=${`part ${kind}`}>
    <button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
      <span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> ${badge !== "" && html`<b class="badge">${badge}</b> `}${title}${
        !isOpen && peek !== "" ? `: ${peek}` : ""
      }
    </button>
    ${isOpen && children}
  </section>`;
}

/** @param {string} text */
export function firstLine(text) {
  const line = text.trimStart().split("\n", 1)[0].slice(0, 100);
  return visible(line);
}

/** @param {Part} part */
function plainText(part) {
  return part.type === "text" ? part.text : "url" in part ? `[${part.type}: ${part.url.slice(0, 80)}]` : "";
}

/**
 * One part of a message.
 * @param {{part: Part, role: string, open: boolean, isKnown: boolean}} props
 */
function PartView({ part, role, open, isKnown }) {
  switch (part.type) {
    case "text":
      return html`<${Fold} title=${isKnown ? `${role}, as before` : role} peek=${firstLine(part.text)} kind=${`said ${role}`} open=${open}>
        <${LongText} text=${part.text} kind=${role} />
      <//>`;
    case "thinking":
      return html`<${Fold} title=${`thinking: ${firstLine(part.text)}`} kind="thinking" open=${false}>
        <${LongText} text=${part.text} kind="thinking" />
      <//>`;
    case "tool_call":
      return html`<${Fold} title=${`call ${visible(part.name)}: ${firstLine(part.arguments)}`} kind="call" open=${false}>
        <${LongText} text=${readable(part.arguments)} kind="call" />
      <//>`;
    case "tool_result": {
      const text = part.content.map(plainText).join("\n");
      const title = part.is_error ? "tool error" : "tool result";
      return html`<${Fold} title=${`${title}: ${firstLine(text)}`} kind=${part.is_error ? "result failed" : "result"} open=${open}>
        <${LongText} text=${text} kind="result" />
      <//>`;
    }
    default:
      return html`<p class="part">${visible(plainText(part))}</p>`;
  }
}

/**
 * Arguments with line breaks where they are JSON.
 * @param {string} text
 */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2).replaceAll("\\n", "\n");
  } catch {
    return text;
  }
}

/** @param {Part} part */
function isBlank(part) {
  return part.type === "text" && part.text.trim() === "";
}

/**
 * @param {Part} part
 * @param {string} role
 * @param {boolean} isKnown
 * @param {boolean} isLong
 */
function opens(part, role, isKnown, isLong) {
  const text = part.type === "tool_result" ? part.content.map(plainText).join("\n") : plainText(part);
  if (isLong && text.length > SHORT_CHARS) return false;
  return role !== "system" && role !== "developer" && !isKnown && !(part.type === "text" && NOTE.test(text));
}

/**
 * Messages, one after the other. Folded are system texts and notes, what an earlier call had, and the long texts of a
 * long request. A blank text, as of a reply that only calls tools, is left out.
 * @param {object} props
 * @param {import("./types").Message[]} props.messages
 * @param {(text: string) => boolean} [props.isKnown] Whether an earlier call had the text.
 * @param {boolean} [props.isLong] Whether the request is long.
 */
export function Messages({ messages, isKnown = () => false, isLong = false }) {
  return messages.flatMap((message, at) => {
    const parts = message.parts.filter((part) => !isBlank(part));
    if (parts.length === 0) return [html`<p key=${at} class="part preview">${message.role}: no text</p>`];
    return parts.map((part, index) => {
      const known = part.type === "text" && message.role !== "assistant" && isKnown(part.text);
      const open = opens(part, message.role, known, isLong && message.role !== "assistant");
      return html`<${PartView} key=${`${at}.${index}`} part=${part} role=${message.role} open=${open} isKnown=${known} />`;
    });
  });
}
