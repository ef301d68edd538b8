"""Tests of hf/compile.py."""
import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch

from hf import compile as compile_module
from hf.verify import zero_gradients
from runtime.testing import (CONTEXTS, GPU, as_on_a_gpu, batch_of, gpu, gradient, on_the_cpu, play,
                             random_lm, same_tokens_and_values)


@pytest.mark.parametrize("error, again", [
    (torch._dynamo.exc.TorchDynamoException("no compiler"), True),
    (RuntimeError("a kernel failed"), False)])
def test_failed_compiled_call_that_changed_its_arguments_is_not_repeated(monkeypatch, error, again):
    def compile(function, **options):
        def run(x):
            if not again:
                function(x)  # it is applied before it fails
            raise error
        return run

    monkeypatch.setattr(torch, "compile", compile)
    count = torch.zeros(1)
    with contextlib.nullcontext() if again else pytest.raises(RuntimeError, match="kernel"):
        compile_module.compiled(lambda x: x.add_(1))(count)
    assert count == 1


def test_settings_that_this_version_of_pytorch_does_not_have_are_left_out(monkeypatch):
    config = torch._dynamo.config
    before = config.recompile_limit
    monkeypatch.setattr(compile_module, "COMPILER_SETTINGS", (
        ("torch._dynamo.no_such_module", "recompile_limit", 1),
        ("torch._dynamo.config", "no_such_setting", 2),
        ("torch._inductor.config", "triton.no_such_setting", 3),
        ("torch._dynamo.config", "recompile_limit", before + 1)))
    try:
        compile_module.configure_compiler()
        assert config.recompile_limit == before + 1 and not hasattr(config, "no_such_setting")
    finally:
        config.recompile_limit = before


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another PyTorch may differ")
def test_every_private_setting_exists_in_the_version_that_is_tested():
    for module, name, _ in compile_module.COMPILER_SETTINGS:
        assert hasattr(compile_module.importlib.import_module(module), name)


@CONTEXTS
def test_compiled_sampling_gives_the_same_tokens(context, monkeypatch):
    if not GPU:  # C++ takes a minute to compile; what is traced is the same
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    lm, counters = random_lm("qwen2", 3, layers=1), torch._dynamo.utils.counters
    turns, graphs = [], []
    for compile in (False, True, True):
        turns.append(play(lm, "kv", context, 1.0, sampler_options={"compile": compile})[0])
        graphs.append(counters["stats"]["unique_graphs"])
        same_tokens_and_values(turns[0], turns[-1])
        both = (torch.tensor([x for t in some for x in t.logp]) for some in (turns[0], turns[-1]))
        torch.testing.assert_close(*both, atol=1e-5, rtol=0)
    # a layer in a prefill of new sequences, in a prefill behind a cache and in decoding; and all of
    # them again for a single sequence
    assert 0 < graphs[1] - graphs[0] <= 6 and graphs[2] == graphs[1]
    assert not counters["graph_break"]


def test_compiled_scoring_needs_few_graphs_for_all_layers_and_shapes(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch._dynamo.reset()
    lm, found = random_lm("qwen2", 3, layers=4), []
    turns, graphs = play(lm, "kv", "full", 1.0)[0], {}
    batches = [batch_of(turns[n:n + 6]) for n in (0, 6, 9)]
    for compile, chunk in ((False, 10 ** 6), (True, 10 ** 6), (True, 20)):
        scorer = dataclasses.replace(lm, compile=compile)
        scorer.chunk = chunk
        for n in range(2):
            zero_gradients(lm)
            scores = [scorer.score(batch) for batch in batches]
            sum(x.sum() for some in scores for x in some).backward()
            with torch.no_grad():
                torch.testing.assert_close(scorer.score(batches[1]), scores[1])
            graphs[chunk, compile, n] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((*scores, gradient(lm)))
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], atol=1e-4, rtol=1e-4)
    made = [*graphs.values()]
    assert made[0] == made[1] < made[2] == made[3] <= made[1] + 6 and made[4] == made[5]


def test_decoding_runs_eagerly_where_memory_is_too_short_to_capture(monkeypatch, caplog):
    lm = random_lm("qwen2", 1)
    plain = play(lm, "kv", "window", 1.0)[0]
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(compile_module.CudaGraphs, "capture",
                        mock.Mock(side_effect=torch.OutOfMemoryError))
    turns, sampler = play(lm, "kv", "window", 1.0)
    same_tokens_and_values(plain, turns)
    assert isinstance(sampler.decode_step, compile_module.CudaGraphs)
    assert "no memory left to capture a decoding step of 8 slots" in caplog.text


@CONTEXTS
@pytest.mark.parametrize("compile", [False, True])
def test_captured_graphs_sample_the_same_tokens(gpu, context, compile):
    lm = random_lm("qwen2", 1)
    on_cpu = play(lm, "kv", context, 1.0)[0]
    lm = dataclasses.replace(lm, model=lm.model.cuda(), value_rows=lm.value_rows.cuda())
    turns, sampler = play(lm, "kv", context, 1.0, sampler_options={"compile": compile})
    assert sampler.decode_step.graphs
    same_tokens_and_values(on_cpu, turns)
    same_tokens_and_values(play(lm, "hf", context, 1.0)[0], turns)
