"""Tests of the measurements: what they count, print and refuse. How long things take is a matter of
the machine and is not tested."""
import dataclasses
import json
import os
import re
import sys
import types

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nothing waits for a network

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import envs
import train
from model import actor_critic
from rollout import Sampler
from tools import bench
from worlds.tiny import tiny_tokenizer


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
    tokenizer = tiny_tokenizer(*envs.words())
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer) + 2, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        max_position_embeddings=4096, initializer_range=0.3)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return actor_critic(model, tokenizer, tau_v=20.0)


def test_the_least_time_is_counted_by_hand():
    lm = small_model()
    rows = Sampler(lm).rows
    responses = [types.SimpleNamespace(ids=[1] * 3), types.SimpleNamespace(ids=[1])]
    mlp, norms, biases = 3 * 32 * 64, 2 * 32, 64
    layer = 2 * 32 * 32 + 2 * 32 * 16 + biases + mlp + norms  # q and o, k and v
    body, head = 2 * layer + 32, 32 * lm.model.config.vocab_size
    assert bench.sizes(lm) == (body, head)
    prefill, decode = bench.least_time(lm, rows, 3, [[1] * 10, [1] * 20], responses,
                                       bandwidth=1.0, peak=1.0)
    attention = 2 * (10 ** 2 + 20 ** 2) * 2 * 32  # half of 4 T^2 for each layer and unit of width
    assert prefill == 2 * body * 30 + attention
    assert decode == 4 * (3 * (body + head) + (11 + 12 + 13 + 21) * 2 * 2 * 16)


def test_known_sizes_need_no_download():
    for name, millions in (("Qwen2.5-0.5B-Instruct", 494.0), ("Qwen/Qwen2.5-1.5B", 1543.7),
                           ("Qwen2.5-3B", 3085.9), ("Qwen2.5-7B-Instruct", 7615.6)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(bench.architecture(name))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    with pytest.raises(ValueError, match="cannot load"):
        bench.random_model("nobody/nothing", torch.float32)


def test_random_weights_of_an_architecture(tmp_path):
    small_model().save(tmp_path)
    lm = bench.random_model(str(tmp_path), torch.bfloat16, seed=3)
    again = bench.random_model(str(tmp_path), torch.bfloat16, seed=3)
    assert lm.model.dtype == torch.bfloat16 and lm.head.weight.equal(again.head.weight)
    assert not lm.head.weight.equal(small_model().head.weight.bfloat16())


def test_what_a_gpu_cannot_hold_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda _: types.SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(bench, "random_model", None)
    flags = "--model Qwen2.5-7B --moments bfloat16 --checkpointing".split()
    with pytest.raises(SystemExit, match="needs 1.. GB and the GPU has 80"):
        run_main(bench, monkeypatch, "iteration", *flags)
    with pytest.raises(SystemExit, match="needs 2.. GB and the GPU has 80"):  # with the critic
        run_main(bench, monkeypatch, "iteration", "--ppo", *flags)


SMALL = ["--tasks", 3, "--turns", 2, "--prompt", 20, "--response", 5]


@pytest.mark.parametrize("context", ["window", "full"])
def test_an_iteration_prints_the_runtime_table(monkeypatch, capsys, context):
    run_main(bench, monkeypatch, "iteration", *SMALL, "--repeats", 1, "--context", context)
    said = capsys.readouterr().out
    for name in ("rollout", "old", "ref", "update", "after rollout"):
        assert re.search(rf"^{name} +[\d.]+ s", said, re.M)
    assert "3 trajectories of 2 turns" in said and "values" not in said


@pytest.mark.parametrize("context", ["window", "full"])
def test_the_update_is_compared_with_the_plain_ways(monkeypatch, capsys, context):
    run_main(bench, monkeypatch, "update", *SMALL, "--repeats", 1, "--context", context)
    sums = re.findall(r"times as fast; summed log-prob (\S+) and (\S+)$", capsys.readouterr().out,
                      re.M)
    assert len(sums) == 2  # two ways of computing the same
    assert all(float(a) == pytest.approx(float(b), rel=1e-4) for a, b in sums)


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


def test_the_phases_of_benches_are_drawn(tmp_path):
    seconds = {algo: dict.fromkeys(bench.PHASES, 1.0) for algo in ("sapo", "ppo")}
    report = {"model": "tiny", "context": "full", "old": "rollout", "versions": {"device": "x"},
              "seconds": seconds}
    bench.plot_phases([report], tmp_path / "phases.png")
    assert (tmp_path / "phases.png").stat().st_size > 5000


def test_rivals_share_what_is_not_the_critic(monkeypatch):
    config = train.parse_config(["--tasks", "2"])
    learners = bench.learners_for(bench.random_model("tiny", torch.float32), config, ppo=True)
    assert learners["ppo"].optimizers[""] is learners["sapo"].optimizers[""]
    assert learners["ppo"].reference is learners["sapo"].reference
    assert isinstance(learners["ppo"], train.PPO) and not hasattr(learners["sapo"], "critic")


@pytest.mark.parametrize("context", ["window", "full"])
def test_invented_trajectories_have_the_sizes_asked_for(context):
    config = train.parse_config(["--tasks", "4", "--max_new", "12", "--context", context])
    sampler = bench.talker(bench.random_model("tiny", torch.float32), config, 3)
    args = types.SimpleNamespace(turns=3, prompt=20)
    turns = bench.invent(sampler, config, args)
    assert [(t.traj, t.turn) for t in turns] == [(i, n) for i in range(4) for n in range(3)]
    assert [t.done for t in turns] == [False, False, True] * 4
    assert [t.reward for t in turns if t.done] == [0.0, 10.0, 0.0, 10.0]
    longer = [t for t in turns if context == "full" and t.turn > 0]
    assert all(len(t.prompt_ids) == 4 for t in longer)
    assert all(10 <= len(t.prompt_ids) <= 30 for t in turns if t not in longer)
    assert all(1 <= len(t.action_ids) == len(t.logp) <= 12 for t in turns)


def test_the_hosts_work_is_that_of_whole_games(monkeypatch, capsys):
    run_main(bench, monkeypatch, "host", "--rows", 3, "--steps", 4, "--repeats", 1)
    found = re.search(r"3 games of house, 12 turns, (\d+) tokens encoded and (\d+) sampled",
                      capsys.readouterr().out)
    assert int(found[1]) > 20 and 60 <= int(found[2]) <= 140


def test_both_engines_say_the_same_in_a_race_and_in_games(monkeypatch, capsys):
    run_main(bench, monkeypatch, "sampler", "--rows", 3, "--prompt", 20, "--new", 9, "--repeats", 1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()
            if line[:2] in ("hf", "kv")]
    assert [row[-1] for row in rows] == ["100%"] * 2 and rows[0][2] == "1.00"
    hf, kv = (float(row[1]) for row in rows)  # tokens a second, in whole tokens
    assert rows[0][3] == "1.00" and float(rows[1][3]) > float(rows[1][2])  # hf has a pass more
    assert (kv - 0.5) / (hf + 0.5) - 0.01 <= float(rows[1][2]) <= (kv + 0.5) / (hf - 0.5) + 0.01
    run_main(bench, monkeypatch, "games", "--rows", 3, "--new", 9)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()
            if line[:2] in ("hf", "kv")]
    assert [row[-1] for row in rows] == ["100%"] * 4


def test_hf_is_not_charged_for_the_pass_that_reads_values(monkeypatch):
    seconds, lm = [0.0], small_model()
    monkeypatch.setattr(bench, "now", lambda: seconds[0])
    score = lm.score

    def slow(batch):
        seconds[0] += 5.0
        return score(batch)

    lm = dataclasses.replace(lm)
    lm.score = bench.Timed(slow)
    run = bench.measure(Sampler(lm, "hf", max_new=2), [[1, 2, 3], [4, 5]],
                        np.full((2, 2), 0.5, dtype=np.float32))
    assert lm.score.seconds == seconds[0] == run.scoring >= 5.0 and run.seconds == 0.0
    assert run.sampled == sum(len(response.ids) for response in run.responses) > 0


def test_an_environment_is_measured(monkeypatch, capsys):
    run_main(bench, monkeypatch, "envs", "--workers", 1, "--steps", 5)
    said = capsys.readouterr().out
    assert "128 games, 640 turns" in said and re.search(r"^ours +[\d.]+ +[\d.]+ +\d+$", said, re.M)


def test_alone_it_names_every_measurement(monkeypatch, capsys):
    run_main(bench, monkeypatch)
    said = capsys.readouterr().out
    assert all(f"tools/bench.py {name} " in said for name in bench.COMMANDS)


@pytest.mark.parametrize("argv, complaint", [
    (["sampler", "--rows", 0], "--rows: must be at least 1"), (["races"], "known: sampler, games"),
    (["games", "--env", "attic"], "known: house"), (["plot", "nowhere"], "nowhere"),
    (["sampler", "--model", "nothing"], "cannot load"), (["sampler", "--prompt", 20000],
     "exceed the model's 16384 tokens"),
    (["sampler", "--colour", "red"], "--colour"), (["envs", "--steps", 0], "--steps: must be at"),
    (["update", "--response", 10 ** 6], "words of this model"),
    (["iteration", "--prompt", 9000], "raise --max_prompt")])
def test_impossible_measurements_get_one_line(monkeypatch, argv, complaint):
    with pytest.raises(SystemExit) as stop:
        run_main(bench, monkeypatch, *argv)
    assert complaint in str(stop.value) and "\n" not in str(stop.value)


def test_ctrl_c_leaves_one_line(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench_env", interrupt)
    with pytest.raises(SystemExit, match="^\ninterrupted$"):
        run_main(bench, monkeypatch, "envs")
