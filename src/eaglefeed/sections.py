"""The sections of the settings, frozen: defaults, bounds, and what each field means. config.py reads them."""

from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from eaglefeed.setting_kinds import GroupName, Groups, RoleAliases, TemplateValues, as_words

__all__ = [
    "AccessSection",
    "DraftSection",
    "FeedSection",
    "MetricsSection",
    "ProduceSection",
    "QueueSection",
    "RunSection",
    "ServeSection",
    "StoreSection",
    "TargetSection",
    "TrainSection",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True)


class RunSection(_Section):
    """The run: all its processes share the id."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "default"
    """The run's id: the name of its folder and of its queues."""
    dir: Path = Path("runs")
    """Folder of all runs; a run's own is <dir>/<id>."""


class QueueSection(_Section):
    """The lease queue."""

    visibility_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a lease lasts without a renewal, before its items go back."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker may make no progress and still renew its leases."""
    max_lease_age_s: Annotated[float, Field(gt=0)] = 1800.0
    """Age beyond which no lease is renewed."""
    max_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """How long a server that is away or loads its file is waited for, at the start and by each call."""
    max_deliveries: Annotated[int, Field(gt=0)] = 5
    """Crashes while leased alone, or failures, after which an item becomes a dead letter."""
    max_depth: Annotated[int, Field(gt=0)] = 1_000_000
    """Hard cap on the items of a queue: `feed` waits there."""
    high_count: Annotated[int, Field(gt=0)] = 100_000
    """Samples that are not released, at which producers pause."""
    low_count: int = Field(ge=0, default_factory=lambda data: data.get("high_count", 0) // 2)
    """Samples at which they go on; half of high_count by default."""
    high_bytes: Annotated[int, Field(gt=0)] = 64 * 2**30
    """Stored bytes of those samples at which producers pause; at most 80 % of what the store has free."""
    low_bytes: int = Field(ge=0, default_factory=lambda data: data.get("high_bytes", 0) * 3 // 4)
    """Bytes at which they go on; three quarters of high_bytes by default, at most 60 % of what is free."""
    groups: Groups = ("main",)
    """Groups of trainers that each get every sample; fixed by the first `feed`."""
    password_file: Path | None = None
    """File with the queue's password."""
    password: Annotated[SecretStr | None, Field(min_length=1, exclude=True)] = None
    """The password itself; refused on the command line, which the process list shows."""
    tls_ca_file: Path | None = None
    """Authorities that vouch for the server of a rediss:// address; the system's by default."""

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
    """File with the token, of at least 16 characters."""
    token: Annotated[SecretStr | None, Field(min_length=16, exclude=True)] = None
    """The token itself; refused on the command line, which the process list shows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("both token and token_file are set: keep one of them")
        return self


class StoreSection(_Section):
    """Where shards go, and how far disk and other processes are trusted."""

    uri: str = ""
    """Address: a folder, file://, shm://, s3:// or nccl://; by default <run.dir>/<run.id>/shards."""
    peer_bytes: Annotated[int, Field(gt=0)] = 8 * 2**30
    """nccl://: bytes of samples that one producer keeps at most."""
    peer_pinned: bool = False
    """nccl://: kept in pinned host memory instead of where the target made them."""
    data_plane: Literal["auto", "http", "gloo", "nccl"] = "auto"
    """nccl://: how tensors travel; auto is nccl between GPUs, else http."""
    durability: Literal["full", "data", "none"] = "full"
    """What a shard outlives: full a crash of the machine, data too but for its name, none a crash of the process."""
    verify: Literal["always", "sample", "never"] = "always"
    """Whose digests a trainer checks: of every sample, of 1 in 16, of none."""
    values: Literal["always", "sample", "never"] = "always"
    """Whose values a trainer checks (finite, masks, ids in range): the same three."""


class TargetSection(_Section):
    """The target model."""

    name: str = "SmolLM2-135M-Instruct"
    """Hugging Face id, local folder, GGUF file, or the packaged SmolLM2-135M-Instruct."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Kind of number it computes in."""
    device: str = "cpu"
    """Device of torch it runs on: cpu, cuda, cuda:1."""
    aux_layer_ids: Annotated[tuple[int, int, int] | None, NoDecode, BeforeValidator(as_words)] = None
    """Three 0-based decoder layers whose outputs are taken; for L layers 1, L // 2 - 1, L - 4 by default."""
    cache_dir: Path = Path("~/.cache/eaglefeed")
    """Where a converted GGUF is kept."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch; 0 leaves them to torch."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint: only for one that you trust as a program."""
    chat_template_kwargs: TemplateValues = Field(default_factory=dict)
    """What its chat template is told, as a server tells it: {"enable_thinking": false}; JSON on the command line."""
    chat_template_date: date | None = None
    """The date that a template which writes one is told, as 2026-01-31; each day's own by default."""
    engine: Literal["hf", "vllm", "sglang"] = "hf"
    """What runs it: transformers in this process, a vLLM server, or SGLang."""
    engine_url: str = ""
    """vllm: address of a server of your own."""
    engine_dir: Path | None = None
    """vllm: folder that captures go through; in /dev/shm they touch no disk."""
    engine_python: str = ""
    """vllm: interpreter of the environment that vLLM lies in, to be started from there."""
    tp_size: Annotated[int, Field(gt=0)] = 1
    """GPUs that share the target, with vllm or sglang."""


class FeedSection(_Section):
    """How conversations become prompts."""

    max_length: Annotated[int, Field(gt=1)] = 2048
    """Tokens that a row is cut to."""
    max_line_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Longer lines of a file are rejected unread."""
    max_rejected_share: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of rejected rows above which `feed` and `vocab` refuse a file, and `answers` fails; 0 allows none."""
    role_aliases: RoleAliases = Field(default_factory=dict)
    """Names of roles in the rows, and the roles they are: bot:assistant,narrator:system."""
    batch_size: Annotated[int, Field(gt=0)] = 1
    """Rows of one sample."""
    packing: bool = False
    """Fill rows with several conversations each, which do not see each other."""
    keep_open: bool = False
    """More will be fed: do not close the prompts."""


class ProduceSection(_Section):
    """What producers write."""

    vocab: Path | None = None
    """Vocabulary map of the draft, as `eaglefeed vocab` writes it."""
    supervision: Literal["logits", "target_probs", "last_hidden_states"] = Field(
        default_factory=lambda data: "target_probs" if data.get("vocab") else "logits"
    )
    """What a draft is scored against; target_probs with a map by default, else logits."""
    aux_storage: Literal["same", "fp8"] = "same"
    """How aux hidden states are stored: as they are, or in fp8 with a scale a token (needs last_hidden_states)."""
    supervision_rows: Literal["all", "supervised"] = "all"
    """Rows of last_hidden_states that are stored: all, or those that are trained on."""
    lease_batch: Annotated[int, Field(gt=0, le=1000)] = 4
    """Prompts that a producer leases at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, plain in (("aux_storage", "same"), ("supervision_rows", "all")):
            if getattr(self, name) != plain and self.supervision != "last_hidden_states":
                needs = f"needs supervision=last_hidden_states, not {self.supervision}"
                raise ValueError(f"{name}={getattr(self, name)} {needs}")
        return self


class ServeSection(_Section):
    """A target server."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback it needs the token of `access`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8001
    """Port to listen on; 0 for a free one."""
    nccl_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Where pair groups meet; port + 100 by default."""
    batch_tokens: Annotated[int, Field(gt=0)] = 8192
    """Tokens, padding counted, of the requests that share a forward."""
    max_in_flight: Annotated[int, Field(gt=0)] = 4
    """Answers in memory at a time, from their forward to their last byte."""
    max_waiting: Annotated[int, Field(gt=0)] = 256
    """Requests that may wait; more are told to come again."""
    max_request_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    """Size of a request's body."""
    max_tokens: Annotated[int, Field(gt=0)] = 65_536
    """Tokens of one request, padding counted, which bounds its answer too."""
    warm_up_tokens: Annotated[int, Field(gt=0)] = 2048
    """Tokens of the row that is run before the server is ready, at most what the target and a request may have."""
    session_idle_s: Annotated[float, Field(gt=0)] = 3600.0
    """How long a client's session is kept without a sign of life."""


class MetricsSection(_Section):
    """Where a process shows its metrics; nowhere without a port. Beyond loopback it asks for the token of `access`."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback it needs the token of `access`."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /health; 0 for a free one, nothing listens without one."""


class DraftSection(_Section):
    """The draft model."""

    vocab_size: Annotated[int, Field(gt=0)] = 8192
    """Tokens of the draft's vocabulary, for `eaglefeed vocab`."""
    vocab: Path | None = None
    """Vocabulary map, for a run without one and for a target without a queue."""
    intermediate_size: Annotated[int, Field(gt=0)] | None = None
    """Width of the draft's MLP; the target's by default."""
    ttt_steps: Annotated[int, Field(gt=0)] = 3
    """Steps of training-time test: how often the draft runs on its own output."""


class TrainSection(_Section):
    """The reference trainer."""

    group: GroupName = "main"
    """The group that this trainer belongs to, one of queue.groups."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Epoch to train on: 0 is what producers make, later ones are what `feed --replay` queued."""
    retain: bool = False
    """Keep shards after their commit, for another epoch."""
    ack_policy: Literal["checkpoint", "step"] = "checkpoint"
    """Settle samples when the oldest kept checkpoint has learned them, or (step) at once and without checkpoints."""
    output: Path | None = None
    """Folder of checkpoints and the draft; <run.dir>/<run.id>/draft by default."""
    lr: Annotated[float, Field(gt=0)] = 5e-4
    """Learning rate of AdamW, after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps over which the rate grows from 0."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Step at which the rate has fallen to a tenth; 0 keeps it."""
    grad_clip: Annotated[float, Field(gt=0)] = 5.0
    """Norm that gradients are cut to."""
    samples_per_step: Annotated[int, Field(gt=0)] = 1
    """Samples of an optimizer step, on each rank."""
    samples_per_batch: Annotated[int, Field(gt=0)] = 1
    """Samples that are padded together into one forward; divides samples_per_step."""
    checkpoint_every: Annotated[int, Field(gt=0)] = 20
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    """Checkpoints that stay; the oldest of them decides what is committed."""
    from_step: Annotated[int, Field(gt=0)] | None = None
    """Go back to the checkpoint of this step, if it is kept still."""
    prefetch: Annotated[int, Field(gt=0)] = 4
    """Samples that are read ahead."""
    device: str = "cpu"
    """Device of torch the draft is trained on; with several ranks cuda is each rank's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Kind of number the draft's weights are."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch; 0 leaves them to torch."""
    seed: int = 0
    """Of the draft's first weights and of a replayed epoch's order."""
    no_producers: Literal["wait", "fail"] = "wait"
    """When prompts remain and no producer lives: wait and warn, or fail."""
    producer_grace_s: Annotated[float, Field(gt=0)] = 60.0
    """How long no producer must have lived for that."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 21_600.0
    """How long the run's first sample is waited for, while conversations are tokenized and the target loads; remote:
    how long a target server that is not ready yet; half an hour at most is one waited for that does not answer."""
    target_backend: Literal["stream", "colocated", "remote"] = "stream"
    """Where batches come from: the run's queue, a target in this process, or target servers."""
    target_prefetch_depth: Annotated[int, Field(ge=0)] = 1
    """remote: samples asked for ahead of the step."""
    remote_urls: Annotated[tuple[str, ...], NoDecode, BeforeValidator(as_words)] = ()
    """remote: the target servers, http://HOST:PORT."""
    remote_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """remote: how long an answer may take."""
    remote_data_plane: Literal["auto", "http", "gloo", "nccl"] = "auto"
    """remote: how tensors travel; auto is nccl to a GPU, else http."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long ranks wait for each other before they name the missing one."""
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], NoDecode, BeforeValidator(as_words)
    ] = ()
    """Where figures go besides history.jsonl."""
    report_every: Annotated[int, Field(gt=0)] = 10
    """Steps between reports."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_step % self.samples_per_batch:
            step, batch = self.samples_per_step, self.samples_per_batch
            raise ValueError(f"samples_per_step {step} is no multiple of samples_per_batch {batch}")
        return self
