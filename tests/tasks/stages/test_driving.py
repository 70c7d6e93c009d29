"""Conversations that the `openai` client drives in the real loop over small workers."""

import json
import time
from pathlib import Path

import pytest

from storage.backends.root import open_root
from storage.errors import InputError, StageFailed
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_parts, read_table
from storage.schema import BRANCHES, REWARD, ROLLOUT
from storage.upkeep.verify import verify
from tasks.environments.checking import check_environment
from tasks.stages.names import Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine
from trainer_core.batches.reading import read_samples

FILE = Path(__file__).parents[1] / "environments/drives.py"


def config(function, *settings):
    given = ["evaluate.every=0", "run.iterations=1", 'reward.function="exact_match"']
    return small_config([*given, f'environment.function="{FILE}:{function}"', *settings])


class Recording(SmallEngine):
    """An engine that records what it was asked and what it has answered."""

    asked = []  # noqa: RUF012 - of all engines

    def enqueue(self, number, prompts, seeds, *others, **more):
        self.asked.extend((tuple(map(int, prompt)), seed) for prompt, seed in zip(prompts, seeds, strict=True))
        super().enqueue(number, prompts, seeds, *others, **more)


class Slow(SmallEngine):
    """An engine that takes longer for an answer than a client waits."""

    def collect(self, wait_s):
        time.sleep(0.2)
        return super().collect(wait_s)


def played(folder, function, *settings, engine=Recording):
    Recording.asked.clear()
    given, root = config(function, *settings), open_root(str(folder / "root"))
    drive = driver(root, given, folder / "scratch")
    drive.workers = WorkersHere(given, engine=engine)
    drive.drive()
    return root


def rows(root, stage=Stage.ROLLOUT, schema=ROLLOUT):
    return read_table(root, need(root, RUN, 1, stage), schema).to_pylist()


def rewards(root):
    return rows(root, Stage.REWARD, REWARD)


def branches(root):
    return read_parts(root, [need(root, RUN, 1, Stage.ROLLOUT).part(BRANCHES)], ROLLOUT).to_pylist()


def own(row):
    """The record that the first turn has of the session."""
    return json.loads(next(turn["results"] for turn in row["turns"] if turn["results"]))


def prefixes(row):
    """All tokens before each answer that counts as sampled."""
    whole = (*row["prompt_tokens"], *row["response_tokens"])
    for turn in row["turns"]:
        if turn["finish_reason"]:
            assert all(row["sampled"][turn["begin"] : turn["end"]])
            yield whole[: len(row["prompt_tokens"]) + turn["begin"]], own(row)["branch"]["seed"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = played(tmp_path_factory.mktemp("undisturbed"), "editing")
    return root, list(Recording.asked)


def test_each_answer_is_trained_once_and_under_the_very_prefix_it_was_sampled_after(undisturbed):
    root, asked = undisturbed
    found, others = rows(root), branches(root)
    assert sorted(one for row in (*found, *others) for one in prefixes(row)) == sorted(asked)
    assert len(asked) == 4 * PROMPTS * SAMPLES
    for row, score in zip(found, rewards(root), strict=True):
        assert [turn["role"] for turn in row["turns"]] == ["environment", "assistant"]
        assert own(row)["branch"]["why"] == "edited"
        first, again = ({"why": why, "parent": parent, "answers": 2} for why, parent in (("first", None), ("again", 0)))
        assert own(row)["others"] == [first, again]
        assert score["reward"] == len(row["response_tokens"]) - 1  # without the stop token
        assert own(row)["overridden"] == {"temperature": 0.5}
        mine = [one for one in others if (one["prompt_id"], one["sample_id"]) == (row["prompt_id"], row["sample_id"])]
        assert sorted(own(one)["branch"]["why"] for one in mine) == ["again", "first"]
    assert len({score["reward"] for score in rewards(root)}) > 1


def test_branches_are_trained_with_the_reward_of_their_sample(undisturbed):
    root, _ = undisturbed
    manifest = need(root, RUN, 1, Stage.ROLLOUT)
    samples, scores = read_samples(root, manifest, need(root, RUN, 1, Stage.REWARD)), rewards(root)
    assert samples.branches.tolist() == [3] * len(scores)
    assert samples.rewards.tolist() == [score["reward"] for score in scores for _ in range(3)]
    assert samples.usable.all()
    trained = sum(sum(row["sampled"]) for row in (*rows(root), *branches(root)))
    assert samples.response_lengths.sum() == trained
    assert manifest.metrics["branches"] == len(branches(root)) == 2 * len(scores)
    assert manifest.metrics["branch_tokens"] + manifest.metrics["tokens"] == trained


@pytest.mark.slow
def test_after_kills_the_answers_are_repeated_and_not_sampled_again(tmp_path, undisturbed):
    root, given = open_root(str(tmp_path / "root")), config("editing")
    for number, after in enumerate((4, 4)):  # so few that much is left, however far others got by then
        with pytest.raises(Killed):
            at = killing(Stage.ROLLOUT, 1, Point.MID_RESPONSE, after)
            driver(root, given, tmp_path / str(number), at=at).drive()
    Recording.asked.clear()
    last = driver(root, given, tmp_path / "last")
    last.workers = WorkersHere(given, engine=Recording)
    last.drive()
    assert rows(root) == rows(undisturbed[0])
    assert branches(root) == branches(undisturbed[0])
    assert rewards(root) == rewards(undisturbed[0])
    assert 0 < len(Recording.asked) <= len(undisturbed[1]) - 4
    assert verify(root, RUN).sound


@pytest.mark.slow
def test_failures_of_a_function_are_no_rewards(tmp_path):
    root = played(tmp_path, "failing", "environment.retries=1", "reward.max_failures=0.9")
    scores, found = rewards(root), rows(root)
    failed = [score["reward"] is None for score in scores]
    assert 0 < sum(failed) < len(failed)
    for score, row in zip(scores, found, strict=True):
        if score["reward"] is None:
            assert score["reason"] == "exception"
            assert "the sandbox is gone" in score["detail"]
            assert not any(row["sampled"])


def test_an_answer_that_comes_after_its_conversation_is_none_of_its_row(tmp_path):
    few = ("rollout.prompts=2", "rollout.samples=3", "environment.processes=2")  # it comes while others are played
    root = played(tmp_path, "impatient", *few, engine=Slow)
    for row in rows(root):
        assert [turn["role"] for turn in row["turns"]] == ["environment", "assistant"]
        assert own(row)["others"] == []
    assert {score["reward"] for score in rewards(root)} == {1.0}


def test_a_failure_after_a_limit_that_a_function_has_survived_is_no_reward(tmp_path):
    with pytest.raises(StageFailed, match="the sandbox is gone"):
        played(tmp_path, "recovering", "environment.retries=0", "rollout.prompts=2", "rollout.samples=2")


@pytest.mark.slow
@pytest.mark.parametrize(("function", "told"), [("textual", "is not a finite number"), ("silent", "asked the policy")])
def test_what_is_no_reward_is_no_number(tmp_path, function, told):
    with pytest.raises(StageFailed, match=told):
        played(tmp_path, function, "environment.retries=0", "reward.max_failures=1.0")


@pytest.mark.slow
def test_a_policy_at_its_limits_has_a_reward(tmp_path):
    root = played(tmp_path, "tireless", "environment.turns=4")
    assert {score["reward"] for score in rewards(root)} == {0.0}
    assert {sum(turn["role"] == "assistant" for turn in row["turns"]) for row in rows(root)} == {4}


@pytest.mark.parametrize(
    ("function", "settings", "told"),
    [
        ("strange", (), "expected `async def strange"),
        pytest.param("sums", ("environment.arguments.rounds=2",), "rounds", marks=pytest.mark.slow),
        (
            "sums",
            ("environment.tokens=100", "engine.max_model_len=100"),
            "environment.tokens = 100 is not a limit",
        ),
        pytest.param("sums", ('environment.reasoning_parser="qwen3"',), "reasoning_parser", marks=pytest.mark.slow),
        ("../environments/sums.py:Sums", ('environment.sampling="refuse"',), "is for clients"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(function, settings, told):
    given = config(function, *settings)
    if ":" in function:
        name = f"{FILE.parent}/sums.py:Sums"
        given = given.model_copy(update={"environment": given.environment.model_copy(update={"function": name})})
    with pytest.raises(InputError, match=told):
        check_environment(given)
