"""Settings: the one place that reads YAML and EAGLEFEED_* variables.

What comes first wins: `section.field=value` on the command line, then variables, then the YAML file, then defaults. A
variable is EAGLEFEED_SECTION__FIELD; the queue's address is EAGLEFEED_REDIS_URL.
"""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from eaglefeed.errors import ConfigError
from eaglefeed.queue.address import has_password
from eaglefeed.sections import (
    AccessSection,
    DraftSection,
    FeedSection,
    MetricsSection,
    ProduceSection,
    QueueSection,
    RunSection,
    ServeSection,
    StoreSection,
    TargetSection,
    TrainSection,
)

__all__ = [
    "AccessSection",
    "DraftSection",
    "FeedSection",
    "LaunchedRank",
    "MetricsSection",
    "ProduceSection",
    "QueueSection",
    "RunSection",
    "ServeSection",
    "Settings",
    "StoreSection",
    "TargetSection",
    "TrainSection",
    "launched_rank",
    "load_settings",
]

PREFIX = "EAGLEFEED_"
_MAX_GOT = 100
_SHOULD = re.compile(
    r"\w+ should (?:be |have |match )?(.+?)(?: after validation)?(?:, unable to .*|, not \d+)?", re.DOTALL
)
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class LaunchedRank(NamedTuple):
    """This process's place in a job: among all its processes, how many they are, and among those of this machine.

    `is_named` where others run on other machines, and are told to find this one by its name: no interface is set.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    is_named: bool = False


class Settings(BaseSettings):
    """All sections, frozen."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, env_nested_delimiter="__")

    redis_url: str = ""
    run: RunSection = RunSection()
    queue: QueueSection = QueueSection()
    access: AccessSection = AccessSection()
    store: StoreSection = StoreSection()
    target: TargetSection = TargetSection()
    feed: FeedSection = FeedSection()
    produce: ProduceSection = ProduceSection()
    serve: ServeSection = ServeSection()
    metrics: MetricsSection = MetricsSection()
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


def launched_rank() -> LaunchedRank:
    """What torchrun, or a launcher like it, says in its variables; the only process of its job without them.

    Raises:
        ConfigError: they are no numbers, or do not go together.
    """
    given = {name: os.environ[name] for name in _RANK_NAMES if name in os.environ}
    if "WORLD_SIZE" not in given:
        return LaunchedRank()
    numbers = [int(text) if text.isdecimal() else -1 for text in (given.get(name, "0") for name in _RANK_NAMES)]
    rank, world_size, local_rank = numbers
    found = LaunchedRank(rank, world_size, local_rank)
    if "RANK" not in given or not (0 <= found.rank < found.world_size and found.local_rank >= 0):
        fix = "start all ranks with torchrun, or unset these variables"
        raise ConfigError("no place in a job", wanted="0 <= RANK < WORLD_SIZE, LOCAL_RANK", got=given, fix=fix)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_spread = local_size.isdecimal() and int(local_size) < found.world_size
    return found._replace(is_named=is_spread and not os.environ.get("GLOO_SOCKET_IFNAME"))


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
    for secret in ("queue.password", "access.token"):
        if any(override.startswith(f"{secret}=") for override in overrides):
            fix = f"use {secret}_file, or the variable {PREFIX}{secret.upper().replace('.', '__')}"
            raise ConfigError("the process list would show it", subject=secret, fix=fix)
    if any(override.startswith("redis_url=") and has_password(override) for override in overrides):
        fix = f"use {PREFIX}REDIS_URL, or leave the password out and use queue.password_file"
        raise ConfigError("the process list would show its password", subject="redis_url", fix=fix)
    try:
        return _with_yaml(config)(**_nested(overrides))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise _translated(fault["type"], fault["loc"], fault["msg"], fault["input"]) from None
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError("unreadable settings", subject=str(config or PREFIX + "*"), got=_unquoted(error)) from None


def _unquoted(error: Exception) -> str:
    """What is wrong, and where; YAML's own text quotes what stands there, which may be a password."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)[:300]
    return f"line {mark.line + 1}, column {mark.column + 1}: {str(getattr(error, 'problem', '')).partition(chr(39))[0]}"


def _translated(kind: str, loc: tuple[int | str, ...], text: str, given: object) -> ConfigError:
    """What pydantic found, in our words; what was given is left out where it may be a secret."""
    said, known = _SHOULD.fullmatch(text), _fields_of(str(loc[0])) if len(loc) > 1 else Settings.model_fields
    what, wanted = "a value that cannot be used", said[1] if said else None
    if kind == "extra_forbidden":
        what, wanted = "no such setting", ", ".join(sorted(known))
    elif said is None:
        what = text.removeprefix("Value error, ")
    elif _is_secret(_field_of(loc)):  # whose letters pydantic calls items
        wanted = said[1].replace("item", "character")
    got = repr(given)[:_MAX_GOT] if _is_shown(loc, given) else None
    fix = "see `eaglefeed COMMAND --help` and docs/reference.md"
    return ConfigError(what, subject=".".join(map(str, loc)), wanted=wanted, got=got, fix=fix)


def _fields_of(section: str) -> dict[str, FieldInfo]:
    found = Settings.model_fields.get(section)
    return getattr(found.annotation, "model_fields", {}) if found else {}


def _field_of(loc: tuple[int | str, ...]) -> FieldInfo | None:
    return _fields_of(str(loc[0])).get(str(loc[1])) if len(loc) > 1 else None


def _is_secret(field: FieldInfo | None) -> bool:
    return field is not None and "SecretStr" in str(field.annotation)


def _is_shown(loc: tuple[int | str, ...], given: object) -> bool:
    """Only the value of a setting that is known and no secret: a misspelled name may be a password's."""
    field = _field_of(loc)
    is_plain = isinstance(given, str | int | float) and "@" not in str(given)  # no user and password of an address
    return field is not None and is_plain and not _is_secret(field)


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
