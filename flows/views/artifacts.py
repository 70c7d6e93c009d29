"""What the Prefect flow run shows about a run: a table of its iterations, a summary and the curves."""

import contextvars
import re
from collections.abc import Callable, Sequence

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from flows.views.curves import data_uri
from flows.views.history import IterationRecord
from flows.views.samples import Samples
from flows.views.status import RunStatus

_FIGURES = ("reward", "accuracy", "kl", "entropy", "grad_norm", "tokens_per_second", "seconds")
_LONGEST = 2000  # characters of a text in a table
_TITLES = {"kl": "KL before||after"}


def publish(status: RunStatus, png: bytes) -> None:
    """Attach the artifacts to the current flow run."""
    create_table_artifact(
        key=artifact_key(status.run, "iterations"),
        table=iteration_table(status.history),
        description=f"Iterations of run {status.run}",
    )
    create_markdown_artifact(
        key=artifact_key(status.run, "summary"), markdown=summary(status), description=f"Summary of run {status.run}"
    )
    create_image_artifact(
        key=artifact_key(status.run, "curves"), image_url=data_uri(png), description=f"Curves of run {status.run}"
    )


def examples_publisher() -> Callable[[Samples], None]:
    """Shows examples of an iteration on the current flow run; may be called in another thread."""
    context = contextvars.copy_context()  # Prefect finds the flow run in it
    return lambda found: context.run(publish_examples, found)


def publish_examples(found: Samples) -> None:
    """Attach a table of samples to the current flow run; each iteration makes a new version of it."""
    create_table_artifact(
        key=artifact_key(found.run, "samples"),
        table=example_table(found),
        description=f"Best and worst samples of iteration {found.iteration} of run {found.run}",
    )


def example_table(found: Samples) -> list[dict[str, str | float | int | None]]:
    """One row per sample; long texts are cut."""
    return [
        {
            "iteration": found.iteration,
            "sample": f"{one.prompt_id}/{one.sample_id}",
            "prompt": _cut(one.prompt),
            "response": _cut(one.response),
            "reward": one.reward,
            "components": ", ".join(f"{name} {value}" for name, value in (one.components or {}).items()),
            "status": one.status,
            "advantage": one.advantage,
            "finish reason": one.finish_reason,
            "weight version": one.weight_version,
        }
        for one in found.samples
    ]


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def artifact_key(run: str, name: str) -> str:
    """A key that Prefect accepts: lowercase letters, digits and dashes."""
    return f"ratchet-{re.sub('[^a-z0-9]+', '-', run).strip('-')}-{name}"


def iteration_table(history: Sequence[IterationRecord]) -> list[dict[str, float | int | None]]:
    """One row per iteration."""
    return [
        {"iteration": record.iteration, **{_TITLES.get(name, name): _rounded(record, name) for name in _FIGURES}}
        for record in history
    ]


def summary(status: RunStatus) -> str:
    """Markdown with the first and last figures and where everything is stored."""
    rows = [
        ("iterations", str(status.iterations)),
        ("mean reward", _change(status.first_reward, status.last_reward)),
        ("held-out pass rate", _change(status.first_accuracy, status.last_accuracy)),
        ("seconds per iteration (median)", _number(status.seconds_per_iteration)),
        ("stored in", f"`{status.root}/{status.run}`"),
        ("plot", f"`{status.report}`"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    warnings = [line for text in status.warnings for line in ("", f"**Warning:** {text}")]
    return "\n".join([f"## Run {status.run}", "", "| | |", "|---|---|", *lines, *warnings])


def _rounded(record: IterationRecord, name: str) -> float | None:
    value = record.model_dump()[name]
    return None if value is None else round(value, 6)


def _change(first: float | None, last: float | None) -> str:
    return f"{_number(first)} -> {_number(last)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
