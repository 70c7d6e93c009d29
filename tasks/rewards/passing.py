"""Passing of answers: a condition over the reward and its components, which is not the mean reward."""

from collections.abc import Sequence

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
    """Refuse a condition that cannot be read, or that names a component which the reward cannot have.

    Args:
        key: the setting or option that gives it, for the message.

    Raises:
        InputError: with the place, or with the components there are.
    """
    if given is None:
        return
    named, known = _parsed(given, key).keys, _known(section)
    if known is not None and (missing := sorted(name for name in named if name.partition("/")[0] not in known)):
        raise InputError(_unknown(given, key, missing, known))


def check_components(scores: Sequence[Score], given: str | None, key: str) -> None:
    """Refuse a condition that names a component which none of some scores has. Raises InputError: with the components
    there are."""
    there = {name for score in scores for name in score.components or ()}
    if given is not None and any(score.reward is not None for score in scores):
        _check_named(given, key, _parsed(given, key).keys, there)


def condition_of(table: pa.Table, section: RewardSection, given: str | None) -> str | None:
    """The condition by which the answers of a table pass: the given one, or EXACT if every score is 0 or 1.

    Returns:
        None if nothing says which answers pass: then there is a mean reward, and no pass rate.
    """
    if given is not None:
        return given
    graded = any(find_reward(part.function).graded for part in section.parts)
    rewards = _rewards(table)
    return EXACT if len(rewards) and not graded and np.isin(rewards, (0.0, 1.0)).all() else None


def passing(table: pa.Table, condition: str, key: str = "evaluate.pass") -> NDArray[np.bool_]:
    """True for each answer that passes, (rows,): one with a score and with each component that is compared.
    Raises InputError: no answer that has a score has a component that the condition names."""
    parsed = _parsed(condition, key)
    there = {name for row in table[_COMPONENTS].to_pylist() for name, _ in row or ()}
    if len(_rewards(table)):
        _check_named(condition, key, parsed.keys, there)
    passes = np.zeros(table.num_rows, np.bool_)
    rows = pa.array(np.arange(table.num_rows))
    scored = table.select(_SCHEMA.names).append_column(_ROW, rows).filter(pc.field("reward").is_valid())
    passes[scored.filter(parsed.expression)[_ROW].to_numpy()] = True
    return passes


def _check_named(condition: str, key: str, named: frozenset[str], there: set[str]) -> None:
    if missing := sorted(named - there):
        raise InputError(_unknown(condition, key, missing, sorted(there)))


def _parsed(condition: str, key: str) -> Condition:
    try:
        return parse_condition(condition, _SCHEMA, _COMPONENTS)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None


def _known(section: RewardSection) -> list[str] | None:
    """The first parts of the components' names, as far as the configuration says them."""
    if section.functions:
        return [part.name for part in section.functions]
    return [] if find_reward(section.function).version is not None else None


def _unknown(condition: str, key: str, missing: Sequence[str], known: Sequence[str]) -> str:
    there = f"its components are {', '.join(known)}" if known else "it has no components: compare reward"
    return (
        f"{key} = {condition!r} names {' and '.join(missing)}, which the reward does not give; {there}. A name with "
        "other signs than letters, digits and _ is written as components.'NAME'"
    )


def _rewards(table: pa.Table) -> NDArray[np.float64]:
    return table["reward"].drop_null().to_numpy().astype(np.float64)
