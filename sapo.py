"""The algorithm of SAPO, as pure functions (Liang, Feng, An, Liu: Single-Rollout Autoregressive
Policy Optimization for Agentic Reinforcement Learning, github.com/dy-liang/SAPO).

A language model acts in turns t = 1, 2, ... One causal forward pass over [context, response] gives
the policy, the state value V (read just before the response) and the action value Q (read just
after it). This file has what follows from them:

    turn_targets          rewards and old values -> advantages, targets of V and Q       Eq. 4-6
    normalize_advantages  one mean and standard deviation over all turns of the batch    Eq. 7
    policy_loss           PPO's clipped objective; tokens have their turn's advantage    Eq. 8-9
    value_loss            clipped regression of V or Q, one value per turn               Eq. 10-11
    actor_loss            those terms of the joint loss that concern the policy
    sapo_loss             the joint loss, for one backward pass                          Eq. 12

and discounted_returns, kl_loss (the KL term by itself) and explained_variance. It needs only torch:
copy it. Equation numbers are the paper's. `# SAPO:` marks what differs from PPO, with its critic,
or from GRPO, with its groups:
    grep -n "# SAPO:" *.py

Shapes: N turns, M response tokens, B sequences, T tokens. In train.py all tensors are flat, (N,) or
(M,), and nothing is padded; `mask` and `valid` are for other programs, in which something is.
Readouts p are in [-1, 1] (Eq. 1), and V and Q are R_max p (Eq. 2). Advantages come from V alone; Q
is trained as an auxiliary task.

A loss is a sum divided by `denom`, the number of tokens or turns of the whole mini-batch. So the
gradients of micro-batches and ranks are summed, not averaged. Numbers in `info` are summed, too,
except those that end in _max: take their maximum.
    python sapo.py       works through one small trajectory
"""
import math

import torch
import torch.distributed as dist
from torch import Tensor


def positions(traj: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Where turns stand in a table that has a row for each trajectory and a column for each of its
    turns, from the first known one on: trajectory ids and turn indices (N,) -> rows (N,), columns
    (N,). ValueError: turns are missing in the middle of a trajectory."""
    # each turn once, ordered by trajectory and then by index; `which` (N,) is each given turn's
    # place in that order
    once, which = torch.stack([traj.long(), turn.long()]).unique(dim=1, return_inverse=True)
    ids, row, count = once[0].unique_consecutive(return_inverse=True, return_counts=True)
    last = count.cumsum(0) - 1  # the place of each trajectory's last turn
    first = last - count + 1
    gaps = once[1, last] - once[1, first] + 1 > count  # the indices span more turns than there are
    if gaps.any():
        raise ValueError("turn_targets: turns are missing in the middle of trajectories "
                         f"{ids[gaps].tolist()[:8]}")
    column = torch.arange(len(row), device=row.device) - first[row]
    return row[which], column[which]


@torch.no_grad()  # targets come from the frozen rollout policy: no gradient may reach them
def turn_targets(traj: Tensor, turn: Tensor, reward: Tensor, done: Tensor, v_old: Tensor,
                 q_old: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """Traverses every trajectory backward (Eq. 4-6) -> adv, y_v, y_q, each (N,), in units of
    return.

    All arguments are (N,): trajectory id, turn index, reward, whether the episode ended after the
    turn (terminated or truncated: both are terminal), V_old and Q_old in units of return. Turns may
    be in any order, and one turn may be given several times, because some trainers fill up their
    batches with copies. The value after a trajectory's last known turn is 0. ValueError: shapes
    differ, turns are missing in the middle of a trajectory, or two copies of a turn differ."""
    if any(x.dim() != 1 or len(x) != len(traj) for x in (traj, turn, reward, done, v_old, q_old)):
        raise ValueError("turn_targets: all six tensors must be 1-D and of one length")
    dtype = torch.promote_types(v_old.dtype, torch.float32)
    if len(traj) == 0:
        return tuple(v_old.new_zeros(3, 0, dtype=dtype))

    row, column = positions(traj, turn)
    rows, columns = int(row.max()) + 1, int(column.max()) + 1

    def table(x, name):
        """(N,) -> (trajectories, turns of the longest + 1). What is not there is 0, and so is the
        last column, which stands for the value after the last turn."""
        x = x.to(dtype)
        grid = x.new_zeros(rows, columns + 1)
        grid[row, column] = x
        kept = grid[row, column]
        if not ((kept == x) | kept.isnan() & x.isnan()).all():  # NaN does not equal NaN
            raise ValueError(f"turn_targets: two copies of a turn have different {name}")
        return grid

    r, d = table(reward, "rewards"), table(done, "ends")
    v, q = table(v_old, "V"), table(q_old, "Q")
    adv = torch.zeros_like(v)
    for t in reversed(range(columns)):
        delta = r[:, t] + gamma * (1 - d[:, t]) * v[:, t + 1] - v[:, t]  # Eq. 4
        adv[:, t] = delta + gamma * lam * (1 - d[:, t]) * adv[:, t + 1]  # Eq. 5  # SAPO: over turns
    y_v = v + adv  # Eq. 6: the lambda-return
    y_q = r.clone()
    y_q[:, :-1] += gamma * (1 - d[:, :-1]) * q[:, 1:]  # Eq. 6  # SAPO: on-policy SARSA target for Q
    return adv[row, column], y_v[row, column], y_q[row, column]


def discounted_returns(traj: Tensor, turn: Tensor, reward: Tensor, *, gamma: float) -> Tensor:
    """The discounted return from each turn to the end of its trajectory, (N,): GAE with V = 0 and
    lambda = 1."""
    no_value = torch.zeros_like(reward)
    never_done = torch.zeros_like(reward)  # so nothing cuts off the sum of rewards
    returns, _, _ = turn_targets(traj, turn, reward, never_done, no_value, no_value, gamma=gamma,
                                 lam=1.0)
    return returns


@torch.no_grad()
def normalize_advantages(adv: Tensor, *, invalid: Tensor | None = None, c_inv: float = 0.0,
                         valid: Tensor | None = None, eps: float = 1e-8, group=None) -> Tensor:
    """Eq. 7, (N,) -> (N,): (adv - mean) / (std + eps), with the population's std. Never NaN
    where adv is finite, even with one turn or none.

    invalid (N,)  turns whose response breaks the format (the paper's m_inv); their advantage is
                  reduced by c_inv, in units of return, before normalization. The targets of V and
                  Q are not
    valid (N,)    turns that are not padding (None: all are); padding gets 0. It has nothing to do
                  with `invalid`
    group         torch.distributed process group that shares mean and std (None: this rank only)"""
    check_shapes(adv, invalid, valid)
    is_turn = torch.ones_like(adv, dtype=torch.float64) if valid is None else valid.double()
    penalized = adv.double() if invalid is None else adv.double() - c_inv * invalid.double()
    penalized = torch.where(is_turn > 0, penalized, 0.0)

    def over_all_ranks(x):
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    sums = over_all_ranks(torch.stack([is_turn.sum(), (is_turn * penalized).sum()]))
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    # not by the mean of squares minus the square of the mean, which would cancel
    variance = over_all_ranks((is_turn * (penalized - mean) ** 2).sum()) / count
    normalized = (penalized - mean) / (variance.sqrt() + eps)  # Eq. 7
    return torch.where(is_turn > 0, normalized, 0.0).to(float_dtype(adv))


# --------------------------------------------------------------------- helpers, then the losses

def masked(mask: Tensor | None, x: Tensor) -> Tensor:
    """x where the mask is set, else 0; without a mask, x."""
    return x if mask is None else torch.where(mask.bool(), x, 0.0)


def float_dtype(x: Tensor) -> torch.dtype:
    """The dtype of advantages made from x: float32 for integers, because they are fractions."""
    return x.dtype if x.is_floating_point() else torch.float32


def check_shapes(*tensors) -> None:
    """ValueError: shapes differ. Broadcasting would silently give a wrong number."""
    shapes = [tuple(x.shape) for x in tensors if x is not None]
    if len({*shapes}) > 1:
        raise ValueError(f"tensors must have one shape; these have {shapes}")


def denominator(denom, mask: Tensor | None, x: Tensor):
    """What a loss over x divides its sum by: `denom`, or the number of entries, at least 1."""
    if denom is not None:
        return denom
    entries = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    return entries.sum().clamp(min=1)


def safe_max(x: Tensor) -> Tensor:
    """The maximum of numbers >= 0; 0 if there are none."""
    return x.detach().amax() if x.numel() else x.new_zeros(())


LOG_RATIO_LIMIT = 20.0  # of a token, in nats


def limited(log_ratio: Tensor) -> Tensor:
    """Log-ratios of two policies, limited to +-LOG_RATIO_LIMIT, so that exp() of them is finite.
    Beyond the limit they have no gradient. A token that is e^20 times as likely as it was when it
    was drawn was no sample of that policy: in the unclipped branch of Eq. 9, its gradient of 5e8
    times the advantage would be the whole step."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(logp: Tensor, logp_old: Tensor, adv: Tensor, mask: Tensor | None = None, *,
                clip: float, denom=None) -> tuple[Tensor, dict]:
    """Eq. 8-9 -> (loss, info: ratio_max, clip_fraction).

    Four tensors of one shape, (M,) or (B, T): current and old log-probs of the sampled tokens, the
    advantage of each token (its turn's), and a mask of response tokens (None: all are).
    clip_fraction is divided by `denom`, too, so that those of micro-batches can be summed. The log
    of a ratio is limited to +-20, and has no gradient beyond: loss and gradient are finite for any
    finite log-probs."""
    check_shapes(logp, logp_old, adv, mask)
    denom = denominator(denom, mask, logp)
    log_ratio = masked(mask, logp - logp_old)  # masked first, as padding may hold anything
    ratio = limited(log_ratio).exp()  # Eq. 8
    adv = masked(mask, adv)
    unclipped, clipped = ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv
    loss = -torch.minimum(unclipped, clipped).sum() / denom  # Eq. 9
    info = {"ratio_max": safe_max(masked(mask, ratio)),
            "clip_fraction": (clipped < unclipped).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def value_loss(p: Tensor, p_old: Tensor, y: Tensor, *, clip: float, valid: Tensor | None = None,
               denom=None) -> tuple[Tensor, dict]:
    """Eq. 10-11, for V or for Q -> (loss, info: clip_fraction, saturated).

    p, p_old, y (N,): current readouts, old readouts, targets / R_max; valid (N,): which turns
    are not padding (None: all). The mean is over turns, not tokens. `saturated` is the fraction of
    readouts at +-1, where Eq. 1 has no gradient."""
    check_shapes(p, p_old, y, valid)
    denom = denominator(denom, valid, p)
    p, p_old, y = (masked(valid, x) for x in (p, p_old, y))
    p_clip = p_old + (p - p_old).clamp(-clip, clip)  # Eq. 10
    unclipped, clipped = (p - y) ** 2, (p_clip - y) ** 2
    loss = 0.5 * torch.maximum(unclipped, clipped).sum() / denom  # Eq. 11
    # where |p - p_old| <= clip, p_clip is p up to rounding, which can make `clipped` the larger one
    beyond = (clipped > unclipped) & ((p - p_old).abs() > clip)
    info = {"clip_fraction": beyond.sum() / denom, "saturated": (p.abs() >= 1).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """The k3 estimator of the KL to the reference, per token: r - 1 - log r >= 0, r = pi_ref / pi
    (J. Schulman, Approximating KL Divergence, 2020). log r is limited as in policy_loss."""
    log_r = limited(logp_ref - logp)
    return log_r.expm1() - log_r  # exp(x) - 1 would be mostly rounding error near 0


def kl_loss(logp: Tensor, logp_ref: Tensor, mask: Tensor | None = None, *, denom=None) -> Tensor:
    """The mean of k3 over tokens, (M,) or (B, T)."""
    check_shapes(logp, logp_ref, mask)
    denom = denominator(denom, mask, logp)
    return k3(masked(mask, logp), masked(mask, logp_ref)).sum() / denom


def actor_loss(logp: Tensor, entropy: Tensor, *, logp_old: Tensor, logp_ref: Tensor | None,
               adv: Tensor, mask: Tensor | None = None, clip: float = 0.2, beta: float = 0.01,
               c_h: float = 0.001, denom=None) -> tuple[Tensor, dict]:
    """The terms of Eq. 12 that concern the policy: L_policy + beta KL - c_h H -> (loss, info). All
    tensors have one shape, (M,) or (B, T). logp_ref may be None if beta is 0; the KL is then not
    measured, and 0 in `info`."""
    if beta and logp_ref is None:
        raise ValueError("the KL term (beta > 0) needs logp_ref")
    check_shapes(logp, entropy, logp_ref, mask)
    denom = denominator(denom, mask, logp)
    loss_policy, info = policy_loss(logp, logp_old, adv, mask, clip=clip, denom=denom)
    token_kl = torch.zeros_like(logp) if logp_ref is None else (
        k3(masked(mask, logp), masked(mask, logp_ref)))
    kl = token_kl.sum() / denom
    h = masked(mask, entropy).sum() / denom
    loss = loss_policy + beta * kl - c_h * h
    parts = {"loss_policy": loss_policy, "kl": kl, "entropy": h,
             "kl_max": safe_max(token_kl)}  # heavy-tailed, so the mean hides a lot
    return loss, info | {k: x.detach() for k, x in parts.items()}


def sapo_loss(logp: Tensor, entropy: Tensor, p_v: Tensor, p_q: Tensor, *, logp_old: Tensor,
              logp_ref: Tensor | None, adv: Tensor, p_v_old: Tensor, p_q_old: Tensor, y_v: Tensor,
              y_q: Tensor, mask: Tensor | None = None, valid: Tensor | None = None,
              clip: float = 0.2, clip_v: float = 0.2, clip_q: float = 0.2, c_v: float = 0.5,
              c_q: float = 0.25, beta: float = 0.01, c_h: float = 0.001, denom_tokens=None,
              denom_turns=None) -> tuple[Tensor, dict]:
    """Eq. 12 -> (loss, info).

    Per token, (M,) or (B, T): log-probs and entropy of the current policy, log-probs of the
    behaviour policy (logp_old) and of the reference (None if beta is 0), advantages, and a mask.
    Per turn, (N,): current and old readouts, targets / R_max, and which turns are not padding.
    denom_tokens and denom_turns: `denom` of the policy's and of the values' losses, the numbers of
    tokens and of turns in the whole mini-batch (default: those of what is given here)."""
    loss, info = actor_loss(logp, entropy, logp_old=logp_old, logp_ref=logp_ref, adv=adv, mask=mask,
                            clip=clip, beta=beta, c_h=c_h, denom=denom_tokens)
    loss_v, info_v = value_loss(p_v, p_v_old, y_v, clip=clip_v, valid=valid, denom=denom_turns)
    loss_q, info_q = value_loss(p_q, p_q_old, y_q, clip=clip_q, valid=valid, denom=denom_turns)
    loss = loss + c_v * loss_v + c_q * loss_q  # Eq. 12  # SAPO: one loss, one model
    info |= {f"v_{k}": x for k, x in info_v.items()} | {f"q_{k}": x for k, x in info_q.items()}
    parts = {"loss": loss, "loss_v": loss_v, "loss_q": loss_q}
    return loss, info | {k: x.detach() for k, x in parts.items()}


def explained_variance(value: Tensor, target: Tensor) -> float:
    """1 - Var(target - value) / Var(target). A perfect value has 1, a constant has
    0; if the target is constant, it is 0."""
    check_shapes(value, target)
    variance = target.var(correction=0)
    # rounding may give a constant target a small variance
    if not variance > 0 or target.max() == target.min():
        return 0.0
    return (1 - (target - value).var(correction=0) / variance).item()


def main():
    """Works through one trajectory: four turns of three tokens, gamma = lambda = 0.95."""
    actions = ["go to fridge 1", "open fridge 1", "(no action tags)", "take apple 1 from fridge 1"]
    reward, done = torch.tensor([0.0, 0, 0, 10]), torch.tensor([0.0, 0, 0, 1])
    v, q, r_max = torch.tensor([2.0, 3, 5, 4]), torch.tensor([2.5, 4, 1, 8]), 10.0
    adv, y_v, y_q = turn_targets(torch.zeros(4), torch.arange(4), reward, done, v, q,
                                 gamma=0.95, lam=0.95)
    adv_hat = normalize_advantages(adv, invalid=torch.tensor([0, 0, 1, 0]), c_inv=0.1)
    print("A task solved in four turns. The third response has no action tags, so it is invalid.\n")
    print(f"{'turn  action':34}{'r':>6}{'V':>6}{'Q':>6}       A      y_V      y_Q      A^\n"
          f"{'':52}   Eq. 5    Eq. 6    Eq. 6   Eq. 7")
    for t, action in enumerate(actions):
        print(f"{t + 1:>4}  {action:28}{reward[t]:6.1f}{v[t]:6.1f}{q[t]:6.1f}"
              f"{adv[t]:8.3f}{y_v[t]:9.3f}{y_q[t]:9.3f}{adv_hat[t]:8.3f}")
    old = torch.full((12,), -1.0)
    for ratio in (1.0, 1.3):
        logp = (old + math.log(ratio)).requires_grad_()
        loss, info = sapo_loss(logp, torch.ones(12), v / r_max, q / r_max, logp_old=old,
                               logp_ref=None, adv=adv_hat.repeat_interleave(3), beta=0.0,
                               p_v_old=v / r_max, p_q_old=q / r_max, y_v=y_v / r_max,
                               y_q=y_q / r_max)
        loss.backward()
        print(f"\nIf every token is {ratio} times as likely as before (clip: 0.8 to 1.2):\n   ",
              ", ".join(f"{k} {info[k]:.4f}" for k in ("loss", "loss_policy", "loss_v", "loss_q")))
        print("    gradient of a token of each turn:", *(f"{g:+.3f}" for g in logp.grad[::3]))


if __name__ == "__main__":
    main()
