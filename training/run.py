"""The life of a training run: what is before, around and after the iterations of `train.train`.

    prepared    before the loop: locks the run's folder, loads, resumes, evaluates; after it:
                evaluates again, writes weights, tables and curves
    Run         around an iteration: its tasks, the log, warnings, checkpoints, evaluations, and how
                all ranks stop together
"""
import contextlib
import datetime
import functools
import gc
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import envs
import eval as evaluation
from hf.verify import check_initial_readout, compiled_scoring, difference_of_merging
from model import ActorCritic, load, make_batch, micro_batches
from rollout import EVALUATION, TASKS, SamplerProtocol, ids_and_spans, make_sequences, rollout
from runtime import report
from runtime.answers import obs_text
from runtime.checkpoint import (RunDir, init_wandb, iterations_of, read_json, write_file,
                                write_folder)
from runtime.cli import choose_threads, progress
from runtime.distributed import (all_gather_list, barrier, broadcast_object, mean_or_zero, print0,
                                 rank, stop, world_size)
from runtime.workers import GameError, is_importable
from training.settings import (ALGOS, Config, as_json, check_class, check_model_settings,
                               learner_class, options_of)

# --------------------------------------------------------------------------- around the whole loop

@contextlib.contextmanager
def prepared(config: Config | None, lm=None, pool=None, learner=None,
             make_sampler=evaluation.sampler_for, log=None) -> Iterator["Run"]:
    """What surrounds the loop of `train`. Before it: locks the run's folder, makes what is not
    given, evaluates the initial model and loads a checkpoint. After it: saves the last finished
    iteration where the loop was stopped; else evaluates again, and writes final weights and
    reports. With config.out = None it writes nothing. The arguments are those of `train`.
    ValueError: what is given does not fit together, or the environment's tasks for training and for
    evaluation overlap."""
    config, lm = agreed(config, lm, pool, learner)
    folder = RunDir(config.out) if config.out else None
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(folder.lock(config.resume))
        pool = pool or stack.enter_context(contextlib.closing(envs.Pool(
            config.env, envs.options_for(vars(config)), envs.default_workers(config.env))))
        task_ids = envs.tasks(pool.env, "train", **pool.options)
        held_out = envs.tasks(pool.env, pool.env.held_out[0], **pool.options)
        validation, played = [], [(held_out, config.eval_games)] if config.eval_games else []
        if config.eval_every and pool.env.validation:
            split, number = pool.env.validation
            validation = envs.tasks(pool.env, split, **pool.options)
            played.append((validation, number))
        for ids, number in played:  # some are left
            evaluation.without(evaluation.evenly_spaced(ids, number), config.leave_out)
        evaluation.check_left_out(config.leave_out, [*task_ids, *held_out, *validation])
        first_task, *_ = evaluation.without(task_ids, config.leave_out)
        check_disjoint(pool.name, {"trained on": task_ids, "held out": held_out,
                                   "for validation": validation})
        checkpoint = folder and folder.newest_checkpoint()
        if checkpoint:
            check_length(config, folder.settings(), iterations_of(checkpoint))
            folder.check_metrics(checkpoint)
        pool.remedy = ". With --leave_out {} it is not played"  # (there may be no run to resume)
        logs = [log] if log else []
        if config.wandb and rank() == 0:
            wandb = init_wandb(config, folder)
            logs.append(lambda metrics, iteration: wandb.log(metrics, step=iteration))
        lm = lm or load_initial_model(config, pool, first_task)
        # a template that prints today's date gets the day on which the run began
        began = read_json(folder / "config.json").get("date") if folder else None
        date = broadcast_object(began or datetime.date.today().isoformat())
        if lm.chat:
            lm.chat.date = date
        lm.played_with = settings_of_games(config, date)
        # allocates all that training keeps, so that a lack of memory shows before the evaluation
        learner = learner or learner_class(config.algo)(lm, config)
        if checkpoint:
            learner.restore(checkpoint)
        if folder and rank() == 0:
            folder.begin(as_json(vars(config)) | {"date": date}, checkpoint)
        again = f" --resume --out {shlex.quote(str(config.out))}" if folder else ""
        again = again.replace("{", "{{").replace("}", "}}")  # the game is filled in
        pool.remedy = ". --leave_out {}" + again + " goes on without it"
        before = broadcast_object(read_json(folder / "before.json") if folder else {})
        if not before and not checkpoint:
            before = evaluation.evaluate_config(learner.lm, pool, config, make_sampler)
            if folder and rank() == 0:
                write_file(folder / "before.json", json.dumps(before))
        print0("success before training: " + evaluation.success_of(before))
        sampler = make_sampler(learner.lm, config, 1.0)
        run = Run(config, learner, sampler, pool, task_ids, folder, checkpoint, make_sampler, logs)
        with stop.handle_signals():
            try:
                yield run
            except Exception as error:
                run.save_after(error)
                raise
            run.save_if_stopped()
        run.sampler = sampler = None
        gc.collect()  # frees training's KV cache: an evaluation has one of its own
        after = evaluation.evaluate_config(learner.lm, pool, config, make_sampler)
        print0("success after training: " + evaluation.success_of(after))
        if folder:
            write_weights(learner.lm, pool, config, folder, make_sampler)
        if folder and rank() == 0:
            print(evaluation.write_reports(before, after, config))
            report.draw(report.group_runs([config.out]), folder / "curves.png")
            print(f"wrote {config.out}"
                  + f"; next: python eval.py --model {config.out}" * is_importable(config.env))
        if config.wandb and rank() == 0:
            wandb.finish()
        barrier()  # a rank that exits early would take the others down


def agreed(config: Config | None, lm, pool, learner) -> tuple:
    """The config and the model (or None) of a run: a learner's own, or those given. The config has
    the learner's method, whatever its own says. ValueError: there is none, or there are two that
    differ."""
    if learner:
        if isinstance(learner, type):
            raise ValueError(f"the learner is a class: make it, {learner.__name__}(lm, config)")
        if config not in (None, learner.config):
            raise ValueError("the learner has settings of its own: train(learner=learner), and "
                             "make the learner with the settings that you want")
        if lm and lm.model is not learner.lm.model:
            raise ValueError("lm and learner.lm are two models: give the learner alone")
        config, lm = replace(learner.config, algo=envs.name_of(type(learner), ALGOS)), learner.lm
    if config is None:
        raise ValueError("train needs a config, made by settings(...), or a learner")
    if config.horizon is None:
        raise ValueError("the config is not complete: make it by settings(...), not by Config(...)")
    if lm:
        check_model_settings(config, lm)
    if pool:
        check_class(config.env, pool)
        for name, value in options_of(pool).items():
            if as_json({name: value}) != as_json({name: getattr(config, name)}):
                raise ValueError(f"the pool has {name} {value!r}, and the config "
                                 f"{getattr(config, name)!r}: make it by settings(pool=pool)")
    return config, lm


def check_length(config: Config, stored: dict, done: int) -> None:
    """Says so if the learning rate jumps, because a run is resumed with another number of
    iterations than is `stored`. ValueError: more iterations are done."""
    if done > config.iterations:
        raise ValueError(f"--iterations {config.iterations}: the run in {config.out} has done "
                         f"{done} already")
    if stored["iterations"] != config.iterations and config.lr_final_fraction != 1:
        print0(f"--iterations was {stored['iterations']} and is {config.iterations} now, so the "
               "learning rate, which decays over all of them, jumps")


def draw_tasks(task_ids: list, c: Config, iteration: int) -> list:
    """This rank's share of an iteration's tasks. Over all ranks, each task comes --group_size times
    in a row; after the last iteration there are none. All tasks occur once per epoch, in an order
    that is drawn anew each time; without those of --leave_out, the others keep this order."""
    n = len(evaluation.without(task_ids, c.leave_out))
    count = c.batch_size // c.group_size if iteration < c.iterations else 0
    ids, orders = [], {}  # the latter: by epoch
    for i in range(iteration * count, (iteration + 1) * count):
        epoch = i // n
        if epoch not in orders:
            drawn = np.random.default_rng([c.seed, epoch, TASKS]).permutation(len(task_ids))
            orders[epoch] = evaluation.without([task_ids[j] for j in drawn], c.leave_out)
        ids += [orders[epoch][i % n]] * c.group_size
    return ids[rank()::world_size()]


def check_disjoint(env: str, splits: dict[str, Sequence]) -> None:
    """ValueError: two of the splits, {what they are used for: task ids}, share tasks."""
    for (use, ids), (other_use, others) in itertools.combinations(splits.items(), 2):
        if shared := {*ids} & {*others}:
            remedy = "; an environment without games for validation says validation = None"
            raise ValueError(f"--env {env}: {len(shared)} tasks, such as {min(shared, key=str)}, "
                             f"are both {use} and {other_use}"
                             + (remedy if other_use == "for validation" else ""))


def write_weights(lm: ActorCritic, pool, config: Config, folder: RunDir, make_sampler) -> None:
    """Writes RUN/final, a whole model; and RUN/adapter, if the model has adapters. They are merged
    into RUN/final, in its 16 bits if that changes no more than rounding, else in float32: where
    B A is below half a step of W, W + B A rounded is W, and what was learned is lost. All ranks
    must call it."""
    if lm.lora_rank:
        write_folder(folder / "adapter", lambda path: lm.save(path) if rank() == 0 else None)
        if rank() == 0:
            lm = merged_within_rounding(lm, pool, config, make_sampler)
    write_folder(folder / "final", lambda path: lm.save(path) if rank() == 0 else None)


def merged_within_rounding(lm: ActorCritic, pool, config: Config, make_sampler) -> ActorCritic:
    """A model with adapters merged, in its own data type or in float32. They are compared by the
    log-probs of a few held-out games, or games of training if there are none."""
    if lm.model.dtype == torch.float32:
        return lm.merged(torch.float32)
    split = pool.env.held_out[0] if config.eval_games else "train"
    ids = evaluation.games_of(pool, config, split, GAMES_TO_COMPARE)
    sampler = make_sampler(lm, config, pool.env.eval_temperatures[0])
    turns = rollout(sampler, ids, pool, seed=(config.seed, 0, EVALUATION), history=config.history,
                    max_num_seqs=config.max_num_seqs)
    sequences = [ids_and_spans(sequence) for sequence in make_sequences(turns, config.context)]
    batches = [make_batch(group).to(lm.device)
               for group in micro_batches(sequences, config.tokens_per_micro_batch)]
    difference, excess = difference_of_merging(lm, batches)
    print0(f"merged into {config.dtype}, the adapters' log-probs differ by {difference:.2g} a token"
           + (f": that is more than rounding, so {config.out}/final is in float32" if excess
              else ", which is rounding"))
    return lm.merged(torch.float32 if excess else lm.model.dtype)


GAMES_TO_COMPARE = 8  # held-out games, of which a merged model is compared with its adapters


def settings_of_games(config: Config, date: str | None) -> dict:
    """The settings by which a run plays, for eval.py; they are saved with the model."""
    stored = as_json(vars(config)) | {"date": date}
    return {name: stored[name] for name in evaluation.SHARED}


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
        lm = load(config.model, tiny=pool.env.tiny_model, dtype=getattr(torch, config.dtype),
                  value_tokens=config.value_tokens, tau_v=config.tau_v, r_max=config.r_max,
                  prompt=obs_text(messages), max_new_tokens=config.max_new_tokens,
                  lora_rank=config.lora_rank)
    check_initial_readout(lm, lm.chat.encode_messages(messages, (), pool.env.tool_schemas()))
    choose_threads(lm.model)
    threads = f", {torch.get_num_threads()} thread(s)" if lm.device.type == "cpu" else ""
    if lm.lora_rank:
        trained, _ = lm.parameters()
        print0(f"training adapters of rank {lm.lora_rank}, {sum(p.numel() for p in trained):,} "
               f"numbers, at a learning rate of {config.lr:g}")
    print0(f"on {lm.device}{threads}, {world_size()} rank(s); w+ and w- are tokens {lm.value_ids}")
    taken = [f"{k} {v}" for k, v in lm.recommended.items() if getattr(config, k, None) == v]
    if taken:
        print0(f"settings that {config.model} recommends: {', '.join(taken)}")
    return lm


def with_speed_and_memory_settings(lm: ActorCritic, config: Config) -> ActorCritic:
    """The model as --compile and --gradient_checkpointing want it."""
    if config.gradient_checkpointing:
        # transformers 6 has only the first name, 5.17 only the second
        enable = getattr(lm.model, "activation_checkpointing_enable", None)
        (enable or lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.compile and not lm.compile:
        print0("compiling scoring and sampling, about a minute in all; --no-compile skips it")
        lm.model.train(config.gradient_checkpointing)  # as in an update
        with progress("compiling"):
            lm = compiled_scoring(lm, config.tokens_per_micro_batch)
        lm.model.eval()
    return lm


# ----------------------------------------------------------------------------- around an iteration

@dataclass
class Run:
    """What surrounds an iteration in the loop of `train`: tasks, evaluations, log and warnings,
    checkpoints, and the exchanges by which all ranks go on or stop together.

    Ranks wait for each other, so all of them must make the same exchanges in the same order:

        any_rank_stops     after the rollout; if a rank stops, on to save_if_stopped
        (learn, evaluate and log have exchanges of their own)
        save               at the end of the iteration, and those of a checkpoint where one is due
                           or a rank stops; then, if one does, on to save_if_stopped
        save_if_stopped    after the loop, and those of a checkpoint if a rank stops

    A rank whose rollout fails makes the first and the last of these, too (`save_after`)."""

    config: Config
    learner: object  # a train.Learner
    sampler: SamplerProtocol
    pool: object
    task_ids: list  # all tasks to train on
    folder: RunDir | None = None
    checkpoint: Path | None = None  # what it goes on from
    make_sampler: Callable = evaluation.sampler_for
    logs: Sequence[Callable] = ()  # each is called with (metrics, iteration)

    def __post_init__(self):
        self.trajs = range(rank(), self.config.batch_size, world_size())  # this rank's trajectories
        self.first_iteration = iterations_of(self.checkpoint)
        self.iterations_done = self.iterations_saved = self.first_iteration
        self.lines = []  # of metrics.jsonl
        if self.folder and rank() == 0:
            self.lines = self.folder.metrics()
        if self.checkpoint and rank() == 0:
            self.folder.delete_results()
        self.steps_done = self.learner.optimizer_steps  # optimizer steps of all finished iterations
        self.in_rollout = False  # whether the other ranks expect `any_rank_stops` of this one next
        self.reports = []  # of all ranks, in the last exchange
        self.error = None  # of this rank; raised when the last finished iteration is saved
        self.iterations_without_success = 0
        self.warned = set()
        self.learner.clock.take()

    # ---- in the order of the loop
    def tasks(self, iteration: int) -> list:
        """This rank's tasks of an iteration; none after the last one."""
        return draw_tasks(self.task_ids, self.config, iteration)

    def begin_rollout(self) -> None:
        """Measures the wait for games anew. From now on the other ranks expect `any_rank_stops`."""
        self.pool.seconds = 0.0
        self.in_rollout = True

    def told_to_stop(self) -> bool:
        """Whether SIGTERM or Ctrl-C came to this rank."""
        return stop.requested()

    def any_rank_stops(self) -> bool:
        """The exchange among the ranks after a rollout, which waits for all of them: whether one of
        them was told to stop, or had an error."""
        self.in_rollout = False
        return self.exchange()

    def exchange(self) -> bool:
        """Tells all ranks whether this one was told to stop, and its error -> `stopped`."""
        text = f"rank {rank()}: {self.error}" if self.error else ""
        self.reports = all_gather_list([(self.told_to_stop(), text)])
        return self.stopped

    @property
    def stopped(self) -> bool:
        """Whether in the last exchange there was a reason to stop, on any rank."""
        return any(told or text for told, text in self.reports)

    def evaluate(self, iteration: int) -> dict:
        """With --eval_every, plays games after every so many iterations. Where the environment has
        games for validation, these -> {"validation": success}, and the weights are kept as RUN/best
        if that is the best so far. Otherwise held-out games, which no model may be chosen by ->
        {"held_out": success}. An environment's error is raised only when the iteration is
        saved."""
        c, lm = self.config, self.learner.lm
        if not c.eval_every or (iteration + 1) % c.eval_every:
            return {}
        waited = self.pool.seconds
        try:
            name, success = evaluation.success_while_training(lm, self.pool, c, self.make_sampler)
        except GameError as error:  # of any rank, raised on all of them
            self.error = error
            return {}
        self.pool.seconds = waited  # of the rollout alone
        text = f"success {success:.1%} on held-out games"
        if name == "validation":
            text = f"success {success:.1%} on games for validation"
            known = [line for line in self.lines if name in line]
            best = max(known, key=lambda line: line[name], default={name: -1, "iteration": -1})
            if self.folder and success > broadcast_object(best[name]):
                if rank() == 0:
                    self.folder.set_reports_aside("best", iterations=best["iteration"] + 1)
                write_folder(self.folder / "best",
                             lambda path: lm.save(path) if rank() == 0 else None)
                text += ", the best so far"
        print0(text)
        self.learner.clock.record("evaluation")
        return {name: success}

    def log(self, iteration: int, turns: list, metrics: dict) -> None:
        """Adds metrics of the rollout to those of the update, over all ranks, prints a line,
        appends them to metrics.jsonl, and hands them to `logs`:

        iteration                          from 0
        episodes, turns                    numbers of them
        tokens_encoded, tokens_sampled     prompt tokens (in `full`, new ones) and response tokens
        success, score                     means over episodes, sampled at temperature 1
        success_by_category                success for each category of tasks
        valid_actions, admissible_actions  fractions of turns: in the format; offered by the game
        truncated                          fraction of episodes cut off: by the horizon, by the
                                           environment, or because the next prompt did not fit
        context_overflow                   fraction cut off because the next prompt did not fit
        response_truncated                 fraction of responses that reached --max_new_tokens
        env/NAME                           of info["metrics"] of the environment: means over the
                                           episodes that have it
        loss, loss_policy, loss_v, loss_q  Eq. 12, 9, 11
        kl, kl_max, entropy                per token, in nats: the KL to the initial model, mean and
                                           maximum (0 with --beta 0, which does not measure it), and
                                           the policy's entropy
        ratio_max, *clip_fraction          Eq. 8; fractions of tokens or turns clipped by Eq. 9, 10
        v_saturated, q_saturated           fractions of readouts at the bounds of Eq. 1, where its
                                           gradient is 0
        v_, q_explained_variance           of the discounted return
        v_mean, q_mean, return_mean        of old values and returns, over turns
        return_max                         the largest |return|, which should not exceed R_max
        lr                                 the learning rate of the model's parameters, the mean
                                           over the steps
        grad_norm, grad_norm_values        before clipping: of the model's parameters, and of w+ and
                                           w-, which are a parameter of their own
        skipped_steps                      steps that were not finite
        sampler_logprob_diff               mean |log-prob of the sampler - of the scoring pass|
        validation                         with --eval_every: success on games for validation at the
                                           environment's first temperature
        held_out                           the same on held-out games, where there are no others
        time_*                             seconds on rank 0: rollout (of which env: waiting for
                                           games), old_logprobs, ref, update, evaluation; save, of
                                           the iteration before; total, their sum without env
        """
        config = self.config
        metrics |= {"iteration": iteration, "time_env": self.pool.seconds}
        metrics |= self.learner.clock.take()
        metrics |= rollout_metrics(turns, self.learner.lm, self.pool.env.categories,
                                   config.batch_size)
        unplayed = self.unplayed(iteration, turns)
        if rank() > 0:
            return
        self.lines.append(metrics)
        if self.folder:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
        line = (f"{config.algo}, {iteration + 1} of {config.iterations}: success "
                f"{metrics['success']:.0%}, admissible actions "
                f"{metrics['admissible_actions']:.0%}, explained variance of V "
                f"{metrics['v_explained_variance']:.0%}, {metrics['time_total']:.1f} s")
        tellers = [lambda: self.warn(metrics, unplayed), lambda: print0(line)]
        if self.folder and turns and (iteration % 10 == 0 or iteration == config.iterations - 1):
            first = [turn for turn in turns if turn.traj == turns[0].traj]
            tellers.append(lambda: self.write_page(iteration, first))
        # each logger gets a copy, which it may change
        tellers += [functools.partial(log, {**metrics}, iteration) for log in self.logs]
        for tell in tellers:
            try:
                tell()
            except Exception as error:  # all ranks learn of it when the iteration is saved
                self.error = self.error or error

    def write_page(self, iteration: int, episode: list) -> None:
        """Writes an episode of this iteration as a page."""
        page = report.episode_page(f"{self.config.out}, iteration {iteration + 1}", episode,
                                   self.lines, self.learner.lm.tokenizer.decode,
                                   self.pool.env.tool_schemas())
        (self.folder / "transcripts").mkdir(exist_ok=True)
        write_file(self.folder / f"transcripts/{iteration + 1:04d}.html", page)

    def save(self, iteration: int) -> None:
        """The exchange among the ranks at the end of an iteration. Writes a checkpoint if there is
        a reason to stop, and every --save_every iterations."""
        self.iterations_done = iteration + 1
        self.steps_done = self.learner.optimizer_steps
        self.exchange()
        last = self.iterations_done == self.config.iterations
        if self.stopped or last or self.iterations_done % self.config.save_every == 0:
            self.write_checkpoint()

    # ---- at the end
    def write_checkpoint(self) -> None:
        """Writes a checkpoint of the last finished iteration, unless there is one already. All
        ranks must call it."""
        if self.iterations_done > self.iterations_saved and self.folder:
            self.folder.save_checkpoint(self.iterations_done, self.learner.save)
            self.iterations_saved = self.iterations_done
            self.learner.clock.record("save")  # logged with the next iteration

    def save_after(self, error: Exception) -> None:
        """Saves the last finished iteration after an error, if no weight has changed since, and if
        all ranks can do so. After an error in a rollout they can: this rank does what the others
        do, which learn of it in `any_rank_stops`, and raises the error."""
        if self.in_rollout:
            self.error = error
            self.any_rank_stops()
            self.save_if_stopped()
        elif world_size() == 1 and self.learner.optimizer_steps == self.steps_done:
            self.write_checkpoint()

    def save_if_stopped(self) -> None:
        """Saves the last finished iteration if the loop was stopped. KeyboardInterrupt: by a
        signal. By an error: this rank's own error, or a GameError with the words of another
        rank's. All ranks must call it."""
        before = self.reports
        self.exchange()  # a signal may have come while the last checkpoint was written
        self.reports = [*before, *self.reports]
        if not self.stopped:
            return
        self.write_checkpoint()
        if texts := [text for _, text in self.reports if text]:
            raise self.error or GameError(texts[0])
        print0("nothing is saved, because config.out is None" if not self.folder else
               f"saved {self.iterations_done} iterations; continue with --resume --out "
               f"{self.config.out}" if self.iterations_done else
               "no iteration was finished, so there is nothing to save")
        raise KeyboardInterrupt

    # ---- warnings
    def unplayed(self, iteration, turns) -> list:
        """All ranks' tasks whose first prompt did not fit."""
        played = {turn.traj for turn in turns}
        mine = zip(self.trajs, self.tasks(iteration))
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
                "model how to act in an environment; or choose a larger --model"),
            "success": (
                self.iterations_without_success == 3 and not metrics["return_max"],
                "no success in three iterations, so there is nothing to learn from. Look into "
                "transcripts/; tools/imitate.py, a larger --model or a longer --horizon may help"),
            "reward": (
                metrics["success"] > 0 and not metrics["return_max"],
                "episodes are won, and every reward is 0: nothing can be learned from reward 0. "
                "The environment's step must return one"),
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
    averaged = ("won", "score", "truncated", "context_overflow")
    names = (*averaged, "category", "metrics", "done", "invalid", "admissible")
    rows = all_gather_list([{name: getattr(turn, name) for name in names}
                            | {"response_truncated": not lm.stopped(turn.action_ids),
                               "encoded": len(turn.prompt_ids), "sampled": len(turn.action_ids)}
                            for turn in turns])
    ends = [row for row in rows if row["done"]]
    ends += [{"won": False, "score": 0.0, "truncated": True, "context_overflow": True}] * (
        episodes - len(ends))
    won = {name: [] for name in categories.values()}
    for row in ends:
        if "category" not in row:  # it was not played
            continue
        name = categories.get(row["category"], row["category"])
        if name is not None:
            won.setdefault(name, []).append(row["won"])
    # a category of which there was no episode in this iteration has None
    by_category = {name: mean_or_zero(x) if x else None for name, x in won.items()}
    shares = {name: mean_or_zero([row[name] for row in ends]) for name in averaged}
    success = shares.pop("won")
    return {"episodes": len(ends), "turns": len(rows),
            "tokens_encoded": sum(row["encoded"] for row in rows),
            "tokens_sampled": sum(row["sampled"] for row in rows), "success": success, **shares,
            "success_by_category": by_category,
            "response_truncated": mean_or_zero([row["response_truncated"] for row in rows]),
            "valid_actions": mean_or_zero([not row["invalid"] for row in rows]),
            "admissible_actions": mean_or_zero([row["admissible"] for row in rows]),
            **evaluation.mean_metrics(ends)}
