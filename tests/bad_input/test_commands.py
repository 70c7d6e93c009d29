"""Bad input to the commands that show, end and remove runs, and values of a configuration that cannot work."""

import pytest

from tests.bad_input.test_command import CONFIG

HUGE = 10**30

VALUES = {
    "not a number": ("rollout.temperature=nan", ["rollout.temperature", "finite number"]),
    "infinite": ("sync.max_difference=inf", ["sync.max_difference", "finite number"]),
    "infinite in the trainer": (
        "train.optimizer.learning_rate=inf",
        ["train.optimizer.learning_rate", "finite number"],
    ),
    "not a number for the reward": ("reward.arguments.scale=nan", ["reward.arguments.scale", "finite number"]),
    "negative seed": ("run.seed=-1", ["run.seed: -1 cannot be a seed", "from 0 to 2147483647"]),
    "huge seed": ("run.seed=2147483648", ["run.seed: 2147483648 cannot be a seed"]),
    "huge number": (f"run.iterations={HUGE}", [f"run.iterations: {HUGE} is too large", "at most 2147483647"]),
    "endless deadline": ("workers.call_deadline_s=1e300", ["workers.call_deadline_s", "too long to wait for"]),
    "nothing near": ("rollout.zzz=1", ["rollout.zzz: unknown key; remove it, or use one of prompts, most_prompts,"]),
    "a tracker with credentials": ("report.mlflow=https://u:p@h", ["report.mlflow: it is a URL with credentials"]),
    "a viewer with its token": (
        "report.viewer=http://127.0.0.1:8400/?token=abc",
        ["report.viewer: it is not the address of a viewer without its token", "http://127.0.0.1:8400"],
    ),
    "a tracker by a variable that is not set": (
        'report.mlflow="env:RATCHET_TEST_NOT_SET"',
        ["report.mlflow is env:RATCHET_TEST_NOT_SET", "export it"],
    ),
}
COMMANDS = {
    "samples of no run": (["samples", "nobody"], ["no run 'nobody'", "check --root"]),
    "samples of no number": (["samples", "nobody@first"], ["first"]),
    "fewer than no samples": (["samples", "nobody", "--best", "-1"], ["--best", "0"]),
    "report of no run": (["report", "nobody"], ["no run 'nobody'"]),
    "compact of no run": (["compact", "nobody"], ["no run 'nobody'"]),
    "rm of nothing": (["rm", "nobody", "--yes"], ["nothing under the name 'nobody'"]),
    "rm of a path": (["rm", "../up", "--yes"], ["run name '../up' cannot be used"]),
    "rm of all": (["rm", "", "--yes"], ["run name '' cannot be used"]),
    "stop of no run": (["stop", "nobody"], ["no run 'nobody'"]),
    "verify of neither": (["verify"], ["give the id of a run, or --all"]),
    "verify of both": (["verify", "nobody", "--all"], ["give the id of a run, or --all"]),
    "view of no root": (["view", "--root", "nowhere"], ["there is no storage root at", "check --root"]),
    "view of no port": (["view", "--port", "70000"], ["--port"]),
    "export of two models": (
        ["export", "a", "--to", "out", "--adapter", "--critic"],
        ["adapter and critic name two models"],
    ),
    "gc of no run": (["gc", "nobody", "--objects"], ["no run 'nobody'"]),
}


@pytest.mark.parametrize(("setting", "words"), VALUES.values(), ids=VALUES)
def test_a_value_that_cannot_work_is_refused_before_anything_heavy(command, tmp_path, setting, words):
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = command(["run", "run.toml", "--run", "a", "--set", setting], tmp_path)
    assert outcome.code == 2
    assert all(word in outcome.said for word in words), outcome.said
    assert "Traceback" not in outcome.said
    assert outcome.imported == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(("arguments", "words"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_work_says_so_before_anything_heavy(command, tmp_path, arguments, words):
    outcome = command(arguments, tmp_path)
    assert outcome.code == 2
    assert all(word in outcome.said for word in words), outcome.said
    assert "Traceback" not in outcome.said
    assert outcome.imported == []
    assert list(tmp_path.iterdir()) == []
