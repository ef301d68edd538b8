"""Tests of TextArena's games, which are skipped where that package is not installed."""
import random

import pytest

import envs
from envs import Pool, tasks
from rollout import Sampler, rollout
from runtime.testing import on_the_cpu, random_lm

textarena = pytest.importorskip("textarena")

WAYS = ["[up]", "down", "[Left]", "right"]
MOVES = {  # a random move of each game
    "Sokoban": lambda rng: rng.choice(WAYS), "FrozenLake": lambda rng: rng.choice(WAYS),
    "Game2048": lambda rng: rng.choice(WAYS),
    "Minesweeper": lambda rng: f"[{rng.randrange(5)} {rng.randrange(5)}]",
    "TowerOfHanoi": lambda rng: "[{} {}]".format(*rng.sample("ABC", 2)),
    "Mastermind": lambda rng: "{} {} {} {}".format(*rng.sample(range(1, 7), 4))}
NONSENSE = ["", "pass", "[", "[9 9]", "] [x", "[1 2 3]", "\u221a", f"[{'9' * 5000} 1]"]


def move(name, task, turn):
    rng = random.Random(f"{name} {task} {turn}")
    return rng.choice(NONSENSE) if rng.random() < 0.05 else MOVES[name](rng)


def played_by_the_package(name, task):
    """-> [(texts, done, reward)] of one game, driven directly, with no other beside it."""
    env = envs.env_class(f"environments.textarena:{name}")
    game = textarena.wrappers.ActionFormattingWrapper(textarena.make(f"{env.game_id}-raw"))
    game.reset(num_players=1, seed=task)
    texts = lambda: [text for _, text, kind in game.get_observation()[1]
                     if kind.name != "PLAYER_ACTION"]
    turns = [(texts(), False, 0.0)]
    while not turns[-1][1]:
        done, _ = game.step(move(name, task, len(turns))[:1000])
        turns.append((texts(), done, 0.0))
    rewards, info = game.close()
    turns[-1] = turns[-1][0] + [info[0]["reason"]], True, rewards[0]
    return turns


@pytest.mark.parametrize("name", MOVES)
def test_games_are_those_of_the_package_also_side_by_side(name):
    """Twenty games of each kind, step by step. The generators that others use go on as if there
    were none."""
    pool = Pool(f"environments.textarena:{name}")
    ids = [*tasks(pool.env, "train")[:14], *tasks(pool.env, "test")[:6]]
    expected = {task: played_by_the_package(name, task) for task in ids}
    random.seed(5)
    before = random.getstate()
    for task in ids:
        pool.start(task, task)
    got = {task: [(obs, False, 0.0)] for task, (obs, info) in zip(ids, pool.gather(ids))}
    turn, live = 0, ids
    while live:
        turn += 1
        for task in live:
            pool.step(task, move(name, task, turn))
        for task, (obs, reward, terminated, truncated, info) in zip(live, pool.gather(live)):
            assert not truncated and info["won"] == (reward >= 1) and info["score"] == reward
            got[task].append((obs, terminated, reward))
        live = [task for task in live if task in pool.games]
    assert random.getstate() == before
    for task in ids:
        assert got[task] == [("\n\n".join(texts), *rest) for texts, *rest in expected[task]]
    assert name == "TowerOfHanoi" or len({turns[0][0] for turns in got.values()}) > 1 or (
        name in ("Minesweeper", "Mastermind"))  # which begin with nothing known


def test_splits_share_no_seed_and_games_can_be_played_by_a_model():
    lm = random_lm("qwen2", 1)
    for name in MOVES:
        env = envs.env_class(f"environments.textarena:{name}")
        train, test, validation = (tasks(env, s) for s in ("train", "test", "validation"))
        assert len({*train, *test, *validation}) == len(train) + len(test) + len(validation)
        assert len(test) >= env.held_out[1] and len(validation) >= env.validation[1]
        sampler = Sampler(lm, context=env.context, max_new_tokens=9, max_prompt=env.max_prompt)
        turns = rollout(sampler, train[:2], Pool(env, {"horizon": 3}))
        assert {turn.traj for turn in turns} == {0, 1}
        later = [turn for turn in turns if turn.turn == 1]
        assert all("Your task is to" not in turn.messages[0]["content"] for turn in later)
