"""What all producers of a run agree on: its contract, and what trainers need of the target."""

from collections.abc import Callable

from torch import Tensor

from eaglefeed.errors import ContractMismatch, SchemaError
from eaglefeed.producer.ledger import register
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE, CONTRACT_RECORD, RunContract
from eaglefeed.schema.prompt import Prompt
from eaglefeed.storage.base import FeatureStore

__all__ = ["RunAgreement", "agree_on_run"]

Assets = Callable[[], tuple[dict[str, Tensor], dict[str, str]]]


def agree_on_run(
    store: FeatureStore, samples: LeaseQueue, mine: RunContract, assets: Assets, *, run_id: str, who: str
) -> None:
    """Before `who` writes a shard: write the run's contract and assets, or check that `mine` is the one that stands.

    Raises:
        ContractMismatch: names every field that differs; or shards lie there whose contract nobody has.
        StorageError: they cannot be written.
    """
    _refuse_unknown_shards(store, samples, who)
    register(store, samples, run_id)
    store.put_document(CONTRACT_FILE, mine.to_json())
    written = store.get_document(CONTRACT_FILE)
    RunContract.from_json(written or b"").require(mine, who)
    stands = samples.agree(CONTRACT_RECORD, mine.to_json())
    RunContract.from_json(stands).require(mine, who)
    if not store.has_document(ASSETS_FILE):
        store.put_assets(ASSETS_FILE, *assets())


def _refuse_unknown_shards(store: FeatureStore, samples: LeaseQueue, who: str) -> None:
    """Nobody could say what they were made by, and a contract beside them would say that it was this one."""
    if CONTRACT_RECORD in samples.agreed() or store.has_document(CONTRACT_FILE):
        return
    # Another producer may have agreed meanwhile, before its first shard; a network file system may still hide the file.
    if next(iter(store.scan()), None) is not None and CONTRACT_RECORD not in samples.agreed():
        what, wanted, got = "shards without a contract", f"{store.uri} with a {CONTRACT_FILE}, or empty", "shards alone"
        fix = f"put their {CONTRACT_FILE} back, delete them, or pass another --store"
        raise ContractMismatch(what, subject=who, wanted=wanted, got=got, fix=fix)


class RunAgreement:
    """One producer's side of it: the first prompt shows whether it fits the run.

    Args:
        store: where contract and assets lie.
        samples: whose run's record holds the contract too.
        mine: the contract as this producer would write it; its max_length is taken from the first prompt.
        assets: what trainers need of the target, written once a run.
        run_id: the run.
        name: the producer's.
    """

    def __init__(
        self,
        store: FeatureStore,
        samples: LeaseQueue,
        mine: RunContract,
        assets: Assets,
        *,
        run_id: str,
        name: str,
    ) -> None:
        self._store, self._samples, self._run_id = store, samples, run_id
        self._mine, self._assets, self._name = mine, assets, name
        self._contract: RunContract | None = None

    def check(self) -> None:
        """Before anything is leased: this producer is not another one than the run's, if the run has one already.

        Raises:
            ContractMismatch: names every field that differs.
            SchemaError: what stands there is no contract.
        """
        for stands in (self._store.get_document(CONTRACT_FILE), self._samples.agreed().get(CONTRACT_RECORD)):
            if stands is not None:
                contract = RunContract.from_json(stands)
                mine = self._mine.model_copy(update={"max_length": contract.max_length})
                contract.require(mine, f"producer {self._name}")

    def contract_for(self, prompt: Prompt) -> RunContract:
        """The run's contract, which the prompt fits.

        Raises:
            ContractMismatch: this producer differs from the run's contract, or from the first prompt.
            SchemaError: a later prompt was tokenized otherwise.
        """
        theirs = self._mine.model_copy(
            update={
                "tokenizer_fingerprint": prompt.tokenizer_fingerprint,
                "template_fingerprint": prompt.template_fingerprint,
                "max_length": prompt.max_length,
            }
        )
        if self._contract is None:
            mine = self._mine.model_copy(update={"max_length": prompt.max_length})
            theirs.require(mine, f"producer {self._name}")
            agree_on_run(
                self._store, self._samples, theirs, self._assets, run_id=self._run_id, who=f"producer {self._name}"
            )
            self._contract = theirs
        elif theirs != self._contract:
            fault = "prompt tokenized otherwise than the run's contract says"
            raise SchemaError(fault, subject=prompt.sample_id, wanted=self._contract.id, got=theirs.id)
        return self._contract
