"""One causal language model as actor and critic.

    readouts       two logits of a causal LM as a value in [-1, 1], a policy without them    Eq. 1-3
    ActorCritic    a Hugging Face model, its chat format, its two reserved words; `score` is one
                   forward pass over a Batch: log-probs, entropy, V and Q
    Critic         the separate value model that PPO needs and SAPO does not
    load           by hub id, folder or bare name; "tiny" is built on the spot

A training sample is a token sequence with one or more turns in it; a turn is the span [start, end)
of its response. V is read at start - 1, the last token of the context; Q at end - 1, the last token
the policy chose. Shapes: B sequences, T tokens, M response tokens, N turns, V vocabulary, D width.
Padding, on the right, exists within the forward pass alone; what it returns lies flat on the axes
(M,) and (N,). `# SAPO:` marks what the paper adds. Departures from the paper: none.
    python model.py [--model NAME]       shows a model's reserved words and reads V and Q of a turn
"""
import argparse
import contextlib
import copy
import functools
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (AttentionInterface, AutoModelForCausalLM, AutoTokenizer,
                          PreTrainedTokenizerFast)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# ------------------------------------------------------------------ readouts (copy these alone)


def value_readout(logits, value_ids, *, tau):
    """Eq. 1. Logits (..., V) and the ids (w+, w-) -> p in [-1, 1], (...). V and Q are R_max p."""
    plus, minus = (logits[..., i] for i in value_ids)
    return ((plus - minus) / tau).clamp(-1, 1)  # Eq. 1  # SAPO: a value without a value head


def restricted_log_softmax(logits, value_ids):
    """Eq. 3. Logits (..., V) -> log-probs of every word but the two reserved ones, whose
    probability is exactly 0. 16-bit logits are raised to float32 first."""
    value_ids = torch.as_tensor(value_ids, device=logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    wide = wide.index_fill(-1, value_ids, float("-inf"))
    return wide.log_softmax(-1)  # Eq. 3  # SAPO: w+ and w- are no actions


def entropy(logp, value_ids):
    """Entropy in nats of restricted log-probs, (..., V) -> (...), in which 0 * -inf counts 0."""
    value_ids = torch.as_tensor(value_ids, device=logp.device)
    return -(logp.exp() * logp.index_fill(-1, value_ids, 0.0)).sum(-1)


# --------------------------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """Sequences, padded on the right so that causal attention needs no mask, and the positions of
    response tokens and turns in them. These are made on the host, where a boolean mask on a GPU
    would make the host wait."""

    ids: torch.Tensor  # (B, T)
    length: torch.Tensor  # (B,) for imitation and measurements
    row: torch.Tensor  # (M,) the place of each response token in ids ...
    col: torch.Tensor  # (M,)
    turn_of: torch.Tensor  # (M,) ... and the turn it belongs to
    seq: torch.Tensor  # (N,) the sequence of each turn, and its span there
    start: torch.Tensor  # (N,)
    end: torch.Tensor  # (N,)

    def to(self, device):
        return Batch(*(x.to(device) for x in self))


def make_batch(samples):
    """[(ids, [(start, end), ...]), ...], a tuple for each sequence, a span for each of its turns ->
    Batch, turns in that order. ValueError where a turn has no context or no response."""
    turns = [(b, *span) for b, (_, spans) in enumerate(samples) for span in spans]
    if any(not 0 < start < end <= len(samples[b][0]) for b, start, end in turns):
        raise ValueError("a turn needs context before it and a response in it")
    ids = [torch.tensor(ids, dtype=torch.long) for ids, _ in samples]
    seq, start, end = torch.tensor(turns, dtype=torch.long).reshape(-1, 3).unbind(1)
    turn_of = torch.arange(len(turns)).repeat_interleave(end - start)
    col = torch.arange(len(turn_of)) + (end - (end - start).cumsum(0))[turn_of]
    return Batch(pad_sequence(ids, batch_first=True), torch.tensor([len(x) for x in ids]),
                 seq[turn_of], col, turn_of, seq, start, end)


def micro_batches(samples, budget):
    """[(ids, ...)] -> lists of like length, shortest first, of at most `budget` padded tokens."""
    groups = []
    for sample in sorted(samples, key=lambda s: len(s[0])):
        if not groups or (len(groups[-1]) + 1) * len(sample[0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


# ------------------------------------------------------------------------------- actor and critic

# transformers builds no mask for a name it does not know; this attention is causal without one. For
# "sdpa" it would wait for the GPU to see positions, and compiled, a mask would rule out flash.
AttentionInterface.register("causal", sdpa_attention_forward)


@contextlib.contextmanager
def attention(model, name):
    """Within it, the model attends by another of transformers' registered functions."""
    before, model.config._attn_implementation = model.config._attn_implementation, name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def all_full(body):
    """Whether every layer of a model's body attends to all that came before."""
    layers = getattr(body.config, "layer_types", None)
    window = getattr(body.config, "sliding_window", None)
    return set(layers) == {"full_attention"} if layers else not window


def runnable(body, compile):
    """A model's body, or its compiled form, which takes every shape and wants full attention."""
    if compile and not all_full(body):
        raise ValueError(f"--compile needs full attention; {type(body).__name__} has other layers")
    return torch.compile(body, dynamic=True) if compile else body


def token_scores(hidden, token, head, value_ids):
    """Hidden states (M, D), the tokens (M,) that followed -> their log-probs, the entropy, (M,)."""
    logp = restricted_log_softmax(head(hidden).float(), value_ids)  # (M, V)
    return logp.gather(1, token[:, None])[:, 0], entropy(logp, value_ids)


class Scores(NamedTuple):
    logp: torch.Tensor  # (M,) log-probs of the response tokens, Eq. 3, at temperature 1
    entropy: torch.Tensor  # (M,) of this model's policy where they stand, in nats
    p_v: torch.Tensor  # (N,) readouts before the responses, Eq. 1: V = R_max p_v
    p_q: torch.Tensor  # (N,) readouts after them: Q = R_max p_q


@dataclass
class ActorCritic:
    """A causal LM and how it is read. value_ids = (w+, w-); stop_ids end a response; tau_v is that
    of Eq. 1, r_max that of Eq. 2. dataclasses.replace(lm, compile=True) compiles scoring."""

    model: torch.nn.Module
    tokenizer: object
    chat: "Chat"
    value_ids: tuple
    stop_ids: tuple
    tau_v: float = 1.0
    r_max: float = 10.0
    compile: bool = False

    def __post_init__(self):
        self.device, self.head = self.model.device, self.model.get_output_embeddings()
        self.value_index = torch.tensor(self.value_ids, device=self.device)
        self.max_length = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        # positions whose logits exist at a time: a multiple of 128, about 256 MiB in float32
        self.chunk = max(1, 2 ** 19 // len(self.head.weight)) * 128
        self.run, self.token_scores = runnable(self.model.base_model, self.compile), token_scores
        if self.compile:
            self.token_scores = torch.compile(token_scores, dynamic=True)

    def body(self, ids):
        """(B, T) ids, padded on the right -> hidden states (B, T, D)."""
        return self.run(input_ids=ids, use_cache=False).last_hidden_state

    def value_logits(self, hidden):
        """(..., D) -> (z+, z-), (..., 2): a product with two rows of the head, in float32, because
        16-bit logits would be rounded before one is subtracted from the other."""
        weight = self.head.weight.index_select(0, self.value_index).float()
        bias = getattr(self.head, "bias", None)
        bias = None if bias is None else bias.index_select(0, self.value_index).float()
        return F.linear(hidden.float(), weight, bias)

    def readout(self, hidden):
        """(..., D) -> p in [-1, 1], (...)."""
        return value_readout(self.value_logits(hidden), (0, 1), tau=self.tau_v)

    def score(self, batch):
        """One forward pass -> Scores.

        Logits are made of response positions alone, a chunk at a time. Where there are several,
        they are made again in the backward pass, so that only one chunk's logits exist."""
        hidden = self.body(batch.ids)
        before = hidden[batch.row, batch.col - 1]  # (M, D): this position predicts the token
        chunks = zip(before.split(self.chunk), batch.ids[batch.row, batch.col].split(self.chunk))
        score_chunk = self.token_scores
        if len(before) > self.chunk and torch.is_grad_enabled():
            score_chunk = functools.partial(checkpoint, score_chunk, use_reentrant=False,
                                            preserve_rng_state=False)
        parts = [score_chunk(*chunk, self.head, self.value_index) for chunk in chunks]
        logp, h = (torch.cat(column) for column in zip(*parts))
        ends = torch.stack([hidden[batch.seq, batch.start - 1], hidden[batch.seq, batch.end - 1]])
        p_v, p_q = self.readout(ends)  # SAPO: V sees no action, Q sees no reward
        return Scores(logp, h, p_v, p_q)

    def text(self, ids):
        """A response as text, without the stop token it may end in."""
        return self.tokenizer.decode(ids[:-1] if ids[-1] in self.stop_ids else ids)

    def save(self, folder):
        """Writes a Hugging Face folder, and beside its files sapo.json."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        ours = {"value_ids": self.value_ids, "tau_v": self.tau_v, "r_max": self.r_max}
        with open(os.path.join(folder, "sapo.json"), "w") as file:
            json.dump(ours, file)


class Chat:
    """Turns text into the token ids of a conversation, by the tokenizer's own chat template."""

    MARK = "@response@"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template or self.MARK not in self.written("-", self.MARK, "-"):
            raise ValueError("this model has no chat template that keeps what the assistant says; "
                             "choose an instruct model (tokenizer_config.json or "
                             "chat_template.jinja in its folder holds the template)")

    def written(self, *contents):
        """The user's and the assistant's messages in turn, as text up to the next response."""
        roles = ("user", "assistant") * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=True)

    def first(self, text):
        """The ids of the first user message, up to where the response begins."""
        return self.tokenizer(self.written(text), add_special_tokens=False).input_ids

    def later(self, text, last_token=None):
        """What stands between a response and the next one: end of turn, user message, header. An
        end-of-turn token the policy chose itself (`last_token`) is not repeated."""
        after = self.written("-", self.MARK, text).partition(self.MARK)[2]
        ids = self.tokenizer(after, add_special_tokens=False).input_ids
        return ids[1:] if ids[0] == last_token else ids


class Critic(torch.nn.Module):
    """PPO's separate critic: a copy of the policy's body under a float32 linear head that starts
    at 0. SAPO needs none."""

    def __init__(self, lm):
        super().__init__()
        self.body = copy.deepcopy(lm.model.base_model)
        self.head = torch.nn.Linear(lm.model.config.hidden_size, 1, device=lm.device)
        self.__dict__["run"] = runnable(self.body, lm.compile)  # not a second submodule
        for p in self.head.parameters():
            torch.nn.init.zeros_(p)

    def forward(self, batch):
        """Batch -> (M,): V over R_max before each response token."""
        hidden = self.run(input_ids=batch.ids, use_cache=False).last_hidden_state
        return self.head(hidden[batch.row, batch.col - 1].float())[:, 0]


# --------------------------------------------------------------------------------------- loading

OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google",
          "Mistral": "mistralai"}


def hub_id(name):
    """Qwen2.5-1.5B-Instruct -> Qwen/Qwen2.5-1.5B-Instruct; a folder or full id stays as it is."""
    owners = [owner for family, owner in OWNERS.items() if name.startswith(family)]
    return name if "/" in name or os.path.isdir(name) or not owners else f"{owners[0]}/{name}"


def json_in(folder, name):
    """The JSON object in a file of a folder; {} where there is no such file."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, name)) as file:
        return json.load(file)
    return {}


def pretrained(name, dtype):
    """-> model, tokenizer of a folder or hub id. For some architectures, Qwen2 among them,
    AutoTokenizer replaces a folder's own tokenizer, and the tiny model's words would be lost."""
    own = json_in(name, "tokenizer_config.json").get("tokenizer_class")
    complete = own in ("TokenizersBackend", "PreTrainedTokenizerFast")
    try:
        path, tokenizer = hub_id(name), PreTrainedTokenizerFast if complete else AutoTokenizer
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        return model, tokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot load model {name!r}: neither tiny, nor a folder with a causal "
                         f"language model, nor a hub id that can be reached ({reason})") from None


def is_tiny(name):
    """Whether a name is "tiny" or the folder of such a model."""
    from worlds.tiny import SIZES  # here, so that a copy of this file works without it
    return name == "tiny" or SIZES.items() <= json_in(name, "config.json").items()


def load(name, *, value_tokens=None, tau_v=None, r_max=None, device=None, dtype=torch.float32,
         seed=0, words=()):
    """-> ActorCritic on `device` (default: a GPU, if any). `name` is a folder, hub id, bare name or
    "tiny" (random weights from `seed`, a vocabulary from `words`: phrases and nouns). tau_v and
    r_max default to those the folder was trained with, else 1 and 10. ValueError: what is wrong."""
    if name == "tiny":
        from worlds.tiny import tiny
        model, tokenizer = tiny(*words, seed=seed)
    else:
        model, tokenizer = pretrained(name, dtype)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    for p in model.parameters():  # buffers stay: RoPE's frequencies must not be rounded
        p.data = p.data.to(dtype)
    ours = json_in(name, "sapo.json")
    return actor_critic(model, tokenizer, value_tokens, ours.get("value_ids"),
                        tau_v or ours.get("tau_v", 1.0), r_max or ours.get("r_max", 10.0))


def actor_critic(model, tokenizer, value_tokens=None, value_ids=None, tau_v=1.0, r_max=10.0):
    """-> ActorCritic whose w+ and w- are the two `value_tokens`, else `value_ids`, else two that no
    text uses. ValueError where the model cannot be served."""
    if all_full(model.base_model):
        model.config._attn_implementation = "causal"
    chat, rows = Chat(tokenizer), len(model.get_output_embeddings().weight)
    stop_ids = stop_ids_of(model, tokenizer, chat)
    if value_tokens:
        value_ids = named_value_ids(tokenizer, value_tokens, stop_ids, rows)
    value_ids = value_ids or reserve_value_ids(tokenizer, rows, stop_ids)
    lm = ActorCritic(model, tokenizer, chat, tuple(value_ids), stop_ids, tau_v, r_max)
    check_head(lm)
    return lm


def stop_ids_of(model, tokenizer, chat):
    """The tokens that end a response: the model's own, and the end of a turn in a conversation."""
    own, end_of_turn = model.generation_config.eos_token_id, chat.later("-")[0]
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    stops |= {end_of_turn} & tokenizer.added_tokens_decoder.keys()
    return tuple(sorted(stops - {None}))


def reserve_value_ids(tokenizer, rows, taken):
    """Two vocabulary entries no text uses: the last padded rows past the tokenizer, else special
    tokens that neither the chat template nor `taken` uses, preferably named reserved or unused."""
    if rows - max(tokenizer.get_vocab().values()) > 2:
        return rows - 2, rows - 1
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    free = [(not re.search("reserved|unused|extra", t.content), -i)
            for i, t in tokenizer.added_tokens_decoder.items() if t.special and i < rows
            and i not in taken and t.content not in roles
            and t.content not in tokenizer.chat_template]
    if len(free) < 2:
        raise ValueError("no two vocabulary entries are free for w+ and w-; name two tokens no "
                         "text uses: --value_tokens A B")
    minus, plus = (-i for _, i in sorted(free)[:2])
    return plus, minus


def named_value_ids(tokenizer, names, taken, rows=float("inf")):
    """The ids of the two tokens, or rows of the head by number, that the user named."""
    words = tokenizer.get_vocab()
    ids = tuple(words.get(n, int(n) if n.isdigit() else -1) for n in names)
    for name, i in zip(names, ids):
        special = tokenizer.added_tokens_decoder.get(i)
        used = special and special.content in tokenizer.chat_template
        why = (f"is no token, nor one of the head's {rows} rows" if not 0 <= i < rows else
               "is a stop token or in the chat template" if i in taken or used else
               "is there twice: two different tokens are needed" if len(set(ids)) != 2 else "")
        if why:
            raise ValueError(f"--value_tokens: {name!r} {why}")
    return ids


@torch.no_grad()
def check_head(lm):
    """Refuses a model that changes its logits after the head, which score() applies itself."""
    ids = torch.tensor([lm.chat.first("hello")[:32]], device=lm.device)
    theirs, ours = lm.model(input_ids=ids).logits.float(), lm.head(lm.body(ids)).float()
    if not torch.allclose(theirs, ours, atol=1e-2, rtol=1e-2):
        raise ValueError(f"{type(lm.model).__name__} does something to its logits after the head "
                         "(softcapping or scaling); such models are not supported")


@torch.no_grad()
def readout_at_start(lm, prompts):
    """The logit difference z+ - z- before and after an empty response to each prompt (a list of
    ids), before any training -> mean, deviation, saturated share. ValueError where Eq. 1 is flat
    for most."""
    end = lm.chat.later("-")[:1]
    ends = [lm.body(torch.tensor([ids + end], device=lm.device))[0, -2:] for ids in prompts]
    diff = -lm.value_logits(torch.cat(ends)).diff()[:, 0]
    saturated = (diff.abs() > lm.tau_v).float().mean().item()
    if saturated > 0.5:
        raise ValueError(f"{saturated:.0%} of the value readouts start saturated: the logits of "
                         f"{lm.value_ids} differ by {diff.mean():.2f} +- {diff.std():.2f}, and "
                         f"Eq. 1 has no gradient beyond tau_v = {lm.tau_v:g}. Choose two others "
                         f"with --value_tokens A B, or --tau_v above {2 * diff.abs().mean():.1f}")
    return diff.mean().item(), diff.std().item(), saturated


def main():
    import envs  # only for the tiny model's words

    parser = argparse.ArgumentParser(description="Reads V and Q of one turn.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, a hub id or a bare name")
    try:
        lm = load(parser.parse_args().model, words=envs.words())
        prompt = lm.chat.first("You are in a kitchen. Put an apple in the fridge.")
        difference, _, saturated = readout_at_start(lm, [prompt])
    except ValueError as error:
        sys.exit(f"model.py: {error}")
    text = "<think> find apple </think> <action> go to fridge 1 </action>"
    response = lm.tokenizer(text, add_special_tokens=False).input_ids + [lm.stop_ids[0]]
    sample = prompt + response, [(len(prompt), len(prompt) + len(response))]
    with torch.no_grad():
        logp, _, p_v, p_q = lm.score(make_batch([sample]).to(lm.device))
    print(f"w+, w- = {lm.value_ids}: logits {difference:.3f} apart, {saturated:.0%} saturated\n"
          f"one turn of {len(logp)} tokens, log-prob {logp.sum():.2f}: V = "
          f"{lm.r_max * p_v.item():.3f} before it, Q = {lm.r_max * p_q.item():.3f} after it")


if __name__ == "__main__":
    main()
