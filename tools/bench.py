"""Measures what results/README.md says about speed and memory.

    python tools/bench.py sampler              both engines side by side on random prompts
    python tools/bench.py iteration [--ppo]    seconds of an iteration by phase, PPO beside SAPO
    python tools/bench.py memory               what fits on which GPU, computed

Each of them has --help. What is compared takes turns, so that a noisy machine is noisy for both;
the first round warms up, and medians of the others are printed. On a GPU, MFU is the share of an
H200's operations a second that a phase needs without its padding.
"""
import dataclasses
import functools
import os
import sys
import time
from typing import Literal

import numpy as np
import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import eval as evaluation
import train
from machine import cli, ranks, runs
from model import actor_critic, load, locate
from rollout import Sampler, Turn
from tools.imitate import random_tiny, tiny_tokenizer

# --------------------------------------------------------------------- models and what they cost

PEAK, BANDWIDTH = 788e12, 4.3e12  # of an H200, as others measured: bf16 operations, bytes a second

# Qwen2.5, from the config.json of each size: width, width of the MLP, layers, heads, heads of K and
# V, vocabulary, and whether the head is the embedding.
QWEN25 = {"0.5B": (896, 4864, 24, 14, 2, 151936, True),
          "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
          "7B": (3584, 18944, 28, 28, 4, 152064, False)}


def architecture(name):
    """The config of a model by name; Qwen2.5's sizes are known without a download."""
    size = name.removeprefix("Qwen/").removeprefix("Qwen2.5-").removesuffix("-Instruct")
    if size not in QWEN25:
        return transformers.AutoConfig.from_pretrained(locate(name))
    width, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN25[size]
    return transformers.Qwen2Config(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def random_model(name, dtype, seed=0):
    """-> ActorCritic of the named architecture with random weights, which are as fast as trained
    ones, behind the tiny model's tokenizer. "tiny" has the tiny model's architecture."""
    if name == "tiny":
        return random_tiny(seed, dtype)
    config, device = architecture(name), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa")
    return actor_critic(model.eval(), tiny_tokenizer())


def sizes(lm):
    """The parameters of the body and of the head. A token costs each of them two operations, a
    multiplication and an addition; to look up its embedding costs none."""
    head, total = lm.head.weight.numel(), sum(p.numel() for p in lm.model.parameters())
    return total - head * (1 if lm.model.config.tie_word_embeddings else 2), head


def head_size(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def operations(lm, tokens, scored, squares):
    """Floating-point operations of a forward pass: `tokens` go through the body, `scored` of them
    through the head, and the squares of the sequences' lengths sum to `squares`."""
    (body, head), c = sizes(lm), lm.model.config
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * head_size(c) * squares
    return 2 * body * tokens + 2 * head * scored + attention


def now():
    """Seconds, read when the GPU has done all that it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def describe(lm, name, dtype):
    count, device = sum(p.numel() for p in lm.model.parameters()), runs.versions()["versions"]
    print(f"{name}: {count / 1e6:.1f} M parameters, {dtype} on {device['device']}", flush=True)


def with_stops(lm, mean):
    """Random weights hardly ever say a stop word. So some words are made stop words, by which a
    response has `mean` tokens on average (0: none are) -> (lm, the words that prompts are of)."""
    words = np.setdiff1d(np.arange(lm.model.config.vocab_size), [*lm.value_ids, *lm.stop_ids])
    ends = np.random.default_rng(0).permutation(words)[:len(words) // mean if mean else 0]
    return dataclasses.replace(lm, stop_ids=(*lm.stop_ids, *ends.tolist())), words


# --------------------------------------------------------------------------------------- sampler

@dataclasses.dataclass
class SamplerFlags:
    """Both engines on the same random prompts. A comment is its flag's --help."""

    model: str = "tiny"  # as for train.py
    random_weights: bool = False  # build the architecture of --model without its weights
    rows: int = 16  # prompts side by side
    prompt: int = 200  # mean length of the prompts in tokens
    new: int = 64  # longest response in tokens
    mean: int = None  # a random word in so many ends a response (0: none); default --new / 3
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights; bfloat16 on a GPU
    compile: bool = False  # torch.compile for kv
    repeats: int = 3  # rounds


def sampler_main(argv):
    """The same random prompts through both engines in turns, then a row of a table for each. The
    hf engine reads V and Q by a pass of its own, which is left out under `times hf` and charged
    under `with V, Q`. Responses of one token tell the seconds of the prefill."""
    given = vars(cli.flags_of(SamplerFlags, {}, "The sampler's two engines.").parse_args(argv))
    usual = {"dtype": "bfloat16"} if torch.cuda.is_available() else {}
    args = SamplerFlags(**usual | given)
    dtype = getattr(torch, args.dtype)
    lm = random_model(args.model, dtype) if args.random_weights else load(args.model, dtype=dtype)
    cli.choose_threads(lm.model)
    describe(lm, args.model, args.dtype)
    lm, words = with_stops(lm, args.new // 3 if args.mean is None else args.mean)
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, args.prompt // 2), args.prompt * 3 // 2 + 1, args.rows)
    prompts = [rng.choice(words, n).tolist() for n in lengths]
    u = rng.random((args.rows, args.new), dtype=np.float32)
    scoring, score = [], lm.score
    lm.score = lambda batch: timed(scoring, score, batch)
    samplers = {(engine, n): Sampler(lm, engine, max_new=n, compile=args.compile)
                for engine in ("hf", "kv") for n in (1, args.new)}
    found = {key: [] for key in samplers}
    for _ in tqdm(range(args.repeats + 1), desc="rounds of both engines", leave=False):
        for (engine, n), sampler in samplers.items():
            before = sampler.steps
            scoring.clear()
            seconds = []
            responses = timed(seconds, sampler, range(len(prompts)), prompts, u[:, :n])
            found[engine, n].append((seconds[0] - sum(scoring), seconds[0],
                                     sampler.steps - before, [r.ids for r in responses]))
    print_race(lm, args, prompts, found)


def timed(seconds, function, *args):
    """-> function(*args), whose seconds are added to a list."""
    began = now()
    out = function(*args)
    seconds.append(now() - began)
    return out


def print_race(lm, args, prompts, found):
    """found: {(engine, longest response): [(seconds, with V and Q, steps, ids), ...]}. On a GPU it
    also says what of the bandwidth a step uses, which reads every weight, and every key and value
    that a token attends to."""
    print(f"{args.rows} prompts of {args.prompt // 2} to {args.prompt * 3 // 2} random tokens, "
          f"responses of up to {args.new}; medians of {args.repeats}\n{'engine':8}{'tokens/s':>10}"
          f"{'times hf':>10}{'with V, Q':>11}{'prefill s':>11}{'ms a step':>11}"
          "  same tokens")
    median = {key: [np.median([r[i] for r in rows[1:]]) for i in (0, 1)]
              for key, rows in found.items()}
    hf = found["hf", args.new][-1]
    for engine in ("hf", "kv"):
        _, _, steps, ids = found[engine, args.new][-1]
        first, (whole, charged) = median[engine, 1][0], median[engine, args.new]
        step = (whole - first) / max(1, steps - found[engine, 1][-1][2])
        said, theirs = (sum(map(len, x)) for x in (ids, hf[3]))  # tokens
        times = [said / seconds / (theirs / its)
                 for seconds, its in zip((whole, charged), median["hf", args.new])]
        same = np.mean([a == b for a, b in zip(hf[3], ids)])
        print(f"{engine:8}{said / whole:10.0f}{times[0]:10.2f}{times[1]:11.2f}{first:11.3f}"
              f"{1000 * step:11.2f}  {same:.0%}")
    if torch.cuda.is_available():
        c, size = lm.model.config, lm.head.weight.element_size()
        kv = 2 * c.num_hidden_layers * c.num_key_value_heads * head_size(c) * size
        seen = sum(len(p) * len(r) + len(r) ** 2 / 2 for p, r in zip(prompts, ids))
        least = (steps * sum(sizes(lm)) * size + seen * kv) / BANDWIDTH
        prefill = operations(lm, sum(map(len, prompts)), 0, sum(len(p) ** 2 for p in prompts))
        print(f"kv: {least / (whole - first):.1%} of the bandwidth, prefill MFU "
              f"{prefill / first / PEAK:.1%}")


# ---------------------------------------------------------------------------------- an iteration

# The phases of an iteration, and how many forward passes each is worth.
PHASES = {"rollout": 0, "old": 1, "ref": 1, "values": 1, "update": 3, "critic": 3}


def invent(sampler, words, config, args):
    """A rollout without games: every trajectory asks args.turns times, with random prompts of about
    args.prompt tokens, and in `full` of a fifth of that after the first -> turns."""
    rng, window = np.random.default_rng(config.seed), config.context == "window"
    turns = {traj: [] for traj in range(config.tasks)}
    before = {traj: [] for traj in turns}  # in `full`, the ids of the conversation so far
    asked = {}  # the ids of the latest prompt

    def ask(traj):
        n = max(1, args.prompt // 5)
        if window or not turns[traj]:
            n = rng.integers(args.prompt // 2, args.prompt * 3 // 2 + 1)
        asked[traj] = rng.choice(words, n).tolist()
        u = rng.random(config.max_new, dtype=np.float32)
        sampler.add(traj, before[traj] + asked[traj], u)

    for traj in turns:
        ask(traj)
    while sampler.busy:
        for traj, response in sampler.run():
            turn = invented_turn(traj, len(turns[traj]), asked[traj], response, args.turns)
            turns[traj].append(turn)
            if not window:
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


@dataclasses.dataclass
class IterationFlags:
    """What there is beside train.py's flags."""

    turns: int = 50  # of a trajectory
    prompt: int = 500  # mean length of a prompt in tokens
    response: int = 100  # mean length of a response in tokens
    repeats: int = 3  # rounds
    ppo: bool = False  # PPO beside it, on the same turns


def iteration_main(argv):
    about = "Seconds of an iteration's phases. It takes train.py's flags too."
    given, rest = cli.flags_of(IterationFlags, {}, about).parse_known_args(argv)
    args = IterationFlags(**vars(given))
    config = train.parse_config([*rest, "--max_new", str(4 * args.response)])
    print(f"building {config.model} with random weights", flush=True)
    lm = random_model(config.model, getattr(torch, config.dtype), config.seed)
    cli.choose_threads(lm.model)
    describe(lm, config.model, config.dtype)
    lm, words = with_stops(lm, args.response)
    lm = train.fitted(lm, config)
    learners, sampler = learners_for(lm, config, args.ppo), evaluation.sampler_for(lm, config)
    laps, off = {algo: [] for algo in learners}, []
    for n in tqdm(range(args.repeats + 1), desc="iterations", leave=False):
        took = []
        turns = timed(took, invent, sampler, words, config, args)
        for algo in sorted(learners, reverse=n % 2 == 1):  # the order changes from round to round
            learner = learners[algo]
            learner.clock.start()
            off.append(learner.learn(turns, 0)["sampler_off"])
            laps[algo].append(learner.clock.laps | {"time_rollout": took[0]})
    seconds = {algo: {name: float(np.median([lap.get(f"time_{name}", 0.0) for lap in some[1:]]))
                      for name in PHASES} for algo, some in laps.items()}
    print_phases(lm, config, args, seconds, turns)
    print_memory(lm, learners, runs.peak_memory())
    fresh = off[::len(learners)]  # of those that learned first, before the policy had moved
    print(f"log-probs of sampler and trainer differ by {np.median(fresh):.2g} on average")


def print_phases(lm, config, args, seconds, turns):
    """The paper's runtime table."""
    _, minis = train.pack(turns, config, 0, torch.device("cpu"))
    batches = [micro.batch for mini in minis for micro in mini]
    real, scored, processed, squares = (sum(map(int, column)) for column in zip(*(
        (b.length.sum(), len(b.turn_of), b.ids.numel(), (b.length ** 2).sum()) for b in batches)))
    print(f"{config.model}, {config.dtype}, {config.context}: {config.tasks} trajectories of "
          f"{args.turns} turns, {real} tokens of which {scored} sampled; real / processed tokens "
          f"{real / processed:.3f}; medians of {args.repeats}\n" + " " * 15
          + "".join(f"{algo:>11}" for algo in seconds) + f"   tokens/s of {config.algo}")
    for name, passes in PHASES.items():
        mine, line = seconds[config.algo][name], [times[name] for times in seconds.values()]
        whole = mine and not (name == "old" and config.old == "rollout")  # else one micro-batch
        speed = f"{real / mine:14.0f}" if whole else ""
        if torch.cuda.is_available() and passes and whole:
            scored_here = 0 if name in ("values", "critic") else scored  # a critic has no such head
            needed = passes * operations(lm, real, scored_here, squares)
            speed += f", MFU {needed / mine / PEAK:.1%}"
        if any(line):
            print(f"{name:15}" + "".join(f"{x:9.2f} s" for x in line) + speed)
    after = {algo: sum(times.values()) - times["rollout"] for algo, times in seconds.items()}
    print(f"{'after rollout':15}" + "".join(f"{x:9.2f} s" for x in after.values())
          + ratio_to_ppo(after))


def ratio_to_ppo(costs):
    algo, *others = costs
    return f"   {algo} / ppo {costs[algo] / costs['ppo']:.3f}" if others else ""


def print_memory(lm, learners, peak):
    """The bytes of what is there all the time. A critic has the policy's body and a head of one
    row, so it is smaller where the policy's head is not its embedding."""
    size, kept = lm.head.weight.element_size(), {}
    for algo, learner in learners.items():
        moments = 2 if learner.config.moments == "bfloat16" else 4
        trained = sum(p.numel() for model in learner.models.values() for p in (
            model.body if model is learner.critic else model).parameters())
        reference = sum(p.numel() for p in lm.model.parameters()) * bool(learner.config.beta)
        kept[algo] = trained * sum(bytes_of_training(size, moments).values()) + reference * size
    print("what training keeps, computed: "
          + ", ".join(f"{algo} {n / 1e9:.3f} GB" for algo, n in kept.items())
          + f"{ratio_to_ppo(kept)}; peak memory {peak:.2f} GB")


# ------------------------------------------------------------------------------- memory, computed

def bytes_of_training(size, moments):
    """The bytes of a parameter of `size` bytes that is trained, with AdamW's moments of so many."""
    return {"weights": size, "gradients": max(size, moments), "moments": 2 * moments,
            "masters": 4 if size == 2 else 0}


@functools.cache
def activation_bytes(name):
    """What a layer of a model keeps of a token for the backward pass, in bytes, as PyTorch runs it
    without a compiler: counted in two models of one and two layers."""
    kept = {}
    for layers in (1, 2):
        config = architecture(name)
        config.num_hidden_layers, config.vocab_size = layers, 1024
        config.layer_types = ["full_attention"] * layers
        lm = actor_critic(transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16).eval(), tiny_tokenizer())
        weights, seen = {p.data_ptr() for p in lm.model.parameters()}, {}

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = lm.body(torch.ones(1, TOKENS, dtype=torch.long))
        kept[layers] = sum(n for at, n in seen.items() if at not in weights) / TOKENS
        del hidden
    return kept[2] - kept[1]


TOKENS = 128  # of the pass in which activations are counted
CONTEXT = 0.6  # GB of the CUDA context and of the libraries' workspaces, roughly


def memory_of(name, flags, ranks=1):
    """-> {what: GB of one rank}, at the defaults of train.py but for `flags`. The cache has a row
    for each of its share of ALFWorld's 140 held-out games, rounded up to a multiple of 16 as the
    sampler does, of 1,792 positions: prompts had at most 1,039 tokens, a response may have 512."""
    c = architecture(name)
    head = c.vocab_size * c.hidden_size
    layer = c.hidden_size * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * head_size(c)
    layer += 3 * c.hidden_size * c.intermediate_size
    parameters = c.num_hidden_layers * layer + head * (1 if c.tie_word_embeddings else 2)
    bytes_of = bytes_of_training(2, 2 if "--moments" in flags else 4)
    rows = min(flags.get("--rows", 144), -(-140 // ranks // 16) * 16)
    tokens = flags.get("--tokens_per_micro_batch", 8192)
    activations = tokens * c.num_hidden_layers * activation_bytes(name)
    if "--checkpointing" in flags:  # the layers' inputs, and one layer that is computed again
        activations = tokens * (2 * c.num_hidden_layers * c.hidden_size + activation_bytes(name))
    chunk = max(1, 2 ** 19 // c.vocab_size) * 128 * c.vocab_size  # entries of ActorCritic.chunk
    cache = rows * 1792 * 2 * c.num_hidden_layers * c.num_key_value_heads * head_size(c) * 2
    out = {"weights": 2 * parameters, "reference": 2 * parameters * ("--beta" not in flags),
           "masters and moments": parameters * (4 + bytes_of["moments"]) / ranks, "cache": cache,
           "gradients": parameters * bytes_of["gradients"], "activations": activations,
           "logits": 5 * 4 * chunk}
    return {what: n / 1e9 for what, n in out.items()} | {"CUDA": CONTEXT}


CARDS = {24: "RTX 4090", 48: "L40S, A6000", 80: "H100, A100", 141: "H200"}
LADDER = [{}, {"--tokens_per_micro_batch": 4096}, {"--checkpointing": ""},  # the cheapest first
          {"--checkpointing": "", "--moments": "bfloat16"},
          {"--checkpointing": "", "--moments": "bfloat16", "--rows": 48,
           "--tokens_per_micro_batch": 2048}]
LADDER += [LADDER[-1] | {"--beta": 0}]


def memory_main(argv):
    """Two tables: GB by phase of Qwen2.5's sizes, and for each card the first of LADDER that fits
    with a tenth to spare."""
    cli.Parser(description="Memory, computed.").parse_args(argv)
    print("GB on one GPU: what is kept throughout, and the total at the peak of a phase\n")
    rows = [["", "kept: weights", "reference", "masters and moments", "cache",
             "peak: rollout, scoring", "update", "update, --checkpointing"]]
    for size in QWEN25:
        parts = memory_of(size, {})
        update, less = sum(parts.values()), sum(memory_of(size, {"--checkpointing": ""}).values())
        rollout = update - parts["gradients"] - parts["activations"]
        numbers = [*list(parts.values())[:4], rollout, update, less]
        rows.append([f"Qwen2.5-{size}", *(f"{x:.1f}" for x in numbers)])
    print(evaluation.markdown(rows) + "\n")
    rows = [["card", *(f"{size}, {n} GPU{'s' * (n > 1)}" for size in QWEN25 for n in (1, 4, 8))]]
    for gigabytes, name in CARDS.items():
        rows.append([f"{gigabytes} GB ({name})"])
        for size in QWEN25:
            for ranks in (1, 4, 8):
                fits = [flags for flags in LADDER
                        if sum(memory_of(size, flags, ranks).values()) < 0.9 * gigabytes]
                text = " ".join(f"{k} {v}".strip() for k, v in fits[0].items()) if fits else "–"
                rows[-1].append(text or "as it is")
    print(evaluation.markdown(rows))


COMMANDS = {"sampler": sampler_main, "iteration": iteration_main, "memory": memory_main}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    with cli.one_line_errors("bench.py"):
        ranks.join_ranks()
        if name in ("-h", "--help"):
            print(__doc__)
        elif name in COMMANDS:
            COMMANDS[name](argv)
        else:
            raise ValueError(f"unknown measurement {name!r}; known: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
