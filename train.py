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
The method is the loop and `Learner`, then the gradient step and mini-batches. What follows is
settings, and what surrounds the loop (`prepared`; what surrounds an iteration is runtime/run.py).
In shapes, N turns and M response tokens are those of this rank; sums and means are over all ranks.
"""
import contextlib
import copy
import dataclasses
import datetime
import hashlib
import json
import numbers
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

import envs
import eval as evaluation
from model import (ActorCritic, Scores, check_initial_readout, load, make_batch, micro_batches,
                   recommended_settings, refuse_adapters)
from rollout import ROLLOUT, SHUFFLE, TASKS, Turn, rollout
from runtime.checkpoint import (Clock, RunDir, default_run_name, init_wandb, read_json,
                                read_tensors, write_file, write_folder)
from runtime.cli import choose_threads, one_line_errors, parser_for, progress
from runtime.distributed import (all_gather_list, all_reduce_sum, barrier, broadcast_object,
                                 init_distributed, mean_or_zero, print0, process_group, rank, stop,
                                 world_size)
from runtime.optim import AdamW
from runtime.run import Run
from runtime.verify import compiled_scoring
from runtime.workers import WorkerPool
from sapo import (discounted_returns, explained_variance, normalize_advantages, sapo_loss,
                  turn_targets)


def train(config: "Config", lm: ActorCritic = None, pool: WorkerPool = None,
          learner: "Learner" = None) -> ActorCritic:
    """Algorithm 1, whole -> the trained model. `config` is made by `settings(...)`, and what is not
    given is made from it; a learner brings its model. `prepared` says which settings are whose.
    KeyboardInterrupt: SIGTERM or Ctrl-C came. GameError: an environment failed. Both times the last
    finished iteration is saved first."""
    with prepared(config, lm, pool, learner) as run:  # loads, resumes, evaluates before and after
        for iteration in range(run.first_iteration, run.config.iterations):
            run.begin_rollout()
            turns = rollout(  # line 2  # SAPO: one trajectory per task
                run.sampler, run.tasks(iteration), run.pool, trajs=run.trajs,
                seed=(run.config.seed, iteration, ROLLOUT), history=run.config.history,
                max_num_seqs=run.config.max_num_seqs, interrupted=stop.requested)
            if run.stopping():  # the ranks' one exchange after a rollout: go on, stop, or error
                break
            run.pool.load(run.tasks(iteration + 1))  # the next games, in the background
            metrics = run.learner.learn(turns, iteration)  # lines 3 to 7
            metrics |= run.evaluate(iteration)  # with --eval_every
            run.log(iteration, turns, metrics)
            if run.save(iteration):  # where a checkpoint is due, or a rank was told to stop
                break
    return run.learner.lm


class Learner:
    """SAPO: the model, its optimizer, targets and loss."""

    recommended = {}  # settings of this method
    unused = ("critic_lr",)  # settings without effect
    trains_values = True  # whether V and Q are read from the model's own head

    def learn(self, turns: list[Turn], iteration: int) -> dict:
        """Lines 3 to 7 of Algorithm 1 for this rank's turns of a rollout -> metrics, under the
        names of `Run.log`. All ranks must call it."""
        batch, minibatches = make_minibatches(turns, self.config, iteration, self.lm.device)
        old = self.score_behaviour_policy(batch, minibatches)  # line 3: log-probs, V, Q
        diff = self.sampler_logprob_diff(batch, minibatches, old)
        ref = self.score_reference(minibatches)  # log-probs for the KL term
        targets = self.targets(batch, old)  # lines 4 and 5: GAE over turns, normalization
        steps = [self.step(minibatch, old, ref, targets, iteration)  # lines 6 and 7
                 for minibatch in shown(minibatches, "update")]
        self.free_gradients()
        set_advantages(batch, targets)  # for the page of an episode
        return compute_metrics(targets, steps) | {"sampler_logprob_diff": diff}

    def __init__(self, lm: ActorCritic, config: "Config"):
        refuse_adapters(lm.model)  # it may have got one since it was loaded
        frozen = not all(p.requires_grad for p in lm.head.parameters())
        if frozen and self.trains_values and (config.c_v or config.c_q):
            raise ValueError("the head of the model is frozen (requires_grad is False), and V and "
                             "Q are read from it: unfreeze it, or set c_v and c_q to 0")
        self.lm, self.config, self.clock = lm, filled(config), Clock()
        self.warned_of_sampler = False
        self.reference = None  # the model that training starts from
        if config.beta:
            self.reference = dataclasses.replace(lm, model=copy.deepcopy(lm.model))
        self.optimizer = make_optimizer(lm.model, config)
        self.steps = 0  # optimizer steps tried, skipped ones included

    def score_behaviour_policy(self, batch, minibatches) -> Scores:
        """Line 3: one forward pass gives the old log-probs, V_old and Q_old. With --old_logprobs
        rollout they are the sampler's, and there is no entropy."""
        self.clock.record("rollout")  # all that came before in this iteration
        if self.config.old_logprobs == "rollout":
            r_max = self.lm.r_max
            return Scores(batch.logp, None, batch.v / r_max, batch.q / r_max)
        old = score_all(self.lm, minibatches, "old_logprobs")  # SAPO: no critic is run
        self.clock.record("old_logprobs")
        return old

    def sampler_logprob_diff(self, batch, minibatches, old: Scores) -> float:
        """The mean |log-prob of the sampler - log-prob of a forward pass| over all ranks' response
        tokens. With --old_logprobs rollout it is measured on a rank's last micro-batch alone. A
        warning says so, once, if it is more than rounding."""
        logp, sampled = old.logp, batch.logp
        micros = [micro for minibatch in minibatches for micro in minibatch]
        if self.config.old_logprobs == "rollout" and micros:  # a rank may have none
            logp = score_all(self.lm, [micros[-1:]], "old_logprobs").logp
            sampled = sampled[micros[-1].tokens]
        difference = (logp - sampled).abs().double().sum().item()
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
        """The log-probs (M,) of the model that training started from; None where beta is 0.
        ValueError: this learner was made with beta = 0, so it has no reference."""
        if not self.config.beta:
            return None
        if self.reference is None:
            raise ValueError("the learner was made with beta 0, so it has no reference for the KL")
        logp = score_all(self.reference, minibatches, "reference").logp
        self.clock.record("ref")
        return logp

    def values(self, old: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """V_old and Q_old, (N,) each, in units of return. With c_v = 0, V is not trained, and is 0
        here; Q can stay, because it never enters the advantage."""
        v, q = self.lm.r_max * old.p_v, self.lm.r_max * old.p_q
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
        return Targets(adv[batch.turn_of], y_v / r_max, y_q / r_max, v, q, returns)

    def step(self, minibatch, old, ref, targets, iteration) -> dict:
        """Lines 6 and 7: one optimizer step on a mini-batch, a list of micro-batches. Returns
        metrics. ValueError: too many steps in a row were not finite."""
        n_tokens, n_turns = denominators(minibatch)
        lr = self.config.lr * self.lr_factor(iteration)
        infos = accumulate_gradients(
            self.lm.model, minibatch, self.config.gradient_checkpointing,
            lambda micro: self.loss(micro, old, ref, targets, n_tokens, n_turns))
        metrics = optimizer_step(self.lm.model, self.optimizer, infos, lr, self.lm.value_ids)
        self.steps += 1
        self.clock.record("update")
        return {"lr": lr} | metrics

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        """Line 6: the forward pass and Eq. 12 of a micro-batch -> (loss, info). n_tokens and
        n_turns are the denominators, over all ranks' micro-batches of the mini-batch."""
        c, token_slice, turn_slice = self.config, micro.tokens, micro.turns
        return sapo_loss(
            *self.lm.score(micro), logp_old=old.logp[token_slice], adv=targets.adv[token_slice],
            logp_ref=None if ref is None else ref[token_slice],
            p_v_old=old.p_v[turn_slice], p_q_old=old.p_q[turn_slice],
            y_v=targets.y_v[turn_slice], y_q=targets.y_q[turn_slice],
            clip=c.clip, clip_v=c.clip, clip_q=c.clip, c_v=c.c_v, c_q=c.c_q, beta=c.beta,
            c_h=c.c_h, tokens=n_tokens, turns=n_turns)

    def lr_factor(self, iteration: int) -> float:
        """What the learning rate of the next step is multiplied by: a linear warmup, because Adam's
        first steps are large, times a linear decay over the iterations."""
        c = self.config
        warmup = min(1.0, (self.steps + 1) / max(1, c.lr_warmup))
        decay = 1 - (1 - c.lr_final_fraction) * min(iteration, c.iterations) / c.iterations
        return decay * warmup

    def free_gradients(self) -> None:
        """After an update: a rollout can use their memory, and torch.compile cannot trace a 16-bit
        parameter that has a float32 gradient."""
        self.optimizer.zero_grad()

    def save(self, folder) -> None:
        """Writes all state. Random numbers and the order of tasks need none, because they follow
        from the seed and the iteration. Each rank writes its part of the optimizer's state."""
        state = {"steps": self.steps, "optimizer": self.optimizer.state_dict()["state"],
                 "reference": self.reference and fingerprint(self.reference.model)}
        torch.save(state, f"{folder}/learner-{rank()}.pt")
        if rank() == 0:
            self.lm.save(folder)

    def restore(self, folder: Path) -> None:
        """Loads what `save` wrote, on any number of ranks. ValueError, OSError: it is incomplete,
        it has another w+ and w-, or its KL term has another reference than this learner's."""
        value_ids = read_json(folder / "sapo.json").get("value_ids")
        if value_ids != [*self.lm.value_ids]:
            raise ValueError(f"{folder} lacks sapo.json" if value_ids is None else
                             f"{folder} has the value tokens {value_ids}, and this model has "
                             f"{[*self.lm.value_ids]}")
        shards = load_shards(self.optimizer, folder, "learner")
        self.steps, began_with = shards[0]["steps"], shards[0]["reference"]
        if self.reference and began_with != fingerprint(self.reference.model):
            raise ValueError(
                f"the run of {folder} began with other weights than these, and its KL term needs "
                "them as reference: give the model that it began with" if began_with else
                f"the run of {folder} has beta = 0, so it kept no reference for a KL term")
        saved = load(str(folder), dtype=self.lm.model.dtype, device="cpu").model
        self.lm.model.load_state_dict(saved.state_dict())


class Targets(NamedTuple):
    """What an update learns from, lines 4 and 5; v, q and returns are for the log alone."""

    adv: torch.Tensor  # (M,) the normalized advantage of every response token, Eq. 7
    y_v: torch.Tensor | None  # (N,) the targets of Eq. 6 / R_max
    y_q: torch.Tensor | None
    v: torch.Tensor  # (N,) V_old and Q_old, in units of return
    q: torch.Tensor
    returns: torch.Tensor  # (N,) the discounted return from each turn on


def fingerprint(model) -> str:
    """A short text to recognize weights by: a hash of the first 64 numbers of each parameter."""
    first = torch.cat([p.detach().flatten()[:64].float() for p in model.parameters()])
    return hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]


# ------------------------------------------------------------------------------ the gradient step

# The mean difference of log-probs that rounding can make. In float32 it is below 1e-5. In 16 bits,
# SmolLM2 has 0.02 to 0.04 where all is right, 0.43 or more if the sampler's temperature is 1.2, and
# 0.17 or more in the other context.
ROUNDING_IN_FLOAT32, ROUNDING_IN_16_BITS = 1e-4, 0.1
GRAD_CLIP = 1.0  # the largest norm of a gradient, that of verl-agent
MAX_FAILED_STEPS = 5  # non-finite steps in a row, after which the run stops


def trainable_parameters(model) -> list:
    """The parameters that are not frozen. ValueError: all are."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("all parameters of the model are frozen: requires_grad is False")
    return trained


def make_optimizer(model, config) -> AdamW:
    return AdamW(trainable_parameters(model), config.lr,
                 state_dtype=getattr(torch, config.optim_state_dtype))


def denominators(minibatch) -> tuple[int, int]:
    """The numbers of response tokens and of turns in all ranks' parts of a mini-batch."""
    sizes = [(len(micro.turn_of), len(micro.start)) for micro in minibatch]
    n_tokens, n_turns = map(sum, zip(*all_gather_list(sizes)))
    return n_tokens, n_turns


def accumulate_gradients(model, micros, gradient_checkpointing, loss_of):
    """Adds up the gradients of loss_of(micro-batch) -> (loss, info). Returns the infos, each with
    its loss. Losses are sums over a global denominator, so their gradients are added, never
    averaged."""
    model.zero_grad(set_to_none=True)
    model.train(gradient_checkpointing)  # transformers recomputes activations in train mode only
    infos, total = [], {}

    def move_to_total(p):
        """Called for each parameter as soon as a backward pass has its gradient. Gradients are not
        left in p.grad, because torch.compile cannot trace a 16-bit parameter that has a float32
        gradient; moved one by one, they never exist twice."""
        total[p] = total[p].add_(p.grad) if p in total else p.grad
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(move_to_total)
             for p in trainable_parameters(model)]
    try:
        for micro in micros:
            loss, info = loss_of(micro)
            loss.backward()
            infos.append(info | {"loss": loss.detach()})
    finally:
        model.eval()
        for hook in hooks:
            hook.remove()
    for p, gradient in total.items():
        p.grad = gradient
    return infos


def clip_gradients(model, value_ids=()) -> tuple[float, float]:
    """Clips two gradients, each by itself, to a norm of GRAD_CLIP: that of the rows of w+ and w- in
    the head, and that of all other parameters. Returns both norms before that, the others' first.
    `value_ids`: the tokens w+ and w-, if the model has such rows.

    The gradient of these rows is V's or Q's error times hidden states. In models with large hidden
    states, such as SmolLM2, it is larger than all others together. With one norm over everything,
    a large error of V would therefore make the policy's step small. The paper says nothing about
    clipping. results/NOTES.md has the measurements."""
    ids, head = [*value_ids], []
    if ids:  # the weight and, where there is one, the bias
        head = [p for p in model.get_output_embeddings().parameters() if p.requires_grad]
    rows = [p.grad[ids] for p in head]  # copies
    for p in head:
        p.grad[ids] = 0
    norm = torch.nn.utils.clip_grad_norm_(trainable_parameters(model), GRAD_CLIP)
    norm_of_rows = torch.nn.utils.get_total_norm(rows) if rows else torch.zeros_like(norm)
    for p, row in zip(head, rows):
        p.grad[ids] = row * (GRAD_CLIP / (norm_of_rows + 1e-6)).clamp(max=1)
    return tuple(torch.stack([norm.float(), norm_of_rows.float()]).tolist())  # one wait for both


def optimizer_step(model, optimizer, infos, lr, value_ids=()):
    """All-reduces and clips the gradients. Then it takes an optimizer step, unless the loss or a
    gradient norm is not finite. Returns the infos summed over micro-batches and ranks (for names
    that end in _max, their maximum), the gradient norms before clipping, and skipped_steps, 0 or 1.
    ValueError: this was the last of MAX_FAILED_STEPS such steps in a row."""
    trained = trainable_parameters(model)
    for p in trained:
        if p.grad is None:  # AdamW sets grad_dtype: float32, unless its state has 16 bits
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    all_reduce_sum([p.grad for p in trained])
    norm, norm_of_rows = clip_gradients(model, value_ids)
    values = [torch.stack([*info.values()]) for info in infos]
    values = torch.stack(values).tolist() if values else []  # one host sync for all of them
    infos = all_gather_list([dict(zip(info, row)) for info, row in zip(infos, values)])
    out = {k: (max if k.endswith("_max") else sum)(info[k] for info in infos) for k in infos[0]}
    out |= {k: min(x, 1.0) for k, x in out.items()  # rounding may add up to more than 1
            if k.endswith(("fraction", "saturated"))}
    finite = bool(np.isfinite([out["loss"], norm, norm_of_rows]).all())
    if finite:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.failed_steps = 0
    else:
        print0(f"Warning: skipping a step, its loss is {out['loss']:g}, its gradient norms are "
               f"{norm:g} and {norm_of_rows:g}")
        optimizer.failed_steps += 1
        if optimizer.failed_steps == MAX_FAILED_STEPS:
            raise ValueError(f"{MAX_FAILED_STEPS} steps in a row were not finite; start again from "
                             "the last good weights (those of a run: --model "
                             "RUN/checkpoint-N --out NEW) with a lower --lr")
    norms = {"grad_norm": norm} | ({"grad_norm_values": norm_of_rows} if value_ids else {})
    return out | norms | {"skipped_steps": int(not finite)}


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
        self.turn_of = torch.arange(len(turns)).repeat_interleave(lengths).to(device)  # (M,)


class Sample(NamedTuple):
    """A sequence to train on: one turn in `window`, one trajectory in `full`."""

    ids: list
    spans: list  # (start, end) of each response
    turns: list


def make_samples(turns: list[Turn], context: str) -> list[Sample]:
    """Turns, in order -> samples. ValueError: a turn was changed, or in `full` one is missing."""
    samples = []
    for turn in turns:
        if context != "full" or not samples or turn.traj != samples[-1].turns[-1].traj:
            samples.append(Sample([], [], []))
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
    micro-batches (model.Batch), which may be empty."""
    samples = make_samples(turns, config.context)
    own_keys = [(sample.turns[0].traj, sample.turns[0].turn) for sample in samples]
    mine = dict(zip(own_keys, samples))
    keyed_sizes = all_gather_list([(key, len(x.turns)) for key, x in zip(own_keys, samples)])
    size_of = dict(keyed_sizes)  # in turns, of all ranks' samples
    if len(size_of) < len(keyed_sizes):
        raise ValueError("two turns have the same trajectory number and index: give every rollout "
                         "of an update, and every rank, other numbers with rollout(..., trajs=)")
    if not size_of:
        raise ValueError("there are no turns to learn from. If they come from a rollout, the first "
                         "prompt of every task is too long: raise --max_prompt, or lower "
                         "--max_new_tokens")
    rng = np.random.default_rng([config.seed, iteration, SHUFFLE])
    keys = sorted(size_of)
    keys = [keys[i] for i in rng.permutation(len(keys))]
    sizes = np.array([size_of[key] for key in keys])
    n_turns = sizes.sum()
    count = -(-n_turns // config.mini_batch)  # of mini-batches, rounded up
    # (samples,) the mini-batch of each: turn i goes to number i * count // n_turns, so that all
    # have about the same size, because a small last step would be noisy
    first_turn = sizes.cumsum() - sizes
    minibatch_of = first_turn * count // n_turns
    minibatches, ordered, m = [], [], 0  # m: response tokens so far
    for number in np.unique(minibatch_of):
        minibatches.append([])
        in_it = [key for key, its_number in zip(keys, minibatch_of) if its_number == number]
        own = [mine[key] for key in in_it if key in mine]
        for group in micro_batches(own, config.tokens_per_micro_batch):
            micro = make_batch([(sample.ids, sample.spans) for sample in group]).to(device)
            n = len(ordered)
            ordered += [turn for sample in group for turn in sample.turns]
            micro = micro._replace(tokens=slice(m, m + len(micro.turn_of)),
                                   turns=slice(n, len(ordered)))
            m = micro.tokens.stop
            minibatches[-1].append(micro)
    return RolloutBatch(ordered, device), minibatches


def shown(minibatches, label: str) -> Iterator[list]:
    """Yields the mini-batches, with a progress bar that counts tokens."""
    sizes = [sum(micro.ids.numel() for micro in minibatch) for minibatch in minibatches]
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
        parts += [lm.score(micro) for micro in minibatch]
    return Scores(*map(torch.cat, zip(*parts)))


def set_advantages(batch: RolloutBatch, targets: Targets) -> None:
    """Gives every turn its normalized advantage, the mean over its tokens."""
    sums = torch.zeros_like(batch.reward).index_add(0, batch.turn_of, targets.adv)
    for turn, advantage in zip(batch.turns, (sums / batch.turn_of.bincount()).tolist()):
        turn.advantage = advantage


def compute_metrics(targets: Targets, steps: list[dict]) -> dict:
    """The metrics of an update, over all ranks, under the names of `Run.log`.
    Numbers that are not finite, which skipped steps have, are left out if there are others."""
    rows = zip(targets.returns.tolist(), targets.v.tolist(), targets.q.tolist())
    returns, v, q = map(torch.tensor, zip(*all_gather_list([*rows])))
    metrics = {"return_mean": returns.mean().item(), "return_max": returns.abs().max().item(),
               "v_mean": v.mean().item(), "q_mean": q.mean().item(),
               "v_explained_variance": explained_variance(v, returns),
               "q_explained_variance": explained_variance(q, returns)}
    for name in steps[0]:
        values = [step[name] for step in steps]
        finite = [x for x in values if np.isfinite(x)]
        reduce = (max if name.endswith("_max") else sum if name.startswith("skipped")
                  else mean_or_zero)
        metrics[name] = reduce(finite or values)
    return metrics


def load_shards(optimizer: AdamW, folder: Path, name: str) -> list[dict]:
    """Loads the optimizer's state from NAME-RANK.pt, of however many ranks -> what these files
    hold. ValueError: one of them is missing."""
    shards = [read_tensors(path) for path in sorted(folder.glob(f"{name}-*.pt"))]
    found = set()
    for shard in shards:
        optimizer.load_shard(shard["optimizer"])
        found.update(shard["optimizer"])
    if len(found) != len(optimizer.owner):
        raise ValueError(f"{folder} lacks one of its {name}-*.pt, the optimizer state of one rank")
    return shards


# --------------------------------------------------------------------------------------- settings

ALGOS = ("sapo", "sapo-separate", "ppo", "grpo", "rloo", "gigpo", "gigpo-nostd", "empg")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting is a flag, and its comment is the flag's --help. Defaults are the paper's where
    it gives them, else verl-agent's, else ours. What is None depends on the environment, the model
    or the machine, and is filled in when training starts. ValueError: a value cannot be used."""

    env: str = "house"  # house, alfworld, webshop, webshop-human (goals by people), MODULE:CLASS
    model: str = "tiny"  # tiny (results/tiny-*), a hub id, a bare name (Qwen2.5-1.5B), a folder
    data: str = None  # the folder that contains alfworld's json_2.1.1, or webshop's catalogue
    out: str = None  # folder of the run; default runs/ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED, but
        # from Python none, and nothing is written
    seed: int = 0  # random seed
    iterations: int = 150  # number of iterations, each a rollout and an update
    algo: Literal[ALGOS] = "sapo"  # the method; those in baselines/ are what SAPO is compared with
    batch_size: int = 128  # |B|: trajectories (not turns) per iteration
    group_size: int = 1  # trajectories of the same task, for the group-based methods in baselines/
    context: Literal["window", "full"] = None  # a new prompt each turn, or one conversation;
        # default the environment's, which is window for all that are named here
    engine: Literal["kv", "hf"] = "kv"  # kv: our sampler; hf: transformers' generate
    max_num_seqs: int = None  # games played side by side per rank; default all of an iteration,
        # and 144 in evaluations
    compile: bool = None  # torch.compile scoring, and sampling at temperature 1; default on a GPU
    dtype: Literal["float32", "bfloat16"] = None  # of the weights; default bfloat16 on a GPU
    history: int = 2  # past turns shown in a prompt of --context window
    horizon: int = None  # maximum number of turns per episode; default the environment's
    places: int = 5  # house: number of places
    objects: int = 4  # house: number of things to carry
    max_new_tokens: int = 512  # maximum length of a response
    max_prompt: int = None  # maximum tokens of a prompt, or of a whole conversation with full;
        # default the environment's, with full the model's

    gamma: float = 0.95  # discount per turn, Eq. 4
    gae_lambda: float = 0.95  # lambda of GAE over turns, Eq. 5
    r_max: float = None  # R_max, Eq. 2: returns must be within [-R_max, R_max]; default the
        # model's, which is 10 for a new one
    tau_v: float = None  # temperature of the value readout, Eq. 1; default the model's, which is 1
        # for a new one
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two vocabulary entries no text uses
    c_inv: float = 0.1  # penalty for a response in the wrong format, in units of return: subtracted
        # from the advantage before Eq. 7 normalizes it
    clip: float = 0.2  # epsilon, Eq. 9, and epsilon_V, epsilon_Q, Eq. 10
    c_v: float = 0.5  # weight of V's loss in Eq. 12; with 0, GAE uses V = 0
    c_q: float = 0.25  # weight of Q's loss in Eq. 12
    beta: float = 0.01  # weight of the KL to the initial model
    c_h: float = 0.001  # weight of the entropy bonus

    lr: float = 1e-6  # AdamW's learning rate
    lr_warmup: int = 0  # optimizer steps of linear warmup
    lr_final_fraction: float = 1.0  # the learning rate decays linearly, and would reach this
        # fraction of --lr after the last iteration
    critic_lr: float = 1e-5  # learning rate of a separate critic, in baselines/
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
        if self.env in envs.ENVS.values():  # a class that has a name
            object.__setattr__(self, "env", envs.name_of(self.env))
        for f in dataclasses.fields(self):
            choices, value = get_args(f.type), getattr(self, f.name)
            if isinstance(value, np.generic):  # which JSON does not know
                object.__setattr__(self, f.name, value := value.item())
            if choices and value is not None and value not in choices:
                raise ValueError(f"{f.name} is {value!r}; it can be {', '.join(choices)}")
            wanted = {int: numbers.Integral, float: numbers.Real}.get(f.type, object)
            if value is not None and not isinstance(value, wanted):
                whole = "whole " * (f.type is int)
                raise ValueError(f"{f.name} is {value!r}; it must be a {whole}number")
        check_ranges(self, RANGES)
        if self.batch_size % self.group_size:
            raise ValueError(f"--group_size {self.group_size} does not divide --batch_size "
                             f"{self.batch_size}")


FINITE = sys.float_info.max
RANGES = (  # (smallest, largest, settings)
    (1, FINITE, "iterations batch_size group_size horizon max_new_tokens mini_batch save_every "
                "tokens_per_micro_batch max_num_seqs max_prompt"),
    (0, FINITE, "seed history lr critic_lr lr_warmup lr_final_fraction eval_games eval_every beta "
                "c_v c_q c_h c_inv clip"),
    (0, 1, "gamma gae_lambda"), (1e-6, FINITE, "r_max tau_v"))
# What may change when a run is resumed: its length, its surroundings, and what saves memory. With
# another length, a learning rate that decays (--lr_final_fraction) jumps.
RESUME_MUTABLE = {"iterations", "save_every", "data", "out", "resume", "max_num_seqs", "wandb",
                  "max_prompt", "tokens_per_micro_batch", "gradient_checkpointing", "compile",
                  "optim_state_dtype"}


def check_ranges(settings, ranges) -> None:
    """Each range is (smallest, largest, names of settings, separated by blanks). ValueError: a
    setting that is not None is outside its range."""
    for low, high, names in ranges:
        for name in names.split():
            value = getattr(settings, name)
            if value is not None and not low <= value <= high:
                limit = f"at most {high}" if high < FINITE else "finite"
                raise ValueError(f"--{name} must be at least {low} and {limit}; it is {value}")


def settings(**given) -> Config:
    """The settings of a run, as the command line has them: those of the paper (Config's defaults),
    then those that the environment, the method and the model's folder recommend ("settings" in its
    sapo.json), then `given`. With resume=True, those of the run in `out`, if there is one.

    ValueError: a value cannot be used, or is not that of the run that is resumed. (Those in
    RESUME_MUTABLE may be others.)"""
    given = {name: value for name, value in given.items() if value is not None}
    first = "env", "model", "algo", "context", "resume", "out"  # what decides the others
    chosen = Config(**{name: given[name] for name in first if name in given})
    if chosen.resume and chosen.out and (RunDir(chosen.out) / "config.json").exists():
        stored = RunDir(chosen.out).settings()
        stored = {name: stored[name] for name in vars(chosen) if name in stored}
        other = [name for name, value in as_json(given).items()
                 if name not in RESUME_MUTABLE and value != stored.get(name)]
        if other:
            was = "; ".join(f"--{name} was {stored.get(name)}" for name in other)
            raise ValueError(f"--resume: {chosen.out} was started with different settings ({was})")
        return Config(**(stored | given))
    recommended = (envs.env_class(chosen.env).recommended
                   | learner_class(chosen.algo).recommended
                   | recommended_settings(chosen.model, chosen.env))
    if envs.context_for(chosen.env, chosen.context) == "full":
        # it is meant for single prompts, and would limit the whole conversation
        recommended.pop("max_prompt", None)
    if unknown := {*recommended} - {f.name for f in dataclasses.fields(Config)}:
        raise ValueError(f"{', '.join(sorted(unknown))}: recommended by --env {chosen.env} or "
                         f"--model {chosen.model}, but no setting of train.py")
    return Config(**(recommended | given))


def filled(c: Config) -> Config:
    """Settings in which what is None, and depends on the environment or the machine, is filled in.
    ValueError: a setting does not fit the environment, or another setting."""
    env, gpu = envs.env_class(c.env), torch.cuda.is_available()
    context = envs.context_for(c.env, c.context)
    if unknown := [name for name in env.flags if not hasattr(c, name)]:
        raise ValueError(f"--env {c.env}: its `flags` name {', '.join(unknown)}, which are no "
                         f"settings of train.py; it has {', '.join(envs.OPTIONS)}")
    for name in envs.OPTIONS:
        if name not in env.flags and getattr(c, name) not in (None, getattr(Config, name)):
            raise ValueError(f"--{name} has no effect with --env {c.env}")
    defaults = {"horizon": env.horizon, "dtype": "bfloat16" if gpu else "float32", "compile": gpu,
                "eval_games": env.held_out[1], "context": context,
                "max_prompt": env.max_prompt if context == "window" else None}
    c = dataclasses.replace(c, **{name: value for name, value in defaults.items()
                                  if getattr(c, name) is None})
    if c.eval_every and not c.eval_games:
        raise ValueError("--eval_every needs --eval_games")
    return c


def as_json(config: dict) -> dict:
    """Settings by name, with values as config.json has them: an environment's class by its name."""
    if "env" in config:
        config = config | {"env": envs.name_of(config["env"])}
    return json.loads(json.dumps(config))


def parse_config(argv: list[str] = ()) -> Config:
    """Flags -> Config, with `out` and `context` filled in. ValueError: they cannot be used."""
    given = vars(parser_for(Config, "SAPO, Algorithm 1.").parse_args(argv))
    first = {name: given[name] for name in ("env", "model", "algo", "context") if name in given}
    if "out" not in given:
        # the folder's name has the flags that differ from these
        config = filled(settings(**first))
        defaults = vars(config) | {"context": envs.env_class(config.env).context}
        given["out"] = f"runs/{default_run_name(given, defaults, RESUME_MUTABLE)}"
    # alone, --resume needs a run; with other flags, it starts the run if there is none yet
    if "resume" in given and given.keys() <= {"resume", "out"}:
        RunDir(given["out"]).settings()
    config = settings(**given)
    for name in learner_class(config.algo).unused:
        if name in given:
            print0(f"Warning: --{name} has no effect with --algo {config.algo}")
    # (from Python, `train` does it, once it knows the pool's environment)
    return dataclasses.replace(config, context=envs.context_for(config.env, config.context))


def learner_class(algo: str) -> type[Learner]:
    """The class of a method's learner."""
    if algo == "sapo":
        return Learner
    from baselines.learners import LEARNERS  # late: it imports this file
    return LEARNERS[algo]


# ----------------------------------------------------------------------- what surrounds the loop

@contextlib.contextmanager
def prepared(config: Config, lm=None, pool=None, learner=None) -> Iterator["Run"]:
    """What surrounds the loop of `train`. Before it: locks the run's folder, makes what is not
    given, evaluates the initial model and loads a checkpoint. After it: saves the last finished
    iteration where the loop was stopped; else evaluates again, and writes final weights and
    reports. With config.out = None it writes nothing.

    Which settings are taken from what is given, and not from config:
        r_max, tau_v, dtype          a given model's (config.model and value_tokens have no effect)
        env and its constructor's    a given pool's, also those that are its defaults
        algo, group_size,            a given learner's
        optim_state_dtype
    All others are config's.
    ValueError: two models are given, one of them the learner's; or the learner's group_size does
    not divide batch_size."""
    if learner:
        if lm and lm.model is not learner.lm.model:
            raise ValueError("lm and learner.lm are two models: give the learner alone")
        own = learner.config
        config = dataclasses.replace(config, algo=own.algo, group_size=own.group_size,
                                     optim_state_dtype=own.optim_state_dtype)
    if pool:
        options = {name: pool.options.get(name, getattr(Config, name))
                   for name in ("horizon", *envs.OPTIONS)}
        config = dataclasses.replace(config, env=pool.env, **options)
    if given := learner.lm if learner else lm:
        dtype = str(given.head.weight.dtype).removeprefix("torch.")
        config = dataclasses.replace(config, dtype=dtype)
    config = filled(config)
    if config.wandb and not config.out:
        raise ValueError("--wandb needs --out, the folder of the run")
    folder = RunDir(config.out) if config.out else None
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(folder.lock(config.resume))
        pool = pool or stack.enter_context(contextlib.closing(envs.Pool(
            config.env, envs.options_for(vars(config)), envs.default_workers(config.env))))
        task_ids = envs.tasks(pool.env, "train", **pool.options)
        held_out = envs.tasks(pool.env, pool.env.held_out[0], **pool.options)
        if shared := {*task_ids} & {*held_out}:
            raise ValueError(f"--env {pool.name}: {len(shared)} tasks, such as "
                             f"{min(shared, key=str)}, are both trained on and held out")
        checkpoint = folder and folder.newest_checkpoint()
        wandb = init_wandb(config, folder) if config.wandb and rank() == 0 else None
        if learner:
            lm = learner.lm
        elif not lm:
            lm = load_initial_model(config, pool, task_ids[0])
        lm = apply_speed_and_memory_settings(lm, config)
        config = dataclasses.replace(config, r_max=lm.r_max, tau_v=lm.tau_v)
        # a template that prints today's date gets the day on which the run began
        began = read_json(folder / "config.json").get("date") if folder else None
        date = broadcast_object(began or datetime.date.today().isoformat())
        stored = as_json(vars(config)) | {"date": date}
        lm.run = {name: stored[name] for name in evaluation.SHARED}  # for eval.py
        if lm.chat:
            lm.chat.date = date
        # allocates all that training keeps, so that a lack of memory shows before the evaluation
        learner = learner or learner_class(config.algo)(lm, config)
        learner.lm, learner.config = lm, config
        if folder and rank() == 0:
            folder.begin(stored, checkpoint)
        before = broadcast_object(read_json(folder / "before.json") if folder else {})
        if not before:
            before = evaluation.evaluate_config(lm, pool, config)
            if folder and rank() == 0:
                write_file(folder / "before.json", json.dumps(before))
        print0("success before training: " + evaluation.success_of(before))
        sampler = evaluation.sampler_for(lm, config)
        run = Run(config, learner, sampler, pool,
                  tasks=lambda iteration: draw_tasks(task_ids, config, iteration),
                  held_out_success=lambda: evaluation.held_out_success(lm, pool, config),
                  page=lambda *about: evaluation.episode_page(*about, lm.tokenizer.decode,
                                                              pool.env.tool_schemas()),
                  folder=folder, checkpoint=checkpoint, wandb=wandb)
        with stop.handle_signals():
            try:
                yield run
            except Exception as error:
                run.save_after(error)
                raise
            run.save_if_stopped()
        after = evaluation.evaluate_config(lm, pool, config)
        print0("success after training: " + evaluation.success_of(after))
        if folder:
            write_folder(folder / "final", lambda path: lm.save(path) if rank() == 0 else None)
        if folder and rank() == 0:
            print(evaluation.write_reports(before, after, config))
            evaluation.draw(evaluation.group_runs([config.out]), folder / "curves.png")
            print(f"wrote {config.out}; next: python eval.py --model {config.out}")
        if wandb:
            wandb.finish()
        barrier()  # a rank that exits early would take the others down


def draw_tasks(task_ids: list, c: Config, iteration: int) -> list:
    """This rank's share of an iteration's tasks. Over all ranks, each task comes --group_size times
    in a row; after the last iteration there are none. All tasks occur once per epoch, in an order
    that is drawn anew each time."""
    n = len(task_ids)
    count = c.batch_size // c.group_size if iteration < c.iterations else 0
    ids = []
    for i in range(iteration * count, (iteration + 1) * count):
        order = np.random.default_rng([c.seed, i // n, TASKS]).permutation(n)
        ids += [task_ids[order[i % n]]] * c.group_size
    return ids[rank()::world_size()]


def load_initial_model(config, pool, task) -> ActorCritic:
    """Loads the model that training starts from. The first prompt of `task` must fit into it, with
    a response. ValueError: it does not, or the value readouts of that prompt are saturated."""
    print0(f"loading {config.model}" + (f"; writing to {config.out}" if config.out else ""))
    pool.start(0, task)
    first_answer, = pool.gather([0])
    pool.drop(0)
    builder = pool.env.prompt_builder(*first_answer)
    messages = next(builder.messages(config.context, config.history))
    with progress(f"loading {config.model}"):
        lm = load(config.model, env=config.env, dtype=getattr(torch, config.dtype),
                  value_tokens=config.value_tokens, tau_v=config.tau_v, r_max=config.r_max,
                  prompt=envs.obs_text(messages), max_new_tokens=config.max_new_tokens)
    check_initial_readout(lm, lm.chat.encode_messages(messages, (), pool.env.tool_schemas()))
    choose_threads(lm.model)
    threads = f", {torch.get_num_threads()} thread(s)" if lm.device.type == "cpu" else ""
    print0(f"on {lm.device}{threads}, {world_size()} rank(s); w+ and w- are tokens {lm.value_ids}")
    taken = [f"{k} {v}" for k, v in lm.recommended.items() if getattr(config, k, None) == v]
    if taken:
        print0(f"settings that {config.model} recommends: {', '.join(taken)}")
    return lm


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


def main():
    with one_line_errors("train.py", envs.GameError):
        init_distributed()
        train(parse_config(sys.argv[1:]))


if __name__ == "__main__":
    import train as this_module  # baselines imports it too, and there must be one class Learner
    this_module.main()
