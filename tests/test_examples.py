"""The examples, one a door, are short and named by a page; the reward scores. Tests of each door run the others."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config.code_version import PROJECT_ROOT
from tasks.config.reward import RewardSection
from tasks.environments.calculator import Calculator
from tasks.environments.calls import by_tags, recorded
from tasks.rewards.pool import Response
from tasks.rewards.scoring import score_responses

EXAMPLES = PROJECT_ROOT / "infra" / "examples"
PAGE = (PROJECT_ROOT / "docs" / "extending.md").read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_the_pages_name_it(path: Path):
    assert len(path.read_text().splitlines()) <= (25 if path.name == "script.py" else 60)
    named = PAGE if path.name != "script.py" else (PROJECT_ROOT / "docs" / "python.md").read_text()
    assert f"infra/examples/{path.name}" in named


def test_the_reward_has_named_parts():
    section = RewardSection.model_validate(
        {
            "function": f"{EXAMPLES / 'reward.py'}:score",
            "arguments": {"longest": 2},
            "weights": {"brief": 0.1},
            "processes": 1,
        }
    )
    record = {"answer": "12"}
    responses = [
        Response(record, "12", tokens=(1, 2)),
        Response(record, " 12\n", tokens=(1, 2, 3)),
        Response(record, "1"),
    ]
    scores = score_responses(section, responses).scores
    assert [score and score.reward for score in scores] == pytest.approx([1.1, 1.0, 0.1])
    assert scores[0] is not None
    assert scores[0].components == {"right": 1.0, "brief": 1.0}


@pytest.mark.slow
def test_the_calls_that_the_tools_example_shows_have_the_results_of_the_calculator(tmp_path: Path):
    make = [sys.executable, "-m", "infra.examples.tools.make", str(tmp_path)]
    subprocess.run(make, check=True, cwd=PROJECT_ROOT, capture_output=True)
    solved = [json.loads(line)["messages"] for line in (tmp_path / "solved.jsonl").read_text().splitlines()]
    after_calls = [messages for messages in solved if len(messages) == 4]
    assert len(after_calls) == len(solved) / 2
    for _, call, told, answer in after_calls[:200]:
        calculator = Calculator()
        asyncio.run(calculator.reset({"prompt": "", "answer": told["content"]}, 0))
        calls = recorded(by_tags(call["content"], calculator.tools))
        assert asyncio.run(calculator.step(call["content"], calls))[0] == [{**told, "name": "calculator"}]
        assert asyncio.run(calculator.step(answer["content"], [])) == (None, 1.0, True)
