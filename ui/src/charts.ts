// The drawings, by Observable Plot; large matrices by one pixel per entry.
import * as Plot from "@observablehq/plot";
import { percent } from "./format";

export interface Line { label: string; colour: string; dash?: string; x: number[]; y: (number | null)[]; band?: (number | null)[]; thin?: boolean }
interface LineOptions { width: number; height?: number; share?: boolean; xLabel?: string; yLabel?: string; xFormat?: (v: number) => string; yFormat?: (v: number) => string; xNames?: string[]; zero?: boolean; log?: boolean; extra?: any[] }

export const whole = (v: number) => (Number.isInteger(v) ? String(v) : "");
const base = { fontSize: "11px", background: "transparent", overflow: "visible" };

export function lines(all: Line[], o: LineOptions): Element {
  const points = all.flatMap((line, i) => line.x.map((x, k) => ({ i, x, y: line.y[k], label: line.label, low: low(line, k), high: high(line, k) }))).filter((p) => p.y != null);
  const say = o.yFormat ?? (o.share ? (v: number) => percent(v) : short);
  const clamp = (v: number) => (o.share ? Math.max(0, Math.min(1, v)) : v), names = o.xNames;
  return Plot.plot({
    width: o.width, height: (o.height ?? 230) + (names ? 40 : 0), marginLeft: names ? 60 : 48, marginRight: o.xFormat ? 26 : 12, marginTop: o.yLabel ? 22 : 12, marginBottom: names ? 70 : undefined, style: base,
    x: names ? { label: null, ticks: names.map((_, i) => i), tickFormat: (i: number) => cut(names[i] ?? "", 16), tickRotate: -40 }
      : { label: o.xLabel ?? "round", grid: false, tickFormat: (o.xFormat ?? (o.xLabel ? undefined : whole)) as any, ticks: Math.max(3, Math.min(8, Math.floor(o.width / 90))), labelAnchor: "right", nice: false, type: o.log ? "log" : "linear" },
    y: { label: o.yLabel ?? null, grid: true, tickFormat: o.yFormat ?? (o.share ? (v: number) => `${+(100 * v).toFixed(1)} %` : undefined), nice: true, zero: o.zero, ticks: 5 },
    marks: [
      ...(o.extra ?? []),
      ...all.map((line, i) => line.band ? Plot.areaY(points.filter((p) => p.i === i && p.low != null), { x: "x", y1: (p: any) => clamp(p.low), y2: (p: any) => clamp(p.high), fill: line.colour, fillOpacity: 0.13 }) : null),
      ...all.map((line, i) => Plot.line(points.filter((p) => p.i === i), { x: "x", y: "y", stroke: line.colour, strokeWidth: line.thin ? 1 : 1.9, strokeOpacity: line.thin ? 0.55 : 1, strokeDasharray: line.dash || undefined })),
      ...all.map((line, i) => line.x.length < 14 && !line.thin ? Plot.dot(points.filter((p) => p.i === i), { x: "x", y: "y", fill: line.colour, r: 2.4 }) : null),
      Plot.ruleX(points, Plot.pointerX({ x: "x", stroke: "currentColor", strokeOpacity: 0.25 })),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", fill: "var(--paper)", stroke: "var(--rule)", title: (p: any) => `${p.label}\n${names ? names[p.x] : `${o.xLabel?.replace(" →", "") ?? "round"} ${o.xFormat ? o.xFormat(p.x) : p.x}`}: ${say(p.y)}` })),
    ],
  });
}
const low = (line: Line, k: number) => (line.band && line.y[k] != null && line.band[k] != null ? line.y[k]! - line.band[k]! : null);
const high = (line: Line, k: number) => (line.band && line.y[k] != null && line.band[k] != null ? line.y[k]! + line.band[k]! : null);

export function short(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1000 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : size >= 0.01 ? String(+value.toPrecision(3)) : value.toExponential(1);
}

export function bars(values: { x: number; y: number; kind: string }[], colours: Record<string, string>, o: LineOptions & { step?: number }): Element {
  const half = (o.step ?? 1) / 2;
  return Plot.plot({
    width: o.width, height: o.height ?? 190, marginLeft: 52, marginRight: 12, marginTop: 12, style: base,
    x: { label: o.xLabel ?? "round", ticks: Math.max(3, Math.floor(o.width / 90)), tickFormat: whole as any },
    y: { label: null, grid: true, tickFormat: o.yFormat, ticks: 4 },
    marks: [
      Plot.rectY(values, { x1: (v: any) => v.x - half, x2: (v: any) => v.x + half, y: "y", fill: (v: any) => colours[v.kind]!, inset: values.length > 200 ? 0 : 0.4, title: (v: any) => `${v.kind}, ${o.xLabel ?? "round"} ${v.x}: ${(o.yFormat ?? short)(v.y)}`, tip: { fill: "var(--paper)", stroke: "var(--rule)" } as any }),
      Plot.ruleY([0]),
    ],
  });
}

export interface Dot { x: number; y: number; title: string; r?: number; fill: string; symbol?: string; stroke?: string; client?: number }
export function dots(points: Dot[], o: LineOptions & { xShare?: boolean; diagonal?: boolean; r?: number; names?: (p: Dot) => string; axes?: boolean; marginLeft?: number }): Element {
  const plain = o.axes === false;
  return Plot.plot({
    width: o.width, height: o.height ?? 260, marginLeft: plain ? 8 : o.marginLeft ?? 50, marginRight: o.xFormat ? 26 : 16, marginTop: o.yLabel ? 22 : 12, marginBottom: plain ? 8 : 34, style: base,
    x: plain ? { axis: null, inset: o.names ? Math.min(64, o.width / 8) : 16 } : { inset: 8, label: o.xLabel, grid: true, type: o.log ? "log" : "linear", tickFormat: o.xFormat ?? (o.xShare ? (v: number) => `${+(100 * v).toFixed(1)} %` : o.log ? short : undefined), ticks: Math.max(3, Math.floor(o.width / 100)), zero: o.zero, nice: !o.log } as any,
    y: plain ? { axis: null, inset: 16 } : { inset: 8, label: o.yLabel ?? null, grid: true, tickFormat: o.yFormat ?? (o.share ? (v: number) => `${+(100 * v).toFixed(1)} %` : undefined), ticks: 5, nice: true } as any,
    r: { type: "identity" }, symbol: { type: "identity" } as any, color: { type: "identity" },
    marks: [
      ...(o.diagonal ? [Plot.line(span(points), { x: "v", y: "v", stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "4 3" })] : []),
      ...(o.extra ?? []),
      Plot.dot(points, { x: "x", y: "y", fill: "fill", r: (p: Dot) => p.r ?? o.r ?? 3.5, fillOpacity: 0.78, symbol: ((p: Dot) => p.symbol ?? "circle") as any, stroke: (p: Dot) => p.stroke ?? "var(--paper)", strokeWidth: 0.6 } as any),
      ...(o.names ? [Plot.text(points, { x: "x", y: "y", text: o.names as any, dy: -14, fontSize: 10, fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 3 })] : []),
      Plot.dot(points, Plot.pointer({ x: "x", y: "y", r: 9, stroke: "currentColor", strokeWidth: 1.3, fill: "none" } as any)),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "title", fill: "var(--paper)", stroke: "var(--rule)" })),
    ],
  });
}
function span(points: Dot[]) {
  const values = points.flatMap((p) => [p.x, p.y]);
  return [{ v: Math.min(...values) }, { v: Math.max(...values) }];
}

export function histogram(values: { value: number; fill: string }[], o: LineOptions & { bins: number[]; mark?: number[] }): Element {
  // a bin holds its lower edge but not its upper; the last holds both, or the highest client would be missing
  const top = o.bins.at(-1)!, within = (top + o.bins.at(-2)!) / 2, held = values.map((v) => ({ ...v, value: v.value >= top ? within : v.value }));
  return Plot.plot({
    width: o.width, height: o.height ?? 220, marginLeft: 42, marginTop: 22, marginBottom: 36, style: base,
    x: { label: o.xLabel, tickFormat: o.xFormat as any, ticks: Math.max(3, Math.floor(o.width / 90)) },
    y: { label: "clients", grid: true, tickFormat: (v: number) => (Number.isInteger(v) ? String(v) : ""), ticks: 5 },
    color: { type: "identity" },
    marks: [
      Plot.rectY(held, { ...Plot.binX({ y: "count" }, { x: "value", fill: "fill", thresholds: o.bins } as any), inset: 0.6, tip: { fill: "var(--paper)", stroke: "var(--rule)" } as any } as any),
      Plot.ruleX(o.mark ?? [], { stroke: "currentColor", strokeDasharray: "4 3" }),
      Plot.ruleY([0]),
    ],
  });
}

/** Small drawings beside and below one another, in as many columns as have room. */
export function panels<T>(width: number, all: T[], draw: (one: T, i: number, width: number) => Element): HTMLElement {
  const across = Math.max(1, Math.min(4, all.length, Math.floor(width / 260))), box = document.createElement("div");
  box.className = "panels";
  box.style.gridTemplateColumns = `repeat(${across}, 1fr)`;
  box.append(...all.map((one, i) => draw(one, i, Math.floor((width - 12 * (across - 1)) / across))));
  return box;
}
/** The title of a panel: within the drawing, so that it is saved with it. */
export const headline = (text: string, width: number) =>
  Plot.text([cut(text, Math.floor(width / 6.4))], { frameAnchor: "top-left", lineAnchor: "bottom", dx: -38, dy: -8, fontSize: 11.5, fill: "var(--soft)", title: () => text } as any);

export const cut = (text: string, most: number) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A matrix with its numbers, for a few dozen rows. */
export function cells(rows: string[], columns: string[], value: (i: number, j: number) => number | null, o: { width: number; colour: (v: number) => string; dark: (v: number) => boolean; text?: (v: number) => string; xLabel?: string; yLabel?: string; gap?: boolean; side?: number }): Element {
  const all = rows.flatMap((_, i) => columns.map((_, j) => ({ i, j, v: value(i, j) }))).filter((c) => c.v != null) as { i: number; j: number; v: number }[];
  const longest = Math.min(14, Math.max(...rows.map((r) => r.length), 1)), left = 14 + 6.4 * longest;
  const side = Math.max(6, Math.min(o.side ?? 44, (o.width - left - 12) / columns.length));
  const tall = Math.max(8, Math.min(side, 30));
  const foot = 16 + 6 * Math.min(14, Math.max(...columns.map((c) => c.length), 1)) * 0.75 + (o.xLabel ? 12 : 0);
  return Plot.plot({
    width: left + 12 + side * columns.length, height: 22 + foot + tall * rows.length, marginLeft: left, marginTop: 22, marginBottom: foot, marginRight: 12, style: base, padding: 0,
    x: { domain: columns.map((_, j) => j), tickFormat: (j: number) => cut(columns[j]!, 14), tickRotate: columns.some((c) => c.length > 3) ? -40 : 0, label: o.xLabel ?? null, labelAnchor: "center", labelOffset: foot - 4, tickSize: 0, axis: "bottom" } as any,
    y: { domain: rows.map((_, i) => i), tickFormat: (i: number) => cut(rows[i]!, 14), label: o.yLabel ?? null, tickSize: 0 } as any,
    color: { type: "identity" },
    marks: [
      Plot.cell(all, { x: "j", y: "i", fill: (c: any) => o.colour(c.v), inset: 0.5 }),
      o.text && side > 22 && tall > 11 ? Plot.text(all, { x: "j", y: "i", text: (c: any) => o.text!(c.v), fill: (c: any) => (o.dark(c.v) ? "white" : "#1f2933"), fontSize: 10 }) : null,
      Plot.tip(all, Plot.pointer({ x: "j", y: "i", title: (c: any) => `${rows[c.i]} · ${columns[c.j]}\n${(o.text ?? short)(c.v)}`, fill: "var(--paper)", stroke: "var(--rule)" } as any)),
    ],
  });
}

/** A matrix of any size as an image, one pixel per entry, with names where there is room. */
export function pixels(rows: string[], columns: string[], colour: (i: number, j: number) => string, o: { width: number; height?: number; title?: (i: number, j: number) => string; onClick?: (i: number, j: number) => void; groups?: { name: string; start: number; size: number }[] }): SVGSVGElement {
  const named = rows.length <= 50, left = named ? 12 + 6.2 * Math.min(16, Math.max(...rows.map((r) => r.length), 1)) : 56;
  const tall = o.height ?? Math.max(60, Math.min(420, rows.length * (named ? 16 : 6)));
  const wide = o.width - left - 8, tilt = columns.length <= 60;
  const foot = tilt ? 14 + 4.6 * Math.min(16, Math.max(...columns.map((c) => c.length), 1)) : 18;
  const head = o.groups ? 18 : 4;
  const canvas = document.createElement("canvas");
  canvas.width = columns.length; canvas.height = rows.length;
  const paint = canvas.getContext("2d")!;
  for (let i = 0; i < rows.length; i++) for (let j = 0; j < columns.length; j++) { paint.fillStyle = colour(i, j); paint.fillRect(j, i, 1, 1); }
  const svg = element("svg", { viewBox: `0 0 ${o.width} ${head + tall + foot}`, width: o.width, height: head + tall + foot, fill: "currentColor", "font-size": 11 }) as SVGSVGElement;
  const image = element("image", { href: canvas.toDataURL(), x: left, y: head, width: wide, height: tall, preserveAspectRatio: "none", style: "image-rendering: pixelated" });
  svg.append(image);
  const step = wide / columns.length, down = tall / rows.length;
  if (named) rows.forEach((name, i) => svg.append(label(cut(name, 16), left - 5, head + down * (i + 0.5) + 3.5, "end", Math.min(11, down))));
  else svg.append(label(`${rows.length} clients`, 0, 0, "middle", 11, `translate(${left - 12},${head + tall / 2}) rotate(-90)`));
  if (tilt) columns.forEach((name, j) => svg.append(label(cut(name, 16), 0, 0, "end", Math.min(11, Math.max(7, step)), `translate(${left + step * (j + 0.5) + 3},${head + tall + 10}) rotate(-40)`)));
  for (const group of o.groups ?? []) {
    const x = left + step * group.start, w = step * group.size;
    svg.append(element("line", { x1: x, x2: x, y1: head, y2: head + tall, stroke: "var(--paper)", "stroke-width": 1.5 }));
    if (w > 26) svg.append(label(group.name.length * 6 > w ? group.name.slice(0, Math.floor(w / 6)) : group.name, x + w / 2, 12, "middle", 10));
  }
  const at = (event: MouseEvent): [number, number] => {
    const box = image.getBoundingClientRect();
    return [Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows.length))), Math.min(columns.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns.length)))];
  };
  const hint = element("title", {});
  image.append(hint);
  image.addEventListener("mousemove", (event) => { const [i, j] = at(event as MouseEvent); hint.textContent = o.title ? o.title(i, j) : `${rows[i]} · ${columns[j]}`; });
  if (o.onClick) { image.addEventListener("click", (event) => o.onClick!(...at(event as MouseEvent))); (image as SVGElement).style.cursor = "pointer"; }
  return svg;
}

export function element(name: string, attributes: Record<string, unknown>): SVGElement {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}
export function label(text: string, x: number, y: number, anchor: string, size: number, transform = ""): SVGElement {
  const made = element("text", { x, y, "text-anchor": anchor, "font-size": size, ...(transform ? { transform } : {}) });
  made.textContent = text;
  return made;
}

/** A DARTS cell: edges as arcs, thicker where more clients keep them, in the colour of the operation they keep. */
export function cellGraph(title: string, edges: { from: number; to: number; op: string; share: number; note: string }[], colour: (op: string) => string, width: number): SVGSVGElement {
  const height = 250, middle = 128, names = ["k−2", "k−1", "0", "1", "2", "3", "out"];
  const x = (n: number) => 40 + ((width - 80) * (n < 2 ? 0 : n - 1)) / 5, y = (n: number) => (n === 0 ? middle - 44 : n === 1 ? middle + 44 : middle);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, fill: "currentColor", "font-size": 11 }) as SVGSVGElement;
  svg.append(label(title, 8, 16, "start", 12));
  for (let n = 2; n < 6; n++) svg.append(element("path", { d: `M${x(n)},${y(n) + 13} Q${(x(n) + x(6)) / 2},${middle + 60 + 9 * (6 - n)} ${x(6)},${middle + 13}`, fill: "none", stroke: "var(--rule)", "stroke-width": 1.2 }));
  for (const edge of edges) {
    const [x0, y0, x1, y1] = [x(edge.from), y(edge.from), x(edge.to), y(edge.to)];
    const far = edge.from < 2 ? edge.to - 1 : edge.to - edge.from, side = edge.from === 1 ? 1 : -1;
    const bend = edge.from >= 2 && far === 1 ? 0 : side * (14 + 24 * far);
    const path = element("path", { d: `M${x0},${y0} C${x0 + (x1 - x0) * 0.3},${y0 + bend} ${x1 - (x1 - x0) * 0.3},${(edge.from < 2 ? y0 : y1) + bend} ${x1},${y1}`, fill: "none", stroke: colour(edge.op), "stroke-width": 1 + 4.5 * edge.share, "stroke-opacity": 0.35 + 0.65 * edge.share });
    const hint = element("title", {});
    hint.textContent = edge.note;
    path.append(hint);
    svg.append(path);
  }
  names.forEach((name, n) => {
    const wide = n < 2 || n === 6 ? 40 : 26;
    svg.append(element("rect", { x: x(n) - wide / 2, y: y(n) - 12, width: wide, height: 24, rx: 5, fill: "var(--paper)", stroke: "currentColor" }));
    svg.append(label(name, x(n), y(n) + 4, "middle", 11));
  });
  return svg;
}
