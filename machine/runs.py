"""The folder of a run: who may write into it, how its files stay whole, how a run is resumed.

    RUN/config.json       every setting, the commit, versions; with a checksum of its own
    RUN/metrics.jsonl     a line an iteration
    RUN/checkpoint-N      after N iterations: all that decides what comes next; older ones go
    RUN/best              the weights that did best on held-out games (--eval_every)
    RUN/final             the last weights, a Hugging Face folder
    RUN/.lock             held by the process that writes; the system lets go of it when that dies

A file or folder is written under another name and renamed, so that a kill leaves the old (of a
folder perhaps as PATH.old) or the new. checksums.json in a folder of weights tells when one of its
files has changed since. The folder of a finished iteration is deleted only once the next one is
whole.
"""
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from machine.ranks import barrier, gather, rank, say, world

CHECKSUMS = "checksums.json"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ----------------------------------------------------------------------------- files and folders


def read_json(path):
    """The JSON object in a file; {} where there is no such file. ValueError: it holds none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, where an object is expected")
    return found


def write_file(path, text):
    """Writes the text to PATH.new, then renames it to PATH."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def write_folder(path, fill):
    """All ranks call it. fill(FOLDER) writes into PATH.new, which is sealed, and renamed when it is
    whole. A kill between two renames leaves PATH.old."""
    if rank() == 0:
        if os.path.isdir(f"{path}.old") and not os.path.isdir(path):  # of such a kill
            os.rename(f"{path}.old", path)
        for aside in (f"{path}.new", f"{path}.old"):
            shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(f"{path}.new")
    barrier()  # the folder is there
    try:
        fill(f"{path}.new")
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
        if free > 2 ** 26:
            raise
        raise OSError(f"cannot write {path}, the disk is full ({free / 1e6:.0f} MB are left); what "
                      "was written before is whole") from error
    barrier()  # what the ranks write is there
    if rank() == 0:
        files = [file for file in Path(f"{path}.new").rglob("*") if file.is_file()]
        sums = {str(file.relative_to(f"{path}.new")): checksum(file) for file in files}
        write_file(f"{path}.new/{CHECKSUMS}", json.dumps(sums, indent=1))
        if os.path.isdir(path):
            os.rename(path, f"{path}.old")
        os.rename(f"{path}.new", path)
        shutil.rmtree(f"{path}.old", ignore_errors=True)
    barrier()  # a rank that goes on sees the folder


def checksum(path):
    """The CRC-32 of a file."""
    total = 0
    with open(path, "rb") as file:
        while part := file.read(2 ** 24):
            total = zlib.crc32(part, total)
    return total


def verify(folder):
    """ValueError where a file of a folder that `write_folder` made has changed or is missing."""
    for name, known in read_json(f"{folder}/{CHECKSUMS}").items():
        path = Path(folder, name)
        if not path.is_file() or checksum(path) != known:
            raise ValueError(f"{path} is {'damaged' if path.is_file() else 'missing'}: it is not "
                             f"what was written (if you changed it, delete {folder}/{CHECKSUMS})")


# --------------------------------------------------------------------------------- whose folder


def name_of(given, usual, unnamed):
    """ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED of the flags given, where they are not the `usual`
    ones: different runs have different folders. `unnamed`: flags that may change within a run."""
    first = ("env", "model", "algo", "seed")
    env, model, algo, seed = (str(given.get(name, usual[name])) for name in first)
    words = [env.split(":")[-1], os.path.basename(model.rstrip("/")), *[algo] * (algo != "sapo")]
    words += [f"{k}={v}" for k, v in sorted(given.items())
              if v != usual[k] and k not in (*unnamed, *first)]
    return re.sub(r"[^\w.=-]+", "_", "-".join([*words, seed]))


def lock(file, what):
    """Whether an open file is this process's alone from now on, and still goes by its name. `what`
    is said where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (BlockingIOError, FileNotFoundError):  # it is held, or has just been renamed
        return False
    except OSError as error:
        say(f"cannot lock {what} ({error}): see that no other run writes to it")
        return True


@contextlib.contextmanager
def locked(out):
    """Within it, the folder `out` is this process's alone. ValueError where it is another's."""
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/.lock", "a+") as file:
        if not lock(file, out):
            file.seek(0)
            raise ValueError(f"{file.read() or 'another process'} writes to {out}: wait for it, "
                             "stop it, or give another --out")
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                own = os.path.samestat(os.fstat(file.fileno()), os.stat(f"{out}/.lock"))
                if own and not (os.path.isfile(f"{out}/config.json")
                                and os.path.isfile(f"{out}/metrics.jsonl")):  # no run came of it
                    os.remove(f"{out}/.lock")
                    os.rmdir(out)  # where there is nothing else


@contextlib.contextmanager
def new_file(path):
    """An empty file to write, this process's alone; what a start that failed has left under its
    name is renamed. ValueError where another process writes it."""
    with open(path, "a") as file:
        if not lock(file, path):
            raise ValueError(f"another process writes {path}: wait for it, or give another --out")
        if os.path.getsize(path):
            set_aside(path)
            with new_file(path) as file:
                yield file
        else:
            yield file


def on_first_rank(call, *args):
    """All ranks call it. call(*args) on rank 0; what is wrong is raised on every rank."""
    why = None
    if rank() == 0:
        try:
            call(*args)
        except (ValueError, OSError) as error:
            why = str(error)
    if why := gather([why])[0]:
        raise ValueError(why)


def claim(out, held):
    """All ranks call it. Puts rank 0's hold on a run's folder into `held`, an ExitStack."""
    on_first_rank(lambda: held.enter_context(locked(out)))


def read_settings(path):
    """A run's config.json. ValueError where it is damaged."""
    config = read_json(path)
    known = config.pop("checksum", None)
    if known not in (None, zlib.crc32(json.dumps(config).encode())):
        raise ValueError(f"{path} is damaged: it is not what was written (if you changed it, "
                         "delete its checksum)")
    return config


def read_log(path):
    """The lines of a metrics.jsonl as dicts, without one that was being written. ValueError: one is
    damaged."""
    lines = []
    for n, line in enumerate(Path(path).read_bytes().splitlines(keepends=True), 1):
        try:
            lines.append(json.loads(line))
            if not isinstance(lines[-1]["success"], (int, float)):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):
                raise ValueError(f"{path} is damaged in line {n}") from None
            return lines
    return lines


def settings_of(run):
    """The settings of a run. ValueError where config.json is missing, damaged or not a run's."""
    path = f"{run}/config.json"
    config = read_settings(path)
    if not {"env", "model", "seed"} <= config.keys():
        raise ValueError(f"there is no run in {run}: {path} "
                         f"{'is not of train.py' if config else 'is missing'}")
    return config


def begin_folder(out, settings, held, checkpoint=None):
    """All ranks call it. Makes a run's folder, with its settings. Of a run that is resumed,
    metrics.jsonl keeps the lines that the checkpoint knows of, and what was made at its end goes.
    Another run that is there is renamed, as is one that was killed before its first checkpoint.
    ValueError: what is there must not be touched."""
    done = iterations_in(checkpoint)
    os.makedirs(out, exist_ok=True)  # rank 0 has; asked so, a network's folder is not stale
    if set(gather([(os.path.exists(f"{out}/.lock"), done)])) != {(True, done)}:
        raise ValueError(f"all machines must see the same folder {out}, and these do not")
    on_first_rank(write_start, out, settings, held, checkpoint)


def write_start(out, settings, held, checkpoint):
    """Rank 0's part of begin_folder."""
    lines, made_with, path = [], versions(), Path(out, "metrics.jsonl")
    if settings["resume"] and checkpoint:
        lines = log_until(path, checkpoint)
        say(f"{out}: goes on after {len(lines)} iterations")
        before = settings_of(out).get("git", made_with["git"])
        commits = dict.fromkeys([*before.split(", "), made_with["git"]])
        made_with["git"] = ", ".join(commits)  # every commit that had a part in the run
        shutil.rmtree(f"{out}/final", ignore_errors=True)
        for name in ("eval.json", "eval.jsonl", "cost.json", "curves.png"):
            Path(out, name).unlink(missing_ok=True)
    elif set(os.listdir(out)) - {".lock", "config.json.new"}:  # the latter: of a full disk
        try:
            found = settings_of(out)
        except ValueError as error:
            raise ValueError(f"{error}; give another --out") from None
        done = path.read_bytes().count(b"\n") if path.exists() else 0
        if settings["resume"] and done > (found.get("save_every") or 1):
            raise ValueError(f"{path} has {done} iterations, and their checkpoint in {out} is "
                             "gone. Without --resume a run begins anew, and this one is kept "
                             "under another name")
        set_aside(out)
        held.enter_context(locked(out))
    config = settings | made_with
    config["checksum"] = zlib.crc32(json.dumps(config).encode())
    write_file(f"{out}/config.json", json.dumps(config, indent=1))
    write_file(path, "".join(lines))


def log_until(path, checkpoint):
    """The lines of metrics.jsonl that a checkpoint knows of. ValueError where they, or anything in
    the checkpoint, are not what was written."""
    verify(checkpoint)
    log = path.read_bytes() if path.exists() else b""
    lines = log.splitlines(keepends=True)[:iterations_in(checkpoint)]
    known = read_json(checkpoint / "progress.json").get("beside", {})
    for name, total in checksums_beside(path.parent, b"".join(lines)).items():
        if known.get(name, total) != total:
            raise ValueError(f"{path.parent / name} is damaged: it is not what was written")
    return [line.decode() for line in lines]


def checksums_beside(out, log):
    """Checksums of what a run that goes on uses beside its checkpoint."""
    before = Path(out, "before.json")
    return {"metrics.jsonl": zlib.crc32(log)} | (
        {before.name: checksum(before)} if before.is_file() else {})


def best_of(out):
    """The largest success on held-out games in metrics.jsonl, -1 where there is none."""
    return max((line.get("held_out", -1) for line in read_log(f"{out}/metrics.jsonl")), default=-1)


def set_aside(path):
    """Renames a run's folder or a file to PATH.1, or the next number that is free."""
    n = 1
    while os.path.exists(f"{path}.{n}"):
        n += 1
    os.rename(path, f"{path}.{n}")
    say(f"what was in {path} is in {path}.{n} now")


# --------------------------------------------------------------------------------- checkpoints


def newest_checkpoint(run):
    """RUN/checkpoint-N with the largest N, or None. One that is being written has another name."""
    whole = [path for path in Path(run).glob("checkpoint-*")
             if path.name[11:].isdigit() and path.is_dir()]
    return max(whole, key=iterations_in, default=None)


def iterations_in(checkpoint):
    """RUN/checkpoint-N -> N; None -> 0."""
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def save_checkpoint(learner, out, done):
    """RUN/checkpoint-N: the model as a Hugging Face folder, and what else decides what comes next.
    Random numbers and the order of tasks follow from the seed and the iteration."""
    def fill(folder):
        states = [optimizer.numbered() for optimizer in learner.optimizers.values()]
        torch.save(states, f"{folder}/optimizer-{rank()}.pt")
        if rank() == 0:
            learner.lm.save(folder)
            if hasattr(learner, "critic"):
                torch.save(learner.critic.state_dict(), f"{folder}/critic.pt")
            log = Path(out, "metrics.jsonl")
            write_file(f"{folder}/progress.json", json.dumps(
                {"steps": learner.steps, "failed": learner.failed,
                 "beside": checksums_beside(out, log.read_bytes() if log.is_file() else b"")}))

    path = Path(out, f"checkpoint-{done}")
    if not all(p.isfinite().all() for p in learner.lm.model.parameters()):
        last = newest_checkpoint(out)
        raise ValueError(f"the weights are not finite after iteration {done}: lower --lr; "
                         f"{last or 'no checkpoint'} is the last good one")
    write_folder(path, fill)
    if rank() == 0:
        for older in set(path.parent.glob("checkpoint-*")) - {path}:
            shutil.rmtree(older, ignore_errors=True)


@torch.no_grad()
def restore(learner, path, load):
    """-> iterations done; the learner becomes what it was at the checkpoint `path` (None: nothing
    is restored), on any number of ranks. load: model.load."""
    if path:
        saved = load(str(path), dtype=learner.lm.model.dtype, device="cpu").model
        for mine, theirs in zip(learner.lm.model.parameters(), saved.parameters()):
            mine.copy_(theirs)
        if hasattr(learner, "critic"):
            learner.critic.load_state_dict(torch.load(path / "critic.pt", map_location="cpu"))
        for share in path.glob("optimizer-*.pt"):
            states = torch.load(share, map_location="cpu", mmap=True)
            for optimizer, its in zip(learner.optimizers.values(), states):
                optimizer.take(its)
        progress = read_json(path / "progress.json")
        learner.steps, learner.failed = progress["steps"], progress["failed"]
    return iterations_in(path)


@contextlib.contextmanager
def signals_noted():
    """Within it, Ctrl-C and SIGTERM only fill the list that it yields, so that the iteration ends
    and is saved. A later one raises KeyboardInterrupt; torchrun passes a Ctrl-C on within a second,
    which is the same one."""
    noted = []

    def note(*_):
        if noted and time.time() > noted[0] + 1:
            raise KeyboardInterrupt
        if not noted:
            hurry = (", if it ends within torchrun's 30 seconds; python train.py has no such limit"
                     if dist.is_torchelastic_launched() else "")
            print(f"\nleaves after this iteration{hurry}; another Ctrl-C leaves at once",
                  file=sys.stderr)
        noted.append(time.time())

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


# ---------------------------------------------------------------------------------- what is used


def versions():
    """What a run was made with: git commit, packages, hardware."""
    git = subprocess.run("git describe --always --dirty", cwd=ROOT, shell=True,
                         capture_output=True, text=True).stdout.strip()
    device = (torch.cuda.get_device_name() if torch.cuda.is_available()
              else f"CPU, {torch.get_num_threads()} threads")
    return {"git": git or "unknown", "versions": {
        "python": sys.version.split()[0], "torch": torch.__version__, "device": device,
        "transformers": transformers.__version__, "ranks": world()}}


class Clock:
    """Seconds of an iteration's phases, and of the last checkpoint."""

    def __init__(self):
        self.saved_at = self.save_took = 0.0
        self.start()

    def start(self):
        self.laps, self.begun = {}, time.time()
        self.last = self.begun

    def lap(self, name):
        """Books the time since the last lap on a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, key = time.time(), f"time_{name}"
        self.laps[key], self.last = self.laps.get(key, 0.0) + now - self.last, now

    def saved(self):
        self.lap("save")
        self.saved_at, self.save_took = self.last, self.laps["time_save"]

    def save_is_due(self):
        """Whether another checkpoint takes less than a twentieth of the time since the last. The
        first one is always due, and measures how long one takes."""
        return self.save_took < (time.time() - self.saved_at) / 20

    def seconds(self):
        return self.laps | {"time_total": time.time() - self.begun}


def peak_memory():
    """The most this process has used so far, in GB: of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
