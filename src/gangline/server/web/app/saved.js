// A page that was saved as a file: it has the answers in itself, and asks no server. The format is in gangline/web/saved.py.

const packed = document.getElementById("saved")?.textContent ?? null;

/** Whether this page is a file. */
export const isSaved = packed !== null;

/** @type {Promise<{id: string, answers: Map<string, {kind: string, body: ArrayBuffer}>}> | undefined} */
let opened;

/** Everything that the file has, unpacked once. */
export function saved() {
  opened ??= unpack();
  return opened;
}

async function unpack() {
  const bytes = Uint8Array.from(atob(packed ?? ""), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = await new Response(stream).arrayBuffer();
  const length = new DataView(whole).getUint32(0, true);
  /** @type {[string, [string, string, number, number][]]} */
  const [id, entries] = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, length)));
  const at = 4 + length;
  const answers = new Map(
    entries.map(([path, kind, offset, size]) => [path, { kind, body: whole.slice(at + offset, at + offset + size) }]),
  );
  return { id, answers };
}

/**
 * What a server would answer.
 * @param {string} path
 * @returns {Promise<Response>}
 */
export async function savedAnswer(path) {
  const found = (await saved()).answers.get(path);
  if (found === undefined) return new Response('{"code": "not_found", "detail": "This file has no more than its session."}', { status: 404 });
  return new Response(found.body, { headers: { "Content-Type": found.kind } });
}
