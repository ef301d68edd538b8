"""Tests of hf/attention.py."""
import copy
import types

import pytest
import torch

from hf import attention
from model import actor_critic
from rollout import Sampler
from runtime.testing import flash_attention_forward, on_the_cpu, random_lm
from tools.imitate import random_tiny


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (5, 1)])
def test_grouped_query_attention_matches_plain_attention(heads, kv_heads):
    torch.manual_seed(0)
    shapes = (heads, 7), (kv_heads, 7), (kv_heads, 7)
    query, key, value = (torch.randn(3, h, t, 8) for h, t in shapes)
    wide = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
    causal = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7).tril().bool(), float("-inf"))
    ragged = torch.zeros(3, 1, 7, 7).masked_fill(torch.rand(3, 1, 7, 7) < 0.4, float("-inf"))
    ragged[..., 0] = 0
    last = query[:, :, :1], ragged[:, :, :1]
    for q, mask, plain in ((query, None, causal), (query, ragged, ragged), (*last, last[1])):
        scores = (q @ wide[0].transpose(2, 3)) * 0.3 + plain
        torch.testing.assert_close(
            attention.grouped_query_attention(None, q, key, value, mask, scaling=0.3)[0],
            (scores.softmax(-1) @ wide[1]).transpose(1, 2))
    with pytest.raises(ValueError, match="softcap"):
        attention.grouped_query_attention(None, query, key, value, None, softcap=30.0)


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_in_pieces_equals_attention_with_a_mask(monkeypatch, groups):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_forward)
    generator = torch.Generator().manual_seed(0)
    piece = attention.PIECE_LENGTH
    rows, heads, length, size = 4, 2, 3 * piece, 8
    lengths = torch.tensor([1, piece, piece + 1, length - 5])
    key, value = torch.randn(2, rows + 1, length + 9, heads, size, generator=generator)
    query = torch.randn(rows, groups * heads, 1, size, generator=generator)
    unseen = torch.arange(length) >= lengths[:, None, None, None]
    masked = torch.zeros(unseen.shape).masked_fill(unseen, float("-inf"))
    attend = lambda last, mask: attention.grouped_query_attention(
        None, query, key[:rows, :last].transpose(1, 2), value[:rows, :last].transpose(1, 2), mask,
        0.3)[0]
    pieces = attention.pieces_of_cache(lengths, length, length + 9)
    torch.testing.assert_close(attend(None, pieces), attend(length, masked))


@pytest.mark.parametrize("shapes, says", [
    ([], "has no layers"), ([{"keys": (1, 2, 1, 8)}], "is not keys and values"),
    ([{"keys": (1, 2, 8), "values": (1, 2, 8)}], "is not keys and values"),
    ([{"keys": (1, 1, 2, 8), "values": (1, 1, 2, 8)}], "is not keys and values")])
def test_kv_caches_of_another_form_are_refused(shapes, says):
    lm = random_lm("qwen2", 1)
    layers = [types.SimpleNamespace(**{name: torch.zeros(shape) for name, shape in layer.items()})
              for layer in shapes]
    lm.model.base_model.register_forward_hook(lambda module, inputs, output: {
        "cache": types.SimpleNamespace(layers=layers)})
    with pytest.raises(ValueError, match=f"use --engine hf: its KV cache.* {says}"):
        Sampler(lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_works_as_before_after_wrapping_a_model(dtype):
    """With and without a cache, and with padding on the left."""
    model = copy.deepcopy(random_lm("qwen2", 1, dtype=dtype).model)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(20, 400, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(30) >= torch.tensor([0, 3, 11, 29])[:, None]).long()

    @torch.no_grad()
    def seen(model):
        one, four = (model.generate(ids[:n], attention_mask=mask[:n], max_new_tokens=8,
                                    do_sample=False, pad_token_id=0) for n in (1, 4))
        logits = model(input_ids=ids, attention_mask=mask).logits * mask[..., None]
        return one, four, logits[..., :-2]  # without the two tokens whose rows become 0

    before = seen(model)
    lm = actor_critic(model, random_tiny().tokenizer)
    assert model.config._attn_implementation == "grouped"
    after = seen(model)
    assert all(map(torch.equal, before[:2], after[:2])) and lm.score
    torch.testing.assert_close(before[2], after[2], atol=1e-4 if dtype == torch.float32 else 0.1,
                               rtol=0)
