// ANSI colours of log lines as spans. Other escape sequences are removed.
const SEQUENCE = /\x1b(?:\[([0-9;:]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])/g;

/** Return [{text, kind}] of a line; `kind` is a list of CSS classes. */
export function parseAnsi(line) {
  const text = line.slice(line.lastIndexOf("\r", line.length - 2) + 1).replace(/\r$/, "");
  const parts = [];
  let style = {};
  let last = 0;
  for (const match of text.matchAll(SEQUENCE)) {
    if (match.index > last) parts.push({text: text.slice(last, match.index), kind: classes(style)});
    if (match[2] === "m") style = apply(style, match[1].split(/[;:]/).map(Number));
    last = match.index + match[0].length;
  }
  if (last < text.length) parts.push({text: text.slice(last), kind: classes(style)});
  return parts;
}

function apply(style, codes) {
  let next = {...style};
  for (let index = 0; index < codes.length; index += 1) {
    const code = codes[index];
    if (code === 0) next = {};
    else if (code === 38 || code === 48) index += codes[index + 1] === 5 ? 2 : 4;
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 22) { next.bold = false; next.dim = false; }
    else if (code === 39) next.color = null;
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) next.color = code;
  }
  return next;
}

function classes({bold, dim, italic, underline, color}) {
  return [bold && "a-bold", dim && "a-dim", italic && "a-italic", underline && "a-underline", color && `a-${color}`]
    .filter(Boolean).join(" ");
}
