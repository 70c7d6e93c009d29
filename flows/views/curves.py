"""The plot of a run, from its history alone."""

import base64
import io
import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flows.views.history import PLOT
from flows.views.table import EVALUATED_BY, Row
from storage import layout
from storage.backends.root import Root
from tasks.config.evaluation import EXACT, PASS, SCORED_BY

_SIZE = (9.0, 9.0)  # inches
_DPI = 100
PIXELS = (int(_SIZE[0] * _DPI), int(_SIZE[1] * _DPI))

_REWARD, _HELD_OUT, _PASSED = "tab:blue", "tab:olive", "tab:green"
_PLAIN, _SECOND = "tab:gray", "tab:orange"

_HEIGHTS = (2, 1, 1)


def draw_curves(rows: Sequence[Row], title: str) -> bytes:
    """PNG of PIXELS: rewards and held-out pass rate; KL divergence; entropy and gradient norm, if they are measured.

    Values that another reward function, or another way of asking, has given are apart: a line ends before them."""
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = [_rewards, *(draw for draw, column in _BELOW if any(column in row.values for row in rows))]
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=_HEIGHTS[: len(panels)])[:, 0]
    for axes, draw in zip(drawn, panels, strict=True):
        axes.grid(visible=True, alpha=0.3)
        draw(axes, rows)
    drawn[-1].set_xlabel("iteration")
    drawn[-1].xaxis.get_major_locator().set_params(integer=True)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def store_plot(root: Root, run: str, rows: Sequence[Row]) -> bytes:
    png = draw_curves(rows, f"run {run}")
    root.replace(layout.report_key(run, PLOT), png)
    return png


def data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _rewards(axes: Axes, rows: Sequence[Row]) -> None:
    passing = {row.texts[PASS] for row in rows if PASS in row.texts}
    _curve(axes, rows, "reward/reward_mean", "mean reward of the samples", _REWARD, SCORED_BY)
    if passing != {EXACT}:  # else it is the pass rate
        _curve(axes, rows, "evaluate/reward_mean", "mean reward on held-out prompts", _HELD_OUT, EVALUATED_BY)
    condition = f" ({', '.join(sorted(passing))})" if passing - {EXACT} else ""
    _curve(axes, rows, "evaluate/pass_rate", f"pass rate on held-out prompts{condition}", _PASSED, EVALUATED_BY, PASS)
    for number, (iteration, change) in enumerate(changes_of_reward(rows)):
        axes.axvline(iteration, color=_PLAIN, linestyle=":", label=None if number else f"{change}: not comparable")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    axes.set_ylabel("reward, pass rate" if passing else "reward")


def _divergence(axes: Axes, rows: Sequence[Row]) -> None:
    _curve(axes, rows, "train/kl", "KL", _PLAIN)
    axes.set_ylabel("KL before||after [nat/token]")


def _entropy(axes: Axes, rows: Sequence[Row]) -> None:
    _curve(axes, rows, "train/entropy", "entropy", _REWARD)
    axes.set_ylabel("entropy [nat/token]", color=_REWARD)
    norm = axes.twinx()
    _curve(norm, [row for row in rows if row.iteration], "train/grad_norm", "norm", _SECOND)
    norm.set_ylabel("gradient norm", color=_SECOND)


_BELOW = ((_divergence, "train/kl"), (_entropy, "train/entropy"))


def pieces(rows: Sequence[Row], column: str, *by: str) -> list[list[tuple[int, float]]]:
    """The points (iteration, value) of a column, in a list for each stretch of rows that are equal in the texts of
    `by`: values of two stretches cannot be compared."""
    there = [row for row in rows if column in row.values]
    groups = itertools.groupby(there, key=lambda row: [row.texts.get(name) for name in by])
    return [[(row.iteration, row.values[column]) for row in group] for _, group in groups]


def changes_of_reward(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """The iterations from which on values are not comparable with those before, and why."""
    found: dict[int, str] = {}
    for names, what in (((SCORED_BY,), "another reward function"), ((EVALUATED_BY, PASS), "another evaluation")):
        column = "reward/reward_mean" if SCORED_BY in names else "evaluate/reward_mean"
        for piece in pieces(rows, column, *names)[1:]:
            found.setdefault(piece[0][0], what)
    return sorted(found.items())


def _curve(axes: Axes, rows: Sequence[Row], column: str, label: str, color: str, *by: str) -> None:
    for number, piece in enumerate(pieces(rows, column, *by)):
        x, y = zip(*piece, strict=True)
        axes.plot(x, y, marker=".", label=None if number else label, color=color)
