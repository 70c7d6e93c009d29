"""Passes of the model over sequences, in flat micro-batches, through Megatron's forward-backward schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from trainer_core.batches.flat import alike, flatten
from trainer_core.batches.micro_batching import BatchLimits, share
from trainer_core.batches.sequences import Sequences, TopTokens, Vector
from trainer_core.config import FP8_POSITIONS
from trainer_core.model.mesh import Mesh
from trainer_core.model.micro_batch import MicroBatch, place
from trainer_core.model.model import Model
from trainer_core.model.replay import FEWEST, Recorders, Report, replayed
from trainer_core.model.vocab_parallel import EntropyUse, likeliest, log_probabilities, log_probabilities_at
from trainer_core.objectives.tokens import TokenLoss

# (micro-batch, log-probabilities, entropies) -> loss of each response token; all (R,)
LossFunction = Callable[[MicroBatch, torch.Tensor, torch.Tensor], TokenLoss]


@dataclass(frozen=True)
class TokenScores:
    """Values of the response tokens of all sequences, flat; float32, 0 in rows that were not requested."""

    logprobs: Vector  # log-probability of each response token, in nats
    entropy: Vector  # entropy of the distribution it was drawn from, in nats; 0 if it was not requested
    top: TopTokens | None = None  # the likeliest tokens there, if they were requested


@dataclass(frozen=True)
class Objective:
    loss: LossFunction  # loss of each response token
    temperature: float  # divides the logits
    entropy: EntropyUse  # use of the entropy in the loss or the report
    compares: bool = False
    """The loss also needs the log-probabilities of the (R, k) tokens `top_tokens`, which it finds as `top_own`."""


@dataclass(frozen=True)
class Gradients:
    loss: float  # weighted mean over response tokens
    clip_fraction: float  # share of response tokens whose surrogate was clipped
    scores: Callable[[], TokenScores]  # values from which the loss was computed. Collective.
    auxiliary_loss: float | None
    """Auxiliary loss of routers beside `loss`, coefficient included; None if they are not balanced."""


@dataclass(frozen=True)
class Passes:
    """The two passes through the model: scoring, and gradients of a loss. Both are collective."""

    model: Model
    mesh: Mesh
    limits: BatchLimits  # those of a micro-batch of one data-parallel rank
    recorders: Recorders | None = None
    """Recorders of micro-batches, which launch them again as one graph; None launches kernel by kernel."""
    top_k: int = 0
    """Number of likeliest tokens that scoring gives for each response token."""
    among: int = 0
    """They are among so many of the vocabulary's first tokens; at least `top_k`."""

    def score(
        self, sequences: Sequences, rows: NDArray[np.int64], temperature: float, entropy: EntropyUse = "none"
    ) -> TokenScores:
        """Log-probabilities and entropies of `rows` without gradients; every rank gets all of them."""
        batches = self._batches(sequences, rows, np.zeros(len(sequences), dtype=np.float32), {})
        finish = partial(self._scored, temperature=temperature, entropy=entropy)
        with torch.no_grad():
            reports = self._run(batches, finish, forward_only=True)
        return self._scores(sequences, batches, reports, self.top_k)

    def gradients(
        self,
        sequences: Sequences,
        rows: NDArray[np.int64],
        weights: Vector,
        values: Mapping[str, NDArray],
        objective: Objective,
    ) -> Gradients:
        """Leave the gradient of the loss of `rows` in the model's buffers, reduced over data-parallel ranks. The loss
        is sum(weight * sum over the response of the tokens' losses) / response tokens, over all micro-batches and
        ranks, so it does not depend on how rows are divided. `weights` are those of the (N,) sequences, `values` of all
        response tokens."""
        self.model.zero_gradients()
        balance = self.model.balance
        if balance is not None:
            balance.begin(int(sequences.response_lengths[rows].sum()), int(sequences.positions[rows].sum()))
        batches = self._batches(sequences, rows, weights, values)
        reports = self._run(batches, partial(self._differentiated, objective=objective), forward_only=False)
        tokens = sum(batch.host.response_tokens for batch in batches)
        sums = torch.stack([report["sums"] for report in reports]).double().sum(0).tolist() if reports else [0.0, 0.0]
        loss, clipped, count = self.mesh.combine(np.array([*sums, tokens])).tolist()
        scores = partial(self._scores, sequences, batches, reports)
        auxiliary = None if balance is None else float(self.mesh.add(np.array([balance.own_sum()]))[0])
        return Gradients(loss / count, clipped / count, scores, auxiliary)

    def _batches(
        self, sequences: Sequences, rows: NDArray[np.int64], weights: Vector, values: Mapping[str, NDArray]
    ) -> list[MicroBatch]:
        mesh, parallel = self.mesh, self.mesh.parallel
        held = mesh.context.held(sequences.positions)
        shares = share(held, rows, parallel.data, self.limits, parallel.rounds)[mesh.data_rank]
        multiple = FP8_POSITIONS if self.model.config.fp8 else parallel.tensor if parallel.sequence else 1
        batches = [flatten(sequences, chosen, multiple, mesh.context) for chosen in shares]
        if self.recorders is not None:
            batches = alike(batches)
        placed = place(batches, weights, values, mesh, self.model.transformer_engine)
        if self.model.replay is None or sequences.routes is None:
            return placed
        routes = [self.model.replay.routing.of_batch(sequences, batch) for batch in batches]
        return [
            replace(batch, routes=torch.from_numpy(given).to(mesh.device))
            for batch, given in zip(placed, routes, strict=True)
        ]

    def _run(self, batches: list[MicroBatch], finish: Callable[..., Any], forward_only: bool) -> list[Report]:
        self.model.residence.resume("parameters")
        schedule = partial(self._scheduled, finish=finish, forward_only=forward_only)
        if self.recorders is None or len(batches) < FEWEST:
            return schedule(batches, self.model.sources(batches))
        recorder = self.recorders.scoring if forward_only else self.recorders.training
        with self.model.unreduced():
            reports = replayed(batches, lambda some: schedule(some, iter(some)), recorder)
        if not forward_only:
            self.model.reduce(torch.stack([batch.count for batch in batches]).sum(dtype=torch.int32))
        return reports

    def _scheduled(
        self,
        batches: Sequence[MicroBatch],
        source: Iterator[MicroBatch] | list[Iterator[MicroBatch]],
        finish: Callable[..., Any],
        forward_only: bool,
    ) -> list[Report]:
        """Run micro-batches in the order of Megatron's schedule; the buffers then hold the sums of their gradients."""

        def forward(batches: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(batches)
            # last stage: logits (R, V/tp); before it: hidden states (T, 1, H)
            output = self.model.forward(module, batch)
            return output, partial(finish, batch)

        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=source,
            model=list(self.model.chunks),
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],  # stages tell each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        self.model.check_numbers()
        return reports

    def _logprobs(
        self, batch: MicroBatch, logits: torch.Tensor, temperature: float, entropy: EntropyUse
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, group = self.model.vocab_size, self.mesh.tensor_group
        return log_probabilities(logits, batch.targets, temperature, size, group, entropy)

    def _scored(
        self, batch: MicroBatch, logits: torch.Tensor, temperature: float, entropy: EntropyUse
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Finish a micro-batch on the last stage: (sum to differentiate, its tokens, report)."""
        found = torch.stack(self._logprobs(batch, logits, temperature, entropy))  # (2, R)
        if self.top_k:
            size, group = self.model.vocab_size, self.mesh.tensor_group
            top = likeliest(logits, self.top_k, self.among, temperature, size, group)
            found = torch.cat([found, *(one.T.to(found.dtype) for one in top)])  # (2 + 2 k, R)
        return found.sum(), batch.count, {"values": found}

    def _differentiated(
        self, batch: MicroBatch, logits: torch.Tensor, objective: Objective
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        logprobs, entropy = self._logprobs(batch, logits, objective.temperature, objective.entropy)
        if objective.compares:
            size, group, tokens = self.model.vocab_size, self.mesh.tensor_group, batch.values["top_tokens"]
            own = log_probabilities_at(logits, tokens, objective.temperature, size, group)
            batch = replace(batch, values={**batch.values, "top_own": own})
        result = objective.loss(batch, logprobs, entropy)
        total = (batch.segments.own_sum(result.loss) * batch.weights).sum()
        clipped = (batch.segments.own_sum(result.clipped) * (batch.weights != 0)).sum()
        report = {
            "values": torch.stack((logprobs.detach(), entropy.detach())),
            "sums": torch.stack((total.detach(), clipped)),
        }
        return total, batch.count, report

    def _scores(
        self, sequences: Sequences, batches: list[MicroBatch], reports: Sequence[Report], top_k: int = 0
    ) -> TokenScores:
        rows = 2 + 2 * top_k
        found = np.zeros((rows, int(sequences.response_lengths.sum())))
        if reports:  # of the last stage
            values = torch.cat([report["values"] for report in reports], dim=1).double().cpu().numpy()  # (rows, R)
            responses = np.concatenate([batch.host.responses for batch in batches])
            found[:, responses[responses >= 0]] = values[:, responses >= 0]
        found = self.mesh.combine(found).astype(np.float32)  # which is exact for ids below 2^24
        top = TopTokens(found[2 : 2 + top_k].T.astype(np.int32), found[2 + top_k :].T) if top_k else None
        return TokenScores(found[0], found[1], top)
