"""Fast walk over the modules of a model: torch's own builds a generator for each level of each name."""

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


def walk(root: torch.nn.Module) -> list[torch.nn.Module]:
    """`named_parts` without the names, which cost half of it; in an order of its own."""
    found: dict[int, torch.nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found.values())
