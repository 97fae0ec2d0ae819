// The tree on the left: chains of calls, each under the call that it came out of.

import { number } from "./scales.js";
import { visible } from "./visible.js";
import { html } from "./ui.js";

/** @typedef {import("./types").ChainLine} ChainLine */

const RELATIONS = {
  root: "conversation",
  continuation: "conversation",
  branch: "branch",
  sibling: "same prompt again",
  retry: "retry",
  changed: "edited history",
  spawned: "sub-agent",
  compacted: "after compaction",
};

/**
 * @param {ChainLine} chain
 * @param {import("./types").CallLine} first Its first call.
 */
export function chainName(chain, first) {
  const role = chain.role.replace("_", "-");
  const relation =
    first.certificate.context === "diverged"
      ? "split by other tokens"
      : RELATIONS[/** @type {keyof typeof RELATIONS} */ (chain.relation)] ?? chain.relation;
  return role === "main" || role === relation ? relation : `${role}, ${relation}`;
}

/**
 * How deep each chain is: one more than the chain that has its origin.
 * @param {ChainLine[]} chains
 * @param {import("./types").CallLine[]} calls
 */
export function depths(chains, calls) {
  /** @type {number[]} */
  const depth = [];
  for (const chain of chains) {
    const above = chain.origin === null ? undefined : calls[chain.origin]?.chain;
    depth[chain.number] = above === undefined || above >= chain.number ? 0 : depth[above] + 1;
  }
  return depth;
}

/**
 * @param {object} props
 * @param {import("./types").Outline} props.outline
 * @param {number | null} props.chosen Chain that is shown alone; null shows all calls.
 * @param {(chain: number | null) => void} props.onChoose
 */
export function ChainTree({ outline, chosen, onChoose }) {
  const depth = depths(outline.chains, outline.calls);
  return html`<nav class="chains" aria-label="Chains of calls">
    <ul>
      <li>
        <button type="button" aria-pressed=${chosen === null} onClick=${() => onChoose(null)}>
          All ${number(outline.calls.length)} calls, in order of time
        </button>
      </li>
      ${outline.chains.map(
        (chain) => html`<li key=${chain.number} style=${{ paddingLeft: `${Math.min(depth[chain.number], 8) * 14}px` }}>
          <button
            type="button"
            aria-pressed=${chosen === chain.number}
            title=${visible(chain.reason)}
            onClick=${() => onChoose(chain.number)}
          >
            <b>${chainName(chain, outline.calls[chain.calls[0]])}</b>
            <small>
              ${chain.calls.length === 1 ? `call ${chain.calls[0]}` : `${chain.calls.length} calls from ${chain.calls[0]}`}${
                chain.origin === null ? "" : `, out of call ${chain.origin}`
              }, ${number(chain.num_sampled_ids)} sampled
            </small>
          </button>
        </li>`,
      )}
    </ul>
  </nav>`;
}
