"""The tests of the methods that SAPO is compared with: estimators against plain loops in float64,
learners by what they learn from."""
import dataclasses
import functools
import math
import random

import pytest
import torch

from baselines.estimators import (empg_advantages, gigpo_advantages, grpo_advantages,
                                  rloo_advantages, token_gae)
from baselines.learners import Critic
from model import make_batch
from rollout import Sampler, rollout
from runtime.testing import (CONTEXTS, SEEDS, a_case, advantages, close, near, on_the_cpu,
                             prepared, randn, random_lm, tensor, whitened)
from sapo import turn_targets
from training.settings import learner_class

# ------------------------------------------------------------------------------------ estimators

def random_groups(seed, tasks=7):
    """Tasks of 1 to 5 trajectories of 1 to 6 turns with rewards, odd numbers as ids, in any order
    -> [(traj, turn, group, state, reward)]."""
    rng, rows, traj = random.Random(seed), [], 100
    for group in range(tasks):
        for _ in range(rng.randrange(1, 6)):
            traj += rng.randrange(1, 9)
            turns, won = rng.randrange(1, 7), rng.choice([0, 0, 5.0, 10.0])
            rows += [(traj, t, 3 * group - 4, rng.randrange(4),
                      won * (t == turns - 1) + rng.choice([0, 0, 0.5])) for t in range(turns)]
    rng.shuffle(rows)
    return rows


def columns(rows):
    traj, turn, group, state, reward = zip(*rows)
    return *map(torch.tensor, (traj, turn, group, state)), tensor(reward)


def returns_by_loop(rows):
    total = {}
    for traj, _, _, _, reward in rows:
        total[traj] = total.get(traj, 0.0) + reward
    return total


def off_mean_by_loop(x, others, divide, eps=1e-6):
    mean, std = sum(others) / len(others), 0.0
    if len(others) > 1:
        std = math.sqrt(sum((y - mean) ** 2 for y in others) / (len(others) - 1))
    return (x - mean) / (std + eps) if divide else x - mean


def grpo_by_loop(rows, divide=True):
    total, task = returns_by_loop(rows), {r[0]: r[2] for r in rows}
    return [off_mean_by_loop(total[r[0]], [total[t] for t in total if task[t] == r[2]], divide)
            for r in rows]


def rloo_by_loop(rows):
    total, task, out = returns_by_loop(rows), {r[0]: r[2] for r in rows}, []
    for r in rows:
        rest = [total[t] for t in total if task[t] == r[2] and t != r[0]]
        out.append(total[r[0]] - sum(rest) / len(rest) if rest else 0.0)
    return out


def gigpo_by_loop(rows, gamma, weight, divide):
    def to_go(row):
        return sum(gamma ** (r[1] - row[1]) * r[4]
                   for r in rows if r[0] == row[0] and r[1] >= row[1])
    step = [off_mean_by_loop(to_go(r), [to_go(o) for o in rows if o[2:4] == r[2:4]], divide)
            for r in rows]
    return [a + weight * b for a, b in zip(grpo_by_loop(rows, divide), step)]


def empg_by_loop(adv, rows, entropy, k, k_f, zeta):
    low, high = min(entropy), max(entropy)
    h = {r[:2]: (e - low) / (high - low + 1e-8) for r, e in zip(rows, entropy)}
    mean = sum(math.exp(-k * x) for x in h.values()) / len(h)
    out = []
    for a, r in zip(adv, rows):
        after = h.get((r[0], r[1] + 1))
        bonus = 0 if after is None else zeta * math.exp(-k_f * after)
        out.append(a * math.exp(-k * h[r[:2]]) / (mean + 1e-8) + bonus)
    return [x - sum(out) / len(out) for x in out]


@pytest.mark.parametrize("seed", range(8))
def test_group_estimators_match_loops_in_any_order(seed):
    rows = random_groups(seed)
    traj, turn, group, state, reward = columns(rows)
    total = returns_by_loop(rows)
    score, rng = tensor([total[r[0]] for r in rows]), random.Random(seed)
    entropy = tensor([rng.random() for _ in rows])

    def estimates(at):  # of the turns `at`, in their order
        gigpo = functools.partial(gigpo_advantages, traj[at], turn[at], group[at], state[at],
                                  reward[at], gamma=0.9, weight=0.7)
        grpo = grpo_advantages(traj[at], group[at], score[at])
        return {"grpo": grpo, "rloo": rloo_advantages(traj[at], group[at], score[at]),
                "gigpo": gigpo(), "gigpo-nostd": gigpo(std=False),
                "empg": empg_advantages(grpo, traj[at], turn[at], entropy[at], k=0.8, k_f=1.3,
                                             zeta=0.2)}

    found = estimates(torch.arange(len(rows)))
    expected = {"grpo": grpo_by_loop(rows), "rloo": rloo_by_loop(rows),
                "gigpo": gigpo_by_loop(rows, 0.9, 0.7, True),
                "gigpo-nostd": gigpo_by_loop(rows, 0.9, 0.7, False)}
    expected["empg"] = empg_by_loop(expected["grpo"], rows, entropy.tolist(), 0.8, 1.3, 0.2)
    for name in found:
        close(found[name], tensor(expected[name]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for name, shuffled in estimates(order).items():
        close(shuffled, found[name][order])


def test_groups_of_one_or_of_equal_returns_have_zero_advantage():
    traj, turn = torch.tensor([5, 5, 9, 2, 3, 3]), torch.tensor([0, 1, 0, 0, 0, 1])
    group = torch.tensor([0, 0, 1, 2, 2, 2])
    score, reward = tensor([10, 10, 0, 0.3, 0.3, 0.3]), tensor([0, 10, 0, 0.3, 0, 0.3])
    for adv in (grpo_advantages(traj, group, score),
                grpo_advantages(traj, group, score, std=False),
                rloo_advantages(traj, group, score)):
        close(adv, tensor([0.0] * 6))  # groups of one, and equal returns
    alone = gigpo_advantages(traj, turn, group, torch.arange(6), reward)
    close(alone, tensor([0.0] * 6))
    same = gigpo_advantages(traj, turn, group, torch.zeros(6, dtype=torch.long), reward,
                                 gamma=0.5, std=False)
    # With one observation for all, discounted returns are compared: 5, 10; 0.3, 0.15, 0.3.
    close(same, tensor([-2.5, 2.5, 0, 0.05, -0.1, 0.05]))
    none, empty = torch.zeros(0, dtype=torch.long), tensor([])
    for adv in (grpo_advantages(none, none, empty), rloo_advantages(none, none, empty),
                empg_advantages(empty, none, none, empty),
                gigpo_advantages(none, none, none, none, empty)):
        assert adv.shape == (0,)
    flat = empg_advantages(tensor([1, -1]), torch.tensor([0, 1]), torch.tensor([0, 0]),
                                tensor([0.7, 0.7]))
    close(flat, tensor([1, -1]), atol=1e-7)  # equal entropies change nothing


@SEEDS
def test_token_gae_matches_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    value, score = randn(5, 9, generator=generator), randn(5, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.6
    mask[0], mask[1, 4] = False, True  # a row without a token gets nothing
    for gamma, lam in ((1.0, 1.0), (0.9, 0.7)):
        adv, target = token_gae(value, mask, score, gamma=gamma, lam=lam)
        for b in range(5):
            at = [t for t in range(9) if mask[b, t]]
            v = [value[b, t].item() for t in at] + [0.0]
            reward = [score[b].item() if i == len(at) - 1 else 0.0 for i in range(len(at))]
            delta = [reward[i] + gamma * v[i + 1] - v[i] for i in range(len(at))]
            expected = [0.0] * 9
            for i, t in enumerate(at):
                expected[t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
            close(adv[b], tensor(expected))
            close(target[b], torch.where(mask[b], value[b] + adv[b], 0.0))

# -------------------------------------------------------------------------------------- learners

@CONTEXTS
@pytest.mark.parametrize("algo", ["grpo", "rloo", "gigpo", "gigpo-nostd", "empg"])
def test_group_methods_use_the_estimators_advantages(tmp_path, algo, context):
    case = prepared(tmp_path, "--algo", algo, "--context", context, "--group_size", 3)
    turns = case.batch.turns
    rows = [(t.traj, t.turn, t.traj // 3, "ab".index(t.obs), t.reward) for t in turns]
    if algo.startswith("gigpo"):
        expected = gigpo_by_loop(rows, 0.95, 1.0, algo == "gigpo")
    else:
        expected = rloo_by_loop(rows) if algo == "rloo" else grpo_by_loop(rows)
    if algo == "empg":
        entropy = [case.of_turn(n, case.old.entropy).mean().item() for n in range(len(turns))]
        expected = empg_by_loop(expected, rows, entropy, 1.0, 1.0, 0.1)
    near(advantages(case), tensor(expected) - 0.1 * case.columns("invalid")[0])


@CONTEXTS
def test_ppo_whitens_gae_over_tokens_and_its_critic_regresses_on_the_return(tmp_path, context):
    case = prepared(tmp_path, "--algo", "ppo", "--context", context, "--critic_lr", 1e-3)
    targets, total = case.targets, returns_by_loop(
        [(t.traj, 0, 0, 0, t.reward) for t in case.batch.turns])
    values = torch.cat([case.learner.critic(m.batch) for mini in case.minibatches for m in mini])
    score = tensor([total[t.traj] - 0.1 * t.invalid for t in case.batch.turns]) / 10
    score = score[case.batch.turn_of_token]  # of each token, with gamma = lambda = 1
    assert values.any() and case.old.p_v.equal(values.detach())
    near(targets.y_v, score.float())
    near(targets.adv.double(), whitened(score - values))
    assert targets.returns.tolist() == [total[t.traj] for t in case.batch.turns]
    case.learner.optimizer_steps = 100  # the warm-up is over
    losses = [case.step()["loss_critic"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("algo", ["ppo", "ppo-turns"])
def test_critic_of_a_16_bit_model_learns(tmp_path, algo):
    lm = random_lm("qwen2", 1, dtype=torch.bfloat16)
    case = prepared(tmp_path, "--algo", algo, lm=lm)
    assert case.step()["loss_critic"] > 0


def test_critic_starts_at_zero():
    batch = make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    assert not Critic(random_lm("qwen2", 1))(batch).any()


def test_critic_has_its_own_learning_rate(tmp_path):
    case = prepared(tmp_path, *"--algo ppo --lr 1e-4 --critic_lr 1e-3 --lr_warmup 0".split())
    case.step()
    optimizers = case.learner.optimizer, case.learner.critic_optimizer
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [1e-4, 1e-3]


def test_group_of_different_tasks_is_refused():
    lm, ids, pool, config = a_case()
    learner = learner_class("grpo")(lm, dataclasses.replace(config, algo="grpo"))
    sampler = Sampler(lm, max_new_tokens=8)
    with pytest.raises(ValueError, match="group of 4 trajectories has different tasks"):
        learner.learn(rollout(sampler, ids[:4], pool), 0)
    assert "loss" in learner.learn(rollout(sampler, ids[:1] * 4, pool), 0)


@CONTEXTS
def test_v_comes_from_a_separate_critic(tmp_path, context):
    case = prepared(tmp_path, "--context", context, "--algo", "ppo-turns")
    targets, count = case.targets, len(case.batch.turns)
    values = torch.cat([case.learner.critic(m.batch) for mini in case.minibatches for m in mini])
    # before the response alone
    v = torch.stack([case.of_turn(n, values)[0] for n in range(count)]).detach()
    near(case.old.p_v, v)
    adv, y_v, _ = turn_targets(*case.columns("traj", "turn", "reward", "done"), 10 * v, 0 * v,
                               gamma=0.95, lam=0.95)
    near(advantages(case), whitened(adv.double() - 0.1 * case.columns("invalid")[0]))
    near(targets.y_v, y_v.float() / 10)
    near(targets.v, 10 * v)
    assert v.any()


def test_integer_returns_do_not_truncate_advantages():
    traj, group, score = torch.arange(4), torch.zeros(4), torch.tensor([1, 0, 1, 0])
    for estimate in (grpo_advantages, rloo_advantages):
        near(estimate(traj, group, score), estimate(traj, group, score.float()))
