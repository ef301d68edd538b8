"""Tests of runtime/checkpoint.py."""
import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from runtime import checkpoint
from runtime.checkpoint import RunDir
from runtime.testing import checkpoints, on_ranks, on_the_cpu


SETTINGS = {"save_every": 1, "algo": "sapo", "seed": 0, "env": "house", "model": "tiny"}


def test_resumed_run_keeps_the_metrics_that_its_checkpoint_covers(tmp_path):
    path, run = tmp_path / "run", RunDir(tmp_path / "run")
    for name in ("final", "best", "adapter"):
        (path / name).mkdir(parents=True)
    run.begin(SETTINGS)
    run.save_checkpoint(2, lambda folder: checkpoint.write_file(f"{folder}/a", "state"))
    reports = {"eval.json": "final", "eval-best-test.json": "best", "eval-test.json": "final",
               "eval-adapter-test.json": "adapter", "eval-after-1-test.json": "final"}
    for name, weights in reports.items():
        (path / name).write_text(json.dumps({"weights": f"run/{weights}"}))
        (path / name).with_suffix(".jsonl").write_text("")
    (path / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"iteration": 1}\n{"iteration": 2}\n{"iter')
    newest = run.newest_checkpoint()
    assert checkpoints(path) == {2: newest}
    run.begin(SETTINGS, newest)
    assert (path / "final").is_dir()  # until the checkpoint is loaded
    run.delete_results()
    assert (path / "metrics.jsonl").read_text() == '{"iteration": 0}\n{"iteration": 1}\n'
    # reports that a user made are kept, with the weights that they are of
    kept = {f"eval-{name}-test.json{lines}"
            for name in ("best", "after-1", "after-2", "after-2-adapter") for lines in ("", "l")}
    assert {path.name for path in path.iterdir()} == kept | {"metrics.jsonl", "config.json",
                                                             "checkpoint-2", "best"}
    shutil.rmtree(newest)
    with pytest.raises(ValueError, match="2 iterations and no checkpoint"):
        run.begin(SETTINGS)
    (path / "config.json").write_text(json.dumps(SETTINGS | {"save_every": 5}))
    run.begin(SETTINGS)  # it had not come to its first checkpoint, and saves more often from now on
    assert not run.metrics()


@pytest.mark.parametrize("text", ["[1, 2]", '{"weights": "run/fi', "", "notes", "{}"])
def test_reports_that_are_somebodys_or_damaged_stay_and_stop_nothing(tmp_path, text):
    (tmp_path / "final").mkdir()
    for name in ("metrics.jsonl", "eval.json", "eval.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "eval-mine.json").write_text(text)
    RunDir(tmp_path).delete_results()
    RunDir(tmp_path).set_reports_aside("best", iterations=3)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "eval-mine.json"}
    assert (tmp_path / "eval-mine.json").read_text() == text


@pytest.mark.parametrize("text, says", [
    (None, "has 0 whole lines, and .*checkpoint-2 is of 2 iterations: the file was cut"),
    ("", "has 0 whole lines"), ('{"a": 1}\n{"a": 2}', "has 1 whole lines"),
    ('{"a": 1}\nnothing\n', "metrics.jsonl is damaged: line 2 is no JSON object"),
    ("[]\n[]\n", "line 1 is no JSON object"), ('{"a": 1}\n' * 2, None), ("{}\n" * 3, None),
    ("{}\n{}\n\0\0{}\n", None)])  # as a power cut may leave it
def test_metrics_that_lack_iterations_of_the_checkpoint_are_named(tmp_path, text, says):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
        RunDir(tmp_path).check_metrics(tmp_path / "checkpoint-2")


def test_only_checkpoints_of_the_run_are_deleted(tmp_path):
    foreign = {"checkpoint-500", "checkpoint-best", "checkpoint-1.bak", "checkpoint-\u00b2"}
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-1.bak/learner-0.pt").touch()
    for n in (1, 2):
        RunDir(tmp_path).save_checkpoint(
            n, lambda folder: checkpoint.write_file(f"{folder}/learner-0.pt", ""))
    assert {path.name for path in tmp_path.iterdir()} == foreign | {"checkpoint-2"}
    assert RunDir(tmp_path).newest_checkpoint().name == "checkpoint-500"


LOCK = ("from runtime.checkpoint import RunDir\n"
        "with RunDir({!r}).lock(False):\n    print(flush=True)\n    input()")


def test_folder_is_locked_by_its_writer_and_never_overwritten(tmp_path):
    path, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(path)  # the folder counts, not its name
    path.mkdir()
    other = subprocess.Popen([sys.executable, "-c", LOCK.format(str(path))], cwd=checkpoint.ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    for resume in (False, True):
        with pytest.raises(ValueError, match="another process writes to"):
            with RunDir(link).lock(resume):
                pass
    other.kill()
    other.wait()
    with RunDir(link).lock(False):  # a dead process holds no lock
        (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="link is taken: .*--resume, or choose another --out"):
        with RunDir(link).lock(False):
            pass
    with pytest.raises(ValueError, match="something else than a run in .*: choose another --out"):
        with RunDir(link).lock(True):  # whatever the flag says, it is none of ours
            pass
    assert (path / "notes.txt").read_text() == "mine" and link.is_symlink()


def test_metrics_are_read_without_an_unfinished_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"success": 0.5}\n{"succ')
    assert RunDir(tmp_path).metrics() == [{"success": 0.5}]
    checkpoint.write_file(tmp_path / "config.json", str(SETTINGS).replace("'", '"'))
    assert RunDir(tmp_path).settings() == SETTINGS
    assert not os.path.exists(tmp_path / "config.json.new")


def test_default_run_name_has_the_settings_that_differ_from_their_defaults():
    usual = {"env": "house", "model": "tiny", "algo": "sapo", "seed": 0, "lr": 1e-3, "out": None,
             "iterations": 40, "context": "window"}
    for given, name in (({}, "house-tiny-0"), ({"context": "full"}, "house-tiny-context=full-0"),
                        ({"seed": 3, "lr": 1e-3, "iterations": 2}, "house-tiny-3"),
                        ({"model": "a/b c/", "algo": "ppo", "lr": 0.5}, "house-b_c-ppo-lr=0.5-0"),
                        ({"env": "mine:Room"}, "Room-tiny-0")):
        assert checkpoint.default_run_name(given, usual, {"iterations", "out"}) == name


def lock_in_separate_folders(rank, folder):
    os.makedirs(folder / str(rank))
    os.chdir(folder / str(rank))
    with pytest.raises(ValueError, match="rank 1 does not see what rank 0 writes to run"):
        with checkpoint.RunDir("run").lock(False):
            pass


def test_ranks_without_a_shared_folder_are_refused(tmp_path):
    on_ranks(lock_in_separate_folders, 2, tmp_path)


def test_run_remembers_every_commit_that_took_part(tmp_path, monkeypatch):
    run, names = checkpoint.RunDir(tmp_path / "run"), iter("aba")
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "versions", lambda: {"git": next(names)})
    for newest in (None, run.newest_checkpoint(), run.newest_checkpoint()):
        run.begin(SETTINGS, newest)
    assert run.settings()["git"] == "a, b"


def test_out_cannot_be_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: name a folder"):
        with checkpoint.RunDir(tmp_path / "file").lock(True):
            pass
