// Requests to the server. The cookie of the signed-in browser goes with each, and nothing leads elsewhere.

import { readColumns } from "./columns.js";
import { isSaved, savedAnswer } from "./saved.js";

export const COLUMNS = "application/vnd.gangline.columns";

export class ServerError extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * @param {string} path
 * @param {{method?: string, accept?: string, body?: unknown}} [options]
 * @returns {Promise<Response>} A 2xx answer. Throws ServerError.
 */
export async function request(path, { method = "GET", accept = "application/json", body } = {}) {
  /** @type {Record<string, string>} */
  const headers = { Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = isSaved ? await savedAnswer(path) : await fetch(path, { method, headers, ...(body === undefined ? {} : { body: JSON.stringify(body) }) });
  } catch (error) {
    throw new ServerError(0, "unreachable", `The server does not answer (${error}).`);
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new ServerError(response.status, problem.code ?? "", problem.detail ?? `HTTP ${response.status}`);
}

/**
 * @param {string} path
 * @param {{method?: string, body?: unknown}} [options]
 */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** @param {string} path */
export async function columns(path) {
  const response = await request(path, { accept: COLUMNS });
  return readColumns(await response.arrayBuffer());
}
