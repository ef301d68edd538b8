"""What V is worth at a fixed policy: how much of the returns it explains, and what it saves.

    python tools/worth.py runs/NAME/checkpoint-40            in the settings of its run
    python tools/worth.py results/tiny-house-8 --places 8 --objects 6 --horizon 40

Success differs by 5 to 15 points from seed to seed; a gradient says more. A model plays training
games. The policy gradient of 64 of them, by a V and a lambda of Eq. 5, has a cosine with the
gradient of success (gamma = lambda = 1). Printed is how many games V = 0 with lambda = 0.95 needs
for the same: 128 means that half of the games are saved. Errors are by jackknife. The values are:

    zero         nothing
    shared       the model's own V, which may have seen these games in training
    kind x turn  the mean over the other half of the games, of this kind of task, at this turn
    ridge        a linear function of the model's hidden state where V is read
    critic       a copy of the model's body, trained on the other half by AdamW from --critic_lr
"""
import contextlib
import dataclasses
import itertools
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
import train
from eval import run_of, sampler_for
from machine import cli
from model import Critic, load
from rollout import PROBE, rollout
from sapo import discounted_returns, explained_variance, turn_targets

LAMBDAS, BASE = (0.0, 0.5, 0.8, 0.95, 1.0), 3  # BASE: the one that V = 0 is taken with
BATCH = 64  # games of the gradient that is judged
GROUP = 32  # games that are left out together for the errors
SKETCH = 1 << 14  # numbers that a gradient is folded into, by random signs: dot products stay


def play(lm, pool, config, games):
    """-> [turns of a group of training games], each game played once at temperature 1."""
    ids = envs.tasks(config.env, "train", **envs.options_for(vars(config)))
    order = np.random.default_rng([config.seed, PROBE]).permutation(len(ids))
    count = min(games, len(ids)) // GROUP * GROUP
    turns = rollout(sampler_for(lm, config), [ids[i] for i in order[:count]], pool,
                    seed=(config.seed, 0, PROBE), rows=config.rows or 256, history=config.history)
    return [[*its] for _, its in itertools.groupby(turns, lambda turn: turn.traj // GROUP)]


def by_kind_and_turn(played, seen, returns):
    """V of all turns, (N,), from those `seen`: means, drawn to that of the kind by 20 turns."""
    kinds, out = np.array([turn.category for turn in played.turns]), torch.zeros_like(returns)
    for its in (torch.tensor(kinds == kind) for kind in {*kinds}):
        turn, known = played.turn[its & seen], returns[its & seen]
        count = turn.bincount(minlength=int(played.turn.max()) + 1)
        total = torch.zeros(len(count)).index_add(0, turn, known)
        mean = (known if len(known) else returns[seen]).mean()
        out[its] = ((total + 20 * mean) / (count + 20))[played.turn[its]]
    return out


def by_ridge(hidden, seen, returns):
    x = F.pad(hidden.double(), (0, 1), value=1.0)
    gram = x[seen].T @ x[seen] + 10 * torch.eye(x.shape[1]).double()
    return (x @ torch.linalg.solve(gram, x[seen].T @ returns[seen].double())).float()


def by_critic(lm, micros, seen, returns, config, epochs=2):
    """micros: [(Batch, the numbers of its turns)], of all turns in order."""
    critic = Critic(lm)
    optimizer = torch.optim.AdamW(critic.parameters())
    known = [micro for micro in micros if seen[micro[1]].all()]
    order = np.random.default_rng(0).permutation(epochs * len(known))
    for step, i in enumerate(tqdm(order, "critic", leave=False)):
        batch, its = known[i % len(known)]
        optimizer.param_groups[0]["lr"] = config.critic_lr * (1 - step / len(order))
        optimizer.zero_grad()
        (lm.r_max * critic.of_turns(batch).cpu() - returns[its]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return lm.r_max * torch.cat([critic.of_turns(batch) for batch, _ in micros]).cpu()


def gradients(lm, micros, weights, signs):
    """Sketches (E, SKETCH) of the gradients of the sum over turns of weight * log-prob of the
    response, for E rows of weights (E, N)."""
    out, parameters = torch.zeros(len(weights), SKETCH).double(), [*lm.model.parameters()]
    for batch, its in micros:
        logp = lm.score(batch).logp
        logp = logp.new_zeros(len(batch.start)).index_add(0, batch.turn_of, logp)
        for row, weight in enumerate(weights[:, its].to(logp)):
            parts = torch.autograd.grad(logp @ weight, parameters, retain_graph=True)
            flat = torch.cat([part.flatten() for part in parts]) * signs
            out[row] += F.pad(flat, (0, -len(flat) % SKETCH)).view(-1, SKETCH).sum(0).cpu()
    return out


def games_needed(sketches, base, folds):
    """sketches (E, K, SKETCH) of E estimators in K groups of games, the last estimator's of the
    gradient of success -> how many games the one numbered `base` needs for the cosine that each has
    with BATCH games, (E,). A product of two groups' gradients in a fold has no bias; the square of
    one group's has its own noise in it."""
    signal, along, noise = 0, 0, 0
    for fold in folds:
        its, pairs = sketches[:, fold], len(fold) * (len(fold) - 1) * GROUP ** 2
        total, own = its.sum(1), its.square().sum((1, 2))
        apart = (total.square().sum(1) - own) / pairs
        along += (total @ total[-1] - (its * its[-1]).sum((1, 2))) / pairs
        signal, noise = signal + apart, noise + own / len(fold) / GROUP - GROUP * apart
    needed = (along[base] / along.clamp(min=0)) ** 2 * (signal + noise / BATCH) - signal[base]
    return torch.where(needed > 0, noise[base] / needed, float("inf"))


def jackknife(of, folds):
    """of(folds): numbers, (...) -> (..., 2), each with its standard error."""
    without = [of([[i for i in fold if i != k] for fold in folds]) for k in sum(folds, [])]
    error = (torch.stack(without).var(0) * (len(without) - 1) ** 2 / len(without)).sqrt()
    return torch.stack([of(folds), error], -1)


def measure(lm, config, groups):
    """-> {V: ((explained variance, its error), [(games needed, error) for each of LAMBDAS])}."""
    whole, micros, turns = dataclasses.replace(config, mini_batch=10 ** 9), [], []
    for games in groups:
        played, (batches,) = train.pack(games, whole, 0, lm.device)
        micros.append([(micro.batch, len(turns) + torch.arange(len(games))[micro.turns])
                       for micro in batches])
        turns += played.turns
    played, flat = train.Played(turns, "cpu"), sum(micros, [])
    group, paid = played.traj // GROUP, (played.traj, played.turn, played.reward)
    returns = discounted_returns(*paid, gamma=config.gamma)
    with torch.no_grad():
        hidden = torch.cat([lm.body(b.ids)[b.row, b.start - 1] for b, _ in flat])
        values = {"zero": 0 * returns, "shared": lm.r_max * lm.readout(hidden).cpu()}
    halves = [group % 2 == fold for fold in (0, 1)]
    for name, fit in {"kind x turn": lambda seen: by_kind_and_turn(played, seen, returns),
                      "ridge": lambda seen: by_ridge(hidden.cpu(), seen, returns),
                      "critic": lambda seen: by_critic(lm, flat, seen, returns, config)}.items():
        values[name] = torch.where(halves[1], *map(fit, halves))
    folds = [[*range(fold, len(groups), 2)] for fold in (0, 1)]

    def explained(folds):
        kept = torch.isin(group, torch.tensor(sum(folds, [])))
        return torch.tensor([explained_variance(v[kept], returns[kept]) for v in values.values()])

    def weight(v, lam, gamma=config.gamma):
        out = turn_targets(*paid, played.done, v, v, gamma=gamma, lam=lam)[0]
        return (out - out.mean()) / out.std().clamp(min=1e-8)

    explains = jackknife(explained, folds)
    best = [*values.values()][int(explains[:, 0].argmax())]  # at 1, 1 any is right; less noise
    weights = [weight(v, lam) for v in values.values() for lam in LAMBDAS]
    weights = torch.stack([*weights, weight(best, 1.0, 1.0)])
    signs = 2.0 * torch.randint(0, 2, (lm.model.num_parameters(),), device=lm.device) - 1
    sketches = torch.stack([gradients(lm, its, weights, signs)
                            for its in tqdm(micros, "gradients")], 1)
    needed = jackknife(lambda folds: games_needed(sketches, BASE, folds)[:-1], folds)
    return dict(zip(values, zip(explains, needed.view(len(values), len(LAMBDAS), 2))))


def main():
    parser = cli.flags_of(train.Config, {}, __doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="RUN/checkpoint-N, or a model as of train.py")
    parser.add_argument("--games", type=int, default=1536, help="how many to play, from 192 on")
    with cli.one_line_errors("worth.py", envs.GameError):
        given = vars(parser.parse_args())
        games, given["model"] = given.pop("games"), given.pop("checkpoint")
        stored = run_of(given["model"])[1].items()
        given = {k: v for k, v in stored if hasattr(train.Config, k)} | given
        config = train.Config(**train.defaults_for(train.Config(**given)) | given)
        lm = load(config.model, env=config.env, dtype=getattr(torch, config.dtype))
        torch.manual_seed(config.seed)
        pool = envs.Pool(config.env, envs.options_for(vars(config)),
                         envs.default_workers(config.env))
        with contextlib.closing(pool):
            groups = play(lm, pool, config, games)
        won = [turn.won for turns in groups for turn in turns if turn.done]
        print(f"{np.mean(won):.1%} of {len(won)} games are won\n\n| V | explained variance |",
              *(f"lambda {x:g} |" for x in LAMBDAS), "\n|" + " --- |" * 7)
        for name, (explains, needed) in measure(lm, config, groups).items():
            print(f"| {name} | {explains[0]:.2f} ± {explains[1]:.2f} |",
                  *(f"{n:.0f} ± {error:.0f} |" for n, error in needed.tolist()))


if __name__ == "__main__":
    main()
