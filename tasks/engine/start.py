"""The start of an engine in its process: vLLM, or one of the user's own."""

import sys

from storage.ownership.scratch import new_folder
from tasks.config.environment import use_first_runner
from tasks.data.models import folder_gives_values
from tasks.engine.own import OwnEngine
from tasks.engine.protocol import EngineProtocol, EngineSpec, ValuesProtocol
from trainer_core.user_code import UserFunction

_PARSER = "import os; own = os.dup(1); os.dup2(2, 1); from tasks.engine.vllm.parsing import serve; serve(own)"
PARSER = [sys.executable, "-P", "-c", _PARSER]
"""Command of the process that reads answers with vLLM's parsers, which log to standard output while imported."""


def start_engine(
    spec: EngineSpec, meeting_place: str | None, own: UserFunction | None
) -> EngineProtocol | ValuesProtocol:
    """Start an engine, of a classifier one that gives values. The processes of `spec.tensor` above 1 meet in
    `meeting_place`, an empty folder; where none is given, in one that is made here. `own` is the user's class; None is
    vLLM. Raises InputError: it cannot be started with this specification."""
    if own is not None:
        return OwnEngine.of(own, spec)
    if folder_gives_values(spec.model_dir):
        use_first_runner()
        from tasks.engine.vllm.classifier import Classifier

        return Classifier(spec)
    from tasks.engine.vllm.engine import Engine

    if meeting_place is None and spec.has_processes:
        meeting_place = str(new_folder())
    return Engine(spec, meeting_place)


def import_engine(own: bool) -> None:
    """Import what `start_engine` needs. That of the user's `own` engine stays: its file runs once in a process."""
    if not own:
        from tasks.engine.vllm.engine import imported

        imported()
