"""The frame of a report's page: its style, its one script, the policy that allows only these, and pieces of HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from string import Template


def fill(title: str, body: str) -> str:
    """The whole page of this title and body, both HTML."""
    return _PAGE.substitute(title=title, body=body, style=_STYLE, script=_SCRIPT, policy=_POLICY)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls sideways if necessary; cells are HTML."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{body}</table></div>\n'


def dot(colour: str) -> str:
    """A mark of this colour for a key."""
    return f'<svg class="dot" viewBox="0 0 1 1" aria-hidden="true"><rect width="1" height="1" fill="{colour}"/></svg>'


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds in hours, minutes and seconds, as far as they matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.3g} s"


_STYLE = """\
:root {
  color-scheme: light dark;
  --ink: #1f2328; --soft: #59636e; --line: #d8dde2; --ground: #ffffff; --raised: #f5f7f9; --bad: #c1272d;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8568f; --c4: #b87f00; --c5: #3a9bd9; --c6: #7f7f7f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e6ea; --soft: #9aa4af; --line: #3a4149; --ground: #15181c; --raised: #1d2126; --bad: #ff6b6b;
    --c0: #56b4e9; --c1: #ff8a3d; --c2: #2fc79a; --c3: #e39ac6; --c4: #e6b23a; --c5: #9cd3f5; --c6: #a6a6a6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 2rem auto 4rem; padding: 0 1rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0.75rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
dl, dd, figure { margin: 0; }
dt, th { color: var(--soft); font-weight: 500; }
.soft, em { color: var(--soft); }
.facts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 0.15rem 2rem;
  margin-bottom: 1.25rem;
}
.facts div { display: grid; grid-template-columns: 10.5rem 1fr; column-gap: 0.5rem; }
.facts dd { overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: 1rem; }
figure { position: relative; }
figure svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure .pointer { stroke: var(--soft); stroke-width: 0.6; pointer-events: none; }
figcaption {
  position: absolute; top: 1.9rem; padding: 0.3rem 0.6rem; border: 1px solid var(--line); border-radius: 4px;
  background: var(--ground); font-size: 12px; line-height: 1.4; pointer-events: none; z-index: 1;
  font-variant-numeric: tabular-nums;
}
.scroll { overflow-x: auto; margin-bottom: 1.25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 1.25rem 0.25rem 0; text-align: left; vertical-align: top; }
.beside td + td { min-width: 5.5rem; overflow-wrap: anywhere; }
.name { white-space: nowrap; }
tr + tr { border-top: 1px solid var(--line); }
code, .text { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
.text { white-space: pre-wrap; }
.sample { margin: 0 0 1rem; padding: 0.6rem 0.9rem; border-radius: 6px; background: var(--raised); }
.sample dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; }
.sample ol { margin: 0.5rem 0 0; padding: 0; list-style: none; }
.sample li {
  display: grid; grid-template-columns: minmax(12rem, 1fr) 2fr; gap: 0.1rem 1.25rem; padding: 0.3rem 0;
  border-top: 1px solid var(--line); align-items: baseline;
}
.bar { display: block; width: 100%; height: 1.4rem; margin-top: 1rem; border-radius: 3px; }
.dot { width: 0.7rem; height: 0.7rem; margin-right: 0.4rem; border-radius: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; margin: 0.5rem 0 1rem; padding: 0; list-style: none; }
@media (max-width: 40rem) {
  body { margin-top: 1rem; }
  h1 { font-size: 1.3rem; }
  th, td { padding-right: 0.5rem; font-size: 0.84rem; }
  .sample li { grid-template-columns: 1fr; }
}
"""

# The values at the step nearest to the pointer, which `data-plot` holds (curves.draw_svg).
_SCRIPT = """\
"use strict";
const nearest = (steps, step) =>
  steps.reduce((best, at, i) => (Math.abs(at - step) < Math.abs(steps[best] - step) ? i : best), 0);
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const { box: [left, right, top, bottom], x: [first, last], lines, means } = JSON.parse(svg.dataset.plot);
  const drawn = lines.map((line, i) => [...line, `var(--c${i % 7})`]).filter(([, steps]) => steps.length);
  const note = svg.parentNode.appendChild(document.createElement("figcaption"));
  const pointer = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  pointer.setAttribute("class", "pointer");
  const hide = () => { note.hidden = true; pointer.setAttribute("d", ""); };
  const show = (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    if (place < left - 5 || place > right + 5 || !drawn.length) return hide();
    const wanted = first + (place - left) / (right - left) * (last - first);
    const found = drawn.map(([name, steps, values, colour]) => {
      const i = nearest(steps, wanted);
      const value = Object.hasOwn(means, name) ? `${values[i]}, mean ${means[name][i]}` : values[i];
      return { name, colour, step: steps[i], value };
    });
    const steps = found.map(({ step }) => step), step = steps[nearest(steps, wanted)];
    const x = left + (step - first) / (last - first) * (right - left);
    pointer.setAttribute("d", `M ${x} ${top} V ${bottom}`);
    note.replaceChildren(`step ${step}`, ...found.map(({ name, colour, step: at, value }) => {
      const row = document.createElement("div");
      row.textContent = `${name} ${value}` + (at === step ? "" : ` (step ${at})`);
      row.style.color = colour;
      return row;
    }));
    const side = x < (left + right) / 2, share = 100 * x / svg.viewBox.baseVal.width;
    note.style.left = side ? `calc(${share}% + 8px)` : "auto";
    note.style.right = side ? "auto" : `calc(${100 - share}% + 8px)`;
    note.hidden = false;
  };
  hide();
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hide());
  document.addEventListener("pointerdown", (event) => svg.contains(event.target) || hide());
}
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; base-uri 'none'; form-action 'none'"
)

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
$body
<script>$script</script>
</body>
</html>
""")
