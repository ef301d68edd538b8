"""Advantage estimators of the methods that SAPO is compared with, as pure functions.

    grpo_advantages     GRPO     the return, compared with the other trajectories of the task
    rloo_advantages     RLOO     likewise, without a standard deviation
    gigpo_advantages    GiGPO    GRPO's, plus a comparison of turns that show the same observation
    empg_advantages     EMPG     another method's advantages, weighted by the policy's confidence
    token_gae           PPO      GAE over the tokens of one response

It needs torch and sapo.py. Unless a function says otherwise, tensors are (N,), over turns in any
order; a group is the set of trajectories of one task. Shapes: N turns, K trajectories, B sequences,
T tokens.
"""
import torch
from torch import Tensor

from sapo import check_shapes, discounted_returns, float_dtype


def episode_returns(traj: Tensor, reward: Tensor) -> Tensor:
    """The undiscounted return of the trajectory that each turn belongs to, (N,) -> (N,)."""
    ids, row = traj.unique(return_inverse=True)
    return reward.new_zeros(len(ids)).index_add_(0, row, reward)[row]


def per_trajectory(traj, group, score):
    """Collapses (N,) over turns to one entry per trajectory -> score (K,), group (K,), and the
    trajectory's index for each turn (N,)."""
    ids, row = traj.unique(return_inverse=True)
    group_of = torch.zeros_like(ids).scatter_(0, row, group.unique(return_inverse=True)[1])
    score_of = torch.zeros(len(ids), dtype=torch.float64, device=score.device)
    return score_of.scatter_(0, row, score.double()), group_of, row


def group_mean(x, group):
    """Numbers (K,) and their group indices (K,) -> mean and size of each number's group, (K,)."""
    size = torch.zeros_like(x).scatter_add_(0, group, torch.ones_like(x))
    total = torch.zeros_like(x).scatter_add_(0, group, x)
    return (total / size.clamp(min=1))[group], size[group]


def relative_to_group(x, group, std, eps):
    """x minus its group's mean; with `std`, divided by the group's unbiased standard deviation. In
    a group of one, or of equal numbers, it is 0 up to rounding."""
    mean, size = group_mean(x, group)
    deviation = x - mean
    variance = group_mean(deviation ** 2, group)[0] * size / (size - 1).clamp(min=1)
    return deviation / (variance.sqrt() + eps) if std else deviation


@torch.no_grad()
def grpo_advantages(traj: Tensor, group: Tensor, score: Tensor, *, std: bool = True,
                    eps: float = 1e-6) -> Tensor:
    """GRPO (arXiv 2402.03300, Section 4.1.2): (score - mean) / (std + eps) over the trajectories of
    a task. traj, group and score (N,): each turn's trajectory, and that trajectory's task and
    return -> (N,), equal for all turns of a trajectory. Every trajectory counts once, whatever its
    length."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    return relative_to_group(score_of, group_of, std, eps)[row].to(float_dtype(score))


@torch.no_grad()
def rloo_advantages(traj: Tensor, group: Tensor, score: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740, Eq. 8), (N,) -> (N,): the score minus the mean of the task's other
    trajectories, which is n / (n - 1) (score - mean), with the mean of all n."""
    score_of, group_of, row = per_trajectory(traj, group, score)
    mean, size = group_mean(score_of, group_of)
    return ((score_of - mean) * size / (size - 1).clamp(min=1))[row].to(float_dtype(score))


@torch.no_grad()
def gigpo_advantages(traj: Tensor, turn: Tensor, group: Tensor, state: Tensor, reward: Tensor, *,
                     gamma: float = 0.95, weight: float = 1.0, std: bool = True,
                     eps: float = 1e-6) -> Tensor:
    """GiGPO (arXiv 2505.10978), (N,) -> (N,): GRPO's advantage of the episode plus `weight` times
    an advantage of the step: its discounted return compared with those of all turns of the task
    that have the same observation. state (N,): an index for each distinct observation; one that
    occurs once adds 0. Without `std`, neither part is divided by a standard deviation."""
    score = episode_returns(traj, reward.double())
    anchor = torch.stack([group, state]).unique(dim=1, return_inverse=True)[1]
    step = discounted_returns(traj, turn, reward.double(), gamma=gamma)
    step = relative_to_group(step, anchor, std, eps)
    adv = grpo_advantages(traj, group, score, std=std, eps=eps) + weight * step
    return adv.to(float_dtype(reward))


@torch.no_grad()
def empg_advantages(adv: Tensor, traj: Tensor, turn: Tensor, entropy: Tensor, *, k: float = 1.0,
                    k_f: float = 1.0, zeta: float = 0.1) -> Tensor:
    """EMPG (arXiv 2509.09265, Eq. 7-12), (N,) -> (N,): modifies another method's `adv`, such that
    confident turns count more, and a turn gets a bonus if the next one is confident.

    entropy (N,) is the mean over a turn's tokens, rescaled here to H in [0, 1] over the batch. With
    x = adv exp(-k H) / mean(exp(-k H)) + zeta exp(-k_f H'), where H' is the next turn's H and the
    last turn has no bonus, the result is x - mean(x)."""
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
def token_gae(value: Tensor, mask: Tensor, score: Tensor, *, gamma: float = 1.0,
              lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """PPO as in verl-agent: GAE over the tokens of a single response. value (B, T) is V before each
    token; mask (B, T) is 1 on response tokens, which need not be adjacent; score (B,) is the reward
    of the last of them -> (adv, target), each (B, T), 0 outside of the mask."""
    check_shapes(value, mask)
    check_shapes(mask.any(1), score)
    mask, adv = mask.bool(), torch.zeros_like(value)
    next_value, gae, reward = torch.zeros_like(score), torch.zeros_like(score), score
    for t in reversed(range(value.shape[1])):
        on = mask[:, t]
        delta = reward + gamma * next_value - value[:, t]
        gae = torch.where(on, delta + gamma * lam * gae, gae)
        adv[:, t] = torch.where(on, gae, 0.0)
        next_value = torch.where(on, value[:, t], next_value)
        reward = torch.where(on, 0.0, reward)
    return adv, torch.where(mask, value + adv, 0.0)
