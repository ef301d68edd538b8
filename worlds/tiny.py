"""The tiny model: a randomly initialised Qwen2 of about 0.2 M parameters and a tokenizer of words,
which need no download and learn on a laptop. results/tiny-house and results/tiny-alfworld are such
models after imitation; nobody needs this file to understand SAPO."""
import re

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from machine.runs import read_json

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2)

SPOKEN = (  # fixed strings of the house and of ALFWorld
    "go to|open|close|take|move|clean|heat|cool|use|examine|look|inventory|help|from|from the|to|"
    "to the|with|using the|put|two|hot|in|at|under the desklamp|You are in the middle of a room. "
    "Looking quickly around you, you see|Your task is to|You arrive at|The|On the|you see|"
    "is closed|is open. In it|You open the|You close the|You pick up the|You move the|"
    "You clean the|You heat the|You cool the|You turn on the|Nothing happens|You are carrying|"
    "You are not carrying anything|nothing|You are facing the|Next to it|This is|find|drop|done|"
    "There's nothing special about|<think>|</think>|<action>|</action>|"
    "-= Welcome to TextWorld, ALFRED! =-").split("|")


def tiny_tokenizer(phrases, nouns):
    """A word-level tokenizer: a fixed phrase ("You arrive at") or a numbered noun ("cabinet 1") is
    one token, and an unknown word is spelled, so that every ASCII string can be encoded. Spaces,
    punctuation and articles separate words and are forgotten, which halves the tokens to read."""
    letters, numbers = [chr(c) for c in range(32, 127)], [str(n) for n in range(100)]
    control = ["<|pad|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|end|>"]
    spelled = letters + [f"##{c}" for c in letters] + [f"## {n}" for n in numbers]
    entries = control + spelled + sorted(nouns) + sorted(phrases) + numbers
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<|unknown|>",
                                           max_input_chars_per_word=10 ** 6))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    left, right = r"(?<![A-Za-z])", r"(?![A-Za-z])"
    whole = [left * p[0].isalpha() + re.escape(p) + right * p[-1].isalpha()
             for p in sorted(phrases, key=len, reverse=True)]
    word = rf"{left}(?!(?:a|an|and|the){right})[A-Za-z]+"
    pattern = "|".join([*whole, r"[A-Za-z]+ \d+", word, r"\d+", r"[^\s\w.,:;'\"\[\]]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(c, special=True) for c in control])
    template = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
                "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template,
                                   eos_token="<|end|>", pad_token="<|pad|>",
                                   unk_token="<|unknown|>", clean_up_tokenization_spaces=False)


def tiny(phrases=(), nouns=(), seed=0):
    """A randomly initialised Qwen2 of about 0.2 M parameters and its tokenizer. Its embeddings are
    untied, and the rows of w+ and w- are zero, so that V = Q = 0 at the start."""
    tokenizer = tiny_tokenizer(phrases, nouns)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 2, initializer_range=0.1, max_position_embeddings=16384,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.lm_head.weight.data[-2:] = 0
    return model, tokenizer


def is_tiny(name):
    """Whether a name is "tiny" or the folder of such a model."""
    return name == "tiny" or SIZES.items() <= read_json(f"{name}/config.json").items()
