      // Times come in the server's time zone and are shown in the user's.
      function showLocalTimes(element) {
        element.querySelectorAll("time").forEach(function (time) {
          var when = new Date(time.dateTime);
          var today = when.toDateString() === new Date().toDateString();
          var options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
          if (!today) { options.day = "numeric"; options.month = "short"; }
          var text = when.toLocaleString(undefined, options);
          if (time.textContent !== text) { time.textContent = text; }
          time.title = when.toLocaleString();
        });
      }
