"""A stored run around a real train state, and the work of forked processes on it."""

from pathlib import Path

from storage.backends.root import open_root
from storage.manifest import Manifest, commit
from storage.parts import PartWriter
from tasks.config.document import parse_config
from tasks.config.run import RunConfig
from tasks.config.stored import record_config
from tasks.engine.protocol import weights_digest
from tasks.stages.names import Stage
from tests.storage.tables import manifest
from tests.trainer_core.oracle import export
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig

VOCABULARY = 100

KINDS = {
    "Qwen2": ("Qwen2", "fp32", ParallelConfig(pipeline=2), False),
    "Llama": ("Llama", "bf16", ParallelConfig(tensor=2), False),
    "Mistral": ("Mistral", "fp32", ParallelConfig(), False),
    "Qwen3 tied": ("Qwen3", "fp32", ParallelConfig(tensor=2), True),
}


def make_model(rank, world_size, store, directory, kind, tied, **more):
    """Write a random model with the tokenizer files of a chat model."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    shape = {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "head_dim": 16,
        "tie_word_embeddings": tied, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**shape, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)


def save_state(trainer, folder):
    """Import the model and save it as a state; beside it, write the tensors that the trainer sends to engines."""
    trainer.import_model()
    trainer.save(f"{folder}/state")
    return export(trainer, f"{folder}/engine")


def settings(precision: str, parallel: ParallelConfig) -> TrainerConfig:
    return TrainerConfig(
        parallel=parallel, precision=precision, optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64
    )


def config_of(model: str | None, **train) -> RunConfig:
    document = {
        "model": {"generate": {}} if model is None else {"source": model},
        "data": {"generate": {}},
        "train": {"max_length": 64, "optimizer": {"learning_rate": 1e-3}, **train},
    }
    return parse_config(document, "test")


def store_run(
    url: str, folder: Path, records, run: str = "run", digest_of=weights_digest, named: bool = True, **train
) -> None:
    """Put the model and its state into a root as iterations 0 and 1 of a run; only iteration 0 is evaluated. A model
    that is not `named` counts as generated."""
    root, config = open_root(url), config_of(str(folder / "model") if named else None, **train)
    digest = record_config(root, run, config)
    names = sorted(path.name for path in (folder / "model").iterdir())
    state = folder / "state"
    critic = config.train.critic and config.train.critic.source
    beside = [("critic/", Path(critic), sorted(path.name for path in Path(critic).iterdir()))] if critic else []
    saved = sorted(str(path.relative_to(state)) for path in state.rglob("*") if path.is_file())

    def put(stage: Stage, iteration: int, source: str = "", **fields) -> Manifest:
        writer = PartWriter(root, run, iteration, stage)
        places = {
            "model/": [("model/", folder / "model", names), *beside],
            "state/": [("state/", state, saved)],
            "": [],
        }
        parts = tuple(
            writer.write_bytes(name, (place / name).read_bytes()).model_copy(update={"name": prefix + name})
            for prefix, place, there in places[source]
            for name in there
        )
        return commit(root, manifest(stage, iteration, parts, run=run, config_digest=digest, **fields))

    prepared = put(Stage.PREPARE, 0, "model/")
    served = digest_of({record.name: record.digest for record in records})
    for iteration in (0, 1):
        trained = put(Stage.TRAIN, iteration, "state/", inputs={"prepare": prepared.digest})
        facts = {"weight_version": iteration, "weights_digest": served, "cursor": 0}
        put(Stage.WEIGHT_SYNC, iteration, facts=facts, inputs={"train": trained.digest})
    put(Stage.EVALUATE, 0, metrics={"reward_mean": 0.25})


def export_run(rank, world_size, store, url, which, to, precision=None, limit=1 << 16, critic=False):
    """Export; returns what was written."""
    from storage.backends.root import open_root
    from tasks.export.export import export
    from tasks.export.order import ExportFolder, choose

    root = open_root(url)
    return export(root, choose(root, which), ExportFolder.new(to), precision, limit, critic)


def logits_of(rank, world_size, store, directory, weights=None):
    """Logits of plain transformers with a model, or with it and the weights of another folder."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, found = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(found.values()), found
    if weights is not None:
        given = {
            name: tensor for file in Path(weights).glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        assert not model.load_state_dict(given, strict=False).unexpected_keys
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model(tokens).logits.float().numpy()
    chat = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        [{"role": "user", "content": "w5"}], tokenize=False
    )
    return logits, str(model.dtype), chat, model.generation_config.eos_token_id


def export_refused(rank, world_size, store, url, which, to):
    """The message of an export that must fail."""
    from storage.errors import DigestMismatch

    try:
        export_run(rank, world_size, store, url, which, to)
    except DigestMismatch as error:
        return str(error)
    return None


def export_watched(rank, world_size, store, url, to):
    """Size of the exported weights, and the growth of this process's memory meanwhile, bytes."""
    from tasks.export import export as module

    plan, before = module.planned_shards, []

    def planned(*arguments):
        found = plan(*arguments)  # imports come before, and are not part of the measurement
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before.append(_status("VmRSS"))
        return found

    module.planned_shards = planned
    made = export_run(rank, world_size, store, url, "run", to, limit=1 << 30)
    return made.bytes, _status("VmHWM") - before[0]


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
