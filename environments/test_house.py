"""Tests of the house."""
import subprocess
import sys

import pytest

from environments.house import CATEGORIES, GOALS, House, Room, SIZES
from envs import default_workers, env_class, make_env, name_of, tasks
from runtime.checkpoint import ROOT
from runtime.testing import INFO, SENTENCES, obey, pattern_of, wander


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
    assert categories == set(GOALS) == set(CATEGORIES)


def test_splits_share_no_ids_and_no_rooms():
    env, rooms = make_env("house"), {}
    for split, size in SIZES.items():
        ids = tasks("house", split)
        assert ids == sorted(set(ids)) and len(ids) == size
        rooms[split] = set(ids)
        for task in ids:
            env.reset(task)
            rooms[split].add(content(env.room))
        assert len(rooms[split]) > 1.99 * size  # hardly a room twice
    assert len(set().union(*rooms.values())) == sum(map(len, rooms.values()))


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


@pytest.mark.parametrize("name", ["house", "environments.house:House", House])
def test_the_house_has_a_short_name_and_no_workers(name):
    assert env_class(name) is House and name_of(name) == "house" and default_workers(name) == 0


def test_environments_are_played_by_hand_and_import_no_torch():
    played = subprocess.run([sys.executable, "envs.py"], cwd=ROOT, input="\n" * 20, text=True,
                            capture_output=True, check=True)
    assert "Won: True, reward 10, score 1" in played.stdout
    code = """if True:
        import sys
        from environments import alfworld, frozen_lake, house, sql_agent, webshop
        assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("kind", ["Offset", "Told", "Graded"])
def test_offset_house_pays_by_the_kind_of_task_whatever_is_done(kind):
    """The offset is paid once, when an episode ends, whether it is won or cut off; where prompts
    tell it, each text stands for one offset."""
    env, told = make_env(f"environments.offset_house:{kind}", horizon=12), {}
    for task in tasks("house", "train")[:60]:
        obs, info = env.reset(task)
        commands = env.expert()
        offset = env.offsets[info["category"]]
        paid = [answer[1] for answer in obey(env, task, commands[:12])]
        assert sum(paid) == offset + 5 * (len(commands) <= 12)
        assert not any(paid[:-1]) and abs(sum(paid)) <= 10
        assert [answer[1] for answer in obey(env, task, ["look"] * 12)] == [0.0] * 11 + [offset]
        said = env.prompt_builder(*env.reset(task)).window_prompt().rpartition("\n\n")[2]
        told.setdefault(said, set()).add(offset)
    if kind != "Offset":
        assert all(len(offsets) == 1 and said.startswith("This task pays ")
                   for said, offsets in told.items())
        assert len(told) == len({*env.offsets.values()})
