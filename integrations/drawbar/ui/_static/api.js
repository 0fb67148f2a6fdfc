// Requests to the server, or look-ups in the data of an exported file.
import {useEffect, useState} from "./lib.js";

const element = document.getElementById("drawbar-data");
/** The data of an exported file, or null if a server sent this page. */
export const exported = element ? JSON.parse(element.textContent) : null;

const NOT_IN_KEY = ["after", "wait", "points", "from", "to", "metric", "exact", "offset", "limit"];
let clockOffset = exported ? Date.now() / 1000 - exported.as_of : 0;

/** The current time of the server's clock, in seconds since the epoch. */
export function serverNow() {
  return Date.now() / 1000 - clockOffset;
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Return the answer of an endpoint. A parameter can be an array; null is left out. */
export async function get(path, params = {}, signal = undefined) {
  if (exported) return getExported(path, params);
  const query = toQuery(params, []);
  return request(path + (query ? `?${query}` : ""), {signal});
}

export async function post(path, body) {
  return request(path, {
    method: "POST", body: JSON.stringify(body),
    headers: {"Content-Type": "application/json", "X-Drawbar": "1"},
  });
}

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, {...options, credentials: "same-origin", cache: "no-store"});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server has stopped.", 0);
  }
  let answer = null;
  try { answer = await response.json(); } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (!response.ok) {
    throw new ApiError((answer && answer.error) || `The server returned status ${response.status}.`,
      response.status);
  }
  if (answer === null) throw new ApiError("The server has stopped.", 0);
  if (answer.server_time) clockOffset = Date.now() / 1000 - answer.server_time;
  return answer;
}

function getExported(path, params) {
  const query = toQuery(params, NOT_IN_KEY);
  const key = path + (query ? `?${query}` : "");
  const answer = exported.responses[key] || exported.responses[decodeURIComponent(key)];
  if (!answer) throw new ApiError("This file does not contain these data.", 404);
  return answer;
}

function toQuery(params, omitted) {
  const query = new URLSearchParams();
  for (const name of Object.keys(params).sort()) {
    if (omitted.includes(name)) continue;
    for (const value of [params[name]].flat()) {
      if (value !== null && value !== undefined) query.append(name, value);
    }
  }
  return query.toString();
}

/**
 * Return {data, error, isStopped} of an endpoint that supports long polling.
 * `data` stays available after an error. Requests pause while the page is hidden.
 */
export function useLive(path) {
  const [state, setState] = useState({path: null, data: null, error: null, isStopped: false});
  useEffect(() => poll(path, setState), [path]);
  return state.path === path ? state : {path, data: null, error: null, isStopped: false};
}

function poll(path, setState) {
  let isClosed = false;
  let control = new AbortController();
  const onHide = () => { if (document.hidden) control.abort(); };
  document.addEventListener("visibilitychange", onHide);
  (async () => {
    let version = null;
    let failures = 0;
    while (!isClosed) {
      await whenVisible();
      control = new AbortController();
      const started = Date.now();
      try {
        const params = version === null ? {} : {after: version, wait: 25};
        const answer = await get(path, params, control.signal);
        if (isClosed) return;
        failures = 0;
        version = answer.version;
        setState((old) => (answer.unchanged && old.data
          ? {...old, error: null, isStopped: false,
            data: {...old.data, as_of: answer.as_of, server_time: answer.server_time}}
          : {path, data: answer, error: null, isStopped: false}));
        if (exported) return;
      } catch (error) {
        if (isClosed) return;
        if (error.name !== "AbortError") {
          failures += 1;
          setState((old) => ({...(old.path === path ? old : {data: null}), path, error,
            isStopped: error.status === 0}));
          if (exported) return;
        }
      }
      const pause = failures ? Math.min(30000, 1000 * 2 ** failures) : 1000;
      await sleep(Math.max(50, started + pause - Date.now()));
    }
  })();
  return () => {
    isClosed = true;
    control.abort();
    document.removeEventListener("visibilitychange", onHide);
  };
}

export function sleep(milliseconds) {
  return new Promise((resolve) => { setTimeout(resolve, milliseconds); });
}

export function whenVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", function listen() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", listen);
      resolve();
    });
  });
}

/** Return {data, error, isLoading} of one request, repeated when `params` or `refresh` change. */
export function useGet(path, params = {}, refresh = "", isEnabled = true) {
  const [state, setState] = useState({data: null, error: null, isLoading: true});
  const key = JSON.stringify([path, params]);
  useEffect(() => {
    if (!isEnabled) return undefined;
    const control = new AbortController();
    setState((old) => ({...(old.key === key ? old : {data: null, key}), error: null, isLoading: true}));
    get(path, params, control.signal).then(
      (data) => setState({key, data, error: null, isLoading: false}),
      (error) => {
        if (error.name !== "AbortError") setState((old) => ({...old, error, isLoading: false}));
      });
    return () => control.abort();
  }, [key, refresh, isEnabled]);
  return state;
}
