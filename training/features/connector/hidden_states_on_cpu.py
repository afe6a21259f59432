"""vLLM's connector for hidden states without the pinned memory and streams of an accelerator, for vLLM's CPU build.

Loaded by vLLM itself (``kv_connector_module_path``), with this folder in PYTHONPATH; ``headstart serve-features`` prints the line. The
class is made when vLLM asks for it, so that this module can be imported without vLLM.
"""

from typing import Any

import torch

NAME = "HiddenStatesOnCPU"


class _Done:
    """Stands where an event of an accelerator would: what it waits for is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

    class HiddenStatesOnCPU(stock.ExampleHiddenStatesConnector):
        """Writes the states of a request that has ended, as vLLM's own connector does."""

        def _submit_async_write(self, pending: Any) -> None:
            slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
            rows = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()  # a copy: its blocks may go
            tensors = {"hidden_states": rows, "token_ids": pending.token_ids.clone()}
            lock = self._lock_fds.pop(pending.req_id, None)
            future = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)
            self._req_copy_events[pending.req_id], self._req_futures[pending.req_id] = _Done(), future
            future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))

    return globals().setdefault(name, HiddenStatesOnCPU)
