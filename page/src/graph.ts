// The graph, folded by module. Only what is visible is laid out: an unfolded module is replaced by what it holds.

import { Graph as Layout, layout } from "@dagrejs/dagre";
import { background } from "./colours";
import type { Graph } from "./data";
import { button, h, section, svg } from "./dom";
import { bytes, count, counted, seconds } from "./format";
import type { State } from "./state";
import { PAPER } from "./timecanvas";
import { modulePath } from "./timeline";

const WIDE = 168;
const TALL = 62;
const COLUMNS = 56; // of the strip below a box
const AT_FIRST = 14; // boxes
const AT_MOST = 400;

/** A box: a node of the tree (0 and up), or an item (-1 - item). */
type Box = number;

interface Contents {
  ops: number;
  time: number;
  bytes: number;
  moved: number;
  devices: Float64Array; // ops on each
  strip: [number, number][]; // [device, columns]: which has most ops, along the dataflow
}

export interface GraphView {
  element: HTMLElement;
  reveal(item: number): void;
}

export function graph(state: State, showInTimeline: (item: number) => boolean): GraphView {
  let tree = new Tree(state.graph);
  let open = new Set<number>();
  let chosen: Box | null = null;
  let zoom = 1;
  const wires = svg("svg", { "aria-hidden": "true" }) as SVGSVGElement;
  const boxes = h("div", { class: "boxes" });
  const sheet = h("div", { class: "sheet" }, wires, boxes);
  const scroll = h("div", { class: "scroll panel", tabindex: -1 }, sheet);
  const about = h("div", { class: "chosen", "aria-live": "polite" });
  const path = h("div", { class: "tools", role: "group", "aria-label": "Unfolded modules" });

  function start(): void {
    tree = new Tree(state.graph);
    open = new Set([0]);
    chosen = null;
    for (;;) {
      // Unfold the largest, as long as that leaves few boxes.
      const visible = tree.visible(open);
      const inside = sums(state, tree, visible);
      const largest = inside.reduce((best, one, i) => (one.ops > inside[best].ops ? i : best), 0);
      const box = visible[largest];
      if (!(box >= 0)) return;
      const grows = visible.length - 1 + tree.children[box].length;
      if (grows > (visible.length < 4 ? 3 * AT_FIRST : AT_FIRST)) return;
      open.add(box);
    }
  }

  function toggle(box: Box): void {
    if (box < 0) return;
    if (tree.visible(open).length + tree.children[box].length > AT_MOST) {
      about.replaceChildren(h("p", {}, `More than ${AT_MOST} boxes cannot be told apart: fold something first.`));
      return;
    }
    open.add(box);
    chosen = tree.children[box][0] ?? null;
    draw(true);
  }

  function fold(node: number): void {
    for (const one of [...open]) if (tree.isWithin(one, node)) open.delete(one);
    chosen = node;
    draw(true);
  }

  function draw(focus = false): void {
    const visible = tree.visible(open);
    const contents = sums(state, tree, visible);
    addStrips(state, tree, contents);
    const links = wiresBetween(state, tree.owner, visible.length);
    const across = scroll.clientWidth >= 560;
    const drawn = new Layout();
    drawn.setGraph({ rankdir: across ? "LR" : "TB", nodesep: 14, ranksep: across ? 46 : 34, marginx: 16, marginy: 16 });
    visible.forEach((_, i) => drawn.setNode(String(i), { width: WIDE, height: TALL }));
    for (const wire of links) drawn.setEdge(String(wire.from), String(wire.to), wire);
    if (visible.length) layout(drawn);
    const { width = 0, height = 0 } = drawn.graph() as { width?: number; height?: number };
    sheet.style.width = `${width * zoom}px`;
    sheet.style.height = `${height * zoom}px`;
    sheet.style.setProperty("--fit", String(Math.min(1, PAPER / (width * zoom || 1))));
    boxes.style.transform = `scale(${zoom})`;
    wires.setAttribute("width", String(width * zoom));
    wires.setAttribute("height", String(height * zoom));
    wires.setAttribute("viewBox", `0 0 ${width} ${height}`);
    wires.replaceChildren(
      ...drawn.edges().map((edge) => {
        const { points, size, moves } = drawn.edge(edge) as unknown as Wire & { points: { x: number; y: number }[] };
        const thick = 1 + Math.min(3, Math.max(0, Math.log10(Math.max(1, size)) - 5) * 0.7);
        return svg("path", { d: curve(points), class: moves > 0 ? "crosses" : "", "stroke-width": thick });
      }),
    );
    boxes.replaceChildren(
      ...visible.map((box, i) => {
        const { x, y } = drawn.node(String(i)) as { x: number; y: number };
        return boxElement(box, contents[i], x, y);
      }),
    );
    const unfolded = [...open].filter((node) => node > 0);
    path.replaceChildren(
      ...(unfolded.length ? [button("Fold all", "Fold everything", () => { start(); open = new Set([0]); draw(); })] : []),
      ...unfolded.slice(0, 12).map((node) => button(`${tree.name(node)} ×`, `Fold ${tree.name(node)}`, () => fold(node), { class: "chip" })),
    );
    choose(chosen, contents[visible.indexOf(chosen ?? NaN)], focus);
  }

  function boxElement(box: Box, inside: Contents, x: number, y: number): HTMLElement {
    const folded = box >= 0;
    const used = deviceNames(inside);
    const badge = inside.moved ? h("span", { class: "badge" }, `${count(inside.moved)} moved`) : null;
    const strip = h("span", { class: "strip" }, ...inside.strip.map(([d, n]) => h("span", { style: `flex:${n};background:${background(state.plan.devices[d].name)}` })));
    const what = folded ? `${counted(inside.ops, "op")} · ${seconds(inside.time)}` : `${kindOf(box)} · ${seconds(inside.time)}`;
    const where = used.map(([name]) => name).join(" + ");
    return h(
      "button",
      {
        type: "button",
        class: `box${folded ? " folded" : ""}${inside.moved ? " moved" : ""}`,
        style: `left:${x - WIDE / 2}px;top:${y - TALL / 2}px;width:${WIDE}px;height:${TALL}px`,
        "data-box": box,
        "aria-label": `${tree.name(box)}: ${what}, on ${where}${folded ? "; unfold" : ""}`,
        title: tree.full(box),
        onclick: () => (folded ? toggle(box) : select(box)),
        onfocus: () => choose(box, inside, false),
        onkeydown: (event: KeyboardEvent) => {
          const up = tree.above(box);
          if ((event.key === "Backspace" || event.key === "Escape") && up > 0) fold(up);
        },
      },
      h("span", { class: "name" }, h("span", {}, tree.name(box)), folded ? h("span", { class: "plus" }, "+") : null),
      h("span", { class: "what" }, what),
      h("span", { class: "where" }, h("span", {}, where), badge),
      strip,
    );
  }

  function deviceNames(inside: Contents): [string, number][] {
    return state.plan.devices.map((device, d): [string, number] => [device.name, inside.devices[d]]).filter(([, n]) => n > 0);
  }

  function kindOf(box: Box): string {
    return state.graph.kinds[state.graph.kind[-1 - box]];
  }

  function select(box: Box): void {
    const i = tree.visible(open).indexOf(box);
    choose(box, sums(state, tree, tree.visible(open))[i], true);
  }

  function choose(box: Box | null, inside: Contents | undefined, focus: boolean): void {
    chosen = box;
    for (const one of boxes.children) one.classList.toggle("now", (one as HTMLElement).dataset.box === String(box));
    if (box === null || !inside) return about.replaceChildren(h("p", { class: "about" }, "A click unfolds a module; Backspace folds it again."));
    const up = tree.above(box);
    about.replaceChildren(
      h("p", {}, h("b", {}, tree.full(box)), ` · ${counted(inside.ops, "op")} · ${seconds(inside.time)} · makes ${bytes(inside.bytes)}`),
      h(
        "div", { class: "tools" },
        box >= 0 ? button("Unfold", `Unfold ${tree.name(box)}`, () => toggle(box)) : button("Show in timeline", "Show it in the timeline", () => {
          if (!showInTimeline(-1 - box)) about.replaceChildren(h("p", {}, `${tree.full(box)} takes no time, or is part of what is drawn as one.`));
        }),
        up > 0 ? button(`Fold ${tree.name(up)}`, `Fold ${tree.name(up)}`, () => fold(up)) : null,
      ),
    );
    if (focus) {
      const element = boxes.querySelector<HTMLElement>(`[data-box="${box}"]`);
      element?.focus({ preventScroll: true });
      if (element) scroll.scrollTo({ left: (element.offsetLeft + WIDE / 2) * zoom - scroll.clientWidth / 2, top: (element.offsetTop + TALL / 2) * zoom - scroll.clientHeight / 2 });
    }
  }

  function scale(factor: number): void {
    zoom = Math.min(2, Math.max(0.2, zoom * factor));
    draw();
  }

  const element = section(
    "graph", "Graph",
    "Coloured by device, from the first op of a module to its last, and folded by module. Strong lines lead from one device to another: there something moves.",
    h("div", { class: "bar" }, h("div", { class: "tools" }, button("−", "Smaller", () => scale(0.8)), button("+", "Larger", () => scale(1.25))), path),
    scroll,
    about,
  );
  state.on(["plan"], () => {
    if (tree.graph !== state.graph) start();
    draw();
  });
  start();
  new ResizeObserver(() => draw()).observe(element);
  return {
    element,
    reveal(item) {
      for (let node = state.graph.node[item]; node >= 0; node = state.graph.parent[node]) {
        if (tree.children[node].length + tree.visible(open).length > AT_MOST) open = new Set([0]);
      }
      for (let node = state.graph.node[item]; node >= 0; node = state.graph.parent[node]) open.add(node);
      chosen = -1 - item;
      draw(true);
      element.scrollIntoView({ block: "start" });
    },
  };
}

class Tree {
  readonly parent: Int32Array;
  readonly children: Box[][];
  readonly inOrder: Uint32Array; // items, along the dataflow
  readonly owner: Int32Array; // of each item: the place, among the visible boxes, of the one that it is in

  constructor(readonly graph: Graph) {
    this.parent = graph.parent;
    this.inOrder = Uint32Array.from(graph.names.keys()).sort((a, b) => graph.rank[a] - graph.rank[b]);
    this.owner = new Int32Array(graph.names.length);
    this.children = Array.from(graph.parent, () => []);
    for (let node = 1; node < graph.parent.length; node++) this.children[graph.parent[node]].push(node);
    graph.node.forEach((node, item) => this.children[node].push(-1 - item));
  }

  /** The boxes that no folded module hides; `owner` is set to fit. */
  visible(open: Set<number>): Box[] {
    const found: Box[] = [];
    const under = (box: Box) => {
      if (box >= 0 && open.has(box)) this.children[box].forEach(under);
      else found.push(box);
    };
    under(0);
    const place = new Int32Array(this.parent.length).fill(-1);
    found.forEach((box, i) => (box >= 0 ? (place[box] = i) : (this.owner[-1 - box] = i)));
    for (let node = 1; node < place.length; node++) if (place[node] < 0) place[node] = place[this.parent[node]]; // parents come first
    this.graph.node.forEach((node, item) => {
      if (place[node] >= 0) this.owner[item] = place[node];
    });
    return found;
  }

  above(box: Box): number {
    return box >= 0 ? this.parent[box] : this.graph.node[-1 - box];
  }

  isWithin(node: number, outer: number): boolean {
    while (node > outer) node = this.parent[node];
    return node === outer;
  }

  name(box: Box): string {
    if (box >= 0) return this.graph.labels[box];
    const name = this.graph.names[-1 - box];
    const module = modulePath(this.graph.paths, this.parent, this.graph.node[-1 - box]);
    return module && name.startsWith(`${module}.`) ? name.slice(module.length + 1) : name;
  }

  full(box: Box): string {
    return box >= 0 ? this.graph.paths[box] || this.graph.labels[box] : this.graph.names[-1 - box];
  }
}

function sums(state: State, tree: Tree, visible: Box[]): Contents[] {
  const { plan, graph } = state;
  const moved = state.moved();
  const found = visible.map((): Contents => ({ ops: 0, time: 0, bytes: 0, moved: 0, devices: new Float64Array(plan.devices.length), strip: [] }));
  for (let item = 0; item < graph.names.length; item++) {
    const inside = found[tree.owner[item]];
    const n = graph.count[item];
    inside.ops += n;
    inside.time += plan.time[item];
    inside.bytes += graph.bytes[item];
    inside.devices[plan.device[item]] += n;
    if (moved?.[item]) inside.moved += n;
  }
  return found;
}

/** Which devices a box uses, from its first op to its last; `sums` has counted them. */
function addStrips(state: State, tree: Tree, found: Contents[]): void {
  const { plan, graph } = state;
  const seen = new Float64Array(found.length); // ops so far
  const votes = found.map(() => new Map<number, number>());
  const column = new Int32Array(found.length);
  const close = (box: number, columns: number) => {
    const { strip } = found[box];
    const [most] = [...votes[box]].reduce((best, one) => (one[1] > best[1] ? one : best), [-1, 0]);
    const last = strip[strip.length - 1];
    if (most >= 0 && last?.[0] === most) last[1] += columns;
    else if (most >= 0) strip.push([most, columns]);
    votes[box].clear();
  };
  for (const item of tree.inOrder) {
    const box = tree.owner[item];
    const n = graph.count[item];
    const device = plan.device[item];
    const now = Math.floor((COLUMNS * (seen[box] + n / 2)) / found[box].ops);
    if (now > column[box]) {
      close(box, now - column[box]);
      column[box] = now;
    }
    votes[box].set(device, (votes[box].get(device) ?? 0) + n);
    seen[box] += n;
  }
  found.forEach((_, box) => close(box, Math.max(1, COLUMNS - column[box])));
}

/** What one visible box gives another: bytes that it reads, and those of them that change devices on the way. */
interface Wire {
  from: number;
  to: number;
  size: number;
  moves: number;
}

function wiresBetween(state: State, owner: Int32Array, n: number): Wire[] {
  const { source, target, size, fresh } = state.graph;
  const { device, devices } = state.plan;
  const found = new Map<number, Wire>();
  // A tensor is read once by each box, and comes once to each device of it, however many of its ops read it there.
  const readBy = new Int32Array(n).fill(-1);
  const cameTo = new Int32Array(n * devices.length).fill(-1);
  let tensor = 0;
  for (let e = 0; e < source.length; e++) {
    tensor += fresh[e];
    const [a, b] = [owner[source[e]], owner[target[e]]];
    if (a === b) continue;
    const wire = found.get(a * n + b) ?? { from: a, to: b, size: 0, moves: 0 };
    found.set(a * n + b, wire);
    if (readBy[b] !== tensor) wire.size += size[e];
    readBy[b] = tensor;
    const there = b * devices.length + device[target[e]];
    if (device[source[e]] !== device[target[e]] && cameTo[there] !== tensor) {
      wire.moves += size[e];
      cameTo[there] = tensor;
    }
  }
  return [...found.values()];
}

function curve(points: { x: number; y: number }[]): string {
  let d = `M${points[0].x},${points[0].y}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [a, b] = [points[i], points[i + 1]];
    const last = i === points.length - 2;
    d += `Q${a.x},${a.y} ${last ? b.x : (a.x + b.x) / 2},${last ? b.y : (a.y + b.y) / 2}`;
  }
  return points.length === 2 ? `${d}L${points[1].x},${points[1].y}` : d;
}
