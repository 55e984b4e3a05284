// Devices, modules and ops as tables.

import { background } from "./colours";
import type { Graph, Plan } from "./data";
import { broken, h, link, section, tail } from "./dom";
import { bytes, count, seconds, share } from "./format";
import type { State } from "./state";
import { table } from "./table";
import { modulePath } from "./modules";

/** A device's name with its colour. */
export function chip(device: string): HTMLElement {
  return h("span", { class: "device", title: device }, h("i", { style: `background:${background(device)}` }), tail(device));
}

export function tables(state: State, jump: (item: number) => void): HTMLElement[] {
  /** A section that is absent where it has nothing to say. */
  const redrawn = (id: string, title: string, about: () => string, make: () => (HTMLElement | null)[]) => {
    const said = h("p", { class: "about" });
    const holder = h("div");
    const element = section(id, title, null, said, holder);
    const draw = () => {
      const made = make().filter((one) => one !== null);
      element.hidden = !made.length;
      said.textContent = about();
      said.hidden = !said.textContent;
      holder.replaceChildren(...made);
    };
    state.on(["plan"], draw);
    draw();
    return element;
  };
  const whole = () => (state.plan.objective === "throughput" ? "the time per sample, in a full pipeline" : "the run");
  return [
    redrawn("devices", "Devices", () => (state.plan.whole > 0 ? `Busy shares are relative to ${whole()}.` : ""), () => [devices(state.plan), channels(state.plan)]),
    redrawn("modules", "Modules", () => "Each module includes everything inside it.", () => [modules(state)]),
    redrawn("ops", "Ops", () => "Click a name to find the op in the graph.", () => [ops(state, jump)]),
  ];
}

function devices(plan: Plan): HTMLElement {
  const all = plan.devices;
  return table("Devices", [
    { name: "Device", text: true, value: (d) => d.name, show: (d) => chip(d.name) },
    { name: "Kind", text: true, value: (d) => d.kind },
    { name: "Ops", value: (d) => d.ops, show: (d) => count(d.ops) },
    { name: "Busy", value: (d) => d.busy, show: (d) => seconds(d.busy) },
    { name: "Busy share", value: (d) => d.busy, show: (d) => share(d.busy / plan.whole) },
    { name: "Peak memory", value: (d) => d.peak, show: (d) => bytes(d.peak) },
    { name: "Memory", value: (d) => d.memory ?? Infinity, show: (d) => bytes(d.memory) },
    { name: "Used", value: (d) => (d.memory ? d.peak / d.memory : null), show: (d) => (d.memory ? share(d.peak / d.memory) : "–") },
    { name: "Sent", value: (d) => d.sent, show: (d) => bytes(d.sent) },
    { name: "Received", value: (d) => d.received, show: (d) => bytes(d.received) },
  ], all, 3, 16);
}

function channels(plan: Plan): HTMLElement | null {
  if (!plan.channels.length) return plan.device.length && plan.devices.length > 1 ? h("p", { class: "about" }, "Nothing moves between devices.") : null;
  return h(
    "div", {},
    h("h3", {}, "Channels"),
    table("Channels", [
      { name: "Channel", text: true, value: (c) => c.name },
      { name: "Busy", value: (c) => c.busy, show: (c) => seconds(c.busy) },
      { name: "Busy share", value: (c) => c.busy, show: (c) => share(c.busy / plan.whole) },
      { name: "Transfers", value: (c) => c.transfers, show: (c) => count(c.transfers) },
      { name: "Bytes", value: (c) => c.bytes, show: (c) => bytes(c.bytes) },
    ], plan.channels, 1, 8),
  );
}

interface Module {
  path: string;
  ops: number;
  time: number;
  kept: number;
  made: number;
  devices: Float64Array;
}

function modules(state: State): HTMLElement | null {
  const { plan, graph } = state;
  const rows = moduleSums(plan, graph).filter((row) => row.ops > 0);
  const total = plan.time.reduce((a, b) => a + b, 0);
  const names = (row: Module) => plan.devices.map((d) => d.name).filter((_, i) => row.devices[i] > 0);
  if (!rows.length) return null;
  return table("Modules", [
    { name: "Module", text: true, value: (m) => m.path, show: (m) => h("span", {}, ...broken(m.path)) },
    { name: "Devices", text: true, value: (m) => names(m).join(" "), show: (m) => h("span", { class: "devices" }, ...names(m).map(chip)) },
    { name: "Ops", value: (m) => m.ops, show: (m) => count(m.ops) },
    { name: "Time", value: (m) => m.time, show: (m) => seconds(m.time) },
    { name: "Share", value: (m) => m.time, show: (m) => share(m.time / total) },
    { name: "Weights", value: (m) => m.kept, show: (m) => bytes(m.kept) },
    { name: "Outputs", value: (m) => m.made, show: (m) => bytes(m.made) },
  ], rows, 3);
}

function moduleSums(plan: Plan, graph: Graph): Module[] {
  const rows = graph.paths.map((path) => ({ path, ops: 0, time: 0, kept: 0, made: 0, devices: new Float64Array(plan.devices.length) }));
  graph.node.forEach((node, item) => {
    const row = rows[node];
    row.ops += graph.count[item];
    row.time += plan.time[item];
    row.kept += graph.resident[item];
    row.made += graph.bytes[item];
    row.devices[plan.device[item]] += graph.count[item];
  });
  for (let node = rows.length - 1; node > 0; node--) {
    const [row, up] = [rows[node], rows[graph.parent[node]]]; // parents come first
    (up.ops += row.ops), (up.time += row.time), (up.kept += row.kept), (up.made += row.made);
    row.devices.forEach((n, d) => (up.devices[d] += n));
  }
  return rows.filter((row) => row.path);
}

function ops(state: State, jump: (item: number) => void): HTMLElement | null {
  const { plan, graph } = state;
  if (!graph.ops) return null;
  const items = [...graph.names.keys()];
  return table("Ops", [
    { name: "Op", text: true, value: (i) => graph.names[i], show: (i) => link(graph.names[i], `Show ${graph.names[i]} in the graph`, () => jump(i)) },
    { name: "Kind", text: true, value: (i) => graph.kinds[graph.kind[i]] },
    { name: "Device", text: true, value: (i) => plan.devices[plan.device[i]].name, show: (i) => chip(plan.devices[plan.device[i]].name) },
    { name: "Module", text: true, value: (i) => modulePath(graph.paths, graph.parent, graph.node[i]) },
    { name: "Time", value: (i) => plan.time[i], show: (i) => seconds(plan.time[i]) },
    { name: "Cost", text: true, value: (i) => (graph.stored[i] ? "–" : state.page.labels[plan.label[i]]) },
    { name: "Output", value: (i) => graph.bytes[i], show: (i) => bytes(graph.bytes[i]) },
    { name: "Weights", value: (i) => graph.resident[i], show: (i) => bytes(graph.resident[i]) },
  ], items, 4, 8);
}
