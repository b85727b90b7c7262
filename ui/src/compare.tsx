// Several runs side by side; those that differ only in the seed are one row.
import { useMemo } from "preact/hooks";
import { type Clients, type Compared, type Comparison, type Overview, useMany, useView } from "./data";
import { type Axis, axes } from "./fairness";
import { Mark, saveCsv } from "./figure";
import { percent } from "./format";
import { Badge, Notice, href } from "./parts";
import { Versus, cost, tell } from "./versus";

const costs = Object.keys(axes) as Axis[];
/** A share with what it varies by from seed to seed, where there are several. */
const share = (row: Compared, name: string) => {
  const value = row[name] as number | null, off = row[`${name.replace("_mean", "")}_std_over_seeds`] as number | null | undefined;
  return <>{percent(value, 2)}{value != null && off != null && <span class="quiet"> ± {(100 * off).toFixed(2)}</span>}</>;
};

export function Compare({ runs }: { runs: string[] }) {
  const found = useView<Comparison>("compare", { run: runs }, 2);
  const overviews = useMany<Overview>("overview", runs, 2), people = useMany<Clients>("clients", runs, 5);
  const known = <T,>(all: (T | null)[]) => new Map(runs.flatMap((run, i) => (all[i] ? [[run, all[i]!] as [string, T]] : [])));
  // pictures are drawn anew when something has changed, and not under the pointer of who reads them
  const told = useMemo(() => (found.data ? tell(found.data, known(overviews), known(people)) : []), [found.data, ...overviews, ...people]);
  const one = told.length < runs.length && told.some(({ runs }) => runs.length > 1), file = `compare-${runs.length}`;
  return (
    <>
      <h1>Compare {runs.length} runs</h1>
      <Notice state={found} what="the runs" />
      {found.data?.problems.map(([run, text]) => <p class="warning" role="alert">Left out: <b>{run}</b>. {text}</p>)}
      {found.data?.unfair.map((text) => <p class="warning" role="alert"><b>Unfair:</b> {text}</p>)}
      {one && <p class="note">Runs that differ only in the seed share a row. ± is the std over seeds.</p>}
      {found.data?.notes.map((text) => <p class="note">{text}</p>)}
      {told.length > 0 && <>
        <div class="controls"><span class="push" /><button class="tool" aria-label="CSV of the rows" onClick={() => saveCsv(told.map((t) => ({ ...t.row, runs: t.row.runs.map((run) => run.id).join(" "), flags: t.row.flags.join("; "), ...Object.fromEntries(costs.map((a) => [a, cost(t, a)])) })), file)}>CSV</button></div>
        <div class="tablewrap"><table class="plain">
          <thead><tr><th scope="col">method</th><th scope="col">runs</th><th scope="col">split, round</th><th scope="col" class="right">personal</th><th scope="col" class="right">worst decile</th><th scope="col" class="right">std over clients</th><th scope="col" class="right">global</th>{costs.map((a) => <th scope="col" class="right">{axes[a].title}</th>)}</tr></thead>
          <tbody>{told.map((t) => (
            <tr><th scope="row"><Mark colour={t.colour} shape="square" />{t.row.label}</th><td>{t.runs.map(({ o }) => <><a href={href(o.id)} title={`seed ${o.seed}`}>{o.name}</a> {o.status !== "done" && <Badge status={o.status} />} </>)}</td><td>{t.row.split}, {t.row.round}</td><td class="right strong">{share(t.row, "personal_mean")}</td><td class="right">{share(t.row, "personal_worst_decile")}</td><td class="right">{percent(t.row.personal_std_over_clients, 2)}</td><td class="right">{share(t.row, "global_mean")}</td>{costs.map((a) => <td class="right">{axes[a].say(cost(t, a))}</td>)}</tr>
          ))}</tbody>
        </table></div>
        <Versus rows={told} file={file} links />
      </>}
      {found.data && found.data.settings.length > 0 && (
        <details><summary>{found.data.settings.length === 1 ? "1 setting differs" : `${found.data.settings.length} settings differ`}</summary><div class="tablewrap"><table class="plain"><thead><tr><th scope="col">setting</th>{found.data.rows.map((r) => <th scope="col">{r.label}</th>)}</tr></thead><tbody>{found.data.settings.map(([name, values]) => <tr><td><code>{name}</code></td>{values.map((v) => <td>{v}</td>)}</tr>)}</tbody></table></div></details>
      )}
    </>
  );
}
