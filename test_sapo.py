"""The tests. No download, no GPU; what needs ALFWorld's games or WebShop's catalogue looks at ALFWORLD_DATA and WEBSHOP_DATA and is skipped,
visibly, where those are unset.

References are plain loops in float64 written from the paper. They share no helper with the code they check.
    python -m pytest -q
"""
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nothing waits for a network

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import envs
import eval as evaluation
import model as model_module
import rollout as rollout_module
import sapo
import train
from envs import Episode, Pool, demonstrate, kind, make_env, parse_action, tasks
from model import Critic, entropy, hub_id, load, make_batch, named_value_ids, readout_at_start, reserve_value_ids, restricted_log_softmax, value_readout
from rollout import Sampler, choose, make_samples, rollout
from sapo import kl_loss, normalize_advantages, policy_loss, sapo_loss, turn_targets, value_loss

HERE = os.path.dirname(os.path.abspath(__file__))

GPU = torch.cuda.is_available()


@pytest.fixture
def gpu():
    if not GPU:
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """On a machine with a GPU as well, in this process and in others; but for the tests that ask for `gpu`."""
    if "gpu" not in request.fixturenames:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


# Processes beside this one are forked from a server that has imported everything already.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["test_sapo"])


def one_rank(rank, size, meet, work, args):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    work(rank, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # or gloo's threads may outlive the interpreter, and abort


def on_ranks(work, size, meet, *args):
    """work(rank, *args) in `size` processes that know each other."""
    ranks = [SERVER.Process(target=one_rank, args=(rank, size, meet, work, args)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0] * size


# ---------------------------------------------------------------------------------------------------- the algorithm
# References, *_by_loop, are plain Python floats written from the paper; they share nothing with the code under test.

NAN, INF = float("nan"), float("inf")
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)
randn = functools.partial(torch.randn, dtype=torch.float64)
tensor = functools.partial(torch.tensor, dtype=torch.float64)


def grad(f, *xs):
    xs = [x.detach().clone().requires_grad_() for x in xs]
    return torch.autograd.grad(f(*xs), xs)


def clip_by_hand(x, low, high):
    return low if x < low else high if x > high else x


# Eq. 1-3
@SEEDS
def test_value_readout_is_the_clipped_logit_difference(seed):
    torch.manual_seed(seed)
    logits, tau = 3 * randn(4, 5, 9), 1.5
    readout = lambda z: value_readout(z, (7, 2), tau=tau)
    p = readout(logits)
    close(p, tensor([[clip_by_hand((z[7] - z[2]) / tau, -1.0, 1.0) for z in row] for row in logits.tolist()]))
    close(readout(logits + 10 * randn(4, 5, 1)), p)
    assert 0 < (p.abs() == 1).sum() < p.numel()
    slope = (p.abs() < 1).double()[..., None] / tau  # beyond tau the readout is flat
    close(grad(lambda z: readout(z).sum(), logits)[0], slope * tensor([0, 0, -1, 0, 0, 0, 0, 1, 0]))


@SEEDS
def test_policy_and_entropy_leave_out_the_two_words(seed):
    torch.manual_seed(seed)
    logits, ids, words, taken = 3 * randn(20, 9), (8, 3), [0, 1, 2, 4, 5, 6, 7], 5
    logp = restricted_log_softmax(logits, ids)
    d_logp, = grad(lambda z: restricted_log_softmax(z, ids)[:, taken].sum(), logits)
    d_entropy, = grad(lambda z: entropy(restricted_log_softmax(z, ids), ids).sum(), logits)
    for n, z in enumerate(logits.tolist()):
        prob = {w: math.exp(z[w]) / sum(math.exp(z[u]) for u in words) for w in words}
        h = -sum(p * math.log(p) for p in prob.values())
        close(logp[n, words], tensor([math.log(prob[w]) for w in words]))
        close(entropy(logp, ids)[n].item(), h)
        close(d_logp[n, words], tensor([(w == taken) - prob[w] for w in words]))
        close(d_entropy[n, words], tensor([-prob[w] * (math.log(prob[w]) + h) for w in words]))
    for nothing in (logp.exp(), d_logp, d_entropy):
        assert not nothing[:, ids].any()
    wild = logits.index_copy(1, torch.tensor(ids), tensor([[INF, 1e9]] * 20))
    assert torch.equal(restricted_log_softmax(wild, ids), logp)


def test_sixteen_bit_logits_give_a_float32_policy():
    for logits in (torch.linspace(-9, 9, 40).bfloat16(), torch.linspace(-9, 9, 40).half()):
        logp = restricted_log_softmax(logits, (1, 2))
        assert logp.dtype == torch.float32 and torch.equal(logp, restricted_log_softmax(logits.float(), (1, 2)))


# Eq. 4-6
def ragged(seed):  # random trajectories {(traj, turn): (reward, done, v, q)}: ids with gaps, turns from 0 or 1, done or cut
    rng, game = random.Random(seed), {}
    for traj in rng.sample(range(1000), 8):
        first, length = rng.choice([0, 1]), rng.choice([1, 2, 5, 9])
        for k in range(length):
            done = rng.random() < (0.5 if k == length - 1 else 0.1)
            game[traj, first + k] = (rng.gauss(0, 3), float(done), rng.gauss(0, 3), rng.gauss(0, 3))
    return game


def targets(game, keys, gamma, lam):  # -> (N, 3): adv, y_v, y_q of `keys`, in their order
    return torch.stack(turn_targets(*torch.tensor(keys).unbind(1), *tensor([game[k] for k in keys]).unbind(1), gamma=gamma, lam=lam), 1)


def targets_by_recursion(game, key, gamma, lam):
    (r, d, v, _), after = game[key], (key[0], key[1] + 1)
    known = after in game
    delta = r + gamma * (1 - d) * (game[after][2] if known else 0) - v
    adv = delta + gamma * lam * (1 - d) * (targets_by_recursion(game, after, gamma, lam)[0] if known else 0)
    return adv, v + adv, r + gamma * (1 - d) * (game[after][3] if known else 0)


@SEEDS
@pytest.mark.parametrize("gamma, lam", [(0.95, 0.9), (0.99, 0.0), (1.0, 1.0), (0.9, 1.0)])
def test_turn_targets_in_any_order_and_with_duplicates(seed, gamma, lam):
    game, rng = ragged(seed), random.Random(seed)
    ordered = list(game)
    shuffled = rng.sample(ordered, len(ordered))
    for keys in (ordered, shuffled, rng.choices(ordered, k=20) + shuffled + rng.choices(ordered, k=20)):
        close(targets(game, keys, gamma, lam), tensor([targets_by_recursion(game, k, gamma, lam) for k in keys]))


def test_turn_targets_by_hand():
    game = {(4, t): (float(t), float(t == 2), 10.0, 4.0) for t in range(3)}
    y = targets(game, list(game), 0.5, 1.0)  # with lambda 1 the target of V is the discounted return
    close(y[:, 1:], tensor([[0 + 0.5 + 0.5, 0 + 2], [1 + 1, 1 + 2], [2, 2]]))
    close(targets({(3, 1): (2.0, 0.0, 0.5, 7.0)}, [(3, 1)], 0.9, 0.9), tensor([[1.5, 2.0, 2.0]]))
    none = torch.zeros(0, dtype=torch.long)
    assert [x.shape for x in turn_targets(none, none, *torch.zeros(4, 0), gamma=0.9, lam=0.9)] == [(0,)] * 3


def test_turn_targets_refuses_gaps_and_shapes_and_passes_no_gradient():
    x = torch.ones(4, requires_grad=True)
    given = [torch.tensor([0, 0, 5, 5]), torch.tensor([0, 1, 1, 2]), x, x, x, x]
    assert not any(y.requires_grad for y in turn_targets(*given, gamma=0.9, lam=0.9))
    with pytest.raises(ValueError, match=r"missing in the middle of trajectories \[5\]"):
        turn_targets(given[0], torch.tensor([0, 1, 1, 3]), *given[2:], gamma=0.9, lam=0.9)
    for i in range(6):
        for wrong in (given[i][:3], given[i][:, None], given[i][0]):
            with pytest.raises(ValueError, match="one length"):
                turn_targets(*given[:i], wrong, *given[i + 1:], gamma=0.9, lam=0.9)


# Eq. 7
def random_advantages(seed, n):
    torch.manual_seed(seed)
    return 4 * randn(n) + 2, (torch.rand(n) < 0.3).double(), torch.rand(n) < 0.7


def advantages_by_loop(adv, invalid, c_inv, valid, eps):
    charged = [a - c_inv * m for a, m in zip(adv.tolist(), invalid.tolist())]
    kept = [a for a, ok in zip(charged, valid.tolist()) if ok]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((a - mean) ** 2 for a in kept) / len(kept))
    return tensor([(a - mean) / (std + eps) if ok else 0.0 for a, ok in zip(charged, valid.tolist())])


@SEEDS
def test_advantages_are_normalised_over_valid_turns(seed):
    adv, invalid, some = random_advantages(seed, 12)
    for eps in (1e-8, 0.5):
        got = normalize_advantages(torch.where(some, adv, NAN), invalid=invalid, c_inv=0.7, valid=some, eps=eps)
        close(got, advantages_by_loop(adv, invalid, 0.7, some, eps))
    close(normalize_advantages(adv), advantages_by_loop(adv, 0 * invalid, 0.0, some | True, 1e-8))


def test_advantages_without_spread_are_zero():
    for adv in (torch.full((7,), 0.1), torch.full((1,), 1e4), torch.zeros(0)):
        assert torch.equal(normalize_advantages(adv), torch.zeros_like(adv))
    assert torch.equal(normalize_advantages(torch.tensor([NAN, INF, 1]), valid=torch.zeros(3, dtype=torch.bool)), torch.zeros(3))


def normalize_shares(rank):
    for seed, (first, second) in enumerate([(5, 9), (6, 0), (0, 6), (1, 1), (0, 0)]):
        adv, invalid, some = random_advantages(seed, first + second)
        share = slice(first) if rank == 0 else slice(first, None)
        run = lambda where, group: normalize_advantages(adv[where], invalid=invalid[where], c_inv=0.7, valid=some[where], group=group)
        close(run(share, torch.distributed.group.WORLD), run(slice(None), None)[share])


def test_two_ranks_normalise_together_as_one_process_does(tmp_path):
    on_ranks(normalize_shares, 2, tmp_path / "meet")


# Eq. 8-12

TOKENS, TURNS = ("logp", "entropy", "logp_old", "logp_ref", "adv", "mask"), ("p_v", "p_q", "p_v_old", "p_q_old", "y_v", "y_q")


def minibatch(seed, b=5, t=7, n=8):  # random arguments of sapo_loss, spread wide enough that every clip acts
    torch.manual_seed(seed)
    logp = -randn(b, t).abs()
    tokens = (logp, randn(b, t).abs(), logp + 0.4 * randn(b, t), logp + 0.5 * randn(b, t), randn(b, t), torch.rand(b, t) < 0.7)
    return dict(zip(TOKENS, tokens)) | dict(zip(TURNS, randn(6, n) / 2))


def policy_by_loop(logp, logp_old, adv, clip):
    rho = [math.exp(new - old) for new, old in zip(logp.tolist(), logp_old.tolist())]
    return sum(-min(r * a, clip_by_hand(r, 1 - clip, 1 + clip) * a) for r, a in zip(rho, adv.tolist())) / len(rho)


def value_by_loop(p, p_old, y, clip):
    p_clip = [old + clip_by_hand(new - old, -clip, clip) for new, old in zip(p.tolist(), p_old.tolist())]
    return sum(max((a - c) ** 2, (b - c) ** 2) / 2 for a, b, c in zip(p.tolist(), p_clip, y.tolist())) / len(p)


def kl_by_loop(logp, logp_ref):
    log_r = [ref - new for new, ref in zip(logp.tolist(), logp_ref.tolist())]
    return sum(math.exp(x) - 1 - x for x in log_r) / len(log_r)


@SEEDS
@pytest.mark.parametrize("loss, by_loop, keys", [
    (lambda *xs, mask: policy_loss(*xs, mask, clip=0.2)[0], lambda *xs: policy_by_loop(*xs, 0.2), ("logp", "logp_old", "adv")),
    (lambda *xs, mask: value_loss(*xs, clip=0.2, valid=mask)[0], lambda *xs: value_by_loop(*xs, 0.2), ("p_v", "p_v_old", "y_v")),
    (lambda *xs, mask: kl_loss(*xs, mask), kl_by_loop, ("logp", "logp_ref"))], ids=["policy", "value", "kl"])
def test_each_loss_is_its_loop_and_never_looks_behind_the_mask(loss, by_loop, keys, seed):
    x = minibatch(seed)
    xs = [x[k] for k in keys]
    mask = x["mask"] if xs[0].dim() == 2 else torch.arange(8) % 3 != seed
    for some in (mask, mask | True):
        close(loss(*xs, mask=some).item(), by_loop(*(z[some] for z in xs)))
    slopes = grad(functools.partial(loss, mask=mask), *xs)
    for junk in (NAN, INF, -INF):
        soiled = [torch.where(mask, z, junk) for z in xs]
        close(loss(*soiled, mask=mask), loss(*xs, mask=mask))
        close(grad(functools.partial(loss, mask=mask), *soiled), slopes)
    nothing = functools.partial(loss, mask=mask & False)
    assert nothing(*xs) == 0 and not any(g.any() for g in grad(nothing, *xs))


@SEEDS
def test_on_policy_the_gradient_is_reinforce(seed):
    x = minibatch(seed)
    f = lambda logp: policy_loss(logp, x["logp"], x["adv"], x["mask"], clip=0.2, denom=17)
    close(grad(lambda logp: f(logp)[0], x["logp"])[0], -x["adv"] * x["mask"] / 17)
    assert f(x["logp"])[1] == {"ratio_max": 1, "clip_fraction": 0}


@pytest.mark.parametrize("ratio, adv, flows", [(1.5, 2.0, 0), (1.5, -2.0, 1), (0.5, -2.0, 0), (0.5, 2.0, 1), (1.1, 2.0, 1), (0.9, -2.0, 1)])
def test_beyond_the_clip_only_the_way_back_has_a_gradient(ratio, adv, flows):
    f = lambda z: policy_loss(z, torch.zeros_like(z), torch.full_like(z, adv), torch.ones_like(z), clip=0.2)
    logp = tensor([[math.log(ratio)]])
    close(grad(lambda z: f(z)[0], logp)[0], tensor([[-ratio * adv * flows]]))
    assert f(logp)[1]["clip_fraction"] == 1 - flows


@pytest.mark.parametrize("p, y, flows", [(0.5, 1.0, 0), (0.5, -1.0, 1), (-0.5, -1.0, 0), (-0.5, 1.0, 1), (0.1, 1.0, 1), (-1.0, 0.9, 1)])
def test_no_value_gradient_where_the_clipped_branch_wins(p, y, flows):
    f = lambda z: value_loss(z, torch.zeros_like(z), torch.full_like(z, y), clip=0.2)
    close(grad(lambda z: f(z)[0], tensor([p]))[0], tensor([(p - y) * flows]))
    assert f(tensor([p]))[1] == {"clip_fraction": 1 - flows, "saturated": abs(p) == 1}


@SEEDS
def test_kl_is_never_negative_and_pulls_toward_the_reference(seed):
    x = minibatch(seed)
    logp, ref, one = x["logp"].flatten(), x["logp_ref"].flatten(), torch.ones(1)
    assert min(kl_loss(a[None], b[None], one) for a, b in zip(logp, ref)) > 0 and kl_loss(logp, logp, logp < 1) == 0
    assert kl_loss(torch.tensor([-0.008999466896057129]), torch.tensor([-0.008991680108010769]), one) >= 0  # where exp(x) - 1 - x is -4e-8
    close(grad(lambda z: kl_loss(z, ref, ref < INF), logp)[0], (1 - (ref - logp).exp()) / len(ref))  # d(r - 1 - log r) = (1 - r) dlogp


@SEEDS
def test_the_joint_loss_is_the_weighted_sum(seed):
    x, valid = minibatch(seed), torch.arange(8) % 3 != seed
    for k in ("logp", "entropy", "p_v", "p_q"):
        x[k].requires_grad_()
    loss, info = sapo_loss(**x, valid=valid, clip=0.2, clip_v=0.3, clip_q=0.1, c_v=0.7, c_q=0.3, beta=0.2, c_h=0.1)
    on = {k: x[k][x["mask"] if k in TOKENS else valid] for k in x}
    parts = {"loss_policy": policy_by_loop(on["logp"], on["logp_old"], on["adv"], 0.2),
             "loss_v": value_by_loop(on["p_v"], on["p_v_old"], on["y_v"], 0.3),
             "loss_q": value_by_loop(on["p_q"], on["p_q_old"], on["y_q"], 0.1),
             "kl": kl_by_loop(on["logp"], on["logp_ref"]), "entropy": sum(on["entropy"].tolist()) / len(on["entropy"])}
    parts["loss"] = sum(weight * part for weight, part in zip((1, 0.7, 0.3, 0.2, -0.1), parts.values()))
    close({k: info[k].item() for k in parts} | {"returned": loss.item()}, parts | {"returned": parts["loss"]})
    close(sapo_loss(**x | {"logp_ref": None}, beta=0)[0], sapo_loss(**x, beta=0)[0])
    assert not any(number.requires_grad for number in info.values())


VIEWS = {"shuffle": [([3, 0, 4, 1, 2], [7, 2, 5, 0, 1, 6, 3, 4], 0)], "pad": [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], 3)],
         "duplicate": [([0, 1, 2, 3, 4] * 2, [0, 1, 2, 3, 4, 5, 6, 7] * 2, 0)],
         "split": [([0, 3], [1, 2, 4, 6, 7], 0), ([1], [], 2), ([2, 4], [0, 3, 5], 1), ([], [], 0)]}


@SEEDS
@pytest.mark.parametrize("view", VIEWS)
def test_shuffling_padding_duplicating_and_splitting_change_nothing(view, seed):
    x, times, now = minibatch(seed), 2 if view == "duplicate" else 1, TOKENS[:2] + TURNS[:2]

    def parts(*current):  # the losses and infos of all micro-batches; padding is NaN
        y = x | dict(zip(now, current))
        for rows, turns, pad in VIEWS[view]:
            tokens = {k: F.pad(y[k][rows], (0, pad), value=False if k == "mask" else NAN) for k in TOKENS}
            yield sapo_loss(**tokens, **{k: y[k][turns] for k in TURNS}, tokens=times * x["mask"].sum(), turns=times * 8)

    current = [x[k] for k in now]
    (losses, infos), (loss, info) = zip(*parts(*current)), sapo_loss(**x)
    close(sum(losses), loss)
    whole = grad(lambda *xs: sapo_loss(**x | dict(zip(now, xs)))[0], *current)
    close(grad(lambda *xs: sum(part for part, _ in parts(*xs)), *current), whole)
    added = {k: (max if k.endswith("_max") else sum)(float(i[k]) for i in infos) for k in info}
    assert added == pytest.approx({k: float(number) for k, number in info.items()}, abs=1e-6)


@SEEDS
def test_only_the_value_terms_reach_the_two_words(seed):
    x, ids, taken = minibatch(seed, n=5), [4, 9], torch.tensor([[0, 1, 2, 3, 5, 6, 7]] * 5)

    def reached(**options):  # (T, V): which logits have a gradient in any sequence
        def loss(z):
            logp = restricted_log_softmax(z, ids)
            current = {"logp": logp.gather(2, taken[..., None])[..., 0], "entropy": entropy(logp, ids),
                       "p_v": value_readout(z[:, 0], ids, tau=9.0), "p_q": value_readout(z[:, 6], ids, tau=9.0)}
            return sapo_loss(**x | current, **options)[0]
        return grad(loss, randn(5, 7, 10))[0].any(0)

    policy = reached(c_v=0, c_q=0)
    assert not policy[:, ids].any() and policy.sum() == 7 * 8
    x["adv"] = torch.zeros(5, 7)
    for options, column in (({"c_v": 1, "c_q": 0}, 0), ({"c_v": 0, "c_q": 1}, 6)):
        values = reached(**options, beta=0, c_h=0)
        assert values[column, ids].all() and values.sum() == 2


# -------------------------------------------------------------------------------------------------------- the baselines


def random_groups(seed, tasks=7):
    """Tasks of 1 to 5 trajectories of 1 to 6 turns with rewards, odd numbers as ids, in any order -> [(traj, turn, group, state, reward)]."""
    rng, rows, traj = random.Random(seed), [], 100
    for group in range(tasks):
        for _ in range(rng.randrange(1, 6)):
            traj += rng.randrange(1, 9)
            turns, won = rng.randrange(1, 7), rng.choice([0, 0, 5.0, 10.0])
            rows += [(traj, t, 3 * group - 4, rng.randrange(4), won * (t == turns - 1) + rng.choice([0, 0, 0.5])) for t in range(turns)]
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
    mean = sum(others) / len(others)
    std = math.sqrt(sum((y - mean) ** 2 for y in others) / (len(others) - 1)) if len(others) > 1 else 0.0
    return (x - mean) / (std + eps) if divide else x - mean


def grpo_by_loop(rows, divide=True):
    total, task = returns_by_loop(rows), {r[0]: r[2] for r in rows}
    return [off_mean_by_loop(total[r[0]], [total[t] for t in total if task[t] == r[2]], divide) for r in rows]


def rloo_by_loop(rows):
    total, task, out = returns_by_loop(rows), {r[0]: r[2] for r in rows}, []
    for r in rows:
        rest = [total[t] for t in total if task[t] == r[2] and t != r[0]]
        out.append(total[r[0]] - sum(rest) / len(rest) if rest else 0.0)
    return out


def gigpo_by_loop(rows, gamma, weight, divide):
    def to_go(row):
        return sum(gamma ** (r[1] - row[1]) * r[4] for r in rows if r[0] == row[0] and r[1] >= row[1])
    step = [off_mean_by_loop(to_go(r), [to_go(o) for o in rows if o[2:4] == r[2:4]], divide) for r in rows]
    return [a + weight * b for a, b in zip(grpo_by_loop(rows, divide), step)]


def empg_by_loop(adv, rows, entropy, k, k_f, zeta):
    low, high = min(entropy), max(entropy)
    h = {r[:2]: (e - low) / (high - low + 1e-8) for r, e in zip(rows, entropy)}
    mean = sum(math.exp(-k * x) for x in h.values()) / len(h)
    out = []
    for a, r in zip(adv, rows):
        after = h.get((r[0], r[1] + 1))
        out.append(a * math.exp(-k * h[r[:2]]) / (mean + 1e-8) + (0 if after is None else zeta * math.exp(-k_f * after)))
    return [x - sum(out) / len(out) for x in out]


@pytest.mark.parametrize("seed", range(8))
def test_group_estimators_equal_their_loops_in_any_order(seed):
    rows = random_groups(seed)
    traj, turn, group, state, reward = columns(rows)
    total = returns_by_loop(rows)
    score, rng = tensor([total[r[0]] for r in rows]), random.Random(seed)
    entropy = tensor([rng.random() for _ in rows])
    found = {"grpo": sapo.grpo_advantages(traj, group, score), "rloo": sapo.rloo_advantages(traj, group, score)}
    expected = {"grpo": grpo_by_loop(rows), "rloo": rloo_by_loop(rows)}
    for divide in (True, False):
        found[divide] = sapo.gigpo_advantages(traj, turn, group, state, reward, gamma=0.9, weight=0.7, std=divide)
        expected[divide] = gigpo_by_loop(rows, 0.9, 0.7, divide)
    found["empg"] = sapo.empg_advantages(found["grpo"], traj, turn, entropy, k=0.8, k_f=1.3, zeta=0.2)
    expected["empg"] = empg_by_loop(expected["grpo"], rows, entropy.tolist(), 0.8, 1.3, 0.2)
    for name in found:
        close(found[name], tensor(expected[name]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    close(sapo.grpo_advantages(traj[order], group[order], score[order]), found["grpo"][order])
    close(sapo.rloo_advantages(traj[order], group[order], score[order]), found["rloo"][order])
    close(sapo.gigpo_advantages(traj[order], turn[order], group[order], state[order], reward[order], gamma=0.9, weight=0.7), found[True][order])
    close(sapo.empg_advantages(found["grpo"][order], traj[order], turn[order], entropy[order], k=0.8, k_f=1.3, zeta=0.2), found["empg"][order])


def test_groups_that_tell_nothing_give_no_advantage():
    traj, turn, group = torch.tensor([5, 5, 9, 2, 3, 3]), torch.tensor([0, 1, 0, 0, 0, 1]), torch.tensor([0, 0, 1, 2, 2, 2])
    score, reward = tensor([10, 10, 0, 0.3, 0.3, 0.3]), tensor([0, 10, 0, 0.3, 0, 0.3])
    for adv in (sapo.grpo_advantages(traj, group, score), sapo.grpo_advantages(traj, group, score, std=False), sapo.rloo_advantages(traj, group, score)):
        close(adv, tensor([0.0] * 6))  # groups of one, and equal returns
    alone = sapo.gigpo_advantages(traj, turn, group, torch.arange(6), reward)
    close(alone, tensor([0.0] * 6))
    same = sapo.gigpo_advantages(traj, turn, group, torch.zeros(6, dtype=torch.long), reward, gamma=0.5, std=False)
    close(same, tensor([-2.5, 2.5, 0, 0.05, -0.1, 0.05]))  # one observation: the discounted returns 5, 10; 0.3, 0.15, 0.3
    none = torch.zeros(0, dtype=torch.long)
    for adv in (sapo.grpo_advantages(none, none, tensor([])), sapo.rloo_advantages(none, none, tensor([])), sapo.empg_advantages(tensor([]), none, none, tensor([])),
                sapo.gigpo_advantages(none, none, none, none, tensor([]))):
        assert adv.shape == (0,)
    flat = sapo.empg_advantages(tensor([1, -1]), torch.tensor([0, 1]), torch.tensor([0, 0]), tensor([0.7, 0.7]))
    close(flat, tensor([1, -1]), atol=1e-7)  # equal entropies change nothing


@SEEDS
def test_token_gae_equals_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    value, score = randn(5, 9, generator=generator), randn(5, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.6
    mask[0], mask[1, 4] = False, True  # a row without a token gets nothing
    for gamma, lam in ((1.0, 1.0), (0.9, 0.7)):
        adv, target = sapo.token_gae(value, mask, score, gamma=gamma, lam=lam)
        for b in range(5):
            at = [t for t in range(9) if mask[b, t]]
            v = [value[b, t].item() for t in at] + [0.0]
            delta = [(score[b].item() if i == len(at) - 1 else 0.0) + gamma * v[i + 1] - v[i] for i in range(len(at))]
            expected = [0.0] * 9
            for i, t in enumerate(at):
                expected[t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
            close(adv[b], tensor(expected))
            close(target[b], torch.where(mask[b], value[b] + adv[b], 0.0))


# --------------------------------------------------------------------------------------------------------- environments

INFO = {"admissible": list, "task": str, "category": str, "won": bool, "score": float}
THING = r"[a-z]+ \d+"
SEEN = rf"(nothing|a {THING}(, a {THING})*(, and a {THING})?)"
VIEW = rf"(The {THING} is closed\.|(The {THING} is open\. In it|On the {THING}), you see {SEEN}\.)"
SENTENCES = {  # ALFWorld's commands, and how it answers them
    rf"go to {THING}": rf"You arrive at {THING}\. {VIEW}", rf"open {THING}": rf"You open the {THING}\. {VIEW}",
    rf"close {THING}": rf"You close the {THING}\.", rf"take {THING} from {THING}": rf"You pick up the {THING} from the {THING}\.",
    rf"move {THING} to {THING}": rf"You move the {THING} to the {THING}\.", rf"use {THING}": rf"You turn on the {THING}\.",
    rf"(clean|heat|cool) {THING} with {THING}": rf"You (clean|heat|cool) the {THING} using the {THING}\.",
    rf"examine {THING}": rf"({VIEW}|This is a (clean|(hot|cool|cold)( and clean)?) {THING}\.|There's nothing special about {THING}\.)",
    "inventory": rf"You are (carrying: a {THING}|not carrying anything)\.", "help": r"(?s).*go to.*take.*",
    "look": rf"You are facing the {THING}\. Next to it, you see nothing\.|You are in the middle of a room\. "
            rf"Looking quickly around you, you see {SEEN}\."}


def pattern_of(command, answer):
    """The pattern a command follows; fails where it follows none, or where the answer is not ALFWorld's."""
    pattern = next((p for p in SENTENCES if re.fullmatch(p, command)), None)
    assert pattern and re.fullmatch(SENTENCES[pattern], answer[0].strip()), (command, answer[0])
    return pattern


def obey(env, task, commands):
    env.reset(task)
    return [env.step(c) for c in commands]


def wander(env, task, seed, steps=10 ** 6):
    """Random admissible commands until the game or `steps` end -> [(command, answer)]."""
    rng, out, (_, info) = random.Random(f"{seed} {task}"), [], env.reset(task)
    while len(out) < steps and not (out and (out[-1][1][2] or out[-1][1][3])):
        command = rng.choice(info["admissible"])
        out.append((command, env.step(command)))
        info = out[-1][1][4]
    return out


def content(house):
    return house.task, house.lamp_at, tuple((p, *sorted(house.contents[p])) for p in house.places)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("options", [{}, dict(places=20, objects=20, horizon=50), dict(places=40, horizon=50)], ids=["small", "large", "wide"])
def test_expert_wins_every_house_in_time_and_only_its_last_step_pays(split, options):
    env, categories = make_env("house", **options), set()
    for task in tasks("house", split)[:150]:
        obs, info = env.reset(task)
        assert obs.endswith(f"\n\nYour task is to: {info['task']}")
        answers = obey(env, task, env.expert())
        assert [a[1:4] for a in answers] == [(0.0, False, False)] * (len(answers) - 1) + [(10.0, True, False)], task
        assert [(a[4]["won"], a[4]["score"]) for a in answers] == [(a[2], float(a[2])) for a in answers]
        assert len(answers) <= env.horizon and env.expert() is None
        assert [type(x) for x in answers[-1]] == [str, float, bool, bool, dict]  # Gymnasium's order
        assert all({k: type(v) for k, v in i.items()} == INFO for i in (info, answers[-1][4]))
        categories.add(info["category"])
    assert categories == set(envs.CATEGORIES)


def test_random_policy_hardly_ever_wins():
    assert sum(wander(make_env("house"), task, 0)[-1][1][2] for task in tasks("house", "train")[:300]) < 0.05 * 300


def test_train_and_test_share_neither_ids_nor_rooms():
    env, rooms = make_env("house"), {}
    for split, size in envs.SIZES.items():
        ids = tasks("house", split)
        assert ids == sorted(set(ids)) and len(ids) == size
        rooms[split] = {env.reset(t) and content(env) for t in ids} | set(ids)
        assert len(rooms[split]) > 1.99 * size  # hardly a room twice
    assert not rooms["train"] & rooms["test"]


def test_reset_depends_neither_on_the_process_nor_on_the_horizon():
    code = ("import envs; e = envs.make_env('house', places=9, objects=8); ids = envs.tasks('house', 'test')[:40]\n"
            "print([(e.reset(t), e.expert(), e.step(e.expert()[0])) for t in ids])")
    said = {subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(envs.__file__), env=os.environ | {"PYTHONHASHSEED": seed},
                           capture_output=True, text=True, check=True).stdout for seed in "012"}
    assert len(said) == 1 and len(said.pop()) > 40 * 200
    short, long = make_env("house", horizon=3), make_env("house", horizon=50)
    assert all(short.reset(t) == long.reset(t) for t in tasks("house", "train")[:100])


def test_illegal_actions_are_answered_and_change_nothing():
    env = make_env("house")
    env.reset("00003")
    before = content(env), env.info()
    for action in ("", " ", "eat the moon", "x" * 10 ** 6, "去冰箱 \ud800 \0", "go to", "take", "LOOK", "look\n", "open fridge 99"):
        assert env.step(action) == ("Nothing happens.", 0.0, False, False, before[1]), action
    assert (content(env), env.info()) == before


def test_truncated_exactly_at_the_horizon_unless_the_last_step_wins():
    assert [a[2:4] for a in obey(make_env("house", horizon=7), "00003", ["look"] * 7)] == [(False, False)] * 6 + [(False, True)]
    env = make_env("house")
    env.reset("00003")
    plan = env.expert()
    assert obey(make_env("house", horizon=len(plan)), "00003", plan)[-1][1:4] == (10.0, True, False)
    assert obey(make_env("house", horizon=len(plan) - 1), "00003", plan[:-1])[-1][1:4] == (0.0, False, True)


def test_objects_are_out_of_sight_until_looked_for():
    env, behind_doors = make_env("house", places=9, objects=12), 0
    for task in tasks("house", "train")[:60]:
        obs, info = env.reset(task)
        assert not any(o in text for found in env.contents.values() for o in found for text in [obs, *info["admissible"]])
        for place, found in env.contents.items():
            obs, *_, info = env.step(f"go to {place}")
            visible = found if kind(place) not in envs.OPENABLE else []
            assert all(o in obs for o in visible) and (kind(place) not in envs.OPENABLE or obs.endswith(f"The {place} is closed."))
            assert {c for c in info["admissible"] if c.startswith("take")} == {f"take {o} from {place}" for o in visible}
            behind_doors += len(found) - len(visible)
    assert behind_doors > 60


@pytest.mark.parametrize("options", [{}, dict(places=12, objects=30)], ids=["small", "large"])
def test_expert_wins_from_wherever_random_play_leads(options):
    env = make_env("house", **options, horizon=10 ** 4)
    for n, task in enumerate(tasks("house", "train")[:150]):
        wander(env, task, 1, steps=2 * n)
        plan = env.expert()
        if env.won:
            assert plan is None
        else:  # nothing done in a house is beyond repair
            assert [c in env.admissible() and env.step(c)[2] for c in plan] == [False] * (len(plan) - 1) + [True], task


def test_the_forgetful_demonstrator_fails_at_everything_but_pick():
    env, lost = make_env("house"), {c: [] for c in envs.CATEGORIES}
    for task in tasks("house", "train")[:200]:
        category = demonstrate(env, task, seed=0, forget=1.0)[0][1]["category"]
        lost[category].append(not env.won)
        assert demonstrate(env, task, seed=0) and env.won
    assert all((sum(x) > 0.8 * len(x) > 0) if c != "pick_and_place_simple" else sum(x) < 0.2 * len(x) for c, x in lost.items())


def test_house_has_the_commands_and_sentences_of_alfworld():
    env, used = make_env("house", places=9, objects=20, horizon=60), set()
    for task in tasks("house", "train")[:60]:
        env.reset(task)
        plan = env.expert()
        used |= {pattern_of(*said) for said in [*zip(plan, obey(env, task, plan)), *wander(env, task, 2)]}
    assert used == set(SENTENCES)


@pytest.mark.parametrize("call, says", [
    (lambda: make_env("hose"), "'hose'.*house, alfworld"), (lambda: tasks("hose", "train"), "'hose'.*house, alfworld"),
    (lambda: Pool("hose"), "'hose'.*house, alfworld"), (lambda: tasks("house", "valid"), "'valid'.*train, test"),
    (lambda: make_env("house", places=4), "places must be at least 5, got 4"), (lambda: make_env("house", objects=1), "objects must be at least 2, got 1"),
    (lambda: make_env("house", horizon=0), "horizon must be at least 1, got 0"), (lambda: make_env("house").reset("sofa"), "a number as a string, got 'sofa'")])
def test_what_does_not_exist_is_refused_with_a_word_on_what_does(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# --------------------------------------------------------------------------------------------- prompts and the parser

@pytest.mark.parametrize("text, action, valid", [  # action None: the last 30 characters
    ("<think> a </think> <action> go to desk 1 </action>", "go to desk 1", True),
    ("<THINK>A</THINK><Action>GO to Desk 1</ACTION>", "go to desk 1", True),
    ("<think>\na\n</think>\n<action>\nlook\n</action>\n", "look", True), ("<action>look</action> and <think>a</think>", "look", True),
    ("<think>a</think><action>look</action><action>help</action>", "look", True), ("<think>a</think><action></action>", "", True),
    ("<think>a</think><action>dance wildly</action>", "dance wildly", True),  # what cannot be done is not invalid
    ("<action>look</action>", "look", False), ("<think>a<action>look</action>", "look", False),
    ("</think>a<think><action>look</action>", "look", False), ("<think>想</think><action>look</action>", "look", False),
    ("<think>a</think><action>看</action>", "看", False), ("", None, False), ("look", None, False), ("想" * 40, None, False),
    ("<think>a</think> Now I WILL go to the fridge 1", None, False), ("<think>a</think></action>look<action>", None, False),
    ("<think>long enough</think><action>look", None, False), ("<think>long enough</think>look</action>", None, False)])
def test_parse_action(text, action, valid):
    assert parse_action(text, 30) == (text.lower()[-30:] if action is None else action, valid)


def conversation(turns):
    """An episode in which the agent has answered `turns` times and found an attic."""
    def info(i):
        return {"task": "put a mug in desk.", "admissible": ["go to bed 1", "go to desk 1", "help", "look", f"touch {i}"] + ["go to attic 1"] * (i > 0)}
    episode = Episode("\nYou wake up.\n\nYour task is to: put a mug in desk.\n", info(0))
    for i in range(1, turns + 1):
        action, _ = parse_action(f"<think> secret {i} </think> <action> Dance {{obs}} {i} </action>", 30)
        episode.took(action, f"\nYou saw {i}.\n", info(i))
    return episode


@pytest.mark.parametrize("k", [0, 1, 2, 5, 7])
def test_window_prompt_shows_the_last_k_turns_without_thoughts(k):
    first, later = conversation(0).window_prompt(k), conversation(5).window_prompt(k)
    assert all(x in first for x in (envs.ROLE, envs.ANSWER, "\nYou wake up.\n\nYour task is to: put a mug in desk.\n", "'look', 'touch 0']"))
    assert not any(x in first for x in ("Steps taken", "What you", "'help'"))
    seen = ["You wake up."] + [f"You saw {i}." for i in range(1, 5)]
    past = [x for i in range(5) for x in (seen[i], f"dance {{obs}} {i + 1}\n")][max(0, 10 - 2 * k):]
    now = ["\nStep 6.", "You saw 5.", "['go to bed 1', 'go to desk 1', 'look', 'touch 5', 'go to attic 1']", envs.ANSWER]
    places = [later.index(x) for x in [envs.ROLE, "Your task is to: put a mug in desk.", "Steps taken so far: 5.", *past, *now]]
    assert places == sorted(places)  # all there, oldest first
    assert sum(later.count(x) for x in ("You saw", "You wake", "dance")) == len(past) + 1
    assert not any(x in later for x in ("secret", "'help'", "touch 4"))


def test_full_prompt_says_only_what_is_new():
    first, later = conversation(0).full_prompt(), conversation(3).full_prompt()
    assert all(x in first for x in (envs.ROLE, envs.ANSWER, "You wake up.\n\nYour task is to: put a mug in desk.\n"))
    assert "['go to bed 1', 'go to desk 1', 'look']" in first and "['touch 0']" in first and first.count("go to bed 1") == 1
    assert later.startswith("You saw 3.\n") and "['touch 3', 'go to attic 1']" in later  # the attic was not known at first
    assert not any(x in later for x in ("look", "go to bed", "go to desk", "help", "task", "You saw 2.", "dance", "secret", envs.ROLE, envs.ANSWER))


# ---------------------------------------------------------------------------------------------------------------- pool

@contextlib.contextmanager
def a_pool(workers, horizon=12):
    """A pool that is closed in any case, and that fails its test where it would wait forever."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the pool waits forever"))
    signal.alarm(120)
    try:
        with contextlib.closing(Pool("house", {"horizon": horizon}, workers)) as pool:
            yield pool
    finally:
        signal.alarm(0)


def side_by_side(pool, ids, disturb=lambda turn: None):
    """Plays the games with random commands -> {id: answers}. `disturb` is called while half of the answers are under way."""
    for task in ids:
        pool.start(task, task)
    said, live, turn = {task: [answer] for task, answer in zip(ids, pool.gather(ids))}, list(ids), 0
    while live:
        for i, task in enumerate(live):
            if i == len(live) // 2:
                disturb(turn)
            pool.step(task, random.Random(f"{task} {turn}").choice(said[task][-1][-1]["admissible"] + ["eat the moon"]))
        for task, answer in zip(live, pool.gather(live)):
            said[task].append(answer)
        live, turn = [t for t in live if not (said[t][-1][2] or said[t][-1][3])], turn + 1
    return said


@pytest.fixture(scope="module")
def games():
    """Some games, and what is answered in them without workers."""
    ids = tasks("house", "test")[:7]
    with a_pool(0) as pool:
        return ids, side_by_side(pool, ids)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pool_answers_the_same_with_any_number_of_workers(games, workers):
    ids, said = games
    assert all(make_env("house").reset(t) == said[t][0] and len(said[t]) == 13 for t in ids)
    with a_pool(workers) as pool:
        for order in (1, -1):  # the second time in used environments
            pool.load(ids[:5])
            assert side_by_side(pool, ids[::order]) == said
            for i, task in enumerate(ids):
                pool.demo(i, task, 0, 0.5, 0.3)
            assert pool.gather(range(7)) == [demonstrate(make_env("house", horizon=12), t, 0, 0.5, 0.3) for t in ids]


def test_a_game_that_a_group_will_play_is_loaded_for_each(games):
    ids, said = games
    with a_pool(2) as pool:
        pool.load([ids[0]] * 3 + [ids[1]])
        pool.load([ids[0]] * 2)  # known already
        assert {task: len(at) for task, at in pool.loading.items()} == {ids[0]: 3, ids[1]: 1}
        for key in range(4):
            pool.start(key, ids[0])
        assert pool.gather(range(4)) == said[ids[0]][:1] * 4 and not pool.loading[ids[0]]
        assert Counter(pool.seats[key].worker for key in range(3)) == {0: 2, 1: 1}


def test_killed_workers_go_unnoticed(games):
    with a_pool(2) as pool:
        born = [p.pid for p in pool.procs]
        pool.load(games[0])
        assert side_by_side(pool, games[0], lambda turn: turn in (2, 3, 7) and pool.procs[turn % 2].kill()) == games[1]
        assert all(p.pid != old for p, old in zip(pool.procs, born))


def test_a_worker_that_is_stuck_is_restarted(games, monkeypatch):
    monkeypatch.setattr(envs.Pool, "PATIENCE", 10)
    with a_pool(2) as pool:
        born = [p.pid for p in pool.procs]
        assert side_by_side(pool, games[0], lambda turn: turn == 3 and os.kill(born[0], signal.SIGSTOP)) == games[1]
        assert pool.procs[0].pid != born[0]


def test_workers_that_cannot_live_end_the_run(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with a_pool(1) as pool, pytest.raises(RuntimeError, match="four times.*00003"):
        pool.start("key", "00003")
        pool.gather(["key"])


@pytest.mark.parametrize("workers", [0, 1])
def test_failed_and_dropped_games_leave_the_others_alone(games, workers):
    ids, said = games
    with a_pool(workers) as pool:
        pool.load(["sofa"])
        pool.start("key", "sofa")
        with pytest.raises(RuntimeError, match="house: game sofa failed: ValueError: .*'sofa'"):
            pool.gather(["key"])
        pool.start("a", ids[0])
        assert pool.gather(["a"]) == said[ids[0]][:1]
        for nobody in ("a", "b"):  # instead of waiting for an answer that will never come
            with pytest.raises(KeyError, match=f"nothing has been asked of .'{nobody}'"):
                pool.gather([nobody])
        pool.step("a", "look")
        pool.drop("a")  # with an answer under way
        assert side_by_side(pool, ids) == said


def test_the_key_of_a_dropped_game_can_be_used_again(games):
    with a_pool(1) as pool:
        pool.start("a", games[0][0])
        pool.drop("a")
        pool.start("a", games[0][1])
        assert pool.gather(["a"]) == games[1][games[0][1]][:1]


def test_what_is_over_is_not_played_again(games):
    with a_pool(1) as pool:
        for i, task in enumerate(games[0]):
            pool.demo(i, task, 0, 0.0, 0.0)
        pool.gather(range(7))
        side_by_side(pool, games[0])
        assert not pool.seats


@pytest.mark.parametrize("kill", [False, True])
def test_any_number_of_answers_may_be_under_way(kill):
    with a_pool(1) as pool:
        for round in range(2):
            for i, task in enumerate(tasks("house", "train")[:800]):
                pool.demo(i, task, 0, 0.0, 0.0)
            kill and pool.procs[0].kill()
            assert all(turns[-1][1]["task"] for turns in pool.gather(range(800)))


# ------------------------------------------------------------------------------------------------------------- alfworld

needs_package = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="needs the package: pip install alfworld")
needs_games = pytest.mark.skipif(not os.environ.get("ALFWORLD_DATA"), reason="needs ALFWORLD_DATA, the folder that alfworld-download fills")
PROBLEM = """(define (problem p) (:domain alfred)
 (:objects agent1 - agent MugType - otype DeskType BedType - rtype loc_bar_0 loc_bar_1 loc_bar_2 - location
   Mug_bar_1 - object Desk_bar_1 Bed_bar_1 - receptacle)
 (:init (atLocation agent1 loc_bar_0) (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (inReceptacle Mug_bar_1 Bed_bar_1)
   (receptacleType Desk_bar_1 DeskType) (receptacleType Bed_bar_1 BedType) (canContain DeskType MugType) (canContain BedType MugType)
   (receptacleAtLocation Bed_bar_1 loc_bar_1) (receptacleAtLocation Desk_bar_1 loc_bar_2) (objectAtLocation Mug_bar_1 loc_bar_1))
 (:goal (and (exists (?r - receptacle) (exists (?o - object)
   (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DeskType)))))))"""
TRIAL = "valid_seen/pick_and_place_simple-Mug-None-Desk-1/trial_T1"


def check_alfworld(env, task):
    """The protocol, the expert and illegal actions in one game of the real engine."""
    obs, info = env.reset(task)
    assert {k: type(v) for k, v in info.items()} == INFO and f"/{info['category']}-" in task and info["category"] in envs.CATEGORIES
    assert obs.strip().endswith(f"Your task is to: {info['task']}") and 0 < len(env.expert()) <= env.horizon
    for left in range(len(env.expert()), 0, -1):
        command = env.expert()[0]
        assert len(env.expert()) == left and command in info["admissible"]
        *answer, info = env.step(command)
        assert pattern_of(command, answer) and answer[1:] == [10.0 * (left == 1), left == 1, False]
        assert (info["won"], info["score"]) == (left == 1, float(left == 1))
    assert env.expert() is None and env.step("look")[1:3] == (0.0, True)  # it is won once
    env.reset(task)
    plan = env.expert()
    for action in ("look", "inventory", "help"):
        env.step(action)
    for action in ("eat the moon", "", "x" * 5000, "去", "go to bed 99"):
        assert env.step(action)[:3] == ("Nothing happens.", 0.0, False) and env.expert() == plan


@pytest.fixture
def small_game(tmp_path, monkeypatch):
    """A folder with one game, written from the domain and the grammar the package carries."""
    monkeypatch.setenv("ALFWORLD_DATA", os.environ.get("ALFWORLD_DATA") or str(tmp_path))  # unset or empty, the package makes a folder of its own
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    with open(ALFRED_PDDL_PATH) as domain, open(ALFRED_TWL2_PATH) as grammar:
        game = {"pddl_domain": domain.read(), "grammar": grammar.read().replace("UNKNOWN GOAL", "put a mug in desk"), "pddl_problem": PROBLEM,
                "solvable": True, "walkthrough": ["go to bed 1", "take mug 1 from bed 1", "go to desk 1", "move mug 1 to desk 1"]}
    folder = tmp_path / "json_2.1.1" / TRIAL
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    return str(tmp_path)


@needs_package
def test_a_small_game_in_the_real_engine(small_game):
    assert tasks("alfworld", "valid_seen", data=small_game) == [TRIAL]
    env = make_env("alfworld", data=small_game, horizon=4)  # just enough for the expert
    check_alfworld(env, TRIAL)
    assert [a[3] for a in obey(env, TRIAL, ["look"] * 4)] == [False] * 3 + [True]
    env.reset(TRIAL)
    again = env.expert() + ["take mug 1 from desk 1", "move mug 1 to desk 1"]
    assert [env.step(command)[1:3] for command in again][3:] == [(10.0, True), (0.0, True), (0.0, True)]
    env.horizon = 40
    assert len({pattern_of(*said) for seed in (0, 1) for said in wander(env, TRIAL, seed)}) > 5  # the house's patterns hold here
    with pytest.raises(ValueError, match="no game .*trial_T2"):
        env.reset(TRIAL[:-1] + "2")


@needs_package
def test_the_demonstrator_looks_for_things_and_finds_back(small_game):
    env = make_env("alfworld", data=small_game)
    env.reset(TRIAL)
    plan = env.expert()
    env.step("take mug 1 from sofa 1")
    assert env.expert() == plan  # nothing happened
    env.step(" go to desk 1 ")
    assert env.expert() is None and env.advice() == ("find mug", "go to bed 1")
    turns = demonstrate(env, TRIAL, 0)
    assert [t[3] for t in turns] == plan and [t[2] for t in turns] == ["find mug", "find mug", "put mug in desk", "put mug in desk"]
    slips = 0
    for seed in range(20):
        turns = demonstrate(env, TRIAL, seed, noise=0.5)
        slips += sum(label != executed for *_, label, executed in turns)
        assert all(command in said["admissible"] for _, said, _, *both in turns for command in both)
        assert env.played[-1] == "move mug 1 to desk 1" and env.steps < env.horizon
    assert slips > 20
    assert [t[2:4] for t in demonstrate(env, TRIAL, 0, forget=1.0)] == [t[2:4] for t in demonstrate(env, TRIAL, 0)]  # nothing to forget in this task


def test_the_demonstrator_sees_what_has_been_undone():
    env = envs.AlfWorld.__new__(envs.AlfWorld)
    env.goal, env.verb = ["mug", "desk"], "cool"
    heat, cool, put, take = "heat mug 1 with microwave 1", "cool mug 1 with fridge 1", "move mug 1 to desk 1", "take mug 1 from desk 1"
    for env.played, treated, placed in (([], False, 0), ([heat, put], False, 1), ([cool], True, 0), ([heat, cool, put], True, 1), ([cool, heat], False, 0),
                                        ([cool, put, take], True, 0), ([put, take, "move mug 1 to bed 1"], False, 0), ([cool, put, take, put], True, 1)):
        assert (env.treated("mug 1"), env.placed(any_state=True)) == (treated, placed)
        assert not env.treated("mug 2")
    env.verb, env.played = "clean", ["clean mug 1 with sinkbasin 1", heat]
    assert env.treated("mug 1")  # and stays clean
    env.verb, env.category, env.places, env.played = None, "pick_and_place_simple", ["bed 1", "bed 2", "desk 1", "desk 2"], ["go to bed 1"]
    for offered, wise in (("take mug 1 from bed 2", "take mug 1 from bed 2"), ("take mug 1 from desk 2", "go to desk 1"), ("take pen 1 from bed 1", "go to desk 1")):
        env.offered = {offered, "go to desk 1"}  # bed 2 is at the spot of bed 1
        assert env.advice() == ("find mug", wise)


def test_options_that_are_nobodys_are_refused():
    for name in ("house", "alfworld", "webshop"):
        with pytest.raises(TypeError, match="palces"):
            tasks(name, "train", palces=5)


@needs_package
def test_facts_of_games_gone_by_are_forgotten_and_nobody_notices(small_game):
    if not envs.shortcuts():
        pytest.skip("for TextWorld 1.7.0 alone")
    from mementos.core import _memento_cache as facts
    env = make_env("alfworld", data=small_game)
    env.reset(TRIAL)
    plan = env.expert()
    undisturbed = obey(env, TRIAL, plan)
    first = len(facts)
    env.reset(TRIAL)
    assert 0 < first == len(facts)  # few enough are kept
    answers = [env.step(command) for command in plan[:2]]
    envs.forget_facts(most=first - 1)  # in the middle of a game, as when another of the same worker is loaded
    assert len(facts) == 0
    assert answers + [env.step(command) for command in plan[2:]] == undisturbed


def by_textworld(path, commands):
    """What TextWorld itself answers, asked directly: observation, admissible commands, won."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    game = textworld.start(path, textworld.EnvInfos(won=True, admissible_commands=True), wrappers=[AlfredDemangler])
    states = [game.reset()] + [game.step(command)[0] for command in commands]
    return [(s.feedback, list(s.admissible_commands), bool(s.won)) for s in states]


def check_shortcuts(env, task, seed, steps):
    """Random play, a quarter of it illegal, then the expert's way: what is answered is TextWorld's own answer, byte for byte."""
    rng, said, commands, (obs, info) = random.Random(f"{seed} {task}"), [], [], env.reset(task)
    said.append((obs, info["admissible"], info["won"]))
    plan = env.expert()
    while len(commands) < steps + len(plan) and not said[-1][2]:
        n = len(commands) - steps
        legal = rng.choice(info["admissible"]) if n < 0 else plan[n]
        commands.append(rng.choice(["eat the moon", "", "LOOK", f" {legal}  ", "go to bed 99", legal + " 去"]) if n < 0 and rng.random() < 0.25 else legal)
        obs, *_, info = env.step(commands[-1])
        said.append((obs, info["admissible"], info["won"]))
    assert said == by_textworld(os.path.join(env.root, task, "game.tw-pddl"), commands)


@needs_package
def test_textworld_answers_the_same_with_shortcuts_and_is_left_as_it_was(small_game):
    from textworld.envs.pddl import logic, textgen
    before, env = (textgen.deepcopy, logic.PddlState, textgen._parse_and_convert), make_env("alfworld", data=small_game, horizon=10 ** 6)
    argv = sys.argv
    env.reset(TRIAL)
    assert sys.argv is argv
    for seed in range(3):
        check_shortcuts(env, TRIAL, seed, 60)
    assert envs.shortcuts() and (textgen.deepcopy, logic.PddlState, textgen._parse_and_convert) == before
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), envs.hurried():
        assert textgen.deepcopy is not before[0] and not gc.isenabled()
        1 / 0
    assert textgen.deepcopy is before[0] and gc.isenabled()


@needs_package
def test_another_textworld_is_not_touched(small_game, monkeypatch):
    import textworld.version
    from textworld.envs.pddl import textgen
    monkeypatch.setattr(textworld.version, "__version__", "1.8.0")
    envs.shortcuts.cache_clear()
    try:
        before = textgen.deepcopy
        with envs.hurried():
            assert textgen.deepcopy is before and envs.shortcuts() == []
        check_shortcuts(make_env("alfworld", data=small_game), TRIAL, 0, 10)
    finally:
        envs.shortcuts.cache_clear()


@needs_games
@needs_package
@pytest.mark.parametrize("number", [7, 1234, 2345])
def test_real_games_answer_the_same_with_shortcuts(number):
    env = make_env("alfworld")
    for task in (tasks("alfworld", "train")[number], tasks("alfworld", "valid_unseen")[number % 134]):  # an engine is used again
        check_shortcuts(env, task, number, 25)


@needs_games
@needs_package
def test_a_growing_conversation_is_read_in_a_quarter_of_the_tokens():
    """SmolLM2's tokenizer counts 0.16 to 0.22 in place of the tiny model's 0.20 to 0.27."""
    lm, count = load("tiny", words=envs.words()), {"window": 0, "full": 0}
    for task in tasks("alfworld", "train")[::700]:
        env = make_env("alfworld")
        obs, info = env.reset(task)
        episode, rng = Episode(obs, info), random.Random(task)
        for turn in range(40):
            count["window"] += len(lm.chat.first(episode.window_prompt()))
            count["full"] += len(lm.chat.later(episode.full_prompt()) if turn else lm.chat.first(episode.full_prompt()))
            command = rng.choice(info["admissible"])
            obs, *_, info = env.step(command)
            episode.took(command, obs, info)
    assert count["full"] < 0.28 * count["window"]


@needs_games
@needs_package
def test_a_killed_worker_costs_a_real_rollout_nothing_but_time():
    lm, ids = random_model("qwen2", 1), tasks("alfworld", "train")[100:103]
    turns = []
    for killing in (False, True):
        with contextlib.closing(Pool("alfworld", {"horizon": 6}, 2)) as pool:
            if killing:
                kill_now_and_then(pool, {9, 16})
            turns.append(rollout(Sampler(lm, "kv", "window", 9), ids, pool, seed=(1,), max_prompt=4096))
    assert turns[0] == turns[1] and len(turns[0]) == 18


def test_missing_games_and_a_missing_package_say_what_to_do(tmp_path, monkeypatch):
    def refused(error, says, call, *args, **options):
        with pytest.raises(error, match=says):
            call("alfworld", *args, data=str(tmp_path), **options)
    refused(FileNotFoundError, "alfworld-download", make_env)
    refused(FileNotFoundError, "alfworld-download", tasks, "train")
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    refused(FileNotFoundError, "train; `alfworld-download`", tasks, "train")
    refused(ValueError, "'test'.*train, valid_seen, valid_unseen", tasks, "test")
    refused(ValueError, "horizon must be at least 1, got 0", make_env, horizon=0)
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ImportError, match="pip install alfworld"):
        make_env("alfworld", data=str(tmp_path)).reset(TRIAL)


@needs_games
@needs_package
@pytest.mark.parametrize("split, size, played", [("train", 3553, [1000]), ("valid_seen", 140, [0, -1]), ("valid_unseen", 134, [60])])
def test_alfworld_has_all_its_games_and_the_expert_wins_them(split, size, played):
    ids = tasks("alfworld", split)
    assert len(ids) == size and ids == sorted(set(ids)) and all(t.startswith(split + "/") for t in ids)
    assert all(os.path.isdir(os.path.join(os.environ["ALFWORLD_DATA"], "json_2.1.1", t)) for t in ids)
    assert {t.split("/")[1].split("-")[0] for t in ids} == set(envs.CATEGORIES)
    for number in played:
        check_alfworld(make_env("alfworld"), ids[number])


# -------------------------------------------------------------------------------------------------------------- webshop

needs_catalogue = pytest.mark.skipif(not os.environ.get("WEBSHOP_DATA"), reason="needs WEBSHOP_DATA, the folder of WebShop's catalogue")
DRESS = {"asin": "B00DRESS01", "name": "Acme Women's Summer Dress", "full_description": "Light & airy.\nWash cold.", "small_description": ["Soft  cotton", "", " \n "],
         "customization_options": {"Color": [{"value": "Red/White "}, {"value": "rectangular \"x\""}], "size": [{"value": "S"}, {"value": "L"}], "none": None},
         "query": " Dresses ", "category": "fashion", "product_category": "Clothing \u203a Women \u203a Dresses", "pricing": "$19.99$1,029.50"}
SHIRT = {"asin": "B00SHIRT02", "name": "Acme Shirt", "full_description": "", "small_description": "One bullet", "customization_options": "",
         "query": "shirts", "category": "fashion", "product_category": "Clothing \u203a Men \u203a Shirts", "pricing": None}
TASK = "Find me airy dresses with color: red | white, and size: s"


def filler(n):
    return SHIRT | {"asin": f"B{n:09d}", "name": f"Thing {n} gadget {'even' if n % 2 == 0 else 'odd'}", "pricing": f"${n % 90 + 1}.50"}


def write_catalogue(folder, products=None, about=None, human=None):
    """The three files as WebShop's download has them -> the folder, as a string."""
    folder.mkdir(exist_ok=True)
    about = about or {"B00DRESS01": {"attributes": ["airy", "machine wash"], "instruction": "Find me airy dresses", "instruction_attributes": ["airy"]},
                      "B00SHIRT02": {"attributes": []}}
    human = human or {"B00SHIRT02": [{"instruction": "a shirt.", "instruction_attributes": [], "instruction_options": []},
                                     {"instruction": "i want a shirt..", "instruction_attributes": ["one bullet"], "instruction_options": []}]}
    (folder / "items_shuffle.json").write_text(json.dumps(products or [DRESS, SHIRT] + [filler(n) for n in range(30)], indent=1))
    (folder / "items_ins_v2.json").write_text(json.dumps(about))
    (folder / "items_human_ins.json").write_text(json.dumps(human))
    return str(folder)


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    """Whatever a test's catalogue leaves behind goes where pytest clears up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "caches"))


@pytest.fixture
def shop_data(tmp_path, recwarn):
    return write_catalogue(tmp_path / "shop")


def goal_of(env, text):
    return next(i for i in range(len(env.goals)) if env.goals[i]["text"].startswith(text))


def test_shop_pages_as_text(shop_data):
    env = make_env("webshop", data=shop_data)
    obs, info = env.reset(goal_of(env, TASK))
    task = info["task"]
    assert {k: type(v) for k, v in info.items()} == INFO and info["category"] == "fashion" and (info["won"], info["score"]) == (False, 0.0)
    assert obs == f"WebShop [SEP] Instruction: [SEP] {task} [SEP] Search" and info["admissible"] == ["search[<your query>]", "click[search]"]
    obs, *outcome, info = env.step("search[summer dresses]")
    top = f"Instruction: [SEP] {task} [SEP] Back to Search"
    assert obs == f"{top} [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] B00DRESS01 [SEP] Acme Women's Summer Dress [SEP] $19.99 to $1029.5"
    assert outcome == [0.0, False, False] and info["admissible"] == ["click[back to search]", "click[next >]", "click[b00dress01]"]
    obs, *_, info = env.step("click[b00dress01]")
    options = "color [SEP] red | white [SEP] rectangular \"x\" [SEP] size [SEP] s [SEP] l"
    item = (f"{top} [SEP] < Prev [SEP] {options} [SEP] Acme Women's Summer Dress [SEP] Price: $19.99 to $1029.5 [SEP] Rating: N.A. [SEP] Description [SEP] "
            "Features [SEP] Reviews [SEP] Buy Now")
    assert obs == item and info["admissible"] == [f"click[{x}]" for x in (
        "back to search", "< prev", "description", "features", "reviews", "buy now", "red | white", "rectangular \"x\"", "s", "l")]
    assert env.step("click[Red | White]")[0] == item  # a chosen option does not show in this mode
    obs, *_, info = env.step("click[features]")
    assert obs == f"{top} [SEP] < Prev [SEP] Soft  cotton [SEP] " and info["admissible"] == ["click[back to search]", "click[< prev]"]  # ' \n ' is no text, '' is
    assert env.step("click[< prev]")[0] == item and env.step("click[description]")[0] == f"{top} [SEP] < Prev [SEP] Light & airy.\nWash cold."
    assert env.step("click[< prev]")[0] == item and env.step("click[reviews]")[0] == f"{top} [SEP] < Prev"
    env.step("click[< prev]")
    env.step("click[s]")
    obs, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (reward, terminated, truncated, info["won"], info["score"], info["admissible"]) == (10.0, True, False, True, 1.0, [])
    assert obs == ("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] Purchased [SEP] asin [SEP] "
                   "B00DRESS01 [SEP] options [SEP] {\"color\": \"red | white\", \"size\": \"s\"} [SEP] attrs [SEP] None [SEP] category [SEP] None [SEP] "
                   "query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options [SEP] attrs [SEP] price upper [SEP] "
                   "instuction text [SEP] category [SEP] product category [SEP] query [SEP] Goal [SEP] None [SEP] Reward [SEP] "
                   "Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP] Reward Details [SEP] None")
    assert env.step("dance")[0] == obs and env.step("search[shirt]")[0].startswith(top)  # the original goes on after a purchase


def test_shop_pages_as_rich_text(shop_data):
    env = make_env("webshop", data=shop_data, mode="text_rich")
    obs, info = env.reset(goal_of(env, TASK))
    top = f"Instruction:\n{info['task']}\n[button] Back to Search [button_]\n"
    assert obs == f"WebShop\nInstruction: \n{info['task']}\n[button] Search [button_]\n"
    results = (top + "Page 1 (Total results: 1)\n[button] Next > [button_]\n\n[{0}] B00DRESS01 [{0}_]\nAcme Women's Summer Dress\n$19.99 to $1029.5\n").format
    assert env.step("search[dress]")[0] == results("button")

    def item(first="", color="button", size="button"):
        return (f"{first}{top}[button] < Prev [button_]\ncolor\n  [{color}] red | white [{color}_]\n  [button] rectangular \"x\" [button_]\nsize\n"
                f"  [{size}] s [{size}_]\n  [button] l [button_]\nAcme Women's Summer Dress\nPrice: $19.99 to $1029.5\nRating: N.A.\n"
                "[button] Description [button_]\n[button] Features [button_]\n[button] Reviews [button_]\n[button] Buy Now [button_]\n")
    assert env.step("click[b00dress01]")[0] == item()
    assert env.step("click[s]")[0] == item("You have clicked s.\n", size="clicked button")
    assert env.step("click[red | white]")[0] == item("You have clicked s.\nYou have clicked red | white.\n", *["clicked button"] * 2)
    assert env.step("click[rectangular \"x\"]")[0] == item("You have clicked s.\n", size="clicked button")  # the page's address has its quotes escaped
    assert env.step("click[< prev]")[0] == results("clicked button") and env.step("click[b00dress01]")[0] == item()
    env.step("click[back to search]")
    assert env.step("search[\"s\" dress]")[0] == results("button")
    assert env.step("click[b00dress01]")[0] == item("You have clicked s.\n", size="clicked button")  # ... and it holds the query


NO_OPS = ["", "look", "search[]", "click[]", "Click[search]", " search[dress]", "search[a[b]c]", "search[[dress]]", "search[dress] click[x]", "search[]][[]",
          "click[search]", "click[b00dress01 ]", "search[\n]", "click[nothing]",
          "buy now", "[x]", "click[< prev]", "se\narch[x]"]


@pytest.mark.parametrize("action", NO_OPS)
def test_what_the_shop_cannot_use_changes_nothing(shop_data, action):
    """... on any page, and an episode knows it."""
    env = make_env("webshop", data=shop_data, mode="text_rich")
    before = env.reset(0)
    for n, way in enumerate([None, "search[dress]", "click[b00dress01]", "click[s]", "click[reviews]"]):
        if way:
            obs, *_, info = env.step(way)
            before = obs, info
        elsewhere = action == "click[< prev]" and n > 1  # works there
        if not elsewhere:
            assert not envs.ShopEpisode(*before).accepts(action)
            obs, reward, terminated, truncated, info = env.step(action)
            assert (obs, info) == before and (reward, terminated, truncated) == (0.0, False, False) and env.steps == 2 * n + 1


def test_what_an_episode_accepts_is_what_changes_the_page(shop_data):
    env, rng = make_env("webshop", data=shop_data, mode="text_rich", horizon=10 ** 6), random.Random(0)
    env.reset(0)
    for _ in range(600):
        action = rng.choice(env.info()["admissible"] + NO_OPS + ["search[dress]", "search[gadget] please", "click[B00DRESS01]", "click[<r>]", "search[shirt]"])
        before, accepted = dict(env.__dict__), envs.ShopEpisode(env.observation(), env.info()).accepts(action)
        options, visited = dict(env.options), set(env.visited)
        if action != "click[buy now]":
            env.step(action)
            changed = any(before[k] != env.__dict__[k] for k in ("page", "keywords", "page_number", "item", "hits") if k in before) \
                or (options, visited) != (env.options, env.visited)
            assert accepted or not changed
            assert not accepted or changed or action.startswith("search") or options == env.options  # the same search or option again


def test_a_purchase_that_is_not_all_that_was_asked_for_pays_nothing(shop_data):
    env = make_env("webshop", data=shop_data)
    for way, score in ((("search[dress]", "click[b00dress01]"), 0.5), (("search[dress]", "click[b00dress01]", "click[s]"), 0.75),
                       (("search[shirt]", "click[b00shirt02]"), 0.125)):  # the price fits, and half the kind of thing it is
        env.reset(goal_of(env, TASK))
        for action in way:
            assert env.step(action)[1:4] == (0.0, False, False) and env.score == 0.0
        obs, reward, terminated, truncated, info = env.step("click[buy now]")
        assert (reward, terminated, info["won"]) == (0.0, True, False) and info["score"] == pytest.approx(score) and f"[SEP] {info['score']} [SEP]" in obs
        assert env.step("dance")[-1]["score"] == 0.0


@pytest.mark.parametrize("query", ["the and of", "   ", "[", "\u200b", "<a> wet", "<c>", "<q>", "!!!", "a" * 5000, "\ud800"])
def test_a_query_without_words_finds_nothing(shop_data, query):
    env = make_env("webshop", data=shop_data)
    env.reset(0)
    assert "Page 1 (Total results: 0)" in env.step(f"search[{query}]")[0]


def test_brackets_special_words_and_endless_pages(shop_data):
    env = make_env("webshop", data=shop_data, horizon=10 ** 6)
    env.reset(0)
    assert all("Total results: 1)" in env.step(action)[0] for action in ("search[dress]", "search[DRESS] and more", "search[dress]]", "search[<a> dress]"))
    assert "Total results: 32)" in env.step("search[<c> fashion]")[0] and "Total results: 1)" in env.step("search[<q> dresses]")[0]
    drawn = env.step("search[<r>]")[0]
    assert "Total results: 32)" in drawn and env.step("search[<r>]")[0] != drawn
    obs, *_, info = env.step("search[gadget]")
    assert "Total results: 30)" in obs and info["admissible"][:2] == ["click[back to search]", "click[next >]"] and len(info["admissible"]) == 12
    first = [a for a in info["admissible"] if a.startswith("click[b0")]
    for page in range(2, 300):
        obs, *_, info = env.step("click[next >]")
        assert f"Page {page} (Total results: 30)" in obs and "click[< prev]" in info["admissible"]
        assert sum(a.startswith("click[b0") for a in info["admissible"]) == 10 * (page < 4)
    for page in range(298, 0, -1):
        obs, *_, info = env.step("click[< prev]")
    assert [a for a in info["admissible"] if a.startswith("click[b0")] == first and "click[< prev]" not in info["admissible"]
    env.step("click[next >]")
    shown = env.step("click[next >]")
    env.step(shown[-1]["admissible"][3])
    assert env.step("click[< prev]")[0] == shown[0]  # from a product back to the page it was found on


def test_the_shop_closes_at_the_horizon(shop_data):
    env = make_env("webshop", data=shop_data, horizon=3)
    env.reset(0)
    assert [env.step("dance")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    env.reset(0)
    for action in ("search[shirt]", "click[b00shirt02]"):
        env.step(action)
    assert env.step("click[buy now]")[2:4] == (True, False)


def ratio_by_loop(a, b):
    """token_set_ratio from its description: the best of three comparisons of sorted words."""
    import difflib
    words = [[], []]
    for s, out in ((a, words[0]), (b, words[1])):
        word = ""
        for c in "".join(c for c in s if not 128 <= ord(c) <= 255) + " ":
            if c.isalnum() or c == "_":
                word += c.lower()
            elif word:
                out, word = (out.append(word) or out) if word not in out else out, ""
    if not words[0] or not words[1]:
        return 0
    both = sorted(w for w in words[0] if w in words[1])
    rests = [sorted(w for w in words[i] if w not in both) for i in (0, 1)]
    texts = [" ".join(both), " ".join(both + rests[0]), " ".join(both + rests[1])]
    return max(round(100 * difflib.SequenceMatcher(None, texts[i], texts[j]).ratio()) if texts[i] else 0 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("a, b, expected", [  # by thefuzz 0.19.0
    ("x-large", "('size', 'x-large')", 100), ("large", "('size', 'x-large')", 100), ("light blue", "blue, light", 100), ("red", "blue", 29), ("", "x", 0),
    ("long sleeve", "long sleeves", 96), ("a b c", "c d", 50), ("non slip", "slip resistant", 67), ("\u00e9 na\u00efve", "nave", 100), ("\u65e5\u672c x", "x", 100),
    ("machine wash", "machine washable", 86), ("6x-large", "7x-large", 88)])
def test_token_set_ratio(a, b, expected):
    assert envs.token_set_ratio(a, b) == envs.token_set_ratio(b, a) == expected == ratio_by_loop(a, b)


@SEEDS
def test_purchase_score_equals_the_formula(seed):
    rng = random.Random(seed)
    word = lambda: rng.choice(["red", "blue wide", "tan", "large", "x-large", "fashion", "soft cotton", "slip on", "7 inch", "standard"])
    for _ in range(200):
        def thing():
            return {"title": " ".join(word() for _ in range(3)), "description": word().upper(), "bullets": [word(), word()], "attributes": [word() for _ in range(2)],
                    "query": rng.choice("ab"), "product_category": " \u203a ".join(rng.choices("pqrs", k=3)), "nouns": rng.choices("klmnopqrst", k=rng.randrange(13))}
        product, wanted, human, price = thing(), thing(), rng.random() < 0.5, rng.uniform(1, 99)
        names = rng.sample(["size", "color", "style"], rng.randrange(4))
        wanted |= {"attributes": wanted["attributes"], "options": [word() for _ in names] if human else {n: word() for n in names}, "price_upper": 50.0}
        bought = {n: word() for n in names[:rng.randrange(4)]}

        got = 0
        for attribute in wanted["attributes"]:
            text = "\0".join([product["title"], " ".join(product["bullets"]), product["description"]]).lower()
            got += attribute in text or max(ratio_by_loop(a, attribute) for a in product["attributes"]) > 85
        asked = wanted["options"] if human else list(wanted["options"].items())
        for option in asked:
            paint = [c for c in envs.COLORS if (c in option if isinstance(option, str) else c == option[0] or c == option[1])]
            target = paint[0] if paint else str(option)
            for value in bought.values():
                paint = [c for c in envs.COLORS if c in value]
                if ratio_by_loop(paint[0] if paint else value, target) > 85:
                    got += 1
                    break
        total = (got + (price <= 50)) / (len(wanted["attributes"]) + len(asked) + 1)
        distinct, common = set(wanted["nouns"]), 0
        for noun in distinct:
            common += noun in product["nouns"]
        title = common / len(wanted["nouns"]) if wanted["nouns"] else 0.2
        paths = [{p for p in x["product_category"].replace(" ", "").split("\u203a")} for x in (product, wanted)]
        kind_of = 1 if product["query"] == wanted["query"] or len(paths[0] & paths[1]) > 1 or title > 0.2 else 0.5
        kind_of = 0 if title == 0 else 0.1 if title < 0.1 else kind_of
        assert envs.purchase_score(product, price, bought, wanted) == pytest.approx(total * kind_of, abs=1e-12)


WORDS = """o'neil's|o'neil 3.5|3.5 1,000|1,000 foo_bar|foo_bar u.s.a.|u.s.a a:b|a:b 18"|18 men-women|men+women and/or| dogs|dog the| ponies|poni
running|run relational|relat hopping|hop biologically|biolog happy|happi sky|sky \u65e5\u672c|\u65e5+\u672c caf\u00e9s|caf\u00e9 \u2122|\u2122 \u2605wide|\u2605+wide as| is'|
\U0001f468\u200d\U0001f4bc|\U0001f468\u200d\U0001f4bc \U0001f1e9\U0001f1ea|\U0001f1e9\U0001f1ea"""


@pytest.mark.parametrize("pair", WORDS.split())
def test_words_are_taken_apart_as_lucene_does(pair):
    text, _, expected = pair.partition("|")
    assert envs.terms(text) == [t for t in expected.split("+") if t]


@SEEDS
def test_search_equals_bm25_by_a_loop(tmp_path, seed):
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(40)]
    products = [SHIRT | {"asin": f"B{n:09d}", "name": " ".join(rng.choices(words, weights=range(1, 41), k=rng.randrange(1, 90)))} for n in range(120)]
    rng.shuffle(products)
    catalogue = envs.Catalogue(write_catalogue(tmp_path / "shop", products, {"x": {}}, {"x": []}))
    texts = [(p["name"] + " one bullet").split() for p in products]

    def kept(n):  # one byte: exact to 39, then steps of 2, 4, 8, ...
        low, step = 40, 2
        while n >= low + 8 * step:
            low, step = low + 8 * step, 2 * step
        return n if n < 40 else low + (n - low) // step * step
    mean = sum(map(len, texts)) / len(texts)
    for _ in range(20):
        query = rng.choices(words, k=rng.randrange(1, 6))
        scores = [0.0] * len(texts)
        for term in query:  # a word said twice counts twice
            df = sum(term in text for text in texts)
            for d, text in enumerate(texts):
                tf = text.count(term)
                scores[d] += math.log(1 + (120 - df + 0.5) / (df + 0.5)) * tf / (tf + 0.9 * (0.6 + 0.4 * kept(len(text)) / mean)) if tf else 0
        found = catalogue.search(" ".join(query))
        best = sorted((d for d in range(120) if scores[d]), key=lambda d: (-round(scores[d], 5), products[d]["asin"]))
        assert len(found) == min(50, len(best)) and [round(scores[d], 4) for d in found] == [round(scores[d], 4) for d in best[:50]]


def test_equals_stand_in_the_order_of_their_asins(tmp_path):
    products = [SHIRT | {"asin": f"B{n:09d}", "name": "same words"} for n in random.Random(0).sample(range(1000), 80)]
    catalogue = envs.Catalogue(write_catalogue(tmp_path / "shop", products))
    found = [catalogue.product(n)["asin"] for n in catalogue.search("same")]
    assert found == sorted(p["asin"] for p in products)[:50]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 22])
def test_a_file_is_read_the_same_in_any_pieces(tmp_path, chunk):
    items = [{"a": "]\u00e9 \\ \" [", "b": [1, {"c": None}]}, {}, {"d": "\u65e5" * 50}]
    (tmp_path / "x.json").write_text(" \n" + json.dumps(items, indent=2, ensure_ascii=False) if chunk > 1 else json.dumps(items), encoding="utf-8")
    assert list(envs.json_items(str(tmp_path / "x.json"), chunk)) == items


def test_prices_caps_and_the_order_of_goals_follow_the_originals_stream(tmp_path):
    products = [DRESS | {"asin": f"B{n:09d}", "pricing": ["$5.00", "$12.00$80.00", None, "$985.00", "$1200.00"][n % 5]} for n in range(25)]
    about = {p["asin"]: {"attributes": ["airy"], "instruction": "Find me x", "instruction_attributes": ["airy"]} for p in products[::2]}
    env = make_env("webshop", data=write_catalogue(tmp_path / "shop", products, about), seed=7)
    random.seed(7)  # the original: the global stream, products in order
    prices = [random.uniform(12.0, 80.0) if n % 5 == 1 else {0: 5.0, 2: 100.0, 3: 985.0, 4: 1200.0}[n % 5] for n in range(25)]
    goals = []
    for n in range(0, 25, 2):
        above = [10.0 * i for i in range(1, 100) if 10.0 * i > prices[n]][:4]
        cap = sorted(random.sample(above, 2))[1] if len(above) >= 2 else None
        for color in ("red | white", "rectangular \"x\""):
            for size in ("s", "l"):
                goals.append((f"B{n:09d}", f"Find me x with color: {color}, and size: {size}" + (f", and price lower than {cap:.2f} dollars" if cap else "")))
    random.seed(233)
    random.shuffle(goals)
    assert [(env.goals[i]["asin"], env.goals[i]["text"]) for i in range(len(env.goals))] == goals and list(env.goals.prices) == prices
    assert [env.goals[i]["text"] for i in range(9)] != [make_env("webshop", data=str(tmp_path / "shop"), seed=8).goals[i]["text"] for i in range(9)]


def test_a_range_of_prices_is_bought_at_the_price_that_was_drawn(tmp_path):
    products = [DRESS | {"asin": f"B{n:09d}", "pricing": "$1.00$99.00"} for n in range(12)]
    about = {p["asin"]: {"attributes": ["airy"], "instruction": "Find me x", "instruction_attributes": ["airy"]} for p in products}
    env = make_env("webshop", data=write_catalogue(tmp_path / "shop", products, about))
    assert len(set(env.goals.prices)) == 12 and all(1 < p < 99 for p in env.goals.prices)
    cheap = env.goals.prices.argmin().item()
    goal = env.goals[0] | {"price_upper": env.goals.prices[cheap] + 0.01}
    assert [envs.purchase_score(env.catalogue.product(n), env.goals.prices[n], {}, goal) == 0.5 for n in range(12)] == [n == cheap for n in range(12)]


def test_odd_products(tmp_path):
    """Doubled, nameless and long asins are left out; a value of two options belongs to the last; markup comes out as it went in."""
    odd = DRESS | {"asin": "B00ODD0001", "name": "<b>A</b> &amp; [co]", "customization_options": {
        "Color": [{"value": "one"}, {"value": "it's <b> & \"q\""}], "Size": [{"value": "one"}, {"value": "[2 pack]"}, {"value": "Reviews"}], "no": []}}
    about = {"B00ODD0001": {"attributes": ["airy"], "instruction": "Find me [odd] things", "instruction_attributes": ["airy"]}}
    products = [odd, odd | {"name": "again"}, SHIRT | {"asin": "nan"}, SHIRT | {"asin": "B0000000000"}, SHIRT]
    env = make_env("webshop", data=write_catalogue(tmp_path / "shop", products, about | {"B00SHIRT02": {"instruction": "Find me shirts",
                                                                                                   "instruction_attributes": ["bullet"]}}))
    assert len(env.catalogue) == 2 and len(env.goals) == 1  # an option without values leaves no combination
    env.reset(0)
    env.step("search[odd b co]")
    obs, *_, info = env.step("click[b00odd0001]")
    assert "<b>A</b> &amp; [co]" in obs and info["admissible"].count("click[one]") == 1
    env.step("click[it's <b> & \"q\"]")
    obs, *_, info = env.step("click[one]")
    assert env.options == {"color": "it's <b> & \"q\"", "size": "one"}
    assert env.step("click[[2 pack]]")[0] == obs and "Reviews" not in env.options.values()
    assert '{"color": "it\\u0027s \\u003cb\\u003e \\u0026 \\"q\\"", "size": "one"}' in env.step("click[buy now]")[0]
    env.reset(0)
    assert env.expert()[0] == "search[Find me shirts]"

    odd["customization_options"].pop("no")
    env = make_env("webshop", data=write_catalogue(tmp_path / "other", products, about))
    for i in range(len(env.goals)):
        env.reset(i)
        plan, wanted = env.expert(), env.goal["options"]
        assert (plan is None) == (wanted["size"] in ("[2 pack]", "reviews") or wanted == {"color": "one", "size": "one"} and plan is None), wanted
        for action in plan or []:
            *_, info = env.step(action)
        assert plan is None or info["won"]


def test_human_goals(shop_data):
    env = make_env("webshop", data=shop_data, goals="human")
    assert len(env.goals) == 1 and env.goals[0]["text"].startswith("i want a shirt, and price lower than 1") and env.goals[0]["options"] == []
    env.reset("0000000")
    for action in env.expert():
        *_, info = env.step(action)
    assert info["won"]


def test_splits_share_no_product(tmp_path):
    products = [DRESS | {"asin": f"B{n:09d}"} for n in range(60)]
    about = {p["asin"]: {"instruction": "Find me x", "instruction_attributes": ["airy"]} for p in products}
    data = write_catalogue(tmp_path / "shop", products, about)
    env = make_env("webshop", data=data)
    split = {name: tasks("webshop", name, data=data) for name in ("train", "valid", "test")}
    bought = {name: {env.goals[int(i)]["asin"] for i in ids} for name, ids in split.items()}
    assert sorted(sum(split.values(), [])) == [f"{i:07d}" for i in range(240)] and all(ids == sorted(ids) for ids in split.values())
    assert all(split.values()) and sum(map(len, bought.values())) == 60 and len(bought["train"]) > 30
    assert len(tasks("webshop", "test_500", data=data)) == 240
    with pytest.raises(ValueError, match="no synthetic goal falls into"):
        tasks("webshop", "train_rest", data=data)


def test_the_expert_finds_its_way_from_anywhere(shop_data):
    env = make_env("webshop", data=shop_data, horizon=50)
    for i in range(len(env.goals)):
        env.reset(i)
        reachable, rng = env.expert() is not None, random.Random(i)
        assert reachable == ("rectangular" not in env.goals[i]["text"])  # counts as 'tan', so the exact option does not match
        for start in range(25):
            _, info = env.reset(i)
            for _ in range(start):
                actions = [a for a in info["admissible"] if a != "click[buy now]"] + ["search[gadget]", "search[dress]", "search[shirt]"]
                *_, info = env.step(rng.choice(actions))
            for action in env.expert() or []:
                assert action.startswith("search[") or action in info["admissible"]
                *_, info = env.step(action)
            assert info["won"] == reachable and (not reachable or env.expert() is None)


def test_nouns_come_from_the_table_else_spacy_else_a_guess_with_a_warning(monkeypatch):
    envs.warn_of_nouns.cache_clear()
    product = {"title": "The Red Shoes for 2 Men's feet", "nouns": None}
    with pytest.warns(UserWarning, match="counts as a noun"):
        assert envs.nouns_of(product) == ["red", "shoes", "men", "s", "feet"]
    monkeypatch.setattr(envs, "spacy_nouns", lambda title: ["feet"])
    assert envs.nouns_of(product | {"nouns": ["shoes"]}) == ["shoes"]  # the table does not depend on what is installed
    assert envs.nouns_of(product) == ["feet"]


def test_broken_or_missing_shop_data_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="WEBSHOP_DATA"):
        make_env("webshop")
    with pytest.raises(FileNotFoundError, match="items_shuffle_1000.json does not exist"):
        tasks("webshop", "train", data=str(tmp_path))
    whole = json.dumps([DRESS, SHIRT])
    for n, (name, text, says) in enumerate([
            ("items_shuffle", whole[:-30], "broken"), ("items_shuffle", "", "no JSON array"), ("items_shuffle", "{}", "no JSON array"), ("items_shuffle", "[]", "no product"),
            ("items_shuffle", "[{}]", "product 0,.*asin"), ("items_shuffle", json.dumps([SHIRT, DRESS | {"small_description": 3}]), "product 1,"),
            ("items_shuffle", json.dumps([DRESS | {"pricing": "$1.2.3"}]), "product 0,"), ("items_shuffle", json.dumps([DRESS | {"pricing": "$" + "9" * 400}]), "product 0,"),
            ("items_shuffle", json.dumps([SHIRT | {"category": None}]), "product 0,"), ("items_shuffle", json.dumps([SHIRT | {"asin": "\ud800"}]), "product 0,"),
            ("items_shuffle", json.dumps([DRESS | {"small_description": ["a", None]}]), "product 0,"),
            ("items_ins_v2", json.dumps({"B00DRESS01": {"attributes": None}}), "what the other files say"),
            ("items_human_ins", json.dumps({"B00DRESS01": [{"instruction": "x", "instruction_attributes": ["y"]}]}), "what the other files say"),
            ("items_ins_v2", "{", "items_ins_v2.json is broken"),
            ("items_ins_v2", "[]", "no JSON object"), ("items_human_ins", "x", "items_human_ins.json is broken")]):
        folder = tmp_path / str(n)
        write_catalogue(folder)
        (folder / f"{name}.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            make_env("webshop", data=str(folder))
    (folder / "items_shuffle.json").write_bytes(b"[\xff\xfe")
    (folder / "items_human_ins.json").write_text("{}")
    with pytest.raises(ValueError, match="items_shuffle.json is broken"):
        make_env("webshop", data=str(folder))
    caches = os.path.join(os.environ["XDG_CACHE_HOME"], "sapo")
    assert not [f for f in os.listdir(caches) if f.endswith(".new")]  # nothing half made is left


def build_in(data, start):
    start.wait()
    assert len(envs.Catalogue(data).search("gadget")) == 30


def test_an_index_is_made_once_whoever_asks_and_whatever_was_left_behind(shop_data, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start = SERVER.Event()
    several = [SERVER.Process(target=build_in, args=(shop_data, start)) for _ in range(3)]
    for process in several:
        process.start()
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    start.set()
    for process in several:
        process.join(100)
    assert [process.exitcode for process in several] == [0] * 3
    folder = envs.Catalogue(shop_data).folder
    os.makedirs(folder + ".new")  # of a build that was killed
    (tmp_path / "shop" / "items_human_ins.json").write_text("{}  ")
    assert envs.Catalogue(shop_data).folder != folder
    os.remove(folder + "/docs.npy")
    (tmp_path / "shop" / "items_human_ins.json").write_text("{}")
    broken = envs.Catalogue(shop_data).folder
    os.truncate(broken + "/products.jsonl", 0)
    with pytest.raises(ValueError, match="delete it"):
        envs.Catalogue(shop_data)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_index_that_is_there_needs_no_right_to_write(shop_data, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = envs.Catalogue(shop_data).folder
    for path in (folder, os.path.dirname(folder)):
        os.chmod(path, 0o555)
    assert len(envs.Goals(envs.Catalogue(shop_data))) == 4
    for path in (folder, os.path.dirname(folder)):
        os.chmod(path, 0o755)


def test_impossible_shops_are_refused(shop_data):
    for options, says in (({"mode": "html"}, "mode"), ({"goals": "all"}, "goals"), ({"horizon": 0}, "horizon"), ({"seed": None}, "seed")):
        with pytest.raises(ValueError, match=says):
            make_env("webshop", data=shop_data, **options)
    env = make_env("webshop", data=shop_data)
    for task in ("4", "-1", 4, "x", None, "1.5"):
        with pytest.raises(ValueError, match="webshop: "):
            env.reset(task)
    with pytest.raises(ValueError, match="no split"):
        tasks("webshop", "valid_seen", data=shop_data)


def test_a_hundred_thousand_products(tmp_path, monkeypatch):
    """The catalogue is read as a stream, its index is made once, and processes share it."""
    folder = tmp_path / "shop"
    write_catalogue(folder)
    with open(folder / "items_shuffle.json", "w") as file:
        file.write("[" + ",\n".join(json.dumps(p) for p in [DRESS, *map(filler, range(100_000)), DRESS]) + "]")
    catalogue = envs.Catalogue(str(folder))
    assert len(catalogue) == 100_001 and [catalogue.product(n)["asin"] for n in catalogue.search("thing 77777")][0] == "B000077777"
    assert len(catalogue.search("gadget")) == 50
    monkeypatch.setattr(envs.Catalogue, "build", lambda *_: pytest.fail("made again"))
    again = envs.Catalogue(str(folder))
    assert again.search("summer dress") == catalogue.search("summer dress") == [0]
    (folder / "items_human_ins.json").write_text("{ }  ")
    with pytest.raises(pytest.fail.Exception):
        envs.Catalogue(str(folder))  # other files, another index


def test_shop_prompts(shop_data):
    env = make_env("webshop", data=shop_data)
    episode = envs.ShopEpisode(*env.reset(goal_of(env, TASK)))
    task = env.goal["text"]
    for text in (episode.window_prompt(), episode.window_prompt(0), episode.full_prompt()):
        assert text.count(task) == 1 and all(part in text for part in ("What you see: 'Search'\n", "Commands on this page: ['search[<your query>]', 'click[search]']",
                                                                        envs.ANSWER))
    for action in ("search[dress]", "click[b00dress01]", "click[s]"):
        assert episode.accepts(action)
        obs, *_, info = env.step(action)
        episode.took(action, obs, info)
    assert not episode.accepts("click[m]") and not episode.accepts("dance") and episode.accepts("search[anything]")
    text = episode.window_prompt(2)
    assert text.count(task) == 1 and "Steps taken so far: 3." in text and "What you did: click[s]" in text and "What you did: search" not in text
    assert "What you see: 'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red | white' [SEP]" in text
    assert task not in episode.full_prompt() and envs.ANSWER not in episode.full_prompt() and "'click[buy now]'" in episode.full_prompt()
    assert "Steps taken" not in episode.window_prompt(0) and "Commands on this page: [" in text and "Other commands" not in episode.full_prompt()
    for letters, history in ((9000, True), (13000, False)):
        episode.obs = obs.replace("Acme", "A" * letters)
        assert ("Steps taken" in episode.window_prompt(2)) == history and task in episode.window_prompt(2)


LUCENE = {  # the first ten by Anserini 1.7.1 on WebShop's 1,000 products
    "4k uhd media player with 5ghz wifi": "B09NMZS7HK B08QSNM69H B01MQH5VGR B00R249C5G B09SZ4RMNY B09SWLPPVQ B09NDGV4PL B08D8726MN B09SJ5YGMZ B09MHLS36W",
    "women's faux fur lined winter jacket, x-large":
        "B09KP78G37 B07ZXBGDXF B09MSZ4VS8 B09C8YNWWB B09GLVMLMS B000J3HZXS B0957XW92M B09QQP3356 B09S3BN15C B09PLBDCBY",
    "100% vegan soy-free protein shake": "B07FYPSNH8 B08BPTT8MX B07FM9K5S3 B07HYF111T B08P28NXH3 B005P0T90C B08LQZ5BRC B089VWZB64 B09RFDP1C3 B07VQJM594",
    "sugar free sugar free candies for kids": "B09RLQR5NP B001EHF3KK B07HYF111T B08LQZ5BRC B095TRCDXW B017MOAUGA B09M4C31FL B094JTNPWK B08X6N3L2Z B07F1JDWJP",
    "usb-c charging cables 3.5 mm": "B07Z397262 B07H5GWRL4 B085VFMXMZ B09GRD2SK4 B09QQWRW2M B09J5HJ8DL B09GLVMLMS B09CPZH548 B0912H5LHP B08TGMZX1F",
    "organic hair growth serum\u2122 \u2605 rollers":
        "B09PY89B1S B09MDQ4HBT B08Q42DTN1 B09RFDP1C3 B008QA6YOC B09SHRV5JW B082WKKPDH B07CKTXS1J B09FYBZNQL B07K6TCDR9",
    "b07 stainless steel water bottles o'neil's":
        "B09B9QLDKD B07KY5X445 B09MM1S15K B0851Y9BDC B0892Y9F83 B07CXTNVRJ B08TGMZX1F B085LSKHM6 B09JNRTFGQ B087TR48KK"}


@needs_catalogue
@pytest.mark.parametrize("query", LUCENE)
def test_search_finds_what_lucene_finds(query):
    catalogue = envs.Catalogue(os.environ["WEBSHOP_DATA"])
    assert [catalogue.product(n)["asin"] for n in catalogue.search(query)[:10]] == LUCENE[query].split()


@needs_catalogue
def test_the_thousand_products():
    env = make_env("webshop")
    sizes = [len(env.goals[i]["options"]) for i in range(len(env.goals))]
    assert [sizes.count(n) for n in range(4)] == [185, 538, 4729, 1458] and len({env.goals[i]["asin"] for i in range(len(sizes))}) == 415
    assert len(make_env("webshop", goals="human").goals) == 13
    won = 0
    for i in range(500):
        env.reset(i)
        for action in env.expert() or []:
            *_, info = env.step(action)
        won += env.score == 1.0
    assert won == 480  # twenty of the first 500 goals cannot reach 1 by buying exactly what they ask for
    assert [len(tasks("webshop", s)) for s in ("train", "valid", "test", "test_500", "eval_1000", "train_rest")] == [4963, 966, 981, 500, 1000, 5410]


# ------------------------------------------------------------------------------------------ model and rollout


def random_model(architecture, seed=0, layers=2):
    """A random model of an architecture behind the tiny tokenizer, its weights wide enough to make choices sharp."""
    base = load("tiny", words=envs.words())
    config = dict(vocab_size=len(base.tokenizer) + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, tie_word_embeddings=seed % 2 == 0, initializer_range=0.3,
                  eos_token_id=base.tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config), dtype=torch.float32).eval()
    stops = (base.stop_ids[0], *range(40, 110))  # so that responses end at different times
    return dataclasses.replace(base, model=model, tau_v=20.0, stop_ids=stops)


ARCHITECTURES = ["qwen2", "qwen3", "llama"]
GAMES = envs.tasks("house", "train")[:7]


def play(lm, engine, context, temperature, max_new=9, horizon=6, seed=(3,), games=GAMES, sampler_options={}, **options):
    sampler = Sampler(lm, engine, context, max_new, temperature, **sampler_options)
    return rollout(sampler, games, envs.Pool("house", {"horizon": horizon}), seed=seed, **options), sampler


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kv_and_hf_play_the_same_games_and_agree_with_the_scoring_forward(architecture, context):
    lm = random_model(architecture, seed=len(architecture))
    for temperature in (0.0, 1.0):
        played = {engine: play(lm, engine, context, temperature)[0] for engine in ("hf", "kv")}
        assert [t.action_ids for t in played["hf"]] == [t.action_ids for t in played["kv"]]
        assert len({len(t.action_ids) for t in played["kv"]}) > 1  # rows were dropped at different times
        for turns in played.values():
            batch = make_batch(make_samples(turns, context))
            with torch.no_grad():
                logp, _, p_v, p_q = lm.score(batch)
            scored = [logp[s, a:b] for s, a, b in zip(batch.seq, batch.start, batch.end)]
            assert max((torch.tensor(t.logp) - x).abs().max() for t, x in zip(turns, scored)) < 1e-4
            torch.testing.assert_close(torch.tensor([t.v for t in turns]), lm.r_max * p_v, atol=1e-4, rtol=0)
            torch.testing.assert_close(torch.tensor([t.q for t in turns]), lm.r_max * p_q, atol=1e-4, rtol=0)


def test_sampling_depends_on_the_trajectory_alone():
    lm = random_model("qwen2", 1)
    together, _ = play(lm, "kv", "window", 1.0)
    alone, _ = play(lm, "kv", "window", 1.0, games=GAMES[4:5], trajs=[4])
    assert [t.action_ids for t in together if t.traj == 4] == [t.action_ids for t in alone]
    other, _ = play(lm, "kv", "window", 1.0, seed=(4,))
    assert [t.action_ids for t in together] != [t.action_ids for t in other]


def kill_now_and_then(pool, when):
    """Kills a worker right after some of the actions that are sent to it."""
    step, sent = pool.step, iter(range(10 ** 6))

    def step_and_kill(key, action):
        step(key, action)
        n = next(sent)
        if n in when:
            pool.procs[n % len(pool.procs)].kill()

    pool.step = step_and_kill


@pytest.mark.parametrize("context", ["window", "full"])
def test_who_answers_when_changes_nothing(context):
    """Rows refilled across games or not, workers or none, dying or slow: the same turns; with the same rows, the same bits."""
    lm = random_model("qwen3", 1)
    whole, _ = play(lm, "kv", context, 1.0)
    for rows in (1, 3, 99):
        some, sampler = play(lm, "kv", context, 1.0, rows=rows)
        assert [(t.traj, t.turn, t.action_ids, t.text, t.done) for t in some] == [(t.traj, t.turn, t.action_ids, t.text, t.done) for t in whole]
        torch.testing.assert_close(torch.tensor([(t.v, t.q) for t in some]), torch.tensor([(t.v, t.q) for t in whole]), atol=1e-4, rtol=0)
        assert len(sampler.rows.names) <= rows
    for rows, workers, when in ((3, 2, ()), (3, 2, {4, 11, 20}), (99, 1, {7})):
        with a_pool(workers, horizon=6) as pool:
            kill_now_and_then(pool, when)
            again = rollout(Sampler(lm, "kv", context, 9), GAMES, pool, seed=(3,), rows=rows)
        assert again == play(lm, "kv", context, 1.0, rows=rows)[0]


def test_positions_never_leave_the_model_and_sixteen_bits_are_read_alike():
    """Learned positions have an end; and V and Q come from hidden states, not from rounded logits, in every engine."""
    base = random_model("qwen2", 1)
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=600, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    learned = dataclasses.replace(base, model=AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), value_ids=(598, 599), stop_ids=(4,))
    with torch.no_grad():  # two large rows that are nearly the same: of rounded logits V would be off by 0.01 to 0.05
        plus, minus = base.value_ids
        base.model.lm_head.weight[minus] = 40 * base.model.lm_head.weight[plus]
        base.model.lm_head.weight[plus] = base.model.lm_head.weight[minus] * 1.01
    sixteen = dataclasses.replace(base, model=base.model.bfloat16())
    prompts, u = [[7] * 10, list(range(5, 29)), [9] * 3], torch.rand(3, 40, generator=torch.Generator().manual_seed(0)).numpy()
    for lm, near, near_logp in ((learned, 1e-4, 1e-4), (sixteen, 0.01, 0.1)):
        for engine in ("kv", "hf"):
            said = Sampler(lm, engine, max_new=40)(range(3), prompts, u)
            batch = make_batch([(p + r.ids, [(len(p), len(p) + len(r.ids))]) for p, r in zip(prompts, said)])
            with torch.no_grad():
                logp, _, p_v, p_q = lm.score(batch)
            torch.testing.assert_close(torch.tensor([(r.v, r.q) for r in said]), lm.r_max * torch.stack([p_v, p_q], 1), atol=near, rtol=0)
            assert all((torch.tensor(r.logp) - logp[i, len(p):len(p) + len(r.ids)]).abs().max() < near_logp for i, (p, r) in enumerate(zip(prompts, said)))


def test_nobody_waits_for_the_longest_response():
    lm = random_model("qwen2", 1)
    turns, sampler = play(lm, "kv", "window", 1.0, max_new=60, horizon=8)
    lengths = [[len(t.action_ids) for t in turns if t.turn == n] for n in range(8)]
    lockstep = sum(max(row) for row in lengths)
    busiest = max(sum(len(t.action_ids) + rollout_module.PATIENCE for t in turns if t.traj == n) for n in range(len(GAMES)))
    assert max(map(sum, zip(*lengths))) <= sampler.steps <= busiest + 8 < lockstep
    assert sampler.tokens_decoded == sampler.tokens_sampled  # a row that has ended is decoded no further
    turns, theirs = play(lm, "hf", "window", 1.0, max_new=60, horizon=8)
    assert theirs.steps == sum(max(len(t.action_ids) for t in turns if t.turn == n) for n in range(8)) and theirs.tokens_decoded > 1.3 * theirs.tokens_sampled


def test_a_conversation_outgrows_the_room_it_was_given_and_its_neighbours_move_up():
    """Sequences of very different lengths come, end and come back under the kv engine; hf has none of that machinery."""
    lm, rng = random_model("llama", 1), random.Random(0)
    kv, hf = Sampler(lm, "kv", "full", 12), Sampler(lm, "hf", "full", 12)
    talks = {name: [] for name in range(6)}
    for turn in range(5):
        names = [n for n in talks if rng.random() < 0.8] or [0]
        for n in names:
            talks[n] = talks[n] + [rng.randrange(120, 500) for _ in range(rng.choice([1, 5, 90]))]
        u = torch.rand(len(names), 12, generator=torch.Generator().manual_seed(turn)).numpy()
        ours, theirs = (s(names, [talks[n] for n in names], u) for s in (kv, hf))
        assert [r.ids for r in ours] == [r.ids for r in theirs]
        torch.testing.assert_close(torch.tensor([(r.v, r.q) for r in ours]), torch.tensor([(r.v, r.q) for r in theirs]), atol=1e-4, rtol=0)
        for n, r in zip(names, ours):
            talks[n] = talks[n] + r.ids
        if turn == 2:  # an episode ends; its row is used again
            kv.drop(0)
            talks[0] = []


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (5, 1)])
def test_attention_without_copies_is_attention(heads, kv_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, h, t, 8) for h, t in ((heads, 7), (kv_heads, 7), (kv_heads, 7)))
    wide = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
    causal = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7).tril().bool(), -INF)
    ragged = torch.zeros(3, 1, 7, 7).masked_fill(torch.rand(3, 1, 7, 7) < 0.4, -INF)
    ragged[..., 0] = 0
    for q, mask, plain in ((query, None, causal), (query, ragged, ragged), (query[:, :, :1], ragged[:, :, :1], ragged[:, :, :1])):
        scores = (q @ wide[0].transpose(2, 3)) * 0.3 + plain
        torch.testing.assert_close(rollout_module.attend(None, q, key, value, mask, scaling=0.3)[0], (scores.softmax(-1) @ wide[1]).transpose(1, 2))
    with pytest.raises(ValueError, match="softcap"):
        rollout_module.attend(None, query, key, value, None, softcap=30.0)


def same_tokens_and_values(one, other):
    assert [t.action_ids for t in one] == [t.action_ids for t in other]
    torch.testing.assert_close(torch.tensor([(t.v, t.q) for t in one]), torch.tensor([(t.v, t.q) for t in other]), atol=1e-4, rtol=0)


def test_compiled_the_same_is_sampled_and_scored(monkeypatch):
    lm = random_model("qwen2", 3, layers=1)
    for context in ("window", "full"):
        turns = [play(lm, "kv", context, 1.0, sampler_options={"compile": c})[0] for c in (False, True)]
        same_tokens_and_values(*turns)
    batch, scores = make_batch(make_samples(turns[0], "window")), []
    for compile, chunk in ((False, 10 ** 6), (True, 10 ** 6), (True, 7)):
        monkeypatch.setattr(type(lm), "chunk", chunk)
        scores.append(dataclasses.replace(lm, compile=compile).score(batch))
        lm.model.zero_grad()
        sum(x.sum() for x in scores[-1]).backward()
        scores[-1] += gradient(lm),
    for others in scores[1:]:
        torch.testing.assert_close(others, scores[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", ["window", "full"])
def test_buckets_and_late_looks_sample_the_same_tokens(context, monkeypatch):
    """What a GPU does beside the arithmetic: rows and lengths rounded up, idle rows decoded along, a look every 8 steps."""
    def replay_by_running(sampler, n, span):
        return types.SimpleNamespace(replay=lambda: sampler.decode_one_token(n, span))

    monkeypatch.setattr(Sampler, "capture", replay_by_running)
    lm, prepare = random_model("qwen2", 1), Sampler.prepare
    plain = [play(lm, "kv", context, 1.0, rows=rows)[0] for rows in (99, 5)]
    monkeypatch.setattr(Sampler, "prepare", lambda self, compile: (prepare(self, compile), vars(self).update(gpu=True, every=8)))
    for one, rows in zip(plain, (99, 5)):
        turns, sampler = play(lm, "kv", context, 1.0, rows=rows)
        assert len(sampler.graphs) > 1 and sampler.tokens_decoded > sampler.tokens_sampled
        same_tokens_and_values(one, turns)


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("compile", [False, True])
def test_captured_graphs_sample_the_same_tokens(gpu, context, compile):
    lm = random_model("qwen2", 1)
    on_cpu = play(lm, "kv", context, 1.0)[0]
    lm = dataclasses.replace(lm, model=lm.model.cuda())
    turns, sampler = play(lm, "kv", context, 1.0, sampler_options={"compile": compile})
    assert sampler.graphs
    same_tokens_and_values(on_cpu, turns)
    same_tokens_and_values(play(lm, "hf", context, 1.0)[0], turns)


@pytest.mark.parametrize("context", ["window", "full"])
def test_captured_graphs_in_16_bits_sample_what_scoring_finds(gpu, context):
    lm = random_model("qwen2", 1)
    lm = dataclasses.replace(lm, model=lm.model.cuda().bfloat16())
    turns, sampler = play(lm, "kv", context, 1.0)
    assert sampler.graphs
    batch = make_batch(make_samples(turns, context)).to(lm.device)
    with torch.no_grad():
        logp, _, p_v, p_q = lm.score(batch)
    sampled = torch.tensor([x for t in turns for x in t.logp], device=lm.device)
    assert (logp[batch.mask] - sampled).abs().max() < 0.1
    found = torch.tensor([(t.v, t.q) for t in turns], device=lm.device)
    torch.testing.assert_close(found, lm.r_max * torch.stack([p_v, p_q], 1), atol=0.05, rtol=0)


def test_the_least_time_is_counted_by_hand():
    lm = random_model("qwen2", 1)  # 2 layers, width 32, 4 heads of 8, 2 of them for K and V
    sampler, said = Sampler(lm), [types.SimpleNamespace(ids=[1] * 3), types.SimpleNamespace(ids=[1])]
    sampler.steps = 3
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 64 + 3 * 32 * 64 + 2 * 32  # q, o; k, v; their biases; the MLP; two norms
    body, head = 2 * layer + 32, 32 * lm.model.config.vocab_size
    prefill, decode = rollout_module.least_time(lm, sampler, [[1] * 10, [1] * 20], said, bandwidth=1.0, peak=1.0)
    assert prefill == 2 * body * 30 + 2 * (10 ** 2 + 20 ** 2) * 2 * 32  # attention: half of 4 T^2 a layer and unit of width
    assert decode == 4 * (3 * (body + head) + (11 + 12 + 13 + 21) * 2 * 2 * 16)


def test_full_context_encodes_every_token_once():
    lm = random_model("llama", 1)
    turns, sampler = play(lm, "kv", "full", 1.0)
    assert sampler.tokens_encoded == sum(len(t.prompt_ids) for t in turns)
    assert sampler.tokens_sampled == sum(len(t.action_ids) for t in turns)
    _, again = play(lm, "hf", "full", 1.0)
    assert again.tokens_encoded > 3 * sampler.tokens_encoded


def test_choose_draws_from_the_restricted_softmax():
    logits, value_ids = torch.tensor([[1.0, 9.0, 0.0, 9.0, -1.0]]), (1, 3)
    u = torch.linspace(0, 1, 20001)[:-1]
    token, logp = choose(logits.expand(len(u), -1), u, value_ids, 1.0)
    share = token.bincount(minlength=5) / len(u)
    torch.testing.assert_close(share, restricted_log_softmax(logits, value_ids)[0].exp(), atol=1e-4, rtol=0)
    torch.testing.assert_close(logp, restricted_log_softmax(logits, value_ids)[0][token])
    wide, u = 2 * torch.randn(40, 1301, generator=torch.Generator().manual_seed(0)), torch.rand(40, generator=torch.Generator().manual_seed(1))
    for z, x, t in zip(wide.tolist(), u.tolist(), choose(wide, u, (700, 1300), 0.7)[0].tolist()):  # over several blocks of words
        weight = [0.0 if i in (700, 1300) else math.exp(a / 0.7) for i, a in enumerate(z)]
        assert sum(weight[:t]) <= x * sum(weight) * (1 + 1e-6) and x * sum(weight) <= sum(weight[:t + 1]) * (1 + 1e-6)
    edge = torch.tensor([0.0, 1 - 2 ** -24, 1.0])
    assert not set(choose(torch.zeros(3, 100000), edge, (0, 99999), 1.0)[0].tolist()) & {0, 99999, 100000}
    assert choose(logits, u[:1], value_ids, 0.0)[0].item() == 0


def test_reserved_words_are_never_sampled_even_when_they_are_the_likeliest():
    lm = random_model("qwen2", 1)
    with torch.no_grad():
        lm.model.lm_head.weight[list(lm.value_ids)] = 3 * lm.model.lm_head.weight.abs().max()
    for engine in ("kv", "hf"):
        turns, _ = play(lm, engine, "window", 1.0, horizon=3)
        assert not set(lm.value_ids) & {i for t in turns for i in t.action_ids}


def test_a_token_after_a_boundary_changes_no_value_before_it():
    lm = random_model("qwen2", 2)
    ids = torch.randint(5, 500, (30,)).tolist()
    spans = [(8, 13), (20, 25)]
    before = lm.score(make_batch([(ids, spans)]))[2:]
    for changed in range(30):
        other = list(ids)
        other[changed] = 501
        after = lm.score(make_batch([(other, spans)]))[2:]
        for which, boundaries in ((0, [7, 19]), (1, [12, 24])):  # V before each response, Q after it
            for turn, boundary in enumerate(boundaries):
                same = torch.isclose(before[which][turn], after[which][turn], atol=1e-7, rtol=0).item()
                assert same == (changed > boundary), (changed, which, turn)


def test_the_separate_critic_values_a_token_before_it_is_said():
    lm = random_model("qwen2", 2)
    critic, ids, spans = Critic(lm), torch.randint(5, 500, (30,)).tolist(), [(8, 13), (20, 25)]
    torch.nn.init.normal_(critic.head.weight)
    before = critic(make_batch([(ids, spans)]))[0]
    for changed in range(30):
        after = critic(make_batch([(ids[:changed] + [501] + ids[changed + 1:], spans)]))[0]
        for at in (*range(8, 13), *range(20, 25)):
            assert torch.isclose(before[at], after[at], atol=1e-6, rtol=0).item() == (changed >= at), (changed, at)


def test_scoring_ignores_padding_order_and_company():
    lm = random_model("llama", 3)
    rng = random.Random(0)
    samples = []
    for n in (40, 9, 25, 17):
        ids = [rng.randrange(5, 500) for _ in range(n)]
        samples.append((ids, [(3, 6), (n - 2, n)]))
    logp, entropy, p_v, p_q = lm.score(make_batch(samples))
    for i, sample in enumerate(samples):
        alone = lm.score(make_batch([sample]))
        n = len(sample[0])
        torch.testing.assert_close(logp[i, :n], alone[0][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[i, :n], alone[1][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.stack([p_v, p_q])[:, 2 * i:2 * i + 2], torch.stack(alone[2:]), atol=1e-5, rtol=0)
        assert (logp[i, n:] == 0).all() and (logp[i][make_batch(samples).owner[i] < 0] == 0).all()
    with pytest.raises(ValueError, match="context"):
        make_batch([([1, 2, 3], [(0, 2)])])


def test_prompts_too_long_shorten_the_history_then_end_the_episode_then_complain():
    lm = random_model("qwen2", 1)
    free, _ = play(lm, "kv", "window", 1.0)
    longest = max(len(t.prompt_ids) for t in free)
    tight, _ = play(lm, "kv", "window", 1.0, max_prompt=longest - 10)
    assert max(len(t.prompt_ids) for t in tight) <= longest - 10 and not any(t.outgrown for t in tight)
    ended, _ = play(lm, "kv", "full", 1.0, max_context=90)
    last = [t for t in ended if t.done]
    assert len(last) == len(GAMES) and any(t.truncated and t.turn < 5 for t in last)
    assert all(t.outgrown == (t.turn < 5 and not t.won) for t in last) and not any(t.outgrown for t in free)
    with pytest.raises(ValueError, match="tokens"):
        play(lm, "kv", "window", 1.0, max_prompt=10)


@pytest.mark.parametrize("history", [0, 2])
def test_a_turn_is_what_the_game_showed_and_answered(history):
    """Every game once more, by hand: what the model saw, what it did, what came of it."""
    turns, _ = play(load(train.START["house"]), "kv", "window", 1.0, max_new=16, horizon=20, games=envs.tasks("house", "train")[:24], history=history)
    env, facts = make_env("house", horizon=20), set()
    for t in turns:
        if t.turn == 0:
            obs, info = env.reset(t.task)
            episode = Episode(obs, info)
        assert t.prompt == episode.window_prompt(history) and t.seen == obs
        action, valid = parse_action(t.text, env.fallback)
        assert (t.action, t.invalid, t.admissible) == (action, not valid, action in info["admissible"])
        obs, reward, won, truncated, info = env.step(action)
        assert (t.reward, t.done, t.truncated, t.won, t.score, t.category) == (reward, won or truncated, truncated, won, float(won), info["category"])
        episode.took(action, obs, info)
        facts |= {("won", t.won), ("admissible", t.admissible), ("truncated", t.truncated)}
    assert len(facts) == 6


def test_an_empty_response_is_an_invalid_turn_of_one_token():
    lm = random_model("qwen2", 1)
    with torch.no_grad():
        lm.model.lm_head.weight.zero_()
        lm.model.model.norm.weight.fill_(0)
    lm = dataclasses.replace(lm, stop_ids=tuple(range(5, 600)))  # nearly every token ends the response
    turns, _ = play(lm, "kv", "window", 1.0, horizon=2)
    empty = [t for t in turns if t.text == ""]
    assert empty and all(t.invalid and t.action == "" and len(t.action_ids) == 1 for t in empty)


def test_the_tiny_tokenizer_takes_any_string_and_survives_saving(tmp_path):
    lm = load("tiny", words=envs.words())
    text = "take apple 1 from cabinet 12 </action> Zebra #7 é 😀 \n <|end|>x"
    ids = lm.tokenizer(text, add_special_tokens=False).input_ids
    assert lm.tokenizer.convert_ids_to_tokens(ids)[:3] == ["take", "apple 1", "from"]
    for said in ("<think> take zebra </think> <action> take zebra 12 from cabinet 37 </action>", "go to toiletpaperhanger 1"):
        assert lm.text(lm.tokenizer(said, add_special_tokens=False).input_ids) == said  # words it does not know can be said as well
    assert max(ids) < len(lm.tokenizer) and not set(ids) & set(lm.value_ids)
    lm.save(tmp_path)
    again = load(str(tmp_path))
    assert again.value_ids == lm.value_ids and again.stop_ids == lm.stop_ids and again.chat.first(text) == lm.chat.first(text)
    torch.testing.assert_close(again.model.lm_head.weight, lm.model.lm_head.weight)
    sixteen = load("tiny", words=envs.words(), dtype=torch.bfloat16).model
    assert {p.dtype for p in sixteen.parameters()} == {torch.bfloat16}
    assert torch.equal(sixteen.model.rotary_emb.inv_freq, lm.model.model.rotary_emb.inv_freq)  # RoPE's frequencies keep all their digits
    one = load("tiny", seed=1, words=envs.words())
    assert not torch.equal(one.model.lm_head.weight, lm.model.lm_head.weight)
    assert readout_at_start(lm, [lm.chat.first("hello")]) == (0.0, 0.0, 0.0)


def test_reserved_words_are_padded_rows_else_unused_specials_else_named_ones():
    lm = load("tiny", words=envs.words())
    size = len(lm.tokenizer)
    assert reserve_value_ids(lm.tokenizer, size + 2, lm.stop_ids) == (size, size + 1)
    with pytest.raises(ValueError, match="--value_tokens"):
        reserve_value_ids(lm.tokenizer, size, lm.stop_ids)
    lm.tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra_0|>", "<|extra_1|>", "<|tool|>"]})
    chosen = reserve_value_ids(lm.tokenizer, len(lm.tokenizer), lm.stop_ids)
    assert {lm.tokenizer.convert_ids_to_tokens(i) for i in chosen} == {"<|extra_0|>", "<|extra_1|>"}
    assert named_value_ids(lm.tokenizer, ("<|tool|>", "5"), lm.stop_ids) == tuple(lm.tokenizer.convert_tokens_to_ids(["<|tool|>", "5"]))
    for names, complaint in ((("<|end|>", "<|tool|>"), "stop token"), (("nonsense-word", "<|tool|>"), "no token"), (("<|tool|>",) * 2, "different")):
        with pytest.raises(ValueError, match=complaint):
            named_value_ids(lm.tokenizer, names, lm.stop_ids)


def test_a_saturated_start_says_what_to_change():
    lm = random_model("qwen2", 1)
    prompts = [lm.chat.first(f"hello {n}") for n in range(4)]
    with pytest.raises(ValueError, match="--value_tokens.*--tau_v"):
        readout_at_start(dataclasses.replace(lm, tau_v=1e-6), prompts)


def test_the_conversation_grows_by_appending():
    lm = load("tiny", words=envs.words())
    stop = lm.stop_ids[0]
    said = lm.tokenizer("<action> look </action>", add_special_tokens=False).input_ids
    whole = lm.chat.encode([{"role": "user", "content": "one"}, {"role": "assistant", "content": "<action> look </action>"},
                            {"role": "user", "content": "two"}])
    assert lm.chat.first("one") + said + [stop] + lm.chat.later("two", stop) == whole
    assert lm.chat.first("one") + said + lm.chat.later("two", said[-1]) == whole  # cut off without a stop token: one is put in


def odd_model(architecture):
    """A model whose attention is not what the kv engine thinks it is."""
    lm = random_model("qwen2", 1)
    if architecture == "gemma2":
        config = AutoConfig.for_model("gemma2", vocab_size=700, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2, sliding_window=64)
        return dataclasses.replace(lm, model=AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    if architecture == "dynamic":
        lm.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    attention = lm.model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (lambda out, w: (out + 0.1 * kwargs["hidden_states"].mean(1, keepdim=True), w))(*forward(*args, **kwargs))
    return lm


def test_known_sizes_need_no_download():
    for name, millions in (("Qwen2.5-0.5B-Instruct", 494.0), ("Qwen/Qwen2.5-1.5B", 1543.7), ("Qwen2.5-3B", 3085.9), ("Qwen2.5-7B-Instruct", 7615.6)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_module.architecture(name))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    with pytest.raises(ValueError, match="cannot load"):
        load("nobody/nothing", random_weights=True, words=envs.words())


def test_models_that_cannot_serve_are_refused_with_a_reason(tmp_path):
    lm = random_model("qwen2", 1)
    lm.tokenizer.chat_template = None
    lm.save(tmp_path / "mute")
    (tmp_path / "empty").mkdir()
    for name, complaint in (("mute", "chat template"), ("empty", "cannot load")):
        with pytest.raises(ValueError, match=complaint):
            load(str(tmp_path / name))
    lm = random_model("qwen2", 1)
    lm.model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="Qwen2ForCausalLM, use --engine hf: .*sliding"):
        Sampler(lm)
    for architecture, says in (("gemma2", "attention with softcap"), ("odd", "hidden states differ"), ("dynamic", "longest sequence")):
        with pytest.raises(ValueError, match=says):
            Sampler(odd_model(architecture))
    with pytest.raises(ValueError, match="known: kv, hf"):
        Sampler(lm, "vllm")
    assert hub_id("Qwen2.5-1.5B-Instruct") == "Qwen/Qwen2.5-1.5B-Instruct" and hub_id("a/b") == "a/b"
    with pytest.raises(ValueError, match="begins with none of Qwen"):
        hub_id("no-such-model")


# ------------------------------------------------------------------------------------------------- train and eval


def small_config(tmp_path, *flags):
    return train.parse_config(["--tasks", "5", "--iterations", "2", "--horizon", "6", "--eval_games", "4", "--mini_batch", "12",
                               "--save_every", "1", "--out", str(tmp_path), *flags])


def prepared(tmp_path, *flags, sharp=True):
    """A config, a model whose readouts are not all 0, and one rollout's mini-batches ready for update()."""
    config = small_config(tmp_path, *flags)
    lm = random_model("qwen2", 1) if sharp else load("tiny", words=envs.words())
    turns = play(lm, "kv", config.context, 1.0)[0]
    for i, t in enumerate(turns):
        t.reward, t.invalid = 10.0 * (t.done and i % 2), i % 3 == 0
    batches = train.mini_batches(turns, config, 0)
    micros = [m for b in batches for m in b]
    train.score_old(lm, micros)
    train.score_reference(lm, micros)
    train.set_targets(micros, config, lm.device)
    return config, lm, turns, batches


def gradient(lm):
    return torch.cat([p.grad.flatten() for p in lm.model.parameters()])


class NoStep:
    def zero_grad(self, set_to_none):
        self.model.zero_grad()

    def __init__(self, lm):
        self.model, self.steps = lm.model, 0

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("context", ["window", "full"])
def test_the_first_step_is_reinforce(tmp_path, context):
    config, lm, turns, batches = prepared(tmp_path, "--context", context, "--c_v", "0", "--c_q", "0", "--beta", "0", "--c_h", "0", "--grad_clip", "1e9")
    info = train.update(lm, NoStep(lm), batches[0], config)
    assert info["ratio_max"] == 1 and info["clip_fraction"] == 0  # exactly: the old pass ran on the same padded batches
    found = gradient(lm)
    lm.model.zero_grad()
    tokens = sum(len(t.action_ids) for m in batches[0] for t in m.turns)
    for m in batches[0]:
        for n, t in enumerate(m.turns):
            row, start, end = m.batch.seq[n], m.batch.start[n], m.batch.end[n]
            logp = restricted_log_softmax(lm.model(m.batch.ids[row:row + 1]).logits[0, start - 1:end - 1], lm.value_ids)
            logp = logp.gather(1, torch.tensor(t.action_ids)[:, None])
            (-m.adv[row, start] * logp.sum() / tokens).backward()
    torch.testing.assert_close(found, gradient(lm), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("context", ["window", "full"])
def test_micro_batch_size_changes_no_gradient(tmp_path, context):
    found = []
    for budget in ("1", "300", "100000"):
        config, lm, turns, batches = prepared(tmp_path, "--context", context, "--tokens_per_micro_batch", budget, "--mini_batch", "1000")
        for m in batches[0]:  # off-policy, or clipping and the KL would have nothing to do
            m.logp_old, m.logp_ref = (x + 0.3 * torch.sin(m.batch.ids + shift) * m.batch.mask for x, shift in ((m.logp_old, 0), (m.logp_ref, 1)))
        train.update(lm, NoStep(lm), batches[0], config)
        found.append((len(batches[0]), gradient(lm)))
    assert found[0][0] > found[2][0]
    for _, other in found[1:]:
        torch.testing.assert_close(other, found[0][1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("context", ["window", "full"])
def test_an_update_is_the_papers_loss_of_the_models_own_logits(tmp_path, context):
    """Eq. 1 to 12 from logits to gradient, off-policy, with another number for every weight and clip."""
    numbers = {"clip": 0.15, "clip_v": 0.04, "clip_q": 0.08, "c_v": 0.7, "c_q": 0.3, "beta": 0.05, "c_h": 0.02, "gamma": 0.9, "lam": 0.8, "c_inv": 0.6, "grad_clip": 1e9}
    config, lm, _, batches = prepared(tmp_path, "--context", context, *[str(x) for name, value in numbers.items() for x in (f"--{name}", value)])
    micros = [m for b in batches for m in b]
    torch.manual_seed(0)
    for m in micros:  # as if another policy had played
        m.logp_old, m.logp_ref = (x + 0.3 * torch.randn_like(x) * m.batch.mask for x in (m.logp_old, m.logp_ref))
        m.p_v_old, m.p_q_old = (x + 0.1 * torch.randn_like(x) for x in (m.p_v_old, m.p_q_old))
    train.set_targets(micros, config, lm.device)
    info = train.update(lm, NoStep(lm), batches[0], config)
    found = gradient(lm)
    lm.model.zero_grad()

    game = {(t.traj, t.turn): (t.reward, float(t.done), 10 * v, 10 * q) for m in micros for t, v, q in zip(m.turns, m.p_v_old.tolist(), m.p_q_old.tolist())}
    wanted = {key: targets_by_recursion(game, key, 0.9, 0.8) for key in game}
    every = {(t.traj, t.turn): t.invalid for m in micros for t in m.turns}
    adv = advantages_by_loop(tensor([wanted[key][0] for key in every]), tensor(list(every.values())), 0.6, torch.ones(len(every), dtype=torch.bool), 1e-8)
    adv, (plus, minus), total = dict(zip(every, adv.tolist())), lm.value_ids, 0.0
    words = [i for i in range(lm.model.config.vocab_size) if i not in lm.value_ids]
    tokens, turns = sum(len(t.action_ids) for m in batches[0] for t in m.turns), sum(len(m.turns) for m in batches[0])

    def regression(p, old, y, clip):
        return torch.maximum((p - y) ** 2, (old + (p - old).clamp(-clip, clip) - y) ** 2) / 2

    for m in batches[0]:
        for n, t in enumerate(m.turns):
            row, start, end = m.batch.seq[n], m.batch.start[n], m.batch.end[n]
            z = lm.model(m.batch.ids[row:row + 1]).logits[0]
            logp = torch.log_softmax(z[start - 1:end - 1, words], -1)
            h, said = -(logp.exp() * logp).sum(-1), logp[range(len(t.action_ids)), [words.index(i) for i in t.action_ids]]
            rho, a, r = (said - m.logp_old[row, start:end]).exp(), adv[t.traj, t.turn], m.logp_ref[row, start:end] - said
            p_v, p_q = (((z[at, plus] - z[at, minus]) / lm.tau_v).clamp(-1, 1) for at in (start - 1, end - 1))
            _, y_v, y_q = wanted[t.traj, t.turn]
            loss = (0.05 * (r.exp() - 1 - r) - torch.minimum(rho * a, rho.clamp(0.85, 1.15) * a) - 0.02 * h).sum() / tokens
            loss = loss + (0.7 * regression(p_v, m.p_v_old[n], y_v / 10, 0.04) + 0.3 * regression(p_q, m.p_q_old[n], y_q / 10, 0.08)) / turns
            loss.backward()
            total += loss.item()
    assert info["loss"] == pytest.approx(total, abs=1e-5) and all(0 < info[k] < 1 for k in ("clip_fraction", "v_clip_fraction", "q_clip_fraction"))
    torch.testing.assert_close(found, gradient(lm), atol=1e-5, rtol=1e-3)


def test_the_reference_stays_where_the_policy_began(tmp_path):
    config, lm, _, batches = prepared(tmp_path, "--lr", "1e-2")
    learner = train.make_learner(lm, config)
    began = [p.clone() for p in lm.model.parameters()]
    train.update(lm, learner.optimizer, batches[0], config)
    assert all(a.equal(b) for a, b in zip(began, learner.reference.model.parameters()))
    assert not any(a.equal(b) for a, b in zip(began, lm.model.parameters()))


def test_imitation_is_cross_entropy_of_what_was_said_and_a_little_of_the_rest():
    lm = random_model("qwen2", 1)
    samples = [(torch.randint(5, 500, (n,)).tolist(), spans) for n, spans in ((30, [(8, 13), (20, 25)]), (12, [(9, 12)]))]
    wanted, words = 0.0, [i for i in range(lm.model.config.vocab_size) if i not in lm.value_ids]
    for ids, spans in samples:
        logp = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0][:, words], -1)
        for t in range(1, len(ids)):
            wanted -= (1.0 if any(a <= t < b for a, b in spans) else 0.3) * logp[t - 1, words.index(ids[t])].item()
    assert train.imitation_loss(lm, make_batch(samples), 0.3).item() == pytest.approx(wanted, rel=1e-5)


def test_a_slip_is_shown_with_what_should_have_been_done_or_is_not_imitated(tmp_path):
    config, lm, games = small_config(tmp_path, "--noise", "0.5", "--forget", "0"), load("tiny", words=envs.words()), envs.tasks("house", "train")[:4]
    say = "<think> {} </think> <action> {} </action>".format
    with contextlib.closing(Pool("house", {"horizon": 6})) as pool:
        for context in ("window", "full"):
            samples, shown, slips = train.demonstrations(lm, pool, games, 7, context, config), [], 0
            for task in games:
                turns = demonstrate(make_env("house", horizon=6), task, 7, 0.0, 0.5)
                slips += sum(label != executed for *_, label, executed in turns)
                shown.append([say(thought, label) for *_, thought, label, executed in turns if context == "window" or label == executed])
            said = [[lm.text(ids[a:b]) for a, b in spans] for ids, spans in samples]
            assert slips and [text for texts in said for text in texts] == [text for texts in shown for text in texts]
            assert len(samples) == (len(games) if context == "full" else sum(map(len, shown)))


def test_the_metrics_of_an_iteration():
    turns, sampler = play(load(train.START["house"]), "kv", "window", 1.0, max_new=16, horizon=20, games=envs.tasks("house", "train")[:24])
    torch.manual_seed(0)
    v, q, returns = values = torch.randn(3, len(turns))
    steps, sampled = [{"loss": 1.0, "ratio_max": 2.0, "skipped": 0}, {"loss": 4.0, "ratio_max": 1.5, "skipped": 1}], sampler.tokens_sampled
    line = train.summary(7, turns, values, steps, sampler, train.Clock(types.SimpleNamespace(seconds=0.0)), envs.CATEGORIES)
    share = lambda some, of: sum(some) / len(of)
    ends = [t for t in turns if t.done]
    assert (line["iteration"], line["episodes"], line["turns"], line["tokens_sampled"]) == (7, 24, len(turns), sum(len(t.action_ids) for t in turns)) and sampled
    assert line["success"] == share([t.won for t in ends], ends) == line["score"] and 0 < line["success"] < 1
    for name, some, of in (("valid_actions", [not t.invalid for t in turns], turns), ("admissible_actions", [t.admissible for t in turns], turns),
                           ("truncated", [t.truncated for t in ends], ends), ("outgrown", [t.outgrown for t in ends], ends)):
        assert line[name] == pytest.approx(share(some, of)), name
    for kind_of_task, column in envs.CATEGORIES.items():
        mine = [t.won for t in ends if t.category == kind_of_task]
        assert line["success_by_category"][column] == (share(mine, mine) if mine else None)
    assert (line["loss"], line["ratio_max"], line["skipped"]) == (2.5, 2.0, 1)
    assert line["return_mean"] == pytest.approx(returns.mean().item())
    for name, guess in (("v", v), ("q", q)):
        assert line[f"{name}_explained_variance"] == pytest.approx((1 - (returns - guess).var() / returns.var()).item(), abs=1e-5)


def test_every_turn_is_trained_once_in_mini_batches_of_the_asked_size(tmp_path):
    config, lm, turns, batches = prepared(tmp_path)
    seen = [(t.traj, t.turn) for b in batches for m in b for t in m.turns]
    assert sorted(seen) == sorted((t.traj, t.turn) for t in turns) and seen != sorted(seen)
    sizes = [sum(len(m.turns) for m in b) for b in batches]
    assert len(sizes) == math.ceil(len(turns) / 12) and max(sizes) - min(sizes) <= 1
    assert all(m.batch.ids.numel() <= max(config.tokens_per_micro_batch, m.batch.ids.shape[1]) for b in batches for m in b)


def test_no_mini_batch_is_empty_however_long_a_trajectory(tmp_path):
    for size in ("1", "3", "8"):
        config, lm, turns, batches = prepared(tmp_path, "--context", "full", "--mini_batch", size)
        assert all(batches) and sum(len(m.turns) for b in batches for m in b) == len(turns)


def test_value_rows_learn_from_values_alone(tmp_path):
    for flags, learns in ((("--c_v", "0", "--c_q", "0", "--beta", "1", "--c_h", "1"), False), (("--c_v", "1"), True)):
        config, lm, turns, batches = prepared(tmp_path, *flags)
        if lm.model.config.tie_word_embeddings:
            raise AssertionError("this test wants untied embeddings")
        train.update(lm, NoStep(lm), batches[0], config)
        assert (lm.model.lm_head.weight.grad[list(lm.value_ids)] != 0).any().item() == learns


def test_a_step_that_is_not_finite_is_not_taken(tmp_path):
    config, lm, turns, batches = prepared(tmp_path)
    batches[0][0].adv[0] = float("nan")
    optimizer = NoStep(lm)
    info = train.update(lm, optimizer, batches[0], config)
    assert info["skipped"] == 1 and optimizer.steps == 0
    assert train.update(lm, optimizer, batches[1], config)["skipped"] == 0 and optimizer.steps == 1


# ---- the algorithms SAPO is compared with

ALGOS = ["ppo", "grpo", "rloo", "gigpo", "empg"]


def with_advantages(tmp_path, *flags):
    """As prepared(), by the algorithm of the flags; turns of random returns, some of them invalid, some of one observation."""
    config = small_config(tmp_path, "--tasks", "6", "--group", "3", *flags)
    lm = random_model("qwen2", 1)
    turns = play(lm, "kv", config.context, 1.0)[0]
    rng = random.Random(0)
    for t in turns:
        t.reward, t.invalid, t.seen = rng.choice([0, 0, 10.0]) * t.done, rng.random() < 0.2, rng.choice("ab")
    batches = train.mini_batches(turns, config, 0)
    micros = [m for b in batches for m in b]
    learner = train.make_learner(lm, config)
    if learner.critic:
        torch.nn.init.normal_(learner.critic.head.weight, std=0.1)
    values, _ = learner.set_advantages(micros, config, train.Clock(types.SimpleNamespace(seconds=0.0)))
    return config, learner, batches, micros, values


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("algo", ["grpo", "rloo", "gigpo", "empg"])
def test_group_methods_take_their_advantages_from_the_estimators(tmp_path, algo, context):
    config, learner, _, micros, values = with_advantages(tmp_path, "--algo", algo, "--context", context)
    turns = [t for m in micros for t in m.turns]
    rows = [(t.traj, t.turn, t.traj // 3, "ab".index(t.seen), t.reward) for t in turns]
    entropy = [m.entropy[m.batch.owner == n].mean().item() for m in micros for n in range(len(m.turns))]
    expected = rloo_by_loop(rows) if algo == "rloo" else gigpo_by_loop(rows, 0.95, 1.0, True) if algo == "gigpo" else grpo_by_loop(rows)
    expected = empg_by_loop(expected, rows, entropy, 1.0, 1.0, 0.1) if algo == "empg" else expected
    found = [(m.adv[m.batch.owner == n].unique(), t) for m in micros for n, t in enumerate(m.turns)]
    for (adv, t), e in zip(found, expected):
        torch.testing.assert_close(adv, torch.tensor([e - 0.1 * t.invalid], dtype=torch.float32), atol=1e-5, rtol=1e-5)
    assert not any(m.adv[~m.batch.mask].any() or m.y_v.any() for m in micros) and learner.critic is None and config.c_v == config.c_q == 0


@pytest.mark.parametrize("context", ["window", "full"])
def test_ppo_whitens_gae_over_tokens_and_its_critic_regresses_on_the_return(tmp_path, context):
    config, learner, batches, micros, (v, q, _) = with_advantages(tmp_path, "--algo", "ppo", "--context", context)
    total = returns_by_loop([(t.traj, 0, 0, 0, t.reward) for m in micros for t in m.turns])
    adv, found = [], []
    for m in micros:
        values, target, counts = m.value, m.value_target, m.value_mask
        assert counts.equal(m.batch.mask) and values.abs().max() > 0
        for n, t in enumerate(m.turns):
            mine = m.batch.owner == n
            score = (total[t.traj] - 0.1 * t.invalid) / 10
            torch.testing.assert_close(target[mine], torch.full_like(target[mine], score), atol=1e-5, rtol=1e-5)  # gamma = lambda = 1
            adv += (score - values[mine]).tolist()
            found += m.adv[mine].tolist()
    mean = sum(adv) / len(adv)
    std = math.sqrt(sum((a - mean) ** 2 for a in adv) / len(adv))
    torch.testing.assert_close(torch.tensor(found), torch.tensor([(a - mean) / std for a in adv]), atol=1e-4, rtol=1e-4)
    assert len(v) == len(q) == sum(len(m.turns) for m in micros) and not q.any()
    before = [p.clone() for p in learner.lm.model.parameters()]
    train.set_lr(learner.critic_optimizer, config.critic_lr, config, 0, 100)
    losses = [train.update_critic(learner.critic, learner.critic_optimizer, batches[0], config)["loss_critic"] for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0] and all(a.equal(b) for a, b in zip(before, learner.lm.model.parameters()))


def test_the_critic_learns_alike_in_16_bits_and_without_kept_activations(tmp_path):
    config, learner, batches, _, _ = with_advantages(tmp_path, "--algo", "ppo")

    def gradient(critic, checkpointing=False):
        train.update_critic(critic, torch.optim.SGD(critic.parameters(), lr=0.0), batches[0], dataclasses.replace(config, checkpointing=checkpointing, grad_clip=1e9))
        return [p.grad.float() for p in critic.parameters()]

    usual = gradient(learner.critic)
    frugal = copy.deepcopy(learner.critic)
    frugal.body.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    frugal.body.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for a, b in zip(usual, gradient(frugal, checkpointing=True)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert len(calls) == 2 * len(batches[0])  # every layer once more, in the backward pass
    sixteen = model_module.Critic(dataclasses.replace(learner.lm, model=copy.deepcopy(learner.lm.model).bfloat16()))
    sixteen.body.load_state_dict(learner.critic.body.state_dict())
    sixteen.head.load_state_dict(learner.critic.head.state_dict())
    near = torch.cat([g.flatten() for g in gradient(sixteen)])
    assert {p.dtype for p in sixteen.body.parameters()} == {torch.bfloat16} and sixteen.head.weight.dtype == torch.float32
    assert torch.cosine_similarity(near, torch.cat([g.flatten() for g in usual]), 0) > 0.99


@pytest.mark.parametrize("context", ["window", "full"])
def test_sapo_with_a_separate_critic_has_its_targets_from_there(tmp_path, context):
    config, learner, _, micros, (v, q, _) = with_advantages(tmp_path, "--critic", "separate", "--context", context)
    turns = [t for m in micros for t in m.turns]
    values = torch.cat([m.value[m.batch.seq, m.batch.start] for m in micros])
    column = lambda name: torch.tensor([float(getattr(t, name)) for t in turns])
    adv, y_v, _ = turn_targets(column("traj"), column("turn"), column("reward"), column("done"), 10 * values, torch.zeros_like(values), gamma=0.95, lam=0.95)
    adv = normalize_advantages(adv, invalid=column("invalid"), c_inv=0.1)
    torch.testing.assert_close(v, 10 * values)
    for part, m in zip(adv.split([len(m.turns) for m in micros]), micros):
        torch.testing.assert_close(m.adv, m.batch.spread(part))
        assert m.value_mask.sum() == len(m.turns)  # only V before the response is trained
    torch.testing.assert_close(torch.cat([m.value_target[m.batch.seq, m.batch.start] for m in micros]), y_v / 10)


def test_without_a_learned_value_the_baseline_is_zero(tmp_path):
    config, learner, _, micros, (v, _, _) = with_advantages(tmp_path, "--c_v", "0", "--c_q", "0", "--group", "1")
    turns = [t for m in micros for t in m.turns]
    expected = [sum((0.95 * 0.95) ** (o.turn - t.turn) * o.reward for o in turns if o.traj == t.traj and o.turn >= t.turn) - 0.1 * t.invalid for t in turns]
    mean = sum(expected) / len(expected)
    std = math.sqrt(sum((x - mean) ** 2 for x in expected) / len(expected))
    found = [m.adv[m.batch.owner == n].unique().item() for m in micros for n in range(len(m.turns))]
    assert found == pytest.approx([(x - mean) / std for x in expected], abs=1e-4) and not v.any() and any(m.p_v_old.any() for m in micros)


@pytest.mark.parametrize("norm", ["turn", "token"])
def test_advantages_are_normalised_over_turns_or_tokens(tmp_path, norm):
    config, learner, _, micros, (v, _, _) = with_advantages(tmp_path, "--norm", norm, "--group", "1")
    turns = [t for m in micros for t in m.turns]
    column = lambda name: torch.tensor([float(getattr(t, name)) for t in turns], dtype=torch.float64)
    adv, _, _ = turn_targets(column("traj"), column("turn"), column("reward"), column("done"), v.double(), torch.zeros_like(v).double(), gamma=0.95, lam=0.95)
    adv = (adv - 0.1 * column("invalid")).tolist()
    counted = [a for a, t in zip(adv, turns) for _ in range(len(t.action_ids) if norm == "token" else 1)]
    mean = sum(counted) / len(counted)
    std = math.sqrt(sum((a - mean) ** 2 for a in counted) / len(counted))
    found = [m.adv[m.batch.owner == n].unique().item() for m in micros for n in range(len(m.turns))]
    assert found == pytest.approx([(a - mean) / std for a in adv], abs=1e-4)


def test_every_task_comes_group_times_and_settings_that_do_not_fit_are_refused(tmp_path):
    config = small_config(tmp_path, "--algo", "gigpo", "--tasks", "16")
    assert config.group == 8 and config.critic == "none" and config.c_v == 0
    drawn = train.pick_tasks(list("abcd"), config, 0) + train.pick_tasks(list("abcd"), config, 1)
    assert all(len(set(drawn[i:i + 8])) == 1 for i in range(0, 32, 8)) and sorted(set(drawn)) == list("abcd")
    assert small_config(tmp_path).group == 1 and small_config(tmp_path).critic == "shared" and small_config(tmp_path, "--algo", "ppo").critic == "separate"
    for flags, says in ((("--algo", "a2c"), "unknown --algo"), (("--algo", "grpo"), "multiple of --group"), (("--algo", "ppo", "--critic", "shared"), "goes with"),
                        (("--algo", "rloo", "--tasks", "8", "--critic", "separate"), "goes with"), (("--algo", "empg", "--tasks", "8", "--old", "rollout"), "entropies"),
                        (("--without_std",), "does nothing"), (("--algo", "ppo", "--norm", "token"), "does nothing"), (("--algo", "grpo", "--group", "1"), "does nothing"),
                        (("--algo", "ppo", "--lam", "0.9"), "--lam does nothing"), (("--algo", "rloo", "--tasks", "8", "--gamma", "1"), "--gamma does nothing"),
                        (("--algo", "gigpo", "--tasks", "8", "--lam", "0.9"), "--lam does nothing")):
        with pytest.raises(ValueError, match=says):
            small_config(tmp_path, *flags)


@pytest.mark.parametrize("flags", [["--algo", "gigpo"], ["--algo", "ppo", "--context", "full"]], ids=" ".join)
def test_rivals_on_two_ranks_and_after_a_kill_are_the_run_they_were(tmp_path, flags):
    """Groups are split over the ranks; a checkpoint holds the critic and its optimizer."""
    every = ["--tasks", "12", "--group", "3", "--horizon", "12", "--eval_games", "0", "--mini_batch", "12", "--lr_end", "1", *flags]
    run = lambda *more: subprocess.run([sys.executable, *more], cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    run("train.py", *every, "--iterations", "2", "--out", str(tmp_path / "one"))
    split = ["--shard"] if "ppo" in flags else []
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *every, *split, "--iterations", "2", "--out", str(tmp_path / "two"))
    read = lambda name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["success"] < 1 and abs(line["loss_policy"]) > 1e-6 for line in read("one"))  # or there would be nothing to compare
    for a, b in zip(read("one"), read("two")):
        for key in {"success", "loss_policy", "tokens_sampled", "loss", "kl", "grad_norm", "loss_critic", "grad_norm_critic"} & set(a):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), key
    run("train.py", *every, "--iterations", "1", "--out", str(tmp_path / "cut"))
    run("train.py", *every, "--iterations", "2", "--out", str(tmp_path / "cut"), "--resume")
    for file in ["model.safetensors", "critic.pt"]:
        paths = [tmp_path / name / "checkpoint" / file for name in ("one", "cut")]
        assert file == "critic.pt" and "gigpo" in flags or paths[0].read_bytes() == paths[1].read_bytes()


def test_the_learning_rate_rises_over_steps_and_falls_over_iterations(tmp_path):
    config = small_config(tmp_path, "--lr", "1", "--lr_rise", "4", "--lr_end", "0.5", "--iterations", "10")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    found = []
    for iteration, step in ((0, 0), (0, 3), (0, 99), (5, 99), (9, 99)):
        train.set_lr(optimizer, config.lr, config, iteration, step)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.25, 1.0, 1.0, 0.75, 0.55])


def test_every_game_comes_once_before_any_comes_twice(tmp_path):
    config = small_config(tmp_path)
    ids = list("abcdefghijkl")
    drawn = [g for i in range(12) for g in train.pick_tasks(ids, config, i)]
    assert len(drawn) == 60 and all(sorted(drawn[i:i + 12]) == ids for i in range(0, 60, 12)) and drawn[:12] != drawn[12:24]


KEYS = """iteration episodes success success_by_category turns tokens_encoded tokens_sampled valid_actions loss loss_policy loss_v loss_q kl
entropy clip_fraction ratio_max v_explained_variance q_explained_variance v_saturated grad_norm time_rollout time_env time_old time_ref
time_update time_total""".split()


def run_main(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    module.main()


def check_run(folder, iterations=2):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(iterations))
    for line in lines:
        assert set(KEYS) <= set(line) and all(math.isfinite(x) for x in line.values() if isinstance(x, (int, float)))
    result = json.loads((folder / "eval.json").read_text())
    assert 0 <= result["success_before"] <= 1 and 0 <= result["success"] <= 1 and result["success_by_category"]
    assert list((folder / "transcripts").iterdir()) and ">>>" in next((folder / "transcripts").iterdir()).read_text()
    assert (folder / "curves.png").stat().st_size > 5000 and (folder / "checkpoint").is_dir() and (folder / "final" / "model.safetensors").is_file()
    return lines, result


@pytest.mark.parametrize("flags", [[], ["--context", "full", "--engine", "hf"], ["--model", "tiny", "--warmup", "3"]])
def test_training_leaves_everything_it_promises_and_eval_reads_it(tmp_path, monkeypatch, capsys, flags):
    small = ["--tasks", 5, "--iterations", 2, "--horizon", 6, "--eval_games", 6, "--save_every", 1, "--out", tmp_path / "run"]
    run_main(train, monkeypatch, *small, *flags)
    check_run(tmp_path / "run")
    assert "before SAPO" in capsys.readouterr().out
    run_main(evaluation, monkeypatch, "--model", tmp_path / "run", "--limit", 9, "--repeats", 2, "--temperature", 1)
    report = json.loads((tmp_path / "run" / "eval-test.json").read_text())
    episodes = [json.loads(line) for line in (tmp_path / "run" / "eval-test.jsonl").read_text().splitlines()]
    assert report["n"] == 18 == len(episodes) and len({e["task"] for e in episodes}) == 9 and all(e["turns"] <= 6 for e in episodes)
    assert "Pick2" in capsys.readouterr().out
    run_main(evaluation, monkeypatch, "--plot", tmp_path / "run", tmp_path / "run", "--out", tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 5000
    run_main(evaluation, monkeypatch, "--model", tmp_path / "run", "--limit", 6, "--out", tmp_path / "again.json")  # the final weights in the run's own setting
    episodes, again = ([json.loads(line) for line in path.read_text().splitlines()] for path in (tmp_path / "run" / "eval.jsonl", tmp_path / "again.jsonl"))
    after = [e for e in episodes if e["when"] == "after" and e["temperature"] == 0.4]
    assert [(e["task"], e["responses"]) for e in again] == [(e["task"], e["responses"]) for e in after] and len(after) == 6
    assert (tmp_path / "run" / "start").is_dir() == ("--warmup" in flags)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run_main(train, monkeypatch, "--tasks", 5, "--iterations", 1, "--horizon", 2, "--eval_games", 0, "--out", tmp_path / "run")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == metrics != (tmp_path / "run" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("context", ["window", "full"])
def test_training_and_evaluating_in_the_shop(tmp_path, monkeypatch, capsys, context):
    products = [DRESS | {"asin": f"B{n:09d}"} for n in range(30)]
    about = {p["asin"]: {"attributes": ["airy"], "instruction": "Find me x", "instruction_attributes": ["airy"]} for p in products}
    data = write_catalogue(tmp_path / "shop", products, about, {p["asin"]: [{"instruction": "x", "instruction_attributes": ["y"], "instruction_options": []}] for p in products})
    flags = ["--env", "webshop", "--data", data, "--horizon", 3, "--out", tmp_path / "run"]
    run_main(train, monkeypatch, "--tasks", 3, "--iterations", 2, "--eval_games", 2, "--workers", 0, "--context", context, *flags)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(0 <= line["score"] <= 1 and set(line["success_by_category"]) == set(envs.SHELVES.values()) for line in lines)
    assert re.search(r"Score +Success +n.*\nbefore SAPO, T = 0.4 +\d+\.\d ± +\d+\.\d +\d+\.\d ± +\d+\.\d +2\n", capsys.readouterr().out)
    run_main(evaluation, monkeypatch, "--model", tmp_path / "run", "--limit", 2, "--workers", 1)
    report = json.loads((tmp_path / "run" / "eval-test.json").read_text())
    assert report["n"] == 2 and report["score"] == report["success"] == 0 and re.search(r"Score +Success", capsys.readouterr().out)
    run_main(evaluation, monkeypatch, "--model", tmp_path / "run", "--limit", 2, "--workers", 0, "--goals", "human", "--split", "test_500")
    assert json.loads((tmp_path / "run" / "eval-test_500-human.json").read_text())["goals"] == "human"


def test_scores_reach_the_records_and_the_report(tmp_path, monkeypatch):
    """A model that says what the expert does, and one that buys at once."""
    data = write_catalogue(tmp_path / "shop", None, {"B00DRESS01": {"attributes": ["airy"], "instruction": "Find me airy dresses", "instruction_attributes": ["airy"]}})
    env = make_env("webshop", data=data)
    task = goal_of(env, TASK)
    env.reset(task)
    plans = {True: env.expert(), False: ["search[dress]", "click[b00dress01]", "click[buy now]"]}
    for knows, plan in plans.items():
        said = iter(plan)
        monkeypatch.setattr(rollout_module.Play, "speak", lambda self, response, lm, fallback: (
            setattr(self, "said", (response, "", next(said), True)), self.said[2])[1])
        pool = Pool("webshop", {"data": data})
        record, = evaluation.play(Sampler(random_model("qwen2"), "kv", "window", 4), [str(task)], pool, max_prompt=4096, quiet=True)
        assert (record["won"], record["score"], record["category"], record["turns"]) == (knows, 1.0 if knows else 0.5, "Fashion", len(plan))
        assert evaluation.report([record])["score"] == record["score"]


def test_the_same_seed_trains_the_same_model(tmp_path, monkeypatch):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run_main(train, monkeypatch, "--tasks", 4, "--iterations", 1, "--horizon", 4, "--eval_games", 0, "--seed", seed, "--out", tmp_path / name)
    a, b, c = ((tmp_path / name / "final" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_two_ranks_train_as_one_does(tmp_path):
    """The same games, the same random numbers, global statistics and denominators: what differs is rounding."""
    flags = ["train.py", "--tasks", "5", "--iterations", "2", "--horizon", "6", "--eval_games", "5", "--mini_batch", "12", "--save_every", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *flags, "--out", str(tmp_path / "1")], cwd=HERE, env=environment, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *flags, "--out", str(tmp_path / "2")],
                   cwd=HERE, env=environment, check=True, capture_output=True)
    (one, _), (two, _) = (check_run(tmp_path / n) for n in "12")
    for a, b in zip(one, two):
        for key in ("success", "turns", "tokens_sampled", "loss", "loss_v", "kl", "entropy", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


# ------------------------------------------------------------------------------------------------- learner and survival


def test_logits_exist_a_chunk_at_a_time_and_change_nothing(tmp_path, monkeypatch):
    found = []
    for chunk in (10 ** 6, 7):
        monkeypatch.setattr(type(load("tiny", words=envs.words())), "chunk", chunk)
        config, lm, turns, batches = prepared(tmp_path, "--mini_batch", "1000", "--tokens_per_micro_batch", "100000")
        rows = []
        lm.model.get_output_embeddings().register_forward_hook(lambda head, hidden, logits: rows.append(len(*hidden)))
        train.update(lm, NoStep(lm), batches[0], config)
        found.append((max(rows), gradient(lm)))
    assert found[1][0] == 7 < found[0][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-5)


def test_recomputed_activations_change_no_gradient(tmp_path):
    found = []
    for flags in ((), ("--checkpointing",)):
        config, lm, turns, batches = prepared(tmp_path, *flags)
        if flags:
            lm.model.gradient_checkpointing_enable({"use_reentrant": False})
        calls = []
        lm.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        train.update(lm, NoStep(lm), batches[0], config)
        assert len(calls) == (2 if flags else 1) * len(batches[0])
        found.append(gradient(lm))
        assert not lm.model.training
    torch.testing.assert_close(*found, atol=1e-7, rtol=1e-5)


def test_the_samplers_own_statistics_are_those_of_the_pass(tmp_path):
    for context in ("window", "full"):
        config, lm, turns, batches = prepared(tmp_path, "--context", context)
        micros = [m for b in batches for m in b]
        recomputed = [(m.logp_old, m.p_v_old, m.p_q_old) for m in micros]
        assert 0 < train.score_old(lm, micros, "rollout") < 1e-4
        for m, old in zip(micros, recomputed):
            for ours, theirs in zip((m.logp_old, m.p_v_old, m.p_q_old), old):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
            assert (m.logp_old[~m.batch.mask] == 0).all()


def steps_of(optimizer, p, gradients):
    for g in gradients:
        p.grad = g.to(p.dtype)
        optimizer.step()
    return p.detach().clone()


def test_adamw_is_adamw():
    torch.manual_seed(0)
    start, gradients = torch.randn(50), [torch.randn(50) * 10 ** torch.randn(50) for _ in range(20)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    a = steps_of(train.AdamW([ours], lr=1e-2, weight_decay=0.1), ours, gradients)
    b = steps_of(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1), theirs, gradients)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_masters_learn_at_a_rate_at_which_sixteen_bits_stand_still(moments):
    torch.manual_seed(0)
    start, gradients = torch.randn(2000).bfloat16(), [torch.randn(2000) + 1 for _ in range(300)]
    alone, ours = (torch.nn.Parameter(start.clone()) for _ in range(2))
    assert (steps_of(torch.optim.AdamW([alone], lr=1e-6, weight_decay=0), alone, gradients) == start)[start.abs() > 0.05].all()
    optimizer = train.AdamW([ours], lr=1e-6, weight_decay=0, moments=moments)
    steps_of(optimizer, ours, gradients)
    state, exact = optimizer.state[ours], torch.nn.Parameter(start.float())
    steps_of(torch.optim.AdamW([exact], lr=1e-6, weight_decay=0), exact, [g.bfloat16().float() for g in gradients])
    assert state["m"].dtype == moments and torch.equal(ours, state["master"].bfloat16())
    moved, wanted = state["master"] - start.float(), exact.detach() - start.float()
    if moments == torch.float32:
        torch.testing.assert_close(moved, wanted, atol=1e-7, rtol=1e-3)
    else:  # rounded at random: right on average, where rounding to the nearest would stop v far from its value
        assert moved.mean().item() == pytest.approx(wanted.mean().item(), rel=0.01) and ((moved - wanted).norm() / wanted.norm()) < 0.05
    assert wanted.abs().mean() > 1e-4


SMALL = ["--tasks", "4", "--iterations", "4", "--horizon", "4", "--eval_games", "2", "--mini_batch", "8"]


def outcome(folder):
    """What a run ended with: weights and metrics, without the seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "eval.json").read_text())
    return (folder / "final" / "model.safetensors").read_bytes(), [{k: v for k, v in line.items() if not k.startswith("time_")} for line in lines], result


class Alone:
    """train.py in a process of its own."""

    def __init__(self, *flags):
        self.process = SERVER.Process(target=self.main, args=(["train.py", *map(str, flags)],))
        self.process.start()

    @staticmethod
    def main(argv):
        torch.set_num_threads(1)
        sys.argv, sys.stdout, sys.stderr = argv, open(os.devnull, "w"), open(os.devnull, "w")
        train.main()

    def running(self):
        return self.process.is_alive()

    def kill(self):
        self.process.kill()
        self.process.join()

    def finish(self):
        self.process.join(300)
        assert self.process.exitcode == 0


class UnderTorchrun:
    """Two ranks of train.py."""

    def __init__(self, *flags):
        self.process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *map(str, flags)],
                                        cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def running(self):
        return self.process.poll() is None

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self):
        said = self.process.communicate(timeout=300)[0]
        assert self.process.returncode == 0, said


@pytest.mark.parametrize("run, kills, flags", [(Alone, (0, 1, 1, 2, 3), []), (UnderTorchrun, (2,), "--shard --context full --old rollout --epochs 2".split())])
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path, run, kills, flags):
    run(*SMALL, *flags, "--out", tmp_path / "whole").finish()
    rng, metrics = random.Random(len(kills)), tmp_path / "killed" / "metrics.jsonl"
    for n, lines in enumerate(kills):  # killed after so many iterations, somewhere in the next
        victim = run(*SMALL, *flags, "--out", tmp_path / "killed", *["--resume"] * (n > 0))
        while victim.running() and not (metrics.is_file() and len(metrics.read_text().splitlines()) >= lines):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        victim.kill()
    done = max(json.loads((path / "progress.json").read_text())["iteration"] for path in (tmp_path / "killed").glob("checkpoint*") if train.is_whole(path))
    kept = metrics.read_text().splitlines()[:done]
    run("--resume", "--out", tmp_path / "killed").finish()
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert done and metrics.read_text().splitlines()[:done] == kept  # with their seconds: they were not run again


def test_at_every_moment_of_writing_a_whole_folder_can_be_found(tmp_path, monkeypatch):
    """A kill is played by an error at the n-th touch of the disk; what is found afterwards is the old content or the new, never neither."""
    class Kill(BaseException):
        pass

    def fill(text):
        return lambda folder: [open(os.path.join(folder, name), "w").write(text) for name in "ab"]

    path, said = str(tmp_path / "checkpoint"), []
    for n in range(1, 40):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        train.write_beside(path, fill("old"))
        left = [n]

        def mortal(call):
            def touch(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise Kill
                return call(*args, **kwargs)
            return touch

        with monkeypatch.context() as patch:
            for where, name in ((os, "rename"), (os, "makedirs"), (shutil, "rmtree"), (os.path, "getsize"), (json, "dump")):
                patch.setattr(where, name, mortal(getattr(where, name)))
            try:
                train.write_beside(path, fill("new"))
            except Kill:
                pass
        assert train.newest_whole(path, said.append) and {open(f"{path}/{name}").read() for name in "ab"} in ({"old"}, {"new"})
        assert os.listdir(tmp_path) == ["checkpoint"]
        train.write_beside(path, fill("newer"))
        assert train.is_whole(path) and open(f"{path}/a").read() == "newer"
    assert left[0] > 0 and any("torn" in s for s in said)
    with open(f"{path}/b", "w"):
        pass  # shortened
    assert not train.newest_whole(path, said.append)


def update_of_a_rank(rank, size, uneven, context, out):
    lm, share = random_model("qwen2", 1), range(rank, 5, size) if not uneven else range(5) if rank == 0 else []
    config = train.parse_config(["--mini_batch", "1000", "--tokens_per_micro_batch", "300", "--context", context, "--c_inv", "0.5"])
    turns = play(lm, "kv", context, 1.0, games=[GAMES[i] for i in share], trajs=share)[0] if share else []
    for t in turns:
        t.reward, t.invalid = 10.0 * (t.done and t.traj % 2), t.turn % 3 == 0
    batch, = train.mini_batches(turns, config, 0)
    train.score_old(lm, batch)
    for m in batch:  # off-policy, or nothing would be clipped
        m.logp_old, m.p_v_old, m.p_q_old = m.logp_old + 0.3 * m.batch.mask, m.p_v_old + 0.1, m.p_q_old - 0.1
        m.logp_ref = m.logp_old - 0.1 * m.batch.mask
    train.set_targets(batch, config, lm.device)
    info = train.update(lm, NoStep(lm), batch, config)
    if rank == 0:
        torch.save((gradient(lm), info), out)


@pytest.mark.parametrize("context", ["window", "full"])
def test_any_number_of_ranks_has_the_gradient_of_one(tmp_path, context):
    """Unequal shares; and all turns on one rank, none on the others."""
    results = []
    for size, uneven in ((1, False), (2, False), (3, False), (3, True)):
        out = tmp_path / f"{size}{uneven}"
        on_ranks(update_of_a_rank, size, tmp_path / f"meet{size}{uneven}", size, uneven, context, out)
        results.append(torch.load(out))
    for gradients, info in results[1:]:
        assert (gradients - results[0][0]).norm() < 1e-5 * results[0][0].norm()
        assert info == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)


def test_memory_is_computed_from_the_architecture_and_refused_in_time(tmp_path, monkeypatch):
    config = small_config(tmp_path, "--model", "Qwen2.5-7B", "--dtype", "bfloat16", "--moments", "bfloat16", "--checkpointing")
    needed = train.memory_needed(config, model_module.architecture("Qwen2.5-7B"))
    assert sum(needed[k] for k in ("weights", "gradients", "master weights", "moments")) / 1e9 == pytest.approx(91, abs=1)  # as published for H200
    assert needed["reference"] / 1e9 == pytest.approx(15, abs=0.5) and needed["activations of a micro-batch"] / 1e9 < 10
    lm = random_model("qwen2", 1)
    needed = train.memory_needed(small_config(tmp_path), lm.model.config)
    real = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    assert needed["weights"] == needed["gradients"] == needed["reference"] == real and needed["moments"] == 2 * real and not needed["master weights"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=80e9))
    with pytest.raises(ValueError, match="needs 1.. GB and the GPU has 80"):
        train.check_memory(config, print)


def test_the_bench_prints_the_runtime_table(monkeypatch, capsys):
    for context in ("window", "full"):
        run_main(train, monkeypatch, "--bench", "--tasks", 3, "--turns", 2, "--prompt", 20, "--response", 5, "--repeats", 1, "--context", context)
        said = capsys.readouterr().out
        assert all(re.search(rf"^{name} +[\d.]+ s", said, re.M) for name in ("rollout", "old", "ref", "update", "after rollout")) and "times as fast" in said


def test_the_bench_puts_ppo_beside_sapo(monkeypatch, capsys, tmp_path):
    run_main(train, monkeypatch, "--bench", "--ppo", "--tasks", 3, "--turns", 2, "--prompt", 20, "--response", 5, "--repeats", 2, "--out", tmp_path)
    said, seconds = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())["seconds"]
    after = {algo: sum(times.values()) - times["rollout"] for algo, times in seconds.items()}
    printed = re.search(r"^after rollout +[\d.]+ s +[\d.]+ s +sapo / ppo ([\d.]+)$", said, re.M)
    assert float(printed[1]) == pytest.approx(after["sapo"] / after["ppo"], abs=5e-4) and seconds["sapo"]["rollout"] == seconds["ppo"]["rollout"]
    passes = {algo: sum(train.PHASES[phase] for phase, spent in times.items() if spent) for algo, times in seconds.items()}
    assert passes == {"sapo": 5, "ppo": 9}  # by count: how long they take is a matter of the machine


def test_what_must_not_be_interrupted_is_not():
    seen, before = [], signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    with pytest.raises(KeyboardInterrupt):
        with train.uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("done")
    assert seen == ["done"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        with train.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("not reached")
    assert seen == ["done"]


def test_a_resumed_run_is_the_run_it_was(tmp_path, monkeypatch):
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--lr", 1e-4, "--out", tmp_path / "run")
    with pytest.raises(SystemExit, match="another --out"):
        run_main(train, monkeypatch, "--model", tmp_path / "run" / "final", "--out", tmp_path / "run")
    with pytest.raises(SystemExit, match="--lr is 0.0001 there"):
        run_main(train, monkeypatch, "--resume", "--out", tmp_path / "run", "--lr", 2e-4)
    run_main(train, monkeypatch, "--resume", "--out", tmp_path / "run", "--iterations", 2, "--rows", 2)
    lines = [json.loads(line)["iteration"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1] and json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 1e-4
    with pytest.raises(SystemExit, match="there is no run in"):
        run_main(train, monkeypatch, "--resume", "--out", tmp_path / "nwe")
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--out", tmp_path / "new", "--resume")  # nothing there: from the beginning
    assert (tmp_path / "new" / "final").is_dir()


def test_five_steps_in_a_row_that_are_not_finite_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "normalize_advantages", lambda adv, **_: adv * NAN)
    with pytest.raises(SystemExit, match="five steps in a row"):
        run_main(train, monkeypatch, *SMALL, "--mini_batch", 3, "--out", tmp_path / "run")


@pytest.mark.parametrize("argv, complaint", [
    (["--shard"], "torchrun"), (["--old", "never"], "known: recompute, rollout"), (["--dtype", "int8"], "known: float32, bfloat16"),
    (["--env", "hose"], "known: house, alfworld"), (["--tasks", "0"], "--tasks must be at least 1"), (["--horizon", "0"], "--horizon must be at least 1"),
    (["--model", "no-such-model"], "begins with none of"), (["--model", "nobody/nothing"], "cannot load model"), (["--engine", "vllm"], "known: kv, hf"), (["--context", "half"], "known: window, full"),
    pytest.param(["--env", "alfworld", "--data", "nowhere"], "alfworld-download", marks=needs_package), (["--places", "2"], "places must be at least 5"),
    (["--max_new", "20000", "--warmup", "0"], "longer context"), (["--value_tokens", "a b c", "d"], "no token"), (["--value_tokens", "77", "99999"], "no such row"),
    (["--algo", "grpo", "--c_v", "0.3"], "there are none"), (["--lr", "nan"], "--lr must be")])
def test_mistakes_on_the_command_line_get_one_clear_line(tmp_path, monkeypatch, argv, complaint):
    with pytest.raises(SystemExit) as stop:
        run_main(train, monkeypatch, "--out", tmp_path / "run", *argv)
    assert complaint in str(stop.value) and "\n" not in str(stop.value)


def test_unknown_flags_and_splits_are_refused(tmp_path, monkeypatch, capsys):
    for module in (train, evaluation):
        with pytest.raises(SystemExit):
            run_main(module, monkeypatch, "--learning_rate", "1")
        assert "--learning_rate" in capsys.readouterr().err
    for argv, complaint in ((["--model", "tiny", "--split", "dev"], "known: train, test"), ([], "--model is missing"), (["--plot", tmp_path], "none of these"),
                            (["--model", tmp_path], "cannot load"), (["--model", "tiny", "--env", "kitchen"], "known: house")):
        with pytest.raises(SystemExit) as stop:
            run_main(evaluation, monkeypatch, *argv)
        assert complaint in str(stop.value)


def test_intervals_and_tables():
    assert evaluation.wilson(0, 0) == (0.0, 1.0) and evaluation.wilson(10, 10)[1] == 1.0 and evaluation.wilson(10, 10)[0] == pytest.approx(0.7225, abs=1e-3)
    assert evaluation.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)
    rows = [{"task": str(i), "category": c, "won": i % 2 == 0, "score": i / 2, "turns": 3} for i, c in enumerate(["Pick", "Pick", "Look"])]
    report = evaluation.report(rows)
    assert report["score"] == 0.5 and report["score_half"] == pytest.approx(1.96 * (1 / 6) ** 0.5 / 3 ** 0.5)
    assert "50.0 ± 46.2    66.7" in evaluation.table({"x": report}, envs.WebShop) and "Pick2" in evaluation.table({"x": report}, envs.House)
    assert report["success"] == pytest.approx(2 / 3) and report["by_category"]["Pick"]["success"] == 0.5 and "Cool" not in report["by_category"]
    assert evaluation.spaced(list(range(10)), 3) == [0, 3, 6] and evaluation.spaced([1, 2], 0) == [1, 2]
    rows = lambda wins: [{"task": str(i), "won": bool(w)} for i, game in enumerate(wins) for w in game]
    rng = random.Random(0)
    assert evaluation.independent(rows([[w] * 10 for w in (0, 1, 1, 0, 1)])) == pytest.approx(4)  # the same again and again: of 5 games, less one degree of freedom
    assert 150 < evaluation.independent(rows([[rng.random() < 0.5 for _ in range(10)] for _ in range(40)])) <= 400  # nothing to do with the game
    assert evaluation.independent(rows([[1], [0], [1]])) == 3 and evaluation.independent(rows([[0, 0], [0, 0]])) == 2 and evaluation.independent([]) == 0


def a_run(folder, success, seconds, env="house", **config):
    """The files of a finished run as train.py leaves them."""
    folder.mkdir()
    base = {"model": "tiny", "env": env, "algo": "sapo", "critic": "shared", "c_v": 0.5, "c_q": 0.25, "lam": 0.95, "seed": 0, "out": str(folder)}
    (folder / "config.json").write_text(json.dumps(base | config))
    line = {"time_total": seconds, "tokens_encoded": 10 ** 6, "tokens_sampled": 0, "success": success} | {k: 0.0 for k in evaluation.PANELS}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    (folder / "cost.json").write_text('{"peak_memory": 1.5}')
    result = {"success": success, "success_before": 0.25, "score": success, "score_before": 0.5, "success_by_category": {"Pick": success, "Look": None},
              "success_before_by_category": {"Pick": 0.2}}
    (folder / "eval.json").write_text(json.dumps(result))
    return str(folder)


def test_the_papers_table_from_runs(tmp_path, capsys, monkeypatch):
    runs = [a_run(tmp_path / "a", 0.8, 10, seed=1, resume=True), a_run(tmp_path / "b", 0.9, 20, seed=2, workers=4), a_run(tmp_path / "c", 0.5, 5, algo="ppo", critic="separate", c_v=0, c_q=0),
            a_run(tmp_path / "d", 0.4, 5, lam=0.9), a_run(tmp_path / "e", 0.3, 5, c_v=0, c_q=0, resume=True, workers=3), a_run(tmp_path / "f", 0.2, 5, algo="gigpo", without_std=True)]
    (tmp_path / "torn").mkdir()
    base = {"algo": "sapo", "critic": "shared", "c_v": 0.5, "c_q": 0.25, "group": 1}
    kinds = [base, base | {"norm": "token"}, base | {"c_v": 0.1}, base | {"c_v": 0}, base | {"c_q": 0}, base | {"c_v": 0, "c_q": 0}, base | {"group": 8},
             base | {"critic": "separate", "c_v": 0, "c_q": 0}, base | {"algo": "gigpo", "c_v": 0, "c_q": 0, "group": 8}]
    assert len(set(evaluation.labels(kinds))) == len(kinds)
    assert evaluation.labels([base | {"lam": 0.9}, base | {"lam": 1}]) == ["SAPO, lam 0.9", "SAPO, lam 1"]  # neither goes without saying
    run_main(evaluation, monkeypatch, "--table", *runs, tmp_path / "torn")
    said = capsys.readouterr()
    rows = [line.strip("| ").split(" | ") for line in said.out.splitlines()]
    assert rows[0][:4] == ["method", "seeds", "Pick", "Look"] and rows[0][-4:] == ["All", "seconds", "M tokens", "GB"] and "left out" in said.err
    assert rows[2][:4] == ["start", "2", "20.0 ± 0.0", "–"] and "25.0 ± 0.0" in rows[2]
    assert rows[3] == ["SAPO", "2", "85.0 ± 7.1", *["–"] * 5, "85.0 ± 7.1", "30 ± 14", "2.00 ± 0.00", "1.50"]
    assert [r[0] for r in rows[4:]] == ["PPO", "SAPO, lam 0.9", "SAPO, no V, no Q", "GiGPO without std"] and rows[4][2] == "50.0"
    run_main(evaluation, monkeypatch, "--table", a_run(tmp_path / "s", 0.25, 9, env="webshop"))
    assert "| method | seeds | Score | Success | seconds" in (out := capsys.readouterr().out) and "| SAPO | 1 | 25.0 | 25.0 | 18 |" in out
    warm = tmp_path / "a" / "eval.json"  # evaluated at temperature 1 as well
    warm.write_text(json.dumps(json.loads(warm.read_text()) | {"success_at_1": 0.75, "success_before_at_1": 0.5}))
    run_main(evaluation, monkeypatch, "--table", runs[0])
    assert "| All | All, T = 1 | seconds" in (out := capsys.readouterr().out) and "| 25.0 | 50.0 |" in out and "| 80.0 | 75.0 | 20 |" in out
    run_main(evaluation, monkeypatch, "--plot", *runs, "--out", tmp_path / "curves.png")
    (tmp_path / "bench.json").write_text(json.dumps({"model": "tiny", "context": "full", "old": "rollout", "versions": {"device": "x"}, "seconds": {a: dict.fromkeys(train.PHASES, 1.0) for a in ("sapo", "ppo")}}))
    run_main(evaluation, monkeypatch, "--plot", tmp_path, "--out", tmp_path / "phases.png")
    assert min((tmp_path / name).stat().st_size for name in ("curves.png", "phases.png")) > 5000


class Knowing:
    """A prompted model that asks the house's expert, in some attempts; it keeps what it was asked."""

    def __init__(self, games, wins, limit=10 ** 9):
        self.games, self.wins, self.limit, self.asked, self.envs = games, wins, limit, [], {}

    def fits(self, text):
        return len(text) <= self.limit

    def __call__(self, texts, keys):
        out = []
        for text, (i, n) in zip(texts, keys):
            self.asked.append((i, n, text))
            trial, turn = divmod(n, 1000)
            if turn == 0:
                self.envs[i] = make_env("house")
                self.envs[i].reset(self.games[i])
            if turn == 999:
                out.append(f"lesson {trial} of {i}")
                continue
            action = self.envs[i].expert()[0] if trial >= self.wins[i] else "look"
            self.envs[i].step(action)
            out.append(f"<think> idea {turn} </think> <action> {action} </action>")
        return out


def test_plain_and_react_prompts_show_what_they_should():
    games = tasks("house", "test")[:3]
    with contextlib.closing(Pool("house")) as pool:
        model = Knowing(games, [0, 0, 9])
        records = evaluation.play_prompted(model, games, pool, "react", quiet=True)
        assert [r["won"] for r in records] == [True, True, False] and [r["task"] for r in records] == games and records[2]["turns"] == 20
        env = make_env("house")
        env.reset(games[0])
        plan = env.expert()
        assert records[0]["actions"] == plan and records[0]["trials"] == 1 and records[0]["lessons"] == [] and records[0]["valid_actions"] == 1
        last = [text for i, _, text in model.asked if i == 0][-1]
        seen = [env.reset(games[0])[0].strip()] + [env.step(a)[0] for a in plan[:-1]]
        parts = [f"Observation: {o}\nThought: idea {n}\nAction: {a}\n" for n, (o, a) in enumerate(zip(seen, plan[:-1]))]
        assert "".join(parts) + f"Observation: {seen[-1]}\nCommands that work now: [" in last and last.count(env.task) >= 1
        short = Knowing(games, [0, 0, 9], limit=1500)  # the oldest turns make room
        evaluation.play_prompted(short, games, pool, "react", quiet=True)
        long = [text for i, _, text in short.asked if i == 2][-1]
        assert len(long) <= 1500 and "idea 18" in long and "idea 3 " not in long
        plain = Knowing(games, [0, 0, 0])
        evaluation.play_prompted(plain, games, pool, "plain", quiet=True)
        assert all("idea" not in text for *_, text in plain.asked) and "Steps taken so far: 1." in [text for i, _, text in plain.asked if i == 0][1]
        none = evaluation.play_prompted(Knowing(games, [0, 0, 0], limit=10), games, pool, "plain", quiet=True)
        assert all(r["outgrown"] and r["turns"] == 0 and not r["won"] for r in none)


def test_reflexion_tries_three_times_with_its_lessons():
    games = tasks("house", "test")[:4]
    with contextlib.closing(Pool("house")) as pool:
        model = Knowing(games, [0, 1, 2, 3])
        records = evaluation.play_prompted(model, games, pool, "reflexion", quiet=True)
    assert [(r["won"], r["trials"], len(r["lessons"])) for r in records] == [(True, 1, 0), (True, 2, 1), (True, 3, 2), (False, 3, 2)]
    firsts = {(i, n // 1000): text for i, n, text in model.asked if n % 1000 == 0}
    assert "lesson" not in firsts[3, 0] and "- lesson 0 of 3\n" in firsts[3, 1] and "- lesson 0 of 3\n- lesson 1 of 3\n" in firsts[3, 2] and (0, 1) not in firsts
    reflections = [text for i, n, text in model.asked if n % 1000 == 999]
    assert len(reflections) == 5 and all("You did not succeed" in text and "Thought: idea 19" in text for text in reflections)


@pytest.fixture
def endpoint():
    """A server that speaks the protocol: each answer is (status, headers, body) from `says`, the last one again and again -> (url, says, requests)."""
    import http.server
    import threading
    says, requests = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            status, headers, text = says.pop(0) if len(says) > 1 else says[0]
            if status is None:
                return self.connection.close()
            self.send_response(status)
            for pair in headers.items():
                self.send_header(*pair)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", says, requests
    server.shutdown()
    server.server_close()


def chat_answer(text):
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_an_endpoint_is_asked_again_when_it_is_busy_and_its_refusals_are_said(endpoint, monkeypatch):
    url, says, requests = endpoint
    pauses = []
    monkeypatch.setattr(evaluation.time, "sleep", pauses.append)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    says += [(429, {"Retry-After": "7"}, "slow down"), (503, {}, "busy"), (None, {}, ""), (200, {}, "{"), (200, {}, "{}"), chat_answer("hello")]
    ask = evaluation.Endpoint(url + "/", "gpt", 0.4, 33)
    assert ask(["hi"], [(0, 0)]) == ["hello"] and pauses == [7.0, 2.0, 4.0, 8.0, 16.0]
    path, headers, body = requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {"model": "gpt", "temperature": 0.4, "max_tokens": 33, "messages": [{"role": "user", "content": "hi"}]}
    says[:] = [(500, {}, "broken")]
    with pytest.raises(ValueError, match="did not answer in 6 tries: 500"):
        ask(["hi"], [(0, 0)])
    asked = len(requests)
    for status, message in ((401, "refuses the key in OPENAI_API_KEY"), (403, "refuses the key"), (404, "404 Not Found: no such model"), (400, "400")):
        says[:] = [(status, {}, "no such model")]
        with pytest.raises(ValueError, match=message):
            ask(["hi"], [(0, 0)])
    assert len(requests) == asked + 4  # not asked again
    monkeypatch.delenv("OPENAI_API_KEY")
    says[:] = [(401, {}, "who?")]
    with pytest.raises(ValueError, match="wants a key: set OPENAI_API_KEY"):
        evaluation.Endpoint(url, "gpt", 0, 9)(["hi"], [(0, 0)])
    says[:] = [chat_answer(None)]
    assert evaluation.Endpoint(url, "gpt", 0, 9)(["a", "b"], [(0, 0), (1, 0)]) == ["", ""] and "Authorization" not in requests[-1][1]
    with pytest.raises(ValueError, match="did not answer in 2 tries"):
        evaluation.Endpoint("http://127.0.0.1:9/v1", "gpt", 0, 9, tries=2)(["hi"], [(0, 0)])
    with pytest.raises(ValueError, match="begins with http://"):
        evaluation.Endpoint("localhost:8000/v1", "gpt", 0, 9)


def test_evaluating_an_endpoint(endpoint, tmp_path, monkeypatch, capsys):
    url, says, requests = endpoint
    says += [chat_answer("<think> hm </think> <action> look </action>")]
    run_main(evaluation, monkeypatch, "--model", "some/gpt", "--endpoint", url, "--prompt", "reflexion", "--limit", 2, "--horizon", 3, "--out", tmp_path / "e.json")
    report, said = json.loads((tmp_path / "e.json").read_text()), capsys.readouterr().out
    assert report["n"] == 2 and report["success"] == 0 and report["prompt"] == "reflexion" and "gpt, test, reflexion, T = 0.4" in said
    assert len(requests) == 2 * (3 * 3 + 2)  # three attempts of three turns, two reflections
    says[:] = [(401, {}, "")]
    with pytest.raises(SystemExit, match="wants a key|refuses the key"):
        run_main(evaluation, monkeypatch, "--model", "gpt", "--endpoint", url, "--limit", 1, "--out", tmp_path / "f.json")
    says[:] = [chat_answer("")] * 3 + [(404, {}, "")]  # fails in the second repeat
    with pytest.raises(SystemExit, match="404"):
        run_main(evaluation, monkeypatch, "--model", "gpt", "--endpoint", url, "--limit", 1, "--horizon", 2, "--repeats", 2, "--out", tmp_path / "g.json")
    kept = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [(r["repeat"], r["turns"]) for r in kept] == [(0, 2)]  # what had ended is written down


def test_react_with_a_local_model_repeats_itself(tmp_path, monkeypatch, capsys):
    for name in "ab":
        run_main(evaluation, monkeypatch, "--model", "tiny", "--prompt", "react", "--limit", 3, "--horizon", 3, "--max_new", 6, "--rows", 2, "--temperature", 1,
                 "--max_prompt", 8192, "--out", tmp_path / f"{name}.json")
    a, b = ((tmp_path / f"{name}.jsonl").read_text() for name in "ab")
    assert a == b and len({line.split('"responses"')[1] for line in a.splitlines()}) == 3


@pytest.mark.skipif(not os.environ.get("ALFWORLD_DATA"), reason="ALFWORLD_DATA names no games")
def test_training_on_real_alfworld_games(tmp_path, monkeypatch):
    pytest.importorskip("alfworld")
    run_main(train, monkeypatch, "--env", "alfworld", "--model", "tiny", "--iterations", 2, "--tasks", 1, "--horizon", 3, "--eval_games", 1,
             "--save_every", 1, "--max_new", 8, "--workers", 1, "--out", tmp_path)
    lines, _ = check_run(tmp_path)
    assert lines[0]["turns"] == 3 and lines[0]["time_env"] > 0


def test_every_file_shows_its_concern(capsys, monkeypatch):
    run_main(sapo, monkeypatch)
    assert "A^ (7)" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda _: "")
    run_main(envs, monkeypatch)
    assert "Won" in capsys.readouterr().out
    run_main(model_module, monkeypatch)
    assert "w+" in capsys.readouterr().out
    run_main(envs, monkeypatch, "--bench", "--workers", 1, "--steps", 5)
    assert "128 games, 640 turns" in capsys.readouterr().out
    run_main(rollout_module, monkeypatch, "--rows", 3, "--prompt", 20, "--new", 9, "--repeats", 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line[:2] in ("hf", "kv")] == ["100%"] * 6
    for argv, says in ((["--rows", 0], "--rows must be at least 1"), (["--env", "attic"], "known: house"), (["--model", "nothing"], "cannot load")):
        with pytest.raises(SystemExit) as stop:
            run_main(rollout_module, monkeypatch, *argv)
        assert says in str(stop.value) + capsys.readouterr().err
