      // Notices about the user's idle notebooks: a countdown with a button for each that will be stopped soon, and one
      // line about the last one that was stopped.
      (function () {
        "use strict";
        var root = document.getElementById("gpuhub-idle");
        var shown = "";
        var stopped;           // the last notebook that was stopped; undefined until the hub was asked, and after an end
        var warned = 0;
        var skew = 0;          // what the user's clock is ahead of the hub's, ms

        function countdown(end) {
          var left = Math.max(0, Math.round((new Date(end) - (Date.now() - skew)) / 1000));
          return left >= 3600 ? Math.floor(left / 3600) + " h " + Math.floor(left % 3600 / 60) + " min"
            : Math.floor(left / 60) + ":" + String(left % 60).padStart(2, "0") + " min";
        }

        function add(box, name, text, className) {
          var element = document.createElement(name);
          element.textContent = text;
          element.className = className || "";
          box.append(element);
          return element;
        }

        function show(answer) {
          if (answer.now) { skew = Date.now() - Date.parse(answer.now); }
          if ("stopped" in answer) { stopped = answer.stopped; }
          if (answer.warnings.length < warned) { stopped = undefined; }
          warned = answer.warnings.length;
          var now = JSON.stringify([answer.warnings, stopped]);
          if (now === shown) { return; }
          shown = now;
          root.replaceChildren();
          answer.warnings.forEach(function (warning) {
            var box = add(root, "div", "", "alert alert-warning d-flex flex-wrap flex-md-nowrap align-items-center gap-2");
            box.setAttribute("role", "status");
            var text = add(box, "span", warning.text + " It will be stopped in ", "flex-grow-1");
            add(text, "strong", countdown(warning.stops_at)).dataset.end = warning.stops_at;
            text.append(" unless a cell runs. Files are kept, variables are lost.");
            if (warning.keep) {
              add(box, "button", warning.keep, "btn btn-sm btn-jupyter text-nowrap").dataset.lease = warning.lease;
            }
          });
          if (stopped) {
            var line = add(root, "div", stopped.text, "alert alert-info");
            add(line, "span", " " + new Date(stopped.at).toLocaleString(undefined,
              { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }), "text-body-secondary");
          }
        }

        function refresh() {
          if (document.hidden) { return; }
          fetch(root.dataset.url + "idle" + (stopped === undefined ? "?stopped=1" : ""), { headers: { Accept: "application/json" }, credentials: "same-origin" })
            .then(function (response) { return response.ok ? response.json().then(show) : undefined; })
            .catch(function () { /* the hub is away: asked again */ });
        }

        function keep(button) {
          button.disabled = true;
          fetch(root.dataset.url + "act?_xsrf=" + encodeURIComponent(window.jhdata.xsrf_token), {
            method: "POST",
            credentials: "same-origin",
            headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ do: "keep", lease: button.dataset.lease }),
          }).then(function (response) {
            if (response.ok) { return; }
            return response.json().then(function (answer) { throw new Error(answer.message); });
          }).catch(function (error) {
            add(button.parentElement, "span", error.message, "w-100");
            button.remove();
          }).then(function () { window.setTimeout(refresh, 500); });
        }

        root.addEventListener("click", function (event) { if (event.target.dataset.lease) { keep(event.target); } });
        window.setInterval(function () {
          root.querySelectorAll("[data-end]").forEach(function (element) { element.textContent = countdown(element.dataset.end); });
        }, 1000);
        if (root.dataset.live) {
          // The page gets the warnings with its other changes; only what was stopped is asked for.
          document.addEventListener("gpuhub:warnings", function (event) {
            var isFewer = event.detail.length < warned;
            show({ warnings: event.detail });
            if (isFewer) { refresh(); }
          });
        } else {
          window.setInterval(refresh, 10000);
          document.addEventListener("visibilitychange", refresh);
        }
        refresh();
      })();
