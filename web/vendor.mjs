// Copies the libraries of the page from node_modules to src/gangline/server/web/vendor, with their licences and hashes.
//
//   npm ci && node vendor.mjs           copies
//   npm ci && node vendor.mjs --check   only tells whether the copies are current
//
// `npm ci` checks each package against the hash in package-lock.json. The copies differ from the packages in one thing:
// a bare name in an import becomes a path, for the page has neither a bundler nor an import map. Source maps are cut off.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const TARGET = join(HERE, "../src/gangline/server/web/vendor");

/** @type {Record<string, {package: string, file: string, types?: string}>} By the name of the copy. */
const LIBRARIES = {
  "preact.mjs": { package: "preact", file: "dist/preact.mjs", types: "preact" },
  "hooks.mjs": { package: "preact", file: "hooks/dist/hooks.mjs", types: "preact/hooks" },
  "htm.mjs": { package: "htm", file: "dist/htm.mjs", types: "htm" },
  "signals.mjs": { package: "@preact/signals", file: "dist/signals.mjs", types: "@preact/signals" },
  "signals-core.mjs": { package: "@preact/signals-core", file: "dist/signals-core.mjs", types: "@preact/signals-core" },
  "uplot.mjs": { package: "uplot", file: "dist/uPlot.esm.js", types: "uplot" },
  "uplot.css": { package: "uplot", file: "dist/uPlot.min.css" },
};

/** Imports in the packages, and the copies that they mean. */
const PATHS = {
  "preact": "./preact.mjs",
  "preact/hooks": "./hooks.mjs",
  "@preact/signals-core": "./signals-core.mjs",
};

/** @returns {Record<string, string>} Content of every file of the folder, by name. */
function wanted() {
  /** @type {Record<string, string>} */
  const files = {};
  const rows = [];
  const lock = JSON.parse(readFileSync(join(HERE, "package-lock.json"), "utf8"));
  for (const [name, { package: owner, file, types }] of Object.entries(LIBRARIES)) {
    const folder = join(HERE, "node_modules", owner);
    const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    let source = readFileSync(join(folder, file), "utf8").replace(/\n?\/\/# sourceMappingURL=.*\s*$/, "\n");
    for (const [bare, path] of Object.entries(PATHS)) {
      source = source.replaceAll(`from"${bare}"`, `from"${path}"`).replaceAll(`from "${bare}"`, `from "${path}"`);
    }
    files[name] = source;
    if (types !== undefined) {
      const all = types === "uplot" ? "" : `export * from "${types}";\n`;
      const one = types === "uplot" || types === "htm" ? `export { default } from "${types}";\n` : "";
      files[name.replace(".mjs", ".d.mts")] = all + one;
    }
    const terms = readFileSync(join(folder, "LICENSE"), "utf8");
    const known = Object.keys(files).find((other) => other.startsWith("LICENSE-") && files[other] === terms);
    const licence = known ?? `LICENSE-${owner.replace("@", "").replace("/", "-")}`;
    files[licence] = terms;
    const hash = createHash("sha256").update(source).digest("hex");
    const integrity = lock.packages[`node_modules/${owner}`].integrity;
    rows.push(`| \`${name}\` | ${owner} ${about.version} | ${about.license} (\`${licence}\`) | ${integrity} | ${hash} |`);
  }
  files["README.md"] = [
    "# Libraries of the page",
    "",
    "Made by `web/vendor.mjs` from the packages of `web/package-lock.json`. Imports of other packages are paths here.",
    "",
    "| file | package | licence | integrity of the package | SHA-256 of the file |",
    "|---|---|---|---|---|",
    ...rows,
    "",
  ].join("\n");
  return files;
}

const files = wanted();
if (process.argv.includes("--check")) {
  const found = readdirSync(TARGET).sort();
  const stale = Object.entries(files).filter(
    ([name, content]) => !found.includes(name) || readFileSync(join(TARGET, name), "utf8") !== content,
  );
  const others = found.filter((name) => !(name in files));
  if (stale.length > 0 || others.length > 0) {
    const names = [...stale.map(([name]) => name), ...others];
    console.error(`${names.join(", ")}: not as in the packages. Run \`node vendor.mjs\`.`);
    process.exit(1);
  }
} else {
  mkdirSync(TARGET, { recursive: true });
  for (const [name, content] of Object.entries(files)) writeFileSync(join(TARGET, name), content);
}
