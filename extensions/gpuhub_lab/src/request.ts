// The line of %gpu_launch for what the dialog asks.

export interface LaunchRequest {
  /** The path of a script; null for the active cell. */
  script: string | null;
  nodes: number;
  gpusPerNode: number;
  /** A GPU model; empty for any. */
  model: string;
  isDetached: boolean;
}

/** Return the line, or the first line of the cell. */
export function formatLine({ script, nodes, gpusPerNode, model, isDetached }: LaunchRequest): string {
  const words = [script === null ? "%%gpu_launch" : "%gpu_launch"];
  if (nodes > 1) words.push("--nnodes", String(nodes));
  if (gpusPerNode > 1) words.push("--nproc-per-node", String(gpusPerNode));
  if (model) words.push("--model", quote(model));
  if (isDetached) words.push("--detach");
  if (script !== null) words.push(quote(script));
  return words.join(" ");
}

/** Quote a word as a shell does; IPython's `$name` and `{name}` in single quotes would still be replaced. */
function quote(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
