"""What makes a GPU fast and changes results by rounding alone: torch.compile, captured CUDA graphs.
Each is tried out before it is used. What fails or gives wrong results is not used, with a
warning."""
import copy
import logging

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from machine.cli import out_of_memory

log = logging.getLogger("sapo")


def warn(text):
    log.warning(" ".join(text.split())[:300])


def compiled(eager, fast=None):
    """A function, compiled for all shapes as a single graph, or `fast` if that is given. Where
    compiling fails, now or later, it falls back to the eager function with a warning. Any other
    error is raised: the call may have changed its arguments in place, and must not be repeated."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would give up silently
    torch._inductor.config.triton.mix_order_reduction = False  # it spills, and plans for sizes
    torch.fx.experimental._config.use_duck_shape = False  # sizes may agree by chance
    torch._functorch.config.force_non_lazy_backward_lowering = True  # else backward() would fail
    use = [fast or torch.compile(eager, dynamic=True, fullgraph=True)]

    def run(*args, **kwargs):
        try:
            return use[0](*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # the compiler's own
            if use[0] is eager:
                raise
            use[0] = eager
            warn(f"torch.compile failed, falling back to eager: {error}")
        return eager(*args, **kwargs)
    return run


# ---------------------------------------------------------------------------------------- scoring

def compiled_layers(body):
    """A model's body in which each layer is compiled: a few graphs serve all layers and shapes."""
    if not hasattr(body, "layers"):  # it calls them otherwise
        return compiled(body, torch.compile(body, dynamic=True))
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
            except RuntimeError as error:
                if out_of_memory(error):
                    self.graphs[n, span] = None
                    warn(f"no memory left to capture a decoding step of {n} rows and {span} "
                         "positions: it runs eagerly, which is slower. Fewer --rows leave more")
                else:
                    self.works = False
                    warn(f"no decoding step will be captured, because one could not be: {error}")

    def capture(self, n, span):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a failed capture would leave another
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                self.step(n, span)
        self.memory = graph.pool()  # graphs run one at a time, so they share it
        return graph


def accelerate(sampler, compare, ways):
    """Has a rollout.Sampler compute in the first of `ways`, pairs (captured, compiled), in which
    compare(sampler) finds nothing wrong -> that way. ValueError: what is wrong with the last."""
    eager = sampler.body, sampler.draw_tokens, sampler.note_tokens
    for way in dict.fromkeys(ways):
        captured, compiles = way
        sampler.body, sampler.draw_tokens, sampler.note_tokens = eager if not compiles else (
            compiled_layers(eager[0]), compiled(eager[1]), compiled(eager[2]))
        sampler.new_decoder = (lambda: Captured(sampler.decode_one_token)) if captured else (
            lambda: sampler.decode_one_token)
        sampler.decoder = sampler.new_decoder()
        try:
            why = compare(sampler)
        except Exception as error:  # a kernel may fail in ways of its own
            if way == (False, False):
                raise
            why = f"{type(error).__name__}: {error}"
        if not why and getattr(sampler.decoder, "works", True):
            return way
        if why and way != (False, False):
            warn(f"{'compiled ' * compiles}{'captured ' * captured}sampling is not used: {why}")
    raise ValueError(why)
