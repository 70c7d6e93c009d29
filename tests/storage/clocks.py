"""Time that tests move by hand, and processes of other machines."""

from datetime import UTC, datetime, timedelta

from storage.ownership.process import Clock, Owner

START = datetime(2026, 1, 1, tzinfo=UTC)


class Time:
    """Seconds since the start, shared by all clocks made from it, whose wall times may be skewed."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self, skew: float = 0) -> Clock:
        return Clock(lambda: START + timedelta(seconds=self.now + skew), lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def elsewhere(name: str) -> Owner:
    """A process that this machine cannot know to be alive or dead."""
    return Owner(name=name, host="elsewhere", process=7, place="another boot", birth="1")
