"""Playing tasks, many of them side by side.

    Sampler   prompts -> responses, by one of two engines that agree up to rounding
                kv   our KV-cache decoding loop with continuous batching: the Sampler schedules
                     sequences, on the host; a DecodeState computes their tokens, on the device
                hf   Hugging Face generate, for comparison and for models that kv does not support
    rollout   tasks -> turns: build the prompt, sample a response, act, until every game is over
              What it asks of a sampler, ours or another, is the SamplerProtocol

Tokens are drawn with uniform random numbers that depend only on (seed, iteration, trajectory,
turn). So the engine, the number of slots and the number of ranks change a rollout by rounding only.

The past is shown to the model in one of two ways. In `context="window"` every turn has a new prompt
with the last few turns. In "full", which is not in the paper, the conversation and its KV cache
grow from turn to turn.

Shapes: R slots, T tokens, S cache positions, D hidden size, H' key-value heads of size E.
    python rollout.py [--model NAME]       samples a response to one prompt with both engines
"""
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence

from hf import lora
from hf.attention import (causal_inputs, check_attention, keys_and_values, pieces_of_cache,
                          unsupported)
from hf.verify import choose_decoding
from model import (ActorCritic, float32_logits, load, make_batch, micro_batches,
                   restricted_log_softmax, rows_of)
from runtime.answers import as_number
from runtime.cli import progress
from runtime.distributed import world_size

# --------------------------------------------------------------------- what a rollout asks for

class Response(NamedTuple):
    ids: list  # the tokens the policy chose, the stop token included
    logp: list  # their log-probs, Eq. 3, at the sampling temperature (at 1 if that is 0)
    # V before the first token and Q after the last, in units of return (Eq. 2). A sampler that has
    # none leaves them out: with --old_logprobs recompute they are shown and not used
    v: float = float("nan")
    q: float = float("nan")


class SamplerProtocol(Protocol):
    """What a sampler owes to `rollout`, and so to training and evaluations. `Sampler` is ours; for
    another, such as a client of a server: train(..., make_sampler=f), f(lm, config, temperature).

    The policy is the model's whole distribution without w+ and w- (Eq. 3) at this temperature, so
    there is no top-k or top-p, and log-probs are of that distribution. A response ends with a token
    of lm.stop_ids, which belongs to it, or has max_new_tokens tokens."""

    lm: ActorCritic  # its chat encodes prompts, its method text decodes responses
    context: str  # "window" or "full"
    max_new_tokens: int  # the maximum length of a response
    # the maximum length of a sequence without its response: what lm.max_length leaves for it, and
    # config.max_prompt, if there is one
    limit: int
    steps: int  # decoding steps so far, or about as many: games are answered after some of them

    @property
    def busy(self) -> int:
        """How many sequences have no response yet."""

    def weights_changed(self, lm: ActorCritic) -> None:
        """Called before every rollout: takes the weights of lm, and forgets all sequences."""

    def add(self, key, sequence: list[int], uniforms) -> None:
        """Takes a sequence of token ids, under a name that none without a response has. In "full",
        it may continue the last sequence of this name and its response. `uniforms`, random numbers
        in [0, 1) for each token of the response, may be ignored: then a rollout does not repeat,
        and --resume is not exact."""

    def run(self, steps: int | None = None) -> list[tuple[object, Response]]:
        """Decodes until a response is complete, or for about so many steps (default: as many as a
        response can have) -> [(key, Response)] of those that are complete, which may be none. Where
        nothing waits for a response it returns at once; where it waits for a server, not for
        longer than a game may wait. It must advance `steps`, or games are never asked for their
        answers while others are decoded."""

    def drop(self, key) -> None:
        """No sequence of this name will come any more: the conversation is over."""

    def forget(self) -> None:
        """Gives up all sequences."""


# ------------------------------------------------------------------------------- drawing a token

BLOCK = 128  # vocabulary entries per block of sample_token


def sample_token(logits, u, value_ids, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (R, W) and uniform random numbers (R,) in [0, 1) -> tokens (R,), their log-probs (R,).
    Temperature 0 is greedy.

    The token is the first one whose cumulative probability is *above* u, so that one of probability
    0 is never drawn. Because a cumulative sum over a whole vocabulary is slow on a GPU, it is found
    in two steps, in float64:
        1. sum the probabilities of every BLOCK tokens; find the first block whose cumulative sum is
           above u
        2. u minus the sum of all blocks before it is what the tokens of this block must exceed;
           find the first one whose cumulative sum within the block does"""
    logits = logits if temperature in (0, 1) else logits / temperature
    logp = restricted_log_softmax(logits, value_ids)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        prob, missing = logp.exp(), -logp.shape[1] % BLOCK
        prob = (F.pad(prob, (0, missing)) if missing else prob).unflatten(1, (-1, BLOCK))
        cdf = prob.sum(-1, dtype=torch.float64).cumsum(-1)  # (R, blocks)
        # a target that reached the total would find no token. u can be 1 in float32; and `rest`, a
        # difference of sums over blocks, can by rounding be all that the block has
        below_one = 1 - 2 ** -40
        target = u[:, None].double().clamp(max=below_one) * cdf[:, -1:]
        block = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
        inside = prob.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double()
        cdf_inside = inside.cumsum(-1)  # (R, BLOCK)
        rest = target - F.pad(cdf, (1, 0)).gather(1, block)
        rest = torch.minimum(rest, cdf_inside[:, -1:] * below_one)
        token = block * BLOCK + torch.searchsorted(cdf_inside, rest, right=True)
        token = token.clamp(max=logp.shape[1] - 1)  # NaN must not index out of bounds
    return token[:, 0], logp.gather(1, token)[:, 0]


# ----------------------------------------------------------------- the decode state, on the device

class LayerCache:
    """Keys and values of one layer, (R, S + 1, H', E). Padding is written to the last position.

    A forward pass is two steps: `address` says where the new tokens are written and what is read,
    and then the layer itself calls `update`, as of a cache of transformers."""

    def __init__(self, keys, values):
        self.keys = keys
        self.values = values
        self.address(None, None, None, None)

    def address(self, write_slots, write_positions, read_slots, read_length) -> None:
        """The next `update` writes to these slots and positions, which broadcast to (R, T), and
        reads the first read_length positions (0: none; None: all) of read_slots (R,) or, if that is
        None, of the first R slots."""
        self.write_slots = write_slots
        self.write_positions = write_positions
        self.read_slots = read_slots
        self.read_length = read_length

    def update(self, k, v, *args, **kwargs):
        """Writes k, v (R, H', T, E) -> the keys and values to attend to, (R, H', S, E)."""
        self.keys[self.write_slots, self.write_positions] = k.transpose(1, 2)
        self.values[self.write_slots, self.write_positions] = v.transpose(1, 2)
        if self.read_length == 0:  # new sequences: all they attend to is in k and v
            return k, v
        slots = slice(len(k)) if self.read_slots is None else self.read_slots
        return (self.keys[slots, :self.read_length].transpose(1, 2),
                self.values[slots, :self.read_length].transpose(1, 2))


class DecodeState:
    """What is on the device: for each slot a sequence of its own length, its KV cache, and what a
    decoding step reads and writes. Nothing here waits for the device, so that a step can be
    captured as a CUDA graph. The model takes this object for its cache, so it has those methods of
    transformers' cache that decoders call."""

    TENSORS = (  # the attributes that have a row for each slot, beside the cache
        "hidden", "position", "num_generated", "active", "uniforms", "tokens", "logp", "readouts")

    def __init__(self, lm, max_new_tokens, temperature, is_stop):
        """No slots yet; dtypes and shapes are taken from a forward pass of the model. ValueError:
        the model does not support it."""
        check_attention(lm.model)
        self.lm = lm
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.is_stop = is_stop  # (vocabulary,)
        # V and Q are read by a copy, because captured graphs hold its address; so are adapters
        self.value_rows = rows_of(lm.value_rows, (0, 1), trained=True)
        self.model = lora.sampling_copy(lm.model)
        self.backbone = self.model.base_model  # hf/compile.py may compile its layers
        # whether decoding steps attend in pieces (hf/attention.py): each slot reads its own
        # positions, not as many as the longest one has. choose_decoding sets it
        self.in_pieces = False
        zero = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
        out = self.backbone(input_ids=zero, position_ids=zero, use_cache=True)
        self.cache_name = "cache" if "cache" in out else "past_key_values"  # its name since 5.24
        self.layers = [LayerCache(keys[:0].transpose(1, 2).contiguous(),
                                  values[:0].transpose(1, 2).contiguous())
                       for keys, values in keys_and_values(lm.model, out.get(self.cache_name))]
        self.max_length = 0  # S
        like = out.last_hidden_state
        self.hidden = like.new_zeros(0, like.shape[-1])  # (R, D) at the last token
        self.position = like.new_zeros(0, dtype=torch.long)  # (R,) of the next token
        self.num_generated = like.new_zeros(0, dtype=torch.long)  # (R,)
        self.active = like.new_zeros(0, dtype=torch.bool)  # (R,) whether the response goes on
        # one column per token, and a last one for finished slots
        self.uniforms = like.new_zeros(0, max_new_tokens + 1, dtype=torch.float32)
        self.tokens = like.new_zeros(0, max_new_tokens + 1, dtype=torch.long)
        self.logp = like.new_zeros(0, max_new_tokens + 1, dtype=torch.float32)
        self.readouts = like.new_zeros(0, 2, dtype=torch.float32)  # the readouts of V and Q, Eq. 1
        self.try_out()

    def try_out(self) -> None:
        """ValueError: the model's forward pass fails with this object as its cache."""
        self.resize(1, 2)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.lm.device)
        try:
            self.forward(zero, zero, kv_length=0)
            self.forward(zero, zero, kv_length=2)
        except (AttributeError, TypeError, LookupError, ValueError) as error:
            raise unsupported(self.lm.model, "its forward pass needs another kind of KV cache: "
                              f"{type(error).__name__}: {error}") from error

    def resize(self, slots: int, max_length: int) -> None:
        """Grows to `slots` slots of `max_length` positions, and keeps the contents."""
        more = slots - len(self.position)
        longer = max_length - self.max_length
        for layer in self.layers:  # one at a time, so that only one layer exists twice
            layer.keys = F.pad(layer.keys, (0, 0, 0, 0, 0, longer, 0, more))
            layer.values = F.pad(layer.values, (0, 0, 0, 0, 0, longer, 0, more))
        for name in self.TENSORS:
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
        self.max_length = max_length

    def copy_slots(self, moves: list[tuple[int, int]], kv_length: int) -> None:
        """For every (target, source), copies slot source to slot target, up to position kv_length.
        All are copied at once, so that (a, b) and (b, a) swap two slots."""
        target, source = to_device_async(moves, self.position.device).T
        for layer in self.layers:
            for x in (layer.keys, layer.values):
                x[target, :kv_length] = x[source, :kv_length]
        for name in self.TENSORS:
            getattr(self, name)[target] = getattr(self, name)[source]

    def copy_weights(self, lm) -> None:
        """Copies the rows of w+ and w-, and adapters, which may have been trained since. In place:
        captured graphs read the copies. All other weights are those of the model itself."""
        for copied, p in zip(self.value_rows.parameters(), lm.value_rows.parameters()):
            copied.copy_(p)
        lora.copy_adapters(self.model, lm.model)

    def prefill(self, ids, slot, num_cached, length, uniforms, kv_length) -> None:
        """Runs new tokens through the model and makes their slots active. ids (R, T), padded on the
        right; slot, num_cached, length (R,): the first `length` tokens of a row follow the
        num_cached ones that its slot has already."""
        column = torch.arange(ids.shape[1], device=ids.device)
        is_padding = column >= length[:, None]
        position = (num_cached[:, None] + column).masked_fill(is_padding, self.max_length)
        hidden = self.forward(ids, position, kv_length, slot)
        hidden = hidden[torch.arange(len(ids), device=ids.device), length - 1]
        self.uniforms[slot, :-1] = uniforms
        self.position[slot] = num_cached + length
        self.hidden[slot] = hidden
        self.num_generated.index_fill_(0, slot, 0)  # index_fill_ needs no copy from the host
        self.active.index_fill_(0, slot, True)
        # SAPO: V costs two dot products
        self.readouts[slot, 0] = self.lm.readout(hidden, self.value_rows)

    def sample(self, n: int) -> torch.Tensor:
        """Draws a token for each of the first n slots, and records it and its log-prob -> (n,)."""
        # the column of this token; finished slots write into the last one, which nobody reads
        column = torch.where(self.active[:n], self.num_generated[:n], self.max_new_tokens)[:, None]
        u = self.uniforms[:n].gather(1, column)[:, 0]
        logits = float32_logits(self.hidden[:n], self.lm.head)
        token, logp = sample_token(logits, u, self.lm.value_index, self.temperature)
        self.tokens[:n].scatter_(1, column, token[:, None])
        self.logp[:n].scatter_(1, column, logp[:, None])
        return token

    def forward(self, ids, position, kv_length, slots=None) -> torch.Tensor:
        """Runs ids (R, T) at their positions (R, T) through the model, in `slots` (R,) or in the
        first R, which needs no copy of the cache -> hidden states (R, T, D). A token attends to its
        own slot up to itself. Only the first kv_length positions of the cache are read; 0: the
        slots are new."""
        index = torch.arange(len(ids), device=ids.device) if slots is None else slots
        in_pieces = self.in_pieces and slots is None
        for layer in self.layers:  # attention in pieces takes the whole cache
            layer.address(index[:, None], position, slots, None if in_pieces else kv_length)
        if in_pieces:
            mask = pieces_of_cache(position[:, 0] + 1, kv_length, self.max_length + 1)
        elif kv_length:
            unseen = torch.arange(kv_length, device=ids.device) > position[:, None, :, None]
            zeros = torch.zeros(unseen.shape, dtype=self.hidden.dtype, device=ids.device)
            mask = zeros.masked_fill(unseen, float("-inf"))
        else:
            mask = causal_inputs(self.lm.model, ids).get("attention_mask")
        # padding is written to position S; the model may not have that one, so it is told another
        position_ids = position.clamp(max=min(self.max_length, self.lm.max_length) - 1)
        return self.backbone(input_ids=ids, position_ids=position_ids, attention_mask=mask,
                             use_cache=True, **{self.cache_name: self}).last_hidden_state

    def advance(self, n: int, token: torch.Tensor, hidden: torch.Tensor) -> None:
        """Advances the first n slots by their tokens (n,), whose hidden states (n, D) the model has
        computed, and ends those whose response is complete."""
        # two views of the state, which are changed in place
        active = self.active[:n]
        num_generated = self.num_generated[:n]
        self.hidden[:n] = hidden
        self.position[:n] += active
        num_generated += active
        ended = active & (self.is_stop[token] | (num_generated == self.max_new_tokens))
        # SAPO: for Q the last token goes through the model too
        p_q = self.lm.readout(hidden, self.value_rows)
        self.readouts[:n, 1] = torch.where(ended, p_q, self.readouts[:n, 1])
        active &= ~ended

    # ---- what decoders call of transformers' cache (a compiled layer calls its LayerCache itself)
    def update(self, k, v, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(k, v)

    def get_seq_length(self, layer_idx=0):
        return 0  # transformers asks for it only where no position_ids are given; we give them


def to_device_async(numbers, device) -> torch.Tensor:
    """Numbers from the host as a tensor on the device, without waiting for the device."""
    x = torch.as_tensor(numbers)
    return (x.pin_memory() if torch.cuda.is_available() else x).to(device, non_blocking=True)


# --------------------------------------------------------------------- the scheduler, on the host

@dataclass(eq=False)  # so that it is found in a list by identity
class Sequence:
    """What the host knows of a sequence, from `add` until its response is handed out; in "full",
    until it is continued or dropped."""

    key: object  # the caller's name for it
    ids: list  # its tokens, without the response
    uniforms: np.ndarray  # the random numbers for the response
    response: list | None = None  # the tokens of the response, once it is complete
    # tokens in the KV cache of its slot. While it is decoded this is an upper bound, because it
    # counts steps after the stop token, which the host learns of later
    num_cached: int = 0


class Sampler:
    """Samples responses of an ActorCritic to token sequences. It schedules them over the slots of a
    DecodeState, and never waits for the slowest: as soon as a response is complete, its slot can
    take the next sequence (continuous batching). Slots [0, num_active) are decoded.

        add(key, ids)                    the sequence waits
          |
          |  prefill: allocate a slot, run the new tokens through the model
          v
        active  <---+                     decoding: one token per step
          |   |_____|
          |  stop token, or max_new_tokens are reached
          v
        finished                          padding, until the host has read a snapshot
          |
          |  pop_finished: hand out the Response, compact the active slots
          v
        "window": free;   "full": idle, with its KV cache, until the conversation is
                          continued by add(key, longer ids), or drop(key) frees the slot

    run -> decode -> prefill, then step -> decode_one_token, and snapshot -> pop_finished. When the
    model's weights have changed, call weights_changed(lm) (`rollout` and `generate` do).

    max_new_tokens: the maximum length of a response. limit: the maximum length of a
    sequence without its response, the smaller of max_prompt and what the model's context leaves.
    ValueError where the kv engine does not support a model: it is compared with plain forward
    passes, unless check=False; with check=None only if no sampler of this kind was before."""

    def __init__(self, lm: ActorCritic, engine: str = "kv", context: str = "window",
                 max_new_tokens: int = 512, temperature: float = 1.0, compile: bool = False,
                 max_prompt: int | None = None, check: bool | None = True):
        if engine not in ("kv", "hf") or context not in ("window", "full"):
            raise ValueError(f"engine {engine!r}, context {context!r}; known: kv, hf; window, full")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; it is {max_new_tokens}")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite; it is {temperature}")
        self.lm = lm
        self.engine = engine
        self.context = context
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.limit = min(max_prompt or lm.max_length, lm.max_length - max_new_tokens)
        self.is_stop = torch.zeros(len(lm.head.weight), dtype=torch.bool, device=lm.device)
        self.is_stop[list(lm.stop_ids)] = True
        self.steps = 0
        self.forget()
        if engine == "kv":
            self.gpu = lm.device.type == "cuda"
            self.sync_interval = 4 if self.gpu else 1  # decoding steps between snapshots
            self.lag = 1 if self.gpu else 0  # how many snapshots the host is behind
            self.prefill_tokens = 16384 if self.gpu else 2048  # padded tokens per forward pass
            with torch.no_grad():
                self.state = DecodeState(lm, max_new_tokens, temperature, self.is_stop)
            # decode_step does decode_one_token, in the plain way or as a captured CUDA graph.
            # new_decode_step makes it anew after every resize. choose_decoding sets both
            self.decode_step = self.decode_one_token
            self.new_decode_step = lambda: self.decode_one_token
            choose_decoding(self, compile, check)

    # ---- what the caller uses
    def add(self, key, sequence: list[int], uniforms=None) -> None:
        """Queues a sequence of token ids. `key` must not be in use by a sequence that still waits
        for its response. uniforms: max_new_tokens random numbers in [0, 1), which greedy decoding
        does not need. ValueError: what is wrong with the arguments."""
        past = self.sequences.get(key)
        if key is None or past and past.response is None:
            raise ValueError("None is not a valid key" if key is None else
                             f"the sequence with key {key!r} has no response yet")
        if isinstance(sequence, str) or not all(isinstance(i, int) for i in sequence):
            raise ValueError("a sequence must be a list of token ids (int); "
                             "lm.chat.encode_user_turn(text) makes one")
        if not 0 < len(sequence) <= self.limit:
            raise ValueError(f"a sequence has {len(sequence)} tokens; 1 to {self.limit} fit")
        if not 0 <= min(sequence) <= max(sequence) < len(self.is_stop):
            raise ValueError(f"token ids from {min(sequence)} to {max(sequence)}; the model has "
                             f"those from 0 to {len(self.is_stop) - 1}")
        length = len(past.ids + past.response) if past else 0
        if past and (len(sequence) <= length or sequence[:len(past.ids)] != past.ids):
            raise ValueError(f"{key!r} has a conversation of {length} tokens, which this sequence "
                             "does not continue; drop(key) forgets it")
        if uniforms is None and self.temperature == 0:
            uniforms = [0.0] * self.max_new_tokens
        if uniforms is None or len(uniforms) != self.max_new_tokens:
            raise ValueError(f"add() needs {self.max_new_tokens} uniform random numbers, one for "
                             "each token of a response; generate(prompts, seed) makes them itself")
        self.enqueue(key, sequence, uniforms)

    def generate(self, prompts: list, seed: int = 0) -> list[Response]:
        """The common case: prompts, each a user message or a list of token ids -> Responses. It
        forgets all other sequences of this sampler first."""
        if isinstance(prompts, str):
            raise ValueError("generate() takes a list of prompts, and this is one")
        ids = [self.lm.chat.encode_user_turn(p) if isinstance(p, str) else [*p] for p in prompts]
        u = [uniform_numbers((seed,), n, 0, self.max_new_tokens) for n in range(len(ids))]
        self.weights_changed(self.lm)
        return self(range(len(ids)), ids, u)

    @torch.no_grad()
    def run(self, steps: int | None = None) -> list:
        """Decodes until at least one response is complete, or for `steps` steps (default
        max_new_tokens), and returns the complete ones as [(key, Response)], which may be none. The
        hf engine completes all."""
        if not self.busy:
            return []
        return (generate_with_hf(self) if self.engine == "hf"
                else self.decode(self.max_new_tokens if steps is None else steps))

    def __call__(self, keys, sequences, uniforms) -> list[Response]:
        """A whole batch at once -> the responses, in order."""
        if not len(keys) == len(sequences) == len(uniforms):
            raise ValueError(f"{len(keys)} keys, {len(sequences)} sequences and {len(uniforms)} "
                             "rows of random numbers")
        for row in zip(keys, sequences, uniforms):
            self.add(*row)
        responses = {}
        while self.busy:
            responses |= dict(self.run())
        return [responses[key] for key in keys]

    @property
    def busy(self) -> int:
        """How many sequences have no response yet."""
        return len(self.waiting) + self.num_active

    def weights_changed(self, lm: ActorCritic) -> None:
        """Forgets all sequences, whose KV cache is of other weights. The next prefill copies what
        the decode state has copies of, value rows and adapters; all else is the model's own, so lm
        must be of the same one."""
        self.lm = lm
        self.forget()

    def forget(self) -> None:
        """Forgets all sequences. The memory of the KV cache is kept, to be used again."""
        self.sequences = {}  # all of them, by key
        self.waiting = []  # those that wait to be prefilled
        self.slots = []  # the sequence in each slot; None: the slot is free
        self.num_active = 0  # slots that are decoded, with finished ones until they are popped
        self.snapshots = []  # not yet read by the host

    def drop(self, key) -> None:
        """In "full", frees the slot of a conversation whose last response is complete. Does nothing
        for any other key."""
        sequence = self.sequences.get(key)
        if sequence and sequence.response is not None:
            self.slots[self.slots.index(sequence)] = None
            del self.sequences[key]

    # ---- the kv engine: prefill, decode, hand out what is finished
    def enqueue(self, key, ids, uniforms):
        """`add` without its checks. A sequence that continues a conversation takes over its slot.
        Of its KV cache, all tokens before the last response are kept, and the response's own up to
        the first that differs in `ids`: the caller may have tokenized it again."""
        sequence = Sequence(key, [*ids], np.asarray(uniforms, dtype=np.float32))
        if past := self.sequences.get(key):
            sequence.num_cached = len(past.ids)
            for old, new in zip(past.response, ids[len(past.ids):]):
                if old != new:
                    break
                sequence.num_cached += 1
            self.slots[self.slots.index(past)] = sequence
        self.sequences[key] = sequence
        self.waiting.append(sequence)

    def decode(self, steps):
        """Prefills what waits, then decodes until a response is finished, or for `steps` steps
        (rounded up to sync_interval).

        After every sync_interval steps a snapshot of the slots begins to be copied to the host. On
        a CPU it is read at once. On a GPU it is read one round later (`lag`), because it is
        complete by then, and the host need not wait. So a finished slot decodes up to
        2 * sync_interval tokens of padding:

            GPU    decodes 1 to 4    decodes 5 to 8      decodes 9 to 12
            host   schedules 5 to 8  reads snapshot 4,   reads snapshot 8,
                                     schedules 9 to 12   schedules 13 to 16"""
        if self.waiting:
            self.prefill()
        for _ in range(0, steps, self.sync_interval):
            for _ in range(self.sync_interval):
                self.step()
            self.snapshots.append(self.snapshot())
            if len(self.snapshots) > self.lag and (finished := self.pop_finished()):
                return finished
        return []

    def prefill(self):
        """Gives slots to the waiting sequences, and prefills what is new of them."""
        waiting = self.waiting
        self.waiting = []
        if not any(self.slots):  # nothing is kept of earlier weights
            self.state.copy_weights(self.lm)
        for sequence in waiting:
            if sequence not in self.slots:
                if None not in self.slots:
                    self.slots.append(None)
                self.slots[self.slots.index(None)] = sequence
        longest = max(len(sequence.ids) for sequence in waiting)
        self.ensure_capacity(len(self.slots), longest + self.max_new_tokens)
        new = [(sequence.ids[sequence.num_cached:], sequence) for sequence in waiting]
        for chunk in micro_batches(new, self.prefill_tokens):
            self.prefill_chunk(chunk)
        for sequence in waiting:
            sequence.num_cached = len(sequence.ids)
        self.compact([*range(self.num_active), *map(self.slots.index, waiting)])

    def prefill_chunk(self, chunk):
        """One forward pass over [(new ids, sequence)]."""
        if self.gpu and len(chunk) == 1:  # the same twice: one row would be compiled separately
            chunk = [chunk[0], chunk[0]]
        new, sequences = zip(*chunk)
        slot = [self.slots.index(sequence) for sequence in sequences]
        num_cached = [sequence.num_cached for sequence in sequences]
        length = [len(ids) for ids in new]
        kv_length = max(map(sum, zip(num_cached, length))) if any(num_cached) else 0
        _, kv_length = self.round_up(1, kv_length)
        ids = pad_sequence([torch.tensor(x) for x in new], batch_first=True)
        ids = to_device_async(ids, self.lm.device)
        slot, num_cached, length = to_device_async([slot, num_cached, length], self.lm.device)
        uniforms = to_device_async(np.stack([s.uniforms for s in sequences]), self.lm.device)
        self.state.prefill(ids, slot, num_cached, length, uniforms, kv_length)

    def step(self):
        """One decoding step for all active slots."""
        active = self.slots[:self.num_active]
        for sequence in active:
            sequence.num_cached += 1
        longest = max(sequence.num_cached for sequence in active)
        self.decode_step(*self.round_up(self.num_active, min(longest, self.state.max_length)))
        self.steps += 1

    def decode_one_token(self, n: int, kv_length: int) -> None:
        """Samples a token for each of the first n slots, runs it through the model, and reads Q
        where it was the last. Finished slots among them are padding. There is no host sync, so the
        step can be captured."""
        token = self.state.sample(n)
        hidden = self.state.forward(token[:, None], self.state.position[:n, None], kv_length)[:, 0]
        self.state.advance(n, token, hidden)

    def snapshot(self):
        """Copies the state of the active slots to the host -> (their sequences, the copies, the
        CUDA event after which the copies are complete)."""
        state, n = self.state, self.num_active
        tensors = (state.active, state.num_generated, state.position, state.tokens, state.logp,
                   self.lm.r_max * state.readouts)
        copies = [x[:n].to("cpu", non_blocking=True, copy=self.lag > 0) for x in tensors]
        if not state.hidden.is_cuda:
            return self.slots[:n], copies, None
        return self.slots[:n], copies, torch.cuda.current_stream(self.lm.device).record_event()

    def pop_finished(self):
        """-> [(key, Response)] of the sequences that are finished in the oldest snapshot, whose row
        i is of the sequence that was in slot i then. It may be in another slot by now. The other
        active slots move up."""
        sequences, copies, event = self.snapshots.pop(0)
        active, num_generated, position, tokens, logp, value = copies
        if event:
            event.synchronize()
        finished = []
        keep = dict.fromkeys(range(self.num_active))  # slots, as a set with an order
        for i, (sequence, is_active) in enumerate(zip(sequences, active.tolist())):
            # with a lag, a slot that an earlier snapshot showed as finished is in this one, too
            handed_out = sequence.response is not None
            if is_active or handed_out:
                continue
            n = num_generated[i].item()
            v, q = value[i].tolist()
            response = Response(tokens[i, :n].tolist(), logp[i, :n].tolist(), v, q)
            finished.append((sequence.key, response))
            sequence.response = response.ids
            sequence.num_cached = position[i].item()
            slot = self.slots.index(sequence)
            del keep[slot]
            if self.context == "window":
                self.slots[slot] = None
                del self.sequences[sequence.key]
        if finished:
            self.compact([*keep])
        return finished

    # ---- where sequences are, and how large the decode state is
    def compact(self, keep):
        """Brings the slots `keep`, which are decoded from now on, into [0, len(keep)): each of them
        that lies behind changes places with one in front that is not kept (a free slot or, in
        "full", an idle conversation). With keep = [0, 2, 3], slots a b c d become a d c b."""
        self.num_active = len(keep)
        not_kept = sorted(set(range(self.num_active)) - set(keep))
        behind = [slot for slot in keep if slot >= self.num_active]
        source = [*range(len(self.slots))]  # for each slot, the one whose contents it gets
        for front, back in zip(not_kept, behind):
            source[front] = back
            source[back] = front
        self.slots = [self.slots[slot] for slot in source]
        moves = [(target, slot) for target, slot in enumerate(source)
                 if target != slot and self.slots[target] is not None]
        if moves:
            kv_length = max(self.slots[target].num_cached for target, _ in moves)
            self.state.copy_slots(moves, kv_length)

    def ensure_capacity(self, slots, longest):
        """Makes room for `slots` sequences of `longest` tokens."""
        state = self.state
        had = len(state.position), state.max_length
        if self.context == "full" and longest > state.max_length:
            # grow by half: conversations grow at every turn, and each time the cache is copied
            longest = max(longest, min(state.max_length * 3 // 2, self.limit + self.max_new_tokens))
        size = self.round_up(max(slots, had[0]), max(longest, had[1]))
        if size != had:
            state.resize(*size)
            self.decode_step = self.new_decode_step()  # captured graphs hold the old addresses

    def round_up(self, n, kv_length):
        """On a GPU, rounds numbers of slots and positions up, so that there are few sizes to
        capture, never a batch of one, and aligned masks."""
        if not self.gpu:
            return n, kv_length
        step = 2 if n <= 2 else 4 if n <= 16 else 16
        wide = 256 if kv_length <= 4096 else 1024
        return -(-n // step) * step, -(-kv_length // wide) * wide


# ------------------------------------------------------------------- the hf engine: transformers

def generate_with_hf(sampler: Sampler) -> list:
    """Responses to all that was added, by Hugging Face generate, with V and Q from a scoring pass.
    -> [(key, Response)]."""
    lm = sampler.lm
    sequences = sampler.waiting
    sampler.forget()  # this engine keeps no conversation
    prompts = [sequence.ids for sequence in sequences]
    uniforms = to_device_async(np.stack([s.uniforms for s in sequences]), lm.device)
    logps = []  # of each step
    ids = pad_sequence([torch.tensor(x) for x in prompts], batch_first=True, padding_value=-1,
                       padding_side="left").to(lm.device)
    pad = lm.value_ids[0]  # never sampled, so it marks the end of a finished response

    def force_token(input_ids, scores):
        """A logits processor that leaves only the token drawn by sample_token."""
        u = uniforms[:, min(len(logps), sampler.max_new_tokens - 1)]  # a GPU may run one step more
        token, logp = sample_token(scores, u, lm.value_index, sampler.temperature)
        logps.append(logp)
        return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)

    model = lm.model
    settings = model.generation_config
    attention = model.config._attn_implementation
    hook = lm.head.register_forward_hook(  # logits are float32 everywhere else too
        lambda head, inputs, output: output if output.dtype == torch.float32 else (
            float32_logits(inputs[0].flatten(0, -2), head).view(output.shape)))
    try:
        # the model's own settings, such as top-k, would change the policy
        model.generation_config = transformers.GenerationConfig()
        # generate passes masks of the padding on the left, which transformers' own attention takes
        # as they are; "grouped" is ours (hf/attention.py)
        model.config._attn_implementation = attention.replace("grouped", "sdpa")
        out = model.generate(
            ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=False,
            max_new_tokens=sampler.max_new_tokens, eos_token_id=list(lm.stop_ids),
            pad_token_id=pad, logits_processor=transformers.LogitsProcessorList([force_token]))
    finally:
        hook.remove()
        model.generation_config = settings
        model.config._attn_implementation = attention
    sampled = [[i for i in row if i != pad] for row in out[:, ids.shape[1]:].tolist()]
    samples = [(s + x, [(len(s), len(s) + len(x))]) for s, x in zip(prompts, sampled)]
    scores = lm.score(make_batch(samples).to(lm.device))
    v_q = lm.r_max * torch.stack([scores.p_v, scores.p_q], 1)  # (R, 2)
    sampler.steps += len(logps)
    rows = zip(sequences, sampled, torch.stack(logps, 1).tolist(), v_q.tolist())
    return [(s.key, Response(x, logp[:len(x)], v, q)) for s, x, logp, (v, q) in rows]


# ---------------------------------------------------------------------------------------- episodes

ENV_LATENCY_STEPS = 8  # decoding steps that a game gets for its answer before we wait for it
# Streams of random numbers: each use has its own. The k-th repetition of an evaluation
# (tools/prompted.py) has EVALUATION + k, so that must be the last one.
ROLLOUT, SHUFFLE, TASKS, DEMONSTRATIONS, PROBE, EVALUATION = range(6)


class End(Enum):
    """Why an episode ended."""

    TERMINATED = "terminated"  # by the environment: won, or lost for good
    HORIZON = "horizon"  # the maximum number of turns, or truncated by the environment itself
    CONTEXT_OVERFLOW = "context_overflow"  # the next prompt would not fit


@dataclass
class Turn:
    """One turn of one trajectory: first what an update learns from, then what logs and pages show.
    In "full" context, prompt_ids holds only the tokens since the last response, so that a
    trajectory is the concatenation of its turns' prompt_ids and action_ids."""

    traj: int
    turn: int  # from 0
    prompt_ids: list
    action_ids: list  # the tokens the policy chose, the stop token included
    logp: list  # log-probs of action_ids, as in Response
    v: float  # V and Q when the turn was sampled, in units of return, as in Response
    q: float
    reward: float
    invalid: bool  # the response breaks the format; see envs.Env.parse_action

    admissible: bool  # the game offered the action; in the shop, any search is admissible
    won: bool
    score: float  # the environment's, 0 to 1
    task: str | int  # its id
    category: str
    messages: list  # the chat messages to which it responds, as they were sent
    text: str  # of the response
    action: object  # text, or anything else that JSON can hold
    end: End | None = None  # of the last turn: why the episode ended (it is what `done` asks)
    obs: object = ""  # the observation, text or chat messages, of which `messages` were made
    metrics: dict = field(default_factory=dict)  # the environment's own, so far in this episode
    advantage: float = field(default=float("nan"), compare=False)  # normalized; set by an update

    @property
    def done(self) -> bool:
        """Whether it is the last turn. A truncated episode is terminal: its last bootstrap is 0."""
        return self.end is not None

    @property
    def truncated(self) -> bool:
        return self.end in (End.HORIZON, End.CONTEXT_OVERFLOW)

    @property
    def context_overflow(self) -> bool:
        return self.end is End.CONTEXT_OVERFLOW


def make_sequences(turns: list[Turn], context: str) -> list[list[Turn]]:
    """Turns, in order -> the turns of each training sequence: one in `window`, those of a
    trajectory in `full`. ValueError: a turn was changed, or in `full` one is missing."""
    for turn in turns:
        as_number(turn.reward, f"the reward of turn {turn.turn} of trajectory {turn.traj}")
        if len(turn.logp) != len(turn.action_ids):
            raise ValueError(f"turn {turn.turn} of trajectory {turn.traj} has "
                             f"{len(turn.action_ids)} response tokens and {len(turn.logp)} "
                             "log-probs")
    if context == "window":
        return [[turn] for turn in turns]
    sequences = []
    for turn in turns:
        if not sequences or turn.traj != sequences[-1][0].traj:
            sequences.append([])
        if turn.turn != len(sequences[-1]):
            raise ValueError(f"turn {len(sequences[-1])} of trajectory {turn.traj} is missing, or "
                             "the turns are not in order; context full needs all of them")
        sequences[-1].append(turn)
    return sequences


def ids_and_spans(sequence: list[Turn]) -> tuple[list, list]:
    """A training sequence's token ids, and the span (start, end) of each of its responses."""
    ids, spans = [], []
    for turn in sequence:
        ids += turn.prompt_ids + turn.action_ids
        spans.append((len(ids) - len(turn.action_ids), len(ids)))
    return ids, spans


def uniform_numbers(seed: tuple, traj: int, turn: int, n: int) -> np.ndarray:
    """The n random numbers in [0, 1) of one turn. seed: such as (seed, iteration, stream)."""
    return np.random.default_rng([*seed, traj, turn]).random(n, dtype=np.float32)


GAME, MODEL = "game", "model"  # whose answer an episode waits for


def play_episode(traj, task, sampler, pool, seed, make_messages):
    """Plays one game -> (its turns, its PromptBuilder). This is a generator, so that many episodes
    can be played side by side: after a request to the game or to the model it yields GAME or MODEL,
    and `trajectories` sends it the answer. One turn after the other:

        pool.start               yield GAME   <- obs, info
        sampler.add(prompt)      yield MODEL  <- Response
        pool.step(action)        yield GAME   <- obs, reward, terminated, truncated, info
        sampler.add(prompt)      ...          until the game is over
    """
    lm, turns, tools = sampler.lm, [], pool.env.tool_schemas()
    conversation = []  # in "full", the token ids so far
    pool.start(traj, task)
    obs, info = yield GAME
    builder = pool.env.prompt_builder(obs, info)
    while not (turns and turns[-1].done):
        room = sampler.limit - len(conversation)
        candidates = make_messages(traj, turns, builder)  # from the longest to the shortest
        messages, ids = first_that_fits(candidates, room, lm.chat, conversation, tools)
        if ids is None:
            if turns:
                turns[-1].end = End.CONTEXT_OVERFLOW
            pool.drop(traj)
            break
        u = uniform_numbers(seed, traj, len(turns), sampler.max_new_tokens)
        sampler.add(traj, conversation + ids, u)
        response = yield MODEL
        text = lm.text(response.ids)
        action, valid = pool.parse_action(lm.chat.response_prefix + text)
        pool.step(traj, action)
        obs, reward, terminated, truncated, info = yield GAME
        turns.append(Turn(
            traj=traj, turn=len(turns), task=task, prompt_ids=ids, action_ids=response.ids,
            logp=response.logp, v=response.v, q=response.q, reward=reward,
            end=End.TERMINATED if terminated else End.HORIZON if truncated else None,
            # (the pool has filled in what the environment left out of info)
            invalid=not valid, admissible=builder.accepts(action, valid), won=info["won"],
            score=info["score"], category=info["category"], messages=messages, text=text,
            action=action, obs=builder.obs, metrics=info.get("metrics", {})))
        builder.record(action, obs, info)
        if sampler.context == "full":
            conversation = [*conversation, *ids, *response.ids]
    sampler.drop(traj)
    return turns, builder


def first_that_fits(candidates, room: int, chat, conversation, tools) -> tuple:
    """The first of several lists of messages that has at most `room` tokens, and its token ids;
    (None, None): none has."""
    for messages in candidates:
        ids = chat.encode_messages(messages, conversation, tools)
        if len(ids) <= room:
            return messages, ids
    return None, None


def trajectories(sampler, tasks: list, pool, *, seed: int | tuple = 0, trajs=None,
                 max_num_seqs: int | None = None, history: int = 2,
                 make_messages: Callable | None = None, label: str = "rollout",
                 interrupted: Callable[[], bool] | None = None,
                 check: Callable | None = None) -> Iterator[tuple]:
    """Plays each of the tasks, max_num_seqs of them side by side (default: all), and yields (traj,
    turns, PromptBuilder) as soon as an episode is over. `trajs` are the trajectories' numbers
    (default 0, 1, ...), which with `seed` determine the random numbers. make_messages(traj, turns,
    builder) can replace builder.messages. An episode whose next prompt does not fit is
    truncated, and has no turns if that was its first. `label` names the progress bar. Once
    interrupted() is true, which is asked between decoding steps, the episodes that are not over are
    given up. check(sampler, response) -> response sees each response first, and can refuse it.

    Games compute while the model decodes. The answer to an action is collected a fixed number of
    decoding steps after it was sent (ENV_LATENCY_STEPS), or sooner if more episodes wait for games
    than for the model. The clock plays no role, so a rollout with the same weights repeats to the
    last bit. Answers of an asynchronous environment (envs.Env) are collected as they come, so such
    a rollout repeats up to rounding."""
    trajs = [*(range(len(tasks)) if trajs is None else trajs)]
    if not len(tasks) == len(trajs) == len({*trajs}):
        raise ValueError(f"{len(tasks)} tasks need as many different numbers, and trajs has "
                         f"{len({*trajs})}")
    if max_num_seqs is not None and max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
    if not sampler.lm.chat:
        raise ValueError("the tokenizer has no chat template, which prompts need")
    make_messages = make_messages or (
        # (with more past turns than there are, all prompts would be the same)
        lambda traj, turns, builder: builder.messages(sampler.context, min(history, len(turns))))
    seed = (seed,) if isinstance(seed, (int, np.integer)) else seed
    if not isinstance(seed, (tuple, list)) or not all(
            isinstance(n, (int, np.integer)) and n >= 0 for n in seed):
        raise ValueError(f"seed is {seed!r}; it must be a whole number from 0 on, or several")
    waiting = [*zip(trajs, tasks)]
    playing = {}  # traj: its play_episode
    pending = {}  # traj that waits for its game: decoding step of the request; oldest first
    asynchronous = pool.env.asynchronous
    sampler.weights_changed(sampler.lm)

    def go_on(traj, answer):
        """Sends an episode the answer it waits for, up to its next request. StopIteration: it is
        over, which can only be after an answer of its game."""
        if playing[traj].send(answer) == GAME:
            pending[traj] = sampler.steps

    with progress(label, unit="turns") as bar:
        while waiting or playing:
            if interrupted and interrupted():
                for traj in playing:  # those that are not over
                    pool.drop(traj)
                sampler.forget()
                return
            while waiting and len(playing) < (max_num_seqs or len(tasks)):
                traj, task = waiting.pop(0)
                playing[traj] = play_episode(traj, task, sampler, pool, seed, make_messages)
                go_on(traj, None)  # up to its first request
            pool.load([task for _, task in waiting[:16]])  # in the background

            # decode until the oldest request is due; if none ever is, for as many steps, so that
            # answers that come, and `interrupted`, are asked for often enough
            oldest = sampler.steps if asynchronous else next(iter(pending.values()), sampler.steps)
            steps = oldest + ENV_LATENCY_STEPS - sampler.steps
            for traj, response in sampler.run(steps):
                if traj not in playing or traj in pending:
                    raise ValueError(f"{type(sampler).__name__} returned a response for {traj!r}, "
                                     "which waits for none")
                go_on(traj, check(sampler, response) if check else response)
                bar.update()
            if playing and not pending and not sampler.busy:
                raise ValueError(f"{type(sampler).__name__} has no response for trajectory "
                                 f"{next(iter(playing))}, and says that it is not busy")

            # collect the games' answers: all of them if more episodes wait for games than for the
            # model, else those that are due. `pending` is in the order of the requests
            if asynchronous:  # those that are there; wait if there is nothing to decode meanwhile
                due = pool.answered([*pending], seconds=0 if sampler.busy else 1)
            else:
                all_due = len(pending) > sampler.busy
                due = [traj for traj, step in pending.items()
                       if all_due or step + ENV_LATENCY_STEPS <= sampler.steps]
            late = due  # `interrupted` is asked while the slowest of them is waited for, too
            while late and not (interrupted and interrupted()):
                there = pool.answered(late, seconds=1)
                late = [traj for traj in late if traj not in there]
            if late:
                continue
            for traj in due:
                del pending[traj]
            for traj, answer in zip(due, pool.gather(due)):
                try:
                    go_on(traj, answer)
                except StopIteration as finished:
                    del playing[traj]
                    over = len(tasks) - len(waiting) - len(playing)
                    bar.set_postfix_str(f"{over} of {len(tasks)} episodes are over", False)
                    yield traj, *finished.value


def rollout(sampler: SamplerProtocol, tasks: list, pool, **options) -> list[Turn]:
    """Plays every task, with the options of `trajectories` -> all turns of the episodes that are
    over, ordered by trajectory and turn. A task whose first prompt does not fit has none.
    ValueError: no task's prompt fits (with several ranks, train.make_minibatches says so), or a
    response is none of the policy's."""
    episodes = [*trajectories(sampler, tasks, pool, check=checked, **options)]
    turns = [turn for _, played, _ in episodes for turn in played]
    all_over = len(episodes) == len(tasks) > 0
    if all_over and not turns and world_size() == 1:  # other ranks may have turns
        raise no_prompt_fits(sampler, tasks[0])
    return sorted(turns, key=lambda turn: (turn.traj, turn.turn))


def checked(sampler, response) -> Response:
    """A response with plain numbers, whatever its sampler returned. ValueError: it is none of the
    policy's, as SamplerProtocol describes them."""
    what, lm = f"{type(sampler).__name__} returned a response", sampler.lm
    try:
        ids, logp = [*map(operator.index, response.ids)], [*map(float, response.logp)]
        v, q = (math.nan if x is None else float(x) for x in (response.v, response.q))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        shown = " ".join(repr(response).split())
        raise ValueError(f"{what} that is none: {shown:.200} ({error}). A rollout.Response is "
                         "expected: ids and logp are lists of numbers, v and q are numbers, if it "
                         "has them") from None
    if not 0 < len(ids) <= sampler.max_new_tokens:
        raise ValueError(f"{what} of {len(ids)} tokens; 1 to {sampler.max_new_tokens}, with the "
                         "stop token, are expected")
    rows = len(lm.head.weight)
    if unknown := [i for i in ids if not 0 <= i < rows]:
        raise ValueError(f"{what} with token {unknown[0]}, and the model has those from 0 to "
                         f"{rows - 1}")
    if len(ids) < sampler.max_new_tokens and not lm.stopped(ids):
        raise ValueError(f"{what} that ends with token {ids[-1]}, before it has "
                         f"{sampler.max_new_tokens} tokens; the stop token, one of "
                         f"{lm.stop_ids}, belongs to it")
    if len(ids) != len(logp):
        raise ValueError(f"{what} of {len(ids)} tokens and {len(logp)} log-probs; one for each "
                         "token is expected")
    reserved = [x for token, x in zip(ids, logp) if token in lm.value_ids]
    if np.isfinite(reserved).any():  # where logits are NaN, any token can be drawn
        raise ValueError(f"{what} with w+ or w-, {lm.value_ids}, which the policy never uses (Eq. "
                         "3)")
    return Response(ids, logp, v, q)


def no_prompt_fits(sampler, task) -> ValueError:
    room = sampler.lm.max_length - sampler.max_new_tokens
    remedy = "raise --max_prompt"
    if sampler.limit >= room:
        remedy = (f"with --max_new_tokens {sampler.max_new_tokens}, no more of the model's "
                  f"{sampler.lm.max_length} are left. Start a new run with fewer, or with another "
                  "model")
    return ValueError(f"the first prompt of {task!r}, and of every other task, needs more than "
                      f"{max(0, sampler.limit)} tokens: {remedy}")


def main():
    import envs
    from runtime.cli import Parser, one_line_errors
    parser = Parser(description="Samples a response to one prompt with both engines.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, hub id or bare name")
    with one_line_errors("rollout.py"):
        lm, env = load(parser.parse_args().model), envs.make_env("house")
        obs, info = env.reset(envs.tasks("house", "train")[0])
        print(prompt := env.prompt_builder(obs, info).window_prompt())
        for engine in ("kv", "hf"):
            response, = Sampler(lm, engine, max_new_tokens=32).generate([prompt])
            print(f"\n{engine}: V {response.v:.3f}, Q {response.q:.3f}, {len(response.ids)} tokens "
                  f"of log-prob {sum(response.logp):.4f}\n{lm.text(response.ids)}")


if __name__ == "__main__":
    main()
