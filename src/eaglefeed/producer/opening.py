"""open_target: a target by its name, run by one of the engines; and what it says of itself."""

from pathlib import Path

from eaglefeed.errors import ConfigError
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.loading import DEFAULT_TARGET, load_target
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.storage.pair_group import pair_backends

__all__ = ["ENGINES", "info_of", "open_target"]

ENGINES = ("hf", "vllm", "sglang")


def open_target(
    name: str = DEFAULT_TARGET,
    *,
    engine: str = "hf",
    dtype: str = "float32",
    device: str = "cpu",
    aux_layer_ids: tuple[int, ...] | None = None,
    compact: bool = False,
    tp_size: int = 1,
    engine_url: str = "",
    engine_dir: Path | None = None,
    engine_python: str = "",
    max_length: int | None = None,
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> Eagle3Target:
    """Open a target; its `close` ends what was started for it. Code of vLLM and SGLang is touched only when chosen.

    Args:
        name: as load_target's.
        engine: hf, in this process; vllm, on a server of its own; or sglang, in this process.
        dtype: torch's name of the dtype of weights and features.
        device: where features are made; a vLLM server takes the GPUs that it sees.
        aux_layer_ids: three 0-based decoder layers whose outputs are taken; by default the contract's.
        compact: supervise with last hidden states.
        tp_size: GPUs that share the model (vllm and sglang).
        engine_url: of a vLLM server that runs already, with eaglefeed's connector.
        engine_dir: the folder that server writes captures to; for one of our own, where its folder is made.
        engine_python: interpreter of the environment with vLLM; this one by default.
        max_length: the longest row, for which a vLLM server makes room; the target's positions by default.
        cache_dir: where a converted GGUF is kept.
        num_threads: torch's CPU threads in this process.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ConfigError: the engine is not installed, or settings that do not fit together.
        SchemaError: impossible aux_layer_ids.
        TargetUnavailable: no such target, or an engine that does not start or answer.
        TargetMismatch: the engine runs another target, or one that it cannot supervise with.
    """
    _check(engine, tp_size=tp_size, engine_url=engine_url)
    if engine == "hf":
        model = load_target(
            name,
            dtype=dtype,
            device=device,
            cache_dir=cache_dir,
            num_threads=num_threads,
            trust_remote_code=trust_remote_code,
        )
        return HFEagle3TargetModel(model, aux_layer_ids, compact=compact)
    checkpoint = Checkpoint(name, dtype=dtype, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    if engine == "sglang":
        from eaglefeed.producer.engines.sglang import open_sglang

        return open_sglang(checkpoint, aux_layer_ids, device=device, compact=compact, tp_size=tp_size)
    from eaglefeed.producer.engines.vllm import open_vllm

    return open_vllm(
        checkpoint,
        aux_layer_ids,
        device=device,
        compact=compact,
        url=engine_url,
        folder=engine_dir,
        python=engine_python,
        tp_size=tp_size,
        max_length=max_length,
    )


def info_of(target: Eagle3Target, name: str) -> ModelInfo:
    """What is said of a target, which is called `name`, to those who do not see it."""
    return ModelInfo(
        target=name,
        target_fingerprint=target.fingerprint(),
        dtype=target.dtype,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_hidden_layers=target.num_layers,
        aux_layer_ids=target.aux_layer_ids,
        max_positions=target.max_positions,
        engine=target.engine,
        data_planes=pair_backends(target.device),
    )


def _check(engine: str, *, tp_size: int, engine_url: str) -> None:
    if engine not in ENGINES:
        raise ConfigError("no such engine", subject="target.engine", wanted=", ".join(ENGINES), got=engine)
    if engine == "hf" and tp_size > 1:
        fix = "use target.engine=vllm or sglang to share a target between GPUs"
        raise ConfigError("the engine hf runs on one device", subject="target.tp_size", got=tp_size, fix=fix)
    if engine_url and engine != "vllm":
        raise ConfigError("only vllm runs elsewhere", subject="target.engine_url", got=engine, fix="target.engine=vllm")
