"""A live adapter on a real vLLM: which one is served, beside which base, and the proof of both."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from storage.errors import SyncMismatch
from tasks.engine.protocol import BASE, EngineSpec, weights_digest
from tests.tasks.engine.vllm.test_engine import PLAIN, PROMPTS
from tests.tasks.engine.vllm.test_in_flight import assert_goes_on
from tests.tasks.engine_process import CONTEXT, VOCABULARY
from tests.tasks.engine_scheduling import write_tokenizer
from tests.tasks.engine_update import assert_unusable, deliver
from trainer_core.lora import LoraConfig
from trainer_core.weights.digest import tensor_digest

LORA = LoraConfig(rank=3, alpha=12.0, targets=("self_attn.q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
SEQUENCES = [np.random.default_rng(5).integers(2, VOCABULARY, 40).tolist() for _ in range(6)]


def adapter(served, seed):
    """Factors of a random adapter, by peft's names."""
    drawn, found = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(f"{served.old}/model.safetensors").items():
        module = name.removesuffix(".weight")
        if any(f".{module}".endswith(f".{target}") for target in LORA.targets):
            shapes = {"A": (LORA.rank, weight.shape[1]), "B": (weight.shape[0], LORA.rank)}
            for kind, shape in shapes.items():
                found[f"base_model.model.{module}.lora_{kind}.weight"] = torch.randn(shape, generator=drawn) * 0.2
    return found


def merged(served, factors, folder):
    """Log-probabilities of the sequences by transformers with the sum of the old model and an adapter."""
    folder.mkdir()
    tensors = load_file(f"{served.old}/model.safetensors")
    for name in tensors:
        a, b = (factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{kind}.weight") for kind in "AB")
        if a is not None and b is not None:
            tensors[name] = tensors[name] + LORA.alpha / LORA.rank * (b.float() @ a.float())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(f"{served.old}/config.json", folder)
    write_tokenizer(str(folder))
    return [expected(served.reference.logits(str(folder), one), one) for one in SEQUENCES]


def expected(logits, sequence):
    found = torch.from_numpy(logits).log_softmax(-1)
    return found.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy()


def differs(engine, wanted):
    found = engine.score(SEQUENCES)
    return max(float(np.abs(one - other).max()) for one, other in zip(found, wanted, strict=True))


def send(engine, folder, weights, version, form, base="the base", **more):
    """An update up to the commit; what it must be committed as."""
    folder.mkdir()
    arrived, sent = deliver(engine, folder, weights, version, form=form, base=base, **more)
    assert arrived.digests == sent
    assert arrived.landed == len(weights)
    return weights_digest({**sent, BASE: base} if form == "adapter" else sent)


@pytest.fixture(scope="module")
def live(engines, tmp_path_factory):
    """An engine with live adapters, which has the base."""
    served = engines["qwen3", False]
    limits = {"max_model_len": CONTEXT, "max_num_seqs": 64, "kv_cache_bytes": 16 << 20}
    engine = served.process.FaultyEngine(EngineSpec(model_dir=served.new, adapter=LORA, **limits))
    assert engine.survey_model() is None
    weights = load_file(f"{served.old}/model.safetensors")
    digest = send(engine, tmp_path_factory.mktemp("base") / "base", weights, 1, "base")
    assert engine.commit_update(1, digest).weights_digest == digest
    assert engine.survey_model() == "the base"
    assert_unusable(engine)
    return SimpleNamespace(**{**vars(served), "engine": engine})


def test_the_adapter_of_the_last_update_is_served_and_proven(live, tmp_path):
    seen = []
    for version, seed, sent_in in ((2, 1, torch.float32), (3, 2, torch.bfloat16), (4, 1, torch.float32)):
        factors = {name: factor.to(sent_in) for name, factor in adapter(live, seed).items()}  # the engine has fp32
        digest = send(live.engine, tmp_path / f"{version}", factors, version, "adapter")
        assert_unusable(live.engine)
        assert live.engine.commit_update(version, digest).weight_version == version
        wanted = merged(live, factors, tmp_path / f"merged-{version}")
        assert differs(live.engine, wanted) < 1e-4
        digests = {name: tensor_digest(factor) for name, factor in factors.items()}
        assert live.engine.held() == {**digests, BASE: "the base"}
        seen.append(live.engine.adapters())
    assert [len(one) for one in seen] == [1, 1, 1]
    assert len({number for one in seen for number in one}) == 3  # an id is never used again
    live.engine.spoil_adapter()
    assert len([name for name, digest in live.engine.held().items() if digests.get(name, "the base") != digest]) == 1


@pytest.mark.parametrize("number", [0, 1003])
def test_all_tokens_on_a_card_are_computed_with_the_adapter_in_the_slot(live, number):
    mappings, active = live.engine.inputs_of_all_served(number, [2, 0], [3, 1])
    assert mappings == ((number,) * 2, (number,) * 4, set())
    assert active == (number > 0)  # by which the CUDA graph is chosen


def test_an_adapter_of_another_base_or_form_is_refused(live, tmp_path):
    factors = adapter(live, 1)
    digest = send(live.engine, tmp_path / "before", factors, 2, "adapter")
    live.engine.commit_update(2, digest)
    one, other = list(factors)[:2]
    weights = load_file(f"{live.old}/model.safetensors")
    for given, form, base, match in (
        (factors, "adapter", "another", "frozen weights another, and the engine has the base"),
        ({one: factors[one]}, "adapter", "the base", f"sends {other} with the shape None"),
        (weights, "whole", "", "adds adapters to frozen weights"),
    ):
        with pytest.raises(SyncMismatch, match=match):
            send(live.engine, tmp_path / match[:8], given, 3, form, base)
        assert live.engine.identity().weights_digest == digest
    assert live.engine.generate(PROMPTS[:1], [0], PLAIN).num_rows == 1


@pytest.mark.parametrize("again", [False, True], ids=["adapter", "base-and-adapter"])
def test_requests_under_way_go_on_under_the_new_adapter(live, tmp_path, again):
    old, new = adapter(live, 1), adapter(live, 2)
    live.engine.commit_update(4, send(live.engine, tmp_path / "before", old, 4, "adapter"))
    merged(live, new, tmp_path / "merged")

    def update(version):
        if again:  # the frozen weights come first, and requests wait for the adapter
            weights, keep = load_file(f"{live.old}/model.safetensors"), {"in_flight": "keep"}
            digest = send(live.engine, tmp_path / "base", weights, version, "base", **keep)
            live.engine.commit_update(version, digest)
            sampled = live.engine.sampled_so_far()
            assert (live.engine.collect(0.1), live.engine.sampled_so_far()) == (([], 0, []), sampled)
        return send(live.engine, tmp_path / "after", new, version, "adapter", in_flight="keep")

    assert all(3 <= same < 40 for same in assert_goes_on(live, str(tmp_path / "merged"), update))
