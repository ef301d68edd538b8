"""The tests of the six files. They need no download and no GPU.

A reference is a plain loop in float64 written from the paper, and shares no helper with the code.
The tests of a folder lie beside its files; what tests share is in runtime/testing.py.
    python -m pytest -q
"""
import ast
import contextlib
import copy
import dataclasses
import functools
import html.parser
import inspect
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import envs
import eval as evaluation
import model as model_module
import rollout as rollout_module
import sapo
import train
from environments.alfworld import AlfWorld
from environments.house import CATEGORIES, House, HouseholdPrompts
from environments.webshop import WebShop
from envs import Pool, make_env, tasks
from hf.verify import zero_gradients
from model import (actor_critic, entropy, float32_logits, load, make_batch, restricted_log_softmax,
                   value_readout)
from rollout import DecodeState, End, Sampler, rollout, sample_token
from runtime import distributed, optim, report
from runtime.testing import (CONTEXTS, Calculator, GAMES, Gallery, Guess, HERE, INF, NAN, Robot,
                             SEEDS, SMALL, TINY_HOUSE, Wrapped, a_case, a_pool, a_run, advantages,
                             advantages_by_loop, as_on_a_gpu, batch_of, case_of, close, gradient,
                             near, off_policy, on_ranks, on_the_cpu, play, prepared, randn,
                             random_lm, read_lines, run_main, same_tokens_and_values,
                             small_config, tensor, unclipped, values_of, whitened)
from sapo import (actor_loss, explained_variance, kl_loss, normalize_advantages, policy_loss,
                  sapo_loss, turn_targets, value_loss)
from tools import imitate
from tools.imitate import random_tiny
from training.run import rollout_metrics, with_speed_and_memory_settings
from training.settings import learner_class

# ------------------------------------------------------------------------------------ the algorithm
# A function *_by_loop is such a reference.

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
    close(p, tensor([[clip_by_hand((z[7] - z[2]) / tau, -1.0, 1.0) for z in row]
                     for row in logits.tolist()]))
    close(readout(logits + 10 * randn(4, 5, 1)), p)
    assert 0 < (p.abs() == 1).sum() < p.numel()
    slope = (p.abs() < 1).double()[..., None] / tau  # beyond tau the readout is flat
    close(grad(lambda z: readout(z).sum(), logits)[0],
          slope * tensor([0, 0, -1, 0, 0, 0, 0, 1, 0]))


@SEEDS
def test_policy_and_entropy_exclude_the_two_reserved_tokens(seed):
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


def test_entropy_is_finite_where_a_logit_is_minus_infinity():
    logits, ids = torch.tensor([[1.0, -INF, 2.0, 5.0, 0.0]]), (3, 4)
    h = lambda z: entropy(restricted_log_softmax(z, ids), ids)
    without = logits[:, [0, 2, 3, 4]]
    assert torch.equal(h(logits), entropy(restricted_log_softmax(without, (2, 3)), (2, 3)))
    slope, = grad(lambda z: h(z).sum(), logits)
    assert slope[0, 0] > 0 > slope[0, 2] and not slope[0, [1, 3, 4]].any()


def test_sixteen_bit_logits_give_a_float32_policy():
    for logits in (torch.linspace(-9, 9, 40).bfloat16(), torch.linspace(-9, 9, 40).half()):
        logp = restricted_log_softmax(logits, (1, 2))
        assert logp.dtype == torch.float32
        assert torch.equal(logp, restricted_log_softmax(logits.float(), (1, 2)))


# Eq. 4-6
def ragged(seed):
    """Random trajectories {(traj, turn): (reward, done, v, q)}: their ids have gaps, their turns
    begin at 0 or 1, and they are done or cut off."""
    rng, game = random.Random(seed), {}
    for traj in rng.sample(range(1000), 8):
        first, length = rng.choice([0, 1]), rng.choice([1, 2, 5, 9])
        for k in range(length):
            done = rng.random() < (0.5 if k == length - 1 else 0.1)
            game[traj, first + k] = (rng.gauss(0, 3), float(done), rng.gauss(0, 3), rng.gauss(0, 3))
    return game


def targets(game, keys, gamma, lam):
    """-> (N, 3): adv, y_v, y_q of `keys`, in their order."""
    names = torch.tensor(keys).unbind(1)
    numbers = tensor([game[k] for k in keys]).unbind(1)
    return torch.stack(turn_targets(*names, *numbers, gamma=gamma, lam=lam), 1)


def targets_by_recursion(game, key, gamma, lam):
    (r, d, v, _), after = game[key], (key[0], key[1] + 1)
    v_after, q_after, adv_after = 0, 0, 0
    if after in game:
        v_after, q_after = game[after][2:]
        adv_after = targets_by_recursion(game, after, gamma, lam)[0]
    delta = r + gamma * (1 - d) * v_after - v
    adv = delta + gamma * lam * (1 - d) * adv_after
    return adv, v + adv, r + gamma * (1 - d) * q_after


@SEEDS
@pytest.mark.parametrize("gamma, lam", [(0.95, 0.9), (0.99, 0.0), (1.0, 1.0), (0.9, 1.0)])
def test_turn_targets_in_any_order_and_with_duplicates(seed, gamma, lam):
    game, rng = ragged(seed), random.Random(seed)
    ordered = list(game)
    shuffled = rng.sample(ordered, len(ordered))
    duplicated = rng.choices(ordered, k=20) + shuffled + rng.choices(ordered, k=20)
    for keys in (ordered, shuffled, duplicated):
        close(targets(game, keys, gamma, lam),
              tensor([targets_by_recursion(game, k, gamma, lam) for k in keys]))


def test_turn_targets_by_hand():
    game = {(4, t): (float(t), float(t == 2), 10.0, 4.0) for t in range(3)}
    y = targets(game, list(game), 0.5, 1.0)  # with lambda 1 V's target is the discounted return
    close(y[:, 1:], tensor([[0 + 0.5 + 0.5, 0 + 2], [1 + 1, 1 + 2], [2, 2]]))
    close(targets({(3, 1): (2.0, 0.0, 0.5, 7.0)}, [(3, 1)], 0.9, 0.9), tensor([[1.5, 2.0, 2.0]]))
    none = torch.zeros(0, dtype=torch.long)
    empty = turn_targets(none, none, *torch.zeros(4, 0), gamma=0.9, lam=0.9)
    assert [x.shape for x in empty] == [(0,)] * 3


def test_turn_targets_refuses_gaps_and_shapes_and_passes_no_gradient():
    x = torch.ones(4, requires_grad=True)
    given = [torch.tensor([0, 0, 5, 5]), torch.tensor([0, 1, 1, 2]), x, x, x, x]
    assert not any(y.requires_grad for y in turn_targets(*given, gamma=0.9, lam=0.9))
    with pytest.raises(ValueError, match=r"missing in the middle of trajectories \[5\]"):
        turn_targets(given[0], torch.tensor([0, 1, 1, 3]), *given[2:], gamma=0.9, lam=0.9)
    twice = given[0], torch.tensor([0, 1, 2, 2])  # the last turn
    numbers = torch.finfo(torch.float32)
    for a, b in (1.0, 0.5), (NAN, 0.0), (0.0, NAN), (INF, numbers.max), (numbers.min, -INF):
        for i in range(2, 6):
            other = [*given[:i], torch.tensor([1.0, 1.0, a, b]), *given[i + 1:]]
            with pytest.raises(ValueError, match="two copies of a turn have different"):
                turn_targets(*twice, *other[2:], gamma=0.9, lam=0.9)
    turn_targets(*twice, *[torch.tensor([1.0, 1.0, NAN, NAN])] * 4, gamma=0.9, lam=0.9)
    for i in range(6):
        for wrong in (given[i][:3], given[i][:, None], given[i][0]):
            with pytest.raises(ValueError, match="one length"):
                turn_targets(*given[:i], wrong, *given[i + 1:], gamma=0.9, lam=0.9)


# Eq. 7
def random_advantages(seed, n):
    torch.manual_seed(seed)
    return 4 * randn(n) + 2, (torch.rand(n) < 0.3).double(), torch.rand(n) < 0.7


@SEEDS
def test_advantages_are_normalized_over_valid_turns(seed):
    adv, invalid, some = random_advantages(seed, 12)
    for eps in (1e-8, 0.5):
        got = normalize_advantages(torch.where(some, adv, NAN), invalid=invalid, c_inv=0.7,
                                   valid=some, eps=eps)
        close(got, advantages_by_loop(adv, invalid, 0.7, some, eps))
    close(normalize_advantages(adv), advantages_by_loop(adv, 0 * invalid, 0.0, some | True, 1e-8))


def test_advantages_without_spread_are_zero():
    for adv in (torch.full((7,), 0.1), torch.full((1,), 1e4), torch.zeros(0)):
        assert torch.equal(normalize_advantages(adv), torch.zeros_like(adv))
    wild, none = torch.tensor([NAN, INF, 1]), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(normalize_advantages(wild, valid=none), torch.zeros(3))


# Eq. 8-12

TOKENS = ("logp", "entropy", "logp_old", "logp_ref", "adv", "mask")
TURNS = ("p_v", "p_q", "p_v_old", "p_q_old", "y_v", "y_q")


def minibatch(seed, b=5, t=7, n=8):
    """Random arguments of sapo_loss, spread wide enough that every clip acts."""
    torch.manual_seed(seed)
    logp = -randn(b, t).abs()
    tokens = (logp, randn(b, t).abs(), logp + 0.4 * randn(b, t), logp + 0.5 * randn(b, t),
              randn(b, t), torch.rand(b, t) < 0.7)
    return dict(zip(TOKENS, tokens)) | dict(zip(TURNS, randn(6, n) / 2))


def policy_by_loop(logp, logp_old, adv, clip):
    rho = [math.exp(new - old) for new, old in zip(logp.tolist(), logp_old.tolist())]
    return sum(-min(r * a, clip_by_hand(r, 1 - clip, 1 + clip) * a)
               for r, a in zip(rho, adv.tolist())) / len(rho)


def value_by_loop(p, p_old, y, clip):
    p_clip = [old + clip_by_hand(new - old, -clip, clip)
              for new, old in zip(p.tolist(), p_old.tolist())]
    return sum(max((a - c) ** 2, (b - c) ** 2) / 2
               for a, b, c in zip(p.tolist(), p_clip, y.tolist())) / len(p)


def kl_by_loop(logp, logp_ref):
    log_r = [ref - new for new, ref in zip(logp.tolist(), logp_ref.tolist())]
    return sum(math.exp(x) - 1 - x for x in log_r) / len(log_r)


LOSSES = {  # name: the loss of some tensors under a mask, its loop, the tensors
    "policy": (lambda *xs, mask: policy_loss(*xs, mask, clip=0.2)[0],
               lambda *xs: policy_by_loop(*xs, 0.2), ("logp", "logp_old", "adv")),
    "value": (lambda *xs, mask: value_loss(*xs, clip=0.2, valid=mask)[0],
              lambda *xs: value_by_loop(*xs, 0.2), ("p_v", "p_v_old", "y_v")),
    "kl": (lambda *xs, mask: kl_loss(*xs, mask), kl_by_loop, ("logp", "logp_ref"))}


@SEEDS
@pytest.mark.parametrize("loss, by_loop, keys", LOSSES.values(), ids=LOSSES)
def test_losses_match_a_loop_and_ignore_masked_entries(loss, by_loop, keys, seed):
    x = minibatch(seed)
    xs = [x[k] for k in keys]
    mask = x["mask"] if xs[0].dim() == 2 else torch.arange(8) % 3 != seed
    for some in (mask, mask | True):
        close(loss(*xs, mask=some).item(), by_loop(*(z[some] for z in xs)))
        close(loss(*(z[some] for z in xs), mask=None).item(), by_loop(*(z[some] for z in xs)))
    slopes = grad(functools.partial(loss, mask=mask), *xs)
    for junk in (NAN, INF, -INF):
        padded = [torch.where(mask, z, junk) for z in xs]
        close(loss(*padded, mask=mask), loss(*xs, mask=mask))
        close(grad(functools.partial(loss, mask=mask), *padded), slopes)
    nothing = functools.partial(loss, mask=mask & False)
    assert nothing(*xs) == 0 and not any(g.any() for g in grad(nothing, *xs))
    assert loss(*(z[:0].flatten() for z in xs), mask=None) == 0


@pytest.mark.parametrize("ratio, adv, flows", [
    (1.5, 2.0, 0), (1.5, -2.0, 1), (0.5, -2.0, 0), (0.5, 2.0, 1), (1.1, 2.0, 1), (0.9, -2.0, 1)])
def test_clipped_ratio_has_a_gradient_only_back_towards_the_clip_range(ratio, adv, flows):
    f = lambda z: policy_loss(z, torch.zeros_like(z), torch.full_like(z, adv), torch.ones_like(z),
                              clip=0.2)
    logp = tensor([[math.log(ratio)]])
    close(grad(lambda z: f(z)[0], logp)[0], tensor([[-ratio * adv * flows]]))
    assert f(logp)[1]["clip_fraction"] == 1 - flows


WILD = [-INF, -1000, -99, -20.1, -19.9, -1, 0, 0.1, 1, 19.9, 20.1, 50, 99, 1000, INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adv", [-1.5, 0.0, 1.5])
def test_losses_and_gradients_are_finite_for_every_log_ratio(adv, dtype):
    """Up to 20 they are those of the formulas, to the bit; beyond it the loss is that of 20, and
    there is no gradient."""
    x, old = torch.tensor(WILD, dtype=dtype), torch.zeros(len(WILD), dtype=dtype)
    inside, at_20 = x.abs() < 20, x.clamp(-20, 20)

    def plain(z):
        return -torch.minimum(z.exp() * adv, z.exp().clamp(0.8, 1.2) * adv).sum()

    limited = lambda z: policy_loss(z, old, adv * torch.ones_like(z), clip=0.2, denom=1)[0]
    for loss, formula in ((limited, plain),
                          (lambda z: kl_loss(old, z, denom=1), lambda z: (z.expm1() - z).sum())):
        assert torch.equal(loss(x), formula(at_20)) and loss(x).isfinite()
        slope, expected = grad(loss, x)[0], grad(formula, at_20)[0]
        assert torch.equal(slope[inside], expected[inside]) and not slope[~inside].any()
    info = policy_loss(x, old, adv + old, clip=0.2)[1]
    assert all(number.isfinite() for number in info.values())
    whole = dict.fromkeys(TURNS, old) | dict(entropy=old, logp_old=old, logp_ref=-x, adv=adv + old)
    loss = lambda z: sapo_loss(z, **whole, beta=1.0)[0]
    assert loss(x).isfinite() and grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("p, y, flows", [
    (0.5, 1.0, 0), (0.5, -1.0, 1), (-0.5, -1.0, 0), (-0.5, 1.0, 1), (0.1, 1.0, 1), (-1.0, 0.9, 1)])
def test_value_gradient_is_zero_where_the_clipped_branch_is_larger(p, y, flows):
    f = lambda z: value_loss(z, torch.zeros_like(z), torch.full_like(z, y), clip=0.2)
    close(grad(lambda z: f(z)[0], tensor([p]))[0], tensor([(p - y) * flows]))
    assert f(tensor([p]))[1] == {"clip_fraction": 1 - flows, "saturated": abs(p) == 1}


@SEEDS
def test_kl_is_never_negative_and_pulls_toward_the_reference(seed):
    x = minibatch(seed)
    logp, ref, one = x["logp"].flatten(), x["logp_ref"].flatten(), torch.ones(1)
    assert min(kl_loss(a[None], b[None], one) for a, b in zip(logp, ref)) > 0
    assert kl_loss(logp, logp, logp < 1) == 0
    near = torch.tensor([-0.008999466896057129]), torch.tensor([-0.008991680108010769])
    assert kl_loss(*near, one) >= 0  # where exp(x) - 1 - x is -4e-8 in float32
    slope = (1 - (ref - logp).exp()) / len(ref)  # d(r - 1 - log r) = (1 - r) dlogp
    close(grad(lambda z: kl_loss(z, ref, ref < INF), logp)[0], slope)


@SEEDS
def test_explained_variance(seed):
    value, target = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)).unbind()
    ours, error = explained_variance(value, target), (target - value).double().numpy()
    assert ours == pytest.approx(1 - error.var() / target.double().numpy().var(), abs=1e-5)
    assert explained_variance(target, target) == 1
    assert explained_variance(torch.full_like(target, 0.1), target) == pytest.approx(0, abs=1e-5)
    # a constant has a variance in float32, by rounding
    assert torch.full((100,), 0.1).var(correction=0) > 0
    for constant in (torch.full((n,), c) for n in (1, 7, 100) for c in (0.1, 3.3, 1e4)):
        assert explained_variance(torch.rand(len(constant)), constant) == 0


@SEEDS
def test_the_joint_loss_is_the_weighted_sum(seed):
    x, valid = minibatch(seed), torch.arange(8) % 3 != seed
    for k in ("logp", "entropy", "p_v", "p_q"):
        x[k].requires_grad_()
    loss, info = sapo_loss(**x, valid=valid, clip=0.2, clip_v=0.3, clip_q=0.1, c_v=0.7, c_q=0.3,
                           beta=0.2, c_h=0.1)
    on = {k: x[k][x["mask"] if k in TOKENS else valid] for k in x}
    parts = {"loss_policy": policy_by_loop(on["logp"], on["logp_old"], on["adv"], 0.2),
             "loss_v": value_by_loop(on["p_v"], on["p_v_old"], on["y_v"], 0.3),
             "loss_q": value_by_loop(on["p_q"], on["p_q_old"], on["y_q"], 0.1),
             "kl": kl_by_loop(on["logp"], on["logp_ref"]),
             "entropy": sum(on["entropy"].tolist()) / len(on["entropy"])}
    weights = (1, 0.7, 0.3, 0.2, -0.1)
    parts["loss"] = sum(weight * part for weight, part in zip(weights, parts.values()))
    close({k: info[k].item() for k in parts} | {"returned": loss.item()},
          parts | {"returned": parts["loss"]})
    close(sapo_loss(**x | {"logp_ref": None}, beta=0)[0], sapo_loss(**x, beta=0)[0])
    assert not any(number.requires_grad for number in info.values())


@SEEDS
def test_flat_and_masked_tokens_have_equal_losses(seed):
    x = minibatch(seed)
    flat = {k: x[k][x["mask"]] if k in TOKENS else x[k] for k in x if k != "mask"}
    close(sapo_loss(**flat), sapo_loss(**x))
    loss, info = actor_loss(**{k: flat[k] for k in TOKENS[:-1]})
    whole = sapo_loss(**flat, c_v=0, c_q=0)
    close(loss, whole[0])
    assert info.keys() == {"loss_policy", "kl", "kl_max", "entropy", "ratio_max", "clip_fraction"}
    close(info, {k: whole[1][k] for k in info})
    for refuses in (sapo_loss, actor_loss):
        keys = TOKENS[:-1] + TURNS if refuses is sapo_loss else TOKENS[:-1]
        with pytest.raises(ValueError, match="logp_ref"):
            refuses(**{k: flat[k] for k in keys} | {"logp_ref": None}, beta=0.1)


EVERY = list(range(5)), list(range(8))
VIEWS = {  # micro-batches: (rows of tokens, turns, columns of padding)
    "shuffle": [([3, 0, 4, 1, 2], [7, 2, 5, 0, 1, 6, 3, 4], 0)],
    "pad": [(*EVERY, 3)],
    "duplicate": [(EVERY[0] * 2, EVERY[1] * 2, 0)],
    "split": [([0, 3], [1, 2, 4, 6, 7], 0), ([1], [], 2), ([2, 4], [0, 3, 5], 1), ([], [], 0)]}


@SEEDS
@pytest.mark.parametrize("view", VIEWS)
def test_shuffling_padding_duplicating_and_splitting_change_nothing(view, seed):
    x, times, now = minibatch(seed), 2 if view == "duplicate" else 1, TOKENS[:2] + TURNS[:2]
    counts = {"denom_tokens": times * x["mask"].sum(), "denom_turns": times * 8}

    def parts(*current):  # the losses and infos of all micro-batches; padding is NaN
        y = x | dict(zip(now, current))
        for rows, turns, pad in VIEWS[view]:
            tokens = {k: F.pad(y[k][rows], (0, pad), value=False if k == "mask" else NAN)
                      for k in TOKENS}
            yield sapo_loss(**tokens, **{k: y[k][turns] for k in TURNS}, **counts)

    current = [x[k] for k in now]
    (losses, infos), (loss, info) = zip(*parts(*current)), sapo_loss(**x)
    close(sum(losses), loss)
    whole = grad(lambda *xs: sapo_loss(**x | dict(zip(now, xs)))[0], *current)
    close(grad(lambda *xs: sum(part for part, _ in parts(*xs)), *current), whole)
    added = {k: (max if k.endswith("_max") else sum)(float(i[k]) for i in infos) for k in info}
    assert added == pytest.approx({k: float(number) for k, number in info.items()}, abs=1e-6)

# --------------------------------------------------------------------------- prompts and the parser

RESPONSES = pytest.mark.parametrize("text, action, valid", [  # action None: the last 30 characters
    ("<THINK>A</THINK><Action>GO to Desk 1</ACTION>", "GO to Desk 1", True),
    ("<think>\na\n</think>\n<action>\nlook\n</action>\n", "look", True),
    ("<action>look</action> and <think>a</think>", "look", True),
    ("<think>a</think><action>look</action><action>help</action>", "look", True),
    ("<think>a</think><action></action>", "", True),
    ("<think>a</think><action>dance wildly</action>", "dance wildly", True),  # useless, but valid
    ("<think>a<action>look</action>", "look", False),
    ("</think>a<think><action>look</action>", "look", False),
    ("<think>\u60f3</think><action>look</action>", "look", False),
    ("", None, False), ("<think>a</think> Now I WILL go to the fridge 1", None, False),
    ("</action><think>a</think><action>look</action>", "look", True),
    ("</action><think>a<action>look</action></think>", None, False),
    ("<think>I put it inside <action> </action>.</think><action>look</action>", "look", True),
    ("<think>I could <action>look</action>.</think>", None, False),
    ("<think>I use <action> tags</think><action>look</action>", "look", True),
    ("<think>Not </think><action>a</action>.</think><action>look</action>", "look", True),
    ("<think>a</think><action>go </think><action>look</action>", "go </think><action>look", True),
    ("<think>long enough</think><action>look", None, False)])


@RESPONSES
@pytest.mark.parametrize("env", [House, AlfWorld, WebShop, envs.Env])
def test_parse_action(env, text, action, valid):
    """Only the default keeps the case."""
    expected = text[-env.fallback:] if action is None else action
    assert env.parse_action(text) == (expected if env is envs.Env else expected.lower(), valid)


@pytest.mark.parametrize("prefix", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_what_a_template_begins_a_response_with_is_no_action(prefix):
    for text in ("look", "\n look\n", "", "I think that I WILL go to the fridge now"):
        assert envs.Env.parse_action(prefix + text) == (text[-30:], False)
        assert WebShop.parse_action(prefix + text) == (text[-20:].lower(), False)


@pytest.mark.parametrize("action", ['{"q": "SELECT Name"}', "\u0130\u017f \u212a\u03a3", "<b>",
                                    "click[\u767d\u8272 (white)]"])
def test_default_parser_keeps_an_action_as_it_is(action):
    text = f"<think>\u0130</think> <ACTION> {action} </Action>"
    assert envs.Env.parse_action(text) == (action, True)


def conversation(turns):
    """An episode in which the agent has answered `turns` times and found an attic."""
    def info(i):
        attic = ["go to attic 1"] if i > 0 else []
        return {"task": "put a mug in desk.", "admissible": [
            "go to bed 1", "go to desk 1", "help", "look", f"touch {i}"] + attic}
    first_obs = "\nYou wake up.\n\nYour task is to: put a mug in desk.\n"
    episode = HouseholdPrompts(first_obs, info(0))
    for i in range(1, turns + 1):
        text = f"<think> secret {i} </think> <action> Dance {{obs}} {i} </action>"
        action, _ = House.parse_action(text)
        episode.record(action, f"\nYou saw {i}.\n", info(i))
    return episode


@pytest.mark.parametrize("k", [0, 1, 2, 5, 7])
def test_window_prompt_shows_the_last_k_turns_without_thoughts(k):
    first, later = conversation(0).window_prompt(k), conversation(5).window_prompt(k)
    task = "\nYou wake up.\n\nYour task is to: put a mug in desk.\n"
    assert all(x in first for x in (envs.ROLE, envs.ANSWER, task, "'look', 'touch 0']"))
    assert not any(x in first for x in ("Steps taken", "What you", "'help'"))
    seen = ["You wake up."] + [f"You saw {i}." for i in range(1, 5)]
    past = [x for i in range(5) for x in (seen[i], f"dance {{obs}} {i + 1}\n")][max(0, 10 - 2 * k):]
    commands = "['go to bed 1', 'go to desk 1', 'look', 'touch 5', 'go to attic 1']"
    before = [envs.ROLE, "Your task is to: put a mug in desk.", "Steps taken so far: 5."]
    now = ["\nStep 6.", "You saw 5.", commands, envs.ANSWER]
    places = [later.index(x) for x in [*before, *past, *now]]
    assert places == sorted(places)  # all there, oldest first
    assert sum(later.count(x) for x in ("You saw", "You wake", "dance")) == len(past) + 1
    assert not any(x in later for x in ("secret", "'help'", "touch 4"))


def test_only_household_prompts_leave_out_help():
    info = {"task": "wait", "admissible": ["help", "wait"]}
    assert "['help', 'wait']" in envs.PromptBuilder("You wait.", info).window_prompt()
    for prompt in ("window_prompt", "full_prompt"):
        assert "help" not in getattr(HouseholdPrompts("You wait.", info), prompt)()


def test_full_prompt_contains_only_what_is_new():
    first, later = conversation(0).full_prompt(), conversation(3).full_prompt()
    task = "You wake up.\n\nYour task is to: put a mug in desk.\n"
    assert all(x in first for x in (envs.ROLE, envs.ANSWER, task))
    assert "['go to bed 1', 'go to desk 1', 'look']" in first and "['touch 0']" in first
    assert "except to go where you already are: ['go" in first  # which is not admissible
    assert first.count("go to bed 1") == 1
    assert later.startswith("You saw 3.\n")
    assert "['touch 3', 'go to attic 1']" in later  # the attic was not known at first
    old = "look", "go to bed", "go to desk", "help", "task", "You saw 2.", "dance", "secret"
    assert not any(x in later for x in (*old, envs.ROLE, envs.ANSWER))

# ----------------------------------------------- environments as somebody would write them, 5 kinds

def called(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def with_responses(env, task, *responses, workers=0, context=None):
    """Plays a game by a model that gives these responses -> (its turns, the model)."""
    lm = random_tiny()
    lm.text = lambda ids, texts=iter(responses): next(texts)
    sampler = Sampler(lm, "kv", context or env.context, max_new_tokens=4, check=False)
    with contextlib.closing(Pool(env, workers=workers)) as pool:
        return rollout(sampler, [task], pool), lm


def contents(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("env", [Calculator, Guess, Wrapped, Robot, Gallery])
def test_environments_of_all_kinds_play_with_nonsense(env):
    assert len(inspect.getsource(env).replace("\n\n", "\n").splitlines()) <= 25
    config = train.settings(env=env, max_new_tokens=8)
    sampler = evaluation.sampler_for(random_tiny(), config)
    with contextlib.closing(Pool(env)) as pool:
        turns = rollout(sampler, tasks(env, "train")[:2], pool)
    assert config.context == sampler.context == env.context
    # a token of this model is a whole sentence with tags, so a few turns are valid by chance
    assert {t.traj for t in turns} == {0, 1} and sum(t.invalid for t in turns) > 0.9 * len(turns)
    ends = [t for t in turns if t.done]
    assert len(ends) == 2 and not any(t.won or t.score for t in ends)
    assert env.tools or all(t.end == End.HORIZON and t.turn + 1 == env.horizon for t in ends)
    json.dumps([evaluation.episode_record(env, 0, [t], mock.Mock(info={
        "category": t.category, "won": t.won, "score": t.score})) for t in turns])
    assert report.episode_page("x", turns, [], lambda ids: "x", env.tool_schemas())


@pytest.mark.parametrize("workers", [0, 1])
def test_calls_of_tools_are_dispatched(workers):
    turns, lm = with_responses(
        Calculator, 7, "<think> Or <tool_call>? </think> " + called("multiply", a=13, b=7),
        called("multiply", a=13), called("submit", number=91), workers=workers)
    assert [t.action for t in turns] == [
        {"name": "multiply", "arguments": {"a": 13, "b": 7}},
        {"name": "multiply", "arguments": {"a": 13}},
        {"name": "submit", "arguments": {"number": 91}}]
    assert [contents(t.messages) for t in turns] == [
        [("system", "You calculate with tools."), ("user", "What is 13 times 7?")],
        [("tool", "91")],
        [("tool", "TypeError: Calculator.multiply() missing 1 required positional argument: 'b'")]]
    assert [(t.reward, t.done, t.won, t.score, t.invalid, t.admissible) for t in turns] == [
        (0.0, False, False, 0.0, False, True)] * 2 + [(1.0, True, True, 1.0, False, True)]
    assert turns[0].category is None and turns[2].end == End.TERMINATED
    tools = Calculator.tool_schemas()
    assert [tool["function"]["name"] for tool in tools] == ["multiply", "submit"]
    assert tools[0]["function"]["parameters"]["properties"]["b"] == {
        "type": "integer", "description": "the second factor"}
    assert turns[0].prompt_ids == lm.chat.encode_messages(turns[0].messages, (), tools)
    conversation = turns[0].prompt_ids + turns[0].action_ids
    assert turns[1].prompt_ids == lm.chat.encode_messages(turns[1].messages, conversation, tools)


def test_class_written_for_environment_factory_plays_after_five_lines_of_change():
    turns, _ = with_responses(Guess, 3, called("guess", number=9), called("guess", number=5),
                              called("guess", number=3), "It is 3.")
    assert [contents(t.messages) for t in turns] == [
        [("user", "Guess a number from 1 to 8.")], [("tool", "ValueError: 9 is out of range")],
        [("tool", '{"right": false, "guesses": [5]}')],
        [("tool", '{"right": true, "guesses": [5, 3]}')]]
    assert [t.reward for t in turns] == [0.0, 0.0, 1.0, 0.0]
    assert turns[-1].end == End.TERMINATED and turns[-1].won and turns[-1].invalid
    source = inspect.getsource(Guess)
    assert len([line for line in source.splitlines() if "  # " in line]) == 5


def test_gymnasium_environment_needs_no_info():
    turns, _ = with_responses(Wrapped, 1, *["<think></think><action>right</action>"] * 2)
    first, second = (contents(t.messages)[0][1] for t in turns)
    assert first == ("You are in a corridor and say left or right.\nThe door is 2 steps to the "
                     "right.\n\n" + envs.WITHOUT_COMMANDS)
    assert "Commands" not in second and "Your task is to: The door is 2 steps" in second
    assert "What you did: right\nStep 2. What you see: Steps: 1." in second
    assert [(t.reward, t.won, t.score, t.invalid, t.admissible, t.end) for t in turns] == [
        (0.0, False, 0.0, False, True, None), (1.0, True, 1.0, False, True, End.TERMINATED)]
    turns, _ = with_responses(Wrapped, 1, *["left"] * 5)
    assert [t.end for t in turns] == [None] * 4 + [End.HORIZON]  # which it does not count itself
    assert not any(t.admissible for t in turns)


@pytest.mark.parametrize("horizon, cut_off", [(2, End.HORIZON), (9, End.CONTEXT_OVERFLOW)])
def test_a_game_that_is_cut_off_is_won_if_it_has_paid(horizon, cut_off):
    class Paying(envs.Env):
        context = "full"
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("Go.", {})
        step = lambda self, action: ("Here is 1. " * 9, 1.0, False, False, {})

    lm = random_tiny()
    sampler = Sampler(lm, context="full", max_new_tokens=4, max_prompt=200, check=False)
    turns = rollout(sampler, [1], Pool(Paying, {"horizon": horizon}))
    assert turns[-1].end is cut_off and turns[-1].won


@pytest.mark.parametrize("workers", [0, 1])
def test_actions_can_be_json(workers):
    """What the environment does to an action, as pop() here, changes no record of it."""
    turns, _ = with_responses(Robot, 3, '{"go": 1, "say": "\u00fc \\ud800"}', "go 2", '{"go": 2}',
                              workers=workers)
    first = {"go": 1, "say": "\u00fc ?"}
    assert [t.action for t in turns] == [first, "go 2", {"go": 2}]
    assert [t.invalid for t in turns] == [False, True, False] and turns[-1].won
    prompts = [contents(t.messages)[0][1] for t in turns]
    assert all(prompt.endswith("\n\n" + Robot.instruction) for prompt in prompts)
    assert f"What you did: {json.dumps(first, ensure_ascii=False)}\n" in prompts[2]
    with contextlib.closing(Pool(Robot)) as pool:
        played = [*evaluation.run_episodes(
            Sampler(random_tiny(), max_new_tokens=4, check=False), {0: 3}, pool, seed=0,
            max_num_seqs=None, history=2)]
    assert json.loads(json.dumps(played))


def test_messages_of_an_environment_are_passed_on_as_they_are():
    wrong, right = (f"<think></think><action>{name}</action>" for name in ("Dog", "Cat"))
    turns, _ = with_responses(Gallery, "Cat", wrong, right)
    assert [contents(t.messages) for t in turns] == [
        [("system", Gallery.system), ("user", "(an image)\nWhat is it? Think, then answer in "
                                              "<action> </action>.")],
        [("user", "Wrong, try again.")]]
    assert [(t.reward, t.won, t.score) for t in turns] == [(0.0, False, 0.0), (1.0, True, 0.5)]
    with pytest.raises(ValueError, match='chat messages need .*--context full: set context = "fu'):
        with_responses(Gallery, "Cat", wrong, context="window")


def test_no_prompt_is_tried_twice_however_long_the_history(monkeypatch):
    """When none fits, all of them are encoded."""
    lm, tried = random_tiny(), []
    pool, ids = Pool("house", {"horizon": 4}), tasks("house", "train")[:1]
    prompt = envs.PromptBuilder.window_prompt
    monkeypatch.setattr(envs.PromptBuilder, "window_prompt", lambda builder, k: (
        tried.append((len(builder.history), k)) or prompt(builder, k)))
    sampler = Sampler(lm, max_new_tokens=4, max_prompt=9, check=False)
    with pytest.raises(ValueError, match="needs more than 9 tokens"):
        rollout(sampler, ids, pool, history=50)
    assert tried == [(0, 0)]
    rollout(Sampler(lm, max_new_tokens=4, check=False), ids, pool, history=50)
    assert tried[1:] == [(n, n) for n in range(4)]


def test_system_message_begins_every_prompt_of_window_and_every_conversation():
    class Wrapped2(Wrapped):
        system = "Be brief."

    for context in ("window", "full"):
        turns, _ = with_responses(Wrapped2, 1, "left", "left", *["right"] * 9, context=context)
        roles = [[message["role"] for message in t.messages] for t in turns]
        assert roles[0] == ["system", "user"] and len(turns) == 5
        assert roles[1] == (["system", "user"] if context == "window" else ["user"])


CALL = called("multiply", a=2, b=3)


@pytest.mark.parametrize("response, says", [
    ("<tool_call>multiply(2, 3)</tool_call>", "cannot be read as JSON: Expecting value"),
    (f"<think> I call {CALL}", "the thought has no </think>"),
    ("<tool_call>" + '{"name": "multiply", "arguments": {"a": ' + "[" * 5000 + "</tool_call>",
     "cannot be read as JSON"),
    (called("multiply", a=functools.reduce(lambda x, _: [x], range(400))), "nested too deeply"),
    (CALL * 2, "has <tool_call> 2 times"), (CALL[:-12], "</tool_call> 0 times"),
    (CALL.replace('"name"', '"tool"'), 'must contain {"name": "...", "arguments"'),
    ('<tool_call>{"name": "multiply"}</tool_call>', "must contain"),
    ('<tool_call>["multiply"]</tool_call>', "must contain"),
    (CALL.replace('{"a": 2, "b": 3}', '"2, 3"'), "must contain"),
    (called("divide", a=2, b=3), "there is no tool 'divide'; there are multiply, submit"),
    (called("reset", task=2), "there is no tool 'reset'")])
def test_response_with_a_wrong_call_is_invalid_and_is_told_why(response, says):
    turns, _ = with_responses(Calculator, 7, response, called("submit", number=91))
    assert turns[0].invalid and not turns[0].admissible and says in turns[0].action
    (role, content), = contents(turns[1].messages)
    assert (role, content) == ("tool", f"Error: {turns[0].action}") and turns[1].won


@pytest.mark.parametrize("response", ["91", "", f"<think>{CALL}</think> 91"])
def test_response_without_a_call_ends_the_episode(response):
    turn, = with_responses(Calculator, 7, response)[0]
    assert turn.invalid and turn.end == End.TERMINATED and not turn.won


def test_long_observations_are_cut_and_say_so():
    class Long(Calculator):
        max_observation = 50

        def multiply(self, a: str, b: int) -> str:
            """Repeats.

            Args:
                a: a text
                b: how often
            """
            return a * b

    turns, _ = with_responses(Long, 7, called("multiply", a="x", b=100000), "end")
    assert turns[1].messages == [
        {"role": "tool", "content": "x" * 50 + "... [99950 characters left out]"}]
    Long.max_observation = Calculator.max_observation
    turns, _ = with_responses(Long, 7, called("multiply", a="x", b=100000), "end")
    assert len(turns[1].messages[0]["content"]) < 8100


def tool(role="tool", content="x", **more):
    return {"role": role, "content": content} | more


@pytest.mark.parametrize("first, later, says", [
    (None, [tool("function")], "turn 1: ValueError: obs has a message of 'function' where only user"
                               " and tool can speak"),
    (None, [tool("assistant")], "of 'assistant' where .* the model is assistant"),
    (None, [tool(), tool("system")], "of 'system' where only user and tool"),
    ([tool("user"), tool("system")], None, ": ValueError: obs has a message of 'system' where"),
    ([tool("system"), tool("system")], None, "of 'system' where only user can"),
    ([tool()], None, "of 'tool' where only user can speak"),
    ([tool("system")], None, "a message of system, but none of user"),
    ([], None, "obs is .., not a string or a list of chat"),
    (None, [tool(content=[{"type": "image"}])], "the content of a message of tool is .*not a str"),
    (None, [tool(tool_call_id=3)], 'a message must be {"role": ..., "content": ...}'),
    (None, ["hello"], "obs has the message 'hello'; a message must be"),
    (None, tool(), "not a string or a list of chat messages"),
    (None, None, "obs is None, not a string")])
@pytest.mark.parametrize("workers", [0])
def test_bad_messages_of_an_environment_are_named(first, later, says, workers):
    class Bad(Gallery):
        system = None

        def reset(self, task):
            obs, info = super().reset(task)
            return obs if first is None else first, info

        def step(self, action):
            return later, 0.0, False, False, {}

    with pytest.raises(envs.GameError, match=f"Bad: game Cat failed.*{says}"):
        with_responses(Bad, "Cat", "x", "x", workers=workers)


def test_two_system_messages_are_refused():
    class Twice(Gallery):
        def reset(self, task):
            obs, info = super().reset(task)
            return [tool("system"), *obs], info

    with pytest.raises(envs.GameError, match="message of system, if the class has no `system`"):
        with_responses(Twice, "Cat", "x")


@pytest.mark.parametrize("parse_action, says", [
    (lambda text: (json.loads(text), True), "for 'no JSON' it fails: JSONDecodeError"),
    (lambda text: text, "parse_action.. must return .action, valid."),
    (lambda text: ({1, 2}, True), "TypeError: Object of type set is not JSON"),
    (lambda text: ({"a": [(1, 2)]}, True), "has .1, 2., which JSON makes a list"),
    (lambda text: ({"a": {1: 2}}, True), "has the key 1, which JSON makes a text"),
    (lambda text: (text, None), "valid is None, not True or False")])
def test_parsers_that_fail_are_named(parse_action, says):
    Bad = type("Bad", (Robot,), {"parse_action": staticmethod(parse_action)})
    with pytest.raises(envs.GameError, match=f"Bad: parse_action must .*{says}"):
        with_responses(Bad, 3, "no JSON")


@pytest.mark.parametrize("names, says", [
    ("multiply", "tools is 'multiply'; it must be a tuple"),
    (("multiplies",), "names 'multiplies'"), (({},), "names {}, which is"),
    (("reset",), "names 'reset', which is"),
    (("bare",), "Wrong.bare cannot be a tool: .*type hint"),
    (("rest",), r"Wrong.rest cannot be a tool: .*, and \*more: int has no name"),
    (("named",), r"Wrong.named cannot be a tool: .*, and \*\*more: int has no name"),
    (("first",), "Wrong.first cannot be a tool: .*, and x: int has no name")])
def test_methods_that_cannot_be_tools_are_named(names, says):
    class Wrong(Calculator):
        tools = names

        def bare(self, x):
            """Does nothing.

            Args:
                x: nothing
            """

        def rest(self, *more: int):
            """Takes any number of them.

            Args:
                more: what
            """

        def named(self, **more: int):
            """Takes any number of them.

            Args:
                more: what
            """

        def first(self, x: int, /):
            """Takes it by its place.

            Args:
                x: what
            """

    with pytest.raises(ValueError, match=says):
        with_responses(Wrong, 7, "x")


def test_tools_need_a_growing_conversation(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--context window cannot be used with --env Calculator"):
        train.settings(env=Calculator, context="window")
    name, out = "runtime.testing:Calculator", tmp_path / "run"
    config = train.parse(["--env", name, "--model", TINY_HOUSE])
    assert (config.context, config.max_prompt) == ("full", None)
    assert train.parse([]).context == "window"
    assert config.out == "runs/Calculator-tiny-house-0"
    assert train.parse(["--env", name, "--context", "full"]).out == "runs/Calculator-tiny-0"
    run_main(train, monkeypatch, "--env", name, "--batch_size", 2, "--iterations", 1,
             "--eval_games", 2, "--max_new_tokens", 4, "--out", out)
    assert json.loads((out / "config.json").read_text())["context"] == "full"
    page, = (out / "transcripts").glob("*.html")
    assert all(f"<h3>{role}</h3>" in page.read_text() for role in ("system", "user", "assistant"))
    assert "&quot;Multiplies two numbers.&quot;" in page.read_text()
    args = evaluation.make_parser("").parse_args(["--model", str(out)])
    _, settings = evaluation.complete(args)
    assert (settings.context, settings.max_prompt) == ("full", None)
    for model in (str(out), "tiny"):
        args = evaluation.make_parser("").parse_args(
            ["--model", model, "--env", name, "--context", "window"])
        with pytest.raises(ValueError, match="--context window cannot be used"):
            evaluation.complete(args)


@pytest.mark.parametrize("env, typed, shown", [
    ("house", [""] * 20, ["Your task is to: ", "Commands: 'go to ",
                          "Won: True, reward 10, score 1"]),
    (Calculator, ["hello", "", '{"name": "submit", "arguments": {"number": 13}}'],
     ["What is 13 times 1?\n> ", "Error: what the <tool_call> contains cannot be read",
      "Won: True, reward 1, score 1"]),
    (Wrapped, ["left", "", "right", "left", ""], [
        "The door is 1 steps", "(the expert knows no way", "Won: False, reward 0, score 0"])])
def test_a_person_can_play(env, typed, shown, monkeypatch, capsys):
    typed = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: print(prompt, end="") or next(typed))
    envs.play_by_hand(env)
    output = capsys.readouterr().out
    assert all(part in output for part in shown)

# -------------------------------------------------------------------------------- model and rollout

ARCHITECTURES = ["qwen2", "qwen3", "llama"]


def check_against_scoring(lm, turns, context, atol=1e-4):
    """The sampler's log-probs, V and Q are those of a scoring pass."""
    with torch.no_grad():
        scores = lm.score(batch_of(turns, context))
    close = functools.partial(torch.testing.assert_close, atol=atol, rtol=0)
    close(torch.tensor([x for t in turns for x in t.logp]), scores.logp)
    close(values_of(turns), lm.r_max * torch.stack([scores.p_v, scores.p_q], 1))


@CONTEXTS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kv_and_hf_engines_agree_with_each_other_and_with_scoring(architecture, context):
    lm = random_lm(architecture, seed=len(architecture))
    for temperature in (0.0, 1.0):
        played = {engine: play(lm, engine, context, temperature)[0] for engine in ("hf", "kv")}
        assert [t.action_ids for t in played["hf"]] == [t.action_ids for t in played["kv"]]
        # the responses have different lengths, so slots were freed at different times
        assert len({len(t.action_ids) for t in played["kv"]}) > 1
        for turns in played.values():
            check_against_scoring(lm, turns, context)


OTHER_ARCHITECTURES = {  # architecture: (its configuration, error of kv, error of both engines)
    "deepseek_v3": (dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                         kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                         v_head_dim=8, n_group=1, topk_group=1, num_key_value_heads=4), "", ""),
    "gemma3_text": ({}, "not every layer attends to all", ""),
    "gemma3": (dict(text_config={}, vision_config=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        image_size=28, patch_size=14)), "not every layer attends to all", ""),
    "mamba": ({}, "not every layer attends to all", ""),
    "qwen3_next": (dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                        shared_expert_intermediate_size=16, linear_key_head_dim=8,
                        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                        layer_types=["linear_attention", "full_attention"]),
                   "not every layer attends to all", ""),
    "mpt": (dict(d_model=32, n_heads=4, n_layers=2), "needs another kind of KV cache", ""),
    "bloom": (dict(n_layer=2, n_head=4), "needs another kind of KV cache", ""),
    "gemma2": ({}, "", "softcapping, scaling"),
    "granite": ({"logits_scaling": 8.0}, "", "softcapping, scaling"),
    "llama4_text": (dict(num_local_experts=2, intermediate_size_mlp=64), "", "has no base_model")}


@pytest.mark.parametrize("architecture", OTHER_ARCHITECTURES)
def test_other_architectures_work_with_kv_or_hf_or_are_refused_with_a_reason(architecture):
    config, kv_error, both_error = OTHER_ARCHITECTURES[architecture]
    if both_error:
        with pytest.raises(ValueError, match=both_error):
            random_lm(architecture, 1, **config)
        return
    lm = random_lm(architecture, 1, **config)
    if kv_error:
        with pytest.raises(ValueError, match=f"use --engine hf: .*{kv_error}"):
            Sampler(lm, check=False)
    for engine in ["kv", "hf"][bool(kv_error):]:
        turns, _ = play(lm, engine, "window", 1.0, games=GAMES[:2], horizon=2)
        check_against_scoring(lm, turns, "window", atol=1e-3)


def test_faults_of_the_sampler_are_not_said_to_be_the_models(monkeypatch):
    monkeypatch.setattr(DecodeState, "sample", lambda state, n: state.no_such_name)
    with pytest.raises(AttributeError, match="no_such_name"):
        Sampler(random_lm("qwen2", 1))


def kill_now_and_then(pool, when):
    """Kills a worker right after some of the actions that are sent to it."""
    step, sent = pool.step, iter(range(10 ** 6))

    def step_and_kill(key, action):
        step(key, action)
        n = next(sent)
        if n in when:
            pool.procs[n % len(pool.procs)].kill()

    pool.step = step_and_kill


@CONTEXTS
def test_rollout_does_not_depend_on_slots_workers_or_worker_deaths(context):
    """With any number of slots, of workers and of workers that die, the turns are the same up to
    rounding; with the same number of slots they are equal to the last bit."""
    lm = random_lm("qwen3", 1)
    contents = lambda turns: [(t.traj, t.turn, t.action_ids, t.text, t.done) for t in turns]
    whole, _ = play(lm, "kv", context, 1.0)
    for max_num_seqs in (1, 3, 99):
        some, sampler = play(lm, "kv", context, 1.0, max_num_seqs=max_num_seqs)
        assert contents(some) == contents(whole)
        same_tokens_and_values(some, whole)
        assert len(sampler.slots) <= max_num_seqs
    for max_num_seqs, workers, when in ((3, 2, ()), (3, 2, {4, 11, 20}), (99, 1, {7})):
        with a_pool(workers, horizon=6) as pool:
            kill_now_and_then(pool, when)
            again = rollout(Sampler(lm, "kv", context, 9), GAMES, pool, seed=(3,),
                            max_num_seqs=max_num_seqs)
        assert again == play(lm, "kv", context, 1.0, max_num_seqs=max_num_seqs)[0]


SLOW_HOUSE = """
import os, time
from environments.house import House

class Slow(House):
    asynchronous = True

    def reset(self, task):
        self.waits = task == "{}"
        return super().reset(task)

    def step(self, action):
        while self.waits and not os.path.exists("go"):
            time.sleep(0.01)
        return super().step(action)
"""


@CONTEXTS
def test_asynchronous_rollout_waits_for_no_slow_game_and_is_the_same_up_to_rounding(
        context, tmp_path, monkeypatch):
    (tmp_path / f"{tmp_path.name}.py").write_text(SLOW_HOUSE.format(GAMES[2]))
    monkeypatch.chdir(tmp_path)
    lm = random_lm("qwen3", 1)
    whole, _ = play(lm, "kv", context, 1.0)
    with contextlib.closing(Pool(f"{tmp_path.name}:Slow", {"horizon": 6}, workers=2)) as pool:
        sampler = Sampler(lm, "kv", context, 9)
        for max_num_seqs in (None, 3):
            again, over = [], []
            for traj, turns, _ in rollout_module.trajectories(
                    sampler, GAMES, pool, seed=(3,), max_num_seqs=max_num_seqs):
                again += turns
                over.append(traj)
                if len(over) == len(GAMES) - 1:
                    (tmp_path / "go").touch()
            assert over[-1] == 2
            (tmp_path / "go").unlink()
            again.sort(key=lambda turn: (turn.traj, turn.turn))
            assert [t.text for t in again] == [t.text for t in whole]
            same_tokens_and_values(again, whole)
        some = rollout(sampler, GAMES, pool, seed=(3,), interrupted=lambda: len(pool.games) == 1)
        assert some and 2 not in {t.traj for t in some} and not pool.games and not sampler.busy
        (tmp_path / "go").touch()


@pytest.mark.parametrize("engine", ["kv", "hf"])
def test_values_come_from_hidden_states_and_not_from_rounded_logits(engine):
    lm = random_lm("qwen2", 1)
    with torch.no_grad():  # two large rows, nearly the same: rounded logits would miss V by 0.05
        plus, minus = lm.value_rows.weight
        minus.copy_(40 * plus)
        plus.copy_(minus * 1.01)
    lm = dataclasses.replace(lm, model=lm.model.bfloat16())
    prompts = [[7] * 10, list(range(5, 29)), [9] * 3]
    u = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)).numpy()
    responses = Sampler(lm, engine, max_new_tokens=40)(range(3), prompts, u)
    batch = make_batch([(p + r.ids, [(len(p), len(p) + len(r.ids))])
                        for p, r in zip(prompts, responses)])
    with torch.no_grad():
        logp, _, p_v, p_q = lm.score(batch)
    torch.testing.assert_close(
        values_of(responses), lm.r_max * torch.stack([p_v, p_q], 1), atol=0.01, rtol=0)
    assert (torch.tensor([x for r in responses for x in r.logp]) - logp).abs().max() < 0.1


def test_hf_engine_allows_one_step_more_than_needed(monkeypatch):
    """On a GPU, generate finds out one step late that all sequences have ended."""
    lm, u = random_lm("qwen2", 1), torch.rand(2, 5).numpy()
    prompts = [lm.chat.encode_user_turn("go to fridge 1"), lm.chat.encode_user_turn("look")]
    responses = Sampler(lm, "hf", max_new_tokens=5)(range(2), prompts, u)
    generate = lm.model.generate

    def one_more(ids, **options):
        out = generate(ids, **options)
        options["logits_processor"](out, torch.zeros(2, len(lm.head.weight)))
        return out

    monkeypatch.setattr(lm.model, "generate", one_more)
    assert Sampler(lm, "hf", max_new_tokens=5)(range(2), prompts, u) == responses


def test_cache_grows_and_slots_are_compacted_without_changing_results():
    """Conversations of very different lengths start, end and continue. The hf engine, with which kv
    is compared, has neither cache nor slots."""
    lm, rng = random_lm("llama", 1), random.Random(0)
    kv, hf = Sampler(lm, "kv", "full", 12), Sampler(lm, "hf", "full", 12)
    conversations = {name: [] for name in range(6)}
    for turn in range(5):
        names = [n for n in conversations if rng.random() < 0.8] or [0]
        for n in names:
            length = rng.choice([1, 5, 90])
            conversations[n] += [rng.randrange(120, 500) for _ in range(length)]
        u = torch.rand(len(names), 12, generator=torch.Generator().manual_seed(turn)).numpy()
        by_kv, by_hf = (s(names, [conversations[n] for n in names], u) for s in (kv, hf))
        assert [r.ids for r in by_kv] == [r.ids for r in by_hf]
        torch.testing.assert_close(values_of(by_kv), values_of(by_hf), atol=1e-4, rtol=0)
        for n, r in zip(names, by_kv):
            conversations[n] += r.ids
        if turn == 2:  # an episode ends; its slot is used again
            kv.drop(0)
            conversations[0] = []
    # a new token behind 100 cached ones, prefilled beside a long prompt: its padding needs no room
    kv, u = Sampler(lm, "kv", "full", 12), np.full((2, 12), 0.5)
    long, other = [rng.randrange(120, 500) for _ in range(100)], [7] * 90
    long += kv([0], [long], u[:1])[0].ids + [8]
    expected = hf([0, 1], [long, other], u)
    assert [r.ids for r in kv([0, 1], [long, other], u)] == [r.ids for r in expected]


@CONTEXTS
def test_gpu_scheduling_samples_the_same_tokens(context, monkeypatch):
    """On a GPU, numbers of slots and lengths are rounded up, finished slots are decoded as padding,
    and steps are queued before the host knows which slots the steps before have finished."""
    lm = random_lm("qwen2", 1)
    plain = [play(lm, "kv", context, 1.0, max_num_seqs=max_num_seqs)[0] for max_num_seqs in (99, 5)]
    as_on_a_gpu(monkeypatch)
    for one, max_num_seqs in zip(plain, (99, 5)):
        turns, sampler = play(lm, "kv", context, 1.0, max_num_seqs=max_num_seqs)
        assert len(sampler.decode_step.graphs) > 1
        same_tokens_and_values(one, turns)


def test_logits_of_a_16_bit_model_are_not_rounded():
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1500, dtype=torch.bfloat16)
    hidden = (8 * torch.randn(9, 64)).bfloat16().requires_grad_()
    logits, g = float32_logits(hidden, head), torch.randn(9, 1500)
    exact = hidden.double() @ head.weight.double().T + head.bias.double()
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-6)
    found = torch.autograd.grad((logits * g).sum(), (hidden, *head.parameters()))
    wanted = torch.autograd.grad((exact * g).sum(), (hidden, *head.parameters()))
    for x, y in zip(found, wanted):
        assert (x - y).norm() < 0.01 * y.norm()


def test_hf_engine_restores_the_models_settings_even_after_errors(monkeypatch):
    lm = random_lm("qwen2", 1)
    before = lm.model.generation_config, lm.model.config._attn_implementation
    monkeypatch.setattr(lm.model, "generate", mock.Mock(side_effect=RuntimeError("failed")))
    with pytest.raises(RuntimeError, match="failed"):
        Sampler(lm, "hf", max_new_tokens=2)([0], [[5, 6]], torch.rand(1, 2).numpy())
    assert (lm.model.generation_config, lm.model.config._attn_implementation) == before


def test_full_context_encodes_every_token_once(monkeypatch):
    encoded, prefill = [], DecodeState.prefill

    def counting(state, ids, slot, num_cached, length, *rest):
        encoded.append(length.sum().item())
        return prefill(state, ids, slot, num_cached, length, *rest)

    monkeypatch.setattr(DecodeState, "prefill", counting)
    lm = random_lm("llama", 1)
    _, sampler = play(lm, "kv", "full", 1.0, horizon=1)  # with the check of a new sampler
    encoded.clear()
    turns = rollout(sampler, GAMES, Pool("house", {"horizon": 6}), seed=(3,))
    assert sum(encoded) == sum(len(t.prompt_ids) for t in turns) and turns[-1].turn > 1


def test_sample_token_draws_from_the_restricted_softmax():
    logits, value_ids = torch.tensor([[1.0, 9.0, 0.0, 9.0, -1.0]]), (1, 3)
    u = torch.linspace(0, 1, 20001)[:-1]
    token, logp = sample_token(logits.expand(len(u), -1), u, value_ids, 1.0)
    share, policy = token.bincount(minlength=5) / len(u), restricted_log_softmax(logits, value_ids)
    torch.testing.assert_close(share, policy[0].exp(), atol=1e-4, rtol=0)
    torch.testing.assert_close(logp, policy[0][token])
    seeded = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    wide = 2 * torch.randn(40, 1301, generator=seeded[0])  # over several blocks of words
    x = torch.rand(40, generator=seeded[1])
    drawn = sample_token(wide, x, (700, 1300), 0.7)[0].tolist()
    for z, share, t in zip(wide.tolist(), x.tolist(), drawn):
        weight = [0.0 if i in (700, 1300) else math.exp(a / 0.7) for i, a in enumerate(z)]
        target = share * sum(weight)
        assert sum(weight[:t]) <= target * (1 + 1e-6)
        assert target <= sum(weight[:t + 1]) * (1 + 1e-6)
    u = torch.tensor([0.0, 1 - 2 ** -24, 1.0])
    ends = sample_token(torch.zeros(3, 1000), u, (0, 999), 1.0)[0]
    assert not set(ends.tolist()) & {0, 999, 1000}


def test_non_finite_logits_skip_the_step_and_index_no_invalid_token(tmp_path):
    logits = torch.tensor([[NAN] * 300, [math.inf, -math.inf] * 150, [0.0] * 300])
    token, logp = sample_token(logits, torch.full((3,), 0.9), (0, 1), 0.7)
    assert ((0 <= token) & (token < 300)).all() and logp.isfinite().tolist() == [False, False, True]
    lm = random_lm("qwen2", 1)
    sampler = Sampler(lm, max_new_tokens=9)
    with torch.no_grad():
        lm.head.weight[7] = NAN
    turns = rollout(sampler, GAMES[:2], Pool("house", {"horizon": 6}))
    assert case_of(lm, turns, small_config(tmp_path)).step()["skipped_steps"]


class NoHostSync(TorchDispatchMode):
    """Refuses what would wait for a GPU, or copy to or from it."""

    REFUSED = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero,
               torch.ops.aten.masked_select, torch.ops.aten.lift_fresh, torch.ops.aten._unique2}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.REFUSED, func
        by_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_)
        assert not (by_mask and any(i is not None and i.dtype == torch.bool for i in args[1])), func
        return func(*args, **kwargs or {})


@CONTEXTS
def test_decoding_step_has_no_host_sync_and_no_copy(context):
    lm = random_lm("qwen2", 1)
    sampler = Sampler(lm, context=context, max_new_tokens=6)
    for name in range(3):
        sampler.add(name, [5 + name] * (4 + name), torch.full((6,), 0.3))
    sampler.run(2)
    with torch.no_grad():
        for refused in (lambda: torch.tensor([1]), lambda: torch.ones(2).sum().item(),
                        lambda: torch.ones(2)[torch.tensor([True, False])]):
            with pytest.raises(AssertionError), NoHostSync():
                refused()
        with NoHostSync():
            sampler.step()
    assert sampler.num_active == 3


def test_reserved_tokens_are_never_sampled_even_if_they_are_most_likely():
    lm = random_lm("qwen2", 1)
    with torch.no_grad():
        weight = lm.model.lm_head.weight
        weight[list(lm.value_ids)] = 3 * weight.abs().max()
    for engine in ("kv", "hf"):
        turns, _ = play(lm, engine, "window", 1.0, horizon=3)
        assert not set(lm.value_ids) & {i for t in turns for i in t.action_ids}


def test_a_batch_lists_every_response_token_and_every_turn():
    samples = [([5, 6, 7, 8, 9, 10], [(1, 2), (4, 6)]), ([11, 12, 13], [(2, 3)])]
    batch = make_batch(samples)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]]
    assert batch.length.tolist() == [6, 3]
    assert [x.tolist() for x in (batch.token_row, batch.token_col, batch.turn_of)] == [
        [0, 0, 0, 1], [1, 4, 5, 2], [0, 1, 1, 2]]
    assert [x.tolist() for x in (batch.row, batch.start, batch.end)] == [
        [0, 0, 1], [1, 4, 2], [2, 6, 3]]
    assert all(x.is_meta for x in batch.to("meta"))
    for wrong in ((0, 2), (2, 2), (2, 4)):
        with pytest.raises(ValueError, match="context"):
            make_batch([([1, 2, 3], [wrong])])


def test_generate_takes_a_list():
    with pytest.raises(ValueError, match="takes a list of prompts"):
        Sampler(random_tiny(), max_new_tokens=4, check=False).generate("What is red?")


def test_when_no_prompt_fits_the_task_is_named_and_not_the_prompt():
    sampler = Sampler(random_tiny(), max_new_tokens=4, max_prompt=9, check=False)
    with pytest.raises(ValueError, match="^the first prompt of 7, and of every other task, needs"):
        rollout(sampler, [7], Pool("house"))


def test_long_prompts_shorten_the_history_then_end_the_episode_then_raise():
    lm = random_lm("qwen2", 1)
    free, _ = play(lm, "kv", "window", 1.0)
    longest = max(len(t.prompt_ids) for t in free)
    tight, sampler = play(lm, "kv", "window", 1.0, sampler_options={"max_prompt": longest - 10})
    assert max(len(t.prompt_ids) for t in tight) <= longest - 10 == sampler.limit
    assert not any(t.context_overflow for t in tight)
    ended, sampler = play(lm, "kv", "full", 1.0, sampler_options={"max_prompt": 81})
    assert sampler.limit == 81
    last = [t for t in ended if t.done]
    assert len(last) == len(GAMES) and any(t.truncated and t.turn < 5 for t in last)
    pool = Pool("house", {"horizon": 6})
    assert rollout(sampler, GAMES, pool, seed=(3,)) == ended
    assert not pool.games  # those that were cut short were given up
    assert all(t.context_overflow == (t.turn < 5 and not t.won) for t in last)
    assert not any(t.context_overflow for t in free)
    first = [len(t.prompt_ids) for t in free if t.turn == 0]
    some, _ = play(lm, "kv", "window", 1.0, sampler_options={"max_prompt": max(first) - 1})
    assert 0 < len({t.traj for t in some}) == sum(n < max(first) for n in first) < len(GAMES)
    numbers = rollout_metrics(some, lm, CATEGORIES, len(GAMES))
    ends = [t for t in some if t.done]
    assert numbers["episodes"] == len(GAMES)
    assert numbers["success"] == pytest.approx(sum(t.won for t in ends) / len(GAMES))
    assert numbers["context_overflow"] == pytest.approx(
        (sum(t.context_overflow for t in ends) + len(GAMES) - len(ends)) / len(GAMES))
    for limit, says in (({"max_prompt": 10}, "than 10 tokens: raise --max_prompt"),
                        ({"max_new_tokens": 4090},
                         "--max_new_tokens 4090, no more of the model's 4096 are left")):
        with pytest.raises(ValueError, match=says):
            play(lm, "kv", "window", 1.0, max_new_tokens=limit.pop("max_new_tokens", 9),
                 sampler_options=limit)


@CONTEXTS
@pytest.mark.parametrize("workers", [0, 2])
def test_interrupted_rollout_returns_the_episodes_that_are_over(context, workers):
    lm = random_lm("qwen2", 1)
    sampler, longest = Sampler(lm, context=context, max_new_tokens=40), []
    options = dict(seed=3, max_num_seqs=3)
    run = sampler.run
    sampler.run = lambda steps: longest.append(steps) or run(steps)
    with a_pool(workers, horizon=6) as pool:
        whole = rollout(sampler, GAMES, pool, **options)
        runs = len(longest)
        for limit in (0, runs // 2, runs - 1):
            before = len(longest)
            interrupted = lambda: len(longest) - before >= limit
            some = rollout(sampler, GAMES, pool, interrupted=interrupted, **options)
            over = {t.traj for t in some if t.done}
            assert some == [t for t in whole if t.traj in over] and len(over) < len(GAMES)
            assert not pool.games and not sampler.busy
        assert over
        assert rollout(sampler, GAMES, pool, interrupted=lambda: False, **options) == whole
    assert max(longest) <= rollout_module.ENV_LATENCY_STEPS < sampler.max_new_tokens


def test_a_seed_is_a_number_or_several():
    turns = [play(random_lm("qwen2", 1), "kv", "window", 1.0, seed=seed, horizon=2)[0]
             for seed in (3, (3,), np.int64(3), (3, 0))]
    assert turns[0] == turns[1] == turns[2] != turns[3]
    assert math.isnan(turns[0][0].advantage)


@pytest.mark.parametrize("history", [0, 2])
def test_a_turn_is_what_the_game_showed_and_answered(history):
    """Replays every game by hand: what the model saw, what it did, and what the game answered."""
    games = envs.tasks("house", "train")[:24]
    turns, _ = play(load(TINY_HOUSE), "kv", "window", 1.0, max_new_tokens=16, horizon=20,
                    games=games, history=history)
    env, facts = make_env("house", horizon=20), set()
    for t in turns:
        if t.turn == 0:
            obs, info = env.reset(t.task)
            episode = House.prompt_builder(obs, info)
        assert t.messages == envs.user_message(episode.window_prompt(history)) and t.obs == obs
        action, valid = env.parse_action(t.text)
        assert (t.action, t.invalid) == (action, not valid)
        assert t.admissible == (action in info["admissible"])
        obs, reward, won, truncated, info = env.step(action)
        assert (t.reward, t.done, t.truncated) == (reward, won or truncated, truncated)
        assert (t.won, t.score, t.category) == (won, float(won), info["category"])
        episode.record(action, obs, info)
        facts |= {("won", t.won), ("admissible", t.admissible), ("truncated", t.truncated)}
    assert len(facts) == 6


def test_terminated_counts_where_an_environment_says_terminated_and_truncated():
    class Both(House):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated or terminated, info

    sampler = Sampler(load(TINY_HOUSE), max_new_tokens=16)
    turns = rollout(sampler, envs.tasks("house", "train")[:12], Pool(Both, {"horizon": 20}))
    ends = {(turn.won, turn.end) for turn in turns if turn.done}
    assert ends == {(True, End.TERMINATED), (False, End.HORIZON)}


def test_v_learns_in_16_bits_at_the_papers_learning_rate():
    """A step of 1e-6 would be rounded away in a bfloat16 row of ordinary size."""
    base, batch = random_lm("qwen2", 0), make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    model, targets = base.model.bfloat16(), (torch.zeros(2), torch.ones(2))
    for tokens in ((7, 8), base.value_ids):  # rows that are 0, and two equal ones of ordinary size
        lm = actor_critic(model, base.tokenizer, None if tokens == base.value_ids else tokens,
                          value_ids=base.value_ids)
        rows = lm.value_rows.weight
        rows.data[1] = rows.data[0]
        before = rows.detach().clone()
        assert before.any() == (tokens == base.value_ids) and not lm.score(batch).p_v.any()
        v = lambda batch: (value_loss(lm.score(batch).p_v, *targets, clip=0.2)[0], {})
        optimizer = optim.AdamW([{"params": params} for params in lm.parameters()], 1e-6)
        imitate.train_step(model, optimizer, [batch], v, 1e-6)
        assert rows.dtype == torch.float32 and lm.score(batch).p_v.all()
        unmoved = (rows.bfloat16() == before.bfloat16()).float().mean()
        assert unmoved > 0.9 if before.any() else unmoved == 0


# ---- use in other programs

def test_python_example_of_the_readme_trains_in_a_thread(tmp_path, monkeypatch, capsys):
    text = pathlib.Path(f"{HERE}/README.md").read_text(encoding="utf-8")
    lines = re.search("From Python.*?```python\n(.*?)```", text, re.S)[1]
    monkeypatch.chdir(tmp_path)
    thread = threading.Thread(target=exec, args=(lines, {"__name__": "__main__"}))
    thread.start()
    thread.join()
    printed = re.findall(r"(\d) of 3: success (\d+)%", capsys.readouterr().out)
    assert [n for n, _ in printed] == ["1", "2", "3"] and int(printed[0][1]) < int(printed[2][1])
    assert os.listdir(tmp_path) == ["trained"]
    assert load(str(tmp_path / "trained")).value_ids == load(TINY_HOUSE).value_ids


def test_tasks_are_sorted_and_must_exist():
    class Mine(House):
        def tasks(self, split):
            return {"b", "a", 2, 1} if split == "train" else None

    assert envs.tasks(Mine, "train") == [1, 2, "a", "b"]  # a set has no order of its own
    with pytest.raises(ValueError, match="Mine has no tasks in the split 'test'"):
        envs.tasks(Mine, "test")
    typo = "the tasks of the split 'tset' are those of \"train\", .*: train, test, validation"
    with pytest.raises(ValueError, match=typo):
        envs.tasks("environments.sql_agent:SQLAgent", "tset")
    with pytest.raises(ValueError, match="Env has no method tasks"):
        envs.tasks(envs.Env, "test")
    with pytest.raises(ValueError, match="put the class into a module"):
        Pool(Mine, workers=1)
    assert Pool(Mine).env is Mine
    with contextlib.closing(Pool(House, {"horizon": 3}, workers=1)) as pool:
        pool.start(0, GAMES[0])
        assert len(pool.gather([0])) == 1


def test_sampler_refuses_unknown_engines_and_contexts():
    with pytest.raises(ValueError, match="known: kv, hf; window, full"):
        Sampler(random_tiny(), context="conversation")


@pytest.mark.parametrize("sequence, u, says", [
    ("text", [0.5] * 4, "lm.chat.encode_user_turn"), ([1.0], [0.5] * 4, "lm.chat.encode_user_turn"),
    ([], [0.5] * 4, "a sequence has 0 tokens"), ([5, 10 ** 6], [0.5] * 4, "ids from 5 to 1000000"),
    ([-1, 5], [0.5] * 4, "ids from -1"), ([5], None, "4 uniform random numbers"),
    ([5], [0.5], "4 uniform random numbers")])
def test_sampler_refuses_invalid_sequences(sequence, u, says):
    sampler = Sampler(random_tiny(), max_new_tokens=4)
    with pytest.raises(ValueError, match=says):
        sampler.add("a", sequence, u)
    assert not sampler.busy


def test_sampler_refuses_names_in_use_and_unrelated_conversations():
    lm = random_tiny()
    for context in ("window", "full"):
        sampler = Sampler(lm, context=context, max_new_tokens=4, temperature=0.0)
        with pytest.raises(ValueError, match="None is not a valid key"):
            sampler.add(None, [5])
        sampler.add("a", [5, 6])
        with pytest.raises(ValueError, match="the sequence with key 'a' has no response yet"):
            sampler.add("a", [5, 6])
        (_, response), = sampler.run()
        past = [5, 6] + response.ids
        for other in ([5], [9] * 20, past) if context == "full" else ():
            with pytest.raises(ValueError, match="this sequence does not continue"):
                sampler.add("a", other)
        sampler.add("a", changed := past[:2] + [9, *past[3:], 7])  # the response was
        (_, found), = sampler.run()
        expected, = Sampler(lm, max_new_tokens=4, temperature=0.0).generate([changed])
        assert found.ids == expected.ids and found.v == pytest.approx(expected.v, abs=1e-4)
        sampler.drop("a")
        sampler.add("a", [9])
    with pytest.raises(ValueError, match="2 keys, 1 sequences and 2 rows"):
        sampler([1, 2], [[5]], [[0.5] * 4] * 2)


def test_importing_and_wrapping_changes_no_process_wide_settings():
    code = """if True:
        import os, sys, torch, huggingface_hub.constants
        shared = lambda: (torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled(),
                          [*sys.path], huggingface_hub.constants.HF_HUB_OFFLINE, os.getcwd())
        before = shared()
        import envs, eval, model, rollout, sapo, train
        rollout.Sampler(model.load("tiny"), max_new_tokens=4).generate(["look"])
        envs.env_class("environments.frozen_lake:FrozenLake")
        assert shared() == before, (before, shared())"""
    env = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], cwd=HERE, env=env, check=True)


def test_actor_critic_accepts_compiled_models_token_ids_and_tokenizers_without_template():
    lm = random_lm("llama", 1)
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.chat_template = None
    whole = copy.deepcopy(lm.model)
    whole.compile()
    for model in (torch.compile(lm.model), whole):
        again = actor_critic(model, tokenizer, value_tokens=(15, 16))
        assert again.value_ids == (15, 16) and again.chat is None
        assert again.score(make_batch([([5, 6, 7], [(1, 3)])])).logp.isfinite().all()
        response, = Sampler(again, max_new_tokens=4).generate([[5, 6, 7]])
        assert len(response.ids) == len(response.logp)

# -------------------------------------------------------------------------------------------- train

def test_loop_fits_a_screen_and_stands_in_the_readme():
    assert len(dataclasses.fields(train.Config)) <= 50
    loop = inspect.getsource(train.train).strip()
    assert len(loop.splitlines()) <= 32
    learn = textwrap.dedent(inspect.getsource(train.Learner.learn)).strip()
    shown = re.findall(r"```python\n(.*?)```", pathlib.Path(HERE, "README.md").read_text(), re.S)
    for code in loop, learn:
        assert any(code in textwrap.dedent(block) for block in shown)


def test_line_counts_of_the_readme():
    """Tests are not counted."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+) \|", text, re.M)
    assert {name.removesuffix("/").removesuffix(".py") for name, _ in rows} == MAY_IMPORT.keys()
    for name, lines in rows:
        files = [HERE / name] if name.endswith(".py") else HERE.glob(f"{name}*.py")
        total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files
                    if not path.name.startswith("test"))
        assert (name, lines) == (name, f"{total:,}")


@CONTEXTS
@pytest.mark.parametrize("flags", ["--c_v 0 --c_q 0", "--algo grpo --group_size 3"])
def test_the_first_step_is_reinforce_and_leaves_the_value_rows_alone(tmp_path, unclipped, flags,
                                                                     context):
    case = prepared(tmp_path, "--context", context, "--c_h", 0, *flags.split())
    info, lm = case.step(), case.learner.lm
    # exactly, because all passes have the same padded batches
    assert info["ratio_max"] == 1 and info["clip_fraction"] == info["kl"] == 0
    found = gradient(lm)
    assert not lm.model.lm_head.weight.grad[list(lm.value_ids)].any()
    zero_gradients(lm)
    tokens = sum(len(m.batch.turn_of) for m in case.minibatches[0])
    for n, z in case.logits():
        token = torch.tensor(case.batch.turns[n].action_ids)[:, None]
        logp = restricted_log_softmax(z[:-1], lm.value_ids).gather(1, token)
        (-case.of_turn(n, case.targets.adv)[0] * logp.sum() / tokens).backward()
    torch.testing.assert_close(found, gradient(lm), atol=1e-5, rtol=1e-4)


@CONTEXTS
def test_sizes_of_micro_batches_and_chunks_change_no_gradient(tmp_path, context, unclipped):
    found, parts, rows = [], [], []
    for budget, chunk in ((1, 1000), (300, 1000), (100000, 1000), (100000, 7)):
        case = off_policy(prepared(tmp_path, "--context", context, "--mini_batch", 1000,
                                   "--tokens_per_micro_batch", budget))
        lm, rows = case.learner.lm, []
        lm.chunk = chunk
        lm.head.register_forward_hook(lambda head, hidden, logits: rows.append(len(*hidden)))
        case.step()
        found.append(gradient(lm))
        parts.append(len(case.minibatches[0]))
    assert parts[0] > parts[1] > parts[2] and max(rows) == 7
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)


def test_gradients_of_a_16_bit_model_are_added_up_in_float32(tmp_path, unclipped):
    """A sum over many micro-batches, against the sum of their gradients in float64."""
    def error(state_dtype):
        lm = random_lm("qwen2", 1, dtype=torch.bfloat16)
        case = off_policy(prepared(tmp_path, "--mini_batch", 1000, "--tokens_per_micro_batch", 1,
                                   "--optim_state_dtype", state_dtype, lm=lm))
        case.step()
        whole, total = gradient(lm).double(), 0
        tokens = sum(len(m.batch.turn_of) for m in case.minibatches[0])
        loss_of = lambda micro: case.learner.loss(micro, case.old, case.ref, case.targets, tokens,
                                                  len(case.minibatches[0]))
        for micro in case.minibatches[0]:
            train.accumulate_gradients(lm.model, case.learner.optimizer, [micro], False, loss_of)
            total = total + gradient(lm).double()
        return ((whole - total).norm() / total.norm()).item()

    assert error("float32") < 1e-5 < 1e-3 < error("bfloat16")


def test_update_of_a_16_bit_model_can_be_compiled_again_at_any_time(monkeypatch, caplog):
    """The compiler cannot trace a 16-bit model that has float32 gradients."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    lm = random_lm("qwen2", 1, dtype=torch.bfloat16)
    optimizer = optim.AdamW([{"params": params} for params in lm.parameters()], 1e-3)
    batch = batch_of(play(lm, "kv", "window", 1.0)[0])
    fast = dataclasses.replace(lm, compile=True)

    def loss_of(micro):
        torch._dynamo.reset()
        return sum(x.sum() for x in fast.score(micro)), {}

    train.accumulate_gradients(lm.model, optimizer, [batch], False, loss_of)
    once = gradient(lm)
    train.accumulate_gradients(lm.model, optimizer, [batch] * 3, False, loss_of)
    assert once.dtype == torch.float32
    torch.testing.assert_close(gradient(lm), 3 * once)
    assert not torch._dynamo.utils.counters["graph_break"] and "falling back" not in caplog.text


def test_gradients_are_freed_before_a_rollout(tmp_path, monkeypatch):
    def watched(sampler, *args, **options):
        lm = sampler.lm
        gradients = [p.grad for p in (*lm.model.parameters(), *lm.value_rows.parameters())]
        assert gradients == [None] * len(gradients)
        iterations.append(args)
        return rollout(sampler, *args, **options)

    iterations = []
    monkeypatch.setattr(train, "rollout", watched)
    train.train(small_config(tmp_path / "run", "--iterations", 2))
    assert len(iterations) == 2


@CONTEXTS
def test_update_has_the_gradient_of_the_papers_loss(tmp_path, context, unclipped):
    """Eq. 1 to 12 from logits to gradient, off-policy, with another number for every setting."""
    case = off_policy(prepared(
        tmp_path, "--context", context, *"--clip 0.1 --c_v 0.7 --c_q 0.3 --beta 0.05 --c_h 0.02 "
        "--gamma 0.9 --gae_lambda 0.8 --c_inv 0.6 --r_max 4".split()))
    info, lm, turns = case.step(), case.learner.lm, case.batch.turns
    found = gradient(lm)
    zero_gradients(lm)
    adv, y_v, y_q = turn_targets(*case.columns("traj", "turn", "reward", "done"), 4 * case.old.p_v,
                                 4 * case.old.p_q, gamma=0.9, lam=0.8)
    adv = advantages_by_loop(adv, *case.columns("invalid"), 0.6, torch.ones(len(turns)), 1e-8)
    tokens = sum(len(m.batch.turn_of) for m in case.minibatches[0])
    count = sum(len(m.batch.start) for m in case.minibatches[0])
    words = [i for i in range(lm.model.config.vocab_size) if i not in lm.value_ids]
    plus, minus = lm.value_ids
    total = 0.0

    def regression(z, old, y):
        p = ((z[plus] - z[minus]) / lm.tau_v).clamp(-1, 1)
        return torch.maximum((p - y) ** 2, (old + (p - old).clamp(-0.1, 0.1) - y) ** 2) / 2

    for n, z in case.logits():
        logp = torch.log_softmax(z[:-1, words], -1)
        h = -(logp.exp() * logp).sum(-1)
        logp_token = torch.stack([x[words.index(i)] for x, i in zip(logp, turns[n].action_ids)])
        rho = (logp_token - case.of_turn(n, case.old.logp)).exp()
        r = case.of_turn(n, case.ref) - logp_token
        surrogate = torch.minimum(rho * adv[n], rho.clamp(0.9, 1.1) * adv[n])
        loss = (0.05 * (r.exp() - 1 - r) - surrogate - 0.02 * h).sum() / tokens
        loss = loss + 0.7 * regression(z[0], case.old.p_v[n], y_v[n] / 4) / count
        loss = loss + 0.3 * regression(z[-1], case.old.p_q[n], y_q[n] / 4) / count
        loss.backward()
        total += loss.item()
    assert info["loss"] == pytest.approx(total, abs=1e-5)
    assert all(0 < info[k] < 1 for k in ("clip_fraction", "v_clip_fraction", "q_clip_fraction"))
    torch.testing.assert_close(found, gradient(lm), atol=1e-5, rtol=1e-3)


@CONTEXTS
@pytest.mark.parametrize("size", [1, 12])
def test_every_turn_is_trained_once_and_micro_batches_cover_both_axes(tmp_path, context, size):
    case = prepared(tmp_path, "--context", context, "--mini_batch", size,
                    "--tokens_per_micro_batch", 500)
    batch, turns, config = case.batch, case.batch.turns, case.learner.config
    seen = [(t.traj, t.turn) for t in turns]
    length = Counter(t.traj for t in turns)
    assert sorted(seen) == [(traj, n) for traj in range(7) for n in range(length[traj])]
    sizes = [sum(len(m.batch.start) for m in mini) for mini in case.minibatches]
    assert all(sizes)  # however long a trajectory is
    if context == "window":  # a trajectory of `full` is not divided
        assert len(sizes) == math.ceil(len(turns) / size) and max(sizes) - min(sizes) <= 1
    tokens = n = 0
    for m in (m for mini in case.minibatches for m in mini):
        mine = turns[n:n + len(m.batch.start)]
        sampled = [i for t in mine for i in t.action_ids]
        assert m.batch.ids[m.batch.token_row, m.batch.token_col].tolist() == sampled
        assert m.batch.ids.numel() <= max(500, m.batch.ids.shape[1])
        assert m.token_slice == slice(tokens, tokens + len(sampled))
        assert m.turn_slice == slice(n, n + len(mine))
        tokens, n = m.token_slice.stop, m.turn_slice.stop
    assert n == len(turns) and tokens == len(batch.turn_of_token) == len(batch.logp)
    assert batch.turn_of_token.tolist() == [n for n, t in enumerate(turns) for _ in t.action_ids]
    other = train.make_minibatches(turns, dataclasses.replace(config, seed=1), 0, "cpu")[0].turns
    assert seen != [(t.traj, t.turn) for t in other]


def test_steps_are_clipped_and_not_taken_where_they_are_not_finite(tmp_path):
    case = prepared(tmp_path, "--c_v", 1000)
    norms = case.step()
    assert norms["grad_norm"] > 1 and norms["grad_norm_values"] > 1
    assert gradient(case.learner.lm).norm().item() == pytest.approx(2 ** 0.5, rel=1e-4)
    adv = case.targets.adv.clone()
    adv[case.minibatches[0][0].token_slice.start] = NAN
    bad = case._replace(targets=case.targets._replace(adv=adv))
    order = [(bad, 0)] * 4 + [(case, 1)] + [(bad, 0)] * 4
    skipped = [which.step(n)["skipped_steps"] for which, n in order]
    assert skipped == [1] * 4 + [0] + [1] * 4
    with pytest.raises(ValueError, match="5 steps in a row.*start again from.*a lower --lr"):
        bad.step()
    assert case.learner.optimizer.step.call_count == 2


def test_rows_of_the_values_are_clipped_by_themselves(tmp_path, monkeypatch, unclipped):
    """So that V's error, which is in their gradient, does not decide how far the policy moves."""
    case = prepared(tmp_path)
    lm, optimizer = case.learner.lm, case.learner.optimizer
    norms = case.step()
    whole = [p.grad.clone() for p in lm.model.parameters()]
    rows = lm.value_rows.weight.grad.clone()
    assert norms["grad_norm_values"] == pytest.approx(rows.norm().item(), rel=1e-5)
    assert not lm.head.weight.grad[[*lm.value_ids]].any()  # the head's own rows have no part in it
    total = gradient(lm).norm().item()
    found = math.hypot(norms["grad_norm"], norms["grad_norm_values"])
    assert found == pytest.approx(total, rel=1e-4)
    lm.value_rows.bias = torch.nn.Parameter(torch.zeros(2))  # where the head has one
    optimizer.param_groups[1]["params"].append(lm.value_rows.bias)
    for limit in 0.5 * norms["grad_norm"], 2 * norms["grad_norm"]:
        for factor in 0.1, 10:  # of the rows' gradient: below the limit, and above
            for p, g in zip(lm.model.parameters(), whole):
                p.grad = g.clone()
            of_rows = torch.cat([rows, torch.tensor([[3.0], [-2.0]])], dim=1)
            of_rows *= factor * limit / of_rows.norm()
            lm.value_rows.weight.grad, lm.value_rows.bias.grad = of_rows[:, :-1], of_rows[:, -1]
            monkeypatch.setattr(train, "GRAD_CLIP", limit)
            found = train.clip_gradients(lm.parameters())
            found.append(math.hypot(*(p.grad.norm() for p in lm.value_rows.parameters())))
            found.append(math.hypot(*(p.grad.norm() for p in lm.model.parameters())))
            expected = [norms["grad_norm"], factor * limit,
                        min(factor, 1) * limit, min(limit, norms["grad_norm"])]
            assert found == pytest.approx(expected, rel=1e-4)


def test_rows_of_the_values_have_a_learning_rate_of_their_own(tmp_path):
    """A step moves w+ and w- value_lr_factor times as far as with a factor of 1, and all other
    parameters just as far; also in a warmup."""
    def moves(factor):  # how far the first step moves each parameter, w+ and w- last
        case = prepared(tmp_path / str(factor), "--value_lr_factor", factor, "--lr", 1e-4,
                        "--lr_warmup", 4, "--mini_batch", 1000)
        lm = case.learner.lm
        learner = train.Learner(lm, case.learner.config)
        before = [p.detach().clone() for group in lm.parameters() for p in group]
        learner.learn(case.batch.turns, 0)
        after = [p.detach() for group in lm.parameters() for p in group]
        return [b - a for a, b in zip(before, after)]

    *model, rows = moves(1)
    for factor in 0.5, 10, 0:
        *same, found = moves(factor)
        assert all(x.equal(y) for x, y in zip(same, model))
        near(found, factor * rows)
    assert rows.abs().max() > 1e-5  # lr times a quarter, because of the warmup
    assert train.Config().value_lr_factor == 10


def test_learn_equals_the_loop_and_old_scores_are_fixed_during_an_update(tmp_path, monkeypatch):
    """Old scores are those before the first step of an iteration, the reference's those of the
    initial model; and tau_v and r_max are those of the flags, if given, not of the model's
    folder."""
    def watched(*args, **options):
        kept.append(rollout(*args, **options))
        return copy.deepcopy(kept[-1])

    def step(mini, old, *args):
        info = train.Learner.step(learner, mini, old, *args)
        steps.append((old, info, learner.optimizer.param_groups[0]["lr"]))
        return info

    kept, model = [], shutil.copytree(TINY_HOUSE, tmp_path / "start")
    (model / "sapo.json").write_text('{"value_ids": [599, 600], "tau_v": 0.25, "r_max": 5.0}')
    config = small_config(tmp_path / "run", "--iterations", 3, "--mini_batch", 6, "--lr", 1e-2,
                          "--lr_warmup", 4, "--lr_final_fraction", 0.5, "--model", model,
                          "--tau_v", 1, "--r_max", 10)
    monkeypatch.setattr(train, "rollout", watched)
    train.train(config)
    learner = train.Learner(load(TINY_HOUSE, tau_v=1.0, r_max=10.0), config)
    learner.step = step
    for n, line in enumerate(read_lines(tmp_path / "run" / "metrics.jsonl")):
        first, steps = learner.optimizer_steps, []
        metrics = learner.learn(kept[n], n)
        assert metrics == {key: line[key] for key in metrics}
        assert all(p.grad is None for group in learner.lm.parameters() for p in group)
        old, info, lr = zip(*steps)
        assert len(steps) > 2 and all(scores is old[0] for scores in old)
        assert info[0]["ratio_max"] == 1 < max(step["ratio_max"] for step in info)
        assert (info[0]["kl"] > 1e-4) == (n > 0)
        assert lr == pytest.approx([1e-2 * min(1, (first + k + 1) / 4) * (1 - n / 6)
                                    for k in range(len(steps))])


@CONTEXTS
def test_untrained_v_counts_as_zero(tmp_path, context):
    case = prepared(tmp_path, "--context", context, "--c_v", 0, "--c_q", 0)
    zeros = torch.zeros(len(case.batch.turns))
    adv, *_ = turn_targets(*case.columns("traj", "turn", "reward", "done"), zeros, zeros,
                           gamma=0.95, lam=0.95)
    near(advantages(case), whitened(adv.double() - 0.1 * case.columns("invalid")[0]))
    assert case.old.p_v.any() and not case.targets.v.any()

@pytest.mark.parametrize("compile", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(tmp_path, unclipped, monkeypatch, compile):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for flags in ((), ("--gradient_checkpointing",)):
        lm, saved = random_lm("qwen2", 1), []
        lm = with_speed_and_memory_settings(lm, small_config(tmp_path, *flags))
        lm = dataclasses.replace(lm, compile=compile and bool(flags))
        case = prepared(tmp_path, *flags, lm=lm)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x,
                                                      lambda x: x):
            case.step()
        found.append(gradient(lm))
        width = lm.model.config.intermediate_size  # of the MLP's activations
        kept = any(math.prod(shape) > 100 * width and shape[-1] == width for shape in saved)
        assert kept == (not flags) and not lm.model.training
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def update_of_a_rank(rank, size, uneven, context, out):
    distributed.BUCKET = 3000  # several of them
    lm, share = random_lm("qwen2", 1), range(rank, 5, size)
    if uneven:
        share = range(5) if rank == 0 else []
    config = train.parse(["--mini_batch", "1000", "--tokens_per_micro_batch", "300",
                                 "--context", context, "--c_inv", "0.5"])
    turns = []
    if share:
        turns = play(lm, "kv", context, 1.0, games=[GAMES[i] for i in share], trajs=share)[0]
    for t in turns:
        t.reward, t.invalid = 10.0 * (t.done and t.traj % 2), t.turn % 3 == 0
    case = off_policy(case_of(lm, turns, config))
    assert len(case.minibatches) == 1
    info = case.step()
    if rank == 0:
        torch.save((gradient(lm), info), out)


@CONTEXTS
def test_any_number_of_ranks_gives_the_gradient_of_one(tmp_path, context):
    """Ranks have different numbers of turns; in the last case rank 0 has all of them."""
    results = []
    for size, uneven in ((1, False), (2, False), (3, False), (3, True)):
        out = tmp_path / f"{size}{uneven}"
        on_ranks(update_of_a_rank, size, size, uneven, context, out)
        results.append(torch.load(out))
    for gradients, info in results[1:]:
        assert (gradients - results[0][0]).norm() < 1e-5 * results[0][0].norm()
        assert info == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)

# --------------------------------------------------------------- single promises, one test for each

def test_random_numbers_differ_between_seeds_trajectories_and_turns():
    keys = itertools.product(range(2), repeat=4)
    drawn = {tuple(rollout_module.uniform_numbers((seed, iteration), traj, turn, 3))
             for seed, iteration, traj, turn in keys}
    assert len(drawn) == 16


def test_generate_depends_on_its_seed_alone():
    sampler = Sampler(random_lm("qwen2", 1), context="full", max_new_tokens=8)
    sampler.add("left", [5, 6], [0.5] * 8)
    one, other, again = (sampler.generate([[5, 6, 7]], seed) for seed in (0, 1, 0))
    assert one == again and one[0].ids != other[0].ids and not sampler.busy


def test_tag_that_the_template_begins_counts_as_part_of_the_response(monkeypatch):
    lm = random_lm("qwen2", 1)
    lm.chat.response_prefix = "<think>\n"
    monkeypatch.setattr(type(lm), "text", lambda lm, ids: "a</think><action>look</action>")
    turn, = play(lm, "kv", "window", 1.0, games=GAMES[:1], horizon=1)[0]
    assert turn.action == "look" and not turn.invalid


def test_generation_settings_of_a_model_do_not_change_the_policy():
    lm = random_lm("qwen2", 1)
    lm.model.generation_config.repetition_penalty = 9.0
    hf, kv = (play(lm, engine, "window", 1.0, horizon=2)[0] for engine in ("hf", "kv"))
    assert [t.action_ids for t in hf] == [t.action_ids for t in kv]


def test_bias_of_the_head_counts_in_the_readout_and_starts_at_zero():
    lm, batch = random_lm("phi", 1), make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    torch.nn.init.normal_(lm.head.bias)
    del lm.model.sapo_value_rows  # so that they are read from the head again
    lm = actor_critic(lm.model, lm.tokenizer, value_ids=lm.value_ids, tau_v=lm.tau_v)
    scores, logits = lm.score(batch), lm.model(batch.ids).logits[0]
    for p, at in ((scores.p_v, batch.start - 1), (scores.p_q, batch.end - 1)):
        torch.testing.assert_close(p, value_readout(logits[at], lm.value_ids, tau=lm.tau_v))
    assert p.any()
    del lm.model.sapo_value_rows  # so that rows are reserved for the first time
    lm = actor_critic(lm.model, lm.tokenizer)
    assert lm.value_rows.bias is not None and not torch.cat(lm.score(batch)[2:]).any()


def test_skipped_steps_are_counted_and_maxima_kept(tmp_path):
    case = prepared(tmp_path)
    step = case.step()
    steps = [step | {"skipped_steps": 1, "kl_max": x} for x in (3.0, 1.0)]
    metrics = train.compute_metrics(case.targets, steps)
    assert (metrics["skipped_steps"], metrics["kl_max"]) == (2, 3.0)
    skipped = step | {"skipped_steps": 1, "loss": math.nan, "kl_max": math.nan}
    assert train.compute_metrics(case.targets, [step, skipped]) == (
        train.compute_metrics(case.targets, [step, step]) | {"skipped_steps": 1})
    assert math.isnan(train.compute_metrics(case.targets, [skipped])["loss"])


def test_games_of_a_limited_evaluation_are_evenly_spaced():
    assert evaluation.evenly_spaced([*range(10)], 4) == [0, 2, 5, 7]
    assert [len(evaluation.evenly_spaced([*range(10)], n)) for n in (0, 99)] == [10, 10]


def test_records_of_all_ranks_are_in_order(monkeypatch):
    monkeypatch.setattr(evaluation, "world_size", lambda: 3)
    monkeypatch.setattr(evaluation, "all_gather_list", list)
    settings, records = types.SimpleNamespace(seed=0, max_num_seqs=1, history=2), []
    for rank in range(3):
        monkeypatch.setattr(evaluation, "rank", lambda: rank)
        records += evaluation.play(None, list("abcdefg"), None, settings,
                                   lambda sampler, games, *_, **__: [*games.items()][::-1])
    assert records == list("abcdefg")


def test_evaluation_uses_the_seed_history_and_number_of_games(monkeypatch):
    seen = {}
    monkeypatch.setattr(evaluation, "trajectories",
                        lambda *_, **options: seen.update(options) or [])
    settings = types.SimpleNamespace(seed=5, history=1, max_num_seqs=3)
    evaluation.play(None, ["a"], None, settings)
    assert (seen["seed"][0], seen["history"], seen["max_num_seqs"]) == (5, 1, 3)


def test_evaluation_counts_unplayed_games_as_lost(tmp_path, monkeypatch, capsys):
    run_main(evaluation, monkeypatch, "--model", "tiny", "--max_new_tokens", 4, "--max_prompt", 10,
             "--limit", 2, "--out", tmp_path)
    assert "2 of 2 episodes ended because the next prompt" in capsys.readouterr().out
    played = read_lines(tmp_path / "eval-tiny-test.jsonl")
    assert all(episode["truncated"] and not episode["won"] for episode in played)


def test_settings_of_a_run_hold_only_in_its_own_environment(tmp_path):
    run = a_run(tmp_path / "run", 0.5, 1, horizon=4, max_prompt=99, data="x")
    args = evaluation.make_parser("").parse_args(
        ["--model", run, "--env", "environments.frozen_lake:FrozenLake"])
    _, settings = evaluation.complete(args)
    assert (settings.horizon, settings.data, settings.max_prompt) == (None, None, 2048)
    args = evaluation.make_parser("").parse_args(
        ["--model", run, "--env", "environments.house:House"])
    _, settings = evaluation.complete(args)
    assert (settings.horizon, settings.data, settings.max_prompt) == (4, "x", 99)
    for flag in ("--history -1", "--limit -3", "--horizon 0", "--max_num_seqs 0"):
        args = evaluation.make_parser("").parse_args(["--model", run, *flag.split()])
        with pytest.raises(ValueError, match=f"{flag.split()[0]} must be at least"):
            evaluation.evaluate(args, None)


def test_evaluations_that_differ_have_their_own_files(tmp_path, capsys):
    run = a_run(tmp_path / "run", 0.5, 1)
    os.makedirs(f"{run}/best")
    record = {"task": 0, "category": "Pick", "won": True, "score": 1.0, "context_overflow": False}
    for model, *flags in ((run, "--env", "environments.frozen_lake:FrozenLake"),
                          (run, "--out", str(tmp_path)), (run,), (f"{run}/best",),
                          (run, "--temperature", "1", "--seed", "1234567")):
        args = evaluation.make_parser("").parse_args(["--model", model, "--limit", "1", *flags])
        evaluation.evaluate(args, lambda args: None, lambda *_, **__: [(0, record)])
    assert {path.name for path in pathlib.Path(run).glob("eval-*.json")} == {
        "eval-test.json", "eval-best-test.json", "eval-FrozenLake-test.json",
        "eval-test-temperature=1-seed=1234567.json"}
    assert [path.name for path in tmp_path.glob("eval-*.json")] == ["eval-run-test.json"]
    assert "will be replaced" not in capsys.readouterr().out
    evaluation.evaluate(args, lambda args: None, lambda *_, **__: [(0, record)])
    assert "eval-test-temperature=1-seed=1234567.json will be replaced" in capsys.readouterr().out


@pytest.mark.parametrize("ids, says", [
    ([1.5], "a task id is 1.5; it must be str or int"), ([1, b"a"], "a task id is b'a'"),
    ([0, True], "a task id is True"), ([np.bool_(False)], "a task id is False"),
    (["b", "a", "b"], "the task id b comes 2 times in 'train'"), ([1, np.int64(1)], "id 1 comes"),
    (["1", 2, 1], "the task id 1 comes 2 times")])  # --leave_out 1 would mean both
def test_task_ids_are_different_strings_or_integers(ids, says):
    class Mine(House):
        def tasks(self, split):
            return ids

    with pytest.raises(ValueError, match=says):
        envs.tasks(Mine, "train")


@CONTEXTS
def test_scores_of_the_sampler_are_those_of_a_forward_pass(tmp_path, context):
    cases = [prepared(tmp_path, "--context", context, "--old_logprobs", which,
                      "--tokens_per_micro_batch", 500) for which in ("recompute", "rollout")]
    for one, other in zip(*(case.old[:1] + case.old[2:4] for case in cases)):
        near(one, other)
    assert cases[0].old.p_v.any()
    for case in cases:
        difference = case.learner.compare_with_sampler(case.batch, case.minibatches, case.old)
        assert 0 < difference < 1e-4


# ---- what users bring

def test_turns_of_two_rollouts_need_different_numbers():
    lm, ids, pool, config = a_case()
    sampler, learner = Sampler(lm, max_new_tokens=8), train.Learner(lm, config)
    one, two, apart = (rollout(sampler, ids[n:n + 2], pool, trajs=trajs)
                       for n, trajs in ((0, None), (2, None), (2, (2, 3))))
    with pytest.raises(ValueError, match="the same trajectory number and index"):
        learner.learn(one + two, 0)
    assert learner.learn(one + apart, 0)["loss"]
    with pytest.raises(ValueError, match="2 tasks need as many different numbers, and trajs has 1"):
        rollout(sampler, ids[:2], pool, trajs=[0])


def test_turns_that_were_changed_are_refused():
    lm, ids, pool, config = a_case()
    turns = rollout(Sampler(lm, max_new_tokens=8), ids[:2], pool)
    shorter = dataclasses.replace(turns[0], action_ids=turns[0].action_ids[:-1])
    with pytest.raises(ValueError, match="response tokens and . log-probs"):
        train.make_sequences([shorter, *turns[1:]], "window")
    with pytest.raises(ValueError, match="turn 0 of trajectory 0 is missing"):
        train.make_sequences([turn for turn in turns if turn.turn], "full")


def test_frozen_parameters_stay_as_they_are():
    lm, ids, pool, config = a_case()
    frozen = lm.model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before, moved = frozen.clone(), lm.model.model.layers[0].mlp.down_proj.weight.clone()
    train.Learner(lm, config).learn(rollout(Sampler(lm, max_new_tokens=8), ids[:4], pool), 0)
    assert torch.equal(frozen, before)
    assert not torch.equal(lm.model.model.layers[0].mlp.down_proj.weight, moved)
    lm.model.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        train.Learner(lm, dataclasses.replace(config, c_v=0.0, c_q=0.0))


def test_wrapping_a_model_again_keeps_its_values():
    lm = random_lm("qwen2", 1)
    again = actor_critic(lm.model, lm.tokenizer, tau_v=0.5, r_max=2.0)
    assert again.value_ids == lm.value_ids and again.value_rows is lm.value_rows
    assert lm.value_rows.weight.all()
    again = actor_critic(lm.model, lm.tokenizer)
    assert (again.tau_v, again.r_max) == (0.5, 2.0)
    for rows in {"value_tokens": lm.value_ids}, {"value_ids": lm.value_ids}:
        assert actor_critic(lm.model, lm.tokenizer, **rows).value_rows is lm.value_rows
    others = actor_critic(lm.model, lm.tokenizer, value_tokens=("5", "6"))
    assert others.value_ids != lm.value_ids and not others.value_rows.weight.any()
    # a copy of the model trains rows of its own
    copied = actor_critic(copy.deepcopy(again.model), lm.tokenizer)
    assert copied.value_rows is not others.value_rows


@pytest.mark.parametrize("options", [{"temperature": -0.4}, {"temperature": math.inf},
                                     {"max_new_tokens": 0}])
def test_sampler_refuses_settings_that_have_no_meaning(options):
    with pytest.raises(ValueError, match="must be at least"):
        Sampler(load(TINY_HOUSE), **options)


def test_environments_take_what_their_flags_name():
    class Mine(envs.Env):
        def __init__(self):
            pass

    assert make_env(Mine, horizon=3).horizon == 3  # every environment has one
    with pytest.raises(ValueError, match="--places has no effect"):
        train.settings(env=Mine, places=3)
    Mine.flags = "places",
    with pytest.raises(ValueError, match=r"must take what its `flags` name \(places\)"):
        make_env(Mine, places=3)
    Mine.flags = "sides",
    with pytest.raises(ValueError, match="name sides, which are no settings of train.py"):
        train.settings(env=Mine)
    Mine.flags = "seed",  # eval.py has another one
    with pytest.raises(ValueError, match="name seed, which are no settings of .* environments"):
        train.settings(env=Mine)
    Mine.flags = ()
    for name, value in dict(max_tokens=1, context="full", lora_rank=4, algo="grpo",
                            model="tiny").items():
        Mine.recommended = {name: value}
        with pytest.raises(ValueError, match=f"{name}: recommended by .*Mine"):
            train.settings(env=Mine, model="tiny")
    Mine.recommended = {"r_max": 1.0}  # a model's trained values have an R_max of their own
    assert train.settings(env=Mine, model="tiny").r_max == 10.0
    assert train.settings(env=Mine, model="x/y").r_max == 1.0
    Mine.recommended = {"batch_size": 48}
    assert train.settings(env=Mine, model="x/y", group_size=6, horizon=None).batch_size == 48
    Mine.tasks = lambda self, split: 10
    with pytest.raises(ValueError, match=r"tasks\(\) returned 10"):
        envs.tasks(Mine, "train")
    Mine.parse_action = lambda self, text: (text, True)
    with pytest.raises(ValueError, match="parse_action must be a @classmethod"):
        make_env(Mine)


def test_integers_do_not_truncate_advantages():
    score = torch.tensor([1, 0, 1, 0])
    near(normalize_advantages(score), normalize_advantages(score.float()))
    with pytest.raises(ValueError, match="different rewards"):
        zero = torch.zeros(2)
        turn_targets(zero, zero, torch.tensor([0.0, 1]), zero, zero, zero, gamma=1.0, lam=1.0)


# ---- wrong without a word

def test_evaluation_finds_the_settings_of_a_run_however_its_model_is_reached(tmp_path, monkeypatch):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--places", 6, "--context", "full",
             "--history", 1, "--out", run)
    elsewhere.mkdir()
    os.symlink(run / "final", elsewhere / "link")
    os.symlink(run, elsewhere / "run")
    shutil.copytree(run / "final", elsewhere / "copy")
    shutil.copytree(elsewhere / "copy", elsewhere / "final")
    for place, model in ((run / "final", "."), (run, "final"), (tmp_path, run), (tmp_path, "run/"),
                         (run / "checkpoint-1", "."), (elsewhere, "link"), (elsewhere, "run"),
                         (elsewhere, "copy"), (elsewhere, "final"), (elsewhere, elsewhere)):
        monkeypatch.chdir(place)
        args = evaluation.make_parser("").parse_args(["--model", str(model)])
        _, settings = evaluation.complete(args)
        found = (settings.context, settings.places, settings.horizon, settings.history,
                 settings.max_new_tokens)
        assert found == ("full", 6, 4, 1, 16), (place, model)
        assert load(settings.weights).played_with["places"] == 6


def test_evaluation_plays_at_the_temperature_of_the_environment(tmp_path, monkeypatch):
    parse = evaluation.make_parser("").parse_args
    names = []
    for flags in ([], ["--temperature", "0.4"], ["--temperature", "1"]):
        run, settings = evaluation.complete(parse(["--out", str(tmp_path), *flags]))
        names.append(evaluation.report_path(run, settings, "").name)
    assert names[0] == names[1] != names[2] and "temperature=1" in names[2]
    monkeypatch.setattr(House, "eval_temperatures", (1.0,))
    _, settings = evaluation.complete(parse([]))
    assert settings.temperature == 1.0


@CONTEXTS
@pytest.mark.parametrize("options, warns", [
    ({}, False), ({"temperature": 1.2}, True), ({"context": "other"}, True)])
def test_sampler_that_disagrees_with_the_learner_is_named_once(context, options, warns, capsys):
    lm, ids, pool, config = a_case()
    other = {"window": "full", "full": "window"}[context]
    options = {"context": other if "context" in options else context,
               "temperature": options.get("temperature", 1.0)}
    turns = rollout(Sampler(lm, max_new_tokens=8, **options), ids[:4], pool)
    for old_logprobs in ("recompute", "rollout"):
        learner = train.Learner(lm, dataclasses.replace(config, lr=0.0, context=context,
                                                        old_logprobs=old_logprobs))
        for n in range(2):
            learner.learn(turns, n)
        assert capsys.readouterr().out.count("the sampler's log-probs differ") == warns


@pytest.mark.parametrize("head", ["plain", "frozen", "tied", "resized"])
def test_v_and_q_learn_whatever_the_head_is(tmp_path, head):
    """The head's own rows of w+ and w- have no gradient, and a saved folder has the trained ones in
    their places."""
    lm = random_lm("qwen2", 0 if head == "tied" else 1)
    if head == "frozen":
        lm.head.weight.requires_grad_(False)
    if head == "resized":
        lm.model.resize_token_embeddings(len(lm.head.weight) + 8)
        lm = dataclasses.replace(lm)  # which finds the new head
    is_tied = lm.head.weight is lm.model.get_input_embeddings().weight
    assert is_tied == (head == "tied")
    turns = play(lm, "kv", "window", 1.0, horizon=1)[0]
    for turn in turns:
        turn.reward = 5.0 * (turn.traj % 2)
    config = small_config(tmp_path, "--mini_batch", 1000, "--lr", 1e-5, "--lr_warmup", 0,
                          "--beta", 0, "--value_lr_factor", 2000)
    case = case_of(lm, turns, config)
    case.step()
    if head == "frozen":
        assert lm.head.weight.grad is None
    else:
        assert lm.head.weight.grad.any() and not lm.head.weight.grad[[*lm.value_ids]].any()
    assert lm.value_rows.weight.grad.any(1).all()
    whole, rows = lm.head.weight.detach().clone(), lm.value_rows.weight.detach().clone()
    learner = train.Learner(lm, case.learner.config)
    metrics = [learner.learn(turns, 0) for _ in range(12)]
    for name in "loss_v", "loss_q":
        assert metrics[-1][name] < 0.7 * metrics[0][name]
    assert not lm.value_rows.weight.equal(rows)
    assert lm.head.weight.equal(whole) == (head == "frozen")
    lm.save(tmp_path / "saved")
    again = load(str(tmp_path / "saved"))
    assert again.head.weight[[*lm.value_ids]].equal(lm.value_rows.weight)
    assert again.value_rows.weight.equal(lm.value_rows.weight)
    is_tied = again.head.weight is again.model.get_input_embeddings().weight
    assert is_tied == (head == "tied")


@pytest.mark.parametrize("seed", [-1, 0.5, "x", None, (0, -1)])
def test_other_seeds_are_refused(seed):
    lm, ids, pool, _ = a_case()
    sampler = Sampler(lm, max_new_tokens=4)
    with pytest.raises(ValueError, match="it must be a whole number from 0 on, or several"):
        rollout(sampler, ids[:1], pool, seed=seed)
    one, other = (rollout(sampler, ids[:1], pool, seed=seed) for seed in (3, (np.int64(3),)))
    assert one == other


def test_reward_of_a_tool_does_not_leak_into_the_next_episode():
    class Once(envs.ToolEnv):
        tools = ("answer",)

        def tasks(self, split):
            return [1]

        def reset(self, task):
            return "?", {}

        def answer(self) -> None:
            """Ends the game."""
            self.reward, self.done = 1.0, True

    pool = Pool(Once)
    for key in (0, 1):
        pool.start(key, 1)
        pool.gather([key])
        pool.step(key, {"name": "answer", "arguments": {}})
        (_, reward, terminated, _, info), = pool.gather([key])
        assert (reward, terminated, info["won"]) == (1.0, True, True)

    class Quiz(Once):
        def reset(self, task):
            assert (self.reward, self.done) == (0.0, False)
            return super().reset(task)

    class Elsewhere:
        reset, answer = Once.reset.__wrapped__, Once.answer

    class Mixed(Elsewhere, envs.ToolEnv):
        tools, tasks = Once.tools, Once.tasks

    for env in make_env(Quiz), make_env(Mixed):  # nor without a pool
        for _ in range(2):
            env.reset(1)
            assert env.step({"name": "answer", "arguments": {}})[1:3] == (1.0, True)

# ---------------------------------------------------------------------------------------- the files

def test_every_file_runs_by_itself(capsys, monkeypatch):
    run_main(sapo, monkeypatch)
    assert "A^" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda _: "")
    run_main(envs, monkeypatch)
    assert "Won" in capsys.readouterr().out
    run_main(model_module, monkeypatch)
    assert "w+" in capsys.readouterr().out
    run_main(rollout_module, monkeypatch)
    printed = capsys.readouterr().out
    kv, hf = re.findall(r"^(?:kv|hf): (.*\n.*)$", printed, re.M)
    assert kv == hf and "\nkv: " in printed and "\nhf: " in printed  # the numbers and the text


def test_files_of_text_are_read_and_written_as_utf_8():
    """Everywhere: without encoding=, it would be the locale's."""
    for path in HERE.rglob("*.py"):
        if path.name.startswith("test_"):
            continue
        for call in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            modes = [given.get("mode", ""), *map(ast.unparse, call.args)]
            binary = any(re.fullmatch("'[rwax+]*b[rwax+]*'", mode) for mode in modes)
            text = (name in ("open", "fdopen") and not binary or name in ("read_text", "write_text")
                    or given.get("text") == "True" or "universal_newlines" in given)
            assert not text or "encoding" in given, (path, call.lineno)


def imports_of(path):
    """{(where, module)} of all imports of a file: the function or class that an import stands in,
    "__main__" in the block of a script, else ""; and the module's first name."""
    found = set()

    def visit(node, where):
        if isinstance(node, ast.Import):
            found.update((where, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found.add((where, node.module.partition(".")[0]))
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            where = "__main__"
        for child in ast.iter_child_nodes(node):
            visit(child, getattr(child, "name", where) if isinstance(
                child, (ast.FunctionDef, ast.ClassDef)) else where)

    visit(ast.parse(path.read_text()), "")
    return found


MAY_IMPORT = {  # a file or folder: those of ours that it may import
    "sapo": "", "runtime": "runtime", "hf": "runtime hf", "model": "hf runtime",
    "rollout": "model hf runtime", "envs": "runtime", "environments": "envs runtime environments",
    "eval": "model rollout envs runtime hf",
    "train": "model rollout envs eval runtime hf sapo training",
    "training": "sapo model rollout envs eval runtime hf training",
    "baselines": "sapo model train runtime baselines",
    "tools": "sapo model rollout envs environments eval train training runtime hf baselines tools"}
EXCEPTIONS = {  # (file, where, module): all that climbs
    ("hf/verify.py", "", "model"),  # it compares with plain passes of the model
    ("rollout.py", "main", "envs"),  # a prompt to show
    # a script imports itself, so that there is one class Env, and one Learner
    ("envs.py", "__main__", "envs"), ("train.py", "__main__", "train")}
SIX = "sapo", "model", "rollout", "envs", "eval", "train"


def test_imports_point_only_downwards():
    """The table of who may import whom. What is found by name, as environments and methods are, is
    no import."""
    climbing, seen = set(), set()
    for path in [*HERE.glob("*.py"), *HERE.glob("*/*.py")]:
        name = str(path.relative_to(HERE))
        place = name.partition("/")[0].removesuffix(".py")
        if path.name.startswith("test_") or name == "runtime/testing.py":
            continue
        allowed = MAY_IMPORT.get(place, "").split()
        climbing |= {(name, where, module) for where, module in imports_of(path)
                     if module in MAY_IMPORT and module not in allowed}
        seen.add(place)
    assert seen == MAY_IMPORT.keys() and climbing == EXCEPTIONS
    assert {module for _, module in imports_of(HERE / "sapo.py")} - sys.stdlib_module_names == {
        "torch"}


def test_only_the_hf_engine_and_the_schemas_of_tools_need_transformers():
    """Of the six files. What else a Hugging Face model brings is in hf/."""
    found = {(name, where) for name in SIX for where, module in imports_of(HERE / f"{name}.py")
             if module == "transformers"}
    assert found == {("rollout", ""), ("envs", "tool_schemas")}
    tree = ast.parse((HERE / "rollout.py").read_text())
    users = {part.name for part in tree.body if hasattr(part, "name") for node in ast.walk(part)
             if isinstance(node, ast.Name) and node.id == "transformers"}
    assert users == {"generate_with_hf"}


def section(text, begin, end):
    """The lines of a file from the comment line that begins a section to that of another."""
    lines = text.splitlines(keepends=True)
    titles = {re.sub("[# -]*", "", line.partition("(")[0].strip()): n
              for n, line in enumerate(lines) if line.startswith("# -----")}
    return "".join(lines[titles[begin] if begin else 0:titles[end]])


def alone(folder, text, missing):
    """Runs a program in a process of its own, in a folder where some modules are missing."""
    for name in missing:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}')\n")
    (folder / "program.py").write_text(text)
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sapo_alone_works_with_torch(tmp_path):
    shutil.copy(HERE / "sapo.py", tmp_path)
    alone(tmp_path, "import sapo\nsapo.main()\n", ["transformers", "numpy", *others("sapo")])


def test_the_readout_section_of_model_works_with_torch(tmp_path):
    text = section((HERE / "model.py").read_text(), "readouts", "batches")
    alone(tmp_path, "import torch\n\n" + text + """
z = torch.zeros(1, 4)
value_readout(z, (3, 0), tau=8.0), entropy(restricted_log_softmax(z, (3, 0)), (3, 0))
""", ["transformers", "tokenizers", *others()])


def others(*here):
    """All of our files and folders but these."""
    return [name for name in MAY_IMPORT if name not in here]


def copy_scorer(folder):
    """What scoring needs: model.py with hf/ and runtime/, and a model."""
    shutil.copytree(f"{HERE}/results/tiny-house", folder / "start")
    for name in ("hf", "runtime"):
        shutil.copytree(f"{HERE}/{name}", folder / name, ignore=lambda *_: ["__pycache__"])
    shutil.copy(f"{HERE}/model.py", folder)


def test_model_with_hf_and_runtime_beside_it_is_a_scorer(tmp_path):
    copy_scorer(tmp_path)
    printed = alone(tmp_path, """
import model

lm = model.load("start")
prompt = lm.chat.encode_user_turn("look")
print(lm.score(model.make_batch([(prompt + [7, 8], [(len(prompt), len(prompt) + 2)])])))
""", others("model", "hf", "runtime"))
    assert printed.startswith("Scores")


def test_rollout_with_model_hf_and_runtime_beside_it_is_a_sampler(tmp_path):
    copy_scorer(tmp_path)
    shutil.copy(f"{HERE}/rollout.py", tmp_path)
    printed = alone(tmp_path, """
import torch
import model
import rollout

for engine in ("kv", "hf"):
    lm = model.load("start")
    sampler = rollout.Sampler(lm, engine, max_new_tokens=8)
    prompt = lm.chat.encode_user_turn("look")
    print(sampler([0], [prompt], torch.full((1, 8), 0.5).numpy()))
""", others("model", "rollout", "hf", "runtime"))
    assert printed.count("Response") == 2

# ---- a model's words are data

class Anything(envs.ToolEnv):
    """Tools that take, raise, return and set anything."""

    tools = "take", "give", "fail", "score"

    def tasks(self, split):
        return [1, 2]

    def reset(self, task):
        return f"Game {task}.", {}

    def take(self, value: str) -> str:
        """Returns its argument.

        Args:
            value: anything
        """
        return value

    def give(self, n: int):
        """Returns one of RESULTS.

        Args:
            n: which one
        """
        return RESULTS[n % len(RESULTS)][0]()

    def fail(self, n: int):
        """Raises one of ERRORS, having set a reward.

        Args:
            n: which one
        """
        self.reward += 1
        raise ERRORS[n % len(ERRORS)][0]()

    def score(self, value: float) -> str:
        """Sets reward and done.

        Args:
            value: both
        """
        self.reward = self.done = SCORES.get(value, value) if isinstance(value, str) else value
        return "set"


def nothing_yet(kind):
    """A coroutine or generator of a kind, which a plain function returns."""
    async def wait():
        return 1

    async def many():
        yield 1

    return {"wait": wait, "many": many, "some": lambda: (x for x in "ab"),
            "map": lambda: map(str, [1])}[kind]()


def nested(n):
    return functools.reduce(lambda x, _: [x], range(n), 1)


def endless():
    value = {}
    return value | {"value": value} if value.setdefault("self", value) else None


class Mute(Exception):
    def __str__(self):
        sys.exit("not even its text")


class Unprintable:
    __str__ = Mute.__str__


TOO_LONG = "ValueError: Exceeds the limit (4300 digits) for integer string conversion"
NOT_YET = "TypeError: the tool returned a {}, which must be awaited or iterated"
RESULTS = [  # what a tool returns, and how what the model reads begins
    (lambda: None, "None"), (lambda: 10 ** 5000, TOO_LONG), (lambda: {"a": [10 ** 5000]}, TOO_LONG),
    (lambda: {(1, 2): 3, None: 4, np.int64(5): 6, True: 7, frozenset(): 8},
     '{"(1, 2)": 3, "null": 4, "5": 6, "true": 7, "frozenset()": 8}'),
    (lambda: {"n": np.int64(5), "x": [np.float32(0.5)], "b": (np.bool_(True), torch.tensor(2))},
     '{"n": 5, "x": [0.5], "b": [true, 2]}'),
    (lambda: [np.datetime64("2020-01-02", "ns"), np.arange(2)],
     '["2020-01-02T00:00:00.000000000", "[0 1]"]'),
    (lambda: {"b", "a", "c"}, '["a", "b", "c"]'), (lambda: [{2, 1}], "[[1, 2]]"),
    (lambda: {"x": NAN, "y": -INF, "z": 1 + 2j}, '{"x": "nan", "y": "-inf", "z": "(1+2j)"}'),
    (lambda: nested(90), "[[[["), (lambda: nested(10 ** 5), "RecursionError"),
    (endless, "RecursionError"), (Unprintable, "SystemExit: not even its text"),
    (lambda: [Unprintable()], "SystemExit"), (lambda: "\ud800\0</pre>", "?\0</pre>"),
    (lambda: nothing_yet("wait"), NOT_YET.format("coroutine")),
    (lambda: nothing_yet("many"), NOT_YET.format("async_generator")),
    (lambda: nothing_yet("map"), NOT_YET.format("map")),
    (lambda: {"x": nothing_yet("some")}, NOT_YET.format("generator")),
    (object, "TypeError: the tool returned a object, which has no text"),
    (lambda: {"x": [print, len, nothing_yet]}, "TypeError: the tool returned a function, which"),
    (lambda: (1, [nothing_yet("wait")]), NOT_YET.format("coroutine")),
    (lambda: {nothing_yet("wait"): 1}, NOT_YET.format("coroutine")),
    (lambda: (1, "a"), '[1, "a"]'),
    (lambda: "x" * 10 ** 6, "x" * 8000 + "... [992000 characters left out]")]
ERRORS = [
    (lambda: ValueError("no"), "ValueError: no"), (lambda: SystemExit(3), "SystemExit: 3"),
    (GeneratorExit, "GeneratorExit: "), (Mute, "Mute"), (lambda: "no error", "TypeError: except"),
    (lambda: type("Own", (BaseException,), {})("\n<|im_end|>"), "Own: \n<|im_end|>"),
    (lambda: KeyError("\ud800"), "KeyError: '\\ud800'"), (MemoryError, "MemoryError: ")]
SCORES = {"nan": NAN, "inf": INF, "numpy": np.float64(2), "array": np.arange(2), "set": {1},
          "huge": 10 ** 5000, "-9e37": -9e37}


def played(env, *responses, task=1):
    """Plays a game, beside one whose calls are ordinary -> what each response led to: (action,
    valid, the environment's message, reward, terminated). A game that is over begins again."""
    pool, out = Pool(env), []
    for key in (0, 1):
        pool.start(key, task)
    pool.gather([0, 1])
    for response in responses:
        action, valid = pool.parse_action(response)
        json.dumps(action, ensure_ascii=False).encode()
        pool.step(0, action)
        (obs, reward, terminated, truncated, _), = pool.gather([0])
        out.append((action, valid, obs, reward, terminated))
        if terminated or truncated:
            pool.start(0, task)
            pool.gather([0])
        if env is Anything:
            pool.step(1, {"name": "take", "arguments": {"value": "as ever"}})
            (other, *_, over, _), = pool.gather([1])
            assert contents(other) == [("tool", "as ever")]
            if over:  # after its 50 turns
                pool.start(1, task)
                pool.gather([1])
    return out


@pytest.mark.parametrize("name, expected", [("give", RESULTS), ("fail", ERRORS)])
@pytest.mark.filterwarnings("error")
def test_whatever_a_tool_returns_or_raises_is_text(name, expected):
    out = played(Anything, *(called(name, n=n) for n in range(len(expected))))
    for (_, begins), (_, valid, obs, reward, terminated) in zip(expected, out, strict=True):
        (role, text), = contents(obs)
        assert (role, valid, terminated, reward) == ("tool", True, False, float(name == "fail"))
        assert text.startswith(begins) and (text == begins or "[[[" in text or "Error" in text
                                            or "Exit" in text)


@pytest.mark.parametrize("value, reward, done, says", [
    (2, 2.0, True, "set"), (0, 0.0, False, "set"), ("numpy", 2.0, True, "set"),
    (True, 1.0, True, "set"), ("nan", 0.0, True, "ValueError: reward is nan, not a finite number"),
    ("inf", 0.0, True, "ValueError: reward is inf, not"), ("five", 0.0, True, "reward is 'five'"),
    (None, 0.0, False, "reward is None, not"), ("array", 0.0, False, "ValueError: "),
    ("huge", 0.0, True, "ValueError: "), ("set", 0.0, True, "reward is {1}, not"),
    ([], 0.0, False, "reward is [], not")])
def test_reward_that_is_no_number_is_that_calls_error(value, reward, done, says):
    (_, _, obs, *answer), = played(Anything, called("score", value=value))
    assert answer == [reward, done] and says in contents(obs)[0][1]


def test_reward_stays_as_it_was_after_a_call_with_an_error():
    env = make_env(Anything)
    env.reset(1)
    score = lambda value: {"name": "score", "arguments": {"value": value}}
    assert [env.step(score(x))[1] for x in (3, "nan", 5, 9e37, "-9e37", 0)] == [
        3, 0, 2, 9e37 - 5, 0, -9e37]
    assert (env.reward, env.done) == (0.0, False)


LINE = '{"name": "take", "arguments": {"value": %s}}'
WRONG = "what the <tool_call> contains cannot be read as JSON: "
COUNT = "a response must have one <tool_call>...</tool_call>; this one has <tool_call> %d times"


def take(value):
    return f"<tool_call>{LINE % value}</tool_call>"


AROUND = [(before, after) for before in (
    "", "<think>x</think>", "<think>Or <tool_call>?</think> ", "<think>{</think></think> ",
    '<think>As "<tool_call>{</think>', take(1) + "</think>") for after in ("", " So.\n")]
IN_STRINGS = ["</think>", "<think>", "<tool_call>", "</tool_call>", 'a\\"</tool_call>\\',
              "<think></think>", take('"x"'), "\U0001f600 \u60f3"]
READ = [  # (a response, the value that the tool gets)
    *((before + take(json.dumps(text)) + after, text) for text in IN_STRINGS
      for before, after in AROUND),
    ("<think>a</think>" + take('"\ud800"'), "?"), (take('"\\ud800"'), "?"),
    (take('1, "value": 2'), 2),  # the last of two equal keys
    ("<tool_call> \n" + LINE % 1 + "\n</tool_call>", 1), (take("1e308"), 1e308),
    (take("-0.0"), 0.0), (take("9" * 4300), int("9" * 4300)),
    (take("[" * 90 + "]" * 90), json.loads("[" * 90 + "]" * 90))]
REFUSED = [  # (a response, what is wrong)
    *((take(n), f"{WRONG}{n} is not a finite number")
      for n in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")),
    (take("9" * 4301), f"{WRONG}a number has 4301 characters"),
    (take("[" * 99 + "]" * 99), f"{WRONG}it is nested too deeply"),
    (take("[" * 10 ** 5 + "]" * 10 ** 5), f"{WRONG}it is nested too deeply"),
    (take("'</think>'"), envs.ToolEnv.NO_CALL),  # this is not JSON: nothing is a string
    (take('"</think>", x'), WRONG), (take('"x'), f"{WRONG}Unterminated string starting at: line 1"),
    (take(1).replace("</", "x</"), f"{WRONG}Extra data: line 1 column 44 (char 43)"),
    (take('"x')[:-14], COUNT % 1), ('<tool_call>{"name": "</think>', COUNT % 1),
    (take(1) + " " + take('"</think>"'), COUNT % 2), (take(1) * 3, COUNT % 3),
    ("</tool_call>" + take(1)[:-12], COUNT % 1), ("</tool_call>" + take(1), COUNT % 1),
    (f"<think>{take(1)}", "the thought has no </think>"),
    (f"{take(1)}<think>", "the thought has no </think>"),
    (f"{take(1)}<think> </think>", envs.ToolEnv.NO_CALL),
    (f"<think>{take(1)}</think>", envs.ToolEnv.NO_CALL)]


def test_calls_are_read_as_json():
    parse_action = Pool(Anything).parse_action
    for response, value in READ:
        assert parse_action(response) == ({"name": "take", "arguments": {"value": value}}, True)
    for response, says in REFUSED:
        action, valid = parse_action(response)
        assert not valid and action.startswith(says), response


@pytest.mark.parametrize("piece", [
    "<tool_call>", "[", '"', "</think>", '<tool_call>"', "<tool_call>[", '<tool_call>\\"', "1",
    "\\", "</think><tool_call>[1,", '<tool_call>"</tool_call>', '{"a":', "<action></think>",
    "</action>", "<action>", "</think></action>", "<think>", "<think></think>"])
def test_a_million_characters_are_read_in_one_go(piece):
    """Where reading takes time of the square of the length, this test takes minutes."""
    for begin, end in ("", ""), ('<tool_call>{"name": "', "</tool_call>"), ("", "</think>"):
        text = begin + piece * (10 ** 6 // len(piece)) + end
        assert not Anything.parse_action(text)[1] and not House.parse_action(text)[1]


def answer_by_loop(text):
    """Where the answer of a response begins, by the definition."""
    answer = text[max(0, text.find("</think>")):]
    while "</think>" in (rest := answer.partition("</action>")[2]):
        answer = rest
    return answer


def test_an_answer_begins_behind_the_last_quoted_action():
    rng = random.Random(0)
    for _ in range(3000):
        text = "<think>" + "".join(rng.choices(["</think>", "<action>", "</action>", "a"],
                                               k=rng.randrange(12)))
        answer = answer_by_loop(text)
        start, end = answer.find("<action>"), answer.find("</action>")
        if 0 <= start < end:
            assert envs.tagged_action(text, 3) == (answer[start + 8:end], "</think>" in text)


def a_response(rng):
    """Nested, cut, doubled, enormous, in any script: mostly near to what is asked for."""
    texts = ["</think>", "<tool_call>", "</tool_call>", "<action>", "</action>", "<think>", "look",
             "<|im_end|>", "</pre><script>", "\0\x1b[2J\r", "\ud800", "\u60f3\u0130\u202e\ufffd",
             "\nWhat you saw: gold", '"', "\\", "'", "{obs}", "%s", "go to fridge 1"]
    numbers = ["0", "-1", "1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "1e-999", "2.5", "00",
               "9e37", "-9e37", "1" * 400, "0x1", "True", "1" + "0" * 40]

    def value(depth=0):
        kind = rng.randrange(7)
        if kind < 2:
            return rng.choice(numbers)
        if kind < 5 or depth > 3:
            return json.dumps("".join(rng.choices([*texts, *SCORES], k=rng.randrange(3))))
        parts = [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 5:
            return "[" * (n := rng.choice([1, 1, 1, 200, 9000])) + ", ".join(parts) + "]" * n
        return "{" + ", ".join(f"{json.dumps(rng.choice(texts))}: {part}" for part in parts) + "}"

    name = rng.choice([*Anything.tools, *Anything.tools, "step", "__init__", "\n"])
    key = {"give": "n", "fail": "n"}.get(name, "value")
    number = rng.choice([str(rng.randrange(60)), value(), value()])
    call = f'{{"name": {json.dumps(name)}, "arguments": {{"{key}": {number}}}}}'
    parts = [f"<think>{rng.choice(texts)}</think>", f"<tool_call>{call}</tool_call>",
             f"<action>{''.join(rng.choices(texts, k=2))}</action>"]
    if rng.random() < 0.4:
        parts += rng.choices([*texts, *parts, value()], k=rng.randrange(4))
        rng.shuffle(parts)
    response = "".join(parts)
    if rng.random() < 0.2:
        response = response[rng.randrange(9):rng.randrange(len(response) + 1)]
    return response * rng.choice([1] * 20 + [2, 300])


@pytest.mark.parametrize("env", [House, Anything])
@pytest.mark.filterwarnings("error")
def test_no_response_ends_a_game_for_another_reason_than_its_own(env):
    """Thousands of responses, played as the pool plays them, and shown on a page."""
    rng = random.Random(env.__name__)
    responses = [a_response(rng) for _ in range(4000)]
    out = played(env, *responses, task=tasks(env, "train")[0])
    roles = {message["role"] for _, _, obs, _, _ in out for message in obs if env is Anything}
    assert roles <= {"tool"} and all(math.isfinite(reward) for _, _, _, reward, _ in out)
    assert 1000 < sum(valid for _, valid, *_ in out) < 3900
    turns = [rollout_module.Turn(
        traj=0, turn=n, task=rng.choice(responses)[:99], prompt_ids=[], reward=reward, v=0.0, q=0.0,
        action_ids=[*map(ord, response[:99])], logp=[-0.5] * len(response[:99]), invalid=not valid,
        admissible=True, won=False, score=0.0, category="", text=response, action=action, obs=obs,
        messages=obs if isinstance(obs, list) else [tool("user", response[:99])])
        for n, (response, (action, valid, obs, reward, _)) in enumerate(zip(responses[:500], out))]
    json.dumps([evaluation.episode_record(env, 0, [turn], mock.Mock(info={
        "category": "", "won": False, "score": 0.0})) for turn in turns]).encode("ascii")
    page = report.episode_page(responses[0], turns, [], lambda ids: "".join(map(chr, ids)))
    page.encode("utf-8")
    parser = Elements()
    parser.feed(page[page.index("<section>"):page.index("</html>")])
    shown = lambda text: text.encode("utf-8", "replace").decode().translate(report.SYMBOLS)
    expected = []
    for n, turn in enumerate(turns):
        expected += [("pre", shown(message["content"])) for message in turn.messages]
        expected.append(("p", shown(responses[n][:99])))
        if n + 1 < len(turns) and isinstance(turns[n + 1].obs, str):
            expected.append(("pre", shown(turns[n + 1].obs)))
    assert parser.names == {"section", "h2", "b", "h3", "pre", "p", "mark"}
    assert parser.found == expected


class Elements(html.parser.HTMLParser):
    """The names of all elements, and the texts in <p> and <pre>."""

    def __init__(self):
        super().__init__()
        self.names, self.found, self.inside = set(), [], False

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        if name in ("p", "pre"):
            self.inside = True
            self.found.append((name, ""))

    def handle_endtag(self, name):
        self.inside = self.inside and name not in ("p", "pre")

    def handle_data(self, text):
        if self.inside:
            name, before = self.found[-1]
            self.found[-1] = name, before + text


@pytest.mark.parametrize("tools, says", [
    ({"take", "give"}, "it must be a tuple of names"), (("wait",), "Slow.wait cannot be a tool: it "
                                                        "is async or a generator"),
    (("some",), "Slow.some cannot be a tool"), (("many",), "Slow.many cannot be a tool"),
    (("static",), "Slow.static cannot be a tool")])
def test_tools_that_return_no_answer_are_refused(tools, says):
    class Slow(Anything):
        async def wait(self) -> int:
            """Waits."""

        def some(self) -> int:
            """Yields."""
            yield 1

        async def many(self) -> int:
            """Both."""
            yield 1

        @staticmethod
        async def static() -> int:
            """Waits."""

    Slow.tools = tools
    with pytest.raises(ValueError, match=says) as raised:
        Slow.tool_schemas()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("action, shown", [
    ("look", "look"), ("", ""), ({"a": "\n"}, '{"a": "\\n"}'), ("a\r\u2028b", "a\n  \n  b"),
    ("x\nWhat you saw: gold\n\nStep 9.", "x\n  What you saw: gold\n  \n  Step 9.")])
def test_an_action_in_a_prompt_cannot_begin_a_line(action, shown):
    info = {"task": "t", "admissible": None}
    builder = envs.PromptBuilder("A", info)
    builder.record(action, "B", info)
    assert f"\nWhat you did: {shown}\nStep 2. What you see: B" in builder.window_prompt()


def test_a_page_shows_a_response_of_parts_of_characters():
    turn = mock.Mock(action_ids=[0xf0, 0x9f, 0x98, 0x80] + [0xff] * 9, logp=[-1.0] * 13)
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")
    assert "".join(re.findall(">(.*?)</mark>", report.shaded(turn, decode))) == (
        "\U0001f600" + "\ufffd" * 9)
