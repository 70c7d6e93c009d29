"""Tools of tests."""

from pathlib import Path
from typing import Literal

from ratchet import ToolError, Tools


def area(width: int, height: int = 1, unit: Literal["m", "cm"] = "m") -> str:
    """Multiplies two sides.

    It is longer than that.

    Args:
        width: of the rectangle
        unit (str): of length
    """
    return f"{width * height} {unit}"


async def look_up(name: str) -> dict[str, int]:
    """Looks a number up."""
    if name == "broken":
        raise ConnectionError("the table is gone")
    if name != "Ann":
        raise ToolError(f"nobody is called {name}")
    return {"number": 7}


def sized(**given):
    return sorted(given)


SIZED = {"name": "sized", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [area, look_up, (SIZED, sized)]
UNTYPED = [sized]


class Logged(Tools):
    """Tools with a rule of their own for the last answer, and a file of what was called."""

    def __init__(self, log):
        self._log = Path(log)
        super().__init__([self.noted, look_up])

    def noted(self, what: str) -> str:
        """Notes something."""
        with self._log.open("a") as file:
            file.write(f"{what}\n")
        return what

    async def judge(self, answer):
        return float(len(answer))
