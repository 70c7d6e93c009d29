"""What a sender may do while others work. Imports without torch."""

from collections.abc import Callable

Meanwhile = Callable[[], object]


def idle() -> None:
    """Do nothing."""
