"""The lines of a run's progress in its flow run's log, where there is no terminal."""

import io

from prefect import get_run_logger
from rich.console import Console

_WIDTH = 400


class LogLines(io.TextIOBase):
    """A text stream whose lines go to the log of the current flow run."""

    def __init__(self) -> None:
        self._logger = get_run_logger()
        self._begun = ""

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line)
        return len(text)


def log_console() -> Console:
    """A console that is no terminal: nothing live is drawn."""
    return Console(file=LogLines(), force_terminal=False, color_system=None, width=_WIDTH)  # pyright: ignore[reportArgumentType]
