"""`ratchet reward` describes a function and leaves the run unchanged."""

import json
from pathlib import Path

import pytest

from flows.cli.app import app
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import need
from tasks.config.stored import stored_config
from tasks.stages.names import Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, driver

TOTAL = PROMPTS * SAMPLES
OWN = """
def half(record, response, sample):
    if sample.sample_id:
        return float("inf")
    return {"length": len(sample.tokens), "weird": 0.0}

def same(record, response, *, scale=1):
    answer, given = str(record["answer"]).strip(), response.strip()
    length = max(len(answer), len(given))
    return scale * (sum(a == b for a, b in zip(answer, given)) / length if length else 1.0)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    folder = tmp_path_factory.mktemp("run")
    store = open_root(str(folder / "runs"))
    driver(store, small_config(["run.iterations=1"]), folder / "scratch").drive()
    return store


@pytest.fixture
def call(root: Root, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)

    def carry_out(iteration: str, *words: str, run: str = RUN):
        before = {key: root.read_bytes(key) for key in root.keys("")}
        code = app(["reward", f"{run}@{iteration}", *words, "--root", root.url])
        said = capfd.readouterr().out
        assert app(["reward", f"{run}@{iteration}", *words, "--root", root.url, "--json"]) == code
        document = json.loads(capfd.readouterr().out)
        assert {key: root.read_bytes(key) for key in root.keys("")} == before
        return code, document, said

    return carry_out


def test_the_own_function_changes_nothing(call, root: Root):
    code, document, said = call("1")
    stored = need(root, RUN, 1, Stage.REWARD).metrics["reward_mean"]
    assert (code, document["samples"], document["changed"], document["unscored"]) == (0, TOTAL, 0, 0)
    assert document["mean"] == document["stored_mean"] == stored
    assert document["sources"] == {"characters": "version 1"}
    assert f"{TOTAL} samples of iteration 1 of run {RUN}; nothing was stored" in said


def test_another_function_is_compared_with_what_is_stored(call):
    code, document, said = call("1", "--function", "own.py:half")
    assert (code, document["unscored"], document["reasons"]) == (1, PROMPTS, {"non_finite": PROMPTS})
    assert document["components"].keys() == {"length", "weird"}
    assert document["mean"] == pytest.approx(document["components"]["length"])  # of float32
    assert all("not finite as float32" in one["detail"] for one in document["examples"])
    assert "more than reward.max_failures allows" in said
    assert call("1", "--function", "own.py:half", "--set", "reward.max_failures=0.5")[0] == 0


@pytest.mark.slow
def test_the_same_scores_from_another_function(call):
    code, document, _ = call("1", "--function", "own.py:same")
    assert (code, document["changed"]) == (0, 0)
    document = call("1", "--function", "own.py:same", "--set", "reward.arguments.scale=2")[1]
    assert document["mean"] == pytest.approx(2 * document["stored_mean"])
    assert 0 < document["changed"] <= TOTAL
    assert all(one["reward"] == pytest.approx(2 * one["stored"]) for one in document["examples"])


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("7",), "no samples of iteration 7"),
        (("1", "--set", "rollout.samples=2"), r"only settings of \[reward\]"),
        (("1", "--function", "none.py:f"), "there is no file none.py"),
        (("1", "--function", "own.py:none"), "own.py has no 'none'"),
    ],
)
def test_what_cannot_be_tried_is_refused(call, words, fact):
    with pytest.raises(InputError, match=fact):
        call(*words)


def test_samples_that_are_not_scored_yet(call, root: Root):
    key = need(root, RUN, 1, Stage.REWARD).key
    manifest = root.read_bytes(key)
    root.remove(key)
    code, document, said = call("1")
    assert (code, document["stored_mean"], document["changed"]) == (0, None, None)
    assert "(not scored yet)" in said
    root.put_if_absent(key, manifest)


def test_a_fork_finds_a_function_in_the_working_directory(call, root: Root, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    asked = ["fork", f"{RUN}@1", "--run", "forked", "--set", "reward.function=own.py:same", "--root", root.url]
    assert app(asked) == 0
    assert stored_config(root, "forked").reward.function == f"{tmp_path / 'own.py'}:same"
    assert call("1", run="forked")[1]["sources"].keys() == {"own.py:same"}
