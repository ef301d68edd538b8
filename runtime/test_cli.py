"""Tests of runtime/cli.py."""
import io
import sys
from unittest import mock

import pytest
import torch

import eval as evaluation
import train
from model import load
from runtime import cli
from runtime.testing import TINY_HOUSE, needs_package, on_the_cpu, run_main


def test_terminal_that_lacks_a_character_ends_no_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    with cli.one_line_errors("x.py"):
        print("50.0 \u2013", flush=True)
    assert sys.stdout.buffer.getvalue() == b"50.0 ?\n"


def test_progress_prints_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SECONDS_PER_LINE", 0.01)
    printed = ""
    with cli.progress("rollout", 10, "turns", initial=1) as bar:
        bar.update(2)
        assert bar.initial == 1  # the speed is that of what was done since
        while "3/10" not in printed:
            printed += capsys.readouterr().err
    assert all(line.startswith("rollout: ") for line in printed.splitlines())
    assert "\r" not in printed


@pytest.mark.parametrize("module, argv, complaints", [  # one of each kind
    (train, ["--learning_rate", "1"], ["--learning_rate"]),
    (train, ["--old_logprobs", "never"], ["--old_logprobs", "never", "recompute", "rollout"]),
    (train, ["--env", "hose"], ["hose", "known: house, alfworld"]),
    (train, ["--model", "nobody/nothing"], ["cannot load model", "nobody/nothing"]),
    pytest.param(train, ["--env", "alfworld", "--data", "nowhere"], ["alfworld-download"],
                 marks=needs_package),
    (train, ["--max_new_tokens", "16380"], ["--max_new_tokens 16380 leaves no room for a prompt"]),
    (train, ["--value_tokens", "77", "99999"], ["99999", "ids below"]),
    (train, ["--algo", "grpo", "--group_size", "5"], ["--group_size 5 does not divide"]),
    (train, ["--env", "webshop", "--places", "3"], ["--places has no effect", "--env webshop"]),
    (evaluation, ["--model", "tiny", "--split", "dev"], ["known: train, test"]),
    (evaluation, ["--plot", "nowhere"], ["none of these"])])
def test_mistakes_on_the_command_line_give_one_clear_line(tmp_path, monkeypatch, module, argv,
                                                          complaints):
    with pytest.raises(SystemExit) as stop:
        run_main(module, monkeypatch, "--out", tmp_path / "run", *argv)
    assert all(part in str(stop.value) for part in complaints) and "\n" not in str(stop.value)


def test_abbreviated_flags_are_refused(monkeypatch):
    with pytest.raises(SystemExit, match="unrecognized arguments: --iter 1"):
        run_main(train, monkeypatch, "--iter", 1)


def test_threads_are_chosen_unless_the_user_did(monkeypatch):
    set_threads = mock.Mock()
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    cli.choose_threads(load(TINY_HOUSE).model)
    assert not set_threads.called  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.choose_threads(load(TINY_HOUSE).model)
    set_threads.assert_called_once_with(1)


def test_flag_of_a_list_takes_any_number_of_texts():
    parser = cli.Parser()
    parser.add_argument("--leave_out", **cli.argparse_options(list))
    for flags, value in (([], None), (["--leave_out"], []), (["--leave_out", "5", "a b"],
                                                             ["5", "a b"])):
        assert parser.parse_args(flags).leave_out == value


@pytest.mark.parametrize("error", [ValueError("game a\nb failed"), OSError("game a\r\nb failed"),
                                   ImportError("game a\u2028b failed", name=None)])
def test_errors_are_one_line_whatever_is_in_them(error):
    assert cli.in_one_line(error) == "game a b failed"
