// Several plans: what each is worth, and which ops are elsewhere.

import { button, h, section } from "./dom";
import { count, counted, percent, seconds, share } from "./format";
import type { State } from "./state";
import { table } from "./table";
import { chip } from "./tables";
import { modulePath } from "./modules";

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

export function compare(state: State): HTMLElement {
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
      ranked ? "" : h("p", { class: "about" }, `Not ranked: the plans differ in ${state.differ.join(" and ")}, so their times are not of the same thing.`),
      table("Plans", [
        { name: "Plan", text: true, value: (p) => p.title, show: (p) => (p === plan ? h("b", {}, p.title) : button(p.title, `Show ${p.title}`, () => state.show(plans.indexOf(p), state.shown), { class: "link" })) },
        { name: "Time", least: true, value: (p) => p.value, show: (p) => seconds(p.value) },
        ...state.differ.map((what) => ({ name: what[0].toUpperCase() + what.slice(1), text: true, value: about[what] })),
        ...(ranked ? [{ name: "Against shown", least: true, value: (p: Row) => p.value / base, show: (p: Row) => (p === plan ? "–" : `${p.value >= base ? "+" : "−"}${seconds(Math.abs(p.value - base))} (${p.value >= base ? "+" : "−"}${share(Math.abs(p.value / base - 1))})`) }] : []),
        { name: "Gap", least: true, value: (p) => p.gap, show: (p) => percent(p.gap) },
        { name: "Transfers", value: (p) => p.transfers, show: (p) => count(p.transfers) },
        { name: "Planner", text: true, value: (p) => p.planner },
        { name: "Box", text: true, value: (p) => p.cluster },
      ], plans, ranked ? 1 : null),
    );
    const moved = state.moved();
    if (!other) return moves.replaceChildren();
    if (!moved) return moves.replaceChildren(h("p", { class: "about" }, `${plan.title} and ${other.title} place different graphs, so there is no op to compare.`));
    const items = [...moved.keys()].filter((item) => moved[item]);
    const where = (p: typeof plan, item: number) => p.devices[p.device[item]].name;
    const ops = items.reduce((sum, item) => sum + graph.count[item], 0);
    moves.replaceChildren(
      h("h3", {}, items.length ? `${count(ops)} of ${count(graph.ops)} ops moved` : "No op moved"),
      items.length
        ? table("Ops that moved", [
            { name: "Op", text: true, value: (item) => graph.names[item] },
            { name: "Module", text: true, value: (item) => modulePath(graph.paths, graph.parent, graph.node[item]) },
            { name: other.title, text: true, value: (item) => where(other, item), show: (item) => chip(where(other, item)) },
            { name: plan.title, text: true, value: (item) => where(plan, item), show: (item) => chip(where(plan, item)) },
            { name: `Time, ${other.title}`, value: (item) => other.time[item], show: (item) => seconds(other.time[item]) },
            { name: `Time, ${plan.title}`, value: (item) => plan.time[item], show: (item) => seconds(plan.time[item]) },
          ], items, 5, 6)
        : "",
    );
  }

  state.on(["plan"], draw);
  draw();
  return section("compare", "Plans side by side", null, rows, moves);
}
