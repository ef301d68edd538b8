"""Imitation learning: a model that does not know an environment's commands learns them first.

    python tools/imitate.py --out runs/house                   a model like results/tiny-house
    python tools/imitate.py --env alfworld --model runs/house --steps 800 --out runs/alfworld
    python train.py --env alfworld --model runs/alfworld       then Algorithm 1

Sparse rewards correct a wrong decision quickly, but not a command that does not exist. So the model
is first trained on demonstrations in training games, until nearly all actions that it samples are
admissible. `--model random`, the default, is a small model that is made here, in the house one of
0.2 M parameters.
The paper has no such phase, and larger pretrained models do not need it.

Your own environment needs a demonstrator, advice(forgetful) -> (thought, command) or None. The
forgetful one may leave out what training should discover. environments/frozen_lake.py is an
example, and environments/sql_agent.py one whose actions are calls of tools.
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
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        trainers)
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
import eval as evaluation
import train
from environments.alfworld import AlfWorld
from environments.house import ALWAYS, HOUSEHOLD, OBJECTS, OTHERS, PLACES, House
from environments.household_expert import APPLIANCES, LAMP, HouseholdExpert, type_of, verb_of
from environments.webshop import SEP
from hf.chat import Chat
from hf.loading import sapo_json_of
from model import (actor_critic, float32_logits, load, make_batch, micro_batches,
                   restricted_log_softmax)
from rollout import DEMONSTRATIONS, PROBE, rollout
from runtime.answers import as_info, as_observation, obs_text, parts_of
from runtime.checkpoint import RunDir, read_tensors, write_folder
from runtime.cli import (LARGE, check_ranges, choose_threads, one_line_errors, parser_for,
                         progress)
from runtime.distributed import init_distributed, mean_or_zero, print0, stop, world_size
from runtime.optim import AdamW
from runtime.workers import in_words
from training.run import settings_of_games, with_speed_and_memory_settings
from training.settings import expanded

# --------------------------------------------------------------- the tiny model and its tokenizer

PHRASES = (  # fixed strings of the house and of ALFWorld
    "go to|open|close|take|move|clean|heat|cool|use|examine|look|inventory|help|from|from the|to|"
    "to the|with|using the|put|two|hot|in|at|under the desklamp|You are in the middle of a room. "
    "Looking quickly around you, you see|You arrive at|The|On the|you see|is closed|is open. In it|"
    "You open the|You close the|You pick up the|You move the|You clean the|You heat the|You cool "
    "the|You turn on the|Nothing happens|You are carrying|You are not carrying anything|nothing|"
    "You are facing the|Next to it|This is|find|drop|done|There's nothing special about|<think>|"
    "</think>|<action>|</action>|-= Welcome to TextWorld, ALFRED! =-").split("|")


TEMPLATE = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def prompt_phrases():
    """What prompts consist of, beside what is filled in."""
    prompts = (envs.FIRST, envs.LATER, envs.PAST, envs.COMMANDS, envs.SAME_WAY, ALWAYS, OTHERS)
    return [part for text in prompts for part in re.split(r"\{\w+\}", text)]


def tiny_tokenizer():
    """The word-level tokenizer of the house and ALFWorld. A fixed phrase ("You arrive at") or a
    numbered noun ("cabinet 1") is one token; unknown words are spelled, so that every ASCII string
    can be encoded. Spaces, punctuation and articles are dropped, which halves the number of
    tokens."""
    types = OBJECTS + PLACES + list(APPLIANCES.values()) + [type_of(LAMP)]
    types += ("bathtubbasin glassbottle handtowel handtowelholder soapbottle toiletpaper "
              "toiletpaperhanger tvstand wateringcan").split()
    nouns = types + [f"{t} {i}" for t in types for i in (1, 2, 3, 4)]
    fixed = [part.strip(" .,:'[]") for text in prompt_phrases() for part in text.split("\n")]
    phrases = sorted({*fixed, *PHRASES, HOUSEHOLD, envs.ANSWER} - {""})
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="<|end|>",
        pad_token="<|pad|>", unk_token="<|unknown|>", clean_up_tokenization_spaces=False)


def bpe_tokenizer(texts=(), phrases=(), size=4000):
    """A byte-level BPE tokenizer of these texts: what it encodes, it decodes as it was. A word is
    encoded alike wherever it is, and so is a digit, so that a model can copy them; and a blank
    between two words costs no token. Each of the `phrases` is one token, unless it is a part of
    longer words. `size` limits the vocabulary without the phrases.

    In the vocabulary every piece of a text (a word, a digit, other characters in a row) begins with
    a blank. Decoding deletes it, except between two letters, where it is the blank of the text. So
    a blank between letters is not encoded at all (`implied`), unless a phrase follows; every other
    blank is a character of its own (`written`). These two are private characters of Unicode; in a
    text they would become blanks."""
    implied, written, letter = "\ue000", "\ue001", "[A-Za-z_]"
    phrases = {re.sub(f"^ +(?={letter})|(?<={letter}) +$", "", phrase) for phrase in phrases}
    control = [f"<|{name}|>" for name in ("pad", "system", "user", "assistant", "tool", "end")]
    tags = [f"<{end}{name}>" for name in ("think", "action", "tool_call") for end in ("", "/")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(f"(?<={letter}) (?={letter})"), implied),
        normalizers.Replace(" ", written)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(f"{implied}(?={letter})"), "removed"),
        pre_tokenizers.Split(Regex(r"[A-Za-z_][A-Za-z0-9_]*|\p{N}|[^A-Za-z_\p{N}]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])
    tokenizer.decoder = decoders.Sequence([
        decoders.ByteLevel(), decoders.Replace(Regex(f"(?<!{letter}) | (?!{letter})"), ""),
        decoders.Replace(implied, " "), decoders.Replace(written, " ")])
    whole = "|".join(map(re.escape, [*control, *tags, *sorted(phrases, key=len, reverse=True)]))
    parts = [part for text in texts for part in re.split(whole, text)]
    # a character that stands alone is one token, also one that the texts do not have
    parts += 2 * [implied, written, *map(chr, range(33, 127))]
    tokenizer.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, show_progress=False, special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([
        AddedToken(tokenizer.normalizer.normalize_str(text), normalized=True,
                   single_word=bool(re.search(f"{letter}$", text)))
        for text in (*tags, *sorted(phrases))])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="<|end|>",
        pad_token="<|pad|>", clean_up_tokenization_spaces=False)


def makes_tokenizer(env) -> bool:
    """Whether a model for this environment gets a tokenizer that is made from its games."""
    return env not in ("house", "alfworld")


def tokenizer_for(config, flags):
    """The tokenizer of another environment, made from demonstrations in training games. What is the
    same in all of them is one token: a line of the beginning, such as an instruction or what a tool
    does, a command that every game has, and what prompts and responses consist of beside what is
    filled in."""
    env, chat = envs.env_class(config.env), Chat(bpe_tokenizer())
    games, same, responses, phrases = [], [], [], {*prompt_phrases(), env.role, f"'{SEP}'"}
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    for task in evaluation.evenly_spaced(ids, max(1, 256 * flags.vocabulary // 4000)):
        if turns := demonstrate_here(config, flags, (config.seed, 0), task):
            samples = samples_of(chat, turns, config.context, config)
            games += [chat.tokenizer.decode(ids) for ids, _ in samples]
            (ids, spans), *_ = samples
            beginning = chat.tokenizer.decode(ids[:spans[0][0]])
            commands = (turn.info["admissible"] or () for turn in turns)
            same.append({*re.split(r"\n|<\|\w+\|>", beginning)}.union(*commands))
            # what is around thought and action, if they can be told apart from it
            response = env.format_response(turns[0].thought, turns[0].label)
            filled_in = turns[0].thought, envs.action_text(turns[0].label)
            if all(response.count(part) == 1 for part in filled_in):
                responses.append({*re.split("|".join(map(re.escape, filled_in)), response)})
    for sets in same, responses:
        phrases |= set.intersection(*sets or [set()])
    several_words = re.compile(r"\w.*\s|\s.*\w", re.S)
    return bpe_tokenizer(games, [text for text in phrases if several_words.search(text)],
                         flags.vocabulary)


def random_tiny(seed=0, dtype=torch.float32, tokenizer=None, width=64, copies=False,
                **readouts):
    """A randomly initialized model, by default of about 0.2 M parameters; a wider one, or one with
    more tokens, has more. Without `copies` its embeddings are untied. The architecture is Qwen2's,
    but under the name SeedOss, because transformers would replace the tokenizer of a Qwen2 model.
    `readouts`: r_max, tau_v or value_tokens, as for model.actor_critic.

    With `copies`, for learn_to_copy, the embeddings are tied, so that the model can also say a
    token that it never had to say before, and the heads of its first layer begin by looking one and
    two tokens back. To find the same token again far away, heads have width // 2 dimensions instead
    of width // 4, and the rotary embedding has a base of 1e8 instead of 1e4, with which three
    eighths of the dimensions turn by more than a radian within 1,000 tokens, not three quarters.
    (Tried with a width of 128.)"""
    tokenizer = tokenizer or tiny_tokenizer()
    config = transformers.SeedOssConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // (2 if copies else 4),
        rope_parameters={"rope_type": "default", "rope_theta": 1e8 if copies else 1e4},
        vocab_size=len(tokenizer) + 2, initializer_range=0.1, attention_bias=True,
        attention_out_bias=False, attention_dropout=0.0, residual_dropout=0.0,
        max_position_embeddings=16384, tie_word_embeddings=copies, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if copies:
        look_back(model.model.layers[0].self_attn)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return actor_critic(model.to(device), tokenizer, **readouts)


@torch.no_grad()
def look_back(attention):
    """Initializes the heads so that 0 and 1, which share a key, attend to the previous token,
    whatever it is, and 2 and 3 to the one before that. In the pairs of dimensions that the rotary
    embedding turns fastest, queries and keys are a bias, and the key's is turned so that the two
    are aligned at that distance; in the others the queries begin at 0 and learn. To copy, a model
    looks for a place behind the tokens that are the last ones now, so it needs such heads, and
    gradients find them late. They need 32 dimensions: with fewer, neighbouring places are too much
    alike for the base of 1e8."""
    size, pairs = attention.head_dim, 6
    angle = attention.config.rope_parameters["rope_theta"] ** (-2 * torch.arange(pairs) / size)
    attention.q_proj.weight.zero_()
    attention.q_proj.bias.zero_()
    attention.q_proj.bias.view(4, 2, -1)[:, 0, :pairs] = 7
    attention.k_proj.weight.view(2, 2, size // 2, -1)[:, :, :pairs] = 0
    for key, back in zip(attention.k_proj.bias.view(2, 2, -1), (1, 2)):
        key[:, :pairs] = 7 * torch.stack([(back * angle).cos(), (back * angle).sin()])


# -------------------------------------------------------------------------- learning to copy

LONGEST = 512  # random tokens in a row, and as many that are repeated


def copying(rng, vocabulary, length):
    """Rows that begin with `length` random tokens and repeat parts of these for as long again ->
    samples [(ids, spans of what is repeated, without the first token, which nobody can know)]. In
    long rows, a third of the random tokens are one of four, so that it takes more than one token to
    find a place again."""
    samples = []
    for _ in range(LONGEST // length):
        few, any_token = rng.integers(vocabulary, size=4), rng.integers(vocabulary, size=length)
        is_few = rng.random(length) < (1 / 3 if length >= 64 else 0)
        ids, spans = np.where(is_few, rng.choice(few, length), any_token).tolist(), []
        while len(ids) < 2 * length:
            size = int(rng.integers(4, min(17, length)))
            start = int(rng.integers(len(ids) - size))
            spans.append((len(ids) + 1, len(ids) + size))
            ids += ids[start:start + size]
        samples.append((ids, spans))
    return samples


def learn_to_copy(lm, steps, lr, seed):
    """Trains on random tokens before anything else, so that the model can repeat words of a prompt.
    Rows begin with 8 random tokens, and with twice as many whenever the loss is below 1."""
    optimizer, rng, length = AdamW(lm.model.parameters(), lr), np.random.default_rng(seed), 8
    with progress("learning to copy", steps, "steps") as bar:
        for step in range(steps):
            samples, trained = copying(rng, len(lm.chat.tokenizer), length), length
            info = train_step(lm.model, optimizer, [make_batch(samples).to(lm.device)],
                              loss_over(lm, samples), lr * min(1.0, (step + 1) / 50))
            if info["loss"] < 1 and length < LONGEST:
                length *= 2
            bar.update()
    print0(f"after {steps} steps of copying, a repeated token has a loss of {info['loss']:.2f} in "
           f"rows of {trained} random tokens and as many repeated ones")


# ---------------------------------------------------------------------------- the demonstrators

class Demonstrated(NamedTuple):
    """One turn of a demonstration."""

    obs: str | list  # a text, or chat messages
    info: dict
    thought: str
    label: object  # the command or call that the demonstrator advises
    executed: object  # the one that was executed: the label, or in some turns a random command


def destinations(commands):
    return [c.removeprefix("go to ") for c in commands if c.startswith("go to ")]


class AlfWorldDemonstrator(HouseholdExpert, AlfWorld):
    """ALFWorld with the expert of the house, which searches the places in order and uses only what
    the agent has seen. Only the first place comes from the game's walkthrough, so that a model
    learns where things usually are."""

    def reset(self, task):
        obs, info = super().reset(task)
        names = [name.lower() for name in task.split("/")[1].split("-")]
        self.goal, self.verb = [names[1], names[3]], verb_of(self.category)
        self.places = destinations(self.admissible)
        self.begin = next(iter(destinations(self.walkthrough)), None)
        return obs, info

    def advice(self, forgetful=False):
        """As in the house, but several places can share a location, which then has the objects of
        all of them, and no command that leads to itself."""
        thought, command = super().advice(forgetful)
        obj = self.goal[0]
        if thought == f"find {obj}" and not command.startswith("take "):
            takes = [c for c in sorted(self.admissible) if re.match(rf"take {obj} \d+ from ", c)]
            command = next((c for c in takes if not self.stores(c.split(" from ")[1])), command)
        if command.startswith("go to ") and command not in self.admissible:
            after = self.places.index(command.removeprefix("go to ")) + 1
            ways = [f"go to {p}" for p in self.places[after:] + self.places]
            command = next(way for way in ways if way in self.admissible)
        return thought, command

    @property
    def at(self):
        return (destinations(self.played) or [None])[-1]

    @property
    def holding(self):
        last = next((c for c in reversed(self.played) if c.startswith(("take ", "move "))), "")
        return last.removeprefix("take ").split(" from ")[0] if last.startswith("take ") else None

    def closed(self, place):
        return f"open {place}" in self.admissible

    def inside(self, place):
        """What can be taken or used at `place`, where the agent is."""
        takes = (re.fullmatch(f"take (.+) from {place}", command) for command in self.admissible)
        things = sorted(take[1] for take in takes if take)
        return things + [LAMP] if f"use {LAMP}" in self.admissible else things

    def treated(self, thing):
        """Heating undoes cooling and vice versa, so the last of them counts."""
        undoes = {"heat": "cool", "cool": "heat"}.get(self.verb)
        done = [c.split(" ")[0] for c in self.played if f" {thing} with " in c]
        return [verb for verb in done if verb in (self.verb, undoes)][-1:] == [self.verb]

    def placed(self, any_state):
        """How many of the goal's objects are at their destination, in whatever state: the game
        itself notices when it is won."""
        place_of, (obj, dest) = {}, self.goal
        for command in self.played:
            if move := re.fullmatch(r"(take|move) (.+) (?:from|to) (.+)", command):
                place_of[move[2]] = move[3] if move[1] == "move" else ""
        return sum(type_of(t) == obj and type_of(p) == dest for t, p in place_of.items())


def demonstrate(env, task, seed, forget=0.0, noise=0.0):
    """Plays an episode by env.advice -> its turns. `forget` is the fraction of episodes with the
    forgetful demonstrator; they end when its thought was "done" twice. In the house and ALFWorld,
    `noise` is the fraction of turns in which a random command is executed instead of the label, so
    that a model sees how to recover. (In other environments it might end the episode.)"""
    rng = random.Random(f"demonstration {seed} {task}")
    forgetful, turns = rng.random() < forget, []
    obs, info = parts_of(env.reset(task), "reset()", "obs, info")
    obs = as_observation(obs, env, begins=True)
    info = first = as_info(info, env, task=obs_text(obs), category=None, won=False)
    while advice := env.advice(forgetful):
        thought, label = parts_of(advice, "advice()", "thought, action")
        response = env.format_response(thought, label)
        if not env.prompt_builder(obs, info).accepts(*env.parse_action(response)):
            raise ValueError(f"the demonstrator of {type(env).__name__} gives {label!r} in task "
                             f"{task!r}, which the game cannot use now: written as {response!r}, "
                             f"it is read as {env.parse_action(response)}")
        idle = forgetful and [turn.thought for turn in turns[-2:]] == ["done", "done"]
        random_turn = isinstance(env, (House, AlfWorld)) and rng.random() < noise
        executed = rng.choice(info["admissible"]) if random_turn else label
        turns.append(Demonstrated(obs, info, thought, label, executed))
        obs, _, terminated, truncated, new = parts_of(
            env.step(executed), "step()", "obs, reward, terminated, truncated, info")
        obs = as_observation(obs, env, begins=False)
        info = as_info(new, env, first["task"], first["category"], won=False)
        if terminated or truncated or idle or len(turns) == env.horizon:
            break
    return turns


def demonstrator_of(name):
    """The environment's class, with `advice`."""
    return AlfWorldDemonstrator if name == "alfworld" else envs.env_class(name)


@functools.cache
def demonstrator(name, **options):
    """An environment, made once per process."""
    return envs.make_env(demonstrator_of(name), **options)


def demonstrate_here(config, flags, seed, task):
    try:
        env = demonstrator(config.env, **envs.options_for(vars(config)))
        return demonstrate(env, task, seed, flags.forget, flags.noise)
    except Exception as error:  # not every exception can be pickled
        raise envs.GameError(f"{config.env}: game {task} failed: {in_words(error)}") from None


# ---------------------------------------------------------------- learning from demonstrations

def samples_of(chat, turns, context, config):
    """A demonstration -> training samples [(ids, spans of responses)]. In "window", every turn is a
    sample with the label as response. In "full", the responses are what was executed, because the
    conversation continues from there, and only those equal to the label are trained on."""
    env, samples = envs.env_class(config.env), []
    builder, end = env.prompt_builder(*turns[0][:2]), chat.end_of_turn_id()
    for n, turn in enumerate(turns):
        if n > 0:
            builder.record(turns[n - 1].executed, turn.obs, turn.info)
        if n == 0 or context == "window":
            samples.append(([], []))
        ids, spans = samples[-1]
        messages = next(builder.messages(context, config.history))
        ids += chat.encode_messages(messages, ids, env.tool_schemas())
        start = len(ids)
        action = turn.label if context == "window" else turn.executed
        text = env.format_response(turn.thought, action)
        # what the template writes itself is not repeated
        if "</think>" in chat.response_prefix:
            text = text.partition("</think>")[2].lstrip()
        elif "<think>" in chat.response_prefix:
            text = text.removeprefix("<think>")
        ids += chat.encode(text) + [end]
        if action == turn.label:
            spans.append((start, len(ids)))
    return [(ids, spans) for ids, spans in samples if spans]


def own_tokens(lm, samples) -> set:
    """The ids that `rename` must keep, because every task has them or because no prompt shows them:
    added tokens, such as fixed phrases; stop tokens, w+ and w-; those that a response has before
    its text has them ("choose"), in more than 1 % of the samples; and, except digits, those in more
    than 90 % of the samples ("click", "price")."""
    tokenizer, had, unread = lm.chat.tokenizer, Counter(), Counter()
    for ids, spans in samples:
        had.update({*ids})
        unread.update(set().union(*({*ids[start:end]} - {*ids[:start]} for start, end in spans)))
    often = [token for token, count in had.items() if count > 0.9 * len(samples)]
    return ({*tokenizer.added_tokens_encoder.values(), *lm.stop_ids, *lm.value_ids}
            | {token for token, count in unread.items() if count > 0.01 * len(samples)}
            | {token for token in often if not tokenizer.decode([token]).strip().isdigit()})


def rename(ids, others, rng) -> list:
    """Replaces those ids that are among the array `others` by random ones of these: equal ids by
    the same one, different ids by different ones. A copy of a part of the prompt stays a copy, but
    words that were learned by heart, or their order, are of no use any more."""
    found = np.intersect1d(ids, others).tolist()
    names = dict(zip(found, rng.choice(others, len(found), replace=False).tolist()))
    return [names.get(token, token) for token in ids]


def imitation_loss(lm, batch, text_weight):
    """The summed cross-entropy of the responses, plus text_weight times that of all other text: a
    model without language learns commands sooner if it also predicts what it reads."""
    hidden = lm.hidden_states(batch.ids)
    text = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.length[:, None]
    weight = text_weight * text  # (B, T)
    weight[batch.token_row, batch.token_col] = 1.0
    b, t = weight[:, 1:].nonzero(as_tuple=True)
    logp = restricted_log_softmax(float32_logits(hidden[b, t], lm.head), lm.value_index)
    return -(weight[b, t + 1] * logp.gather(1, batch.ids[b, t + 1][:, None])[:, 0]).sum()


def loss_over(lm, samples, text_weight=0.0):
    """The loss of train_step for micro-batches of these samples: imitation_loss per token of all
    their spans."""
    tokens = sum(end - start for _, spans in samples for start, end in spans)
    return lambda micro: (imitation_loss(lm, micro, text_weight) / tokens, {})


def batches(lm, games, contexts, config, flags, mapper=map, first=0):
    """Yields the samples of each step from `first` on: flags.batch turns or a few more, of the
    contexts in turn, from a buffer of shuffled demonstrations, which flags.rename renames. `mapper`
    can distribute the demonstrations over processes."""
    buffers = {context: [] for context in contexts}

    def demonstrations(some, context, seed):
        play = functools.partial(demonstrate_here, config, flags, (config.seed, seed))
        for turns in filter(None, mapper(play, some)):
            yield from samples_of(lm.chat, turns, context, config)

    if flags.rename:
        few = evaluation.evenly_spaced(games, 256)
        own = own_tokens(lm, [*demonstrations(few, contexts[0], 0)])
        others = np.array(sorted({*lm.chat.tokenizer.get_vocab().values()} - own))
    for step in range(first, flags.steps):
        context = contexts[step % len(contexts)]
        buffer = buffers[context]
        while sum(len(spans) for _, spans in buffer) < 4 * flags.batch:
            had = len(buffer)
            rng = np.random.default_rng([config.seed, step, had, DEMONSTRATIONS])
            some = [games[i] for i in rng.choice(len(games), 32)]
            for ids, spans in demonstrations(some, context, step):
                buffer.append((rename(ids, others, rng) if flags.rename else ids, spans))
            if len(buffer) == had:
                raise ValueError("the demonstrator knows no way to win any of the games drawn")
            rng.shuffle(buffer)
        if step == 0:
            longest = max(end - start for _, spans in buffer for start, end in spans)
            if longest > config.max_new_tokens:
                tqdm.write(f"Warning: the demonstrator's responses have up to {longest} tokens, "
                           f"and --max_new_tokens {config.max_new_tokens} cuts what the model "
                           "says: raise it, here and in train.py")
        batch = []
        while sum(len(spans) for _, spans in batch) < flags.batch:
            batch.append(buffer.pop())
        yield batch


def train_step(model, optimizer, micros, loss_of, lr, gradient_checkpointing=False):
    """Returns what train.optimizer_step returns, among it the loss."""
    infos = train.accumulate_gradients(model, optimizer, micros, gradient_checkpointing, loss_of)
    optimizer.param_groups[0]["lr"] = lr
    groups = [group["params"] for group in optimizer.param_groups]
    info = train.optimizer_step(optimizer, groups, infos)
    optimizer.zero_grad()  # see train.Learner.free_gradients
    return info


def imitate(lm, pool, config, flags, mapper=map):
    """Trains on demonstrations until flags.steps, or until the model reaches flags.until or
    flags.until_success in training games that are kept back for that: 64 of them, or half if there
    are fewer than 128. Saves its state in config.out now and then, for flags.resume.
    KeyboardInterrupt: a signal came, and the state is saved."""
    state_dtype = getattr(torch, config.optim_state_dtype)
    trained, _ = lm.parameters()  # not the rows of w+ and w-, which imitation says nothing about
    optimizer = AdamW(trained, flags.lr, state_dtype=state_dtype)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, flags.lr, max(100, flags.steps), pct_start=0.05, cycle_momentum=False)
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    # evenly spaced, so that all categories of tasks are among them
    probe = evaluation.evenly_spaced(ids, min(64, max(1, len(ids) // 2)))
    kept_back = {*probe}
    practice = [task for task in ids if task not in kept_back] or ids  # a single game is both
    both = config.model == "random" and config.env == "house"
    contexts = ("window", "full") if both else (config.context,)
    samplers = [evaluation.sampler_for(lm, dataclasses.replace(config, context=context))
                for context in contexts]
    first, saved = 0, time.time()
    if flags.resume:
        state = read_tensors(f"{config.out}/imitation.pt")
        first = state["step"]
        optimizer.load_shard(state["states"])
        schedule.load_state_dict(state["schedule"])
        optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
    with progress("imitation", flags.steps, "steps", first) as bar:
        samples = batches(lm, practice, contexts, config, flags, mapper, first)
        for step, batch in enumerate(samples, first):
            micros = [make_batch(group).to(lm.device)
                      for group in micro_batches(batch, config.tokens_per_micro_batch)]
            train_step(lm.model, optimizer, micros, loss_over(lm, batch, flags.text_weight),
                       schedule.get_last_lr()[0], config.gradient_checkpointing)
            schedule.step()
            bar.update()
            if (step + 1) % 200 == 0:
                results = [measure(sampler, probe, pool, step, config) for sampler in samplers]
                admissible, won = map(min, zip(*results))
                goal = flags.until_success
                if admissible >= flags.until if goal is None else won >= goal:
                    break
            if stop.requested() or time.time() > saved + SAVE_AFTER:
                saved = time.time()
                save(lm, config.out, {"step": step + 1, "schedule": schedule.state_dict(),
                                      "states": optimizer.state_dict()["state"]})
            if stop.requested():
                print0(f"saved {step + 1} steps; continue with the same command and --resume")
                raise KeyboardInterrupt


def save(lm, folder, state=None):
    """Replaces the model's folder. While imitation goes on, it has the state that --resume needs,
    and stays locked (RunDir.lock)."""
    def fill(new):
        lm.save(new)
        if state:
            torch.save(state, f"{new}/imitation.pt")
            with contextlib.suppress(OSError):  # where there are no hard links, it ends here
                os.link(f"{folder}/.lock", f"{new}/.lock")

    write_folder(folder, fill)


def measure(sampler, games, pool, step, config):
    """Plays these games -> (fraction of admissible actions, fraction of games won). Prints both."""
    turns = rollout(sampler, games, pool, seed=(config.seed, step, PROBE),
                    max_num_seqs=config.max_num_seqs, history=config.history)
    admissible = mean_or_zero([turn.admissible for turn in turns])
    # (a game whose first prompt does not fit has no turns)
    won = sum(turn.won for turn in turns if turn.done) / len(games)
    tqdm.write(f"after {step + 1} steps, {sampler.context}: {admissible:.1%} of the actions are "
               f"admissible, {won:.1%} of {len(games)} games kept back are won")
    if mean_or_zero([not sampler.lm.stopped(turn.action_ids) for turn in turns]) > 0.2:
        tqdm.write(f"Warning: --max_new_tokens {sampler.max_new_tokens} truncates more than a "
                   "fifth of the responses: raise it, here and in train.py, or shorten the "
                   "demonstrator's thoughts")
    return admissible, won


# ------------------------------------------------------------------------------------- settings

@dataclasses.dataclass
class Flags:
    """The flags beside those of train.py. A comment is the flag's --help."""

    steps: int = 5000  # maximum number of optimizer steps
    lr: float = 1e-5  # peak learning rate
    batch: int = 64  # turns per step
    text_weight: float = 0.0  # weight of the cross-entropy of prompts, relative to responses
    until: float = 0.98  # stop at this fraction of admissible actions, measured every 200 steps
    until_success: float = None  # stop at this success rate instead
    resume: bool = False  # continue the imitation in --out; give the same flags as before. New
                          # demonstrations are drawn, so that the weights are not those of an
                          # imitation without a break
    forget: float = 0.0  # fraction of episodes with the forgetful demonstrator
    noise: float = 0.2  # house, alfworld: fraction of turns with a random command
    width: int = 64  # the size of the hidden states of a model that is made here
    vocabulary: int = 4000  # largest size of a tokenizer that is made here; 256 demonstrations are
                            # read for every 4000
    rename: bool = False  # for actions that repeat words of the prompt which are new in every task:
                          # replace the tokens of each sample by random ones, the same everywhere in
                          # it, except those that belong to the environment ("click"), so that the
                          # model must copy. The default of --text_weight is then 0
    copy_steps: int = 0  # a model that is made here first learns to repeat random tokens, in so
                         # many steps; try 4000, with --lr 1.5e-3, where actions have words that are
                         # new in every task

    def __post_init__(self):
        check_ranges(self, ((0, LARGE, "steps copy_steps lr text_weight"),
                            (1, LARGE, "batch vocabulary"),
                            (0, 1, "forget noise until until_success"), (8, LARGE, "width")))
        if self.width % 8 or self.copy_steps and self.width < 64:
            raise ValueError("--width must be a multiple of 8, and with --copy_steps at least 64; "
                             f"it is {self.width}")


OF_A_NEW_MODEL = {"width", "vocabulary", "copy_steps"}  # flags that --model FOLDER cannot use
# The flags of train.py that imitation uses.
SHARED = {*evaluation.SHARED} - {"date", "leave_out"} | {
    "model", "out", "seed", "compile", "value_tokens", "r_max", "tau_v", "tokens_per_micro_batch",
    "gradient_checkpointing", "optim_state_dtype"}
SAVE_AFTER = 180  # seconds
# For models as small as those made here: the defaults of the flags above, and the settings of
# train.py that a model's folder recommends.
SMALL_FLAGS = {"lr": 4e-3, "text_weight": 0.1, "forget": 0.8}
SMALL_SETTINGS = {
    "dtype": "float32", "compile": False, "iterations": 40, "batch_size": 64, "max_new_tokens": 16,
    "max_prompt": 8192, "lr": 4e-4, "critic_lr": 4e-4, "lr_warmup": 20, "lr_final_fraction": 0.0,
    "mini_batch": 128, "tokens_per_micro_batch": 4096}


def parse(argv=None):
    """Flags -> (train.py's Config, Flags). ValueError: they cannot be used."""
    parser = parser_for(
        Flags, "Imitation learning before Algorithm 1. The demonstrator is the method "
        "advice(forgetful) -> (thought, command) of --env; see environments/frozen_lake.py. These "
        f"flags of train.py are allowed, too: {', '.join(sorted(SHARED))}. "
        f"A small model, such as one made here, has other defaults: {SMALL_FLAGS}.")
    given_flags, rest = parser.parse_known_args(argv)
    given = vars(parser_for(train.Config, "").parse_args(rest))
    given = {"env": "house", "model": "random"} | given
    given.setdefault("out", f"runs/{given['env'].split(':')[-1]}-imitated")
    given = expanded(given)
    random_model = given["model"] == "random"
    env = envs.env_class(given["env"])
    small = (SMALL_SETTINGS | env.recommended if random_model else
             sapo_json_of(given["model"], env.tiny_model).get("settings", {}))
    if envs.context_for(given["env"], given.get("context")) == "full":
        # its max_prompt is meant for single prompts
        small = {name: value for name, value in small.items() if name != "max_prompt"}
    config = train.settings(**(small | given))
    renames = {"text_weight": 0.0} if getattr(given_flags, "rename", False) else {}
    is_small = small.keys() >= SMALL_SETTINGS.keys() - {"max_prompt"}  # one that was made here
    flags = Flags(**(SMALL_FLAGS if is_small else {}) | renames | vars(given_flags))
    if world_size() > 1:
        raise ValueError("imitation runs in one process: start it with python, not with torchrun")
    if flags.resume and not os.path.exists(f"{config.out}/imitation.pt"):
        raise ValueError(f"--out {config.out} has no unfinished imitation")
    # (a start that failed leaves a folder with a lock alone)
    if os.path.lexists(config.out) and not flags.resume and not (
            os.path.isdir(config.out) and os.listdir(config.out) == [".lock"]):
        raise ValueError(f"--out {config.out} exists already; choose a new folder")
    if unused := given.keys() - SHARED:
        raise ValueError(f"--{min(unused)} has no effect on imitation")
    if not random_model and (made := OF_A_NEW_MODEL & vars(given_flags).keys()):
        raise ValueError(f"--{min(made)} is of a model that is made here, and --model "
                         f"{config.model} exists")
    if flags.rename and not makes_tokenizer(config.env):
        raise ValueError(f"--env {config.env} cannot be learned with --rename: its commands name "
                         "things in words that the task does not have")
    if "vocabulary" in given_flags and not makes_tokenizer(config.env):
        raise ValueError(f"--env {config.env} has a tokenizer of its own, without --vocabulary")
    if not hasattr(demonstrator_of(config.env), "advice"):
        raise ValueError(f"--env {config.env} has no demonstrator, advice(forgetful) -> (thought, "
                         "command): write one, or use a pretrained instruct model, which needs no "
                         "imitation")
    return config, flags


def main():
    with one_line_errors("imitate.py", envs.GameError, BrokenExecutor):
        init_distributed()
        config, flags = parse()
        who = "a new random model" if config.model == "random" else config.model
        print0(f"{who} imitates the demonstrator of {config.env}, {flags.steps} steps or fewer")
        with RunDir(config.out).lock(flags.resume, "imitation.pt"):
            make_model(config, flags)
        print0(f"wrote {config.out}; next: python train.py --env {config.env} --model "
               f"{config.out}, with the same flags for environment and prompts")


def make_model(config, flags):
    """Loads or makes a model, lets it imitate, and writes it to config.out."""
    dtype = getattr(torch, config.dtype)
    if flags.resume:
        lm = load(config.out, dtype=dtype)
    elif config.model == "random":
        tokenizer = tokenizer_for(config, flags) if makes_tokenizer(config.env) else None
        lm = random_tiny(config.seed, dtype, tokenizer, flags.width, flags.copy_steps > 0,
                         value_tokens=config.value_tokens, r_max=config.r_max,
                         tau_v=config.tau_v)
        lm.recommended = (SMALL_SETTINGS | envs.env_class(config.env).recommended
                          | {"max_new_tokens": config.max_new_tokens})  # no response is cut
    else:
        lm = load(config.model, tiny=envs.env_class(config.env).tiny_model, dtype=dtype,
                  value_tokens=config.value_tokens, r_max=config.r_max, tau_v=config.tau_v)
    lm.played_with = settings_of_games(config, None)
    choose_threads(lm.model)
    lm = with_speed_and_memory_settings(lm, config)
    if flags.copy_steps and config.model == "random" and not flags.resume:
        learn_to_copy(lm, flags.copy_steps, flags.lr, config.seed)
    workers = envs.default_workers(config.env)
    pool = envs.Pool(config.env, envs.options_for(vars(config)), workers)
    # forked from a server without threads; Ctrl-C is left to this process
    players = ProcessPoolExecutor(max(1, workers), multiprocessing.get_context("forkserver"),
                                  signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with contextlib.closing(pool), players, stop.handle_signals():
        imitate(lm, pool, config, flags, players.map if workers else map)
    save(lm, config.out)


if __name__ == "__main__":
    main()
