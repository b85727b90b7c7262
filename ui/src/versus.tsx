// The pictures of a comparison, a line or a dot per row: on the live page, and in the page that `fedtailor compare` writes.
import { useState } from "preact/hooks";
import * as Plot from "@observablehq/plot";
import { type Line, dots, headline, lines, panels } from "./charts";
import type { Clients, Compared, Comparison, Overview } from "./data";
import { type Axis, axes, axisOptions, spent } from "./fairness";
import { Figure } from "./figure";
import { colourOf, dashOf, percent, shapes } from "./format";
import { Choose, href } from "./parts";

type Metric = "personal" | "global" | "worst" | "loss";
export type Who = Pick<Clients, "split" | "name" | "personal" | "held">;
/** A row with what is behind it: runs that differ in nothing but the seed. */
export interface Told { row: Compared; label: string; colour: string; dash: string; shape: string; runs: { seed: number | null; partition: string | null; o: Overview; c: Who | null }[] }

export function tell(found: Comparison, overviews: Map<string, Overview>, people: Map<string, Who>): Told[] {
  return found.rows.map((row, i) => ({
    row, label: row.finished ? row.label : `${row.label} (${row.split}, round ${row.round})`, colour: colourOf(i), dash: dashOf(i), shape: shapes[i % shapes.length]!,
    runs: row.runs.flatMap((run) => { const o = overviews.get(run.id); return o ? [{ seed: run.seed, partition: run.partition, o, c: people.get(run.id) ?? null }] : []; }),
  })).filter((told) => told.runs.length > 0);
}

const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / values.length;
function std(values: number[]): number {
  const middle = mean(values);
  return values.length < 2 ? 0 : Math.sqrt(values.reduce((sum, v) => sum + (v - middle) ** 2, 0) / (values.length - 1));
}
const total = (o: Overview, axis: Axis) => axes[axis].of(o.costs).reduce((a, b) => a + b, 0);
/** What a row cost in all. Measured time is the whole run's where it is over, as in every other table: rounds alone leave out the last evaluation. */
export const cost = (told: Told, axis: Axis) => (axis === "measured" && told.row.finished ? (told.row.measured_seconds as number | null) : null) ?? mean(told.runs.map(({ o }) => total(o, axis)));

/** The mean over the seeds of a row at the rounds that all of them have, and the std over seeds; across are rounds or a cost. */
function overSeeds({ runs }: Told, metric: Metric, axis?: Axis) {
  const found = runs.map(({ o }) => {
    const c = o.series[metric], x = c && (axis ? spent(o.costs, axis, c.rounds) : c.rounds);
    return new Map(c?.rounds.flatMap((r, k) => (c.mean[k] == null ? [] : [[r, [x![k]!, c.mean[k]!] as const]])));
  });
  const rounds = [...found[0]!.keys()].filter((r) => found.every((one) => one.has(r)));
  const at = (r: number, k: 0 | 1) => found.map((one) => one.get(r)![k]);
  return { rounds, x: rounds.map((r) => mean(at(r, 0))), y: rounds.map((r) => mean(at(r, 1))), band: runs.length > 1 ? rounds.map((r) => std(at(r, 1))) : undefined };
}

interface Pair { client: number; name: string; seed: number | null; first: number; other: number }
/** Client by client, where it is the same client: of one seed, one partition and one split. */
function paired(first: Told, other: Told): Pair[] {
  return other.runs.flatMap((run) => {
    const twin = first.runs.find((one) => one.seed === run.seed && one.partition === run.partition && one.c?.split === run.c?.split);
    return run.c?.personal.flatMap((v, k) => { const before = twin?.c?.personal[k]; return v == null || before == null || run.c!.held[k] ? [] : [{ client: k, name: run.c!.name[k]!, seed: run.seed, first: before, other: v }]; }) ?? [];
  });
}

export function Versus({ rows, file, links }: { rows: Told[]; file: string; links: boolean }) {
  const [metric, setMetric] = useState<Metric>("personal");
  const [axis, setAxis] = useState<Axis>("bytes");
  const several = rows.some((told) => told.runs.length > 1), all = { run: rows.map((told) => told.label).join(", ") };
  const drawn = (axis?: Axis, which: Metric = "personal") => rows.flatMap((told) => { const line = overSeeds(told, which, axis); return line.rounds.length ? [{ ...line, label: told.label, colour: told.colour, dash: told.dash, told }] : []; });
  const table = (curves: ReturnType<typeof drawn>, value: string, across?: string) => curves.flatMap((c) => c.rounds.map((round, i) => ({ run: c.label, seed: c.told.row.seeds, round, ...(across ? { [across]: c.x[i] } : {}), [value]: c.y[i], std_over_seeds: c.band?.[i] })));
  const keys = (of: { label: string; colour: string; dash: string }[]) => of.map((l) => [l.label, l.colour, l.dash] as [string, string, string]);
  const seeds = several ? " The band is one std over seeds." : "", said = { personal: "personal accuracy", worst: "worst decile", global: "global accuracy", loss: "training loss" };
  const curves = drawn(undefined, metric), paid = drawn(axis);
  // half a run has half the costs, and has opened no test data
  const ends = rows.filter(({ row }) => row.finished && row.personal_mean != null).map((told) => {
    const x = cost(told, axis), y = told.row.personal_mean!, off = told.row.personal_std_over_seeds;
    return { told, x, y, low: y - (off ?? 0), high: y + (off ?? 0), fill: told.colour, symbol: told.shape, r: 6, title: `${told.label}\n${percent(y, 2)}${off == null ? "" : ` ± ${(100 * off).toFixed(2)}`}, ${told.row.split}, round ${told.row.round}\n${axes[axis].say(x)}` };
  });
  const front = [...ends].sort((a, b) => a.x - b.x || b.y - a.y).filter((p, i, sorted) => sorted.slice(0, i).every((before) => before.y < p.y));
  const quantiles: (Line & { told: Told })[] = rows.flatMap((told) => {
    const v = told.runs.flatMap(({ c }) => (c?.personal ?? []).filter((x, k): x is number => x != null && !c!.held[k])).sort((a, b) => a - b);
    return v.length ? [{ label: told.label, colour: told.colour, dash: told.dash, x: v.map((_, k) => (k + 0.5) / v.length), y: v, told }] : [];
  });
  const [first, ...others] = rows, pairs = others.map((told) => ({ told, of: paired(first!, told) })), met = pairs.filter((p) => p.of.length > 0);
  const apart = met.length ? pairs.filter((p) => !p.of.length).map((p) => p.told.label) : [];
  const values = met.flatMap((p) => p.of.flatMap((c) => [c.first, c.other])), domain = [Math.max(0, Math.min(...values) - 0.03), Math.min(1, Math.max(...values) + 0.03)];
  const choose = <Choose label="cost" hidden value={axis} options={axisOptions(rows.some((told) => told.runs.some(({ o }) => o.device.startsWith("cuda"))))} set={setAxis} />;
  return (
    <div class="figures">
      <Figure title="Over the rounds" file={`${file}-curves`} at={{ ...all, split: metric === "loss" ? "train" : "val" }} keys={keys(curves)} deps={[rows, metric]} caption={`Mean over ${metric === "worst" ? "the tenth of clients that fare worst" : metric === "loss" ? "the round’s participants" : "clients"}.${seeds}`} rows={() => table(curves, metric)}
        draw={(width) => lines(curves, { width, share: metric !== "loss", yLabel: `↑ ${said[metric]}` })}>
        <Choose label="number" hidden value={metric} options={Object.entries(said) as [Metric, string][]} set={setMetric} /></Figure>
      {paid.length > 0 && <Figure title="Accuracy against cost" file={`${file}-cost`} at={{ ...all, split: "val" }} keys={keys(paid)} deps={[rows, axis]} caption={`By what all rounds had taken until then.${seeds}`} rows={() => table(paid, "personal", axis)}
        draw={(width) => lines(paid, { width, share: true, yLabel: "↑ personal accuracy", xLabel: `${axes[axis].title} →`, xFormat: axes[axis].say })}>{choose}</Figure>}
      {ends.length > 0 && <Figure title="Pareto front" file={`${file}-pareto`} at={all} keys={ends.map(({ told }) => [told.label, told.colour, told.shape])} deps={[rows, axis]} onPick={links ? (d) => { location.hash = href(d.told.row.runs[0].id); } : undefined}
        caption={`Finished rows at their last round. On the line nobody is better for less.${several ? " The upright lines are one std over seeds." : ""}`}
        rows={() => ends.map((e) => ({ run: e.told.label, seed: e.told.row.seeds, split: e.told.row.split, round: e.told.row.round, [axis]: e.x, personal: e.y, std_over_seeds: e.told.row.personal_std_over_seeds, on_front: front.includes(e) }))}
        draw={(width) => dots(ends, { width, share: true, yLabel: "↑ personal accuracy", xLabel: `${axes[axis].title} →`, xFormat: axes[axis].say, zero: true, extra: [Plot.line(front, { x: "x", y: "y", stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "4 3", curve: "step-after" }), Plot.ruleX(ends.filter((e) => e.high > e.low), { x: "x", y1: "low", y2: "high", stroke: "fill", strokeWidth: 1.4 })] })}>{choose}</Figure>}
      {quantiles.length > 0 && <Figure title="Who fares how" file={`${file}-distribution`} at={all} keys={keys(quantiles as any)} deps={[rows]} caption={`Clients${several ? " of all seeds" : ""} from the worst to the best; the worst decile is shaded.`} rows={() => quantiles.flatMap((l) => l.x.map((x, i) => ({ run: l.label, seed: l.told.row.seeds, split: l.told.row.split, round: l.told.row.round, quantile: x, personal: l.y[i] })))}
        draw={(width) => lines(quantiles, { width, share: true, yLabel: "↑ personal accuracy", xLabel: "share of clients →", xFormat: (v) => `${Math.round(100 * v)} %`, extra: [Plot.rectX([0], { x1: 0, x2: 0.1, fill: "var(--red)", fillOpacity: 0.08 })] })} />}
      {met.length > 0 && <Figure wide title={`Client by client against ${first!.label}`} file={`${file}-paired`} at={{ ...all, split: first!.row.split }} keys={[["better off", "var(--blue)", "circle"], ["worse off", "var(--red)", "diamond"], ["the same", "var(--grey)", "square"]]} deps={[rows]}
        caption={`A dot per client${several ? " and seed" : ""}: across its accuracy with ${first!.label}, up with the other.${apart.length ? ` Not paired, for want of the same seeds, partition and split: ${apart.join(", ")}.` : ""}`}
        rows={() => met.flatMap(({ told, of }) => of.map((p) => ({ run: told.label, seed: p.seed, client: p.client, name: p.name, first: p.first, this: p.other })))}
        draw={(width) => panels(width, met, ({ told, of }, _, wide) => against(told, of, domain, wide))} />}
    </div>
  );
}

function against(told: Told, of: Pair[], domain: number[], width: number): Element {
  const ways = [{ of: of.filter((p) => p.other > p.first), fill: "var(--blue)", symbol: "circle" }, { of: of.filter((p) => p.other < p.first), fill: "var(--red)", symbol: "diamond" }, { of: of.filter((p) => p.other === p.first), fill: "var(--grey)", symbol: "square" }];
  const side = Math.min(width, 340), axis = { domain, ticks: 4, grid: true, label: null, tickFormat: (v: number) => `${+(100 * v).toFixed(1)} %` };
  return Plot.plot({
    width: side, height: side, marginLeft: 46, marginTop: 26, marginRight: 22, marginBottom: 26, style: { fontSize: "11px", background: "transparent" }, x: axis, y: axis, symbol: { type: "identity" } as any,
    marks: [
      Plot.line(domain, { x: (v: any) => v, y: (v: any) => v, stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "4 3" } as any),
      ...ways.map((way) => Plot.dot(way.of, { x: "first", y: "other", r: of.length > 300 ? 1.8 : 3.2, fill: way.fill, fillOpacity: 0.75, symbol: way.symbol } as any)),
      headline(`${told.label}: ${ways[0]!.of.length} better, ${ways[1]!.of.length} worse`, side),
      Plot.tip(of, Plot.pointer({ x: "first", y: "other", fill: "var(--paper)", stroke: "var(--rule)", title: (p: any) => `${p.name}, seed ${p.seed}\n${percent(p.first)} → ${percent(p.other)}` } as any)),
    ],
  });
}
