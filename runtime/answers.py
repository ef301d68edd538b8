"""What an environment answers: checked, and as Python's own types.

Each of these returns a part of an answer. ValueError: the part is not what it should be. Nothing
here imports an environment or torch, so that worker processes start quickly.
"""
import functools
import json
import math
import numbers
from collections.abc import Iterable, Mapping


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
    value = as_python(value)
    if not isinstance(value, numbers.Number) or value not in (True, False):
        raise ValueError(f"{what} is {value!r}, not True or False")
    return bool(value)


def as_action(value):
    """A copy of what JSON can hold, without lone surrogates. ValueError: JSON would make something
    else of it, such as a list of a tuple."""
    check_json(value)
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def check_json(value):
    """ValueError: JSON would make something else of a part of it."""
    if isinstance(value, tuple):
        raise ValueError(f"an action is or has {value!r}, which JSON makes a list")
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"an action has the key {other[0]!r}, which JSON makes a text")
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            check_json(part)


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
    try:
        return value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # an array of several
        return value


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


def as_metrics(metrics):
    """{name: number}, as text and float."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics is {metrics!r:.200}, not a dict of numbers")
    return {as_text(name, "a name of metrics"): as_number(x, f"metrics[{name!r}]")
            for name, x in metrics.items()}


def as_info(info, env, task, category, won, metrics=()):
    """An info with all of its parts. `task`, `category` and `won`: what they are unless info has
    them. `metrics`: those so far, to which info's are added; without any, info has none."""
    if not isinstance(info, Mapping):
        raise ValueError(f"info is {info!r}, not a dict")
    commands = info.get("admissible")
    if isinstance(commands, (set, frozenset)):
        commands = sorted(commands)  # a set has no order of its own
    if commands is not None and (isinstance(commands, str) or not isinstance(commands, Iterable)):
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
    metrics = dict(metrics) | as_metrics(info.get("metrics", {}))
    return {"admissible": commands, "task": as_text(info.get("task", task), "task"),
            "category": as_action(category), "won": won, "score": score,
            **({"metrics": metrics} if metrics else {})}


def parts_of(answer, method, names):
    """What a method returned, after checking that it has as many parts as there are names."""
    if not isinstance(answer, (tuple, list)) or len(answer) != len(names.split(", ")):
        raise ValueError(f"{method} must return ({names}), and returned {answer!r:.200}")
    return answer
