// Numbers for people, as the terminal shows them (quantities.py). No line breaks between a number and its unit.

const SPACE = "\u00a0";

/** Beyond the units. */
function isOdd(value: number): boolean {
  return value !== 0 && !(Math.abs(value) >= 1e-3 && Math.abs(value) < 1e7);
}

function powers(value: number): string {
  return value.toExponential(2).replace(/\.?0*e/, "e");
}

function threeDigits(value: number): string {
  const rounded = Number(value.toPrecision(3));
  if (rounded === 0) return "0";
  if (isOdd(rounded)) return powers(rounded);
  return rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
}

export function seconds(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return `0${SPACE}s`;
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]] as const) {
    if (Math.abs(value) * factor >= 0.9995) return `${threeDigits(value * factor)}${SPACE}${unit}`;
  }
  return `${threeDigits(value * 1e9)}${SPACE}ns`;
}

/** How many there are of what takes so long. */
export function samplesPerSecond(value: number): string {
  return value > 0 ? `, in a full pipeline: ${threeDigits(1 / value)}${SPACE}samples/s` : "";
}

export function bytes(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return "no limit";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; Math.abs(value) >= 1000 && i < units.length - 1; i++) value /= 1024;
  return i === 0 ? `${Math.round(value)}${SPACE}B` : `${threeDigits(value)}${SPACE}${units[i]}`;
}

const PERCENT = new Intl.NumberFormat("en", { style: "percent", useGrouping: false, minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Only nothing is "0%", and "<0.1%" is nearly so. */
export function share(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0%";
  return Math.abs(value) < 5e-4 ? "<0.1%" : PERCENT.format(value).replace("100.0%", "100%");
}

/** How far at most from the best. */
export function gap(value: number): string {
  return isOptimal(value) ? "optimal" : share(value);
}

export function isOptimal(gap: number): boolean {
  return gap <= 1e-9; // less is rounding
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

/** "1 op", "2 ops". */
export function counted(value: number, thing: string): string {
  return `${count(value)}${SPACE}${thing}${value === 1 ? "" : "s"}`;
}

/** What is this many times as much is told as a factor. */
const MANY = 101;

/** How much more or less than before, as a share of that. */
export function change(before: number, value: number): string {
  const ratio = before === value ? 1 : value / before;
  if (ratio === Infinity) return "–";
  if (ratio >= MANY) return `×${SPACE}${threeDigits(ratio)}`;
  const part = share(Math.abs(ratio - 1) > 1e-9 ? Math.abs(ratio - 1) : 0);
  return part === "0%" || part[0] === "<" ? part : `${ratio < 1 ? "−" : "+"}${part}`;
}

/** The same in words: "3.8% less than the other". */
export function against(before: number, value: number, what: string): string {
  const told = change(before, value);
  if (told === "0%") return `the same as ${what}`;
  if (told.startsWith("×")) return `${told.slice(2)} times as much as ${what}`;
  return `${told.replace(/^[+−–]/, "")} ${value < before ? "less" : "more"} than ${what}`.trim();
}

/** About `wanted` round numbers from `low` to `high`. */
export function ticks(low: number, high: number, wanted: number): number[] {
  const raw = (high - low) / Math.max(1, wanted);
  if (!(raw > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw)!;
  const found: number[] = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

/** The tick in a unit that suits all of them, without digits that say nothing. */
export function tick(value: number, high: number): string {
  const [factor, unit] = high >= 1 ? [1, "s"] : high >= 1e-3 ? [1e3, "ms"] : high >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
  return `${isOdd(value * factor) ? powers(value * factor) : Number((value * factor).toPrecision(6))}${SPACE}${unit}`;
}
