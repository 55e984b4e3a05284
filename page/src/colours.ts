// One colour for each device name in all plans, which colour-blind readers can tell apart, too: those of Okabe and Ito,
// but for their black, which is the page's ink; in its place, a violet. From the ninth on they come back with a pattern;
// names are always written beside them.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8833cc"];
const DARK = [0, 5, 7];

export interface Paint {
  colour: string;
  pattern: number; // 0 plain, 1 stripes, 2 the other way, 3 lying
  ink: string; // text on it
}

const order: string[] = [];

export function paint(device: string): Paint {
  let i = order.indexOf(device);
  if (i < 0) i = order.push(device) - 1;
  return { colour: COLOURS[i % 8], pattern: Math.floor(i / 8) % 4, ink: DARK.includes(i % 8) ? "#fff" : "#111" };
}

/** For CSS `background`: the stripes of the canvas. */
export function background(device: string): string {
  const { colour, pattern } = paint(device);
  const angle = [null, "135deg", "45deg", "0deg"][pattern];
  return angle ? `repeating-linear-gradient(${angle}, ${colour} 0 4px, rgba(255,255,255,.45) 4px 6px), ${colour}` : colour;
}

/** For a canvas; patterns are made once. */
export function canvasFill(ctx: CanvasRenderingContext2D, device: string): string | CanvasPattern {
  const { colour, pattern } = paint(device);
  if (pattern === 0) return colour;
  const key = `${colour}${pattern}`;
  if (!patterns.has(key)) patterns.set(key, makePattern(ctx, colour, pattern));
  return patterns.get(key)!;
}

const patterns = new Map<string, CanvasPattern>();

function makePattern(ctx: CanvasRenderingContext2D, colour: string, pattern: number): CanvasPattern {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const on = tile.getContext("2d")!;
  on.fillStyle = colour;
  on.fillRect(0, 0, 8, 8);
  on.strokeStyle = "rgba(255,255,255,.5)";
  on.lineWidth = 2;
  on.beginPath();
  for (const at of [-8, 0, 8]) {
    if (pattern === 1) on.moveTo(at, 8), on.lineTo(at + 8, 0);
    if (pattern === 2) on.moveTo(at, 0), on.lineTo(at + 8, 8);
    if (pattern === 3) on.moveTo(0, at + 4), on.lineTo(8, at + 4);
  }
  on.stroke();
  return ctx.createPattern(tile, "repeat")!;
}

/** The colours of the page itself, as the style sheet has them now. */
export function theme(): Record<"ink" | "soft" | "line" | "panel" | "moved" | "channel" | "bound", string> {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return { ink: read("ink"), soft: read("soft"), line: read("line"), panel: read("panel"), moved: read("moved"), channel: read("channel"), bound: read("bound") };
}
