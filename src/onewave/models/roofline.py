"""The roofline of a GPU with a profile's parts, as SVG."""

import math
from collections.abc import Sequence
from html import escape

from onewave.base.gpus import GPU
from onewave.models.profile import Part
from onewave.tiles.sim.pictures import COLOURS, WIDTH, Picture, head, words

HEIGHT, LEFT, _BELOW = 420, 64, 44
ON_WHITE = "background:#fff;color:#222"


def roofline(gpu: GPU, points: Sequence[tuple[Part, float]]) -> Picture:
    """Draw a GPU's ceilings, and each part at its intensity and the FLOP/s of its time, both axes logarithmic.

    points: parts with their seconds; those without FLOPs or bytes are left out.
    """
    shown = [(part, seconds) for part, seconds in points if part.flops and part.memory_bytes and seconds > 0]
    low, high = -1.0, 4.0
    floor, top = 9.0, math.log10(gpu.tflops * 1e12) + 0.3

    def x(intensity: float) -> float:
        return LEFT + (math.log10(intensity) - low) / (high - low) * (WIDTH - LEFT - 16)

    def y(rate: float) -> float:
        return HEIGHT - _BELOW - (math.log10(rate) - floor) / (top - floor) * (HEIGHT - _BELOW - 16)

    ridge = gpu.tflops * 1e3 / gpu.bandwidth
    roof = [(10**low, gpu.bandwidth * 1e9 * 10**low), (ridge, gpu.tflops * 1e12), (10**high, gpu.tflops * 1e12)]
    out = [head(WIDTH, HEIGHT, f"roofline of {gpu.name}", style=ON_WHITE)]
    for power in range(int(low), int(high) + 1):
        out.append(words(x(10**power), HEIGHT - _BELOW + 16, f"{10.0**power:g}", anchor="middle"))
    for power in range(int(floor), int(top) + 1):
        out.append(words(LEFT - 6, y(10**power) + 4, f"{10.0 ** (power - 12):g}", anchor="end"))
    out.append(words((WIDTH + LEFT) / 2, HEIGHT - 6, "FLOPs a byte of device memory", anchor="middle"))
    out.append(words(LEFT, 12, f"TFLOP/s; {gpu.name}: {gpu.tflops:g} TFLOP/s, {gpu.bandwidth:,} GB/s"))
    line = " ".join(f"{x(at):.1f},{y(rate):.1f}" for at, rate in roof)
    out.append(f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>')
    names = list(dict.fromkeys(part.name for part, _ in shown))
    for part, seconds in shown:
        at = min(max(part.intensity, 10**low), 10**high)
        rate = max(part.flops / seconds, 10**floor)
        colour = COLOURS[names.index(part.name) % len(COLOURS)]
        shape = 4 if part.phase == "prefill" else 6
        label = escape(f"{part.phase} {part.name}, {part.rows} rows: {part.flops / seconds * 1e-12:,.1f} TFLOP/s")
        out.append(f'<circle cx="{x(at):.1f}" cy="{y(rate):.1f}" r="{shape}" fill="{colour}" fill-opacity="0.8">')
        out.append(f"<title>{label}</title></circle>")
    for number, name in enumerate(names):
        across = LEFT + 12 + number * 82
        out.append(f'<circle cx="{across}" cy="28" r="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        out.append(words(across + 8, 32, name))
    return Picture("".join([*out, "</svg>"]))
