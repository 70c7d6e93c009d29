"""`ratchet init`: the files of a first run."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from flows.cli.options import Json
from flows.views.output import Output
from storage.errors import InputError

FILES = ("run.toml", "reward.py", "prompts.jsonl")


class FirstRun(BaseModel, frozen=True, extra="forbid"):
    folder: str  # absolute path
    files: tuple[str, ...]


def init_command(
    folder: Annotated[Path, Parameter(help="Folder for the files; made if it does not exist.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Write a configuration, a reward function and a few prompts that run as they are: a place to start from."""
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise InputError(f"{folder} already holds {' and '.join(taken)}, which is kept: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).write_bytes((files("flows.cli") / "first_run" / name).read_bytes())
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}. Give another folder") from None
    made = FirstRun(folder=str(folder.absolute()), files=FILES)
    return Output.show(
        json, made, [f"wrote {', '.join(FILES)} to {folder}", f"next: ratchet run {folder / 'run.toml'}"]
    )
