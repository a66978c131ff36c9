"""A comparison as one HTML page that needs nothing else: styles and curves are inside it, and it runs no script.

Everything that is filled in is escaped: names, config values and whatever else came from people or models is hostile.
"""

from __future__ import annotations

import base64
import io

from jinja2 import Environment, StrictUndefined
from matplotlib import rc_context

from megarl.tracking.compare_text import ARROWS
from megarl.tracking.comparison import MISSING, Comparison, number
from megarl.tracking.curves import colour, overlay
from megarl.tracking.tracker import METRICS, better

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>megarl: {{ labels | join(", ") }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f36; background: #f6f7f9; }
  body { margin: 0 auto; max-width: 1240px; padding: 24px; }
  h1 { font-size: 22px; margin: 0 0 4px; }
  h2 { font-size: 17px; margin: 32px 0 10px; }
  .runs { display: flex; flex-wrap: wrap; gap: 6px 20px; }
  .run i { display: inline-block; width: 14px; height: 4px; margin-right: 6px; vertical-align: middle; }
  .scroll { overflow-x: auto; background: #fff; border: 1px solid #e4e6ea; border-radius: 8px; }
  table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
  th, td { text-align: left; padding: 5px 12px; border-bottom: 1px solid #eef0f3; vertical-align: top; }
  th { background: #fafbfc; font-weight: 600; white-space: nowrap; }
  td.value { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 360px; }
  td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
  tr.first td { border-top: 1px solid #d5d9df; }
  tr.best td.number, tr.best td.name { font-weight: 650; color: #1f7a4f; }
  .faint { color: #7a818c; }
  .curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 12px; }
  .curves img { width: 100%; background: #fff; border: 1px solid #e4e6ea; border-radius: 8px; }
</style>
</head>
<body>
<h1>Comparison of {{ labels | length }} runs</h1>
<div class="runs">
{% for label in labels %}<span class="run"><i style="background: {{ colour(loop.index0) }}"></i>{{ label }}</span>
{% endfor %}</div>

<h2>What differs in the configs</h2>
{% if differences %}<div class="scroll"><table>
<tr><th>key</th>{% for label in labels %}<th>{{ label }}</th>{% endfor %}</tr>
{% for key, values in differences.items() %}<tr><td>{{ key }}</td>
{%- for value in values %}<td class="value">{{ missing if value is none else value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% else %}<p>Nothing.</p>
{% endif %}
<h2>Curves</h2>
<div class="curves">
{% for name, svg in pictures.items() %}<img alt="{{ name }} over steps" src="data:image/svg+xml;base64,{{ svg }}">
{% endfor %}</div>

<h2>Metrics</h2>
<div class="scroll"><table>
<tr><th>metric</th><th></th><th>run</th><th>start</th><th>best</th><th>last</th><th>area</th></tr>
{% for row in rows %}<tr class="{{ 'first' if row.metric }} {{ 'best' if row.is_best }}">
<td title="{{ row.meaning }}">{{ row.metric }}</td><td class="faint">{{ row.arrow }}</td>
<td class="name">{{ row.label }}</td>
{%- for value in row.numbers %}<td class="number">{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="faint">↑ higher is better, ↓ lower is better; the best last value of a metric is green.
Area: under the curve over steps, by trapezoids.</p>
</body>
</html>
"""


def page(comparison: Comparison) -> str:
    """The whole page."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_TEMPLATE)
    return template.render(
        labels=comparison.labels,
        differences=comparison.differences,
        missing=MISSING,
        pictures={name: _picture(name, comparison) for name in comparison.courses},
        rows=[row for name in comparison.courses for row in _rows(name, comparison)],
        colour=colour,
    )


def _rows(name: str, comparison: Comparison) -> list[dict[str, object]]:
    best = comparison.best_last(name)
    meaning = METRICS.get(name)
    rows: list[dict[str, object]] = []
    for run, (label, course) in enumerate(zip(comparison.labels, comparison.courses[name], strict=True)):
        if course is None:
            continue
        rows.append(
            {
                "metric": "" if rows else name,
                "meaning": meaning.text if meaning else "",
                "arrow": "" if rows else ARROWS[better(name)],
                "label": label,
                "numbers": [number(value) for value in (course.start, course.best, course.last, course.area)],
                "is_best": run in best,
            }
        )
    return rows


def _picture(name: str, comparison: Comparison) -> str:
    """An SVG as base64: as an image it cannot run anything, whatever its labels say."""
    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": name}):  # else the ids inside it are random
        overlay(name, comparison.curves()[name]).savefig(svg, format="svg", metadata={"Date": None})
    return base64.b64encode(svg.getvalue()).decode("ascii")
