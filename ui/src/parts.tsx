// Small things that several pages use.
import type { ComponentChildren } from "preact";
import type { Archs, Clients, State } from "./data";
import { classColour, optionColour, percent } from "./format";

export const href = (run: string, page = "", rest = "") => `#/run/${encodeURIComponent(run)}${page ? `/${page}` : ""}${rest ? `/${rest}` : ""}`;

export function Notice({ state, what }: { state: State<unknown>; what: string }) {
  if (state.problem) return <p class="warning" role="alert">{state.problem}</p>;
  if (!state.data && state.busy) return <p class="quiet" aria-busy="true">Reading {what} …</p>;
  return null;
}

export function Badge({ status }: { status: string }) {
  const marks: Record<string, string> = { running: "●", done: "✓", stopped: "◼", killed: "✗", broken: "!" };
  return <span class={`badge ${status}`}><span aria-hidden="true">{marks[status] ?? "?"}</span> {status}</span>;
}

export function Progress({ done, of }: { done: number; of: number }) {
  const share = of ? Math.min(1, done / of) : 0;
  return (
    <span class="progress" role="progressbar" aria-valuemin={0} aria-valuemax={of} aria-valuenow={done} title={`${done} of ${of} rounds`}>
      <span style={{ width: `${100 * share}%` }} />
    </span>
  );
}

/** A choice; `hidden` where its label is only for those who do not see where it stands. */
export function Choose<T extends string>({ label, hidden, value, options, set }: { label: string; hidden?: boolean; value: T; options: [T, string][]; set: (value: T) => void }) {
  return (
    <label class="choose"><span class={hidden ? "hidden" : ""}>{label}</span>
      <select value={value} onChange={(event) => set(event.currentTarget.value as T)}>
        {options.map(([name, text]) => <option value={name}>{text}</option>)}
      </select>
    </label>
  );
}

export function Tile({ name, value, more, kind }: { name: string; value: ComponentChildren; more?: ComponentChildren; kind?: string }) {
  return <div class={`tile ${kind ?? ""}`}><p class="tile-name">{name}</p><p class="tile-value">{value}</p>{more && <p class="tile-more">{more}</p>}</div>;
}

/** A client's labels as one stacked bar. */
export function Mix({ counts, classes, width = 110 }: { counts: number[]; classes: string[]; width?: number }) {
  const sum = counts.reduce((a, b) => a + b, 0) || 1;
  let at = 0;
  const said = counts.map((n, k) => [n, classes[k] ?? String(k)] as const).filter(([n]) => n).sort((a, b) => b[0] - a[0]).slice(0, 6).map(([n, c]) => `${c} ${n}`).join(", ");
  return (
    <svg class="mix" width={width} height={12} role="img" aria-label={said}><title>{said}</title>
      {counts.map((n, k) => {
        if (!n) return null;
        const w = (width * n) / sum, x = at;
        at += w;
        return <rect x={x} y={0} width={Math.max(0.5, w - 0.6)} height={12} fill={classColour(k, counts.length)} />;
      })}
    </svg>
  );
}

export function Spark({ values, width = 84, height = 20 }: { values: (number | null)[]; width?: number; height?: number }) {
  const known = values.filter((v): v is number => v != null);
  if (!known.length) return null;
  const flat = Math.max(...known) === Math.min(...known), low = Math.min(...known) - (flat ? 1 : 0), high = Math.max(...known) + (flat ? 1 : 0);
  const points = values.map((v, i) => (v == null ? null : `${((width - 4) * i) / Math.max(1, values.length - 1) + 2},${height - 3 - ((height - 6) * (v - low)) / (high - low)}`)).filter(Boolean);
  return <svg class="spark" width={width} height={height} aria-hidden="true"><polyline points={points.join(" ")} fill="none" stroke="var(--blue)" stroke-width={1.4} />{points.length === 1 && <circle cx={points[0]!.split(",")[0]} cy={points[0]!.split(",")[1]} r={1.8} fill="var(--blue)" />}</svg>;
}

/** An architecture as a row of bars, one per dimension: higher is a later option; operations by their colour. */
export function Glyph({ choices, archs, width = 120, height = 22 }: { choices: number[][]; archs: Archs; width?: number; height?: number }) {
  let made = drawn.get(choices);
  if (!made || made.width !== width) drawn.set(choices, (made = { width, ...glyph(choices, archs, width, height) }));
  return <svg class="glyph" width={width} height={height} role="img" aria-label={made.said}>{made.shapes.map(([colour, d]) => <path d={d} fill={colour} />)}</svg>;
}

const drawn = new WeakMap<number[][], { width: number; said: string; shapes: [string, string][] }>();
function glyph(choices: number[][], archs: Archs, width: number, height: number): { said: string; shapes: [string, string][] } {
  const step = Math.min(14, width / Math.max(1, choices.length)), wide = (step - 1.2).toFixed(1);
  const said = choices.map((kept, d) => `${archs.dimensions[d]!.name} ${kept.map((i) => archs.dimensions[d]!.options[i]).join("+") || "–"}`).join(", ");
  const shapes = new Map<string, string>(); // by colour: a table of a thousand clients has many of these
  choices.forEach((kept, d) => {
    const { options } = archs.dimensions[d]!, numeric = archs.numeric[d]!, x = (d * step).toFixed(1);
    const add = (colour: string, y: number, tall: number) => shapes.set(colour, `${shapes.get(colour) ?? ""}M${x},${y.toFixed(1)}h${wide}v${tall.toFixed(1)}h-${wide}z`);
    if (!kept.length) return add("var(--rule)", height - 3, 2);
    const tall = numeric ? 5 + ((height - 6) * kept[kept.length - 1]!) / Math.max(1, options.length - 1) : height - 2;
    kept.forEach((i, k) => add(optionColour(options[i]!, i, options.length, numeric), height - tall + (k * tall) / kept.length, tall / kept.length));
  });
  return { said, shapes: [...shapes] };
}

export function Bar({ share, kind = "" }: { share: number; kind?: string }) {
  return <span class={`bar ${kind}`}><span style={{ width: `${Math.max(0, Math.min(1, share)) * 100}%` }} /></span>;
}

/** How many of n clients the worst decile holds: a tenth, rounded up. */
export const worstTenth = (n: number) => Math.ceil(n / 10);

export function worstClients(clients: Clients): Set<number> {
  const known = clients.personal.map((v, c) => [v, c] as const).filter(([v, c]) => v != null && !clients.held[c]);
  known.sort((a, b) => a[0]! - b[0]! || a[1] - b[1]);
  return new Set(known.slice(0, worstTenth(known.length)).map(([, c]) => c));
}

export function mainClass(counts: number[]): number {
  return counts.indexOf(Math.max(...counts));
}

export const people = (n: number) => `${n} client${n === 1 ? "" : "s"}`;
export const points = (value: number) => (value ? `${value > 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}` : "0.0");
export { percent };
