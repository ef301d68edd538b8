"""A server in the place of a Sampler: eval.py --endpoint. It is not needed to understand SAPO."""
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace


class Endpoint:
    """An OpenAI-compatible server in the place of a Sampler: requests are under way in threads, and
    the tokens are characters. Its client asks again where the server is busy."""

    context = "window"
    lm = SimpleNamespace(text="".join, chat=SimpleNamespace(
        first=list, prompts=lambda texts, before: [list(text) for text in texts]))

    def __init__(self, url, model, temperature, max_new, max_prompt=2048):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint {url}: an address begins with http:// or https://")
        import openai
        key = os.environ.get("OPENAI_API_KEY") or "none"  # the client insists on one
        self.client = openai.OpenAI(base_url=url, api_key=key, max_retries=6, timeout=300)
        self.options = {"model": model, "temperature": temperature, "max_tokens": max_new}
        self.url, self.max_new = url, max_new
        self.limit = 4 * max_prompt  # a token has about four letters
        self.open, self.steps = {}, 0

    def ask(self, text):
        """-> the answer to a prompt. ValueError: there is none."""
        chat = [{"role": "user", "content": text}]
        try:
            answer = self.client.chat.completions.create(messages=chat, **self.options)
            content = answer.choices[0].message.content
            if content is None or isinstance(content, str):
                return content or ""  # None: it ran out of tokens
            why = f"the answer has no text but {content!r}"
        except Exception as error:  # the client's own, or an answer of another shape
            refused = getattr(error, "status_code", None) in (401, 403)
            why = f"{'OPENAI_API_KEY is missing or refused: ' if refused else ''}{error!r}"
        raise ValueError(f"{self.url}: {' '.join(why.split())[:300]}")

    @property
    def busy(self):
        return len(self.open)

    def add(self, name, letters, u):
        def answer():
            try:
                request.set_result(self.ask("".join(letters)))
            except ValueError as error:
                request.set_exception(error)

        request = Future()
        self.open[request] = name
        threading.Thread(target=answer, daemon=True).start()  # Ctrl-C does not wait for a daemon

    def run(self, steps=None):
        """The answers that are there. It waits for one unless a game computes (`steps`)."""
        done, _ = wait(self.open, None if steps is None else 0, FIRST_COMPLETED)
        self.steps += steps or 0
        return [(self.open.pop(request), SimpleNamespace(
            ids=[*request.result()], logp=[], v=0.0, q=0.0)) for request in done]

    def forget(self):
        self.open = {}

    def drop(self, name):
        pass
