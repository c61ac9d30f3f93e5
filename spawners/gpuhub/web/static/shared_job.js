// The page of a job that another user shares: its state and its output, as long as it is shared.

import { hubUrl } from "./hub.js";
import { LiveStream } from "./live_stream.js";
import { morph } from "./morph.js";
import { TerminalOutput } from "./terminal_output.js";
import { keepCountdowns, setServerTime, showTimes } from "./times.js";

const root = document.querySelector(".gpuhub-page");
const connection = document.getElementById("gpuhub-connection");
const facts = document.getElementById("gpuhub-shared-job");
const note = document.getElementById("gpuhub-output-note");
const ending = document.getElementById("gpuhub-share-end");
const screen = document.getElementById("gpuhub-shared-output");
const output = new TerminalOutput(screen);

function showState(isLive) {
  connection.textContent = isLive ? "live" : "connecting again …";
  connection.classList.toggle("gpuhub-is-live", isLive);
}

// What was shown goes with the share.
function refuse({ message }) {
  stream.end();
  output.clear();
  screen.hidden = true;
  facts.replaceChildren();
  facts.hidden = true;
  note.textContent = "";
  ending.textContent = message;
  ending.hidden = false;
  connection.textContent = "";
  connection.classList.remove("gpuhub-is-live");
}

const stream = new LiveStream(() => `${hubUrl}shared-stream?job=${encodeURIComponent(root.dataset.job)}`, {
  handlers: {
    job({ html, now, hasOutput }) {
      setServerTime(now);
      morph(facts, html);
      if (!hasOutput) { note.textContent = "Its output appears when it starts."; }
    },
    begin: () => { output.clear(); note.textContent = ""; },
    text: ({ text }) => output.append(text),
    end: () => { note.textContent = "The output is complete."; },
    refused: refuse,
  },
  onState: showState,
  // Without a session, the page leads to the login.
  onLost(failures) { if (failures > 1) { window.location.reload(); } },
});
showTimes(root);
keepCountdowns(root);
