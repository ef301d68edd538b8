"""Tests of hf/verify.py: what is right is used, and what is wrong is not."""
import dataclasses
import operator
import types

import pytest
import torch

import eval as evaluation
import rollout as rollout_module
from hf import compile as compile_module, verify
from hf.attention import PIECE_LENGTH
from hf.verify import check_initial_readout, compiled_scoring
from model import make_batch
from rollout import DecodeState, Sampler, sample_token
from runtime.testing import (CONTEXTS, INF, as_on_a_gpu, batch_of, flash_attention_forward,
                             on_the_cpu, play, random_lm, same_tokens_and_values)
from tools.imitate import random_tiny


def test_compiled_scoring_that_fails_at_a_second_width_is_not_used(monkeypatch, caplog):
    def for_one_width(backbone):
        def run(input_ids, **inputs):
            widths.add(input_ids.shape[1])
            assert len(widths) == 1, "wrong stride"
            return backbone(input_ids=input_ids, **inputs)
        return run

    widths, lm = set(), random_lm("qwen2", 1)
    monkeypatch.setattr(compile_module, "compiled_layers", for_one_width)
    monkeypatch.setattr(compile_module, "compiled", lambda function: function)
    assert compiled_scoring(lm, 1000) is lm and len(widths) == 2
    assert "compiled scoring is not used: wrong stride" in caplog.text


def test_failed_compilation_or_capture_falls_back_to_eager_with_a_warning(monkeypatch, caplog):
    class Fails(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise torch._dynamo.exc.TorchDynamoException("no compiler\nhere")

    lm = random_lm("qwen2", 1)
    plain = play(lm, "kv", "window", 1.0)[0]
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda *args, **options: Fails())
    monkeypatch.setattr(compile_module.CudaGraphs, "capture", Fails().forward)
    turns, sampler = play(lm, "kv", "window", 1.0, sampler_options={"compile": True})
    same_tokens_and_values(plain, turns)
    assert not isinstance(sampler.decode_step, compile_module.CudaGraphs)
    batch = batch_of(turns)
    torch.testing.assert_close(compiled_scoring(lm, 1000).score(batch), lm.score(batch))
    warnings = [record.getMessage() for record in caplog.records]
    # the layers of the sampler; layers and token_scores of scoring; and the capture
    failed = "torch.compile failed, falling back to eager: no compiler here"
    assert sum(failed in line for line in warnings) == 3
    assert sum("CUDA graphs" in line for line in warnings) == 1 and len(warnings) == 4


def replay_something_else(captured, n, kv_length):
    def replay():
        captured.step(n, kv_length)
        captured.step.__self__.state.readouts.add_(0.1)
    return types.SimpleNamespace(replay=replay)


def fail_in_a_way_of_its_own(captured, n, kv_length):
    raise KeyError("kernel")


def reversed_positions(backbone):
    return lambda position_ids, **inputs: backbone(position_ids=99 - position_ids, **inputs)


@CONTEXTS
@pytest.mark.parametrize("compile, owner, name, wrong, says", [
    (True, compile_module, "compiled_layers", reversed_positions, "the error of its log-probs is "),
    (False, compile_module.CudaGraphs, "capture", replay_something_else, "the error of its V"),
    (False, compile_module.CudaGraphs, "capture", fail_in_a_way_of_its_own, "KeyError: 'kernel'")])
def test_fast_way_that_fails_or_is_wrong_gives_way_to_the_plain_one(
        monkeypatch, caplog, context, compile, owner, name, wrong, says):
    lm = random_lm("qwen2", 1)
    plain = play(lm, "kv", context, 1.0)[0]
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(owner, name, wrong)
    turns, sampler = play(lm, "kv", context, 1.0, sampler_options={"compile": compile})
    assert not verify.verified[lm.model][context, compile]
    same_tokens_and_values(plain, turns)
    assert sampler.decode_step == sampler.decode_one_token
    assert sampler.state.backbone is lm.model.base_model
    warning, = caplog.records
    assert warning.getMessage().startswith(
        f"sampling falls back to plain decoding, which is slower: {says}")


def test_compiled_scoring_that_is_wrong_is_not_used(monkeypatch, caplog):
    lm = random_lm("qwen2", 1)
    monkeypatch.setattr(compile_module, "compiled_layers", lambda body: lambda **inputs: (
        types.SimpleNamespace(last_hidden_state=1.1 * body(**inputs).last_hidden_state)))
    monkeypatch.setattr(compile_module, "compiled", lambda function: function)
    assert compiled_scoring(lm, 1000) is lm and "compiled scoring is not used" in caplog.text


def round_differently(lm, rate):
    """In passes with a cache, a fraction of the outputs of linear layers is off by the last digit
    of bfloat16, as if they came from other kernels."""
    uses_cache, generator = [], torch.Generator().manual_seed(0)
    lm.model.base_model.register_forward_pre_hook(
        lambda module, inputs, kwargs: uses_cache.append(kwargs.get("use_cache")), with_kwargs=True)

    def perturb(module, inputs, output):
        off = torch.rand(output.shape, generator=generator) < rate
        return torch.where(off, output * (1 + 2 ** -7), output) if uses_cache[-1] else output

    for module in lm.model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(perturb)


@CONTEXTS
@pytest.mark.parametrize("temperature", [1.0, 0.4, 0.0])
def test_correct_sampler_of_a_16_bit_model_passes_the_check_despite_rounding(context, temperature):
    for rate in (0.003, 0.1):
        lm = random_lm("qwen2", 1, layers=6, dtype=torch.bfloat16, initializer_range=0.15)
        round_differently(lm, rate)
        weights = [*lm.model.parameters()]
        Sampler(lm, "kv", context, 30, temperature)
        assert all(map(operator.is_, lm.model.parameters(), weights))  # the check restores them


def is_decoding(kwargs):
    return kwargs["input_ids"].shape[1] == 1 and "position_ids" in kwargs


def change_mask(kwargs, offset, value):
    """Sets the mask of a decoding step to `value` at the position of the newest key + `offset`."""
    mask = kwargs.get("attention_mask")
    if mask is not None and is_decoding(kwargs):
        newest = (mask > -1).sum(-1, keepdim=True) - 1
        there = torch.arange(mask.shape[-1]) == newest + offset
        kwargs["attention_mask"] = mask.masked_fill(there, value)


def move(kwargs, by):
    if is_decoding(kwargs):
        kwargs["position_ids"] = kwargs["position_ids"] + by


MISTAKES = {  # name: a change of the arguments of a pass with a cache
    "a position too far": lambda kwargs: move(kwargs, 1),
    "a position short": lambda kwargs: move(kwargs, -1),
    "the newest key hidden": lambda kwargs: change_mask(kwargs, 0, -INF),
    "a key too many": lambda kwargs: change_mask(kwargs, 1, 0.0),
    "the next key but one": lambda kwargs: change_mask(kwargs, 2, 0.0),
    "another slot's token": lambda kwargs: kwargs.update(
        input_ids=kwargs["input_ids"].roll(1, 0) if is_decoding(kwargs) else kwargs["input_ids"])}


@CONTEXTS
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_with_a_wrong_mask_or_position_is_refused(context, mistake, dtype):
    lm = random_lm("qwen2", 1, dtype=dtype)

    def spoil(module, inputs, kwargs):
        if kwargs.get("use_cache"):
            MISTAKES[mistake](kwargs)
        return inputs, kwargs

    lm.model.base_model.register_forward_pre_hook(spoil, with_kwargs=True)
    with pytest.raises(ValueError, match="error of its log-probs is .*, and rounding explains"):
        Sampler(lm, "kv", context, 30)


@pytest.mark.parametrize("name, change, says", [
    ("sample_token", lambda logits, u, *rest: sample_token(logits, (u + 0.5) % 1, *rest),
     "choices of tokens"),
    ("sample_token", lambda logits, u, *rest: sample_token(logits, u, rest[0], 0.7), "log-probs")])
def test_sampler_that_draws_wrong_tokens_is_refused(monkeypatch, name, change, says):
    monkeypatch.setattr(rollout_module, name, change)
    with pytest.raises(ValueError, match=f"the error of its {says} is"):
        Sampler(random_lm("qwen2", 1))


def test_values_read_from_the_wrong_token_are_refused_in_a_new_model(monkeypatch):
    lm = random_tiny()
    assert not lm.value_rows.weight.any()
    update, kept = DecodeState.advance, {}

    def late(state, n, token, hidden):
        update(state, n, token, kept.get("hidden", hidden)[:n])
        kept["hidden"] = state.hidden[:n] = hidden

    monkeypatch.setattr(DecodeState, "advance", late)
    with pytest.raises(ValueError, match="the error of its V and Q is"):
        Sampler(lm)
    assert not lm.value_rows.weight.any()  # the check has used others


@CONTEXTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_can_be_made_between_a_forward_pass_and_its_backward_pass(context, dtype):
    lm = random_lm("qwen2", 1, dtype=dtype)
    batch = make_batch([([*range(9, 19)], [(2, 4), (6, 9)])])
    scores = lm.score(batch)
    params = [*lm.model.parameters(), *lm.value_rows.parameters()]
    versions = [p._version for p in params]
    sampler = Sampler(lm, context=context, max_new_tokens=4)
    sampler.generate([[5, 6, 7]])
    assert versions == [p._version for p in params]
    sum(x.sum() for x in scores).backward()


def test_sampler_reads_values_by_the_rows_as_they_are_now():
    lm, u = random_lm("qwen2", 1), [[0.5] * 4]
    sampler = Sampler(lm, max_new_tokens=4)
    before, = sampler([0], [[5, 6, 7]], u)
    with torch.no_grad():
        lm.value_rows.weight *= -1
    after, = sampler([0], [[5, 6, 7]], u)
    assert (before.ids, before.v, before.q) == (after.ids, -after.v, -after.q) and before.v


def test_sampler_is_checked_once_per_model_and_context(monkeypatch):
    lm, compared = random_lm("qwen2", 1), []
    check = verify.check_against_reference
    monkeypatch.setattr(verify, "check_against_reference",
                        lambda sampler: compared.append(sampler.context) or check(sampler))
    for context in ("window", "full", "window"):
        for temperature in (0.4, 1.0):
            settings = types.SimpleNamespace(engine="kv", context=context, max_new_tokens=8,
                                             max_prompt=None)
            evaluation.sampler_for(lm, settings, temperature)
    assert compared == ["window", "full"]


@CONTEXTS
def test_sampler_checks_and_uses_attention_in_pieces(monkeypatch, caplog, context):
    """Whole conversations of more than a piece, and a mistake that shows only there."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_forward)
    monkeypatch.setattr(compile_module, "compiled_layers", lambda backbone: backbone)
    lm = random_lm("qwen2", 1, dtype=torch.bfloat16)
    as_on_a_gpu(monkeypatch)
    sampler, found = Sampler(lm, "kv", context, 30, compile=True), []
    assert sampler.state.in_pieces and verify.verified[lm.model][context, True]
    assert not caplog.records
    prompts = [lm.chat.encode_user_turn("go to the fridge " * n) for n in (3, 150, 400)]
    for sampler.state.in_pieces in (True, False):
        sampler.decode_step = sampler.new_decode_step()
        found.append(sampler.generate(prompts))
    assert len(prompts[1]) > PIECE_LENGTH > len(prompts[0])
    for one, other in zip(*found):
        same = [a == b for a, b in zip(one.ids, other.ids)]
        assert same[0]  # later tokens may differ by rounding
        assert one.logp[0] == pytest.approx(other.logp[0], abs=0.05)
        assert one.v == pytest.approx(other.v, abs=0.05)

    def without_later_pieces(*args, **options):
        out, lse, *rest = flash_attention_forward(*args, **options)
        pieces = len(args[3]) - 1
        rows = sampler.round_up(len(verify.CHECK_PROMPTS), 0)[0]
        group_size = len(args[0]) // pieces
        later = torch.arange(pieces) % (pieces // rows) > 0
        return out.masked_fill(later.repeat_interleave(group_size)[:, None, None], 0), lse, *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", without_later_pieces)
    sampler = Sampler(lm, "kv", context, 30, compile=True)
    assert not sampler.state.in_pieces and not verify.verified[lm.model][context, True]
    assert "sampling falls back to plain decoding" in caplog.text


def test_saturated_initial_readout_is_refused_with_a_remedy():
    lm = random_lm("qwen2", 1)
    ids = lm.chat.encode_user_turn("hello")
    one, both = sorted(lm.tau_v * lm.score(make_batch(  # |z+ - z-| of Q and V
        [(ids + [lm.chat.end_of_turn_id()], [(len(ids), len(ids) + 1)])]))[k].abs().item()
        for k in (2, 3))
    check_initial_readout(dataclasses.replace(lm, tau_v=(one + both) / 2), ids)
    with pytest.raises(ValueError, match="--value_tokens.*--tau_v"):
        check_initial_readout(dataclasses.replace(lm, tau_v=one / 2), ids)
