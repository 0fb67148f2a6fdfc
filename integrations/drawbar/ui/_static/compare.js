// Comparison of two to eight runs: overlaid curves and differing settings.
import {html, useEffect, useMemo, useState, useVisible} from "./lib.js";
import {exported, useGet} from "./api.js";
import {duration, number, percent, plural} from "./format.js";
import {COLORS, Chart, DASHES, LineSample, smooth} from "./chart.js";
import {CurveLoader} from "./curves.js";
import {Controls} from "./metrics.js";
import {Status} from "./status.js";

export function Compare({ids}) {
  // A file contains one comparison of all of its runs.
  const all = exported ? exported.responses["api/runs"].runs.map((run) => run.id) : ids;
  const asked = all.join(",");
  const {data, error} = useGet("api/compare", {run: asked});
  const [x, setX] = useState("step");
  const [weight, setWeight] = useState(0);
  const [isLog, setLog] = useState(false);
  const [filter, setFilter] = useState("");
  const loader = useMemo(() => new CurveLoader("api/compare/curves", {run: asked, x}), [asked, x]);
  if (ids.length < 2 || ids.length > 8) return html`<section class="notice">Select two to eight runs in the <a href="#/"><u>list of runs</u></a>.</section>`;
  if (error) return html`<section class="notice bad" role="alert"><h1>The runs cannot be compared.</h1>${error.message}</section>`;
  if (!data) return html`<section class="empty" role="status">Reading the runs …</section>`;
  const columns = ids.map((id) => data.runs.findIndex((run) => run.id === id)).filter((index) => index >= 0);
  const runs = columns.map((column) => data.runs[column]);
  const names = data.metrics.filter((each) => columns.some((column) => typeof each.values[column] === "number" || /^-?(NaN|Infinity)$/.test(each.values[column])))
    .map((each) => each.name).filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  return html`
    <${Runs} runs=${runs} />
    <section aria-label="Metrics"><h2>Metrics <small>lowest rank of each run</small></h2>
      <${Controls} ...${{x, setX, weight, setWeight, isLog, setLog, filter, setFilter}} />
      <div class="charts">${names.slice(0, 60).map((name) => html`<${Overlay} key=${name} name=${name} runs=${runs} loader=${loader} weight=${weight} isLog=${isLog} isTime=${x === "time"} />`)}</div></section>
    <${SettingsTable} data=${data} columns=${columns} runs=${runs} />
    <${Values} title="Last metrics" rows=${data.metrics} columns=${columns} runs=${runs} />`;
}

function Runs({runs}) {
  return html`<section aria-label="Runs"><h2>${plural(runs.length, "run")}</h2><div class="scroll wide" tabindex="0" role="region" aria-label="Table of runs"><table>
    <thead><tr><th scope="col">Run</th><th scope="col">Status</th><th scope="col" class="n">Duration</th><th scope="col" class="n">Attempts</th>
      <th scope="col" class="n">Workers</th><th scope="col" class="n">Goodput</th></tr></thead>
    <tbody>${runs.map((run, index) => html`<tr><th scope="row" class="name"><${LineSample} color=${COLORS[index]} dash=${DASHES[index]} /><a href=${`#/run/${encodeURIComponent(run.id)}`}>${run.name}</a></th>
      <td><${Status} run=${run} /></td><td class="n">${duration(run.duration)}</td><td class="n">${number(run.attempts)}</td>
      <td class="n">${number(run.world_size)}</td><td class="n">${percent(run.goodput)}</td></tr>`)}</tbody></table></div></section>`;
}

function Overlay({name, runs, loader, weight, isLog, isTime}) {
  const [ref, isVisible] = useVisible();
  const [state, setState] = useState({});
  useEffect(() => {
    if (!isVisible) return undefined;
    let isOld = false;
    loader.load(name, {points: 400}).then(({curve}) => { if (!isOld) setState({loader, curve}); },
      (error) => { if (!isOld) setState({loader, error}); });
    return () => { isOld = true; };
  }, [loader, isVisible]);
  const {curve, error} = state.loader === loader ? state : {};
  const lines = useMemo(() => (curve ? runs.flatMap((run, index) => (curve[run.id] ? [{label: run.name, x: curve[run.id].x, y: smooth(curve[run.id].y, weight),
    color: COLORS[index], dash: DASHES[index]}] : [])) : null), [curve, weight, runs.map((run) => run.id).join()]);
  return html`<figure ref=${ref}>${isVisible && lines ? html`<${Chart} title=${name} lines=${lines} isLog=${isLog} isTime=${isTime} sync="compare" />`
    : html`<figcaption><b>${name}</b></figcaption><div class="plot muted small">${error ? error.message : "Loading …"}</div>`}</figure>`;
}

function SettingsTable({data, columns, runs}) {
  const [isAll, setAll] = useState(false);
  const rows = data.settings.filter((row) => isAll || isDifferent(row, columns));
  return html`<${Values} title=${isAll ? "Settings" : "Differing settings"} rows=${rows} columns=${columns} runs=${runs} empty="All settings are equal."
    action=${html`<button class="no-print" aria-pressed=${isAll} onClick=${() => setAll(!isAll)}>Show equal settings</button>`} />`;
}

function isDifferent(row, columns) {
  return columns.some((column) => row.values[column] !== row.values[columns[0]]);
}

function Values({title, rows, columns, runs, empty, action}) {
  return html`<section aria-label=${title}><h2>${title}<span class="spacer"></span>${action}</h2>
    ${rows.length ? html`<div class="scroll wide" tabindex="0" role="region" aria-label=${title}><table><thead><tr><th scope="col">Name</th>${runs.map((run, index) => html`<th scope="col"><${LineSample} color=${COLORS[index]} dash=${DASHES[index]} />${run.name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><th scope="row">${row.name}${isDifferent(row, columns) ? html`<span class="hidden-label"> (differs)</span>` : ""}</th>
        ${columns.map((column) => html`<td>${number(row.values[column])}</td>`)}</tr>`)}</tbody></table></div>` : html`<p class="muted">${empty || "None."}</p>`}</section>`;
}
