"""House with something added to the return that depends on the kind of task alone, not on the
actions: a case in which policy gradients need a baseline. Winning is worth 5, and however an
episode ends, 5 is added or subtracted, by the kind of task. So the mean of a batch is a bad
baseline, the mean of a group of rollouts of one task is a good one, and V must learn to be one from
one rollout of each task.

    Offset    only the kind of task, which the first words of a prompt state, tells the offset
    Told      the prompt's last words tell it, where V is read (in --context window)
    Graded    the same, with six offsets from -5 to 5

    python tools/imitate.py --env environments.offset_house:Told --steps 1200 --out runs/told
    python train.py --env environments.offset_house:Told --model runs/told
"""
from environments.house import GOALS, House, HouseholdPrompts


class Offset(House):
    offsets = dict(zip(GOALS, (5, -5, 5, -5, 5, -5)))  # by category, in units of return

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        reward /= 2
        if terminated or truncated:
            reward += self.offsets[info["category"]]
        return obs, reward, terminated, truncated, info


class ToldPrompts(HouseholdPrompts):
    def window_prompt(self, k=2):
        pays = self.words[self.info["category"]]
        return f"{super().window_prompt(k)}\n\nThis task pays {pays}."

    words = {name: "gold" if offset > 0 else "lead" for name, offset in Offset.offsets.items()}


class Told(Offset):
    prompt_builder_class = ToldPrompts


class GradedPrompts(ToldPrompts):
    words = dict(zip(GOALS, ("gold", "silver", "copper", "iron", "tin", "lead")))


class Graded(Told):
    offsets = dict(zip(GOALS, (5, 3, 1, -1, -3, -5)))
    prompt_builder_class = GradedPrompts
