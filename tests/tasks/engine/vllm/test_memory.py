import json

import pytest

from storage.errors import InputError
from tasks.engine.protocol import EngineSpec
from tasks.engine.vllm.memory import cache_bytes

CARD = 80 << 30


def model(folder, dtype, size):
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 1000}))
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(b"\0" * size)
    return str(folder)


def left(folder, dtype, stored="bfloat16", card=CARD, **more):
    spec = EngineSpec(model_dir=model(folder, stored, 512), max_model_len=8, device="cuda", dtype=dtype, **more)
    return cache_bytes(spec, lambda: card)


def test_the_cache_takes_what_its_share_of_the_card_leaves(tmp_path):
    share = int(CARD * 0.4) - (3 << 30) - 16 * 512 * 1000
    assert left(tmp_path, "bfloat16") == share - 1024
    assert left(tmp_path, "float32") == share - 2048
    assert left(tmp_path, "bfloat16", stored="float32") == share - 512
    assert left(tmp_path, "bfloat16", tensor=2) == share - 512
    assert left(tmp_path, "bfloat16", gpu_memory_utilization=0.8) == share - 1024 + int(CARD * 0.8) - int(CARD * 0.4)


def test_a_share_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"gpu_memory_utilization is 0.4.* a card of 6144 MiB .* 3079 MiB for weights"):
        left(tmp_path, "bfloat16", card=6 << 30)
