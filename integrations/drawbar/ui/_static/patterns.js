// Fill patterns of the kinds of time, the same in the timeline and in the goodput bar.
import {html} from "./lib.js";

const KINDS = {
  training: {color: "accent"}, productive: {color: "accent"},
  lost: {color: "lost", lines: 45}, lost_work: {color: "lost", lines: 45},
  unsaved: {color: "accent", lines: 135},
  startup: {color: "wait", lines: 0, size: 4}, restart: {color: "wait", lines: 90, size: 4},
  placement: {color: "wait", dots: true}, detection: {color: "bad", dots: true},
  crash_gap: {color: "bad", lines: 45, cross: true}, paused: {color: "faint", lines: 90, size: 8, thin: true},
  teardown: {color: "faint", lines: 135, size: 4}, warmup: {color: "c2", lines: 135},
  checkpoint_blocked: {color: "c5", lines: 0}, data_wait: {color: "c1", dots: true},
  stalled: {color: "bad", lines: 90}, phase: {color: "c6", lines: 45, size: 8}, other: {color: "faint"},
};

function kindOf(name) {
  return KINDS[name] ? name : name.startsWith("phase:") ? "phase" : "other";
}

/** Return the value of `fill` for a kind of time. Needs `PatternDefinitions` on the page. */
export function fillOf(name) {
  const kind = kindOf(name);
  const {color, lines, dots} = KINDS[kind];
  return lines === undefined && !dots ? `var(--${color})` : `url(#fill-${kind})`;
}

/** A small sample of a pattern, for legends. */
export function Pattern({name}) {
  return html`<svg width="14" height="10" aria-hidden="true"><rect width="14" height="10" rx="2" fill=${fillOf(name)} /></svg>`;
}

/** The definitions. Each page contains them once. */
export function PatternDefinitions() {
  return html`<svg width="0" height="0" aria-hidden="true" style=${{position: "absolute"}}><defs>
    ${Object.keys(KINDS).map((kind) => html`<${Definition} kind=${kind} />`)}</defs></svg>`;
}

function Definition({kind}) {
  const {color, lines, dots, cross, thin, size = 6} = KINDS[kind];
  if (lines === undefined && !dots) return null;
  const fill = `var(--${color})`;
  return html`<pattern id=${`fill-${kind}`} width=${size} height=${size} patternUnits="userSpaceOnUse"
      patternTransform=${`rotate(${lines || 0})`}>
    <rect width=${size} height=${size} fill=${fill} opacity=".14" />
    ${dots ? html`<circle cx=${size / 2} cy=${size / 2} r="1.6" fill=${fill} />`
      : html`<rect width=${thin ? 1 : size / 2} height=${size} fill=${fill} />`}
    ${cross && html`<rect width=${size} height="1.5" fill=${fill} />`}
  </pattern>`;
}
