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

/** A notebook whose GPU memory is in host memory, or on its way. */
export interface Suspension {
  state: "suspending" | "suspended" | "resuming" | "restoring";
  text: string;
}

export interface Notebook {
  gpus: LeasedGpu[];
  suspension: Suspension | null;
  may_suspend: boolean | null;
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
  suspension?: Suspension | null;
}

export interface NotebookShare {
  viewer: string;
  /** Below the hub's address. */
  path: string;
}

export interface Parameter {
  name: string;
  type: "text" | "integer" | "number" | "choice" | "flag" | "path" | "model";
  help: string;
  /** null where the user must give a value. */
  default: string | null;
  least: number | null;
  most: number | null;
  choices: string[];
}

export interface Recipe {
  name: string;
  origin: string;
  description: string;
  single_gpu: boolean;
  /** Whether some of its steps can be measured before it runs. */
  predicts: boolean;
  parameters: Parameter[];
}

/** A recipe's file with a mistake. */
export interface BrokenRecipe {
  name: string;
  origin: string;
  error: string;
}

export interface RecipeList {
  recipes: (Recipe | BrokenRecipe)[];
  profiles: { name: string; title: string }[];
}

export interface RecipeRequest {
  values: Record<string, string>;
  /** null for the recipe's own number. */
  gpus: number | null;
  /** Empty for any. */
  model: string;
  /** Empty for the default. */
  profile: string;
}

/** A job that is a recipe, with what it has written. */
export interface RecipeRun {
  run_id: string;
  recipe: string;
  parameters: Record<string, string>;
  is_prediction: boolean;
  /** Below the server's root folder; null if it lies elsewhere. */
  folder: string | null;
  /** When the chart was written last, seconds since 1970; null before that. */
  chart_at: number | null;
  result: Record<string, unknown> | null;
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

  /** Lend the notebook's GPU, or ask for it again. */
  async suspend(isWanted: boolean): Promise<void> {
    await this.request("suspension", isWanted ? "POST" : "DELETE");
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

  getRecipes(): Promise<RecipeList> {
    return this.request("recipes");
  }

  /** Return what a job of the recipe would ask for and run. */
  async checkRecipe(name: string, request: RecipeRequest): Promise<string> {
    return (await this.sendRecipe<{ text: string }>(name, "check", request)).text;
  }

  /** Start a job of the recipe, or measure some of its steps on one card; return its run id. */
  async startRecipe(name: string, what: "start" | "predict", request: RecipeRequest): Promise<string> {
    return (await this.sendRecipe<{ run_id: string }>(name, what, request)).run_id;
  }

  async getRecipeRuns(): Promise<RecipeRun[]> {
    return (await this.request<{ runs: RecipeRun[] }>("recipe-runs")).runs;
  }

  /** Return the address of a file below the server's root folder, of which the browser keeps one version. */
  buildFileUrl(path: string, version: number): string {
    return `${URLExt.join(this.settings.baseUrl, "files", URLExt.encodeParts(path))}?version=${version}`;
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

  private sendRecipe<T>(name: string, what: string, request: RecipeRequest): Promise<T> {
    return this.request(`recipes/${encodeURIComponent(name)}`, "POST", { do: what, ...request });
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
