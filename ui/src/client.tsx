// One client: what it has, what it got, whom it shares with, where it errs.
import { useEffect } from "preact/hooks";
import * as Plot from "@observablehq/plot";
import { type Line, cells, lines } from "./charts";
import { type About, type Archs, type Client as One, type Clients, type Devices, type Drawing, type Look, type Overview, frozen, useView } from "./data";
import { Figure, saveSvg } from "./figure";
import { blue, classColour, count, optionColour, percent, size } from "./format";
import { Bar, Glyph, Tile, href } from "./parts";
import { ClientPolicy } from "./policy";

export function Client({ run, data, archs, devices, client, every }: { run: Overview; data: Clients; archs: Archs | null; devices: Devices | null; client: number; every: number }) {
  const params = { run: run.id, client };
  const one = useView<One>("client", params, every);
  const drawn = useView<Drawing>("drawing", params);
  const look = useView<Look>("look", params);
  const about = useView<About>("about", { run: run.id });
  const n = data.name.length, at = { run: run.name, seed: run.seed }, name = data.name[client];
  useEffect(() => {
    const keys = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement).closest("input, select, textarea") || event.ctrlKey || event.metaKey) return;
      if (event.key === "[" && client > 0) location.hash = href(run.id, "clients", String(client - 1));
      if (event.key === "]" && client < n - 1) location.hash = href(run.id, "clients", String(client + 1));
      if (event.key === "Escape") location.hash = href(run.id, "clients");
    };
    window.addEventListener("keydown", keys);
    return () => window.removeEventListener("keydown", keys);
  }, [client, n, run.id]);
  if (name == null) return <p class="warning">There is no client {client} in this run.</p>;
  const counts = data.counts?.[client], total = counts?.reduce((a, b) => a + b, 0) ?? 0;
  const all = data.counts?.reduce((sum, row) => sum.map((v, k) => v + row[k]!), data.classes.map(() => 0));
  const whole = all?.reduce((a, b) => a + b, 0) ?? 1;
  const curve = data.curves, own = one.data?.series;
  const mine: Line[] = [];
  const average = run.series.personal;
  if (average) mine.push({ label: "mean of all clients", colour: "var(--grey)", x: average.rounds, y: average.mean, dash: "2 3" });
  if (own?.global) mine.push({ label: "global model on this client", colour: "var(--orange)", dash: "6 3", x: own.global.rounds, y: own.global.value });
  if (own?.personal) mine.push({ label: "its own network", colour: "var(--blue)", x: own.personal.rounds, y: own.personal.value });
  else if (curve) mine.push({ label: "its own network", colour: "var(--blue)", x: curve.rounds, y: curve.personal[client]!.map((v) => (v == null ? null : v / 1e4)) });
  const place = archs ? archs.clients.indexOf(client) : -1;
  return (
    <section class="client">
      <p class="crumbs"><a href={href(run.id, "clients")}>← all clients</a>{client > 0 && <a href={href(run.id, "clients", String(client - 1))} title="key [">‹ {data.name[client - 1]}</a>}{client < n - 1 && <a href={href(run.id, "clients", String(client + 1))} title="key ]">{data.name[client + 1]} ›</a>}</p>
      <h2>{name}{data.held[client] && <span class="quiet"> held out of training</span>}</h2>
      <div class="tiles">
        <Tile kind="personal" name={`own network, ${data.split}, round ${data.round}`} value={percent(data.personal[client])} more={data.global?.[client] != null ? `global model ${percent(data.global[client])}` : undefined} />
        <Tile name="training images" value={count(data.samples[client])} more={`${data.rounds_taken[client]} rounds, ${size(data.bytes[client])} of traffic`} />
        {devices && <Tile name="device" value={<span class="smaller">{devices.device[client]}</span>} more={devices.budget[client]} />}
        {data.parameters?.[client] != null && <Tile name="parameters" value={count(data.parameters[client])} more={`${count(data.flops?.[client])} FLOPs per image`} />}
      </div>
      <div class="figures">
        {mine.length > 0 && <Figure title="Accuracy over the rounds" file={`${run.name}-client-${client}-accuracy`} at={{ ...at, split: "val" }} deps={[one.data, run, client]} keys={mine.map((l) => [l.label, l.colour, l.dash ?? ""])}
          rows={() => mine.flatMap((l) => l.x.map((round, i) => ({ client, line: l.label, round, accuracy: l.y[i] })))} draw={(width) => lines(mine, { width, share: true })} />}
        {own?.loss && <Figure title="Its training loss" file={`${run.name}-client-${client}-loss`} at={{ ...at, split: "train" }} deps={[one.data, client]} caption="In the rounds that it took part in." rows={() => own.loss!.rounds.map((round, i) => ({ client, round, loss: own.loss!.value[i] }))}
          draw={(width) => lines([{ label: "loss", colour: "var(--ink)", x: own.loss!.rounds, y: own.loss!.value }], { width })} />}
        {counts && all && data.classes.length <= 120 && <Figure title="Labels of its training images" file={`${run.name}-client-${client}-labels`} at={{ ...at, split: "train" }} deps={[client]} caption="The line is the share of the label in the whole federation." rows={() => counts.map((n, k) => ({ client, label: data.classes[k], images: n, share_in_federation: all[k]! / whole }))}
          draw={(width) => Plot.plot({ width, height: 220, marginLeft: 46, marginBottom: data.classes.some((c) => c.length > 4) || data.classes.length > 20 ? 56 : 28, style: { fontSize: "11px", background: "transparent" }, x: { domain: data.classes.map((_, k) => k), tickFormat: (k: number) => data.classes[k]!.slice(0, 10), tickRotate: data.classes.some((c) => c.length > 4) || data.classes.length > 20 ? -40 : 0, label: null }, y: { label: "images", grid: true, ticks: 5 }, color: { type: "identity" },
            marks: [Plot.barY(counts, { x: (_: any, k: number) => k, y: (d: any) => d, fill: (_: any, k: number) => classColour(k, counts.length), inset: 1 } as any), Plot.tickY(all, { x: (_: any, k: number) => k, y: (v: any) => (v / whole) * total, stroke: "currentColor", strokeWidth: 1.6 } as any), Plot.ruleY([0])] })} />}
        {look.data && <Confusion look={look.data} run={run} client={client} />}
      </div>
      {look.data && (look.data.right.length > 0 || look.data.wrong.length > 0) && (
        <section class="panel">
          <h3>A few of its pictures <span class="quiet">{look.data.split} split, round {run.round}, seed {run.seed}, evenly spread, not picked</span></h3>
          <div class="shots">{look.data.wrong.map((s) => <figure class="shot wrong"><img src={`data:image/png;base64,${s.png}`} alt={`a picture of ${s.label}`} /><figcaption>✗ {s.said}<br /><span class="quiet">is {s.label}</span></figcaption></figure>)}
            {look.data.right.map((s) => <figure class="shot"><img src={`data:image/png;base64,${s.png}`} alt={`a picture of ${s.label}`} /><figcaption>✓ {s.said}</figcaption></figure>)}</div>
          {!look.data.wrong.length && <p class="quiet small">Its network gets all of them right.</p>}
        </section>
      )}
      {!look.data && !frozen && <p class="quiet small">{look.busy ? "Asking its network about its pictures …" : `No confusion matrix and no pictures: ${look.problem}`}</p>}
      <h2>Its network</h2>
      {archs && place >= 0 && (
        <div class="tablewrap"><table class="plain narrow">
          <tbody>
            {groups(archs).map(([group, dims]) => (
              <tr><th scope="row">{group}</th><td>{dims.map((d) => {
                const { name, options } = archs.dimensions[d]!, kept = archs.choices[place]![d]!;
                return <span class="option" title={`${name}: of ${options.join(", ")}`}><span class="quiet">{name.split(".").slice(1).join(".") || ""}</span> {kept.length ? kept.map((i) => <span class="pill" style={{ "--colour": optionColour(options[i]!, i, options.length, archs.numeric[d]!) }}>{options[i]}</span>) : "–"}</span>;
              })}</td></tr>
            ))}
          </tbody>
        </table></div>
      )}
      {drawn.data && (
        <figure class="wide drawn" data-figure="arch">
          <div class="figure-head"><h3>{drawn.data.words.length < 90 ? drawn.data.words : "Drawn with sizes and costs"}</h3><div class="tools"><button class="tool" onClick={(event) => saveSvg((event.currentTarget as HTMLElement).closest("figure")!, `${run.name}-client-${client}-network`)}>SVG</button></div></div>
          <img data-svg src={`data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn.data.svg)}`} alt={`the network of ${name}: ${drawn.data.words}`} />
          <figcaption>{count(drawn.data.parameters)} parameters, {count(drawn.data.flops)} FLOPs per image. <span class="from">{run.name} · round {data.round} · seed {run.seed}</span></figcaption>
        </figure>
      )}
      {!drawn.data && !frozen && drawn.problem && <p class="quiet small">No drawing: {drawn.problem}</p>}
      <ClientPolicy run={run} archs={archs} client={client} />
      <h2>What it shares, and with whom</h2>
      {about.data?.card?.shared ? <p>{run.method}: shared is the {about.data.card.shared}; personal is the {about.data.card.personal}.</p> : <p class="quiet">What {run.method} shares: <code>fedtailor explain {run.method}</code></p>}
      {drawn.data && drawn.data.shares.length > 0 ? (
        <div class="tablewrap"><table class="plain narrow sharing">
          <caption>The share of this client’s weights that lie in the other’s network too: both are cut from one supernet. The {drawn.data.shares.length} closest by architecture.</caption>
          <thead><tr><th>client</th><th>weights in common</th><th class="right">same choices</th><th>network</th></tr></thead>
          <tbody>{drawn.data.shares.map((s) => {
            const i = archs?.clients.indexOf(s.client) ?? -1;
            return <tr><td><a href={href(run.id, "clients", String(s.client))}>{data.name[s.client]}</a></td><td><Bar share={s.share} /><span class="num">{percent(s.share, 0)}</span></td><td class="right">{s.same} of {archs?.dimensions.length}</td><td>{archs && i >= 0 && <Glyph choices={archs.choices[i]!} archs={archs} />}</td></tr>;
          })}</tbody>
        </table></div>
      ) : !archs && <p class="quiet">All clients have networks of the same form.</p>}
    </section>
  );
}

function Confusion({ look, run, client }: { look: Look; run: Overview; client: number }) {
  const used = look.classes.map((_, k) => k).filter((k) => look.matrix[k]!.some(Boolean) || look.matrix.some((row) => row[k]));
  const names = used.map((k) => look.classes[k]!), most = Math.max(...look.matrix.flat(), 1);
  return (
    <Figure title="Confusion" file={`${run.name}-client-${client}-confusion`} at={{ run: run.name, round: run.round, split: look.split, seed: run.seed }} deps={[look, client]} caption={`Rows are the labels, columns what its network says; ${percent(look.accuracy)} right.`}
      rows={() => used.flatMap((i) => used.map((j) => ({ client, label: look.classes[i], said: look.classes[j], images: look.matrix[i]![j] })))}
      draw={(width) => cells(names, names, (i, j) => look.matrix[used[i]!]![used[j]!]!, { width, colour: (v) => (v ? blue(0.08 + (0.92 * v) / most) : "var(--wash)"), dark: (v) => v / most > 0.5, text: (v) => (v ? String(v) : ""), xLabel: "said", side: names.length < 8 ? 64 : 40 })} />
  );
}

/** Dimensions by what stands before their dot: a stage, or a cell. */
export function groups(archs: Archs): [string, number[]][] {
  const found = new Map<string, number[]>();
  archs.dimensions.forEach((d, i) => { const name = d.name.split(".")[0]!; found.set(name, [...(found.get(name) ?? []), i]); });
  return [...found];
}
