"""Optimizers: ours, AdamW for 16-bit models, with float32 master weights and state that is spread
over the ranks; and any other of torch.optim's kind, for float32 parameters.

    summed_gradients          adds up the gradients of several backward passes
    AdamW                     ours
    checked                   refuses 16-bit parameters for any other
    saved_state, load_state   what a checkpoint holds of either
"""
import contextlib
import copy
import inspect

import torch
import torch.distributed as dist

from runtime.distributed import in_buckets, rank, world_size

CHUNK = 2 ** 26  # elements of a parameter that are updated at a time


def stochastic_round(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rounds float32 to bfloat16, up or down at random such that the mean stays the same."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device,
                          generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


def partition_params(sizes: list[int]) -> list[int]:
    """The rank that keeps the state of each parameter. Parameters are assigned in order of
    decreasing size, each to the rank that has the fewest elements so far."""
    load, owner = [0] * world_size(), [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = load.index(min(load))
        load[owner[n]] += sizes[n]
    return owner


@contextlib.contextmanager
def summed_gradients(params: list):
    """Within this context, the gradients of several backward passes are added up; after it, the
    sums are in p.grad, as if nothing had been done. In between they are kept elsewhere, because
    torch.compile cannot trace a 16-bit parameter that has a float32 gradient: a hook moves each one
    as soon as a backward pass has made it, so that they never exist twice."""
    sums = {}

    def move(p):
        if p in sums:
            sums[p].add_(p.grad)
        else:
            sums[p] = p.grad
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(move) for p in params]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for p, gradient in sums.items():
        p.grad = gradient


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW that trains 16-bit models too. Updates go to float32 master weights, and
    the model holds a rounded copy of them: at a learning rate of 1e-6, an update is far smaller
    than the last digit of a bfloat16 weight.

    Each rank keeps the state of its partition of the parameters and broadcasts what it has updated
    (ZeRO stage 1). The state is allocated in the constructor, so that a lack of memory shows at the
    start. state_dtype: torch.float32, with which gradients are accumulated in float32 too, or
    torch.bfloat16, which takes 6 bytes less per parameter."""

    def __init__(self, params, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8,
                 state_dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.state_dtype = state_dtype
        # all parameters, in the order of state_dict(), and the group of each
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.group_of = [group for group in self.param_groups for _ in group["params"]]
        self.owner = partition_params([p.numel() for p in self.params])
        for n, p in enumerate(self.params):
            if state_dtype == torch.float32:
                p.grad_dtype = torch.float32
            if self.owner[n] == rank():
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p, dtype=state_dtype),
                                 "exp_avg_sq": torch.zeros_like(p, dtype=state_dtype)}
                if p.dtype != torch.float32:
                    self.state[p]["master"] = p.detach().float()

    @torch.no_grad()
    def step(self, closure=None):
        for n, p in enumerate(self.params):
            if p.grad is not None and self.owner[n] == rank():
                self.update(p, self.group_of[n], n)
        for owner in range(world_size() if world_size() > 1 else 0):
            owned = [p.data for n, p in enumerate(self.params) if self.owner[n] == owner]
            in_buckets(owned, lambda flat: dist.broadcast(flat, owner))

    def update(self, p, group, n):
        """Updates parameter number n in chunks, because the float32 temporaries are several times
        as large as what is updated."""
        state, generator = self.state[p], None
        state["step"] += 1
        if self.state_dtype != torch.float32:  # seeded, so that a resumed run rounds identically
            generator = torch.Generator(p.device).manual_seed(state["step"] * 10 ** 6 + n)
        flat = [p.grad.reshape(-1), p.view(-1), state["exp_avg"].view(-1),
                state["exp_avg_sq"].view(-1), state.get("master", p).view(-1)]
        for chunks in zip(*(x.split(CHUNK) for x in flat)):
            self.update_chunk(*chunks, state["step"], group, generator)

    def update_chunk(self, grad, p, exp_avg, exp_avg_sq, master, t, group, generator):
        (beta1, beta2), lr, grad = group["betas"], group["lr"], grad.float()
        m, v = exp_avg.float(), exp_avg_sq.float()  # the same tensors where they are float32
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        master.mul_(1 - lr * group["weight_decay"])
        denominator = (v / (1 - beta2 ** t)).sqrt_().add_(group["eps"])
        master.addcdiv_(m, denominator, value=-lr / (1 - beta1 ** t))
        if generator:
            exp_avg.copy_(stochastic_round(m, generator))
            exp_avg_sq.copy_(stochastic_round(v, generator))
        if p.dtype != master.dtype:
            p.copy_(master)

    @torch.no_grad()
    def load_shard(self, states: dict) -> None:
        """Copies this rank's partition out of one rank's saved state_dict()["state"]. Call it with
        the shards of all ranks that saved; their number may differ from today's."""
        for n, p in enumerate(self.params):
            if n in states and self.owner[n] == rank():
                self.state[p]["step"] = states[n]["step"]
                for key in self.state[p].keys() - {"step"}:
                    self.state[p][key].copy_(states[n][key])


# ------------------------------------------------------------------- ours, and any other optimizer

def checked(optimizer, groups: list[list]):
    """The optimizer of these groups of parameters, as it is. ValueError: it has other
    parameters; its step needs a closure; or it is not ours, and has 16-bit parameters: it would
    round every update away."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise ValueError(f"{type(optimizer).__name__}.step needs a closure, and the gradients of a "
                         "mini-batch are computed once: choose another optimizer")
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if theirs != {id(p) for group in groups for p in group}:
        raise ValueError("make_optimizer must return an optimizer of all parameters that it gets; "
                         "those that are not to learn can have a learning rate of 0")
    narrow = {p.dtype for group in optimizer.param_groups for p in group["params"]} - {
        torch.float32}
    if narrow and not isinstance(optimizer, AdamW):
        raise ValueError(f"{type(optimizer).__name__} would train {narrow.pop()} parameters, and "
                         "only our AdamW has float32 master weights: use --dtype float32, or "
                         "--lora_rank, whose adapters are float32")
    return optimizer


def saved_state(optimizer) -> dict:
    """What this rank's file of a checkpoint holds: of our AdamW its partition. Another optimizer
    has the same state on every rank, so rank 0 saves it."""
    if isinstance(optimizer, AdamW):
        return optimizer.state_dict()["state"]
    return optimizer.state_dict() if rank() == 0 else {}


def load_state(optimizer, states: list[dict], files: str) -> None:
    """Loads what the ranks of a run saved, in their order, on any number of ranks. ValueError: one
    of their files is missing, or it was another optimizer."""
    if isinstance(optimizer, AdamW):
        if {n for state in states for n in state} != {*range(len(optimizer.params))}:
            raise ValueError(f"one of {files} is missing, the optimizer state of one rank, or they "
                             "are of another optimizer")
        for state in states:
            optimizer.load_shard(state)
        return
    try:  # a copy, because the tensors of `states` may be those of a file
        optimizer.load_state_dict(copy.deepcopy(states[0]))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{files} have no state of this {type(optimizer).__name__}: {error!r}"
                         ) from error
