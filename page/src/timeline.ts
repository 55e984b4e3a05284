// Devices and channels over time. A slice that is thinner than a pixel adds to the shade of that pixel.

import { canvasFill, paint } from "./colours";
import type { Plan } from "./data";
import { button, h, key, section } from "./dom";
import { bytes, count, counted, seconds } from "./format";
import { modulePath } from "./modules";
import { Names } from "./names";
import { type State, boundInTime, unlike, whyNot } from "./state";
import { AXIS, PAPER_TALL, TimeCanvas, shortened } from "./timecanvas";

const DEVICE = 36; // pixels, with the gap below
const CHANNEL = 18;
const TITLE = 28;
const FOOT = 22; // for what the lines at the bound and at the end say
const CHANNELS_AT_FIRST = 6;
const FEW_DEVICES = 6; // of more, idle ones have no lane
const MODELS = 6; // whose ends are marked
const SHADES = 8;
const WAITS = 2; // the kinds of the chain's steps from here on

interface Lane {
  plan: Plan;
  lane: number; // as slices number it
  name: string;
  device: boolean;
  y: number;
  tall: number;
  first: number; // slices
  last: number;
}

/** The lanes of a plan, and room below them. */
interface Block {
  plan: Plan;
  top: number;
  bottom: number;
}

interface Hit {
  lane: Lane;
  slice: number;
}

export interface TimelineView {
  element: HTMLElement;
  reveal(item: number): boolean; // whether it has a slice
}

export function timeline(state: State, jump: (item: number) => void): TimelineView {
  let lanes: Lane[] = [];
  let blocks: Block[] = [];
  let titles: { text: string; y: number }[] = [];
  let notes: { text: string; y: number }[] = []; // beside the lanes
  let height = 0;
  let allChannels = false;
  let cursor: Hit | null = null; // of the keyboard
  let pointed: Hit | null = null; // by the mouse
  let moved: Uint8Array | null = null;
  const tip = h("div", { class: "tip", hidden: true });
  const said = h("p", { class: "unseen", "aria-live": "polite" });
  const legend = h("p", { class: "legend" });
  const more = button("", "Show more or fewer channels", () => {
    allChannels = !allChannels;
    canvas.resize();
  });

  /** On paper as low as a page is. */
  function arrange(): number {
    const natural = lay(1);
    return state.printing && natural > PAPER_TALL ? lay(PAPER_TALL / natural) : natural;
  }

  function lay(part: number): number {
    const [deviceTall, channelTall] = [DEVICE, CHANNEL].map((tall) => Math.max(CHANNEL / 2, Math.floor(part * tall)));
    lanes = [];
    blocks = [];
    titles = [];
    notes = [];
    let y = AXIS + 4;
    let hidden = 0;
    for (const plan of [state.plan, state.rival]) {
      if (!plan) continue;
      if (state.rival) {
        titles.push({ text: `${plan.title} · ${seconds(plan.value)}${plan.objective === "throughput" ? " per sample; one sample's way is shown" : ""}`, y: y + TITLE / 2 });
        y += TITLE;
      }
      const top = y - 4;
      const ranges = laneRanges(plan);
      const busiest = plan.channels.map((channel, i) => [channel.busy, i]).sort((a, b) => b[0] - a[0]);
      const kept = new Set(busiest.slice(0, allChannels ? 400 : CHANNELS_AT_FIRST).map(([, i]) => plan.devices.length + i));
      hidden += Math.max(0, busiest.length - CHANNELS_AT_FIRST);
      const names = [...plan.devices.map((d) => d.name), ...plan.channels.map((c) => c.name)];
      const idle = plan.devices.map((_, lane) => plan.devices.length > FEW_DEVICES && ranges[lane] === ranges[lane + 1]);
      const hiddenDevices = idle.filter(Boolean).length;
      names.forEach((name, lane) => {
        const device = lane < plan.devices.length;
        if (!idle[lane] && (device || kept.has(lane))) {
          const tall = device ? deviceTall : channelTall;
          lanes.push({ plan, lane, name, device, y, tall: tall - 4, first: ranges[lane], last: ranges[lane + 1] });
          y += tall;
        }
        if (hiddenDevices && lane === plan.devices.length - 1) {
          notes.push({ text: counted(hiddenDevices, "idle device"), y: y + CHANNEL / 2 - 2 });
          y += CHANNEL;
        }
      });
      y += 8 + FOOT;
      blocks.push({ plan, top, bottom: y });
      if (state.rival) y += 10;
    }
    height = y;
    more.hidden = hidden === 0;
    more.textContent = allChannels ? "Fewer channels" : `${count(hidden)} more channels`;
    moved = state.moved();
    cursor = pointed = null;
    legend.replaceChildren(
      ...(state.plan.chain.kind.length ? [key("critical path", { class: "chain" })] : []),
      ...(state.plan.chain.kind.some((kind) => kind >= WAITS) ? [key("waits on it", { class: "chain waits" })] : []),
      ...(boundInTime(state.plan) === null ? [] : [key("lower bound", { class: "bound" })]),
      ...(moved ? [key("on another device in the other plan", { class: "moved" })] : []),
    );
    return height;
  }

  function label(): string {
    const { title, devices, makespan } = state.plan;
    return (
      `Timeline of ${title}: ${devices.length} devices over ${seconds(makespan)}. ` +
      "Arrow keys go from op to op, plus and minus zoom, shift and arrows move, Enter shows the op in the graph."
    );
  }

  // ---- drawing

  function draw(on: TimeCanvas): void {
    const { ctx, colours, width, gutter } = on;
    for (const { text, y } of titles) {
      ctx.textAlign = "left";
      ctx.fillStyle = colours.ink;
      ctx.font = "600 13px system-ui, sans-serif";
      ctx.fillText(shortened(ctx, text, width), 2, y);
    }
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = colours.soft;
    ctx.textAlign = "left";
    for (const { text, y } of notes) ctx.fillText(text, 2, y);
    for (const lane of lanes) on.label(lane.name, lane.y + lane.tall / 2, lane.device);
    ctx.save();
    ctx.beginPath();
    ctx.rect(gutter, AXIS - 4, width - gutter, height);
    ctx.clip();
    for (const lane of lanes) drawLane(on, lane);
    drawChain(on);
    drawEnds(on);
    if (pointed) outline(on, pointed, 1);
    if (cursor) outline(on, cursor, 2);
    ctx.restore();
  }

  function outline(on: TimeCanvas, { lane, slice }: Hit, thick: number): void {
    const { ctx, colours } = on;
    const { start, length } = lane.plan.slices;
    const x = Math.max(on.x(start[slice]), on.gutter - 9); // far ends are not seen, and some browsers cannot draw them
    const end = Math.min(on.x(start[slice] + length[slice]), on.width + 9);
    const wide = Math.max(3, end - x) + 2;
    // Light around dark: it shows on any colour.
    for (const [colour, width] of [[colours.panel, thick + 3], [colours.ink, thick]] as const) {
      ctx.strokeStyle = colour;
      ctx.lineWidth = width;
      ctx.strokeRect(x - 1, lane.y - 2, wide, lane.tall + 4);
    }
  }

  function drawLane(on: TimeCanvas, lane: Lane): void {
    const { ctx, colours } = on;
    const { start, length, busy, item } = lane.plan.slices;
    const reach = reaches(lane.plan);
    const { from, to } = state;
    const scale = (on.width - on.gutter) / (to - from);
    const mark = moved;
    const { y, tall } = lane;
    const style = lane.device ? paint(lane.name) : null;
    const fill = lane.device ? canvasFill(ctx, lane.name) : colours.channel;
    ctx.globalAlpha = 0.07;
    ctx.fillStyle = colours.ink;
    ctx.fillRect(on.gutter, y, on.width - on.gutter, tall);
    ctx.fillStyle = fill;
    const names = style?.pattern === 0 ? new Names(state.page.graphs[lane.plan.graph], on.gutter, on.width) : null;
    let runFrom = 0, runTo = 0, runShade = 0, pixel = -1, cover = 0; // thin slices, as columns of one shade
    let markFrom = -1, markTo = -1;
    const columns = () => {
      if (runShade > 0 && runTo > runFrom) {
        ctx.globalAlpha = 0.25 + (0.75 * runShade) / SHADES;
        ctx.fillRect(runFrom, y, runTo - runFrom, tall);
      }
    };
    const flush = () => {
      if (pixel < 0) return;
      const shade = Math.max(1, Math.min(SHADES, Math.round(cover * SHADES)));
      if (shade === runShade && runTo === pixel) runTo = pixel + 1;
      else {
        columns();
        (runFrom = pixel), (runTo = pixel + 1), (runShade = shade);
      }
      pixel = -1;
    };
    const band = () => {
      if (markFrom < 0) return;
      ctx.globalAlpha = 1;
      ctx.fillStyle = colours.moved;
      ctx.fillRect(markFrom, y - 2, Math.max(1, markTo - markFrom), 4);
      ctx.fillStyle = fill;
    };
    for (let i = firstReaching(reach, lane.first, lane.last, from); i < lane.last; i++) {
      const at = start[i];
      if (at > to) break;
      const x = on.gutter + (at - from) * scale;
      const wide = length[i] * scale;
      if (wide < 1.5) {
        const column = Math.floor(x);
        if (column !== pixel) {
          flush();
          (pixel = column), (cover = 0);
        }
        cover += busy[i] * scale;
      } else {
        flush();
        columns();
        runShade = 0;
        const left = Math.max(x, on.gutter - 4);
        const right = Math.min(x + wide, on.width + 4);
        ctx.globalAlpha = Math.max(0.3, Math.min(1, busy[i] / length[i]));
        ctx.fillRect(left, y, right - left - (wide > 4 ? 1 : 0), tall);
      }
      names?.add(item[i], x, x + wide);
      if (mark && mark[item[i]] && lane.device) {
        if (x > markTo + 1) {
          band();
          markFrom = x;
        }
        markTo = Math.max(markTo, x + wide);
      }
    }
    flush();
    columns();
    band();
    ctx.globalAlpha = 1;
    if (!names) return;
    ctx.fillStyle = style!.ink;
    ctx.textAlign = "left";
    // A rim in the colour of the lane: text stays readable across gaps.
    ctx.strokeStyle = style!.colour;
    ctx.lineWidth = 4;
    ctx.lineJoin = "round";
    names.draw((text, from) => {
      ctx.strokeText(text, from, y + tall / 2);
      ctx.fillText(text, from, y + tall / 2);
    });
  }

  function drawChain(on: TimeCanvas): void {
    const { ctx } = on;
    for (const plan of new Set(lanes.map((lane) => lane.plan))) {
      const { kind, lane, start, length } = plan.chain;
      const yOf = new Map(lanes.filter((one) => one.plan === plan).map((one) => [one.lane, one.y + one.tall]));
      ctx.fillStyle = on.colours.ink;
      let drawnTo = -1, drawnY = -1;
      for (let i = 0; i < kind.length; i++) {
        if (start[i] + length[i] < state.from || start[i] > state.to) continue;
        const y = yOf.get(lane[i]);
        if (y === undefined) continue;
        const x = on.x(start[i]);
        const end = Math.max(x + 1, on.x(start[i] + length[i]));
        if (y === drawnY && end <= drawnTo) continue; // a pixel is drawn once
        ctx.globalAlpha = kind[i] < WAITS ? 1 : 0.4; // waits are pale
        ctx.fillRect(x, y - 2, end - x, 3);
        (drawnTo = end), (drawnY = y);
      }
      ctx.globalAlpha = 1;
    }
  }

  function drawEnds(on: TimeCanvas): void {
    for (const block of blocks) {
      const { plan } = block;
      const ends = [...plan.ends].sort((a, b) => b[1] - a[1]).slice(0, MODELS).map(([name, time]): [number, string, string] => [time, `${name} ends`, on.colours.ink]);
      if (!ends.length) ends.push([plan.makespan, "ends", on.colours.ink]);
      const bound = boundInTime(plan);
      if (bound !== null) ends.push([bound, "bound", on.colours.bound]);
      const seen = ends.filter(([time]) => on.x(time) > on.gutter - 1 && on.x(time) < on.width + 1);
      for (const [time, , colour] of seen) line(on, block, time, colour);
      let room = on.width;
      for (const [time, what, colour] of seen) room = flag(on, block, time, `${what} ${seconds(time)}`, colour, room);
    }
  }

  function line(on: TimeCanvas, { top, bottom }: Block, time: number, colour: string): void {
    const { ctx } = on;
    const x = Math.round(on.x(time)) + 0.5;
    const dashed = colour === on.colours.bound;
    ctx.strokeStyle = colour;
    ctx.lineWidth = dashed ? 2 : 1;
    ctx.setLineDash(dashed ? [6, 4] : []);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /** What a line is, at its foot and before `room`, unless that is too little; gives where the text begins. */
  function flag(on: TimeCanvas, { bottom }: Block, time: number, text: string, colour: string, room: number): number {
    const { ctx } = on;
    const x = on.x(time);
    ctx.font = "600 12px system-ui, sans-serif";
    const wide = ctx.measureText(text).width + 10;
    const left = Math.max(on.gutter, x + wide <= room ? x : Math.min(x, room - 1) - wide);
    if (left + wide > room) return room;
    ctx.fillStyle = colour;
    ctx.fillRect(left, bottom - 19, wide, 18);
    ctx.fillStyle = on.colours.panel;
    ctx.textAlign = "left";
    ctx.fillText(text, left + 5, bottom - 9.5);
    ctx.font = "12px system-ui, sans-serif";
    return left;
  }

  // ---- looking things up

  function hitAt(x: number, y: number): Hit | null {
    const lane = lanes.find((one) => y >= one.y - 2 && y < one.y + one.tall + 2);
    if (!lane || x < canvas.gutter) return null;
    const { start, length } = lane.plan.slices;
    const time = canvas.time(x);
    const near = canvas.time(x + 3) - time; // thin slices are hard to hit
    let best = -1, off = near;
    for (let i = firstReaching(reaches(lane.plan), lane.first, lane.last, time - near); i < lane.last && start[i] <= time + near; i++) {
      const apart = Math.max(0, start[i] - time, time - start[i] - length[i]);
      if (apart < off || (apart === 0 && best < 0)) (best = i), (off = apart);
      if (apart === 0) break;
    }
    return best < 0 ? null : { lane, slice: best };
  }

  function describe({ lane, slice }: Hit): [string, string][] {
    const plan = lane.plan;
    const graph = state.page.graphs[plan.graph];
    const { start, length, busy, item, reader, target, bytes: sizes, count: joined } = plan.slices;
    const op = item[slice];
    const many = joined[slice] > 1 ? ` and ${count(joined[slice] - 1)} more` : "";
    const rows: [string, string][] = [];
    if (lane.device) {
      rows.push(["op", graph.names[op] + many]);
      rows.push(["module", modulePath(graph.paths, graph.parent, graph.node[op]) || "none"], ["kind", graph.kinds[graph.kind[op]]]);
    } else {
      rows.push(["output of", graph.names[op] + many], ["for", `${graph.names[reader[slice]]} on ${plan.devices[target[slice]].name}`]);
    }
    rows.push([lane.device ? "device" : "channel", lane.name]);
    rows.push(["from", seconds(start[slice])], ["takes", seconds(many ? busy[slice] : length[slice])]);
    rows.push(["bytes", lane.device ? `${bytes(graph.bytes[op])} made${graph.resident[op] ? `, ${bytes(graph.resident[op])} kept` : ""}` : bytes(sizes[slice])]);
    if (lane.device) rows.push(["cost", state.page.labels[plan.label[op]]]);
    if (lane.device && moved?.[op]) {
      const there = plan === state.plan ? state.other! : state.plan;
      rows.push(["other plan", there.devices[there.device[op]].name]);
    }
    return rows;
  }

  function showTip(hit: Hit | null, x: number, y: number): void {
    tip.hidden = !hit;
    if (!hit) return;
    tip.replaceChildren(...describe(hit).map(([name, value]) => h("div", {}, h("b", {}, name), h("span", {}, value))));
    const room = canvas.width;
    tip.style.left = "0"; // all the room there is, to tell how wide it gets
    tip.style.maxWidth = `${Math.min(380, room - 8)}px`;
    const wide = tip.offsetWidth;
    tip.style.left = `${Math.max(4, Math.min(x + 14, room - wide - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  function go(hit: Hit): void {
    showTip(null, 0, 0);
    if (hit.lane.plan !== state.plan) state.show(state.beside!, state.shown);
    jump(hit.lane.plan.slices.item[hit.slice]);
  }

  // ---- hands

  function point(hit: Hit | null): void {
    if (hit?.slice !== pointed?.slice || hit?.lane !== pointed?.lane) canvas.soon();
    pointed = hit;
  }

  const canvas = new TimeCanvas(state, label, draw, arrange);
  canvas.canvas.addEventListener("pointermove", (event) => {
    point(hitAt(event.offsetX, event.offsetY));
    canvas.canvas.style.cursor = pointed ? "pointer" : "grab";
    if (event.pointerType === "mouse") showTip(event.buttons ? null : pointed, event.offsetX, event.offsetY);
  });
  canvas.canvas.addEventListener("pointerleave", (event) => {
    point(null);
    if (event.pointerType === "mouse") showTip(null, 0, 0);
  });
  canvas.canvas.addEventListener("click", (event) => {
    const touched = (event as PointerEvent).pointerType === "touch";
    const hit = touched ? hitAt(event.offsetX, event.offsetY) : pointed; // a click knows whole pixels only
    if (hit && (!touched || (cursor && cursor.slice === hit.slice && cursor.lane === hit.lane))) return go(hit);
    cursor = hit; // a finger shows first, and goes at the second tap
    showTip(hit, event.offsetX, event.offsetY);
    canvas.soon();
  });
  canvas.canvas.addEventListener("keydown", (event) => {
    if (event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 }[event.key];
    if (event.key === "Enter" && cursor) go(cursor);
    else if (event.key === "Escape") cursor = null;
    else if (step === undefined) return;
    else if (step === 0 || !cursor) cursor = toLane(event.key === "ArrowUp" ? -1 : cursor ? 1 : 0);
    else cursor = { lane: cursor.lane, slice: Math.min(Math.max(cursor.slice + step, cursor.lane.first), cursor.lane.last - 1) };
    event.preventDefault();
    follow();
  });
  canvas.canvas.addEventListener("blur", () => {
    state.point(null);
    showTip(null, 0, 0);
  });

  function toLane(step: number): Hit | null {
    const used = lanes.filter((lane) => lane.last > lane.first);
    if (!used.length) return null;
    const at = cursor ? used.indexOf(cursor.lane) : 0;
    const lane = used[Math.min(Math.max(at + step, 0), used.length - 1)];
    const time = cursor ? cursor.lane.plan.slices.start[cursor.slice] : state.from;
    const slice = Math.min(firstReaching(reaches(lane.plan), lane.first, lane.last, time), lane.last - 1);
    return { lane, slice };
  }

  function follow(): void {
    if (cursor) {
      const from = cursor.lane.plan.slices.start[cursor.slice];
      const width = state.to - state.from;
      if (from < state.from || from > state.to) state.look(from - width / 2, from + width / 2);
      showTip(cursor, canvas.x(from), cursor.lane.y + cursor.lane.tall);
      state.point(from);
      said.textContent = describe(cursor).map(([name, value]) => `${name} ${value}`).join(", ");
    } else {
      state.point(null);
      showTip(null, 0, 0);
    }
    canvas.soon();
  }

  const middle = () => (state.from + state.to) / 2;
  const tools = h(
    "div", { class: "tools", role: "group", "aria-label": "Zoom" },
    button("−", "Zoom out", () => state.zoom(2, middle())),
    button("+", "Zoom in", () => state.zoom(0.5, middle())),
    button("Whole run", "Show the whole run", () => state.look(0, state.end)),
    more,
  );
  const touched = matchMedia("(hover: none)").matches;
  const hands = `Drag to pan, ${touched ? "pinch to zoom, tap an op twice" : "pinch or Ctrl-scroll to zoom, click an op"} to find it in the graph.`;
  const about = h("p", { class: "about" });
  const tell = () => {
    const sample = state.plan.objective === "throughput" ? " It follows one sample through the pipeline." : "";
    const apart = state.other && !state.rival ? ` ${state.other.title} is not shown with it: ${whyNot(unlike(state.plan, state.other))}.` : "";
    about.replaceChildren(`What each device and channel does over time.${sample}`, h("span", { class: "hands" }, ` ${hands}`), apart);
    element.hidden = !(state.plan.makespan > 0);
  };
  const element = section(
    "timeline", "Timeline", null, about,
    h("div", { class: "bar" }, tools, legend),
    h("div", { class: "over panel" }, canvas.canvas, tip),
    said,
  );
  state.on(["plan"], tell);
  tell();
  return {
    element,
    reveal(item) {
      // Where it runs; of what is stored, where it is first moved to.
      const lane = lanes.find((one) => one.plan === state.plan && sliceOf(one, item) >= 0);
      if (!lane) return false;
      cursor = { lane, slice: sliceOf(lane, item) };
      const { start, length } = state.plan.slices;
      const [from, wide] = [start[cursor.slice], length[cursor.slice]];
      state.look(from - 10 * wide, from + 11 * wide);
      element.scrollIntoView();
      canvas.canvas.focus({ preventScroll: true });
      follow();
      return true;
    },
  };
}

function sliceOf({ plan, first, last }: Lane, item: number): number {
  for (let i = first; i < last; i++) if (plan.slices.item[i] === item) return i;
  return -1;
}

/** [lanes + 1] where the slices of each lane begin. */
function laneRanges(plan: Plan): Uint32Array {
  const ranges = new Uint32Array(plan.devices.length + plan.channels.length + 1);
  for (const lane of plan.slices.lane) ranges[lane + 1]++;
  for (let i = 1; i < ranges.length; i++) ranges[i] += ranges[i - 1];
  return ranges;
}

const known = new WeakMap<Plan, Float64Array>();

/** The latest end among the slices of a lane so far, which grows along the lane. */
function reaches(plan: Plan): Float64Array {
  let found = known.get(plan);
  if (!found) {
    const { lane, start, length } = plan.slices;
    found = new Float64Array(lane.length);
    for (let i = 0; i < lane.length; i++) {
      const end = start[i] + length[i];
      found[i] = i && lane[i] === lane[i - 1] ? Math.max(found[i - 1], end) : end;
    }
    known.set(plan, found);
  }
  return found;
}

function firstReaching(reach: Float64Array, low: number, high: number, time: number): number {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reach[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

