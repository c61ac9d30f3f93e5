// The overview that status bar and panel show, read again from time to time.
import { Poll } from "@lumino/polling";
import { type ISignal, Signal } from "@lumino/signaling";

import { type GpuhubApi, type Overview, RouteError } from "./api.js";
import { setClusterTime } from "./format.js";

/** Time between two readings, ms: for the status bar alone, and while a panel or page is visible. */
const STATUS_PERIOD = 60_000;
const PANEL_PERIOD = 10_000;
/** Longest time between two tries while the broker does not answer, ms. */
const LONGEST_PERIOD = 60_000;

export class OverviewModel {
  overview: Overview | undefined;
  /** Why the overview is old or missing; empty if it is current. */
  problem = "";

  private readonly changedSignal = new Signal<this, void>(this);
  private readonly poll: Poll;
  private readonly viewers = new Set<object>();

  constructor(readonly api: GpuhubApi) {
    this.poll = new Poll({
      name: "gpuhub:overview",
      auto: false,
      factory: () => this.read(),
      frequency: { interval: STATUS_PERIOD, backoff: true, max: LONGEST_PERIOD },
      // Nothing is read for a browser's tab that nobody sees.
      standby: "when-hidden",
    });
  }

  get changed(): ISignal<this, void> {
    return this.changedSignal;
  }

  start(): void {
    void this.poll.start();
  }

  /** Read again now. */
  async refresh(): Promise<void> {
    await this.poll.refresh();
    await this.poll.tick.catch(() => undefined);
  }

  /** Read often while a panel or page of the overview is visible. */
  setVisible(viewer: object, isVisible: boolean): void {
    if (isVisible) this.viewers.add(viewer);
    else this.viewers.delete(viewer);
    const isWatched = this.viewers.size > 0;
    this.poll.frequency = {
      interval: isWatched ? PANEL_PERIOD : STATUS_PERIOD,
      backoff: true,
      max: isWatched ? PANEL_PERIOD : LONGEST_PERIOD,
    };
    if (isVisible) void this.poll.refresh();
  }

  private async read(): Promise<void> {
    try {
      this.overview = await this.api.getOverview();
      if (this.overview.now) setClusterTime(this.overview.now);
      this.problem = "";
    } catch (error) {
      this.problem = error instanceof RouteError ? error.message : "The notebook server does not answer.";
      throw error;
    } finally {
      this.changedSignal.emit();
    }
  }
}
