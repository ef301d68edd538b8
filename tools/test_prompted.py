"""Tests of ReAct, Reflexion and the endpoint, which is a server on this machine."""
import contextlib
import json
import threading
from collections import Counter

import pytest

from envs import Pool, make_env, tasks
from rollout import Response
from tools import prompted
from tools.prompted import Endpoint, attempts
from tools.test_bench import on_the_cpu, run_main  # the first one acts by itself


class Knowing:
    """A sampler that asks the house's expert, but only looks around in the first wins[i] attempts
    at game i. It keeps what it is asked: (game, attempt, turn, prompt)."""

    context, max_new, steps, lm = "window", 4, 0, Endpoint.lm

    def __init__(self, games, wins, limit=10 ** 9):
        self.games, self.wins, self.limit = games, wins, limit
        self.asked, self.said, self.trial, self.turn, self.envs = [], [], Counter(), Counter(), {}

    busy = property(lambda self: len(self.said))

    def add(self, i, letters, u):
        trial, turn, text = self.trial[i], self.turn[i], "".join(letters)
        self.asked.append((i, trial, turn, text))
        if "You did not succeed" in text:
            self.trial[i], self.turn[i] = trial + 1, 0
            return self.said.append((i, f"lesson {trial} of {i}"))
        if turn == 0:
            self.envs[i] = make_env("house")
            self.envs[i].reset(self.games[i])
        action = self.envs[i].expert()[0] if trial >= self.wins[i] else "look"
        self.envs[i].step(action)
        self.turn[i] = turn + 1
        self.said.append((i, f"<think> idea {turn} </think> <action> {action} </action>"))

    def run(self, steps=None):
        said, self.said = self.said, []
        return [(i, Response(list(text), [], 0.0, 0.0)) for i, text in said]

    def forget(self):
        self.said = []

    def drop(self, i):
        pass


def last_attempts(model, games, pool, style):
    """The record of the last attempt at each game."""
    records = dict(attempts(model, dict(enumerate(games)), pool, style=style))
    return [records[number] for number in range(len(games))]


def test_plain_and_react_prompts_show_what_they_should():
    games = tasks("house", "test")[:3]
    with contextlib.closing(Pool("house")) as pool:
        model = Knowing(games, [0, 0, 9])
        records = last_attempts(model, games, pool, "react")
        assert [r["won"] for r in records] == [True, True, False]
        assert [r["task"] for r in records] == games and records[2]["turns"] == 20
        env = make_env("house")
        env.reset(games[0])
        plan = env.expert()
        assert records[0]["actions"] == plan and records[0]["trials"] == 1
        assert records[0]["lessons"] == [] and records[0]["valid_actions"] == 1
        last = [text for i, *_, text in model.asked if i == 0][-1]
        seen = [env.reset(games[0])[0].strip()] + [env.step(a)[0] for a in plan[:-1]]
        parts = [f"Observation: {o}\nThought: idea {n}\nAction: {a}\n"
                 for n, (o, a) in enumerate(zip(seen, plan[:-1]))]
        now = f"Observation: {seen[-1]}\nCommands that work now: ["
        assert "".join(parts) + now in last and last.count(env.task) >= 1
        short = Knowing(games, [0, 0, 9], limit=1500)  # the oldest turns make room
        last_attempts(short, games, pool, "react")
        long = [text for i, *_, text in short.asked if i == 2][-1]
        assert len(long) <= 1500 and "idea 18" in long and "idea 3 " not in long
        plain = Knowing(games, [0, 0, 0])
        last_attempts(plain, games, pool, "plain")
        assert all("idea" not in text for *_, text in plain.asked)
        assert "Steps taken so far: 1." in [text for i, *_, text in plain.asked if i == 0][1]


def test_reflexion_tries_three_times_with_its_lessons():
    games = tasks("house", "test")[:4]
    with contextlib.closing(Pool("house")) as pool:
        model = Knowing(games, [0, 1, 2, 3])
        records = last_attempts(model, games, pool, "reflexion")
    ends = [(r["won"], r["trials"], len(r["lessons"])) for r in records]
    assert ends == [(True, 1, 0), (True, 2, 1), (True, 3, 2), (False, 3, 2)]
    firsts = {(i, trial): text for i, trial, turn, text in model.asked if turn == 0}
    assert "lesson" not in firsts[3, 0] and "- lesson 0 of 3\n" in firsts[3, 1]
    assert "- lesson 0 of 3\n- lesson 1 of 3\n" in firsts[3, 2] and (0, 1) not in firsts
    reflections = [text for *_, text in model.asked if "You did not succeed" in text]
    assert len(reflections) == 5
    assert all("Thought: idea 19" in text for text in reflections)


@pytest.fixture
def endpoint(monkeypatch):
    """A server that speaks the protocol -> (url, says, requests). `says` holds its answers as
    (status, headers, body), the last one for every further request; status None hangs up."""
    pytest.importorskip("openai")
    import http.server
    says, requests = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            status, headers, text = says.pop(0) if len(says) > 1 else says[0]
            if status is None:
                return self.connection.close()
            self.send_response(status)
            for pair in ({"Content-Type": "application/json"} | headers).items():
                self.send_header(*pair)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", says, requests
    server.shutdown()
    server.server_close()


def chat_answer(text):
    message = {"role": "assistant", "content": text}
    return 200, {}, json.dumps({"choices": [{"index": 0, "message": message}]})


def test_an_endpoint_plays_and_its_answers_survive_a_failure(endpoint, tmp_path, monkeypatch):
    url, says, requests = endpoint
    says += [(429, {"Retry-After": "0"}, "slow down"),
             chat_answer("<think> hm </think> <action> look </action>")]

    def main(*flags, out):
        run_main(prompted, monkeypatch, "--model", "some/gpt", "--endpoint", url, *flags, "--out",
                 tmp_path / out)

    main("--prompt", "reflexion", "--limit", 2, "--horizon", 3, out="e.json")
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["n"] == 2 and report["success"] == 0 and report["prompt"] == "reflexion"
    assert len(requests) == 1 + 2 * (3 * 3 + 2)  # three attempts of three turns, two reflections
    assert requests[-1][0] == "/v1/chat/completions" and requests[-1][2]["model"] == "some/gpt"
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [r["trials"] for r in lines] == [1, 2, 3, 1, 2, 3]  # by game
    says[:] = [chat_answer("")] * 3 + [(404, {}, "no such\nmodel")]  # in the second game
    with pytest.raises(SystemExit, match="404.*; 1 episodes .* in .*f.jsonl.new$"):
        main("--limit", 2, "--rows", 1, "--horizon", 3, out="f.json")
    assert json.loads((tmp_path / "f.jsonl.new").read_text())["turns"] == 3


def test_what_an_endpoint_refuses_is_said_in_one_line(endpoint, monkeypatch):
    url, says, _ = endpoint
    ask = Endpoint(url, "gpt", 0, 9)
    for status, body, message in ((401, "who?", "OPENAI_API_KEY is missing or refused.*401"),
                                  (200, "{", "JSON"), (200, '{"choices": []}', "IndexError")):
        says[:] = [(status, {}, body)]
        with pytest.raises(ValueError, match=message) as stop:
            ask.ask("hi")
        assert str(stop.value).startswith(url) and "\n" not in str(stop.value)
    says[:] = [chat_answer(None)]  # what a model says that ran out of tokens
    assert ask.ask("hi") == ""
    with pytest.raises(ValueError, match="begins with http://"):
        Endpoint("localhost:8000/v1", "gpt", 0, 9)
