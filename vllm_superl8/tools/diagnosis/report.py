# SPDX-License-Identifier: BSD-3-Clause
"""A diagnosis as a table for the terminal, as JSON, and as one HTML page with plots."""

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict

from vllm_superl8.tools.diagnosis.metrics import Distance
from vllm_superl8.tools.diagnosis.runs import LEVELS, Result

WORST = 5
"""Modules of a level that the terminal shows."""

COLOURS = ("#0b62a4", "#c44601", "#3a7d44", "#8e44ad", "#7a7a7a", "#b8860b")
WIDTH, HEIGHT, MARGIN = 860, 260, 44


def columns(found: Distance) -> dict[str, str]:
    """Column to text of one row of the end-to-end table."""
    change = found.perplexity / found.reference_perplexity - 1
    return {
        "KLD mean": f"{found.kld_mean:.2e}",
        "median": f"{found.kld_median:.2e}",
        "p95": f"{found.kld_p95:.2e}",
        "p99": f"{found.kld_p99:.2e}",
        "top-1": f"{found.top1:.2%}",
        "logits dB": f"{found.logits_db:.1f}",
        "perplexity": f"{found.perplexity:.3f}",
        "change": f"{change:+.2%}",
    }


def table(results: Sequence[Result]) -> str:
    """Everything that the terminal shows."""
    rows = [
        {"format": result.format.name, "tokens": str(context), **columns(found)}
        for result in results
        for context, found in result.contexts.items()
    ]
    reference = next(iter(results[0].contexts.values())).reference_perplexity
    lines = [f"reference perplexity {reference:.3f} at {next(iter(results[0].contexts))} tokens", "", *_aligned(rows)]
    for result in results:
        lines += ["", f"{result.format.name}: where the error enters (SQNR in dB, worst first)"]
        for level, says in LEVELS.items():
            values = getattr(result, level)
            if values:
                lines.append(f"  {says}: median {_middle(values.values()):.1f} dB of {len(values)}")
                lines += [f"    {ratio:6.1f}  {name}" for name, ratio in worst(values)[:WORST]]
    return "\n".join(lines)


def worst(values: dict[str, float]) -> list[tuple[str, float]]:
    """Modules from the lowest SQNR to the highest; NaN first."""
    return sorted(values.items(), key=lambda item: -math.inf if math.isnan(item[1]) else item[1])


def to_json(results: Sequence[Result], about: dict) -> str:
    """JSON with all numbers; infinite and NaN ones as null."""
    rows = [
        {
            "kv": result.format.kv,
            "act": result.format.act,
            "contexts": {str(context): asdict(found) for context, found in result.contexts.items()},
            **{level: getattr(result, level) for level in LEVELS},
        }
        for result in results
    ]
    return json.dumps(_plain({**about, "results": rows}), indent=1) + "\n"


def to_html(results: Sequence[Result], about: dict) -> str:
    """One page, with nothing to load: the table, and for each level a plot of SQNR over the modules."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>superl8 diagnose</title>",
        "<style>body{font:15px sans-serif;max-width:900px;margin:2em auto}pre{overflow-x:auto}"
        "svg text{font:11px sans-serif;fill:#444}</style>",
        f"<h1>superl8 diagnose</h1><p>{html.escape(', '.join(f'{key} {value}' for key, value in about.items()))}</p>",
        f"<pre>{html.escape(table(results))}</pre>",
    ]
    for level, says in LEVELS.items():
        series = {result.format.name: getattr(result, level) for result in results if getattr(result, level)}
        if series:
            parts.append(f"<h2>{html.escape(says)}</h2>{_plot(series)}")
    return "\n".join(parts) + "\n"


def _plot(series: dict[str, dict[str, float]]) -> str:
    """SQNR over modules in the order of the model, a line a format; the pointer shows names."""
    finite = [value for values in series.values() for value in values.values() if math.isfinite(value)]
    top, bottom = max(finite, default=1.0), min([*finite, 0.0])
    top += (top == bottom) + 0.05 * (top - bottom)
    height = lambda value: HEIGHT - MARGIN - (value - bottom) / (top - bottom) * (HEIGHT - 2 * MARGIN)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for step in range(5):
        value = bottom + (top - bottom) * step / 4
        y = height(value)
        parts.append(
            f'<path d="M{MARGIN} {y:.1f}H{WIDTH}" stroke="#ddd"/><text x="4" y="{y + 4:.1f}">{value:.0f} dB</text>'
        )
    for index, (name, values) in enumerate(series.items()):
        colour, count = COLOURS[index % len(COLOURS)], max(1, len(values) - 1)
        points = []
        for number, (module, value) in enumerate(values.items()):
            if math.isfinite(value):
                x, y = MARGIN + 8 + number / count * (WIDTH - MARGIN - 20), height(value)
                points.append(f"{x:.1f},{y:.1f}")
                tip = html.escape(f"{module}: {value:.1f} dB ({name})")
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{tip}</title></circle>')
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-opacity=".5"/>')
        parts.append(f'<text x="{MARGIN + 8 + 190 * index}" y="14" style="fill:{colour}">{html.escape(name)}</text>')
    first, last = (re.sub(r"^.*?layers\.", "layers.", name) for name in (next(iter(values)), next(reversed(values))))
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 8}">{html.escape(first)}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(last)}</text></svg>')
    return "".join(parts)


def _aligned(rows: list[dict[str, str]]) -> list[str]:
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]


def _middle(values) -> float:
    ordered = sorted(values, key=lambda value: -math.inf if math.isnan(value) else value)
    return ordered[len(ordered) // 2]


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
