"""Check of a run's reward functions before anything expensive starts."""

import functools

from storage.errors import InputError
from tasks.config.reward import RewardFunction, RewardSection
from tasks.rewards.calling import NotCallable, parameters_of
from tasks.rewards.pool import Refused, Worker
from tasks.rewards.resolve import own_function, values_of
from tasks.rewards.scoring import order_of


def check_reward(section: RewardSection) -> None:
    """Refuse functions that cannot be used. What is not ours is imported in a process of its own, with a deadline.
    Raises InputError: naming the setting and the reason."""
    _checked(section.model_dump_json())


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _checked(document: str) -> None:
    section = RewardSection.model_validate_json(document)
    for part in section.parts:
        _check(section, part)


def _check(section: RewardSection, part: RewardFunction) -> None:
    order = order_of(section, part)
    try:
        if order.target.version is not None:
            parameters_of(own_function(order.target), values_of(part.arguments), part.batch)
        else:
            with Worker(order):
                return
    except (Refused, NotCallable) as reason:
        raise InputError(
            f"{part.key} {order.target.name!r} cannot be used: {reason}. Fix it, set its arguments, or name another one"
        ) from None
