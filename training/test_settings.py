"""Tests of training/settings.py."""
import dataclasses
import json
import os
import pathlib
import re
import shutil

import pytest
import torch

import eval as evaluation
import train
from environments.house import House
from model import ActorCritic
from runtime import cli
from runtime.testing import HERE, INF, NAN, TINY_HOUSE, on_the_cpu, read_lines, run_main
from tools import imitate
from tools.imitate import random_tiny
from training.settings import ALGOS, RESUME_MUTABLE, learner_class


def test_settings_are_the_papers_then_those_recommended_then_those_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paper, tiny = train.Config(), train.settings()
    assert (paper.lr, paper.iterations, paper.batch_size, paper.horizon) == (1e-6, 150, 128, None)
    assert (tiny.lr, tiny.iterations, tiny.max_prompt) == (4e-4, 24, 8192)
    assert train.settings(model="me/other").lr == paper.lr
    assert train.settings(lr=0.5, context="full") == dataclasses.replace(
        tiny, lr=0.5, context="full", max_prompt=None)
    shutil.copytree(TINY_HOUSE, "mine")  # a folder carries its settings wherever it is
    assert train.settings(model="mine") == dataclasses.replace(tiny, model="mine")
    assert train.settings(algo="grpo").group_size == 8
    assert train.settings(env="webshop", model="me/other").mini_batch == 64
    assert train.parse(["--lr", "0.5"]).lr == 0.5
    complete = train.settings(model="me/other")
    assert (complete.horizon, complete.eval_games, complete.max_prompt, complete.dtype) == (
        20, 192, 2048, "float32")
    assert (complete.context, complete.compile, complete.r_max, complete.tau_v) == (
        "window", False, 10, 1)
    # what is None in a complete config means what it says: no folder, no limit, the free tokens
    assert {name for name, value in vars(complete).items() if value is None} == {
        "data", "out", "max_num_seqs", "value_tokens", "wandb", "leave_out"}
    for name, value in (("context", "ful"), ("engine", "KV"), ("dtype", "fp16")):
        with pytest.raises(ValueError, match=f"{name} is '{value}'; it can be "):
            train.Config(**{name: value})


def test_remedies_for_out_of_memory_are_allowed_with_resume():
    says = cli.in_one_line(torch.OutOfMemoryError("CUDA out of memory"))
    assert {*re.findall(r"--(\w+)", says)} - {"resume"} <= RESUME_MUTABLE


@pytest.mark.parametrize("flags, message", [
    ("--eval_every 1 --eval_games 0 --env envs:Env", "--eval_every needs --eval_games"),
    ("--batch_size 6 --group_size 4", "--group_size 4 does not divide --batch_size 6"),
    ("--algo empg --old_logprobs rollout", "--algo empg needs entropies"),
    ("--algo grpo --group_size 1", "--group_size must be above 1")])
def test_settings_that_do_not_fit_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        config = train.parse(flags.split())
        learner_class(config.algo)(random_tiny(), config)


def test_limit_of_a_prompt_depends_on_the_context():
    assert train.parse(["--context", "full"]).max_prompt is None
    assert train.parse([]).max_prompt == 8192


def test_defaults_are_those_of_the_readme():
    text = pathlib.Path(f"{HERE}/README.md").read_text(encoding="utf-8")
    c = train.Config()
    lm = ActorCritic
    for default in (f"R_max {lm.r_max:g}", f"γ = λ = {c.gamma:g}", f"τ_v {lm.tau_v:g}",
                    f"c_V {c.c_v:g}", f"c_Q {c.c_q:g}", f"ε = ε_V = ε_Q = {c.clip:g}",
                    f"c_H {c.c_h:g}", f"c_inv {c.c_inv:g}"):
        assert default in " ".join(text.split()), default


def test_defaults_of_evaluations_are_those_of_training():
    """eval.py, on which training/settings.py stands, writes them a second time."""
    args = evaluation.make_parser("").parse_args(["--model", "me/other"])
    _, settings = evaluation.complete(args)
    config = train.settings(model="me/other")
    for name in ({*evaluation.SHARED} & {*vars(config)}) - {"horizon", "places", "objects"}:
        assert getattr(settings, name) == getattr(config, name), name
    for name in "horizon", "places", "objects":  # the environment's own
        assert getattr(settings, name) is None
    assert {*evaluation.DEFAULTS} <= {*evaluation.SHARED}


@pytest.mark.parametrize("flags, message", [
    ("--lr nan", "--lr must be at least 0 and at most 1000000000; it is nan"),
    ("--gamma 2", "at most 1"), ("--max_num_seqs -1", "at least 1"),
    ("--history -1", "at least 0"), ("--r_max inf", "at most")])
def test_settings_out_of_range_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        train.parse(flags.split())


def test_settings_without_effect_are_named(capsys):
    train.parse("--algo ppo --gamma 0.9".split())
    assert "--gamma has no effect with --algo ppo" in capsys.readouterr().out


def test_resume_means_a_run_that_is_there_unless_a_new_one_is_described(tmp_path):
    out = str(tmp_path / "typo")
    for given in (dict(iterations=4), dict(), dict(max_num_seqs=3, save_every=1)):
        with pytest.raises(ValueError, match="there is no run in .*typo"):
            train.settings(resume=True, out=out, **given)
    with pytest.raises(ValueError, match="there is no run in"):
        train.parse(["--resume", "--out", out, "--iterations", "4"])
    assert train.settings(resume=True, out=out, env="house").resume  # a job's first start


def test_what_an_environment_says_of_itself_must_make_sense():
    for name, value, says in (
            ("held_out", "test", "held_out is 'test'; it must be (split, number"),
            ("held_out", 50, "held_out is 50"), ("validation", "val", "validation is 'val'"),
            ("eval_temperatures", 0.4, "eval_temperatures is 0.4; it must be a tuple"),
            ("eval_temperatures", (), "eval_temperatures is ()"),
            ("horizon", None, "horizon is None; it must be a whole number"),
            ("horizon", 0, "horizon is 0; it must be a whole number from 1 on"),
            ("flags", "data", "flags is 'data'; it must be a tuple of texts"),
            ("categories", ("easy", "hard"), "categories is ('easy', 'hard'); it must be a dict"),
            ("recommended", None, "recommended is None; it must be a dictionary"),
            ("context", "both", 'context is \'both\'; it must be "window" or "full"'),
            ("system", ["x"], "system is ['x']; it must be a text, or None"),
            ("role", 3, "role is 3; it must be a text, or None"),
            ("max_prompt", "9", "max_prompt is '9'; it must be a whole number from 1 on, or None"),
            ("max_observation", -3, "max_observation is -3; it must be a whole number from 1 on"),
            ("fallback", None, "fallback is None; it must be a whole number from 0 on"),
            ("patience", None, "patience is None; it must be a number of seconds above 0"),
            ("workers", "2", "workers is '2'; it must be a whole number from 0 on, or None")):
        Mine = type("Mine", (House,), {name: value})
        with pytest.raises(ValueError, match=re.escape(f"--env Mine: {says}")):
            train.settings(env=Mine)
    for env, says in (("environments.frozen_lake", "is a module; name its class, .*:CLASS"),
                      ("environments.house:GOALS", "is no class; name the class"),
                      ("__main__:Mine", "known only to the script or notebook")):
        with pytest.raises(ValueError, match=says):
            train.settings(env=env)
    for given in (dict(env=House()), dict(algo=train.Learner)):
        with pytest.raises(ValueError, match="it must be a text, MODULE:CLASS or the short name"):
            train.settings(**given)


@pytest.mark.parametrize("flag", ["--out", "--model", "--data"])
def test_a_path_is_not_empty(flag):
    """As "$RUN" is where the shell's variable RUN is not set."""
    with pytest.raises(ValueError, match=f"{flag} '': it is empty"):
        train.parse([flag, ""])


@pytest.mark.parametrize("name, value", [("lr", "1e-4"), ("batch_size", 2.5), ("seed", "0")])
def test_settings_are_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a"):
        train.Config(**{name: value})


@pytest.mark.parametrize("name, value", [
    ("lr", NAN), ("clip", -1.0), ("gamma", 1.5), ("mini_batch", 0), ("beta", INF), ("horizon", 0),
    ("lr", 1e39), ("lr", 1e300), ("clip", 1e300), ("r_max", 1e39), ("tau_v", 1e300),
    ("c_inv", 1e39), ("batch_size", 10 ** 15), ("iterations", 10 ** 30), ("seed", 2 ** 70),
    ("max_num_seqs", 10 ** 15), ("lr_warmup", 10 ** 40)])
def test_settings_are_checked_where_they_are_made(name, value):
    with pytest.raises(ValueError, match=f"--{name} must be at least"):
        train.Config(**{name: value})
    with pytest.raises(ValueError, match=f"--{name} must be at least"):
        dataclasses.replace(train.Config(), **{name: value})


def test_methods_are_found_by_name():
    """A method is MODULE:CLASS, or has a short name for that."""
    for name, long in ALGOS.items():
        assert issubclass(learner_class(name), train.Learner)
        assert learner_class(name) is learner_class(long)
    assert learner_class("sapo") is train.Learner
    for name, says in (("grop", "known: sapo, ppo-turns, ppo, grpo"), ("no.such:Mine", "No module"),
                       ("train:Mine", "no attribute 'Mine'"),
                       ("json:JSONDecoder", "it is no train.Learner")):
        with pytest.raises(ValueError, match=f"--algo {name}: .*{says}"):
            train.settings(algo=name)


def test_home_folder_stands_for_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(TINY_HOUSE, tmp_path / "start")
    there = {name: str(tmp_path / folder) for name, folder in
             (("model", "start"), ("data", "shop"), ("out", "run"))}
    here = {"model": "~/start", "data": "~/shop", "out": pathlib.Path("~/run")}
    config = train.settings(env="webshop", **here)
    assert {name: getattr(config, name) for name in there} == there
    assert config.max_new_tokens == 16  # that of the model's folder
    assert train.parse(["--out=~/run"]).out == there["out"]
    with pytest.raises(ValueError, match=f"there is no run in {tmp_path}/run"):
        train.parse(["--resume", "--out=~/run"])
    args = evaluation.make_parser("").parse_args("--model ~/start --out=~/x --data ~/y".split())
    assert (args.model, args.out, args.data) == (there["model"], f"{tmp_path}/x", f"{tmp_path}/y")
    with pytest.raises(SystemExit, match="none of these folders can be used"):
        run_main(evaluation, monkeypatch, "--table", "~/start")


def test_folder_whose_name_is_not_utf8_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match=r"--out 'runs/caf.udce9': .* must be UTF-8"):
        run_main(train, monkeypatch, "--out", os.fsdecode(b"runs/caf\xe9"))


@pytest.mark.parametrize("value", [5, "5", [0.5], {"5"}])
def test_tasks_to_leave_out_are_a_list(value):
    with pytest.raises(ValueError, match="leave_out is .*; it must be a list of task ids"):
        train.Config(leave_out=value)


@pytest.mark.parametrize("given", [{"compile": "false"}, {"resume": "yes"}, {"iterations": True},
                                   {"lr": True}, {"value_tokens": "ab"}, {"value_tokens": ["a"]},
                                   {"value_tokens": [1.5, "a"]}, {"out": 5}, {"out": b"run"},
                                   {"data": ["shop"]}, {"model": 1.5}, {"model": {}}, {"env": 5},
                                   {"env": House()}, {"algo": ["sapo"]}, {"wandb": 1},
                                   {"out": INF, "resume": True}])
def test_settings_of_another_type_are_refused(given):
    with pytest.raises(ValueError, match=f"{min(given)} is .*; it must be"):
        train.settings(**given)


@pytest.mark.parametrize("value", ["~nosuchuser", "~nosuchuser/run", "a\0b"])
@pytest.mark.parametrize("flag", ["--out", "--model", "--data", "--table"])
def test_paths_that_cannot_be_are_named(tmp_path, monkeypatch, flag, value):
    monkeypatch.chdir(tmp_path)
    says = "null byte" if "\0" in value else "there is no such home folder"
    for module, expected in (train, says), (imitate, says), (evaluation, "invalid file_path value"):
        if flag == "--table" and module is not evaluation:
            continue
        with pytest.raises(SystemExit, match=expected) as stop:
            run_main(module, monkeypatch, "--env", "webshop", flag, value)
        assert flag in str(stop.value) and repr(value) in str(stop.value)
        assert "\n" not in str(stop.value)
