// The user's jobs that are recipes: state, curve, result and output.
import * as React from "react";

import type { Job, RecipeRun } from "./api.js";
import type { OverviewModel } from "./model.js";
import { JobOutput, cancelJob, describeJob } from "./panel.js";

const CHART = "loss.png";

export function RecipeRuns(props: {
  model: OverviewModel;
  openFolder: (path: string) => void;
}): React.ReactElement {
  const { model, openFolder } = props;
  const [runs, setRuns] = React.useState<RecipeRun[]>([]);
  const [problem, setProblem] = React.useState("");
  React.useEffect(() => {
    let isGone = false;
    const read = async (): Promise<void> => {
      try {
        const found = await model.api.getRecipeRuns();
        if (isGone) return;
        setRuns(found);
        setProblem("");
      } catch (error) {
        if (!isGone) setProblem((error as Error).message);
      }
    };
    const update = (): void => void read();
    update();
    model.changed.connect(update);
    return () => {
      isGone = true;
      model.changed.disconnect(update);
    };
  }, [model]);
  const jobs = new Map(model.overview?.jobs.map((job) => [job.run_id, job]));
  return (
    <section aria-label="Jobs of recipes">
      <h2>
        Your jobs <span className="gpuhub-note">{runs.length ? "" : "none yet"}</span>
      </h2>
      <div role="status" className="gpuhub-problem">
        {problem}
      </div>
      <ul className="gpuhub-list">
        {runs.map((run) => (
          <Run key={run.run_id} run={run} job={jobs.get(run.run_id)} model={model} openFolder={openFolder} />
        ))}
      </ul>
    </section>
  );
}

function Run(props: {
  run: RecipeRun;
  job: Job | undefined;
  model: OverviewModel;
  openFolder: (path: string) => void;
}): React.ReactElement {
  const { run, job, model, openFolder } = props;
  const [isOpen, setOpen] = React.useState(false);
  const { folder, recipe, run_id: id } = run;
  const name = run.is_prediction ? `${recipe}: prediction` : recipe;
  const given = Object.entries(run.parameters).filter(([, value]) => value !== "");
  const canCancel = job !== undefined && job.state !== "ended" && job.state !== "stopping";
  return (
    <li className="gpuhub-job" aria-label={`${name}, ${id}`}>
      <div className="gpuhub-row">
        <span>
          <strong>{name}</strong>{" "}
          <span className={job?.state === "ended" && job.exit_code ? "gpuhub-bad" : "gpuhub-note"}>
            {job ? describeJob(job) : ""}
          </span>
        </span>
        <span className="gpuhub-row">
          {job && (
            <button type="button" className="jp-mod-styled" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
              Output
            </button>
          )}
          {folder !== null && (
            <button type="button" className="jp-mod-styled" onClick={() => openFolder(folder)}>
              Open Folder
            </button>
          )}
          {canCancel && (
            <button type="button" className="jp-mod-styled" onClick={() => void cancelJob(job, name, model)}>
              Cancel
            </button>
          )}
        </span>
      </div>
      <details>
        <summary className="gpuhub-note">
          {id}, {given.length} parameters
        </summary>
        <Facts facts={given} />
      </details>
      {isOpen && job && <JobOutput job={job} name={name} model={model} />}
      <div className="gpuhub-columns">
        {folder !== null && run.chart_at !== null && (
          <img src={model.api.buildFileUrl(`${folder}/${CHART}`, run.chart_at)} alt={`Loss of ${name} by step`} />
        )}
        {run.result && <Facts facts={Object.entries(run.result).map(([key, value]) => [key, formatValue(value)])} />}
      </div>
    </li>
  );
}

function Facts({ facts }: { facts: readonly (readonly [name: string, value: string])[] }): React.ReactElement {
  return (
    <dl className="gpuhub-facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name.replaceAll("_", " ")}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function formatValue(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
  return typeof value === "string" ? value : JSON.stringify(value);
}
