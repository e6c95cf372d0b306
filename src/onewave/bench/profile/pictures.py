"""Where thread blocks of a launch ran, and when, as SVG."""

from onewave.bench.profile.dispatch_impl import Dispatch
from onewave.models.roofline import LEFT, ON_WHITE
from onewave.tiles.sim.pictures import COLOURS, WIDTH, Picture, head, words


def dispatch_picture(found: Dispatch) -> Picture:
    """Draw which thread block ran on which SM, and when: a row an SM, a bar a block, its number inside."""
    sms = max(found.sm) + 1
    height, longest = max(3.0, min(12.0, 1400 / sms)), max(max(found.end), 1)
    out = [head(WIDTH, height * sms + 40, f"{len(found.sm)} thread blocks on {sms} SMs", style=ON_WHITE)]
    out.append(words(LEFT, 12, f"SM by time; {len(found.sm)} blocks, clusters of {found.cluster}"))
    for block, (sm, begin, end) in enumerate(zip(found.sm, found.begin, found.end, strict=True)):
        across = LEFT + begin / longest * (WIDTH - LEFT - 16)
        wide = max(1.0, (end - begin) / longest * (WIDTH - LEFT - 16) - 1)
        colour = COLOURS[block // found.cluster % len(COLOURS)]
        out.append(f'<rect x="{across:.1f}" y="{20 + sm * height:.1f}" width="{wide:.1f}" height="{height - 0.5:.1f}"')
        out.append(f' fill="{colour}"><title>block {block} on SM {sm}: {begin} to {end} ns</title></rect>')
    return Picture("".join([*out, "</svg>"]))
