"""A pool of processes that play an environment's games, and the checks of what it answers.

    pool = WorkerPool("envs:make_env", name, env_class(name), workers=4)       is envs.Pool
    pool.start(key, task);  pool.step(key, action);  pool.gather(keys)

"envs:make_env" names the function that makes an environment. Every process imports it by that name,
so nothing here imports an environment or torch, and worker processes start quickly. The file reads
from the checks of an answer to the worker that gives it and the pool that asked for it.
"""
import contextlib
import copy
import functools
import itertools
import json
import math
import numbers
import os
import pkgutil
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe


class GameError(RuntimeError):
    """An environment failed, or its worker died again and again. The message names the game."""


# ------------------------------------------------------------------ what an environment answers

# These return an answer's parts as Python's own types. ValueError: a part is not what it should be.

def as_text(value, what):
    """A string or number as a string, without lone surrogates, which cannot be encoded."""
    if not isinstance(value, (str, numbers.Number)):
        raise ValueError(f"{what} is {value!r}, not a string")
    return str(value).encode("utf-8", "replace").decode()


def as_number(value, what):
    value = as_python(value)
    if not isinstance(value, numbers.Real) or not abs(value) < 1e38:  # infinite in float32
        raise ValueError(f"{what} is {value!r}, not a finite number")
    return float(value)


def as_bool(value, what):
    if value not in (True, False):
        raise ValueError(f"{what} is {value!r}, not True or False")
    return bool(value)


def as_action(value):
    """A copy of what JSON can hold, without lone surrogates."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


@functools.lru_cache(1 << 16)
def as_command(command, env):
    """A command that the class of the environment reads as it is."""
    action, valid = env.parse_action(env.format_response("", command))
    if not valid or action != command:
        why = ("commands must be without blanks at their ends, in lower case where parse_action "
               "lower-cases, and such that parse_action reads what format_response writes"
               if valid else "and the response would count as invalid")
        raise ValueError(f"no response can give the command {command!r}: it would be read as "
                         f"{action!r}, {why}")
    return command


def as_python(value):
    """A Python value for a NumPy value, which could not be written as JSON."""
    return value.item() if hasattr(value, "item") else value


def as_observation(obs, env, begins):
    """Text, or chat messages of which each comes from the environment. `begins`: it is the first
    observation of a game. What is longer than env.max_observation is cut."""
    if isinstance(obs, (str, numbers.Number)):
        return shortened(as_text(obs, "obs"), env.max_observation)
    if not isinstance(obs, (list, tuple)) or not obs:
        raise ValueError(f"obs is {obs!r:.200}, not a string or a list of chat messages")
    roles = ("user",) if begins else ("user", "tool")
    messages = []
    for message in obs:
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise ValueError(f"obs has the message {message!r:.200}; a message must be "
                             '{"role": ..., "content": ...}')
        role = message["role"]
        system = role == "system" and begins and not messages and not env.system
        if role not in roles and not system:
            raise ValueError(
                f"obs has a message of {role!r} where only {' and '.join(roles)} can speak: "
                "a game may begin with a message of system, if the class has no `system`, then "
                "comes user; what follows a response is of user or tool; the model is assistant")
        content = as_text(message["content"], f"the content of a message of {role}")
        messages.append({"role": role, "content": shortened(content, env.max_observation)})
    if messages[-1]["role"] == "system":
        raise ValueError("obs has a message of system, but none of user")
    return messages


def shortened(text, limit):
    """The text, or its first `limit` characters and how many were left out."""
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}... [{len(text) - limit} characters left out]"


def obs_text(obs) -> str:
    """An observation as one text."""
    return obs if isinstance(obs, str) else "\n\n".join(m["content"] for m in obs)


def as_info(info, env, task, category, won):
    """An info with all of its parts. `task`, `category` and `won`: what they are unless info has
    them."""
    if not isinstance(info, Mapping):
        raise ValueError(f"info is {info!r}, not a dict")
    commands = info.get("admissible")
    if isinstance(commands, (set, frozenset)):
        commands = sorted(commands)  # a set has no order of its own
    if isinstance(commands, str):
        raise ValueError(f"admissible is {commands!r}, not a list of commands")
    if commands is not None:
        commands = [as_command(as_text(c, "a command"), type(env)) for c in commands]
    category = as_python(info.get("category", category))
    if (not isinstance(category, (str, int, float, type(None)))
            or isinstance(category, float) and not math.isfinite(category)):
        raise ValueError(f"category is {category!r}, not a string, a finite number or None")
    won = as_bool(info.get("won", won), "won")
    score = as_number(info.get("score", won), "score")
    if not -1e-6 <= score <= 1 + 1e-6:  # rounding may exceed 1
        raise ValueError(f"score is {score}, not a number from 0 to 1")
    return {"admissible": commands, "task": as_text(info.get("task", task), "task"),
            "category": as_action(category), "won": won, "score": score}


def parts_of(answer, method, names):
    """What a method returned, after checking that it has as many parts as there are names."""
    if not isinstance(answer, (tuple, list)) or len(answer) != len(names.split(", ")):
        raise ValueError(f"{method} must return ({names}), and returned {answer!r:.200}")
    return answer


# ------------------------------------------------------------------------------------- a worker

@dataclass
class Played:
    """What a worker knows of a game that it plays."""

    env: object
    first: dict  # its first info
    turns: int = 0
    total: float = 0.0  # the rewards so far


class EnvWorker:
    """Plays many games, by number, in one process: the worker's side of the pool."""

    def __init__(self, make, name, options):
        self.make_env = functools.partial(pkgutil.resolve_name(make), name, **options)
        # the numbers of all games loaded so far. Requests to load are handled last, so one may be
        # handled after its game was started; it must then do nothing
        self.loaded = set()
        self.ready = {}  # loaded but not started: (environment, obs, info)
        self.playing = {}  # games that are being played
        self.spare = []  # environments that can be used again
        self.made = []  # all environments
        self.folders = {}  # the working directory of each, by its id()

    def load(self, number, task):
        if number not in self.loaded:
            if not self.spare:
                with self.folder_of(None):
                    self.spare.append(self.make_env())
                self.made.append(self.spare[-1])
                self.folders[id(self.spare[-1])] = self.folders.pop(id(None))
            env = self.spare.pop()
            with self.folder_of(env):
                answer = env.reset(task)
            self.ready[number] = env, *parts_of(answer, "reset()", "obs, info")
            self.loaded.add(number)

    def start(self, number, task):
        self.load(number, task)
        env, obs, info = self.ready.pop(number)
        obs = as_observation(obs, env, begins=True)
        info = as_info(info, env, task=obs_text(obs), category=None, won=False)
        self.playing[number] = Played(env, info)
        return obs, info

    def step(self, number, action):
        game = self.playing[number]
        with self.folder_of(game.env):
            answer = game.env.step(copy.deepcopy(action))
        obs, reward, terminated, truncated, info = parts_of(
            answer, "step()", "obs, reward, terminated, truncated, info")
        reward = as_number(reward, "reward")
        game.turns += 1
        game.total += reward
        terminated, truncated = as_bool(terminated, "terminated"), as_bool(truncated, "truncated")
        truncated = truncated or not terminated and game.turns >= game.env.horizon
        over = terminated or truncated
        if over:
            self.drop(number)
        obs = as_observation(obs, game.env, begins=False)
        info = as_info(info, game.env, game.first["task"], game.first["category"],
                       won=over and game.total > 0)
        return obs, reward, terminated, truncated, info

    @contextlib.contextmanager
    def folder_of(self, env):
        """Within this context, the working directory is that of the environment. If it goes
        elsewhere, the other games and the rest of this process stay where they are."""
        here = working_directory()
        go_to(self.folders.get(id(env)) or here)
        try:
            yield
        finally:
            self.folders[id(env)] = working_directory()
            go_to(here)

    def drop(self, number, argument=None):
        if number in self.playing:
            self.spare.append(self.playing.pop(number).env)

    def close(self):
        """Ends all environments, by the method close() of those that have it."""
        for env in self.made:
            if error := self.execute(None, [("close_env", env)]):
                print(f"close() of an environment failed: {error}", file=sys.stderr, flush=True)
        for kept in self.ready, self.playing, self.spare, self.made:
            kept.clear()

    def close_env(self, number, env):
        if callable(getattr(env, "close", None)):
            with self.folder_of(env):
                env.close()

    def execute(self, number, requests, begins=lambda left: None):
        """The answer to the last of the requests, or a GameError, because not every exception can
        be pickled. When one begins, begins(the number of those that are left) is called."""
        try:
            for n, (op, argument) in enumerate(requests, 1):
                begins(len(requests) - n)
                answer = getattr(self, op)(number, argument)
            return answer
        except ctrl_c():
            raise
        except BaseException as error:
            return GameError(in_words(error))


def in_words(error):
    """The exception that is being handled: its type, its text, and where it was raised."""
    *_, (frame, line) = traceback.walk_tb(sys.exc_info()[2])
    try:
        text = str(error)
    except BaseException:
        text = "(it cannot be printed)"
    text = " ".join(text.split())  # in one line
    return f"{type(error).__name__}: {text:.1000} ({frame.f_code.co_filename}:{line})"


def working_directory():
    """The path of the working directory; None: somebody has deleted it."""
    try:
        return os.getcwd()
    except OSError:
        return None


def go_to(folder):
    """Changes the working directory, unless it is this one, or that is not possible."""
    if folder and folder != working_directory():
        with contextlib.suppress(OSError):
            os.chdir(folder)


def ctrl_c():
    """The exception that Ctrl-C raises, which is no failure of a game. It raises none in a worker,
    nor where training handles signals, so that KeyboardInterrupt there comes from a game."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return KeyboardInterrupt if raises else ()


in_worker = False  # whether this is a worker process
GRACE = 5.0  # seconds that environments get to end what they do, and for their close()


def kill_group(pid):
    """Kills a worker and all processes that its environments started, and have not put into a
    session of their own."""
    with contextlib.suppress(OSError):  # all have ended
        os.killpg(pid, signal.SIGKILL)


def worker_main(fd):
    """A worker process: answers requests until its parent closes the pipe, or dies. When it begins
    with a request, it sends how many are left that it got together with it."""
    global in_worker
    in_worker, pid = True, os.getpid()
    signal.signal(signal.SIGINT, lambda *_: None)  # a game may send it to itself
    os.set_inheritable(fd, False)  # or the pipe would stay open as long as what games start
    for stream in sys.stdout, sys.stderr:  # no game fails because its print lacks a character
        if hasattr(stream, "reconfigure"):  # it may be closed, or replaced
            stream.reconfigure(errors="backslashreplace")
    conn, messages = Connection(fd), queue.PriorityQueue()
    worker = EnvWorker(*conn.recv())

    def read():
        try:
            for n in itertools.count():
                number, requests, wants_answer = conn.recv()
                messages.put((requests[0][0] == "load", n, number, requests, wants_answer))
        finally:
            messages.put((False, -1, None, None, False))  # comes next
            time.sleep(GRACE)
            kill_group(os.getpid())

    # a thread always reads what the parent sends: with both pipes full, both sides would hang
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(OSError):  # while it sends, the parent may end
        while True:
            *_, number, requests, wants_answer = messages.get()  # loads come last
            if not requests:
                break
            answer = worker.execute(number, requests, lambda left: conn.send((number, left)))
            if os.getpid() != pid:  # a game has forked, and this is its child
                os._exit(0)
            if wants_answer:
                conn.send((number, answer))
    worker.close()
    kill_group(os.getpid())


# ------------------------------------------------------------------------------------- the pool

def processes_per_rank() -> int:
    """How many workers a rank starts: a machine's cores, at most 16, shared among its ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(16, cores) // ranks)


def is_importable(env) -> bool:
    """Whether another process can import an environment, a name or a class."""
    if isinstance(env, type):
        env = f"{env.__module__}:{env.__qualname__}"
    return not env.startswith("__main__:") and "<locals>" not in env


def importable_name(env) -> str:
    """The name by which worker processes can import an environment. ValueError: there is none."""
    if isinstance(env, type):
        env = f"{env.__module__}:{env.__qualname__}"
    if not is_importable(env):
        raise ValueError(f"worker processes cannot import {env}: put the class into a module, or "
                         "use workers=0 to play in this process")
    return env


@dataclass
class OpenGame:
    """What the parent knows of a game."""

    worker: int
    task: str
    requests: list = field(default_factory=list)  # all (op, argument), to replay them if need be
    answer: tuple = None  # to the last request; None: not there yet
    order: int = 0  # of the last request, among those of all games
    info: dict = None  # of the last answer
    losses: int = 0  # how many workers were lost in its last request
    number: int = field(default_factory=itertools.count().__next__)  # never used twice

    @property
    def when(self):
        """In which turn its last request is; the first one is to start."""
        return f" in turn {len(self.requests) - 1}" if len(self.requests) > 1 else ""


class WorkerPool:
    """Plays games of an environment side by side in `workers` processes, or with 0 in this one.
    `make` is the name of a function, to which `name` (a name or a class) and `options` are given;
    `env` is the environment's class. The caller chooses the games' keys.

        pool.load(tasks)            loads games in the background, while the model is busy
        pool.start(key, task); pool.step(key, action)
        pool.parse_action(text)     a response -> (action, valid)
        pool.gather(keys)           their answers, in order: (obs, info), or the five of step()
        pool.drop(key)              gives up an unfinished game

    A worker that dies, or does not answer within the environment's `patience`, is replaced and its
    games are replayed; the caller does not notice. A GameError names a game that fails, or the
    games that waited when a worker was lost for the fourth time in a row.

    With the environment's `step_may_kill`, a game in whose step that happens twice ends there, as
    lost, with a warning. A GameError says so when that was so with `max_lost` games in a row, and
    no step was answered meanwhile: then it is not the actions."""

    remedy = ""  # what a GameError says behind the failure, with {} for the game
    max_lost = 32
    warn_after = 60  # seconds without an answer after which the games are named

    def __init__(self, make, name, env, options=None, workers=0):
        if workers < 0:
            raise ValueError(f"workers is {workers}; it must be 0 or more")
        if workers and in_worker:
            raise ValueError("a worker process cannot start workers: it has imported a module that "
                             "does so; put that below `if __name__ == \"__main__\":`")
        self.make = make
        self.env = env
        self.options = options or {}
        self.local = None if workers else EnvWorker(make, name, self.options)
        self.name = importable_name(name) if workers else getattr(name, "__name__", name)
        # by worker: process, pipe, how often it was lost since its last answer
        self.procs, self.conns, self.losses = [None] * workers, [None] * workers, [0] * workers
        # the number of the game that each is at, and how many requests are left of it
        self.at_work = [(None, 0)] * workers
        self.lost = 0  # games that ended as lost since a step was answered
        self.games = {}  # by key
        self.loading = {}  # task: games that are being loaded
        self.loaders = itertools.cycle(range(workers))
        self.order = itertools.count()
        self.seconds = 0.0  # spent on games or waiting for them
        for w in range(workers):
            self.spawn(w)

    # ---- what the caller uses
    def load(self, tasks):
        for task in tasks if self.procs else ():
            loading = self.loading.setdefault(task, [])
            while len(loading) < tasks.count(task):
                game = OpenGame(next(self.loaders), task)
                loading.append(game)
                self.send(game, [("load", task)])

    def start(self, key, task):
        if key in self.games:
            self.drop(key)
        if self.loading.get(task):
            game = self.loading[task].pop(0)
        else:
            busy = [game.worker for game in self.games.values()]
            game = OpenGame(min(range(len(self.procs)), key=busy.count, default=0), task)
        self.games[key] = game
        self.ask(game, "start", task)

    def step(self, key, action):
        self.ask(self.games[key], "step", action)

    def gather(self, keys):
        games = [self.games[key] for key in keys]
        for game in games:
            while game.answer is None:
                self.receive(game.worker)
        for key, game in zip(keys, games):
            if isinstance(game.answer, GameError):
                raise GameError(f"{self.name}: game {game.task} failed{game.when}: {game.answer}"
                                f"{self.remedy_for(game)}")
            if any(game.answer[2:4]):  # terminated or truncated
                del self.games[key]
        return [game.answer for game in games]

    def parse_action(self, text):
        """A response -> (action, valid), by the environment."""
        try:
            answer = parts_of(self.env.parse_action(text), "parse_action()", "action, valid")
            return as_action(answer[0]), as_bool(answer[1], "valid")
        except ctrl_c():
            raise
        except BaseException as error:
            raise GameError(f"{self.name}: parse_action must return (action, valid) for every "
                            f"response, and for {text!r:.200} it fails: {in_words(error)}"
                            ) from None

    def drop(self, key):
        game = self.games.pop(key)
        self.send(game, [("drop", None)])

    def close(self):
        """Ends the environments, the workers, and the processes that they started."""
        if self.local:
            self.local.close()
        for conn in self.conns:
            conn.close()
        deadline = time.time() + GRACE
        while self.procs:
            self.end(self.procs.pop(), deadline - time.time())

    def end(self, proc, seconds=0):
        """Waits so long for a worker to end, then kills it and what it leaves."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            proc.wait(max(0, seconds))
        kill_group(proc.pid)
        proc.wait()

    # ---- messages
    def ask(self, game, op, argument):
        game.requests.append((op, argument))
        game.answer, game.order, game.losses = None, next(self.order), 0
        self.send(game, game.requests[-1:], wants_answer=True)

    def send(self, game, requests, wants_answer=False):
        """Sends requests to a worker, or executes them in this process."""
        start = time.time()
        if self.local:
            game.answer = self.local.execute(game.number, requests)
        else:
            with contextlib.suppress(OSError):  # receive() notices a dead worker
                self.conns[game.worker].send((game.number, requests, wants_answer))
        self.seconds += time.time() - start

    def receive(self, w):
        """Waits for a worker's next answer; replaces the worker if it is dead or hangs."""
        start = time.time()
        try:
            patience, first = self.env.patience, min(self.warn_after, self.env.patience)
            if not self.answers(w, first):
                print(f"{self.name}: no answer for {first} seconds in {self.unanswered(w)}",
                      file=sys.stderr, flush=True)
                if not self.answers(w, patience - first):
                    return self.replace(w, f"gave no answer for {patience} seconds")
            number, answer = self.conns[w].recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.procs[w].wait(1)  # to know its exit status
            return self.replace(w, f"died with status {self.procs[w].returncode}")
        self.seconds += time.time() - start
        begins = isinstance(answer, int)
        self.at_work[w] = (number, answer) if begins else (None, 0)
        for game in self.games.values():  # it may have been dropped
            if game.number == number and not begins:
                game.answer = answer
                self.losses[w] = 0
                if isinstance(answer, tuple):
                    game.info = answer[-1]
                    self.lost = 0 if len(answer) == 5 else self.lost

    def answers(self, w, seconds):
        """Whether a worker sends something within so many seconds. EOFError: it is dead. The end
        of its pipe would not say so while a child of it has the pipe, too."""
        end = time.monotonic() + seconds
        while not self.conns[w].poll(max(0.0, min(1.0, end - time.monotonic()))):
            if self.procs[w].poll() is not None and not self.conns[w].poll():
                raise EOFError
            if time.monotonic() >= end:
                return False
        return True

    # ---- the workers
    def spawn(self, w):
        """Starts a new interpreter with this file; a fork would copy torch and its threads. It has
        its own session, so that Ctrl-C does not reach it before the caller has finished."""
        self.conns[w], child_end = Pipe()
        fd = child_end.fileno()
        path = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *sys.path]
        path = [str(os.fsdecode(x)) for x in path if isinstance(x, (str, bytes, os.PathLike))]
        code = (f"import sys; sys.path[:] = {path!r}; "  # the environment may be anywhere
                f"from runtime.workers import worker_main; worker_main({fd})")
        command = [sys.executable, "-Wignore:webshop", "-c", code]  # the parent has warned already
        self.procs[w] = subprocess.Popen(command, pass_fds=[fd], start_new_session=True,
                                         stdin=subprocess.DEVNULL)
        self.conns[w].send((self.make, self.name, self.options))
        self.at_work[w] = None, 0
        child_end.close()

    def games_of(self, w):
        """A worker's games, in the order of their last requests."""
        return sorted((game for game in self.games.values() if game.worker == w),
                      key=lambda game: game.order)

    def remedy_for(self, game):
        return self.remedy.format(shlex.quote(str(game.task)))

    def unanswered(self, w):
        """The first few games that wait for a worker, which is at work on the first of them."""
        return [game.task for game in self.games_of(w) if game.answer is None][:4]

    def replace(self, w, why):
        """Starts another worker in the place of a lost one and replays its games."""
        step = next((game for game in self.games_of(w) if (game.number, 0) == self.at_work[w]
                     and game.answer is None and len(game.requests) > 1), None)
        if self.env.step_may_kill and step:
            step.losses += 1
            if step.losses == 2:
                self.lose(step, why)
        else:
            self.losses[w] += 1
        if self.losses[w] > 3:
            game = next(game for game in self.games_of(w) if game.answer is None)
            raise GameError(f"{self.name}: a worker {why}, the fourth one lost in a row, at game "
                            f"{game.task}{game.when}. These games waited: {self.unanswered(w)}"
                            f"{self.remedy_for(game)}")
        self.end(self.procs[w])
        self.conns[w].close()
        self.spawn(w)
        for game in self.games_of(w):
            if game.losses < 2:
                self.send(game, game.requests, wants_answer=game.answer is None)

    def lose(self, game, why):
        """Ends a game as lost, because its last action has cost two workers."""
        what = f"its worker {why}, and so did the next one in the same step"
        _, action = game.requests[-1]
        print(f"{self.name}: game {game.task} is lost{game.when}: {what}. The action was "
              f"{action!r:.300}", file=sys.stderr, flush=True)
        game.answer = (f"The episode is over: {what}.", 0.0, True, False,
                       game.info | {"won": False, "score": 0.0})
        self.lost += 1
        if self.lost == self.max_lost:
            raise GameError(f"{self.name}: {self.lost} games in a row were lost, the last one game "
                            f"{game.task}{game.when}: {what}. No step was answered meanwhile, so "
                            "it is probably not the actions, but the environment")
