"""A clean interpreter that has only imported the command line, and forks for each command it is given.

Commands are read from standard input and answered on standard output, one JSON object a line each.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

HEAVY = ("ray", "vllm", "megatron", "prefect")


def carry_out(arguments: list[str], folder: str, environment: dict[str, str]) -> dict[str, object]:
    """Carry out one command in a child of this process, in `folder`."""
    with tempfile.TemporaryDirectory() as place:
        said, result = Path(place) / "said", Path(place) / "result"
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            _child(arguments, folder, said, result)
        os.waitpid(child, 0)
        return {"said": said.read_text(), **json.loads(result.read_text())}


def _child(arguments: list[str], folder: str, said: Path, result: Path) -> None:
    from flows.cli.app import execute

    stream = os.open(said, os.O_CREAT | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(stream, number)
    os.chdir(folder)
    code: object = "the command did not return"
    try:
        code = execute(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        result.write_text(json.dumps({"code": code, "imported": [name for name in HEAVY if name in sys.modules]}))
        os._exit(0)


def main() -> None:
    import flows.cli.app  # noqa: F401 - imported once, before the forks

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(carry_out(**order)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
