"""What a user sees of a script: its flags, one line where something is wrong, and how far it is."""
import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import signal
import sys
import threading
import time
from typing import get_args

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from machine.ranks import rank, say

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


