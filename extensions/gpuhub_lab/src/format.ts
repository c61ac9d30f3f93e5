// Numbers and times for people.
import type { LeasedGpu } from "./api.js";

const MIB_PER_GB = 1024;
/** Nobody takes a time of day for another day's if it is nearer than this, seconds. */
const CLEAR_S = 18 * 3600;

/** Format as `3 h 10`, `25 min`, `2 d 4 h`. */
export function formatSpan(seconds: number): string {
  const minutes = Math.max(0, Math.floor(seconds / 60));
  const hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours > 0) return `${hours} h ${String(minutes % 60).padStart(2, "0")}`;
  return `${minutes} min`;
}

/** How far the cluster's clock is ahead of this machine's, which may be wrong, ms. */
let ahead = 0;

export function setClusterTime(now: string): void {
  ahead = new Date(now).getTime() - Date.now();
}

export function countSecondsUntil(moment: string): number {
  return (new Date(moment).getTime() - Date.now() - ahead) / 1000;
}

/** Format as a time of day, with the date if that is not clear. */
export function formatClock(moment: string): string {
  const date = new Date(moment);
  const isClear = Math.abs(countSecondsUntil(moment)) < CLEAR_S;
  return date.toLocaleString([], isClear ? { timeStyle: "short" } : { dateStyle: "short", timeStyle: "short" });
}

export function formatMemory(usedMib: number | null | undefined, totalMib: number): string {
  const total = Math.round(totalMib / MIB_PER_GB);
  return usedMib === null || usedMib === undefined ? `${total} GB` : `${Math.round(usedMib / MIB_PER_GB)}/${total} GB`;
}

/** Format as `RTX 5090`, `2 × RTX 5090`, `RTX 5090, RTX 5070` or `1/4 RTX 5090`. */
export function formatModels(gpus: readonly LeasedGpu[]): string {
  const counts = new Map<string, number>();
  for (const gpu of gpus) {
    const name = gpu.share > 1 ? `1/${gpu.share} ${gpu.model}` : gpu.model;
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join(", ");
}

/** Add up, or return null if a part is not known. */
export function sumKnown(values: readonly (number | null)[]): number | null {
  return values.reduce<number | null>((sum, value) => (sum === null || value === null ? null : sum + value), 0);
}
