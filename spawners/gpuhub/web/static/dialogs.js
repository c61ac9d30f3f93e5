// The dialog that asks before something changes, and its forms by what a button does (`data-do`).

import { get, post } from "./hub.js";
import { countHoursUntil, showTimes } from "./times.js";

const dialog = document.getElementById("gpuhub-dialog");
const title = document.getElementById("gpuhub-dialog-title");
const body = document.getElementById("gpuhub-dialog-body");
const refusal = document.getElementById("gpuhub-dialog-refusal");
const closeButton = document.getElementById("gpuhub-dialog-close");
const doButton = document.getElementById("gpuhub-dialog-do");
let confirm = null; // builds the request of the dialog's button

function paragraph(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element;
}

function field(label, input) {
  const element = document.createElement("label");
  element.append(label, input);
  return element;
}

function select(choices, chosen) {
  const element = document.createElement("select");
  element.className = "form-select";
  for (const [value, text] of choices) { element.add(new Option(text, value, false, value === chosen)); }
  return element;
}

function reasonInput() {
  const element = document.createElement("input");
  element.className = "form-control";
  element.maxLength = 300;
  element.placeholder = "shown to users";
  return element;
}

function numberInput(value, inForce, unit, step) {
  const element = document.createElement("input");
  element.type = "number";
  element.className = "form-control";
  element.min = "0";
  element.step = step;
  element.value = value === null ? "" : value / unit;
  element.placeholder = inForce === null ? "no limit" : `now ${inForce / unit}`;
  return element;
}

function refuse(text) {
  refusal.textContent = text;
  refusal.hidden = !text;
}

function show(heading, parts, { label = "", isDangerous = false, build = null } = {}) {
  title.textContent = heading;
  body.replaceChildren(...parts);
  doButton.textContent = label;
  doButton.className = `btn ${isDangerous ? "btn-danger" : "btn-primary"}`;
  doButton.hidden = !build;
  doButton.disabled = false;
  refuse("");
  confirm = build;
  if (!dialog.open) { dialog.showModal(); }
  // Nothing that ends something has the focus at once.
  const first = body.querySelector("select, input, button");
  (first && !isDangerous ? first : closeButton).focus();
}

async function send() {
  if (!confirm) { return; }
  doButton.disabled = true;
  try {
    await post("act", confirm());
    dialog.close();
  } catch (error) {
    refuse(error.message);
  }
  doButton.disabled = false;
}

async function loadLeases(node) {
  const { html } = await get(`runs?node=${encodeURIComponent(node)}`);
  const leases = document.createElement("div");
  leases.className = "gpuhub-scroll";
  leases.innerHTML = html;
  showTimes(leases);
  return leases;
}

const HOURS = [["1", "1 hour"], ["2", "2 hours"], ["4", "4 hours"], ["8", "8 hours"], ["12", "12 hours"], ["24", "24 hours"]];
const SHARE_HOURS = [["2", "2 hours"], ["24", "a day"], ["168", "7 days"], ["720", "30 days"]];
// The limits of a user in the dialog; `unit` is that of the field.
const LIMITS = {
  max_gpus: { text: "GPUs at once" },
  gpu_hours_per_week: { text: "GPU-hours in 7 days", step: "any" },
  max_waiting: { text: "Requests waiting" },
  max_jobs: { text: "Jobs that have not ended" },
  longest_lease_s: { text: "Longest time of a notebook or job, hours", unit: 3600, step: "any" },
};
const GRACE = [["0", "at once"], ["600", "in 10 minutes"], ["1800", "in 30 minutes"], ["7200", "in 2 hours"],
  ["28800", "in 8 hours"], ["86400", "in a day"]];

const forms = {
  extend({ lease, what, ends }) {
    // A time below what is left would shorten it.
    const later = HOURS.filter(([hours]) => Number(hours) > countHoursUntil(ends));
    if (!later.length) {
      show(`Extend ${what}`, [paragraph("It ends in more than a day, which is the longest time that can be chosen here.")]);
      return;
    }
    const hours = select(later, "4");
    show(`Extend ${what}`, [field("Time from now until it ends", hours)], {
      label: "Extend", build: () => ({ do: "extend", lease, hours: Number(hours.value) }),
    });
  },
  cancel({ job, what }) {
    show(`Cancel ${what}?`, [paragraph("Its processes are stopped, and its GPUs become free. What it wrote stays.")], {
      label: "Cancel the job", isDangerous: true, build: () => ({ do: "cancel", job }),
    });
  },
  suspend({ lease, what }) {
    show("Suspend this notebook?", [paragraph(`What it has on ${what} is moved into its node's memory, and others can have the GPU. Its variables stay. It gets the GPU back when a cell runs, as soon as that GPU is free.`)], {
      label: "Suspend", build: () => ({ do: "suspend", lease }),
    });
  },
  resume({ lease, what }) {
    show("Resume this notebook?", [paragraph(`It waits in the queue for ${what}, and continues when it has it.`)], {
      label: "Resume", build: () => ({ do: "resume", lease }),
    });
  },
  share({ job, what }) {
    const viewer = document.createElement("input");
    viewer.className = "form-control";
    viewer.maxLength = 64;
    viewer.autocapitalize = "off";
    viewer.spellcheck = false;
    const hours = select(SHARE_HOURS, "168");
    show(`Share the output of ${what}`, [
      paragraph("The user sees state, GPUs and output of this job, and can change nothing. You can end it at any time."),
      field("User", viewer), field("Time until it ends", hours),
    ], { label: "Share", build: () => ({ do: "share", job, viewer: viewer.value.trim(), hours: Number(hours.value) }) });
  },
  end_share({ subject, viewer }) {
    return post("act", { do: "end_share", job: subject, viewer });
  },
  end_notebook_share({ subject, viewer }) {
    return post("act", { do: "end_notebook_share", notebook: subject, viewer });
  },
  stop({ lease, what }) {
    show(`Stop ${what}?`, [paragraph("Its processes are stopped, and its GPUs become free. Files stay; variables in memory are lost.")], {
      label: "Stop", isDangerous: true, build: () => ({ do: "stop", lease }),
    });
  },
  async leases({ node }) {
    const leases = await loadLeases(node);
    leases.querySelector("caption")?.classList.add("visually-hidden"); // it is the dialog's title
    show(`Leases on ${node}`, [leases]);
  },
  cordon({ node }) {
    const reason = reasonInput();
    show(`Cordon ${node}`, [paragraph("It takes no new work. Leases there continue."), field("Reason", reason)], {
      label: "Cordon", build: () => ({ do: "cordon", node, reason: reason.value }),
    });
  },
  wake({ node }) {
    show(`Wake ${node}`, [paragraph("It is switched on now; the queue also does this when it needs the node.")], {
      label: "Wake", build: () => ({ do: "wake", node }),
    });
  },
  sleep({ node }) {
    show(`Put ${node} to sleep`, [paragraph("Refused while something runs there. The queue wakes it when it needs the node.")], {
      label: "Sleep", build: () => ({ do: "sleep", node }),
    });
  },
  undrain({ node }) {
    show(`Uncordon ${node}`, [paragraph("It takes work again, and leases that a drain has not ended yet get their time back.")], {
      label: "Uncordon", build: () => ({ do: "undrain", node }),
    });
  },
  async drain({ node }) {
    const reason = reasonInput();
    const grace = select(GRACE, "1800");
    const leases = await loadLeases(node);
    leases.querySelectorAll("button").forEach((button) => button.remove());
    show(`Drain ${node}`, [leases, paragraph("It takes no new work, and leases there end:"), field("End of the leases", grace), field("Reason", reason)], {
      label: `Drain ${node}`,
      isDangerous: true,
      build: () => ({ do: "drain", node, grace_s: Number(grace.value), reason: reason.value }),
    });
  },
  limits({ user, limits, reason: before }) {
    const inputs = Object.entries(JSON.parse(limits)).map(([name, [own, inForce]]) => {
      const { text, unit = 1, step = "1" } = LIMITS[name];
      return { name, text, unit, input: numberInput(own, inForce, unit, step) };
    });
    const reason = reasonInput();
    reason.value = before;
    show(`Limits of ${user}`, [
      paragraph("They replace those of cluster.toml at once, for this user alone; where a field is empty, cluster.toml decides. What the user has already stays."),
      ...inputs.map(({ text, input }) => field(text, input)), field("Reason", reason),
    ], {
      label: "Set limits",
      build: () => ({
        do: "limits", user, reason: reason.value,
        ...Object.fromEntries(inputs.map(({ name, unit, input }) => [name, input.value === "" ? null : Number(input.value) * unit])),
      }),
    });
  },
  force({ lease, what }) {
    show(`Force the end of ${what}?`, [
      paragraph("It is not proven that its containers are gone. After forcing, other users get its GPUs at once: if a "
        + "container still runs, two users share a GPU without knowing, and may damage each other's work."),
      paragraph("Force it only when you have checked that the machine is off or the container is gone."),
    ], { label: "Force", isDangerous: true, build: () => ({ do: "force", lease }) });
  },
  leave({ lease }) {
    return post("leave", { lease });
  },
};

async function openForm(button) {
  try {
    await forms[button.dataset.do](button.dataset);
  } catch (error) {
    show("This did not work", [paragraph(error.message)]);
  }
}

export function bindDialogs(root) {
  for (const element of [root, body]) {
    element.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-do]");
      if (button) { openForm(button); }
    });
  }
  dialog.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  closeButton.addEventListener("click", () => dialog.close());
}
