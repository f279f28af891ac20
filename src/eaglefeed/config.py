"""Settings: the one place that reads YAML and EAGLEFEED_* variables.

What comes first wins: `section.field=value` on the command line, then variables, then the YAML file, then defaults. A
variable is EAGLEFEED_SECTION__FIELD; the queue's address is EAGLEFEED_REDIS_URL.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

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


def _aux_layer_ids(value: object) -> object:
    """Accept [1, 14, 26] and its spellings "1,14,26" and "[1, 14, 26]"."""
    parts = value.strip("[]").split(",") if isinstance(value, str) else value
    return tuple(int(part) for part in parts) if isinstance(parts, list | tuple) else parts


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class RunSection(_Section):
    """The run: all its processes share the id."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "default"
    dir: Path = Path("runs")


class QueueSection(_Section):
    """The lease queue."""

    visibility_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_lease_age_s: Annotated[float, Field(gt=0)] = 1800.0
    max_deliveries: Annotated[int, Field(gt=0)] = 5
    max_depth: Annotated[int, Field(gt=0)] = 1_000_000
    high_count: Annotated[int, Field(gt=0)] = 100_000
    low_count: Annotated[int, Field(ge=0)] = 50_000
    high_bytes: Annotated[int, Field(gt=0)] = 64 * 2**30
    low_bytes: Annotated[int, Field(ge=0)] = 48 * 2**30
    password_file: Path | None = None


class StoreSection(_Section):
    """Where shards go; by default runs/<id>/shards."""

    uri: str = ""


class TargetSection(_Section):
    """The target model."""

    name: str = "SmolLM2-135M-Instruct"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    aux_layer_ids: Annotated[tuple[int, int, int] | None, BeforeValidator(_aux_layer_ids)] = None
    cache_dir: Path = Path("~/.cache/eaglefeed")
    num_threads: Annotated[int, Field(ge=0)] = 0
    trust_remote_code: bool = False


class FeedSection(_Section):
    """How conversations become prompts."""

    max_length: Annotated[int, Field(gt=1)] = 2048
    batch_size: Annotated[int, Field(gt=0)] = 1
    keep_open: bool = False


class ProduceSection(_Section):
    """What producers write."""

    supervision: Literal["logits", "target_probs"] = "logits"
    vocab: Path | None = None
    lease_batch: Annotated[int, Field(gt=0, le=1000)] = 4


class DraftSection(_Section):
    """The draft model."""

    vocab_size: Annotated[int, Field(gt=0)] = 8192
    vocab: Path | None = None
    intermediate_size: Annotated[int, Field(gt=0)] | None = None
    ttt_steps: Annotated[int, Field(gt=0)] = 3


class TrainSection(_Section):
    """The reference trainer."""

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
        ConfigError: a file that cannot be read, an unknown name, a value of the wrong kind; says which and where.
    """
    _refuse_unknown_variables()
    try:
        return _with_yaml(config)(**_nested(overrides))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{fault['msg']}", subject=name, fix="see `eaglefeed COMMAND --help` and README") from None
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
