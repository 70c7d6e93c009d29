"""Faults in samples of several turns that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_TURNS = ("tests/trainer_core/batches/test_turns.py",)
_STORED = ("tests/storage/test_turns.py",)
_IMPORT = ("tests/tasks/importing",)

RESPONSES = (
    Mutant(
        "trains-on-what-tools-said",
        "tokens that the policy did not sample have a gradient",
        "trainer_core/batches/reading.py",
        "    if not sampled.all():\n",
        "    if False:\n",
        _TURNS,
    ),
    Mutant(
        "second-turn-in-the-place-of-the-tool",
        "tokens of a later turn are predicted from places before it",
        "trainer_core/batches/flat.py",
        "predicting=_ranges(_starts(positions) + prompts - 1, responses) + skipped,",
        "predicting=_ranges(_starts(positions) + prompts - 1, responses),",
        _TURNS,
    ),
    Mutant(
        "logprobs-of-the-first-tokens",
        "log-probabilities of tokens that were not sampled stand for those of sampled ones",
        "trainer_core/batches/reading.py",
        "logprobs[sampled]",
        "logprobs[: int(sampled.sum())]",
        _TURNS,
    ),
    Mutant(
        "gap-of-the-sample-before",
        "the first sampled token of a sample counts what lies behind the last one of the sample before",
        "trainer_core/batches/reading.py",
        "places - np.maximum(before, starts[rows])",
        "places - before",
        _TURNS,
    ),
    Mutant(
        "tool-tokens-count-as-sampled",
        "figures of a rollout count tokens that were not sampled",
        "storage/turns.py",
        "_rows(column)[flat], minlength",
        "_rows(column), minlength",
        _STORED,
    ),
    Mutant(
        "age-by-unsampled-tokens",
        "a sample counts as old as the tokens in it that have no version",
        "storage/turns.py",
        ".filter(sampled.flatten())\n",
        "\n",
        _STORED,
    ),
    Mutant(
        "turns-with-gaps-are-imported",
        "imported turns need not cover the response",
        "tasks/importing/rows.py",
        "(begins != before) | (ends < begins)",
        "(ends < begins)",
        _IMPORT,
    ),
)
