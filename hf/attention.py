"""Attention for transformers' decoders that never repeats the keys and values that several query
heads share, and its form for decoding steps on a GPU.

    replace_attention          lets a model use grouped_query_attention
    causal_inputs              what a forward pass over whole sequences gives it
    grouped_query_attention    by PyTorch's scaled_dot_product_attention
    attention_in_pieces        a decoding step by FlashAttention: each row reads its own positions

Shapes: R rows, T query tokens, S key positions, H query heads, H' key-value heads of size E, and
G = H / H' query heads to a key-value head.
"""
import torch
import torch.nn.functional as F
import transformers
from transformers.masking_utils import sdpa_mask


def uses_full_attention(backbone) -> bool:
    """Whether every layer attends to all previous tokens."""
    config = backbone.config.get_text_config()  # a part of a multimodal model's
    layers, window = (getattr(config, name, None) for name in ("layer_types", "sliding_window"))
    return set(layers) == {"full_attention"} if layers else not window


def check_attention(model) -> None:
    """ValueError: a KV cache cannot be decoded by positions alone, because not every layer attends
    to all previous tokens, or the rotary embedding depends on the sequence's length."""
    rope = str(getattr(model.base_model.config, "rope_parameters", ""))
    if not uses_full_attention(model.base_model) or "'dynamic'" in rope or "'longrope'" in rope:
        raise unsupported(model, "not every layer attends to all previous tokens, or the rotary "
                          "embedding depends on the sequence length")


def keys_and_values(model, cache) -> list:
    """The (keys, values) of every layer of a model's own cache after one token, (1, H', 1, E) each.
    ValueError: it does not have this form."""
    layers = [(getattr(layer, "keys", None), getattr(layer, "values", None))
              for layer in getattr(cache, "layers", ())]
    for pair in layers:
        if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in pair) or not (
                pair[0].shape[:3] == pair[1].shape[:3] == (1, pair[0].shape[1], 1)):
            raise unsupported(model, "its KV cache is not keys and values of (rows, heads, "
                              "positions, size of a head) in every layer")
    if not layers:
        raise unsupported(model, f"its KV cache, {type(cache).__name__}, has no layers")
    return layers


def unsupported(model, why: str) -> ValueError:
    """The error of a model that rollout.Sampler cannot decode."""
    return ValueError(f"the kv engine does not support {type(model).__name__}, use --engine hf: "
                      f"{why}")


def replace_attention(model) -> None:
    """Makes grouped_query_attention, under the name "grouped", the attention of a model in which
    every layer attends to all previous tokens. Other models are left as they are."""
    if uses_full_attention(model.base_model):
        transformers.AttentionInterface.register("grouped", grouped_query_attention)
        transformers.AttentionMaskInterface.register("grouped", sdpa_mask)
        model.set_attn_implementation("grouped")


def causal_inputs(model, ids) -> dict:
    """Keyword arguments of our own forward passes over ids (B, T), where padding, if any, is on the
    right: positions, and an empty mask (one without elements), which grouped_query_attention takes
    for "causal". So transformers does not build a mask, nor wait for the GPU to find out whether
    there is padding. A model with another attention needs none of it: {}. Other passes, such as
    those of generate, get the mask they need."""
    if model.config._attn_implementation != "grouped":
        return {}
    return {"attention_mask": torch.empty(1, 1, 0, 0, device=ids.device),
            "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}


def grouped_query_attention(module, query, key, value, attention_mask=None, scaling=None,
                            **kwargs):
    """What transformers' AttentionInterface calls in each layer.

    query (R, H, T, E); key and value (R, H', S, E). attention_mask: None or empty for causal
    attention, else (R, 1, T, S), additive or boolean; or what pieces_of_cache returns, of int32
    -> (R, T, H, E), None. ValueError: the layer wants a kind of attention that this is not."""
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"grouped_query_attention does not support {name}")
    mask, sdpa = attention_mask, F.scaled_dot_product_attention
    if mask is not None and mask.dtype == torch.int32:
        return attention_in_pieces(query, key, value, mask, scaling), None
    empty = mask is not None and mask.numel() == 0  # see causal_inputs
    causal = empty or mask is None and query.shape[2] > 1  # a single query sees the whole cache
    mask = None if empty else mask
    grouped = query.unflatten(1, (-1, groups := query.shape[1] // key.shape[1]))  # R, H', G, T, E
    # float32 on a GPU takes the `else` branch even without a mask, which is faster there
    if mask is None and not (query.is_cuda and query.dtype == torch.float32):  # scoring, prefill
        gqa = {"enable_gqa": True} if groups > 1 else {}  # `groups > 1` is symbolic if compiled
        out = sdpa(query, key, value, is_causal=causal, scale=scaling, **gqa)
    elif mask is not None and query.shape[2] == 1:
        # decoding: the G heads of a group become G queries of its one key-value head
        out = sdpa(grouped[:, :, :, 0], key, value, mask.expand(-1, 1, groups, -1), scale=scaling)
        out = out.flatten(1, 2)[:, :, None]
    else:  # prefill behind a cache, or float32 on a GPU: one head of each group at a time
        out = [sdpa(q, key, value, mask, 0, causal, scale=scaling) for q in grouped.unbind(2)]
        out = torch.stack(out, 2).flatten(1, 2)
    return out.transpose(1, 2), None


PIECE_LENGTH = 256  # divides every kv_length above it that Sampler.round_up makes


def pieces_of_cache(lengths: torch.Tensor, kv_length: int, positions_per_row: int) -> torch.Tensor:
    """What attention_in_pieces takes for a mask. The cache has positions_per_row positions for each
    of R rows, which attend to their first lengths (R,) ones: at least 1, and no more than
    kv_length.

    -> int32 (3, 1, 1, P + 1), with a column for each of P pieces, R times as many as kv_length has:
    its number, its first position in the flattened cache, and how many of its positions are used.
    FlashAttention wants one number more, in a last column whose other entries are unused."""
    begin = torch.arange(0, kv_length, PIECE_LENGTH, device=lengths.device)
    used = (lengths.clamp(max=kv_length)[:, None] - begin).clamp(0, PIECE_LENGTH).flatten()
    row = torch.arange(len(lengths), device=lengths.device)
    first_position = (row[:, None] * positions_per_row + begin).flatten()
    number = torch.arange(len(used), device=lengths.device)
    columns = torch.stack([number, first_position, used])
    return F.pad(columns, (0, 1), value=len(used)).int()[:, None, None]


def attention_in_pieces(query, key, value, pieces, scaling):
    """Attention of a decoding step on a GPU, in 16 bits. FlashAttention treats each piece of a
    row's keys and values as a sequence of its own, and the results are combined by their
    log-sum-exp (Flash-Decoding; Dao et al. 2023). So there is work for the whole GPU, and a row
    reads its own positions only, where SDPA with a mask reads as many as the longest row has.

    query (R, H, 1, E), key and value (R, H', S, E), pieces of pieces_of_cache -> (R, 1, H, E)."""
    number, first_position, used = pieces[:, 0, 0]
    used = used[:-1]
    rows, group_size, size = len(query), query.shape[1] // key.shape[1], query.shape[3]
    per_row = (len(number) - 1) // rows  # pieces
    q = query[:, :, 0].unflatten(1, (-1, group_size)).transpose(1, 2)  # (R, G, H', E)
    q = q[:, None].expand(-1, per_row, -1, -1, -1).reshape(rows * per_row * group_size, -1, size)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1),
        number * group_size, first_position,  # where each sequence begins: of queries, of keys
        group_size, PIECE_LENGTH,  # the longest of each
        0.0, False, False,  # no dropout, not causal, no debug mask
        scale=scaling, seqused_k=used)  # of keys from each beginning; so they may lie anywhere
    lse = lse.T.reshape(rows, per_row, group_size, -1)
    lse = lse.masked_fill(used.view(rows, per_row, 1, 1) == 0, float("-inf"))
    out = out.view(rows, per_row, group_size, -1, size).float() * lse.softmax(1)[..., None]
    return out.sum(1).transpose(1, 2).reshape(rows, 1, -1, size).to(query.dtype)
