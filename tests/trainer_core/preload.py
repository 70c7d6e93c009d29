"""What the server that forks ranks imports once, so that a test does not pay for it."""

import importlib
import os

from trainer_core.platform.platform import prepare

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["HF_HUB_OFFLINE"] = "1"
prepare("cpu")
for module in ("trainer_core.trainer", "transformers.models.qwen3.modeling_qwen3"):
    importlib.import_module(module)
