"""Output of `ratchet samples` for a run over small workers."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from flows.cli.app import execute
from flows.views.samples import Choice, Samples, printable, read_chosen, sample_lines
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.upkeep.archive import scored
from tasks.data.tokenizer import StoredTexts
from tasks.rewards.match import characters
from tasks.stages.names import Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.storage.tables import read_stored_table

ALL = Choice(random=PROMPTS * SAMPLES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with a complete run of two iterations."""
    folder = tmp_path_factory.mktemp("run")
    store = open_root(str(folder / "runs"))
    driver(store, small_config(), folder / "scratch").drive()
    return store


def test_each_sample_has_the_texts_it_was_scored_by(root: Root):
    found = read_chosen(root, RUN, 1, ALL)
    assert found.total == len(found.samples) == PROMPTS * SAMPLES
    prompts = read_stored_table(root, need(root, RUN, 0, Stage.PREPARE))
    stored = {row["prompt_id"]: row for row in prompts.to_pylist()}
    for one in found.samples:
        assert one.prompt == stored[one.prompt_id]["prompt"]
        assert one.response is not None
        assert one.reward == pytest.approx(characters(json.loads(stored[one.prompt_id]["record"]), one.response))
        assert (one.status, one.weight_versions) == ("ok", (0,))


def test_advantages_are_those_of_the_formula(root: Root):
    found = read_chosen(root, RUN, 2, ALL)
    spread = 0
    for prompt in {one.prompt_id for one in found.samples}:
        group = [one for one in found.samples if one.prompt_id == prompt]
        rewards = [one.reward for one in group]
        for one in group:
            scale = statistics.stdev(rewards) + 1e-6
            expected = 0.0 if len(set(rewards)) == 1 else (one.reward - statistics.mean(rewards)) / scale
            assert one.advantage == pytest.approx(expected, rel=1e-6)
            spread += one.advantage != 0
    assert spread


def test_best_worst_prompt_and_random_choose(root: Root):
    rewards = {(one.prompt_id, one.sample_id): one.reward for one in read_chosen(root, RUN, 1, ALL).samples}
    ordered = sorted(rewards.values())
    assert [one.reward for one in read_chosen(root, RUN, 1, Choice(best=2)).samples] == ordered[:-3:-1]
    assert [one.reward for one in read_chosen(root, RUN, 1, Choice(worst=2)).samples] == ordered[1::-1]
    both = read_chosen(root, RUN, None, Choice(best=3, worst=3))
    assert (both.iteration, len({(one.prompt_id, one.sample_id) for one in both.samples})) == (2, 6)
    name = next(iter(rewards))[0]
    assert {one.prompt_id for one in read_chosen(root, RUN, 1, Choice(prompt=name)).samples} == {name}
    drawn = [read_chosen(root, RUN, 1, Choice(random=4, seed=seed)).samples for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_few_samples_are_chosen_once_each():
    rows = Choice(best=3, worst=3).rows(["a"] * 4, np.array([0.0, np.nan, 1.0, 0.5]))
    assert rows.tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("run", "iteration", "choice", "fact"),
    [
        ("nobody", None, ALL, "no run 'nobody'"),
        (RUN, 9, ALL, "iteration 9 of run 'small' has no samples: iterations 1 to 2 do"),
        (RUN, 0, ALL, "iteration 0 of run 'small' has no samples"),
        (RUN, 1, Choice(prompt="p"), "prompt 'p' has no samples in this iteration: it sampled"),
    ],
)
def test_what_is_not_there_is_said(root: Root, run, iteration, choice, fact):
    with pytest.raises(InputError) as refused:
        read_chosen(root, run, iteration, choice)
    assert fact in str(refused.value)


def test_samples_that_are_not_scored_yet_are_shown(tmp_path: Path):
    store = open_root(str(tmp_path / "runs"))
    with pytest.raises(Killed):
        driver(store, small_config(), tmp_path / "scratch", at=killing(Stage.REWARD, 1, Point.STARTED)).drive()
    found = read_chosen(store, RUN, None, Choice(random=2))
    assert all(one.reward is one.advantage is one.status is None for one in found.samples)
    assert all(one.response is not None for one in found.samples)
    assert "not scored yet" in "\n".join(sample_lines(found))
    assert read_chosen(store, RUN, None, Choice(best=2, worst=2)).samples == ()


def test_the_lines_have_everything_and_control_no_terminal(root: Root):
    found = read_chosen(root, RUN, 1, Choice(best=1))
    (one,) = found.samples
    text = "one\ntwo \x1b[31mred\x07"
    changed = one.model_copy(update={"response": text, "components": {"right": 1.0, "short": None}, "advantage": -0.5})
    lines = sample_lines(Samples(**{**dict(found), "samples": (changed,)}))
    assert lines[0] == f"iteration 1 of run small: 1 of {PROMPTS * SAMPLES} samples"
    assert lines[2].startswith(f"{one.prompt_id}/{one.sample_id} | reward {one.reward:.4g} (right 1, short none) | ")
    assert "| advantage -0.500 | " in lines[2]
    assert lines[-2:] == ["response  one", "          two \\x1b[31mred\\x07"]
    assert printable("é\t漢") == "é\t漢"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("2 ", ["response  2\\x20"]),
        ("2\n", ["response  2\\n"]),
        (" 2 \n\n", ["response   2\\x20\\n\\n"]),
        ("a\t\nb", ["response  a\\t", "          b"]),
        ("a\n\nb", ["response  a", "          ", "          b"]),
        ("  ", ["response  \\x20\\x20"]),
        ("\n", ["response  \\n"]),
        ("", ["response  (empty)"]),
    ],
)
def test_blanks_at_the_end_are_visible(root: Root, text: str, lines: list[str]):
    found = read_chosen(root, RUN, 1, Choice(best=1))
    changed = found.samples[0].model_copy(update={"response": text})
    shown = sample_lines(found.model_copy(update={"samples": (changed,)}))
    assert shown[-len(lines) :] == lines


def test_the_archive_has_the_texts(root: Root):
    texts = StoredTexts.of(root, need(root, RUN, 0, Stage.PREPARE))
    table = scored(root, need(root, RUN, 1, Stage.ROLLOUT), need(root, RUN, 1, Stage.REWARD), texts)
    shown = {
        (one.prompt_id, one.sample_id): (one.prompt, one.response) for one in read_chosen(root, RUN, 1, ALL).samples
    }
    for row in table.to_pylist():
        assert shown[row["prompt_id"], row["sample_id"]] == (row["prompt"], row["response"])


def test_the_command_shows_the_best_and_the_worst(root: Root, capfd: pytest.CaptureFixture[str]):
    assert execute(["samples", RUN, "--root", root.url, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert Samples.model_validate(document) == read_chosen(root, RUN, 2, Choice(best=3, worst=3))
    assert execute(["samples", f"{RUN}@1", "--root", root.url, "--best", "1"]) == 0
    assert capfd.readouterr().out.startswith("iteration 1 of run small: 1 of 12 samples\n\n")
