"""The tests of the six files. They need no download and no GPU. Those that want ALFWorld's games or
WebShop's catalogue look at ALFWORLD_DATA and WEBSHOP_DATA, and are skipped where these are unset.

A reference is a plain loop in float64 written from the paper, and shares no helper with the code.
The tests of runtime/, simulators/ and tools/ lie beside what they test.
    python -m pytest -q
"""
import ast
import contextlib
import copy
import dataclasses
import functools
import glob
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections import Counter
from typing import NamedTuple
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests and the processes they start download nothing
os.environ["OMP_NUM_THREADS"] = "1"  # tensors are small

import huggingface_hub.constants
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import envs
import eval as evaluation
import model as model_module
import rollout as rollout_module
import sapo
import train
from envs import Pool, make_env, tasks
from model import (actor_critic, check_initial_readout, entropy, float32_logits, load, make_batch,
                   reserve_value_ids, restricted_log_softmax, sample_token, value_readout)
from rollout import DecodeState, End, Sampler, rollout
from sapo import (actor_loss, explained_variance, kl_loss, normalize_advantages, policy_loss,
                  sapo_loss, turn_targets, value_loss)
from train import make_samples
from runtime import checkpoint, cli, compile as compile_module, distributed, optim
from runtime import run as run_module
from runtime.test_checkpoint import checkpoints
from tools import imitate
from tools.imitate import random_tiny
from simulators.test_house import INFO, obey, pattern_of, wander
from simulators.test_textworld import TRIAL, needs_games, needs_package, small_game
from simulators.test_webshop import (DRESS, TASK, attributes_entry, caches, goal_of, shop_data,
                                     write_catalogue)

HERE = pathlib.Path(__file__).resolve().parent
huggingface_hub.constants.HF_HUB_OFFLINE = True  # it may have been imported before, as torch may
torch.set_num_threads(1)

GPU = torch.cuda.is_available()


@pytest.fixture
def gpu():
    if not GPU:
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hides a GPU from this process and from those it starts, unless a test asks for `gpu`."""
    if "gpu" not in request.fixturenames:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


# Processes beside this one are forked from a server that has imported everything already.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["test_sapo"])


class Ranks:
    """Runs work(*args) in `size` processes as torchrun does, in which everything is imported
    already."""

    def __init__(self, size, work, *args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.processes = [SERVER.Process(target=self.main, daemon=True,
                                          args=(rank, size, port, work, args))
                          for rank in range(size)]
        for process in self.processes:
            process.start()

    @staticmethod
    def main(rank, size, port, work, args):
        torch.set_num_threads(1)
        names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        sys.stdout = open(os.devnull, "w")
        work(*args)

    def running(self):
        return any(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def finish(self, status=0):
        for process in self.processes:
            process.join(300)
        assert {process.exitcode for process in self.processes} == {status}


def connected(work, *args):
    with cli.one_line_errors("test_sapo.py"):  # it also destroys the process group
        distributed.init_distributed()
        work(distributed.rank(), *args)
        distributed.barrier()


def on_ranks(work, size, *args):
    """work(rank, *args) in `size` processes of one process group."""
    Ranks(size, connected, work, *args).finish()


def run_train(*flags):
    sys.argv = ["train.py", *map(str, flags)]
    train.main()


OneRank, TwoRanks = functools.partial(Ranks, 1, run_train), functools.partial(Ranks, 2, run_train)


# --------------------------------------------------------------------------------- the algorithm
# A function *_by_loop is such a reference.

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
    for i in range(2, 6):  # of a turn that is there twice
        other = [*given[:i], torch.tensor([1.0, 1.0, 1.0, 0.5]), *given[i + 1:]]
        with pytest.raises(ValueError, match="two turns of one number have different"):
            turn_targets(given[0], torch.tensor([0, 1, 2, 2]), *other[2:], gamma=0.9, lam=0.9)
    for i in range(6):
        for wrong in (given[i][:3], given[i][:, None], given[i][0]):
            with pytest.raises(ValueError, match="one length"):
                turn_targets(*given[:i], wrong, *given[i + 1:], gamma=0.9, lam=0.9)


# Eq. 7
def random_advantages(seed, n):
    torch.manual_seed(seed)
    return 4 * randn(n) + 2, (torch.rand(n) < 0.3).double(), torch.rand(n) < 0.7


def advantages_by_loop(adv, invalid, c_inv, valid, eps):
    penalized = [a - c_inv * m for a, m in zip(adv.tolist(), invalid.tolist())]
    kept = [a for a, ok in zip(penalized, valid.tolist()) if ok]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((a - mean) ** 2 for a in kept) / len(kept))
    return tensor([(a - mean) / (std + eps) if ok else 0.0
                   for a, ok in zip(penalized, valid.tolist())])


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
    counts = {"tokens": times * x["mask"].sum(), "turns": times * 8}

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


# ---------------------------------------------------------------------- prompts and the parser

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
@pytest.mark.parametrize("env", [envs.House, envs.AlfWorld, envs.WebShop, envs.Env])
def test_parse_action(env, text, action, valid):
    """Only the default keeps the case."""
    expected = text[-env.fallback:] if action is None else action
    assert env.parse_action(text) == (expected if env is envs.Env else expected.lower(), valid)


@pytest.mark.parametrize("prefix", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_what_a_template_begins_a_response_with_is_no_action(prefix):
    for text in ("look", "\n look\n", "", "I think that I WILL go to the fridge now"):
        assert envs.Env.parse_action(prefix + text) == (text[-30:], False)
        assert envs.WebShop.parse_action(prefix + text) == (text[-20:].lower(), False)


@pytest.mark.parametrize("action", ['{"q": "SELECT Name"}', "\u0130\u017f \u212a\u03a3", "<b>"])
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
    episode = envs.HouseholdPrompts(first_obs, info(0))
    for i in range(1, turns + 1):
        text = f"<think> secret {i} </think> <action> Dance {{obs}} {i} </action>"
        action, _ = envs.House.parse_action(text)
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
        assert "help" not in getattr(envs.HouseholdPrompts("You wait.", info), prompt)()


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


# -------------------------------------------- environments as somebody would write them, 5 kinds

class Calculator(envs.ToolEnv):
    tools = "multiply", "submit"
    system = "You calculate with tools."

    def tasks(self, split):
        return [n for n in range(100) if (n % 5 == 0) == (split == "test")]

    def reset(self, task):
        self.reward, self.product = 0.0, 13 * task
        return f"What is 13 times {task}?", {}

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first factor
            b: the second factor
        """
        return a * b

    def submit(self, number: int) -> str:
        """Gives the answer, which ends the game.

        Args:
            number: the product
        """
        self.reward, self.done = float(number == self.product), True


class Guess(envs.ToolEnv):  # in TRL's environment_factory: class Guess:
    tools = "guess",  # new
    tasks = lambda self, split: range(1, 9)  # new

    def __init__(self):
        self.low, self.high = 1, 8

    def reset(self, task):  # def reset(self, secret, **columns) -> str | None:
        self.secret, self.reward, self.guesses = task, 0.0, []
        return f"Guess a number from {self.low} to {self.high}.", {}  # without the {}

    def guess(self, number: int) -> dict:
        """Makes a guess.

        Args:
            number: the number that you guess
        """
        if number == self.secret:
            self.reward = 1.0
        elif not self.low <= number <= self.high:
            raise ValueError(f"{number} is out of range")
        self.guesses.append(number)
        return {"right": number == self.secret, "guesses": self.guesses}


class Corridor:
    """A text game with the interface of Gymnasium, whose answers have NumPy's types."""

    def reset(self, *, seed=None, options=None):
        self.at = seed % 3 + 1
        return f"The door is {self.at} steps to the right.", {"lives": np.int64(3)}

    def step(self, action):
        self.at -= {"right": 1, "left": -1}.get(action, 0)
        reward, end = np.float64(self.at == 0), np.bool_(self.at == 0)
        return f"Steps: {self.at}.", reward, end, np.bool_(False), {"lives": 3}


class Wrapped(envs.Env):
    role = "You are in a corridor and say left or right."
    horizon = 5

    def __init__(self):
        self.env = Corridor()  # gymnasium.make(...)

    def tasks(self, split):
        return range(20)

    def reset(self, task):
        return self.env.reset(seed=task)

    def step(self, action):
        return self.env.step(action)


class Robot(envs.Env):
    role = "You steer a robot."
    instruction = 'Answer with a JSON object and nothing else, such as {"go": 2, "say": "Hi"}.'
    horizon = 4

    @classmethod
    def parse_action(cls, text):
        try:
            action = json.loads(text)
        except ValueError:
            return text, False
        return action, isinstance(action, dict) and isinstance(action.get("go"), int)

    def tasks(self, split):
        return [3, 4, 5]

    def reset(self, task):
        self.left = task
        return f"Drive {task} meters.", {"task": f"drive {task} meters"}

    def step(self, action):
        self.left -= action.pop("go", 0) if isinstance(action, dict) else 0
        return f"{self.left} meters left.", float(self.left == 0), self.left <= 0, False, {}


class Gallery(envs.Env):
    context = "full"
    system = "You cannot see: images are left out."
    categories = {"Cat": "cats"}

    def tasks(self, split):
        return ["Cat", "Dog"]

    def user(self, *parts):
        texts = [part.get("text", "(an image)") for part in parts]
        return [{"role": "user", "content": "\n".join(texts)}]

    def reset(self, task):
        self.name, image = task, {"type": "image", "url": f"{task}.png"}
        question = {"type": "text", "text": "What is it? Think, then answer in <action> </action>."}
        return self.user(image, question), {"category": task}

    def step(self, action):
        won = action == self.name
        right = {"type": "text", "text": "Right." if won else "Wrong, try again."}
        return self.user(right), float(won), won, False, {"won": won, "score": float(won) / 2}


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
    config = train.filled(train.Config(env=env, max_new_tokens=8))
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
    assert evaluation.episode_page("x", turns, [], lambda ids: "x", env.tool_schemas())


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
    (lambda text: (text, None), "valid is None, not True or False")])
def test_parsers_that_fail_are_named(parse_action, says):
    Bad = type("Bad", (Robot,), {"parse_action": staticmethod(parse_action)})
    with pytest.raises(envs.GameError, match=f"Bad: parse_action must .*{says}"):
        with_responses(Bad, 3, "no JSON")


@pytest.mark.parametrize("names, says", [
    ("multiply", "tools is 'multiply'; it must be a tuple"),
    (("multiplies",), "names 'multiplies'"), (("reset",), "names 'reset', which is"),
    (("bare",), "Wrong.bare cannot be a tool: .*type hint")])
def test_methods_that_cannot_be_tools_are_named(names, says):
    class Wrong(Calculator):
        tools = names

        def bare(self, x):
            """Does nothing.

            Args:
                x: nothing
            """

    with pytest.raises(ValueError, match=says):
        with_responses(Wrong, 7, "x")


def test_tools_need_a_growing_conversation(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--context window cannot be used with --env Calculator"):
        train.filled(train.Config(env=Calculator, context="window"))
    name, out = "test_sapo:Calculator", tmp_path / "run"
    config = train.parse_config(["--env", name, "--model", TINY_HOUSE])
    assert (config.context, config.max_prompt) == ("full", None)
    assert train.parse_config([]).context == "window"
    assert config.out == "runs/Calculator-tiny-house-0"
    assert train.parse_config(["--env", name, "--context", "full"]).out == "runs/Calculator-tiny-0"
    run_main(train, monkeypatch, "--env", name, "--batch_size", 2, "--iterations", 1,
             "--eval_games", 2, "--max_new_tokens", 4, "--out", out)
    assert json.loads((out / "config.json").read_text())["context"] == "full"
    page, = (out / "transcripts").glob("*.html")
    assert all(f"<h3>{role}</h3>" in page.read_text() for role in ("system", "user", "assistant"))
    assert "&quot;Multiplies two numbers.&quot;" in page.read_text()
    args = evaluation.make_parser("").parse_args(["--model", str(out)])
    evaluation.complete(args)
    assert (args.context, args.max_prompt) == ("full", None)
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


# ------------------------------------------------------------------------------------ alfworld

def check_alfworld(env, task):
    """The protocol, the expert and illegal actions in one game of the real engine."""
    obs, info = env.reset(task)
    assert {k: type(v) for k, v in info.items()} == INFO
    assert f"/{info['category']}-" in task and info["category"] in envs.CATEGORIES
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


# ------------------------------------------------------------------------------------- webshop
# The pages, the search and the reward are tested in simulators/test_webshop.py.


def test_the_shop_follows_the_protocol(shop_data):
    env = make_env("webshop", data=shop_data)
    obs, info = env.reset(goal_of(env.shop, TASK))
    assert {k: type(v) for k, v in info.items()} == INFO and info["category"] == "fashion"
    assert (info["won"], info["score"]) == (False, 0.0) and info["task"].startswith(TASK)
    assert info["admissible"] == ["search[<your query>]", "click[search]"]
    assert env.advice(True) == env.advice() == ("find it", env.expert()[0])
    for command in ("search[summer dresses]", "click[b00dress01]", "click[red | white]",
                    "click[s]"):
        obs, *outcome, info = env.step(command)
        assert outcome == [0.0, False, False] and (info["won"], info["score"]) == (False, 0.0)
        assert obs == env.shop.observation() and info["admissible"] == env.shop.actions()
        if command == "click[b00dress01]":
            assert env.advice() == ("choose color", "click[red | white]")
            assert env.advice(forgetful=True) == ("buy it", "click[buy now]")
    assert env.advice() == ("buy it", "click[buy now]") and env.expert() == ["click[buy now]"]
    obs, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (reward, terminated, truncated) == (10.0, True, False)
    assert (info["won"], info["score"], info["admissible"]) == (True, 1.0, [])
    assert env.expert() is None and env.advice() is None


def test_shop_prompts(shop_data):
    env = make_env("webshop", data=shop_data)
    episode = envs.ShopPrompts(*env.reset(goal_of(env.shop, TASK)))
    task = episode.info["task"]
    commands = "Commands on this page: ['search[<your query>]', 'click[search]']"
    for text in (episode.window_prompt(), episode.window_prompt(0), episode.full_prompt()):
        assert text.count(task) == 1
        assert all(part in text for part in ("What you see: 'Search'\n", commands, envs.ANSWER))
    for action in ("search[dress]", "click[b00dress01]", "click[s]"):
        obs, *_, info = env.step(action)
        episode.record(action, obs, info)
    text, full = episode.window_prompt(2), episode.full_prompt()
    assert text.count(task) == 1 and "Steps taken so far: 3." in text
    assert "What you did: click[s]" in text and "What you did: search" not in text
    page = "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red | white' [SEP]"
    assert f"What you see: {page}" in text
    assert task not in full and envs.ANSWER not in full and "'click[buy now]'" in full


# ------------------------------------------------------------------------------ model and rollout

CONTEXTS = pytest.mark.parametrize("context", ["window", "full"])


def random_model(architecture, seed=0, layers=2, dtype=torch.float32, **more):
    """A random model of an architecture, with the tiny model's tokenizer. Its weights are so large
    that it prefers some tokens clearly, and many tokens end a response, so that lengths differ."""
    base = random_tiny()
    config = dict(vocab_size=len(base.tokenizer) + 2, hidden_size=32, intermediate_size=64,
                  num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, max_position_embeddings=4096, tie_word_embeddings=seed % 2 == 0,
                  initializer_range=0.3, eos_token_id=base.tokenizer.eos_token_id,
                  pad_token_id=0, bos_token_id=None)
    if "text_config" in more:
        more, config = more | {"text_config": config}, {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config | more),
                                             dtype=dtype).eval()
    lm = actor_critic(model, base.tokenizer, value_ids=base.value_ids, tau_v=20.0)
    return dataclasses.replace(lm, stop_ids=(base.stop_ids[0], *range(40, 110)))


TINY_HOUSE = f"{HERE}/results/tiny-house"
ARCHITECTURES = ["qwen2", "qwen3", "llama"]
GAMES = envs.tasks("house", "train")[:7]


@contextlib.contextmanager
def a_pool(workers, horizon=12):
    """A pool that is closed at the end, and fails the test if it waits for two minutes."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the pool waits forever"))
    signal.alarm(120)
    try:
        with contextlib.closing(Pool("house", {"horizon": horizon}, workers)) as pool:
            yield pool
    finally:
        signal.alarm(0)


def play(lm, engine, context, temperature, max_new_tokens=9, horizon=6, seed=(3,), games=GAMES,
         sampler_options={}, **options):
    sampler = Sampler(lm, engine, context, max_new_tokens, temperature,
                      **{"max_prompt": 2048} | sampler_options)
    pool = envs.Pool("house", {"horizon": horizon})
    return rollout(sampler, games, pool, seed=seed, **options), sampler


def values_of(turns):
    return torch.tensor([(t.v, t.q) for t in turns])


def batch_of(turns, context="window"):
    return make_batch([sample[:2] for sample in make_samples(turns, context)])


def check_against_scoring(lm, turns, context, atol=1e-4):
    """The sampler's log-probs, V and Q are those of a scoring pass."""
    with torch.no_grad():
        scores = lm.score(batch_of(turns, context))
    close = functools.partial(torch.testing.assert_close, atol=atol, rtol=0)
    close(torch.tensor([x for t in turns for x in t.logp]), scores.logp)
    close(values_of(turns), lm.r_max * torch.stack([scores.p_v, scores.p_q], 1))


def same_tokens_and_values(one, other):
    assert [t.action_ids for t in one] == [t.action_ids for t in other]
    torch.testing.assert_close(values_of(one), values_of(other), atol=1e-4, rtol=0)


@CONTEXTS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kv_and_hf_engines_agree_with_each_other_and_with_scoring(architecture, context):
    lm = random_model(architecture, seed=len(architecture))
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
            random_model(architecture, 1, **config)
        return
    lm = random_model(architecture, 1, **config)
    if kv_error:
        with pytest.raises(ValueError, match=f"use --engine hf: .*{kv_error}"):
            Sampler(lm, check=False)
    for engine in ["kv", "hf"][bool(kv_error):]:
        turns, _ = play(lm, engine, "window", 1.0, games=GAMES[:2], horizon=2)
        check_against_scoring(lm, turns, "window", atol=1e-3)


@pytest.mark.parametrize("shapes, says", [
    ([], "has no layers"), ([{"keys": (1, 2, 1, 8)}], "is not keys and values"),
    ([{"keys": (1, 2, 8), "values": (1, 2, 8)}], "is not keys and values"),
    ([{"keys": (1, 1, 2, 8), "values": (1, 1, 2, 8)}], "is not keys and values")])
def test_kv_caches_of_another_form_are_refused(shapes, says):
    lm = random_model("qwen2", 1)
    layers = [types.SimpleNamespace(**{name: torch.zeros(shape) for name, shape in layer.items()})
              for layer in shapes]
    lm.model.base_model.register_forward_hook(lambda module, inputs, output: {
        "cache": types.SimpleNamespace(layers=layers)})
    with pytest.raises(ValueError, match=f"use --engine hf: its KV cache.* {says}"):
        Sampler(lm)


def test_faults_of_the_sampler_are_not_said_to_be_the_models(monkeypatch):
    monkeypatch.setattr(DecodeState, "sample", lambda state, n: state.no_such_name)
    with pytest.raises(AttributeError, match="no_such_name"):
        Sampler(random_model("qwen2", 1))


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
    lm = random_model("qwen3", 1)
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


@pytest.mark.parametrize("engine", ["kv", "hf"])
def test_values_come_from_hidden_states_and_not_from_rounded_logits(engine):
    lm = random_model("qwen2", 1)
    with torch.no_grad():  # two large rows, nearly the same: rounded logits would miss V by 0.05
        (plus, minus), weight = lm.value_ids, lm.model.lm_head.weight
        weight[minus] = 40 * weight[plus]
        weight[plus] = weight[minus] * 1.01
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
    lm, u = random_model("qwen2", 1), torch.rand(2, 5).numpy()
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
    lm, rng = random_model("llama", 1), random.Random(0)
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


def as_on_a_gpu(monkeypatch):
    """Schedules on the CPU as on a GPU. To replay a captured step, it runs the step again."""
    def replay_by_running(captured, n, kv_length):
        return types.SimpleNamespace(replay=lambda: captured.step(n, kv_length))

    set_up = Sampler.set_up
    monkeypatch.setattr(compile_module.CudaGraphs, "capture", replay_by_running)
    monkeypatch.setattr(Sampler, "set_up", lambda sampler, gpu, compile, check: set_up(
        sampler, True, compile, check))


@CONTEXTS
def test_gpu_scheduling_samples_the_same_tokens(context, monkeypatch):
    """On a GPU, numbers of slots and lengths are rounded up, finished slots are decoded as padding,
    and steps are queued before the host knows which slots the steps before have finished."""
    lm = random_model("qwen2", 1)
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
    lm = random_model("qwen2", 1)
    before = lm.model.generation_config, lm.model.config._attn_implementation
    monkeypatch.setattr(lm.model, "generate", mock.Mock(side_effect=RuntimeError("failed")))
    with pytest.raises(RuntimeError, match="failed"):
        Sampler(lm, "hf", max_new_tokens=2)([0], [[5, 6]], torch.rand(1, 2).numpy())
    assert (lm.model.generation_config, lm.model.config._attn_implementation) == before


def test_full_context_encodes_every_token_once():
    lm = random_model("llama", 1)
    turns, sampler = play(lm, "kv", "full", 1.0)
    assert sampler.tokens_encoded == sum(len(t.prompt_ids) for t in turns)
    assert sampler.tokens_sampled == sum(len(t.action_ids) for t in turns)
    _, again = play(lm, "hf", "full", 1.0)
    assert again.tokens_encoded > 3 * sampler.tokens_encoded


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
    lm = random_model("qwen2", 1)
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
    lm = random_model("qwen2", 1)
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
    lm = random_model("qwen2", 1)
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
    moved = batch._replace(tokens=slice(5, 9), turns=slice(2, 5)).to("meta")
    assert (moved.tokens, moved.turns) == (slice(5, 9), slice(2, 5)) and moved.ids.is_meta
    for wrong in ((0, 2), (2, 2), (2, 4)):
        with pytest.raises(ValueError, match="context"):
            make_batch([([1, 2, 3], [wrong])])


def test_long_prompts_shorten_the_history_then_end_the_episode_then_raise():
    lm = random_model("qwen2", 1)
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
    numbers = run_module.rollout_metrics(some, lm, envs.CATEGORIES, len(GAMES))
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
    lm = random_model("qwen2", 1)
    sampler, longest = Sampler(lm, context=context, max_new_tokens=40), []
    options = dict(seed=3, max_num_seqs=3)
    run = sampler.run
    sampler.run = lambda steps: longest.append(steps) or run(steps)
    with a_pool(workers, horizon=6) as pool:
        whole = rollout(sampler, GAMES, pool, **options)
        asked = len(longest)
        for limit in (0, asked // 2, asked - 1):
            calls = iter(range(asked))
            interrupted = lambda: next(calls) >= limit
            some = rollout(sampler, GAMES, pool, interrupted=interrupted, **options)
            over = {t.traj for t in some if t.done}
            assert some == [t for t in whole if t.traj in over] and len(over) < len(GAMES)
            assert not pool.games and not sampler.busy
        assert over
        assert rollout(sampler, GAMES, pool, interrupted=lambda: False, **options) == whole
    assert max(longest) <= rollout_module.ENV_LATENCY_STEPS < sampler.max_new_tokens


def test_a_seed_is_a_number_or_several():
    turns = [play(random_model("qwen2", 1), "kv", "window", 1.0, seed=seed, horizon=2)[0]
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
            episode = envs.House.prompt_builder(obs, info)
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
    class Both(envs.House):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated or terminated, info

    sampler = Sampler(load(TINY_HOUSE), max_new_tokens=16)
    turns = rollout(sampler, envs.tasks("house", "train")[:12], Pool(Both, {"horizon": 20}))
    ends = {(turn.won, turn.end) for turn in turns if turn.done}
    assert ends == {(True, End.TERMINATED), (False, End.HORIZON)}


def test_reserved_tokens_are_padding_rows_or_unused_special_tokens_or_named_ones():
    lm = random_tiny()
    tokenizer, stops, size = lm.tokenizer, lm.stop_ids, len(lm.tokenizer)
    assert reserve_value_ids(tokenizer, size + 2, stops) == (size, size + 1)
    with pytest.raises(ValueError, match="no two vocabulary entries are free"):
        reserve_value_ids(tokenizer, size + 1, stops)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|extra_0|>", "<|extra_1|>", "<|tool|>"]})
    chosen = reserve_value_ids(tokenizer, len(tokenizer), stops)
    assert {tokenizer.convert_ids_to_tokens(i) for i in chosen} == {"<|extra_0|>", "<|extra_1|>"}
    named = reserve_value_ids(tokenizer, len(tokenizer), stops, ("<|tool|>", "5"))
    assert named == tuple(tokenizer.convert_tokens_to_ids(["<|tool|>", "5"]))
    for names in (("<|end|>", "<|tool|>"), ("nonsense-word", "<|tool|>"), ("<|tool|>",) * 2):
        with pytest.raises(ValueError, match=f"--value_tokens {names[0]}.*: give two different"):
            reserve_value_ids(tokenizer, len(tokenizer), stops, names)


def test_v_leaves_zero_in_16_bits_at_the_papers_learning_rate():
    """A step of 1e-6 is rounded away in a bfloat16 row of ordinary size, but not near 0."""
    base, batch = random_model("qwen2", 0), make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    model, targets = base.model.bfloat16(), (torch.zeros(2), torch.ones(2))
    for ids in (None, (5, 6)):  # rows that are set to 0, and two equal ones of ordinary size
        lm = actor_critic(model, base.tokenizer, value_ids=ids)
        lm.head.weight.data[6] = lm.head.weight.data[5]
        v = lambda batch: (value_loss(lm.score(batch).p_v, *targets, clip=0.2)[0], {})
        imitate.train_step(model, optim.AdamW(model.parameters(), 1e-6), [batch], v, 1e-6)
        assert lm.score(batch).p_v.all() == (ids is None)


def test_saturated_initial_readout_is_refused_with_a_remedy():
    lm = random_model("qwen2", 1)
    ids = lm.chat.encode_user_turn("hello")
    one, both = sorted(lm.tau_v * lm.score(make_batch(  # |z+ - z-| of Q and V
        [(ids + [lm.chat.end_of_turn_id()], [(len(ids), len(ids) + 1)])]))[k].abs().item()
        for k in (2, 3))
    check_initial_readout(dataclasses.replace(lm, tau_v=(one + both) / 2), ids)
    with pytest.raises(ValueError, match="--value_tokens.*--tau_v"):
        check_initial_readout(dataclasses.replace(lm, tau_v=one / 2), ids)


def test_the_conversation_grows_by_appending():
    lm = random_tiny()
    encode = lambda text: lm.tokenizer(text, add_special_tokens=False).input_ids
    stop, response = lm.stop_ids[0], encode("<action> look </action>")
    messages = [{"role": "user", "content": "one"},
                {"role": "assistant", "content": "<action> look </action>"},
                {"role": "user", "content": "two"}]
    whole = encode(lm.tokenizer.apply_chat_template(messages, tokenize=False,
                                                    add_generation_prompt=True))
    first, second = lm.chat.encode_user_turn("one"), lm.chat.encode_user_turn("two", [stop])
    assert first + response + [stop] + second == whole
    # a truncated response gets the stop token that it lacks
    assert first + response + lm.chat.encode_user_turn("two", response) == whole


@pytest.mark.parametrize("architecture, more", [
    ("gpt2", dict(n_embd=32, n_layer=2, n_head=4)), ("phi3", dict(resid_pdrop=0.5)),
    ("opt", dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5)),
    ("qwen2", dict(attention_dropout=0.5)), ("mixtral", dict(router_jitter_noise=0.5))])
def test_train_mode_gives_the_same_scores(architecture, more):
    lm = random_model(architecture, 1, **more)
    batch = make_batch([([*range(9, 29)], [(2, 6), (9, 20)])])
    with torch.no_grad():
        scores = [torch.cat(lm.score(batch)) for _ in (lm.model.train(), lm.model.eval())]
    assert torch.equal(*scores)


# What the templates of these models do with roles, contents, tools and several messages in a row,
# written anew and in fewer words. The models have theirs in tokenizer_config.json; TRL
# (trl/chat_templates) and llama.cpp (models/templates) keep copies.
SYSTEM = """{% set system = '' %}
{% if messages[0].role == 'system' %}
{% set system = messages[0].content %}
{% set messages = messages[1:] %}
{% endif %}
"""
SMOLLM = """{% if messages[0].role != 'system' %}
<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
{% endif %}
{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
QWEN3 = SYSTEM + """{% if system or tools %}
<|im_start|>system
{{ system }}{% if tools %}


# Tools
<tools>
{{ tools | map('tojson') | join('\n') }}
</tools>
Call them in this form:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}<|im_end|>
{% endif %}
{% for m in messages %}
{% if m.role == 'tool' %}
{% if not loop.previtem or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ m.content }}
</tool_response>{% if not loop.nextitem or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{% else %}
<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
LLAMA = SYSTEM + """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

{% if tools %}
Environment: ipython
{% endif %}
Today Date: {{ strftime_now("%d %b %Y") }}

{{ system | trim }}<|eot_id|>
{%- for m in messages -%}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if tools and loop.first %}
Respond in the format {"name": function name, "parameters": dictionary}.

{{ tools | map('tojson', indent=4) | join('\n\n') }}

{% endif %}
{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>
{%- endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA3 = "<bos>" + SYSTEM + """{% for m in messages %}
{% if (m.role == 'user') == loop.index0 % 2 %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if system and loop.first %}
{{ system }}

{% endif %}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}"""
GEMMA2 = """{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
""" + GEMMA3
MISTRAL = "<s>" + SYSTEM + """{% for m in messages %}
{% if m.role == 'user' %}
{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST] {% if system and loop.last %}
{{ system }}

{% endif %}
{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}
{{ ' ' + m.content | trim }}</s>
{%- else %}
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{% endif %}
{% endfor %}"""
R1 = "<|begin|>" + SYSTEM + """{{ system }}
{%- set seen = namespace(tool=false) %}
{% for m in messages %}
{% if m.role == 'user' %}
<|User|>{{ m.content }}
{%- elif m.role == 'tool' %}
{{ '\n' if seen.tool else '<|outputs_begin|>' }}<|output_begin|>{{ m.content }}<|output_end|>
{%- set seen.tool = true %}
{% else %}
{{ '<|outputs_end|>' if loop.previtem.role == 'tool' else '<|Assistant|>' }}
{{- m.content.split('</think>')[-1] }}<|end|>
{%- endif %}
{% endfor %}
{% if messages[-1].role == 'tool' %}<|outputs_end|>
{%- elif add_generation_prompt %}
<|Assistant|><think>
{% endif %}"""
TEMPLATES = {  # model: (its template, how that begins a response, roles that it does not have)
    "SmolLM2": (SMOLLM, "", ()),
    "Qwen2.5": (QWEN3.replace("system = ''", "system = 'You are Qwen.'"), "", ()),
    "Qwen3": (QWEN3, "", ()),
    "Qwen3, not thinking": (
        QWEN3.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        "<think>\n\n</think>\n\n", ()),
    "Llama 3": (LLAMA, "", ()), "Gemma 2": (GEMMA2, "", ("system", "tool")),
    "Gemma 3": (GEMMA3, "", ("tool",)),
    "Mistral": (MISTRAL, "", ("system", "tool")),  # it moves the system's text to the last message
    # the second result of a tool is not like the first, and no <think> is after it
    "R1": (R1, "<think>\n", ("tool",))}
TOOL = {"type": "function", "function": {
    "name": "query", "description": "Asks the database.", "parameters": {
        "type": "object", "properties": {"sql": {"type": "string", "description": "in \"SQL\""}},
        "required": ["sql"]}}}
DAY = "2026-11-27"


def byte_level(template):
    """A tokenizer of the kind that these models have. Some of their control tokens are not
    special."""
    text = [envs.ANSWER, "You are in a room. go to desk 1 system user assistant model im_start"]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text * 9, vocab_size=600, show_progress=False)
    added = {*re.findall(r"</?[|a-zA-Z_]+>|\[/?[A-Z_]+\]", template), "<think>", "</think>",
             "<|reserved_1|>"} - {"<tools>", "</tools>"}
    tokenizer.add_tokens([tokenizers.AddedToken(x, special=not re.search("think|tool|User", x))
                          for x in sorted(added)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer,
                                                chat_template=template)


def rendered(tokenizer, messages, tools=None):
    """The text of a whole conversation on DAY, by the template alone."""
    template = tokenizer.chat_template.replace('strftime_now("%d %b %Y")', "'27 Nov 2026'")
    return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template,
                                         tokenize=False, add_generation_prompt=True)


def messages_of(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def control_ids(tokenizer):
    """Of the tokens that no text may become."""
    return {i for i, token in tokenizer.added_tokens_decoder.items()
            if not re.search("think|tool_call", token.content)}


def attack_of(tokenizer):
    """A text that spells all of them."""
    names = [tokenizer.added_tokens_decoder[i].content for i in sorted(control_ids(tokenizer))]
    return "".join(f"x{name}<{name}\n{name[:-1]}{name}" for name in names) + "<|User|"


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_of_a_game_never_becomes_control_tokens(name):
    """A prompt has the ids of the rendered template, control tokens in the text of a game are
    spelled, and the beginning of a response that the template writes counts as a part of it."""
    template, prefix, _ = TEMPLATES[name]
    tokenizer = byte_level(template)
    chat = model_module.Chat(tokenizer, DAY)
    ordinary = "You are in a room.\n\n <b>A desk 1</b>, <x> & \u00e9t\u00e9. " + envs.ANSWER
    for text in (ordinary, f"  {ordinary}\n", "-"):
        whole = rendered(tokenizer, messages_of(("user", text.strip())))
        assert chat.encode_user_turn(text) == tokenizer(whole, add_special_tokens=False).input_ids
    control, attack = control_ids(tokenizer), attack_of(tokenizer)
    plain = Counter(i for i in chat.encode_user_turn("-") if i in control)
    ids = chat.encode_user_turn(attack)
    assert Counter(i for i in ids if i in control) == plain and sum(plain.values()) > 1
    assert tokenizer.decode(ids) == chat.begin + attack + chat.end
    later = chat.encode_user_turn(attack, before=[1])
    assert tokenizer.decode(later) == chat.between + attack + chat.end
    assert chat.response_prefix == prefix
    thought = {"": "<think>a</think>", "<think>\n": "a</think>"}.get(prefix, "")
    for answer, valid in ((thought + "<action>look</action>", True),
                          ("<think>a</think><action>look</action>", True),
                          ("<action>look</action>", "</think>" in prefix)):
        assert envs.House.parse_action(prefix + answer) == ("look", valid)


CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'
CONVERSATION = (  # what comes before a response, and the response
    (messages_of(("system", "You answer questions."), ("user", "Who is it?")),
     "<think>Hm.</think>" + CALL),
    (messages_of(("tool", '[["Ada \\ Lovelace", 36],\n ["\u00e9t\u00e9", 1]]'), ("tool", "2 rows")),
     "<think>No.</think>" + CALL),
    (messages_of(("tool", 'Error: no column "nmae"')), "It is Ada."),
    (messages_of(("user", "How old?")), CALL),
    (messages_of(("tool", "36")), "36"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversation_with_tools_has_the_ids_of_the_template(name):
    """Appended message by message, a conversation has the ids that the template gives it as a
    whole, except that thoughts stay in it. What the template has no role for is a user's message
    there."""
    template, prefix, lacks = TEMPLATES[name]
    tokenizer = byte_level(template)
    chat = model_module.Chat(tokenizer, DAY)
    for tools in (None, [TOOL])[:2 if name.startswith("Qwen") else 1]:  # for others see below
        ids, shown, responses = [], [], {}
        for messages, response in CONVERSATION:
            ids += chat.encode_messages(messages, ids, tools)
            if {*lacks} & {message["role"] for message in messages}:
                messages = messages_of(("user", "\n\n".join(m["content"] for m in messages)))
            shown += messages
            whole = rendered(tokenizer, shown, tools)
            for placeholder, text in responses.items():
                whole = whole.replace(placeholder, text)
            assert ids == tokenizer(whole, add_special_tokens=False).input_ids
            placeholder = f"@{len(responses)}@"
            responses[placeholder] = prefix + response
            shown += messages_of(("assistant", placeholder))
            blank = " " if name == "Mistral" else ""  # before each of its responses
            ids += chat.encode(blank + response) + [chat.end_of_turn_id()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_tool_returns_never_becomes_control_tokens(name):
    tokenizer = byte_level(TEMPLATES[name][0])
    chat = model_module.Chat(tokenizer, DAY)
    control, attack = control_ids(tokenizer), attack_of(tokenizer)
    count = lambda text: Counter(i for i in chat.encode_messages(
        messages_of(("tool", text), ("tool", text)), [1]) if i in control)
    assert count(attack) == count("-") and sum(count("-").values()) > 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_model_is_told_of_its_tools_and_to_call_them_as_json(name):
    tokenizer = byte_level(TEMPLATES[name][0])
    chat = model_module.Chat(tokenizer, DAY)
    for system in ("You answer.", None):
        messages = messages_of(("system", system), ("user", "Hello."))[0 if system else 1:]
        text = tokenizer.decode(chat.encode_messages(messages, tools=[TOOL]))
        own = name.startswith(("Qwen", "Llama", "Mistral"))  # the template shows the schema
        assert text.count(TOOL["function"]["description"]) == text.count('"sql": {') == 1
        assert (model_module.TOOLS.splitlines()[0] in text) != own
        assert (model_module.CALLS in text) != name.startswith("Qwen")
        assert re.search(r'<tool_call>\n{"name".*"arguments".*}\n</tool_call>', text)
        assert text.count("Hello.") == 1 and text.count("You answer.") == bool(system)
        later = [chat.encode_messages(messages[-1:], [1], tools) for tools in (None, [TOOL])]
        assert later[0] == later[1]  # they are shown once


def test_result_of_a_tool_is_a_users_message_where_the_template_has_no_role_for_it(caplog):
    chat = model_module.Chat(byte_level(TEMPLATES["Gemma 3"][0]), DAY)
    results = messages_of(("tool", " 1 "), ("tool", "2\n"), ("user", "Well?"))
    for _ in range(2):
        ids = chat.encode_messages(results, [1])
        assert ids == chat.encode_user_turn("1 \n\n2\n\n\nWell?", [1])
    assert len(caplog.messages) == 1 and "no role for what a tool returned" in caplog.text
    quiet = model_module.Chat(byte_level(TEMPLATES["Qwen3"][0]), DAY)
    quiet.encode_messages(results, [1])
    assert len(caplog.messages) == 1


def test_blanks_around_what_a_tool_returned_stay_if_the_template_keeps_them():
    trimmed = SMOLLM.replace("m.content", "m.content | trim")
    for template, kept in ((SMOLLM, "  1\n"), (trimmed, "1")):
        tokenizer = byte_level(template)
        ids = model_module.Chat(tokenizer).encode_messages(messages_of(("tool", "  1\n")), [1])
        assert f"<|im_start|>tool\n{kept}<|im_end|>" in tokenizer.decode(ids)


def test_templates_that_number_their_messages_cannot_be_appended_to():
    chat = model_module.Chat(byte_level(
        "{% for m in messages %}{{ loop.index }}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ messages | length + 1 }}<|assistant|>{% endif %}"))
    assert not chat.appends and chat.encode_user_turn("look")
    with pytest.raises(ValueError, match="--context window"):
        chat.encode_user_turn("look", before=[1])
    assert all(model_module.Chat(byte_level(t), DAY).appends for t, *_ in TEMPLATES.values())


def test_date_of_a_template_is_the_one_that_is_given():
    tokenizer = byte_level(TEMPLATES["Llama 3"][0])
    chat = model_module.Chat(tokenizer, "2024-02-29")
    assert "Today Date: 29 Feb 2024" in tokenizer.decode(chat.encode_user_turn("look"))
    chat.date = DAY  # of the run that goes on
    assert "Today Date: 27 Nov 2026" in tokenizer.decode(chat.encode_user_turn("look"))


@pytest.mark.parametrize("messages, message", [
    ("look", "messages are a list"), ([], "one or more"), (["look"], "one of these is 'look'"),
    ([{"role": "user"}], "one of these is"), (messages_of(("user", None)), "the content None"),
    (messages_of(("robot", "hello")), "the role 'robot'"),
    (messages_of(("assistant", "hello")), "only responds"),
    (messages_of(("user", "hello"), ("system", "hello")), "at the start of a conversation")])
def test_messages_that_cannot_be_are_named(messages, message):
    chat = random_tiny().chat
    with pytest.raises(ValueError, match=message):
        chat.encode_messages(messages)
    with pytest.raises(ValueError, match="at the start of a conversation"):
        chat.encode_messages(messages_of(("system", "hello")), before=[1])


# ---- use in other programs

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_works_as_before_after_wrapping_a_model(dtype):
    """With and without a cache, and with padding on the left."""
    model = copy.deepcopy(random_model("qwen2", 1, dtype=dtype).model)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(20, 400, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(30) >= torch.tensor([0, 3, 11, 29])[:, None]).long()

    @torch.no_grad()
    def seen(model):
        one, four = (model.generate(ids[:n], attention_mask=mask[:n], max_new_tokens=8,
                                    do_sample=False, pad_token_id=0) for n in (1, 4))
        logits = model(input_ids=ids, attention_mask=mask).logits * mask[..., None]
        return one, four, logits[..., :-2]  # without the two tokens whose rows become 0

    before = seen(model)
    lm = actor_critic(model, random_tiny().tokenizer)
    assert model.config._attn_implementation == "grouped"
    after = seen(model)
    assert all(map(torch.equal, before[:2], after[:2])) and lm.score
    torch.testing.assert_close(before[2], after[2], atol=1e-4 if dtype == torch.float32 else 0.1,
                               rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_folder_works_in_plain_transformers_and_keeps_its_values(tmp_path, dtype):
    lm = load(TINY_HOUSE, dtype=dtype)
    lm.head.weight.data[list(lm.value_ids)] = 9.0 * lm.head.weight.data[200:202]  # likely words
    lm.save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert model.dtype == dtype
    text = "<think> find mug </think> <action> go to desk 1 </action>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    # transformers 4 reads the first names
    for name, key, value in (("tokenizer_config", "tokenizer_class", "PreTrainedTokenizerFast"),
                             ("config", "rope_theta", 10000.0)):
        assert json.loads((tmp_path / f"{name}.json").read_text())[key] == value
    env = make_env("house")
    prompt = envs.House.prompt_builder(*env.reset(GAMES[0])).window_prompt()
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt",
                                        return_dict=True)
    for sample in (False, True):
        torch.manual_seed(0)
        out = model.generate(**ids, do_sample=sample, max_new_tokens=12, num_return_sequences=1 + 15
                             * sample)[:, ids.input_ids.shape[1]:]
        assert not torch.isin(out, torch.tensor(lm.value_ids)).any()
        if not sample:
            response, = Sampler(lm, max_new_tokens=12, temperature=0.0).generate([prompt])
            assert out[0].tolist() == response.ids
    for value_tokens in (None, lm.value_ids):  # those of sapo.json
        again = actor_critic(model, tokenizer, value_tokens)
        assert (again.value_ids, again.tau_v) == (lm.value_ids, lm.tau_v)
        assert torch.equal(again.head.weight, lm.head.weight)


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


def test_what_training_is_given_keeps_its_own_settings(tmp_path):
    """So no setting exists twice: those of a model, a pool and a learner are theirs, and the run's
    config.json has them."""
    given = {"iterations": 1, "batch_size": 2, "max_new_tokens": 4, "eval_games": 0, "gamma": 0.5}
    lm = dataclasses.replace(random_tiny(), r_max=3.0, tau_v=2.0)
    for name, parts in (("made", {"lm": lm, "pool": Pool(envs.House, {"horizon": 3})}),
                        ("learner", {"learner": train.Learner(lm, train.Config())})):
        config = train.Config(out=str(tmp_path / name), horizon=5, places=8, dtype="bfloat16",
                              **given)
        assert train.train(config, **parts).model is lm.model
        stored = json.loads((tmp_path / name / "config.json").read_text())
        assert (stored["r_max"], stored["tau_v"], stored["gamma"]) == (3.0, 2.0, 0.5)
        assert stored["horizon"] == (3 if name == "made" else 5)
        assert (stored["places"], stored["dtype"]) == (5 if name == "made" else 8, "float32")
        assert stored["env"] == "house"
        assert len(read_lines(tmp_path / name / "metrics.jsonl")) == 1
        assert (tmp_path / name / "final" / "sapo.json").is_file()
    assert parts["learner"].config.gamma == 0.5
    grouped = train.learner_class("grpo")(lm, train.settings(
        algo="grpo", group_size=2, optim_state_dtype="bfloat16"))
    out = tmp_path / "grouped"
    train.train(dataclasses.replace(config, out=str(out)), learner=grouped)
    stored = json.loads((out / "config.json").read_text())
    assert (stored["algo"], stored["group_size"]) == ("grpo", 2) and grouped.config.gamma == 0.5
    assert stored["optim_state_dtype"] == grouped.config.optim_state_dtype == "bfloat16"
    with pytest.raises(ValueError, match="lm and learner.lm are two models"):
        train.train(dataclasses.replace(config, out=None), random_tiny(), learner=grouped)
    with pytest.raises(ValueError, match="is taken: continue the run in it with --resume"):
        train.train(config, lm)
    with pytest.raises(ValueError, match="--wandb needs --out"):
        train.train(dataclasses.replace(config, wandb="project", out=None), lm)


def test_settings_are_the_papers_then_those_recommended_then_those_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paper, tiny = train.Config(), train.settings()
    assert (paper.lr, paper.iterations, paper.batch_size, paper.horizon) == (1e-6, 150, 128, None)
    assert (tiny.lr, tiny.iterations, tiny.max_prompt) == (4e-4, 24, 8192)
    assert train.settings(model="me/other").lr == paper.lr
    assert train.settings(lr=0.5, context="full") == dataclasses.replace(
        tiny, lr=0.5, context="full", max_prompt=None)
    shutil.copytree(TINY_HOUSE, "mine")  # a folder carries its settings wherever it is
    assert train.settings(model="mine") == dataclasses.replace(tiny, model="mine")
    assert train.settings(algo="grpo").group_size == 8
    assert train.settings(env="webshop", model="me/other").mini_batch == 64
    assert train.parse_config(["--lr", "0.5"]).lr == 0.5
    filled = train.filled(paper)
    assert (filled.horizon, filled.eval_games, filled.max_prompt, filled.dtype) == (
        20, 192, 2048, "bfloat16" if GPU else "float32")
    for name, value in (("context", "ful"), ("engine", "KV"), ("dtype", "fp16")):
        with pytest.raises(ValueError, match=f"{name} is '{value}'; it can be "):
            train.Config(**{name: value})


def test_tasks_are_sorted_and_must_exist():
    class Mine(envs.House):
        def tasks(self, split):
            return {"b", "a", 2, 1} if split == "train" else None

    assert envs.tasks(Mine, "train") == [1, 2, "a", "b"]  # a set has no order of its own
    with pytest.raises(ValueError, match="Mine has no tasks in the split 'test'"):
        envs.tasks(Mine, "test")
    with pytest.raises(ValueError, match="put the class into a module"):
        Pool(Mine, workers=1)
    assert Pool(Mine).env is Mine
    with contextlib.closing(Pool(envs.House, {"horizon": 3}, workers=1)) as pool:
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
        envs.env_class("tools.frozen_lake:FrozenLake")
        assert shared() == before, (before, shared())"""
    env = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], cwd=HERE, env=env, check=True)


def test_actor_critic_accepts_compiled_models_token_ids_and_tokenizers_without_template():
    lm = random_model("llama", 1)
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


def test_unusable_models_are_refused_with_a_reason(tmp_path):
    lm = random_model("qwen2", 1)
    lm.tokenizer.chat_template = None
    lm.save(tmp_path / "mute")
    adapter, words, short = (tmp_path / name for name in ("adapter", "words", "short"))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    shutil.copytree(TINY_HOUSE, words)  # to a qwen2, transformers gives a tokenizer of Qwen's kind
    config = json.loads((words / "config.json").read_text())
    (words / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    (words / "sapo.json").unlink()
    lm = random_model("qwen2", 1)
    lm.tokenizer.add_tokens(["one", "more", "word"])
    lm.save(short)
    for name, complaint in ((str(tmp_path / "mute"), "chat template"), (adapter, "merge it"),
                            (words, "tokenizer, .* encodes .* and decodes it as"),
                            (short, "resize_token"),
                            (str(tmp_path), "cannot load"), ("no-such-model", "not a folder here"),
                            ("runs/x/nope", "no such folder"),
                            ("Qwen2.5-1.5B-Instruct", "cannot load")):
        with pytest.raises(ValueError, match=complaint):
            load(name)


# ---------------------------------------------------------------------------------------- train

def small_config(tmp_path, *flags):
    return train.parse_config([
        "--batch_size", "6", "--iterations", "2", "--horizon", "6", "--eval_games", "4",
        "--mini_batch", "12", "--save_every", "1", "--out", str(tmp_path), *map(str, flags)])


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Case(NamedTuple):
    """An iteration before its update. Turns are numbered as in `batch`."""

    learner: train.Learner
    batch: train.RolloutBatch
    minibatches: list
    old: model_module.Scores
    ref: torch.Tensor
    targets: train.Targets

    def step(self, n=0):
        return self.learner.step(self.minibatches[n], self.old, self.ref, self.targets, 0)

    def columns(self, *names):
        """Fields of the turns, each (N,) in float64."""
        return [tensor([float(getattr(t, name)) for t in self.batch.turns]) for name in names]

    def of_turn(self, n, flat):
        """(M,) -> the part of the n-th turn."""
        return flat[self.batch.turn_of == n]

    def logits(self):
        """The first mini-batch's turns -> (n, the logits before its tokens, and after them, from a
        pass of its own)."""
        for m in self.minibatches[0]:
            spans = zip(m.row.tolist(), m.start.tolist(), m.end.tolist())
            for n, (row, start, end) in enumerate(spans, m.turns.start):
                yield n, self.learner.lm.model(m.ids[row:row + 1, :end]).logits[0, start - 1:]


def case_of(lm, turns, config):
    """Lines 3 to 5 of Algorithm 1 on some turns. The policy's optimizer takes no step."""
    learner = train.learner_class(config.algo)(lm, config)
    learner.optimizer.step = mock.Mock()
    if hasattr(learner, "critic"):  # or all of its values would be 0
        torch.nn.init.normal_(learner.critic.head.weight, std=0.1)
    batch, minibatches = train.make_minibatches(turns, config, 0, lm.device)
    old = learner.score_behaviour_policy(batch, minibatches)
    ref = learner.score_reference(minibatches)
    return Case(learner, batch, minibatches, old, ref, learner.targets(batch, old))


def prepared(tmp_path, *flags, lm=None):
    """A case of a model whose readouts are not all 0, and of turns of random returns, of which some
    are invalid, and some answer the same observation."""
    config, rng = small_config(tmp_path, *flags), random.Random(0)
    lm = dataclasses.replace(lm or random_model("qwen2", 1), r_max=config.r_max or 10.0)
    turns = play(lm, "kv", config.context, 1.0)[0]
    for t in turns:
        t.reward = rng.choice([0, 0, 10.0]) * t.done
        t.invalid = rng.random() < 0.2
        t.obs = rng.choice("ab")
    return case_of(lm, turns, config)


def off_policy(case):
    """The case with other old log-probs and values, so that clipping acts and the KL is not 0. What
    is added to a token or turn does not depend on their order."""
    token = torch.tensor([i for t in case.batch.turns for i in t.action_ids])
    traj, turn = case.columns("traj", "turn")
    wave = torch.sin(7 * traj + turn).float() / 5
    old = case.old._replace(logp=case.old.logp + 0.3 * torch.sin(token), p_v=case.old.p_v + wave,
                            p_q=case.old.p_q - wave)
    return case._replace(old=old, ref=case.ref + 0.3 * torch.sin(token + 1),
                         targets=case.learner.targets(case.batch, old))


@pytest.fixture
def unclipped(monkeypatch):
    """Gradients as they are, so that they can be compared with a reference."""
    monkeypatch.setattr(train, "GRAD_CLIP", 1e9)


def test_loop_fits_a_screen_and_stands_in_the_readme():
    assert len(dataclasses.fields(train.Config)) <= 45
    loop = inspect.getsource(train.train).strip()
    assert len(loop.splitlines()) <= 32
    learn = textwrap.dedent(inspect.getsource(train.Learner.learn)).strip()
    shown = re.findall(r"```python\n(.*?)```", pathlib.Path(HERE, "README.md").read_text(), re.S)
    for code in loop, learn:
        assert any(code in textwrap.dedent(block) for block in shown)


@CONTEXTS
@pytest.mark.parametrize("flags", ["--c_v 0 --c_q 0", "--algo grpo --group_size 3"])
def test_the_first_step_is_reinforce_and_leaves_the_value_rows_alone(tmp_path, unclipped, flags,
                                                                     context):
    case = prepared(tmp_path, "--context", context, "--c_h", 0, *flags.split())
    info, lm = case.step(), case.learner.lm
    # exactly, because all passes have the same padded batches
    assert info["ratio_max"] == 1 and info["clip_fraction"] == info["kl"] == 0
    found = gradient(lm.model)
    assert not lm.model.lm_head.weight.grad[list(lm.value_ids)].any()
    lm.model.zero_grad()
    tokens = sum(len(m.turn_of) for m in case.minibatches[0])
    for n, z in case.logits():
        token = torch.tensor(case.batch.turns[n].action_ids)[:, None]
        logp = restricted_log_softmax(z[:-1], lm.value_ids).gather(1, token)
        (-case.of_turn(n, case.targets.adv)[0] * logp.sum() / tokens).backward()
    torch.testing.assert_close(found, gradient(lm.model), atol=1e-5, rtol=1e-4)


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
        found.append(gradient(lm.model))
        parts.append(len(case.minibatches[0]))
    assert parts[0] > parts[1] > parts[2] and max(rows) == 7
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)


def test_gradients_of_a_16_bit_model_are_added_up_in_float32(tmp_path, unclipped):
    """A sum over many micro-batches, against the sum of their gradients in float64."""
    def error(state_dtype):
        lm = random_model("qwen2", 1, dtype=torch.bfloat16)
        case = off_policy(prepared(tmp_path, "--mini_batch", 1000, "--tokens_per_micro_batch", 1,
                                   "--optim_state_dtype", state_dtype, lm=lm))
        case.step()
        whole, total = gradient(lm.model).double(), 0
        tokens = sum(len(m.turn_of) for m in case.minibatches[0])
        loss_of = lambda micro: case.learner.loss(micro, case.old, case.ref, case.targets, tokens,
                                                  len(case.minibatches[0]))
        for micro in case.minibatches[0]:
            train.accumulate_gradients(lm.model, [micro], False, loss_of)
            total = total + gradient(lm.model).double()
        return ((whole - total).norm() / total.norm()).item()

    assert error("float32") < 1e-5 < 1e-3 < error("bfloat16")


def test_update_of_a_16_bit_model_can_be_compiled_again_at_any_time(monkeypatch, caplog):
    """The compiler cannot trace a 16-bit model that has float32 gradients."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    lm = random_model("qwen2", 1, dtype=torch.bfloat16)
    optim.AdamW(lm.model.parameters(), 1e-3)
    batch = batch_of(play(lm, "kv", "window", 1.0)[0])
    fast = dataclasses.replace(lm, compile=True)

    def loss_of(micro):
        torch._dynamo.reset()
        return sum(x.sum() for x in fast.score(micro)), {}

    train.accumulate_gradients(lm.model, [batch], False, loss_of)
    once = gradient(lm.model)
    train.accumulate_gradients(lm.model, [batch] * 3, False, loss_of)
    assert once.dtype == torch.float32
    torch.testing.assert_close(gradient(lm.model), 3 * once)
    assert not torch._dynamo.utils.counters["graph_break"] and "falling back" not in caplog.text


def test_gradients_are_freed_before_a_rollout(tmp_path, monkeypatch):
    def watched(sampler, *args, **options):
        gradients = [p.grad for p in sampler.lm.model.parameters()]
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
    found = gradient(lm.model)
    lm.model.zero_grad()
    adv, y_v, y_q = turn_targets(*case.columns("traj", "turn", "reward", "done"), 4 * case.old.p_v,
                                 4 * case.old.p_q, gamma=0.9, lam=0.8)
    adv = advantages_by_loop(adv, *case.columns("invalid"), 0.6, torch.ones(len(turns)), 1e-8)
    tokens = sum(len(m.turn_of) for m in case.minibatches[0])
    count = sum(len(m.start) for m in case.minibatches[0])
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
    torch.testing.assert_close(found, gradient(lm.model), atol=1e-5, rtol=1e-3)


@CONTEXTS
@pytest.mark.parametrize("size", [1, 12])
def test_every_turn_is_trained_once_and_micro_batches_cover_both_axes(tmp_path, context, size):
    case = prepared(tmp_path, "--context", context, "--mini_batch", size,
                    "--tokens_per_micro_batch", 500)
    batch, turns, config = case.batch, case.batch.turns, case.learner.config
    seen = [(t.traj, t.turn) for t in turns]
    length = Counter(t.traj for t in turns)
    assert sorted(seen) == [(traj, n) for traj in range(7) for n in range(length[traj])]
    sizes = [sum(len(m.start) for m in mini) for mini in case.minibatches]
    assert all(sizes)  # however long a trajectory is
    if context == "window":  # a trajectory of `full` is not divided
        assert len(sizes) == math.ceil(len(turns) / size) and max(sizes) - min(sizes) <= 1
    tokens = n = 0
    for m in (m for mini in case.minibatches for m in mini):
        mine = turns[n:n + len(m.start)]
        sampled = [i for t in mine for i in t.action_ids]
        assert m.ids[m.token_row, m.token_col].tolist() == sampled
        assert m.ids.numel() <= max(500, m.ids.shape[1])
        assert m.tokens == slice(tokens, tokens + len(sampled))
        assert m.turns == slice(n, n + len(mine))
        tokens, n = m.tokens.stop, m.turns.stop
    assert n == len(turns) and tokens == len(batch.turn_of) == len(batch.logp)
    assert batch.turn_of.tolist() == [n for n, t in enumerate(turns) for _ in t.action_ids]
    other = train.make_minibatches(turns, dataclasses.replace(config, seed=1), 0, "cpu")[0].turns
    assert seen != [(t.traj, t.turn) for t in other]


def test_steps_are_clipped_and_not_taken_where_they_are_not_finite(tmp_path):
    case = prepared(tmp_path, "--c_v", 1000)
    norms = case.step()
    assert norms["grad_norm"] > 1 and norms["grad_norm_values"] > 1
    assert gradient(case.learner.lm.model).norm().item() == pytest.approx(2 ** 0.5, rel=1e-4)
    adv = case.targets.adv.clone()
    adv[case.minibatches[0][0].tokens.start] = NAN
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
    model, ids = case.learner.lm.model, [*case.learner.lm.value_ids]
    norms = case.step()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    rows = model.get_output_embeddings().weight.grad[ids].clone()
    assert norms["grad_norm_values"] == pytest.approx(rows.norm().item(), rel=1e-5)
    total = gradient(model).norm().item()
    found = math.hypot(norms["grad_norm"], norms["grad_norm_values"])
    assert found == pytest.approx(total, rel=1e-4)
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))  # a few models have one
    for limit in 0.5 * norms["grad_norm"], 2 * norms["grad_norm"]:
        for factor in 0.1, 10:  # of the rows' gradient: below the limit, and above
            for name, p in model.named_parameters():
                p.grad = whole[name].clone() if name in whole else torch.zeros_like(p)
            of_rows = torch.cat([rows, torch.tensor([[3.0], [-2.0]])], dim=1)
            of_rows *= factor * limit / of_rows.norm()
            head.weight.grad[ids], head.bias.grad[ids] = of_rows[:, :-1], of_rows[:, -1]
            monkeypatch.setattr(train, "GRAD_CLIP", limit)
            found = train.clip_gradients(model, ids)
            of_rows = math.hypot(head.weight.grad[ids].norm(), head.bias.grad[ids].norm())
            head.weight.grad[ids] = head.bias.grad[ids] = 0
            found += of_rows, gradient(model).norm().item()
            expected = (norms["grad_norm"], factor * limit,
                        min(factor, 1) * limit, min(limit, norms["grad_norm"]))
            assert found == pytest.approx(expected, rel=1e-4)


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
        first, steps = learner.steps, []
        metrics = learner.learn(kept[n], n)
        assert metrics == {key: line[key] for key in metrics}
        assert all(p.grad is None for p in learner.lm.model.parameters())
        old, info, lr = zip(*steps)
        assert len(steps) > 2 and all(scores is old[0] for scores in old)
        assert info[0]["ratio_max"] == 1 < max(step["ratio_max"] for step in info)
        assert (info[0]["kl"] > 1e-4) == (n > 0)
        assert lr == pytest.approx([1e-2 * min(1, (first + k + 1) / 4) * (1 - n / 6)
                                    for k in range(len(steps))])


def test_every_task_occurs_once_per_epoch_and_group_size_times(tmp_path):
    config, ids = small_config(tmp_path, "--algo", "rloo", "--group_size", 2), list("abcdefg")
    config = dataclasses.replace(config, batch_size=6, iterations=14)
    drawn = [game for n in range(15) for game in train.draw_tasks(ids, config, n)]
    once = drawn[::2]
    assert drawn == [game for game in once for _ in range(2)] and once[:7] != once[7:14]
    assert all(sorted(once[n:n + 7]) == ids for n in range(0, 42, 7))


# ---- the algorithms SAPO is compared with


def advantages(case):
    """(N,): a turn's advantage is the same on all of its tokens."""
    parts = [case.of_turn(n, case.targets.adv) for n in range(len(case.batch.turns))]
    assert all(adv.unique().numel() == 1 for adv in parts)
    return torch.stack([adv[0] for adv in parts]).double()


def whitened(x):
    return advantages_by_loop(x, 0 * x, 0.0, torch.ones(len(x)), 0.0)


near = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


@CONTEXTS
def test_untrained_v_counts_as_zero(tmp_path, context):
    case = prepared(tmp_path, "--context", context, "--c_v", 0, "--c_q", 0)
    zeros = torch.zeros(len(case.batch.turns))
    adv, *_ = turn_targets(*case.columns("traj", "turn", "reward", "done"), zeros, zeros,
                           gamma=0.95, lam=0.95)
    near(advantages(case), whitened(adv.double() - 0.1 * case.columns("invalid")[0]))
    assert case.old.p_v.any() and not case.targets.v.any()


# ---- whole runs

def run_main(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    module.main()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_run(folder, iterations=2):
    """-> the lines of metrics.jsonl of a run that left everything it promises."""
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(iterations))
    assert all(math.isfinite(line[key]) for line in lines for key in (
        "success", "tokens_encoded", "loss_policy", "loss_v", "kl", "v_explained_variance",
        "grad_norm", "time_env", "time_rollout", "time_old_logprobs", "time_ref", "time_update"))
    assert 0 <= json.loads((folder / "eval.json").read_text())["success_before"] <= 1
    page = (folder / "transcripts" / "0001.html").read_text()
    assert page.count("<section>") >= 1 and "V before the response" in page
    assert (folder / "curves.png").stat().st_size > 5000
    assert [p.name for p in folder.glob("checkpoint*")] == [f"checkpoint-{iterations}"]
    return lines


@pytest.fixture
def strong(tmp_path):
    """Flags of runs that win some games and start with V and Q that are not 0."""
    lm = load(TINY_HOUSE)
    torch.manual_seed(0)
    lm.head.weight.data[list(lm.value_ids)] = 0.02 * torch.randn(2, lm.head.in_features)
    lm.save(tmp_path / "start")
    return ["--model", tmp_path / "start", "--horizon", 16, "--seed", 7]


@pytest.mark.parametrize("env, flags", [("house", []), ("webshop", ["--context", "full"])])
def test_run_writes_its_files_and_eval_reproduces_its_evaluation(tmp_path, monkeypatch, capsys, env,
                                                                 flags):
    if env == "webshop":
        products = [DRESS | {"asin": f"B{n:09d}"} for n in range(30)]
        about = {product["asin"]: attributes_entry() for product in products}
        flags = [*flags, "--data", write_catalogue(tmp_path / "shop", products, about)]
    run, categories = tmp_path / "run", envs.env_class(env).categories.values()
    run_main(train, monkeypatch, "--env", env, "--batch_size", 5, "--horizon", 6, "--eval_games", 3,
             "--iterations", 2, "--out", run, *flags)
    assert all({*line["success_by_category"]} == {*categories} for line in check_run(run))
    assert "\n| start | 1 | " in capsys.readouterr().out
    # the final weights with the run's settings play as they did at the end of the run
    run_main(evaluation, monkeypatch, "--model", run, "--limit", 3)
    assert json.loads((run / "eval-test.json").read_text())["weights"] == str(run / "final")
    assert "test, T = 0.4, 3 games: success " in capsys.readouterr().out
    played = {(e["task"], *e["responses"]) for e in read_lines(run / "eval-test.jsonl")}
    assert len(played) == 3 and played == {
        (e["task"], *e["responses"]) for e in read_lines(run / "eval.jsonl")
        if e["when"] == "after" and e["temperature"] == 0.4}


@pytest.mark.parametrize("flags", ["", "--algo gigpo --group_size 3", "--algo ppo --context full"])
def test_resumed_run_matches_uninterrupted_run_and_two_ranks_match_one(tmp_path, strong, flags):
    """The games, the random numbers and the global statistics and denominators are the same; groups
    are split over the ranks; a checkpoint holds the critic and its optimizer."""
    every = [*strong, *flags.split(), "--batch_size", 6, "--eval_games", 0, "--mini_batch", 12,
             "--lr_warmup", 4, "--lr_final_fraction", 1]
    for name, start, *more in (("one", OneRank, 2), ("two", TwoRanks, 2), ("cut", OneRank, 1),
                               ("cut", OneRank, 2, "--resume")):
        start(*every, "--out", tmp_path / name, "--iterations", *more).finish()
    critic = ["critic.pt", "critic-0.pt"] if "ppo" in flags else []
    for name in ("model.safetensors", "learner-0.pt", *critic):
        whole, cut = (tmp_path / of / "checkpoint-2" / name for of in ("one", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), name
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for a, b in zip(one, two):
        assert 0 < a["success"] < 1 and abs(a["loss_policy"]) > 1e-3  # something to compare
        assert ("loss_critic" in a) == ("ppo" in flags)
        for key, x in a.items():
            if type(x) is float and not key.startswith("time_"):
                assert b[key] == pytest.approx(x, rel=2e-3, abs=1e-5), key


def test_metrics_are_logged_to_wandb_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for more in (["--iterations", 1], ["--iterations", 2, "--resume"]):
        run_main(train, monkeypatch, "--batch_size", 3, "--horizon", 3, "--eval_games", 0,
                 "--wandb", "sapo", "--out", tmp_path, *more)
    name = f"run-{(tmp_path / 'wandb-id').read_text()}.wandb"
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/{name}"))
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(files) == len(lines) == 2
    for file, line in zip(files, lines):
        for _ in range(3000):  # wandb's own process writes it
            written = file.read_bytes()
            if str(line["entropy"]).encode() in written and b"v_mean" in written:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{file} lacks the last iteration")


# ------------------------------------------------------------------------- learner and survival

@pytest.mark.parametrize("compile", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(tmp_path, unclipped, monkeypatch, compile):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for flags in ((), ("--gradient_checkpointing",)):
        lm, saved = random_model("qwen2", 1), []
        lm = train.apply_speed_and_memory_settings(lm, small_config(tmp_path, *flags))
        lm = dataclasses.replace(lm, compile=compile and bool(flags))
        case = prepared(tmp_path, *flags, lm=lm)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x,
                                                      lambda x: x):
            case.step()
        found.append(gradient(lm.model))
        width = lm.model.config.intermediate_size  # of the MLP's activations
        kept = any(math.prod(shape) > 100 * width and shape[-1] == width for shape in saved)
        assert kept == (not flags) and not lm.model.training
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


SMALL = ["--batch_size", "4", "--iterations", "4", "--horizon", "4", "--eval_games", "2",
         "--mini_batch", "8", "--save_every", "1"]


def outcome(folder):
    """What a run ended with: weights and metrics, without the seconds."""
    lines = [{k: v for k, v in line.items() if not k.startswith("time_")}
             for line in read_lines(folder / "metrics.jsonl")]
    result = json.loads((folder / "eval.json").read_text())
    return (folder / "final" / "model.safetensors").read_bytes(), lines, result


@pytest.mark.parametrize("run, unharmed, kills, flags", [
    (OneRank, OneRank, (0, 1, 2), []),
    (TwoRanks, TwoRanks, (2,), "--context full --old_logprobs rollout".split())])
def test_run_killed_repeatedly_ends_like_an_uninterrupted_run(tmp_path, strong, run, unharmed,
                                                              kills, flags):
    flags = [*SMALL, *strong, *flags]
    unharmed(*flags, "--out", tmp_path / "whole").finish()
    assert 0 < sum(line["success"] for line in read_lines(tmp_path / "whole/metrics.jsonl")) < 4
    killed, rng = tmp_path / "killed", random.Random(len(kills))
    metrics = killed / "metrics.jsonl"
    for n, lines in enumerate(kills):  # killed after so many iterations, somewhere in the next
        victim = run(*flags, "--out", killed, *["--resume"] * (n > 0))
        while victim.running() and not (metrics.is_file()
                                        and len(metrics.read_text().splitlines()) >= lines):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        victim.kill()
    done = max(checkpoints(killed))
    kept = metrics.read_text().splitlines()[:done]
    unharmed("--resume", "--out", killed).finish()
    assert outcome(killed) == outcome(tmp_path / "whole")
    # these lines have the same seconds, so their iterations were not repeated
    assert done and metrics.read_text().splitlines()[:done] == kept


@pytest.mark.parametrize("run", [OneRank, TwoRanks])
def test_run_stopped_by_a_signal_is_saved_and_resumes(tmp_path, strong, run):
    """Only the last rank gets the signal."""
    flags = [*SMALL, *strong, "--lr_final_fraction", 1, "--save_every", 99]
    out = tmp_path / "stopped"
    stopped, metrics = run(*flags, "--iterations", 99, "--out", out), out / "metrics.jsonl"
    while stopped.running() and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.01)
    stopped.processes[-1].terminate()
    stopped.finish(1)
    done, kept = len(read_lines(metrics)), metrics.read_text()
    assert [*checkpoints(out)] == [done]
    run("--resume", "--iterations", done + 1, "--out", out).finish()
    assert metrics.read_text().startswith(kept)  # with their seconds: they were not repeated
    check_run(out, done + 1)
    run(*flags, "--iterations", done + 1, "--out", tmp_path / "whole").finish()
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("where, done", [("rollout", 1), ("score_all", 2), ("optimizer_step", 2)])
def test_signal_abandons_a_rollout_but_nothing_later(tmp_path, monkeypatch, where, done):
    run, function = tmp_path / "run", getattr(train, where)
    before = signal.getsignal(signal.SIGINT)

    def with_signal(*args, **options):
        if (run / "metrics.jsonl").read_text():  # in the second iteration
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **options)

    monkeypatch.setattr(train, where, with_signal)
    with pytest.raises(SystemExit, match="interrupted"):
        run_main(train, monkeypatch, *SMALL, "--save_every", 99, "--out", run)
    assert [*checkpoints(run)] == [done] == [len(read_lines(run / "metrics.jsonl"))]
    assert signal.getsignal(signal.SIGINT) is before


def test_stopped_training_without_a_folder_says_that_nothing_is_saved(monkeypatch, capsys):
    config = train.Config(iterations=2, batch_size=2, horizon=3, max_new_tokens=4, eval_games=0)
    score_all = train.score_all
    monkeypatch.setattr(train, "score_all", lambda *args: (
        os.kill(os.getpid(), signal.SIGTERM), score_all(*args))[1])
    with pytest.raises(KeyboardInterrupt):
        train.train(config, random_tiny())
    assert "nothing is saved, because config.out is None" in capsys.readouterr().out


def test_ranks_whose_prompts_are_all_too_long_wait_for_the_others(tmp_path):
    env, chat = make_env("house"), load(TINY_HOUSE).chat
    ids, length = tasks("house", "train"), {0: 0, 1: 0}
    flags = ["--batch_size", 2, "--iterations", 1, "--horizon", 2, "--eval_games", 0, "--seed", 0]
    while not length[0] > length[1]:  # of the first prompts of rank 0 and of rank 1
        flags[-1] += 1
        config = train.parse_config([*map(str, flags)])
        for rank, task in enumerate(train.draw_tasks(ids, config, 0)):
            prompt = env.prompt_builder(*env.reset(task)).window_prompt()
            length[rank] = len(chat.encode_user_turn(prompt))
    out = tmp_path / "run"
    TwoRanks(*flags, "--max_prompt", length[0] - 1, "--out", out).finish()
    line, = read_lines(out / "metrics.jsonl")
    assert (line["episodes"], line["context_overflow"] >= 0.5) == (2, True)
    assert line["turns"] > 0 and not (out / "transcripts").exists()  # rank 0 has no episode


def lock_in_separate_folders(rank, folder):
    os.makedirs(folder / str(rank))
    os.chdir(folder / str(rank))
    with pytest.raises(ValueError, match="rank 1 does not see what rank 0 writes to run"):
        with checkpoint.RunDir("run").lock(False):
            pass


def test_ranks_without_a_shared_folder_are_refused(tmp_path):
    on_ranks(lock_in_separate_folders, 2, tmp_path)


def test_remedies_for_out_of_memory_are_allowed_with_resume():
    says = cli.in_one_line(torch.OutOfMemoryError("CUDA out of memory"))
    assert {*re.findall(r"--(\w+)", says)} - {"resume"} <= train.RESUME_MUTABLE


def test_terminal_that_lacks_a_character_ends_no_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    with cli.one_line_errors("x.py"):
        print("50.0 \u2013", flush=True)
    assert sys.stdout.buffer.getvalue() == b"50.0 ?\n"


def test_progress_prints_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SECONDS_PER_LINE", 0.01)
    printed = ""
    with cli.progress("rollout", 10, "turns") as bar:
        bar.update(3)
        while "3/10" not in printed:
            printed += capsys.readouterr().err
    assert all(line.startswith("rollout: ") for line in printed.splitlines())
    assert "\r" not in printed


@pytest.mark.parametrize("first, flags", [
    (TwoRanks, []), (OneRank, ["--dtype", "bfloat16", "--optim_state_dtype", "bfloat16"])])
def test_run_resumes_in_16_bits_and_on_another_number_of_ranks(tmp_path, strong, first, flags,
                                                               monkeypatch):
    flags = [*strong, *flags, "--batch_size", 6, "--lr_final_fraction", 1, "--eval_games", 0,
             "--mini_batch", 12]
    OneRank(*flags, "--iterations", 2, "--out", tmp_path / "whole").finish()
    first(*flags, "--iterations", 1, "--out", tmp_path / "cut").finish()
    shards = [*tmp_path.glob("cut/checkpoint-1/learner-*.pt")]
    assert len(shards) == (2 if first is TwoRanks else 1)
    for name, says in ((shards[-1].name, "lacks one of its learner-"), ("sapo.json", "lacks sapo"),
                       (shards[0].name, f"{shards[0].name} is damaged"),
                       ("model.safetensors", "cannot load model .*checkpoint-1")):
        shutil.copytree(tmp_path / "cut", tmp_path / "torn")
        part = tmp_path / "torn/checkpoint-1" / name
        whole = part.read_bytes()
        part.unlink()
        if "lacks" not in says:
            part.write_bytes(whole[:-999])
        with pytest.raises(SystemExit, match=says):
            run_main(train, monkeypatch, "--iterations", 2, "--out", tmp_path / "torn", "--resume")
        shutil.rmtree(tmp_path / "torn")
    kept = (tmp_path / "cut/metrics.jsonl").read_text()
    OneRank("--iterations", 2, "--out", tmp_path / "cut", "--resume").finish()
    assert (tmp_path / "cut/metrics.jsonl").read_text().startswith(kept)
    (_, whole), (_, cut) = (read_lines(tmp_path / name / "metrics.jsonl")
                            for name in ("whole", "cut"))
    numbers = [key for key, x in whole.items() if type(x) is float and "time" not in key]
    assert 0 < whole["success"] < 1 and abs(whole["loss_policy"]) > 1e-3
    for key in numbers:
        assert cut[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6), key
    if first is OneRank:
        weights = (tmp_path / name / "final/model.safetensors" for name in ("whole", "cut"))
        assert len({path.read_bytes() for path in weights}) == 1


def update_of_a_rank(rank, size, uneven, context, out):
    distributed.BUCKET = 3000  # several of them
    lm, share = random_model("qwen2", 1), range(rank, 5, size)
    if uneven:
        share = range(5) if rank == 0 else []
    config = train.parse_config(["--mini_batch", "1000", "--tokens_per_micro_batch", "300",
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
        torch.save((gradient(lm.model), info), out)


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


def test_resumed_run_keeps_its_settings(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--lr", 1e-4, "--out", run)
    with pytest.raises(SystemExit, match="another --out"):
        run_main(train, monkeypatch, "--model", run / "final", "--out", run)
    with pytest.raises(SystemExit, match="--lr was 0.0001"):
        run_main(train, monkeypatch, "--resume", "--out", run, "--lr", 2e-4)
    run_main(train, monkeypatch, "--resume", "--out", run, "--iterations", 2,
             "--max_num_seqs", 2)
    assert [line["iteration"] for line in read_lines(run / "metrics.jsonl")] == [0, 1]
    assert json.loads((run / "config.json").read_text())["lr"] == 1e-4
    with pytest.raises(SystemExit, match="there is no run in"):
        run_main(train, monkeypatch, "--resume", "--out", tmp_path / "nwe")
    # with its settings, --resume starts a run that does not exist: a job can always pass it
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--out", tmp_path / "new", "--resume")
    assert (tmp_path / "new" / "final").is_dir()


LAKE = (HERE / "tools/frozen_lake.py").read_text()
# A frozen lake for tests: it ends its episodes by itself, and its info has every key.
MY_ENV = LAKE[:LAKE.index("        info = {")] + '''\
        self.turn = 0
        return f"Your task is to: reach the goal. {self.observation()}", self.info()

    def info(self):
        return {"admissible": [*WAYS], "task": "reach the goal.", "category": "lake",
                "won": self.at == self.goal, "score": float(self.at == self.goal)}

    def step(self, action):
        self.turn += 1
        self.at = neighbours(self.at).get(action, self.at)
        info = self.info()
        terminated = info["won"] or self.at not in self.distance
        truncated = self.turn == self.horizon and not terminated
        return self.observation(), envs.REWARD * info["won"], terminated, truncated, info

''' + LAKE[LAKE.index("    def observation"):LAKE.index("    def step")] + (
    LAKE[LAKE.index("    def advice"):])


def test_resuming_with_another_reference_is_refused(tmp_path, monkeypatch):
    lm = load(TINY_HOUSE)
    flags = [*SMALL, "--model", tmp_path / "start", "--out", tmp_path / "run"]
    for iterations in (1, 2):
        lm.save(tmp_path / "start")
        run_main(train, monkeypatch, *flags, "--iterations", iterations, "--resume")
    lm.model.get_input_embeddings().weight.data += 0.1
    lm.save(tmp_path / "start")
    kept = (tmp_path / "run/final/model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="began with other weights than these"):
        run_main(train, monkeypatch, *flags, "--iterations", 3, "--resume")
    assert (tmp_path / "run/final/model.safetensors").read_bytes() == kept
    config = train.Config(beta=0.0)
    with_kl = train.Learner(lm, dataclasses.replace(config, beta=0.1))
    train.Learner(lm, config).save(tmp_path)
    with pytest.raises(ValueError, match="has beta = 0, so it kept no reference"):
        with_kl.restore(tmp_path)


def test_runs_with_other_settings_are_other_rows_and_a_seed_counts_once(tmp_path, capsys):
    def groups(*settings):
        place = tmp_path / f"{len(os.listdir(tmp_path))}"
        runs = [a_run(place / f"run-{n}", 0.5, 1, **config) for n, config in enumerate(settings)]
        found = evaluation.group_runs([*runs, runs[0]])  # each run counts once
        return {name: len(runs) for name, runs in found.items()}

    # what changes no result may differ, and a model made for its seed
    assert groups({"seed": 0, "compile": True, "model": "runs/start-0"},
                  {"seed": 1, "compile": False, "model": "runs/start-1"}) == {"run": 2}
    for name, values in (("algo", ("sapo", "grpo")), ("gamma", (0.9, 0.95)), ("places", (5, 8)),
                         ("context", ("window", "full")), ("eval_games", (10, 100))):
        assert groups(*({"seed": seed, name: value} for seed, value in enumerate(values))) == {
            f"run ({name}={value})": 1 for value in values}
    assert groups({"seed": 3}, {"seed": 3}) == {"run": 1}
    assert "seed 3 of" in capsys.readouterr().err


def test_own_environment_trains_and_is_evaluated(tmp_path, monkeypatch):
    """Its module is in the working directory, and it is played in this process and by a worker. Its
    tasks come from a generator, its types are NumPy's, and its text has a lone surrogate."""
    mine = MY_ENV.replace('"won": self.at == self.goal', '"won": np.bool_(self.at == self.goal)')
    mine = mine.replace("return [n for n in range(5000) if (n % 5 == 0) == (split == \"test\")]",
                        "return (n for n in np.arange(50) + 50 * (split == \"test\"))")
    mine = mine.replace("Ice:", "Ice \\udcff:")
    assert mine.count("np.") == 2 and mine.count("udcff") == 1
    (tmp_path / "mine.py").write_text("import numpy as np\n" + mine)
    monkeypatch.chdir(tmp_path)
    for workers in (0, 1):
        run = tmp_path / f"runs/FrozenLake-tiny-batch_size=4-eval_games=4-horizon=3-{workers}"
        monkeypatch.setattr(envs, "default_workers", lambda name: workers)
        run_main(train, monkeypatch, "--env", "mine:FrozenLake", "--batch_size", 4,
                 "--iterations", 1, "--eval_games", 4, "--horizon", 3, "--seed", workers)
        line, = read_lines(run / "metrics.jsonl")
        assert line["episodes"] == 4 and line["turns"] >= 8
    run_main(evaluation, monkeypatch, "--model", run)
    assert (run / "eval-test.json").is_file()
    for name, why in (("mine:Door", "has no attribute 'Door'"), ("yours:FrozenLake", "No module"),
                      ("json:JSONDecoder", "inherit from envs.Env"), ("lake", "MODULE:CLASS")):
        with pytest.raises(SystemExit, match=why):
            run_main(train, monkeypatch, "--env", name)


@pytest.mark.parametrize("module, argv, complaints", [  # one of each kind
    (train, ["--learning_rate", "1"], ["--learning_rate"]),
    (train, ["--old_logprobs", "never"], ["--old_logprobs", "never", "recompute", "rollout"]),
    (train, ["--env", "hose"], ["hose", "known: house, alfworld"]),
    (train, ["--model", "nobody/nothing"], ["cannot load model", "nobody/nothing"]),
    pytest.param(train, ["--env", "alfworld", "--data", "nowhere"], ["alfworld-download"],
                 marks=needs_package),
    (train, ["--max_new_tokens", "16380"], ["--max_new_tokens 16380 leaves no room for a prompt"]),
    (train, ["--value_tokens", "77", "99999"], ["99999", "ids below"]),
    (train, ["--algo", "grpo", "--group_size", "5"], ["--group_size 5 does not divide"]),
    (train, ["--env", "webshop", "--places", "3"], ["--places has no effect", "--env webshop"]),
    (evaluation, ["--model", "tiny", "--split", "dev"], ["known: train, test"]),
    (evaluation, ["--plot", "nowhere"], ["none of these"])])
def test_mistakes_on_the_command_line_give_one_clear_line(tmp_path, monkeypatch, module, argv,
                                                          complaints):
    with pytest.raises(SystemExit) as stop:
        run_main(module, monkeypatch, "--out", tmp_path / "run", *argv)
    assert all(part in str(stop.value) for part in complaints) and "\n" not in str(stop.value)


def test_run_warns_once_of_what_keeps_it_from_learning(tmp_path, monkeypatch, capsys):
    """The house's model on a lake, and unsuitable settings; usual settings give no warning."""
    lake = ["--env", "tools.frozen_lake:FrozenLake", "--max_new_tokens", 6]
    for flags, says in ((lake, ["a fifth of the actions are admissible",
                                "--max_new_tokens 6 truncates",
                                "no success in three iterations"]),
                        (["--r_max", 1], ["a return exceeds R_max"]), ([], []),
                        (["--max_prompt", 29], [
                            " has more than 29 tokens; such episodes count as lost. Raise "
                            "--max_prompt", "no success in three"])):
        out = tmp_path / str(len(says))
        run_main(train, monkeypatch, "--iterations", 3, "--batch_size", 6, "--horizon", 8,
                 "--eval_games", 0, "--out", out, *flags)
        found = [line for line in capsys.readouterr().out.splitlines() if "Warning" in line]
        assert len(found) == len(says) and all(part in line for part, line in zip(says, found))


def test_episode_page_shows_all_numbers_and_escapes_text():
    lm = random_model("qwen2", 1)
    turns, _ = play(lm, "kv", "window", 1.0, games=GAMES[:1])
    evil = "<script>alert(1)</script>"
    turns[0].messages, turns[0].task, turns[0].advantage = envs.user_message(evil), evil, -1.25
    turns[1].obs = f"An answer. {evil}"
    text = {turns[0].action_ids[0]: evil}
    lines = [{"success": 0.5, "v_explained_variance": NAN, "q_explained_variance": INF}] * 3
    page = evaluation.episode_page(evil, turns, lines,
                                   lambda ids: "".join(text.get(i, f" w{i}") for i in ids))
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)") >= 6
    prompt, response, answer = map(page.index, ("<pre>&lt;script", "<mark", "<pre>An answer. &lt;"))
    assert prompt < response < answer < page.index("Turn 2") and "<details" not in page
    assert page.count("<svg") == page.count("</svg>") == 2 and "Q after the response" in page
    # a browser need not fetch anything: the pictures refer to parts of themselves only
    assert not re.search(r"""src=|@import|<link|href=(?!"#)|url\((?!#)""", page)
    assert page.count("<section>") == len(turns) and "normalized advantage -1.25" in page
    assert page.count("<mark") == sum(len(turn.logp) for turn in turns)
    assert f"V {turns[0].v:.2f}" in page and f"Q {turns[-1].q:.2f}" in page


def test_best_weights_on_held_out_games_are_kept(tmp_path, monkeypatch, capsys):
    """--eval_every writes an entry into metrics.jsonl, and best/ holds the first of the best: here
    those after iteration 2."""
    success, run = [0.25, 0.5, 0.5, 0.25], tmp_path / "run"
    results, evaluate = iter(success), train.Run.evaluate

    def evaluate_with_these_results(*args):
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "report", lambda records: {"success": next(results)})
            return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "evaluate", evaluate_with_these_results)
        run_main(train, monkeypatch, *SMALL, "--eval_every", 1, "--out", run)
    assert [line["held_out"] for line in read_lines(run / "metrics.jsonl")] == success
    assert capsys.readouterr().out.count("the best so far") == 2
    best, final = (run / part / "model.safetensors" for part in ("best", "final"))
    assert best.read_bytes() != final.read_bytes()
    for part in ("best", "final", "checkpoint-4"):  # each is evaluated as the run was
        args = evaluation.make_parser("").parse_args(["--model", f"{run}/{part}"])
        assert evaluation.complete(args) == run and args.weights == f"{run}/{part}"
        assert (args.env, args.horizon, args.max_new_tokens) == ("house", 4, 16)
        assert args.max_prompt == 8192
    monkeypatch.chdir(run)
    for flags, path, limit in ((["--model", run, "--context", "full"], run, None),
                               (["--model", "tiny"], None, 2048)):  # not the run it stands in
        args = evaluation.make_parser("").parse_args([*map(str, flags)])
        assert (evaluation.complete(args), args.max_prompt) == (path, limit)


def a_run(folder, success, seconds, env="house", curve=None, values=0.1, **config):
    """The files of a finished run as train.py leaves them. curve: its success while learning."""
    folder.mkdir(parents=True)
    base = {"model": "tiny", "env": env, "algo": "sapo", "gamma": 0.95, "seed": 0}
    (folder / "config.json").write_text(json.dumps(base | config))
    line = {"time_total": seconds, "tokens_encoded": 10 ** 6, "tokens_sampled": 0, "episodes": 160}
    line |= dict.fromkeys(evaluation.PANELS, values)
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps(line | {"success": x}) + "\n" for x in curve or [success] * 2))
    result = {"success": success, "success_before": 0.25, "score": success, "score_before": 0.5,
              "success_at_1": success / 2,
              "success_by_category": {"Pick": success},
              "success_before_by_category": {"Pick": 0.2}}
    (folder / "eval.json").write_text(json.dumps(result))
    return str(folder)


def test_table_and_curves_of_runs(tmp_path, capsys, monkeypatch):
    runs = [a_run(tmp_path / "sapo-1", 0.8, 10, seed=1),
            a_run(tmp_path / "sapo-2", 0.9, 20, seed=2),
            a_run(tmp_path / "ppo-0", 0.5, 5, algo="ppo", gamma=1.0)]
    (tmp_path / "torn").mkdir()
    run_main(evaluation, monkeypatch, "--table", *runs, tmp_path / "torn")
    printed = capsys.readouterr()
    rows = [line.strip("| ").split(" | ") for line in printed.out.splitlines()]
    assert rows[0] == ["method", "seeds", "Pick", "Look", "Clean", "Heat", "Cool", "Pick2", "All",
                       "All, T = 1", "seconds", "M tokens"] and printed.err.count("skipping") == 1
    assert rows[2][:4] == ["start", "2", "20.0 ± 0.0", "–"] and "25.0 ± 0.0" in rows[2]
    assert rows[3] == ["sapo", "2", "85.0 ± 5.0", *["–"] * 5, "85.0 ± 5.0", "42.5 ± 2.5",
                       "30 ± 10", "2.00 ± 0.00"]
    assert rows[4][0] == "ppo" and rows[4][2] == "50.0"
    shop = evaluation.paper_table([a_run(tmp_path / "shop", 0.5, 10, env="webshop")]).splitlines()
    both = evaluation.paper_table([*runs, f"{tmp_path}/shop"])
    assert both.count("| start |") == 2 and both.startswith("tiny on house (None places, None obj")
    assert "\n\ntiny on webshop (None turns):\n\n| method | seeds | Score |" in both
    assert "| Score | Success | " in shop[0] and shop[2] == "| start | 1 | 50.0 | 25.0 | – |  |  |"
    drawn, save = {}, Figure.savefig

    def record_lines(figure, *args, **options):
        drawn.update({ax.get_title(): [line.get_label() for line in ax.lines]
                      for ax in figure.axes})
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", record_lines)
    run_main(evaluation, monkeypatch, "--plot", *runs, "--out", tmp_path / "curves.png")
    both, alone = ["sapo, n = 2", "ppo, n = 1"], ["sapo, n = 2"]
    assert [*drawn.values()] == [both, alone, alone, both]  # PPO's V has another target


@pytest.mark.parametrize("success, episodes, averages", [
    ([0.2, 0.4, 0.8], 160, [(320, 0.3), (480, 0.6)]), ([0.2, 0.4], 400, [(400, 0.2), (800, 0.4)]),
    ([0.2, 0.4], 10, [(20, 0.3)])])
def test_success_is_averaged_over_the_last_320_episodes(success, episodes, averages):
    run = types.SimpleNamespace(lines=[{"success": x, "episodes": episodes} for x in success])
    assert evaluation.recent(run, "success") == [(n, pytest.approx(x)) for n, x in averages]


def test_methods_are_compared_by_how_soon_they_reach_a_success_rate(tmp_path, monkeypatch, capsys):
    runs = [a_run(tmp_path / name, end, 1, curve=curve, values=values, seed=int(name[-1]))
            for name, end, values, curve in (("with-0", 0.9, 0.5, [0.1, 0.3, 0.7, 0.9]),
                                             ("with-1", 0.7, 0.3, [0.1, 0.1, 0.3, 0.7]),
                                             ("without-0", 0.4, 0, [0.1, 0.1, 0.2, 0.2]),
                                             ("without-1", 0.6, 0, [0.1, 0.1, 0.9, 0.2]))]
    run_main(evaluation, monkeypatch, "--reach", 0.5, "--table", *runs, tmp_path / "nothing-0")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "skipping" in printed.err and [*lines[2:4], lines[-1]] == [
        "| with | 2 | 80.0 ± 10.0 | 40.0 ± 5.0 | 40.0 ± 10.0 | 560 ± 80 | 40 ± 10 | 40 ± 10 |",
        "| without | 2 | 50.0 ± 10.0 | 25.0 ± 5.0 | 23.8 ± 8.8 | ≥ 560 (1 of 2 reach it) | – | – |",
        "| without | -30.0 ± 14.1 | -15.0 ± 7.1 | -16.2 ± 13.3 | ≥ +0 |"]
    assert evaluation.comparison(runs[2:] + runs[:2], 0.5).endswith("| ≤ +0 |")
    assert evaluation.comparison(runs, 1.0).endswith("| – |")
    picture = tmp_path / "bed.png"
    run_main(evaluation, monkeypatch, "--plot", *runs, "--reach", 0.5, "--out", picture)
    assert picture.stat().st_size > 10000
    capsys.readouterr()
    run_main(evaluation, monkeypatch, "--table", *runs[:2], "--reach", 0.5)  # nothing to subtract
    only_table = capsys.readouterr().out
    assert "| episodes to 50% |" in only_table and len(only_table.splitlines()) == 3


@needs_games
def test_training_on_real_alfworld_games(tmp_path, monkeypatch):
    pytest.importorskip("alfworld")
    run_main(train, monkeypatch, "--env", "alfworld", "--model", "tiny", "--iterations", 2,
             "--batch_size", 1, "--horizon", 3, "--eval_games", 1, "--save_every", 1,
             "--max_new_tokens", 8, "--out", tmp_path)
    lines = check_run(tmp_path)
    assert lines[0]["turns"] == 3 and lines[0]["time_env"] > 0


# ------------------------------------------------------- single promises, one test for each

def test_random_numbers_differ_between_seeds_trajectories_and_turns():
    keys = itertools.product(range(2), repeat=4)
    drawn = {tuple(rollout_module.uniform_numbers((seed, iteration), traj, turn, 3))
             for seed, iteration, traj, turn in keys}
    assert len(drawn) == 16


def test_generate_depends_on_its_seed_alone():
    sampler = Sampler(random_model("qwen2", 1), context="full", max_new_tokens=8)
    sampler.add("left", [5, 6], [0.5] * 8)
    one, other, again = (sampler.generate([[5, 6, 7]], seed) for seed in (0, 1, 0))
    assert one == again and one[0].ids != other[0].ids and not sampler.busy


def test_tag_that_the_template_begins_counts_as_part_of_the_response(monkeypatch):
    lm = random_model("qwen2", 1)
    lm.chat.response_prefix = "<think>\n"
    monkeypatch.setattr(type(lm), "text", lambda lm, ids: "a</think><action>look</action>")
    turn, = play(lm, "kv", "window", 1.0, games=GAMES[:1], horizon=1)[0]
    assert turn.action == "look" and not turn.invalid


def test_generation_settings_of_a_model_do_not_change_the_policy():
    lm = random_model("qwen2", 1)
    lm.model.generation_config.repetition_penalty = 9.0
    hf, kv = (play(lm, engine, "window", 1.0, horizon=2)[0] for engine in ("hf", "kv"))
    assert [t.action_ids for t in hf] == [t.action_ids for t in kv]


def test_value_tokens_have_rows_in_the_head():
    lm = random_tiny()
    tokenizer, size = lm.tokenizer, len(lm.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra_0|>", "<|extra_1|>"]})
    assert max(reserve_value_ids(tokenizer, size + 1, lm.stop_ids)) <= size


def test_response_ends_with_every_token_that_the_model_or_the_template_names():
    lm = random_model("qwen2", 1)
    end = lm.chat.end_of_turn_id()
    lm.model.generation_config.eos_token_id, lm.tokenizer.eos_token = [7, 8], None
    assert model_module.find_stop_ids(lm.model, lm.tokenizer, lm.chat) == (*sorted({7, 8, end}),)


def test_text_cannot_spell_value_tokens():
    lm = random_model("qwen2", 1)
    lm.tokenizer.add_tokens(["<plus>", "<minus>"])  # which are not special
    lm = actor_critic(lm.model, lm.tokenizer, value_tokens=("<plus>", "<minus>"))
    assert not {*lm.value_ids} & {*lm.chat.encode_user_turn("a <plus> and a <minus>")}


def test_bias_of_the_head_counts_in_the_readout_and_starts_at_zero():
    lm, batch = random_model("phi", 1), make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    torch.nn.init.normal_(lm.head.bias)
    scores, logits = lm.score(batch), lm.model(batch.ids).logits[0]
    for p, at in ((scores.p_v, batch.start - 1), (scores.p_q, batch.end - 1)):
        torch.testing.assert_close(p, value_readout(logits[at], lm.value_ids, tau=lm.tau_v))
    assert p.any()
    del lm.model.sapo_value_ids  # so that rows are reserved for the first time
    lm = actor_critic(lm.model, lm.tokenizer)
    assert not torch.cat(lm.score(batch)[2:]).any()


def test_missing_weights_are_an_error(tmp_path):
    from safetensors.torch import load_file, save_file
    load(TINY_HOUSE).save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="lack 1 tensors, such as model.norm.weight"):
        load(str(tmp_path))


@pytest.mark.parametrize("template", [
    "{{ messages[-1]['content'] }}", "{% for m in messages * 2 %}{{ m['content'] }}{% endfor %}"])
def test_templates_that_drop_or_repeat_messages_are_refused(template):
    with pytest.raises(ValueError, match="drops or repeats messages"):
        model_module.Chat(byte_level(template))


def test_saved_config_has_the_rope_names_of_transformers_4(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0}
    lm = random_model("llama", 1, rope_parameters=rope | {"rope_theta": 5000.0})
    lm.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5000.0, rope)


def test_models_are_found_by_bare_names():
    assert model_module.resolve_model("Qwen2.5-1.5B-Instruct") == "Qwen/Qwen2.5-1.5B-Instruct"
    assert model_module.resolve_model("me/Qwen2") == "me/Qwen2"
    for env, folder in (("alfworld", "tiny-alfworld"), ("house", "tiny-house")):
        assert model_module.resolve_model("tiny", env).endswith(folder)


def test_folders_of_models_recommend_settings_and_pass_them_on(tmp_path):
    recommended = model_module.recommended_settings
    assert recommended("tiny", "house") == {**recommended("tiny", "alfworld"), "iterations": 24}
    assert recommended("tiny")["dtype"] == "float32" and recommended(str(tmp_path)) == {}
    lm = load("tiny")
    assert lm.recommended == recommended("tiny")
    dataclasses.replace(lm, tau_v=2.0).save(tmp_path)
    assert recommended(str(tmp_path)) == load(str(tmp_path)).recommended == lm.recommended
    (tmp_path / "sapo.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*sapo.json: Expecting"):
        recommended(str(tmp_path))


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


def test_best_of_a_resumed_run_is_that_of_all_its_iterations(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train.Run, "evaluate",
                        lambda run, iteration: seen.append(len(run.lines)) or {"held_out": 0.5})
    for more in (["--iterations", 1], ["--iterations", 2, "--resume"]):
        run_main(train, monkeypatch, *SMALL, "--eval_every", 1, *more, "--out", tmp_path / "run")
    assert seen == [0, 1]  # lines of metrics.jsonl that the best is compared with


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
        ["--model", run, "--env", "tools.frozen_lake:FrozenLake"])
    evaluation.complete(args)
    assert (args.horizon, args.data, args.max_prompt) == (None, None, 2048)


def test_evaluations_that_differ_have_their_own_files(tmp_path, capsys):
    run = a_run(tmp_path / "run", 0.5, 1)
    os.makedirs(f"{run}/best")
    record = {"task": 0, "category": "Pick", "won": True, "score": 1.0, "context_overflow": False}
    for model, *flags in ((run,), (f"{run}/best",), (run, "--temperature", "1", "--seed", "3")):
        args = evaluation.make_parser("").parse_args(["--model", model, "--limit", "1", *flags])
        evaluation.evaluate(args, lambda args: None, lambda *_, **__: [(0, record)])
    assert {path.name for path in pathlib.Path(run).glob("eval-*.json")} == {
        "eval-test.json", "eval-best-test.json", "eval-test-temperature=1-seed=3.json"}
    assert "will be replaced" not in capsys.readouterr().out
    evaluation.evaluate(args, lambda args: None, lambda *_, **__: [(0, record)])
    assert "eval-test-temperature=1-seed=3.json will be replaced" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    ("--eval_every 1 --eval_games 0", "--eval_every needs --eval_games"),
    ("--batch_size 6 --group_size 4", "--group_size 4 does not divide --batch_size 6"),
    ("--algo empg --old_logprobs rollout", "--algo empg needs entropies"),
    ("--algo grpo --group_size 1", "--group_size must be above 1")])
def test_settings_that_do_not_fit_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        config = train.parse_config(flags.split())
        train.learner_class(config.algo)(random_tiny(), config)


def test_limit_of_a_prompt_depends_on_the_context():
    assert train.parse_config(["--context", "full"]).max_prompt is None
    assert train.parse_config([]).max_prompt == 8192


def test_defaults_are_those_of_the_readme():
    text = pathlib.Path(f"{HERE}/README.md").read_text(encoding="utf-8")
    c = train.Config()
    lm = model_module.ActorCritic
    for default in (f"R_max {lm.r_max:g}", f"γ = λ = {c.gamma:g}", f"τ_v {lm.tau_v:g}",
                    f"c_V {c.c_v:g}", f"c_Q {c.c_q:g}", f"ε = ε_V = ε_Q = {c.clip:g}",
                    f"c_H {c.c_h:g}", f"c_inv {c.c_inv:g}"):
        assert default in " ".join(text.split()), default


def test_task_ids_are_strings_or_integers():
    class Mine(envs.House):
        def tasks(self, split):
            return [1.5]

    with pytest.raises(ValueError, match="a task id is 1.5; it must be str or int"):
        envs.tasks(Mine, "train")


def test_shop_rewards_only_a_score_of_one(shop_data):
    env = make_env("webshop", data=shop_data)
    env.reset(goal_of(env.shop, TASK))
    for command in ("search[summer dresses]", "click[b00dress01]", "click[l]", "click[buy now]"):
        _, reward, terminated, _, info = env.step(command)
    assert 0 < info["score"] < 1 and (reward, terminated, info["won"]) == (0.0, True, False)


def test_webshop_human_has_goals_by_people(shop_data):
    env = make_env("webshop-human", data=shop_data)
    assert env.reset("0000000")[1]["task"].startswith("i want a shirt")


def test_unknown_split_of_alfworld_is_named(tmp_path):
    from simulators.textworld import game_folders
    with pytest.raises(ValueError, match="alfworld has no split 'dev'; known: train"):
        game_folders(str(tmp_path), "dev")
    with pytest.raises(FileNotFoundError, match="no games"):
        game_folders(str(tmp_path), "train")


def test_second_signal_stops_at_once(capfd):
    stop = distributed.Stop()
    stop.note()
    stop.note()  # torchrun repeats the first one
    stop.first_signal -= 2
    with pytest.raises(KeyboardInterrupt):
        stop.note()


def test_abbreviated_flags_are_refused(monkeypatch):
    with pytest.raises(SystemExit, match="unrecognized arguments: --iter 1"):
        run_main(train, monkeypatch, "--iter", 1)


def test_threads_are_chosen_unless_the_user_did(monkeypatch):
    set_threads = mock.Mock()
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    cli.choose_threads(load(TINY_HOUSE).model)
    assert not set_threads.called  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.choose_threads(load(TINY_HOUSE).model)
    set_threads.assert_called_once_with(1)


def test_run_remembers_every_commit_that_took_part(tmp_path, monkeypatch):
    from runtime.test_checkpoint import SETTINGS
    run, names = checkpoint.RunDir(tmp_path / "run"), iter("aba")
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "versions", lambda: {"git": next(names)})
    for newest in (None, run.newest_checkpoint(), run.newest_checkpoint()):
        run.begin(SETTINGS, newest)
    assert run.settings()["git"] == "a, b"


def test_out_cannot_be_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: name a folder"):
        with checkpoint.RunDir(tmp_path / "file").lock(True):
            pass


def test_index_of_a_changed_catalogue_is_made_anew(tmp_path):
    from simulators import webshop
    files = webshop.data_files(write_catalogue(tmp_path / "shop"))
    before = webshop.index_folder(files)
    os.utime(files[0], ns=(1, 1))
    assert webshop.index_folder(files) != before


@CONTEXTS
def test_scores_of_the_sampler_are_those_of_a_forward_pass(tmp_path, context):
    cases = [prepared(tmp_path, "--context", context, "--old_logprobs", which,
                      "--tokens_per_micro_batch", 500) for which in ("recompute", "rollout")]
    for one, other in zip(*(case.old[:1] + case.old[2:4] for case in cases)):
        near(one, other)
    assert cases[0].old.p_v.any()
    for case in cases:
        difference = case.learner.sampler_logprob_diff(case.batch, case.minibatches, case.old)
        assert 0 < difference < 1e-4


def test_back_from_an_item_leads_to_its_page_of_results(shop_data):
    from simulators.webshop import Shop
    shop = Shop(shop_data)
    shop.enter(0)
    for command in ("search[gadget]", "click[next >]", "click[b000000015]", "click[< prev]"):
        shop.act(command)
    assert "Page 2 (" in shop.observation()
    shop.enter(goal_of(shop, TASK))
    for command in ("search[summer dresses]", "click[b00dress01]", "click[buy now]"):
        shop.act(command)
    assert shop.score > 0
    shop.act("search[gadget]")
    assert shop.score == 0


def test_reward_for_the_type_of_a_product():
    from simulators import webshop
    product = {"title": "", "query": "shoes", "nouns": ["shoe"], "product_category": "A \u203a B"}
    goal = product | {"query": "boots", "nouns": ["shoe", *"abcdef"], "product_category": "B"}
    assert webshop.type_reward(product, goal) == 0.5
    assert webshop.type_reward(product, goal | {"product_category": "B \u203a A"}) == 1


# ---- what users bring

def a_case():
    """A model, ids of tasks, and a pool of the house, with settings for an update."""
    config = train.Config(horizon=4, batch_size=4, mini_batch=16, max_new_tokens=8, lr=4e-4,
                          group_size=4)
    return load(TINY_HOUSE), tasks("house", "train"), Pool("house", {"horizon": 4}), config


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
        make_samples([shorter, *turns[1:]], "window")
    with pytest.raises(ValueError, match="turn 0 of trajectory 0 is missing"):
        make_samples([turn for turn in turns if turn.turn], "full")


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


def test_calls_of_the_tokenizer_do_not_change_prompts():
    lm = load(TINY_HOUSE)
    before = lm.chat.encode_user_turn("go to the fridge")
    lm.tokenizer("a b c d e f", truncation=True, max_length=3, padding="max_length")
    assert lm.chat.encode_user_turn("go to the fridge") == before


def test_wrapping_a_model_again_keeps_its_values():
    lm = random_model("qwen2", 1)
    lm.head.weight.data[[*lm.value_ids]] = 0.02
    again = actor_critic(lm.model, lm.tokenizer)
    assert again.value_ids == lm.value_ids and again.head.weight[[*lm.value_ids]].all()


def test_head_with_a_hook_or_an_adapter_is_refused():
    lm = random_model("qwen2", 1)
    torch.nn.init.normal_(lm.head.weight)
    hook = lm.head.register_forward_hook(lambda module, inputs, output: output * 0.1)
    with pytest.raises(ValueError, match="not a plain linear layer"):
        actor_critic(lm.model, lm.tokenizer)
    hook.remove()
    lm.head.lora = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not a plain linear layer"):
        actor_critic(lm.model, lm.tokenizer)


def test_templates_without_a_beginning_of_the_response_are_refused():
    template = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="ignores add_generation_prompt"):
        model_module.Chat(byte_level(template))


@pytest.mark.parametrize("flags, message", [
    ("--lr nan", "--lr must be at least 0 and finite; it is nan"), ("--gamma 2", "at most 1"),
    ("--max_num_seqs -1", "at least 1"), ("--history -1", "at least 0"), ("--r_max inf", "finite")])
def test_settings_out_of_range_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        train.parse_config(flags.split())


def test_settings_without_effect_are_named(capsys):
    train.parse_config("--algo ppo --gamma 0.9".split())
    assert "--gamma has no effect with --algo ppo" in capsys.readouterr().out


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
        train.filled(train.Config(env=Mine, places=3))
    Mine.flags = "places",
    with pytest.raises(ValueError, match=r"must take what its `flags` name \(places\)"):
        make_env(Mine, places=3)
    Mine.flags = "sides",
    with pytest.raises(ValueError, match="name sides, which are no settings of train.py"):
        train.filled(train.Config(env=Mine))
    Mine.recommended = {"max_tokens": 1}
    with pytest.raises(ValueError, match="max_tokens: recommended by .*Mine"):
        train.settings(env=Mine, model="tiny")
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
        evaluation.complete(args)
        found = (args.context, args.places, args.horizon, args.history, args.max_new_tokens)
        assert found == ("full", 6, 4, 1, 16), (place, model)
        assert load(args.weights).run["places"] == 6


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


def test_frozen_head_is_refused_where_values_are_learned():
    lm, _, _, config = a_case()
    lm.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="the head of the model is frozen"):
        train.Learner(lm, config)
    train.Learner(lm, dataclasses.replace(config, c_v=0.0, c_q=0.0))
    train.learner_class("grpo")(lm, config)


def test_adapters_are_refused():
    lm = random_model("qwen2", 1)
    layer = lm.model.model.layers[0].mlp
    layer.up_proj.base_layer = torch.nn.Linear(2, 2)  # as peft wraps a layer
    for use in (lambda: actor_critic(lm.model, lm.tokenizer),
                lambda: train.Learner(lm, train.Config())):
        with pytest.raises(ValueError, match="an adapter, such as LoRA's, that is not merged"):
            use()


def test_tasks_that_are_trained_on_and_held_out_are_refused():
    class Mine(envs.House):
        held_out = "train", 4

    with pytest.raises(ValueError, match="4000 tasks, such as 00001, are both trained on and held"):
        train.train(train.settings(env=Mine))


def test_commands_in_a_set_are_sorted():
    class Mine(envs.House):
        def info(self):
            return super().info() | {"admissible": {*super().info()["admissible"]}}

    answers = []
    for env in (envs.House, Mine):
        pool = Pool(env)
        pool.start(0, GAMES[0])
        answers += pool.gather([0])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_error_of_an_environment_loses_no_finished_iteration(tmp_path, monkeypatch, where):
    class Failing(envs.House):
        def step(self, action):
            lines = tmp_path / "run" / "metrics.jsonl"
            if len(lines.read_text().splitlines() if lines.exists() else ()) == 2:
                if playing == [where]:
                    raise RuntimeError("the game broke")
            return super().step(action)

    playing, evaluate = ["rollout"], train.Run.evaluate

    def watched(run, iteration):
        playing[:] = ["evaluation"]
        result = evaluate(run, iteration)
        playing[:] = ["rollout"]
        return result

    monkeypatch.setattr(train.Run, "evaluate", watched)
    config = train.settings(env=Failing, iterations=5, batch_size=4, horizon=4, eval_games=2,
                            eval_every=1, save_every=99, out=str(tmp_path / "run"))
    with pytest.raises(envs.GameError, match="RuntimeError: the game broke"):
        train.train(config)
    done = {"rollout": 2, "evaluation": 3}[where]  # the third iteration was finished
    assert [*checkpoints(tmp_path / "run")] == [done]
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == done


@pytest.mark.parametrize("name, value", [("lr", "1e-4"), ("batch_size", 2.5), ("seed", "0")])
def test_settings_are_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a"):
        train.Config(**{name: value})


@pytest.mark.parametrize("seed", [-1, 0.5, "x", None, (0, -1)])
def test_a_seed_is_a_number_or_several(seed):
    lm, ids, pool, _ = a_case()
    sampler = Sampler(lm, max_new_tokens=4)
    with pytest.raises(ValueError, match="it must be a whole number from 0 on, or several"):
        rollout(sampler, ids[:1], pool, seed=seed)
    one, other = (rollout(sampler, ids[:1], pool, seed=seed) for seed in (3, (np.int64(3),)))
    assert one == other


@pytest.mark.parametrize("name, value", [
    ("lr", NAN), ("clip", -1.0), ("gamma", 1.5), ("mini_batch", 0), ("beta", INF), ("horizon", 0)])
def test_settings_are_checked_where_they_are_made(name, value):
    with pytest.raises(ValueError, match=f"--{name} must be at least"):
        train.Config(**{name: value})
    with pytest.raises(ValueError, match=f"--{name} must be at least"):
        dataclasses.replace(train.Config(), **{name: value})


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


def test_task_and_category_of_the_first_info_hold_for_the_episode():
    class Dice(envs.Env):
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("6 dice", {"task": "roll", "category": "low"})
        step = lambda self, action: ("a 5", 0.0, False, action == "end", {})

    pool = Pool(Dice)
    pool.start(0, 1)
    (_, first), = pool.gather([0])
    for action in "roll", "end":
        pool.step(0, action)
        *_, info = pool.gather([0])[0]
        assert {**info, "won": False} == first and info["category"] == "low"


@pytest.mark.parametrize("reward", [None, "1", float("nan"), float("inf"), 1e39, [1.0]])
def test_reward_that_is_no_number_is_named(reward):
    class Bad(envs.Env):
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("?", {})
        step = lambda self, action: ("?", reward, False, False, {})

    pool = Pool(Bad)
    pool.start(0, 1)
    pool.gather([0])
    pool.step(0, "x")
    with pytest.raises(envs.GameError, match="reward is .*, not a finite number"):
        pool.gather([0])


# ------------------------------------------------------------------------------------ the files

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


def imports_of(path):
    """The modules a file imports, anywhere but in the `main` that shows its concern."""
    tree, found = ast.parse(path.read_text()), set()
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "main"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.partition(".")[0] for module in found}


BELOW = {"sapo": set(), "runtime": {"runtime"}, "simulators": {"simulators"}, "model": {"runtime"},
         "envs": {"simulators", "runtime"}}
BELOW["rollout"] = {"envs", "runtime", "model"}
BELOW["eval"] = BELOW["rollout"] | {"rollout"}
# train.py imports itself where it runs as a script, and baselines/ when --algo names one of them
BELOW["train"] = BELOW["eval"] | {"eval", "sapo", "train", "baselines"}
BELOW["baselines"] = {"sapo", "model", "train", "runtime", "baselines"}
BELOW["tools"] = BELOW["train"] | {"tools", "simulators"}


def test_imports_point_only_downwards():
    seen = set()
    for path in [*HERE.glob("*.py"), *HERE.glob("*/*.py")]:
        place = path.relative_to(HERE).parts[0].removesuffix(".py")
        if place in BELOW and not path.name.startswith("test_"):
            own = imports_of(path) & BELOW.keys()
            allowed = BELOW[place] | ({"model"} if path.name == "verify.py" else set())
            assert own <= allowed, f"{path} imports {own - allowed}"
            seen.add(place)
    assert seen == BELOW.keys()
    assert not re.search("^(from|import) baselines", (HERE / "train.py").read_text(), re.M)
    assert imports_of(HERE / "sapo.py") - sys.stdlib_module_names == {"torch"}


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


OTHERS = ["sapo", "model", "envs", "rollout", "eval", "train"]


def test_sapo_alone_works_with_torch(tmp_path):
    shutil.copy(HERE / "sapo.py", tmp_path)
    alone(tmp_path, "import sapo\nsapo.main()\n", ["transformers", "numpy", *OTHERS[1:]])


def test_the_readout_section_of_model_works_with_torch(tmp_path):
    text = section((HERE / "model.py").read_text(), "readouts", "batches")
    alone(tmp_path, "import torch\n\n" + text + """
z = torch.zeros(1, 4)
value_readout(z, (3, 0), tau=8.0), entropy(restricted_log_softmax(z, (3, 0)), (3, 0))
""", ["transformers", "tokenizers", *OTHERS])


def copy_runtime_and_model(folder):
    shutil.copytree(f"{HERE}/results/tiny-house", folder / "start")
    shutil.copytree(f"{HERE}/runtime", folder / "runtime", ignore=lambda *_: ["__pycache__"])
    shutil.copy(f"{HERE}/model.py", folder)


def test_model_with_runtime_beside_it_is_a_scorer(tmp_path):
    copy_runtime_and_model(tmp_path)
    printed = alone(tmp_path, """
import model

lm = model.load("start")
prompt = lm.chat.encode_user_turn("look")
print(lm.score(model.make_batch([(prompt + [7, 8], [(len(prompt), len(prompt) + 2)])])))
""", [name for name in OTHERS if name != "model"] + ["simulators", "tools"])
    assert printed.startswith("Scores")


def test_rollout_with_model_and_runtime_beside_it_is_a_sampler(tmp_path):
    copy_runtime_and_model(tmp_path)
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
""", [name for name in OTHERS if name not in ("model", "rollout")] + ["simulators", "tools"])
    assert printed.count("Response") == 2
