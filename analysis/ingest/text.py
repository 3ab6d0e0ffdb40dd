"""Bytes of a JSON string, as they stand in a file, to the text that they mean."""

from __future__ import annotations

import json
import re
from typing import Any

CONTROL, ESCAPE, ENCODING = "control", "escape", "encoding"
"""What can be odd about a string: raw control characters, unknown escapes, bytes or surrogates that are no character."""

_CONTROL = re.compile("[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def decode_text(data: bytes) -> tuple[str, str | None]:
    """The text, and what was odd about it (or None).

    What no JSON parser would accept is kept as it stands: an unknown escape is a backslash and a letter; a byte that is
    no UTF-8, or half a surrogate pair, is U+FFFD.

    >>> decode_text(rb"C:\\Users"), decode_text(b"a\\xff")
    (('C:\\\\Users', 'escape'), ('a\ufffd', 'encoding'))
    """
    odd = None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text, odd = data.decode("utf-8", "replace"), ENCODING
    if text[:1] not in ("[", "{") and _CONTROL.search(text):  # a list is kept with its line breaks
        odd = odd or CONTROL
    if "\\" in text and not _is_json(text):  # a list or an object is kept as it is written
        if _BAD_ESCAPE.search(_without_pairs(text)):
            odd = odd or ESCAPE
        text = _ESCAPE.sub(_unescaped, text)
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            odd = odd or (ENCODING if _REPLACEMENT in text else None)
    return text, odd


def _is_json(text: str) -> bool:
    if text[:1] not in ("[", "{"):
        return False
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _without_pairs(text: str) -> str:
    return text.replace("\\\\", "")


def _unescaped(match: re.Match[str]) -> str:
    code, short = match.groups()
    return chr(int(code, 16)) if code else _SHORT[short]


def tolerant_json(data: bytes) -> Any:
    """The value of a piece of JSON, None for what cannot be read. Numbers with a fraction stay text (exact)."""
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=lambda name: None, strict=False)
    except (ValueError, RecursionError):
        return None


class Decimal(str):
    """A number with a fraction or an exponent, as the text it was written in."""
