"""Algorithm 1: one causal language model learns to act, and to value, from one rollout per task.

    python train.py                                                a tiny model in an embedded house
    python train.py --env alfworld --model Qwen2.5-1.5B-Instruct   the paper's setting, on one GPU
    torchrun --nproc_per_node=2 train.py ...                       tasks are split over the ranks
    python train.py --resume --out RUN                             goes on after a kill

`train` is the loop, `Config` every setting, each of them a flag. Whatever is computed over a batch
(advantage statistics, loss denominators, gradients, metrics) is global over the ranks, so that one
rank and many compute the same. The methods SAPO is compared with stand last. Departures from the
paper: an iteration's turns are cut into mini-batches, with an optimizer step on each; the learning
rate of the tiny model, which has imitated first, rises and falls.
"""
import argparse
import contextlib
import copy
import dataclasses
import glob
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
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import envs
import eval as evaluation
from model import (Batch, Critic, Scores, hub_id, is_tiny, load, make_batch, micro_batches,
                   readout_at_start)
from rollout import Sampler, rollout
from sapo import (actor_loss, discounted_returns, empg_advantages, episode_returns,
                  explained_variance, gigpo_advantages, grpo_advantages, normalize_advantages,
                  rloo_advantages, sapo_loss, token_gae, turn_targets, value_loss)


def train(lm, pool, config, log):
    """Algorithm 1. An iteration has N turns and M response tokens (on this rank)."""
    sampler, learner = sampler_for(lm, config), LEARNERS[config.algo](lm, config)
    ids, clock = envs.tasks(config.env, "train", **env_options(config)), learner.clock
    done = restore(learner, config)
    bar = tqdm(range(done, config.iterations), initial=done, total=config.iterations,
               desc=evaluation.NAMES[config.algo], disable=rank() > 0)
    for iteration in bar:
        before = clock.start(pool, sampler)
        games, mine = pick_tasks(ids, config, iteration), range(rank(), config.tasks, world())
        turns = rollout(  # line 2  # SAPO: one trajectory per task
            sampler, [games[i] for i in mine], pool, trajs=mine, rows=config.rows,
            seed=(config.seed, iteration, ROLLOUT), history=config.history)
        clock.lap("rollout")
        if iteration + 1 < config.iterations:
            pool.load(pick_tasks(ids, config, iteration + 1)[rank()::world()])
        played, batches = pack(turns, config, iteration, lm.device)
        old, sampler_off = score_old(lm, played, batches, config)  # line 3
        clock.lap("old")
        ref = score_all(learner.reference, batches).logp if config.beta else None
        clock.lap("ref")
        targets = learner.targets(played, batches, old)  # lines 4 and 5
        with uninterrupted() as interrupted:  # so that a checkpoint is of a whole iteration
            steps = [learner.step(mini, old, ref, targets, iteration) for mini in batches
                     if learner.failed < PATIENCE]  # lines 6 and 7
            learner.free_gradients()
            clock.lap("update")
            cost = clock.cost(pool, sampler, before) | {"sampler_off": sampler_off}
            metrics = summary(iteration, turns, targets, steps, cost, pool.env.categories)
            log(metrics, turns)
            bar.set_postfix_str(headline(metrics))
            if learner.failed == PATIENCE:
                raise ValueError(f"{PATIENCE} steps in a row were not finite; lower --lr, or look "
                                 "at the losses in metrics.jsonl")
            done, last = iteration + 1, iteration + 1 == config.iterations
            if done % config.save_every == 0 or last or any(gather([bool(interrupted)])):
                save_checkpoint(learner, config, done)


class Played(NamedTuple):
    """The turns of an iteration as flat tensors, in the order of its micro-batches."""

    turns: list  # of rollout.Turn
    traj: torch.Tensor  # (N,), as are turn, reward, done and invalid
    turn: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor
    invalid: torch.Tensor
    v: torch.Tensor  # (N,) by the sampler, in units of return
    q: torch.Tensor
    logp: torch.Tensor  # (M,) by the sampler
    turn_of: torch.Tensor  # (M,) the turn of each response token


class MicroBatch(NamedTuple):
    """What one forward pass takes, and where its tokens and turns lie on the iteration's axes."""

    batch: Batch
    tokens: slice  # of (M,)
    turns: slice  # of (N,)


class Targets(NamedTuple):
    """What an update learns from, and for the log what it was made of. y_v and y_q are SAPO's;
    value_old and value_target are a separate critic's, (N,) in sapo-separate and (M,) in PPO."""

    adv: torch.Tensor  # (M,) the advantage on every token, Eq. 7
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) the discounted return from each turn (PPO: undiscounted)
    y_v: torch.Tensor = None  # (N,) Eq. 6, over R_max, as are the next three
    y_q: torch.Tensor = None
    value_old: torch.Tensor = None
    value_target: torch.Tensor = None


def make_samples(turns, context):
    """Turns, in order -> [(ids, [(start, end), ...], turns)]: the training samples, a turn each in
    `window`, a trajectory each in `full`."""
    samples = []
    for turn in turns:
        if context == "window" or not samples or turn.traj != samples[-1][2][-1].traj:
            samples.append(([], [], []))
        ids, spans, its_turns = samples[-1]
        ids += turn.prompt_ids + turn.action_ids
        spans.append((len(ids) - len(turn.action_ids), len(ids)))
        its_turns.append(turn)
    return samples


def pack(turns, config, iteration, device):
    """Shuffles all ranks' samples alike and splits them into ceil(turns / mini_batch) mini-batches
    of nearly equal size -> Played, and of each mini-batch this rank's micro-batches, if any."""
    mine = {(s[2][0].traj, s[2][0].turn): s for s in make_samples(turns, config.context)}
    sizes = sorted(gather([(key, len(sample[2])) for key, sample in mine.items()]))
    order = np.random.default_rng([config.seed, iteration, SHUFFLE]).permutation(len(sizes))
    total = sum(n for _, n in sizes)
    parts = max(1, -(-total // config.mini_batch))  # equal ones: a small last step is noisy
    plan, filled = [[] for _ in range(parts)], 0
    for key, n in (sizes[i] for i in order):
        plan[min(parts - 1, filled * parts // max(1, total))].append(key)
        filled += n
    batches, ordered, m = [], [], 0
    for keys in filter(None, plan):
        batches.append([])
        samples = [mine[key] for key in keys if key in mine]
        for group in micro_batches(samples, config.tokens_per_micro_batch):
            batch, n = make_batch([sample[:2] for sample in group]).to(device), len(ordered)
            ordered += [turn for sample in group for turn in sample[2]]
            tokens = slice(m, m := m + len(batch.turn_of))
            batches[-1].append(MicroBatch(batch, tokens, slice(n, len(ordered))))
    return flatten(ordered, device), batches


def flatten(turns, device):
    """Turns in the order of the micro-batches -> Played."""
    def column(values, dtype=torch.float32):
        return torch.tensor(list(values), dtype=dtype, device=device)

    lengths = torch.tensor([len(t.action_ids) for t in turns], dtype=torch.long)
    turn_of = torch.arange(len(turns)).repeat_interleave(lengths).to(device)
    return Played(turns, *(column((getattr(t, name) for t in turns), torch.long)
                           for name in ("traj", "turn")),
                  *(column(getattr(t, name) for t in turns)
                    for name in ("reward", "done", "invalid", "v", "q")),
                  column(x for t in turns for x in t.logp), turn_of)


@torch.no_grad()
def score_all(lm, batches):
    """One forward pass over every micro-batch -> Scores of the whole iteration."""
    parts = [lm.score(micro.batch) for mini in batches for micro in mini]
    if not parts:  # this rank has no turn
        parts = [Scores(*torch.zeros(4, 0, device=lm.device))]
    return Scores(*(torch.cat(column) for column in zip(*parts)))


def score_old(lm, played, batches, config):
    """Line 3: V_old and Q_old come with the pass that gives the old log-probs. With --old rollout
    all are the sampler's own, and the pass is made over one micro-batch alone, for the log.
    -> Scores, and how far the log-probs of the sampler are from those of the pass on average."""
    if config.old == "recompute":
        old = score_all(lm, batches)  # SAPO: no second model is run
        off = old.logp - played.logp
    else:
        old = Scores(played.logp, None, played.v / lm.r_max, played.q / lm.r_max)
        micros = [micro for mini in batches for micro in mini]
        some = micros[len(micros) // 2:][:1]
        off = torch.cat([score_all(lm, [some]).logp - played.logp[m.tokens] for m in some]
                        or [played.logp])
    sums = gather([(off.abs().double().sum().item(), len(off))])
    return old, sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))


@torch.no_grad()
def turn_level_targets(played, v, q, config):
    """Lines 4 and 5, with V_old and Q_old (N,) in units of return -> Targets. Statistics are taken
    over all turns of the iteration."""
    rewards = played.traj, played.turn, played.reward
    adv, y_v, y_q = turn_targets(*rewards, played.done, v, q, gamma=config.gamma, lam=config.lam)
    adv = normalize_advantages(adv, invalid=played.invalid, c_inv=config.c_inv,
                               group=everyone())  # SAPO: one rollout per task, one mean for all
    return Targets(adv[played.turn_of], v, q, discounted_returns(*rewards, gamma=config.gamma),
                   y_v / config.r_max, y_q / config.r_max)


class Learner:
    """SAPO: what is trained, and how. The other methods differ from it in `targets` and `loss`,
    and with a separate critic in `step`."""

    def __init__(self, lm, config):
        self.lm, self.config, self.clock = lm, config, Clock()
        if config.beta:
            self.reference = dataclasses.replace(lm, model=copy.deepcopy(lm.model))
        self.optimizer = optimizer_for(lm.model, config)
        self.steps = 0  # tried so far
        self.failed = 0  # how many of the latest steps in a row were not finite

    def targets(self, played, batches, old):
        """Lines 4 and 5 -> Targets."""
        v, q = self.lm.r_max * old.p_v, self.lm.r_max * old.p_q
        if not self.config.c_v:
            v = torch.zeros_like(v)  # V is untrained; Q does not enter the advantage anyway
        return turn_level_targets(played, v, q, self.config)

    def loss(self, micro, old, ref, targets, tokens, turns):
        """The joint forward (line 6) and Eq. 12 on a micro-batch -> (loss, info)."""
        c, m, n = self.config, micro.tokens, micro.turns
        return sapo_loss(
            *self.lm.score(micro.batch), logp_old=old.logp[m], adv=targets.adv[m],
            logp_ref=None if ref is None else ref[m], p_v_old=old.p_v[n], p_q_old=old.p_q[n],
            y_v=targets.y_v[n], y_q=targets.y_q[n], clip=c.clip, clip_v=c.clip_v, clip_q=c.clip_q,
            c_v=c.c_v, c_q=c.c_q, beta=c.beta, c_h=c.c_h, tokens=tokens, turns=turns)

    def step(self, mini, old, ref, targets, iteration):
        """Lines 6 and 7: one optimizer step on a mini-batch -> its numbers."""
        tokens, turns = global_sizes(mini)
        self.set_lr(self.optimizer, self.config.lr, iteration)
        info = take_step(self.lm.model, self.optimizer, mini, self.config, lambda micro: self.loss(
            micro, old, ref, targets, tokens, turns))
        self.steps, self.failed = self.steps + 1, self.failed + 1 if info["skipped"] else 0
        return info

    def free_gradients(self):
        """Gives their memory to the rollout."""
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, optimizer, lr, iteration):
        """Warm-up over the first steps, because Adam's first steps are large; then a straight line
        over the iterations."""
        c = self.config
        warmup = min(1.0, (self.steps + 1) / max(1, c.lr_warmup))
        decay = 1 - (1 - c.lr_end) * iteration / max(1, c.iterations)
        for group in optimizer.param_groups:
            group["lr"] = lr * warmup * decay


def take_step(model, optimizer, mini, config, loss_of):
    """One optimizer step on the sum of loss_of(micro) -> (loss, info) over the micro-batches of all
    ranks -> the infos' sums (of *_max: maxima). A step that is not finite is not taken."""
    optimizer.zero_grad(set_to_none=True)
    model.train(config.checkpointing)  # transformers recomputes activations in this mode alone
    infos = []
    for micro in mini:
        loss, info = loss_of(micro)
        loss.backward()
        infos.append(info | {"loss": loss.detach()})
    model.eval()
    infos = [{k: float(x) for k, x in info.items()} for info in infos]  # late: it waits for the GPU
    sum_gradients(model)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
    infos = gather(infos)
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    finite = bool(np.isfinite(out["loss"]) and np.isfinite(norm))
    if finite:
        optimizer.step()
    return out | {"grad_norm": norm, "skipped": int(not finite)}


def pick_tasks(ids, config, iteration):
    """An iteration's tasks, each --group times: every game once per pass over the games, in an
    order drawn anew for each pass."""
    count = config.tasks // config.group
    places = [divmod(n, len(ids)) for n in range(iteration * count, (iteration + 1) * count)]
    orders = {epoch: np.random.default_rng([config.seed, epoch, TASKS]).permutation(len(ids))
              for epoch, _ in places}
    return [ids[orders[epoch][i]] for epoch, i in places for _ in range(config.group)]


def sampler_for(lm, config, temperature=1.0):
    return Sampler(lm, config.engine, config.context, config.max_new, temperature, config.compile,
                   config.max_prompt, config.max_context)


# --------------------------------------------------------------------------------------- settings


def number(kind, low, high=float("inf"), words=None):
    """The type of a flag: a number within bounds. argparse reports what lies outside."""
    def parse(text):
        x = kind(text)
        if not low <= x <= high:
            raise argparse.ArgumentTypeError(f"must be {words or f'at least {low}'}, got {x}")
        return x
    parse.__name__ = kind.__name__  # argparse shows it
    return parse


def one_of(*names):
    """The type of a flag: one of some words."""
    def parse(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; known: {', '.join(names)}")
        return text
    return parse


Count, Size = number(int, 0), number(int, 1)
Share = number(float, 0, 1, "between 0 and 1")
Weight = number(float, 0, 1e30, "a number, and not negative")
Positive = number(float, 1e-30, 1e30, "a positive number")
Precision, Algo = one_of("float32", "bfloat16"), one_of(*evaluation.NAMES)


@dataclass(frozen=True)
class Config:
    """The paper's settings where it gives them, else its framework's (verl-agent's), else ours."""

    env: str = "house"  # house, alfworld or webshop
    model: str = "tiny"  # results/tiny-*, a hub id, a name such as Qwen2.5-1.5B-Instruct, a folder
    data: str = None  # alfworld: the folder that holds json_2.1.1; webshop: its catalogue's
    goals: str = "synthetic"  # webshop: synthetic or human
    out: str = None  # the run's folder; default runs/ENV-MODEL[-ALGO]-SEED
    seed: Count = 0  # random seed
    iterations: Count = 150  # of rollout and update; the learning rate's line ends with them
    algo: Algo = "sapo"  # sapo, sapo-separate, ppo, grpo, rloo, gigpo, gigpo-nostd, empg
    tasks: Size = 128  # |B|: trajectories an iteration, of as many tasks unless --group
    group: Size = None  # trajectories of the same task; default 8 for what compares them, else 1
    context: one_of("window", "full") = "window"  # each turn its own prompt, or one conversation
    engine: one_of("kv", "hf") = "kv"  # kv: our own sampler; hf: generate
    rows: Size = None  # games decoded side by side; default all of an iteration's
    compile: bool = False  # torch.compile for kv's decoding step and for scoring
    dtype: Precision = None  # float32, or bfloat16 (float32 master weights); default by the device
    history: Count = 2  # turns shown in a window prompt
    horizon: Size = None  # turns an episode may take; default the environment's
    places: Size = 5  # house: its size
    objects: Size = 4  # house: things that can be carried
    max_new: Size = 512  # tokens a response may take
    max_prompt: Size = 2048  # tokens a window prompt may take
    max_context: Size = None  # tokens a conversation may take; default the model's limit
    workers: Count = None  # processes that play; default none for house, else one per core (to 16)

    gamma: Share = 0.95  # discount per turn
    lam: Share = 0.95  # lambda of GAE over turns, Eq. 5
    r_max: Positive = 10.0  # R_max, Eq. 2: returns lie in [-R_max, R_max]
    tau_v: Positive = 1.0  # value temperature, Eq. 1
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two rows no text uses
    c_inv: Weight = 0.1  # charge on a turn that cannot be parsed, Eq. 7
    clip: Positive = 0.2  # epsilon, Eq. 9
    clip_v: Positive = 0.2  # epsilon_V, Eq. 10
    clip_q: Positive = 0.2  # epsilon_Q
    c_v: Weight = 0.5  # weight of V's loss, Eq. 12
    c_q: Weight = 0.25  # weight of Q's loss
    beta: Weight = 0.01  # weight of the KL to the model SAPO started from
    c_h: Weight = 0.001  # weight of the entropy

    lr: Positive = 1e-6  # AdamW's learning rate
    lr_warmup: Count = 0  # optimizer steps over which lr rises from 0
    lr_end: Share = 1.0  # share of lr that a straight line reaches at the end; the paper's is 1
    critic_lr: Positive = 1e-5  # of a separate critic
    mini_batch: Size = 256  # turns an optimizer step
    tokens_per_micro_batch: Size = 8192  # padded tokens a forward pass
    old: one_of("recompute", "rollout") = "recompute"  # line 3: a pass of its own, or the sampler's
    checkpointing: bool = False  # recompute activations: less memory, a third more time
    moments: Precision = "float32"  # AdamW's: float32 or bfloat16 (rounded at random)
    shard: bool = False  # several ranks: each keeps a share of the optimizer's state (ZeRO 1)

    eval_games: Count = None  # held-out games before and after; default the environment's number
    save_every: Size = 1  # iterations between checkpoints: what a kill may cost
    resume: bool = False  # go on with the run in --out; flags that are not given are the run's
    log: one_of("tensorboard", "wandb") = None  # tensorboard or wandb


# What a tiny model and the shop need differently. A flag beats both.
PRESETS = {
    "tiny": dict(dtype="float32", iterations=40, tasks=64, max_new=16, max_prompt=8192, lr=4e-4,
                 critic_lr=4e-4, lr_warmup=20, lr_end=0.0, mini_batch=128,
                 tokens_per_micro_batch=4096),
    "webshop": dict(max_prompt=4096, mini_batch=64)}  # long pages, short episodes
HERE = os.path.dirname(os.path.abspath(__file__))
GRAD_CLIP, WEIGHT_DECAY = 1.0, 0.01  # the framework's
ROLLOUT, SHUFFLE, TASKS = range(3)  # what follows (seed, iteration) in a seed; eval.py has 5 and 6
PATIENCE = 5  # steps in a row that may fail before the run stops
# What a resumed run may change: its length and surroundings, and what helps against low memory.
MAY_CHANGE = {"iterations", "save_every", "workers", "data", "log", "out", "resume", "rows",
              "tokens_per_micro_batch", "checkpointing", "compile"}


class Parser(argparse.ArgumentParser):
    """Every field of Config is a flag, and its comment there is the help."""

    def __init__(self):
        super().__init__(description="SAPO, Algorithm 1.", allow_abbrev=False,
                         argument_default=argparse.SUPPRESS)
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
        kinds = {bool: {"action": "store_true"}, tuple: {"nargs": 2, "metavar": ("A", "B")}}
        for f in dataclasses.fields(Config):
            values = [] if f.default is None or f.type is bool else [str(f.default)]
            values += [f"{name}: {its[f.name]}" for name, its in PRESETS.items() if f.name in its]
            text = comments[f.name] + (f" [{'; '.join(values)}]" if values else "")
            self.add_argument(f"--{f.name}", help=text.replace("%", "%%"),
                              **kinds.get(f.type, {"type": f.type}))

    def error(self, message):
        raise ValueError(message)


def parse_config(argv=None):
    """Flags -> Config. A flag beats the presets, which beat the defaults; a resumed run has its own
    settings and refuses other flags but MAY_CHANGE. All of it is written to config.json."""
    given, stored = vars(Parser().parse_args(argv)), {}
    asked = Config(**given)
    out = os.path.normpath(asked.out or default_out(asked))
    if asked.resume:
        stored = read_json(f"{out}/config.json")
        if given.keys() <= {"resume", "out"} and "algo" not in stored:
            raise ValueError(f"--resume: there is no run in {out}")  # a first start has more flags
        stored = {f.name: stored[f.name] for f in dataclasses.fields(Config) if f.name in stored}
        asked = Config(**stored | given)
    presets = {name: PRESETS[name] for name, applies in (
        ("webshop", asked.env == "webshop"), ("tiny", is_tiny(asked.model))) if applies}
    settings = [*presets.values(), stored, given, {"out": out}]  # the later beats the earlier
    config = with_defaults(Config(**{k: v for its in settings for k, v in its.items()}))
    other = [f"--{k} is {v} there" for k, v in stored.items()
             if k not in MAY_CHANGE and getattr(config, k) != v]
    if other:
        raise ValueError(f"--resume: {out} was begun otherwise ({'; '.join(other)})")
    check(config)
    return config


def with_defaults(config):
    """Fills in what follows from other settings or from the machine."""
    env, few = envs.known(config.env), config.tasks < 64 and config.env != "house"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    defaults = {"horizon": env.horizon, "workers": envs.default_workers(config.env, ranks),
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "eval_games": config.tasks if few else env.held_out[1],
                "group": 8 if LEARNERS[config.algo] is Grouped else 1}
    return dataclasses.replace(config, **{k: v for k, v in defaults.items()
                                          if getattr(config, k) is None})


def default_out(given):
    algo = "" if given.algo == "sapo" else f"-{given.algo}"
    return f"runs/{given.env}-{os.path.basename(given.model.rstrip('/'))}{algo}-{given.seed}"


def check(config):
    """Refuses settings that do not fit each other, or the machine, before anything is loaded."""
    c, learner = config, LEARNERS[config.algo]
    used = {"sapo": {"lam", "gamma", "c_v", "c_q"}, "sapo-separate": {"lam", "gamma"}}.get(
        c.algo, {"gamma"} if c.algo.startswith("gigpo") else set())
    idle = [name for name in ("lam", "gamma", "c_v", "c_q")
            if name not in used and getattr(c, name) != getattr(Config, name)]
    packages = [c.log] * bool(c.log) + ["alfworld"] * (c.env == "alfworld")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    for wrong, why in (
            (idle, f"--{', --'.join(idle)} does nothing with --algo {c.algo}"),
            (missing, f"a package is not installed: pip install {' '.join(missing)}"),
            (c.max_context and c.max_context <= c.max_new, f"--max_context {c.max_context} leaves "
             f"no room for a prompt beside a response of --max_new {c.max_new}"),
            (c.tasks % c.group, f"--tasks {c.tasks} is no multiple of --group {c.group}"),
            (c.group == 1 and learner is Grouped, f"--algo {c.algo} compares the trajectories of "
             "a task: --group 1 is too few"),
            (c.algo == "empg" and c.old == "rollout", "--algo empg needs the entropies of the pass "
             "that --old rollout saves"),
            (c.shard and launched() == 1, "--shard spreads the optimizer's state over several "
             "ranks: torchrun --nproc_per_node=2 train.py ...")):
        if wrong:
            raise ValueError(why)
    for split in ("train", envs.known(c.env).held_out[0]):
        envs.tasks(c.env, split, **env_options(c))


def env_options(config):
    return envs.options_for(config.env, vars(config))


# ---------------------------------------------------------------------------------- several ranks


def launched():
    """The ranks torchrun starts, known before they have met."""
    return int(os.environ.get("WORLD_SIZE", 1))


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def everyone():
    return dist.group.WORLD if world() > 1 else None


def barrier(wanted=True):
    if wanted and world() > 1:
        dist.barrier()


def gather(items):
    """Every rank's list, joined in the order of ranks."""
    if world() == 1:
        return items
    lists = [None] * world()
    dist.all_gather_object(lists, items)
    return [x for part in lists for x in part]


def global_sizes(mini):
    """The tokens and turns of a mini-batch on all ranks together, at least 1 each."""
    mine = [[part.stop - part.start for part in (m.tokens, m.turns)] for m in mini]
    return [max(1, sum(n)) for n in zip(*gather(mine + [[0, 0]]))]


def sum_gradients(model):
    """Losses are sums over global denominators, so the gradient of the whole mini-batch is the
    plain sum over the ranks."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if world() > 1:
                dist.all_reduce(p.grad)


# ------------------------------------------------------------------------------------ the optimizer


def round_at_random(x, generator):
    """float32 -> bfloat16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device,
                          generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for 16-bit models as well: updates go to float32 master weights, of which
    the model is a rounded copy, because at a learning rate of 1e-6 they are far below bf16's last
    digit. It takes one parameter at a time, so that no more than one float32 gradient exists.
    `moments`: torch.float32 or torch.bfloat16."""

    def __init__(self, params, lr, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.999), eps=1e-8,
                 moments=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.moments = moments

    def state_of(self, p):
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(p, dtype=self.moments)
            state["v"] = torch.zeros_like(p, dtype=self.moments)
            if p.dtype != torch.float32:
                state["master"] = p.detach().float()
        return state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.update(p, self.state_of(p), group, n)

    def update(self, p, state, group, n):
        (b1, b2), lr, g = group["betas"], group["lr"], p.grad.float()
        state["step"] += 1
        t, master = state["step"], state.get("master", p)
        m, v = state["m"].float(), state["v"].float()  # the tensors themselves if float32
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        master.mul_(1 - lr * group["weight_decay"])
        root = (v / (1 - b2 ** t)).sqrt_().add_(group["eps"])
        master.addcdiv_(m, root, value=-lr / (1 - b1 ** t))
        if self.moments != torch.float32:  # seeded, so that a resumed run rounds identically
            generator = torch.Generator(p.device).manual_seed(t * 10 ** 6 + n)
            state["m"], state["v"] = (round_at_random(x, generator) for x in (m, v))
        if master is not p:
            p.copy_(master)


def optimizer_for(model, config):
    options = dict(lr=config.lr, moments=getattr(torch, config.moments))
    if not config.shard:
        return AdamW(model.parameters(), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)


# ------------------------------------------------------------------------------------ checkpoints


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C and SIGTERM wait until the block is done; a second one does not -> a list that is
    empty until one has come."""
    signals = []

    def wait(*_):
        if signals:
            raise KeyboardInterrupt
        signals.append(True)
        print("\nleaving after this iteration; a second Ctrl-C leaves at once", file=sys.stderr)

    before = {s: signal.signal(s, wait) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    if signals:
        raise KeyboardInterrupt


def write_file(path, text):
    """Writes beside and renames, so that a kill leaves the old or the new."""
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def write_folder(path, fill):
    """fill(FOLDER) writes PATH.new, which is renamed when it is whole. What has the name PATH is
    whole at any moment; a kill between two renames leaves PATH.old."""
    for aside in (f"{path}.new", f"{path}.old"):
        shutil.rmtree(aside, ignore_errors=True)
    os.makedirs(f"{path}.new")
    fill(f"{path}.new")
    if os.path.isdir(path):
        os.rename(path, f"{path}.old")
    os.rename(f"{path}.new", path)
    shutil.rmtree(f"{path}.old", ignore_errors=True)


def read_json(path):
    """The JSON object in a file; {} where there is none that can be read."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, json.JSONDecodeError):
        return {}


def newest_checkpoint(config):
    """-> iterations done, folder; of a run that is not resumed 0, None."""
    path = evaluation.newest_checkpoint(config.out) if config.resume else None
    return int(path.name.partition("-")[2]) if path else 0, path


def optimizer_states(learner):
    """[(name, this rank's parameters, the optimizer's state of each)] of policy and critic."""
    out = []
    for name in ("optimizer", "critic_optimizer"):
        if hasattr(learner, name):  # ZeroRedundancyOptimizer holds this rank's share in `optim`
            mine = getattr(getattr(learner, name), "optim", getattr(learner, name))
            out.append((name, [p for g in mine.param_groups for p in g["params"]], mine.state))
    return out


def save_checkpoint(learner, config, done):
    """RUN/checkpoint-N: the model as a Hugging Face folder, and what else decides what comes next.
    Random numbers and the order of tasks follow from the seed and the iteration. With --shard every
    rank writes its share."""
    path = f"{config.out}/checkpoint-{done}"

    def write_states(folder):
        for name, params, state in optimizer_states(learner):
            torch.save([state.get(p, {}) for p in params], f"{folder}/{name}-{rank()}.pt")

    def fill(folder):
        learner.lm.save(folder)
        if hasattr(learner, "critic"):
            torch.save(learner.critic.state_dict(), f"{folder}/critic.pt")
        progress = {"steps": learner.steps, "failed": learner.failed,
                    "shards": world() if config.shard else 1}
        write_file(f"{folder}/progress.json", json.dumps(progress))
        barrier(config.shard)  # the folder is there
        write_states(folder)
        barrier(config.shard)  # all shares are written

    if rank() == 0:
        write_folder(path, fill)
        for older in set(glob.glob(f"{glob.escape(config.out)}/checkpoint-*")) - {path}:
            shutil.rmtree(older)
    elif config.shard:
        barrier()
        write_states(f"{path}.new")
        barrier()


def restore(learner, config):
    """-> iterations done; the learner becomes what it was then."""
    (done, path), device = newest_checkpoint(config), learner.lm.device
    if not done:
        return 0
    progress, shards = read_json(f"{path}/progress.json"), world() if config.shard else 1
    if progress["shards"] != shards:
        raise ValueError(f"--resume: the checkpoint's optimizer was kept by {progress['shards']} "
                         "rank(s): start as many, with or without --shard as then")
    saved = load(str(path), dtype=learner.lm.model.dtype, device="cpu").model
    with torch.no_grad():
        for mine, theirs in zip(learner.lm.model.parameters(), saved.parameters()):
            mine.copy_(theirs)
    if hasattr(learner, "critic"):
        learner.critic.load_state_dict(torch.load(f"{path}/critic.pt", map_location=device))
    for name, params, state in optimizer_states(learner):
        kept = torch.load(f"{path}/{name}-{rank() if config.shard else 0}.pt", map_location=device)
        state.update({p: its for p, its in zip(params, kept) if its})
    learner.steps, learner.failed = progress["steps"], progress["failed"]
    return done


# ---------------------------------------------------------------------------------------- logging


class Clock:
    """Seconds of an iteration's phases."""

    def start(self, pool, sampler):
        """-> the counts from which `cost` tells what the iteration has added."""
        self.laps, self.begun = {}, time.time()
        self.last = self.begun
        return pool.seconds, sampler.tokens_encoded, sampler.tokens_sampled

    def lap(self, name):
        """Books the time since the last lap on a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, key = time.time(), f"time_{name}"
        self.laps[key], self.last = self.laps.get(key, 0.0) + now - self.last, now

    def cost(self, pool, sampler, before):
        """Seconds by phase on this rank, tokens on all."""
        encoded, sampled = (sum(n) for n in zip(*gather(
            [(sampler.tokens_encoded - before[1], sampler.tokens_sampled - before[2])])))
        return {"tokens_encoded": encoded, "tokens_sampled": sampled, **self.laps,
                "time_env": pool.seconds - before[0], "time_total": time.time() - self.begun}


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def summary(iteration, turns, targets, steps, cost, categories):
    """One line of metrics.jsonl, over all ranks:

    success, score, success_by_category   of the iteration's episodes, sampled at temperature 1
    valid_actions, admissible_actions     shares of turns: with both pairs of tags; with a command
                                          that the game offered
    truncated, outgrown                   shares of episodes: cut short; because no prompt fit
    loss, loss_policy, loss_v, loss_q     Eq. 12, 9, 11; ..._critic are a separate critic's
    kl, kl_max                            mean and largest KL of a token to the start, in nats
    entropy                               of the policy, in nats a token
    ratio_max, *clip_fraction             of Eq. 8; shares that Eq. 9 and 10 hold back
    v_saturated, q_saturated              shares of readouts where Eq. 1 has no gradient
    v_explained_variance, q_...           of the discounted return (PPO: of the whole return)
    grad_norm, skipped                    before clipping; steps that were not finite
    sampler_off                           mean |log-prob of the sampler - of the scoring pass|
    time_*                                seconds on rank 0: rollout (env: its wait for games), old
                                          and ref (line 3), update; a separate critic's values and
                                          critic
    """
    v, q, returns = (torch.tensor(gather(x.tolist()))
                     for x in (targets.v, targets.q, targets.returns))
    names = "won score truncated outgrown category done invalid admissible".split()
    rows = gather([{name: getattr(t, name) for name in names} for t in turns])
    ends = [row for row in rows if row["done"]]
    won = {name: [row["won"] for row in ends if row["category"] == category]
           for category, name in categories.items()}
    shares = {name: mean([row[name] for row in ends]) for name in names[:4]}
    out = {"iteration": iteration, "episodes": len(ends), "turns": len(rows),
           "success": shares.pop("won"), **shares, **cost,
           "success_by_category": {c: mean(x) if x else None for c, x in won.items()},
           "valid_actions": mean([not row["invalid"] for row in rows]),
           "admissible_actions": mean([row["admissible"] for row in rows]),
           "v_mean": v.mean().item(), "q_mean": q.mean().item(),
           "return_mean": returns.mean().item(),
           "v_explained_variance": explained_variance(v, returns),
           "q_explained_variance": explained_variance(q, returns)}
    for key in steps[0]:
        over = max if key.endswith("_max") else sum if key.startswith("skipped") else mean
        out[key] = over([step[key] for step in steps])
    return out


def headline(metrics):
    """What the progress bar says of an iteration."""
    text = f"success {metrics['success']:.0%}, {metrics['turns'] / metrics['episodes']:.1f} turns"
    if metrics["v_explained_variance"]:
        text += f", V explains {metrics['v_explained_variance']:.0%}"
    return text + (f", {metrics['outgrown']:.0%} outgrown" if metrics["outgrown"] else "")


def transcript(turns, names):
    """A trajectory as text; what the policy sampled stands between >>> and <<<."""
    first, last = turns[0], turns[-1]
    out = [f"task {first.task} ({names.get(first.category, first.category)}): "
           f"{'won' if last.won else 'not won'}, score {last.score:.3g}"]
    for t in turns:
        notes = {"no valid tags": t.invalid, "inadmissible": not t.admissible,
                 "truncated": t.truncated}
        note = "".join(f", {word}" for word, applies in notes.items() if applies)
        out.append(f"\n--- turn {t.turn + 1}: V {t.v:.2f}, Q {t.q:.2f}, reward {t.reward:g}{note}\n"
                   f"{t.prompt}\n>>> {t.text} <<<")
    return "\n".join(out) + "\n"


class Log:
    """metrics.jsonl, transcripts/, and one optional dashboard. Rank 0 writes."""

    def __init__(self, config):
        self.config, self.scalar = config, None
        if rank() > 0:
            return
        os.makedirs(f"{config.out}/transcripts", exist_ok=True)
        if config.log == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.scalar = SummaryWriter(config.out, flush_secs=5).add_scalar
        elif config.log == "wandb":
            import wandb
            run = wandb.init(project="sapo", name=os.path.basename(config.out),
                             config=dataclasses.asdict(config))
            self.scalar = lambda key, value, step: run.log({key: value}, step=step)

    def __call__(self, metrics, turns):
        if rank() > 0:
            return
        n, config = metrics["iteration"], self.config
        with open(f"{config.out}/metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        shares = {f"success/{c}": x for c, x in metrics["success_by_category"].items()}
        for key, value in (metrics | shares).items() if self.scalar else ():
            if isinstance(value, (int, float)):
                self.scalar(key, value, n)
        if n % 10 == 0 or n == config.iterations - 1:
            first = [t for t in turns if t.traj == turns[0].traj]
            with open(f"{config.out}/transcripts/{n:04d}.txt", "w") as file:
                file.write(transcript(first, envs.known(config.env).categories))


# -------------------------------------------------------------------------------------------- run


def say(*words):
    if rank() == 0:
        print(*words, flush=True)


def versions():
    """What a run was made with: git commit, packages, hardware."""
    git = subprocess.run("git describe --always --dirty", cwd=HERE, shell=True,
                         capture_output=True, text=True).stdout.strip()
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    return {"git": git or "unknown", "versions": {
        "python": sys.version.split()[0], "torch": torch.__version__, "device": device,
        "transformers": transformers.__version__, "ranks": world()}}


def evaluate(lm, pool, config, path=None):
    """Held-out games at the paper's temperature, in the house at 1 as well -> {temperature:
    records}. They are kept in the file `path`, where a resumed run finds them."""
    if path and config.resume and os.path.isfile(path):
        return {float(t): records for t, records in read_json(path).items()}
    ids = envs.tasks(config.env, envs.known(config.env).held_out[0], **env_options(config))
    ids = evaluation.spaced(ids, config.eval_games) if config.eval_games else []
    first, last = (len(ids) * r // world() for r in (rank(), rank() + 1))
    out = {}
    for temperature in (evaluation.TEMPERATURE, 1.0)[:2 if config.env == "house" else 1]:
        out[temperature] = gather(evaluation.play(
            sampler_for(lm, config, temperature), ids[first:last], pool, seed=config.seed,
            first=first, rows=config.rows, history=config.history, quiet=rank() > 0))
    if path and rank() == 0:
        write_file(path, json.dumps(out))
    return out


def write_evaluation(before, after, config):
    """eval.json: success and success_before (the same games) with n, interval and categories;
    eval.jsonl: every episode. -> the table, as text."""
    played = {"before": before, "after": after}
    reports = {when: {t: evaluation.report(records) for t, records in some.items()}
               for when, some in played.items()}
    out = {"env": config.env, "temperature": evaluation.TEMPERATURE,
           "n": reports["after"][evaluation.TEMPERATURE]["n"]}
    for when, end in (("before", "_before"), ("after", "")):
        its = reports[when][evaluation.TEMPERATURE]
        out |= {f"{key}{end}": its[key] for key in ("success", "interval", "score")}
        out[f"success{end}_by_category"] = its["success_by_category"]
        if 1.0 in reports[when]:
            out[f"success{end}_at_1"] = reports[when][1.0]["success"]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(
        json.dumps({"when": when, "temperature": t} | record) + "\n"
        for when, some in played.items() for t, records in some.items() for record in records))
    return evaluation.table({f"{when} {evaluation.NAMES[config.algo]}, T = {t:g}": report
                             for when, some in reports.items() for t, report in some.items()},
                            envs.known(config.env))


def prepare(config):
    """-> the model a run starts from, after a look at its size and its readouts."""
    name, gpu = config.model, torch.cuda.is_available()
    if name == "tiny":  # tools/imitate.py made these two
        name = f"{HERE}/results/tiny-{'alfworld' if config.env == 'alfworld' else 'house'}"
        if not os.path.isdir(name):
            raise ValueError(f"{name} is missing; tools/imitate.py makes such a start")
    if (os.path.realpath(name) + os.sep).startswith(os.path.realpath(config.out) + os.sep):
        raise ValueError(f"--model {name} is or lies in the run's own folder; give another --out")
    check_memory(config)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
    lm = load(name, dtype=getattr(torch, config.dtype), value_tokens=config.value_tokens,
              tau_v=config.tau_v, r_max=config.r_max, device=device)
    env = envs.make_env(config.env, **env_options(config))
    games = env.tasks("train")
    say(f"{config.model}: {sum(p.numel() for p in lm.model.parameters()) / 1e6:.1f} M parameters "
        f"on {lm.device}, {world()} rank(s); {config.env}: {len(games)} training games")
    prompts = [env.episode(*env.reset(game)).window_prompt() for game in games[:4]]
    mean, spread, saturated = readout_at_start(lm, [lm.chat.first(text) for text in prompts])
    words = lm.tokenizer.convert_ids_to_tokens(list(lm.value_ids))
    say(f"w+, w- = {lm.value_ids} {words if words[0] else '(rows past the tokenizer)'}: logit "
        f"difference {mean:.3f} +- {spread:.3f}, {saturated:.0%} saturated")
    return fitted(lm, config)


def fitted(lm, config):
    """-> lm as --compile and --checkpointing want it."""
    if config.checkpointing:
        dropout = [m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout)]
        if any(dropout) or getattr(lm.model.config, "attention_dropout", 0):
            raise ValueError("--checkpointing: this model has dropout, which would be active")
        lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    return dataclasses.replace(lm, compile=config.compile)


def begin_folder(config):
    """Makes the run's folder. Of a resumed run, metrics.jsonl keeps what the checkpoint knows of;
    another run that is there is renamed, never mixed with or overwritten."""
    lines, made_with, path = [], versions(), f"{config.out}/metrics.jsonl"
    if config.resume:
        done = newest_checkpoint(config)[0]
        say(f"{config.out}: {f'goes on after {done} iterations' if done else 'begins anew'}")
        with contextlib.suppress(OSError), open(path) as file:
            lines = file.readlines()[:done]
        before = read_json(f"{config.out}/config.json").get("git", made_with["git"])
        commits = dict.fromkeys([*before.split(", "), made_with["git"]])
        made_with["git"] = ", ".join(commits)  # every commit that had a part in the run
    elif os.path.exists(path):
        aside = next(name for n in range(1, 10 ** 6)
                     if not os.path.exists(name := f"{config.out}.{n}"))
        os.rename(config.out, aside)
        say(f"the run that was in {config.out} is in {aside} now")
    os.makedirs(config.out, exist_ok=True)
    settings = dataclasses.asdict(config) | made_with
    write_file(f"{config.out}/config.json", json.dumps(settings, indent=1))
    write_file(path, "".join(lines))


def run(config):
    """Evaluation, Algorithm 1, evaluation."""
    pool = envs.Pool(config.env, env_options(config), config.workers)
    try:
        lm = prepare(config)
        if rank() == 0:
            begin_folder(config)
        barrier()
        before = evaluate(lm, pool, config, f"{config.out}/before.json")
        reports = {t: evaluation.report(records) for t, records in before.items()}
        say("before training: " + ", ".join(f"success {r['success']:.1%} on {r['n']} held-out "
                                            f"games at T = {t:g}" for t, r in reports.items()))
        train(lm, pool, config, Log(config))
        after = evaluate(lm, pool, config) if config.iterations else before
        peak = max(gather([peak_memory()]))
        if rank() == 0:
            write_file(f"{config.out}/cost.json", json.dumps({"peak_memory": peak}))
            write_folder(f"{config.out}/final", lm.save)
            say(write_evaluation(before, after, config))
            if config.iterations:
                evaluation.plot([config.out], f"{config.out}/curves.png")
            say(f"wrote {config.out}: {' '.join(sorted(os.listdir(config.out)))}")
        barrier()  # a rank that leaves early would pull the others down
    except KeyboardInterrupt:  # Ctrl-C, or SIGTERM
        raise SystemExit(f"\ninterrupted; --resume --out {config.out} goes on from the last "
                         "checkpoint") from None
    finally:
        pool.close()


def peak_memory():
    """The most this process has used so far, in GB: of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def memory_needed(config, arch):
    """{what: bytes on one rank} of the largest things an update holds, from the architecture (a
    transformers config) alone. The first six do not depend on the batch."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(arch)
    weights = sum(p.numel() for p in model.parameters())
    size, share = 2 if config.dtype == "bfloat16" else 4, launched() if config.shard else 1
    width, layers = arch.hidden_size, arch.num_hidden_layers
    layer = size * (8 * width + 4 * arch.intermediate_size) + 16 * width  # kept for a token
    kept = layer + layers * width * size if config.checkpointing else layer * layers
    masters = weights * 4 // share if size == 2 else 0
    moments = weights * 2 * (2 if config.moments == "bfloat16" else 4) // share
    has_critic = issubclass(LEARNERS[config.algo], SeparateCritic)
    return {"weights": weights * size, "gradients": weights * size, "master weights": masters,
            "moments": moments, "reference": weights * size if config.beta else 0,
            "critic": 2 * weights * size + masters + moments if has_critic else 0,
            "activations of a micro-batch": kept * config.tokens_per_micro_batch,
            "logits of a chunk": 6 * 2 ** 28}


def check_memory(config, arch=None):
    """Prints what a run needs before anything is loaded; ValueError where the GPU has less."""
    if is_tiny(config.model):
        return
    try:
        arch = arch or transformers.AutoConfig.from_pretrained(hub_id(config.model))
    except (OSError, ValueError, KeyError):
        return  # `load` meets the same, and explains it
    needed, has = memory_needed(config, arch), float("inf")
    total = sum(needed.values())
    say(f"memory, computed, beside keys and values: {total / 1e9:.1f} GB ("
        + ", ".join(f"{what} {n / 1e9:.1f}" for what, n in needed.items() if n) + ")")
    if torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
    if total > has:
        raise ValueError(f"this run needs {total / 1e9:.0f} GB and the GPU has {has / 1e9:.0f}: "
                         "lower --tokens_per_micro_batch, add --checkpointing or --moments "
                         "bfloat16, or --shard over several ranks")


# -------------------------------------------------------------- the methods SAPO is compared with


class Rival(Learner):
    """Eq. 12 without the values: the policy's own V and Q are not trained."""

    def loss(self, micro, old, ref, targets, tokens, turns):
        c, logp, h = self.config, *self.lm.score(micro.batch)[:2]
        return actor_loss(logp, h, logp_old=old.logp[micro.tokens], adv=targets.adv[micro.tokens],
                          logp_ref=None if ref is None else ref[micro.tokens], clip=c.clip,
                          beta=c.beta, c_h=c.c_h, tokens=tokens)


class Grouped(Rival):
    """GRPO, RLOO, GiGPO, EMPG: every trajectory is compared with the others of its task, whichever
    rank played them."""

    def targets(self, played, batches, old):
        config, n = self.config, len(played.traj)
        entropy = torch.zeros_like(played.reward)
        if config.algo == "empg":  # a turn's entropy is the mean over its tokens
            entropy = entropy.index_add(0, played.turn_of, old.entropy)
            entropy = entropy / played.turn_of.bincount(minlength=n)
        states = envs.keys_of([t.seen for t in played.turns]).view(np.int64)
        columns = played.traj, played.turn, states, played.reward, entropy
        mine = list(zip(*(column.tolist() for column in columns)))
        first, everybody = sum(gather([n])[:rank()]), list(zip(*gather(mine)))
        traj, turn, state = (torch.tensor(x) for x in everybody[:3])
        reward, entropy = (torch.tensor(x, dtype=torch.float64) for x in everybody[3:])
        adv = self.estimate(traj, turn, state, reward, entropy)[first:first + n].float()
        adv = adv.to(self.lm.device) - config.c_inv * played.invalid
        zeros = torch.zeros_like(played.reward)
        returns = discounted_returns(played.traj, played.turn, played.reward, gamma=config.gamma)
        return Targets(adv[played.turn_of], zeros, zeros, returns)

    def estimate(self, traj, turn, state, reward, entropy):
        """(N,) over the turns of all ranks -> advantages (N,)."""
        algo, gamma, score = self.config.algo, self.config.gamma, episode_returns(traj, reward)
        group = traj // self.config.group  # pick_tasks lays a task's trajectories side by side
        if algo == "rloo":
            return rloo_advantages(traj, group, score)
        if algo.startswith("gigpo"):
            return gigpo_advantages(traj, turn, group, state, reward, gamma=gamma,
                                    std=algo == "gigpo")
        adv = grpo_advantages(traj, group, score)
        return empg_advantages(adv, traj, turn, entropy) if algo == "empg" else adv


class SeparateCritic(Rival):
    """SAPO's turn-level targets with V from a second model and no Q: what the shared model is
    compared with."""

    axis = "turns"  # of the values that are learned

    def __init__(self, lm, config):
        super().__init__(lm, config)
        self.critic, self.critic_failed = Critic(lm), 0
        self.critic_optimizer = optimizer_for(self.critic, config)

    def values(self, micro):
        """The critic's values before each turn's first token, (N,)."""
        length = micro.batch.end - micro.batch.start
        return self.critic(micro.batch)[length.cumsum(0) - length]

    @torch.no_grad()
    def old_values(self, batches):
        parts = [self.values(micro) for mini in batches for micro in mini]
        self.clock.lap("values")
        return torch.cat(parts or [torch.zeros(0, device=self.lm.device)])

    def targets(self, played, batches, old):
        value = self.old_values(batches)
        v = self.config.r_max * value
        made = turn_level_targets(played, v, torch.zeros_like(v), self.config)
        return made._replace(value_old=value, value_target=made.y_v)

    def step(self, mini, old, ref, targets, iteration):
        self.set_lr(self.critic_optimizer, self.config.critic_lr, iteration)
        info = super().step(mini, old, ref, targets, iteration)
        self.optimizer.zero_grad(set_to_none=True)  # the critic can use the memory
        self.clock.lap("update")
        count = global_sizes(mini)[0 if self.axis == "tokens" else 1]

        def regression(micro):
            part = getattr(micro, self.axis)
            return value_loss(self.values(micro), targets.value_old[part],
                              targets.value_target[part], clip=self.config.clip_v, denom=count)

        out = take_step(self.critic, self.critic_optimizer, mini, self.config, regression)
        self.critic_failed = self.critic_failed + 1 if out["skipped"] else 0
        self.failed = max(self.failed, self.critic_failed)
        self.clock.lap("critic")
        return info | {f"{k}_critic": out[k] for k in ("loss", "grad_norm", "skipped")}

    def free_gradients(self):
        super().free_gradients()
        self.critic_optimizer.zero_grad(set_to_none=True)


class PPO(SeparateCritic):
    """PPO as verl-agent has it: a turn is paid the episode's return, less its charge, on its last
    token; GAE over its tokens with gamma = lambda = 1, so that a token's advantage is that return
    less its value; advantages whitened over all tokens."""

    axis = "tokens"

    def values(self, micro):
        return self.critic(micro.batch)

    def targets(self, played, batches, old):
        config, value = self.config, self.old_values(batches)
        returns = episode_returns(played.traj, played.reward)
        adv = target = v = value  # where this rank has no turn, all are empty
        if len(value):
            length = played.turn_of.bincount()
            table = pad_sequence(value.split(length.tolist()), batch_first=True)  # (N, T)
            mask = torch.arange(table.shape[1], device=value.device) < length[:, None]
            score = (returns - config.c_inv * played.invalid) / config.r_max
            adv, target = (x[mask] for x in token_gae(table, mask, score))
            v = config.r_max * table[:, 0]
        adv = normalize_advantages(adv, group=everyone())
        return Targets(adv, v, torch.zeros_like(v), returns, value_old=value, value_target=target)


LEARNERS = {"sapo": Learner, "sapo-separate": SeparateCritic, "ppo": PPO, "grpo": Grouped,
            "rloo": Grouped, "gigpo": Grouped, "gigpo-nostd": Grouped, "empg": Grouped}


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = parse_config()
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise ValueError(f"more ranks than the {torch.cuda.device_count()} GPU(s) here: "
                                 "lower --nproc_per_node")
            torch.cuda.set_device(local)
        if launched() > 1:  # one rank's games may last while the others wait
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo",
                                    timeout=timedelta(hours=2))
        run(config)
    except torch.OutOfMemoryError as error:
        sys.exit("train.py: out of memory. In an update: lower --tokens_per_micro_batch, or add "
                 "--checkpointing; in a rollout: lower --rows or --max_context; anywhere: "
                 "--moments bfloat16, or --shard on several ranks "
                 f"({str(error).splitlines()[0]})")
    except (ValueError, OSError, ImportError, envs.GameError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
