// Columns of numbers: typed arrays over the body of an answer, without parsing. The format is in gangline/web/columns.py.

const TYPES = { i1: Int8Array, u1: Uint8Array, i4: Int32Array, f4: Float32Array };

/**
 * @param {ArrayBuffer} body
 * @returns {Record<string, Int8Array | Uint8Array | Int32Array | Float32Array>}
 */
export function readColumns(body) {
  const head = new DataView(body);
  if (head.getUint32(0) !== 0x474c4331) throw new Error("no columns");
  const length = head.getUint32(4, true);
  /** @type {[string, keyof typeof TYPES, number, number][]} */
  const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 8, length)));
  return Object.fromEntries(entries.map(([name, type, offset, count]) => [name, new TYPES[type](body, offset, count)]));
}
