"""Hugging Face folders and hub repositories: what a name means, what is read and written there, and
which models cannot be used, and why.

    resolve_model, local_folder              a name -> the folder or hub id that it means
    read_sapo_json, sapo_json_of             what `ActorCritic.save` has put beside the weights
    read_model, write_model, read_weights    model and tokenizer of a folder, also of an adapter's
    prepare_model, check_tokenizer           what cannot be used, in one line
    reserve_value_ids, find_stop_ids         which tokens are w+ and w-, and which end a response
"""
import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers  # as a whole: it imports its parts when they are used, so --help stays quick

from hf import lora
from hf.attention import causal_inputs, replace_attention
from hf.chat import Chat, used_tokens
from runtime.checkpoint import is_of_a_run, newest_checkpoint_in

# ------------------------------------------------------------------------- what a name stands for

RESULTS = Path(__file__).resolve().parent.parent / "results"
OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google",
          "Mistral": "mistralai"}


def local_folder(name: str, tiny: str = "tiny-house") -> Path:
    """The local folder that a name refers to, which need not exist: results/TINY for "tiny" (made
    by tools/imitate.py; an environment says which one it wants), RUN/final for a run, else the
    folder of that name."""
    folder = RESULTS / tiny if name == "tiny" else Path(os.path.expanduser(name))
    return folder / "final" if (folder / "final").is_dir() else folder


def resolve_model(name: str, tiny: str = "tiny-house") -> str:
    """A name -> the folder or hub id that it means: "tiny", a folder, OWNER/NAME, or a bare name
    such as Qwen2.5-1.5B-Instruct. ValueError: the folder does not exist."""
    if local_folder(name, tiny).is_dir():
        return str(local_folder(name, tiny))
    if name == "tiny":
        raise ValueError(f"cannot load model tiny: there is no {RESULTS.name}/{tiny} beside the "
                         "code; name another --model")
    name = os.path.expanduser(name)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"cannot load model {name}: there is no such folder")
    owner = next((owner for family, owner in OWNERS.items() if name.startswith(family)), None)
    return f"{owner}/{name}" if owner and "/" not in name else name


# --------------------------------------------------------------------------------- files of a model

def find_file(where, name: str):
    """The path of a file in a folder or hub repository, or None if it has no such file."""
    if Path(where).is_dir():
        return Path(where, name) if Path(where, name).is_file() else None
    return transformers.utils.cached_file(
        where, name, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)


@contextlib.contextmanager
def edit_json(path) -> Iterator[dict]:
    """Yields the JSON object in a file, and writes it back afterwards."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    yield content
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_sapo_json(where) -> dict:
    """What ActorCritic.save wrote into the sapo.json of a folder or hub repository; {} if there is
    none. An adapter's has "lora_rank", too; if it has no sapo.json, because peft wrote it, the rest
    is that of the model that it is for."""
    own, adapter = read_json(where, "sapo.json"), read_json(where, "adapter_config.json")
    if not adapter:
        return own
    return (own or read_sapo_json(base_of(adapter))) | {"lora_rank": adapter.get("r", 0)}


def sapo_json_of(name: str, tiny: str = "tiny-house") -> dict:
    """The sapo.json of a model, by a name that resolve_model understands; {} if there is none. No
    weights are read. ValueError: the folder does not exist."""
    where = resolve_model(name, tiny)
    if not Path(where).is_dir() and "/" not in where:  # it is no OWNER/NAME of the hub
        return {}
    return read_sapo_json(where)


def read_json(where, name: str) -> dict:
    """The JSON object in a file of a folder or hub repository; {} if it has no such file.
    ValueError: it cannot be read."""
    path = find_file(where, name)
    if not path:
        return {}
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def read_model(name: str, where: str, dtype, prompt: str = "", max_new_tokens: int = 0) -> tuple:
    """The model and the tokenizer in a folder or hub repository `where`, which the user called
    `name`. If it is an adapter, the model is the one that it is for, with this adapter. ValueError:
    they cannot be read; or the model's context is too short for `prompt` and a response of
    max_new_tokens, which is found out before the weights are read."""
    check_folder(name, where)
    adapter = {}
    try:
        adapter = read_json(where, "adapter_config.json")
        base = base_of(adapter) if adapter else where
        # an adapter's folder may have no tokenizer
        words = where if find_file(where, "tokenizer_config.json") else base
        # a folder with sapo.json was written by `save` and has a tokenizer.json, which for some
        # types of models AutoTokenizer would ignore
        tokenizer_class = (transformers.PreTrainedTokenizerFast if find_file(words, "sapo.json")
                           else transformers.AutoTokenizer)
        tokenizer = tokenizer_class.from_pretrained(words)
        config = transformers.AutoConfig.from_pretrained(base)
        length = getattr(config.get_text_config(), "max_position_embeddings", None)
        needed = len(tokenizer(prompt).input_ids) + max_new_tokens
        if length and needed > length:
            raise ValueError(f"--max_new_tokens {max_new_tokens} leaves no room for a prompt: "
                             f"together they need {needed} tokens or more, and it has {length}")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            base, config=config, dtype=dtype, output_loading_info=True)
        if adapter:
            lora.read_adapter(model, adapter, find_file(where, "adapter_model.safetensors"))
            lora.check_base(model, read_sapo_json(where))
            read_value_rows(model, where)
            model.name_or_path = where
        elif any(".lora_A" in key for key in report["unexpected_keys"]):
            raise ValueError("its weights are those of a model with adapters, which only the "
                             "method `save` of an ActorCritic can write")
    except Exception as error:  # safetensors, tokenizers and the hub have exceptions of their own
        why = " ".join((str(error).strip() or type(error).__name__).split())[:300]
        what = f"{name}" + ", which is not a folder here" * (not local_folder(name).is_dir())
        if adapter:
            what += f" (an adapter for {adapter.get('base_model_name_or_path')})"
        raise ValueError(f"cannot load model {what}: {why}") from None
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
        raise ValueError(f"the weights of {name} lack {len(missing)} tensors, such as {missing[0]}")
    return model, tokenizer


def check_folder(name: str, where: str) -> None:
    """ValueError: `where` is a local folder, and there is no model in it."""
    if not Path(where).is_dir() or find_file(where, "adapter_config.json"):
        return
    config = read_json(where, "config.json")
    if is_of_a_run(config):
        newest = newest_checkpoint_in(Path(where))
        raise ValueError(f"cannot load model {name}: the run in this folder has no final weights. "
                         f"Continue it with train.py --resume --out {shlex.quote(name)}"
                         + (f", or take --model {shlex.quote(str(newest))}" if newest else ""))
    if not config:
        raise ValueError(f"cannot load model {name}: there is no model in this folder, because it "
                         "has no config.json")


def base_of(adapter_config: dict) -> str:
    """The folder or hub id of the model that an adapter is for. ValueError: it is not named, or
    there is no such folder."""
    base = adapter_config.get("base_model_name_or_path")
    if not base:
        raise ValueError("its adapter_config.json does not name the model that it is for "
                         "(base_model_name_or_path)")
    try:
        base = resolve_model(base)
    except ValueError:
        raise ValueError(f"it is an adapter for the model in {base}, and there is no such folder: "
                         "put it back, or name where it is now in adapter_config.json "
                         "(base_model_name_or_path)") from None
    if Path(base, "adapter_config.json").is_file():
        raise ValueError(f"it is an adapter for {base}, which is an adapter itself: merge that one "
                         "first")
    return base


def read_value_rows(model, where) -> None:
    """Reads the rows of w+ and w- that are beside an adapter, and keeps them where
    model.actor_critic looks for them. An adapter of peft has none: they are those of the model that
    it is for. ValueError: they are missing."""
    own, file = read_json(where, "sapo.json"), find_file(where, "value_rows.safetensors")
    if not own:
        return
    if not file:
        raise ValueError("value_rows.safetensors is missing")
    tensors = safetensors.torch.load_file(file)
    rows = torch.nn.Linear(tensors["weight"].shape[1], 2, bias="bias" in tensors)
    rows.load_state_dict(tensors)
    model.sapo_value_rows = tuple(own["value_ids"]), rows, {}


def write_model(model, tokenizer, folder, sapo_json: dict, value_rows: dict) -> None:
    """Writes a Hugging Face folder, and sapo.json beside its files. Tools that know nothing of SAPO
    can use it: `generate` never samples w+ or w-, and settings are also stored under the names of
    transformers 4, which vLLM and llama.cpp may still read.

    If the model has adapters, the folder is theirs; value_rows, the weight (and bias) of w+ and w-,
    is a file of it. ValueError: the folder has a whole model, and this is an adapter, or the other
    way round, so both would be read as one."""
    kinds = {"config.json": "a whole model", "adapter_config.json": "an adapter"}
    other = "config.json" if lora.rank_of(model) else "adapter_config.json"
    if Path(folder, other).exists():
        raise ValueError(f"there is {kinds[other]} in {folder}: save this elsewhere")
    tokenizer.save_pretrained(folder)
    if lora.rank_of(model):
        sapo_json = sapo_json | {"base_fingerprint": lora.base_fingerprint(model)}
    text = json.dumps(sapo_json, indent=2) + "\n"
    Path(folder, "sapo.json").write_text(text, encoding="utf-8")
    with edit_json(f"{folder}/tokenizer_config.json") as config:
        if config["tokenizer_class"] == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config["model_input_names"] = ["input_ids", "attention_mask"]
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if lora.rank_of(model):
        lora.write_adapter(model, folder)
        safetensors.torch.save_file(value_rows, f"{folder}/value_rows.safetensors")
        return
    model.save_pretrained(folder)
    suppressed = {*(model.generation_config.suppress_tokens or ()), *sapo_json["value_ids"]}
    with edit_json(f"{folder}/generation_config.json") as config:
        config["suppress_tokens"] = sorted(suppressed)
    with edit_json(f"{folder}/config.json") as config:
        rope = config.get("rope_parameters") or {}
        if "rope_theta" in rope:
            scaled = rope.get("rope_type", "default") != "default"
            scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
            config["rope_theta"] = rope["rope_theta"]
            config["rope_scaling"] = scaling if scaled else None


def read_weights(model, folder) -> None:
    """Copies the weights in a folder that write_model wrote from a model like this one into it, in
    place. ValueError, OSError: they cannot be read, or do not fit."""
    if not lora.rank_of(model):
        saved, _ = read_model(str(folder), str(folder), model.dtype)
        model.load_state_dict(saved.state_dict())
        return
    file = Path(folder, "adapter_model.safetensors")
    try:
        tensors = safetensors.torch.load_file(file)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    lora.check_base(model, read_sapo_json(folder))
    lora.load_adapter(model, tensors)


# --------------------------------------------------------------------- is it a model for this code?

def prepare_model(model):
    """Makes a causal LM that is loaded already ready for use: in eval mode, without what makes two
    passes over the same tokens differ, and with our attention where it is equivalent. Returns it
    without torch.compile's wrapper. ValueError: it cannot be used."""
    model = getattr(model, "_orig_mod", model).eval()
    refuse_adapters(model)
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} is not supported: it has no base_model")
    disable_dropout(model)
    replace_attention(model)
    check_head(model)
    return model


def refuse_adapters(model) -> None:
    """ValueError: the model has an adapter of another program, so its folder could not be loaded
    again. (Ours are those of hf/lora.py.)"""
    if hasattr(model, "peft_config") or any(hasattr(x, "base_layer") for x in model.modules()):
        raise ValueError("the model has an adapter of another program, that is not merged: load "
                         "the adapter's folder by --model, or merge it first (peft: model = "
                         "model.merge_and_unload())")


def find_stop_ids(model, tokenizer, chat) -> tuple:
    """The tokens that end a response: the model's own, and the end of a turn in the template."""
    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    if chat:
        stops |= {chat.end_of_turn_id()} & tokenizer.added_tokens_decoder.keys()
    return tuple(sorted(stops - {None}))


def reserve_value_ids(tokenizer, rows: int, taken, named=None) -> tuple[int, int]:
    """(w+, w-): two ids below `rows`, the number of rows of the head, that have no purpose yet. The
    first of these that there are:

    1. those that the user has `named`, by text or id. ValueError: they have a purpose, or are none;
    2. the last two rows, if no token of the vocabulary has them: many models have rows to spare;
    3. two special tokens, preferably called reserved or unused. ValueError: there are none.

    A token has a purpose if it is one of the ids `taken` or of used_tokens."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    used = {*taken, *used_tokens(tokenizer)}
    if named:
        ids = tuple(find_token_id(vocabulary, name) for name in named)
        if ids[0] == ids[1] or not all(0 <= i < rows and i not in used for i in ids):
            raise ValueError(f"--value_tokens {' '.join(map(str, named))}: give two different "
                             f"tokens, or ids below {rows}, that neither a chat template nor "
                             "the tokenizer uses for a purpose of its own")
        return ids
    last_two = (rows - 2, rows - 1)
    if max(vocabulary.values()) < rows - 2 and used.isdisjoint(last_two):
        return last_two
    free = [i for i, token in added.items() if token.special and i < rows and i not in used]
    if len(free) < 2:
        raise ValueError("no two vocabulary entries are free for w+ and w-; name two tokens that "
                         "no text uses: --value_tokens A B")
    reserved = [i for i in free if re.search("(?i)reserved|unused|extra", added[i].content)]
    others = [i for i in free if i not in reserved]
    return tuple([*sorted(others), *sorted(reserved)][-2:])


def find_token_id(vocabulary: dict, name) -> int:
    """The id of a token that is given as an id, as its text or as the digits of its id; -1 if there
    is no such token."""
    if isinstance(name, int):
        return name
    if name in vocabulary:
        return vocabulary[name]
    return int(name) if name.isdecimal() else -1


def check_tokenizer(model, chat: Chat) -> None:
    """ValueError: a response does not survive encoding and decoding, or a token has no row in the
    model's embeddings."""
    written = "<think>I see a desk.</think><action>go to desk 1</action>"
    tokenizer, ids = chat.tokenizer, chat.encode(written)
    read = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if not re.search(r"<think>.*</think>\s*<action>\s*go to desk 1\s*</action>", read.lower()):
        raise ValueError(f"the model's tokenizer, {type(tokenizer).__name__}, encodes {written!r} "
                         f"and decodes it as {read!r}: files of it are missing, or they were made "
                         "for another version of transformers")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max({*tokenizer.get_vocab().values()} - special
                  | {*ids, *chat.encode_user_turn("-")})
    rows = min(len(x().weight) for x in (model.get_input_embeddings, model.get_output_embeddings))
    if highest >= rows:
        raise ValueError(f"the tokenizer has token {highest}, and the embeddings have {rows} rows: "
                         "the tokenizer is another model's, or resize_token_embeddings is missing")


def disable_dropout(model) -> None:
    """Turns off all that makes two passes over the same tokens differ in train mode, because
    --gradient_checkpointing needs that mode: every kind of dropout, and the noise of routers."""
    for part in [*model.modules(), model.config, model.config.get_text_config()]:
        for name, value in [*vars(part).items()]:
            if re.search("drop|jitter", name) and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0


@torch.no_grad()
def check_head(model) -> None:
    """ValueError: the model transforms its hidden states before the head, or its logits after it
    (softcapping, scaling), or the head is not only a weight and a bias. score() could not do the
    same, because it applies the head itself. Both sides of the first comparison come from one pass
    wherever possible, and it is exact."""
    head, seen = model.get_output_embeddings(), {}
    hooks = [model.base_model.register_forward_hook(
        lambda module, inputs, output: seen.update(hidden=output.last_hidden_state)),
        head.register_forward_hook(
            lambda module, inputs, output: seen.update(before=inputs[0], after=output))]
    ids = torch.arange(8, device=model.device)[None]
    logits = model.forward(input_ids=ids, use_cache=False).logits  # not Module.compile()'s call
    for hook in hooks:
        hook.remove()
    if "hidden" not in seen:  # OPT calls only a part of its base_model
        seen["hidden"] = model.base_model(input_ids=ids, use_cache=False,
                                          **causal_inputs(model, ids)).last_hidden_state
    if not (torch.equal(seen["hidden"], seen["before"])
            and torch.equal(logits.float(), seen["after"].float())):
        raise ValueError(f"{type(model).__name__} is not supported: it transforms its hidden "
                         "states before the head or its logits after it (softcapping, scaling), or "
                         "they are not finite")
    expected = F.linear(seen["before"], head.weight, getattr(head, "bias", None)).float()
    if (not {name for name, _ in head.named_parameters()} <= {"weight", "bias"}
            or (seen["after"].float() - expected).abs().max() > 0.02 * expected.abs().max()):
        raise ValueError("the model's head is not a plain linear layer, but has an adapter or a "
                         "hook: merge the adapter into it, or remove the hook")
