// States of a run: the kind of its label, and a sign, so that no state depends on a colour.
import {html} from "./lib.js";

export const STATES = {
  starting: ["active", "◌"], running: ["active", "●"], restarting: ["warn", "↻"], finished: ["ok", "✓"],
  failed: ["bad", "✕"], stopped: ["", "■"], interrupted: ["bad", "⚡\uFE0E"], unknown: ["warn", "?"],
};

export function State({run}) {
  const [kind, sign] = STATES[run.status] || STATES.unknown;
  const text = run.is_stalled ? `${run.status}, stalled` : run.status;
  return html`<span class=${`pill ${run.is_stalled ? "warn" : kind}`}>
    <span aria-hidden="true">${sign}</span>${text}</span>`;
}
