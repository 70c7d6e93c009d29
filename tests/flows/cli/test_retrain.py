"""`ratchet retrain` and `ratchet import` on the command line: their refusals and their output."""

import json
from pathlib import Path

import pytest

from flows.cli.app import DEMO_CONFIG, execute
from storage.backends.root import Root, open_root
from storage.manifest import need
from tasks.stages.names import Stage


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(str(tmp_path / "runs"))


def refused(capfd: pytest.CaptureFixture[str], root: Root, *words: str) -> str:
    assert execute([*words, f"--root={root.url}"]) == 2
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["retrain", "new"], "say with which state it begins"),
        (["retrain", "new", "--from", "gone@1", "--select", "gone"], "there is no run 'gone'"),
        (["retrain", "new", "--from", "gone"], "there is no run 'gone'"),
        (["retrain", "new", "--from", "a@1-2", "--select", "a"], "does not name one state"),
        (["retrain", "new", "--from", "a@1", "--newer-than", "yesterday"], "'yesterday' is not an age"),
        (["retrain", "new", "--from", "a@1", "--newer-than", "999999999w"], "before the year 1"),
        (["retrain", "New"], "run name 'New' cannot be used"),
        (["retrain", "new", "--limit", "0"], "--limit"),
        (["import", "--run", "ext"], "name at least one"),
        (["import", "a.csv", "--run", "ext"], "end with .jsonl, .json or .parquet"),
        (["import", "a.jsonl", "--run", "ext", "--map", "reward"], "WHAT=COLUMN"),
    ],
)
def test_what_cannot_work_exits_with_2_and_stores_nothing(capfd, root: Root, words, fact):
    assert fact in " ".join(refused(capfd, root, *words).split())
    assert not [key for key in root.keys("") if not key.startswith(("new/lease", "ext/lease"))]


def test_an_import_says_what_it_stored(capfd, root: Root, tmp_path: Path):
    row = {"ids": [3, 4], "response_tokens": [5], "logprobs": [-1.0], "reward": 1}
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    words = ["import", str(file), "--run", "ext", "--map", "prompt_tokens=ids", "--temperature", "1"]
    assert execute([*words, f"--root={root.url}", "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["samples"], found["groups"], found["scored"]) == (2, 1, 2)
    assert need(root, "ext", 1, Stage.REWARD).inputs["rollout"] == need(root, "ext", 1, Stage.ROLLOUT).digest
    assert "no model or configuration" in refused(capfd, root, "status", "ext")


def test_run_does_not_begin_a_retraining(capfd, root: Root, tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text(f'{DEMO_CONFIG.read_text()}\n[retrain]\nstart = "a@1"\nselect = ["a"]\n')
    assert "begin it with `ratchet retrain new" in refused(capfd, root, "run", str(file), "--run", "new")
