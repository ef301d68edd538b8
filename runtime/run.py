"""What surrounds an iteration of training: the log, warnings, checkpoints, evaluations, and how all
ranks stop together. (What surrounds the whole loop is train.prepared.)"""
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import RunDir, iterations_of, write_file, write_folder
from runtime.distributed import (all_gather_list, broadcast_object, mean_or_zero, print0, rank,
                                 stop, world_size)
from runtime.workers import GameError


@dataclass
class Run:
    """What surrounds an iteration in the loop of `train`: tasks, evaluations, log and warnings,
    checkpoints, and the exchanges by which all ranks go on or stop together."""

    config: object  # a train.Config
    learner: object
    sampler: object
    pool: object
    tasks: Callable  # (iteration) -> this rank's tasks; none after the last iteration
    held_out_success: Callable  # () -> success in held-out games
    page: Callable  # (title, turns, lines of metrics.jsonl) -> an episode as HTML
    folder: RunDir | None = None
    checkpoint: Path | None = None  # what it goes on from
    wandb: object = None

    def __post_init__(self):
        self.trajs = range(rank(), self.config.batch_size, world_size())  # this rank's trajectories
        self.first_iteration = iterations_of(self.checkpoint)
        self.iterations_done = self.iterations_saved = self.first_iteration
        self.lines = []  # of metrics.jsonl
        if self.folder and rank() == 0:
            self.lines = self.folder.metrics_of(self.first_iteration)
        if self.checkpoint:
            self.learner.restore(self.checkpoint)
            if rank() == 0:
                self.folder.delete_results()
        self.steps_done = self.learner.steps  # optimizer steps of all finished iterations
        self.in_rollout = False  # whether the other ranks expect `stopping` of this one next
        self.reports = []  # of all ranks, in the last exchange
        self.evaluation_error = None
        self.iterations_without_success = 0
        self.warned = set()
        self.learner.clock.take()

    # ---- in the order of the loop
    def begin_rollout(self) -> None:
        """Sets the counters of a rollout to 0."""
        self.pool.seconds = 0.0
        self.sampler.tokens_encoded = self.sampler.tokens_sampled = 0
        self.in_rollout = True

    def stopping(self) -> bool:
        """The exchange among the ranks after a rollout: whether one of them was told to stop, or
        had an error."""
        self.in_rollout = False
        return self.exchange()

    def exchange(self, error: Exception | None = None) -> bool:
        """Tells all ranks whether this one was told to stop, and its error. Returns whether there
        is a reason to stop on any rank."""
        text = f"rank {rank()}: {error}" if error else ""
        self.reports = all_gather_list([(stop.requested(), text)])
        return any(told or text for told, text in self.reports)

    def evaluate(self, iteration: int) -> dict:
        """With --eval_every, plays held-out games after every so many iterations -> {"held_out":
        success}. The weights are kept as RUN/best if that is the best so far. An environment's
        error is raised only when the iteration is saved."""
        c, lm = self.config, self.learner.lm
        if not c.eval_every or (iteration + 1) % c.eval_every:
            return {}
        waited = self.pool.seconds
        try:
            success = self.held_out_success()
        except GameError as error:  # of any rank, raised on all of them
            self.evaluation_error = error
            return {}
        self.pool.seconds = waited  # of the rollout alone
        best = max([line.get("held_out", -1) for line in self.lines], default=-1)
        if self.folder and success > broadcast_object(best):
            write_folder(self.folder / "best", lambda path: lm.save(path) if rank() == 0 else None)
            print0(f"success {success:.1%} on held-out games, the best so far")
        self.learner.clock.record("held_out")
        return {"held_out": success}

    def log(self, iteration: int, turns: list, metrics: dict) -> None:
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
        lr                                 the learning rate, the mean over the steps
        grad_norm, grad_norm_values        before clipping: of all parameters but the rows of w+ and
                                           w- in the head, and of these rows
        skipped_steps                      steps that were not finite
        sampler_logprob_diff               mean |log-prob of the sampler - of the scoring pass|
        held_out                           with --eval_every: success on held-out games, T = 0.4
        time_*                             seconds on rank 0: rollout (of which env: waiting for
                                           games), old_logprobs, ref, update, held_out; save, of the
                                           iteration before; total, the sum of these without env
        """
        config, sampler = self.config, self.sampler
        metrics |= {"iteration": iteration, "time_env": self.pool.seconds}
        metrics |= self.learner.clock.take()
        metrics |= rollout_metrics(turns, self.learner.lm, self.pool.env.categories,
                                   config.batch_size)
        for name in ("tokens_encoded", "tokens_sampled"):
            metrics[name] = sum(all_gather_list([getattr(sampler, name)]))
        self.warn(metrics, self.unplayed(iteration, turns))
        print0(f"{config.algo}, {iteration + 1} of {config.iterations}: success "
               f"{metrics['success']:.0%}, admissible actions {metrics['admissible_actions']:.0%}, "
               f"explained variance of V {metrics['v_explained_variance']:.0%}, "
               f"{metrics['time_total']:.1f} s")
        if rank() > 0:
            return
        self.lines.append(metrics)
        if self.wandb:
            self.wandb.log(metrics, step=iteration)
        if not self.folder:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if turns and (iteration % 10 == 0 or iteration == config.iterations - 1):
            episode = [turn for turn in turns if turn.traj == turns[0].traj]
            page = self.page(f"{config.out}, iteration {iteration + 1}", episode, self.lines)
            (self.folder / "transcripts").mkdir(exist_ok=True)
            write_file(self.folder / f"transcripts/{iteration + 1:04d}.html", page)

    def save(self, iteration: int) -> bool:
        """The exchange among the ranks at the end of an iteration -> whether there is a reason to
        stop. Writes a checkpoint if there is, and every --save_every iterations."""
        self.iterations_done, self.steps_done = iteration + 1, self.learner.steps
        stopping = self.exchange(self.evaluation_error)
        last = self.iterations_done == self.config.iterations
        if stopping or last or self.iterations_done % self.config.save_every == 0:
            self.write_checkpoint()
        return stopping

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
        all ranks can do so: those that wait after their rollout learn of the error."""
        if self.in_rollout:
            self.exchange(error)
        if (self.in_rollout or world_size() == 1) and self.learner.steps == self.steps_done:
            self.write_checkpoint()

    def save_if_stopped(self) -> None:
        """Saves the last finished iteration if the loop was stopped. KeyboardInterrupt: by a
        signal. RuntimeError (GameError): by the error of a rank."""
        if not any(told or text for told, text in self.reports):
            return
        self.write_checkpoint()
        if texts := [text for _, text in self.reports if text]:
            raise self.evaluation_error or GameError(texts[0])
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
    names = (*averaged, "category", "done", "invalid", "admissible")
    rows = all_gather_list([{name: getattr(turn, name) for name in names}
                            | {"response_truncated": not lm.stopped(turn.action_ids)}
                            for turn in turns])
    ends = [row for row in rows if row["done"]]
    ends += [{"won": False, "score": 0.0, "truncated": True, "context_overflow": True,
              "category": None}] * (episodes - len(ends))
    won = {name: [] for name in categories.values()}
    for row in ends:
        if row["category"] is not None:
            name = categories.get(row["category"], row["category"])
            won.setdefault(name, []).append(row["won"])
    # a category of which there was no episode in this iteration has None
    by_category = {name: mean_or_zero(x) if x else None for name, x in won.items()}
    shares = {name: mean_or_zero([row[name] for row in ends]) for name in averaged}
    success = shares.pop("won")
    return {"episodes": len(ends), "turns": len(rows), "success": success, **shares,
            "success_by_category": by_category,
            "response_truncated": mean_or_zero([row["response_truncated"] for row in rows]),
            "valid_actions": mean_or_zero([not row["invalid"] for row in rows]),
            "admissible_actions": mean_or_zero([row["admissible"] for row in rows])}
