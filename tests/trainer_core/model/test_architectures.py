"""Dense architectures that other tests do not use: the numbers match transformers, and weights survive a round trip."""

import numpy as np
import pytest

from tests.trainer_core.models import VOCABULARY, random_sequences, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig


def make_and_score(rank, world_size, store, directory, kind):
    """Write a random model of four layers; its log-probabilities by transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    found = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # away from ones and zeros, where mix-ups would not show
        for sequence in random_sequences():
            tokens = torch.from_numpy(sequence.astype(np.int64))
            logits = model(tokens[None]).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy())
    model.save_pretrained(directory)
    return found


def import_and_score(trainer, folder):
    trainer.import_model()
    export(trainer, folder)
    return trainer.logprobs(random_sequences(), 1.0)


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_the_trainer_computes_what_transformers_computes(kind, tmp_path):
    model, exported = str(tmp_path / "model"), str(tmp_path / "exported")
    (expected,) = run_ranks(1, make_and_score, model, kind)
    settings = TrainerConfig(
        parallel=ParallelConfig(tensor=2), optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64
    )
    for found in run_trainers(model, settings, import_and_score, exported):
        assert all(np.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(found, expected, strict=True))
    original, back = read_export(model), read_export(exported)
    assert original.keys() == back.keys()
    assert all(np.array_equal(original[name], back[name]) for name in original)
