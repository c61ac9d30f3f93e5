// The launcher's tile, the dialog behind it, and the commands that run cells on GPUs.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Dialog, ICommandPalette } from "@jupyterlab/apputils";
import { ILauncher } from "@jupyterlab/launcher";
import { INotebookTracker } from "@jupyterlab/notebook";
import { type LabIcon, ReactWidget } from "@jupyterlab/ui-components";
import * as React from "react";

import type { Node } from "./api.js";
import { activateClickedCell, addCell, findCodeCell, openConsole, runCellWith, wrapCell } from "./cells.js";
import type { OverviewModel } from "./model.js";
import { OPEN_PANEL } from "./panel.js";
import { type LaunchRequest, formatLine } from "./request.js";
import { EXTEND, RESUME, SUSPEND } from "./status.js";

export const LAUNCH = "gpuhub:launch";
export const RUN_CELL = "gpuhub:run-cell";
export const LAUNCH_CELL = "gpuhub:launch-cell";
export const PALETTE_CATEGORY = "GPUs";
const MOST_NODES = 1024;
const MOST_GPUS = 16;

interface Form extends LaunchRequest {
  /** Where a script's line goes. */
  target: "notebook" | "console";
}

interface FormContext {
  cluster: readonly Node[];
  /** The name of the open notebook; null if there is none. */
  notebook: string | null;
  hasCell: boolean;
}

/** The form, whose value is what it says now. */
class LaunchForm extends ReactWidget implements Dialog.IBodyWidget<Form> {
  constructor(
    private readonly context: FormContext,
    private form: Form,
  ) {
    super();
    this.addClass("gpuhub-form");
  }

  getValue(): Form {
    return this.form;
  }

  render(): React.ReactElement {
    return <FormFields {...this.context} initial={this.form} onChange={(form) => (this.form = form)} />;
  }
}

function FormFields(
  props: FormContext & { initial: Form; onChange: (form: Form) => void },
): React.ReactElement {
  const { cluster, notebook, hasCell, initial, onChange } = props;
  const [form, setForm] = React.useState(initial);
  const { script, nodes, gpusPerNode, model, isDetached, target } = form;
  const set = (change: Partial<Form>): void => {
    const changed = { ...form, ...change };
    setForm(changed);
    onChange(changed);
  };
  const gpus = cluster.flatMap((node) => node.gpus);
  const models = [...new Set(gpus.map((gpu) => gpu.model))].sort();
  const free = gpus.filter((gpu) => gpu.state === "free" && (!model || gpu.model === model)).length;
  // While the broker does not answer, the launch itself says what there is not.
  const mostNodes = cluster.filter((node) => node.gpus.length).length || MOST_NODES;
  const mostGpus = Math.max(0, ...cluster.map((node) => node.gpus.length)) || MOST_GPUS;
  const count = nodes * gpusPerNode;
  return (
    <>
      <fieldset>
        <legend>What</legend>
        <Choice
          name="what"
          label="A script"
          isChosen={script !== null}
          onChoose={() => set({ script: script ?? "" })}
        />
        <Choice
          name="what"
          label={notebook === null ? "The active cell (no notebook is open)" : `The active cell of ${notebook}`}
          isChosen={script === null}
          isDisabled={!hasCell}
          onChoose={() => set({ script: null })}
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
              onChange={(event) => set({ script: event.target.value })}
            />
          </label>
          <fieldset>
            <legend>Where the command goes</legend>
            <Choice
              name="target"
              label={notebook === null ? "A new cell (no notebook is open)" : `A new cell in ${notebook}`}
              isChosen={target === "notebook"}
              isDisabled={notebook === null}
              onChoose={() => set({ target: "notebook" })}
            />
            <Choice
              name="target"
              label="A new console"
              isChosen={target === "console"}
              onChoose={() => set({ target: "console" })}
            />
          </fieldset>
        </>
      )}
      <div className="gpuhub-numbers">
        <NumberField label="Nodes" value={nodes} most={mostNodes} onChange={(nodes) => set({ nodes })} />
        <NumberField
          label="GPUs on each"
          value={gpusPerNode}
          most={mostGpus}
          onChange={(gpusPerNode) => set({ gpusPerNode })}
        />
        <label>
          Model
          <select className="jp-mod-styled" value={model} onChange={(event) => set({ model: event.target.value })}>
            <option value="">any</option>
            {models.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      </div>
      <div className="gpuhub-note">
        {count} {count === 1 ? "GPU" : "GPUs"}; {free} {model} {free === 1 ? "is" : "are"} free now. With too few, the
        launch waits in the queue.
      </div>
      <label className="gpuhub-choice">
        <input type="checkbox" checked={isDetached} onChange={(event) => set({ isDetached: event.target.checked })} />
        As a job that continues without this notebook
      </label>
      <output aria-label="Command">{formatLine({ ...form, script: script === "" ? "SCRIPT" : script })}</output>
    </>
  );
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
  const body = new LaunchForm(
    { cluster: model.overview?.nodes ?? [], notebook: notebook?.title.label ?? null, hasCell: cell !== null },
    {
      script: options.isCell ? null : "",
      nodes: 1,
      gpusPerNode: 1,
      model: "",
      isDetached: false,
      target: notebook === null ? "console" : "notebook",
    },
  );
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
        isEnabled: (args) => Boolean(args["isClicked"]) || hasCell(),
        execute: (args) => {
          if (args["isClicked"]) activateClickedCell(app, notebooks);
          return launch(app, model, notebooks, { folder: "", isCell: true });
        },
      });
      app.commands.addCommand(RUN_CELL, {
        label: "Run This Notebook's Cell on a GPU",
        caption: "Write %%gpu above the active cell, and run it with the notebook's variables",
        isEnabled: (args) => Boolean(args["isClicked"]) || hasCell(),
        execute: (args) => {
          if (args["isClicked"]) activateClickedCell(app, notebooks);
          const panel = findCodeCell(notebooks);
          return panel ? runCellWith(panel, "%%gpu") : undefined;
        },
      });
      launcher?.add({ command: LAUNCH, category: "Other", rank: 1 });
      for (const command of [RUN_CELL, LAUNCH_CELL]) {
        app.contextMenu.addItem({ command, selector: ".jp-Notebook .jp-CodeCell", args: { isClicked: true }, rank: 20 });
      }
      for (const command of [LAUNCH, RUN_CELL, LAUNCH_CELL, OPEN_PANEL, EXTEND, SUSPEND, RESUME]) {
        palette?.addItem({ command, category: PALETTE_CATEGORY, args: { isPalette: true } });
      }
    },
  };
}
