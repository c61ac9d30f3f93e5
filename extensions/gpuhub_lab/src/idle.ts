// A notification with a countdown and a button while the notebook is idle and will be stopped soon, and one for each
// problem of its GPUs. One that the user closes stays closed.
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Notification } from "@jupyterlab/apputils";

import type { GpuhubApi, Idle, Suspension } from "./api.js";
import { countSecondsUntil } from "./format.js";
import type { OverviewModel } from "./model.js";

/** Time between two questions to the notebook server, which answers from memory; ms. */
const PERIOD = 5_000;

export function buildIdlePlugin(getModel: (app: JupyterFrontEnd) => OverviewModel): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:idle",
    autoStart: true,
    activate: (app) => {
      const warning = new IdleWarning(getModel(app));
      void app.restored.then(() => warning.start());
    },
  };
}

class IdleWarning {
  private idle: Idle | undefined;
  private notification: string | undefined;
  private waiting: string | undefined;
  private readonly shownProblems = new Set<string>();

  private suspension: Suspension["state"] | undefined;
  private readonly api: GpuhubApi;

  constructor(private readonly model: OverviewModel) {
    this.api = model.api;
  }

  start(): void {
    setInterval(() => void this.refresh(), PERIOD);
    // The only place that shows, changes and ends the warning: JupyterLab changes a notification some milliseconds
    // after it is asked to, and one that was ended in between would stay on the screen.
    setInterval(() => this.show(), 1000);
    void this.refresh();
  }

  private async refresh(): Promise<void> {
    try {
      const { idle, gpu_problems, suspension } = await this.api.getIdle();
      this.idle = idle?.is_warned ? idle : undefined;
      this.showProblems(gpu_problems ?? []);
      this.showSuspension(suspension ?? undefined);
    } catch {
      // In an image without the server's part of this, nothing is shown.
    }
  }

  /** While a cell waits for the GPU, and until it runs. */
  private showSuspension(suspension: Suspension | undefined): void {
    if (suspension?.state !== this.suspension) {
      this.suspension = suspension?.state;
      void this.model.refresh();
    }
    const isWaiting = suspension?.state === "resuming" || suspension?.state === "restoring";
    if (!suspension || !isWaiting) {
      if (this.waiting) Notification.dismiss(this.waiting);
      this.waiting = undefined;
      return;
    }
    const message = `This notebook was suspended, and its cells wait: it ${suspension.text}.`.replace("it its", "its");
    if (this.waiting) Notification.update({ id: this.waiting, message, type: "in-progress", autoClose: false });
    else this.waiting = Notification.emit(message, "in-progress", { autoClose: false });
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
    const left = Math.max(0, Math.round(countSecondsUntil(this.idle.stops_at)));
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
    this.idle = undefined;
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
