"""NeMo AutoModel's SharedDirFeatureStore: one safetensors file a sample."""

from importlib.metadata import version
from pathlib import Path

from nemo_automodel.components.speculative.streaming import SampleRef, SharedDirFeatureStore, StoreHandle
from store_protocol import Tensors, main

ABOUT = {
    "version": version("nemo-automodel"),
    "settings": "SharedDirFeatureStore(folder) with its own caps, 64 samples and 256 MiB; get on the CPU",
    "does_more": ["clones every tensor before it writes, and again after it has read"],
    "does_less": ["no checksums", "no fsync", "its files can be read by their owner only"],
}


class _Store:
    def __init__(self, folder: Path, _tensors: Tensors) -> None:
        self._folder, self._store = folder, SharedDirFeatureStore(str(folder))
        self._refs: dict[int, SampleRef] = {}
        self._handles: dict[int, list[StoreHandle]] = {}

    def put(self, number: int, tensors: Tensors) -> None:
        self._refs[number] = self._store.put(f"s-{number}", tensors, run_id="bench", num_tokens=1)

    def get(self, number: int) -> Tensors:
        tensors, handle = self._store.get(self._refs[number])
        self._handles.setdefault(number, []).append(handle)
        return tensors

    def drop(self, number: int) -> None:
        for handle in self._handles.pop(number):
            self._store.release(handle)
        del self._refs[number]

    def resident(self, number: int) -> Path:
        return self._folder / f"s-{number}.safetensors"


if __name__ == "__main__":
    main(ABOUT, _Store)
