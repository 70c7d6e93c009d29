"""Conversations with environments in the loop over small workers: kills, failures, and what is not an environment."""

import asyncio
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flows.cli.app import execute
from flows.driving import ask_again
from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_part, read_table
from storage.revisions import read_revisions
from storage.schema import EVALUATION, REWARD, ROLLOUT
from storage.unfinished import TurnEvent, find_turns
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.config.evaluation import EvaluationSettings
from tasks.config.stored import check_record, stored_config
from tasks.environments.hosting import host_processes
from tasks.environments.scores import read_scores
from tasks.forking import begin_retraining, retrain_config
from tasks.preflight import check_continued
from tasks.stages.conversations import Events
from tasks.stages.evaluation import evaluation
from tasks.stages.names import Stage
from tasks.stages.views import Prepared
from tests.small.config import HELD_OUT, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import context_here
from tests.tasks.environments.sums import KINDS, Bad
from trainer_core.batches.reading import read_samples
from trainer_core.objectives.advantages import group_advantages
from trainer_core.objectives.scored import ScoredSamples

FILE = Path(__file__).parents[1] / "environments/sums.py"


def config(kind, arguments=None, *settings):
    given = {"function": f"{FILE}:{kind}", "arguments": arguments or {}}
    tables = [f"environment.{key}={json.dumps(value)}" for key, value in given.items() if value != {}]
    tables = [one for one in tables if "arguments" not in one]
    tables += [f"environment.arguments.{name}={json.dumps(value)}" for name, value in (arguments or {}).items()]
    return small_config(["evaluate.every=0", "run.iterations=1", 'reward.function="exact_match"', *tables, *settings])


def rollout(root):
    return read_table(root, need(root, RUN, 1, Stage.ROLLOUT), ROLLOUT).to_pylist()


def rewards(root):
    return read_table(root, need(root, RUN, 1, Stage.REWARD), REWARD).to_pylist()


def identity(root):
    """The rollout's identity, as if every class had the name `Sums`."""
    manifest = need(root, RUN, 1, Stage.ROLLOUT)
    return manifest.model_copy(update={"config_digest": "", "facts": {}, "inputs": {}}).digest


def test_an_event_that_was_not_stored_is_not_durable_for_any_that_waited_with_it(tmp_path):
    root = open_root(str(tmp_path))

    async def kept():
        events = Events(root, layout.piece_key("run", 1, "rollout", 0, "a"))
        (tmp_path / "run").write_text("no folder")
        stored = (events.keep(row, TurnEvent(row=row, kind="begun")) for row in range(4))
        return await asyncio.gather(*stored, return_exceptions=True)

    assert [isinstance(one, Exception) for one in asyncio.run(kept())] == [True] * 4


def played(folder, *given):
    root = open_root(str(folder / "root"))
    driver(root, config(*given), folder / "scratch").drive()
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return played(tmp_path_factory.mktemp("undisturbed"), "Sums")


def test_a_sample_is_a_row_of_turns_and_its_reward_their_sum(undisturbed):
    rows, scores = rollout(undisturbed), rewards(undisturbed)
    for row in rows:
        assert [turn["role"] for turn in row["turns"]] == ["assistant", "user", "assistant", "user", "assistant"]
        ends = [turn["end"] for turn in row["turns"]]
        assert [turn["begin"] for turn in row["turns"]] == [0, *ends[:-1]]
        assert ends[-1] == len(row["response_tokens"])
        for turn in row["turns"]:
            own = row["sampled"][turn["begin"] : turn["end"]]
            assert set(own) <= {turn["role"] == "assistant"}
    given = read_scores(read_part(undisturbed, need(undisturbed, RUN, 1, Stage.ROLLOUT).part("scores.json")))
    assert [score["reward"] for score in scores] == [sum(one.rewards) for one in given]
    assert {len(one.rewards) for one in given} == {3}
    assert len({score["reward"] for score in scores}) > 1


def test_conversations_of_a_run_never_grow_to_different_lengths(undisturbed, tmp_path):
    shorter, prepared = config("Sums", {}, "engine.max_model_len=64"), need(undisturbed, RUN, 0, Stage.PREPARE)
    fact = r"engine\.max_model_len: the run was started with 128, but is now given 64"
    with pytest.raises(InputError, match=fact):
        check_record(undisturbed, RUN, shorter)
    with pytest.raises(InputError, match=fact):
        ask_again(undisturbed, RUN, Wanted(1, Stage.ROLLOUT, "to see", "tests"), ["engine.max_model_len=64"])
    assert not read_revisions(undisturbed, RUN).reruns
    with pytest.raises(InputError, match=fact) as refused:
        check_continued(shorter, undisturbed, Prepared(prepared))
    assert execute(shlex.split(str(refused.value).splitlines()[-1])[1:]) == 0
    assert stored_config(undisturbed, f"{RUN}-fork").engine.max_model_len == 64
    check_record(undisturbed, RUN, config("Sums", {}, "engine.kv_cache_mib=64"))


def test_stored_conversations_are_scored_by_a_function_that_is_named(undisturbed, capfd):
    trial = ["reward", f"{RUN}@1", "--root", undisturbed.url]
    assert execute(trial) == InputError.exit_code
    said = capfd.readouterr().err
    assert "come from its environment" in said
    assert "name a reward function with --function" in said
    assert execute([*trial, "--function", "characters"]) == 0


def test_stored_conversations_are_trained_on_without_their_environment(undisturbed, tmp_path):
    given = retrain_config(undisturbed, "again", {"start": f"{RUN}@1", "select": [RUN]})
    begin_retraining(undisturbed, "again", given)
    driver(undisturbed, given, tmp_path / "again", run="again").drive()
    assert need(undisturbed, "again", 1, Stage.TRAIN).metrics["reward_mean"] == pytest.approx(
        need(undisturbed, RUN, 1, Stage.REWARD).metrics["reward_mean"]
    )


def test_samples_of_a_prompt_meet_the_same_world_and_all_turns_of_a_sample_have_its_seed(undisturbed):
    rows = rollout(undisturbed)
    assert len({row["seed"] for row in rows}) == len(rows)
    worlds = {}
    for row in rows:
        said = row["response_tokens"][row["turns"][1]["begin"] : row["turns"][1]["end"]]
        worlds.setdefault(row["prompt_id"], set()).add(said[-2])  # the digit that follows from the world
    assert all(len(found) == 1 for found in worlds.values())
    assert len({frozenset(found) for found in worlds.values()}) > 1


def events(root):
    """The stored events of all conversations, by the key of their piece."""
    keys = root.keys(f"{RUN}/manifests/000001/rollout.r0.turns")
    pieces = {piece for key in keys if (piece := layout.piece_of_increment(key)) is not None}
    return {piece: [one for record in find_turns(root, piece) for one in record.events] for piece in pieces}


def calls(root):
    """The number of calls whose result is stored, and of those that are open."""
    kinds = [one.kind for some in events(root).values() for one in some]
    return kinds.count("told"), kinds.count("called") - kinds.count("told") - kinds.count("failed")


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param("Sums", 0, marks=pytest.mark.slow), ("Replayed", 1), ("Loaded", 2)]
)
def test_after_random_kills_tokens_and_rewards_are_those_of_an_undisturbed_run(tmp_path, undisturbed, kind, seed):
    draw, root = random.Random(seed), open_root(str(tmp_path / "root"))
    given = config(kind, {}, "environment.retries=9")
    for attempt in range(3):
        at = killing(Stage.ROLLOUT, 1, Point.MID_RESPONSE, draw.randint(2, 20))
        with pytest.raises(Killed):
            driver(root, given, tmp_path / str(attempt), at=at).drive()
    driver(root, given, tmp_path / "last").drive()
    assert rollout(root) == rollout(undisturbed)
    assert rewards(root) == rewards(undisturbed)
    assert identity(root) == identity(undisturbed)
    assert verify(root, RUN).sound


def test_the_kill_of_a_host_under_many_conversations_costs_each_at_most_one_retry(tmp_path):
    many = ("rollout.prompts=12", "environment.retries=1")
    whole, root = played(tmp_path / "whole", "Replayed", {}, *many), open_root(str(tmp_path / "root"))
    records, kills, alone = itertools.count(1), [], threading.Lock()

    def at(_context, point, _key):
        with alone:  # the records of conversations are stored by several threads
            # a record has at most one event of each conversation, so that none has ended at the fourth
            enough = point is Point.MID_RESPONSE and next(records) >= 4
            if enough and not kills and (hosts := host_processes()):
                kills.extend(hosts.values())
                os.kill(*hosts.values(), signal.SIGKILL)
                with suppress(ChildProcessError):  # another one is there in its place
                    # unless it is gone before this record is stored, conversations may end with what it has forked
                    os.waitid(os.P_PID, *hosts.values(), os.WEXITED | os.WNOWAIT)

    driver(root, config("Replayed", {}, *many), tmp_path / "scratch", at=at).drive()
    assert identity(root) == identity(whole)
    assert rewards(root) == rewards(whole)
    found = failures(root)
    assert len(kills) == 1
    assert sum(map(len, found)) > 0
    assert max(map(len, found)) == 1


def failures(root):
    """The failures of each sample, as text."""
    stored = json.loads(read_part(root, need(root, RUN, 1, Stage.ROLLOUT).part("played.json")))
    return [[f"{one['reason']}: {one['detail']}" for one in played["failures"]] for played in stored]


def killed_in_calls(root):
    """End the driving when calls were begun, though not in all conversations, once six results are stored. How many
    records that takes depends on the disk."""

    def at(_context, point, key):
        if point is Point.MID_RESPONSE:
            begun = find_turns(root, layout.piece_of_increment(key))[-1].events
            told, unknown = calls(root)
            if told >= 6 and unknown < 12 and any(one.kind == "called" for one in begun):
                raise Killed

    return at


def test_no_call_whose_result_is_stored_is_made_again(tmp_path):
    log, root = tmp_path / "log", open_root(str(tmp_path / "root"))
    given = ("Replayed", {"log": str(log)})
    with pytest.raises(Killed):
        driver(root, config(*given), tmp_path / "a", at=killed_in_calls(root)).drive()
    told, _ = calls(root)
    before = len(log.read_text().splitlines())
    driver(root, config(*given), tmp_path / "b").drive()
    assert told >= 6
    assert len(log.read_text().splitlines()) - before == 36 - told  # 12 samples of 3 turns


def test_a_call_whose_outcome_is_unknown_is_a_failure_and_with_no_retries_it_is_never_made_again(tmp_path):
    log, root = tmp_path / "log", open_root(str(tmp_path / "root"))
    given = ("Replayed", {"log": str(log)}, "environment.retries=0", "reward.max_failures=1.0")
    with pytest.raises(Killed):
        driver(root, config(*given), tmp_path / "a", at=killed_in_calls(root)).drive()
    _, unknown = calls(root)
    driver(root, config(*given), tmp_path / "b").drive()
    reasons = [score["reason"] for score in rewards(root)]
    assert 0 < unknown == reasons.count("exit") < len(reasons)
    assert len(log.read_text().splitlines()) <= 36


@pytest.mark.parametrize(
    "how", ["die", pytest.param("hang", marks=pytest.mark.slow), pytest.param("stop", marks=pytest.mark.full)]
)
def test_an_environment_that_is_lost_once_costs_only_its_open_turn(tmp_path, undisturbed, how):
    root = played(tmp_path, "Once", {"marks": str(tmp_path), "how": how}, "environment.seconds=12.0")
    rows = rollout(root)
    assert rows == rollout(undisturbed)
    found = [one for some in failures(root) for one in some]
    assert len(found) == 6  # one of each prompt
    reason, words = SAID[how]
    assert all(one.startswith(f"{reason}: {words} '") for one in found)
    assert rewards(root) == rewards(undisturbed)
    found = need(root, RUN, 1, Stage.ROLLOUT).metrics
    assert found["environment_s"] > (0 if how == "die" else 6 * 4.9)  # with the calls that failed
    counted = {name: value for name, value in found.items() if name.startswith("environment_failures")}
    assert counted == dict.fromkeys(
        ("environment_failures", *(f"environment_failures_{one}" for one in (reason, "retried"))), 6
    )
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]  # what it has started


@pytest.mark.slow
def test_no_failure_is_a_number_and_advantages_are_those_of_the_rows_that_survive(tmp_path):
    many = ("rollout.prompts=12", "rollout.samples=6", "reward.max_failures=1.0", "environment.retries=0")
    whole = played(tmp_path / "whole", "Unreliable", {}, *many)
    root = played(tmp_path / "failing", "Unreliable", {"sandbox": 25, "judge": 30}, *many)
    expected = {(one["prompt_id"], one["sample_id"]): one["reward"] for one in rewards(whole)}
    scores = rewards(root)
    failed = [one for one in scores if one["reward"] is None]
    assert 0.1 < len(failed) / len(scores) < 0.9
    assert {one["reason"] for one in failed} == {"exception", "no_number"}
    assert all(one["reward"] == expected[one["prompt_id"], one["sample_id"]] for one in scores if one["reason"] is None)
    samples = read_samples(root, need(root, RUN, 1, Stage.ROLLOUT), need(root, RUN, 1, Stage.REWARD))
    assert samples.usable.tolist() == [one["reward"] is not None for one in scores]
    found = group_advantages(scored(samples))
    assert found.tolist() == pytest.approx(oracle(scores), abs=1e-5)
    counted = need(root, RUN, 1, Stage.REWARD).metrics
    assert counted["unscored"] == len(failed)


def scored(samples):
    return ScoredSamples(samples.rewards, samples.groups, samples.usable, samples.response_lengths)


def oracle(scores):
    """Advantages by hand: of those that have a score, against the mean of those."""
    groups = {}
    for one in scores:
        groups.setdefault(one["prompt_id"], []).append(one["reward"])
    found = []
    for one in scores:
        there = [value for value in groups[one["prompt_id"]] if value is not None]
        spread = statistics.stdev(there) if len(there) > 1 else 0.0
        given = one["reward"] is not None and spread > 0
        found.append((one["reward"] - statistics.mean(there)) / spread if given else 0.0)
    return found


SAID = {
    "die": ("exit", "the process of its environment ended during turn 2 of prompt"),
    "hang": ("timeout", "turn 2 of prompt"),
    "stop": ("timeout", "turn 2 of prompt"),
    "block": ("timeout", "did not end within"),
    "raise": ("exception", "RuntimeError: no (sums.py, line"),
    "message": ("exception", "expected a text, or messages with role and content"),
    "endless": ("exception", "bytes at once; 1048576 are possible"),
    "speaks": ("exception", "speaks after it is done: 'one more'; return None"),
    "nan": ("exception", "expected a finite int or float, or None"),
    "set": ("exception", "it gave what JSON cannot hold"),
}


@pytest.mark.slow
def test_what_is_no_environment_is_named_and_bounded_and_others_go_on(tmp_path):
    settings = ("rollout.prompts=24", "rollout.samples=2", "environment.retries=0", "environment.seconds=8.0")
    root = played(tmp_path, "Bad", {}, "reward.max_failures=1.0", *settings)
    seen = set()
    for row, score, failed in zip(rollout(root), rewards(root), failures(root), strict=True):
        kind = Bad.kind(row["prompt_id"])
        seen.add(kind)
        if kind == "good":
            assert score["reward"] is not None and len(row["turns"]) == 5
            continue
        reason, words = SAID[kind]
        assert (score["reward"], score["reason"]) == (None, reason)
        assert words in score["detail"]
        assert failed == [f"{reason}: {score['detail']}"]
        assert f"of prompt {row['prompt_id']!r}, sample {row['sample_id']}" in score["detail"]
        assert row["response_tokens"] == []
    assert seen == set(KINDS)


def test_further_prompts_are_played_until_enough_groups_have_a_spread(tmp_path):
    given = ("rollout.prompts=2", "rollout.most_prompts=5", "train.policy.leave_out_equal_groups=true")
    root = played(tmp_path, "Sums", None, *given)
    one, scores = need(root, RUN, 1, Stage.ROLLOUT), [row["reward"] for row in rewards(root)]
    assert len(scores) == len(rollout(root)) == 2 * one.facts["cursor"]
    useful = sum(first != second for first, second in zip(scores[::2], scores[1::2], strict=True))
    assert one.metrics["useful_groups"] == useful
    assert useful >= 2 or one.facts["cursor"] == 5


def evaluated(root, iteration):
    manifest = need(root, RUN, iteration, Stage.EVALUATE)
    return manifest, read_table(root, manifest, EVALUATION).to_pylist()


def test_an_evaluation_plays_conversations_at_one_seed_and_goes_on_after_a_kill(tmp_path):
    log = tmp_path / "log"
    given = config("Replayed", {"log": str(log)}, "evaluate.every=1")
    whole, root = open_root(str(tmp_path / "whole")), open_root(str(tmp_path / "root"))
    driver(whole, given, tmp_path / "a").drive()
    called = [json.loads(line) for line in log.read_text().splitlines()]
    held_out = {row["prompt_id"] for row in evaluated(whole, 0)[1]}
    assert len({(name, seed) for name, *_, seed in called if name in held_out}) == HELD_OUT
    with pytest.raises(Killed):
        at = killing(Stage.EVALUATE, 1, Point.MID_RESPONSE, 4)
        driver(root, given, tmp_path / "b", at=at).drive()
    driver(root, given, tmp_path / "c").drive()
    for iteration in (0, 1):
        manifest, rows = evaluated(whole, iteration)
        assert len(rows) == HELD_OUT
        assert manifest.metrics["reward_mean"] == statistics.mean(row["reward"] for row in rows)
        assert (manifest.metrics["turns_mean"], manifest.metrics["turns_max"]) == (3.0, 3.0)
        assert evaluated(root, iteration)[0].digest == manifest.digest
    asked = EvaluationSettings(samples=2, prompts_per_part=1)
    with context_here(whole, given, tmp_path / "d", RUN) as context:
        metrics = evaluation(context, 1, asked).manifest.metrics
    assert metrics["greedy/reward"] == evaluated(whole, 1)[0].metrics["reward_mean"]
    assert (metrics["prompts"], metrics["sampled/errors"]) == (HELD_OUT, 0)


def test_failures_of_an_evaluation_are_counted_apart_from_its_mean(tmp_path):
    settings = ("evaluate.every=1", "evaluate.prompts=24", "data.generate.held_out=24", "reward.max_failures=0.99")
    root = played(tmp_path, "Unreliable", {"sandbox": 25}, *settings, "environment.retries=0")
    manifest, rows = evaluated(root, 1)
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    assert 0 < len(scored) < len(rows) == 24
    assert manifest.metrics["reward_mean"] == pytest.approx(statistics.mean(scored))
    lost = len(rows) - len(scored)
    assert manifest.metrics["unscored"] == manifest.metrics["environment_failures_exception"] == lost
