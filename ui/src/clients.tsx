// The clients as a table that stays quick with thousands: only the rows on screen exist.
import { Component } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Archs, Clients as Data, Devices, Overview } from "./data";
import { told } from "./data";
import { saveCsv, stamped } from "./figure";
import { count, percent, size } from "./format";
import { Bar, Choose, Glyph, Mix, Spark, href, mainClass, points, worstClients } from "./parts";

const HIGH = 34;
type Show = "all" | "worst" | "working" | "held" | "gain" | "loss";
/** How each run's table was left: who comes back from a client finds it so. */
const left = new Map<string, { sort: { key: string; up: boolean }; text: string; show: Show; label: string }>();
interface Column { key: string; title: string; wide: number; value: (c: number) => number | string | null; cell: (c: number) => any; right?: boolean; hint?: string }

export function Clients({ run, data, archs, devices, open }: { run: Overview; data: Data; archs: Archs | null; devices: Devices | null; open: (client: number) => void }) {
  const before = left.get(run.id) ?? { sort: { key: "personal", up: true }, text: "", show: "all", label: "" };
  const [sort, setSort] = useState(before.sort);
  const [text, setText] = useState(before.text);
  const [show, setShow] = useState<Show>(before.show === "working" ? "all" : before.show);
  const [label, setLabel] = useState(before.label);
  left.set(run.id, { sort, text, show, label });
  const worst = useMemo(() => worstClients(data), [data]);
  const busy = useMemo(() => new Set(run.status === "running" ? run.now?.clients ?? [] : []), [run]);
  const choices = useMemo(() => new Map(archs?.clients.map((c, i) => [c, archs.choices[i]!]) ?? []), [archs]);
  const most = useMemo(() => Math.max(1, ...data.samples.map((s) => s ?? 0)), [data]);
  const use = (c: number): number | null => {
    if (!devices) return null;
    const parts = Object.entries(devices.used).map(([q, used]) => (used[c] != null && devices.limits[q]?.[c] ? used[c]! / devices.limits[q]![c]! : null)).filter((v): v is number => v != null);
    return parts.length ? Math.max(...parts) : null;
  };
  const columns: Column[] = [
    { key: "name", title: "client", wide: 150, value: (c) => data.name[c]!, cell: (c) => <>{busy.has(c) && <span class="dot" title="works now">●</span>}{data.name[c]}{worst.has(c) && <span class="diamond" title="worst decile"> ◆</span>}{data.held[c] && <span class="quiet"> new</span>}</> },
    { key: "personal", title: "accuracy", wide: 132, right: true, hint: `personal, ${data.split}, round ${data.round}`, value: (c) => data.personal[c]!, cell: (c) => <><Bar share={data.personal[c] ?? 0} kind={worst.has(c) ? "low" : ""} /><span class="num">{percent(data.personal[c])}</span></> },
    ...(data.global ? [{ key: "gain", title: "− global", wide: 76, right: true, hint: "personal minus global accuracy, percentage points", value: (c: number) => diff(data, c), cell: (c: number) => { const d = diff(data, c); return d == null ? "–" : <span class={d < 0 ? "less" : d > 0 ? "more" : "quiet"}>{points(d)}</span>; } }] : []),
    ...(data.curves ? [{ key: "curve", title: "val curve", wide: 96, hint: `val, rounds ${data.curves.rounds[0]} to ${data.curves.rounds.at(-1)}`, value: (c: number) => lastOf(data.curves!.personal[c]), cell: (c: number) => <Spark values={data.curves!.personal[c]!} /> }] : []),
    { key: "samples", title: "images", wide: 104, right: true, hint: "training images", value: (c) => data.samples[c]!, cell: (c) => <><Bar share={(data.samples[c] ?? 0) / most} kind="grey" /><span class="num">{count(data.samples[c])}</span></> },
    ...(data.counts ? [{ key: "labels", title: "labels", wide: 124, hint: "label mix of the training images; sorted by the most frequent label", value: (c: number) => (data.counts![c] ? mainClass(data.counts![c]!) : null), cell: (c: number) => data.counts![c] && <Mix counts={data.counts![c]!} classes={data.classes} /> }] : []),
    ...(devices ? [{ key: "device", title: "device", wide: 116, value: (c: number) => devices.device[c]!, cell: (c: number) => <span title={devices.budget[c]}>{devices.device[c]}</span> }] : []),
    ...(devices && Object.keys(devices.limits).length ? [{ key: "budget", title: "budget use", wide: 110, right: true, hint: "the tightest limit: 100 % is all of it", value: use, cell: (c: number) => { const u = use(c); return u == null ? "–" : <><Bar share={u} kind={u > 1 ? "low" : "green"} /><span class="num">{u < 0.001 ? "< 0.1 %" : percent(u, u < 0.1 ? 1 : 0)}</span></>; } }] : []),
    ...(archs && choices.size ? [{ key: "arch", title: data.kept ? "network" : "network, latest", wide: 150, hint: "one bar per dimension, higher is a later option", value: (c: number) => data.arch?.[c] ?? "", cell: (c: number) => choices.get(c) && <Glyph choices={choices.get(c)!} archs={archs} width={136} /> }] : []),
    ...(data.parameters ? [{ key: "parameters", title: "parameters", wide: 84, right: true, value: (c: number) => data.parameters![c]!, cell: (c: number) => count(data.parameters![c]) }] : []),
    { key: "rounds_taken", title: "rounds", wide: 60, right: true, hint: "rounds that it took part in", value: (c) => data.rounds_taken[c]!, cell: (c) => data.rounds_taken[c] },
    { key: "bytes", title: "traffic", wide: 76, right: true, hint: "down and up, all rounds", value: (c) => data.bytes[c]!, cell: (c) => size(data.bytes[c]) },
  ];
  const version = useMemo(() => ({}), [data, devices, archs, worst, busy]);
  const shown = useMemo(() => {
    const by = columns.find((column) => column.key === sort.key) ?? columns[0]!;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.name.map((_, c) => c).filter((c) => {
      if (show === "worst" && !worst.has(c)) return false;
      if (show === "working" && !busy.has(c)) return false;
      if (show === "held" && !data.held[c]) return false;
      if (show === "gain" && !((diff(data, c) ?? 0) > 0)) return false;
      if (show === "loss" && !((diff(data, c) ?? 0) < 0)) return false;
      if (label && !(data.counts?.[c]?.[Number(label)] ?? 0)) return false;
      const about = `${data.name[c]} ${devices?.device[c] ?? ""} ${data.arch?.[c] ?? ""}`.toLowerCase();
      return words.every((word) => about.includes(word));
    });
    const value = new Map(found.map((c) => [c, by.value(c)]));
    const sign = sort.up ? 1 : -1;
    return found.sort((a, b) => {
      const x = value.get(a), y = value.get(b);
      if (x == null || y == null) return x == null && y == null ? a - b : x == null ? 1 : -1;
      return (typeof x === "string" ? sign * x.localeCompare(String(y), "en", { numeric: true }) : sign * (x - (y as number))) || a - b;
    });
  }, [data, devices, archs, sort, text, show, label, worst, busy]);
  const options: [Show, string][] = [["all", "everybody"], ["worst", "the worst decile"], ...(busy.size ? [["working", "at work now"] as [Show, string]] : []), ...(data.held.some(Boolean) ? [["held", "new clients"] as [Show, string]] : []), ...(data.global ? [["gain", "better off than with global"], ["loss", "worse off than with global"]] as [Show, string][] : [])];
  return (
    <section>
      <div class="controls">
        <input id="search" type="search" placeholder="Search name, device, network   ( / )" value={text} onInput={(event) => setText(event.currentTarget.value)} aria-label="Search clients" />
        <Choose label="Show" value={show} options={options} set={setShow} />
        {data.counts && data.classes.length <= 200 && <Choose label="Has label" value={label} options={[["", "any"], ...data.classes.map((name, i) => [String(i), name] as [string, string])]} set={setLabel} />}
        <span class="quiet" data-shown={shown.length}>{shown.length} of {data.name.length}</span>
        <span class="push" />
        <button class="tool" aria-label="CSV of the clients" onClick={() => saveCsv(stamped(shown.map((c) => row(data, devices, use, c)), { run: run.name, seed: run.seed, round: data.round, split: data.split }), `${run.name}-clients`)}>CSV</button>
      </div>
      <Grid columns={columns} version={version} shown={shown} sort={sort} setSort={setSort} open={open} link={(c) => href(run.id, "clients", String(c))} />
      <p class="quiet small">Accuracy: {told({ run: run.name, round: data.round, split: data.split, seed: run.seed })}. ◆ marks the worst decile. ↑ ↓ move, Enter opens, / searches.</p>
    </section>
  );
}

const diff = (data: Data, c: number) => (data.personal[c] != null && data.global?.[c] != null ? data.personal[c]! - data.global[c]! : null);
const lastOf = (values?: (number | null)[]) => values?.filter((v) => v != null).at(-1) ?? null;

function row(data: Data, devices: Devices | null, use: (c: number) => number | null, c: number) {
  return {
    client: c, name: data.name[c], personal_accuracy: data.personal[c], global_accuracy: data.global?.[c], held_out: data.held[c], training_images: data.samples[c],
    arch: data.arch?.[c], parameters: data.parameters?.[c], flops: data.flops?.[c], device: devices?.device[c], budget: devices?.budget[c], budget_use: use(c),
    rounds: data.rounds_taken[c], bytes: data.bytes[c], simulated_seconds: data.seconds[c],
    ...Object.fromEntries((data.counts?.[c] ?? []).map((n, k) => [`label_${data.classes[k]}`, n])),
  };
}

interface RowProps { c: number; index: number; top: number; marked: boolean; columns: Column[]; version: unknown; grid: string; open: (c: number) => void; link: (c: number) => string }
/** A row is made once: scrolling adds and drops rows, and touches none that stays. */
class Row extends Component<RowProps> {
  override shouldComponentUpdate(next: RowProps) {
    const old = this.props;
    return next.version !== old.version || next.top !== old.top || next.marked !== old.marked || next.grid !== old.grid;
  }
  override render({ c, index, top, marked, columns, grid, open, link }: RowProps) {
    return (
      <div role="row" id={`client-${c}`} aria-rowindex={index} aria-selected={marked} onClick={() => open(c)} class={`grid-row ${marked ? "cursor" : ""}`} data-client={c} style={{ top: `${top}px`, gridTemplateColumns: grid }}>
        {columns.map((column, k) => <span role="gridcell" class={column.right ? "right" : ""}>{k ? column.cell(c) : <a tabIndex={-1} href={link(c)}>{column.cell(c)}</a>}</span>)}
      </div>
    );
  }
}

function Grid({ columns, version, shown, sort, setSort, open, link }: { columns: Column[]; version: unknown; shown: number[]; sort: { key: string; up: boolean }; setSort: (s: { key: string; up: boolean }) => void; open: (c: number) => void; link: (c: number) => string }) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [tall, setTall] = useState(520);
  const [across, setAcross] = useState(0);
  const [cursor, setCursor] = useState(0);
  useEffect(() => {
    const fit = () => { setAcross(box.current?.clientWidth ?? 0); setTall(Math.max(240, Math.min(shown.length * HIGH + 44, window.innerHeight - 230))); };
    fit();
    window.addEventListener("resize", fit);
    return () => window.removeEventListener("resize", fit);
  }, [shown.length]);
  useLayoutEffect(() => { if (box.current) box.current.scrollTop = 0; setTop(0); setCursor(0); }, [sort.key, sort.up]);
  const first = Math.max(0, Math.floor(top / HIGH) - 6), last = Math.min(shown.length, Math.ceil((top + tall) / HIGH) + 6);
  const move = (to: number) => {
    const at = Math.max(0, Math.min(shown.length - 1, to));
    setCursor(at);
    const body = box.current!, y = at * HIGH;
    if (y < body.scrollTop) body.scrollTop = y;
    if (y + HIGH > body.scrollTop + body.clientHeight - HIGH - 4) body.scrollTop = y + 2 * HIGH + 4 - body.clientHeight;
  };
  const keys = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 };
    if (event.key in steps) { event.preventDefault(); move(cursor + steps[event.key]!); }
    if (event.key === "Enter" && shown[cursor] != null && (event.target as HTMLElement).tagName !== "BUTTON") open(shown[cursor]!);
  };
  const wide = columns.reduce((sum, column) => sum + column.wide, 0);
  const stretch = Math.max(1, (across - 34) / wide); // plain pixels: rows are laid out quicker than with fractions
  const grid = columns.map((column) => `${Math.floor(column.wide * stretch)}px`).join(" ");
  return (
    <div class="grid" role="grid" aria-label="Clients" aria-rowcount={shown.length + 1} aria-activedescendant={shown[cursor] == null ? undefined : `client-${shown[cursor]}`} tabIndex={0} ref={box} style={{ height: `${tall}px` }} onKeyDown={keys} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
      <div style={{ minWidth: `${wide + 16}px` }}>
        <div class="grid-head" role="row" aria-rowindex={1} style={{ gridTemplateColumns: grid }}>
          {columns.map((column) => (
            <div role="columnheader" class={column.right ? "right" : ""} aria-sort={sort.key === column.key ? (sort.up ? "ascending" : "descending") : "none"}><button title={column.hint} data-sort={column.key} onClick={() => setSort({ key: column.key, up: sort.key === column.key ? !sort.up : column.key === "name" || column.key === "personal" })}>
              {column.title}{sort.key === column.key && <span aria-hidden="true">{sort.up ? " ↑" : " ↓"}</span>}
            </button></div>
          ))}
        </div>
        <div class="grid-body" style={{ height: `${shown.length * HIGH}px` }}>
          {shown.slice(first, last).map((c, i) => (
            <Row key={c} c={c} index={first + i + 2} top={(first + i) * HIGH} marked={first + i === cursor} columns={columns} version={version} grid={grid} open={open} link={link} />
          ))}
        </div>
        {!shown.length && <p class="quiet">Nobody fits.</p>}
      </div>
    </div>
  );
}
