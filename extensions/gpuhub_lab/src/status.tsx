// The item in the status bar: the notebook's GPUs, their memory, the time left, and a button for more time.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Dialog, Notification } from "@jupyterlab/apputils";
import { IStatusBar } from "@jupyterlab/statusbar";
import { ReactWidget } from "@jupyterlab/ui-components";
import { Widget } from "@lumino/widgets";
import * as React from "react";

import type { Notebook } from "./api.js";
import { countSecondsUntil, formatMemory, formatModels, formatSpan, sumKnown } from "./format.js";
import type { OverviewModel } from "./model.js";
import { label } from "./share.js";

export const EXTEND = "gpuhub:extend";
export const SUSPEND = "gpuhub:suspend";
export const RESUME = "gpuhub:resume";
/** Hours from now that the dialog offers; the broker refuses what the limits forbid. */
const HOURS = [1, 2, 4, 8, 12, 24, 48];
/** Between two updates of the time left, ms. */
const REDRAW_PERIOD = 15_000;
/** With less time than this left, the item is highlighted; seconds. */
const SHORT_TIME_S = 15 * 60;

const SUSPENSION_TEXTS = {
  suspending: "being suspended",
  suspended: "suspended",
  resuming: "waiting for the GPU",
  restoring: "coming back",
};

class StatusItem extends ReactWidget {
  constructor(
    private readonly model: OverviewModel,
    private readonly app: JupyterFrontEnd,
  ) {
    super();
    this.addClass("gpuhub-status");
    model.changed.connect(() => this.update());
    const timer = setInterval(() => this.update(), REDRAW_PERIOD);
    this.disposed.connect(() => clearInterval(timer));
  }

  render(): React.ReactElement | null {
    const { overview, problem } = this.model;
    if (!overview) return problem ? <span title={problem}>GPUs: no answer</span> : null;
    const { notebook } = overview;
    if (!notebook) return null;
    const { text, details, isShort } = describeNotebook(notebook);
    return (
      <span title={[details, problem].filter(Boolean).join("\n")} className={isShort ? "gpuhub-short" : undefined}>
        {text}
        {notebook.expires_at && (
          <>
            {" · "}
            <button
              type="button"
              aria-label="Extend the time of this notebook"
              onClick={() => void this.app.commands.execute(EXTEND)}
            >
              Extend
            </button>
          </>
        )}
      </span>
    );
  }
}

/** Return the texts of the status bar and of its tooltip, and whether the time is nearly over. */
export function describeNotebook(notebook: Notebook): { text: string; details: string; isShort: boolean } {
  const { gpus, expires_at } = notebook;
  const parts = [];
  const details = [];
  if (notebook.suspension) {
    parts.push(formatModels(gpus), SUSPENSION_TEXTS[notebook.suspension.state]);
    details.push(`This notebook: ${notebook.suspension.text}.`);
  } else if (gpus.length) {
    const used = sumKnown(gpus.map((gpu) => gpu.memory_used_mib));
    const total = gpus.reduce((sum, gpu) => sum + gpu.memory_mib, 0);
    parts.push(formatModels(gpus), formatMemory(used, total));
    for (const gpu of gpus) {
      const busy = gpu.utilisation_percent === null ? "" : `, ${gpu.utilisation_percent} % busy`;
      details.push(`${formatModels([gpu])} on ${gpu.node}: ${formatMemory(gpu.memory_used_mib, gpu.memory_mib)}${busy}`);
    }
  } else {
    parts.push("no GPU");
    details.push("This notebook has no GPU. %%gpu runs a cell on one, %gpu_launch a script on several.");
  }
  const left = expires_at ? countSecondsUntil(expires_at) : Infinity;
  if (expires_at) {
    parts.push(left >= 60 ? `${formatSpan(left)} left` : "ends now");
    details.push(`This notebook is stopped at ${new Date(expires_at).toLocaleString()}; files are kept.`);
  }
  return { text: parts.join(" · "), details: details.join("\n"), isShort: left < SHORT_TIME_S };
}

async function suspend(model: OverviewModel, isWanted: boolean): Promise<void> {
  try {
    await model.api.suspend(isWanted);
  } catch (error) {
    Notification.error((error as Error).message, { autoClose: 15_000 });
    return;
  }
  await model.refresh();
}

// JupyterLab's own dialog for a choice does not name it for screen readers.
class ExtendForm extends Widget implements Dialog.IBodyWidget<number> {
  private readonly hours = document.createElement("select");

  constructor(left: number, choices: number[]) {
    super();
    this.addClass("gpuhub-form");
    this.hours.className = "jp-mod-styled";
    for (const hours of choices) this.hours.append(new Option(`${hours} h from now`, String(hours)));
    this.node.append(label(`It has ${formatSpan(left)} left. Stop it`, this.hours));
  }

  getValue(): number {
    return Number(this.hours.value);
  }
}

async function extend(model: OverviewModel): Promise<void> {
  const notebook = model.overview?.notebook;
  if (!notebook?.expires_at) {
    Notification.info("This notebook has no time limit.", { autoClose: 5000 });
    return;
  }
  const left = countSecondsUntil(notebook.expires_at);
  const choices = HOURS.filter((hours) => hours * 3600 > left);
  if (!choices.length) {
    Notification.info(`This notebook has ${formatSpan(left)} left; ${HOURS.at(-1)} h is the longest extension.`, {
      autoClose: 5000,
    });
    return;
  }
  const chosen = await new Dialog<number>({
    title: "Extend this notebook",
    body: new ExtendForm(left, choices),
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: "Extend" })],
    focusNodeSelector: "select",
  }).launch();
  if (!chosen.button.accept || !chosen.value) return;
  try {
    await model.api.extend(chosen.value * 3600);
  } catch (error) {
    // The broker's message begins with the name of the field.
    const reason = (error as Error).message.replace(/^time_limit_s: /, "");
    Notification.error(`The notebook is not extended: ${reason}`, { autoClose: 15_000 });
    return;
  }
  await model.refresh();
  const until = model.overview?.notebook?.expires_at;
  if (until) Notification.success(`This notebook runs until ${new Date(until).toLocaleString()}.`, { autoClose: 5000 });
}

export function buildStatusPlugin(getModel: (app: JupyterFrontEnd) => OverviewModel): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:status",
    autoStart: true,
    optional: [IStatusBar],
    activate: (app, statusBar: IStatusBar | null) => {
      const model = getModel(app);
      app.commands.addCommand(EXTEND, {
        label: "Extend This Notebook's Time",
        caption: "Choose when this notebook will be stopped",
        isEnabled: () => Boolean(model.overview?.notebook?.expires_at),
        execute: () => extend(model),
      });
      app.commands.addCommand(SUSPEND, {
        label: "Suspend This Notebook",
        caption: "Lend its GPU to others: variables stay in the node's memory until a cell runs",
        isEnabled: () => Boolean(model.overview?.notebook?.may_suspend),
        execute: () => suspend(model, true),
      });
      app.commands.addCommand(RESUME, {
        label: "Resume This Notebook",
        caption: "Wait for the GPU that this notebook has lent",
        isEnabled: () => model.overview?.notebook?.suspension?.state === "suspended",
        execute: () => suspend(model, false),
      });
      statusBar?.registerStatusItem("gpuhub-lab:status", {
        item: new StatusItem(model, app),
        align: "left",
        rank: 900,
      });
    },
  };
}
