"""The sections of the settings, frozen, with their defaults and bounds; config.py reads them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

__all__ = [
    "AccessSection",
    "DraftSection",
    "FeedSection",
    "ProduceSection",
    "QueueSection",
    "RunSection",
    "ServeSection",
    "StoreSection",
    "TargetSection",
    "TrainSection",
]


def _words(value: object) -> object:
    """Accept the list [a, b] and its spellings "a,b" and "[a, b]"."""
    parts = [part for part in value.strip("[] ").split(",") if part] if isinstance(value, str) else value
    return tuple(str(part).strip(" '\"") for part in parts) if isinstance(parts, list | tuple) else parts


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError("a name is listed twice")
    return names


GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Groups = Annotated[
    tuple[GroupName, ...], Field(min_length=1), NoDecode, BeforeValidator(_words), AfterValidator(_distinct)
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class RunSection(_Section):
    """The run: all its processes share the id."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "default"
    dir: Path = Path("runs")


class QueueSection(_Section):
    """The lease queue. A low mark that is not given is 1/2 (count) or 3/4 (bytes) of its high mark."""

    visibility_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_lease_age_s: Annotated[float, Field(gt=0)] = 1800.0
    max_deliveries: Annotated[int, Field(gt=0)] = 5
    max_depth: Annotated[int, Field(gt=0)] = 1_000_000
    high_count: Annotated[int, Field(gt=0)] = 100_000
    low_count: int = Field(ge=0, default_factory=lambda data: data.get("high_count", 0) // 2)
    high_bytes: Annotated[int, Field(gt=0)] = 64 * 2**30
    low_bytes: int = Field(ge=0, default_factory=lambda data: data.get("high_bytes", 0) * 3 // 4)
    groups: Groups = ("main",)
    password_file: Path | None = None
    password: Annotated[SecretStr | None, Field(min_length=1, exclude=True)] = None
    tls_ca_file: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for low, high in (("low_count", "high_count"), ("low_bytes", "high_bytes")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is above {high} {getattr(self, high)}")
        if self.password is not None and self.password_file is not None:
            raise ValueError("both password and password_file are set: keep one of them")
        return self


class AccessSection(_Section):
    """The token of everything that listens: target servers, and producers that keep their samples' tensors."""

    token_file: Path | None = None
    token: Annotated[SecretStr | None, Field(min_length=16, exclude=True)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("both token and token_file are set: keep one of them")
        return self


class StoreSection(_Section):
    """Where shards go, by default runs/<id>/shards, and how far disk and other processes are trusted.

    peer_bytes, peer_pinned and data_plane are of nccl:// stores: what a producer keeps at most, whether in pinned host
    memory instead of where its target made it, and how it travels.
    """

    uri: str = ""
    peer_bytes: Annotated[int, Field(gt=0)] = 8 * 2**30
    peer_pinned: bool = False
    data_plane: Literal["auto", "http", "gloo", "nccl"] = "auto"
    durability: Literal["full", "data", "none"] = "full"
    verify: Literal["always", "sample", "never"] = "always"
    values: Literal["always", "sample", "never"] = "always"


class TargetSection(_Section):
    """The target model."""

    name: str = "SmolLM2-135M-Instruct"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    aux_layer_ids: Annotated[tuple[int, int, int] | None, NoDecode, BeforeValidator(_words)] = None
    cache_dir: Path = Path("~/.cache/eaglefeed")
    num_threads: Annotated[int, Field(ge=0)] = 0
    trust_remote_code: bool = False
    engine: Literal["hf", "vllm", "sglang"] = "hf"
    engine_url: str = ""
    engine_dir: Path | None = None
    engine_python: str = ""
    tp_size: Annotated[int, Field(gt=0)] = 1


class FeedSection(_Section):
    """How conversations become prompts; with packing, rows hold as many of them as max_length tokens have room for."""

    max_length: Annotated[int, Field(gt=1)] = 2048
    batch_size: Annotated[int, Field(gt=0)] = 1
    packing: bool = False
    keep_open: bool = False


class ProduceSection(_Section):
    """What producers write; supervision that is not given is target_probs with a vocabulary map, and logits without."""

    vocab: Path | None = None
    supervision: Literal["logits", "target_probs", "last_hidden_states"] = Field(
        default_factory=lambda data: "target_probs" if data.get("vocab") else "logits"
    )
    aux_storage: Literal["same", "fp8"] = "same"
    supervision_rows: Literal["all", "supervised"] = "all"
    lease_batch: Annotated[int, Field(gt=0, le=1000)] = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, plain in (("aux_storage", "same"), ("supervision_rows", "all")):
            if getattr(self, name) != plain and self.supervision != "last_hidden_states":
                needs = f"needs supervision=last_hidden_states, not {self.supervision}"
                raise ValueError(f"{name}={getattr(self, name)} {needs}")
        return self


class ServeSection(_Section):
    """A target server. nccl_port is port + 100 by default.

    Tokens are counted with padding: max_tokens bounds one request, and so its answer, batch_tokens those that share a
    forward.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8001
    nccl_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    batch_tokens: Annotated[int, Field(gt=0)] = 8192
    max_in_flight: Annotated[int, Field(gt=0)] = 4
    max_waiting: Annotated[int, Field(gt=0)] = 256
    max_request_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    max_tokens: Annotated[int, Field(gt=0)] = 65_536
    session_idle_s: Annotated[float, Field(gt=0)] = 3600.0


class DraftSection(_Section):
    """The draft model."""

    vocab_size: Annotated[int, Field(gt=0)] = 8192
    vocab: Path | None = None
    intermediate_size: Annotated[int, Field(gt=0)] | None = None
    ttt_steps: Annotated[int, Field(gt=0)] = 3


class TrainSection(_Section):
    """The reference trainer; samples are counted on each rank of a job.

    samples_per_batch samples are padded together into one forward, samples_per_step make an optimizer step. An epoch
    is a queue that `feed --replay` filled with what an earlier epoch retained. from_step goes back to a checkpoint.
    """

    group: GroupName = "main"
    epoch: Annotated[int, Field(ge=0)] = 0
    retain: bool = False
    ack_policy: Literal["checkpoint", "step"] = "checkpoint"
    output: Path | None = None
    lr: Annotated[float, Field(gt=0)] = 5e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    decay_steps: Annotated[int, Field(ge=0)] = 0
    grad_clip: Annotated[float, Field(gt=0)] = 5.0
    samples_per_step: Annotated[int, Field(gt=0)] = 1
    samples_per_batch: Annotated[int, Field(gt=0)] = 1
    checkpoint_every: Annotated[int, Field(gt=0)] = 20
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    from_step: Annotated[int, Field(gt=0)] | None = None
    prefetch: Annotated[int, Field(gt=0)] = 4
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    no_producers: Literal["wait", "fail"] = "wait"
    producer_grace_s: Annotated[float, Field(gt=0)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    target_backend: Literal["stream", "colocated", "remote"] = "stream"
    target_prefetch_depth: Annotated[int, Field(ge=0)] = 1
    remote_urls: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)] = ()
    remote_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    remote_data_plane: Literal["auto", "http", "gloo", "nccl"] = "auto"
    collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], NoDecode, BeforeValidator(_words)] = ()
    report_every: Annotated[int, Field(gt=0)] = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_step % self.samples_per_batch:
            step, batch = self.samples_per_step, self.samples_per_batch
            raise ValueError(f"samples_per_step {step} is no multiple of samples_per_batch {batch}")
        return self
