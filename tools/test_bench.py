"""Tests of the measurements: what they count, print and refuse, not how long things take."""
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nothing waits for a network

import pytest
import torch

import train
from test_sapo import random_model, run_main
from tools import bench


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Hides a GPU from this process and from those it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_operations_are_counted_by_hand():
    lm = random_model("qwen2", 1)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 64 + 3 * 32 * 64 + 2 * 32  # q o, k v, biases, MLP, norms
    body, head = 2 * layer + 32, 32 * lm.model.config.vocab_size
    attention = 2 * (10 ** 2 + 20 ** 2) * 2 * 32  # half of 4 T^2 for each layer and unit of width
    assert bench.operations(lm, 30, 7, 500) == 2 * body * 30 + 2 * head * 7 + attention


@pytest.mark.parametrize("context", ["window", "full"])
def test_ppo_beside_sapo(monkeypatch, capsys, context):
    run_main(bench, monkeypatch, "iteration", "--ppo", "--tasks", 3, "--turns", 2, "--prompt", 20,
             "--response", 5, "--repeats", 1, "--context", context)
    said = capsys.readouterr().out
    assert f"tiny, float32, {context}: 3 trajectories of 2 turns" in said
    phases = re.findall(r"^(\w+) +([\d.]+) s +([\d.]+) s", said, re.M)
    assert [name for name, *_ in phases] == [*bench.PHASES]
    assert {name: sapo for name, sapo, _ in phases if name in ("values", "critic")} == {
        "values": "0.00", "critic": "0.00"}  # SAPO has none
    assert re.search(r"^after rollout .*sapo / ppo \d+\.\d+$", said, re.M)
    kept = re.search(r"keeps, computed: sapo .* GB, ppo .* GB   sapo / ppo ([\d.]+);", said)
    # Weights, gradients and two moments of each model that is trained, and the reference; a critic
    # has no use for the policy's head.
    lm = bench.random_model("tiny", torch.float32)
    head = lm.head.weight.numel() / sum(p.numel() for p in lm.model.parameters())
    assert float(kept[1]) == pytest.approx(5 / (9 - 4 * head), abs=1e-3)


def test_both_engines_say_the_same_and_hf_has_a_pass_more(monkeypatch, capsys):
    run_main(bench, monkeypatch, "sampler", "--rows", 3, "--prompt", 20, "--new", 9, "--repeats", 1)
    hf, kv = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert hf[-1] == kv[-1] == "100%" and hf[2] == hf[3] == "1.00" and float(kv[3]) > float(kv[2])


def test_the_flags_that_the_table_of_memory_names_are_flags_of_train(monkeypatch, capsys):
    run_main(bench, monkeypatch, "memory")
    _, phases, cards = (table.splitlines() for table in capsys.readouterr().out.split("\n\n"))
    half, *_ = (line.split(" | ") for line in phases if line.startswith("| Qwen2.5-0.5B"))
    assert half[1:3] == ["1.0", "1.0"] and float(half[6]) > float(half[7].strip(" |")) > 8
    flags = {cell.strip() for line in cards[2:] for cell in line.strip("| ").split(" | ")[1:]}
    assert {"as it is", "–", "--checkpointing"} < flags
    for cell in flags - {"as it is", "–"}:
        train.parse_config(cell.split())
