"""Commands that models write: text to arguments and results to text; JSON schemas in few words."""

import json
import re
from collections.abc import Mapping
from typing import Any

_FENCE = re.compile(r"\s*```(?:[\w+-]*[ \t]*\n)?(.*?)\n?[ \t]*```\s*", re.DOTALL)
_PLAIN = {"integer", "number", "boolean", "null"}


def plain(command: str) -> str:
    """Take away a fence of backticks around all of it, and blank lines around that; all else stays as it is."""
    fenced = _FENCE.fullmatch(command)
    text = command if fenced is None or "```" in fenced[1] else fenced[1]
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()


def mapping_in(text: str) -> dict[str, Any] | None:
    """Read a JSON object; None if the text is none. Line breaks within strings, which models write, are let pass."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """Turn bare text into what a schema wants: itself for a string or anything; a number or boolean read from it.

    What cannot be read stays text, for `check` to refuse.
    """
    if takes_text(schema):
        return text
    try:
        return json.loads(text.lower() if _kinds(schema) & _PLAIN else text)
    except (ValueError, RecursionError):
        return text


def takes_text(schema: Mapping[str, Any]) -> bool:
    """Whether a JSON schema lets any string through."""
    kinds = _kinds(schema)
    return not kinds or "string" in kinds


def check(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a value under a JSON schema; None if nothing is."""
    from jsonschema import ValidationError, validate

    wanted = {key: each for key, each in schema.items() if key != "default"}
    try:
        validate(value, wanted)
    except ValidationError as error:
        if error.validator == "type" and not error.path:
            return f"is not {word(wanted)}: {excerpt('null' if value is None else as_text(value), 60)}"
        return excerpt(error.message, 160, quote=False)
    return None


def word(schema: Mapping[str, Any]) -> str:
    """Say a JSON schema in few words.

    Such as ``"string"``, ``"integer or null"``, ``"'a' or 'b'"``, ``"integer = 3"``, ``"array of {x: integer}"``.
    """
    default = f" = {json.dumps(schema['default'], default=str)}" if "default" in schema else ""
    if "enum" in schema:
        return " or ".join(repr(each) for each in schema["enum"]) + default
    return _shape(schema) + default


def _shape(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type in words, with what lies inside: whoever writes a command must know."""
    kind, choices = schema.get("type"), schema.get("anyOf") or schema.get("oneOf") or ()
    if kind is None and choices:
        words = {word(choice) for choice in choices}
        return "any" if "any" in words else " or ".join(sorted(words))
    if kind == "object" and schema.get("properties"):
        return "{" + ", ".join(f"{name}: {word(inner)}" for name, inner in schema["properties"].items()) + "}"
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        inner = word(schema["items"])
        return kind if inner == "any" else f"array of {inner}"
    return " or ".join(sorted(_kinds(schema))) or "any"


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema lets through; none if it does not say."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return set() if kind == "Any" else {kind}
    if isinstance(kind, list):
        return set(kind)
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    found = [_kinds(choice) for choice in choices]
    return set().union(*found) if all(found) else set()


def as_text(result: Any) -> str:
    """Write whatever a tool returned as text: strings as they are, data as JSON, nothing as nothing."""
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    if isinstance(result, bytes | bytearray):
        return bytes(result).decode(errors="replace")
    if hasattr(result, "model_dump"):
        result = result.model_dump(mode="json")
    if isinstance(result, dict | list | tuple | bool | int | float):
        return json.dumps(result, ensure_ascii=False, default=str)
    return str(result)


def excerpt(text: str, most: int = 80, *, quote: bool = True) -> str:
    """Shorten a text that is shown in a message."""
    short = text if len(text) <= most else f"{text[:most]}…"
    return repr(short) if quote else short
