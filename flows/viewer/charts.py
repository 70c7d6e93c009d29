"""Charts as the places of their marks, which a template draws as SVG, with the same in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flows.views.curves import pieces
from flows.views.table import Row, compared_by

WIDTH, HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 8, 24  # room for the numbers of the axes
_DOTS = 150  # points of a line up to which each is a link
_BINS = 20
_TICKS = 4

Series = Mapping[str, Sequence[Row]]  # the rows of each run, by its name


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    run: str
    iteration: int
    value: float


@dataclass(frozen=True)
class Line:
    run: str
    number: int  # place among the runs, by which it has a colour and dashes
    paths: tuple[str, ...]  # points of each polyline; a line ends where values are not comparable
    dots: tuple[Dot, ...]
    words: str  # description of its course


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, str], ...]  # height and number of each line of the grid
    steps: tuple[tuple[float, str], ...]  # place and number of iterations on the axis


@dataclass(frozen=True)
class Bar:
    x: float
    width: float
    y: float
    height: float
    span: str
    count: int


@dataclass(frozen=True)
class Histogram:
    title: str
    bars: tuple[Bar, ...]
    words: str


def number(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else f"{value:.4g}"


def line_chart(column: str, series: Series) -> Chart | None:
    """The values of a column; None if no run has any."""
    found = {run: pieces(rows, column, *compared_by(column)) for run, rows in series.items()}
    points = [point for every in found.values() for piece in every for point in piece]
    if not points:
        return None
    across = _scale([x for x, _ in points], _LEFT, WIDTH - _RIGHT)
    up = _scale([y for _, y in points], HEIGHT - _BOTTOM, _TOP)
    lines = tuple(_line(run, place, every, across, up) for place, (run, every) in enumerate(found.items()) if every)
    ticks = tuple((up(value), number(value)) for value in np.linspace(*up.span, _TICKS).tolist())
    steps = sorted({round(x) for x in np.linspace(*across.span, 6).tolist()})
    return Chart(column, lines, ticks, tuple((across(x), str(x)) for x in steps))


@dataclass(frozen=True)
class _Scale:
    span: tuple[float, float]
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        low, high = self.span
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)


def _scale(values: Sequence[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    return _Scale((low, high) if high > low else (low - 0.5, high + 0.5), begin, end)


def _line(run: str, place: int, every: Sequence[Sequence[tuple[int, float]]], across: _Scale, up: _Scale) -> Line:
    paths = tuple(" ".join(f"{across(x)},{up(y)}" for x, y in piece) for piece in every)
    points = [point for piece in every for point in piece]
    dots = tuple(Dot(across(x), up(y), run, x, y) for x, y in points) if len(points) <= _DOTS else ()
    (first, began), (last, ended) = points[0], points[-1]
    least, most = (pick(points, key=lambda point: point[1]) for pick in (min, max))
    course = f"{number(began)} at iteration {first}"
    if len(points) > 1:
        extremes = f"lowest {number(least[1])} at {least[0]}, highest {number(most[1])} at {most[0]}"
        course = f"{course}, {number(ended)} at {last}; {extremes}"
    return Line(run, place, paths, dots, course)


def histogram(title: str, values: NDArray[np.number]) -> Histogram | None:
    """The distribution of (N,) values; those that are not finite are left out. None if there is no other."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return None
    counts, edges = np.histogram(finite, bins=_bins(finite))
    tallest, slot = max(int(counts.max()), 1), (WIDTH - _LEFT - _RIGHT) / len(counts)
    room = HEIGHT - _TOP - _BOTTOM
    bars = tuple(
        Bar(
            round(_LEFT + place * slot + 1, 1),
            round(slot - 2, 1),
            round(HEIGHT - _BOTTOM - count / tallest * room, 1),
            round(count / tallest * room, 1),
            _span(float(edges[place]), float(edges[place + 1])),
            int(count),
        )
        for place, count in enumerate(counts)
    )
    words = f"{len(finite)} samples, mean {number(float(finite.mean()))}, from {number(float(finite.min()))} to "
    return Histogram(title, bars, f"{words}{number(float(finite.max()))}, median {number(float(np.median(finite)))}")


def _bins(values: NDArray[np.float64]) -> NDArray[np.float64] | int:
    """The edges of a bin for each whole number, if there is nothing else and few of them."""
    low, high = values.min(), values.max()
    return np.arange(low, high + 2) - 0.5 if high - low < _BINS and np.all(values == np.round(values)) else _BINS


def _span(low: float, high: float) -> str:
    middle = (low + high) / 2
    return number(middle) if high - low == 1 and middle == round(middle) else f"{number(low)} to {number(high)}"
