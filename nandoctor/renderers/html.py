"""The report as a fragment of HTML, for a notebook cell.

In: a `Report`. Out: one `<div>` without scripts or outside files, that takes its colours from the page around it.
"""

from __future__ import annotations

import jinja2

from nandoctor.evidence.report import Report
from nandoctor.renderers.story import MEANINGS, tell
from nandoctor.renderers.table import make_table
from nandoctor.renderers.words import printable

# Every colour is inherited, translucent, or text on its own ground, so that light and dark notebooks both read well.
_TEMPLATE = """\
<div style="max-width: 60em; line-height: 1.5">
<p><b style="background: {{ color }}; color: #fff; padding: 0.1em 0.5em; border-radius: 0.3em">
{{- report.verdict }}</b> {{ meaning }}<br><b>{{ report.headline | printable }}</b></p>
<table style="border-collapse: collapse">
{%- for fact in facts %}
<tr><th style="{{ cell }}; opacity: 0.7; font-weight: normal; white-space: nowrap">{{ fact.label }}</th>
<td style="{{ cell }}">{{ fact.text }}</td></tr>
{%- endfor %}
</table>
{%- if table %}
<table style="border-collapse: collapse; margin-top: 0.8em; font-variant-numeric: tabular-nums">
<caption style="{{ cell }}; opacity: 0.7">{{ table.title }}</caption>
<tr><th></th>{% for heading in table.headings %}<th style="{{ cell }}">{{ heading }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr style="border-top: 1px solid rgba(128, 128, 128, 0.3)
{%- if not row.finite %}; background: rgba(213, 94, 0, {{ 0.3 if row.first_bad else 0.12 }}){% endif %}">
<td style="{{ cell }}">{{ row.mark }}</td><td style="{{ cell }}"><code>{{ row.layer }}</code></td>
{%- for text in (row.type, row.autocast, row.fp32, row.rel_err) %}<td style="{{ cell }}">{{ text }}</td>{% endfor %}
<td style="{{ cell }}">{{ "-" if row.headroom_bits is none else "%.1f" | format(row.headroom_bits) }}</td></tr>
{%- endfor %}
</table>
<p style="opacity: 0.7">{{ table.legend }}</p>
{%- endif %}
{%- if report.next_steps %}
<ul>{% for step in report.next_steps %}<li>{{ step | printable }}</li>{% endfor %}</ul>
{%- endif %}
</div>
"""
_CELL = "text-align: left; padding: 0.1em 0.8em 0.1em 0"
_GOOD, _UNCLEAR, _BAD = "#00735a", "#8a6500", "#b04a00"
_COLORS = {"healthy": _GOOD, "not-reproduced": _UNCLEAR, "loss-scale": _UNCLEAR}


def report_html(report: Report) -> str:
    """The verdict, the facts and the layers around the first non-finite one; whatever a dump named is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["printable"] = printable
    return environment.from_string(_TEMPLATE).render(
        report=report,
        meaning=MEANINGS[report.verdict],
        color=_COLORS.get(report.verdict, _BAD),
        facts=tell(report),
        table=make_table(report),
        cell=_CELL,
    )
