// A notification with a countdown and a button while the notebook is idle and will be stopped soon, and one for each
// problem of its GPUs. One that the user closes stays closed.
import type { JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Notification } from "@jupyterlab/apputils";

import { GpuhubApi, type Idle } from "./api.js";

/** Time between two questions to the notebook server, which answers from memory; ms. */
const PERIOD = 10_000;

export const idlePlugin: JupyterFrontEndPlugin<void> = {
  id: "gpuhub-lab:idle",
  autoStart: true,
  activate: (app) => {
    const warning = new IdleWarning(new GpuhubApi(app.serviceManager.serverSettings));
    void app.restored.then(() => warning.start());
  },
};

class IdleWarning {
  private idle: Idle | undefined;
  private notification: string | undefined;
  private readonly shownProblems = new Set<string>();

  constructor(private readonly api: GpuhubApi) {}

  start(): void {
    setInterval(() => void this.refresh(), PERIOD);
    setInterval(() => this.idle && this.show(), 1000);
    void this.refresh();
  }

  private async refresh(): Promise<void> {
    try {
      const { idle, gpu_problems } = await this.api.getIdle();
      this.idle = idle?.is_warned ? idle : undefined;
      this.show();
      this.showProblems(gpu_problems ?? []);
    } catch {
      // In an image without the server's part of this, nothing is shown.
    }
  }

  /** Each problem once; one that has ended and comes back is shown again. */
  private showProblems(problems: string[]): void {
    for (const old of this.shownProblems) if (!problems.includes(old)) this.shownProblems.delete(old);
    for (const problem of problems.filter((text) => !this.shownProblems.has(text))) {
      this.shownProblems.add(problem);
      Notification.warning(problem, { autoClose: false });
    }
  }

  private show(): void {
    if (!this.idle) {
      if (this.notification) Notification.dismiss(this.notification);
      this.notification = undefined;
      return;
    }
    const left = Math.max(0, Math.round((new Date(this.idle.stops_at).getTime() - Date.now()) / 1000));
    const time = `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")} min`;
    const { text, keep_s } = this.idle;
    // JupyterLab shows at most 140 characters.
    const message = `${text.charAt(0).toUpperCase()}${text.slice(1)}. This notebook will be stopped in ${time} unless a cell runs; files are kept.`;
    const actions = keep_s ? [{ label: `Keep for ${describe(keep_s)}`, callback: () => void this.keep() }] : [];
    if (this.notification) {
      Notification.update({ id: this.notification, message, type: "warning", autoClose: false, actions });
    } else {
      this.notification = Notification.warning(message, { autoClose: false, actions });
    }
  }

  private async keep(): Promise<void> {
    this.notification = undefined;
    try {
      const kept = await this.api.keep();
      this.idle = kept?.is_warned ? kept : undefined;
      const until = new Date(kept?.kept_until ?? Date.now()).toLocaleTimeString([], { timeStyle: "short" });
      Notification.success(`This notebook is kept until ${until}.`, { autoClose: 5000 });
    } catch (error) {
      Notification.error((error as Error).message, { autoClose: false });
    }
  }
}

function describe(seconds: number): string {
  const minutes = Math.round(seconds / 60);
  if (seconds < 60) return `${seconds} s`;
  return minutes % 60 ? `${minutes} min` : `${minutes / 60} h`;
}
