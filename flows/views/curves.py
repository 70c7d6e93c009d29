"""The plot of a run, from its history alone."""

import base64
import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flows.views.history import PLOT
from flows.views.table import Row
from storage import layout
from storage.backends.root import Root

_SIZE = (9.0, 9.0)  # inches
_DPI = 100
PIXELS = (int(_SIZE[0] * _DPI), int(_SIZE[1] * _DPI))
"""Width and height of the plot."""

_REWARD, _HELD_OUT, _PLAIN, _SECOND = "tab:blue", "tab:green", "tab:gray", "tab:orange"


def draw_curves(rows: Sequence[Row], title: str) -> bytes:
    """PNG of PIXELS: reward and held-out pass rate; KL divergence; entropy and gradient norm."""
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rewards, divergence, entropy = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    for axes in (rewards, divergence, entropy):
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(title)
    _curve(rewards, rows, "reward/reward_mean", "mean reward of the samples", _REWARD)
    _curve(rewards, rows, "evaluate/accuracy", "pass rate on held-out prompts", _HELD_OUT)
    rewards.legend(loc="best")
    rewards.set_ylabel("reward")
    _curve(divergence, rows, "train/kl", "KL", _PLAIN)
    divergence.set_ylabel("KL before||after [nat/token]")
    _curve(entropy, rows, "train/entropy", "entropy", _REWARD)
    entropy.set_ylabel("entropy [nat/token]", color=_REWARD)
    norm = entropy.twinx()
    _curve(norm, [row for row in rows if row.iteration], "train/grad_norm", "norm", _SECOND)
    norm.set_ylabel("gradient norm", color=_SECOND)
    entropy.set_xlabel("iteration")
    entropy.xaxis.get_major_locator().set_params(integer=True)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def store_plot(root: Root, run: str, rows: Sequence[Row]) -> bytes:
    """Draw the run and store the PNG with its derived files.

    Returns:
        The PNG.
    """
    png = draw_curves(rows, f"run {run}")
    root.replace(layout.report_key(run, PLOT), png)
    return png


def data_uri(png: bytes) -> str:
    """The PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _curve(axes: Axes, rows: Sequence[Row], column: str, label: str, color: str) -> None:
    points = [(row.iteration, row.values[column]) for row in rows if column in row.values]
    axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=label, color=color)
