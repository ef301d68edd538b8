"""What an environment is, what a text game's prompts are, and how an environment is found by name.

    env = make_env("house")        or make_env("alfworld", data=DIR), make_env("MODULE:CLASS")
    obs, info = env.reset(tasks("house", "train")[0])
    action, valid = env.parse_action("<think>...</think> <action>go to fridge 1</action>")
    obs, reward, terminated, truncated, info = env.step(action)      as in Gymnasium

    python envs.py [--env alfworld|webshop|MODULE:CLASS --data DIR]     play an episode yourself

The file begins with what an environment is: `Env`, the base class, and `ToolEnv`, whose actions are
calls of tools. Whoever writes one needs no more. Then come the prompts of text games and the parser
of <action>; the environments by name, and the pool that plays them; and playing one by hand.

Those that exist are in environments/, found in the way in which your own is, and examples of it.
The prompts carry the same information as verl-agent's (commit 796ed31, the GiGPO paper's
framework), but are worded differently. A Pool plays many games side by side in worker processes
(runtime/workers.py). They import this file, so nothing here imports torch: they start quickly.
"""
import argparse
import collections
import contextlib
import functools
import inspect
import json
import math
import numbers
import os
import pkgutil
import re
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping

from runtime.answers import as_action, as_number, as_python, obs_text
from runtime.workers import GameError  # noqa: F401 (what a Pool raises)
from runtime.workers import (EnvWorker, WorkerPool, ctrl_c, is_importable, long_name,
                             processes_per_rank)

REWARD = 10.0  # of the step that wins, in most of environments/; every other step has 0
ROLE = "You live in a text world and solve one task in it by typing commands."

# --------------------------------------------------------------- the protocol of an environment

class Env:
    """The base class of environments, your own too. A small one, in a file guess.py:

        class GuessDigit(envs.Env):
            def tasks(self, split):
                return range(100) if split == "test" else range(100, 1000)

            def reset(self, task):
                self.digit = str(random.Random(task).randrange(10))
                return "Guess my digit, from 0 to 9.", {}

            def step(self, action):
                if action == self.digit:
                    return "Right.", 1.0, True, False, {}
                hint = "higher" if action < self.digit else "lower"
                return f"It is {hint}.", 0.0, False, False, {}

    With `import random` and `import envs` above it, it can be played already, which is the way to
    try one: python envs.py --env guess:GuessDigit.

    You must write three methods. The base class leaves them undefined, so that they can come from a
    mixin, also from one that is named behind it: class Mine(envs.Env, Game).

        tasks(split)    -> task ids, str or int, of the split "train", of the split held_out[0], and
                        of the split validation[0], if there is one. They share no task, and
                        are always the same
        reset(task)     -> (obs, info). It must reset everything: an object plays many games
        step(action)    -> (obs, reward, terminated, truncated, info), as in Gymnasium. Nonsense
                        must not be an exception: step also gets the action of a response that is
                        not in the format, which can be the response's whole text

    The same actions must lead to the same answers, because the games of a worker that died are
    played again. One process, a worker's or, without workers, the run's own, uses many objects at
    once. So what the whole process shares, such as environment variables, torch's default dtype or
    its grad mode, must stay as it is. Only the working directory is each object's own, unless the
    class is asynchronous.

    The return from a turn on is the sum of the rewards from there on, discounted by --gamma. It
    must be within +-r_max, or a run warns. With --algo ppo, the return is that of the whole
    episode, and it is not discounted.

    obs is one of these:

        text            The prompt shows it between `role` and `instruction`. The first one must
                        state the task
        chat messages   [{"role": "user", "content": "..."}, ...], which are passed on as they are
                        and need context = "full". A game may begin with a message of "system";
                        after a response, messages of "tool" are possible, too. Beside such messages
                        the model is shown `system` and the tools, but not `role` and `instruction`

    info may be empty; the pool fills in what is missing. It can have

        admissible      the commands that work now, which are listed in the prompt. Without it, the
                        action of every response in the format is admissible
        task            what follows "Your task is to: " in later prompts of "window"; default: that
                        of the first info or, if it has none, the first obs
        category        for tables, where `categories` can give it another name; default: that of
                        the first info
        won             True or False, of which the last one counts; default: whether the return so
                        far is above 0, so an environment with partial rewards needs it
        score           from 0 to 1; default: 1 if won
        metrics         numbers of your own so far in this episode, such as {"calls": 3}. Of each
                        name, the last value is averaged over the episodes that have one, and is
                        logged as env/calls, in training and in evaluations

    You may write, beside values for the attributes below,

        parse_action(text) -> (action, valid), a class method: the action that a response gives, and
            `valid`, whether the response is in the format. The action is text, or anything else
            that JSON can hold. `text` includes what the chat template began the response with. The
            default finds <action>...</action> behind a thought, see tagged_action. Whoever writes
            another one also writes the next two
        instruction: tells the model how to answer
        format_response(thought, action), a class method: writes what parse_action reads, for
            commands and demonstrators
        expert(): a whole plan, the commands that win from here, or None. It is for people, who play
            by python envs.py
        advice(forgetful=False): one turn of a demonstrator, (thought, action), or None where it
            knows none. It is for tools/imitate.py, which teaches a model to answer so, and needs no
            plan that wins: the forgetful one leaves out what training is to discover. An
            environment without demonstrator does not define it
        close(): ends what the constructor has started. What is left in a worker's process group
            is killed with the worker

    The pool truncates an episode after `horizon` turns, and checks every answer. (Lone surrogates
    are replaced, NumPy types are allowed, a command must be one that parse_action can read.)
    Whatever is wrong, and any exception, becomes a GameError with the game and the turn. A worker
    that does not answer for `patience` seconds is replaced.

    The games of a worker are played one after the other, and answers are taken after a fixed number
    of decoding steps, so that a rollout repeats to the last bit. Where steps take long, and some
    much longer than others (a browser, a compiler, another model), set `asynchronous = True`: each
    game has a thread in its worker, and answers are taken when they come. A rollout then repeats up
    to rounding, which sooner or later flips a token, and --resume is not exact. The class must be
    in a module, because this needs workers; and what its objects share, such as the generator of
    the module random, is used by many threads at once. They share their worker's working directory,
    too: whoever changes it changes it for all of them. When a worker dies, all games that it was at
    are tried again one at a time, to find the one that kills, and its others wait for them."""

    # the game
    flags = ()  # which of --data, --places and --objects the constructor takes, as in ("data",)
    horizon = 50  # maximum number of turns per episode
    tools = ()  # see ToolEnv
    recommended = {}  # settings of train.py, but for env, model, algo, context and lora_rank
    tiny_model = "tiny-house"  # the folder in results/ that --model tiny means
    # what the model is shown
    context = "window"  # or "full": the --context that the environment is made for
    system = None  # the system message at the start of every conversation
    role = ROLE  # the first sentence of a prompt
    instruction = None  # the last paragraph of a prompt; default: to think, and to use <action>
    prompt_builder_class = None  # makes prompts, knows the admissible actions; None: PromptBuilder
    max_prompt = 2048  # maximum tokens of a prompt
    max_observation = None  # maximum characters of a message; a longer one is cut, and says so
    fallback = 30  # characters used as the action if a response has no tags
    # evaluations
    held_out = ("test", 100)  # (the split that is reported, number of its games that a run plays)
    validation = None  # (split, number of games; 0: all) by which --eval_every chooses RUN/best
    eval_temperatures = (0.4,)  # at which a run plays them before and after training
    categories = {}  # {info["category"]: its column in tables}
    graded = False  # whether a score can be between 0 and 1
    # worker processes
    patience = 600  # seconds, imports included, after which a silent worker is replaced
    step_may_kill = False  # whether a step that costs two workers loses its episode, not the run
    workers = None  # worker processes per rank; None: its share of the cores, of at most 16
    asynchronous = False  # whether each game has a thread, so that no game waits for a slow one

    @classmethod
    def prompt_builder(cls, obs, info):
        make = cls.prompt_builder_class or PromptBuilder
        return make(obs, info, cls.role, cls.instruction, cls.system)

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text, cls.fallback)

    @classmethod
    def format_response(cls, thought, action):
        """A response that parse_action reads as this action."""
        return f"<think> {thought} </think> <action> {action_text(action)} </action>"

    @classmethod
    def tool_schemas(cls):
        """The JSON schemas of tools, for the chat template; None: there are no tools."""
        return None

    def expert(self):
        return None


class ToolEnv(Env):
    """An environment in which an action is a call of one of its methods. `tools` names them:

        tools = "answer",

        def answer(self, number: int) -> None:
            '''Ends the game.

            Args:
                number: the sum of all numbers in the text
            '''
            self.reward = float(str(number) == str(self.sum))
            self.done = True

    tasks and reset are those of Env; the obs of reset is the first message of the user. The model
    learns of its tools by the chat template, from their type hints and docstrings. It calls one
    tool per response, behind its thought, by

        <tool_call>{"name": "answer", "arguments": {"number": 5}}</tool_call>

    The thought can be missing. Arguments arrive as the model wrote them: number can be "5". The
    next message is what the method returned, a dict, list, tuple or set as JSON, or, if it raised
    an exception, even SystemExit, that exception's text; after a response that is not in the format
    it says what is wrong. So mistakes in your own tools are shown to nobody but the model: look at
    a page of an episode, RUN/transcripts/*.html. A tool returns its answer: it cannot be async, nor
    a generator.

    `reward` is the return so far, undiscounted: 0 after reset, and tools change it, by
    self.reward += 1 or self.reward = 1. The reward of a step is the difference that it made, so
    `= 1` in two steps is a reward of 1 and one of 0. What is not a finite number is an exception of
    that call, and the reward stays as it was.

    The episode ends when a tool sets `done`, or with a response that calls no tool. It is won if
    its return is above 0; for another rule, override step, and add `won` to the info that it
    returns. It is also over, and lost, if a call kills its worker process or does not end within
    `patience` seconds, and again when it is repeated; a warning says so. (Without workers it would
    end the run. A tool that runs what a model writes needs them, and a sandbox of your own: it
    could do all that you can.)

    A model made by tools/imitate.py needs recommended = {"max_new_tokens": 128} or so, because a
    call is longer than a command."""

    context = "full"
    role = instruction = ""
    max_observation = 8000
    patience = 60
    step_may_kill = True
    reward = 0.0  # the return so far
    done = False  # whether the latest action has ended the episode
    # The action that parse_action returns for a response that calls no tool: it ends the episode.
    # It is a text like those that say what is wrong with a response, and step knows it by that.
    NO_CALL = "the response has no <tool_call>"

    def __init_subclass__(cls, **options):
        """Makes a subclass's reset begin with the reward 0, and not done. It is wrapped, so that a
        reset need not call super's, whoever calls it: a reward that was left from the episode
        before would be wrong in silence."""
        super().__init_subclass__(**options)
        reset = getattr(cls, "reset", None)
        if reset and not hasattr(reset, "begins_at_0"):

            @functools.wraps(reset)
            def reset_all(self, task):
                self.reward = 0.0
                self.done = False
                return reset(self, task)

            reset_all.begins_at_0 = True
            cls.reset = reset_all

    @classmethod
    @functools.cache
    def tool_schemas(cls):
        """ValueError: a tool is not a method with type hints and a docstring."""
        from transformers.utils import get_json_schema  # late: workers do not need it
        if not isinstance(cls.tools, (tuple, list)) or not cls.tools:  # (a set has no order)
            raise ValueError(f"{cls.__name__}.tools is {cls.tools!r}; it must be a tuple of names "
                             "of methods, as in tools = \"add\", \"answer\"")
        schemas = []
        for name in cls.tools:
            taken = name in ("tasks", "reset", "advice", "close") or hasattr(ToolEnv, str(name))
            if taken or not callable(getattr(cls, str(name), None)):
                raise ValueError(f"{cls.__name__}.tools names {name!r}, which is not a method of "
                                 "this class, or a name that environments use themselves")
            tool = getattr(cls, name)
            if isinstance(inspect.getattr_static(cls, name), types.FunctionType):
                tool = types.MethodType(tool, cls)  # so that `self` is no argument
            try:
                if any(kind(tool) for kind in (inspect.iscoroutinefunction,
                                               inspect.isgeneratorfunction,
                                               inspect.isasyncgenfunction)):
                    raise TypeError("it is async or a generator; a tool must return its answer")
                for argument in inspect.signature(tool).parameters.values():
                    if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
                        raise TypeError(f"a call names its arguments, and {argument} has no name "
                                        "of its own")
                schemas.append(get_json_schema(tool))
            except Exception as error:
                raise ValueError(f"{cls.__name__}.{name} cannot be a tool: {error}") from None
        return schemas

    @classmethod
    def parse_action(cls, text):
        """-> ({"name": ..., "arguments": {...}}, True); or, for a response that is not in the
        format, (what is wrong, False)."""
        at = 0
        thought_is_over = False
        begins, ends = [], []  # of the JSON of calls
        while tag := TAG.search(text, at):
            at = tag.end()
            if tag[0] == "<think>" and not thought_is_over:
                at = text.find("</think>", at)  # whatever is between them
                if at < 0:
                    return "the thought has no </think>", False
            elif tag[0] == "</think>":
                thought_is_over, begins, ends = True, [], []  # all before it was thought
            elif tag[0] == "</tool_call>":
                ends.append(tag.start())
            elif tag[0] != "<think>":
                begins.append(tag.start() + len("<tool_call>"))
        if not begins:
            return cls.NO_CALL, False
        if (len(begins), len(ends)) != (1, 1) or ends < begins:
            return (f"a response must have one <tool_call>...</tool_call>; this one has "
                    f"<tool_call> {len(begins)} times and </tool_call> {len(ends)} times"), False
        try:
            call = json.loads(text[begins[0]:ends[0]], parse_int=finite(int),
                              parse_float=finite(float), parse_constant=finite(float))
            if depth(call) > 100:
                raise ValueError("it is nested too deeply")
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            return f"what the <tool_call> contains cannot be read as JSON: {why}", False
        if not (isinstance(call, dict) and call.keys() == {"name", "arguments"}
                and isinstance(call["arguments"], dict)):
            return 'a <tool_call> must contain {"name": "...", "arguments": {...}}', False
        if call["name"] not in cls.tools:
            return f"there is no tool {call['name']!r}; there are {', '.join(cls.tools)}", False
        return call, True

    @classmethod
    def format_response(cls, thought, action):
        return f"<think> {thought} </think> <tool_call>\n{action_text(action)}\n</tool_call>"

    def step(self, action):
        before = reward = self.reward
        done = self.done = action == self.NO_CALL  # a model that calls no tool has finished
        if isinstance(action, str):  # what is wrong with the response
            result = f"Error: {action}"
        else:
            try:
                try:
                    result = result_text(getattr(self, action["name"])(**action["arguments"]))
                finally:  # what the tool set before an exception counts
                    done = bool(self.done)
                    total = as_number(self.reward, "reward")
                    as_number(total - before, "the change of reward")
                    reward = total
            except ctrl_c():
                raise
            except BaseException as error:  # whatever a call does: exit() is SystemExit
                result = error_text(error)
            self.reward, self.done = reward, done
        return [{"role": "tool", "content": result}], reward - before, done, False, {}


# A tag of a response. What follows <tool_call>, as far as it is made of JSON's parts, goes with it,
# so that a tag in a string is text, also in a string at whose end the response was cut.
TAG = re.compile(r"""</?think> | </tool_call> | <tool_call> (?: [\[\]{}:,\s\d.eE+-]+
    | true | false | null | NaN | Infinity | "[^"\\]*(?:\\.[^"\\]*)*"
    | "(?:(?!</tool_call>)[^"\\]|\\.)*\\?\Z )*""", re.VERBOSE | re.ASCII | re.DOTALL)


def finite(kind):
    """Reads a number of JSON as int or float. ValueError: it is infinite, NaN, or has more digits
    than Python converts by default."""
    def read(text):
        if len(text) > 4300:
            raise ValueError(f"a number has {len(text)} characters")
        if kind is float and not math.isfinite(float(text)):
            raise ValueError(f"{text:.20} is not a finite number")
        return kind(text)
    return read


def depth(value):
    """How deeply lists and dicts are nested in it."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, parts), default=0)


def result_text(result):
    """What a tool returned, as the model reads it. TypeError: it is no answer yet."""
    if isinstance(result, (dict, list, tuple, set, frozenset)):
        return json.dumps(json_value(result), ensure_ascii=False)
    return as_answer(result)


def json_value(value):
    """A value as JSON can hold it, at any depth: a number of NumPy or torch is a number, a set is
    a sorted list, and what JSON has nothing for is text."""
    if isinstance(value, dict):
        return {json_scalar(key): json_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(json_value, value), key=json.dumps)  # it has no order of its own
    return json_scalar(value)


def json_scalar(value):
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if getattr(value, "shape", None) == () and kind not in ("m", "M"):  # those are times
        value = as_python(value)
    is_json = value is None or isinstance(value, (str, int)) or (
        isinstance(value, float) and math.isfinite(value))
    return value if is_json else as_answer(value)


def as_answer(value):
    """str(value). TypeError: it must be awaited or iterated first, or has no text but the place
    where it is in memory, which is another one in every process."""
    if isinstance(value, (Awaitable, AsyncIterator, Iterator)):
        getattr(value, "close", bool)()  # else Python warns that it was never awaited
        raise TypeError(f"the tool returned a {type(value).__name__}, which must be awaited or "
                        "iterated; a tool must return its answer")
    text = str(value)
    if f"{id(value):x}" in text.lower():
        raise TypeError(f"the tool returned a {type(value).__name__}, which has no text")
    return text


def error_text(error):
    try:
        return f"{type(error).__name__}: {error}"
    except ctrl_c():
        raise
    except BaseException:  # its __str__ is a tool's code, too
        return type(error).__name__


# ---------------------------------------------------------------------- prompts of text games

# The last paragraph of a prompt, with commands that are listed and without.
ANSWER = ("Reason about what to do next inside <think> </think>. Then give one of the commands, "
          "and nothing else, inside <action> </action>.")
WITHOUT_COMMANDS = ("Reason about what to do next inside <think> </think>. Then give your action, "
                    "and nothing else, inside <action> </action>.")
FIRST = "{role}\n{obs}"  # begins the first prompt of a game
LATER = ("{role} Your task is to: {task}\nSteps taken so far: {steps}. The latest, oldest first:\n"
         "{history}\nStep {now}. What you see: {obs}")  # begins a later one of "window"
PAST = "What you saw: {obs}\nWhat you did: {action}"  # a turn in LATER's {history}
COMMANDS = "Commands that work now: [{commands}]."
SAME_WAY = " Answer every later message in the same way."  # in the first message of "full"


def quoted(commands):
    """The commands as a prompt lists them."""
    return ", ".join(f"'{c}'" for c in commands)


def paragraphs(*texts):
    return "\n\n".join(text for text in texts if text).strip()


def user_message(text):
    return [{"role": "user", "content": text}]


def action_text(action):
    """An action as it is written into text."""
    return action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)


class PromptBuilder:
    """Records what the agent has seen in one game, and makes the model's messages of it. Chat
    messages of the environment are passed on as they are; an observation that is text becomes one
    message of the user, with what this class adds to it."""

    # ---- what both contexts use
    first = FIRST  # the template of what a game's first message begins with
    listing = COMMANDS  # the template of the paragraph that lists the commands
    unlisted = ()  # commands that work and are left out of that list

    def __init__(self, obs, info, role=ROLE, instruction=None, system=None):
        self.obs, self.info = obs, info  # the latest
        self.history = []  # (obs, action) of the turns so far
        self.system = [{"role": "system", "content": system}] if system else []  # messages
        self.role = role
        if instruction is None:
            instruction = WITHOUT_COMMANDS if info["admissible"] is None else ANSWER
        self.instruction = instruction

    def record(self, action, obs, info):
        """Records a turn: the environment answered `action` with `obs` and `info`."""
        self.history.append((self.obs, action))
        self.obs, self.info = obs, info

    def messages(self, context, history):
        """The lists of chat messages that a turn may send, from the longest to the shortest. In
        "window" every list is a whole conversation, with up to `history` turns of the past; in
        "full" there is one list, of what is new."""
        if context == "full":
            yield self.new_messages()
        else:
            for k in range(history, -1, -1):
                yield self.system + user_message(self.window_prompt(k))

    def accepts(self, action, valid):
        """Whether the game can use this action now. If it lists no commands: whether the response
        was in the format (`valid`)."""
        commands = self.info["admissible"]
        return valid if commands is None else action in commands

    def format_obs(self, obs):
        """An observation as prompts show it. ValueError: it is not text."""
        if not isinstance(obs, str):
            raise ValueError("observations that are chat messages need one growing conversation, "
                             '--context full: set context = "full" in the environment')
        return obs.strip()

    def fields(self):
        """What `first` and `later` are filled with in this turn."""
        return {"role": self.role, "task": self.info["task"], "obs": self.format_obs(self.obs)}

    def listed(self):
        """The commands that the prompt lists."""
        return [c for c in self.info["admissible"] if c not in self.unlisted]

    def commands(self):
        """The paragraph that lists the commands; "" if the game has no list."""
        if self.info["admissible"] is None:
            return ""
        return self.listing.format(commands=quoted(self.listed()))

    # ---- --context window: one message, rebuilt every turn
    later = LATER  # the template of what the message of a later turn begins with

    def window_prompt(self, k=2):
        """The text of the message, with the last k turns of the past."""
        n = len(self.history)
        # what the model wrote stays behind "What you did": no later line of it begins as ours do
        past = [PAST.format(obs=self.format_obs(obs),
                            action="\n  ".join(action_text(action).splitlines()))
                for obs, action in self.history[max(0, n - k):]]
        text = (self.later if n else self.first).format(
            **self.fields(), steps=n, history="\n".join(past), now=n + 1)
        return paragraphs(text, self.commands(), self.instruction)

    # ---- --context full: one conversation, which every turn makes longer
    def new_messages(self):
        """The messages that this turn adds to the conversation."""
        before = [] if self.history else self.system
        new = user_message(self.full_prompt()) if isinstance(self.obs, str) else self.obs
        return before + new

    def full_prompt(self):
        """The text of this turn's message, if the observation is text: what is new. The first one
        also has what holds for all turns."""
        if self.history:
            return paragraphs(self.format_obs(self.obs), self.full_commands())
        instruction = self.instruction and self.instruction + SAME_WAY
        return paragraphs(self.first.format(**self.fields()), self.full_commands(), instruction)

    def full_commands(self):
        """The paragraph with the commands in it. Another class can leave out what earlier messages
        have listed."""
        return self.commands()


# ------------------------------------------------------------------------ the parser of <action>

def tagged_action(text: str, fallback: int) -> tuple[str, bool]:
    """A response -> (action, valid), where `valid` says whether the response is in the format. The
    action is what lies between the first <action> and the first </action> behind the thought, if
    they are in this order; or else, if they are, before the thought:

        <think> a </think> <action>look</action>        look, in the format
        <action>look</action> <think> a </think>        look, in the format
        <action>look</action>                           look, not in the format

    A thought can quote the tags: it ends at the last </think> that follows an </action>, if there
    is one. So the action of

        <think> Not </think> <action>go</action>. </think> <action>look</action>

    is "look". A response in the format also has a pair of think tags, and no Chinese character but
    in the words of its action (verl-agent allows none at all). If no action is found, the last
    `fallback` characters are it, and the response is not in the format. Tags may be in any case.
    What a chat template begins a response with, <think> and a line break or an empty thought, is no
    part of the last characters."""
    # 1. Tags in lower case. Is there a thought?
    text = re.sub("</?(think|action)>", lambda tag: tag[0].lower(), text, flags=re.I | re.A)
    has_thought = 0 <= text.find("<think>") < text.find("</think>")

    # 2. `answer`, what follows the thought; without a thought, the whole text.
    first, last = (max(0, find("</think>")) for find in (text.find, text.rfind))
    quoted = text.rfind("</action>", first, last)  # the last one that a </think> follows
    answer = text[first if quoted < 0 else quoted + len("</action>"):]

    # 3. The action: in the answer, or before the thought, or else the last characters.
    for part in answer, text.partition("<think>")[0]:
        start, end = part.find("<action>"), part.find("</action>")
        if 0 <= start < end:
            action = part[start + len("<action>"):end].strip()
            around = text.replace(action, "")
            return action, has_thought and not re.search(r"[\u4e00-\u9fff]", around)
    text = re.sub("^<think>\n(\n</think>\n\n)?", "", text)  # as some chat templates begin
    return text[max(0, len(text) - fallback):], False


# ------------------------------------------------------------------- the environments by name

# These functions take an environment's name or its class. A name, MODULE:CLASS, is what a flag and
# config.json can hold, and what worker processes can import. A class is what Python code has at
# hand, such as one of a notebook, which nobody else can import. Some have short names, too:
ENVS = {"house": "environments.house:House", "alfworld": "environments.alfworld:AlfWorld",
        "webshop": "environments.webshop:WebShop",
        "webshop-human": "environments.webshop:WebShopHuman"}


def env_class(name: str | type[Env]) -> type[Env]:
    """The class of an environment: of a short name; of MODULE:CLASS, which is imported from the
    working directory, too; or the class itself. ValueError: there is none of this name."""
    found = name if isinstance(name, type) else imported(name)
    if isinstance(found, types.ModuleType):
        raise ValueError(f"--env {name}: it is a module; name its class, {name}:CLASS")
    if not isinstance(found, type):
        raise ValueError(f"--env {name}: it is no class; name the class of the environment")
    if not hasattr(found, "held_out"):
        raise ValueError(f"--env {name}: an environment must inherit from envs.Env")
    check_attributes(found)
    for method in ("parse_action", "format_response"):
        if inspect.isfunction(inspect.getattr_static(found, method, None)):
            raise ValueError(f"--env {name}: {method} must be a @classmethod, because it is called "
                             "where the model is, and not where the games are")
    return found


def check_attributes(env: type[Env]) -> None:
    """ValueError: an attribute that a run reads is not of the kind that Env says."""
    def split(value):
        return (isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], str)
                and isinstance(value[1], int) and value[1] >= 0)

    def temperatures(value):
        return (isinstance(value, (tuple, list)) and len(value) > 0
                and all(isinstance(x, (int, float)) and x >= 0 for x in value))

    def text(value):
        return isinstance(value, str)

    def texts(value):
        return isinstance(value, (tuple, list, set, frozenset)) and all(map(text, value))

    def dictionary(value):
        return isinstance(value, Mapping)

    def at_least(low):
        return lambda value: isinstance(value, numbers.Integral) and value >= low

    def or_none(is_right):
        return lambda value: value is None or is_right(value)

    for name, is_right, kind in (
            ("flags", texts, 'a tuple of texts, as in ("data",)'),
            ("horizon", at_least(1), "a whole number from 1 on"),
            ("recommended", dictionary, "a dictionary"),
            ("tiny_model", lambda value: isinstance(value, (str, os.PathLike)), "a text"),
            ("context", ("window", "full").__contains__, '"window" or "full"'),
            ("system", or_none(text), "a text, or None"),
            ("role", or_none(text), "a text, or None"),
            ("instruction", or_none(text), "a text, or None"),
            ("max_prompt", or_none(at_least(1)), "a whole number from 1 on, or None"),
            ("max_observation", or_none(at_least(1)), "a whole number from 1 on, or None"),
            ("fallback", at_least(0), "a whole number from 0 on"),
            ("held_out", split, "(split, number of games)"),
            ("validation", or_none(split), "(split, number of games), or None"),
            ("eval_temperatures", temperatures, "a tuple of numbers, as in (0.4,)"),
            ("categories", dictionary, "a dictionary"),
            ("patience", lambda value: isinstance(value, numbers.Real) and value > 0,
             "a number of seconds above 0"),
            ("workers", or_none(at_least(0)), "a whole number from 0 on, or None")):
        if not is_right(value := getattr(env, name)):
            raise ValueError(f"--env {env.__name__}: {name} is {value!r:.200}; it must be {kind}")


def imported(name: str):
    """What a short name or MODULE:CLASS names. ValueError: it cannot be imported."""
    if name.startswith("__main__:"):
        raise ValueError(f"--env {name}: this class is known only to the script or notebook in "
                         "which it was written; put it into a module")
    try:
        with working_directory_importable():
            return pkgutil.resolve_name(ENVS.get(name, name))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"--env {name}: {error}; known: {', '.join(ENVS)}, or your own as "
                         f"MODULE:CLASS in {os.getcwd()} or on PYTHONPATH") from error


@contextlib.contextmanager
def working_directory_importable():
    """Within this context, modules in the working directory can be imported, too."""
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def name_of(name: str | type, short_names: dict = ENVS) -> str:
    """How a run records an environment, or a learner (short_names: ALGOS), given as a class or by
    name: its short name if it has one, else MODULE:CLASS."""
    long = long_name(name)
    return next((short for short, known in short_names.items() if known == long), long)


def make_env(name: str | type[Env], horizon=None, **options) -> Env:
    """Makes an environment with options for its `flags`. ValueError: it does not take them."""
    env = env_class(name)
    check_options(env, options)
    made = env(**options)
    made.horizon = horizon or made.horizon
    return made


def check_options(env: type[Env], options: dict) -> None:
    """ValueError: the constructor of the environment does not take these options."""
    try:
        inspect.signature(env).bind(**options)
    except TypeError as error:
        raise ValueError(f"--env {env.__name__}: its constructor must take what its `flags` name "
                         f"({', '.join(env.flags) or 'none'}), and no more: {error}") from None


def context_for(name: str | type[Env], context=None) -> str:
    """How the past is shown to the model: as asked for, or as the environment is made for.
    ValueError: it has tools, and "window" is asked for."""
    env = env_class(name)
    if context == "window" and env.tools:
        raise ValueError(f"--context window cannot be used with --env {env.__name__}, whose tools "
                         "answer in one growing conversation, --context full")
    return context or env.context


def listed(env: Env, split: str, label: str) -> list:
    """What env.tasks(split) returns, as Python values. ValueError: it is no list or the like."""
    found = env.tasks(split)
    if found is None:
        found = ()
    if not isinstance(found, Iterable):
        raise ValueError(f"--env {label}: tasks() returned {found!r}; it must return task ids")
    return [as_python(task) for task in found]


def tasks(name: str | type[Env], split: str, **options) -> list:
    """The sorted task ids of a split. ValueError: there is no such split, or it is empty."""
    env = make_env(name, **options)
    label = getattr(name, "__name__", name)
    if not hasattr(env, "tasks"):
        raise ValueError(f"--env {label} has no method tasks(split)")
    ids = listed(env, split, label)
    declared = [*dict.fromkeys(("train", env.held_out[0], *(env.validation or ())[:1]))]
    training = [] if split in declared else listed(env, "train", label)
    if callable(getattr(env, "close", None)):
        env.close()
    if not ids:
        raise ValueError(f"--env {label} has no tasks in the split {split!r}")
    if wrong := [task for task in ids if isinstance(task, bool) or
                 not isinstance(task, (str, int))]:
        raise ValueError(f"--env {label}: a task id is {wrong[0]!r}; it must be str or int")
    if {*ids} == {*training}:
        raise ValueError(f"--env {label}: the tasks of the split {split!r} are those of \"train\", "
                         f"so it is probably none; known: {', '.join(declared)}")
    (task, count), = collections.Counter(map(str, ids)).most_common(1)
    if count > 1:
        raise ValueError(f"--env {label}: the task id {task} comes {count} times in {split!r}")
    return sorted(ids, key=lambda task: (isinstance(task, str), task))  # a set has no fixed order


def options_for(settings: dict) -> dict:
    """Those of the settings that make_env(settings["env"]) takes."""
    names = "horizon", *env_class(settings["env"]).flags
    return {k: settings[k] for k in names if settings.get(k) is not None}


def default_workers(name: str | type[Env]) -> int:
    """Worker processes per rank: as many as the class says, and 0 for a class that other processes
    cannot import, such as one of a notebook."""
    workers = env_class(name).workers
    if not is_importable(name):
        return 0
    return processes_per_rank() if workers is None else workers


def Pool(name: str | type[Env], options=None, workers=0) -> WorkerPool:
    """Makes the pool that plays games of an environment in `workers` processes or, with 0, in this
    one, with options for its `flags`. It is a function that looks like a class, because all that
    it makes is a WorkerPool (runtime/workers.py), which finds no environments by name itself."""
    env = env_class(name)
    check_options(env, {k: x for k, x in (options or {}).items() if k != "horizon"})
    return WorkerPool("envs:make_env", name, env, options, workers)


# ----------------------------------------------------------------------------- playing by hand

def next_command(env, info):
    """-> (command, True) if the expert or a demonstrator knows what to do; else (the first command
    that works, or "", False)."""
    plan = env.expert()
    if plan:
        return plan[0], True
    advice = env.advice() if hasattr(env, "advice") else None
    if advice:
        thought, action = advice
        return action_text(action), True
    if info["admissible"]:
        return info["admissible"][0], False
    return "", False


def play_by_hand(name, **options):
    """A person plays a game; an empty line is the expert's, or a demonstrator's, next command."""
    with contextlib.closing(EnvWorker("envs:make_env", name, options)) as worker:
        play_game(worker, tasks(name, "train", **options)[0])


def play_game(worker, task):
    obs, info = worker.start(0, task)
    env = worker.playing[0].env
    terminated = truncated = False
    if env.system:
        print(env.system)
    for schema in env.tool_schemas() or ():
        print(json.dumps(schema["function"]))
    while not (terminated or truncated):
        print(obs_text(obs).strip())
        if info["admissible"] is not None:
            print("\nCommands: " + quoted(info["admissible"]))
        command = input("> ").strip()
        if not command:
            command, is_known = next_command(env, info)
            if is_known:
                print(f"(the expert: {command})")
            else:
                print(f"(the expert knows no way to win: {command})")
        action = as_action(env.parse_action(env.format_response("", command))[0])
        obs, reward, terminated, truncated, info = worker.step(0, action)
    print(f"{obs_text(obs).strip()}\n\nWon: {info['won']}, reward {reward:g}, "
          f"score {info['score']:.3g}")


def main():
    parser = argparse.ArgumentParser(description="Play an episode by hand.", allow_abbrev=False)
    parser.add_argument("--env", default="house")
    parser.add_argument("--data", help="folder with alfworld's json_2.1.1, or of webshop's files")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    sys.path.append(os.getcwd())
    try:
        play_by_hand(args.env, **options_for(vars(args)))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"envs.py: {error}")
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    import envs as this_module  # the one that environments import: there is one class Env
    this_module.main()
