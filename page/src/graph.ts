// The graph, folded by module. Only what is visible is laid out: an unfolded module is replaced by what it holds.

import { background, paint } from "./colours";
import type { Graph } from "./data";
import { button, h, section, svg, tail } from "./dom";
import { bytes, count, counted, seconds } from "./format";
import { type Band, STUB, type Sheet, TALL, WIDE, type Wire, band, direct, rows } from "./layout";
import type { State } from "./state";
import { PAPER } from "./timecanvas";
import { modulePath, nodeOf, ownName, within } from "./modules";

const COLUMNS = 56; // of the strip below a box
const AT_FIRST = 14; // boxes
const AT_FIRST_IN_LARGEST = 60; // while one has most of the ops
const AT_MOST = 400;
const ROOM = 600; // pixels down the page
const LEAST = 0.75; // that the graph shrinks by itself, to fit into them
const SMALLEST = 0.2;
const ON_PAPER = 1.1;
const ROOM_ON_PAPER = 550;

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
  /** What unfolds a module, where the graph has one of that name. */
  unfold(module: string): (() => void) | null;
}

export function graph(state: State, showInTimeline: (item: number) => boolean): GraphView {
  let tree = new Tree(state.graph);
  let open = new Set<number>();
  let visible: Box[] = [];
  let contents: Contents[] = [];
  let laid: Band = band([], [], true);
  let sheet: Sheet = rows(laid, 0);
  let chosen: Box | null = null;
  let zoom = 1;
  let zoomed = false; // by hand
  let least = LEAST;
  const wires = svg("svg", { "aria-hidden": "true" }) as SVGSVGElement;
  const boxes = h("div", { class: "boxes" });
  const paper = h("div", { class: "sheet" }, wires, boxes);
  const scroll = h("div", { class: "scroll panel", tabindex: -1, style: `--room:${ROOM}px` }, paper);
  const about = h("div", { class: "chosen", "aria-live": "polite" });
  const path = h("div", { class: "tools", role: "group", "aria-label": "Unfolded modules" });
  const touched = matchMedia("(hover: none)");

  function start(): void {
    tree = new Tree(state.graph);
    open = new Set([0]);
    chosen = null;
    // Unfold the largest that leaves few boxes, or shows what most of the model is; but none that is next to nothing.
    for (let box: Box | undefined = 0; box !== undefined; ) {
      open.add(box);
      const visible = tree.visible(open);
      const inside = sums(state, tree, visible);
      const room = (i: number) => (inside[i].ops > state.graph.ops / 2 ? AT_FIRST_IN_LARGEST : AT_FIRST) + 1 - visible.length;
      const fit = [...visible.keys()].filter((i) => visible[i] >= 0 && tree.children[visible[i]].length <= room(i) && inside[i].ops > state.graph.ops / AT_FIRST);
      box = visible[fit.sort((a, b) => inside[b].ops - inside[a].ops)[0]];
    }
  }

  function toggle(box: Box): void {
    if (box < 0) return;
    if (tree.visible(open).length + tree.children[box].length > AT_MOST) {
      about.replaceChildren(h("p", {}, `More than ${AT_MOST} boxes would be unreadable: fold something first.`));
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

  /** What is visible, where it goes, and how large. */
  function draw(focus = false): void {
    visible = tree.visible(open);
    contents = sums(state, tree, visible);
    addStrips(state, tree, contents);
    lay();
    if (zoomed) place();
    else fit();
    const unfolded = [...open].filter((node) => node > 0).sort((a, b) => tree.depth(a) - tree.depth(b) || a - b);
    path.replaceChildren(
      ...(unfolded.length ? [button("Fold all", "Fold everything", () => { start(); open = new Set([0]); draw(); })] : []),
      ...unfolded.slice(0, 12).map((node) => button(`${tree.name(node)} ×`, `Fold ${tree.name(node)}`, () => fold(node), { class: "chip" })),
    );
    choose(chosen, focus);
  }

  /** Whether data flows to the right: down, on a phone. */
  const across = () => state.printing || scroll.clientWidth >= 560;

  function lay(): void {
    laid = band(visible.map((box) => tree.rank(box)), wiresBetween(state, tree.owner, visible.length), across());
  }

  /** The largest zoom, down to `least`, at which all can be seen. */
  function fit(): void {
    const [wide, tall] = [scroll.clientWidth, laid.across ? ROOM : Infinity];
    for (zoom = 1; zoom > least; zoom -= 0.05) {
      const { width, height } = rows(laid, wide / zoom);
      if (width * zoom <= wide + 1 && height * zoom <= tall) break;
    }
    place();
  }

  function place(): void {
    if (state.printing) for (zoom = ON_PAPER; zoom > SMALLEST && rows(laid, PAPER / zoom).height * zoom > ROOM_ON_PAPER; zoom -= 0.05);
    sheet = rows(laid, (state.printing ? PAPER : scroll.clientWidth) / zoom);
    const { width, height, lines, centres } = sheet;
    paper.style.width = `${width * zoom}px`;
    paper.style.height = `${height * zoom}px`;
    paper.style.setProperty("--fit", String(Math.min(1, PAPER / (width * zoom || 1))));
    boxes.style.transform = `scale(${zoom})`;
    wires.setAttribute("width", String(width * zoom));
    wires.setAttribute("height", String(height * zoom));
    wires.setAttribute("viewBox", `0 0 ${width} ${height}`);
    wires.replaceChildren(heads(), ...lines.map(({ wire, path, far }) => line(wire, path, far ? "far" : "")));
    const held = boxes.contains(document.activeElement) ? document.activeElement!.getAttribute("data-box") : null;
    boxes.replaceChildren(
      ...visible.flatMap((box, i) => [boxElement(box, contents[i], centres[i].x, centres[i].y), ...stubs(i)]),
    );
    mark();
    if (held) boxes.querySelector<HTMLElement>(`[data-box="${held}"]`)?.focus({ preventScroll: true });
  }

  function line(wire: Wire, d: string, kind = ""): SVGElement {
    const thick = 1 + Math.min(3, Math.max(0, Math.log10(Math.max(1, wire.size)) - 5) * 0.7);
    const both = wire.back ? [wire, wire.back] : [wire];
    const crosses = both.some(({ moves }) => moves > 0) ? "-crosses" : "";
    const told = both.map(({ from, to, size, moves }) => {
      const names = [from, to].map((i) => tree.name(visible[i])).join(" → ");
      return `${names}: ${bytes(size)}${moves ? `, of which ${bytes(moves)} move to another device` : ""}`;
    });
    const head = `url(#head${crosses})`;
    return svg(
      "g", { class: `line ${kind} ${crosses && "crosses"}`, "data-ends": `${wire.from} ${wire.to}` },
      svg("title", {}, told.join("; ")),
      svg("path", { class: "near", d }), // easier to point at
      svg("path", { class: "wire", d, "stroke-width": thick, "marker-start": wire.back ? head : null, "marker-end": head }),
    );
  }

  /** In place of lines that would be a tangle: how many there are. */
  function stubs(i: number): HTMLElement[] {
    const { from, to } = laid.stubs[i];
    const { x, y } = sheet.centres[i];
    const stub = (text: string, top: number) =>
      button(text, `Show the lines ${text} of ${tree.name(visible[i])}`, () => choose(chosen === visible[i] ? null : visible[i], false), {
        class: "stub", style: `left:${x - WIDE / 2}px;top:${top}px;width:${WIDE}px;height:${STUB}px`,
      });
    return [
      ...(from ? [stub(`from ${from} boxes`, y - TALL / 2 - STUB)] : []),
      ...(to ? [stub(`to ${to} boxes`, y + TALL / 2)] : []),
    ];
  }

  function boxElement(box: Box, inside: Contents, x: number, y: number): HTMLElement {
    const folded = box >= 0;
    const used = state.plan.devices.map((device, d): [string, number] => [device.name, inside.devices[d]]).filter(([, n]) => n > 0);
    const [main] = used.reduce((best, one) => (one[1] > best[1] ? one : best), ["", 0]);
    const badge = inside.moved ? h("span", { class: "badge" }, `${count(inside.moved)} moved`) : null;
    const strip = h("span", { class: "strip" }, ...inside.strip.map(([d, n]) => h("span", { style: `flex:${n};background:${background(state.plan.devices[d].name)}` })));
    const what = folded ? `${counted(inside.ops, "op")} · ${seconds(inside.time)}` : `${kindOf(box)} · ${seconds(inside.time)}`;
    const where = used.map(([name]) => name).join(" + ");
    const short = used.length > (badge ? 1 : 2) ? counted(used.length, "device") : where;
    return h(
      "button",
      {
        type: "button",
        class: `box${folded ? " folded" : ""}${inside.moved ? " moved" : ""}`,
        style: `left:${x - WIDE / 2}px;top:${y - TALL / 2}px;width:${WIDE}px;height:${TALL}px;--main:${main ? paint(main).colour : "transparent"}`,
        "data-box": box,
        "aria-label": `${tree.name(box)}: ${what}, on ${where}${folded ? "; unfold" : ""}`,
        title: tree.full(box),
        onclick: () => (folded ? toggle(box) : choose(box, true)),
        onfocus: () => choose(box, false),
        onkeydown: (event: KeyboardEvent) => {
          const up = tree.above(box);
          if ((event.key === "Backspace" || event.key === "Escape") && up > 0) fold(up);
        },
      },
      h("span", { class: "name" }, tree.isStretch(box) ? h("span", { class: "head" }, tree.name(box)) : tail(tree.name(box)), folded ? h("span", { class: "plus" }, "+") : null),
      h("span", { class: "what" }, what),
      h("span", { class: "where" }, tail(short), badge),
      strip,
    );
  }

  function kindOf(box: Box): string {
    return state.graph.kinds[state.graph.kind[-1 - box]];
  }

  /** The chosen box and its lines, also those that are not drawn otherwise. */
  function mark(): void {
    const at = visible.indexOf(chosen ?? NaN);
    for (const one of boxes.children) one.classList.toggle("now", (one as HTMLElement).dataset.box === String(chosen));
    for (const one of [...wires.querySelectorAll<SVGElement>(".line")]) {
      if (one.classList.contains("only")) one.remove();
      else one.classList.toggle("now", at >= 0 && one.dataset.ends!.split(" ").includes(String(at)));
    }
    const only = [...laid.hidden, ...sheet.lines.filter(({ far }) => far).map(({ wire }) => wire)].filter(({ from, to }) => from === at || to === at);
    wires.append(...only.map((wire) => line(wire, direct(sheet.centres[wire.from], sheet.centres[wire.to], laid.across), "only now")));
  }

  function choose(box: Box | null, focus: boolean): void {
    chosen = box;
    mark();
    const inside = contents[visible.indexOf(box ?? NaN)];
    if (box === null || !inside) {
      const how = touched.matches ? "Tap a module to unfold it." : "Click a module to unfold it; Backspace folds it again.";
      return about.replaceChildren(h("p", { class: "about" }, how));
    }
    const up = tree.above(box);
    about.replaceChildren(
      h("p", {}, h("b", {}, tree.full(box)), ` · ${counted(inside.ops, "op")} · ${seconds(inside.time)} · makes ${bytes(inside.bytes)}`),
      h(
        "div", { class: "tools" },
        box >= 0 ? button("Unfold", `Unfold ${tree.name(box)}`, () => toggle(box)) : button("Show in timeline", "Show it in the timeline", () => {
          if (!showInTimeline(-1 - box)) about.replaceChildren(h("p", {}, `${tree.full(box)} takes no time, or is drawn together with others.`));
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
    zoom = Math.min(2, Math.max(SMALLEST, zoom * factor));
    zoomed = true;
    place();
  }

  const element = section(
    "graph", "Graph",
    "Each box is a module, coloured by the device that runs most of it; the strip along its bottom shows the devices of its ops, from first to last. Dark arrows carry data from one device to another. Dashed arrows are drawn in full when their box is selected.",
    h(
      "div", { class: "bar" },
      h(
        "div", { class: "tools" },
        button("−", "Smaller", () => scale(0.8)),
        button("+", "Larger", () => scale(1.25)),
        button("Fit", "Show the whole graph", () => {
          (zoomed = false), (least = SMALLEST);
          fit();
        }),
      ),
      path,
    ),
    scroll,
    about,
  );

  /** Opens a node and what is around it. */
  function openUpTo(node: number): void {
    for (let at = node; at >= 0; at = state.graph.parent[at]) {
      if (tree.children[at].length + tree.visible(open).length > AT_MOST) open = new Set([0]);
    }
    for (let at = node; at >= 0; at = state.graph.parent[at]) open.add(at);
  }

  state.on(["plan"], () => {
    if (tree.graph !== state.graph) start();
    element.hidden = !state.graph.ops;
    draw();
  });
  element.hidden = !state.graph.ops;
  let before = 1; // the zoom on the screen
  state.on(["theme"], () => {
    if (state.printing) before = zoom;
    else zoom = before;
    if (laid.across !== across()) lay();
    place();
  });
  start();
  let wide = -1;
  new ResizeObserver(() => {
    if (state.printing || scroll.clientWidth === wide) return;
    wide = scroll.clientWidth;
    if (laid.across !== across() || !visible.length) draw();
    else if (zoomed) place();
    else fit();
  }).observe(element);
  return {
    element,
    reveal(item) {
      openUpTo(state.graph.node[item]);
      chosen = -1 - item;
      draw(true);
      element.scrollIntoView({ block: "start" });
    },
    unfold(module) {
      const node = nodeOf(state.graph, module);
      if (node < 0) return null;
      return () => {
        openUpTo(node);
        chosen = tree.children[node][0] ?? null;
        draw(true);
        element.scrollIntoView({ block: "start" });
      };
    },
  };
}

/** The heads of the lines. */
function heads(): SVGElement {
  const head = (id: string) =>
    svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, svg("path", { d: "M0,0.5L8,4L0,7.5Z" }));
  return svg("defs", {}, head("head"), head("head-crosses"));
}

class Tree {
  readonly parent: Int32Array;
  readonly children: Box[][];
  readonly inOrder: Uint32Array; // items, along the dataflow
  readonly rank: (box: Box) => number; // its place, or that of its first item, in the dataflow
  readonly owner: Int32Array; // of each item: the place, among the visible boxes, of the one that it is in

  constructor(readonly graph: Graph) {
    this.parent = graph.parent;
    this.inOrder = Uint32Array.from(graph.names.keys()).sort((a, b) => graph.rank[a] - graph.rank[b]);
    this.owner = new Int32Array(graph.names.length);
    this.children = Array.from(graph.parent, () => []);
    for (let node = 1; node < graph.parent.length; node++) this.children[graph.parent[node]].push(node);
    graph.node.forEach((node, item) => this.children[node].push(-1 - item));
    // In the order of the dataflow, in which Tab goes through them, too.
    const first = new Float64Array(graph.parent.length).fill(Infinity);
    graph.node.forEach((node, item) => (first[node] = Math.min(first[node], graph.rank[item])));
    for (let node = graph.parent.length - 1; node > 0; node--) first[graph.parent[node]] = Math.min(first[graph.parent[node]], first[node]); // parents come first
    this.rank = (box) => (box >= 0 ? first[box] : graph.rank[-1 - box]);
    for (const inside of this.children) inside.sort((a, b) => this.rank(a) - this.rank(b));
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

  /** Ops without a module of their own, named by the first and the last: of too long a name, the first is kept. */
  isStretch(box: Box): boolean {
    return box > 0 && !this.graph.paths[box];
  }

  depth(node: number): number {
    return node > 0 ? 1 + this.depth(this.parent[node]) : 0;
  }

  above(box: Box): number {
    return box >= 0 ? this.parent[box] : this.graph.node[-1 - box];
  }

  isWithin(node: number, outer: number): boolean {
    while (node > outer) node = this.parent[node];
    return node === outer;
  }

  name(box: Box): string {
    if (box < 0) return ownName(this.graph, -1 - box);
    const { labels, paths } = this.graph;
    const [label, up] = [labels[box], this.parent[box]];
    if (/^\d+(\.|$)/.test(label) && up > 0) return `${labels[up]}.${label}`; // a number alone tells nothing
    const around = modulePath(paths, this.parent, up); // of a stretch of ops, which is named by the first and the last
    return label.split(" … ").map((end) => within(around, end)).join(" … ");
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

/** Lines between visible boxes. */
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
