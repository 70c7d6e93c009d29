"""A reward for sums: the answer counts, and a little that it is brief. Its parts become columns of the reward table.

[reward]
function = "reward.py:score"
arguments = { longest = 8 }
[reward.weights]
brief = 0.1
"""

from collections.abc import Mapping
from typing import Any

from ratchet import Sample


def score(record: Mapping[str, Any], response: str, sample: Sample, longest: int = 8) -> dict[str, float]:
    """The parts of the reward; its sum, weighted by `[reward.weights]`, is what the policy is trained on."""
    return {"right": float(response.strip() == record["answer"]), "brief": float(len(sample.tokens) <= longest)}
