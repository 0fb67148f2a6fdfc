// Text for numbers, times, durations, and sizes. `null` becomes an en dash.

export const NONE = "–";

/** A duration in seconds: "6 h 42 min", "4 min 12 s", "12.3 s", "230 ms". */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 0) return "0 s";
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return seconds < 0.001 ? "< 1 ms" : `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
  const hours = Math.round(seconds / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A time of day, with the date unless it is today. */
export function dateTime(time, now = Date.now() / 1000) {
  if (!isNumber(time)) return NONE;
  const date = new Date(time * 1000);
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  const isToday = date.toDateString() === new Date(now * 1000).toDateString();
  return isToday ? clock : `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock}`;
}

/** "12 s ago", "5 min ago". */
export function ago(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 2) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

/** A metric or count with about four significant digits; text stays text. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

export function percent(fraction) {
  if (!isNumber(fraction)) return NONE;
  const value = fraction * 100;
  return `${value.toFixed(value < 99.95 && value >= 0.05 ? 1 : 0)} %`;
}

export function bytes(size) {
  if (!isNumber(size)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let index = 0;
  let value = size;
  while (value >= 999.5 && index < units.length - 1) { value /= 1000; index += 1; }
  return `${index && value < 99.95 ? value.toFixed(1) : Math.round(value)} ${units[index]}`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Round steps for an axis of times between `start` and `end`, about `count` of them. */
export function timeTicks(start, end, count) {
  const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
  const step = steps.find((value) => (end - start) / value <= count) || 31536000;
  const zone = new Date(start * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let time = Math.ceil((start - zone) / step) * step + zone; time <= end; time += step) {
    ticks.push(time);
  }
  return {ticks, step};
}

export function tickLabel(time, step) {
  const date = new Date(time * 1000);
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}`;
  if (step >= 86400) return `${date.getMonth() + 1}/${date.getDate()}`;
  if (step >= 60) return clock;
  const seconds = `${clock}:${pad(date.getSeconds())}`;
  return step >= 1 ? seconds : `${seconds}.${pad(Math.floor(date.getMilliseconds() / 10))}`;
}

function pad(value) {
  return String(value).padStart(2, "0");
}
