"""Benchmarks of speed and memory.

    python tools/bench.py sampler              both engines side by side on random prompts
    python tools/bench.py iteration [--ppo]    seconds per phase of an iteration, PPO beside SAPO
    python tools/bench.py attention            ways of attending to the KV cache, each one's error
    python tools/bench.py folder OUT           writes a random model, which train.py can start from

Each of them has --help. What is compared takes turns, so that a noisy machine is noisy for both.
The first round is a warm-up, of an iteration only its first three turns, and medians of the others
are printed. On a GPU, MFU (model FLOPs utilization) is computed with an H200's peak, and without
padding.
"""
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import eval as evaluation
import train
from baselines.learners import PPO, PPOTurns
from hf.attention import grouped_query_attention, pieces_of_cache
from hf.loading import resolve_model
from hf.lora import add_adapters
from model import actor_critic, load
from rollout import End, Sampler, Turn
from runtime.checkpoint import peak_memory, versions
from runtime.cli import Parser, choose_threads, one_line_errors, parser_for
from runtime.distributed import init_distributed
from tools.imitate import random_tiny, tiny_tokenizer
from training.settings import learner_class, parse

# --------------------------------------------------------------------- models and their FLOPs

PEAK, BANDWIDTH = 788e12, 4.3e12  # measured on H200s by others: bf16 FLOP/s, bytes/s

# Qwen2.5, from the config.json of each size: hidden size, intermediate size, layers, heads,
# key-value heads, vocabulary size, tied embeddings; "small" is ours, to try things on a CPU
QWEN25 = {"small": (64, 128, 3, 4, 2, 4096, True),
          "0.5B": (896, 4864, 24, 14, 2, 151936, True),
          "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
          "7B": (3584, 18944, 28, 28, 4, 152064, False)}


def architecture(name):
    """The config of a model; those of Qwen2.5 need no download."""
    size = name.removeprefix("Qwen/").removeprefix("Qwen2.5-").removesuffix("-Instruct")
    if size not in QWEN25:
        return transformers.AutoConfig.from_pretrained(resolve_model(name))
    width, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN25[size]
    return transformers.Qwen2Config(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def random_model(name, dtype, seed=0, lora_rank=0):
    """An ActorCritic of the named architecture ("tiny": the tiny model's) with random weights,
    which are as fast as trained ones, and the tiny model's tokenizer. lora_rank: that of adapters.
    They cannot be loaded again, because the random model is in no folder."""
    if name == "tiny":
        lm = random_tiny(seed, dtype)
    else:
        lm = actor_critic(random_weights(name, dtype, seed).eval(), tiny_tokenizer())
    if lora_rank:
        add_adapters(lm.model, lora_rank, base="none")
    return lm


def random_weights(name, dtype, seed):
    """A model of the named architecture in transformers, on a GPU if there is one."""
    config, device = architecture(name), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa")


# Qwen2.5's chat template, without its part for tools
QWEN25_TEMPLATE = """{% if messages[0].role != 'system' %}<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def folder_main(argv):
    """Writes a random model into a folder, with Qwen2.5's template and the tiny model's tokenizer
    under Qwen's names of control tokens."""
    parser = Parser(description="Writes a random model, for train.py --model OUT.")
    parser.add_argument("out", help="the folder; it must not exist")
    parser.add_argument("--model", default="Qwen2.5-1.5B", help="whose architecture it has")
    args = parser.parse_args(argv)
    if Path(args.out).exists():
        raise ValueError(f"{args.out} exists already")
    lm = random_model(args.model, torch.bfloat16)
    written = lm.tokenizer.backend_tokenizer.to_str()
    for old, new in (("<|user|>", "<|im_start|>"), ("<|end|>", "<|im_end|>")):
        written = written.replace(old, new)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(written), chat_template=QWEN25_TEMPLATE,
        eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unknown|>",
        clean_up_tokenization_spaces=False)
    actor_critic(lm.model, tokenizer).save(args.out)


def sizes(lm):
    """The numbers of parameters of the layers and of the head. Per token, each costs two FLOPs; the
    lookup of an embedding costs none."""
    head, total = lm.head.weight.numel(), sum(p.numel() for p in lm.model.parameters())
    return total - head * (1 if lm.model.config.tie_word_embeddings else 2), head


def head_size(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def flops(lm, tokens, scored, squares):
    """FLOPs of a forward pass: `tokens` go through the layers, `scored` of them through the head,
    and the squares of the sequences' lengths sum to `squares`."""
    (layers, head), c = sizes(lm), lm.model.config
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * head_size(c) * squares
    return 2 * layers * tokens + 2 * head * scored + attention


def now():
    """Seconds, after the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def describe(lm, name, dtype):
    count, device = sum(p.numel() for p in lm.model.parameters()), versions()["versions"]
    print(f"{name}: {count / 1e6:.1f} M parameters, {dtype} on {device['device']}", flush=True)


def with_stops(lm, mean):
    """Random weights hardly ever sample a stop token. So this makes some tokens stop tokens, such
    that a response has `mean` tokens on average (0: none) -> (lm, the tokens to make prompts
    of)."""
    words = np.setdiff1d(np.arange(lm.model.config.vocab_size), [*lm.value_ids, *lm.stop_ids])
    ends = np.random.default_rng(0).permutation(words)[:len(words) // mean if mean else 0]
    return dataclasses.replace(lm, stop_ids=(*lm.stop_ids, *ends.tolist())), words


# --------------------------------------------------------------------------------------- sampler

@dataclasses.dataclass
class SamplerFlags:
    """Every field is a flag, and its comment is the flag's --help."""

    model: str = "tiny"  # as for train.py
    random_weights: bool = False  # build the architecture of --model without its weights
    rows: int = 16  # number of prompts
    prompt: int = 200  # mean number of tokens of a prompt
    new: int = 64  # maximum number of tokens of a response
    mean: int = None  # mean number of tokens of a response (0: always --new); default --new / 3
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights; bfloat16 on a GPU
    compile: bool = False  # torch.compile for kv
    repeats: int = 3  # measured rounds


def sampler_main(argv):
    """The same random prompts through both engines in turns, then a table with a row for each. The
    hf engine needs a forward pass more for V and Q, which counts only in the column `with V, Q`.
    Responses of one token measure the prefill."""
    parser = parser_for(SamplerFlags, "Both engines of the sampler on random prompts.")
    given = vars(parser.parse_args(argv))
    usual = {"dtype": "bfloat16"} if torch.cuda.is_available() else {}
    args = SamplerFlags(**usual | given)
    dtype = getattr(torch, args.dtype)
    lm = random_model(args.model, dtype) if args.random_weights else load(args.model, dtype=dtype)
    choose_threads(lm.model)
    describe(lm, args.model, args.dtype)
    lm, words = with_stops(lm, args.new // 3 if args.mean is None else args.mean)
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, args.prompt // 2), args.prompt * 3 // 2 + 1, args.rows)
    prompts = [rng.choice(words, n).tolist() for n in lengths]
    u = rng.random((args.rows, args.new), dtype=np.float32)
    scoring, score = [], lm.score
    lm.score = lambda batch: timed(scoring, score, batch)
    samplers = {(engine, n): Sampler(lm, engine, max_new_tokens=n, compile=args.compile)
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
    """Appends the seconds of function(*args) to a list -> its result."""
    start = now()
    out = function(*args)
    seconds.append(now() - start)
    return out


def print_race(lm, args, prompts, found):
    """found: {(engine, longest response): [(seconds, seconds with V and Q, steps, ids), ...]}. On a
    GPU it also prints which share of the memory bandwidth decoding uses, for reading every weight
    and all keys and values that tokens attend to."""
    print(f"{args.rows} prompts of {args.prompt // 2} to {args.prompt * 3 // 2} random tokens, "
          f"responses of up to {args.new}; medians of {args.repeats}\n{'engine':8}{'tokens/s':>10}"
          f"{'times hf':>10}{'with V, Q':>11}{'prefill s':>11}{'ms/step':>11}"
          "  same tokens")
    median = {key: [np.median([r[i] for r in rows[1:]]) for i in (0, 1)]
              for key, rows in found.items()}
    hf = found["hf", args.new][-1]
    for engine in ("hf", "kv"):
        _, _, steps, ids = found[engine, args.new][-1]
        first, (whole, with_values) = median[engine, 1][0], median[engine, args.new]
        step = (whole - first) / max(1, steps - found[engine, 1][-1][2])
        tokens, tokens_hf = (sum(map(len, x)) for x in (ids, hf[3]))
        times = [tokens / seconds / (tokens_hf / seconds_hf)
                 for seconds, seconds_hf in zip((whole, with_values), median["hf", args.new])]
        same = np.mean([a == b for a, b in zip(hf[3], ids)])
        print(f"{engine:8}{tokens / whole:10.0f}{times[0]:10.2f}{times[1]:11.2f}{first:11.3f}"
              f"{1000 * step:11.2f}  {same:.0%}")
    if torch.cuda.is_available():
        c, size = lm.model.config, lm.head.weight.element_size()
        kv = 2 * c.num_hidden_layers * c.num_key_value_heads * head_size(c) * size
        seen = sum(len(p) * len(r) + len(r) ** 2 / 2 for p, r in zip(prompts, ids))
        least = (steps * sum(sizes(lm)) * size + seen * kv) / BANDWIDTH
        prefill = flops(lm, sum(map(len, prompts)), 0, sum(len(p) ** 2 for p in prompts))
        print(f"kv: {least / (whole - first):.1%} of the bandwidth, prefill MFU "
              f"{prefill / first / PEAK:.1%}")


# ---------------------------------------------------------------------------------- an iteration

# the phases of an iteration, and how many forward passes the FLOPs of each equal
PHASES = {"rollout": 0, "old_logprobs": 1, "ref": 1, "values": 1, "update": 3, "critic": 3}


def random_rollout(sampler, words, config, args):
    """A rollout without games: every trajectory has args.turns turns with random prompts of about
    args.prompt tokens, in "full" of a fifth of that after the first -> turns."""
    rng, window = np.random.default_rng(config.seed), config.context == "window"
    turns = {traj: [] for traj in range(config.batch_size)}
    before = {traj: [] for traj in turns}  # in "full", the token ids of the conversation so far
    asked = {}  # the token ids of the latest prompt

    def ask(traj):
        n = max(1, args.prompt // 5)
        if window or not turns[traj]:
            n = rng.integers(args.prompt // 2, args.prompt * 3 // 2 + 1)
        asked[traj] = rng.choice(words, n).tolist()
        u = rng.random(config.max_new_tokens, dtype=np.float32)
        sampler.add(traj, before[traj] + asked[traj], u)

    for traj in turns:
        ask(traj)
    while sampler.busy:
        for traj, response in sampler.run():
            turn = random_turn(traj, len(turns[traj]), asked[traj], response, args.turns)
            turns[traj].append(turn)
            if not window:
                before[traj] += turn.prompt_ids + turn.action_ids
            if turn.done:
                sampler.drop(traj)
            else:
                ask(traj)
    return [turn for traj in turns for turn in turns[traj]]


def random_turn(traj, n, prompt_ids, response, turns):
    """Every second trajectory wins."""
    done, empty = n + 1 == turns, dict.fromkeys("task category text action".split(), "")
    return Turn(traj=traj, turn=n, prompt_ids=prompt_ids, action_ids=response.ids, v=response.v,
                q=response.q, logp=response.logp, reward=10.0 * (done and traj % 2),
                end=End.TERMINATED if done else None, invalid=False, admissible=True, won=False,
                score=0.0, messages=[], **empty)


@dataclasses.dataclass
class IterationFlags:
    """The flags beside those of train.py."""

    turns: int = 50  # turns per trajectory
    prompt: int = 500  # mean number of tokens of a prompt
    response: int = 100  # mean number of tokens of a response
    repeats: int = 3  # measured rounds
    ppo: bool = False  # also PPO, on the same turns


def iteration_main(argv):
    about = "Seconds per phase of an iteration. It takes train.py's flags, too."
    given, rest = parser_for(IterationFlags, about).parse_known_args(argv)
    args = IterationFlags(**vars(given))
    config = parse([*rest, "--max_new_tokens", str(4 * args.response)])
    print(f"building {config.model} with random weights", flush=True)
    lm = random_model(config.model, getattr(torch, config.dtype), config.seed, config.lora_rank)
    choose_threads(lm.model)
    describe(lm, config.model, config.dtype)
    lm, words = with_stops(lm, args.response)
    learners = {config.algo: (learner := learner_class(config.algo)(lm, config))}
    lm = learner.lm  # compiled, if config says so
    if args.ppo and config.algo != "ppo":
        learners["ppo"] = rival = PPO(lm, dataclasses.replace(config, algo="ppo"))
        # it shares the policy's optimizer and reference, so that the memory of both fits
        rival.optimizer, rival.reference = learner.optimizer, learner.reference
        # in each round, the first changes the policy before the second compares it with the sampler
        learner.warned_of_sampler = rival.warned_of_sampler = True
    sampler = evaluation.sampler_for(lm, config)
    phases, diffs = {algo: [] for algo in learners}, []
    for n in tqdm(range(args.repeats + 1), desc="iterations", leave=False):
        took = []  # seconds
        # three turns compile everything, and a whole warm-up may take minutes
        played = args if n else dataclasses.replace(args, turns=min(3, args.turns))
        turns = timed(took, random_rollout, sampler, words, config, played)
        for algo in sorted(learners, reverse=n % 2 == 1):  # the order changes from round to round
            learner = learners[algo]
            learner.clock.take()
            diffs.append(learner.learn(turns, 0)["sampler_logprob_diff"])
            phases[algo].append(learner.clock.take() | {"time_rollout": took[0]})
    seconds = {algo: {name: float(np.median([x.get(f"time_{name}", 0.0) for x in rounds[1:]]))
                      for name in PHASES} for algo, rounds in phases.items()}
    print_phases(lm, config, args, seconds, turns)
    print_memory(lm, learners, peak_memory())
    fresh = diffs[::len(learners)]  # of the first learner in each round, before the policy changed
    print(f"log-probs of sampler and scoring pass differ by {np.median(fresh):.2g} on average")


def print_phases(lm, config, args, seconds, turns):
    """The runtime table of the paper."""
    _, minibatches = train.make_minibatches(turns, config, 0, torch.device("cpu"))
    batches = [micro.batch for minibatch in minibatches for micro in minibatch]
    real, scored, processed, squares = (sum(map(int, column)) for column in zip(*(
        (b.length.sum(), len(b.turn_of), b.ids.numel(), (b.length ** 2).sum()) for b in batches)))
    print(f"{config.model}, {config.dtype}, {config.context}: {config.batch_size} trajectories of "
          f"{args.turns} turns, {real} tokens of which {scored} sampled; real / processed tokens "
          f"{real / processed:.3f}; medians of {args.repeats}\n" + " " * 15
          + "".join(f"{algo:>11}" for algo in seconds) + f"   tokens/s of {config.algo}")
    for name, passes in PHASES.items():
        mine, line = seconds[config.algo][name], [times[name] for times in seconds.values()]
        skipped = name == "old_logprobs" and config.old_logprobs == "rollout"  # one micro-batch
        whole = mine and not skipped
        speed = f"{real / mine:14.0f}" if whole else ""
        if torch.cuda.is_available() and passes and whole:
            scored_here = 0 if name in ("values", "critic") else scored  # a critic has no such head
            needed = passes * flops(lm, real, scored_here, squares)
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
    """Computes the memory that is kept throughout: weights, gradients, optimizer state,
    reference."""
    kept = {}
    for algo, learner in learners.items():
        state = 2 if learner.config.optim_state_dtype == "bfloat16" else 4  # bytes per number
        trained = [p for p in lm.model.parameters() if p.requires_grad]
        # copies share what is frozen
        reference, critic = trained if learner.config.beta else [], []
        if isinstance(learner, PPOTurns):
            critic = [p for p in learner.critic.backbone.parameters() if p.requires_grad]
        kept[algo] = sum(p.nbytes for p in [*lm.model.parameters(), *reference, *critic])
        for p in [*trained, *critic]:  # gradient, moments, and a 16-bit one's float32 master
            size = p.element_size()
            kept[algo] += p.numel() * (max(size, state) + 2 * state + (4 if size == 2 else 0))
    print("memory kept throughout, computed: "
          + ", ".join(f"{algo} {n / 1e9:.3f} GB" for algo, n in kept.items())
          + f"{ratio_to_ppo(kept)}; peak memory {peak:.2f} GB")


# ------------------------------------------------------------------------------------- attention

@dataclasses.dataclass
class AttentionFlags:
    """Every field is a flag, and its comment is the flag's --help."""

    model: str = "Qwen2.5-1.5B"  # whose layers and heads
    cached: int = 5000  # prefill: tokens that the longest of its four rows has in the cache
    new: int = 80  # prefill: new tokens of each row
    length: int = 950  # decoding: mean number of tokens in the cache of a row
    repeats: int = 5  # measured rounds


class Attention(NamedTuple):
    """What one call attends to; as in a DecodeState, new tokens are in the cache already."""

    query: torch.Tensor  # (R, H, T, E)
    layers: list  # for each layer (keys, values), each (slots, S + 1, H', E)
    slots: torch.Tensor | None  # (R,) the slot of each row; None: the first R
    lengths: torch.Tensor  # (R,) positions that the last token of a row attends to
    kv_length: int  # the largest of them, rounded up


# Each of these returns the outputs of all layers, (R, T, H, E) each.

def by_sdpa(x: Attention):
    """With a mask. A prefill copies the slots first, and makes a call for each head of a group."""
    new, column = x.query.shape[2], torch.arange(x.kv_length, device=x.query.device)
    unseen = column > (x.lengths[:, None] - new + column[:new])[:, None, :, None]
    mask = torch.zeros_like(unseen, dtype=x.query.dtype).masked_fill(unseen, float("-inf"))
    slots = slice(len(x.query)) if x.slots is None else x.slots
    return [grouped_query_attention(None, x.query, keys[slots, :x.kv_length].transpose(1, 2),
                                    values[slots, :x.kv_length].transpose(1, 2), mask)[0]
            for keys, values in x.layers]


def in_pieces(x: Attention):
    pieces = pieces_of_cache(x.lengths, x.kv_length, x.layers[0][0].shape[1])
    return [grouped_query_attention(None, x.query, keys.transpose(1, 2), values.transpose(1, 2),
                                    pieces)[0] for keys, values in x.layers]


def by_flash(x: Attention, varlen_attn=None):
    """One call of FlashAttention on the whole cache, where it lies: each row is a sequence that
    begins at its slot. Causal attention counts back from its end, which seqused_k tells. With
    varlen_attn by that function, never with its block_table, which gives wrong results."""
    rows, _, new, _ = x.query.shape
    slots = torch.arange(rows, device=x.query.device) if x.slots is None else x.slots
    first_q = torch.arange(0, rows * new + 1, new, device=x.query.device).int()
    first_k = F.pad(slots * x.layers[0][0].shape[1], (0, 1)).int()  # the last one is unused
    q, used, outs = x.query.transpose(1, 2).flatten(0, 1), x.lengths.int(), []
    for keys, values in x.layers:
        args = q, keys.flatten(0, 1), values.flatten(0, 1), first_q, first_k, new, x.kv_length
        if varlen_attn:
            out = varlen_attn(*args, window_size=(-1, 0 if new > 1 else -1), enable_gqa=True,
                              seqused_k=used)
        else:
            out = torch.ops.aten._flash_attention_forward(*args, 0.0, new > 1, False,
                                                          seqused_k=used)[0]
        outs.append(out.unflatten(0, (rows, new)))
    return outs


def by_varlen_attn(x: Attention):
    """by_flash, by PyTorch's public function."""
    from torch.nn.attention.varlen import varlen_attn  # here: not every version has it
    return by_flash(x, varlen_attn)


@torch.no_grad()
def attention_main(argv):
    """Prefill behind a cache, then decoding of several numbers of rows."""
    parser = parser_for(AttentionFlags, "Ways of attending to the KV cache, on random numbers.")
    args = AttentionFlags(**vars(parser.parse_args(argv)))
    c, rng, device = architecture(args.model), np.random.default_rng(0), versions()["versions"]
    print(f"{args.model}, bfloat16 on {device['device']}; ms are medians of {args.repeats}")
    cached = np.linspace(0.8 * args.cached, args.cached, 4).astype(int)
    compare(c, 8, cached + args.new, args.new, [5, 0, 7, 2], args.repeats)
    for rows in (64, 96, 104, 128):
        lengths = rng.integers(args.length // 2, args.length * 3 // 2 + 1, rows)
        compare(c, rows, lengths, 1, None, args.repeats)


def compare(c, num_slots, lengths, new, slots, repeats):
    """Prints milliseconds for all layers, and the largest error of the first layer's outputs, which
    are compared with those in float32."""
    device, longest = "cuda" if torch.cuda.is_available() else "cpu", int(lengths.max())
    wide = 256 if longest <= 4096 else 1024  # as Sampler.round_up
    kv_length, heads, size = -(-longest // wide) * wide, c.num_attention_heads, head_size(c)
    query = torch.randn(len(lengths), new, heads, size, device=device).bfloat16().transpose(1, 2)
    cache = torch.randn(c.num_hidden_layers, 2, num_slots, kv_length + 1, c.num_key_value_heads,
                        size, device=device, dtype=torch.bfloat16)
    slots = slots and torch.tensor(slots, device=device)
    x = Attention(query, cache.unbind(), slots, torch.tensor(lengths, device=device), kv_length)
    exact = by_sdpa(x._replace(query=query.float(), layers=[cache[0].float()]))[0]
    print(f"{'decoding' if new == 1 else 'prefill'}: {len(lengths)} rows, {new} new tokens each, "
          f"{lengths.min()} to {longest} in all; {len(cache)} layers", flush=True)
    for attend in (by_sdpa, in_pieces, by_flash, by_varlen_attn):
        if attend is in_pieces and new > 1:  # it is for decoding
            continue
        try:
            error = (attend(x)[0].float() - exact).abs().max().item()
            taken = milliseconds(lambda: attend(x), repeats, capture=new == 1)
            result = f"{taken:9.3f} ms, {taken / len(cache):.4f} a layer, error {error:.5f}"
        except NotImplementedError:
            result = "not on this device"
        except (ImportError, TypeError, RuntimeError) as error:  # PyTorch is too old, for example
            result = f"fails: {' '.join(str(error).split())[:200]}"
        print(f"    {attend.__name__:16}{result}", flush=True)


def milliseconds(function, repeats, capture):
    """The median time of function(), by CUDA events, with `capture` of a CUDA graph of it. On a CPU
    by a clock."""
    if not torch.cuda.is_available():
        seconds = []
        for _ in range(repeats):
            timed(seconds, function)
        return 1e3 * np.median(seconds)
    graph, times = torch.cuda.CUDAGraph(), []
    if capture:
        with torch.cuda.graph(graph):
            function()
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay() if capture else function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return np.median(times[1:])


COMMANDS = {"sampler": sampler_main, "iteration": iteration_main, "attention": attention_main,
            "folder": folder_main}


def main():
    name, *argv = sys.argv[1:] or ["--help"]
    with one_line_errors("bench.py"):
        init_distributed()
        if name in ("-h", "--help"):
            print(__doc__)
        elif name in COMMANDS:
            COMMANDS[name](argv)
        else:
            raise ValueError(f"unknown measurement {name!r}; known: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
