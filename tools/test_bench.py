"""Tests of tools/bench.py: what it counts and prints, not how long things take."""
import re

import pytest
import torch

import train
from model import load
from runtime.testing import check_run, on_the_cpu, random_lm, run_main
from tools import bench


def test_flops_match_a_count_by_hand():
    lm = random_lm("qwen2", 1)
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


def test_folder_has_qwens_template_and_can_be_trained(monkeypatch, tmp_path):
    folder = tmp_path / "model"
    run_main(bench, monkeypatch, "folder", folder, "--model", "Qwen2.5-small")
    with pytest.raises(SystemExit, match="exists already"):
        run_main(bench, monkeypatch, "folder", folder)
    lm = load(str(folder))
    text = lm.tokenizer.decode(lm.chat.encode_user_turn("go to desk 1"))
    assert re.fullmatch(r"<\|im_start\|> system You are Qwen .*<\|im_end\|> <\|im_start\|> user "
                        r"go to desk 1 <\|im_end\|> <\|im_start\|> assistant", text)
    assert lm.stop_ids == (lm.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    run_main(train, monkeypatch, "--model", folder, "--out", tmp_path / "run", "--iterations", 1,
             "--batch_size", 2, "--horizon", 2, "--max_new_tokens", 4, "--eval_games", 2)
    assert check_run(tmp_path / "run", 1)[0]["grad_norm"] > 0


def flash_attention(query, key, value, first_q, first_k, max_q, max_k, dropout, causal, *args,
                    scale=None, seqused_k=None, **kwargs):
    """What torch.ops.aten._flash_attention_forward computes on a GPU."""
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[2] ** -0.5
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], float("inf"))
    for start, end, first, used in zip(first_q, first_q[1:], first_k, seqused_k):
        if used:
            keys, values = (x[first:first + used].float().repeat_interleave(groups, 1)
                            .transpose(0, 1) for x in (key, value))
            scores = scale * query[start:end].float().transpose(0, 1) @ keys.mT
            if causal:
                allowed = torch.ones(scores.shape[1:]).tril(int(used - (end - start)))
                scores = scores.masked_fill(allowed == 0, float("-inf"))
            lse[:, start:end] = scores.logsumexp(-1)
            out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_all_ways_of_attention_agree(monkeypatch, capsys, on_a_gpu):
    """Lengths beyond one piece, of which each row has another; with what a GPU has, all of it."""
    if on_a_gpu:
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
    run_main(bench, monkeypatch, "attention", "--model", "Qwen2.5-small", "--cached", 50, "--new",
             8, "--length", 200, "--repeats", 1)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("prefill: 4 rows", "decoding: ")) for line in lines) == 5
    found = [line.split(maxsplit=1) for line in lines if line.startswith("    ")]
    decoding = ["by_sdpa", "in_pieces", "by_flash", "by_varlen_attn"]
    assert [name for name, _ in found] == ["by_sdpa", "by_flash", "by_varlen_attn", *4 * decoding]
    errors = [float(result.split()[-1]) for name, result in found if on_a_gpu or name == "by_sdpa"]
    assert 0 < min(errors) and max(errors) < 0.02
    assert on_a_gpu or all(result == "not on this device"
                           for name, result in found if name != "by_sdpa")
