      // True while the browser leaves this page. Some links lead nowhere, or back to this page, so it ends after a while.
      var isLeaving = false;
      window.addEventListener("beforeunload", function () {
        isLeaving = true;
        window.setTimeout(function () { isLeaving = false; }, 10000);
      });
      window.addEventListener("pageshow", function () { isLeaving = false; });
