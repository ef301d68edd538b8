"""Tests of machine/runs.py."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from machine import runs


def write_both(folder, text):
    for name in "ab":
        runs.write_file(os.path.join(folder, name), text)


def checkpoints(run):
    """{iterations done: folder} of what bears a checkpoint's name in a run."""
    named = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.iterdir()}
    return {int(match[1]): path for path, match in named.items() if match}


def save(out, done):
    runs.save_checkpoint(out, done, lambda folder: write_both(folder, str(done)))


SETTINGS = {"save_every": 1, "algo": "sapo", "seed": 0, "env": "house", "model": "tiny"}


def begun(out, done):
    """A run of so many iterations, with a checkpoint -> its checkpoint."""
    out.mkdir()
    runs.begin_folder(str(out), SETTINGS)
    (out / "metrics.jsonl").write_text("".join(f'{{"iteration": {n}}}\n' for n in range(done)))
    save(out, done)
    return runs.newest_checkpoint(out)


def test_a_resumed_run_keeps_the_lines_that_its_checkpoint_knows(tmp_path):
    out = tmp_path / "run"
    checkpoint = begun(out, 2)
    for name in ("final", "best"):
        (out / name).mkdir()
    (out / "eval.json").write_text("{}")
    with open(out / "metrics.jsonl", "a") as log:
        log.write('{"iteration": 2}\n{"iter')
    runs.begin_folder(str(out), SETTINGS, checkpoint)
    assert (out / "metrics.jsonl").read_text() == '{"iteration": 0}\n{"iteration": 1}\n'
    assert {path.name for path in out.iterdir()} == {"metrics.jsonl", "config.json", "checkpoint-2",
                                                     "best"}
    shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match="2 iterations and no checkpoint"):
        runs.begin_folder(str(out), SETTINGS)


HOLD = "from machine import runs\nwith runs.held({!r}, False):\n    print(flush=True)\n    input()"


def test_a_folder_has_one_writer_and_what_is_in_it_stays(tmp_path):
    out, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(out)  # what it points to counts
    out.mkdir()
    other = subprocess.Popen([sys.executable, "-c", HOLD.format(str(out))], cwd=runs.ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    for resume in (False, True):
        with pytest.raises(ValueError, match="another process writes to"):
            with runs.held(link, resume):
                pass
    other.kill()
    other.wait()
    with runs.held(link, False):  # a dead one leaves it open
        (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="link is taken: .*--resume, or give another --out"):
        with runs.held(link, False):
            pass
    assert (out / "notes.txt").read_text() == "mine" and link.is_symlink()


def test_a_log_is_read_without_the_line_that_was_being_written(tmp_path):
    path, good = tmp_path / "metrics.jsonl", b'{"success": 0.5}\n'
    path.write_bytes(good * 2 + good[:7])
    assert runs.read_log(path) == [{"success": 0.5}] * 2


def test_a_runs_folder_is_named_by_what_is_unusual():
    usual = {"env": "house", "model": "tiny", "algo": "sapo", "seed": 0, "lr": 1e-3, "out": None,
             "iterations": 40, "context": "window"}
    for given, name in (({}, "house-tiny-0"), ({"context": "full"}, "house-tiny-context=full-0"),
                        ({"seed": 3, "lr": 1e-3, "iterations": 2}, "house-tiny-3"),
                        ({"model": "a/b c/", "algo": "ppo", "lr": 0.5}, "house-b_c-ppo-lr=0.5-0"),
                        ({"env": "mine:Room"}, "Room-tiny-0")):
        assert runs.name_of(given, usual, {"iterations", "out"}) == name
