"""The chat format of a model: messages -> the token ids of a conversation, by the chat template of
its tokenizer. Token ids are appended and never rendered again. Text that is not ours is never
encoded as a control token, such as <|im_end|>, so where a template marks by these who speaks, it
cannot speak as somebody else.

    Chat(tokenizer).encode_messages([{"role": "user", "content": "Hello"}])
    check_messages      what is wrong with messages
    used_tokens         the tokens that have a purpose, such as those that a template can write
"""
import contextlib
import datetime
import itertools
import json
import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

import jinja2

log = logging.getLogger("sapo")

# what the system message says of tools, where a template doesn't
TOOLS = """You can call functions. Each of these lines describes one:
<tools>
{schemas}
</tools>"""
CALLS = """To call a function, write its name and arguments as JSON in this form, and in no other:
<tool_call>
{"name": NAME, "arguments": {ARGUMENT: VALUE, ...}}
</tool_call>"""
# how a template says the same itself, as Qwen's does
ASKS_FOR_THESE_CALLS = re.compile(r'<tool_call>\s*{[^{}]*"arguments"')

# tags that a model is to write as text, though some tokenizers have tokens for them
TAGS = {"<think>", "</think>", "<action>", "</action>", "<tool_call>", "</tool_call>"}


def check_messages(messages, before=()) -> None:
    """ValueError: these are no messages of a system, a user or tools, such as can follow `before`,
    the token ids of the conversation so far."""
    form = 'messages are a list of {"role": "system", "user" or "tool", "content": text}'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{form}, with one or more of them; these are {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"{form}; one of these is {message!r:.80}")
        if message["role"] == "assistant":
            raise ValueError(f"{form}; \"assistant\" is the model itself, which only responds")
        if message["role"] not in ("system", "user", "tool"):
            raise ValueError(f"{form}; one of these has the role {message['role']!r:.40}")
        if not isinstance(message["content"], str):
            raise ValueError(f"{form}; one of these has the content {message['content']!r:.80}")
    not_first = messages if before else messages[1:]
    if any(message["role"] == "system" for message in not_first):
        raise ValueError("a system message is only possible at the start of a conversation")


# How a template writes a content: as it is, without blanks around it, or within a JSON string

def unchanged(content: str) -> str:
    return content


def stripped(content: str) -> str:
    return content.strip()


def json_escaped(content: str) -> str:
    """So Llama 3 writes what a tool returned: a newline as \\n, for example."""
    return json.dumps(content, ensure_ascii=False)[1:-1]


# ------------------------------------------------------- which tokens a tokenizer's templates write

# Every role alone, and in some conversations, of which a template may refuse any.
ROLES = "system", "developer", "user", "assistant", "tool", "function"
CONVERSATIONS = [(*before, role) for role in ROLES
                 for before in ((), ("system",), ("user",), ("user", "assistant"))]
CONVERSATIONS += [(*start, "user", "assistant", "tool", *more, "assistant", "user", "assistant")
                  for start in ((), ("system",)) for more in ((), ("tool",))]
FUNCTION = {"type": "function", "function": {
    "name": "-", "description": "-", "return": {"type": "string", "description": "-"},
    "parameters": {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "string", "description": "-", "enum": ["-"]}, "b": {"type": "integer"}}}}}
CALL = {"id": "000000000", "type": "function", "function": {"name": "-", "arguments": {}}}
SHOWN = {}, {"tools": [FUNCTION, FUNCTION]}, {"documents": [{"title": "-", "text": "-"}]}
WORD = re.compile(r"[^\W\d_]+")


def templates_of(tokenizer) -> dict:
    """{name: chat template}; the names are "default", and possibly "tool_use", "rag" and others."""
    found = tokenizer.chat_template or {}
    if isinstance(found, list):  # as older files have it
        found = {each["name"]: each["template"] for each in found}
    return found if isinstance(found, dict) else {"default": found}


def used_tokens(tokenizer) -> set[int]:
    """The ids of those added tokens that have a purpose: those that the tokenizer has a name for,
    such as its eos token, TAGS, and what any of its templates writes. That is what the template
    spells, what it makes of CONVERSATIONS, with and without tools, and what it could put together
    for others, as in '<|' + role + '|>': all that consists of words of its texts, ROLES, digits and
    signs."""
    templates = templates_of(tokenizer).values()
    texts = {*TAGS, *tokenizer.special_tokens_map.values(), *templates}
    words = {*ROLES}
    for template in templates:
        words.update(*(WORD.findall(text.lower()) for text in texts_in(template)))
        texts |= renderings(tokenizer, template)
    return {i for i, token in tokenizer.added_tokens_decoder.items()
            if any(token.content in text for text in texts)
            or all(consists_of(words, word) for word in WORD.findall(token.content.lower()))
            and (token.special or WORD.search(token.content))}


def renderings(tokenizer, template: str) -> set[str]:
    """What a template makes of CONVERSATIONS, with each of SHOWN."""
    texts = set()
    for roles in CONVERSATIONS:
        messages = [{"role": role, "content": "-"} for role in roles]
        for message, following in zip(messages, [*roles[1:], None]):
            if following == "tool":
                message["tool_calls"] = [CALL]
            if message["role"] == "tool":
                message |= {"name": "-", "tool_call_id": CALL["id"]}
        for shown, begin in itertools.product(SHOWN, (False, True)):
            with contextlib.suppress(Exception):  # of any kind: a template raises what it likes
                texts.add(tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=begin,
                    **shown))
    return texts


def texts_in(template: str) -> list[str]:
    """What a template has between its expressions, and the strings in these."""
    try:
        return [token.value for token in jinja2.Environment().lexer.tokenize(template)
                if token.type in ("data", "string")]
    except jinja2.TemplateSyntaxError:
        return [template]


def consists_of(words: set, text: str) -> bool:
    """Whether a text is one of the words, or several of them in a row."""
    ends = {0}  # of such rows
    for stop in range(1, len(text) + 1):
        if any(text[start:stop] in words for start in ends):
            ends.add(stop)
    return len(text) in ends


# ---------------------------------------------------------- what a template writes around contents

class Layout(NamedTuple):
    """What a template writes around the contents of messages. It renders n of them as
    texts[0] + forms[0](content 0) + texts[1] + ... + forms[n-1](content n-1) + texts[n]."""

    texts: list  # n + 1 strings
    forms: list  # n functions: unchanged, stripped or json_escaped


class Chat:
    """Converts messages into the token ids of a conversation, by the tokenizer's chat template.
    `date` is what the template takes for today where it has strftime_now("...") (default: the day
    on which this is made); it can be set later. ValueError: the tokenizer has no suitable template.

    A template is a program. To append to token ids, we must know the strings that it writes around
    the contents of messages: their Layout. So we render messages with contents that can be found
    again, here @0@, @1@ and @2@, and cut the text there. With ChatML, for example,

        <|im_start|>user
        @0@<|im_end|>
        <|im_start|>assistant
        @1@<|im_end|>
        <|im_start|>user
        @2@<|im_end|>
        <|im_start|>assistant

    gives these attributes:

        begin    "<|im_start|>user\\n"                      before the first message of the user
        end      "<|im_end|>\\n<|im_start|>assistant\\n"     after it, up to the response
        between  "<|im_end|>\\n<|im_start|>user\\n"          after a response, up to the user's next
        appends  True: the next turn is written in the same way, so a conversation can grow
        response_prefix  "": what the template itself writes of a response; R1's is "<think>\\n"
    """

    def __init__(self, tokenizer, date: str | None = None):
        self.tokenizer = tokenizer
        self.date = date or datetime.date.today().isoformat()
        self.layouts = {}  # of layout_of: rendering the template in every turn would be slow
        self.lacks_tool_role = False
        self.used = used_tokens(tokenizer)
        if not tokenizer.is_fast:
            raise ValueError("this is not one of transformers' fast tokenizers")
        layout = self.required_layout("user", "assistant", "user", "assistant", "user")
        _, user_to_assistant, assistant_to_user, *next_turn, _ = layout.texts
        # not so if the template numbers its messages, for example
        self.appends = next_turn == [user_to_assistant, assistant_to_user]
        self.begin, self.end = self.required_layout("user").texts
        self.between = self.after_response(assistant_to_user)
        self.check_generation_prompt(user_to_assistant)
        self.protect(())
        if self.control_ids.isdisjoint(self.template_ids(self.end)):
            log.warning("the chat template says by plain text, %r, that the model speaks, and a "
                        "game could write the same", self.end)
        self.response_prefix = self.find_response_prefix(self.end)

    def check_generation_prompt(self, user_to_assistant: str) -> None:
        """ValueError: the template ignores add_generation_prompt. It may do so if the user's
        message ends with what comes before a response anyway, such as Mistral's "[/INST]"."""
        without = self.required_layout("user", begin_response=False)
        ignored = without.texts == [self.begin, self.end]
        before_response = user_to_assistant.partition("<think>")[0].rstrip()
        if ignored and not self.end.startswith(before_response):
            raise ValueError("the chat template ignores add_generation_prompt, so nothing would "
                             "tell the model that its response begins")

    # --------------------------------------------------- what the template writes around contents

    def render(self, messages: list, tools=None, begin_response: bool = True) -> str:
        """Messages, of the assistant too -> text, up to where the next response begins."""
        templates = templates_of(self.tokenizer)
        template = tools and templates.get("tool_use") or templates.get("default")
        if not template:
            raise ValueError(f"of the templates {sorted(templates)} none is the default one")
        today = datetime.date.fromisoformat(self.date)
        # transformers passes no function to a template, so what strftime_now("%d %b %Y") returns is
        # written in its place
        template = re.sub(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""",
                          lambda call: today.strftime(call[1]), template)
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False,
            add_generation_prompt=begin_response)

    def probe(self, roles: Iterable[str], tools=None, begin_response: bool = True) -> Layout | None:
        """The Layout of messages of these roles, found by rendering some. None: the template fails
        with them, or drops, repeats or reorders their contents."""
        messages = []
        for i, role in enumerate(roles):
            # a tab, a quote and a newline show whether a content is stripped or escaped; nobody
            # needs to know that of responses, which the model writes
            content = f"@{i}@" if role == "assistant" else f'\t@{i}"\n@\t'
            messages.append({"role": role, "content": content})
        try:
            rendered = self.render(messages, tools, begin_response)
        except Exception:  # of any kind: a template raises what it likes
            return None
        layout = Layout([], [])
        rest = rendered
        for content in (message["content"] for message in messages):
            form = next((form for form in (unchanged, stripped, json_escaped)
                         if rendered.count(form(content)) == 1), None)
            if not form or form(content) not in rest:
                return None
            text, _, rest = rest.partition(form(content))
            layout.texts.append(text)
            layout.forms.append(form)
        layout.texts.append(rest)
        return layout

    def required_layout(self, *roles: str, begin_response: bool = True) -> Layout:
        """The Layout of messages of these roles. ValueError: there is none."""
        try:
            self.render([{"role": role, "content": "-"} for role in roles],
                        begin_response=begin_response)
        except Exception as error:  # there is no template, or it fails in a way of its own
            without = "" if begin_response else " without add_generation_prompt"
            why = " ".join(str(error).split())
            raise ValueError(f"the chat template fails with messages of {', '.join(roles)}"
                             f"{without}: {why}") from None
        if layout := self.probe(roles, begin_response=begin_response):
            return layout
        raise ValueError("the chat template drops or repeats messages: choose an instruct model "
                         "whose template keeps all of them")

    def layout_of(self, roles: tuple, follows_response: bool, tools=None) -> Layout | None:
        """The Layout of messages of these roles at the start of a conversation, or of those that
        follow a response. None: the template cannot write them, or not in each turn alike."""
        key = roles, follows_response, json.dumps(tools), self.date
        if key not in self.layouts:
            if follows_response:
                layout = (self.probe_after_response(roles, tools)
                          or self.probe_after_response(roles))
            else:
                layout = self.probe(roles, tools)
            # response_prefix holds for every response: the parser of actions reads it before each
            if layout and self.find_response_prefix(layout.texts[-1]) != self.response_prefix:
                layout = None
            self.layouts[key] = layout
        return self.layouts[key]

    def probe_after_response(self, roles: tuple, tools=None) -> Layout | None:
        """The Layout of messages of these roles that follow a response. None: the template cannot
        write them, or writes them in another way when that happens a second time."""
        turn = ["assistant", *roles]
        layout = self.probe(["user", *turn, *turn], tools)
        if not layout:
            return None
        # texts[i] stands before message i: 0 is the user, 1 the first response, then come `roles`
        first = 2
        second = first + len(turn)
        first_texts = layout.texts[first:first + len(roles)]
        second_texts = layout.texts[second:second + len(roles)]
        if first_texts != second_texts:
            return None
        after_response, *between = second_texts
        end = layout.texts[-1]
        return Layout([self.after_response(after_response), *between, end], layout.forms[second:])

    def after_response(self, text: str) -> str:
        """The template's text after a response, as it follows what a model has written. Llama 2's
        is " </s>", for example, and a model ends its response without that blank."""
        control = tuple(x.content for x in self.tokenizer.added_tokens_decoder.values())
        return text.lstrip() if text.lstrip().startswith(control) else text

    def find_response_prefix(self, end: str) -> str:
        """The beginning of a response in the template's last text: "<think>\\n" if that text is
        "<|im_start|>assistant\\n<think>\\n"; "" if there is none."""
        start = end.rfind("<think>")
        if start < 0:
            return ""
        prefix = end[start:]
        # if a message ends after this <think>, it is from the instructions in that message
        return "" if self.control_ids & {*self.template_ids(prefix)} else prefix

    # ------------------------------------------------------------------------ texts -> token ids

    def protect(self, ids) -> None:
        """From now on, `encode` produces no control token from the text that it is given: no
        special token, and none of used_tokens or `ids`. The tags of thoughts, actions and calls
        stay as they are, and so do blanks and single letters, for which some tokenizers have added
        tokens, and what stands for unknown text."""
        tokenizer = self.tokenizer
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {i: added.get(i) or tokenizer.decode([i]) for i in {*ids, *self.used, *special}}
        known = {text for name, text in tokenizer.special_tokens_map.items() if name != "unk_token"}
        self.control_ids = {
            i for i, name in names.items() if name not in TAGS and len(name.strip()) > 1
            and (i != tokenizer.unk_token_id or i in ids or name in known)}

    def encoding(self, text: str):
        """What the tokenizer makes of a text, without anything around it: .ids and .offsets."""
        backend = self.tokenizer.backend_tokenizer  # twice as fast as calling the tokenizer
        backend.no_truncation()  # somebody's call of the tokenizer may have left both on
        backend.no_padding()
        return backend.encode(text, add_special_tokens=False)

    def template_ids(self, text: str) -> list[int]:
        """The token ids of a text from the template, in which control tokens are meant."""
        return self.encoding(text).ids

    def encode(self, *contents: str, texts=("", "")) -> list[int]:
        """The token ids of contents that are not ours, with the template's `texts` before, between
        and after them. Where a content would become a control token, such as <|im_end|>, however
        it is spelled, it is cut before or behind its first letter, and encoded in two parts. So no
        game can end the user's message, if it ends with such a token, and speak as somebody
        else."""
        # a token may reach from the template's text into the content, or back: these are joined
        whole, ours = texts[0], [True] * len(texts[0])
        for content, text in zip(contents, texts[1:]):
            whole += content + text
            ours += [False] * len(content) + [True] * len(text)
        return self.encode_parts(whole, ours)

    def encode_parts(self, text: str, ours: list) -> list[int]:
        """The token ids of a text, in as many parts as needed. ours: for each letter, whether the
        template wrote it. Only there, control tokens are meant."""
        encoding = self.encoding(text)
        begin, parts = 0, []
        for i, (start, stop) in zip(encoding.ids, encoding.offsets):
            if i not in self.control_ids:
                continue
            # a control token with letters that are not the template's was not meant. The text is
            # cut before the first of these or, if the token begins with it, behind it. (Some tokens
            # include the blanks around them)
            letters = [n for n in range(start, stop) if not text[n].isspace()]
            first = next((n for n in letters if not ours[n]), None)
            if first is not None:
                end = first if len(letters) == 1 or first > letters[0] else first + 1
                parts.append((begin, end))
                begin = end + (len(letters) == 1)  # a single letter that means it is left out
        if not parts:
            return encoding.ids
        parts.append((begin, len(text)))
        return [i for start, stop in parts
                for i in self.encode_parts(text[start:stop], ours[start:stop])]

    def end_of_turn_id(self) -> int:
        """The token that ends the assistant's message: the first one between a response and the
        next user message."""
        return self.encode("-", texts=(self.between, self.end))[0]

    # --------------------------------------------------------------------- messages -> token ids

    def encode_user_turn(self, text: str, before=()) -> list[int]:
        """encode_messages for one message of the user."""
        return self.encode_messages([{"role": "user", "content": text}], before)

    def encode_messages(self, messages: list, before=(), tools=None) -> list[int]:
        """The token ids of the messages since the last response, [{"role": "system", "user" or
        "tool", "content": text}, ...], up to where the next response begins. `before`: those of the
        conversation so far; if it ends with the end-of-turn token, that is not repeated. `tools`:
        JSON schemas of functions that can be called, which are shown at the start.

        If the template has no place for messages of these roles, for example for what a tool
        returned, they become one message of the user. ValueError: see check_messages; or the
        template is such that nothing can be appended."""
        check_messages(messages, before)
        if before and "tool_use" not in templates_of(self.tokenizer):
            tools = None  # there is one template, which shows them at the start
        if tools and not before:
            messages, tools = self.show_tools(messages, tools)
        roles = tuple(message["role"] for message in messages)
        # blanks around what a tool returned can mean something
        contents = [message["content"] if message["role"] == "tool" else message["content"].strip()
                    for message in messages]
        layout = self.layout_of(roles, bool(before), tools)
        if not layout:
            contents = ["\n\n".join(content for content in contents if content).strip()]
            layout = self.layout_of(("user",), bool(before), tools)
            if not layout:
                raise ValueError("the chat template writes a message in another way when others "
                                 "came before it, so a conversation cannot grow token by token: "
                                 "use --context window or, for an environment with tools, another "
                                 "model")
            if "tool" in roles and not self.lacks_tool_role:
                self.lacks_tool_role = True
                log.warning("the chat template has no place for what a tool returned here, or none "
                            "that is the same in every turn: the model gets it as a user's message")
        contents = [form(content) for form, content in zip(layout.forms, contents)]
        ids = self.encode(*contents, texts=layout.texts)
        if before and ids[0] == before[-1]:  # the end-of-turn token, which the model has written
            return ids[1:]
        return ids

    def show_tools(self, messages: list, tools: list) -> tuple:
        """The messages at the start of a conversation, and JSON schemas of tools -> the messages,
        and the schemas to give to the template, or None. What the template would not say (the
        schemas, or that calls are <tool_call> with JSON for every model) is added to the system
        message."""
        without = self.layout_of(("user",), follows_response=False)
        shown = self.layout_of(("user",), follows_response=False, tools=tools)
        if shown and ASKS_FOR_THESE_CALLS.search("".join(shown.texts)):
            return messages, tools
        system = [CALLS]
        if not shown or shown == without:  # the template has no place for tools
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = [TOOLS.replace("{schemas}", schemas), CALLS]
            tools = None
        if messages[0]["role"] == "system":
            system = [messages[0]["content"].strip(), *system]
            messages = messages[1:]
        return [{"role": "system", "content": "\n\n".join(system)}, *messages], tools
