"""Trainer ranks as forked processes, without Ray: each test gets fresh ones, and none outlives it."""

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from trainer_core.config import RankSpec, TrainerConfig
from trainer_core.start import start_trainer

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.trainer_core.preload"])


def run_trainers[T](model_dir: str, config: TrainerConfig, body: Callable[..., T], *args: object) -> list[T]:
    """`body(trainer, *args)` on every rank of the layout; the ranks' results."""
    return run_ranks(config.parallel.world_size, _with_trainer, model_dir, config, body, args)


def run_ranks[T](world_size: int, function: Callable[..., T], *args: object, timeout: float = 600) -> list[T]:
    """`function(rank, world_size, store, *args)` in that many processes; their results in the order of ranks.

    A failing rank fails the caller with its traceback, and the others, which wait for it, are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _FORKS.Pipe(duplex=False)
            processes.append(_FORKS.Process(target=_main, args=(theirs, rank, world_size, store, function, args)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _results(pipes, time.monotonic() + timeout)
        finally:
            _end(processes)


def _main(pipe: Connection, rank: int, world_size: int, store: str, function: Callable, args: tuple) -> None:
    try:
        pipe.send((True, function(rank, world_size, store, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


def _with_trainer(
    rank: int, world_size: int, store: str, model_dir: str, config: TrainerConfig, body: Callable, args: tuple
) -> object:
    trainer = start_trainer(model_dir, config, RankSpec(rank=rank, world_size=world_size, store=store))
    result = body(trainer, *args)
    trainer.close()
    return result


def _results(pipes: list[Connection], deadline: float) -> list:
    results: dict[Connection, object] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for pipe in pipes if pipe not in results]
        ready = multiprocessing.connection.wait(open_pipes, timeout=deadline - time.monotonic())
        assert ready, f"ranks {[pipes.index(pipe) for pipe in open_pipes]} did not finish in time"
        for pipe in ready:
            succeeded, result = pipe.recv()
            assert succeeded, f"rank {pipes.index(pipe)} failed:\n{result}"
            results[pipe] = result
    return [results[pipe] for pipe in pipes]


def _end(processes: list) -> None:
    for process in processes:
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
