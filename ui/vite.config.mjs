// One script and one style sheet: the live page serves them, the report carries them within itself.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { defineConfig } from "vite";

const out = "../src/fedtailor/ui/static";

// The same as tests/test_ui.py: a build that is older than its sources is noticed without node.
function sources() {
  const names = ["package-lock.json", "package.json", "tsconfig.json", "vite.config.mjs"];
  names.push(...readdirSync("src").map((name) => `src/${name}`));
  const hash = createHash("sha256");
  for (const name of names.sort()) hash.update(name + "\0").update(readFileSync(name)).update("\0");
  return hash.digest("hex");
}

// What the bundle is made of, and under which terms.
const used = new Set();
function licences() {
  const parts = [...used].sort().map((name) => {
    const folder = `node_modules/${name}`, about = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
    const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
    return `${name} ${about.version} (${about.license})\n\n${file ? readFileSync(`${folder}/${file}`, "utf8").trim() : ""}\n`;
  });
  return `app.js contains these packages.\n\n${parts.join(`\n${"-".repeat(80)}\n\n`)}`;
}

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: out,
    emptyOutDir: true,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "fedtailor", fileName: () => "app.js", cssFileName: "app" },
  },
  define: { "process.env.NODE_ENV": '"production"' },
  plugins: [
    {
      name: "stamp",
      generateBundle(_, bundle) {
        for (const chunk of Object.values(bundle)) {
          for (const id of chunk.moduleIds ?? []) {
            const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(id);
            if (found && existsSync(`node_modules/${found[1]}/package.json`)) used.add(found[1]);
          }
        }
      },
      closeBundle() {
        writeFileSync(`${out}/build.json`, JSON.stringify({ sources: sources() }) + "\n");
        writeFileSync(`${out}/LICENSES.txt`, licences());
        const banner = "/*! fedtailor, with Preact (MIT), Observable Plot and D3 (ISC) and others: see ui/static/LICENSES.txt of fedtailor */\n";
        writeFileSync(`${out}/app.js`, banner + readFileSync(`${out}/app.js`, "utf8"));
      },
    },
  ],
});
