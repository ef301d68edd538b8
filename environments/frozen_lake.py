"""An example of your own environment: a frozen lake, of which the agent sees the squares beside it.

    python tools/imitate.py --env environments.frozen_lake:FrozenLake --out runs/lake \\
        --steps 400 --until_success 1
    python train.py --env environments.frozen_lake:FrozenLake --model runs/lake --mini_batch 48

The first command teaches a tiny model the commands, the second how to cross lakes it has not seen.
"""
import random

import envs

WAYS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


def neighbours(square):
    return {way: (square[0] + down, square[1] + right) for way, (down, right) in WAYS.items()}


class FrozenLake(envs.Env):
    role = "You stand on a frozen lake. Name the way to go."
    horizon, held_out, validation = 20, ("test", 200), ("validation", 100)

    def tasks(self, split):
        if split == "validation":
            return range(5000, 6000, 5)
        return [n for n in range(5000) if (n % 5 == 0) == (split == "test")]

    def reset(self, task):
        rng = random.Random(task)  # the task's number determines its lake
        squares = [(row, column) for row in range(6) for column in range(6)]
        self.at, self.distance = None, {}  # distance to the goal, of squares of ice
        while not 5 <= self.distance.get(self.at, 0) <= 10:  # otherwise another lake
            self.at, self.goal, *holes = rng.sample(squares, 15)
            self.distance, reached = {self.goal: 0}, [self.goal]
            for square in reached:  # breadth-first search from the goal
                ice = {*squares} - {*holes, *self.distance}
                for neighbour in {*neighbours(square).values()} & ice:
                    self.distance[neighbour] = self.distance[square] + 1
                    reached.append(neighbour)
        info = {"admissible": [*WAYS], "task": "reach the goal."}
        return f"Your task is to: reach the goal. {self.observation()}", info

    def observation(self):
        ice = [way for way, there in neighbours(self.at).items() if there in self.distance]
        down, right = self.goal[0] - self.at[0], self.goal[1] - self.at[1]
        offset = {way: a * down + b * right for way, (a, b) in WAYS.items()}
        goal = [f"{steps} {way}" for way, steps in offset.items() if steps > 0]
        return f"Ice: {', '.join(ice)}. Goal: {', '.join(goal)}."

    def step(self, action):
        self.at = neighbours(self.at).get(action, self.at)
        won = self.at == self.goal
        terminated = won or self.at not in self.distance  # it fell into a hole
        return self.observation(), envs.REWARD * won, terminated, False, {"admissible": [*WAYS]}

    def advice(self, forgetful=False):
        """The demonstrator: a thought, and the first command of the shortest way. The forgetful one
        goes straight towards the goal, as if there were no holes."""
        if forgetful:
            cost = {way: abs(there[0] - self.goal[0]) + abs(there[1] - self.goal[1])
                    for way, there in neighbours(self.at).items()}
        else:
            cost = {way: self.distance.get(there, 99)
                    for way, there in neighbours(self.at).items()}
        return "look", min(cost, key=cost.get)
