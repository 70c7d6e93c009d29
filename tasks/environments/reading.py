"""Readers of answers by the family of a model: the tags that are built in, and vLLM's parsers."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Self

from storage.errors import InputError, WorkerLost
from tasks.config.reward import EnvironmentSection
from tasks.data.values import is_encodable
from tasks.engine.start import PARSER
from tasks.environments.calls import TAGS, Parts, Reader, by_tags


@contextmanager
def reading(section: EnvironmentSection, model_dir: Path) -> Iterator[Reader]:
    """The reader that `[environment]` names. Raises InputError: vLLM has no such parser."""
    if section.tool_parser == TAGS:
        yield by_tags
        return
    with ForeignReader(str(model_dir), section.tool_parser, section.reasoning_parser) as reader:
        yield reader


class ForeignReader:
    """vLLM's parsers, by name, in a process of their own: their import takes seconds and a gigabyte."""

    def __init__(self, model_dir: str, tools: str, reasoning: str) -> None:
        """Raises InputError: one is not known."""
        self._lock = threading.Lock()
        self._process = Popen([*PARSER, model_dir, tools, reasoning], stdin=PIPE, stdout=PIPE, text=True)
        if "flaw" in (said := self._said()):
            self.close()
            raise InputError(said["flaw"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, text: str, tools: Sequence[Any]) -> Parts:
        """Raises WorkerLost: the process has ended."""
        with self._lock:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: there is no answer
                self._process.stdin.write(f"{json.dumps([text, list(tools)])}\n")
                self._process.stdin.flush()
            said = self._said()
        if not is_encodable(json.dumps(said, ensure_ascii=False)):
            return Parts(text)
        return Parts(said["content"], said["reasoning"], tuple((name, given) for name, given in said["calls"]))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise WorkerLost("the process of vLLM's parsers has ended; the next attempt starts a new one")
        return json.loads(line)
