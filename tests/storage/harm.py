"""Damage to records: lost, copied, moved or written by another version; and a check of the other runs."""

import json
import shutil
from collections.abc import Callable

from flows.maintenance import Upkeep, maintain_root
from storage.backends.root import Root
from storage.records import unseal
from storage.upkeep.catalog import summaries
from tests.storage.hostile import sealed_again

RUN = "run"


def drop(key: str) -> Callable[[Root], None]:
    return lambda root: root.remove(key)


def copied(source: str, target: str) -> Callable[[Root], None]:
    def change(root: Root) -> None:
        data = root.read_bytes(source)
        root.remove(target)
        root.put_if_absent(target, data)

    return change


def moved(source: str, target: str) -> Callable[[Root], None]:
    def change(root: Root) -> None:
        copied(source, target)(root)
        root.remove(source)

    return change


def swapped(one: str, two: str) -> Callable[[Root], None]:
    def change(root: Root) -> None:
        first = root.read_bytes(one)
        copied(two, one)(root)
        root.remove(two)
        root.put_if_absent(two, first)

    return change


def changed(key: str, **members: object) -> Callable[[Root], None]:
    """Replace a record by another whole one, as a later version or another life of the run would have written it."""

    def change(root: Root) -> None:
        document = json.loads(unseal(root.read_bytes(key), key)) | members
        place = f',\n "place": {json.dumps(key)},\n "checksum": "{"0" * 32}"\n}}\n'
        root.remove(key)
        root.put_if_absent(
            key, sealed_again(json.dumps(document, indent=1).removesuffix("\n}").encode() + place.encode())
        )

    return change


def without_folder(name: str) -> Callable[[Root], None]:
    return lambda root: shutil.rmtree(root.backend.full(f"{RUN}/{name}"))


def both(*changes: Callable[[Root], object]) -> Callable[[Root], None]:
    def change(root: Root) -> None:
        for one in changes:
            one(root)

    return change


def others_work(root: Root, bad: str) -> None:
    """Check that ls and maintain, which cleans and verifies, find nothing wrong with the other runs."""
    found = {one.run: one.damaged for one in summaries(root) if one.run != bad}
    assert found
    assert set(found.values()) == {None}
    upkeep = {one.run: one.problems for one in maintain_root(root, Upkeep()).runs}
    assert {run: upkeep[run] for run in found} == dict.fromkeys(found, ())
