"""Tests of worlds/machine.py."""
import pytest
import torch

from worlds import machine


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
    a = steps_of(machine.AdamW([ours], lr=1e-2, weight_decay=0.1), ours, gradients)
    b = steps_of(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1), theirs, gradients)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_slices_is_a_step(monkeypatch, dtype):
    torch.manual_seed(0)
    start = torch.randn(7, 5, dtype=dtype)
    gradients, ends = [torch.randn(7, 5) for _ in range(4)], []
    for size in (10 ** 9, 8):
        monkeypatch.setattr(machine, "SLICE", size)
        p = torch.nn.Parameter(start.clone())
        ends.append(steps_of(machine.AdamW([p], lr=1e-2), p, gradients))
    assert ends[0].equal(ends[1]) and not ends[0].equal(start)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_masters_learn_at_a_rate_at_which_sixteen_bits_stand_still(moments):
    torch.manual_seed(0)
    start, gradients = torch.randn(2000).bfloat16(), [torch.randn(2000) + 1 for _ in range(300)]
    alone, ours = (torch.nn.Parameter(start.clone()) for _ in range(2))
    stood = steps_of(torch.optim.AdamW([alone], lr=1e-6, weight_decay=0), alone, gradients) == start
    assert stood[start.abs() > 0.05].all()
    optimizer = machine.AdamW([ours], lr=1e-6, weight_decay=0, moments=moments)
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


def test_checkpoints_take_a_twentieth_of_the_time(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(machine.time, "time", lambda: now[0])
    clock, saved = machine.Clock(), []
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
