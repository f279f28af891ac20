"""The connector that vLLM loads by this file's path: it hands out captured layer outputs as files.

It runs in vLLM's own environment, so nothing of eaglefeed may be imported here. It is vLLM's own connector with three
differences: it also works where the cache is in the CPU's memory, a file appears whole or not at all, and it says which
layers it holds.
"""

import contextlib
import json
import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

__all__ = ["EaglefeedConnector"]


class _Done:
    """What stands for a CUDA event where nothing is asynchronous."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class EaglefeedConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # unknown outside vLLM's environment
    """Writes {hidden_states [n, layers, H], token_ids [n]} per request; layers ascending, ids in the metadata."""

    def _write_tensors(
        self, tensors: dict[str, torch.Tensor], event: _Done, filename: str, lock_fd: int | None
    ) -> None:
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        layers = sorted(set(config.eagle_aux_hidden_state_layer_ids))
        partial = f"{filename}.partial"
        try:
            event.synchronize()
            save_file(tensors, partial, metadata={"layers": json.dumps(layers)})
            os.chmod(partial, 0o644)  # noqa: PTH101  save_file makes 0600: a client of another user could not read it
            os.rename(partial, filename)  # noqa: PTH104
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)  # noqa: PTH108
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids)
        # [blocks, layers, block_size, H] → [tokens, layers, H]; copied here, before the blocks are used again.
        states = self._kv_cache[blocks].transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)].contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        self._req_copy_events[pending.req_id] = done = _Done()
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        written = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
        self._req_futures[pending.req_id] = written
        written.add_done_callback(lambda future: self._on_write_done(pending.req_id, future))
