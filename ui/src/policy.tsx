// Policies over the rounds: every client's probabilities, at the round that the slider says.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { pixels } from "./charts";
import { type Archs, type Clients, type Overview, frozen, useView } from "./data";
import { Figure } from "./figure";
import { percent, pole } from "./format";
import { Choose, href } from "./parts";

interface Frame { round: number; clients: number; p: string }
const opened = new WeakMap<Frame, Uint8Array>();
function bytes(frame: Frame): Uint8Array {
  let found = opened.get(frame);
  if (!found) { found = Uint8Array.from(atob(frame.p), (c) => c.charCodeAt(0)); opened.set(frame, found); }
  return found;
}
const asked = new Map<string, Promise<Frame | null>>();
/** A frame, asked for once: a round that is over does not change, unless another run takes the folder's place. */
function once(run: Overview, round: number): Promise<Frame | null> {
  const name = `${run.id} ${run.created} ${round}`;
  const fetched = async () => {
    const found: Frame | null = await fetch(`api/policy?run=${encodeURIComponent(run.id)}&round=${round}`).then((r) => (r.ok ? r.json() : null)).catch(() => null);
    if (!found) asked.delete(name);
    return found;
  };
  if (!asked.has(name)) asked.set(name, fetched());
  return asked.get(name)!;
}

/** How far a probability has moved from chance. */
const moved = (p: number, options: number) => pole(p > 1 / options ? (p - 1 / options) / Math.max(1e-9, 1 - 1 / options) : (p - 1 / options) * options);
/** Of a client that was not sent any option of a dimension there is nothing to say. */
const nothing = "rgba(128, 140, 150, 0.22)";
function shade(archs: Archs, p: Uint8Array, begin: number, d: number, o: number): string {
  const n = archs.dimensions[d]!.options.length, mine = p.subarray(begin, begin + n);
  return mine.every((v) => v === 0) ? nothing : moved(mine[o]! / 255, n);
}
const starts = (archs: Archs) => { let at = 0; return archs.dimensions.map((d) => { const s = at; at += d.options.length; return s; }); };
const all = (archs: Archs) => archs.dimensions.reduce((n, d) => n + d.options.length, 0);

export function Policies({ run, archs, data }: { run: Overview; archs: Archs; data: Clients }) {
  const rounds = useMemo(() => (archs.frames?.rounds ?? []).filter((r) => !frozen || frozen[`policy&round=${r}`]), [archs]);
  const [at, setAt] = useState(rounds.length - 1);
  const pinned = useRef(true);
  const [dimension, setDimension] = useState("");
  const [playing, setPlaying] = useState(false);
  useEffect(() => { if (pinned.current) setAt(rounds.length - 1); }, [rounds.length]);
  useEffect(() => {
    if (!playing) return;
    const timer = setInterval(() => setAt((a) => { if (a >= rounds.length - 1) { setPlaying(false); return a; } return a + 1; }), 350);
    return () => clearInterval(timer);
  }, [playing, rounds.length]);
  const round = rounds[Math.max(0, Math.min(at, rounds.length - 1))];
  const frame = useView<Frame>("policy", { run: run.id, round: round ?? 0 });
  const last = useRef<Frame | null>(null);
  if (frame.data) last.current = frame.data;
  const shown = frame.data ?? last.current;
  if (round == null || !archs.frames) return null;
  const begin = starts(archs), wide = all(archs), one = dimension === "" ? -1 : Number(dimension);
  const several = shown ? shown.clients > 1 : true;
  const order = several ? [...(archs.order ?? []), ...data.name.map((_, c) => c).filter((c) => !archs.order?.includes(c))].filter((c) => !shown || c < shown.clients) : [0];
  const columns = one < 0 ? archs.dimensions.flatMap((d) => d.options) : archs.dimensions[one]!.options;
  const value = (i: number, j: number) => (shown ? bytes(shown)[order[i]! * wide + (one < 0 ? 0 : begin[one]!) + j]! / 255 : 0);
  const paint = (i: number, j: number) => { const d = one < 0 ? begin.findLastIndex((s) => s <= j) : one; return shown ? shade(archs, bytes(shown), order[i]! * wide + begin[d]!, d, one < 0 ? j - begin[d]! : j) : nothing; };
  const names = several ? order.map((c) => data.name[c]!) : ["the server’s policy"];
  const what = archs.frames.source === "policy" ? "Blue: more likely to be drawn than by chance. Orange: less. White: as at the start." : "The method keeps no policy per client: the share of each option among the archs that it was sent so far, blue above an even share and orange below; grey: sent none.";
  return (
    <Figure wide title={archs.frames.source === "policy" ? "Policies" : "Architectures sent so far"} file={`${run.name}-policies-round-${round}`} at={{ run: run.name, round: shown?.round ?? round, seed: run.seed }} deps={[shown, one, archs, data]}
      caption={<>{what} Clients with like networks stand together. Click a row to open the client.</>}
      rows={() => names.flatMap((name, i) => columns.map((option, j) => ({ client: several ? order[i] : "", name, dimension: one < 0 ? archs.dimensions[begin.findLastIndex((s) => s <= j)]!.name : archs.dimensions[one]!.name, option, probability: +value(i, j).toFixed(4) })))}
      draw={(width) => pixels(names, columns, paint, { width, title: (i, j) => `${names[i]}, ${one < 0 ? archs.dimensions[begin.findLastIndex((s) => s <= j)]!.name : archs.dimensions[one]!.name} ${columns[j]}: ${percent(value(i, j), 0)}`, onClick: several ? (i) => { location.hash = href(run.id, "clients", String(order[i])); } : undefined, groups: one < 0 ? archs.dimensions.map((d, k) => ({ name: d.name, start: begin[k]!, size: d.options.length })) : undefined })}>
      <Choose label="dimension" hidden value={dimension} options={[["", "all dimensions"], ...archs.dimensions.map((d, i) => [String(i), d.name] as [string, string])]} set={setDimension} />
      <label class="slider">round <input type="range" aria-label="round of the policies" min={0} max={rounds.length - 1} value={at} onInput={(event) => { pinned.current = false; setPlaying(false); setAt(Number(event.currentTarget.value)); }} /><output>{round}</output></label>
      <button class="tool" aria-pressed={playing} onClick={() => { pinned.current = false; if (at >= rounds.length - 1) setAt(0); setPlaying(!playing); }}>{playing ? "❚❚" : "▶"}<span class="hidden"> play</span></button>
    </Figure>
  );
}

/** One client's policy, all rounds side by side: when did it move to what? */
export function ClientPolicy({ run, archs, client }: { run: Overview; archs: Archs | null; client: number }) {
  const [frames, set] = useState<Frame[]>([]);
  const rounds = archs?.frames?.rounds ?? [];
  useEffect(() => {
    let over = false;
    if (frozen) { set(rounds.map((r) => frozen![`policy&round=${r}`] as Frame).filter(Boolean)); return; }
    const chosen = rounds.length <= 30 ? rounds : Array.from({ length: 30 }, (_, i) => rounds[Math.round((i * (rounds.length - 1)) / 29)]!);
    void Promise.all(chosen.map((round) => once(run, round))).then((found) => { if (!over) set(found.filter((f): f is Frame => f != null)); });
    return () => { over = true; };
  }, [run.id, run.created, rounds.length]);
  const mine = frames.filter((f) => client < f.clients);
  if (!archs || mine.length < 2) return null;
  const begin = starts(archs), wide = all(archs);
  const rows = archs.dimensions.flatMap((d) => d.options.map((o) => `${d.name.length > 9 ? d.name.replace("stage", "s").replace("normal", "n").replace("reduce", "r") : d.name} ${o}`));
  const value = (i: number, j: number) => bytes(mine[j]!)[client * wide + i]! / 255;
  return (
    <div class="figures">
      <Figure wide title={archs.frames!.source === "policy" ? "Its policy, round by round" : "What it was sent, round by round"} file={`${run.name}-client-${client}-policy`} at={{ run: run.name, seed: run.seed }} deps={[mine.length, client]} caption={`A column is a round, a row an option. Blue: more likely than by chance. Orange: less.${archs.frames!.source === "policy" ? "" : " Grey: it had not been sent any."}`}
        rows={() => mine.flatMap((f, j) => rows.map((_, i) => { const d = begin.findLastIndex((s) => s <= i); return { client, round: f.round, dimension: archs.dimensions[d]!.name, option: archs.dimensions[d]!.options[i - begin[d]!], probability: +value(i, j).toFixed(4) }; }))}
        draw={(width) => pixels(rows, mine.map((f) => String(f.round)), (i, j) => { const d = begin.findLastIndex((s) => s <= i); return shade(archs, bytes(mine[j]!), client * wide + begin[d]!, d, i - begin[d]!); }, { width, height: Math.min(620, Math.max(90, rows.length * 11)), title: (i, j) => `${rows[i]}, round ${mine[j]!.round}: ${percent(value(i, j), 0)}` })} />
    </div>
  );
}
