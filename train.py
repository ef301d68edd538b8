"""Algorithm 1: one causal language model learns to act and to value from one rollout per task.

    python train.py                                                a tiny model, a built-in house
    python train.py --env alfworld --model Qwen2.5-1.5B-Instruct   the paper's setting, on one GPU
    torchrun --nproc_per_node=2 --shutdown-timeout 600 train.py ...   data-parallel ranks
    python train.py --resume --out RUN                             continues an interrupted run

The file reads from the top: the loop, the gradient step, `Learner` (what SAPO computes), batches,
`Run` (checkpoints, log), `Config` (one flag per field), `train_and_evaluate`, and last the methods
SAPO is compared with.
In shapes, N turns and M response tokens are those of this rank; sums and means take in all ranks.
"""
import contextlib
import copy
import dataclasses
import gc
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

import envs
import eval as evaluation
from model import (ActorCritic, Batch, Critic, Scores, check_initial_readout, is_tiny, load,
                   make_batch, micro_batches)
from rollout import ROLLOUT, SHUFFLE, TASKS, Turn, rollout
from runtime.checkpoint import (Clock, RunDir, default_run_name, init_wandb, iterations_of,
                                read_json, read_tensors, wandb_names, write_file, write_folder)
from runtime.cli import choose_threads, one_line_errors, out_of_memory, parser_for, progress
from runtime.distributed import (Stopped, all_gather_list, all_reduce_sum, announce_stop,
                                 barrier, begin_update, broadcast_object, init_distributed,
                                 mean_or_zero, print0, process_group, rank, stop, world_size)
from runtime.optim import AdamW
from runtime.verify import compiled_scoring
from sapo import (actor_loss, discounted_returns, empg_advantages, episode_returns,
                  explained_variance, gigpo_advantages, grpo_advantages, normalize_advantages,
                  rloo_advantages, sapo_loss, token_gae, turn_targets, value_loss)


def train(learner, pool, config, checkpoint=None):
    """Algorithm 1. It starts after `checkpoint`, if given; with config.out = None it writes no
    files."""
    sampler = evaluation.sampler_for(learner.lm, config)
    with Run(sampler, learner, pool, config, checkpoint) as run:
        for iteration in run:  # resumes, saves checkpoints, stops on a signal
            turns = rollout(  # line 2  # SAPO: one trajectory per task
                sampler, run.task_batch(iteration), pool, trajs=run.trajectory_ids,
                seed=(config.seed, iteration, ROLLOUT), max_num_seqs=config.max_num_seqs,
                history=config.history)
            pool.load(run.task_batch(iteration + 1))  # prepares the next games in the background
            batch, minibatches = make_minibatches(turns, config, iteration, learner.lm.device)
            old = learner.score_behaviour_policy(batch, minibatches)  # line 3: log-probs, V, Q
            ref = learner.score_reference(minibatches)  # log-probs for the KL term
            targets = learner.targets(batch, old)  # lines 4 and 5: GAE over turns, normalization
            steps = [learner.step(minibatch, old, ref, targets, iteration)  # lines 6 and 7
                     for minibatch in run.update(minibatches)]
            run.log(iteration, turns, compute_metrics(batch, old, targets, steps))


# ------------------------------------------------------------------------------ the gradient step

GRAD_CLIP = 1.0  # the largest gradient norm, that of verl-agent
MAX_FAILED_STEPS = 5  # non-finite steps in a row, after which the run stops


def accumulate_gradients(model, micros, loss_of, gradient_checkpointing=False):
    """Adds up the gradients of loss_of(micro-batch) -> (loss, info). Returns the infos, each with
    its loss. Losses are sums over a global denominator, so their gradients are added, never
    averaged."""
    model.zero_grad(set_to_none=True)
    model.train(gradient_checkpointing)  # transformers recomputes activations in train mode only
    infos, gradients = [], {}

    def take_gradient(p):
        """torch.compile cannot trace a 16-bit parameter that has a float32 gradient."""
        gradients[p] = gradients[p].add_(p.grad) if p in gradients else p.grad
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(take_gradient)
             for p in trainable_parameters(model)]
    try:
        for micro in micros:
            loss, info = loss_of(micro)
            loss.backward()
            infos.append(info | {"loss": loss.detach()})
    finally:
        for hook in hooks:
            hook.remove()
    for p, gradient in gradients.items():
        p.grad = gradient
    model.eval()
    return infos


def trainable_parameters(model) -> list:
    """The parameters that are not frozen. ValueError: all are."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("all parameters of the model are frozen: requires_grad is False")
    return trained


def optimizer_step(model, optimizer, infos):
    """All-reduces and clips the gradients. Then it takes an optimizer step, unless the loss or the
    gradient norm is not finite. Returns the infos summed over micro-batches and ranks (for names
    that end in _max, their maximum), the gradient norm before clipping, and skipped_steps, 0 or 1.
    """
    trained = trainable_parameters(model)
    for p in trained:
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
    all_reduce_sum([p.grad for p in trained])
    norm = float(torch.nn.utils.clip_grad_norm_(trained, GRAD_CLIP))
    values = [torch.stack([*info.values()]) for info in infos]
    values = torch.stack(values).tolist() if values else []  # one host sync for all of them
    infos = all_gather_list([dict(zip(info, row)) for info, row in zip(infos, values)])
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    out |= {k: min(x, 1.0) for k, x in out.items()  # rounding may add up to more than 1
            if k.endswith(("fraction", "saturated"))}
    finite = bool(np.isfinite(out["loss"]) and np.isfinite(norm))
    if finite:
        optimizer.step()
    else:
        print0(f"Warning: skipping a step, its loss is {out['loss']:g}, its gradient norm {norm:g}")
    return out | {"grad_norm": norm, "skipped_steps": int(not finite)}


# --------------------------------------------------------------------------- what SAPO computes

class BehaviourScores(NamedTuple):
    """What the policy that sampled the turns says of them: line 3 of Algorithm 1."""

    logp: torch.Tensor  # (M,) log-probs of the response tokens
    entropy: torch.Tensor | None  # (M,), in nats; None with --old_logprobs rollout
    p_v: torch.Tensor  # (N,) V_old / R_max; (M,) in PPO, whose critic values every token
    p_q: torch.Tensor  # (N,) Q_old / R_max; with a separate critic, unused zeros like p_v
    sampler_logprob_diff: float  # mean |log-prob of the sampler - log-prob of a forward pass|


class Targets(NamedTuple):
    """What an update learns from, lines 4 and 5; v, q and returns are for the log alone."""

    adv: torch.Tensor  # (M,) the normalized advantage of every response token, in SAPO Eq. 7
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) discounted, from each turn on; PPO: undiscounted, of the episode
    y_v: torch.Tensor = None  # (N,) the targets of Eq. 6 / R_max; (M,) in PPO
    y_q: torch.Tensor = None


class Learner:
    """SAPO: the models, their optimizers, targets and losses. The other methods are subclasses."""

    critic = None  # SAPO: no second model

    def __init__(self, lm: ActorCritic, config: "Config"):
        self.lm, self.config, self.clock = lm, config, Clock()
        if config.beta:
            self.reference = dataclasses.replace(lm, model=copy.deepcopy(lm.model))
        # the trained models, by the suffix of their metrics' names
        self.models = {"": lm.model} | ({"_critic": self.critic} if self.critic else {})
        state_dtype = getattr(torch, config.optim_state_dtype)
        self.optimizers = {
            suffix: AdamW(trainable_parameters(model), config.lr, state_dtype=state_dtype)
            for suffix, model in self.models.items()}
        self.steps = 0  # steps tried, skipped ones included
        self.failed = 0  # how many of the latest steps in a row were skipped

    def score_behaviour_policy(self, batch, minibatches) -> BehaviourScores:
        """Line 3: one forward pass gives the old log-probs, V_old and Q_old. With --old_logprobs
        rollout, they are the sampler's, and only the last micro-batch goes through a forward pass,
        for sampler_logprob_diff."""
        self.clock.record("rollout")  # all that came before in this iteration
        from_sampler = self.config.old_logprobs == "rollout"
        micros = [micro for minibatch in minibatches for micro in minibatch]
        if from_sampler:
            micros = micros[-1:]  # so its tokens are the last ones of batch.logp
        scores = score_all(self.lm, [micros], "old_logprobs")  # SAPO: no second model is run
        sampled = batch.logp[len(batch.logp) - len(scores.logp):]
        sums = all_gather_list([((scores.logp - sampled).abs().double().sum().item(),
                                 len(sampled))])
        diff = sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))
        if from_sampler:
            r_max = self.lm.r_max
            scores = Scores(batch.logp, None, batch.v / r_max, batch.q / r_max)
        self.clock.record("old_logprobs")
        return BehaviourScores(*scores, diff)

    def score_reference(self, minibatches) -> torch.Tensor | None:
        """The log-probs (M,) of the model that training started from; None where beta is 0."""
        if not self.config.beta:
            return None
        logp = score_all(self.reference, minibatches, "reference").logp
        self.clock.record("ref")
        return logp

    def targets(self, batch, old: BehaviourScores) -> Targets:
        """Lines 4 and 5. Statistics are taken over all turns of the iteration, on all ranks."""
        c = self.config
        v, q = c.r_max * old.p_v, c.r_max * old.p_q
        if not (c.c_v or self.critic):
            v = torch.zeros_like(v)  # V is untrained; Q can stay, as it never enters the advantage
        adv, y_v, y_q = turn_targets(batch.traj, batch.turn, batch.reward, batch.done, v, q,
                                     gamma=c.gamma, lam=c.gae_lambda)
        adv = normalize_advantages(  # SAPO: one mean over all tasks, not one for each group
            adv, invalid=batch.invalid, c_inv=c.c_inv, group=process_group())
        returns = discounted_returns(batch.traj, batch.turn, batch.reward, gamma=c.gamma)
        return Targets(adv[batch.turn_of], v, q, returns, y_v / c.r_max, y_q / c.r_max)

    def step(self, minibatch, old, ref, targets, iteration) -> dict:
        """Lines 6 and 7: one optimizer step of each model on a mini-batch, a list of micro-batches.
        Returns metrics. ValueError: too many steps in a row were not finite."""
        c = self.config
        sizes = [(len(micro.batch.turn_of), len(micro.batch.start)) for micro in minibatch]
        n_tokens, n_turns = map(sum, zip(*all_gather_list(sizes)))
        warmup = min(1.0, (self.steps + 1) / max(1, c.lr_warmup))  # Adam's first steps are large
        decay = 1 - (1 - c.lr_final_fraction) * min(iteration, c.iterations) / c.iterations
        metrics = {"lr": c.lr * decay * warmup}
        for suffix, model in self.models.items():
            loss = self.loss_critic if suffix else self.loss  # the policy has no suffix
            optimizer = self.optimizers[suffix]
            optimizer.param_groups[0]["lr"] = (c.critic_lr if suffix else c.lr) * decay * warmup
            infos = self.accumulate_within_memory(
                model, minibatch, lambda micro: loss(micro, old, ref, targets, n_tokens, n_turns))
            info = optimizer_step(model, optimizer, infos)
            metrics |= {f"{name}{suffix}": x for name, x in info.items()}
            self.clock.record("critic" if suffix else "update")
        self.steps += 1
        skipped = metrics["skipped_steps"] or metrics.get("skipped_steps_critic")
        self.failed = self.failed + 1 if skipped else 0
        if self.failed == MAX_FAILED_STEPS:
            raise ValueError(f"{MAX_FAILED_STEPS} steps in a row were not finite; start again from "
                             "the last good weights with --model RUN/checkpoint-N --out NEW and a "
                             "lower --lr")
        return metrics

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        """Line 6: the forward pass and Eq. 12 of a micro-batch -> (loss, info). n_tokens and
        n_turns are the denominators, over all ranks' micro-batches of the mini-batch."""
        c, m, n = self.config, micro.tokens, micro.turns
        return sapo_loss(
            *self.lm.score(micro.batch), logp_old=old.logp[m], adv=targets.adv[m],
            logp_ref=None if ref is None else ref[m], p_v_old=old.p_v[n], p_q_old=old.p_q[n],
            y_v=targets.y_v[n], y_q=targets.y_q[n], clip=c.clip, clip_v=c.clip, clip_q=c.clip,
            c_v=c.c_v, c_q=c.c_q, beta=c.beta, c_h=c.c_h, tokens=n_tokens, turns=n_turns)

    def accumulate_within_memory(self, model, minibatch, loss_of):
        """accumulate_gradients, with smaller micro-batches where memory runs out: with half of the
        tokens of the largest one, which from then on is the limit in this rank's updates. (Forward
        passes without gradients keep theirs.) The result is the same up to rounding, because the
        losses have the mini-batch's denominators."""
        while True:
            micros = [part for micro in minibatch
                      for part in split(micro, self.config.tokens_per_micro_batch)]
            try:
                return accumulate_gradients(model, micros, loss_of,
                                            self.config.gradient_checkpointing)
            except RuntimeError as error:
                rows, width = max((micro.batch.ids.shape for micro in micros), key=math.prod)
                if not out_of_memory(error) or rows == 1:
                    raise
            # after `except`, because within it the error keeps the failed pass in memory
            half = rows * width // 2
            self.config = dataclasses.replace(self.config, tokens_per_micro_batch=half)
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"out of memory in an update of rank {rank()}: it is repeated, with "
                  f"micro-batches of at most {half} tokens from here on. Next time, "
                  f"--tokens_per_micro_batch {half} would avoid this", flush=True)

    def learn(self, turns: list[Turn], iteration: int) -> dict:
        """Lines 3 to 7 in one call, as in `train`, for a loop of your own. Returns metrics."""
        check_learner(self, self.config)
        batch, minibatches = make_minibatches(turns, self.config, iteration, self.lm.device)
        old = self.score_behaviour_policy(batch, minibatches)
        ref = self.score_reference(minibatches)
        targets = self.targets(batch, old)
        steps = [self.step(minibatch, old, ref, targets, iteration) for minibatch in minibatches]
        self.free_gradients()
        return compute_metrics(batch, old, targets, steps)

    def free_gradients(self) -> None:
        """After an update: a rollout can use their memory, and torch.compile cannot trace a 16-bit
        parameter that has a float32 gradient."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def save(self, folder) -> None:
        """Writes all state. Random numbers and the order of tasks need none, because they follow
        from the seed and the iteration. Each rank writes its part of the optimizers' state."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers.values()]
        torch.save({"steps": self.steps, "states": states}, f"{folder}/learner-{rank()}.pt")
        if rank() == 0:
            self.lm.save(folder)
            critic = self.critic.state_dict() if self.critic else None
            torch.save(critic, f"{folder}/critic.pt")

    def restore(self, folder: Path) -> None:
        """Loads what `save` wrote, on any number of ranks. ValueError, OSError: it is
        incomplete."""
        if not (folder / "sapo.json").is_file():  # `load` would reserve new w+ and w- then
            raise ValueError(f"{folder} lacks sapo.json")
        saved = load(str(folder), dtype=self.lm.model.dtype, device="cpu").model
        self.lm.model.load_state_dict(saved.state_dict())
        if self.critic:
            self.critic.load_state_dict(read_tensors(folder / "critic.pt"))
        found = [set() for _ in self.optimizers]
        for path in folder.glob("learner-*.pt"):
            shard = read_tensors(path)
            self.steps = shard["steps"]
            for optimizer, states, known in zip(self.optimizers.values(), shard["states"], found):
                optimizer.load_shard(states)
                known.update(states)
        if [*map(len, found)] != [len(optimizer.owner) for optimizer in self.optimizers.values()]:
            raise ValueError(f"{folder} lacks one of its learner-*.pt, the optimizer state of one "
                             "rank")


# ------------------------------------------------------------------------------------ mini-batches

class RolloutBatch:
    """The turns of an iteration in the order of its micro-batches, as flat tensors."""

    def __init__(self, turns: list[Turn], device):
        def column(name, dtype=torch.float32):
            return torch.tensor([getattr(turn, name) for turn in turns], dtype=dtype, device=device)

        self.turns = turns
        self.traj, self.turn = column("traj", torch.long), column("turn", torch.long)  # (N,)
        self.reward, self.done, self.invalid = map(column, ("reward", "done", "invalid"))  # (N,)
        self.v, self.q = column("v"), column("q")  # (N,) the sampler's, in units of return
        self.logp = torch.tensor([x for turn in turns for x in turn.logp], device=device)  # (M,)
        lengths = torch.tensor([len(turn.logp) for turn in turns], dtype=torch.long)
        self.turn_of = torch.arange(len(turns)).repeat_interleave(lengths).to(device)  # (M,)


class MicroBatch(NamedTuple):
    """What one forward pass takes, and where its tokens and turns are in the RolloutBatch."""

    samples: list  # [(ids, spans, turns)], as in make_samples
    batch: Batch
    tokens: slice  # of (M,)
    turns: slice  # of (N,)

    @classmethod
    def of(cls, samples, m, n, device):
        """A micro-batch of samples, whose first response token is number m of (M,) and whose first
        turn is number n of (N,)."""
        batch = make_batch([sample[:2] for sample in samples]).to(device)
        return cls(samples, batch, slice(m, m + len(batch.turn_of)), slice(n, n + len(batch.start)))


def make_samples(turns: list[Turn], context: str) -> list:
    """Turns, in order -> training samples [(ids, [(start, end), ...], turns)], with the spans of
    the responses: one sample per turn in `window`, one per trajectory in `full`."""
    samples = []
    for turn in turns:
        if context == "window" or not samples or turn.traj != samples[-1][2][-1].traj:
            samples.append(([], [], []))
        ids, spans, members = samples[-1]
        if len(turn.logp) != len(turn.action_ids):
            raise ValueError(f"turn {turn.turn} of trajectory {turn.traj} has "
                             f"{len(turn.action_ids)} response tokens and {len(turn.logp)} "
                             "log-probs")
        if context == "full" and turn.turn != len(members):
            raise ValueError(f"turn {len(members)} of trajectory {turn.traj} is missing, or the "
                             "turns are not in order; context full needs all of them")
        ids += turn.prompt_ids + turn.action_ids
        spans.append((len(ids) - len(turn.action_ids), len(ids)))
        members.append(turn)
    return samples


def make_minibatches(turns, config, iteration, device) -> tuple[RolloutBatch, list]:
    """Draws an order of all ranks' samples, the same on every rank, and splits it into ceil(turns /
    mini_batch) mini-batches of nearly equal size (fewer if one sample has more turns than that
    size). Returns this rank's turns, and for each mini-batch the list of this rank's
    micro-batches, which may be empty."""
    samples = [((sample[2][0].traj, sample[2][0].turn), sample)
               for sample in make_samples(turns, config.context)]
    mine = dict(samples)
    sizes = all_gather_list([(key, len(members)) for key, (*_, members) in samples])
    if len(dict(sizes)) < len(sizes):
        raise ValueError("two turns have the same trajectory number and index: give every rollout "
                         "of an update, and every rank, other numbers with rollout(..., trajs=)")
    if not sizes:
        raise ValueError("the first prompt of every task is too long: raise --max_prompt, or lower "
                         "--max_new_tokens")
    keys, sizes = zip(*sorted(sizes))
    order = np.random.default_rng([config.seed, iteration, SHUFFLE]).permutation(len(keys))
    sizes = np.array(sizes)[order]
    count = -(-sizes.sum() // config.mini_batch)
    # (samples,) the mini-batch of each; equal sizes, because a small last step would be noisy
    number_of = (sizes.cumsum() - sizes) * count // sizes.sum()
    minibatches, ordered, m = [], [], 0  # m: response tokens so far
    for number in np.unique(number_of):
        minibatches.append([])
        samples = [mine[keys[i]] for i in order[number_of == number] if keys[i] in mine]
        for group in micro_batches(samples, config.tokens_per_micro_batch):
            minibatches[-1].append(MicroBatch.of(group, m, len(ordered), device))
            ordered += [turn for *_, members in group for turn in members]
            m = minibatches[-1][-1].tokens.stop
    return RolloutBatch(ordered, device), minibatches


def split(micro: MicroBatch, budget: int) -> list[MicroBatch]:
    """Splits a micro-batch into parts of at most `budget` padded tokens, or of one row."""
    ids, m, n, parts = micro.batch.ids, micro.tokens.start, micro.turns.start, []
    rows = max(1, budget // ids.shape[1])
    if rows >= len(ids):
        return [micro]
    for first in range(0, len(ids), rows):
        parts.append(MicroBatch.of(micro.samples[first:first + rows], m, n, ids.device))
        m, n = parts[-1].tokens.stop, parts[-1].turns.stop
    return parts


def padded_tokens(minibatches) -> int:
    return sum(micro.batch.ids.numel() for minibatch in minibatches for micro in minibatch)


@torch.no_grad()
def score_all(lm: ActorCritic, minibatches, label: str) -> Scores:
    """One forward pass over every micro-batch, concatenated. `label` names the progress bar."""
    parts = [Scores(*torch.zeros(4, 0, device=lm.device))]  # a rank may have no turns
    with progress(label, padded_tokens(minibatches), "tokens") as bar:
        for micro in (micro for minibatch in minibatches for micro in minibatch):
            parts.append(lm.score(micro.batch))
            bar.update(micro.batch.ids.numel())
    return Scores(*map(torch.cat, zip(*parts)))


def compute_metrics(batch: RolloutBatch, old, targets: Targets, steps: list[dict]) -> dict:
    """The metrics of an update, over all ranks, under the names of `Run.log`. It also gives every
    turn its advantage, for the page of an episode: the mean over its tokens."""
    sums = torch.zeros_like(batch.reward).index_add(0, batch.turn_of, targets.adv)
    for turn, advantage in zip(batch.turns, (sums / batch.turn_of.bincount()).tolist()):
        turn.advantage = advantage
    rows = zip(targets.returns.tolist(), targets.v.tolist(), targets.q.tolist())
    returns, v, q = map(torch.tensor, zip(*all_gather_list([*rows])))
    metrics = {"return_mean": returns.mean().item(), "return_max": returns.abs().max().item(),
               "v_mean": v.mean().item(), "q_mean": q.mean().item(),
               "v_explained_variance": explained_variance(v, returns),
               "q_explained_variance": explained_variance(q, returns),
               "sampler_logprob_diff": old.sampler_logprob_diff}
    for name in steps[0]:
        reduce = (max if name.endswith("_max") else sum if name.startswith("skipped")
                  else mean_or_zero)
        metrics[name] = reduce([step[name] for step in steps])
    return metrics


# ------------------------------------------------------------------- what surrounds an iteration

class Run:
    """Iterates over the remaining iterations, from a checkpoint on if there is one, and does for
    the loop what is not in Algorithm 1: signals, checkpoints, tasks, log and warnings. On SIGTERM
    or Ctrl-C it saves the last finished iteration and raises Stopped."""

    def __init__(self, sampler, learner, pool, config, checkpoint=None):
        self.sampler, self.learner, self.pool, self.config = sampler, learner, pool, config
        check(config)
        check_parts(learner, pool, config)
        self.task_ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
        self.trajectory_ids = range(rank(), config.batch_size, world_size())  # this rank's
        checkpoint = checkpoint and Path(checkpoint)
        self.first_iteration = iterations_of(checkpoint)
        self.iterations_done = self.iterations_saved = self.first_iteration
        self.signals = stop.handle_signals()
        self.iterations_without_success = 0
        self.warned = set()
        self.folder = RunDir(config.out) if config.out else None
        self.lines = []  # of metrics.jsonl
        if self.folder and rank() == 0:
            self.lines = self.folder.metrics_of(self.iterations_done)
        if checkpoint:
            learner.restore(checkpoint)
            if self.folder and rank() == 0:
                self.folder.delete_results()
        self.wandb = init_wandb(config) if config.wandb and rank() == 0 else None

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __iter__(self) -> Iterator[int]:
        config, clock = self.config, self.learner.clock
        clock.start()
        for iteration in range(self.first_iteration, config.iterations):
            self.pool.seconds = 0.0
            self.sampler.tokens_encoded = self.sampler.tokens_sampled = 0
            stop.may_abandon = True  # until weights change
            stop.raise_if_possible()
            yield iteration
            clock.start()
            self.iterations_done = iteration + 1
            stopping = any(all_gather_list([stop.requested]))
            last = iteration + 1 == config.iterations
            if stopping or last or (iteration + 1) % config.save_every == 0:
                self.save()
                clock.record("save")  # logged with the next iteration
            if stopping:
                raise Stopped(agreed=True)

    def update(self, minibatches) -> Iterator[list]:
        """Yields the mini-batches, with a progress bar. Weights change now, so from here on a
        signal waits until the iteration is finished."""
        begin_update()
        models = len(self.learner.models)
        with progress("update", padded_tokens(minibatches) * models, "tokens") as bar:
            for minibatch in minibatches:
                yield minibatch
                bar.update(padded_tokens([minibatch]) * models)
        self.learner.free_gradients()

    def __exit__(self, kind, error, trace):
        try:
            if kind is Stopped:
                stop.may_abandon = False  # so that the exchanges below do not raise Stopped again
                if not error.agreed:
                    announce_stop()
                self.save()
                print0("nothing is saved, because config.out is None" if not self.folder else
                       f"saved {self.iterations_done} iterations; continue with --resume --out "
                       f"{self.config.out}" if self.iterations_done else
                       "no iteration was finished, so there is nothing to save")
            elif kind is None and self.wandb:
                self.wandb.finish()
        finally:
            self.signals.__exit__(kind, error, trace)

    def save(self) -> None:
        """Writes a checkpoint of the last finished iteration, unless there is one already."""
        if self.iterations_done > self.iterations_saved and self.folder:
            self.folder.save_checkpoint(self.iterations_done, self.learner.save)
            self.iterations_saved = self.iterations_done

    def task_batch(self, iteration: int) -> list:
        """This rank's share of an iteration's tasks. Over all ranks, each task comes --group_size
        times in a row; after the last iteration there are none. All tasks occur once per epoch, in
        an order that is drawn anew each time."""
        c, n = self.config, len(self.task_ids)
        count = c.batch_size // c.group_size if iteration < c.iterations else 0
        ids = []
        for i in range(iteration * count, (iteration + 1) * count):
            order = np.random.default_rng([c.seed, i // n, TASKS]).permutation(n)
            ids += [self.task_ids[order[i % n]]] * c.group_size
        return ids[rank()::world_size()]

    def log(self, iteration: int, turns: list[Turn], metrics: dict) -> None:
        """Adds metrics of the rollout to those of the update, over all ranks, prints a line, and
        appends them to metrics.jsonl:

        iteration                          from 0
        episodes, turns                    numbers of them
        tokens_encoded, tokens_sampled     prompt tokens and response tokens of the sampler
        success, score                     means over episodes, sampled at temperature 1
        success_by_category                success for each category of tasks
        valid_actions, admissible_actions  fractions of turns: in the format; offered by the game
        truncated                          fraction of episodes cut off, by the horizon or because
                                           the next prompt did not fit
        context_overflow                   fraction cut off because the next prompt did not fit
        response_truncated                 fraction of responses that reached --max_new_tokens
        loss, loss_policy, loss_v, loss_q  Eq. 12, 9, 11; ..._critic are a separate critic's
        kl, kl_max, entropy                per token, in nats: the KL to the initial model, mean and
                                           maximum (0 with --beta 0, which does not measure it), and
                                           the policy's entropy
        ratio_max, *clip_fraction          Eq. 8; fractions of tokens or turns clipped by Eq. 9, 10
        v_saturated, q_saturated           fractions of readouts at the bounds of Eq. 1, where its
                                           gradient is 0
        v_, q_explained_variance           of the discounted return (PPO: of the episode's return)
        v_mean, q_mean, return_mean        of old values and returns, over turns
        return_max                         the largest |return|, which should not exceed R_max
        lr                                 the policy's learning rate, the mean over the steps
        grad_norm, skipped_steps           before clipping; steps that were not finite
        sampler_logprob_diff               mean |log-prob of the sampler - of the scoring pass|
        held_out                           with --eval_every: success on held-out games, T = 0.4
        time_*                             seconds on rank 0: rollout (of which env: waiting for
                                           games), old_logprobs, ref, update; values and critic of a
                                           separate critic; save; total, without held_out
        """
        config, sampler = self.config, self.sampler
        metrics |= {"iteration": iteration, "time_env": self.pool.seconds}
        metrics |= self.learner.clock.seconds()
        metrics |= rollout_metrics(turns, self.learner.lm, self.pool.env.categories,
                                   config.batch_size)
        for name in ("tokens_encoded", "tokens_sampled"):
            metrics[name] = sum(all_gather_list([getattr(sampler, name)]))
        if config.eval_every and (iteration + 1) % config.eval_every == 0:
            metrics["held_out"] = evaluate_and_keep(self.learner.lm, self.pool, config, self.lines)
        self.warn(metrics, self.unplayed(iteration, turns))
        print0(f"{config.algo}, {iteration + 1} of {config.iterations}: success "
               f"{metrics['success']:.0%}, admissible actions {metrics['admissible_actions']:.0%}, "
               f"explained variance of V {metrics['v_explained_variance']:.0%}, "
               f"{metrics['time_total']:.1f} s")
        if rank() > 0:
            return
        self.lines.append(metrics)
        if self.wandb:
            self.wandb.log(wandb_names(metrics), step=iteration)
        if not self.folder:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if turns and (iteration % 10 == 0 or iteration == config.iterations - 1):
            page = evaluation.episode_page(
                f"{config.out}, iteration {iteration + 1}",
                [turn for turn in turns if turn.traj == turns[0].traj],
                self.lines, self.learner.lm.tokenizer.decode)
            (self.folder / "transcripts").mkdir(exist_ok=True)
            write_file(self.folder / f"transcripts/{iteration + 1:04d}.html", page)

    def unplayed(self, iteration, turns) -> list:
        """All ranks' tasks whose first prompt did not fit."""
        played = {turn.traj for turn in turns}
        mine = zip(self.trajectory_ids, self.task_batch(iteration))
        return all_gather_list([task for traj, task in mine if traj not in played])

    def warn(self, metrics, unplayed) -> None:
        """Prints each warning once, when its condition holds."""
        c = self.config
        self.iterations_without_success += 1
        if metrics["success"]:
            self.iterations_without_success = 0
        warnings = {
            "admissible_actions": (
                (metrics["iteration"] == self.first_iteration
                 and metrics["admissible_actions"] < 0.2),
                "fewer than a fifth of the actions are admissible. tools/imitate.py teaches a "
                "model the commands of an environment; or choose a larger --model"),
            "success": (
                self.iterations_without_success == 3 and not metrics["return_max"],
                "no success in three iterations, so there is nothing to learn from. Look into "
                "transcripts/; tools/imitate.py, a larger --model or a longer --horizon may help"),
            "max_new_tokens": (
                metrics["response_truncated"] > 0.2,
                f"--max_new_tokens {c.max_new_tokens} truncates more than a fifth of the "
                "responses: raise it"),
            "r_max": (
                metrics["return_max"] > 1.0001 * c.r_max,
                f"a return exceeds R_max = {c.r_max:g}, the largest value that V can take: raise "
                "--r_max, or scale the environment's rewards down"),
            "max_prompt": (
                bool(unplayed),
                f"the first prompt of game {next(iter(unplayed), None)} has more than "
                f"{self.sampler.limit} tokens; such episodes count as lost. Raise --max_prompt, "
                "which is allowed with --resume, or lower --max_new_tokens")}
        for name, (holds, text) in warnings.items():
            if holds and name not in self.warned:
                print0(f"Warning: {text}")
                self.warned.add(name)


def rollout_metrics(turns, lm, categories, episodes) -> dict:
    """The metrics of an iteration's episodes, over all ranks, under the names of `Run.log`. An
    episode whose first prompt did not fit has no turn and counts as lost."""
    averaged = "won", "score", "truncated", "context_overflow"
    names = *averaged, "category", "done", "invalid", "admissible"
    rows = all_gather_list([{name: getattr(turn, name) for name in names}
                            | {"response_truncated": not lm.stopped(turn.action_ids)}
                            for turn in turns])
    ends = [row for row in rows if row["done"]]
    ends += [{"won": False, "score": 0.0, "truncated": True, "context_overflow": True,
              "category": None}] * (episodes - len(ends))
    by_category = {}  # None where no episode was of that category
    for category, name in categories.items():
        won = [row["won"] for row in ends if row["category"] == category]
        by_category[name] = mean_or_zero(won) if won else None
    shares = {name: mean_or_zero([row[name] for row in ends]) for name in averaged}
    success = shares.pop("won")
    return {"episodes": len(ends), "turns": len(rows), "success": success, **shares,
            "success_by_category": by_category,
            "response_truncated": mean_or_zero([row["response_truncated"] for row in rows]),
            "valid_actions": mean_or_zero([not row["invalid"] for row in rows]),
            "admissible_actions": mean_or_zero([row["admissible"] for row in rows])}


# --------------------------------------------------------------------------------------- settings

ALGOS = ("sapo", "sapo-separate", "ppo", "grpo", "rloo", "gigpo", "gigpo-nostd", "empg")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting is a flag, and its comment is the flag's --help. Defaults are the paper's where
    it gives them, else verl-agent's, else ours. Where they are None, horizon, dtype, compile,
    eval_games, max_prompt and group_size get defaults that depend on other settings or on the
    machine, when a Config is made. PRESETS are for the command line alone."""

    env: str = "house"  # house, alfworld, webshop, webshop-human (goals by people), MODULE:CLASS
    model: str = "tiny"  # tiny (results/tiny-*), a hub id, a bare name (Qwen2.5-1.5B), a folder
    data: str = None  # the folder that contains alfworld's json_2.1.1, or webshop's catalogue
    out: str = None  # folder of the run; default runs/ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED
    seed: int = 0  # random seed
    iterations: int = 150  # number of iterations, each a rollout and an update
    algo: Literal[ALGOS] = "sapo"  # the method
    batch_size: int = 128  # |B|: trajectories (not turns) per iteration
    group_size: int = None  # trajectories of the same task; default 8 with grpo, rloo, gigpo,
        # gigpo-nostd and empg, else 1
    context: Literal["window", "full"] = "window"  # a new prompt each turn, or one conversation
    engine: Literal["kv", "hf"] = "kv"  # kv: our sampler; hf: transformers' generate
    max_num_seqs: int = None  # games played side by side per rank; default all of an iteration
    compile: bool = None  # torch.compile scoring, and sampling at temperature 1; default on a GPU
    dtype: Literal["float32", "bfloat16"] = None  # of the weights; default bfloat16 on a GPU
    history: int = 2  # past turns shown in a prompt of --context window
    horizon: int = None  # maximum number of turns per episode; default the environment's
    places: int = 5  # house: number of places
    objects: int = 4  # house: number of things to carry
    max_new_tokens: int = 512  # maximum length of a response
    max_prompt: int = None  # maximum tokens of a prompt, or of a whole conversation with full;
        # default the environment's, with full the model's

    gamma: float = 0.95  # discount per turn, of sapo, sapo-separate, gigpo and gigpo-nostd; and of
        # the returns in the log, but for ppo
    gae_lambda: float = 0.95  # lambda of GAE over turns, Eq. 5, of sapo and sapo-separate
    r_max: float = 10.0  # R_max, Eq. 2: returns must be within [-R_max, R_max]
    tau_v: float = 1.0  # temperature of the value readout, Eq. 1
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two vocabulary entries no text uses
    c_inv: float = 0.1  # penalty for invalid actions: in units of return, subtracted from the
        # advantage before Eq. 7 normalizes it, and in ppo from the reward; the group-based methods
        # subtract it from the finished advantage, in that advantage's units
    clip: float = 0.2  # epsilon, Eq. 9, and epsilon_V, epsilon_Q, Eq. 10
    c_v: float = 0.5  # weight of V's loss in Eq. 12, of sapo; with 0, GAE uses V = 0
    c_q: float = 0.25  # weight of Q's loss, of sapo
    beta: float = 0.01  # weight of the KL to the initial model
    c_h: float = 0.001  # weight of the entropy bonus

    lr: float = 1e-6  # AdamW's learning rate
    lr_warmup: int = 0  # optimizer steps of linear warmup
    lr_final_fraction: float = 1.0  # the learning rate decays linearly, and would reach this
        # fraction of --lr after the last iteration
    critic_lr: float = 1e-5  # learning rate of a separate critic
    mini_batch: int = 256  # maximum number of turns per optimizer step; an iteration's turns are
        # split evenly into as few steps as that allows (full: about, as trajectories stay whole)
    tokens_per_micro_batch: int = 8192  # tokens per forward pass, padding included
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # old log-probs, V and Q, line 3:
        # from a forward pass, or those of the sampler
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    optim_state_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW's moments, and of a
        # bfloat16 model's gradients; bfloat16 takes 6 bytes less per parameter (2 for each of them)

    eval_games: int = None  # number of held-out games; default the environment's
    eval_every: int = 0  # iterations between evaluations while training (0: none); the model with
        # the best one is kept as RUN/best
    save_every: int = 5  # iterations between checkpoints
    resume: bool = False  # continue the run in --out, with its settings
    wandb: str = None  # Weights & Biases project to log to; needs pip install wandb

    def __post_init__(self):
        """Sets the defaults. ValueError: the value of a setting is not among its choices."""
        for f in dataclasses.fields(self):
            choices, value = get_args(f.type), getattr(self, f.name)
            if choices and value is not None and value not in choices:
                raise ValueError(f"{f.name} is {value!r}; it can be {', '.join(choices)}")
        for name, value in defaults_for(self).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


# Other defaults of the command line, for the shop and for tiny models. Later entries override
# earlier ones, and flags override them all.
PRESETS = {
    "webshop": dict(mini_batch=64),  # its episodes are short
    "tiny": dict(dtype="float32", compile=False, iterations=40, batch_size=64, max_new_tokens=16,
                 max_prompt=8192, lr=4e-4, critic_lr=4e-4, lr_warmup=20, lr_final_fraction=0.0,
                 mini_batch=128, tokens_per_micro_batch=4096),
    "tiny in house": dict(iterations=24)}  # the fewest with which five seeds end above 95 %
# Settings that only some of the methods use.
USED_BY = {"gamma": ("sapo", "sapo-separate", "gigpo", "gigpo-nostd"),
           "gae_lambda": ("sapo", "sapo-separate"), "c_v": ("sapo",), "c_q": ("sapo",),
           "critic_lr": ("sapo-separate", "ppo")}
FINITE = sys.float_info.max
RANGES = (  # (smallest, largest, settings)
    (1, FINITE, "iterations batch_size group_size horizon max_new_tokens mini_batch save_every "
                "tokens_per_micro_batch max_num_seqs max_prompt"),
    (0, FINITE, "seed history lr critic_lr lr_warmup lr_final_fraction eval_games eval_every beta "
                "c_v c_q c_h c_inv clip"),
    (0, 1, "gamma gae_lambda"), (1e-6, FINITE, "r_max tau_v"))
# What may change when a run is resumed: its length and surroundings, and what saves memory.
RESUME_MUTABLE = {"iterations", "save_every", "data", "out", "resume", "max_num_seqs", "wandb",
                  "max_prompt", "tokens_per_micro_batch", "gradient_checkpointing", "compile",
                  "optim_state_dtype"}


def parse_config(argv: list[str] = ()) -> Config:
    """Flags -> Config. With --resume the run's settings hold. ValueError: a flag contradicts them
    (except RESUME_MUTABLE), or settings do not fit together."""
    given = vars(parser_for(Config, PRESETS, "SAPO, Algorithm 1.").parse_args(argv))
    requested, stored = Config(**given), {}
    defaults = vars(Config()) | defaults_for(requested) | presets_for(requested)
    out = str(Path(requested.out or f"runs/{default_run_name(given, defaults, RESUME_MUTABLE)}"))
    # alone, --resume needs a run; with other flags, it starts the run if there is none yet
    must_exist = given.keys() <= {"resume", "out"}
    if requested.resume and (must_exist or Path(out, "config.json").exists()):
        stored = {k: v for k, v in RunDir(out).settings().items() if hasattr(requested, k)}
    config = Config(**defaults | stored | given | {"out": out})
    conflicts = [f"--{k} was {v}" for k, v in stored.items()
                 if k not in RESUME_MUTABLE and getattr(config, k) != v]
    if conflicts:
        raise ValueError(f"--resume: {out} was started with different settings "
                         f"({'; '.join(conflicts)})")
    check(config)
    for name, algos in USED_BY.items():
        if name in given and config.algo not in algos:
            print0(f"Warning: --{name} has no effect with --algo {config.algo}")
    for split_name in ("train", envs.env_class(config.env).held_out[0]):  # whether data is missing
        envs.tasks(config.env, split_name, **envs.options_for(vars(config)))
    return config


def defaults_for(config: Config) -> dict:
    """Defaults that depend on other settings and on the machine."""
    env, gpu = envs.env_class(config.env), torch.cuda.is_available()
    return {"horizon": env.horizon, "dtype": "bfloat16" if gpu else "float32", "compile": gpu,
            "eval_games": env.held_out[1],
            "max_prompt": env.max_prompt if config.context == "window" else None,
            "group_size": 8 if LEARNERS[config.algo] is GroupBased else 1}


def presets_for(config: Config) -> dict:
    """The PRESETS that apply."""
    out = dict(PRESETS["webshop"]) if config.env in ("webshop", "webshop-human") else {}
    out |= PRESETS["tiny"] if is_tiny(config.model) else {}
    out |= PRESETS["tiny in house"] if (config.model, config.env) == ("tiny", "house") else {}
    return out if config.context == "window" else out | {"max_prompt": None}  # the model's limit


def check(c: Config) -> None:
    """ValueError: settings do not fit each other."""
    env = envs.env_class(c.env)
    for k in (*envs.OPTIONS, "horizon"):
        default = env.horizon if k == "horizon" else getattr(Config, k)
        if k not in env.flags and getattr(c, k) != default:
            raise ValueError(f"--{k} has no effect with --env {c.env}")
    for low, high, names in RANGES:
        for k in names.split():
            if (value := getattr(c, k)) is not None and not low <= value <= high:
                limit = f"at most {high}" if high < FINITE else "finite"
                raise ValueError(f"--{k} must be at least {low} and {limit}; it is {value}")
    if c.group_size == 1 and LEARNERS[c.algo] is GroupBased:
        raise ValueError(f"--algo {c.algo} compares trajectories: --group_size must be above 1")
    if c.batch_size % c.group_size:
        raise ValueError(f"--group_size {c.group_size} does not divide --batch_size "
                         f"{c.batch_size}")
    if c.eval_every and not c.eval_games:
        raise ValueError("--eval_every needs --eval_games")
    if c.wandb and not c.out:
        raise ValueError("--wandb needs --out, the folder of the run")
    if c.algo == "empg" and c.old_logprobs == "rollout":
        raise ValueError("--algo empg needs entropies, which --old_logprobs rollout does not give")


def check_learner(learner: Learner, c: Config) -> None:
    """ValueError: the learner's method, or its model's tau_v or r_max, is not that of `c`."""
    lm, expected = learner.lm, LEARNERS[c.algo]
    if not isinstance(learner, expected):
        raise ValueError(f"algo {c.algo!r} needs train.LEARNERS[{c.algo!r}], {expected.__name__}, "
                         f"and not {type(learner).__name__}")
    if (lm.tau_v, lm.r_max) != (c.tau_v, c.r_max):
        raise ValueError(f"the model has tau_v {lm.tau_v:g} and r_max {lm.r_max:g}, the settings "
                         f"have {c.tau_v:g} and {c.r_max:g}")


def check_parts(learner: Learner, pool: envs.Pool, c: Config) -> None:
    """ValueError: the learner or the pool has other settings than these."""
    check_learner(learner, c)
    may_differ = RESUME_MUTABLE - {"iterations"}  # the learning rate depends on iterations
    if other := [k for k, value in vars(c).items()
                 if k not in may_differ and getattr(learner.config, k) != value]:
        raise ValueError(f"the learner was made with another {', '.join(other)}")
    if pool.env is not envs.env_class(c.env):
        raise ValueError(f"the pool plays {pool.env.__name__}, and the settings say {c.env}")
    for k in pool.env.flags:  # what the pool was not given has the environment's default
        default = pool.env.horizon if k == "horizon" else getattr(Config, k, None)
        if (value := pool.options.get(k, default)) != getattr(c, k, value):
            raise ValueError(f"the pool has {k} {value!r}, and the settings have {getattr(c, k)!r}")


# ------------------------------------------------------------------------------------- a whole run

def evaluate_and_keep(lm, pool, config, lines) -> float:
    """Evaluates on held-out games -> success. Saves the model as RUN/best if that is better than in
    all `lines` of metrics.jsonl."""
    played = evaluation.evaluate_config(lm, pool, config, {"": evaluation.TEMPERATURES[""]})
    success = evaluation.report(*played.values())["success"]
    before = [line.get("held_out", -1) for line in lines]
    if config.out and success > broadcast_object(max(before, default=-1)):
        write_folder(f"{config.out}/best", lambda path: lm.save(path) if rank() == 0 else None)
        print0(f"success {success:.1%} on held-out games, the best so far")
    return success


def first_game(config, pool):
    """Starts the first training game -> ((obs, info), a fingerprint of the set of games)."""
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    pool.start(0, ids[0])
    first, = pool.gather([0])
    pool.drop(0)
    return first, hashlib.sha256(json.dumps([ids, first[0]]).encode()).hexdigest()[:16]


def fingerprint(model) -> str:
    """A short text that differs for models with different weights: a hash of each parameter's first
    numbers."""
    first = torch.cat([p.detach().flatten()[:64].float() for p in model.parameters()])
    return hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]


def load_initial_model(config, pool, first) -> ActorCritic:
    """Loads the model that training starts from. first: (obs, info) of a game, for a prompt.
    ValueError: the value readouts of that prompt are saturated."""
    print0(f"loading {config.model}; writing to {config.out}")
    prompt = pool.env.prompt_builder(*first).window_prompt()
    with progress(f"loading {config.model}"):
        lm = load(config.model, env=config.env, dtype=getattr(torch, config.dtype),
                  value_tokens=config.value_tokens, tau_v=config.tau_v, r_max=config.r_max,
                  prompt=prompt, max_new_tokens=config.max_new_tokens)
    check_initial_readout(lm, lm.chat.encode_user_turn(prompt))
    choose_threads(lm.model)
    threads = f", {torch.get_num_threads()} thread(s)" if lm.device.type == "cpu" else ""
    print0(f"on {lm.device}{threads}, {world_size()} rank(s); w+ and w- are tokens {lm.value_ids}")
    return apply_speed_and_memory_settings(lm, config)


def apply_speed_and_memory_settings(lm, config) -> ActorCritic:
    """Applies --compile and --gradient_checkpointing."""
    if config.gradient_checkpointing:
        # transformers 6 has only the first name, 5.17 only the second
        enable = getattr(lm.model, "activation_checkpointing_enable", None)
        (enable or lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.compile:
        print0("compiling scoring and sampling, about a minute in all; --no-compile skips it")
        lm.model.train(config.gradient_checkpointing)  # as in an update
        with progress("compiling"):
            lm = compiled_scoring(lm, config.tokens_per_micro_batch)
        lm.model.eval()
    return lm


def train_and_evaluate(config: Config) -> None:
    """Evaluates, trains, evaluates again, and writes the run's folder."""
    folder = RunDir(config.out)
    with (folder.lock(config.resume),
          contextlib.closing(envs.Pool(config.env, envs.options_for(vars(config)),
                                       envs.default_workers(config.env))) as pool):
        checkpoint = folder.newest_checkpoint()
        if config.wandb and rank() == 0:
            init_wandb(config)  # so that it fails early; Run gets the same wandb run
        first, games = first_game(config, pool)
        lm = load_initial_model(config, pool, first)
        # allocates all that training keeps, so that a lack of memory shows before the evaluation
        learner = LEARNERS[config.algo](lm, config)
        if rank() == 0:
            folder.begin(vars(config) | {"games": games, "initial_weights": fingerprint(lm.model)},
                         checkpoint)
        before = broadcast_object(read_json(folder / "before.json"))
        if not before:
            before = evaluation.evaluate_config(lm, pool, config)
        if rank() == 0:
            write_file(folder / "before.json", json.dumps(before))
        print0("success before training: " + evaluation.success_of(before))
        train(learner, pool, config, checkpoint)
        after = evaluation.evaluate_config(lm, pool, config)
        write_folder(folder / "final", lambda path: lm.save(path) if rank() == 0 else None)
        if rank() == 0:
            print(evaluation.write_reports(before, after, config))
            evaluation.draw(evaluation.group_runs([config.out]), folder / "curves.png")
            print(f"wrote {config.out}; next: python eval.py --model {config.out}")
        barrier()  # a rank that exits early would take the others down


# -------------------------------------------------------------- the methods SAPO is compared with

class PolicyLearner(Learner):
    """Eq. 12 without the value losses: the model's own V and Q are not trained."""

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        c, m = self.config, micro.tokens
        return actor_loss(*self.lm.score(micro.batch)[:2], logp_old=old.logp[m], adv=targets.adv[m],
                          logp_ref=None if ref is None else ref[m], clip=c.clip, beta=c.beta,
                          c_h=c.c_h, tokens=n_tokens)


class GroupBased(PolicyLearner):
    """GRPO, RLOO, GiGPO, EMPG: each trajectory is compared with the others of its task, on
    whichever rank they were played. The penalty for invalid actions is subtracted from the
    advantage."""

    def learn(self, turns, iteration):
        size, task_of = self.config.group_size, {}
        for turn in turns:
            if task_of.setdefault(turn.traj // size, turn.task) != turn.task:
                raise ValueError(f"a group of {size} trajectories has different tasks: play each "
                                 "task group_size times, under consecutive numbers")
        return super().learn(turns, iteration)

    def targets(self, batch, old):
        c = self.config
        entropy = zeros = torch.zeros_like(batch.reward)  # only EMPG needs entropies
        if c.algo == "empg":  # the mean over the tokens of a turn
            entropy = zeros.index_add(0, batch.turn_of, old.entropy) / batch.turn_of.bincount()
        rows = zip(batch.turns, batch.reward.tolist(), entropy.tolist())
        rows = all_gather_list([(rank(), t.traj, t.turn, t.obs, r, h) for t, r, h in rows])
        owner, traj, turn, obs, reward, entropy = zip(*rows)
        state = np.unique(obs, return_inverse=True)[1]  # a number for each distinct observation
        adv = self.estimate(*map(torch.tensor, (traj, turn, state, reward, entropy)))
        mine = adv[torch.tensor(owner) == rank()].to(zeros) - c.c_inv * batch.invalid
        returns = discounted_returns(batch.traj, batch.turn, batch.reward, gamma=c.gamma)
        return Targets(mine[batch.turn_of], zeros, zeros, returns)

    def estimate(self, traj, turn, state, reward, entropy) -> torch.Tensor:
        """(N,) over the turns of all ranks -> advantages (N,)."""
        algo, reward = self.config.algo, reward.double()
        returns = episode_returns(traj, reward)
        group = traj // self.config.group_size  # a task's trajectories have consecutive numbers
        if algo == "rloo":
            return rloo_advantages(traj, group, returns)
        if algo.startswith("gigpo"):
            return gigpo_advantages(traj, turn, group, state, reward, gamma=self.config.gamma,
                                    std=algo == "gigpo")
        adv = grpo_advantages(traj, group, returns)
        return empg_advantages(adv, traj, turn, entropy) if algo == "empg" else adv


class SeparateCritic(PolicyLearner):
    """SAPO's turn-level targets, with V from a second model and without Q."""

    axis = "turns"  # what the critic values: MicroBatch.turns (N,), in PPO MicroBatch.tokens (M,)

    def __init__(self, lm, config):
        self.critic = Critic(lm)
        super().__init__(lm, config)

    def values(self, micro) -> torch.Tensor:
        """The critic's V / R_max: before every turn's first token (N,), or before every token
        (M,)."""
        return (self.critic if self.axis == "tokens" else self.critic.of_turns)(micro.batch)

    @torch.no_grad()
    def score_behaviour_policy(self, batch, minibatches):
        old = super().score_behaviour_policy(batch, minibatches)
        values = [self.values(micro) for minibatch in minibatches for micro in minibatch]
        values = torch.cat([batch.v[:0], *values])  # a rank may have no turns
        self.clock.record("values")
        return old._replace(p_v=values, p_q=torch.zeros_like(values))

    def loss_critic(self, micro, old, ref, targets, n_tokens, n_turns):
        part = getattr(micro, self.axis)
        count = n_tokens if self.axis == "tokens" else n_turns
        return value_loss(self.values(micro), old.p_v[part], targets.y_v[part],
                          clip=self.config.clip, denom=count)[0], {}


class PPO(SeparateCritic):
    """PPO as in verl-agent: every turn is rewarded at its end with the whole episode's return, less
    the penalty for invalid actions, and GAE with gamma = lambda = 1 runs over the tokens of that
    turn alone. So a token's advantage is that reward minus its value, whitened over all tokens."""

    axis = "tokens"

    def targets(self, batch, old):
        c, value = self.config, old.p_v
        returns = episode_returns(batch.traj, batch.reward)
        reward = (returns - c.c_inv * batch.invalid) / c.r_max
        lengths = batch.turn_of.bincount()[:, None]  # (N, 1)
        longest = max([c.max_new_tokens, *(len(turn.logp) for turn in batch.turns)])
        mask = torch.arange(longest, device=value.device) < lengths  # (N, T)
        table = torch.zeros_like(mask, dtype=value.dtype).masked_scatter(mask, value)
        adv, y_v = (x[mask] for x in token_gae(table, mask, reward))
        adv = normalize_advantages(adv, group=process_group())
        v = c.r_max * table[:, 0]
        return Targets(adv, v, torch.zeros_like(v), returns, y_v)


LEARNERS = {"sapo": Learner, "sapo-separate": SeparateCritic, "ppo": PPO, "grpo": GroupBased,
            "rloo": GroupBased, "gigpo": GroupBased, "gigpo-nostd": GroupBased,
            "empg": GroupBased}


def main():
    with one_line_errors("train.py", envs.GameError):
        init_distributed()
        train_and_evaluate(parse_config(sys.argv[1:]))


if __name__ == "__main__":
    main()
