// The tokens of a session's calls, fetched by call and kept while the session is open.

import { columns } from "./api.js";
import { visible } from "./visible.js";

/** Bytes and shown text of one tokenizer's ids, of all answers so far. */
export class Vocabulary {
  constructor() {
    /** @type {Map<number, Uint8Array>} */
    this.bytes = new Map();
    /** @type {Map<number, string>} */
    this.labels = new Map();
  }

  /** @param {Record<string, any>} answer */
  add({ text_ids, text_starts, text }) {
    for (let index = 0; index < text_ids.length; index++) {
      const id = text_ids[index];
      if (!this.bytes.has(id)) this.bytes.set(id, text.subarray(text_starts[index], text_starts[index + 1]));
    }
    this.labels.clear();
  }

  /**
   * The token as it is drawn: its text, or its bytes where they are no whole characters, or its id.
   * @param {number} id
   */
  label(id) {
    let label = this.labels.get(id);
    if (label === undefined) {
      label = this.read(id);
      this.labels.set(id, label);
    }
    return label;
  }

  /** @param {number} id */
  read(id) {
    const bytes = this.bytes.get(id);
    if (bytes === undefined) return `${id} `;
    try {
      return visible(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
    } catch {
      return [...bytes].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    }
  }
}

/** The tokens of one call. Arrays are [tokens]; `sampled` is where the sampled ones begin. */
export class CallTokens {
  /**
   * @param {{ids: Int32Array, logprobs: Float32Array, mask: Int8Array, versions: Int32Array}} arrays
   * @param {number} sampled
   * @param {Vocabulary} vocabulary
   */
  constructor(arrays, sampled, vocabulary) {
    this.ids = arrays.ids;
    this.logprobs = arrays.logprobs;
    this.mask = arrays.mask;
    this.versions = arrays.versions;
    this.sampled = sampled;
    this.vocabulary = vocabulary;
  }

  /** Whether no id has a known text. */
  get isUnread() {
    return this.length > 0 && !this.ids.some((id) => this.vocabulary.bytes.has(id));
  }

  get length() {
    return this.ids.length;
  }

  /**
   * Indexes of the least likely sampled tokens, the least likely first.
   * @param {number} count
   */
  leastLikely(count) {
    const order = Array.from({ length: this.length - this.sampled }, (_, index) => this.sampled + index);
    return order.sort((a, b) => this.logprobs[a] - this.logprobs[b]).slice(0, count);
  }
}

export class SessionTokens {
  /**
   * @param {string} path Of the session's route.
   * @param {(call: number) => string} tokenizerOf A name of a call's tokenizer: an id has another text in another model.
   */
  constructor(path, tokenizerOf) {
    this.path = path;
    this.tokenizerOf = tokenizerOf;
    /** @type {Map<string, Vocabulary>} */
    this.vocabularies = new Map();
    /** @type {Map<number, Promise<CallTokens>>} */
    this.calls = new Map();
  }

  /** @param {number} call */
  of(call) {
    let found = this.calls.get(call);
    if (found === undefined) {
      found = this.fetch(call);
      found.catch(() => this.calls.delete(call));
      this.calls.set(call, found);
    }
    return found;
  }

  /** @param {number} call */
  async fetch(call) {
    const answer = /** @type {any} */ (await columns(`${this.path}/tokens?first=${call}&limit=1`));
    const tokenizer = this.tokenizerOf(call);
    const vocabulary = this.vocabularies.get(tokenizer) ?? new Vocabulary();
    this.vocabularies.set(tokenizer, vocabulary);
    vocabulary.add(answer);
    return new CallTokens(answer, answer.sampled[0] ?? 0, vocabulary);
  }
}
