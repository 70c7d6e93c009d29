"""A weight update in four steps on a real vLLM: what is refused, what is found, and what serves afterwards."""

import pytest
import torch

from storage.errors import SyncMismatch
from tasks.engine.protocol import weights_digest
from tests.tasks.engine.test_engine import PLAIN, PROMPTS, SEEDS, assert_agrees
from tests.tasks.engine_process import weights_of
from tests.tasks.engine_update import deliver


def tensors_of_model(directory):
    return {name: torch.from_numpy(array) for name, array in weights_of(directory).items()}


@pytest.mark.parametrize("transport", ["memory"])
@pytest.mark.parametrize("model", [("qwen3", False), ("qwen3", True), ("llama", True)])
def test_what_was_committed_is_served(engines, tmp_path, model, transport):
    served = engines[model]
    for which, version in (("new", 5), ("old", 6)):
        folder = tmp_path / which
        folder.mkdir()
        weights = tensors_of_model(vars(served)[which])
        arrived, sent = deliver(served.engine, folder, weights, version, transport)
        assert arrived.digests == sent
        assert arrived.landed == len(weights)
        assert arrived.bytes == sum(tensor.nbytes for tensor in weights.values())
        digest = weights_digest(sent)
        with pytest.raises(SyncMismatch, match="sync the weights again"):
            served.engine.generate(PROMPTS, SEEDS, PLAIN)
        served.engine.commit_update(version, digest)
        held = served.engine.identity()
        assert (held.weight_version, held.weights_digest) == (version, digest)
        assert_agrees(served, which)
