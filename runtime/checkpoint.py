"""The folder of a run: its files, who may write to it, and how a run is resumed.

    RUN/config.json       every setting, the git commit, versions
    RUN/metrics.jsonl     one line per iteration
    RUN/transcripts       an episode of iterations 1, 11, 21 ... and of the last one, as pages
                          (report.episode_page)
    RUN/checkpoint-N      everything needed to go on after N iterations; older ones are deleted
    RUN/best              the weights with the best success in validation so far (--eval_every)
    RUN/final             the weights at the end, a Hugging Face folder
    RUN/adapter           with --lora_rank, the adapters alone, a folder as those of peft. So are
                          RUN/best and the checkpoint; in RUN/final they are merged
    RUN/before.json       the evaluation before training
    RUN/eval.json(l)      the evaluation at the end; those of eval.py are eval-SPLIT.json(l), and
                          eval-after-N-... once the weights have been replaced
    RUN/curves.png        training curves
    RUN/wandb-id          with --wandb: the run's id there
    RUN/.lock             locked by the process that writes; freed by the system when it dies

What would be worthless half written is written under a temporary name and then renamed, so that the
process may be killed at any moment; a last line of metrics.jsonl that is cut off is left out. A run
never overwrites another run's files.
"""
import contextlib
import fcntl
import hashlib
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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

from runtime.distributed import (all_gather_list, barrier, broadcast_object, print0, rank,
                                 world_size)

ROOT = Path(__file__).resolve().parent.parent


def read_json(path) -> dict:
    """The JSON object in a file; {} if there is no such file. ValueError: the file is damaged."""
    try:
        return dict(json.loads(Path(path).read_bytes()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def read_tensors(path):
    """Loads what torch.save wrote. ValueError: the file is damaged; OSError: it is missing."""
    try:
        return torch.load(path, map_location="cpu", mmap=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def fingerprint(tensors) -> str:
    """A short text to recognize weights by: a hash of the first 64 numbers of each tensor."""
    first = torch.cat([x.detach().flatten()[:64].float() for x in tensors])
    return hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]


def write_file(path, text: str) -> None:
    """Writes PATH.new and renames it to PATH."""
    Path(f"{path}.new").write_text(text, encoding="utf-8")
    os.replace(f"{path}.new", path)


def write_folder(path, fill: Callable, new=None) -> None:
    """Calls fill(NEW) on every rank, then renames NEW, by default PATH.new, to PATH. All ranks must
    call it."""
    new, old = new or f"{path}.new", f"{path}.old"
    if rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        os.makedirs(new)
    barrier()  # the folder exists
    try:
        fill(new)
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        raise OSError(f"cannot write {new}; what was there before is intact: {error}") from error
    barrier()  # every rank has written its part
    if rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if os.path.isdir(path):
            os.rename(path, old)  # rmtree would leave half a folder if it were interrupted
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    barrier()  # every rank sees the folder


class RunDir:
    """The folder of one run."""

    # A start that failed may leave these behind; they do not make a folder somebody else's.
    LEFTOVERS = {".lock", "config.json.new", "wandb", "wandb-id"}

    def __init__(self, path):
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def settings(self) -> dict:
        """config.json. ValueError: it is missing, damaged, or not that of a run."""
        config = read_json(self / "config.json")
        if not is_of_a_run(config):
            raise ValueError(f"there is no run in {self.path}")
        return config

    def metrics(self, at_most: int | None = None) -> list[dict]:
        """metrics.jsonl, or its first lines, without a last line that is still being written.
        ValueError: one of them is damaged."""
        path, metrics = self / "metrics.jsonl", []
        for n, line in enumerate(path.read_bytes().splitlines(keepends=True)[:at_most], 1):
            if not line.endswith(b"\n"):
                break
            with contextlib.suppress(ValueError):
                metrics.append(json.loads(line))
            if len(metrics) < n or not isinstance(metrics[-1], dict):
                raise ValueError(f"{path} is damaged: line {n} is no JSON object")
        return metrics

    def check_metrics(self, checkpoint: Path) -> None:
        """ValueError: metrics.jsonl lacks iterations of the checkpoint, or is damaged."""
        done, log = iterations_of(checkpoint), self / "metrics.jsonl"
        found = len(self.metrics(done)) if log.exists() else 0
        if found < done:
            raise ValueError(f"{log} has {found} whole lines, and {checkpoint} is of {done} "
                             "iterations: the file was cut or replaced. Put it back, or start "
                             f"another run with --model {checkpoint}")

    @contextlib.contextmanager
    def lock(self, resume: bool, sign: str = "config.json") -> Iterator[None]:
        """Within this context no other run can use the folder. All ranks must call it. `sign`: the
        file by which one that can be resumed is known. ValueError: another process writes to it, it
        holds something and `resume` is not set, or the ranks do not share a file system."""
        if self.path.is_file():
            raise ValueError(f"--out {self.path} is a file: name a folder")
        os.makedirs(self.path, exist_ok=True)
        with open(self / ".lock", "a+", encoding="utf-8") as file:
            if reasons := all_gather_list(self.try_lock(file, resume, sign) if rank() == 0 else []):
                raise ValueError(reasons[0])
            mark = broadcast_object(secrets.token_hex(8))
            if rank() == 0:
                file.truncate(0)
                file.write(mark)
                file.flush()
                os.fsync(file.fileno())  # so that other machines see it
            barrier()
            seen = (self / ".lock").read_text(encoding="utf-8") == mark
            if blind := all_gather_list([] if seen else [rank()]):
                raise ValueError(f"rank {blind[0]} does not see what rank 0 writes to {self.path}: "
                                 "--out must be on a file system that all machines share")
            yield

    def try_lock(self, file, resume, sign):
        """Returns a list with the reason why the folder cannot be used, or an empty list."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return [f"another process writes to {self.path}: wait for it, or choose another --out"]
        if not (resume and (self / sign).exists()) and {*os.listdir(self.path)} - self.LEFTOVERS:
            if resume:
                return [f"there is something else than a run in {self.path}: choose another --out"]
            return [f"{self.path} is taken: continue the run in it with --resume, or choose "
                    "another --out"]
        return []

    def begin(self, settings: dict, checkpoint: Path | None = None) -> None:
        """Writes config.json. For a resumed run it also cuts metrics.jsonl back to the checkpoint.
        Only rank 0 calls it. ValueError: there are iterations that no checkpoint covers."""
        log, made_with = self / "metrics.jsonl", versions()
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        save_every = read_json(self / "config.json").get("save_every", settings["save_every"])
        if not checkpoint and len(lines) > save_every:
            raise ValueError(f"{log} has {len(lines)} iterations and no checkpoint: choose "
                             "another --out")
        if checkpoint:
            print0(f"resuming {self.path} after {iterations_of(checkpoint)} iterations")
            commits = [*self.settings()["git"].split(", "), made_with["git"]]
            made_with["git"] = ", ".join(dict.fromkeys(commits))  # every commit that took part
        if lines:  # before the settings are those of the resumed run, which may be killed
            write_file(log, b"".join(lines[:iterations_of(checkpoint)]).decode())
        write_file(self / "config.json", json.dumps(settings | made_with, indent=1))
        if not lines:
            write_file(log, "")

    def delete_results(self) -> None:
        """Deletes what a resumed run writes anew, the final weights and eval.json(l)."""
        self.set_reports_aside("final", "adapter", iterations=len(self.metrics()))
        for name in "final", "adapter":
            shutil.rmtree(self / name, ignore_errors=True)
        for name in "eval.json", "eval.jsonl":
            (self / name).unlink(missing_ok=True)

    def set_reports_aside(self, *weights: str, iterations: int) -> None:
        """Gives what eval.py wrote about these weights, which will be replaced, the name
        eval-after-N-..., for the N iterations that they had seen. Other files stay."""
        def is_of_these(path):
            try:
                return Path(str(read_json(path).get("weights"))).name in weights
            except (ValueError, OSError):  # it is somebody's, or damaged
                return False

        reports = [path for path in self.path.glob("eval-*.json")
                   if not path.name.startswith("eval-after-") and is_of_these(path)]
        for path in reports + [path.with_suffix(".jsonl") for path in reports]:
            if path.exists():
                path.rename(self / path.name.replace("eval-", f"eval-after-{iterations}-", 1))

    def newest_checkpoint(self) -> Path | None:
        """checkpoint-N with the largest N, as rank 0 sees it; None if there is none."""
        return broadcast_object(newest_checkpoint_in(self.path))

    def save_checkpoint(self, iterations: int, fill: Callable) -> None:
        """Writes checkpoint-N with fill(folder), and then deletes the older ones."""
        # all are written under one temporary name, so what an interrupt leaves is overwritten
        write_folder(self / f"checkpoint-{iterations}", fill, self / "checkpoint.new")
        if rank() == 0:
            for older in self.path.glob("checkpoint-*"):
                # another program's folder may have such a name
                written_here = older.name[11:].isdecimal() and any(older.glob("learner-*.pt"))
                if written_here and older.name != f"checkpoint-{iterations}":
                    shutil.rmtree(older, ignore_errors=True)


def is_of_a_run(config: dict) -> bool:
    """Whether a config.json is a run's, and not a model's."""
    return {"env", "model", "seed"} <= config.keys()


def newest_checkpoint_in(folder: Path) -> Path | None:
    """checkpoint-N with the largest N, as this rank sees it; None if there is none."""
    finished = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    return max(finished, key=iterations_of, default=None)


def iterations_of(checkpoint: Path | None) -> int:
    """checkpoint-N -> N; None -> 0."""
    return int(checkpoint.name.partition("-")[2]) if checkpoint else 0


def default_run_name(given: dict, defaults: dict, ignored: set) -> str:
    """ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED, with the flags that differ from their defaults, so
    that different runs get different folders. `ignored`: flags that may change within a run."""
    first = ("env", "model", "algo", "seed")
    env, model, algo, seed = (str(given.get(name, defaults[name])) for name in first)
    parts = [env.split(":")[-1], os.path.basename(model.rstrip("/")), *[algo] * (algo != "sapo")]
    parts += [f"{name}={value}" for name, value in sorted(given.items())
              if value != defaults[name] and name not in (*ignored, *first)]
    return re.sub(r"[^\w.=-]+", "_", "-".join([*parts, seed]))


def versions() -> dict:
    """What a run was made with: git commit, packages, hardware."""
    git = subprocess.run("git describe --always --dirty", cwd=ROOT, shell=True,
                         capture_output=True, encoding="utf-8").stdout.strip()
    device = (torch.cuda.get_device_name() if torch.cuda.is_available()
              else f"CPU, {torch.get_num_threads()} threads")
    return {"git": git or "unknown", "versions": {
        "python": sys.version.split()[0], "torch": torch.__version__, "device": device,
        "transformers": transformers.__version__, "ranks": world_size()}}


# ------------------------------------------------------------------------------ Weights & Biases

def init_wandb(config, folder: RunDir):
    """The process's run in the Weights & Biases project --wandb; a resumed run keeps its id.
    ValueError: the service cannot be used."""
    import wandb
    if getattr(wandb, "run", None):
        return wandb.run
    path = folder / "wandb-id"
    old = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        run = wandb.init(project=config.wandb, id=old, resume="allow", dir=config.out,
                         name=path.parent.name, config=vars(config))
    except Exception as error:  # wandb has many exceptions of its own
        raise ValueError(f"--wandb {config.wandb}: {' '.join(str(error).split())[:200]} Log in "
                         "with `wandb login`, or set WANDB_MODE=offline to log to the run's folder"
                         ) from None
    write_file(path, run.id)
    return run


# ------------------------------------------------------------------------------- time and memory

class Clock:
    """The seconds of each phase of an iteration."""

    def __init__(self):
        self.phases, self.last = {}, time.time()

    def record(self, phase: str) -> None:
        """Adds the time since the last call to a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        self.phases[f"time_{phase}"] = self.phases.get(f"time_{phase}", 0.0) + now - self.last
        self.last = now

    def take(self) -> dict:
        """The phases since the last call and their sum, time_total. It begins anew."""
        phases, self.phases = self.phases, {}
        self.last = time.time()
        return phases | {"time_total": sum(phases.values())}


def peak_memory() -> float:
    """The peak memory of this process in GB: the GPU's, if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
