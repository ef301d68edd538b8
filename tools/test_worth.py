import torch

from tools import worth


def test_half_the_noise_is_worth_twice_the_games():
    """Games' gradients scatter around one direction: by 4 in each of 64 numbers, and the other
    estimator's by 4 / sqrt 2. The third is the direction without noise."""
    noise = torch.randn(2, 400, 64, generator=torch.Generator().manual_seed(0)).double() * 4
    noise *= torch.tensor([1, 0.5 ** 0.5])[:, None, None] * worth.GROUP ** 0.5
    sketches = torch.cat([noise, torch.zeros(1, 400, 64)]) + worth.GROUP * torch.eye(64)[0]
    folds = [[*range(0, 400, 2)], [*range(1, 400, 2)]]
    games, error = worth.jackknife(lambda folds: worth.games_needed(sketches, folds), folds).T
    assert games[0] == worth.BATCH and 100 < games[1] < 160 and 3 < error[1] < 20
    assert games[2] == float("inf")
