"""Run the model over padded rows, in micro-batches, through Megatron's forward-backward schedules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from trainer_core.batches.sequences import Matrix, Padded, share_rows
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.model.token_loss import TokenLoss
from trainer_core.model.vocab_parallel import log_probabilities


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, on this rank's device."""

    rows: NDArray[np.int64]
    """(B,) row numbers; -1 pads the last micro-batch."""
    tokens: torch.Tensor
    """(B, S) int64."""
    targets: torch.Tensor
    """(B, S) int64."""
    mask: torch.Tensor
    """(B, S) bool, all False in padding rows."""
    extras: Mapping[str, torch.Tensor]
    """Further (B, S) float32 matrices that the loss needs, by name."""


# (micro-batch, log-probabilities, entropies) -> loss of each position; all (B, S)
LossFunction = Callable[[MicroBatch, torch.Tensor, torch.Tensor], TokenLoss]


@dataclass(frozen=True)
class Scores:
    """The model's values for every position of the rows; (N, S) float32, 0 in rows that were not requested."""

    logprobs: Matrix
    """Log-probability of the target, in nats."""
    entropy: Matrix
    """Entropy of the distribution over the next token, in nats."""


@dataclass(frozen=True)
class Passes:
    """The two passes through the model: scoring, and gradients of a loss. Both are collective."""

    model: Model
    mesh: Mesh
    micro_batch_size: int
    """Rows per micro-batch and data-parallel rank."""

    def score(self, padded: Padded, rows: NDArray[np.int64], temperature: float) -> Scores:
        """Log-probabilities and entropies of `rows` without gradients; every rank gets all of them."""
        found = np.zeros((2, *padded.tokens.shape))
        with torch.no_grad():
            reported = self._run(padded, rows, {}, temperature, loss=None)
        for result in reported:
            owned = result["rows"] >= 0
            values = torch.stack((result["logprobs"], result["entropy"])).double().cpu().numpy()  # (2, B, S)
            found[:, result["rows"][owned], : values.shape[2]] = values[:, owned]
        found = self.mesh.combine(found).astype(np.float32)
        return Scores(found[0], found[1])

    def gradients(
        self,
        padded: Padded,
        rows: NDArray[np.int64],
        extras: Mapping[str, Matrix],
        temperature: float,
        loss: LossFunction,
    ) -> dict[str, float]:
        """Leave the gradient of the loss of `rows` in the model's buffers, reduced over data-parallel ranks.

        The loss is sum(weight * loss) / tokens over all micro-batches and ranks; `extras["weight"]` holds the weights.
        Returns loss and clip_fraction, means over tokens.
        """
        self.model.ddp.zero_grad_buffer()
        reported = self._run(padded, rows, extras, temperature, loss)
        own = [sum(float(result[name]) for result in reported) for name in ("loss", "clipped", "tokens")]
        loss_sum, clipped, tokens = self.mesh.combine(np.array(own)).tolist()
        return {"loss": loss_sum / tokens, "clip_fraction": clipped / tokens}

    def _run(
        self,
        padded: Padded,
        rows: NDArray[np.int64],
        extras: Mapping[str, Matrix],
        temperature: float,
        loss: LossFunction | None,
    ) -> list[dict]:
        shares = share_rows(rows, self.mesh.parallel.data, self.micro_batch_size)[self.mesh.data_rank]
        width = padded.width_of(rows)

        def forward(batches: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(batches)
            positions = torch.arange(width, device=self.mesh.device).expand_as(batch.tokens)  # (B, S)
            output = module(batch.tokens, positions, attention_mask=None)  # last stage: logits (B, S, V/tp)
            return output, lambda logits: self._finish(batch, logits, temperature, loss)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=(self._load(padded, share, width, extras) for share in shares),
            model=[self.model.ddp],
            num_microbatches=len(shares),
            seq_length=width,
            micro_batch_size=len(shares[0]),
            forward_only=loss is None,
        )

    def _load(self, padded: Padded, rows: NDArray[np.int64], width: int, extras: Mapping[str, Matrix]) -> MicroBatch:
        def take(matrix: NDArray) -> torch.Tensor:
            return torch.from_numpy(matrix[rows, :width]).to(self.mesh.device)

        mask = take(padded.mask) & torch.from_numpy(rows >= 0).to(self.mesh.device).unsqueeze(-1)
        tensors = {name: take(matrix) for name, matrix in extras.items()}
        return MicroBatch(rows, take(padded.tokens), take(padded.targets), mask, tensors)

    def _finish(
        self, batch: MicroBatch, logits: torch.Tensor, temperature: float, loss: LossFunction | None
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """What the schedule calls on the last stage: (sum to differentiate, tokens it covers, report)."""
        logprobs, entropy = log_probabilities(
            logits, batch.targets, temperature, self.model.vocab_size, self.mesh.tensor_group
        )
        tokens = batch.mask.sum()
        if loss is None:
            return logprobs.sum(), tokens.int(), {"rows": batch.rows, "logprobs": logprobs, "entropy": entropy}
        result = loss(batch, logprobs, entropy)
        # where, not a product: values at masked positions may be infinite
        total = torch.where(batch.mask, result.loss * batch.extras["weight"], 0.0).sum()
        clipped = torch.where(batch.mask, result.clipped, 0.0).sum()
        return total, tokens.int(), {"loss": total.detach(), "clipped": clipped.detach(), "tokens": tokens}
