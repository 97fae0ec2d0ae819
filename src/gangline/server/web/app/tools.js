// The tools that a call's request offered to the model, and whether its chat template rendered them.

import { Fold, LongText, firstLine } from "./parts.js";
import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html } from "./ui.js";

/** @typedef {import("./types").Tool} Tool */

const NAMED = 40;
/** More tools are folded even where they are new. */
const FEW = 12;

/**
 * @param {object} props
 * @param {Tool[]} props.tools
 * @param {number} props.call
 * @param {number} props.origin Number of the call whose request had them first in this conversation.
 * @param {boolean} props.isRepeat Whether the call before had the same.
 * @param {boolean} props.isHidden Whether the model was not shown them.
 */
export function Tools({ tools, call, origin, isRepeat, isHidden }) {
  if (tools.length === 0) return null;
  const names = tools.slice(0, NAMED).map((tool) => tool.name);
  const count = `${number(tools.length)} tool${tools.length === 1 ? "" : "s"}`;
  return html`<${Fold}
    title=${origin === call ? `${count} offered${isRepeat ? ", as before" : ""}` : `${count}, as in call ${origin}`}
    peek=${visible(names.join(", "))}
    badge=${isHidden ? "not shown to the model" : ""}
    kind="tools"
    open=${origin === call && !isRepeat && tools.length <= FEW}
  >
    ${tools.map(
      (tool) => html`<${Fold} key=${tool.name} title=${visible(tool.name)} peek=${firstLine(tool.description ?? "")} kind="tool" open=${false}>
        ${tool.description !== null && html`<${LongText} text=${tool.description} kind="tool" />`}
        <${LongText} text=${JSON.stringify(tool.grammar ?? tool.parameters ?? {}, null, 2)} kind="tool" />
      <//>`,
    )}
  <//>`;
}
