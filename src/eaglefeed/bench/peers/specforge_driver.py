"""SpecForge's SharedDirFeatureStore: one file of torch.save a sample."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from specforge.runtime.data_plane import SharedDirFeatureStore
from store_protocol import Tensors, main

if TYPE_CHECKING:
    from specforge.runtime.contracts import FeatureHandle, SampleRef

ABOUT = {
    "version": version("specforge"),
    "settings": "SharedDirFeatureStore(folder), no authentication, clones what it fetches",
    "does_more": [
        "keeps a number of the generation a sample, and removes older ones",
        "clones every tensor after it has mapped the file",
    ],
    "does_less": [
        "no checksums of its own (torch.save writes a CRC-32, torch.load does not look at it)",
        "no fsync",
        "its files are pickles, and are loaded with weights_only=False",
    ],
}


class _Store:
    def __init__(self, folder: Path, _tensors: Tensors) -> None:
        self._store = SharedDirFeatureStore(str(folder), "bench")
        self._refs: dict[int, SampleRef] = {}
        self._handles: dict[int, list[FeatureHandle]] = {}

    def put(self, number: int, tensors: Tensors) -> None:
        self._refs[number] = self._store.put(tensors, sample_id=f"s-{number}", metadata={"run_id": "bench"})

    def get(self, number: int) -> Tensors:
        tensors, handle = self._store.get(self._refs[number])
        self._handles.setdefault(number, []).append(handle)
        return tensors

    def drop(self, number: int) -> None:
        for handle in self._handles.pop(number):
            self._store.release(handle)
        del self._refs[number]

    def resident(self, number: int) -> Path:
        return Path(self._store.root) / f"s-{number}.g1.ckpt"


if __name__ == "__main__":
    main(ABOUT, _Store)
