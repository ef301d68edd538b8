"""Tests of runtime/attention.py."""
import pytest
import torch

from runtime import attention


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


def flash_attention_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug,
                            *, scale, seqused_k):
    """What torch.ops.aten._flash_attention_forward computes on a GPU. Where a sequence has no keys,
    its log-sum-exp is infinite."""
    scale, dtype = scale or query.shape[-1] ** -0.5, query.dtype
    query, key, value = query.float(), key.float(), value.float()
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], float("inf"))
    for start, end, first, used in zip(cum_q, cum_q[1:], cum_k, seqused_k):
        if used:
            q, keys = query[start:end].transpose(0, 1), key[first:first + used].transpose(0, 1)
            scores = scale * q @ keys.mT  # (H', queries, keys)
            lse[:, start:end] = scores.logsumexp(-1)
            values = value[first:first + used].transpose(0, 1)
            out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out.to(dtype), lse, None, None, None


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
