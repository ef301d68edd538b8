"""SAPO (Single-Rollout Autoregressive Policy Optimization): the algorithm, as pure functions.

A language model plays a task over turns t = 1, 2, ... One causal forward over [context, response]
gives the policy, the state value V (read just before the response) and the action value Q (read
just after it). This file is what happens next:

    turn_targets          rewards, old values -> advantages (from V alone), targets of V, Q Eq. 4-6
    normalize_advantages  one mean and one deviation over the turns of the whole batch      Eq. 7
    policy_loss           PPO's clipped surrogate, the turn's advantage on each token       Eq. 8-9
    value_loss            clipped regression of a normalised readout, per turn             Eq. 10-11
    sapo_loss             all of it in one number for one backward pass                     Eq. 12
    grpo_advantages ...   the estimators of the methods SAPO is compared with, at the end

This file needs torch alone: copy it. Equation numbers are the paper's. `# SAPO:` marks what is new:
    grep -n "# SAPO:" sapo.py model.py rollout.py train.py

Shapes: N turns, M response tokens, B sequences, T tokens. p is a readout in [-1, 1]; V = R_max p.
A loss is a sum divided by `denom`, the tokens or turns of the whole mini-batch, so that losses of
micro-batches and ranks add up (sum gradients, do not average), and so does `info`, except *_max.
    python sapo.py       works one small trajectory by hand
"""
import math

import torch
import torch.distributed as dist


@torch.no_grad()  # targets come from the frozen rollout policy: no gradient may reach them
def turn_targets(traj, turn, reward, done, v_old, q_old, *, gamma, lam):
    """Walks every trajectory backward (Eq. 4-6) -> adv, y_v, y_q, each (N,), in units of return.

    All arguments are (N,): trajectory id, turn index, reward, whether the episode ended after the
    turn (by the environment or at the horizon: both are terminal), V_old and Q_old in units of
    return. Turns may come in any order, or twice. The turn after a trajectory's last has value 0.
    Raises ValueError where shapes differ or a trajectory lacks a turn in its middle."""
    if any(x.dim() != 1 or len(x) != len(traj) for x in (traj, turn, reward, done, v_old, q_old)):
        raise ValueError("turn_targets: all six tensors must be 1-D and of one length")
    v_old, turn = v_old.to(torch.promote_types(v_old.dtype, torch.float32)), turn.long()
    if len(traj) == 0:
        return v_old.clone(), v_old.clone(), v_old.clone()

    ids, row = traj.long().unique(return_inverse=True)  # turns belong together by their ids
    first = torch.full_like(ids, turn.max()).scatter_reduce(0, row, turn, "amin")
    last = torch.full_like(ids, turn.min()).scatter_reduce(0, row, turn, "amax")
    col, longest = turn - first[row], int((last - first).max()) + 1

    def table(x):  # (N,) -> (trajectories, longest + 1): the last column is the 0 after the end
        grid = v_old.new_zeros(len(ids), longest + 1)
        grid[row, col] = x.to(v_old.dtype)
        return grid

    gaps = table(torch.ones_like(reward)).sum(1) < last - first + 1
    if gaps.any():
        raise ValueError("turn_targets: turns are missing in the middle of trajectories "
                         f"{ids[gaps].tolist()[:8]}")
    r, d, v, q = table(reward), table(done), table(v_old), table(q_old)
    adv = torch.zeros_like(v)
    for t in reversed(range(longest)):
        delta = r[:, t] + gamma * (1 - d[:, t]) * v[:, t + 1] - v[:, t]  # Eq. 4
        adv[:, t] = delta + gamma * lam * (1 - d[:, t]) * adv[:, t + 1]  # Eq. 5  # SAPO: over turns
    y_v = v + adv  # Eq. 6: the lambda-return
    y_q = r.clone()
    y_q[:, :-1] += gamma * (1 - d[:, :-1]) * q[:, 1:]  # Eq. 6  # SAPO: on-policy SARSA target for Q
    return adv[row, col], y_v[row, col], y_q[row, col]


def discounted_returns(traj, turn, reward, *, gamma):
    """The discounted reward from each turn to its trajectory's end, (N,): GAE without values."""
    zeros = torch.zeros_like(reward)
    return turn_targets(traj, turn, reward, zeros, zeros, zeros, gamma=gamma, lam=1.0)[0]


def episode_returns(traj, reward):
    """The whole reward of the trajectory each turn belongs to, (N,) -> (N,)."""
    ids, row = traj.unique(return_inverse=True)
    return reward.new_zeros(len(ids)).index_add_(0, row, reward)[row]


@torch.no_grad()
def normalize_advantages(adv, *, invalid=None, c_inv=0.0, valid=None, eps=1e-8, group=None):
    """Eq. 7, (N,) -> (N,): (adv - mean) / (std + eps), with the population's std; never NaN.

    invalid (N,)  turns whose response breaks the format; they are charged c_inv, in units of return
    valid (N,)    turns that count, as padding does not (None: all); the others get 0
    group         the torch.distributed group of ranks with one mean and std (None: this rank)"""
    check_shapes(adv, invalid, valid)
    counts = torch.ones_like(adv, dtype=torch.float64) if valid is None else valid.double()
    charged = adv.double() if invalid is None else adv.double() - c_inv * invalid.double()
    charged = torch.where(counts > 0, charged, 0.0)

    def total(x):
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    count, mean = total(torch.stack([counts.sum(), (counts * charged).sum()])).unbind()
    mean = mean / count.clamp(min=1)  # in a pass of its own: no cancellation in the variance
    variance = total((counts * (charged - mean) ** 2).sum()) / count.clamp(min=1)
    normalized = (charged - mean) / (variance.sqrt() + eps)  # Eq. 7
    return torch.where(counts > 0, normalized, 0.0).to(adv.dtype)


# ----------------------------------------------------------------------------------- the losses


def within(mask, x):
    """x where the mask is set and 0 elsewhere; x itself without a mask."""
    return x if mask is None else torch.where(mask.bool(), x, 0.0)


def check_shapes(*tensors):
    """ValueError where shapes differ: broadcast, they would give a wrong number without a word."""
    shapes = [tuple(x.shape) for x in tensors if x is not None]
    if len({*shapes}) > 1:
        raise ValueError(f"tensors must have one shape; these have {shapes}")


def denominator(denom, mask, *tensors):
    """What a loss divides its sum by: `denom`, else how many entries there are, at least 1."""
    check_shapes(*tensors, mask)
    if denom is not None:
        return denom
    return max(1, tensors[0].numel()) if mask is None else mask.bool().sum().clamp(min=1)


def largest(x):
    """The largest of numbers >= 0; 0 where there are none."""
    return x.detach().amax() if x.numel() else x.new_zeros(())


def policy_loss(logp, logp_old, adv, mask=None, *, clip, denom=None):
    """Eq. 8-9 -> (loss, info: ratio_max, clip_fraction).

    Four tensors of one shape, (M,) or (B, T): log-probs of the taken tokens now and at the
    rollout, the turn's advantage on each of its tokens, 1 on response tokens (None: all are)."""
    denom = denominator(denom, mask, logp, logp_old, adv)
    ratio = within(mask, logp - logp_old).exp()  # Eq. 8; padding may hold anything: masked first
    adv = within(mask, adv)
    free, clipped = ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv
    loss = -torch.minimum(free, clipped).sum() / denom  # Eq. 9
    info = {"ratio_max": largest(within(mask, ratio)),
            "clip_fraction": (clipped < free).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def value_loss(p, p_old, y, *, clip, valid=None, denom=None):
    """Eq. 10-11, for V and for Q -> (loss, info: clip_fraction, saturated).

    p, p_old (N,) are readouts now and at the rollout, y (N,) the target over R_max. The mean is
    over turns, not tokens. `saturated`: the share of readouts at +-1, where Eq. 1 is flat."""
    denom = denominator(denom, valid, p, p_old, y)
    p, p_old, y = (within(valid, x) for x in (p, p_old, y))
    p_clip = p_old + (p - p_old).clamp(-clip, clip)  # Eq. 10
    free, clipped = (p - y) ** 2, (p_clip - y) ** 2
    loss = 0.5 * torch.maximum(free, clipped).sum() / denom  # Eq. 11
    beyond = (clipped > free) & ((p - p_old).abs() > clip)
    info = {"clip_fraction": beyond.sum() / denom, "saturated": (p.abs() >= 1).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def k3(logp, logp_ref):
    """An estimate >= 0 of the KL to the reference, per token: r - 1 - log r, r = pi_ref / pi."""
    log_r = logp_ref - logp
    return log_r.expm1() - log_r  # expm1, because exp(x) - 1 near 0 is rounding of either sign


def kl_loss(logp, logp_ref, mask=None, *, denom=None):
    """Mean over tokens, (M,) or (B, T), of the k3 estimator of the KL to the reference, >= 0."""
    denom = denominator(denom, mask, logp, logp_ref)
    return k3(within(mask, logp), within(mask, logp_ref)).sum() / denom


def actor_loss(logp, entropy, *, logp_old, logp_ref, adv, mask=None, clip=0.2, beta=0.01,
               c_h=0.001, tokens=None):
    """The policy's own part of Eq. 12 -> (loss, info); the baselines minimise this alone. All
    tensors have one shape, (M,) or (B, T); logp_ref may be None where beta is 0."""
    if beta and logp_ref is None:
        raise ValueError("the KL term (beta > 0) needs logp_ref")
    tokens = denominator(tokens, mask, logp, entropy)
    loss_policy, info = policy_loss(logp, logp_old, adv, mask, clip=clip, denom=tokens)
    logp_ref = logp.detach() if logp_ref is None else logp_ref  # the distance is then 0
    kl = kl_loss(logp, logp_ref, mask, denom=tokens)
    h = within(mask, entropy).sum() / tokens
    loss = loss_policy + beta * kl - c_h * h
    token_kl = k3(within(mask, logp.detach()), within(mask, logp_ref))
    parts = {"loss": loss, "loss_policy": loss_policy, "kl": kl, "entropy": h,
             "kl_max": largest(token_kl)}  # heavy-tailed: the mean alone can look harmless
    return loss, info | {k: x.detach() for k, x in parts.items()}


def sapo_loss(logp, entropy, p_v, p_q, *, logp_old, logp_ref, adv, p_v_old, p_q_old, y_v, y_q,
              mask=None, valid=None, clip=0.2, clip_v=0.2, clip_q=0.2, c_v=0.5, c_q=0.25, beta=0.01,
              c_h=0.001, tokens=None, turns=None):
    """Eq. 12 -> (loss, info).

    On tokens, (M,) or (B, T): logp and entropy of the current model, logp_old of the policy that
    played, logp_ref of the reference (None where beta is 0), adv and mask. On turns, (N,): readouts
    p_v, p_q now and p_v_old, p_q_old then, targets y_v, y_q over R_max, and which are `valid`.
    `tokens` and `turns` are the mini-batch's denominators; default: what is here."""
    loss, info = actor_loss(logp, entropy, logp_old=logp_old, logp_ref=logp_ref, adv=adv, mask=mask,
                            clip=clip, beta=beta, c_h=c_h, tokens=tokens)
    loss_v, info_v = value_loss(p_v, p_v_old, y_v, clip=clip_v, valid=valid, denom=turns)
    loss_q, info_q = value_loss(p_q, p_q_old, y_q, clip=clip_q, valid=valid, denom=turns)
    loss = loss + c_v * loss_v + c_q * loss_q  # Eq. 12  # SAPO: one loss, one model
    info |= {f"v_{k}": x for k, x in info_v.items()} | {f"q_{k}": x for k, x in info_q.items()}
    parts = {"loss": loss, "loss_v": loss_v, "loss_q": loss_q}
    return loss, info | {k: x.detach() for k, x in parts.items()}


def explained_variance(value, target):
    """1 - Var(target - value) / Var(target): 1 is right up to a constant, 0 tells nothing."""
    spread = target.var(correction=0)
    return (1 - (target - value).var(correction=0) / spread).item() if spread > 0 else 0.0


# -------------------------------------------------------------------------------- the baselines
# The other methods' estimators, (N,) over turns in any order. Scores and rewards must be floats.


def per_trajectory(traj, group, score):
    """(N,) over turns -> score and group of each trajectory, and (N,) each turn's trajectory."""
    ids, row = traj.unique(return_inverse=True)
    group_of = torch.zeros_like(ids).scatter_(0, row, group.unique(return_inverse=True)[1])
    score_of = torch.zeros(len(ids), dtype=torch.float64, device=score.device)
    return score_of.scatter_(0, row, score.double()), group_of, row


def group_mean(x, group):
    """(K,) numbers and their groups' indices -> the mean and the size of each one's group, (K,)."""
    size = torch.zeros_like(x).scatter_add_(0, group, torch.ones_like(x))
    total = torch.zeros_like(x).scatter_add_(0, group, x)
    return (total / size.clamp(min=1))[group], size[group]


def standardized(x, group, std, eps):
    """x minus its group's mean, over the group's unbiased deviation where `std` is set. In a group
    of one, or of equal numbers, it is 0 up to rounding."""
    mean, size = group_mean(x, group)
    off = x - mean
    variance = group_mean(off ** 2, group)[0] * size / (size - 1).clamp(min=1)
    return off / (variance.sqrt() + eps) if std else off


@torch.no_grad()
def grpo_advantages(traj, group, score, *, std=True, eps=1e-6):
    """GRPO (arXiv 2402.03300, Section 4.1.2): (score - mean) / (std + eps) over the trajectories of
    a task. traj, group and score (N,) are every turn's trajectory, its task and its return -> (N,),
    one number for all turns of a trajectory. Every trajectory counts once, however long it is."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    return standardized(score_of, group_of, std, eps)[row].to(score.dtype)


@torch.no_grad()
def rloo_advantages(traj, group, score):
    """RLOO (arXiv 2402.14740, Eq. 8), (N,) -> (N,): the score minus the mean of the task's other
    trajectories, which is n / (n - 1) (score - mean)."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    mean, size = group_mean(score_of, group_of)
    return ((score_of - mean) * size / (size - 1).clamp(min=1))[row].to(score.dtype)


@torch.no_grad()
def gigpo_advantages(traj, turn, group, state, reward, *, gamma=0.95, weight=1.0, std=True,
                     eps=1e-6):
    """GiGPO (arXiv 2505.10978), (N,) -> (N,): GRPO's advantage of the episode plus `weight` times
    that of the step, among all turns of a task at which the agent saw the same. `state` (N,)
    numbers the observations. A step's return is the discounted reward from it to the end. Without
    `std` neither part is divided by a deviation. A state seen once adds 0."""
    score = episode_returns(traj, reward.double())
    anchor = torch.stack([group, state]).unique(dim=1, return_inverse=True)[1]
    step = discounted_returns(traj, turn, reward.double(), gamma=gamma)
    step = standardized(step, anchor, std, eps)
    return (grpo_advantages(traj, group, score, std=std, eps=eps) + weight * step).to(reward.dtype)


@torch.no_grad()
def empg_advantages(adv, traj, turn, entropy, *, k=1.0, k_f=1.0, zeta=0.1):
    """EMPG (arXiv 2509.09265, Eq. 7-12), (N,) -> (N,), on top of another method's `adv`: confident
    steps count more, and a step is paid for leading to a confident one.

    entropy (N,) is the mean over a turn's tokens, scaled here to H in [0, 1] over the batch. With
    x = adv exp(-k H) / mean(exp(-k H)) + zeta exp(-k_f H'), where H' is the next turn's (none: 0),
    the result is x - mean(x)."""
    if not len(adv):
        return adv.clone()
    h = entropy.double()
    h = (h - h.min()) / (h.max() - h.min() + 1e-8)
    gain, clarity = (-k * h).exp(), (-k_f * h).exp()
    order = (traj.unique(return_inverse=True)[1] * (turn.max() + 1) + turn).argsort()
    follows = traj[order[1:]] == traj[order[:-1]]
    bonus = torch.zeros_like(clarity)
    bonus[order[:-1]] = torch.where(follows, clarity[order[1:]], 0.0)
    out = adv.double() * gain / (gain.mean() + 1e-8) + zeta * bonus
    return (out - out.mean()).to(adv.dtype)


@torch.no_grad()
def token_gae(value, mask, score, *, gamma=1.0, lam=1.0):
    """PPO as verl-agent has it: GAE over the tokens of one response alone. value, mask (B, T) are V
    before each token and 1 on tokens of the response, which need not be adjacent; score (B,) is the
    episode's return, paid at the last. -> (adv, target), each (B, T), 0 off the mask."""
    mask, adv = mask.bool(), torch.zeros_like(value)
    after, carry, pay = torch.zeros_like(score), torch.zeros_like(score), score
    for t in reversed(range(value.shape[1])):
        on = mask[:, t]
        delta = pay + gamma * after - value[:, t]
        carry = torch.where(on, delta + gamma * lam * carry, carry)
        adv[:, t] = torch.where(on, carry, 0.0)
        after, pay = torch.where(on, value[:, t], after), torch.where(on, 0.0, pay)
    return adv, torch.where(mask, value + adv, 0.0)


def main():
    """Works one small trajectory: four turns of three tokens, gamma = lambda = 0.95."""
    actions = ["go to fridge 1", "open fridge 1", "eat the fridge", "take apple 1 from fridge 1"]
    reward, done = torch.tensor([0.0, 0, 0, 10]), torch.tensor([0.0, 0, 0, 1])
    v, q, r_max = torch.tensor([2.0, 3, 5, 4]), torch.tensor([2.5, 4, 1, 8]), 10.0
    adv, y_v, y_q = turn_targets(torch.zeros(4), torch.arange(4), reward, done, v, q,
                                 gamma=0.95, lam=0.95)
    adv_hat = normalize_advantages(adv, invalid=torch.tensor([0, 0, 1, 0]), c_inv=0.1)
    print("A task solved in four turns. The third answer breaks the format.\n")
    print(f"{'turn  action':34}{'r':>6}{'V':>6}{'Q':>6}   A (5)  y_V (6)  y_Q (6)  A^ (7)")
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
        print(f"\nEvery token {ratio} times as likely as at the rollout; the clip is at 1.2:\n   ",
              ", ".join(f"{k} {info[k]:.4f}" for k in ("loss", "loss_policy", "loss_v", "loss_q")))
        print("    gradient on a token of each turn:", *(f"{g:+.3f}" for g in logp.grad[::3]))


if __name__ == "__main__":
    main()
