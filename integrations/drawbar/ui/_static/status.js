// Statuses of a run: the kind of its label, and a sign, so that no status depends on a colour.
import {html} from "./lib.js";

export const STATUSES = {
  starting: ["active", "◌"], running: ["active", "●"], restarting: ["warn", "↻"], finished: ["ok", "✓"],
  failed: ["bad", "✕"], stopped: ["", "■"], interrupted: ["bad", "⚡\uFE0E"], unknown: ["warn", "?"],
};

export function Status({run}) {
  const [kind, sign] = STATUSES[run.status] || STATUSES.unknown;
  const text = run.is_stalled ? `${run.status}, stalled` : run.status;
  return html`<span class=${`pill ${run.is_stalled ? "warn" : kind}`}>
    <span aria-hidden="true">${sign}</span>${text}</span>`;
}
