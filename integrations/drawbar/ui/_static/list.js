// The list of runs: sort, filter, and select runs to compare.
import {html, useMemo, useState} from "./lib.js";
import {exported} from "./api.js";
import {dateTime, duration, isNumber, number, percent, plural} from "./format.js";
import {STATUSES} from "./status.js";

const COLUMNS = [
  {name: "name", label: "Run", value: (run) => run.name},
  {name: "status", label: "Status", value: (run) => run.status},
  {name: "start", label: "Start", value: (run) => run.start_time},
  {name: "duration", label: "Duration", value: (run) => run.duration, isNumber: true},
  {name: "attempts", label: "Attempts", value: (run) => run.attempts, isNumber: true},
  {name: "workers", label: "Workers", value: (run) => run.world_size, isNumber: true},
  {name: "goodput", label: "Goodput", value: (run) => run.goodput, isNumber: true},
  {name: "metrics", label: "Last metrics", value: null},
];
const PAGE = 200;

export function RunList({data, info}) {
  const [filter, setFilter] = useState("");
  const [status, setStatus] = useState("");
  const [sort, setSort] = useState({name: "start", isDown: true});
  const [selected, setSelected] = useState([]);
  const [limit, setLimit] = useState(PAGE);
  const runs = useMemo(() => sortRuns(filterRuns(data.runs, filter, status), sort), [data.runs, filter, status, sort]);
  const chosen = selected.filter((id) => data.runs.some((run) => run.id === id));
  const toggle = (id) => setSelected((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id]));
  const errors = (data.errors || []).map((text) => html`
    <section class="notice bad" role="alert">${text}</section>`);
  if (!data.runs.length) return html`${errors}<${Empty} info=${info} />`;
  const statuses = [...new Set(data.runs.map((run) => run.status))].sort();
  return html`${errors}
    <section aria-label="Runs">
      <div class="bar no-print">
        <input type="search" placeholder="Name, error, or metric" aria-label="Filter runs"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} />
        <select aria-label="Status" value=${status} onChange=${(event) => setStatus(event.target.value)}>
          <option value="">All statuses</option>
          ${statuses.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
        <span class="muted small" role="status">${runs.length === data.runs.length
          ? plural(runs.length, "run") : `${number(runs.length)} of ${plural(data.runs.length, "run")}`}</span>
        <span class="spacer"></span>
        <${CompareButton} ids=${chosen} clear=${() => setSelected([])} />
      </div>
      <div class="scroll wide" tabindex="0" role="region" aria-label="Table of runs">
        <table class="runs">
          <thead><tr><th><span class="hidden-label">Select</span></th>
            ${COLUMNS.map((column) => html`<${Heading} column=${column} sort=${sort} setSort=${setSort} />`)}</tr></thead>
          <tbody>${runs.slice(0, limit).map((run) => html`
            <${Row} key=${run.id} run=${run} isSelected=${chosen.includes(run.id)} toggle=${toggle}
              isFull=${chosen.length >= 8} />`)}</tbody>
        </table>
      </div>
      ${!runs.length && html`<p class="muted">No run matches the filter.</p>`}
      ${runs.length > limit && html`<p><button onClick=${() => setLimit(limit + PAGE)}>
        Show ${Math.min(PAGE, runs.length - limit)} more</button></p>`}
    </section>`;
}

function filterRuns(runs, filter, status) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => {
    if (status && run.status !== status) return false;
    if (!words.length) return true;
    const text = `${run.name} ${run.status} ${run.error || ""} ${Object.keys(run.metrics || {}).join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function sortRuns(runs, {name, isDown}) {
  const {value} = COLUMNS.find((column) => column.name === name);
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    const order = typeof x === "string" ? x.localeCompare(y, "en", {numeric: true}) : x - y;
    return isDown ? -order : order;
  };
  return [...runs].sort(compare);
}

function Heading({column, sort, setSort}) {
  const isSorted = sort.name === column.name;
  const kind = column.isNumber ? "n" : "";
  if (!column.value) return html`<th scope="col" class=${kind}>${column.label}</th>`;
  const direction = isSorted ? (sort.isDown ? "descending" : "ascending") : "none";
  return html`<th scope="col" class=${kind} aria-sort=${direction}><button
    onClick=${() => setSort({name: column.name, isDown: isSorted ? !sort.isDown : column.name !== "name"})}>
    ${column.label}${isSorted ? (sort.isDown ? " ▾" : " ▴") : ""}</button></th>`;
}

function Row({run, isSelected, toggle, isFull}) {
  const [kind, sign] = STATUSES[run.status] || STATUSES.unknown;
  const error = run.damage || run.error;
  return html`<tr class=${isSelected ? "selected" : ""}>
    <td><input type="checkbox" aria-label=${`Select ${run.name} to compare`} checked=${isSelected}
      disabled=${isFull && !isSelected} onChange=${() => toggle(run.id)} /></td>
    <th scope="row" class="name"><a href=${`#/run/${encodeURIComponent(run.id)}`}>${run.name}</a>
      ${error && html`<div class="small muted clip" title=${error}>${run.damage ? "damaged: " : ""}${error}</div>`}</th>
    <td class="nowrap"><span class=${`pill ${run.is_stalled ? "warn" : kind}`}><span aria-hidden="true">${sign}</span>
      ${run.is_stalled ? "stalled" : run.status}</span>
      ${run.progress && run.is_active && html`<div class="small muted">${progressText(run.progress)}</div>`}</td>
    <td class="nowrap" data-label="Start">${dateTime(run.start_time)}</td>
    <td class="n" data-label="Duration">${duration(run.duration)}</td>
    <td class="n" data-label="Attempts">${number(run.attempts)}</td>
    <td class="n" data-label="Workers">${number(run.world_size)}</td>
    <td class="n" data-label="Goodput">${percent(run.goodput)}</td>
    <td class="small" data-label="Last metrics">${metricsText(run.metrics)}</td>
  </tr>`;
}

export function progressText(progress) {
  const parts = [];
  if (isNumber(progress.fraction)) parts.push(percent(progress.fraction));
  if (isNumber(progress.eta_seconds)) parts.push(`${duration(progress.eta_seconds)} left`);
  if (!parts.length && isNumber(progress.done)) parts.push(`${number(progress.done)} ${progress.unit || "reports"}`);
  return parts.join(", ");
}

function metricsText(metrics) {
  const entries = Object.entries(metrics || {});
  const text = entries.slice(0, 3).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
  return entries.length > 3 ? `${text} · ${entries.length - 3} more` : text || "–";
}

function CompareButton({ids, clear}) {
  const isReady = ids.length >= 2 && ids.length <= 8;
  const open = () => { location.hash = `#/compare/${encodeURIComponent(ids.join(","))}`; };
  return html`
    ${ids.length > 0 && html`<button onClick=${clear}>Clear selection</button>`}
    <button disabled=${!isReady} onClick=${open} title="Select two to eight runs">
      ${ids.length ? `Compare ${plural(ids.length, "run")}` : "Select runs to compare"}</button>`;
}

function Empty({info}) {
  const storages = info.storages || [];
  return html`<section class="empty"><h1>There are no runs yet.</h1>
    <div>${exported ? "This file contains no runs." : html`Drawbar looks for runs in
      ${storages.length ? storages.map((path) => html`<div><code>${path}</code></div>`) : " the storage"}.`}</div>
    <div>This page shows a run as soon as it starts:</div>
    <code>${"from drawbar.train import RunConfig\n\nRunConfig(name=\"my-run\", storage_path="
      + JSON.stringify(storages[0] || "/path/to/runs") + ")"}</code></section>`;
}
