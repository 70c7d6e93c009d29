"""What is recorded about a tensor that a trainer passes to an engine."""

from pydantic import BaseModel, ConfigDict


class TensorRecord(BaseModel):
    """One exported tensor, under its Hugging Face name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Element type as torch spells it, without the prefix: float32, bfloat16."""
    shape: tuple[int, ...]
    """Shape of the whole, unsharded tensor."""
    digest: str
    """`trainer_core.weights.digest.tensor_digest` of the tensor."""
    file: str
    """Name of the safetensors file that holds it, in the folder of the export."""
