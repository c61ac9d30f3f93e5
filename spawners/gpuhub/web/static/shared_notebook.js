// The page of a notebook that another user shares: it is shown again when it was saved again, as long as it is shared.

import { get, hubUrl } from "./hub.js";
import { morph } from "./morph.js";
import { keepCountdowns, showTimes } from "./times.js";

const PERIOD_MS = 15000;
const root = document.querySelector(".gpuhub-page");
const connection = document.getElementById("gpuhub-connection");
const facts = document.getElementById("gpuhub-shared-job");
const frame = document.getElementById("gpuhub-notebook");
const ending = document.getElementById("gpuhub-share-end");
const path = `shared-notebook/${encodeURIComponent(root.dataset.notebook)}`;
let shown = root.dataset.version;

// What was shown goes with the share.
function end(message) {
  window.clearInterval(timer);
  frame.remove();
  facts.replaceChildren();
  facts.hidden = true;
  connection.textContent = "";
  ending.textContent = message;
  ending.hidden = false;
}

async function refresh() {
  if (document.hidden) { return; }
  try {
    const { html, version } = await get(`${path}/state`);
    connection.textContent = "";
    morph(facts, html);
    if (version !== shown) {
      shown = version;
      // Not its `src`: each change of that is one more page of the history.
      frame.contentWindow.location.replace(`${hubUrl}${path}/frame?version=${encodeURIComponent(version)}`);
    }
  } catch (error) {
    if (error.status === 403 || error.status === 404) { end(error.message); } else { connection.textContent = "connecting again …"; }
  }
}

const timer = window.setInterval(refresh, PERIOD_MS);
document.addEventListener("visibilitychange", refresh);
showTimes(root);
keepCountdowns(root);
