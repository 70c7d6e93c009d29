"""Harm to the records of a root for `infra.fuzz`, and a search for its silent changes."""

import random
from collections.abc import Callable, Iterator

from storage import layout
from storage.backends.root import Root
from storage.errors import RatchetError
from storage.upkeep.catalog import contents, names, summaries
from storage.upkeep.verify import verify

Harm = tuple[str, Callable[[], None]]
"""Description of a harm, and the function that does it."""

_KINDS = ("/revisions/rerun-", "/revisions/head-", "/copies/", ".retired.json", ".pieces/", "/lease/", "/run.json")
"""Records that are harmed, by a part of their key."""


def draw(chance: random.Random, root: Root, keys: list[str]) -> Harm:
    """A harm to one of the records at keys."""
    kinds = {kind: [key for key in keys if kind in key] for kind in _KINDS}
    kind = chance.choice([kind for kind, there in kinds.items() if there])
    one, two = chance.choice(kinds[kind]), chance.choice(kinds[kind])
    beside = f"{one.removesuffix('.json')} (copy).json"
    harms: dict[str, Callable[[], None]] = {
        f"lost {one}": lambda: root.remove(one),
        f"damaged {one}": lambda: _flipped(root, one, chance.random()),
        f"moved {one}": lambda: _moved(root, one, beside),
        f"beside {one}": lambda: _copied(root, one, beside),
        f"copied {one} to {two}": lambda: _copied(root, one, two),
        f"next {one}": lambda: _copied(root, one, _following(one)),
    }
    what = chance.choice(list(harms))
    return what, harms[what]


def _following(key: str) -> str:
    """The same key with the last of its numbers one higher."""
    stem, dot, rest = key.rpartition("/")[2].partition(".")
    number = next((one for one in reversed(stem.split("-")) if one.isdecimal()), None)
    if number is None:
        return f"{key}~"
    folder, name = key.rpartition("/")[0], stem.replace(number, f"{int(number) + 1:0{len(number)}d}")
    return f"{folder}/{name}{dot}{rest}"


def _copied(root: Root, one: str, two: str) -> None:
    data = root.read_bytes(one)
    root.remove(two)
    root.put_if_absent(two, data)


def _flipped(root: Root, key: str, where: float) -> None:
    data = bytearray(root.read_bytes(key))
    data[int(where * len(data))] ^= 1
    root.replace(key, bytes(data))


def _moved(root: Root, one: str, two: str) -> None:
    _copied(root, one, two)
    root.remove(one)


def restore(root: Root, kept: dict[str, bytes]) -> None:
    """Restore the records; parts and archives that the harmed root made meanwhile stay."""
    for key in root.keys(""):
        if "/parts/" not in key and "/archive/" not in key and key not in kept:
            root.remove(key)
    for key, data in kept.items():
        if "/archive/" not in key and (not root.exists(key) or root.read_bytes(key) != data):
            root.remove(key)
            root.put_if_absent(key, data)


def state(root: Root, run: str) -> object:
    """Head and results of a run, or that it is refused."""
    try:
        recorded = names(root, run)
        return recorded.revisions.head, digests(root, run)
    except RatchetError:
        return "refused"


def unnoticed(root: Root, before: dict[str, object], kept: dict[str, bytes]) -> Iterator[str]:
    """Silent changes by the harm."""
    now = {key: root.read_bytes(key) for key in root.keys("") if "/parts/" not in key}
    harmed = {layout.run_of(key) for key in {*kept, *now} if kept.get(key) != now.get(key)}
    listed = {one.run: one.damaged for one in summaries(root)}
    for run, was in before.items():
        if root.exists(layout.run_config_key(run)):
            found = verify(root, run).findings
            if run in harmed and not found and _decides(kept, now):
                yield f"verify of {run} names nothing"
            if run not in harmed and (listed.get(run, "not listed") or any(not one.is_harmless for one in found)):
                yield f"run {run} suffers: {listed.get(run)}, {found[:1]}"
        after = state(root, run)
        if after not in (was, "refused"):
            yield f"run {run} is silently another"


def _decides(kept: dict[str, bytes], now: dict[str, bytes]) -> bool:
    """True if the harm is more than the loss of repeatable work, or of the log's past."""
    changed = {key for key in {*kept, *now} if kept.get(key) != now.get(key)}
    return not all(key not in now and (".pieces/" in key or "/lease/" in key or ".retired." in key) for key in changed)


def digests(root: Root, run: str) -> dict[tuple[int, str], str]:
    return {(one.iteration, one.stage): one.digest for one in contents(root, run).newest}
