"""Prompted models: ReAct and Reflexion, by a local model or behind an OpenAI-compatible server.

    python tools/prompted.py --model SmolLM2-135M-Instruct --prompt react
    python tools/prompted.py --model gpt-4o --endpoint https://api.openai.com/v1 --prompt reflexion

It plays, reports and writes as eval.py does, whose flags it takes. `plain` has the prompts of
training. `react` shows the model its thoughts and turns so far, as many as fit (arXiv 2210.03629).
In `reflexion` it also tries a game again, with what it told itself after failures (2303.11366).
"""
import functools
import os
import re
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
from eval import SIDE_BY_SIDE, evaluate, local, make_parser, record
from machine.cli import one_line_errors
from machine.ranks import join_ranks
from rollout import EVALUATION, trajectories, uniforms

REACT = ("{role} Your task is to: {task}\n{lessons}What has happened so far:\n{trace}Observation: "
         "{obs}\nCommands that work now: [{commands}].\n\nContinue with your next thought and "
         "action. {answer}")
LESSONS = "You have tried this task before and failed. What you told yourself then:\n{lessons}\n"
REFLECT = ("{role} Your task was to: {task}\n{lessons}This is what happened:\n{trace}Observation: "
           "{obs}\n\nYou did not succeed. In a few sentences, tell yourself what went wrong and "
           "what to do differently in your next attempt.")
TRIALS = 3  # attempts at a game in Reflexion


def attempts(sampler, games, pool, *, style, seed=0, rows=SIDE_BY_SIDE, history=2):
    """Plays {number: game} and yields (number, record), as eval.attempt does. Reflexion tries a
    game up to TRIALS times, and yields a record each time."""
    lessons = {number: [] for number in games}
    show = None if style == "plain" else (
        lambda number, turns, episode: react(turns, episode, lessons[number]))
    for trial in range(TRIALS if style == "reflexion" else 1):
        stream, failed = (seed, 0, EVALUATION + trial), {}
        for number, turns, episode in trajectories(
                sampler, [*games.values()], pool, trajs=games, rows=rows, seed=stream,
                history=history, show=show):
            about = {"trials": trial + 1, "lessons": [*lessons[number]]}
            yield number, record(pool.env, games[number], turns, episode) | about
            if not episode.info["won"]:
                failed[number] = turns, episode
        games = {number: games[number] for number in failed}
        if style == "reflexion" and trial + 1 < TRIALS:
            reflect(sampler, failed, lessons, rows, stream)


def react(turns, episode, lessons, template=REACT):
    """Prompts with all thoughts and turns, then with fewer of the oldest."""
    told, fields = "", episode.now(episode.info["admissible"])
    if lessons:
        told = LESSONS.format(lessons="\n".join(f"- {' '.join(x.split())}" for x in lessons))
    past = [f"Observation: {episode.shown(turn.obs)}\nThought: {thought_of(turn.text)}\n"
            f"Action: {turn.action}\n" for turn in turns]
    for n in range(len(past) + 1):
        yield template.format(**fields, lessons=told, trace="".join(past[n:]))


def thought_of(text):
    """What stands between the think tags, or before the end of a thought that the template has
    begun, or before the action."""
    found = (re.search("<think>(.*?)</think>", text, re.I | re.S)
             or re.match("(.*?)(?:</think>|<action>)", text, re.I | re.S))
    return " ".join(found[1].split()) if found else ""


def reflect(sampler, failed, lessons, rows, seed):
    """Adds to the lessons what the model says of its failures, where a prompt fits."""
    asked = []
    for n, (turns, episode) in failed.items():
        texts = react(turns, episode, lessons[n], REFLECT)
        fits = (ids for ids in map(sampler.lm.chat.prompt, texts) if len(ids) <= sampler.limit)
        if ids := next(fits, None):
            asked.append((n, ids, uniforms(seed, n, len(turns), sampler.max_new)))
    while asked or sampler.busy:
        while asked and sampler.busy < rows:
            sampler.add(*asked.pop())
        for number, response in sampler.run():
            lessons[number].append(sampler.lm.text(response.ids))


class Endpoint:
    """An OpenAI-compatible server in the place of a Sampler: requests are under way in threads, and
    the tokens are characters. Its client asks again where the server is busy."""

    context = "window"
    lm = SimpleNamespace(text="".join, chat=SimpleNamespace(
        response_prefix="", prompt=lambda text, before=(): list(text)))

    def __init__(self, args):
        self.url, self.max_new = args.endpoint, args.max_new
        self.limit = 4 * args.max_prompt  # a token has about four letters
        self.open, self.steps = {}, 0
        import openai
        key = os.environ.get("OPENAI_API_KEY") or "none"  # the client insists on one
        client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=6, timeout=300)
        self.create = functools.partial(client.chat.completions.create, model=args.model,
                                        temperature=args.temperature, max_tokens=args.max_new)

    @property
    def busy(self):
        return len(self.open)

    def add(self, name, letters, u):
        def answer():
            try:
                said = self.create(messages=[{"role": "user", "content": "".join(letters)}])
                text = said.choices[0].message.content or ""  # None: it ran out of tokens
                request.set_result(SimpleNamespace(ids=[*text], logp=[], v=0.0, q=0.0))
            except Exception as error:  # the client's own, or an answer of another shape
                why = " ".join(repr(error).split())[:300]
                request.set_exception(ValueError(f"{self.url}: {why}"))

        request = Future()
        self.open[request] = name
        threading.Thread(target=answer, daemon=True).start()  # Ctrl-C does not wait for a daemon

    def run(self, steps=None):
        """The answers that are there. It waits for one unless a game computes (`steps`)."""
        done, _ = wait(self.open, None if steps is None else 0, FIRST_COMPLETED)
        self.steps += steps or 0
        return [(self.open.pop(request), request.result()) for request in done]

    def forget(self):
        self.open = {}

    def drop(self, name):
        pass


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="react", choices=("plain", "react", "reflexion"))
    parser.add_argument("--endpoint", metavar="URL", help="its key in OPENAI_API_KEY")
    with one_line_errors("prompted.py", envs.GameError):
        args = parser.parse_args()
        args.context = "window"  # each turn shows the past anew
        args.max_prompt = args.max_prompt or 8192  # which holds all of ALFWorld's turns
        args.rows = args.rows or (16 if args.endpoint else SIDE_BY_SIDE)
        join_ranks()
        evaluate(args, Endpoint if args.endpoint else local,
                 functools.partial(attempts, style=args.prompt), args.prompt)


if __name__ == "__main__":
    main()
