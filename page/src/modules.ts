// The tree of modules: each node has a greater number than what is around it.

import type { Graph } from "./data";

/** The module of a node, or of what is around it. */
export function modulePath(paths: string[], parent: Int32Array, node: number): string {
  while (node > 0 && !paths[node]) node = parent[node];
  return node > 0 ? paths[node] : "";
}

/** The first node of a module, or of what is around one too small to have a node; -1: none. A star is any number. */
export function nodeOf(graph: Graph, module: string): number {
  for (let name = module; name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    const found = graph.paths.findIndex((path) => path === name || path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") === name);
    if (found >= 0) return found;
  }
  return -1;
}

/** A name as it is, and, for where that is too long, without what nearly all names begin with. */
export function shorter(graph: Graph, name: string): string[] {
  const skip = preamble(graph);
  return skip && name.startsWith(skip) ? [name, `…${name.slice(skip.length)}`] : [name];
}

/** The name of an item within its module. */
export function ownName({ names, node, paths, parent }: Graph, item: number): string {
  return within(modulePath(paths, parent, node[item]), names[item]);
}

/** A name without that of the module that it is in. */
export function within(module: string, name: string): string {
  return module && name.startsWith(`${module}.`) ? name.slice(module.length + 1) : name;
}

/** The modules around a node, the outermost first. */
export function modulesAround({ paths, parent }: Graph, node: number): string[] {
  const found: string[] = [];
  for (let at = node; at > 0; at = parent[at]) if (paths[at]) found.unshift(paths[at]);
  return found;
}

/** The innermost node that is around both. */
export function around(parent: Int32Array, a: number, b: number): number {
  while (a !== b) a > b ? (a = parent[a]) : (b = parent[b]);
  return a;
}

const MOST = 0.8; // of the items
const known = new WeakMap<Graph, number>();

/** The innermost node around nearly all items. */
function whole(graph: Graph): number {
  let found = known.get(graph);
  if (found === undefined) {
    const { parent, node } = graph;
    const items = new Uint32Array(parent.length);
    for (const one of node) items[one]++;
    for (let one = parent.length - 1; one > 0; one--) items[parent[one]] += items[one];
    found = 0;
    for (let one = 1; one < parent.length; one++) if (parent[one] === found && items[one] > MOST * node.length) found = one;
    known.set(graph, found);
  }
  return found;
}

/** Whether a node is around nearly all items, so that its name tells nothing. */
export function isWhole(graph: Graph, node: number): boolean {
  return around(graph.parent, node, whole(graph)) === node;
}

/** What nearly all names of modules begin with, which tells nothing: "model." of "model.layers.9.mlp". */
function preamble(graph: Graph): string {
  const deepest = whole(graph);
  const outer = deepest > 0 ? modulePath(graph.paths, graph.parent, graph.parent[deepest]) : "";
  return outer && `${outer}.`;
}
