"""One causal language model as actor and critic.

    value_readout ...   two logits as a value in [-1, 1], a policy without those two tokens  Eq. 1-3
    make_batch          token sequences and their turns -> what a forward pass takes, a Batch
    ActorCritic         a Hugging Face model, its chat format, and the parameter of w+ and w-;
                        `score` is one forward pass over a Batch: log-probs, entropy, V and Q
    load, actor_critic  from a hub id, folder or bare name; from a model that is loaded already

A training sequence has one or more turns, and a turn is the span [start, end) of its response. V is
read at start - 1, and Q at end - 1, the last token that the policy chose.

w+ and w- are two tokens of the vocabulary that no text uses. Their rows of the output layer are no
part of the policy (Eq. 3), so they are kept apart from it, as a parameter of their own in float32:
`value_rows`. `load` reads them from the output layer, and `save` writes them into it (those of an
adapter, into a file of their own).

Shapes: B sequences, T tokens, M response tokens, N turns, W vocabulary size, D hidden size.
`# SAPO:` marks what SAPO adds to a language model. What is special to Hugging Face is in hf/.
    python model.py [--model NAME]       prints a model's reserved tokens, and V and Q of a turn
"""
import copy
import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from hf import lora
from hf.attention import causal_inputs
from hf.chat import Chat
from hf.loading import (check_tokenizer, find_stop_ids, prepare_model, read_model, read_sapo_json,
                        reserve_value_ids, resolve_model, write_model)

# ------------------------------------------------------------------ readouts (copy these alone)

def value_readout(logits: torch.Tensor, value_ids, *, tau: float) -> torch.Tensor:
    """Eq. 1. Logits (..., W) and the ids (w+, w-) -> p in [-1, 1], (...). V or Q is R_max p."""
    plus, minus = (logits[..., i] for i in value_ids)
    return ((plus - minus) / tau).clamp(-1, 1)  # Eq. 1  # SAPO: V and Q are read from two logits


def restricted_log_softmax(logits: torch.Tensor, value_ids) -> torch.Tensor:
    """Eq. 3. Logits (..., W) -> log-probs over all tokens but the two reserved ones, which get
    probability 0. 16-bit logits are converted to float32 first."""
    value_ids = torch.as_tensor(value_ids, device=logits.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    wide = wide.index_fill(-1, value_ids, float("-inf"))
    return wide.log_softmax(-1)  # Eq. 3  # SAPO: w+ and w- are not actions


def entropy(logp: torch.Tensor, value_ids) -> torch.Tensor:
    """The entropy in nats of restricted log-probs, (..., W) -> (...), with 0 * -inf = 0: for the
    two reserved tokens, and for any other whose logit is -inf."""
    value_ids = torch.as_tensor(value_ids, device=logp.device)
    finite = logp.clamp(min=torch.finfo(logp.dtype).min).index_fill(-1, value_ids, 0.0)
    return -(logp.exp() * finite).sum(-1)


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
    turn_of: torch.Tensor  # (M,) the turn of each response token, of those in this batch
    token_row: torch.Tensor  # (M,) its sequence
    token_col: torch.Tensor  # (M,) its position

    def to(self, device) -> "Batch":
        return Batch(*(x.to(device) for x in self))


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


def micro_batches(sequences: list, budget: int) -> list:
    """Groups tuples that begin with a list of token ids, (ids, ...), by similar length, shortest
    first, such that each group has at most `budget` padded tokens, or one sequence."""
    groups = []
    for sequence in sorted(sequences, key=lambda s: len(s[0])):
        if not groups or (len(groups[-1]) + 1) * len(sequence[0]) > budget:
            groups.append([])
        groups[-1].append(sequence)
    return groups


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
        wide = hidden.float()
        logits = wide.new_empty(len(hidden), len(weight))
        for start in range(0, len(weight), 1024):  # a converted slice fits into a CPU's cache
            part = slice(start, start + 1024)
            torch.mm(wide, weight[part].float().T, out=logits[:, part])
        return logits

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        of_hidden, of_weight = ctx.needs_input_grad  # a frozen head needs none
        return grad @ weight if of_hidden else None, grad.T @ hidden if of_weight else None


def float32_logits(hidden: torch.Tensor, head) -> torch.Tensor:
    """Hidden states (M, D) -> logits (M, W) of the output layer `head`, in float32."""
    if head.weight.dtype not in (torch.float16, torch.bfloat16):
        return head(hidden)
    if hidden.dtype == head.weight.dtype:
        logits = Float32Product.apply(hidden, head.weight)
    else:  # hidden states that were computed in float32; see hf/verify.py
        logits = hidden @ head.weight.float().T
    return logits if head.bias is None else logits + head.bias.float()


def token_scores(hidden, token, head, value_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (M, D) and the tokens (M,) that followed -> their log-probs and the policy's
    entropy, (M,) each."""
    logp = restricted_log_softmax(float32_logits(hidden, head), value_ids)  # (M, W)
    return logp.gather(1, token[:, None])[:, 0], entropy(logp, value_ids)


class Scores(NamedTuple):
    logp: torch.Tensor  # (M,) log-probs of the response tokens, Eq. 3, at temperature 1
    entropy: torch.Tensor | None  # (M,) of the policy where these tokens were chosen, in nats
    p_v: torch.Tensor  # (N,) readouts before the responses, Eq. 1: V = R_max p_v
    p_q: torch.Tensor  # (N,) readouts after them: Q = R_max p_q


@dataclass
class ActorCritic:
    """A causal LM that is read as policy, V and Q. value_ids = (w+, w-); stop_ids end a response;
    tau_v and r_max are those of Eq. 1 and 2. Make it by `load` or `actor_critic`; a changed one by
    dataclasses.replace, which hands on the same parameters. With adapters (hf/lora.py), all other
    parameters of the model are frozen."""

    model: torch.nn.Module
    tokenizer: object
    chat: Chat | None  # None without a chat template; token ids can be scored and sampled anyway
    value_ids: tuple
    stop_ids: tuple
    value_rows: torch.nn.Linear  # (D) -> (2), the rows of w+ and w- in float32; Eq. 1 reads it
    tau_v: float = 1.0
    r_max: float = 10.0
    compile: bool = False  # torch.compile for scoring
    recommended: dict = field(default_factory=dict)  # settings of train.py, from the model's folder
    played_with: dict = field(default_factory=dict)  # the settings of a run's games, for eval.py

    def __post_init__(self):
        self.device = self.model.device
        self.value_index = torch.tensor(self.value_ids, device=self.device)
        self.max_length = getattr(self.model.config.get_text_config(),
                                  "max_position_embeddings", None) or 1 << 30
        # at most so many positions have logits at a time, 2 ** 26 numbers, 256 MiB in float32
        self.chunk = max(1, 2 ** 26 // len(self.head.weight) // 128) * 128
        self.backbone, self.token_scores = self.model.base_model, token_scores
        if self.compile:
            from hf.compile import compiled, compiled_layers  # late: it imports torch's compiler
            self.backbone = compiled_layers(self.backbone)
            self.token_scores = compiled(token_scores)

    @property
    def head(self):
        """The model's output layer, which resize_token_embeddings replaces. ValueError: it has no
        rows for w+ and w- any more."""
        head = self.model.get_output_embeddings()
        check_rows(head, self.value_ids)
        return head

    def parameters(self) -> list[list]:
        """What is trained, in two groups: the model's parameters that are not frozen, and those of
        w+ and w-. ValueError: the whole model is frozen; or it has adapters, and others are not
        frozen, or the adapters are not float32."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("all parameters of the model are frozen: requires_grad is False")
        if self.lora_rank:
            lora.check_trained(self.model, trained)
        return [trained, [*self.value_rows.parameters()]]

    @property
    def lora_rank(self) -> int:
        """The rank of the model's adapters; 0 if it has none."""
        return lora.rank_of(self.model)

    def copy(self) -> "ActorCritic":
        """With trained parameters of its own, as they are now. Frozen ones are shared, so that a
        copy of a model with adapters takes no more memory than they do; so are value_rows."""
        trained = {p: p.detach().clone() for p in self.model.parameters() if p.requires_grad}
        return replace(self, model=lora.copy_with(self.model, trained))

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T), padded on the right -> (B, T, D). If compiled, ids, and therefore the result,
        are padded to a width divisible by 8 and to at least two rows, so that fewer shapes are
        compiled."""
        if self.compile:
            ids = F.pad(ids, (0, -ids.shape[1] % 8, 0, 1 if len(ids) == 1 else 0))
        out = self.backbone(input_ids=ids, use_cache=False, **causal_inputs(self.model, ids))
        return out.last_hidden_state

    def readout(self, hidden: torch.Tensor, value_rows=None) -> torch.Tensor:
        """Hidden states (..., D) -> p in [-1, 1], (...), by value_rows, or by others. The product
        is in float32, because 16-bit logits would be rounded before they are subtracted."""
        rows = self.value_rows if value_rows is None else value_rows
        return value_readout(rows(hidden.float()), (0, 1), tau=self.tau_v)

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
        before_response = hidden[batch.row, batch.start - 1]  # (N, D)
        after_response = hidden[batch.row, batch.end - 1]
        # SAPO: V is read before the response; Q after it, before the environment answers
        p_v, p_q = self.readout(torch.stack([before_response, after_response]))
        return Scores(logp, h, p_v, p_q)

    def stopped(self, ids: list[int]) -> bool:
        """Whether a response ends with a stop token; else it was truncated."""
        return len(ids) > 0 and ids[-1] in self.stop_ids

    def text(self, ids: list[int]) -> str:
        """The text of a response, without its stop token."""
        return self.tokenizer.decode(ids[:-1] if self.stopped(ids) else ids,
                                     clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def save(self, folder) -> None:
        """Writes a Hugging Face folder, with sapo.json beside its files. The rows of w+ and w- are
        in the output layer then, as the paper has them, rounded to its precision. They are written
        into the live layer, which does not use them: editing a copy of the weights would untie an
        output layer that is tied to the embeddings.

        If the model has adapters, it is their folder, as peft writes them, which names the model
        that they are for; the rows of w+ and w- are a file of it. `merged` gives a whole model."""
        if not self.lora_rank:
            for name, rows in self.value_rows.named_parameters():
                getattr(self.head, name)[self.value_index] = rows.to(self.head.weight.dtype)
        write_model(self.model, self.tokenizer, folder, self.sapo_json(),
                    self.value_rows.state_dict())

    def sapo_json(self) -> dict:
        """What a saved folder says of it, in sapo.json."""
        return {"value_ids": self.value_ids, "tau_v": self.tau_v, "r_max": self.r_max,
                "settings": self.recommended, "run": self.played_with}

    def merged(self, dtype: torch.dtype) -> "ActorCritic":
        """A copy on the CPU whose weights, in this data type, are those of the model and its
        adapters together. If that is not the model's own type, the copy recommends it, because in
        fewer bits what was learned may be lost."""
        other = {} if dtype == self.model.dtype else {"dtype": str(dtype).removeprefix("torch.")}
        merged = replace(self, model=lora.merged_copy(self.model, dtype), compile=False,
                         value_rows=copy.deepcopy(self.value_rows).to("cpu"),
                         recommended=self.recommended | other, played_with=self.played_with | other)
        merged.keep_for_wrapping()
        return merged

    def keep_for_wrapping(self) -> None:
        """Lets the model know its value rows and sapo.json, for the next time it is wrapped. (A
        tuple is no part of the module.)"""
        self.model.sapo_value_rows = self.value_ids, self.value_rows, self.sapo_json()


# ---------------------------------------------------------------------------------------- loading

def load(name: str, *, tiny: str = "tiny-house", value_tokens=None, tau_v: float | None = None,
         r_max: float | None = None, device=None, dtype=torch.float32, prompt: str = "",
         max_new_tokens: int = 0, lora_rank: int = 0) -> ActorCritic:
    """Loads a model by a name that resolve_model understands: a folder, a hub id, a bare name, or
    "tiny", which means results/TINY. A folder or hub repository can be an adapter, as peft and
    `save` write it; the model that it is for is loaded, too. With lora_rank, a whole model gets new
    adapters. tau_v and r_max default to those that the folder was trained with, else 1 and 10;
    device to a GPU, if any. ValueError: the model cannot be used, for example because its context
    is too short for `prompt` and a response of max_new_tokens, which is checked before the weights
    are read."""
    model, tokenizer = read_model(name, resolve_model(name, tiny), dtype, prompt, max_new_tokens)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lm = actor_critic(model, tokenizer, value_tokens, tau_v=tau_v, r_max=r_max,
                      lora_rank=lora_rank)
    if not lm.chat:
        raise ValueError(f"{name} has no chat template: choose an instruct model")
    return lm


def actor_critic(model, tokenizer, value_tokens=None, value_ids=None, tau_v: float | None = None,
                 r_max: float | None = None, lora_rank: int = 0) -> ActorCritic:
    """Wraps a model that is loaded already. If every layer attends to all previous tokens, its
    attention is replaced by an equivalent one (hf/attention.py); everything else about it works as
    before. tau_v and r_max default to those with which it was wrapped before, or those in the
    sapo.json of the folder it was loaded from, else to 1 and 10. With lora_rank, the model is
    frozen and gets adapters of this rank, unless it has them already.

    w+ and w- are the first of these that there are:
        1. `value_tokens`, two names or ids
        2. `value_ids`, whose rows of the head are trained already
        3. those with which the model was wrapped before; it keeps the rows that were trained
        4. those in the sapo.json of its folder, whose rows of the head are trained, too
        5. two tokens that no text uses
    Rows that were not trained begin at 0. ValueError: the model cannot be used."""
    model = prepare_model(model)
    if lora_rank and lora.rank_of(model) not in (0, lora_rank):
        raise ValueError(f"the model has adapters of rank {lora.rank_of(model)}, not {lora_rank}")
    if lora_rank and not lora.rank_of(model):
        lora.add_adapters(model, lora_rank)
    head = model.get_output_embeddings()
    stored = read_sapo_json(model.name_or_path) if model.name_or_path else {}
    chat = Chat(tokenizer) if tokenizer.chat_template else None
    if chat:
        check_tokenizer(model, chat)
    stop_ids = find_stop_ids(model, tokenizer, chat)
    if not stop_ids:
        raise ValueError("no token ends a response: neither the model nor the tokenizer has an end "
                         "of sequence (eos_token_id)")
    wrapped_ids, wrapped_rows, kept = getattr(model, "sapo_value_rows", (None, None, {}))
    stored = stored | kept
    trained_ids = tuple(value_ids or wrapped_ids or stored.get("value_ids") or ())
    if value_tokens or not trained_ids:
        value_ids = reserve_value_ids(tokenizer, len(head.weight), stop_ids, value_tokens)
    else:
        value_ids = trained_ids
    check_rows(head, value_ids)
    if wrapped_ids == value_ids:
        value_rows = wrapped_rows.to(model.device)
    else:
        # SAPO: new ones are 0, so V = Q = 0 at first. (The paper does not say.)
        value_rows = rows_of(head, value_ids, trained=value_ids == trained_ids)
    tau_v = stored.get("tau_v", 1.0) if tau_v is None else tau_v
    r_max = stored.get("r_max", 10.0) if r_max is None else r_max
    if not (tau_v > 0 and r_max > 0):
        raise ValueError(f"tau_v is {tau_v} and r_max {r_max}; both must be above 0")
    if chat:
        chat.protect({*value_ids, *stop_ids})  # no text can spell them
    lm = ActorCritic(model, tokenizer, chat, value_ids, stop_ids, value_rows, tau_v, r_max,
                     recommended=stored.get("settings", {}), played_with=stored.get("run", {}))
    lm.keep_for_wrapping()
    return lm


def check_rows(head, value_ids: tuple) -> None:
    """ValueError: the output layer is too small to have w+ and w-."""
    if max(value_ids) >= len(head.weight):
        raise ValueError(f"w+ and w- are tokens {value_ids[0]} and {value_ids[1]}, and the model "
                         f"has only {len(head.weight)} rows: resize_token_embeddings must keep "
                         "theirs; else wrap the model with others (value_tokens)")


def rows_of(head, value_ids: tuple, trained: bool) -> torch.nn.Linear:
    """A layer (D) -> (2) with a copy of the head's rows of w+ and w-, or with zeros, in float32. It
    has a bias if the head has one."""
    rows = torch.nn.Linear(head.weight.shape[1], 2, bias=head.bias is not None, device="meta")
    for name, _ in [*rows.named_parameters()]:
        values = getattr(head, name).detach()[[*value_ids]].float()
        setattr(rows, name, torch.nn.Parameter(values if trained else torch.zeros_like(values)))
    return rows


def main():
    from runtime.cli import Parser, one_line_errors
    parser = Parser(description="Reads V and Q of one turn.")
    parser.add_argument("--model", default="tiny", help="tiny, a folder, hub id or bare name")
    with one_line_errors("model.py"), torch.no_grad():
        lm = load(parser.parse_args().model)
        prompt = lm.chat.encode_user_turn("You are in a kitchen. Put an apple in the fridge.")
        ids = prompt + lm.tokenizer.encode("open fridge 1", add_special_tokens=False)
        scores = lm.score(make_batch([(ids, [(len(prompt), len(ids))])]).to(lm.device))
        v, q = (lm.r_max * p.item() for p in (scores.p_v, scores.p_q))
        print(f"w+ and w- are tokens {lm.value_ids}. V is {v:.3f} before the response, Q is "
              f"{q:.3f} after it, and the response has log-prob {scores.logp.sum():.2f}")


if __name__ == "__main__":
    main()
