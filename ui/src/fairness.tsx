// Who fares how, and what it costs.
import { useState } from "preact/hooks";
import * as Plot from "@observablehq/plot";
import { type Dot, dots, histogram, lines, short, whole } from "./charts";
import type { Clients, Costs, Curve, Overview } from "./data";
import { Figure } from "./figure";
import { count, duration, percent, quantile, size } from "./format";
import { Choose, Tile, href, people, points, worstClients } from "./parts";

export const axes = {
  bytes: { title: "traffic", of: (c: Costs) => c.down.map((v, i) => v + c.up[i]!), say: size },
  flops: { title: "FLOPs at clients", of: (c: Costs) => c.flops, say: (v: number) => count(v) },
  simulated: { title: "simulated time", of: (c: Costs) => c.simulated.map((v) => v / 3600), say: (v: number) => (v >= 0.1 || v === 0 ? `${short(v)} h` : duration(3600 * v)) },
  measured: { title: "measured seconds", of: (c: Costs) => c.measured, say: (v: number) => `${short(v)} s` },
} as const;
export type Axis = keyof typeof axes;
export const axisOptions = (gpu: boolean) => (Object.keys(axes) as Axis[]).map((a) => [a, a === "measured" && gpu ? "GPU seconds (measured)" : axes[a].title] as [Axis, string]);

/** What had been spent by each round of a curve. */
export function spent(costs: Costs, axis: Axis, rounds: number[]): number[] {
  const each = axes[axis].of(costs), sums: number[] = [];
  each.reduce((sum, v, i) => (sums[i] = sum + v), 0);
  return rounds.map((r) => sums[Math.min(sums.length - 1, Math.max(0, costs.rounds.findIndex((end) => end >= r)))] ?? 0);
}

export function Fairness({ run, data }: { run: Overview; data: Clients }) {
  const [axis, setAxis] = useState<Axis>("bytes");
  const at = { run: run.name, round: data.round, split: data.split, seed: run.seed };
  const worst = worstClients(data);
  const known = data.personal.map((v, c) => ({ v, c })).filter((d): d is { v: number; c: number } => d.v != null && !data.held[d.c]).sort((a, b) => a.v - b.v || a.c - b.c);
  if (!known.length) return <p class="quiet">No evaluation yet.</p>;
  const mean = known.reduce((sum, d) => sum + d.v, 0) / known.length, tail = known.slice(0, worst.size);
  const values = known.map((d) => d.v), q = (p: number) => quantile(values, p);
  const pick = (dot: any) => { location.hash = href(run.id, "clients", String(dot.client)); };
  const sorted: Dot[] = known.map((d, i) => ({ x: i + 1, y: d.v, client: d.c, fill: worst.has(d.c) ? "var(--red)" : "var(--blue)", symbol: worst.has(d.c) ? "diamond" : "circle", r: known.length > 300 ? 2 : 4, title: `${data.name[d.c]}\npersonal ${percent(d.v)}${data.global?.[d.c] != null ? `, global ${percent(data.global[d.c])}` : ""}` }));
  const ring: Dot[] = data.global ? known.flatMap((d, i) => (data.global![d.c] == null ? [] : [{ x: i + 1, y: data.global![d.c]!, title: "", fill: "" }])) : [];
  const gains = data.global ? known.flatMap((d) => (data.global![d.c] == null ? [] : [{ c: d.c, v: d.v - data.global![d.c]! }])) : [];
  const better = gains.filter((g) => g.v > 0).length, reach = Math.max(0.01, ...gains.map((g) => Math.abs(g.v)));
  const sizes = known.filter((d) => data.samples[d.c]), spreadOut = sizes.length ? Math.max(...sizes.map((d) => data.samples[d.c]!)) > 10 * Math.min(...sizes.map((d) => data.samples[d.c]!)) : false;
  const curves = (["personal", "global"] as const).flatMap((kind) => { const c = run.series[kind]; return c ? [{ label: kind as string, colour: kind === "personal" ? "var(--blue)" : "var(--orange)", dash: kind === "personal" ? "" : "6 3", x: spent(run.costs, axis, c.rounds), y: c.mean, rounds: c.rounds }] : []; });
  if (run.series.worst) curves.push({ label: "worst decile", colour: "var(--red)", dash: "2 3", x: spent(run.costs, axis, run.series.worst.rounds), y: run.series.worst.mean, rounds: run.series.worst.rounds });
  const table = () => known.map((d) => ({ client: d.c, name: data.name[d.c], personal: d.v, global: data.global?.[d.c], images: data.samples[d.c], worst_decile: worst.has(d.c) }));
  const range = known.at(-1)!.v - known[0]!.v, step = [0.005, 0.01, 0.02, 0.025, 0.05].find((s) => range / s <= 24) ?? 0.05;
  const start = Math.min(step * Math.floor(known[0]!.v / step), 1 - step), bins = Math.max(1, Math.ceil((known.at(-1)!.v - start) / step - 1e-9));
  const grown = [...gains].sort((a, b) => a.v - b.v).map((g) => g.v), same = gains.filter((g) => g.v === 0).length;
  return (
    <>
      <div class="tiles">
        <Tile kind="personal" name={`mean, ${data.split}, round ${data.round}`} value={percent(mean)} more={`${people(known.length)}, each counts the same`} />
        <Tile kind="low" name="worst decile" value={percent(tail.reduce((s, d) => s + d.v, 0) / tail.length)} more={tail.length === 1 ? "the lowest client" : `mean of the ${tail.length} lowest`} />
        <Tile name="10 % · median · 90 %" value={<span class="smaller">{percent(q(0.1), 0)} · {percent(q(0.5), 0)} · {percent(q(0.9), 0)}</span>} more={`from ${percent(known[0]!.v)} to ${percent(known.at(-1)!.v)}`} />
        {gains.length > 0 && <Tile name="better off than with the global model" value={`${better} of ${gains.length}`} more={`${same ? `${same} the same, ` : ""}median ${points(quantile(grown, 0.5))} points`} />}
      </div>
      <div class="figures">
        <Figure wide title="Accuracy, client by client" file={`${run.name}-fairness`} at={at} deps={[data]} rows={table} onPick={pick} caption="Lowest first; the worst decile is shaded, the line is the mean."
          keys={[["personal", "var(--blue)", "dot"], ["personal, worst decile", "var(--red)", "diamond"], ...(ring.length ? [["global, same client", "var(--orange)", "ring"] as [string, string, string]] : [])]}
          draw={(width) => dots(sorted, { width, height: 260, share: true, xLabel: "clients, sorted →", xFormat: whole, extra: [
            Plot.rectX([0], { x1: 0.5, x2: tail.length + 0.5, fill: "var(--red)", fillOpacity: 0.08 }), Plot.ruleY([mean], { stroke: "var(--blue)", strokeDasharray: "5 4", strokeOpacity: 0.7 }),
            ...(ring.length ? [Plot.dot(ring, { x: "x", y: "y", r: known.length > 300 ? 1.6 : 3.4, stroke: "var(--orange)", fill: "none", symbol: "circle" } as any)] : []),
          ] })} />
        <Figure title="Distribution" file={`${run.name}-distribution`} at={at} deps={[data]} rows={table} caption="Clients by their accuracy; the worst decile in red, the mean dashed." draw={(width) => histogram(known.map((d) => ({ value: d.v, fill: worst.has(d.c) ? "var(--red)" : "var(--blue)" })), { width, bins: Array.from({ length: bins + 1 }, (_, i) => start + i * step), mark: [mean], xFormat: (v) => `${+(100 * v).toFixed(1)} %`, xLabel: "personal accuracy" })} />
        {gains.some((g) => g.v !== 0) && <Figure title="Gain over the global model" file={`${run.name}-gain-over-global`} at={at} deps={[data]} caption={`${better} of ${gains.length} clients fare better with their own network${same ? `, ${same} the same` : ""}.`} keys={[["better", "var(--blue)", "square"], ...(same ? [["the same", "var(--grey)", "square"] as [string, string, string]] : []), ["worse", "var(--red)", "square"]]} rows={() => gains.map((g) => ({ client: g.c, name: data.name[g.c], gain: g.v }))}
          draw={(width) => histogram(gains.map((g) => ({ value: 100 * g.v, fill: g.v > 0 ? "var(--blue)" : g.v < 0 ? "var(--red)" : "var(--grey)" })), { width, bins: Array.from({ length: 21 }, (_, i) => 10 * reach * (i - 10)), mark: [0], xLabel: "personal − global, percentage points" })} />}
        {sizes.length > 0 && <Figure title="Accuracy against data" file={`${run.name}-samples`} at={at} deps={[data]} rows={table} onPick={pick} caption="Each dot is a client."
          draw={(width) => dots(sizes.map((d) => ({ x: data.samples[d.c]!, y: d.v, client: d.c, fill: worst.has(d.c) ? "var(--red)" : "var(--blue)", symbol: worst.has(d.c) ? "diamond" : "circle", r: known.length > 300 ? 2 : 4, title: `${data.name[d.c]}\n${count(data.samples[d.c])} images, ${percent(d.v)}` })), { width, share: true, log: spreadOut, xLabel: "training images →", xFormat: (v) => (Number.isInteger(v) ? v.toLocaleString("en") : "") })} />}
        {curves.length > 0 && <Figure title="Accuracy against cost" file={`${run.name}-accuracy-against-${axis}`} at={{ run: run.name, split: "val", seed: run.seed }} deps={[run, axis]} keys={curves.map((c) => [c.label, c.colour, c.dash])} caption={`Validation accuracy by what all rounds had taken until then.${axis === "measured" ? ` Measured on ${run.device}.` : ""}`}
          rows={() => curves.flatMap((c) => c.rounds.map((round, i) => ({ kind: c.label, round, [axis]: c.x[i], accuracy: c.y[i] })))} draw={(width) => lines(curves, { width, share: true, xLabel: `${axes[axis].title} →`, xFormat: axes[axis].say })}>
          <Choose label="cost" hidden value={axis} options={axisOptions(run.device.startsWith("cuda"))} set={setAxis} />
        </Figure>}
      </div>
    </>
  );
}

export type { Curve };
