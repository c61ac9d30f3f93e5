// The side panel: nodes with their GPUs, the queue, and the user's jobs.
import { ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Dialog, Notification, showDialog } from "@jupyterlab/apputils";
import { type LabIcon, ReactWidget } from "@jupyterlab/ui-components";
import type { Message } from "@lumino/messaging";
import * as React from "react";

import type { Gpu, Job, Node, Overview, QueueEntry } from "./api.js";
import { formatClock, formatMemory } from "./format.js";
import type { OverviewModel } from "./model.js";

export const OPEN_PANEL = "gpuhub:open-panel";
const PANEL_ID = "gpuhub-panel";
const NO_OUTPUT = "No output yet. A launch in a notebook shows its output there.";

class Panel extends ReactWidget {
  constructor(
    private readonly model: OverviewModel,
    private readonly app: JupyterFrontEnd,
    private readonly commands: readonly string[],
    icon: LabIcon,
  ) {
    super();
    this.id = PANEL_ID;
    this.addClass("gpuhub-panel");
    this.title.icon = icon;
    this.title.caption = "GPUs, queue and jobs";
    this.node.setAttribute("role", "region");
    this.node.setAttribute("aria-label", "GPUs, queue and jobs");
    model.changed.connect(() => this.update());
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.model.setVisible(this, true);
  }

  protected onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.model.setVisible(this, false);
  }

  render(): React.ReactElement {
    const { overview, problem } = this.model;
    return (
      <>
        <div role="status" className="gpuhub-problem">
          {problem && `${problem}${overview ? " What follows is from before." : ""}`}
        </div>
        {this.commands.map((command) => (
          <button
            key={command}
            type="button"
            className="gpuhub-launch"
            onClick={() => void this.app.commands.execute(command)}
          >
            {this.app.commands.label(command)}
          </button>
        ))}
        {overview && <Content overview={overview} model={this.model} />}
      </>
    );
  }
}

function Content({ overview, model }: { overview: Overview; model: OverviewModel }): React.ReactElement {
  const { nodes, queue, waiting, jobs } = overview;
  const gpus = nodes.flatMap((node) => node.gpus);
  const free = gpus.filter((gpu) => gpu.state === "free").length;
  return (
    <>
      <Section title="GPUs" note={`${free} of ${gpus.length} free`}>
        {nodes.map((node) => (
          <NodeItem key={node.name} node={node} />
        ))}
      </Section>
      <Section title="Queue" note={waiting ? `${waiting} waiting` : "empty"}>
        <ol className="gpuhub-list">
          {queue.map((entry) => (
            <QueueItem key={`${entry.position} ${entry.owner}`} entry={entry} />
          ))}
        </ol>
      </Section>
      <Section title="Your jobs" note={jobs.length ? "" : "none"}>
        <ul className="gpuhub-list">
          {jobs.map((job) => (
            <JobItem key={job.id} job={job} model={model} />
          ))}
        </ul>
      </Section>
    </>
  );
}

function Section({ title, note, children }: React.PropsWithChildren<{ title: string; note: string }>): React.ReactElement {
  const id = React.useId();
  return (
    <section aria-labelledby={id}>
      <h2 id={id}>
        {title} <span className="gpuhub-note">{note}</span>
      </h2>
      {children}
    </section>
  );
}

function NodeItem({ node }: { node: Node }): React.ReactElement {
  return (
    <div>
      <h3>
        {node.name}
        {node.state !== "up" && (
          <span className="gpuhub-bad" title={node.message ?? undefined}>
            {" "}
            {node.state}
          </span>
        )}
      </h3>
      <ul className="gpuhub-list">
        {node.gpus.map((gpu, index) => (
          <li key={index} className="gpuhub-row">
            <span>
              {gpu.model} <span className="gpuhub-note">{formatMemory(gpu.memory_used_mib, gpu.memory_mib)}</span>
            </span>
            <GpuState gpu={gpu} />
          </li>
        ))}
        {!node.gpus.length && <li className="gpuhub-note">no GPU</li>}
      </ul>
    </div>
  );
}

function GpuState({ gpu }: { gpu: Gpu }): React.ReactElement {
  if (gpu.state === "free") return <span className="gpuhub-free">free</span>;
  if (!gpu.holders.length) {
    return (
      <span className="gpuhub-bad" title={gpu.message ?? undefined}>
        {gpu.state}
      </span>
    );
  }
  const isOwn = gpu.holders.some((holder) => holder.is_own);
  const texts = gpu.holders.map(({ owner, purpose, name, until, is_own }) => {
    const what = name || purpose;
    const end = until ? ` until ${formatClock(until)}` : "";
    return `${is_own ? "you" : owner}${what ? ` (${what})` : ""}${end}`;
  });
  return <span className={isOwn ? "gpuhub-own" : undefined}>{texts.join(", ")}</span>;
}

function QueueItem({ entry }: { entry: QueueEntry }): React.ReactElement {
  return (
    <li value={entry.position} className={entry.is_own ? "gpuhub-own" : undefined}>
      {entry.position}. {entry.is_own ? "you" : entry.owner}: {entry.wants}
      {entry.expected_start && <span className="gpuhub-note"> from about {formatClock(entry.expected_start)}</span>}
    </li>
  );
}

function JobItem({ job, model }: { job: Job; model: OverviewModel }): React.ReactElement {
  const [isOpen, setOpen] = React.useState(false);
  const name = job.name || job.run_id;
  const isEnded = job.state === "ended";
  return (
    <li className="gpuhub-job">
      <div className="gpuhub-row">
        <span title={job.run_id}>
          {name}{" "}
          <span className="gpuhub-note">
            {job.gpus} {job.gpus === 1 ? "GPU" : "GPUs"}
            {job.nodes.length > 0 && ` on ${job.nodes.join(", ")}`}
          </span>
        </span>
        <span>
          <button
            type="button"
            aria-expanded={isOpen}
            aria-label={`Output of ${name}, ${job.run_id}`}
            onClick={() => setOpen(!isOpen)}
          >
            Output
          </button>
          {!isEnded && job.state !== "stopping" && (
            <button
              type="button"
              aria-label={`Cancel ${name}, ${job.run_id}`}
              onClick={() => void cancelJob(job, name, model)}
            >
              Cancel
            </button>
          )}
        </span>
      </div>
      <div className={isEnded && job.exit_code ? "gpuhub-bad" : "gpuhub-note"}>{describeJob(job)}</div>
      {isOpen && <JobOutput job={job} name={name} model={model} />}
    </li>
  );
}

export function describeJob(job: Job): string {
  if (job.state === "ended") {
    const end = job.ended_at ? ` at ${formatClock(job.ended_at)}` : "";
    return `ended${end}${job.reason ? `: ${job.reason}` : ""}`;
  }
  if (job.position === null) return job.state;
  const start = job.expected_start ? `, from about ${formatClock(job.expected_start)}` : "";
  return `waits at position ${job.position}${start}${job.waiting_for ? `: ${job.waiting_for}` : ""}`;
}

/** The end of a job's output, read again whenever the overview is. */
export function JobOutput({ job, name, model }: { job: Job; name: string; model: OverviewModel }): React.ReactElement {
  const [text, setText] = React.useState("…");
  const element = React.useRef<HTMLPreElement>(null);
  React.useEffect(() => {
    let isGone = false;
    const read = async (): Promise<void> => {
      const output = await model.api.readLog(job.run_id).catch((error: Error) => error.message);
      if (!isGone) setText(output || NO_OUTPUT);
    };
    const update = (): void => void read();
    update();
    model.changed.connect(update);
    return () => {
      isGone = true;
      model.changed.disconnect(update);
    };
  }, [job.run_id, model]);
  React.useEffect(() => {
    element.current?.scrollTo({ top: element.current.scrollHeight });
  }, [text]);
  return (
    <pre ref={element} tabIndex={0} role="log" aria-label={`End of the output of ${name}`}>
      {text}
    </pre>
  );
}

export async function cancelJob(job: Job, name: string, model: OverviewModel): Promise<void> {
  const answer = await showDialog({
    title: "Cancel this job?",
    body: `${name} (${job.run_id}) ends, and its GPUs are free for others. Its files are kept.`,
    buttons: [Dialog.cancelButton({ label: "Keep It" }), Dialog.warnButton({ label: "Cancel the Job" })],
    defaultButton: 0,
  });
  if (!answer.button.accept) return;
  try {
    await model.api.cancelJob(job.id);
  } catch (error) {
    Notification.error(`The job is not cancelled: ${(error as Error).message}`, { autoClose: 15_000 });
  }
  await model.refresh();
}

export function buildPanelPlugin(
  getModel: (app: JupyterFrontEnd) => OverviewModel,
  commands: readonly string[],
  icon: LabIcon,
): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:panel",
    autoStart: true,
    optional: [ILayoutRestorer],
    activate: (app, restorer: ILayoutRestorer | null) => {
      const panel = new Panel(getModel(app), app, commands, icon);
      app.shell.add(panel, "left", { rank: 650 });
      restorer?.add(panel, PANEL_ID);
      app.commands.addCommand(OPEN_PANEL, {
        label: "Show GPUs, Queue and Jobs",
        icon,
        execute: () => app.shell.activateById(PANEL_ID),
      });
    },
  };
}
