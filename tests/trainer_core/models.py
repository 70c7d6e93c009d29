"""Tiny models and data; all of it is made in a rank's process, which has already imported torch and transformers."""

import numpy as np

from trainer_core.batches.sequences import Samples, SupervisedExamples

VOCABULARY = 100
ODD_VOCABULARY = 101  # is padded to 102 rows where two ranks divide it


def examples_of(pairs):
    """Examples from pairs of (prompt tokens, response tokens)."""
    prompts, responses = (np.array([len(pair[one]) for pair in pairs]) for one in (0, 1))
    tokens = [token for prompt, response in pairs for token in (*prompt, *response)]
    return SupervisedExamples(np.array(tokens, dtype=np.int32), prompts, responses)


def make_model(rank, world_size, store, directory, tied, vocabulary=VOCABULARY):
    """Write a random Qwen3 of four layers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=vocabulary, max_position_embeddings=64, tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # away from ones and zeros, where mix-ups would not show
    model.save_pretrained(directory)


SHARED = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
_DENSE = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_nextn_predict_layers": 0, **_EXPERTS,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", _DENSE),
    "qwen3": ("Qwen3", _DENSE),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "norm_topk_prob": True, **_DENSE, **_EXPERTS}),
    "deepseek-v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 24}),
    "deepseek-v3-without-q-lora": ("DeepseekV3", {**_LATENT, "q_lora_rank": None}),
}
DENSE = {
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "vocab_size": ODD_VOCABULARY}),
    "llama-tied": ("Llama", {"num_key_value_heads": 2, "vocab_size": ODD_VOCABULARY, "tie_word_embeddings": True}),
}


def make_family(rank, world_size, store, directory, family, layers=4, seed=0, **sizes):
    """Write a random model; biases of routers, if there are any, are not zero."""
    import torch
    import transformers

    kind, own = {**FAMILIES, **DENSE}[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(SHARED | {"num_hidden_layers": layers} | own | sizes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(one for name, one in model.named_buffers() if "e_score" in name)):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(directory)


def add_frequencies(rank, world_size, store, directory):
    """Add to a model's file what old checkpoints of Llama hold besides weights."""
    import torch
    from safetensors.torch import load_file, save_file

    path = f"{directory}/model.safetensors"
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(8) for layer in range(4)}
    save_file({**load_file(path), **frequencies}, path, metadata={"format": "pt"})


def hugging_face_logprobs(rank, world_size, store, directory, sequences, temperature):
    """Log-probabilities of each sequence's tokens but the first, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy())
    return found


def random_sequences(seed=0, lengths=(5, 17, 2, 30, 12)):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def random_samples(seed=0, groups=4, per_group=4, turns=False):
    """Samples of unequal lengths with random rewards; one of them is not usable. With `turns` some have tokens before
    and between the tokens of the policy."""
    generator = np.random.default_rng(seed)
    count = groups * per_group
    prompts, responses = generator.integers(2, 8, count), generator.integers(1, 9, count)
    usable = np.ones(count, dtype=bool)
    usable[5] = False
    gaps = np.random.default_rng(seed).choice([0, 0, 0, 1, 3], int(responses.sum())) if turns else np.array([0])
    return Samples(
        tokens=generator.integers(0, VOCABULARY, int((prompts + responses).sum() + gaps.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        engine_logprobs=-5 * generator.random(int(responses.sum())).astype(np.float32),
        rewards=generator.random(count).astype(np.float32),
        groups=np.repeat(np.arange(groups), per_group).astype(np.int32),
        usable=usable,
        gaps=gaps if turns else None,
    )


def places_of(samples, row):
    """Places of the policy's tokens in a sequence."""
    first, count = int(samples.response_lengths[:row].sum()), samples.response_lengths[row]
    gaps = np.zeros(count, dtype=np.int64) if samples.gaps is None else samples.gaps[first : first + count]
    return samples.prompt_lengths[row] + np.cumsum(gaps + 1) - 1


def random_examples(seed=0, count=24):
    generator = np.random.default_rng(seed)
    draw = lambda: generator.integers(0, VOCABULARY, generator.integers(2, 9)).tolist()  # noqa: E731
    return examples_of([(draw(), draw()) for _ in range(count)])


def read_export(directory):
    """All tensors of an export, by name."""
    from pathlib import Path

    from safetensors.numpy import load_file

    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors
