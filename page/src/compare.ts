// Several plans: what each is worth, and which ops are elsewhere.

import type { Plan } from "./data";
import { button, h, link, section } from "./dom";
import { bytes, change, count, counted, gap, seconds } from "./format";
import type { GraphView } from "./graph";
import type { State } from "./state";
import { table } from "./table";
import { chip } from "./tables";
import { modulePath, modulesAround } from "./modules";

/** Which plan is shown, and beside which other. */
export function chooser(state: State): HTMLElement {
  const pick = (name: string, get: () => number | null, set: (i: number | null) => void, none: boolean) => {
    const options = state.page.plans.map((plan, i) => h("option", { value: i }, `${plan.title} · ${seconds(plan.value)}`));
    const select = h("select", { onchange: () => set(select.value === "" ? null : Number(select.value)) }, ...(none ? [h("option", { value: "" }, "none")] : []), ...options);
    const draw = () => (select.value = String(get() ?? ""));
    state.on(["plan"], draw);
    draw();
    return h("label", {}, name, select);
  };
  return h(
    "div", { class: "chooser", role: "group", "aria-label": "Plans" },
    pick("Plan", () => state.shown, (i) => state.show(i!, i === state.beside ? state.shown : state.beside), false),
    pick("Beside", () => state.beside, (i) => state.show(state.shown, i), true),
    button("Swap", "Swap the two plans", () => state.beside !== null && state.show(state.beside, state.shown)),
  );
}

const MODULES = 24; // rows
const MOST = 0.8; // of the ops that moved: a module that has as many says nothing, and is unfolded
const UNFOLDED = 64; // rows
const WAYS = 3; // from device to device, that a row tells

export function compare(state: State, view: GraphView): HTMLElement {
  const rows = h("div");
  const moves = h("div");

  const { plans, graphs } = state.page;
  const ranked = !state.differ.length;
  type Row = (typeof plans)[number];
  const settings = Object.keys(plans[0].execution).filter((key) => plans.some((p) => p.execution[key] !== plans[0].execution[key]));
  const about: Record<string, (p: Row) => string> = {
    model: (p) => `${graphs[p.graph].name}, ${counted(graphs[p.graph].ops, "op")}`,
    objective: (p) => p.objective,
    execution: (p) => settings.map((key) => `${key} ${p.execution[key]}`).join(", "),
  };

  function draw(): void {
    const { plan, other, graph } = state;
    const base = plan.value;
    rows.replaceChildren(
      ranked ? "" : h("p", { class: "about" }, `Not ranked: the plans differ in ${state.differ.join(" and ")}, so their times cannot be compared.`),
      table("Plans", [
        { name: "Plan", text: true, value: (p) => p.title, show: (p) => (p === plan ? h("b", {}, p.title) : link(p.title, `Show ${p.title}`, () => state.show(plans.indexOf(p), state.shown))) },
        { name: "Time", least: true, value: (p) => p.value, show: (p) => seconds(p.value) },
        ...state.differ.map((what) => ({ name: what[0].toUpperCase() + what.slice(1), text: true, value: about[what] })),
        ...(ranked ? [{ name: "Difference", least: true, value: (p: Row) => p.value - base, show: (p: Row) => (p === plan ? "–" : p.value === base ? "the same" : `${p.value < base ? "−" : "+"}${seconds(Math.abs(p.value - base))} (${change(base, p.value)})`) }] : []),
        { name: "Gap", least: true, value: (p) => p.gap, show: (p) => gap(p.gap) },
        { name: "Transfers", value: (p) => p.transfers, show: (p) => count(p.transfers) },
        { name: "Memory left", value: (p) => spare(p), show: (p) => bytes(spare(p)) },
        { name: "Planner", text: true, value: (p) => p.planner + (p.found_by && p.found_by !== p.planner ? ` (${p.found_by})` : "") },
        { name: "Box", text: true, value: (p) => p.cluster },
      ], plans, ranked ? 1 : null),
    );
    const moved = state.moved();
    if (!other) return moves.replaceChildren();
    if (!moved) return moves.replaceChildren(h("p", { class: "about" }, `${plan.title} and ${other.title} place different graphs, so ops cannot be compared.`));
    const items = [...moved.keys()].filter((item) => moved[item]);
    const where = (p: typeof plan, item: number) => p.devices[p.device[item]].name;
    const ops = items.reduce((sum, item) => sum + graph.count[item], 0);
    const leading = (name: string, go: (() => void) | null) => (go ? link(name, `Show ${name} in the graph`, go) : name);
    moves.replaceChildren(
      h("h3", {}, items.length ? `${count(ops)} of ${count(graph.ops)} ops moved, by module` : "No op moved"),
      ...(items.length
        ? [
            table("Modules with ops that moved", [
              { name: "Module", text: true, value: (m) => m.name, show: (m) => leading(m.name, view.unfold(m.name)) },
              { name: "Ops", value: (m) => m.ops, show: (m) => count(m.ops) },
              { name: "From → to", text: true, value: (m) => m.ways.map(({ from, to }) => `${from}→${to}`).join(" "), show: ways },
              { name: `Time, ${other.title}`, value: (m) => m.before, show: (m) => seconds(m.before) },
              { name: `Time, ${plan.title}`, value: (m) => m.after, show: (m) => seconds(m.after) },
            ], byModule(state, other, items), 1, 6),
            h("h3", {}, "Op by op"),
            table("Ops that moved", [
              { name: "Op", text: true, value: (item) => graph.names[item], show: (item) => leading(graph.names[item], () => view.reveal(item)) },
              { name: other.title, text: true, value: (item) => where(other, item), show: (item) => chip(where(other, item)) },
              { name: plan.title, text: true, value: (item) => where(plan, item), show: (item) => chip(where(plan, item)) },
              { name: `Time, ${other.title}`, value: (item) => other.time[item], show: (item) => seconds(other.time[item]) },
              { name: `Time, ${plan.title}`, value: (item) => plan.time[item], show: (item) => seconds(plan.time[item]) },
              { name: "Module", text: true, value: (item) => modulePath(graph.paths, graph.parent, graph.node[item]) },
            ], items, 4, 6),
          ]
        : []),
    );
  }

  state.on(["plan"], draw);
  draw();
  return section("compare", "Plans side by side", null, rows, moves);
}

/** On the fullest device; null where none has a limit. */
function spare(plan: Plan): number | null {
  const limited = plan.devices.filter((d) => d.memory);
  limited.sort((a, b) => b.peak / b.memory! - a.peak / a.memory!);
  return limited.length ? limited[0].memory! - limited[0].peak : null;
}

interface Moves {
  name: string;
  ops: number;
  ways: { from: string; to: string; ops: number }[]; // the most first
  before: number;
  after: number;
}

function ways({ ways }: Moves): HTMLElement {
  const rest = ways.slice(WAYS);
  return h(
    "span", { class: "devices" },
    ...ways.slice(0, WAYS).map(({ from, to, ops }) => h("span", { class: "way" }, chip(from), "→", chip(to), count(ops))),
    rest.length ? h("span", { title: rest.map(({ from, to, ops }) => `${from} → ${to}: ${count(ops)}`).join(", ") }, `${counted(rest.length, "other")}`) : null,
  );
}

/** Ops that moved, as deep into the tree of modules as some rows allow: the largest module is unfolded first. */
function byModule({ plan, graph }: State, other: Plan, items: number[]): Moves[] {
  const modules = graph.paths.map((_, node) => modulesAround(graph, node));
  const total = items.reduce((sum, item) => sum + graph.count[item], 0);
  const grouped = (some: number[], depth: number): Group[] => {
    const groups = new Map<string, Group>();
    for (const item of some) {
      const around = modules[graph.node[item]];
      const name = around[Math.min(depth, around.length) - 1] ?? "(no module)";
      const group = groups.get(name) ?? { name, depth, items: [], ops: 0 };
      groups.set(name, group);
      group.items.push(item);
      group.ops += graph.count[item];
    }
    return [...groups.values()];
  };
  let groups = grouped(items, 1);
  for (let unfolded = true; unfolded; ) {
    unfolded = false;
    for (const group of [...groups].sort((a, b) => b.ops - a.ops)) {
      const inside = (group.inside ??= grouped(group.items, group.depth + 1));
      if (inside.length === 1 && inside[0].name === group.name) continue;
      if (groups.length - 1 + inside.length > (group.ops > MOST * total ? UNFOLDED : MODULES)) continue;
      groups = groups.flatMap((one) => (one === group ? inside : [one]));
      unfolded = true;
      break;
    }
  }
  return groups.map(({ name, ops, items }) => {
    const ways = new Map<string, Moves["ways"][number]>();
    const row = { name, ops, before: 0, after: 0 };
    for (const item of items) {
      row.before += other.time[item];
      row.after += plan.time[item];
      const [from, to] = [other.devices[other.device[item]].name, plan.devices[plan.device[item]].name];
      const way = ways.get(`${from}\n${to}`) ?? { from, to, ops: 0 };
      ways.set(`${from}\n${to}`, way);
      way.ops += graph.count[item];
    }
    return { ...row, ways: [...ways.values()].sort((a, b) => b.ops - a.ops) };
  });
}

interface Group {
  name: string;
  depth: number;
  items: number[];
  ops: number;
  inside?: Group[];
}
