// Bundles the page into the Python package, with the licences of what it is made from.
// The first line of the bundle holds a hash of the sources; tests/test_page.py says when it is out of date.
import { createHash } from "node:crypto";
import { copyFileSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../src/placewise/report/html";

const sources = ["build.mjs", "package-lock.json", "tsconfig.json", ...readdirSync("src").map((name) => `src/${name}`)];
const hash = createHash("sha256");
for (const name of sources.sort()) hash.update(readFileSync(name));
const digest = hash.digest("hex");

// The package of the graph's layout holds that of its graphs.
const parts = ["@dagrejs/dagre", "@dagrejs/graphlib"].map((name) => {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(`${folder}/LICENSE`, "utf8").trim()}\n`;
});
const licences = `The page holds these, under their own licences.\n\n${parts.join(`\n${"-".repeat(72)}\n\n`)}`;
writeFileSync(`${out}/LICENSES.txt`, licences);

await build({
  entryPoints: { page: "src/main.ts" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome103", "firefox113", "safari16.4"],
  legalComments: "none",
  banner: { js: `/* sources ${digest} */\n/*! ${licences}*/` },
  logLevel: "warning",
});
await build({ entryPoints: ["src/page.css"], outdir: out, minify: true, target: ["chrome103"], logLevel: "warning" });
copyFileSync("src/template.html", `${out}/template.html`);
