"""Tests of worlds/hub.py and of loading: what is wrong with a model is said in one line."""
import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from model import load
from worlds import hub
from machine.runs import ROOT


def weights(change):
    """A damage to a model's weights: {name: tensor} -> the same, changed."""
    def spoil(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})
    return spoil


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def config(**changes):
    def spoil(folder):
        found = json.loads((folder / "config.json").read_text()) | changes
        found = {k: v for k, v in found.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(found))
    return spoil


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def nan(found):
    return {k: x * float("nan") if "mlp" in k else x for k, x in found.items()}


@pytest.mark.parametrize("spoil, why", [
    (weights(nan), "logits are not finite"),
    (weights(lambda found: {k: x for k, x in found.items() if ".layers.1." not in k}),
     "lack 12 tensors, such as model.layers.1"),
    (cut, "header"), (text("model.safetensors", ""), "header"),
    (config(vocab_size=500), "cannot load"), (config(model_type=None), "no model_type"),
    (config(hidden_size="many"), "hidden_size"), (text("config.json", "[1]"), "holds a list"),
    (text("config.json", "{"), "config.json is damaged"),
    (text("chat_template.jinja", "{% for x in %}"), "chat template fails"),
    (text("chat_template.jinja", "hello"), "chat template that keeps"),
    (text("tokenizer.json", "{"), "cannot load"), (text("sapo.json", "{"), "cannot load"),
    (text("sapo.json", "[1]"), "cannot load"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "cannot load"),
    (lambda folder: (folder / "model.safetensors").unlink(), "cannot load")])
def test_a_damaged_model_is_refused_by_name(tmp_path, spoil, why):
    folder = tmp_path / "model"
    shutil.copytree(f"{ROOT}/results/tiny-house", folder)
    load(str(folder))
    spoil(folder)
    hub.locate.cache_clear()
    with pytest.raises(ValueError, match=why) as error:
        load(str(folder))
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_more_words_than_rows_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(f"{ROOT}/results/tiny-house", folder)
    config(vocab_size=500)(folder)
    weights(lambda found: {k: x[:500].clone() if len(x) > 500 else x
                           for k, x in found.items()})(folder)
    with pytest.raises(ValueError, match="more words than the model has rows, 500"):
        load(str(folder))


def test_a_run_is_no_model_and_its_weights_are_named(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "config.json").write_text('{"env": "house"}')
    with pytest.raises(ValueError, match=f"it is a run; its weights are in {tmp_path}/final"):
        hub.locate(str(tmp_path))


def test_without_a_network_a_name_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("Qwen2.5-1.5B-Instruct", "nobody/nothing-here"):
        hub.locate.cache_clear()
        with pytest.raises(ValueError, match=f"{hub.hub_id(name)} is not in the cache.*HF_END"):
            load(name)
    assert hub.constants.HF_HUB_OFFLINE


def test_a_trained_model_on_the_hub_is_read_as_it_was_trained(tmp_path):
    """By a process that knows the hub's cache alone: its tokenizer, its two words and tau_v."""
    cached = tmp_path / "hub" / "models--me--run"
    folder = cached / "snapshots" / ("0" * 40)
    shutil.copytree(f"{ROOT}/results/tiny-house", folder)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    (folder / "sapo.json").write_text('{"value_ids": [3, 4], "tau_v": 0.25, "r_max": 5.0}')
    code = ("from model import load; lm = load('me/run'); "
            "print(lm.chat.first('take mug 1'), lm.value_ids, lm.tau_v, lm.r_max)")
    offline = dict(os.environ, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=offline, text=True,
                          capture_output=True, check=True).stdout
    ids = load(f"{ROOT}/results/tiny-house").chat.first("take mug 1")
    assert told.split("\n")[-2] == f"{ids} (3, 4) 0.25 5.0"
