"""A folder's files as items of a run's prompts queue, which holds nothing else."""

from collections.abc import Sequence

import msgpack

from eaglefeed.errors import ConfigError, IdConflict, InputError
from eaglefeed.interop.folder import FeatureFile
from eaglefeed.queue.base import LeasedItem, LeaseQueue, QueueItem

__all__ = ["FileItems"]

_VERSION = "import"
"""Where a prompt says its version: a producer that leases such an item refuses it."""
_CHUNK = 500


class FileItems:
    """Queues files, and knows them again.

    Args:
        form: the folder's format.
        files: of the folder, all of them.
        prompts: of the run.
        samples: of the run.
    """

    def __init__(self, form: str, files: Sequence[FeatureFile], prompts: LeaseQueue, samples: LeaseQueue) -> None:
        self._form, self._prompts, self._samples = form, prompts, samples
        self._files = {file.sample_id: file for file in files}

    def left(self) -> list[FeatureFile]:
        """The files but those whose samples a rebuilt queue holds; nothing is queued yet.

        Raises:
            ConfigError: other prompts than this folder's are queued.
            InputError: a file that was not there when this run's import had queued all.
        """
        stats = self._prompts.stats()
        queued = self._prompts.known(self._files)  # asked second: another import of the folder may queue them now
        if (others := stats.unsettled + stats.done + stats.dead - len(queued)) > 0:
            raise _of_others(self._prompts.name, others)
        made = self._samples.known(self._files) - queued
        left = [file for file in self._files.values() if file.sample_id not in made]
        new = [file.name for file in left if file.sample_id not in queued]
        if new and stats.closed:
            what, fix = "not there when the others were queued", "import it with another --run, from another folder"
            raise InputError(what, subject=new[0], got=f"{len(new)} such", fix=fix)
        return left

    def put(self, files: Sequence[FeatureFile]) -> int:
        """Queue files; how many were queued before.

        Raises:
            InputError: one has changed since it was imported.
            QueueFull: there are more than queue.max_depth.
        """
        chunks = (files[start : start + _CHUNK] for start in range(0, len(files), _CHUNK))
        return sum(self._put(chunk) for chunk in chunks)

    def file_of(self, item: LeasedItem) -> FeatureFile:
        """The file that was queued as this item; its size may be another since then.

        Raises:
            ConfigError: none of these.
        """
        file = self._files.get(item.id)
        if file is None or not self._is_of(item.payload, file):
            raise _of_others(item.id)
        return file

    def _put(self, files: Sequence[FeatureFile]) -> int:
        items, num_mended = {file.sample_id: self._item(file) for file in files}, 0
        while items:
            try:
                return num_mended + self._prompts.put(list(items.values())).duplicate
            except IdConflict as error:
                self._require_open(self._files[error.item_id])
                del items[error.item_id]
                num_mended += 1
        return num_mended

    def _require_open(self, file: FeatureFile) -> None:
        """A file whose size changed after it was queued: one that did not fit may have been mended."""
        if not any(self._is_of(item.payload, file) for item in self._prompts.find([file.sample_id])):
            what, fix = "another file than the one that was queued as this sample", "import it with another --run"
            raise InputError(what, subject=file.name, got=file.sample_id, fix=fix)

    def _is_of(self, payload: bytes, file: FeatureFile) -> bool:
        """Whether an item is of this file, of whatever size, which stands at its end."""
        return payload.startswith(self._item(file).payload.removesuffix(msgpack.packb(file.num_bytes)))

    def _item(self, file: FeatureFile) -> QueueItem:
        said = {"v": _VERSION, "format": self._form, "file": file.name, "bytes": file.num_bytes}
        return QueueItem(file.sample_id, msgpack.packb(said))


def _of_others(subject: str, count: int | None = None) -> ConfigError:
    fix = "import the folder that was queued first, or import into a run of its own, with another --run"
    return ConfigError("queued by somebody else than an import of this folder", subject=subject, got=count, fix=fix)
