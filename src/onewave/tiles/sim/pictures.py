"""Still pictures for notebooks: an order's path through its grid, a trace's timeline per worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
MAX_BARS = 6000
COLOURS = ("#4878a8", "#5a9e6f", "#c28a3c", "#8a6bb0", "#3f9aa5", "#b5627f", "#7d8a3e", "#6b6f76")
IDLE = "#d0463b"


@dataclass(frozen=True)
class Picture:
    """An SVG drawing. A notebook shows it; `svg` can be written to a file as it is."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg


@dataclass(frozen=True)
class Bar:
    """One task of a timeline. wait_start <= start <= end, in the trace's unit; lane: its worker's place."""

    lane: int
    wait_start: float
    start: float
    end: float
    label: str
    group: str


def order_picture(rows: int, cols: int, tiles: Sequence[tuple[int, int]], title: str) -> Picture:
    """Draw the path through a grid, from green to blue, with the first tile marked."""
    cell = max(4.0, min(48.0, WIDTH / max(cols, 1), 560 / max(rows, 1)))
    width, height = cell * cols, cell * rows
    parts = [head(width + 2, height + 26, f"order {title} on {rows} by {cols} tiles")]
    parts.append(words(1, 14, f"{title}: {rows} x {cols}", size=13))
    parts.append('<g transform="translate(1 22)">')
    lines = [f"M0 {cell * r:g}H{width:g}" for r in range(rows + 1)] + [
        f"M{cell * c:g} 0V{height:g}" for c in range(cols + 1)
    ]
    parts.append(f'<path d="{"".join(lines)}" stroke="#8888" stroke-width="0.5" fill="none"/>')
    points = [(cell * (c + 0.5), cell * (r + 0.5)) for r, c in tiles[: MAX_BARS * 4]]
    pieces = max(1, len(points) // 24)
    for start in range(0, max(len(points) - 1, 0), pieces):
        some = points[start : start + pieces + 1]
        hue = 130 + 100 * start / max(len(points), 1)
        path = "L".join(f"{x:g} {y:g}" for x, y in some)
        parts.append(
            f'<path d="M{path}" fill="none" stroke="hsl({hue:.0f} 55% 45%)" stroke-width="{max(1, cell / 14):g}"/>'
        )
    if points:
        parts.append(f'<circle cx="{points[0][0]:g}" cy="{points[0][1]:g}" r="{cell / 5:g}" fill="hsl(130 55% 40%)"/>')
    if cell >= 22:
        parts += [words(cell * c + 3, cell * (r + 1) - 3, str(at), size=cell / 4) for at, (r, c) in enumerate(tiles)]
    return Picture("".join([*parts, "</g></svg>"]))


def timeline_picture(bars: Sequence[Bar], lanes: Sequence[str], end: float, unit: str, title: str) -> Picture:
    """Draw one lane per worker: waiting in red, running in a colour per group. Very long traces are thinned out."""
    lane_height = max(3.0, min(18.0, 480 / max(len(lanes), 1)))
    left, scale = 46.0, (WIDTH - 46.0) / end if end > 0 else 0.0
    height = lane_height * len(lanes) + 46
    parts = [head(WIDTH, height, f"timeline of {title}"), words(1, 14, f"{title}: {end:,.0f} {unit}", size=13)]
    every = max(1, int(12 // lane_height))
    for place, lane in enumerate(lanes):
        if place % every == 0:
            parts.append(words(1, 22 + lane_height * (place + 0.8), lane, size=9))
    groups = {group: None for bar in bars for group in (bar.group,)}
    colour = {group: COLOURS[at % len(COLOURS)] for at, group in enumerate(groups)}
    shown = sorted(bars, key=lambda bar: bar.wait_start - bar.end)[:MAX_BARS]
    for bar in shown:
        y, tall = 22 + lane_height * bar.lane, lane_height * 0.9
        if bar.start > bar.wait_start:
            parts.append(_rect(left + bar.wait_start * scale, y, (bar.start - bar.wait_start) * scale, tall, IDLE))
        box = _rect(left + bar.start * scale, y, (bar.end - bar.start) * scale, tall, colour[bar.group])
        parts.append(f"{box[:-2]}><title>{escape(bar.label)}</title></rect>")
    x, y = left, height - 8
    for group in list(groups)[:8]:
        parts.append(_rect(x, y - 8, 8, 8, colour[group]))
        parts.append(words(x + 11, y, group or "run"))
        x += 24 + 6 * len(group or "run")
    parts.append(_rect(x, y - 8, 8, 8, IDLE))
    parts.append(words(x + 11, y, "wait"))
    if len(shown) < len(bars):
        parts.append(words(1, y, f"{len(shown)}/{len(bars)}", size=9))
    return Picture("".join([*parts, "</svg>"]))


def head(width: float, height: float, label: str, *, style: str = "") -> str:
    """Begin a picture. style: CSS of all of it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" style="{style}" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" font-family="sans-serif">'
    )


def words(x: float, y: float, text: str, *, size: float = 10, anchor: str = "start") -> str:
    """Write a text. anchor: which end of it is at x, or its middle."""
    style = f'font-size="{size:g}" text-anchor="{anchor}" fill="currentColor"'
    return f'<text x="{x:.5g}" y="{y:.5g}" {style}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}" fill="{fill}"/>'
