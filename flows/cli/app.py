"""The command line. Heavy imports wait until a command needs them, so `ratchet status` answers at once."""

import importlib
import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.check import names_a_run, of_file, of_stored
from flows.cli.mistakes import explained, missing_extra
from flows.cli.options import DEFAULT_ROOT, Changes, Common, FileOrRun, Json, RunId, Settings, flag, root_url, several
from flows.cli.printing import of_configuration
from flows.views.output import Output
from flows.views.progress import status_lines
from flows.views.status import read_status
from storage.errors import InputError, RatchetError, told
from tasks.config import reference
from tasks.config.code_version import PROJECT_ROOT, VERSION
from tasks.config.document import load_config, written
from tasks.config.environment import prepare_process, without_secrets
from tasks.config.run import RunConfig
from tasks.workers.folders import check_folders

DEMO_CONFIG = PROJECT_ROOT / "infra" / "examples" / "demo.toml"

_BENCHES = "Measure parts of Ratchet on this machine."
_INTERRUPTED = 128 + signal.SIGINT
_FIRST_RUN = ("run.toml", "reward.py", "prompts.jsonl")

_HELP = "RL post-training of language models as a durable workflow."

app = App(
    name="ratchet", help=_HELP, version=VERSION, suppress_keyboard_interrupt=False, print_error=False,
    exit_on_error=False, result_action="return_value",
)  # fmt: skip


class FirstRun(BaseModel, frozen=True, extra="forbid"):
    folder: str  # absolute path
    files: tuple[str, ...]


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; an error becomes one message on standard error."""
    output = Output()
    try:
        return app(arguments) or 0
    except RatchetError as error:
        output.error(without_secrets(told(error)))
        return error.exit_code
    except CycloptsError as error:
        output.error(without_secrets(explained(error)))
        return InputError.exit_code
    except ModuleNotFoundError as error:
        output.error(f"{missing_extra(error)}")
        return InputError.exit_code
    except KeyboardInterrupt:
        output.error("interrupted")
        return _INTERRUPTED


@app.command(name="run")
def run_command(which: FileOrRun, /, *, changes: Changes = Changes(), common: Common = Common()) -> int:
    """Start or continue the run that a configuration describes, or continue a recorded run."""
    if not names_a_run(which, common.store):
        return _from_file(["run", which], which, changes, common)
    config = of_stored(which, changes.run, changes.replaced, common.store)
    return _carry_out(which, config, common.again(["run", which, *changes.options]), common)


@app.command
def demo(
    *,
    seed: Annotated[int | None, Parameter(help="Seed of everything; overrides run.seed.")] = None,
    changes: Changes = Changes(),
    common: Common = Common(),
) -> int:
    """Teach a tiny model to add, on this machine, from scratch: a new run each time unless --run names one."""
    settings = (*changes.settings, *([] if seed is None else [f"run.seed={seed}"]))
    changes = replace(changes, run=changes.run or new_name("demo"), settings=settings)
    return _from_file(["demo"], str(DEMO_CONFIG), changes, common)


@app.command
def init(
    folder: Annotated[Path, Parameter(help="Folder for the files; made if it does not exist.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Write a configuration, a reward function and a few prompts that run as they are: a place to start from."""
    taken = [name for name in _FIRST_RUN if (folder / name).exists()]
    if taken:
        raise InputError(f"{folder} already holds {' and '.join(taken)}, which is kept: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FIRST_RUN:
            (folder / name).write_bytes((files("flows.cli") / "first_run" / name).read_bytes())
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}. Give another folder") from None
    made = FirstRun(folder=str(folder.absolute()), files=_FIRST_RUN)
    first = f"wrote {', '.join(_FIRST_RUN)} to {folder}"
    return Output.show(json, made, [first, f"next: ratchet run {folder / 'run.toml'}"])


@app.command
def status(
    run: RunId,
    /,
    *,
    everything: Annotated[bool, flag("Show every iteration of a long run, not only the newest.", "--all")] = False,
    common: Common = Common(),
) -> int:
    """Show how far a run is, from its storage alone."""
    found = read_status(common.store, run, everything)
    return common.show(found, status_lines(found))


@app.command(name="config")
def config_command(
    run: Annotated[str | None, Parameter(help="Id of a run.")] = None,
    /,
    *,
    example: Annotated[bool, flag("Print a commented TOML file with every key at its default.")] = False,
    markdown: Annotated[bool, flag("Print the page docs/configuration.md.")] = False,
    common: Common = Common(),
) -> int:
    """Describe every key of a configuration: type, limits, default, and whether it may change later; with --json print
    the JSON schema. Of a run, print what it was recorded with as a TOML file."""
    if example + markdown + (common.json or run is not None) > 1:
        raise InputError("--example, --markdown and --json, or a run, exclude each other: give only one of them")
    if run is not None:
        stored = of_stored(run, None, (), common.store)
        return common.show(stored, list(written(stored.model_dump(mode="json")))[:-1])
    text = reference.example() if example else reference.markdown() if markdown else None
    return common.show(reference.schema(), of_configuration(reference.tables()) if text is None else text.splitlines())


@app.command
def prove_resume(
    config: Annotated[str, Parameter(help="Path or URL of a TOML file.")],
    /,
    *,
    root: Annotated[
        str | None,
        Parameter(help="Storage root of both runs; by default a new folder below ./runs.", converter=root_url),
    ] = None,
    iterations: Annotated[int, Parameter(help="RL iterations of each run.", validator=Number(gte=1))] = 3,
    kills: Annotated[int, Parameter(help="Number of kills at random points.", validator=Number(gte=0))] = 3,
    seed: Annotated[int, Parameter(help="Seed that chooses the points.")] = 0,
    at: Annotated[tuple[str, ...], several("Kill at STAGE@ITERATION:POINT[:VICTIM] instead")] = (),
    settings: Settings = (),
    regenerate: Annotated[
        bool, flag("Let the interrupted run sample for itself instead of using stored rollouts.")
    ] = False,
    plant: Annotated[bool, flag("Flip one bit: the proof must fail.")] = False,
    json: Json = False,
) -> int:
    """Show that a run that is killed and continued ends in the same bits as one that is not.

    The run is done twice: without interruption, and with processes killed and restarted. The exit code is 0 only if
    weights, optimizer, random generators, tables and metrics are identical bit for bit."""
    from flows.proof.faults import Fault
    from flows.proof.prove import ProofOrder, prove  # imports torch

    loaded = load_config(config, [*settings, f"run.iterations={iterations}"])
    place, points = root or f"{DEFAULT_ROOT}/{new_name('proof')}", tuple(map(Fault.parse, at))
    order = ProofOrder(loaded, config, settings, place, kills, seed, points, regenerate, plant)
    with Output(json=json) as output:
        return prove(order, output)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"] = "bash", /) -> int:
    """Print a script by which a shell completes commands and options: `source <(ratchet completion bash)`."""
    output, script = Output(), app.generate_completion(prog_name="ratchet", shell=shell)
    # the script for zsh is one to be found in a folder: where it is sourced, nothing has named the function
    output.text(f"{script}\ncompdef _cyclopts_ratchet ratchet" if shell == "zsh" else script)
    return 0


_GROUPS = {
    "Begin": {"demo": None, "init": None, "check": "check", "config": None},
    "Train": {
        "run": None, "retrain": "retrain", "import": "retrain", "fork": "store", "rerun": "rerun", "choose": "rerun",
        "stop": "upkeep",
    },
    "Look": {
        "ls": "store", "status": None, "show": "store", "samples": "look", "report": "look", "lineage": "store",
        "verify": "store", "view": "look",
    },
    "Use": {
        "evaluate": "weights", "reward": "reward", "export": "weights", "compact": "store", "check-sync": "weights",
    },
    "Keep in order": {"maintain": "upkeep", "gc": "store", "rm": "upkeep", "unlock": "store"},
    "A site": {"up": "site", "down": "site", "register": "site", "doctor": "site"},
    "Prove and measure": {"prove-resume": None, "bench": None},
    "This program": {"completion": None, "--help": None, "--version": None},
}  # fmt: skip
"""Every command, by its purpose, with the module of `flows.cli` that has it; None for this one."""

for number, (title, members) in enumerate(_GROUPS.items()):
    group = Group(title, sort_key=number)
    for member, module in members.items():
        if member == "bench":  # imported only when it is called: no product module imports a bench
            app.command("infra.bench.commands:app", name=member, help=_BENCHES, group=group)
        elif module is not None:
            functions = vars(importlib.import_module(f"flows.cli.{module}"))
            app.command(functions[f"{member.replace('-', '_')}_command"], name=member, group=group)
        else:
            app[member].group = (group,)


def new_name(kind: str) -> str:
    """A name that sorts by time, such as demo-20261120-190512-ab12."""
    return f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _from_file(words: Sequence[str], path: str, changes: Changes, common: Common) -> int:
    name, config = of_file(path, changes.run, changes.replaced)
    return _carry_out(name, config, common.again([*words, f"--run={name}", *changes.options]), common)


def _carry_out(name: str, config: RunConfig, again: str, common: Common) -> int:
    check_folders()  # before anything imports what needs them
    from flows.preflight import check_start

    prepare_process()
    check_start(name, common.store, config)  # `launch` checks again; it needs seconds for its imports
    from flows.cli.launch import Order, launch  # imports Prefect and Ray

    with Output(json=common.json) as output:
        return launch(Order(config, name, common.root, again), output)
