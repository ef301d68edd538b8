"""Tests of machine/runs.py."""
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch

from machine import cli, ranks, runs
from machine.test_machine import steps_of


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


def test_a_file_is_written_by_one_process_and_nothing_is_lost(tmp_path, capsys):
    path = tmp_path / "some.jsonl.new"
    with runs.new_file(path) as first:
        print("one", file=first, flush=True)
        with pytest.raises(ValueError, match=f"another process writes {path}"):
            with runs.new_file(path):
                pass
        assert path.read_text() == "one\n" and len(os.listdir(tmp_path)) == 1
    with runs.new_file(path) as second:  # the first failed, and has left something
        print("two", file=second, flush=True)
    assert path.read_text() == "two\n" and "some.jsonl.new.1 now" in capsys.readouterr().out
    assert (tmp_path / "some.jsonl.new.1").read_text() == "one\n"


def write_both(folder, text):
    for name in "ab":
        runs.write_file(os.path.join(folder, name), text)


def checkpoints(run):
    """{iterations done: folder} of what bears a checkpoint's name in a run."""
    named = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.iterdir()}
    return {int(match[1]): path for path, match in named.items() if match}


def test_a_kill_at_any_touch_of_the_disk_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """A kill is played by an error at the n-th touch of the disk. What bears a checkpoint's name is
    then the new one or the one before, and both are whole."""
    out = tmp_path / "run"

    def save(done):
        lm = types.SimpleNamespace(model=torch.nn.Linear(1, 1),
                                   save=lambda folder: write_both(folder, str(done)))
        p = torch.nn.Parameter(torch.ones(1))
        optimizer = ranks.AdamW([p], lr=0.1)
        steps_of(optimizer, p, [torch.ones(1)] * done)
        runs.save_checkpoint(types.SimpleNamespace(lm=lm, optimizers={"": optimizer},
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
        assert runs.iterations_in(newest) == max(found)
        save(3)  # nothing that was left behind stays
        assert os.listdir(out) == ["checkpoint-3"]
    assert n > 8  # there were so many moments


def test_a_kill_at_any_touch_of_the_disk_leaves_no_torn_folder(tmp_path, monkeypatch):
    """A folder that is written anew, as final/ by a resumed run, is the old one, the new one or,
    for a moment, not there."""
    path, left, n = tmp_path / "final", [0], 0
    while left[0] <= 0:
        n, left = n + 1, [n + 1]
        runs.write_folder(str(path), lambda folder: write_both(folder, "old"))
        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for where, name in TOUCHES:
                patch.setattr(where, name, mortal(getattr(where, name), left))
            runs.write_folder(str(path), lambda folder: write_both(folder, "new"))
        if path.is_dir():
            texts = [(path / name).read_text() for name in "ab"]
            assert texts in (["old"] * 2, ["new"] * 2)
        runs.write_folder(str(path), lambda folder: write_both(folder, "newer"))
        assert os.listdir(tmp_path) == ["final"] and (path / "b").read_text() == "newer"
    assert n > 4


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    runs.write_file(str(path), "old")
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(os, "replace", mortal(os.replace, [1]))
        runs.write_file(str(path), "new")
    assert path.read_text() == "old"


def test_a_signal_waits_and_a_later_one_does_not(monkeypatch, capsys):
    now, before = [100.0], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(runs.time, "time", lambda: now[0])
    with runs.signals_noted() as noted:
        assert not noted
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.5  # torchrun passes it on
        os.kill(os.getpid(), signal.SIGINT)
        assert noted and capsys.readouterr().err.count("leaves after this iteration") == 1
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


SETTINGS = {"resume": True, "save_every": None, "algo": "sapo", "seed": 0, "env": "house",
            "model": "tiny"}


def begin(out, checkpoint=None, **settings):
    with contextlib.ExitStack() as held:
        runs.claim(str(out), held)
        runs.begin_folder(str(out), SETTINGS | settings, held, checkpoint)


def files(folder):
    """{path: bytes} of all that a folder holds, but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def begun(out, done=2, save_every=None):
    """A run of so many iterations, with a checkpoint -> its checkpoint."""
    begin(out, resume=False, save_every=save_every)
    (out / "before.json").write_text('{"0.4": []}')
    (out / "metrics.jsonl").write_text("".join(f'{{"iteration": {n}}}\n' for n in range(done)))
    lm = types.SimpleNamespace(model=torch.nn.Linear(1, 1),
                               save=lambda folder: write_both(folder, "weights"))
    runs.save_checkpoint(types.SimpleNamespace(lm=lm, optimizers={}, steps=9, failed=0), out, done)
    return runs.newest_checkpoint(out)


def test_a_resumed_run_keeps_the_lines_that_its_checkpoint_knows(tmp_path):
    out = tmp_path / "run"
    checkpoint = begun(out)
    for name in ("final", "best"):
        (out / name).mkdir()
    (out / "eval.json").write_text("{}")
    with open(out / "metrics.jsonl", "a") as log:
        log.write('{"iteration": 2}\n{"iter')
    begin(out, checkpoint)
    assert (out / "metrics.jsonl").read_text() == '{"iteration": 0}\n{"iteration": 1}\n'
    left = {path.name for path in out.iterdir()}
    assert left == {"metrics.jsonl", "config.json", "before.json", "checkpoint-2", "best", ".lock"}


def test_a_changed_byte_of_a_run_is_refused_by_name_and_nothing_is_touched(tmp_path):
    out = tmp_path / "run"
    checkpoint, refused = begun(out), 0
    whole = files(out)
    rng = random.Random(0)
    for name, text in whole.items():
        if name.endswith(runs.CHECKSUMS):  # it is the judge of the others
            continue
        for change in ("flip", "append", "cut", "remove"):
            path, n = out / name, rng.randrange(len(text))
            changed = {"flip": text[:n] + bytes([text[n] ^ 1]) + text[n + 1:],
                       "append": text + b"!", "cut": text[:n]}
            path.write_bytes(changed[change]) if change != "remove" else path.unlink()
            then = files(out)
            harmless = change == "append" and name == "metrics.jsonl"  # a line that was being added
            if name == "before.json" and change == "remove":  # it is made again
                harmless = True
            if not harmless:
                with pytest.raises(ValueError, match=re.escape(str(path))):
                    runs.settings_of(out)
                    begin(out, checkpoint)
                assert files(out) == then
                refused += 1
            path.write_bytes(text)
    assert refused == 4 * (len(whole) - 1) - 2 and refused > 20
    begin(out, checkpoint)


def test_a_run_without_a_checkpoint_keeps_its_iterations(tmp_path):
    out = tmp_path / "run"
    shutil.rmtree(begun(out))
    then = files(out)
    with pytest.raises(ValueError, match="2 iterations, and their checkpoint in .* is gone"):
        begin(out)
    assert files(out) == then
    begin(out, resume=False)
    assert files(tmp_path / "run.1") == then and not (out / "metrics.jsonl").read_text()


@pytest.mark.parametrize("done, save_every", [(0, None), (1, None), (3, 3)])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, done, save_every):
    out = tmp_path / "run"
    shutil.rmtree(begun(out, done, save_every))
    then = files(out)
    begin(out, save_every=1)  # it was begun with another distance
    assert files(tmp_path / "run.1") == then and not (out / "metrics.jsonl").read_text()


@pytest.mark.parametrize("found", [{"config.json": '{"model_type": "qwen2"}', "final/w": "1"},
                                   {"notes.txt": "mine"}, {"metrics.jsonl": "{}", "x": "y"}])
def test_a_folder_that_is_no_run_stays_as_it_is(tmp_path, found):
    out = tmp_path / "mine"
    for name, text in found.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    then = files(out)
    with pytest.raises(ValueError, match="there is no run in .*another --out"):
        begin(out, resume=False)
    assert files(out) == then
    assert (out / ".lock").exists() == ({"config.json", "metrics.jsonl"} <= set(found))


HOLD = "from machine import runs\nwith runs.locked({!r}):\n    print(flush=True)\n    input()"


def test_a_folder_has_one_writer_and_a_dead_one_leaves_it_open(tmp_path):
    out = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD.format(str(out))], cwd=runs.ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    for resume in (False, True):
        with pytest.raises(ValueError, match=f"process {other.pid} on .* writes to"):
            begin(out, resume=resume)
    other.kill()
    other.wait()
    begin(out, resume=False)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    out = tmp_path / "run"
    checkpoint = begun(out)
    model = torch.nn.Linear(2, 2)
    model.weight.data[0, 0] = float("inf")
    lm = types.SimpleNamespace(model=model, save=None)
    with pytest.raises(ValueError, match=f"iteration 3: lower --lr; {checkpoint} is the last good"):
        runs.save_checkpoint(types.SimpleNamespace(lm=lm), out, 3)
    assert runs.newest_checkpoint(out) == checkpoint


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """torch says something else of it: "unexpected pos"."""
    def fill(folder):
        raise RuntimeError("unexpected pos 160384 vs 160276")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        runs.write_folder(f"{tmp_path}/final", fill)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="final, the disk is full"):
        runs.write_folder(f"{tmp_path}/final", fill)


def test_a_log_is_read_without_the_line_that_was_being_written(tmp_path):
    path, good = tmp_path / "metrics.jsonl", b'{"success": 0.5}\n'
    path.write_bytes(good * 2 + good[:7])
    assert runs.read_log(path) == [{"success": 0.5}] * 2
    for bad in (b"{\n", b"[1]\n", b'{"success": "many"}\n', b"\xff\n"):
        path.write_bytes(good + bad + good)
        with pytest.raises(ValueError, match="metrics.jsonl is damaged in line 2"):
            runs.read_log(path)


def test_a_runs_folder_is_named_by_what_is_unusual():
    usual = {"env": "house", "model": "tiny", "algo": "sapo", "seed": 0, "lr": 1e-3, "out": None,
             "iterations": 40, "context": "window"}
    for given, name in (({}, "house-tiny-0"), ({"context": "full"}, "house-tiny-context=full-0"),
                        ({"seed": 3, "lr": 1e-3, "iterations": 2}, "house-tiny-3"),
                        ({"model": "a/b c/", "algo": "ppo", "lr": 0.5}, "house-b_c-ppo-lr=0.5-0"),
                        ({"env": "mine:Room"}, "Room-tiny-0")):
        assert runs.name_of(given, usual, {"iterations", "out"}) == name


def test_a_claim_that_came_to_nothing_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError), runs.locked(tmp_path / "new"):
        raise ValueError("no such model")
    assert not (tmp_path / "new").exists()
    with runs.locked(tmp_path / "kept"):
        (tmp_path / "kept" / "config.json").write_text("{}")
    assert (tmp_path / "kept" / "config.json").exists()
