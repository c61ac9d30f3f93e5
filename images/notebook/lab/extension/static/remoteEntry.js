// Extensions of JupyterLab in the form in which it loads them: a container with init and get. There is nothing to
// build, because they use the application's own objects alone.
(globalThis._JUPYTERLAB ??= {})["gpuhub-lab"] = {
  init() {},
  async get() {
    return () => ({
      __esModule: true,
      default: [
        { id: "gpuhub-lab:launcher", autoStart: true, activate: openLauncher },
        { id: "gpuhub-lab:idle", autoStart: true, activate: warnIdle },
        { id: "gpuhub-lab:notifications", autoStart: true, activate: showNotifications },
      ],
    });
  },
};

// JupyterLab opens its launcher only after it has saved its workspace, and waits for a second without changes before
// that. Here it opens when the last session's tabs are restored and there are none. An address of a file, or one with a
// query, opens something itself.
function openLauncher(app) {
  if (readConfig().treePath || globalThis.location.search) return;
  app.restored.then(() => {
    if (app.shell.isEmpty("main") && app.commands.hasCommand("launcher:create")) {
      return app.commands.execute("launcher:create");
    }
  });
}

// A notification of JupyterLab, with a countdown and a button, while the notebook is idle and will be stopped soon, and
// one for each problem of its GPUs. One that the user closes stays closed.
function warnIdle(app) {
  const base = `${readConfig().baseUrl ?? "/"}gpuhub/`;
  let idle, notification;
  let problems = [];
  const shownProblems = new Set();

  const ask = async (path, method) => {
    const xsrf = document.cookie.match(/(?:^|; *)_xsrf=([^;]*)/)?.[1] ?? "";
    const answer = await fetch(base + path, { method, headers: { "X-XSRFToken": xsrf } });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.message);
    idle = body.idle?.is_warned ? body.idle : undefined;
    problems = body.gpu_problems ?? problems;
    return body.idle;
  };

  const notify = (message, type, options) => app.commands.execute("apputils:notify", { message, type, options });

  // Each problem once; one that has ended and comes back is shown again.
  const showProblems = async () => {
    for (const old of shownProblems) if (!problems.includes(old)) shownProblems.delete(old);
    for (const problem of problems.filter((text) => !shownProblems.has(text))) {
      shownProblems.add(problem);
      await notify(problem, "warning", { autoClose: false });
    }
  };

  const show = async () => {
    if (!idle) {
      if (notification) await app.commands.execute("apputils:dismiss-notification", { id: await notification });
      notification = undefined;
      return;
    }
    const left = Math.max(0, Math.round((new Date(idle.stops_at) - Date.now()) / 1000));
    const time = `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")} min`;
    // JupyterLab shows at most 140 characters.
    const message = `${idle.text[0].toUpperCase()}${idle.text.slice(1)}. This notebook will be stopped in ${time} unless a cell runs; files are kept.`;
    const actions = idle.keep_s ? [{ commandId: "gpuhub:keep", label: `Keep for ${describe(idle.keep_s)}` }] : [];
    if (notification) {
      const update = { id: await notification, message, type: "warning", autoClose: false, actions };
      await app.commands.execute("apputils:update-notification", update);
    } else {
      notification = notify(message, "warning", { autoClose: false, actions });
    }
  };

  app.commands.addCommand("gpuhub:keep", {
    label: "Keep this idle notebook",
    execute: async () => {
      notification = undefined;
      try {
        const kept = await ask("keep", "POST");
        const until = new Date(kept?.kept_until ?? Date.now()).toLocaleTimeString([], { timeStyle: "short" });
        await notify(`This notebook is kept until ${until}.`, "success", { autoClose: 5000 });
      } catch (error) {
        await notify(error.message, "error", { autoClose: false });
      }
    },
  });
  // In an image without the server's part of this, nothing is shown.
  const refresh = () => ask("idle", "GET").then(() => Promise.all([show(), showProblems()]), () => undefined);
  app.restored.then(() => {
    setInterval(refresh, 10000);
    setInterval(() => idle && show(), 1000);
    return refresh();
  });
}

// The user's notifications as JupyterLab's own; the browser remembers the last one, so that a reload shows none again.
function showNotifications(app) {
  const base = `${readConfig().baseUrl ?? "/"}gpuhub/notifications`;
  const key = "gpuhub-notifications";
  const types = { "job-failed": "error", "job-preempted": "warning", "time-left": "warning" };
  const refresh = async () => {
    const last = Number(localStorage.getItem(key) ?? 0);
    const answer = await fetch(`${base}?after=${last}`);
    if (!answer.ok) return;
    for (const { seq, kind, title, body } of (await answer.json()).notifications) {
      // Another tab may have shown it in the meantime.
      if (seq <= Number(localStorage.getItem(key) ?? 0)) continue;
      localStorage.setItem(key, seq);
      // JupyterLab shows at most 140 characters.
      const message = `${title}. ${body}`;
      await app.commands.execute("apputils:notify", {
        message: message.length > 140 ? `${message.slice(0, 139)}…` : message,
        type: types[kind] ?? "info",
        options: { autoClose: false },
      });
    }
  };
  // In an image without the server's part of this, nothing is shown.
  const ask = () => refresh().catch(() => undefined);
  app.restored.then(() => {
    setInterval(ask, 10000);
    return ask();
  });
}

function describe(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 60) return `${seconds} s`;
  return minutes % 60 ? `${minutes} min` : `${minutes / 60} h`;
}

function readConfig() {
  return JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
}
