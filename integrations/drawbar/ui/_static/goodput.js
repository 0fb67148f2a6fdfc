// Where the time went: one stacked bar, and the same parts as a table with seconds.
import {html, useWidth} from "./lib.js";
import {duration, percent} from "./format.js";
import {Pattern, fillOf} from "./patterns.js";

export function Goodput({goodput}) {
  const [ref, width] = useWidth();
  if (!goodput || !(goodput.parts || []).length) {
    return html`<section aria-label="Goodput"><h2>Where the time went</h2>
      <p class="muted" ref=${ref}>There is no goodput for this run yet.</p></section>`;
  }
  const parts = goodput.parts.filter((part) => part.seconds > 0);
  // The bar shows the time of the goodput: a crash gap or a pause has no share.
  const shares = parts.filter((part) => part.share !== null);
  let x = 0;
  const label = shares.map((part) => `${part.label} ${percent(part.share)}`).join(", ");
  return html`<section aria-label="Goodput"><h2>Where the time went
      <small>${goodput.goodput === null ? "goodput unknown: the run has reported nothing"
        : `goodput ${percent(goodput.goodput)} of ${duration(goodput.hosted)} with a process, `
          + `effective ${percent(goodput.effective)} of ${duration(goodput.elapsed)}`}</small></h2>
    <div ref=${ref}><svg class="stack" width=${width} height="28" role="img" aria-label=${label}>
      ${shares.map((part) => {
        const size = part.share * width;
        const box = html`<rect x=${x} y="0" width=${Math.max(0, size - 1)} height="28" fill=${fillOf(part.name)}>
          <title>${part.label}: ${duration(part.seconds)}</title></rect>`;
        x += size;
        return box;
      })}</svg></div>
    <table class="goodput"><thead class="hidden-label"><tr><th>Part</th><th>Time</th><th>Share</th></tr></thead>
      <tbody>${parts.map((part) => html`<tr title=${part.help || ""}>
        <td class="swatch"><${Pattern} name=${part.name} />${part.label}</td>
        <td class="n">${duration(part.seconds)}</td><td class="n">${percent(part.share)}</td></tr>`)}</tbody></table>
    ${goodput.requested_worker_seconds > 0 && html`<p class="muted small">${`The workers were running for ${duration(goodput.worker_seconds)}, `
      + `${percent(goodput.worker_seconds / goodput.requested_worker_seconds)} of the requested time.`}</p>`}
  </section>`;
}
