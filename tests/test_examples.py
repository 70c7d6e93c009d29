"""The examples, one a door, are short and named by a page; the reward scores. Tests of each door run the others."""

from pathlib import Path

import pytest

from tasks.config.code_version import PROJECT_ROOT
from tasks.config.reward import RewardSection
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
