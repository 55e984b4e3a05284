// The data that Python wrote into the page: see report/page.py, which says what each field means.

export interface Graph {
  name: string;
  ops: number;
  names: string[]; // of items: an item is an op, or many that were joined
  count: Uint32Array; // ops in each item
  kinds: string[];
  kind: Uint16Array;
  stored: Uint8Array;
  bytes: Float32Array; // made by each item
  resident: Float32Array;
  rank: Uint32Array; // place in the dataflow order
  node: Uint32Array; // of the tree, right above each item
  source: Uint32Array; // edges between items
  target: Uint32Array;
  size: Float32Array;
  fresh: Uint8Array; // edges of one tensor follow each other: where the next tensor begins
  parent: Int32Array; // the tree of modules; the root is first
  labels: string[];
  paths: string[];
}

export interface Slices {
  lane: Uint32Array;
  start: Float64Array;
  length: Float32Array;
  busy: Float32Array;
  count: Uint32Array;
  item: Uint32Array;
  reader: Uint32Array;
  target: Uint16Array;
  bytes: Float32Array;
}

export interface Chain {
  kind: Uint8Array;
  lane: Uint32Array;
  start: Float64Array;
  length: Float32Array;
  item: Uint32Array;
}

export interface Device {
  name: string;
  kind: string;
  memory: number | null;
  ops: number;
  busy: number;
  peak: number;
  resident: number;
  sent: number;
  received: number;
}

export interface Channel {
  name: string;
  busy: number;
  bytes: number;
  transfers: number;
}

export interface Load {
  where: string;
  compute: number;
  transfer: number;
  total: number;
  sets_pace: boolean;
  replicas: number;
}

export interface Verified {
  engine: string;
  library: string;
  holds: boolean;
  within: number | null; // how far the time may be off, as a share of what was predicted
  predicted: number;
  placed: number;
  plain: number;
  placed_spread: number;
  plain_spread: number;
  findings: Finding[];
}

export interface Finding {
  claim: string;
  claimed: number | null;
  found: number | null;
  verdict: string;
}

export interface Plan {
  title: string;
  graph: number;
  value: number;
  bound: number;
  gap: number;
  planner: string;
  found_by: string;
  proved_by: string;
  stopped: string;
  seconds: number;
  evaluations: number;
  version: string;
  seed: number;
  cluster: string;
  objective: string;
  execution: Record<string, string | number | boolean>;
  makespan: number;
  whole: number; // what the busy seconds are shares of: of the run, or of the time per sample in a full pipeline
  ends: [string, number][]; // of each model, where their sum counts
  bytes_moved: number;
  transfers: number;
  cost_shares: Record<string, number>;
  history: [number, number, number][];
  bounds: [number, number][];
  verdict: string;
  by_kind: Record<string, number>;
  by_module: { module: string; seconds: number[] }[];
  loads: Load[];
  pace_modules: [string, number][]; // seconds per sample on the load that sets the pace
  devices: Device[];
  channels: Channel[];
  memory: { times: Float64Array; bytes: Float32Array }[];
  device: Uint16Array; // of each item
  label: Uint8Array;
  time: Float32Array;
  slices: Slices;
  chain: Chain;
  kinds: string[]; // of the chain's steps
  verified: Verified | null;
}

export interface Page {
  graphs: Graph[];
  plans: Plan[];
  labels: string[];
}

const ARRAYS: Record<string, new (buffer: ArrayBuffer, at: number, n: number) => ArrayBufferView> = {
  f8: Float64Array,
  f4: Float32Array,
  u4: Uint32Array,
  i4: Int32Array,
  u2: Uint16Array,
  u1: Uint8Array,
};

export async function read(base64: string): Promise<Page> {
  const packed = Uint8Array.from(atob(base64.trim()), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(unpacked).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const page = withArrays(header, buffer, 8 + length) as Page;
  for (const plan of page.plans) {
    const devices = new Set(plan.devices.map(({ name }) => name));
    const arrow = (name: string) => (devices.has(name) ? name : name.replaceAll("->", "→")); // of channels
    for (const channel of plan.channels) channel.name = arrow(channel.name);
    for (const load of plan.loads) load.where = arrow(load.where);
    plan.verdict = arrow(plan.verdict);
  }
  return page;
}

function withArrays(value: unknown, buffer: ArrayBuffer, body: number): unknown {
  if (Array.isArray(value)) return value.map((one) => withArrays(one, buffer, body));
  if (value === null || typeof value !== "object") return value;
  const found = value as Record<string, unknown>;
  if ("$" in found) return new ARRAYS[found.$ as string](buffer, body + (found.at as number), found.n as number);
  return Object.fromEntries(Object.entries(found).map(([key, one]) => [key, withArrays(one, buffer, body)]));
}
