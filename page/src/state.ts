// What is being looked at: which plan, beside which other, which part of the time. Sections draw anew when it changes.

import type { Graph, Page, Plan } from "./data";

type Part = "plan" | "view" | "theme" | "at";

/** The bound, where it is a time of the run that the timeline shows. */
export function boundInTime(plan: Plan): number | null {
  return plan.objective === "latency" && plan.bound > 0 ? plan.bound : null;
}

/** In what two plans differ so that their times are not of one thing; in nothing where these can be compared. */
export function unlike(a: Plan, b: Plan): string[] {
  const found: string[] = [];
  if (a.graph !== b.graph) found.push("model");
  if (a.objective !== b.objective) found.push("objective");
  if (Object.keys(a.execution).some((key) => a.execution[key] !== b.execution[key])) found.push("execution");
  return found;
}

/** Why two such plans are not compared. */
export function whyNot(differ: string[]): string {
  return `another ${differ.join(" and ")}, so the times cannot be compared`;
}

export class State {
  shown = 0;
  beside: number | null = null;
  from = 0;
  to = 1;
  printing = false;
  at: number | null = null; // the time that is pointed at
  readonly differ: string[]; // in what the plans are unlike; then none is the best
  private listeners: [Part[], () => void][] = [];

  constructor(readonly page: Page) {
    const values = page.plans.map((plan) => plan.value);
    this.differ = [...new Set(page.plans.flatMap((plan) => unlike(page.plans[0], plan)))];
    this.shown = this.differ.length ? 0 : values.indexOf(Math.min(...values));
    if (page.plans.length > 1) this.beside = this.shown === 0 ? 1 : 0;
    this.to = this.end;
  }

  get plan(): Plan {
    return this.page.plans[this.shown];
  }

  get other(): Plan | null {
    return this.beside === null ? null : this.page.plans[this.beside];
  }

  /** The other plan, where its times are of the same thing: only then do both share an axis. */
  get rival(): Plan | null {
    return this.other && !unlike(this.plan, this.other).length ? this.other : null;
  }

  get graph(): Graph {
    return this.page.graphs[this.plan.graph];
  }

  /** Where the time axis ends: all that is drawn, and the bound. */
  get end(): number {
    const ends = [this.plan, this.rival].map((plan) => (plan ? Math.max(plan.makespan, boundInTime(plan) ?? 0) : 0));
    const last = Math.max(...ends);
    return last > 0 ? last * 1.01 : 1;
  }

  /** Items that are elsewhere in the other plan; null where the two place different graphs, or there is no other. */
  moved(): Uint8Array | null {
    const { plan, other } = this;
    if (!other || other.graph !== plan.graph) return null;
    const names = plan.devices.map((device) => device.name);
    const others = other.devices.map((device) => device.name);
    return plan.device.length ? Uint8Array.from(plan.device, (d, i) => Number(names[d] !== others[other.device[i]])) : new Uint8Array();
  }

  show(shown: number, beside: number | null): void {
    const wasWhole = this.from === 0 && this.to === this.end;
    this.shown = shown;
    this.beside = beside === shown ? null : beside;
    if (wasWhole || this.to > this.end) (this.from = 0), (this.to = this.end);
    this.tell("plan");
  }

  look(from: number, to: number): void {
    const width = Math.min(Math.max(to - from, this.end * 1e-7), this.end);
    this.from = Math.min(Math.max(0, from), this.end - width);
    this.to = this.from + width;
    this.tell("view");
  }

  point(at: number | null): void {
    if (at === this.at) return;
    this.at = at;
    this.tell("at");
  }

  zoom(factor: number, around: number): void {
    this.look(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  on(parts: Part[], listener: () => void): void {
    this.listeners.push([parts, listener]);
  }

  tell(part: Part): void {
    for (const [parts, listener] of this.listeners) if (parts.includes(part)) listener();
  }
}
