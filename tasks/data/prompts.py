"""The stored tables of prompts: rendered and tokenized once, a batch at a time, in files mapped into memory."""

import itertools
import json
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from storage.errors import InputError
from storage.schema import PROMPTS
from tasks.data.chat import Turn
from tasks.data.files import Read
from tasks.data.rendering import Rendered, Renderer
from tasks.data.tokenizer import TextCodec
from tasks.data.values import shown, text_of

_ROWS = 1024
_HOLD_OUT = 2  # of the random streams derived from a run's seed


@dataclass(frozen=True)
class Room:
    context: int  # longest sequence that engine and model take, in tokens
    max_tokens: int  # tokens of it that a response may take
    max_length: int | None = None  # longest sequence that the trainer takes, for prompts with solved answers
    drop: bool = False  # drop longer ones instead of refusing them


def mapped(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Batches of the prompt schema as a table whose memory is a file: it takes none until it is read."""
    with tempfile.NamedTemporaryFile(prefix="ratchet-prompts-") as file:
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, PROMPTS) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(file.name)).read_all()  # the mapping outlives the file's name


def prompt_batches(
    records: Iterable[Read], renderer: Renderer, room: Room, qualifier: str = ""
) -> Iterator[pa.RecordBatch]:
    """The rows of one source, without those that `room` drops; the qualifier goes before every id. Raises InputError,
    naming the record: its prompt is missing, empty, too long or of tokens that the model lacks."""
    for some in itertools.batched(enumerate(records, 1), _ROWS):
        reads = [read for _, read in some]
        rendered = [renderer.render(read.values, read.place) for read in reads]
        ids = [qualifier + id_of(read, str(renderer.source.id_field), number) for number, read in some]
        for name, one in zip(ids, rendered, strict=True):
            for kind in one.kinds:
                renderer.kinds.setdefault(kind, name)
        batch = _batch(ids, rendered, reads, renderer)
        _note_unknown(batch, reads, renderer)
        yield _fitting(batch, [f"{renderer.where}, {read.place}" for read in reads], renderer.codec, room)


def id_of(read: Read, field: str, number: int) -> str:
    """The id of a record's prompt, or else `number`. Raises InputError: it is neither a text nor an integer."""
    found = read.values.get(field)
    text = str(number) if found is None or found == "" else text_of(found)
    if text is None:
        fact = f"{read.place}: field {field!r} is {shown(found)}, but an id is a text or an integer"
        raise InputError(f"{fact}. Write one, or name another field with data.id_field")
    return text


def twice(table: pa.Table) -> str | None:
    """The first id that occurs twice in a table; None if there is none."""
    _, first, counts = np.unique(_keys(table["prompt_id"]), return_index=True, return_counts=True)
    return table["prompt_id"][int(first[counts > 1].min())].as_py() if (counts > 1).any() else None


def split_off(table: pa.Table, count: int, seed: int) -> tuple[pa.Table, pa.Table, NDArray[np.bool_]]:
    """Split `count` prompts off a table, so that no text is in both parts. The choice follows from `seed` and the texts
    alone. Of equal texts one is held out, and none is left. Returns the table that is left, the one that was split off,
    and True for each row that is left. Raises InputError: nothing would be left."""
    texts, first, which = np.unique(_keys(table["prompt"]), return_index=True, return_inverse=True)
    if count >= len(texts):
        fact = f"data.hold_out = {count} leaves none of the {len(texts)} different prompts for training"
        raise InputError(f"{fact}: lower it")
    chosen = np.zeros(len(texts), dtype=bool)
    chosen[np.random.default_rng([seed, _HOLD_OUT]).permutation(len(texts))[:count]] = True
    held, left = np.zeros(table.num_rows, dtype=bool), ~chosen[which]
    held[first[chosen]] = True
    return _chosen(table, left), _chosen(table, held), left


def check_lengths(
    table: pa.Table, context: int, max_tokens: int, where: str, setting: str = "rollout.max_tokens"
) -> None:
    """Raises InputError: a prompt of a stored table leaves no room for a response, which `setting` limits."""
    lengths, room = _lengths(table["prompt_tokens"].combine_chunks()), Room(context, max_tokens)
    if (lengths + max_tokens > context).any():
        row = int((lengths + max_tokens > context).argmax())
        raise InputError(_no_room(where, table["prompt_id"][row].as_py(), int(lengths[row]), room, setting))


def _batch(ids: list[str], rendered: list[Rendered], reads: Sequence[Read], renderer: Renderer) -> pa.RecordBatch:
    codec, texts = renderer.codec, [one.text for one in rendered]
    prompts = codec.encode_batch(texts)
    made = list(_targets(codec, texts, prompts, [one.turn for one in rendered]))
    for read, target in zip(reads, made, strict=True):
        if isinstance(target, InputError) and renderer.trained:
            raise InputError(f"{renderer.where}, {read.place}: {target}")
    columns = {
        "prompt_id": ids,
        "prompt": texts,
        "prompt_tokens": [one if by.chat else codec.opened(one) for one, by in zip(prompts, rendered, strict=True)],
        "answer": [one.answer for one in rendered],
        "answer_tokens": [None if isinstance(one, InputError) else one for one in made],
        "record": [json.dumps(read.values) for read in reads],
    }
    return pa.RecordBatch.from_pydict(columns, schema=PROMPTS)


def _note_unknown(batch: pa.RecordBatch, reads: Sequence[Read], renderer: Renderer) -> None:
    unknown, prompts = renderer.codec.backend.special.unknown, batch.column("prompt_tokens")
    there = prompts.flatten().to_numpy(zero_copy_only=False) == unknown
    if unknown is not None and there.any():
        sign = renderer.codec.visible([unknown])[0]
        fact = f"the tokenizer lacks characters of the prompt, and gives {sign!r} for them"
        for row in np.unique(np.repeat(np.arange(len(prompts)), _lengths(prompts))[there]):
            renderer.notes.add(fact, reads[int(row)].place)


def _fitting(batch: pa.RecordBatch, places: Sequence[str], codec: TextCodec, room: Room) -> pa.RecordBatch:
    lengths = _lengths(batch.column("prompt_tokens"))
    if not lengths.all():
        raise InputError(f"{places[int(lengths.argmin())]}: the prompt has no tokens: fix or remove the record")
    _check_known(batch, places, codec)
    long = lengths + room.max_tokens > room.context
    if room.max_length is not None:
        long |= lengths + _lengths(batch.column("answer_tokens")) > room.max_length
    if not long.any():
        return batch
    if room.drop:
        return batch.filter(pa.array(~long))
    row = int(long.argmax())
    where, name, length = places[row], batch.column("prompt_id")[row].as_py(), int(lengths[row])
    fact = _no_room(where, name, length, room, "rollout.max_tokens")
    if length + room.max_tokens <= room.context:
        solved = length + int(_lengths(batch.column("answer_tokens"))[row])
        fact = f"{where}: prompt {name!r} is too long: {solved} tokens with its answer, but train.max_length ="
        fact = f"{fact} {room.max_length}. Shorten it or raise train.max_length"
    raise InputError(f'{fact}, or drop such prompts with data.overlong = "drop"')


def _check_known(batch: pa.RecordBatch, places: Sequence[str], codec: TextCodec) -> None:
    for name in ("prompt_tokens", "answer_tokens"):
        column = batch.column(name)
        tokens = column.flatten().to_numpy(zero_copy_only=False)
        if codec.vocabulary is None or tokens.max(initial=0) < codec.vocabulary:
            continue
        first = int((tokens >= codec.vocabulary).argmax())
        row = int(np.searchsorted(np.cumsum(_lengths(column)), first, side="right"))
        text = codec.visible(tokens[first : first + 1])[0]
        raise InputError(
            f"{places[row]}: the tokenizer makes token {tokens[first]} ({text!r}) of it, but the model has embeddings "
            f"for {codec.vocabulary} (vocab_size in config.json): tokenizer and model do not belong together"
        )


def _no_room(where: str, name: str, length: int, room: Room, setting: str) -> str:
    return (
        f"{where}: prompt {name!r} is too long: {length} tokens, and with {setting} = {room.max_tokens} it must fit "
        f"into a context of {room.context}. Shorten it, lower {setting} or raise engine.max_model_len"
    )


def _lengths(column: pa.ListArray) -> NDArray[np.int64]:
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _keys(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """One number for each text, equal for equal texts: 8 bytes a row instead of the texts."""
    slices = (chunk.slice(start, _ROWS) for chunk in column.chunks for start in range(0, len(chunk), _ROWS))
    keys = (xxhash.xxh3_64_intdigest(text.encode()) for some in slices for text in some.to_pylist())
    return np.fromiter(keys, dtype=np.uint64, count=len(column))


def _chosen(table: pa.Table, rows: NDArray[np.bool_]) -> pa.Table:
    batches: Sequence[pa.RecordBatch] = table.to_batches()
    ends = np.cumsum([batch.num_rows for batch in batches])
    return mapped(batch.filter(pa.array(mask)) for batch, mask in zip(batches, np.split(rows, ends[:-1]), strict=True))


def _targets(
    codec: TextCodec, prompts: Sequence[str], tokens: Sequence[list[int]], turns: Sequence[Turn | None]
) -> Iterator[list[int] | InputError | None]:
    """For each of N prompts the tokens of its turn, None if it has none, or the reason why it cannot be trained;
    `tokens` are the N rows of token ids of the prompts, without those that go before a plain text."""
    there = {row: turn for row, turn in enumerate(turns) if turn is not None}
    stops = set(codec.stop_tokens)
    ends = {end: "" if stops.isdisjoint(codec.encode(end)) else end for end in {turn.end for turn in there.values()}}
    texts = {row: turn.body + ends[turn.end] for row, turn in there.items()}
    wholes = dict(zip(there, codec.encode_batch([prompts[row] + text for row, text in texts.items()]), strict=True))
    # where the tokenizer joins the end of the prompt with the answer, the model still samples after the prompt
    joined = [row for row, whole in wholes.items() if whole[: len(tokens[row])] != tokens[row]]
    alone = dict(zip(joined, codec.encode_batch([texts[row] for row in joined]), strict=True))
    bodies = dict(zip(there, codec.encode_batch([turn.body for turn in there.values()]), strict=True))
    targets = {row: alone[row] if row in alone else whole[len(tokens[row]) :] for row, whole in wholes.items()}
    again = dict(zip(there, codec.backend.decode(list(targets.values())), strict=True))
    for row, turn in enumerate(turns):
        if turn is None:
            yield None
        else:
            yield _refusal(codec, turn, bodies[row], again[row]) or codec.closed(targets[row])


def _refusal(codec: TextCodec, turn: Turn, body: list[int], made: str) -> InputError | None:
    """The reason why a turn cannot be trained, whose tokens are those of the text `made`; None if it can."""
    early = next((token for token in (body if turn.end else body[:-1]) if token in codec.stop_tokens), None)
    if early is not None:
        return InputError(
            f"the answer {shown(turn.body)} holds the stop token {codec.visible([early])[0]!r}, and no response goes "
            "on after it: leave it out, or set rollout.stop_tokens"
        )
    if not _plain(made).startswith(_plain(turn.body)):
        return InputError(
            f"the tokenizer makes {shown(made)} of the answer {shown(turn.body)}, for want of tokens for some of its "
            "signs: correct the answer, or use another model"
        )
    return None


def _plain(text: str) -> str:
    """The part of a text that a tokenizer must keep: some compose accents, or leave a blank at the beginning out."""
    return "".join(unicodedata.normalize("NFC", text).split())
