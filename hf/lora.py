"""Low-rank adapters (LoRA; Hu et al., 2021). The model's own weights W are frozen, and every linear
layer of its backbone computes W x + b + B A x, of which A and B alone are trained, in float32. B
starts at 0, so the model is unchanged at first.

    LoRALinear                   a linear layer with A and B
    add_adapters                 turns the linear layers of a model into such layers, in place
    sampling_copy                what a rollout.Sampler decodes with
    with_random_adapters         what checks compare, because with B = 0 they would see nothing
    merged_copy                  a plain model whose weights are W + B A
    write_adapter, read_adapter  folders as those of peft, which can load them

Adapters are never merged while a model is used: sampler and scoring pass compute the same function.
The copies share all tensors but A and B, except merged_copy's, which share only w+ and w-. Why not
peft's layers: with A and B in float32 they convert x to float32 in each layer; with A and B in the
model's 16 bits small steps are lost.
"""
import copy
import json
import math
import operator
import os
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F

from runtime.checkpoint import fingerprint


class Lora(NamedTuple):
    """What a model knows of its adapters, in its attribute `lora`."""

    rank: int
    base: str  # the folder, or hub id, of the model without adapters


class LoRALinear(torch.nn.Linear):
    """A linear layer that was given `lora_A` (r, in) and `lora_B` (out, r). Its own weights are
    still called `weight` and `bias`. A and B are rounded to the precision of x when they are used;
    their gradients are float32."""

    def forward(self, x):
        low = F.linear(x, self.lora_A.to(x.dtype))
        return super().forward(x) + F.linear(low, self.lora_B.to(x.dtype))


def adapted_layers(model) -> dict:
    """The layers with adapters, by name; none if the model has no adapters."""
    if not rank_of(model):
        return {}
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def rank_of(model) -> int:
    """The rank of a model's adapters; 0 if it has none."""
    return model.lora.rank if getattr(model, "lora", None) else 0


def named_adapters(model) -> dict:
    """A and B of every layer, by their names in a folder of peft."""
    return {f"{PREFIX}{name}.{x}.weight": getattr(layer, x)
            for name, layer in adapted_layers(model).items() for x in ("lora_A", "lora_B")}


def adapter_tensors(model) -> list:
    """A and B of every layer that has them: A, then B."""
    return [*named_adapters(model).values()]


def check_trained(model, trained: list) -> None:
    """ValueError: what is trained is not adapters alone, or not in float32."""
    ours = {id(p) for p in adapter_tensors(model)}
    if any(id(p) not in ours for p in trained):
        raise ValueError("the model has adapters, and other parameters that are not frozen, which "
                         "the folder of an adapter could not hold: requires_grad must be False")
    if any(p.dtype != torch.float32 for p in trained):
        raise ValueError("the adapters are not float32, in which alone small steps are not lost: "
                         "convert the model before it gets adapters")


def add_adapters(model, rank: int, names=None, base="") -> None:
    """Freezes a model, and gives A and B to all linear layers of its backbone, or to those with
    these names. A is uniform within +-2 / sqrt(in), from a fixed seed, so all processes and all
    runs begin with the same one; B is 0. (Others draw within +-1 / sqrt(in), and multiply B A by
    alpha / rank = 2. At the start that is the same; then a step of A has half of that effect here.)
    base: default the model's folder or hub id, which the folder of an adapter names. ValueError:
    there are no such layers, no base, or the rank is above that of W in all layers."""
    base, rank = base or model.name_or_path, operator.index(rank)
    if not base:
        raise ValueError("the folder of an adapter names its base, and this model has no folder or "
                         "hub id: save it, and load it from there")
    backbone = {id(part) for part in model.base_model.modules()}
    linear = {name: layer for name, layer in model.named_modules()
              if type(layer) is torch.nn.Linear and id(layer) in backbone}
    most = max((min(layer.weight.shape) for layer in linear.values()), default=rank)
    if rank < 1 or names is None and rank > most:  # peft's may have more
        raise ValueError(f"adapters of rank {rank}: 1 to {most} make sense in this model")
    names = [*linear] if names is None else sorted(names)
    if unknown := [name for name in names if name not in linear]:
        raise ValueError(f"the adapter is for {unknown[0]}, which is no linear layer of the "
                         f"backbone of {type(model).__name__}")
    if not names:
        raise ValueError(f"{type(model).__name__} cannot have adapters: its backbone has no linear "
                         "layers (torch.nn.Linear); without --lora_rank all parameters are trained")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name in names:
        layer = linear[name]
        a, b = torch.empty(rank, layer.in_features), torch.zeros(layer.out_features, rank)
        a.uniform_(-1, 1, generator=generator).mul_(2 / math.sqrt(layer.in_features))
        layer.__class__ = LoRALinear
        layer.lora_A = torch.nn.Parameter(a.to(layer.weight.device))
        layer.lora_B = torch.nn.Parameter(b.to(layer.weight.device))
    model.lora = Lora(rank, os.path.abspath(base) if os.path.isdir(base) else base)


# ------------------------------------------------------------------------------------------- copies

def copy_with(model, new: dict):
    """A copy of a model with other tensors in place of some of its own, {parameter or buffer:
    tensor}. It shares all others, and the rows of w+ and w-."""
    value_rows = getattr(model, "sapo_value_rows", None)
    memo = {id(x): x for x in (*model.parameters(), *model.buffers(), value_rows)}
    memo |= {id(old): torch.nn.Parameter(x, requires_grad=old.requires_grad)
             if isinstance(old, torch.nn.Parameter) else x for old, x in new.items()}
    return copy.deepcopy(model, memo)


def sampling_copy(model):
    """A copy with its own A and B, in the precision of W, which copy_adapters fills: graphs that
    are captured hold their addresses, and need not convert them at every step. Without adapters,
    the model itself."""
    layers = adapted_layers(model).values()
    return copy_with(model, {p: p.detach().to(layer.weight.dtype, copy=True) for layer in layers
                             for p in (layer.lora_A, layer.lora_B)}) if layers else model


@torch.no_grad()
def copy_adapters(target, source) -> None:
    """Copies A and B of every layer, in place."""
    if rank_of(source):
        torch._foreach_copy_(adapter_tensors(target), adapter_tensors(source))


@torch.no_grad()
def with_random_adapters(model):
    """A copy whose A and B are random, such that B A has 0.3 times the norm of W. Without adapters,
    the model itself."""
    generator, new = torch.Generator().manual_seed(0), {}
    for layer in adapted_layers(model).values():
        a, b = (torch.randn(p.shape, generator=generator).to(p)
                for p in (layer.lora_A, layer.lora_B))
        new[layer.lora_A] = a
        new[layer.lora_B] = 0.3 * layer.weight.float().norm() / (b @ a).norm() * b
    return copy_with(model, new) if new else model


def merged_weight(layer: LoRALinear) -> torch.Tensor:
    """W + B A, in float32."""
    return layer.weight.float() + layer.lora_B.float() @ layer.lora_A.float()


@torch.no_grad()
def merged_copy(model, dtype: torch.dtype):
    """A copy without adapters on the CPU, of the same function up to rounding: W + B A is computed
    in float32 and then rounded to `dtype`. Layers that are tied stay tied. It shares nothing but
    the rows of w+ and w-, can be trained, and has no name until it is saved."""
    layers = adapted_layers(model)
    new = {p: p.detach().to("cpu", dtype, copy=True) for p in model.parameters()}
    new |= {b: b.to("cpu", copy=True) for b in model.buffers()}
    for layer in layers.values():
        new[layer.weight] = merged_weight(layer).to("cpu", dtype)
    merged = copy_with(model, new).to("cpu").requires_grad_(True)
    merged.name_or_path = ""
    for layer in adapted_layers(merged).values():
        del layer.lora_A, layer.lora_B
        layer.__class__ = torch.nn.Linear
    del merged.lora
    return merged


# ----------------------------------------------------------------------------------- peft's folders

PREFIX = "base_model.model."  # of peft's names of layers
# Fields of adapter_config.json that would make it another function; these values do not.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "revision": (None, "main"),
         "init_lora_weights": (True, False, "gaussian", "orthogonal"),
         **dict.fromkeys(("target_parameters", "use_dora", "use_rslora", "use_qalora", "use_bdlora",
                          "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern",
                          "alpha_pattern", "layer_replication", "trainable_token_indices",
                          "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config",
                          "monteclora_config"), (None, False, {}, [], ()))}


def base_fingerprint(model) -> str:
    """The fingerprint of the weights without adapters, as they are in bfloat16, in which the model
    may be loaded or not."""
    adapters = {id(p) for p in adapter_tensors(model)}
    return fingerprint(p.flatten()[:64].bfloat16() for p in model.parameters()
                       if id(p) not in adapters)


def check_base(model, sapo_json: dict) -> None:
    """ValueError: the model's frozen weights are not those with which the adapters were saved."""
    if sapo_json.get("base_fingerprint") not in (None, base_fingerprint(model)):
        raise ValueError(f"the adapters were trained with other weights than those that are now in "
                         f"{model.lora.base}: put these back")


def write_adapter(model, folder) -> None:
    """Writes A and B in float32, and adapter_config.json."""
    layers = adapted_layers(model)
    tensors = {key: p.detach().float().cpu().contiguous()
               for key, p in named_adapters(model).items()}
    safetensors.torch.save_file(tensors, f"{folder}/adapter_model.safetensors", {"format": "pt"})
    # the ends of names, such as q_proj, as other programs expect them; whole names where a layer
    # without adapters has such an end, too
    ends = {name.rpartition(".")[2] for name in layers}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True,
              "base_model_name_or_path": model.lora.base, "r": model.lora.rank,
              "lora_alpha": model.lora.rank, "lora_dropout": 0.0, "bias": "none",
              "target_modules": sorted(ends if len(meant) == len(layers) else layers)}
    text = json.dumps(config, indent=2) + "\n"
    Path(folder, "adapter_config.json").write_text(text, encoding="utf-8")


def read_adapter(model, config: dict, file) -> None:
    """Gives a model the adapters of a peft folder, with its adapter_config.json and the file of
    its weights. ValueError: it is not plain LoRA, or does not fit the model."""
    for name, plain in PLAIN.items():
        if name in config and config[name] not in plain:
            raise ValueError(f"its adapter_config.json has {name} {config[name]!r}, {MERGE}")
    if not file or not {"r", "lora_alpha"} <= config.keys():
        raise ValueError("an adapter needs adapter_model.safetensors, and r and lora_alpha in its "
                         "adapter_config.json; with other files, load it in peft and save it again "
                         "(save_pretrained)")
    tensors = safetensors.torch.load_file(file)
    for key in tensors:
        if ".lora_A.weight" not in key and ".lora_B.weight" not in key:
            raise ValueError(f"it has {key}, {MERGE}")
    if not tensors:
        raise ValueError(f"{file} has no tensors")
    names = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
    add_adapters(model, config["r"], names)
    factor = config["lora_alpha"] / config["r"]
    load_adapter(model, {key: factor * x.float() if ".lora_A." in key else x
                         for key, x in tensors.items()})


MERGE = ("which is not supported: merge the adapter into its model first (peft: merge_and_unload, "
         "and save_pretrained of model and tokenizer)")


@torch.no_grad()
def load_adapter(model, tensors: dict) -> None:
    """Copies what write_adapter wrote into A and B, in place. ValueError: it is for other layers,
    or has numbers that are not finite."""
    expected = named_adapters(model)
    for key in {*expected} ^ {*tensors}:
        raise ValueError(f"the adapter and the model do not fit: {key} is in one of them only")
    for key, p in expected.items():
        if p.shape != tensors[key].shape:
            raise ValueError(f"the adapter and the model do not fit: {key} has the shape "
                             f"{tuple(tensors[key].shape)}, not {tuple(p.shape)}")
        if not tensors[key].isfinite().all():
            raise ValueError(f"{key} of the adapter has numbers that are not finite")
        p.copy_(tensors[key])
