"""What a run needs of the machine it runs on. It is not needed to understand SAPO.

    flags     a dataclass as command line flags, with bounds
    ranks     the processes that torchrun starts
    AdamW     for 16-bit models, its state spread over the ranks
    Clock, versions, peak_memory, forecast_memory
"""
import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ------------------------------------------------------------------------------------------ flags


def number(kind, low, high, words=None):
    """The type of a flag: a number within bounds. argparse reports what lies outside."""
    def parse(text):
        x = kind(text)
        if not low <= x <= high:  # true of NaN as well
            bound = f"at most {high}" if x > high else f"at least {low}"
            raise argparse.ArgumentTypeError(f"must be {words or bound}, got {x}")
        return x
    parse.__name__ = kind.__name__  # argparse shows it
    return parse


Count, Size = number(int, 0, 10 ** 18), number(int, 1, 10 ** 7)
Workers = number(int, 0, 1024)
Temperature = number(float, 0, 100, "between 0 and 100")
Share = number(float, 0, 1, "between 0 and 1")
Weight = number(float, 0, 1e30, "a number, and not negative")
Positive = number(float, 1e-30, 1e30, "a positive number")


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and a mistake is a ValueError of one line without the usage."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(message)


def options_of(kind):
    """What argparse is told of a flag of a type: bool, a pair, a Literal, or a function of text."""
    if get_args(kind):
        return {"choices": get_args(kind)}
    return {bool: {"action": "store_true"}, tuple: {"nargs": 2, "metavar": ("A", "B")}}.get(
        kind, {"type": kind})


def flags_of(cls, presets, description):
    """A Parser of which every field of a dataclass is a flag, its type the bounds and its comment
    the help. presets: {name: {field: its default there}}, for the help alone."""
    parser = Parser(description=description, argument_default=argparse.SUPPRESS)
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    for f in dataclasses.fields(cls):
        values = [] if f.default is None or f.type is bool else [str(f.default)]
        values += [f"{name}: {its[f.name]}" for name, its in presets.items() if f.name in its]
        text = comments[f.name] + (f" [{'; '.join(values)}]" if values else "")
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"), **options_of(f.type))
    return parser


def typed(kinds, found, where):
    """The entries of `found` that are named in `kinds`, {name: type}. ValueError: one is not of its
    type; `where`: the file that the error names."""
    values = {name: found[name] for name in kinds if name in found}
    for name, value in values.items():
        fits, right = options_of(kinds[name]), True
        try:
            if value is None:
                continue
            if "choices" in fits:
                right = value in fits["choices"]
            elif kinds[name] in (bool, str):
                right = isinstance(value, kinds[name])
            elif "nargs" in fits:
                right = len(value) == 2
            else:
                values[name] = kinds[name](str(value))
        except (argparse.ArgumentTypeError, TypeError, ValueError):
            right = False
        if not right:
            raise ValueError(f"{where}: {name} cannot be {value!r}")
    return values


# ------------------------------------------------------------------------------------------ ranks


def join_ranks():
    """Under torchrun: this process becomes a rank, with a GPU of its own where there are GPUs."""
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if 0 < gpus <= local:
        raise ValueError(f"more ranks than the {gpus} GPU(s) here: lower --nproc_per_node")
    if gpus:
        torch.cuda.set_device(local)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # one rank's games may last while others wait
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(hours=2), device_id=(
            torch.device("cuda", local) if gpus else None))  # with it, ranks meet now, not later


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def everyone():
    return dist.group.WORLD if world() > 1 else None


def barrier():
    if world() > 1:
        dist.barrier()


def gather(items):
    """Every rank's list, joined in the order of ranks."""
    if world() == 1:
        return items
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [x for part in lists for x in part]


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def say(*words):
    if rank() == 0:
        print(*words, flush=True)


@contextlib.contextmanager
def alive(what, quiet=False):
    """Within it, rank 0 prints what() on stderr whenever ten seconds pass without a word, so that
    long work is not taken for a hang. Yields a function to call after other output."""
    over, began, last = threading.Event(), time.time(), [time.time()]

    def heard():
        last[0] = time.time()

    def watch():
        while not over.wait(0.5):
            if time.time() - last[0] > 9:
                print(f"{what()} ({time.time() - began:.0f} s)", file=sys.stderr, flush=True)
                heard()

    if not quiet and rank() == 0:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield heard
    finally:
        over.set()


class progress:
    """Iterates over `items` and shows how far it is: by a bar in a terminal; elsewhere by a line
    for each item that `say` is told of, and by what `alive` says."""

    def __init__(self, items, what, done=0, total=None, quiet=False):
        self.items, self.what, self.n = items, what, done
        self.total, self.heard = done + len(items) if total is None else total, None
        self.quiet = quiet or rank() > 0
        self.bar = None if self.quiet or not sys.stderr.isatty() else tqdm(
            desc=what, initial=done, total=self.total, leave=total is None)

    def __iter__(self):
        about = f"{self.what}: {{}} of {self.total}"
        with alive(lambda: about.format(self.n), self.quiet or self.bar is not None) as self.heard:
            for item in self.items:
                yield item
                self.n += 1
                if self.bar is not None:
                    self.bar.update()
        if self.bar is not None:
            self.bar.close()

    def say(self, text):
        self.heard()
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        else:
            say(f"{self.what}, {self.n + 1} of {self.total}: {text}")


# -------------------------------------------------------------------------------------- optimizer


SLICE = 2 ** 26  # entries that an optimizer step takes at a time


def round_at_random(x, generator):
    """float32 -> bfloat16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device,
                          generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


def shares_of_ranks(sizes):
    """Which rank keeps the state of which parameter, and how much the fullest one keeps. The
    largest parameter is given away first, each to the rank that has least so far."""
    kept, owner = [0] * world(), [0] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[n] = kept.index(min(kept))
        kept[owner[n]] += sizes[n]
    return owner, max(kept)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for 16-bit models as well: updates go to float32 master weights, of which
    the model is a rounded copy, because at a learning rate of 1e-6 they are far below bf16's last
    digit. Each rank keeps the state of its share of the parameters, and sends the others what it
    has updated (ZeRO 1). `moments`: torch.float32 or torch.bfloat16."""

    def __init__(self, params, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8,
                 moments=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.moments = moments
        self.owner, _ = shares_of_ranks([p.numel() for p in self.param_groups[0]["params"]])

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for n, p in enumerate(group["params"]):
            if p.grad is not None and self.owner[n] == rank():
                self.update(p, group, n)
        for n, p in enumerate(group["params"]):  # once all have updated their shares, side by side
            if world() > 1:
                dist.broadcast(p, self.owner[n])

    def update(self, p, group, n):
        """One step of parameter number n, in slices, because its float32 temporaries are several
        times its size, and a head is large."""
        state, generator = self.state[p], None
        if not state:
            state.update(step=0, m=torch.zeros_like(p, dtype=self.moments),
                         v=torch.zeros_like(p, dtype=self.moments))
            if p.dtype != torch.float32:
                state["master"] = p.float()
        state["step"] += 1
        if self.moments != torch.float32:  # seeded, so that a resumed run rounds identically
            generator = torch.Generator(p.device).manual_seed(state["step"] * 10 ** 6 + n)
        flat = [x.view(-1) for x in (p, state["m"], state["v"], state.get("master", p))]
        for parts in zip(*(x.split(SLICE) for x in [p.grad.reshape(-1), *flat])):
            self.update_slice(*parts, state["step"], group, generator)

    def update_slice(self, grad, p, m_kept, v_kept, master, t, group, generator):
        (b1, b2), lr, g = group["betas"], group["lr"], grad.float()
        m, v = m_kept.float(), v_kept.float()  # the tensors themselves if float32
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        master.mul_(1 - lr * group["weight_decay"])
        root = (v / (1 - b2 ** t)).sqrt_().add_(group["eps"])
        master.addcdiv_(m, root, value=-lr / (1 - b1 ** t))
        if generator:
            m_kept.copy_(round_at_random(m, generator))
            v_kept.copy_(round_at_random(v, generator))
        if p.dtype != master.dtype:
            p.copy_(master)

    def numbered(self):
        """-> {number of a parameter: its state} of this rank's share, which `take` takes back."""
        params = enumerate(self.param_groups[0]["params"])
        return {n: self.state[p] for n, p in params if p in self.state}

    def take(self, states):
        """Takes this rank's share of one rank's `numbered`, however many ranks there were."""
        for n, p in enumerate(self.param_groups[0]["params"]):
            if n in states and self.owner[n] == rank():
                self.state[p] = {k: x.to(p.device, copy=True) if isinstance(x, torch.Tensor) else x
                                 for k, x in states[n].items()}


def fitted(lm, config):
    """-> lm as --compile and --checkpointing want it. Activations are recomputed in the backward
    pass of training mode alone."""
    from worlds.fast import compiled_scoring
    if config.checkpointing:
        dropout = [m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout)]
        if any(dropout) or getattr(lm.model.config, "attention_dropout", 0):
            raise ValueError("--checkpointing: this model has dropout, which would be active")
        # transformers 5.17 knows the second name alone, and 6 will know the first
        enable = getattr(lm.model, "activation_checkpointing_enable", None)
        (enable or lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if not config.compile:
        return lm
    say("compiling what scores and samples; the first time takes minutes, --eager goes without")
    lm.model.train(config.checkpointing)  # as in an update
    try:
        return compiled_scoring(lm, config.tokens_per_micro_batch)
    finally:
        lm.model.eval()


def sum_and_clip_gradients(model, most):
    """Sums the gradients over the ranks, because losses have global denominators, and clips their
    norm -> the norm before."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if world() > 1:
            dist.all_reduce(p.grad)
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), most))


# ---------------------------------------------------------------------------------------- errors


def in_one_line(error):
    """An error's message with a remedy."""
    if isinstance(error, torch.OutOfMemoryError):
        return ("out of memory. In an update: lower --tokens_per_micro_batch, or add "
                "--checkpointing; in a rollout: lower --rows or --max_context; anywhere: "
                f"--moments bfloat16, or more ranks ({str(error).splitlines()[0]})")
    package = getattr(error, "name", None) if isinstance(error, ImportError) else None
    return f"{error}; pip install {package}" if package else str(error)


@contextlib.contextmanager
def one_line_errors(script, *known):
    """What a script's user can mend ends it with one line, or, where the environment has DEBUG=1,
    with a traceback. known: errors beside the usual ones."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler)
    try:
        yield
    except Exception as error:
        if os.environ.get("DEBUG") or not isinstance(error, (
                torch.OutOfMemoryError, ValueError, OSError, ImportError, *known)):
            raise
        line = f"{script}: {in_one_line(error)}"
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's last words quote it
            with open(report, "w") as file:
                about = {"py_callstack": line, "timestamp": str(int(time.time()))}
                json.dump({"message": {"message": line, "extraInfo": about}}, file)
        sys.exit(line)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    finally:  # after an error NCCL would wait here for ranks that wait elsewhere, without a word
        if dist.is_initialized() and (dist.get_backend() == "gloo" or not sys.exc_info()[0]):
            dist.destroy_process_group()


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


def memory_needed(arch, config, critic=False):
    """{what: bytes on one rank} of the largest things an update holds, from the architecture (a
    transformers config) and train.py's settings alone. The last two are not held all the time."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(arch)
    sizes = [p.numel() for p in model.parameters()]
    weights, (_, share) = sum(sizes), shares_of_ranks(sizes)
    width, layers = arch.hidden_size, arch.num_hidden_layers
    size = 2 if config.dtype == "bfloat16" else 4
    layer = size * (8 * width + 4 * arch.intermediate_size) + 16 * width  # kept for a token
    kept = layer + layers * width * size if config.checkpointing else layer * layers
    masters = share * 4 if size == 2 else 0
    moments = share * 2 * (2 if config.moments == "bfloat16" else 4)
    return {"weights": weights * size, "gradients": weights * size, "master weights": masters,
            "moments": moments, "reference": weights * size if config.beta else 0,
            "critic": 2 * weights * size + masters + moments if critic else 0,
            "activations of a micro-batch": kept * config.tokens_per_micro_batch,
            "logits of a chunk": 6 * 2 ** 28}


def forecast_memory(arch, config, critic=False):
    """Prints what `memory_needed` computes, before anything is loaded; ValueError where the GPU has
    less. arch: a transformers config, or where one is."""
    try:
        arch = transformers.AutoConfig.from_pretrained(arch) if isinstance(arch, str) else arch
        needed, gpu = memory_needed(arch, config, critic), torch.cuda.is_available()
    except (OSError, ValueError, KeyError, AttributeError):
        return  # model.load meets the same and explains it, or the architecture says it otherwise
    total, has = sum(needed.values()), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    say(f"memory, computed, beside keys and values: {total / 1e9:.1f} GB ("
        + ", ".join(f"{what} {n / 1e9:.1f}" for what, n in needed.items() if n) + ")")
    if gpu:
        has = torch.cuda.get_device_properties(0).total_memory
    if total > has:
        short = (f"this run needs {total / 1e9:.0f} GB and the {'GPU' if gpu else 'machine'} has "
                 f"{has / 1e9:.0f}: lower --tokens_per_micro_batch, add --checkpointing or "
                 "--moments bfloat16, or use more ranks")
        if gpu:
            raise ValueError(short)
        say(f"warning: {short}")
