"""Games of TextArena (pip install textarena==0.7.4) for one player, as they are in that package:
its texts, its rewards, and its ends.

    python envs.py --env environments.textarena:Sokoban
    python train.py --env environments.textarena:Sokoban --model Qwen2.5-1.5B-Instruct

For another game or size, write a class like those at the end: game_id is the package's name for it.
Some, such as Wordle, download word lists.
"""
import contextlib
import random

import numpy as np

import envs


class Prompts(envs.PromptBuilder):
    later = envs.LATER.replace(" Your task is to: ", "\n")  # the game's rules follow


class TextArena(envs.Env):
    """A game that cannot be asynchronous, because it exchanges the state of this process's random
    generators during a step. Its whole reward, from 0 to 1, comes with its end: 1 if it is won,
    or else how much of it was done. A task is a seed. Sokoban tries some seeds from there on,
    hence the gap between the splits."""

    game_id = None
    role = "You play a game, one move at a time."
    prompt_builder_class = Prompts
    recommended = {"r_max": 1.0}
    graded = True
    validation = ("validation", 100)
    # Below, `horizon` cuts off no game: it is above twice the game's own limit of turns, for which
    # a mistake does not count, unless two come in a row, which end the game

    def __init__(self):
        try:
            import textarena  # here, because the package is optional
        except ImportError as error:
            raise ValueError("TextArena's games need the package: pip install textarena==0.7.4"
                             ) from error
        self.textarena = textarena

    def tasks(self, split):
        return {"train": range(10_000), "test": range(100_000, 101_000),
                "validation": range(200_000, 201_000)}.get(split, ())

    def reset(self, task):
        # without what shows the past: our prompts do
        game = self.textarena.make(f"{self.game_id}-raw")
        self.game = self.textarena.wrappers.ActionFormattingWrapper(game)  # adds missing [ ]
        self.random_state = random.getstate(), np.random.get_state()
        with self.own_random_numbers():
            self.game.reset(num_players=1, seed=task)
        rules, *board = self.new_messages()
        return "\n\n".join([rules, *board]), {"task": rules}

    def step(self, action):
        with self.own_random_numbers():
            done, _ = self.game.step(action[:1000])  # int() fails with thousands of digits
        messages, reward = self.new_messages(), 0.0
        if done:
            rewards, about = self.game.close()
            reward = float(rewards[0])
            messages.append(about[0]["reason"])
        info = {"won": reward >= 1, "score": min(1.0, max(0.0, reward))}
        return "\n\n".join(messages), reward, done, False, info

    def new_messages(self):
        """The texts of the game since the last call, without the player's own."""
        _, observations = self.game.get_observation()
        own = self.textarena.ObservationType.PLAYER_ACTION
        return [text for _, text, kind in observations if kind != own]

    @contextlib.contextmanager
    def own_random_numbers(self):
        """Within this context, the generators of random and numpy, which the package uses, are in
        the state in which this game left them; it is played side by side with others."""
        others = random.getstate(), np.random.get_state()
        random.setstate(self.random_state[0])
        np.random.set_state(self.random_state[1])
        try:
            yield
        finally:
            self.random_state = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


class Sokoban(TextArena):
    game_id, horizon = "Sokoban-v0", 62


class FrozenLake(TextArena):  # 5 x 5 squares: of those with 4 x 4, training would see all
    game_id, horizon = "FrozenLake-v0-hardcore", 202


class Game2048(TextArena):  # up to a tile of 64
    game_id, horizon = "2048-v0-mega-easy", 520


class Minesweeper(TextArena):  # 5 x 5 cells
    game_id, horizon = "Minesweeper-v0-small", 52


class TowerOfHanoi(TextArena):  # one puzzle, whatever the seed
    game_id, horizon = "TowerOfHanoi-v0", 32


class Mastermind(TextArena):
    game_id, horizon = "Mastermind-v0", 44
    context = "full"  # all guesses count, not the last two alone
