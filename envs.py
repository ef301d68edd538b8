"""Text environments behind one protocol, and their prompts.

    env = make_env("house")        or make_env("alfworld", data=DIR), make_env("webshop", data=DIR)
    obs, info = env.reset(tasks("house", "train")[0])
    action, valid = env.parse_action("<think>...</think> <action>go to fridge 1</action>")
    obs, reward, terminated, truncated, info = env.step(action)      as in Gymnasium
    env.expert()                   a list of commands that wins from here, or None

info has admissible (a list of commands), task (a sentence), category, won (bool) and score (0 to
1). The step that wins gets the reward REWARD, every other step 0. An action that the environment
cannot use is never an exception: the answer is "Nothing happens.", or in the shop the same page
again. Each environment wraps a game of simulators/:

- `house` is a small version of ALFWorld in plain Python, with the same commands and task types.
- `alfworld` is the original: the alfworld package's TextWorld engine, with the games in
  $ALFWORLD_DATA.
- `webshop` is WebShop's text environment, with the catalogue in $WEBSHOP_DATA.

The prompts carry the same information as verl-agent's (commit 796ed31, the GiGPO paper's
framework), but are worded differently. A Pool plays many games side by side in worker processes
(runtime/workers.py). They import this file, so nothing here imports torch: they start quickly.
    python envs.py [--env alfworld|webshop --data DIR]                  play an episode yourself
"""
import argparse
import inspect
import os
import pkgutil
import re
import sys

from runtime.workers import GameError  # noqa: F401 (what a Pool raises)
from runtime.workers import WorkerPool, as_python, processes_per_rank
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
    settings = {}  # of train.py, recommended with this environment
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
    settings = {"mini_batch": 64}  # episodes are short
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


def name_of(env) -> str:
    """The name by which a run records its environment: that of ENVS, or a class's MODULE:CLASS."""
    if not isinstance(env, type):
        return env
    names = [name for name, known in ENVS.items() if known is env]
    return names[0] if names else f"{env.__module__}:{env.__qualname__}"


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
    """Worker processes per rank: 0 for the house, whose steps take less time than a message."""
    return 0 if name == "house" else processes_per_rank()


def Pool(name, options=None, workers=0) -> WorkerPool:
    """Plays games of an environment, a name or a class, in `workers` processes or with 0 in this
    one, with options for its `flags`."""
    return WorkerPool("envs:make_env", name, env_class(name), options, workers)


# ----------------------------------------------------------------------------- playing by hand

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
