import pickle

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from trainer_core.state.repeatable import METADATA_FILE, unshared, write_metadata


def of_its_own(text):
    return "".join(list(text))


def test_equal_values_are_equal_bytes():
    first, second = of_its_own("cosine"), of_its_own("cosine")
    pair = (0.9, 0.95)
    sharing = [{"decay": first, "betas": pair}, {"decay": first, "betas": pair}]
    separate = [{"decay": first, "betas": (0.9, 0.95)}, {"decay": second, "betas": (pair[0], pair[1])}]
    assert sharing == separate
    assert pickle.dumps(sharing) != pickle.dumps(separate)
    assert pickle.dumps(unshared(sharing)) == pickle.dumps(unshared(separate))
    assert unshared(sharing) == sharing


def metadata(folder, names, entry_names):
    entries = {name: BytesStorageMetadata() for name in names}
    places = {MetadataIndex(name, offset): f"in {name}" for name, offset in entry_names}
    return Metadata(entries, None, None, StorageMeta(folder, save_id=folder)), places


def test_metadata_does_not_tell_where_it_was_written_or_who_was_first(tmp_path):
    name, again = of_its_own("weight"), of_its_own("weight")
    versions = [
        metadata("here", [name, "rng"], [(name, (0, 0)), (name, (1, 0)), ("rng", None)]),
        metadata("there", ["rng", again], [("rng", None), (name, (1, 0)), (again, (0, 0))]),
    ]
    written = []
    for version, places in versions:
        write_metadata(str(tmp_path), version, places)
        written.append((tmp_path / METADATA_FILE).read_bytes())
    assert written[0] == written[1]
    kept = pickle.loads(written[0])
    first, places = versions[0]
    assert kept.state_dict_metadata == first.state_dict_metadata
    assert kept.storage_data == places
    assert kept.storage_meta is None
