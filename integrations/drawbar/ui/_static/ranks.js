// How late each rank is: a heat map of rank x time, and totals of each rank.
import {colors, html, useLayoutEffect, useRef, useState, useTheme, useVisible} from "./lib.js";
import {useGet} from "./api.js";
import {duration, isNumber, number, plural, tickLabel} from "./format.js";

const MAX_ROWS = 128;

export function Ranks({id, version}) {
  const [ref, isVisible] = useVisible();
  const {data, error} = useGet(`api/runs/${encodeURIComponent(id)}/ranks`, {}, version, isVisible);
  const late = (data && data.stragglers) || [];
  return html`<section aria-label="Rank lateness" ref=${ref}><h2>Rank lateness
      <small>${late.length ? late[0].text : "time of a step beyond the median of the ranks, without waiting for other ranks"}</small></h2>
    ${late.slice(1, 5).map((each) => html`<p class="small">${each.text}</p>`)}
    ${!data ? html`<p class="muted">${error ? error.message : "Loading …"}</p>`
      : !data.ranks.length ? html`<p class="muted">There are no times of ranks. Drawbar records them for runs with two or more ranks that report.</p>`
        : html`<${HeatMap} data=${data} /><${Totals} totals=${data.totals || []} />`}
  </section>`;
}

function HeatMap({data}) {
  const canvas = useRef(null);
  const theme = useTheme();
  const [text, setText] = useState("");
  const rows = groupRows(data);
  const largest = rows.reduce((most, row) => row.values.reduce((a, b) => Math.max(a, b ?? 0), most), 0);
  const size = Math.max(4, Math.min(18, Math.floor(256 / rows.length)));
  // Delays that do not matter are pale: the full colour is a delay of at least 30 % of a step.
  const full = Math.max(largest, 0.3 * (data.step_seconds || 0));
  useLayoutEffect(() => draw(canvas.current, rows, data.columns.length, full), [data, theme]);
  const onMove = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const row = rows[Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows.length)))];
    const column = Math.min(data.columns.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * data.columns.length)));
    const value = row.values[column];
    setText(`${row.label}, ${tickLabel(data.columns[column], 1)}: ${isNumber(value) ? `${duration(value)} late` : "no steps"}`);
  };
  const end = data.end ?? data.columns[data.columns.length - 1];
  const step = end - data.columns[0] > 600 ? 60 : 1;
  const times = [0, 1 / 3, 2 / 3, 1].map((part) => data.columns[0] + (end - data.columns[0]) * part);
  const labels = rows.length <= 16 ? rows.map((row) => row.label) : [rows[0].label, rows[Math.floor(rows.length / 2)].label, rows[rows.length - 1].label];
  return html`<div class="heat-box"><div class="heat-labels" aria-hidden="true">${labels.map((label) => html`<span>${label}</span>`)}</div>
      <canvas class="heat" ref=${canvas} style=${{height: `${rows.length * size}px`}} role="img" onPointerMove=${onMove} onPointerLeave=${() => setText("")}
        aria-label=${`Heat map of lateness: ${plural(data.ranks.length, "rank")}, at most ${duration(largest)} late. The table below has the totals.`}></canvas>
      <div class="heat-times" aria-hidden="true">${times.map((time) => html`<span>${tickLabel(time, step)}</span>`)}</div></div>
    <p class="small muted">0 s<span class="scale"></span>${duration(full)} late · × no steps <span role="status">${text && `· ${text}`}</span></p>`;
}

// With many ranks, a row shows the latest of a group of ranks.
function groupRows({ranks, late}) {
  const size = Math.ceil(ranks.length / MAX_ROWS);
  const rows = [];
  for (let first = 0; first < ranks.length; first += size) {
    const group = late.slice(first, first + size);
    const values = group[0].map((_, column) => group.reduce((most, row) => (isNumber(row[column]) ? Math.max(most ?? 0, row[column]) : most), null));
    const last = Math.min(first + size, ranks.length) - 1;
    rows.push({values, label: size === 1 ? `rank ${ranks[first]}` : `ranks ${ranks[first]}–${ranks[last]}`});
  }
  return rows;
}

function draw(canvas, rows, columns, full) {
  const [base, late, faint] = colors("accent-soft", "lost", "faint");
  const cell = Math.max(2, Math.floor(800 / columns));
  const height = rows.length > 32 ? 4 : 16;
  canvas.width = columns * cell;
  canvas.height = rows.length * height;
  const context = canvas.getContext("2d");
  rows.forEach((row, y) => row.values.forEach((value, x) => {
    const [left, top, width, tall] = [x * cell, y * height, cell > 3 ? cell - 1 : cell, height > 6 ? height - 2 : height - 1];
    if (!isNumber(value)) {
      context.globalAlpha = 0.5;
      context.strokeStyle = faint;
      context.beginPath();
      context.moveTo(left, top + tall);
      context.lineTo(left + width, top);
      context.moveTo(left, top);
      context.lineTo(left + width, top + tall);
      context.stroke();
      return;
    }
    const share = full > 0 ? Math.max(0, value) / full : 0;
    context.globalAlpha = 0.55;
    context.fillStyle = base;
    context.fillRect(left, top, width, tall);
    context.globalAlpha = share;
    context.fillStyle = late;
    context.fillRect(left, top, width, tall);
  }));
}

function Totals({totals}) {
  const [limit, setLimit] = useState(8);
  const rows = [...totals].sort((a, b) => (b.ratio ?? 0) - (a.ratio ?? 0));
  if (!rows.length) return null;
  const parts = [["Step", "step_seconds"], ["Data", "data_wait"], ["Checkpoints", "checkpoint_blocked"], ["Collectives", "collective"]];
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Totals of the ranks"><table><thead><tr><th scope="col">Rank</th><th scope="col" class="n">× median</th>
      ${parts.map(([label]) => html`<th scope="col" class="n">${label}</th>`)}<th scope="col">Slow in</th></tr></thead>
    <tbody>${rows.slice(0, limit).map((each) => html`<tr><td>${each.rank}</td><td class="n">${isNumber(each.ratio) ? each.ratio.toFixed(2) : "–"}</td>
      ${parts.map(([, name]) => html`<td class="n">${duration(each[name])}</td>`)}<td>${each.slow_phase || "–"}</td></tr>`)}</tbody></table></div>
    ${rows.length > limit && html`<p class="no-print"><button onClick=${() => setLimit(limit * 4)}>Show more of ${number(rows.length)} ranks</button></p>`}`;
}
