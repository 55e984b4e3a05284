// The page: reads its data and puts its sections in order.

import { paint } from "./colours";
import { chooser, compare } from "./compare";
import { read } from "./data";
import { button, h } from "./dom";
import { counted, seconds, share } from "./format";
import { graph } from "./graph";
import { memory } from "./memory";
import { progress } from "./progress";
import { State } from "./state";
import { tables } from "./tables";
import { timeline } from "./timeline";
import { verdict } from "./verdict";
import { verified } from "./verified";

const GOALS: Record<string, string> = {
  latency: "minimising the time of one run",
  throughput: "maximising samples per second",
  completion: "minimising the sum of completion times",
};

async function main(): Promise<void> {
  const holder = document.getElementById("data")!;
  const page = await read(holder.textContent!);
  holder.remove();
  const state = new State(page);
  for (const plan of page.plans) plan.devices.forEach((device) => paint(device.name)); // colours by order of the box
  const graphView = graph(state, (item) => timelineView.reveal(item));
  const timelineView = timeline(state, graphView.reveal);
  const several = page.plans.length > 1;
  const sections = [
    verified(state),
    ...(several ? [compare(state, graphView)] : []),
    timelineView.element,
    memory(state),
    graphView.element,
    ...tables(state, graphView.reveal),
    progress(state),
  ];
  document.getElementById("page")!.replaceChildren(...header(state, sections), ...(several ? [chooser(state)] : []), verdict(state, graphView.unfold), ...sections, footer(state));
  // Once what is visible has been drawn; benchmarks and tests wait for it.
  requestAnimationFrame(() => setTimeout(() => document.documentElement.setAttribute("data-ready", String(performance.now()))));
}

function header(state: State, sections: HTMLElement[]): HTMLElement[] {
  const about = h("p", { class: "about" });
  const title = h("h1");
  const links = h("nav", { "aria-label": "Sections" });
  const draw = () => {
    const { plan, graph } = state;
    const found = plan.found_by && plan.found_by !== plan.planner ? ` (${plan.found_by})` : "";
    const ended = plan.stopped === "finished" ? "" : plan.stopped === "budget" ? " (the whole budget)" : " (interrupted)";
    const costs = Object.entries(plan.cost_shares).map(([label, part], _, all) => (all.length > 1 ? `${share(part)} ${label}` : label));
    links.replaceChildren(...sections.filter((one) => !one.hidden).map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2")!.textContent)));
    title.replaceChildren(graph.name, h("span", {}, ` on ${plan.cluster}`));
    about.textContent =
      `${counted(graph.ops, "op")} on ${counted(plan.devices.length, "device")}, ${GOALS[plan.objective]}. Planned by ${plan.planner}${found} in ${seconds(plan.seconds)}${ended}. ` +
      (costs.length ? `Op times are ${costs.join(", ")}.` : "");
  };
  state.on(["plan"], draw);
  draw();
  return [h("header", {}, h("div", { class: "top" }, title, themeButton(state)), about), links];
}

function themeButton(state: State): HTMLElement {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const toggle = button("◐", "Switch between dark and light", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    state.tell("theme");
  });
  system.addEventListener("change", () => state.tell("theme"));
  // Paper is light.
  let before: string | undefined;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    state.printing = true;
    state.tell("theme");
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    state.printing = false;
    state.tell("theme");
  });
  return toggle;
}

function footer(state: State): HTMLElement {
  return h("footer", {}, `Placewise ${state.plan.version}. Times are simulated. This file is self-contained: it loads nothing and sends nothing.`);
}

main().catch((error: Error) => {
  document.getElementById("page")!.replaceChildren(h("p", { class: "wait" }, `The page cannot be drawn: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
