"""Tests of runtime/compile.py. Compiled models, and whether they are right, are tested in
runtime/test_verify.py."""
import contextlib

import pytest
import torch

from runtime import compile as compile_module


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


def test_every_private_setting_exists_in_the_version_that_is_tested():
    for module, name, _ in compile_module.COMPILER_SETTINGS:
        assert hasattr(compile_module.importlib.import_module(module), name)
