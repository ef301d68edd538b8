"""Tests of the measurements: what they count, print and refuse. How long things take is a matter of
the machine and is not tested."""
import json
import os
import re
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nothing waits for a network

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import train
from model import actor_critic
from tools import bench
from tools.imitate import tiny_tokenizer, words


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Hides a GPU from this process and from those it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_main(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
    module.main()


def small_model():
    """2 layers of width 32 with 4 heads of 8, 2 of them for K and V, behind the tiny tokenizer."""
    tokenizer = tiny_tokenizer(*words())
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer) + 2, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        max_position_embeddings=4096, initializer_range=0.3)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return actor_critic(model, tokenizer, tau_v=20.0)


def test_operations_are_counted_by_hand():
    lm = small_model()
    mlp, norms, biases = 3 * 32 * 64, 2 * 32, 64
    layer = 2 * 32 * 32 + 2 * 32 * 16 + biases + mlp + norms  # q and o, k and v
    body, head = 2 * layer + 32, 32 * lm.model.config.vocab_size
    assert bench.sizes(lm) == (body, head)
    attention = 2 * (10 ** 2 + 20 ** 2) * 2 * 32  # half of 4 T^2 for each layer and unit of width
    assert bench.operations(lm, 30, 0, 500) == 2 * body * 30 + attention
    config = train.parse_config(["--dtype", "bfloat16", "--moments", "bfloat16"])
    needed = bench.memory_needed(lm.model.config, config, critic=True)
    weights = 2 * sum(p.numel() for p in lm.model.parameters())
    assert needed["weights"] == needed["gradients"] == needed["reference"] == weights
    assert needed["master weights"] == needed["moments"] == 2 * weights
    assert needed["critic"] == 6 * weights


def test_known_sizes_need_no_download():
    for name, millions in (("Qwen2.5-0.5B-Instruct", 494.0), ("Qwen/Qwen2.5-1.5B", 1543.7),
                           ("Qwen2.5-3B", 3085.9), ("Qwen2.5-7B-Instruct", 7615.6)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(bench.architecture(name))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    with pytest.raises(ValueError, match="cannot load"):
        bench.random_model("nobody/nothing", torch.float32)


SMALL = ["--tasks", 3, "--turns", 2, "--prompt", 20, "--response", 5]


@pytest.mark.parametrize("context", ["window", "full"])
def test_an_iteration_prints_the_runtime_table(monkeypatch, capsys, context):
    run_main(bench, monkeypatch, "iteration", *SMALL, "--repeats", 1, "--context", context)
    said = capsys.readouterr().out
    for name in ("rollout", "old", "ref", "update", "after rollout"):
        assert re.search(rf"^{name} +[\d.]+ s", said, re.M)
    assert "3 trajectories of 2 turns" in said and "values" not in said


def test_ppo_beside_sapo(monkeypatch, capsys, tmp_path):
    run_main(bench, monkeypatch, "iteration", "--ppo", *SMALL, "--repeats", 2, "--out", tmp_path)
    said = capsys.readouterr().out
    seconds = json.loads((tmp_path / "bench.json").read_text())["seconds"]
    after = {algo: sum(times.values()) - times["rollout"] for algo, times in seconds.items()}
    printed = re.search(r"^after rollout +[\d.]+ s +[\d.]+ s +sapo / ppo ([\d.]+)$", said, re.M)
    assert float(printed[1]) == pytest.approx(after["sapo"] / after["ppo"], abs=5e-4)
    assert seconds["sapo"]["rollout"] == seconds["ppo"]["rollout"]
    passes = {algo: sum(bench.PHASES[phase] for phase, spent in times.items() if spent)
              for algo, times in seconds.items()}
    assert passes == {"sapo": 5, "ppo": 9}
    kept = re.search(r"keeps, computed: sapo .* GB, ppo .* GB   sapo / ppo ([\d.]+);", said)
    assert float(kept[1]) == pytest.approx(5 / 9, abs=2e-3)  # weights, gradients, moments, ...
    run_main(bench, monkeypatch, "plot", tmp_path, tmp_path, "--out", tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 5000


def test_both_engines_say_the_same_and_hf_has_a_pass_more(monkeypatch, capsys):
    run_main(bench, monkeypatch, "sampler", "--rows", 3, "--prompt", 20, "--new", 9, "--repeats", 1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()
            if line[:2] in ("hf", "kv")]
    assert [row[-1] for row in rows] == ["100%"] * 2 and rows[0][2] == rows[0][3] == "1.00"
    assert float(rows[1][3]) > float(rows[1][2])


def test_an_environment_is_measured(monkeypatch, capsys):
    run_main(bench, monkeypatch, "envs", "--steps", 5)
    assert re.search(r"reset [\d.]+ ms, a step [\d.]+ ms, .* \d+ steps", capsys.readouterr().out)


@pytest.mark.parametrize("argv, complaint", [
    (["races"], "known: sampler, iteration"), (["envs", "--env", "attic"], "known: house"),
    (["sampler", "--model", "nothing"], "cannot load"), (["sampler", "--hue", "red"], "--hue"),
    (["iteration", "--response", 10 ** 6], "words of this model"),
    (["iteration", "--prompt", 9000], "raise --max_prompt")])
def test_impossible_measurements_get_one_line(monkeypatch, argv, complaint):
    with pytest.raises(SystemExit) as stop:
        run_main(bench, monkeypatch, *argv)
    assert complaint in str(stop.value) and "\n" not in str(stop.value)
