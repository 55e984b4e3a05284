// First of all: how fast, how far from the best, how much room is left, and what stands in the way.

import { background } from "./colours";
import type { Device, Plan } from "./data";
import { broken, h, key, link, tail } from "./dom";
import { against, bytes, count, counted, gap, isOptimal, samplesPerSecond, seconds, share } from "./format";
import type { GraphView } from "./graph";
import { type State, unlike, whyNot } from "./state";
import { offPrediction, withinSpread } from "./verified";

const METERS = 6; // devices whose memory is drawn
const MODULES = 6; // that have a row
const LEAST = 0.005; // of the time: modules below have no row of their own
const LOADS = 16;

const PER: Record<string, string> = {
  latency: "for one run",
  completion: "the sum of completion times",
};

export function verdict(state: State, unfold: Unfold): HTMLElement {
  const element = h("div", { id: "verdict" });
  const draw = () => element.replaceChildren(cards(state), ...bars(state, unfold).filter((one) => one !== null));
  state.on(["plan"], draw);
  draw();
  return element;
}

function cards(state: State): HTMLElement {
  const { plan, other, graph } = state;
  const limited = plan.devices.filter((d) => d.memory !== null && d.memory > 0);
  limited.sort((a, b) => b.peak / b.memory! - a.peak / a.memory!);
  const fullest = limited[0];
  const per = plan.objective === "throughput" ? `per sample${samplesPerSecond(plan.value)}` : PER[plan.objective];
  const proved = plan.proved_by ? `, proved by ${plan.proved_by}` : "";
  const holds = plan.devices.some((d) => d.peak > 0);
  return h(
    "div", { class: `cards ${holds ? "" : "two"}` },
    card("Time", seconds(plan.value), per, path(plan), other ? compared(state) : null, measured(plan)),
    card(
      "Gap", gap(plan.gap),
      isOptimal(plan.gap) ? `No plan can be faster${proved}.` : `at most; no plan can be below ${seconds(plan.bound)}${proved}`,
      h("div", { class: "meter gap", "aria-hidden": "true" }, h("span", { style: `width:${100 * (1 - plan.gap)}%` })),
    ),
    !holds
      ? null
      : fullest
        ? card("Memory left", bytes(fullest.memory! - fullest.peak), `on ${fullest.name}, the fullest`, h("div", { class: "meters" }, ...limited.slice(0, METERS).map(meter)))
        : card("Memory left", "no limit", "No device of this box has one."),
    words(plan.verdict || (graph.ops ? "Nothing takes time." : "Nothing runs.")),
  );
}

/** The critical path as one bar: what each device computes of it, in its colour, then transfers and waits. */
function path({ chain, devices }: Plan): HTMLElement | null {
  const compute = new Float64Array(devices.length);
  const [others, names] = [new Float64Array(2), ["transfers", "waits"]];
  chain.kind.forEach((kind, i) => (kind === 0 ? (compute[chain.lane[i]] += chain.length[i]) : (others[Math.min(kind, 2) - 1] += chain.length[i])));
  const parts: [string, string, number][] = [
    ...devices.map(({ name }, d): [string, string, number] => [name, background(name), compute[d]]),
    ...names.map((name, i): [string, string, number] => [name, SHADES[i + 1], others[i]]),
  ];
  const total = parts.reduce((sum, part) => sum + part[2], 0);
  const shown = parts.filter((part) => part[2] > 0);
  const told = `Critical path: ${shown.map(([name, , part]) => `${name} ${share(part / total)}`).join(", ")}`;
  return shown.length ? h("div", { class: "meter path", role: "img", "aria-label": told, title: told }, ...shown.map(([, fill, part]) => h("span", { style: `flex:${part / total};background:${fill}` }))) : null;
}

/** In the words of `explain`, of which the first sentence says most. */
function words(text: string): HTMLElement {
  const end = text.search(/\. [A-Z]/) + 1 || text.length;
  return h("div", { class: "card words" }, h("h3", {}, "What limits it"), h("p", {}, h("b", {}, ...broken(text.slice(0, end))), ...broken(text.slice(end))));
}

/** How full a device is. */
function meter(device: Device): HTMLElement {
  const used = device.peak / device.memory!;
  return h(
    "div", { title: `${device.name}: ${bytes(device.peak)} of ${bytes(device.memory)}` },
    tail(device.name, { class: "name" }),
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
  const tone = verdict === undefined || withinSpread(seen) ? "" : verdict === "holds" ? "good" : "bad";
  return h("p", { class: `gain ${tone}` }, `measured ${seconds(seen.placed)}, ${offPrediction(seen)}`);
}

/** What the shown plan gains over the one beside it, and for how many ops. */
function compared(state: State): HTMLElement {
  const { plan, other, graph } = state;
  const moved = state.moved();
  const ops = moved?.reduce((sum, is, item) => sum + (is ? graph.count[item] : 0), 0);
  const apart = unlike(plan, other!);
  const gained = against(other!.value, plan.value, other!.title);
  return h("p", { class: `gain ${apart.length || other!.value === plan.value ? "" : plan.value < other!.value ? "good" : "bad"}` }, apart.length ? `not compared with ${other!.title}: ${whyNot(apart)}` : gained, ops === undefined || !graph.ops ? "" : `; ${count(ops)} of ${count(graph.ops)} ops moved`);
}

// ---- where the time goes

const SHADES = ["var(--ink)", "var(--channel)", "repeating-linear-gradient(45deg, var(--channel) 0 3px, transparent 3px 7px)", "repeating-linear-gradient(135deg, var(--line) 0 3px, transparent 3px 7px)"];

type Unfold = GraphView["unfold"];

function bars({ plan }: State, unfold: Unfold): (HTMLElement | null)[] {
  return plan.loads.length ? [loads(plan), pace(plan, unfold)] : [chain(plan, unfold), ends(plan)];
}

/** A name, a bar of parts, each as a share of the row, and a number; a click on the name of a module unfolds it. */
function row(name: string, parts: [number, string][], number: string, more: { pace?: boolean; line?: number; unfold?: (() => void) | null } = {}): HTMLElement {
  const text = h("bdi", {}, name);
  return h(
    "div", { class: `row${more.pace ? " pace" : ""}` },
    h("span", { class: "name tail", title: name }, more.unfold ? link(text, `Show ${name} in the graph`, more.unfold) : text),
    h(
      "span", { class: "parts" },
      ...parts.map(([part, fill]) => h("span", { style: `width:${100 * part}%;background:${fill}` })),
      more.line === undefined ? null : h("i", { class: "line", style: `left:${100 * more.line}%` }),
    ),
    h("span", { class: "number" }, number),
  );
}

/** The first rows, as long as they are worth it, and the sum of all others. */
function fewest<Row>(rows: Row[], seconds: (row: Row) => number, total: number): [Row[], Row[]] {
  const shown = rows.slice(0, MODULES).filter((one) => seconds(one) >= LEAST * total);
  return rows.length - shown.length === 1 ? [rows, []] : [shown, rows.slice(shown.length)];
}

function chain(plan: Plan, unfold: Unfold): HTMLElement | null {
  const kinds = Object.entries(plan.by_kind);
  const total = kinds.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return null;
  const sum = (rows: Plan["by_module"]) => rows.reduce((sum, row) => row.seconds.reduce((a, b) => a + b, sum), 0);
  const [shown, rest] = fewest(plan.by_module, (one) => sum([one]), total);
  const starred = shown.some(({ module }) => module.includes("*"));
  const most = Math.max(...shown.map((one) => sum([one])), sum(rest));
  const drawn = (name: string, rows: Plan["by_module"], open: (() => void) | null) => {
    const parts = kinds.map((_, i): [number, string] => [rows.reduce((sum, one) => sum + one.seconds[i], 0) / most, SHADES[i]]);
    return row(name, parts, `${seconds(sum(rows))} · ${share(sum(rows) / total)}`, { unfold: open });
  };
  return h(
    "div", { class: "card why" },
    h("h3", {}, "Where the time goes"),
    h(
      "div", { class: "bar" },
      h("p", {}, `The critical path by module${starred ? " (* stands for a layer number)" : ""}; waits count for the module waited for.`),
      h("p", { class: "legend" }, ...kinds.map(([kind, value], i) => value > 0 && key(`${kind} ${share(value / total)}`, { style: `background:${SHADES[i]}` }))),
    ),
    ...shown.map((one) => drawn(one.module, [one], unfold(one.module))),
    rest.length ? drawn(`${counted(rest.length, "other")}`, rest, null) : null,
  );
}

/** Where the sum of the models' ends counts: each end, and what the bound says of their mean. */
function ends(plan: Plan): HTMLElement | null {
  if (plan.ends.length < 2) return null;
  const count = plan.ends.length;
  const sorted = [...plan.ends].sort((a, b) => b[1] - a[1]);
  const most = Math.max(sorted[0][1], plan.bound / count) || 1;
  const [shown, rest] = [sorted.slice(0, LOADS), sorted.slice(LOADS)];
  return h(
    "div", { class: "card why" },
    h("h3", {}, "When each model ends"),
    h("p", {}, `Their sum is what counts. The dashed line is the bound: on average, no plan ends before ${seconds(plan.bound / count)}.`),
    row("mean", [[plan.value / count / most, "var(--ink)"]], seconds(plan.value / count), { pace: true, line: plan.bound / count / most }),
    ...shown.map(([name, end]) => row(name, [[end / most, "var(--channel)"]], seconds(end))),
    rest.length ? h("p", {}, `${counted(rest.length, "other")} before ${seconds(rest[0][1])}`) : null,
  );
}

/** A pipeline is as fast as its busiest device or channel. */
function loads(plan: Plan): HTMLElement {
  const most = Math.max(...plan.loads.map((load) => load.total), plan.bound);
  const devices = new Set(plan.devices.map((device) => device.name));
  const sorted = [...plan.loads].sort((a, b) => b.total - a.total);
  const rest = sorted.slice(LOADS);
  return h(
    "div", { class: "card why" },
    h("h3", {}, "Load per sample"),
    h("p", {}, `The longest bar sets the pace. The dashed line is the bound: no plan can be below ${seconds(plan.bound)}.`),
    ...sorted.slice(0, LOADS).map((load) => {
      const name = load.where.replace(/ (for|back)ward$/, ""); // of a phase
      const fill = devices.has(name) ? background(name) : "var(--channel)";
      const same = load.replicas > 1 ? ` · ${load.replicas} devices in turn` : "";
      return row(load.where, [[load.total / most, fill]], `${seconds(load.total)}${same}`, { pace: load.sets_pace, line: plan.bound / most });
    }),
    rest.length ? h("p", {}, `${counted(rest.length, "other")} with ${seconds(rest[0].total)} at most`) : null,
  );
}

/** What the load that sets the pace is spent on. */
function pace(plan: Plan, unfold: Unfold): HTMLElement | null {
  const modules = plan.pace_modules;
  if (modules.length < 2) return null;
  const where = plan.loads.find((load) => load.sets_pace)!.where;
  const fill = plan.devices.some((device) => device.name === where) ? background(where) : "var(--channel)";
  const sum = (rows: [string, number][]) => rows.reduce((sum, [, value]) => sum + value, 0);
  const [shown, rest] = fewest(modules, ([, value]) => value, sum(modules));
  const most = Math.max(shown[0]?.[1] ?? 0, sum(rest));
  const drawn = (name: string, value: number, open: (() => void) | null) => row(name, [[value / most, fill]], `${seconds(value)} · ${share(value / sum(modules))}`, { unfold: open });
  return h(
    "div", { class: "card why" },
    h("h3", {}, `What ${where} spends it on`),
    h("p", {}, `By module${shown.some(([name]) => name.includes("*")) ? " (* stands for a layer number)" : ""}.`),
    ...shown.map(([name, value]) => drawn(name, value, unfold(name))),
    rest.length ? drawn(counted(rest.length, "other"), sum(rest), null) : null,
  );
}
