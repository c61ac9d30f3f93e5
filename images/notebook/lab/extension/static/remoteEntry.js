// An extension of JupyterLab in the form in which it loads them: a container with init and get. There is nothing to
// build, because it uses the application's own objects alone.
//
// JupyterLab opens its launcher only after it has saved its workspace, and waits for a second without changes before
// that. Here it opens when the last session's tabs are restored and there are none. An address of a file, or one with a
// query, opens something itself.
(globalThis._JUPYTERLAB ??= {})["gpuhub-lab"] = {
  init() {},
  async get() {
    return () => ({ __esModule: true, default: { id: "gpuhub-lab:launcher", autoStart: true, activate } });
  },
};

function activate(app) {
  const config = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
  if (config.treePath || globalThis.location.search) return;
  app.restored.then(() => {
    if (app.shell.isEmpty("main") && app.commands.hasCommand("launcher:create")) {
      return app.commands.execute("launcher:create");
    }
  });
}
