// Several runs in one picture.
import { useState } from "preact/hooks";
import * as Plot from "@observablehq/plot";
import { dots, lines } from "./charts";
import { type Clients, type Comparison, type Overview, useMany, useView } from "./data";
import { Figure, saveCsv } from "./figure";
import { colourOf, dashOf, percent } from "./format";
import { type Axis, axes, axisOptions, spent } from "./fairness";
import { Badge, Choose, Notice, href } from "./parts";

const shapes = ["circle", "square", "diamond", "triangle", "cross", "star"];

export function Compare({ runs }: { runs: string[] }) {
  const [metric, setMetric] = useState<"personal" | "global" | "worst" | "loss">("personal");
  const [axis, setAxis] = useState<Axis>("bytes");
  const found = useMany<Overview>("overview", runs, 2), people = useMany<Clients>("clients", runs, 5);
  const flags = useView<Comparison>("compare", { run: runs }, 5);
  const known = found.map((o, i) => ({ o, c: people[i], i })).filter((k): k is { o: Overview; c: Clients | null; i: number } => k.o != null);
  const names = known.map(({ o }) => o), file = `compare-${runs.length}`;
  const all = { run: names.map((o) => o.name).join(", ") };
  const label = (o: Overview) => (names.filter((other) => other.method === o.method).length > 1 ? o.name : o.method);
  const keys = known.map(({ o, i }) => [label(o), colourOf(i), dashOf(i) ? "dash" : "line"] as [string, string, string]);
  const curves = known.flatMap(({ o, i }) => { const c = o.series[metric]; return c ? [{ label: label(o), colour: colourOf(i), dash: dashOf(i), x: c.rounds, y: c.mean, o }] : []; });
  const paid = known.flatMap(({ o, i }) => { const c = o.series.personal; return c ? [{ label: label(o), colour: colourOf(i), dash: dashOf(i), x: spent(o.costs, axis, c.rounds), y: c.mean, rounds: c.rounds, o }] : []; });
  const ends = known.flatMap(({ o, i }) => (o.spreads.personal ? [{ x: axes[axis].of(o.costs).reduce((a, b) => a + b, 0), y: o.spreads.personal.mean, fill: colourOf(i), symbol: shapes[i % shapes.length], r: 6, title: `${o.name}\n${percent(o.spreads.personal.mean)} ${o.split}, round ${o.round}, seed ${o.seed}\n${axes[axis].say(axes[axis].of(o.costs).reduce((a, b) => a + b, 0))}`, o }] : []));
  const front = [...ends].sort((a, b) => a.x - b.x || b.y - a.y).filter((p, i, sorted) => sorted.slice(0, i).every((before) => before.y < p.y));
  const quantiles = known.flatMap(({ o, c, i }) => { const v = (c?.personal ?? []).filter((x, k): x is number => x != null && !c!.held[k]).sort((a, b) => a - b); return v.length ? [{ label: label(o), colour: colourOf(i), dash: dashOf(i), x: v.map((_, k) => (k + 0.5) / v.length), y: v, o }] : []; });
  const base = known[0];
  const pairs = known.slice(1).flatMap(({ o, c, i }) => (base?.c && c && base.c.split === c.split && same(flags.data) ? c.personal.flatMap((y, k) => (y != null && base.c!.personal[k] != null ? [{ x: base.c!.personal[k]!, y, fill: colourOf(i), symbol: shapes[i % shapes.length], title: `${c.name[k]}\n${label(base.o)} ${percent(base.c!.personal[k])}\n${label(o)} ${percent(y)}`, o, k }] : [])) : []));
  const gpu = names.some((o) => o.device.startsWith("cuda"));
  return (
    <>
      <h1>Compare {runs.length} runs</h1>
      <Notice state={flags} what="the runs" />
      {found.some((o) => !o) && flags.data && <p class="warning">{runs.filter((_, i) => !found[i]).join(", ")} cannot be read now.</p>}
      {flags.data?.unfair.map((text) => <p class="warning" role="alert"><b>Unfair:</b> {text}</p>)}
      {flags.data?.notes.map((text) => <p class="note">{text}</p>)}
      <div class="controls"><span class="push" /><button class="tool" onClick={() => saveCsv(names.map((o) => ({ run: o.name, method: o.method, seed: o.seed, split: o.split, round: o.round, status: o.status, personal: o.spreads.personal?.mean, std_over_clients: o.spreads.personal?.std, worst_decile: o.spreads.personal?.worst_decile, global: o.spreads.global?.mean, ...Object.fromEntries((Object.keys(axes) as Axis[]).map((a) => [a, axes[a].of(o.costs).reduce((x, y) => x + y, 0)])) })), file)}>CSV</button></div>
      <div class="tablewrap"><table class="plain">
        <thead><tr><th>run</th><th>status</th><th>method</th><th>seed</th><th>split, round</th><th class="right">personal</th><th class="right">worst decile</th><th class="right">std over clients</th><th class="right">global</th>{(Object.keys(axes) as Axis[]).map((a) => <th class="right">{axes[a].title}</th>)}</tr></thead>
        <tbody>{known.map(({ o, i }) => (
          <tr><td><span class="mark square" style={{ "--colour": colourOf(i) }} /> <a href={href(o.id)}>{o.name}</a></td><td><Badge status={o.status} /></td><td>{o.method}</td><td>{o.seed}</td><td>{o.split}, {o.round}</td><td class="right strong">{percent(o.spreads.personal?.mean, 2)}</td><td class="right">{percent(o.spreads.personal?.worst_decile, 2)}</td><td class="right">{percent(o.spreads.personal?.std, 2)}</td><td class="right">{percent(o.spreads.global?.mean, 2)}</td>{(Object.keys(axes) as Axis[]).map((a) => <td class="right">{axes[a].say(axes[a].of(o.costs).reduce((x, y) => x + y, 0))}</td>)}</tr>
        ))}</tbody>
      </table></div>
      <div class="figures">
        {names.length > 0 && <Figure title="Over the rounds" file={`${file}-curves`} at={{ ...all, split: metric === "loss" ? "train" : "val" }} keys={keys} deps={[found, metric]} rows={() => curves.flatMap((c) => c.x.map((round, i) => ({ run: c.o.name, seed: c.o.seed, round, [metric]: c.y[i] })))} draw={(width) => lines(curves, { width, share: metric !== "loss" })}>
          <Choose label="" value={metric} options={[["personal", "personal accuracy"], ["worst", "worst decile"], ["global", "global accuracy"], ["loss", "training loss"]]} set={setMetric} /></Figure>}
        {paid.length > 0 && <Figure title="Accuracy against cost" file={`${file}-cost`} at={{ ...all, split: "val" }} keys={keys} deps={[found, axis]} rows={() => paid.flatMap((c) => c.rounds.map((round, i) => ({ run: c.o.name, seed: c.o.seed, round, [axis]: c.x[i], personal: c.y[i] })))} draw={(width) => lines(paid, { width, share: true, xLabel: `${axes[axis].title} →`, xFormat: axes[axis].say })}>
          <Choose label="" value={axis} options={axisOptions(gpu)} set={setAxis} /></Figure>}
        {ends.length > 0 && <Figure title="Pareto front" file={`${file}-pareto`} at={all} keys={known.map(({ o, i }) => [label(o), colourOf(i), "square"])} deps={[found, axis]} caption="Each run at its reported split and round. On the line nobody is better for less." onPick={(d) => { location.hash = href(d.o.id); }}
          rows={() => ends.map((e) => ({ run: e.o.name, seed: e.o.seed, split: e.o.split, round: e.o.round, [axis]: e.x, personal: e.y, on_front: front.includes(e) }))}
          draw={(width) => dots(ends, { width, share: true, xLabel: `${axes[axis].title} →`, xFormat: axes[axis].say, zero: true, extra: [Plot.line(front, { x: "x", y: "y", stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "4 3", curve: "step-after" })] })}>
          <Choose label="" value={axis} options={axisOptions(gpu)} set={setAxis} /></Figure>}
        {quantiles.length > 0 && <Figure title="Who fares how" file={`${file}-distribution`} at={all} keys={keys} deps={[people, found]} caption="Clients from the worst to the best; the worst decile is shaded." rows={() => quantiles.flatMap((l) => l.x.map((x, i) => ({ run: l.o.name, seed: l.o.seed, split: l.o.split, round: l.o.round, quantile: x, personal: l.y[i] })))} draw={(width) => lines(quantiles, { width, share: true, xLabel: "share of clients →", xFormat: (v) => `${Math.round(100 * v)} %`, extra: [Plot.rectX([0], { x1: 0, x2: 0.1, fill: "var(--red)", fillOpacity: 0.08 })] })} />}
        {pairs.length > 0 && <Figure title={`Client by client against ${label(base!.o)}`} file={`${file}-paired`} at={{ ...all, split: base!.c!.split }} keys={known.slice(1).map(({ o, i }) => [label(o), colourOf(i), "square"])} deps={[people, found, flags.data]} caption="A dot above the line is a client that fares better than in the first run."
          rows={() => pairs.map((p) => ({ run: p.o.name, client: p.k, first: p.x, this: p.y }))} draw={(width) => dots(pairs, { width, height: Math.min(width, 380), share: true, xShare: true, diagonal: true, xLabel: `${label(base!.o)} →` })} />}
      </div>
      {flags.data && flags.data.settings.length > 0 && (
        <details><summary>{flags.data.settings.length} settings differ</summary><div class="tablewrap"><table class="plain"><thead><tr><th>setting</th>{flags.data.rows.map((r) => <th>{r.label as string}</th>)}</tr></thead><tbody>{flags.data.settings.map(([name, values]) => <tr><td><code>{name}</code></td>{values.map((v) => <td>{v}</td>)}</tr>)}</tbody></table></div></details>
      )}
    </>
  );
}

const same = (flags: Comparison | null) => flags != null && !flags.unfair.some((text) => text.startsWith("not the same partition"));
