import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.proof.faults import Fault, FaultFolder, injected
from storage.errors import InputError
from storage.kill_points import Point
from tasks.stages.names import Stage


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Stage.TRAIN, 2, Point.PARTS_DONE, "trainer-1"),
        Fault(Stage.WEIGHT_SYNC, 0, Point.STARTED, "node"),
        Fault(Stage.ROLLOUT, 13, Point.MID_PART),
    ],
)
def test_a_fault_reads_as_it_is_spelled(fault):
    assert Fault.parse(str(fault)) == fault


def test_the_victim_may_be_left_out():
    assert Fault.parse("train@2:upload") == Fault(Stage.TRAIN, 2, Point.UPLOAD, "flow")


@pytest.mark.parametrize("text", ["train:2", "learn@2:upload", "train@2:later", "train@2:upload:nobody", ""])
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="STAGE@ITERATION:POINT"):
        Fault.parse(text)


def test_a_victim_is_killed_once_at_its_point(tmp_path):
    victims = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    processes = {"engine-0": victims[0].pid, "trainer-0": victims[1].pid}
    folder = FaultFolder(tmp_path)
    fault = Fault(Stage.REWARD, 1, Point.PARTS_DONE, "engine-0")
    folder.plan([fault, Fault(Stage.REWARD, 1, Point.PARTS_DONE, "engine-7")])
    for point, key in [
        (Point.STARTED, "run/manifests/000001/reward.r0.json"),
        (Point.PARTS_DONE, "run/manifests/000002/reward.r0.json"),
        (Point.PARTS_DONE, "run/manifests/000001/rollout.r0.json"),
        (Point.PARTS_DONE, "run/lease/000000001.json"),
    ]:
        folder.observe(point, key, lambda: processes)
    assert folder.delivered() == []
    for _ in range(2):
        folder.observe(Point.PARTS_DONE, "file:///somewhere/run/manifests/000001/reward.r0.json", lambda: processes)
    assert folder.delivered() == [fault]
    assert victims[0].wait(timeout=60) == -9
    assert victims[1].poll() is None
    victims[1].communicate()
    assert [(reached.iteration, reached.stage, reached.point) for reached in folder.reached()][-1] == (
        1, Stage.REWARD, Point.PARTS_DONE,
    )  # fmt: skip


def test_the_middle_of_a_part_is_not_the_middle_of_a_manifest(tmp_path):
    folder = FaultFolder(tmp_path)
    folder.observe(Point.MID_PART, "run/manifests/000001/rollout.r0.pieces/00000-ab.json", dict)
    folder.observe(Point.MID_PART, "run/parts/000001/rollout/groups-00000-0123456789abcdef.arrow", dict)
    assert len(folder.reached()) == 1


def test_without_a_folder_nothing_is_observed(tmp_path):
    with injected(None, dict):
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_several_threads_that_come_by_a_point_one_kills(tmp_path):
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = FaultFolder(tmp_path)
    folder.plan([Fault(Stage.TRAIN, 1, Point.UPLOAD, "trainer-0")])
    together = threading.Barrier(8)

    def come_by(_number):
        together.wait()
        folder.observe(Point.UPLOAD, "run/parts/000001/train/x", lambda: {"trainer-0": victim.pid})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_by, range(8)))
    assert len(folder.delivered()) == 1
    victim.communicate()
