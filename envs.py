"""Text environments behind one protocol, the prompts made of them, the action parser, and the pool of worker processes.

    env = make_env("house")                       or make_env("alfworld", data=DIR)
    obs, info = env.reset(tasks("house", "train")[0])
    obs, reward, terminated, truncated, info = env.step("go to fridge 1")         Gymnasium's order
    env.expert()                                  commands that win from here, or None

info: admissible (list of str), task (sentence), category, won (bool), score (float, 0-1). An action the environment
cannot use is answered ("Nothing happens."), never an exception. The winning step pays REWARD, every other step 0.

- `house` is a miniature of ALFWorld in plain Python: same commands, same sentences, same six kinds of task.
- `alfworld` is the real thing: the alfworld package's TextWorld engine on the games below $ALFWORLD_DATA.

Prompts follow the setting of the GiGPO paper's framework (verl-agent 796ed31) in our own words: `window_prompt` is one
message with the last k turns, `full_prompt` only what is new. No torch here, so that worker processes stay small.
    python envs.py [--env alfworld --data DIR] [--bench]      play an episode yourself, or measure
"""
import argparse
import contextlib
import copy
import functools
import gc
import glob
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

REWARD = 10.0  # on the winning step
CATEGORIES = {"pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look", "pick_clean_then_place_in_recep": "Clean",
              "pick_heat_then_place_in_recep": "Heat", "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2"}

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


class House:
    """One room with `places` places and `objects` things to carry, most of them out of sight until the agent goes there
    and opens what is closed. A task id is a number as a string and fixes everything: the room, the goal, the split.

    Rooms in which the expert needs more than min(4 places, 50) steps are drawn anew: at ALFWorld's horizon of 50, and at 20
    in the smallest house, it wins them all."""

    fallback = 30  # characters sent as the action where the response has no tags

    def __init__(self, places=5, objects=4, horizon=20):
        for name, value, least in (("places", places, 5), ("objects", objects, 2), ("horizon", horizon, 1)):
            if value < least:
                raise ValueError(f"house: {name} must be at least {least}, got {value}")
        self.size, self.horizon = (places, objects), horizon

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
        self.lamp_at = rng.choice([p for p in self.places if kind(p) in others and kind(p) not in OPENABLE])

        self.category = rng.choice(list(GOALS))
        self.verb = next((v for v in APPLIANCES if f"_{v}_" in self.category), None)
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
        obs = self.act(action) if action in self.admissible() else "Nothing happens."
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
        return sum(kind(o) == obj and (any_state or self.verb is None or DONE[self.verb] in self.props.get(o, ()))
                   for p in self.places if kind(p) == dest for o in self.contents[p])

    # ---- the demonstrator
    def advice(self, forgetful=False):
        """(thought, next command) of a player who knows only what is before it and looks through the places in their order.
        The forgetful one skips the washing, heating, cooling, the lamp and the second object, and then idles."""
        obj, dest = self.goal
        here, seen, held = self.at, self.inside(self.at) if self.at else [], self.holding and kind(self.holding)
        look = self.category == "look_at_obj_in_light"
        later = self.places[self.places.index(here) + 1:] if here else []
        onward = f"open {here}" if here and self.closed(here) else f"go to {(later or self.places)[0]}"
        drop = f"open {here}" if here and self.closed(here) else f"move {self.holding} to {here}"
        if forgetful and not look and self.placed(any_state=True):
            return "done", "look"
        if held is None:
            done = here and kind(here) == dest and self.verb is None and not look
            found = [o for o in seen if kind(o) == obj and not done]
            return f"find {obj}", f"take {found[0]} from {here}" if found else onward
        if held != obj:
            return f"drop {held}", drop
        if look and forgetful:
            return "done", f"examine {self.holding}"
        if look:
            return f"use {kind(LAMP)}", f"use {LAMP}" if LAMP in seen else onward
        if self.verb and DONE[self.verb] not in self.props.get(self.holding, ()) and not forgetful:
            tool = f"{APPLIANCES[self.verb]} 1"
            return f"{self.verb} {obj}", f"{self.verb} {self.holding} with {tool}" if here == tool else f"go to {tool}"
        return f"put {obj} in {dest}", drop if here and kind(here) == dest else f"go to {next(p for p in self.places if kind(p) == dest)}"

    def expert(self):
        """Commands that win from here, found by playing `advice` on a copy; None once the game is won or hopeless."""
        twin = House.__new__(House)
        twin.__dict__ = self.__dict__ | {"contents": {p: list(c) for p, c in self.contents.items()},
                                         "opened": set(self.opened), "props": dict(self.props)}
        plan = []
        while not twin.won and len(plan) <= 8 * len(self.places):
            plan.append(twin.advice()[1])
            twin.act(plan[-1])
            twin.won = twin.achieved()
        return plan if plan and twin.won else None


def house_tasks(split):
    """Numbers as strings. A number's own hash decides its split, so that options of size never move a task across."""
    if split not in SIZES:
        raise ValueError(f"house has no split {split!r}; known: {', '.join(SIZES)}")
    is_test = lambda n: hashlib.sha256(str(n).encode()).digest()[0] % 5 == 0
    numbers = (f"{n:05d}" for n in range(10 ** 5) if is_test(n) == (split == "test"))
    return [n for n, _ in zip(numbers, range(SIZES[split]))]


# -------------------------------------------------------------------------------------------------------- alfworld

def alfworld_root(data=None):
    """The folder json_2.1.1 below `data`, $ALFWORLD_DATA, or where alfworld-download puts it."""
    data = data or os.environ.get("ALFWORLD_DATA") or os.path.expanduser("~/.cache/alfworld")
    root = os.path.join(data, "json_2.1.1")
    if not os.path.isdir(root):
        raise FileNotFoundError(f"no ALFWorld games: {root} does not exist. `alfworld-download` fetches them, --data (or the "
                                f"variable ALFWORLD_DATA) names the folder that holds json_2.1.1")
    return root


def alfworld_tasks(split, data=None):
    root = alfworld_root(data)
    if split not in ("train", "valid_seen", "valid_unseen"):
        raise ValueError(f"alfworld has no split {split!r}; known: train, valid_seen, valid_unseen")
    games = sorted(glob.glob(os.path.join(root, split, "*", "*", "game.tw-pddl")))
    if not games:
        raise FileNotFoundError(f"no games (*/*/game.tw-pddl) below {os.path.join(root, split)}; `alfworld-download` fetches them")
    return [os.path.relpath(os.path.dirname(g), root).replace(os.sep, "/") for g in games]


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

    def share(x):  # for deepcopy: below the first level nothing is changed but the context of a list's symbol, and that is set before it is read
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
        (textgen, "deepcopy", share),
        (textgen, "_parse_and_convert", lambda text, rule_name, trace=False: share(parse(text, rule_name=rule_name))),
        (Rule, "parse_conjunctive_query", staticmethod(functools.cache(Rule.parse_conjunctive_query))),
        # the optimised translation serves a planner that is never asked
        (fast_downward, "pddl2sas", lambda domain, problem, verbose=False, optimize=False: translate_once(domain, problem)),
        # loading a game makes a state, and resetting it the same one again; a game that has been played must be loaded before its reset
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


class AlfWorld:
    """ALFWorld's text games, played by TextWorld. A task id is the game's folder below json_2.1.1:
    "valid_seen/pick_heat_then_place_in_recep-Egg-None-Fridge-14/trial_T2019...". Observations are the engine's own; `stock`
    leaves TextWorld as it is, twenty times slower."""

    fallback = 30

    def __init__(self, data=None, horizon=50, stock=False):
        if horizon < 1:
            raise ValueError(f"alfworld: horizon must be at least 1, got {horizon}")
        self.root, self.horizon, self.game = alfworld_root(data), horizon, None
        self.engine = contextlib.nullcontext if stock else hurried

    def reset(self, task):
        if not os.environ.get("ALFWORLD_DATA"):  # or the package, once imported, makes a folder of its own and points there
            os.environ["ALFWORLD_DATA"] = os.path.dirname(self.root)
        try:  # here, not above: nobody needs the package for the other environments
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        except ImportError as error:
            raise ImportError(f"--env alfworld needs the alfworld package (pip install alfworld): {error}") from None
        path = os.path.join(self.root, task.removesuffix("/game.tw-pddl"), "game.tw-pddl")
        if not os.path.isfile(path):
            raise ValueError(f"alfworld: no game {path}")
        with self.engine():
            if self.game is None:
                wanted = textworld.EnvInfos(won=True, admissible_commands=True)
                self.game = textworld.start(path, wanted, wrappers=[AlfredDemangler])
            else:
                self.game.load(path)
            state = self.game.reset()
        with open(path) as file:
            self.walkthrough = json.load(file)["walkthrough"]
        self.category = task.split("/")[1].split("-")[0]
        self.task = re.search(r"Your task is to: (.*)", state.feedback)[1].strip()
        self.played = []
        return state.feedback, self.info(state)

    def info(self, state):
        return {"admissible": list(state.admissible_commands), "task": self.task, "category": self.category,
                "won": bool(state.won), "score": float(state.won)}

    def step(self, action):
        with self.engine():
            state, _, _ = self.game.step(action)
        self.played.append(action)
        truncated = len(self.played) >= self.horizon and not state.won
        return state.feedback, REWARD * state.won, bool(state.won), truncated, self.info(state)

    def expert(self):
        """What is left of the game's walkthrough; None once another command has been given."""
        n = len(self.played)
        return self.walkthrough[n:] or None if self.played == self.walkthrough[:n] else None


ENVS = {"house": (House, lambda split, **_: house_tasks(split)),
        "alfworld": (AlfWorld, lambda split, data=None, **_: alfworld_tasks(split, data))}


def known(name):
    if name not in ENVS:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(ENVS)}")
    return ENVS[name]


def make_env(name, **options):
    """house: places, objects, horizon. alfworld: data, horizon. Raises ValueError for unknown names and impossible numbers,
    FileNotFoundError where the games are missing."""
    return known(name)[0](**options)


def tasks(name, split, **options):
    """The sorted task ids of a split: house has train and test; alfworld train, valid_seen and valid_unseen."""
    return known(name)[1](split, **options)


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


def quoted(commands):
    return ", ".join(f"'{c}'" for c in commands if c != "help")


class Episode:
    """What the agent knows of one game, and the two ways of showing it. `took` moves it on by one turn."""

    def __init__(self, obs, info):
        self.obs, self.info, self.history = obs, info, []
        self.always = [c for c in info["admissible"] if c.startswith("go to ") or c in ("inventory", "look")]

    def took(self, action, obs, info):
        self.history.append((self.obs, action))
        self.obs, self.info = obs, info

    def window_prompt(self, k=2):
        """--context window: one message, rebuilt every turn, with the last k observations and (parsed) actions."""
        common = {"role": ROLE, "answer": ANSWER, "obs": self.obs.strip(), "commands": quoted(self.info["admissible"])}
        if not self.history:
            return FIRST.format(**common)
        n = len(self.history)
        past = "\n".join(PAST.format(obs=o.strip(), action=a) for o, a in self.history[max(0, n - k):])
        return LATER.format(**common, task=self.info["task"], steps=n, history=past, now=n + 1)

    def full_prompt(self):
        """--context full: only what is new; what holds for the whole episode is said in the first message."""
        commands = quoted(c for c in self.info["admissible"] if c not in self.always)
        template = FULL_LATER if self.history else FULL_FIRST
        return template.format(role=ROLE, answer=ANSWER, obs=self.obs.strip(), commands=commands, always=quoted(self.always))


def parse_action(text, fallback):
    """-> (action, valid). The lower-cased text between the first <action> and the first </action>; valid where both tag
    pairs are there and no CJK character is. Without action tags the last `fallback` characters are the action."""
    low = text.lower()
    start, end = low.find("<action>"), low.find("</action>")
    if start < 0 or end < start:
        return low[-fallback:], False
    thought = 0 <= low.find("<think>") < low.find("</think>")
    return low[start + len("<action>"):end].strip(), thought and not re.search(r"[\u4e00-\u9fff]", text)


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
    """Everything that has a name in a house, with and without its number."""
    some = list(OBJECTS) + PLACES + list(APPLIANCES.values()) + [kind(LAMP)]
    return some + [f"{n} {i}" for n in some for i in (1, 2, 3, 4)]


def words():
    """What the tiny model's tokenizer is made of."""
    return phrases(), nouns()


def demonstrate(env, task, seed, forget=0.0, noise=0.0):
    """An episode of the expert: a list of (obs, info, thought, label, executed). In the house, `forget` is the share of episodes
    played by the forgetful demonstrator (over soon after its failure), `noise` the share of steps at which a random
    command is executed in place of the label, so that mistakes and the way out of them are seen too."""
    rng = random.Random(f"demonstration {seed} {task}")
    forgetful, turns = rng.random() < forget, []
    obs, info = env.reset(task)
    while True:
        plan = [env.advice(forgetful)] if isinstance(env, House) else [("", c) for c in env.expert() or []]
        if not plan:
            return turns
        thought, label = plan[0]
        idle = forgetful and ["done"] * 2 == [t[2] for t in turns[-2:]]
        slips = isinstance(env, House) and rng.random() < noise  # elsewhere the expert cannot find back
        executed = rng.choice(info["admissible"]) if slips else label
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
        pool.gather(keys)                    their answers, in the order of keys
        pool.drop(key)                       gives up an unfinished game

    A worker that dies is restarted and its episodes are played again from their first action, unseen by the caller.
    A GameError names the game where an environment fails or kills its worker four times running."""

    UNANSWERED = 16  # at most so many at a worker: were the pipes full both ways, each side would wait for the other forever

    def __init__(self, name, options=None, workers=0):
        self.name, self.options, self.fallback = name, options or {}, known(name)[0].fallback
        self.local = None if workers else Games(name, self.options)
        self.procs, self.conns, self.outbox, self.open = [None] * workers, [None] * workers, [None] * workers, [0] * workers
        self.seats, self.keys, self.answers, self.loading = {}, {}, {}, {}  # by key; key by number; by key; workers by task
        self.count, self.loaded, self.deaths, self.seconds = 0, -1, [0] * workers, 0.0  # seconds spent on games or waiting for them
        for w in range(workers):
            self.spawn(w)

    # ---- what the caller says
    def load(self, tasks):
        for task in tasks if self.procs else ():
            if task not in self.loading:
                self.loaded = (self.loaded + 1) % len(self.procs)  # one worker after the other
                self.loading[task] = self.loaded
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
        strangers = [k for k in keys if k not in self.seats]
        if strangers:
            raise KeyError(f"no game was started under {strangers[:4]}")
        while any(k not in self.answers for k in keys):
            for conn in wait(self.conns):
                self.listen(self.conns.index(conn))
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
        self.seats[key] = Seat(self.count, self.loading.pop(task, idlest), [])
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
            self.seconds += time.time() - began
        else:
            self.post(seat.worker, op, seat.number, *args)

    def post(self, w, *message):
        self.outbox[w].append(message)
        self.flush(w)

    def flush(self, w):
        while self.outbox[w] and self.open[w] < self.UNANSWERED:
            message = self.outbox[w].pop(0)
            self.open[w] += message[0] in ("start", "step", "demo")
            try:
                self.conns[w].send(message)
            except OSError:
                pass  # dead: listen() notices, restarts it and says everything again

    def listen(self, w):
        try:
            number, answer = self.conns[w].recv()
        except (EOFError, OSError):
            return self.revive(w)
        self.open[w] -= 1
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
        self.outbox[w], self.open[w] = [], 0
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
    name, options = json.loads(sys.argv[3])
    work(Connection(int(sys.argv[2])), name, options)


# ------------------------------------------------------------------------------------------------------- command line


def wander(env, task, steps):
    """A reset and random steps, one in ten of which the game cannot use -> (what was answered, seconds of the reset, seconds of each step)."""
    rng, clock = random.Random(task), time.perf_counter
    began = clock()
    obs, info = env.reset(task)
    said, reset, seconds = [(obs, info)], clock() - began, []
    while len(seconds) < steps:
        command = rng.choice(info["admissible"]) if rng.random() < 0.9 else "dance"
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
    played = {kind: [] for kind in envs}
    for task in few:  # side by side, so that a noisy machine is noisy for both
        for kind, env in envs.items():
            played[kind].append(wander(env, task, steps))
    middle = lambda xs: sorted(xs)[len(xs) // 2]
    times = {kind: (middle([reset for _, reset, _ in runs]), middle([s for _, _, seconds in runs for s in seconds])) for kind, runs in played.items()}
    print(f"{'':8}{'load and reset, ms':>20}{'step, ms':>12}   medians of {len(few)} games, {sum(len(said) for said, _, _ in played['ours'])} answers")
    for kind, (reset, step) in times.items():
        print(f"{kind:8}{1000 * reset:20.2f}{1000 * step:12.3f}")
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
            pool.step(key, rng.choice(info["admissible"]))
        turns += len(live)
        live = {key: answer[-1] for key, answer in zip(live, pool.gather(live)) if not (answer[2] or answer[3])}
    seconds = time.perf_counter() - began
    pool.close()
    print(f"pool, {workers or 'no'} worker{'s' * (workers != 1)}: {len(games)} games, {turns} turns in {seconds:.1f} s, of which {loaded:.1f} s are resets")


def play(env, task):
    """A person plays; an empty line takes the expert's next command."""
    obs, info = env.reset(task)
    over = False
    print(obs.strip())
    while not over:
        print("\nCommands: " + quoted(info["admissible"]))
        try:
            typed = input("> ").strip().lower()
        except EOFError:
            return print()
        action = typed or (env.expert() or ["look"])[0]
        obs, reward, terminated, truncated, info = env.step(action)
        print(("" if typed else f"(the expert: {action})\n") + obs.strip())
        over = terminated or truncated
    print(f"\n{'Won' if info['won'] else 'Out of time'}: reward {reward:g}")


def main():
    parser = argparse.ArgumentParser(description="Play an episode by hand; an empty line takes the expert's next command.", allow_abbrev=False)
    add = parser.add_argument
    add("--env", default="house")
    add("--split", default="train")
    add("--task", type=int, default=0, help="which game of the split")
    add("--data", help="alfworld: the folder that holds json_2.1.1")
    add("--bench", action="store_true", help="measure instead: load, reset and step, beside TextWorld's own engine for alfworld, then 128 games in the pool")
    add("--steps", type=int, default=50, help="--bench: random steps a game")
    add("--workers", type=int, default=2, help="--bench: processes of the pool")
    args = parser.parse_args()
    options = {"data": args.data} if args.env == "alfworld" else {}
    try:
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
