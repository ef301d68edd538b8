"""SAPO (Single-Rollout Autoregressive Policy Optimization): the algorithm, as pure functions of tensors.

A language model plays a task over turns t = 1, 2, ... One causal forward over [context, response] gives the policy, the
state value V (read just before the response) and the action value Q (read just after it). This file is what happens next:

    turn_targets          rewards and old values -> GAE advantage, target of V, target of Q        Eq. 4-6
    normalize_advantages  one mean and one std over the turns of the whole batch                   Eq. 7
    policy_loss           PPO's clipped surrogate per token, the turn's advantage on each          Eq. 8-9
    value_loss            clipped regression of a normalised readout, per turn                     Eq. 10-11
    sapo_loss             all of it in one number for one backward pass                            Eq. 12
    grpo_advantages ...   the estimators of the methods SAPO is compared with, at the end

Equations are numbered as LaTeX numbers them in the paper. `# SAPO:` marks what the paper adds to PPO.
    grep -n "# SAPO:" sapo.py model.py rollout.py train.py       shows the whole contribution

Shapes: N turns, B sequences, T tokens. p is a readout in [-1, 1]; V = R_max p (Eq. 2). Every loss is a sum over a
`denom` the caller may pass: with the global count of tokens or turns there, micro-batches and ranks add up exactly.
An `info` holds numbers that add up the same way, except `*_max`, which are maxima.

Departures from the paper: none here. Copy this file into any project: it needs torch alone.
    python sapo.py       works one small trajectory by hand
"""
import math

import torch
import torch.distributed as dist


@torch.no_grad()  # targets come from the frozen rollout policy: no gradient may reach them
def turn_targets(traj, turn, reward, done, v_old, q_old, *, gamma, lam):
    """Walks every trajectory backward (Eq. 4-6): -> (adv, y_v, y_q), each (N,) in the order given, in units of return.

    All arguments are (N,): trajectory id, turn index, reward, whether the episode ended after the turn (by the
    environment or at the horizon: both are terminal), V_old and Q_old in units of return. Any order; a (traj, turn)
    that occurs twice gets the same targets twice and changes nobody else's. The turn after a trajectory's last known
    one has value 0. Raises ValueError where shapes differ or a trajectory lacks a turn in its middle.
    """
    if any(x.dim() != 1 or len(x) != len(traj) for x in (traj, turn, reward, done, v_old, q_old)):
        raise ValueError("turn_targets: all six tensors must be 1-D and of one length, one entry per turn")
    if len(traj) == 0:
        return v_old.clone(), v_old.clone(), q_old.clone()

    traj, turn, v_old = traj.long(), turn.long(), v_old.to(torch.promote_types(v_old.dtype, torch.float32))
    ids, row = traj.unique(return_inverse=True)  # (M,), (N,): identifiers, not positions, tie turns together
    first = torch.full_like(ids, turn.max()).scatter_reduce(0, row, turn, "amin")
    last = torch.full_like(ids, turn.min()).scatter_reduce(0, row, turn, "amax")
    col, length = turn - first[row], last - first + 1

    def table(x):  # (N,) -> (M, longest + 1); the extra column is the 0 after the last turn
        grid = v_old.new_zeros(len(ids), int(length.max()) + 1)
        grid[row, col] = x.to(v_old.dtype)
        return grid

    torn = table(torch.ones_like(reward)).sum(1) < length
    if torn.any():
        raise ValueError(f"turn_targets: turns are missing in the middle of trajectories {ids[torn].tolist()[:8]}")
    r, d, v, q = table(reward), table(done), table(v_old), table(q_old)
    adv = torch.zeros_like(v)
    for t in reversed(range(v.shape[1] - 1)):
        delta = r[:, t] + gamma * (1 - d[:, t]) * v[:, t + 1] - v[:, t]  # Eq. 4
        adv[:, t] = delta + gamma * lam * (1 - d[:, t]) * adv[:, t + 1]  # Eq. 5  # SAPO: GAE over turns, not tokens
    y_v = v + adv  # Eq. 6: the lambda-return
    y_q = r.clone()
    y_q[:, :-1] += gamma * (1 - d[:, :-1]) * q[:, 1:]  # Eq. 6  # SAPO: on-policy SARSA target for Q
    return adv[row, col], y_v[row, col], y_q[row, col]


def discounted_returns(traj, turn, reward, *, gamma):
    """The discounted reward from each turn to the end of its trajectory: what GAE comes to without values. (N,) -> (N,)."""
    none = torch.zeros_like(reward)
    return turn_targets(traj, turn, reward, none, none, none, gamma=gamma, lam=1.0)[0]


def episode_returns(traj, reward):
    """The whole reward of the trajectory each turn belongs to. (N,) -> (N,)."""
    ids, row = traj.unique(return_inverse=True)
    return reward.new_zeros(len(ids)).index_add_(0, row, reward)[row]


@torch.no_grad()
def normalize_advantages(adv, *, invalid=None, c_inv=0.0, valid=None, eps=1e-8, group=None):
    """Eq. 7: (N,) -> (N,). Mean and population std over valid turns, over all ranks of `group` (a torch.distributed
    process group; None: this process alone). `invalid` marks turns whose action could not be parsed: they are charged
    c_inv first. `valid` says which turns count, or how much each counts in mean and std; the others get 0. One turn, or
    equal ones, give 0 up to rounding, never NaN."""
    times = torch.ones_like(adv, dtype=torch.float64) if valid is None else valid.double()
    charged = adv.double() if invalid is None else adv.double() - c_inv * invalid.double()
    charged = torch.where(times > 0, charged, 0.0)

    def total(x):
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    count, mean = total(torch.stack([times.sum(), (times * charged).sum()])).unbind()
    count = count.clamp(min=1)
    mean = mean / count
    std = (total((times * (charged - mean) ** 2).sum()) / count).sqrt()  # two passes: no cancellation
    return torch.where(times > 0, (charged - mean) / (std + eps), 0.0).to(adv.dtype)  # Eq. 7


def policy_loss(logp, logp_old, adv, mask, *, clip, denom=None):
    """Eq. 8-9. logp, logp_old, adv and mask are (B, T): log-probs of the taken tokens now and at rollout, the turn's
    advantage on each of its tokens, 1 on response tokens. -> (loss, info: ratio_max, clip_fraction)."""
    mask = mask.bool()
    denom = mask.sum().clamp(min=1) if denom is None else denom
    ratio = torch.where(mask, logp - logp_old, 0.0).exp()  # Eq. 8; masked before exp: padding may hold anything
    adv = torch.where(mask, adv, 0.0)
    free, held = ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv
    loss = -torch.minimum(free, held).sum() / denom  # Eq. 9
    info = {"ratio_max": largest(torch.where(mask, ratio, 0.0)), "clip_fraction": (held < free).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def largest(x):  # of numbers >= 0; of none of them 0
    return x.amax() if x.numel() else x.new_zeros(())


def value_loss(p, p_old, y, *, clip, valid=None, denom=None):
    """Eq. 10-11, for V and for Q. p, p_old (N,) are readouts now and at rollout, y (N,) the target divided by R_max.
    A mean over turns, not tokens. -> (loss, info: clip_fraction, saturated = readouts at +-1, where Eq. 1 is flat)."""
    valid = torch.ones_like(p, dtype=torch.bool) if valid is None else valid.bool()
    denom = valid.sum().clamp(min=1) if denom is None else denom
    p, p_old, y = (torch.where(valid, x, 0.0) for x in (p, p_old, y))
    p_clip = p_old + (p - p_old).clamp(-clip, clip)  # Eq. 10
    free, held = (p - y) ** 2, (p_clip - y) ** 2
    loss = 0.5 * torch.maximum(free, held).sum() / denom  # Eq. 11
    info = {"clip_fraction": ((held > free) & ((p - p_old).abs() > clip)).sum() / denom, "saturated": (p.abs() >= 1).sum() / denom}
    return loss, {k: x.detach() for k, x in info.items()}


def k3(logp, logp_ref, mask):
    """Per token, an estimate of the KL to the reference: r - 1 - log r with r = pi_ref / pi. (B, T) each; >= 0, 0 off the mask."""
    log_r = torch.where(mask.bool(), logp_ref - logp, 0.0)
    return log_r.expm1() - log_r  # expm1: near 0, exp(x) - 1 would be rounding, of either sign


def kl_loss(logp, logp_ref, mask, *, denom=None):
    """Mean over tokens of the k3 estimator of the KL to the reference policy. (B, T) each -> a scalar >= 0."""
    denom = mask.bool().sum().clamp(min=1) if denom is None else denom
    return k3(logp, logp_ref, mask).sum() / denom


def sapo_loss(logp, entropy, p_v, p_q, *, logp_old, logp_ref, adv, mask, p_v_old, p_q_old, y_v, y_q, valid=None,
              clip=0.2, clip_v=0.2, clip_q=0.2, c_v=0.5, c_q=0.25, beta=0.01, c_h=0.001, tokens=None, turns=None):
    """Eq. 12. -> (loss, info).

    From the current model: logp, entropy (B, T) and readouts p_v, p_q (N,). From the rollout: logp_old, logp_ref (or
    None where beta is 0), adv and mask (B, T); p_v_old, p_q_old and targets over R_max y_v, y_q (N,). `tokens` and
    `turns` are the denominators of the whole mini-batch; default: what is here."""
    if beta and logp_ref is None:
        raise ValueError("sapo_loss: the KL term (beta > 0) needs logp_ref")
    mask = mask.bool()
    tokens = mask.sum().clamp(min=1) if tokens is None else tokens
    loss_policy, info = policy_loss(logp, logp_old, adv, mask, clip=clip, denom=tokens)
    loss_v, info_v = value_loss(p_v, p_v_old, y_v, clip=clip_v, valid=valid, denom=turns)
    loss_q, info_q = value_loss(p_q, p_q_old, y_q, clip=clip_q, valid=valid, denom=turns)
    logp_ref = logp.detach() if logp_ref is None else logp_ref  # no reference: no distance
    kl = kl_loss(logp, logp_ref, mask, denom=tokens)
    h = torch.where(mask, entropy, 0.0).sum() / tokens
    loss = loss_policy + c_v * loss_v + c_q * loss_q + beta * kl - c_h * h  # Eq. 12  # SAPO: one loss, one model
    parts = {"loss": loss, "loss_policy": loss_policy, "loss_v": loss_v, "loss_q": loss_q, "kl": kl, "entropy": h}
    info |= {"v_" + k: x for k, x in info_v.items()} | {"q_" + k: x for k, x in info_q.items()}
    parts["kl_max"] = largest(k3(logp.detach(), logp_ref, mask))  # heavy-tailed: the mean alone can look harmless
    return loss, info | {k: x.detach() for k, x in parts.items()}


def explained_variance(value, target):
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 a constant one. NaN-free: 0 where targets agree."""
    spread = target.var(correction=0)
    return (1 - (target - value).var(correction=0) / spread).item() if spread > 0 else 0.0


# ------------------------------------------------------------------------------------------------------ the baselines
# What SAPO is compared with. As above, (N,) tensors over turns in any order, and nothing in them belongs to SAPO.

GROUPED = ("grpo", "rloo", "gigpo", "empg")  # what compares trajectories of the same task


def per_trajectory(traj, group, score):
    """(N,) over turns -> (M,) over trajectories: the score and the group's index of each, and the row (N,) of every turn's trajectory."""
    ids, row = traj.unique(return_inverse=True)
    group_of = torch.zeros_like(ids).scatter_(0, row, group.unique(return_inverse=True)[1])
    score_of = torch.zeros(len(ids), dtype=torch.float64, device=score.device).scatter_(0, row, score.double())
    return score_of, group_of, row


def group_mean(x, group):
    """(M,) and the groups' numbers below M -> of every entry's group the mean and the size, (M,) each."""
    size = torch.zeros_like(x).scatter_add_(0, group, torch.ones_like(x))
    return (torch.zeros_like(x).scatter_add_(0, group, x) / size.clamp(min=1))[group], size[group]


def standardized(x, group, std, eps):
    """x minus its group's mean, over the group's unbiased std where `std`. In a group of one, or of equals, 0 up to rounding."""
    mean, size = group_mean(x, group)
    off = x - mean
    return off / ((group_mean(off ** 2, group)[0] * size / (size - 1).clamp(min=1)).sqrt() + eps) if std else off


@torch.no_grad()
def grpo_advantages(traj, group, score, *, std=True, eps=1e-6):
    """GRPO (arXiv 2402.03300, Eq. of 4.1.2, outcome supervision): (score - mean) / (std + eps) over the trajectories of a task.

    traj, group, score (N,): of every turn the trajectory's id, its task's and its return. -> (N,), one number for all of a trajectory's turns.
    Every trajectory counts once, however many turns it has. A group of one, or of equal returns, gets 0."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    return standardized(score_of, group_of, std, eps)[row].to(score.dtype)


@torch.no_grad()
def rloo_advantages(traj, group, score):
    """RLOO (arXiv 2402.14740, Eq. 8): the score minus the mean of the task's other trajectories, which is n / (n - 1) (score - mean). (N,) -> (N,)."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    _, size = group_mean(score_of, group_of)
    return (standardized(score_of, group_of, False, 0.0) * size / (size - 1).clamp(min=1))[row].to(score.dtype)


@torch.no_grad()
def gigpo_advantages(traj, turn, group, state, reward, *, gamma=0.95, weight=1.0, std=True, eps=1e-6):
    """GiGPO (arXiv 2505.10978): GRPO's advantage of the episode plus `weight` times that of the step, among all turns of a task at which
    the agent saw the same: `state` (N,) numbers the observations. A step's return is the discounted reward from it to the end. `std` False
    divides neither by a standard deviation. A state seen once adds 0. All (N,) -> (N,)."""
    score = episode_returns(traj, reward.double())
    anchor = torch.stack([group, state]).unique(dim=1, return_inverse=True)[1]
    step = standardized(discounted_returns(traj, turn, reward.double(), gamma=gamma), anchor, std, eps)
    return (grpo_advantages(traj, group, score, std=std, eps=eps) + weight * step).to(reward.dtype)


@torch.no_grad()
def empg_advantages(adv, traj, turn, entropy, *, k=1.0, k_f=1.0, zeta=0.1):
    """EMPG (arXiv 2509.09265, Eq. 7-12) on top of another method's `adv`: sure steps count more, and a step is paid for leading to a sure one.

    entropy (N,) is the mean over a turn's tokens, scaled here to [0, 1] over the batch: H. adv exp(-k H) / mean exp(-k H), plus zeta exp(-k_f H')
    with H' of the next turn, if there is one; then minus the batch's mean. All (N,) -> (N,)."""
    if not len(adv):
        return adv.clone()
    h = entropy.double()
    h = (h - h.min()) / (h.max() - h.min() + 1e-8)
    gain, clear = (-k * h).exp(), (-k_f * h).exp()
    order = (traj.unique(return_inverse=True)[1] * (turn.max() + 1) + turn).argsort()
    bonus = torch.zeros_like(clear)
    bonus[order[:-1]] = torch.where(traj[order[1:]] == traj[order[:-1]], clear[order[1:]], 0.0)
    out = adv.double() * gain / (gain.mean() + 1e-8) + zeta * bonus
    return (out - out.mean()).to(adv.dtype)


@torch.no_grad()
def token_gae(value, mask, score, *, gamma=1.0, lam=1.0):
    """PPO as the framework does it: GAE over the tokens of one response, nothing beyond it.

    value, mask (B, T): V before each token, 1 on tokens of the response (which need not be adjacent); score (B,): the episode's return, paid at the
    last of them. -> (adv, target) (B, T), 0 off the mask."""
    mask, adv, after, carry = mask.bool(), torch.zeros_like(value), torch.zeros_like(score), torch.zeros_like(score)
    pay = score
    for t in reversed(range(value.shape[1])):
        on = mask[:, t]
        delta = pay + gamma * after - value[:, t]
        carry = torch.where(on, delta + gamma * lam * carry, carry)
        adv[:, t] = torch.where(on, carry, 0.0)
        after, pay = torch.where(on, value[:, t], after), torch.where(on, 0.0, pay)
    return adv, torch.where(mask, value + adv, 0.0)


def main():
    r_max, gamma, lam = 10.0, 0.95, 0.95
    text = ["go to fridge 1", "open fridge 1", "eat the fridge", "take apple 1 from fridge 1"]
    traj, turn = torch.zeros(4, dtype=torch.long), torch.arange(4)
    reward, done = torch.tensor([0.0, 0, 0, 10]), torch.tensor([0.0, 0, 0, 1])
    v, q = torch.tensor([2.0, 3, 5, 4]), torch.tensor([2.5, 4, 1, 8])
    adv, y_v, y_q = turn_targets(traj, turn, reward, done, v, q, gamma=gamma, lam=lam)
    adv_hat = normalize_advantages(adv, invalid=torch.tensor([0, 0, 1, 0]), c_inv=0.1)
    print(f"A task solved in four turns; gamma {gamma}, lambda {lam}, R_max {r_max:g}. The third action was no command.\n")
    print(f"{'turn  action':34}{'r':>6}{'V_old':>8}{'Q_old':>8}{'A (5)':>9}{'y_V (6)':>9}{'y_Q (6)':>9}{'A^ (7)':>9}")
    for t in range(4):
        row = "".join(f"{x[t]:9.3f}" for x in (adv, y_v, y_q, adv_hat))
        print(f"{t + 1:>4}  {text[t]:28}{reward[t]:6.1f}{v[t]:8.2f}{q[t]:8.2f}{row}")

    old = torch.full((4, 3), -1.0)  # three tokens a turn
    for title, ratio in (("Where the policy is still the old one (the A^ of a batch cancel, their gradient -A^/12 does not):", 1.0),
                         ("Had every token become 1.3 times as likely (what the clip at 1.2 holds has no gradient any more):", 1.3)):
        logp = (old + math.log(ratio)).requires_grad_()
        loss, info = sapo_loss(logp, torch.ones(4, 3), v / r_max, q / r_max, logp_old=old, logp_ref=old, adv=adv_hat[:, None].expand(4, 3),
                               mask=torch.ones(4, 3), p_v_old=v / r_max, p_q_old=q / r_max, y_v=y_v / r_max, y_q=y_q / r_max, beta=0.0)
        loss.backward()
        print(f"\n{title}\n    joint loss (12) " + ", ".join(f"{k} {info[k] + 0:.4f}" for k in ("loss", "loss_policy", "loss_v", "loss_q")))
        print("    its gradient on a token of each turn: " + " ".join(f"{g + 0:+.3f}" for g in logp.grad[:, 0]))


if __name__ == "__main__":
    main()
