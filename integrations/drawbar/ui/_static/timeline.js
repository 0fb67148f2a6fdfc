// One time axis: attempts with their kinds of time, checkpoints, warnings, and preemptions.
import {html, useRef, useState, useWidth} from "./lib.js";
import {dateTime, duration, plural, tickLabel, timeTicks} from "./format.js";
import {Pattern, PatternDefinitions, fillOf} from "./patterns.js";
import {CheckpointDetail} from "./details.js";

const LABELS = {
  training: "training", startup: "placement and startup", restart: "restart", lost: "lost work", unsaved: "unsaved",
  detection: "failure detection", crash_gap: "crash gap (no process)", paused: "stopped by the user", teardown: "teardown",
};
const MARKS = {
  failure: ["bad", "▲"], warning: ["warn", "◆"], stall: ["warn", "◇"], straggler: ["warn", "▷"],
  preemption: ["c6", "▼"], stop: ["text", "■"], rollback: ["warn", "↶"], reports_lost: ["bad", "✕"], phase: ["c5", "○"], other: ["muted", "•"],
};
const LEFT = 76;
const LANE = 18;
const MAX_LANES = 12;

export function Timeline({id, data, checkpoint, setCheckpoint}) {
  const segments = data.segments || [];
  const [ref, width] = useWidth();
  const [zoom, setZoom] = useState(null);
  const inner = Math.max(width, 280);
  const limits = useLimits(data, segments);
  const [start, end] = zoom || limits;
  const plot = {start, end, width: inner, x: (time) => LEFT + (time - start) / Math.max(1e-9, end - start) * (inner - LEFT - 12)};
  const chosen = (data.checkpoints || []).find((each) => each.name === checkpoint);
  return html`<section aria-label="Timeline">
    <h2>Timeline <small>${dateTime(start)} – ${dateTime(end)} · drag to zoom, click a checkpoint for its files</small>
      <span class="spacer"></span><${ZoomButtons} limits=${limits} zoom=${zoom} setZoom=${setZoom} /></h2>
    <${PatternDefinitions} />
    <div class="scroll" ref=${ref} tabindex="0" role="group" aria-label="Timeline. Keys: plus and minus zoom, arrows move, 0 shows all."
      onKeyDown=${(event) => onKey(event, limits, zoom, setZoom)}>
      ${width > 0 && segments.length > 0 && html`<${Drawing} data=${data} plot=${plot} setZoom=${setZoom}
        checkpoint=${checkpoint} setCheckpoint=${setCheckpoint} />`}</div>
    ${!segments.length && html`<p class="muted">No attempt has started yet.</p>`}
    <${Legend} data=${data} />
    ${chosen && html`<${CheckpointDetail} id=${id} checkpoint=${chosen} close=${() => setCheckpoint(null)} />`}
    <${Events} events=${data.events || []} />
  </section>`;
}

function useLimits(data, segments) {
  const times = [data.run.start_time, ...segments.map((each) => each.start), ...segments.map((each) => each.end)]
    .filter((time) => time !== null && time !== undefined);
  const start = times.length ? times.reduce((a, b) => Math.min(a, b)) : 0;
  const end = times.length ? times.reduce((a, b) => Math.max(a, b)) : 1;
  return [start, Math.max(end, start + 0.001)];
}

function Drawing({data, plot, setZoom, checkpoint, setCheckpoint}) {
  const drag = useRef(null);
  const [box, setBox] = useState(null);
  const lanes = assignLanes(data.segments);
  const saved = 14 + lanes.count * LANE + 14;
  const height = saved + 38;
  const timeAt = (event) => {
    const x = event.clientX - event.currentTarget.getBoundingClientRect().left;
    return plot.start + (x - LEFT) / (plot.width - LEFT - 12) * (plot.end - plot.start);
  };
  const onDown = (event) => { drag.current = {time: timeAt(event), x: event.clientX}; };
  const onMove = (event) => { if (drag.current) setBox([drag.current.time, timeAt(event)]); };
  const onUp = (event) => {
    const first = drag.current;
    drag.current = null;
    setBox(null);
    if (!first) return;
    const times = [first.time, timeAt(event)].sort((a, b) => a - b);
    if (Math.abs(event.clientX - first.x) > 5) setZoom([Math.max(plot.start, times[0]), Math.min(plot.end, times[1])]);
    else selectNearest(data.checkpoints || [], plot, times[0], setCheckpoint);
  };
  const {ticks, step} = timeTicks(plot.start, plot.end, Math.max(2, Math.floor(plot.width / 110)));
  return html`<svg class="timeline" width=${plot.width} height=${height} viewBox=${`0 0 ${plot.width} ${height}`} role="img" aria-label=${describe(data)}
      onPointerDown=${onDown} onPointerMove=${onMove} onPointerUp=${onUp} onPointerLeave=${() => { drag.current = null; setBox(null); }}>
    ${ticks.map((time) => html`<line x1=${plot.x(time)} x2=${plot.x(time)} y1="8" y2=${saved + 16} stroke="var(--grid)" />
      <text x=${plot.x(time)} y=${height - 4} text-anchor="middle">${tickLabel(time, step)}</text>`)}
    ${lanes.labels.map((text, lane) => html`<text x="0" y=${24 + lane * LANE}>${text}</text>`)}
    <text x="0" y=${saved + 10}>saved</text>
    <clipPath id="plot-area"><rect x=${LEFT - 6} y="0" width=${plot.width - LEFT} height=${height} /></clipPath>
    <g clip-path="url(#plot-area)">
      ${data.segments.map((segment) => html`<${Segment} segment=${segment} plot=${plot} lanes=${lanes} />`)}
      <${Ticks} checkpoints=${data.checkpoints || []} plot=${plot} y=${saved} chosen=${checkpoint} />
      <${Marks} events=${data.events || []} plot=${plot} lanes=${lanes} />
      ${box && html`<rect x=${plot.x(Math.min(...box))} width=${Math.abs(plot.x(box[1]) - plot.x(box[0]))} y="4" height=${saved + 14}
        fill="var(--accent)" opacity=".18" />`}
    </g></svg>`;
}

function assignLanes(segments) {
  const attempts = [...new Set(segments.map((each) => each.attempt).filter((each) => each !== null && each !== undefined))];
  if (attempts.length > MAX_LANES) return {count: 1, labels: ["attempts"], of: () => 0};
  const numbers = new Map(attempts.map((attempt, lane) => [attempt, lane]));
  return {count: Math.max(1, attempts.length), labels: attempts.map((each) => `attempt ${each}`),
    of: (attempt) => numbers.get(attempt) ?? -1};
}

// A time without an attempt (crash gap, pause) covers all lanes: it belongs to none of them.
function Segment({segment, plot, lanes}) {
  const lane = lanes.of(segment.attempt);
  if (segment.end < plot.start || segment.start > plot.end) return null;
  const x = plot.x(Math.max(segment.start, plot.start));
  const width = Math.max(1, plot.x(Math.min(segment.end, plot.end)) - x);
  const isWide = lane < 0;
  const y = isWide ? 12 : 14 + lane * LANE;
  const label = LABELS[segment.kind] || segment.kind;
  return html`<rect x=${x} y=${y} width=${width} height=${isWide ? lanes.count * LANE : 12} fill=${fillOf(segment.kind)}
    opacity=${isWide ? 0.7 : 1}><title>${isWide ? "" : `attempt ${segment.attempt}: `}${label}, ${duration(segment.end - segment.start)}, from ${dateTime(segment.start)}</title></rect>`;
}

function Ticks({checkpoints, plot, y, chosen}) {
  const columns = new Map();
  for (const each of checkpoints) {
    if (each.time >= plot.start && each.time <= plot.end) {
      const column = Math.round(plot.x(each.time));
      const old = columns.get(column);
      if (!old || each.name === chosen || (each.is_resume && old.name !== chosen)) columns.set(column, each);
    }
  }
  return [...columns].map(([x, each]) => html`<g class="checkpoint">
    <line x1=${x} x2=${x} y1=${y} y2=${y + 12} stroke=${each.name === chosen ? "var(--accent)" : "var(--text)"}
      stroke-width=${each.name === chosen ? 3 : 1} stroke-dasharray=${each.status === "stored" || !each.status ? "none" : "2 2"} />
    ${each.is_resume && html`<path d=${`M${x - 3.5} ${y - 5}h7l-3.5 5z`} fill="var(--text)" />`}
    <title>${each.name}, ${dateTime(each.time)}${each.is_resume ? ", an attempt resumed from it" : ""}</title></g>`);
}

function Marks({events, plot, lanes}) {
  const columns = new Set();
  return events.map((event) => {
    if (event.time < plot.start || event.time > plot.end) return null;
    const [color, sign] = MARKS[event.kind] || MARKS.other;
    const lane = Math.max(0, lanes.of(event.attempt));
    const x = Math.round(plot.x(event.time));
    const key = `${event.kind} ${lane} ${Math.round(x / 4)}`;
    if (columns.has(key)) return null;
    columns.add(key);
    return html`<text x=${x} y=${event.kind === "failure" ? 25 + lane * LANE : 12 + lane * LANE} text-anchor="middle" class="mark"
      style=${{fill: `var(--${color})`, fontSize: "12px"}}>${sign}<title>${event.text}</title></text>`;
  });
}

function selectNearest(checkpoints, plot, time, setCheckpoint) {
  let best = null;
  for (const each of checkpoints) {
    const distance = Math.abs(plot.x(each.time) - plot.x(time));
    if (distance < 12 && (!best || distance < best.distance)) best = {distance, name: each.name};
  }
  if (best) setCheckpoint(best.name);
}

function zoomed([start, end], limits, factor, shift = 0) {
  const middle = (start + end) / 2 + shift * (end - start);
  const half = Math.min((end - start) / 2 * factor, (limits[1] - limits[0]) / 2);
  const center = Math.min(Math.max(middle, limits[0] + half), limits[1] - half);
  const next = [center - half, center + half];
  return half >= (limits[1] - limits[0]) / 2 ? null : next;
}

function ZoomButtons({limits, zoom, setZoom}) {
  const change = (factor) => setZoom(zoomed(zoom || limits, limits, factor));
  return html`<span class="bar no-print" style=${{margin: 0}}>
    <button aria-label="Zoom in" onClick=${() => change(0.5)}>+</button>
    <button aria-label="Zoom out" disabled=${!zoom} onClick=${() => change(2)}>−</button>
    <button disabled=${!zoom} onClick=${() => setZoom(null)}>Show all</button></span>`;
}

function onKey(event, limits, zoom, setZoom) {
  const changes = {"+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25]};
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "0") setZoom(null);
  else if (changes[event.key] && (zoom || event.key === "+" || event.key === "=")) {
    setZoom(zoomed(zoom || limits, limits, ...changes[event.key]));
  } else return;
  event.preventDefault();
}

function describe(data) {
  const kinds = [...new Set(data.segments.map((each) => LABELS[each.kind] || each.kind))].join(", ");
  return `${plural(data.attempts.length, "attempt")} with ${kinds}; ${plural(data.num_checkpoints ?? (data.checkpoints || []).length, "checkpoint")}`;
}

function Legend({data}) {
  const kinds = [...new Set((data.segments || []).map((each) => each.kind))];
  const marks = [...new Set((data.events || []).map((each) => (MARKS[each.kind] ? each.kind : "other")))];
  return html`<ul class="legend">
    ${kinds.map((kind) => html`<li><${Pattern} name=${kind} />${LABELS[kind] || kind}</li>`)}
    ${(data.checkpoints || []).length > 0 && html`<li>│ checkpoint</li>`}
    ${(data.checkpoints || []).some((each) => each.is_resume) && html`<li>▾ an attempt resumed from it</li>`}
    ${marks.map((kind) => html`<li><span style=${{color: `var(--${MARKS[kind][0]})`}}>${MARKS[kind][1]}</span> ${kind.replace("_", " ")}</li>`)}
  </ul>`;
}

function Events({events}) {
  if (!events.length) return null;
  return html`<details class="events"><summary>${plural(events.length, "event")}: failures, warnings, preemptions</summary>
    <div class="scroll tall" tabindex="0"><table><thead><tr><th>Time</th><th>Kind</th><th>Attempt</th><th>Rank</th><th>Text</th></tr></thead>
      <tbody>${events.map((event) => html`<tr><td class="nowrap">${dateTime(event.time)}</td>
        <td class="nowrap">${(MARKS[event.kind] || MARKS.other)[1]} ${event.kind.replace("_", " ")}</td>
        <td>${event.attempt ?? "–"}</td><td>${event.rank ?? "–"}</td><td>${event.text}</td></tr>`)}</tbody></table></div></details>`;
}
