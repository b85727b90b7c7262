// How numbers are said, and the colours: Okabe and Ito's, which colour-blind readers tell apart.

export const none = "–";

export function percent(value: number | null | undefined, digits = 1): string {
  return value == null || Number.isNaN(value) ? none : `${(100 * value).toFixed(digits)} %`;
}

function scaled(value: number | null | undefined, units: string[]): string {
  if (value == null || Number.isNaN(value)) return none;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  const whole = unit === 0 && Number.isInteger(value);
  const digits = whole || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`.trim();
}

export const count = (value: number | null | undefined) => scaled(value, ["", "k", "M", "G", "T", "P"]);
export const size = (value: number | null | undefined) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const flop = (value: number | null | undefined) => scaled(value, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);

/** The value below which a share p of sorted values lies, between neighbours where it falls between them. */
export function quantile(sorted: number[], p: number): number {
  const at = p * (sorted.length - 1), low = Math.floor(at);
  return sorted[low]! + (at - low) * (sorted[Math.ceil(at)]! - sorted[low]!);
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return none;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function day(text: string): string {
  return text ? text.slice(0, 16).replace("T", " ") : none;
}

export const palette = ["var(--blue)", "var(--red)", "var(--green)", "var(--orange)", "var(--purple)", "var(--sky)", "var(--ink)"];
export const dashes = ["", "6 3", "2 3", "8 3 2 3"];
export const colourOf = (i: number) => palette[i % palette.length]!;
// seven colours and four dashes: no two of the first 28 lines look the same
export const dashOf = (i: number) => dashes[i % dashes.length]!;
export const shapes = ["circle", "square", "diamond", "triangle", "cross", "star"];

// Paul Tol's muted colours for classes; beyond ten, hues around the circle in three lightnesses.
const muted = ["#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#A0A0A0"];
const themed: Record<string, string> = { "#332288": "var(--indigo)", "#882255": "var(--wine)" }; // too dark for a dark page
export function classColour(i: number, n: number): string {
  if (n <= muted.length) return themed[muted[i]!] ?? muted[i]!;
  return `hsl(${Math.round((360 * i) / n)} ${[70, 55, 45][i % 3]}% ${[40, 60, 75][i % 3]}%)`;
}

// Operations of cells look as in the drawings of the package.
const operations: Record<string, string> = {
  sep_conv_3x3: "#0072b2", sep_conv_5x5: "#56b4e9", dil_conv_3x3: "#d55e00", dil_conv_5x5: "#e69f00",
  max_pool_3x3: "#009e73", avg_pool_3x3: "#cc79a7", skip_connect: "#8a8a8a", noise: "#bbbbbb", none: "#e4e4e4",
};
export function optionColour(option: string, i: number, n: number, numeric: boolean): string {
  if (operations[option]) return operations[option]!;
  return numeric || n > 8 ? blue(n < 2 ? 1 : i / (n - 1)) : muted[i]!;
}

// From pale to dark blue, as the drawings have it.
export function blue(at: number): string {
  const pale = [222, 235, 247], dark = [8, 69, 128];
  const [r, g, b] = pale.map((p, k) => Math.round(p + Math.max(0, Math.min(1, at)) * (dark[k]! - p)));
  return `rgb(${r},${g},${b})`;
}

// Red below nothing, blue above, white between: the poles of Okabe and Ito.
export function pole(at: number): string {
  const end = at < 0 ? [213, 94, 0] : [0, 114, 178], by = Math.min(1, Math.abs(at));
  const [r, g, b] = end.map((e) => Math.round(255 + by * (e - 255)));
  return `rgb(${r},${g},${b})`;
}

/** Rows as CSV. A name that a spreadsheet would take for a formula gets an apostrophe in front; numbers stay as they are. */
export function csv(rows: Record<string, unknown>[]): string {
  const heads = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value: unknown) => {
    const told = value == null ? "" : String(value);
    const text = /^[=+\-@\t\r]/.test(told) && Number.isNaN(Number(told)) ? `'${told}` : told;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [heads.map(cell).join(","), ...rows.map((row) => heads.map((head) => cell(row[head])).join(","))].join("\n") + "\n";
}
