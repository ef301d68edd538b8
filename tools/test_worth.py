import pytest
import torch

from tools import worth


def test_games_needed_follow_from_signal_and_noise():
    """Gradients scatter by 2 in each of 64 numbers, the first estimator's around e0 + e1, the
    second's around e0, as is success: cos^2 of n games is 1 / (2 + 256 / n), 1 / (1 + 256 / n)."""
    noise = torch.randn(2, 4000, 64, generator=torch.Generator().manual_seed(0)).double() * 2
    unit, size = torch.eye(64), worth.GROUP
    means = torch.stack([unit[0] + unit[1], unit[0], unit[0]])[:, None]
    sketches = size * means + size ** 0.5 * torch.cat([noise, torch.zeros(1, 4000, 64)])
    folds = [[*range(0, 4000, 2)], [*range(1, 4000, 2)]]
    games = worth.games_needed(sketches, 0, folds)
    assert games[:2].tolist() == pytest.approx([worth.BATCH, 256 / 3], abs=2)
    value = worth.jackknife(lambda folds: torch.tensor([*map(float, sum(folds, []))]).mean(), folds)
    assert value.tolist() == pytest.approx([1999.5, 4000 / 12 ** 0.5 / 4000 ** 0.5], rel=1e-3)
