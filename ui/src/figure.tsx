// A picture with its title, its caption, where its numbers are from, and its two downloads.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Where, told } from "./data";
import { csv } from "./format";

interface Props {
  title: string;
  caption?: ComponentChildren;
  at: Where;
  file: string;
  rows: () => Record<string, unknown>[];
  draw: (width: number) => Element | null;
  wide?: boolean;
  keys?: [string, string, string?][];
  deps?: unknown[];
  alt?: string;
  children?: ComponentChildren;
  onPick?: (value: any) => void;
}

export function Figure({ title, caption, at, file, rows, draw, wide, keys, deps = [], alt, children, onPick }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry!.contentRect.width)));
    watch.observe(place.current!);
    setWidth(place.current!.clientWidth);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (!width) return;
    const made = draw(width);
    if (!made) return place.current!.replaceChildren();
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", alt ?? title);
    if (onPick) made.addEventListener("click", () => (made as any).value && onPick((made as any).value));
    place.current!.replaceChildren(made);
  }, [width, ...deps]);
  return (
    <figure class={wide ? "wide" : ""} data-figure={file}>
      <div class="figure-head">
        <h3>{title}</h3>
        <div class="tools">
          {children}
          <button class="tool" title="Save this picture as SVG" aria-label={`SVG of ${title}`} onClick={() => saveSvg(place.current!, file)}>SVG</button>
          <button class="tool" title="Save the numbers behind it as CSV" aria-label={`CSV of ${title}`} onClick={() => saveCsv(stamped(rows(), at), file)}>CSV</button>
        </div>
      </div>
      {keys && (
        <ul class="keys">
          {keys.map(([label, colour, shape]) => (
            <li><Mark colour={colour} shape={shape} /><span>{label}</span></li>
          ))}
        </ul>
      )}
      <div class={`drawing ${onPick ? "pick" : ""}`} ref={place} />
      <figcaption>{caption && <span>{caption} </span>}<span class="from">{told(at)}</span></figcaption>
    </figure>
  );
}

const RING = "M5,5a4,4 0 1 0 8,0a4,4 0 1 0 -8,0z";
const marks: Record<string, string> = {
  dot: RING, circle: RING, square: "M5,1h8v8h-8z", diamond: "M9,0l4,5l-4,5l-4,-5z", triangle: "M9,0.5l5,9h-10z",
  cross: "M7.5,0.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", star: "M9,0l1.2,3.4l3.6,0.1l-2.9,2.2l1,3.5l-2.9,-2.1l-2.9,2.1l1,-3.5l-2.9,-2.2l3.6,-0.1z",
};

/** What stands before a label: a shape by its name, or a line, dashed as in the drawing. */
export function Mark({ colour, shape = "" }: { colour: string; shape?: string }) {
  return (
    <svg class="mark" width={18} height={10} aria-hidden="true">
      {marks[shape] ? <path d={marks[shape]} fill={colour} /> : shape === "ring" ? <path d={RING} fill="none" stroke={colour} stroke-width={1.6} />
        : <path d="M0,5h18" stroke={colour} stroke-width={2.6} stroke-dasharray={shape} />}
    </svg>
  );
}

/** Every line says where it is from. */
export function stamped(rows: Record<string, unknown>[], at: Where): Record<string, unknown>[] {
  return rows.map((row) => ({ run: at.run, seed: at.seed ?? "", ...(at.split ? { split: at.split } : {}), ...(at.round != null ? { round: at.round } : {}), ...row }));
}

export function save(text: string, type: string, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 2000);
}

export const saveCsv = (rows: Record<string, unknown>[], file: string) => save(csv(rows), "text/csv", `${file}.csv`);

/** The drawing with its key as a file that stands alone: colours of the theme become plain ones. */
export function saveSvg(place: HTMLElement, file: string): void {
  const image = place.querySelector<HTMLImageElement>("img[data-svg]");
  if (image) return save(decodeURIComponent(image.src.slice(image.src.indexOf(",") + 1)), "image/svg+xml", `${file}.svg`);
  const keys = place.closest("figure")?.querySelector(".keys"), around = [...(keys ? [keys] : []), place];
  const parts = around.flatMap((box) => [...box.querySelectorAll<SVGSVGElement>("svg")]).filter((svg) => !svg.parentElement?.closest("svg"));
  if (!place.querySelector("svg")) return;
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const words = [...(keys?.querySelectorAll("li span") ?? [])];
  const boxes = [...parts, ...words].map((one) => one.getBoundingClientRect());
  const left = Math.min(...boxes.map((b) => b.left)), top = Math.min(...boxes.map((b) => b.top));
  const width = Math.max(...boxes.map((b) => b.right)) - left, height = Math.max(...boxes.map((b) => b.bottom)) - top, edge = 6;
  const whole = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({
    xmlns: "http://www.w3.org/2000/svg", "xmlns:xlink": "http://www.w3.org/1999/xlink", viewBox: `${-edge} ${-edge} ${width + 2 * edge} ${height + 2 * edge}`, width: width + 2 * edge, height: height + 2 * edge, color: colour("--ink"),
    "font-family": "system-ui, sans-serif", "font-size": 11,
  })) whole.setAttribute(name, String(value));
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x: String(-edge), y: String(-edge), width: "100%", height: "100%", fill: colour("--paper") })) back.setAttribute(name, value);
  whole.append(back);
  parts.forEach((svg, i) => {
    const copy = svg.cloneNode(true) as SVGSVGElement;
    copy.setAttribute("x", String(boxes[i]!.left - left));
    copy.setAttribute("y", String(boxes[i]!.top - top));
    copy.setAttribute("width", String(boxes[i]!.width));
    copy.setAttribute("height", String(boxes[i]!.height));
    whole.append(copy);
  });
  words.forEach((word, i) => {
    const copy = document.createElementNS("http://www.w3.org/2000/svg", "text"), box = boxes[parts.length + i]!;
    for (const [name, value] of Object.entries({ x: box.left - left, y: box.bottom - top - 0.3 * box.height, fill: colour("--ink"), "font-size": getComputedStyle(word).fontSize })) copy.setAttribute(name, String(value));
    copy.textContent = word.textContent;
    whole.append(copy);
  });
  const text = new XMLSerializer().serializeToString(whole).replace(/var\((--[\w-]+)\)/g, (_, name) => colour(name) || "black");
  save(`<?xml version="1.0" encoding="UTF-8"?>\n${text}`, "image/svg+xml", `${file}.svg`);
}
