"""Groups of gloo whose processes do not die of a race in torch."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d


class _OneWorker(ProcessGroupGloo):
    """A group with one worker thread; ``init_process_group`` has no option for it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def use_one_worker() -> None:
    """Groups of gloo that this process makes from now on have one worker thread.

    With two, as torch 2.11 gives them, both write the name of their last collective into one string without a lock
    (``ProcessGroupGloo::runLoop``). A name of more than 15 characters ("ALLGATHER_COALESCED") can then be freed twice:
    AddressSanitizer shows it within a minute where collectives of one group run at the same time and the processor is
    busy. An ordinary process dies of it once in many runs.
    """
    distributed_c10d.ProcessGroupGloo = _OneWorker  # type: ignore[misc]
