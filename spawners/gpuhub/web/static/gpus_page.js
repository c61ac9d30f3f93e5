// The page of all GPUs: applies what the hub sends, and keeps what the user has unfolded and focused.

import { bindDialogs } from "./dialogs.js";
import { get, hubUrl } from "./hub.js";
import { dropRemovedOutputs, startOutput, stopOutput } from "./job_outputs.js";
import { LiveStream } from "./live_stream.js";
import { morph } from "./morph.js";
import { keepCountdowns, setServerTime, showTimes } from "./times.js";

const ANNOUNCE_MS = 5000;
const REASON_MS = 15000;
const root = document.querySelector(".gpuhub-page");
const nodeList = document.getElementById("gpuhub-node-list");
const connection = document.getElementById("gpuhub-connection");
const announcer = document.getElementById("gpuhub-announcer");
const filter = document.getElementById("gpuhub-filter");
const query = new URLSearchParams(window.location.search);

// -- announcements ------------------------------------------------------------------------------------------------------

let announcements = [];
let announceTimer = null;

// A screen reader gets at most one message in a while, with everything that happened since the last one.
function announce(sentences) {
  announcements.push(...sentences);
  if (announceTimer || !announcements.length) { return; }
  announcer.textContent = announcements.join(" ");
  announcements = [];
  announceTimer = window.setTimeout(() => { announceTimer = null; announce([]); }, ANNOUNCE_MS);
}

// -- updates ------------------------------------------------------------------------------------------------------------

function updateNodes(changed, order) {
  const known = new Map([...nodeList.children].map((node) => [node.dataset.nodeName, node]));
  let next = nodeList.firstElementChild;
  for (const name of order) {
    let node = known.get(name);
    if (!node) {
      node = document.createElement("div");
      nodeList.insertBefore(node, next);
    } else if (node === next) {
      next = next.nextElementSibling;
    } else {
      nodeList.insertBefore(node, next);
    }
    if (name in changed) { node = replaceNode(node, changed[name]); }
    known.delete(name);
  }
  known.forEach((node) => node.remove());
}

function replaceNode(node, html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  const wanted = template.content.firstElementChild;
  if (node.localName !== wanted.localName) {
    node.replaceWith(wanted);
    showTimes(wanted);
    return wanted;
  }
  morph(node, wanted.innerHTML);
  return node;
}

function update(change) {
  setServerTime(change.now);
  for (const [name, html] of Object.entries(change.parts || {})) {
    const part = root.querySelector(`[data-gpuhub-part="${CSS.escape(name)}"]`);
    if (part) { morph(part, html); }
  }
  if (change.order) { updateNodes(change.nodes, change.order); }
  dropRemovedOutputs();
  if (change.parts && "queue" in change.parts) { refreshReasons(); }
  if (change.warnings) { document.dispatchEvent(new CustomEvent("gpuhub:warnings", { detail: change.warnings })); }
  announce(change.announcements || []);
}

// -- the connection -------------------------------------------------------------------------------------------------------

let staleTimer = null;

function showState(isLive) {
  if (isLive) {
    window.clearTimeout(staleTimer);
    staleTimer = null;
    connection.textContent = "live";
    connection.classList.add("gpuhub-is-live");
    root.classList.remove("gpuhub-stale");
    return;
  }
  // A stream ends after some minutes and begins again: only a longer pause is worth showing.
  staleTimer ??= window.setTimeout(() => {
    connection.textContent = "not live: connecting again …";
    connection.classList.remove("gpuhub-is-live");
    root.classList.add("gpuhub-stale");
    announce(["The page is not up to date. It connects again by itself."]);
  }, 5000);
}

const stream = new LiveStream(() => `${hubUrl}stream?${query}`, {
  handlers: {
    update,
    refused({ message }) {
      stream.end();
      showState(true);
      connection.textContent = `not live: ${message}`;
      connection.classList.remove("gpuhub-is-live");
    },
  },
  onState: showState,
  // Without a session, this request leads to the login.
  onLost(failures) { if (failures > 1) { get("idle").catch(() => {}); } },
});

// -- the filter, and what unfolds -----------------------------------------------------------------------------------------

let filterTimer = null;
let reasonTimer = null;

function want(name, value) {
  if (value) { query.set(name, value); } else { query.delete(name); }
  if (name !== "page") { query.delete("page"); }
  const text = query.toString();
  window.history.replaceState(null, "", window.location.pathname + (text ? `?${text}` : ""));
  window.clearTimeout(filterTimer);
  filterTimer = window.setTimeout(() => stream.open(), 300);
}

async function loadReason(details) {
  const box = details.querySelector("[data-keep]");
  try {
    morph(box, (await get(`why?lease=${encodeURIComponent(details.dataset.why)}`)).html);
  } catch (error) {
    box.textContent = error.message;
  }
}

// After a change of the queue, at most once in a while.
function refreshReasons() {
  reasonTimer ??= window.setTimeout(() => {
    reasonTimer = null;
    root.querySelectorAll("details[data-why][open]").forEach(loadReason);
  }, REASON_MS);
}

root.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-page]");
  if (button) { want("page", button.dataset.page); }
});
// `toggle` does not bubble.
root.addEventListener("toggle", (event) => {
  const details = event.target;
  if (details.dataset.why && details.open) { loadReason(details); }
  if (details.dataset.output) { if (details.open) { startOutput(details); } else { stopOutput(details); } }
}, true);
if (filter) {
  filter.addEventListener("submit", (event) => event.preventDefault());
  filter.addEventListener("input", (event) => want(event.target.name, event.target.value));
}
bindDialogs(root);
showTimes(root);
keepCountdowns(root);
