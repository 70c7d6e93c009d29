"""Requests in flight while the weights change, and an engine of two workers."""

import numpy as np
import pytest

from storage.errors import SyncMismatch
from tasks.engine.protocol import Begun, Sampling, weights_digest
from tests.tasks.engine.vllm.test_engine import PLAIN, PROMPTS, SEEDS, assert_agrees, responses
from tests.tasks.engine_process import log_softmax
from tests.tasks.engine_update import deliver, plan_of, refused, serve, tensors_of_model
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import text_digest


def test_requests_under_way_are_dropped(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    for number in (0, 1):
        served.engine.enqueue(number, PROMPTS[:6], SEEDS[:6], PLAIN)
    served.engine.collect(0.0)
    serve(served, tmp_path / "after")
    assert served.engine.collect(60.0) == ([], 0, [])


def test_requests_under_way_are_finished_first(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    alone = served.engine.generate(PROMPTS[:6], SEEDS[:6], PLAIN)
    for number in (0, 1):
        served.engine.enqueue(number, PROMPTS[:6], SEEDS[:6], PLAIN)
    served.engine.collect(0.0)
    (tmp_path / "after").mkdir()
    _, sent = deliver(served.engine, tmp_path / "after", tensors_of_model(served.new), 5, in_flight="wait")
    served.engine.commit_update(5, weights_digest(sent))
    (first,), (second,) = served.engine.collect(60).finished, served.engine.collect(60).finished
    assert (first.number, first.weight_version) == (0, 4)
    assert first.completions.equals(alone)
    assert (second.number, second.weight_version) == (1, 5)
    assert second.completions.equals(served.engine.generate(PROMPTS[:6], SEEDS[:6], PLAIN))


def assert_goes_on(served, new, update):
    """Check that responses in flight have tokens of the old weights up to the update, then of those in the folder
    `new`. `update(version)` delivers these and returns what they are committed as."""
    how, version = Sampling(max_tokens=40, temperature=0.0), served.engine.identity().weight_version
    old = served.engine.generate(PROMPTS[:6], SEEDS[:6], how)["response_tokens"].to_pylist()
    served.engine.enqueue(0, PROMPTS[:6], SEEDS[:6], how)
    for _ in range(3):
        served.engine.collect(0.0)
    served.engine.commit_update(version + 1, update(version + 1))
    (batch,) = served.engine.collect(60).finished
    assert batch.weight_version == version
    kept = []
    for prompt, before, (after, logprobs) in zip(PROMPTS[:6], old, responses(batch.completions), strict=True):
        same = next((place for place in range(40) if before[place] != after[place]), 40)
        likely = served.reference.logits(new, prompt + after)[len(prompt) - 1 :]
        assert likely.argmax(axis=-1).tolist()[same:] == after[same:]
        expected = log_softmax(likely)[np.arange(40), after]
        np.testing.assert_allclose(logprobs[same:], expected[same:], atol=1e-4)
        kept.append(same)
    return kept


def keeping(served, folder, receivers=1):
    """An update to the new weights in whose course requests are kept, for `assert_goes_on`."""

    def update(version):
        folder.mkdir()
        weights, more = tensors_of_model(served.new), {"in_flight": "keep", "receivers": receivers}
        return weights_digest(deliver(served.engine, folder, weights, version, **more)[1])

    return update


def test_requests_under_way_go_on_under_the_new_weights(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    kept = assert_goes_on(served, served.new, keeping(served, tmp_path / "after"))
    assert all(3 <= same < 40 for same in kept)


def test_a_response_that_was_begun_under_older_weights_goes_on_under_the_new_ones(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    first = Sampling(max_tokens=12)
    began = served.engine.generate(PROMPTS[:6], SEEDS[:6], first)
    begun = [Begun(*map(np.array, one)) for one in responses(began)]
    serve(served, tmp_path / "after", "new", 5)
    served.engine.enqueue(0, PROMPTS[:6], SEEDS[:6], Sampling(max_tokens=24), begun)
    (batch,) = served.engine.collect(60).finished
    for prompt, before, (tokens, logprobs) in zip(PROMPTS[:6], begun, responses(batch.completions), strict=True):
        assert (tokens[:12], logprobs[:12]) == (before.tokens.tolist(), before.logprobs.tolist())
        for weights, part in ((served.old, slice(0, 12)), (served.new, slice(12, 24))):
            likely = log_softmax(served.reference.logits(weights, prompt + tokens)[len(prompt) - 1 :])
            np.testing.assert_allclose(logprobs[part], likely[np.arange(24), tokens][part], atol=1e-4)


def test_a_hold_ends_with_whoever_began_it(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    plan = plan_of(tensors_of_model(served.new))
    channel = Channel(transport="memory", folder=str(tmp_path), receivers=1)
    served.engine.prepare_update(
        plan.model_dump_json(), text_digest(plan.model_dump_json()), channel, 0, "keep"
    )  # and its driver dies
    served.engine.drop()
    served.engine.enqueue(0, PROMPTS[:6], SEEDS[:6], PLAIN)
    assert [batch.number for batch in served.engine.collect(60).finished] == [0]


@pytest.mark.slow
def test_two_workers_hold_their_parts(split, tmp_path):
    for which, version in (("new", 5), ("old", 6)):
        (tmp_path / which).mkdir()
        weights = tensors_of_model(vars(split)[which])
        arrived, sent = deliver(split.engine, tmp_path / which, weights, version, receivers=2)
        assert (arrived.digests, arrived.landed) == (sent, 2 * len(weights))
        split.engine.commit_update(version, weights_digest(sent))
        assert_agrees(split, which, prompts=PROMPTS[:6])
    assert_goes_on(split, split.new, keeping(split, tmp_path / "after", receivers=2))
    weights = tensors_of_model(split.new)
    del weights["model.layers.2.mlp.experts.1.up_proj.weight"]
    folder = tmp_path / "refused"
    refused(split.engine, folder, weights, SyncMismatch, "missing", receivers=2)
    assert split.engine.abort_update("refused")
