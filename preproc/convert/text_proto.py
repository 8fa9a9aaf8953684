"""Parser of the text form of protocol buffers, as far as schemas use it: fields, strings, numbers, messages."""

import re
from collections.abc import Iterator
from typing import Any

from configs.messages import shortened

MAX_NESTING = 64
Message = dict[str, list[Any]]
"""Field name -> its values in order: str, int, float, bool-like words, or nested messages."""

TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<sign>[{}<>:;,\[\]])"""
    r"""|(?P<word>[^\s{}<>:;,\[\]"'\#]+)""",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
NAMED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def parse_text_proto(text: str) -> Message:
    """Return the message in `text`; bytes of strings become characters below 256.

    Raises ValueError: invalid text, with its line.
    """
    tokens = list(_tokens(text))
    message, at = _message(tokens, 0, [])
    assert at == len(tokens)
    return message


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, token, line)."""
    at = 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1}: a string does not end")
        if match.lastgroup:
            yield match.lastgroup, match[0], text.count("\n", 0, at) + 1
        at = match.end()


def _message(
    tokens: list[tuple[str, str, int]], at: int, closings: list[str]
) -> tuple[Message, int]:
    """Return the message that begins at token `at`, and the index of the token after it."""
    message: Message = {}
    closing = closings[-1] if closings else None
    if len(closings) > MAX_NESTING:
        raise ValueError(f"line {tokens[at - 1][2]}: nested deeper than {MAX_NESTING} levels")
    while at < len(tokens):
        kind, name, line = tokens[at]
        if name == closing:
            return message, at + 1
        if name in (";", ","):
            at += 1
            continue
        if kind != "word":
            raise ValueError(f"line {line}: got {shortened(name)}, want the name of a field")
        at += 1
        has_colon = at < len(tokens) and tokens[at][1] == ":"
        at += has_colon
        if at == len(tokens):
            raise ValueError(f"line {line}: field {shortened(name)} has no value")
        if tokens[at][1] in ("{", "<"):
            value, at = _message(tokens, at + 1, [*closings, {"{": "}", "<": ">"}[tokens[at][1]]])
        elif has_colon:
            value, at = _scalar(tokens, at)
        else:
            raise ValueError(f"line {line}: field {shortened(name)} has no value")
        message.setdefault(name, []).append(value)
    if closing:
        raise ValueError(f"the text ends before a {closing}")
    return message, at


def _scalar(tokens: list[tuple[str, str, int]], at: int) -> tuple[Any, int]:
    """Return a number, a word, or consecutive strings joined to one."""
    kind, token, line = tokens[at]
    if kind == "string":
        parts = []
        while at < len(tokens) and tokens[at][0] == "string":
            parts.append(_unescape(tokens[at][1][1:-1]))
            at += 1
        return "".join(parts), at
    if kind != "word":
        raise ValueError(f"line {line}: got {shortened(token)}, want a value")
    for convert in (int, float):
        try:
            return convert(token), at + 1
        except ValueError:
            continue
    return token, at + 1


def _unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 255)
        return NAMED.get(code, code)

    return ESCAPE.sub(character, text)
