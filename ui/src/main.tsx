import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { About, Partition } from "./about";
import { Archs } from "./archs";
import { Client } from "./client";
import { Clients } from "./clients";
import { Compare } from "./compare";
import { type About as AboutData, type Archs as ArchsData, type Clients as ClientsData, type Comparison, type Devices, type Overview as OverviewData, frozen, useView } from "./data";
import { Fairness } from "./fairness";
import { Curves, Overview, RoundCosts } from "./overview";
import { Badge, Notice, Progress, href } from "./parts";
import { Runs } from "./runs";
import { Versus, type Who, tell } from "./versus";
import "./style.css";

const pages = [["", "Overview"], ["clients", "Clients"], ["archs", "Architectures"], ["fairness", "Fairness and cost"], ["about", "Setting"]] as const;

/** A part of an address as it was meant; one that is broken stays as it is. */
function plain(part: string): string {
  try { return decodeURIComponent(part); } catch { return part; }
}

function useHash(): string[] {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(plain);
  const [path, set] = useState(read);
  useEffect(() => { const go = () => set(read()); window.addEventListener("hashchange", go); return () => window.removeEventListener("hashchange", go); }, []);
  return path;
}

function Theme() {
  const [theme, set] = useState(() => document.documentElement.dataset.theme ?? "");
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const turn = () => { const next = dark ? "light" : "dark"; document.documentElement.dataset.theme = next; set(next); try { localStorage.setItem("fedtailor-theme", next); } catch { /* a page from a file may keep nothing */ } };
  return <button class="theme" onClick={turn} title={dark ? "Light" : "Dark"} aria-label={dark ? "Light colours" : "Dark colours"}>{dark ? "☀" : "☾"}</button>;
}

function App() {
  const path = useHash();
  const where = path.join("/");
  useEffect(() => { window.scrollTo(0, 0); }, [where]);
  useEffect(() => { if (path[0] !== "run") document.title = path[0] === "compare" ? "Comparison · fedtailor" : "fedtailor"; }, [path[0]]);
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); document.getElementById("main")!.focus(); }}>Skip to the content</a>
      <header class="top"><a class="brand" href="#/">fedtailor</a><nav aria-label="Pages"><a href="#/" aria-current={path.length === 0 ? "page" : undefined}>Runs</a></nav><span class="push" /><Theme /></header>
      <main id="main" tabIndex={-1}>
        {path[0] === "run" && path[1] ? <Run key={path[1]} id={path[1]} page={path[2] ?? ""} rest={path[3]} /> : path[0] === "compare" ? <Compare runs={path.slice(1)} /> : <Runs />}
      </main>
    </>
  );
}

function Run({ id, page, rest }: { id: string; page: string; rest?: string }) {
  const [pace, setPace] = useState(1);
  const state = useView<OverviewData>("overview", { run: id }, pace);
  const run = state.data, live = run?.status === "running";
  useEffect(() => setPace(live ? 1 : 4), [live]);
  // only what the page shows is asked for again and again; what is dear comes after what is seen first
  const detail = page === "clients" || page === "archs", many = detail || page === "fairness";
  const people = useView<ClientsData>("clients", { run: id }, !live ? 6 : many ? 2 : 20);
  const archs = useView<ArchsData>("archs", { run: id }, live ? 3 : 8, detail && people.data != null);
  const devices = useView<Devices>("devices", { run: id }, live ? 30 : 0, detail && people.data != null && run != null);
  const about = useView<AboutData>("about", { run: id });
  useEffect(() => { document.title = run ? `${run.name} · fedtailor` : "fedtailor"; }, [run?.name]);
  return (
    <>
      <div class="run-head">
        <h1>{run?.name ?? id}</h1>
        {run && <><Badge status={state.problem ? "broken" : run.status} />{!run.finished && <span class="ahead"><Progress done={run.done ?? 0} of={run.rounds ?? 0} /> <span class="quiet" data-done={run.done}>round {run.done} of {run.rounds}</span></span>}<span class="quiet">{run.method} · {run.network} · {run.data} · seed {run.seed}</span></>}
      </div>
      <nav class="tabs" aria-label="Parts of the run">{pages.map(([name, title]) => <a href={href(id, name)} aria-current={page === name ? "page" : undefined}>{title}</a>)}</nav>
      <Notice state={state} what="the run" />
      {run && [...run.troubles, ...run.warnings.filter(() => !live)].map((text) => <p class="warning" role="alert">{text}</p>)}
      {run && page === "" && <Overview run={run} clients={people.data} />}
      {run && page !== "" && page !== "about" && !people.data && <Notice state={people} what="the clients" />}
      {run && people.data && page === "clients" && (rest != null
        ? <Client run={run} data={people.data} archs={archs.data} devices={devices.data} client={Number(rest)} every={live ? 2 : 0} />
        : <Clients run={run} data={people.data} archs={archs.data} devices={devices.data} open={(c) => { location.hash = href(id, "clients", String(c)); }} />)}
      {run && people.data && page === "archs" && (archs.busy && !archs.data ? <Notice state={archs} what="the architectures" /> : <Archs run={run} data={people.data} archs={archs.data} devices={devices.data} />)}
      {run && people.data && page === "fairness" && <Fairness run={run} data={people.data} />}
      {run && page === "about" && (about.data ? <About run={run} data={people.data} about={about.data} /> : <Notice state={about} what="the setting" />)}
    </>
  );
}

/** In a report the same parts stand one below the other, each where the text wants it. */
function frozenParts(): void {
  if (frozen!["compare"]) {
    const by = <T,>(name: string) => new Map(Object.entries(frozen![name] as Record<string, T>));
    const rows = tell(frozen!["compare"] as Comparison, by<OverviewData>("overviews"), by<Who>("people"));
    return place({ versus: () => <Versus rows={rows} file="comparison" links={false} />, theme: () => <Theme /> });
  }
  const run = frozen!["overview"] as OverviewData, data = frozen!["clients"] as ClientsData, archs = frozen!["archs"] as ArchsData | null, devices = frozen!["devices"] as Devices | null;
  place({
    partition: () => <div class="figures"><Partition run={run} data={data} /></div>,
    rounds: () => <div class="figures"><Curves run={run} /><RoundCosts run={run} /></div>,
    clients: () => <FrozenClients run={run} data={data} archs={archs} devices={devices} />,
    archs: () => <Archs run={run} data={data} archs={archs} devices={devices} />,
    fairness: () => <Fairness run={run} data={data} />,
    theme: () => <Theme />,
  });
}

function place(parts: Record<string, () => any>): void {
  for (const spot of document.querySelectorAll<HTMLElement>("[data-part]")) { const part = parts[spot.dataset.part!]; if (part) render(part(), spot); }
}

function FrozenClients({ run, data, archs, devices }: { run: OverviewData; data: ClientsData; archs: ArchsData | null; devices: Devices | null }) {
  const path = useHash();
  const open = path[0] === "run" && path[2] === "clients" && path[3] != null ? Number(path[3]) : null;
  useEffect(() => { if (open != null || path[2] === "clients") document.getElementById("clients")?.scrollIntoView(); }, [open]);
  return open != null ? <Client run={run} data={data} archs={archs} devices={devices} client={open} every={0} /> : <Clients run={run} data={data} archs={archs} devices={devices} open={(c) => { location.hash = href(run.id, "clients", String(c)); }} />;
}

window.addEventListener("keydown", (event) => {
  if (event.key === "/" && !(event.target as HTMLElement).closest("input, select, textarea")) { const box = document.getElementById("search"); if (box) { event.preventDefault(); box.focus(); } }
});
try { const kept = localStorage.getItem("fedtailor-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* as above */ }
if (frozen) {
  frozenParts();
  // on paper nothing can be unfolded: what is folded is printed too
  const folded = () => document.querySelectorAll<HTMLDetailsElement>("details:not([open])");
  let opened: HTMLDetailsElement[] = [];
  window.addEventListener("beforeprint", () => { opened = [...folded()]; for (const one of opened) one.open = true; });
  window.addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
} else render(<App />, document.getElementById("app")!);
