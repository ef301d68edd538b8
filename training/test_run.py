"""Tests of training/run.py: whole runs, which are killed, stopped, resumed and evaluated."""
import dataclasses
import json
import os
import random
import shutil
import signal
import time
import types
from pathlib import Path

import pytest
import torch

import envs
import eval as evaluation
import train
from environments.house import House
from envs import Pool, make_env, tasks
from model import load
from runtime import report
from runtime.testing import (DRESS, MY_ENV, OneRank, SMALL, TINY_HOUSE, TwoRanks, attributes_entry,
                             caches, check_run, checkpoints, on_ranks, on_the_cpu,
                             random_lm, read_lines, run_main, small_config, strong, write_catalogue)
from tools.imitate import random_tiny
from training import run as run_module
from training.run import Run, draw_tasks, rollout_metrics
from training.settings import learner_class


def test_what_training_is_given_keeps_its_own_settings(tmp_path):
    """So no setting exists twice: those of a model and a pool go into the config, a learner has a
    config, and the run's config.json has them all."""
    given = {"iterations": 1, "batch_size": 2, "max_new_tokens": 4, "eval_games": 0, "gamma": 0.5}
    lm = dataclasses.replace(random_tiny(), r_max=3.0, tau_v=2.0)
    pool = Pool(House, {"horizon": 3})
    made = train.settings(lm, pool, out=str(tmp_path / "made"), **given)
    of_learner = train.settings(lm, horizon=5, places=8, out=str(tmp_path / "learner"), **given)
    learner = train.Learner(lm, of_learner)
    for name, config, parts in (("made", made, {"lm": lm, "pool": pool}),
                                ("learner", None, {"learner": learner})):
        assert train.train(config, **parts).model is lm.model
        stored = json.loads((tmp_path / name / "config.json").read_text())
        assert (stored["r_max"], stored["tau_v"], stored["gamma"]) == (3.0, 2.0, 0.5)
        assert stored["horizon"] == (3 if name == "made" else 5)
        assert (stored["places"], stored["dtype"]) == (5 if name == "made" else 8, "float32")
        assert stored["env"] == "house"
        assert len(read_lines(tmp_path / name / "metrics.jsonl")) == 1
        assert (tmp_path / name / "final" / "sapo.json").is_file()
    assert learner.config == of_learner and learner.config.gamma == 0.5
    grouped = learner_class("grpo")(lm, train.settings(
        lm, algo="grpo", group_size=2, optim_state_dtype="bfloat16", out=str(tmp_path / "grouped"),
        **given))
    train.train(learner=grouped)
    stored = json.loads((tmp_path / "grouped" / "config.json").read_text())
    assert (stored["algo"], stored["group_size"]) == ("grpo", 2) and grouped.config.gamma == 0.5
    given |= dict(out=str(tmp_path / "other"))  # the config says sapo, and it is not
    train.train(learner=learner_class("grpo")(lm, train.settings(lm, group_size=2, **given)))
    assert json.loads((tmp_path / "other" / "config.json").read_text())["algo"] == "grpo"
    assert stored["optim_state_dtype"] == grouped.config.optim_state_dtype == "bfloat16"


class Sized(House):
    def __init__(self, size=1):
        super().__init__()


def test_a_screen_that_is_gone_costs_no_iteration(tmp_path, monkeypatch):
    def print_until(*words):
        if "2 of 9" in words[0]:
            raise BrokenPipeError("nobody reads this")

    monkeypatch.setattr(run_module, "print0", print_until)
    config = train.settings(iterations=9, batch_size=2, max_new_tokens=4, eval_games=0, horizon=2,
                            save_every=5, out=str(tmp_path / "run"))
    with pytest.raises(BrokenPipeError, match="nobody reads this"):
        train.train(config)
    assert [*checkpoints(tmp_path / "run")] == [2] == [len(read_lines(
        tmp_path / "run/metrics.jsonl"))]


def test_a_stop_while_the_last_checkpoint_is_written_is_one(tmp_path, monkeypatch):
    save = train.Learner.save

    def save_and_stop(learner, folder):
        signal.raise_signal(signal.SIGTERM)
        save(learner, folder)

    monkeypatch.setattr(train.Learner, "save", save_and_stop)
    config = train.settings(iterations=1, batch_size=2, max_new_tokens=4, eval_games=0, horizon=2,
                            out=str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt):
        train.train(config)
    assert [*checkpoints(tmp_path / "run")] == [1] and not (tmp_path / "run/final").exists()
    assert not [*(tmp_path / "run").glob("*.new")]


def test_a_run_of_a_class_that_nobody_can_import_is_finished(tmp_path):
    class Here(House):
        pass

    config = train.settings(env=Here, iterations=1, batch_size=2, max_new_tokens=4, eval_games=1,
                            horizon=2, out=str(tmp_path / "run"))
    train.train(config)
    assert (tmp_path / "run" / "curves.png").is_file()


def test_what_does_not_fit_together_is_refused(tmp_path):
    """Never two values of one setting that could differ."""
    lm = dataclasses.replace(random_tiny(), r_max=3.0, tau_v=2.0)
    pool = Pool(House, {"horizon": 3})
    config = train.settings(lm, pool, iterations=1)
    learner = train.Learner(lm, config)
    taken = dataclasses.replace(config, out=str(tmp_path))
    older, newer = (type("G", (House,), {}) for _ in range(2))
    (tmp_path / "notes.txt").touch()
    for use, says in (
            (lambda: train.train(lm=random_tiny(), learner=learner), "lm and learner.lm are two"),
            (lambda: train.train(dataclasses.replace(config, lr=1.0), learner=learner),
             "the learner has settings of its own"),
            (lambda: train.train(lm=lm), "train needs a config"),
            (lambda: train.train(learner=train.Learner), "the learner is a class: make it"),
            (lambda: train.settings(pool=Pool(older), env=newer),
             "the pool plays another class .*G than this one"),
            (lambda: train.train(train.Config()), "the config is not complete"),
            (lambda: train.train(taken, lm=lm), "is taken: continue the run in it with --resume"),
            (lambda: train.train(config, lm=random_tiny()), "r_max 3.0, and the model 10.0"),
            (lambda: train.Learner(random_tiny(), config), "r_max 3.0, and the model 10.0"),
            (lambda: train.train(config, lm=lm, pool=Pool(House, {"horizon": 4})),
             "the pool has horizon 4, and the config 3"),
            (lambda: train.train(config, lm=lm, pool=Pool("environments.frozen_lake:FrozenLake")),
             "the pool has .*make it by settings.pool=pool"),
            (lambda: train.settings(lm, r_max=5), "r_max is 5, and that of the model is 3.0"),
            (lambda: train.settings(lm, dtype="bfloat16"), "that of the model is 'float32'"),
            (lambda: train.settings(pool=pool, horizon=5), "horizon is 5, and that of the pool"),
            (lambda: train.settings(pool=pool, env="webshop"), "that of the pool is 'house'"),
            (lambda: train.settings(pool=Pool(Sized, {"size": 4})), "size: there is no such"),
            (lambda: train.settings(lm, wandb="project"), "--wandb needs --out")):
        with pytest.raises(ValueError, match=says):
            use()


@pytest.mark.parametrize("algo", ["sapo", "ppo-turns"])
def test_checkpoint_keeps_the_value_rows_in_float32_and_has_a_format(tmp_path, algo):
    lm = random_lm("qwen2", 1, dtype=torch.bfloat16)
    config = train.settings(lm, algo=algo, beta=0.0)
    learner = learner_class(algo)(lm, config)
    with torch.no_grad():
        lm.value_rows.weight += 1e-5  # which bfloat16 would not hold
    rows = lm.value_rows.weight.detach().clone()
    assert not rows.bfloat16().float().equal(rows)
    learner.save(tmp_path)
    shard, = (torch.load(path) for path in tmp_path.glob("learner-*.pt"))
    assert shard["format"] == train.CHECKPOINT_FORMAT == 2
    assert shard["value_rows"]["weight"].equal(rows)
    plain = load(str(tmp_path), dtype=torch.bfloat16)  # the folder is what the paper says
    assert plain.value_rows.weight.equal(rows.bfloat16().float())
    with torch.no_grad():
        lm.value_rows.weight.zero_()
    learner.restore(tmp_path)
    assert lm.value_rows.weight.equal(rows)
    del shard["format"]  # as before there were formats
    torch.save(shard, tmp_path / "learner-0.pt")
    with pytest.raises(ValueError, match="another version of .*format is 1, .* is 2") as e:
        learner.restore(tmp_path)
    assert "\n" not in str(e.value) and f"--model {tmp_path} --out NEW" in str(e.value)


def test_every_task_occurs_once_per_epoch_and_group_size_times(tmp_path):
    config, ids = small_config(tmp_path, "--algo", "rloo", "--group_size", 2), list("abcdefg")
    config = dataclasses.replace(config, batch_size=6, iterations=14)
    drawn = [game for n in range(15) for game in draw_tasks(ids, config, n)]
    left_out = dataclasses.replace(config, leave_out=["c"])
    others = [game for n in range(4) for game in draw_tasks(ids, left_out, n)][::2]
    once = drawn[::2]
    assert others[:12] == [game for game in once[:14] if game != "c"]
    assert drawn == [game for game in once for _ in range(2)] and once[:7] != once[7:14]
    assert all(sorted(once[n:n + 7]) == ids for n in range(0, 42, 7))


@pytest.mark.parametrize("env, flags", [("house", []), ("webshop", ["--context", "full"])])
def test_run_writes_its_files_and_eval_reproduces_its_evaluation(tmp_path, monkeypatch, capsys, env,
                                                                 flags):
    if env == "webshop":
        products = [DRESS | {"asin": f"B{n:09d}"} for n in range(30)]
        about = {product["asin"]: attributes_entry() for product in products}
        flags = [*flags, "--data", write_catalogue(tmp_path / "shop", products, about)]
    run, categories = tmp_path / "run", envs.env_class(env).categories.values()
    run_main(train, monkeypatch, "--env", env, "--batch_size", 5, "--horizon", 6, "--eval_games", 3,
             "--iterations", 2, "--out", run, *flags)
    assert all({*line["success_by_category"]} == {*categories} for line in check_run(run))
    turn = types.SimpleNamespace(
        won=True, score=1.0, truncated=False, context_overflow=False, category=None, metrics={},
        done=True, invalid=False, admissible=True, action_ids=[1], prompt_ids=[1])
    lm = types.SimpleNamespace(stopped=lambda ids: True)
    metrics = rollout_metrics([turn], lm, {None: "none"}, 2)  # one game was not played
    assert metrics["success_by_category"] == {"none": 1.0} and metrics["success"] == 0.5
    assert "\n| start | 1 | " in capsys.readouterr().out
    # the final weights with the run's settings play as they did at the end of the run
    run_main(evaluation, monkeypatch, "--model", run, "--limit", 3)
    assert json.loads((run / "eval-test.json").read_text())["weights"] == str(run / "final")
    assert "test, T = 0.4, 3 games: success " in capsys.readouterr().out
    played = {(e["task"], *e["responses"]) for e in read_lines(run / "eval-test.jsonl")}
    assert len(played) == 3 and played == {
        (e["task"], *e["responses"]) for e in read_lines(run / "eval.jsonl")
        if e["when"] == "after" and e["temperature"] == 0.4}


@pytest.mark.parametrize("flags", ["", "--algo gigpo --group_size 3", "--algo ppo --context full"])
def test_resumed_run_matches_uninterrupted_run_and_two_ranks_match_one(tmp_path, strong, flags):
    """The games, the random numbers and the global statistics and denominators are the same; groups
    are split over the ranks; a checkpoint holds the critic and its optimizer."""
    every = [*strong, *flags.split(), "--batch_size", 6, "--eval_games", 0, "--mini_batch", 12,
             "--lr_warmup", 4, "--lr_final_fraction", 1]
    for name, start, *more in (("one", OneRank, 2), ("two", TwoRanks, 2), ("cut", OneRank, 1),
                               ("cut", OneRank, 2, "--resume")):
        start(*every, "--out", tmp_path / name, "--iterations", *more).finish()
    critic = ["critic.pt", "critic-0.pt"] if "ppo" in flags else []
    for name in ("model.safetensors", "learner-0.pt", *critic):
        whole, cut = (tmp_path / of / "checkpoint-2" / name for of in ("one", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), name
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for a, b in zip(one, two):
        assert 0 < a["success"] < 1 and abs(a["loss_policy"]) > 1e-3  # something to compare
        assert ("loss_critic" in a) == ("ppo" in flags)
        for key, x in a.items():
            if type(x) is float and not key.startswith("time_"):
                assert b[key] == pytest.approx(x, rel=2e-3, abs=1e-5), key


def test_metrics_are_logged_to_wandb_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for more in (["--iterations", 1], ["--iterations", 2, "--resume"]):
        run_main(train, monkeypatch, "--batch_size", 3, "--horizon", 3, "--eval_games", 0,
                 "--wandb", "sapo", "--out", tmp_path, *more)
    name = f"run-{(tmp_path / 'wandb-id').read_text()}.wandb"
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/{name}"))
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(files) == len(lines) == 2
    for file, line in zip(files, lines):
        for _ in range(3000):  # wandb's own process writes it
            written = file.read_bytes()
            if str(line["entropy"]).encode() in written and b"v_mean" in written:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{file} lacks the last iteration")


def outcome(folder):
    """What a run ended with: weights and metrics, without the seconds."""
    lines = [{k: v for k, v in line.items() if not k.startswith("time_")}
             for line in read_lines(folder / "metrics.jsonl")]
    result = json.loads((folder / "eval.json").read_text())
    return (folder / "final" / "model.safetensors").read_bytes(), lines, result


@pytest.mark.parametrize("run, unharmed, kills, flags", [
    (OneRank, OneRank, (0, 1, 2), []),
    (TwoRanks, TwoRanks, (2,), "--context full --old_logprobs rollout".split())])
def test_run_killed_repeatedly_ends_like_an_uninterrupted_run(tmp_path, strong, run, unharmed,
                                                              kills, flags):
    flags = [*SMALL, *strong, *flags]
    unharmed(*flags, "--out", tmp_path / "whole").finish()
    assert 0 < sum(line["success"] for line in read_lines(tmp_path / "whole/metrics.jsonl")) < 4
    killed, rng = tmp_path / "killed", random.Random(len(kills))
    metrics = killed / "metrics.jsonl"
    for n, lines in enumerate(kills):  # killed after so many iterations, somewhere in the next
        victim = run(*flags, "--out", killed, *["--resume"] * (n > 0))
        while victim.running() and not (metrics.is_file()
                                        and len(metrics.read_text().splitlines()) >= lines):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        victim.kill()
    done = max(checkpoints(killed))
    kept = metrics.read_text().splitlines()[:done]
    unharmed("--resume", "--out", killed).finish()
    assert outcome(killed) == outcome(tmp_path / "whole")
    # these lines have the same seconds, so their iterations were not repeated
    assert done and metrics.read_text().splitlines()[:done] == kept


@pytest.mark.parametrize("run", [OneRank, TwoRanks])
def test_run_stopped_by_a_signal_is_saved_and_resumes(tmp_path, strong, run):
    """Only the last rank gets the signal."""
    flags = [*SMALL, *strong, "--lr_final_fraction", 1, "--save_every", 99]
    out = tmp_path / "stopped"
    stopped, metrics = run(*flags, "--iterations", 99, "--out", out), out / "metrics.jsonl"
    while stopped.running() and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.01)
    stopped.processes[-1].terminate()
    stopped.finish(1)
    done, kept = len(read_lines(metrics)), metrics.read_text()
    assert [*checkpoints(out)] == [done]
    run("--resume", "--iterations", done + 1, "--out", out).finish()
    assert metrics.read_text().startswith(kept)  # with their seconds: they were not repeated
    check_run(out, done + 1)
    run(*flags, "--iterations", done + 1, "--out", tmp_path / "whole").finish()
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("where, done", [("rollout", 1), ("score_all", 2), ("optimizer_step", 2)])
def test_signal_abandons_a_rollout_but_nothing_later(tmp_path, monkeypatch, where, done):
    run, function = tmp_path / "run", getattr(train, where)
    before = signal.getsignal(signal.SIGINT)

    def with_signal(*args, **options):
        if (run / "metrics.jsonl").read_text():  # in the second iteration
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **options)

    monkeypatch.setattr(train, where, with_signal)
    with pytest.raises(SystemExit, match="interrupted"):
        run_main(train, monkeypatch, *SMALL, "--save_every", 99, "--out", run)
    assert [*checkpoints(run)] == [done] == [len(read_lines(run / "metrics.jsonl"))]
    assert signal.getsignal(signal.SIGINT) is before


def test_stopped_training_without_a_folder_says_that_nothing_is_saved(monkeypatch, capsys):
    lm = random_tiny()
    config = train.settings(lm, iterations=2, batch_size=2, horizon=3, max_new_tokens=4,
                            eval_games=0)
    score_all = train.score_all
    monkeypatch.setattr(train, "score_all", lambda *args: (
        os.kill(os.getpid(), signal.SIGTERM), score_all(*args))[1])
    with pytest.raises(KeyboardInterrupt):
        train.train(config, lm=lm)
    assert "nothing is saved, because config.out is None" in capsys.readouterr().out


def test_ranks_whose_prompts_are_all_too_long_wait_for_the_others(tmp_path):
    env, chat = make_env("house"), load(TINY_HOUSE).chat
    ids, length = tasks("house", "train"), {0: 0, 1: 0}
    flags = ["--batch_size", 2, "--iterations", 1, "--horizon", 2, "--eval_games", 0, "--seed", 0]
    while not length[0] > length[1]:  # of the first prompts of rank 0 and of rank 1
        flags[-1] += 1
        config = train.parse([*map(str, flags)])
        for rank, task in enumerate(draw_tasks(ids, config, 0)):
            prompt = env.prompt_builder(*env.reset(task)).window_prompt()
            length[rank] = len(chat.encode_user_turn(prompt))
    out = tmp_path / "run"
    TwoRanks(*flags, "--max_prompt", length[0] - 1, "--out", out).finish()
    line, = read_lines(out / "metrics.jsonl")
    assert (line["episodes"], line["context_overflow"] >= 0.5) == (2, True)
    assert line["turns"] > 0 and not (out / "transcripts").exists()  # rank 0 has no episode


@pytest.mark.parametrize("first, flags", [
    (TwoRanks, []), (OneRank, ["--dtype", "bfloat16", "--optim_state_dtype", "bfloat16"])])
def test_run_resumes_in_16_bits_and_on_another_number_of_ranks(tmp_path, strong, first, flags,
                                                               monkeypatch):
    flags = [*strong, *flags, "--batch_size", 6, "--lr_final_fraction", 1, "--eval_games", 0,
             "--mini_batch", 12]
    OneRank(*flags, "--iterations", 2, "--out", tmp_path / "whole").finish()
    first(*flags, "--iterations", 1, "--out", tmp_path / "cut").finish()
    shards = [*tmp_path.glob("cut/checkpoint-1/learner-*.pt")]
    assert len(shards) == (2 if first is TwoRanks else 1)
    for name, says in ((shards[-1].name, "the optimizer state of one rank"),
                       ("sapo.json", "lacks sapo"),
                       (shards[0].name, f"{shards[0].name} is damaged"),
                       ("model.safetensors", "cannot load model .*checkpoint-1")):
        shutil.copytree(tmp_path / "cut", tmp_path / "torn")
        part = tmp_path / "torn/checkpoint-1" / name
        whole = part.read_bytes()
        part.unlink()
        if says not in ("the optimizer state of one rank", "lacks sapo"):
            part.write_bytes(whole[:-999])
        with pytest.raises(SystemExit, match=says):
            run_main(train, monkeypatch, "--iterations", 2, "--out", tmp_path / "torn", "--resume")
        shutil.rmtree(tmp_path / "torn")
    kept = (tmp_path / "cut/metrics.jsonl").read_text()
    OneRank("--iterations", 2, "--out", tmp_path / "cut", "--resume").finish()
    assert (tmp_path / "cut/metrics.jsonl").read_text().startswith(kept)
    (_, whole), (_, cut) = (read_lines(tmp_path / name / "metrics.jsonl")
                            for name in ("whole", "cut"))
    numbers = [key for key, x in whole.items() if type(x) is float and "time" not in key]
    assert 0 < whole["success"] < 1 and abs(whole["loss_policy"]) > 1e-3
    for key in numbers:
        assert cut[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6), key
    if first is OneRank:
        weights = (tmp_path / name / "final/model.safetensors" for name in ("whole", "cut"))
        assert len({path.read_bytes() for path in weights}) == 1


def test_resumed_run_keeps_its_settings(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--lr", 1e-4, "--out", run)
    with pytest.raises(SystemExit, match="another --out"):
        run_main(train, monkeypatch, "--model", run / "final", "--out", run)
    with pytest.raises(SystemExit, match="--lr was 0.0001"):
        run_main(train, monkeypatch, "--resume", "--out", run, "--lr", 2e-4)
    run_main(train, monkeypatch, "--resume", "--out", run, "--iterations", 2,
             "--max_num_seqs", 2)
    assert [line["iteration"] for line in read_lines(run / "metrics.jsonl")] == [0, 1]
    stored = json.loads((run / "config.json").read_text())
    assert (stored["lr"], stored.pop("value_lr_factor")) == (1e-4, 10)
    (run / "config.json").write_text(json.dumps(stored))  # a run from before there was this setting
    assert train.settings(out=str(run), resume=True).value_lr_factor == 1
    assert train.settings(out=str(run), resume=True, value_lr_factor=1).value_lr_factor == 1
    with pytest.raises(ValueError, match="--value_lr_factor was 1.0"):
        train.settings(out=str(run), resume=True, value_lr_factor=10)
    with pytest.raises(SystemExit, match="there is no run in"):
        run_main(train, monkeypatch, "--resume", "--out", tmp_path / "nwe")
    with pytest.raises(SystemExit, match="there is no run in"):
        run_main(train, monkeypatch, "--resume", "--out", tmp_path / "nwe", "--leave_out", "x")
    # with its settings, --resume starts a run that does not exist: a job can always pass it
    run_main(train, monkeypatch, *SMALL, "--iterations", 1, "--out", tmp_path / "new", "--resume")
    assert (tmp_path / "new" / "final").is_dir()


def test_resuming_with_another_reference_is_refused(tmp_path, monkeypatch):
    lm = load(TINY_HOUSE)
    flags = [*SMALL, "--model", tmp_path / "start", "--out", tmp_path / "run"]
    for iterations in (1, 2):
        lm.save(tmp_path / "start")
        run_main(train, monkeypatch, *flags, "--iterations", iterations, "--resume")
    lm.model.get_input_embeddings().weight.data += 0.1
    lm.save(tmp_path / "start")
    kept = (tmp_path / "run/final/model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="began with other weights than these"):
        run_main(train, monkeypatch, *flags, "--iterations", 3, "--resume")
    assert (tmp_path / "run/final/model.safetensors").read_bytes() == kept
    config = train.settings(lm, beta=0.0)
    with_kl = train.Learner(lm, dataclasses.replace(config, beta=0.1))
    train.Learner(lm, config).save(tmp_path)
    with pytest.raises(ValueError, match="has beta = 0, so it kept no reference"):
        with_kl.restore(tmp_path)


def test_own_environment_trains_and_is_evaluated(tmp_path, monkeypatch):
    """Its module is in the working directory, and it is played in this process and by a worker. Its
    tasks come from a generator, its types are NumPy's, and its text has a lone surrogate."""
    mine = MY_ENV.replace('"won": self.at == self.goal', '"won": np.bool_(self.at == self.goal)')
    mine = mine.replace("return [n for n in range(5000) if (n % 5 == 0) == (split == \"test\")]",
                        "return (n for n in np.arange(50) + 50 * (split == \"test\"))")
    mine = mine.replace("Ice:", "Ice \\udcff:")
    assert mine.count("np.") == 2 and mine.count("udcff") == 1
    (tmp_path / "mine.py").write_text("import numpy as np\n" + mine)
    monkeypatch.chdir(tmp_path)
    for workers in (0, 1):
        run = tmp_path / f"runs/FrozenLake-tiny-batch_size=4-eval_games=4-horizon=3-{workers}"
        monkeypatch.setattr(envs, "default_workers", lambda name: workers)
        run_main(train, monkeypatch, "--env", "mine:FrozenLake", "--batch_size", 4,
                 "--iterations", 1, "--eval_games", 4, "--horizon", 3, "--seed", workers)
        line, = read_lines(run / "metrics.jsonl")
        assert line["episodes"] == 4 and line["turns"] >= 8
    run_main(evaluation, monkeypatch, "--model", run)
    assert (run / "eval-test.json").is_file()
    for name, why in (("mine:Door", "has no attribute 'Door'"), ("yours:FrozenLake", "No module"),
                      ("json:JSONDecoder", "inherit from envs.Env"), ("lake", "MODULE:CLASS")):
        with pytest.raises(SystemExit, match=why):
            run_main(train, monkeypatch, "--env", name)


COUNTED = """
import numpy
from environments.house import House

class Counted(House):
    def reset(self, task):
        self.calls = 0
        obs, info = super().reset(task)
        return obs, info | {"metrics": {"number": float(task.split("-")[-1])}}

    def step(self, action):
        self.calls += 1
        *answer, info = super().step(action)
        metrics = {"calls": numpy.int64(self.calls)}
        if self.calls > 2 and action.startswith("go"):
            metrics["gone"] = True
        return *answer, info | {"metrics": metrics}
"""


def test_numbers_of_an_environment_are_averaged_over_the_episodes_that_have_them(
        tmp_path, monkeypatch, capsys):
    (tmp_path / f"{tmp_path.name}.py").write_text(COUNTED)
    monkeypatch.chdir(tmp_path)
    logged, log = [], Run.log
    monkeypatch.setattr(Run, "log", lambda run, iteration, turns, metrics: (
        logged.append(turns), log(run, iteration, turns, metrics)))
    run_main(train, monkeypatch, "--env", f"{tmp_path.name}:Counted", "--model",
             TINY_HOUSE, "--batch_size", 5, "--horizon", 6, "--eval_games", 3, "--iterations", 2,
             "--out", "run", "--eval_every", 1)
    for line, turns in zip(check_run(tmp_path / "run"), logged):
        ends = [turn for turn in turns if turn.done]
        assert line["env/calls"] == sum(turn.turn + 1 for turn in ends) / 5
        assert line["env/number"] == sum(int(turn.task.split("-")[-1]) for turn in ends) / 5
        gone = {turn.traj for turn in turns if turn.turn > 1 and turn.action.startswith("go")}
        assert line.get("env/gone") == (1 if gone else None)
        assert all(turn.metrics["calls"] == turn.turn + 1 for turn in turns)
    results = json.loads((tmp_path / "run/eval.json").read_text())
    for when in "before", "after":
        records = [r for r in read_lines(tmp_path / "run/eval.jsonl")
                   if r["when"] == when and r["temperature"] == 0.4]
        key = report.key_of("env/calls", when)
        assert results[key] == sum(r["turns"] for r in records) / 3
    run_main(evaluation, monkeypatch, "--model", "run", "--limit", 3)
    assert f", env/calls {results['env/calls']:.4g}, " in capsys.readouterr().out
    again = json.loads((tmp_path / "run/eval-test.json").read_text())
    assert again["env/calls"] == results["env/calls"]
    for flags in (["--table", "run"], ["--plot", "run"], ["--table", "run", "--reach", 0.5]):
        run_main(evaluation, monkeypatch, *flags)


def test_run_warns_once_of_what_keeps_it_from_learning(tmp_path, monkeypatch, capsys):
    """The house's model on a lake, and unsuitable settings; usual settings give no warning."""
    lake = ["--env", "environments.frozen_lake:FrozenLake", "--max_new_tokens", 6]
    for flags, says in ((lake, ["a fifth of the actions are admissible",
                                "--max_new_tokens 6 truncates",
                                "no success in three iterations"]),
                        (["--r_max", 1], ["a return exceeds R_max"]), ([], []),
                        (["--max_prompt", 29], [
                            " has more than 29 tokens; such episodes count as lost. Raise "
                            "--max_prompt", "no success in three"])):
        out = tmp_path / str(len(says))
        run_main(train, monkeypatch, "--iterations", 3, "--batch_size", 6, "--horizon", 8,
                 "--eval_games", 0, "--out", out, *flags)
        found = [line for line in capsys.readouterr().out.splitlines() if "Warning" in line]
        assert len(found) == len(says) and all(part in line for part, line in zip(says, found))


def test_best_weights_in_validation_are_kept(tmp_path, monkeypatch, capsys):
    """--eval_every writes an entry into metrics.jsonl, and best/ holds the first of the best: here
    those after iteration 2."""
    success, run = [0.25, 0.5, 0.5, 0.25], tmp_path / "run"
    results, evaluate = iter(success), Run.evaluate

    def evaluate_with_these_results(*args):
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "report", lambda records: {"success": next(results)})
            return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", evaluate_with_these_results)
        run_main(train, monkeypatch, *SMALL, "--eval_every", 1, "--out", run)
    assert [line["validation"] for line in read_lines(run / "metrics.jsonl")] == success
    assert capsys.readouterr().out.count("the best so far") == 2
    best, final = (run / part / "model.safetensors" for part in ("best", "final"))
    assert best.read_bytes() != final.read_bytes()
    for part in ("best", "final", "checkpoint-4"):  # each is evaluated as the run was
        args = evaluation.make_parser("").parse_args(["--model", f"{run}/{part}"])
        found, settings = evaluation.complete(args)
        assert found == run and settings.weights == f"{run}/{part}"
        assert (settings.env, settings.horizon, settings.max_new_tokens) == ("house", 4, 16)
        assert settings.max_prompt == 8192
    monkeypatch.chdir(run)
    for flags, path, limit in ((["--model", run, "--context", "full"], run, None),
                               (["--model", "tiny"], None, 2048)):  # not the run it stands in
        args = evaluation.make_parser("").parse_args([*map(str, flags)])
        found, settings = evaluation.complete(args)
        assert (found, settings.max_prompt) == (path, limit)


def test_best_of_a_resumed_run_is_that_of_all_its_iterations(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Run, "evaluate",
                        lambda run, iteration: seen.append(len(run.lines)) or {"validation": 0.5})
    for more in (["--iterations", 1], ["--iterations", 2, "--resume"]):
        run_main(train, monkeypatch, *SMALL, "--eval_every", 1, *more, "--out", tmp_path / "run")
    assert seen == [0, 1]  # lines of metrics.jsonl that the best is compared with


@pytest.mark.parametrize("name", ["house", "alfworld", "webshop", "webshop-human"])
def test_what_a_model_is_chosen_by_is_not_reported(name):
    env = envs.env_class(name)
    assert env.validation[0] not in ("train", env.held_out[0]) and env.validation[1] > 0


@pytest.mark.parametrize("validation", [("validation", 5), None])
def test_games_that_are_played_while_training(tmp_path, monkeypatch, validation):
    """Those of validation, whose best model is kept. An environment without them has a curve of
    held-out games, and no RUN/best, because held-out games are for reports alone."""
    played = []

    def play(sampler, ids, pool, *args, **kwargs):
        played.append(ids)
        return real_play(sampler, ids, pool, *args, **kwargs)

    real_play = evaluation.play
    monkeypatch.setattr(evaluation, "play", play)
    monkeypatch.setattr(House, "validation", validation)
    run = tmp_path / "run"
    config = train.settings(env="house", model="tiny", iterations=2, batch_size=2, horizon=3,
                            eval_games=4, eval_every=2, mini_batch=2, out=str(run))
    train.train(config)
    split, number = validation or ("test", 4)
    expected = evaluation.evenly_spaced(envs.tasks("house", split), number)
    held_out = evaluation.evenly_spaced(envs.tasks("house", "test"), 4)
    assert played == [held_out] * 2 + [expected] + [held_out] * 2  # two temperatures
    first, second = read_lines(run / "metrics.jsonl")
    name = "validation" if validation else "held_out"
    assert name in second and not {"validation", "held_out"} & {*first} and second[name] >= 0
    assert (run / "best").exists() == bool(validation)
    report.draw(report.group_runs([str(run)]), tmp_path / "curves.png")


@pytest.mark.parametrize("own, says", [
    ({"held_out": ("train", 4)}, "4000 tasks, such as 00001, are both trained on and held out"),
    ({"validation": ("train", 4)}, "4000 tasks, .*, are both trained on and for validation"),
    ({"validation": ("test", 4)}, "1000 tasks, .*, are both held out and for validation")])
def test_tasks_that_are_used_twice_are_refused(own, says):
    with pytest.raises(ValueError, match=says):
        train.train(train.settings(env=type("Mine", (House,), own), eval_every=1))


@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_error_of_an_environment_loses_no_finished_iteration(tmp_path, monkeypatch, where):
    class Failing(House):
        def step(self, action):
            lines = tmp_path / "run" / "metrics.jsonl"
            if len(lines.read_text().splitlines() if lines.exists() else ()) == 2:
                if playing == [where]:
                    raise RuntimeError("the game broke")
            return super().step(action)

    playing, evaluate = ["rollout"], Run.evaluate

    def watched(run, iteration):
        playing[:] = ["evaluation"]
        result = evaluate(run, iteration)
        playing[:] = ["rollout"]
        return result

    monkeypatch.setattr(Run, "evaluate", watched)
    config = train.settings(env=Failing, iterations=5, batch_size=4, horizon=4, eval_games=2,
                            eval_every=1, save_every=99, out=str(tmp_path / "run"))
    with pytest.raises(envs.GameError, match="RuntimeError: the game broke"):
        train.train(config)
    done = {"rollout": 2, "evaluation": 3}[where]  # the third iteration was finished
    assert [*checkpoints(tmp_path / "run")] == [done]
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == done


def train_with_a_game_that_fails(rank, failing, done, given):
    """In iteration `done`, counted from 0, the games of the rank `failing` fail."""
    metrics = Path(given["out"]) / "metrics.jsonl"

    class Failing(House):
        def step(self, action):
            finished = metrics.read_text().splitlines() if metrics.exists() else ()
            if rank == failing and len(finished) == done:
                raise RuntimeError("the game broke")
            return super().step(action)

    says = "the game broke" if rank == failing else f"rank {failing}: .*the game broke"
    with pytest.raises(envs.GameError, match=says):
        train.train(train.settings(env=Failing, **given))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("done", [0, 2])
def test_failing_game_of_one_of_two_ranks_stops_both_and_costs_no_iteration(tmp_path, failing,
                                                                            done):
    given = {"iterations": 5, "batch_size": 4, "horizon": 4, "eval_games": 0, "save_every": 99,
             "out": str(tmp_path / "run")}
    on_ranks(train_with_a_game_that_fails, 2, failing, done, given)
    assert [*checkpoints(tmp_path / "run")] == [2] * (done == 2)


def test_run_is_resumed_with_another_number_of_iterations(tmp_path, monkeypatch, capsys):
    flags = [*SMALL, "--eval_games", 0, "--lr_final_fraction", 0.5, "--out", tmp_path / "run"]
    run_main(train, monkeypatch, *flags, "--iterations", 2)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("[!.]*")
             if path.is_file()}
    with pytest.raises(SystemExit, match="--iterations 1: the run in .*run has done 2 already"):
        run_main(train, monkeypatch, *flags, "--iterations", 1, "--resume")
    assert files == {path: path.read_bytes() for path in files}
    capsys.readouterr()
    for iterations, jumps in ((2, 0), (3, 1), (3, 0)):
        run_main(train, monkeypatch, *flags, "--iterations", iterations, "--resume")
        assert capsys.readouterr().out.count("learning rate, which decays over all of") == jumps


def test_won_episodes_without_any_reward_are_warned_of(tmp_path, capsys):
    class Unpaid(House):
        def step(self, action):
            obs, _, terminated, truncated, info = super().step(action)
            return obs, 0.0, terminated, truncated, info | {"won": True}

    train.train(train.settings(env=Unpaid, iterations=3, batch_size=2, horizon=3, eval_games=0))
    out = capsys.readouterr().out
    assert out.count("every reward is 0: nothing can be learned") == 1 == out.count("Warning")


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39, None])
def test_reward_of_a_turn_that_is_not_finite_is_named(reward):
    lm = random_tiny()
    config = train.settings(lm, batch_size=2, horizon=3, max_new_tokens=4)
    pool, sampler = Pool(House, {"horizon": 3}), evaluation.sampler_for(lm, config)
    turns = train.rollout(sampler, tasks("house", "train")[:2], pool)
    turns[4] = dataclasses.replace(turns[4], reward=reward)
    with pytest.raises(ValueError, match="reward of turn 1 of trajectory 1 is .*not a finite"):
        train.Learner(lm, config).learn(turns, 0)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Games that fail if there is a file of their name -> (flags of a run, its folder, a game of
    its third iteration, one of its evaluations)."""
    def make(where, failure):
        name = f"{tmp_path.name}:FrozenLake"
        text = MY_ENV.replace("    def tasks", "    patience = 1\n\n    def tasks")
        text = text.replace("        rng =", "        self.game = str(task)\n        rng =")
        assert text.count(where) == 1
        text = text.replace(where, f"{where}\n        if os.path.exists(self.game):"
                                   f"\n            {failure}")
        (tmp_path / f"{tmp_path.name}.py").write_text("import os, time\n" + text)
        flags = ["--env", name, "--batch_size", 2, "--iterations", 3, "--horizon", 3,
                 "--eval_games", 4, "--save_every", 99, "--max_new_tokens", 6, "--out", "run"]
        config = train.parse([*map(str, flags)])
        game = draw_tasks(tasks(name, "train"), config, 2)[0]
        return flags, tmp_path / "run", game, evaluation.evenly_spaced(tasks(name, "test"), 4)[2]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(envs, "default_workers", lambda name: 1)
    return make


@pytest.mark.parametrize("where, failure, says", [
    ("self.turn += 1", "raise GeneratorExit", " failed in turn 1: GeneratorExit: "),
    ("self.turn += 1", "os._exit(1)", "status 1, .* at game {} in turn 1. These games waited"),
    ("self.turn += 1", "time.sleep(1e6)", "no answer for 1 seconds, .* at game {} in turn 1. "),
    ("self.turn = 0", "raise SystemExit(2)", "game {} failed: SystemExit: 2")])
def test_game_that_always_fails_is_named_and_can_be_left_out(monkeypatch, broken, where, failure,
                                                             says):
    """It loses no finished iteration, and the run goes on by what the message says."""
    flags, run, game, _ = broken(where, failure)
    open(str(game), "w").close()
    with pytest.raises(SystemExit, match=says.format(game)) as stop:
        run_main(train, monkeypatch, *flags)
    assert f". --leave_out {game} --resume --out {run.name} goes on without it" in str(stop.value)
    assert [*checkpoints(run)] == [2] == [len(read_lines(run / "metrics.jsonl"))]
    kept = (run / "metrics.jsonl").read_text()
    run_main(train, monkeypatch, "--leave_out", game, "--resume", "--out", run)
    assert (run / "metrics.jsonl").read_text().startswith(kept)
    assert len(read_lines(run / "metrics.jsonl")) == 3 and (run / "final").is_dir()


def test_first_game_that_fails_can_be_left_out_by_what_the_message_says(monkeypatch, broken):
    """There is no run to resume then."""
    flags, run, *_ = broken("self.turn = 0", "raise ValueError('no')")
    first = tasks(f"{run.parent.name}:FrozenLake", "train")[0]
    open(str(first), "w").close()
    with pytest.raises(SystemExit, match=f"game {first} failed: .*With --leave_out {first} it is"):
        run_main(train, monkeypatch, *flags)
    assert not (run / "config.json").exists()
    run_main(train, monkeypatch, *flags, "--leave_out", first)
    assert (run / "final").is_dir()


def test_games_left_out_are_those_of_the_run_and_of_its_evaluations(monkeypatch, broken):
    flags, run, game, held_out = broken("self.turn += 1", "1 / 0")
    with pytest.raises(SystemExit, match="--leave_out x: there is no such task"):
        run_main(train, monkeypatch, *flags, "--leave_out", game, "x")
    open(str(game), "w").close()
    open(str(held_out), "w").close()
    with pytest.raises(SystemExit, match=f". --leave_out {held_out} --resume --out {run.name} "):
        run_main(train, monkeypatch, *flags)
    with pytest.raises(SystemExit, match=f". --leave_out {game} --resume --out {run.name} "):
        run_main(train, monkeypatch, *flags, "--leave_out", held_out, "--resume")
    played = [line["task"] for line in json.loads((run / "before.json").read_text())["0.4"]]
    with pytest.raises(SystemExit, match="--leave_out leaves no task to play"):  # after training
        run_main(train, monkeypatch, "--resume", "--out", run, "--leave_out", *played)
    for _ in range(2):  # a job can always pass it
        run_main(train, monkeypatch, "--leave_out", game, "--resume", "--out", run)
        stored = json.loads((run / "config.json").read_text())
        assert stored["leave_out"] == [str(held_out), str(game)]
    played = [line["task"] for line in read_lines(run / "eval.jsonl") if line["when"] == "after"]
    assert len(played) == 3 and held_out not in played
    # eval.py leaves out what the run has left out, and what it is told to
    evaluate = ["--model", run, "--limit", 4]
    for more, left in (([], played), (["--leave_out", played[0]], played[1:])):
        run_main(evaluation, monkeypatch, *evaluate, *more)
        assert [line["task"] for line in read_lines(run / "eval-test.jsonl")] == left
    for ids, says in ((["x"], "--leave_out x: there is no such task"),
                      (played, "--leave_out leaves no task to play"),
                      ([], f". --leave_out {held_out} plays the others")):
        with pytest.raises(SystemExit, match=says):
            run_main(evaluation, monkeypatch, *evaluate, "--leave_out", *ids)
