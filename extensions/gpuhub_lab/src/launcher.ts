// JupyterLab opens its launcher only after it has saved its workspace, and waits for a second without changes before
// that. Here it opens when the last session's tabs are restored and there are none. An address of a file, or one with a
// query, opens something itself.
import type { JupyterFrontEndPlugin } from "@jupyterlab/application";
import { PageConfig } from "@jupyterlab/coreutils";

export const launcherPlugin: JupyterFrontEndPlugin<void> = {
  id: "gpuhub-lab:launcher",
  autoStart: true,
  activate: (app) => {
    if (PageConfig.getOption("treePath") || globalThis.location.search) return;
    void app.restored.then(() => {
      const isEmpty = [...app.shell.widgets("main")].length === 0;
      return isEmpty && app.commands.hasCommand("launcher:create") ? app.commands.execute("launcher:create") : undefined;
    });
  },
};
