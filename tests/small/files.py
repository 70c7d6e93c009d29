"""Files of small trainers."""

from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whose earlier version the store may have taken as a part: replace it, do not change it in place."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
