// Architectures: who is like whom, how the search went, and the figures of the papers.
import { useMemo, useState } from "preact/hooks";
import * as Plot from "@observablehq/plot";
import { cellGraph, cells, cut, dots, headline, lines, panels, pixels, short, whole } from "./charts";
import { type Archs as Data, type Clients, type Devices, type Gain, type Overview, frozen, useView } from "./data";
import { Figure } from "./figure";
import { blue, classColour, colourOf, count, flop, optionColour, percent, pole, quantile, size } from "./format";
import { Choose, href, mainClass, people } from "./parts";
import { Policies } from "./policy";

export function Archs({ run, data, archs, devices }: { run: Overview; data: Clients; archs: Data | null; devices: Devices | null }) {
  const gain = useView<Gain>("gain", { run: run.id });
  const [client, setClient] = useState("");
  if (!archs) return <><p class="quiet">This run searches nothing: every client has a network of the same form, <b>{run.network}</b>.</p><div class="figures">{devices && <Memory run={run} data={data} devices={devices} />}{gain.data && <GainMatrix run={run} gain={gain.data} />}</div></>;
  const cellular = archs.dimensions.length === 28 && archs.dimensions[0]!.name === "normal.edge0";
  const who = archs.clients.map((c) => [String(c), data.name[c]!] as [string, string]);
  return (
    <>
      <p>{people(archs.clients.length)} {archs.kept ? "keep" : "were last sent"} {archs.distinct === 1 ? "one and the same architecture" : `${archs.distinct} different architectures`} of <b>{run.network}</b>, a space of {archs.dimensions.length} choices.{archs.odd.length > 0 && ` ${archs.odd.length} do not fit the space and are left out.`}</p>
      <div class="figures">
        {archs.xy && archs.distinct > 1 && <Atlas run={run} data={data} archs={archs} devices={devices} />}
        {archs.frames && <Policies run={run} archs={archs} data={data} />}
      </div>
      {archs.clients.length > 0 && <div class="controls"><Choose label="In the pictures below, mark" value={client} options={[["", "nobody"], ...who]} set={setClient} /></div>}
      <div class="figures">
        {cellular ? <Cells run={run} archs={archs} data={data} client={client} /> : <Ribbons run={run} archs={archs} data={data} client={client} />}
        {!cellular && <Options run={run} archs={archs} data={data} />}
        {archs.shares && <Shares run={run} archs={archs} />}
        {devices?.shrink && <Shrink run={run} shrink={devices.shrink} data={data} client={client} />}
        {devices && <Memory run={run} data={data} devices={devices} />}
        {gain.data && <GainMatrix run={run} gain={gain.data} />}
      </div>
      {!gain.data && !frozen && run.finished && <p class="quiet small">What each client’s own architecture is worth (SPIDER, eq. 6): <code>fedtailor gain</code> with this run’s folder writes the matrix, and it appears here.</p>}
    </>
  );
}

function Atlas({ run, data, archs, devices }: { run: Overview; data: Clients; archs: Data; devices: Devices | null }) {
  const [by, setBy] = useState<"label" | "samples" | "device" | "accuracy">(data.counts ? "label" : "samples");
  const kinds = [...new Set(devices?.device ?? [])].sort();
  const most = Math.max(1, ...data.samples.map((s) => s ?? 0));
  const known = data.personal.filter((v): v is number => v != null), low = Math.min(...known), high = Math.max(...known, low + 1e-9);
  const colour = (c: number): string => by === "label" && data.counts?.[c] ? classColour(mainClass(data.counts[c]!), data.classes.length)
    : by === "device" && devices ? colourOf(kinds.indexOf(devices.device[c]!))
    : by === "accuracy" ? blue(data.personal[c] == null ? 0 : (data.personal[c]! - low) / (high - low)) : blue(Math.sqrt((data.samples[c] ?? 0) / most));
  // clients with the same architecture would lie on one another: they form a small flower
  const dotsAt = useMemo(() => {
    const reach = Math.max(...archs.xy!.map((p) => Math.max(Math.abs(p[0]), Math.abs(p[1]))), 1e-6), seen = new Map<string, number>();
    return archs.xy!.map(([x, y]) => { const key = `${x.toFixed(3)},${y.toFixed(3)}`, k = seen.get(key) ?? 0; seen.set(key, k + 1); const r = 0.022 * reach * Math.sqrt(k), a = 2.4 * k; return [x + r * Math.cos(a), y + r * Math.sin(a)] as const; });
  }, [archs]);
  const all = archs.clients.map((c, i) => ({
    x: dotsAt[i]![0], y: dotsAt[i]![1], client: c, fill: colour(c), r: data.personal[c] == null ? 3 : (archs.clients.length > 300 ? 2 : 3.5) + (archs.clients.length > 300 ? 3.5 : 7) * (data.personal[c]! - low) / (high - low),
    title: `${data.name[c]}\n${percent(data.personal[c])} ${data.split}, ${count(data.samples[c])} images${data.counts?.[c] ? `, mostly ${data.classes[mainClass(data.counts[c]!)]}` : ""}${devices ? `\n${devices.device[c]}` : ""}`,
  }));
  const labels = new Map<number, string>(), groups = new Map<string, number[]>();
  archs.clients.forEach((c, i) => { const at = archs.xy![i]!.map((v) => v.toFixed(2)).join(); groups.set(at, [...(groups.get(at) ?? []), c]); });
  for (const [first, ...others] of groups.values()) labels.set(first!, cut(data.name[first!]!, 20) + (others.length ? ` +${others.length}` : ""));
  const keys: [string, string, string][] | undefined = by === "label" && data.classes.length <= 12 ? data.classes.map((name, k) => [name, classColour(k, data.classes.length), "dot"]) : by === "device" ? kinds.map((name, k) => [name, colourOf(k), "dot"]) : undefined;
  const options: [typeof by, string][] = [...(data.counts ? [["label", "most frequent label"] as [typeof by, string]] : []), ["samples", "number of images"], ["accuracy", "accuracy"], ...(devices ? [["device", "device"] as [typeof by, string]] : [])];
  return (
    <Figure wide title="Atlas" file={`${run.name}-atlas`} at={{ run: run.name, round: data.round, split: data.split, seed: run.seed }} keys={keys} deps={[archs, data, by, devices]} onPick={(dot) => { location.hash = href(run.id, "clients", String(dot.client)); }}
      caption={<>Clients near each other have like architectures (classical scaling of the distance between choices; the axes hold {percent(archs.explained![0], 0)} and {percent(archs.explained![1], 0)} of it, each stretched to the picture). Larger: more accurate. Equal architectures stand as a flower. Click opens the client.</>}
      rows={() => archs.clients.map((c, i) => ({ client: c, name: data.name[c], x: archs.xy![i]![0], y: archs.xy![i]![1], accuracy: data.personal[c], images: data.samples[c], label: data.counts?.[c] ? data.classes[mainClass(data.counts[c]!)] : "", device: devices?.device[c], arch: data.arch?.[c] }))}
      draw={(width) => dots(all, { width, height: Math.min(460, width * 0.45), axes: false, names: all.length <= 40 ? (d) => labels.get(d.client!) ?? "" : undefined })}>
      <Choose label="Colour" value={by} options={options} set={setBy} />
    </Figure>
  );
}

/** Widths and depths as ribbons: where the clients' choices lie, layer by layer. */
function Ribbons({ run, archs, data, client }: { run: Overview; archs: Data; data: Clients; client: string }) {
  const kinds = new Map<string, number[]>();
  archs.dimensions.forEach((d, i) => { if (archs.numeric[i]) { const kind = d.name.split(".").at(-1)!.replace(/\d+$/, "") || d.name; kinds.set(kind, [...(kinds.get(kind) ?? []), i]); } });
  const mark = client === "" ? -1 : archs.clients.indexOf(Number(client));
  return (
    <>
      {[...kinds].filter(([, dims]) => dims.length > 1).map(([kind, dims]) => {
        const rows = dims.map((d, x) => {
          const v = archs.choices.map((arch) => archs.values[d]![arch[d]![0] ?? 0]!).sort((a, b) => a - b);
          return { x, name: archs.dimensions[d]!.name, low: v[0]!, q1: quantile(v, 0.25), median: quantile(v, 0.5), q3: quantile(v, 0.75), high: v.at(-1)!, mean: v.reduce((a, b) => a + b, 0) / v.length, mine: mark < 0 ? null : archs.values[d]![archs.choices[mark]![d]![0] ?? 0]! };
        });
        return (
          <Figure title={`Ribbon: ${kind}`} file={`${run.name}-ribbon-${kind}`} at={{ run: run.name, round: archs.round, seed: run.seed }} deps={[archs, client]} rows={() => rows.map(({ x: _, ...row }) => row)}
            keys={[["all clients", "var(--sky)", "square"], ["the middle half", "var(--blue)", "square"], ["mean", "var(--blue)"], ...(mark >= 0 ? [[data.name[Number(client)]!, "var(--red)", "6 3"] as [string, string, string]] : [])]} caption="From the input on the left to the output."
            draw={(width) => Plot.plot({
              width, height: 230, marginBottom: 46, marginLeft: 46, style: { fontSize: "11px", background: "transparent", overflow: "visible" },
              x: { domain: [0, rows.length - 1], ticks: rows.map((r) => r.x), tickFormat: (x: number) => rows[x]?.name.split(".")[0] ?? "", tickRotate: rows.length > 6 ? -40 : 0, label: null }, y: { label: kind, grid: true, zero: true, ticks: 5 },
              marks: [
                Plot.areaY(rows, { x: "x", y1: "low", y2: "high", fill: "var(--sky)", fillOpacity: 0.25, curve: "monotone-x" }), Plot.areaY(rows, { x: "x", y1: "q1", y2: "q3", fill: "var(--blue)", fillOpacity: 0.35, curve: "monotone-x" }),
                Plot.line(rows, { x: "x", y: "mean", stroke: "var(--blue)", strokeWidth: 2, curve: "monotone-x" }),
                ...(mark >= 0 ? [Plot.line(rows, { x: "x", y: "mine", stroke: "var(--red)", strokeWidth: 2, strokeDasharray: "6 3" }), Plot.dot(rows, { x: "x", y: "mine", fill: "var(--red)", r: 3 })] : []),
                Plot.tip(rows, Plot.pointerX({ x: "x", y: "mean", fill: "var(--paper)", stroke: "var(--rule)", title: (r: any) => `${r.name}\nmean ${short(r.mean)}, middle half ${short(r.q1)} to ${short(r.q3)}` } as any)),
              ],
            })} />
        );
      })}
    </>
  );
}

/** How colours tell options apart: numbers from pale to dark, names each by one of its own. */
function said(archs: Data): string {
  const numbers = archs.numeric.some(Boolean) ? "Darker: a later option." : "";
  const names = archs.numeric.every(Boolean) ? [] : [...new Set(archs.dimensions.flatMap((d, k) => (archs.numeric[k] ? [] : [d.name])))];
  return [numbers, names.length ? `${numbers ? `In ${names.slice(0, 4).join(", ")}${names.length > 4 ? " …" : ""}, each` : "Each"} option has a colour of its own.` : ""].filter(Boolean).join(" ");
}

/** Who keeps which option: clients by dimensions, like ones together. */
function Options({ run, archs, data }: { run: Overview; archs: Data; data: Clients }) {
  if (!archs.order?.length) return null;
  const place = new Map(archs.clients.map((c, i) => [c, i]));
  const chosen = (i: number, j: number) => archs.choices[place.get(archs.order![i]!)!]![j]![0] ?? -1;
  const names = archs.order.map((c) => data.name[c]!), dims = archs.dimensions.map((d) => d.name);
  return (
    <Figure wide={dims.length > 12} title="Who keeps what" file={`${run.name}-choices`} at={{ run: run.name, round: archs.round, seed: run.seed }} deps={[archs]} caption={`${said(archs)} Clients with like networks stand together.`}
      rows={() => archs.clients.map((c, i) => ({ client: c, name: data.name[c], ...Object.fromEntries(dims.map((d, k) => [d, archs.choices[i]![k]!.map((o) => archs.dimensions[k]!.options[o]).join("+")])) }))}
      draw={(width) => pixels(names, dims, (i, j) => { const o = chosen(i, j), { options } = archs.dimensions[j]!; return o < 0 ? "#fff" : optionColour(options[o]!, o, options.length, archs.numeric[j]!); }, { width, title: (i, j) => `${names[i]}, ${dims[j]}: ${archs.dimensions[j]!.options[chosen(i, j)] ?? "–"}`, onClick: (i) => { location.hash = href(run.id, "clients", String(archs.order![i])); } })} />
  );
}

function Shares({ run, archs }: { run: Overview; archs: Data }) {
  const [first, setFirst] = useState("0");
  const s = archs.shares!, per = 6, pages = Math.ceil(archs.dimensions.length / per), from = Number(first) * per;
  const dims = archs.dimensions.slice(from, from + per);
  const rows = () => archs.dimensions.flatMap((d, k) => d.options.flatMap((option, o) => s.edges.slice(0, -1).map((round, w) => ({ dimension: d.name, option, from_round: round, to_round: s.edges[w + 1]! - 1, share: s.dims[k]![o]![w] }))));
  return (
    <Figure wide title="Options sent out over the rounds" file={`${run.name}-options`} at={{ run: run.name, seed: run.seed }} deps={[archs, first]} rows={rows} caption={`Share of the participants that were sent each option, round by round; the first option is the lowest. ${said(archs)}`}
      draw={(width) => panels(width, dims, (d, k, wide) => {
        const table = s.dims[from + k]!, all = d.options.flatMap((option, o) => s.edges.flatMap((round, w) => ({ round, o, option, share: table[o]![Math.min(w, table[o]!.length - 1)]! })));
        return Plot.plot({
          width: wide, height: 144, marginLeft: 46, marginTop: 26, marginBottom: 24, style: { fontSize: "11px", background: "transparent" },
          x: { label: null, ticks: 4, tickFormat: whole as any }, y: { label: null, ticks: 3, tickFormat: (v: number) => `${100 * v} %`, domain: [0, 1] },
          marks: [
            Plot.areaY(all, { x: "round", y: "share", z: "o", order: "o", curve: "step-after", fill: (p: any) => optionColour(d.options[p.o]!, p.o, d.options.length, archs.numeric[from + k]!), title: (p: any) => p.option } as any),
            headline(`${d.name}: ${d.options.join(", ")}`, wide),
          ],
        });
      })}>
      {pages > 1 && <Choose label="dimensions" hidden value={first} options={Array.from({ length: pages }, (_, p) => [String(p), `${archs.dimensions[p * per]!.name} … `] as [string, string])} set={setFirst} />}
    </Figure>
  );
}

const EDGES: [number, number][] = [2, 3, 4, 5].flatMap((to) => Array.from({ length: to }, (_, from) => [from, to] as [number, number]));

/** Both cells of a DARTS space: of one client, or what most clients keep. */
function Cells({ run, archs, data, client }: { run: Overview; archs: Data; data: Clients; client: string }) {
  const mark = client === "" ? -1 : archs.clients.indexOf(Number(client));
  const chosen = mark < 0 ? archs.choices : [archs.choices[mark]!];
  const edges = (cell: number) => EDGES.flatMap(([from, to], e) => {
    const d = 14 * cell + e, { options } = archs.dimensions[d]!, counts = options.map(() => 0);
    for (const arch of chosen) for (const o of arch[d]!) counts[o]! += 1;
    return options.flatMap((op, o) => (op === "none" || !counts[o] || (mark < 0 && counts[o]! < Math.max(...counts)) ? [] : [{ from, to, op, share: counts[o]! / chosen.length, note: `${archs.dimensions[d]!.name}: ${options.map((name, k) => `${name} ${percent(counts[k]! / chosen.length, 0)}`).join(", ")}` }]));
  });
  const ops = [...new Set(archs.dimensions.flatMap((d) => d.options))].filter((op) => op !== "none");
  const colour = (op: string) => optionColour(op, 0, 8, false);
  const rows = () => archs.dimensions.flatMap((d, k) => d.options.map((op, o) => ({ edge: d.name, operation: op, clients: chosen.filter((arch) => arch[k]!.includes(o)).length, of: chosen.length })));
  const at = { run: run.name, round: archs.round, seed: run.seed };
  const table = (cell: number) => (
    <Figure title={["Normal cell", "Reduction cell"][cell]! + ": operations by edge"} file={`${run.name}-edges-${cell ? "reduce" : "normal"}`} at={at} deps={[archs, client]} caption="The share of clients whose network has the operation on the edge." rows={rows}
      draw={(width) => cells(EDGES.map(([from, to]) => `${["k−2", "k−1", "0", "1", "2"][from]} → ${to - 2}`), archs.dimensions[14 * cell]!.options, (i, j) => archs.choices.filter((arch) => arch[14 * cell + i]!.includes(j)).length / archs.choices.length, { width, colour: (v) => blue(v), dark: (v) => v > 0.55, text: (v) => percent(v, 0), side: 150 })} />
  );
  return (
    <>
      {[0, 1].map((cell) => (
        <Figure title={`${cell ? "Reduction" : "Normal"} cell${mark < 0 ? ", what most clients keep" : ` of ${data.name[Number(client)]}`}`} file={`${run.name}-cell-${cell ? "reduce" : "normal"}`} at={at} deps={[archs, client]} rows={rows} keys={ops.map((op) => [op, colour(op)])}
          caption="Two inputs, four nodes, the output. A thicker edge is kept by more clients; hover for all of them." draw={(width) => cellGraph("", edges(cell), colour, width)} />
      ))}
      {table(0)}{table(1)}
    </>
  );
}

function Shrink({ run, shrink, data, client }: { run: Overview; shrink: NonNullable<Devices["shrink"]>; data: Clients; client: string }) {
  const at = { run: run.name, round: run.round, seed: run.seed };
  // where nearly everybody has a budget of his own, one picture says more than dozens
  const all = { budget: `${shrink.groups.length} different budgets`, rows: shrink.clients.map((_, r) => r), distance: null };
  return (
    <>
      {(shrink.groups.length > 6 ? [all] : shrink.groups).map((group, g) => {
        const mean = shrink.dimensions.map((_, d) => group.rows.reduce((sum, r) => sum + shrink.shares[r]![d]!, 0) / group.rows.length);
        const x = shrink.dimensions.map((_, d) => d), shown = group.rows.slice(0, 60), mine = group.rows.find((r) => String(shrink.clients[r]) === client);
        return (
          <Figure title={`Shrink ratios: ${group.budget}`} file={`${run.name}-shrink-${g + 1}`} at={at} deps={[shrink, client]} caption={`What ${group.rows.length} client${group.rows.length === 1 ? "" : "s"}${group.distance == null ? "" : " of this budget"} kept of the largest option; the thick line is the mean.${group.distance == null ? "" : ` Mean distance between two: ${group.distance} (Luo et al., Figure 3).`}`}
            rows={() => group.rows.flatMap((r) => shrink.dimensions.map((dimension, d) => ({ client: shrink.clients[r], name: data.name[shrink.clients[r]!], budget: group.budget, dimension, kept: shrink.shares[r]![d] })))}
            draw={(width) => lines([...shown.map((r) => ({ label: data.name[shrink.clients[r]!]!, colour: colourOf(g), x, y: shrink.shares[r]!, thin: true })), { label: "mean", colour: colourOf(g), x, y: mean }, ...(mine != null ? [{ label: data.name[Number(client)]!, colour: "var(--red)", dash: "6 3", x, y: shrink.shares[mine]! }] : [])], { width, share: true, xNames: shrink.dimensions, zero: true })} />
        );
      })}
    </>
  );
}

/** PerFedRLNAS's picture: what training the network takes, against what the device has. */
function Memory({ run, data, devices }: { run: Overview; data: Clients; devices: Devices }) {
  const quantities = Object.keys(devices.limits).filter((q) => devices.used[q]);
  const [which, setWhich] = useState("");
  const q = which || (quantities.includes("memory") ? "memory" : quantities[0]);
  if (!q) return null;
  const say = (v: number) => (q === "memory" || q === "bytes" ? size(v) : q === "seconds" ? `${short(v)} s` : q === "flops" ? flop(v) : count(v));
  const all = data.name.flatMap((name, c) => {
    const limit = devices.limits[q]![c], used = devices.used[q]?.[c];
    return limit == null || used == null ? [] : [{ x: limit, y: used, client: c, fill: used > limit ? "var(--red)" : "var(--blue)", symbol: used > limit ? "diamond" : "circle", title: `${name} (${devices.device[c]})\nneeds ${say(used)} of ${say(limit)}, ${percent(used / limit, used / limit < 0.01 ? 3 : 1)}` }];
  });
  const top = Math.max(...all.map((d) => d.y)), base = Math.min(...all.map((d) => d.x)), near = top > base / 3;
  return (
    <Figure title={`${q === "flops" ? "FLOPs" : `${q[0]!.toUpperCase()}${q.slice(1)}`} against budget`} file={`${run.name}-budget-${q}`} at={{ run: run.name, round: run.round, seed: run.seed }} deps={[data, devices, q]} onPick={(d) => { location.hash = href(run.id, "clients", String(d.client)); }}
      caption={`What ${q === "memory" ? "training " : ""}each client’s network needs, against what its device affords${devices.hard ? " (a hard limit)" : ""}.${near ? " The line is all of the budget." : " All networks are far below it."}`}
      rows={() => all.map((d) => ({ client: d.client, name: data.name[d.client], device: devices.device[d.client], limit: d.x, needs: d.y }))}
      draw={(width) => dots(all, { width, xLabel: "budget →", yLabel: "↑ needed", xFormat: say, yFormat: say, diagonal: near, marginLeft: 78 })}>
      {quantities.length > 1 && <Choose label="quantity" hidden value={q} options={quantities.map((name) => [name, name] as [string, string])} set={setWhich} />}
    </Figure>
  );
}

function GainMatrix({ run, gain }: { run: Overview; gain: Gain }) {
  const n = gain.names.length, difference = (i: number, j: number) => gain.accuracy[i]![i]! - gain.accuracy[i]![j]!;
  const gains = gain.names.map((_, i) => gain.names.reduce((sum, _, j) => sum + difference(i, j), 0) / Math.max(1, n - 1));
  const reach = Math.max(1e-6, ...gain.names.flatMap((_, i) => gain.names.map((_, j) => Math.abs(difference(i, j)))));
  const mean = gains.reduce((a, b) => a + b, 0) / n;
  return (
    <Figure wide title="Personalisation gain" file={`${run.name}-gain`} at={{ run: run.name, round: run.round, split: "test", seed: run.seed }} deps={[gain]} caption={`Percentage points that the client in the row loses with the network of the client in the column, tuned on its data; the last column is its gain (SPIDER, eq. 6). Mean gain ${(100 * mean).toFixed(2)}.`}
      rows={() => gain.names.flatMap((client, i) => gain.names.map((owner, j) => ({ client, architecture_of: owner, test_accuracy: gain.accuracy[i]![j], own_minus_this: difference(i, j) })))}
      draw={(width) => cells(gain.names, [...gain.names, "gain"], (i, j) => (j < n ? difference(i, j) : gains[i]!), { width, colour: (v) => pole(v / reach), dark: (v) => Math.abs(v / reach) > 0.6, text: (v) => (100 * v).toFixed(1), xLabel: "architecture of", side: 60 })} />
  );
}
