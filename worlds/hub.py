"""Finds a model before transformers looks for it, because that asks an unreachable hub for a
minute. It is not needed to understand SAPO."""
import functools
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from machine.runs import read_json


OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google",
          "Mistral": "mistralai"}


def hub_id(name):
    """Qwen2.5-1.5B-Instruct -> Qwen/Qwen2.5-1.5B-Instruct; a folder or full id stays as it is."""
    owners = [owner for family, owner in OWNERS.items() if name.startswith(family)]
    return name if "/" in name or Path(name).is_dir() or not owners else f"{owners[0]}/{name}"


@functools.cache
def locate(name):
    """-> the folder or hub id that a name means. ValueError where it is a folder without a model,
    or where the hub does not answer and the cache has none. Nothing else is then asked of the hub.
    """
    where = hub_id(name)
    if Path(name).exists():
        config = read_json(f"{name}/config.json") if Path(name).is_dir() else {}
        weights = [path for path in (Path(name, "final"), Path(name, "best")) if path.is_dir()]
        if "model_type" not in config:
            raise ValueError(f"cannot load model {name}: " + (
                f"it is a run; its weights are in {weights[0]}" if weights else
                f"{name}/config.json has no model_type" if config else "it has no config.json"))
    elif name.startswith(("/", ".", "~")):
        raise ValueError(f"cannot load model {name}: there is no such folder")
    elif not hub_answers():
        constants.HF_HUB_OFFLINE = True
        if not isinstance(try_to_load_from_cache(where, "config.json"), str):
            raise ValueError(
                f"cannot load model {name}: it is no folder here, {where} is not in the cache, and "
                f"{constants.ENDPOINT} does not answer. Download it elsewhere (hf download {where})"
                " and give its folder, or set HF_ENDPOINT to a mirror and unset HF_HUB_OFFLINE")
    return where


def hub_answers():
    try:
        return not constants.HF_HUB_OFFLINE and bool(
            get_session().head(constants.ENDPOINT, timeout=5))
    except Exception:  # whatever the network does
        return False
