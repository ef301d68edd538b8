"""Text environments behind one protocol, the prompts made of them, the action parser, and the pool of worker processes.

    env = make_env("house")                       or make_env("alfworld", data=DIR), make_env("webshop", data=DIR)
    obs, info = env.reset(tasks("house", "train")[0])
    obs, reward, terminated, truncated, info = env.step("go to fridge 1")         Gymnasium's order
    env.expert()                                  commands that win from here, or None
    env.advice(forgetful)                         what a demonstrator thinks and does now; None where it gives up

info: admissible (list of str), task (sentence), category, won (bool), score (float, 0-1). An action the environment
cannot use is answered ("Nothing happens."; in the shop, with the same page), never an exception. The winning step pays REWARD, every other step 0.

- `house` is a miniature of ALFWorld in plain Python: same commands, same sentences, same six kinds of task.
- `alfworld` is the real thing: the alfworld package's TextWorld engine on the games below $ALFWORLD_DATA.
- `webshop` is WebShop's text environment in plain Python, on the catalogue in $WEBSHOP_DATA.

Prompts follow the setting of the GiGPO paper's framework (verl-agent 796ed31) in our own words: `window_prompt` is one
message with the last k turns, `full_prompt` only what is new. No torch here, so that worker processes stay small.
    python envs.py [--env alfworld|webshop --data DIR] [--bench]      play an episode yourself, or measure
"""
import argparse
import contextlib
import copy
import difflib
import fcntl
import functools
import gc
import glob
import hashlib
import importlib.util
import json
import math
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from array import array
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

import numpy as np
from tqdm import tqdm

REWARD = 10.0  # on the winning step
NOTHING = "Nothing happens."  # says a room to what it cannot use
CATEGORIES = {"pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look", "pick_clean_then_place_in_recep": "Clean",
              "pick_heat_then_place_in_recep": "Heat", "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2"}
SHELVES = {"beauty": "Beauty", "electronics": "Electronics", "fashion": "Fashion", "garden": "Garden", "grocery": "Grocery"}

# ---------------------------------------------------------------------------------------------- prompts and actions

ROLE = "You live in a text world and solve one household task in it by typing commands."
ANSWER = ("Reason about what to do next inside <think> </think>. Then give one of the commands, and nothing else, "
          "inside <action> </action>.")
FIRST = "{role}\n{obs}\n\nCommands that work now: [{commands}].\n\n{answer}"
LATER = ("{role} Your task is to: {task}\nSteps taken so far: {steps}. The latest, oldest first:\n{history}\n"
         "Step {now}. What you see: {obs}\n\nCommands that work now: [{commands}].\n\n{answer}")
RESPONSE = "<think> {thought} </think> <action> {action} </action>"  # how the demonstrator answers
PAST = "What you saw: {obs}\nWhat you did: {action}"
FULL_FIRST = ("{role}\n{obs}\n\nThese commands always work: [{always}].\nOther commands that work now: [{commands}].\n\n{answer} "
              "Answer every later message in the same way.")
FULL_LATER = "{obs}\n\nOther commands that work now: [{commands}]."

SHOP_ROLE = ("You shop in an online store by typing commands: search[words of your own] looks through its catalogue, click[...] follows a link or a button or "
             "chooses an option. Find a product that is all that is asked for, choose its options, and buy it.")
SHOP_FIRST = "{role} Your task is to: {task}\nWhat you see: {obs}\n\nCommands on this page: [{commands}].\n\n{answer}"
SHOP_LATER = LATER.replace("Commands that work now", "Commands on this page")
SHOP_FULL_FIRST = SHOP_FIRST + " Answer every later message in the same way."
SHOP_FULL_LATER = "{obs}\n\nCommands on this page: [{commands}]."
SHOP_LONGEST = 13000  # characters of a prompt with history


def quoted(commands):
    return ", ".join(f"'{c}'" for c in commands if c != "help")


def travels(command):
    return command.startswith("go to ")


class Episode:
    """What the agent knows of one game, and the two ways of showing it. `took` moves it on by one turn."""

    role, first, later, full_first, full_later = ROLE, FIRST, LATER, FULL_FIRST, FULL_LATER

    def __init__(self, obs, info):
        self.obs, self.info, self.history = obs, info, []
        # what always works, but for the way to where one stands, which does nothing
        self.always = [c for c in info["admissible"] if travels(c) or c in ("inventory", "look")]

    def took(self, action, obs, info):
        self.history.append((self.obs, action))
        self.obs, self.info = obs, info

    def shown(self, obs):
        return obs.strip()

    def accepts(self, action):
        """Whether the game offers it now."""
        return action in self.info["admissible"]

    def now(self, commands):
        """What every prompt may say of this turn."""
        return {"role": self.role, "answer": ANSWER, "task": self.info["task"], "obs": self.shown(self.obs), "commands": quoted(commands),
                "always": quoted(self.always)}

    def window_prompt(self, k=2):
        """--context window: one message, rebuilt every turn, with the last k observations and (parsed) actions."""
        now, n = self.now(self.info["admissible"]), len(self.history)
        if not n:
            return self.first.format(**now)
        past = "\n".join(PAST.format(obs=self.shown(o), action=a) for o, a in self.history[max(0, n - k):])
        return self.later.format(**now, steps=n, history=past, now=n + 1)

    def full_prompt(self):
        """--context full: only what is new; what holds for the whole episode is said in the first message."""
        now = self.now(c for c in self.info["admissible"] if c not in self.always)
        return (self.full_later if self.history else self.full_first).format(**now)


class ShopEpisode(Episode):
    """The same in the shop, where every page repeats the task: it is left out of what was seen."""

    role, first, later, full_first, full_later = SHOP_ROLE, SHOP_FIRST, SHOP_LATER, SHOP_FULL_FIRST, SHOP_FULL_LATER

    def shown(self, obs):
        pieces, task = obs.split(" [SEP] "), self.info["task"].strip()
        return " [SEP] ".join(f"'{piece}'" for piece in pieces[pieces.index(task) + 1:]) if task in pieces else obs.strip()

    def accepts(self, action):
        """Whether the page offers it, or it is a search, which works on every page."""
        name, argument = shop_command(action)
        return name == "search" or name == "click" and argument != "search" and f"click[{argument}]" in self.info["admissible"]

    def window_prompt(self, k=2):
        text = super().window_prompt(k)
        return text if k and len(text) <= SHOP_LONGEST else self.first.format(**self.now(self.info["admissible"]))


def shop_command(action):
    """-> (name, argument in lower case), or (None, None) for what the shop does not understand. Greedy: "search[a[b]" is no search."""
    found = re.match(r"(.+)\[(.+)\]", action)
    return (found[1], found[2].lower()) if found else (None, None)


def parse_action(text, fallback):
    """-> (action, valid). The lower-cased text between the first <action> and the first </action>; valid where both tag
    pairs are there and no CJK character is. Without action tags the last `fallback` characters are the action."""
    low = text.lower()
    start, end = low.find("<action>"), low.find("</action>")
    if start < 0 or end < start:
        return low[-fallback:], False
    thought = 0 <= low.find("<think>") < low.find("</think>")
    return low[start + len("<action>"):end].strip(), thought and not re.search(r"[\u4e00-\u9fff]", text)


# ------------------------------------------------------------------------------------------------------------ house

# Object types and what can be done to them; small houses use the head of each list, large ones all of it.
OBJECTS = {"apple": "clean heat cool", "mug": "clean heat cool", "egg": "clean heat cool", "potato": "clean heat cool",
           "plate": "clean heat cool", "tomato": "clean heat cool", "book": "", "pen": "", "vase": "", "box": "",
           "bowl": "clean cool", "bread": "heat cool", "cup": "clean heat cool", "lettuce": "clean cool", "fork": "clean",
           "pan": "clean cool", "knife": "clean", "pot": "clean cool", "spoon": "clean", "winebottle": "cool",
           "cloth": "clean", "soapbar": "clean", "spatula": "clean", "ladle": "clean", "kettle": "clean", "cd": "",
           "butterknife": "clean", "dishsponge": "clean", "pencil": "", "statue": "", "pillow": "", "laptop": "",
           "alarmclock": "", "cellphone": "", "creditcard": "", "keychain": "", "newspaper": "", "remotecontrol": "",
           "watch": "", "candle": "", "saltshaker": "", "peppershaker": "", "tissuebox": "", "spraybottle": ""}
PLACES = ["countertop", "cabinet", "shelf", "drawer", "desk", "dresser", "sidetable", "garbagecan", "coffeetable", "sofa",
          "diningtable", "stoveburner", "armchair", "bed", "safe", "cart", "ottoman", "toilet", "coffeemachine", "toaster"]
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # every house has one of each
OPENABLE = {"fridge", "microwave", "cabinet", "drawer", "safe"}
LAMP = "desklamp 1"
GOALS = {"pick_and_place_simple": "put a {obj} in {dest}.", "look_at_obj_in_light": "look at {obj} under the desklamp.",
         "pick_clean_then_place_in_recep": "put a clean {obj} in {dest}.", "pick_heat_then_place_in_recep": "put a hot {obj} in {dest}.",
         "pick_cool_then_place_in_recep": "put a cool {obj} in {dest}.", "pick_two_obj_and_place": "put two {obj} in {dest}."}
DONE = {"clean": "clean", "heat": "hot", "cool": "cool"}  # the verb and the property it gives
SIZES = {"train": 4000, "test": 1000}  # tasks of the embedded house


def kind(name):  # "cabinet 2" -> "cabinet"
    return name.rsplit(" ", 1)[0]


def listing(names):
    if len(names) < 2:
        return f"a {names[0]}" if names else "nothing"
    return ", ".join(f"a {n}" for n in names[:-1]) + f", and a {names[-1]}"


def verb_of(category):
    return next((verb for verb in APPLIANCES if f"_{verb}_" in category), None)


class Seeker:
    """The demonstrator of a room. It knows the task, what is before it and what it has done, and looks through the places in their order, so that what it
    says can be told from what has been seen; only where to look first ALFWorld's walkthrough tells it.

    A room gives goal: the kinds (object, place); category; verb: clean, heat, cool or None; places: all names, in order; begin: the one to look at first;
    at, holding: names or None; closed(place) -> whether, and inside(place) -> names, both of the place where it stands; treated(thing) -> whether;
    placed(any_state) -> a count."""

    finds_back = True  # whatever is done in place of what it says

    def advice(self, forgetful=False):
        """(thought, next command). The forgetful one skips the washing, heating, cooling, the lamp and the second object, and then idles."""
        (obj, dest), here, thing, look = self.goal, self.at, self.holding, self.category == "look_at_obj_in_light"
        if forgetful and (thing and kind(thing) == obj if look else self.placed(any_state=True)):
            return "done", f"examine {thing}" if look else "look"
        if thing is None:
            found = [] if here is None or self.stores(here) else [o for o in self.inside(here) if kind(o) == obj]
            return f"find {obj}", f"take {found[0]} from {here}" if found else self.onward()
        if kind(thing) != obj:
            return f"drop {kind(thing)}", self.put()
        if look:
            return f"use {kind(LAMP)}", f"use {LAMP}" if here and LAMP in self.inside(here) else self.onward()
        if self.verb and not self.treated(thing) and not forgetful:
            tool = f"{APPLIANCES[self.verb]} 1"
            return f"{self.verb} {obj}", f"{self.verb} {thing} with {tool}" if here == tool else f"go to {tool}"
        return f"put {obj} in {dest}", self.put() if here and kind(here) == dest else f"go to {next(p for p in self.places if kind(p) == dest)}"

    def stores(self, place):
        """Whether what lies there is where and as it should be."""
        return kind(place) == self.goal[1] and self.verb is None and self.category != "look_at_obj_in_light"

    def onward(self):
        if self.at is None:
            return f"go to {self.begin}"
        return f"open {self.at}" if self.closed(self.at) else f"go to {self.places[(self.places.index(self.at) + 1) % len(self.places)]}"

    def put(self):
        return f"open {self.at}" if self.closed(self.at) else f"move {self.holding} to {self.at}"


class House(Seeker):
    """One room with `places` places and `objects` things to carry, most of them out of sight until the agent goes there
    and opens what is closed. A task id is a number as a string and fixes the split, and at a given size the room and the goal.

    Rooms in which the expert needs more than min(4 places, 50) steps are drawn anew: at ALFWorld's horizon of 50, and at 20
    in the smallest house, it wins them all."""

    fallback = 30  # characters sent as the action where the response has no tags
    flags, horizon = ("places", "objects", "horizon"), 20  # what it can be made with; turns an episode may take
    held_out = "test", 192  # split and games of an evaluation
    categories, episode = CATEGORIES, Episode  # an evaluation's columns; the prompts
    max_prompt = 2048  # tokens a prompt may take
    graded = False  # whether there is a score beside won

    def __init__(self, places=5, objects=4, horizon=horizon):
        for name, value, least in (("places", places, 5), ("objects", objects, 2), ("horizon", horizon, 1)):
            if value < least:
                raise ValueError(f"house: {name} must be at least {least}, got {value}")
        self.size, self.horizon = (places, objects), horizon

    def tasks(self, split):
        """Numbers as strings. A number's own hash decides its split, so that options of size never move a task across."""
        if split not in SIZES:
            raise ValueError(f"house has no split {split!r}; known: {', '.join(SIZES)}")
        is_test = lambda n: hashlib.sha256(str(n).encode()).digest()[0] % 5 == 0
        numbers = (f"{n:05d}" for n in range(10 ** 5) if is_test(n) == (split == "test"))
        return [n for n, _ in zip(numbers, range(SIZES[split]))]

    def draw(self, seed):
        """Builds the room of (seed, size): goal, contents, lamp."""
        rng = random.Random(f"{seed} {self.size}")
        n_places, n_objects = self.size
        others = [rng.choice(PLACES[:n_places]) for _ in range(n_places - len(APPLIANCES))]
        if all(p in OPENABLE for p in others):
            others[0] = PLACES[0]  # the lamp stands on something open
        self.contents = {f"{p} {i + 1}": [] for p in set(others) | set(APPLIANCES.values())
                         for i in range((list(APPLIANCES.values()) + others).count(p))}
        self.places = sorted(self.contents)
        self.begin = self.places[0]
        self.lamp_at = rng.choice([p for p in self.places if kind(p) in others and kind(p) not in OPENABLE])

        self.category = rng.choice(list(GOALS))
        self.verb = verb_of(self.category)
        types = list(OBJECTS)[:2 * n_objects]
        obj = rng.choice([t for t in types if self.verb is None or self.verb in OBJECTS[t]])
        self.goal = obj, kind(rng.choice(self.places))
        self.task = GOALS[self.category].format(obj=obj, dest=self.goal[1])
        kinds = [obj] * (1 + (self.category == "pick_two_obj_and_place"))
        kinds += [rng.choice(types) for _ in range(n_objects - len(kinds))]
        for i, t in enumerate(kinds):
            open_to = [p for p in self.places if t != obj or kind(p) != self.goal[1]]  # the goal is never half done
            self.contents[rng.choice(open_to)].append(f"{t} {kinds[:i].count(t) + 1}")
        self.at, self.holding, self.opened, self.props, self.lit = None, None, set(), {}, False
        self.steps, self.won = 0, False

    def reset(self, task):
        try:
            seed = int(task)
        except ValueError:
            raise ValueError(f"house: a task is a number as a string, got {task!r}") from None
        for again in range(1000):
            self.draw(f"{seed}.{again}")
            if len(self.expert() or []) in range(1, min(4 * self.size[0], 50) + 1):
                break
        return f"{self.overview()}\n\nYour task is to: {self.task}", self.info()

    # ---- what can be seen
    def overview(self):
        return f"You are in the middle of a room. Looking quickly around you, you see {listing(self.places[::-1])}."

    def closed(self, place):
        return kind(place) in OPENABLE and place not in self.opened

    def inside(self, place):
        return [] if self.closed(place) else self.contents[place] + [LAMP] * (place == self.lamp_at)

    def view(self, place):
        if self.closed(place):
            return f"The {place} is closed."
        where = f"The {place} is open. In it" if kind(place) in OPENABLE else f"On the {place}"
        return f"{where}, you see {listing(self.inside(place))}."

    def admissible(self):
        here, seen = self.at, self.inside(self.at) if self.at else []
        out = ["help", "inventory", "look"] + [f"go to {p}" for p in self.places if p != here]
        if self.holding:
            out.append(f"examine {self.holding}")
        if here:
            out.append(f"examine {here}")
            if kind(here) in OPENABLE:
                out.append(("open " if self.closed(here) else "close ") + here)
            if self.holding is None:
                out += [f"take {o} from {here}" for o in seen if o != LAMP]
            else:
                out += [f"move {self.holding} to {here}"] * (not self.closed(here))
                out += [f"{v} {self.holding} with {here}" for v, a in APPLIANCES.items()
                        if a == kind(here) and v in OBJECTS[kind(self.holding)]]
            if LAMP in seen:
                out += [f"use {LAMP}", f"examine {LAMP}"]
        return sorted(out)

    def info(self):
        return {"admissible": self.admissible(), "task": self.task, "category": self.category, "won": self.won, "score": float(self.won)}

    # ---- what can be done
    def act(self, command):
        """Carries out an admissible command and returns what the agent reads."""
        verb, _, rest = command.partition(" ")
        here = self.at
        if verb == "go":
            self.at = rest.removeprefix("to ")
            return f"You arrive at {self.at}. {self.view(self.at)}"
        if verb == "open":
            self.opened.add(here)
            return f"You open the {here}. {self.view(here)}"
        if verb == "close":
            self.opened.remove(here)
            return f"You close the {here}."
        if verb == "take":
            self.holding = rest.removesuffix(f" from {here}")
            self.contents[here].remove(self.holding)
            return f"You pick up the {self.holding} from the {here}."
        if verb == "move":
            thing, self.holding = self.holding, None
            self.contents[here].append(thing)
            return f"You move the {thing} to the {here}."
        if verb in APPLIANCES:
            opposite = {"heat": {"cool"}, "cool": {"hot"}}.get(verb, set())
            self.props[self.holding] = self.props.get(self.holding, set()) - opposite | {DONE[verb]}
            return f"You {verb} the {self.holding} using the {here}."
        if verb == "use":
            self.lit = True
            return f"You turn on the {LAMP}."
        if verb == "inventory":
            return f"You are carrying: a {self.holding}." if self.holding else "You are not carrying anything."
        if verb == "look":
            return f"You are facing the {here}. Next to it, you see nothing." if here else self.overview()
        if verb == "help":
            return "Commands: go to, open, close, take, move, clean, heat, cool, use, examine, inventory, look."
        if rest in self.contents:  # examine a place
            return self.view(rest)
        states = sorted(self.props.get(rest, ()), reverse=True)
        words = "cold" if states == ["cool"] else " and ".join(states)  # ALFWorld's own inconsistency
        return f"This is a {words} {rest}." if words else f"There's nothing special about {rest}."

    def step(self, action):
        obs = self.act(action) if action in self.admissible() else NOTHING
        self.steps += 1
        before, self.won = self.won, self.won or self.achieved()
        return obs, REWARD * (self.won and not before), self.won, self.steps >= self.horizon and not self.won, self.info()

    def achieved(self):
        obj, dest = self.goal
        if self.category == "look_at_obj_in_light":
            return self.lit and self.at == self.lamp_at and bool(self.holding) and kind(self.holding) == obj
        return self.placed() >= 1 + (self.category == "pick_two_obj_and_place")

    def placed(self, any_state=False):
        """How many of the goal's objects lie where they should (and, unless any_state, as they should)."""
        obj, dest = self.goal
        return sum(kind(o) == obj and (any_state or self.verb is None or self.treated(o))
                   for p in self.places if kind(p) == dest for o in self.contents[p])

    def treated(self, thing):
        return DONE[self.verb] in self.props.get(thing, ())

    def expert(self):
        """Commands that win from here, found by playing `advice` on a copy; None once the game is won or hopeless."""
        twin, plan = copy.deepcopy(self), []
        while not twin.won and len(plan) <= 8 * len(self.places):
            plan.append(twin.advice()[1])
            twin.act(plan[-1])
            twin.won = twin.achieved()
        return plan if plan and twin.won else None


# -------------------------------------------------------------------------------------------------------- alfworld

def alfworld_root(data=None):
    """The folder json_2.1.1 below `data`, $ALFWORLD_DATA, or where alfworld-download puts it."""
    data = data or os.environ.get("ALFWORLD_DATA") or os.path.expanduser("~/.cache/alfworld")
    root = os.path.join(data, "json_2.1.1")
    if not os.path.isdir(root):
        raise FileNotFoundError(f"no ALFWorld games: {root} does not exist. `alfworld-download` fetches them, --data (or the "
                                f"variable ALFWORLD_DATA) names the folder that holds json_2.1.1")
    return root


@functools.cache
def shortcuts():
    """TextWorld parses the same grammar, deep-copies what nobody changes, sorts the same facts and translates every game four
    times. -> [(module or class, name, what does the same sooner)], and none for a version whose insides nobody has compared."""
    import textworld.version
    if textworld.version.__version__ != "1.7.0":
        return []
    import fast_downward
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

    parse, translate = functools.cache(textgen._parse_and_convert), fast_downward.pddl2sas

    def shallow(x):  # for deepcopy: of a grammar's symbols only the context is ever changed, and always just before it is used
        return [copy.copy(y) for y in x] if isinstance(x, list) else copy.copy(x)

    @functools.lru_cache(1)
    def translate_once(domain, problem):
        argv = sys.argv  # the translator leaves its own in place
        try:
            return translate(domain, problem)
        finally:
            sys.argv = argv

    class State(logic.PddlState):
        """Keeps the facts of a signature in the order in which every query would sort them."""

        def __init__(self, *args):
            self.ordered = {}
            super().__init__(*args)

        @property
        def facts(self):
            return [fact for some in self._facts.values() for fact in some]

        def facts_with_signature(self, signature):
            if signature not in self.ordered:
                self.ordered[signature] = sorted(super().facts_with_signature(signature))
            return self.ordered[signature]

        def add_fact(self, fact):
            self.ordered.pop(fact.signature, None)
            super().add_fact(fact)

        def remove_fact(self, fact):
            self.ordered.pop(fact.signature, None)
            super().remove_fact(fact)

    return [
        (textgen, "deepcopy", shallow),  # these two only together
        (textgen, "_parse_and_convert", lambda text, rule_name, trace=False: shallow(parse(text, rule_name=rule_name))),
        (Rule, "parse_conjunctive_query", staticmethod(functools.cache(Rule.parse_conjunctive_query))),
        # the optimised translation serves a planner that is never asked
        (fast_downward, "pddl2sas", lambda domain, problem, verbose=False, optimize=False: translate_once(domain, problem)),
        # load() and reset() each build the same state: reset() is handed the one load() made. So every reset() must follow a load(), or it would be
        # handed the state that has been played
        (logic, "PddlState", functools.lru_cache(1)(State))]


@contextlib.contextmanager
def hurried():
    """TextWorld with its shortcuts, and without the garbage collector, which takes a third of a translation's time. Afterwards TextWorld is
    as it was."""
    before, collecting = [(where, name, vars(where)[name]) for where, name, _ in shortcuts()], gc.isenabled()
    try:
        gc.disable()
        for where, name, sooner in shortcuts():
            setattr(where, name, sooner)
        yield
    finally:
        for where, name, old in before:
            setattr(where, name, old)
        if collecting:
            gc.enable()


def forget_facts(most=50_000):
    """TextWorld remembers every fact of every game it has ever loaded, nearly a megabyte a game. Facts are compared by value: games that are
    being played do without them."""
    if shortcuts():  # of a TextWorld that is known
        from mementos.core import _memento_cache
        if len(_memento_cache) > most:
            _memento_cache.clear()


class AlfWorld(Seeker):
    """ALFWorld's text games, played by TextWorld. A task id is the game's folder below json_2.1.1:
    "valid_seen/pick_heat_then_place_in_recep-Egg-None-Fridge-14/trial_T2019...". Observations are the engine's own; `stock`
    leaves TextWorld as it is, some twenty times slower a step."""

    fallback, flags, horizon, max_prompt, graded = 30, ("data", "horizon"), 50, 2048, False
    held_out, categories, episode = ("valid_seen", 140), CATEGORIES, Episode
    CHANGES = set("go open close take move clean heat cool use slice".split())  # the other verbs look, or ask

    def __init__(self, data=None, horizon=horizon, stock=False):
        if horizon < 1:
            raise ValueError(f"alfworld: horizon must be at least 1, got {horizon}")
        self.root, self.horizon, self.game = alfworld_root(data), horizon, None
        self.engine = contextlib.nullcontext if stock else hurried

    def tasks(self, split):
        if split not in ("train", "valid_seen", "valid_unseen"):
            raise ValueError(f"alfworld has no split {split!r}; known: train, valid_seen, valid_unseen")
        games = sorted(glob.glob(os.path.join(self.root, split, "*", "*", "game.tw-pddl")))
        if not games:
            raise FileNotFoundError(f"no games (*/*/game.tw-pddl) below {os.path.join(self.root, split)}; `alfworld-download` fetches them")
        return [os.path.relpath(os.path.dirname(g), self.root).replace(os.sep, "/") for g in games]

    def reset(self, task):
        if not os.environ.get("ALFWORLD_DATA"):  # or the package, once imported, makes a folder of its own and points there
            os.environ["ALFWORLD_DATA"] = os.path.dirname(self.root)
        try:  # here, not above: nobody needs the package for the other environments
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        except ImportError as error:
            raise ImportError(f"--env alfworld needs the alfworld package (pip install alfworld): {error}") from None
        path = os.path.join(self.root, task, "game.tw-pddl")
        if not os.path.isfile(path):
            raise ValueError(f"alfworld: no game {path}")
        if self.engine is hurried:
            forget_facts()
        with self.engine():
            if self.game is None:
                wanted = textworld.EnvInfos(won=True, admissible_commands=True)
                self.game = textworld.start(path, wanted, wrappers=[AlfredDemangler])
            else:
                self.game.load(path)
            state = self.game.reset()
        with open(path) as file:
            self.walkthrough = json.load(file)["walkthrough"]
        self.category, *names = task.split("/")[1].split("-")
        self.goal, self.verb = [name.lower() for name in names[:3:2]], verb_of(self.category)
        self.task = re.search(r"Your task is to: (.*)", state.feedback)[1].strip()
        self.steps, self.played, self.won = 0, [], False  # played: what has changed something
        self.places = [c.removeprefix("go to ") for c in state.admissible_commands if travels(c)]
        self.begin = next((c.removeprefix("go to ") for c in self.walkthrough if travels(c)), None)  # so that it is learned where things usually are
        return state.feedback, self.info(state)

    def info(self, state):
        """Of the state the game is in now, which the demonstrator sees as well."""
        self.offered = set(state.admissible_commands)
        return {"admissible": list(state.admissible_commands), "task": self.task, "category": self.category,
                "won": self.won, "score": float(self.won)}

    def step(self, action):
        action = action.strip()  # as TextWorld does
        with self.engine():
            state, _, _ = self.game.step(action)
        self.steps += 1
        if action.split(" ")[0] in self.CHANGES and state.feedback.strip() != NOTHING:
            self.played.append(action)
        before, self.won = self.won, self.won or bool(state.won)
        return state.feedback, REWARD * (self.won and not before), self.won, self.steps >= self.horizon and not self.won, self.info(state)

    # ---- the demonstrator
    def advice(self, forgetful=False):
        thought, label = super().advice(forgetful)  # places may share a spot, which offers what lies on any of them but not the way to itself
        if thought == f"find {self.goal[0]}" and not label.startswith("take "):
            near = [c for c in sorted(self.offered) if re.match(rf"take {self.goal[0]} \d+ from ", c) and not self.stores(c.split(" from ")[1])]
            label = near[0] if near else label
        if travels(label) and label not in self.offered:
            after = self.places.index(label.removeprefix("go to ")) + 1
            label = next(f"go to {p}" for p in self.places[after:] + self.places if f"go to {p}" in self.offered)
        return thought, label

    def expert(self):
        """What is left of the game's walkthrough; None once anything else has changed it."""
        done = len(self.played)
        return self.walkthrough[done:] or None if self.played == self.walkthrough[:done] else None

    @property
    def at(self):
        return next((c.removeprefix("go to ") for c in reversed(self.played) if travels(c)), None)

    @property
    def holding(self):
        last = next((c for c in reversed(self.played) if c.startswith(("take ", "move "))), "move")
        return last.removeprefix("take ").split(" from ")[0] if last.startswith("take ") else None

    def closed(self, place):
        return f"open {place}" in self.offered

    def inside(self, place):
        """What can be taken or used here: `place` is where the player stands."""
        here = f" from {place}"
        return (sorted(c[5:].removesuffix(here) for c in self.offered if c.startswith("take ") and c.endswith(here))
                + [LAMP] * (f"use {LAMP}" in self.offered))

    def treated(self, thing):
        """Heating undoes cooling, and the other way round: the last of the two counts."""
        verbs = ("heat", "cool") if self.verb in ("heat", "cool") else (self.verb,)
        done = [c for c in self.played if c.startswith(tuple(f"{verb} {thing} with " for verb in verbs))]
        return bool(done) and done[-1].startswith(self.verb)

    def placed(self, any_state):
        """How many of the goal's objects were put where they should be, in any_state, and left there. (That they are as they should be, TextWorld knows.)"""
        lies, (obj, dest) = {}, self.goal
        for verb, thing, place in (re.fullmatch(r"(take|move) (.+) (?:from|to) (.+)", c).groups() for c in self.played if c.startswith(("take ", "move "))):
            lies[thing] = place if verb == "move" else ""
        return sum(kind(t) == obj and kind(p) == dest for t, p in lies.items())


# --------------------------------------------------------------------------------------------------------- webshop

# WebShop (princeton-nlp/WebShop 64fa2a5) without Java, Flask or conda: its catalogue, goals, search, pages and reward. Where a line looks odd,
# it is the original's oddity, kept because scores are compared.

STOPWORDS = set("a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with".split())
COLORS = """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel champagne charcoal
cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape
graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull
slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow""".split()


@functools.cache
def tokenizer():
    """Lucene's StandardTokenizer: the word boundaries of UAX #29, of which it keeps what has a letter, a digit, an ideograph or a pictograph."""
    import regex  # the standard library does not know these properties

    marks = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*"  # belong to what they follow
    wb = lambda *names: "(?:[" + "".join(rf"\p{{WB={name}}}" for name in names) + f"]{marks})"
    letter, digit, katakana, joiner = wb("ALetter", "Hebrew_Letter"), wb("Numeric"), wb("Katakana"), wb("ExtendNumLet")
    in_word, in_number = wb("MidLetter", "MidNumLet", "Single_Quote"), wb("MidNum", "MidNumLet", "Single_Quote")
    run = f"(?:(?:{letter}(?:{in_word}{letter})*|{digit}(?:{in_number}{digit})*)+|{katakana}+)"
    sign = (r"[[\p{Extended_Pictographic}\u2388\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2712\u2763-\u2767\U0001F000-\U0001FAFF]"
            r"--\p{Regional_Indicator}]") + marks
    alone = rf"[\p{{Han}}\p{{Hiragana}}]{marks}|\p{{Regional_Indicator}}{{2}}{marks}|{sign}(?:(?<=\u200d){sign})*"
    return regex.compile(rf"{joiner}*{run}(?:{joiner}+{run})*{joiner}*|{alone}|\p{{Line_Break=Complex_Context}}+", regex.V1)


# Porter's steps 2 to 4 as Martin Porter's own later program has them: suffix -> what replaces it
STEP_2 = dict(pair.split(":") for pair in """ational:ate tional:tion enci:ence anci:ance izer:ize bli:ble alli:al entli:ent eli:e ousli:ous ization:ize
ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous aliti:al iviti:ive biliti:ble logi:log""".split())
STEP_3 = dict(pair.split(":") for pair in "icate:ic ative: alize:al iciti:ic ical:ic ful: ness:".split())
STEP_4 = dict.fromkeys("al ance ence er ic able ible ant ement ment ent sion tion ou ism ate iti ous ive ize".split(), "") | {"sion": "s", "tion": "t"}
ENDINGS = [re.compile(f"^(.*?)({'|'.join(step)})$", re.S) for step in (STEP_2, STEP_3, STEP_4)]
CONSONANTS, VOWELS = "[^aeiou][^aeiouy]*", "[aeiouy][aeiou]*"  # a y after a consonant is a vowel
MEASURE = re.compile(f"^(?:{CONSONANTS})?((?:{VOWELS}{CONSONANTS})*)(?:{VOWELS})?$", re.S)
HAS_VOWEL = re.compile(f"^(?:{CONSONANTS})?[aeiouy]", re.S)
SHORT = re.compile(f"^{CONSONANTS}[aeiouy][^aeiouwxy]$", re.S)


def measure(stem):  # m of [C](VC)^m[V]; all that matters is 0, 1 or more
    return len(re.findall(f"{VOWELS}{CONSONANTS}", MEASURE.match(stem)[1]))


def stem(word):
    """Porter's stemmer as Lucene has it."""
    if len(word) < 3:
        return word
    y = word[0] == "y"  # a consonant there
    w = "Y" + word[1:] if y else word
    if w.endswith(("sses", "ies")):
        w = w[:-2]
    elif w.endswith("s") and not w.endswith("ss"):
        w = w[:-1]
    cut = 2 if w.endswith("ed") else 3
    if w.endswith("eed"):
        w = w[:-1] if measure(w[:-3]) else w
    elif w.endswith(("ed", "ing")) and HAS_VOWEL.match(w[:-cut]):
        w = w[:-cut]
        if w.endswith(("at", "bl", "iz")) or SHORT.match(w):
            w += "e"
        elif re.search(r"([^aeiouylsz])\1$", w):
            w = w[:-1]
    if w.endswith("y") and HAS_VOWEL.match(w[:-1]):
        w = w[:-1] + "i"
    for ending, step, least in zip(ENDINGS, (STEP_2, STEP_3, STEP_4), (1, 1, 2)):
        found = ending.match(w)
        if found and measure(found[1] + step[found[2]][:1] * (step is STEP_4)) >= least:
            w = found[1] + step[found[2]]
    if w.endswith("e") and (measure(w[:-1]) > 1 or measure(w[:-1]) == 1 and not SHORT.match(w[:-1])):
        w = w[:-1]
    if w.endswith("ll") and measure(w) > 1:
        w = w[:-1]
    return "y" + w[1:] if y else w


@functools.lru_cache(1 << 18)
def terms_between_blanks(text):
    words = [w for m in tokenizer().finditer(text) for w in re.findall("(?s).{1,255}", m.group())]  # longer ones are cut
    words = [re.sub(r"['\u2019\uff07]s$", "", w) for w in words]
    return [stem(w) for w in words if w not in STOPWORDS]


def terms(text):
    """Text -> the terms that are indexed and searched: Lucene's English analyzer. No word has a blank inside, and most strings between blanks
    come again and again."""
    return [term for piece in text.lower().split() for term in terms_between_blanks(piece)]


def keys_of(words):
    """64 bits for each: an index of a million terms then needs no dictionary."""
    return np.array([int.from_bytes(hashlib.blake2b(w.encode("utf-8", "replace"), digest_size=8).digest(), "little") for w in words], np.uint64)


def rounded_length(n):
    """A document's length after Lucene has kept it in one byte: exact below 40, then three bits after the leading one."""
    if n < 40:
        return n
    shift = (n - 24).bit_length() - 4
    return 24 + ((n - 24) >> shift << shift)


# ---- webshop: the catalogue

SHOP_DATA = ("the README says where WebShop's catalogue is to be had; --data (or the variable WEBSHOP_DATA) names the folder that holds "
             "items_shuffle.json, items_ins_v2.json and items_human_ins.json, or the first two as items_shuffle_1000.json and items_ins_v2_1000.json")


def json_items(path, chunk=1 << 22):
    """The elements of a file's JSON array, one at a time: the whole catalogue has five gigabytes. ValueError where it is no such file."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")

    def read():
        try:
            return file.read(chunk)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is broken: {error}") from None

    with open(path, encoding="utf-8") as file, tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, delay=2, mininterval=1,
                                                    desc=f"indexing {os.path.basename(path)}") as bar:
        text, at = read().lstrip(), 1
        if text[:1] != "[":
            raise ValueError(f"{path} is no JSON array of products")
        while True:
            bar.update(file.buffer.tell() - bar.n)
            at = between.match(text, at).end()
            if text[at:at + 1] == "]":
                return
            try:
                item, at = decode(text, at)
            except json.JSONDecodeError as error:  # broken, or cut off here
                more = read()
                if not more or len(text) - at > 16 * max(chunk, 1 << 20):
                    raise ValueError(f"{path} is broken: {error}") from None
                text, at = text[at:] + more, 0
                continue
            yield item


def json_object(path):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object of products")
    return found


def record(item, about, human, nouns):
    """What is kept of a product: of its entries in the catalogue, the attributes' file, the human instructions and the table of nouns."""
    bullets, prices = item["small_description"], re.findall(r"\$([^$]*)", item.get("pricing") or "")
    bullets = bullets if isinstance(bullets, list) else [bullets]
    prices = [float(re.sub(r"[^\d.]", "", price)) for price in prices[:2]] or [100.0]
    attributes = about.get("attributes", ["DUMMY_ATTR"])
    texts = [item[k] for k in ("asin", "name", "full_description", "category", "query", "product_category")] + bullets + attributes
    if not all(isinstance(text, str) for text in texts) or not item["asin"].isascii() or not all(map(math.isfinite, prices)):
        raise ValueError("a text is none, or a price no number")
    options = {name.lower(): [v["value"].strip().replace("/", " | ").lower() for v in values]
               for name, values in (item["customization_options"] or {}).items() if values is not None}
    return {"asin": item["asin"], "title": item["name"], "description": item["full_description"],
            "bullets": bullets, "prices": prices, "options": options, "attributes": attributes, "category": item["category"], "query": item["query"].lower().strip(),
            "product_category": item["product_category"], "nouns": nouns,
            "synthetic": None if about.get("instruction") is None else [about["instruction"], about["instruction_attributes"]],
            "human": [[h["instruction"], h["instruction_attributes"], h["instruction_options"]] for h in human if h["instruction_attributes"]]}


def document(product):
    """The text of a product that is searched."""
    options = ", and ".join(f"{name}: " + ", ".join(values) for name, values in product["options"].items())
    return " ".join([product["title"], product["description"], (product["bullets"] or [""])[0], options])


def webshop_root(data=None):
    """The folder of the catalogue: `data`, or $WEBSHOP_DATA."""
    data = data or os.environ.get("WEBSHOP_DATA")
    if not data:
        raise FileNotFoundError(f"webshop: no catalogue; {SHOP_DATA}")
    return data


class Catalogue:
    """WebShop's products and the index of their words, on disk and mapped into memory, so that processes share them. Made once from the files of
    a folder, and kept below ~/.cache/sapo ($XDG_CACHE_HOME).

    product(n)     a product as `record` has it                 search(query)  the numbers of the products that fit best
    N products:    asins, low, high (prices; high is NaN where there is a single one), synthetic, human (how many goals; -1: no instruction), categories and
                   queries (hashes), rank (in the order of asins), places (N + 1, of the records in products.jsonl), filled (how many have a word)
    M terms:       keys (hashes, sorted), first (M + 1); term i is in the products docs[first[i]:first[i + 1]] with those weights"""

    ARRAYS = "asins low high synthetic human categories queries places keys first docs weights filled rank".split()

    def __init__(self, data):
        for size in ("", "_1000"):  # all of WebShop's products where they are there, else its thousand
            self.files = [os.path.join(data, name) for name in (f"items_shuffle{size}.json", f"items_ins_v2{size}.json", "items_human_ins.json")]
            if os.path.isfile(self.files[0]):
                break
        for path in self.files:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"webshop: {path} does not exist; {SHOP_DATA}")
        self.files.append(os.path.join(data, "title_nouns.json"))
        stamps = [(os.path.abspath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in self.files if os.path.isfile(f)]
        key = hashlib.sha256(json.dumps([2, stamps]).encode()).hexdigest()[:16]  # 2: the version of what is kept
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sapo")
        self.folder = os.path.join(cache, f"webshop-{key}")
        if not os.path.isdir(self.folder):
            os.makedirs(cache, exist_ok=True)
            with open(f"{self.folder}.lock", "w") as lock:  # of several processes one makes it, the others wait
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.isdir(self.folder):
                    self.build(f"{self.folder}.new")
        try:
            for name in self.ARRAYS:
                setattr(self, name, np.asarray(np.load(f"{self.folder}/{name}.npy", mmap_mode="r")))
            with open(f"{self.folder}/products.jsonl", "rb") as file:
                self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"webshop: {self.folder} is damaged, delete it: {error}") from None
        self.product = functools.lru_cache(1 << 13)(self.product)
        self.search = functools.lru_cache(1 << 12)(self.search)

    def __len__(self):
        return len(self.asins)

    def product(self, n):
        return json.loads(self.text[self.places[n]:self.places[n + 1]])

    # ---- making it
    def records(self):
        """The products of the files with their terms, each asin once."""
        about, human, nouns = (json_object(f) if os.path.isfile(f) else {} for f in self.files[1:])
        seen = {"nan"}
        for n, item in enumerate(json_items(self.files[0])):
            try:
                asin = item["asin"]
                if len(asin) > 10 or asin in seen:
                    continue
                product = record(item, about.get(asin, {}), human.get(asin, []), nouns.get(asin))
                count = Counter(terms(document(product)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{self.files[0]}: product {n}, or what the other files say of it, is not as WebShop's are "
                                 f"({type(error).__name__}: {error})") from None
            seen.add(asin)
            yield product, count
        if len(seen) == 1:
            raise ValueError(f"{self.files[0]} holds no product")

    def build(self, folder):
        """Reads the files once, into `folder`; what it makes appears all at once or not at all."""
        shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed
        os.mkdir(folder)
        try:
            facts, places, number = [], [0], {}
            words, docs, times, lengths = array("I"), array("I"), array("H"), array("I")
            with open(f"{folder}/products.jsonl", "wb") as file:
                for n, (product, count) in enumerate(self.records()):
                    goals = math.prod(map(len, product["options"].values())) if product["synthetic"] else -1
                    facts.append((product["asin"].encode(), *(product["prices"] + [math.nan])[:2], goals, len(product["human"]),
                                  *keys_of([product["category"], product["query"]])))
                    words.extend(number.setdefault(word, len(number)) for word in count)
                    docs.extend([n] * len(count))
                    times.extend(min(times, 65535) for times in count.values())
                    lengths.append(count.total())
                    file.write(json.dumps(product).encode() + b"\n")
                    places.append(file.tell())
            arrays = dict(zip(("asins", "low", "high", "synthetic", "human", "categories", "queries"), map(np.array, zip(*facts))))
            arrays |= {"places": np.array(places)} | self.postings(arrays["asins"], number, words, docs, times, lengths)
            for name, values in arrays.items():
                np.save(f"{folder}/{name}.npy", values)
            os.rename(folder, self.folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def postings(asins, number, words, docs, times, lengths):
        """From every occurrence to the index: words[i] is in product docs[i] so many times; a weight is tf / (k1 (1 - b + b length / mean))."""
        one, k1, b = np.float32(1), np.float32(0.9), np.float32(0.4)
        lengths = np.frombuffer(lengths, np.uint32)
        mean = np.float32(lengths.sum() / max(1, (lengths > 0).sum()))
        kept = np.array([rounded_length(int(n)) for n in lengths], np.float32)
        inverse = one / (k1 * ((one - b) + b * kept / mean)) if mean else kept
        words, docs, times = np.frombuffer(words, np.uint32), np.frombuffer(docs, np.uint32), np.frombuffer(times, np.uint16)
        keys = keys_of(number)
        order = np.argsort(keys)
        place = np.empty(len(order), np.uint32)
        place[order] = np.arange(len(order))
        words = place[words]  # terms in the order of their keys, so that a key is found by bisection
        by_term = np.argsort(words, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(words, minlength=len(order)))])
        rank = np.empty(len(asins), np.uint32)
        rank[np.argsort(asins, kind="stable")] = np.arange(len(asins))
        return {"keys": keys[order], "first": first, "docs": docs[by_term], "weights": times[by_term].astype(np.float32) * inverse[docs[by_term]],
                "filled": np.array((lengths > 0).sum()), "rank": rank}

    # ---- using it
    def search(self, query, k=50):
        """The `k` best products for a query: Lucene's BM25 with k1 = 0.9 and b = 0.4, in its precision; equals stand in the order of their asins."""
        count = Counter(terms(query))
        scores, one = np.zeros(len(self)), np.float32(1)
        for key, times in zip(keys_of(count), count.values()):
            i = np.searchsorted(self.keys, key)
            if i < len(self.keys) and self.keys[i] == key:
                span = slice(self.first[i], self.first[i + 1])
                n = span.stop - span.start
                idf = np.float32(times) * np.float32(math.log(1 + (self.filled - n + 0.5) / (n + 0.5)))
                scores[self.docs[span]] += idf - idf / (one + self.weights[span])
        scores = scores.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > k:
            hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
        return hits[np.lexsort((self.rank[hits], -scores[hits]))][:k].tolist()


ANY_PRICE = 1000000


class Goals:
    """What the shopper is asked for: the original's goals in the original's order, and the prices drawn with them.

    goals[i] -> {text, asin, options, attributes, price_upper, title, query, category, product_category, nouns}"""

    def __init__(self, catalogue, source="synthetic", seed=0):
        if source not in ("synthetic", "human"):
            raise ValueError(f"webshop: unknown goals {source!r}; known: synthetic, human")
        if not isinstance(seed, int):
            raise ValueError(f"webshop: the goals' seed must be a whole number, got {seed!r}")
        self.catalogue, self.source = catalogue, source
        path = f"{catalogue.folder}/goals-{source}-{seed}.npz"
        if os.path.isfile(path):
            with np.load(path) as stored:
                drawn = dict(stored)
        else:
            drawn = self.draw(random.Random(seed))
            with contextlib.suppress(OSError):  # a folder that cannot be written to: they are drawn again next time
                np.savez(f"{path}.{os.getpid()}.npz", **drawn)
                os.replace(f"{path}.{os.getpid()}.npz", path)
        self.prices, self.products, self.parts, self.caps = (drawn[name] for name in ("prices", "products", "parts", "caps"))
        if not len(self):
            raise ValueError(f"webshop: none of the products has {source} goals; there are synthetic and human ones")

    def __len__(self):
        return len(self.products)

    def draw(self, rng):
        """Prices and price caps from one stream of random numbers, in the order of the products; then the shuffle."""
        prices, low, high = np.array(self.catalogue.low), self.catalogue.low, self.catalogue.high
        for n in np.flatnonzero(~np.isnan(high)):
            prices[n] = rng.uniform(float(low[n]), float(high[n]))
        many, products, parts, caps = getattr(self.catalogue, self.source), array("q"), array("q"), array("d")
        for n in np.flatnonzero(many >= 0):
            least = int(prices[n] // 10) + 1
            above = [10.0 * i for i in range(least, min(least + 4, 100))]  # the next multiples of ten, below 1000
            for part in range(max(many[n], 1) if self.source == "synthetic" else many[n]):
                if part == 0 or self.source == "human":  # all combinations of a product's options have one cap
                    cap = max(rng.sample(above, 2)) if len(above) > 1 else ANY_PRICE
                if part < many[n]:
                    products.append(n), parts.append(part), caps.append(cap)
        order = list(range(len(products)))
        random.Random(233).shuffle(order)
        return {"prices": prices} | {name: np.array(x)[order] for name, x in (("products", products), ("parts", parts), ("caps", caps))}

    def __getitem__(self, i):
        product, part, cap = self.catalogue.product(int(self.products[i])), int(self.parts[i]), float(self.caps[i])
        if self.source == "human":
            text, attributes, options = product["human"][part]
            text = text.strip(".")
        else:
            text, attributes = product["synthetic"]
            options = self.combination(product["options"], part)
            text += " with " * bool(options) + ", and ".join(f"{name}: {value}" for name, value in options.items())
        if cap < ANY_PRICE:
            text += f", and price lower than {cap:.2f} dollars"
        return {k: product[k] for k in ("asin", "title", "query", "category", "product_category", "nouns")} | {
            "text": text, "attributes": attributes, "options": options, "price_upper": cap}

    @staticmethod
    def combination(options, part):
        """Number `part` of all combinations of the options, in the order of their names, the last one's values changing first."""
        out = {}
        for name in sorted(options, reverse=True):
            part, choice = divmod(part, len(options[name]))
            out[name] = options[name][choice]
        return dict(sorted(out.items()))

    def split(self, split):
        """Numbers of the goals of train, valid or test, which share no product; or of the original's test_500, eval_1000 and train_rest,
        which do."""
        ranges = {"test_500": slice(0, 500), "eval_1000": slice(500, 1500), "train_rest": slice(1500, None)}
        if split in ranges:
            return list(range(len(self)))[ranges[split]]
        shares = {"test": (0,), "valid": (1,), "train": range(2, 10)}
        if split not in shares:
            raise ValueError(f"webshop has no split {split!r}; known: {', '.join([*shares, *ranges])}")
        share = {n: hashlib.sha256(bytes(self.catalogue.asins[n])).digest()[0] % 10 for n in np.unique(self.products)}
        return [i for i, n in enumerate(self.products) if share[n] in shares[split]]


catalogue_of, goals_of = functools.cache(Catalogue), functools.cache(Goals)  # once for all environments of a process


# ---- the reward


@functools.lru_cache(1 << 16)
def token_set_ratio(a, b):
    """thefuzz 0.19's likeness of two strings, 0 to 100, whatever the order of their words and however often each occurs."""
    plain = [re.sub(r"\W", " ", re.sub(r"[\x80-\xff]", "", s)).lower().split() for s in (a, b)]
    if not all(plain):
        return 0
    one, two = map(set, plain)
    both = " ".join(sorted(one & two))
    a, b = (" ".join([both] * bool(both) + sorted(rest)) for rest in (one - two, two - one))
    return max(round(100 * difflib.SequenceMatcher(None, x, y).ratio()) for x, y in ((both, a), (both, b), (a, b)))


def first_color(option):
    """An option with a colour's name anywhere in it ('standard' has 'tan') counts as that colour; a pair (name, value) where it holds one."""
    return next((color for color in COLORS if color in option), option)


@functools.cache
def spacy_model():
    for name in ("en_core_web_sm", "en_core_web_lg"):
        if importlib.util.find_spec(name):
            import spacy
            return spacy.load(name, disable=["ner", "lemmatizer"])


@functools.lru_cache(1 << 13)
def spacy_nouns(title):
    """The nouns of a title by spaCy's model, or None where none is installed."""
    return spacy_model() and [t.text.lower() for t in spacy_model()(title) if t.pos_ in ("NOUN", "PROPN")]


@functools.cache
def warn_of_nouns():
    warnings.warn("webshop: neither a spaCy model (python -m spacy download en_core_web_sm) nor title_nouns.json beside the catalogue: every word of a "
                  "title that is not a stopword counts as a noun, which changes the type's reward of about one product in eleven", stacklevel=2)


def nouns_of(product):
    """By title_nouns.json, which does not depend on what is installed; else by spaCy's model; else guessed, with a warning."""
    known = spacy_nouns(product["title"]) if product["nouns"] is None else product["nouns"]
    if known is None:
        warn_of_nouns()
        known = [word for word in re.findall(r"[a-z]+", product["title"].lower()) if word not in STOPWORDS]
    return known


def type_reward(product, goal):
    """1, 0.5, 0.1 or 0: how much a product is of the kind that was asked for."""
    parts = lambda x: {part.strip() for part in x["product_category"].split("\u203a")}
    bought, wanted = nouns_of(product), nouns_of(goal)
    title = len(set(bought) & set(wanted)) / len(wanted) if wanted else 0.2
    if title < 0.1:
        return 0.1 if title else 0.0
    return 1.0 if product["query"] == goal["query"] or len(parts(product) & parts(goal)) >= 2 or title > 0.2 else 0.5


def purchase_score(product, price, options, goal):
    """The original's reward in [0, 1] of buying `product` at `price` with `options` {name: value} for `goal`."""
    texts = [product["title"].lower(), " ".join(product["bullets"]).lower(), product["description"].lower()]
    attributes = sum(any(token_set_ratio(has, wanted) > 85 for has in product["attributes"]) or any(wanted in text for text in texts)
                     for wanted in goal["attributes"])
    wanted = goal["options"]
    wanted = [first_color(option) for option in (wanted.items() if isinstance(wanted, dict) else wanted)]
    chosen = [first_color(value) for value in options.values()]
    matched = sum(any(token_set_ratio(has, str(option)) > 85 for has in chosen) for option in wanted)
    share = (attributes + matched + (price <= goal["price_upper"])) / (len(goal["attributes"]) + len(wanted) + 1)
    return float(share * type_reward(product, goal))


# ---- the pages

BACK, PREV, NEXT = ("Back to Search", "button"), ("< Prev", "button"), ("Next >", "button")
SUBPAGES = ("description", "features", "reviews")
NO_OPTIONS = {"search", "back to search", "< prev", "buy now", *SUBPAGES}  # what a click does not take for an option's value


def price_tag(product):
    return " to ".join(f"${price}" for price in product["prices"])


class WebShop:
    """The shop. A task id is a goal's number in the original's order. The observation is the page as the original's text environment gives
    it (mode `text` or `text_rich`); score is the original's reward of the step, between 0 and 1, and the step that buys with a score of exactly
    1 pays REWARD. Departures: the README lists them."""

    fallback, flags, horizon, max_prompt, graded = 20, ("data", "goals", "horizon"), 15, 4096, True  # its pages are long
    held_out, categories, episode = ("test", 500), SHELVES, ShopEpisode
    finds_back = False  # a random click may buy; and few pages list a search, so that none would be among the random commands

    def __init__(self, data=None, goals="synthetic", seed=0, mode="text", horizon=horizon):
        if horizon < 1:
            raise ValueError(f"webshop: horizon must be at least 1, got {horizon}")
        if mode not in ("text", "text_rich"):
            raise ValueError(f"webshop: unknown mode {mode!r}; known: text, text_rich")
        self.catalogue = catalogue_of(webshop_root(data))
        self.goals, self.mode, self.horizon = goals_of(self.catalogue, goals, seed), mode, horizon
        nouns_of(self.catalogue.product(0))  # so that its warning comes at once

    def tasks(self, split):
        numbers = self.goals.split(split)
        if not numbers:
            raise ValueError(f"webshop: no {self.goals.source} goal falls into the split {split!r} of this catalogue")
        return [f"{i:07d}" for i in numbers]

    def reset(self, task):
        try:
            number = int(task)
        except (TypeError, ValueError):
            raise ValueError(f"webshop: a task is the number of a goal, got {task!r}") from None
        if not 0 <= number < len(self.goals):
            raise ValueError(f"webshop: no goal {number}; there are {len(self.goals)}, from 0")
        self.goal, self.target = self.goals[number], int(self.goals.products[number])
        self.steps, self.score, self.rng = 0, 0.0, random.Random(number)
        self.go_home()
        return self.observation(), self.info()

    def info(self):
        actions = [f"click[{x}]" for x in self.clickables()]
        return {"admissible": ["search[<your query>]"] * (self.page == "search") + actions, "task": self.goal["text"],
                "category": self.goal["category"], "won": self.score == 1.0, "score": self.score}

    def step(self, action):
        self.score, bought = 0.0, False
        name, argument = shop_command(action)
        if name == "search":
            self.look_up(argument.split(" "), 1)
        elif name == "click" and argument != "search" and argument in self.clickables():
            bought = self.click(argument)
        self.steps += 1
        return self.observation(), REWARD * (self.score == 1.0), bought, self.steps >= self.horizon and not bought, self.info()

    # ---- what can be done
    def go_home(self):
        self.page, self.keywords, self.page_number, self.item, self.options, self.visited = "search", [], 1, None, {}, set()

    def look_up(self, keywords, number):
        """The results page `number` of a search."""
        self.page, self.keywords, self.page_number, self.item, self.options = "results", keywords, number, None, {}
        self.hits = self.find(keywords)
        self.on_page = self.hits[10 * (number - 1):10 * number]

    def find(self, keywords):
        """Products for a query, best first. The original's three special first words are kept: <r> draws fifty, <c> and <q> name a
        category or a product's own query."""
        first, *rest = keywords
        if first == "<r>":
            return self.rng.sample(range(len(self.catalogue)), min(50, len(self.catalogue)))
        if first == "<c>":
            return np.flatnonzero(self.catalogue.categories == keys_of([rest[0].strip() if rest else ""])).tolist()
        if first == "<q>":
            return np.flatnonzero(self.catalogue.queries == keys_of([" ".join(rest).strip()])).tolist()
        return self.catalogue.search(" ".join(keywords))

    def click(self, x):
        """Follows a clickable; true where that was a purchase."""
        if x == "buy now":
            self.page = "done"
            self.score = self.paid = purchase_score(self.catalogue.product(self.item), self.goals.prices[self.item], self.options, self.goal)
            return True
        if x == "back to search":
            self.go_home()
        elif x in ("next >", "< prev") and self.page == "results":
            self.look_up(self.keywords, self.page_number + (1 if x == "next >" else -1))
        elif x == "< prev" and self.page == "item":
            self.look_up(self.keywords, self.page_number)
        elif x in SUBPAGES and self.page == "item":
            self.page = x
        elif self.page == "results":
            self.page, self.item = "item", next(n for n in self.on_page if self.catalogue.product(n)["asin"].lower() == x)
            self.visited.add(self.item)
        else:
            if x != "< prev":  # of a sub-page, which leads back to the product
                self.options[self.owners(self.item)[x]] = x
            self.page = "item"
        return False

    def owners(self, item):
        """Option value -> its option's name, of two the last."""
        return {value: name for name, values in self.catalogue.product(item)["options"].items() for value in values}

    def clickables(self):
        nodes = self.nodes()
        return list(dict.fromkeys([text.lower() for wanted in ("button", "link") for text, what in nodes if what == wanted]
                                  + [text for text, what in nodes if what == "label"]))

    # ---- what can be seen
    def nodes(self):
        """The page's pieces of text in their order: (text, button, link, label or nothing)."""
        plain = lambda *texts: [(text, "") for text in texts]
        if self.page == "search":
            return plain("WebShop", "Instruction: ", self.goal["text"]) + [("Search", "button")]
        top = plain("Instruction:", self.goal["text"]) + [BACK]
        if self.page == "results":
            out = top + plain(f"Page {self.page_number} (Total results: {len(self.hits)})") + [PREV] * (self.page_number > 1) + [NEXT]
            for product in map(self.catalogue.product, self.on_page):
                out += [(product["asin"], "link")] + plain(product["title"], price_tag(product))
            return out
        product = self.catalogue.product(self.item)
        if self.page == "item":
            out = top + [PREV]
            for name, values in product["options"].items():
                out += plain(name) + [(value, "label") for value in values]
            return (out + plain(product["title"], f"Price: {price_tag(product)}", "Rating: N.A.")
                    + [(x, "button") for x in ("Description", "Features", "Reviews", "Buy Now")])
        if self.page == "done":
            options = json.dumps(self.options, sort_keys=True)
            for c in "<>&'":
                options = options.replace(c, f"\\u{ord(c):04x}")
            return plain("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)", "Purchased", "asin", product["asin"],
                         "options", options, "attrs", "None", "category", "None", "query", "None", "product category", "None", "Target", "asin", "options",
                         "attrs", "price upper", "instuction text", "category", "product category", "query", "Goal ", "None", "Reward",
                         "Your score (min 0.0, max 1.0)", str(self.paid), "Reward Details ", "None")
        return top + [PREV] + plain(*{"description": [product["description"]], "features": [f" {b}" for b in product["bullets"]], "reviews": []}[self.page])

    def observation(self):
        nodes = []
        for text, what in self.nodes():
            if text.strip(" \t\n\f\r"):
                nodes.append((text, what))
            elif text and "\n" not in text:  # what HTML makes of blanks
                nodes.append((" ", what))
        if self.mode == "text":
            return " [SEP] ".join(text.strip() for text, _ in nodes)
        # an option counts as chosen where the page's address, query and all, has it in quotes
        address, chosen, out = f"{'+'.join(self.keywords)}/{self.page_number}/{json.dumps(self.options)}", "", ""
        for text, what in nodes:
            clicked = f'"{text}"' in address if what == "label" else what == "link" and any(
                self.catalogue.product(n)["asin"] == text for n in self.visited)
            if clicked and what == "label":
                chosen = f"You have clicked {text}.\n" + chosen
            mark = "clicked button" if clicked else "button"
            indent = {"label": "  ", "link": "\n"}.get(what, "")
            out += (f"{indent}[{mark}] {text} [{mark}_]" if what else text) + "\n"
        return chosen + out

    # ---- the demonstrator
    def expert(self):
        """What is left to do to buy the goal from here, or None where that does not score 1: one synthetic goal in fifteen cannot be had so."""
        product, options = self.catalogue.product(self.target), self.choices()
        if self.page == "done" or purchase_score(product, self.goals.prices[self.target], options, self.goal) < 1:
            return None
        there = self.item == self.target
        way = ["click[< prev]"] * (self.page in SUBPAGES) if there else self.way_to(product)
        have = self.options if there else {}
        buy = [f"click[{value}]" for name, value in options.items() if have.get(name) != value] + ["click[buy now]"]
        return None if way is None else way + buy

    def advice(self, forgetful=False):
        """(no thought, next command) of the expert."""
        plan = self.expert()
        return plan and ("", plan[0])

    def choices(self):
        """{option: value} of the goal's product: the values that are asked for, or are most like it."""
        out = {}
        for wanted in self.goal["options"].items() if isinstance(self.goal["options"], dict) else self.goal["options"]:
            word = wanted if isinstance(wanted, str) else wanted[1]
            like = lambda value: (value == word, token_set_ratio(first_color(value), str(first_color(wanted))))
            free = {value: name for value, name in self.owners(self.target).items()
                    if name not in out and value not in NO_OPTIONS and shop_command(f"click[{value}]") == ("click", value)}
            best = max(free, key=like, default=None)
            if best is not None and like(best) > (False, 85):
                out[free[best]] = best
        return out

    def way_to(self, product):
        """From any page to the product: through the results on the screen, or by the first query that finds it soonest."""
        if self.page == "results" and self.keywords[0] != "<r>" and self.target in self.hits[10 * (self.page_number - 1):]:
            start, hits = self.page_number, self.hits
            way = []
        else:
            plain = lambda text: " ".join(re.sub(r"[][]", " ", text).split())  # brackets are the commands' own
            text = self.goal["text"].split(", and price lower than ")[0]
            queries = [plain(q) for q in (text, text.split(" with ")[0], product["query"], product["title"], document(product)[:500])]
            queries = [q for q in queries if q]
            found = [(hits.index(self.target) // 10, n) for n, hits in enumerate(self.find(q.split(" ")) for q in queries) if self.target in hits]
            if not found:
                return None
            start, query = 1, queries[min(found)[1]]
            way, hits = [f"search[{query}]"], self.find(query.split(" "))
        return way + ["click[next >]"] * (hits.index(self.target) // 10 + 1 - start) + [f"click[{product['asin'].lower()}]"]


ENVS = {"house": House, "alfworld": AlfWorld, "webshop": WebShop}


def known(name):
    """The class of an environment, with what holds for all of its games."""
    if name not in ENVS:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(ENVS)}")
    return ENVS[name]


def make_env(name, **options):
    """house: places, objects, horizon. alfworld: data, horizon. webshop: data, goals, seed, mode, horizon. Raises ValueError for an unknown name
    and impossible numbers, TypeError for other options, FileNotFoundError where the games are missing."""
    return known(name)(**options)


def tasks(name, split, **options):
    """The sorted task ids of a split: house has train and test; alfworld train, valid_seen and valid_unseen; webshop train, valid and test, and the
    original's test_500, eval_1000 and train_rest. Options and errors are make_env's, and ValueError for an unknown split."""
    return make_env(name, **options).tasks(split)


def options_for(name, given):
    """Those of the settings `given` that an environment is made with."""
    return {k: given[k] for k in known(name).flags if given.get(k) is not None}


def default_workers(name, ranks=1):
    """Processes that play: none for the house, which is quick; else one per core, at most 16, shared by the ranks of this machine."""
    return 0 if name == "house" else max(1, min(16, os.cpu_count() // ranks))


# ------------------------------------------------------------------------------- the tiny model's words, demonstrations


def phrases():
    """The fixed strings of the prompts and of the house's language: a word-level vocabulary for the tiny model."""
    fixed = [part.strip(" .,:'[]") for t in (FIRST, LATER, PAST, FULL_FIRST, FULL_LATER) for part in re.split(r"\{\w+\}|\n", t)]
    words = ("go to|open|close|take|move|clean|heat|cool|use|examine|look|inventory|help|from|from the|to|to the|with|using the|put|two|hot|in|"
             "at|under the desklamp|You are in the middle of a room. Looking quickly around you, you see|Your task is to|You arrive at|"
             "The|On the|you see|is closed|is open. In it|You open the|You close the|You pick up the|You move the|You clean the|You heat the|"
             "You cool the|You turn on the|Nothing happens|You are carrying|You are not carrying anything|nothing|You are facing the|"
             "Next to it|This is|find|drop|done|There's nothing special about|<think>|</think>|<action>|</action>|"
             "-= Welcome to TextWorld, ALFRED! =-").split("|")
    return sorted({*fixed, *words, ROLE, ANSWER} - {""})


def nouns():
    """Everything that has a name in a house, with and without its number, and what else alfworld's have."""
    some = list(OBJECTS) + PLACES + list(APPLIANCES.values()) + [kind(LAMP)]
    some += "bathtubbasin glassbottle handtowel handtowelholder soapbottle toiletpaper toiletpaperhanger tvstand wateringcan".split()
    return some + [f"{n} {i}" for n in some for i in (1, 2, 3, 4)]


def words():
    """What the tiny model's tokenizer is made of."""
    return phrases(), nouns()


def demonstrate(env, task, seed, forget=0.0, noise=0.0):
    """An episode of the demonstrator (`advice`): a list of (obs, info, thought, label, executed). In the house and in ALFWorld, `forget` is the share of
    episodes played by the forgetful demonstrator (over soon after its failure). Where the env's demonstrator `finds_back`, `noise` is the share of
    steps at which a random command is executed in place of the label, so that mistakes and the way out of them are seen too."""
    rng = random.Random(f"demonstration {seed} {task}")
    forgetful, turns = rng.random() < forget, []
    obs, info = env.reset(task)
    while True:
        advice = env.advice(forgetful)
        if advice is None:
            return turns
        thought, label = advice
        idle = forgetful and ["done"] * 2 == [t[2] for t in turns[-2:]]
        executed = rng.choice(info["admissible"]) if env.finds_back and rng.random() < noise else label
        turns.append((obs, info, thought, label, executed))
        obs, _, terminated, truncated, info = env.step(executed)
        if terminated or truncated or idle:
            return turns


# ------------------------------------------------------------------------------------------------------ worker pool

class GameError(RuntimeError):
    """An environment failed, or kills its worker again and again. Names the game."""


class Games:
    """Many games in one process: the worker's half of the pool."""

    def __init__(self, name, options):
        self.make, self.playing, self.ready, self.spare = lambda: make_env(name, **options), {}, {}, []

    def load(self, task):
        env = self.spare.pop() if self.spare else self.make()
        self.ready.setdefault(task, []).append((env, *env.reset(task)))

    def start(self, key, task):
        if not self.ready.get(task):
            self.load(task)
        self.playing[key], obs, info = self.ready[task].pop()
        return obs, info

    def step(self, key, action):
        out = self.playing[key].step(action)
        if out[2] or out[3]:
            self.drop(key)
        return out

    def drop(self, key):
        if key in self.playing:
            self.spare.append(self.playing.pop(key))

    def demo(self, key, *args):
        env = self.spare.pop() if self.spare else self.make()
        self.spare.append(env)
        return demonstrate(env, *args)


def work(conn, name, options):
    """A worker process: answers messages; while there are none, loads the games that will be played next."""
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes the pipe when it is done
    games, coming = Games(name, options), []
    while True:
        try:
            if coming and not conn.poll():
                try:
                    games.load(coming.pop(0))
                except Exception:
                    pass  # start() meets it again, and reports it then
                continue
            op, key, *args = conn.recv()
            if op == "load":
                coming.append(args[0])
                continue
            if op == "start" and args[0] in coming:
                coming.remove(args[0])
            try:
                answer = getattr(games, op)(key, *args)
            except Exception as error:
                answer = GameError(f"{type(error).__name__}: {error}")  # as text: not every exception survives the way
            if op != "drop":
                conn.send((key, answer))
        except (EOFError, OSError):
            return


@dataclass
class Seat:
    """The parent's note of one game: its number at the worker, everything asked of it, how many answers came, and how many
    more are a replay's and known already."""

    number: int
    worker: int
    asked: list
    heard: int = 0
    replayed: int = 0


class Pool:
    """Games played side by side in `workers` processes (0: in this one). Keys name episodes and are the caller's choice.

        pool.load(tasks)                     loads games in the background: the next iteration's, while the model is busy
        pool.start(key, task); pool.step(key, action); pool.demo(key, task, seed, forget, noise)
        pool.gather(keys)                    their answers, in the order of keys: (obs, info), the five of step(), the list of demonstrate()
        pool.drop(key)                       gives up an unfinished game

    A worker that dies, or keeps its caller waiting for half an hour, is restarted and its episodes are played again from their first
    action, unseen by the caller. A GameError names the game where an environment fails or costs its worker's life four times running."""

    PATIENCE = 1800  # seconds of silence after which who owes an answer is stuck; the first worker in a large shop spends minutes on its index
    UNANSWERED = 16  # at most so many at a worker: were the pipes full both ways, each side would wait for the other forever

    def __init__(self, name, options=None, workers=0):
        self.name, self.options, self.env = name, options or {}, known(name)
        self.local = None if workers else Games(name, self.options)
        self.procs, self.conns, self.outbox = [None] * workers, [None] * workers, [None] * workers
        self.owed, self.deaths = [0] * workers, [0] * workers  # answers a worker has not given yet; its deaths since it last gave one
        self.seats, self.answers = {}, {}  # by key
        self.keys, self.count = {}, 0  # by a seat's number; how many seats there have been
        self.loading, self.loaded = {}, -1  # the workers that load a task; the one that was last told to
        self.seconds = 0.0  # spent on games, or waiting for them
        for w in range(workers):
            self.spawn(w)

    # ---- what the caller says
    def load(self, tasks):
        for task, times in Counter(tasks).items() if self.procs else ():
            for _ in range(times - len(self.loading.setdefault(task, []))):
                self.loaded = (self.loaded + 1) % len(self.procs)  # one worker after the other
                self.loading[task].append(self.loaded)
                self.post(self.loaded, "load", None, task)

    def start(self, key, task):
        self.begin(key, "start", task)

    def demo(self, key, *args):
        self.begin(key, "demo", *args)

    def step(self, key, action):
        self.ask(key, "step", action)

    def drop(self, key):
        seat = self.seats[key]
        self.local.drop(seat.number) if self.local else self.post(seat.worker, "drop", seat.number)
        self.forget(key)

    def gather(self, keys):
        began, keys = time.time(), list(keys)
        idle = [k for k in keys if k not in self.seats or k not in self.answers and self.seats[k].heard == len(self.seats[k].asked)]
        if idle:
            raise KeyError(f"nothing has been asked of {idle[:4]}")
        while any(k not in self.answers for k in keys):
            heard = wait(self.conns, self.PATIENCE)
            for conn in heard:
                self.listen(self.conns.index(conn))
            for w in range(len(self.procs)) if not heard else ():
                if self.owed[w]:
                    self.revive(w)
        self.seconds += time.time() - began
        for key in keys:
            if isinstance(self.answers[key], Exception):
                raise GameError(f"{self.name}: game {self.seats[key].asked[0][1]} failed: {self.answers.pop(key)}")
        out = [self.answers.pop(k) for k in keys]
        for key, answer in zip(keys, out):
            op = self.seats[key].asked[0][0]
            if op == "demo" or len(answer) == 5 and (answer[2] or answer[3]):
                self.forget(key)
        return out

    def close(self):
        for conn, proc in zip(self.conns, self.procs):
            conn.close()
            proc.kill()
            proc.wait()
        self.procs, self.conns = [], []

    # ---- how it reaches the workers
    def begin(self, key, op, task, *args):
        if key in self.seats:
            self.drop(key)
        load = [seat.worker for seat in self.seats.values()]
        idlest = min(range(len(self.procs)), key=load.count, default=0)
        self.count += 1
        self.seats[key] = Seat(self.count, (self.loading.get(task) or [idlest]).pop(0), [])
        self.keys[self.count] = key
        self.ask(key, op, task, *args)

    def ask(self, key, op, *args):
        seat = self.seats[key]
        seat.asked.append((op, *args))
        if self.local:
            began = time.time()
            try:
                self.answers[key] = getattr(self.local, op)(seat.number, *args)
            except Exception as error:
                self.answers[key] = GameError(f"{type(error).__name__}: {error}")
            seat.heard += 1
            self.seconds += time.time() - began
        else:
            self.post(seat.worker, op, seat.number, *args)

    def post(self, w, *message):
        self.outbox[w].append(message)
        self.flush(w)

    def flush(self, w):
        while self.outbox[w] and self.owed[w] < self.UNANSWERED:
            message = self.outbox[w].pop(0)
            self.owed[w] += message[0] in ("start", "step", "demo")
            try:
                self.conns[w].send(message)
            except OSError:
                pass  # dead: listen() notices, restarts it and says everything again

    def listen(self, w):
        try:
            number, answer = self.conns[w].recv()
        except (EOFError, OSError):
            return self.revive(w)
        self.owed[w] -= 1
        self.flush(w)
        if number not in self.keys:
            return  # of a game given up meanwhile
        seat = self.seats[self.keys[number]]
        if seat.replayed:
            seat.replayed -= 1  # the caller has seen it
            return
        seat.heard += 1
        self.deaths[w] = 0
        self.answers[self.keys[number]] = answer

    def spawn(self, w):  # a fresh interpreter on this file: it imports neither torch nor the caller's main module
        self.conns[w], theirs = Pipe()
        code = "import sys; sys.path.insert(0, sys.argv[1]); import envs; envs.worker_main()"
        here, what = os.path.dirname(os.path.abspath(__file__)), json.dumps([self.name, self.options])
        self.procs[w] = subprocess.Popen([sys.executable, "-c", code, here, str(theirs.fileno()), what], pass_fds=[theirs.fileno()])
        self.outbox[w], self.owed[w] = [], 0
        theirs.close()

    def revive(self, w):
        self.deaths[w] += 1
        mine = [seat for seat in self.seats.values() if seat.worker == w]
        if self.deaths[w] > 3:
            raise GameError(f"{self.name}: a worker died four times running while playing {[s.asked[0][1] for s in mine][:4]}")
        self.procs[w].kill()
        self.procs[w].wait()
        self.spawn(w)
        for seat in mine:
            seat.replayed = seat.heard
            for op, *args in seat.asked:
                self.post(w, op, seat.number, *args)

    def forget(self, key):
        del self.keys[self.seats.pop(key).number]
        self.answers.pop(key, None)


def worker_main():
    warnings.filterwarnings("ignore", "webshop: ")  # the parent has said it
    name, options = json.loads(sys.argv[3])
    work(Connection(int(sys.argv[2])), name, options)


# ------------------------------------------------------------------------------------------------------- command line


def random_command(rng, info):
    command = rng.choice(info["admissible"])
    words = info["task"].split()
    return f"search[{' '.join(rng.sample(words, min(4, len(words))))}]" if command.startswith("search[") else command


def wander(env, task, steps):
    """A reset and random steps, one in ten of which the game cannot use -> (what was answered, seconds of the reset, seconds of each step)."""
    rng, clock = random.Random(task), time.perf_counter
    began = clock()
    obs, info = env.reset(task)
    said, reset, seconds = [(obs, info)], clock() - began, []
    while len(seconds) < steps:
        command = random_command(rng, info) if rng.random() < 0.9 else "dance"
        began = clock()
        said.append(env.step(command))
        seconds.append(clock() - began)
        info = said[-1][-1]
        if said[-1][2] or said[-1][3]:
            break
    return said, reset, seconds


def bench(name, options, games, steps, workers):
    """Seconds of an environment; for alfworld beside TextWorld's own engine, answer by answer; then through the pool."""
    envs = {"stock": make_env(name, **options, stock=True)} if name == "alfworld" else {}
    envs["ours"] = make_env(name, **options)
    few = random.Random(0).sample(games, min(8, len(games)))
    for env in envs.values():
        wander(env, few[0], 1)  # imports
    played = {engine: [] for engine in envs}
    for task in few:  # side by side, so that a noisy machine is noisy for both
        for engine, env in envs.items():
            played[engine].append(wander(env, task, steps))
    middle = lambda xs: sorted(xs)[len(xs) // 2]
    steps = {engine: [s for _, _, seconds in runs for s in seconds] for engine, runs in played.items()}
    times = {engine: (middle([reset for _, reset, _ in runs]), middle(steps[engine])) for engine, runs in played.items()}
    print(f"{'':8}{'load and reset, ms':>20}{'step, ms':>12}{'steps a second':>16}   medians of {len(few)} games; the mean over {len(steps['ours'])} steps")
    for engine, (reset, step) in times.items():
        print(f"{engine:8}{1000 * reset:20.2f}{1000 * step:12.3f}{len(steps[engine]) / sum(steps[engine]):16.0f}")
    if "stock" in times:
        same = sum(json.dumps(a[0]) == json.dumps(b[0]) for a, b in zip(*played.values()))
        print(f"{'times':8}{times['stock'][0] / times['ours'][0]:20.1f}{times['stock'][1] / times['ours'][1]:12.1f}"
              f"   transcripts identical in {same} of {len(few)} games" + ("" if shortcuts() else "; not TextWorld 1.7.0: both are its own engine"))
    bench_pool(name, options, random.Random(1).sample(games, min(128, len(games))), workers)


def bench_pool(name, options, games, workers):
    """Random play of all games side by side."""
    pool, began, rng = Pool(name, options, workers), time.perf_counter(), random.Random(2)
    for key, game in enumerate(games):
        pool.start(key, game)
    live, turns = dict(enumerate(answer[-1] for answer in pool.gather(range(len(games))))), 0
    loaded = time.perf_counter() - began
    while live:
        for key, info in live.items():
            pool.step(key, random_command(rng, info))
        turns += len(live)
        live = {key: answer[-1] for key, answer in zip(live, pool.gather(live)) if not (answer[2] or answer[3])}
    seconds = time.perf_counter() - began
    pool.close()
    print(f"pool, {workers or 'no'} worker{'s' * (workers != 1)}: {len(games)} games, {turns} turns in {seconds:.1f} s ({turns / seconds:.0f} a second), "
          f"of which {loaded:.1f} s are resets")


def play(env, task):
    """A person plays; an empty line takes the expert's next command."""
    obs, info = env.reset(task)
    over = False
    print(obs.strip())
    while not over:
        print("\nCommands: " + quoted(info["admissible"]))
        try:
            typed = input("> ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            return print()
        plan = env.expert()
        action = typed or (plan or info["admissible"])[0]
        obs, reward, terminated, truncated, info = env.step(action)
        print(("" if typed else f"(the expert: {action})\n" if plan else f"(the expert knows no way to win: {action})\n") + obs.strip())
        over = terminated or truncated
    print(f"\n{'Won' if info['won'] else 'Over' if terminated else 'Out of time'}: reward {reward:g}, score {info['score']:.3g}")


def main():
    parser = argparse.ArgumentParser(description="Play an episode by hand; an empty line takes the expert's next command.", allow_abbrev=False)
    add = parser.add_argument
    add("--env", default="house")
    add("--split", default="train")
    add("--task", type=int, default=0, help="which game of the split")
    add("--data", help="alfworld: the folder that holds json_2.1.1; webshop: the folder of its catalogue")
    add("--goals", default="synthetic", help="webshop: synthetic or human")
    add("--bench", action="store_true", help="measure instead: load, reset and step, beside TextWorld's own engine for alfworld, then 128 games in the pool")
    add("--steps", type=int, default=50, help="--bench: random steps a game")
    add("--workers", type=int, default=2, help="--bench: processes of the pool")
    args = parser.parse_args()
    try:
        options = options_for(args.env, vars(args))
        games = tasks(args.env, args.split, **options)
        if not 0 <= args.task < len(games):
            raise ValueError(f"--task must be from 0 to {len(games) - 1}")
        if args.steps < 1 or args.workers < 0:
            raise ValueError("--steps must be at least 1, --workers at least 0")
        if args.bench:
            bench(args.env, options | {"horizon": args.steps}, games, args.steps, args.workers)
        else:
            play(make_env(args.env, **options), games[args.task])
    except (ValueError, OSError, ImportError, GameError) as error:
        sys.exit(f"envs.py: {error}")


if __name__ == "__main__":
    main()
