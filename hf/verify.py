"""Are the fast ways of computing right? Compiled scoring and the sampler are compared with plain
forward passes of the model before they are used. What rounding does not explain is wrong.

    in_float32, excess_error    what is exact, and how much rounding explains
    difference_of_merging       whether merged adapters are the same
    compiled_scoring            lm with compiled scoring, if that is right
    check_against_reference     what is wrong with the results of a rollout.Sampler
    choose_decoding             lets it decode in its fast way, if that is right
    check_initial_readout       whether V and Q can learn from where they begin

This is the one file of hf/ that stands on model.py.
"""
import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from hf import lora
from hf.attention import PIECE_LENGTH, causal_inputs, unsupported
from hf.compile import accelerate, warn
from model import (ActorCritic, Batch, float32_logits, make_batch, restricted_log_softmax,
                   rows_of)

# ----------------------------------------------------------------------- exact results, and errors

@contextlib.contextmanager
def with_parameters(backbone, converted: Callable) -> Iterator[None]:
    """Within this context, each module of `backbone` computes with the parameters
    converted(module), a dict like module._parameters. They are made when it runs and are gone
    afterwards, so that without gradients they never all exist at once."""
    original, hooks = {}, []

    def convert(module, inputs):
        parameters = converted(module)
        original[module], module._parameters = module._parameters, parameters

    def restore(module, inputs, output):
        module._parameters = original.pop(module)

    for module in backbone.modules():
        if module._parameters:
            hooks += [module.register_forward_pre_hook(convert),
                      module.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, parameters in original.items():  # left by an interrupt
            module._parameters = parameters


def in_float32(backbone):
    """A context in which `backbone` computes in float32."""
    return with_parameters(backbone, lambda module: {
        name: p if p is None else p.float() for name, p in module._parameters.items()})


def with_merged_adapters(backbone):
    """A context in which `backbone` computes with the weights of lora.merged_copy, in its own
    precision."""
    def merged(module):
        if not isinstance(module, lora.LoRALinear):
            return module._parameters
        nothing = {name: torch.zeros_like(getattr(module, name)) for name in ("lora_A", "lora_B")}
        weight = lora.merged_weight(module).to(module.weight.dtype)
        return module._parameters | nothing | {"weight": weight}

    return with_parameters(backbone, merged)


def excess_error(found, plain, exact) -> tuple[float, float] | None:
    """Compares `found` and `plain`, tensors of one shape, with `exact`, computed in float32.
    Returns None if `found` is within tolerance, else (its error, the tolerance).

    Results of a 16-bit model depend on the order of its operations. So the root mean square error
    may be twice that of `plain`, a plain pass, and the maximum error four times. For n numbers the
    tolerance has another factor 1 + 7 / n, which allows for chance; it was chosen with n = 14, the
    V and Q of the sampler's check. The 1e-3 is for float32 models, whose `plain` is `exact`."""
    slack = 1 + 7 / exact.numel()
    for times, norm in ((2, lambda x: x.square().mean().sqrt()), (4, lambda x: x.abs().max())):
        error, rounding = (norm(x.double() - exact.double()).item() for x in (found, plain))
        if not error <= (allowed := times * slack * rounding + 1e-3):  # NaN is wrong, too
            return error, allowed
    return None


# ---------------------------------------------------------------------------------------- scoring

def compiled_scoring(lm: ActorCritic, tokens: int) -> ActorCritic:
    """Returns lm with compiled scoring; or lm itself, with a warning, if compiling fails or if
    log-probs, entropies, values or gradients are wrong. It is compiled on a batch of about `tokens`
    tokens, as in a micro-batch, because the compiler plans for the sizes that it sees first. The
    results are compared on a small batch of another width, because the same graphs serve all."""
    length = max(2, min(500, lm.max_length, tokens // 3))
    generator = torch.Generator().manual_seed(0)
    vocabulary = torch.tensor([i for i in range(20) if i not in lm.value_ids])
    # odd, as the padded length is even, because the compiler takes equal sizes for one and the same
    rows = max(3, (tokens // length - 1) | 1)
    index = torch.randint(len(vocabulary), (rows, length), generator=generator)
    samples = [(row, [(1, length)]) for row in vocabulary[index].tolist()]
    shorter = (length + 2) // 2
    small = make_batch([(ids[:shorter], [(1, shorter)]) for ids, _ in samples[:3]]).to(lm.device)
    plain_lm = replace(lm, model=lora.with_random_adapters(lm.model))
    fast_lm = replace(plain_lm, compile=True)
    try:
        fast_lm.score(make_batch(samples).to(lm.device)).logp.sum().backward()
        found = scores_and_gradients(fast_lm, small)
        plain = scores_and_gradients(plain_lm, small)
        with in_float32(plain_lm.model.base_model):
            exact = scores_and_gradients(plain_lm, small)
        norms = exact["norms"].clamp(min=1e-30)
        for x in (found, plain, exact):
            x["gradients"] /= norms
        for what in ("scores", "gradients"):
            if excess := excess_error(found[what], plain[what], exact[what]):
                raise ValueError(f"the error of its {what} is {excess[0]:.2g}, and rounding "
                                 f"explains at most {excess[1]:.2g}")
    except Exception as error:  # kernels fail in ways of their own
        zero_gradients(lm)
        warn(f"compiled scoring is not used: {error}")
        return lm
    return fast_lm if fast_lm.model is lm.model else replace(lm, compile=True)


def scores_and_gradients(lm: ActorCritic, batch: Batch) -> dict:
    """-> "scores": all numbers of lm.score(batch). Their sum is differentiated: for each parameter,
    "gradients" has the projection of its gradient on a fixed vector of random signs, and "norms"
    the gradient's norm."""
    zero_gradients(lm)
    scores = torch.cat(lm.score(batch))
    scores.sum().backward()
    projections, norms = [], []
    for n, p in enumerate([*lm.model.parameters(), *lm.value_rows.parameters()]):
        if p.grad is not None:
            generator = torch.Generator(p.device).manual_seed(n)
            signs = torch.randint(0, 2, p.shape, generator=generator, device=p.device,
                                  dtype=torch.int8)
            projections.append((p.grad.float() * (2 * signs - 1)).sum())
            norms.append(p.grad.float().norm())
    zero_gradients(lm)
    return {"scores": scores.detach(), "gradients": torch.stack(projections),
            "norms": torch.stack(norms)}


def zero_gradients(lm: ActorCritic) -> None:
    lm.model.zero_grad(set_to_none=True)
    lm.value_rows.zero_grad(set_to_none=True)


@torch.no_grad()
def difference_of_merging(lm: ActorCritic, batches: list) -> tuple:
    """Compares the model with itself, as it is with its adapters merged in 16 bits -> (the mean
    difference of log-probs, whether rounding does not explain it)."""
    lm, backbone = replace(lm, compile=False), lm.model.base_model

    def log_probs():
        return torch.cat([lm.score(batch).logp for batch in batches])

    plain = log_probs()
    with with_merged_adapters(backbone):
        found = log_probs()
    with in_float32(backbone):
        exact = log_probs()
    return (found - plain).abs().mean().item(), excess_error(found, plain, exact) is not None


@torch.no_grad()
def check_initial_readout(lm: ActorCritic, ids: list[int]) -> None:
    """ValueError: V and Q of an empty response to this prompt are both beyond the bounds of Eq. 1,
    where its gradient is 0."""
    ids = [*ids, lm.chat.end_of_turn_id()]  # an empty response: V is read before it, Q at it
    hidden = lm.hidden_states(torch.tensor([ids], device=lm.device))[0, len(ids) - 2:len(ids)]
    plus, minus = lm.value_rows(hidden.float()).unbind(-1)
    v, q = (plus - minus).tolist()
    if min(abs(v), abs(q)) > lm.tau_v:
        raise ValueError(f"the value readouts are saturated from the start: the logits of tokens "
                         f"{lm.value_ids} differ by {v:.2f} and {q:.2f}, and beyond tau_v Eq. 1 "
                         "has no gradient. Choose two others with --value_tokens A B, or --tau_v "
                         f"above {2 * max(abs(v), abs(q)):.1f}")


# --------------------------------------------------------------------------------------- sampling

CHECK_PROMPTS = (  # of several lengths
    "You are in the middle of a room. Looking around you, you see a desk 1, a drawer 1, a fridge 1 "
    "and a cabinet 1. Your task is to: put a cool mug in desk. Reason, then give one command.",
    "What is the capital of France?", "Count from one to twenty, in words.", "go to",
    "List three animals that live in the sea, and say in one sentence what each of them eats.",
    "You open the drawer 1. In it, you see a pen 1 and a key 2. What do you do next?",
    "Write a short letter to a friend who has moved to another town and misses the old one.")
CHECK_STEPS = 20  # tokens of each response


def encode_check_prompt(lm, text, before=()):
    """Encodes one of CHECK_PROMPTS -> token ids. Without a chat template, of the text alone."""
    return lm.chat.encode_user_turn(text, before) if lm.chat else lm.tokenizer(text).input_ids


@torch.no_grad()
def check_against_reference(sampler) -> str:
    """Samples responses to CHECK_PROMPTS (in "full", two turns each), and compares log-probs, the
    choice of tokens, V and Q with plain forward passes over the whole sequences. Returns a
    description of what rounding does not explain, or ""."""
    lm, rounds = sampler.lm, 2 if sampler.context == "full" else 1
    stops, randomized = sampler.is_stop.clone(), with_random_numbers(lm)
    steps, texts = min(CHECK_STEPS, sampler.max_new_tokens), [*CHECK_PROMPTS]
    while sampler.state.in_pieces and len(encode_check_prompt(lm, texts[0])) <= PIECE_LENGTH:
        texts[0] += " " + CHECK_PROMPTS[0]
    room = max(1, lm.max_length // rounds - steps - 8)  # for a prompt; a GPU takes extra steps
    longest = max(len(encode_check_prompt(lm, text)[:room]) for text in texts)
    sequences = [([], [], []) for _ in CHECK_PROMPTS]  # ids, spans, [(Response, its uniforms)]
    rng, uniforms = np.random.default_rng(0), {}
    sampler.forget()
    sampler.ensure_capacity(len(CHECK_PROMPTS),
                            rounds * (longest + steps + 8) + sampler.max_new_tokens)
    for layer in sampler.state.layers:
        layer.keys.zero_()  # a fast way that failed may have left NaN
        layer.values.fill_(1000.0)  # attending to what is not there shows in every result
    try:
        sampler.weights_changed(randomized)
        for _ in range(rounds):
            for key, (ids, *_) in enumerate(sequences):
                ids += encode_check_prompt(lm, texts[key], ids)[:room]
                uniforms[key] = rng.random(sampler.max_new_tokens, dtype=np.float32)
                sampler.enqueue(key, ids, uniforms[key])
            sampler.is_stop.zero_()  # no token ends a response; in place: captured graphs read it
            finished = sampler.run(steps)
            sampler.is_stop.fill_(True)  # every token ends it
            while sampler.busy:
                finished += sampler.run()
            for key, response in finished:
                ids, spans, responses = sequences[key]
                spans.append((len(ids), len(ids) + len(response.ids)))
                ids += response.ids
                responses.append((response, uniforms[key][:len(response.ids)]))
        sampled, plain, exact = sampled_plain_exact(sampler, sequences)
    finally:
        sampler.is_stop.copy_(stops)
        sampler.weights_changed(lm)
        sampler.steps = 0
    for what in sampled:
        if excess := excess_error(sampled[what], plain[what], exact[what]):
            return (f"the error of its {what} is {excess[0]:.2g}, and rounding explains at most "
                    f"{excess[1]:.2g}")
    return ""


@torch.no_grad()
def with_random_numbers(lm: ActorCritic) -> ActorCritic:
    """lm with random numbers, in tensors of their own, for what is 0 in a new model, because with 0
    results would look right whatever is wrong: adapters, and value rows, which make V and Q about
    0.3 R_max."""
    lm = replace(lm, model=lora.with_random_adapters(lm.model))
    ids = torch.tensor([encode_check_prompt(lm, CHECK_PROMPTS[0])], device=lm.device)
    hidden = lm.hidden_states(ids).float()
    rows = rows_of(lm.value_rows, (0, 1), trained=True)
    weight = torch.randn(rows.weight.shape, generator=torch.Generator().manual_seed(0))
    rows.weight.copy_(weight.to(hidden) * 0.2 * lm.tau_v / hidden.norm(dim=-1).mean())
    return replace(lm, value_rows=rows)


def sampled_plain_exact(sampler, sequences) -> tuple[dict, dict, dict]:
    """[(ids, spans of responses, [(Response, its uniforms)])] -> three dicts of tensors with the
    same keys: the sampler's results, those of a plain forward pass, and those of one in float32.

    Log-probs, V and Q are compared as they are. For the choice of tokens: sampling by the inverse
    cumulative distribution picks token k if cdf[k - 1] <= u < cdf[k]. So the sampler's error is the
    distance of u from that interval, with the cdf of the float32 pass, and rounding explains the
    largest difference between the cdfs of the two passes. In greedy decoding the chosen token must
    be the likeliest one, and log-probs take the place of the cdf."""
    lm, temperature = sampler.lm, sampler.temperature
    batch = make_batch([sequence[:2] for sequence in sequences]).to(lm.device)
    responses, u = zip(*(pair for sequence in sequences for pair in sequence[2]))
    u = torch.tensor(np.concatenate(u), device=lm.device)  # (M,)
    logp = torch.tensor([x for response in responses for x in response.logp], device=lm.device)
    values = torch.tensor([(response.v, response.q) for response in responses], device=lm.device)
    token = batch.ids[batch.token_row, batch.token_col]

    def hidden_states():
        return lm.model.base_model(input_ids=batch.ids, use_cache=False,
                                   **causal_inputs(lm.model, batch.ids)).last_hidden_state

    def distribution(hidden, index):
        """Indices of tokens (m,) -> log-probs and the cdf there, (m, W). Greedy decoding has
        log-probs, clamped at -5, in place of the cdf."""
        before = hidden[batch.token_row[index], batch.token_col[index] - 1]
        logits = float32_logits(before, lm.head) / (temperature or 1)
        logp = restricted_log_softmax(logits, lm.value_index)
        return logp, logp.exp().cumsum(-1) if temperature else logp.clamp(min=-5)

    hidden_plain = hidden_states()
    with in_float32(lm.model.base_model):
        hidden_exact = hidden_states()
    parts = []
    for index in torch.arange(len(token), device=lm.device).split(64):  # (64, W) at a time
        column = token[index, None]
        logp_plain, cdf_plain = distribution(hidden_plain, index)
        logp_exact, cdf = distribution(hidden_exact, index)
        rounding = (cdf - cdf_plain).abs().amax(-1)
        end, chosen = cdf.gather(1, column)[:, 0], logp_exact.gather(1, column)[:, 0]
        if temperature:
            outside = torch.maximum(u[index] - end, end - chosen.exp() - u[index]).clamp(min=0)
        else:  # how much less likely than the likeliest token
            outside = cdf.amax(-1) - end
        parts.append((logp_plain.gather(1, column)[:, 0], chosen, outside, rounding))
    logp_plain, logp_exact, outside, rounding = map(torch.cat, zip(*parts))
    value_plain, value_exact = (torch.stack([
        lm.readout(x[batch.row, boundary - 1]) for boundary in (batch.start, batch.end)], 1)
        for x in (hidden_plain, hidden_exact))
    zeros = torch.zeros_like(rounding)
    return ({"log-probs": logp, "choices of tokens": outside, "V and Q": values / lm.r_max},
            {"log-probs": logp_plain, "choices of tokens": rounding, "V and Q": value_plain},
            {"log-probs": logp_exact, "choices of tokens": zeros, "V and Q": value_exact})


# by model: {(context, compile): whether the fast way of decoding is right}
verified = weakref.WeakKeyDictionary()


@torch.no_grad()
def choose_decoding(sampler, compile: bool, check: bool | None) -> None:
    """Makes a rollout.Sampler decode in the fast way, if it has one and that is right, else in the
    plain way, and remembers which. With check=False it relies on what was found before, and on the
    fast way if nothing was; with None it checks if nothing was found before. ValueError: the kv
    engine does not support the model."""
    model = sampler.lm.model
    has_fast_way = sampler.gpu or compile
    ways, kind = verified.setdefault(model, {}), (sampler.context, compile)
    if check is False or check is None and kind in ways:
        accelerate(sampler, has_fast_way and ways.get(kind, True), compile)
        return
    accelerate(sampler, has_fast_way, compile)
    fast = has_fast_way and fast_way_is_right(sampler)
    if not fast:
        accelerate(sampler, False, compile)
        if error := check_against_reference(sampler):
            raise unsupported(model, error)
    ways[kind] = fast


def fast_way_is_right(sampler) -> bool:
    """Whether a rollout.Sampler, which decodes in its fast way, gives right results. If it fails or
    they are wrong, a warning says why."""
    try:
        why = check_against_reference(sampler)
    except Exception as error:  # kernels fail in ways of their own
        why = f"{type(error).__name__}: {error}"
    if why:
        warn(f"sampling falls back to plain decoding, which is slower: {why}")
    return not why and getattr(sampler.decode_step, "works", True)  # if not, it has warned already
