"""The methods that SAPO is compared with, as learners: `train.py --algo NAME` takes them from here.

    grpo, rloo, gigpo, gigpo-nostd, empg    GroupBased: several trajectories of each task
    ppo-turns                               PPO with GAE over turns, as in SAPO: PPOTurns
    ppo                                     PPO as in verl-agent: one response is one episode

What is not overridden is SAPO's: rollouts, mini-batches, the policy's loss, the optimizer. The
penalty --c_inv is subtracted from the reward in ppo and, in the group-based methods, from the
finished advantage, in that advantage's units.
A separate critic adds to the log: skipped_steps_critic, grad_norm_critic, loss_critic, and the
seconds of its values and its update, time_values and time_critic. In ppo, V explains the
undiscounted return of the episode.

A method's short name is in training/settings.py.
"""
import numpy as np
import torch

from baselines.estimators import (empg_advantages, episode_returns, gigpo_advantages,
                                  grpo_advantages, rloo_advantages, token_gae)
from model import ActorCritic, Batch
from runtime.checkpoint import read_tensors
from runtime.distributed import all_gather_list, process_group, rank
from runtime.optim import checked, load_state, saved_state
from sapo import actor_loss, discounted_returns, normalize_advantages, value_loss
from train import (Learner, Targets, accumulate_gradients, denominators, optimizer_step, set_lr)


class PolicyLearner(Learner):
    """The terms of Eq. 12 that concern the policy: the model's own V and Q are not trained."""

    unused = ("critic_lr", "value_lr_factor", "gamma", "gae_lambda", "c_v", "c_q")

    def loss(self, micro, old, ref, targets, n_tokens, n_turns):
        c, m = self.config, micro.token_slice
        scores = self.lm.score(micro.batch)
        return actor_loss(scores.logp, scores.entropy, logp_old=old.logp[m], adv=targets.adv[m],
                          logp_ref=None if ref is None else ref[m], clip=c.clip, beta=c.beta,
                          c_h=c.c_h, denom=n_tokens)


# ------------------------------------------------------------------------- group-based methods

class GroupBased(PolicyLearner):
    """Each trajectory is compared with the others of its task, on whichever rank they were played.
    ValueError: the group size is 1."""

    recommended = {"group_size": 8}

    def __init__(self, lm, config):
        if config.group_size == 1:
            raise ValueError(f"--algo {config.algo} compares trajectories: --group_size must be "
                             "above 1")
        super().__init__(lm, config)

    def learn(self, turns, iteration):
        """ValueError: a group has trajectories of different tasks."""
        size, task_of = self.config.group_size, {}
        for turn in turns:
            if task_of.setdefault(turn.traj // size, turn.task) != turn.task:
                raise ValueError(f"a group of {size} trajectories has different tasks: play each "
                                 "task group_size times, under consecutive numbers")
        return super().learn(turns, iteration)

    def targets(self, batch, old):
        c, zeros = self.config, torch.zeros_like(batch.reward)
        rows = zip(batch.turns, batch.reward.tolist(), self.turn_entropy(batch, old).tolist())
        rows = all_gather_list([(rank(), t.traj, t.turn, str(t.obs), r, h) for t, r, h in rows])
        owner, traj, turn, obs, reward, entropy = zip(*rows)
        state = np.unique(obs, return_inverse=True)[1]  # a number for each distinct observation
        traj, turn, state, reward, entropy = map(torch.tensor, (traj, turn, state, reward, entropy))
        group = traj // c.group_size  # a task's trajectories have consecutive numbers
        adv = self.estimate(traj, turn, group, state, reward.double(), entropy)
        mine = adv[torch.tensor(owner) == rank()].to(zeros) - c.c_inv * batch.invalid
        returns = discounted_returns(batch.traj, batch.turn, batch.reward, gamma=c.gamma)
        return Targets(mine[batch.turn_of_token], None, None, zeros, zeros, returns)

    def turn_entropy(self, batch, old) -> torch.Tensor:
        """(N,) the policy's entropy, its mean over the tokens of a turn; 0 where it is not used."""
        return torch.zeros_like(batch.reward)

    def estimate(self, traj, turn, group, state, reward, entropy) -> torch.Tensor:
        """(N,) over the turns of all ranks -> advantages (N,)."""
        raise NotImplementedError


class GRPO(GroupBased):
    def estimate(self, traj, turn, group, state, reward, entropy):
        return grpo_advantages(traj, group, episode_returns(traj, reward))


class RLOO(GroupBased):
    def estimate(self, traj, turn, group, state, reward, entropy):
        return rloo_advantages(traj, group, episode_returns(traj, reward))


class GiGPO(GroupBased):
    unused = ("critic_lr", "value_lr_factor", "gae_lambda", "c_v", "c_q")
    std = True  # whether advantages are divided by a standard deviation

    def estimate(self, traj, turn, group, state, reward, entropy):
        return gigpo_advantages(traj, turn, group, state, reward, gamma=self.config.gamma,
                                std=self.std)


class GiGPOWithoutStd(GiGPO):
    std = False


class EMPG(GRPO):
    """ValueError: --old_logprobs rollout, which has no entropies."""

    def __init__(self, lm, config):
        if config.old_logprobs == "rollout":
            raise ValueError("--algo empg needs entropies, which --old_logprobs rollout does not "
                             "give")
        super().__init__(lm, config)

    def turn_entropy(self, batch, old):
        sums = torch.zeros_like(batch.reward).index_add(0, batch.turn_of_token, old.entropy)
        return sums / batch.turn_of_token.bincount()

    def estimate(self, traj, turn, group, state, reward, entropy):
        adv = super().estimate(traj, turn, group, state, reward, entropy)
        return empg_advantages(adv, traj, turn, entropy)


# ---------------------------------------------------------------------- methods with a critic

class Critic(torch.nn.Module):
    """A copy of the policy's backbone with a linear head in float32, which starts at 0. If the
    policy has adapters, it has its own, and they share what is frozen."""

    def __init__(self, lm: ActorCritic):
        super().__init__()
        self.lm = lm.copy()
        self.backbone = self.lm.model.base_model  # registered here, and so trained
        self.head = torch.nn.Linear(lm.model.config.get_text_config().hidden_size, 1,
                                    device=lm.device)
        for p in self.head.parameters():
            torch.nn.init.zeros_(p)

    def trained(self) -> dict:
        """The parameters that are not frozen, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, batch: Batch) -> torch.Tensor:
        """V / R_max before each response token, (M,)."""
        hidden = self.lm.hidden_states(batch.ids)
        return self.head(hidden[batch.token_row, batch.token_col - 1].float())[:, 0]

    def of_turns(self, batch: Batch) -> torch.Tensor:
        """V / R_max before the first response token of each turn, (N,)."""
        length = batch.end - batch.start
        return self(batch)[length.cumsum(0) - length]


class PPOTurns(PolicyLearner):
    """PPO with GAE over turns: SAPO's targets, with V from a second model, the critic, and without
    Q. In `old`, p_v is the critic's V / R_max before each turn, (N,), and p_q is 0."""

    unused = ("value_lr_factor", "c_v", "c_q")

    def __init__(self, lm, config):
        super().__init__(lm, config)
        self.critic = Critic(self.lm)  # (which may be compiled)
        self.critic_groups = [[*self.critic.trained().values()]]
        optimizer = self.make_optimizer(self.critic_groups, config.critic_lr)
        self.critic_optimizer = checked(optimizer, self.critic_groups)

    def critic_values(self, micro) -> torch.Tensor:
        return self.critic.of_turns(micro.batch)

    @torch.no_grad()
    def score_behaviour_policy(self, batch, minibatches):
        old = super().score_behaviour_policy(batch, minibatches)
        values = [self.critic_values(micro) for minibatch in minibatches for micro in minibatch]
        values = torch.cat([batch.v[:0], *values])  # a rank may have no turns
        self.clock.record("values")
        return old._replace(p_v=values, p_q=torch.zeros_like(values))

    def values(self, old):
        return self.lm.r_max * old.p_v, self.lm.r_max * old.p_q

    def step(self, minibatch, old, ref, targets, iteration):
        lr_factor = self.lr_factor(iteration)  # before the step is counted
        metrics = super().step(minibatch, old, ref, targets, iteration)
        n_tokens, n_turns = denominators(minibatch)
        infos = accumulate_gradients(
            self.critic, self.critic_optimizer, minibatch, self.config.gradient_checkpointing,
            lambda micro: (self.critic_loss(micro, old, targets, n_tokens, n_turns), {}))
        set_lr(self.critic_optimizer, lr_factor)
        info = optimizer_step(self.critic_optimizer, self.critic_groups, infos)
        self.clock.record("critic")
        return metrics | {f"{name}_critic": x for name, x in info.items()}

    def critic_loss(self, micro, old, targets, n_tokens, n_turns):
        n = micro.turn_slice
        return value_loss(self.critic_values(micro), old.p_v[n], targets.y_v[n],
                          clip=self.config.clip, denom=n_turns)[0]

    def free_gradients(self):
        super().free_gradients()
        self.critic_optimizer.zero_grad()

    def save(self, folder):
        super().save(folder)
        state = {"optimizer": saved_state(self.critic_optimizer)}
        torch.save(state, f"{folder}/critic-{rank()}.pt")
        if rank() == 0:
            trained = {name: p.detach() for name, p in self.critic.trained().items()}
            torch.save(trained, f"{folder}/critic.pt")

    def restore(self, folder):
        super().restore(folder)
        self.critic.load_state_dict(self.critic.state_dict() | read_tensors(folder / "critic.pt"))
        shards = [read_tensors(path) for path in sorted(folder.glob("critic-*.pt"))]
        load_state(self.critic_optimizer, [shard["optimizer"] for shard in shards],
                   f"{folder}/critic-*.pt")


class PPO(PPOTurns):
    """PPO as in verl-agent: every turn is rewarded at its end with the whole episode's return, less
    the penalty for invalid actions, and GAE with gamma = lambda = 1 runs over the tokens of that
    turn alone. So a token's advantage is that reward minus its value, whitened over all tokens. In
    `old`, p_v is V / R_max before each response token, (M,), and y_v likewise."""

    recommended = {"gamma": 1.0, "gae_lambda": 1.0}
    unused = ("value_lr_factor", "gamma", "gae_lambda", "c_v", "c_q")

    def critic_values(self, micro):
        return self.critic(micro.batch)

    def targets(self, batch, old):
        c, value, r_max = self.config, old.p_v, self.lm.r_max
        returns = episode_returns(batch.traj, batch.reward)
        reward = (returns - c.c_inv * batch.invalid) / r_max
        lengths = batch.turn_of_token.bincount()[:, None]  # (N, 1)
        longest = max([c.max_new_tokens, *(len(turn.logp) for turn in batch.turns)])
        mask = torch.arange(longest, device=value.device) < lengths  # (N, T)
        table = torch.zeros_like(mask, dtype=value.dtype).masked_scatter(mask, value)
        adv, y_v = (x[mask] for x in token_gae(table, mask, reward))
        adv = normalize_advantages(adv, group=process_group())
        v = r_max * table[:, 0]
        return Targets(adv, y_v, None, v, torch.zeros_like(v), returns)

    def critic_loss(self, micro, old, targets, n_tokens, n_turns):
        m = micro.token_slice
        return value_loss(self.critic_values(micro), old.p_v[m], targets.y_v[m],
                          clip=self.config.clip, denom=n_tokens)[0]
