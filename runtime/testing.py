"""What the tests share: models, games, runs, and processes for several ranks. Importing it forbids
downloads, and lets this process and those that it starts use one thread."""
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import sys
import types
from typing import NamedTuple
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests and the processes they start download nothing
os.environ["OMP_NUM_THREADS"] = "1"  # tensors are small

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import envs
import rollout as rollout_module
import train
from envs import Pool, tasks
from hf import compile as compile_module
from hf.lora import copy_adapters, with_random_adapters
from model import Scores, actor_critic, load, make_batch
from rollout import Sampler, rollout
from runtime import checkpoint, cli, distributed, report
from tools.imitate import random_tiny
from training.settings import learner_class, model_settings

HERE = pathlib.Path(__file__).resolve().parent.parent  # of the repository
huggingface_hub.constants.HF_HUB_OFFLINE = True  # it may have been imported before, as torch may
torch.set_num_threads(1)

GPU = torch.cuda.is_available()

# ---------------------------------------------------------------------------- devices and processes

@pytest.fixture
def gpu():
    if not GPU:
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hides a GPU from this process and from those it starts, unless a test asks for `gpu`."""
    if "gpu" not in request.fixturenames:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


# Processes beside this one are forked from a server that has imported everything already.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["runtime.testing"])


class Ranks:
    """Runs work(*args) in `size` processes as torchrun does, in which everything is imported
    already."""

    def __init__(self, size, work, *args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.processes = [SERVER.Process(target=self.main, daemon=True,
                                          args=(rank, size, port, work, args))
                          for rank in range(size)]
        for process in self.processes:
            process.start()

    @staticmethod
    def main(rank, size, port, work, args):
        torch.set_num_threads(1)
        names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        work(*args)

    def running(self):
        return any(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def finish(self, status=0):
        for process in self.processes:
            process.join(300)
        assert {process.exitcode for process in self.processes} == {status}


def connected(work, *args):
    with cli.one_line_errors("runtime/testing.py"):  # it also destroys the process group
        distributed.init_distributed()
        work(distributed.rank(), *args)
        distributed.barrier()


def on_ranks(work, size, *args):
    """work(rank, *args) in `size` processes of one process group."""
    Ranks(size, connected, work, *args).finish()


def run_train(*flags):
    sys.argv = ["train.py", *map(str, flags)]
    train.main()


OneRank, TwoRanks = functools.partial(Ranks, 1, run_train), functools.partial(Ranks, 2, run_train)

# ------------------------------------------------------------------------------------------ numbers

NAN, INF = float("nan"), float("inf")
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)
randn = functools.partial(torch.randn, dtype=torch.float64)
tensor = functools.partial(torch.tensor, dtype=torch.float64)


def advantages_by_loop(adv, invalid, c_inv, valid, eps):
    penalized = [a - c_inv * m for a, m in zip(adv.tolist(), invalid.tolist())]
    kept = [a for a, ok in zip(penalized, valid.tolist()) if ok]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((a - mean) ** 2 for a in kept) / len(kept))
    return tensor([(a - mean) / (std + eps) if ok else 0.0
                   for a, ok in zip(penalized, valid.tolist())])


near = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


def whitened(x):
    return advantages_by_loop(x, 0 * x, 0.0, torch.ones(len(x)), 0.0)

# ----------------------------------------------- environments as somebody would write them, 5 kinds

class Calculator(envs.ToolEnv):
    tools = "multiply", "submit"
    system = "You calculate with tools."

    def tasks(self, split):
        return [n for n in range(100) if (n % 5 == 0) == (split == "test")]

    def reset(self, task):
        self.reward, self.product = 0.0, 13 * task
        return f"What is 13 times {task}?", {}

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: the first factor
            b: the second factor
        """
        return a * b

    def submit(self, number: int) -> str:
        """Gives the answer, which ends the game.

        Args:
            number: the product
        """
        self.reward, self.done = float(number == self.product), True


class Guess(envs.ToolEnv):  # in TRL's environment_factory: class Guess:
    tools = "guess",  # new
    tasks = lambda self, split: range(1, 9)  # new

    def __init__(self):
        self.low, self.high = 1, 8

    def reset(self, task):  # def reset(self, secret, **columns) -> str | None:
        self.secret, self.reward, self.guesses = task, 0.0, []
        return f"Guess a number from {self.low} to {self.high}.", {}  # without the {}

    def guess(self, number: int) -> dict:
        """Makes a guess.

        Args:
            number: the number that you guess
        """
        if number == self.secret:
            self.reward = 1.0
        elif not self.low <= number <= self.high:
            raise ValueError(f"{number} is out of range")
        self.guesses.append(number)
        return {"right": number == self.secret, "guesses": self.guesses}


class Corridor:
    """A text game with the interface of Gymnasium, whose answers have NumPy's types."""

    def reset(self, *, seed=None, options=None):
        self.at = seed % 3 + 1
        return f"The door is {self.at} steps to the right.", {"lives": np.int64(3)}

    def step(self, action):
        self.at -= {"right": 1, "left": -1}.get(action, 0)
        reward, end = np.float64(self.at == 0), np.bool_(self.at == 0)
        return f"Steps: {self.at}.", reward, end, np.bool_(False), {"lives": 3}


class Wrapped(envs.Env):
    role = "You are in a corridor and say left or right."
    horizon = 5

    def __init__(self):
        self.env = Corridor()  # gymnasium.make(...)

    def tasks(self, split):
        return range(20)

    def reset(self, task):
        return self.env.reset(seed=task)

    def step(self, action):
        return self.env.step(action)


class Robot(envs.Env):
    role = "You steer a robot."
    instruction = 'Answer with a JSON object and nothing else, such as {"go": 2, "say": "Hi"}.'
    horizon = 4

    @classmethod
    def parse_action(cls, text):
        try:
            action = json.loads(text)
        except ValueError:
            return text, False
        return action, isinstance(action, dict) and isinstance(action.get("go"), int)

    def tasks(self, split):
        return [3, 4, 5]

    def reset(self, task):
        self.left = task
        return f"Drive {task} meters.", {"task": f"drive {task} meters"}

    def step(self, action):
        self.left -= action.pop("go", 0) if isinstance(action, dict) else 0
        return f"{self.left} meters left.", float(self.left == 0), self.left <= 0, False, {}


class Gallery(envs.Env):
    context = "full"
    system = "You cannot see: images are left out."
    categories = {"Cat": "cats"}

    def tasks(self, split):
        return ["Cat", "Dog"]

    def user(self, *parts):
        texts = [part.get("text", "(an image)") for part in parts]
        return [{"role": "user", "content": "\n".join(texts)}]

    def reset(self, task):
        self.name, image = task, {"type": "image", "url": f"{task}.png"}
        question = {"type": "text", "text": "What is it? Think, then answer in <action> </action>."}
        return self.user(image, question), {"category": task}

    def step(self, action):
        won = action == self.name
        right = {"type": "text", "text": "Right." if won else "Wrong, try again."}
        return self.user(right), float(won), won, False, {"won": won, "score": float(won) / 2}

# ------------------------------------------------------------------------------ models and rollouts

CONTEXTS = pytest.mark.parametrize("context", ["window", "full"])


def random_lm(architecture, seed=0, layers=2, dtype=torch.float32, **more):
    """A random model of an architecture, with the tiny model's tokenizer. Its weights are so large
    that it prefers some tokens clearly, and many tokens end a response, so that lengths differ."""
    base = random_tiny()
    config = dict(vocab_size=len(base.tokenizer) + 2, hidden_size=32, intermediate_size=64,
                  num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, max_position_embeddings=4096, tie_word_embeddings=seed % 2 == 0,
                  initializer_range=0.3, eos_token_id=base.tokenizer.eos_token_id,
                  pad_token_id=0, bos_token_id=None)
    if "text_config" in more:
        more, config = more | {"text_config": config}, {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config | more),
                                             dtype=dtype).eval()
    lm = actor_critic(model, base.tokenizer, value_ids=base.value_ids, tau_v=20.0)
    return dataclasses.replace(lm, stop_ids=(base.stop_ids[0], *range(40, 110)))


def adapted_model(architecture="qwen2", seed=1, rank=4, trained=True, **more):
    """A random model with adapters, which are as if they had been trained, or new ones."""
    plain = random_lm(architecture, seed, **more)
    plain.model.name_or_path = str(HERE / "hf")  # any folder that is no run's
    lm = actor_critic(plain.model, plain.tokenizer, lora_rank=rank)
    if trained:
        copy_adapters(lm.model, with_random_adapters(lm.model))
    return dataclasses.replace(lm, stop_ids=plain.stop_ids)


TINY_HOUSE = f"{HERE}/results/tiny-house"
GAMES = envs.tasks("house", "train")[:7]


@contextlib.contextmanager
def a_pool(workers, horizon=12):
    """A pool that is closed at the end, and fails the test if it waits for two minutes."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the pool waits forever"))
    signal.alarm(120)
    try:
        with contextlib.closing(Pool("house", {"horizon": horizon}, workers)) as pool:
            yield pool
    finally:
        signal.alarm(0)


def play(lm, engine, context, temperature, max_new_tokens=9, horizon=6, seed=(3,), games=GAMES,
         sampler_options=None, **options):
    sampler = Sampler(lm, engine, context, max_new_tokens, temperature,
                      **{"max_prompt": 2048} | (sampler_options or {}))
    pool = envs.Pool("house", {"horizon": horizon})
    return rollout(sampler, games, pool, seed=seed, **options), sampler


def values_of(turns):
    return torch.tensor([(t.v, t.q) for t in turns])


def batch_of(turns, context="window"):
    return make_batch([*map(train.ids_and_spans, train.make_sequences(turns, context))])


def same_tokens_and_values(one, other):
    assert [t.action_ids for t in one] == [t.action_ids for t in other]
    torch.testing.assert_close(values_of(one), values_of(other), atol=1e-4, rtol=0)


def as_on_a_gpu(monkeypatch):
    """Schedules on the CPU as on a GPU. To replay a captured step, it runs the step again."""
    def replay_by_running(captured, n, kv_length):
        return types.SimpleNamespace(replay=lambda: captured.step(n, kv_length))

    def choose(sampler, compile, check):
        sampler.gpu, sampler.sync_interval, sampler.lag = True, 4, 1
        sampler.prefill_tokens = 16384
        choose_decoding(sampler, compile, check)

    choose_decoding = rollout_module.choose_decoding
    monkeypatch.setattr(compile_module.CudaGraphs, "capture", replay_by_running)
    monkeypatch.setattr(rollout_module, "choose_decoding", choose)

# ------------------------------------------------------------------------------------------ updates


def small_config(tmp_path, *flags):
    return train.parse([
        "--batch_size", "6", "--iterations", "2", "--horizon", "6", "--eval_games", "4",
        "--mini_batch", "12", "--save_every", "1", "--out", str(tmp_path), *map(str, flags)])


@pytest.fixture
def strong(tmp_path):
    """Flags of runs that win some games and start with V and Q that are not 0."""
    lm = load(TINY_HOUSE)
    torch.manual_seed(0)
    lm.value_rows.weight.data = 0.02 * torch.randn(2, lm.head.in_features)
    lm.save(tmp_path / "start")
    return ["--model", tmp_path / "start", "--horizon", 16, "--seed", 7]


@pytest.fixture
def unclipped(monkeypatch):
    """Gradients as they are, so that they can be compared with a reference."""
    monkeypatch.setattr(train, "GRAD_CLIP", 1e9)


def gradient(lm):
    """The gradient of all that is trained: the model's, then that of w+ and w-."""
    params = [p for group in lm.parameters() for p in group]
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in params])


class Case(NamedTuple):
    """An iteration before its update. Turns are numbered as in `batch`."""

    learner: train.Learner
    batch: train.RolloutBatch
    minibatches: list
    old: Scores
    ref: torch.Tensor
    targets: train.Targets

    def step(self, n=0):
        return self.learner.step(self.minibatches[n], self.old, self.ref, self.targets, 0)

    def columns(self, *names):
        """Fields of the turns, each (N,) in float64."""
        return [tensor([float(getattr(t, name)) for t in self.batch.turns]) for name in names]

    def of_turn(self, n, flat):
        """(M,) -> the part of the n-th turn."""
        return flat[self.batch.turn_of_token == n]

    def logits(self):
        """The first mini-batch's turns -> (n, the logits before its tokens, and after them, from a
        pass of its own), with those of w+ and w- in their places."""
        lm = self.learner.lm
        for batch, _, turns in self.minibatches[0]:
            spans = zip(batch.row.tolist(), batch.start.tolist(), batch.end.tolist())
            for n, (row, start, end) in enumerate(spans, turns.start):
                out = lm.model(batch.ids[row:row + 1, :end], output_hidden_states=True)
                plus_minus = lm.value_rows(out.hidden_states[-1].float())
                z = out.logits.float().index_copy(-1, lm.value_index, plus_minus)
                yield n, z[0, start - 1:]


def case_of(lm, turns, config):
    """Lines 3 to 5 of Algorithm 1 on some turns. The policy's optimizer takes no step."""
    config = dataclasses.replace(config, **model_settings(lm))
    learner = learner_class(config.algo)(lm, config)
    learner.optimizer.step = mock.Mock()
    if hasattr(learner, "critic"):  # or all of its values would be 0
        torch.nn.init.normal_(learner.critic.head.weight, std=0.1)
    batch, minibatches = train.make_minibatches(turns, config, 0, lm.device)
    old = learner.score_behaviour_policy(batch, minibatches)
    ref = learner.score_reference(minibatches)
    return Case(learner, batch, minibatches, old, ref, learner.targets(batch, old))


def prepared(tmp_path, *flags, lm=None):
    """A case of a model whose readouts are not all 0, and of turns of random returns, of which some
    are invalid, and some answer the same observation."""
    config, rng = small_config(tmp_path, *flags), random.Random(0)
    lm = dataclasses.replace(lm or random_lm("qwen2", 1), r_max=config.r_max)
    turns = play(lm, "kv", config.context, 1.0)[0]
    for t in turns:
        t.reward = rng.choice([0, 0, 10.0]) * t.done
        t.invalid = rng.random() < 0.2
        t.obs = rng.choice("ab")
    return case_of(lm, turns, config)


def off_policy(case):
    """The case with other old log-probs and values, so that clipping acts and the KL is not 0. What
    is added to a token or turn does not depend on their order."""
    token = torch.tensor([i for t in case.batch.turns for i in t.action_ids])
    traj, turn = case.columns("traj", "turn")
    wave = torch.sin(7 * traj + turn).float() / 5
    old = case.old._replace(logp=case.old.logp + 0.3 * torch.sin(token), p_v=case.old.p_v + wave,
                            p_q=case.old.p_q - wave)
    return case._replace(old=old, ref=case.ref + 0.3 * torch.sin(token + 1),
                         targets=case.learner.targets(case.batch, old))


def advantages(case):
    """(N,): a turn's advantage is the same on all of its tokens."""
    parts = [case.of_turn(n, case.targets.adv) for n in range(len(case.batch.turns))]
    assert all(adv.unique().numel() == 1 for adv in parts)
    return torch.stack([adv[0] for adv in parts]).double()

# --------------------------------------------------------------------------------------- whole runs

def run_main(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    module.main()


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_run(folder, iterations=2):
    """-> the lines of metrics.jsonl of a run that left everything it promises."""
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(iterations))
    assert all(math.isfinite(line[key]) for line in lines for key in (
        "success", "tokens_encoded", "loss_policy", "loss_v", "kl", "v_explained_variance",
        "grad_norm", "time_env", "time_rollout", "time_old_logprobs", "time_ref", "time_update"))
    result = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    assert 0 <= result["success_before"] <= 1
    page = (folder / "transcripts" / "0001.html").read_text(encoding="utf-8")
    assert page.count("<section>") >= 1 and "V before the response" in page
    assert (folder / "curves.png").stat().st_size > 5000
    assert [p.name for p in folder.glob("checkpoint*")] == [f"checkpoint-{iterations}"]
    return lines


SMALL = ["--batch_size", "4", "--iterations", "4", "--horizon", "4", "--eval_games", "2",
         "--mini_batch", "8", "--save_every", "1"]


LAKE = (HERE / "environments/frozen_lake.py").read_text(encoding="utf-8")
# A frozen lake for tests: it ends its episodes by itself, and its info has every key.
MY_ENV = LAKE[:LAKE.index("        info = {")] + '''\
        self.turn = 0
        return f"Your task is to: reach the goal. {self.observation()}", self.info()

    def info(self):
        return {"admissible": [*WAYS], "task": "reach the goal.", "category": "lake",
                "won": self.at == self.goal, "score": float(self.at == self.goal)}

    def step(self, action):
        self.turn += 1
        self.at = neighbours(self.at).get(action, self.at)
        info = self.info()
        terminated = info["won"] or self.at not in self.distance
        truncated = self.turn == self.horizon and not terminated
        return self.observation(), envs.REWARD * info["won"], terminated, truncated, info

''' + LAKE[LAKE.index("    def observation"):LAKE.index("    def step")] + (
    LAKE[LAKE.index("    def advice"):])


def a_run(folder, success, seconds, env="house", curve=None, values=0.1, **config):
    """The files of a finished run as train.py leaves them. curve: its success while learning."""
    folder.mkdir(parents=True)
    base = {"model": "tiny", "env": env, "algo": "sapo", "gamma": 0.95, "seed": 0}
    (folder / "config.json").write_text(json.dumps(base | config), encoding="utf-8")
    line = {"time_total": seconds, "tokens_encoded": 10 ** 6, "tokens_sampled": 0, "episodes": 160}
    line |= dict.fromkeys(report.PANELS, values)
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps(line | {"success": x}) + "\n" for x in curve or [success] * 2),
        encoding="utf-8")
    result = {"success": success, "success_before": 0.25, "score": success, "score_before": 0.5,
              "success_at_1": success / 2,
              "success_by_category": {"Pick": success},
              "success_before_by_category": {"Pick": 0.2}}
    (folder / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    return str(folder)


def a_case():
    """A model, ids of tasks, and a pool of the house, with settings for an update."""
    lm, pool = load(TINY_HOUSE), Pool("house", {"horizon": 4})
    config = train.settings(lm, pool, batch_size=4, mini_batch=16, max_new_tokens=8, lr=4e-4,
                            lr_warmup=0, lr_final_fraction=1.0, group_size=4)
    return lm, tasks("house", "train"), pool, config

# --------------------------------------------------------------- what the environments' tests share

needs_package = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None,
                                   reason="needs the package: pip install alfworld")
PROBLEM = """(define (problem p) (:domain alfred)
 (:objects agent1 - agent MugType - otype DeskType BedType - rtype Mug_bar_1 - object
   Desk_bar_1 Bed_bar_1 - receptacle loc_bar_0 loc_bar_1 loc_bar_2 - location)
 (:init (atLocation agent1 loc_bar_0) (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1)
   (inReceptacle Mug_bar_1 Bed_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
   (receptacleType Desk_bar_1 DeskType) (receptacleType Bed_bar_1 BedType)
   (canContain DeskType MugType) (canContain BedType MugType)
   (receptacleAtLocation Bed_bar_1 loc_bar_1) (receptacleAtLocation Desk_bar_1 loc_bar_2))
 (:goal (and (exists (?r - receptacle) (exists (?o - object)
   (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DeskType)))))))"""
TRIAL = "valid_seen/pick_and_place_simple-Mug-None-Desk-1/trial_T1"


@pytest.fixture
def small_game(tmp_path, monkeypatch):
    """A data folder with one game, written from the domain and the grammar the package carries."""
    # With the variable unset or empty, the package would make a folder of its own.
    monkeypatch.setenv("ALFWORLD_DATA", os.environ.get("ALFWORLD_DATA") or str(tmp_path))
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    with (open(ALFRED_PDDL_PATH, encoding="utf-8") as domain,
          open(ALFRED_TWL2_PATH, encoding="utf-8") as grammar):
        game = {"pddl_domain": domain.read(), "pddl_problem": PROBLEM, "solvable": True,
                "grammar": grammar.read().replace("UNKNOWN GOAL", "put a mug in desk"),
                "walkthrough": ["go to bed 1", "take mug 1 from bed 1", "go to desk 1",
                                "move mug 1 to desk 1"]}
    folder = tmp_path / "json_2.1.1" / TRIAL
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game), encoding="utf-8")
    return str(tmp_path)


INFO = {"admissible": list, "task": str, "category": str, "won": bool, "score": float}
THING = r"[a-z]+ \d+"
SEEN = rf"(nothing|a {THING}(, a {THING})*(, and a {THING})?)"
VIEW = rf"(The {THING} is closed\.|(The {THING} is open\. In it|On the {THING}), you see {SEEN}\.)"
SENTENCES = {  # ALFWorld's commands, and how it answers them
    rf"go to {THING}": rf"You arrive at {THING}\. {VIEW}",
    rf"open {THING}": rf"You open the {THING}\. {VIEW}",
    rf"close {THING}": rf"You close the {THING}\.",
    rf"take {THING} from {THING}": rf"You pick up the {THING} from the {THING}\.",
    rf"move {THING} to {THING}": rf"You move the {THING} to the {THING}\.",
    rf"use {THING}": rf"You turn on the {THING}\.",
    rf"(clean|heat|cool) {THING} with {THING}":
        rf"You (clean|heat|cool) the {THING} using the {THING}\.",
    rf"examine {THING}": rf"({VIEW}|This is a (clean|(hot|cool|cold)( and clean)?) {THING}\.|"
                         rf"There's nothing special about {THING}\.)",
    "inventory": rf"You are (carrying: a {THING}|not carrying anything)\.",
    "help": r"(?s).*go to.*take.*",
    "look": rf"You are facing the {THING}\. Next to it, you see nothing\.|You are in the middle of "
            rf"a room\. Looking quickly around you, you see {SEEN}\."}


def pattern_of(command, answer):
    """The pattern a command follows. Fails if there is none, or if the answer is not ALFWorld's."""
    pattern = next((p for p in SENTENCES if re.fullmatch(p, command)), None)
    assert pattern and re.fullmatch(SENTENCES[pattern], answer[0].strip()), (command, answer[0])
    return pattern


def obey(env, task, commands):
    env.reset(task)
    return [env.step(c) for c in commands]


def wander(env, task, seed, steps=10 ** 6):
    """Random admissible commands until the game or `steps` end -> [(command, answer)]."""
    rng, out, (_, info) = random.Random(f"{seed} {task}"), [], env.reset(task)
    while len(out) < steps:
        command = rng.choice(info["admissible"])
        out.append((command, env.step(command)))
        _, _, terminated, truncated, info = out[-1][1]
        if terminated or truncated:
            break
    return out


DRESS = {
    "asin": "B00DRESS01", "name": "Acme Women's Summer Dress",
    "full_description": "Light & airy.\nWash cold.",
    "small_description": ["Soft  cotton", "", " \n "],
    "customization_options": {"Color": [{"value": "Red/White "}, {"value": "rectangular \"x\""}],
                              "size": [{"value": "S"}, {"value": "L"}], "none": None},
    "query": " Dresses ", "category": "fashion", "pricing": "$19.99$1,029.50",
    "product_category": "Clothing \u203a Women \u203a Dresses"}
SHIRT = {
    "asin": "B00SHIRT02", "name": "Acme Shirt", "full_description": "",
    "small_description": "One bullet", "customization_options": "", "query": "shirts",
    "category": "fashion", "product_category": "Clothing \u203a Men \u203a Shirts", "pricing": None}
GADGETS = [SHIRT | {"asin": f"B{n:09d}", "name": f"Thing {n} gadget", "pricing": f"${n + 1}.50"}
           for n in range(30)]


def attributes_entry(text="Find me x"):
    """A product's entry in the file of attributes and synthetic goals."""
    return {"attributes": ["airy"], "instruction": text, "instruction_attributes": ["airy"]}


def write_catalogue(folder, products=(DRESS, SHIRT, *GADGETS), about=None):
    """Writes the three files of WebShop's download and returns the folder as a string."""
    folder.mkdir(exist_ok=True)
    about = about or {"B00DRESS01": attributes_entry("Find me airy dresses"),
                      "B00SHIRT02": {"attributes": []}}
    human = {"B00SHIRT02": [
        {"instruction": "a shirt.", "instruction_attributes": [], "instruction_options": []},
        {"instruction": "i want a shirt..", "instruction_attributes": ["one bullet"],
         "instruction_options": []}]}
    (folder / "items_shuffle.json").write_text(json.dumps(products, indent=1), encoding="utf-8")
    (folder / "items_ins_v2.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "items_human_ins.json").write_text(json.dumps(human), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    """Puts the index of every test's catalogue where pytest clears up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "caches"))


def flash_attention_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug,
                            *, scale, seqused_k):
    """What torch.ops.aten._flash_attention_forward computes on a GPU. Where a sequence has no keys,
    its log-sum-exp is infinite."""
    scale, dtype = scale or query.shape[-1] ** -0.5, query.dtype
    query, key, value = query.float(), key.float(), value.float()
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], float("inf"))
    for start, end, first, used in zip(cum_q, cum_q[1:], cum_k, seqused_k):
        if used:
            q, keys = query[start:end].transpose(0, 1), key[first:first + used].transpose(0, 1)
            scores = scale * q @ keys.mT  # (H', queries, keys)
            lse[:, start:end] = scores.logsumexp(-1)
            values = value[first:first + used].transpose(0, 1)
            out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out.to(dtype), lse, None, None, None


def checkpoints(run):
    """{finished iterations: folder} of a run's checkpoints, by their names."""
    return {checkpoint.iterations_of(path): path for path in run.glob("checkpoint-*[0-9]")}
