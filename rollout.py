"""Playing the tasks: one trajectory per task, many of them side by side.

    Sampler   token sequences -> responses, by one of two engines that agree up to rounding
                kv   our own loop over K/V tensors, with continuous batching
                hf   Hugging Face `generate`, for comparison and for models kv cannot serve
    rollout   tasks -> turns: prompt, sample a response, act, until every game is over

Tokens are drawn by uniform numbers that depend on (seed, iteration, trajectory, turn) alone, so
engine, rows and ranks matter only by rounding. The past is shown in one of two ways (`context`):
`window` makes each turn's prompt anew, of the last turns; in `full`, which the paper does not have,
the conversation and its cache grow. Shapes: R rows, T tokens, S positions, D width, H' heads of
size E that have keys and values of their own.
    python rollout.py [--model NAME]       samples one prompt with both engines
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence

from model import (all_full, choose, excess_error, float32_logits, in_float32, load,
                   make_batch, micro_batches, restricted_log_softmax)

# ------------------------------------------------------------------------ the kv engine's state

class Layer:
    """Keys and values of one layer, (R, H', S + 1, E); padding writes to the last position."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.write = self.span = self.read = None  # Sampler.forward says where to

    def update(self, k, v, *args, **kwargs):
        """Writes k, v (R, H', T, E) where `forward` said -> keys and values to attend to."""
        row, at = self.write  # they broadcast to (R, T)
        # through keys.transpose(1, 2)[row, at], the compiled step would copy the whole cache
        self.keys[row, :, at] = k.transpose(1, 2)
        self.values[row, :, at] = v.transpose(1, 2)
        if not self.span:  # the rows are new
            return k, v
        rows = slice(len(k)) if self.read is None else self.read
        return self.keys[rows, :, :self.span], self.values[rows, :, :self.span]


class Rows:
    """Many sequences side by side on the device, a row each, every row with its own length: keys
    and values, and what a decoding step reads and writes. The model takes it for its cache, so it
    speaks the part of transformers' cache that decoders use."""

    STATE = ("hidden", "at", "count", "going", "u", "tokens", "logp", "p")

    def __init__(self, layers, hidden, max_new):
        """No row yet; shapes, dtype and device are those of a model's cache layers and states."""
        self.layers = [Layer(x.keys[:0, :, :1], x.values[:0, :, :1]) for x in layers]
        self.longest = 0  # S
        self.hidden = hidden.new_zeros(0, hidden.shape[-1])  # (R, D) at the last token
        self.at = hidden.new_zeros(0, dtype=torch.long)  # (R,) the position of the next token
        self.count = hidden.new_zeros(0, dtype=torch.long)  # (R,) tokens drawn
        self.going = hidden.new_zeros(0, dtype=torch.bool)  # (R,) whether open rows go on
        # a column for each token, and a last one that serves rows that have ended
        self.u = hidden.new_zeros(0, max_new + 1, dtype=torch.float32)  # the uniform numbers
        self.tokens = hidden.new_zeros(0, max_new + 1, dtype=torch.long)
        self.logp = hidden.new_zeros(0, max_new + 1, dtype=torch.float32)
        self.p = hidden.new_zeros(0, 2, dtype=torch.float32)  # the readouts of V and Q, Eq. 1

    def grow(self, rows, longest):
        """Makes room for so many rows of that length, and keeps what there is."""
        more = rows - len(self.at)
        longer = longest - self.longest
        for layer in self.layers:  # one by one, so that only one exists twice
            layer.keys = F.pad(layer.keys, (0, 0, 0, longer, 0, 0, 0, more))
            layer.values = F.pad(layer.values, (0, 0, 0, longer, 0, 0, 0, more))
        for name in self.STATE:
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
        self.longest = longest

    def copy(self, moves, span):
        """Of each (target, source), row target becomes what row source is, up to position span."""
        target, source = sent(moves, self.at.device).T
        for layer in self.layers:
            for x in (layer.keys, layer.values):
                x[target, :, :span] = x[source, :, :span]
        for name in self.STATE:
            getattr(self, name)[target] = getattr(self, name)[source]

    def update(self, k, v, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(k, v)

    def get_seq_length(self, layer_idx=0):
        return 0  # it is asked for where positions are not given, and they always are


def sent(numbers, device):
    """Numbers of the host as a tensor on the device, without a wait for what that has yet to do."""
    x = torch.as_tensor(numbers)
    return (x.pin_memory() if torch.cuda.is_available() else x).to(device, non_blocking=True)


# ------------------------------------------------------------------------------------ the sampler

class Response(NamedTuple):
    ids: list  # the tokens the policy chose, the stop token included
    logp: list  # their log-probs, Eq. 3, at the sampling temperature (greedy: at 1)
    v: float  # V before the first of them, in units of return (Eq. 2)
    q: float  # Q after the last


class Sampler:
    """Draws responses of lm, a model.ActorCritic, to sequences of ids, each by its own uniforms u.

    In context "window" a sequence is forgotten when its response has ended; in "full" its cache is
    kept, and the next sequence under that name begins with it and its response. max_new: tokens
    a response may have; limit: tokens a sequence may have, the smaller of max_prompt and what the
    model leaves beside a response. ValueError where kv cannot serve the model: its answers are
    compared with plain passes of the model, unless `check` is False because that has been done."""

    def __init__(self, lm, engine="kv", context="window", max_new=512, temperature=1.0,
                 compile=False, max_prompt=None, check=True):
        self.lm, self.engine, self.context = lm, engine, context
        self.max_new, self.temperature = max_new, temperature
        self.limit = min(max_prompt or lm.max_length, lm.max_length - max_new)
        self.is_stop = torch.zeros(len(lm.head.weight), dtype=torch.bool, device=lm.device)
        self.is_stop[list(lm.stop_ids)] = True
        self.tokens_encoded = self.tokens_sampled = self.steps = 0
        self.forget()
        if engine == "kv":
            self.set_up(lm.device.type == "cuda", compile, check)

    @property
    def busy(self):
        """How many sequences have not got their responses yet."""
        return len(self.added) + self.open

    def add(self, name, sequence, u=None):
        """Queues a list of ids under a name that is not busy; u: max_new uniforms, of which greedy
        decoding needs none. ValueError: what is wrong."""
        if name is None or name in self.names[:self.open] or name in [n for n, *_ in self.added]:
            raise ValueError(f"the name {name!r} is " + (
                "no name" if name is None else "of a sequence that has no response yet"))
        if isinstance(sequence, str) or not all(isinstance(i, int) for i in sequence):
            raise ValueError("a sequence is a list of ids (int), which lm.chat.prompt(text) makes")
        if not 0 < len(sequence) <= self.limit:
            raise ValueError(f"a sequence of {len(sequence)} tokens, where 1 to {self.limit} fit")
        if not 0 <= min(sequence) <= max(sequence) < len(self.is_stop):
            raise ValueError(f"ids from {min(sequence)} to {max(sequence)}, where the model has "
                             f"those from 0 to {len(self.is_stop) - 1}")
        asked, answered = self.asked.get(name, []), self.answered.get(name, [])
        if sequence[:len(asked)] != asked or 0 < len(asked + answered) >= len(sequence):
            raise ValueError(f"{name!r} has a conversation of {len(asked + answered)} tokens, and "
                             "the sequence does not go on with it: drop(name) forgets it")
        if u is None and self.temperature == 0:
            u = [0.0] * self.max_new
        if u is None or len(u) != self.max_new:
            raise ValueError(f"{self.max_new} uniform numbers are due, one for each token of a "
                             "response; generate(prompts, seed) makes them")
        self.added.append((name, sequence, np.asarray(u, dtype=np.float32)))

    def generate(self, prompts, seed=0):
        """The common case: prompts, each a user's message or a list of ids -> a Response each."""
        ids = [self.lm.chat.prompt(p) if isinstance(p, str) else [*p] for p in prompts]
        u = [uniforms((seed,), n, 0, self.max_new) for n in range(len(ids))]
        self.forget()
        return self(range(len(ids)), ids, u)

    @torch.no_grad()
    def run(self, steps=None):
        """-> [(name, Response)] when some have ended or after so many steps; hf: of all."""
        if not self.busy:
            return []
        ended = generate(self) if self.engine == "hf" else self.kv(steps or self.max_new)
        self.tokens_sampled += sum(len(response.ids) for _, response in ended)
        return ended

    def __call__(self, names, sequences, u):
        """A whole batch -> a Response each."""
        if not len(names) == len(sequences) == len(u):
            raise ValueError(f"{len(names)} names, {len(sequences)} sequences and {len(u)} rows of "
                             "uniform numbers")
        for row in zip(names, sequences, u):
            self.add(*row)
        responses = {}
        while self.busy:
            responses |= dict(self.run())
        return [responses[name] for name in names]

    def forget(self):
        """Forgets all sequences, as is due when weights change. The rows keep their memory."""
        self.added = []
        self.asked, self.answered = {}, {}  # in "full", of each name what its row holds
        self.open = 0  # rows [0, open) are being decoded
        self.names = []  # the caller's key of each row, None where the row is free
        self.length = {}  # name: tokens in its row's cache; an upper bound while it is decoded
        self.looks = []  # that are not read yet

    def drop(self, name):
        """Forgets a conversation that is over; one that is being answered stays."""
        if name in self.names[self.open:]:
            self.names[self.names.index(name)] = None
            del self.asked[name], self.answered[name]

    # ---- the kv engine admits sequences, takes steps, hands out what has ended
    def kv(self, steps):
        """Encodes what was added, then decodes until a row has ended, for about `steps` at most."""
        if self.added:
            self.prefill()
        for _ in range(0, steps, self.stride):
            for _ in range(self.stride):
                self.step()
            self.looks.append(self.look())
            if len(self.looks) > self.late and (ended := self.collect(*self.looks.pop(0))):
                return ended
        return []

    def prefill(self):
        """Encodes what is new of the sequences that were added, and opens their rows."""
        new = [self.place(*added) for added in self.added]
        longest = max(start + len(ids) for ids, _, start, _ in new) + self.max_new
        self.reserve(len(self.names), longest)
        for chunk in micro_batches(new, self.budget):
            self.encode(chunk)
        self.added = []
        self.tokens_encoded += sum(len(ids) for ids, *_ in new)
        self.settle([*range(self.open), *(i for _, i, *_ in new)])

    def place(self, name, sequence, u):
        """Gives a sequence a row, its own if it has one -> (new ids, row, their position, u). A
        response that was changed afterwards, by encoding its text again, is new."""
        if name not in self.names:
            if None not in self.names:
                self.names.append(None)
            self.names[self.names.index(None)] = name
            self.length[name] = 0
        answered = self.answered.get(name, [])
        start = self.length[name] - len(answered)
        for old, new in zip(answered, sequence[start:]):
            if old != new:
                break
            start += 1
        self.length[name] = len(sequence)
        if self.context == "full":
            self.asked[name] = [*sequence]  # the caller's list may grow
        return sequence[start:], self.names.index(name), start, u

    def encode(self, chunk):
        """One forward pass over [(ids, row, start, u)], which fills their rows."""
        if self.gpu and len(chunk) == 1:
            chunk = chunk * 2  # a single row would be compiled once more
        rows, device = self.rows, self.lm.device
        new, index, start, u = zip(*chunk)
        length = [len(ids) for ids in new]
        span = max(map(sum, zip(start, length))) if any(start) else 0
        _, span = self.bucket(1, span)
        ids = sent(pad_sequence([torch.tensor(x) for x in new], batch_first=True), device)
        index, start, length = sent([index, start, length], device)
        column = torch.arange(ids.shape[1], device=device)
        at = torch.where(column < length[:, None], start[:, None] + column, rows.longest)
        hidden = self.forward(ids, at, span, index)
        hidden = hidden[torch.arange(len(chunk), device=device), length - 1]
        rows.u[index, :-1] = sent(np.stack(u), device)
        rows.at[index] = start + length
        rows.hidden[index] = hidden
        rows.count.index_fill_(0, index, 0)  # an assignment would copy the number to the device
        rows.going.index_fill_(0, index, True)
        rows.p[index, 0] = self.lm.readout(hidden)  # SAPO: V costs two dot products

    def step(self):
        """Draws one token for every open row."""
        for name in self.names[:self.open]:
            self.length[name] += 1
        longest = max(self.length[name] for name in self.names[:self.open])
        self.decoder(*self.bucket(self.open, min(longest, self.rows.longest)))
        self.steps += 1

    def decode_one_token(self, n, span):
        """Rows [0, n): draws a token, runs it through the model, and reads Q where it was the last.
        Rows that have ended are computed for nothing. The host reads nothing: CUDA graphs."""
        token = self.draw_tokens(n)
        hidden = self.forward(token[:, None], self.rows.at[:n, None], span)[:, 0]
        self.note_tokens(n, token, hidden)

    def draw_tokens(self, n):
        """Chooses a token for each row and writes it and its log-prob down -> (n,)."""
        rows, lm = self.rows, self.lm
        column = torch.where(rows.going[:n], rows.count[:n], self.max_new)[:, None]
        u = rows.u[:n].gather(1, column)[:, 0]
        logits = float32_logits(rows.hidden[:n], lm.head)
        token, logp = choose(logits, u, lm.value_index, self.temperature)
        rows.tokens[:n].scatter_(1, column, token[:, None])
        rows.logp[:n].scatter_(1, column, logp[:, None])
        return token

    def note_tokens(self, n, token, hidden):
        """Moves the rows on by their tokens, and ends those that are over."""
        rows = self.rows
        going, count = rows.going[:n], rows.count[:n]
        rows.hidden[:n] = hidden
        rows.at[:n] += going
        count += going
        ended = going & (self.is_stop[token] | (count == self.max_new))
        p_q = self.lm.readout(hidden)  # SAPO: Q costs two dot products, and to run the last token
        rows.p[:n, 1] = torch.where(ended, p_q, rows.p[:n, 1])
        going &= ~ended

    def forward(self, ids, at, span, rows=None):
        """ids and their positions `at`, (R, T) each, in `rows` (R,) or in the first R, which need
        no copy -> hidden states (R, T, D). A token sees its own row up to itself; with span 0 the
        row is new, and else it is read up to position span."""
        cache = self.rows
        index = torch.arange(len(ids), device=at.device) if rows is None else rows
        for layer in cache.layers:
            layer.write, layer.span, layer.read = (index[:, None], at), span, rows
        if span:
            unseen = torch.arange(span, device=at.device) > at[:, None, :, None]
            zeros = torch.zeros(unseen.shape, dtype=cache.hidden.dtype, device=at.device)
            mask = zeros.masked_fill(unseen, float("-inf"))
        else:
            mask = self.lm.causal(ids).get("attention_mask")
        real = at % min(cache.longest, self.lm.max_length)  # padding, at S, may have any place
        return self.body(input_ids=ids, position_ids=real, attention_mask=mask, use_cache=True,
                         **{self.cache_name: cache}).last_hidden_state

    def look(self):
        """-> names and columns of the open rows, and the CUDA event after which they are there."""
        rows, n = self.rows, self.open
        columns = rows.going, rows.count, rows.at, rows.tokens, rows.logp, self.lm.r_max * rows.p
        columns = [x[:n].to("cpu", non_blocking=True, copy=self.late > 0) for x in columns]
        stream = torch.cuda.current_stream(rows.at.device) if rows.at.is_cuda else None
        return self.names[:n], columns, stream and stream.record_event()

    def collect(self, names, columns, event):
        """-> [(name, Response)] of the rows that had ended at a look; the others move up."""
        if event:
            event.synchronize()
        going, count, at, tokens, logp, value = columns
        responses = []
        keep = dict.fromkeys(range(self.open))
        for i, (name, goes_on) in enumerate(zip(names, going.tolist())):
            if goes_on or name is None:
                continue
            n = count[i].item()
            v, q = value[i].tolist()
            responses.append((name, Response(tokens[i, :n].tolist(), logp[i, :n].tolist(), v, q)))
            self.length[name] = at[i].item()
            row = self.names.index(name)
            del keep[row]
            if self.context == "window":
                self.names[row] = None
            else:
                self.answered[name] = responses[-1][1].ids
            for later, *_ in self.looks:  # they show this row too
                later[later.index(name)] = None
        if responses:
            self.settle([*keep])
        return responses

    # ---- where rows lie, and how large they are
    def settle(self, keep):
        """Brings the rows `keep` to the front; idle conversations there take the places left."""
        self.open = len(keep)
        moves = []
        gaps = sorted(set(range(self.open)) - set(keep))
        for gap, behind in zip(gaps, [i for i in keep if i >= self.open]):
            self.names[gap], self.names[behind] = self.names[behind], self.names[gap]
            moves.append((gap, behind))
            if self.names[behind] is not None:
                moves.append((behind, gap))
        if moves:
            self.rows.copy(moves, max(self.length[self.names[target]] for target, _ in moves))

    def reserve(self, rows, longest):
        """Makes room for so many rows of that length."""
        had = self.rows
        if self.context == "full" and longest > had.longest:
            # by half, because a conversation that grows at every turn would be copied every time
            longest = max(longest, min(had.longest * 3 // 2, self.limit + self.max_new))
        size = self.bucket(max(rows, len(had.at)), max(longest, had.longest))
        if size != (len(had.at), had.longest):
            had.grow(*size)
            self.decoder = self.new_decoder()  # what was captured points to where the rows were

    def bucket(self, n, span):
        """On a GPU, both rounded up: fewer graphs to capture, never one row alone, even masks."""
        if not self.gpu:
            return n, span
        step = 2 if n <= 2 else 4 if n <= 16 else 16
        wide = 256 if span <= 4096 else 1024
        return -(-n // step) * step, -(-span // wide) * wide

    # ---- how it computes
    @torch.no_grad()
    def set_up(self, gpu, compile, check):
        """Makes rows of the shapes of the model's own cache, chooses the fastest way to compute
        that gives right answers, and remembers it in lm.fastest."""
        self.gpu = gpu
        self.stride = 4 if gpu else 1  # steps between looks
        self.late = 1 if gpu else 0  # the host reads what was there a look ago, and never waits
        self.budget = 16384 if gpu else 2048  # padded tokens of a prefill's forward pass
        self.body = body = self.lm.model.base_model
        self.new_decoder = lambda: self.decode_one_token
        try:
            rope = str(getattr(body.config, "rope_parameters", ""))
            if not all_full(body) or "'dynamic'" in rope or "'longrope'" in rope:
                raise ValueError("not every layer attends to all that came before, or positions "
                                 "depend on length")
            theirs = body(input_ids=torch.tensor([[0]], device=self.lm.device), use_cache=True)
            # transformers has had the first name since 5.24
            self.cache_name = "cache" if "cache" in theirs else "past_key_values"
            self.rows = Rows(theirs[self.cache_name].layers, theirs.last_hidden_state, self.max_new)
            compare = check_against_reference if check else lambda sampler: ""
            self.decoder, way = self.new_decoder(), (False, False)
            if gpu or compile:
                from machine.fast import accelerate
                ways = [(gpu, compile), (gpu, False), (False, compile), way]
                if not check:
                    ways = [self.lm.fastest.get((self.context, compile), ways[0])]
                way = accelerate(self, compare, ways)
            elif why := compare(self):
                raise ValueError(why)
            if check:
                self.lm.fastest[self.context, compile] = way
        except (ValueError, AttributeError, TypeError, LookupError) as error:
            why = "" if isinstance(error, ValueError) else "it needs a cache of its own, "
            raise ValueError(f"the kv engine cannot serve {type(self.lm.model).__name__}, use "
                             f"--engine hf: {why}{error}") from None


# ----------------------------------------- the other engine, and a comparison with the model itself

def generate(sampler):
    """Responses to all that was added, by Hugging Face's `generate`; V and Q by a scoring pass."""
    lm = sampler.lm
    names, sequences, u = zip(*sampler.added)
    sampler.added = []
    u = sent(np.stack(u), lm.device)
    drawn = []  # of each step the log-probs
    ids = pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=-1,
                       padding_side="left").to(lm.device)
    pad = lm.value_ids[0]  # it fills rows that have ended, and is never drawn itself

    def draw(input_ids, scores):  # leaves `generate` no choice but the token of `choose`
        now = u[:, min(len(drawn), sampler.max_new - 1)]  # a GPU runs a step more than it needs
        token, logp = choose(scores, now, lm.value_index, sampler.temperature)
        drawn.append(logp)
        return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)

    model = lm.model
    settings = model.generation_config
    attention = model.config._attn_implementation
    logits = lm.head.register_forward_hook(  # in float32, as everywhere else
        lambda head, inputs, output: output if output.dtype == torch.float32 else (
            float32_logits(inputs[0].flatten(0, -2), head).view(output.shape)))
    try:
        # a top-k of its own would change the policy
        model.generation_config = transformers.GenerationConfig()
        model.config._attn_implementation = attention.replace("grouped", "sdpa")  # knows padding
        out = model.generate(
            ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=False,
            max_new_tokens=sampler.max_new, eos_token_id=list(lm.stop_ids), pad_token_id=pad,
            logits_processor=transformers.LogitsProcessorList([draw]))
    finally:
        logits.remove()
        model.generation_config = settings
        model.config._attn_implementation = attention
    said = [[i for i in row if i != pad] for row in out[:, ids.shape[1]:].tolist()]
    samples = [(s + x, [(len(s), len(s) + len(x))]) for s, x in zip(sequences, said)]
    v_q = lm.r_max * torch.stack(lm.score(make_batch(samples).to(lm.device))[2:], 1)  # (R, 2)
    sampler.tokens_encoded += sum(map(len, sequences))
    sampler.steps += len(drawn)
    columns = zip(names, said, torch.stack(drawn, 1).tolist(), v_q.tolist())
    return [(name, Response(x, logp[:len(x)], v, q)) for name, x, logp, (v, q) in columns]


CHECK_PROMPTS = (  # of several lengths
    "You are in the middle of a room. Looking around you, you see a desk 1, a drawer 1, a fridge 1 "
    "and a cabinet 1. Your task is to: put a cool mug in desk. Reason, then give one command.",
    "What is the capital of France?", "Count from one to twenty, in words.", "go to",
    "List three animals that live in the sea, and say in one sentence what each of them eats.",
    "You open the drawer 1. In it, you see a pen 1 and a key 2. What do you do next?",
    "Write a short letter to a friend who has moved to another town and misses the old one.")
CHECK_STEPS = 20  # tokens of each response


def check_prompt(lm, text, before=()):
    """-> ids. A model without a chat template reads the text alone."""
    return lm.chat.prompt(text, before) if lm.chat else lm.tokenizer(text).input_ids


@torch.no_grad()
def check_against_reference(sampler):
    """Has ordinary prompts answered, in "full" twice in each conversation, and compares log-probs,
    the choice of tokens, V and Q with plain passes of the model over the whole sequences.
    -> in words what rounding does not explain, or ""."""
    lm, rounds = sampler.lm, 2 if sampler.context == "full" else 1
    stops, saved_rows = sampler.is_stop.clone(), lm.head.weight[lm.value_index]
    steps = min(CHECK_STEPS, sampler.max_new)
    room = max(1, lm.max_length // rounds - steps - 8)  # for a prompt; a GPU takes some more steps
    longest = max(len(check_prompt(lm, text)[:room]) for text in CHECK_PROMPTS)
    sequences = [([], [], []) for _ in CHECK_PROMPTS]  # ids, spans of responses, (Response, its u)
    rng = np.random.default_rng(0)
    sampler.forget()
    sampler.reserve(len(CHECK_PROMPTS), rounds * (longest + steps + 8) + sampler.max_new)
    for layer in sampler.rows.layers:
        layer.keys.zero_()  # another way may have left NaN
        layer.values.fill_(1000.0)  # what no token may attend to would show in every answer
    try:
        lm.head.weight[lm.value_index] = readout_rows(lm)
        for _ in range(rounds):
            for name, (ids, *_) in enumerate(sequences):
                ids += check_prompt(lm, CHECK_PROMPTS[name], ids)[:room]
                u = rng.random(sampler.max_new, dtype=np.float32)
                sequences[name][2].append(u)
                sampler.added.append((name, [*ids], u))
            sampler.is_stop.zero_()  # no token ends a response; in place: captured graphs read it
            ended = sampler.run(steps)
            sampler.is_stop.fill_(True)  # any token ends it
            while sampler.busy:
                ended += sampler.run()
            for name, response in ended:
                ids, spans, answers = sequences[name]
                spans.append((len(ids), len(ids) + len(response.ids)))
                ids += response.ids
                answers[-1] = response, answers[-1][:len(response.ids)]
        found, plain, exact = readings(sampler, sequences)
    finally:
        lm.head.weight[lm.value_index] = saved_rows
        sampler.is_stop.copy_(stops)
        sampler.forget()
        sampler.tokens_encoded = sampler.tokens_sampled = sampler.steps = 0
    for what in found:
        if wrong := excess_error(found[what], plain[what], exact[what]):
            return f"its {what} are off by {wrong[0]:.2g}, where rounding explains {wrong[1]:.2g}"
    return ""


def readout_rows(lm):
    """Random head rows for w+ and w-, (2, D), by which V and Q are about 0.3 R_max. By those of a
    new model, which are 0, V and Q would be right whatever hidden state they were read from."""
    ids = torch.tensor([check_prompt(lm, CHECK_PROMPTS[0])], device=lm.device)
    hidden = lm.body(ids).float()
    rows = torch.randn(2, hidden.shape[-1], generator=torch.Generator().manual_seed(0))
    return (rows.to(hidden) * 0.2 * lm.tau_v / hidden.norm(dim=-1).mean()).to(lm.head.weight)


def readings(sampler, sequences):
    """[(ids, spans of responses, [(Response, its uniforms), ...]), ...] -> three dicts of tensors
    with the same keys: the sampler's numbers, those of a plain pass, and those of one in float32.

    A choice of a token is right where u lies in the token's interval of the cumulative
    distribution. So its error is how far u lies outside of the interval in float32, and the error
    of a plain pass is how far that moves the end of any interval. At temperature 0 a choice is
    right where no token is likelier, and log-probs take the place of the intervals' ends."""
    lm, temperature = sampler.lm, sampler.temperature
    batch = make_batch([sequence[:2] for sequence in sequences]).to(lm.device)
    responses, u = zip(*(answer for sequence in sequences for answer in sequence[2]))
    u = torch.tensor(np.concatenate(u), device=lm.device)  # (M,)
    logp = torch.tensor([x for response in responses for x in response.logp], device=lm.device)
    values = torch.tensor([(response.v, response.q) for response in responses], device=lm.device)
    token = batch.ids[batch.token_row, batch.token_col]

    def hidden_states():
        return lm.model.base_model(input_ids=batch.ids, use_cache=False,
                                   **lm.causal(batch.ids)).last_hidden_state

    def distribution(hidden, some):
        """Tokens' numbers (m,) -> their log-probs (m, W), and the ends of the intervals (m, W)."""
        before = hidden[batch.token_row[some], batch.token_col[some] - 1]
        logits = float32_logits(before, lm.head) / (temperature or 1)
        logp = restricted_log_softmax(logits, lm.value_index)
        return logp, logp.exp().cumsum(-1) if temperature else logp.clamp(min=-5)

    rounded = hidden_states()
    with in_float32(lm.model.base_model):
        wide = hidden_states()
    parts = []
    for some in torch.arange(len(token), device=lm.device).split(64):  # of a whole vocabulary each
        column = token[some, None]
        plain, plain_ends = distribution(rounded, some)
        exact, ends = distribution(wide, some)
        moved = (ends - plain_ends).abs().amax(-1)
        end, logp_exact = ends.gather(1, column)[:, 0], exact.gather(1, column)[:, 0]
        outside = ends.amax(-1) - end
        if temperature:
            outside = torch.maximum(u[some] - end, end - logp_exact.exp() - u[some]).clamp(min=0)
        parts.append((plain.gather(1, column)[:, 0], logp_exact, outside, moved))
    plain, exact, outside, moved = map(torch.cat, zip(*parts))
    value_plain, value_exact = (torch.stack([
        lm.readout(x[batch.row, batch.start - 1]), lm.readout(x[batch.row, batch.end - 1])], 1)
        for x in (rounded, wide))
    zeros = torch.zeros_like(moved)
    return ({"log-probs": logp, "choices of tokens": outside, "V and Q": values / lm.r_max},
            {"log-probs": plain, "choices of tokens": moved, "V and Q": value_plain},
            {"log-probs": exact, "choices of tokens": zeros, "V and Q": value_exact})


# ----------------------------------------------------------------------------------- trajectories

ANSWER_STEPS = 8  # decoding steps a game has to answer before it is waited for
# What a seed is for; the attempts at an evaluation's game are EVALUATION, EVALUATION + 1, ...
ROLLOUT, SHUFFLE, TASKS, DEMONSTRATIONS, PROBE, EVALUATION = range(6)


@dataclass
class Turn:
    """One turn of one trajectory. In `full` context prompt_ids are only the tokens since the last
    response, so that a trajectory is the concatenation of its turns' prompt_ids and action_ids."""

    traj: int
    turn: int  # from 0
    prompt_ids: list
    action_ids: list  # what the policy chose, the stop token included
    logp: list  # log-probs of action_ids at the sampling temperature
    v: float  # V and Q at the rollout, in units of return
    q: float
    reward: float
    done: bool  # the episode ended after this turn
    truncated: bool  # it was cut short, at the horizon or as `outgrown`
    invalid: bool  # the response breaks the format; see envs.parse_action
    admissible: bool  # the game offered the action; in the shop, any search is admissible
    won: bool
    score: float  # the environment's, 0 to 1
    task: str
    category: str
    prompt: str
    text: str  # the response
    action: str
    outgrown: bool = False  # the episode ended because the next prompt would not fit
    obs: str = ""  # the observation it answers, as the environment gave it
    advantage: float = float("nan")  # Eq. 7, once it is known


def uniforms(seed, traj, turn, n):
    """The n random numbers of one turn; `seed` is a tuple of ints."""
    return np.random.default_rng([*seed, traj, turn]).random(n, dtype=np.float32)


def one_trajectory(traj, task, sampler, pool, seed, show):
    """Plays one game -> (its turns, its episode). At each `yield` it waits for the answer of the
    game or the model that it has asked, which `trajectories` sends."""
    from envs import parse_action  # here, so that the sampler can be copied with model.py alone
    lm = sampler.lm
    turns = []
    before = []  # in `full`, the ids of the conversation so far
    pool.start(traj, task)
    obs, info = yield
    episode = pool.env.episode(obs, info)
    while not (turns and turns[-1].done):
        for prompt in show(traj, turns, episode):  # from the longest to the shortest
            ids = lm.chat.prompt(prompt, before)
            if len(before) + len(ids) <= sampler.limit:
                break
        else:  # none fits
            if turns:
                turns[-1].done = turns[-1].truncated = turns[-1].outgrown = True
            pool.drop(traj)  # which forgets by itself the games that are over
            break
        u = uniforms(seed, traj, len(turns), sampler.max_new)
        sampler.add(traj, before + ids, u)
        response = yield
        text = lm.text(response.ids)
        action, valid = parse_action(text, pool.env.fallback, lm.chat.response_prefix)
        pool.step(traj, action)
        obs, reward, terminated, truncated, info = yield
        turns.append(Turn(
            traj=traj, turn=len(turns), task=task, prompt_ids=ids, action_ids=response.ids,
            logp=response.logp, v=response.v, q=response.q, reward=reward,
            done=terminated or truncated, truncated=truncated, invalid=not valid,
            admissible=episode.accepts(action), won=info["won"], score=info["score"],
            category=info["category"], prompt=prompt, text=text, action=action, obs=episode.obs))
        episode.took(action, obs, info)
        if sampler.context == "full":
            before = before + ids + response.ids
    sampler.drop(traj)
    return turns, episode


def trajectories(sampler, tasks, pool, *, seed=(0,), trajs=None, rows=None, history=2, show=None,
                 what="rollout"):
    """Plays every task once, `rows` side by side (default: all), and yields (traj, turns, episode)
    of each as soon as it is over. `trajs` names them (default 0, 1, ...) and decides, with `seed`,
    the random numbers. show(traj, turns, episode) may give other prompts than the game's. An
    episode whose next prompt does not fit ends as truncated, without a turn if it was the first.

    A game's answer is waited for ANSWER_STEPS decoding steps after it was asked, or when more games
    compute than rows are decoded: so the clock does not decide what is decoded together, and with
    the same weights a rollout repeats to the last bit. `what`: a word for the progress bar."""
    from machine.cli import progress  # here, so that the sampler can be copied without it
    with progress(what, unit="turns") as bar:
        yield from play(sampler, tasks, pool, seed, trajs, rows, history, show, bar)


def play(sampler, tasks, pool, seed, trajs, rows, history, show, bar):
    """`trajectories`, with its progress bar."""
    show = show or (lambda traj, turns, episode: episode.prompts(sampler.context, history))
    waiting = [*zip(range(len(tasks)) if trajs is None else trajs, tasks)]
    playing = {}  # trajectory: its generator
    asked = []  # (trajectory whose game computes, the step it was asked at), oldest first
    sampler.forget()
    while waiting or playing:
        while waiting and len(playing) < (rows or len(tasks)):
            traj, task = waiting.pop(0)
            playing[traj] = one_trajectory(traj, task, sampler, pool, seed, show)
            playing[traj].send(None)  # it starts its game
            asked.append((traj, sampler.steps))
        pool.load([task for _, task in waiting[:16]])  # in the background
        steps = asked[0][1] + ANSWER_STEPS - sampler.steps if asked else None
        for traj, response in sampler.run(steps):
            playing[traj].send(response)  # it acts
            bar.update()
            asked.append((traj, sampler.steps))
        due = [traj for traj, step in asked
               if len(asked) > sampler.busy or step + ANSWER_STEPS <= sampler.steps]
        asked = asked[len(due):]
        for traj, answer in zip(due, pool.gather(due)):
            try:
                playing[traj].send(answer)  # it asks the model
            except StopIteration as over:  # it has returned
                del playing[traj]
                left = len(waiting) + len(playing)
                bar.set_postfix_str(f"{len(tasks) - left} of {len(tasks)} episodes are over", False)
                yield traj, *over.value


def rollout(sampler, tasks, pool, **options):
    """Plays every task as `trajectories` does -> all turns, in order of trajectory and turn. A task
    whose first prompt does not fit has none; ValueError where no task has one."""
    turns = []
    for _, played, episode in trajectories(sampler, tasks, pool, **options):
        turns += played
    if tasks and not turns:
        room = sampler.lm.max_length - sampler.max_new
        raise ValueError(
            f"the first prompt of {episode.info['task']!r}, as of every other task, needs more "
            f"than {max(0, sampler.limit)} tokens: " + (
                "raise --max_prompt" if sampler.limit < room else
                f"no more of the model's {sampler.lm.max_length} are left beside --max_new "
                f"{sampler.max_new}. Begin anew with less, or with another model"))
    return sorted(turns, key=lambda turn: (turn.traj, turn.turn))


def main():
    import envs
    from machine.cli import Parser, one_line_errors
    parser = Parser(description="Samples one prompt with both engines.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, hub id or bare name")
    with one_line_errors("rollout.py"):
        lm, env = load(parser.parse_args().model), envs.make_env("house")
        print(prompt := env.episode(*env.reset(envs.tasks("house", "train")[0])).window_prompt())
        for engine in ("kv", "hf"):
            sampler = Sampler(lm, engine, max_new=32)
            response, = sampler([0], [lm.chat.prompt(prompt)], [uniforms((0,), 0, 0, 32)])
            print(f"\n{engine}: V {response.v:.3f}, Q {response.q:.3f}, {len(response.ids)} tokens "
                  f"of log-prob {sum(response.logp):.4f}\n{lm.text(response.ids)}")


if __name__ == "__main__":
    main()
