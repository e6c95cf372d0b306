"""A picture of a load's latencies: the share of samples up to each time, a panel a metric, a line a level."""

import math
from collections.abc import Sequence
from html import escape

from onewave.bench.serve.load import LevelResult, percentile

_PANELS = (("ttft", "time to first token"), ("inter_token", "between tokens"), ("end_to_end", "whole answer"))
_COLORS = ("#3b6fb6", "#c0562f", "#4c8c4a", "#8a5aa8", "#a8862a", "#3f8f95", "#b0487e", "#6b6b6b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 220, 52, 56, 40
_POINTS = 200


def picture(results: Sequence[LevelResult], title: str) -> str:
    """An SVG; the axis of times is logarithmic."""
    width, height = _LEFT + len(_PANELS) * (_WIDTH + _GAP), _TOP + _HEIGHT + 64
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg {style} viewBox="0 0 {width} {height}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for at, (metric, name) in enumerate(_PANELS):
        samples = [sorted(result.samples()[metric]) for result in results]
        parts += [f'<g transform="translate({_LEFT + at * (_WIDTH + _GAP)} {_TOP})">', *_panel(name, samples), "</g>"]
    x = _LEFT
    for index, result in enumerate(results):
        parts.append(f'<rect x="{x}" y="{height - 22}" width="14" height="4" fill="{_COLORS[index % len(_COLORS)]}"/>')
        parts.append(f'<text x="{x + 18}" y="{height - 15}">{escape(result.level.name)}</text>')
        x += 34 + 7 * len(result.level.name)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, lines: Sequence[list[float]]) -> list[str]:
    """Axes and a line for each list of milliseconds, all in order."""
    known = [samples for samples in lines if samples]
    low = min((samples[0] for samples in known), default=1.0)
    high = max((samples[-1] for samples in known), default=10.0)
    first, last = math.floor(math.log10(max(low, 1e-3))), math.ceil(math.log10(max(high, 1e-2)))
    last = max(last, first + 1)

    def x_of(ms: float) -> float:
        return _WIDTH * (math.log10(max(ms, 10**first)) - first) / (last - first)

    parts = [f'<text x="0" y="-8">{name}, ms</text>']
    for power in range(first, last + 1):
        x = x_of(10**power)
        parts.append(f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for percent in (0, 50, 90, 100):
        y = _HEIGHT * (1 - percent / 100)
        parts.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    for index, samples in enumerate(lines):
        if samples:
            steps = [100 * step / _POINTS for step in range(_POINTS + 1)]
            points = " ".join(f"{x_of(percentile(samples, p)):.1f},{_HEIGHT * (1 - p / 100):.1f}" for p in steps)
            color = _COLORS[index % len(_COLORS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return parts
