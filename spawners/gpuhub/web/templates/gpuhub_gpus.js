(function () {
  "use strict";
  var root = document.querySelector(".gpuhub-page");
  if (!root) { return; }
  var url = root.dataset.gpuhubUrl;
  var filter = document.getElementById("gpuhub-filter");
  var dialog = document.getElementById("gpuhub-dialog");
  var query = new URLSearchParams(window.location.search);
  var last = {};
  var failures = 0;
  var requests = 0;
  var open = {};        // unfolded details: key → true
  var reasons = {};     // lease → HTML
  var onConfirm = null; // action of the dialog's button

  // Times come in the server's time zone and are shown in the user's.
  function localTimes(element) {
    element.querySelectorAll("time").forEach(function (time) {
      var when = new Date(time.dateTime);
      var today = when.toDateString() === new Date().toDateString();
      var options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
      if (!today) { options.day = "numeric"; options.month = "short"; }
      time.textContent = when.toLocaleString(undefined, options);
      time.title = when.toLocaleString();
    });
  }

  function keyOf(details) { return details.dataset.why || details.dataset.open; }

  function fill(details) {
    var body = details.querySelector(".gpuhub-why");
    if (body && reasons[keyOf(details)]) { body.innerHTML = reasons[keyOf(details)]; localTimes(body); }
  }

  // A part is replaced as a whole, and unfolded details and the focus are restored.
  function replace(element, html) {
    var focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    element.innerHTML = html;
    localTimes(element);
    element.querySelectorAll("details").forEach(function (details) {
      if (open[keyOf(details)]) { details.open = true; fill(details); }
    });
    var again = focused && element.querySelector('[data-key="' + CSS.escape(focused) + '"]');
    if (again) { again.focus(); }
  }

  function show(parts) {
    Object.keys(parts).forEach(function (name) {
      var element = root.querySelector('[data-gpuhub-part="' + CSS.escape(name) + '"]');
      if (!element || last[name] === parts[name]) { return; }
      last[name] = parts[name];
      replace(element, parts[name]);
    });
  }

  function get(path) {
    return fetch(url + path, { headers: { Accept: "application/json" }, credentials: "same-origin" })
      .then(function (response) {
        if (response.status === 403) { window.location.reload(); }
        return response.json().then(function (answer) {
          if (!response.ok) { throw new Error(answer.message || "status " + response.status); }
          return answer;
        });
      });
  }

  function refresh() {
    if (document.hidden) { return; }
    var number = ++requests;
    get("gpus?" + query.toString())
      .then(function (answer) {
        if (number !== requests) { return; }  // there is a later request
        failures = 0;
        root.classList.remove("gpuhub-stale");
        show(answer.parts);
      })
      .catch(function () { failures += 1; root.classList.toggle("gpuhub-stale", failures > 2); });
  }

  function want(name, value) {
    if (value) { query.set(name, value); } else { query.delete(name); }
    if (name !== "page") { query.delete("page"); }
    var text = query.toString();
    window.history.replaceState(null, "", window.location.pathname + (text ? "?" + text : ""));
    refresh();
  }

  function loadReason(lease) {
    get("why?lease=" + encodeURIComponent(lease))
      .then(function (answer) { reasons[lease] = answer.html; })
      .catch(function (error) {
        var text = document.createElement("p");
        text.textContent = error.message;
        reasons[lease] = text.outerHTML;
      })
      .then(function () {
        var details = root.querySelector('details[data-why="' + CSS.escape(lease) + '"]');
        if (details) { fill(details); }
      });
  }

  // -- the dialog ----------------------------------------------------------------------------------------------------

  function paragraph(text) {
    var element = document.createElement("p");
    element.textContent = text;
    return element;
  }

  function field(label, input) {
    var element = document.createElement("label");
    element.append(label, input);
    return element;
  }

  function select(choices, chosen) {
    var element = document.createElement("select");
    element.className = "form-select";
    choices.forEach(function (choice) { element.add(new Option(choice[1], choice[0], false, choice[0] === chosen)); });
    return element;
  }

  function reasonInput() {
    var element = document.createElement("input");
    element.className = "form-control";
    element.maxLength = 300;
    element.placeholder = "shown to users";
    return element;
  }

  function refuse(text) {
    var box = document.getElementById("gpuhub-dialog-refusal");
    box.textContent = text;
    box.hidden = !text;
  }

  function ask(title, parts, doText, isDangerous, build) {
    var button = document.getElementById("gpuhub-dialog-do");
    document.getElementById("gpuhub-dialog-title").textContent = title;
    document.getElementById("gpuhub-dialog-body").replaceChildren.apply(
      document.getElementById("gpuhub-dialog-body"), parts);
    button.textContent = doText;
    button.className = "btn " + (isDangerous ? "btn-danger" : "btn-jupyter");
    button.disabled = false;
    refuse("");
    onConfirm = function () {
      button.disabled = true;
      post("act", build())
        .then(function () { dialog.close(); refresh(); })
        .catch(function (error) { refuse(error.message); })
        .then(function () { button.disabled = false; });
    };
    dialog.showModal();
  }

  function post(path, body) {
    return fetch(url + path + "?_xsrf=" + encodeURIComponent(window.jhdata.xsrf_token), {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    }).then(function (response) {
      if (response.ok) { return; }
      return response.json()
        .catch(function () { return {}; })
        .then(function (answer) { throw new Error(answer.message || "The request failed: reload the page."); });
    });
  }

  var dialogs = {
    extend: function (data) {
      var hours = select([["1", "1 hour"], ["2", "2 hours"], ["4", "4 hours"], ["8", "8 hours"], ["12", "12 hours"],
        ["24", "24 hours"]], "4");
      ask("Extend", [paragraph("Time from now until your " + data.what + " ends:"), field("", hours)], "Extend",
        false, function () { return { do: "extend", lease: data.lease, hours: Number(hours.value) }; });
    },
    cordon: function (data) {
      var reason = reasonInput();
      ask("Cordon " + data.node, [
        paragraph("It takes no new work. Leases there continue."), field("Reason", reason),
      ], "Cordon", false, function () { return { do: "cordon", node: data.node, reason: reason.value }; });
    },
    undrain: function (data) {
      ask("Uncordon " + data.node, [paragraph("It takes work again, and leases that a drain has not ended yet get their time back.")],
        "Uncordon", false, function () { return { do: "undrain", node: data.node }; });
    },
    drain: function (data) {
      var reason = reasonInput();
      var grace = select([["0", "at once"], ["600", "in 10 minutes"], ["1800", "in 30 minutes"], ["7200", "in 2 hours"],
        ["28800", "in 8 hours"], ["86400", "in a day"]], "1800");
      get("runs?node=" + encodeURIComponent(data.node)).then(function (answer) {
        var runs = document.createElement("div");
        runs.innerHTML = answer.html;
        localTimes(runs);
        ask("Drain " + data.node, [
          runs, paragraph("It takes no new work, and leases there end:"), field("", grace), field("Reason", reason),
        ], "Drain " + data.node, true, function () {
          return { do: "drain", node: data.node, grace_s: Number(grace.value), reason: reason.value };
        });
      }).catch(function (error) { window.alert(error.message); });
    },
    force: function (data) {
      ask("Force the end of " + data.what + "?", [
        paragraph("It is not proven that its containers are gone. After forcing, other users get its GPUs at once: if a "
          + "container still runs, two users share a GPU without knowing, and may damage each other's work."),
        paragraph("Force it only when you have checked that the machine is off or the container is gone."),
      ], "Force", true, function () { return { do: "force", lease: data.lease }; });
    },
    leave: function (data) {
      post("leave", { lease: data.lease }).then(refresh).catch(function (error) { window.alert(error.message); });
    },
  };

  // -- events ---------------------------------------------------------------------------------------------------------

  root.addEventListener("click", function (event) {
    var button = event.target.closest("button");
    if (!button) { return; }
    if (button.dataset.page) { want("page", button.dataset.page); }
    if (button.dataset.do) { dialogs[button.dataset.do](button.dataset); }
  });
  dialog.querySelector("form").addEventListener("submit", function (event) { event.preventDefault(); onConfirm(); });
  document.getElementById("gpuhub-dialog-cancel").addEventListener("click", function () { dialog.close(); });
  // `toggle` does not bubble.
  root.addEventListener("toggle", function (event) {
    var key = keyOf(event.target);
    if (!key) { return; }
    if (!event.target.open) { delete open[key]; return; }
    if (!open[key] && event.target.dataset.why) { loadReason(key); }
    open[key] = true;
  }, true);
  if (filter) {
    filter.addEventListener("submit", function (event) { event.preventDefault(); });
    filter.addEventListener("input", function (event) { want(event.target.name, event.target.value); });
  }
  document.addEventListener("visibilitychange", refresh);
  localTimes(root);
  window.setInterval(refresh, 3000);
  window.setInterval(function () { Object.keys(open).forEach(function (key) { if (reasons[key]) { loadReason(key); } }); }, 15000);
})();
