"""Text environments behind one protocol, their prompts, the action parser and the worker pool.

    env = make_env("house")        or make_env("alfworld", data=DIR), make_env("webshop", data=DIR)
    obs, info = env.reset(tasks("house", "train")[0])
    obs, reward, terminated, truncated, info = env.step("go to fridge 1")      as in Gymnasium
    env.expert()                   a list of commands that wins from here, or None

info has admissible (a list of commands), task (a sentence), category, won (bool) and score (0 to
1). The step that wins gets the reward REWARD, every other step 0. An action that the environment
cannot use is never an exception: the answer is "Nothing happens.", or in the shop the same page
again.

- `house` is a small version of ALFWorld in plain Python, with the same commands and task types.
- `alfworld` is the original: the alfworld package's TextWorld engine, with the games in
  $ALFWORLD_DATA.
- `webshop` is WebShop's text environment (simulators/webshop.py), with the catalogue in
  $WEBSHOP_DATA.

The prompts carry the same information as verl-agent's (commit 796ed31, the GiGPO paper's
framework), but are worded differently. Nothing here imports torch, so that worker processes start
quickly.
    python envs.py [--env alfworld|webshop --data DIR]                  play an episode yourself
"""
import argparse
import contextlib
import functools
import inspect
import itertools
import numbers
import os
import pkgutil
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe

from simulators.house import NOTHING, Room, task_ids
from simulators.textworld import Engine, alfworld_root, game_folders

REWARD = 10.0
CATEGORIES = {"pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look",
              "pick_clean_then_place_in_recep": "Clean", "pick_heat_then_place_in_recep": "Heat",
              "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2"}
SHELVES = {"beauty": "Beauty", "electronics": "Electronics", "fashion": "Fashion",
           "garden": "Garden", "grocery": "Grocery"}

# ------------------------------------------------------------------------- prompts and actions

ROLE = "You live in a text world and solve one task in it by typing commands."
HOUSEHOLD = ROLE.replace("one task", "one household task")
ANSWER = ("Reason about what to do next inside <think> </think>. Then give one of the commands, "
          "and nothing else, inside <action> </action>.")
FIRST = "{role}\n{obs}\n\nCommands that work now: [{commands}].\n\n{answer}"
LATER = ("{role} Your task is to: {task}\nSteps taken so far: {steps}. The latest, oldest first:\n"
         "{history}\nStep {now}. What you see: {obs}\n\nCommands that work now: [{commands}].\n\n"
         "{answer}")
PAST = "What you saw: {obs}\nWhat you did: {action}"
SAME_WAY = " Answer every later message in the same way."
FULL_FIRST = ("{role}\n{obs}\n\nThese commands always work: [{always}].\nOther commands that work "
              "now: [{commands}].\n\n{answer}" + SAME_WAY)
FULL_LATER = "{obs}\n\nOther commands that work now: [{commands}]."


def quoted(commands):
    """The commands as a prompt lists them, without "help"."""
    return ", ".join(f"'{c}'" for c in commands if c != "help")


class PromptBuilder:
    """Records what the agent has seen in one game, and makes the model's prompts of it."""

    first, later = FIRST, LATER
    full_first = FIRST + SAME_WAY
    full_later = "{obs}\n\nCommands that work now: [{commands}]."
    works_always = ()  # prefixes of commands that --context full lists only once

    def __init__(self, obs, info, role=ROLE):
        self.obs, self.info, self.role, self.history = obs, info, role, []
        self.always = [c for c in info["admissible"] if c.startswith(self.works_always)]

    def record(self, action, obs, info):
        """Records a turn: the environment answered `action` with `obs` and `info`."""
        self.history.append((self.obs, action))
        self.obs, self.info = obs, info

    def format_obs(self, obs):
        return obs.strip()

    def accepts(self, action):
        """Whether the game can use this action now."""
        return action in self.info["admissible"]

    def fields(self, commands):
        """The fields of this turn's prompt."""
        return {"role": self.role, "answer": ANSWER, "task": self.info["task"],
                "obs": self.format_obs(self.obs), "commands": quoted(commands),
                "always": quoted(self.always)}

    def window_prompt(self, k=2):
        """--context window: one message, rebuilt every turn, with the last k turns of the past."""
        fields, n = self.fields(self.info["admissible"]), len(self.history)
        if n == 0:
            return self.first.format(**fields)
        past = [PAST.format(obs=self.format_obs(obs), action=action)
                for obs, action in self.history[max(0, n - k):]]
        return self.later.format(**fields, steps=n, history="\n".join(past), now=n + 1)

    def prompts(self, context, history):
        """The prompts that a turn may use, from the longest to the shortest."""
        if context == "full":
            return [self.full_prompt()]
        return (self.window_prompt(k) for k in range(history, -1, -1))

    def full_prompt(self):
        """--context full: what is new in this turn. The first message also has what holds for all
        turns."""
        fields = self.fields(c for c in self.info["admissible"] if c not in self.always)
        return (self.full_later if self.history else self.full_first).format(**fields)


class HouseholdPrompts(PromptBuilder):
    full_first, full_later = FULL_FIRST, FULL_LATER
    works_always = "go to ", "inventory", "look"  # even to where one is already


class ShopPrompts(PromptBuilder):
    """Prompts of the shop, whose pages repeat the task; it is removed from them."""

    first = ("{role} Your task is to: {task}\nWhat you see: {obs}\n\nCommands on this page: "
             "[{commands}].\n\n{answer}")
    later = LATER.replace("Commands that work now", "Commands on this page")
    full_first = first + SAME_WAY
    full_later = "{obs}\n\nCommands on this page: [{commands}]."

    def format_obs(self, obs):
        page = obs.split(f" [SEP] {self.info['task'].strip()} [SEP] ", 1)[-1]
        return " [SEP] ".join(f"'{piece}'" for piece in page.split(" [SEP] "))

    def accepts(self, action):
        """Any search is admissible, and clicks on what the page lists."""
        from simulators.webshop import shop_command
        name, argument = shop_command(action)
        # a click on the search page's own button does nothing
        offered = argument != "search" and f"click[{argument}]" in self.info["admissible"]
        return name == "search" or name == "click" and offered


def tagged_action(text: str, fallback: int) -> tuple[str, bool]:
    """A response -> (action, valid). The action is the text between the first <action> and the
    first </action> of one of these texts, in this order:

    1. what follows the first </think> (the whole response, if there is none). If a further </think>
       comes after an </action>, that action was still a part of the thought: then what
       follows that action counts instead, and so on, until no further </think> comes
    2. what comes before the first <think>

    If neither has these two tags in this order, the action is the last `fallback` characters, and
    invalid. Else it is valid if there is a pair of think tags, too, and, as in verl-agent, no
    Chinese character. Tags may be in any case. What a chat template begins a response with, <think>
    and a line break or an empty thought, is no part of the last characters."""
    text = re.sub("</?(think|action)>", lambda tag: tag[0].lower(), text, flags=re.I | re.A)
    thought = 0 <= text.find("<think>") < text.find("</think>")
    answer = text[max(0, text.find("</think>")):]  # verl-agent also searches the thought
    while "</think>" in (rest := answer.partition("</action>")[2]):
        answer = rest
    for part in answer, text.partition("<think>")[0]:
        start, end = part.find("<action>"), part.find("</action>")
        if 0 <= start < end:
            action = part[start + len("<action>"):end].strip()
            return action, thought and not re.search(r"[\u4e00-\u9fff]", text)
    text = re.sub("^<think>\n(\n</think>\n\n)?", "", text)  # as some chat templates begin
    return text[max(0, len(text) - fallback):], False


# --------------------------------------------------------------- the protocol of an environment

class Env:
    """The base class of environments, your own too. A subclass has

        tasks(split) -> ids, str or int, of the splits "train" and held_out[0]
        reset(task) -> (obs, info);  step(action) -> (obs, reward, terminated, truncated, info)

    with `info` as above. parse_action(text) -> (action, valid) reads a response, with what the chat
    template began it with; its default is tagged_action. An episode's rewards must sum to within
    +-r_max. In turn number `horizon`, `truncated` must be True unless `terminated` is. The first
    obs must state the task. One object plays many games, so reset must reset everything, and many
    objects are used at once in one process. The same actions must lead to the same answers, because
    the games of a worker that died are played again; and tasks() must always be the same.
    tools/imitate.py also needs advice(forgetful) -> (thought, command) or None, a demonstrator. The
    rest has defaults.

    The worker pool checks every answer: obs, task and commands are text (lone surrogates are
    replaced); terminated, truncated and won are True or False; reward is finite, and score from 0
    to 1. NumPy types are allowed. A command must be one that parse_action can read: without blanks
    at its ends, and in lower case where actions are. Anything else, and any exception, becomes a
    GameError with the game and the turn. A worker that does not answer for `patience` seconds is
    replaced."""

    flags = ("horizon",)  # train.py's settings that the constructor takes
    horizon = 50  # maximum number of turns per episode
    held_out = "test", 100  # an evaluation's split and its number of games
    categories = {}  # {info["category"]: its column in tables}
    role = ROLE  # the first sentence of a prompt
    prompt_builder_class = PromptBuilder  # makes prompts, knows the admissible actions
    max_prompt = 2048  # maximum tokens of a prompt
    fallback = 30  # characters used as the action if a response has no tags
    graded = False  # whether a score can be between 0 and 1
    patience = 600  # seconds after which a silent worker is replaced

    def __init__(self, horizon=None):
        self.horizon = self.horizon if horizon is None else horizon

    @classmethod
    def prompt_builder(cls, obs, info):
        return cls.prompt_builder_class(obs, info, cls.role)

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text, cls.fallback)

    def expert(self):
        return None


# --------------------------------------------------------------------------------------- house

class House(Env):
    """The room of simulators/house.py, with `places` places and `objects` things to carry. A task
    id is a number as a string. The default horizon fits 5 places; larger houses need a longer one,
    up to the expert's min(4 * places, 50)."""

    flags, horizon = ("places", "objects", "horizon"), 20
    held_out, categories = ("test", 192), CATEGORIES
    role, prompt_builder_class = HOUSEHOLD, HouseholdPrompts

    def __init__(self, places=5, objects=4, horizon=None):
        super().__init__(horizon)
        self.room = Room(places, objects)

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text.lower(), cls.fallback)

    def tasks(self, split):
        return task_ids(split)

    def reset(self, task):
        obs = self.room.enter(task)
        self.steps = 0
        return obs, self.info()

    def info(self):
        room = self.room
        return {"admissible": room.actions(), "task": room.task, "category": room.category,
                "won": room.won, "score": float(room.won)}

    def step(self, action):
        before = self.room.won
        obs, info = self.room.act(action), self.info()
        self.steps += 1
        truncated = self.steps >= self.horizon and not info["won"]
        reward = REWARD if info["won"] and not before else 0.0
        return obs, reward, info["won"], truncated, info

    def expert(self):
        return self.room.expert()

    def advice(self, forgetful=False):
        return self.room.advice(forgetful)


# ------------------------------------------------------------------------------------ alfworld

class AlfWorld(Env):
    """ALFWorld's text games, played by TextWorld. A task id is the game's folder below json_2.1.1:
    "valid_seen/pick_heat_then_place_in_recep-Egg-None-Fridge-14/trial_T2019...". Observations are
    those of the engine."""

    flags, held_out = ("data", "horizon"), ("valid_seen", 140)
    categories, role, prompt_builder_class = CATEGORIES, HOUSEHOLD, HouseholdPrompts
    # verbs that change the game; the others only look
    CHANGES = set("go open close take move clean heat cool use slice".split())

    def __init__(self, data=None, horizon=None):
        super().__init__(horizon)
        self.root, self.engine = alfworld_root(data), Engine()

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text.lower(), cls.fallback)

    def tasks(self, split):
        return game_folders(self.root, split)

    def reset(self, task):
        state, self.walkthrough = self.engine.load(self.root, task)
        self.category = task.split("/")[1].split("-")[0]
        self.task = re.search(r"Your task is to: (.*)", state.feedback)[1].strip()
        self.steps, self.played, self.won = 0, [], False  # played: commands that changed something
        return state.feedback, self.info(state)

    def info(self, state):
        self.admissible = list(state.admissible_commands)
        return {"admissible": self.admissible, "task": self.task,
                "category": self.category, "won": self.won, "score": float(self.won)}

    def step(self, action):
        action = action.strip()  # as TextWorld does
        state = self.engine.step(action)
        self.steps += 1
        if action.split(" ")[0] in self.CHANGES and state.feedback.strip() != NOTHING:
            self.played.append(action)
        before, self.won = self.won, self.won or bool(state.won)
        reward = REWARD if self.won and not before else 0.0
        truncated = self.steps >= self.horizon and not self.won
        return state.feedback, reward, self.won, truncated, self.info(state)

    def expert(self):
        """The rest of the game's walkthrough, or None at its end or after a step that is not in
        it."""
        done = len(self.played)
        follows = self.played == self.walkthrough[:done]
        return (self.walkthrough[done:] or None) if follows else None


# ------------------------------------------------------------------------------------- webshop

class WebShop(Env):
    """The shop of simulators/webshop.py, with the original's pages. A task id is the number of a
    goal, in the original's order. score is the original's reward; the step that buys with a score
    of exactly 1 gets REWARD. results/NOTES.md lists the differences from the original."""

    role = ("You shop in an online store by typing commands: search[words of your own] looks "
            "through its catalogue, click[...] follows a link or a button or chooses an option. "
            "Find a product that is all that is asked for, choose its options, and buy it.")
    goals = "synthetic"  # which of WebShop's two sets of goals
    flags, horizon, graded = ("data", "horizon"), 15, True
    fallback, max_prompt = 20, 4096  # pages are long
    patience = 3600  # loading the whole catalogue, 5 GB, takes long
    held_out, categories, prompt_builder_class = ("test", 500), SHELVES, ShopPrompts

    def __init__(self, data=None, horizon=None):
        super().__init__(horizon)
        from simulators.webshop import Shop
        self.shop = Shop(data, self.goals)

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text.lower(), cls.fallback)

    def tasks(self, split):
        return [f"{i:07d}" for i in self.shop.goals.split(split)]

    def reset(self, task):
        self.shop.enter(int(task))
        self.steps = 0
        return self.shop.observation(), self.info()

    def info(self):
        shop = self.shop
        return {"admissible": shop.actions(), "task": shop.goal["text"],
                "category": shop.goal["category"], "won": shop.score == 1.0, "score": shop.score}

    def step(self, action):
        bought, info = self.shop.act(action), self.info()
        self.steps += 1
        truncated = self.steps >= self.horizon and not bought
        reward = REWARD if info["won"] else 0.0
        return self.shop.observation(), reward, bought, truncated, info

    def expert(self):
        return self.shop.expert()

    def advice(self, forgetful=False):
        plan = self.expert()
        return ("", plan[0]) if plan else None


class WebShopHuman(WebShop):
    """WebShop with its goals written by people."""

    goals = "human"


# ------------------------------------------------------------------- the environments by name

ENVS = {"house": House, "alfworld": AlfWorld, "webshop": WebShop, "webshop-human": WebShopHuman}
OPTIONS = "data", "places", "objects"  # flags that only some environments have


def env_class(name) -> type[Env]:
    """The class of an environment: one of ENVS, your own as MODULE:CLASS (imported from the working
    directory, too), or a class itself. ValueError: there is none of this name."""
    found = name if isinstance(name, type) else ENVS.get(name)
    if not found:
        added = [os.getcwd()] * (os.getcwd() not in sys.path)
        sys.path += added
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--env {name}: {error}; known: {', '.join(ENVS)}, or your own as "
                             f"MODULE:CLASS in {os.getcwd()} or on PYTHONPATH") from error
        finally:
            for folder in added:
                sys.path.remove(folder)
    if not hasattr(found, "held_out"):
        raise ValueError(f"--env {name}: an environment must inherit from envs.Env")
    return found


def importable_name(env) -> str:
    """The name by which worker processes can import an environment. ValueError: there is none."""
    if isinstance(env, type):
        env = f"{env.__module__}:{env.__qualname__}"
    if env.startswith("__main__:") or "<locals>" in env:
        raise ValueError(f"worker processes cannot import {env}: put the class into a module, or "
                         "use workers=0 to play in this process")
    return env


def make_env(name, **options) -> Env:
    """Makes an environment with options for its `flags`. ValueError: it does not take them."""
    env = env_class(name)
    try:
        inspect.signature(env).bind(**options)
    except TypeError as error:
        raise ValueError(f"--env {env.__name__}: its constructor must take what its `flags` name, "
                         f"{', '.join(env.flags)}: {error}") from None
    return env(**options)


def tasks(name, split: str, **options) -> list:
    """The sorted task ids of a split. ValueError: there is no such split, or it is empty."""
    found, label = make_env(name, **options).tasks(split), getattr(name, "__name__", name)
    ids = [as_python(task) for task in (() if found is None else found)]
    if not ids:
        raise ValueError(f"--env {label} has no tasks in the split {split!r}")
    if wrong := [task for task in ids if not isinstance(task, (str, int))]:
        raise ValueError(f"--env {label}: a task id is {wrong[0]!r}; it must be str or int")
    return sorted(ids, key=lambda task: (isinstance(task, str), task))  # a set has no fixed order


def options_for(settings: dict) -> dict:
    """Those of the settings that the constructor of settings["env"] takes."""
    return {k: settings[k] for k in env_class(settings["env"]).flags if settings.get(k) is not None}


def default_workers(name) -> int:
    """Worker processes per rank: a machine's cores, at most 16, shared among its ranks; none for
    the house."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 0 if name == "house" else max(1, min(16, cores) // ranks)


# -------------------------------------------------------------------------------- worker pool

class GameError(RuntimeError):
    """An environment failed, or its worker died again and again. The message names the game."""


# The answers of an environment as Python's own types; ValueError: they are not what they should be.

def as_text(value, what):
    """A string or number as a string, without lone surrogates, which cannot be encoded."""
    if not isinstance(value, (str, numbers.Number)):
        raise ValueError(f"{what} is {value!r}, not a string")
    return str(value).encode("utf-8", "replace").decode()


def as_number(value, what):
    if not abs(number := float(as_python(value))) < 1e38:  # in float32 it would be infinite
        raise ValueError(f"{what} is {number}")
    return number


def as_bool(value, what):
    if value not in (True, False):
        raise ValueError(f"{what} is {value!r}, not True or False")
    return bool(value)


@functools.lru_cache(1 << 16)
def as_command(value, parse_action):
    """A command that the environment's parse_action reads as it is."""
    command = as_text(value, "a command")
    action, valid = parse_action(f"<think></think><action>{command}</action>")
    if not valid or action != command:
        why = ("commands must be without blanks at their ends, and in lower case where "
               "parse_action lower-cases" if valid else "and the response would count as invalid")
        raise ValueError(f"no response can give the command {command!r}: it would be read as "
                         f"{action!r}, {why}")
    return command


def as_python(value):
    """A Python value for a NumPy value, which could not be written as JSON."""
    return value.item() if hasattr(value, "item") else value


def as_info(info, parse_action):
    if not isinstance(info, Mapping):
        raise ValueError(f"info is {info!r}, not a dict")
    if missing := [k for k in ("admissible", "task", "category", "won", "score") if k not in info]:
        raise ValueError(f"info lacks {', '.join(missing)}")
    if isinstance(info["admissible"], str):
        raise ValueError(f"admissible is {info['admissible']!r}, not a list of commands")
    category = as_python(info["category"])
    if not isinstance(category, (str, int, float, type(None))):
        raise ValueError(f"category is {category!r}, not a string, a number or None")
    score = as_number(info["score"], "score")
    if not -1e-6 <= score <= 1 + 1e-6:  # rounding may exceed 1
        raise ValueError(f"score is {score}, not a number from 0 to 1")
    return {"admissible": [as_command(c, parse_action) for c in info["admissible"]],
            "task": as_text(info["task"], "task"), "category": category,
            "won": as_bool(info["won"], "won"), "score": score}


def parts_of(answer, method, names):
    """What a method returned, after checking that it has as many parts as there are names."""
    if not isinstance(answer, (tuple, list)) or len(answer) != len(names.split(", ")):
        raise ValueError(f"{method} must return ({names}), and returned {answer!r:.200}")
    return answer


class EnvWorker:
    """Plays many games, by number, in one process: the worker's side of the pool."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        # the numbers of all games loaded so far. Requests to load are handled last, so one may be
        # handled after its game was started; it must then do nothing
        self.loaded = set()
        self.ready = {}  # loaded but not started: (environment, obs, info)
        self.playing = {}  # the environments of games that are being played
        self.spare = []  # environments that can be used again

    def load(self, number, task):
        if number not in self.loaded:
            env = self.spare.pop() if self.spare else make_env(self.name, **self.options)
            self.ready[number] = env, *parts_of(env.reset(task), "reset()", "obs, info")
            self.loaded.add(number)

    def start(self, number, task):
        self.load(number, task)
        env, obs, info = self.ready.pop(number)
        self.playing[number] = env
        return as_text(obs, "obs"), as_info(info, env.parse_action)

    def step(self, number, action):
        env = self.playing[number]
        obs, reward, terminated, truncated, info = parts_of(
            env.step(action), "step()", "obs, reward, terminated, truncated, info")
        over = as_bool(terminated, "terminated"), as_bool(truncated, "truncated")
        if any(over):
            self.drop(number)
        info = as_info(info, env.parse_action)
        return as_text(obs, "obs"), as_number(reward, "reward"), *over, info

    def drop(self, number, argument=None):
        if number in self.playing:
            self.spare.append(self.playing.pop(number))

    def execute(self, number, requests):
        """The answer to the last of the requests, or a GameError, because not every exception can
        be pickled."""
        try:
            for op, argument in requests:
                answer = getattr(self, op)(number, argument)
            return answer
        except (Exception, SystemExit) as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            return GameError(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def worker_main(fd):
    """A worker process: answers requests until its parent closes the pipe."""
    conn, messages = Connection(fd), queue.PriorityQueue()
    worker = EnvWorker(*conn.recv())

    def read():
        try:
            for n in itertools.count():
                number, requests, wants_answer = conn.recv()
                messages.put((requests[0][0] == "load", n, number, requests, wants_answer))
        finally:
            os._exit(0)

    # a thread always reads what the parent sends: with both pipes full, both sides would hang
    threading.Thread(target=read, daemon=True).start()
    while True:
        *_, number, requests, wants_answer = messages.get()  # loads come last
        answer = worker.execute(number, requests)
        if wants_answer:
            conn.send((number, answer))


@dataclass
class OpenGame:
    """What the parent knows of a game."""

    worker: int
    task: str
    requests: list = field(default_factory=list)  # all (op, argument), to replay them if need be
    answer: tuple = None  # to the last request; None: not there yet
    order: int = 0  # of the last request, among those of all games
    number: int = field(default_factory=itertools.count().__next__)  # never used twice


class Pool:
    """Plays games of an environment (a name or a class) side by side in `workers` processes, or
    with 0 in this one. The caller chooses the games' keys.

        pool.load(tasks)            loads games in the background, while the model is busy
        pool.start(key, task); pool.step(key, action)
        pool.gather(keys)           their answers, in order: (obs, info), or the five of step()
        pool.drop(key)              gives up an unfinished game

    A worker that dies, or does not answer within the environment's `patience`, is replaced and its
    games are replayed; the caller does not notice. A GameError names a game that fails, or the
    games that waited when a worker was lost for the fourth time in a row."""

    warn_after = 60  # seconds without an answer after which the games are named

    def __init__(self, name, options=None, workers=0):
        self.options, self.env = options or {}, env_class(name)
        self.local = None if workers else EnvWorker(name, self.options)
        self.name = importable_name(name) if workers else getattr(name, "__name__", name)
        # by worker: process, pipe, how often it was lost since its last answer
        self.procs, self.conns, self.losses = [None] * workers, [None] * workers, [0] * workers
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
        game, most = self.games[key], self.options.get("horizon", self.env.horizon)
        if len(game.requests) > most:  # the first request started it
            raise GameError(f"{self.name}: game {game.task} does not end after {most} turns")
        self.ask(game, "step", action)

    def gather(self, keys):
        games = [self.games[key] for key in keys]
        for game in games:
            while game.answer is None:
                self.receive(game.worker)
        for key, game in zip(keys, games):
            if isinstance(game.answer, GameError):
                turn = len(game.requests) - 1  # the first request was to start
                when = f" in turn {turn}" if turn else ""
                raise GameError(f"{self.name}: game {game.task} failed{when}: {game.answer}")
            if any(game.answer[2:4]):  # terminated or truncated
                del self.games[key]
        return [game.answer for game in games]

    def drop(self, key):
        game = self.games.pop(key)
        self.send(game, [("drop", None)])

    def close(self):
        for proc in self.procs:
            proc.kill()
            proc.wait()

    # ---- messages
    def ask(self, game, op, argument):
        game.requests.append((op, argument))
        game.answer, game.order = None, next(self.order)
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
            if not self.conns[w].poll(first):
                print(f"{self.name}: no answer for {first} seconds in {self.unanswered(w)}",
                      file=sys.stderr, flush=True)
                if not self.conns[w].poll(patience - first):
                    return self.replace(w, f"gave no answer for {patience} seconds")
            number, answer = self.conns[w].recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.procs[w].wait(1)  # to know its exit status
            return self.replace(w, f"died with status {self.procs[w].returncode}")
        self.seconds += time.time() - start
        for game in self.games.values():  # it may have been dropped
            if game.number == number:
                game.answer = answer
                self.losses[w] = 0

    # ---- the workers
    def spawn(self, w):
        """Starts a new interpreter with this file; a fork would copy torch and its threads. It has
        its own session, so that Ctrl-C does not reach it before the caller has finished."""
        self.conns[w], child_end = Pipe()
        here, fd = os.path.dirname(os.path.abspath(__file__)), child_end.fileno()
        path = [here, *sys.path]  # the environment may be anywhere
        code = f"import sys; sys.path[:] = {path!r}; import envs; envs.worker_main({fd})"
        command = [sys.executable, "-Wignore:webshop", "-c", code]  # the parent has warned already
        self.procs[w] = subprocess.Popen(command, pass_fds=[fd], start_new_session=True,
                                         stdin=subprocess.DEVNULL)
        self.conns[w].send((self.name, self.options))
        child_end.close()

    def games_of(self, w):
        """A worker's games, in the order of their last requests."""
        return sorted((game for game in self.games.values() if game.worker == w),
                      key=lambda game: game.order)

    def unanswered(self, w):
        """The first few games that wait for a worker, which is at work on the first of them."""
        return [game.task for game in self.games_of(w) if game.answer is None][:4]

    def replace(self, w, why):
        """Starts another worker in the place of a lost one and replays its games."""
        self.losses[w] += 1
        if self.losses[w] > 3:
            raise GameError(f"{self.name}: a worker {why}, the fourth one lost in a row. These "
                            f"games waited: {self.unanswered(w)}")
        self.procs[w].kill()
        self.procs[w].wait()
        self.spawn(w)
        for game in self.games_of(w):
            self.send(game, game.requests, wants_answer=game.answer is None)


# ------------------------------------------------------------------------------- command line

def play_by_hand(env):
    """A person plays a game; an empty line is the expert's next command."""
    obs, info = env.reset(env.tasks("train")[0])
    terminated = truncated = False
    while not (terminated or truncated):
        print(obs.strip() + "\n\nCommands: " + quoted(info["admissible"]))
        command = input("> ").strip()
        action, _ = env.parse_action(f"<think></think><action>{command}</action>")
        if not action:
            plan = env.expert()
            action = (plan or info["admissible"])[0]
            print(f"(the expert{'' if plan else ' knows no way to win'}: {action})")
        obs, reward, terminated, truncated, info = env.step(action)
    print(f"{obs.strip()}\n\nWon: {info['won']}, reward {reward:g}, score {info['score']:.3g}")


def main():
    parser = argparse.ArgumentParser(description="Play an episode by hand.", allow_abbrev=False)
    parser.add_argument("--env", default="house")
    parser.add_argument("--data", help="folder with alfworld's json_2.1.1, or of webshop's files")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    sys.path.append(os.getcwd())
    try:
        play_by_hand(make_env(args.env, **options_for(vars(args))))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"envs.py: {error}")
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
