"""A checkpoint read tensor by tensor: a target's parts and its fingerprint, without loading it.

An engine beside this process holds the model; here only embeddings, final norm and head are needed.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eaglefeed.errors import TargetUnavailable
from eaglefeed.producer.configuration import check_kind, max_positions, read_config, size_of, text_config
from eaglefeed.producer.loading import WeightsDigest, resolve_target, translated
from eaglefeed.producer.parts import TargetParts, backbone_of
from eaglefeed.producer.probing import layer_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Checkpoint", "LastLayer"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """A target's configuration and its safetensors files.

    Args:
        name: as load_target's.
        dtype: torch's name of the dtype that its weights are brought to.
        cache_dir: where a converted GGUF is kept.
        trust_remote_code: run code that comes with it.

    Raises:
        TargetUnavailable: no such target, or one without safetensors files.
        TargetMismatch: one that cannot be a target.
    """

    def __init__(
        self, name: str, *, dtype: str, cache_dir: Path | None = None, trust_remote_code: bool = False
    ) -> None:
        self.name, self.source = name, resolve_target(name, cache_dir)
        self.dtype, self.trust_remote_code = dtype, trust_remote_code
        with translated(name):
            config = read_config(self.source, trust_remote_code=trust_remote_code)
        check_kind(config, name)
        with translated(name):
            self._model = _empty_model(config, getattr(torch, dtype), trust_remote_code)
            self._files = dict(_tensor_files(self.source))
        if not self._files:
            raise self._unusable("no safetensors files in its checkpoint")
        self._tied = dict(_tied(self._model, self._files))

    @property
    def config(self) -> Any:
        """The target's text configuration."""
        return text_config(self._model.config)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return size_of(self.config, "num_hidden_layers", self.name)

    @property
    def max_positions(self) -> int | None:
        """Positions, if its configuration says so."""
        return max_positions(self.config)

    def parts(self, device: str) -> TargetParts:
        """Embeddings, final norm and head on `device`; nothing else is read.

        Raises:
            TargetUnavailable: they are not in the checkpoint under the names that transformers gives them.
        """
        parts = TargetParts.of_model(self._model)
        names = {id(module): name for name, module in self._model.named_modules()}
        read: dict[str, nn.Parameter] = {}
        for module in (parts.embed_tokens, parts.head, parts.norm):
            if module is not None:
                self._fill(module, names[id(module)], torch.device(device), read)
        return parts

    def last_layer(self, device: str) -> "LastLayer":
        """The last decoder layer and the final norm, for an engine that gives what enters them and no more.

        Raises:
            TargetUnavailable: its weights are not in the checkpoint under the names that transformers gives them, or
                the model embeds positions too, which would be added a second time.
        """
        model = _one_layer_model(self._model.config, getattr(torch, self.dtype), self.trust_remote_code)
        if sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1:
            raise self._unusable("its model embeds more than tokens, which what enters the last layer holds already")
        last = self.num_layers - 1
        outside = (model.get_input_embeddings(), model.get_output_embeddings())
        left = {tensor.data_ptr() for module in outside for tensor in module.state_dict().values()}
        for name, tensor in model.state_dict().items():  # with the buffers that a checkpoint holds
            if tensor.data_ptr() not in left:
                stored = self._stored_name(name.replace(".0.", f".{last}.", 1))
                if stored not in self._files:
                    raise self._unusable(f"its checkpoint holds no {stored}")
                tensor.copy_(self._read(stored))
        return LastLayer(model.to(device).eval())

    def fingerprint(self) -> str:
        """What `target_fingerprint` gives of the loaded model, where the checkpoint's tensors are named as the model's.

        Where they are not (experts that are packed in loading), a digest of the files' own tensors: such a target
        has another fingerprint here than in the engine `hf`.
        """
        tensors, digest = self._model.state_dict(), WeightsDigest()
        if all(self._stored_name(name) in self._files for name in tensors):
            for name, tensor in sorted(tensors.items()):
                digest.add(name, self._read(self._stored_name(name)).to(tensor.dtype))
            return digest.hexdigest()
        for name in sorted(self._files):
            digest.add(name, self._read(name))
        return xxhash.xxh3_128_hexdigest(f"checkpoint {digest.hexdigest()}".encode())

    def _fill(self, module: nn.Module, prefix: str, device: torch.device, read: dict[str, nn.Parameter]) -> None:
        """Give an empty module its parameters; tied ones stay one."""
        for part, empty in list(module.named_parameters(recurse=False)):
            name = self._stored_name(f"{prefix}.{part}")
            if name not in self._files:
                raise self._unusable(f"its checkpoint holds no {name}")
            if name not in read:
                tensor = self._read(name)
                if tensor.shape != empty.shape:
                    raise self._unusable(f"{name} has another shape than its configuration says")
                read[name] = nn.Parameter(tensor.to(device, empty.dtype), requires_grad=False)
            setattr(module, part, read[name])

    def _stored_name(self, name: str) -> str:
        return self._tied.get(name, name)

    def _read(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._unusable(f"{path.name} cannot be read ({error})") from None
        return tensor

    def _unusable(self, what: str) -> TargetUnavailable:
        fix = "use a whole Hugging Face folder of the target, or the engine hf"
        return TargetUnavailable(what, subject=self.name, fix=fix)


class LastLayer:
    """A model of one decoder layer.

    Args:
        model: it, with the final norm behind it.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._backbone = backbone_of(model)
        layers = (module for module in self._backbone.children() if isinstance(module, nn.ModuleList))
        self._layer = next(module for module in layers if len(module) == 1)[0]

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and last hidden states, both [n, H], of the [n, H] states that enter it."""
        outputs: list[Tensor] = []
        hook = self._layer.register_forward_hook(lambda _module, _args, output: outputs.append(layer_output(output)))
        try:
            with torch.no_grad():
                last: Tensor = self._backbone(inputs_embeds=states[None], use_cache=False).last_hidden_state
        finally:
            hook.remove()
        return outputs[0][0], last[0]


def _one_layer_model(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> "PreTrainedModel":
    """Not empty, for the sake of what is computed when a model is made (rotary frequencies); with one embedding."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):  # what is said of each layer, such as whether it knows positions
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[-1:])
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, 1, None
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _empty_model(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _tied(model: nn.Module, stored: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Of parameters with several names, those that the files leave out, and the one under which they are stored."""
    found = dict(model.named_parameters(remove_duplicate=False))
    homes = {id(parameter): name for name, parameter in found.items() if name in stored}
    yield from ((name, homes[id(p)]) for name, p in found.items() if name not in stored and id(p) in homes)


def _tensor_files(source: str) -> Iterator[tuple[str, Path]]:
    """Each tensor's name and the file that it lies in."""
    if index := _file(source, _INDEX):
        shards = json.loads(index.read_text())["weight_map"]
        paths = {shard: _file(source, shard) for shard in set(shards.values())}
        yield from ((name, path) for name, shard in shards.items() if (path := paths[shard]))
    elif single := _file(source, _SINGLE):
        with safe_open(single, framework="pt") as file:
            yield from ((name, single) for name in file.keys())  # noqa: SIM118  it is no mapping


def _file(source: str, name: str) -> Path | None:
    """A file of a checkpoint in a folder or on the Hub."""
    from transformers.utils import cached_file

    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
