"""What people replace, replaced from outside the repository: an estimator, a sampler, an optimizer,
a logger. Each is written here as a user would write it, with public names only."""
import json
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

import train
from envs import GameError, Pool, tasks
from eval import sampler_for
from model import load
from rollout import Response, Sampler, rollout
from runtime.testing import (CONTEXTS, OneRank, TINY_HOUSE, TwoRanks, on_ranks, on_the_cpu,
                             read_lines, run_main, strong)

# -------------------------------------------------------------------------------------- estimator

MONTE_CARLO = """import train
from runtime.distributed import process_group
from sapo import normalize_advantages

class MonteCarlo(train.Learner):
    unused = ("gae_lambda", "c_inv")  # the command line warns that they have no effect

    def targets(self, batch, old):
        targets = super().targets(batch, old)
        adv = normalize_advantages(targets.returns - targets.v, group=process_group())
        return targets._replace(adv=adv[batch.turn_of_token], y_v=targets.returns / self.lm.r_max)
"""


def test_estimator_of_a_user_trains_and_resumes(tmp_path, monkeypatch, capsys):
    (tmp_path / "monte_carlo.py").write_text(MONTE_CARLO)
    monkeypatch.chdir(tmp_path)
    flags = ("--algo", "monte_carlo:MonteCarlo", "--batch_size", 4, "--horizon", 3, "--eval_games",
             2, "--lr_final_fraction", 1)
    run_main(train, monkeypatch, *flags, "--gae_lambda", 0.5, "--iterations", 2, "--out", "whole")
    says = "--gae_lambda has no effect with --algo monte_carlo:MonteCarlo"
    assert says in capsys.readouterr().out
    run_main(train, monkeypatch, *flags, "--iterations", 1, "--out", "cut")
    run_main(train, monkeypatch, "--resume", "--iterations", 2, "--out", "cut")
    assert json.loads((tmp_path / "cut/config.json").read_text())["algo"] == flags[1]
    assert same_weights(tmp_path / "whole", tmp_path / "cut")


def same_weights(*runs):
    return len({(run / "final/model.safetensors").read_bytes() for run in runs}) == 1


# ---------------------------------------------------------------------------------------- sampler

class Generate:
    """A sampler around Hugging Face's generate, one sequence after the other. It ignores the random
    numbers, and has no V and Q."""

    def __init__(self, lm, config, temperature):
        self.lm = lm
        self.context = config.context
        self.max_new_tokens = config.max_new_tokens
        self.limit = lm.max_length - config.max_new_tokens
        self.temperature = temperature
        self.steps = 0
        self.waiting = {}

    @property
    def busy(self):
        return len(self.waiting)

    def weights_changed(self, lm):  # a server would get them here
        self.forget()

    def forget(self):
        self.waiting = {}

    def add(self, key, sequence, uniforms):
        self.waiting[key] = sequence

    def run(self, steps=None):
        key, sequence = next(iter(self.waiting.items()), (None, None))
        if key is None:
            return []
        del self.waiting[key]
        ids = torch.tensor([sequence], device=self.lm.device)
        choice = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        out = self.lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.max_new_tokens,
            suppress_tokens=[*self.lm.value_ids], eos_token_id=[*self.lm.stop_ids], pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
            **choice if self.temperature else {"do_sample": False})
        new = out.sequences[0, len(sequence):]
        logp = torch.cat(out.scores).float().log_softmax(-1).gather(1, new[:, None])[:, 0]
        self.steps += len(new)
        return [(key, Response(new.tolist(), logp.tolist()))]

    def drop(self, key):
        pass


@CONTEXTS
def test_sampler_of_a_user_gives_the_same_trajectories(context):
    lm, pool, ids = load(TINY_HOUSE), Pool("house", {"horizon": 6}), tasks("house", "train")[:5]
    config = train.settings(lm, pool, context=context, max_new_tokens=16)
    found = []
    for sampler in (Sampler(lm, "kv", context, 16, 0.0), Generate(lm, config, 0.0)):
        found.append(rollout(sampler, ids, pool, seed=1))
    assert len(found[0]) == len(found[1]) > 5
    for ours, theirs in zip(*found):
        for name in ("traj", "turn", "prompt_ids", "action_ids", "text", "reward", "done", "won"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert theirs.logp == pytest.approx(ours.logp, abs=1e-4)


@CONTEXTS
def test_sampler_of_a_user_trains_and_evaluates(tmp_path, monkeypatch, capsys, context):
    asked = []

    def make_sampler(lm, config, temperature):
        asked.append(temperature)
        return Generate(lm, config, temperature)

    def no_other(*args, **options):
        raise AssertionError("our own sampler is made")

    monkeypatch.setattr("eval.Sampler", no_other)
    given = {"context": context, "batch_size": 4, "horizon": 3, "eval_games": 2, "eval_every": 1}
    out = tmp_path / "run"
    train.train(train.settings(iterations=1, out=str(out), **given), make_sampler=make_sampler)
    # before training, for training, while training, after it
    assert asked == [0.4, 1.0, 1.0, 0.4, 0.4, 1.0]
    assert "the sampler's log-probs differ" not in capsys.readouterr().out
    line, = read_lines(out / "metrics.jsonl")
    assert line["sampler_logprob_diff"] < 1e-4 and line["tokens_sampled"] > line["turns"] > 0
    assert line["tokens_encoded"] > line["tokens_sampled"] and line["validation"] >= 0
    for file in ("metrics.jsonl", "eval.json", "eval.jsonl", "transcripts/0001.html"):
        assert not re.search(r"\bnan\b", (out / file).read_text(), re.IGNORECASE)
    config = train.settings(iterations=1, old_logprobs="rollout", **given)
    with pytest.raises(ValueError, match="--old_logprobs rollout: the sampler's V and Q are NaN"):
        train.train(config, make_sampler=make_sampler)
    config = train.settings(iterations=1, algo="grpo", group_size=2, old_logprobs="rollout",
                            **given)
    train.train(config, make_sampler=make_sampler)  # it needs neither


@pytest.mark.parametrize("change, says", [
    (lambda ids, logp: ([], []), "a response of 0 tokens; 1 to 8, with the stop"),
    (lambda ids, logp: (ids * 9, logp * 9), "tokens; 1 to 8, with the stop token, are ex"),
    (lambda ids, logp: (ids, logp[1:]), "log-probs; one for each token is expected"),
    (lambda ids, logp: ([load(TINY_HOUSE).value_ids[0], *ids[1:]], logp), "which the policy never"),
    (lambda ids, logp: (ids[:2], logp[:2]), "ends with token .*, before it has 8 tokens; the stop"),
    (lambda ids, logp: ([10 ** 6, *ids[1:]], logp), "with token 1000000, and the model has those"),
    (lambda ids, logp: ([*ids[:-1], -1], logp), "with token -1, and the model has those from 0 to"),
    (lambda ids, logp: ([0.5, *ids[1:]], logp), "that is none: .*ids and logp are lists of num"),
    (lambda ids, logp: (torch.tensor([ids, ids]), logp), "that is none: .*lists of numbers"),
    (lambda ids, logp: (ids, None), "that is none: .*lists of numbers"),
    (lambda ids, logp: (ids, logp, "v", 0.0), "that is none: .*v and q are numbers, if it has"),
    (lambda ids, logp: (ids, logp, None, None), None),
    (lambda ids, logp: (torch.tensor(ids), torch.tensor(logp)), None)])  # plain numbers in the end
def test_response_of_a_sampler_that_is_none_of_the_policy_is_named(change, says):
    class Changed(Generate):
        def run(self, steps=None):
            return [(key, Response(*change(*response[:2]))) for key, response in super().run(steps)]

    lm, pool = load(TINY_HOUSE), Pool("house", {"horizon": 2})
    sampler = Changed(lm, train.settings(lm, pool, max_new_tokens=8), 1.0)
    given = sampler, tasks("house", "train")[:2], pool
    with pytest.raises(ValueError, match=f"Changed returned .*{says}") if says else nullcontext():
        turns = rollout(*given)
        assert all(type(n) is int for turn in turns for n in turn.action_ids)
        assert all(type(x) is float for turn in turns for x in turn.logp)


TARGETS = {  # (N,) is a number for each turn, (M,) for each response token
    "y_v": lambda t, batch: t.y_v[batch.turn_of_token], "y_q": lambda t, batch: t.y_q[:-1],
    "adv": lambda t, batch: t.returns, "returns": lambda t, batch: t.returns[:1],
    "v": lambda t, batch: t.v[:, None]}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_a_wrong_shape_are_named(name):
    class Mine(train.Learner):
        def targets(self, batch, old):
            targets = super().targets(batch, old)
            return targets._replace(**{name: TARGETS[name](targets, batch)})

    lm, pool = load(TINY_HOUSE), Pool("house", {"horizon": 2})
    config = train.settings(lm, pool, max_new_tokens=8, batch_size=2)
    turns = rollout(sampler_for(lm, config), tasks("house", "train")[:2], pool)
    learner = Mine(lm, config)
    with pytest.raises(ValueError, match=f"Mine.targets: {name} has the shape .*is expected"):
        learner.learn(turns, 0)
    assert learner.optimizer_steps == 0


@pytest.mark.parametrize("change, says", [
    (lambda done: [], "has no response for trajectory 0, and says that it is not busy"),
    (lambda done: done + done, "returned a response for 0, which waits for none"),
    (lambda done: [("x", done[0][1])], "returned a response for 'x', which waits for none")])
def test_sampler_that_loses_or_repeats_a_response_is_named(change, says):
    class Changed(Generate):
        def run(self, steps=None):
            done = super().run(steps)
            return change(done) if done else done

    lm, pool = load(TINY_HOUSE), Pool("house", {"horizon": 2})
    sampler = Changed(lm, train.settings(lm, pool, max_new_tokens=8), 1.0)
    with pytest.raises(ValueError, match=f"Changed {says}"):
        rollout(sampler, tasks("house", "train")[:1], pool)


# -------------------------------------------------------------------------------------- optimizer

OPTIMIZERS = """import torch
import train
from baselines.learners import PPOTurns

class WithAdamW(train.Learner):
    def make_optimizer(self, groups, lr):
        rates = lr, self.config.value_lr_factor * lr
        return torch.optim.AdamW([{"params": p, "lr": r} for p, r in zip(groups, rates)], lr)

class MuonAndAdamW:
    def __init__(self, groups, lr):
        params = [p for group in groups for p in group]
        self.parts = [torch.optim.Muon([p for p in params if p.ndim == 2], 10 * lr),
                      torch.optim.AdamW([p for p in params if p.ndim != 2], lr)]

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state["parts"]):
            part.load_state_dict(saved)

class WithMuon(train.Learner):
    unused = ("critic_lr", "value_lr_factor")
    make_optimizer = lambda self, groups, lr: MuonAndAdamW(groups, lr)

class PPOWithMuon(PPOTurns):  # the critic's is one, too
    make_optimizer = WithMuon.make_optimizer
"""


@pytest.mark.parametrize("algo, start, other", [
    ("WithAdamW", OneRank, TwoRanks), ("WithMuon", TwoRanks, OneRank),
    ("PPOWithMuon", OneRank, TwoRanks)])
def test_optimizer_of_a_user_is_saved_and_restored(tmp_path, monkeypatch, strong, algo, start,
                                                   other):
    """Bit for bit on as many ranks, up to rounding on another number. During a warmup, because each
    learning rate must remain a multiple of what it was at first."""
    (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
    monkeypatch.chdir(tmp_path)
    flags = [*strong, "--algo", f"optimizers:{algo}", "--batch_size", 6, "--mini_batch", 12,
             "--lr_warmup", 20, "--lr_final_fraction", 1, "--eval_games", 0]
    start(*flags, "--iterations", 2, "--out", "whole").finish()
    start(*flags, "--iterations", 1, "--out", "cut").finish()
    shutil.copytree("cut", "moved")
    start("--resume", "--iterations", 2, "--out", "cut").finish()
    other("--resume", "--iterations", 2, "--out", "moved").finish()
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    whole, moved = (read_lines(tmp_path / name / "metrics.jsonl")[1] for name in ("whole", "moved"))
    assert 0 < whole["success"] < 1 and abs(whole["loss_policy"]) > 1e-3
    for key, x in whole.items():
        if type(x) is float and not key.startswith("time_"):
            assert moved[key] == pytest.approx(x, rel=2e-3, abs=1e-5), key


def test_optimizer_that_needs_a_closure_is_refused():
    class WithLBFGS(train.Learner):
        def make_optimizer(self, groups, lr):
            return torch.optim.LBFGS([p for group in groups for p in group], lr)

    lm = load(TINY_HOUSE)
    with pytest.raises(ValueError, match="LBFGS.step needs a closure"):
        WithLBFGS(lm, train.settings(lm=lm))


def test_optimizer_of_a_user_needs_float32(tmp_path, monkeypatch):
    (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
    monkeypatch.chdir(tmp_path)
    flags = ("--batch_size", 2, "--horizon", 2, "--eval_games", 0, "--iterations", 1)
    bfloat16 = (*flags, "--dtype", "bfloat16", "--algo")
    with pytest.raises(SystemExit, match="^train.py: MuonAndAdamW would train .*bfloat16"):
        run_main(train, monkeypatch, *bfloat16, "optimizers:WithMuon", "--out", "refused")
    run_main(train, monkeypatch, *bfloat16, "optimizers:WithAdamW", "--lora_rank", 4,
             "--out", "adapters")  # which are float32


# ----------------------------------------------------------------------------------------- logger

def test_optimizer_that_leaves_parameters_out_is_refused():
    lm = load("tiny")

    class OnlyTheModel(train.Learner):
        def make_optimizer(self, groups, lr):
            return torch.optim.SGD(groups[0], lr)

    with pytest.raises(ValueError, match="an optimizer of all parameters that it gets"):
        OnlyTheModel(lm, train.settings(lm=lm))


def test_logger_gets_what_the_metrics_file_gets(tmp_path):
    lines = []
    given = {"batch_size": 2, "horizon": 2, "eval_games": 0, "out": str(tmp_path / "run")}
    for more in ({"iterations": 1}, {"iterations": 2, "resume": True}):
        train.train(train.settings(**given, **more),
                    log=lambda metrics, iteration: lines.append((iteration, metrics)))
    written = read_lines(tmp_path / "run/metrics.jsonl")
    assert [(n, json.loads(json.dumps(line))) for n, line in lines] == [*enumerate(written)]


def train_with_a_logger_that_fails(rank, given):
    def log(metrics, iteration):
        if iteration == 1:
            raise OSError("the tracker is full")

    with pytest.raises(GameError if rank else OSError, match="the tracker is full"):
        train.train(train.settings(**given), log=log)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logger_that_fails_costs_no_iteration(tmp_path, ranks):
    """All ranks stop, and what was learned before is saved."""
    given = {"batch_size": 2, "horizon": 2, "eval_games": 0, "iterations": 3, "save_every": 9}
    train.train(train.settings(**given, out=str(tmp_path / "whole")))
    given["out"] = str(tmp_path / "run")
    on_ranks(train_with_a_logger_that_fails, ranks, given)
    assert (tmp_path / "run/checkpoint-2").exists()
    train.train(train.settings(**given, resume=True))
    weights = [load_file(tmp_path / run / "final/model.safetensors") for run in ("whole", "run")]
    for name, whole in weights[0].items():  # bit for bit on as many ranks
        torch.testing.assert_close(weights[1][name], whole, atol=0 if ranks == 1 else 1e-4, rtol=0)
    assert [line["iteration"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [0, 1, 2]
