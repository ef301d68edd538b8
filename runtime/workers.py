"""A pool of processes that play an environment's games.

    pool = WorkerPool("envs:make_env", name, env_class(name), workers=4)       is envs.Pool
    pool.start(key, task);  pool.step(key, action);  pool.gather(keys)

"envs:make_env" names the function that makes an environment. Every process imports it by that name,
so nothing here imports an environment or torch, and worker processes start quickly. The file reads
from the worker, which plays games, to the pool, which tells it what to play, replaces it if it dies
or hangs, and finds out which game was guilty. What environments answer is checked in answers.py.
"""
import contextlib
import copy
import functools
import itertools
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler

from runtime.answers import (as_action, as_bool, as_info, as_number, as_observation, obs_text,
                             parts_of)


class GameError(RuntimeError):
    """An environment failed, or its worker died again and again. The message names the game."""


# ------------------------------------------------------------------------------------- a worker

@dataclass
class Played:
    """What a worker knows of a game that it plays."""

    env: object
    first: dict  # its first info
    turns: int = 0
    total: float = 0.0  # the rewards so far
    metrics: dict = field(default_factory=dict)  # the latest value of each


class EnvWorker:
    """Plays many games, by number, one call after the other: the worker's side of the pool.
    `own_folders`: whether each environment has a working directory of its own."""

    def __init__(self, make, name, options, own_folders=True):
        self.make_env = functools.partial(pkgutil.resolve_name(make), name, **options)
        self.own_folders = own_folders
        # the numbers of all games loaded so far. Requests to load are handled last, so one may be
        # handled after its game was started; it must then do nothing
        self.loaded = set()
        self.ready = {}  # loaded but not started: (environment, obs, info)
        self.playing = {}  # games that are being played
        self.spare = []  # environments that can be used again
        self.made = []  # all environments
        self.folders = {}  # of each, by its id()

    def load(self, number, task):
        if number not in self.loaded:
            env = self.spare.pop() if self.spare else self.new_env()
            with self.folders[id(env)]:
                answer = env.reset(task)
            self.ready[number] = env, *parts_of(answer, "reset()", "obs, info")
            self.loaded.add(number)

    def new_env(self):
        folder = Folder() if self.own_folders else contextlib.nullcontext()
        with folder:
            env = self.make_env()
        self.made.append(env)
        self.folders[id(env)] = folder
        return env

    def start(self, number, task):
        self.load(number, task)
        env, obs, info = self.ready.pop(number)
        obs = as_observation(obs, env, begins=True)
        info = as_info(info, env, task=obs_text(obs), category=None, won=False)
        self.playing[number] = Played(env, info, metrics=info.get("metrics", {}))
        return obs, info

    def step(self, number, action):
        game = self.playing[number]
        with self.folders[id(game.env)]:
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
                       won=game.total > 0, metrics=game.metrics)
        game.metrics = info.get("metrics", {})
        return obs, reward, terminated, truncated, info

    def drop(self, number, argument=None):
        if number in self.playing:
            self.spare.append(self.playing.pop(number).env)

    def close(self):
        """Ends all environments, by the method close() of those that have it."""
        for env in self.made:
            if error := self.execute(None, "close_env", env):
                print(f"close() of an environment failed: {error}", file=sys.stderr, flush=True)
        for kept in self.ready, self.playing, self.spare, self.made:
            kept.clear()

    def close_env(self, number, env):
        if callable(getattr(env, "close", None)):
            with self.folders[id(env)]:
                env.close()

    def execute(self, number, op, argument):
        """The answer to a request, or a GameError, because not every exception can be pickled."""
        try:
            return getattr(self, op)(number, argument)
        except ctrl_c():
            raise
        except BaseException as error:
            return GameError(in_words(error))

    def serve(self, tell, number, requests, wanted):
        """Executes requests, up to one that fails, and tells the parent what it is at: tell(
        "begins", number, whether the parent waits for this request) before each of them, and
        tell("ends", number, answer) after them, with None unless the last answer is `wanted`."""
        for n, request in enumerate(requests, 1):
            tell("begins", number, wanted and n == len(requests))
            answer = self.execute(number, *request)
            if isinstance(answer, GameError):
                break
        tell("ends", number, answer if wanted else None)


class GameThreads:
    """Plays the games of an asynchronous environment, each in a thread of its own, so that none
    waits for another. A thread makes an environment, and is the only one that ever calls it. When
    its game is over, it takes the next."""

    def __init__(self, tell, *made):
        self.tell = tell
        self.made = made  # the arguments of EnvWorker
        self.changed = threading.Condition()  # of all below
        self.busy = 0  # the number of requests that are not done
        self.inboxes = {}  # of the threads that play a game, by its number
        self.free = []  # inboxes of the others
        self.threads = {}  # all, by inbox

    def serve(self, number, requests, wanted, alone):
        """Hands requests to the thread of their game. `alone`: when nothing else is at work, and
        returns when they are done."""
        with self.changed:
            self.changed.wait_for(lambda: not (alone and self.busy))
            if number not in self.inboxes:
                self.inboxes[number] = self.free.pop() if self.free else self.start_thread()
            self.inboxes[number].put((number, requests, wanted))
            self.busy += 1
            self.changed.wait_for(lambda: not (alone and self.busy))

    def start_thread(self):
        inbox = queue.SimpleQueue()
        worker = EnvWorker(*self.made, own_folders=False)  # a process has one working directory
        self.threads[inbox] = threading.Thread(target=self.play, args=(inbox, worker), daemon=True)
        self.threads[inbox].start()
        return inbox

    def play(self, inbox, worker):
        while message := inbox.get():
            number, *_ = message
            worker.serve(self.tell, *message)
            with self.changed:
                if inbox.empty() and not worker.ready and not worker.playing:  # the game is over
                    del self.inboxes[number]
                    self.free.append(inbox)
                self.busy -= 1
                self.changed.notify_all()
        worker.close()

    def close(self):
        """Ends all environments, unless they need longer than they have."""
        for inbox in self.threads:
            inbox.put(None)
        deadline = time.monotonic() + GRACE
        for thread in self.threads.values():
            thread.join(max(0, deadline - time.monotonic()))


class Folder:
    """An environment's working directory, which is that of the process within this context. If the
    environment goes elsewhere, the other games and the rest of this process stay where they are."""

    path = None

    def __enter__(self):
        self.outside = working_directory()
        go_to(self.path)

    def __exit__(self, *_):
        self.path = working_directory()
        go_to(self.outside)


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


def in_words(error):
    """The exception that is being handled: its type, its text, and where it was raised."""
    *_, (frame, line) = traceback.walk_tb(sys.exc_info()[2])
    try:
        text = str(error)
    except BaseException:
        text = "(it cannot be printed)"
    text = " ".join(text.split())  # in one line
    file = frame.f_code.co_filename
    # (what answers.py raises is about an answer, and not about the line that found it out)
    where = "" if os.path.basename(file) == "answers.py" else f" ({file}:{line})"
    return f"{type(error).__name__}: {text:.1000}{where}"


def ctrl_c():
    """The exception that Ctrl-C raises, which is no failure of a game. It raises none in a worker,
    nor where training handles signals, so that KeyboardInterrupt there comes from a game."""
    # (SIGTERM raises it, too, in a script, also where a shell's background job ignores Ctrl-C)
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    return KeyboardInterrupt if signal.default_int_handler in handlers else ()


in_worker = False  # whether this is a worker process
GRACE = 5.0  # seconds that environments get to end what they do, and for their close()


def kill_group(pid):
    """Kills a worker and all processes that its environments started, and have not put into a
    session of their own."""
    with contextlib.suppress(OSError):  # all have ended
        os.killpg(pid, signal.SIGKILL)


def worker_main(fd):
    """A worker process: serves requests until its parent closes the pipe, or dies."""
    global in_worker
    in_worker, pid = True, os.getpid()
    signal.signal(signal.SIGINT, lambda *_: None)  # a game may send it to itself
    os.set_inheritable(fd, False)  # or the pipe would stay open as long as what games start
    for stream in sys.stdout, sys.stderr:  # no game fails because its print lacks a character
        if hasattr(stream, "reconfigure"):  # it may be closed, or replaced
            stream.reconfigure(errors="backslashreplace")
    conn, sending, messages = Connection(fd), threading.Lock(), queue.PriorityQueue()
    the_end = (False, -1)  # comes before all other messages

    def read():
        try:
            for n in itertools.count():
                message = conn.recv()
                comes_last = message[1][0][0] == "load" and not asynchronous
                messages.put((comes_last, n, *message))
        finally:
            messages.put(the_end)
            time.sleep(GRACE)
            kill_group(pid)

    def tell(*message):
        if os.getpid() != pid:  # a game has forked, and this is its child
            os._exit(0)
        try:
            with sending:
                conn.send(message)
        except OSError:  # the parent has ended, or a game has closed the pipe
            messages.put(the_end)

    try:
        asynchronous, *made = conn.recv()
    except (EOFError, OSError):  # the parent has ended already
        return
    worker = GameThreads(tell, *made) if asynchronous else EnvWorker(*made)
    # a thread always reads what the parent sends: with both pipes full, both sides would hang
    threading.Thread(target=read, daemon=True).start()
    while (message := messages.get()) != the_end:
        *_, number, requests, wanted, alone = message
        if asynchronous:
            worker.serve(number, requests, wanted, alone)
        else:
            worker.serve(tell, number, requests, wanted)
    worker.close()
    kill_group(pid)


# ------------------------------------------------------------------------------------- the pool

def processes_per_rank() -> int:
    """How many workers a rank starts: a machine's cores, at most 16, shared among its ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(16, cores) // ranks)


def long_name(cls: str | type) -> str:
    """MODULE:CLASS of a class; a name stays what it is."""
    return f"{cls.__module__}:{cls.__qualname__}" if isinstance(cls, type) else cls


def is_importable(env: str | type) -> bool:
    """Whether another process can import an environment."""
    name = long_name(env)
    return not name.startswith("__main__:") and "<locals>" not in name


def importable_name(env: str | type) -> str:
    """The name by which worker processes can import an environment. ValueError: there is none."""
    if not is_importable(env):
        raise ValueError(f"worker processes cannot import {long_name(env)}: put the class into a "
                         "module, or use workers=0 to play in this process")
    return long_name(env)


@dataclass
class AtWork:
    """That a worker is at a request, or waits for one."""

    wanted: bool = False  # whether the parent waits for the answer to this very request
    since: float = field(default_factory=time.monotonic)  # when the parent learned of it
    warned: bool = False  # whether it was said that it takes long


class WorkerProcess:
    """A worker as the pool sees it: its process, its pipe, and what it is at."""

    def __init__(self, *made):
        self.made = made  # what worker_main needs
        self.losses = 0  # how often it was lost by nobody's fault since it gave an answer
        self.start()

    def start(self):
        """Starts a new interpreter with this file; a fork would copy torch and its threads. It has
        its own session, so that Ctrl-C does not reach it before the caller has finished."""
        self.conn, child_end = Pipe()
        fd = child_end.fileno()
        path = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *sys.path]
        path = [str(os.fsdecode(x)) for x in path if isinstance(x, (str, bytes, os.PathLike))]
        code = (f"import sys; sys.path[:] = {path!r}; "  # the environment may be anywhere
                f"from runtime.workers import worker_main; worker_main({fd})")
        command = [sys.executable, "-Wignore:webshop", "-c", code]  # the parent has warned already
        self.proc = subprocess.Popen(command, pass_fds=[fd], start_new_session=True,
                                     stdin=subprocess.DEVNULL)
        child_end.close()
        self.outbox = queue.SimpleQueue()
        threading.Thread(target=deliver, args=(self.conn, self.outbox), daemon=True).start()
        self.at_work = {}  # {number of a game: AtWork}; more than one if they are asynchronous
        self.send(*self.made)

    def send(self, *message):
        self.idle = AtWork()  # what it is at while it is at no game
        self.outbox.put(ForkingPickler.dumps(message))  # as it is now

    def answers(self):
        """The wanted answers that it has sent: (number of the game, answer). EOFError, OSError: it
        is dead. The end of its pipe would not say so while a child of it has the pipe, too."""
        while True:
            dead = self.proc.poll() is not None  # if so, all that it said is there
            if not self.conn.poll():
                if dead:
                    raise EOFError
                return
            what, number, value = self.conn.recv()
            self.idle = AtWork()
            if what == "begins":
                self.at_work[number] = AtWork(wanted=value)
            else:
                del self.at_work[number]
                if value is not None:
                    yield number, value

    def end(self, seconds=0):
        """Waits so long for it to end, then kills it and what it leaves -> its exit status."""
        self.outbox.put(None)
        self.conn.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.proc.wait(max(0, seconds))
        kill_group(self.proc.pid)
        return self.proc.wait()


def deliver(conn, outbox):
    """Writes messages to a worker's pipe until there is a None. This is a thread, because a worker
    may read nothing for as long as one call in C takes, and a full pipe would stop the parent, who
    is to notice that it hangs."""
    while message := outbox.get():
        try:
            conn.send_bytes(message)
        except (OSError, TypeError):  # it is dead, which answers() notices; the pipe was closed
            return


@dataclass
class OpenGame:
    """A game as the pool sees it."""

    worker: WorkerProcess  # None: it is played in this process
    task: str
    requests: list = field(default_factory=list)  # all (op, argument), to replay them if need be
    answer: tuple = None  # to the last request, or a GameError; None: not there yet
    order: int = 0  # of the last request, among those of all games
    info: dict = None  # of the last answer
    losses: int = 0  # how many workers its last request is known to have cost
    alone: bool = False  # whether its last request may have cost one more, and is tried alone
    number: int = field(default_factory=itertools.count().__next__)  # never used twice

    @property
    def when(self):
        """In which turn its last request is; the first one is to start."""
        return f" in turn {len(self.requests) - 1}" if len(self.requests) > 1 else ""

    @property
    def over(self):
        """Whether it has ended or failed, so that no request can follow."""
        return isinstance(self.answer, GameError) or bool(self.answer) and any(self.answer[2:4])


class WorkerPool:
    """Plays games of an environment side by side in `workers` processes, or with 0 in this one.
    `make` is the name of a function, to which `name` (a name or a class) and `options` are given;
    `env` is the environment's class. The caller chooses the games' keys.

        pool.load(tasks)            loads games in the background, while the model is busy
        pool.start(key, task); pool.step(key, action)
        pool.parse_action(text)     a response -> (action, valid)
        pool.gather(keys)           their answers, in order: (obs, info), or the five of step()
        pool.answered(keys, 0)      those of the keys whose answer is there by now
        pool.drop(key)              gives up an unfinished game

    A worker that dies, or that is at one request for longer than the environment's `patience`, is
    replaced and its games are replayed; the caller does not notice. A GameError names a game that
    fails, or that costs its fourth worker in a row, or the games that waited when a worker was lost
    for the fourth time in a row by nobody's fault.

    With the environment's `step_may_kill`, a game ends as lost, with a warning, when the same step
    has cost two workers. A GameError says so when that was so with `max_lost` games in a row, and
    no step was answered meanwhile: then it is not the actions.

    A worker plays one game after the other and says which one it is at: that one is guilty. If
    games are asynchronous (envs.Env), each has a thread in its worker, and several can be at work.
    Then a game that does not answer in time is guilty; but when the worker dies, none is yet. The
    next worker plays those that were at work one at a time, while all others wait, and the one that
    it is at if it dies again is guilty. What a step leaves behind, such as a thread that kills the
    worker later, is blamed on whatever is at work by then."""

    remedy = ""  # what a GameError says behind the failure, with {} for the game
    max_lost = 32
    warn_after = 60  # seconds without an answer after which the games are named

    def __init__(self, make, name, env, options=None, workers=0):
        if workers < 0:
            raise ValueError(f"workers is {workers}; it must be 0 or more")
        if workers and in_worker:
            raise ValueError("a worker process cannot start workers: it has imported a module that "
                             "does so; put that below `if __name__ == \"__main__\":`")
        if env.asynchronous and not workers:
            raise ValueError(f"{env.__name__} is asynchronous, which needs worker processes: "
                             "workers=4 or so, and a class in a module that they can import")
        self.env = env
        self.options = options or {}
        self.local = None if workers else EnvWorker(make, name, self.options)
        self.name = importable_name(name) if workers else getattr(name, "__name__", name)
        self.games = {}  # by key
        self.loading = {}  # task: games that are being loaded
        self.lost = 0  # games that ended as lost since a step was answered
        self.order = itertools.count()
        self.seconds = 0.0  # spent on games or waiting for them
        self.workers = [WorkerProcess(env.asynchronous, make, self.name, self.options)
                        for _ in range(workers)]
        self.loaders = itertools.cycle(self.workers)

    @property
    def procs(self):
        return [worker.proc for worker in self.workers]

    # ---- what the caller uses
    def load(self, tasks):
        for task in tasks if self.workers else ():
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
            game = OpenGame(min(self.workers, key=busy.count, default=None), task)
        self.games[key] = game
        self.ask(game, "start", task)

    def step(self, key, action):
        self.ask(self.games[key], "step", action)

    def gather(self, keys):
        games = [self.games[key] for key in keys]
        while waiting := [game for game in games if game.answer is None]:
            self.receive(waiting, seconds=1)
        for key, game in zip(keys, games):
            if isinstance(game.answer, GameError):
                raise GameError(f"{self.name}: game {game.task} failed{game.when}: {game.answer}"
                                f"{self.remedy_for(game)}")
            if game.over:
                del self.games[key]
        return [game.answer for game in games]

    def answered(self, keys, seconds):
        """The keys of the games that have answered, in order. If none has, waits up to so many
        seconds for a worker to say something."""
        games = [self.games[key] for key in keys]
        if waiting := [game for game in games if game.answer is None]:
            self.receive(waiting, seconds if len(waiting) == len(games) else 0)
        return [key for key, game in zip(keys, games) if game.answer is not None]

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
        for worker in self.workers:
            worker.conn.close()  # which tells all of them to end
        deadline = time.monotonic() + GRACE
        while self.workers:
            self.workers.pop().end(deadline - time.monotonic())

    # ---- messages
    def ask(self, game, op, argument):
        start = time.monotonic()
        game.requests.append((op, argument))
        game.answer, game.order = None, next(self.order)
        self.send(game, game.requests[-1:], wanted=True)
        self.seconds += time.monotonic() - start

    def send(self, game, requests, wanted=False, alone=False):
        """Sends requests to a game's worker, or executes them in this process. `wanted`: the answer
        to the last one; `alone`: while no other game is at work."""
        if game.worker:
            game.worker.send(game.number, requests, wanted, alone)
        else:
            for request in requests:
                game.answer = self.local.execute(game.number, *request)

    def receive(self, games, seconds):
        """Takes what the workers of these games say, and waits so long for the first word of them.
        Replaces those that are dead or hang."""
        start = time.monotonic()
        workers = [*dict.fromkeys(game.worker for game in games)]
        wait([worker.conn for worker in workers], seconds)
        for worker in workers:
            try:
                for number, answer in worker.answers():
                    self.take(worker, number, answer)
            except (EOFError, OSError):
                self.replace(worker, f"died with status {worker.end(1)}", worker.at_work)
            else:
                self.check_patience(worker)
        self.seconds += time.monotonic() - start

    def take(self, worker, number, answer):
        worker.losses = 0
        for game in self.games.values():  # it may have been dropped
            if game.number == number:
                game.answer, game.losses, game.alone = answer, 0, False
                if isinstance(answer, tuple):
                    game.info = answer[-1]
                    self.lost = 0 if len(answer) == 5 else self.lost

    # ---- workers that die or hang
    def unanswered(self, worker):
        """The games that wait for a worker, in the order of their requests."""
        return sorted((game for game in self.games.values()
                       if game.worker is worker and game.answer is None),
                      key=lambda game: game.order)

    def check_patience(self, worker):
        """Names the games that wait long for a worker; replaces the worker if it hangs."""
        patience, first = self.env.patience, min(self.warn_after, self.env.patience)
        waiting = self.unanswered(worker)
        at_work = worker.at_work or {None: worker.idle}
        for number, work in at_work.items() if waiting else ():
            seconds = time.monotonic() - work.since
            if seconds >= first and not work.warned:
                work.warned = True
                slow = [game for game in waiting if game.number == number]
                slow = slow if slow and self.env.asynchronous else waiting
                print(f"{self.name}: no answer for {first} seconds in {tasks_of(slow)}",
                      file=sys.stderr, flush=True)
            if seconds >= patience:
                worker.end()
                return self.replace(worker, f"gave no answer for {patience} seconds",
                                    {number: work})

    def replace(self, worker, why, at_work):
        """Starts a lost worker again, unless it was lost too often. `at_work`: {number: AtWork} of
        the games at one of which it was lost. Of these, the games that wait for an answer are under
        suspicion (what a worker did that nobody waits for counts for no game):

            some, beside other games at work   no loss is counted; each will be at work alone
            one, which was at work alone       the loss is the game's. Where a step may kill a
                                               worker, the second one loses the game; else the
                                               fourth one is an error
            none                               the loss is the worker's, and the fourth an error"""
        waiting = self.unanswered(worker)
        suspects = [game for game in waiting
                    if game.number in at_work and at_work[game.number].wanted]
        guilty = suspects[0] if suspects and len(at_work) == 1 else None
        if suspects and not guilty:
            for game in suspects:
                game.alone = True
        else:
            (guilty or worker).losses += 1
        if guilty and self.env.step_may_kill and len(guilty.requests) > 1:
            if guilty.losses == 2:
                self.lose(guilty, why)
        elif (guilty or worker).losses > 3:
            game = guilty or waiting[0]
            raise GameError(f"{self.name}: a worker {why}, the fourth one lost in a row, at game "
                            f"{game.task}{game.when}. These games waited: {tasks_of(waiting)}"
                            f"{self.remedy_for(game)}")
        worker.start()
        self.replay(worker)

    def replay(self, worker):
        """Sends a new worker all requests of its games. Last requests that are to be alone come
        last, so that only what is sent afterwards waits for them."""
        games = [game for game in self.games.values() if game.worker is worker and not game.over]
        games.sort(key=lambda game: game.order)
        for game in games:
            if not game.alone:
                self.send(game, game.requests, wanted=game.answer is None)
            elif len(game.requests) > 1:
                self.send(game, game.requests[:-1])
        for game in games:
            if game.alone:
                self.send(game, game.requests[-1:], wanted=True, alone=True)

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

    def remedy_for(self, game):
        return self.remedy.format(shlex.quote(str(game.task)))


def tasks_of(games):
    """The tasks of the first few games."""
    return [game.task for game in games[:4]]
