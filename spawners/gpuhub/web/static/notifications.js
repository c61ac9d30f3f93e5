// The page of notifications: its list is refreshed, and its forms are sent to the hub.
import { get, post } from "./hub.js";
import { showTimes } from "./times.js";

const list = document.getElementById("gpuhub-list");
const problem = document.getElementById("gpuhub-problem");
const form = document.getElementById("gpuhub-add");
let shown = "";
let timer = 0;

function complain(text) {
  problem.textContent = text;
  problem.hidden = !text;
}

// More often while something is being sent, whose result is awaited.
async function refresh() {
  window.clearTimeout(timer);
  let waiting = 0;
  try {
    const answer = await get("notifications");
    waiting = answer.waiting;
    if (answer.html !== shown) {
      const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      list.innerHTML = shown = answer.html;
      showTimes(list);
      if (focused) { list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus(); }
    }
  } catch {
    // The hub or the broker is away: the list stays, and the next refresh may succeed.
  }
  timer = window.setTimeout(refresh, waiting ? 1500 : 15000);
}

async function act(body) {
  complain("");
  let isDone = true;
  try {
    await post("notifications", body);
  } catch (error) {
    complain(error.message);
    isDone = false;
  }
  await refresh();
  return isDone;
}

list.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-do]");
  if (!button) { return; }
  button.disabled = true;
  await act({ do: button.dataset.do, id: button.dataset.id });
  button.disabled = false;
});
list.addEventListener("change", (event) => {
  const { id } = event.target.dataset;
  const boxes = list.querySelectorAll(`input[data-id="${CSS.escape(id)}"]:checked`);
  act({ do: "change", id, kinds: Array.from(boxes, (box) => box.dataset.kind) });
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("[type=submit]");
  const data = new FormData(form);
  button.disabled = true;
  const isDone = await act({
    do: "add",
    destination: { url: data.get("url").trim(), name: data.get("name").trim(), kinds: data.getAll("kinds") },
  });
  button.disabled = false;
  if (isDone) { form.reset(); } else { problem.scrollIntoView({ block: "center" }); }
});
showTimes(list);
refresh();
