// How planning went: the best value so far over the seconds that it took, and the bound that was known in the end.

import { h, section, svg } from "./dom";
import { count, seconds, ticks } from "./format";
import type { State } from "./state";

const WIDE = 720;
const TALL = 220;
const LEFT = 88;
const BOTTOM = 30;

export function progress(state: State): HTMLElement {
  const holder = h("div", { class: "panel chart" });
  const element = section("progress", "Planning", null, holder);

  function draw(): void {
    const { plan } = state;
    const { history } = plan;
    element.hidden = history.length < 2;
    if (element.hidden) return;
    const best = history[history.length - 1][2];
    const end = Math.max(plan.seconds, history[history.length - 1][0], 1e-3);
    const high = Math.max(...history.map((point) => point[2])) * 1.04;
    const low = Math.min(plan.bound, best) * 0.96;
    // Where the first values are far off, powers of ten show the rest.
    const powers = low > 0 && high / low > 20;
    const place = (value: number) => (powers ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1));
    const x = (time: number) => LEFT + ((WIDE - LEFT - 16) * time) / end;
    const y = (value: number) => 12 + (TALL - BOTTOM - 12) * (1 - place(value));
    let line = `M${x(history[0][0])},${y(history[0][2])}`;
    for (const [time, , value] of history.slice(1)) line += `H${x(time)}V${y(value)}`;
    line += `H${x(end)}`;
    const values = powers ? [low / 0.96, Math.sqrt(low * high), high / 1.04] : ticks(low, high, 4);
    const text = `The best plan went from ${seconds(history[0][2])} to ${seconds(best)} in ${count(history.length)} steps, over ${seconds(plan.seconds)} and ${count(plan.evaluations)} evaluations. The bound is ${seconds(plan.bound)}; how it rose is not kept, so the line is the last one.`;
    holder.replaceChildren(
      svg(
        "svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": text },
        ...values.flatMap((value) => [
          svg("line", { class: "grid", x1: LEFT, x2: WIDE - 16, y1: y(value), y2: y(value) }),
          svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, seconds(value)),
        ]),
        ...ticks(0, end, 5).map((time) => svg("text", { x: x(time), y: TALL - 8, "text-anchor": "middle" }, `${Number(time.toPrecision(3))} s`)),
        plan.bound > 0 ? svg("line", { class: "bound", x1: LEFT, x2: WIDE - 16, y1: y(plan.bound), y2: y(plan.bound) }) : null,
        plan.bound > 0 ? svg("text", { class: "bound", x: WIDE - 20, y: y(plan.bound) - 7, "text-anchor": "end" }, `bound, as known in the end: ${seconds(plan.bound)}`) : null,
        svg("path", { class: "best", d: line }),
        ...history.map(([time, , value]) => svg("circle", { cx: x(time), cy: y(value), r: 3 })),
      ),
      h("p", { class: "about" }, text),
    );
  }

  state.on(["plan"], draw);
  draw();
  return element;
}
