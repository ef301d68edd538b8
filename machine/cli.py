"""What a user sees of a script: its flags, how far it is, and one line where something is wrong."""
import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import signal
import sys
import threading
from typing import get_args

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from machine.ranks import rank


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and a mistake is a ValueError of one line without the usage."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(message)


def options_of(kind, default=None):
    """What argparse is told of a flag of a type: a Literal, bool, a pair, or a function of text.
    A bool that is None by default has two flags, --NAME and --no-NAME."""
    if get_args(kind):
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default is None else "store_true"}
    return {"nargs": 2, "metavar": ("A", "B")} if kind is tuple else {"type": kind}


def flags_of(cls, presets, description):
    """A Parser of which every field of a dataclass is a flag, its comment the help. presets:
    {name: {field: its default there}}, for the help alone."""
    parser = Parser(description=description, argument_default=argparse.SUPPRESS)
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    for f in dataclasses.fields(cls):
        values = [] if f.default is None or f.type is bool else [str(f.default)]
        values += [f"{name}: {its[f.name]}" for name, its in presets.items() if f.name in its]
        text = comments[f.name] + (f" [{'; '.join(values)}]" if values else "")
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"),
                            **options_of(f.type, f.default))
    return parser


# Parameters from which on more threads pay on a CPU. Two, at 0.3 M and 10 M: a forward and backward
# pass takes 0.65 and 0.51 of one thread's time; beside a busy process, 4.8 and 2.2 times of it.
THREADS_PAY = 10 ** 7


def choose_threads(model):
    """Of a script, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < THREADS_PAY:
        torch.set_num_threads(1)


LINE_EVERY = 60.0  # seconds


@contextlib.contextmanager
def progress(what, total=None, unit=None):
    """-> a tqdm bar, of rank 0 alone; without a unit, it only says how long it has taken. Where the
    screen is no terminal but a file, it is a line a minute."""
    terminal, over = sys.stderr.isatty(), threading.Event()
    with open(os.devnull, "w") as nowhere:
        bar = tqdm(desc=what, total=total, unit=f" {unit}", unit_scale=unit == "tokens",
                   leave=False, bar_format=None if unit else "{desc} [{elapsed}]",
                   file=sys.stderr if terminal and rank() == 0 else nowhere)

        def tell():  # also while nothing is counted
            while not over.wait(1.0 if terminal else LINE_EVERY):
                if terminal:
                    bar.refresh()
                else:
                    line = bar.format_meter(**bar.format_dict | {"ncols": 0})
                    print(" ".join(line.split()), file=sys.stderr, flush=True)

        telling = threading.Thread(target=tell, daemon=True)
        if rank() == 0:
            telling.start()
        try:
            yield bar
        finally:
            over.set()
            if rank() == 0:
                telling.join()
            bar.close()


def out_of_memory(error):
    """Whether an error says that memory is short. cuBLAS, NCCL and the CPU's allocator say so by a
    RuntimeError of their own."""
    says = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in says)


def in_one_line(error):
    """An error's message with a remedy."""
    if out_of_memory(error):
        what, _, _ = str(error).partition("\n")
        return ("out of memory. In an update or a scoring pass: a lower --tokens_per_micro_batch; "
                "in an update: --checkpointing; in a rollout: fewer --rows or a lower "
                "--max_prompt; anywhere: --moments bfloat16, or more ranks. A run takes all of "
                f"these with --resume too ({what})")
    package = getattr(error, "name", None) if isinstance(error, ImportError) else None
    return f"{error}; pip install {package}" if package else str(error)


@contextlib.contextmanager
def one_line_errors(script, *known):
    """An error that the user can mend ends the script with one line, or a traceback where DEBUG is
    set. known: such errors beside the usual ones. SIGTERM does what Ctrl-C does. Modules are looked
    for in the working directory as well."""
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    if hasattr(sys.stdout, "reconfigure"):  # no run ends for a letter that the screen lacks
        sys.stdout.reconfigure(errors="replace")
    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty() or rank() > 0:
        transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except Exception as error:
        if os.environ.get("DEBUG") or not out_of_memory(error) and not isinstance(error, (
                ValueError, OSError, ImportError, *known)):
            raise
        sys.exit(f"{script}: {in_one_line(error)}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    finally:  # after an error NCCL would wait here for ranks that wait elsewhere, without a word
        if dist.is_initialized() and (dist.get_backend() == "gloo" or not sys.exc_info()[0]):
            dist.destroy_process_group()
