// Resource use of each node over time.
import {html, useMemo, useVisible} from "./lib.js";
import {useGet} from "./api.js";
import {COLORS, Chart, DASHES, LineSample} from "./chart.js";
import {bytes, number} from "./format.js";

const FORMATS = {bytes, percent: (value) => `${number(value)} %`};

export function Resources({id, version}) {
  const [ref, isVisible] = useVisible();
  const {data, error} = useGet(`api/runs/${encodeURIComponent(id)}/resources`, {}, version, isVisible);
  return html`<section aria-label="Resources" ref=${ref}><h2>Resources
      <small>${data && data.nodes.length < data.num_nodes ? `of ${data.nodes.length} of ${data.num_nodes} nodes` : "of each node"}</small></h2>
    ${!data ? html`<p class="muted">${error ? error.message : "Loading …"}</p>`
      : !data.charts.length ? html`<p class="muted">There are no samples. Drawbar records one about every 10 s.</p>`
        : html`<div class="charts">${data.charts.map((chart) => html`<${ResourceChart} key=${chart.name} chart=${chart} nodes=${data.nodes} />`)}</div>
          ${data.nodes.length > 1 && html`<ul class="legend">${data.nodes.map((node, index) => html`<li><${LineSample} ...${getStyle(index)} />${node}</li>`)}</ul>`}`}
  </section>`;
}

function getStyle(index) {
  return {color: COLORS[index % 8], dash: DASHES[Math.floor(index / 8) % 8]};
}

function ResourceChart({chart, nodes}) {
  const lines = useMemo(() => chart.lines.map((line) => ({...line, ...getStyle(nodes.indexOf(line.label))})), [chart]);
  return html`<figure><${Chart} title=${`${chart.name} ${chart.limit}`} lines=${lines} isTime isPercent=${chart.unit === "percent"} sync="resources" format=${FORMATS[chart.unit]} /></figure>`;
}
