"""Tests of ReAct, Reflexion and the endpoint, which is a server on this machine."""
import http.server
import json
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from envs import Pool, make_env, tasks
from rollout import Response
from runtime.testing import on_the_cpu, run_main  # used automatically
from tools import prompted
from tools.prompted import Endpoint, run_trials


class Agent(Endpoint):
    """Looks around in the first wins[i] attempts at game i, and wins the next one. It records its
    prompts: (game, attempt, turn, prompt)."""

    def __init__(self, plans, wins, limit):
        self.plans, self.wins, self.limit = plans, wins, limit
        self.max_new_tokens, self.steps = 4, 0
        self.prompts, self.trial, self.turn = [], Counter(), Counter()

    def add(self, i, characters, u):
        trial, turn = self.trial[i], self.turn[i]
        text = "".join(character for *_, character in characters)
        self.prompts.append((i, trial, turn, text))
        self.turn[i] += 1
        action = self.plans[i][turn] if trial >= self.wins[i] else "look"
        response = f"<think> idea {turn} </think> <action> {action} </action>"
        if "You did not succeed" in text:
            response = f"lesson {trial} of {i}"
            self.trial[i], self.turn[i] = trial + 1, 0
        request = Future()
        request.set_result(Response(list(response), [], 0.0, 0.0))
        self.requests[request] = i


def last_attempts(style, wins, limit=10 ** 9):
    """-> the prompts, and the record of the last attempt at each game."""
    games, plans, env = tasks("house", "test")[:len(wins)], [], make_env("house")
    for game in games:
        env.reset(game)
        plans.append(env.expert())
    model = Agent(plans, wins, limit)
    records = dict(run_trials(model, dict(enumerate(games)), Pool("house"), style=style))
    return model.prompts, [records[number] for number in range(len(games))]


def test_plain_and_react_prompts():
    prompts, (won, lost) = last_attempts("react", [0, 9])
    assert won["won"] and won["trials"] == 1 and won["lessons"] == []
    assert not lost["won"] and lost["turns"] == 20
    env, plan = make_env("house"), won["actions"]
    seen = [env.reset(won["task"])[0].strip()] + [env.step(action)[0] for action in plan[:-1]]
    last = [text for i, *_, text in prompts if i == 0][-1]
    parts = [f"Observation: {o}\nThought: idea {n}\nAction: {a}\n"
             for n, (o, a) in enumerate(zip(seen, plan[:-1]))]
    now = f"Observation: {seen[-1]}\nCommands that work now: ["
    assert "".join(parts) + now in last and env.room.task in last
    prompts, _ = last_attempts("react", [9], limit=1500)  # the oldest turns make room
    long = prompts[-1][-1]
    assert len(long) <= 1500 and "idea 18" in long and "idea 3 " not in long
    prompts, _ = last_attempts("plain", [0])
    assert "idea" not in prompts[1][-1] and "Steps taken so far: 1." in prompts[1][-1]


def test_an_action_in_the_trace_is_one_line():
    env = make_env("house")
    builder = env.prompt_builder(*env.reset(tasks("house", "test")[0]))
    turn = SimpleNamespace(obs="A room.", text="", action="look\nObservation: You won")
    prompt = next(prompted.react_prompts([turn], builder, []))
    assert "\nAction: look Observation: You won\n" in prompt


def test_plain_prompts_are_those_of_training(monkeypatch):
    seen = []
    monkeypatch.setattr(prompted, "evaluate", lambda args, *_: seen.append(args))
    for flags in ("--prompt plain", "--prompt plain --context full", "--prompt react",
                  "--prompt plain --endpoint x"):
        run_main(prompted, monkeypatch, *flags.split())
    assert [(args.context, args.max_prompt) for args in seen] == [
        (None, None), ("full", None), ("window", 8192), ("window", None)]
    for flags in ("--prompt react", "--prompt plain --endpoint x"):
        with pytest.raises(SystemExit, match="--context full is for --prompt plain with a local"):
            run_main(prompted, monkeypatch, *flags.split(), "--context", "full")


def test_reflexion_tries_three_times_with_its_lessons():
    prompts, records = last_attempts("reflexion", [0, 1, 3])
    ends = [(r["won"], r["trials"], len(r["lessons"])) for r in records]
    assert ends == [(True, 1, 0), (True, 2, 1), (False, 3, 2)]
    firsts = {(i, trial): text for i, trial, turn, text in prompts if turn == 0}
    assert "lesson" not in firsts[2, 0] and "- lesson 0 of 2\n" in firsts[2, 1]
    assert "- lesson 0 of 2\n- lesson 1 of 2\n" in firsts[2, 2] and (0, 1) not in firsts
    reflections = [text for *_, text in prompts if "You did not succeed" in text]
    assert len(reflections) == 3 and all("Thought: idea 19" in text for text in reflections)


@pytest.fixture
def endpoint(monkeypatch):
    """-> (url, [(status, body), ...] to answer, of which the last one stays, the requests)."""
    pytest.importorskip("openai")
    answers, requests = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", answers, requests
        server.shutdown()


def chat_answer(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def main(endpoint, tmp_path, monkeypatch):
    """A function that plays two games of three turns by the endpoint."""
    def main(*flags, out):
        run_main(prompted, monkeypatch, "--model", "some/gpt", "--endpoint", endpoint[0], *flags,
                 "--limit", 2, "--horizon", 3, "--out", tmp_path / out)
    return main


def test_endpoint_plays_and_finished_games_survive_a_failure(endpoint, main, tmp_path):
    url, answers, requests = endpoint
    answers += [(429, "slow down"), chat_answer("<think> hm </think> <action> look </action>")]
    main("--prompt", "reflexion", out="e.json")
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["n"] == 2 and report["success"] == 0 and report["prompt"] == "reflexion"
    assert len(requests) == 1 + 2 * (3 * 3 + 2)  # three attempts of three turns, two reflections
    assert requests[-1]["model"] == "some/gpt" and len(requests[-1]["messages"]) == 1
    # the first game's answers are None, of a model that ran out of tokens; the second game fails
    for status, body, why in ((404, "no such\nmodel", "404"), (200, '{"choices": []}', "Index")):
        answers[:] = [chat_answer(None)] * 3 + [(status, body)]
        with pytest.raises(SystemExit, match=f"^prompted.py: {url}: .*{why}.*$"):
            main("--max_num_seqs", 1, out="f.json")
        assert json.loads((tmp_path / "f.jsonl.new").read_text())["turns"] == 3


def test_refused_prompt_ends_no_evaluation_but_a_server_that_refuses_all_does(
        endpoint, main, tmp_path, capsys):
    _, answers, _ = endpoint
    refusal = 400, '{"error": {"message": "content filter"}}'
    answers += [chat_answer("<action> look </action>"), refusal, chat_answer("hm"), refusal]
    main("--prompt", "plain", "--max_num_seqs", 1, out="e.json")
    first, second = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert first["responses"] == ["<action> look </action>", "", "hm"]
    assert second["responses"] == ["", "", ""]
    assert capsys.readouterr().err.count("content filter") == 4
    answers[:] = [refusal]  # nothing was answered before, so it may be a wrong setting
    with pytest.raises(SystemExit, match="400.*content filter"):
        main("--max_num_seqs", 1, out="f.json")


def test_endpoint_gets_messages_with_their_roles(endpoint):
    url, answers, requests = endpoint
    answers += [chat_answer("look")]
    server = Endpoint(SimpleNamespace(endpoint=url, max_new_tokens=8, max_prompt=64, model="m",
                                      temperature=0.4))
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "A room."},
                {"role": "user", "content": "What do you do?"}]
    server.add(0, server.lm.chat.encode_messages(messages), None)
    assert [(name, response.ids) for name, response in server.run()] == [(0, [*"look"])]
    assert requests[-1]["messages"] == messages
