// The text that a reviewer needs.
import { pixels } from "./charts";
import type { About as Data, Clients, Overview } from "./data";
import { Figure } from "./figure";
import { blue } from "./format";

export function Partition({ run, data }: { run: Overview; data: Clients }) {
  if (!data.counts?.length) return null;
  const most = Math.max(...data.counts.flat(), 1), names = data.name.slice(0, data.counts.length);
  const sums = data.counts.map((row) => row.reduce((a, b) => a + b, 0));
  return (
    <Figure wide title="Partition" file={`${run.name}-partition`} at={{ run: run.name, split: "train", seed: run.seed }} deps={[data]} caption={`Training images of each client and label; darker is more, up to ${most}. ${names.length} clients, ${Math.min(...sums)} to ${Math.max(...sums)} images each.`}
      rows={() => data.counts!.flatMap((row, c) => row.map((images, k) => ({ client: c, name: data.name[c], label: data.classes[k], images })))}
      draw={(width) => pixels(names, data.classes, (i, j) => { const v = data.counts![i]![j]!; return v ? blue(0.06 + 0.94 * Math.sqrt(v / most)) : "#f4f6f8"; }, { width, title: (i, j) => `${names[i]}, ${data.classes[j]}: ${data.counts![i]![j]}` })} />
  );
}

export function About({ run, data, about }: { run: Overview; data: Clients | null; about: Data }) {
  return (
    <>
      <h2>Setting</h2>
      <div class="settings">
        {[...about.settings, { title: "made with", name: "", entries: about.made }].map((s) => (
          <div class="group"><h3>{s.title}{s.name && <span class="name"> {s.name}</span>}</h3><dl>{s.entries.map(([k, v]) => <><dt>{k}</dt><dd>{v}</dd></>)}</dl></div>
        ))}
      </div>
      <dl class="hashes">{about.hashes.map(([k, v]) => <><dt>{k}</dt><dd><code>{v}</code></dd></>)}</dl>
      <div class="figures">{data && <Partition run={run} data={data} />}</div>
      <h2>Method</h2>
      <p><b>{run.method}</b>{about.paper.length > 0 && <>, after {about.paper.map(([text, link]) => (link ? <a href={link} rel="noreferrer">{text}</a> : text))}</>}</p>
      {about.deviations.length ? <><h3>Where this implementation differs from the paper</h3><ul>{about.deviations.map((text) => <li>{text}</li>)}</ul></> : <p>No deviations from the paper are listed.</p>}
      <h2>What the numbers mean</h2>
      <dl class="meanings">{about.definitions.map(([k, v]) => <><dt>{k}</dt><dd>{v}</dd></>)}</dl>
      <h2>Reproduce</h2>
      {about.command && <><p>This run was started with:</p><pre><code>{about.command}</code></pre></>}
      <details><summary>The whole configuration (config.toml)</summary><pre><code>{about.config}</code></pre></details>
    </>
  );
}
