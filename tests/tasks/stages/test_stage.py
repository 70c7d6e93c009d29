import pytest

from storage.backends.root import open_root
from storage.errors import CommitConflict
from storage.parts import PartWriter
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, run_stage


@pytest.fixture
def root(tmp_path):
    return open_root(str(tmp_path))


def body_of(writer, calls, text=b"result"):
    def body():
        calls.append(text)
        return StageOutput(parts=(writer.write_bytes("part.bin", text),), facts={"weight_version": 1})

    return body


def writer_for(root, stage=Stage.ROLLOUT, iteration=1):
    return PartWriter(root, "run", iteration, stage)


def test_a_committed_stage_is_not_done_again(root):
    calls = []
    writer = writer_for(root)
    first = run_stage(writer, "config", {}, body_of(writer, calls))
    second = run_stage(writer, "config", {}, body_of(writer, calls))
    assert (first.reused, second.reused) == (False, True)
    assert second.manifest == first.manifest
    assert len(calls) == 1


def test_a_body_that_fails_commits_nothing(root):
    writer, calls = writer_for(root), []

    def broken():
        writer.write_bytes("part.bin", b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        run_stage(writer, "config", {}, broken)
    assert not run_stage(writer, "config", {}, body_of(writer, calls)).reused


@pytest.mark.parametrize("config", ["config", "another"])
def test_other_inputs_or_configuration_are_a_conflict(root, config):
    up_one, up_two = (writer_for(root, iteration=n) for n in (1, 2))
    inputs = [
        run_stage(up, "config", {}, body_of(up, [], text)).manifest for up, text in ((up_one, b"1"), (up_two, b"2"))
    ]
    writer = writer_for(root, Stage.REWARD)
    run_stage(writer, "config", {"rollout": inputs[0]}, body_of(writer, []))
    other = {"rollout": inputs[1] if config == "config" else inputs[0]}
    with pytest.raises(CommitConflict, match="rollout" if config == "config" else "configuration"):
        run_stage(writer, config, other, body_of(writer, []))


def test_a_lost_race_is_adopted_if_equal_and_a_conflict_if_not(root):
    writer = writer_for(root)

    def overtaken(text):
        def body():
            # another process commits the same stage while this one is still working
            run_stage(writer, "config", {}, body_of(writer, [], b"result"))
            return body_of(writer, [], text)()

        return body

    assert run_stage(writer, "config", {}, overtaken(b"result")).manifest.writer
    other = writer_for(root, iteration=2)

    def overtaken_otherwise():
        run_stage(other, "config", {}, body_of(other, [], b"theirs"))
        return body_of(other, [], b"mine")()

    with pytest.raises(CommitConflict, match="other content"):
        run_stage(other, "config", {}, overtaken_otherwise)
