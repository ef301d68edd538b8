"""Tests of worlds/machine.py."""
import contextlib
import json
import os
import re
import shutil
import signal
import types

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


class Kill(BaseException):
    pass


def mortal(call, left):
    """The function, which raises Kill at the touch of the disk that `left` counts down to. A folder
    that is being removed is torn by it."""
    def touch(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            if call.__name__ == "rmtree" and os.path.isdir(args[0]):
                os.remove(os.path.join(args[0], min(os.listdir(args[0]))))
            raise Kill
        return call(*args, **kwargs)
    return touch


TOUCHES = [(os, "rename"), (os, "replace"), (os, "makedirs"), (shutil, "rmtree"), (torch, "save")]


def write_both(folder, text):
    for name in "ab":
        machine.write_file(os.path.join(folder, name), text)


def checkpoints(run):
    """{iterations done: folder} of what bears a checkpoint's name in a run."""
    named = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.iterdir()}
    return {int(match[1]): path for path, match in named.items() if match}


def test_a_kill_at_any_touch_of_the_disk_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """A kill is played by an error at the n-th touch of the disk. What bears a checkpoint's name is
    then the new one or the one before, and both are whole."""
    out = tmp_path / "run"

    def save(done):
        lm = types.SimpleNamespace(save=lambda folder: write_both(folder, str(done)))
        p = torch.nn.Parameter(torch.ones(1))
        optimizer = machine.AdamW([p], lr=0.1)
        steps_of(optimizer, p, [torch.ones(1)] * done)
        machine.save_checkpoint(types.SimpleNamespace(lm=lm, optimizers={"": optimizer},
                                                      steps=done, failed=0), out, done)

    left, n = [0], 0
    while left[0] <= 0:
        n, left = n + 1, [n + 1]
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        save(1)
        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for where, name in TOUCHES:
                patch.setattr(where, name, mortal(getattr(where, name), left))
            save(2)
        found = checkpoints(out)
        newest = found[max(found)]
        assert max(found) in (1, 2)
        assert {(newest / name).read_text() for name in "ab"} == {str(max(found))}
        assert json.loads((newest / "progress.json").read_text())["steps"] == max(found)
        assert torch.load(newest / "optimizer-0.pt")[0][0]["step"] == max(found)
        assert machine.iterations_in(newest) == max(found)
        save(3)  # nothing that was left behind stays
        assert os.listdir(out) == ["checkpoint-3"]
    assert n > 8  # there were so many moments


def test_a_kill_at_any_touch_of_the_disk_leaves_no_torn_folder(tmp_path, monkeypatch):
    """A folder that is written anew, as final/ by a resumed run, is the old one, the new one or,
    for a moment, not there."""
    path, left, n = tmp_path / "final", [0], 0
    while left[0] <= 0:
        n, left = n + 1, [n + 1]
        machine.write_folder(str(path), lambda folder: write_both(folder, "old"))
        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for where, name in TOUCHES:
                patch.setattr(where, name, mortal(getattr(where, name), left))
            machine.write_folder(str(path), lambda folder: write_both(folder, "new"))
        if path.is_dir():
            texts = [(path / name).read_text() for name in "ab"]
            assert texts in (["old"] * 2, ["new"] * 2)
        machine.write_folder(str(path), lambda folder: write_both(folder, "newer"))
        assert os.listdir(tmp_path) == ["final"] and (path / "b").read_text() == "newer"
    assert n > 4


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    machine.write_file(str(path), "old")
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(os, "replace", mortal(os.replace, [1]))
        machine.write_file(str(path), "new")
    assert path.read_text() == "old"


def test_a_signal_waits_and_a_later_one_does_not(monkeypatch, capsys):
    now, before = [100.0], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(machine.time, "time", lambda: now[0])
    with machine.signals_noted() as noted:
        assert not noted
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.5  # torchrun passes it on
        os.kill(os.getpid(), signal.SIGINT)
        assert noted and capsys.readouterr().err.count("leaves after this iteration") == 1
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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


def test_what_a_run_ended_with_goes_only_where_a_checkpoint_has_its_weights(tmp_path):
    out, kept = tmp_path / "run", []
    for checkpoint in (None, out / "checkpoint-2"):
        (out / "final").mkdir(parents=True, exist_ok=True)
        for name in ("eval.json", "eval.jsonl", "metrics.jsonl"):
            (out / name).write_text("1\n2\n3\n")
        machine.begin_folder(str(out), {"resume": True}, checkpoint)
        kept.append([(out / name).exists() for name in ("final", "eval.json", "eval.jsonl")])
    assert kept == [[True] * 3, [False] * 3]
    assert (out / "metrics.jsonl").read_text() == "1\n2\n"
