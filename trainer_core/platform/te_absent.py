"""Import megatron.bridge on a machine without Transformer Engine."""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Imports Transformer Engine unguarded although it only asks `isinstance(module, te.<Class>)` when LoRA is used.
_NEEDS_TE = "megatron.bridge.peft.lora_layers"


def install() -> None:
    """Let `megatron.bridge.peft.lora_layers` be imported; a no-op where Transformer Engine is installed. That one
    module gets its own import function, which returns inert classes. Nothing goes into `sys.modules`, because
    megatron-core and others probe for Transformer Engine there and would take it for real."""
    if is_absent() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_absent() -> bool:
    """True if Transformer Engine is not installed."""
    return importlib.util.find_spec("transformer_engine") is None


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NEEDS_TE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        absent = _absent_classes()

        def import_absent(
            name: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0
        ) -> object:
            if level == 0 and name.partition(".")[0] == "transformer_engine":
                return absent
            return builtins.__import__(name, globals, locals, names or (), level)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_absent}
        super().exec_module(module)


def _absent_classes() -> types.SimpleNamespace:
    """Replacement of `transformer_engine` and `transformer_engine.pytorch`: classes that nothing is an instance of."""
    names = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm")
    classes = types.SimpleNamespace(**{name: type(name, (), {}) for name in names})
    classes.ops = types.SimpleNamespace(Sequential=type("Sequential", (), {}))
    classes.pytorch = classes
    return classes
