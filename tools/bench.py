"""Measures everything that results/README.md says about speed and memory.

    python tools/bench.py sampler              both engines side by side on random prompts
    python tools/bench.py games                both engines in both contexts, playing games
    python tools/bench.py iteration [--ppo]    seconds of an iteration by phase, PPO beside SAPO
    python tools/bench.py update               scoring and micro-batching beside the plain ways
    python tools/bench.py host                 what Python does for a turn while a GPU decodes
    python tools/bench.py envs                 loading, resets and steps of an environment
    python tools/bench.py plot RUN...          a picture of what `iteration --out RUN` measured

Each of them has --help. Rivals take turns, so that a noisy machine is noisy for both, the first
round warms up, and medians of the others are printed. MFU is the share of the GPU's operations a
second, themselves measured, that a phase needs without its padding.
"""
import signal
if __name__ == "__main__":  # Ctrl-C while this imports leaves without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import gc
import json
import os
import random
import re
import sys
import time
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
import eval as evaluation
import train
from model import actor_critic, load, make_batch, micro_batches, restricted_log_softmax
from rollout import Rows, Sampler, Turn, rollout
from machine import cli, runs
from machine.ranks import shares_of_ranks
from worlds.curves import COLORS
from worlds.hub import locate
from worlds.textworld import shortcuts
from worlds.tiny import tiny_tokenizer

# --------------------------------------------------------------------- models and what they cost

# Qwen2.5, from the config.json of each size: width, width of the MLP, layers, heads, heads of K and
# V, vocabulary, and whether the head is the embedding.
QWEN25 = {"0.5B": (896, 4864, 24, 14, 2, 151936, True),
          "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
          "3B": (2048, 11008, 36, 16, 2, 151936, True),
          "7B": (3584, 18944, 28, 28, 4, 152064, False)}


def architecture(name):
    """The config of a model by name; Qwen2.5's sizes are known without a download."""
    size = re.fullmatch(r"(?:Qwen/)?Qwen2\.5-([\d.]+B)(?:-Instruct)?", name)
    if os.path.isdir(name) or not size or size[1] not in QWEN25:
        try:
            return AutoConfig.from_pretrained(locate(name))
        except (OSError, ValueError, KeyError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"cannot load the architecture of {name!r} ({why})") from None
    width, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN25[size[1]]
    return Qwen2Config(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def random_model(name, dtype, seed=0):
    """-> ActorCritic of the named architecture with random weights, which are as fast as trained
    ones, behind the tiny model's tokenizer. "tiny" is the tiny model itself."""
    if name == "tiny":
        return load(name, dtype=dtype, seed=seed, words=envs.words())
    config, device = architecture(name), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return actor_critic(model.eval(), tiny_tokenizer(*envs.words()))


def sizes(lm):
    """The parameters of the body and of the head. A token costs each of them two operations, a
    multiplication and an addition; to look up its embedding costs none."""
    head, total = lm.head.weight.numel(), sum(p.numel() for p in lm.model.parameters())
    return total - head * (1 if lm.model.config.tie_word_embeddings else 2), head


def operations(lm, tokens, scored, squares):
    """Floating-point operations of a forward pass: `tokens` go through the body, `scored` of them
    through the head, and the squares of the sequences' lengths sum to `squares`."""
    (body, head), c = sizes(lm), lm.model.config
    head_size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * head_size * squares
    return 2 * body * tokens + 2 * head * scored + attention


def now():
    """Seconds, read when the GPU has done all that it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def limits(device):
    """What the GPU does at best: bytes a second of a large copy, floating-point operations a second
    of a large product in bf16."""
    def fastest(work):
        times = []
        for _ in range(13):
            began = now()
            work()
            times.append(now() - began)
        return min(times[3:])

    x, y = torch.empty(2, 1 << 31, dtype=torch.uint8, device=device)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * x.numel() / fastest(lambda: y.copy_(x)), 2 * 8192 ** 3 / fastest(lambda: a @ b)


def least_time(lm, rows, steps, prompts, responses, bandwidth, peak):
    """The seconds that a GPU needs at least: for the prefill, in which it performs all operations;
    and for so many decoding steps, in each of which it reads every weight, and every key and value
    that a token attends to. `rows`: the kv engine's state."""
    kv_bytes = sum(x.shape[1] * x.shape[3] * x.element_size() for x in rows.keys + rows.values)
    seen = sum(len(prompt) + i for prompt, response in zip(prompts, responses)
               for i in range(1, len(response.ids) + 1))
    prefill = operations(lm, sum(map(len, prompts)), 0, sum(len(p) ** 2 for p in prompts))
    weights = steps * sum(sizes(lm)) * rows.keys[0].element_size()
    return prefill / peak, (weights + seen * kv_bytes) / bandwidth


# --------------------------------------------------------------------------- sampler and games


class Timed:
    """A function, and the seconds spent in it."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args):
        began = now()
        out = self.function(*args)
        self.seconds += now() - began
        return out


class Run(NamedTuple):
    """What a sampler did with a batch."""

    seconds: float  # of sampling
    scoring: float  # of the hf engine's pass for V and Q; the kv engine has them by then
    steps: int
    sampled: int  # tokens
    decoded: int  # tokens, those of idle rows included
    responses: list


def counts(sampler):
    return np.array([sampler.steps, sampler.tokens_sampled, sampler.tokens_decoded])


def measure(sampler, prompts, u):
    """-> Run. The hf engine reads V and Q by a pass of its own, and the kv engine by one decoding
    step more, so what either does for them cannot be left out on both sides."""
    score, before = sampler.lm.score, counts(sampler)
    began, scored = now(), score.seconds
    responses = sampler(range(len(prompts)), prompts, u)
    seconds, scoring = now() - began, score.seconds - scored
    return Run(seconds - scoring, scoring, *(counts(sampler) - before), responses)


def race(lm, args):
    """The same random prompts through both engines in turns, then a row of a table for each."""
    rng = np.random.default_rng(0)
    usable = np.setdiff1d(np.arange(lm.model.config.vocab_size), [*lm.value_ids, *lm.stop_ids])
    mean = args.new // 3 if args.mean is None else args.mean  # random weights end no response soon
    ends = rng.permutation(len(usable))[:len(usable) // mean] if mean else []
    lm = dataclasses.replace(lm, stop_ids=(*lm.stop_ids, *map(int, usable[ends])))
    lm.score = Timed(lm.score)
    lengths = rng.integers(max(1, args.prompt // 2), args.prompt * 3 // 2 + 1, args.rows)
    prompts = [rng.choice(usable, n).tolist() for n in lengths]
    u = rng.random((args.rows, args.new), dtype=np.float32)
    samplers = {(engine, n): Sampler(lm, engine, max_new=n, compile=args.compile)
                for engine in ("hf", "kv") for n in (1, args.new)}
    runs = {key: [] for key in samplers}
    for _ in tqdm(range(args.repeats + 1), desc="rounds of both engines", leave=False):
        for (engine, n), sampler in samplers.items():
            runs[engine, n].append(measure(sampler, prompts, u[:, :n]))
    print_race(lm, args, prompts, runs, samplers["kv", args.new].rows)


def print_race(lm, args, prompts, runs, rows):
    """Responses of one token tell the seconds of the prefill. `times hf` leaves hf's pass for V and
    Q out, but not kv's last step, which is for Q alone; `with V, Q` charges both. The share of the
    bandwidth is the time that kv's steps need at least, over the time that was taken."""
    median, charged = (
        {key: np.median([run.seconds + run.scoring * both for run in some[1:]])
         for key, some in runs.items()} for both in (False, True))
    last = {key: some[-1] for key, some in runs.items()}
    hf, kv = (last[engine, args.new] for engine in ("hf", "kv"))
    best = limits(lm.device) if torch.cuda.is_available() else None
    print(f"{args.rows} prompts of {args.prompt // 2} to {args.prompt * 3 // 2} random tokens, "
          f"responses of up to {args.new}; medians of {args.repeats}; only under "
          f"`with V, Q` is hf charged for them\n{'engine':8}{'tokens/s':>10}{'times hf':>10}"
          f"{'with V, Q':>11}{'prefill s':>11}{'ms a step':>11}{'useful':>8}{'% of bandwidth':>16}"
          f"{'prefill MFU %':>15}  same tokens")
    for engine in ("hf", "kv"):
        short, run, whole = last[engine, 1], last[engine, args.new], median[engine, args.new]
        step = (whole - median[engine, 1]) / max(1, run.steps - short.steps)
        prefill, shares = median[engine, 1] - short.steps * step, ("-", "-")
        if best:
            least = least_time(lm, rows, kv.steps, prompts, kv.responses, *best)
            shares = f"{least[1] / (whole - prefill):.1%}", f"{least[0] / prefill:.1%}"
        speed, times, valued = run.sampled / whole, *(
            run.sampled / seconds[engine, args.new] / (hf.sampled / seconds["hf", args.new])
            for seconds in (median, charged))
        same = np.mean([a.ids == b.ids for a, b in zip(hf.responses, run.responses)])
        print(f"{engine:8}{speed:10.0f}{times:10.2f}{valued:11.2f}{prefill:11.3f}"
              f"{1000 * step:11.2f}{run.sampled / run.decoded:8.0%}{shares[0]:>16}"
              f"{shares[1]:>15}  {same:.0%}")


def play_games(lm, args, options, games):
    """The games with both engines in both contexts, and a row of a table for each."""
    print(f"{len(games)} games of {args.env}, responses of up to {args.new} tokens; hf's seconds "
          f"are without its pass for V and Q\n{'engine':8}{'context':9}{'turns':>6}{'encoded':>10}"
          f"{'sampled':>10}{'useful':>8}{'seconds':>9}{'env share':>11}{'tokens/s':>10}"
          "  same tokens", flush=True)
    for context in ("window", "full"):
        tokens = {}
        for engine in ("hf", "kv"):
            lm = dataclasses.replace(lm)
            lm.score = Timed(lm.score)
            pool = envs.Pool(args.env, options, envs.default_workers(args.env))
            sampler = Sampler(lm, engine, context, args.new, compile=args.compile,
                              max_prompt=envs.known(args.env).max_prompt)
            began = now()
            turns = rollout(sampler, games, pool)
            seconds, n = now() - began - lm.score.seconds, sampler.tokens_sampled
            pool.close()
            tokens[engine] = [turn.action_ids for turn in turns]
            same = np.mean([a == b for a, b in zip(tokens["hf"], tokens[engine])])
            print(f"{engine:8}{context:9}{len(turns):6}{sampler.tokens_encoded:10}{n:10}"
                  f"{n / sampler.tokens_decoded:8.0%}{seconds:9.2f}{pool.seconds / seconds:11.0%}"
                  f"{n / seconds:10.0f}  {same:.0%}", flush=True)
            del sampler
            gc.collect()  # it refers to itself, and would keep its memory


class Parser(cli.Parser):
    """flags: {name: (type, default, help)}. A flag of type bool takes no value."""

    def __init__(self, name, text, flags):
        super().__init__(prog=f"bench.py {name}", description=text)
        for flag, (kind, default, about) in flags.items():
            text = about if default in (None, False) else f"{about} [{default}]"
            self.add_argument(f"--{flag}", default=default, help=text,
                              **cli.options_of(kind))


SAMPLING = {
    "model": (str, "tiny", "as for train.py"),
    "rows": (cli.Size, 16, "prompts or games side by side"),
    "new": (cli.number(int, 9, 10 ** 7), 64, "longest response in tokens"),
    "dtype": (Literal["float32", "bfloat16"],
              "bfloat16" if torch.cuda.is_available() else "float32", "of the weights"),
    "compile": (bool, False, "torch.compile for kv")}
GAMES = {
    "env": (str, "house", "house, alfworld or webshop"),
    "data": (str, None, "the folder of alfworld's json_2.1.1, or of webshop's catalogue"),
    "goals": (str, None, "webshop: synthetic or human")}


def loaded(args, random_weights=False, device=None):
    """-> the model of --model and --dtype, which it describes in a line."""
    dtype = getattr(torch, args.dtype)
    lm = (random_model(args.model, dtype, getattr(args, "seed", 0)) if random_weights
          else load(args.model, dtype=dtype, words=envs.words(), device=device))
    count, device = sum(p.numel() for p in lm.model.parameters()), runs.versions()["versions"]
    print(f"{args.model}: {count / 1e6:.1f} M parameters, {args.dtype} on {device['device']}",
          flush=True)
    return lm


def sampler_main(argv):
    args = Parser("sampler", "Both engines on the same random prompts.", SAMPLING | {
        "random_weights": (bool, False, "build the architecture of --model without its weights"),
        "prompt": (cli.number(int, 2, 10 ** 7), 200, "mean length of the prompts in tokens"),
        "mean": (cli.Count, None, "a random word in so many ends a response; 0: none does; "
                                    "default a third of --new"),
        "repeats": (cli.Size, 3, "rounds")}).parse_args(argv)
    lm = loaded(args, args.random_weights)
    if args.prompt * 3 // 2 + args.new > lm.max_length:
        raise ValueError(f"--prompt {args.prompt} and --new {args.new}: the longest prompt and its "
                         f"response exceed the model's {lm.max_length} tokens")
    race(lm, args)


def games_main(argv):
    args = Parser("games", "Games with both engines in both contexts.", SAMPLING | GAMES | {
        "horizon": (cli.Size, 8, "turns a game may take")}).parse_args(argv)
    options = envs.options_for(vars(args))
    games = envs.tasks(args.env, "train", **options)[:args.rows]
    play_games(loaded(args), args, options, games)


# --------------------------------------------------------------------------------- host's work


class Costless(Sampler):
    """The kv engine with a model that computes nothing and says the same all the time, for 60 to
    140 tokens; what is left is what the host does for a rollout. Beside it a device is imagined
    that decodes a step in so many seconds, and it is counted how long that one is idle."""

    step_seconds = idle = 0.0
    free_at = None  # the time at which the device will have done all that it was told

    SAID = f"<think>{'I look around first and then decide. ' * 40}</think><action>look</action>"

    def prepare(self, compile):
        layer = argparse.Namespace(keys=torch.zeros(1, 1, 1, 1), values=torch.zeros(1, 1, 1, 1))
        self.rows = Rows([layer], torch.zeros(1, 1), self.max_new)
        self.gpu, self.ahead, self.budget = False, 4, 16384  # as on a GPU, but for the rounding up
        self.encoder, self.decoder = self.forward, self.decode_one_token
        self.said = torch.tensor(self.lm.tokenizer(self.SAID).input_ids[:self.max_new])

    def forward(self, ids, at, span, rows=None):
        return torch.zeros(*ids.shape, 1)

    def decode_one_token(self, n, span):
        rows = self.rows
        rows.at[:n] += rows.going[:n]
        rows.count[:n] += rows.going[:n]
        rows.going[:n] &= rows.count[:n] < 60 + 80 * rows.u[:n, 0]
        rows.tokens[:n, :len(self.said)] = self.said
        told = now()
        self.free_at = told if self.free_at is None else self.free_at
        self.idle += max(0.0, told - self.free_at)
        self.free_at = max(told, self.free_at) + self.step_seconds

    def look(self):
        names, columns, _ = super().look()
        return names, columns, Moment(self.free_at)


class Moment(NamedTuple):
    at: float

    def synchronize(self):
        time.sleep(max(0.0, self.at - now()))


class Recorded:
    """A pool whose games have been played before, and answer whatever is asked at once."""

    seconds = 0.0

    def __init__(self, name, options, tasks, steps):
        self.env, self.answers, self.at = envs.make_env(name, **options), [], {}
        for task in tqdm(tasks, desc="recording games", leave=False):
            rng, answers = random.Random(task), [self.env.reset(task)]
            for n in range(steps):
                obs, _, _, _, info = self.env.step(rng.choice(answers[-1][-1]["admissible"]))
                answers.append((obs, 0.0, False, n == steps - 1, info))
            self.answers.append(answers)

    def start(self, traj, task):
        self.at[traj] = 0

    def step(self, traj, action):
        self.at[traj] += 1

    def drop(self, traj):
        pass

    def load(self, tasks):
        pass

    def gather(self, trajs):
        return [self.answers[traj % len(self.answers)][self.at[traj]] for traj in trajs]


def host_main(argv):
    args = Parser("host", "The host's seconds in a rollout whose model and games cost nothing.",
                  SAMPLING | GAMES | {"steps": (cli.Size, 50, "turns of a game"),
                                      "decode": (cli.Weight, 0.0, "milliseconds of a decoding "
                                                 "step, to see how long the GPU would be idle"),
                                      "repeats": (cli.Size, 3, "rounds")}).parse_args(argv)
    options = envs.options_for(vars(args)) | {"horizon": args.steps + 1}
    games = envs.tasks(args.env, "train", **options)
    pool = Recorded(args.env, options, games[::max(1, len(games) // 16)][:16], args.steps)
    lm, taken, idle = loaded(args, device="cpu"), [], []  # where what costs nothing is made
    lm.readout = lambda hidden: hidden[..., 0]
    for _ in range(args.repeats):
        sampler, began = Costless(lm, max_new=160), now()
        sampler.step_seconds = args.decode / 1e3
        turns = rollout(sampler, range(args.rows), pool)
        taken.append((now() - began) / len(turns))
        idle.append(sampler.idle / len(turns))
    n, (taken, idle) = len(turns), (1e3 * np.median(x) for x in (taken, idle))
    print(f"{args.rows} games of {args.env}, {n} turns, {sampler.tokens_encoded / n:.0f} tokens "
          f"encoded and {sampler.tokens_sampled / n:.0f} sampled a turn: {taken:.2f} ms a turn, "
          f"the device idle for {idle:.2f}; median of {args.repeats}")


# ------------------------------------------------------------------------- iteration and update

# The phases of an iteration, and how many forward passes each is worth.
PHASES = {"rollout": 0, "old": 1, "ref": 1, "values": 1, "update": 3, "critic": 3}
HATCHES = "", "//", "\\\\", "..", "", "xx"  # so that a picture can be read in grey too
MEANING = {"rollout": "rollout: play the tasks", "old": "old: log-probs before the update",
           "ref": "ref: log-probs of the start", "values": "values: of the critic, old ones",
           "update": "update: of the policy", "critic": "critic: its update"}
TRAJECTORIES = {
    "turns": (cli.Size, 50, "turns of a trajectory"),
    "prompt": (cli.number(int, 2, 10 ** 7), 500, "mean length of a prompt in tokens"),
    "response": (cli.Size, 100, "mean length of a response in tokens"),
    "repeats": (cli.Size, 3, "rounds")}


def prepare(parser, argv):
    """Flags -> args, the Config of the others, and the model with random weights. args.keep:
    whether --out was given."""
    args, rest = parser.parse_known_args(argv)
    args.keep = any(word.split("=")[0] == "--out" for word in rest)
    config = train.parse_config([*rest, "--max_new", str(4 * args.response)])
    print(f"building {config.model} with random weights", flush=True)
    if config.model != "tiny":
        cli.forecast_memory(architecture(config.model), config, getattr(args, "ppo", False))
    return args, config, cli.fitted(loaded(config, random_weights=True), config)


def talker(lm, config, mean):
    """A sampler whose responses are `mean` tokens long on average, because random weights say every
    word equally often and one word in so many ends a response."""
    first = min(lm.model.config.vocab_size, *lm.value_ids)
    words = np.random.default_rng(0).permutation(first - 5) + 5
    ends = tuple(int(i) for i in words[:len(words) // mean])
    if not ends:
        raise ValueError(f"--response {mean} is more than the {len(words)} words of this model")
    return train.sampler_for(dataclasses.replace(lm, stop_ids=ends), config)


def invent(sampler, config, args):
    """A rollout without games: every trajectory asks args.turns times, with random prompts of about
    args.prompt tokens, and in `full` of a fifth of that after the first -> turns."""
    rng, window = np.random.default_rng(config.seed), config.context == "window"
    words = min(sampler.lm.model.config.vocab_size, *sampler.lm.value_ids)
    turns, before, asked = ({traj: [] for traj in range(config.tasks)} for _ in range(3))

    def ask(traj):
        n = max(1, args.prompt // 5)
        if window or not turns[traj]:
            n = rng.integers(args.prompt // 2, args.prompt * 3 // 2 + 1)
        asked[traj] = rng.integers(5, words, n).tolist()
        sequence = asked[traj] if window else before[traj] + asked[traj]
        if len(sequence) > sampler.limit:
            raise ValueError(f"a prompt of {len(sequence)} tokens, where {sampler.limit} fit: "
                             "lower --prompt or --turns, or raise --max_prompt or --max_context")
        sampler.add(traj, sequence, rng.random(config.max_new, dtype=np.float32))

    for traj in turns:
        ask(traj)
    while sampler.busy:
        for traj, response in sampler.run():
            turn = invented_turn(traj, len(turns[traj]), asked[traj], response, args.turns)
            turns[traj].append(turn)
            before[traj] += turn.prompt_ids + turn.action_ids
            if turn.done:
                sampler.drop(traj)
            else:
                ask(traj)
    return [turn for traj in turns for turn in turns[traj]]


def invented_turn(traj, n, prompt_ids, response, turns):
    """Every second trajectory wins."""
    done, idle = n + 1 == turns, dict.fromkeys("task category prompt text action".split(), "")
    return Turn(traj=traj, turn=n, prompt_ids=prompt_ids, action_ids=response.ids, v=response.v,
                q=response.q, logp=response.logp, reward=10.0 * (done and traj % 2), done=done,
                truncated=False, invalid=False, admissible=True, won=False, score=0.0, **idle)


def learners_for(lm, config, ppo):
    """-> {algorithm: Learner}. PPO shares the policy's optimizer and reference, so that what it
    holds beside them is what it costs."""
    learners = {config.algo: train.LEARNERS[config.algo](lm, config)}
    if ppo and config.algo != "ppo":
        rival = train.LEARNERS["ppo"](lm, dataclasses.replace(config, algo="ppo"))
        learners["ppo"] = rival
        rival.optimizers[""] = learners[config.algo].optimizers[""]
        if config.beta:
            rival.reference = learners[config.algo].reference
    return learners


def learn(learner, turns, n):
    """Lines 3 to 7 of Algorithm 1 on given turns, as train.train has them -> the batches, and how
    far the sampler's log-probs are from those of the pass."""
    clock, config = learner.clock, learner.config
    clock.start()
    played, batches = train.pack(turns, config, n, learner.lm.device)
    old, sampler_off = train.score_old(learner.lm, played, batches, config)
    clock.lap("old")
    ref = train.score_all(learner.reference, batches).logp if config.beta else None
    clock.lap("ref")
    targets = learner.targets(played, batches, old)
    for mini in batches:
        learner.step(mini, old, ref, targets, 0)
    for model, _ in learner.trained().values():
        model.zero_grad(set_to_none=True)
    clock.lap("update")
    return batches, sampler_off


def iteration_main(argv):
    parser = Parser("iteration", "Seconds of an iteration by phase. It takes train.py's flags too.",
                    TRAJECTORIES | {"ppo": (bool, False, "PPO beside it, on the same turns")})
    args, config, lm = prepare(parser, argv)
    learners, sampler = learners_for(lm, config, args.ppo), talker(lm, config, args.response)
    laps, off = {algo: [] for algo in learners}, []
    for n in tqdm(range(args.repeats + 1), desc="iterations", leave=False):
        began = now()
        turns = invent(sampler, config, args)
        rollout_seconds = now() - began
        for algo in sorted(learners, reverse=n % 2 == 1):  # the order changes from round to round
            batches, difference = learn(learners[algo], turns, n)
            laps[algo].append(learners[algo].clock.laps | {"time_rollout": rollout_seconds})
            off.append(difference)
    seconds = {algo: {name: float(np.median([lap.get(f"time_{name}", 0.0) for lap in some[1:]]))
                      for name in PHASES} for algo, some in laps.items()}
    peak = runs.peak_memory()  # read now, because the table tries the GPU with large tensors
    print_phases(lm, config, args, seconds, [micro.batch for mini in batches for micro in mini])
    print_memory(lm, learners, peak)
    fresh = off[::len(learners)]  # of those that learned first, before the policy had moved
    print(f"log-probs of sampler and trainer differ by {np.median(fresh):.2g} on average")
    if args.keep:
        os.makedirs(config.out, exist_ok=True)
        runs.write_file(f"{config.out}/bench.json", json.dumps(
            {"model": config.model, "context": config.context, "old": config.old,
             "seconds": seconds} | runs.versions(), indent=1))


def print_phases(lm, config, args, seconds, batches):
    """The paper's runtime table."""
    real, scored, processed, squares = (sum(map(int, column)) for column in zip(*(
        (b.length.sum(), len(b.row), b.ids.numel(), (b.length ** 2).sum()) for b in batches)))
    print(f"{config.model}, {config.dtype}, {config.context}: {config.tasks} trajectories of "
          f"{args.turns} turns, {real} tokens of which {scored} sampled; real / processed tokens "
          f"{real / processed:.3f}; medians of {args.repeats}\n" + " " * 15
          + "".join(f"{algo:>11}" for algo in seconds) + f"   tokens/s of {config.algo}")
    peak = limits(lm.device)[1] if torch.cuda.is_available() else None
    for name, passes in PHASES.items():
        mine, line = seconds[config.algo][name], [times[name] for times in seconds.values()]
        whole = mine and not (name == "old" and config.old == "rollout")  # else one micro-batch
        speed = f"{real / mine:14.0f}" if whole else ""
        if peak and passes and whole:
            words = 0 if name in ("values", "critic") else scored  # a critic has no such head
            mfu = passes * operations(lm, real, words, squares) / mine / peak
            speed += f", MFU {mfu:.1%}"
        if any(line):
            print(f"{name:15}" + "".join(f"{x:9.2f} s" for x in line) + speed)
    after = {algo: sum(times.values()) - times["rollout"] for algo, times in seconds.items()}
    print(f"{'after rollout':15}" + "".join(f"{x:9.2f} s" for x in after.values())
          + ratio_to_ppo(after))


def ratio_to_ppo(costs):
    if len(costs) == 1:
        return ""
    algo = next(iter(costs))
    return f"   {algo} / ppo {costs[algo] / costs['ppo']:.3f}"


def memory_needed(arch, config, critic=False):
    """{what: bytes on one rank} of the largest things an update holds, from the architecture (a
    transformers config) and train.py's settings alone. The last two are not held all the time."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(arch)
    sizes = [p.numel() for p in model.parameters()]
    weights, (_, share) = sum(sizes), shares_of_ranks(sizes)
    width, layers = arch.hidden_size, arch.num_hidden_layers
    size = 2 if config.dtype == "bfloat16" else 4
    layer = size * (8 * width + 4 * arch.intermediate_size) + 16 * width  # kept for a token
    kept = layer + layers * width * size if config.checkpointing else layer * layers
    masters = share * 4 if size == 2 else 0
    moments = share * 2 * (2 if config.moments == "bfloat16" else 4)
    return {"weights": weights * size, "gradients": weights * size, "master weights": masters,
            "moments": moments, "reference": weights * size if config.beta else 0,
            "critic": 2 * weights * size + masters + moments if critic else 0,
            "activations of a micro-batch": kept * config.tokens_per_micro_batch,
            "logits of a chunk": 6 * 2 ** 28}


def print_memory(lm, learners, peak):
    """Bytes that every step holds, by memory_needed."""
    kept = {}
    for algo, its in learners.items():
        needed = memory_needed(lm.model.config, its.config, len(its.optimizers) > 1)
        kept[algo] = sum(n for what, n in needed.items()
                         if not what.startswith(("activations", "logits")))
    print("what training keeps, computed: "
          + ", ".join(f"{algo} {n / 1e9:.3f} GB" for algo, n in kept.items())
          + f"{ratio_to_ppo(kept)}; peak memory {peak:.2f} GB")


def chunked(lm, batch):
    return lm.score(batch).logp.sum()


def all_logits(lm, batch):
    logits = lm.model(input_ids=batch.ids, use_cache=False).logits.float()
    logp = restricted_log_softmax(logits, lm.value_index)
    token = batch.ids[batch.row, batch.col]
    return logp[batch.row, batch.col - 1].gather(1, token[:, None]).sum()


def body_alone(lm, batch):
    return lm.body(batch.ids).sum()


def forward_backward(lm, batches, loss_of):
    """-> seconds, and the sum of the losses."""
    lm.model.zero_grad(set_to_none=False)
    began, total = now(), 0.0
    for batch in batches:
        loss = loss_of(lm, batch)
        loss.backward()
        total += loss.item()
    return now() - began, total


def padded_alike(lm, samples, budget):
    """Batches in the order of the samples, all padded to the longest one."""
    longest = max(len(ids) for ids, _ in samples)
    each, batches = max(1, budget // longest), []
    for i in range(0, len(samples), each):
        batch = make_batch(samples[i:i + each]).to(lm.device)
        batches.append(batch._replace(ids=F.pad(batch.ids, (0, longest - batch.ids.shape[1]))))
    return batches


def update_main(argv):
    parser = Parser("update", "Forward and backward: response positions in chunks beside all "
                    "logits, sorted micro-batches beside padding alike. It takes train.py's flags "
                    "too.", TRAJECTORIES)
    args, config, lm = prepare(parser, argv)
    turns = invent(talker(lm, config, args.response), config, args)
    samples = [sample[:2] for sample in train.make_samples(turns, config.context)[:256]]
    longest, budget = max(len(ids) for ids, _ in samples), config.tokens_per_micro_batch
    lm.model.train(config.checkpointing)  # as in an update
    if torch.cuda.is_available():
        whole, peaks = make_batch(samples[:max(1, budget // longest)]).to(lm.device), []
        for loss_of in (body_alone, body_alone, chunked):  # the first one makes the gradients
            torch.cuda.reset_peak_memory_stats()
            forward_backward(lm, [whole], loss_of)
            peaks.append(runs.peak_memory())
        print(f"the loss of a micro-batch of {whole.ids.numel()} tokens takes "
              f"{peaks[2] - peaks[1]:.2f} GB beside its body's {peaks[1]:.2f}")
    few = samples[:max(1, min(8192, budget) // longest)]  # all logits of more would not fit
    some = [make_batch(few).to(lm.device)]
    tidy = [make_batch(group).to(lm.device) for group in micro_batches(samples, budget)]
    compare(lm, "response positions in chunks, against all logits", (some, all_logits),
            (some, chunked), args.repeats)
    compare(lm, "sorted micro-batches by tokens, against padding alike",
            (padded_alike(lm, samples, budget), chunked), (tidy, chunked), args.repeats)


def compare(lm, title, plain, ours, repeats):
    """plain, ours: (batches, loss_of)."""
    rounds = [(forward_backward(lm, *plain), forward_backward(lm, *ours))
              for _ in tqdm(range(repeats + 1), desc=title, leave=False)][1:]
    ratio = np.median([theirs[0] / mine[0] for theirs, mine in rounds])
    print(f"{title}: {ratio:.2f} times as fast; summed log-prob {rounds[0][0][1]:.4f} and "
          f"{rounds[0][1][1]:.4f}")


def plot_main(argv):
    parser = argparse.ArgumentParser(prog="bench.py plot", description="Draws what `iteration "
                                     "--out RUN` measured, a panel a run.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="phases.png")
    args = parser.parse_args(argv)
    reports = []
    for folder in args.runs:
        with open(f"{folder}/bench.json") as file:
            reports.append(json.load(file))
    plot_phases(reports, args.out)
    print(f"wrote {args.out}")


def plot_phases(reports, path):
    """The paper's runtime figure: seconds of an iteration by phase, method beside method."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, len(reports), figsize=(4.5 * len(reports), 4.2), sharey=True,
                             layout="constrained", squeeze=False)
    for ax, report in zip(axes[0], reports):
        seconds, names = report["seconds"], [evaluation.NAMES[algo] for algo in report["seconds"]]
        bottom = np.zeros(len(seconds))
        for phase, color, hatch in zip(PHASES, COLORS, HATCHES):
            heights = np.array([times.get(phase, 0.0) for times in seconds.values()])
            if heights.any():
                ax.bar(names, heights, bottom=bottom, width=0.6, color=color,
                       hatch=hatch, edgecolor="white", label=MEANING[phase])
                bottom += heights
        for n, (height, times) in enumerate(zip(bottom, seconds.values())):
            ax.text(n, height, f"{height:.2f}, {height - times['rollout']:.2f} after the rollout",
                    ha="center", va="bottom", fontsize=8)
        ax.set(title=f"{report['model']}, --context {report['context']}, --old {report['old']}")
        ax.margins(y=0.12)
    axes[0][0].set_ylabel("seconds an iteration")
    labels = {}
    for ax in axes[0]:
        labels |= dict(zip(*ax.get_legend_handles_labels()[::-1]))
    fig.legend(labels.values(), labels, fontsize=8, ncols=3, loc="outside lower center")
    fig.suptitle(reports[0]["versions"]["device"])
    fig.savefig(path, dpi=110)
    plt.close(fig)


# ------------------------------------------------------------------------------- environments


def random_command(rng, info):
    """A random admissible command; a search is made of four of the task's words."""
    command, words = rng.choice(info["admissible"]), info["task"].split()
    if command.startswith("search["):
        return f"search[{' '.join(rng.sample(words, min(4, len(words))))}]"
    return command


def wander(env, task, steps):
    """A reset and random steps, one in ten of which the game cannot use -> the answers, the seconds
    of the reset, the seconds of each step."""
    rng, began = random.Random(task), time.perf_counter()
    obs, info = env.reset(task)
    answers, reset, seconds = [(obs, info)], time.perf_counter() - began, []
    while len(seconds) < steps:
        command = random_command(rng, info) if rng.random() < 0.9 else "dance"
        began = time.perf_counter()
        answers.append(env.step(command))
        seconds.append(time.perf_counter() - began)
        _, _, terminated, truncated, info = answers[-1]
        if terminated or truncated:
            break
    return answers, reset, seconds


def bench_env(name, options, games, steps):
    """Prints the seconds of an environment, for alfworld beside TextWorld's own engine."""
    engines = {"stock": envs.make_env(name, **options, stock=True)} if name == "alfworld" else {}
    engines["ours"] = envs.make_env(name, **options)
    few = random.Random(0).sample(games, min(8, len(games)))
    for env in engines.values():
        wander(env, few[0], 1)  # the first game pays for imports
    played = {engine: [] for engine in engines}
    for task in few:
        for engine, env in engines.items():
            played[engine].append(wander(env, task, steps))
    print(f"{'':8}{'load and reset, ms':>20}{'step, ms':>12}{'steps a second':>16}   medians of "
          f"{len(few)} games; the mean over {sum(len(x[2]) for x in played['ours'])} steps")
    medians = []
    for engine, runs in played.items():
        all_steps = [s for *_, seconds in runs for s in seconds]
        medians.append(np.array([np.median([x[1] for x in runs]), np.median(all_steps)]))
        reset, step = 1000 * medians[-1]
        print(f"{engine:8}{reset:20.2f}{step:12.3f}{len(all_steps) / sum(all_steps):16.0f}")
    if "stock" in played:
        reset, step = medians[0] / medians[1]
        same = sum(json.dumps(a[0]) == json.dumps(b[0]) for a, b in zip(*played.values()))
        note = "" if shortcuts() else "; not TextWorld 1.7.0: both are its own engine"
        print(f"{'times':8}{reset:20.1f}{step:12.1f}   transcripts identical in {same} of "
              f"{len(few)} games{note}")


def bench_pool(name, options, games, workers):
    """Prints how fast the pool plays all games side by side at random."""
    pool, began, rng = envs.Pool(name, options, workers), time.perf_counter(), random.Random(2)
    for key, game in enumerate(games):
        pool.start(key, game)
    answers = pool.gather(range(len(games)))
    playing, turns = {key: info for key, (_, info) in enumerate(answers)}, 0
    loaded = time.perf_counter() - began
    while playing:
        for key, info in playing.items():
            pool.step(key, random_command(rng, info))
        turns += len(playing)
        answers = zip(list(playing), pool.gather(playing))
        playing = {key: info for key, (_, _, terminated, truncated, info) in answers
                   if not (terminated or truncated)}
    seconds = time.perf_counter() - began
    pool.close()
    print(f"pool, {workers or 'no'} worker{'' if workers == 1 else 's'}: {len(games)} games, "
          f"{turns} turns in {seconds:.1f} s ({turns / seconds:.0f} a second), of which "
          f"{loaded:.1f} s are resets")


def envs_main(argv):
    args = Parser("envs", "Load, reset and step of an environment, for alfworld beside "
                       "TextWorld's own engine; then 128 games in the pool.", GAMES | {
                           "split": (str, "train", "whose games are played"),
                           "steps": (cli.Size, 50, "random steps a game"),
                           "workers": (cli.Count, 2, "processes of the pool")}).parse_args(argv)
    options = envs.options_for(vars(args))
    print(f"{args.env}: loading its games", flush=True)
    games, options = envs.tasks(args.env, args.split, **options), options | {"horizon": args.steps}
    bench_env(args.env, options, games, args.steps)
    some = random.Random(1).sample(games, min(128, len(games)))
    bench_pool(args.env, options, some, args.workers)


COMMANDS = {"sampler": sampler_main, "games": games_main, "host": host_main, "envs": envs_main,
            "iteration": iteration_main, "update": update_main, "plot": plot_main}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
    with cli.one_line_errors("bench.py", envs.GameError):
        if name in COMMANDS:
            with cli.alive(lambda: f"bench.py {name} measures"):
                COMMANDS[name](argv)
        elif name not in ("-h", "--help"):
            raise ValueError(f"unknown measurement {name!r}; known: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
