"""The choice of w+ and w-: two tokens that the user names, and a look at how their logits differ
before any training. model.reserve_value_ids chooses them where nothing is named."""
import torch


def named_value_ids(tokenizer, names, taken, rows=float("inf")):
    """The ids of the two tokens that the user named; what is no token may be a row's number."""
    words = tokenizer.get_vocab()
    ids = tuple(words.get(n, int(n) if n.isdigit() else -1) for n in names)
    for name, i in zip(names, ids):
        special = tokenizer.added_tokens_decoder.get(i)
        used = special and special.content in tokenizer.chat_template
        why = (f"is no token, nor one of the head's {rows} rows" if not 0 <= i < rows else
               "is a stop token or in the chat template" if i in taken or used else
               "is there twice: two different tokens are needed" if len(set(ids)) != 2 else "")
        if why:
            raise ValueError(f"--value_tokens: {name!r} {why}")
    return ids


@torch.no_grad()
def readout_at_start(lm, prompts):
    """The logit difference z+ - z- before and after an empty response to each prompt (a list of
    ids), before any training -> mean, deviation, saturated share. ValueError where Eq. 1 is flat
    for most."""
    end = lm.chat.later("-")[:1]  # the end of a turn; V is read before it and Q after it
    ends = [lm.body(torch.tensor([ids + end], device=lm.device))[0, -2:] for ids in prompts]
    plus, minus = lm.value_logits(torch.cat(ends)).unbind(-1)
    diff = plus - minus
    saturated = (diff.abs() > lm.tau_v).float().mean().item()
    if saturated > 0.5:
        raise ValueError(f"{saturated:.0%} of the value readouts start saturated: the logits of "
                         f"{lm.value_ids} differ by {diff.mean():.2f} +- {diff.std():.2f}, and "
                         f"Eq. 1 has no gradient beyond tau_v = {lm.tau_v:g}. Choose two others "
                         f"with --value_tokens A B, or --tau_v above {2 * diff.abs().mean():.1f}")
    return diff.mean().item(), diff.std().item(), saturated
