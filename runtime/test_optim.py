"""Tests of runtime/optim.py."""
import pytest
import torch

from runtime import optim


def steps_of(optimizer, p, gradients):
    for g in gradients:
        p.grad = g.to(p.grad_dtype)
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize("chunk", [optim.CHUNK, 8])
def test_adamw_matches_torch_in_chunks_of_any_size(monkeypatch, chunk):
    monkeypatch.setattr(optim, "CHUNK", chunk)
    torch.manual_seed(0)
    start = torch.randn(7, 5)
    gradients = [torch.randn(7, 5) * 10 ** torch.randn(7, 5) for _ in range(20)]
    one, other = (torch.nn.Parameter(start.clone()) for _ in range(2))
    a = steps_of(optim.AdamW([one], lr=1e-2, weight_decay=0.1), one, gradients)
    b = steps_of(torch.optim.AdamW([other], lr=1e-2, weight_decay=0.1), other, gradients)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_master_weights_learn_where_16_bit_weights_would_not(state_dtype):
    torch.manual_seed(0)
    start, gradients = torch.randn(2000).bfloat16(), [torch.randn(2000) + 1 for _ in range(300)]
    plain, master = (torch.nn.Parameter(start.clone()) for _ in range(2))
    end = steps_of(torch.optim.AdamW([plain], lr=1e-6, weight_decay=0), plain, gradients)
    assert (end == start)[start.abs() > 0.05].all()
    optimizer = optim.AdamW([master], lr=1e-6, weight_decay=0, state_dtype=state_dtype)
    steps_of(optimizer, master, gradients)
    state, exact = optimizer.state[master], torch.nn.Parameter(start.float())
    steps_of(torch.optim.AdamW([exact], lr=1e-6, weight_decay=0), exact,
             [g.to(master.grad_dtype).float() for g in gradients])
    assert state["exp_avg"].dtype == state_dtype and torch.equal(master, state["master"].bfloat16())
    moved, expected = state["master"] - start.float(), exact.detach() - start.float()
    if state_dtype == torch.float32:
        torch.testing.assert_close(moved, expected, atol=1e-7, rtol=1e-3)
    else:  # right on average; rounded to the nearest, exp_avg_sq would stay far too low
        assert moved.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)
        assert ((moved - expected).norm() / expected.norm()) < 0.05
    assert expected.abs().mean() > 1e-4


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_optimizer_state_is_split_evenly_over_ranks(monkeypatch, size):
    """Qwen2.5-1.5B's shapes repeat every twelve tensors, so every n-th one would be uneven."""
    layer = [1536 ** 2, 1536, 256 * 1536, 256, 256 * 1536, 256, 1536 ** 2, *[8960 * 1536] * 3]
    sizes = [151936 * 1536, *(layer + [1536] * 2) * 28, 1536]
    monkeypatch.setattr(optim, "world_size", lambda: size)
    owner = optim.partition_params(sizes)
    kept = [sum(n for n, kept_by in zip(sizes, owner) if kept_by == r) for r in range(size)]
    assert len(owner) == len(sizes) and sum(kept) == sum(sizes)
    assert max(kept) < max(1.02 * sum(sizes) / size, 1.0001 * sizes[0])


def test_state_of_another_optimizer_is_refused():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    ours, other = optim.AdamW(params, lr=1e-2), torch.optim.AdamW(params, lr=1e-2)
    for optimizer, saved, says in ((ours, other, "files is missing, .* of another optimizer"),
                                   (other, ours, "files have no state of this AdamW")):
        with pytest.raises(ValueError, match=says):
            optim.load_state(optimizer, [optim.saved_state(saved)], "files")
    with pytest.raises(ValueError, match="files have no state"):  # rank 0's is missing
        optim.load_state(other, [{}], "files")
