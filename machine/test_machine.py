"""Tests of machine/cli.py and machine/ranks.py."""
import contextlib
import json
import time
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from machine import cli, ranks, runs


def steps_of(optimizer, p, gradients):
    for g in gradients:
        p.grad = g.to(p.dtype)
        optimizer.step()
    return p.detach().clone()


def test_adamw_is_adamw():
    torch.manual_seed(0)
    start = torch.randn(50)
    gradients = [torch.randn(50) * 10 ** torch.randn(50) for _ in range(20)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    a = steps_of(ranks.AdamW([ours], lr=1e-2, weight_decay=0.1), ours, gradients)
    b = steps_of(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1), theirs, gradients)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_slices_is_a_step(monkeypatch, dtype):
    torch.manual_seed(0)
    start = torch.randn(7, 5, dtype=dtype)
    gradients, ends = [torch.randn(7, 5) for _ in range(4)], []
    for size in (10 ** 9, 8):
        monkeypatch.setattr(ranks, "SLICE", size)
        p = torch.nn.Parameter(start.clone())
        ends.append(steps_of(ranks.AdamW([p], lr=1e-2), p, gradients))
    assert ends[0].equal(ends[1]) and not ends[0].equal(start)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_masters_learn_at_a_rate_at_which_sixteen_bits_stand_still(moments):
    torch.manual_seed(0)
    start, gradients = torch.randn(2000).bfloat16(), [torch.randn(2000) + 1 for _ in range(300)]
    alone, ours = (torch.nn.Parameter(start.clone()) for _ in range(2))
    stood = steps_of(torch.optim.AdamW([alone], lr=1e-6, weight_decay=0), alone, gradients) == start
    assert stood[start.abs() > 0.05].all()
    optimizer = ranks.AdamW([ours], lr=1e-6, weight_decay=0, moments=moments)
    steps_of(optimizer, ours, gradients)
    state, exact = optimizer.state[ours], torch.nn.Parameter(start.float())
    steps_of(torch.optim.AdamW([exact], lr=1e-6, weight_decay=0), exact,
             [g.bfloat16().float() for g in gradients])
    assert state["m"].dtype == moments and torch.equal(ours, state["master"].bfloat16())
    moved, wanted = state["master"] - start.float(), exact.detach() - start.float()
    if moments == torch.float32:
        torch.testing.assert_close(moved, wanted, atol=1e-7, rtol=1e-3)
    else:  # rounded at random it is right on average; to the nearest, v would stop far too low
        assert moved.mean().item() == pytest.approx(wanted.mean().item(), rel=0.01)
        assert ((moved - wanted).norm() / wanted.norm()) < 0.05
    assert wanted.abs().mean() > 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_keep_shares_of_one_size(monkeypatch, ranks):
    """Qwen2.5-1.5B's shapes repeat every twelve tensors, so every n-th one would be uneven."""
    layer = [1536 ** 2, 1536, 256 * 1536, 256, 256 * 1536, 256, 1536 ** 2, *[8960 * 1536] * 3]
    sizes = [151936 * 1536, *(layer + [1536] * 2) * 28, 1536]
    monkeypatch.setattr(ranks, "world", lambda: ranks)
    owner, most = ranks.shares_of_ranks(sizes)
    kept = [sum(n for n, its in zip(sizes, owner) if its == r) for r in range(ranks)]
    assert len(owner) == len(sizes) and sum(kept) == sum(sizes) and max(kept) == most
    assert most < max(1.02 * sum(sizes) / ranks, 1.0001 * sizes[0])
    if ranks in (2, 4):
        assert max(sum(sizes[r::ranks]) for r in range(ranks)) > 1.2 * most


def test_checkpoints_take_a_twentieth_of_the_time(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(cli.time, "time", lambda: now[0])
    clock, saved = runs.Clock(), []
    for n in range(100):  # an iteration takes 10 seconds, a checkpoint 15
        now[0] += 10
        due = clock.save_is_due()
        clock.start()
        if due:
            saved.append(n)
            now[0] += 15
            clock.saved()
    assert saved == [0, *range(31, 100, 31)]
    assert clock.seconds()["time_total"] in (0, 15)


def test_torchruns_last_words_quote_the_error(tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(SystemExit, match="train.py: no such thing"):
        with cli.one_line_errors("train.py"):
            raise ValueError("no such thing")
    assert json.loads(report.read_text())["message"]["message"] == "train.py: no such thing"


@pytest.mark.parametrize("backend, left", [("gloo", 3), ("nccl", 1)])
def test_a_rank_that_fails_does_not_wait_for_the_others(monkeypatch, backend, left):
    """NCCL's way of leaving waits for all ranks, of which the others wait in a collective."""
    leaving = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: leaving.append(backend))
    for error in (None, ValueError("a game fails"), KeyboardInterrupt()):
        with contextlib.suppress(SystemExit), cli.one_line_errors("train.py"):
            if error:
                raise error
    assert len(leaving) == left


def test_settings_of_another_type_are_refused_by_name():
    kinds = {"lr": cli.Positive, "seed": cli.Count, "env": str, "resume": bool,
             "context": Literal["window", "full"], "value_tokens": tuple}
    good = {"lr": 0.1, "seed": 3, "env": "house", "resume": False, "context": "full",
            "value_tokens": ["a", "b"], "unknown": 1}
    assert cli.typed(kinds, good | {"seed": None}, "x") == {
        k: v for k, v in (good | {"seed": None}).items() if k in kinds}
    for name, value in (("lr", "fast"), ("lr", -1), ("seed", 1.5), ("env", 3), ("resume", "no"),
                        ("context", "half"), ("value_tokens", ["a"]), ("value_tokens", 3)):
        with pytest.raises(ValueError, match=f"config.json: {name} cannot be"):
            cli.typed(kinds, good | {name: value}, "config.json")


def test_long_work_says_that_it_goes_on(monkeypatch, capsys):
    """Ten seconds after the last word, and not before."""
    now, said, clock = [100.0], "", time.monotonic
    monkeypatch.setattr(cli.time, "time", lambda: now[0])
    with cli.alive(lambda: "games: 3 of 9") as heard:
        now[0] += 8
        heard()
        now[0] += 8
        time.sleep(1.2)  # it looks twice a second
        assert not capsys.readouterr().err
        now[0] += 2
        until = clock() + 30
        while "games" not in said and clock() < until:
            time.sleep(0.05)
            said += capsys.readouterr().err
    assert said == "games: 3 of 9 (18 s)\n"
