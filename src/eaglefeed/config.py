"""Settings: the one place that reads YAML and EAGLEFEED_* variables.

What comes first wins: `section.field=value` on the command line, then variables, then the YAML file, then defaults. A
variable is EAGLEFEED_SECTION__FIELD; the queue's address is EAGLEFEED_REDIS_URL.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from eaglefeed.errors import ConfigError

__all__ = [
    "DraftSection",
    "FeedSection",
    "ProduceSection",
    "QueueSection",
    "RunSection",
    "Settings",
    "StoreSection",
    "TargetSection",
    "TrainSection",
    "load_settings",
]

PREFIX = "EAGLEFEED_"


def _words(value: object) -> object:
    """Accept the list [a, b] and its spellings "a,b" and "[a, b]"."""
    parts = value.strip("[] ").split(",") if isinstance(value, str) else value
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


class StoreSection(_Section):
    """Where shards go, by default runs/<id>/shards, and how far disk and other processes are trusted."""

    uri: str = ""
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


class FeedSection(_Section):
    """How conversations become prompts."""

    max_length: Annotated[int, Field(gt=1)] = 2048
    batch_size: Annotated[int, Field(gt=0)] = 1
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


class DraftSection(_Section):
    """The draft model."""

    vocab_size: Annotated[int, Field(gt=0)] = 8192
    vocab: Path | None = None
    intermediate_size: Annotated[int, Field(gt=0)] | None = None
    ttt_steps: Annotated[int, Field(gt=0)] = 3


class TrainSection(_Section):
    """The reference trainer."""

    group: GroupName = "main"
    output: Path | None = None
    lr: Annotated[float, Field(gt=0)] = 5e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    decay_steps: Annotated[int, Field(ge=0)] = 0
    grad_clip: Annotated[float, Field(gt=0)] = 5.0
    samples_per_step: Annotated[int, Field(gt=0)] = 1
    checkpoint_every: Annotated[int, Field(gt=0)] = 20
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    prefetch: Annotated[int, Field(gt=0)] = 4
    device: str = "cpu"
    num_threads: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    no_producers: Literal["wait", "fail"] = "wait"
    producer_grace_s: Annotated[float, Field(gt=0)] = 60.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0


class Settings(BaseSettings):
    """All sections, frozen."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, env_nested_delimiter="__")

    redis_url: str = ""
    run: RunSection = RunSection()
    queue: QueueSection = QueueSection()
    store: StoreSection = StoreSection()
    target: TargetSection = TargetSection()
    feed: FeedSection = FeedSection()
    produce: ProduceSection = ProduceSection()
    draft: DraftSection = DraftSection()
    train: TrainSection = TrainSection()

    @property
    def run_dir(self) -> Path:
        """The run's own folder."""
        return self.run.dir / self.run.id

    @property
    def store_uri(self) -> str:
        """The store's address, the default filled in."""
        return self.store.uri or f"file://{(self.run_dir / 'shards').absolute()}"

    @property
    def train_output(self) -> Path:
        """Where checkpoints and the exported draft go."""
        return self.train.output or self.run_dir / "draft"


def load_settings(config: Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Settings:
    """Read the settings of this process.

    Args:
        config: a YAML file with sections.
        overrides: "section.field=value" (or "redis_url=…"); a value is read as the field's kind, as a variable's is.

    Raises:
        ConfigError: a file that cannot be read, an unknown name, a value of the wrong kind; says which and where. Or a
            password on the command line.
    """
    _refuse_unknown_variables()
    if any(override.startswith("queue.password=") for override in overrides):
        fix = f"use queue.password_file, or the variable {PREFIX}QUEUE__PASSWORD"
        raise ConfigError("the process list would show it", subject="queue.password", fix=fix)
    try:
        return _with_yaml(config)(**_nested(overrides))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in fault["loc"])
        what = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(what, subject=name, fix="see `eaglefeed COMMAND --help` and README") from None
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError("unreadable settings", subject=str(config or PREFIX + "*"), got=str(error)[:300]) from None


def _with_yaml(config: Path | None) -> type[Settings]:
    if config is None:
        return Settings
    if not config.is_file():
        raise ConfigError("no such file", subject=str(config), fix="pass --config with the path of a YAML file")

    class FromYaml(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  the signature is pydantic's
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config)

    return FromYaml


def _nested(overrides: list[str] | tuple[str, ...]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        section, _, field = name.partition(".")
        if field:
            sections.setdefault(section, {})[field] = text
        else:
            sections[section] = text
    return sections


def _refuse_unknown_variables() -> None:
    sections = {name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        first = variable.removeprefix(PREFIX).partition("__")[0]
        if variable.startswith(PREFIX) and first not in sections:
            wanted = f"{PREFIX}REDIS_URL or {PREFIX}SECTION__FIELD with a section of {', '.join(sorted(sections))}"
            raise ConfigError("unknown variable", subject=variable, wanted=wanted)
