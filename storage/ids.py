"""Names of things: runs and stages. Sort order is the order of work."""

import re
from enum import StrEnum

from storage.errors import InputError

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Stage(StrEnum):
    """A step of an iteration whose result is one manifest."""

    PREPARE = "prepare"
    """Iteration 0 only: model directory and datasets, as parts."""
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    """At iteration 0: the supervised warm-up, which makes the first state."""
    WEIGHT_SYNC = "weight-sync"
    EVALUATE = "evaluate"


def check_run_name(name: str) -> str:
    """Return `name` if it can be the id of a run.

    Raises:
        InputError: it is not 1 to 63 characters of a-z, 0-9, '.', '_' and '-', starting with a letter or digit.
    """
    if not _RUN_NAME.fullmatch(name):
        raise InputError(
            f"run name {name!r} cannot be used: give 1 to 63 characters of a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or a digit"
        )
    return name
