// Where the boxes of the graph go, and the lines between them: by dataflow, long ones in rows, and without what would
// be a tangle. What flows back, as gradients do, would stretch the band and bend it: it lies on the line that leads the
// other way, or is a tail at either box.

import { Graph as Layout, layout } from "@dagrejs/dagre";

export const WIDE = 168; // of a box
export const TALL = 62;
export const STUB = 17; // of what is said above or below a box in place of its lines
const MARGIN = 26;
const BETWEEN = 46; // ranks, where data flows to the right
const ROWS = 40; // between two, where lines run
const MANY = 8; // lines at one side of a box
const FEW = 3; // lines that lead around to a row, the shortest; others are tails
const TAIL = 14;
const BACK = WIDE / 4; // from the middle of a box

/** What one visible box gives another: bytes that it reads, and those of them that change devices on the way. */
export interface Wire {
  from: number;
  to: number;
  size: number;
  moves: number;
  back?: Wire; // what flows the other way, on the same line
}

interface Point {
  x: number;
  y: number;
}

/** How many boxes have lines to or from one that are not drawn, unless it is chosen. */
export interface Stubs {
  from: number;
  to: number;
}

/** Boxes and lines in one long band, as wide as it comes. */
export interface Band {
  across: boolean; // data flows to the right, rather than down
  centres: Point[];
  lines: { wire: Wire; points: Point[] }[];
  hidden: Wire[]; // drawn where one end is chosen
  back: Wire[]; // against the flow
  stubs: Stubs[];
  width: number;
  height: number;
}

export interface Sheet {
  centres: Point[];
  lines: { wire: Wire; path: string; far?: boolean }[]; // far: its ends only
  width: number;
  height: number;
}

/** Boxes as numbers of their place in the dataflow. */
export function band(ranks: number[], wires: Wire[], across: boolean): Band {
  const boxes = ranks.length;
  const flows = ({ from, to }: Wire) => ranks[from] < ranks[to];
  const returns = new Map(wires.filter((wire) => !flows(wire)).map((wire) => [wire.to * boxes + wire.from, wire]));
  const forward = wires.filter(flows).map((wire) => {
    const key = wire.from * boxes + wire.to;
    const back = returns.get(key);
    returns.delete(key);
    return { ...wire, back };
  });
  const stubs = Array.from({ length: boxes }, (): Stubs => ({ from: 0, to: 0 }));
  for (const { from, to } of [...forward, ...returns.values()]) stubs[from].to++, stubs[to].from++;
  for (const stub of stubs) (stub.to = stub.to > MANY ? stub.to : 0), (stub.from = stub.from > MANY ? stub.from : 0);
  const ofMany = ({ from, to }: Wire) => stubs[from].to > 0 || stubs[to].from > 0;
  const many = forward.filter(ofMany);
  const shown = forward.filter((wire) => !ofMany(wire));
  const back = [...returns.values()].filter((wire) => !ofMany(wire));
  const drawn = new Layout();
  drawn.setGraph({ rankdir: across ? "LR" : "TB", nodesep: 14, ranksep: across ? BETWEEN : 34, marginx: MARGIN, marginy: 16 });
  stubs.forEach(({ from, to }, i) => drawn.setNode(String(i), { width: WIDE, height: TALL + (from || to ? 2 * STUB : 0) }));
  for (const wire of shown) drawn.setEdge(String(wire.from), String(wire.to), { wire });
  // One line of many keeps a box near what it gives to first, or takes from last.
  const near = new Map<number, Wire>();
  for (const wire of many) {
    const box = stubs[wire.to].from ? wire.to : wire.from;
    const closer = (one: Wire) => ranks[wire.to] - ranks[wire.from] < ranks[one.to] - ranks[one.from];
    if (!near.has(box) || closer(near.get(box)!)) near.set(box, wire);
  }
  for (const { from, to } of near.values()) drawn.setEdge(String(from), String(to), {});
  if (boxes) layout(drawn);
  const { width = 0, height = 0 } = drawn.graph() as { width?: number; height?: number };
  return {
    across, back, stubs, width, height,
    hidden: [...many, ...[...returns.values()].filter(ofMany)],
    centres: stubs.map((_, i) => drawn.node(String(i)) as Point),
    lines: drawn.edges().map((edge) => drawn.edge(edge) as unknown as { wire: Wire; points: Point[] }).filter(({ wire }) => wire),
  };
}

/** The band, or where it is longer than there is room, pieces of it as rows, one below the other like those of a text. */
export function rows(laid: Band, room: number): Sheet {
  const { centres, lines, width, height } = laid;
  const half = WIDE / 2;
  if (!laid.across || width <= room) {
    return { centres, width, height, lines: [...lines.map(({ wire, points }) => ({ wire, path: curve(points) })), ...laid.back.map((wire) => tails(wire, centres, false))] };
  }
  const row = new Int32Array(centres.length);
  const shift: Point[] = []; // of each row
  const order = [...centres.keys()].sort((a, b) => centres[a].x - centres[b].x);
  for (const i of order) {
    const start = shift.length ? -shift[shift.length - 1].x + MARGIN : 0;
    const ends = centres[i].x + half - start + MARGIN;
    if (!shift.length || ends > Math.max(room, WIDE + 2 * MARGIN)) shift.push({ x: MARGIN - (centres[i].x - half), y: 0 });
    row[i] = shift.length - 1;
  }
  const top = shift.map(() => Infinity);
  const bottom = shift.map(() => -Infinity);
  const reach = (r: number, low: number, high: number) => ((top[r] = Math.min(top[r], low)), (bottom[r] = Math.max(bottom[r], high)));
  centres.forEach(({ y }, i) => {
    const tall = TALL / 2 + (laid.stubs[i].from || laid.stubs[i].to ? STUB : 0);
    reach(row[i], y - tall, y + tall);
  });
  for (const { wire, points } of lines) if (row[wire.from] === row[wire.to]) for (const { y } of points) reach(row[wire.from], y, y);
  let y = 0;
  shift.forEach((one, r) => {
    y += r ? ROWS : 16;
    one.y = y - top[r];
    y += bottom[r] - top[r];
  });
  const moved = centres.map((at, i) => ({ x: at.x + shift[row[i]].x, y: at.y + shift[row[i]].y }));
  const used = new Map<number, number>(); // lines that run above each row
  const apart = ({ wire: { from, to } }: (typeof lines)[number]) => centres[to].x - centres[from].x;
  return {
    centres: moved,
    width: Math.max(...moved.map(({ x }) => x)) + half + MARGIN,
    height: y + 16,
    lines: [...lines].sort((a, b) => apart(a) - apart(b)).map(({ wire, points }) => {
      const { from, to } = wire;
      const r = row[to];
      if (row[from] === r) return { wire, path: curve(points.map((p) => ({ x: p.x + shift[r].x, y: p.y + shift[r].y }))) };
      const n = used.get(r) ?? 0;
      if (n === FEW) return tails(wire, moved, true);
      used.set(r, n + 1);
      // Around: between two ranks, above the row of its end, and between two ranks again.
      const aside = 8 + 4 * n;
      const level = shift[r].y + top[r] - ROWS / 2 + 5 * (n - 1);
      const [a, b] = [moved[from], moved[to]];
      const [out, into] = [a.x + half + aside, b.x - half - aside];
      return { wire, path: cornered([{ x: a.x + half, y: a.y }, { x: out, y: a.y }, { x: out, y: level }, { x: into, y: level }, { x: into, y: b.y }, { x: b.x - half, y: b.y }]) };
    }).concat(laid.back.map((wire) => tails(wire, moved, false))),
  };
}

/** Where a line leaves its first box and comes to the other: at their sides, or what flows back, below them. */
function tails(wire: Wire, centres: Point[], sideways: boolean): Sheet["lines"][number] {
  const [a, b] = [centres[wire.from], centres[wire.to]];
  const path = sideways
    ? `M${a.x + WIDE / 2},${a.y}h${TAIL}M${b.x - WIDE / 2 - TAIL},${b.y}h${TAIL}`
    : `M${a.x + BACK},${a.y + TALL / 2}v${TAIL}M${b.x - BACK},${b.y + TALL / 2 + TAIL}v${-TAIL}`;
  return { wire, path, far: true };
}

/** Straight from box to box, behind whatever lies between. */
export function direct(a: Point, b: Point, across: boolean): string {
  const forward = across ? b.x > a.x + WIDE : b.y > a.y + TALL;
  if (!forward) return `M${a.x},${a.y}L${b.x},${b.y}`;
  const [from, to] = across ? [{ x: a.x + WIDE / 2, y: a.y }, { x: b.x - WIDE / 2, y: b.y }] : [{ x: a.x, y: a.y + TALL / 2 }, { x: b.x, y: b.y - TALL / 2 }];
  const [dx, dy] = across ? [(to.x - from.x) / 2, 0] : [0, (to.y - from.y) / 2];
  return `M${from.x},${from.y}C${from.x + dx},${from.y + dy} ${to.x - dx},${to.y - dy} ${to.x},${to.y}`;
}

function curve(points: Point[]): string {
  let d = `M${points[0].x},${points[0].y}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [a, b] = [points[i], points[i + 1]];
    const last = i === points.length - 2;
    d += `Q${a.x},${a.y} ${last ? b.x : (a.x + b.x) / 2},${last ? b.y : (a.y + b.y) / 2}`;
  }
  return points.length === 2 ? `${d}L${points[1].x},${points[1].y}` : d;
}

function cornered(points: Point[]): string {
  let d = `M${points[0].x},${points[0].y}`;
  for (let i = 1; i < points.length - 1; i++) {
    const corner = points[i];
    const [before, after] = [points[i - 1], points[i + 1]].map((other) => {
      const far = Math.hypot(other.x - corner.x, other.y - corner.y) || 1;
      const part = Math.min(7, far / 2) / far;
      return `${corner.x + (other.x - corner.x) * part},${corner.y + (other.y - corner.y) * part}`;
    });
    d += `L${before}Q${corner.x},${corner.y} ${after}`;
  }
  const end = points[points.length - 1];
  return `${d}L${end.x},${end.y}`;
}
