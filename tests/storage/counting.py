"""A root that counts its requests."""

from collections import Counter
from dataclasses import dataclass, field

from storage.backends.root import Root, Stored


@dataclass(frozen=True)
class CountingRoot(Root):
    """Counts requests to the store."""

    asked: Counter[str] = field(default_factory=Counter)

    def read_bytes(self, key: str) -> bytes:
        self.asked[f"read {key}"] += 1
        return super().read_bytes(key)

    def stored(self, prefix: str) -> list[Stored]:
        self.asked[f"list {prefix}"] += 1
        return super().stored(prefix)

    def info(self, key: str) -> Stored | None:
        self.asked[f"info {key}"] += 1
        return super().info(key)


def counting(root: Root) -> CountingRoot:
    return CountingRoot(root.url, root.backend)
