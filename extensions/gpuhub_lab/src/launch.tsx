// The launcher's tile, the dialog behind it, and the commands that run cells on GPUs.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Dialog, ICommandPalette } from "@jupyterlab/apputils";
import { ILauncher } from "@jupyterlab/launcher";
import { INotebookTracker } from "@jupyterlab/notebook";
import { type LabIcon, ReactWidget } from "@jupyterlab/ui-components";
import * as React from "react";

import type { Node } from "./api.js";
import { addCell, findCodeCell, openConsole, runCellWith, wrapCell } from "./cells.js";
import type { OverviewModel } from "./model.js";
import { OPEN_PANEL } from "./panel.js";
import { type LaunchRequest, formatLine } from "./request.js";
import { EXTEND } from "./status.js";

export const LAUNCH = "gpuhub:launch";
export const RUN_CELL = "gpuhub:run-cell";
export const LAUNCH_CELL = "gpuhub:launch-cell";
const PALETTE_CATEGORY = "GPUs";
const MOST_NODES = 1024;

interface Form extends LaunchRequest {
  /** Where a script's line goes. */
  target: "notebook" | "console";
}

/** The form; `value` is what it says now. */
class LaunchForm extends ReactWidget implements Dialog.IBodyWidget<Form> {
  private form: Form;

  constructor(
    private readonly nodes: readonly Node[],
    private readonly notebook: string | null,
    private readonly hasCell: boolean,
    isCell: boolean,
  ) {
    super();
    this.addClass("gpuhub-form");
    this.form = {
      script: isCell ? null : "",
      nodes: 1,
      gpusPerNode: 1,
      model: "",
      isDetached: false,
      target: notebook === null ? "console" : "notebook",
    };
  }

  getValue(): Form {
    return this.form;
  }

  render(): React.ReactElement {
    const { script, nodes, gpusPerNode, model, isDetached, target } = this.form;
    const gpus = this.nodes.flatMap((node) => node.gpus);
    const models = [...new Set(gpus.map((gpu) => gpu.model))].sort();
    const free = gpus.filter((gpu) => gpu.state === "free" && (!model || gpu.model === model)).length;
    const most = Math.max(1, ...this.nodes.map((node) => node.gpus.length));
    const withGpus = this.nodes.filter((node) => node.gpus.length).length;
    return (
      <>
        <fieldset>
          <legend>What</legend>
          <Choice
            name="what"
            label="A script"
            isChosen={script !== null}
            onChoose={() => this.set({ script: script ?? "" })}
          />
          <Choice
            name="what"
            label={this.notebook === null ? "The active cell (no notebook is open)" : `The active cell of ${this.notebook}`}
            isChosen={script === null}
            isDisabled={!this.hasCell}
            onChoose={() => this.set({ script: null })}
          />
        </fieldset>
        {script !== null && (
          <>
            <label>
              Path of the script
              <input
                type="text"
                className="jp-mod-styled"
                placeholder="train.py"
                required
                maxLength={4096}
                value={script}
                onChange={(event) => this.set({ script: event.target.value })}
              />
            </label>
            <fieldset>
              <legend>Where the command goes</legend>
              <Choice
                name="target"
                label={this.notebook === null ? "A new cell (no notebook is open)" : `A new cell in ${this.notebook}`}
                isChosen={target === "notebook"}
                isDisabled={this.notebook === null}
                onChoose={() => this.set({ target: "notebook" })}
              />
              <Choice
                name="target"
                label="A new console"
                isChosen={target === "console"}
                onChoose={() => this.set({ target: "console" })}
              />
            </fieldset>
          </>
        )}
        <div className="gpuhub-numbers">
          <NumberField label="Nodes" value={nodes} most={Math.min(MOST_NODES, Math.max(1, withGpus))} onChange={(nodes) => this.set({ nodes })} />
          <NumberField label="GPUs on each" value={gpusPerNode} most={most} onChange={(gpusPerNode) => this.set({ gpusPerNode })} />
          <label>
            Model
            <select className="jp-mod-styled" value={model} onChange={(event) => this.set({ model: event.target.value })}>
              <option value="">any</option>
              {models.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
        </div>
        <div className="gpuhub-note">
          {nodes * gpusPerNode} GPUs, and {free} {model ? `${model} ` : ""}
          {free === 1 ? "is" : "are"} free. With fewer, the launch waits in the queue.
        </div>
        <label className="gpuhub-choice">
          <input type="checkbox" checked={isDetached} onChange={(event) => this.set({ isDetached: event.target.checked })} />
          As a job that continues without this notebook
        </label>
        <output aria-label="Command">{formatLine({ ...this.form, script: script === "" ? "SCRIPT" : script })}</output>
      </>
    );
  }

  private set(change: Partial<Form>): void {
    this.form = { ...this.form, ...change };
    this.update();
  }
}

function Choice(props: {
  name: string;
  label: string;
  isChosen: boolean;
  isDisabled?: boolean;
  onChoose: () => void;
}): React.ReactElement {
  const { name, label, isChosen, isDisabled, onChoose } = props;
  return (
    <label className="gpuhub-choice">
      <input type="radio" name={`gpuhub-${name}`} checked={isChosen} disabled={isDisabled} onChange={onChoose} />
      {label}
    </label>
  );
}

function NumberField(props: {
  label: string;
  value: number;
  most: number;
  onChange: (value: number) => void;
}): React.ReactElement {
  const { label, value, most, onChange } = props;
  return (
    <label>
      {label}
      <input
        type="number"
        className="jp-mod-styled"
        min={1}
        max={most}
        value={value}
        onChange={(event) => onChange(Math.min(most, Math.max(1, Math.trunc(event.target.valueAsNumber || 1))))}
      />
    </label>
  );
}

async function launch(
  app: JupyterFrontEnd,
  model: OverviewModel,
  notebooks: INotebookTracker | null,
  options: { folder: string; isCell: boolean },
): Promise<void> {
  const notebook = notebooks?.currentWidget ?? null;
  const cell = findCodeCell(notebooks);
  const body = new LaunchForm(model.overview?.nodes ?? [], notebook?.title.label ?? null, cell !== null, options.isCell);
  const { button, value } = await new Dialog<Form>({
    title: "Launch on GPUs",
    body,
    buttons: [
      Dialog.cancelButton(),
      Dialog.createButton({ label: "Insert", actions: ["insert"] }),
      Dialog.okButton({ label: "Run", actions: ["run"] }),
    ],
    focusNodeSelector: "input[type=text], input[type=number]",
  }).launch();
  if (!button.accept || !value) return;
  const isRun = button.actions.includes("run");
  if (value.script === null) {
    if (!cell) return;
    if (isRun) await runCellWith(cell, formatLine(value));
    else wrapCell(cell, formatLine(value));
    return;
  }
  const script = value.script.trim();
  const line = formatLine({ ...value, script: script || "SCRIPT" });
  // Without a script there is nothing to run: its name is left for the user to type.
  const canRun = isRun && script !== "";
  if (value.target === "notebook" && notebook) await addCell(notebook, line, canRun);
  else await openConsole(app, line, options.folder, canRun);
}

export function buildLaunchPlugin(
  getModel: (app: JupyterFrontEnd) => OverviewModel,
  icon: LabIcon,
): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:launch",
    autoStart: true,
    optional: [ILauncher, INotebookTracker, ICommandPalette],
    activate: (
      app,
      launcher: ILauncher | null,
      notebooks: INotebookTracker | null,
      palette: ICommandPalette | null,
    ) => {
      const model = getModel(app);
      const hasCell = (): boolean => findCodeCell(notebooks) !== null;
      app.commands.addCommand(LAUNCH, {
        label: "Launch on GPUs…",
        caption: "Run a script or cell on the GPUs of one or several nodes",
        icon: (args) => (args["isPalette"] ? undefined : icon),
        execute: (args) => launch(app, model, notebooks, { folder: String(args["cwd"] ?? ""), isCell: false }),
      });
      app.commands.addCommand(LAUNCH_CELL, {
        label: "Run This Notebook's Cell on GPUs…",
        caption: "Write %%gpu_launch above the active cell",
        isEnabled: hasCell,
        execute: () => launch(app, model, notebooks, { folder: "", isCell: true }),
      });
      app.commands.addCommand(RUN_CELL, {
        label: "Run This Notebook's Cell on a GPU",
        caption: "Write %%gpu above the active cell, and run it with the notebook's variables",
        isEnabled: hasCell,
        execute: () => {
          const panel = findCodeCell(notebooks);
          return panel ? runCellWith(panel, "%%gpu") : undefined;
        },
      });
      launcher?.add({ command: LAUNCH, category: "Other", rank: 1 });
      for (const command of [RUN_CELL, LAUNCH_CELL]) {
        app.contextMenu.addItem({ command, selector: ".jp-Notebook .jp-CodeCell", rank: 20 });
      }
      for (const command of [LAUNCH, RUN_CELL, LAUNCH_CELL, OPEN_PANEL, EXTEND]) {
        palette?.addItem({ command, category: PALETTE_CATEGORY, args: { isPalette: true } });
      }
    },
  };
}
