"""A frozen lake, of which a player sees the squares beside it: an environment of one's own.

    python tools/imitate.py --env tools.frozen_lake:FrozenLake --out runs/lake
    python train.py --env tools.frozen_lake:FrozenLake --model runs/lake

By the first command a tiny model learns the words, by the second how to cross other lakes.
"""
import random

import envs

WAYS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


def beside(square):
    return {way: (square[0] + a, square[1] + b) for way, (a, b) in WAYS.items()}


class FrozenLake(envs.Env):
    role = "You stand on a frozen lake. Name the way to go."
    horizon, held_out = 20, ("test", 200)

    def tasks(self, split):
        return [n for n in range(5000) if (n % 5 == 0) == (split == "test")]

    def reset(self, task):
        rng = random.Random(task)  # a task's number draws its lake
        squares = [(row, column) for row in range(6) for column in range(6)]
        self.at, self.turn, self.far = None, 0, {}
        while not 5 <= self.far.get(self.at, 0) <= 10:  # draws another lake
            self.at, self.goal, *holes = rng.sample(squares, 15)
            self.far, ice = {self.goal: 0}, [self.goal]  # steps to the goal
            for square in ice:
                for there in {*beside(square).values()} & {*squares} - {*holes, *self.far}:
                    self.far[there] = self.far[square] + 1
                    ice.append(there)
        return f"Your task is to: reach the goal. {self.view()}", self.info()

    def view(self):
        ice = [way for way, there in beside(self.at).items() if there in self.far]
        down, right = self.goal[0] - self.at[0], self.goal[1] - self.at[1]
        offset = {way: a * down + b * right for way, (a, b) in WAYS.items()}
        goal = [f"{steps} {way}" for way, steps in offset.items() if steps > 0]
        return f"Ice: {', '.join(ice)}. Goal: {', '.join(goal)}."

    def info(self):
        return {"admissible": [*WAYS], "task": "reach the goal.", "category": "lake",
                "won": self.at == self.goal, "score": float(self.at == self.goal)}

    def step(self, action):
        self.turn += 1
        self.at = beside(self.at).get(action, self.at)
        info = self.info()
        over = info["won"] or self.at not in self.far
        late = self.turn == self.horizon and not over
        return self.view(), envs.REWARD * info["won"], over, late, info

    def advice(self, forgetful=False):
        """The shortest way; forgetful, it goes straight on as if all were ice."""
        cost = {way: sum(abs(a - b) for a, b in zip(there, self.goal)) if forgetful
               else self.far.get(there, 99) for way, there in beside(self.at).items()}
        return "look", min(cost, key=cost.get)  # a thought, which may be any, and a command
