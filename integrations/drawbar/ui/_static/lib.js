// Preact and htm under one name, and small hooks that several pages use.
import {
  html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "./vendor/preact.js";

export {html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState};

/** Return [ref, width]: the width of an element in CSS pixels, 0 before it is laid out. */
export function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return undefined;
    const measure = () => setWidth(Math.floor(element.clientWidth));
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** Return [ref, isVisible]: whether an element is in the viewport or close to it. */
export function useVisible(margin = "300px") {
  const ref = useRef(null);
  const [isVisible, setVisible] = useState(false);
  useEffect(() => {
    if (!ref.current) return undefined;
    const observer = new IntersectionObserver(
      (entries) => setVisible(entries[entries.length - 1].isIntersecting), {rootMargin: margin});
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, isVisible];
}

/** Return a number that changes when the colours of the page change. */
export function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const update = () => setTheme((value) => value + 1);
    query.addEventListener("change", update);
    addEventListener("drawbar-theme", update);
    return () => {
      query.removeEventListener("change", update);
      removeEventListener("drawbar-theme", update);
    };
  }, []);
  return theme;
}

/** Return the resolved values of CSS variables, for canvases: colors("accent", "grid"). */
export function colors(...names) {
  const probe = document.createElement("i");
  document.body.append(probe);
  const values = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return values;
}

/** Call back at most once per `seconds`; the last value wins. */
export function useThrottled(value, seconds) {
  const [current, setCurrent] = useState(value);
  const last = useRef(Date.now());
  useEffect(() => {
    const wait = Math.max(0, last.current + seconds * 1000 - Date.now());
    const timer = setTimeout(() => { last.current = Date.now(); setCurrent(value); }, wait);
    return () => clearTimeout(timer);
  }, [value]);
  return current;
}
