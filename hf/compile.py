"""torch.compile and CUDA graphs, which change results by rounding only. hf/verify.py compares
them with the plain model before they are used.

    compiled           a function, compiled as one graph for all shapes
    compiled_layers    a model's backbone, layer by layer
    CudaGraphs         a decoding step, captured once for each size and replayed
    accelerate         lets a rollout.Sampler decode with these, or without
"""
import copy
import importlib
import logging
import warnings

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from runtime.cli import out_of_memory

log = logging.getLogger("sapo")


def warn(text: str) -> None:
    log.warning(" ".join(text.split())[:300])


COMPILER_SETTINGS = (  # (module, name, value) of settings that are private to PyTorch
    ("torch._dynamo.config", "recompile_limit", 64),
    ("torch._dynamo.config", "fail_on_recompile_limit_hit", True),  # else it gives up silently
    # it spills registers, and specializes on sizes
    ("torch._inductor.config", "triton.mix_order_reduction", False),
    ("torch.fx.experimental._config", "use_duck_shape", False),  # sizes may be equal by chance
    # so that errors of a backward pass show when the forward pass is compiled
    ("torch._functorch.config", "force_non_lazy_backward_lowering", True))


def configure_compiler() -> None:
    """Applies COMPILER_SETTINGS to this process. Those that this version of PyTorch does not have
    are left out."""
    for module, name, value in COMPILER_SETTINGS:
        try:
            config = importlib.import_module(module)
        except ImportError:
            continue
        if hasattr(config, name):
            setattr(config, name, value)
    # advice about settings that are as they are on purpose
    warnings.filterwarnings("ignore", r"TensorFloat32 tensor cores|\s*Online softmax is disabled")


def compiled(eager, fast=None):
    """A function compiled as one graph for all shapes (or `fast`, if given). If the compiler fails,
    now or later, it falls back to the eager function with a warning. Other errors are raised,
    because the call may have changed its arguments in place and must not be repeated."""
    configure_compiler()
    function = [fast or torch.compile(eager, dynamic=True, fullgraph=True)]

    def run(*args, **kwargs):
        try:
            return function[0](*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # the compiler's own
            if function[0] is eager:
                raise
            function[0] = eager
            warn(f"torch.compile failed, falling back to eager: {error}")
        return eager(*args, **kwargs)
    return run


# ---------------------------------------------------------------------------------------- scoring

def compiled_layers(backbone):
    """A model's backbone with every layer compiled: a few graphs serve all layers and shapes."""
    if not hasattr(backbone, "layers"):  # this architecture names its layers differently
        return compiled(backbone, torch.compile(backbone, dynamic=True))
    fast = copy.copy(backbone)  # it shares the layers, which themselves are not changed
    fast._modules = {name: part for name, part in backbone._modules.items() if name != "layers"}
    fast.__dict__["layers"] = [compiled_layer(layer, n)
                               for n, layer in enumerate(backbone.layers)]
    return compiled(backbone, fast)


def compiled_layer(layer, n):
    """A compiled layer. It gets only its own layer of the cache, because the compiler would make a
    new graph for every layer index."""
    fast = torch.compile(layer, dynamic=True)

    def run(*args, **kwargs):
        for name in ("cache", "past_key_values"):  # the first since transformers 5.24
            if kwargs.get(name):
                kwargs[name] = kwargs[name].layers[n]
                torch._dynamo.mark_static(kwargs[name].keys, (2, 3))  # heads and head_dim
                torch._dynamo.mark_static(kwargs[name].values, (2, 3))
        return fast(*args, **kwargs)
    return run


# --------------------------------------------------------------------------------------- sampling

class CudaGraphs:
    """A decoding step as CUDA graphs, one for each number of slots and length of the cache. They
    hold the addresses of the decode state."""

    def __init__(self, step):
        self.step, self.graphs, self.memory, self.works = step, {}, None, True

    def __call__(self, n, kv_length):
        if self.graphs.get((n, kv_length)):
            return self.graphs[n, kv_length].replay()
        self.step(n, kv_length)  # the first step of a size runs eagerly: a capture needs a warm-up
        if self.works and (n, kv_length) not in self.graphs:
            try:
                self.graphs[n, kv_length] = self.capture(n, kv_length)
            except RuntimeError as error:
                if out_of_memory(error):
                    self.graphs[n, kv_length] = None
                    warn(f"no memory left to capture a decoding step of {n} slots and {kv_length} "
                         "positions: it runs eagerly, which is slower. A lower --max_num_seqs "
                         "leaves more memory")
                else:
                    self.works = False
                    warn(f"CUDA graphs are not used, because a capture failed: {error}")

    def capture(self, n, kv_length):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # restored if the capture fails
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                self.step(n, kv_length)
        self.memory = graph.pool()  # graphs run one at a time, so they can share memory
        return graph


def accelerate(sampler, fast: bool, compile: bool) -> None:
    """From now on, a rollout.Sampler decodes in the fast way or in the plain one. The fast way
    captures decoding steps as CUDA graphs on a GPU; with `compile`, it compiles the layers, and on
    a GPU attends in pieces if the model has 16 bits. The plain way runs the model as it is."""
    state = sampler.state
    state.backbone = state.model.base_model
    if fast and compile:
        state.backbone = compiled_layers(state.backbone)
    is_16_bit = state.hidden.dtype in (torch.float16, torch.bfloat16)
    state.in_pieces = fast and compile and sampler.gpu and is_16_bit

    def new_decode_step():  # called after every resize, too
        step = sampler.decode_one_token
        return CudaGraphs(step) if fast and sampler.gpu else step

    sampler.new_decode_step = new_decode_step
    sampler.decode_step = new_decode_step()
