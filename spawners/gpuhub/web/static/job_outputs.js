// The live output of jobs, below the jobs whose details are unfolded.

import { hubUrl } from "./hub.js";
import { LiveStream } from "./live_stream.js";
import { TerminalOutput } from "./terminal_output.js";

const MAX_OPEN = 3;

const open = new Map(); // details → { stream, screen }

function build(details) {
  const screen = document.createElement("pre");
  screen.tabIndex = 0;
  screen.setAttribute("role", "log");
  screen.setAttribute("aria-live", "off"); // it can be read, and is not announced
  screen.setAttribute("aria-label", details.querySelector("summary").textContent.trim());
  const note = document.createElement("p");
  note.className = "gpuhub-quiet";
  note.textContent = "…";
  details.querySelector("[data-keep]").replaceChildren(screen, note);
  return { screen, note };
}

export function startOutput(details) {
  if (open.has(details)) { return; }
  if (open.size >= MAX_OPEN) { open.keys().next().value.open = false; }
  const { screen, note } = build(details);
  const output = new TerminalOutput(screen);
  const stream = new LiveStream(() => `${hubUrl}output?job=${encodeURIComponent(details.dataset.output)}`, {
    handlers: {
      begin: () => { output.clear(); note.textContent = "follows the job"; },
      text: ({ text }) => output.append(text),
      end: () => { note.textContent = "complete"; stream.end(); },
      refused: ({ message }) => { note.textContent = message; stream.end(); },
    },
    onState: (isLive) => { if (!isLive) { note.textContent = "connecting again …"; } },
  });
  open.set(details, stream);
}

export function stopOutput(details) {
  const stream = open.get(details);
  if (stream) { stream.end(); }
  open.delete(details);
}

// After an update: a job that is gone has no output.
export function dropRemovedOutputs() {
  for (const details of [...open.keys()]) { if (!details.isConnected) { stopOutput(details); } }
}
