// The notebook server's routes for this extension (gpu_launch/notebook_server), with the types of their answers.
import { URLExt } from "@jupyterlab/coreutils";
import { ServerConnection } from "@jupyterlab/services";

export interface LeasedGpu {
  model: string;
  node: string;
  /** Number of shares that the GPU is divided into, of which this is one; 1 for a whole GPU. */
  share: number;
  memory_mib: number;
  memory_used_mib: number | null;
  utilisation_percent: number | null;
}

export interface Notebook {
  gpus: LeasedGpu[];
  expires_at: string | null;
  granted_at: string | null;
}

export interface Holder {
  owner: string;
  purpose: string;
  name: string;
  until: string | null;
  is_own: boolean;
}

export interface Gpu {
  model: string;
  memory_mib: number;
  state: string;
  message: string | null;
  share: number | null;
  utilisation_percent: number | null;
  memory_used_mib: number | null;
  holders: Holder[];
}

export interface Node {
  name: string;
  state: string;
  message: string | null;
  gpus: Gpu[];
}

export interface QueueEntry {
  position: number;
  owner: string;
  wants: string;
  expected_start: string | null;
  is_own: boolean;
}

export interface Job {
  id: string;
  run_id: string;
  name: string;
  state: string;
  reason: string | null;
  created_at: string;
  ended_at: string | null;
  exit_code: number | null;
  gpus: number;
  nodes: string[];
  position: number | null;
  waiting_for: string | null;
  expected_start: string | null;
  expires_at: string | null;
}

export interface Overview {
  now: string | null;
  /** null for a notebook without a lease. */
  notebook: Notebook | null;
  nodes: Node[];
  queue: QueueEntry[];
  waiting: number;
  jobs: Job[];
}

export interface Idle {
  text: string;
  stops_at: string;
  is_warned: boolean;
  kept_until: string | null;
  keep_s: number;
}

export interface IdleAnswer {
  idle: Idle | null;
  /** What is wrong with the notebook's GPUs. */
  gpu_problems: string[];
}

export interface NotebookShare {
  viewer: string;
  /** Below the hub's address. */
  path: string;
}

export interface UserNotification {
  seq: number;
  kind: string;
  title: string;
  body: string;
}

/** An answer with an error: its message is for the user. */
export class RouteError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export class GpuhubApi {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  getOverview(): Promise<Overview> {
    return this.request("overview");
  }

  async extend(seconds: number): Promise<void> {
    await this.request("extend", "POST", { time_limit_s: seconds });
  }

  async cancelJob(id: string): Promise<void> {
    await this.request(`jobs/${encodeURIComponent(id)}`, "DELETE");
  }

  async readLog(run: string): Promise<string> {
    const { text } = await this.request<{ text: string }>(`runs/${encodeURIComponent(run)}/log`);
    return text;
  }

  /** Return the path of the hub's page that shows it. */
  shareNotebook(path: string, viewer: string, seconds: number): Promise<NotebookShare> {
    return this.request("shares", "POST", { path, viewer, for_s: seconds });
  }

  getIdle(): Promise<IdleAnswer> {
    return this.request("idle");
  }

  async keep(): Promise<Idle | null> {
    return (await this.request<IdleAnswer>("keep", "POST")).idle;
  }

  /** Those after a sequence number, oldest first. */
  async getNotifications(after: number): Promise<UserNotification[]> {
    const query = `?after=${after}`;
    return (await this.request<{ notifications: UserNotification[] }>("notifications", "GET", undefined, query)).notifications;
  }

  private async request<T>(path: string, method = "GET", body?: unknown, query = ""): Promise<T> {
    const init: RequestInit = { method };
    if (body !== undefined) init.body = JSON.stringify(body);
    const url = URLExt.join(this.settings.baseUrl, "gpuhub", path) + query;
    const response = await ServerConnection.makeRequest(url, init, this.settings);
    // A proxy in front of the server answers with a page where the server does not.
    const answer = (await response.json().catch(() => ({}))) as { message?: string };
    if (!response.ok) {
      throw new RouteError(answer.message || `The notebook server answered with HTTP status ${response.status}.`, response.status);
    }
    return answer as T;
  }
}
