// First of all: how fast, how far from the best, how much room is left, and what stands in the way.

import { background } from "./colours";
import type { Device, Plan } from "./data";
import { h, key } from "./dom";
import { bytes, change, count, percent, perSecond, seconds, share } from "./format";
import { type State, unlike } from "./state";

const METERS = 4; // devices whose memory is drawn
const LEAST = 0.005; // of the time: modules below are left out

const PER: Record<string, string> = {
  latency: "for one run",
  completion: "the sum of the models' ends",
};

export function verdict(state: State): HTMLElement {
  const element = h("div", { id: "verdict" });
  const draw = () => element.replaceChildren(cards(state), bars(state.plan));
  state.on(["plan"], draw);
  draw();
  return element;
}

function cards(state: State): HTMLElement {
  const { plan, other } = state;
  const limited = plan.devices.filter((d) => d.memory !== null && d.memory > 0);
  limited.sort((a, b) => b.peak / b.memory! - a.peak / a.memory!);
  const fullest = limited[0];
  const per = plan.objective === "throughput" ? `per sample, with the pipeline full: ${perSecond(plan.value)}` : PER[plan.objective];
  const proved = plan.proved_by ? `, proved by ${plan.proved_by}` : "";
  const optimal = plan.gap <= 1e-9;
  return h(
    "div", { class: "cards" },
    card("Time", seconds(plan.value), per, other ? compared(state) : null, measured(plan)),
    card(
      "Gap", optimal ? "optimal" : percent(plan.gap),
      optimal ? `No plan is faster${proved}.` : `at most: no plan is below ${seconds(plan.bound)}${proved}`,
      h("div", { class: "meter gap", "aria-hidden": "true" }, h("span", { style: `width:${100 * (1 - plan.gap)}%` })),
    ),
    fullest
      ? card("Memory left", bytes(fullest.memory! - fullest.peak), `on ${fullest.name}, the fullest`, h("div", { class: "meters" }, ...limited.slice(0, METERS).map(meter)))
      : card("Memory left", "no limit", "No device of this box has one."),
    h("div", { class: "card words" }, h("h3", {}, "What limits it"), h("p", {}, plan.verdict || "Nothing runs.")),
  );
}

/** How full a device is. */
function meter(device: Device): HTMLElement {
  const used = device.peak / device.memory!;
  return h(
    "div", { title: `${device.name}: ${bytes(device.peak)} of ${bytes(device.memory)}` },
    h("span", { class: "name" }, device.name),
    h("div", { class: "meter" }, h("span", { style: `width:${100 * Math.min(1, used)}%;background:${background(device.name)}` })),
    h("span", { class: "number" }, share(used)),
  );
}

function card(name: string, value: string, about: string, ...extra: (Node | null)[]): HTMLElement {
  return h("div", { class: "card" }, h("h3", {}, name), h("p", { class: "value" }, value), h("p", {}, about), ...extra);
}

/** What a real run took, where there was one. */
function measured({ verified: seen }: Plan): HTMLElement | null {
  if (!seen) return null;
  const verdict = seen.findings.find(({ claim }) => claim.startsWith("time"))?.verdict;
  const off = `${change(seen.predicted, seen.placed)} than predicted`.replace("the same than", "as");
  return h("p", { class: `gain ${verdict === undefined ? "" : verdict === "holds" ? "good" : "bad"}` }, `measured ${seconds(seen.placed)}, ${off}`);
}

/** What the shown plan gains over the one beside it, and for how many ops. */
function compared(state: State): HTMLElement {
  const { plan, other, graph } = state;
  const moved = state.moved();
  const ops = moved?.reduce((sum, is, item) => sum + (is ? graph.count[item] : 0), 0);
  const apart = unlike(plan, other!);
  const gained = other!.value === plan.value ? `as ${other!.title}` : `${change(other!.value, plan.value)} than ${other!.title}`;
  return h("p", { class: "gain" }, apart.length ? `not comparable with ${other!.title}: another ${apart.join(" and ")}` : gained, ops === undefined ? "" : `; ${count(ops)} of ${count(graph.ops)} ops moved`);
}

// ---- where the time goes

const SHADES = ["var(--ink)", "var(--channel)", "repeating-linear-gradient(45deg, var(--channel) 0 3px, transparent 3px 7px)", "repeating-linear-gradient(135deg, var(--line) 0 3px, transparent 3px 7px)"];

function bars(plan: Plan): HTMLElement | string {
  if (plan.loads.length) return loads(plan);
  const total = Object.values(plan.by_kind).reduce((a, b) => a + b, 0);
  if (!total) return "";
  const kinds = Object.entries(plan.by_kind);
  const largest = plan.by_module.slice(0, 6).filter(({ seconds }) => seconds.reduce((a, b) => a + b) >= LEAST * total);
  const starred = largest.some(({ module }) => module.includes("*"));
  const most = Math.max(...largest.map((row) => row.seconds.reduce((a, b) => a + b, 0)));
  const parts = (values: number[], of: number) =>
    h("span", { class: "parts" }, ...values.map((value, i) => h("span", { style: `width:${(100 * value) / of}%;background:${SHADES[i]}` })));
  const row = (name: string, values: number[], of: number) => {
    const sum = values.reduce((a, b) => a + b, 0);
    return h("div", { class: "row" }, h("span", { class: "name", title: name }, name), parts(values, of), h("span", { class: "number" }, `${seconds(sum)} · ${share(sum / total)}`));
  };
  return h(
    "div", { class: "card why" },
    h("h3", {}, "Where the time goes"),
    h(
      "div", { class: "bar" },
      h("p", {}, `The chain of steps that ends last, by module${starred ? " (* stands for the number of a layer)" : ""}.`),
      h("p", { class: "legend" }, ...kinds.map(([kind, value], i) => value > 0 && key(`${kind} ${share(value / total)}`, { style: `background:${SHADES[i]}` }))),
    ),
    ...largest.map(({ module, seconds: split }) => row(module, split, most)),
  );
}

/** A pipeline is as fast as its busiest device or channel. */
function loads(plan: Plan): HTMLElement {
  const most = Math.max(...plan.loads.map((load) => load.total), plan.bound);
  const devices = new Set(plan.devices.map((device) => device.name));
  const rows = [...plan.loads].sort((a, b) => b.total - a.total).slice(0, 16);
  return h(
    "div", { class: "card why" },
    h("h3", {}, "Load per sample"),
    h("p", {}, `The longest bar sets the pace. The dashed line is the bound: no plan is below ${seconds(plan.bound)}.`),
    ...rows.map((load) => {
      const fill = devices.has(load.where) ? background(load.where) : "var(--channel)";
      const same = load.replicas > 1 ? ` · ${load.replicas} devices in turn` : "";
      return h(
        "div", { class: `row${load.sets_pace ? " pace" : ""}` },
        h("span", { class: "name", title: load.where }, load.where),
        h("span", { class: "parts" }, h("span", { style: `width:${(100 * load.total) / most}%;background:${fill}` }), h("i", { class: "line", style: `left:${(100 * plan.bound) / most}%` })),
        h("span", { class: "number" }, `${seconds(load.total)}${same}`),
      );
    }),
  );
}
