// The names in a lane of the timeline: of a module across all that it runs there without a break, of an op where it is
// as wide as its name.

import type { Graph } from "./data";
import { around, isWhole, ownName, shorter } from "./modules";

const LETTER = 6.6; // pixels: to measure each name would take longer than to draw it
const PADDING = 5;
const APART = 2; // pixels between slices that are no break
const NARROW = 8; // what is narrower is one with its neighbours

/** Slices of one node of the tree that follow each other. */
interface Stretch {
  node: number;
  low: number; // the first and the last node that it ran: numbers of nodes grow along the dataflow
  high: number;
  item: number; // -1: several
  from: number;
  to: number;
}

type Write = (text: string, from: number) => void;

const trees = new WeakMap<Graph, [Int32Array, Int32Array]>();

/** The tree without the nodes that are no modules: the module of each node, itself or above, and what is above that. */
function modules(graph: Graph): [Int32Array, Int32Array] {
  let found = trees.get(graph);
  if (!found) {
    const { parent, paths } = graph;
    const own = Int32Array.from(parent.keys());
    for (let node = 1; node < own.length; node++) if (!paths[node]) own[node] = own[parent[node]]; // parents come first
    found = [own, parent.map((up) => own[Math.max(0, up)])];
    trees.set(graph, found);
  }
  return found;
}

export class Names {
  private stretches: Stretch[] = [];
  private readonly own: Int32Array;
  private readonly parent: Int32Array;

  constructor(
    private graph: Graph,
    private left: number,
    private right: number,
  ) {
    [this.own, this.parent] = modules(graph);
  }

  /** A slice, from the left to the right. */
  add(item: number, from: number, to: number): void {
    const node = this.own[this.graph.node[item]];
    (from = Math.max(from, this.left)), (to = Math.min(to, this.right));
    const last = this.stretches[this.stretches.length - 1];
    const follows = last && from - last.to < APART;
    if (follows && ((last.to - last.from < NARROW && to - from < NARROW) || (last.node === node && last.item < 0 && to - from < NARROW))) {
      if (last.node !== node) last.node = around(this.parent, last.node, node);
      (last.low = Math.min(last.low, node)), (last.high = Math.max(last.high, node));
      last.item = -1;
      last.to = Math.max(last.to, to);
    } else this.stretches.push({ node, low: node, high: node, item, from, to });
  }

  draw(write: Write): void {
    const { stretches } = this;
    let first = 0;
    for (let i = 1; i <= stretches.length; i++) {
      if (i < stretches.length && stretches[i].from - stretches[i - 1].to < APART) continue;
      if (stretches[i - 1].to - stretches[first].from > NARROW) this.name(first, i, 0, write);
      first = i;
    }
  }

  /** Names stretches that touch, all within one node: as deep in the tree as names fit. Whether there is one. */
  private name(first: number, end: number, inside: number, write: Write): boolean {
    const { stretches, graph, parent } = this;
    const from = stretches[first].from;
    const room = stretches[end - 1].to - from - 2 * PADDING;
    if (room < 2 * LETTER) return false;
    const put = (...texts: string[]) => {
      const fits = texts.find((text) => text && text.length * LETTER <= room);
      if (fits) write(fits, from + PADDING);
      return Boolean(fits);
    };
    if (end - first === 1) {
      const { item, node } = stretches[first];
      if (item >= 0 && put(...shorter(graph, graph.names[item]))) return true;
      const numbers = node > inside ? this.numbers(node, stretches[first].low, stretches[first].high) : "";
      if (numbers) return put(...this.paths(node, `.${numbers}`), `${this.graph.paths[node].split(".").pop()}.${numbers}`, `…${numbers}`);
      // Of the modules around it, the innermost that has room.
      for (let at = node; at > inside && !isWhole(graph, at); at = parent[at]) if (put(...this.paths(at))) return true;
      return item >= 0 && inside === 0 && put(ownName(graph, item));
    }
    let node = stretches[first].node;
    for (let i = first + 1; i < end; i++) node = around(parent, node, stretches[i].node);
    const below = (i: number) => {
      let at = stretches[i].node;
      while (at !== node && parent[at] !== node) at = parent[at];
      return at;
    };
    let found = false;
    for (let i = first; i < end; ) {
      const child = below(i);
      let next = i + 1;
      while (child !== node && next < end && below(next) === child) next++;
      found = this.name(i, next, node, write) || found;
      i = next;
    }
    if (found || node <= inside) return found;
    const within = stretches.slice(first, end);
    const numbers = this.numbers(node, Math.min(...within.map(({ low }) => low)), Math.max(...within.map(({ high }) => high)));
    return numbers ? put(...this.paths(node, `.${numbers}`), `${this.graph.paths[node].split(".").pop()}.${numbers}`, `…${numbers}`) : !isWhole(graph, node) && put(...this.paths(node));
  }

  private paths(node: number, more = ""): string[] {
    return shorter(this.graph, this.graph.paths[node]).map((path) => path + more);
  }

  /** Modules within one that have numbers, from one to another: "0–4". Nothing where they have none. */
  private numbers(node: number, low: number, high: number): string {
    const { paths } = this.graph;
    const number = (inner: number) => {
      let at = inner;
      while (at > node && this.parent[at] > node) at = this.parent[at];
      return at > node && this.parent[at] === node && node > 0 ? paths[at].slice(paths[node].length + 1).split(".")[0] : "";
    };
    const [first, last] = [number(low), number(high)];
    return /^\d+$/.test(first) && /^\d+$/.test(last) ? first + (first === last ? "" : `–${last}`) : "";
  }
}
