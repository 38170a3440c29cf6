"""Numbers to inline SVG: lines, interval strips, stacked bars. Pure functions of their arguments.

Colours are CSS variables of the page (`--c1` … `--c8`, `--ink`, `--line`), so that one drawing serves light
and dark. Every mark carries a `<title>`, which browsers show as a tooltip without any script. Widths are in
the units of the `viewBox`: the page scales a drawing to its column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Point = tuple[float, float]
WIDTH = 720.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 10.0, 24.0
LABEL = 14.0
"""Height of a label under the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined in order; `intervals` (low, high) are drawn as whiskers, `dots` as circles."""

    name: str
    colour: str
    points: Sequence[Point]
    intervals: Sequence[Point] = ()
    dots: bool = False
    faint: bool = False


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten.

    Worked example: 0 to 1 gives 0, 0.2, 0.4, 0.6, 0.8, 1.
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= about + 1e-9)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis: `0.2`, `12k`, `3.1e-05`."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def lines(
    series: Sequence[Line],
    *,
    height: float = 260.0,
    width: float = WIDTH,
    bounds: Point | None = None,
    x_label: str = "",
    percent: bool = False,
    title: str = "",
) -> Markup:
    """A line chart with axes. Points that are not finite are left out."""
    kept = [(line, [p for p in line.points if math.isfinite(p[1])]) for line in series]
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    if not xs:
        return Markup('<p class="none">Nothing was measured.</p>')
    low, high = bounds or _bounds(ys)
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    bottom = BOTTOM + (LABEL if x_label else 0.0)
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - bottom

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - left) / (right - left) * inner_w
        y = TOP + (1 - (min(max(point[1], low), high) - low) / (high - low)) * inner_h
        return round(x, 1), round(y, 1)

    parts = [_open(width, height, title)]
    for value in ticks(low, high, max(2, int(height // 50))):
        y = place((left, value))[1]
        text = f"{100 * value:g} %" if percent else short(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
    for value in ticks(min(xs), max(xs), max(2, int(width // 90))):
        if value == int(value):
            x = place((value, low))[0]
            parts.append(f'<text x="{x}" y="{height - bottom + 16}" text-anchor="middle">{int(value)}</text>')
    if x_label:
        parts.append(f'<text x="{width - RIGHT}" y="{height - 3}" text-anchor="end">{escape(x_label)}</text>')
    for line, points in kept:
        placed = [place(p) for p in points]
        stroke, fill = f'style="stroke:{line.colour}"', f'style="fill:{line.colour}"'
        if len(placed) > 1:
            path = " ".join(f"{x},{y}" for x, y in placed)
            parts.append(f'<polyline class="{"faint" if line.faint else "curve"}" points="{path}" {stroke}/>')
        for (x, _), (down, up) in zip(points, line.intervals, strict=False):
            (px, py), (_, qy) = place((x, down)), place((x, up))
            parts.append(f'<line class="whisker" x1="{px}" x2="{px}" y1="{py}" y2="{qy}" {stroke}/>')
        if line.dots or len(placed) == 1:
            for (x, y), (step, value) in zip(placed, points, strict=True):
                tip = f"{line.name}, {step:g}: {f'{100 * value:.1f} %' if percent else f'{value:.4g}'}"
                parts.append(f'<circle cx="{x}" cy="{y}" r="4" {fill}><title>{escape(tip)}</title></circle>')
    parts.append("</svg>")
    return Markup("".join(str(p) for p in parts))


def strip(rows: Sequence[tuple[str, float, float, float, str]], *, title: str = "") -> Markup:
    """Rates with their intervals on one scale from 0 to 100 %: rows of (label, value, low, high, colour)."""
    left, gap, width = 78.0, 34.0, WIDTH
    height = gap * len(rows) + 26.0

    def at(value: float) -> float:
        return round(left + value * (width - left - 24.0), 1)

    parts = [_open(width, height, title)]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{at(value)}" x2="{at(value)}" y1="4" y2="{height - 22}"/>')
        parts.append(f'<text x="{at(value)}" y="{height - 6}" text-anchor="middle">{100 * value:g} %</text>')
    for number, (label, value, low, high, colour) in enumerate(rows):
        y = gap * number + gap / 2 + 2
        tip = f"{label}: {100 * value:.1f} %, between {100 * low:.1f} % and {100 * high:.1f} %"
        parts.append(
            f'<text class="strong" x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
            f"<g><title>{escape(tip)}</title>"
            f'<line class="interval" x1="{at(low)}" x2="{at(high)}" y1="{y}" y2="{y}"'
            f' style="stroke:{colour}"/>'
            f'<circle cx="{at(value)}" cy="{y}" r="7" style="fill:{colour}"/></g>'
        )
    parts.append("</svg>")
    return Markup("".join(str(p) for p in parts))


def shares(
    counts: Mapping[str, float], colours: Mapping[str, str], *, title: str = "", unit: str = ""
) -> Markup:
    """One stacked bar over the whole width. Parts that are large enough say their share."""
    total = sum(counts.values())
    parts = [_open(WIDTH, 26.0, title)]
    x = 0.0
    for name, count in counts.items():
        if not count or not total:
            continue
        width = count / total * WIDTH
        tip = f"{name.replace('_', ' ')}: {count:g}{unit} ({100 * count / total:.1f} %)"
        shape = f'x="{x:.1f}" y="0" width="{max(0.5, width - 1.5):.1f}" height="26"'
        parts.append(f'<g><title>{escape(tip)}</title><rect {shape} style="fill:{colours[name]}"/>')
        if width > 52:
            parts.append(f'<text class="inside" x="{x + 7:.1f}" y="17.5">{100 * count / total:.0f} %</text>')
        parts.append("</g>")
        x += width
    parts.append("</svg>")
    return Markup("".join(str(p) for p in parts))


def pairs(
    rows: Sequence[tuple[str, float | None, float | None]], *, percent: bool = False, title: str = ""
) -> Markup:
    """Before and after, one above the other, for each row of (label, before, after). None: not measured."""
    left, bar, gap, width = 136.0, 12.0, 42.0, WIDTH
    height = gap * len(rows) + 4.0
    largest = (
        1.0 if percent else max((v for _, a, b in rows for v in (a, b) if v is not None), default=0.0) or 1.0
    )
    parts = [_open(width, height, title)]
    for number, (label, before, after) in enumerate(rows):
        y = gap * number + 6
        parts.append(
            f'<text class="strong" x="{left - 12}" y="{y + 16}" text-anchor="end">{escape(label)}</text>'
        )
        for offset, value, colour, when in (
            (0.0, before, "var(--before)", "before"),
            (bar + 2, after, "var(--after)", "after"),
        ):
            if value is None:
                continue
            wide = value / largest * (width - left - 70)
            text = f"{100 * value:.0f} %" if percent else f"{value:.2f}"
            shape = f'x="{left}" y="{y + offset}" rx="2" width="{max(1.0, wide):.1f}" height="{bar}"'
            parts.append(
                f"<g><title>{escape(f'{label}, {when}: {text}')}</title>"
                f'<rect {shape} style="fill:{colour}"/>'
                f'<text x="{left + max(1.0, wide) + 6:.1f}" y="{y + offset + 10}">{text}</text></g>'
            )
    parts.append("</svg>")
    return Markup("".join(str(p) for p in parts))


def _bounds(ys: Sequence[float]) -> Point:
    low, high = min(ys), max(ys)
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    if low >= 0 and low < 0.5 * high:
        return 0.0, high * 1.05
    pad = 0.06 * (high - low)
    return low - pad, high + pad


def _open(width: float, height: float, title: str) -> str:
    """Wide drawings get a class, so that the page can write larger in them on a phone."""
    kind = ' class="wide"' if width == WIDTH else ""
    return f'<svg{kind} viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
