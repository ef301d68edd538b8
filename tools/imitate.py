"""Imitation: before Algorithm 1, a model that cannot speak yet learns from demonstrations.

    python tools/imitate.py --out runs/house                   a start like results/tiny-house
    python tools/imitate.py --env alfworld --model runs/house --steps 800 --out runs/alfworld
    python train.py --env alfworld --model runs/alfworld       goes on from there

Sparse reward repairs a wrong decision quickly and a wrong word slowly. So the model first takes
steps on what a demonstrator says in training games, until nearly all actions that it samples itself
are admissible. `--model random`, the default, is a Qwen2 of about 0.2 M parameters that is made
here. The result is a model's folder. The paper has no such phase; pretrained models need none.
"""
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import random
import re
import signal
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
import eval as evaluation
import train
from envs import AlfWorld
from machine import cli, runs
from machine.ranks import AdamW, say, take_step
from model import actor_critic, is_tiny, load, make_batch, micro_batches, restricted_log_softmax
from rollout import DEMONSTRATIONS, PROBE, rollout
from worlds.seeker import APPLIANCES, LAMP, Seeker, type_of, verb_of

# --------------------------------------------------------------------- a tiny model, made at random

SPOKEN = (  # fixed strings of the house and of ALFWorld
    "go to|open|close|take|move|clean|heat|cool|use|examine|look|inventory|help|from|from the|to|"
    "to the|with|using the|put|two|hot|in|at|under the desklamp|You are in the middle of a room. "
    "Looking quickly around you, you see|You arrive at|The|On the|you see|is closed|is open. In it|"
    "You open the|You close the|You pick up the|You move the|You clean the|You heat the|You cool "
    "the|You turn on the|Nothing happens|You are carrying|You are not carrying anything|nothing|"
    "You are facing the|Next to it|This is|find|drop|done|There's nothing special about|<think>|"
    "</think>|<action>|</action>|-= Welcome to TextWorld, ALFRED! =-").split("|")


def words():
    """-> (phrases, nouns) of the tiny model's word-level vocabulary: the fixed strings of the
    prompts and of the house, and whatever has a name in a house or in ALFWorld."""
    prompts = envs.FIRST, envs.LATER, envs.PAST, envs.FULL_FIRST, envs.FULL_LATER
    fixed = [part.strip(" .,:'[]") for text in prompts for part in re.split(r"\{\w+\}|\n", text)]
    types = envs.OBJECTS + envs.PLACES + list(APPLIANCES.values()) + [type_of(LAMP)]
    types += ("bathtubbasin glassbottle handtowel handtowelholder soapbottle toiletpaper "
              "toiletpaperhanger tvstand wateringcan").split()
    nouns = types + [f"{t} {i}" for t in types for i in (1, 2, 3, 4)]
    return sorted({*fixed, *SPOKEN, envs.ROLE, envs.ANSWER} - {""}), nouns


def tiny_tokenizer():
    """A word-level tokenizer: a fixed phrase ("You arrive at") or a numbered noun ("cabinet 1") is
    one token, and an unknown word is spelled, so that every ASCII string can be encoded. Spaces,
    punctuation and articles separate words and are forgotten, which halves the tokens to read."""
    phrases, nouns = words()
    letters, numbers = [chr(c) for c in range(32, 127)], [str(n) for n in range(100)]
    control = ["<|pad|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|end|>"]
    spelled = letters + [f"##{c}" for c in letters] + [f"## {n}" for n in numbers]
    entries = control + spelled + sorted(nouns) + sorted(phrases) + numbers
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<|unknown|>",
                                           max_input_chars_per_word=10 ** 6))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    left, right = r"(?<![A-Za-z])", r"(?![A-Za-z])"
    whole = [left * p[0].isalpha() + re.escape(p) + right * p[-1].isalpha()
             for p in sorted(phrases, key=len, reverse=True)]
    word = rf"{left}(?!(?:a|an|and|the){right})[A-Za-z]+"
    pattern = "|".join([*whole, r"[A-Za-z]+ \d+", word, r"\d+", r"[^\s\w.,:;'\"\[\]]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(c, special=True) for c in control])
    template = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
                "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template,
                                   eos_token="<|end|>", pad_token="<|pad|>",
                                   unk_token="<|unknown|>", clean_up_tokenization_spaces=False)


def random_tiny(seed=0, dtype=torch.float32):
    """-> ActorCritic of a randomly initialised Qwen2 of about 0.2 M parameters. Its embeddings are
    untied, and the rows of w+ and w- are zero, so that V = Q = 0 at the start."""
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer) + 2, initializer_range=0.1,
        max_position_embeddings=16384, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.lm_head.weight.data[-2:] = 0
    return actor_critic(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


# ---------------------------------------------------------------------------- the demonstrators

class Demonstrated(NamedTuple):
    """One turn of a demonstration."""

    obs: str
    info: dict
    thought: str
    label: str  # the command that the demonstrator advises
    executed: str  # the command that was executed, which is a random one in some turns


def destinations(commands):
    return [c.removeprefix("go to ") for c in commands if c.startswith("go to ")]


class AlfWorldDemonstrator(Seeker, AlfWorld):
    """ALFWorld with the house's demonstrator. It looks through the places in their order and says
    nothing that cannot be told from what has been seen and done. Only where to look first it learns
    from the game's walkthrough, so that a model learns where things usually are."""

    def info(self, state):
        info = super().info(state)
        self.offered = info["admissible"]
        return info

    def reset(self, task):
        obs, info = super().reset(task)
        names = [name.lower() for name in task.split("/")[1].split("-")]
        self.goal, self.verb = [names[1], names[3]], verb_of(self.category)
        self.places = destinations(self.offered)
        self.begin = next(iter(destinations(self.walkthrough)), None)
        return obs, info

    def advice(self, forgetful=False):
        """As in the house, but several places may share a spot. Such a spot offers what lies on any
        of them, and no command that leads to itself."""
        thought, command = super().advice(forgetful)
        obj = self.goal[0]
        if thought == f"find {obj}" and not command.startswith("take "):
            takes = [c for c in sorted(self.offered) if re.match(rf"take {obj} \d+ from ", c)]
            command = next((c for c in takes if not self.stores(c.split(" from ")[1])), command)
        if command.startswith("go to ") and command not in self.offered:
            after = self.places.index(command.removeprefix("go to ")) + 1
            ways = [f"go to {p}" for p in self.places[after:] + self.places]
            command = next(way for way in ways if way in self.offered)
        return thought, command

    @property
    def at(self):
        return (destinations(self.played) or [None])[-1]

    @property
    def holding(self):
        last = next((c for c in reversed(self.played) if c.startswith(("take ", "move "))), "")
        return last.removeprefix("take ").split(" from ")[0] if last.startswith("take ") else None

    def closed(self, place):
        return f"open {place}" in self.offered

    def inside(self, place):
        """What can be taken or used here; `place` is where the player stands."""
        takes = (re.fullmatch(f"take (.+) from {place}", command) for command in self.offered)
        things = sorted(take[1] for take in takes if take)
        return things + [LAMP] if f"use {LAMP}" in self.offered else things

    def treated(self, thing):
        """Heating undoes cooling and the other way round, so that the last of the two counts."""
        undoes = {"heat": "cool", "cool": "heat"}.get(self.verb)
        done = [c.split(" ")[0] for c in self.played if f" {thing} with " in c]
        return [verb for verb in done if verb in (self.verb, undoes)][-1:] == [self.verb]

    def placed(self, any_state):
        """How many of the goal's objects lie where they should be. Their state is not looked at,
        because the game itself notices when it is won."""
        lies, (obj, dest) = {}, self.goal
        for command in self.played:
            if move := re.fullmatch(r"(take|move) (.+) (?:from|to) (.+)", command):
                lies[move[2]] = move[3] if move[1] == "move" else ""
        return sum(type_of(t) == obj and type_of(p) == dest for t, p in lies.items())


def demonstrate(env, task, seed, forget=0.0, noise=0.0):
    """Plays an episode by env.advice -> its turns. `forget` is the share of episodes played by the
    forgetful demonstrator, which end soon after its failure. `noise` is the share of turns in which
    a random command is executed in place of the label, so that a model sees mistakes and the way
    out of them. In the shop nothing is random, because a random click may buy."""
    rng = random.Random(f"demonstration {seed} {task}")
    forgetful, turns = rng.random() < forget, []
    obs, info = env.reset(task)
    while advice := env.advice(forgetful):
        thought, label = advice
        idle = forgetful and [turn.thought for turn in turns[-2:]] == ["done", "done"]
        slips = isinstance(env, Seeker) and rng.random() < noise
        executed = rng.choice(info["admissible"]) if slips else label
        turns.append(Demonstrated(obs, info, thought, label, executed))
        obs, _, terminated, truncated, info = env.step(executed)
        if terminated or truncated or idle:
            break
    return turns


@functools.cache
def demonstrator(name, **options):
    """An environment with `advice`, made once in each process."""
    kind = AlfWorldDemonstrator if name == "alfworld" else envs.known(name)
    return kind(**options)


def demonstrate_here(config, flags, seed, task):
    try:
        env = demonstrator(config.env, **envs.options_for(vars(config)))
        return demonstrate(env, task, seed, flags.forget, flags.noise)
    except Exception as error:  # of another class, because not every exception can be pickled
        raise envs.GameError(f"{config.env}: game {task} failed: {error!r}") from None


# --------------------------------------------------------------------------- learning from them

def samples_of(lm, turns, context, config):
    """A demonstration -> training samples [(ids, spans)]. In `window` every turn is a sample whose
    response holds the label. In `full` the responses hold what was executed, because the
    conversation goes on from there, and only those that follow the label are trained on."""
    episode, samples = envs.known(config.env).episode(*turns[0][:2]), []
    end = lm.chat.prompt("-", [None])[0]  # the token that ends a turn
    for n, turn in enumerate(turns):
        if n > 0:
            episode.took(turns[n - 1].executed, turn.obs, turn.info)
        if n == 0 or context == "window":
            samples.append(([], []))
        ids, spans = samples[-1]
        ids += lm.chat.prompt(next(iter(episode.prompts(context, config.history))), ids)
        start = len(ids)
        action = turn.label if context == "window" else turn.executed
        text = f"<think> {turn.thought} </think> <action> {action} </action>"
        ids += lm.tokenizer(text, add_special_tokens=False).input_ids + [end]
        if action == turn.label:
            spans.append((start, len(ids)))
    return [(ids, spans) for ids, spans in samples if spans]


def imitation_loss(lm, batch, text_weight):
    """The summed cross-entropy of the responses, and text_weight times that of all other text: a
    model that has no language learns its commands sooner if it learns to predict what it reads."""
    hidden = lm.body(batch.ids)
    text = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.length[:, None]
    weight = text_weight * text  # (B, T)
    weight[batch.token_row, batch.token_col] = 1.0
    b, t = weight[:, 1:].nonzero(as_tuple=True)
    logp = restricted_log_softmax(lm.head(hidden[b, t]), lm.value_index)
    return -(weight[b, t + 1] * logp.gather(1, batch.ids[b, t + 1][:, None])[:, 0]).sum()


def batches(lm, games, contexts, config, flags, mapper=map):
    """Yields for each step samples with flags.batch turns or a few more, of the contexts in turn.
    They come from a stock that is filled up and shuffled, so that neighbours are of different
    games. `mapper` may spread the demonstrations over processes."""
    stocks = {context: [] for context in contexts}
    for step in range(flags.steps):
        context = contexts[step % len(contexts)]
        stock = stocks[context]
        while sum(len(spans) for _, spans in stock) < 4 * flags.batch:
            had = len(stock)
            rng = np.random.default_rng([config.seed, step, had, DEMONSTRATIONS])
            some = [games[i] for i in rng.choice(len(games), 32)]
            play = functools.partial(demonstrate_here, config, flags, (config.seed, step))
            for turns in filter(None, mapper(play, some)):
                stock += samples_of(lm, turns, context, config)
            if len(stock) == had:
                raise ValueError("the demonstrator knows no way to win any of the games drawn")
            rng.shuffle(stock)
        batch = []
        while sum(len(spans) for _, spans in batch) < flags.batch:
            batch.append(stock.pop())
        yield batch


def imitate(lm, pool, config, flags, mapper=map):
    """Steps on demonstrations, until nearly all actions that the model samples in games it has not
    seen are admissible, or flags.steps are done."""
    optimizer = AdamW(lm.model.parameters(), flags.lr, moments=getattr(torch, config.moments))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, flags.lr, max(100, flags.steps), pct_start=0.05, cycle_momentum=False)
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    probe = evaluation.spaced(ids, 64)  # ids are sorted by kind of task, so that all kinds occur
    practice = sorted({*ids} - {*probe}) or ids
    contexts = (config.context,) if config.model != "random" else ("window", "full")  # for either
    samplers = [evaluation.sampler_for(lm, dataclasses.replace(config, context=context))
                for context in contexts]
    bar = tqdm(batches(lm, practice, contexts, config, flags, mapper), "imitation", flags.steps)
    for step, batch in enumerate(bar):
        tokens = sum(end - start for _, spans in batch for start, end in spans)
        micros = [make_batch(group).to(lm.device)
                  for group in micro_batches(batch, config.tokens_per_micro_batch)]
        take_step(lm.model, optimizer, micros, lambda micro: (
            imitation_loss(lm, micro, flags.text_weight) / tokens, {}), config.checkpointing)
        schedule.step()
        if (step + 1) % 200 == 0:
            shares = [admissible_share(each, probe, pool, step, config) for each in samplers]
            bar.set_postfix_str("admissible " + ", ".join(f"{share:.1%}" for share in shares))
            if min(shares) >= flags.until:
                break


def admissible_share(sampler, games, pool, step, config):
    """The share of admissible actions among those that the model samples in `games`."""
    turns = rollout(sampler, games, pool, seed=(config.seed, step, PROBE), rows=config.rows,
                    history=config.history)
    return float(np.mean([turn.admissible for turn in turns]))


# ------------------------------------------------------------------------------------- settings

@dataclasses.dataclass
class Flags:
    """What an imitation has beside flags of train.py. A comment is its flag's --help."""

    steps: int = 5000  # optimizer steps, at most
    lr: float = 1e-5  # the highest learning rate
    batch: int = 64  # turns a step
    text_weight: float = 0.0  # weight of predicting what is read, beside what is said
    until: float = 0.98  # share of admissible actions, looked at every 200 steps, that ends it
    forget: float = 0.0  # share of demonstrations by the forgetful demonstrator
    noise: float = 0.2  # share of turns in which a random command is executed


TINY = {"lr": 4e-3, "text_weight": 0.1, "forget": 0.8}  # the defaults of tiny models


def parse(argv=None):
    """-> train.py's Config, and Flags. ValueError says what is wrong."""
    parser = cli.flags_of(Flags, {"tiny": TINY}, "Imitation, before Algorithm 1. It takes flags of "
                          "train.py too: those of the environment, the model and the memory.")
    flags, rest = parser.parse_known_args(argv)
    config = train.parse_config(["--model", "random", *rest])
    if os.path.exists(config.out):  # before any work, because writing replaces what is there
        raise ValueError(f"--out {config.out} exists already; name a new folder")
    return config, Flags(**(TINY if is_tiny(config.model) else {}) | vars(flags))


def main():
    with cli.one_line_errors("imitate.py", envs.GameError, BrokenExecutor):
        config, flags = parse()
        say(f"{config.model} imitates {config.env}'s demonstrator for {flags.steps} steps or less")
        dtype = getattr(torch, config.dtype)
        lm = random_tiny(config.seed, dtype) if config.model == "random" else load(
            config.model, env=config.env, dtype=dtype, value_tokens=config.value_tokens)
        lm = train.fitted(lm, config)
        workers = envs.default_workers(config.env)
        pool = envs.Pool(config.env, envs.options_for(vars(config)), workers)
        # they are forked from a server without threads, and leave Ctrl-C to this process
        players = ProcessPoolExecutor(max(1, workers), multiprocessing.get_context("forkserver"),
                                      signal.signal, (signal.SIGINT, signal.SIG_IGN))
        with contextlib.closing(pool), players:
            imitate(lm, pool, config, flags, players.map if workers else map)
        runs.write_folder(config.out, lm.save)
        say(f"wrote {config.out}; next: python train.py --env {config.env} --model {config.out}")


if __name__ == "__main__":
    main()
