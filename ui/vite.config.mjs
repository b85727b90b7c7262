// One script and one style sheet: the live page serves them, the report carries them within itself.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { defineConfig } from "vite";

const out = "../src/fedtailor/ui/static";

// The same as tests/test_ui_build.py: a build that is older than its sources is noticed without node.
function sources() {
  const names = ["package-lock.json", "package.json", "tsconfig.json", "vite.config.mjs"];
  names.push(...readdirSync("src").map((name) => `src/${name}`));
  const hash = createHash("sha256");
  for (const name of names.sort()) hash.update(name + "\0").update(readFileSync(name)).update("\0");
  return hash.digest("hex");
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
      closeBundle: () => writeFileSync(`${out}/build.json`, JSON.stringify({ sources: sources() }) + "\n"),
    },
  ],
});
