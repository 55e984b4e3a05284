// How planning went: the best value so far, the bound, and the gap between them, over the seconds that it took.

import { h, key, section, svg } from "./dom";
import { counted, isOptimal, seconds, share, tick, ticks } from "./format";
import type { State } from "./state";
import { PAPER } from "./timecanvas";

const TALL = 240;
const APART = 6; // pixels between dots
const LEFT = 88;
const BOTTOM = 30;

export function progress(state: State): HTMLElement {
  const holder = h("div", { class: "panel chart" });
  const element = section("progress", "Planning", null, holder);

  function draw(): void {
    const wide = state.printing ? PAPER : holder.clientWidth - 30; // within its padding
    const { plan } = state;
    const { history } = plan;
    // What other planners of a comparison proved counts too, from the end on.
    const bounds = plan.bounds.length ? plan.bounds : [[0, plan.bound] as [number, number]];
    element.hidden = !history.length || history.length + bounds.length < 3 || !(history[0][2] > 0);
    if (element.hidden || wide < LEFT) return;
    const [first, best] = [history[0], history[history.length - 1][2]];
    const end = Math.max(plan.seconds, history[history.length - 1][0], 1e-3);
    const high = Math.max(...history.map((point) => point[2])) * 1.04;
    const least = Math.min(...bounds.map((point) => point[1]).filter((value) => value > 0), best);
    const low = (high > 20 * least && high < 20 * plan.bound ? plan.bound : least) * 0.96;
    // Where the first values are far off, powers of ten show the rest.
    const powers = low > 0 && high / low > 20;
    const place = (value: number) => (powers ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1));
    const x = (time: number) => LEFT + ((wide - LEFT - 16) * time) / end;
    const y = (value: number) => 12 + (TALL - BOTTOM - 12) * (1 - Math.max(0, place(Math.max(value, low))));
    const steps = (points: [number, number][]) => points.map(([time, value]) => `H${x(time)}V${y(value)}`).join("") + `H${x(end)}`;
    const values = history.map(([time, , value]): [number, number] => [time, value]);
    const incumbent = `M${x(first[0])},${y(first[2])}${steps(values.slice(1))}`;
    const bound = `M${LEFT},${y(bounds[0][1])}${steps(bounds.slice(1))}`;
    // Between the two, from right to left along the bound.
    const back = [...bounds].reverse().map(([time, value], i, all) => `V${y(value)}H${x(i + 1 < all.length ? Math.max(time, first[0]) : first[0])}`).join("");
    const wanted = Math.max(2, Math.floor((wide - LEFT) / 75));
    const dots: [number, number][] = [];
    for (const [time, , value] of history) {
      const at: [number, number] = [x(time), y(value)];
      if (!dots.length || Math.hypot(at[0] - dots[dots.length - 1][0], at[1] - dots[dots.length - 1][1]) >= APART) dots.push(at);
    }
    const marks = powers ? [low / 0.96, Math.sqrt(low * high), high / 1.04] : ticks(low, high, 4);
    const rose = bounds.length > 1 ? `rose from ${seconds(bounds[0][1])} to ${seconds(bounds[bounds.length - 1][1])}` : `is ${seconds(bounds[0][1])}`;
    const gap = Math.max(0, 1 - bounds[0][1] / first[2]);
    const now = isOptimal(plan.gap) ? "the plan is optimal" : gap === plan.gap ? `the gap is ${share(gap)}` : `the gap fell from ${share(gap)} to ${share(plan.gap)}`;
    const text =
      `The best plan went from ${seconds(first[2])} to ${seconds(best)} in ${counted(history.length, "step")}, over ${seconds(plan.seconds)} and ${counted(plan.evaluations, "evaluation")}. ` +
      `The bound ${rose}, and ${now}.`;
    holder.replaceChildren(
      svg(
        "svg", { viewBox: `0 0 ${wide} ${TALL}`, role: "img", "aria-label": text },
        ...marks.flatMap((value) => [
          svg("line", { class: "grid", x1: LEFT, x2: wide - 16, y1: y(value), y2: y(value) }),
          svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, seconds(value)),
        ]),
        ...ticks(0, end, wanted).map((time) => svg("text", { x: x(time), y: TALL - 8, "text-anchor": "middle" }, tick(time, end))),
        svg("path", { class: "between", d: `${incumbent}${back}Z` }),
        plan.bound > 0 ? svg("path", { class: "bound", d: bound }) : null,
        svg("path", { class: "best", d: incumbent }),
        ...dots.map(([cx, cy]) => svg("circle", { cx, cy, r: 3 })),
      ),
      h("p", { class: "legend" }, key("best plan", { class: "best" }), key("bound", { class: "bound" }), key("gap", { class: "between" }), `The axis starts at ${seconds(low)}${powers ? " and is logarithmic" : ""}.`),
      h("p", { class: "about" }, text),
    );
  }

  state.on(["plan", "theme"], draw);
  new ResizeObserver(draw).observe(holder);
  draw();
  return element;
}
