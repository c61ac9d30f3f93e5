// Cells and lines of magics: in the current notebook, or in a new console.
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { Notification } from "@jupyterlab/apputils";
import type { CodeConsole, ConsolePanel } from "@jupyterlab/console";
import { type INotebookTracker, NotebookActions, type NotebookPanel } from "@jupyterlab/notebook";

const CELL_MAGIC = /^\s*%%(\S+)/;
/** Magics that run a cell on GPUs already: such a cell is only run. */
const GPU_MAGICS = new Set(["gpu", "gpu_launch", "gpu_ranks"]);

/** The panel of the notebook that the user works in, if its active cell has code. */
export function findCodeCell(notebooks: INotebookTracker | null): NotebookPanel | null {
  const panel = notebooks?.currentWidget ?? null;
  return panel?.content.activeCell?.model.type === "code" ? panel : null;
}

/** Make the cell active whose context menu was opened: JupyterLab leaves another one active. */
export function activateClickedCell(app: JupyterFrontEnd, notebooks: INotebookTracker | null): void {
  const clicked = app.contextMenuHitTest((node) => node.classList.contains("jp-CodeCell"));
  const content = notebooks?.currentWidget?.content;
  const index = content?.widgets.findIndex((cell) => cell.node === clicked) ?? -1;
  if (content && index >= 0) content.activeCellIndex = index;
}

/** Write a magic above the active cell, and run it. */
export async function runCellWith(panel: NotebookPanel, magic: string): Promise<void> {
  if (wrapCell(panel, magic)) await NotebookActions.run(panel.content, panel.sessionContext);
}

/** Write a magic above the active cell; return false if the cell has another one, which has to be the first line. */
export function wrapCell(panel: NotebookPanel, magic: string): boolean {
  const cell = panel.content.activeCell!.model.sharedModel;
  const present = CELL_MAGIC.exec(cell.getSource())?.[1];
  if (present && !GPU_MAGICS.has(present)) {
    Notification.error(`The cell begins with %%${present}. Remove that line: ${magic.split(" ")[0]} has to be the first one.`, {
      autoClose: 15_000,
    });
    return false;
  }
  const source = cell.getSource();
  if (!present) cell.setSource(`${magic}\n${source}`);
  else if (magic !== "%%gpu") cell.setSource(source.replace(/^\s*%%.*/, () => magic));
  return true;
}

/** Add a cell below the active one. */
export async function addCell(panel: NotebookPanel, source: string, isRun: boolean): Promise<void> {
  const { content, sessionContext } = panel;
  NotebookActions.insertBelow(content);
  NotebookActions.changeCellType(content, "code");
  content.activeCell!.model.sharedModel.setSource(source);
  if (isRun) await NotebookActions.run(content, sessionContext);
}

/** Open a console for Python in a folder, with the line at its prompt. */
export async function openConsole(app: JupyterFrontEnd, source: string, folder: string, isRun: boolean): Promise<void> {
  const panel = (await app.commands.execute("console:create", {
    activate: true,
    basePath: folder,
    kernelPreference: { language: "python", shouldStart: true, autoStartDefault: true },
  })) as ConsolePanel;
  await panel.sessionContext.ready;
  const { console } = panel;
  if (isRun) await console.inject(source);
  else (await waitForPrompt(console)).setSource(source);
}

/** The prompt appears when the kernel has said what it is. */
function waitForPrompt(console: CodeConsole): Promise<{ setSource(source: string): void }> {
  const current = console.promptCell?.model.sharedModel;
  if (current) return Promise.resolve(current);
  return new Promise((resolve) => {
    const take = (): void => {
      const prompt = console.promptCell?.model.sharedModel;
      if (!prompt) return;
      console.promptCellCreated.disconnect(take);
      resolve(prompt);
    };
    console.promptCellCreated.connect(take);
  });
}
