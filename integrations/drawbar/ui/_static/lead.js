// The most important fact first: root cause and remedy, or progress and the time that is left.
import {html, useState} from "./lib.js";
import {dateTime, duration, isNumber, number, percent} from "./format.js";

export function Lead({data, actions}) {
  const {run, failure} = data;
  const isFinal = failure && failure.is_final !== false && !run.is_active;
  if (isFinal) return html`<${RootCause} data=${data} />`;
  if (run.status === "interrupted") return html`<${Interrupted} data=${data} />`;
  return html`<section aria-label="Status of the run" class=${run.is_stalled ? "notice" : ""}>
    ${run.is_active ? html`<${Progress} data=${data} />` : html`<${Ended} data=${data} />`}
    <${Stalled} stalled=${data.stalled} />
    ${failure && html`<details><summary>Last failure, attempt ${number(failure.attempt)}: ${failure.headline}</summary>
      <${Traceback} text=${failure.traceback} /></details>`}
    ${actions}
    ${!run.is_active && run.status !== "finished" && html`<${Remedy} resume=${data.resume} />`}
  </section>`;
}

function RootCause({data}) {
  const {failure, resume} = data;
  const rank = isNumber(failure.rank) && !/^rank \d/i.test(failure.headline) ? `Rank ${failure.rank}: ` : "";
  return html`<section class="cause" aria-label="Root cause">
    <h1>${rank}${failure.headline}</h1>
    <${Where} failure=${failure} />
    ${failure.repeats > 1 && html`<p>The last ${failure.repeats} attempts ended with this error.</p>`}
    ${(failure.also || []).length > 0 && html`<details><summary>${failure.also.length} later
      failure${failure.also.length === 1 ? "" : "s"} of other ranks</summary>
      <ul>${failure.also.map((text) => html`<li>${text}</li>`)}</ul></details>`}
    <${Traceback} text=${failure.traceback} isOpen=${true} />
    <${Remedy} resume=${resume} />
  </section>`;
}

function Where({failure}) {
  const place = failure.file ? `${failure.file}${failure.line ? `:${failure.line}` : ""}` : "";
  const parts = [
    failure.function && `in ${failure.function}()`,
    failure.node && `on ${failure.node}`,
    isNumber(failure.attempt) && `attempt ${failure.attempt}`,
    isNumber(failure.time) && dateTime(failure.time),
    failure.cause && `cause: ${failure.cause}`,
  ].filter(Boolean).join(" · ");
  return html`<p class="where">${place && html`<code>${place}</code> `}${parts}</p>
    ${failure.code && html`<pre class="code" tabindex="0"><code>${failure.line ? `${failure.line}  ` : ""}${failure.code}</code></pre>`}`;
}

function Traceback({text, isOpen}) {
  if (!text) return null;
  return html`<details open=${isOpen}><summary>Traceback</summary>
    <pre class="code tall" tabindex="0" aria-label="Traceback">${text}</pre></details>`;
}

function Remedy({resume}) {
  if (!resume) return null;
  const code = resume.code || "";
  return html`<div class="remedy"><b>To resume</b>
    <div>${resume.advice}</div>
    ${code && html`<div class="bar"><pre class="code" tabindex="0">${code}</pre><${Copy} text=${code} /></div>`}
    <div>${resume.text}</div></div>`;
}

export function Copy({text}) {
  const [label, setLabel] = useState("Copy");
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); setLabel("Copied"); } catch (error) { setLabel("Select and copy"); }
    setTimeout(() => setLabel("Copy"), 2000);
  };
  return html`<button class="no-print" onClick=${copy} aria-live="polite">${label}</button>`;
}

function Interrupted({data}) {
  const {run} = data;
  return html`<section class="cause" aria-label="Root cause">
    <h1>The driver of this run was killed or its machine failed.</h1>
    <p>The journal ends at ${dateTime(run.last_time)} without the end of the run. No process runs it now.</p>
    <${Remedy} resume=${data.resume} />
  </section>`;
}

function Progress({data}) {
  const {run} = data;
  const progress = run.progress || {};
  const has = isNumber(progress.fraction);
  const done = isNumber(progress.done)
    ? `${number(progress.done)}${isNumber(progress.total) ? ` of ${number(progress.total)}` : ""} ${progress.unit || "reports"}`
    : isNumber(run.num_reports) ? `${number(run.num_reports)} reports` : "";
  const left = isNumber(progress.eta_seconds) ? `About ${duration(progress.eta_seconds)} left` : headline(run);
  return html`<h1>${left}${done && html` <span class="muted">· ${done}</span>`}</h1>
    ${has ? html`<div class="progress" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100"
        aria-valuenow=${Math.round(progress.fraction * 100)}><i style=${{width: `${100 * Math.min(1, progress.fraction)}%`}}></i></div>
        <div class="muted small">${percent(progress.fraction)} done${isNumber(progress.eta_seconds)
          ? `, ends at about ${dateTime(data.server_time + progress.eta_seconds)}` : ""}</div>`
      : html`<div class="muted small">The total number of steps is not known, so there is no estimate of the end.</div>`}`;
}

function headline(run) {
  return {starting: "The workers are starting", restarting: "The workers are restarting"}[run.status] || "Training";
}

function Ended({data}) {
  const {run} = data;
  const texts = {finished: "The run has finished.", stopped: "The run was stopped.", failed: "The run has failed."};
  return html`<h1>${texts[run.status] || "The status of this run is not known."}</h1>
    <div class="muted">${run.end_time ? `Ended at ${dateTime(run.end_time)} after ${duration(run.duration)}.`
      : `Last event at ${dateTime(run.last_time)}.`} ${run.error || ""}</div>`;
}

function Stalled({stalled}) {
  if (!(stalled || []).length) return null;
  return html`<ul class="stalled">${stalled.slice(0, 20).map((each) => html`<li><b>Rank ${each.rank}</b>: ${each.text}</li>`)}
    ${stalled.length > 20 && html`<li>and ${stalled.length - 20} more ranks</li>`}</ul>`;
}
