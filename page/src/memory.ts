// What each device holds over time, against what it has.

import { paint } from "./colours";
import { h, section } from "./dom";
import { bytes, share } from "./format";
import type { State } from "./state";
import { AXIS, PAPER_TALL, TimeCanvas } from "./timecanvas";

const LANE = 64;
const LEAST = 14; // of a lane and its gap, on paper
const GAP = 14;
const LINE = 20; // of text above a lane, where there is no room beside it
const FAR = 0.2;
const LOW = 0.55; // of a lane, where what devices have is far above

export function memory(state: State): HTMLElement {
  const used = () => state.plan.devices.map((device, i) => ({ device, i, beside: heldBeside(device.name) })).filter(({ device }) => device.peak > 0);
  // Limits far above all curves would press them flat: then their lines are broken, and all curves have one scale.
  const far = () => used().every(({ device }) => device.memory !== null && device.peak < FAR * device.memory);
  const most = () => Math.max(...used().map(({ device, beside }) => Math.max(device.peak, beside?.peak ?? 0)));
  const above = () => (canvas.narrow ? LINE : 0);
  // From lane to lane, on paper as low as a page is; and of that, the lane.
  const pitch = () => (state.printing ? Math.min(LANE + GAP, Math.max(LEAST, Math.floor((PAPER_TALL - AXIS) / used().length))) : LANE + GAP);
  const tall = () => pitch() - Math.min(GAP, Math.floor(pitch() / 4));
  const pipelined = () => state.plan.objective === "throughput";

  /** The same device in the other plan. */
  function heldBeside(name: string): { times: Float64Array; held: Float32Array; peak: number } | null {
    const i = state.rival ? state.rival.devices.findIndex((device) => device.name === name) : -1;
    if (i < 0) return null;
    const { times, bytes } = state.rival!.memory[i];
    return { times, held: bytes, peak: bytes.reduce((a, b) => Math.max(a, b), 0) };
  }

  function draw(on: TimeCanvas): void {
    const { ctx, colours, width, gutter } = on;
    const broken = far();
    const lane = tall();
    used().forEach(({ device, i, beside }, row) => {
      const top = AXIS + 6 + row * (above() + pitch()) + above();
      const bottom = top + lane;
      const full = broken ? most() / LOW : (device.memory ?? most());
      const y = (held: number) => bottom - (lane - 6) * Math.min(1.05, full > 0 ? held / full : 0);
      const limit = device.memory === null ? "" : `${share(device.peak / device.memory)} of ${bytes(device.memory)}`;
      const upTo = `up to ${bytes(device.peak)}`;
      if (on.narrow) on.label(device.name, top - LINE / 2, true, `${upTo}${limit && `, ${limit}`}`);
      else [device.name, upTo, limit].slice(0, Math.ceil(lane / 17) - 1 || 1).forEach((text, k) => on.label(text, top + Math.min(14, lane / 2) + 17 * k, k === 0));
      ctx.globalAlpha = 0.07;
      ctx.fillStyle = colours.ink;
      ctx.fillRect(gutter, y(full), width - gutter, bottom - y(full));
      ctx.globalAlpha = 1;
      ctx.save();
      ctx.beginPath();
      ctx.rect(gutter, top - 4, width - gutter, lane + 8);
      ctx.clip();
      const { times, bytes: held } = state.plan.memory[i];
      const line = new Path2D();
      const [from, to] = trace(on, line, times, held, state.plan.makespan, y);
      const area = new Path2D(line);
      area.lineTo(to, bottom);
      area.lineTo(from, bottom);
      ctx.fillStyle = ctx.strokeStyle = paint(device.name).colour;
      ctx.globalAlpha = 0.35;
      ctx.fill(area);
      // Dark below: a pale colour shows on white, too.
      ctx.strokeStyle = colours.ink;
      ctx.lineWidth = 2.5;
      ctx.stroke(line);
      ctx.globalAlpha = 1;
      ctx.strokeStyle = paint(device.name).colour;
      ctx.lineWidth = 1.5;
      ctx.stroke(line);
      ctx.strokeStyle = colours.ink;
      ctx.lineWidth = 1;
      if (beside) {
        const other = new Path2D();
        ctx.setLineDash([1.5, 2.5]);
        trace(on, other, beside.times, beside.held, state.rival!.makespan, y);
        ctx.stroke(other);
        ctx.setLineDash([]);
      }
      if (device.memory !== null) level(on, y(full), broken ? [3, 5] : [], broken ? `limit ${bytes(device.memory)}` : "", bottom, true);
      if (pipelined()) level(on, y(device.peak), [8, 4], "pipeline full", bottom, false);
      ctx.restore();
      if (state.at !== null) pointed(on, state.at, held[lastBefore(times, state.at)], top, bottom);
    });
  }

  /** The steps of a curve, as far as they are seen; gives where they begin and end. */
  function trace(on: TimeCanvas, line: Path2D, times: Float64Array, held: Float32Array, makespan: number, y: (held: number) => number): [number, number] {
    const first = lastBefore(times, state.from);
    const end = Math.min(Math.max(on.x(makespan), on.gutter), on.width + 9);
    line.moveTo(on.x(times[first]), y(held[first]));
    for (let k = first; k < times.length && times[k] <= state.to; k++) {
      line.lineTo(on.x(times[k]), y(held[k]));
      line.lineTo(k + 1 < times.length ? Math.min(on.x(times[k + 1]), on.width + 9) : end, y(held[k]));
    }
    return [Math.min(on.x(times[first]), on.gutter), end];
  }

  /** A line across a lane, and at its end, where there is room, what it is. */
  function level({ ctx, colours, width, gutter }: TimeCanvas, y: number, dashes: number[], text: string, bottom: number, right: boolean): void {
    y = Math.round(y) - 0.5;
    ctx.lineWidth = 1;
    ctx.strokeStyle = colours.ink;
    ctx.setLineDash(dashes);
    ctx.beginPath();
    ctx.moveTo(gutter, y);
    ctx.lineTo(width, y);
    ctx.stroke();
    ctx.setLineDash([]);
    if (!text || tall() < LANE / 2) return;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = right ? "right" : "left";
    ctx.strokeStyle = colours.panel;
    ctx.lineWidth = 3;
    const x = right ? width - 5 : gutter + 5;
    const at = y + 16 < bottom ? y + 10 : y - 8;
    ctx.strokeText(text, x, at);
    ctx.fillStyle = colours.ink;
    ctx.fillText(text, x, at);
    ctx.font = "12px system-ui, sans-serif";
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

  const canvas = new TimeCanvas(state, label, draw, () => AXIS + 6 + used().length * (above() + pitch()));
  state.on(["at"], () => canvas.soon());
  const about = h("p", { class: "about" });
  const element = section("memory", "Memory", null, about, h("div", { class: "over panel" }, canvas.canvas));
  const choose = () => {
    element.hidden = !used().length || !(state.plan.makespan > 0);
    about.textContent =
      "What each device holds, on the time axis of the timeline. " +
      (far() ? "All devices share one scale, since they stay far below their limits." : "The line at the top is its limit.") +
      (pipelined() ? " The curve is for one sample; the limit applies to the full pipeline." : "") +
      (state.rival ? ` The dotted line is ${state.rival.title}.` : "");
  };
  state.on(["plan"], choose);
  choose();
  return element;
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
