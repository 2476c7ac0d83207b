"""What a tool is: a `dspy.Tool` that also says what comes back, and that can be called with text a model wrote."""

import asyncio
import contextvars
import inspect
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final, get_type_hints

import dspy
from pydantic.errors import PydanticUserError

from modpo.errors import ToolError
from modpo.programs.tools.arguments import as_text, check, excerpt, mapping_in, plain, takes_text, value_of, word

_MESSAGE_CHARS = 500
_WORDS_CHARS = 60
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of one command.

    Attributes:
        text: what the tool returned, as text, or what went wrong.
        error: whether something did.
        seconds: how long it took.
    """

    text: str
    error: bool
    seconds: float


@final
class Tool(dspy.Tool):
    """A tool: works wherever a `dspy.Tool` does, and is shared by all rollouts, so it must be thread-safe.

    Args:
        func: what is called, with keywords; may be async.
        name: for programs and prompts.
        desc: what it does; a prompt shows the first sentence.
        args: JSON schema of each argument; one without a `default` is required.
        arg_types: Python type of each argument.
        arg_desc: description of each argument.
        output: what comes back, in words.
        examples: pairs of arguments and the text that they give, to be shown in prompts.
    """

    output: str = "text"
    examples: tuple[tuple[dict[str, Any], str], ...] = ()

    def __init__(
        self,
        func: Callable[..., Any],
        name: str | None = None,
        desc: str | None = None,
        args: dict[str, Any] | None = None,
        arg_types: dict[str, Any] | None = None,
        arg_desc: dict[str, str] | None = None,
        *,
        output: str = "text",
        examples: Iterable[tuple[Mapping[str, Any], str]] = (),
    ) -> None:
        super().__init__(func, name, desc, args, arg_types, arg_desc)
        self.output = output
        self.examples = tuple((self._checked(dict(given)), text) for given, text in examples)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def describe(self) -> str:
        """Describe the tool for a prompt: a line with its inputs, its output and what it does, and one per example."""
        inputs = ", ".join(f"{name}: {word(schema)}" for name, schema in self.args.items())
        lines = [f"{self.name}({inputs}) -> {self.output}: {first_sentence(self.desc)}"]
        lines += [f"Example: {self.command(given)} -> {text}" for given, text in self.examples]
        return "\n".join(lines)

    def command(self, arguments: Mapping[str, Any]) -> str:
        """Write arguments as a command that `parse` reads back: the bare text where that is enough, else JSON."""
        sole = self._sole()
        if sole is not None and [*arguments] == [sole]:
            text = as_text(arguments[sole])
            if "\n" not in text and text.strip() == text and mapping_in(text) is None:
                return text
        return as_text(dict(arguments))

    def parse(self, command: str) -> dict[str, Any]:
        """Read a command that a model wrote.

        Args:
            command: a JSON object of arguments, or, for a tool with exactly one required input, that input itself:
                all of the text, without blank lines around it and without a fence of backticks around it.

        Returns:
            Arguments that fit the tool's schema.

        Raises:
            ToolError: an argument is missing, unknown or of another type, or the text is no JSON object where the
                tool needs one.
        """
        text, sole = plain(command), self._sole()
        given = mapping_in(text)
        # Of a tool that takes a text, the text may well look like an object: only its own names make it arguments.
        textual = sole is not None and takes_text(self.args[sole])
        if given is not None and (not textual or (given and given.keys() <= self.args.keys())):
            return self._checked(given)
        if not self._required() and not text:
            return {}
        if sole is None:
            raise ToolError(f"{self.name} takes a JSON object, not {excerpt(text)}; {self._inputs()}")
        return self._checked({sole: value_of(text, self.args[sole])})

    def run(self, command: str, timeout_s: float | None = None) -> ToolResult:
        """Read a command, call the tool and give what came of it; whatever the tool does is data.

        Args:
            command: see `parse`.
            timeout_s: most seconds to wait; the tool's thread is then given up. None for no limit.

        Returns:
            The result as text, or the error: its own message for a `ToolError`, else ``"ValueError: ..."``.
        """
        started = time.perf_counter()
        if timeout_s is None and not _loop_runs():
            text, error = self._attempt(command)
        else:
            text, error = self._attempt_in_thread(command, timeout_s)
        return ToolResult(text, error, time.perf_counter() - started)

    def _attempt(self, command: str) -> tuple[str, bool]:
        try:
            arguments = self.parse(command)
            with dspy.context(allow_tool_async_sync_conversion=True):
                return as_text(self(**arguments)), False
        except KeyboardInterrupt:
            raise
        except ToolError as error:
            return str(error), True
        except BaseException as error:  # noqa: BLE001 - what a tool does, SystemExit included, is data
            return f"{type(error).__name__}: {excerpt(str(error), _MESSAGE_CHARS, quote=False)}".rstrip(": "), True

    def _attempt_in_thread(self, command: str, timeout_s: float | None) -> tuple[str, bool]:
        answers: queue.SimpleQueue[tuple[str, bool] | KeyboardInterrupt] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put(self._attempt(command))
            except KeyboardInterrupt as error:
                answers.put(error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name=f"tool-{self.name}", daemon=True).start()
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            return f"{self.name} gave no answer within {timeout_s:g} s", True
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        return answer

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, if they are the tool's."""
        unknown = [name for name in given if name not in self.args]
        missing = [name for name in self._required() if name not in given]
        if unknown or missing:
            found = [f"no input {name!r}" for name in unknown] + [f"{name!r} is missing" for name in missing]
            raise ToolError(f"{self.name}: {', '.join(found)}; {self._inputs()}")
        for name, value in given.items():
            fault = check(value, self.args[name])
            if fault is not None:
                raise ToolError(f"{self.name}: {name} {fault}; {self._inputs()}")
        return given

    def _inputs(self) -> str:
        return f"inputs: {', '.join(f'{name}: {word(schema)}' for name, schema in self.args.items()) or 'none'}"

    def _required(self) -> list[str]:
        return [name for name, schema in self.args.items() if "default" not in schema]

    def _sole(self) -> str | None:
        """The input that bare text is meant for: the one required, or the only one."""
        names = self._required() or list(self.args)
        return names[0] if len(names) == 1 else None


def as_tool(thing: Any, *, examples: Iterable[tuple[Mapping[str, Any], str]] = ()) -> Tool:
    """Make a tool.

    Args:
        thing: a function or method with annotated arguments (its name, the first sentence of its docstring, and
            its Returns section where that is a few words, else its return type, describe it), a `dspy.Tool`, or a
            tool of ours, which is returned as it is.
        examples: see `Tool`; only for what is no tool of ours yet.

    Raises:
        ToolError: it is none of these, or its arguments cannot be named and typed.
    """
    if isinstance(thing, Tool):
        return thing
    if isinstance(thing, dspy.Tool):
        about = (thing.name, thing.desc, thing.args, thing.arg_types, thing.arg_desc)
        return Tool(thing.func, *about, output=_output_of(thing.func), examples=examples)
    if not callable(thing) or inspect.isclass(thing):
        raise ToolError(
            f"{excerpt(repr(thing), quote=False)} is no tool: give a function with annotated arguments, a method such "
            "as corpus.search or sandbox.python, a dspy.Tool or a Tool"
        )
    name = getattr(thing, "__name__", type(thing).__name__)
    call = thing if inspect.isroutine(thing) else type(thing).__call__
    if not name.isidentifier():
        raise ToolError(f"{name} has no name to be called by: define it with def, or give Tool(..., name=...)")
    try:
        variable = [each.name for each in inspect.signature(thing).parameters.values() if each.kind in _VARIABLE]
        if variable:
            raise ToolError(f"{name} takes {', '.join(variable)}: each argument of a tool is given by its own name")
        description = first_sentence(inspect.getdoc(call) or "")
        return Tool(thing, name, description or name, output=_output_of(call), examples=examples)
    except (TypeError, ValueError, NameError, RecursionError, PydanticUserError) as error:
        message = f"the arguments of {name} have no JSON schema: {error}; annotate them with plain types"
        raise ToolError(message) from None


def first_sentence(text: str | None) -> str:
    """Take the first sentence of a docstring or description, on one line."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s", paragraph, maxsplit=1)[0]


def _output_of(function: Callable[..., Any]) -> str:
    """What a function returns, in words: its Returns section where that is a few words, else its return type."""
    section = re.search(r"^Returns:\n\s+(\S.*)\n?(?:\n|\Z)", inspect.getdoc(function) or "", re.MULTILINE)
    if section is not None and len(section[1]) <= _WORDS_CHARS:
        return section[1].rstrip(".")
    try:
        kind = get_type_hints(function).get("return", Any)
    except (NameError, TypeError):
        kind = Any
    words = {str: "string", int: "integer", float: "number", bool: "boolean", list: "list", dict: "object"}
    return words.get(getattr(kind, "__origin__", kind), "text")


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
