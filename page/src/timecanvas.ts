// A canvas over the time axis that all such canvases of the page share: drag, pinch, wheel and keys move and zoom it.

import { theme } from "./colours";
import { h } from "./dom";
import { tick, ticks } from "./format";
import type { State } from "./state";

export const PAPER = 960; // pixels across a printed page, which lies on its side
export const PAPER_TALL = 550; // and down, below a heading
export const AXIS = 26; // pixels above the first lane

export class TimeCanvas {
  readonly canvas: HTMLCanvasElement;
  readonly ctx: CanvasRenderingContext2D;
  width = 0;
  height = 0;
  gutter = 0;
  narrow = false; // as on a phone
  colours = theme();
  private waiting = false;
  private pointers = new Map<number, number>();
  private dragged = false;

  constructor(
    readonly state: State,
    private describe: () => string,
    private drawLanes: (on: TimeCanvas) => void,
    private arrange: () => number, // the lanes of the plan that is shown; gives the height
  ) {
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": describe() });
    this.ctx = this.canvas.getContext("2d")!;
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    state.on(["view"], () => this.soon());
    state.on(["plan"], () => this.resize());
    state.on(["theme"], () => {
      this.colours = theme();
      this.canvas.style.width = state.printing ? `${PAPER}px` : ""; // paper waits for no frame
      this.resize();
    });
  }

  x(time: number): number {
    return this.gutter + ((time - this.state.from) / (this.state.to - this.state.from)) * (this.width - this.gutter);
  }

  time(x: number): number {
    return this.state.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.state.to - this.state.from);
  }

  resize(): void {
    const wide = this.canvas.clientWidth;
    if (!wide) return;
    const ratio = Math.max(window.devicePixelRatio, this.state.printing ? 2 : 1);
    this.width = wide;
    this.narrow = wide < 560;
    this.gutter = this.narrow ? 84 : 126;
    this.height = this.arrange();
    this.canvas.setAttribute("aria-label", this.describe());
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(wide * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  /** Before the next frame, once however often it is asked for. */
  soon(): void {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw(): void {
    if (!this.width) return;
    const { ctx, colours } = this;
    ctx.clearRect(0, 0, this.width, this.height);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const wanted = (this.width - this.gutter) / (this.narrow ? 60 : 90);
    ctx.strokeStyle = colours.line;
    ctx.fillStyle = colours.soft;
    ctx.lineWidth = 1;
    ctx.textAlign = "center";
    for (const at of ticks(this.state.from, this.state.to, wanted)) {
      const x = Math.round(this.x(at)) + 0.5;
      if (x < this.gutter - 1) continue;
      ctx.beginPath();
      ctx.moveTo(x, AXIS - 4);
      ctx.lineTo(x, this.height);
      ctx.stroke();
      const text = tick(at, this.state.to);
      const half = ctx.measureText(text).width / 2;
      ctx.fillText(text, Math.min(Math.max(x, this.gutter + half), this.width - half - 1), AXIS / 2 - 2);
    }
    this.drawLanes(this);
  }

  /** Text in the room left of the lanes; with `more` beside it, across the whole width. */
  label(text: string, y: number, strong = true, more = ""): void {
    const { ctx } = this;
    ctx.textAlign = "left";
    if (more) {
      ctx.fillStyle = this.colours.panel;
      ctx.fillRect(0, y - 9, this.width, 18); // no line of the axis crosses it
    }
    ctx.fillStyle = strong ? this.colours.ink : this.colours.soft;
    ctx.font = `${strong ? 600 : 400} 12px system-ui, sans-serif`;
    const name = shortened(ctx, text, more ? this.width / 3 : this.gutter - 12);
    ctx.fillText(name, 2, y);
    const from = 12 + ctx.measureText(name).width;
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = this.colours.soft;
    if (more) ctx.fillText(shortened(ctx, more, this.width - from), from, y);
  }

  private listen(): void {
    const { canvas, state } = this;
    canvas.addEventListener("pointermove", (event) => state.point(event.offsetX < this.gutter ? null : this.time(event.offsetX)));
    canvas.addEventListener("pointerleave", () => state.point(null));
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, event.offsetX);
      this.dragged = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = this.pointers.get(event.pointerId);
      if (before === undefined) return;
      const moved = event.offsetX - before;
      if (Math.abs(moved) < (this.dragged ? 1 : 4)) return;
      if (!this.dragged) canvas.setPointerCapture(event.pointerId);
      this.dragged = true;
      if (this.pointers.size === 1) {
        const shift = (moved / (this.width - this.gutter)) * (state.to - state.from);
        state.look(state.from - shift, state.to - shift);
      } else {
        const still = [...this.pointers].find(([id]) => id !== event.pointerId)![1];
        const apart = Math.max(8, Math.abs(event.offsetX - still));
        state.zoom(Math.max(8, Math.abs(before - still)) / apart, this.time(still));
      }
      this.pointers.set(event.pointerId, event.offsetX);
    });
    for (const name of ["pointerup", "pointercancel"] as const) {
      canvas.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    canvas.addEventListener("click", (event) => this.dragged && event.stopImmediatePropagation());
    canvas.addEventListener(
      "wheel",
      (event) => {
        const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
        if (event.ctrlKey || event.metaKey) {
          state.zoom(Math.exp(event.deltaY * 0.004), this.time(event.offsetX));
        } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
          const shift = (sideways / this.width) * (state.to - state.from);
          state.look(state.from + shift, state.to + shift);
        } else return; // the page scrolls
        event.preventDefault();
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const width = state.to - state.from;
      const middle = state.from + width / 2;
      if (event.key === "+" || event.key === "=") state.zoom(0.5, middle);
      else if (event.key === "-") state.zoom(2, middle);
      else if (event.key === "0") state.look(0, state.end);
      else if (event.key === "ArrowLeft" && event.shiftKey) state.look(state.from - width / 4, state.to - width / 4);
      else if (event.key === "ArrowRight" && event.shiftKey) state.look(state.from + width / 4, state.to + width / 4);
      else return;
      event.preventDefault();
    });
  }
}

/** What is too long loses its middle: names often differ at their ends only. */
export function shortened(ctx: CanvasRenderingContext2D, text: string, room: number): string {
  if (ctx.measureText(text).width <= room) return text;
  for (let kept = Math.min(text.length - 1, Math.floor(room / 3)); kept > 1; kept--) {
    const cut = `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
    if (ctx.measureText(cut).width <= room) return cut;
  }
  return "";
}
