"""Conversations of a rollout with environments, many at once, their events kept as they happen."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from storage.backends.root import Root
from storage.errors import StageFailed
from storage.parts import PartWriter, row_views
from storage.turns import finish_reasons
from storage.unfinished import TurnEvent, TurnsRecord, find_turns, keep_increment, piece_key
from tasks.config.run import RunConfig
from tasks.data.tokenizer import TextCodec
from tasks.endpoint.driving import Driver, driving
from tasks.engine.protocol import Sampling
from tasks.environments.conversation import Limits, Played, Player, Task
from tasks.environments.hosting import Host
from tasks.environments.playing import find_environment
from tasks.environments.reading import reading
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import EngineSampler
from tasks.environments.scores import Kept
from tasks.environments.trajectory import columns_of
from tasks.stages.context import RunContext
from tasks.stages.prepared import Records, model_directory, text_codec
from tasks.stages.views import Prepared
from tasks.workers.interface import EngineHandle
from trainer_core.user_code import source_digest

_LOOK_S = 0.2

Ready = Callable[[int, list[Played]], object]


class Events:
    """The events of the piece with a key, those of earlier processes and new ones."""

    def __init__(self, root: Root, piece: str) -> None:
        self._root, self._piece = root, piece
        stored = find_turns(root, piece)
        self._next, self._waiting = len(stored), list[TurnEvent]()
        self._past = [event for record in stored for event in record.events]
        self._storing = asyncio.Lock()

    def of(self, row: int) -> list[TurnEvent]:
        """Those of one conversation that earlier processes have kept."""
        return [event for event in self._past if event.row == row]

    async def keep(self, row: int, event: TurnEvent) -> None:
        """Store an event, together with others that come while one is being stored. Raises an error of the store;
        StageFailed: the others that it was to be stored with met one."""
        mine = self._waiting
        mine.append(event.model_copy(update={"row": row}))
        async with self._storing:
            if mine is self._waiting:
                self._waiting = []
                record = TurnsRecord(events=tuple(mine))
                self._next = await asyncio.to_thread(keep_increment, self._root, self._piece, self._next, record)
                mine.clear()
        if mine:
            raise StageFailed("the record of a conversation could not be stored: the error beside this one says why")


def environment_source(config: RunConfig) -> dict[str, str]:
    """The name of a run's environment, and the digest of its files; empty if it has none."""
    if config.environment is None:
        return {}
    found = find_environment(config.environment.function)
    return {found.name: source_digest(found)}


def tasks_of(prompts: pa.Table, samples: Iterable[int], seeds: Iterable[int], worlds: Iterable[int]) -> list[Task]:
    """The conversations of one piece, each about a row of the table `prompts`, with the number of its sample, and the
    seeds of the policy and of the environment."""
    records, names = Records(prompts), prompts["prompt_id"].to_pylist()
    rows = zip(
        names, samples, map(records.__getitem__, names), row_views(prompts["prompt_tokens"]), seeds, worlds, strict=True
    )
    return [Task(number, *row) for number, row in enumerate(rows)]


def played_once(
    context: RunContext,
    writer: PartWriter,
    name: str,
    engines: Sequence[EngineHandle],
    version: int,
    prepared: Prepared,
    tasks: Sequence[Task],
    sampling: Sampling,
) -> tuple[pa.Array, pa.Array, list[Kept]]:
    """The conversations of one piece of an evaluation, in the order of `tasks`: for each the tokens after its prompt,
    its finish reason, and what is beside it. What is under way is kept under `name`, so that another process goes on.
    Raises as `play`."""
    found: list[Played] = []
    pieces, codec = [(piece_key(writer, name), tasks)], text_codec(context, prepared)
    play(
        context.root, engines, version, context.config, codec, sampling, model_directory(context, prepared), pieces,
        lambda _, played: found.extend(played), context.go_on,
    )  # fmt: skip
    columns = columns_of([one.trajectory for one in found])
    ends = finish_reasons(pa.chunked_array([columns["turns"]]))
    return columns["response_tokens"], ends, [one.kept for one in found]


def play(
    root: Root,
    engines: Sequence[EngineHandle],
    version: int | None,
    config: RunConfig,
    codec: TextCodec,
    sampling: Sampling,
    model_dir: Path,
    pieces: Sequence[tuple[str, Sequence[Task]]],
    ready: Ready,
    go_on: Callable[[], None],
) -> None:
    """Play the conversations of all pieces, each with its key, with weights of `version`, or any if it is None. `ready`
    is called with the number of each piece and its trajectories as soon as they are there, in any thread, and `go_on`
    now and then; it raises if the play is to end. Raises as `EngineSampler.sample`; InputError also if the environment
    is refused, or vLLM has no such parser."""
    section = config.environment
    assert section is not None
    if not pieces:
        return
    limits = Limits(section.turns, section.tokens, section.seconds, section.retries, config.engine.max_model_len)
    with ExitStack() as stack:
        host, reader = stack.enter_context(Host(section)), stack.enter_context(reading(section, model_dir))
        sampler = stack.enter_context(EngineSampler(engines, version))
        if host.drives:
            player = stack.enter_context(driving(section, host, sampler, sampling, codec, limits, reader))
        else:
            player = Player(host, sampler, sampling, codec, Renderer(codec, most=limits.context), limits, reader)
        asyncio.run(_played(player, root, pieces, section.processes, ready, go_on))


async def _played(
    player: Player | Driver,
    root: Root,
    pieces: Sequence[tuple[str, Sequence[Task]]],
    processes: int,
    ready: Ready,
    go_on: Callable[[], None],
) -> None:
    places = asyncio.Semaphore(processes)

    async def one(task: Task, events: Events) -> Played:
        async with places:
            return await player.play(task, events.of(task.row), lambda event: events.keep(task.row, event))

    async def piece(number: int, key: str, tasks: Sequence[Task]) -> None:
        events = Events(root, key)
        played = await asyncio.gather(*(one(task, events) for task in tasks))
        await asyncio.to_thread(ready, number, played)

    async def watch() -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            go_on()

    all_of_them = asyncio.gather(*(piece(number, *one) for number, one in enumerate(pieces)))
    done, _ = await asyncio.wait({all_of_them, asyncio.ensure_future(watch())}, return_when=asyncio.FIRST_COMPLETED)
    for one_done in done:
        one_done.result()
