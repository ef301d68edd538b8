"""One causal language model as actor and critic.

    readouts       two logits of a causal LM as a value in [-1, 1], a policy without them    Eq. 1-3
    choose         draws a token by one uniform number
    ActorCritic    a Hugging Face model, its chat format, its two reserved words; `score` is one
                   forward pass over a Batch: log-probs, entropy, readouts of V and Q
    Critic         the separate value model that PPO needs and SAPO does not
    load           by hub id, folder or bare name

A training sample is a token sequence with one or more turns in it; a turn is the span [start, end)
of its response. V is read at start - 1, Q at end - 1, the last token the policy chose. Shapes: B
sequences, T tokens, M response tokens, N turns, W words, D width. `# SAPO:` marks what is new.
    python model.py [--model NAME]       shows a model's reserved words and reads V and Q of a turn
"""
import contextlib
import copy
import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import huggingface_hub as hub
import torch
import torch.nn.functional as F
import transformers  # it loads what is used when it is used: a misspelt flag does not wait for it
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import sdpa_mask

# ------------------------------------------------------------------ readouts (copy these alone)

def value_readout(logits, value_ids, *, tau):
    """Eq. 1. Logits (..., W) and the ids (w+, w-) -> p in [-1, 1], (...). V and Q are R_max p."""
    plus, minus = (logits[..., i] for i in value_ids)
    return ((plus - minus) / tau).clamp(-1, 1)  # Eq. 1  # SAPO: a value without a value head


def restricted_log_softmax(logits, value_ids):
    """Eq. 3. Logits (..., W) -> log-probs of every word but the two reserved ones, whose
    probability is exactly 0. 16-bit logits are raised to float32 first."""
    value_ids = torch.as_tensor(value_ids, device=logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    wide = wide.index_fill(-1, value_ids, float("-inf"))
    return wide.log_softmax(-1)  # Eq. 3  # SAPO: w+ and w- are no actions


def entropy(logp, value_ids):
    """Entropy in nats of restricted log-probs, (..., W) -> (...), in which 0 * -inf counts 0."""
    value_ids = torch.as_tensor(value_ids, device=logp.device)
    return -(logp.exp() * logp.index_fill(-1, value_ids, 0.0)).sum(-1)


# --------------------------------------------------------------------------------------- batches

class Batch(NamedTuple):
    """Sequences, padded on the right so that causal attention needs no mask, and the positions of
    response tokens and turns in them. These are made on the host, because indexing by a boolean
    mask on a GPU would make the host wait."""

    ids: torch.Tensor  # (B, T)
    length: torch.Tensor  # (B,) for imitation and measurements
    row: torch.Tensor  # (N,) the sequence of each turn, and its span there
    start: torch.Tensor  # (N,)
    end: torch.Tensor  # (N,)
    turn_of: torch.Tensor  # (M,) the turn of each response token, and its place
    token_row: torch.Tensor  # (M,)
    token_col: torch.Tensor  # (M,)

    def to(self, device):
        return Batch(*(x.to(device) for x in self))


def make_batch(samples):
    """[(ids, [(start, end), ...]), ...], a tuple for each sequence, a span for each of its turns ->
    Batch, turns in that order. ValueError where a turn has no context or no response."""
    turns = [(b, *span) for b, (_, spans) in enumerate(samples) for span in spans]
    if any(not 0 < start < end <= len(samples[b][0]) for b, start, end in turns):
        raise ValueError("a turn needs context before it and a response in it")
    ids = [torch.tensor(ids, dtype=torch.long) for ids, _ in samples]
    row, start, end = torch.tensor(turns, dtype=torch.long).reshape(-1, 3).unbind(1)
    tokens = sum(end - start for _, start, end in turns)
    turn_of = torch.arange(len(turns)).repeat_interleave(end - start, output_size=tokens)
    col = torch.arange(len(turn_of)) + (end - (end - start).cumsum(0))[turn_of]
    return Batch(pad_sequence(ids, batch_first=True), torch.tensor([len(x) for x in ids]),
                 row, start, end, turn_of, row[turn_of], col)


def micro_batches(samples, budget):
    """[(ids, ...)] -> groups of samples of similar length, shortest first, each of at most `budget`
    padded tokens or of one sample."""
    groups = []
    for sample in sorted(samples, key=lambda s: len(s[0])):
        if not groups or (len(groups[-1]) + 1) * len(sample[0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


# ------------------------------------------------------------------------------ drawing a token

BLOCK = 128  # words in a block of `choose`


def choose(logits, u, value_ids, temperature):
    """(R, W) logits, (R,) uniforms in [0, 1) -> token (R,), log-prob (R,). Temperature 0 is greedy.

    It inverts the cumulative distribution in two steps, first the block of words and then the word,
    because a GPU scans a whole vocabulary slowly. Sums are float64, and the first entry *above* u
    is taken, so that a word of probability 0 never is."""
    logits = logits if temperature in (0, 1) else logits / temperature
    logp = restricted_log_softmax(logits, value_ids)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        prob, short = logp.exp(), -logp.shape[1] % BLOCK
        prob = (F.pad(prob, (0, short)) if short else prob).unflatten(1, (-1, BLOCK))
        mass = prob.sum(-1, dtype=torch.float64).cumsum(-1)  # (R, blocks)
        below = 1 - 2 ** -40  # keeps the target below the sum where u rounds to 1
        target = u[:, None].double().clamp(max=below) * mass[:, -1:]
        block = torch.searchsorted(mass, target, right=True).clamp(max=mass.shape[1] - 1)
        inner = prob.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
        rest = torch.minimum(target - F.pad(mass, (1, 0)).gather(1, block), inner[:, -1:] * below)
        token = block * BLOCK + torch.searchsorted(inner, rest, right=True)
        token = token.clamp(max=logp.shape[1] - 1)  # NaN must not index beyond the words
    return token[:, 0], logp.gather(1, token)[:, 0]


# ------------------------------------------------------------------------------- actor and critic

def attend(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    """Attention for transformers' decoders: query (R, H, T, E), key and value (R, H', S, E) with H'
    dividing H, a mask (R, 1, T, S) to add, or of the keys to see, or for causal attention none or
    an empty one, as in ActorCritic.causal -> (R, T, H, E), None. K and V are never repeated for the
    G = H / H' heads that share them."""
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name}")
    mask, sdpa = attention_mask, F.scaled_dot_product_attention
    ours = mask is not None and mask.numel() == 0
    causal = ours or mask is None and query.shape[2] > 1  # one query behind a cache sees all of it
    mask = None if ours else mask
    grouped = query.unflatten(1, (-1, groups := query.shape[1] // key.shape[1]))  # R, H', G, T, E
    if mask is None and not (query.is_cuda and query.dtype == torch.float32):
        shared = {"enable_gqa": True} if groups > 1 else {}  # compiled, groups > 1 is no bool
        out = sdpa(query, key, value, is_causal=causal, scale=scaling, **shared)
    elif mask is not None and query.shape[2] == 1:  # heads that share K and V become queries
        out = sdpa(grouped[:, :, :, 0], key, value, mask.expand(-1, 1, groups, -1), scale=scaling)
        out = out.flatten(1, 2)[:, :, None]
    else:  # one head of each group after the other: no mask is repeated, and GPUs' float32 is fast
        out = [sdpa(q, key, value, mask, 0, causal, scale=scaling) for q in grouped.unbind(2)]
        out = torch.stack(out, 2).flatten(1, 2)
    return out.transpose(1, 2), None


def all_full(body):
    """Whether every layer of a model's body attends to all that came before."""
    config = body.config.get_text_config()  # of a model that sees pictures, a part
    layers, window = (getattr(config, name, None) for name in ("layer_types", "sliding_window"))
    return set(layers) == {"full_attention"} if layers else not window


class Float32Product(torch.autograd.Function):
    """16-bit hidden states (M, D) times a 16-bit head (W, D) -> float32 logits (M, W). Rounded to
    bfloat16, a logit between 16 and 32 would be off by up to 0.06. The gradient of the logits is
    rounded to 16 bits, as it is in any 16-bit linear layer."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        if torch.compiler.is_compiling():
            return hidden.float() @ weight.float().T
        wide, logits = hidden.float(), torch.empty(len(hidden), len(weight), dtype=torch.float32)
        for start in range(0, len(weight), 1024):  # a widened slice fits a CPU's cache
            part = slice(start, start + 1024)
            torch.mm(wide, weight[part].float().T, out=logits[:, part])
        return logits

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.T @ hidden


def float32_logits(hidden, head):
    """Hidden states (M, D) -> logits (M, W) of the output layer `head`, in float32."""
    if head.weight.dtype not in (torch.float16, torch.bfloat16):
        return head(hidden)
    if hidden.dtype == head.weight.dtype:
        logits = Float32Product.apply(hidden, head.weight)
    else:  # hidden states that `in_float32` made
        logits = hidden @ head.weight.float().T
    return logits if head.bias is None else logits + head.bias.float()


def token_scores(hidden, token, head, value_ids):
    """Hidden states (M, D), the tokens (M,) that followed -> their log-probs, the entropy, (M,)."""
    logp = restricted_log_softmax(float32_logits(hidden, head), value_ids)  # (M, W)
    return logp.gather(1, token[:, None])[:, 0], entropy(logp, value_ids)


class Scores(NamedTuple):
    logp: torch.Tensor  # (M,) log-probs of the response tokens, Eq. 3, at temperature 1
    entropy: torch.Tensor  # (M,) of this model's policy at these tokens' positions, in nats
    p_v: torch.Tensor  # (N,) readouts before the responses, Eq. 1: V = R_max p_v
    p_q: torch.Tensor  # (N,) readouts after them: Q = R_max p_q


@dataclass
class ActorCritic:
    """A causal LM and how it is read: value_ids = (w+, w-), stop_ids end a response, tau_v, r_max
    of Eq. 1 and 2. The model gets an attention of ours, and can be used otherwise as before."""

    model: torch.nn.Module
    tokenizer: object
    chat: "Chat"  # or None, where text is no concern
    value_ids: tuple
    stop_ids: tuple
    tau_v: float = 1.0
    r_max: float = 10.0
    compile: bool = False  # scoring

    def __post_init__(self):
        if all_full(self.model.base_model):
            transformers.AttentionInterface.register("grouped", attend)
            transformers.AttentionMaskInterface.register("grouped", sdpa_mask)
            self.model.set_attn_implementation("grouped")
        self.device, self.head = self.model.device, self.model.get_output_embeddings()
        self.value_index = torch.tensor(self.value_ids, device=self.device)
        self.fastest = {}  # (context, compile): how a Sampler computes, once that has been checked
        self.max_length = getattr(self.model.config.get_text_config(),
                                  "max_position_embeddings", None) or 1 << 30
        # positions whose logits exist at a time: a multiple of 128, about 256 MiB in float32
        self.chunk = max(1, 2 ** 19 // len(self.head.weight)) * 128
        self.trunk, self.token_scores = self.model.base_model, token_scores
        if self.compile:
            from machine.fast import compiled, compiled_layers
            self.trunk, self.token_scores = compiled_layers(self.trunk), compiled(token_scores)

    def causal(self, ids):
        """What our own passes give with ids (R, T): an empty mask, with which transformers builds
        none, and does not wait for a GPU to see whether there is padding. Other passes, such as
        `generate`, get the mask that they need."""
        if self.model.config._attn_implementation != "grouped":
            return {}
        return {"attention_mask": torch.empty(1, 1, 0, 0, device=ids.device),
                "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}

    def body(self, ids):
        """(B, T) ids, padded on the right -> hidden states (B, T, D), or of a few more rows and
        positions: what is compiled is not compiled again for one row or for every width."""
        if self.compile:
            ids = F.pad(ids, (0, -ids.shape[1] % 8, 0, len(ids) == 1))
        return self.trunk(input_ids=ids, use_cache=False, **self.causal(ids)).last_hidden_state

    def readout(self, hidden):
        """(..., D) -> p in [-1, 1], (...): a product with two rows of the head, in float32, because
        16-bit logits would be rounded before one is subtracted from the other."""
        weight = self.head.weight.index_select(0, self.value_index).float()
        bias = self.head.bias
        if bias is not None:
            bias = bias.index_select(0, self.value_index).float()
        return value_readout(F.linear(hidden.float(), weight, bias), (0, 1), tau=self.tau_v)

    def score(self, batch):
        """One forward pass -> Scores.

        Logits are made of response positions alone, a chunk at a time. Where there are several,
        they are made again in the backward pass, so that only one chunk's logits exist."""
        hidden = self.body(batch.ids)
        before = hidden[batch.token_row, batch.token_col - 1]  # (M, D): it predicts the token
        token = batch.ids[batch.token_row, batch.token_col]
        n = max(1, -(-len(before) // self.chunk))
        chunks = zip(before.tensor_split(n), token.tensor_split(n))
        score_chunk = self.token_scores
        if len(before) > self.chunk and torch.is_grad_enabled():
            score_chunk = functools.partial(checkpoint, score_chunk, use_reentrant=False,
                                            preserve_rng_state=False)
        parts = [score_chunk(*chunk, self.head, self.value_index) for chunk in chunks]
        logp, h = (torch.cat(column) for column in zip(*parts))
        ends = torch.stack([hidden[batch.row, batch.start - 1], hidden[batch.row, batch.end - 1]])
        p_v, p_q = self.readout(ends)  # SAPO: V sees no action, Q sees no reward
        return Scores(logp, h, p_v, p_q)

    def stopped(self, ids):
        """Whether a response ends in a stop token, and was not cut short."""
        return ids[-1] in self.stop_ids

    def text(self, ids):
        """A response as text, without the stop token it may end in."""
        return self.tokenizer.decode(ids[:-1] if self.stopped(ids) else ids,
                                     clean_up_tokenization_spaces=False)

    def save(self, folder):
        """Writes a Hugging Face folder, and beside its files sapo.json. Tools that know nothing of
        us read it rightly: `generate` never says w+ or w-, and settings stand there under the names
        of transformers 4 too, which vLLM and llama.cpp may still use."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        ours = {"value_ids": self.value_ids, "tau_v": self.tau_v, "r_max": self.r_max}
        Path(folder, "sapo.json").write_text(json.dumps(ours))
        silent = {*(self.model.generation_config.suppress_tokens or ()), *self.value_ids}
        with amended(f"{folder}/generation_config.json") as config:
            config["suppress_tokens"] = sorted(silent)
        with amended(f"{folder}/config.json") as config:
            rope = config.get("rope_parameters") or {}
            if "rope_theta" in rope:
                scaled = rope.get("rope_type", "default") != "default"
                config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], (
                    {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None)
        with amended(f"{folder}/tokenizer_config.json") as config:
            if config["tokenizer_class"] == "TokenizersBackend":
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
                config["model_input_names"] = ["input_ids", "attention_mask"]
            if isinstance(config.get("extra_special_tokens"), list):
                config["additional_special_tokens"] = config.pop("extra_special_tokens")


@contextlib.contextmanager
def amended(path):
    """-> the JSON object in a file, which is written again when its entries have been changed."""
    content = json.loads(Path(path).read_text())
    yield content
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


class Chat:
    """Turns text into the token ids of a conversation, by the tokenizer's own chat template."""

    USER, RESPONSE = "@user@", "@response@"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        try:
            text = self.written(self.USER, self.RESPONSE, self.USER)
        except Exception as error:  # there is no template, or it fails in a way of its own
            raise ValueError(f"no chat template, choose an instruct model: {error}") from None
        if (text.count(self.USER), text.count(self.RESPONSE)) != (2, 1) or not tokenizer.is_fast:
            raise ValueError("no fast tokenizer with a chat template that keeps what the assistant "
                             "says (chat_template.jinja has it): choose an instruct model")
        # what stands around a text: to run the template for every turn would take too long
        self.begin, self.end = self.written(self.USER).split(self.USER)
        self.between = text.partition(self.RESPONSE)[2].split(self.USER)[0]
        tokenizer("-")  # which turns the backend's padding and truncation off
        self.keep_out(())
        # what the template itself says of every response: "<think>\n" in models that always think
        begun = re.search(r"<think>(?!.*<think>).*", self.end, re.S)
        self.response_prefix = begun[0] if begun and not self.control.search(begun[0]) else ""

    def written(self, *contents):
        """The user's and the assistant's messages in turn, as text up to the next response."""
        roles = ("user", "assistant") * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=True)

    def keep_out(self, ids):
        """From now on, no text becomes a control token: a special token, or an added token that is
        one of these ids or of the template's. The tags of a response stay what they are."""
        added = self.tokenizer.added_tokens_decoder
        ids = {*ids, *self.ids(self.begin + self.between + self.end)}
        names = {token.content for i, token in added.items() if token.special or i in ids}
        names -= {"<think>", "</think>", "<action>", "</action>"}
        rests = {}  # by first letter, which is all that a match takes
        for name in sorted(name for name in names if len(name) > 1):
            rests.setdefault(name[0], []).append(re.escape(name[1:]))
        self.control = re.compile("|".join(
            f"{re.escape(first)}(?={'|'.join(its)})" for first, its in rests.items()) or "(?!)")

    def ids(self, text):
        """Text of the template -> ids."""
        backend = self.tokenizer.backend_tokenizer  # it takes half the time of transformers' call
        return backend.encode(text, add_special_tokens=False).ids

    def encode(self, text, begin="", end=""):
        """A text from outside, between two parts of the template -> ids. Where the text spells a
        control token, such as <|im_end|>, it is encoded in two parts, cut behind the first letter:
        no game can end the user's message and speak as somebody else."""
        cuts = [len(begin) + m.end() for m in self.control.finditer(text)]
        text, ids = begin + text + end, []
        for start, stop in zip([0, *cuts], [*cuts, len(text)]):
            ids += self.ids(text[start:stop])
        return ids

    def prompt(self, text, before=()):
        """The ids of a user message up to where the response begins. `before`: the ids of the
        conversation so far; an end of turn that they end in is not repeated."""
        ids = self.encode(text.strip(), self.between if before else self.begin, self.end)
        return ids[1:] if before and ids[0] == before[-1] else ids


class Critic(torch.nn.Module):
    """The critic of ppo and sapo-separate: a copy of the policy's body under a float32 linear head
    that starts at 0. SAPO needs none."""

    def __init__(self, lm):
        super().__init__()
        self.lm = replace(lm, model=copy.deepcopy(lm.model))
        self.body = self.lm.model.base_model  # which is trained
        self.head = torch.nn.Linear(lm.model.config.get_text_config().hidden_size, 1,
                                    device=lm.device)
        for p in self.head.parameters():
            torch.nn.init.zeros_(p)

    def forward(self, batch):
        """Batch -> (M,): V over R_max before each response token."""
        hidden = self.lm.body(batch.ids)
        return self.head(hidden[batch.token_row, batch.token_col - 1].float())[:, 0]

    def of_turns(self, batch):
        """Batch -> (N,): V over R_max before each turn's first response token."""
        length = batch.end - batch.start
        return self(batch)[length.cumsum(0) - length]


# --------------------------------------------------------------------------------------- loading

RESULTS = Path(__file__).resolve().parent / "results"
OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google",
          "Mistral": "mistralai"}


def folder_of(name, env=None):
    """Where a model lies if it is on this machine: the folder of "tiny", its own, or its run's."""
    tiny = "tiny-alfworld" if env == "alfworld" else "tiny-house"  # made by tools/imitate.py
    folder = RESULTS / tiny if name == "tiny" else Path(name)
    return folder / "final" if (folder / "final").is_dir() else folder


def locate(name, env=None):
    """-> the folder or hub id that a name means: one of `folder_of`, Qwen2.5-1.5B or OWNER/NAME."""
    if folder_of(name, env).is_dir():
        return str(folder_of(name, env))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"cannot load model {name}: there is no such folder")
    owner = next((owner for family, owner in OWNERS.items() if name.startswith(family)), None)
    return f"{owner}/{name}" if owner and "/" not in name else name


@functools.cache
def hub_answers():
    """A hub that does not answer is not asked again, which would take half a minute a file."""
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=5)
    except Exception:  # whatever the network does
        return False
    return True


def file_in(where, name):
    """-> the path of a file in a folder or a hub id, or None if it has none of this name."""
    if Path(where).is_dir():
        return Path(where, name) if Path(where, name).is_file() else None
    return transformers.utils.cached_file(
        where, name, local_files_only=not hub_answers(), _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)


def is_tiny(name):
    """Whether a name is `random` or that of a model of the tiny one's size."""
    config = folder_of(name) / "config.json"
    return name == "random" or (
        config.is_file() and json.loads(config.read_text()).get("hidden_size") == 64)


def load(name, *, env=None, value_tokens=None, tau_v=None, r_max=None, device=None,
         dtype=torch.float32, prompt="", max_new=0):
    """-> ActorCritic on `device` (default: a GPU, if any). `name`: as `locate` has it; "tiny" is
    another model in the `env` alfworld. tau_v and r_max default to those the folder was trained
    with, else 1 and 10. ValueError: what is wrong, such as no room for a prompt and a response of
    max_new tokens, which is known before the weights are read."""
    where = locate(name, env)
    options = {} if Path(where).is_dir() or hub_answers() else {"local_files_only": True}
    try:
        if file_in(where, "adapter_config.json"):
            raise ValueError("this is an adapter, such as LoRA's, and not a whole model: merge it "
                             "into its model first (peft: merge_and_unload, save_pretrained)")
        # AutoTokenizer would not read tokenizer.json where the model is a Qwen2, as tiny ones were
        kind = (transformers.PreTrainedTokenizerFast if file_in(where, "sapo.json")
                else transformers.AutoTokenizer)
        tokenizer = kind.from_pretrained(where, **options)
        config = transformers.AutoConfig.from_pretrained(where, **options)
        length = getattr(config.get_text_config(), "max_position_embeddings", None)
        needed = len(tokenizer(prompt).input_ids) + max_new
        if length and needed > length:
            raise ValueError(f"--max_new {max_new} leaves no room for a prompt: together they need "
                             f"{needed} tokens or more, and it has {length}")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, attn_implementation="sdpa",
            output_loading_info=True, **options)
    except Exception as error:  # safetensors, tokenizers and the hub have errors of their own
        why = " ".join((str(error).strip() or type(error).__name__).split())[:300]
        what = name if folder_of(name).is_dir() else f"{name}, which is no folder here"
        raise ValueError(f"cannot load model {what}: {why}") from None
    if lost := sorted(report["missing_keys"]):  # they would be trained on as random numbers
        raise ValueError(f"the weights of {name} lack {len(lost)} tensors, such as {lost[0]}")
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lm = actor_critic(model, tokenizer, value_tokens, tau_v=tau_v, r_max=r_max)
    if not lm.chat:
        raise ValueError(f"{name} has no chat template: choose an instruct model")
    return lm


def actor_critic(model, tokenizer, value_tokens=None, value_ids=None, tau_v=None, r_max=None):
    """-> ActorCritic whose w+ and w- are the two `value_tokens`, else `value_ids`, else those that
    sapo.json names beside the model's files, as it does tau_v and r_max, else two that no text
    uses. Where they are new, their rows in the model become 0. ValueError: it cannot be served."""
    model = getattr(model, "_orig_mod", model).eval()  # torch.compile's has other forward passes
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} is not supported: its body has no name")
    path = model.name_or_path and file_in(model.name_or_path, "sapo.json")
    ours = json.loads(Path(path).read_text()) if path else {}
    value_ids = value_ids or ours.get("value_ids")
    chat = Chat(tokenizer) if tokenizer.chat_template else None  # without one, only to score
    if chat:
        check_tokenizer(model, chat)
    without_dropout(model)
    head = model.get_output_embeddings()
    stop_ids = stop_ids_of(model, tokenizer, chat)
    if value_tokens or not value_ids:
        trained, value_ids = value_ids, reserve_value_ids(
            tokenizer, len(head.weight), stop_ids, value_tokens)
        if value_ids != tuple(trained or ()):  # V = Q = 0, and 16 bits hold small steps near 0
            for p in head.parameters():
                p.data[[*value_ids]] = 0
    if chat:
        chat.keep_out({*value_ids, *stop_ids})
    lm = ActorCritic(model, tokenizer, chat, tuple(value_ids), stop_ids,
                     tau_v or ours.get("tau_v", 1.0), r_max or ours.get("r_max", 10.0))
    check_head(lm)
    return lm


def stop_ids_of(model, tokenizer, chat):
    """The tokens that end a response: the model's own, and the end of a turn in a conversation."""
    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    if chat:
        stops |= {chat.prompt("-", [None])[0]} & tokenizer.added_tokens_decoder.keys()
    return tuple(sorted(stops - {None}))


def reserve_value_ids(tokenizer, rows, taken, named=None):
    """(w+, w-): the two tokens that are `named`, of which one may be the number of a row; else the
    last rows of the head past the tokenizer's words; else special tokens without a role or a place
    in the chat template, preferably those named reserved or unused. ValueError: none are free."""
    words, special = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    used = {i for i, token in special.items()
            if token.content in (tokenizer.chat_template or "") or token.content in roles} | {
                *taken}
    if named:
        ids = tuple(n if isinstance(n, int) else words.get(n, int(n) if n.isdigit() else -1)
                    for n in named)
        if ids[0] == ids[1] or not all(0 <= i < rows and i not in used for i in ids):
            raise ValueError(f"--value_tokens {' '.join(map(str, named))}: not two tokens, or rows "
                             f"of the head's {rows}, that neither end a response nor a message")
        return ids
    if rows - max(words.values()) > 2:
        return rows - 2, rows - 1
    free = [i for i, token in special.items() if token.special and i < rows and i not in used]
    free.sort(key=lambda i: (bool(re.search("reserved|unused|extra", special[i].content)), i))
    if len(free) < 2:
        raise ValueError("no two vocabulary entries are free for w+ and w-; name two tokens no "
                         "text uses: --value_tokens A B")
    return tuple(free[-2:])


def check_tokenizer(model, chat):
    """ValueError where a response is not read back as it was written, or where text may become an
    id that the model has no row for."""
    written = "<think>I see a desk.</think><action>go to desk 1</action>"
    tokenizer, ids = chat.tokenizer, chat.encode(written)
    said = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if not re.search(r"<think>.*</think>\s*<action>\s*go to desk 1\s*</action>", said.lower()):
        raise ValueError(f"the model's tokenizer, {type(tokenizer).__name__}, reads {written!r} "
                         f"back as {said!r}: files of it are missing, or they were made for "
                         "another version of transformers")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    most = max({*tokenizer.get_vocab().values()} - special | {*ids, *chat.prompt("-")})
    rows = min(len(x().weight) for x in (model.get_input_embeddings, model.get_output_embeddings))
    if most >= rows:
        raise ValueError(f"the model's tokenizer has token {most}, and its embeddings have {rows} "
                         "rows: they do not belong together, or resize_token_embeddings was left "
                         "out")


def without_dropout(model):
    """Turns off what would make two passes over the same tokens differ in training mode, which
    --checkpointing needs: dropout of every kind, and the noise of routers."""
    for part in [*model.modules(), model.config, model.config.get_text_config()]:
        for name, value in [*vars(part).items()]:
            if re.search("drop|jitter", name) and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0


@torch.no_grad()
def readout_at_start(lm, ids):
    """ValueError where Eq. 1 is flat for V and Q of an empty response: neither could be trained."""
    end = lm.chat.prompt("-", [None])[:1]  # the end of a turn; V is read before it and Q after it
    hidden = lm.body(torch.tensor([ids + end], device=lm.device))[0, -2:]
    plus, minus = (float32_logits(hidden, lm.head)[:, i] for i in lm.value_ids)
    v, q = (plus - minus).tolist()
    if min(abs(v), abs(q)) > lm.tau_v:
        raise ValueError(f"the value readouts start saturated: logits of {lm.value_ids} differ by "
                         f"{v:.2f} and {q:.2f}, and Eq. 1 is flat beyond tau_v. Name two others by "
                         f"--value_tokens A B, or --tau_v above {2 * max(abs(v), abs(q)):.1f}")


@torch.no_grad()
def check_head(lm):
    """ValueError where a model changes its hidden states before the head, or its logits after it,
    because score() applies the head by itself. What goes into the head and what comes out of it are
    seen in one pass, so that the comparison can be exact: softcapping hardly changes small logits,
    and another pass might be rounded otherwise."""
    seen = {}
    hooks = [lm.model.base_model.register_forward_hook(
        lambda module, inputs, output: seen.update(body=output.last_hidden_state)),
        lm.head.register_forward_hook(
            lambda module, inputs, output: seen.update(before=inputs[0], after=output))]
    ids = torch.arange(8, device=lm.device)[None]
    logits = lm.model.forward(input_ids=ids, use_cache=False).logits  # by no Module.compile()
    for hook in hooks:
        hook.remove()
    if "body" not in seen:  # OPT calls a part of its body
        seen["body"] = lm.body(ids)
    if not (torch.equal(seen["body"], seen["before"])
            and torch.equal(logits.float(), seen["after"].float())):
        raise ValueError(f"{type(lm.model).__name__} is not supported: it does something to its "
                         "logits before or after the head (softcapping or scaling), or they are "
                         "not finite")


# ------------------------------------------------ checking that a faster way of computing is right

@contextlib.contextmanager
def in_float32(body):
    """Within it, `body` computes in float32: the weights of each module are widened while that is
    called, so that in a pass without gradients they never exist all at once."""
    narrow, hooks = {}, []

    def widen(module, inputs):
        narrow[module] = module._parameters
        module._parameters = {name: p if p is None else p.float()
                              for name, p in module._parameters.items()}

    def restore(module, inputs, output):
        module._parameters = narrow.pop(module)

    for module in body.modules():
        if module._parameters:
            hooks += [module.register_forward_pre_hook(widen),
                      module.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, parameters in narrow.items():  # an interrupt has left them
            module._parameters = parameters


def excess_error(found, plain, exact):
    """-> None if `found` is right, else (its error, the largest that is right). All are tensors of
    one shape, compared with `exact`, the model in float32. What a 16-bit model gives depends on the
    order of its operations, so the root mean square error may be twice that of `plain`, a plain
    pass, and the largest error four times. Where numbers are few, chance adds a factor 1 + 7 / n,
    chosen so that 14 numbers pass; 1e-3 is for float32 models, whose `plain` is `exact`."""
    slack = 1 + 7 / exact.numel()
    for times, norm in ((2, lambda x: x.square().mean().sqrt()), (4, lambda x: x.abs().max())):
        error, rounding = (norm(x.double() - exact.double()).item() for x in (found, plain))
        if not error <= (most := times * slack * rounding + 1e-3):  # nor is NaN right
            return error, most
    return None


def compiled_scoring(lm, tokens):
    """-> lm with scoring compiled, or with a warning lm itself, where it fails, or where log-probs,
    entropies, values or gradients are wrong. It is compiled for a batch of about as many `tokens`
    as a micro-batch has, because the compiler plans for the sizes that it sees first, and compared
    on a small one."""
    from machine.fast import warn
    length = max(2, min(500, lm.max_length, tokens // 3))
    dice = torch.Generator().manual_seed(0)
    words = torch.tensor([i for i in range(20) if i not in lm.value_ids])
    rows = max(3, (tokens // length - 1) | 1)  # odd, because the compiler merges equal sizes
    ids = words[torch.randint(len(words), (rows, length), generator=dice)].tolist()
    samples = [(row, [(1, length)]) for row in ids]
    fast, small = replace(lm, compile=True), make_batch(samples[:3]).to(lm.device)
    try:
        fast.score(make_batch(samples).to(lm.device)).logp.sum().backward()
        found, plain = scores_and_gradients(fast, small), scores_and_gradients(lm, small)
        with in_float32(lm.model.base_model):
            exact = scores_and_gradients(lm, small)
        sizes = exact["sizes"].clamp(min=1e-30)
        for x in (found, plain, exact):
            x["gradients"] /= sizes
        for what in ("scores", "gradients"):
            if wrong := excess_error(found[what], plain[what], exact[what]):
                raise ValueError(f"the error of its {what} is {wrong[0]:.2g}, and the largest that "
                                 f"rounding explains {wrong[1]:.2g}")
    except Exception as error:  # a kernel may fail in ways of its own
        lm.model.zero_grad(set_to_none=True)
        warn(f"compiled scoring is not used: {error}")
        return lm
    return fast


def scores_and_gradients(lm, batch):
    """-> {"scores": all numbers of lm.score(batch); of the gradient of their sum, for each
    parameter, "gradients": its projection on a random vector of signs, and "sizes": its norm}."""
    lm.model.zero_grad(set_to_none=True)
    scores = torch.cat(lm.score(batch))
    scores.sum().backward()
    projections, sizes = [], []
    for n, p in enumerate(lm.model.parameters()):
        if p.grad is not None:
            dice = torch.Generator(p.device).manual_seed(n)
            signs = torch.randint(0, 2, p.shape, generator=dice, device=p.device, dtype=torch.int8)
            projections.append((p.grad.float() * (2 * signs - 1)).sum())
            sizes.append(p.grad.float().norm())
    lm.model.zero_grad(set_to_none=True)
    return {"scores": scores.detach(), "gradients": torch.stack(projections),
            "sizes": torch.stack(sizes)}


def main():
    from machine.cli import Parser, one_line_errors
    parser = Parser(description="Reads V and Q of one turn.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, hub id or bare name")
    with one_line_errors("model.py"), torch.no_grad():
        lm = load(parser.parse_args().model)
        prompt = lm.chat.prompt("You are in a kitchen. Put an apple in the fridge.")
        ids = prompt + lm.tokenizer.encode("open fridge 1", add_special_tokens=False)
        scores = lm.score(make_batch([(ids, [(len(prompt), len(ids))])]).to(lm.device))
        v, q = (lm.r_max * p.item() for p in scores[2:])
        print(f"w+, w- = {lm.value_ids}; V {v:.3f} before the response, Q {q:.3f} after it; its "
              f"log-prob is {scores.logp.sum():.2f}")


if __name__ == "__main__":
    main()
