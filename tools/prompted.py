"""Prompted agents: ReAct and Reflexion, with a local model or an OpenAI-compatible server.

    python tools/prompted.py --model SmolLM2-135M-Instruct --prompt react
    python tools/prompted.py --model gpt-4o --endpoint https://api.openai.com/v1 --prompt reflexion

It plays and reports as eval.py does, with the same flags. `plain` uses the prompts of training.
`react` (arXiv 2210.03629) shows the model its thoughts and turns so far, as many as fit.
`reflexion` (arXiv 2303.11366) also retries failed games, with what the model concluded from them.
These two, and a server, play in `window`, so they cannot play environments with tools.
"""
import functools
import itertools
import os
import re
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import envs
from eval import MAX_NUM_SEQS, episode_record, evaluate, load_sampler, make_parser
from rollout import EVALUATION, trajectories, uniform_numbers
from runtime.answers import as_text
from runtime.cli import one_line_errors
from runtime.distributed import init_distributed

REACT = ("{role} Your task is to: {task}\n{lessons}What has happened so far:\n{trace}Observation: "
         "{obs}\n{commands}\n\nContinue with your next thought and action. {answer}")
LESSONS = "You have tried this task before and failed. What you told yourself then:\n{lessons}\n"
REFLECT = ("{role} Your task was to: {task}\n{lessons}This is what happened:\n{trace}Observation: "
           "{obs}\n\nYou did not succeed. In a few sentences, tell yourself what went wrong and "
           "what to do differently in your next attempt.")
TRIALS = 3  # per game in Reflexion


def run_trials(sampler, games, pool, *, style, seed=0, max_num_seqs=MAX_NUM_SEQS, history=2):
    """Plays {number: game} and yields (number, episode_record), as eval.run_episodes does.
    Reflexion plays a game up to TRIALS times, and yields a record each time."""
    lessons = {number: [] for number in games}
    make_messages = None if style == "plain" else (
        lambda number, turns, builder: (
            builder.system + envs.user_message(prompt)
            for prompt in react_prompts(turns, builder, lessons[number])))
    for trial in range(TRIALS if style == "reflexion" else 1):
        stream, failed = (seed, 0, EVALUATION + trial), {}
        for number, turns, builder in trajectories(
                sampler, [*games.values()], pool, trajs=games, max_num_seqs=max_num_seqs,
                seed=stream, history=history, make_messages=make_messages):
            about = {"trials": trial + 1, "lessons": [*lessons[number]]}
            yield number, episode_record(pool.env, games[number], turns, builder) | about
            if not builder.info["won"]:
                failed[number] = turns, builder
        games = {number: games[number] for number in failed}
        if style == "reflexion" and trial + 1 < TRIALS:
            reflect(sampler, failed, lessons, max_num_seqs, stream)


def react_prompts(turns, builder, lessons, template=REACT):
    """Yields the prompt with all thoughts and turns, then with fewer of the oldest."""
    past_lessons, fields = "", builder.fields()
    fields["answer"], fields["commands"] = builder.instruction, ""
    if builder.info["admissible"] is not None:
        fields["commands"] = envs.COMMANDS.format(commands=envs.quoted(builder.listed()))
    if lessons:
        past_lessons = LESSONS.format(
            lessons="\n".join(f"- {' '.join(lesson.split())}" for lesson in lessons))
    # what the model wrote is one line, so that it cannot begin as an observation does
    past = [f"Observation: {builder.format_obs(turn.obs)}\nThought: {thought_of(turn.text)}\n"
            f"Action: {' '.join(envs.action_text(turn.action).splitlines())}\n" for turn in turns]
    for n in range(len(past) + 1):
        yield template.format(**fields, lessons=past_lessons, trace="".join(past[n:]))


def thought_of(text: str) -> str:
    """The text between the think tags; or, as a template may begin the thought, before </think>; or
    before the action."""
    found = (re.search("<think>(.*?)</think>", text, re.I | re.S)
             or re.match("(.*?)(?:</think>|<action>)", text, re.I | re.S))
    return " ".join(found[1].split()) if found else ""


def reflect(sampler, failed, lessons, max_num_seqs, seed):
    """Asks the model what went wrong in its failed games, and adds the answers to `lessons`. Games
    of which no prompt fits are skipped."""
    waiting = []
    for n, (turns, builder) in failed.items():
        prompts = react_prompts(turns, builder, lessons[n], REFLECT)
        encoded = map(sampler.lm.chat.encode_user_turn, prompts)
        if ids := next((ids for ids in encoded if len(ids) <= sampler.limit), None):
            uniforms = uniform_numbers(seed, n, len(turns), sampler.max_new_tokens)
            waiting.append((n, ids, uniforms))
    while waiting or sampler.busy:
        while waiting and sampler.busy < max_num_seqs:
            sampler.add(*waiting.pop())
        for number, response in sampler.run():
            lessons[number].append(sampler.lm.text(response.ids))


def characters_of(messages: list[dict], before=False, tools=None) -> list[tuple]:
    """The tokens of a prompt for a server, which has the tokenizer: its characters, each with the
    number and the role of its message, [(number, role, character), ...]."""
    return [(number, message["role"], character)
            for number, message in enumerate(messages) for character in message["content"]]


class Endpoint:
    """An OpenAI-compatible server with the interface of a Sampler. Its tokens are characters
    (characters_of). Every request has a thread. The openai client retries where the
    server is busy or out of reach. Once it has answered one, a prompt that it refuses (status 400
    or 422: its filter, or too long) has an empty response, with a warning. ValueError: any other
    failure, and a refusal before the first answer, which may be one of all prompts."""

    context = "window"
    lm = SimpleNamespace(text="".join, chat=SimpleNamespace(
        response_prefix="", encode_messages=characters_of,
        encode_user_turn=lambda text: characters_of([{"role": "user", "content": text}])))

    def __init__(self, settings):
        import openai
        self.url, self.max_new_tokens = settings.endpoint, settings.max_new_tokens
        self.limit = 4 * settings.max_prompt  # a token has about four characters
        self.requests, self.steps, self.answered = {}, 0, False
        key = os.environ.get("OPENAI_API_KEY") or "none"  # the client requires one
        client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=6, timeout=300)
        self.create = functools.partial(
            client.chat.completions.create, model=settings.model, temperature=settings.temperature,
            max_tokens=settings.max_new_tokens)

    @property
    def busy(self):
        return len(self.requests)

    def add(self, name, characters, uniforms):
        def send():
            try:
                completion = self.create(messages=[
                    {"role": role, "content": "".join(character for *_, character in part)}
                    for (_, role), part in itertools.groupby(characters, lambda c: c[:2])])
                content = completion.choices[0].message.content or ""  # None: it ran out of tokens
                text = as_text(content, "a response")
                self.answered = True
            except Exception as error:  # the client's own, or an answer of another form
                why = f"{self.url}: {' '.join(repr(error).split())[:300]}"
                if not self.answered or getattr(error, "status_code", 0) not in (400, 422):
                    request.set_exception(ValueError(why))
                    return
                print(f"a prompt is refused, so its response is empty: {why}", file=sys.stderr)
                text = ""
            request.set_result(SimpleNamespace(ids=[*text], logp=[], v=0.0, q=0.0))

        request = Future()
        self.requests[request] = name
        threading.Thread(target=send, daemon=True).start()  # Ctrl-C does not wait for a daemon

    def run(self, steps=None):
        """Waits a moment for an answer -> those that have arrived. `steps` are counted as if they
        were decoded; None waits until one is there."""
        done, _ = wait(self.requests, None if steps is None else 0.02, FIRST_COMPLETED)
        self.steps += steps or 0
        return [(self.requests.pop(request), request.result()) for request in done]

    def weights_changed(self, lm):
        self.forget()

    def forget(self):
        self.requests = {}

    def drop(self, name):
        pass


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="react", choices=("plain", "react", "reflexion"))
    parser.add_argument("--endpoint", metavar="URL", help="of a server; its key in OPENAI_API_KEY")
    with one_line_errors("prompted.py", envs.GameError):
        args = parser.parse_args()
        if args.prompt != "plain" or args.endpoint:
            if args.context == "full":
                raise ValueError("--context full is for --prompt plain with a local model")
            args.context = "window"
        if args.prompt != "plain":  # its prompts have all of the past themselves
            args.max_prompt = args.max_prompt or 8192  # enough for 50 turns of ALFWorld
        args.max_num_seqs = args.max_num_seqs or (16 if args.endpoint else MAX_NUM_SEQS)
        init_distributed()
        evaluate(args, Endpoint if args.endpoint else load_sampler,
                 functools.partial(run_trials, style=args.prompt), args.prompt)


if __name__ == "__main__":
    main()
