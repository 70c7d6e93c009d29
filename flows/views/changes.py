"""From which value to which a figure of a run went, as far as its values can be compared."""

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from flows.views.history import IterationRecord
from flows.views.table import EVALUATED_BY
from tasks.config.evaluation import EXACT, PASS, SCORED_BY


class Change(BaseModel):
    """The first and the last value that one reward, and one way of asking, have given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: float | None = None
    last: float | None = None
    since: int | None = None
    """Iteration of `first`."""
    apart: bool = False
    """Whether there are earlier values that another reward, or another way of asking, has given."""


class Changes(BaseModel):
    """The figures of a run that are compared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: Change
    """Mean reward of the samples."""
    held_out_reward: Change
    """Mean reward of greedy answers to held-out prompts."""
    pass_rate: Change
    """Share of these answers that pass."""
    passing: str | None
    """The condition by which they pass."""


def changes_of(records: Sequence[IterationRecord]) -> Changes:
    """The changes over records in their order, which need not be those of all iterations."""
    evaluated = [one for one in records if one.held_out_reward is not None]
    passing = evaluated[-1].passing if evaluated else None
    unknown = passing is None or _by_chance(evaluated)
    return Changes(
        reward=_change(records, lambda one: one.reward, SCORED_BY),
        held_out_reward=_change(evaluated, lambda one: one.held_out_reward, EVALUATED_BY),
        pass_rate=Change() if unknown else _change(evaluated, lambda one: one.pass_rate, EVALUATED_BY, PASS),
        passing=passing,
    )


def judged_by(record: IterationRecord, by: Sequence[str]) -> list[str | None]:
    """What values of a record may be compared with, by columns of text: equal for those that may."""
    return [record.row.texts.get(name) for name in by]


def apart_lines(changes: Changes) -> list[str]:
    """What is not compared, a sentence each."""
    named = {"mean reward": changes.reward, "held-out evaluation": changes.held_out_reward}
    return [
        f"{name}: earlier values than that of iteration {change.since} are of another reward function, or of other "
        "prompts; they are not compared"
        for name, change in named.items()
        if change.apart
    ]


def _change(records: Sequence[IterationRecord], value: Callable[[IterationRecord], float | None], *by: str) -> Change:
    there = [(one, found) for one in records if (found := value(one)) is not None]
    if not there:
        return Change()
    keys = [judged_by(one, by) for one, _ in there]
    first, last = there[keys.index(keys[-1])], there[-1]
    return Change(first=first[1], last=last[1], since=first[0].iteration, apart=first is not there[0])


def _by_chance(evaluated: Sequence[IterationRecord]) -> bool:
    """Whether rewards that can be others than 0 and 1 were only these once: then it is not known which answers pass."""
    by = [judged_by(one, (EVALUATED_BY,)) for one in evaluated]
    return {one.passing for one, key in zip(evaluated, by, strict=True) if key == by[-1]} >= {None, EXACT}
