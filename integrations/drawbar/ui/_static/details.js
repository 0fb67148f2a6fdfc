// Tables of the run page: attempts, checkpoints, workers with stacks, and settings.
import {html, useState} from "./lib.js";
import {exported, get} from "./api.js";
import {bytes, dateTime, duration, number, plural} from "./format.js";

export function Attempts({attempts}) {
  if (!attempts.length) return null;
  const times = [["Startup", "startup"], ["Training", "training"], ["Lost work", "lost"], ["Unsaved", "unsaved"],
    ["Detection", "detection"], ["Restart", "restart"]];
  return html`<section aria-label="Attempts"><h2>Attempts</h2>
    <div class="scroll wide" tabindex="0" role="region" aria-label="Table of attempts"><table class="attempts">
      <thead><tr><th scope="col">Attempt</th><th scope="col">Start</th><th scope="col" class="n">Ranks</th>
        ${times.map(([label]) => html`<th scope="col" class="n">${label}</th>`)}
        <th scope="col" class="n">Checkpoints</th><th scope="col">Resumed from</th><th scope="col">Outcome</th></tr></thead>
      <tbody>${attempts.map((each) => html`<tr><th scope="row">${each.attempt}</th><td class="nowrap" data-label="Start">${dateTime(each.start_time)}</td>
        <td class="n" data-label="Ranks">${number(each.world_size)}</td>
        ${times.map(([label, name]) => html`<td class="n" data-label=${label}>${each[name] === 0 ? "–" : duration(each[name])}</td>`)}
        <td class="n" data-label="Checkpoints">${number(each.num_checkpoints)}</td>
        <td class="nowrap" data-label="Resumed from">${baseName(each.resume_checkpoint) || "–"}</td>
        <td data-label="Outcome">${each.status}</td></tr>
        ${(each.failures || []).length > 0 && html`<tr><td class="small muted" colspan=${times.length + 6}>${each.failures.slice(0, 3).map((text) => html`<div>${text}</div>`)}
          ${each.decision && html`<details><summary>Decision: ${each.decision.split("\n")[0]}</summary>${each.decision.split("\n").slice(1).map((text) => html`<div>${text}</div>`)}</details>`}</td></tr>`}`)}
      </tbody></table></div></section>`;
}

function baseName(path) {
  return (path || "").replace(/\/+$/, "").split("/").pop();
}

export function Checkpoints({data, select}) {
  const [limit, setLimit] = useState(10);
  const all = [...(data.checkpoints || [])].reverse();
  if (!all.length) return null;
  const open = (name) => {
    select(name);
    const target = document.querySelector("section[aria-label='Timeline']");
    if (target) target.scrollIntoView();
  };
  return html`<section aria-label="Checkpoints"><h2>Checkpoints <small>${plural(data.num_checkpoints ?? all.length, "checkpoint")}</small></h2>
    <div class="scroll wide" tabindex="0" role="region" aria-label="Table of checkpoints"><table><thead><tr><th scope="col">Name</th><th scope="col">Time</th>
      <th scope="col" class="n">Attempt</th><th scope="col" class="n">Size</th><th scope="col" class="n">Files</th><th scope="col" class="n">Commit</th>
      <th scope="col">Status</th><th scope="col">Metrics</th></tr></thead>
      <tbody>${all.slice(0, limit).map((each) => html`<tr><th scope="row" class="nowrap"><button class="link" onClick=${() => open(each.name)}>${each.name}</button></th>
        <td class="nowrap" data-label="Time">${dateTime(each.time)}</td><td class="n" data-label="Attempt">${number(each.attempt)}</td>
        <td class="n" data-label="Size">${bytes(each.bytes)}</td><td class="n" data-label="Files">${number(each.num_files)}</td>
        <td class="n" data-label="Commit">${duration(each.commit_seconds)}</td>
        <td data-label="Status">${statusText(each)}</td><td class="small" data-label="Metrics">${Object.entries(each.metrics || {}).slice(0, 3).map(([name, value]) => `${name} ${number(value)}`).join(" · ")}</td></tr>`)}
      </tbody></table></div>
    ${all.length > limit && html`<p><button onClick=${() => setLimit(limit * 5)}>Show more</button></p>`}</section>`;
}

function statusText(checkpoint) {
  const validation = checkpoint.validation ? `, ${checkpoint.validation.status.toLowerCase().replaceAll("_", " ")}` : "";
  return `${checkpoint.status || ""}${validation}${checkpoint.is_resume ? ", resumed from" : ""}${checkpoint.reason ? `: ${checkpoint.reason}` : ""}`;
}

export function CheckpointDetail({id, checkpoint, close}) {
  const [check, setCheck] = useState({name: "", text: "", isBusy: false});
  const current = check.name === checkpoint.name ? check : {text: "", isBusy: false};
  const verify = async () => {
    const {name} = checkpoint;
    setCheck({name, text: "Reading all files …", isBusy: true});
    let text;
    try {
      const answer = await get(`api/runs/${encodeURIComponent(id)}/verify`, {name});
      text = answer.damage ? `✕ damaged: ${answer.damage}` : "✓ intact: all files match their checksums.";
    } catch (error) { text = error.message; }
    setCheck({name, text, isBusy: false});
  };
  const metrics = Object.entries(checkpoint.metrics || {});
  return html`<div class="detail" role="region" aria-label="Checkpoint">
    <div class="bar"><h3 style=${{margin: 0}}>${checkpoint.name}</h3><span class="muted small">${
      [dateTime(checkpoint.time), `attempt ${checkpoint.attempt}`, bytes(checkpoint.bytes), statusText(checkpoint)].join(" · ")}</span><span class="spacer"></span>
      ${!exported && html`<button disabled=${current.isBusy} onClick=${verify}>Verify</button>`}<button onClick=${close}>Close</button></div>
    <div role="status">${current.text}</div>
    ${checkpoint.validation && checkpoint.validation.error && html`<p>Validation failed: ${checkpoint.validation.error}</p>`}
    <div class="columns">
      <div class="tall" tabindex="0"><table><thead><tr><th>File</th><th class="n">Size</th></tr></thead>
        <tbody>${(checkpoint.files || []).map((file) => html`<tr><td><code>${file.path}</code></td><td class="n">${bytes(file.size)}</td></tr>`)}</tbody></table>
        ${checkpoint.num_files > (checkpoint.files || []).length && html`<p class="muted small">and ${plural(checkpoint.num_files - checkpoint.files.length, "more file")}</p>`}</div>
      <div class="tall" tabindex="0">${metrics.length > 0 && html`<table><thead><tr><th>Metric</th><th class="n">Value</th></tr></thead>
        <tbody>${metrics.map(([name, value]) => html`<tr><td>${name}</td><td class="n">${number(value)}</td></tr>`)}</tbody></table>`}</div>
    </div></div>`;
}

export function Workers({id, data}) {
  const [stacks, setStacks] = useState(null);
  const [limit, setLimit] = useState(16);
  const workers = data.workers || [];
  if (!workers.length) return null;
  const load = async () => {
    setStacks({summary: "Requesting the stacks of all ranks …", stacks: {}});
    try { setStacks(await get(`api/runs/${encodeURIComponent(id)}/stacks`)); } catch (error) { setStacks({summary: error.message, stacks: {}}); }
  };
  return html`<section aria-label="Workers"><h2>Workers <small>of the last attempt</small><span class="spacer"></span>
      ${!exported && html`<button class="no-print" onClick=${load}>${data.run.is_active ? "Request stacks" : "Stacks of the last hang"}</button>`}</h2>
    ${stacks && html`<div class="detail" role="status"><div>${stacks.summary || (Object.keys(stacks.stacks || {}).length ? "" : "No stacks were saved.")}</div>
      ${Object.entries(stacks.stacks || {}).map(([rank, text]) => html`<h3>Rank ${rank}</h3><pre class="code tall" tabindex="0">${text}</pre>`)}</div>`}
    <div class="scroll wide" tabindex="0" role="region" aria-label="Table of workers"><table class="workers"><thead><tr><th scope="col">Rank</th><th scope="col">Status</th><th scope="col">Node</th>
      <th scope="col">Local rank</th><th scope="col">Process</th><th scope="col">GPUs</th></tr></thead>
      <tbody>${workers.slice(0, limit).map((each) => html`<tr><th scope="row">${each.rank}</th><td data-label="Status">${each.status}</td><td data-label="Node">${each.node ?? "–"}</td>
        <td data-label="Local rank">${each.local_rank ?? "–"}</td><td data-label="Process">${each.pid ?? "–"}</td><td data-label="GPUs">${(each.gpus || []).join(", ") || "–"}</td></tr>`)}</tbody></table></div>
    ${workers.length > limit && html`<p><button onClick=${() => setLimit(limit * 4)}>Show more of ${plural(workers.length, "worker")}</button></p>`}</section>`;
}

export function Settings({data}) {
  const [filter, setFilter] = useState("");
  const groups = [["Settings", data.settings], ["Environment of the run", data.environment], ["Versions", data.versions]];
  return html`<section aria-label="Settings"><h2>Settings, environment, versions<span class="spacer"></span>
      <input type="search" class="no-print" placeholder="Filter" aria-label="Filter settings" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></h2>
    ${(data.notes || []).map((text) => html`<p class="muted">${text}</p>`)}
    ${groups.map(([title, values]) => html`<${Group} title=${title} values=${values} filter=${filter.toLowerCase()} />`)}
    <p class="muted small">Run ${data.run_id || data.run.id} in <code>${data.run.path}</code></p></section>`;
}

function Group({title, values, filter}) {
  if (!values) return title.startsWith("Env") ? html`<h3>${title}</h3><p class="muted small">The environment was not recorded.</p>` : null;
  const rows = Object.entries(values).filter(([name, value]) => `${name} ${value}`.toLowerCase().includes(filter));
  if (!rows.length) return null;
  return html`<h3>${title}</h3><div class="scroll tall" tabindex="0" role="region" aria-label=${title}><table>
    <tbody>${rows.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="wrap">${String(value)}</td></tr>`)}</tbody></table></div>`;
}
