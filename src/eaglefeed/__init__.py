"""eaglefeed: a streaming data plane for training EAGLE-3 draft models.

The names below are loaded when they are first used, so that importing the package never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglefeed.consumer.dataset import SampleDataset
    from eaglefeed.consumer.draft import Eagle3Draft
    from eaglefeed.consumer.draft_config import DraftConfig
    from eaglefeed.consumer.export import export_draft
    from eaglefeed.consumer.hf_trainer import DraftModule, EaglefeedTrainerMixin
    from eaglefeed.consumer.ranks import Ranks
    from eaglefeed.consumer.remote import RemoteEagle3TargetModel
    from eaglefeed.consumer.rounds import RoundStream
    from eaglefeed.consumer.run import RunAssets, load_run_assets
    from eaglefeed.consumer.stream import SampleStream
    from eaglefeed.producer.engine import Eagle3Target
    from eaglefeed.producer.engines.sglang import SGLangEagle3TargetModel
    from eaglefeed.producer.engines.vllm import VLLMEagle3TargetModel
    from eaglefeed.producer.opening import open_target
    from eaglefeed.producer.server import TargetServer
    from eaglefeed.producer.target import HFEagle3TargetModel
    from eaglefeed.producer.worker import ProducerWorker
    from eaglefeed.queue import open_queue
    from eaglefeed.queue.connection import connect
    from eaglefeed.queue.embedded import EmbeddedServer
    from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
    from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
    from eaglefeed.schema.contract import RunContract
    from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec, SampleRef
    from eaglefeed.schema.vocab import VocabMapping
    from eaglefeed.storage.base import FeatureStore, open_store

__all__ = [
    "DraftConfig",
    "DraftModule",
    "Eagle3Draft",
    "Eagle3Target",
    "Eagle3TargetBackend",
    "Eagle3TargetBatch",
    "EaglefeedTrainerMixin",
    "EmbeddedServer",
    "FeatureAlgorithm",
    "FeatureSpec",
    "FeatureStore",
    "HFEagle3TargetModel",
    "MemoryLeaseQueue",
    "MemoryServer",
    "ProducerWorker",
    "Ranks",
    "RemoteEagle3TargetModel",
    "RoundStream",
    "RunAssets",
    "RunContract",
    "SGLangEagle3TargetModel",
    "SampleDataset",
    "SampleRef",
    "SampleStream",
    "TargetServer",
    "VLLMEagle3TargetModel",
    "VocabMapping",
    "__version__",
    "connect",
    "export_draft",
    "load_run_assets",
    "open_queue",
    "open_store",
    "open_target",
]

__version__ = "0.1.0"

_HOMES = {
    "DraftConfig": "eaglefeed.consumer.draft_config",
    "DraftModule": "eaglefeed.consumer.hf_trainer",
    "Eagle3Draft": "eaglefeed.consumer.draft",
    "Eagle3Target": "eaglefeed.producer.engine",
    "Eagle3TargetBackend": "eaglefeed.schema.batch",
    "Eagle3TargetBatch": "eaglefeed.schema.batch",
    "EaglefeedTrainerMixin": "eaglefeed.consumer.hf_trainer",
    "EmbeddedServer": "eaglefeed.queue.embedded",
    "FeatureAlgorithm": "eaglefeed.schema.refs",
    "FeatureSpec": "eaglefeed.schema.refs",
    "FeatureStore": "eaglefeed.storage.base",
    "HFEagle3TargetModel": "eaglefeed.producer.target",
    "MemoryLeaseQueue": "eaglefeed.queue.memory",
    "MemoryServer": "eaglefeed.queue.memory",
    "ProducerWorker": "eaglefeed.producer.worker",
    "Ranks": "eaglefeed.consumer.ranks",
    "RemoteEagle3TargetModel": "eaglefeed.consumer.remote",
    "RoundStream": "eaglefeed.consumer.rounds",
    "RunAssets": "eaglefeed.consumer.run",
    "RunContract": "eaglefeed.schema.contract",
    "SGLangEagle3TargetModel": "eaglefeed.producer.engines.sglang",
    "SampleDataset": "eaglefeed.consumer.dataset",
    "SampleRef": "eaglefeed.schema.refs",
    "SampleStream": "eaglefeed.consumer.stream",
    "TargetServer": "eaglefeed.producer.server",
    "VLLMEagle3TargetModel": "eaglefeed.producer.engines.vllm",
    "VocabMapping": "eaglefeed.schema.vocab",
    "connect": "eaglefeed.queue.connection",
    "export_draft": "eaglefeed.consumer.export",
    "load_run_assets": "eaglefeed.consumer.run",
    "open_queue": "eaglefeed.queue",
    "open_store": "eaglefeed.storage.base",
    "open_target": "eaglefeed.producer.opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
