"""Tests of TextWorld's shortcuts. Most need the alfworld package, and play a small game written
from the files it carries; some need ALFWORLD_DATA, the folder of the real games. Both kinds are
skipped, visibly, if what they need is missing."""
import gc
import importlib.util
import json
import os
import random
import sys

import pytest

from worlds.textworld import (
    Engine, alfworld_root, forget_facts, game_folders, hurried, shortcuts)

needs_package = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None,
                                   reason="needs the package: pip install alfworld")
needs_games = pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="needs ALFWORLD_DATA, the folder that alfworld-download fills")
PROBLEM = """(define (problem p) (:domain alfred)
 (:objects agent1 - agent MugType - otype DeskType BedType - rtype
   loc_bar_0 loc_bar_1 loc_bar_2 - location
   Mug_bar_1 - object Desk_bar_1 Bed_bar_1 - receptacle)
 (:init (atLocation agent1 loc_bar_0) (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1)
   (inReceptacle Mug_bar_1 Bed_bar_1)
   (receptacleType Desk_bar_1 DeskType) (receptacleType Bed_bar_1 BedType)
   (canContain DeskType MugType) (canContain BedType MugType)
   (receptacleAtLocation Bed_bar_1 loc_bar_1) (receptacleAtLocation Desk_bar_1 loc_bar_2)
   (objectAtLocation Mug_bar_1 loc_bar_1))
 (:goal (and (exists (?r - receptacle) (exists (?o - object)
   (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DeskType)))))))"""
TRIAL = "valid_seen/pick_and_place_simple-Mug-None-Desk-1/trial_T1"


@pytest.fixture
def small_game(tmp_path, monkeypatch):
    """A data folder with one game, written from the domain and the grammar the package carries."""
    # With the variable unset or empty, the package would make a folder of its own.
    monkeypatch.setenv("ALFWORLD_DATA", os.environ.get("ALFWORLD_DATA") or str(tmp_path))
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    with open(ALFRED_PDDL_PATH) as domain, open(ALFRED_TWL2_PATH) as grammar:
        game = {"pddl_domain": domain.read(), "pddl_problem": PROBLEM, "solvable": True,
                "grammar": grammar.read().replace("UNKNOWN GOAL", "put a mug in desk"),
                "walkthrough": ["go to bed 1", "take mug 1 from bed 1", "go to desk 1",
                                "move mug 1 to desk 1"]}
    folder = tmp_path / "json_2.1.1" / TRIAL
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    return str(tmp_path)


def answer_of(state):
    return state.feedback, list(state.admissible_commands), bool(state.won)


def by_textworld(path, commands):
    """What TextWorld itself answers, asked directly."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    wanted = textworld.EnvInfos(won=True, admissible_commands=True)
    game = textworld.start(path, wanted, wrappers=[AlfredDemangler])
    states = [game.reset()] + [game.step(command)[0] for command in commands]
    return [answer_of(state) for state in states]


def check_shortcuts(engine, root, task, seed, steps):
    """Random play, a quarter of it illegal, then the walkthrough of the game from its start: what
    is answered is TextWorld's own answer, byte for byte."""
    rng, commands = random.Random(f"{seed} {task}"), []
    state, plan = engine.load(root, task)
    said = [answer_of(state)]
    while len(commands) < steps + len(plan) and not said[-1][2]:
        n = len(commands) - steps
        if n < 0:
            command = rng.choice(said[-1][1])
            if rng.random() < 0.25:
                command = rng.choice(["eat the moon", "", "LOOK", f" {command}  ", "go to bed 99",
                                      command + " \u53bb"])
        else:
            command = plan[n]
        commands.append(command)
        said.append(answer_of(engine.step(command.strip())))  # TextWorld strips, as envs does
    assert said == by_textworld(os.path.join(root, task, "game.tw-pddl"), commands)


@needs_package
def test_facts_of_games_gone_by_are_forgotten_and_nobody_notices(small_game):
    if not shortcuts():
        pytest.skip("for TextWorld 1.7.0 alone")
    from mementos.core import _memento_cache as facts
    engine, root = Engine(), os.path.join(small_game, "json_2.1.1")
    _, plan = engine.load(root, TRIAL)
    undisturbed = [answer_of(engine.step(command)) for command in plan]
    first = len(facts)
    engine.load(root, TRIAL)
    assert 0 < first == len(facts)  # few enough are kept
    answers = [answer_of(engine.step(command)) for command in plan[:2]]
    forget_facts(most=first - 1)  # in the middle of a game, as if its worker loaded another
    assert len(facts) == 0
    assert answers + [answer_of(engine.step(command)) for command in plan[2:]] == undisturbed


@needs_package
def test_textworld_answers_the_same_with_shortcuts_and_is_left_as_it_was(small_game):
    engine, root, argv = Engine(), os.path.join(small_game, "json_2.1.1"), sys.argv
    engine.load(root, TRIAL)
    assert sys.argv is argv
    from textworld.envs.pddl import logic, textgen

    def replaced():
        return textgen.deepcopy, logic.PddlState, textgen._parse_and_convert
    before = replaced()
    for seed in range(3):
        check_shortcuts(engine, root, TRIAL, seed, 60)
    assert shortcuts() and replaced() == before and gc.isenabled()
    with pytest.raises(ZeroDivisionError), hurried():
        assert textgen.deepcopy is not before[0] and not gc.isenabled()
        1 / 0
    assert textgen.deepcopy is before[0] and gc.isenabled()


@needs_package
def test_another_textworld_is_not_touched(small_game, monkeypatch):
    import textworld.version
    from textworld.envs.pddl import textgen
    monkeypatch.setattr(textworld.version, "__version__", "1.8.0")
    shortcuts.cache_clear()
    try:
        before = textgen.deepcopy
        with hurried():
            assert textgen.deepcopy is before and shortcuts() == []
        check_shortcuts(Engine(), os.path.join(small_game, "json_2.1.1"), TRIAL, 0, 10)
    finally:
        shortcuts.cache_clear()


@needs_games
@needs_package
@pytest.mark.parametrize("number", [7, 1234])
def test_real_games_answer_the_same_with_shortcuts(number):
    engine, root = Engine(), alfworld_root()
    tasks = [game_folders(root, "train")[number], game_folders(root, "valid_unseen")[number % 134]]
    for task in tasks:  # the second time the engine is a used one
        check_shortcuts(engine, root, task, number, 25)
