"""Bad input to `ratchet run`: the exit code, the message, and proof that nothing heavy was imported for it.

Tables for models, prompts and rewards are in files of their own beside this one.
"""

import pytest

CONFIG = """\
[model.generate]
[data.generate]
[train]
max_length = 128
[train.optimizer]
learning_rate = 1e-3
"""

CASES = {
    "no such file": (["run", "missing.toml"], ["missing.toml does not exist", "give the path of a TOML file"]),
    "unknown key": (
        ["run", "run.toml", "--set", "rollout.promts=4"],
        ["rollout.promts: unknown key", "rollout.prompts"],
    ),
    "no number": (["run", "run.toml", "--set", "rollout.samples=many"], ["rollout.samples", "integer", "many"]),
    "no section": (["run", "run.toml", "--set", "samples"], ["--set 'samples'", "section.key=value"]),
}


@pytest.mark.parametrize(("arguments", "words"), CASES.values(), ids=CASES)
def test_bad_input_is_refused_before_anything_heavy(command, tmp_path, arguments, words):
    (tmp_path / "run.toml").write_text(CONFIG)
    outcome = command(arguments, tmp_path)
    assert outcome.code == 2
    assert all(word in outcome.said for word in words), outcome.said
    assert outcome.imported == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
