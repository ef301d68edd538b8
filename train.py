"""Algorithm 1: one causal language model learns to act, and to value, from one rollout per task.

    python train.py                                                a tiny model in an embedded house
    python train.py --env alfworld --model Qwen2.5-1.5B-Instruct   the paper's setting, on one GPU
    torchrun --nproc_per_node=2 --shutdown-timeout 600 train.py ...   ranks share the tasks
    python train.py --resume --out RUN                             goes on after a kill

It reads from the loop, `train`, to what it calls: `Learner.learn` is lines 3 to 7, `Run` surrounds
them with checkpoints and a log, `Config` has a flag a field. The methods SAPO is compared with
stand last. N turns and M response tokens are this rank's; sums and means take in all ranks.
"""
import contextlib
import copy
import dataclasses
import gc
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

import envs
import eval as evaluation
from machine import runs
from machine.cli import choose_threads, flags_of, one_line_errors, out_of_memory, progress
from machine.ranks import (AdamW, Stopped, barrier, everyone, from_rank_0, from_ranks, join_ranks,
                           mean, rank, say, stop, sum_over_ranks, world)
from model import (Batch, Critic, Scores, compiled_scoring, is_tiny, load, make_batch,
                   micro_batches, readout_at_start)
from rollout import ROLLOUT, SHUFFLE, TASKS, rollout
from sapo import (actor_loss, discounted_returns, empg_advantages, episode_returns,
                  explained_variance, gigpo_advantages, grpo_advantages, normalize_advantages,
                  rloo_advantages, sapo_loss, token_gae, turn_targets, value_loss)


def train(learner, pool, config, checkpoint=None):
    """Algorithm 1, from `checkpoint` on, if any. Without config.out it writes no file."""
    sampler = evaluation.sampler_for(learner.lm, config)
    with Run(sampler, learner, pool, config, checkpoint) as run:
        for iteration in run:  # it resumes, saves, and stops on a signal
            turns = rollout(  # line 2  # SAPO: one trajectory per task
                sampler, run.games(iteration), pool, trajs=range(rank(), config.tasks, world()),
                seed=(config.seed, iteration, ROLLOUT), rows=config.rows, history=config.history)
            pool.load(run.games(iteration + 1))  # in the background
            metrics = learner.learn(turns, iteration)  # lines 3 to 7
            run.log(iteration, turns, metrics)


class Learner:
    """SAPO: what is trained, and how. The other methods have other targets and losses."""

    critic = None  # SAPO: no second model

    def __init__(self, lm, config):
        self.lm, self.config, self.clock = lm, config, runs.Clock()
        if config.beta:
            self.reference = dataclasses.replace(lm, model=copy.deepcopy(lm.model))
        # what is trained, by what the names of its numbers in metrics.jsonl end in
        self.models = {"": lm.model} | ({"_critic": self.critic} if self.critic else {})
        moments = getattr(torch, config.moments)
        self.optimizers = {end: AdamW(model.parameters(), config.lr, moments=moments)
                           for end, model in self.models.items()}
        self.steps = 0  # tried so far
        self.failed = 0  # how many of the latest steps in a row were not finite

    def learn(self, turns, iteration):
        """Lines 3 to 7 of Algorithm 1 on an iteration's turns -> its numbers for metrics.jsonl."""
        self.clock.lap("rollout")  # is what came before
        played, batches = pack(turns, self.config, iteration, self.lm.device)
        old, sampler_off = score_old(self.lm, played, batches, self.config)  # line 3
        self.clock.lap("old")
        ref = score_all(self.reference, batches, "ref").logp if self.config.beta else None
        self.clock.lap("ref")
        from_ranks([], finish=True)  # weights change next: a signal now waits for the end
        targets = self.targets(played, batches, old)  # lines 4 and 5
        note_advantages(played, targets.adv)
        with progress("update", padded_tokens(batches) * len(self.models), "tokens") as bar:
            steps = []
            for mini in batches:
                steps.append(self.step(mini, old, ref, targets, iteration))  # lines 6 and 7
                bar.update(padded_tokens([mini]) * len(self.models))
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()  # the rollout can use the memory
        return {"sampler_off": sampler_off} | numbers_of(targets, steps)

    def targets(self, played, batches, old):
        """Lines 4 and 5 -> Targets. Statistics are taken over all turns of the iteration."""
        c = self.config
        v, q = c.r_max * old.p_v, c.r_max * old.p_q
        if not (c.c_v or self.critic):
            v = torch.zeros_like(v)  # V is untrained; Q does not enter the advantage anyway
        paid = played.traj, played.turn, played.reward
        adv, y_v, y_q = turn_targets(*paid, played.done, v, q, gamma=c.gamma, lam=c.lam)
        adv = normalize_advantages(adv, invalid=played.invalid, c_inv=c.c_inv,
                                   group=everyone())  # SAPO: one rollout per task, one mean for all
        return Targets(adv[played.turn_of], v, q, discounted_returns(*paid, gamma=c.gamma),
                       y_v / c.r_max, y_q / c.r_max)  # not clipped to [-1, 1]

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        """Line 6, and Eq. 12 of a micro-batch -> (loss, info). n_tokens, n_turns are all ranks'."""
        c, m, n = self.config, micro.tokens, micro.turns
        return sapo_loss(
            *self.lm.score(micro.batch), logp_old=old.logp[m], adv=targets.adv[m],
            logp_ref=None if ref is None else ref[m], p_v_old=old.p_v[n], p_q_old=old.p_q[n],
            y_v=targets.y_v[n], y_q=targets.y_q[n], clip=c.clip, clip_v=c.clip, clip_q=c.clip,
            c_v=c.c_v, c_q=c.c_q, beta=c.beta, c_h=c.c_h, tokens=n_tokens, turns=n_turns)

    def step(self, mini, old, ref, targets, iteration):
        """Lines 6 and 7: one optimizer step on a mini-batch, of each model -> its numbers."""
        c = self.config
        sizes = from_ranks([(len(micro.batch.turn_of), len(micro.batch.start)) for micro in mini])
        n_tokens, n_turns = map(sum, zip(*sizes))
        warmup = min(1.0, (self.steps + 1) / max(1, c.lr_warmup))  # Adam's first steps are large
        decay = 1 - (1 - c.lr_end) * iteration / c.iterations
        info = {}
        for end, model in self.models.items():
            loss = self.loss_critic if end else self.loss
            optimizer = self.optimizers[end]
            optimizer.param_groups[0]["lr"] = (c.critic_lr if end else c.lr) * decay * warmup
            infos = self.gradients_within_memory(
                model, mini, lambda micro: loss(micro, old, ref, targets, n_tokens, n_turns))
            out = apply_gradients(model, optimizer, infos)
            info |= {f"{key}{end}": x for key, x in out.items()}
            self.clock.lap("critic" if end else "update")
        self.steps += 1
        self.failed = self.failed + 1 if info["skipped"] or info.get("skipped_critic") else 0
        if self.failed == PATIENCE:
            raise ValueError(f"{PATIENCE} steps in a row were not finite; go on from the last "
                             f"good weights: --model {c.out}/checkpoint-N --out NEW, a lower --lr")
        return info

    def gradients_within_memory(self, model, mini, loss_of):
        """The gradients of a mini-batch -> its micro-batches' infos. If memory is short, it is done
        again with half the tokens in a micro-batch, as are all that follow: the same numbers up to
        rounding, because the losses have the mini-batch's denominators."""
        while True:
            micros = [part for micro in mini
                      for part in split(micro, self.config.tokens_per_micro_batch)]
            try:
                return add_up_gradients(model, micros, loss_of, self.config.checkpointing)
            except RuntimeError as error:
                rows, width = max((micro.batch.ids.shape for micro in micros), key=math.prod)
                if not out_of_memory(error) or rows == 1:
                    raise
            # here, where nothing refers to the failed pass any more
            half = rows * width // 2
            self.config = dataclasses.replace(self.config, tokens_per_micro_batch=half)
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"out of memory in an update of rank {rank()}: it is done again, and goes on, "
                  f"with --tokens_per_micro_batch {half}", flush=True)

    def save(self, folder):
        """Writes what decides what comes next; random numbers and the order of tasks follow
        from the seed and the iteration. Each rank writes its share of the optimizers' state."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers.values()]
        torch.save({"steps": self.steps, "states": states}, f"{folder}/learner-{rank()}.pt")
        if rank() == 0:
            self.lm.save(folder)
            torch.save(self.critic and self.critic.state_dict(), f"{folder}/critic.pt")

    def restore(self, folder):
        """Becomes what it was when `folder` was written, on any number of ranks."""
        if not (folder / "sapo.json").is_file():  # then `load` would begin with new w+ and w-
            raise ValueError(f"{folder} lacks sapo.json")
        saved = load(str(folder), dtype=self.lm.model.dtype, device="cpu").model
        self.lm.model.load_state_dict(saved.state_dict())
        if self.critic:
            self.critic.load_state_dict(runs.read_tensors(folder / "critic.pt"))
        found = [set() for _ in self.optimizers]
        for share in folder.glob("learner-*.pt"):
            kept = runs.read_tensors(share)
            self.steps = kept["steps"]
            for optimizer, states, known in zip(self.optimizers.values(), kept["states"], found):
                optimizer.take(states)
                known.update(states)
        if [*map(len, found)] != [len(optimizer.owner) for optimizer in self.optimizers.values()]:
            raise ValueError(f"{folder} lacks one of its learner-*.pt: some ranks' share of the "
                             "optimizer's state")


# ----------------------------------------------------------------------------- the optimizer step

GRAD_CLIP = 1.0  # the largest norm of a gradient; verl-agent's, as is the weight decay


def add_up_gradients(model, micros, loss_of, checkpointing=False):
    """Line 7: the gradients of the micro-batches' losses, of which loss_of(micro) gives (loss,
    info) -> the infos, and in them the losses."""
    model.zero_grad(set_to_none=True)
    model.train(checkpointing)  # transformers recomputes activations in this mode alone
    infos = []
    for micro in micros:
        loss, info = loss_of(micro)
        loss.backward()
        infos.append(info | {"loss": loss.detach()})
    model.eval()
    return infos


def apply_gradients(model, optimizer, infos):
    """Line 7: one optimizer step on the sum of all ranks' gradients, because the losses have global
    denominators. Returns the sums of the infos (*_max: maxima; shares: at most 1), the gradient's
    norm before it is clipped, and whether the step was skipped as not finite."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
    sum_over_ranks([p.grad for p in model.parameters()])
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
    rows = [torch.stack([*info.values()]) for info in infos]
    rows = torch.stack(rows).tolist() if rows else []  # the only wait for a GPU but the norm's
    infos = from_ranks([dict(zip(info, row)) for info, row in zip(infos, rows)])
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    out |= {k: min(x, 1.0) for k, x in out.items() if k.endswith(("fraction", "saturated"))}
    finite = bool(np.isfinite(out["loss"]) and np.isfinite(norm))
    if finite:
        optimizer.step()
    else:
        say(f"a step is skipped: its loss is {out['loss']:g}, its gradient's norm {norm:g}")
    return out | {"grad_norm": norm, "skipped": int(not finite)}


# ------------------------------------------------------------- turns, batches, scores and targets

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
    """What an update learns from; v, q, returns are for the log alone."""

    adv: torch.Tensor  # (M,) the advantage on every token, Eq. 7
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) the discounted return from each turn (PPO: undiscounted)
    y_v: torch.Tensor = None  # (N,) Eq. 6 over R_max; (M,) in PPO, as is value_old
    y_q: torch.Tensor = None
    value_old: torch.Tensor = None  # (N,) V_old of a separate critic, over R_max


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
    of nearly equal size, fewer where a sample is longer -> Played, and of each mini-batch this
    rank's micro-batches, if any."""
    mine = {(s[2][0].traj, s[2][0].turn): s for s in make_samples(turns, config.context)}
    keys, sizes = zip(*sorted(from_ranks([(key, len(its[2])) for key, its in mine.items()])))
    order = np.random.default_rng([config.seed, iteration, SHUFFLE]).permutation(len(keys))
    sizes = np.array(sizes)[order]
    parts = -(-sizes.sum() // config.mini_batch)  # equal ones, because a small last step is noisy
    part = (sizes.cumsum() - sizes) * parts // sizes.sum()  # the one that each sample begins in
    batches = []
    ordered = []  # turns
    m = 0  # tokens so far
    for number in np.unique(part):
        batches.append([])
        samples = [mine[keys[i]] for i in order[part == number] if keys[i] in mine]
        for alike in micro_batches(samples, config.tokens_per_micro_batch):
            batch = make_batch([sample[:2] for sample in alike]).to(device)
            tokens = slice(m, m + len(batch.turn_of))
            its_turns = slice(len(ordered), len(ordered) + len(batch.start))
            batches[-1].append(MicroBatch(batch, tokens, its_turns))
            ordered += [turn for sample in alike for turn in sample[2]]
            m = tokens.stop
    return Played(ordered, device), batches


def split(micro, budget):
    """A micro-batch -> parts of at most `budget` padded tokens, or of one row. There are seldom
    several, so it may wait for the GPU."""
    b = micro.batch
    rows = max(1, budget // b.ids.shape[1])
    if rows >= len(b.ids):
        return [micro]
    parts, n, m = [], 0, 0  # turns and tokens so far
    for first in range(0, len(b.ids), rows):
        inside = lambda row: (row >= first) & (row < first + rows)
        turns, tokens = inside(b.row), inside(b.token_row)
        length = b.length[first:first + rows]
        batch = Batch(b.ids[first:first + rows, :length.max()], length, b.row[turns] - first,
                      b.start[turns], b.end[turns], b.turn_of[tokens] - n,
                      b.token_row[tokens] - first, b.token_col[tokens])
        end_n, end_m = n + len(batch.row), m + len(batch.token_row)
        parts.append(MicroBatch(
            batch, slice(micro.tokens.start + m, micro.tokens.start + end_m),
            slice(micro.turns.start + n, micro.turns.start + end_n)))
        n, m = end_n, end_m
    return parts


def padded_tokens(batches):
    return sum(micro.batch.ids.numel() for mini in batches for micro in mini)


@torch.no_grad()
def score_all(lm, batches, what="old"):
    """One forward pass over every micro-batch -> Scores of the whole iteration. `what`: a word for
    the progress bar."""
    parts = [Scores(*torch.zeros(4, 0, device=lm.device))]  # a rank may have no turn
    with progress(what, padded_tokens(batches), "tokens") as bar:
        for micro in (micro for mini in batches for micro in mini):
            parts.append(lm.score(micro.batch))
            bar.update(micro.batch.ids.numel())
    return Scores(*map(torch.cat, zip(*parts)))


def score_old(lm, played, batches, config):
    """Line 3: V_old and Q_old come with the pass that gives the old log-probs. With --old rollout
    all are the sampler's own, and the pass is made over one micro-batch alone, for the log.
    -> Scores, and how far the log-probs of the sampler are from those of the pass on average."""
    micros = [micro for mini in batches for micro in mini]
    if config.old == "rollout":
        micros = micros[-1:]  # its sequences are long
    scores = score_all(lm, [micros])  # SAPO: no second model is run
    own = played.logp[len(played.logp) - len(scores.logp):]
    sums = from_ranks([((scores.logp - own).abs().double().sum().item(), len(own))])
    off = sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))
    if config.old == "rollout":
        scores = Scores(played.logp, None, played.v / lm.r_max, played.q / lm.r_max)
    return scores, off


def note_advantages(played, adv):
    """Tells each turn the mean advantage of its tokens, for its page; in SAPO all have one."""
    sums = torch.zeros_like(played.reward).index_add(0, played.turn_of, adv)
    for turn, advantage in zip(played.turns, (sums / played.turn_of.bincount()).tolist()):
        turn.advantage = advantage


def numbers_of(targets, steps):
    """What all ranks' targets and steps say, under the names of `Run.log`."""
    rows = from_ranks([*zip(targets.returns.tolist(), targets.v.tolist(), targets.q.tolist())])
    returns, v, q = map(torch.tensor, zip(*rows))
    out = {"return_mean": returns.mean().item(), "return_max": returns.abs().max().item(),
           "v_mean": v.mean().item(), "q_mean": q.mean().item(),
           "v_explained_variance": explained_variance(v, returns),
           "q_explained_variance": explained_variance(q, returns)}
    for key in steps[0]:
        over = max if key.endswith("_max") else sum if key.startswith("skipped") else mean
        out[key] = over([step[key] for step in steps])
    return out


# ------------------------------------------------------------------- what surrounds an iteration

class Run:
    """Iterates over the numbers of the iterations that are left: it goes on after a checkpoint and
    writes the next ones. On SIGTERM or Ctrl-C it saves the last finished iteration and leaves."""

    def __init__(self, sampler, learner, pool, config, checkpoint=None):
        self.sampler, self.learner, self.pool, self.config = sampler, learner, pool, config
        lm = learner.lm
        if (lm.tau_v, lm.r_max) != (config.tau_v, config.r_max):
            raise ValueError(f"tau_v and r_max of the model are {lm.tau_v:g} and {lm.r_max:g}, of "
                             f"the settings {config.tau_v:g} and {config.r_max:g}")
        self.ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
        self.done = self.saved = self.first = runs.iterations_in(checkpoint)
        self.signals = stop.on_signals()
        self.lost = 0  # iterations in a row
        self.said = set()  # warnings
        self.lines = []  # of metrics.jsonl
        if config.out and rank() == 0:
            self.lines = runs.log_of(config.out, self.done)
        if checkpoint:
            learner.restore(checkpoint)
        self.wandb = runs.begin_wandb(config) if config.wandb and rank() == 0 else None

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __iter__(self):
        config, clock = self.config, self.learner.clock
        clock.start()
        for iteration in range(self.first, config.iterations):
            self.pool.seconds = 0.0
            self.sampler.tokens_encoded = self.sampler.tokens_sampled = 0
            stop.may_abandon = True  # until weights change
            stop.leave_if_possible()
            yield iteration
            clock.start()
            self.done = iteration + 1
            leave = any(from_ranks([stop.requested]))
            if leave or self.done % config.save_every == 0 or self.done == config.iterations:
                self.save()
                clock.lap("save")  # which is logged with the next iteration
            if leave:
                raise Stopped(agreed=True)

    def __exit__(self, kind, error, trace):
        try:
            if kind is Stopped:
                stop.may_abandon = False
                if not error.agreed:
                    from_ranks([])  # tells the other ranks
                self.save()
                say(f"{self.done} iterations are saved; --resume --out {self.config.out} goes on"
                    if self.done else "no iteration was finished, so there is nothing to save")
            elif kind is None and self.wandb:
                self.wandb.finish()
        finally:
            self.signals.__exit__(kind, error, trace)

    def save(self):
        """A checkpoint of the last finished iteration, if there is none yet and a folder for it."""
        if self.done > self.saved and self.config.out:
            runs.save_checkpoint(self.config.out, self.done, self.learner.save)
            self.saved = self.done

    def games(self, iteration):
        """This rank's tasks of an iteration, --group_size times each; none after the last one.
        Every game comes once in a pass over the games, in an order drawn anew for each pass."""
        c, n = self.config, len(self.ids)
        count = c.tasks // c.group_size if iteration < c.iterations else 0
        ids = []
        for i in range(iteration * count, (iteration + 1) * count):
            order = np.random.default_rng([c.seed, i // n, TASKS]).permutation(n)
            ids += [self.ids[order[i % n]]] * c.group_size
        return ids[rank()::world()]

    def log(self, iteration, turns, metrics):
        """Adds what an iteration's turns say to what the learner says, prints it, and writes it as
        a line of metrics.jsonl, over all ranks:

        episodes, turns, tokens_*          how many were played, encoded, sampled
        success, score                     of the episodes, sampled at temperature 1
        valid_actions, admissible_actions  shares of turns: in the format; offered by the game
        truncated, outgrown                shares of episodes: cut short; as no prompt fit
        cut                                share of responses that --max_new cut short
        loss, loss_policy, loss_v, loss_q  Eq. 12, 9, 11; ..._critic are a separate critic's
        kl, kl_max, entropy                a token's KL to the starting model, mean and largest, and
                                           the policy's entropy, in nats
        ratio_max, *clip_fraction          of Eq. 8; shares that Eq. 9 and 10 hold back
        v_saturated, q_saturated           shares of readouts where Eq. 1 has no gradient
        v_, q_explained_variance           of the discounted return (PPO: of the whole return)
        v_mean, q_mean, return_mean        of old values and returns, over turns
        return_max                         the largest |return|, which should be within R_max
        grad_norm, skipped                 before clipping; steps that were not finite
        sampler_off                        mean |log-prob of the sampler - of the scoring pass|
        held_out                           with --eval_every, success on held-out games, T = 0.4
        time_*                             seconds on rank 0: rollout (env: its games), old and ref
                                           (line 3), update, a critic's values and critic, save;
                                           total, without held_out
        """
        config, sampler = self.config, self.sampler
        metrics |= {"iteration": iteration, "time_env": self.pool.seconds}
        metrics |= self.learner.clock.seconds()
        metrics |= episode_numbers(turns, self.learner.lm, self.pool.env.categories, config.tasks)
        for key in ("tokens_encoded", "tokens_sampled"):
            metrics[key] = sum(from_ranks([getattr(sampler, key)]))
        if config.eval_every and (iteration + 1) % config.eval_every == 0:
            metrics["held_out"] = evaluate_and_keep(self.learner.lm, self.pool, config,
                                                    self.lines)
        self.warn(metrics, self.unplayed(iteration, turns))
        say(f"{config.algo}, {iteration + 1} of {config.iterations}: success "
            f"{metrics['success']:.0%}, admissible {metrics['admissible_actions']:.0%}, V explains "
            f"{metrics['v_explained_variance']:.0%}, {metrics['time_total']:.1f} s")
        if rank() > 0:
            return
        self.lines.append(metrics)
        if self.wandb:
            self.wandb.log(metrics, step=iteration)
        if not config.out:
            return
        with open(f"{config.out}/metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if iteration % 10 == 0 or iteration == config.iterations - 1:
            page = evaluation.episode_page(
                f"{config.out}, iteration {iteration + 1}",
                [turn for turn in turns if turn.traj == turns[0].traj],
                self.lines, self.learner.lm.tokenizer.decode)
            Path(config.out, "transcripts").mkdir(exist_ok=True)
            runs.write_file(f"{config.out}/transcripts/{iteration + 1:04d}.html", page)

    def unplayed(self, iteration, turns):
        """All ranks' tasks whose first prompt was too long."""
        played = {turn.traj for turn in turns}
        mine = zip(range(rank(), self.config.tasks, world()), self.games(iteration))
        return from_ranks([task for traj, task in mine if traj not in played])

    def warn(self, metrics, unplayed):
        """Says once each what keeps a run from learning, and what to look at."""
        c = self.config
        self.lost = 0 if metrics["success"] else self.lost + 1
        found = {
            "words": (
                metrics["iteration"] == self.first and metrics["admissible_actions"] < 0.2,
                "fewer than a fifth of the actions are admissible: tools/imitate.py teaches a "
                "model an environment's words, or take a larger --model"),
            "success": (
                self.lost == 3 and not metrics["return_max"],
                "three iterations without a success, and there is nothing to learn from: look into "
                "transcripts/; tools/imitate.py, a larger --model or --horizon may help"),
            "max_new": (
                metrics["cut"] > 0.2,
                f"--max_new {c.max_new} cuts more than a fifth of the responses short: raise it"),
            "r_max": (
                metrics["return_max"] > 1.0001 * c.r_max,
                f"a return is outside +-R_max, {c.r_max:g}, which V cannot be: raise --r_max, or "
                "let the environment's step() pay less"),
            "max_prompt": (
                bool(unplayed),
                f"the first prompt of game {unplayed[:1]} has more than {self.sampler.limit} "
                "tokens; such episodes count as lost. Raise --max_prompt, which --resume accepts, "
                "or lower --max_new")}
        for what, (holds, text) in found.items():
            if holds and what not in self.said:
                say(f"Careful: {text}")
                self.said.add(what)


def episode_numbers(turns, lm, categories, episodes):
    """What all ranks' turns say of an iteration's episodes, under the names of `Run.log`. Of the
    `episodes`, those whose first prompt did not fit have no turn, and are lost."""
    names = "won score truncated outgrown category done invalid admissible".split()
    rows = from_ranks([{name: getattr(turn, name) for name in names}
                       | {"cut": not lm.stopped(turn.action_ids)} for turn in turns])
    ends = [row for row in rows if row["done"]]
    ends += [{"won": False, "score": 0.0, "truncated": True, "outgrown": True, "category": None}
             ] * (episodes - len(ends))
    won = {name: [row["won"] for row in ends if row["category"] == category]
           for category, name in categories.items()}
    shares = {name: mean([row[name] for row in ends]) for name in names[:4]}
    return {"episodes": len(ends), "turns": len(rows), "success": shares.pop("won"), **shares,
            "success_by_category": {name: mean(its) if its else None for name, its in won.items()},
            "cut": mean([row["cut"] for row in rows]),
            "valid_actions": mean([not row["invalid"] for row in rows]),
            "admissible_actions": mean([row["admissible"] for row in rows])}


# --------------------------------------------------------------------------------------- settings

ALGOS = ("sapo", "sapo-separate", "ppo", "grpo", "rloo", "gigpo", "gigpo-nostd", "empg")


@dataclasses.dataclass(frozen=True)
class Config:
    """The paper's settings, else verl-agent's, else ours. A comment is its flag's --help. What is
    None and has a default by the environment or the machine gets it when a Config is made."""

    env: str = "house"  # house, alfworld, webshop, webshop-human (its human goals) or MODULE:CLASS
    model: str = "tiny"  # tiny: results/tiny-*; a hub id, a name (Qwen2.5-1.5B), a folder
    data: str = None  # alfworld: the folder that holds json_2.1.1; webshop: its catalogue's
    out: str = None  # the run's folder; default runs/ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED
    seed: int = 0  # random seed
    iterations: int = 150  # of rollout and update; more of them stretch --lr_end's line
    algo: Literal[ALGOS] = "sapo"  # the method
    tasks: int = 128  # |B|: trajectories an iteration, of which --group_size share a task
    group_size: int = None  # trajectories of a task; default 8 for what compares them, else 1
    context: Literal["window", "full"] = "window"  # each turn its own prompt, or one conversation
    engine: Literal["kv", "hf"] = "kv"  # kv: our own sampler; hf: generate
    rows: int = None  # games decoded side by side; default all of an iteration's
    compile: bool = None  # torch.compile for scoring and for sampling at 1; default on a GPU
    dtype: Literal["float32", "bfloat16"] = None  # of the weights; default by the device
    history: int = 2  # turns shown in a window prompt
    horizon: int = None  # turns an episode may take; default the environment's
    places: int = 5  # house: its size
    objects: int = 4  # house: things that can be carried
    max_new: int = 512  # tokens a response may take
    max_prompt: int = None  # tokens a prompt may take, in full a conversation; default by the env

    gamma: float = 0.95  # discount per turn, of sapo, sapo-separate and gigpo
    lam: float = 0.95  # lambda of GAE over turns, Eq. 5, of sapo and sapo-separate
    r_max: float = 10.0  # R_max, Eq. 2: returns must lie in [-R_max, R_max]
    tau_v: float = 1.0  # value temperature, Eq. 1; not taken over from a trained --model
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two rows no text uses
    c_inv: float = 0.1  # a malformed turn's charge, as a return, Eq. 7; grpo etc.: after std
    clip: float = 0.2  # epsilon, Eq. 9, and epsilon_V, epsilon_Q, Eq. 10
    c_v: float = 0.5  # weight of V's loss, Eq. 12; at 0, GAE takes V as 0
    c_q: float = 0.25  # weight of Q's loss
    beta: float = 0.01  # weight of the KL to the model SAPO started from
    c_h: float = 0.001  # weight of the entropy

    lr: float = 1e-6  # AdamW's learning rate
    lr_warmup: int = 0  # optimizer steps over which lr rises from 0
    lr_end: float = 1.0  # share of lr that a straight line reaches at the end; verl-agent's is 1
    critic_lr: float = 1e-5  # of a separate critic
    mini_batch: int = 256  # turns an optimizer step
    tokens_per_micro_batch: int = 8192  # padded tokens a forward pass
    old: Literal["recompute", "rollout"] = "recompute"  # line 3: a pass, or the sampler's own
    checkpointing: bool = False  # recompute activations: less memory, a third more time
    moments: Literal["float32", "bfloat16"] = "float32"  # of AdamW, and a bf16 model's gradients

    eval_games: int = None  # held-out games; default the env's
    eval_every: int = 0  # iterations between evaluations while training, whose best is kept
    save_every: int = 5  # iterations between checkpoints
    resume: bool = False  # go on with the run in --out; flags that are not given are the run's
    wandb: str = None  # a project of Weights & Biases to log to; needs pip install wandb

    def __post_init__(self):
        for name, value in defaults_for(self).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


# What the shop and a tiny model need differently; the later beats the earlier, a flag beats both.
PRESETS = {
    "webshop": dict(mini_batch=64),  # its episodes are short
    "tiny": dict(dtype="float32", compile=False, iterations=40, tasks=64, max_new=16,
                 max_prompt=8192, lr=4e-4, critic_lr=4e-4, lr_warmup=20, lr_end=0.0, mini_batch=128,
                 tokens_per_micro_batch=4096),
    "tiny in house": dict(iterations=24)}  # the fewest at which five seeds end above 95 %
PATIENCE = 5  # steps in a row that may fail before the run stops
# What a resumed run may change: its length and surroundings, and what helps against low memory.
MAY_CHANGE = {"iterations", "save_every", "data", "out", "resume", "rows", "wandb", "max_prompt",
              "tokens_per_micro_batch", "checkpointing", "compile", "moments"}


def parse_config(argv=()):
    """Flags -> Config. A resumed run keeps its settings and refuses flags other than MAY_CHANGE."""
    given = vars(flags_of(Config, PRESETS, "SAPO, Algorithm 1.").parse_args(argv))
    asked, stored = Config(**given), {}
    usual = vars(Config()) | defaults_for(asked) | presets_for(asked)
    out = str(Path(asked.out or f"runs/{runs.name_of(given, usual, MAY_CHANGE)}"))
    if asked.resume and (Path(out, "config.json").exists() or given.keys() <= {"resume", "out"}):
        stored = {k: v for k, v in runs.settings_of(out).items() if hasattr(asked, k)}
    config = Config(**usual | stored | given | {"out": out})
    other = [f"--{k} is {v} there" for k, v in stored.items()
             if k not in MAY_CHANGE and getattr(config, k) != v]
    if other:
        raise ValueError(f"--resume: {out} was begun otherwise ({'; '.join(other)})")
    check(config)
    return config


def defaults_for(asked):
    """What follows for settings that are None from others, and from the machine."""
    env, gpu = envs.known(asked.env), torch.cuda.is_available()
    return {"horizon": env.horizon, "dtype": "bfloat16" if gpu else "float32", "compile": gpu,
            "eval_games": env.held_out[1],
            "max_prompt": env.max_prompt if asked.context == "window" else None,
            "group_size": 8 if LEARNERS[asked.algo] is Grouped else 1}


def presets_for(asked):
    """What a flag has for a default where the environment or the model is one of PRESETS."""
    out = dict(PRESETS["webshop"]) if str(asked.env).startswith("webshop") else {}
    out |= PRESETS["tiny"] if is_tiny(asked.model) else {}
    out |= PRESETS["tiny in house"] if (asked.model, asked.env) == ("tiny", "house") else {}
    return out if asked.context == "window" else out | {"max_prompt": None}  # the model's


def check(c):
    """Refuses settings that do not fit each other, or the machine, before anything is loaded."""
    for k in envs.OPTIONS:
        if k not in envs.known(c.env).flags and getattr(c, k) != getattr(Config, k):
            raise ValueError(f"--{k} does nothing with --env {c.env}")
    if c.tasks % c.group_size or c.group_size == 1 and LEARNERS[c.algo] is Grouped:
        raise ValueError(f"--group_size {c.group_size} does not fit --tasks {c.tasks}, or is too "
                         f"few for --algo {c.algo} to compare")
    if c.eval_every and not c.eval_games:
        raise ValueError("--eval_every needs --eval_games")
    if c.algo == "empg" and c.old == "rollout":
        raise ValueError("--algo empg needs the entropies of the pass that --old rollout saves")
    for split in ("train", envs.known(c.env).held_out[0]):
        envs.tasks(c.env, split, **envs.options_for(vars(c)))


# -------------------------------------------------------------------------------------------- run

def evaluate_and_keep(lm, pool, config, lines):
    """-> success on held-out games. What is better than in all `lines` of metrics.jsonl is kept in
    RUN/best."""
    played = evaluation.of_run(lm, pool, config, {"": evaluation.TEMPERATURES[""]})
    success = evaluation.report(*played.values())["success"]
    before = [line.get("held_out", -1) for line in lines]
    if config.out and success > from_rank_0(max(before, default=-1)):
        runs.write_folder(f"{config.out}/best", lambda to: lm.save(to) if rank() == 0 else None)
        say(f"success {success:.1%} on held-out games, the best so far")
    return success


def first_game(config, pool):
    """-> (obs, info) of the first training game, and a mark by which one set of games differs from
    another."""
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    pool.start(0, ids[0])
    first, = pool.gather([0])
    pool.drop(0)
    return first, hashlib.sha256(json.dumps([ids, first[0]]).encode()).hexdigest()[:16]


def load_start(config, pool, first):
    """-> the model a run starts from. ValueError where its readouts are saturated in `first`, (obs,
    info) of a game."""
    say(f"loading {config.model}; {config.out} is written")
    prompt = pool.env.episode(*first).window_prompt()
    with progress(f"loading {config.model}"):
        lm = load(config.model, env=config.env, dtype=getattr(torch, config.dtype),
                  value_tokens=config.value_tokens, tau_v=config.tau_v, r_max=config.r_max,
                  prompt=prompt, max_new=config.max_new)
    readout_at_start(lm, lm.chat.prompt(prompt))
    choose_threads(lm.model)
    threads = f", {torch.get_num_threads()} thread(s)" if lm.device.type == "cpu" else ""
    say(f"on {lm.device}{threads}, {world()} rank(s); w+ and w- are {lm.value_ids}")
    return fitted(lm, config)


def fitted(lm, config):
    """-> lm as --compile and --checkpointing want it."""
    if config.checkpointing:
        # transformers 6 will know the first name alone, as 5.17 knows the second
        enable = getattr(lm.model, "activation_checkpointing_enable", None)
        (enable or lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.compile:
        say("compiling what scores and samples, which takes minutes; --no-compile goes without")
        lm.model.train(config.checkpointing)  # as in an update
        with progress("compiling"):
            lm = compiled_scoring(lm, config.tokens_per_micro_batch)
        lm.model.eval()
    return lm


def run(config):
    """Evaluation, Algorithm 1, evaluation."""
    out = config.out
    with (runs.held(out, config.resume),
          contextlib.closing(envs.Pool(config.env, envs.options_for(vars(config)),
                                       envs.default_workers(config.env))) as pool):
        checkpoint = runs.newest_checkpoint(out)
        if config.wandb and rank() == 0:
            runs.begin_wandb(config)  # it may not answer, which is known before anything is loaded
        first, games = first_game(config, pool)
        lm = load_start(config, pool, first)
        learner = LEARNERS[config.algo](lm, config)  # allocates all that training keeps
        if rank() == 0:
            runs.begin_folder(out, vars(config) | {"games": games}, checkpoint)
        before = from_rank_0(runs.read_json(f"{out}/before.json"))
        if not before:
            before = evaluation.of_run(lm, pool, config)
        if rank() == 0:
            runs.write_file(f"{out}/before.json", json.dumps(before))
        say("success before training: " + evaluation.success_of(before))
        train(learner, pool, config, checkpoint)
        after = evaluation.of_run(lm, pool, config)
        runs.write_folder(f"{out}/final", lambda to: lm.save(to) if rank() == 0 else None)
        if rank() == 0:
            print(evaluation.write_of_run(before, after, config))
            evaluation.draw(evaluation.group_runs([out]), f"{out}/curves.png")
            print(f"wrote {out}; next: python eval.py --model {out}")
        barrier()  # a rank that leaves early would pull the others down


# -------------------------------------------------------------- the methods SAPO is compared with

class PolicyLearner(Learner):
    """Eq. 12 without the values: the policy's own V and Q are not trained."""

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        c, m = self.config, micro.tokens
        return actor_loss(*self.lm.score(micro.batch)[:2], logp_old=old.logp[m], adv=targets.adv[m],
                          logp_ref=None if ref is None else ref[m], clip=c.clip, beta=c.beta,
                          c_h=c.c_h, tokens=n_tokens)


class Grouped(PolicyLearner):
    """GRPO, RLOO, GiGPO, EMPG: every trajectory is compared with the others of its task, whichever
    rank played them."""

    def targets(self, played, batches, old):
        c = self.config
        entropy = zeros = torch.zeros_like(played.reward)
        if c.algo == "empg":  # a turn's entropy is the mean over its tokens
            entropy = zeros.index_add(0, played.turn_of, old.entropy) / played.turn_of.bincount()
        rows = zip(played.turns, played.reward.tolist(), entropy.tolist())
        rows = from_ranks([(rank(), t.traj, t.turn, t.obs, r, h) for t, r, h in rows])
        owner, traj, turn, obs, reward, entropy = zip(*rows)
        state = np.unique(obs, return_inverse=True)[1]  # a number for each observation
        adv = self.estimate(*map(torch.tensor, (traj, turn, state, reward, entropy)))
        mine = adv[torch.tensor(owner) == rank()].to(zeros) - c.c_inv * played.invalid
        returns = discounted_returns(played.traj, played.turn, played.reward, gamma=c.gamma)
        return Targets(mine[played.turn_of], zeros, zeros, returns)

    def estimate(self, traj, turn, state, reward, entropy):
        """(N,) over the turns of all ranks -> advantages (N,)."""
        algo, reward = self.config.algo, reward.double()
        score = episode_returns(traj, reward)
        group = traj // self.config.group_size  # Run.games lays a task's trajectories side by side
        if algo == "rloo":
            return rloo_advantages(traj, group, score)
        if algo.startswith("gigpo"):
            return gigpo_advantages(traj, turn, group, state, reward, gamma=self.config.gamma,
                                    std=algo == "gigpo")
        adv = grpo_advantages(traj, group, score)
        return empg_advantages(adv, traj, turn, entropy) if algo == "empg" else adv


class SeparateCritic(PolicyLearner):
    """SAPO's turn-level targets with V from a second model and no Q."""

    axis = "turns"  # of the values that are learned

    def __init__(self, lm, config):
        self.critic = Critic(lm)
        super().__init__(lm, config)

    def values(self, micro):
        """The critic's, before each turn's first token, (N,), or before every token, (M,)."""
        return (self.critic if self.axis == "tokens" else self.critic.of_turns)(micro.batch)

    @torch.no_grad()
    def old_values(self, played, batches):
        parts = [self.values(micro) for mini in batches for micro in mini]
        self.clock.lap("values")
        return torch.cat([played.v[:0], *parts])  # a rank may have no turn

    def targets(self, played, batches, old):
        value = self.old_values(played, batches)
        old = old._replace(p_v=value, p_q=torch.zeros_like(value))
        return super().targets(played, batches, old)._replace(value_old=value)

    def loss_critic(self, micro, old, ref, targets, n_tokens, n_turns):
        part = getattr(micro, self.axis)
        count = n_tokens if self.axis == "tokens" else n_turns
        return value_loss(self.values(micro), targets.value_old[part], targets.y_v[part],
                          clip=self.config.clip, denom=count)[0], {}


class PPO(SeparateCritic):
    """PPO as verl-agent has it: a turn is paid the episode's return, less its charge. With gamma =
    lambda = 1 a token's advantage is that less its value; they are whitened over all tokens."""

    axis = "tokens"

    def targets(self, played, batches, old):
        c = self.config
        value = self.old_values(played, batches)
        returns = episode_returns(played.traj, played.reward)
        score = (returns - c.c_inv * played.invalid) / c.r_max
        mask = torch.arange(c.max_new, device=value.device) < played.turn_of.bincount()[:, None]
        table = torch.zeros_like(mask, dtype=value.dtype).masked_scatter(mask, value)  # (N, T)
        adv, target = (x[mask] for x in token_gae(table, mask, score))
        adv = normalize_advantages(adv, group=everyone())
        v = c.r_max * table[:, 0]
        return Targets(adv, v, torch.zeros_like(v), returns, y_v=target, value_old=value)


LEARNERS = {"sapo": Learner, "sapo-separate": SeparateCritic, "ppo": PPO, "grpo": Grouped,
            "rloo": Grouped, "gigpo": Grouped, "gigpo-nostd": Grouped, "empg": Grouped}


def main():
    with one_line_errors("train.py", envs.GameError):
        join_ranks()
        run(parse_config(sys.argv[1:]))


if __name__ == "__main__":
    main()
