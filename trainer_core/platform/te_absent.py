"""Import megatron.bridge on a machine without Transformer Engine."""

import importlib.util
import sys
import types

# Imports Transformer Engine unguarded, although megatron-bridge only uses it for its own LoRA, which is not used here.
_NEEDS_TE = "megatron.bridge.peft.lora_layers"


def install() -> None:
    """Put a stand-in in place of `megatron.bridge.peft.lora_layers`; a no-op where Transformer Engine is installed.
    Nothing of the name `transformer_engine` goes into `sys.modules`, because megatron-core and others probe for it
    there and would take it for real."""
    if is_absent():
        sys.modules.setdefault(_NEEDS_TE, _StandIn(_NEEDS_TE))


def is_absent() -> bool:
    return importlib.util.find_spec("transformer_engine") is None


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        """A class that nothing is an instance of."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
