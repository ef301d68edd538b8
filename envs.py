"""Text environments behind one protocol, their prompts, the action parser and the worker pool.

    env = make_env("house")        or make_env("alfworld", data=DIR), make_env("webshop", data=DIR)
    obs, info = env.reset(tasks("house", "train")[0])
    obs, reward, terminated, truncated, info = env.step("go to fridge 1")      Gymnasium's order
    env.expert()                   commands that win from here, or None

info: admissible (list of str), task (sentence), category, won (bool), score (float, 0 to 1). The
winning step pays REWARD, every other step 0. An action the environment cannot use is answered, by
"Nothing happens." or in the shop by the same page, and is never an exception.

- `house` is a miniature of ALFWorld in plain Python: same commands, sentences and kinds of task.
- `alfworld` is the original: the alfworld package's TextWorld engine, on $ALFWORLD_DATA's games.
- `webshop` is WebShop's text environment (worlds/webshop.py), on the catalogue in $WEBSHOP_DATA.

The prompts say what those of the GiGPO paper's framework say (verl-agent 796ed31), in our words.
Workers start quickly, because nothing here needs torch.
    python envs.py [--env alfworld|webshop --data DIR]                  play an episode yourself
"""
import argparse
import contextlib
import copy
import functools
import hashlib
import itertools
import math
import numbers
import os
import pkgutil
import queue
import random
import re
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe

from worlds.seeker import APPLIANCES, LAMP, Seeker, type_of, verb_of
from worlds.textworld import Engine, alfworld_root, game_folders

REWARD = 10.0
NOTHING = "Nothing happens."  # what a room answers to a command that it cannot use
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
FULL_FIRST = FIRST.replace("Com", "These commands always work: [{always}].\nOther com") + SAME_WAY
FULL_LATER = "{obs}\n\nOther commands that work now: [{commands}]."


def quoted(commands):
    """The commands as a prompt lists them, without "help", which is no step towards winning."""
    return ", ".join(f"'{c}'" for c in commands if c != "help")


class Episode:
    """What the agent has seen of one game, and the two ways of showing it to the model."""

    first, later = FIRST, LATER
    full_first = FIRST + SAME_WAY
    full_later = "{obs}\n\nCommands that work now: [{commands}]."
    works_always = ()  # beginnings of commands that --context full lists once

    def __init__(self, obs, info, role=ROLE):
        self.obs, self.info, self.role, self.history = obs, info, role, []
        self.always = [c for c in info["admissible"] if c.startswith(self.works_always)]

    def took(self, action, obs, info):
        """Moves on by one turn: `action` was answered by `obs` and `info`."""
        self.history.append((self.obs, action))
        self.obs, self.info = obs, info

    def shown(self, obs):
        return obs.strip()

    def accepts(self, action):
        """Whether the game can use this action now."""
        return action in self.info["admissible"]

    def now(self, commands):
        """The fields of this turn that the prompts are made of."""
        return {"role": self.role, "answer": ANSWER, "task": self.info["task"],
                "obs": self.shown(self.obs), "commands": quoted(commands),
                "always": quoted(self.always)}

    def window_prompt(self, k=2):
        """--context window: one message, rebuilt every turn, with the last k turns of the past."""
        now, n = self.now(self.info["admissible"]), len(self.history)
        if n == 0:
            return self.first.format(**now)
        past = [PAST.format(obs=self.shown(obs), action=action)
                for obs, action in self.history[max(0, n - k):]]
        return self.later.format(**now, steps=n, history="\n".join(past), now=n + 1)

    def prompts(self, context, history):
        """What a turn may show, from the longest to the shortest."""
        if context == "full":
            return [self.full_prompt()]
        return (self.window_prompt(k) for k in range(history, -1, -1))

    def full_prompt(self):
        """--context full: only what is new. The first message says what holds for all turns."""
        now = self.now(c for c in self.info["admissible"] if c not in self.always)
        return (self.full_later if self.history else self.full_first).format(**now)


class Household(Episode):
    full_first, full_later = FULL_FIRST, FULL_LATER
    works_always = "go to ", "inventory", "look"  # going to where one stands does nothing


class ShopEpisode(Episode):
    """The same for the shop. Its pages repeat the task, which is therefore cut out of them."""

    first = ("{role} Your task is to: {task}\nWhat you see: {obs}\n\nCommands on this page: "
             "[{commands}].\n\n{answer}")
    later = LATER.replace("Commands that work now", "Commands on this page")
    full_first = first + SAME_WAY
    full_later = "{obs}\n\nCommands on this page: [{commands}]."

    def shown(self, obs):
        page = obs.split(f" [SEP] {self.info['task'].strip()} [SEP] ", 1)[-1]
        return " [SEP] ".join(f"'{piece}'" for piece in page.split(" [SEP] "))

    def accepts(self, action):
        """Searching works on every page, clicking on what the page lists."""
        from worlds.webshop import shop_command
        name, argument = shop_command(action)
        offered = argument != "search" and f"click[{argument}]" in self.info["admissible"]
        return name == "search" or name == "click" and offered


def parse_action(text, fallback, said=""):
    """-> (action, valid). The action is the lower-cased text between an <action> and the next
    </action>, the first that begin behind the first </think> and end behind the last; or else the
    first before a <think>; or else the last `fallback` characters. It is valid if both pairs of
    tags are there and, as in verl-agent, no CJK character. `said`: what the chat template has said
    before the text, such as an opening <think>."""
    low = text.lower()
    whole = said.lower() + low
    thought = 0 <= whole.find("<think>") < whole.find("</think>")
    behind = whole[max(0, whole.find("</think>")):]  # verl-agent looks into the thought as well
    while "</think>" in (rest := behind.partition("</action>")[2]):
        behind = rest
    for part in behind, whole.partition("<think>")[0]:
        start, end = part.find("<action>"), part.find("</action>")
        if 0 <= start < end:
            action = part[start + len("<action>"):end].strip()
            return action, thought and not re.search(r"[\u4e00-\u9fff]", text)
    return low[max(0, len(low) - fallback):], False


# ------------------------------------------------------------------- what an environment has

class Env:
    """An environment of your own inherits this, and has besides

        tasks(split) -> sorted ids, str or int, of the splits "train" and held_out[0]
        reset(task) -> (obs, info);  step(action) -> (obs, reward, terminated, truncated, info)

    with info as above, rewards that sum to within +-r_max, and truncated on turn `horizon`. The
    first obs says what the task is. An object plays many games, so reset sets all of it.
    tools/imitate.py also needs advice(forgetful) -> (thought, command) or None, as of a
    demonstrator. Override the rest.

    The worker pool demands of what it says: obs, task and commands are text, in which lone
    surrogates are replaced; terminated, truncated and won are True or False; reward and score are
    finite. NumPy's types will do. A command is in lower case and has no blanks at its ends, because
    that is how actions are read. Anything else, and any exception, is a GameError that names the
    game and the turn. A worker that does not answer for `patience` seconds is replaced."""

    flags = ("horizon",)  # which of train.py's settings its constructor takes
    horizon = 50  # turns an episode may take; the last one's step says truncated
    held_out = "test", 100  # the split and number of games of an evaluation
    categories = {}  # {info's category: column} of an evaluation
    role = ROLE  # the sentence that a prompt begins with
    episode_class = Episode  # how a game is shown, and which actions count as admissible
    max_prompt = 2048  # tokens a prompt may take
    fallback = 30  # characters taken as the action if the response has no tags
    graded = False  # whether info's score can lie between 0 and 1
    patience = 600  # seconds that a worker may take for an answer

    def __init__(self, horizon=None):
        self.horizon = self.horizon if horizon is None else horizon

    @classmethod
    def episode(cls, obs, info):
        return cls.episode_class(obs, info, cls.role)

    def expert(self):
        return None


# --------------------------------------------------------------------------------------- house

# A house of n places draws from PLACES[:n], one with m things from OBJECTS[:2 * m].
OBJECTS = """apple mug egg potato plate tomato book pen vase box bowl bread cup lettuce fork pan
knife pot spoon winebottle cloth soapbar spatula ladle kettle cd butterknife dishsponge pencil
statue pillow laptop alarmclock cellphone creditcard keychain newspaper remotecontrol watch candle
saltshaker peppershaker tissuebox spraybottle""".split()
CAN_BE = {
    "clean": """apple mug egg potato plate tomato bowl cup lettuce fork pan knife pot spoon cloth
        soapbar spatula ladle kettle butterknife dishsponge""".split(),
    "heat": "apple mug egg potato plate tomato bread cup".split(),
    "cool": "apple mug egg potato plate tomato bowl bread cup lettuce pan pot winebottle".split()}
PLACES = """countertop cabinet shelf drawer desk dresser sidetable garbagecan coffeetable sofa
diningtable stoveburner armchair bed safe cart ottoman toilet coffeemachine toaster""".split()
OPENABLE = {"fridge", "microwave", "cabinet", "drawer", "safe"}
GOALS = dict(zip(CATEGORIES, (
    "put a {obj} in {dest}.", "look at {obj} under the desklamp.", "put a clean {obj} in {dest}.",
    "put a hot {obj} in {dest}.", "put a cool {obj} in {dest}.", "put two {obj} in {dest}.")))
STATES = {"clean": "clean", "heat": "hot", "cool": "cool"}  # the state that each verb brings about
SIZES = {"train": 4000, "test": 1000}  # how many tasks the splits of the house have


def numbered(types):  # ["mug", "pen", "mug"] -> ["mug 1", "pen 1", "mug 2"]
    return [f"{t} {types[:i + 1].count(t)}" for i, t in enumerate(types)]


def listing(names):  # ["mug 1", "pen 1"] -> "a mug 1, and a pen 1"
    *others, last = [f"a {n}" for n in names] or ["nothing"]
    return f"{', '.join(others)}, and {last}" if others else last


class House(Seeker, Env):
    """One room with `places` places and `objects` things to carry, most of them out of sight until
    the agent goes there and opens what is closed. A task id is a number as a string. It fixes the
    split and, for a given size, the room and the goal. Rooms in which Seeker, the expert, needs
    more than min(4 * places, 50) steps are drawn again; `horizon` should be no less than that."""

    flags, horizon = ("places", "objects", "horizon"), 20
    held_out, categories = ("test", 192), CATEGORIES
    role, episode_class = HOUSEHOLD, Household

    def __init__(self, places=5, objects=4, horizon=None):
        super().__init__(horizon)
        if places < 5 or objects < 2:
            raise ValueError(f"house: places {places}, objects {objects}; it needs 5 and 2 or more")
        self.size = places, objects

    def tasks(self, split):
        """A number's own hash decides its split, so that options of size never move a task."""
        if split not in SIZES:
            raise ValueError(f"house has no split {split!r}; known: {', '.join(SIZES)}")
        hashes = ((n, hashlib.sha256(str(n).encode()).digest()) for n in itertools.count())
        ids = (f"{n:05d}" for n, its in hashes if (its[0] % 5 == 0) == (split == "test"))
        return list(itertools.islice(ids, SIZES[split]))

    def reset(self, task):
        for attempt in range(1000):
            rng = random.Random(f"{int(task)}.{attempt} {self.size}")
            self.draw_places(rng)
            self.draw_task(rng)
            if 1 <= len(self.expert() or []) <= min(4 * self.size[0], 50):
                break
        return f"{self.overview()}\n\nYour task is to: {self.task}", self.info()

    # ---- drawing a room
    def draw_places(self, rng):
        n = self.size[0]
        others = [rng.choice(PLACES[:n]) for _ in range(n - len(APPLIANCES))]
        if all(p in OPENABLE for p in others):
            others[0] = PLACES[0]  # the lamp needs a place that is never closed
        self.places = sorted(numbered(list(APPLIANCES.values()) + others))
        self.begin, self.contents = self.places[0], {p: [] for p in self.places}
        self.lamp_at = rng.choice([p for p in self.places
                                   if type_of(p) in others and type_of(p) not in OPENABLE])

    def draw_task(self, rng):
        self.category = rng.choice(list(GOALS))
        self.verb = verb_of(self.category)
        kinds = OBJECTS[:2 * self.size[1]]
        obj = rng.choice([t for t in kinds if self.verb is None or t in CAN_BE[self.verb]])
        self.goal = obj, type_of(rng.choice(self.places))
        self.task = GOALS[self.category].format(obj=obj, dest=self.goal[1])
        self.wanted = 2 if self.category == "pick_two_obj_and_place" else 1
        types = [obj] * self.wanted
        types += [rng.choice(kinds) for _ in range(self.size[1] - len(types))]
        for thing in numbered(types):
            # The goal's object never lies at its destination, so that no goal is half done.
            free = [p for p in self.places if type_of(thing) != obj or type_of(p) != self.goal[1]]
            self.contents[rng.choice(free)].append(thing)
        self.at, self.holding, self.opened, self.states, self.lit = None, None, set(), {}, False
        self.steps, self.won = 0, False

    # ---- what can be seen
    def overview(self):
        seen = listing(self.places[::-1])
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def closed(self, place):
        return type_of(place) in OPENABLE and place not in self.opened

    def inside(self, place):
        lamp = [LAMP] if place == self.lamp_at else []
        return [] if self.closed(place) else self.contents[place] + lamp

    def view(self, place):
        if self.closed(place):
            return f"The {place} is closed."
        where = f"The {place} is open. In it" if type_of(place) in OPENABLE else f"On the {place}"
        return f"{where}, you see {listing(self.inside(place))}."

    def admissible(self):
        here, thing = self.at, self.holding
        out = ["help", "inventory", "look"] + [f"go to {p}" for p in self.places if p != here]
        out += [f"examine {x}" for x in (here, thing) if x]
        if here:
            if type_of(here) in OPENABLE:
                out.append(f"open {here}" if self.closed(here) else f"close {here}")
            if thing is None:
                out += [f"take {o} from {here}" for o in self.inside(here) if o != LAMP]
            elif not self.closed(here):
                out.append(f"move {thing} to {here}")
            out += [f"{verb} {thing} with {here}" for verb, tool in APPLIANCES.items()
                    if thing and tool == type_of(here) and type_of(thing) in CAN_BE[verb]]
            if LAMP in self.inside(here):
                out += [f"use {LAMP}", f"examine {LAMP}"]
        return sorted(out)

    def info(self):
        return {"admissible": self.admissible(), "task": self.task, "category": self.category,
                "won": self.won, "score": float(self.won)}

    # ---- what can be done
    def step(self, action):
        obs = self.act(action) if action in self.admissible() else NOTHING
        self.steps += 1
        before, self.won = self.won, self.won or self.achieved()
        reward = REWARD if self.won and not before else 0.0
        return obs, reward, self.won, self.steps >= self.horizon and not self.won, self.info()

    def act(self, command):
        """Carries out an admissible command and returns what the agent reads."""
        verb, _, rest = command.partition(" ")
        here, thing = self.at, self.holding
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
            self.holding = None
            self.contents[here].append(thing)
            return f"You move the {thing} to the {here}."
        if verb in APPLIANCES:
            undone = {"heat": {"cool"}, "cool": {"hot"}}.get(verb, set())
            self.states[thing] = self.states.get(thing, set()) - undone | {STATES[verb]}
            return f"You {verb} the {thing} using the {here}."
        if verb == "use":
            self.lit = True
            return f"You turn on the {LAMP}."
        return self.examine(rest) if verb == "examine" else self.tell(verb)

    def examine(self, what):
        if what in self.contents:
            return self.view(what)
        states = sorted(self.states.get(what, ()), reverse=True)
        if not states:
            return f"There's nothing special about {what}."
        # ALFWorld says "cold" of what is only cool, and "cool" otherwise.
        return f"This is a {'cold' if states == ['cool'] else ' and '.join(states)} {what}."

    def tell(self, verb):
        if verb == "inventory":
            what = f"carrying: a {self.holding}" if self.holding else "not carrying anything"
            return f"You are {what}."
        if verb == "look":
            here = f"You are facing the {self.at}. Next to it, you see nothing."
            return here if self.at else self.overview()
        return ("Commands: go to, open, close, take, move, clean, heat, cool, use, examine, "
                "inventory, look.")

    def achieved(self):
        if self.needs_lamp():
            return self.lit and self.at == self.lamp_at and self.in_hand()
        return self.placed() >= self.wanted

    def placed(self, any_state=False):
        """How many of the goal's objects are at their destination and treated, or in any_state."""
        obj, dest = self.goal
        things = [thing for p in self.places if type_of(p) == dest for thing in self.contents[p]]
        return sum(type_of(thing) == obj and (any_state or self.treated(thing)) for thing in things)

    def treated(self, thing):
        return self.verb is None or STATES[self.verb] in self.states.get(thing, ())

    def expert(self):
        """Commands that win from here, found in a copy of the room; None once it is won."""
        twin, plan = copy.deepcopy(self), []
        while not twin.won and len(plan) <= 8 * len(self.places):
            plan.append(twin.advice()[1])
            twin.act(plan[-1])
            twin.won = twin.achieved()
        return plan if plan and twin.won else None


# ------------------------------------------------------------------------------------ alfworld

class AlfWorld(Env):
    """ALFWorld's text games, played by TextWorld. A task id is the game's folder below json_2.1.1:
    "valid_seen/pick_heat_then_place_in_recep-Egg-None-Fridge-14/trial_T2019...". Observations are
    the engine's own."""

    flags, held_out = ("data", "horizon"), ("valid_seen", 140)
    categories, role, episode_class = CATEGORIES, HOUSEHOLD, Household
    CHANGES = set("go open close take move clean heat cool use slice".split())  # others only look

    def __init__(self, data=None, horizon=None):
        super().__init__(horizon)
        self.root, self.engine = alfworld_root(data), Engine()

    def tasks(self, split):
        return game_folders(self.root, split)

    def reset(self, task):
        state, self.walkthrough = self.engine.load(self.root, task)
        self.category = task.split("/")[1].split("-")[0]
        self.task = re.search(r"Your task is to: (.*)", state.feedback)[1].strip()
        self.steps, self.played, self.won = 0, [], False  # played: what has changed something
        return state.feedback, self.info(state)

    def info(self, state):
        return {"admissible": list(state.admissible_commands), "task": self.task,
                "category": self.category, "won": self.won, "score": float(self.won)}

    def step(self, action):
        action = action.strip()  # TextWorld does so too
        state = self.engine.step(action)
        self.steps += 1
        if action.split(" ")[0] in self.CHANGES and state.feedback.strip() != NOTHING:
            self.played.append(action)
        before, self.won = self.won, self.won or bool(state.won)
        reward = REWARD if self.won and not before else 0.0
        truncated = self.steps >= self.horizon and not self.won
        return state.feedback, reward, self.won, truncated, self.info(state)

    def expert(self):
        """The rest of the game's walkthrough, or None once anything else has changed the game."""
        done = len(self.played)
        return self.walkthrough[done:] or None if self.played == self.walkthrough[:done] else None


# ------------------------------------------------------------------------------------- webshop

class WebShop(Env):
    """The shop of worlds/webshop.py, with the original's pages. A task id is a goal's number in the
    original's order. score is the original's reward of the step, and the step that buys at a score
    of exactly 1 pays REWARD. results/README.md has the departures."""

    role = ("You shop in an online store by typing commands: search[words of your own] looks "
            "through its catalogue, click[...] follows a link or a button or chooses an option. "
            "Find a product that is all that is asked for, choose its options, and buy it.")
    goals = "synthetic"  # who wrote what is asked for
    flags, horizon, graded = ("data", "horizon"), 15, True
    fallback, max_prompt = 20, 4096  # its pages are long
    patience = 3600  # the whole catalogue has five gigabytes
    held_out, categories, episode_class = ("test", 500), SHELVES, ShopEpisode

    def __init__(self, data=None, horizon=None):
        super().__init__(horizon)
        from worlds.webshop import Shop
        self.shop = Shop(data, self.goals)

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
    """The same with the goals that people wrote."""

    goals = "human"


# ------------------------------------------------------------------- the environments by name

ENVS = {"house": House, "alfworld": AlfWorld, "webshop": WebShop, "webshop-human": WebShopHuman}
OPTIONS = "data", "places", "objects"  # flags that some environments alone know


def known(name):
    """The class of an environment, with what holds for all of its games: one of ENVS, or your own
    as MODULE:CLASS, looked for in the working directory as well, or a class itself."""
    found = name if isinstance(name, type) else ENVS.get(name)
    if not found:
        added = [os.getcwd()] * (os.getcwd() not in sys.path)
        sys.path += added
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--env {name}: {error}; known: {', '.join(ENVS)}, and your own as "
                             f"MODULE:CLASS in {os.getcwd()} or on PYTHONPATH") from error
        finally:
            for folder in added:
                sys.path.remove(folder)
    if not hasattr(found, "held_out"):
        raise ValueError(f"--env {name}: an environment inherits envs.Env")
    return found


def name_of(env):
    """A name by which another process finds an environment. ValueError: there is none."""
    if isinstance(env, type):
        env = f"{env.__module__}:{env.__qualname__}"
    if env.startswith("__main__:") or "<locals>" in env:
        raise ValueError(f"no other process can import {env}: put the class into a module, or play "
                         "its games in this process, with workers=0")
    return env


def make_env(name, **options):
    """options: those of `flags`. Errors say what is wrong with one."""
    return known(name)(**options)


def tasks(name, split, **options):
    """The sorted task ids of a split. ValueError names the splits that there are."""
    ids = [plain(task) for task in make_env(name, **options).tasks(split)]
    if not ids:
        raise ValueError(f"--env {name} has no tasks in the split {split!r}")
    if wrong := [task for task in ids if not isinstance(task, (str, int))]:
        raise ValueError(f"--env {name}: a task id is {wrong[0]!r}, and neither str nor int")
    return ids


def options_for(given):
    """Those of the settings `given` that given["env"] is made with."""
    return {k: given[k] for k in known(given["env"]).flags if given.get(k) is not None}


def default_workers(name):
    """Processes of a rank: one per core, at most 16 on a machine; the house needs none."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 0 if name == "house" else max(1, min(16, cores) // ranks)


# -------------------------------------------------------------------------------- worker pool

class GameError(RuntimeError):
    """An environment failed, or kills its worker again and again. Names the game."""


# What an environment says, in Python's own types, or a ValueError.

def text_of(value, what):
    """A text or a number as text, without lone surrogates, which are no Unicode."""
    if not isinstance(value, (str, numbers.Number)):
        raise ValueError(f"{what} is {value!r}, which is no text")
    return str(value).encode("utf-8", "replace").decode()


def number_of(value, what):
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{what} is {number}")
    return number


def truth_of(value, what):
    if value not in (True, False):
        raise ValueError(f"{what} is {value!r}, where True or False is due")
    return bool(value)


@functools.lru_cache(1 << 16)
def command_of(value):
    command = text_of(value, "a command")
    action, valid = parse_action(f"<think></think><action>{command}</action>", 0)
    if not valid or action != command:
        why = "in lower case, without blanks at its ends" if valid else "in a malformed response"
        raise ValueError(f"no response can give the command {command!r}: it would be read as "
                         f"{action!r}, {why}")
    return command


def plain(value):
    """A value of Python for one of NumPy's, which would not become JSON."""
    return value.item() if hasattr(value, "item") else value


def info_of(info):
    if isinstance(info["admissible"], str):
        raise ValueError(f"admissible is {info['admissible']!r}, where a list of commands is due")
    return {"admissible": [command_of(command) for command in info["admissible"]],
            "task": text_of(info["task"], "task"), "category": plain(info["category"]),
            "won": truth_of(info["won"], "won"), "score": number_of(info["score"], "score")}


class Games:
    """Many games, by number, in one process: the worker's half of the pool."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        self.loaded = set()  # all games so far, as a load may come after its start
        self.ready = {}  # those not yet started: (environment, obs, info)
        self.playing = {}  # their environments
        self.spare = []  # used environments

    def load(self, number, task):
        if number not in self.loaded:
            env = self.spare.pop() if self.spare else make_env(self.name, **self.options)
            self.ready[number] = env, *env.reset(task)
            self.loaded.add(number)

    def start(self, number, task):
        self.load(number, task)
        self.playing[number], obs, info = self.ready.pop(number)
        return text_of(obs, "obs"), info_of(info)

    def step(self, number, action):
        obs, reward, terminated, truncated, info = self.playing[number].step(action)
        over = truth_of(terminated, "terminated"), truth_of(truncated, "truncated")
        if any(over):
            self.drop(number)
        return text_of(obs, "obs"), number_of(reward, "reward"), *over, info_of(info)

    def drop(self, number, argument=None):
        if number in self.playing:
            self.spare.append(self.playing.pop(number))

    def do(self, number, asked):
        """The answer to the last request, or a GameError: not every exception can be pickled."""
        try:
            for op, argument in asked:
                answer = getattr(self, op)(number, argument)
            return answer
        except (Exception, SystemExit) as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            return GameError(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def worker_main(fd):
    """A worker process: does what messages ask, until its parent closes the pipe."""
    conn, messages = Connection(fd), queue.PriorityQueue()
    games = Games(*conn.recv())

    def read():
        try:
            for n in itertools.count():
                number, asked, wanted = conn.recv()
                messages.put((asked[0][0] == "load", n, number, asked, wanted))
        finally:
            os._exit(0)

    # Someone always reads what the parent sends: with both pipes full, both sides would hang.
    threading.Thread(target=read, daemon=True).start()
    while True:
        *_, number, asked, wanted = messages.get()  # a load only if nothing else is asked
        answer = games.do(number, asked)
        if wanted:
            conn.send((number, answer))


@dataclass
class OpenGame:
    """The parent's record of a game."""
    worker: int
    task: str
    asked: list = field(default_factory=list)  # every (op, argument), for the worker's successor
    answer: tuple = None  # the answer to the last of them, None as long as it is owed
    place: int = 0  # in the line of all requests, of the last of them
    number: int = field(default_factory=itertools.count().__next__)  # never used twice


class Pool:
    """Games of an environment, a name or a class, played side by side in `workers` processes (0: in
    this one), under the caller's keys.

        pool.load(tasks)            loads games in the background, while the model is busy
        pool.start(key, task); pool.step(key, action)
        pool.gather(keys)           their answers in the order of keys: (obs, info) or step()'s five
        pool.drop(key)              gives up an unfinished game

    A worker that dies, or gives no answer for the environment's `patience`, is replaced and its
    games are replayed, which the caller does not notice. A GameError names a game that fails, or,
    where a worker was lost four times running, the games that waited for it."""

    say_after = 60  # seconds without an answer after which a line names the games

    def __init__(self, name, options=None, workers=0):
        self.options, self.env = options or {}, known(name)
        self.local = None if workers else Games(name, self.options)
        self.name = name_of(name) if workers else getattr(name, "__name__", name)
        # By worker: process, pipe, how often it was lost since its last answer.
        self.procs, self.conns, self.losses = [None] * workers, [None] * workers, [0] * workers
        self.games = {}  # by key
        self.loading = {}  # task: games that workers load
        self.loaders = itertools.cycle(range(workers))
        self.places = itertools.count()
        self.seconds = 0.0  # spent on games, or waiting for them
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
        if len(game.asked) > most:  # it was started, and has made so many steps
            raise GameError(f"{self.name}: game {game.task} goes on after {most} turns")
        self.ask(game, "step", action)

    def gather(self, keys):
        games = [self.games[key] for key in keys]
        for game in games:
            while game.answer is None:
                self.listen(game.worker)
        for key, game in zip(keys, games):
            if isinstance(game.answer, GameError):
                turn = len(game.asked) - 1  # the first request was to start
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
        game.asked.append((op, argument))
        game.answer, game.place = None, next(self.places)
        self.send(game, game.asked[-1:], wanted=True)

    def send(self, game, asked, wanted=False):
        """Asks a worker, or this process. `wanted`: whether the last of it is to be answered."""
        began = time.time()
        if self.local:
            game.answer = self.local.do(game.number, asked)
        else:
            with contextlib.suppress(OSError):  # listen() notices a dead worker
                self.conns[game.worker].send((game.number, asked, wanted))
        self.seconds += time.time() - began

    def listen(self, w):
        """Waits for a worker's next answer; replaces it if it is dead or hangs."""
        began = time.time()
        try:
            patience, first = self.env.patience, min(self.say_after, self.env.patience)
            if not self.conns[w].poll(first):
                print(f"{self.name}: no answer for {first} seconds in {self.owed(w)}",
                      file=sys.stderr, flush=True)
                if not self.conns[w].poll(patience - first):
                    return self.replace(w, f"gave no answer for {patience} seconds")
            number, answer = self.conns[w].recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.procs[w].wait(1)  # until its status is known
            return self.replace(w, f"died with status {self.procs[w].returncode}")
        self.seconds += time.time() - began
        for game in self.games.values():  # the one asked may have been dropped
            if game.number == number:
                game.answer = answer
                self.losses[w] = 0

    # ---- the workers
    def spawn(self, w):
        """Starts a fresh interpreter on this file; a fork would copy torch and its threads. In its
        own session Ctrl-C does not reach it, as the caller may need it in order to finish."""
        self.conns[w], theirs = Pipe()
        here, fd = os.path.dirname(os.path.abspath(__file__)), theirs.fileno()
        path = [here, *sys.path]  # the environment may lie anywhere
        code = f"import sys; sys.path[:] = {path!r}; import envs; envs.worker_main({fd})"
        command = [sys.executable, "-Wignore:webshop", "-c", code]  # the shop has warned here
        self.procs[w] = subprocess.Popen(command, pass_fds=[fd], start_new_session=True,
                                         stdin=subprocess.DEVNULL)
        self.conns[w].send((self.name, self.options))
        theirs.close()

    def games_of(self, w):
        """A worker's games in the order in which they were asked."""
        return sorted((game for game in self.games.values() if game.worker == w),
                      key=lambda game: game.place)

    def owed(self, w):
        """Games whose answers a worker owes. It plays the first of them, and the others wait."""
        return [game.task for game in self.games_of(w) if game.answer is None][:4]

    def replace(self, w, why):
        """Starts a lost worker's successor, which plays its games again."""
        self.losses[w] += 1
        if self.losses[w] > 3:
            raise GameError(f"{self.name}: a worker {why}, as did three before it, and owed "
                            f"answers in {self.owed(w)}")
        self.procs[w].kill()
        self.procs[w].wait()
        self.spawn(w)
        for game in self.games_of(w):
            self.send(game, game.asked, wanted=game.answer is None)


# ------------------------------------------------------------------------------- command line

def play_by_hand(env):
    """A person plays a game. An empty line takes the expert's next command."""
    obs, info = env.reset(env.tasks("train")[0])
    terminated = truncated = False
    while not (terminated or truncated):
        print(obs.strip() + "\n\nCommands: " + quoted(info["admissible"]))
        action = input("> ").strip().lower()
        if not action:
            plan = env.expert()
            action = (plan or info["admissible"])[0]
            print(f"(the expert{'' if plan else ' knows no way to win'}: {action})")
        obs, reward, terminated, truncated, info = env.step(action)
    print(f"{obs.strip()}\n\nWon: {info['won']}, reward {reward:g}, score {info['score']:.3g}")


def main():
    parser = argparse.ArgumentParser(description="Play an episode by hand.", allow_abbrev=False)
    parser.add_argument("--env", default="house")
    parser.add_argument("--data", help="the folder of alfworld's json_2.1.1, or of webshop's files")
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
