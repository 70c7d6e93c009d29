"""A judge as reward function: its failures are not scores, and what it was asked it is not asked again."""

import json
import threading
import time

import pytest

from flows.iteration import begin, iterate
from storage.backends.root import open_root
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import need
from storage.parts import read_table
from storage.schema import REWARD
from storage.upkeep.verify import verify
from tasks.config.reward import RewardSection
from tasks.rewards.judge import Judge as Settings
from tasks.rewards.judge import Judges, judged
from tasks.rewards.trying import check_reward
from tasks.stages.names import Stage
from tasks.stages.trial import try_reward
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.here import WorkersHere, context_here
from tests.tasks.rewards.judging import RUBRIC, Judge, judging, number_in

FAULTS = (500, 400, 429, "no score", "html", 503, "nan")
REASONS = dict.fromkeys((500, 400, 429, 503), "exception")


def asked(count):
    return [({"question": "?"}, f"answer {number}") for number in range(count)]


def test_planted_failures_are_never_numbers():
    """30 % of the questions fail for good, and as many once."""

    def plan(text, before):
        place = number_in(text)
        lasting, once = place % 10 < 3, place % 10 > 6
        return FAULTS[place // 10] if lasting or (once and not before and FAULTS[place // 10] != 400) else None

    judge = Judge(plan)
    with judging(judge) as url:
        arguments = {"url": url, "model": "m", "rubric": RUBRIC, "retries": 1, "at_once": 40}
        scores = judged(arguments, asked(70), Judges())
    for place, score in enumerate(scores):
        fault = FAULTS[place // 10]
        if place % 10 < 3:
            assert (score.reward, score.reason) == (None, REASONS.get(fault, "no_number"))
            assert score.detail
        else:
            assert score.reward == len(RUBRIC.format(question="?", response=f"answer {place}")) % 10


@pytest.mark.parametrize(
    ("said", "flaw"),
    [
        ("Score: " + "9" * 400, "not finite as float32"),
        ("Score: 1" + "0" * 39, "not finite as float32"),
        ([{"type": "text", "text": "Score: 1"}], "not of the OpenAI form"),
        (7, "not of the OpenAI form"),
    ],
)
def test_what_an_answer_says_is_a_number_or_no_score(said, flaw):
    judge = Settings(url="http://judge", model="m", rubric=RUBRIC)
    with pytest.raises(ValueError, match=flaw):
        judge.read(json.dumps({"choices": [{"message": {"content": said}}]}))
    with pytest.raises(ValueError, match="not of the OpenAI form"):
        judge.read("[" * 100_000)


def test_a_judge_that_hangs():
    with judging(Judge(lambda text, before: "hang")) as url:
        arguments = {"url": url, "model": "m", "rubric": RUBRIC, "retries": 0, "seconds": 0.2}
        (score,) = judged(arguments, asked(1), Judges())
    assert (score.reward, score.reason, score.status) == (None, "timeout", "timeout")


def test_few_failures_are_enough_to_end():
    judge = Judge(lambda text, before: 400)
    with judging(judge) as url:
        arguments = {"url": url, "model": "m", "rubric": RUBRIC, "at_once": 1}
        scores = judged(arguments, asked(50), Judges(), allowed=2)
    assert [score is None for score in scores] == [False] * 3 + [True] * 47
    assert len(judge.asked) == 3  # status 400 is not tried again


def test_equal_responses_are_asked_about_once_and_requests_keep_their_distance(monkeypatch):
    judge, waits = Judge(), []
    monkeypatch.setattr(time, "sleep", waits.append)
    with judging(judge) as url:
        arguments = {"url": url, "model": "m", "rubric": RUBRIC, "per_minute": 1}
        scores = judged(arguments, asked(6) * 5, Judges())
    assert len(judge.asked) == 6
    assert [score.reward for score in scores[:6]] * 5 == [score.reward for score in scores]
    assert max(waits) > 200  # five minutes, less what has passed meanwhile


def flawed(root):
    """Flawed objects, but for the configuration, which nobody has recorded."""
    return [one.key for one in verify(root, "small").findings if one.key != "small/run.json"]


@pytest.fixture
def judged_run(tmp_path, monkeypatch):
    """A run whose first iteration is scored by a judge, its root and its settings."""
    monkeypatch.setenv("JUDGE_KEY", "very-secret-key")
    root, judge = open_root(str(tmp_path / "root")), Judge()
    with judging(judge) as url:
        arguments = f'{{url="{url}", model="m", rubric="{{prompt}} {{response}}", api_key="env:JUDGE_KEY"}}'
        settings = ['reward.function="judge"', f"reward.arguments={arguments}", "evaluate.every=0", "reward.try=false"]
        config = small_config([*settings, "run.iterations=1"])
        with context_here(root, config, tmp_path / "scratch", workers=WorkersHere(config)) as context:
            iterate(context, 1, begin(context))
        yield root, config, judge, tmp_path


def test_a_rerun_asks_nothing_and_another_rubric_asks_only_the_judge(judged_run):
    root, config, judge, folder = judged_run
    rewards = read_table(root, need(root, "small", 1, Stage.REWARD), REWARD, ["reward"])["reward"].to_pylist()
    first = len(judge.asked)
    assert 0 < first <= PROMPTS * SAMPLES
    assert judge.keys == {"Bearer very-secret-key"}
    again = try_reward(root, "small", 1, config.reward)
    assert (again.changed, again.unscored, len(judge.asked)) == (0, 0, first)
    other = {**config.reward.arguments, "rubric": "In the other way: {prompt} {response}"}
    for _ in range(2):
        trial = try_reward(root, "small", 1, config.reward.model_copy(update={"arguments": other}))
        assert trial.changed == PROMPTS * SAMPLES  # the judge counts characters
        assert len(judge.asked) == 2 * first
    assert rewards == read_table(root, need(root, "small", 1, Stage.REWARD), REWARD, ["reward"])["reward"].to_pylist()
    stored = list((folder / "root" / "small" / "exchanges").iterdir())
    assert len(stored) == 2 * first
    kept = RunExchanges(root, "small").find(stored[0].stem)
    assert kept is not None
    assert "I say so" in kept.response
    assert not any(b"very-secret" in path.read_bytes() for path in (folder / "root").rglob("*") if path.is_file())
    assert flawed(root) == []
    stored[0].write_bytes(stored[0].read_bytes().replace(b"I say so", b"I say no"))
    assert flawed(root) == [f"small/exchanges/{stored[0].name}"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rubric": "well?"}, r"must contain \{response\}"),
        ({"url": "localhost:80"}, "reward.arguments.url"),
        ({"score": "score"}, "has no group"),
        ({"model": None}, "reward.arguments.model"),
        ({"temprature": 1}, "reward.arguments.temprature"),
        ({"api_key": "env:NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_the_run(change, told):
    arguments = {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": RUBRIC, **change}
    with pytest.raises(InputError, match=told):
        check_reward(RewardSection.model_validate({"function": "judge", "arguments": arguments}))


def test_an_address_that_nobody_listens_at():
    arguments = {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": RUBRIC, "retries": 0}
    (score,) = judged(arguments, asked(1), Judges())
    assert (score.reward, score.reason) == (None, "exception")
    assert "cannot be reached" in score.detail
    (lacking,) = judged({**arguments, "rubric": "{solution} {response}"}, asked(1), Judges())
    assert "lacks" in lacking.detail


def test_exchanges_of_two_at_once(tmp_path):
    """The first answer counts for both."""
    judge, lock = Judge(score=lambda text: len(judge.asked)), threading.Barrier(2)
    kept = RunExchanges(open_root(str(tmp_path)), "small")
    found = []

    def score():
        lock.wait()
        found.extend(judged(arguments, asked(1), Judges(kept)))

    with judging(judge) as url:
        arguments = {"url": url, "model": "m", "rubric": RUBRIC}
        threads = [threading.Thread(target=score) for _ in range(2)]
        [one.start() for one in threads]
        [one.join() for one in threads]
    assert len({score.reward for score in found}) == 1
