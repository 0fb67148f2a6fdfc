// One chart: lines over steps or time, drawn by uPlot.
import {colors, html, useEffect, useLayoutEffect, useRef, useState, useTheme, useWidth} from "./lib.js";
import {duration, isNumber, number} from "./format.js";
import uPlot from "./vendor/uplot.js";

export const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 4], [1, 3], [9, 2, 2, 2, 2, 2]];
export const COLORS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

/** A short piece of a line, for legends. */
export function LineSample({color, dash}) {
  return html`<svg width="34" height="8" aria-hidden="true" style=${{display: "inline-block", marginRight: "8px"}}><line x1="0" x2="34" y1="4" y2="4"
    stroke=${`var(--${color})`} stroke-width="2.5" stroke-dasharray=${dash.join(" ") || "none"} /></svg>`;
}

/**
 * @param lines [{label, x, y, color, dash, isRaw, width}], each with its own x values
 * @param band null | {x, min, max}
 * @param format text of a value, if it is not a plain number
 */
export function Chart({title, lines, band, isLog, isTime, isPercent, marks = [], isLarge, sync, format = number}) {
  const [ref, width] = useWidth();
  const box = useRef(null);
  const theme = useTheme();
  const [cursor, setCursor] = useState(null);
  useLayoutEffect(() => {
    if (!width || !box.current) return undefined;
    const plot = new uPlot(makeOptions({lines, band, isLog, isTime, isPercent, marks, width, height: isLarge ? 260 : 180, sync, setCursor, format: format === number ? shortNumber : format}),
      align(lines, band, isLog), box.current);
    // uPlot chooses 0 to 100 for one point.
    if (plot.data[0].length === 1) plot.setScale("x", {min: plot.data[0][0] - 1, max: plot.data[0][0] + 1});
    return () => plot.destroy();
  }, [width, lines, band, isLog, isTime, isLarge, theme]);
  useEffect(() => setCursor(null), [lines]);
  const lasts = lines.filter((line) => !line.isRaw).map((line) => lastValue(line.y)).filter(isNumber);
  const [low, high] = [Math.min(...lasts), Math.max(...lasts)];
  const last = !lasts.length ? "" : low === high ? format(low) : `${format(low)} to ${format(high)}`;
  const values = cursor
    ? `${isTime ? duration(cursor.x) : number(cursor.x)}: ${cursor.values.slice(0, 4).map((each) => `${lines.length > 2 ? `${each.label} ` : ""}${format(each.y)}`).join(", ")}`
    : last;
  return html`<figcaption><b>${title}</b><span>${values}</span></figcaption>
    <div ref=${ref}><div class=${isLarge ? "plot large" : "plot"} ref=${box} role="img"
      aria-label=${`${title}: ${last ? `last value ${last}` : "no values"}, over ${isTime ? "time" : "steps"}`}></div></div>`;
}

function lastValue(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (isNumber(values[index])) return values[index];
  return null;
}

// uPlot needs one x axis for all lines. A point that a line lacks is `undefined`: the line continues across it.
function align(lines, band, isLog) {
  const tables = lines.map((line) => [line.x, clean(line.y, isLog)]);
  if (band) tables.push([band.x, clean(band.max, isLog), clean(band.min, isLog)]);
  return tables.length ? uPlot.join(tables.map(sorted)) : [[]];
}

function clean(values, isLog) {
  return values.map((value) => (isNumber(value) && (!isLog || value > 0) ? value : null));
}

// The minimum and maximum of a column can have the same x; uPlot.join() keeps one value for each x.
function sorted([x, ...columns]) {
  let previous = -Infinity;
  const unique = x.map((value) => {
    previous = value > previous ? value : previous + Math.max(1e-9, Math.abs(previous) * 1e-12);
    return previous;
  });
  return [unique, ...columns];
}

function makeOptions({lines, band, isLog, isTime, isPercent, marks, width, height, sync, setCursor, format}) {
  const [grid, muted, soft, bad, text] = colors("grid", "muted", "accent-soft", "bad", "text");
  const palette = colors(...lines.map((line) => line.color));
  const isSingle = lines.every((line) => line.x.length <= 1);
  const series = lines.map((line, index) => ({
    label: String(index), stroke: palette[index], width: line.width || 1.6, dash: line.dash, alpha: line.isRaw ? 0.3 : 1,
    points: {show: line.x.length <= 24, size: isSingle ? 8 : 5, fill: palette[index]},
  }));
  const bands = [];
  if (band) {
    series.push({label: "max", stroke: soft, width: 1, points: {show: isSingle}}, {label: "min", stroke: soft, width: 1, points: {show: isSingle}});
    bands.push({series: [lines.length + 1, lines.length + 2], fill: soft});
  }
  const axis = {stroke: muted, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  return {
    width, height, pxAlign: 0, bands, legend: {show: false}, padding: [8, 10, 0, 0],
    cursor: {y: false, points: {size: 6, fill: text}, sync: sync ? {key: sync} : undefined, drag: {x: true, y: false}},
    scales: {x: {time: false, range: xRange}, y: isPercent ? {range: [0, 100]} : isLog ? {distr: 3, range: logRange}
      : {range: (_, min, max) => yRange(min, max, format === shortNumber ? 0 : 0.005)}},
    axes: [
      {...axis, size: 26, space: isTime ? 100 : 60, values: (_, ticks) => ticks.map((tick) => (isTime ? duration(tick) : shortNumber(tick))),
        incrs: isTime ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7]},
      {...axis, size: 52, space: 34, ...(isLog ? {splits: logSplits, filter: (_, ticks) => ticks} : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick)))},
    ],
    series: [{}, ...series],
    hooks: {
      draw: [(plot) => drawMarks(plot, marks, bad)],
      setCursor: [(plot) => setCursor(readCursor(plot, lines))],
    },
  };
}

function xRange(_, min, max) {
  if (min === null || max === null) return [0, 1];
  return min === max ? [min - 1, max + 1] : [min, max];
}

// The least margin is a share of the maximum, so that ticks have different texts if they have few digits.
function yRange(min, max, share) {
  if (min === null || max === null) return [0, 1];
  const margin = min === max ? Math.max(Math.abs(min) * 0.1, 1e-6) : Math.max((max - min) * 0.06, Math.abs(max) * share);
  return min === 0 && max === 0 ? [-1, 1] : [min - margin, max + margin];
}

function logRange(_, min, max) {
  if (min === null || max === null || min <= 0) return [0.1, 1];
  return min === max ? [min / 2, max * 2] : [min / 1.15, max * 1.15];
}

// At most five decades, or 1, 2, and 5 times a power of ten within one decade.
function logSplits(_, axis, min, max) {
  const [low, high] = [Math.ceil(Math.log10(min)), Math.floor(Math.log10(max))];
  const step = Math.max(1, Math.ceil((high - low) / 4));
  const powers = high - low >= 1 ? Array.from({length: Math.floor((high - low) / step) + 1}, (__, index) => low + index * step)
    : [low - 1, low].flatMap((power) => [0, Math.log10(2), Math.log10(5)].map((part) => power + part));
  return powers.map((power) => Number((10 ** power).toPrecision(3))).filter((value) => value >= min && value <= max);
}

function drawMarks(plot, marks, color) {
  const {ctx, bbox} = plot;
  ctx.save();
  ctx.strokeStyle = color;
  ctx.globalAlpha = 0.7;
  ctx.setLineDash([3, 4]);
  for (const x of marks.slice(0, 200)) {
    const position = plot.valToPos(x, "x", true);
    if (position >= bbox.left && position <= bbox.left + bbox.width) {
      ctx.beginPath();
      ctx.moveTo(position, bbox.top);
      ctx.lineTo(position, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

function readCursor(plot, lines) {
  const index = plot.cursor.idx;
  if (index === null || index === undefined || plot.cursor.left < 0) return null;
  const values = [];
  lines.forEach((line, number_) => {
    if (line.isRaw) return;
    const column = plot.data[number_ + 1];
    let at = index;
    while (at > 0 && !isNumber(column[at])) at -= 1;
    if (isNumber(column[at])) values.push({label: line.label, y: column[at]});
  });
  return {x: plot.data[0][index], values};
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(0).replace("e+", "e");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  return String(Number(value.toPrecision(5)));
}

/** Exponential moving average without bias at its start. `weight` is 0 (none) to 0.99. */
export function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
