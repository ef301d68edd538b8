"""Tests of TextWorld's shortcuts, on a small game written from the files that the alfworld package
carries, and on real games. Where the package or the games are missing they are skipped, visibly."""
import gc
import importlib.util
import json
import os
import random
import sys

import pytest

from simulators.textworld import Engine, alfworld_root, game_folders, patched_textworld, shortcuts

needs_package = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None,
                                   reason="needs the package: pip install alfworld")
needs_games = pytest.mark.skipif(not os.environ.get("ALFWORLD_DATA"),
                                 reason="needs ALFWORLD_DATA, which alfworld-download fills")
PROBLEM = """(define (problem p) (:domain alfred)
 (:objects agent1 - agent MugType - otype DeskType BedType - rtype Mug_bar_1 - object
   Desk_bar_1 Bed_bar_1 - receptacle loc_bar_0 loc_bar_1 loc_bar_2 - location)
 (:init (atLocation agent1 loc_bar_0) (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1)
   (inReceptacle Mug_bar_1 Bed_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
   (receptacleType Desk_bar_1 DeskType) (receptacleType Bed_bar_1 BedType)
   (canContain DeskType MugType) (canContain BedType MugType)
   (receptacleAtLocation Bed_bar_1 loc_bar_1) (receptacleAtLocation Desk_bar_1 loc_bar_2))
 (:goal (and (exists (?r - receptacle) (exists (?o - object)
   (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DeskType)))))))"""
needs_original = pytest.mark.skipif(sys.version_info >= (3, 13),
                                    reason="TextWorld without shortcuts fails on Python 3.13")
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


def check_shortcuts(engine, root, task, seed=0):
    """Random play, some of it illegal, then the walkthrough of the game from its start: what is
    answered is TextWorld's own answer, byte for byte."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    wanted = textworld.EnvInfos(won=True, admissible_commands=True)
    path = os.path.join(root, task, "game.tw-pddl")
    game, rng = textworld.start(path, wanted, wrappers=[AlfredDemangler]), random.Random(seed)
    state, plan = engine.load(root, task)
    assert answer_of(state) == answer_of(game.reset())
    for n in range(25 + len(plan)):
        odd = ["eat the moon", "", "LOOK", "go to bed 99", "look \u53bb"]
        command = rng.choice(list(state.admissible_commands) + odd) if n < 25 else plan[n - 25]
        state = engine.step(command)
        assert answer_of(state) == answer_of(game.step(command)[0])


@needs_original
@needs_package
def test_patched_textworld_gives_the_same_answers_and_is_restored(small_game, monkeypatch):
    import textworld.version
    from textworld.envs.pddl import textgen
    engine, root, before = Engine(), os.path.join(small_game, "json_2.1.1"), textgen.deepcopy
    for seed in range(3):
        check_shortcuts(engine, root, TRIAL, seed)
    with patched_textworld():
        assert textgen.deepcopy is not before and not gc.isenabled()
    assert textgen.deepcopy is before and gc.isenabled()
    monkeypatch.setattr(textworld.version, "__version__", "1.8.0")
    assert shortcuts.__wrapped__() == []  # another version is not touched


@needs_package
def test_loading_another_game_does_not_disturb_a_game(small_game):
    from mementos.core import _memento_cache as facts
    engine, root = Engine(), os.path.join(small_game, "json_2.1.1")
    _, plan = engine.load(root, TRIAL)
    of_one_game = len(facts)
    for command in plan:
        Engine().load(root, TRIAL)
        assert len(facts) == of_one_game  # those of games gone by are forgotten
        state = engine.step(command)
    assert state.won


@needs_original
@needs_games
@needs_package
def test_real_games_give_the_same_answers_when_patched():
    engine, root = Engine(), alfworld_root()
    for split in ("train", "valid_unseen"):  # the second time the engine is a used one
        check_shortcuts(engine, root, game_folders(root, split)[7])
