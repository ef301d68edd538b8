"""Algorithm 1: one causal language model learns to act, and to value, from one rollout per task.

    python train.py                                                        a tiny model, an embedded house, minutes on a laptop
    python train.py --env alfworld --model Qwen2.5-1.5B-Instruct           the paper's setting, on one GPU
    torchrun --nproc_per_node=2 train.py ...                               tasks are split over the ranks
    python train.py --resume --out RUN                                     goes on after a kill
    python train.py --bench --model Qwen2.5-1.5B                           the time of an iteration, with random weights

`Config` is every setting, with the paper's symbol; every field is a flag. `train` is the loop. What is said over a batch
(advantage statistics, loss denominators, gradients, metrics) is global over the ranks: one or many compute the same.

Departures from the paper: `imitate`, an optional phase before Algorithm 1 for a model that knows no language yet; off for
pretrained models. The paper's framework also clips negative advantages a second time (dual clip); the paper's Eq. 9 does not, nor do we.

Writes to RUN (--out): config.json, metrics.jsonl (a line an iteration), transcripts/, checkpoint/, before.json (the evaluation of
the start), start/ (after an imitation), final/ (a Hugging Face folder), eval.json, eval.jsonl, cost.json, curves.png.
"""
import argparse
import contextlib
import copy
import dataclasses
import gc
import importlib.util
import inspect
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import envs
import eval as evaluation
from model import ActorCritic, Batch, Critic, architecture, load, make_batch, micro_batches, readout_at_start, restricted_log_softmax
from rollout import Sampler, Turn, limits, make_samples, next_prompt, rollout
from sapo import (GROUPED, discounted_returns, empg_advantages, episode_returns, explained_variance, gigpo_advantages, grpo_advantages, normalize_advantages,
                  rloo_advantages, sapo_loss, token_gae, turn_targets, value_loss)


# Streams of random numbers, beside the seed and the iteration. eval.py has 5 and 6.
ROLLOUT, SHUFFLE, TASKS, DEMONSTRATIONS, PROBE = range(5)


@dataclass(frozen=True)
class Config:
    """The paper's setting where it is known, the framework's it builds on (docs of verl-agent) where the paper is silent."""

    env: str = "house"  # house, alfworld or webshop
    model: str = "tiny"  # tiny, a hub id, a bare name such as Qwen2.5-1.5B-Instruct, or a folder
    data: str = None  # alfworld: the folder that holds json_2.1.1; webshop: the folder of its catalogue
    goals: str = "synthetic"  # webshop: synthetic or human
    out: str = None  # the run's folder; default runs/ENV-MODEL-SEED, with ALGO before SEED where it is not sapo
    seed: int = 0  # of everything that is drawn
    iterations: int = 150  # of Algorithm 1
    algo: str = "sapo"  # sapo, or what it is compared with: ppo, grpo, rloo, gigpo, empg
    critic: str = None  # shared (two logits of the policy) or separate (a second model); default shared for sapo, separate for ppo; the others have none
    tasks: int = 128  # |B|: trajectories an iteration, one a task unless --group
    group: int = None  # trajectories of the same task; default 8 for grpo, rloo, gigpo and empg, else 1
    context: str = "window"  # window: each turn its own prompt; full: the conversation grows
    engine: str = "kv"  # kv: our own sampler; hf: generate
    rows: int = None  # games decoded side by side; default all of an iteration's
    compile: bool = False  # torch.compile for kv's decoding step and for scoring
    dtype: str = None  # float32 or bfloat16 (with float32 master weights); default bfloat16 on a GPU, float32 elsewhere
    history: int = 2  # turns shown in a window prompt
    horizon: int = None  # turns an episode may take; default 20 in the house, 50 in alfworld, 15 in webshop
    places: int = 5  # house: its size
    objects: int = 4  # house: things that can be carried
    max_new: int = 512  # tokens a response may take
    max_prompt: int = envs.House.max_prompt  # tokens a window prompt may take
    max_context: int = None  # tokens a conversation may take; default the model's limit
    workers: int = None  # processes that play; default none for house, else one per core (at most 16)

    gamma: float = 0.95  # discount per turn
    lam: float = 0.95  # lambda of GAE over turns, Eq. 5
    r_max: float = 10.0  # R_max, Eq. 2: returns lie in [-R_max, R_max]
    tau_v: float = 1.0  # value temperature, Eq. 1
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two rows no text uses
    c_inv: float = 0.1  # charge on a turn that cannot be parsed, Eq. 7
    eps_adv: float = 1e-8  # Eq. 7
    norm: str = "turn"  # what Eq. 7's mean and deviation count: turn (the paper's) or token, so that long responses weigh more
    clip: float = 0.2  # epsilon, Eq. 9
    clip_v: float = 0.2  # epsilon_V, Eq. 10
    clip_q: float = 0.2  # epsilon_Q
    c_v: float = 0.5  # Eq. 12: the weight of V's loss
    c_q: float = 0.25  # ... of Q's
    beta: float = 0.01  # weight of the KL to the model SAPO started from
    c_h: float = 0.001  # weight of the entropy

    lr: float = 1e-6  # AdamW's learning rate
    lr_rise: int = 0  # optimizer steps over which lr rises from 0
    lr_end: float = 1.0  # share of lr that a straight line reaches when all iterations are done (the paper's is constant)
    weight_decay: float = 0.01  # AdamW's
    grad_clip: float = 1.0  # largest norm of a step's gradient
    critic_lr: float = 1e-5  # of a separate critic
    without_std: bool = False  # gigpo alone: divides by no standard deviation
    mini_batch: int = 256  # turns an optimizer step
    epochs: int = 1  # times an iteration's turns are trained on
    tokens_per_micro_batch: int = 8192  # padded tokens a forward pass
    old: str = "recompute"  # old log-probs, V and Q: recompute (the paper's pass, line 3) or rollout (the sampler's own, which differ by rounding)
    checkpointing: bool = False  # keep no activations of a layer, compute them again in the backward pass: less memory, a third more time
    moments: str = "float32"  # AdamW's: float32 or bfloat16 (rounded at random, so that small changes are not lost)
    shard: bool = False  # several ranks: each keeps a share of the optimizer's state (ZeRO 1)

    warmup: int = None  # imitation: at most so many steps; default: tiny starts from START (house, alfworld), all else without
    warmup_lr: float = 1e-5  # its highest
    warmup_batch: int = 64  # turns a step
    warmup_text: float = 0.0  # weight of predicting what is read, beside what is said
    warmup_until: float = 0.98  # it ends once this share of sampled actions is admissible, looked at every 200 steps
    forget: float = 0.0  # share of demonstrations by the forgetful demonstrator (house, alfworld)
    noise: float = 0.2  # share of demonstrated steps at which a random command is executed (house, alfworld)

    eval_games: int = None  # games played before and after; default 192 (house), 140 (all of valid_seen), 500 (webshop); but for the house, --tasks where that is below 64
    eval_temperature: float = 0.4  # of the games before and after
    save_every: int = 1  # iterations between checkpoints
    resume: bool = False  # go on with the run in --out from its last checkpoint; flags that are not given are the run's
    log: str = None  # tensorboard or wandb


TINY = {"dtype": "float32", "iterations": 40, "tasks": 64, "max_new": 16, "max_prompt": 8192, "lr": 4e-4, "critic_lr": 4e-4, "lr_rise": 20, "lr_end": 0.0, "mini_batch": 128,
        "tokens_per_micro_batch": 4096, "warmup_lr": 4e-3, "warmup_text": 0.1, "forget": 0.8}
WEBSHOP = {"max_prompt": envs.WebShop.max_prompt, "mini_batch": 64}  # its pages are long, its episodes short


# Where the tiny model starts. In the house, made by: python train.py --warmup 5000 --iterations 0
# In ALFWorld, by the same with --out runs/house (a later run of it, whose tokenizer has all of ALFWorld's words), and then by:
# python train.py --env alfworld --model runs/house/final --warmup 800 --iterations 0 --dtype float32 --warmup_lr 4e-3 --warmup_text 0.1 --forget 0.8
#     --max_new 16 --max_prompt 8192 --tokens_per_micro_batch 4096
START = {env: os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", f"tiny-{env}") for env in ("house", "alfworld")}


def parse_config(argv=None):
    """Flags -> Config. What the environment or --model tiny needs differently stands in WEBSHOP and TINY; a flag beats all."""
    parser = argparse.ArgumentParser(description="SAPO, Algorithm 1.", epilog="--bench: measures an iteration instead; --bench --help says how.", allow_abbrev=False)
    told = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Config), re.M))  # the comments are the help
    for f in dataclasses.fields(Config):
        options = {"nargs": 2, "metavar": ("A", "B")} if f.type is tuple else {"action": "store_true"} if f.type is bool else {"type": f.type}
        differs = "".join(f"; {name}: {its[f.name]}" for name, its in (("webshop", WEBSHOP), ("tiny", TINY)) if f.name in its)
        default = "" if f.type is bool or f.default is None else f" [{f.default}{differs}]"
        parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=(told.get(f.name, "") + default).replace("%", "%%"), **options)
    given = vars(parser.parse_args(argv))
    if given.get("resume"):
        given = stored_flags(given) | given
    model, env = given.get("model", Config.model), given.get("env", Config.env)
    config = Config(**(WEBSHOP if env == "webshop" else {}) | (TINY if model == "tiny" else {}) | given)
    defaults = {"out": default_out(given), "horizon": envs.known(env).horizon,
                "workers": envs.default_workers(env, int(os.environ.get("LOCAL_WORLD_SIZE", 1))),
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "eval_games": envs.known(env).held_out[1] if config.tasks >= 64 or env == "house" else config.tasks}
    defaults |= {"group": 8 if config.algo in GROUPED else 1, "critic": {"sapo": "shared", "ppo": "separate"}.get(config.algo, "none")}
    config = dataclasses.replace(config, **{k: v for k, v in defaults.items() if getattr(config, k) is None})
    if config.critic != "shared":  # the policy's own readouts are not trained
        if given.get("c_v") or given.get("c_q"):
            raise ValueError(f"--c_v and --c_q weigh SAPO's own V and Q: with --algo {config.algo} --critic {config.critic} there are none")
        config = dataclasses.replace(config, c_v=0.0, c_q=0.0)
    check(config)
    return config


# What a resumed run may change: its length and surroundings, and what helps where memory ran out (it changes nothing but rounding).
MAY_CHANGE = {"iterations", "save_every", "workers", "data", "log", "out", "resume", "tokens_per_micro_batch", "rows", "checkpointing", "compile"}


def default_out(given):
    env, model, algo, seed = (given.get(name, getattr(Config, name)) for name in ("env", "model", "algo", "seed"))
    return f"runs/{env}-{os.path.basename(model.rstrip('/'))}{'' if algo == 'sapo' else '-' + algo}-{seed}"


def stored_flags(given):
    """The settings of the run that --resume names. ValueError where another value is given for what decides its course."""
    out = given.get("out") or default_out(given)
    try:
        with open(f"{out}/config.json") as file:
            stored = json.load(file)
    except (OSError, json.JSONDecodeError):
        if set(given) <= {"resume", "out"} and not os.path.isdir(out):
            raise ValueError(f"--resume: there is no run in {out}") from None
        return {"out": out}  # killed before it had begun: it begins anew
    stored = {f.name: stored[f.name] for f in dataclasses.fields(Config) if f.name in stored}
    stored["value_tokens"] = stored["value_tokens"] and tuple(stored["value_tokens"])
    other = [f"--{k} is {stored[k]} there" for k, v in given.items() if k not in MAY_CHANGE and k in stored and stored[k] != (tuple(v) if isinstance(v, list) else v)]
    if other:
        raise ValueError(f"--resume: {out} was begun otherwise ({'; '.join(other)})")
    return stored | {"out": out}


def check(config):
    """Refuses impossible settings before anything is loaded."""
    least = dict(iterations=0, tasks=1, group=1, rows=1, history=0, horizon=1, max_new=1, max_prompt=1, max_context=1, workers=0, mini_batch=1, epochs=1,
                 tokens_per_micro_batch=1, warmup=0, warmup_batch=1, lr_rise=0, save_every=1, eval_games=0, seed=0)
    for name, low in least.items():
        if getattr(config, name) is not None and getattr(config, name) < low:
            raise ValueError(f"--{name} must be at least {low}, got {getattr(config, name)}")
    for name in ("r_max", "tau_v", "lr", "clip", "clip_v", "clip_q", "grad_clip", "critic_lr", "warmup_lr"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"--{name} must be a positive number, got {getattr(config, name)}")
    for name in ("eps_adv", "c_inv", "c_v", "c_q", "beta", "c_h", "weight_decay", "warmup_text", "eval_temperature"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"--{name} must not be negative, got {getattr(config, name)}")
    for name in ("gamma", "lam", "forget", "noise", "warmup_until", "lr_end"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"--{name} must lie in [0, 1], got {getattr(config, name)}")
    for name, options in (("context", ("window", "full")), ("engine", ("kv", "hf")), ("log", (None, "tensorboard", "wandb")),
                          ("algo", ("sapo", "ppo", *GROUPED)),
                          ("norm", ("turn", "token")), ("dtype", ("float32", "bfloat16")), ("old", ("recompute", "rollout")), ("moments", ("float32", "bfloat16"))):
        if getattr(config, name) not in options:
            raise ValueError(f"unknown --{name} {getattr(config, name)!r}; known: {', '.join(o for o in options if o)}")
    fitting = {"sapo": ("shared", "separate"), "ppo": ("separate",)}.get(config.algo, ("none",))
    if config.critic not in fitting:
        raise ValueError(f"--algo {config.algo} goes with --critic {' or '.join(fitting)}, not {config.critic}")
    if config.max_context is not None and config.max_context <= config.max_new:
        raise ValueError(f"--max_context {config.max_context} leaves no room for a prompt beside a response of --max_new {config.max_new}")
    if config.tasks % config.group:
        raise ValueError(f"--tasks {config.tasks} is no multiple of --group {config.group}")
    for name, idle in (("without_std", config.without_std and config.algo != "gigpo"), ("norm token", config.norm == "token" and config.algo != "sapo"),
                       ("group 1", config.group == 1 and config.algo in GROUPED), ("lam", config.lam != Config.lam and config.algo != "sapo"),
                       ("gamma", config.gamma != Config.gamma and config.algo not in ("sapo", "gigpo"))):
        if idle:
            raise ValueError(f"--{name} does nothing with --algo {config.algo}")
    if config.algo == "empg" and config.old == "rollout":
        raise ValueError("--algo empg needs the entropies of the pass that --old rollout saves")
    if config.shard and launched() == 1:
        raise ValueError("--shard spreads the optimizer's state over several ranks: torchrun --nproc_per_node=2 train.py ...")
    if config.log and importlib.util.find_spec(config.log) is None:
        raise ValueError(f"--log {config.log}: that package is not installed (pip install {config.log})")
    if config.env == "alfworld" and importlib.util.find_spec("alfworld") is None:
        raise ValueError("--env alfworld needs the alfworld package: pip install alfworld")
    for split in ("train", envs.known(config.env).held_out[0]):
        envs.tasks(config.env, split, **env_options(config))


def env_options(config):
    return envs.options_for(config.env, vars(config))


# ----------------------------------------------------------------------------------------------------- several ranks


def launched():
    """The ranks torchrun starts, known before they have met."""
    return int(os.environ.get("WORLD_SIZE", 1))


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def gather(items):
    """Every rank's list, joined in the order of ranks."""
    if world() == 1:
        return items
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [x for part in lists for x in part]


def sum_gradients(model):
    """Losses are sums over global denominators, so the gradient of the whole mini-batch is the plain sum over ranks."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if world() > 1:
                dist.all_reduce(p.grad)


# ------------------------------------------------------------------------------------------------------- Algorithm 1


@dataclass
class MicroBatch:
    """What one forward pass takes: padded sequences, which turns they are, and what Eq. 12 needs beside the model."""

    batch: Batch
    turns: list
    logp_old: torch.Tensor = None  # (B, T), by the rollout policy
    logp_ref: torch.Tensor = None
    adv: torch.Tensor = None
    p_v_old: torch.Tensor = None  # (N,), the rollout policy's readouts; with a separate critic, that critic's
    p_q_old: torch.Tensor = None
    y_v: torch.Tensor = None  # (N,), over R_max
    y_q: torch.Tensor = None

    value: torch.Tensor = None  # a separate critic's (B, T), over R_max: its old values, their targets, and which of them count
    value_target: torch.Tensor = None
    value_mask: torch.Tensor = None
    entropy: torch.Tensor = None  # (B, T), EMPG's: of the rollout policy


def mini_batches(turns, config, iteration):
    """Shuffles all ranks' samples alike and cuts them into mini-batches of equal size, about config.mini_batch turns or less.
    -> for each, this rank's micro-batches (perhaps none)."""
    samples, mine, n = make_samples(turns, config.context), {}, 0
    for ids, spans in samples:
        mine[turns[n].traj, turns[n].turn] = (ids, spans, turns[n:n + len(spans)])
        n += len(spans)
    sizes = sorted(gather([(key, len(s[1])) for key, s in mine.items()]))
    order = np.random.default_rng([config.seed, iteration, SHUFFLE]).permutation(len(sizes))
    total = sum(n for _, n in sizes)
    parts = max(1, -(-total // config.mini_batch))  # of equal size: a last one of a few turns would be a step of pure noise
    plan, filled = [[] for _ in range(parts)], 0
    for i in order:
        plan[min(parts - 1, filled * parts // max(1, total))].append(sizes[i][0])
        filled += sizes[i][1]
    return [[MicroBatch(make_batch([s[:2] for s in group]), [t for s in group for t in s[2]])
             for group in micro_batches([mine[k] for k in keys if k in mine], config.tokens_per_micro_batch)] for keys in plan if keys]


def column(values, device, dtype=torch.float32):
    return torch.tensor(list(values), dtype=dtype, device=device)


@torch.no_grad()
def score_old(lm, micros, old="recompute"):
    """Algorithm 1, line 3: V_old and Q_old come with the pass that gives the old log-probs; with `old` "rollout" all three are the
    sampler's own, and the pass is made for one micro-batch alone. -> mean distance between the log-probs of the sampler and of the pass."""
    for m in micros:  # all of them first: a copy waits until the GPU has done what it was told before
        m.batch = m.batch.to(lm.device)
        m.logp_old = torch.zeros(m.batch.ids.shape, device=lm.device)
        m.logp_old[m.batch.b, m.batch.t] = column((x for t in m.turns for x in t.logp), lm.device)
        m.p_v_old, m.p_q_old = (column((getattr(t, x) for t in m.turns), lm.device) / lm.r_max for x in "vq")
    off = []
    for n, m in enumerate(micros):
        if old == "recompute" or n == len(micros) // 2:  # in the middle: micro-batches are sorted by length
            logp, m.entropy, p_v, p_q = lm.score(m.batch)  # SAPO: no second model is run
            off.append((logp - m.logp_old)[m.batch.b, m.batch.t].abs())
            if old == "recompute":
                m.logp_old, m.p_v_old, m.p_q_old = logp, p_v, p_q
    sums = gather([(x.sum().item(), len(x)) for x in off])  # not sooner: every look waits for the GPU
    return sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))


@torch.no_grad()
def score_reference(reference, micros):
    for m in micros:
        m.logp_ref = reference.score(m.batch)[0]


def set_targets(micros, config, device):
    """Algorithm 1, lines 4 and 5. Statistics are taken over all turns of the iteration. -> old V, Q and returns (N,), for the log."""
    traj, turn, reward, done, invalid = of_turns(micros, device)
    p_v, p_q = (torch.cat([getattr(m, x) for m in micros]) if micros else column((), device) for x in ("p_v_old", "p_q_old"))
    if not config.c_v and config.critic == "shared":
        p_v = torch.zeros_like(p_v)  # a readout that nobody trains is no value
    adv, y_v, y_q = turn_targets(traj, turn, reward, done, config.r_max * p_v, config.r_max * p_q, gamma=config.gamma, lam=config.lam)
    often = column(lengths(micros), device) if config.norm == "token" else None
    adv = normalize_advantages(adv, invalid=invalid, c_inv=config.c_inv, valid=often, eps=config.eps_adv,
                               group=everyone())  # SAPO: one rollout per task, one mean for all
    sizes = [len(m.turns) for m in micros]
    for m, adv_c, *y in zip(micros, adv.split(sizes), y_v.split(sizes), y_q.split(sizes)):
        m.adv, (m.y_v, m.y_q) = m.batch.spread(adv_c), (x / config.r_max for x in y)
    return config.r_max * p_v, config.r_max * p_q, discounted_returns(traj, turn, reward, gamma=config.gamma)


def of_turns(micros, device):
    """-> traj, turn, reward, done, invalid of all turns, (N,) each."""
    kinds = {"traj": torch.long, "turn": torch.long, "reward": torch.float32, "done": torch.float32, "invalid": torch.float32}
    return [column((getattr(t, name) for m in micros for t in m.turns), device, kind) for name, kind in kinds.items()]


def lengths(micros):
    return [len(t.action_ids) for m in micros for t in m.turns]


def everyone():
    return dist.group.WORLD if world() > 1 else None


def denominators(*counts):
    """Counts on this rank -> on all of them together, at least 1 each."""
    return [max(1, sum(n)) for n in zip(*gather([counts]))]


def update(lm, optimizer, micros, config):
    """Lines 6 and 7: one joint forward and one step on a mini-batch. -> its numbers."""
    tokens, turns = denominators(sum(len(m.batch.b) for m in micros), sum(len(m.turns) for m in micros))

    def joint_loss(m):
        logp, entropy, p_v, p_q = lm.score(m.batch)
        return sapo_loss(
            logp, entropy, p_v, p_q, logp_old=m.logp_old, logp_ref=m.logp_ref, adv=m.adv, mask=m.batch.mask,
            p_v_old=m.p_v_old, p_q_old=m.p_q_old, y_v=m.y_v, y_q=m.y_q, clip=config.clip, clip_v=config.clip_v,
            clip_q=config.clip_q, c_v=config.c_v, c_q=config.c_q, beta=config.beta, c_h=config.c_h, tokens=tokens, turns=turns)

    out = take_step(lm.model, optimizer, micros, joint_loss, config)
    idle = ("v_", "q_", "loss_v", "loss_q") if config.critic != "shared" else ()  # readouts that nobody trains
    return {k: x for k, x in out.items() if not k.startswith(idle)}


def take_step(model, optimizer, micros, loss_of, config):
    """One optimizer step on the sum of loss_of(m) -> (loss, info) over the micro-batches of all ranks. -> the info's numbers, added up. A
    step whose loss or gradient is not finite is not taken."""
    optimizer.zero_grad(set_to_none=True)
    infos = []
    model.train(config.checkpointing)  # transformers checkpoints activations in training mode alone
    for m in micros:
        loss, info = loss_of(m)
        loss.backward()
        infos.append({"loss": loss.detach()} | info)
    infos = [{k: float(x) for k, x in info.items()} for info in infos]  # not sooner: every look waits for the GPU
    model.eval()
    sum_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    infos = gather(infos)
    out = {k: (max if k.endswith("_max") else sum)(i[k] for i in infos) for k in infos[0]} | {"grad_norm": float(norm)}
    finite = np.isfinite(out["loss"]) and np.isfinite(out["grad_norm"])
    if finite:
        optimizer.step()
    return out | {"skipped": int(not finite)}


# ------------------------------------------------------------------------------------------ what SAPO is compared with


def set_targets_by_critic(micros, config, device):
    """SAPO's turn-level targets with V from a separate critic, and no Q: what the shared backbone is compared with."""
    for m in micros:
        m.p_v_old = m.value[m.batch.seq, m.batch.start]  # the critic's value before a turn's first token
        m.p_q_old = torch.zeros_like(m.p_q_old)
    out = set_targets(micros, config, device)
    for m in micros:
        at, zeros = (m.batch.seq, m.batch.start), torch.zeros_like(m.value)
        m.value_target, m.value_mask = zeros.index_put(at, m.y_v), zeros.bool().index_put(at, torch.ones_like(m.y_v, dtype=torch.bool))
    return out


def set_token_targets(micros, config, device):
    """PPO as the framework has it: a turn is paid the episode's return, less its charge, on its last token; GAE over its tokens with gamma =
    lambda = 1, so that a token's advantage is that return less its value; advantages whitened over all tokens."""
    traj, _, reward, _, invalid = of_turns(micros, device)
    returns = episode_returns(traj, reward)
    adv = target = v = torch.zeros(0, device=device)  # of a rank that has no turn
    if micros:
        table = pad_sequence(torch.cat([m.value[m.batch.b, m.batch.t] for m in micros]).split(lengths(micros)), batch_first=True)  # (N, T)
        on = torch.arange(table.shape[1], device=device) < column(lengths(micros), device)[:, None]
        adv, target = (x[on] for x in token_gae(table, on, (returns - config.c_inv * invalid) / config.r_max))
        v = config.r_max * table[:, 0]
    adv = normalize_advantages(adv, eps=config.eps_adv, group=everyone())
    sizes = [len(m.batch.b) for m in micros]
    for m, *parts in zip(micros, adv.split(sizes), target.split(sizes)):
        m.adv, m.value_target = (torch.zeros_like(m.value).masked_scatter(m.batch.mask, x) for x in parts)
        m.value_mask = m.batch.mask
        m.y_v = m.y_q = torch.zeros_like(m.p_v_old)  # idle: c_v = c_q = 0
    return v, torch.zeros_like(v), returns


def set_group_targets(micros, config, device):
    """GRPO, RLOO, GiGPO, EMPG: every trajectory beside the others of its task, whichever rank played them."""
    my_traj, my_turn, my_reward, _, invalid = of_turns(micros, device)
    states, entropies = [], []
    for m in micros:
        states += envs.keys_of([t.seen for t in m.turns]).view(np.int64).tolist()  # the same number for the same observation
        h = torch.zeros_like(m.p_v_old)
        if config.algo == "empg":  # a turn's entropy is the mean over its tokens
            h = h.index_add(0, m.batch.owner[m.batch.b, m.batch.t], m.entropy[m.batch.b, m.batch.t]) / (m.batch.end - m.batch.start)
        entropies += h.tolist()
    mine = list(zip(my_traj.tolist(), my_turn.tolist(), states, my_reward.tolist(), entropies))
    first, columns = sum(gather([len(mine)])[:rank()]), list(zip(*gather(mine)))
    traj, turn, state = (torch.tensor(x) for x in columns[:3])
    reward, entropy = (torch.tensor(x, dtype=torch.float64) for x in columns[3:])
    score, group = episode_returns(traj, reward), traj // config.group  # pick_tasks lays a task's trajectories side by side
    if config.algo == "rloo":
        adv = rloo_advantages(traj, group, score)
    elif config.algo == "gigpo":
        adv = gigpo_advantages(traj, turn, group, state, reward, gamma=config.gamma, std=not config.without_std)
    else:
        adv = grpo_advantages(traj, group, score)
    if config.algo == "empg":
        adv = empg_advantages(adv, traj, turn, entropy)
    adv = adv[first:first + len(mine)].float().to(device) - config.c_inv * invalid
    for m, part in zip(micros, adv.split([len(m.turns) for m in micros])):
        m.adv = m.batch.spread(part)
        m.y_v = m.y_q = torch.zeros_like(part)  # idle: c_v = c_q = 0
    nothing = torch.zeros_like(my_reward)
    return nothing, nothing, discounted_returns(my_traj, my_turn, my_reward, gamma=config.gamma)


def update_critic(critic, optimizer, micros, config):
    """One step of the separate critic on a mini-batch, beside `update`. -> its numbers."""
    count, = denominators(sum(m.value_mask.sum().item() for m in micros))

    def regression(m):
        return value_loss(critic(m.batch), m.value, m.value_target, clip=config.clip_v, valid=m.value_mask, denom=count)

    out = take_step(critic, optimizer, micros, regression, config)
    return {f"{k}_critic": out[k] for k in ("loss", "grad_norm", "skipped")}


# --------------------------------------------------------------------------------------------------------- the learner


def at_random(x, generator):
    """float32 -> bfloat16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for 16-bit models as well: updates go to float32 master weights, of which the model is a rounded copy. At a
    learning rate of 1e-6 they are far below bf16's last digit and would be lost. One parameter at a time, so that no more than
    one float32 gradient exists. `moments`: torch.float32 or torch.bfloat16."""

    def __init__(self, params, lr, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8, moments=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.moments = moments

    def state_of(self, p):
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["m"], state["v"] = torch.zeros_like(p, dtype=self.moments), torch.zeros_like(p, dtype=self.moments)
            if p.dtype != torch.float32:
                state["master"] = p.detach().float()
        return state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for n, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state, g = self.state_of(p), p.grad.float()
                state["step"] += 1
                t, master = state["step"], state.get("master", p)
                m = state["m"].float().lerp_(g, 1 - b1) if self.moments != torch.float32 else state["m"].lerp_(g, 1 - b1)
                v = state["v"].float() if self.moments != torch.float32 else state["v"]
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                master.mul_(1 - lr * group["weight_decay"])
                master.addcdiv_(m, (v / (1 - b2 ** t)).sqrt_().add_(group["eps"]), value=-lr / (1 - b1 ** t))
                if self.moments != torch.float32:
                    dice = torch.Generator(p.device).manual_seed(t * 10 ** 6 + n)  # a run that is resumed throws the same
                    state["m"], state["v"] = at_random(m, dice), at_random(v, dice)
                if master is not p:
                    p.copy_(master)


def optimizer_for(model, config):
    options = dict(lr=config.lr, weight_decay=config.weight_decay, moments=getattr(torch, config.moments))
    if config.shard and world() > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)
    return AdamW(model.parameters(), **options)


def set_lr(optimizer, lr, config, iteration, step):
    rise = min(1.0, (step + 1) / max(1, config.lr_rise))  # or a fresh Adam's first steps would throw the policy far
    fall = 1 - (1 - config.lr_end) * iteration / max(1, config.iterations)
    for group in optimizer.param_groups:
        group["lr"] = lr * rise * fall


def pick_tasks(ids, config, iteration):
    """This iteration's tasks, each --group times: every game once per pass over the games, in an order drawn anew for each pass."""
    count = config.tasks // config.group
    places = [divmod(n, len(ids)) for n in range(iteration * count, (iteration + 1) * count)]
    orders = {epoch: np.random.default_rng([config.seed, epoch, TASKS]).permutation(len(ids)) for epoch, _ in places}
    return [ids[orders[epoch][i]] for epoch, i in places for _ in range(config.group)]


def playing(config):
    return {name: getattr(config, name) for name in ("rows", "history", "max_prompt", "max_context")}


def sampler_for(lm, config, temperature=1.0):
    return Sampler(lm, config.engine, config.context, config.max_new, temperature, config.compile)


@dataclass
class Learner:
    """What is trained, and by what; a separate critic for PPO, and for SAPO with --critic separate."""

    lm: ActorCritic
    optimizer: object
    reference: ActorCritic = None
    critic: Critic = None
    critic_optimizer: object = None
    step: int = 0  # steps so far
    failed: int = 0  # how many of the last ones, in a row, were not finite

    def set_advantages(self, micros, config, clock):
        """Algorithm 1, lines 3 to 5: all that the update needs. -> old V, Q and returns (N,), and how far the sampler's log-probs were from the pass's."""
        sampler_off = score_old(self.lm, micros, config.old)  # line 3
        clock.lap("old")
        if self.reference:
            score_reference(self.reference, micros)
        clock.lap("ref")
        if self.critic:
            with torch.no_grad():
                for m in micros:
                    m.value = self.critic(m.batch)
            clock.lap("values")
        set_them = {"sapo": set_targets_by_critic if self.critic else set_targets, "ppo": set_token_targets}.get(config.algo, set_group_targets)
        return set_them(micros, config, self.lm.device), sampler_off  # lines 4 and 5

    def learn(self, batches, config, clock, iteration=0):
        """Lines 6 and 7: a step on each mini-batch -> the steps' numbers. When five have failed in a row it stops."""
        steps = []
        for micros in batches * config.epochs:
            set_lr(self.optimizer, config.lr, config, iteration, self.step + len(steps))
            steps.append(update(self.lm, self.optimizer, micros, config))
            self.failed = (self.failed + 1) * steps[-1]["skipped"]
            if self.failed == 5:
                break
        self.optimizer.zero_grad(set_to_none=True)  # the rollout can use the memory
        clock.lap("update")
        if self.critic:
            for n, (info, micros) in enumerate(zip(steps, batches * config.epochs)):
                set_lr(self.critic_optimizer, config.critic_lr, config, iteration, self.step + n)
                info |= update_critic(self.critic, self.critic_optimizer, micros, config)
            self.critic_optimizer.zero_grad(set_to_none=True)
            clock.lap("critic")
        self.step += len(steps)
        return steps


def make_learner(lm, config):
    lm.model.zero_grad(set_to_none=True)  # of an imitation: a copy would keep them
    learner = Learner(lm, optimizer_for(lm.model, config), dataclasses.replace(lm, model=copy.deepcopy(lm.model)) if config.beta else None)
    if config.critic == "separate":
        learner.critic = Critic(lm)
        learner.critic_optimizer = optimizer_for(learner.critic, config)
    return learner


def train(lm, pool, config, log):
    """Algorithm 1."""
    sampler, learner = sampler_for(lm, config), make_learner(lm, config)
    ids = envs.tasks(config.env, "train", **env_options(config))
    done = restore(learner, config)  # of a resumed run; else 0
    bar = tqdm(range(done, config.iterations), initial=done, total=config.iterations, desc=evaluation.NAMES[config.algo], disable=rank() > 0)
    for iteration in bar:
        clock = Clock(pool)
        games = pick_tasks(ids, config, iteration)
        mine = range(rank(), len(games), world())
        turns = rollout(sampler, [games[i] for i in mine], pool, seed=(config.seed, iteration, ROLLOUT), trajs=mine,
                        **playing(config))  # line 2  # SAPO: one trajectory per task
        clock.lap("rollout")
        pool.load(pick_tasks(ids, config, iteration + 1)[rank()::world()] if iteration + 1 < config.iterations else [])
        batches = mini_batches(turns, config, iteration)
        micros = [m for mini in batches for m in mini]
        values, sampler_off = learner.set_advantages(micros, config, clock)  # lines 3 to 5
        with uninterrupted() as asked:  # or a checkpoint would be neither of this iteration nor of the next
            steps = learner.learn(batches, config, clock, iteration)  # lines 6 and 7
            metrics = summary(iteration, turns, values, steps, sampler, clock, pool.env.categories) | {"sampler_off": sampler_off}
            log(metrics, turns)
            if learner.failed == 5:
                raise ValueError("five steps in a row were not finite; lower --lr, or look at the losses in metrics.jsonl")
            if (iteration + 1) % config.save_every == 0 or any(gather([bool(asked)])) or iteration + 1 == config.iterations:
                save_checkpoint(learner, config, iteration + 1)
        bar.set_postfix_str(f"success {metrics['success']:.0%}, {metrics['turns'] / config.tasks:.1f} turns a game"
                            + (f", V explains {metrics['v_explained_variance']:.0%}" if config.critic != "none" else "")
                            + (f", {metrics['outgrown']:.0%} outgrown" if metrics["outgrown"] else ""))


# --------------------------------------------------------------------------------------------------------- checkpoints


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C and SIGTERM wait until the block is done; a second one does not. -> a list, empty until one has come."""
    asked = []

    def hear(*_):
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        print("\nleaving after this iteration; a second Ctrl-C leaves at once", file=sys.stderr)

    before = {s: signal.signal(s, hear) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    if asked:
        raise KeyboardInterrupt


def write_beside(path, fill):
    """fill(FOLDER) writes a folder that becomes `path` when it is whole. At any moment `path`, or `path`.new and `path`.old, are whole."""
    shutil.rmtree(f"{path}.new", ignore_errors=True)
    os.makedirs(f"{path}.new")
    fill(f"{path}.new")
    files = {os.path.relpath(os.path.join(at, name), f"{path}.new"): os.path.getsize(os.path.join(at, name))
             for at, _, names in os.walk(f"{path}.new") for name in names}
    with open(f"{path}.new/whole.json", "w") as file:  # the last
        json.dump(files, file)
    shutil.rmtree(f"{path}.old", ignore_errors=True)
    if os.path.isdir(path):
        os.rename(path, f"{path}.old")
    os.rename(f"{path}.new", path)
    shutil.rmtree(f"{path}.old", ignore_errors=True)


def is_whole(path):
    try:
        with open(f"{path}/whole.json") as file:
            return all(os.path.getsize(os.path.join(path, name)) == size for name, size in json.load(file).items())
    except (OSError, json.JSONDecodeError):
        return False


def newest_whole(path, say=print):
    """Sets right what a kill left of `path`, `path`.new and `path`.old. -> whether `path` is whole now; torn ones are named."""
    found = [p for p in (f"{path}.new", path, f"{path}.old") if os.path.isdir(p)]  # the newest first
    whole = next((p for p in found if is_whole(p)), None)
    for p in found:
        if p != whole and not is_whole(p):
            say(f"{p} is torn (a kill while it was written) and is removed")
        if p != whole:
            shutil.rmtree(p)
    if whole and whole != path:
        os.rename(whole, path)
    return whole is not None


def local_state(optimizer):
    """This rank's parameters, and the optimizer's state of them."""
    mine = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer, its share
    return [p for group in mine.param_groups for p in group["params"]], mine.state


def optimizers(learner):
    return [("optimizer", learner.optimizer)] + ([("critic-optimizer", learner.critic_optimizer)] if learner.critic else [])


def save_checkpoint(learner, config, iteration):
    """RUN/checkpoint: the model as a Hugging Face folder, and what else decides what comes next. Random numbers and the order of tasks follow
    from the seed and the iteration. With --shard every rank writes its share."""
    path, sharded = f"{config.out}/checkpoint", config.shard and world() > 1

    def write_state(folder):
        for name, optimizer in optimizers(learner):
            params, state = local_state(optimizer)
            torch.save([state[p] if p in state else {} for p in params], f"{folder}/{name}-{rank()}.pt")

    def fill(folder):
        learner.lm.save(folder)
        if learner.critic:
            torch.save(learner.critic.state_dict(), f"{folder}/critic.pt")
        write_file(f"{folder}/progress.json", json.dumps({"iteration": iteration, "step": learner.step, "failed": learner.failed, "shards": world() if sharded else 1}))
        write_state(folder)
        if sharded:
            dist.barrier()  # the folder is there
            dist.barrier()  # all shares are written

    if rank() == 0:
        write_beside(path, fill)
    elif sharded:
        dist.barrier()
        write_state(f"{path}.new")
        dist.barrier()


def restore(learner, config):
    """-> iterations done; the learner becomes what it was then."""
    path = f"{config.out}/checkpoint"
    if not config.resume or not is_whole(path):
        return 0
    with open(f"{path}/progress.json") as file:
        progress = json.load(file)
    sharded = config.shard and world() > 1
    if progress["shards"] != (world() if sharded else 1):
        raise ValueError(f"--resume: the checkpoint's optimizer was kept by {progress['shards']} rank(s): start as many, with or without --shard as then")
    saved = load(path, dtype=learner.lm.model.dtype, device="cpu").model
    with torch.no_grad():
        for mine, theirs in zip(learner.lm.model.parameters(), saved.parameters()):
            mine.copy_(theirs)
    if learner.critic:
        learner.critic.load_state_dict(torch.load(f"{path}/critic.pt", map_location=learner.lm.device))
    for name, optimizer in optimizers(learner):
        params, state = local_state(optimizer)
        kept = torch.load(f"{path}/{name}-{rank() if sharded else 0}.pt", map_location=learner.lm.device)
        state.update({p: s for p, s in zip(params, kept) if s})
    learner.step, learner.failed = progress["step"], progress["failed"]
    return progress["iteration"]


# ------------------------------------------------------------------------------------------------------------- logging


def peak_memory():
    """The most this process has used so far, in GB: of the GPU where there is one."""
    used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e9


class Clock:
    """Seconds since the last lap, by name; time_env is the part of the rollout spent waiting for games."""

    def __init__(self, pool):
        self.pool, self.env, self.start, self.last, self.laps = pool, pool.seconds, time.time(), time.time(), {}

    def lap(self, name):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        self.laps[f"time_{name}"], self.last = now - self.last, now
        if name == "rollout":
            self.laps["time_env"] = self.pool.seconds - self.env

    def total(self):
        return self.laps | {"time_total": time.time() - self.start}


KEPT = "won category done truncated invalid admissible outgrown score".split()  # of a turn, for the log


def summary(iteration, turns, values, steps, sampler, clock, categories):
    """One line of metrics.jsonl, over all ranks."""
    v, q, returns = (torch.tensor(gather(x.tolist())) for x in values)
    rows = gather([{name: getattr(t, name) for name in KEPT} for t in turns])
    ends = [r for r in rows if r["done"]]
    mean = lambda xs: float(np.mean(xs)) if len(xs) else 0.0
    share = lambda name, some: mean([r[name] for r in some])
    encoded, sampled = (sum(gather([n])) for n in (sampler.tokens_encoded, sampler.tokens_sampled))
    sampler.tokens_encoded = sampler.tokens_sampled = 0
    out = {"iteration": iteration, "episodes": len(ends), "success": share("won", ends), "score": share("score", ends)}
    by_category = {name: [r["won"] for r in ends if r["category"] == c] for c, name in categories.items()}
    out["success_by_category"] = {name: mean(won) if won else None for name, won in by_category.items()}  # None: no such episode
    out |= {"turns": len(rows), "tokens_encoded": encoded, "tokens_sampled": sampled,
            "truncated": share("truncated", ends), "outgrown": share("outgrown", ends),
            "valid_actions": mean([not r["invalid"] for r in rows]), "admissible_actions": share("admissible", rows)}
    for k in steps[0]:
        numbers = [s[k] for s in steps]
        out[k] = max(numbers) if k.endswith("_max") else sum(numbers) if k.startswith("skipped") else float(np.mean(numbers))
    out |= {"v_mean": v.mean().item(), "q_mean": q.mean().item(), "return_mean": returns.mean().item(),
            "v_explained_variance": explained_variance(v, returns), "q_explained_variance": explained_variance(q, returns)}
    return out | clock.total()


def transcript(turns, names):
    """A trajectory as text; what the policy sampled stands between >>> and <<<."""
    out = [f"task {turns[0].task} ({names.get(turns[0].category, turns[0].category)}): {'won' if turns[-1].won else 'not won'}, score {turns[-1].score:.3g}"]
    for t in turns:
        notes = {"no valid tags": t.invalid, "inadmissible": not t.admissible, "truncated": t.truncated}
        note = "".join(f", {word}" for word, so in notes.items() if so)
        out.append(f"\n--- turn {t.turn + 1}: V {t.v:.2f}, Q {t.q:.2f}, reward {t.reward:g}{note}\n{t.prompt}\n>>> {t.text} <<<")
    return "\n".join(out) + "\n"


class Log:
    """metrics.jsonl, transcripts/, and one optional dashboard."""

    def __init__(self, config):
        self.config, self.writer = config, None
        if rank() > 0:
            return
        os.makedirs(f"{config.out}/transcripts", exist_ok=True)
        if config.log == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(config.out, flush_secs=5).add_scalar  # nobody closes it
        elif config.log == "wandb":
            import wandb
            run = wandb.init(project="sapo", name=os.path.basename(config.out), config=dataclasses.asdict(config))
            self.writer = lambda key, value, step: run.log({key: value}, step=step)

    def __call__(self, metrics, turns):
        if rank() > 0:
            return
        n, config = metrics["iteration"], self.config
        with open(f"{config.out}/metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.writer:
            for key, value in (metrics | {f"success/{c}": x for c, x in metrics["success_by_category"].items()}).items():
                if isinstance(value, (int, float)):
                    self.writer(key, value, n)
        if n % 10 == 0 or n == config.iterations - 1:
            first = [t for t in turns if t.traj == turns[0].traj]
            with open(f"{config.out}/transcripts/{n:04d}.txt", "w") as file:
                file.write(transcript(first, envs.known(config.env).categories))


# ----------------------------------------------------------------------------------------------------------- imitation


def demonstrations(lm, pool, tasks, seed, context, config):
    """The demonstrator's episodes as training samples [(ids, spans)]. Steps at which the demonstrator's hand slipped are shown with what
    should have been done (window) or not trained on (full: the slip is part of the conversation)."""
    names = [("demonstration", i) for i in range(len(tasks))]
    for name, task in zip(names, tasks):
        pool.demo(name, task, seed, config.forget, config.noise)
    samples = []
    for turns in filter(None, pool.gather(names)):
        episode, ids, spans = pool.env.episode(*turns[0][:2]), [], []
        for n, (obs, info, thought, label, executed) in enumerate(turns):
            if n:
                episode.took(turns[n - 1][4], obs, info)
            text = envs.RESPONSE.format(thought=thought, action=label if context == "window" else executed)
            response = lm.tokenizer(text, add_special_tokens=False).input_ids + [lm.chat.later("-")[0]]
            ids, spans = next_prompt(lm, episode, context, config.history, ids, float("inf"))[2], [] if context == "window" else spans
            if context == "window" or executed == label:
                spans.append((len(ids), len(ids) + len(response)))
            ids = ids + response
            if spans and (context == "window" or n == len(turns) - 1):
                samples.append((ids, spans))
    return samples


def imitation_loss(lm, batch, text_weight):
    """Summed cross-entropy of the responses, and text_weight times that of all other text: a model that has no language
    learns its commands sooner when it learns to predict what it reads."""
    hidden = lm.body(batch.ids)
    text = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.length[:, None]
    weight = torch.where(batch.mask, 1.0, text_weight * text)[:, 1:]
    b, t = weight.nonzero(as_tuple=True)
    logp = restricted_log_softmax(lm.logits(hidden[b, t]), lm.value_index).gather(1, batch.ids[b, t + 1][:, None])[:, 0]
    return -(weight[b, t] * logp).sum()


def imitate(lm, pool, config):
    """Before Algorithm 1, for a model that cannot speak yet: steps on demonstrations until nearly all actions it samples in games
    it has not seen are admissible, or --warmup steps are done. A wrong decision is repaired quickly by sparse reward, a
    wrong word slowly. The tiny model learns both contexts, so that one start serves either."""
    optimizer = optimizer_for(lm.model, config)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.warmup_lr, total_steps=max(100, config.warmup), pct_start=0.05,
                                                   cycle_momentum=False)
    ids = envs.tasks(config.env, "train", **env_options(config))
    probe = evaluation.spaced(ids, 64)  # of every kind of task: they are sorted
    practice = sorted({*ids} - {*probe}) or ids
    contexts = ("window", "full") if config.model == "tiny" else (config.context,)
    bar = tqdm(range(config.warmup), desc="imitation", disable=rank() > 0)
    stock = {context: [] for context in contexts}
    for step in bar:
        context = contexts[step % len(contexts)]
        while sum(len(spans) for _, spans in stock[context]) < 4 * config.warmup_batch:
            rng = np.random.default_rng([config.seed, step, len(stock[context]), DEMONSTRATIONS])
            stock[context] += demonstrations(lm, pool, [practice[i] for i in rng.choice(len(practice), 32)], (config.seed, step), context, config)
            rng.shuffle(stock[context])
        batch = []
        while sum(len(spans) for _, spans in batch) < config.warmup_batch:
            batch.append(stock[context].pop())
        said = sum(end - start for _, spans in batch for start, end in spans)
        micros = [make_batch(group).to(lm.device) for group in micro_batches(batch, config.tokens_per_micro_batch)[rank()::world()]]
        take_step(lm.model, optimizer, micros, lambda m: (imitation_loss(lm, m, config.warmup_text) / said, {}), config)
        schedule.step()
        if (step + 1) % 200 == 0:
            shares = [probe_admissible(lm, pool, probe, context, step, config) for context in contexts]
            bar.set_postfix_str("admissible " + ", ".join(f"{share:.1%}" for share in shares))
            if min(shares) >= config.warmup_until:
                return


def probe_admissible(lm, pool, games, context, step, config):
    """The share of admissible actions among those sampled in `games`, which are split over the ranks."""
    sampler, mine = sampler_for(lm, dataclasses.replace(config, context=context)), range(rank(), len(games), world())
    turns = rollout(sampler, [games[i] for i in mine], pool, seed=(config.seed, step, PROBE), trajs=mine, **playing(config))
    return float(np.mean(gather([t.admissible for t in turns])))


# ----------------------------------------------------------------------------------------------------------------- run


def versions():
    """What a run was made with: git commit, packages, hardware."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        git = None  # no git on this machine
    return {"git": git, "versions": {
        "python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__, "ranks": world(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"}}


def evaluate(lm, pool, config):
    """Held-out games at the evaluation's temperature, in the house at 1 as well -> {temperature: records}."""
    ids = envs.tasks(config.env, envs.known(config.env).held_out[0], **env_options(config))
    ids = evaluation.spaced(ids, config.eval_games) if config.eval_games else []
    out = {}
    for temperature in sorted({config.eval_temperature, 1.0 if config.env == "house" else config.eval_temperature}):
        sampler = sampler_for(lm, config, temperature)
        per_rank = -(-len(ids) // world())
        first = rank() * per_rank
        out[temperature] = gather(evaluation.play(sampler, ids[first:first + per_rank], pool, seed=config.seed, first=first, quiet=rank() > 0,
                                                  **playing(config)))
        del sampler
        gc.collect()  # its keys and values, and its graphs: the next sampler has its own
    return out


def write_evaluation(before, after, config):
    """eval.json: success and success_before (the same games) with n, interval and categories; eval.jsonl: every episode."""
    played = {"before": before, "after": after}
    reports = {when: {t: evaluation.report(records) for t, records in sorted(some.items())} for when, some in played.items()}
    first, last = (reports[when][config.eval_temperature] for when in played)
    out = {"env": config.env, "temperature": config.eval_temperature, "n": last["n"]} | {k: last[k] for k in ("success", "interval", "score", "success_by_category")}
    out |= {"success_before": first["success"], "interval_before": first["interval"], "score_before": first["score"],
            "success_before_by_category": first["success_by_category"]}
    if 1.0 in after:
        out |= {"success_at_1": reports["after"][1.0]["success"], "success_before_at_1": reports["before"][1.0]["success"]}
    with open(f"{config.out}/eval.json", "w") as file:
        json.dump(out, file, indent=1)
    with open(f"{config.out}/eval.jsonl", "w") as file:
        for when, some in played.items():
            for temperature, records in some.items():
                file.writelines(json.dumps({"when": when, "temperature": temperature} | r) + "\n" for r in records)
    return evaluation.table({f"{when} {evaluation.NAMES[config.algo]}, T = {temperature:g}": report for when, some in reports.items()
                             for temperature, report in some.items()}, envs.known(config.env))


def set_aside(folder):
    """A folder that holds a run already is renamed, never mixed with or overwritten. -> its new name, or None."""
    if not os.path.exists(f"{folder}/metrics.jsonl"):
        return None
    aside = next(name for n in range(1, 10 ** 6) if not os.path.exists(name := f"{folder}.{n}"))
    os.rename(folder, aside)
    return aside


def first_prompts(lm, pool, games):
    """What the model would be asked first in some games."""
    names = [("look", game) for game in games]
    for name, game in zip(names, games):
        pool.start(name, game)
    prompts = [lm.chat.first(pool.env.episode(*answer).window_prompt()) for answer in pool.gather(names)]
    for name in names:
        pool.drop(name)
    return prompts


def fitted(lm, config):
    """-> lm as --compile and --checkpointing want it."""
    if config.checkpointing:
        if any(m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout)) or getattr(lm.model.config, "attention_dropout", 0):
            raise ValueError("--checkpointing: this model has dropout, which would act in training mode")
        lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    return dataclasses.replace(lm, compile=config.compile)


def prepare(config, pool, say):
    """Loads the model, reads it once, makes the run's folder."""
    ready_made = START.get(config.env) if config.model == "tiny" and config.warmup is None else None
    if ready_made and not os.path.isdir(ready_made):
        raise ValueError(f"{ready_made} is missing; --warmup makes such a start anew (the comment at START in train.py has the command)")
    if config.resume and rank() == 0:
        for folder in ("start", "checkpoint"):
            newest_whole(f"{config.out}/{folder}", say)
    barrier()
    if os.path.isdir(config.model) and os.path.realpath(config.model).startswith(os.path.realpath(config.out) + os.sep):
        raise ValueError(f"--model {config.model} lies in the run's own folder {config.out}; give another --out")
    check_memory(config, say)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    imitated = f"{config.out}/start"
    name = imitated if config.resume and is_whole(imitated) else ready_made or config.model
    lm = load(name, dtype=getattr(torch, config.dtype), value_tokens=config.value_tokens, tau_v=config.tau_v, r_max=config.r_max,
              device=device, seed=config.seed, words=envs.words())
    games = envs.tasks(config.env, "train", **env_options(config))
    size, words = sum(p.numel() for p in lm.model.parameters()), lm.tokenizer.convert_ids_to_tokens(list(lm.value_ids))
    say(f"{config.model}: {size / 1e6:.1f} M parameters on {device}, {world()} rank(s); {config.env}: {len(games)} training games")
    mean, spread, saturated = readout_at_start(lm, first_prompts(lm, pool, games[:4]))
    say(f"w+, w- = {lm.value_ids} {words if words[0] else '(rows past the tokenizer)'}: logit difference {mean:.3f} +- {spread:.3f}, "
        f"{saturated:.0%} saturated")
    lm = fitted(lm, config)
    if rank() == 0:
        begin_folder(config, say)
    if config.iterations and not config.resume:
        pool.load(pick_tasks(games, config, 0)[rank()::world()])
    return lm


def begin_folder(config, say):
    """Makes the run's folder; of one that is resumed, keeps what the checkpoint knows of."""
    os.makedirs(config.out, exist_ok=True)
    lines, before = [], None
    if config.resume:
        done = 0
        with contextlib.suppress(OSError, json.JSONDecodeError), open(f"{config.out}/config.json") as file:
            before = json.load(file).get("git")
        if is_whole(f"{config.out}/checkpoint"):
            with open(f"{config.out}/checkpoint/progress.json") as file:
                done = json.load(file)["iteration"]
        say(f"{config.out}: goes on after {done} iterations" if done else f"{config.out}: no checkpoint yet, begins anew")
        lines = read_lines(f"{config.out}/metrics.jsonl")[:done]
    else:
        aside = set_aside(config.out)
        if aside:
            say(f"the run that was in {config.out} is in {aside} now")
        os.makedirs(config.out, exist_ok=True)
    made_with = versions()
    made_with["git"] = ", ".join(dict.fromkeys([*filter(None, [before]), made_with["git"] or "unknown"]))  # every commit that had a part in it
    write_file(f"{config.out}/config.json", json.dumps(dataclasses.asdict(config) | made_with, indent=1))
    write_file(f"{config.out}/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def write_file(path, text):
    """Beside and renamed, so that a kill leaves the old or the new."""
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def read_lines(path):
    """The lines of a .jsonl up to the first that is not whole; none where there is no file."""
    lines = []
    if os.path.isfile(path):
        with open(path) as file:
            for line in file:
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    break
    return lines


def evaluate_before(lm, pool, config):
    """The evaluation of the start, kept in before.json: a resumed run does not play it again."""
    path = f"{config.out}/before.json"
    if config.resume and os.path.isfile(path):
        with open(path) as file:
            return {float(t): records for t, records in json.load(file).items()}
    before = evaluate(lm, pool, config)
    if rank() == 0:
        write_file(path, json.dumps(before))
    return before


def run(config):
    say = (lambda *words: None) if rank() else (lambda *words: print(*words, flush=True))
    pool = envs.Pool(config.env, env_options(config), config.workers)
    try:
        lm = prepare(config, pool, say)
        barrier()
        try:
            if config.warmup and not (config.resume and is_whole(f"{config.out}/start")):
                imitate(lm, pool, config)
                if rank() == 0:
                    write_beside(f"{config.out}/start", lm.save)  # the reference of a resumed run
            before = evaluate_before(lm, pool, config)
            say(f"before {evaluation.NAMES[config.algo]}: success on {len(before[config.eval_temperature])} held-out games "
                + ", ".join(f"{evaluation.report(records)['success']:.1%} at T = {t:g}" for t, records in sorted(before.items())))
            train(lm, pool, config, Log(config))
            after = evaluate(lm, pool, config) if config.iterations else before
        except KeyboardInterrupt:  # Ctrl-C, or SIGTERM
            raise SystemExit(f"\ninterrupted; --resume --out {config.out} goes on from the last checkpoint") from None
        peak = max(gather([peak_memory()]))
        if rank() == 0:
            write_file(f"{config.out}/cost.json", json.dumps({"peak_memory": peak}))
            write_beside(f"{config.out}/final", lm.save)
            say(write_evaluation(before, after, config))
            if config.iterations:
                evaluation.plot([config.out], f"{config.out}/curves.png")
            say(f"wrote {config.out}: final/ eval.json metrics.jsonl transcripts/" + (" curves.png" if config.iterations else ""))
    finally:
        pool.close()


def barrier():
    if world() > 1:
        dist.barrier()


# ------------------------------------------------------------------------------------------------------ memory and speed


def memory_needed(config, arch):
    """{what: bytes on one rank} of the largest things a run holds, from the architecture alone."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(arch).parameters())
    size, share = 2 if config.dtype == "bfloat16" else 4, launched() if config.shard else 1
    heads = getattr(arch, "num_key_value_heads", None) or arch.num_attention_heads
    kv_token = 2 * arch.num_hidden_layers * heads * (getattr(arch, "head_dim", None) or arch.hidden_size // arch.num_attention_heads) * size
    longest = min(config.max_context or arch.max_position_embeddings, arch.max_position_embeddings)
    longest = min(longest, config.max_prompt + config.max_new) if config.context == "window" else longest
    layer = size * (8 * arch.hidden_size + 4 * arch.intermediate_size) + 16 * arch.hidden_size  # kept for the backward pass, a token
    kept = layer + arch.num_hidden_layers * arch.hidden_size * size if config.checkpointing else layer * arch.num_hidden_layers
    masters, moments = weights * 4 // share * (size == 2), weights * 2 * (2 if config.moments == "bfloat16" else 4) // share
    return {"weights": weights * size, "gradients": weights * size, "master weights": masters, "moments": moments, "reference": weights * size * bool(config.beta),
            "critic": (2 * weights * size + masters + moments) * (config.critic == "separate"),
            "activations of a micro-batch": kept * config.tokens_per_micro_batch, "logits of a chunk": 6 << 28,
            "a longer sequence, at most": kept * max(0, longest - config.tokens_per_micro_batch),
            "keys and values, about": kv_token * longest * (config.rows or -(-config.tasks // launched()))}


AT_MOST = {"a longer sequence, at most", "keys and values, about"}  # what may turn out to be less
LASTING = {"weights", "gradients", "master weights", "moments", "reference", "critic"}  # what stays from step to step


def check_memory(config, say):
    """Prints what a run needs before anything is loaded; ValueError where the GPU cannot hold what it needs in any case."""
    if config.model == "tiny":
        return
    needed = memory_needed(config, architecture(config.model))
    surely = sum(n for what, n in needed.items() if what not in AT_MOST)
    say(f"memory, computed: {surely / 1e9:.1f} GB (" + ", ".join(f"{what} {n / 1e9:.1f}" for what, n in needed.items() if n) + ")")
    if torch.cuda.is_available() and surely > torch.cuda.get_device_properties(0).total_memory:
        raise ValueError(f"this run needs {surely / 1e9:.0f} GB and the GPU has {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f}: lower "
                         "--tokens_per_micro_batch, add --checkpointing or --moments bfloat16, or --shard over several ranks")


# What an iteration consists of, and how many forward passes it is worth to the policy
PHASES = {"rollout": 0, "old": 1, "ref": 1, "values": 1, "update": 3, "critic": 3}


def invented(sampler, config, turns, prompt, response):
    """A rollout without games: every trajectory asks `turns` times, with random prompts of about `prompt` tokens (in `full`, a fifth of
    that after the first)."""
    rng, lm, window = np.random.default_rng(config.seed), sampler.lm, config.context == "window"
    usable, read, asked, said = min(lm.model.config.vocab_size, *lm.value_ids), {traj: [] for traj in range(config.tasks)}, {}, []

    def ask(traj):
        n = rng.integers(prompt // 2, prompt * 3 // 2 + 1) if window or not read[traj] else max(1, prompt // 5)
        asked[traj] = rng.integers(5, usable, n).tolist()
        sampler.add(traj, asked[traj] if window else read[traj] + asked[traj], rng.random(config.max_new, dtype=np.float32))

    for traj in read:
        ask(traj)
    count = dict.fromkeys(read, 0)
    while sampler.busy:
        for traj, r in sampler.run():
            count[traj] += 1
            done = count[traj] == turns
            said.append(Turn(traj=traj, turn=count[traj] - 1, prompt_ids=asked[traj], action_ids=r.ids, logp=r.logp, v=r.v, q=r.q, done=done,
                             reward=10.0 * (done and traj % 2), truncated=False, invalid=False, admissible=True, won=False, score=0.0, task="",
                             category="", prompt="", text="", action=""))
            read[traj] = read[traj] + asked[traj] + r.ids
            if not done:
                ask(traj)
    sampler.forget()
    return sorted(said, key=lambda t: (t.traj, t.turn))


def bench(argv):
    """The paper's runtime table on trajectories of given sizes, with random weights; and two comparisons of the update."""
    parser = argparse.ArgumentParser(description="--bench: the runtime of an iteration. Further flags are train.py's: --model, --tasks, --dtype ...",
                                     allow_abbrev=False)
    for name, default, text in (("turns", 50, "turns of a trajectory"), ("prompt", 500, "mean length of a prompt in tokens"),
                                ("response", 100, "mean length of a response in tokens"), ("repeats", 3, "iterations; medians are printed")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} [{default}]")
    parser.add_argument("--ppo", action="store_true", help="PPO with its critic beside it, on the same trajectories")
    size, rest = parser.parse_known_args(argv)
    config = parse_config([*rest, "--max_new", str(4 * size.response)])
    rival = dataclasses.replace(config, algo="ppo", critic="separate", c_v=0.0, c_q=0.0)
    check_memory(rival if size.ppo else config, print)
    lm = load(config.model, dtype=getattr(torch, config.dtype), seed=config.seed, words=envs.words(), random_weights=config.model != "tiny")
    lm = fitted(lm, config)
    vocabulary = np.random.default_rng(0).permutation(min(lm.model.config.vocab_size, *lm.value_ids) - 5) + 5
    talker = dataclasses.replace(lm, stop_ids=tuple(int(i) for i in vocabulary[:len(vocabulary) // size.response]))  # one word in so many ends it
    sampler, learner, cuda = sampler_for(talker, config), make_learner(lm, config), torch.cuda.is_available()
    algos = {config.algo: (learner, config)}
    if size.ppo and config.algo != "ppo":  # the same policy, optimizer and reference: what PPO does beside them is what it costs
        critic = Critic(lm)
        algos["ppo"] = dataclasses.replace(learner, critic=critic, critic_optimizer=optimizer_for(critic, rival)), rival
    laps, sampler_off, pool = {algo: [] for algo in algos}, [], envs.Pool("house")
    for n in range(size.repeats + 1):
        began = Clock(pool)
        turns = invented(sampler, config, size.turns, size.prompt, size.response)
        began.lap("rollout")
        for algo in sorted(algos, reverse=n % 2 == 1):  # now one first, now the other
            micros, off, lap = one_iteration(*algos[algo], turns, n, Clock(pool))
            laps[algo].append(began.laps | lap)
            sampler_off.append(off)
    count = lambda f: sum(int(f(m.batch)) for m in micros)
    real, scored, processed = count(lambda b: b.length.sum()), count(lambda b: b.mask.sum()), count(lambda b: b.ids.numel())
    squares = count(lambda b: (b.length ** 2).sum())
    print(f"{config.model}, {config.dtype}, {config.context}: {config.tasks} trajectories of {size.turns} turns, {real} tokens of which {scored} sampled; "
          f"real / processed tokens {real / processed:.3f}; medians of {size.repeats}")
    peak = limits(lm.device)[1] if cuda else None
    phases = {algo: {name: float(np.median([lap.get(f"time_{name}", 0.0) for lap in some[1:]])) for name in PHASES} for algo, some in laps.items()}
    print(" " * 15 + "".join(f"{algo:>11}" for algo in phases) + f"   tokens/s of {config.algo}")
    for name, passes in PHASES.items():
        seconds = phases[config.algo][name]
        mfu = f", MFU {passes * lm.operations(real, scored, squares) / seconds / peak:.1%}" if cuda and passes and seconds else ""
        if any(times[name] for times in phases.values()):
            print(f"{name:15}" + "".join(f"{times[name]:9.2f} s" for times in phases.values()) + (f"{real / seconds:14.0f}{mfu}" if seconds else ""))
    after = {algo: sum(times.values()) - times["rollout"] for algo, times in phases.items()}
    print(f"{'after rollout':15}" + "".join(f"{seconds:9.2f} s" for seconds in after.values())
          + (f"   {config.algo} / ppo {after[config.algo] / after['ppo']:.3f}" if len(after) > 1 else ""))
    state = {algo: sum(n for what, n in memory_needed(its, lm.model.config).items() if what in LASTING) for algo, (_, its) in algos.items()}
    print("what training keeps, computed: " + ", ".join(f"{algo} {n / 1e9:.3f} GB" for algo, n in state.items())
          + (f", ratio {state[config.algo] / state['ppo']:.3f}" if len(state) > 1 else "") + f"; peak memory {peak_memory():.2f} GB")
    print(f"log-probs of sampler and trainer differ by {np.median(sampler_off[::len(algos)]):.2g} on average")  # the second's policy has moved since
    if any(flag.split("=")[0] == "--out" for flag in rest):
        os.makedirs(config.out, exist_ok=True)
        write_file(f"{config.out}/bench.json", json.dumps({"model": config.model, "context": config.context, "old": config.old, "seconds": phases} | versions(), indent=1))
    compare_updates(lm, turns, config)


def one_iteration(learner, config, turns, n, clock):
    """Lines 3 to 7 on given turns. -> (their micro-batches, how far the sampler's log-probs were from the pass's, seconds by phase)."""
    batches = mini_batches(turns, config, n)
    micros = [m for b in batches for m in b]
    _, sampler_off = learner.set_advantages(micros, config, clock)
    learner.learn(batches, config, clock)
    return micros, sampler_off, clock.laps


def compare_updates(lm, turns, config):
    """Forward and backward: response positions in chunks beside all logits; sorted, budgeted micro-batches beside batches padded alike."""
    samples = make_samples(turns, config.context)[:256]
    longest = max(len(s[0]) for s in samples)
    some = make_batch(samples[:max(1, min(8192, config.tokens_per_micro_batch) // longest)]).to(lm.device)  # all logits of more would not fit

    def chunked(batch):
        return lm.score(batch)[0].sum()

    def all_logits(batch):
        b, t = batch.b, batch.t
        logp = restricted_log_softmax(lm.model(input_ids=batch.ids, use_cache=False).logits.float(), lm.value_index)
        return logp[b, t - 1].gather(1, batch.ids[b, t][:, None]).sum()

    def body_alone(batch):
        return lm.body(batch.ids).sum()

    def seconds(batches, score):
        lm.model.zero_grad(set_to_none=False)
        began = time.perf_counter()
        total = 0.0
        for batch in batches:
            loss = score(batch)
            loss.backward()
            total += loss.item()
        return time.perf_counter() - began, total

    if torch.cuda.is_available():
        peaks = []
        for score in (body_alone, body_alone, chunked):  # the first makes the gradients
            torch.cuda.reset_peak_memory_stats()
            seconds([some], score)
            peaks.append(peak_memory())
        print(f"the loss of a micro-batch of {some.ids.numel()} tokens takes {peaks[2] - peaks[1]:.2f} GB beside its body's {peaks[1]:.2f}")
    tidy = [make_batch(group).to(lm.device) for group in micro_batches(samples, config.tokens_per_micro_batch)]
    alike, each = [], max(1, config.tokens_per_micro_batch // longest)
    for i in range(0, len(samples), each):
        batch = make_batch(samples[i:i + each]).to(lm.device)
        wide = longest - batch.ids.shape[1]
        alike.append(dataclasses.replace(batch, ids=F.pad(batch.ids, (0, wide)), owner=F.pad(batch.owner, (0, wide), value=-1)))
    for what, ways in (("response positions in chunks, against all logits", ([some], all_logits, [some], chunked)),
                       ("sorted micro-batches by tokens, against padding alike", (alike, chunked, tidy, chunked))):
        times = [(seconds(*ways[:2]), seconds(*ways[2:])) for _ in range(4)][1:]
        ratio = np.median([a[0] / b[0] for a, b in times])
        print(f"{what}: {ratio:.2f} times as fast; summed log-prob {times[0][0][1]:.4f} and {times[0][1][1]:.4f}")


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if "--bench" in sys.argv:
            return bench([a for a in sys.argv[1:] if a != "--bench"])
        config = parse_config()
        if launched() > 1:
            if torch.cuda.is_available():
                if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
                    raise ValueError(f"more ranks than the {torch.cuda.device_count()} GPU(s) here: lower --nproc_per_node")
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=2))  # one rank's games may last while others wait
        run(config)
    except torch.OutOfMemoryError as error:
        sys.exit(f"train.py: out of memory. In an update: lower --tokens_per_micro_batch, or add --checkpointing; in a rollout: lower --rows or "
                 f"--max_context; anywhere: --moments bfloat16, or --shard on several ranks ({str(error).splitlines()[0]})")
    except (ValueError, OSError, ImportError, envs.GameError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
