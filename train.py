"""Algorithm 1: one causal language model learns to act, and to value, from one rollout per task.

    python train.py                                                a tiny model in an embedded house
    python train.py --env alfworld --model Qwen2.5-1.5B-Instruct   the paper's setting, on one GPU
    torchrun --nproc_per_node=2 train.py ...                       tasks are split over the ranks
    python train.py --resume --out RUN                             goes on after a kill

`train` is the loop, `Config` the settings, each of them a flag; the methods SAPO is compared with
stand last. Sums and means over a batch take in all ranks. README.md names departures.
"""
import signal
if __name__ == "__main__":  # Ctrl-C while this imports leaves without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import copy
import dataclasses
import glob
import importlib.util
import json
import os
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import envs
import eval as evaluation
from model import Batch, Critic, Scores, load, make_batch, micro_batches
from rollout import Sampler, rollout
from sapo import (actor_loss, discounted_returns, empg_advantages, episode_returns,
                  explained_variance, gigpo_advantages, grpo_advantages, normalize_advantages,
                  rloo_advantages, sapo_loss, token_gae, turn_targets, value_loss)
from machine.cli import (Count, Positive, Share, Size, Weight, Workers, alive, flags_of,
                         one_line_errors, progress, typed)
from machine.ranks import (AdamW, barrier, everyone, gather, join_ranks, mean, rank, say,
                           sum_and_clip_gradients, world)
from worlds.reserved import readout_at_start
from worlds.tiny import is_tiny
from machine.runs import (ROOT, Clock, begin_folder, best_of, claim, iterations_in, name_of,
                          newest_checkpoint, peak_memory, restore, save_checkpoint, settings_of,
                          signals_noted, verify, write_file, write_folder)


def train(lm, pool, config, checkpoint=None):
    """Algorithm 1, from `checkpoint` on, if any. N turns and M response tokens are this rank's."""
    sampler, learner = sampler_for(lm, config), LEARNERS[config.algo](lm, config)
    ids, clock = envs.tasks(config.env, "train", **envs.options_for(vars(config))), learner.clock
    done = restore(learner, checkpoint, load)
    bar = progress(range(done, config.iterations), evaluation.NAMES[config.algo], done)
    clock.start()
    with signals_noted() as noted:  # so that what is left behind is a whole iteration
        for iteration in bar:
            games, mine = pick_tasks(ids, config, iteration), range(rank(), config.tasks, world())
            before = usage(pool, sampler)
            turns = rollout(  # line 2  # SAPO: one trajectory per task
                sampler, [games[i] for i in mine], pool, trajs=mine, rows=config.rows,
                seed=(config.seed, iteration, ROLLOUT), history=config.history)
            clock.lap("rollout")
            used = usage(pool, sampler) - before
            if iteration + 1 < config.iterations:
                pool.load(pick_tasks(ids, config, iteration + 1)[rank()::world()])
            played, batches = pack(turns, config, iteration, lm.device)
            old, sampler_off = score_old(lm, played, batches, config)  # line 3
            clock.lap("old")
            ref = score_all(learner.reference, batches).logp if config.beta else None
            clock.lap("ref")
            targets = learner.targets(played, batches, old)  # lines 4 and 5
            steps = [learner.step(mini, old, ref, targets, iteration) for mini in batches
                     if learner.failed < PATIENCE]  # lines 6 and 7
            for model, _ in learner.trained().values():
                model.zero_grad(set_to_none=True)  # the rollout can use the memory
            clock.lap("update")
            metrics = {"iteration": iteration, "sampler_off": sampler_off} | clock.seconds()
            metrics |= summary(turns, targets, steps, used, pool.env.categories)
            metrics |= eval_now(lm, pool, config, iteration + 1)
            write_log(metrics, turns, config)
            bar.say(f"success {metrics['success']:.0%}, V explains "
                    f"{metrics['v_explained_variance']:.0%}")
            if learner.failed == PATIENCE:
                raise ValueError(f"{PATIENCE} steps in a row were not finite; lower --lr")
            done = iteration + 1
            clock.start()  # a checkpoint's seconds are logged with the next iteration
            due = done % config.save_every == 0 if config.save_every else clock.save_is_due()
            leave, due = map(any, zip(*gather([(bool(noted), due)])))  # ranks' clocks differ
            if due or leave or done == config.iterations:
                save_checkpoint(learner, config.out, done)
                clock.saved()
            if leave:
                raise KeyboardInterrupt


class Played:
    """The turns of an iteration in the order of its micro-batches, and flat tensors of them."""

    def __init__(self, turns, device):
        def column(name, dtype=torch.float32):
            return torch.tensor([getattr(turn, name) for turn in turns], dtype=dtype, device=device)

        self.turns = turns  # of rollout.Turn
        self.traj, self.turn = column("traj", torch.long), column("turn", torch.long)  # (N,)
        self.reward, self.done, self.invalid = map(column, ("reward", "done", "invalid"))  # (N,)
        self.v, self.q = column("v"), column("q")  # (N,) by the sampler, in units of return
        self.logp = torch.tensor([x for turn in turns for x in turn.logp], device=device)  # (M,)
        lengths = torch.tensor([len(turn.logp) for turn in turns], dtype=torch.long)
        self.turn_of = torch.arange(len(turns)).repeat_interleave(lengths).to(device)  # (M,)


class MicroBatch(NamedTuple):
    """What one forward pass takes, and where its tokens and turns lie on the iteration's axes."""

    batch: Batch
    tokens: slice  # of (M,)
    turns: slice  # of (N,)


class Targets(NamedTuple):
    """What an update learns from; v, q, returns are for the log alone. y_v and y_q are SAPO's;
    value_old and value_target are a separate critic's, (N,) in sapo-separate and (M,) in PPO."""

    adv: torch.Tensor  # (M,) the advantage on every token, Eq. 7
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) the discounted return from each turn (PPO: undiscounted)
    y_v: torch.Tensor = None  # (N,) Eq. 6; this and the next three are over R_max
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
    if not all(np.isfinite(turn.logp).all() for turn in turns):
        raise ValueError(f"iteration {iteration}: the sampler's log-probs are not finite; lower "
                         "--lr, or look at kl and grad_norm in metrics.jsonl")
    mine = {(s[2][0].traj, s[2][0].turn): s for s in make_samples(turns, config.context)}
    sizes = sorted(gather([(key, len(sample[2])) for key, sample in mine.items()]))
    order = np.random.default_rng([config.seed, iteration, SHUFFLE]).permutation(len(sizes))
    total = sum(n for _, n in sizes)
    parts = -(-total // config.mini_batch)  # equal ones, because a small last step is noisy
    plan, filled = [[] for _ in range(parts)], 0
    for key, n in (sizes[i] for i in order):
        plan[filled * parts // total].append(key)  # the part it begins in
        filled += n
    batches, ordered, m = [], [], 0
    for keys in filter(None, plan):
        batches.append([])
        samples = [mine[key] for key in keys if key in mine]
        for group in micro_batches(samples, config.tokens_per_micro_batch):
            batch, n = make_batch([sample[:2] for sample in group]).to(device), len(ordered)
            ordered += [turn for sample in group for turn in sample[2]]
            m, tokens = m + len(batch.turn_of), slice(m, m + len(batch.turn_of))
            batches[-1].append(MicroBatch(batch, tokens, slice(n, len(ordered))))
    return Played(ordered, device), batches


@torch.no_grad()
def score_all(lm, batches):
    """One forward pass over every micro-batch -> Scores of the whole iteration."""
    parts = [lm.score(micro.batch) for mini in batches for micro in mini]
    empty = [Scores(*torch.zeros(4, 0, device=lm.device))]  # where this rank has no turn
    return Scores(*(torch.cat(column) for column in zip(*parts or empty)))


def score_old(lm, played, batches, config):
    """Line 3: V_old and Q_old come with the pass that gives the old log-probs. With --old rollout
    all are the sampler's own, and the pass is made over one micro-batch alone, for the log.
    -> Scores, and how far the log-probs of the sampler are from those of the pass on average."""
    micros = [micro for mini in batches for micro in mini]
    if config.old == "rollout":
        micros = micros[-1:]  # its sequences are long
    scores = score_all(lm, [micros])  # SAPO: no second model is run
    own = torch.cat([played.logp[micro.tokens] for micro in micros] or [played.logp])
    sums = gather([((scores.logp - own).abs().double().sum().item(), len(own))])
    off = sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))
    if config.old == "rollout":
        scores = Scores(played.logp, None, played.v / lm.r_max, played.q / lm.r_max)
    return scores, off


@torch.no_grad()
def turn_level_targets(played, v, q, config):
    """Lines 4 and 5, with V_old and Q_old (N,) in units of return -> Targets. Statistics are taken
    over all turns of the iteration."""
    paid = played.traj, played.turn, played.reward
    adv, y_v, y_q = turn_targets(*paid, played.done, v, q, gamma=config.gamma, lam=config.lam)
    adv = normalize_advantages(adv, invalid=played.invalid, c_inv=config.c_inv,
                               group=everyone())  # SAPO: one rollout per task, one mean for all
    return Targets(adv[played.turn_of], v, q, discounted_returns(*paid, gamma=config.gamma),
                   y_v / config.r_max, y_q / config.r_max)  # not clipped to [-1, 1]


class Learner:
    """SAPO: what is trained, and how. The other methods have other targets and losses."""

    def __init__(self, lm, config):
        self.lm, self.config, self.clock = lm, config, Clock()
        if config.beta:
            self.reference = dataclasses.replace(lm, model=copy.deepcopy(lm.model))
        moments = getattr(torch, config.moments)
        self.optimizers = {suffix: AdamW(model.parameters(), config.lr, moments=moments)
                           for suffix, (model, _) in self.trained().items()}
        self.steps = 0  # tried so far
        self.failed = 0  # how many of the latest steps in a row were not finite

    def trained(self):
        """{suffix of the names of its numbers in metrics.jsonl: (model, its loss)}."""
        return {"": (self.lm.model, self.loss)}  # SAPO: no second model

    def targets(self, played, batches, old):
        """Lines 4 and 5 -> Targets."""
        v, q = self.lm.r_max * old.p_v, self.lm.r_max * old.p_q
        if not self.config.c_v:
            v = torch.zeros_like(v)  # V is untrained; Q does not enter the advantage anyway
        return turn_level_targets(played, v, q, self.config)

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        """Line 6, Eq. 12 of a micro-batch -> (loss, info). n_tokens, n_turns are all ranks'."""
        c, m, n = self.config, micro.tokens, micro.turns
        return sapo_loss(
            *self.lm.score(micro.batch), logp_old=old.logp[m], adv=targets.adv[m],
            logp_ref=None if ref is None else ref[m], p_v_old=old.p_v[n], p_q_old=old.p_q[n],
            y_v=targets.y_v[n], y_q=targets.y_q[n], clip=c.clip, clip_v=c.clip_v, clip_q=c.clip_q,
            c_v=c.c_v, c_q=c.c_q, beta=c.beta, c_h=c.c_h, tokens=n_tokens, turns=n_turns)

    def step(self, mini, old, ref, targets, iteration):
        """Lines 6 and 7: one optimizer step on a mini-batch, of each model -> its numbers."""
        sizes = [[len(micro.batch.turn_of), len(micro.batch.start)] for micro in mini]
        sizes = [max(1, sum(n)) for n in zip(*gather(sizes + [[0, 0]]))]  # on all ranks
        info = {}
        for suffix, (model, loss) in self.trained().items():
            optimizer = self.optimizers[suffix]
            optimizer.param_groups[0]["lr"] = self.rate(suffix, iteration)
            out = take_step(model, optimizer, mini, self.config, lambda micro: loss(
                micro, old, ref, targets, *sizes))
            info |= {f"{key}{suffix}": x for key, x in out.items()}
            self.clock.lap(suffix[1:] or "update")
        self.steps += 1
        skipped = sum(x for key, x in info.items() if key.startswith("skipped"))
        self.failed = self.failed + 1 if skipped else 0
        return info

    def rate(self, suffix, iteration):
        """A straight line over the iterations, after a warm-up: Adam's first steps are large."""
        c = self.config
        warm = min(1.0, (self.steps + 1) / max(1, c.lr_warmup))
        decay = 1 - (1 - c.lr_end) * iteration / max(1, c.iterations)
        return (c.critic_lr if suffix else c.lr) * decay * warm


def take_step(model, optimizer, mini, config, loss_of):
    """One optimizer step on the sum of all ranks' losses -> the sums of their infos (*_max: maxima;
    shares: at most 1). loss_of(micro): (loss, info). A step that is not finite is not taken."""
    model.zero_grad(set_to_none=True)
    model.train(config.checkpointing)  # transformers recomputes activations in this mode alone
    infos = []
    for micro in mini:
        loss, info = loss_of(micro)
        loss.backward()
        infos.append(info | {"loss": loss.detach()})
    norm = sum_and_clip_gradients(model.eval(), GRAD_CLIP)
    infos = gather([{k: float(x) for k, x in info.items()} for info in infos])
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    out |= {k: min(x, 1.0) for k, x in out.items() if k.endswith(("fraction", "saturated"))}
    if finite := bool(np.isfinite(out["loss"]) and np.isfinite(norm)):
        optimizer.step()
    else:
        say(f"a step is skipped: its loss is {out['loss']:g}, its gradient's norm {norm:g}")
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
    return Sampler(lm, config.engine, config.context, config.max_new, temperature,
                   config.compile and temperature == 1, config.max_prompt, config.max_context)


# --------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Config:
    """The paper's settings, else verl-agent's, else ours. A comment is its flag's --help."""

    env: str = "house"  # house, alfworld, webshop or MODULE:CLASS
    model: str = "tiny"  # tiny: results/tiny-*; a hub id, a name (Qwen2.5-1.5B), a folder
    data: str = None  # alfworld: the folder that holds json_2.1.1; webshop: its catalogue's
    goals: str = "synthetic"  # webshop: synthetic or human
    out: str = None  # the run's folder; default runs/ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED
    seed: Count = 0  # random seed
    iterations: Count = 150  # of rollout and update; more of them stretch --lr_end's line
    algo: Literal[tuple(evaluation.NAMES)] = "sapo"  # the method
    tasks: Size = 128  # |B|: trajectories an iteration; --group of them share a task
    group: Size = None  # trajectories of the same task; default 8 for what compares them, else 1
    context: Literal["window", "full"] = "window"  # each turn its own prompt, or one conversation
    engine: Literal["kv", "hf"] = "kv"  # kv: our own sampler; hf: generate
    rows: Size = None  # games decoded side by side; default all of an iteration's
    compile: bool = None  # torch.compile for scoring and for sampling at 1; default on a GPU
    eager: bool = False  # no torch.compile; on a GPU decoding steps are captured all the same
    dtype: Literal["float32", "bfloat16"] = None  # of the weights; default by the device
    history: Count = 2  # turns shown in a window prompt
    horizon: Size = None  # turns an episode may take; default the environment's
    places: Size = 5  # house: its size
    objects: Size = 4  # house: things that can be carried
    max_new: Size = 512  # tokens a response may take
    max_prompt: Size = None  # tokens a window prompt may take (full: unused); default the env's
    max_context: Size = None  # tokens a conversation may take; default the model's limit
    workers: Workers = None  # processes that play; default 0 for house, else one per core, to 16

    gamma: Share = 0.95  # discount per turn
    lam: Share = 0.95  # lambda of GAE over turns, Eq. 5
    r_max: Positive = 10.0  # R_max, Eq. 2: returns must lie in [-R_max, R_max]; nothing checks it
    tau_v: Positive = 1.0  # value temperature, Eq. 1; not taken over from a trained --model
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two rows no text uses
    c_inv: Weight = 0.1  # a malformed turn's charge, as a return, Eq. 7; grpo etc.: after std
    clip: Positive = 0.2  # epsilon, Eq. 9
    clip_v: Positive = 0.2  # epsilon_V, Eq. 10
    clip_q: Positive = 0.2  # epsilon_Q
    c_v: Weight = 0.5  # weight of V's loss, Eq. 12; at 0, GAE takes V as 0
    c_q: Weight = 0.25  # weight of Q's loss
    beta: Weight = 0.01  # weight of the KL to the model SAPO started from
    c_h: Weight = 0.001  # weight of the entropy

    lr: Positive = 1e-6  # AdamW's learning rate
    lr_warmup: Count = 0  # optimizer steps over which lr rises from 0
    lr_end: Share = 1.0  # share of lr that a straight line reaches at the end; verl-agent's is 1
    critic_lr: Positive = 1e-5  # of a separate critic
    mini_batch: Size = 256  # turns an optimizer step
    tokens_per_micro_batch: Size = 8192  # padded tokens a forward pass
    old: Literal["recompute", "rollout"] = "recompute"  # line 3: a pass, or the sampler's own
    checkpointing: bool = False  # recompute activations: less memory, a third more time
    moments: Literal["float32", "bfloat16"] = "float32"  # of AdamW; 16 bits rounded randomly

    eval_games: Count = None  # held-out games; default the env's; outside house --tasks if below 64
    eval_every: Count = 0  # iterations between evaluations while training, whose best is kept
    save_every: Size = None  # iterations between checkpoints; default: they take 1/20 of the time
    resume: bool = False  # go on with the run in --out; flags that are not given are the run's


# What the shop and a tiny model need differently; the later beats the earlier, a flag beats both.
PRESETS = {
    "webshop": dict(mini_batch=64),  # its episodes are short
    "tiny": dict(dtype="float32", compile=False, iterations=40, tasks=64, max_new=16,
                 max_prompt=8192, lr=4e-4, critic_lr=4e-4, lr_warmup=20, lr_end=0.0, mini_batch=128,
                 tokens_per_micro_batch=4096)}
GRAD_CLIP = 1.0  # verl-agent's, as is AdamW's weight decay of 0.01
ROLLOUT, SHUFFLE, TASKS = range(3)  # what a seed is for; imitate.py has 3 and 4, eval.py 5 to 7
PATIENCE = 5  # steps in a row that may fail before the run stops
# What a resumed run may change: its length and surroundings, and what helps against low memory.
MAY_CHANGE = {"iterations", "save_every", "workers", "data", "out", "resume", "rows",
              "tokens_per_micro_batch", "checkpointing", "compile", "eager"}


def parse_config(argv=None):
    """Flags -> Config. A flag beats the presets, which beat the defaults; a resumed run has its own
    settings and refuses other flags but MAY_CHANGE. All of it is written to config.json."""
    given = vars(flags_of(Config, PRESETS, "SAPO, Algorithm 1.").parse_args(argv))
    asked, stored = Config(**given), {}
    name = name_of(given, vars(Config()) | preset_of(asked), MAY_CHANGE)
    out = os.path.normpath(asked.out or f"runs/{name}")
    if asked.resume and (os.path.isfile(f"{out}/config.json") or given.keys() <= {"resume", "out"}):
        types = {f.name: f.type for f in dataclasses.fields(Config)}
        stored = typed(types, settings_of(out), f"{out}/config.json")
        asked = Config(**stored | given)
    config = with_defaults(Config(**preset_of(asked) | stored | given | {"out": out}))  # in turn
    other = [f"--{k} is {v} there" for k, v in stored.items()
             if k not in MAY_CHANGE and getattr(config, k) != v]
    if other:
        raise ValueError(f"--resume: {out} was begun otherwise ({'; '.join(other)})")
    check(config)
    return config


def preset_of(config):
    kinds = {"webshop": config.env == "webshop", "tiny": is_tiny(config.model)}
    return {k: v for kind, preset in PRESETS.items() if kinds[kind] for k, v in preset.items()}


def with_defaults(config):
    """Fills in what follows from other settings or from the machine."""
    env, few = envs.known(config.env), config.tasks < 64 and config.env != "house"
    cuda = torch.cuda.is_available()
    defaults = {"horizon": env.horizon, "max_prompt": env.max_prompt,
                "workers": envs.default_workers(config.env),
                "dtype": "bfloat16" if cuda else "float32", "compile": cuda,
                "eval_games": config.tasks if few else env.held_out[1],
                "group": 8 if LEARNERS[config.algo] is Grouped else 1}
    config = dataclasses.replace(config, **{k: v for k, v in defaults.items()
                                            if getattr(config, k) is None})
    return dataclasses.replace(config, compile=config.compile and not config.eager)


def check(c):
    """Refuses settings that do not fit each other, or the machine, before anything is loaded."""
    used = {"sapo": "lam gamma c_v clip_v c_q clip_q", "ppo": "clip_v critic_lr", "gigpo": "gamma",
            "sapo-separate": "lam gamma clip_v critic_lr"}.get(c.algo.removesuffix("-nostd"), "")
    used = [*used.split(), *envs.known(c.env).flags, *["history"] * (c.context == "window")]
    some = *"lam gamma c_v clip_v c_q clip_q critic_lr history".split(), *envs.OPTIONS
    usual = vars(Config()) | preset_of(c)
    idle = ", ".join(f"--{k}" for k in some if k not in used and getattr(c, k) != usual[k])
    model, own = (os.path.realpath(path) + os.sep for path in (c.model, c.out))
    for wrong, why in (
            (os.path.isdir(c.model) and model.startswith(own), f"--model {c.model} is or lies in "
             "the run's own folder; give another --out"),
            (idle, f"{idle} does nothing with --algo {c.algo} --env {c.env} --context {c.context}"),
            (c.env == "alfworld" and not importlib.util.find_spec("alfworld"),
             "a package is not installed: pip install alfworld"),
            (c.eval_every and not c.eval_games, "--eval_every has no use for --eval_games 0"),
            (c.max_context and c.max_context <= c.max_new, f"--max_context {c.max_context} leaves "
             f"no room for a prompt beside a response of --max_new {c.max_new}"),
            (c.tasks % c.group, f"--tasks {c.tasks} is no multiple of --group {c.group}"),
            (c.group == 1 and LEARNERS[c.algo] is Grouped, f"--algo {c.algo} compares the "
             "trajectories of a task: --group 1 is too few"),
            (c.algo == "empg" and c.old == "rollout", "--algo empg needs the entropies of the pass "
             "that --old rollout saves")):
        if wrong:
            raise ValueError(why)
    for split in ("train", envs.known(c.env).held_out[0]):
        envs.tasks(c.env, split, **envs.options_for(vars(c)))


# ---------------------------------------------------------------------------------------- logging


def usage(pool, sampler):
    """-> seconds spent on games or waiting for them, tokens encoded and sampled, by now."""
    return np.array([pool.seconds, sampler.tokens_encoded, sampler.tokens_sampled])


def summary(turns, targets, steps, used, categories):
    """What metrics.jsonl holds, over all ranks; sampler_off and what follows it `train` adds:

    success, score, success_by_category   of the iteration's episodes, sampled at temperature 1
    valid_actions, admissible_actions     shares of turns: in the right format; with a command that
                                          the game offered
    truncated, outgrown                   shares of episodes: cut short; because no prompt fit
    loss, loss_policy, loss_v, loss_q     Eq. 12, 9, 11; ..._critic are a separate critic's
    kl, kl_max                            mean and largest KL of a token to the start, in nats
    entropy                               of the policy, in nats a token
    ratio_max, *clip_fraction             of Eq. 8; shares that Eq. 9 and 10 hold back
    v_saturated, q_saturated              shares of readouts where Eq. 1 has no gradient
    v_explained_variance, q_...           of the discounted return (PPO: of the whole return)
    grad_norm, skipped                    before clipping; steps that were not finite
    v_mean, q_mean, return_mean           of old values and returns, over turns
    tokens_encoded, tokens_sampled        in the rollout
    sampler_off                           mean |log-prob of the sampler - of the scoring pass|
    held_out                              with --eval_every, success on held-out games at T = 0.4
    time_*                                seconds on rank 0: rollout (env: its games), old and ref
                                          (line 3), update; a separate critic's values and critic;
                                          save: the last checkpoint; total, without held_out
    """
    v, q, returns = (torch.tensor(gather(x.tolist()))
                     for x in (targets.v, targets.q, targets.returns))
    names = "won score truncated outgrown category done invalid admissible".split()
    rows = gather([{name: getattr(t, name) for name in names} for t in turns])
    ends = [row for row in rows if row["done"]]
    won = {name: [row["won"] for row in ends if row["category"] == category]
           for category, name in categories.items()}
    shares = {name: mean([row[name] for row in ends]) for name in names[:4]}
    _, encoded, sampled = sum(gather([used]))
    out = {"episodes": len(ends), "turns": len(rows), "success": shares.pop("won"), **shares,
           "tokens_encoded": int(encoded), "tokens_sampled": int(sampled), "time_env": used[0],
           "success_by_category": {c: mean(x) if x else None for c, x in won.items()},
           "valid_actions": mean([not row["invalid"] for row in rows]),
           "admissible_actions": mean([row["admissible"] for row in rows]),
           "return_mean": returns.mean().item()}
    for name, value in (("v", v), ("q", q)):
        out |= {f"{name}_mean": value.mean().item(),
                f"{name}_explained_variance": explained_variance(value, returns)}
    for key in steps[0]:
        over = max if key.endswith("_max") else sum if key.startswith("skipped") else mean
        out[key] = over([step[key] for step in steps])
    return out


def write_log(metrics, turns, config):
    """Rank 0: a line of metrics.jsonl, and of every tenth iteration and the last the first
    trajectory as text, in which what the policy sampled stands between >>> and <<<."""
    if rank() > 0:
        return
    with open(f"{config.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    if metrics["iteration"] % 10 == 0 or metrics["iteration"] == config.iterations - 1:
        os.makedirs(f"{config.out}/transcripts", exist_ok=True)
        write_file(f"{config.out}/transcripts/{metrics['iteration']:04d}.txt", "\n\n".join(
            f"--- {t.task}, turn {t.turn + 1}: V {t.v:.2f}, Q {t.q:.2f}, reward {t.reward:g}\n"
            f"{t.prompt}\n>>> {t.text} <<<" for t in turns if t.traj == turns[0].traj))


# -------------------------------------------------------------------------------------------- run


def evaluate(lm, pool, config, **options):
    return evaluation.of_run(config, pool, lambda t: sampler_for(lm, config, t), **options)


def eval_now(lm, pool, config, done):
    """Every --eval_every iterations: success on held-out games, as an entry of metrics.jsonl. What
    is better than all before is kept in RUN/best."""
    if not config.eval_every or done % config.eval_every:
        return {}
    played = evaluate(lm, pool, config, temperatures=[evaluation.TEMPERATURE])
    success = evaluation.share(played[evaluation.TEMPERATURE])["success"]
    if success > gather([best_of(config.out)])[0]:
        write_folder(f"{config.out}/best", lambda to: lm.save(to) if rank() == 0 else None)
        say(f"after iteration {done}: success {success:.1%} on held-out games, the best so far")
    return {"held_out": success}


def prepare(config, pool):
    """-> the model a run starts from, after a look at its size and its readouts."""
    name, gpu = config.model, torch.cuda.is_available()
    if name == "tiny":  # tools/imitate.py made these two
        name = f"{ROOT}/results/tiny-{'alfworld' if config.env == 'alfworld' else 'house'}"
    verify(name)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
    lm = load(name, dtype=getattr(torch, config.dtype), value_tokens=config.value_tokens,
              tau_v=config.tau_v, r_max=config.r_max, device=device)
    games = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    size = sum(p.numel() for p in lm.model.parameters()) / 1e6
    say(f"{config.model}: {size:.1f} M parameters on {lm.device}, {world()} rank(s); "
        f"{config.env}: {len(games)} training games")
    for key, game in enumerate(games[:4]):
        pool.start(key, game)
    begun = pool.gather(range(len(games[:4])))
    prompts = [pool.env.episode(*answer).window_prompt() for answer in begun]
    for key in range(len(begun)):
        pool.drop(key)
    middle, spread, saturated = readout_at_start(lm, [lm.chat.first(text) for text in prompts])
    say(f"w+, w- = {lm.value_ids} {lm.tokenizer.convert_ids_to_tokens(list(lm.value_ids))}: logit "
        f"difference {middle:.3f} +- {spread:.3f}, {saturated:.0%} saturated")
    return fitted(lm, config)


def fitted(lm, config):
    """-> lm as --compile and --checkpointing want it. Activations are recomputed in the backward
    pass of training mode alone."""
    from machine.fast import compiled_scoring
    if config.checkpointing:
        dropout = [m.p for m in lm.model.modules() if isinstance(m, torch.nn.Dropout)]
        if any(dropout) or getattr(lm.model.config, "attention_dropout", 0):
            raise ValueError("--checkpointing: this model has dropout, which would be active")
        # transformers 5.17 knows the second name alone, and 6 will know the first
        enable = getattr(lm.model, "activation_checkpointing_enable", None)
        (enable or lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if not config.compile:
        return lm
    say("compiling what scores and samples; the first time takes minutes, --eager goes without")
    lm.model.train(config.checkpointing)  # as in an update
    try:
        return compiled_scoring(lm, config.tokens_per_micro_batch)
    finally:
        lm.model.eval()


def run(config):
    """Evaluation, Algorithm 1, evaluation."""
    began, out = time.time(), config.out
    with contextlib.ExitStack() as held:
        claim(out, held)
        pool = held.enter_context(contextlib.closing(
            envs.Pool(config.env, envs.options_for(vars(config)), config.workers)))
        try:
            with alive(lambda: f"loading {config.model}"):
                lm = prepare(config, pool)
            checkpoint = newest_checkpoint(out) if config.resume else None
            begin_folder(out, dataclasses.asdict(config), held, checkpoint)
            before = evaluate(lm, pool, config, path=f"{out}/before.json")
            say("before training: " + (", ".join(
                f"success {evaluation.share(told)['success']:.1%} on {len(told)} held-out games at "
                f"T = {t:g}" for t, told in before.items()) or "no evaluation, --eval_games is 0"))
            train(lm, pool, config, checkpoint)
            after = evaluate(lm, pool, config) if config.iterations else before
            peak = max(gather([peak_memory()]))
            write_folder(f"{out}/final", lambda to: lm.save(to) if rank() == 0 else None)
        except KeyboardInterrupt:  # Ctrl-C, or SIGTERM
            done = iterations_in(newest_checkpoint(out))
            say("\ninterrupted; " + (f"--resume --out {out} goes on after iteration {done}" if done
                                     else "there is no checkpoint yet"))
            raise SystemExit(1) from None
        if rank() == 0:
            write_file(f"{out}/cost.json", json.dumps({"peak_memory": peak}))
            print(evaluation.write_of_run(before, after, config))
            if config.iterations:
                evaluation.plot([out], f"{out}/curves.png")
            print(f"wrote {out}: {' '.join(sorted(glob.glob('*', root_dir=out)))}\n"
                  f"{config.iterations} iterations; this start took "
                  f"{(time.time() - began) / 60:.1f} minutes\n"
                  f"next: python eval.py --model {out}")
        barrier()  # a rank that leaves early would pull the others down


# -------------------------------------------------------------- the methods SAPO is compared with


class Rival(Learner):
    """Eq. 12 without the values: the policy's own V and Q are not trained."""

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        c, logp, h = self.config, *self.lm.score(micro.batch)[:2]
        return actor_loss(logp, h, logp_old=old.logp[micro.tokens], adv=targets.adv[micro.tokens],
                          logp_ref=None if ref is None else ref[micro.tokens], clip=c.clip,
                          beta=c.beta, c_h=c.c_h, tokens=n_tokens)


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
        first, everybody = sum(gather([n])[:rank()]), zip(*gather(mine))
        adv = self.estimate(*map(torch.tensor, everybody))[first:first + n].float()
        adv = adv.to(self.lm.device) - config.c_inv * played.invalid
        zeros = torch.zeros_like(played.reward)
        returns = discounted_returns(played.traj, played.turn, played.reward, gamma=config.gamma)
        return Targets(adv[played.turn_of], zeros, zeros, returns)

    def estimate(self, traj, turn, state, reward, entropy):
        """(N,) over the turns of all ranks -> advantages (N,)."""
        algo, reward = self.config.algo, reward.double()
        score = episode_returns(traj, reward)
        group = traj // self.config.group  # pick_tasks lays a task's trajectories side by side
        if algo == "rloo":
            return rloo_advantages(traj, group, score)
        if algo.startswith("gigpo"):
            return gigpo_advantages(traj, turn, group, state, reward, gamma=self.config.gamma,
                                    std=algo == "gigpo")
        adv = grpo_advantages(traj, group, score)
        return empg_advantages(adv, traj, turn, entropy) if algo == "empg" else adv


class SeparateCritic(Rival):
    """SAPO's turn-level targets with V from a second model and no Q: what the shared model is
    compared with."""

    axis = "turns"  # of the values that are learned

    def __init__(self, lm, config):
        self.critic = Critic(lm)
        super().__init__(lm, config)

    def trained(self):
        return super().trained() | {"_critic": (self.critic, self.loss_critic)}

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

    def loss_critic(self, micro, old, ref, targets, n_tokens, n_turns):
        part, count = getattr(micro, self.axis), n_tokens if self.axis == "tokens" else n_turns
        return value_loss(self.values(micro), targets.value_old[part], targets.value_target[part],
                          clip=self.config.clip_v, denom=count)[0], {}


class PPO(SeparateCritic):
    """PPO as verl-agent has it: a turn is paid the episode's return, less its charge. With gamma =
    lambda = 1 a token's advantage is that less its value; they are whitened over all tokens."""

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
    with one_line_errors("train.py", envs.GameError):
        join_ranks()
        run(parse_config())


if __name__ == "__main__":
    main()
