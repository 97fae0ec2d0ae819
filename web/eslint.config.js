// Run in the repository's root: web/node_modules/.bin/eslint -c web/eslint.config.js src/gangline/server/web/app
//
// The page's modules: plain JavaScript in a browser. Its text comes from agents, so nothing may write HTML from strings.
const BROWSER = [
  "AbortController", "Blob", "DecompressionStream", "Response", "atob", "EventSource", "HTMLElement", "HTMLInputElement", "HTMLSelectElement", "HTMLTextAreaElement", "Headers", "MouseEvent", "KeyboardEvent",
  "ResizeObserver", "SharedWorker", "TextDecoder", "URL", "URLSearchParams", "addEventListener", "cancelAnimationFrame",
  "clearInterval", "clearTimeout", "console", "document", "fetch", "getComputedStyle", "globalThis", "history", "localStorage", "location", "matchMedia",
  "navigator", "queueMicrotask", "removeEventListener", "requestAnimationFrame", "setInterval", "setTimeout", "window",
];

export default [
  {
    files: ["src/gangline/server/web/app/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: Object.fromEntries(BROWSER.map((name) => [name, "readonly"])) },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "eqeqeq": "error",
      "no-constant-condition": "error",
      "no-dupe-keys": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-restricted-properties": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML", "write"].map((property) => ({ property }))],
      "no-restricted-syntax": ["error", {
        selector: "Literal[value='dangerouslySetInnerHTML'], Identifier[name='dangerouslySetInnerHTML'], TemplateElement[value.raw=/dangerouslySetInnerHTML/]",
        message: "Text of agents must never become HTML.",
      }],
      "no-shadow": "error",
      "no-undef": "error",
      "no-unused-vars": "error",
      "no-use-before-define": ["error", { functions: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
];
