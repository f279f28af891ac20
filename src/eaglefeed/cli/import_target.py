"""What `eaglefeed data import` knows of its target: both of its ends, read from the checkpoint, and no layer."""

from typing import TYPE_CHECKING

from eaglefeed.cli.targets import target_tokenizer
from eaglefeed.config import Settings
from eaglefeed.errors import TargetMismatch
from eaglefeed.interop.features import ImportTarget
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.configuration import size_of
from eaglefeed.producer.engine import checked_layer_ids
from eaglefeed.producer.loading import tokenizer_fingerprint
from eaglefeed.schema.contract import IMPORTED, RunContract
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SCHEMA_VERSION
from eaglefeed.schema.vocab import VocabMapping

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TargetEnds"]


class TargetEnds:
    """Embeddings, final norm and head of the target.

    Args:
        settings: name the target, its dtype and layers, and how samples are stored.
        form: the format that is imported.

    Raises:
        TargetUnavailable: no such target, or one without safetensors files.
        TargetMismatch: its final norm cannot be found.
        SchemaError: impossible layers, or another target's or tokenizer's vocabulary map.
    """

    def __init__(self, settings: Settings, form: str) -> None:
        target = settings.target
        checkpoint = Checkpoint(
            target.name, dtype=target.dtype, cache_dir=target.cache_dir, trust_remote_code=target.trust_remote_code
        )
        self._parts, path = checkpoint.parts("cpu"), settings.produce.vocab
        if self._parts.norm is None:
            raise TargetMismatch("its final norm cannot be found", subject=target.name)
        self._mapping = VocabMapping.load(path, vocab_size=self._parts.vocab_size) if path else None
        if self._mapping and self._mapping.tokenizer_fingerprint:
            self._mapping.of_tokenizer(tokenizer_fingerprint(target_tokenizer(settings)))
        contract = self._contract(settings, checkpoint, f"{IMPORTED}{form}")
        self.target = ImportTarget(contract, self._parts.norm, self._parts.logits)

    def assets(self) -> "tuple[dict[str, Tensor], dict[str, str]]":
        """What trainers need of it."""
        tensors, metadata = self._parts.assets()
        return (tensors | {"t2d": self._mapping.t2d} if self._mapping else tensors), metadata

    def _contract(self, settings: Settings, checkpoint: Checkpoint, origin: str) -> RunContract:
        """Who tokenized and masked the rows is not known, but that no producer of this run may do it otherwise."""
        config, produce = checkpoint.config, settings.produce
        longest = checkpoint.max_positions or settings.feed.max_length
        return RunContract(
            target=settings.target.name,
            target_fingerprint=checkpoint.fingerprint(),
            dtype=settings.target.dtype,
            hidden_size=size_of(config, "hidden_size"),
            vocab_size=self._parts.vocab_size,
            aux_layer_ids=checked_layer_ids(settings.target.aux_layer_ids, checkpoint.num_layers),
            supervision="last_hidden_states",
            aux_storage=produce.aux_storage,
            supervision_rows=produce.supervision_rows,
            head_digest=self._parts.head_digest(),
            vocab_map_digest=self._mapping.digest if self._mapping else "",
            tokenizer_fingerprint=origin,
            template_fingerprint=origin,
            max_length=min(settings.feed.max_length, longest),
            schema_version=EAGLE3_COMPACT_SCHEMA_VERSION,
        )
