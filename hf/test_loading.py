"""Tests of hf/loading.py: what is read, written and refused."""
import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import eval as evaluation
import train
from environments.alfworld import AlfWorld
from environments.house import House
from envs import make_env
from hf.chat import used_tokens
from hf.loading import RESULTS, find_stop_ids, reserve_value_ids, resolve_model, sapo_json_of
from model import actor_critic, load, make_batch
from rollout import Sampler
from runtime.testing import GAMES, TINY_HOUSE, on_the_cpu, random_lm, run_main
from tools import imitate
from tools.imitate import random_tiny


def test_reserved_tokens_are_padding_rows_or_unused_special_tokens_or_named_ones():
    lm = random_tiny()
    tokenizer, stops, size = lm.tokenizer, lm.stop_ids, len(lm.tokenizer)
    assert reserve_value_ids(tokenizer, size + 2, stops) == (size, size + 1)
    with pytest.raises(ValueError, match="no two vocabulary entries are free"):
        reserve_value_ids(tokenizer, size + 1, stops)
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<|extra_0|>", "<|extra_1|>", "<|other|>", "<|tool|>"]})
    chosen = reserve_value_ids(tokenizer, len(tokenizer), stops)
    assert {tokenizer.convert_ids_to_tokens(i) for i in chosen} == {"<|extra_0|>", "<|extra_1|>"}
    named = reserve_value_ids(tokenizer, len(tokenizer), stops, ("<|other|>", "5"))
    assert named == tuple(tokenizer.convert_tokens_to_ids(["<|other|>", "5"]))
    # the template never spells <|tool|>: it writes '<|' + role + '|>'
    for names in (("<|end|>", "<|other|>"), ("nonsense-word", "<|other|>"), ("<|other|>",) * 2,
                  ("<|tool|>", "5"), ("\u00b2", "<|other|>")):
        with pytest.raises(ValueError, match=f"--value_tokens {names[0]}.*: give two different"):
            reserve_value_ids(tokenizer, len(tokenizer), stops, names)


@pytest.mark.parametrize("template", [
    "{% for m in messages %}<|a|>{{ m.content }}{% endfor %}",
    {"default": "x", "tool_use": "{% for t in tools %}<|a|>{% endfor %}"},
    [{"name": "default", "template": "x"}, {"name": "rag", "template": "{{ documents }}<|a|>"}],
    "{% for m in messages %}{{ '<|' + {'tool': 'a'}.get(m.role, '') + '|>' }}{% endfor %}",
    "{% for t in tools %}{{ '<|' ~ 'a|>' }}{% endfor %}",
    "{% if tools and tools[0].function.parameters.required %}{{ '<|' ~ 'a|>' }}{% endif %}",
    "{% if tools | length > 1 %}{{ '<|' ~ 'a|>' }}{% endif %}",
    "{% if messages[0].role != 'developer' %}{{ raise_exception('no') }}{% endif %}{{ '<|' ~ 'a|>'"
    " }}",
    "{% for m in messages if m.tool_calls %}{{ '<|' ~ 'a|>' }}{% endfor %}",
    "{% if not add_generation_prompt and messages | length > 5 %}{{ '<|' ~ 'a|>' }}{% endif %}",
    "{% for m in messages if m.content | length > 999 %}{{ '<|' ~ 'a|>' }}{% endfor %}",
    "{% for m in messages if not m.content %}{{ '<|' ~ 'a|>' }}{% endfor %}",
    "{% for m in messages if '\\n' in m.content %}{{ '<|' ~ 'a|>' }}{% endfor %}",
    "{% if messages[9] %}{{ '<|%s|>' % 'a' }}{% endif %}",
    "{% for m in messages if m.images %}{{ '<|{}|>'.format('A' | lower) }}{% endfor %}",
    "{% if enable_thinking %}{% set x = {'y': 'a|'} %}<|{{ x.y ~ '>' }}{% endif %}",
    "{% if messages[0].name %}{{ ['<|', '|>'] | join('a') }}{% endif %}",
    "{% generation %}{{ '<|' ~ 'a|>' }}{% endgeneration %}", "{% if %}<|{{ 'a' }}|>"])
def test_what_any_template_can_write_is_no_reserved_token(template):
    tokenizer = random_tiny().tokenizer
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|b|>", "<|c|>", "<|a|>"]})
    a, b, c = tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>", "<|c|>"])
    assert a in used_tokens(tokenizer)
    assert reserve_value_ids(tokenizer, len(tokenizer), ()) == (b, c)
    with pytest.raises(ValueError, match="--value_tokens <|a|> <|b|>: give two different"):
        reserve_value_ids(tokenizer, len(tokenizer), (), ("<|a|>", "<|b|>"))


@pytest.mark.parametrize("role, token", [
    ("m.role[0]", "<|u|>"), ("m['role'][:2]", "<|us|>"), ("m.role[::-1]", "<|resu|>"),
    ("m.role | upper", "<|USER|>"), ("'%s_%d' % (m.role, loop.index)", "<|user_7|>")])
def test_tokens_that_a_template_makes_of_a_role_are_used(role, token):
    tokenizer = random_tiny().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [token, "<|y|>", "<|z|>"]})
    tokenizer.chat_template = ("{% for m in messages %}{{ '<|' ~ (" + role + ") ~ '|>' }}"
                               "{{ m.content }}{% endfor %}")
    used, ids = used_tokens(tokenizer), tokenizer.convert_tokens_to_ids([token, "<|y|>", "<|z|>"])
    assert [i in used for i in ids] == [True, False, False]
    assert reserve_value_ids(tokenizer, len(tokenizer), ()) == (ids[1], ids[2])


def test_tokens_that_a_tokenizer_has_a_name_for_are_used():
    tokenizer = random_tiny().tokenizer
    tokenizer.add_special_tokens({"mask_token": "<mask>", "sep_token": "<sep>"})
    tokenizer.add_tokens(["<think>"])
    used = {tokenizer.added_tokens_decoder[i].content for i in used_tokens(tokenizer)}
    assert {"<mask>", "<sep>", "<think>", "<|end|>", "<|pad|>"} <= used


@pytest.mark.parametrize("architecture, more", [
    ("gpt2", dict(n_embd=32, n_layer=2, n_head=4)), ("phi3", dict(resid_pdrop=0.5)),
    ("opt", dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5)),
    ("qwen2", dict(attention_dropout=0.5)), ("mixtral", dict(router_jitter_noise=0.5))])
def test_train_mode_gives_the_same_scores(architecture, more):
    lm = random_lm(architecture, 1, **more)
    batch = make_batch([([*range(9, 29)], [(2, 6), (9, 20)])])
    with torch.no_grad():
        scores = [torch.cat(lm.score(batch)) for _ in (lm.model.train(), lm.model.eval())]
    assert torch.equal(*scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_folder_works_in_plain_transformers_and_keeps_its_values(tmp_path, dtype):
    lm = load(TINY_HOUSE, dtype=dtype)
    lm.value_rows.weight.data = 9.0 * lm.head.weight.data[200:202].float() * 1.001  # likely
    lm.save(tmp_path)
    rounded = lm.value_rows.weight.to(dtype)  # what a plain head can hold
    assert torch.equal(lm.head.weight[list(lm.value_ids)], rounded)
    assert torch.equal(rounded.float(), lm.value_rows.weight) == (dtype == torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert model.dtype == dtype
    text = "<think> find mug </think> <action> go to desk 1 </action>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    # transformers 4 reads the first names
    for name, key, value in (("tokenizer_config", "tokenizer_class", "PreTrainedTokenizerFast"),
                             ("config", "rope_theta", 10000.0)):
        assert json.loads((tmp_path / f"{name}.json").read_text())[key] == value
    env = make_env("house")
    prompt = House.prompt_builder(*env.reset(GAMES[0])).window_prompt()
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt",
                                        return_dict=True)
    for sample in (False, True):
        torch.manual_seed(0)
        out = model.generate(**ids, do_sample=sample, max_new_tokens=12, num_return_sequences=1 + 15
                             * sample)[:, ids.input_ids.shape[1]:]
        assert not torch.isin(out, torch.tensor(lm.value_ids)).any()
        if not sample:
            response, = Sampler(lm, max_new_tokens=12, temperature=0.0).generate([prompt])
            assert out[0].tolist() == response.ids
    for value_tokens in (None, lm.value_ids):  # those of sapo.json
        again = actor_critic(model, tokenizer, value_tokens)
        assert (again.value_ids, again.tau_v) == (lm.value_ids, lm.tau_v)
        assert torch.equal(again.head.weight, lm.head.weight)
        assert torch.equal(again.value_rows.weight, rounded.float())


def test_unusable_models_are_refused_with_a_reason(tmp_path):
    lm = random_lm("qwen2", 1)
    lm.tokenizer.chat_template = None
    lm.save(tmp_path / "mute")
    adapter, words, short = (tmp_path / name for name in ("adapter", "words", "short"))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    shutil.copytree(TINY_HOUSE, words)  # to a qwen2, transformers gives a tokenizer of Qwen's kind
    config = json.loads((words / "config.json").read_text())
    (words / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    (words / "sapo.json").unlink()
    lm = random_lm("qwen2", 1)
    lm.tokenizer.add_tokens(["one", "more", "word"])
    lm.save(short)
    for name, complaint in ((str(tmp_path / "mute"), "chat template"), (adapter, "does not name"),
                            (words, "tokenizer, .* encodes .* and decodes it as"),
                            (short, "resize_token"),
                            (str(tmp_path), "cannot load"), ("no-such-model", "not a folder here"),
                            ("runs/x/nope", "no such folder"),
                            ("Qwen2.5-1.5B-Instruct", "cannot load")):
        with pytest.raises(ValueError, match=complaint):
            load(name)


def test_value_tokens_have_rows_in_the_head():
    lm = random_tiny()
    tokenizer, size = lm.tokenizer, len(lm.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<|other|>", "<|extra_0|>", "<|extra_1|>"]})
    assert reserve_value_ids(tokenizer, size + 2, lm.stop_ids) == (size, size + 1)


def test_response_ends_with_every_token_that_the_model_or_the_template_names():
    lm = random_lm("qwen2", 1)
    end = lm.chat.end_of_turn_id()
    lm.model.generation_config.eos_token_id, lm.tokenizer.eos_token = [7, 8], None
    assert find_stop_ids(lm.model, lm.tokenizer, lm.chat) == (*sorted({7, 8, end}),)


def test_missing_weights_are_an_error(tmp_path):
    from safetensors.torch import load_file, save_file
    load(TINY_HOUSE).save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="lack 1 tensors, such as model.norm.weight"):
        load(str(tmp_path))


def test_saved_config_has_the_rope_names_of_transformers_4(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0}
    lm = random_lm("llama", 1, rope_parameters=rope | {"rope_theta": 5000.0})
    lm.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5000.0, rope)


@pytest.mark.parametrize("locale", [{}, {"PYTHONUTF8": "0", "LC_ALL": "C",
                                         "PYTHONCOERCECLOCALE": "0"}])
def test_special_tokens_keep_their_ids_in_any_locale(tmp_path, locale):
    """A model is saved and loaded by a process whose encoding is the locale's, twice."""
    lm = random_lm("qwen2", 1)
    names = ["<|\u00fcber|>", "<|\u7528\u6237|>", "<|\u043c\u0438\u0440|>"]
    lm.tokenizer.add_special_tokens({"additional_special_tokens": names})
    lm.tokenizer.chat_template += "{# \u7528\u6237 #}"
    lm.model.resize_token_embeddings(len(lm.tokenizer) + 2)
    lm.save(tmp_path / "0")
    program = ("import sys, model\n"
               "for n in range(2): model.load(f'{sys.argv[1]}/{n}').save(f'{sys.argv[1]}/{n + 1}')")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=RESULTS.parent,
                          env=os.environ | locale, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    again = load(str(tmp_path / "2"))
    assert again.tokenizer.get_vocab() == lm.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == lm.tokenizer.chat_template
    assert again.value_ids == lm.value_ids


def test_models_are_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run" / "final").mkdir(parents=True)
    assert resolve_model("~/run") == str(tmp_path / "run" / "final")
    with pytest.raises(ValueError, match=f"cannot load model {tmp_path}/nope: there is no such"):
        load("~/nope")
    config, _ = imitate.parse(["--out=~/house"])
    assert config.out == f"{tmp_path}/house"


def test_folder_without_a_model_is_named_as_that(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no model in this folder, .*no config.json"):
        load(str(tmp_path))
    run = {"env": "house", "model": "tiny", "seed": 0}
    (tmp_path / "config.json").write_text(json.dumps(run))
    says = f"the run in this folder has no final weights. Continue it with .*--out {tmp_path}"
    with pytest.raises(ValueError, match=f"{says}$"):
        load(str(tmp_path))
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
    for script in train, evaluation:
        with pytest.raises(SystemExit, match=f"{says}, or take --model {tmp_path}/checkpoint-10$"):
            run_main(script, monkeypatch, "--model", tmp_path, "--out", tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [-2, 100])
def test_resized_model_is_used_as_it_is_now(tmp_path, tied, rows):
    """With more rows everything works; without those of w+ and w-, one line says so."""
    lm = random_lm("qwen2", 1, tie_word_embeddings=tied)
    rows += len(lm.head.weight)
    lm.model.resize_token_embeddings(rows)
    batch = make_batch([([*range(9, 29)], [(2, 6), (9, 20)])])
    uses = (lambda: lm.score(batch), lambda: lm.save(tmp_path), lambda: Sampler(lm),
            lambda: actor_critic(lm.model, lm.tokenizer))
    if rows <= max(lm.value_ids):
        for use in uses:
            with pytest.raises(ValueError, match=f"has only {rows} rows: resize_token_embeddings"):
                use()
        return
    for use in uses:
        use()
    assert lm.head.weight.shape[0] == rows
    assert (lm.head.weight is lm.model.get_input_embeddings().weight) == tied
    learner = train.Learner(lm, train.Config())
    assert any(p is lm.head.weight for group in learner.optimizer.param_groups
               for p in group["params"])
    with torch.no_grad():
        lm.value_rows.weight.normal_(std=0.1)
    lm.save(tmp_path)
    again = load(str(tmp_path), device="cpu")
    for one, two in zip(lm.score(batch), again.score(batch)):
        torch.testing.assert_close(one, two)
    assert Sampler(again, max_new_tokens=4).generate(["look"])
    scores = lm.score(batch)
    (scores.p_v.sum() + scores.logp.sum()).backward()
    assert lm.value_rows.weight.grad.abs().sum() > 0 and lm.head.weight.grad.abs().sum() > 0


def test_models_are_found_by_bare_names():
    assert resolve_model("Qwen2.5-1.5B-Instruct") == "Qwen/Qwen2.5-1.5B-Instruct"
    assert resolve_model("me/Qwen2") == "me/Qwen2"
    for env, folder in ((AlfWorld, "tiny-alfworld"), (House, "tiny-house")):
        assert resolve_model("tiny", env.tiny_model).endswith(f"results/{folder}")
    assert resolve_model("tiny").endswith("results/tiny-house")


def test_folders_of_models_recommend_settings_and_pass_them_on(tmp_path):
    recommended = lambda *name: sapo_json_of(*name).get("settings", {})
    assert recommended("tiny", "tiny-house") == {
        **recommended("tiny", "tiny-alfworld"), "iterations": 24}
    assert recommended("tiny")["dtype"] == "float32" and recommended(str(tmp_path)) == {}
    lm = load("tiny")
    assert lm.recommended == recommended("tiny")
    dataclasses.replace(lm, tau_v=2.0).save(tmp_path)
    assert recommended(str(tmp_path)) == load(str(tmp_path)).recommended == lm.recommended
    (tmp_path / "sapo.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read .*sapo.json: Expecting"):
        recommended(str(tmp_path))


def test_head_with_a_hook_or_an_adapter_is_refused():
    lm = random_lm("qwen2", 1)
    torch.nn.init.normal_(lm.head.weight)
    hook = lm.head.register_forward_hook(lambda module, inputs, output: output * 0.1)
    with pytest.raises(ValueError, match="not a plain linear layer"):
        actor_critic(lm.model, lm.tokenizer)
    hook.remove()
    lm.head.lora = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not a plain linear layer"):
        actor_critic(lm.model, lm.tokenizer)


def test_adapters_are_refused():
    lm = random_lm("qwen2", 1)
    layer = lm.model.model.layers[0].mlp
    layer.up_proj.base_layer = torch.nn.Linear(2, 2)  # as peft wraps a layer
    for use in (lambda: actor_critic(lm.model, lm.tokenizer),
                lambda: train.Learner(lm, train.Config())):
        with pytest.raises(ValueError, match="an adapter of another program, that is not merged"):
            use()
