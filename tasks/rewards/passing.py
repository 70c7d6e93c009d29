"""Passing of answers: a condition over the reward and its components, which is not the mean reward."""

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage.errors import InputError
from storage.filters import Condition, parse_condition
from tasks.config.evaluation import EXACT
from tasks.config.reward import RewardSection
from tasks.rewards.resolve import find_reward
from tasks.rewards.sample import Score

_COMPONENTS = "components"
_SCHEMA = pa.schema([("reward", pa.float32()), (_COMPONENTS, pa.map_(pa.string(), pa.float32()))])
_ROW = "row"


def check_passing(section: RewardSection, given: str | None, key: str) -> None:
    """Refuse a condition that cannot be read, or that names a component which the reward cannot have; `key` is the
    setting or option that gives it. Raises InputError: with the place, or with the components there are."""
    if given is None:
        return
    named, known = _parsed(given, key).keys, None
    if section.functions:
        known = [part.name for part in section.functions]
    elif find_reward(section.function).version is not None:
        known = []
    if known is not None:
        _check_named(given, key, {name for name in named if name.partition("/")[0] not in known}, known)


def check_components(scores: Sequence[Score], given: str | None, key: str) -> None:
    """Refuse a condition with a component that none of some scores has. Raises InputError: with those there are."""
    there = {name for score in scores for name in score.components or ()}
    if given is not None and any(score.reward is not None for score in scores):
        _check_named(given, key, _parsed(given, key).keys - there, sorted(there))


def condition_of(table: pa.Table, section: RewardSection, given: str | None) -> str | None:
    """The condition by which the answers of a table pass: the given one, or EXACT if every score is 0 or 1. None if
    nothing says which answers pass: then there is a mean reward, and no pass rate."""
    if given is not None:
        return given
    graded = any(find_reward(part.function).traits.graded for part in section.parts)
    rewards = _rewards(table)
    return EXACT if len(rewards) and not graded and np.isin(rewards, (0.0, 1.0)).all() else None


def passing(table: pa.Table, condition: str, key: str = "evaluate.pass") -> NDArray[np.bool_]:
    """True for each answer that passes, (rows,): one with a score and with each component that is compared.
    Raises InputError: no answer that has a score has a component that the condition names."""
    parsed = _parsed(condition, key)
    there = {name for row in table[_COMPONENTS].to_pylist() for name, _ in row or ()}
    if len(_rewards(table)):
        _check_named(condition, key, parsed.keys - there, sorted(there))
    passes = np.zeros(table.num_rows, np.bool_)
    rows = pa.array(np.arange(table.num_rows))
    scored = table.select(_SCHEMA.names).append_column(_ROW, rows).filter(pc.field("reward").is_valid())
    passes[scored.filter(parsed.expression)[_ROW].to_numpy()] = True
    return passes


def _check_named(condition: str, key: str, missing: Collection[str], known: Sequence[str]) -> None:
    if missing:
        there = f"its components are {', '.join(known)}" if known else "it has no components: compare reward"
        raise InputError(
            f"{key} = {condition!r} names {' and '.join(sorted(missing))}, which the reward does not give; {there}. A "
            "name with other signs than letters, digits and _ is written as components.'NAME'"
        )


def _parsed(condition: str, key: str) -> Condition:
    try:
        return parse_condition(condition, _SCHEMA, _COMPONENTS)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None


def _rewards(table: pa.Table) -> NDArray[np.float64]:
    return table["reward"].drop_null().to_numpy().astype(np.float64)
