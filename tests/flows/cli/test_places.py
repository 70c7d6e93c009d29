"""One way to name a run, an iteration and a stage, and the messages about a mistyped command line."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cyclopts import App

from flows.cli.app import app, execute
from flows.cli.options import Place, place_in
from storage.errors import InputError


@pytest.mark.parametrize(
    ("text", "form", "place"),
    [
        ("run", "RUN[@ITERATION][:STAGE]", Place("run", None, None)),
        ("run@6", "RUN[@ITERATION][:STAGE]", Place("run", 6, None)),
        ("run:train", "RUN[@ITERATION][:STAGE]", Place("run", None, "train")),
        ("my-run.2@0:weight-sync", "RUN@ITERATION:STAGE", Place("my-run.2", 0, "weight-sync")),
        ("run@12:evaluation-ghij", "RUN[@ITERATION][:STAGE]", Place("run", 12, "evaluation-ghij")),
        ("run@7", "RUN@ITERATION", Place("run", 7, None)),
    ],
)
def test_a_place_has_one_form(text: str, form: str, place: Place):
    assert place_in(text, form) == place


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        ("", "RUN[@ITERATION]", "not of the form"),
        ("@6", "RUN[@ITERATION]", "not of the form"),
        (":train", "RUN[@ITERATION][:STAGE]", "not of the form"),
        ("run@", "RUN[@ITERATION]", "'' is not an iteration"),
        ("run@x", "RUN[@ITERATION]", "'x' is not an iteration: write a number, as in my-run@6"),
        ("run@-1", "RUN@ITERATION", "'-1' is not an iteration"),
        ("run@1.5", "RUN@ITERATION", "is not an iteration"),
        ("run@\u0663", "RUN@ITERATION", "is not an iteration"),
        ("run@best", "RUN[@ITERATION]", "is not an iteration"),
        ("run@6@7", "RUN[@ITERATION]", "is not an iteration"),
        ("run", "RUN@ITERATION", "lacks @ITERATION: write it as RUN@ITERATION, as in my-run@6"),
        ("run@6", "RUN@ITERATION:STAGE", "lacks :STAGE"),
        ("run@6:train", "RUN@ITERATION", "has more than this command takes"),
        ("run@6:", "RUN[@ITERATION][:STAGE]", "'' is not a stage"),
        ("run@6:rewrad", "RUN[@ITERATION][:STAGE]", "did you mean 'reward'?"),
        ("run@6:walk", "RUN[@ITERATION][:STAGE]", "write one of prepare, rollout"),
        ("RUN@6", "RUN[@ITERATION]", "run name 'RUN' cannot be used"),
    ],
)
def test_another_form_is_refused_with_the_right_one(text: str, form: str, words: str):
    with pytest.raises(InputError) as refused:
        place_in(text, form)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "x.toml"], "did you mean `ratchet run`?"),
        (["train"], "did you mean `ratchet run`?"),
        (["retrian"], "did you mean `ratchet retrain`?"),
        (["evalaute", "a"], "did you mean `ratchet evaluate`?"),
        (["delete", "a"], "did you mean `ratchet rm`?"),
        (["bench", "xyzzy"], "there are agents, faults"),
        (["samples"], "ratchet samples --help tells more"),
        (["xyzzy"], "'xyzzy' is not a command: there are bench, check"),
        (["run", "x.toml", "rollout.samples=4"], "a setting is given with --set: --set rollout.samples=4"),
        (["check", "x.toml", "train.optimizer.learning_rate=1e-4", "run.seed=2"], "--set run.seed=2"),
        (["run", "x.toml", "reward.arguments.api_key=abcdef123456"], "--set reward.arguments.api_key="),
        (["show", "run", "6"], "iteration and stage are named with the run, as RUN@6"),
        (["show", "run", "6", "reward"], "named with the run, as RUN@6:reward"),
        (["rerun", "run", "reward@6"], "named with the run, as RUN@6:reward"),
        (["samples", "run", "other"], "this command does not take 'other'"),
    ],
)
def test_a_mistake_is_answered_with_what_works(words: list[str], said: str, capfd: pytest.CaptureFixture[str]):
    assert execute(words) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert said in err
    assert "abcdef123456" not in err


def test_every_command_is_in_a_group_of_the_help(capfd: pytest.CaptureFixture[str]):
    named = [name for name in app if not name.startswith("-")]
    assert all(isinstance(app[name], App) and app[name].group for name in named)
    execute(["--help"])
    said = capfd.readouterr().out
    assert "Commands" not in said
    assert [title for title in ("Begin", "Train", "Look", "Use", "Keep in order", "A site") if title not in said] == []


SHELLS = {
    "bash": """source "$1"; COMP_WORDS=(ratchet check-s) COMP_CWORD=1
        $(complete -p ratchet | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """autoload -Uz compinit; compinit -u -D; source "$1"; functions $_comps[ratchet]""",
    "fish": """source $argv[1]; complete -C 'ratchet check-s'""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands(shell: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert execute(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capfd.readouterr().out)
    assert "keep-newest" in script.read_text()
    if shell != "bash" and shutil.which(shell) is None:
        assert ("compdef _cyclopts_ratchet ratchet" in script.read_text()) == (shell == "zsh")
        return
    order = [shell, "-c", SHELLS[shell], *([] if shell == "fish" else [shell]), str(script)]
    said = subprocess.run(order, text=True, capture_output=True, check=True).stdout
    assert "check-sync" in said
