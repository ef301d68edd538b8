"""The command line: flags, progress bars, and errors in one line with a remedy."""
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

from runtime.distributed import rank


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, which raises ValueError instead of printing the usage."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(message)


def argparse_options(kind, default=None) -> dict:
    """The keyword arguments of add_argument() for a flag of this type: a Literal, bool, tuple (two
    values), list (any number of them), or a function of a string. A bool whose default is None can
    also be negated with --no-NAME."""
    if get_args(kind):
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default is None else "store_true"}
    if kind is tuple:
        return {"nargs": 2, "metavar": ("A", "B")}
    if kind is list:
        return {"nargs": "*"}
    return {"type": kind}


def file_path(text) -> str:
    """A path that is given, with the home folder in place of ~ at its beginning. ValueError: there
    is no such home folder, or no path can be so."""
    name = os.path.expanduser(text)
    if not name:
        raise ValueError("it is empty, and must be a name")
    if name.startswith("~"):
        raise ValueError(f"there is no such home folder; for a folder of this name, write ./{name}")
    if "\0" in name:
        raise ValueError("a path cannot contain a null byte")
    return name


def parser_for(cls, description: str) -> Parser:
    """A Parser with a flag for every field of a dataclass. The comment behind a field, which may
    continue on the next lines, is the flag's help, to which the field's default is added."""
    parser = Parser(description=description, argument_default=argparse.SUPPRESS)
    found = re.findall(r"^    (\w+): .*?  # (.*(?:\n {8,}# .*)*)$", inspect.getsource(cls), re.M)
    comments = {name: re.sub(r"\n +# ", " ", text) for name, text in found}
    for f in dataclasses.fields(cls):
        hidden = f.default is None or f.type is bool
        text = comments[f.name] + ("" if hidden else f" [{f.default}]")
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"),
                            **argparse_options(f.type, f.default))
    return parser


LARGE = 10 ** 9  # its square is finite in float32


def check_ranges(settings, ranges) -> None:
    """Each range is (smallest, largest, names of settings, separated by blanks). ValueError: a
    setting that is not None is outside its range."""
    for low, high, names in ranges:
        for name in names.split():
            value = getattr(settings, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"--{name} must be at least {low} and at most {high}; it is "
                                 f"{value}")


# Models with fewer parameters run in one thread on a CPU. With two threads instead of one, a
# forward and backward pass takes 0.65 of the time at 0.3 M parameters and 0.51 at 10 M; but beside
# another busy process it takes 4.8 and 2.2 times as long.
MULTITHREADED_FROM = 10 ** 7


def choose_threads(model) -> None:
    """Sets the number of torch's threads in this process, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < MULTITHREADED_FROM:
        torch.set_num_threads(1)


SECONDS_PER_LINE = 60.0


@contextlib.contextmanager
def progress(label: str, total: int | None = None, unit: str | None = None, initial: int = 0):
    """A tqdm bar on rank 0; without a unit, it only shows the time. `initial` units were done
    before. If stderr is not a terminal, a line is printed every minute instead."""
    terminal, over = sys.stderr.isatty(), threading.Event()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        bar = tqdm(desc=label, total=total, initial=initial, unit=f" {unit}",
                   unit_scale=unit == "tokens", leave=False,
                   bar_format=None if unit else "{desc} [{elapsed}]",
                   file=sys.stderr if terminal and rank() == 0 else nowhere)

        def tell():  # even while nothing is counted
            while not over.wait(1.0 if terminal else SECONDS_PER_LINE):
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


def out_of_memory(error) -> bool:
    """Whether an error is due to a lack of memory. cuBLAS, NCCL and the CPU's allocator raise a
    plain RuntimeError."""
    signs = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in signs)


def in_one_line(error) -> str:
    """The message of an error, with a remedy."""
    text = " ".join(str(error).splitlines())
    if out_of_memory(error):
        first, _, _ = str(error).partition("\n")
        return ("out of memory. In an update or a scoring pass, lower --tokens_per_micro_batch; in "
                "an update, --gradient_checkpointing helps; in a rollout, lower --max_num_seqs or "
                "--max_prompt; in general, --optim_state_dtype bfloat16 or more ranks help. All of "
                f"these are allowed with --resume ({first})")
    package = getattr(error, "name", None) if isinstance(error, ImportError) else None
    return f"{text}; pip install {package}" if package else text


@contextlib.contextmanager
def one_line_errors(script: str, *known):
    """Ends a script with one line instead of a traceback where the user can mend the error, unless
    DEBUG is set. `known`: exceptions of that kind besides the usual ones. SIGTERM acts like Ctrl-C,
    and modules are also imported from the working directory."""
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    if hasattr(sys.stdout, "reconfigure"):  # for terminals that lack a character
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
    finally:  # after an error, destroying NCCL's group would wait for the other ranks forever
        if dist.is_initialized() and (dist.get_backend() == "gloo" or not sys.exc_info()[0]):
            dist.destroy_process_group()
