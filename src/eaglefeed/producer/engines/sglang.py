"""SGLangEagle3TargetModel: supervision from an SGLang engine that this process starts.

B batch · S sequence · H hidden size · n tokens of a document · K captured layers

SGLang's public interface gives either layer outputs or last hidden states, not both, and never the last layer's output.
So it is asked for what enters the last layer too, and that layer and the final norm run here. It hands states out as
lists of Python numbers: right, but slow.
"""

import inspect
import re
import uuid
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from eaglefeed.errors import ConfigError, TargetMismatch, TargetUnavailable
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engine import Eagle3Target, checked_layer_ids
from eaglefeed.producer.engines.documents import PROBE, check_probe, documents_of
from eaglefeed.producer.rows import Rows

__all__ = ["SGLangEagle3TargetModel", "engine_arguments", "open_sglang"]

_VERSIONS = ((0, 5, 23), (0, 6))
_RANGE = ">=0.5.23,<0.6"


class SGLangEagle3TargetModel(Eagle3Target):
    """A target in an SGLang engine; Eagle3Target says what its supervision is.

    Args:
        checkpoint: of the same target as the engine's.
        aux_layer_ids: as Eagle3Target's.
        compact: supervise with last hidden states.
        device: where the features are made.
        engine: an sglang.Engine made with `engine_arguments`; shut down by `close`.

    Raises:
        SchemaError: impossible aux_layer_ids.
        TargetUnavailable: parts of the target are not in its checkpoint.
        TargetMismatch: its final states are not what its last layer and final norm give.
    """

    engine = "sglang"

    def __init__(
        self, checkpoint: Checkpoint, aux_layer_ids: tuple[int, ...] | None, *, compact: bool, device: str, engine: Any
    ) -> None:
        super().__init__(checkpoint.parts(device), aux_layer_ids, compact=compact)
        self._checkpoint, self._engine = checkpoint, engine
        self._last_layer = checkpoint.last_layer(device)
        self._layers = _captured_layers(self.aux_layer_ids, self.num_layers)
        self._probe()

    def fingerprint(self) -> str:
        """The RunContract's `target_fingerprint`; the engine hf's, where the checkpoint allows."""
        return self._checkpoint.fingerprint()

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        size, dtype = self.hidden_size, self.parts.head.weight.dtype
        aux = torch.zeros(*rows.real.shape, len(self.aux_layer_ids) * size, dtype=dtype, device=self.device)
        last = torch.zeros(*rows.real.shape, size, dtype=dtype, device=self.device)
        documents = list(documents_of(rows, position_ids))
        answers = self._generate([document.ids for document in documents])
        for document, answer in zip(documents, answers, strict=True):
            place = slice(document.start, document.start + len(document.ids))
            aux[document.row, place], last[document.row, place] = self._states(answer, len(document.ids))
        return aux, last

    def _generate(self, prompts: list[list[int]], **more: object) -> list[Mapping[str, Any]]:
        """What the engine says of each prompt, found by its id: the order of answers is the engine's own affair."""
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        names = [uuid.uuid4().hex for _ in prompts]
        try:
            answers = self._engine.generate(
                input_ids=prompts, rid=names, sampling_params=sampling, return_hidden_states=True, **more
            )
        except Exception as error:  # an engine of somebody else's raises anything
            raise TargetUnavailable("the engine failed", subject="sglang", got=str(error)[:500]) from error
        found = {answer["meta_info"].get("id"): answer["meta_info"] for answer in answers}
        if set(found) != set(names) or len(answers) != len(names):
            fix = "report it: each of these answers belongs to some request"
            raise TargetMismatch("the engine answers other requests", wanted=len(names), got=len(answers), fix=fix)
        return [found[name] for name in names]

    def _states(self, answer: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor]:
        """Aux states [n, 3H] and last hidden states [n, H] of a document."""
        captured = self._captured(answer, length)
        output, last = self._last_layer(captured[self.num_layers - 2])
        captured[self.num_layers - 1] = output
        return torch.cat([captured[layer] for layer in self.aux_layer_ids], -1), last

    def _captured(self, answer: Mapping[str, Any], length: int) -> dict[int, Tensor]:
        """Layer → output [n, H], of the layers that the engine was asked for."""
        rows = answer["hidden_states"][0] if answer.get("hidden_states") else []
        wanted = [length, len(self._layers) * self.hidden_size]
        got = [len(rows), len(rows[0]) if rows else 0]
        if got != wanted:
            fix = "report it: caching and chunked prefill, which shorten captures, were switched off"
            raise TargetMismatch("captured other states than it was asked for", wanted=wanted, got=got, fix=fix)
        states = torch.tensor(rows, dtype=self.parts.head.weight.dtype, device=self.device)
        return dict(zip(self._layers, states.view(length, -1, self.hidden_size).unbind(1), strict=True))

    def _probe(self) -> None:
        ids = [token % self.vocab_size for token in PROBE]
        (answer,) = self._generate([ids], return_logprob=True)
        logprob, token = answer["output_token_logprobs"][0][:2]
        with torch.no_grad():
            logits = self._logits(self._states(answer, len(ids))[1][-1:])[0]
        check_probe(logits, int(token), float(logprob), self._checkpoint.name)


def _captured_layers(aux_layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are asked for, ascending: the aux layers but the last, and the one before that."""
    return tuple(sorted({*(layer for layer in aux_layer_ids if layer < num_layers - 1), num_layers - 2}))


def engine_arguments(
    checkpoint: Checkpoint, aux_layer_ids: tuple[int, ...], *, device: str, tp_size: int
) -> dict[str, Any]:
    """What sglang.Engine is made with."""
    kind = torch.device(device).type
    on_cpu: dict[str, Any] = {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.3,
    }
    on_cpu["max_total_tokens"] = 4 * (checkpoint.max_positions or 8192)
    return {
        "model_path": checkpoint.source,
        "dtype": checkpoint.dtype,
        "device": kind,
        "tp_size": tp_size,
        "trust_remote_code": checkpoint.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "enable_return_hidden_states": True,
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": "EAGLE3",
        "return_aux_hidden_state_layer_ids": list(_captured_layers(aux_layer_ids, checkpoint.num_layers)),
        "log_level": "warning",
    } | (on_cpu if kind == "cpu" else {})


def open_sglang(
    checkpoint: Checkpoint, aux_layer_ids: tuple[int, ...] | None, *, device: str, compact: bool, tp_size: int = 1
) -> SGLangEagle3TargetModel:
    """Start an engine for a checkpoint; the parameters are open_target's.

    Raises:
        ConfigError: SGLang is not installed, or another version than can be driven.
        TargetUnavailable: it does not start.
        SchemaError, TargetMismatch: as SGLangEagle3TargetModel's.
    """
    ids = checked_layer_ids(aux_layer_ids, checkpoint.num_layers)
    arguments = engine_arguments(checkpoint, ids, device=device, tp_size=tp_size)
    kind = _engine_class(arguments)
    try:
        engine = kind(**arguments)
    except Exception as error:  # an engine of somebody else's raises anything
        raise TargetUnavailable("the engine does not start", subject="sglang", got=str(error)[:1000]) from error
    try:
        return SGLangEagle3TargetModel(checkpoint, ids, compact=compact, device=device, engine=engine)
    except BaseException:
        engine.shutdown()
        raise


def _engine_class(arguments: Mapping[str, Any]) -> Any:
    """sglang.Engine, whose version and arguments are those that this module was written for."""
    fix = f"pip install 'sglang{_RANGE}' in this environment, or use target.engine=vllm"
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ConfigError("SGLang is not installed", subject="target.engine=sglang", fix=fix) from None
    if not _VERSIONS[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _VERSIONS[1]:
        raise ConfigError("another SGLang than can be driven", wanted=_RANGE, got=version, fix=fix)
    try:
        import sglang
        from sglang.srt.server_args import ServerArgs
    except Exception as error:  # its dependencies fail in many ways
        raise ConfigError("SGLang cannot be imported", got=f"{type(error).__name__}: {error}", fix=fix) from error
    unknown = sorted(set(arguments) - set(inspect.signature(ServerArgs).parameters))
    unknown += sorted(
        {"input_ids", "return_hidden_states", "rid"} - set(inspect.signature(sglang.Engine.generate).parameters)
    )
    if unknown:
        raise ConfigError("this SGLang lacks arguments", wanted=", ".join(unknown), got=version, fix=fix)
    return sglang.Engine
