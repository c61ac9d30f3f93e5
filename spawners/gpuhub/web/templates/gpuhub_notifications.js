(function () {
  "use strict";
  var root = document.getElementById("gpuhub-notifications");
  var list = document.getElementById("gpuhub-list");
  var problem = document.getElementById("gpuhub-problem");
  var form = document.getElementById("gpuhub-add");
  var shown = "";
  var timer = 0;

  // Times come in the server's time zone and are shown in the user's.
  function localTimes() {
    list.querySelectorAll("time").forEach(function (time) {
      time.textContent = new Date(time.dateTime).toLocaleString(undefined,
        { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    });
  }

  function complain(text) {
    problem.textContent = text;
    problem.hidden = !text;
  }

  function send(method, body) {
    return fetch(root.dataset.url + (body ? "?_xsrf=" + encodeURIComponent(window.jhdata.xsrf_token) : ""), {
      method: method,
      credentials: "same-origin",
      headers: { Accept: "application/json", "Content-Type": "application/json" },
      body: body && JSON.stringify(body),
    }).then(function (response) {
      if (response.status === 204) { return {}; }
      return response.json().catch(function () { return {}; }).then(function (answer) {
        if (!response.ok) { throw new Error(answer.message || "The request failed: reload the page."); }
        return answer;
      });
    });
  }

  // While something is being sent, its result is awaited.
  function refresh() {
    window.clearTimeout(timer);
    return send("GET").then(function (answer) {
      if (answer.html !== shown) {
        var focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
        list.innerHTML = shown = answer.html;
        localTimes();
        var again = focused && list.querySelector('[data-key="' + CSS.escape(focused) + '"]');
        if (again) { again.focus(); }
      }
      timer = window.setTimeout(refresh, answer.waiting ? 1500 : 15000);
    }, function () { timer = window.setTimeout(refresh, 15000); });
  }

  function act(body) {
    complain("");
    return send("POST", body).then(function () { return refresh().then(function () { return true; }); }, function (error) {
      complain(error.message);
      return refresh().then(function () { return false; });
    });
  }

  list.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-do]");
    if (!button) { return; }
    button.disabled = true;
    act({ do: button.dataset.do, id: button.dataset.id }).then(function () { button.disabled = false; });
  });
  list.addEventListener("change", function (event) {
    var id = event.target.dataset.id;
    var boxes = list.querySelectorAll('input[data-id="' + CSS.escape(id) + '"]:checked');
    act({ do: "change", id: id, kinds: Array.from(boxes, function (box) { return box.dataset.kind; }) });
  });
  form.addEventListener("submit", function (event) {
    event.preventDefault();
    var button = form.querySelector("[type=submit]");
    var data = new FormData(form);
    button.disabled = true;
    act({ do: "add", destination: { url: data.get("url").trim(), name: data.get("name").trim(), kinds: data.getAll("kinds") } })
      .then(function (isDone) {
        button.disabled = false;
        if (isDone) { form.reset(); } else { problem.scrollIntoView({ block: "center" }); }
      });
  });
  localTimes();
  refresh();
})();
