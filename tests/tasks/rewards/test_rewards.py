"""Reward functions: ours, their permitted results, and their permitted calls."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.digest import bytes_digest, file_digest
from storage.errors import InputError
from tasks.config.reward import RewardSection
from tasks.rewards import answers, match, math, notation
from tasks.rewards.match import characters, exact_match, regex
from tasks.rewards.pool import Response
from tasks.rewards.resolve import OURS, find_reward
from tasks.rewards.scoring import score_responses, scoring_processes, sources_of
from tests.tasks.rewards.misbehaving import RETURNED
from tests.tasks.rewards.orders import HELPERS, RECORD, order, responses, scores


@pytest.mark.parametrize(("response", "score"), [("42", 1.0), (" 42\n", 1.0), ("43", 0.0), ("42 ", 1.0), ("", 0.0)])
def test_exact_match(response, score):
    assert exact_match(RECORD, response) == score


@pytest.mark.parametrize(("response", "score"), [("42", 1.0), ("4", 0.5), ("24", 0.0), ("424", 2 / 3)])
def test_characters(response, score):
    assert characters(RECORD, response) == score


@pytest.mark.parametrize(
    ("pattern", "response", "score"),
    [
        ("[0-9]+", "first 7, then 42", 1.0),
        (r"#### (\d+)", "42 #### 41", 0.0),
        (r"#### (\d+)", "#### 42", 1.0),
        ("x", "42", 0.0),
    ],
)
def test_regex_takes_the_last_match(pattern, response, score):
    assert regex(RECORD, response, pattern=pattern) == score


@pytest.mark.parametrize("value", [None, "", " ", ["42"], 42.0, True, {"a": "42"}])
def test_an_answer_that_is_no_text_scores_nothing(value):
    """A response could equal the result of `str`: "['42']", "True", and, for an empty field, the end at once."""
    assert exact_match({"answer": 42}, "42") == 1.0
    for record in ({"answer": value}, {}):
        for function in (exact_match, characters, partial(regex, pattern=".*")):
            with pytest.raises(ValueError, match=r"field 'answer' of the record is .*, but a text or an integer"):
                function(record, str(value))


# a change that makes one of our functions score differently raises its version in tasks/rewards/resolve.py
CONTENT = {
    match: "d89d097f8449837c2d60786e5db89f14",
    answers: "bb673d394a50f483d6547abe51ef71a4",
    math: "62d86a874238f332500d1cb26b856af6",
    notation: "13cab19f2c5b7a761ade195308a9f3ab",
}


def test_our_functions_do_not_change_by_accident():
    assert {traits.version for traits in OURS.values()} == {1}
    assert {module.__name__: file_digest(Path(module.__file__))[0] for module in CONTENT} == {
        module.__name__: digest for module, digest in CONTENT.items()
    }


def test_math_verify_in_processes_knows_equal_expressions():
    texts = ("$0.5$", r"the answer is $\frac{2}{4}$", "$0.6$")
    found = scores(order("math_verify", deadline_s=60), texts, {"answer": r"$\frac{1}{2}$"})
    assert [score.status for score in found] == ["ok"] * 3
    assert [score.reward for score in found] == [1.0, 1.0, 0.0]


FIRST_SAMPLE = """
import sys
from tasks.rewards.math import math_verify

before = set(sys.modules)
math_verify({"answer": "2"}, "1 + 1")
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_the_first_sample_is_not_charged_with_the_import_of_a_library():
    done = subprocess.run([sys.executable, "-c", FIRST_SAMPLE], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"antlr4", "sympy"}  # some of their modules: hundredths of a second


NO_REWARD = {
    "nan": ("non_finite", "returned nan, which is not finite as float32"),
    "infinity": ("non_finite", "returned -inf, which is not finite"),
    "numpy": ("non_finite", r"returned .*nan.*, which is not finite"),
    "too large": ("non_finite", r"3.5e\+38, which is not finite as float32"),
    "huge": ("non_finite", r"returned 1000.*, which is not finite"),
    "text": ("no_number", "returned '0.5', which is not a number"),
    "nothing": ("no_number", "returned None, which is not a number"),
    "list": ("no_number", r"returned \[0.5\], which is not a number"),
    "complex": ("no_number", "complex"),
    "empty": ("no_number", "returned a mapping of 0 components"),
    "part": ("non_finite", "component 'bad' is nan, which is not finite"),
    "sum": ("non_finite", "the sum of one, two is 6e.*, which is not finite"),
}
REWARDS = {
    "integer": 1.0,
    "truth": 1.0,
    "fraction": 0.25,
    "half": 0.5,
    "largest": -float(np.finfo(np.float32).max),
    "parts": -0.75,
}


def test_what_is_no_finite_number_is_an_error_and_no_reward():
    assert {*NO_REWARD, *REWARDS} == RETURNED.keys()
    found = dict(zip(RETURNED, scores(order(f"{HELPERS}:returning"), list(RETURNED), processes=2), strict=True))
    for name, (reason, detail) in NO_REWARD.items():
        assert (found[name].status, found[name].reward, found[name].reason) == ("error", None, reason), name
        assert re.search(detail, found[name].detail), (name, found[name])
    assert {name: found[name].reward for name in REWARDS} == REWARDS
    assert found["parts"].components == {"good": 0.25, "bad": -1.0}
    stored = pa.array([score.reward for score in found.values()], pa.float32())
    assert np.isfinite(stored.drop_null().to_numpy()).all()


def test_a_message_that_is_no_text_can_be_stored_too():
    (score,) = scores(order(f"{HELPERS}:complaining"), ["this"])
    assert (
        pa.array([score.detail], pa.string())[0].as_py().startswith("ValueError: cannot read this\\udc80 (misbehaving")
    )


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("exact_matsch", "is unknown: installed are characters, code_tests, exact_match"),
        ("/no/such/file.py:f", "/no/such/file.py cannot be read"),
        ("reward.py", "names no function in the file"),
        ("package.module:", "'' is not the name of a function"),
    ],
)
def test_a_reward_that_cannot_be_found(name, fact):
    with pytest.raises(InputError, match=fact):
        find_reward(name)


ARGUMENTS = {"api_key": "env:RATCHET_TEST_KEY", "headers": {"Authorization": "env:RATCHET_TEST_KEY"}}


def test_a_secret_reaches_the_function_and_no_record(monkeypatch):
    secret = "sk-4711-very-secret-indeed"
    monkeypatch.setenv("RATCHET_TEST_KEY", secret)
    section = RewardSection(function=f"{HELPERS}:judged", arguments=ARGUMENTS, deadline_s=20)
    texts = ["fine", "raise", "tell", "die", "cut"]
    found = score_responses(section, responses(texts, {"key": secret}), patient=True).scores
    assert [score.reward for score in found] == [1.0, None, None, None, None]
    assert "401 for *** with ***" in found[1].detail
    for score in found:
        assert not any(part in score.detail for part in ("4711", "very", "indeed")), score
    assert section.arguments == ARGUMENTS


def test_a_secret_that_is_not_set_is_named_before_anything_is_scored(monkeypatch):
    monkeypatch.delenv("RATCHET_TEST_KEY", raising=False)
    with pytest.raises(InputError, match="RATCHET_TEST_KEY is not set"):
        score_responses(RewardSection(function=f"{HELPERS}:judged", arguments=ARGUMENTS), responses(["x"]))


OWN = """
import asyncio
import pickle
from helper import ONE
from tasks.rewards.sample import Sample

def three(record, response, sample: Sample):
    return {"tokens": sum(sample.tokens), "id": sample.sample_id, "at": sample.iteration,
            "stopped": sample.finish_reason == "stop", "named": sample.prompt_id == "p"}

def optional(record, response, sample=None):
    return sample.sample_id

def length(record, response):
    return len(response) + len(record["answer"])

class Thing:
    pass

def picklable(record, response):
    return type(pickle.loads(pickle.dumps(Thing()))) is Thing and Thing.__module__ == "own"

def default(record, response, scale=2):
    return scale

def bound(record, response, scale):
    return scale

class Scale:
    def __call__(self, record, response):
        return 4 * ONE

callable_object = Scale()

queue = asyncio.Queue()

async def waiting(record, response):
    await asyncio.sleep(0)
    await queue.put(response)  # belongs to one loop
    return len(await queue.get())

def batch(records, responses, samples):
    return [len(responses) + sample.sample_id for sample in samples]

async def batch_waiting(records, responses):
    return await asyncio.gather(*(waiting(*one) for one in zip(records, responses)))

def too_few(records, responses):
    return responses[1:]

def a_mapping(records, responses):
    return dict.fromkeys(responses, 1.0)

def mixed(records, responses):
    return [1.0 if text == "a" else float("nan") for text in responses]
"""


@pytest.fixture
def own(tmp_path):
    """A reward file with a module of its own beside it."""
    (tmp_path / "helper.py").write_text("ONE = 1\n")
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def rewards_of(own, name, texts=("a", "bb", "c"), arguments=None, **more):
    return [score.reward for score in scores(order(f"{own}:{name}", arguments, **more), texts)]


def test_a_third_argument_knows_the_sample(own):
    (_, second) = scores(order(f"{own}:three"), ["a", "b"])
    assert second.components == {"tokens": 8.0, "id": 1.0, "at": 3.0, "stopped": 1.0, "named": 1.0}
    assert second.reward == 14.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("optional", {}, [0.0, 1.0, 2.0]),
        ("default", {}, [2.0] * 3),
        ("default", {"scale": 3}, [3.0] * 3),
        ("bound", {"scale": 3}, [3.0] * 3),
        ("callable_object", {}, [4.0] * 3),
        ("waiting", {}, [1.0, 2.0, 1.0]),
        ("picklable", {}, [1.0] * 3),
    ],
)
def test_a_function_is_called_as_it_is_written(own, name, arguments, expected):
    assert rewards_of(own, name, arguments=arguments) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("batch", [3.0, 4.0, 5.0]),
        ("batch_waiting", [1.0, 2.0, 1.0]),
        ("too_few", [None] * 3),
        ("a_mapping", [None] * 3),
        ("mixed", [1.0, None, None]),
    ],
)
def test_a_batch_is_one_call_whatever_the_number_of_processes(own, name, expected):
    given = order(f"{own}:{name}", batch=True)
    for processes in (1, 3):
        assert [score.reward for score in scores(given, ["a", "bb", "c"], processes=processes)] == expected


def test_a_batch_that_is_lost_is_lost_for_all(own):
    found = scores(order(f"{HELPERS}:losing", batch=True), ["a", "b"])
    assert [(score.reason, score.reward) for score in found] == [("exception", None)] * 2


def test_long_texts_arrive_whole(own):
    (score,) = scores(order(f"{own}:length"), ["x" * 5_000_000 + "\n"], {"answer": "ü\n" * 1_000_000})
    assert score.reward == 7_000_001


def test_weights_of_components(own):
    (score,) = scores(order(f"{own}:three", weights={"tokens": 0.5, "id": 0}), ["a"])
    assert score.reward == 0.5 * 7 + 3 + 1 + 1
    (wrong,) = scores(order(f"{own}:three", weights={"tokens": 0.5, "format": 1}), ["a"])
    assert wrong.detail == "returned tokens, id, at, stopped, named, but there is a weight for format"
    (nan,) = scores(order(f"{HELPERS}:returning", weights={"x": 1}), ["nan"])
    assert nan.reason == "non_finite"
    (single,) = scores(order(f"{own}:default", weights={"x": 1}), ["a"])
    assert single.detail == "returned 2, but weights need a mapping of named components"


def test_several_functions_are_summed_by_weight(own):
    section = RewardSection.model_validate(
        {
            "functions": [
                {"name": "right", "function": "exact_match", "weight": 2},
                {"name": "shape", "function": f"{own}:three", "weight": 0.5, "weights": {"tokens": 10}},
            ]
        }
    )
    found = score_responses(section, responses(["42"]))
    shape = 10 * 7 + 0 + 3 + 1 + 1
    assert found.scores[0].reward == 2 * 1 + 0.5 * shape
    parts = {"shape/tokens": 7.0, "shape/id": 0.0, "shape/at": 3.0, "shape/stopped": 1.0, "shape/named": 1.0}
    assert found.scores[0].components == {"right": 1.0, "shape": shape, **parts}
    read = bytes_digest(OWN.encode()) + bytes_digest(b"ONE = 1\n")
    assert found.sources == {"exact_match": "version 1", "own.py:three": bytes_digest(read.encode())}


def test_one_failing_function_of_several_leaves_the_sample_without_a_score():
    section = RewardSection.model_validate(
        {
            "functions": [
                {"name": "right", "function": "exact_match"},
                {"name": "other", "function": f"{HELPERS}:crashing", "weight": 0},
            ]
        }
    )
    one, two = score_responses(section, responses(["raise", "42"]), patient=True).scores
    assert (one.reward, one.components, one.detail.partition(" ")[0]) == (None, None, "other:")
    assert (two.reward, two.components) == (1.0, {"right": 1.0, "other": 0.5})


def test_only_what_cannot_hang_is_scored_in_the_calling_process():
    assert scoring_processes(RewardSection()) == 0
    assert scoring_processes(RewardSection(function=f"{HELPERS}:crashing")) == 1
    found = score_responses(RewardSection(), [Response({}, "42"), Response(RECORD, "42")], patient=True).scores
    assert [score.reward for score in found] == [None, 1.0]
    assert found[0].detail.startswith("ValueError: field 'answer' of the record is None")


def test_a_pattern_that_takes_for_ever_does_not_hold_up_the_run():
    section = RewardSection(function="regex", arguments={"pattern": "(a+)+$"}, deadline_s=0.5)
    (score,) = score_responses(section, responses(["a" * 27 + "b"]), patient=True).scores
    assert (score.reward, score.reason) == (None, "timeout")


def test_what_functions_are_made_of_is_known_before_they_score(tmp_path, monkeypatch):
    """The sources of a package, which is imported for that, and of two files of one name are known too."""
    text = "def score(record, response):\n    return 1\n"
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.py").write_text(f"{text}# {number}\n")
    (tmp_path / "made_of.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    named = {"one": f"{tmp_path}/a/my.py:score", "two": f"{tmp_path}/b/my.py:score", "three": "made_of:score"}
    document = {
        "functions": [{"name": name, "function": given} for name, given in {**named, "own": "exact_match"}.items()]
    }
    section = RewardSection.model_validate(document)
    found = sources_of(section)
    assert dict(score_responses(section, responses(["42"])).sources) == found
    assert set(found) == {"my.py:score", "two: my.py:score", "made_of:score", "exact_match"}
    assert len(set(found.values())) == 4


def test_a_source_is_the_file_the_function_is_from(own, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(own).parent))
    (Path(own).parent / "outer.py").write_text("from own import default\n")
    found = score_responses(RewardSection(function="outer:default"), responses(["a"]))
    (read,) = found.sources.values()
    assert len({read, file_digest(own)[0], file_digest(Path(own).parent / "outer.py")[0]}) == 3  # both files count


@pytest.mark.parametrize(
    ("imported", "counts"),
    [
        ("from beside import number", True),
        ("import numpy", False),
        pytest.param("import beside", True, marks=pytest.mark.slow),
        pytest.param("import re, json", False, marks=pytest.mark.slow),
    ],
)
def test_a_source_is_also_what_its_file_imports(tmp_path, imported, counts):
    """The user's own files, not the libraries."""
    text = f"{imported}\ndef score(record, response):\n    return 1\n"
    (tmp_path / "my.py").write_text(text)
    section = RewardSection(function=f"{tmp_path}/my.py:score")
    found = []
    for number in (1, 2):
        (tmp_path / "beside.py").write_text(f"number = {number}\n{'#' * number}")  # another size: no cache of the first
        found.append(sources_of(section)["my.py:score"])
        assert score_responses(section, responses(["42"])).sources == {"my.py:score": found[-1]}
    assert (found[0] != found[1]) == counts == (bytes_digest(text.encode()) not in found)
