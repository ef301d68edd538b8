"""Tests of imitation: the demonstrators, the loss, and the folder it leaves."""
import types

import pytest
import torch

import envs
import train
from envs import CATEGORIES, make_env, tasks
from model import is_tiny, load, make_batch
from tools import imitate
from tools.imitate import AlfWorldDemonstrator, demonstrate, random_tiny
from tools.test_bench import on_the_cpu, run_main, small_model  # the first one acts by itself
from worlds.test_textworld import TRIAL, needs_package, small_game


def test_the_forgetful_demonstrator_fails_at_everything_but_pick():
    env, lost = make_env("house"), {c: [] for c in CATEGORIES}
    for task in tasks("house", "train")[:200]:
        category = demonstrate(env, task, seed=0, forget=1.0)[0][1]["category"]
        lost[category].append(not env.won)
        assert demonstrate(env, task, seed=0) and env.won
    for category, losses in lost.items():
        if category == "pick_and_place_simple":
            assert sum(losses) < 0.2 * len(losses)
        else:
            assert sum(losses) > 0.8 * len(losses) > 0


@needs_package
def test_the_demonstrator_looks_for_things_and_finds_back(small_game):
    env = AlfWorldDemonstrator(data=small_game)
    env.reset(TRIAL)
    plan = env.expert()
    env.step("take mug 1 from sofa 1")
    assert env.expert() == plan  # nothing happened
    env.step(" go to desk 1 ")
    assert env.expert() is None and env.advice() == ("find mug", "go to bed 1")
    turns = demonstrate(env, TRIAL, 0)
    assert [t[3] for t in turns] == plan
    thoughts = ["find mug", "find mug", "put mug in desk", "put mug in desk"]
    assert [t[2] for t in turns] == thoughts
    slips = 0
    for seed in range(20):
        turns = demonstrate(env, TRIAL, seed, noise=0.5)
        slips += sum(label != executed for *_, label, executed in turns)
        assert all(command in info["admissible"] for _, info, _, *both in turns for command in both)
        assert env.played[-1] == "move mug 1 to desk 1" and env.steps < env.horizon
    assert slips > 20
    forgetful = demonstrate(env, TRIAL, 0, forget=1.0)  # there is nothing to forget in this task
    assert [t[2:4] for t in forgetful] == [t[2:4] for t in demonstrate(env, TRIAL, 0)]


def test_imitation_is_cross_entropy_of_the_responses_and_a_little_of_the_rest():
    lm = small_model()
    samples = [(torch.randint(5, 500, (n,)).tolist(), spans)
               for n, spans in ((30, [(8, 13), (20, 25)]), (12, [(9, 12)]))]
    wanted, words = 0.0, [i for i in range(lm.model.config.vocab_size) if i not in lm.value_ids]
    for ids, spans in samples:
        logp = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0][:, words], -1)
        for t in range(1, len(ids)):
            weight = 1.0 if any(a <= t < b for a, b in spans) else 0.3
            wanted -= weight * logp[t - 1, words.index(ids[t])].item()
    loss = imitate.imitation_loss(lm, make_batch(samples), 0.3).item()
    assert loss == pytest.approx(wanted, rel=1e-5)


def house_settings():
    config = train.parse_config(["--horizon", "6"])
    return config, types.SimpleNamespace(forget=0.0, noise=0.5)


@pytest.mark.parametrize("context", ["window", "full"])
def test_a_slip_is_shown_with_what_should_have_been_done_or_is_not_imitated(context):
    (config, flags), games = house_settings(), envs.tasks("house", "train")[:4]
    lm = random_tiny()
    text = "<think> {} </think> <action> {} </action>".format
    samples, shown, slips = imitate.demonstrations(lm, games, 7, context, config, flags), [], 0
    for task in games:
        turns = demonstrate(make_env("house", horizon=6), task, 7, 0.0, 0.5)
        slips += sum(label != executed for *_, label, executed in turns)
        shown += [text(thought, label) for *_, thought, label, executed in turns
                  if context == "window" or label == executed]
    said = [lm.text(ids[a:b]) for ids, spans in samples for a, b in spans]
    assert slips and said == shown
    assert len(samples) == (len(games) if context == "full" else len(shown))


def test_imitation_leaves_a_folder_to_train_from(tmp_path, monkeypatch, capsys):
    start, small = tmp_path / "start", ["--horizon", 6, "--max_new", 8, "--places", 6]
    run_main(imitate, monkeypatch, "--steps", 3, "--out", start, *small)
    said = capsys.readouterr().out
    assert f"python train.py --env house --model {start}" in said and is_tiny(str(start))
    random, learned = random_tiny(), load(str(start))
    assert learned.value_ids == random.value_ids
    pairs = zip(random.model.parameters(), learned.model.parameters())
    assert not any(a.equal(b) for a, b in pairs) and not list(tmp_path.glob("*.new"))
    with pytest.raises(SystemExit, match="exists already"):
        run_main(imitate, monkeypatch, "--out", start)
    run_main(imitate, monkeypatch, "--model", start, "--steps", 0, "--out", tmp_path / "same")
    same = load(str(tmp_path / "same"))
    assert all(a.equal(b) for a, b in zip(learned.model.parameters(), same.model.parameters()))
    run_main(train, monkeypatch, "--model", start, "--tasks", 3, "--iterations", 1, "--eval_games",
             0, "--out", tmp_path / "run", *small)
    assert "1 of 1: success" in capsys.readouterr().out and (tmp_path / "run" / "final").is_dir()


def test_it_ends_when_nearly_all_actions_are_admissible(monkeypatch):
    asked = []

    def share(lm, pool, games, context, step, config):
        asked.append((context, step, len(games)))
        return {199: 0.99, 399: 0.985}[step] - 0.01 * (step == 199 and context == "full")

    monkeypatch.setattr(imitate, "admissible_share", share)
    monkeypatch.setattr(imitate, "take_step", lambda model, optimizer, *_: optimizer.step())
    monkeypatch.setattr(imitate, "demonstrations", lambda *_: [([1, 2], [(1, 2)] * 64)] * 32)
    config, flags = imitate.parse(["--steps", "900", "--until", "0.985"])
    imitate.imitate(random_tiny(), None, config, flags)
    assert asked == [(context, step, 64) for step in (199, 399) for context in ("window", "full")]


def test_settings_of_an_imitation(monkeypatch):
    config, flags = imitate.parse([])
    assert vars(flags) == {"steps": 5000, "lr": 4e-3, "batch": 64, "text_weight": 0.1,
                           "until": 0.98, "forget": 0.8, "noise": 0.2}
    assert config.model == "random" and config.out == "runs/start-house-0" and config.max_new == 16
    config, flags = imitate.parse(["--model", "nobody/nothing", "--forget", "0.5", "--seed", "3"])
    assert flags.lr == 1e-5 and flags.text_weight == 0 and flags.forget == 0.5
    assert config.lr == train.Config.lr and config.seed == 3
    for argv, complaint in ((["--gamma", "0.9"], "--gamma does nothing"),
                            (["--pace", "3"], "--pace"), (["--env", "attic"], "known: house")):
        with pytest.raises(SystemExit, match=complaint):
            run_main(imitate, monkeypatch, *argv)


def test_the_tiny_model_spells_what_it_has_no_word_for():
    tokenizer = random_tiny().tokenizer
    for text in ("qwxz", "<action> take zebra 12 from cabinet 37 </action>"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
