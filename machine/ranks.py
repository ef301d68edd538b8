"""The ranks that torchrun starts, and line 7 of Algorithm 1: a step on the sum of their gradients.

    rank, world, from_ranks, barrier   without torchrun there is one rank
    take_step                          gradients of micro-batches -> a step
    AdamW                              for 16-bit models too, its state spread over the ranks
"""
import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# ------------------------------------------------------------------------------------------ ranks

def join_ranks():
    """Under torchrun: this process becomes a rank, with a GPU of its own where there are GPUs."""
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


def from_ranks(items):
    """Every rank's list, joined in the order of ranks."""
    if world() == 1:
        return items
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [x for part in lists for x in part]


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def say(*words):
    if rank() == 0:
        print(*words, flush=True)


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
    has updated (ZeRO 1). `moments`: torch.float32 or torch.bfloat16."""

    def __init__(self, params, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8,
                 moments=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.moments = moments
        self.owner = shares_of_ranks([p.numel() for p in self.param_groups[0]["params"]])

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for n, p in enumerate(group["params"]):
            if p.grad is not None and self.owner[n] == rank():
                self.update(p, group, n)
        for n, p in enumerate(group["params"]):  # once all have updated their shares, side by side
            if world() > 1:
                dist.broadcast(p, self.owner[n])

    def update(self, p, group, n):
        """One step of parameter number n, in slices, because its float32 temporaries are several
        times its size, and a head is large."""
        state, generator = self.state[p], None
        if not state:
            state.update(step=0, m=torch.zeros_like(p, dtype=self.moments),
                         v=torch.zeros_like(p, dtype=self.moments))
            if p.dtype != torch.float32:
                state["master"] = p.float()
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

    def take(self, states):
        """Takes this rank's share of the "state" that a rank saved, of however many ranks."""
        for n, p in enumerate(self.param_groups[0]["params"]):
            if n in states and self.owner[n] == rank():
                self.state[p] = {k: x.to(p.device, copy=True) if isinstance(x, torch.Tensor) else x
                                 for k, x in states[n].items()}


GRAD_CLIP = 1.0  # the largest norm of a gradient; verl-agent's, as is the weight decay


def take_step(model, optimizer, micros, loss_of, checkpointing=False):
    """One optimizer step on the sum of all ranks' losses, because these have global denominators.
    loss_of(micro) gives (loss, info). Returns the sums of the infos (*_max: maxima; shares: at most
    1), the gradient's norm before it is clipped, and whether the step was skipped as not finite."""
    model.zero_grad(set_to_none=True)
    model.train(checkpointing)  # transformers recomputes activations in this mode alone
    infos = []
    for micro in micros:
        loss, info = loss_of(micro)
        loss.backward()
        infos.append(info | {"loss": loss.detach()})
    model.eval()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if world() > 1:
            dist.all_reduce(p.grad)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
    rows = [torch.stack([*info.values()]) for info in infos]
    rows = torch.stack(rows).tolist() if rows else []  # the only wait for a GPU but the norm's
    infos = from_ranks([dict(zip(info, row)) for info, row in zip(infos, rows)])
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    out |= {k: min(x, 1.0) for k, x in out.items() if k.endswith(("fraction", "saturated"))}
    finite = bool(np.isfinite(out["loss"]) and np.isfinite(norm))
    if finite:
        optimizer.step()
    else:
        say(f"a step is skipped: its loss is {out['loss']:g}, its gradient's norm {norm:g}")
    return out | {"grad_norm": norm, "skipped": int(not finite)}
