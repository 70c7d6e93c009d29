"""Writing and reading the parts of a stage. An array never becomes a Python list here."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from storage import layout
from storage.digest import bytes_digest, file_digest
from storage.errors import DigestMismatch
from storage.ids import Stage
from storage.manifest import Manifest, Part
from storage.root import Root
from storage.schema import check

_PARALLEL = 4


@dataclass(frozen=True)
class PartWriter:
    """Writes the parts of one stage; the manifest that names them comes later, from the caller."""

    root: Root
    run: str
    iteration: int
    stage: Stage

    def write_bytes(self, name: str, data: bytes, rows: int | None = None) -> Part:
        """Store `data`. Equal content has an equal key, so writing it again is harmless."""
        digest = bytes_digest(data)
        key = layout.part_key(self.run, self.iteration, self.stage, name, digest)
        self.root.put_if_absent(key, data)
        return Part(name=name, key=key, bytes=len(data), digest=digest, rows=rows)

    def write_table(self, name: str, table: pa.Table, schema: pa.Schema, compression: str | None = "zstd") -> Part:
        """Store a table as an Arrow IPC file.

        Raises:
            SchemaMismatch: the table does not have `schema`.
        """
        check(table.schema, schema, name)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)
        return self.write_bytes(name, sink.getvalue().to_pybytes(), table.num_rows)

    def write_files(self, folder: Path, names: Sequence[str]) -> tuple[Part, ...]:
        """Store local files, several at a time."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return tuple(pool.map(lambda name: self.write_bytes(name, (folder / name).read_bytes()), names))


def read_part(root: Root, part: Part) -> bytes:
    """The bytes of a part.

    Raises:
        DigestMismatch: they are not what the manifest records.
    """
    data = root.read_bytes(part.key)
    _compare(part, bytes_digest(data), root)
    return data


def read_table(root: Root, manifest: Manifest, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """All table parts of a stage in the manifest's order, verified.

    Raises:
        DigestMismatch: a part was damaged.
        SchemaMismatch: a part has another schema.
    """
    table = read_parts(root, [part for part in manifest.parts if part.rows is not None], schema)
    return table.select(list(columns)) if columns is not None else table


def read_parts(root: Root, parts: Sequence[Part], schema: pa.Schema) -> pa.Table:
    """Table parts in the given order, verified; raises as `read_table`."""
    tables = [_open_table(read_part(root, part), schema, part.key) for part in parts]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def materialize(root: Root, manifest: Manifest, folder: Path, prefix: str = "") -> Path:
    """Bring the parts whose name starts with `prefix` to `folder` under their names without it, verified.

    A part that is already there with the right digest is not fetched again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in manifest.parts if part.name.startswith(prefix)]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(lambda part: _fetch(root, part, folder / part.name.removeprefix(prefix)), wanted))
    return folder


def _fetch(root: Root, part: Part, target: Path) -> None:
    if target.exists() and file_digest(str(target))[0] == part.digest:
        return
    target.unlink(missing_ok=True)
    root.download(part.key, target)
    _compare(part, file_digest(str(target))[0], root)


def _open_table(data: bytes, schema: pa.Schema, where: str) -> pa.Table:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    check(table.schema, schema, where)
    return table


def _compare(part: Part, digest: str, root: Root) -> None:
    if digest != part.digest:
        raise DigestMismatch(
            f"{root.url}/{part.key} is damaged: xxh3-128 {digest} was read, {part.digest} was written. "
            "Restore the object, or do the stage again"
        )
