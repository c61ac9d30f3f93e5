(function () {
  "use strict";
  var root = document.querySelector(".gpuhub");
  var form = root && root.closest("form");
  var last = {};
  var failures = 0;

  function nameButton() {
    // Looked up each time, because it comes after this script in the page.
    var button = form && form.querySelector("button[type=submit]");
    var chosen = root.querySelector("input[name=profile]:checked");
    var badge = chosen && chosen.closest(".gpuhub-card").querySelector("[data-starts]");
    if (button) { button.textContent = badge && badge.dataset.starts === "0" ? "Join the queue" : "Start"; }
  }

  // Who chooses an image of a profile wants that profile.
  function chooseProfile(event) {
    if (event.target.tagName === "SELECT") {
      event.target.closest(".gpuhub-card").querySelector("input[name=profile]").checked = true;
    }
    nameButton();
  }

  function show(parts) {
    Object.keys(parts).forEach(function (name) {
      if (last[name] === parts[name]) { return; }
      last[name] = parts[name];
      var element = root.querySelector('[data-gpuhub-part="' + CSS.escape(name) + '"]');
      if (element) { element.innerHTML = parts[name]; showLocalTimes(element); }
    });
    nameButton();
  }

  function stale(isStale) {
    root.querySelectorAll("[data-gpuhub-part]").forEach(function (element) {
      element.classList.toggle("gpuhub-stale", isStale);
    });
  }

  function refresh() {
    if (document.hidden) { return; }
    fetch(root.dataset.gpuhubUrl + "?parts=1", { headers: { Accept: "application/json" }, credentials: "same-origin" })
      .then(function (response) {
        if (response.status === 403) { window.location.reload(); }
        if (!response.ok) { throw new Error("status " + response.status); }
        return response.json();
      })
      .then(function (answer) { failures = 0; stale(false); show(answer.parts); })
      .catch(function () { failures += 1; stale(failures > 2); });
  }

  if (!root) { return; }
  showLocalTimes(root);
  nameButton();
  root.addEventListener("change", chooseProfile);
  document.addEventListener("DOMContentLoaded", nameButton);
  document.addEventListener("visibilitychange", refresh);
  window.setInterval(refresh, 3000);
})();
