"""Faults in samples of several turns, and in responses that go on after a kill, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_TURNS = ("tests/trainer_core/batches/test_turns.py",)
_STORED = ("tests/storage/test_turns.py",)
_GOES_ON = ("tests/tasks/engine/vllm/test_increments.py",)
_STAGE = ("tests/tasks/stages/test_increments.py",)
_MATRIX = ("tests/faults/test_matrix.py",)
_UPKEEP = ("tests/storage/upkeep/test_retention.py", "tests/storage/upkeep/test_verify.py")
_SPREAD = ("tests/tasks/workers/test_sampling.py",)
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
        "own = sampled.flatten().to_numpy(zero_copy_only=False)",
        "own = np.ones(len(sampled.flatten()), np.bool_)",
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
    Mutant(
        "stored-tokens-are-sampled-again",
        "a process that takes over does not go on from the stored beginnings",
        "tasks/stages/rollout.py",
        "(growth.begun(place, [NOTHING] * len(rows)), growth.pieces[place])",
        "((), growth.pieces[place])",
        _MATRIX,
    ),
    Mutant(
        "limit-of-a-fresh-response",
        "a response that goes on gets its whole length again",
        "tasks/engine/vllm/core.py",
        "max_tokens=sampling.max_tokens - begun,",
        "max_tokens=sampling.max_tokens,",
        _GOES_ON,
    ),
    Mutant(
        "response-without-its-beginning",
        "a response that went on is only what was sampled last",
        "tasks/engine/vllm/engine.py",
        "whole = [one.grown(more) for",
        "whole = [more for",
        _GOES_ON,
    ),
    Mutant(
        "increment-told-twice",
        "an increment begins where the response begins",
        "tasks/engine/vllm/responses.py",
        "first, self._told, self._since = self._told, len",
        "first, self._told, self._since = 0, len",
        _GOES_ON,
    ),
    Mutant(
        "dropped-and-forgotten",
        "an engine gives nothing of what it drops",
        "tasks/engine/vllm/engine.py",
        "            if batch.name and own:\n",
        "            if batch.name is own:\n",
        _GOES_ON,
    ),
    Mutant(
        "last-token-before-its-end",
        "a response that had ended is handed over whole, so it cannot end again",
        "tasks/engine/vllm/engine.py",
        'last=int(answer.finish_reason != "abort"))',
        "last=0)",
        _GOES_ON,
    ),
    Mutant(
        "left-at-the-engine",
        "nobody stores what a live engine had sampled for a driver that was killed",
        "tasks/stages/served_weights.py",
        "    keep_left(context.root, engines)\n",
        "",
        _STAGE,
    ),
    Mutant(
        "increments-of-two-processes",
        "tokens that another process has stored too are counted twice",
        "tasks/stages/increments.py",
        "                if one.first == len(begun[one.row].tokens):",
        "                if True:",
        _STAGE,
    ),
    Mutant(
        "increment-over-another",
        "an increment whose number is taken is not stored",
        "storage/unfinished.py",
        "        number += 1\n    return number",
        "        break\n    return number",
        ("tests/storage/test_unfinished.py",),
    ),
    Mutant(
        "gc-of-responses-in-progress",
        "gc deletes increments of responses that go on",
        "storage/upkeep/retention.py",
        "piece and (piece in stored.pieces or committed)",
        "piece is not None",
        _UPKEEP,
    ),
    Mutant(
        "increments-are-not-verified",
        "verify reads no increments",
        "storage/upkeep/verify.py",
        "_unreadable(recorded.increments,",
        "_unreadable((),",
        _UPKEEP,
    ),
    Mutant(
        "lost-engine-starts-over",
        "another engine starts the requests of a lost one over",
        "tasks/workers/sampling.py",
        "            rows[one.row] = rows[one.row].grown(one.grown)\n",
        "",
        _SPREAD,
    ),
)
