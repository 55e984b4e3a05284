// What a real run of the plan showed (`placewise verify`), beside what was predicted.

import type { Finding, Verified } from "./data";
import { h, section } from "./dom";
import { against, bytes, change, counted, seconds } from "./format";
import type { State } from "./state";
import { table } from "./table";

/** Runs that differ among themselves by more than the prediction differs from them do not tell that it is wrong. */
export function withinSpread({ predicted, placed, placed_spread: spread }: Verified): boolean {
  return predicted !== placed && spread > Math.abs(placed - predicted);
}

/** How far what was measured is off. */
export function offPrediction(seen: Verified): string {
  const { predicted, placed, placed_spread: spread } = seen;
  return against(predicted, placed, "predicted") + (withinSpread(seen) ? `, which is within the spread of its runs, ± ${seconds(spread)}` : "");
}

export function verified(state: State): HTMLElement {
  const holder = h("div");
  const element = section("verified", "Predicted and measured", null, holder);

  function draw(): void {
    const seen = state.plan.verified;
    element.hidden = !seen;
    if (!seen) return;
    const bars: [string, number, number | null][] = [
      ["predicted", seen.predicted, null],
      ["measured", seen.placed, seen.placed_spread],
      ["without a plan", seen.plain, seen.plain_spread],
    ];
    const most = Math.max(...bars.map(([, value]) => value)) || 1;
    const off = `The measured time is ${offPrediction(seen)}`;
    const held = `${seen.holds ? "Every claim of the plan held" : "Not every claim of the plan held"}${seen.within == null ? "" : ` (the time may be ${Number((100 * seen.within).toPrecision(6))}% off)`}`;
    holder.replaceChildren(
      h("p", { class: "about" }, `${held}. It was run with ${seen.engine} (${seen.library}). ${off}.`),
      h(
        "div", { class: "card why" },
        ...bars.map(([name, value, spread]) =>
          h(
            "div", { class: "row" },
            h("span", { class: "name" }, name),
            h("span", { class: "parts" }, h("span", { style: `width:${(100 * value) / most}%;background:${name === "predicted" ? "var(--channel)" : "var(--accent)"}` })),
            h("span", { class: "number" }, seconds(value) + (spread === null ? "" : ` ± ${seconds(spread)}`)),
          ),
        ),
      ),
      table("Claims", [
        { name: "Claim", text: true, value: (f) => f.claim },
        { name: "Predicted", value: (f) => f.claimed, show: (f) => (f.claim === "outputs" && f.claimed ? `≤ ${f.claimed.toExponential(1).replace(".0e", "e")}` : amount(f.claim, f.claimed)) },
        { name: "Found", value: (f) => f.found, show: (f) => amount(f.claim, f.found) },
        { name: "Verdict", text: true, value: (f) => f.verdict, show: verdict },
      ], [...seen.findings].sort((a, b) => Number(isTold(a)) - Number(isTold(b))), null),
    );
  }

  state.on(["plan"], draw);
  draw();
  return element;
}

/** How long a device is busy is told, not promised. */
function isTold({ claim }: Finding): boolean {
  return claim.startsWith("busy ");
}

/** Of what is no promise, how far off it is. */
function verdict(finding: Finding): HTMLElement {
  const { claimed, found, verdict } = finding;
  if (!isTold(finding)) return h("span", { class: verdict === "holds" ? "good" : "bad" }, verdict);
  return h("span", {}, claimed && found !== null ? change(claimed, found) : "–");
}

function amount(claim: string, value: number | null): string {
  if (value === null) return "–";
  if (claim.startsWith("memory")) return bytes(value);
  if (claim === "placement") return counted(value, "op");
  return claim === "outputs" ? value ? `${value.toExponential(1)} off` : "equal" : seconds(value);
}
