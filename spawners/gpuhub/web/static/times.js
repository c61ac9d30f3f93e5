// Times come in the server's time zone and are shown in the user's; countdowns continue between updates.

let clockSkewMs = 0; // what the user's clock is ahead of the server's

export function setServerTime(text) {
  clockSkewMs = Date.now() - Date.parse(text);
}

export function countHoursUntil(text) {
  return (Date.parse(text) - (Date.now() - clockSkewMs)) / 3600000;
}

function describeMoment(when) {
  const isToday = when.toDateString() === new Date().toDateString();
  const day = isToday ? {} : { day: "numeric", month: "short" };
  return when.toLocaleString(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...day });
}

// Minutes suffice, except near the end.
function describeRemaining(when) {
  const seconds = Math.max(0, Math.round((when - (Date.now() - clockSkewMs)) / 1000));
  if (seconds < 600) { return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")} min left`; }
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min left` : `${Math.floor(minutes / 60)} h ${minutes % 60} min left`;
}

export function showTime(element) {
  const when = new Date(element.dateTime);
  const text = element.dataset.countdown ? describeRemaining(when) : describeMoment(when);
  if (element.textContent !== text) { element.textContent = text; }
  if (element.dataset.countdown) { element.classList.toggle("gpuhub-soon", when - Date.now() + clockSkewMs < 600000); }
  const title = when.toLocaleString();
  if (element.title !== title) { element.title = title; }
}

export function showTimes(root) {
  root.querySelectorAll("time").forEach(showTime);
}

export function keepCountdowns(root) {
  window.setInterval(() => root.querySelectorAll("time[data-countdown]").forEach(showTime), 1000);
}
