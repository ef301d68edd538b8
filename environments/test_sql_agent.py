"""Tests of environments/sql_agent.py."""
import re
import sqlite3

import pytest

import envs
from environments.sql_agent import SQLAgent
from hf.chat import Chat
from runtime.testing import on_the_cpu  # used automatically
from tools.imitate import bpe_tokenizer, demonstrate, parse, samples_of, tokenizer_for

NAME = "environments.sql_agent:SQLAgent"


def test_demonstrator_wins_held_out_games_and_the_forgetful_one_does_not():
    env, forgetful = SQLAgent(), 0
    for task in env.tasks("test")[:150]:
        turns = demonstrate(env, task, seed=0)
        assert env.reward == envs.REWARD and env.done and len(turns) == 2
        assert " WHERE " in turns[0].label["arguments"]["sql"]
        turns = demonstrate(env, task, seed=0, forget=1.0)
        assert env.done and " WHERE " not in turns[0].label["arguments"]["sql"]
        forgetful += env.reward > 0
    assert 0 < forgetful < 0.3 * 150


def test_train_and_test_share_no_database_and_no_question():
    env, seen = SQLAgent(), {}
    for split, tasks in (("train", env.tasks("train")[:1500]), ("test", env.tasks("test"))):
        databases, pairs, asked, questions = seen[split] = [set() for _ in range(4)]
        for task in tasks:
            obs, info = env.reset(task)
            assert info == {} and (obs, info) == env.reset(task)  # the task determines its game
            databases.add(env.script)
            pairs.add(frozenset(re.findall(r"CREATE TABLE (\w+)", obs)))
            asked.add(env.sql.partition(" = ")[0])
            questions.add(obs.split("\n")[-1])
        assert len(databases) == len(tasks)
    assert all(test and not train & test for train, test in zip(seen["train"], seen["test"]))
    splits = [env.tasks(split) for split in ("train", "test", "validation")]
    assert len(set().union(*splits)) == sum(map(len, splits))
    words = [{*re.findall(r"\w+", " ".join(seen[split][3]))} for split in ("train", "test")]
    assert words[1] <= words[0]


@pytest.mark.parametrize("sql, says", [
    ("SELECT wings FROM birds", "OperationalError: no such column: wings"),
    ("SELECT (", "OperationalError: "), ("", "no rows"), ("SELECT 1; SELECT 2", "one statement"),
    ("DROP TABLE birds", "not authorized"), ("DELETE FROM birds", "not authorized"),
    ("UPDATE birds SET name = 'x'", "not authorized"), ("ATTACH 'x' AS y", "not authorized"),
    ("PRAGMA writable_schema = 1", "not authorized"), ("SELECT randomblob(9)", "not authorized"),
    ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT * FROM n",
     "not authorized"),
    ("SELECT COUNT(*) FROM " + ", ".join(f"birds b{n}" for n in range(12)), "interrupted"),
    ("SELECT 1 WHERE 0", "no rows"), ("SELECT NULL, 'a|b', 1.5", "None|a|b|1.5"), (7, "Error")])
def test_errors_of_sql_and_writes_are_answers(sql, says):
    env = SQLAgent()
    env.reset(5)
    before = env.query("SELECT * FROM birds")
    (message,), reward, terminated, *_ = env.step({"name": "query", "arguments": {"sql": sql}})
    assert message["role"] == "tool" and says in message["content"] and not terminated
    assert reward == 0 and env.query("SELECT * FROM birds") == before


def repeated(times, select):
    """A query in which t4.a is the text "a", joined to itself `times` times, four times over."""
    parts = [f"t{n + 1} AS (SELECT {'||'.join('a' * times)} AS a FROM t{n})" for n in range(4)]
    return f"WITH t0 AS (SELECT 'a' AS a), {', '.join(parts)} SELECT {select} FROM t4"


@pytest.mark.parametrize("sql, says", [
    (repeated(2, "a"), "a" * 16), ("SELECT 'Rome' LIKE '%om_'", "1"), (repeated(60, "a"), "Error"),
    (repeated(9, "COUNT(*)") + ", birds WHERE a LIKE '" + "%a_" * 99 + "'", "too complex"),
    ("SELECT " + "(" * 9999, "stack overflow"), ("SELECT '\0'", "null character"),
    ("SELECT '\ud800'", "UnicodeEncodeError"), ("SELECT -9e999, x'ff'", "-inf|b'\\xff'"),
    ("SELECT CAST(x'ff' AS TEXT)", "Could not decode"), (10 ** 4000, "Error"), ([[]], "Error")])
def test_a_query_takes_neither_all_memory_nor_an_hour(sql, says):
    env = SQLAgent()
    env.reset(5)
    if says == "too complex" and not hasattr(sqlite3.Connection, "setlimit"):
        pytest.skip("limits need Python 3.11")
    (message,), reward, terminated, *_ = env.step({"name": "query", "arguments": {"sql": sql}})
    assert says in message["content"] and (reward, terminated) == (0, False)


def test_rows_are_limited_and_an_answer_ends_the_game():
    env = SQLAgent()
    for value, reward in ((191, envs.REWARD), (" 191 ", envs.REWARD), ("192", 0), (None, 0)):
        env.reset(5)
        assert env.right == "191"
        assert len(env.query("SELECT * FROM birds, tools").split("\n")) == 10
        answer = env.step({"name": "answer", "arguments": {"value": value}})
        assert answer[1:] == (reward, True, False, {})


def test_demonstrations_are_conversations_with_tools():
    config, flags = parse(["--env", NAME])
    assert (config.context, config.max_new_tokens, config.mini_batch) == ("full", 128, 64)
    tokenizer = tokenizer_for(config, flags)
    for chat in Chat(tokenizer), Chat(bpe_tokenizer()):  # as trained, and of bytes alone
        env = SQLAgent()
        turns = demonstrate(env, 5, seed=0)
        ((ids, spans),) = samples_of(chat, turns, "full", config)
        text, schemas = chat.tokenizer.decode(ids), SQLAgent.tool_schemas()
        assert text.startswith(f"<|system|>{env.system}\n") and len(schemas) == 2
        assert f"<|end|><|user|>{turns[0].obs}<|end|><|assistant|><think> " in text
        assert "</tool_call><|end|><|tool|>191<|end|><|assistant|>" in text
        for (start, end), turn in zip(spans, turns, strict=True):
            response = chat.tokenizer.decode(ids[start:end]).removesuffix("<|end|>")
            assert env.parse_action(response) == (turn.label, True)
    # its system message and schemas are one token each: the whole prompt is short
    assert len(Chat(tokenizer).encode(env.system)) == 1 and spans[0][0] > 1000
    assert len(samples_of(Chat(tokenizer), turns, "full", config)[0][0]) < 200
