// A stream of server-sent events that is open while the page is visible, and is opened again after a failure.
//
// A browser has few connections to one server, so pages in the background give theirs back. Each new connection begins
// with everything that there is to show, so nothing is missed.

const HIDDEN_MS = 10000;
const LONGEST_PAUSE_MS = 30000;
// The hub sends something every 15 seconds. After a longer silence the connection is dead, as after a laptop's sleep.
const SILENCE_MS = 45000;

export class LiveStream {
  // `handlers`: functions by event name. `onState(isLive)` is called when that changes. `onLost` after the hub refuses.
  constructor(makeUrl, { handlers, onState = () => {}, onLost = () => {} }) {
    this.makeUrl = makeUrl;
    this.handlers = handlers;
    this.onState = onState;
    this.onLost = onLost;
    this.source = null;
    this.failures = 0;
    this.timer = null;
    this.silenceTimer = null;
    this.isEnded = false;
    this.onVisibility = () => this.followVisibility();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.open();
  }

  open() {
    window.clearTimeout(this.timer);
    this.close();
    if (this.isEnded) { return; }
    const source = this.source = new EventSource(this.makeUrl());
    this.watchSilence();
    for (const [name, handle] of Object.entries({ heartbeat: () => {}, ...this.handlers })) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) { return; }
        this.failures = 0;
        this.watchSilence();
        this.onState(true);
        handle(JSON.parse(event.data));
      });
    }
    source.onerror = () => {
      if (source !== this.source) { return; }
      this.onState(false);
      // The browser itself connects again, unless the answer was an error.
      if (source.readyState === EventSource.CLOSED) { this.retry(); }
    };
  }

  watchSilence() {
    window.clearTimeout(this.silenceTimer);
    this.silenceTimer = window.setTimeout(() => { this.onState(false); this.open(); }, SILENCE_MS);
  }

  retry() {
    this.failures += 1;
    this.onLost(this.failures);
    const pause = Math.min(LONGEST_PAUSE_MS, 1000 * 2 ** this.failures) * (0.5 + Math.random() / 2);
    this.timer = window.setTimeout(() => this.open(), pause);
  }

  close() {
    window.clearTimeout(this.silenceTimer);
    if (this.source) { this.source.close(); }
    this.source = null;
  }

  end() {
    this.isEnded = true;
    window.clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.close();
  }

  followVisibility() {
    if (this.isEnded) { return; }
    window.clearTimeout(this.timer);
    if (document.hidden) {
      this.timer = window.setTimeout(() => this.close(), HIDDEN_MS);
    } else if (!this.source || this.source.readyState === EventSource.CLOSED) {
      this.open();
    }
  }
}
