"""Playing the tasks: one trajectory per task, all of them side by side, turn by turn.

    rollout   task -> turns: prompt, sample a response, act, until every game is over
    Sampler   prompts -> responses, by one of two engines that agree token for token
                kv   the handwritten loop: K/V tensors of our own with per-row positions, prefill, then one token at a
                     time; rows that have finished are dropped
                hf   Hugging Face `generate`, for comparison and for models kv cannot serve

Both draw a token by one uniform number u through the inverse of the cumulative distribution, and u comes from (seed,
iteration, trajectory, turn) alone: the same seed gives the same trajectories whatever the engine, the number of rows or the rank.
V is read at the last token of the context, Q at the last token the policy chose; neither w+ nor w- is ever sampled.

Two ways of showing the past (`context`): `window` builds each turn's prompt anew from the last k turns; `full` lets the
conversation grow: token ids are appended, never decoded and encoded again, and the kv cache lives across turns.

Departures from the paper: none. Symbols: R rows (games), T tokens, L layers, H heads, D head size, V vocabulary.
    python rollout.py [--model NAME] [--rows 16]       races the two samplers
"""
import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import envs
from model import load, restricted_log_softmax, value_readout

# ---------------------------------------------------------------------------------------------------------- sampling


@dataclass
class Response:
    ids: list  # the tokens the policy chose, the stop token included
    logp: list  # their log-probs under the restricted policy at the sampling temperature
    v: float  # V before the first of them, in units of return (Eq. 2)
    q: float  # Q after the last


def choose(logits, u, value_ids, temperature):
    """(R, V) logits and (R,) uniforms in [0, 1) -> token (R,), log-prob (R,). Temperature 0 is greedy (log-prob at 1)."""
    logp = restricted_log_softmax(logits / (temperature or 1.0), value_ids)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        cdf = logp.exp().double().cumsum(-1)  # float32 sums of a large vocabulary need not be monotone
        # The first entry above u * total: one of probability 0 (w+, w-) never is. u < 1 must survive rounding.
        token = torch.searchsorted(cdf, (u.double().clamp(max=1 - 2 ** -40) * cdf[:, -1])[:, None].contiguous(), right=True)[:, 0]
    return token, logp.gather(1, token[:, None])[:, 0]


class KVCache:
    """Keys and values of R rows, each with its own length. A new token's are written at the row's own position; what lies
    past it is junk that the mask hides until it is overwritten. Speaks the part of transformers' cache that decoders use."""

    def __init__(self):
        self.keys, self.values, self.capacity = [], [], 0  # per layer (R, H, capacity, D)

    def reserve(self, capacity):
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + self.capacity // 4)  # or every turn of a long conversation would copy it all
            extra = capacity - self.capacity
            wider = lambda x: torch.cat([x, x.new_zeros(*x.shape[:2], extra, x.shape[3])], 2)
            self.keys, self.values = [wider(k) for k in self.keys], [wider(v) for v in self.values]
            self.capacity = capacity

    def write_at(self, at):
        """at (R, T): the positions the next forward writes. -> attention mask (R, 1, T, span), True where a query may look."""
        self.at, self.span = at, int(at.max()) + 1
        return torch.arange(self.span, device=at.device) <= at[:, None, :, None]

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Called by every attention layer: k, v (R, H, T, D) -> all up to the farthest position, (R, H, span, D)."""
        if layer_idx == len(self.keys):
            self.keys.append(k.new_zeros(*k.shape[:2], self.capacity, k.shape[3]))
            self.values.append(v.new_zeros(*v.shape[:2], self.capacity, v.shape[3]))
        rows = torch.arange(len(k), device=k.device)[:, None]
        for store, new in ((self.keys[layer_idx], k), (self.values[layer_idx], v)):
            store.transpose(1, 2)[rows, self.at] = new.transpose(1, 2)
        return self.keys[layer_idx][:, :, :self.span], self.values[layer_idx][:, :, :self.span]

    def get_seq_length(self, layer_idx=0):
        return 0  # asked for where positions are not given; they always are

    def select(self, rows):
        part = KVCache()
        part.keys, part.values, part.capacity = [k[rows] for k in self.keys], [v[rows] for v in self.values], self.capacity
        return part

    def put(self, rows, part):
        for mine, theirs in zip(self.keys + self.values, part.keys + part.values):
            mine[rows] = theirs


class Recorder(LogitsProcessor):
    """Makes `generate` draw what `choose` draws, and notes the log-probs and the readout of every step."""

    def __init__(self, lm, u, temperature, prompt_length):
        self.lm, self.u, self.temperature, self.n, self.logp, self.p = lm, u, temperature, prompt_length, [], []

    def __call__(self, input_ids, scores):
        step = min(input_ids.shape[1] - self.n, self.u.shape[1] - 1)
        token, logp = choose(scores, self.u[:, step], self.lm.value_ids, self.temperature)
        self.logp.append(logp)
        self.p.append(value_readout(scores, self.lm.value_ids, tau=self.lm.tau_v))
        return torch.full_like(scores, float("-inf")).scatter(1, token[:, None], 0.0)


class OneStepLate(StoppingCriteria):
    """Ends a row one step after its stop token: Q is read by the step that follows it."""

    def __init__(self, stop_ids, prompt_length):
        self.stop_ids, self.n = stop_ids, prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, self.n:-1], torch.tensor(self.stop_ids, device=input_ids.device)).any(1)


class Sampler:
    """Draws responses to token sequences. Counts tokens_encoded (context tokens run through the model, those encoded again
    included) and tokens_sampled.

    engine "kv" or "hf"; context "window" forgets every sequence after the call, "full" keeps the keys and values of a
    sequence until a call leaves its name out. max_new: the longest response in tokens."""

    def __init__(self, lm, engine="kv", context="window", max_new=512, temperature=1.0):
        for what, value, options in (("engine", engine, ("kv", "hf")), ("context", context, ("window", "full"))):
            if value not in options:
                raise ValueError(f"unknown {what} {value!r}; known: {', '.join(options)}")
        layers = getattr(lm.model.config, "layer_types", None)
        sliding = getattr(lm.model.config, "sliding_window", None) if layers is None else set(layers) - {"full_attention"}
        if engine == "kv" and sliding:
            raise ValueError(f"the kv engine serves full attention only, and this model's is limited ({sliding}): use --engine hf")
        self.lm, self.engine, self.context, self.max_new, self.temperature = lm, engine, context, max_new, temperature
        self.tokens_encoded = self.tokens_sampled = 0
        self.forget()

    def forget(self):
        self.cache, self.rows = KVCache(), {}  # --context full: name -> (row, tokens that have been encoded)

    @torch.no_grad()
    def __call__(self, names, sequences, u):
        """names: what to call the sequences (lists of ids); u (R, max_new) uniforms -> a Response each."""
        u = torch.as_tensor(np.asarray(u), dtype=torch.float32, device=self.lm.device)
        out = (self.kv if self.engine == "kv" else self.hf)(names, sequences, u)
        self.tokens_sampled += sum(len(r.ids) for r in out)
        return out

    def hf(self, names, sequences, u):
        lm, n = self.lm, max(map(len, sequences))
        ids = torch.tensor([[lm.stop_ids[0]] * (n - len(s)) + s for s in sequences], device=lm.device)
        seen = torch.tensor([[0] * (n - len(s)) + [1] * len(s) for s in sequences], device=lm.device)
        self.tokens_encoded += sum(map(len, sequences))
        recorder = Recorder(lm, u, self.temperature, n)
        own, lm.model.generation_config = lm.model.generation_config, GenerationConfig()  # or a model's own top-k would creep in
        try:
            done = lm.model.generate(
                ids, attention_mask=seen, max_new_tokens=self.max_new + 1, do_sample=False, pad_token_id=lm.stop_ids[0],
                logits_processor=LogitsProcessorList([recorder]), stopping_criteria=StoppingCriteriaList([OneStepLate(lm.stop_ids, n)]))
        finally:
            lm.model.generation_config = own
        logp, v = torch.stack(recorder.logp, 1).tolist(), (lm.r_max * torch.stack(recorder.p, 1)).tolist()  # (R, steps)
        out = []
        for row, tokens in enumerate(done[:, n:].tolist()):
            m = next((i + 1 for i, t in enumerate(tokens[:self.max_new]) if t in lm.stop_ids), min(len(tokens), self.max_new))
            out.append(Response(tokens[:m], logp[row][:m], v[row][0], v[row][m]))
        return out

    def prefill(self, names, sequences):
        """Encodes what is new of every sequence -> cache, hidden state of each last token (R, D), lengths (R,)."""
        if self.context == "window":
            self.forget()
        old = [self.rows.get(name, (0, 0)) for name in names]
        if [row for row, _ in old] != list(range(len(self.rows))):  # episodes ended or joined
            self.cache = self.cache.select(torch.tensor([row for row, _ in old], device=self.lm.device))
        new = [s[known:] for s, (_, known) in zip(sequences, old)]
        self.tokens_encoded += sum(map(len, new))
        width = max(map(len, new))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in new], device=self.lm.device)
        start = torch.tensor([known for _, known in old], device=self.lm.device)
        at = start[:, None] + torch.arange(width, device=self.lm.device)
        self.cache.reserve(int(at.max()) + self.max_new + 2)
        mask = self.cache.write_at(at)
        hidden = self.lm.body(ids, position_ids=at, attention_mask=mask, past_key_values=self.cache, use_cache=True)
        count = torch.tensor([len(s) for s in new], device=self.lm.device)
        return hidden[torch.arange(len(new), device=self.lm.device), count - 1], start + count

    def decode_one_token(self, cache, token, at):
        """token, at (R,) -> hidden state (R, D)."""
        mask = cache.write_at(at[:, None])
        return self.lm.body(token[:, None], position_ids=at[:, None], attention_mask=mask, past_key_values=cache, use_cache=True)[:, 0]

    def keep(self, home, cache):
        if self.context == "full" and cache is not self.cache:
            self.cache.put(home, cache)

    def kv(self, names, sequences, u):
        lm, n = self.lm, len(sequences)
        stops = torch.tensor(lm.stop_ids, device=lm.device)
        hidden, length = self.prefill(names, sequences)
        cache, home = self.cache, torch.arange(n, device=lm.device)  # home: which sequence a row of `cache` is
        v, q = lm.readout(hidden), torch.zeros(n, device=lm.device)  # SAPO: V costs two dot products
        tokens, logps = torch.zeros(n, self.max_new, dtype=torch.long, device=lm.device), torch.zeros(n, self.max_new, device=lm.device)
        count = torch.zeros(n, dtype=torch.long, device=lm.device)  # tokens chosen
        open_ = torch.ones(n, dtype=torch.bool, device=lm.device)
        for step in range(self.max_new):
            token, logp = choose(lm.logits(hidden).float(), u[home, step], lm.value_ids, self.temperature)
            going = open_[home]  # a row that has finished idles until enough have: dropping copies the cache
            tokens[home[going], step], logps[home[going], step] = token[going], logp[going]
            count[home[going]] += 1
            hidden = self.decode_one_token(cache, token, (length + count)[home] - going.long())  # idle rows write past their end
            ended = going & (torch.isin(token, stops) | (step == self.max_new - 1))
            q[home[ended]] = lm.readout(hidden[ended])  # SAPO: and so does Q
            open_[home[ended]] = False
            left = open_[home]
            if not left.any():
                break
            if left.sum() <= 0.75 * len(home):
                self.keep(home, cache)
                cache, home, hidden = cache.select(left), home[left], hidden[left]
        if self.context == "full":
            self.keep(home, cache)
            self.rows = {name: (i, length_i) for i, (name, length_i) in enumerate(zip(names, (length + count).tolist()))}
        v, q = (lm.r_max * v).tolist(), (lm.r_max * q).tolist()
        return [Response(tokens[i, :c].tolist(), logps[i, :c].tolist(), v[i], q[i]) for i, c in enumerate(count.tolist())]


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
    truncated: bool  # ... at the horizon or because the next prompt would not fit
    invalid: bool  # the response could not be parsed
    admissible: bool  # the environment could use the action
    won: bool
    score: float
    task: str
    category: str
    prompt: str
    text: str  # the response
    action: str


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


def rollout(sampler, tasks, pool, *, seed=(0,), trajs=None, history=2, max_prompt=2048, max_context=None, bar=None):
    """Plays every task once, side by side -> the turns of all trajectories, in order of trajectory and turn.

    `trajs` names the trajectories (default 0, 1, ...); with `seed` it decides the random numbers. max_prompt bounds a
    window's prompt, max_context (default: the model's limit) a whole sequence with its response: an episode whose next
    prompt cannot fit ends as truncated; ValueError where not even the first one fits. `bar`: a tqdm bar, one tick a game."""
    lm = sampler.lm
    task_of = dict(zip(range(len(tasks)) if trajs is None else trajs, tasks))
    limit = min(max_context or lm.max_length, lm.max_length) - sampler.max_new
    limit = min(limit, max_prompt) if sampler.context == "window" else limit
    for traj, task in task_of.items():
        pool.start(traj, task)
    episodes = {traj: envs.Episode(*answer) for traj, answer in zip(task_of, pool.gather(task_of))}
    sequences, turns, active = {traj: [] for traj in task_of}, {traj: [] for traj in task_of}, list(task_of)
    sampler.forget()
    while active:
        prompts = {}
        for traj in active:
            text, ids, whole = next_prompt(lm, episodes[traj], sampler.context, history, sequences[traj], limit)
            if len(whole) <= limit:
                prompts[traj], sequences[traj] = (text, ids), whole
            elif turns[traj]:
                turns[traj][-1].done = turns[traj][-1].truncated = True
                pool.drop(traj)
                bar and bar.update()
            else:
                raise ValueError(f"the first prompt of {task_of[traj]} has {len(whole)} tokens and only {limit} fit beside a response of "
                                 f"{sampler.max_new}: lower --max_new, raise --max_prompt, or take a model with a longer context")
        active = list(prompts)
        if not active:
            break

        u = [uniforms(seed, traj, len(turns[traj]), sampler.max_new) for traj in active]
        said = dict(zip(active, sampler(active, [sequences[traj] for traj in active], u)))
        texts, actions = {}, {}
        for traj, response in said.items():
            sequences[traj] = sequences[traj] + response.ids
            texts[traj] = lm.tokenizer.decode(response.ids[:-1] if response.ids[-1] in lm.stop_ids else response.ids)
            actions[traj] = envs.parse_action(texts[traj], pool.fallback)
            pool.step(traj, actions[traj][0])

        for traj, (obs, reward, terminated, truncated, info) in zip(active, pool.gather(active)):
            response, (text, ids), (action, valid), episode = said[traj], prompts[traj], actions[traj], episodes[traj]
            turns[traj].append(Turn(
                traj=traj, turn=len(turns[traj]), prompt_ids=ids, action_ids=response.ids, logp=response.logp, v=response.v, q=response.q,
                reward=float(reward), done=terminated or truncated, truncated=truncated, invalid=not valid,
                admissible=action in episode.info["admissible"], won=info["won"], score=info["score"], task=task_of[traj],
                category=info["category"], prompt=text, text=texts[traj], action=action))
            episode.took(action, obs, info)
            bar and turns[traj][-1].done and bar.update()
        active = [traj for traj in active if not turns[traj][-1].done]
    sampler.forget()  # the cache's memory is the update's now
    return [turn for mine in turns.values() for turn in mine]


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


def main():
    parser = argparse.ArgumentParser(description="Plays the same games with both engines and compares them.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=16, help="games side by side")
    parser.add_argument("--max_new", type=int, default=32, help="longest response in tokens")
    args = parser.parse_args()
    try:
        lm = load(args.model, words=envs.words())
    except ValueError as error:
        sys.exit(f"rollout.py: {error}")
    games = envs.tasks("house", "train")[:args.rows]
    print(f"{'engine':8}{'context':10}{'turns':>7}{'encoded':>10}{'sampled':>10}{'seconds':>10}{'tokens/s':>10}  same tokens")
    for context in ("window", "full"):
        first = None
        for engine in ("hf", "kv"):
            sampler, began = Sampler(lm, engine, context, args.max_new), time.time()
            turns = rollout(sampler, games, envs.Pool("house", {"horizon": 8}), history=2)
            seconds, tokens = time.time() - began, [t.action_ids for t in turns]
            same = "" if first is None else str(tokens == first)
            first = tokens
            print(f"{engine:8}{context:10}{len(turns):7}{sampler.tokens_encoded:10}{sampler.tokens_sampled:10}{seconds:10.2f}"
                  f"{sampler.tokens_sampled / seconds:10.0f}  {same}")


if __name__ == "__main__":
    main()
