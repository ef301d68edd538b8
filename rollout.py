"""Playing the tasks: one trajectory per task, many of them side by side.

    rollout   tasks -> turns: prompt, sample a response, act, until every game is over
    Sampler   token sequences -> responses, by one of two engines that agree up to rounding
                kv   our own loop over K/V tensors, with continuous batching
                hf   Hugging Face `generate`, for comparison and for models kv cannot serve

Tokens are drawn by uniform numbers that depend on (seed, iteration, trajectory, turn) alone, so
engine, rows and ranks matter only by rounding. The past is shown in one of two ways (`context`):
`window` makes each turn's prompt anew, of the last turns; in `full`, which the paper does not have,
the conversation and its cache grow. Shapes: R rows, T tokens, S positions, H heads of size D
    python rollout.py [--model NAME]       samples one prompt with both engines
"""
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList

from model import all_full, choose, load, make_batch, micro_batches

# ------------------------------------------------------------------------ the kv engine's state


class Rows:
    """Many sequences side by side on the device, a row each, every row with its own length: keys
    and values, and what a decoding step reads and writes. The model takes it for its cache, so it
    speaks the part of transformers' cache that decoders use."""

    STATE = ("hidden", "at", "count", "going", "u", "tokens", "logp", "p")

    def __init__(self, layers, hidden, max_new):
        """No row yet; shapes, dtype and device are those of a model's cache layers and states."""
        def empty(*shape, dtype=torch.float32):
            return torch.zeros(0, *shape, dtype=dtype, device=hidden.device)

        # of each layer (R, heads of K and V, S + 1, D); padding writes to the last position
        self.keys = [x.keys[:0, :, :1].clone() for x in layers]
        self.values = [x.values[:0, :, :1].clone() for x in layers]
        self.longest = 0  # S
        self.hidden = hidden.new_zeros(0, hidden.shape[-1])  # (R, width) at the last token
        self.at = empty(dtype=torch.long)  # (R,) the position of the next token
        self.count = empty(dtype=torch.long)  # (R,) tokens drawn
        self.going = empty(dtype=torch.bool)  # (R,) whether more are to be drawn
        # a column for each token, and a last one that serves rows that have ended
        self.u, self.logp = empty(max_new + 1), empty(max_new + 1)  # uniform numbers, log-probs
        self.tokens = empty(max_new + 1, dtype=torch.long)
        self.p = empty(2)  # (R, 2) the readouts of V and Q, Eq. 1
        self.read = self.write = self.span = None  # what `update` is to do: Sampler.forward says

    def grow(self, rows, longest):
        """Makes room for so many rows of that length, and keeps what there is."""
        more, longer = rows - len(self.at), longest - self.longest
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):  # layer by layer, so that only one exists twice
                tensors[layer] = F.pad(old, (0, 0, 0, longer, 0, 0, 0, more))
        for name in self.STATE:
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
        self.longest = longest

    def copy(self, moves, span):
        """Of each (target, source), row target becomes what row source is, up to position span."""
        target, source = sent(np.array(moves), self.at.device).T
        for x in self.keys + self.values:
            x[target, :, :span] = x[source, :, :span]
        for name in self.STATE:
            getattr(self, name)[target] = getattr(self, name)[source]

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Writes k, v (R, H', T, D) at `write`, and reads `span` positions of the rows `read`."""
        keys, values, (row, at) = self.keys[layer_idx], self.values[layer_idx], self.write
        # through keys.transpose(1, 2)[row, at], the compiled step would copy the whole cache
        keys[row, :, at], values[row, :, at] = k.transpose(1, 2), v.transpose(1, 2)
        if not self.span:
            return k, v
        rows = slice(len(k)) if self.read is None else self.read
        return keys[rows, :, :self.span], values[rows, :, :self.span]

    def get_seq_length(self, layer_idx=0):
        return 0  # it is asked for where positions are not given, and they always are


def sent(array, device):
    """A numpy array as a tensor on the device, without a wait for what that has yet to do."""
    x = torch.from_numpy(array)
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
    kept for the next one under that name, which must begin with it. max_new: the longest response
    in tokens; max_prompt: the longest window prompt; max_context: the longest sequence with its
    response; `limit`: what they leave for a sequence. tokens_decoded counts rows times decoding
    steps, idle rows included. ValueError where kv cannot serve the model."""

    def __init__(self, lm, engine="kv", context="window", max_new=512, temperature=1.0,
                 compile=False, max_prompt=None, max_context=None):
        if engine not in ("kv", "hf") or context not in ("window", "full"):
            raise ValueError(f"{engine!r}, {context!r}: known: kv, hf; window, full")
        self.lm, self.engine, self.context = lm, engine, context
        self.max_new, self.temperature = max_new, temperature
        most = max_prompt if context == "window" and max_prompt else lm.max_length
        self.limit = min(most, min(max_context or lm.max_length, lm.max_length) - max_new)
        self.tokens_encoded = self.tokens_sampled = self.tokens_decoded = self.steps = 0
        self.forget()
        self.is_stop = torch.zeros(len(lm.head.weight), dtype=torch.bool, device=lm.device)
        self.is_stop[list(lm.stop_ids)] = True
        if engine == "kv":
            self.prepare(compile)

    @property
    def busy(self):
        """How many sequences have not got their responses yet."""
        return len(self.added) + self.open

    def add(self, name, sequence, u):
        """Queues a list of ids under a name (not None) that is not busy; u: max_new uniforms."""
        if not 0 < len(sequence) <= self.limit:
            raise ValueError(f"a sequence has {len(sequence)} tokens; 1 to {self.limit} fit")
        self.added.append((name, sequence, np.asarray(u, dtype=np.float32)))

    @torch.no_grad()
    def run(self, steps=None):
        """-> [(name, Response)] when some have ended (hf: all), or after so many steps."""
        if not self.busy:
            return []
        steps = self.max_new if steps is None else steps
        ended = self.kv(steps) if self.engine == "kv" else self.hf()
        self.tokens_sampled += sum(len(response.ids) for _, response in ended)
        return ended

    def __call__(self, names, sequences, u):
        """A whole batch -> a Response each."""
        for row in zip(names, sequences, u):
            self.add(*row)
        responses = {}
        while self.busy:
            responses |= dict(self.run())
        return [responses[name] for name in names]

    def forget(self):
        """Forgets all sequences, as is due when weights change. The rows keep their memory."""
        self.added, self.open = [], 0  # rows [0, open) are being decoded
        self.seen = None  # the last look(), which collect() has not read yet
        self.names = []  # the caller's key of each row, None where the row is free
        self.length = []  # tokens in each row's cache: a bound while it is decoded, else exact

    def drop(self, name):
        """Forgets a conversation that is over; one that is being answered stays."""
        if name in self.names[self.open:]:
            self.names[self.names.index(name)] = None

    def prepare(self, compile):
        """Sets the kv engine up for the device, and compares it with the model."""
        lm, self.gpu = self.lm, self.lm.device.type == "cuda"
        self.ahead = 4 if self.gpu else 0  # steps between looks; each is read at the next
        self.budget = 16384 if self.gpu else 2048  # padded tokens of a prefill's forward pass
        try:
            self.check()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (ValueError, AttributeError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(f"the kv engine cannot serve {type(lm.model).__name__}, use "
                             f"--engine hf: {error}") from None
        self.encoder, self.decoder = self.forward, self.decode_one_token
        if compile or self.gpu:
            from machine.fast import accelerate
            accelerate(self, compile)

    @torch.no_grad()
    def check(self):
        """Builds the rows after the model's own cache, and runs four tokens through both: in the
        rows one alone, two after it, one decoded. ValueError where hidden states differ."""
        model, ids = self.lm.model, torch.arange(4, device=self.lm.device)[None]
        rope, row = str(getattr(model.config, "rope_parameters", "")), ids.new_zeros(1)
        if not all_full(model.base_model) or "'dynamic'" in rope or "'longrope'" in rope:
            raise ValueError("some layers have sliding windows, or positions depend on length")
        theirs = model.base_model(input_ids=ids, use_cache=True)
        self.rows = Rows(theirs.past_key_values.layers, theirs.last_hidden_state, self.max_new)
        self.reserve(1, 4)
        parts = [self.forward(ids[:, a:b], ids[:, a:b], span, rows) for a, b, span, rows in
                 ((0, 1, 0, row), (1, 3, 3, row), (3, 4, 4, None))]
        ours, theirs = torch.cat(parts, 1).float(), theirs.last_hidden_state.float()
        off, norm = (ours - theirs).norm().item(), theirs.norm().item()
        if not off <= (1e-3 if model.dtype == torch.float32 else 0.1) * norm:
            raise ValueError(f"its hidden states differ ({off:.1g} of {norm:.1g})")

    def forward(self, ids, at, span, rows=None):
        """ids and their positions `at`, (R, T) each, in `rows` (R,) or in the first R, which need
        no copy -> hidden states (R, T, D). A token sees its own row up to itself; with span 0 the
        row is new, and else it is read up to position span."""
        cache, mask = self.rows, None
        index = torch.arange(len(ids), device=at.device) if rows is None else rows
        cache.read, cache.write, cache.span = rows, (index[:, None], at), span
        if span:
            unseen = torch.arange(span, device=at.device) > at[:, None, :, None]
            zeros = torch.zeros(unseen.shape, dtype=cache.keys[0].dtype, device=at.device)
            mask = zeros.masked_fill(unseen, float("-inf"))
        real = at % min(cache.longest, self.lm.max_length)  # padding, at S, may have any place
        return self.lm.model.base_model(input_ids=ids, position_ids=real, attention_mask=mask,
                                        past_key_values=cache, use_cache=True).last_hidden_state

    def kv(self, steps):
        """Encodes what was added, then decodes until a row has ended, for about `steps` at most."""
        if self.added:
            self.prefill()
        for _ in range(0, steps, self.ahead or 1):
            for _ in range(self.ahead or 1):
                self.step()
            seen, self.seen = (self.seen, self.look()) if self.ahead else (self.look(), None)
            if seen and (ended := self.collect(*seen)):
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
        """Gives a sequence a row, its own if it has one -> (new ids, row, their position, u)."""
        if name not in self.names:
            i = self.names.index(None) if None in self.names else len(self.names)
            self.names[i:i + 1], self.length[i:i + 1] = [name], [0]
        i = self.names.index(name)
        start, self.length[i] = self.length[i], len(sequence)
        return sequence[start:], i, start, u

    def encode(self, chunk):
        """One forward pass over [(ids, row, start, u)], which fills their rows."""
        chunk = chunk * 2 if self.gpu and len(chunk) == 1 else chunk  # one row would compile anew
        rows, (new, index, start, u) = self.rows, zip(*chunk)
        length, width = [len(ids) for ids in new], len(new[-1])
        _, span = self.bucket(1, max(map(sum, zip(start, length))) if any(start) else 0)
        ids = np.array([x + [0] * (width - len(x)) for x in new])
        parts = index, start, length, ids.ravel(), np.ravel(u)
        parts = sent(np.concatenate(parts), self.lm.device).split([len(x) for x in parts])  # 1 copy
        index, start, length, ids = (x.long() for x in parts[:4])  # float64 held them exactly
        column = torch.arange(width, device=ids.device)
        at = torch.where(column < length[:, None], start[:, None] + column, rows.longest)
        hidden = self.encoder(ids.view_as(at), at, span, index)
        hidden = hidden[torch.arange(len(chunk), device=ids.device), length - 1]
        rows.u[index, :-1] = parts[4].view(len(chunk), -1).float()
        rows.at[index], rows.hidden[index] = start + length, hidden
        rows.count.index_fill_(0, index, 0), rows.going.index_fill_(0, index, True)  # no copy
        rows.p[index, 0] = self.lm.readout(hidden)  # SAPO: V costs two dot products

    def reserve(self, rows, longest):
        """Makes room in the rows."""
        had = self.rows
        if longest > had.longest:  # by half, or every turn of a conversation would copy it all
            longest = max(longest, min(had.longest * 3 // 2, self.limit + self.max_new))
        size = self.bucket(max(rows, len(had.at)), max(longest, had.longest))
        if size != (len(had.at), had.longest):
            had.grow(*size)

    def bucket(self, n, span):
        """On a GPU, both rounded up: fewer graphs to capture, never one row alone, even masks."""
        if not self.gpu:
            return n, span
        step, wide = 2 if n <= 2 else 4 if n <= 16 else 16, 256 if span <= 4096 else 1024
        return -(-n // step) * step, -(-span // wide) * wide

    def settle(self, keep):
        """Brings the rows `keep` to the front; idle conversations there take the places left."""
        self.open, moves = len(keep), []
        gaps = sorted(set(range(self.open)) - set(keep))
        for gap, late in zip(gaps, [i for i in keep if i >= self.open]):
            for host in (self.names, self.length):
                host[gap], host[late] = host[late], host[gap]
            moves += [(gap, late), (late, gap)] if self.names[late] is not None else [(gap, late)]
        if moves:
            self.rows.copy(moves, max(self.length[target] for target, _ in moves))

    def step(self):
        """Draws one token for every open row."""
        n, span = self.bucket(self.open, min(max(self.length[:self.open]) + 1, self.rows.longest))
        self.decoder(n, span)
        self.length[:self.open] = [length + 1 for length in self.length[:self.open]]
        self.tokens_decoded += n
        self.steps += 1

    def decode_one_token(self, n, span):
        """Rows [0, n): draws a token, runs it through the model, and reads Q where it was the last.
        Rows that have ended are computed for nothing. The host reads nothing: CUDA graphs."""
        rows, lm = self.rows, self.lm
        at, count, going = rows.at[:n], rows.count[:n], rows.going[:n]
        column = torch.where(going, count, self.max_new)[:, None]
        u, logits = rows.u[:n].gather(1, column)[:, 0], lm.head(rows.hidden[:n]).float()
        token, logp = choose(logits, u, lm.value_index, self.temperature)
        rows.tokens[:n].scatter_(1, column, token[:, None])
        rows.logp[:n].scatter_(1, column, logp[:, None])
        hidden = self.forward(token[:, None], at[:, None], span)[:, 0]
        rows.hidden[:n] = hidden
        at += going
        count += going
        ended = going & (self.is_stop[token] | (count == self.max_new))
        p_q = lm.readout(hidden)  # SAPO: Q costs two dot products
        rows.p[:n, 1] = torch.where(ended, p_q, rows.p[:n, 1])
        going &= ~ended

    def look(self):
        """-> names, columns, event: of the open rows, copied to the host while the device goes on;
        they are there when the event has occurred."""
        rows, n = self.rows, self.open
        columns = rows.going, rows.count, rows.at, rows.tokens, rows.logp, self.lm.r_max * rows.p
        columns = [x[:n].to("cpu", non_blocking=True, copy=self.ahead > 0) for x in columns]
        event = rows.at.is_cuda and torch.cuda.current_stream(rows.at.device).record_event()
        return self.names[:n], columns, event

    def collect(self, names, columns, event):
        """-> [(name, Response)] of the rows that had ended at a look; the others move up."""
        if event:
            event.synchronize()
        going, count, at, tokens, logp, value = columns
        out, keep = [], dict.fromkeys(range(self.open))
        for i, (name, more) in enumerate(zip(names, going.tolist())):
            if not more and name is not None:
                n, row = count[i].item(), self.names.index(name)
                said = tokens[i, :n].tolist(), logp[i, :n].tolist(), *value[i].tolist()
                out.append((name, Response(*said)))
                self.length[row] = at[i].item()
                del keep[row]
                if self.context == "window":
                    self.names[row] = None
                if self.seen:  # what is on its way shows this row too
                    self.seen[0][self.seen[0].index(name)] = None
        if out:
            self.settle([*keep])
        return out

    def hf(self):
        """Responses to all that was added, through `generate`; V and Q by a scoring pass."""
        lm, (names, sequences, u) = self.lm, zip(*self.added)
        self.added, drawn, u = [], [], sent(np.stack(u), lm.device)
        ids = pad_sequence([torch.tensor(s) for s in sequences], True, -1, "left").to(lm.device)
        pad = lm.value_ids[0]  # it fills rows that have ended, and is never drawn itself

        def draw(input_ids, scores):  # leaves `generate` no choice but the token of `choose`
            now = u[:, min(len(drawn), self.max_new - 1)]
            token, logp = choose(scores, now, lm.value_index, self.temperature)
            drawn.append(logp)
            return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)

        model, own = lm.model, (lm.model.generation_config, lm.model.config._attn_implementation)
        plain = own[1].replace("folded", "sdpa")  # which knows the mask of the padding
        model.generation_config, model.config._attn_implementation = GenerationConfig(), plain
        try:  # without the model's own settings, of which a top-k would change the policy
            out = model.generate(
                ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=False,
                max_new_tokens=self.max_new, eos_token_id=list(lm.stop_ids), pad_token_id=pad,
                logits_processor=LogitsProcessorList([draw]))
        finally:
            model.generation_config, model.config._attn_implementation = own
        said = [[i for i in row if i != pad] for row in out[:, ids.shape[1]:].tolist()]
        samples = [(s + x, [(len(s), len(s) + len(x))]) for s, x in zip(sequences, said)]
        v_q = lm.r_max * torch.stack(lm.score(make_batch(samples).to(lm.device))[2:], 1)  # (R, 2)
        self.tokens_encoded += sum(map(len, sequences))
        self.tokens_decoded += len(names) * len(drawn)
        self.steps += len(drawn)
        columns = zip(names, said, torch.stack(drawn, 1).tolist(), v_q.tolist())
        return [(name, Response(x, logp[:len(x)], v, q)) for name, x, logp, (v, q) in columns]


# ----------------------------------------------------------------------------------- trajectories

ANSWER_STEPS = 8  # decoding steps a game has to answer before it is waited for


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
    seen: str = ""  # the observation it answers, as the environment gave it


def uniforms(seed, traj, turn, n):
    """The n random numbers of one turn; `seed` is a tuple of ints."""
    return np.random.default_rng([*seed, traj, turn]).random(n, dtype=np.float32)


def next_prompts(lm, asks, limit):
    """asks: (texts, from the longest to the shortest, and the ids before them), ... -> of each
    (text, its ids): the first text that fits, or the last."""
    texts, before = [iter(texts) for texts, _ in asks], [ids for _, ids in asks]
    first, out = [next(its) for its in texts], []
    for its, old, text, ids in zip(texts, before, first, lm.chat.prompts(first, before)):
        while len(old) + len(ids) > limit and (shorter := next(its, None)):
            text, (ids,) = shorter, lm.chat.prompts([shorter], [old])
        out.append((text, ids))
    return out


def play(traj, task, sampler, pool, seed, prompts):
    """A coroutine for one trajectory. It yields what it waits for: (texts, ids before) for the text
    that fits and its ids, None for a game's answer or a Response; last (None, (turns, episode))."""
    from envs import parse_action  # here, so that the sampler can be copied with model.py alone
    pool.start(traj, task)
    episode = pool.env.episode(*(yield))  # the game's first answer
    lm, turns, before = sampler.lm, [], []
    while not (turns and turns[-1].done):
        prompt, ids = yield prompts(traj, turns, episode), before  # the text that fits
        if len(before) + len(ids) > sampler.limit:
            if turns:
                turns[-1].done = turns[-1].truncated = turns[-1].outgrown = True
            pool.drop(traj)
            break
        sampler.add(traj, before + ids, uniforms(seed, traj, len(turns), sampler.max_new))
        response = yield  # the sampler's
        if sampler.context == "full":
            before = before + ids + response.ids
        text = lm.text(response.ids)
        action, valid = parse_action(text, pool.env.fallback)
        pool.step(traj, action)
        obs, reward, terminated, truncated, info = yield  # the game's answer
        turns.append(Turn(
            traj=traj, turn=len(turns), task=task, prompt_ids=ids, action_ids=response.ids,
            logp=response.logp, v=response.v, q=response.q, reward=float(reward),
            done=terminated or truncated, truncated=truncated, invalid=not valid,
            admissible=episode.accepts(action), won=info["won"], score=info["score"],
            category=info["category"], prompt=prompt, text=text, action=action, seen=episode.obs))
        episode.took(action, obs, info)
    sampler.drop(traj)
    yield None, (turns, episode)


def trajectories(sampler, tasks, pool, *, seed=(0,), trajs=None, rows=None, history=2,
                 prompts=None):
    """Plays every task once, `rows` side by side (default: all), and yields (traj, turns, episode)
    of each as soon as it is over. `trajs` names them (default 0, 1, ...) and decides, with `seed`,
    the random numbers. prompts(traj, turns, episode) may give other texts than the game's. An
    episode whose next prompt does not fit ends as truncated, without a turn if it was the first.

    A game's answer is taken ANSWER_STEPS decoding steps after it was asked, or when more games
    compute than rows are decoded, and waited for if need be. So what is decoded together does not
    depend on the clock, and with the same weights a rollout repeats to the last bit."""
    prompts = prompts or (lambda traj, turns, game: game.prompts(sampler.context, history))
    waiting, plays = deque(zip(range(len(tasks)) if trajs is None else trajs, tasks)), {}
    thinking = deque()  # (trajectory whose game computes, the step it was asked at), oldest first
    sampler.forget()
    while waiting or plays:
        while waiting and len(plays) < (rows or len(tasks)):
            traj, task = waiting.popleft()
            plays[traj] = play(traj, task, sampler, pool, seed, prompts)
            next(plays[traj])  # it starts its game
            thinking.append((traj, sampler.steps))
        pool.load([task for _, task in list(waiting)[:16]])  # in the background
        steps = thinking[0][1] + ANSWER_STEPS - sampler.steps if thinking else None
        for traj, response in sampler.run(steps):
            plays[traj].send(response)  # it acts
            thinking.append((traj, sampler.steps))
        most_think, due = len(thinking) > sampler.busy, []
        while thinking and (most_think or thinking[0][1] + ANSWER_STEPS <= sampler.steps):
            due.append(thinking.popleft()[0])
        wants = {traj: plays[traj].send(answer) for traj, answer in zip(due, pool.gather(due))}
        asks = {traj: want for traj, want in wants.items() if want[0]}  # the others are over
        for traj, prompt in zip(asks, next_prompts(sampler.lm, asks.values(), sampler.limit)):
            wants[traj] = plays[traj].send(prompt)
        for traj, want in wants.items():
            if want:  # it is over; None waits for the model
                del plays[traj]
                yield traj, *want[1]


def rollout(sampler, tasks, pool, **options):
    """Plays every task as `trajectories` does -> all turns, in order of trajectory and turn.
    ValueError where not even the first prompt of a task fits."""
    turns = []
    for _, played, episode in trajectories(sampler, tasks, pool, **options):
        if not played:
            raise ValueError(
                f"the first prompt of {episode.info['task']!r} is longer than the "
                f"{max(0, sampler.limit)} tokens there are: lower --max_new, raise --max_prompt or "
                "--max_context, or take a model with a longer context")
        turns += played
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
            response, = sampler([0], [lm.chat.first(prompt)], [uniforms((0,), 0, 0, 32)])
            print(f"\n{engine}: V {response.v:.3f}, Q {response.q:.3f}, {len(response.ids)} tokens "
                  f"of log-prob {sum(response.logp):.4f}\n{lm.text(response.ids)}")


if __name__ == "__main__":
    main()
