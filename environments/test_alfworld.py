"""Tests of ALFWorld and of TextWorld's shortcuts, on a small game written from the files that the
alfworld package carries, and on real games. Where the package or the games are missing they are
skipped, visibly."""
import gc
import os
import random
import sys

import pytest

import train
from environments.alfworld import Engine, alfworld_root, game_folders, patched_textworld, shortcuts
from environments.house import CATEGORIES
from envs import make_env, tasks
from runtime.testing import (INFO, TRIAL, check_run, needs_package, obey, on_the_cpu, pattern_of,
                             run_main, small_game, wander)

needs_games = pytest.mark.skipif(not os.environ.get("ALFWORLD_DATA"),
                                 reason="needs ALFWORLD_DATA, which alfworld-download fills")
needs_original = pytest.mark.skipif(sys.version_info >= (3, 13),
                                    reason="TextWorld without shortcuts fails on Python 3.13")


def test_data_is_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "games/json_2.1.1").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", "~/games")
    for data in None, "~/games":
        assert alfworld_root(data) == f"{tmp_path}/games/json_2.1.1"


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


def check_alfworld(env, task):
    """The protocol, the expert and illegal actions in one game of the real engine."""
    obs, info = env.reset(task)
    assert {k: type(v) for k, v in info.items()} == INFO
    assert f"/{info['category']}-" in task and info["category"] in CATEGORIES
    assert obs.strip().endswith(f"Your task is to: {info['task']}")
    assert 0 < len(env.expert()) <= env.horizon
    for left in range(len(env.expert()), 0, -1):
        command = env.expert()[0]
        assert len(env.expert()) == left and command in info["admissible"]
        *answer, info = env.step(command)
        assert pattern_of(command, answer)
        assert answer[1:] == [10.0 if left == 1 else 0.0, left == 1, False]
        assert (info["won"], info["score"]) == (left == 1, float(left == 1))
    assert env.expert() is None and env.step("look")[1:3] == (0.0, True)  # it is won once
    env.reset(task)
    plan = env.expert()
    for action in ("look", "inventory", "help"):
        env.step(action)
    for action in ("eat the moon", "", "x" * 5000, "\u53bb", "go to bed 99"):
        assert env.step(action)[:3] == ("Nothing happens.", 0.0, False) and env.expert() == plan


@needs_package
def test_a_small_game_in_the_real_engine(small_game):
    assert tasks("alfworld", "valid_seen", data=small_game) == [TRIAL]
    env = make_env("alfworld", data=small_game, horizon=4)  # just enough for the expert
    check_alfworld(env, TRIAL)
    assert [a[3] for a in obey(env, TRIAL, ["look"] * 4)] == [False] * 3 + [True]
    env.reset(TRIAL)
    again = env.expert() + ["take mug 1 from desk 1", "move mug 1 to desk 1"]
    won_once = [(10.0, True), (0.0, True), (0.0, True)]
    assert [env.step(command)[1:3] for command in again][3:] == won_once
    env.horizon = 40  # long enough to see that the house's sentences hold here
    assert len({pattern_of(*played) for seed in (0, 1) for played in wander(env, TRIAL, seed)}) > 5
    with pytest.raises(ValueError, match="no game .*trial_T2"):
        env.reset(TRIAL[:-1] + "2")


@needs_games
def test_training_on_real_alfworld_games(tmp_path, monkeypatch):
    pytest.importorskip("alfworld")
    run_main(train, monkeypatch, "--env", "alfworld", "--model", "tiny", "--iterations", 2,
             "--batch_size", 1, "--horizon", 3, "--eval_games", 1, "--save_every", 1,
             "--max_new_tokens", 8, "--out", tmp_path)
    lines = check_run(tmp_path)
    assert lines[0]["turns"] == 3 and lines[0]["time_env"] > 0


def test_unknown_split_of_alfworld_is_named(tmp_path):
    with pytest.raises(ValueError, match="alfworld has no split 'dev'; known: train"):
        game_folders(str(tmp_path), "dev")
    with pytest.raises(FileNotFoundError, match="no games"):
        game_folders(str(tmp_path), "train")
