// Logs of a rank: follow new lines, search, and load older lines.
import {html, useEffect, useLayoutEffect, useMemo, useRef, useState} from "./lib.js";
import {exported, get, sleep, whenVisible} from "./api.js";
import {bytes, plural} from "./format.js";
import {parseAnsi} from "./ansi.js";

const MAX_LINES = 3000;
const CHUNK = 200000;

export function Logs({id, data}) {
  const ranks = data.log_ranks || [];
  const cause = data.failure && ranks.includes(data.failure.rank) ? data.failure.rank : ranks[0];
  const [chosen, setRank] = useState(null);
  const rank = ranks.includes(chosen) ? chosen : cause;
  const order = [cause, ...ranks.filter((each) => each !== cause)];
  if (!ranks.length) return html`<section aria-label="Logs"><h2>Logs</h2><p class="muted">No rank has written a log.</p></section>`;
  return html`<section aria-label="Logs"><h2>Logs</h2>
    <${Viewer} key=${`${id} ${rank}`} id=${id} rank=${rank} tabs=${html`<${RankTabs} ranks=${order} rank=${rank} setRank=${setRank} />`} /></section>`;
}

function RankTabs({ranks, rank, setRank}) {
  if (ranks.length > 8) {
    return html`<select aria-label="Rank" value=${rank} onChange=${(event) => setRank(Number(event.target.value))}>
      ${ranks.map((each) => html`<option value=${each}>rank ${each}</option>`)}</select>`;
  }
  const onKey = (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = ranks[(ranks.indexOf(rank) + step + ranks.length) % ranks.length];
    setRank(next);
    event.preventDefault();
    const tabs = event.currentTarget;
    requestAnimationFrame(() => { const tab = tabs.querySelector(`[data-rank="${next}"]`); if (tab) tab.focus(); });
  };
  return html`<span role="tablist" aria-label="Rank" class="bar" style=${{margin: 0}} onKeyDown=${onKey}>${ranks.map((each) => html`
    <button role="tab" data-rank=${each} aria-selected=${each === rank} tabindex=${each === rank ? 0 : -1} onClick=${() => setRank(each)}>rank ${each}</button>`)}</span>`;
}

function Viewer({id, rank, tabs}) {
  const path = `api/runs/${encodeURIComponent(id)}/log`;
  const [log, setLog] = useState({text: "", first: 0, next: 0, size: null, error: null, isLoaded: false});
  const [isFollowing, setFollowing] = useState(true);
  const [search, setSearch] = useState("");
  const [isFiltered, setFiltered] = useState(false);
  const [position, setPosition] = useState(0);
  const box = useRef(null);
  useEffect(() => follow(path, rank, setLog), [path, rank]);
  const lines = useMemo(() => splitLines(log.text), [log.text]);
  const needle = search.toLowerCase();
  const matches = useMemo(() => (needle ? lines.flatMap((line, index) => (plain(line).toLowerCase().includes(needle) ? [index] : [])) : []), [lines, needle]);
  const current = matches.length ? matches[Math.min(position, matches.length - 1)] : -1;
  useLayoutEffect(() => { if (isFollowing && !needle && box.current) box.current.scrollTop = box.current.scrollHeight; }, [lines, isFollowing, needle]);
  useLayoutEffect(() => { const element = box.current && box.current.querySelector(".current"); if (element) element.scrollIntoView({block: "nearest"}); }, [current, isFiltered]);
  const move = (step) => setPosition((Math.min(position, matches.length - 1) + step + matches.length) % Math.max(1, matches.length));
  const onScroll = () => { const e = box.current; setFollowing(e.scrollHeight - e.scrollTop - e.clientHeight < 24); };
  const shown = isFiltered && needle ? matches : lines.map((_, index) => index);
  const older = async () => {
    try {
      const start = Math.max(0, log.first - CHUNK);
      const answer = await get(path, {rank, offset: start, limit: log.first - start});
      setFollowing(false);
      setLog((old) => ({...old, text: answer.text + old.text, first: answer.offset, hasOlder: true}));
    } catch (error) { setLog((old) => ({...old, error})); }
  };
  return html`<div class="bar no-print">${tabs}
      <input type="search" placeholder="Search logs" aria-label="Search logs" value=${search} onInput=${(event) => { setSearch(event.target.value); setPosition(0); }}
        onKeyDown=${(event) => { if (event.key === "Enter") { move(event.shiftKey ? -1 : 1); event.preventDefault(); } }} />
      ${needle && html`<span class="small muted" role="status">${matches.length ? `${Math.min(position, matches.length - 1) + 1} of ${plural(matches.length, "line")}` : "no match"}</span>
        <label class="check"><input type="checkbox" checked=${isFiltered} onChange=${() => setFiltered(!isFiltered)} /> Only these lines</label>`}
      <span class="spacer"></span>
      ${!exported && log.first > 0 && html`<button onClick=${older}>Load older lines</button>`}
      ${!exported && html`<button aria-pressed=${isFollowing} onClick=${() => setFollowing(!isFollowing)}>Follow</button>`}</div>
    ${log.error && html`<p class="muted small" role="status">${log.error.message}</p>`}
    <div class="log" ref=${box} tabindex="0" role="log" aria-live="off" aria-label=${`Log of rank ${rank}`} onScroll=${onScroll}>
      ${log.isLoaded && !log.text && html`<div class="muted">This rank has not printed anything.</div>`}
      ${shown.map((index) => html`<${Line} key=${index} text=${lines[index]} needle=${needle} isCurrent=${index === current} />`)}</div>
    <p class="small muted" style=${{margin: "6px 0 0"}}>${log.first > 0 ? `Shows the end of ${bytes(log.size)}.` : ""}</p>`;
}

function splitLines(text) {
  const lines = text.split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  return lines.slice(-MAX_LINES);
}

function plain(line) {
  return line.includes("\x1b") ? parseAnsi(line).map((part) => part.text).join("") : line;
}

function Line({text, needle, isCurrent}) {
  const parts = useMemo(() => parseAnsi(text), [text]);
  return html`<div class=${isCurrent ? "current" : ""}>${parts.map((part) => html`<span class=${part.kind}>${highlight(part.text, needle)}</span>`)}</div>`;
}

function highlight(text, needle) {
  if (!needle) return text;
  const parts = [];
  const lower = text.toLowerCase();
  let last = 0;
  for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, last)) {
    parts.push(text.slice(last, at), html`<mark>${text.slice(at, at + needle.length)}</mark>`);
    last = at + needle.length;
  }
  return [...parts, text.slice(last)];
}

function follow(path, rank, setLog) {
  const control = new AbortController();
  (async () => {
    let next = null;
    let pause = 1000;
    while (!control.signal.aborted) {
      try {
        const params = next === null ? {rank, limit: CHUNK} : {rank, limit: CHUNK, offset: next, wait: 25};
        const answer = await get(path, params, control.signal);
        if (control.signal.aborted) return;
        const isFirst = next === null;
        next = answer.next;
        pause = 1000;
        if (isFirst || answer.text) setLog((old) => append(old, answer, isFirst));
        if (exported || (!answer.is_active && !answer.text)) return;
      } catch (error) {
        if (error.name === "AbortError") return;
        setLog((old) => ({...old, error, isLoaded: true}));
        if (exported) return;
        pause = Math.min(30000, pause * 2);
      }
      await sleep(pause);
      await whenVisible();
    }
  })();
  return () => control.abort();
}

function append(old, answer, isFirst) {
  const base = isFirst ? {first: answer.offset || 0, text: ""} : old;
  const text = base.text + answer.text;
  const excess = old.hasOlder ? 0 : Math.max(0, text.length - 5 * CHUNK);
  return {...old, text: text.slice(excess), first: base.first, size: answer.size, error: null, isLoaded: true};
}
