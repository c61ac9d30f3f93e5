// The user's notifications as JupyterLab's own; the browser remembers the last one, so that a reload shows none again.
import type { JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Notification } from "@jupyterlab/apputils";

import { GpuhubApi } from "./api.js";

/** Time between two questions to the notebook server, which answers from memory; ms. */
const PERIOD = 10_000;
const KEY = "gpuhub-notifications";
/** Most characters that JupyterLab shows. */
const LENGTH = 140;
const TYPES: Record<string, Notification.TypeOptions> = {
  "job-failed": "error",
  "job-preempted": "warning",
  "time-left": "warning",
};

export const notificationsPlugin: JupyterFrontEndPlugin<void> = {
  id: "gpuhub-lab:notifications",
  autoStart: true,
  activate: (app) => {
    const api = new GpuhubApi(app.serviceManager.serverSettings);
    // In an image without the server's part of this, nothing is shown.
    const refresh = () => show(api).catch(() => undefined);
    void app.restored.then(() => {
      setInterval(() => void refresh(), PERIOD);
      return refresh();
    });
  },
};

async function show(api: GpuhubApi): Promise<void> {
  for (const { seq, kind, title, body } of await api.getNotifications(readLast())) {
    // Another tab may have shown it in the meantime.
    if (seq <= readLast()) continue;
    localStorage.setItem(KEY, String(seq));
    const message = `${title}. ${body}`;
    const text = message.length > LENGTH ? `${message.slice(0, LENGTH - 1)}…` : message;
    Notification.emit(text, TYPES[kind] ?? "info", { autoClose: false });
  }
}

function readLast(): number {
  return Number(localStorage.getItem(KEY) ?? 0);
}
