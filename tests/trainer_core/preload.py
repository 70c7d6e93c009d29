"""What the server that forks ranks imports once, so that a test does not pay for it."""

import os

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["HF_HUB_OFFLINE"] = "1"

from trainer_core.platform import prepare

prepare("cpu")

import transformers.models.qwen3.modeling_qwen3

import trainer_core.learner  # noqa: F401
