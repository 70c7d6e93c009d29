"""Responses that are told while they grow, and go on from what was told, on a real vLLM."""

import itertools

import pytest

from tasks.engine.protocol import NOTHING, Every, Sampling
from tests.tasks.engine.vllm.test_engine import PROMPTS, SEEDS
from tests.tasks.engine_update import serve

LONG = Sampling(max_tokens=40, stop_token_ids=(1,))
EVERY = Every(7, 1e6)


@pytest.fixture
def engine(served, tmp_path_factory):
    """The engine with the weights of `old`, and nothing in flight."""
    serve(served, tmp_path_factory.mktemp("fresh") / "update", "old", 0)
    return served.engine


def grown(begun, increments):
    """Add increments to what is begun, which they must follow."""
    for one in increments:
        assert (one.number, one.weight_version) == (5, 0)
        assert one.first == len(begun[one.row].tokens)
        begun[one.row] = begun[one.row].grown(one.grown)


def steps(engine, begun, count=None):
    """Collect until so many steps were taken, or the batch is finished; its completions."""
    for _ in itertools.count() if count is None else range(count):
        collected = engine.collect(0.0)
        grown(begun, collected.increments)
        if collected.finished:
            return collected.finished[0].completions
    return None


@pytest.mark.parametrize(
    ("how", "kills"),
    [
        pytest.param(how, kills, id=f"{name}-{kills}", marks=[] if kills == quick else pytest.mark.slow)
        for name, how, quick in (("stopped", LONG, (9,)), ("length", Sampling(max_tokens=30), (16, 5, 8)))
        for kills in ((9,), (16, 5, 8), (25,))
    ],
)
def test_a_response_that_goes_on_has_the_bits_of_one_that_was_never_interrupted(engine, kills, how):
    whole = engine.generate(PROMPTS, SEEDS, how)
    begun = [NOTHING] * len(PROMPTS)
    for kill in kills:
        engine.enqueue(5, PROMPTS, SEEDS, how, begun, EVERY)
        assert steps(engine, begun, kill) is None
        engine.drop()  # what it gives is ignored: all that is known are the increments
    lengths = {len(one.tokens) for one in begun}
    assert max(lengths) >= 7
    assert all(length % 7 == 0 for length in lengths)
    engine.enqueue(5, PROMPTS, SEEDS, how, list(begun), EVERY)
    assert steps(engine, begun).equals(whole)
    for row, one in enumerate(begun):
        tokens, logprobs = (whole[at][row].as_py()[: len(one.tokens)] for at in (0, 1))
        assert (one.tokens.tolist(), one.logprobs.tolist()) == (tokens, logprobs)
    assert len({row for row, one in enumerate(begun) if len(one.tokens) > 7}) > 5


@pytest.mark.parametrize("how", [LONG, Sampling(max_tokens=30)], ids=["stopped", "length"])
def test_what_is_dropped_is_handed_over_and_goes_on_with_the_bits_of_an_undisturbed_response(
    served, engine, how, tmp_path
):
    whole, begun = engine.generate(PROMPTS, SEEDS, how), [NOTHING] * len(PROMPTS)
    ends = [len(tokens) - 1 for tokens in whole["response_tokens"].to_pylist()]
    drops = (
        engine.identity,  # drops nothing
        lambda: engine.score(PROMPTS[:2]),
        lambda: engine.generate(PROMPTS[:2], SEEDS[:2], how),
        lambda: serve(served, tmp_path / "update", "old", 0),
    )
    for taken, drop in zip((10, 5, 6, 4), drops, strict=True):
        engine.enqueue(5, PROMPTS, SEEDS, how, begun, EVERY, "a piece")
        before = [len(one.tokens) for one in begun]
        assert steps(engine, begun, taken - 1) is None
        assert engine.collect(0.0).finished == []  # and what it gives is not kept
        drop()
        left = engine.drop()
        assert list(left) == ["a piece"]
        grown(begun, left["a piece"])
        assert [len(one.tokens) for one in begun] == [
            min(length + taken, end) for length, end in zip(before, ends, strict=True)
        ]
        assert engine.drop() == {}
    engine.enqueue(5, PROMPTS, SEEDS, how, list(begun), EVERY, "a piece")
    assert steps(engine, begun).equals(whole)


def test_increments_follow_one_another_when_the_cache_is_taken(engine):
    begun = [NOTHING] * 6
    engine.enqueue(5, PROMPTS[:6], SEEDS[:6], LONG, (), EVERY)
    steps(engine, begun, 5)
    engine.preempt()
    whole = steps(engine, begun)
    assert [one.tokens.tolist() for one in begun] == [
        tokens[: len(one.tokens)] for tokens, one in zip(whole["response_tokens"].to_pylist(), begun, strict=True)
    ]
    assert max(len(one.tokens) for one in begun) > 7


def test_a_response_is_told_after_a_time_too(engine):
    begun = [NOTHING] * 3
    engine.enqueue(5, PROMPTS[:3], SEEDS[:3], Sampling(max_tokens=40), (), Every(1000, 1e-6))
    assert steps(engine, begun, 4) is None
    assert [len(one.tokens) for one in begun] == [4, 4, 4]
    engine.drop()


def test_nothing_is_told_unasked(engine):
    begun = [NOTHING] * 3
    engine.enqueue(5, PROMPTS[:3], SEEDS[:3], LONG)
    steps(engine, begun)
    assert begun == [NOTHING] * 3
