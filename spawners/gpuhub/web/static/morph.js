// Changes an element to new HTML with as few changes as possible, so that the focus, a selection, unfolded details and
// what a screen reader has read stay. Elements are matched by their `data-key`, others by their place.
//
// Contents of elements with `data-keep` belong to the scripts, and so do whether details are open and the text of times.

import { showTime } from "./times.js";

export function morph(element, html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  morphChildren(element, template.content);
  if (focused && document.activeElement !== focused) { restoreFocus(element, focused); }
}

function restoreFocus(element, focused) {
  // An element that was only moved has lost the focus as well. Where it is gone, its part of the page gets the focus.
  const target = focused.isConnected && !focused.disabled ? focused : element.closest("[tabindex]");
  if (target) { target.focus({ preventScroll: true }); }
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key || node.id || "" : "";
}

function isAlike(node, wanted) {
  return node.nodeType === wanted.nodeType && node.nodeName === wanted.nodeName;
}

function morphChildren(parent, wantedParent) {
  const byKey = new Map();
  for (const child of parent.children) { if (keyOf(child)) { byKey.set(keyOf(child), child); } }
  let current = parent.firstChild;
  for (const wanted of [...wantedParent.childNodes]) {
    const key = keyOf(wanted);
    let match = null;
    if (key) {
      const keyed = byKey.get(key);
      if (keyed && isAlike(keyed, wanted)) { match = keyed; }
    } else if (current && !keyOf(current) && isAlike(current, wanted)) {
      match = current;
    }
    if (!match) {
      parent.insertBefore(wanted, current);
      if (wanted.nodeType === Node.ELEMENT_NODE) { showNewTimes(wanted); }
      continue;
    }
    if (match === current) { current = current.nextSibling; } else { parent.insertBefore(match, current); }
    morphNode(match, wanted);
  }
  while (current) {
    const next = current.nextSibling;
    current.remove();
    current = next;
  }
}

function showNewTimes(element) {
  if (element.localName === "time") { showTime(element); }
  element.querySelectorAll("time").forEach(showTime);
}

function morphNode(node, wanted) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.nodeValue !== wanted.nodeValue) { node.nodeValue = wanted.nodeValue; }
    return;
  }
  if (node.dataset.keep) { return; }
  const isTime = node.localName === "time";
  for (const { name, value } of wanted.attributes) {
    if (node.getAttribute(name) !== value && !(isTime && name === "class")) { node.setAttribute(name, value); }
  }
  for (const name of node.getAttributeNames()) {
    if (!wanted.hasAttribute(name) && name !== "open" && !(isTime && name === "title")) { node.removeAttribute(name); }
  }
  if (isTime) { showTime(node); } else { morphChildren(node, wanted); }
}
