"""Values are bound to the parameters of a reward function by name; another signature is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import InputError
from tasks.config.reward import RewardSection
from tasks.rewards.calling import Caller, NotCallable, parameters_of
from tasks.rewards.sample import Sample
from tasks.rewards.scoring import score_responses
from tasks.rewards.trying import check_reward
from tests.tasks.rewards.orders import responses


def function_of(text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(text, space)
    return space["f"]


BY_NAME = {
    "swapped": ("def f(response, record):\n    return len(response) + 10 * len(record)", {}, 11.0),
    "by keyword alone": ("def f(*, sample, response, record):\n    return sample.sample_id + len(record)", {}, 1.0),
    "by position alone": (
        "def f(record, more=5, response='', scale=2, /):\n    return more * scale",
        {"scale": 3},
        15.0,
    ),
    "more with defaults": ("def f(record, response, ground_truth=None):\n    return ground_truth is None", {}, 1.0),
    "a sample with a default": ("def f(record, response, scale=3, sample=None):\n    return sample.iteration", {}, 3.0),
    "any": ("def f(**given):\n    return len(given)", {"scale": 1}, 3.0),
    "decorated": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(*a, **b):\n        return 2 * g(*a, **b)\n"
        "    return h\n@twice\ndef f(response, record, sample):\n    return len(record) + sample.iteration",
        {},
        8.0,
    ),
    "a part": (
        "import functools\ndef g(scale, response, record):\n    return scale\nf = functools.partial(g, 4)",
        {},
        4.0,
    ),
    "a method": ("class A:\n    def f(self, response, record):\n        return len(record)\nf = A().f", {}, 1.0),
}


@pytest.mark.parametrize(("text", "arguments", "expected"), BY_NAME.values(), ids=BY_NAME)
def test_values_are_bound_by_name(text, arguments, expected):
    caller = Caller(function_of(text), arguments, {}, batch=False)
    assert caller.one({"answer": "42"}, "a", Sample("p", 0, 3, "stop", (7,))).reward == expected


FOREIGN = {
    "verl": (
        "data_source, solution_str, ground_truth, extra_info=None",
        ["'record'", "requires 'data_source'", "name its"],
    ),
    "TRL": ("completions, **kwargs", ["requires 'completions'", "name its parameters so"]),
    "TRL with prompts": ("prompts, completions, answer", ["requires 'answer'"]),
    "OpenRLHF": ("queries, prompts, labels", ["requires 'labels'"]),
    "two of other names": ("prompt, completion", ["has no parameter 'record'", "requires 'prompt'"]),
    "any by position": ("*given", ["has no parameter 'record'", "has no parameter 'response'"]),
    "no record": ("response", ["has no parameter 'record'"]),
    "a third": ("record, response, info", ["requires 'info', which is not given"]),
    "of a batch": ("records, responses", ["set batch = true"]),
    "of a batch, with samples": ("responses, records, samples", ["set batch = true"]),
    "all by default": ("a=1, b=2", ["has no parameter 'record'"]),
    "nothing": ("", ["has no parameter 'response'"]),
}
KNOWN = "(record, response), (record, response, sample) and, with batch = true, (records, responses[, samples])"


@pytest.mark.parametrize(("parameters", "words"), FOREIGN.values(), ids=FOREIGN)
def test_other_signatures_are_refused_with_those_that_are_known(parameters, words):
    with pytest.raises(NotCallable) as refused:
        parameters_of(function_of(f"def f({parameters}):\n    return 1.0"), {}, batch=False)
    assert all(word in str(refused.value) for word in [f"({parameters})", KNOWN, *words]), refused.value


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (RewardSection(batch=True), ["(record, response, *, field='answer')", "set batch = false"]),
        (RewardSection(arguments={"record": 1}), ["cannot be given 'record' as an argument"]),
        (RewardSection(function="operator:eq"), ["(a, b, /) has no parameter 'record'"]),
    ],
)
def test_functions_that_cannot_be_called_so(section, words):
    with pytest.raises(InputError) as refused:
        check_reward(section)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_function_whose_parameters_have_no_names_is_refused():
    with pytest.raises(NotCallable, match=r"the names of its parameters are not known\. Values are given by name"):
        parameters_of(max, {}, batch=False)


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return ground_truth in solution_str
"""
REPAIRED = {
    "set batch = true": ("def f(records, responses):\n    return [1.0]", {"batch": True}),
    "set batch = false": ("def f(record, response):\n    return 1.0", {"batch": False}),
    "call it from a function that has these": (
        f"{VERL}\ndef f(record, response):\n    return compute_score('math', response, record['answer'])",
        {},
    ),
    "set its arguments": ("def f(record, response, scale):\n    return scale", {"arguments": {"scale": 1}}),
    "give file.py:function": ("def f(record, response):\n    return 1.0", {}),
}
BROKEN = {
    "set batch = true": {"batch": False},
    "set batch = false": {"batch": True},
    "call it from a function that has these": {"name": "compute_score"},
    "set its arguments": {"arguments": {}},
    "give file.py:function": {"function": "own.f"},
}


@pytest.mark.slow
@pytest.mark.parametrize("repair", REPAIRED)
def test_each_repair_that_is_printed_works(tmp_path, repair):
    text, more = REPAIRED[repair]
    (tmp_path / "own.py").write_text(text)
    broken = {"function": f"{tmp_path}/own.py:f", **more, **BROKEN[repair]}
    if name := broken.pop("name", ""):
        broken["function"] = f"{tmp_path}/own.py:{name}"
    with pytest.raises(InputError) as refused:
        check_reward(RewardSection.model_validate(broken))
    assert repair in str(refused.value)
    section = RewardSection.model_validate({"function": f"{tmp_path}/own.py:f", **more})
    check_reward(section)
    assert [one.reward for one in score_responses(section, responses(["42"])).scores if one] == [1.0]
