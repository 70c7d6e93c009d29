"""From what a reward function returns to numbers that can be stored."""

import math
from collections.abc import Mapping

from tasks.rewards.words import shown

LARGEST = (2 - 2**-23) * 2.0**127
"""Of float32, in which rewards are stored."""

_MOST, _LONGEST = 50, 64


class NoNumber(TypeError):
    """It is no number, and no table of numbers."""


class NotFinite(ValueError):
    """A number in it is not finite as float32."""


def measured(value: object, weights: Mapping[str, float]) -> tuple[float, dict[str, float] | None]:
    """The reward, and its components if `value` is a mapping: their sum, each with its weight or 1. Raises NoNumber,
    NotFinite: it cannot be used."""
    if not isinstance(value, Mapping):
        number = finite(value, "returned")
        if weights:
            raise NoNumber(f"returned {shown(value)}, but weights need a mapping of named components")
        return number, None
    components = {_name(name): finite(one, f"component {name!r} is") for name, one in value.items()}
    if not components or len(components) > _MOST:
        raise NoNumber(f"returned a mapping of {len(components)} components; 1 to {_MOST} are possible")
    if missing := sorted(weights.keys() - components.keys()):
        raise NoNumber(f"returned {', '.join(components)}, but there is a weight for {', '.join(missing)}")
    return weighted({name: (one, weights.get(name, 1.0)) for name, one in components.items()}), components


def weighted(parts: Mapping[str, tuple[float, float]]) -> float:
    """Sum of value times weight, by name. Raises NotFinite: it is not finite as float32."""
    return finite(sum(value * weight for value, weight in parts.values()), f"the sum of {', '.join(parts)} is")


def finite(value: object, what: str) -> float:
    """`value` as a number that the reward table can hold: also a truth value or a NumPy scalar. Raises NoNumber,
    NotFinite: it is none."""
    found = f"{what} {shown(value)}"
    if isinstance(value, str | bytes | bytearray):
        raise NoNumber(f"{found}, which is not a number")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - raises for anything that is not a number
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise NoNumber(f"{found}, which is not a number ({error})") from None
    if not abs(number) <= LARGEST:
        raise NotFinite(f"{found}, which is not finite as float32")
    return number


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST:
        raise NoNumber(f"returned a component {shown(name)}: a name is a text of 1 to {_LONGEST} characters")
    return name
