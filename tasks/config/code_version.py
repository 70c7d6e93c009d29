"""Version of Ratchet, which every manifest records."""

import functools
import hashlib
from pathlib import Path

VERSION = "0.1.0"
PROJECT_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("flows", "tasks", "trainer_core", "storage")


@functools.cache
def code_version() -> str:
    """Release and a digest of the packages' source: an edited checkout is another version."""
    hasher = hashlib.blake2b(digest_size=6)
    for package in _PACKAGES:
        for source in sorted((PROJECT_ROOT / package).rglob("*.py")):
            hasher.update(source.relative_to(PROJECT_ROOT).as_posix().encode())
            hasher.update(source.read_bytes())
    return f"{VERSION}+{hasher.hexdigest()}"
