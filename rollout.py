"""Playing the tasks: one trajectory per task, many of them side by side.

    rollout   task -> turns: prompt, sample a response, act, until every game is over
    Sampler   prompts -> responses, by one of two engines that agree up to rounding
                kv   the handwritten loop over K/V tensors of our own: prefill, then one token at a time; a row that has finished makes
                     room at once, so nobody waits for the longest response
                hf   Hugging Face `generate`, for comparison and for models kv cannot serve

Both draw a token by one uniform number u through the inverse of the cumulative distribution, and u comes from (seed,
iteration, trajectory, turn) alone: the same seed gives the same trajectories whatever the engine, the number of rows or the rank,
up to rounding.
V is read at the last token of the context, Q at the last token the policy chose; neither w+ nor w- is ever sampled.

Two ways of showing the past (`context`): `window` builds each turn's prompt anew from the last k turns; `full` lets the
conversation grow: token ids are appended, never decoded and encoded again, and the kv cache lives across turns.

On a GPU a decoding step is a captured CUDA graph per (rows, length) bucket; on a CPU the same code runs eagerly.
Departures from the paper: none. Symbols: R rows, T tokens, S longest sequence, L layers, H heads, D head size, V vocabulary.
    python rollout.py [--model NAME] [--rows 16]       races the two samplers
"""
import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import envs
from model import all_full, attention, load, micro_batches, restricted_log_softmax

# ---------------------------------------------------------------------------------------------------------- sampling


@dataclass
class Response:
    ids: list  # the tokens the policy chose, the stop token included
    logp: list  # their log-probs under the restricted policy at the sampling temperature
    v: float  # V before the first of them, in units of return (Eq. 2)
    q: float  # Q after the last


BLOCK = 128


def choose(logits, u, value_ids, temperature):
    """(R, V) logits and (R,) uniforms in [0, 1) -> token (R,), log-prob (R,). Temperature 0 is greedy (log-prob at 1).

    The inverse of the cumulative distribution in two steps, first the block of words and then the word: a GPU would scan a
    whole vocabulary slowly. Sums are float64, and the first entry *above* u is taken: a word of probability 0 never is."""
    logp = restricted_log_softmax(logits if temperature in (0, 1) else logits / temperature, value_ids)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        p, short = logp.exp(), -logp.shape[1] % BLOCK
        p = (F.pad(p, (0, short)) if short else p).unflatten(1, (-1, BLOCK))  # (R, V / BLOCK, BLOCK)
        mass = p.sum(-1, dtype=torch.float64).cumsum(-1)
        target = u[:, None].double().clamp(max=1 - 2 ** -40) * mass[:, -1:]  # u < 1 must survive rounding
        block = torch.searchsorted(mass, target, right=True)
        inner = p.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
        rest = torch.minimum(target - F.pad(mass, (1, 0)).gather(1, block), inner[:, -1:] * (1 - 2 ** -40))
        token = block * BLOCK + torch.searchsorted(inner, rest, right=True)
    return token[:, 0], logp.gather(1, token)[:, 0]


def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention for transformers' decoders. query (R, H, T, D), key and value (R, H', S, D) with H' dividing H, attention_mask
    (R, 1, T, S) to add, or None: causal. -> (R, T, H, D), None. K and V are never repeated for the H / H' heads that share them."""
    odd = [name for name in ("softcap", "sliding_window", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        raise ValueError(f"attention with {odd[0]}")
    rows, heads, tokens, _ = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)  # with a mask: slow
    elif tokens == 1:  # K and V are most of what a decoding step reads: the heads that share them are folded into the query axis
        out = F.scaled_dot_product_attention(query.reshape(rows, key.shape[1], groups, -1), key, value, scale=scaling,
                                             attn_mask=attention_mask.expand(-1, 1, groups, -1)).reshape(rows, heads, 1, -1)
    else:  # one head of each group after the other: the mask is not repeated either
        parts = [F.scaled_dot_product_attention(q, key, value, attn_mask=attention_mask, scale=scaling)
                 for q in query.unflatten(1, (-1, groups)).unbind(2)]
        out = torch.stack(parts, 2).flatten(1, 2)
    return out.transpose(1, 2), None


AttentionInterface.register("folded", attend)


class KVCache:
    """Keys and values of many sequences, a row each, every row with its own length: per layer (R, H', S + 1, D), where the last
    position takes what padding writes. Speaks the part of transformers' cache that decoders use."""

    def __init__(self, like):
        """like: for each layer a K and a V of any size, (1, H', T, D)."""
        self.keys, self.values = ([x[:0, :, :1].clone() for x in kind] for kind in zip(*like))
        self.rows = self.length = 0

    def grow(self, rows, length):
        """Makes room, and keeps what there is."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):  # one after the other, or all would be there twice
                tensors[layer] = old.new_zeros(rows, old.shape[1], length + 1, old.shape[3])
                tensors[layer][:self.rows, :, :self.length] = old[:, :, :self.length]
        self.rows, self.length = rows, length

    def permute(self, target, source, span):
        """Row source[i] becomes row target[i], up to position span."""
        for x in self.keys + self.values:
            x[target, :, :span] = x[source, :, :span]

    def aim(self, rows, at, read, span):
        """Says what the next forward does: it writes rows (R,) at positions at (R, T), and it reads, up to position span,

            read = n        rows 0 to n - 1, which are the rows it writes: decoding, without a copy
            read = rows     some rows (R,), gathered: a prefill that goes on with old conversations
            read = None     nothing but its own tokens: a prefill from the beginning

        -> attention mask (R, 1, T, span) to add, or None."""
        self.write, self.read, self.span = (rows[:, None], at), read, span
        if read is None:
            return None
        unseen = torch.arange(span, device=at.device) > at[:, None, :, None]
        return torch.zeros(unseen.shape, dtype=self.keys[0].dtype, device=at.device).masked_fill(unseen, float("-inf"))

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Called by every attention layer: the new k, v (R, H', T, D) -> all that may be looked at."""
        keys, values, (row, at) = self.keys[layer_idx], self.values[layer_idx], self.write
        keys[row, :, at], values[row, :, at] = k.transpose(1, 2), v.transpose(1, 2)  # not into a transposed view: compiled, it would copy the cache
        if self.read is None:
            return k, v
        some = slice(self.read) if isinstance(self.read, int) else self.read
        return keys[:, :, :self.span][some], values[:, :, :self.span][some]

    def get_seq_length(self, layer_idx=0):
        return 0  # asked for where positions are not given; they always are


class Rows:
    """The state of many sequences side by side, a row each: what a decoding step needs and leaves, on the device."""

    STATE = "hidden at count going u tokens logp v q".split()

    def __init__(self, cache, hidden, max_new):
        zeros = lambda *shape, dtype=torch.float32: torch.zeros(0, *shape, dtype=dtype, device=hidden.device)
        self.cache = cache
        self.hidden = hidden.new_zeros(0, hidden.shape[-1])  # (R, D) of the last token
        self.at = zeros(dtype=torch.long)  # the position the next token will have
        self.count = zeros(dtype=torch.long)  # tokens drawn
        self.going = zeros(dtype=torch.bool)  # more are to be drawn
        self.u = zeros(max_new)  # ... with these uniform numbers
        self.tokens, self.logp = zeros(max_new + 1, dtype=torch.long), zeros(max_new + 1)  # the last column is for what idle rows draw
        self.v, self.q = zeros(), zeros()  # as p, Eq. 1
        self.names, self.length = [], []  # whose row it is, None: nobody's; how long, at most (known without asking a GPU)

    def grow(self, rows, length):
        self.cache.grow(rows, length)
        for name in self.STATE:
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(rows - len(old), *old.shape[1:])]))
        self.names += [None] * (rows - len(self.names))
        self.length += [0] * (rows - len(self.length))

    def swap(self, some, others):
        """Rows some[i] and others[i] change places."""
        if some:
            span = max(self.length[i] for i in some + others)
            target, source = torch.tensor([some + others, others + some], device=self.at.device)
            self.cache.permute(target, source, span)
            for name in self.STATE:
                getattr(self, name)[target] = getattr(self, name)[source]
            for host in (self.names, self.length):
                for i, j in zip(some, others):
                    host[i], host[j] = host[j], host[i]


class Recorder(LogitsProcessor):
    """Makes `generate` draw what `choose` draws, and notes the log-prob and the readout of every step."""

    def __init__(self, lm, u, temperature, prompt_length):
        self.lm, self.u, self.temperature, self.n, self.logp, self.p = lm, u, temperature, prompt_length, [], []

    def look(self, module, inputs, output):
        """A hook on the body: from the hidden state, because 16-bit logits are rounded before one could be taken from the other."""
        self.p.append(self.lm.readout(output.last_hidden_state[:, -1]))

    def __call__(self, input_ids, scores):
        step = min(input_ids.shape[1] - self.n, self.u.shape[1] - 1)
        token, logp = choose(scores, self.u[:, step], self.lm.value_index, self.temperature)
        self.logp.append(logp)
        return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)


class OneStepLate(StoppingCriteria):
    """Ends a row one step after its stop token: Q is read by the step that follows it."""

    def __init__(self, lm, prompt_length):
        self.ends, self.n = torch.zeros(len(lm.model.get_output_embeddings().weight), dtype=torch.bool, device=lm.device), prompt_length
        self.ends[list(lm.stop_ids)] = True

    def __call__(self, input_ids, scores, **kwargs):
        return self.ends[input_ids[:, self.n:-1]].any(1)


class Sampler:
    """Draws responses to token sequences.

        sampler.add(name, sequence, u)     a sequence (list of ids) to continue, and (max_new,) uniforms to draw with
        sampler.run(steps)                 decodes until some have ended, or for so many steps -> [(name, Response)]; hf until all have
        sampler(names, sequences, u)       both, for a whole batch -> a Response each

    engine "kv" or "hf". context "window" forgets a sequence when its response has ended; "full" keeps its keys and values for
    the next one under that name, until `drop`. max_new: the longest response in tokens. compile: torch.compile for kv's decoding
    step. ValueError where kv cannot serve the model.

    Counts tokens_encoded (context tokens run through the model, those encoded again included), tokens_sampled, tokens_decoded
    (rows times decoding steps: tokens_sampled and what was wasted), and steps."""

    def __init__(self, lm, engine="kv", context="window", max_new=512, temperature=1.0, compile=False):
        for what, value, options in (("engine", engine, ("kv", "hf")), ("context", context, ("window", "full"))):
            if value not in options:
                raise ValueError(f"unknown {what} {value!r}; known: {', '.join(options)}")
        self.lm, self.engine, self.context, self.max_new, self.temperature = lm, engine, context, max_new, temperature
        self.tokens_encoded = self.tokens_sampled = self.tokens_decoded = self.steps = 0
        self.added, self.open = [], 0
        self.longest = lm.max_length  # of a sequence with its response, as far as is known
        if engine == "kv":
            self.prepare(compile)

    @property
    def busy(self):
        """How many sequences have not got their responses yet."""
        return len(self.added) + self.open

    def add(self, name, sequence, u):
        self.added.append((name, sequence, u))

    @torch.no_grad()
    def run(self, steps=None):
        if not self.busy:
            return []
        out = self.hf() if self.engine == "hf" else self.kv(steps or self.max_new)
        self.tokens_sampled += sum(len(response.ids) for _, response in out)
        return out

    def __call__(self, names, sequences, u):
        for row in zip(names, sequences, u):
            self.add(*row)
        said = {}
        while self.busy:
            said |= dict(self.run())
        return [said[name] for name in names]

    def forget(self):
        """Drops every sequence. The memory stays: captured graphs point into it."""
        self.added, self.open = [], 0
        if self.engine == "kv":
            self.rows.names = [None] * len(self.rows.names)
            self.rows.going[:] = False

    def drop(self, name):
        """Forgets a conversation that is over. One that is being answered cannot be dropped."""
        if self.engine == "kv" and name in self.rows.names[self.open:]:
            self.rows.names[self.rows.names.index(name, self.open)] = None

    # ---- hf
    def hf(self):
        lm, (names, sequences, u) = self.lm, zip(*self.added)
        self.added, n = [], max(map(len, sequences))
        ids = torch.tensor([[lm.stop_ids[0]] * (n - len(s)) + s for s in sequences], device=lm.device)
        seen = torch.tensor([[0] * (n - len(s)) + [1] * len(s) for s in sequences], device=lm.device)
        recorder = Recorder(lm, torch.as_tensor(np.stack(u), device=lm.device), self.temperature, n)
        own, lm.model.generation_config = lm.model.generation_config, GenerationConfig()  # or a model's own top-k would creep in
        hook = lm.model.base_model.register_forward_hook(recorder.look)
        try:
            done = lm.model.generate(
                ids, attention_mask=seen, max_new_tokens=self.max_new + 1, do_sample=False, pad_token_id=lm.stop_ids[0],
                logits_processor=LogitsProcessorList([recorder]), stopping_criteria=StoppingCriteriaList([OneStepLate(lm, n)]))
        finally:
            hook.remove()
            lm.model.generation_config = own
        logp, v = torch.stack(recorder.logp, 1).tolist(), (lm.r_max * torch.stack(recorder.p, 1)).tolist()  # (R, steps)
        self.tokens_encoded += sum(map(len, sequences))
        self.tokens_decoded += len(names) * (len(v[0]) - 1)
        self.steps += len(v[0]) - 1
        out = []
        for row, tokens in enumerate(done[:, n:].tolist()):
            m = next((i + 1 for i, t in enumerate(tokens[:self.max_new]) if t in lm.stop_ids), min(len(tokens), self.max_new))
            out.append((names[row], Response(tokens[:m], logp[row][:m], v[row][0], v[row][m])))
        return out

    # ---- kv: rows [0, self.open) are being decoded; in `full`, others keep conversations whose games are thinking
    def prepare(self, compile):
        """Looks at the model's own cache and compares the engine with the model: ValueError where it cannot serve it."""
        lm, config, device = self.lm, self.lm.model.config, self.lm.device
        refusal = f"the kv engine cannot serve {type(lm.model).__name__}, use --engine hf: "
        if not all_full(lm.model.base_model):
            raise ValueError(f"{refusal}some of its layers have sliding or otherwise limited attention")
        if any(kind in str(getattr(config, "rope_parameters", "")) for kind in ("'dynamic'", "'longrope'")):
            raise ValueError(f"{refusal}its positions depend on the longest sequence of the batch")
        ids = at = torch.arange(4, device=device)[None]
        try:
            with torch.no_grad():
                theirs = lm.model.base_model(input_ids=ids, use_cache=True)
                self.rows = Rows(KVCache([(x.keys, x.values) for x in theirs.past_key_values.layers]), theirs.last_hidden_state, self.max_new)
                self.rows.grow(1, 4)
                with attention(lm.model, "folded"):
                    row = at[0, :1]  # one token alone, two after it, one more by the way of decoding
                    ours = [self.forward(ids[:, a:b], at[:, a:b], row, read, b) for a, b, read in ((0, 1, None), (1, 3, row), (3, 4, 1))]
        except torch.OutOfMemoryError:
            raise
        except (ValueError, AttributeError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(f"{refusal}{error}") from None
        expected = theirs.last_hidden_state.float()
        error, scale = (torch.cat(ours, 1).float() - expected).norm().item(), expected.norm().item()
        if not error <= (1e-3 if lm.model.dtype == torch.float32 else 0.1) * scale:
            raise ValueError(f"{refusal}its hidden states differ ({error:.1g} of {scale:.1g})")
        self.is_stop = torch.zeros(len(lm.model.get_output_embeddings().weight), dtype=torch.bool, device=device)
        self.is_stop[list(lm.stop_ids)] = True
        self.compiled = torch.compile(self.forward, dynamic=True) if compile else None
        self.graphs, self.graph_memory = {}, None
        self.gpu = device.type == "cuda"
        self.every = 8 if self.gpu else 1  # steps between two looks at what has ended: a look holds up a GPU
        self.budget = 16384 if self.gpu else 2048  # padded tokens of a prefill forward: enough to keep it busy, few enough to pad little

    def forward(self, ids, at, rows, read, span):
        """ids and their positions at (R, T), in the rows (R,) -> hidden states (R, T, D). `read`, `span`: as KVCache.aim has them."""
        mask = self.rows.cache.aim(rows, at, read, span)
        real = at % min(self.rows.cache.length, self.lm.max_length)  # padding and idle rows may stand one past the last position
        return self.lm.model.base_model(input_ids=ids, position_ids=real, attention_mask=mask, past_key_values=self.rows.cache,
                                        use_cache=True).last_hidden_state

    def kv(self, steps):
        """Encodes what was added, then decodes until a row has ended, for `steps` steps at most (rounded up to `every`)."""
        with attention(self.lm.model, "folded"):
            self.prefill()
            for n in range(1, -(-steps // self.every) * self.every + 1):
                self.step()
                if n % self.every == 0:
                    ended = [i for i, going in enumerate(self.rows.going[:self.open].tolist()) if not going]
                    if ended:
                        return self.collect(ended)
        return []

    def prefill(self):
        """Encodes what is new of the sequences that were added, in chunks of like length, and opens their rows."""
        if not self.added:
            return
        rows, device, added, self.added = self.rows, self.lm.device, self.added, []
        mine = {name: i for i, name in enumerate(rows.names) if name is not None}
        lacking = sum(name not in mine for name, _, _ in added) - rows.names.count(None)
        self.reserve(len(rows.names) + max(0, lacking), max(len(sequence) for _, sequence, _ in added) + self.max_new)
        free, new = [i for i, name in enumerate(rows.names) if name is None], []
        for name, sequence, _ in added:
            i = mine[name] if name in mine else free.pop(0)
            start = rows.length[i] if name in mine else 0
            rows.names[i], rows.length[i] = name, len(sequence)
            new.append((sequence[start:], i, start))
        index = torch.tensor([i for _, i, _ in new], device=device)
        rows.u[index] = torch.as_tensor(np.stack([u for _, _, u in added]), dtype=torch.float32, device=device)
        rows.at[index], rows.count[index], rows.going[index] = torch.tensor([len(s) for _, s, _ in added], device=device), 0, True
        for chunk in micro_batches(new, self.budget):
            width, span = len(chunk[-1][0]), self.bucket(1, max(start + len(ids) for ids, _, start in chunk))[1]  # SDPA copies a mask of odd width
            pad = lambda x, value: list(x) + [value] * (width - len(x))
            ids, at = torch.tensor([[pad(ids, 0), pad(range(start, start + len(ids)), rows.cache.length)] for ids, _, start in chunk],
                                   device=device).unbind(1)  # (R, T)
            which, index, last = torch.tensor([(k, i, len(ids) - 1) for k, (ids, i, _) in enumerate(chunk)], device=device).unbind(1)
            hidden = self.forward(ids, at, index, index if any(start for _, _, start in chunk) else None, span)[which, last]
            rows.hidden[index], rows.v[index] = hidden, self.lm.readout(hidden)  # SAPO: V costs two dot products
        self.tokens_encoded += sum(len(ids) for ids, _, _ in new)
        self.settle([*range(self.open), *(i for _, i, _ in new)])

    def reserve(self, rows, length):
        cache, (rows, length) = self.rows.cache, self.bucket(rows, length)
        if rows > cache.rows or length > cache.length:
            self.graphs, self.graph_memory = {}, None
            if length > cache.length:  # by half, or every turn of a long conversation would copy it all
                length = self.bucket(1, max(length, min(cache.length * 3 // 2, self.longest)))[1]
            self.rows.grow(max(rows, cache.rows), max(length, cache.length))

    def bucket(self, n, span):
        """Rounds up, so that few graphs serve all numbers of rows and all lengths; on a CPU there are no graphs."""
        if not self.gpu:
            return n, span
        step = 1 if n <= 2 else 4 if n <= 16 else 16
        return -(-n // step) * step, -(-span // 256) * 256

    def settle(self, going):
        """Brings the rows that go on to the front."""
        self.open = len(going)
        self.rows.swap(sorted(set(range(self.open)) - set(going)), [i for i in going if i >= self.open])

    def step(self):
        """One token for every open row."""
        rows = self.rows
        n, span = self.bucket(self.open, min(max(rows.length[:self.open]) + 1, rows.cache.length))
        self.by_graph(n, span) if self.gpu else self.decode_one_token(n, span)
        rows.length[:self.open] = [length + 1 for length in rows.length[:self.open]]
        self.tokens_decoded += n
        self.steps += 1

    def decode_one_token(self, n, span):
        """Rows [0, n): draws a token, runs it through the model, and reads Q where it was the last. Rows that are not going
        idle along: what they write is never looked at. Touches nothing but the device."""
        rows, lm = self.rows, self.lm
        at, count, going = rows.at[:n], rows.count[:n], rows.going[:n]
        u = rows.u[:n].gather(1, count.clamp(max=self.max_new - 1)[:, None])[:, 0]
        token, logp = choose(lm.logits(rows.hidden[:n]).float(), u, lm.value_index, self.temperature)
        column = torch.where(going, count, self.max_new)[:, None]
        rows.tokens[:n].scatter_(1, column, token[:, None])
        rows.logp[:n].scatter_(1, column, logp[:, None])
        hidden = (self.compiled or self.forward)(token[:, None], at[:, None], torch.arange(n, device=at.device), n, span)[:, 0]
        rows.hidden[:n] = hidden
        at += going
        count += going
        ended = going & (self.is_stop[token] | (count == self.max_new))
        rows.q[:n] = torch.where(ended, lm.readout(hidden), rows.q[:n])  # SAPO: Q costs two dot products
        going &= ~ended

    def by_graph(self, n, span):
        """The same as a CUDA graph, one per bucket of rows and length. A bucket's first step is run, not replayed: a capture wants
        a warm-up."""
        if (n, span) in self.graphs:
            self.graphs[n, span].replay()
        else:
            self.decode_one_token(n, span)
            self.graphs[n, span] = self.capture(n, span)

    def capture(self, n, span):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_memory):
            self.decode_one_token(n, span)
        self.graph_memory = graph.pool()  # graphs run one at a time, so they share it
        return graph

    def collect(self, ended):
        """-> [(name, Response)] of the rows that have ended; the others move up."""
        rows, index = self.rows, torch.tensor(ended, device=self.lm.device)
        count, at, v, q = (x[index].tolist() for x in (rows.count, rows.at, self.lm.r_max * rows.v, self.lm.r_max * rows.q))
        tokens, logp = rows.tokens[index].tolist(), rows.logp[index].tolist()
        out = [(rows.names[i], Response(tokens[k][:count[k]], logp[k][:count[k]], v[k], q[k])) for k, i in enumerate(ended)]
        for k, i in enumerate(ended):
            rows.length[i] = at[k]
            if self.context == "window":
                rows.names[i] = None
        self.settle([i for i in range(self.open) if i not in ended])
        return out


# ------------------------------------------------------------------------------------------------------ trajectories


@dataclass
class Turn:
    """One turn of one trajectory. In `full` context prompt_ids are only the tokens since the last response, so that a
    trajectory is the concatenation of its turns' prompt_ids and action_ids."""

    traj: int
    turn: int  # from 0
    prompt_ids: list
    action_ids: list  # what the policy chose, the stop token included
    logp: list  # log-probs of action_ids at the sampling temperature
    v: float  # V and Q at the rollout, in units of return
    q: float
    reward: float
    done: bool  # the episode ended after this turn, by the environment or at the horizon
    truncated: bool  # ... at the horizon, or outgrown
    invalid: bool  # the response could not be parsed
    admissible: bool  # the game offered the action; in the shop any search is one
    won: bool
    score: float
    task: str
    category: str
    prompt: str
    text: str  # the response
    action: str
    outgrown: bool = False  # the episode ended after this turn because the next prompt would not fit
    seen: str = ""  # the observation it answers, as the environment gave it


def uniforms(seed, traj, turn, n):
    """The n random numbers of one turn; `seed` is a tuple of ints."""
    return np.random.default_rng([*seed, traj, turn]).random(n, dtype=np.float32)


def next_prompt(lm, episode, context, history, sequence, limit):
    """-> (text, its new ids, the whole sequence to continue). In `window` the history is shortened until at most `limit` tokens
    are left; `full` appends to the sequence so far."""
    if context == "full":
        text = episode.full_prompt()
        ids = lm.chat.later(text, sequence[-1]) if sequence else lm.chat.first(text)
        return text, ids, sequence + ids
    for k in range(history, -1, -1):
        text = episode.window_prompt(k)
        ids = lm.chat.first(text)
        if len(ids) <= limit:
            break
    return text, ids, ids


@dataclass
class Play:
    """A trajectory under way."""

    traj: int
    task: str
    episode: envs.Episode = None
    sequence: list = field(default_factory=list)  # all the model has read and said (full), or its latest prompt and response
    turns: list = field(default_factory=list)
    asked: tuple = None  # the latest prompt, text and ids
    said: tuple = None  # and response: as drawn, as text, the action, whether that was valid

    @property
    def over(self):
        return bool(self.turns) and self.turns[-1].done

    def hear(self, obs, reward, terminated, truncated, info):
        """The game's answer to an action: what happened is written down as a Turn."""
        (prompt, ids), (response, text, action, valid) = self.asked, self.said
        self.turns.append(Turn(
            traj=self.traj, turn=len(self.turns), prompt_ids=ids, action_ids=response.ids, logp=response.logp, v=response.v, q=response.q,
            reward=float(reward), done=terminated or truncated, truncated=truncated, invalid=not valid,
            admissible=self.episode.accepts(action), won=info["won"], score=info["score"], task=self.task,
            category=info["category"], prompt=prompt, text=text, action=action, seen=self.episode.obs))
        self.episode.took(action, obs, info)

    def speak(self, response, lm, fallback):
        """The model's response -> the action."""
        text = lm.text(response.ids)
        self.sequence, self.said = self.sequence + response.ids, (response, text, *envs.parse_action(text, fallback))
        return self.said[2]


PATIENCE = 8  # decoding steps a game has to answer before it is waited for
SOON = 16  # games loaded ahead of their turn


def rollout(sampler, tasks, pool, *, seed=(0,), trajs=None, rows=None, history=2, max_prompt=2048, max_context=None, bar=None):
    """Plays every task once, `rows` of them side by side (default: all) -> the turns of all trajectories, in order of trajectory
    and turn.

    A response that has ended is handed to its game while the others go on; the game's answer is taken PATIENCE decoding
    steps later, or when more games think than rows are decoded, and is waited for if need be. What is decoded together thus never
    depends on the clock: games may answer in any order, workers may die, and with the same weights a rollout repeats to the last bit. (With
    other rows, or another engine, the tokens are the same up to rounding.)

    `trajs` names the trajectories (default 0, 1, ...); with `seed` it decides the random numbers. max_prompt bounds a
    window's prompt, max_context (default: the model's limit) a whole sequence with its response: an episode whose next
    prompt cannot fit ends as truncated; ValueError where not even the first one fits. `bar`: a tqdm bar, one tick a game."""
    lm = sampler.lm
    plays = [Play(traj, task) for traj, task in zip(range(len(tasks)) if trajs is None else trajs, tasks)]
    by_name, waiting, thinking = {play.traj: play for play in plays}, deque(plays), deque()  # thinking: (play, step), oldest first
    limit = min(max_context or lm.max_length, lm.max_length) - sampler.max_new
    limit = min(limit, max_prompt) if sampler.context == "window" else limit
    sampler.longest = limit + sampler.max_new

    def begin():
        play = waiting.popleft()
        pool.start(play.traj, play.task)
        thinking.append((play, sampler.steps))

    def ask(play):
        """Puts the next prompt to the model; where it does not fit, the episode ends."""
        text, ids, whole = next_prompt(lm, play.episode, sampler.context, history, play.sequence, limit)
        if len(whole) <= limit:
            play.asked, play.sequence = (text, ids), whole
            sampler.add(play.traj, whole, uniforms(seed, play.traj, len(play.turns), sampler.max_new))
        elif play.turns:
            play.turns[-1].done = play.turns[-1].truncated = play.turns[-1].outgrown = True
            pool.drop(play.traj)
        else:
            raise ValueError(f"the first prompt of {play.task} has {len(whole)} tokens and only {limit} fit beside a response of "
                             f"{sampler.max_new}: lower --max_new, raise --max_prompt or --max_context, or take a model with a longer context")

    sampler.forget()
    for _ in range(min(rows or len(plays), len(plays))):
        begin()
    pool.load([play.task for play in list(waiting)[:SOON]])
    while thinking or sampler.busy:
        most_think, heard = len(thinking) > sampler.busy, []
        while thinking and (most_think or thinking[0][1] + PATIENCE <= sampler.steps):
            heard.append(thinking.popleft()[0])
        for play, answer in zip(heard, pool.gather(play.traj for play in heard)):
            if play.episode:
                play.hear(*answer)
            else:
                play.episode = pool.env.episode(*answer)
            if not play.over:
                ask(play)
            if play.over:
                sampler.drop(play.traj)
                if bar is not None:
                    bar.update()
                if waiting:
                    begin()
                    pool.load([waiting[SOON - 1].task] if len(waiting) >= SOON else [])
        for traj, response in sampler.run(thinking[0][1] + PATIENCE - sampler.steps if thinking else None):
            pool.step(traj, by_name[traj].speak(response, lm, pool.env.fallback))
            thinking.append((by_name[traj], sampler.steps))
    sampler.forget()
    return [turn for play in plays for turn in play.turns]


def make_samples(turns, context):
    """Turns, in order -> training samples [(ids, [(start, end), ...]), ...]: a turn each in `window`, a trajectory each in `full`."""
    samples, last = [], None
    for turn in turns:
        if context == "window" or turn.traj != last:
            samples.append(([], []))
        ids, spans = samples[-1]
        ids += turn.prompt_ids + turn.action_ids
        spans.append((len(ids) - len(turn.action_ids), len(ids)))
        last = turn.traj
    return samples


# -------------------------------------------------------------------------------------------------------------- the race


def limits(device):
    """What the GPU does at best: bytes a second of a large copy, floating-point operations a second of a large bf16 product."""
    def fastest(f, n=10):
        times = []
        for _ in range(n + 3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            f()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[3:])

    x, y = torch.empty(2, 1 << 31, dtype=torch.uint8, device=device)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * x.numel() / fastest(lambda: y.copy_(x)), 2 * 8192 ** 3 / fastest(lambda: a @ b)


def least_time(lm, sampler, prompts, said, bandwidth, peak):
    """Seconds a GPU needs at least: for the prefill (all its operations), and for sampler.steps decoding steps (every weight read
    in each, and every key and value a token looks at)."""
    (body, head), layers = lm.sizes, sampler.rows.cache
    kv_bytes = sum(x.shape[1] * x.shape[3] * x.element_size() for x in layers.keys + layers.values)
    seen = sum(len(p) + i for p, r in zip(prompts, said) for i in range(1, len(r.ids) + 1))
    operations = lm.operations(sum(map(len, prompts)), 0, sum(len(p) ** 2 for p in prompts))
    return operations / peak, (sampler.steps * (body + head) * layers.keys[0].element_size() + seen * kv_bytes) / bandwidth


def race(lm, rows, prompt, new, mean, repeats, compile):
    """The same random prompts through both engines, alternately; a row of the table for each."""
    rng, cuda = np.random.default_rng(0), lm.device.type == "cuda"
    usable = np.setdiff1d(np.arange(lm.model.config.vocab_size), [*lm.value_ids, *lm.stop_ids])
    if mean:  # random weights say every word equally often: let one word in `mean` end a response
        lm = replace(lm, stop_ids=(*lm.stop_ids, *(int(i) for i in usable[rng.permutation(len(usable))[:len(usable) // mean]])))
    prompts = [rng.choice(usable, n).tolist() for n in rng.integers(max(1, prompt // 2), prompt * 3 // 2 + 1, rows)]
    u = rng.random((rows, new), dtype=np.float32)
    samplers = {(engine, n): Sampler(lm, engine, max_new=n, compile=compile) for engine in ("hf", "kv") for n in (1, new)}
    seconds, said = {key: [] for key in samplers}, {}
    for _ in range(repeats + 1):
        for (engine, n), sampler in samplers.items():
            sampler.steps = sampler.tokens_sampled = sampler.tokens_decoded = 0
            began = time.perf_counter()
            said[engine, n] = sampler(range(rows), prompts, u[:, :n])
            cuda and torch.cuda.synchronize()
            seconds[engine, n].append(time.perf_counter() - began)
    print(f"\n{rows} prompts of {prompt // 2} to {prompt * 3 // 2} random tokens, responses of up to {new}; medians of {repeats}")
    # "% of bandwidth": the time the same tokens need at least, by the steps of kv, over the time they took
    print(f"{'engine':8}{'tokens/s':>10}{'times hf':>10}{'prefill s':>11}{'ms a step':>11}{'useful':>8}{'% of bandwidth':>16}{'prefill MFU %':>15}  same tokens")
    bound = limits(lm.device) if cuda else None
    median = {key: float(np.median(times[1:])) for key, times in seconds.items()}  # the first time warms up
    for engine in ("hf", "kv"):
        short, sampler = samplers[engine, 1], samplers[engine, new]
        whole, step = median[engine, new], (median[engine, new] - median[engine, 1]) / max(1, sampler.steps - short.steps)
        prefill, shares = median[engine, 1] - short.steps * step, ("-", "-")
        if bound:
            at_best, decoding = least_time(lm, samplers["kv", new], prompts, said["kv", new], *bound)
            shares = f"{at_best / prefill:.1%}", f"{decoding / (whole - prefill):.1%}"
        same = np.mean([a.ids == b.ids for a, b in zip(said["hf", new], said[engine, new])])
        print(f"{engine:8}{sampler.tokens_sampled / whole:10.0f}{median['hf', new] / whole:10.2f}{prefill:11.3f}{1000 * step:11.2f}"
              f"{sampler.tokens_sampled / sampler.tokens_decoded:8.0%}{shares[1]:>16}{shares[0]:>15}  {same:.0%}")


def play_games(lm, env, options, games, max_new, compile):
    """Games played with both engines and both ways of showing the past."""
    print(f"\n{len(games)} games of {env}, responses of up to {max_new} tokens")
    print(f"{'engine':8}{'context':9}{'turns':>6}{'encoded':>10}{'sampled':>10}{'useful':>8}{'seconds':>9}{'env share':>11}{'tokens/s':>10}  same tokens")
    for context in ("window", "full"):
        first = None
        for engine in ("hf", "kv"):
            pool = envs.Pool(env, options, envs.default_workers(env))
            sampler, began = Sampler(lm, engine, context, max_new, compile=compile), time.perf_counter()
            turns = rollout(sampler, games, pool, history=2)
            seconds, tokens = time.perf_counter() - began, [t.action_ids for t in turns]
            pool.close()
            first = tokens if first is None else first
            print(f"{engine:8}{context:9}{len(turns):6}{sampler.tokens_encoded:10}{sampler.tokens_sampled:10}"
                  f"{sampler.tokens_sampled / sampler.tokens_decoded:8.0%}{seconds:9.2f}{pool.seconds / seconds:11.0%}"
                  f"{sampler.tokens_sampled / seconds:10.0f}  {np.mean([a == b for a, b in zip(first, tokens)]):.0%}")


def main():
    parser = argparse.ArgumentParser(description="Races the two engines on random prompts, then in games.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="tiny", help="as for train.py")
    add("--random_weights", action="store_true", help="build the named architecture without its weights; no games are played")
    add("--rows", type=int, default=16, help="prompts, and games, side by side")
    add("--prompt", type=int, default=200, help="mean length of the random prompts in tokens")
    add("--new", type=int, default=64, help="longest response in tokens")
    add("--mean", type=int, help="a random word in so many ends a response (default: a third of --new; 0: none)")
    add("--repeats", type=int, default=3)
    add("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32", choices=("float32", "bfloat16"))
    add("--compile", action="store_true", help="torch.compile kv's decoding step")
    add("--env", default="house", help="house, alfworld, webshop, or none")
    add("--data", help="alfworld: the folder that holds json_2.1.1; webshop: the folder of its catalogue")
    add("--goals", help="webshop: synthetic or human")
    add("--horizon", type=int, default=8, help="turns a game may take")
    args = parser.parse_args()
    for name, least in (("rows", 1), ("prompt", 2), ("new", 9), ("repeats", 1), ("horizon", 1), ("mean", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    try:
        options = {} if args.env == "none" else envs.options_for(args.env, vars(args))
        games = envs.tasks(args.env, "train", **options)[:args.rows] if args.env != "none" and not args.random_weights else []
        lm = load(args.model, words=envs.words(), dtype=getattr(torch, args.dtype), random_weights=args.random_weights)
        print(f"{args.model}: {sum(p.numel() for p in lm.model.parameters()) / 1e6:.1f} M parameters, {args.dtype} on "
              + (torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"))
        race(lm, args.rows, args.prompt, args.new, args.new // 3 if args.mean is None else args.mean, args.repeats, args.compile)
        if games:
            play_games(lm, args.env, options, games, args.new, args.compile)
    except (ValueError, OSError, ImportError, envs.GameError) as error:
        sys.exit(f"rollout.py: {error}")


if __name__ == "__main__":
    main()
