// Where the numbers come from: the live server, or the page itself where it is a report.
import { useEffect, useRef, useState } from "preact/hooks";

export interface Card {
  id: string; name: string; status: string; method: string; network: string; data: string; partition: string;
  fleet: string; created: string; rounds: number | null; done: number | null; clients: number | null;
  participants: number | null; seed: number | null; split: string; round: number | null; personal: number | null;
  worst: number | null; device: string; seconds: number | null; problem: string;
}
export interface Curve { rounds: number[]; mean: (number | null)[]; std?: (number | null)[]; n?: number[] }
export interface Costs {
  rounds: number[]; per: number; down: number[]; up: number[]; flops: number[]; simulated: number[]; measured: number[];
  late: number[]; participants: number[];
}
export interface Spread { mean: number; std: number; worst_decile: number; n: number }
export interface Overview extends Card {
  lead: string; warnings: string[]; troubles: string[]; finished: boolean;
  now: { round: number; clients: number[]; since: number } | null;
  spreads: Record<"personal" | "global" | "new", Spread | null>;
  series: Record<"personal" | "global" | "new" | "loss" | "worst", Curve | null>;
  costs: Costs; summary: Record<string, number | null>;
}
type Column = (number | null)[];
export interface Clients {
  split: string; round: number; seed: number | null; classes: string[]; name: string[]; samples: Column;
  counts: number[][] | null; personal: Column; global: Column | null; held: boolean[]; arch: string[] | null;
  kept: boolean; parameters: Column | null; flops: Column | null; rounds_taken: number[]; bytes: number[];
  seconds: Column; curves: { rounds: number[]; personal: (number | null)[][] } | null;
}
export interface Client {
  client: number; archs: [number, string][]; test: Record<string, number>;
  series: Record<string, { rounds: number[]; value: (number | null)[] }>;
}
export interface Archs {
  split: string; round: number; kept: boolean; dimensions: { name: string; options: string[] }[]; numeric: boolean[];
  values: number[][]; clients: number[]; choices: number[][][]; distinct: number; odd: string[];
  shares: { edges: number[]; dims: number[][][] } | null;
  frames: { rounds: number[]; source: "policy" | "draws" } | null;
  xy?: [number, number][]; explained?: number[]; order?: number[];
}
export interface Devices {
  device: string[]; budget: string[]; limits: Record<string, Column>; used: Record<string, Column>; memory: Column;
  hard: boolean;
  shrink: {
    dimensions: string[]; clients: number[]; shares: number[][];
    groups: { budget: string; rows: number[]; distance: number }[];
  } | null;
}
export interface Drawing {
  svg: string; words: string; parameters: number; flops: number;
  shares: { client: number; same: number; share: number }[];
}
export interface Look {
  split: string; classes: string[]; matrix: number[][]; accuracy: number | null;
  right: Shot[]; wrong: Shot[];
}
export interface Shot { png: string; label: string; said: string }
export interface Gain { names: string[]; accuracy: number[][] }
export interface About {
  settings: { title: string; name: string; entries: [string, string][] }[]; made: [string, string][];
  hashes: [string, string][]; paper: [string, string | null][]; card: Record<string, string>; deviations: string[];
  definitions: [string, string][]; command: string; config: string;
}
export interface Compared {
  label: string; seeds: string; finished: boolean; split: string; round: number; flags: string[];
  runs: { id: string; seed: number | null; partition: string | null }[];
  personal_mean: number | null; personal_std_over_seeds: number | null; personal_std_over_clients: number | null;
  [number: string]: unknown;
}
export interface Comparison {
  fair: boolean; unfair: string[]; notes: string[]; problems: [string, string][]; settings: [string, string[]][];
  rows: Compared[];
}

export interface State<T> { data: T | null; problem: string; busy: boolean }
export type Params = Record<string, string | number | string[]>;

// In a report: what the page carries, by view and parameters.
const carried = document.getElementById("fedtailor-data");
export const frozen: Record<string, unknown> | null = carried ? JSON.parse(carried.textContent!) : null;

export function key(view: string, params: Params): string {
  const parts = Object.entries(params).filter(([name]) => name !== "run" || !frozen);
  return [view, ...parts.map(([name, value]) => `${name}=${value}`)].join("&");
}

const cache = new Map<string, { tag: string; data: unknown }>();

async function ask(view: string, params: Params): Promise<{ data: unknown; wait: number }> {
  const name = key(view, params);
  const known = cache.get(name);
  const query = new URLSearchParams();
  for (const [k, v] of Object.entries(params)) for (const one of Array.isArray(v) ? v : [v]) query.append(k, String(one));
  let answer: Response;
  try {
    answer = await fetch(`api/${view}?${query}`, { headers: known ? { "If-None-Match": known.tag } : {}, cache: "no-store" });
  } catch {
    throw new Error("The server does not answer: `fedtailor ui` was ended, or the connection is lost. What is shown is the last that was seen.");
  }
  const wait = Number(answer.headers.get("X-Wait") ?? 1);
  if (answer.status === 304 && known) return { data: known.data, wait };
  const data = await answer.json().catch(() => ({ error: `The server answered with ${answer.status}.` }));
  if (data?.error) throw new Error(data.error);
  cache.set(name, { tag: answer.headers.get("ETag") ?? "", data });
  if (cache.size > 400) cache.delete(cache.keys().next().value!);
  return { data, wait };
}

/** A view of a run, asked for again every `every` seconds (0: once), and less often where it is dear to make. */
export function useView<T>(view: string, params: Params, every = 0, ready = true): State<T> {
  const name = key(view, params);
  const first = frozen ? (frozen[name] as T) ?? null : (cache.get(name)?.data as T) ?? null;
  const [state, set] = useState<State<T>>({ data: first, problem: "", busy: !frozen });
  const current = useRef(name);
  useEffect(() => {
    if (frozen) return set({ data: (frozen[name] as T) ?? null, problem: "", busy: false });
    if (!ready) return;
    let timer = 0, over = false;
    if (current.current !== name) set({ data: (cache.get(name)?.data as T) ?? null, problem: "", busy: true });
    current.current = name;
    const go = async () => {
      let wait = every;
      if (!document.hidden) {
        try {
          const found = await ask(view, params);
          if (over) return;
          wait = Math.max(every, found.wait);
          set((old) => (old.data === found.data && !old.problem && !old.busy ? old : { data: found.data as T, problem: "", busy: false }));
        } catch (error) {
          if (over) return;
          wait = Math.max(every, 2);
          set((old) => ({ data: old.data, problem: (error as Error).message, busy: false }));
        }
      }
      if (every && !over) timer = window.setTimeout(go, 1000 * wait);
    };
    void go();
    return () => { over = true; clearTimeout(timer); };
  }, [name, every, ready]);
  return current.current === name || frozen ? state : { data: (cache.get(name)?.data as T) ?? null, problem: "", busy: true };
}

/** Several views of one kind, for runs side by side. */
export function useMany<T>(view: string, runs: string[], every = 0): (T | null)[] {
  const name = runs.join("\n");
  const [state, set] = useState<{ name: string; found: (T | null)[] }>({ name, found: [] });
  useEffect(() => {
    let timer = 0, over = false;
    const go = async () => {
      const all = await Promise.allSettled(runs.map((run) => ask(view, { run })));
      if (over) return;
      const found = all.map((one) => (one.status === "fulfilled" ? (one.value.data as T) : null));
      set((old) => (old.name === name && old.found.length && found.every((one, i) => one === old.found[i]) ? old : { name, found }));
      const wait = Math.max(every, ...all.map((one) => (one.status === "fulfilled" ? one.value.wait : 2)));
      if (every) timer = window.setTimeout(go, 1000 * wait);
    };
    void go();
    return () => { over = true; clearTimeout(timer); };
  }, [view, name, every]);
  return state.name === name && state.found.length ? state.found : runs.map(() => null);
}

export interface Where { run: string; round?: number | null; split?: string; seed?: number | null }
export const told = (at: Where) =>
  [at.run, at.round != null ? `round ${at.round}` : "", at.split, at.seed != null ? `seed ${at.seed}` : ""].filter(Boolean).join(" · ");
