"""ALFWorld: the original's games ($ALFWORLD_DATA), played by TextWorld, which is made faster.

    python envs.py --env alfworld              play in it

TextWorld parses the same grammar again and again, deep-copies what nobody changes, sorts the same
facts for every query, and translates every game four times. `patched_textworld` replaces those
functions while a game is loaded or makes a step, and restores them afterwards. The answers are the
same, byte for byte, and a step is 18 times as fast. Only TextWorld 1.7.0 is patched, which needs it
to run on Python 3.13.

The file reads from the shortcuts to the engine and to AlfWorld, the environment. Its prompts and
the types of its tasks are those of house.py.
"""
import contextlib
import copy
import functools
import gc
import glob
import json
import os
import re

from environments.house import CATEGORIES, HOUSEHOLD, NOTHING, HouseholdPrompts
from envs import REWARD, Env, tagged_action

# ------------------------------------------------------------------------------- TextWorld, patched

def shallow(x):
    """A replacement for deepcopy: of a grammar's symbols only the context changes, and it is always
    set before it is used."""
    return [copy.copy(y) for y in x] if isinstance(x, list) else copy.copy(x)


def sorted_state(PddlState):
    """A subclass that keeps the facts of a signature sorted, as every query needs them."""

    class State(PddlState):
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

    return State


@functools.cache
def shortcuts():
    """[(module or class, name, replacement)] for TextWorld 1.7.0, with which the replacements were
    compared; empty for every other version."""
    import textworld.version
    if textworld.version.__version__ != "1.7.0":
        return []
    import fast_downward
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

    parse_grammar = functools.cache(textgen._parse_and_convert)
    translate = functools.lru_cache(1)(fast_downward.pddl2sas)

    def parse(text, rule_name, trace=False):
        return shallow(parse_grammar(text, rule_name=rule_name))

    def derive(symbol, context=None):
        # the original adds the variables to locals(), which Python 3.13 no longer reads
        variables = (context or symbol.context)["variables"]
        return [textgen.TerminalSymbol(eval(symbol.expression, vars(textgen), dict(variables)))]

    def pddl2sas(domain, problem, verbose=False, optimize=False):
        return translate(domain, problem)  # `optimize` is for a planner that is never used

    return [
        (textgen, "deepcopy", shallow),  # safe only together with the next
        (textgen, "_parse_and_convert", parse),
        (textgen.EvalSymbol, "derive", derive),
        (Rule, "parse_conjunctive_query",
         staticmethod(functools.cache(Rule.parse_conjunctive_query))),
        (fast_downward, "pddl2sas", pddl2sas),
        # load() and reset() build the same state, so reset() can have the one that load() made;
        # a reset() without a load() before it would get a state that has been played
        (logic, "PddlState", functools.lru_cache(1)(sorted_state(logic.PddlState)))]


@contextlib.contextmanager
def patched_textworld():
    """Within this context, TextWorld is patched and the garbage collector is off, which would take
    a third of the time of a translation."""
    originals = [(where, name, vars(where)[name]) for where, name, _ in shortcuts()]
    gc.disable()
    try:
        for where, name, replacement in shortcuts():
            setattr(where, name, replacement)
        yield
    finally:
        for where, name, original in originals:
            setattr(where, name, original)
        gc.enable()


# -------------------------------------------------------------------------------- the games' engine

def alfworld_root(data=None):
    """The folder json_2.1.1 below `data`, $ALFWORLD_DATA, or where alfworld-download puts it."""
    data = os.path.expanduser(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld")
    root = os.path.join(data, "json_2.1.1")
    if not os.path.isdir(root):
        raise FileNotFoundError(
            f"no ALFWorld games: {root} does not exist. `alfworld-download` fetches them, --data "
            "(or the variable ALFWORLD_DATA) names the folder that holds json_2.1.1")
    return root


def game_folders(root, split):
    """The sorted folders of a split's games, relative to `root`."""
    if split not in ("train", "valid_seen", "valid_unseen"):
        raise ValueError(f"alfworld has no split {split!r}; known: train, valid_seen, valid_unseen")
    games = sorted(glob.glob(os.path.join(root, split, "*", "*", "game.tw-pddl")))
    if not games:
        raise FileNotFoundError(f"no games (*/*/game.tw-pddl) below {os.path.join(root, split)}; "
                                "`alfworld-download` fetches them")
    return [os.path.relpath(os.path.dirname(g), root).replace(os.sep, "/") for g in games]


def packages(root):
    """Imports textworld and ALFWorld's wrapper, which other environments do not need."""
    if not os.environ.get("ALFWORLD_DATA"):
        os.environ["ALFWORLD_DATA"] = os.path.dirname(root)  # else alfworld makes its own folder
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        raise ImportError("--env alfworld needs the alfworld package (pip install alfworld): "
                          f"{error}") from None
    return textworld, AlfredDemangler


class Engine:
    """Plays ALFWorld games, one after the other. A state has feedback, admissible_commands, won."""

    game = None

    def load(self, root, folder):
        """-> (the first state, the walkthrough) of the game in this folder below `root`."""
        textworld, demangler = packages(root)
        path = os.path.join(root, folder, "game.tw-pddl")
        if not os.path.isfile(path):
            raise ValueError(f"alfworld: no game {path}")
        if shortcuts():
            # TextWorld keeps all facts of every game it has loaded, nearly a megabyte per game;
            # games that are being played do not need them, because facts are compared by value
            from mementos.core import _memento_cache
            _memento_cache.clear()
        with patched_textworld():
            if self.game is None:
                wanted = textworld.EnvInfos(won=True, admissible_commands=True)
                self.game = textworld.start(path, wanted, wrappers=[demangler])
            else:
                self.game.load(path)
            state = self.game.reset()
        with open(path, encoding="utf-8") as file:
            return state, json.load(file)["walkthrough"]

    def step(self, action):
        with patched_textworld():
            state, _, _ = self.game.step(action)
        return state


# ---------------------------------------------------------------------------------- the environment

class AlfWorld(Env):
    """ALFWorld's text games, played by TextWorld. A task id is the game's folder below json_2.1.1:
    "valid_seen/pick_heat_then_place_in_recep-Egg-None-Fridge-14/trial_T2019...". Observations are
    those of the engine."""

    flags = ("data",)
    held_out, validation = ("valid_unseen", 134), ("valid_seen", 140)
    categories = CATEGORIES
    role = HOUSEHOLD
    prompt_builder_class = HouseholdPrompts
    tiny_model = "tiny-alfworld"
    # verbs that change the game; the others only look
    CHANGES = set("go open close take move clean heat cool use slice".split())

    def __init__(self, data=None):
        self.root = alfworld_root(data)
        self.engine = Engine()

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text.lower(), cls.fallback)

    def tasks(self, split):
        return game_folders(self.root, split)

    def reset(self, task):
        state, self.walkthrough = self.engine.load(self.root, task)
        self.category = task.split("/")[1].split("-")[0]
        self.task = re.search(r"Your task is to: (.*)", state.feedback)[1].strip()
        self.steps = 0
        self.played = []  # commands that changed something
        self.won = False
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
        before = self.won
        self.won = self.won or bool(state.won)
        reward = REWARD if self.won and not before else 0.0
        truncated = self.steps >= self.horizon and not self.won
        return state.feedback, reward, self.won, truncated, self.info(state)

    def expert(self):
        """The rest of the game's walkthrough, or None at its end or after a step that is not in
        it."""
        done = len(self.played)
        if self.played != self.walkthrough[:done]:
            return None
        return self.walkthrough[done:] or None
