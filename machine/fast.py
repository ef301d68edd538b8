"""What makes a GPU fast and changes no result: torch.compile and captured CUDA graphs. Each is
tried out before it is used; what fails or comes out otherwise is left out, and a line says so."""
import copy
import dataclasses
import logging
import types

import numpy as np
import torch
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation  # no failure

log = logging.getLogger("sapo")


def say(text):
    log.warning(" ".join(text.split())[:300])


def compiled(eager, fast=None):
    """A function, compiled for all shapes (`fast`, if given, already is). Where compiling fails,
    now or later, the function is run as it is from then on."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would give up silently
    torch._functorch.config.force_non_lazy_backward_lowering = True  # else backward() would fail
    use = [fast or torch.compile(eager, dynamic=True)]

    def run(*args, **kwargs):
        try:
            return use[0](*args, **kwargs)
        except (torch.OutOfMemoryError, StopRecomputation):
            raise
        except Exception as error:
            if use[0] is eager:
                raise
            use[0] = eager
            say(f"torch.compile failed, and it goes on without: {error}")
        return eager(*args, **kwargs)
    return run


# ---------------------------------------------------------------------------------------- scoring


def compiled_layers(body):
    """A model's body in which each layer is compiled: a few graphs serve all layers and shapes."""
    if not hasattr(body, "layers"):  # it calls them otherwise
        return compiled(body)
    fast = copy.copy(body)  # the sampler runs the layers as they are
    fast._modules = {name: part for name, part in body._modules.items() if name != "layers"}
    fast.__dict__["layers"] = [torch.compile(layer, dynamic=True) for layer in body.layers]
    return compiled(body, fast)


def compiled_scoring(lm, tokens):
    """-> lm (model.ActorCritic) with scoring compiled; lm itself where log-probs, entropies or
    gradients come out otherwise. It is tried out on about as many `tokens` as a micro-batch has,
    because the compiler plans for the sizes that it sees first."""
    length = min(500, lm.max_length)
    rows, found = max(2, tokens // length) | 1, []  # odd, unlike all widths, so no sizes merge
    words = torch.tensor([i for i in range(20) if i not in lm.value_ids])
    dice = torch.Generator().manual_seed(0)
    row, col = torch.ones(rows, length - 1).nonzero().T  # a response is all but its first token
    batch = {"ids": words[torch.randint(len(words), (rows, length), generator=dice)],
             "row": row, "col": col + 1, "seq": torch.arange(rows),
             "start": torch.ones(rows).long(), "end": torch.full((rows,), length)}
    batch = types.SimpleNamespace(**{name: x.to(lm.device) for name, x in batch.items()})
    fast = dataclasses.replace(lm, compile=True)
    for one in (lm, fast):
        scores = one.score(batch)
        sum(x.sum() for x in scores).backward()
        norms = [p.grad.float().norm() for p in lm.model.parameters() if p.grad is not None]
        found.append([scores.logp.detach(), scores.entropy.detach(), torch.stack(norms)])
        lm.model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the sampler looks at what is free
        torch.cuda.reset_peak_memory_stats()  # a run's peak is its own
    return fast if all(alike(lm, *pair, "compiled scoring") for pair in zip(*found)) else lm


def alike(lm, theirs, ours, what):
    """Whether two results differ by no more than another order of operations may make them."""
    off, norm = (ours.float() - theirs.float()).norm().item(), theirs.float().norm().item()
    if off <= (1e-3 if lm.model.dtype == torch.float32 else 0.1) * norm:
        return True
    say(f"{what} is {off:.1g} of {norm:.1g} off, so it is not used")
    return False


# --------------------------------------------------------------------------------------- sampling

ROWS = 128  # where the longest sequences of so many fit well, their length is reserved at once


class Captured:
    """A sampler's decoding step as CUDA graphs, one for each number of rows and length."""

    def __init__(self, sampler, step):
        self.sampler, self.step, self.at = sampler, step, None
        self.works = True

    def __call__(self, n, span):
        if self.at is not self.sampler.rows.at:  # the rows have moved, and graphs point into them
            self.at, self.graphs, self.memory = self.sampler.rows.at, {}, None
        if self.graphs.get((n, span)):
            return self.graphs[n, span].replay()
        self.step(n, span)  # a size's first step is run as it is: a capture wants a warm-up
        if self.works and (n, span) not in self.graphs:
            try:
                self.graphs[n, span] = self.capture(n, span)
            except torch.OutOfMemoryError:
                self.graphs[n, span] = None  # this size is run as it is
            except RuntimeError as error:
                say(f"no decoding step will be captured, because one could not be: {error}")
                self.works = False

    def capture(self, n, span):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.at.device)
        with torch.cuda.stream(stream):  # where a capture fails, it would leave another behind
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                self.step(n, span)
        self.memory = graph.pool()  # graphs run one at a time, so they share it
        return graph


def compiled_for(sampler, function):
    """A method of a sampler, compiled for all rows and lengths. The compiler is told which sizes
    never change: about every other one it reasons in each layer."""
    run, rows, known = compiled(function), sampler.rows, [None]

    def call(*args):
        if known[0] is not rows.at:  # the rows have moved
            known[0] = rows.at
            for x in rows.keys + rows.values:
                torch._dynamo.mark_static(x, (1, 3))
            for x in (rows.hidden, rows.u, rows.tokens, rows.logp, rows.p):
                torch._dynamo.mark_static(x, 1)
        return run(*args)
    return call


def accelerate(sampler, compile):
    """Gives a rollout.Sampler the fastest forward pass and decoding step that come out alike."""
    forward, step = sampler.forward, sampler.decode_one_token
    ways = [(forward, step, "")]
    if compile:
        ways.insert(0, (*(compiled_for(sampler, f) for f in (forward, step)), "compiled "))
    if sampler.gpu:
        ways = [(f, Captured(sampler, s), f"{how}captured ") for f, s, how in ways] + ways
        longest, rows = sampler.limit + sampler.max_new, sampler.rows
        token = sum(x.shape[1] * x.shape[3] * x.element_size() for x in rows.keys + rows.values)
        free = torch.cuda.mem_get_info(rows.at.device)[0] if torch.cuda.is_available() else 0
        if token * longest * ROWS <= free // 4:  # or growing would throw captured graphs away
            sampler.reserve(1, longest)
    stops = sampler.is_stop.clone()
    sampler.is_stop.zero_()  # for now no word ends a response; in place, as graphs read it
    for encoder, decoder, how in ways:
        sampler.encoder, sampler.decoder = encoder, decoder
        found = try_out(sampler)
        if getattr(decoder, "works", True) and all(
                alike(sampler.lm, *pair, f"{how}sampling") for pair in found):
            break
    else:
        raise ValueError("the kv engine does not repeat the model's hidden states: --engine hf")
    sampler.is_stop.copy_(stops)
    sampler.forget()
    sampler.tokens_encoded = sampler.tokens_decoded = sampler.steps = 0


@torch.no_grad()
def try_out(sampler):
    """Answers two short prompts, in context "full" in two parts each -> [(the model's, the
    sampler's own)]: hidden states, log-probs, the uniform near u that draws the token, and u."""
    lm, rows, u = sampler.lm, sampler.rows, 0.5
    parts = ([0, 1, 2], [3]), ([0, 1, 2, 4], [3, 5, 6, 7, 8])
    parts, states, drawn = parts if sampler.context == "full" else parts[1:], [], []
    steps = min(3, sampler.max_new)
    sampler.forget()
    sampler.reserve(5, 5 + steps)  # what is equal by chance would be compiled as if it always were
    for sequences in parts:
        sampler.open = 0
        for name, ids in enumerate(sequences):
            sampler.added.append((name, ids, np.full(sampler.max_new, u)))
        sampler.prefill()
        states.append(rows.hidden[:2].clone())
    for n in range(steps):
        logits = lm.head(states[-1]).float() / (sampler.temperature or 1)
        policy = logits.index_fill(-1, lm.value_index, float("-inf")).log_softmax(-1)
        sampler.step()
        states.append(rows.hidden[:2].clone())
        token, logp = rows.tokens[:2, n:n + 1], rows.logp[:2, n]
        upto, logp_of = policy.exp().double().cumsum(-1).gather(1, token), policy.gather(1, token)
        near = torch.full_like(upto, u)
        if sampler.temperature:  # the uniform number lies between the sums before and after it
            near = near.clamp(upto - logp_of.exp(), upto)
        drawn.append(torch.stack([logp_of[:, 0] if sampler.temperature else policy.amax(-1), logp,
                                  near[:, 0], torch.full_like(logp, u)]))
    theirs = []
    for i, said in enumerate(rows.tokens[:2, :steps].tolist()):
        ids = torch.tensor([parts[-1][i] + said], device=lm.device)
        hidden = lm.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        ends = [len(part[i]) for part in parts]
        theirs.append(hidden[[end - 1 for end in ends] + [ends[-1] + n for n in range(steps)]])
    logp_of, logp, near, aim = torch.stack(drawn, 1)
    return (torch.stack(theirs), torch.stack(states, 1)), (logp_of, logp), (near, aim)
