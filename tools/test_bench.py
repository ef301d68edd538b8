"""Tests of tools/bench.py: what it counts and prints, not how long things take."""
import re

import pytest
import torch

from test_sapo import on_the_cpu, random_model, run_main  # on_the_cpu is used automatically
from tools import bench


def test_flops_match_a_count_by_hand():
    lm = random_model("qwen2", 1)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 64 + 3 * 32 * 64 + 2 * 32  # q o, k v, biases, MLP, norms
    layers, head = 2 * layer + 32, 32 * lm.model.config.vocab_size
    attention = 2 * (10 ** 2 + 20 ** 2) * 2 * 32  # half of 4 T^2 for each layer and unit of width
    assert bench.flops(lm, 30, 7, 500) == 2 * layers * 30 + 2 * head * 7 + attention


@pytest.mark.parametrize("context", ["window", "full"])
def test_iteration_prints_the_phases_and_memory_of_sapo_and_ppo(monkeypatch, capsys, context):
    run_main(bench, monkeypatch, "iteration", "--ppo", "--batch_size", 3, "--turns", 2, "--prompt",
             20, "--response", 5, "--repeats", 1, "--context", context)
    output = capsys.readouterr().out
    assert f"tiny, float32, {context}: 3 trajectories of 2 turns" in output
    phases = re.findall(r"^(\w+) +([\d.]+) s +([\d.]+) s", output, re.M)
    assert [name for name, *_ in phases] == [*bench.PHASES]
    assert {name: sapo for name, sapo, _ in phases if name in ("values", "critic")} == {
        "values": "0.00", "critic": "0.00"}  # SAPO has none
    assert re.search(r"^after rollout .*sapo / ppo \d+\.\d+$", output, re.M)
    kept = re.search(r"throughout, computed: sapo .* GB, ppo .* GB   sapo / ppo ([\d.]+);", output)
    # weights, gradients and two moments of each trained model, and the reference; a critic has no
    # head of the policy's size
    lm = bench.random_model("tiny", torch.float32)
    head = lm.head.weight.numel() / sum(p.numel() for p in lm.model.parameters())
    assert float(kept[1]) == pytest.approx(5 / (9 - 4 * head), abs=1e-3)


def test_engines_sample_the_same_tokens_and_hf_needs_one_more_pass(monkeypatch, capsys):
    run_main(bench, monkeypatch, "sampler", "--rows", 3, "--prompt", 20, "--new", 9, "--repeats", 1)
    hf, kv = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert hf[-1] == kv[-1] == "100%" and hf[2] == hf[3] == "1.00" and float(kv[3]) > float(kv[2])
