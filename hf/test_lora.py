"""Tests of hf/lora.py, and of what adapters go through: sampling, scoring, learning, folders."""
import dataclasses
import functools
import json

import pytest
import safetensors.torch
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import eval as evaluation
import train
from hf import lora, verify
from hf.loading import edit_json
from hf.lora import adapted_layers, adapter_tensors
from hf.verify import with_merged_adapters
from model import actor_critic, load, make_batch, restricted_log_softmax
from rollout import Sampler
from runtime.testing import (CONTEXTS, GAMES, TINY_HOUSE, OneRank, TwoRanks, adapted_model,
                             batch_of, case_of, checkpoints, gradient, near, off_policy, on_ranks,
                             on_the_cpu, play, prepared, random_lm, read_lines,
                             run_main, same_tokens_and_values, small_config, strong, unclipped,
                             values_of)
from tools import imitate
from training.run import with_speed_and_memory_settings

ADAPTED = pytest.mark.parametrize("architecture, seed", [("qwen2", 1), ("llama", 0), ("phi3", 1)])


def log_probs(model, ids, value_ids):
    """Plain transformers: the policy's log-probs of all tokens but the first."""
    logp = restricted_log_softmax(model(ids).logits[:, :-1], value_ids)
    return logp.gather(-1, ids[:, 1:, None])[..., 0]


# ------------------------------------------------------------------------------------- the function

@ADAPTED
def test_scores_and_gradients_are_those_of_dense_weights(architecture, seed):
    """qwen2 has biases, and llama here ties its head to the embeddings."""
    lm = adapted_model(architecture, seed)
    turns = play(lm, "kv", "full", 1.0)[0]
    batch, layers = batch_of(turns, "full"), adapted_layers(lm.model)
    assert len(layers) == {"phi3": 8}.get(architecture, 14)
    dense = random_lm(architecture, seed)
    names = {name: name for name, _ in dense.model.named_parameters()}
    params = {name: p.detach() for name, p in lm.model.named_parameters() if name in names}
    for name, layer in layers.items():
        params[f"{name}.weight"] = layer.weight + layer.lora_B @ layer.lora_A

    class Dense(torch.nn.Module):  # W + B A, written out
        def forward(self, **inputs):
            return functional_call(dense.model.base_model, {
                name.removeprefix("model."): p for name, p in params.items()
                if name.startswith("model.")}, (), inputs)

    plain = dataclasses.replace(dense, value_rows=lm.value_rows)
    plain.backbone = Dense()
    torch.nn.init.normal_(lm.value_rows.weight)
    found = []
    for scorer in (lm, plain):
        for p in [p for group in lm.parameters() for p in group]:
            p.grad = None
        scores = scorer.score(batch)
        (scores.logp.sum() + 3 * scores.p_v.sum() + scores.p_q.sum()).backward()
        found.append((torch.cat(scores), gradient(lm)))
        assert all(p.grad.any() for p in (*adapter_tensors(lm.model), lm.value_rows.weight))
    near(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() < 1e-5 * found[1][1].norm()


@CONTEXTS
@ADAPTED
def test_sampler_and_scoring_pass_compute_the_same(architecture, seed, context):
    lm = adapted_model(architecture, seed)
    played = [play(lm, engine, context, 1.0)[0] for engine in ("kv", "hf")]
    same_tokens_and_values(*played)
    scores = lm.score(batch_of(played[0], context))
    near(torch.tensor([x for t in played[0] for x in t.logp]), scores.logp)
    near(values_of(played[0]), lm.r_max * torch.stack([scores.p_v, scores.p_q], 1))
    base, _ = play(random_lm(architecture, seed), "kv", context, 1.0)
    assert [t.action_ids for t in played[0]] != [t.action_ids for t in base]


def test_sampler_reads_adapters_as_they_are_now():
    lm = adapted_model(trained=False)
    _, sampler = play(lm, "kv", "window", 1.0)
    before = sampler.generate(["What is red?"])
    trained = adapted_model()
    lora.copy_adapters(lm.model, trained.model)
    after = sampler.generate(["What is red?"])
    assert after != before and after == Sampler(trained).generate(["What is red?"])


@pytest.mark.parametrize("compile", [False, True])
def test_sampler_that_ignores_new_adapters_is_refused(monkeypatch, compile, caplog):
    """B is 0, so that the outputs are right; the check takes other numbers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("rollout.lora.copy_adapters", lambda target, source: None)
    with pytest.raises(ValueError, match="the error of its log-probs"):
        Sampler(adapted_model(trained=False), compile=compile)


def test_compiled_scoring_that_ignores_new_adapters_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    lm = adapted_model(trained=False)
    forward = lora.LoRALinear.forward
    monkeypatch.setattr(lora.LoRALinear, "forward", lambda layer, x: (
        torch.nn.Linear.forward(layer, x) if torch.compiler.is_compiling() else forward(layer, x)))
    assert verify.compiled_scoring(lm, 1000) is lm
    assert "compiled scoring is not used" in caplog.text


def test_compiling_needs_no_more_graphs_for_a_reference_or_later_weights(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    lm = adapted_model(layers=3)
    turns, _ = play(lm, "kv", "window", 1.0)
    batch = batch_of(turns)
    fast = verify.compiled_scoring(lm, 1000)
    assert fast.compile
    reference = fast.copy()
    with torch.no_grad():
        near(torch.cat(fast.score(batch)), torch.cat(lm.score(batch)))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for p in adapter_tensors(lm.model):
            p.mul_(0.5)
        near(torch.cat(fast.score(batch)), torch.cat(lm.score(batch)))
        assert not torch.allclose(fast.score(batch).logp, reference.score(batch).logp)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# ------------------------------------------------------------------------------- copies, and memory

def test_reference_is_the_untouched_model_to_the_bit_and_shares_its_weights(tmp_path):
    lm = adapted_model(trained=False)
    learner = train.Learner(lm, train.settings(lm=lm))
    for p in adapter_tensors(lm.model):
        torch.nn.init.normal_(p)
    batch = make_batch([([*range(9, 40)], [(5, 12), (20, 31)])])
    untouched = random_lm("qwen2", 1)
    with torch.no_grad():
        assert torch.equal(learner.reference.score(batch).logp, untouched.score(batch).logp)
        assert not torch.equal(lm.score(batch).logp, untouched.score(batch).logp)
    shared = {p.data_ptr() for p in lm.model.parameters()}
    own = [p for p in learner.reference.model.parameters() if p.data_ptr() not in shared]
    assert len(own) == len(adapter_tensors(lm.model))


def test_reference_of_a_model_with_trained_adapters_has_them(tmp_path):
    lm = adapted_model()
    batch = make_batch([([*range(9, 40)], [(5, 12), (20, 31)])])
    with torch.no_grad():
        start = lm.score(batch).logp
        learner = train.Learner(lm, train.settings(lm=lm))
        for p in adapter_tensors(lm.model):
            p.mul_(2)
        assert torch.equal(learner.reference.score(batch).logp, start)


def test_adapters_of_a_16_bit_model_are_float32_and_small_steps_are_not_lost():
    lm = adapted_model(trained=False, dtype=torch.bfloat16)
    assert {p.dtype for p in lm.parameters()[0]} == {torch.float32}
    assert lm.model.dtype == torch.bfloat16
    before = [p.detach().clone() for p in adapter_tensors(lm.model)]
    learner = train.Learner(lm, train.settings(lm=lm, lr=1e-6, beta=0, mini_batch=1000))
    turns = play(lm, "kv", "window", 1.0)[0]
    for turn in turns:
        turn.reward = 5.0 * (turn.traj % 2)
    for n in range(2):  # in the first step A has no gradient, because B is 0
        learner.learn(turns, n)
    moved = [(p - old).abs().max().item() for p, old in zip(adapter_tensors(lm.model), before)]
    assert all(1e-7 < x < 1e-5 for x in moved)


def test_frozen_head_costs_no_gradient(monkeypatch):
    lm, shapes = adapted_model(dtype=torch.bfloat16), []
    assert not lm.head.weight.requires_grad
    hidden = torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True)
    from model import Float32Product
    with torch.profiler.profile(record_shapes=True) as profile:
        Float32Product.apply(hidden, lm.head.weight).sum().backward()
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::mm"]
    assert hidden.grad.any() and [[len(lm.head.weight), 3], [3, 32]] not in shapes


# ----------------------------------------------------------------------------------------- learning

@pytest.mark.parametrize("flags", [
    [], ["--context", "full"], ["--old_logprobs", "rollout"], ["--algo", "ppo"],
    ["--algo", "grpo", "--group_size", 3]])
def test_every_way_of_learning_moves_all_adapters_and_nothing_else(tmp_path, flags):
    lm = adapted_model()
    frozen = {name: p.clone() for name, p in lm.model.named_parameters() if not p.requires_grad}
    case = prepared(tmp_path, "--lora_rank", 4, *flags, lm=lm)
    case.step()
    assert all(p.grad.any() for p in adapter_tensors(case.learner.lm.model))
    assert all(p.equal(frozen[name]) for name, p in lm.model.named_parameters() if name in frozen)
    if "ppo" in flags:  # a critic with adapters of its own on the same base
        critic = case.learner.critic
        assert [*critic.trained()][-2:] == ["head.weight", "head.bias"]
        assert len(critic.trained()) == len(adapter_tensors(lm.model)) + 2
        ours = {p.data_ptr() for p in adapter_tensors(lm.model)}
        assert ours.isdisjoint(p.data_ptr() for p in critic.trained().values())


@pytest.mark.parametrize("compile", [False, True])
def test_gradient_checkpointing_changes_no_gradient_of_adapters(tmp_path, unclipped, monkeypatch,
                                                                compile):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for flags in ((), ("--gradient_checkpointing",)):
        lm = adapted_model()
        lm = with_speed_and_memory_settings(lm, small_config(tmp_path, *flags))
        lm = dataclasses.replace(lm, compile=compile and bool(flags))
        prepared(tmp_path, "--lora_rank", 4, *flags, lm=lm).step()
        found.append(gradient(lm))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def update_of_a_rank(rank, size, context, out):
    lm, share = adapted_model(), range(rank, 5, size)
    config = train.settings(lm=lm, mini_batch=1000, tokens_per_micro_batch=300, context=context)
    turns = play(lm, "kv", context, 1.0, games=[GAMES[i] for i in share], trajs=share)[0]
    for t in turns:
        t.reward, t.invalid = 10.0 * (t.done and t.traj % 2), t.turn % 3 == 0
    case = off_policy(case_of(lm, turns, config))
    info = case.step()
    if rank == 0:
        torch.save((gradient(lm), info), out)


@CONTEXTS
def test_two_ranks_give_the_gradient_of_one(tmp_path, context):
    results = []
    for size in (1, 2):
        on_ranks(update_of_a_rank, size, size, context, tmp_path / f"{size}")
        results.append(torch.load(tmp_path / f"{size}"))
    (one, info), (two, other) = results
    assert (one - two).norm() < 1e-5 * one.norm()
    assert other == pytest.approx(info, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("flags", ["", "--algo ppo --context full", "--dtype bfloat16"])
def test_resumed_run_ends_like_one_that_was_left_alone(tmp_path, strong, flags):
    every = [*strong, *flags.split(), "--lora_rank", 2, "--lr", 1e-2, "--batch_size", 6,
             "--eval_games", 3, "--eval_every", 1, "--mini_batch", 12]
    for name, *more in (("whole", 2), ("cut", 1), ("cut", 2, "--resume")):
        OneRank(*every, "--out", tmp_path / name, "--iterations", *more).finish()
    critic = ["critic.pt", "critic-0.pt"] if "ppo" in flags else []
    for name in ("adapter_model.safetensors", "value_rows.safetensors", "learner-0.pt", *critic):
        whole, cut = (tmp_path / of / "checkpoint-2" / name for of in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), name
        assert whole.stat().st_size < 2e5
    for name in ("final/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    if not flags:
        TwoRanks(*every, "--out", tmp_path / "two", "--iterations", 2).finish()
        for a, b in zip(*(read_lines(tmp_path / name / "metrics.jsonl")
                          for name in ("whole", "two"))):
            for key in ("loss_policy", "loss_v", "kl", "grad_norm"):
                assert b[key] == pytest.approx(a[key], rel=2e-3, abs=1e-5), key


# ------------------------------------------------------------------------------------------ folders

@pytest.fixture
def a_run(tmp_path, strong, monkeypatch, capsys):
    """A short run with adapters, and ids that its models can score."""
    run_main(train, monkeypatch, *strong, "--lora_rank", 3, "--lr", 3e-2, "--batch_size", 6,
             "--iterations", 2, "--mini_batch", 8, "--eval_games", 3, "--eval_every", 1,
             "--out", tmp_path / "run")
    assert "adapters of rank 3" in capsys.readouterr().out
    return tmp_path / "run", torch.tensor([[*range(9, 49)]])


def test_folders_of_a_run_have_the_same_policy(a_run, tmp_path):
    """RUN/final in plain transformers, RUN/adapter and the checkpoint as --model."""
    run, ids = a_run
    lm = load(str(run / "adapter"))
    assert lm.lora_rank == 3 and lm.model.lora.base == str(tmp_path / "start")
    value_rows = lm.value_rows.weight
    assert value_rows.any()
    with torch.no_grad():
        expected = log_probs(lm.model, ids, lm.value_ids)
        plain = AutoModelForCausalLM.from_pretrained(run / "final")
        assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
        final = log_probs(plain, ids, lm.value_ids)
        torch.testing.assert_close(final, expected, atol=1e-5, rtol=0)
        base = log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "start"), ids,
                         lm.value_ids)
        assert (base - expected).abs().max() > 1e-3
        for name in (f"checkpoint-{max(checkpoints(run))}", "final"):
            other = load(str(run / name))
            torch.testing.assert_close(log_probs(other.model, ids, lm.value_ids), expected,
                                       atol=1e-5, rtol=0)
            assert other.value_rows.weight.equal(value_rows)
            assert other.value_ids == lm.value_ids
    assert load(str(run / "best")).lora_rank == 3
    assert sum(path.stat().st_size for path in (run / "adapter").glob("*.safetensors")) < 1e5


def test_peft_loads_the_folder_of_an_adapter(a_run, tmp_path):
    peft = pytest.importorskip("peft")
    run, ids = a_run
    lm = load(str(run / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(lm.model.lora.base)
    with torch.no_grad():
        expected = log_probs(lm.model, ids, lm.value_ids)
        found = log_probs(peft.PeftModel.from_pretrained(base, run / "adapter"), ids, lm.value_ids)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_adapter_that_peft_has_made_is_a_start(tmp_path, monkeypatch):
    """It has no tokenizer and no sapo.json, and not all layers have A and B."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(TINY_HOUSE)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=5, lora_alpha=7, init_lora_weights=False,
                             target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[*range(9, 49)]])
    lm = load(str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(log_probs(lm.model, ids, lm.value_ids),
                                   log_probs(model, ids, lm.value_ids), atol=1e-5, rtol=0)
    run_main(train, monkeypatch, "--model", tmp_path / "adapter", "--batch_size", 2, "--horizon", 3,
             "--iterations", 1, "--eval_games", 0, "--out", tmp_path / "run")
    written = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (5, 5)  # alpha / r is in A now
    assert written["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("change, says", [
    ({"use_dora": True}, "use_dora True, which is not supported: merge"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"peft_type": "IA3"}, "peft_type"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"), ({"bias": "all"}, "bias"),
    ({"revision": "a-branch"}, "revision 'a-branch'"), ({"r": 0}, "adapters of rank 0"),
    ({"base_model_name_or_path": "/nowhere/at/all"}, "no such folder"),
    ({"base_model_name_or_path": None}, "does not name the model"),
    ({"base_model_name_or_path": f"{TINY_HOUSE}-8"}, "has the shape|in one of them only|is for")])
def test_adapters_that_are_something_else_are_refused(tmp_path, change, says):
    lm = load("tiny", lora_rank=2)
    lm.save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if change.get("base_model_name_or_path", "").__class__ is str and "-8" in str(change):
        file = tmp_path / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        says = "cannot load model"
    with pytest.raises(ValueError, match=says):
        load(str(tmp_path))


def test_adapter_can_imitate_further(tmp_path, monkeypatch):
    load("tiny", lora_rank=2).save(tmp_path / "start")
    run_main(imitate, monkeypatch, "--model", tmp_path / "start", "--steps", 2, "--batch", 4,
             "--out", tmp_path / "more")
    more = load(str(tmp_path / "more"))
    assert more.lora_rank == 2 and all(p.any() for p in adapter_tensors(more.model))


def test_merging_keeps_ties_and_rounds_once():
    lm = adapted_model("llama", 0, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        merged = lm.merged(dtype)
        model = merged.model
        assert {p.dtype for p in model.parameters()} == {dtype} and merged.lora_rank == 0
        assert model.lm_head.weight is model.model.embed_tokens.weight
        layer, plain = (x.model.layers[0].mlp.up_proj for x in (lm.model, model))
        exact = layer.weight.float() + layer.lora_B @ layer.lora_A
        assert plain.weight.equal(exact.to(dtype))
    assert lm.lora_rank == 4 and lm.model.model.layers[0].mlp.up_proj.lora_A.requires_grad


@pytest.mark.parametrize("lost", [False, True])
def test_adapters_that_rounding_would_lose_are_kept_in_float32(tmp_path, strong, monkeypatch,
                                                               capsys, lost):
    """Here, rounding loses all of them. What reads the folder reads it in float32."""
    if lost:
        monkeypatch.setattr(lora, "merged_weight", lambda layer: layer.weight.float())
    with edit_json(tmp_path / "start/sapo.json") as start:
        del start["settings"]["dtype"]  # it is float32 for the tiny model
    run_main(train, monkeypatch, *strong, "--lora_rank", 3, "--lr", 0.1, "--lr_warmup", 0,
             "--batch_size", 6, "--iterations", 2, "--mini_batch", 8, "--eval_games", 3,
             "--dtype", "bfloat16", "--out", tmp_path / "run")
    said = capsys.readouterr().out
    assert "merged into bfloat16, the adapters' log-probs differ by" in said
    assert ("so RUN/final is in float32" in said.replace(str(tmp_path / "run"), "RUN")) == lost
    config = json.loads((tmp_path / "run/final/config.json").read_text())
    dtype = "float32" if lost else "bfloat16"
    assert config["dtype"] == dtype
    args = evaluation.make_parser("").parse_args(["--model", str(tmp_path / "run")])
    _, settings = evaluation.complete(args)
    assert settings.dtype == dtype
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # where bfloat16 is the default
    assert train.settings(model=str(tmp_path / "run")).dtype == dtype


def test_merging_for_a_comparison_is_the_merging_of_a_folder():
    lm = adapted_model(dtype=torch.bfloat16)
    batch = make_batch([([*range(12)], [(5, 9)])])
    with torch.no_grad():
        expected = lm.merged(torch.bfloat16).score(batch).logp
        plain = lm.score(batch).logp
        with with_merged_adapters(lm.model.base_model):
            found = lm.score(batch).logp
        assert found.equal(expected) and not found.equal(plain)
        assert lm.score(batch).logp.equal(plain)


# ----------------------------------------------------------------------------------------- settings

def test_settings_with_adapters(tmp_path):
    full, some = train.settings(), train.settings(lora_rank=8)
    assert (some.lr, some.critic_lr) == (10 * full.lr, 10 * full.critic_lr)
    assert some.lr * some.value_lr_factor == full.lr * full.value_lr_factor
    assert dataclasses.replace(some, lora_rank=0, lr=full.lr, critic_lr=full.critic_lr,
                               value_lr_factor=full.value_lr_factor) == full
    assert train.settings(lora_rank=8, lr=1e-5).lr == 1e-5
    lm = load("tiny", lora_rank=3)
    assert train.settings(lm=lm).lora_rank == 3 and train.settings(lm=lm).lr == some.lr
    lm.save(tmp_path)
    config = train.settings(model=str(tmp_path))
    assert (config.lora_rank, config.lr) == (3, some.lr)
    for given, says in ((dict(model=str(tmp_path), lora_rank=4), "is an adapter of rank 3"),
                        (dict(lm=lm, lora_rank=4), "lora_rank is 4, and that of the model is 3"),
                        (dict(lora_rank=-1), "--lora_rank must be at least 0")):
        with pytest.raises(ValueError, match=says):
            train.settings(**given)
    with pytest.raises(ValueError, match="the config has lora_rank 0, and the model 3"):
        train.Learner(lm, full)
    of_adapter = ("--model", str(tmp_path), "--lora_rank", "3")
    flags = (), ("--lora_rank", "8"), ("--lora_rank", "8", "--lr", "4e-4"), of_adapter
    assert [train.parse(f).out.replace(tmp_path.name, "ADAPTER") for f in flags] == [
        "runs/house-tiny-0", "runs/house-tiny-lora_rank=8-0",
        "runs/house-tiny-lora_rank=8-lr=0.0004-0", "runs/house-ADAPTER-0"]


def test_base_that_is_not_that_of_the_adapters_is_noticed(tmp_path, monkeypatch):
    base = load("tiny")
    base.save(tmp_path / "base")
    flags = ["--model", tmp_path / "base", "--lora_rank", 2, "--beta", 0, "--batch_size", 2,
             "--horizon", 2, "--eval_games", 0, "--out", tmp_path / "run"]
    run_main(train, monkeypatch, *flags, "--iterations", 1)
    for dtype in (torch.float32, torch.bfloat16):
        assert load(str(tmp_path / "run/adapter"), dtype=dtype).lora_rank == 2
    with torch.no_grad():
        for p in base.model.parameters():
            p.mul_(1.2)
    base.save(tmp_path / "base")
    with pytest.raises(ValueError, match="trained with other weights than those that are now in"):
        load(str(tmp_path / "run/adapter"))
    with pytest.raises(SystemExit, match="trained with other weights than those that are now in"):
        run_main(train, monkeypatch, *flags, "--iterations", 2, "--resume")
    train.Learner(base, train.settings(lm=base))  # trains its weights, which are in no folder
    lm = load("tiny", lora_rank=2)
    for in_memory in (base, lm.merged(torch.float32)):
        with pytest.raises(ValueError, match="has no folder or hub id: save it"):
            actor_critic(in_memory.model, in_memory.tokenizer, lora_rank=2)


def test_folder_has_a_whole_model_or_an_adapter_and_never_both(tmp_path):
    load("tiny").save(tmp_path / "base")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    adapted = load(str(tmp_path / "base"), lora_rank=2, r_max=3.0)
    adapted.save(tmp_path / "adapter")
    adapted.save(tmp_path / "adapter")  # a later one in its place
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for lm, folder, what in ((adapted, "base", "a whole model"), (adapted, "link", "a whole model"),
                             (adapted.merged(torch.float32), "adapter", "an adapter")):
        with pytest.raises(ValueError, match=f"there is {what} in .*{folder}: save this elsewhere"):
            lm.save(tmp_path / folder)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}


def test_incomplete_folders_are_named(tmp_path):
    lm = load("tiny", lora_rank=2)
    lm.save(tmp_path / "adapter")
    (tmp_path / "adapter/value_rows.safetensors").unlink()
    with pytest.raises(ValueError, match="value_rows.safetensors is missing"):
        load(str(tmp_path / "adapter"))
    lm.model.save_pretrained(tmp_path / "whole")  # it knows nothing of adapters
    lm.tokenizer.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="its weights are those of a model with adapters"):
        load(str(tmp_path / "whole"))


def test_value_rows_of_an_adapter_are_not_rounded(tmp_path):
    lm = load("tiny", lora_rank=2, dtype=torch.bfloat16)
    torch.nn.init.normal_(lm.value_rows.weight)
    lm.save(tmp_path)
    assert load(str(tmp_path), dtype=torch.bfloat16).value_rows.weight.equal(lm.value_rows.weight)


def test_merged_model_can_be_trained_and_shares_nothing():
    lm = adapted_model()
    merged = lm.merged(torch.float32)
    ours, its = ({x.data_ptr() for x in (*model.parameters(), *model.buffers())}
                 for model in (lm.model, merged.model))
    assert its and ours.isdisjoint(its)
    assert all(p.requires_grad for p in merged.model.parameters()) and merged.parameters()
    again = actor_critic(merged.model, merged.tokenizer)
    assert again.value_rows is merged.value_rows is not lm.value_rows


def test_what_is_trained_beside_adapters_or_in_16_bits_is_refused():
    lm = adapted_model()
    lm.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="other parameters that are not frozen"):
        train.Learner(lm, train.settings(lm=lm))
    lm = adapted_model()
    lm.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="the adapters are not float32"):
        train.Learner(lm, train.settings(lm=lm))


def test_peft_adapter_of_a_sapo_model_keeps_its_values_and_settings(tmp_path):
    peft = pytest.importorskip("peft")
    base = dataclasses.replace(load("tiny"), r_max=2.0, tau_v=3.0)
    torch.nn.init.normal_(base.value_rows.weight)
    base.save(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    lm = load(str(tmp_path / "adapter"))
    assert (lm.value_ids, lm.r_max, lm.tau_v) == (base.value_ids, 2.0, 3.0)
    assert lm.value_rows.weight.equal(base.value_rows.weight)
    config = train.settings(model=str(tmp_path / "adapter"))
    assert (config.lr, config.r_max, config.lora_rank) == (4e-3, 2.0, 2)
    base.played_with = {"env": "house", "places": 7}
    base.save(tmp_path / "base")
    args = evaluation.make_parser("").parse_args(["--model", str(tmp_path / "adapter")])
    assert evaluation.complete(args)[1].places == 7


@pytest.mark.parametrize("key, value, says", [
    ("base_model.model.lm_head.weight", None, "it has base_model.model.lm_head.weight, which is"),
    ("q_proj.lora_B.weight", float("nan"), "has numbers that are not finite")])
def test_other_tensors_of_adapters_are_named(tmp_path, key, value, says):
    load("tiny", lora_rank=2).save(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    key = next((name for name in tensors if name.endswith(key)), key)
    tensors[key] = torch.zeros(1) if value is None else tensors[key] + value
    safetensors.torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="an adapter needs adapter_model.safetensors"):
        load(str(tmp_path))


def test_sampler_accepts_adapters_of_which_a_layer_does_nothing():
    lm = adapted_model()
    with torch.no_grad():
        lm.model.model.layers[0].mlp.up_proj.lora_A.zero_()
    assert Sampler(lm).generate(["What is red?"])


def test_models_that_cannot_have_adapters_are_refused():
    lm = random_lm("gpt2", 1, n_embd=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="has no folder or hub id: save it"):
        actor_critic(lm.model, lm.tokenizer, lora_rank=2)
    lm.model.name_or_path = "hf"
    with pytest.raises(ValueError, match="its backbone has no linear layers"):
        actor_critic(lm.model, lm.tokenizer, lora_rank=2)
    with pytest.raises(ValueError, match="adapters of rank 1000000000: 1 to 64 make sense"):
        load("tiny", lora_rank=10 ** 9)
    with pytest.raises(ValueError, match="has adapters of rank 4, not 2"):
        other = adapted_model()
        actor_critic(other.model, other.tokenizer, lora_rank=2)
