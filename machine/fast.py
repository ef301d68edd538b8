"""What makes a GPU fast and changes results by rounding alone: torch.compile, captured CUDA graphs.
Each is tried out before it is used; what fails or comes out otherwise is left out, says a line."""
import copy
import dataclasses
import logging
import types

import torch
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

log = logging.getLogger("sapo")


def warn(text):
    log.warning(" ".join(text.split())[:300])


def compiled(eager, fast=None):
    """A function, compiled for all shapes, or `fast` if that is given. Where compiling fails, now
    or later, the function is run as it is from then on."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would give up silently
    torch._inductor.config.triton.mix_order_reduction = False  # it spills, and plans for sizes
    torch.fx.experimental._config.use_duck_shape = False  # sizes may agree by chance
    torch._functorch.config.force_non_lazy_backward_lowering = True  # else backward() would fail
    use = [fast or torch.compile(eager, dynamic=True)]

    def run(*args, **kwargs):
        try:
            return use[0](*args, **kwargs)
        except (torch.OutOfMemoryError, StopRecomputation):  # the latter is how checkpointing ends
            raise
        except Exception as error:
            if use[0] is eager:
                raise
            use[0] = eager
            warn(f"torch.compile failed, and it goes on without: {error}")
        return eager(*args, **kwargs)
    return run


# ---------------------------------------------------------------------------------------- scoring

def compiled_layers(body):
    """A model's body in which each layer is compiled: a few graphs serve all layers and shapes."""
    if not hasattr(body, "layers"):  # it calls them otherwise
        return compiled(body)
    fast = copy.copy(body)  # another body of the same layers, which stay as they are
    fast._modules = {name: part for name, part in body._modules.items() if name != "layers"}
    fast.__dict__["layers"] = [compiled_layer(layer, n) for n, layer in enumerate(body.layers)]
    return compiled(body, fast)


def compiled_layer(layer, n):
    """A layer, compiled, which is given its own part of a cache: the compiler would make a graph
    for every number of a layer."""
    fast = torch.compile(layer, dynamic=True)

    def run(*args, **kwargs):
        for name in ("cache", "past_key_values"):  # transformers has had the first since 5.24
            if kwargs.get(name):
                kwargs[name] = kwargs[name].layers[n]
                torch._dynamo.mark_static(kwargs[name].keys, (1, 3))  # heads and their size
                torch._dynamo.mark_static(kwargs[name].values, (1, 3))  # are no variables
        return fast(*args, **kwargs)
    return run


def compiled_scoring(lm, tokens):
    """-> lm (model.ActorCritic) with scoring compiled; lm itself where log-probs, entropies or
    gradients come out otherwise. It is tried out on about as many `tokens` as a micro-batch has,
    because the compiler plans for the sizes that it sees first."""
    length = min(500, lm.max_length)
    rows, found = max(2, tokens // length) | 1, []  # odd, unlike all widths, so no sizes merge
    words = torch.tensor([i for i in range(20) if i not in lm.value_ids])
    dice = torch.Generator().manual_seed(0)
    row, col = torch.ones(rows, length - 1).nonzero().T  # a response is all but its first token
    batch = {"ids": words[torch.randint(len(words), (rows, length), generator=dice)],
             "token_row": row, "token_col": col + 1, "row": torch.arange(rows),
             "start": torch.ones(rows).long(), "end": torch.full((rows,), length)}
    batch = types.SimpleNamespace(**{name: x.to(lm.device) for name, x in batch.items()})
    fast = dataclasses.replace(lm, compile=True)
    for one in (lm, fast):
        scores = one.score(batch)
        sum(x.sum() for x in scores).backward()
        norms = [p.grad.float().norm() for p in lm.model.parameters() if p.grad is not None]
        found.append([scores.logp.detach(), scores.entropy.detach(), torch.stack(norms)])
        lm.model.zero_grad(set_to_none=True)
    return fast if all(alike(lm, *pair, "compiled scoring") for pair in zip(*found)) else lm


def alike(lm, theirs, ours, what):
    """Whether two results differ by no more than another order of operations may make them."""
    off, norm = (ours.float() - theirs.float()).norm().item(), theirs.float().norm().item()
    if off <= (1e-3 if lm.model.dtype == torch.float32 else 0.1) * norm:
        return True
    warn(f"{what} is {off:.1g} of {norm:.1g} off, so it is not used")
    return False


# --------------------------------------------------------------------------------------- sampling

class Captured:
    """A decoding step as CUDA graphs, one for each number of rows and length. They point to where
    the rows lie."""

    def __init__(self, step):
        self.step, self.graphs, self.memory, self.works = step, {}, None, True

    def __call__(self, n, span):
        if self.graphs.get((n, span)):
            return self.graphs[n, span].replay()
        self.step(n, span)  # a size's first step is run as it is: a capture wants a warm-up
        if self.works and (n, span) not in self.graphs:
            try:
                self.graphs[n, span] = self.capture(n, span)
            except torch.OutOfMemoryError:
                self.graphs[n, span] = None  # this size is run as it is
            except RuntimeError as error:
                warn(f"no decoding step will be captured, because one could not be: {error}")
                self.works = False

    def capture(self, n, span):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a failed capture would leave another
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                self.step(n, span)
        self.memory = graph.pool()  # graphs run one at a time, so they share it
        return graph


def accelerate(sampler, difference, gpu, compile):
    """Has a rollout.Sampler compute in the fastest way whose answers do not differ, which
    difference(sampler) says in words."""
    parts = sampler.body, sampler.draw_tokens, sampler.note_tokens
    ways = dict.fromkeys([(gpu, compile), (gpu, False), (False, compile), (False, False)])
    for captured, compiles in ways:
        sampler.body, sampler.draw_tokens, sampler.note_tokens = parts if not compiles else (
            compiled_layers(parts[0]), compiled(parts[1]), compiled(parts[2]))
        sampler.new_decoder = lambda: sampler.decode_one_token
        if captured:
            sampler.new_decoder = lambda: Captured(sampler.decode_one_token)
        sampler.decoder = sampler.new_decoder()
        why = difference(sampler)
        if not why and getattr(sampler.decoder, "works", True):
            return
        if why:
            warn(f"{'compiled ' * compiles}{'captured ' * captured}sampling is not used: {why}")
    raise ValueError(why)
