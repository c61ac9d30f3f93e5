// A notebook for a colleague, read-only: the command, its dialog, and the link.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Clipboard, Dialog, ICommandPalette, Notification, showErrorMessage } from "@jupyterlab/apputils";
import { PageConfig } from "@jupyterlab/coreutils";
import { IFileBrowserFactory } from "@jupyterlab/filebrowser";
import { INotebookTracker } from "@jupyterlab/notebook";
import { Widget } from "@lumino/widgets";

import type { GpuhubApi } from "./api.js";
import type { OverviewModel } from "./model.js";

export const SHARE = "gpuhub:share-notebook";
const SPANS: readonly (readonly [label: string, seconds: number])[] = [
  ["2 hours", 7200],
  ["a day", 86_400],
  ["7 days", 604_800],
  ["30 days", 2_592_000],
];
const USUAL_S = 604_800;

interface Form {
  viewer: string;
  seconds: number;
}

class ShareForm extends Widget implements Dialog.IBodyWidget<Form> {
  private readonly viewer = document.createElement("input");
  private readonly span = document.createElement("select");

  constructor() {
    super();
    this.addClass("gpuhub-form");
    Object.assign(this.viewer, { type: "text", className: "jp-mod-styled", required: true, maxLength: 64, spellcheck: false });
    this.viewer.autocapitalize = "off";
    this.span.className = "jp-mod-styled";
    for (const [label, seconds] of SPANS) this.span.append(new Option(label, String(seconds), false, seconds === USUAL_S));
    const note = document.createElement("p");
    note.textContent =
      "The user sees text, code and outputs as they were last saved, and can neither change nor run anything. " +
      "You end it on the hub's page of GPUs.";
    this.node.append(note, label("User", this.viewer), label("Time until it ends", this.span));
  }

  getValue(): Form {
    return { viewer: this.viewer.value.trim(), seconds: Number(this.span.value) };
  }
}

export function label(text: string, control: HTMLElement): HTMLLabelElement {
  const made = document.createElement("label");
  made.append(text, control);
  return made;
}

async function share(api: GpuhubApi, path: string): Promise<void> {
  const name = path.split("/").at(-1);
  const { button, value } = await new Dialog<Form>({
    title: `Share ${name} read-only`,
    body: new ShareForm(),
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: "Share" })],
    focusNodeSelector: "input[type=text]",
  }).launch();
  if (!button.accept || !value) return;
  if (!value.viewer) {
    await showErrorMessage(`${name} is not shared`, "Write the name of a user of this hub.");
    return;
  }
  try {
    const made = await api.shareNotebook(path, value.viewer, value.seconds);
    const link = (PageConfig.getOption("hubHost") || globalThis.location.origin) + made.path;
    Notification.success(`${made.viewer} sees ${name} at ${link}`, {
      autoClose: false,
      actions: [{ label: "Copy link", callback: () => Clipboard.copyToSystem(link) }],
    });
  } catch (error) {
    await showErrorMessage(`${name} is not shared`, error instanceof Error ? error.message : String(error));
  }
}

export function buildSharePlugin(
  getModel: (app: JupyterFrontEnd) => OverviewModel,
  category: string,
): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:share",
    autoStart: true,
    optional: [INotebookTracker, IFileBrowserFactory, ICommandPalette],
    activate: (
      app,
      notebooks: INotebookTracker | null,
      browsers: IFileBrowserFactory | null,
      palette: ICommandPalette | null,
    ) => {
      const model = getModel(app);
      const findSelected = (): string | null => {
        const items = [...(browsers?.tracker.currentWidget?.selectedItems() ?? [])];
        return items.length === 1 && items[0]!.type === "notebook" ? items[0]!.path : null;
      };
      app.commands.addCommand(SHARE, {
        label: "Share Read-Only…",
        caption: "Let a colleague read this notebook as it was last saved",
        isEnabled: (args) => (args["isFile"] ? findSelected() : (notebooks?.currentWidget ?? null)) !== null,
        execute: async (args) => {
          if (args["isFile"]) {
            const path = findSelected();
            return path === null ? undefined : share(model.api, path);
          }
          const panel = notebooks?.currentWidget;
          if (!panel) return undefined;
          if (panel.context.model.dirty) await panel.context.save();
          return share(model.api, panel.context.path);
        },
      });
      app.contextMenu.addItem({ command: SHARE, selector: ".jp-Notebook", rank: 30 });
      app.contextMenu.addItem({
        command: SHARE,
        selector: ".jp-DirListing-item[data-isdir='false'][data-file-type='notebook']",
        args: { isFile: true },
        rank: 30,
      });
      palette?.addItem({ command: SHARE, category, args: { isPalette: true } });
    },
  };
}
