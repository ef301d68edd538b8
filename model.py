"""One causal language model as actor and critic.

    readouts      two logits of any causal LM as a value in [-1, 1], and a policy without those two words     Eq. 1-3
    ActorCritic   a Hugging Face model, its tokenizer and chat format, and the two reserved words
    load          by hub id, folder or bare name; `tiny` is built on the spot and downloads nothing
    Batch, score  one forward: log-probs and entropy of the response tokens, V and Q of every turn

A training sample is a token sequence with one or more turns in it; a turn is the span [start, end) of its response.
V is read at start - 1, the last token of the context; Q at end - 1, the last token the policy chose. Sequences are
padded on the right, so the causal mask alone keeps everything apart and no other mask is needed.

Shapes: N turns, B sequences, T tokens, M response tokens, V vocabulary, D width.
`# SAPO:` marks what the paper adds. Departures from the paper: none.
    python model.py [--model NAME]       shows a model's reserved words and reads V and Q from one turn
"""
import argparse
import copy
import contextlib
import functools
import json
import os
import re
import sys
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# --------------------------------------------------------------------------------------- readouts (copy these alone)


def value_readout(logits, value_ids, *, tau):
    """Eq. 1. (..., V) logits and the ids (w+, w-) -> p in [-1, 1], shape (...). V and Q are R_max p (Eq. 2)."""
    plus, minus = (logits[..., i] for i in value_ids)
    return ((plus - minus) / tau).clamp(-1, 1)  # Eq. 1  # SAPO: a value without a value head


def restricted_log_softmax(logits, value_ids):
    """Eq. 3. (..., V) logits -> log-probs over every word but the two reserved ones, whose probability is exactly 0.
    16-bit logits are raised to float32 first."""
    value_ids = torch.as_tensor(value_ids, device=logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return wide.index_fill(-1, value_ids, float("-inf")).log_softmax(-1)  # Eq. 3  # SAPO: w+ and w- are no actions


def entropy(logp, value_ids):
    """Entropy in nats of restricted log-probs (..., V) -> (...). The reserved words add 0, not 0 * -inf."""
    value_ids = torch.as_tensor(value_ids, device=logp.device)
    return -(logp.exp() * logp.index_fill(-1, value_ids, 0.0)).sum(-1)


# --------------------------------------------------------------------------------------------------- actor and critic


@dataclass
class Batch:
    """Padded sequences. ids (B, T) tokens; length (B,); owner (B, T) which turn of the batch chose the token, -1 where none did
    (context, padding, forced tokens); b, t (M,) where those tokens are; for each turn its sequence, start and end, (N,) each."""

    ids: torch.Tensor
    length: torch.Tensor
    owner: torch.Tensor
    b: torch.Tensor  # kept, not found anew: a GPU would be waited for
    t: torch.Tensor
    seq: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    @property
    def mask(self):  # (B, T)
        return self.owner >= 0

    def spread(self, per_turn):  # (N,) -> (B, T): a turn's number on each of its tokens
        return F.pad(per_turn, (0, 1))[self.owner] if len(per_turn) else self.ids.new_zeros(self.ids.shape, dtype=per_turn.dtype)

    def to(self, device):
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def make_batch(samples):
    """samples: [(ids, [(start, end), ...]), ...], one tuple a sequence, one span a turn -> Batch, turns in that order."""
    turns = [(b, *span) for b, (_, spans) in enumerate(samples) for span in spans]
    ids = torch.zeros(len(samples), max(len(s[0]) for s in samples), dtype=torch.long)
    owner = torch.full_like(ids, -1)
    for b, (tokens, _) in enumerate(samples):
        ids[b, :len(tokens)] = torch.tensor(tokens)
    for n, (b, start, end) in enumerate(turns):
        if not 0 < start < end <= len(samples[b][0]):
            raise ValueError(f"a turn needs context before it and a response in it, got the span {start}:{end}")
        owner[b, start:end] = n
    return Batch(ids, torch.tensor([len(s[0]) for s in samples]), owner, *(owner >= 0).nonzero(as_tuple=True), *torch.tensor(turns).reshape(-1, 3).unbind(1))


def micro_batches(samples, budget):
    """[(ids, ...)] -> lists of samples of like length, shortest first, of at most `budget` tokens with their padding, or one sample."""
    groups = []
    for sample in sorted(samples, key=lambda s: len(s[0])):
        if not groups or (len(groups[-1]) + 1) * len(sample[0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


# transformers makes no mask for a name of our own. For "sdpa" it would look at the positions first, which waits for the GPU, and compiled
# it would make one even where none is needed, which costs flash attention.
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
    """Whether every layer of a model's body looks at all that came before."""
    layers = getattr(body.config, "layer_types", None)
    return set(layers) == {"full_attention"} if layers else not getattr(body.config, "sliding_window", None)


def hidden_states(body, run, ids):
    """(B, T) sequences, padded on the right -> (B, T, D), without a mask where none is needed. `run`: the body itself, or compiled."""
    maskless = body.config._attn_implementation == "sdpa" and all_full(body)
    with attention(body, "causal") if maskless else contextlib.nullcontext():
        return run(input_ids=ids, use_cache=False).last_hidden_state


def compiled_body(body):
    """The body of a model, compiled for batches of every shape. ValueError where a layer looks at less than all that came before."""
    if not all_full(body):
        raise ValueError(f"--compile needs plain full attention; {type(body).__name__} has other layers")
    return torch.compile(body, dynamic=True)


def token_scores(hidden, token, head, value_ids):
    """Hidden states (M, D), the tokens (M,) that followed, the head -> their log-probs (M,), the policy's entropy there (M,)."""
    logp = restricted_log_softmax(head(hidden).float(), value_ids)  # (M, V)
    return logp.gather(1, token[:, None])[:, 0], entropy(logp, value_ids)


@dataclass
class ActorCritic:
    """A causal LM and how it is read. value_ids = (w+, w-); stop_ids end a response; tau_v as in Eq. 1, r_max as in Eq. 2."""

    model: torch.nn.Module
    tokenizer: object
    chat: "Chat"
    value_ids: tuple
    stop_ids: tuple
    tau_v: float = 1.0
    r_max: float = 10.0
    compile: bool = False  # torch.compile for scoring: the body, and what is made of its output

    def __post_init__(self):
        body = self.model.base_model
        self.run, self.scores = (compiled_body(body), torch.compile(token_scores, dynamic=True)) if self.compile else (body, token_scores)

    @property
    def device(self):
        return self.model.device

    @functools.cached_property
    def value_index(self):  # value_ids where the model is: a list would be copied there again and again
        return torch.tensor(self.value_ids, device=self.device)

    @property
    def sizes(self):
        """Parameters of the body, and of the head: what a token costs, twice for a multiplication and an addition."""
        head, every = self.model.get_output_embeddings().weight.numel(), sum(p.numel() for p in self.model.parameters())
        return every - head * (1 if self.model.config.tie_word_embeddings else 2), head

    def operations(self, tokens, scored, squares):
        """Of one forward pass: `tokens` through the body, `scored` through the head, attention over lengths whose squares sum to `squares`."""
        (body, head), config = self.sizes, self.model.config
        width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return 2 * body * tokens + 2 * head * scored + 2 * config.num_hidden_layers * width * squares

    @property
    def chunk(self):  # positions whose logits exist at a time: about 256 MiB of float32
        return max(1, 2 ** 19 // len(self.model.get_output_embeddings().weight)) * 128  # of whole tiles of a GPU's products

    @property
    def max_length(self):
        return getattr(self.model.config, "max_position_embeddings", None) or 1 << 30

    def body(self, ids):  # (B, T), padded on the right -> (B, T, D)
        return hidden_states(self.model.base_model, self.run, ids)

    def logits(self, hidden):  # (..., D) -> (..., V)
        return self.model.get_output_embeddings()(hidden)

    def value_logits(self, hidden):
        """(..., D) -> (z+, z-), (..., 2): a product with two rows of the head, the rest of the vocabulary untouched. In float32, or
        16-bit logits would be rounded before one is taken from the other."""
        head = self.model.get_output_embeddings()
        two = lambda x: x.index_select(0, self.value_index).float()
        return F.linear(hidden.float(), two(head.weight), None if getattr(head, "bias", None) is None else two(head.bias))

    def readout(self, hidden):  # (..., D) -> p in [-1, 1], (...)
        return value_readout(self.value_logits(hidden), (0, 1), tau=self.tau_v)

    def score(self, batch):
        """One forward -> logp (B, T), entropy (B, T), p_v (N,), p_q (N,). Log-probs and entropy are those of the restricted
        policy, at temperature 1 as in training's rollouts, and 0 off the response tokens.

        Logits are made of response positions alone, a chunk of them at a time, and made again in the backward pass: never is
        there more than a chunk of them, however large the batch."""
        hidden = self.body(batch.ids)
        b, t = batch.b, batch.t  # (M,): each response token is predicted by the position before it
        chunks = list(zip(hidden[b, t - 1].split(self.chunk), batch.ids[b, t].split(self.chunk)))
        scores, head = self.scores, self.model.get_output_embeddings()
        if len(chunks) > 1 and torch.is_grad_enabled():
            scores = functools.partial(checkpoint, scores, use_reentrant=False, preserve_rng_state=False)
        parts = [scores(*c, head, self.value_index) for c in chunks]
        logp, h = (x.new_zeros(batch.ids.shape).index_put((b, t), x) for x in map(torch.cat, zip(*parts)))
        before, after = hidden[batch.seq, batch.start - 1], hidden[batch.seq, batch.end - 1]  # (N, D) each
        p_v, p_q = self.readout(torch.stack([before, after]))  # SAPO: V before the response sees no action, Q after it sees no reward
        return logp, h, p_v, p_q

    def text(self, ids):
        """A response as text, without the stop token it may end in."""
        return self.tokenizer.decode(ids[:-1] if ids[-1] in self.stop_ids else ids)

    def save(self, folder):
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        with open(os.path.join(folder, "sapo.json"), "w") as file:
            json.dump({"value_ids": list(self.value_ids), "tau_v": self.tau_v, "r_max": self.r_max}, file)


class Critic(torch.nn.Module):
    """The separate critic of the PPO baseline: a copy of the policy's body under a linear head in float32 that starts at 0. SAPO needs none."""

    def __init__(self, lm):
        super().__init__()
        self.body = copy.deepcopy(lm.model.base_model)
        self.head = torch.nn.Linear(lm.model.config.hidden_size, 1, device=lm.device)
        self.__dict__["run"] = compiled_body(self.body) if lm.compile else self.body  # not a second entry in the state
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch):
        """Batch -> (B, T): V over R_max before each response token, 0 elsewhere."""
        hidden = hidden_states(self.body, self.run, batch.ids)[batch.b, batch.t - 1].float()
        return hidden.new_zeros(batch.ids.shape).index_put((batch.b, batch.t), self.head(hidden)[:, 0])


class Chat:
    """Turns text into the token ids of a conversation, by the tokenizer's own chat template."""

    MARK = "@response@"

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template; choose an instruct model (its tokenizer_config.json or "
                             "chat_template.jinja holds the template)")
        self.tokenizer = tokenizer

    def encode(self, messages, after=None):
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if after is not None:
            text = text[text.rindex(after) + len(after):]
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def first(self, text):
        """The first user message up to where the response begins."""
        return self.encode([{"role": "user", "content": text}])

    def later(self, text, last_token=None):
        """What stands between a response and the next one: end of turn, user message, header. An end-of-turn token the
        policy chose itself (`last_token`) is not repeated. Nothing already in the conversation is encoded again."""
        ids = self.encode([{"role": "user", "content": "-"}, {"role": "assistant", "content": self.MARK},
                           {"role": "user", "content": text}], after=self.MARK)
        return ids[1:] if ids[0] == last_token else ids


# ------------------------------------------------------------------------------------------------------------ loading

OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google", "Mistral": "mistralai"}


def hub_id(name):
    """Qwen2.5-1.5B-Instruct -> Qwen/Qwen2.5-1.5B-Instruct; folders and full ids stay as they are. ValueError for any other word."""
    if os.path.isdir(name) or "/" in name:
        return name
    owner = next((o for prefix, o in OWNERS.items() if name.startswith(prefix)), None)
    if owner is None:
        raise ValueError("it has no slash and begins with none of " + ", ".join(OWNERS))
    return f"{owner}/{name}"


def reserve_value_ids(tokenizer, rows, taken):
    """Two vocabulary entries no text uses: the last padded rows past the tokenizer, else special tokens that neither the
    chat template nor `taken` (stop tokens and the like) uses, those named reserved or unused first."""
    used = max(tokenizer.get_vocab().values()) + 1
    if rows - used >= 2:
        return rows - 2, rows - 1
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    taken = set(taken) | {tokenizer.convert_tokens_to_ids(t) for t in roles if t}
    free = [(i, t.content) for i, t in tokenizer.added_tokens_decoder.items()
            if t.special and i < rows and i not in taken and t.content not in tokenizer.chat_template]
    free.sort(key=lambda it: (not any(w in it[1] for w in ("reserved", "unused", "extra")), -it[0]))
    if len(free) < 2:
        raise ValueError("no two vocabulary entries are free for w+ and w-; name two tokens no text uses: --value_tokens A B")
    return free[1][0], free[0][0]


def named_value_ids(tokenizer, names, taken, rows=float("inf")):
    ids = tuple(tokenizer.get_vocab().get(n, int(n) if n.isdigit() else -1) for n in names)
    for name, i in zip(names, ids):
        if not 0 <= i < rows:  # a number names a row of the head
            raise ValueError(f"--value_tokens: the tokenizer has no token {name!r}" + (f", the head no such row: it has {rows}" if name.isdigit() else ""))
        if i in taken or name in tokenizer.chat_template:
            raise ValueError(f"--value_tokens: {name!r} is a stop token or part of the chat template")
    if len(set(ids)) != 2:
        raise ValueError("--value_tokens needs two different tokens")
    return ids


def load_tokenizer(name):
    """AutoTokenizer, except where a folder's tokenizer.json is declared to be the whole truth: for some architectures (Qwen2
    among them) AutoTokenizer would rebuild it as that architecture's own, and the tiny model's words would be lost."""
    path = os.path.join(name, "tokenizer_config.json")
    if os.path.isfile(path):
        with open(path) as file:
            if json.load(file).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
                return PreTrainedTokenizerFast.from_pretrained(name)
    return AutoTokenizer.from_pretrained(name)


# Of Qwen2.5, from the config.json of each: width, width of the MLP, layers, heads, heads of K and V, vocabulary, head is the embedding
QWEN25 = {"0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True), "3B": (2048, 11008, 36, 16, 2, 151936, True),
          "7B": (3584, 18944, 28, 28, 4, 152064, False)}


@contextlib.contextmanager
def named(name):
    """Turns the many ways in which a name may turn out to be no model into one ValueError."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot load model {name!r}: neither tiny, nor a folder with a causal language model, nor a hub id that "
                         f"can be reached ({reason})") from None


def architecture(name):
    """The config of a model by name; Qwen2.5's sizes are known without a download."""
    size = re.fullmatch(r"(?:Qwen/)?Qwen2\.5-([\d.]+B)(?:-Instruct)?", name)
    if os.path.isdir(name) or not size or size[1] not in QWEN25:
        with named(name):
            return AutoConfig.from_pretrained(hub_id(name))
    width, mlp, layers, heads, kv_heads, vocabulary, tied = QWEN25[size[1]]
    return Qwen2Config(hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                       vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768, rms_norm_eps=1e-6,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def load(name, *, value_tokens=None, tau_v=None, r_max=None, device=None, dtype=torch.float32, seed=0, words=(), random_weights=False):
    """-> ActorCritic on `device` (default: a GPU where there is one).

    `name`: "tiny", a folder, a hub id or a bare name. tau_v and r_max default to what the folder was trained with, else 1 and
    10. `seed` and `words` (fixed strings, nouns) make the tiny model. random_weights builds the named architecture without its
    weights, behind the tiny model's tokenizer: for measuring. ValueError says what is wrong."""
    saved, device = {}, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "tiny":
        model, tokenizer = tiny(*words, seed=seed)
    else:
        config = architecture(name) if random_weights else None
        with named(name):
            if random_weights:
                tokenizer = tiny_tokenizer(*words)
                with torch.random.fork_rng(), device:
                    torch.manual_seed(seed)
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
            else:
                tokenizer = load_tokenizer(hub_id(name))
                model = AutoModelForCausalLM.from_pretrained(hub_id(name), dtype=dtype, attn_implementation="sdpa")
        if os.path.isfile(os.path.join(name, "sapo.json")):
            with open(os.path.join(name, "sapo.json")) as file:
                saved = json.load(file)
    chat = Chat(tokenizer)
    defaults = model.generation_config.eos_token_id
    end_of_turn = chat.later("-")[0]
    stops = {*(defaults if isinstance(defaults, list) else [defaults]), tokenizer.eos_token_id}
    stops |= {end_of_turn} if end_of_turn in tokenizer.added_tokens_decoder else set()
    stops = tuple(sorted(stops - {None}))
    rows = len(model.get_output_embeddings().weight)
    if value_tokens:
        value_ids = named_value_ids(tokenizer, value_tokens, stops, rows)
    else:
        value_ids = saved.get("value_ids") or reserve_value_ids(tokenizer, rows, stops)
    model = model.to(device).eval()
    for p in model.parameters():  # and no buffer: RoPE's frequencies would be rounded as well
        p.data = p.data.to(dtype)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and nearly every micro-batch has its own
    lm = ActorCritic(model, tokenizer, chat, tuple(value_ids), stops,
                     tau_v or saved.get("tau_v", 1.0), r_max or saved.get("r_max", 10.0))
    check_head(lm)
    return lm


@torch.no_grad()
def check_head(lm):
    """score() applies the head to the body's output itself. A model that does more (softcapping, logit scaling) is refused."""
    ids = torch.tensor([lm.chat.first("hello")[:32]], device=lm.device)
    if not torch.allclose(lm.model(input_ids=ids).logits.float(), lm.logits(lm.body(ids)).float(), atol=1e-2, rtol=1e-2):
        raise ValueError(f"{type(lm.model).__name__} does something to its logits after the head (softcapping or scaling); "
                         "such models are not supported")


@torch.no_grad()
def readout_at_start(lm, prompts):
    """The logit difference z+ - z- before and after an empty response, over a few prompts (lists of ids), before any training:
    -> (mean, standard deviation, saturated fraction). ValueError where most readouts start where Eq. 1 is flat."""
    diffs = []
    for ids in prompts:
        hidden = lm.body(torch.tensor([ids + lm.chat.later("-")[:1]], device=lm.device))[0, -2:]
        plus, minus = lm.value_logits(hidden).unbind(-1)
        diffs.append(plus - minus)
    diff = torch.cat(diffs)
    saturated = (diff.abs() > lm.tau_v).float().mean().item()
    if saturated > 0.5:
        words = [lm.tokenizer.convert_ids_to_tokens(i) for i in lm.value_ids]
        raise ValueError(f"{saturated:.0%} of the value readouts start saturated: the logits of {words} differ by {diff.mean():.2f} "
                         f"+- {diff.std():.2f}, and Eq. 1 has no gradient beyond tau_v = {lm.tau_v:g}. Choose two other tokens "
                         f"with --value_tokens A B, or raise --tau_v above {2 * diff.abs().mean():.1f}")
    return diff.mean().item(), diff.std().item(), saturated


# --------------------------------------------------------------------------------------------------------------- tiny


def tiny_tokenizer(phrases, nouns):
    """A word-level tokenizer: a fixed phrase ("You arrive at") or a numbered noun ("cabinet 1") is one token, an unknown word or
    number is spelled, so that every ASCII string can be encoded and every command of a house be said. White space, commas, quotes, brackets
    and the like only separate words and are forgotten, as are articles: half as many tokens to read."""
    fixed = sorted(phrases, key=len, reverse=True)
    edge = lambda p: (r"(?<![A-Za-z])" if p[0].isalpha() else "") + re.escape(p) + (r"(?![A-Za-z])" if p[-1].isalpha() else "")
    word = r"(?<![A-Za-z])(?!(?:a|an|and|the)(?![A-Za-z]))[A-Za-z]+"
    pattern = "|".join([*map(edge, fixed), r"[A-Za-z]+ \d+", word, r"\d+", r"[^\s\w.,:;'\"\[\]]"])
    control = ["<|pad|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|end|>"]
    letters = [chr(c) for c in range(32, 127)]
    spelled = letters + [f"##{c}" for c in letters] + [f"## {n}" for n in range(100)]  # ## goes on with a word: "cabinet" "## 12"
    vocab = {w: i for i, w in enumerate(dict.fromkeys(control + spelled + sorted(nouns) + sorted(fixed) + [str(n) for n in range(100)]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<|unknown|>", continuing_subword_prefix="##", max_input_chars_per_word=10 ** 6))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(c, special=True) for c in control])
    template = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
                "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token="<|end|>", pad_token="<|pad|>",
                                   unk_token="<|unknown|>", clean_up_tokenization_spaces=False)


def tiny(phrases, nouns, seed=0):
    """A randomly initialised Qwen2 with about 0.2 M parameters. Embeddings are untied, the rows of w+ and w- zero: V = Q = 0."""
    tokenizer = tiny_tokenizer(phrases, nouns)
    config = Qwen2Config(vocab_size=len(tokenizer) + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=16384,
                         tie_word_embeddings=False,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[-2:] = 0
    return model, tokenizer


def main():
    import envs  # for the tiny model's words only

    parser = argparse.ArgumentParser(description="Shows a model's reserved words and reads V and Q from one turn.")
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    try:
        lm = load(args.model, words=envs.words())
        prompt = lm.chat.first("You are in a kitchen. Put an apple in the fridge.")
        mean, spread, saturated = readout_at_start(lm, [prompt])
    except ValueError as error:
        sys.exit(f"model.py: {error}")
    said = lm.tokenizer("<think> find apple </think> <action> go to fridge 1 </action>", add_special_tokens=False).input_ids + [lm.stop_ids[0]]
    batch = make_batch([(prompt + said, [(len(prompt), len(prompt) + len(said))])])
    with torch.no_grad():
        logp, h, p_v, p_q = lm.score(batch.to(lm.device))
    print(f"{args.model}: {type(lm.model).__name__}, {sum(p.numel() for p in lm.model.parameters()) / 1e6:.1f} M parameters")
    print(f"w+ = {lm.value_ids[0]}, w- = {lm.value_ids[1]} of {lm.model.get_output_embeddings().weight.shape[0]}; stop tokens {lm.stop_ids}")
    print(f"logit difference at the start: {mean:.3f} +- {spread:.3f}, {saturated:.0%} saturated")
    print(f"one turn: V = {lm.r_max * p_v.item():.3f} before it, Q = {lm.r_max * p_q.item():.3f} after it; "
          f"{len(said)} tokens, log-prob {logp.sum():.2f}, mean entropy {h.sum() / len(said):.2f} nats")


if __name__ == "__main__":
    main()
