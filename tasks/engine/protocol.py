"""The engine door: the calls by which an engine samples, scores and gets new weights. Imports no vLLM, torch or Ray."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from storage.digest import value_digest
from storage.errors import InputError, SyncMismatch
from trainer_core.config import Device, Frozen
from trainer_core.lora import LoraConfig
from trainer_core.weights.channel import Channel

TokenIds = Sequence[int] | NDArray[np.int32]  # the tokens of one sequence


COMPLETIONS = pa.schema(
    [
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)
"""Table that `EngineProtocol.generate` returns; fields as in `storage.schema.ROLLOUT`."""

ROUTES = pa.field("routes", pa.large_binary())
"""One more field of it, with `EngineSpec.routes`."""

BASE = "base"
"""Entry of a table of digests for the frozen weights beside a live adapter, with the digest a state has of them."""

KV_CACHE_BYTES_ON_CPU = 128 << 20  # the key-value cache where nothing says how large it may be

InFlight = Literal["abort", "wait", "keep"]
"""Treatment of requests in flight by a weight update: `abort` drops them, `wait` finishes them first, `keep` continues
them under the new weights, from which their key-value cache is computed again."""


class EngineSpec(Frozen):
    """Everything an engine is started with."""

    model_dir: str
    """Hugging Face directory: architecture, and the weights it starts with."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: kernels read the weights of linear layers as FP8 numbers with a scale of each row, and their inputs become
    FP8 numbers with a scale of each token. Only on CUDA, with `bfloat16`."""
    max_model_len: int = Field(ge=2)
    """Longest sequence, prompt and response together, in tokens."""
    max_num_seqs: int = Field(default=512, ge=1)
    """Sequences decoded together."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of a card's key-value cache. None: what `gpu_memory_utilization` leaves, `KV_CACHE_BYTES_ON_CPU` on CPU."""
    device: Device = "cpu"
    """Device that computes."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of the card that must be free at the start; the trainer needs the rest. No effect on CPU."""
    enforce_eager: bool = True
    """Run without CUDA graphs and compilation: slower steps, a start within seconds. Always the case on CPU."""
    async_scheduling: bool = False
    """Schedule a step while the one before computes. Never the case on CPU."""
    together: bool = True
    """Sample batches one after another, and admit all requests of a batch before its first step. Which requests share a
    step then depends on the batch alone, not on when it arrived: the same batch gives the same bits again."""
    tensor: Literal[1, 2, 4] = 1
    """Processes, with a card each, over which every layer is split."""
    own_core: bool = False
    """True if vLLM's scheduler runs in a process of its own, beside the one that prepares requests and collects
    responses. Always the case with `tensor` above 1."""
    sleeps: bool = False
    """True if `sleep` frees the card's memory; only on CUDA."""
    adapter: LoraConfig | None = None
    """Adapters that the engine adds to its weights, which are frozen; without them it is sent their sums."""
    routes: bool = False
    """Tell the experts of each token, of a model that has them."""
    seed: int = 0
    """Seed of the engine; samples have their own seeds."""

    @property
    def has_processes(self) -> bool:
        """True if the engine starts processes, which meet in a folder."""
        return self.own_core or self.tensor > 1

    def check_lengths(self, sequences: Sequence[TokenIds], what: str) -> None:
        """Check that each sequence leaves room for one sampled token; `what` names one in the message. Raises
        InputError: one is empty or too long."""
        limit = self.max_model_len - 1
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                fact = f"{what} {index} has {len(sequence)} tokens; the engine accepts 1 to {limit}"
                raise InputError(f"{fact} (engine.max_model_len is {self.max_model_len} and one token is sampled)")

    def check_batch(self, number: int, prompts: Sequence[TokenIds]) -> None:
        """Raises InputError: a batch has no prompts, or one that is empty or too long."""
        if not len(prompts):
            raise InputError(f"batch {number} holds no prompts: there is nothing to sample")
        self.check_lengths(prompts, "prompt")


def unusable_weights(reason: str) -> SyncMismatch:
    """Refusal to sample or score after a failed weight sync."""
    fact = f"the engine's weights cannot be used because the last weight sync failed ({reason})"
    return SyncMismatch(f"{fact}; sync the weights again before generating")


class Sampling(Frozen):
    """Sampling settings of one batch."""

    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0 selects the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that can be drawn; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Least probability of a token that can be drawn, as a share of the likeliest one's."""
    max_tokens: int = Field(ge=1)
    """Limit on response tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response and are part of it. No other token does: a model's own EOS must be listed."""
    stop: tuple[str, ...] = ()
    """Texts that end a response with the token that completes one, wherever it lies in the response's bytes. All
    sampled tokens are part of the response, with what the last one may add after the text."""


class EngineIdentity(Frozen):
    """Identity of the weights that an engine holds."""

    weight_version: int | None
    """Version stamped at the last commit; None before the first, and while the weights are unusable."""
    weights_digest: str | None
    """`weights_digest` of those weights."""


class Arrived(Frozen):
    """Report of an engine on an update that it has received, loaded and verified, but not yet committed."""

    digests: dict[str, str]
    """`tensor_digest` of each tensor by name, of what arrived; the same from every worker of the engine."""
    landed: int
    """Tensors that were found again in the live parameters, over all workers."""
    bytes: int
    """Bytes read, by one worker."""
    quantized: str | None = None
    """Digest of the FP8 numbers and scales that kernels read, over all workers; None if there are none."""
    seconds: dict[str, float]
    """Time by what it was spent on, of the slowest worker: wait, load, digest, finish."""


class Finished(NamedTuple):
    """A batch of requests that has been sampled."""

    number: int  # as it was queued
    completions: pa.RecordBatch  # schema `COMPLETIONS`, one row per prompt
    weight_version: int | None = None
    """Version of the weights that the engine served when it began with the batch; None if that was stamped with none.
    Where an update keeps requests that are under way, their last tokens are of a later one."""
    cached: tuple[int, int] | None = None
    """Tokens of the prompts that the prefix cache held, and those of one of its blocks; None if it does not tell."""


class Every(NamedTuple):
    """Growth after which an engine tells a response that goes on; what comes first counts."""

    tokens: int
    seconds: float


class Begun(NamedTuple):
    """The beginning of a response, sampled earlier: by the same weights, or by older ones (`rollout.updates`)."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # of each of them, nat

    def grown(self, more: "Begun") -> "Begun":
        """The beginning with what came after it."""
        return Begun(np.concatenate([self.tokens, more.tokens]), np.concatenate([self.logprobs, more.logprobs]))


NOTHING = Begun(np.empty(0, np.int32), np.empty(0, np.float32))
"""The beginning of a response of which there is none yet."""


class Increment(NamedTuple):
    """Tokens by which a response that goes on has grown."""

    number: int  # of its batch, as it was queued
    row: int  # place of its prompt in the batch
    first: int  # tokens of the response before these
    grown: Begun  # these tokens
    weight_version: int | None  # version of the weights that sampled them, as in `Finished`


class Collected(NamedTuple):
    """Results of an engine since the previous call."""

    finished: list[Finished]  # batches of which every response is complete
    samples: int  # responses that ended, of finished batches and of others
    increments: Sequence[Increment] = ()  # growth of responses that go on, in batches that were queued with `every`


def weights_digest(digests: Mapping[str, str]) -> str:
    """Identity of a whole set of weights, given each tensor's digest by its Hugging Face name."""
    return value_digest(dict(digests))


class EngineProtocol(Protocol):
    """One engine. One call at a time, but it samples many batches at once: `enqueue` them, and `collect` what is done.
    Every other call drops what was queued and not collected: whoever queued it is gone. The next `drop` gives what was
    sampled of it."""

    def identity(self) -> EngineIdentity:
        """Identity of the weights that the engine holds."""
        ...

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        """Sample one response for each (prompt, seed), in their order. Log-probabilities are those of the distribution
        that was sampled from (after temperature and what cuts tokens off), float32 nats; at temperature 0 they are the
        model's own, at temperature 1. Returns a batch of schema `COMPLETIONS`, one row per prompt. Raises InputError
        (there is no prompt, or one is empty or leaves no room for a response) or SyncMismatch (the last weight update
        failed, so the weights must not be used)."""
        ...

    def enqueue(
        self,
        number: int,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Begun] = (),
        every: Every | None = None,
        name: str = "",
    ) -> None:
        """Queue a batch to be sampled as by `generate`, beside those that are under way, and return at once. `collect`
        names the batch by `number`; each is under way once. Responses go on from what is `begun`, one for each prompt,
        and are whole in the end; an engine whose responses depend on prompt and seed alone may sample all of them
        again. With `every`, `collect` gives increments. `name` is that by which `drop` knows the batch; without one
        nothing is given of it. Raises InputError, SyncMismatch: as `generate`."""

    def collect(self, wait_s: float) -> Collected:
        """Sample until a batch is finished, for at most `wait_s` seconds and a step; at once if none is under way."""
        ...

    def drop(self) -> Mapping[str, Sequence[Increment]]:
        """Forget every batch that is under way. Returns by name what was sampled of these batches, and of those that
        other calls have dropped since the last time, and may not be known: nothing whose increments were collected
        before the last `collect`. Of a response that had ended its last token lacks, from which it ends again. An
        engine that gives no increments has nothing."""
        ...

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """Log-probability of each token given those before it, at temperature 1. Returns for each sequence float32 nats
        of its tokens 1, 2, ...; one entry less than it has tokens. Raises InputError: a sequence is empty or fills the
        whole context (the engine always samples one token more); SyncMismatch: the last weight update failed, so the
        weights must not be used."""
        ...

    def survey_model(self) -> str | None:
        """Look at the live model of each worker, for an update that trainer ranks are planning meanwhile. What was seen
        serves the next `prepare_update` alone, which would look itself otherwise. Requests go on. Returns
        `WeightPlan.base` of the frozen weights that an update has brought to an engine with `EngineSpec.adapter`; None
        if there are none."""
        ...

    def prepare_update(
        self, plan: str, digest: str, channel: Channel, first_receiver: int, in_flight: InFlight = "abort"
    ) -> str:
        """Get ready to receive; nothing is written yet, and the weights of before still serve. `plan` is a `WeightPlan`
        as JSON, with the `digest` that the trainer ranks computed; the update arrives by `channel`, among whose
        receivers this engine's workers are numbered from `first_receiver`. Of the requests under way (`in_flight`),
        finished ones stay for `collect`, and kept ones are held until the update is committed or aborted. Returns the
        digest of the plan as every worker computed it. Raises SyncMismatch: the plan is not what the live model of a
        worker needs, with the names; or workers disagree with each other or with `digest`."""
        ...

    def receive_update(self) -> Arrived:
        """Receive what was prepared, load it in place, and verify what landed. From the first byte that is written
        until `commit_update` the engine refuses to generate. Called while the trainer ranks send. Raises SyncMismatch:
        a tensor did not arrive, is not loaded, or landed otherwise than it was sent; with its name."""
        ...

    def commit_update(self, version: int, weights_digest: str) -> EngineIdentity:
        """Serve what was received: empty the prefix cache and stamp the weights. Returns what `identity` says then. Of
        frozen weights it returns what was committed, and refuses to generate until an adapter is. The digest of an
        adapter is that of its factors and the entry `BASE`. Raises SyncMismatch: nothing was received, or not this."""
        ...

    def abort_update(self, reason: str) -> bool:
        """Forget what was prepared. Returns whether the weights of before still serve: not if they were written to;
        then the engine refuses to generate, with that reason, until the next commit. Safe to call at any time."""
        ...

    def refuse(self, reason: str) -> None:
        """Refuse to generate with the weights that are held, with that reason, until the next commit."""

    def held(self) -> dict[str, str]:
        """Digest of each tensor of the committed weights by name: of what the live parameters hold now, where kernels
        use them as they were loaded, else as it arrived. Empty if nothing is committed. What is queued stays, and an
        engine that sleeps goes on sleeping: of it, what was committed."""
        ...

    def sleep(self) -> bool:
        """Give the card's memory back until the next call that needs it, as to a trainer on the same card: what is
        queued is dropped, weights go to memory of the host, and the key-value cache is emptied. Returns whether it
        does; not if it was started without `EngineSpec.sleeps`, as on CPU: then nothing happens."""
        ...

    def wake(self) -> None:
        """Take the card's memory again, with the weights of before; calls that need it do so by themselves."""


class ValuesProtocol(Protocol):
    """An engine whose model is a classifier: it gives a value in place of responses."""

    def values(self, sequences: Sequence[TokenIds]) -> NDArray[np.float32]:
        """(N,) values after the last token of each sequence, before any activation. Raises InputError: a sequence is
        empty, or longer than `EngineSpec.max_model_len`."""
        ...
