"""A store of torch's process groups in the key-value store of a Ray cluster."""

import time
from collections.abc import Sequence
from datetime import timedelta

from ray.experimental import internal_kv
from torch._C._distributed_c10d import Store

_PAUSE_S = 0.01
_alive: list["RayStore"] = []  # torch keeps the C++ half of a store alone


class RayStore(Store):
    """Values of one group of processes, by key. `add` counts in numbered entries, each written put-if-absent."""

    def __init__(self, group: str, namespace: str, timeout: timedelta) -> None:
        super().__init__()
        self._group, self._namespace = group, namespace.encode()
        self._timeout = timeout
        self._counted: dict[str, int] = {}  # entries of each counter that are known
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._put(key, value, overwrite=True)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._found(key) or b""

    def add(self, key: str, amount: int) -> int:
        total, entry = 0, self._counted.get(key, 0)
        while True:
            found = self._found(f"{key}#{entry}")
            if found is None and (not amount or self._put(f"{key}#{entry}", str(total + amount), overwrite=False)):
                self._put(key, str(total + amount), overwrite=True)
                return total + amount
            if found is not None:
                total, self._counted[key], entry = int(found), entry, entry + 1

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        held = self._found(key)
        if held is None and not expected and self._put(key, value, overwrite=False):
            return value.encode()
        if held is not None and held == expected.encode():
            self.set(key, value)
        return self._found(key) or expected.encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._found(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        end = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError(f"wait timeout after {limit}: other processes of {self._group} did not come")
            time.sleep(_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return bool(internal_kv._internal_kv_del(self._name(key), namespace=self._namespace))

    def num_keys(self) -> int:
        return len(internal_kv._internal_kv_list(self._name(""), namespace=self._namespace))

    def _found(self, key: str) -> bytes | None:
        return internal_kv._internal_kv_get(self._name(key), namespace=self._namespace)

    def _put(self, key: str, value: str | bytes, overwrite: bool) -> bool:
        """Write a value; False if there is one already that stays."""
        content = value.encode() if isinstance(value, str) else value
        there = internal_kv._internal_kv_put(self._name(key), content, overwrite, namespace=self._namespace)
        return overwrite or not there

    def _name(self, key: str) -> bytes:
        return f"{self._group}/{key}".encode()
