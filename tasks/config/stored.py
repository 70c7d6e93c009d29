"""The configuration that a run was started with, as its storage has it. Imports neither Ray nor torch."""

from storage import layout, records
from storage.backends.root import Root
from storage.errors import InputError, NotCommitted
from tasks.config.run import RunConfig, changed_meaning


def stored_config(root: Root, run: str) -> RunConfig:
    """The configuration a run was started with.

    Raises:
        DigestMismatch: its text is not what was written.
        InputError: there is no such run.
        SchemaMismatch: this version cannot read it.
    """
    key = layout.run_config_key(run)
    try:
        data = root.read_bytes(key)
    except NotCommitted:
        raise InputError(f"there is no run {run!r} in {root.url}: check --root and the name") from None
    where = f"{root.url}/{key}"
    return records.parse(records.unseal_older(data, where), RunConfig, where)


def record_config(root: Root, run: str, config: RunConfig) -> str:
    """Record what a run is made from, or check that it is continued unchanged.

    Returns:
        Identity of the recorded configuration, which every manifest of the run carries.

    Raises:
        InputError: the run was started with another meaning.
    """
    if records.publish(root, layout.run_config_key(run), config):
        return config.digest
    stored = stored_config(root, run)
    if stored.digest != config.digest:
        lines = "\n".join(f"  {line}" for line in changed_meaning(stored.meaning(), config.meaning()))
        raise InputError(
            f"run {run!r} exists in {root.url} and was started with another meaning:\n{lines}\n"
            "Continue it with its own configuration, or start a new run with another --run"
        )
    return stored.digest
