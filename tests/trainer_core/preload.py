"""Modules that the server that forks ranks imports once, so that no test pays for them."""

import gc
import importlib
import os

from trainer_core.platform.platform import prepare

FAMILIES = ("deepseek_v3", "llama", "qwen2", "qwen3", "qwen3_moe")
MODULES = (
    "trainer_core.trainer",
    "megatron.core.models.mimo",
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
    "numpy.ctypeslib",
    "numpy.ma",
    "rich._emoji_codes",
    "torch.utils.serialization.config",
    # imports of test modules, which a rank executes for its function
    "pytest",
    "storage.parts",
    "trainer_core.weights.transports.ends",
    "tests.trainer_core.models",
)

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["HF_HUB_OFFLINE"] = "1"
prepare("cpu")
for module in MODULES:
    importlib.import_module(module)
gc.freeze()  # else the first collection of each rank would go through all imported objects, and copy their pages
