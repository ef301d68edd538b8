"""Tests of the house, played through envs.House."""
import random
import re

import pytest

import envs
from envs import make_env, tasks
from simulators.house import GOALS, SIZES, Room

INFO = {"admissible": list, "task": str, "category": str, "won": bool, "score": float}
THING = r"[a-z]+ \d+"
SEEN = rf"(nothing|a {THING}(, a {THING})*(, and a {THING})?)"
VIEW = rf"(The {THING} is closed\.|(The {THING} is open\. In it|On the {THING}), you see {SEEN}\.)"
SENTENCES = {  # ALFWorld's commands, and how it answers them
    rf"go to {THING}": rf"You arrive at {THING}\. {VIEW}",
    rf"open {THING}": rf"You open the {THING}\. {VIEW}",
    rf"close {THING}": rf"You close the {THING}\.",
    rf"take {THING} from {THING}": rf"You pick up the {THING} from the {THING}\.",
    rf"move {THING} to {THING}": rf"You move the {THING} to the {THING}\.",
    rf"use {THING}": rf"You turn on the {THING}\.",
    rf"(clean|heat|cool) {THING} with {THING}":
        rf"You (clean|heat|cool) the {THING} using the {THING}\.",
    rf"examine {THING}": rf"({VIEW}|This is a (clean|(hot|cool|cold)( and clean)?) {THING}\.|"
                         rf"There's nothing special about {THING}\.)",
    "inventory": rf"You are (carrying: a {THING}|not carrying anything)\.",
    "help": r"(?s).*go to.*take.*",
    "look": rf"You are facing the {THING}\. Next to it, you see nothing\.|You are in the middle of "
            rf"a room\. Looking quickly around you, you see {SEEN}\."}


def pattern_of(command, answer):
    """The pattern a command follows. Fails if there is none, or if the answer is not ALFWorld's."""
    pattern = next((p for p in SENTENCES if re.fullmatch(p, command)), None)
    assert pattern and re.fullmatch(SENTENCES[pattern], answer[0].strip()), (command, answer[0])
    return pattern


def obey(env, task, commands):
    env.reset(task)
    return [env.step(c) for c in commands]


def wander(env, task, seed, steps=10 ** 6):
    """Random admissible commands until the game or `steps` end -> [(command, answer)]."""
    rng, out, (_, info) = random.Random(f"{seed} {task}"), [], env.reset(task)
    while len(out) < steps:
        command = rng.choice(info["admissible"])
        out.append((command, env.step(command)))
        _, _, terminated, truncated, info = out[-1][1]
        if terminated or truncated:
            break
    return out


def content(room):
    things = tuple((p, *sorted(room.contents[p])) for p in room.places)
    return room.task, room.lamp_at, things


HOUSES = [{}, dict(places=20, objects=20, horizon=50), dict(places=40, horizon=50)]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("options", HOUSES, ids=["small", "large", "wide"])
def test_expert_wins_every_house_and_only_the_last_step_is_rewarded(split, options):
    env, categories = make_env("house", **options), set()
    for task in tasks("house", split)[:150]:
        obs, info = env.reset(task)
        assert obs.endswith(f"\n\nYour task is to: {info['task']}")
        answers = obey(env, task, env.expert())
        outcomes = [(0.0, False, False)] * (len(answers) - 1) + [(10.0, True, False)]
        assert [a[1:4] for a in answers] == outcomes, task
        won = [(a[4]["won"], a[4]["score"]) for a in answers]
        assert won == [(a[2], float(a[2])) for a in answers]
        assert len(answers) <= env.horizon and env.expert() is None
        assert [type(x) for x in answers[-1]] == [str, float, bool, bool, dict]  # Gymnasium's order
        assert all({k: type(v) for k, v in i.items()} == INFO for i in (info, answers[-1][4]))
        categories.add(info["category"])
    assert categories == set(GOALS) == set(envs.CATEGORIES)


def test_train_and_test_split_share_no_ids_and_no_rooms():
    env, rooms = make_env("house"), {}
    for split, size in SIZES.items():
        ids = tasks("house", split)
        assert ids == sorted(set(ids)) and len(ids) == size
        rooms[split] = set(ids)
        for task in ids:
            env.reset(task)
            rooms[split].add(content(env.room))
        assert len(rooms[split]) > 1.99 * size  # hardly a room twice
    assert not rooms["train"] & rooms["test"]


def test_inadmissible_actions_change_nothing():
    env = make_env("house")
    env.reset("00003")
    before = content(env.room), env.info()
    for action in ("", " ", "eat the moon", "x" * 10 ** 6, "\u53bb\u51b0\u7bb1 \ud800 \0", "go to",
                   "take", "LOOK", "look\n", "open fridge 99"):
        assert env.step(action) == ("Nothing happens.", 0.0, False, False, before[1]), action
    assert (content(env.room), env.info()) == before


def test_truncated_exactly_at_the_horizon_unless_the_last_step_wins():
    answers = obey(make_env("house", horizon=7), "00003", ["look"] * 7)
    assert [a[2:4] for a in answers] == [(False, False)] * 6 + [(False, True)]
    env = make_env("house")
    env.reset("00003")
    plan = env.expert()
    answers = obey(make_env("house", horizon=len(plan)), "00003", plan)
    assert answers[-1][1:4] == (10.0, True, False)
    answers = obey(make_env("house", horizon=len(plan) - 1), "00003", plan[:-1])
    assert answers[-1][1:4] == (0.0, False, True)


def test_house_has_the_commands_and_sentences_of_alfworld():
    env, used = make_env("house", places=9, objects=20, horizon=60), set()
    for task in tasks("house", "train")[:60]:
        env.reset(task)
        plan = env.expert()
        played = [*zip(plan, obey(env, task, plan)), *wander(env, task, 2)]
        used |= {pattern_of(*command_and_answer) for command_and_answer in played}
    assert used == set(SENTENCES)


def test_house_that_is_too_small_is_refused():
    for size in ({"places": 4}, {"objects": 1}):
        with pytest.raises(ValueError, match="it needs 5 and 2 or more"):
            make_env("house", **size)


def test_heating_undoes_cooling():
    room = Room()
    room.enter("00003")
    room.holding = "mug 1"
    for room.at, verb, state in (("fridge 1", "cool", "cold"), ("microwave 1", "heat", "hot"),
                                 ("sinkbasin 1", "clean", "hot and clean"),
                                 ("fridge 1", "cool", "cool and clean")):
        room.execute(f"{verb} mug 1 with {room.at}")
        assert room.execute("examine mug 1") == f"This is a {state} mug 1."
