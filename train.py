"""Algorithm 1: one causal language model learns to act and to value from one rollout per task.

    python train.py                                                a tiny model, a built-in house
    torchrun train.py --env alfworld --model Qwen2.5-1.5B-Instruct   the paper's setting, on one GPU
    torchrun --nproc_per_node=8 --shutdown-timeout 600 train.py ...   data-parallel ranks
    python train.py --resume --out RUN                             continues an interrupted run
    train(settings(model="tiny", iterations=3))                    from Python

An iteration of Algorithm 1, by the paper's lines:
    2  play one trajectory for each task of a batch
    3  the old log-probs, V_old and Q_old of every turn, from one forward pass
    4  GAE over turns: advantages, targets of V and Q       Eq. 4-6
    5  normalize the advantages over all turns              Eq. 7
    6  the joint loss, from one forward pass                Eq. 8-12
    7  a gradient step
The method is the loop and `Learner`; below them are the gradient step and mini-batches. What
surrounds them is in training/: settings, and the life of a run.
In shapes, N turns and M response tokens are those of this rank; sums and means are over all ranks.
"""
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eval import sampler_for
from hf.loading import read_weights, refuse_adapters
from model import ActorCritic, Batch, Scores, make_batch, micro_batches
from rollout import ROLLOUT, SHUFFLE, Turn, ids_and_spans, make_sequences, rollout
from runtime.checkpoint import Clock, fingerprint, read_json, read_tensors
from runtime.cli import one_line_errors, progress
from runtime.distributed import (all_gather_list, all_reduce_sum, init_distributed, mean_or_zero,
                                 print0, process_group, rank)
from runtime.optim import AdamW, checked, load_state, saved_state, summed_gradients
from runtime.workers import GameError, WorkerPool
from sapo import (discounted_returns, explained_variance, normalize_advantages, sapo_loss,
                  turn_targets)
from training.run import prepared, with_speed_and_memory_settings
from training.settings import Config, check_model_settings, parse
from training.settings import settings  # noqa: F401 (for users: train.settings)


def train(config: Config | None = None, *, lm: ActorCritic | None = None,
          pool: WorkerPool | None = None, learner: "Learner | None" = None,
          make_sampler: Callable = sampler_for, log: Callable | None = None) -> ActorCritic:
    """Algorithm 1, whole -> the trained model.

        train(settings(...))                          everything is made from the settings
        train(settings(lm=lm, pool=pool, ...), lm=lm, pool=pool)     a model or pool of one's own
        train(learner=Learner(lm, settings(lm=lm, ...)))             a learner has its own settings

    make_sampler(lm, config, temperature) -> a rollout.SamplerProtocol, in place of our Sampler;
    log(metrics, iteration) is called on rank 0 with what metrics.jsonl gets, before a checkpoint.
    ValueError: what is given does not fit together. KeyboardInterrupt: SIGTERM or Ctrl-C came.
    GameError: an environment failed. Then, and if `log` fails, finished iterations are saved."""
    # loads, resumes, evaluates before and after
    with prepared(config, lm, pool, learner, make_sampler, log) as run:
        for iteration in range(run.first_iteration, run.config.iterations):
            run.begin_rollout()  # measures the wait for games anew
            turns = rollout(  # line 2  # SAPO: one trajectory per task
                run.sampler, run.tasks(iteration), run.pool, trajs=run.trajs,
                seed=(run.config.seed, iteration, ROLLOUT), history=run.config.history,
                max_num_seqs=run.config.max_num_seqs, interrupted=run.told_to_stop)
            if run.any_rank_stops():  # all ranks wait here for each other
                break
            run.pool.load(run.tasks(iteration + 1))  # workers load the next games meanwhile
            metrics = run.learner.learn(turns, iteration)  # lines 3 to 7
            metrics |= run.evaluate(iteration)  # with --eval_every
            run.log(iteration, turns, metrics)  # prints a line, appends to metrics.jsonl
            run.save(iteration)  # where a checkpoint is due, or a rank was told to stop
            if run.stopped:
                break
    # `prepared` has evaluated again by now or, where a rank was stopped, has raised the error
    return run.learner.lm


class Learner:
    """SAPO: the model, its optimizer, targets and loss. `learn` comes first, because with `train`
    it is Algorithm 1; what it calls follows in that order. Another method is a subclass that
    overrides what differs, `targets` or `loss` (baselines/learners.py): --algo MODULE:CLASS."""

    recommended = {}  # settings of this method in place of Config's; not those of CHOICE
    unused = ("critic_lr",)  # settings without effect, of which the command line warns

    def learn(self, turns: list[Turn], iteration: int) -> dict:
        """Lines 3 to 7 of Algorithm 1 for this rank's turns of a rollout -> metrics, under the
        names of `Run.log`. All ranks must call it."""
        self.clock.record("rollout")  # the seconds of all that came before in this iteration
        batch, minibatches = make_minibatches(turns, self.config, iteration, self.lm.device)
        old = self.score_behaviour_policy(batch, minibatches)  # line 3: log-probs, V, Q
        diff = self.compare_with_sampler(batch, minibatches, old)
        ref = self.score_reference(minibatches)  # log-probs for the KL term
        targets = self.targets(batch, old)  # lines 4 and 5: GAE over turns, normalization
        check_targets(self, targets, batch, old)
        infos = [self.step(minibatch, old, ref, targets, iteration)  # lines 6 and 7
                 for minibatch in shown(minibatches, "update")]
        self.free_gradients()
        set_advantages(batch, targets)  # they are shown in RUN/transcripts
        return compute_metrics(targets, infos) | {"sampler_logprob_diff": diff}

    def __init__(self, lm: ActorCritic, config: Config):
        """ValueError: the config says something else of this model: make it by settings(lm=lm)."""
        refuse_adapters(lm.model)  # it may have got one since it was loaded
        check_model_settings(config, lm)
        lm = with_speed_and_memory_settings(lm, config)
        self.lm = lm
        self.config = config
        self.clock = Clock()
        self.warned_of_sampler = False
        self.reference = None  # a copy of the model that training starts from; none if beta is 0
        if config.beta:  # (only its log-probs are used, so it needs no value rows of its own)
            self.reference = lm.copy()
        if not lm.lora_rank:
            lm.model.name_or_path = ""  # from now on its weights are those of no folder
        self.groups = lm.parameters()
        self.optimizer = checked(self.make_optimizer(self.groups, config.lr), self.groups)
        self.optimizer_steps = 0  # those tried, skipped ones included

    def make_optimizer(self, groups: list[list], lr: float) -> torch.optim.Optimizer:
        """The optimizer of groups of parameters: those of the model, and w+ and w-, which learn at
        value_lr_factor times lr; or the one group of a critic. A subclass can return any other of
        torch.optim.Optimizer of all these parameters, grouped as it likes, whose step() needs no
        closure. (If it has one rate for all, its `unused` should name value_lr_factor.) They must
        then be float32, and every rank updates all of them. `set_lr` multiplies its learning rates,
        and checkpoints have its state_dict(), of tensors and plain Python types."""
        rates = lr, self.config.value_lr_factor * lr
        return AdamW([{"params": params, "lr": rate} for params, rate in zip(groups, rates)], lr,
                     state_dtype=getattr(torch, self.config.optim_state_dtype))

    def score_behaviour_policy(self, batch, minibatches) -> Scores:
        """Line 3: one forward pass gives the old log-probs, V_old and Q_old. With --old_logprobs
        rollout they are the sampler's, and there is no entropy."""
        if self.config.old_logprobs == "rollout":
            return Scores(batch.logp, None, batch.v / self.lm.r_max, batch.q / self.lm.r_max)
        old = score_all(self.lm, minibatches, "old_logprobs")  # SAPO: no critic is run
        self.clock.record("old_logprobs")
        return old

    def compare_with_sampler(self, batch, minibatches, old: Scores) -> float:
        """The mean |log-prob of the sampler - log-prob of a forward pass| over all ranks' response
        tokens. A warning says so, once, if it is more than rounding. With --old_logprobs rollout
        there was no such pass, so one is made of each rank's last micro-batch, which is enough to
        notice a difference."""
        scored, sampled = old.logp, batch.logp
        micros = [micro for minibatch in minibatches for micro in minibatch]
        if self.config.old_logprobs == "rollout" and micros:  # a rank may have none
            scored = score_all(self.lm, [micros[-1:]], "old_logprobs").logp
            sampled = sampled[micros[-1].token_slice]
        difference = (scored - sampled).abs().double().sum().item()
        sums = all_gather_list([(difference, len(sampled))])
        self.clock.record("old_logprobs")
        difference = sum(x for x, _ in sums) / max(1, sum(n for _, n in sums))
        is_float32 = self.lm.model.dtype == torch.float32
        most = ROUNDING_IN_FLOAT32 if is_float32 else ROUNDING_IN_16_BITS
        agrees = difference <= most  # False for NaN
        if not agrees and not self.warned_of_sampler:
            self.warned_of_sampler = True
            print0(f"Warning: the sampler's log-probs differ from those of a forward pass by "
                   f"{difference:.2g} a token on average, and rounding explains at most {most:g}. "
                   "So the turns do not come from this policy: the sampler has another model, "
                   "template, context or temperature, or computes something else")
        return difference

    def score_reference(self, minibatches) -> torch.Tensor | None:
        """The log-probs (M,) of the model that training started from; None where beta is 0."""
        if not self.config.beta:
            return None
        logp = score_all(self.reference, minibatches, "reference").logp
        self.clock.record("ref")
        return logp

    def values(self, old: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """V_old and Q_old, (N,) each, in units of return (Eq. 2). With c_v = 0, V is not trained,
        and must not be a baseline, so it is 0 here; advantages are then rewards discounted by
        gamma lambda, and normalized. (Q is never a baseline.) ValueError: they are to be those of
        the sampler, and it has none."""
        v, q = self.lm.r_max * old.p_v, self.lm.r_max * old.p_q
        if self.config.old_logprobs == "rollout" and (v + q).isnan().any():
            raise ValueError("--old_logprobs rollout: the sampler's V and Q are NaN; with "
                             "--old_logprobs recompute it needs none")
        return (v if self.config.c_v else torch.zeros_like(v)), q

    def targets(self, batch, old: Scores) -> "Targets":
        """Lines 4 and 5. Statistics are taken over all turns of the iteration, on all ranks."""
        c, r_max = self.config, self.lm.r_max
        v, q = self.values(old)
        adv, y_v, y_q = turn_targets(batch.traj, batch.turn, batch.reward, batch.done, v, q,
                                     gamma=c.gamma, lam=c.gae_lambda)
        adv = normalize_advantages(  # SAPO: one mean over all tasks, not one for each group
            adv, invalid=batch.invalid, c_inv=c.c_inv, group=process_group())
        returns = discounted_returns(batch.traj, batch.turn, batch.reward, gamma=c.gamma)
        return Targets(adv[batch.turn_of_token], y_v / r_max, y_q / r_max, v, q, returns)

    def step(self, minibatch, old, ref, targets, iteration) -> dict:
        """Lines 6 and 7: one optimizer step on a mini-batch, a list of MicroBatches. Returns
        metrics. ValueError: too many steps in a row were not finite."""
        n_tokens, n_turns = denominators(minibatch)
        infos = accumulate_gradients(
            self.lm.model, self.optimizer, minibatch, self.config.gradient_checkpointing,
            lambda micro: self.loss(micro, old, ref, targets, n_tokens, n_turns))
        set_lr(self.optimizer, self.lr_factor(iteration))
        metrics = optimizer_step(self.optimizer, self.groups, infos)
        self.optimizer_steps += 1
        self.clock.record("update")
        return {"lr": self.optimizer.param_groups[0]["lr"]} | metrics

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        """Line 6: the forward pass and Eq. 12 of a micro-batch -> (loss, info). n_tokens and
        n_turns are the denominators, over all ranks' micro-batches of the mini-batch."""
        c, m, n = self.config, micro.token_slice, micro.turn_slice
        return sapo_loss(
            *self.lm.score(micro.batch), logp_old=old.logp[m], adv=targets.adv[m],
            logp_ref=None if ref is None else ref[m], p_v_old=old.p_v[n], p_q_old=old.p_q[n],
            y_v=targets.y_v[n], y_q=targets.y_q[n], clip=c.clip, clip_v=c.clip, clip_q=c.clip,
            c_v=c.c_v, c_q=c.c_q, beta=c.beta, c_h=c.c_h, denom_tokens=n_tokens,
            denom_turns=n_turns)

    def lr_factor(self, iteration: int) -> float:
        """What the learning rates of the next step are multiplied by: a linear warmup over the
        first optimizer steps, because Adam's first steps are large, times a linear decay over the
        iterations."""
        c = self.config
        warmup = min(1.0, (self.optimizer_steps + 1) / max(1, c.lr_warmup))
        decay = 1 - (1 - c.lr_final_fraction) * min(iteration, c.iterations) / c.iterations
        return decay * warmup

    def free_gradients(self) -> None:
        """After an update: a rollout can use their memory, and torch.compile cannot trace a 16-bit
        parameter that has a float32 gradient."""
        self.optimizer.zero_grad()

    def save(self, folder) -> None:
        """Writes all state. Random numbers and the order of tasks need none, because they follow
        from the seed and the iteration. Each rank writes its part of the optimizer's state; the
        value rows are in each part, because the folder of the model may have them in 16 bits."""
        state = {"format": CHECKPOINT_FORMAT, "optimizer_steps": self.optimizer_steps,
                 "value_rows": self.lm.value_rows.state_dict(),
                 "optimizer": saved_state(self.optimizer),
                 "reference": self.reference and fingerprint(self.reference.model.parameters())}
        torch.save(state, f"{folder}/learner-{rank()}.pt")
        if rank() == 0:
            self.lm.save(folder)

    def restore(self, folder: Path) -> None:
        """Loads what `save` wrote, on any number of ranks. ValueError, OSError: it is incomplete or
        of another format, it has another w+ and w-, or its KL term has another reference than this
        learner's."""
        value_ids = read_json(folder / "sapo.json").get("value_ids")
        if value_ids is None:
            raise ValueError(f"{folder} lacks sapo.json")
        if value_ids != [*self.lm.value_ids]:
            raise ValueError(f"{folder} has the value tokens {value_ids}, and this model has "
                             f"{[*self.lm.value_ids]}")
        shards = [read_tensors(path) for path in sorted(folder.glob("learner-*.pt"))]
        for shard in shards:
            if shard.get("format") != CHECKPOINT_FORMAT:
                raise ValueError(
                    f"{folder} was written by another version of this code (its format is "
                    f"{shard.get('format', 1)}, and this is {CHECKPOINT_FORMAT}). Its weights can "
                    f"be used for a new run: --model {folder} --out NEW")
        load_state(self.optimizer, [shard["optimizer"] for shard in shards],
                   f"{folder}/learner-*.pt")
        began_with = shards[0]["reference"]
        if self.reference and not began_with:
            raise ValueError(f"the run of {folder} has beta = 0, so it kept no reference for a KL "
                             "term")
        if self.reference and began_with != fingerprint(self.reference.model.parameters()):
            raise ValueError(f"the run of {folder} began with other weights than these, and its KL "
                             "term needs them as reference: give the model that it began with")
        read_weights(self.lm.model, folder)
        self.optimizer_steps = shards[0]["optimizer_steps"]
        self.lm.value_rows.load_state_dict(shards[0]["value_rows"])


CHECKPOINT_FORMAT = 2  # 1: w+ and w- were rows of the model's head alone


class Targets(NamedTuple):
    """What an update learns from, lines 4 and 5; v, q and returns are for the log alone."""

    adv: torch.Tensor  # (M,) the normalized advantage of every response token, Eq. 7
    y_v: torch.Tensor | None  # (N,) the targets of Eq. 6 / R_max
    y_q: torch.Tensor | None
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) the discounted return from each turn on


def check_targets(learner, targets: Targets, batch, old: Scores) -> None:
    """ValueError: a tensor that a learner's `targets` returned is of another shape than Targets
    says, or than the old values that the loss of `Learner` compares with them (a loss of one's own
    may do otherwise). The slices of one that is too long would fit, and be those of other turns."""
    shapes = {"adv": batch.logp, "v": batch.reward, "q": batch.reward, "returns": batch.reward}
    if type(learner).loss is Learner.loss:
        shapes |= {"y_v": old.p_v, "y_q": old.p_q}
    for name, like in shapes.items():
        x = getattr(targets, name, None)
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{type(learner).__name__}.targets: {name} has the shape "
                             f"{tuple(x.shape)}, and {tuple(like.shape)} is expected")


# ------------------------------------------------------------------------------ the gradient step

# The mean difference of log-probs that rounding can make. In float32 it is below 1e-5. In 16 bits,
# SmolLM2 has 0.02 to 0.04 where all is right, 0.43 or more if the sampler's temperature is 1.2, and
# 0.17 or more in the other context.
ROUNDING_IN_FLOAT32, ROUNDING_IN_16_BITS = 1e-4, 0.1
GRAD_CLIP = 1.0  # the largest norm of a gradient, that of verl-agent
MAX_FAILED_STEPS = 5  # non-finite steps in a row, after which the run stops


def denominators(minibatch) -> tuple[int, int]:
    """The numbers of response tokens and of turns in all ranks' parts of a mini-batch."""
    sizes = [(len(micro.batch.token_row), len(micro.batch.row)) for micro in minibatch]
    n_tokens, n_turns = map(sum, zip(*all_gather_list(sizes)))
    return n_tokens, n_turns


def accumulate_gradients(model, optimizer, micros, gradient_checkpointing, loss_of) -> list[dict]:
    """Adds up the gradients of loss_of(micro-batch) -> (loss, info). Returns the infos, each with
    its loss. Losses are sums over a global denominator, so their gradients are added, never
    averaged."""
    optimizer.zero_grad()
    # transformers recomputes activations in train mode only. Nothing else depends on that mode:
    # dropout was disabled when the model was loaded
    model.train(gradient_checkpointing)
    infos, params = [], [p for group in optimizer.param_groups for p in group["params"]]
    with summed_gradients(params):  # in float32, where torch.compile allows it
        for micro in micros:
            loss, info = loss_of(micro)
            loss.backward()
            infos.append(info | {"loss": loss.detach()})
    model.eval()
    return infos


def clip_gradients(groups: list[list]) -> list[float]:
    """Clips the gradients of each group of parameters to a norm of GRAD_CLIP, each by itself -> the
    norms before that. A Learner has two groups: the model, and w+ and w-.

    The gradient of w+ and w- is V's and Q's error times hidden states. In models with large hidden
    states, such as SmolLM2, it is larger than all others together; clipped as one, a large error of
    V would make the policy's step small. The paper says nothing about clipping. results/NOTES.md
    has the measurements."""
    norms = [torch.nn.utils.clip_grad_norm_(params, GRAD_CLIP) for params in groups]
    return torch.stack([norm.float() for norm in norms]).tolist()  # one wait for all of them


# How a metric is reduced, over the micro-batches of a step (sapo.py divides by their sum, so that
# most are added up) and then over the steps of an iteration, follows from its name:
#     *_max              the maximum, and the maximum
#     skipped_steps*                        the sum
#     all others         the sum, and the mean

def sum_over_micro_batches(infos: list[dict]) -> dict:
    """The infos of all ranks' micro-batches, of tensors or numbers, as one, of numbers."""
    values = [torch.stack([torch.as_tensor(x, device=info["loss"].device) for x in info.values()])
              for info in infos]
    values = torch.stack(values).tolist() if values else []  # one host sync for all of them
    infos = all_gather_list([dict(zip(info, row)) for info, row in zip(infos, values)])
    out = {}
    for name in infos[0]:
        reduce = max if name.endswith("_max") else sum
        out[name] = reduce(info[name] for info in infos)
        if name.endswith(("fraction", "saturated")):
            out[name] = min(out[name], 1.0)  # rounding may add up to more
    return out


def set_lr(optimizer, factor: float) -> None:
    """Sets the learning rate of every parameter group to `factor` times that which it began with,
    its "initial_lr"."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def optimizer_step(optimizer, groups: list[list], infos: list[dict]) -> dict:
    """All-reduces and clips the gradients of the optimizer's parameters, in these groups. Then it
    takes an optimizer step, unless the loss or a gradient norm is not finite. Returns the metrics
    of the step: what sum_over_micro_batches says, the norms before clipping of the first group and,
    if there is one, of the second, and skipped_steps, 0 or 1. ValueError: see skip_step."""
    params = [p for group in groups for p in group]
    for p in params:
        if p.grad is None:
            # torch wants a gradient of p.grad_dtype, which our AdamW sets for 16-bit parameters
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    all_reduce_sum([p.grad for p in params])
    norms = clip_gradients(groups)
    metrics = sum_over_micro_batches(infos)
    finite = bool(np.isfinite([metrics["loss"], *norms]).all())
    if finite:
        optimizer.step()
        optimizer.failed_steps = 0
    else:
        skip_step(optimizer, metrics["loss"], norms)
    for name, norm in zip(("grad_norm", "grad_norm_values"), norms):  # a critic has one group only
        metrics[name] = norm
    return metrics | {"skipped_steps": int(not finite)}


def skip_step(optimizer, loss: float, norms: list[float]) -> None:
    """Warns that a step is skipped. ValueError: it was the last of MAX_FAILED_STEPS in a row."""
    print0(f"Warning: skipping a step, its loss is {loss:g}, its gradient norms are "
           f"{' and '.join(f'{norm:g}' for norm in norms)}")
    # how many in a row; a new optimizer has no such attribute
    optimizer.failed_steps = getattr(optimizer, "failed_steps", 0) + 1
    if optimizer.failed_steps == MAX_FAILED_STEPS:
        raise ValueError(f"{MAX_FAILED_STEPS} steps in a row were not finite; start again from the "
                         "last good weights (those of a run: --model RUN/checkpoint-N --out NEW) "
                         "with a lower --lr")


# ------------------------------------------------------------------------------------ mini-batches

class RolloutBatch:
    """The turns of an iteration in the order of its micro-batches, as flat tensors."""

    def __init__(self, turns: list[Turn], device):
        def column(name, dtype=torch.float32):
            return torch.tensor([getattr(turn, name) for turn in turns], dtype=dtype, device=device)

        self.turns = turns
        self.traj = column("traj", torch.long)  # (N,)
        self.turn = column("turn", torch.long)  # (N,)
        self.reward = column("reward")  # (N,)
        self.done = column("done")  # (N,)
        self.invalid = column("invalid")  # (N,)
        self.v = column("v")  # (N,) the sampler's V and Q, in units of return
        self.q = column("q")  # (N,)
        self.logp = torch.tensor([x for turn in turns for x in turn.logp], device=device)  # (M,)
        lengths = torch.tensor([len(turn.logp) for turn in turns], dtype=torch.long)
        # (M,) the turn of each response token, among all turns
        self.turn_of_token = torch.arange(len(turns)).repeat_interleave(lengths).to(device)


class MicroBatch(NamedTuple):
    """What one forward pass of an update takes, and where its response tokens and its turns are in
    the flat tensors of the iteration."""

    batch: Batch
    token_slice: slice  # of (M,)
    turn_slice: slice  # of (N,)


MiniBatch = list[MicroBatch]  # what one optimizer step learns from


def shared_order(own_lengths: list, config, iteration) -> tuple[list, np.ndarray]:
    """Draws an order of all ranks' training sequences, the same on every rank. `own_lengths`:
    [(key, number of turns)] of this rank's -> keys and numbers of turns of all, in that order.
    ValueError: there are none, or two have one key."""
    lengths = sorted(all_gather_list(own_lengths))
    if len(dict(lengths)) < len(lengths):
        raise ValueError("two turns have the same trajectory number and index: give every rollout "
                         "of an update, and every rank, other numbers with rollout(..., trajs=)")
    if not lengths:
        raise ValueError("there are no turns to learn from. If they come from a rollout, the first "
                         "prompt of every task is too long: raise --max_prompt, or lower "
                         "--max_new_tokens")
    rng = np.random.default_rng([config.seed, iteration, SHUFFLE])
    lengths = [lengths[i] for i in rng.permutation(len(lengths))]
    return [key for key, _ in lengths], np.array([length for _, length in lengths])


def minibatch_numbers(lengths: np.ndarray, size: int) -> np.ndarray:
    """The numbers of turns of sequences, in order -> the number of each one's mini-batch. All
    mini-batches have about the same size, because a small last step would be noisy: with count =
    ceil(turns / size), turn i goes to number i * count // turns. A sequence goes as a whole where
    its first turn goes, so with sequences of several turns a mini-batch may have more than `size`,
    and a number may have none."""
    n_turns = lengths.sum()
    count = -(-n_turns // size)
    first_turn = lengths.cumsum() - lengths
    return first_turn * count // n_turns


def make_minibatches(turns, config, iteration, device) -> tuple[RolloutBatch, list[MiniBatch]]:
    """Splits the turns of all ranks, in a random order, into mini-batches of about equally many,
    and at most config.mini_batch (in `full` about as many, because a trajectory stays whole).
    Returns this rank's turns as tensors, and its share of each mini-batch, which may be empty. The
    turns are in the order of the micro-batches, so that a micro-batch is a slice of them.
    ValueError: see shared_order."""
    # all ranks know a sequence by the numbers of its trajectory and of its first turn
    own, own_lengths = {}, []
    for sequence in make_sequences(turns, config.context):
        key = sequence[0].traj, sequence[0].turn
        own[key] = sequence
        own_lengths.append((key, len(sequence)))
    keys, lengths = shared_order(own_lengths, config, iteration)
    numbers = minibatch_numbers(lengths, config.mini_batch)

    minibatches, ordered = [], []
    token_offset = 0  # response tokens so far; turns so far are len(ordered)
    for number in np.unique(numbers):
        members = [keys[i] for i in np.flatnonzero(numbers == number) if keys[i] in own]
        sequences = [(*ids_and_spans(own[key]), own[key]) for key in members]
        minibatches.append([])
        for group in micro_batches(sequences, config.tokens_per_micro_batch):
            batch = make_batch([(ids, spans) for ids, spans, _ in group]).to(device)
            token_slice = slice(token_offset, token_offset + len(batch.token_row))
            turn_slice = slice(len(ordered), len(ordered) + len(batch.row))
            minibatches[-1].append(MicroBatch(batch, token_slice, turn_slice))
            token_offset = token_slice.stop
            ordered += [turn for *_, sequence in group for turn in sequence]
    return RolloutBatch(ordered, device), minibatches


def shown(minibatches, label: str) -> Iterator[list]:
    """Yields the mini-batches, with a progress bar that counts tokens."""
    sizes = [sum(micro.batch.ids.numel() for micro in minibatch) for minibatch in minibatches]
    with progress(label, sum(sizes), "tokens") as bar:
        for minibatch, size in zip(minibatches, sizes):
            yield minibatch
            bar.update(size)


@torch.no_grad()
def score_all(lm: ActorCritic, minibatches, label: str) -> Scores:
    """One forward pass over every micro-batch, concatenated. `label` names the progress bar."""
    none = torch.zeros(0, device=lm.device)
    parts = [Scores(none, none, none, none)]  # a rank may have no turns
    for minibatch in shown(minibatches, label):
        parts += [lm.score(micro.batch) for micro in minibatch]
    return Scores(*map(torch.cat, zip(*parts)))


def set_advantages(batch: RolloutBatch, targets: Targets) -> None:
    """Gives every turn its normalized advantage: that of its tokens or, where they differ as in
    PPO, their mean."""
    sums = torch.zeros_like(batch.reward).index_add(0, batch.turn_of_token, targets.adv)
    means = sums / batch.turn_of_token.bincount()
    for turn, advantage in zip(batch.turns, means.tolist()):
        turn.advantage = advantage


def compute_metrics(targets: Targets, infos: list[dict]) -> dict:
    """The metrics of an update, over all ranks, under the names of `Run.log`; `infos` are those of
    its optimizer steps. Numbers that are not finite, which skipped steps have, are left out if
    there are others."""
    rows = zip(targets.returns.tolist(), targets.v.tolist(), targets.q.tolist())
    returns, v, q = map(torch.tensor, zip(*all_gather_list([*rows])))
    metrics = {"return_mean": returns.mean().item(), "return_max": returns.abs().max().item(),
               "v_mean": v.mean().item(), "q_mean": q.mean().item(),
               "v_explained_variance": explained_variance(v, returns),
               "q_explained_variance": explained_variance(q, returns)}
    for name in infos[0]:
        values = [info[name] for info in infos]
        finite = [x for x in values if np.isfinite(x)]
        if name.endswith("_max"):
            metrics[name] = max(finite or values)
        elif name.startswith("skipped_steps"):
            metrics[name] = sum(values)
        else:
            metrics[name] = mean_or_zero(finite or values)
    return metrics


def main():
    with one_line_errors("train.py", GameError):
        init_distributed()
        train(parse(sys.argv[1:]))


if __name__ == "__main__":
    from train import main  # as a module, too, so that there is one class Learner for all
    main()
