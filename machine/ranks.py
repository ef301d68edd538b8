"""The ranks that torchrun starts, and an optimizer whose state is spread over them.

    rank, world, from_ranks, from_rank_0, barrier   without torchrun there is one rank
    stop                                            what SIGTERM and Ctrl-C do, on all ranks
    AdamW                                           for 16-bit models too
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

def join_ranks():
    """Configures what is shared by a process: a GPU's allocator and attention. Under torchrun, this
    process becomes a rank, with a GPU of its own where there are GPUs."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, in seconds
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # most micro-batches have a shape of their own, which would fragment the memory
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if gpus:
        torch.cuda.set_device(local)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # one rank's games may last while others wait
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(hours=2), device_id=(
            torch.device("cuda", local) if gpus else None))  # with it, NCCL connects at once


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def everyone():
    return dist.group.WORLD if world() > 1 else None


def barrier():
    if world() > 1:
        dist.barrier()


def from_ranks(items, finish=False):
    """Every rank's list, joined in the order of ranks. It also exchanges whether a rank was told to
    stop: if so, and the iteration may be abandoned, all ranks raise Stopped. finish=True: weights
    are about to change, so that a later signal waits for the end of the iteration."""
    with stop.deferred():
        lists = [(stop.requested, items)]
        if world() > 1:
            lists *= world()
            dist.all_gather_object(lists, (stop.requested, items))
        agreed = stop.may_abandon and any(requested for requested, _ in lists)
        if agreed or finish:
            stop.may_abandon = False
        if agreed:
            raise Stopped(agreed=True)
    return [x for _, part in lists for x in part]


def from_rank_0(value):
    """What rank 0 has: ranks that each read a file may find different things in it."""
    return from_ranks([value if rank() == 0 else None])[0]


# --------------------------------------------------------------------------------- told to stop

class Stopped(KeyboardInterrupt):
    """This rank leaves because of a signal. agreed: all ranks know, and do the same."""

    def __init__(self, agreed=False):
        super().__init__()
        self.agreed = agreed


class Stop:
    """What SIGTERM and Ctrl-C do during training. torchrun sends SIGTERM to all ranks, and kills
    them half a minute later.

    While `may_abandon` is set, because no weight has changed yet in this iteration, a signal raises
    Stopped at once. The other ranks learn of it by their next from_ranks, and raise it too. Later
    in an iteration a signal only sets `requested`, and the iteration is finished. A second signal
    raises KeyboardInterrupt, unless it comes within a second: torchrun repeats the first."""

    def __init__(self):
        self.requested = self.may_abandon = self.deferring = self.leaving = False
        self.first_signal = 0.0

    def note(self, *_):
        if self.requested and time.monotonic() > self.first_signal + 1:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self.first_signal = True, time.monotonic()
            when = "now" if self.may_abandon else "after this iteration"
            # print() must not be used in a signal handler
            os.write(2, f"\nStopping {when}; another signal stops without saving\n".encode())
        self.leave_if_possible()

    def leave_if_possible(self):
        if self.requested and self.may_abandon and not self.deferring and not self.leaving:
            self.leaving = True
            raise Stopped

    @contextlib.contextmanager
    def deferred(self):
        """Within it a signal raises nothing: no rank may leave a collective half-way."""
        self.deferring = True
        try:
            yield
        finally:
            self.deferring = False
        self.leave_if_possible()

    @contextlib.contextmanager
    def on_signals(self):
        """Within it, signals are handled as above, if this is the thread that Python lets do so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self.note) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            self.requested = self.may_abandon = self.leaving = False


stop = Stop()


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def say(*words):
    if rank() == 0:
        print(*words, flush=True)


# ------------------------------------------------------------------------------------ collectives
# Not DistributedDataParallel: a rank may have no micro-batch in a step, and gradients are sums with
# global denominators, not means. Not FSDP2: the sampler decodes with whole weights at every token.

BUCKET = 2 ** 25  # entries sent at a time: hundreds of small collectives would wait on the network


def in_buckets(tensors, send):
    """Joins tensors into flat buckets of one dtype each, calls send(flat) on each, which works in
    place, and copies the results back."""
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


def sum_over_ranks(tensors):
    """Adds up each tensor over all ranks, in place."""
    if world() > 1:
        in_buckets(tensors, dist.all_reduce)


# -------------------------------------------------------------------------------------- optimizer

SLICE = 2 ** 26  # entries that an optimizer step takes at a time


def round_at_random(x, generator):
    """float32 -> bfloat16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device,
                          generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


def shares_of_ranks(sizes):
    """Which rank keeps the state of which parameter. The largest parameter is given away first,
    each to the rank that has least so far."""
    kept, owner = [0] * world(), [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = kept.index(min(kept))
        kept[owner[n]] += sizes[n]
    return owner


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for 16-bit models as well: updates go to float32 master weights, of which
    the model is a rounded copy, because at a learning rate of 1e-6 they are far below bf16's last
    digit. Each rank keeps the state of its share of the parameters, and sends the others what it
    has updated (ZeRO 1). The state is allocated here, so that a lack of memory is known at the
    start. `moments`: torch.float32, with which the gradients of micro-batches are added up in
    float32 too, or torch.bfloat16, which takes 6 bytes a parameter less."""

    def __init__(self, params, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8,
                 moments=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.moments = moments
        params = self.param_groups[0]["params"]
        self.owner = shares_of_ranks([p.numel() for p in params])
        for n, p in enumerate(params):
            if moments == torch.float32:
                p.grad_dtype = torch.float32
            if self.owner[n] == rank():
                self.state[p] = {"step": 0, "m": torch.zeros_like(p, dtype=moments),
                                 "v": torch.zeros_like(p, dtype=moments)}
                if p.dtype != torch.float32:
                    self.state[p]["master"] = p.detach().float()

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for n, p in enumerate(group["params"]):
            if p.grad is not None and self.owner[n] == rank():
                self.update(p, group, n)
        for owner in range(world() if world() > 1 else 0):  # once all have updated their shares
            owned = [p.data for n, p in enumerate(group["params"]) if self.owner[n] == owner]
            in_buckets(owned, lambda flat: dist.broadcast(flat, owner))

    def update(self, p, group, n):
        """One step of parameter number n, in slices, because its float32 temporaries are several
        times its size, and a head is large."""
        state, generator = self.state[p], None
        state["step"] += 1
        if self.moments != torch.float32:  # seeded, so that a resumed run rounds identically
            generator = torch.Generator(p.device).manual_seed(state["step"] * 10 ** 6 + n)
        flat = [x.view(-1) for x in (p, state["m"], state["v"], state.get("master", p))]
        for parts in zip(*(x.split(SLICE) for x in [p.grad.reshape(-1), *flat])):
            self.update_slice(*parts, state["step"], group, generator)

    def update_slice(self, grad, p, m_kept, v_kept, master, t, group, generator):
        (b1, b2), lr, g = group["betas"], group["lr"], grad.float()
        m, v = m_kept.float(), v_kept.float()  # the tensors themselves if float32
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        master.mul_(1 - lr * group["weight_decay"])
        root = (v / (1 - b2 ** t)).sqrt_().add_(group["eps"])
        master.addcdiv_(m, root, value=-lr / (1 - b1 ** t))
        if generator:
            m_kept.copy_(round_at_random(m, generator))
            v_kept.copy_(round_at_random(v, generator))
        if p.dtype != master.dtype:
            p.copy_(master)

    @torch.no_grad()
    def take(self, states):
        """Copies what this rank keeps from the "state" that one rank has saved. To be called with
        what every one of them has saved; there may have been another number of ranks."""
        for n, p in enumerate(self.param_groups[0]["params"]):
            if n in states and self.owner[n] == rank():
                self.state[p]["step"] = states[n]["step"]
                for key in self.state[p].keys() - {"step"}:
                    self.state[p][key].copy_(states[n][key])
