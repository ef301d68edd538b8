"""Tests of tools/imitate.py."""
import json
import math
import os
import random
import re
import signal

import numpy as np
import pytest
import torch

import envs
import train
from environments import frozen_lake
from envs import make_env, tasks
from hf.chat import Chat
from model import load, make_batch
from runtime.checkpoint import ROOT
from runtime.testing import TRIAL, needs_package, on_the_cpu, random_lm, run_main, small_game
from tools import imitate
from tools.imitate import AlfWorldDemonstrator, demonstrate, random_tiny


def test_the_forgetful_demonstrator_fails_at_everything_but_pick():
    env, wins = make_env("house"), {}
    for task in tasks("house", "train")[:200]:
        category = demonstrate(env, task, seed=0, forget=1.0)[0].info["category"]
        wins.setdefault(category, []).append(env.room.won)
        assert demonstrate(env, task, seed=0) and env.room.won
    pick = wins.pop("pick_and_place_simple")
    assert sum(pick) > 0.8 * len(pick) > 0 and len(wins) == 5
    assert all(sum(won) < 0.2 * len(won) for won in wins.values())


@needs_package
def test_demonstrator_searches_and_recovers_from_random_commands(small_game):
    env = AlfWorldDemonstrator(data=small_game)
    env.reset(TRIAL)
    plan = env.expert()
    env.step(" go to desk 1 ")
    assert env.expert() is None and env.advice() == ("find mug", "go to bed 1")
    turns = demonstrate(env, TRIAL, 0)
    thoughts = ["find mug"] * 2 + ["put mug in desk"] * 2
    assert [(turn.thought, turn.label) for turn in turns] == [*zip(thoughts, plan)]
    random_turns = 0
    for seed in range(20):
        turns = demonstrate(env, TRIAL, seed, noise=0.5)
        random_turns += sum(turn.label != turn.executed for turn in turns)
        assert all({turn.label, turn.executed} <= {*turn.info["admissible"]} for turn in turns)
        assert env.played[-1] == "move mug 1 to desk 1" and env.steps < env.horizon
    assert random_turns > 20


def test_imitation_loss_is_weighted_cross_entropy():
    lm = random_lm("qwen2", 1)
    samples = [(torch.randint(5, 500, (n,)).tolist(), spans)
               for n, spans in ((30, [(8, 13), (20, 25)]), (12, [(9, 12)]))]
    expected, words = 0.0, [i for i in range(lm.model.config.vocab_size) if i not in lm.value_ids]
    for ids, spans in samples:
        logp = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0][:, words], -1)
        for t in range(1, len(ids)):
            weight = 1.0 if any(a <= t < b for a, b in spans) else 0.3
            expected -= weight * logp[t - 1, words.index(ids[t])].item()
    loss = imitate.imitation_loss(lm, make_batch(samples), 0.3).item()
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", ["window", "full"])
def test_random_commands_are_not_imitated(context):
    config, lm = train.parse(["--horizon", "6"]), random_tiny()
    for task in tasks("house", "train")[:4]:
        turns = demonstrate(make_env("house", horizon=6), task, 7, noise=0.5)
        assert any(turn.label != turn.executed for turn in turns)
        samples = imitate.samples_of(lm.chat, turns, context, config)
        responses = [lm.text(ids[start:end]) for ids, spans in samples for start, end in spans]
        assert responses == [f"<think> {turn.thought} </think> <action> {turn.label} </action>"
                        for turn in turns if context == "window" or turn.label == turn.executed]
        assert len(samples) == (1 if context == "full" else len(turns))


@pytest.mark.parametrize("flags", ["--until 0.985", "--until_success 0.4"])
def test_imitation_stops_at_until_or_until_success(monkeypatch, flags):
    measured = []

    def measure(sampler, games, pool, step, config):
        measured.append((sampler.context, step, len(games)))
        return (0.98, 0.3) if measured[-1][:2] == ("full", 199) else (0.99, 0.4)

    monkeypatch.setattr(imitate, "measure", measure)
    monkeypatch.setattr(imitate, "train_step", lambda model, optimizer, *_: optimizer.step())
    monkeypatch.setattr(imitate, "batches", lambda *_: iter([[([1, 2], [(1, 2)])]] * 900))
    imitate.imitate(random_tiny(), None, *imitate.parse(flags.split()))
    assert measured == [("window", 199, 64), ("full", 199, 64), ("window", 399, 64),
                        ("full", 399, 64)]


def test_imitation_resumes_after_ctrl_c(tmp_path, monkeypatch, capsys):
    out, small = tmp_path / "out", ["--horizon", 6, "--max_new_tokens", 8, "--steps", 4]
    train_step, seen = imitate.train_step, []

    def step_and_signal(model, optimizer, micros, *args):
        seen.append(optimizer.param_groups[0]["lr"])
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(model, optimizer, micros, *args)

    monkeypatch.setattr(imitate, "train_step", step_and_signal)
    with pytest.raises(SystemExit, match="interrupted"):
        run_main(imitate, monkeypatch, "--out", out, *small)
    assert "saved 2 steps; continue with the same command and --resume" in capsys.readouterr().out
    kept = torch.load(out / "imitation.pt")
    assert kept["step"] == 2 and all(x["step"] == 2 for x in kept["states"].values())
    run_main(imitate, monkeypatch, "--out", out, "--resume", *small)
    assert len(seen) == 4 and not (out / "imitation.pt").exists()
    run_main(imitate, monkeypatch, "--out", tmp_path / "alone", *small)
    assert seen[4:] == seen[:4]  # the learning rates
    pairs = zip(random_tiny().model.parameters(), load(str(out)).model.parameters())
    assert not any(a.equal(b) for a, b in pairs)
    for flags, says in ((["--resume"], "has no unfinished imitation"), ([], "exists already")):
        with pytest.raises(SystemExit, match=says):
            run_main(imitate, monkeypatch, "--out", out, *flags)


def test_frozen_lake_is_learned_with_the_commands_of_the_readme(tmp_path, monkeypatch):
    """With half as many steps."""
    monkeypatch.chdir(tmp_path)
    commands = [line.split("  ")[0].split()[2:] for line in open(f"{ROOT}/README.md")
                if line.startswith("python t") and "environments.frozen_lake:FrozenLake" in line]
    run_main(imitate, monkeypatch, *commands[0], "--steps", 150)
    run_main(train, monkeypatch, *commands[1], "--iterations", 24, "--save_every", 24)
    result = json.loads(next((tmp_path / "runs").glob("FrozenLake-*/eval.json")).read_text())
    assert result["n"] == 200 and result["success"] > 2 * result["success_before"] > 0


def test_bpe_keeps_every_text_and_encodes_words_alike_wherever_they_are():
    texts = ['{"sql": "SELECT price FROM fruits WHERE name = \'fig\'"}', "price of fig: 12"] * 2
    tokenizer = imitate.bpe_tokenizer(texts, ["You stand here.", "You stand here. Go!"])
    chat = Chat(tokenizer)
    for text in (*texts, "You stand here. Go! You stand here.", "Ünï – 漢字 🐟 [x](y) {\n\t} 007",
                 "<think> a </think> <tool_call>{}</tool_call>\r\n  <action>b</action>  ",
                 "<|end|> <|tool|>", ""):
        ids = chat.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {*ids} & {*tokenizer.all_special_ids}  # control tokens that are spelled
    split = lambda text: [tokenizer.decode([i]) for i in chat.encode(text)]
    assert split("price (price)=\"price\"") == ["price", " ", "(", "price", ")", "=", '"', "price",
                                                '"']
    assert split("123 fig of price") == ["1", "2", "3", " ", "fig", "of", "price"]
    assert split("You stand here. Go! <think>") == ["You stand here. Go!", " ", "<think>"]
    rng = random.Random(0)
    parts = ("fig", "of", " ", "  ", "1", "_", "[", "é", "\n", "'", "x9", ".", "🐟", "\t",
             "You stand here.", "go to", "<think> ")
    tokenizer = imitate.bpe_tokenizer(texts, ["You stand here.", "go to", "<think> "])
    for _ in range(500):
        text = "".join(rng.choices(parts, k=8))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # blanks at the ends of a phrase belong to the words beside them
    tokenizer = imitate.bpe_tokenizer(texts, ["go to ", " by way of ", "_a b_"])
    split = lambda text: [tokenizer.decode([i]) for i in Chat(tokenizer).encode(text)]
    assert split("go to fig") == ["go to", "fig"]
    assert split("fig by way of price.") == ["fig", " ", "by way of", "price", "."]
    assert tokenizer.decode(tokenizer.encode("x_a b_y")) == "x_a b_y"


def test_tiny_model_has_the_vocabulary_of_its_environment(monkeypatch):
    lake = frozen_lake.FrozenLake
    monkeypatch.setattr(frozen_lake, "WAYS", {"Up-Left": (-1, -1), **frozen_lake.WAYS})
    config, flags = imitate.parse(["--env", "environments.frozen_lake:FrozenLake"])
    tokenizer = imitate.tokenizer_for(config, flags)
    lm = random_tiny(tokenizer=tokenizer)
    split = lambda text: [tokenizer.decode([i]) for i in lm.chat.encode(text)]
    response = lake.format_response("look", "north")
    assert split(response) == ["<think> ", "look", " </think> <action> ", "north", " </action>"]
    assert split(f"{lake.role}\nIce: north.") == [lake.role, "\n", "Ice", ": ", "north", "."]
    assert split(envs.ANSWER) == [envs.ANSWER] and split("What you saw: ") == ["What you saw: "]
    assert split("['Up-Left', 'north']") != split("['up-left', 'north']")
    own = staticmethod(lambda thought, label: f"I {thought} to: {label}")
    monkeypatch.setattr(lake, "format_response", own)
    monkeypatch.setattr(lake, "parse_action", staticmethod(
        lambda text: (text.split(": ")[1], True)))
    imitate.demonstrator.cache_clear()
    tokenizer = imitate.tokenizer_for(config, flags)
    lm = random_tiny(tokenizer=tokenizer)
    assert split("I look to: north") == ["I", "look", " ", "to: ", "north"]
    monkeypatch.delattr(lake, "advice")
    with pytest.raises(ValueError, match="no demonstrator"):
        imitate.parse(["--env", "environments.frozen_lake:FrozenLake"])


@pytest.mark.parametrize("width", [64, 128])
def test_heads_of_a_model_that_copies_begin_by_looking_one_and_two_tokens_back(width):
    lm = random_tiny(tokenizer=imitate.bpe_tokenizer(), width=width, copies=True)
    lm.model.set_attn_implementation("eager")
    ids = torch.randint(300, (1, 400), generator=torch.Generator().manual_seed(0))
    output = lm.model(ids, output_attentions=True)
    for head, weights in enumerate(output.attentions[0][0]):  # (T, T)
        back = 1 + head // 2
        assert (weights.diagonal(-back)[1:] > 0.9).all()
        assert weights.diagonal(back - 3).mean() < 0.1
    assert lm.head.weight.data_ptr() == lm.model.get_input_embeddings().weight.data_ptr()
    # every row of the queries' weights has a gradient, so all dimensions of a head can learn
    output.logits.square().sum().backward()
    gradient = lm.model.model.layers[0].self_attn.q_proj.weight.grad
    assert (gradient.abs().sum(-1) > 0).all()


def test_what_is_to_be_copied_stands_earlier_in_its_row():
    rng = np.random.default_rng(0)
    for length in 8, 64, imitate.LONGEST:
        samples = imitate.copying(rng, 4000, length)
        assert len(samples) * length == imitate.LONGEST
        for ids, spans in samples:
            assert 2 * length <= len(ids) <= 2 * length + 16 and spans[-1][1] == len(ids)
            for start, end in spans:
                part = ids[start - 1:end]
                assert any(ids[i:i + len(part)] == part for i in range(start - 1))


def test_copying_is_learned(capsys):
    lm = random_tiny(tokenizer=imitate.bpe_tokenizer(), copies=True)
    imitate.learn_to_copy(lm, 1, 3e-3, seed=0)
    imitate.learn_to_copy(lm, 100, 3e-3, seed=0)
    before, after = re.findall(r"a loss of (\S+)", capsys.readouterr().out)
    assert float(after) < 5.5 < math.log(366) - 0.2 < float(before)


def test_copying_comes_before_imitation(tmp_path, monkeypatch, capsys):
    run_main(imitate, monkeypatch, "--env", "environments.frozen_lake:FrozenLake", "--horizon", 4,
             "--copy_steps", 2, "--steps", 1, "--batch", 4, "--out", tmp_path / "lake")
    assert "after 2 steps of copying" in capsys.readouterr().out
    lm = load(str(tmp_path / "lake"))
    assert lm.model.config.tie_word_embeddings and lm.recommended["max_new_tokens"] == 16
    assert not lm.value_rows.weight.any()  # V = Q = 0
    assert not lm.head.weight[list(lm.value_ids)].any()


def test_the_environments_own_tokens_are_those_that_cannot_be_copied():
    tokenizer = imitate.bpe_tokenizer(2 * ["price 3", "choose black white 5"], ["fixed phrase"])
    words = "price|3|choose|black|white|5|fixed phrase".split("|")
    price, three, choose, black, white, five, phrase = (tokenizer.encode(w)[0] for w in words)
    lm = random_tiny(tokenizer=tokenizer)
    always = {phrase, *lm.stop_ids, *lm.value_ids}
    copied, said = ([price, three, black, black], [(3, 4)]), ([three, white, choose], [(2, 3)])
    # a response has `choose` before its prompt has it; price and black are in exactly 90 %
    own = imitate.own_tokens(lm, [copied] * 9 + [said])
    assert always | {choose} <= own and not {price, three, black, white, five} & own
    own = imitate.own_tokens(lm, [copied] * 9)
    assert always | {price, black} <= own and not {three, white, choose} & own
    # a digit is kept if responses have it first; choose is, in 1 of 201 samples, which is too few
    own = imitate.own_tokens(lm, [copied, ([white, five], [(1, 2)])] * 100 + [said])
    assert five in own and not {three, choose, white} & own


def test_renaming_keeps_what_is_repeated():
    rng, others = np.random.default_rng(0), np.arange(20, 100)
    ids = [5, 30, 31, 30, 6, 99, 31, 30]
    drawn = [imitate.rename(ids, others, rng) for _ in range(50)]
    for renamed in drawn:
        assert [renamed[0], renamed[4]] == [5, 6] and {*renamed[1:4], *renamed[5:]} <= {*others}
        assert renamed[1] == renamed[3] == renamed[7] and renamed[2] == renamed[6]
        assert len({*renamed}) == len({*ids})
    assert len({renamed[1] for renamed in drawn}) > 25
    everything = imitate.rename(others.tolist(), others, rng)
    assert everything != sorted(everything) and sorted(everything) == others.tolist()


def test_imitation_with_renamed_words(tmp_path, monkeypatch):
    argv = ["--env", "environments.frozen_lake:FrozenLake", "--horizon", 4, "--rename",
            "--steps", 1, "--batch", 4, "--out", tmp_path / "lake"]
    _, flags = imitate.parse([*map(str, argv)])
    assert flags.rename and flags.text_weight == 0  # random words cannot be predicted
    assert imitate.parse([*map(str, argv), "--text_weight", "0.5"])[1].text_weight == 0.5
    seen, loss = [], imitate.loss_over
    monkeypatch.setattr(imitate, "loss_over", lambda lm, samples, weight: (
        seen.extend(samples), loss(lm, samples, weight))[1])
    run_main(imitate, monkeypatch, *argv)
    text = " ".join(load(str(tmp_path / "lake")).chat.tokenizer.decode(ids) for ids, _ in seen)
    goals = re.findall(r"Goal: (.)", text)  # how many squares it is away
    assert len(goals) >= 4 and sum(goal.isdigit() for goal in goals) < len(goals) / 2


@pytest.mark.parametrize("flag", ["--width 128", "--vocabulary 8000", "--copy_steps 10"])
def test_a_model_that_exists_is_not_made_otherwise(flag):
    given = ["--env", "environments.frozen_lake:FrozenLake", *flag.split()]
    with pytest.raises(ValueError, match=f"{flag.split()[0]} is of a model that is made here"):
        imitate.parse(["--model", f"{ROOT}/results/tiny-house", *given])
    assert imitate.parse(given)[0].model == "random"


@pytest.mark.parametrize("flags, says", [
    ("--vocabulary 8000", "--env house has a tokenizer of its own"),
    ("--algo grpo", "--algo has no effect on imitation"),
    ("--leave_out 5", "--leave_out has no effect on imitation"),
    ("--batch 0", "--batch must be at least"),
    ("--width 20", "multiple of 8"), ("--width 56 --copy_steps 1", "at least 64"),
    ("--rename", "--env house cannot be learned with --rename"),
    ("--noise 7", "--noise must be at least 0 and at most 1"),
    ("--vocabulary -5", "--vocabulary must be at least 1"),
    ("--copy_steps -1", "--copy_steps must be at least 0")])
def test_flags_that_imitation_cannot_use_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        imitate.parse(flags.split())


def test_folder_of_an_imitation_is_its_own_from_the_beginning_to_the_end(tmp_path, monkeypatch):
    """Also after it has saved its state, which replaces the folder."""
    def others_try(*_):
        for script, flags in (imitate, ()), (train, ("--iterations", 1, "--eval_games", 0)):
            with pytest.raises(SystemExit, match="exists already|another process writes to"):
                with monkeypatch.context() as patch:
                    run_main(script, patch, "--out", out, *flags)
        tried.append(sorted(path.name for path in out.iterdir()))

    out, tried, save = tmp_path / "made", [], imitate.save
    monkeypatch.setattr(imitate, "save", lambda *args: (others_try(), save(*args)))
    monkeypatch.setattr(imitate, "SAVE_AFTER", -1)  # after each step
    out.mkdir()
    (out / ".lock").touch()  # as a start that failed leaves it
    run_main(imitate, monkeypatch, "--steps", 2, "--batch", 2, "--width", 16, "--out", out)
    assert tried[0] == [".lock"] and "imitation.pt" in tried[1] and ".lock" in tried[2]
    assert load(str(out)) and not (out / ".lock").exists()


class Lost(frozen_lake.FrozenLake):
    """It gives advice that is none, or fails while it does."""

    gives = None

    def advice(self, forgetful=False):
        return self.gives or self.nowhere


@pytest.mark.parametrize("gives, says", [
    ("north", r"advice\(\) must return \(thought, action\), and returned 'north'"),
    (("x",), r"advice\(\) must return \(thought, action\), and returned \('x',\)"),
    (None, r"AttributeError: .*nowhere.* \(.*test_imitate.py:\d+\)")])
def test_demonstrator_that_fails_is_named_with_the_place(monkeypatch, gives, says):
    monkeypatch.setattr(Lost, "gives", gives)
    config, flags = imitate.parse(["--env", "environments.frozen_lake:FrozenLake"])
    monkeypatch.setattr(imitate, "demonstrator", lambda *_, **__: Lost())
    with pytest.raises(envs.GameError, match=f"game 3 failed: .*{says}"):
        imitate.demonstrate_here(config, flags, 0, 3)


def test_a_made_model_has_the_bounds_and_value_tokens_that_were_given(tmp_path, monkeypatch):
    run_main(imitate, monkeypatch, "--horizon", 2, "--steps", 0, "--r_max", 5, "--tau_v", 2,
             "--value_tokens", 7, 9, "--width", 16, "--out", tmp_path / "made")
    lm = load(str(tmp_path / "made"))
    tokens = lm.chat.tokenizer.convert_ids_to_tokens(lm.value_ids)
    assert (lm.r_max, lm.tau_v, tokens) == (5, 2, ["7", "9"])


@pytest.mark.parametrize("games, kept_back", [(5000, 64), (40, 20), (1, 1)])
def test_success_is_measured_in_games_that_are_not_practised(monkeypatch, games, kept_back):
    practised, measured = [], []
    monkeypatch.setattr(envs, "tasks", lambda *_, **__: [*range(games)])
    monkeypatch.setattr(imitate, "measure", lambda sampler, probe, *_: (
        measured.append(probe), (1, 1))[1])
    monkeypatch.setattr(imitate, "train_step", lambda model, optimizer, *_: optimizer.step())
    monkeypatch.setattr(imitate, "batches", lambda lm, games, *_: practised.append(games) or iter(
        [[([1, 2], [(1, 2)])]] * 200))
    imitate.imitate(random_tiny(), None, *imitate.parse(["--context", "full"]))
    assert len(measured[0]) == kept_back and len(practised[0]) == max(1, games - kept_back)
    assert games == 1 or not {*measured[0]} & {*practised[0]}


def test_what_a_demonstrator_gives_must_be_possible(monkeypatch):
    lake = frozen_lake.FrozenLake()
    for label in "North", "up", {"name": "north"}:
        monkeypatch.setattr(lake, "advice", lambda forgetful: ("look", label))
        with pytest.raises(ValueError, match="which the game cannot use now"):
            imitate.demonstrate(lake, 1, seed=0)


def test_demonstrations_have_the_task_and_category_that_a_pool_gives(monkeypatch):
    lake = frozen_lake.FrozenLake()
    infos = iter([{"category": "a"}, {"task": "second", "category": "b"}, {}, {}])
    first, _ = lake.reset(1)
    monkeypatch.setattr(lake, "reset", lambda task: (first, next(infos)))
    monkeypatch.setattr(lake, "step", lambda action: ("?", 0.0, False, False, next(infos)))
    monkeypatch.setattr(lake, "horizon", 3)
    turns = imitate.demonstrate(lake, 1, seed=0)
    assert [turn.info["task"] for turn in turns] == [first, "second", first]
    assert [turn.info["category"] for turn in turns] == ["a", "b", "a"]


def test_imitation_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(imitate, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="not with torchrun"):
        imitate.parse([])


def test_tiny_model_spells_unknown_words():
    tokenizer = random_tiny().tokenizer
    text = "<action> take qwxz 12 from cabinet 37 </action>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
