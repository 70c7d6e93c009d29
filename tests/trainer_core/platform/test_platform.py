import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# each in a process of its own, forked from one that has imported torch: they concern the state of a whole process
UNDONE = """
import torch
from trainer_core.platform import cpu_platform

places = [(torch, "zeros"), (torch, "compile"), (torch.Tensor, "type"), (torch.cuda, "current_device")]
before = [getattr(owner, name) for owner, name in places]
with cpu_platform.installed():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.cuda.current_device() == torch.device("cpu")
    assert [getattr(owner, name) for owner, name in places] != before
assert [getattr(owner, name) for owner, name in places] == before
"""
UNTOUCHED = """
import torch, sys
zeros, kind = torch.zeros, torch.Tensor.type
import trainer_core.start, trainer_core.platform.platform, trainer_core.weights.digest
import trainer_core.objectives.losses
assert (torch.zeros, torch.Tensor.type) == (zeros, kind)
assert "megatron" not in sys.modules
"""
LIGHT = """
import sys
import trainer_core.start, trainer_core.protocol, trainer_core.batches.sequences
assert not {"torch", "megatron", "transformers"} & set(sys.modules)
"""
PREPARED = """
import sys
from trainer_core.platform.platform import prepare
platform = prepare("cpu")
assert not platform.transformer_engine
assert prepare("cpu") is platform

# what Megatron would import of wandb makes folders that a killed process leaves
import trainer_core.trainer
assert "wandb" not in sys.modules

# Transformer Engine is still known to be absent
import megatron.bridge, megatron.core.transformer.mlp
assert not [name for name in sys.modules if name.startswith("transformer_engine")]
assert not megatron.core.transformer.mlp.HAVE_TE

# transformers, which loads on the meta device, still finds every factory of tensors
from transformers import Qwen3ForCausalLM
frequencies = Qwen3ForCausalLM.from_pretrained(sys.argv[1]).model.rotary_emb.inv_freq
assert frequencies[0] == 1 and (frequencies.diff() < 0).all(), frequencies
"""
NO_GPU = """
import torch
from storage.errors import InputError
from trainer_core.platform.platform import prepare
torch.cuda.is_available = lambda: False
try:
    prepare("cuda")
except InputError as error:
    assert 'device = "cpu"' in str(error)
else:
    raise AssertionError("a GPU was found where there is none")
"""


FORKED = """
import os
LIGHT, *others = {codes!r}
exec(LIGHT, {{}})
import torch
for code in others:
    if not (process := os.fork()):
        exec(code, {{}})
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, code
"""


def test_each_in_a_process_of_its_own(model_dir):
    code = FORKED.format(codes=[LIGHT, UNDONE, UNTOUCHED, PREPARED, NO_GPU])
    done = subprocess.run([sys.executable, "-c", code, model_dir], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
