// The frame around every page: route, header, theme, and messages of the connection.
import {html, render, useEffect, useState} from "./lib.js";
import {exported, serverNow, useGet, useLive} from "./api.js";
import {ago, dateTime} from "./format.js";
import {RunList} from "./list.js";
import {RunPage} from "./run.js";
import {Compare} from "./compare.js";
import {Status} from "./status.js";

function useRoute() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/");
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const update = () => { setRoute(read()); scrollTo(0, 0); };
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}

function App() {
  const [page, argument] = useRoute();
  const info = useGet("api/info").data;
  const id = page === "run" ? decode(argument) : page ? null : info && info.only_run;
  const isRun = Boolean(id);
  if (!page && !info) return html`<${Frame} title="runs" live=${{}} />`;
  if (page === "compare") return html`<${ComparePage} ids=${decode(argument).split(",").filter(Boolean)} />`;
  if (isRun) return html`<${LiveRun} key=${id} id=${id} info=${info || {}} />`;
  return html`<${LiveList} info=${info || {}} />`;
}

function decode(text) {
  try { return decodeURIComponent(text || ""); } catch (error) { return text || ""; }
}

function LiveList({info}) {
  const live = useLive("api/runs");
  useTitle("Runs");
  return html`<${Frame} title="runs" live=${live}>
    ${live.data && html`<${RunList} data=${live.data} info=${info} />`}
  <//>`;
}

function LiveRun({id, info}) {
  const live = useLive(`api/runs/${encodeURIComponent(id)}`);
  const name = live.data ? live.data.run.name : id;
  useTitle(name);
  return html`<${Frame} title=${name} live=${live} run=${live.data && live.data.run}>
    ${live.data && html`<${RunPage} id=${id} data=${live.data} info=${info} />`}
  <//>`;
}

function ComparePage({ids}) {
  useTitle("Compare runs");
  return html`<${Frame} title="compare" live=${{}}><${Compare} ids=${ids} /><//>`;
}

function useTitle(text) {
  useEffect(() => { document.title = `${text} · Drawbar`; }, [text]);
}

function Frame({title, live, run, children}) {
  const {data, error, isStopped} = live;
  const list = title === "runs" ? html`<b>runs</b>` : html`<a href="#/">runs</a> / <b>${title}</b>`;
  return html`
    <a class="skip" href="#main" onClick=${focusMain}>Skip to content</a>
    <header>
      <a class="logo" href="#/">Drawbar</a>
      <nav class="path" aria-label="Path">${list}</nav>
      ${run && html`<${Status} run=${run} />`}
      <span class="spacer"></span>
      <${AsOf} data=${data} run=${run} />
      <${Theme} />
    </header>
    ${isStopped && html`<div class="stopped" role="alert">The server has stopped.
      ${data ? ` Data as of ${dateTime(data.as_of)}.` : " Start drawbar ui again."}</div>`}
    <main id="main" tabindex="-1">
      ${error && !isStopped && html`<section class="notice bad" role="alert"><h1>
        ${data ? "The data cannot be updated." : "The data cannot be read."}</h1>${error.message}</section>`}
      ${!data && !error && live.path && html`<section class="empty" role="status">Reading the runs …</section>`}
      ${children}
    </main>`;
}

function focusMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function AsOf({data, run}) {
  const [, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTick((tick) => tick + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  if (!data) return null;
  const ended = run && run.end_time ? `ended ${ago(serverNow() - run.end_time)} · ` : "";
  const read = exported ? `exported ${dateTime(exported.as_of)}` : `read ${ago(serverNow() - data.as_of)}`;
  return html`<span class="muted small as-of">${ended}${read}</span>`;
}

function Theme() {
  const [theme, setTheme] = useState(() => storedTheme());
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("drawbar-theme", theme); } catch (error) { /* not available in files */ }
    dispatchEvent(new Event("drawbar-theme"));
  }, [theme]);
  const next = {auto: "light", light: "dark", dark: "auto"}[theme];
  return html`<button onClick=${() => setTheme(next)} aria-label=${`Theme: ${theme}. Switch to ${next}`}>
    ${{auto: "◐ Auto", light: "☀︎ Light", dark: "☾ Dark"}[theme]}</button>`;
}

function storedTheme() {
  try { return localStorage.getItem("drawbar-theme") || "auto"; } catch (error) { return "auto"; }
}

render(html`<${App} />`, document.getElementById("app"));
