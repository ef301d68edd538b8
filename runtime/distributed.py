"""torch.distributed as training uses it. Without torchrun there is one rank, and every function
below still works.

    init_distributed                     joins the processes that torchrun starts
    rank, world_size, process_group, barrier
    all_gather_list, broadcast_object    for Python objects
    all_reduce_sum                       for gradients
    stop                                 what SIGTERM and Ctrl-C do
"""
import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# ------------------------------------------------------------------------------------------ ranks

def init_distributed() -> None:
    """Sets up this process: the CUDA allocator, the attention kernels, its GPU, and under torchrun
    the default process group (NCCL with GPUs, gloo without)."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it takes seconds to plan for every new shape
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # almost every micro-batch has another shape, which would fragment the memory
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if gpus:
        torch.cuda.set_device(local)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # a long timeout, because one rank's episodes may take much longer than another's
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(hours=2), device_id=(
            torch.device("cuda", local) if gpus else None))  # NCCL then connects at once


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def process_group():
    """The group of all ranks, or None if there is one rank only."""
    return dist.group.WORLD if world_size() > 1 else None


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_gather_list(items: list) -> list:
    """Concatenates every rank's list in the order of ranks; any picklable items."""
    if world_size() == 1:
        return [*items]
    lists = [None] * world_size()
    dist.all_gather_object(lists, items)
    return [x for part in lists for x in part]


def broadcast_object(value):
    """Returns rank 0's value on every rank. Used where ranks would each read a file, because they
    might find different things in it."""
    return all_gather_list([value if rank() == 0 else None])[0]


# ------------------------------------------------------------------------------------ signals

class Stop:
    """What SIGTERM and Ctrl-C do while handle_signals() is active: they set a flag. The code that
    can stop asks for it, with requested(), and ranks tell each other. (torchrun sends SIGTERM to
    all ranks and kills them 30 seconds later, unless it has --shutdown-timeout 600.)

    A second signal raises KeyboardInterrupt at once, unless it follows within a second, because
    torchrun repeats the first one."""

    def __init__(self):
        self.first_signal = None  # its time

    def requested(self) -> bool:
        return self.first_signal is not None

    def note(self, *_):
        now = time.monotonic()
        if self.requested() and now > self.first_signal + 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # see workers.ctrl_c
            raise KeyboardInterrupt
        if not self.requested():
            self.first_signal = now
            # print() is not allowed in a signal handler
            with contextlib.suppress(OSError):  # Ctrl-C has ended what reads it, such as tee
                os.write(2, b"\nStopping; press Ctrl-C again to stop without saving\n")

    @contextlib.contextmanager
    def handle_signals(self):
        """Within this context, signals are handled as described above. It does nothing outside the
        main thread, where Python allows no signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self.note) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            self.first_signal = None


stop = Stop()


def mean_or_zero(values) -> float:
    """The mean of a list on this rank, 0 for an empty one."""
    return float(np.mean(values)) if len(values) else 0.0


def print0(*words) -> None:
    """print() on rank 0 alone."""
    if rank() == 0:
        print(*words, flush=True)


# ------------------------------------------------------------------------------------ collectives
# Why not DistributedDataParallel: a rank may have no micro-batch in a step, and our gradients are
# sums with global denominators, not means. Why not FSDP2: the sampler needs all weights for every
# token that it decodes.

BUCKET = 2 ** 25  # elements per collective; hundreds of small ones would be bound by latency


def in_buckets(tensors, send):
    """Concatenates tensors into flat buckets, each of one dtype, calls send(bucket), which works in
    place, and copies the results back into the tensors."""
    buckets = []
    for x in sorted(tensors, key=lambda x: str(x.dtype)):  # in the same order on all ranks
        if (not buckets or x.dtype != buckets[-1][0].dtype
                or sum(map(torch.numel, buckets[-1])) + x.numel() > BUCKET):
            buckets.append([])
        buckets[-1].append(x)
    for bucket in buckets:
        if len(bucket) == 1:
            send(bucket[0])
            continue
        flat = torch.cat([x.reshape(-1) for x in bucket])
        send(flat)
        for x, part in zip(bucket, flat.split([x.numel() for x in bucket])):
            x.copy_(part.view_as(x))


def all_reduce_sum(tensors: list[torch.Tensor]) -> None:
    """Sums each tensor over all ranks, in place."""
    if world_size() > 1:
        in_buckets(tensors, dist.all_reduce)
