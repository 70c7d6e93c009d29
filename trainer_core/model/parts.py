"""A quick walk over the modules of a model: torch's own builds a generator for each level of each name."""

import torch


def named_parts(root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module below `root` and itself, once, with its name, in the order of `named_modules`."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = path, module
        ahead = f"{path}." if path else ""
        waiting += [(ahead + name, child) for name, child in reversed(module._modules.items()) if child is not None]
    return list(found.values())
