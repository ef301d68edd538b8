"""One causal language model as actor and critic.

    value_readout ...   two logits as a value in [-1, 1], a policy without those two tokens  Eq. 1-3
    make_batch          token sequences and their turns -> what a forward pass takes, a Batch
    sample_token        draws a token with one uniform random number
    ActorCritic         a Hugging Face model, its chat format and its two reserved tokens; `score`
                        is one forward pass over a Batch: log-probs, entropy, readouts of V and Q
    Chat                messages -> the token ids of a conversation, by the model's chat template
    load, actor_critic  from a hub id, folder or bare name; from a model that is loaded already

A training sample is a token sequence with one or more turns, and a turn is the span [start, end) of
its response. V is read at start - 1, and Q at end - 1, the last token that the policy chose.
Shapes: B sequences, T tokens, M response tokens, N turns, W vocabulary size, D hidden size.
`# SAPO:` marks what SAPO adds to a language model.
    python model.py [--model NAME]       prints a model's reserved tokens, and V and Q of a turn
"""
import contextlib
import datetime
import functools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers  # as a whole: it imports its parts when they are used, so --help stays quick
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from runtime.attention import replace_attention

log = logging.getLogger("sapo")

# ------------------------------------------------------------------ readouts (copy these alone)

def value_readout(logits: torch.Tensor, value_ids, *, tau: float) -> torch.Tensor:
    """Eq. 1. Logits (..., W) and the ids (w+, w-) -> p in [-1, 1], (...). V or Q is R_max p."""
    plus, minus = (logits[..., i] for i in value_ids)
    return ((plus - minus) / tau).clamp(-1, 1)  # Eq. 1  # SAPO: a value without a value head


def restricted_log_softmax(logits: torch.Tensor, value_ids) -> torch.Tensor:
    """Eq. 3. Logits (..., W) -> log-probs over all tokens but the two reserved ones, which get
    probability 0. 16-bit logits are converted to float32 first."""
    value_ids = torch.as_tensor(value_ids, device=logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    wide = wide.index_fill(-1, value_ids, float("-inf"))
    return wide.log_softmax(-1)  # Eq. 3  # SAPO: w+ and w- are not actions


def entropy(logp: torch.Tensor, value_ids) -> torch.Tensor:
    """The entropy in nats of restricted log-probs, (..., W) -> (...), with 0 * -inf = 0."""
    value_ids = torch.as_tensor(value_ids, device=logp.device)
    return -(logp.exp() * logp.index_fill(-1, value_ids, 0.0)).sum(-1)


# --------------------------------------------------------------------------------------- batches

class Batch(NamedTuple):
    """Token sequences, and the positions of turns and response tokens in them. Padding is on the
    right, so causal attention needs no mask. Positions are indices made on the host, because a
    boolean mask would make the host wait for the GPU."""

    ids: torch.Tensor  # (B, T)
    length: torch.Tensor  # (B,) without padding
    row: torch.Tensor  # (N,) the sequence of each turn
    start: torch.Tensor  # (N,) the first position of each turn's response
    end: torch.Tensor  # (N,) the position after each turn's response
    turn_of: torch.Tensor  # (M,) the turn of each response token
    token_row: torch.Tensor  # (M,) its sequence
    token_col: torch.Tensor  # (M,) its position
    # where its response tokens and its turns are in the flat tensors of a whole iteration; set by
    # train.make_minibatches
    tokens: slice = None
    turns: slice = None

    def to(self, device) -> "Batch":
        return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self))


def make_batch(samples: list) -> Batch:
    """[(ids, [(start, end), ...]), ...], a tuple per sequence and a span per turn -> Batch, with
    the turns in that order. ValueError: a turn has no context or no response."""
    turns = [(b, *span) for b, (_, spans) in enumerate(samples) for span in spans]
    if any(not 0 < start < end <= len(samples[b][0]) for b, start, end in turns):
        raise ValueError("a turn needs context before it and a response in it")
    ids = [torch.tensor(ids, dtype=torch.long) for ids, _ in samples]
    row, start, end = torch.tensor(turns, dtype=torch.long).reshape(-1, 3).unbind(1)
    turn_of = torch.arange(len(turns)).repeat_interleave(end - start)
    col = torch.tensor([i for _, *span in turns for i in range(*span)], dtype=torch.long)
    return Batch(pad_sequence(ids, batch_first=True), torch.tensor([len(x) for x in ids]),
                 row, start, end, turn_of, row[turn_of], col)


def micro_batches(samples: list, budget: int) -> list:
    """Groups samples (ids, ...) of similar length, shortest first, such that each group has at most
    `budget` padded tokens, or one sample."""
    groups = []
    for sample in sorted(samples, key=lambda s: len(s[0])):
        if not groups or (len(groups[-1]) + 1) * len(sample[0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


# ------------------------------------------------------------------------------- drawing a token

BLOCK = 128  # vocabulary entries per block of sample_token


def sample_token(logits, u, value_ids, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (R, W) and uniform random numbers (R,) in [0, 1) -> tokens (R,), their log-probs (R,).
    Temperature 0 is greedy.

    It inverts the cumulative distribution in two steps, first over blocks of the vocabulary and
    then within a block, because a scan over a whole vocabulary is slow on a GPU. The sums are
    float64, and it takes the first entry *above* u, so that a token of probability 0 is never
    drawn."""
    logits = logits if temperature in (0, 1) else logits / temperature
    logp = restricted_log_softmax(logits, value_ids)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        prob, missing = logp.exp(), -logp.shape[1] % BLOCK
        prob = (F.pad(prob, (0, missing)) if missing else prob).unflatten(1, (-1, BLOCK))
        cdf = prob.sum(-1, dtype=torch.float64).cumsum(-1)  # (R, blocks)
        below_one = 1 - 2 ** -40  # keeps the target below the total, which rounding could reach
        target = u[:, None].double().clamp(max=below_one) * cdf[:, -1:]
        block = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
        inside = prob.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double()
        cdf_inside = inside.cumsum(-1)  # (R, BLOCK)
        rest = target - F.pad(cdf, (1, 0)).gather(1, block)
        rest = torch.minimum(rest, cdf_inside[:, -1:] * below_one)
        token = block * BLOCK + torch.searchsorted(cdf_inside, rest, right=True)
        token = token.clamp(max=logp.shape[1] - 1)  # NaN must not index out of bounds
    return token[:, 0], logp.gather(1, token)[:, 0]


# ------------------------------------------------------------------------------ actor and critic

class Float32Product(torch.autograd.Function):
    """16-bit hidden states (M, D) times a 16-bit head (W, D) -> float32 logits (M, W). Rounded to
    bfloat16, a logit between 16 and 32 would be off by up to 0.06. The gradient of the logits is
    rounded to 16 bits, as in any 16-bit linear layer."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        if torch.compiler.is_compiling():
            return hidden.float() @ weight.float().T
        wide, logits = hidden.float(), torch.empty(len(hidden), len(weight), dtype=torch.float32)
        for start in range(0, len(weight), 1024):  # a converted slice fits into a CPU's cache
            part = slice(start, start + 1024)
            torch.mm(wide, weight[part].float().T, out=logits[:, part])
        return logits

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.T @ hidden


def float32_logits(hidden: torch.Tensor, head) -> torch.Tensor:
    """Hidden states (M, D) -> logits (M, W) of the output layer `head`, in float32."""
    if head.weight.dtype not in (torch.float16, torch.bfloat16):
        return head(hidden)
    if hidden.dtype == head.weight.dtype:
        logits = Float32Product.apply(hidden, head.weight)
    else:  # hidden states that were computed in float32; see runtime/verify.py
        logits = hidden @ head.weight.float().T
    return logits if head.bias is None else logits + head.bias.float()


def token_scores(hidden, token, head, value_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (M, D) and the tokens (M,) that followed -> their log-probs and the policy's
    entropy, (M,) each."""
    logp = restricted_log_softmax(float32_logits(hidden, head), value_ids)  # (M, W)
    return logp.gather(1, token[:, None])[:, 0], entropy(logp, value_ids)


class Scores(NamedTuple):
    logp: torch.Tensor  # (M,) log-probs of the response tokens, Eq. 3, at temperature 1
    entropy: torch.Tensor  # (M,) of the policy where these tokens were chosen, in nats
    p_v: torch.Tensor  # (N,) readouts before the responses, Eq. 1: V = R_max p_v
    p_q: torch.Tensor  # (N,) readouts after them: Q = R_max p_q


@dataclass
class ActorCritic:
    """A causal LM that is read as policy, V and Q. value_ids = (w+, w-); stop_ids end a response;
    tau_v and r_max are those of Eq. 1 and 2. If every layer attends to all previous tokens, the
    model's attention is replaced by an equivalent one (runtime/attention.py); everything else about
    it works as before."""

    model: torch.nn.Module
    tokenizer: object
    chat: "Chat"  # None without a chat template; token ids can be scored and sampled all the same
    value_ids: tuple
    stop_ids: tuple
    tau_v: float = 1.0
    r_max: float = 10.0
    compile: bool = False  # torch.compile for scoring
    recommended: dict = field(default_factory=dict)  # settings of train.py, from the model's folder
    run: dict = field(default_factory=dict)  # the settings by which a run played, for eval.py

    def __post_init__(self):
        replace_attention(self.model)
        self.device, self.head = self.model.device, self.model.get_output_embeddings()
        self.value_index = torch.tensor(self.value_ids, device=self.device)
        self.fast_sampling = {}  # (context, compile): whether Samplers decode in the fast way
        self.max_length = getattr(self.model.config.get_text_config(),
                                  "max_position_embeddings", None) or 1 << 30
        # positions whose logits exist at a time: a multiple of 128, about 256 MiB in float32
        self.chunk = max(1, 2 ** 19 // len(self.head.weight)) * 128
        self.backbone, self.token_scores = self.model.base_model, token_scores
        if self.compile:
            from runtime.compile import compiled, compiled_layers
            self.backbone = compiled_layers(self.backbone)
            self.token_scores = compiled(token_scores)

    def causal_kwargs(self, ids) -> dict:
        """Keyword arguments of our own forward passes over ids (R, T): an empty mask, so that
        transformers does not build one, nor wait for the GPU to find out whether there is padding.
        Other passes, such as those of generate, get the mask they need."""
        if self.model.config._attn_implementation != "grouped":
            return {}
        return {"attention_mask": torch.empty(1, 1, 0, 0, device=ids.device),
                "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T), padded on the right -> (B, T, D). If compiled, ids, and therefore the result,
        are padded to a width divisible by 8 and to at least two rows, so that fewer shapes are
        compiled."""
        if self.compile:
            ids = F.pad(ids, (0, -ids.shape[1] % 8, 0, 1 if len(ids) == 1 else 0))
        out = self.backbone(input_ids=ids, use_cache=False, **self.causal_kwargs(ids))
        return out.last_hidden_state

    def value_rows(self) -> tuple:
        """The head's rows of w+ and w-: weight (2, D) and bias, (2,) or None, in float32."""
        weight, bias = self.head.weight, self.head.bias
        rows = weight.index_select(0, self.value_index).float()
        return rows, None if bias is None else bias.index_select(0, self.value_index).float()

    def readout(self, hidden: torch.Tensor, rows=None) -> torch.Tensor:
        """(..., D) -> p in [-1, 1], (...), by the head's value_rows, or by others. The product is
        in float32, because 16-bit logits would be rounded before they are subtracted."""
        weight, bias = self.value_rows() if rows is None else rows
        return value_readout(F.linear(hidden.float(), weight, bias), (0, 1), tau=self.tau_v)

    def score(self, batch: Batch) -> Scores:
        """One forward pass. Logits are computed at response positions only, in chunks; if there are
        several chunks, they are recomputed in the backward pass, so that only one chunk's logits
        are in memory."""
        hidden = self.hidden_states(batch.ids)
        before = hidden[batch.token_row, batch.token_col - 1]  # (M, D), which predicts the token
        token = batch.ids[batch.token_row, batch.token_col]
        n = max(1, -(-len(before) // self.chunk))
        chunks = zip(before.tensor_split(n), token.tensor_split(n))
        score_chunk = self.token_scores
        if len(before) > self.chunk and torch.is_grad_enabled():
            score_chunk = functools.partial(checkpoint, score_chunk, use_reentrant=False,
                                            preserve_rng_state=False)
        parts = [score_chunk(*chunk, self.head, self.value_index) for chunk in chunks]
        logp, h = (torch.cat(column) for column in zip(*parts))
        boundaries = hidden[batch.row, batch.start - 1], hidden[batch.row, batch.end - 1]
        # SAPO: V is read before the response; Q after it, before the environment answers
        p_v, p_q = self.readout(torch.stack(boundaries))
        return Scores(logp, h, p_v, p_q)

    def stopped(self, ids: list[int]) -> bool:
        """Whether a response ends with a stop token; else it was truncated."""
        return ids[-1] in self.stop_ids

    def text(self, ids: list[int]) -> str:
        """The text of a response, without its stop token."""
        return self.tokenizer.decode(ids[:-1] if self.stopped(ids) else ids,
                                     clean_up_tokenization_spaces=False)

    def save(self, folder) -> None:
        """Writes a Hugging Face folder, with sapo.json beside its files. Tools that know nothing of
        SAPO can use it: `generate` never samples w+ or w-, and settings are also stored under the
        names of transformers 4, which vLLM and llama.cpp may still read."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        ours = {"value_ids": self.value_ids, "tau_v": self.tau_v, "r_max": self.r_max,
                "settings": self.recommended, "run": self.run}
        Path(folder, "sapo.json").write_text(json.dumps(ours, indent=2) + "\n")
        suppressed = {*(self.model.generation_config.suppress_tokens or ()), *self.value_ids}
        with edit_json(f"{folder}/generation_config.json") as config:
            config["suppress_tokens"] = sorted(suppressed)
        with edit_json(f"{folder}/config.json") as config:
            rope = config.get("rope_parameters") or {}
            if "rope_theta" in rope:
                scaled = rope.get("rope_type", "default") != "default"
                scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
                config["rope_theta"] = rope["rope_theta"]
                config["rope_scaling"] = scaling if scaled else None
        with edit_json(f"{folder}/tokenizer_config.json") as config:
            if config["tokenizer_class"] == "TokenizersBackend":
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
                config["model_input_names"] = ["input_ids", "attention_mask"]
            if isinstance(config.get("extra_special_tokens"), list):
                config["additional_special_tokens"] = config.pop("extra_special_tokens")


# ------------------------------------------------------------------------------- the chat format

# what the system message says of tools, where a template doesn't
TOOLS = """You can call functions. Each of these lines describes one:
<tools>
{schemas}
</tools>"""
CALLS = """To call a function, write its name and arguments as JSON in this form, and in no other:
<tool_call>
{"name": NAME, "arguments": {ARGUMENT: VALUE, ...}}
</tool_call>"""


def check_messages(messages, before=()) -> None:
    """ValueError: these are no messages of a system, a user or tools, such as can follow `before`,
    the token ids of the conversation so far."""
    form = 'messages are a list of {"role": "system", "user" or "tool", "content": text}'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{form}, with one or more of them; these are {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"{form}; one of these is {message!r:.80}")
        if message["role"] == "assistant":
            raise ValueError(f"{form}; \"assistant\" is the model itself, which only responds")
        if message["role"] not in ("system", "user", "tool"):
            raise ValueError(f"{form}; one of these has the role {message['role']!r:.40}")
        if not isinstance(message["content"], str):
            raise ValueError(f"{form}; one of these has the content {message['content']!r:.80}")
    if any(message["role"] == "system" for message in (messages if before else messages[1:])):
        raise ValueError("a system message is only possible at the start of a conversation")


class Layout(NamedTuple):
    """What a template makes of messages, apart from their contents."""

    texts: list  # the template's texts before, between and after the contents
    forms: list  # functions that bring the contents into the form in which it writes them


class Chat:
    """Converts messages into the token ids of a conversation, by the tokenizer's chat template.
    `date` is what the template takes for today (default: the day on which this is made); it can be
    set later. ValueError: the tokenizer has no suitable template."""

    # how templates write a content: as it is, without blanks around it, within a JSON string
    FORMS = (str, str.strip, lambda text: json.dumps(text, ensure_ascii=False)[1:-1])

    def __init__(self, tokenizer, date: str | None = None):
        self.tokenizer = tokenizer
        self.date = date or datetime.date.today().isoformat()
        self.layouts = {}  # because rendering the template in every turn would be slow
        self.lacks_tool_role = False
        roles = "user", "assistant", "user", "assistant", "user"
        try:
            self.render([{"role": role, "content": "-"} for role in roles[:3]])
        except Exception as error:  # there is no template, or it fails in a way of its own
            raise ValueError("the chat template fails with messages of user, assistant and user: "
                             f"{error}") from None
        if not tokenizer.is_fast:
            raise ValueError("this is not one of transformers' fast tokenizers")
        layout = self.layout(*roles)
        if not layout:
            raise ValueError("the chat template drops or repeats messages: choose an instruct "
                             "model whose template keeps all of them")
        _, header, between, *later, _ = layout.texts
        # whether a conversation can grow; not so if the template numbers its messages, for example
        self.appends = later == [header, between]
        self.begin, self.end = self.layout("user").texts
        self.between = self.after_response(between)
        header = header.partition("<think>")[0]
        without = self.layout("user", begin_response=False)
        if without.texts == [self.begin, self.end] and not self.end.startswith(header.rstrip()):
            raise ValueError("the chat template ignores add_generation_prompt, so nothing would "
                             "tell the model that its response begins")
        self.protect(())
        # some templates begin the response themselves, as with "<think>\n"
        self.response_prefix = self.find_response_prefix(self.end)

    def render(self, messages: list, tools=None, begin_response: bool = True) -> str:
        """Messages, of the assistant too -> text, up to where the next response begins."""
        template = self.tokenizer.get_chat_template(tools=tools)
        today = datetime.date.fromisoformat(self.date)
        # transformers passes no function to a template, so what strftime_now("%d %b %Y") returns is
        # written in its place
        template = re.sub(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""",
                          lambda call: today.strftime(call[1]), template)
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False,
            add_generation_prompt=begin_response)

    def layout(self, *roles: str, tools=None, begin_response: bool = True) -> Layout | None:
        """The Layout of messages of these roles; None if the template fails with them, or drops,
        repeats or reorders contents. Those that it gets here show in what form it writes them."""
        # a blank, a quote and a newline tell the FORMS apart
        contents = [f"@{i}@" if role == "assistant" else f'\t@{i}"\n@\t'
                    for i, role in enumerate(roles)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
        try:
            rest = whole = self.render(messages, tools, begin_response)
        except Exception:  # of any kind: a template raises what it likes
            return None
        layout = Layout([], [])
        for content in contents:
            form = next((f for f in self.FORMS if whole.count(f(content)) == 1), None)
            if not form or form(content) not in rest:
                return None
            text, _, rest = rest.partition(form(content))
            layout.texts.append(text)
            layout.forms.append(form)
        layout.texts.append(rest)
        return layout

    def next_layout(self, roles: tuple, continues: bool, tools=None) -> Layout | None:
        """The Layout of messages of these roles at the start of a conversation, or after a
        response; None if the template cannot write them, or not in each turn alike."""
        key = roles, continues, json.dumps(tools), self.date
        if key not in self.layouts:
            turn = ("assistant", *roles)
            layout = self.layout(*("user", *turn, *turn) if continues else roles, tools=tools)
            if layout and continues:
                # the texts before: user, assistant, `roles`, assistant, `roles`; and the last one
                first, second = layout.texts[2:len(roles) + 2], layout.texts[-len(roles) - 1:]
                alike = first == second[:-1]
                second[0] = self.after_response(second[0])
                layout = Layout(second, layout.forms[-len(roles):]) if alike else None
            if layout and self.find_response_prefix(layout.texts[-1]) != self.response_prefix:
                layout = None
            self.layouts[key] = layout
        return self.layouts[key]

    def after_response(self, text: str) -> str:
        """The template's text after a response, as it follows what a model has written: a model
        ends its response without a blank."""
        control = tuple(x.content for x in self.tokenizer.added_tokens_decoder.values())
        return text.lstrip() if text.lstrip().startswith(control) else text

    def find_response_prefix(self, text: str) -> str:
        """The beginning of a response in the template's last text, such as "<think>\n"; or ""."""
        prefix = re.search(r"<think>(?!.*<think>).*", text, re.S)
        return prefix[0] if prefix and not self.control.search(prefix[0]) else ""

    def protect(self, ids) -> None:
        """From now on, `encode` produces no control token from the text that it is given: no
        special token, and no added token that is in `ids` or in the template. The tags of thoughts,
        actions and calls stay as they are."""
        added, text = self.tokenizer.added_tokens_decoder, self.begin + self.between + self.end
        tool = self.layout("user", "assistant", "tool")
        text += "".join(tool.texts) if tool else ""
        ids = {*ids, *self.template_ids(text)}
        names = {token.content for i, token in added.items() if token.special or i in ids}
        names -= {f"<{end}{tag}>" for end in ("", "/") for tag in ("think", "action", "tool_call")}
        rests = {}  # first letter: the rests of the names; a match takes the first letter only
        for name in sorted(name for name in names if len(name) > 1):
            rests.setdefault(name[0], []).append(re.escape(name[1:]))
        self.control = re.compile("|".join(
            f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")

    def template_ids(self, text: str) -> list[int]:
        """The token ids of a text from the template, in which control tokens are meant."""
        backend = self.tokenizer.backend_tokenizer  # twice as fast as calling the tokenizer
        backend.no_truncation()  # somebody's call of the tokenizer may have left both on
        backend.no_padding()
        return backend.encode(text, add_special_tokens=False).ids

    def encode(self, *contents: str, texts=("", "")) -> list[int]:
        """The token ids of contents that are not ours, with the template's `texts` before, between
        and after them. Where a content spells a control token, such as <|im_end|>, it is split
        after the first letter and encoded in two parts. So no game can end the user's message and
        speak as somebody else."""
        whole, splits, ids = texts[0], [], []
        for content, text in zip(contents, texts[1:]):
            splits += [len(whole) + m.end() for m in self.control.finditer(content)]
            whole += content + text
        for start, stop in zip([0, *splits], [*splits, len(whole)]):
            ids += self.template_ids(whole[start:stop])
        return ids

    def end_of_turn_id(self) -> int:
        """The token that ends the assistant's message: the first one between a response and the
        next user message."""
        return self.encode("-", texts=(self.between, self.end))[0]

    def encode_user_turn(self, text: str, before=()) -> list[int]:
        """encode_messages for one message of the user."""
        return self.encode_messages([{"role": "user", "content": text}], before)

    def encode_messages(self, messages: list, before=(), tools=None) -> list[int]:
        """The token ids of the messages since the last response, [{"role": "system", "user" or
        "tool", "content": text}, ...], up to where the next response begins. `before`: those of the
        conversation so far; if it ends with the end-of-turn token, that is not repeated. `tools`:
        JSON schemas of functions that can be called, which are shown at the start.

        If the template has no place for messages of these roles, for example for what a tool
        returned, they become one message of the user. ValueError: see check_messages; or the
        template is such that nothing can be appended."""
        check_messages(messages, before)
        tools = None if before else tools
        if tools:
            messages, tools = self.show_tools(messages, tools)
        roles = tuple(message["role"] for message in messages)
        # blanks around what a tool returned can mean something
        contents = [message["content"] if message["role"] == "tool" else message["content"].strip()
                    for message in messages]
        layout = self.next_layout(roles, bool(before), tools)
        if not layout:
            contents = ["\n\n".join(content for content in contents if content).strip()]
            layout = self.next_layout(("user",), bool(before), tools)
            if not layout:
                raise ValueError("the chat template writes a message in another way when others "
                                 "came before it, so a conversation cannot grow token by token: "
                                 "use --context window or, for an environment with tools, another "
                                 "model")
            if "tool" in roles and not self.lacks_tool_role:
                self.lacks_tool_role = True
                log.warning("the chat template has no role for what a tool returned, or none that "
                            "is the same in every turn: the model gets it as a user's message")
        contents = [form(content) for form, content in zip(layout.forms, contents)]
        ids = self.encode(*contents, texts=layout.texts)
        return ids[1:] if before and ids[0] == before[-1] else ids

    def show_tools(self, messages: list, tools: list) -> tuple:
        """The messages at the start of a conversation, and JSON schemas of tools -> the messages,
        and the schemas to give to the template, or None. What the template would not say (the
        schemas, or that calls are <tool_call> with JSON for every model) is added to the system
        message."""
        without, shown = (self.next_layout(("user",), False, x) for x in (None, tools))
        if shown and re.search(r'<tool_call>\s*{[^{}]*"arguments"', "".join(shown.texts)):
            return messages, tools
        system = CALLS
        if shown in (without, None):  # the template has no place for tools
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = TOOLS.replace("{schemas}", schemas) + "\n\n" + CALLS
            tools = None
        if messages[0]["role"] == "system":
            system = messages[0]["content"].strip() + "\n\n" + system
            messages = messages[1:]
        return [{"role": "system", "content": system}, *messages], tools


# ----------------------------------------------------------------------------- loading and saving

RESULTS = Path(__file__).resolve().parent / "results"
OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama", "gemma": "google",
          "Mistral": "mistralai"}


def local_folder(name: str, env: str | None = None) -> Path:
    """The local folder that a name refers to, which need not exist: a tiny model's for "tiny",
    RUN/final for a run, else the folder of that name."""
    tiny = "tiny-alfworld" if env == "alfworld" else "tiny-house"  # made by tools/imitate.py
    folder = RESULTS / tiny if name == "tiny" else Path(name)
    return folder / "final" if (folder / "final").is_dir() else folder


def resolve_model(name: str, env: str | None = None) -> str:
    """A name -> the folder or hub id that it means: "tiny", a folder, OWNER/NAME, or a bare name
    such as Qwen2.5-1.5B-Instruct. ValueError: the folder does not exist."""
    if local_folder(name, env).is_dir():
        return str(local_folder(name, env))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"cannot load model {name}: there is no such folder")
    owner = next((owner for family, owner in OWNERS.items() if name.startswith(family)), None)
    return f"{owner}/{name}" if owner and "/" not in name else name


def find_file(where, name: str):
    """The path of a file in a folder or hub repository, or None if it has no such file."""
    if Path(where).is_dir():
        return Path(where, name) if Path(where, name).is_file() else None
    return transformers.utils.cached_file(
        where, name, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)


@contextlib.contextmanager
def edit_json(path) -> Iterator[dict]:
    """Yields the JSON object in a file, and writes it back afterwards."""
    content = json.loads(Path(path).read_text())
    yield content
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def read_sapo_json(where) -> dict:
    """What ActorCritic.save wrote into the sapo.json of a folder or hub repository; {} if there is
    none."""
    path = find_file(where, "sapo.json")
    try:
        return json.loads(Path(path).read_text()) if path else {}
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def recommended_settings(name: str, env: str | None = None) -> dict:
    """The settings of train.py that a model's folder recommends, by a name that resolve_model
    understands; {} if there are none. No weights are read. ValueError: the folder does not
    exist."""
    where = resolve_model(name, env)
    if not Path(where).is_dir() and "/" not in where:  # it is no OWNER/NAME of the hub
        return {}
    return read_sapo_json(where).get("settings", {})


def load(name: str, *, env: str | None = None, value_tokens=None, tau_v: float | None = None,
         r_max: float | None = None, device=None, dtype=torch.float32, prompt: str = "",
         max_new_tokens: int = 0) -> ActorCritic:
    """Loads a model by a name that resolve_model understands; "tiny" depends on `env`. tau_v and
    r_max default to those that the folder was trained with, else 1 and 10; device to a GPU, if any.
    ValueError: the model cannot be used, for example because its context is too short for `prompt`
    and a response of max_new_tokens, which is checked before the weights are read."""
    where = resolve_model(name, env)
    try:
        if find_file(where, "adapter_config.json"):
            raise ValueError("this is an adapter, such as LoRA's, and not a whole model: merge it "
                             "into its model first (peft: merge_and_unload, save_pretrained)")
        # a folder with sapo.json was written by `save` and has a tokenizer.json, which for some
        # types of models AutoTokenizer would ignore
        tokenizer_class = (transformers.PreTrainedTokenizerFast if find_file(where, "sapo.json")
                           else transformers.AutoTokenizer)
        tokenizer = tokenizer_class.from_pretrained(where)
        config = transformers.AutoConfig.from_pretrained(where)
        length = getattr(config.get_text_config(), "max_position_embeddings", None)
        needed = len(tokenizer(prompt).input_ids) + max_new_tokens
        if length and needed > length:
            raise ValueError(f"--max_new_tokens {max_new_tokens} leaves no room for a prompt: "
                             f"together they need {needed} tokens or more, and it has {length}")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, output_loading_info=True)
    except Exception as error:  # safetensors, tokenizers and the hub have exceptions of their own
        why = " ".join((str(error).strip() or type(error).__name__).split())[:300]
        what = name if local_folder(name).is_dir() else f"{name}, which is not a folder here"
        raise ValueError(f"cannot load model {what}: {why}") from None
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
        raise ValueError(f"the weights of {name} lack {len(missing)} tensors, such as {missing[0]}")
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lm = actor_critic(model, tokenizer, value_tokens, tau_v=tau_v, r_max=r_max)
    if not lm.chat:
        raise ValueError(f"{name} has no chat template: choose an instruct model")
    return lm


def actor_critic(model, tokenizer, value_tokens=None, value_ids=None, tau_v: float | None = None,
                 r_max: float | None = None) -> ActorCritic:
    """Wraps a model that is loaded already. w+ and w- are the two `value_tokens` (names or ids); or
    `value_ids`, whose rows of the head are trained already; or those in the sapo.json of the folder
    the model was loaded from (like tau_v, r_max and settings); or two tokens that no text uses.
    Rows of tokens that are reserved here for the first time are set to 0. ValueError: the model
    cannot be used."""
    model = getattr(model, "_orig_mod", model).eval()  # what torch.compile has wrapped
    refuse_adapters(model)
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} is not supported: it has no base_model")
    stored = read_sapo_json(model.name_or_path) if model.name_or_path else {}
    # by the attribute, a model that is wrapped again keeps the rows that were trained
    value_ids = value_ids or getattr(model, "sapo_value_ids", None) or stored.get("value_ids")
    chat = Chat(tokenizer) if tokenizer.chat_template else None
    if chat:
        check_tokenizer(model, chat)
    disable_dropout(model)
    head = model.get_output_embeddings()
    stop_ids = find_stop_ids(model, tokenizer, chat)
    if value_tokens or not value_ids:
        reserved = reserve_value_ids(tokenizer, len(head.weight), stop_ids, value_tokens)
        if reserved != tuple(value_ids or ()):
            # SAPO: so V = Q = 0 at first. (The paper does not say. bfloat16 resolves best near 0.)
            for p in head.parameters():
                p.data[[*reserved]] = 0
        value_ids = reserved
    model.sapo_value_ids = tuple(value_ids)
    if not stop_ids:
        raise ValueError("no token ends a response: neither the model nor the tokenizer has an end "
                         "of sequence (eos_token_id)")
    if chat:
        chat.protect({*value_ids, *stop_ids})
    lm = ActorCritic(model, tokenizer, chat, tuple(value_ids), stop_ids,
                     tau_v or stored.get("tau_v", 1.0), r_max or stored.get("r_max", 10.0),
                     recommended=stored.get("settings", {}), run=stored.get("run", {}))
    check_head(lm)
    return lm


def refuse_adapters(model) -> None:
    """ValueError: the model has an adapter, so its folder could not be loaded again."""
    if hasattr(model, "peft_config") or any(hasattr(x, "base_layer") for x in model.modules()):
        raise ValueError("the model has an adapter, such as LoRA's, that is not merged: merge it "
                         "first (peft: model = model.merge_and_unload())")


def find_stop_ids(model, tokenizer, chat) -> tuple:
    """The tokens that end a response: the model's own, and the end of a turn in the template."""
    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    if chat:
        stops |= {chat.end_of_turn_id()} & tokenizer.added_tokens_decoder.keys()
    return tuple(sorted(stops - {None}))


def reserve_value_ids(tokenizer, rows: int, taken, named=None) -> tuple[int, int]:
    """(w+, w-): the two tokens `named` by text or id; else the last two of the head's `rows` if
    they are beyond the tokenizer's vocabulary; else special tokens without a role or a place in the
    chat template, preferably those named reserved or unused. ValueError: none are free."""
    vocabulary, special = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    used = {i for i, token in special.items()
            if token.content in (tokenizer.chat_template or "") or token.content in roles} | {
                *taken}
    if named:
        ids = tuple(n if isinstance(n, int) else vocabulary.get(n, int(n) if n.isdigit() else -1)
                    for n in named)
        if ids[0] == ids[1] or not all(0 <= i < rows and i not in used for i in ids):
            raise ValueError(f"--value_tokens {' '.join(map(str, named))}: give two different "
                             f"tokens, or ids below {rows}, that neither the chat template nor "
                             "the tokenizer uses for a purpose of its own")
        return ids
    if rows - max(vocabulary.values()) > 2 and not {rows - 2, rows - 1} & used:
        return rows - 2, rows - 1
    free = [i for i, token in special.items() if token.special and i < rows and i not in used]
    free.sort(key=lambda i: (bool(re.search("reserved|unused|extra", special[i].content)), i))
    if len(free) < 2:
        raise ValueError("no two vocabulary entries are free for w+ and w-; name two tokens that "
                         "no text uses: --value_tokens A B")
    return tuple(free[-2:])


def check_tokenizer(model, chat: Chat) -> None:
    """ValueError: a response does not survive encoding and decoding, or a token has no row in the
    model's embeddings."""
    written = "<think>I see a desk.</think><action>go to desk 1</action>"
    tokenizer, ids = chat.tokenizer, chat.encode(written)
    read = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if not re.search(r"<think>.*</think>\s*<action>\s*go to desk 1\s*</action>", read.lower()):
        raise ValueError(f"the model's tokenizer, {type(tokenizer).__name__}, encodes {written!r} "
                         f"and decodes it as {read!r}: files of it are missing, or they were made "
                         "for another version of transformers")
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max({*tokenizer.get_vocab().values()} - special
                  | {*ids, *chat.encode_user_turn("-")})
    rows = min(len(x().weight) for x in (model.get_input_embeddings, model.get_output_embeddings))
    if highest >= rows:
        raise ValueError(f"the tokenizer has token {highest}, and the embeddings have {rows} rows: "
                         "the tokenizer is another model's, or resize_token_embeddings is missing")


def disable_dropout(model) -> None:
    """Turns off all that makes two passes over the same tokens differ in train mode, because
    --gradient_checkpointing needs that mode: every kind of dropout, and the noise of routers."""
    for part in [*model.modules(), model.config, model.config.get_text_config()]:
        for name, value in [*vars(part).items()]:
            if re.search("drop|jitter", name) and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0


@torch.no_grad()
def check_initial_readout(lm: ActorCritic, ids: list[int]) -> None:
    """ValueError: V and Q of an empty response to this prompt are both beyond the bounds of Eq. 1,
    where its gradient is 0."""
    ids = [*ids, lm.chat.end_of_turn_id()]  # an empty response: V is read before it, Q at it
    hidden = lm.hidden_states(torch.tensor([ids], device=lm.device))[0, len(ids) - 2:len(ids)]
    plus, minus = (float32_logits(hidden, lm.head)[:, i] for i in lm.value_ids)
    v, q = (plus - minus).tolist()
    if min(abs(v), abs(q)) > lm.tau_v:
        raise ValueError(f"the value readouts are saturated from the start: the logits of tokens "
                         f"{lm.value_ids} differ by {v:.2f} and {q:.2f}, and beyond tau_v Eq. 1 "
                         "has no gradient. Choose two others with --value_tokens A B, or --tau_v "
                         f"above {2 * max(abs(v), abs(q)):.1f}")


@torch.no_grad()
def check_head(lm: ActorCritic) -> None:
    """ValueError: the model transforms its hidden states before the head, or its logits after it
    (softcapping, scaling), or the head is not only a weight and a bias. score() could not do the
    same, because it applies the head itself. Both sides of the first comparison come from one pass,
    so that it can be exact."""
    seen = {}
    hooks = [lm.model.base_model.register_forward_hook(
        lambda module, inputs, output: seen.update(hidden=output.last_hidden_state)),
        lm.head.register_forward_hook(
            lambda module, inputs, output: seen.update(before=inputs[0], after=output))]
    ids = torch.arange(8, device=lm.device)[None]
    logits = lm.model.forward(input_ids=ids, use_cache=False).logits  # not Module.compile()'s call
    for hook in hooks:
        hook.remove()
    if "hidden" not in seen:  # OPT calls only a part of its base_model
        seen["hidden"] = lm.hidden_states(ids)
    if not (torch.equal(seen["hidden"], seen["before"])
            and torch.equal(logits.float(), seen["after"].float())):
        raise ValueError(f"{type(lm.model).__name__} is not supported: it transforms its hidden "
                         "states before the head or its logits after it (softcapping, scaling), or "
                         "they are not finite")
    expected = F.linear(seen["before"], lm.head.weight, getattr(lm.head, "bias", None)).float()
    if (not {name for name, _ in lm.head.named_parameters()} <= {"weight", "bias"}
            or (seen["after"].float() - expected).abs().max() > 0.02 * expected.abs().max()):
        raise ValueError("the model's head is not a plain linear layer, but has an adapter or a "
                         "hook: merge the adapter into it, or remove the hook")


def main():
    from runtime.cli import Parser, one_line_errors
    parser = Parser(description="Reads V and Q of one turn.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, hub id or bare name")
    with one_line_errors("model.py"), torch.no_grad():
        lm = load(parser.parse_args().model)
        prompt = lm.chat.encode_user_turn("You are in a kitchen. Put an apple in the fridge.")
        ids = prompt + lm.tokenizer.encode("open fridge 1", add_special_tokens=False)
        scores = lm.score(make_batch([(ids, [(len(prompt), len(ids))])]).to(lm.device))
        v, q = (lm.r_max * p.item() for p in scores[2:])
        print(f"w+ and w- are tokens {lm.value_ids}. V is {v:.3f} before the response, Q is "
              f"{q:.3f} after it, and the response has log-prob {scores.logp.sum():.2f}")


if __name__ == "__main__":
    main()
