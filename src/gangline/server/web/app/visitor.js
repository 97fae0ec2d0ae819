// What this browser may do, asked once: a read-only link can change nothing, and its page offers nothing that would.

import { json } from "./api.js";
import { signal } from "./ui.js";

/** Whether this browser may change things; false until the server has said so. */
export const mayChange = signal(false);

json("/v1/page/visitor").then(
  (/** @type {{read_only: boolean}} */ visitor) => (mayChange.value = !visitor.read_only),
  () => {},
);
