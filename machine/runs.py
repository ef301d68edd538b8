"""The folder of a run: who may write into it, how its files stay whole, how a run is resumed.

    RUN/config.json       every setting, the commit, versions
    RUN/metrics.jsonl     a line an iteration
    RUN/transcripts       an episode of every tenth iteration, as a page (eval.episode_page)
    RUN/checkpoint-N      after N iterations: all that decides what comes next; older ones go
    RUN/best              the weights that did best on held-out games (--eval_every)
    RUN/final             the last weights, a Hugging Face folder
    RUN/eval.json(l)      the evaluation at the end; before.json: the one at the start
    RUN/.lock             held by the process that writes; the system lets go of it when that dies

A file or folder is written under another name and renamed when it is whole, so that a process may
be killed at any moment. What is there is never overwritten by another run.
"""
import contextlib
import fcntl
import json
import os
import pickle
import re
import resource
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from machine.ranks import barrier, from_rank_0, from_ranks, rank, say, world

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEFORE_A_START = {".lock", "config.json.new", "wandb", "wandb-id"}  # a failed start may leave them


def read_json(path):
    """The JSON object in a file; {} where there is no such file. ValueError: it holds none."""
    try:
        return dict(json.loads(Path(path).read_bytes()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_file(path, text):
    """Writes the text to PATH.new, then renames it to PATH."""
    Path(f"{path}.new").write_text(text, encoding="utf-8")
    os.replace(f"{path}.new", path)


def write_folder(path, fill):
    """All ranks call it. fill(FOLDER) writes into PATH.new, which is renamed when it is whole."""
    new, old = f"{path}.new", f"{path}.old"
    if rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        os.makedirs(new)
    barrier()  # the folder is there
    try:
        fill(new)
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        raise OSError(f"cannot write {new}; what was there before is whole: {error}") from error
    barrier()  # what the ranks write is there
    if rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if os.path.isdir(path):
            os.rename(path, old)  # a kill would leave a torn folder under its name
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    barrier()  # a rank that goes on sees the folder


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


@contextlib.contextmanager
def held(out, resume):
    """All ranks call it. Within it, the folder `out` is this run's alone. ValueError where another
    process writes to it, where something is in it that is not to be resumed, or where the ranks do
    not see the same folder."""
    if os.path.isfile(out):
        raise ValueError(f"--out {out} is a file: name a folder")
    os.makedirs(out, exist_ok=True)
    refused = []
    with open(f"{out}/.lock", "a+") as file:
        if rank() == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused = [f"another process writes to {out}: wait for it, or give another --out"]
            if not refused and not resume and {*os.listdir(out)} - BEFORE_A_START:
                refused = [f"{out} is taken: go on with what is there by --resume, or give "
                           "another --out"]
        if why := from_ranks(refused):
            raise ValueError(why[0])
        mark = from_rank_0(secrets.token_hex(8))
        if rank() == 0:
            file.truncate(0)
            file.write(mark)
            file.flush()
            os.fsync(file.fileno())  # so that other machines see it
        barrier()
        blind = [] if Path(out, ".lock").read_text() == mark else [rank()]
        if blind := from_ranks(blind):
            raise ValueError(f"rank {blind[0]} does not see what rank 0 writes to {out}: --out "
                             "must lie on a file system that all machines share")
        yield


def settings_of(run):
    """The settings of a run. ValueError where config.json is missing, damaged or not a run's."""
    config = read_json(f"{run}/config.json")
    if not {"env", "model", "seed"} <= config.keys():
        raise ValueError(f"there is no run in {run}")
    return config


def read_log(path):
    """The lines of a metrics.jsonl as dicts, without one that is being written."""
    lines = Path(path).read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def log_of(out, done):
    """-> the lines of RUN/metrics.jsonl, which are those of the iterations done. The folder is made
    if there is none. ValueError: it has those of another run."""
    os.makedirs(out, exist_ok=True)
    path = Path(out, "metrics.jsonl")
    lines = read_log(path) if path.exists() else []
    if len(lines) != done:
        raise ValueError(f"{path} has {len(lines)} iterations of another run: give another out")
    return lines


def begin_folder(out, settings, checkpoint=None):
    """Rank 0's part of a start: RUN/config.json, and of a run that is resumed the lines of
    metrics.jsonl that the checkpoint knows of. What was made at its end goes.
    ValueError: there are such lines and no checkpoint."""
    log, made_with = Path(out, "metrics.jsonl"), versions()
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    if not checkpoint and len(lines) > settings["save_every"]:
        raise ValueError(f"{log} has {len(lines)} iterations and no checkpoint: give "
                         "another --out")
    if checkpoint:
        say(f"{out}: goes on after {iterations_in(checkpoint)} iterations")
        before = settings_of(out)
        if before.get("games", settings.get("games")) != settings.get("games"):
            say(f"Careful: these are other games than those that {out} was begun with")
        commits = [*before["git"].split(", "), made_with["git"]]
        made_with["git"] = ", ".join(dict.fromkeys(commits))  # all that had a part in the run
        shutil.rmtree(f"{out}/final", ignore_errors=True)
        for path in Path(out).glob("eval*"):
            path.unlink()
    write_file(f"{out}/config.json", json.dumps(settings | made_with, indent=1))
    write_file(log, b"".join(lines[:iterations_in(checkpoint)]).decode())


def versions():
    """What a run was made with: git commit, packages, hardware."""
    git = subprocess.run("git describe --always --dirty", cwd=ROOT, shell=True,
                         capture_output=True, text=True).stdout.strip()
    device = (torch.cuda.get_device_name() if torch.cuda.is_available()
              else f"CPU, {torch.get_num_threads()} threads")
    return {"git": git or "unknown", "versions": {
        "python": sys.version.split()[0], "torch": torch.__version__, "device": device,
        "transformers": transformers.__version__, "ranks": world()}}


def begin_wandb(config):
    """A run of Weights & Biases in the project --wandb, once in a process; a resumed run goes on
    under its id. ValueError: the service cannot be used."""
    import wandb
    if getattr(wandb, "run", None):
        return wandb.run
    path = Path(config.out, "wandb-id")
    try:
        run = wandb.init(project=config.wandb, id=path.read_text() if path.exists() else None,
                         resume="allow", dir=config.out, name=path.parent.name, config=vars(config))
    except Exception as error:  # it has many of its own
        raise ValueError(f"--wandb {config.wandb}: {' '.join(str(error).split())[:200]} Log in by "
                         "`wandb login`, or set WANDB_MODE=offline to keep the numbers here"
                         ) from None
    write_file(path, run.id)
    return run


# --------------------------------------------------------------------------------- checkpoints

def newest_checkpoint(run):
    """RUN/checkpoint-N with the largest N that rank 0 sees, or None. One that is being written has
    another name."""
    whole = [path for path in Path(run).glob("checkpoint-*") if path.name[11:].isdigit()]
    return from_rank_0(max(whole, key=iterations_in, default=None))


def iterations_in(checkpoint):
    """RUN/checkpoint-N -> N; None -> 0."""
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def save_checkpoint(out, done, fill):
    """Writes RUN/checkpoint-N by fill(FOLDER); the older ones go once it is whole."""
    write_folder(f"{out}/checkpoint-{done}", fill)
    if rank() == 0:
        for older in Path(out).glob("checkpoint-*"):
            if older.name != f"checkpoint-{done}":
                shutil.rmtree(older, ignore_errors=True)


def read_tensors(path):
    """What torch.save wrote. ValueError names a file that is damaged, OSError one that is missing.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


# ---------------------------------------------------------------------------- seconds and memory

class Clock:
    """Seconds of an iteration's phases."""

    def __init__(self):
        self.start()

    def start(self):
        self.laps = {}
        self.begun = self.last = time.time()

    def lap(self, name):
        """Books the time since the last lap on a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        self.laps[f"time_{name}"] = self.laps.get(f"time_{name}", 0.0) + now - self.last
        self.last = now

    def seconds(self):
        return self.laps | {"time_total": time.time() - self.begun}


def peak_memory():
    """The most this process has used so far, in GB: of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
