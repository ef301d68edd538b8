"""The built-in house: a small version of ALFWorld in plain Python, with the same commands and the
same six types of tasks.

    room = Room(places=5, objects=4)           the size of the house
    room.enter(task_ids("train")[0])           draws the room and its goal -> the first observation
    room.actions()                             the commands that work now
    room.act("go to fridge 1")                 executes a command -> its answer
    room.won                                   whether the goal was reached
    room.expert()                              commands that win from here, or None

    python envs.py                             play in it

The file reads from the game to the prompts of household tasks, which ALFWorld has, too, and to
House, the environment.
"""
import copy
import hashlib
import itertools
import random

from environments.household_expert import APPLIANCES, LAMP, HouseholdExpert, type_of, verb_of
from envs import REWARD, Env, PromptBuilder, quoted, tagged_action

# ----------------------------------------------------------------------------------------- the game

NOTHING = "Nothing happens."  # the answer to a command that cannot be used
GOALS = {"pick_and_place_simple": "put a {obj} in {dest}.",
         "look_at_obj_in_light": "look at {obj} under the desklamp.",
         "pick_clean_then_place_in_recep": "put a clean {obj} in {dest}.",
         "pick_heat_then_place_in_recep": "put a hot {obj} in {dest}.",
         "pick_cool_then_place_in_recep": "put a cool {obj} in {dest}.",
         "pick_two_obj_and_place": "put two {obj} in {dest}."}

# A house of n places has a sinkbasin, a microwave, a fridge, and n - 3 others of the types
# PLACES[:n]. One with m things has things of the types OBJECTS[:2 * m].
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
STATES = {"clean": "clean", "heat": "hot", "cool": "cool"}  # the state after each verb
SIZES = {"train": 4000, "test": 1000, "validation": 1000}  # number of tasks per split


def numbered(types):  # ["mug", "pen", "mug"] -> ["mug 1", "pen 1", "mug 2"]
    return [f"{t} {types[:i + 1].count(t)}" for i, t in enumerate(types)]


def listing(names):  # ["mug 1", "pen 1"] -> "a mug 1, and a pen 1"
    *others, last = [f"a {n}" for n in names] or ["nothing"]
    return f"{', '.join(others)}, and {last}" if others else last


def task_ids(split):
    """The task ids of a split, whatever the size of the house. The hash of a task's number decides
    whether it is trained on; of the others, those of validation follow those of the test."""
    if split not in SIZES:
        raise ValueError(f"house has no split {split!r}; known: {', '.join(SIZES)}")
    hashes = ((n, hashlib.sha256(str(n).encode()).digest()) for n in itertools.count())
    ids = (f"{n:05d}" for n, digest in hashes if (digest[0] % 5 == 0) == (split != "train"))
    first = SIZES["test"] if split == "validation" else 0
    return list(itertools.islice(ids, first, first + SIZES[split]))


class Room(HouseholdExpert):
    """One room with `places` places and `objects` things to carry, most of which cannot be seen
    before the agent goes there and opens what is closed. A task id is a number as a string. It
    determines the split and, for a given size, the room and the goal. A room in which the expert
    needs more than min(4 * places, 50) steps is drawn again, at most 1000 times.

    goal: the types (object, place); task: the goal as a sentence; category: one of GOALS; verb:
    clean, heat, cool or None; contents: {place: things}; at, holding: names, or None."""

    def __init__(self, places=5, objects=4):
        if places < 5 or objects < 2:
            raise ValueError(f"house: places {places}, objects {objects}; it needs 5 and 2 or more")
        self.size = places, objects

    def enter(self, task):
        """Draws the room of that task -> the first observation, which states the goal."""
        for attempt in range(1000):
            rng = random.Random(f"{int(task)}.{attempt} {self.size}")
            self.draw_places(rng)
            self.draw_task(rng)
            if 1 <= len(self.expert() or []) <= min(4 * self.size[0], 50):
                break
        return f"{self.overview()}\n\nYour task is to: {self.task}"

    def act(self, command):
        """Executes a command -> its answer. A command that does not work now changes nothing."""
        answer = self.execute(command) if command in self.actions() else NOTHING
        self.won = self.won or self.achieved()
        return answer

    # ---- drawing a room
    def draw_places(self, rng):
        n = self.size[0]
        others = [rng.choice(PLACES[:n]) for _ in range(n - len(APPLIANCES))]
        if all(p in OPENABLE for p in others):
            others[0] = PLACES[0]  # the lamp needs an open place
        self.places = sorted(numbered(list(APPLIANCES.values()) + others))
        self.begin = self.places[0]
        self.contents = {p: [] for p in self.places}
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
            # the goal's object never starts at its destination
            free = [p for p in self.places if type_of(thing) != obj or type_of(p) != self.goal[1]]
            self.contents[rng.choice(free)].append(thing)
        self.at = None  # the place in front of the agent
        self.holding = None  # the thing in its hand
        self.opened = set()  # places
        self.states = {}  # thing: what it is, of "clean", "hot" and "cool"
        self.lit = False  # whether the lamp was turned on
        self.won = False

    # ---- observations
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

    def actions(self):
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

    # ---- commands
    def execute(self, command):
        """Executes a command that works now -> its answer."""
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
        # as in ALFWorld: "cold" for what is only cool, and "cool" in combinations
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
        """How many of the goal's objects are at their destination and, unless any_state,
        treated."""
        obj, dest = self.goal
        things = [thing for p in self.places if type_of(p) == dest for thing in self.contents[p]]
        return sum(type_of(thing) == obj and (any_state or self.treated(thing)) for thing in things)

    def treated(self, thing):
        return self.verb is None or STATES[self.verb] in self.states.get(thing, ())

    def expert(self):
        """A list of commands that wins from here, found in a copy of the room; None if it is won,
        or if none is found."""
        twin, plan = copy.deepcopy(self), []
        while not twin.won and len(plan) <= 8 * len(self.places):
            plan.append(twin.advice()[1])
            twin.execute(plan[-1])
            twin.won = twin.achieved()
        return plan if plan and twin.won else None


# ----------------------------------------------------------------------- prompts of household tasks

HOUSEHOLD = "You live in a text world and solve one household task in it by typing commands."
ALWAYS = "These commands always work, except to go where you already are: [{commands}]."
OTHERS = "Other commands that work now: [{commands}]."
CATEGORIES = {"pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look",
              "pick_clean_then_place_in_recep": "Clean", "pick_heat_then_place_in_recep": "Heat",
              "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2"}


class HouseholdPrompts(PromptBuilder):
    """In a conversation, the commands that always work are listed only once."""

    unlisted = ("help",)

    def __init__(self, obs, info, *texts):
        super().__init__(obs, info, *texts)
        self.always = [c for c in self.listed() if c.startswith(("go to ", "inventory", "look"))]

    def full_commands(self):
        others = [c for c in self.listed() if c not in self.always]
        others = OTHERS.format(commands=quoted(others))
        if self.history:
            return others
        always = ALWAYS.format(commands=quoted(self.always))
        return f"{always}\n{others}"


# ---------------------------------------------------------------------------------- the environment

class House(Env):
    """A Room with `places` places and `objects` things to carry. A task id is a number as a string.
    The default horizon fits 5 places; larger houses need a longer one, up to the expert's
    min(4 * places, 50)."""

    flags = ("places", "objects")
    horizon = 20
    held_out, validation = ("test", 192), ("validation", 96)
    categories = CATEGORIES
    role = HOUSEHOLD
    prompt_builder_class = HouseholdPrompts
    workers = 0  # a step takes less time than a message to another process
    eval_temperatures = (0.4, 1.0)

    def __init__(self, places=5, objects=4):
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
        obs = self.room.act(action)
        info = self.info()
        self.steps += 1
        truncated = self.steps >= self.horizon and not info["won"]
        reward = REWARD if info["won"] and not before else 0.0
        return obs, reward, info["won"], truncated, info

    def expert(self):
        return self.room.expert()

    def advice(self, forgetful=False):
        return self.room.advice(forgetful)
