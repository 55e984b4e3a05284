// What each device holds over time, against what it has.

import { paint } from "./colours";
import { h, section } from "./dom";
import { bytes, share } from "./format";
import type { State } from "./state";
import { AXIS, TimeCanvas } from "./timecanvas";

const LANE = 64;
const GAP = 14;
const LINE = 20; // of text above a lane, where there is no room beside it
const FAR = 0.2;

export function memory(state: State): HTMLElement {
  const used = () => state.plan.devices.map((device, i) => ({ device, i })).filter(({ device }) => device.peak > 0);
  // Limits far above all curves would press them flat: then their lines are broken, and each curve has half its lane.
  const far = () => used().every(({ device }) => device.memory !== null && device.peak < FAR * device.memory);
  const above = () => (canvas.narrow ? LINE : 0);
  const pipelined = state.plan.objective === "throughput";

  function draw(on: TimeCanvas): void {
    const { ctx, colours, width, gutter } = on;
    const broken = far();
    used().forEach(({ device, i }, row) => {
      const top = AXIS + 6 + row * (above() + LANE + GAP) + above();
      const bottom = top + LANE;
      const most = broken ? device.peak / 0.55 : (device.memory ?? device.peak);
      const y = (held: number) => bottom - (LANE - 6) * Math.min(1.05, most > 0 ? held / most : 0);
      const { colour } = paint(device.name);
      const limit = device.memory === null ? "" : `${share(device.peak / device.memory)} of ${bytes(device.memory)}`;
      if (on.narrow) on.label(device.name, top - LINE / 2, true, `up to ${bytes(device.peak)}${limit && `, ${limit}`}`);
      else [device.name, `up to ${bytes(device.peak)}`, limit].forEach((text, k) => on.label(text, top + 14 + 17 * k, k === 0));
      ctx.globalAlpha = 0.07;
      ctx.fillStyle = colours.ink;
      ctx.fillRect(gutter, y(most), width - gutter, bottom - y(most));
      ctx.globalAlpha = 1;
      ctx.save();
      ctx.beginPath();
      ctx.rect(gutter, top - 4, width - gutter, LANE + 8);
      ctx.clip();
      const { times, bytes: held } = state.plan.memory[i];
      const first = lastBefore(times, state.from);
      const line = new Path2D();
      line.moveTo(on.x(times[first]), y(held[first]));
      let end = on.x(state.plan.makespan);
      for (let k = first; k < times.length && times[k] <= state.to; k++) {
        line.lineTo(on.x(times[k]), y(held[k]));
        line.lineTo(Math.min(k + 1 < times.length ? on.x(times[k + 1]) : end, width + 9), y(held[k]));
      }
      end = Math.min(Math.max(end, gutter), width + 9);
      const area = new Path2D(line);
      area.lineTo(end, bottom);
      area.lineTo(Math.min(on.x(times[first]), gutter), bottom);
      ctx.fillStyle = colour;
      ctx.globalAlpha = 0.3;
      ctx.fill(area);
      ctx.globalAlpha = 1;
      ctx.strokeStyle = colour;
      ctx.lineWidth = 1.5;
      ctx.stroke(line);
      if (device.memory !== null) {
        ctx.strokeStyle = colours.ink;
        ctx.lineWidth = 1;
        ctx.setLineDash(broken ? [3, 5] : []);
        ctx.beginPath();
        ctx.moveTo(gutter, Math.round(y(most)) - 0.5);
        ctx.lineTo(width, Math.round(y(most)) - 0.5);
        ctx.stroke();
        ctx.setLineDash([]);
      }
      if (pipelined) {
        ctx.strokeStyle = colour;
        ctx.setLineDash([6, 4]);
        ctx.beginPath();
        ctx.moveTo(gutter, y(device.peak));
        ctx.lineTo(width, y(device.peak));
        ctx.stroke();
        ctx.setLineDash([]);
      }
      ctx.restore();
      if (state.at !== null) pointed(on, state.at, held[lastBefore(times, state.at)], top, bottom);
    });
  }

  /** What a device holds at the time that is pointed at, here or in the timeline. */
  function pointed(on: TimeCanvas, time: number, held: number, top: number, bottom: number): void {
    const { ctx, colours, width, gutter } = on;
    const x = Math.round(on.x(time)) + 0.5;
    if (x < gutter || x > width || time > state.plan.makespan) return;
    ctx.strokeStyle = colours.ink;
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
    const text = bytes(held);
    const wide = ctx.measureText(text).width + 8;
    const left = x + wide + 3 > width ? x - wide - 3 : x + 3;
    ctx.fillStyle = colours.ink;
    ctx.fillRect(left, top + 2, wide, 17);
    ctx.fillStyle = colours.panel;
    ctx.textAlign = "left";
    ctx.fillText(text, left + 4, top + 11);
  }

  function label(): string {
    const facts = used().map(({ device }) => `${device.name} holds up to ${bytes(device.peak)} of ${bytes(device.memory)}`);
    return `Memory over time: ${facts.join(", ")}.`;
  }

  const canvas = new TimeCanvas(state, label, draw, () => AXIS + 6 + used().length * (above() + LANE + GAP));
  state.on(["at"], () => canvas.soon());
  const nothing = h("p", { class: "about" }, "No op of this plan has a size.");
  const over = h("div", { class: "over panel" }, canvas.canvas);
  const about = h("p", { class: "about" });
  const choose = () => {
    nothing.hidden = used().length > 0;
    over.hidden = !nothing.hidden;
    about.textContent =
      "Bytes that each device holds, over the same time as above; " +
      (far() ? "the broken line stands for what it has, which is far above: each curve has a scale of its own." : "the line at the top is what it has.") +
      (pipelined ? " The curve is that of one sample; the dashed line is what counts, with the pipeline full." : "");
  };
  state.on(["plan"], choose);
  choose();
  return section("memory", "Memory", null, about, over, nothing);
}

/** The place of the last of growing times that is not after `time`. */
function lastBefore(times: Float64Array, time: number): number {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}
