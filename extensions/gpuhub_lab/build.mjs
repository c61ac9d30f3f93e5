// Builds labextension/: one file in the form in which JupyterLab loads extensions, a container with init and get.
//
// All that the extension imports is JupyterLab's own and comes from the modules that JupyterLab shares. So the bundler
// needs none of those packages, and the browser loads nothing twice.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";

import { build } from "esbuild";

const target = new URL("labextension/", import.meta.url);
const project = JSON.parse(readFileSync(new URL("package.json", import.meta.url), "utf8"));

const { outputFiles, metafile } = await build({
  absWorkingDir: new URL(".", import.meta.url).pathname,
  entryPoints: ["src/index.ts"],
  bundle: true,
  external: ["@jupyterlab/*", "@lumino/*", "react"],
  format: "cjs",
  jsx: "transform",
  loader: { ".css": "text", ".svg": "text" },
  logLevel: "warning",
  metafile: true,
  minify: true,
  target: "es2022",
  write: false,
});
const shared = Object.values(metafile.inputs).flatMap(({ imports }) => imports);
const names = [...new Set(shared.filter(({ external }) => external).map(({ path }) => path))].sort();

const entry = `(globalThis._JUPYTERLAB ??= {})[${JSON.stringify(project.name)}] = {
  init(scope) { this.scope = scope; },
  async get() {
    const load = async (name) => {
      const [first] = Object.values(this.scope[name] ?? {});
      if (!first) throw new Error(\`${project.name}: this JupyterLab does not share \${name}\`);
      return [name, (await first.get())()];
    };
    const shared = Object.fromEntries(await Promise.all(${JSON.stringify(names)}.map(load)));
    return () => {
      const module = { exports: {} };
      ((module, exports, require) => {
${outputFiles[0].text}
      })(module, module.exports, (name) => shared[name]);
      return module.exports;
    };
  },
};
`;
const digest = createHash("sha256").update(entry).digest("hex").slice(0, 16);
// Browsers may keep the file for ever, since its name changes with it.
const load = `static/remoteEntry.${digest}.js`;
const { name, version, description, license } = project;
const manifest = {
  name, version, description, license,
  jupyterlab: { extension: true, _build: { load, extension: "./extension" } },
};

rmSync(target, { recursive: true, force: true });
mkdirSync(new URL("static/", target), { recursive: true });
writeFileSync(new URL(load, target), entry);
writeFileSync(new URL("package.json", target), `${JSON.stringify(manifest, null, 2)}\n`);
