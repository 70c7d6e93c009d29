"""Rewards that cannot work: the exit code, the message, and proof that nothing heavy was imported for it."""

import pytest

from tests.bad_input.conftest import check_refused
from tests.bad_input.test_command import CONFIG

GOOD = "def score(record, response):\n    return 1.0\n"
FILES = {
    "good.py": GOOD,
    "syntax.py": "def score(record, response)\n    return 1.0\n",
    "imports.py": "import no_such_package\n" + GOOD,
    "raises.py": "raise RuntimeError('no key in the safe')\n",
    "exits.py": "import sys\nsys.exit('not today')\n",
    "dies.py": "import os\nos._exit(7)\n",
    "hangs.py": "import time\ntime.sleep(600)\n",
    "parts.py": """
def score(record, response): return {"right": response == record["answer"]}
def other(record, response): return record["solution"] in response
""",
    "wrong.py": """
LIMIT = 3
class Judge:
    def __call__(self, record, response): return 1.0
def one(record): return 1.0
def four(record, response, sample, more): return 1.0
def named(record, response, *, scale): return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
""",
}
SEVERAL = '[{{name = "right", function = "exact_match"{}}}, {{name = "{}", function = "good.py:score"{}}}]'


def of(function: str, *more: str) -> list[str]:
    return [f"reward.function={function}", *more]


CASES = {
    "no such file": (of("missing.py:score"), ["there is no file missing.py in ", "Give the path"]),
    "no such absolute file": (of("/no/such/own.py:score"), ["/no/such/own.py cannot be read"]),
    "no function in a file": (of("good.py"), ["names no function in the file", "good.py:FUNCTION"]),
    "no such function": (of("good.py:scores"), ["'good.py:scores' cannot be used", "good.py has no 'scores'"]),
    "no name": (of("good.py:"), ["is not the name of a function"]),
    "a URL": (of("s3://bucket/own.py:score"), ["is at a URL", "copy the file"]),
    "no such module": (of("no.such.module:score"), ["cannot be used", "No module named 'no'"]),
    "no such entry point": (of("exact_mach"), ["is unknown", "exact_match", "file.py:function"]),
    "not callable": (of("wrong.py:LIMIT"), ["LIMIT is of type int, not a function"]),
    "a class": (of("wrong.py:Judge"), ["Judge is a class, not a function: name an instance of it"]),
    "one argument": (of("wrong.py:one"), ["(record) has no parameter 'response'", "known are (record, response), "]),
    "four arguments": (of("wrong.py:four"), ["(record, response, sample, more) requires 'more', which is not given"]),
    "an argument that is missing": (of("wrong.py:named"), ["requires 'scale'", "set its arguments"]),
    "the signature of verl": (
        of("wrong.py:compute_score"),
        ["'wrong.py:compute_score' cannot be used: (data_source, solution_str,", "has no parameter 'record'"],
    ),
    "an argument that it does not take": (
        of("good.py:score", "reward.arguments.scale=1"),
        ["(record, response) has no parameter 'scale' for that argument"],
    ),
    "an argument that ours does not take": (of("regex"), ["'regex' cannot be used", "'pattern'"]),
    "syntax": (of("syntax.py:score"), ["SyntaxError", "syntax.py, line 1"]),
    "an import that fails": (of("imports.py:score"), ["No module named 'no_such_package'", "imports.py, line 1"]),
    "a module that raises": (of("raises.py:score"), ["RuntimeError: no key in the safe (raises.py, line 1)"]),
    "a module that exits": (of("exits.py:score"), ["SystemExit: not today"]),
    "a module that ends its process": (of("dies.py:score"), ["while it was imported, its process ended with code 7"]),
    "a module that hangs": (
        of("hangs.py:score", "reward.start_deadline_s=0.5"),
        ["it was not imported within 0.5 s"],
    ),
    "a secret that is not set": (
        of("wrong.py:named", "reward.arguments.scale=env:RATCHET_NO_SUCH"),
        ["reward.arguments.scale is env:RATCHET_NO_SUCH", "export"],
    ),
    "a literal secret": (of("good.py:score", "reward.arguments.api_key=sk-4711"), ["looks like a secret", "env:NAME"]),
    "a literal secret of one of several": (
        ["reward.functions=" + SEVERAL.format("", "b", ', arguments = {api_key = "sk-4711"}')],
        ["reward.functions", "looks like a secret"],
    ),
    "two of one name": (
        ["reward.functions=" + SEVERAL.format("", "right", "")],
        ["two functions with the name 'right'"],
    ),
    "a name that is none": (["reward.functions=" + SEVERAL.format("", "a b", "")], ["reward.functions", "name", "a b"]),
    "one and several": (
        of("good.py:score", "reward.functions=" + SEVERAL.format("", "b", "")),
        ["reward.functions excludes reward.function"],
    ),
    "weights beside several": (
        ["reward.weights.right=2", "reward.functions=" + SEVERAL.format("", "b", "")],
        ["reward.functions excludes"],
    ),
    "an unknown key of one of several": (
        ["reward.functions=" + SEVERAL.format(", wieght = 2", "b", "")],
        ["reward.functions.0.wieght: unknown key", "weight"],
    ),
    "a weight that is not a number": (of("good.py:score", "reward.weights.a=much"), ["reward.weights.a", "number"]),
    "a weight that is not finite": (of("good.py:score", "reward.weights.a=nan"), ["reward.weights.a", "finite"]),
    "a weight of a component that does not come back": (
        of("parts.py:score", "reward.weights.rihgt=0.5"),
        ["6 of 6 calls", "returned right, but there is a weight for rihgt", "reward.try = false"],
    ),
    "a field that is not there": (of("parts.py:other"), ["KeyError: 'solution' (parts.py, line 3)"]),
    "a word for whether it is tried": (of("good.py:score", "reward.try=maybe"), ["reward.try", "maybe"]),
    "a share above one": (["reward.max_failures=10"], ["reward.max_failures", "less than or equal to 1"]),
    "a deadline of nothing": (["reward.deadline_s=0"], ["reward.deadline_s", "greater than 0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "words"), CASES.values(), ids=CASES)
def test_a_bad_reward_is_refused_before_anything_heavy(command, tmp_path, settings, words):
    check_refused(command, tmp_path, {"run.toml": CONFIG, **FILES}, settings, words)


def test_two_different_files_of_one_name_are_refused(command, tmp_path):
    for folder, text in (("there", GOOD), ("here", GOOD.replace("1.0", "2.0"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "good.py").write_text(text)
    (tmp_path / "there" / "run.toml").write_text(CONFIG)
    asked = ["run", "../there/run.toml", "--run", "a", "--set", "reward.function=good.py:score"]
    outcome = command(asked, tmp_path / "here")
    assert outcome.code == 2
    assert "are different files" in outcome.said
    assert outcome.imported == []


TRIALS = {
    "no such run": (["reward", "nobody@1"], "there is no run 'nobody'"),
    "no number": (["reward", "a@first"], "is not an iteration"),
    "no iteration": (["reward", "a"], "lacks @ITERATION"),
}


@pytest.mark.parametrize(("words", "said"), TRIALS.values(), ids=TRIALS)
def test_a_trial_of_nothing_is_refused(command, tmp_path, words, said):
    outcome = command(words, tmp_path)
    assert outcome.code == 2
    assert said.lower() in outcome.said.lower()
    assert outcome.imported == []
