// The curves of a run.
import {html, useEffect, useMemo, useState, useVisible} from "./lib.js";
import {exported} from "./api.js";
import {isNumber, plural} from "./format.js";
import {COLORS, Chart, DASHES, smooth} from "./chart.js";
import {CurveLoader} from "./curves.js";

const PAGE = 24;

export function Metrics({id, data, version}) {
  const [x, setX] = useState("step");
  const [ranks, setRanks] = useState("lowest");
  const [weight, setWeight] = useState(0);
  const [isLog, setLog] = useState(false);
  const [filter, setFilter] = useState("");
  const [limit, setLimit] = useState(PAGE);
  const loader = useMemo(() => new CurveLoader(`api/runs/${encodeURIComponent(id)}/curves`, {x, ranks}), [id, x, ranks]);
  const names = (data.metrics || []).filter((each) => each.is_numeric !== false).map((each) => each.name);
  const shown = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  const locations = data.report_locations || [];
  const what = {lowest: "lowest rank", band: "band: minimum to maximum over the ranks, line: median", each: "one line for each rank"}[ranks];
  return html`<section aria-label="Metrics"><h2>Metrics <small>${what}${weight ? ", smoothed" : ""}</small></h2>
    ${names.length > 0 && html`<${Controls} ...${{x, setX, ranks, setRanks, weight, setWeight, isLog, setLog, filter, setFilter}} />`}
    <div class="charts">${shown.slice(0, limit).map((name) => html`
      <${MetricChart} key=${name} name=${name} loader=${loader} version=${version} ranks=${ranks} weight=${weight} isLog=${isLog} isTime=${x === "time"} />`)}</div>
    ${!names.length && html`<p class="muted">The run has not reported a number yet.</p>`}
    ${names.length > 0 && !shown.length && html`<p class="muted">No metric matches the filter.</p>`}
    ${shown.length > limit && html`<p class="no-print"><button onClick=${() => setLimit(limit + PAGE * 2)}>Show more of ${plural(shown.length, "metric")}</button></p>`}
    ${locations.length > 0 && html`<p class="muted small">Reported at ${locations.map((place, index) => html`${index ? ", " : ""}<code>${place}</code>`)}</p>`}
  </section>`;
}

export function Controls({x, setX, ranks, setRanks, weight, setWeight, isLog, setLog, filter, setFilter}) {
  const modes = exported ? ["lowest", "band"] : ["lowest", "band", "each"];
  const labels = {lowest: "Lowest rank", band: "Band of ranks", each: "Each rank"};
  return html`<div class="bar no-print">
    <input type="search" placeholder="Filter metrics" aria-label="Filter metrics" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
    <span role="group" aria-label="Horizontal axis">${["step", "time"].map((name) => html`<button aria-pressed=${x === name} onClick=${() => setX(name)}>${name === "step" ? "Step" : "Time"}</button> `)}</span>
    ${setRanks && html`<select aria-label="Ranks" value=${ranks} onChange=${(event) => setRanks(event.target.value)}>
      ${modes.map((name) => html`<option value=${name}>${labels[name]}</option>`)}</select>`}
    <button aria-pressed=${isLog} onClick=${() => setLog(!isLog)}>Log scale</button>
    <label class="check">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${weight} aria-label="Smoothing"
      onInput=${(event) => setWeight(Number(event.target.value))} /> <span class="muted">${weight.toFixed(2)}</span></label></div>`;
}

function MetricChart({name, loader, version, ranks, weight, isLog, isTime}) {
  const [ref, isVisible] = useVisible();
  const [state, setState] = useState({});
  const [isLarge, setLarge] = useState(false);
  useEffect(() => {
    if (!isVisible) return undefined;
    let isOld = false;
    const take = (result) => { if (!isOld) setState({...result, loader}); return result; };
    loader.load(name).then(take).then(({answer}) => (answer.is_exact === false && !exported ? loader.load(name, {exact: true}).then(take) : null))
      .catch((error) => { if (!isOld) setState((old) => ({...old, loader, error})); });
    return () => { isOld = true; };
  }, [loader, version, isVisible]);
  const {curve, answer, error} = state.loader === loader ? state : {};
  const drawing = useMemo(() => (curve ? makeLines(curve, ranks, weight) : null), [curve, ranks, weight]);
  const marks = useMemo(() => ((answer && answer.restarts) || []).map((each) => each.x), [answer]);
  const hasNegative = isLog && drawing && drawing.lines.some((line) => line.y.some((value) => isNumber(value) && value <= 0));
  return html`<figure ref=${ref} style=${isLarge ? {gridColumn: "1 / -1"} : {}} onDblClick=${() => setLarge(!isLarge)}>
    ${isVisible && drawing ? html`<${Chart} title=${name} lines=${drawing.lines} band=${drawing.band} isLog=${isLog} isTime=${isTime} marks=${marks} isLarge=${isLarge} sync="run" />
        ${hasNegative && html`<span class="muted small">Values ≤ 0 are not shown on a log scale.</span>`}`
      : html`<figcaption><b>${name}</b></figcaption><div class="plot muted small">${error ? error.message : curve === null ? "There are no values." : "Loading …"}</div>`}
  </figure>`;
}

function makeLines(curve, ranks, weight) {
  if (curve.min) {
    const line = {label: "median", x: curve.x, y: smooth(curve.median, weight), color: "accent"};
    return {lines: [line], band: {x: curve.x, min: curve.min, max: curve.max}};
  }
  if (curve.ranks && typeof curve.ranks === "object") {
    const lines = Object.entries(curve.ranks).map(([rank, each], index) => ({label: `rank ${rank}`, x: each.x, y: smooth(each.y, weight),
      color: COLORS[index % 8], dash: DASHES[Math.floor(index / 8) % 8], width: 1.2}));
    return {lines, band: null};
  }
  const line = {label: "value", x: curve.x, y: smooth(curve.y, weight), color: "accent"};
  return {lines: weight ? [{...line, y: curve.y, isRaw: true, width: 1}, line] : [line], band: null};
}
