// The page of recipes: which there are, a form with their parameters, and what their jobs have written.
import { ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette, MainAreaWidget, WidgetTracker } from "@jupyterlab/apputils";
import { FileDialog, IDefaultFileBrowser } from "@jupyterlab/filebrowser";
import { ILauncher } from "@jupyterlab/launcher";
import { type LabIcon, ReactWidget } from "@jupyterlab/ui-components";
import type { Message } from "@lumino/messaging";
import * as React from "react";

import type { BrokenRecipe, Parameter, Recipe, RecipeList, RecipeRequest } from "./api.js";
import type { OverviewModel } from "./model.js";
import { RecipeRuns } from "./recipe_runs.js";

export const RECIPES = "gpuhub:recipes";
const PAGE_ID = "gpuhub-recipes";
const MAX_VALUE = 4096;

interface PageContext {
  model: OverviewModel;
  /** Let the user choose a file or folder; null if none was chosen. */
  choosePath: (isModel: boolean) => Promise<string | null>;
  openFolder: (path: string) => void;
}

class RecipesPage extends ReactWidget {
  constructor(
    private readonly context: PageContext,
    icon: LabIcon,
  ) {
    super();
    this.id = PAGE_ID;
    this.addClass("gpuhub-recipes");
    Object.assign(this.title, { icon, label: "Recipes", caption: "Ready-made jobs with parameters", closable: true });
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.context.model.setVisible(this, true);
  }

  protected onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.context.model.setVisible(this, false);
  }

  dispose(): void {
    this.context.model.setVisible(this, false);
    super.dispose();
  }

  render(): React.ReactElement {
    return <Page {...this.context} />;
  }
}

function Page(context: PageContext): React.ReactElement {
  const { model, openFolder } = context;
  const [list, setList] = React.useState<RecipeList | null>(null);
  const [problem, setProblem] = React.useState("");
  const [chosen, setChosen] = React.useState("");
  const read = async (): Promise<void> => {
    setProblem("");
    try {
      setList(await model.api.getRecipes());
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  React.useEffect(() => void read(), []);
  const recipes = list?.recipes ?? [];
  const recipe = recipes.find(({ name }) => name === chosen) ?? recipes[0];
  return (
    <>
      <h1>Recipes</h1>
      <p className="gpuhub-note">
        Ready-made jobs. They continue when you close this page, and all that they write is in your home.
      </p>
      <div role="status" className="gpuhub-problem">
        {problem}
        {!problem && !list && <span className="gpuhub-note">Reading the recipes …</span>}
      </div>
      {problem && (
        <button type="button" className="jp-mod-styled" onClick={() => void read()}>
          Try Again
        </button>
      )}
      {list && recipe && (
        <div className="gpuhub-columns">
          <nav aria-label="Recipes">
            <ul className="gpuhub-list">
              {recipes.map(({ name, origin }) => (
                <li key={name}>
                  <button
                    type="button"
                    aria-current={name === recipe.name ? "page" : undefined}
                    onClick={() => setChosen(name)}
                  >
                    {name}
                    {origin === "lab" && <span className="gpuhub-note"> of your lab</span>}
                  </button>
                </li>
              ))}
            </ul>
          </nav>
          {isBroken(recipe) ? (
            <p className="gpuhub-bad">{recipe.error}</p>
          ) : (
            <RecipeForm key={recipe.name} recipe={recipe} profiles={list.profiles} {...context} />
          )}
        </div>
      )}
      <RecipeRuns model={model} openFolder={openFolder} />
    </>
  );
}

function isBroken(recipe: Recipe | BrokenRecipe): recipe is BrokenRecipe {
  return "error" in recipe;
}

function RecipeForm(
  props: PageContext & { recipe: Recipe; profiles: RecipeList["profiles"] },
): React.ReactElement {
  const { recipe, profiles, model, choosePath } = props;
  const [values, setValues] = React.useState<Record<string, string>>({});
  const [gpus, setGpus] = React.useState("");
  const [gpuModel, setGpuModel] = React.useState("");
  const [profile, setProfile] = React.useState("");
  const [isBusy, setBusy] = React.useState(false);
  const [answer, setAnswer] = React.useState({ text: "", isError: false });
  const shown = React.useRef<HTMLPreElement>(null);
  React.useEffect(() => {
    if (answer.text) shown.current?.scrollIntoView({ block: "nearest" });
  }, [answer]);
  const cards = model.overview?.nodes.flatMap((node) => node.gpus) ?? [];
  const models = [...new Set(cards.map((gpu) => gpu.model))].sort();

  const send = async (what: "check" | "predict" | "start"): Promise<void> => {
    const request: RecipeRequest = { values, gpus: gpus ? Number(gpus) : null, model: gpuModel, profile };
    setBusy(true);
    setAnswer({ text: "", isError: false });
    try {
      if (what === "check") setAnswer({ text: await model.api.checkRecipe(recipe.name, request), isError: false });
      else {
        const run = await model.api.startRecipe(recipe.name, what, request);
        setAnswer({ text: `${what === "start" ? "The job" : "The measurement"} is ${run}; see below.`, isError: false });
        await model.refresh();
      }
    } catch (error) {
      setAnswer({ text: (error as Error).message, isError: true });
    } finally {
      setBusy(false);
    }
  };
  const submit = (event: React.FormEvent<HTMLFormElement>): void => {
    event.preventDefault();
    const button = (event.nativeEvent as SubmitEvent).submitter as HTMLButtonElement | null;
    void send((button?.value ?? "start") as "check" | "predict" | "start");
  };

  return (
    <form className="gpuhub-form" aria-label={`Recipe ${recipe.name}`} onSubmit={submit}>
      <p>{recipe.description}</p>
      {recipe.parameters.map((parameter) => (
        <ParameterField
          key={parameter.name}
          parameter={parameter}
          value={values[parameter.name] ?? parameter.default ?? ""}
          choosePath={choosePath}
          onChange={(value) => setValues({ ...values, [parameter.name]: value })}
        />
      ))}
      <div className="gpuhub-numbers">
        {!recipe.single_gpu && (
          <label>
            GPUs in all
            <input
              type="number"
              className="jp-mod-styled"
              min={1}
              max={cards.length || undefined}
              placeholder="1"
              value={gpus}
              onChange={(event) => setGpus(event.target.value)}
            />
          </label>
        )}
        <Select label="GPU model" first="any" value={gpuModel} options={models.map((name) => [name, name])} onChange={setGpuModel} />
        <Select
          label="Image of the profile"
          first="the default"
          value={profile}
          options={profiles.map(({ name, title }) => [name, title || name])}
          onChange={setProfile}
        />
      </div>
      <div className="gpuhub-row gpuhub-actions">
        <button type="submit" className="jp-mod-styled jp-mod-accept" value="start" disabled={isBusy}>
          Start
        </button>
        <button type="submit" className="jp-mod-styled" value="check" disabled={isBusy}>
          Check Only
        </button>
        {recipe.predicts && (
          <button
            type="submit"
            className="jp-mod-styled"
            value="predict"
            disabled={isBusy}
            title="Runs some steps on one GPU and says how long a step takes on more of them"
          >
            Predict
          </button>
        )}
      </div>
      <pre ref={shown} role="status" className={answer.isError ? "gpuhub-bad" : undefined}>
        {isBusy ? "…" : answer.text}
      </pre>
    </form>
  );
}

function ParameterField(props: {
  parameter: Parameter;
  value: string;
  choosePath: PageContext["choosePath"];
  onChange: (value: string) => void;
}): React.ReactElement {
  const { parameter, value, choosePath, onChange } = props;
  const { name, type, help, least, most, choices } = parameter;
  const id = React.useId();
  const shared = { id, className: "jp-mod-styled", value, "aria-describedby": help ? `${id}-help` : undefined };
  const isPath = type === "path" || type === "model";
  const browse = async (): Promise<void> => {
    const path = await choosePath(type === "model");
    if (path !== null) onChange(path);
  };
  const options = type === "flag" ? ["false", "true"] : choices;
  return (
    <div className="gpuhub-parameter">
      <label htmlFor={id}>{name.replaceAll("_", " ")}</label>
      {type === "choice" || type === "flag" ? (
        <select {...shared} onChange={(event) => onChange(event.target.value)}>
          {parameter.default === null && <option value="">choose</option>}
          {options.map((option) => (
            <option key={option}>{option}</option>
          ))}
        </select>
      ) : (
        <span className="gpuhub-row">
          <input
            {...shared}
            type={type === "integer" || type === "number" ? "number" : "text"}
            min={least ?? undefined}
            max={most ?? undefined}
            step={type === "integer" ? 1 : "any"}
            maxLength={MAX_VALUE}
            spellCheck={false}
            required={parameter.default === null}
            placeholder={type === "model" ? "a folder, or a shared model such as Qwen/Qwen3-8B" : undefined}
            onChange={(event) => onChange(event.target.value)}
          />
          {isPath && (
            <button type="button" className="jp-mod-styled" aria-label={`Choose ${name}`} onClick={() => void browse()}>
              Choose…
            </button>
          )}
        </span>
      )}
      {help && (
        <span id={`${id}-help`} className="gpuhub-note">
          {help}
        </span>
      )}
    </div>
  );
}

function Select(props: {
  label: string;
  first: string;
  value: string;
  options: (readonly [value: string, text: string])[];
  onChange: (value: string) => void;
}): React.ReactElement {
  return (
    <label>
      {props.label}
      <select className="jp-mod-styled" value={props.value} onChange={(event) => props.onChange(event.target.value)}>
        <option value="">{props.first}</option>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function buildRecipesPlugin(
  getModel: (app: JupyterFrontEnd) => OverviewModel,
  icon: LabIcon,
  category: string,
): JupyterFrontEndPlugin<void> {
  return {
    id: "gpuhub-lab:recipes",
    autoStart: true,
    optional: [ILauncher, ICommandPalette, ILayoutRestorer, IDefaultFileBrowser],
    activate: (
      app,
      launcher: ILauncher | null,
      palette: ICommandPalette | null,
      restorer: ILayoutRestorer | null,
      browser: IDefaultFileBrowser | null,
    ) => {
      const model = getModel(app);
      const tracker = new WidgetTracker<MainAreaWidget<RecipesPage>>({ namespace: PAGE_ID });
      const choosePath = async (isModel: boolean): Promise<string | null> => {
        if (!browser) return null;
        const options = { manager: browser.model.manager, title: isModel ? "A model's folder" : "A file or folder" };
        const dialog = isModel ? FileDialog.getExistingDirectory(options) : FileDialog.getOpenFiles(options);
        const [first] = (await dialog).value ?? [];
        return first ? `~/${first.path}`.replace(/^~\/$/, "~") : null;
      };
      const openFolder = (path: string): void => {
        void app.commands.execute("filebrowser:go-to-path", { path });
        if (browser) app.shell.activateById(browser.id);
      };
      app.commands.addCommand(RECIPES, {
        label: (args) => (args["isLauncher"] ? "Recipes" : "Recipes…"),
        caption: "Fine-tune, evaluate, serve: ready-made jobs with parameters",
        icon: (args) => (args["isPalette"] ? undefined : icon),
        execute: async () => {
          if (!tracker.currentWidget) {
            const page = new RecipesPage({ model, choosePath, openFolder }, icon);
            const widget = new MainAreaWidget({ content: page });
            widget.id = `${PAGE_ID}-tab`;
            widget.title.icon = icon;
            await tracker.add(widget);
            app.shell.add(widget, "main");
          }
          app.shell.activateById(tracker.currentWidget!.id);
        },
      });
      void restorer?.restore(tracker, { command: RECIPES, name: () => PAGE_ID });
      launcher?.add({ command: RECIPES, category: "Other", rank: 2, args: { isLauncher: true } });
      palette?.addItem({ command: RECIPES, category, args: { isPalette: true } });
    },
  };
}
