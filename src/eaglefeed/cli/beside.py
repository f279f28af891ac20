"""A shard against the contract of the run in whose store it lies."""

from pathlib import Path

from eaglefeed.errors import ContractMismatch
from eaglefeed.schema.contract import CONTRACT_FILE, RunContract
from eaglefeed.schema.refs import SampleRef

__all__ = ["check_beside", "check_contract"]


def check_beside(ref: SampleRef, shard: Path) -> None:
    """Check the ref of a file by the contract of its store's folder, if the file lies in one.

    Raises:
        ContractMismatch: as check_contract.
    """
    contract = shard.absolute().parent.parent / CONTRACT_FILE
    check_contract(ref, contract.read_bytes() if contract.is_file() else None)


def check_contract(ref: SampleRef, document: bytes | None) -> None:
    """Check a ref by a store's contract, if it has one.

    Raises:
        ContractMismatch: made under another one, or of other widths than this one's target.
    """
    if document is None:
        return
    contract = RunContract.from_json(document)
    contract.require_widths(ref.feature_specs, ref.sample_id)
    if ref.contract != contract.id:
        what = "made under another run contract"
        raise ContractMismatch(what, subject=ref.sample_id, wanted=contract.id, got=ref.contract)
