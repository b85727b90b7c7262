import { type Line, bars, lines, short } from "./charts";
import type { Clients, Overview as Data } from "./data";
import { Figure } from "./figure";
import { count, duration, flop, percent, size } from "./format";
import { Tile, href, people } from "./parts";

const kinds = { personal: ["personal", "var(--blue)", ""], global: ["global", "var(--orange)", "6 3"], new: ["new clients", "var(--green)", "2 3"] } as const;

export function Headline({ run }: { run: Data }) {
  const meaning = { personal: "each client’s own network on its own data", global: "the server’s one model on every client’s data", new: "clients that joined after training" };
  return (
    <div class="tiles">
      {(Object.keys(kinds) as (keyof typeof kinds)[]).map((kind) => {
        const s = run.spreads[kind];
        return s && <Tile kind={kind} name={`${kinds[kind][0]} accuracy, ${run.split}, round ${run.round}`} value={percent(s.mean)} more={<>worst decile {percent(s.worst_decile)} · std over clients {percent(s.std)} · {people(s.n)}<br /><span class="quiet">{meaning[kind]}</span></>} />;
      })}
    </div>
  );
}

export function Curves({ run }: { run: Data }) {
  const at = { run: run.name, seed: run.seed };
  const curves: Line[] = (Object.keys(kinds) as (keyof typeof kinds)[]).flatMap((kind) => {
    const c = run.series[kind];
    return c ? [{ label: kinds[kind][0], colour: kinds[kind][1], dash: kinds[kind][2], x: c.rounds, y: c.mean, band: c.std }] : [];
  });
  const worst = run.series.worst;
  if (worst) curves.push({ label: "worst decile, personal", colour: "var(--red)", dash: "2 3", x: worst.rounds, y: worst.mean });
  const loss = run.series.loss;
  return (
    <>
      {curves.length > 0 && (
        <Figure title="Validation accuracy" file={`${run.name}-accuracy`} at={{ ...at, split: "val" }} caption="Mean over clients, with one std over clients on either side." deps={[run]}
          keys={curves.map((c) => [c.label, c.colour, c.dash ?? ""])}
          rows={() => curves.flatMap((c) => c.x.map((round, i) => ({ kind: c.label, round, mean: c.y[i], std_over_clients: c.band?.[i] })))}
          draw={(width) => lines(curves, { width, share: true })} />
      )}
      {loss && (
        <Figure title="Training loss" file={`${run.name}-loss`} at={{ ...at, split: "train" }} caption="Mean over the round’s participants, with one std over them." deps={[run]}
          rows={() => loss.rounds.map((round, i) => ({ round, mean: loss.mean[i], std: loss.std?.[i], participants: loss.n?.[i] }))}
          draw={(width) => lines([{ label: "loss", colour: "var(--ink)", x: loss.rounds, y: loss.mean, band: loss.std }], { width })} />
      )}
    </>
  );
}

export function RoundCosts({ run }: { run: Data }) {
  const c = run.costs, at = { run: run.name, seed: run.seed };
  if (!c.rounds.length) return null;
  const rows = () => c.rounds.map((round, i) => ({ round, bytes_down: c.down[i], bytes_up: c.up[i], client_flops: c.flops[i], simulated_seconds: c.simulated[i], measured_seconds: c.measured[i], participants: c.participants[i], late: c.late[i] }));
  const per = c.per > 1 ? ` Each bar is ${c.per} rounds.` : "";
  return (
    <>
      <Figure title="Traffic of each round" file={`${run.name}-traffic`} at={at} caption={`Sums over the round’s participants.${per}`} deps={[run]} rows={rows}
        keys={[["to clients", "var(--blue)", "square"], ["from clients", "var(--orange)", "square"]]}
        draw={(width) => bars(c.rounds.flatMap((x, i) => [{ x, y: c.down[i]!, kind: "to clients" }, { x, y: c.up[i]!, kind: "from clients" }]), { "to clients": "var(--blue)", "from clients": "var(--orange)" }, { width, yFormat: size, step: c.per })} />
      <Figure title="Time of each round" file={`${run.name}-time`} at={at} caption="Simulated on the fleet’s devices (the slowest participant), and measured here." deps={[run]} rows={rows}
        keys={[["simulated", "var(--green)"], ["measured", "var(--purple)", "6 3"]]}
        draw={(width) => lines([{ label: "simulated", colour: "var(--green)", x: c.rounds, y: c.simulated.map((v) => v / c.per) }, { label: "measured", colour: "var(--purple)", dash: "6 3", x: c.rounds, y: c.measured.map((v) => v / c.per) }], { width, height: 190, yFormat: (v) => (v >= 1 ? `${short(v)} s` : `${short(1000 * v)} ms`), zero: true })} />
    </>
  );
}

/** Everybody as a small square; filled: at work now. */
export function Working({ run, clients }: { run: Data; clients: Clients | null }) {
  if (run.status !== "running" || !run.now) return null;
  const busy = new Set(run.now.clients), n = clients?.name.length ?? run.clients ?? 0;
  return (
    <section class="panel" aria-live="off">
      <h3>Working now <span class="quiet">round {run.now.round} of {run.rounds}, {busy.size} of {n} clients</span></h3>
      <div class="crowd">
        {Array.from({ length: n }, (_, c) => <a class={busy.has(c) ? "busy" : ""} href={href(run.id, "clients", String(c))} title={`${clients?.name[c] ?? `client ${c}`}${busy.has(c) ? " works" : ""}`} aria-label={`${clients?.name[c] ?? c}${busy.has(c) ? ", working" : ""}`} />)}
      </div>
    </section>
  );
}

export function Totals({ run }: { run: Data }) {
  const s = run.summary;
  const gpu = run.device.startsWith("cuda");
  const items: [string, string][] = [
    ["Sent to clients", size(s.bytes_down)], ["Received from clients", size(s.bytes_up)],
    ["Arithmetic at clients", flop(run.costs.flops.reduce((a, b) => a + b, 0))],
    ["Simulated time", duration(s.simulated_hours == null ? null : 3600 * s.simulated_hours)],
    [gpu ? "GPU seconds, measured" : "Measured time", duration(s.measured_seconds)],
    ["Parameters of a client’s network, mean", count(s.personal_parameters)], ["FLOPs per image, mean", count(s.personal_flops)],
  ];
  return <dl class="costs">{items.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>;
}

export function Overview({ run, clients }: { run: Data; clients: Clients | null }) {
  return (
    <>
      <p class="lead">{run.lead}</p>
      <Headline run={run} />
      <Working run={run} clients={clients} />
      <div class="figures"><Curves run={run} /><RoundCosts run={run} /></div>
      <h2>Costs so far</h2>
      <Totals run={run} />
    </>
  );
}
