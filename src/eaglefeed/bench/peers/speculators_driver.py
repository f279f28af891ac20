"""speculators: files that its FileTransfer reads, and its ArrowDataset over them where the sample has its own form."""

from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from speculators.train.data import ArrowDataset
from store_protocol import Store, Tensors, WarmBuffer, main

ABOUT = {
    "version": version("speculators"),
    "settings": "FileTransfer(folder), hs-connectors {}; its own form: ArrowDataset over it, on_missing=raise".format(
        version("hs-connectors")
    ),
    "does_more": [
        "looks for a lock file of the sample before it reads",
        "in its own form: compares the token ids with the data set's",
    ],
    "does_less": [
        "has no writer: vLLM's connector calls save_file of safetensors, and so does this put",
        "no specs, no checksums, no fsync",
        "get maps the file; the copy into memory that was written before is this driver's",
    ],
}


class _Files:
    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder, self._transfer, self._warm = folder, FileTransfer(folder), WarmBuffer(tensors)

    def put(self, number: int, tensors: Tensors) -> None:
        save_file(tensors, self.resident(number))

    def get(self, number: int) -> Tensors:
        found = self._transfer.get_cached(number)
        if found is None:
            raise FileNotFoundError(number)
        return self._warm.bring(found)

    def drop(self, number: int) -> None:
        self._transfer.delete(str(self.resident(number)))

    def resident(self, number: int) -> Path:
        return self._folder / f"hs_{number}.safetensors"


class _Loader(_Files):
    """Tensors hidden_states [S, 4, H] and token_ids [S]: a data set of one row, whose file is number 0."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        ids = tensors["token_ids"].tolist()
        rows = Dataset.from_dict({"input_ids": [ids], "loss_mask": [[1] * len(ids)], "seq_len": [len(ids)]})
        rows.set_format(type="torch")
        rows.save_to_disk(str(folder))
        files = folder / "hidden_states"
        files.mkdir()
        super().__init__(files, tensors)
        self._data = ArrowDataset(len(ids), folder, on_missing="raise")

    def get(self, number: int) -> Tensors:
        item = self._data[number]
        self._warm.bring({"last": item["verifier_last_hidden_states"].contiguous()})  # the rest is a copy already
        return item


def _open(folder: Path, tensors: Tensors) -> Store:
    return (_Loader if "hidden_states" in tensors else _Files)(folder, tensors)


if __name__ == "__main__":
    main(ABOUT, _open)
