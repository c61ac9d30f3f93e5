// gpuhub in JupyterLab. The parts share one model, so that the notebook server is asked once for all of them.
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { LabIcon } from "@jupyterlab/ui-components";

import { GpuhubApi } from "./api.js";
import gpu from "./gpu.svg";
import { buildIdlePlugin } from "./idle.js";
import { LAUNCH, PALETTE_CATEGORY, buildLaunchPlugin } from "./launch.js";
import { launcherPlugin } from "./launcher.js";
import { OverviewModel } from "./model.js";
import { notificationsPlugin } from "./notifications.js";
import { buildPanelPlugin } from "./panel.js";
import { RECIPES, buildRecipesPlugin } from "./recipes.js";
import { buildSharePlugin } from "./share.js";
import { buildStatusPlugin } from "./status.js";
import style from "./style.css";

const icon = new LabIcon({ name: "gpuhub:gpu", svgstr: gpu });
let shared: OverviewModel | undefined;

function getModel(app: JupyterFrontEnd): OverviewModel {
  if (!shared) {
    const model = new OverviewModel(new GpuhubApi(app.serviceManager.serverSettings));
    shared = model;
    document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
    // What the user opened comes first.
    void app.restored.then(() => model.start());
  }
  return shared;
}

export default [
  launcherPlugin,
  buildIdlePlugin(getModel),
  notificationsPlugin,
  buildStatusPlugin(getModel),
  buildPanelPlugin(getModel, [LAUNCH, RECIPES], icon),
  buildLaunchPlugin(getModel, icon),
  buildRecipesPlugin(getModel, icon, PALETTE_CATEGORY),
  buildSharePlugin(getModel, PALETTE_CATEGORY),
];
