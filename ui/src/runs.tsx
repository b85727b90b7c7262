// All runs: what goes on, what there is, which to compare.
import { useMemo, useState } from "preact/hooks";
import { type Card, useView } from "./data";
import { saveCsv } from "./figure";
import { day, percent } from "./format";
import { Badge, Choose, Notice, Progress, href } from "./parts";

type Key = "created" | "name" | "method" | "network" | "data" | "clients" | "seed" | "personal" | "worst" | "status";

export function Runs() {
  const state = useView<{ root: string; runs: Card[] }>("runs", {}, 2);
  const [text, setText] = useState("");
  const [method, setMethod] = useState(""), [network, setNetwork] = useState(""), [data, setData] = useState(""), [since, setSince] = useState("");
  const [sort, setSort] = useState<{ key: Key; up: boolean }>({ key: "created", up: false });
  const [chosen, choose] = useState<string[]>([]);
  const runs = state.data?.runs ?? [];
  const names = (of: (run: Card) => string) => [["", "any"], ...[...new Set(runs.map(of))].filter(Boolean).sort().map((n) => [n, n])] as [string, string][];
  const shown = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean), sign = sort.up ? 1 : -1;
    return runs
      .filter((r) => (!method || r.method === method) && (!network || r.network === network) && (!data || r.data === data) && (!since || r.created.slice(0, 10) >= since))
      .filter((r) => { const about = [r.id, r.method, r.network, r.data, r.partition, r.fleet, r.status, r.created, `seed ${r.seed}`].join(" ").toLowerCase(); return words.every((w) => about.includes(w)); })
      .sort((a, b) => {
        if ((a.status === "running") !== (b.status === "running")) return a.status === "running" ? -1 : 1;
        const x = a[sort.key], y = b[sort.key];
        if (x == null || y == null) return x == null ? 1 : -1;
        return sign * (typeof x === "string" ? x.localeCompare(String(y), "en", { numeric: true }) : x - (y as number)) || a.id.localeCompare(b.id);
      });
  }, [runs, text, method, network, data, since, sort]);
  const head = (key: Key, title: string, right = false) => <th class={right ? "right" : ""} aria-sort={sort.key === key ? (sort.up ? "ascending" : "descending") : "none"}><button onClick={() => setSort({ key, up: sort.key === key ? !sort.up : false })}>{title}{sort.key === key && (sort.up ? " ↑" : " ↓")}</button></th>;
  const link = `#/compare/${chosen.map(encodeURIComponent).join("/")}`;
  return (
    <>
      <h1>Runs {state.data && <span class="quiet">in {state.data.root}</span>}</h1>
      <Notice state={state} what="the folder" />
      <div class="controls">
        <input id="search" type="search" placeholder="Search   ( / )" value={text} onInput={(e) => setText(e.currentTarget.value)} aria-label="Search runs" />
        <Choose label="Method" value={method} options={names((r) => r.method)} set={setMethod} />
        <Choose label="Space or net" value={network} options={names((r) => r.network)} set={setNetwork} />
        <Choose label="Data" value={data} options={names((r) => r.data)} set={setData} />
        <label class="choose">Since<input type="date" value={since} onInput={(e) => setSince(e.currentTarget.value)} /></label>
        <span class="quiet">{shown.length} of {runs.length}</span>
        <span class="push" />
        <a class={`button ${chosen.length > 1 ? "" : "off"}`} aria-disabled={chosen.length < 2} href={chosen.length > 1 ? link : undefined}>Compare {chosen.length || ""}</a>
        <button class="tool" onClick={() => saveCsv(shown.map(({ problem: _, ...r }) => ({ ...r })), "runs")}>CSV</button>
      </div>
      <div class="tablewrap"><table class="plain runs">
        <thead><tr><th><span class="hidden">choose</span></th>{head("name", "run")}{head("status", "status")}{head("method", "method")}{head("network", "space or net")}{head("data", "data")}{head("clients", "clients", true)}{head("seed", "seed", true)}{head("personal", "personal", true)}{head("worst", "worst decile", true)}<th>split, round</th>{head("created", "begun (UTC)")}</tr></thead>
        <tbody>
          {shown.map((r) => (
            <tr class={r.status}>
              <td><input type="checkbox" aria-label={`choose ${r.name} to compare`} checked={chosen.includes(r.id)} disabled={r.status === "broken"} onChange={() => choose(chosen.includes(r.id) ? chosen.filter((c) => c !== r.id) : [...chosen, r.id])} /></td>
              <td><a href={href(r.id)}>{r.id}</a></td>
              <td><Badge status={r.status} />{r.status !== "done" && r.status !== "broken" && <><Progress done={r.done ?? 0} of={r.rounds ?? 0} /><span class="quiet small"> {r.done} of {r.rounds}</span></>}</td>
              {r.problem ? <td colSpan={9} class="quiet">{r.problem}</td> : <>
                <td>{r.method}</td><td>{r.network}</td><td>{r.data}</td><td class="right">{r.clients}</td><td class="right">{r.seed}</td><td class="right strong">{percent(r.personal)}</td><td class="right">{percent(r.worst)}</td><td>{r.personal == null ? "–" : `${r.split}, ${r.round}`}</td><td>{day(r.created)}</td></>}
            </tr>
          ))}
        </tbody>
      </table></div>
      {state.data && !runs.length && <p class="quiet">No runs here yet. <code>fedtailor demo</code> makes four; they appear as they start.</p>}
    </>
  );
}
