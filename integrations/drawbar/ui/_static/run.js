// The page of a run.
import {html, useState, useThrottled} from "./lib.js";
import {exported, post} from "./api.js";
import {bytes, dateTime, duration, number, percent, plural} from "./format.js";
import {Lead} from "./lead.js";
import {Timeline} from "./timeline.js";
import {Metrics} from "./metrics.js";
import {Goodput} from "./goodput.js";
import {Ranks} from "./ranks.js";
import {Resources} from "./resources.js";
import {Logs} from "./logs.js";
import {Attempts, Checkpoints, Settings, Workers} from "./details.js";

export function RunPage({id, data, info}) {
  const version = useThrottled(data.version, 3);
  const [checkpoint, setCheckpoint] = useState(null);
  const {run} = data;
  const isDamaged = Boolean(run.damage);
  return html`
    ${isDamaged && html`<section class="notice" role="note"><h1>Some data of this run cannot be read.</h1>
      <div>${run.damage}</div><div class="muted small">This page shows what can be read.
        drawbar show --verify checks the files.</div></section>`}
    <${Lead} data=${data} actions=${html`<${Stop} id=${id} run=${run} info=${info} />`} />
    <${Figures} data=${data} />
    <${Timeline} id=${id} data=${data} checkpoint=${checkpoint} setCheckpoint=${setCheckpoint} />
    <${Metrics} id=${id} data=${data} version=${version} />
    <div class="two">
      <${Goodput} goodput=${data.goodput} />
      <${Ranks} id=${id} version=${version} />
    </div>
    <${Attempts} attempts=${data.attempts || []} />
    <${Checkpoints} data=${data} select=${setCheckpoint} />
    <${Resources} id=${id} version=${version} />
    <${Logs} id=${id} data=${data} />
    <${Workers} id=${id} data=${data} />
    <${Settings} data=${data} />`;
}

function Figures({data}) {
  const {run, goodput, checkpoints, workers} = data;
  const newest = (checkpoints || []).filter((each) => each.status !== "deleted").at(-1);
  const nodes = new Set((workers || []).map((worker) => worker.node_id || worker.node)).size;
  const gpus = (workers || []).reduce((sum, worker) => sum + (worker.gpus || []).length, 0);
  const [name, value] = Object.entries(run.metrics || {})[0] || [];
  const failures = (data.attempts || []).filter((each) => (each.failures || []).length).length;
  const figures = [
    ["Goodput", percent(run.goodput), describeLoss(run, goodput)],
    ["Elapsed", duration(run.duration), goodput ? `${duration(goodput.worker_seconds)} of all workers · since ${dateTime(run.start_time)}`
      : `since ${dateTime(run.start_time)}`],
    ["Attempts", number(run.attempts), `${plural(failures, "failure")}, ${plural(run.restarts || 0, "restart")}`],
    ["Ranks", number(run.world_size), workers && workers.length
      ? `${plural(nodes, "node")}${gpus ? ` · ${plural(gpus, "GPU")}` : ""}` : ""],
    run.num_reports === null || run.num_reports === undefined ? ["Last report", number(value), name || ""]
      : ["Reports", number(run.num_reports), name === undefined ? "" : `${name} ${number(value)}`],
    ["Latest checkpoint", newest ? number(newest.index) : "none",
      newest ? `${bytes(newest.bytes)} · ${dateTime(newest.time)}` : ""],
  ];
  return html`<section class="kpis" aria-label="Key figures">
    ${figures.map(([label, text, more]) => html`<div><span>${label}</span><b>${text}</b><span>${more}</span></div>`)}
  </section>`;
}

// Work that no checkpoint has, or that an attempt did again, and the share of the time with crash gaps.
function describeLoss(run, goodput) {
  const parts = (goodput && goodput.parts) || [];
  const lost = parts.filter((part) => part.name === "lost_work" || part.name === "unsaved").reduce((sum, part) => sum + part.seconds, 0);
  const effective = percent(run.effective);
  return [lost > 0 && `${duration(lost)} of work lost or unsaved`, goodput && effective !== percent(run.goodput) && `effective ${effective}`].filter(Boolean).join(" · ");
}

function Stop({id, run, info}) {
  const [step, setStep] = useState("");
  const [message, setMessage] = useState("");
  if (exported || !run.is_active || !info.can_stop) return null;
  const send = async (save) => {
    setStep("sent");
    try {
      const answer = await post(`api/runs/${encodeURIComponent(id)}/stop`, {save});
      setMessage(`Requested. Status: ${answer.status}.`);
    } catch (error) { setMessage(error.message); setStep(""); }
  };
  return html`<div class="bar no-print stop">
    ${step === "" && html`<button class="danger" onClick=${() => setStep("ask")}>Stop the run …</button>`}
    ${step === "ask" && html`<span>Stop this run?</span>
      <button onClick=${() => send(true)}>After a checkpoint</button>
      <button class="danger" onClick=${() => send(false)}>Now</button>
      <button onClick=${() => setStep("")}>Cancel</button>`}
    <span role="status" class="muted small">${message}</span></div>`;
}
