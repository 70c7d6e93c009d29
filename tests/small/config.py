"""The configuration of a run over small workers."""

import tomllib
from collections.abc import Sequence

from tasks.config.document import apply_override, parse_config
from tasks.config.run import RunConfig

PROMPTS, SAMPLES, GROUPS, HELD_OUT = 6, 2, 2, 2
PIECES = PROMPTS // GROUPS
ITERATIONS = 2

_DOCUMENT = f"""
[run]
iterations = {ITERATIONS}
retries = 0
[model.generate]
layers = 2
hidden = 32
intermediate = 32
heads = 2
[data.generate]
min_operand = 1
max_operand = 9
held_out = {HELD_OUT}
warmup = 4
[warmup]
steps = 1
[rollout]
prompts = {PROMPTS}
samples = {SAMPLES}
max_tokens = 6
groups_per_part = {GROUPS}
[rollout.increments]
tokens = 2
[reward]
function = "characters"
[train]
max_length = 128
[train.optimizer]
learning_rate = 1e-3
[train.parallel]
pipeline = 2
[train.policy]
kl_coefficient = 0.1
[evaluate]
prompts = {HELD_OUT}
"""


def small_config(settings: Sequence[str] = ()) -> RunConfig:
    """Two ranks and one engine; `settings` as `--set` takes them."""
    document = tomllib.loads(_DOCUMENT)
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "small")
