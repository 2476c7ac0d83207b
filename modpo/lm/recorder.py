"""What one rollout's modules did: numbered, seeded and marked so that no number depends on the scheduler."""

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, final

import dspy
from dspy.utils.callback import BaseCallback

from modpo.errors import ModpoError, RolloutTimeoutError
from modpo.ledger import Ledger
from modpo.lm.pricing import usage_of
from modpo.lm.render import plain_adapter
from modpo.lm.sampler import Sampler
from modpo.records import Call

PATH = "_modpo_path"
UNNAMED = "(unnamed)"
SETTING = "modpo_recorder"
Flow = tuple[int, int]


def stamp_paths(program: dspy.Module) -> dict[str, dspy.Predict]:
    """Write each predictor's path into the predictor, where it survives a deep copy.

    Returns:
        Path to predictor, for every predictor that DSPy names.
    """
    # DSPy does not name predictors of compiled submodules; they answer, so they get a path too.
    for name, module in program.named_sub_modules(dspy.Predict):
        module.__dict__[PATH] = name.removeprefix("self.")
    named = dict(program.named_predictors())
    for name, predictor in named.items():
        predictor.__dict__[PATH] = name
    return named


def calling_predictor() -> dspy.Predict | None:
    """The predictor in whose name an LM is being called, None for a bare call."""
    for module in reversed(dspy.settings.caller_modules or []):
        if isinstance(module, dspy.Predict):
            return module
    return None


def calling_path() -> str:
    """Path of the calling predictor; `UNNAMED` for a bare call or a predictor made on the fly."""
    predictor = calling_predictor()
    return UNNAMED if predictor is None else str(predictor.__dict__.get(PATH, UNNAMED))


def reports_calls(lm: Any) -> bool:
    """Whether an LM is a policy's, which records its calls itself."""
    return bool(getattr(getattr(lm, "engine", None), "reports_calls", False))


def current_flow() -> Flow:
    """Thread and asyncio task that run now; the task is 0 where there is none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


def current_recorder() -> "Recorder | None":
    """The recorder of the rollout that runs now, also in threads which DSPy started for it."""
    held = dspy.settings.get(SETTING)
    return held[0] if held else None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call's place in its rollout, fixed when it starts.

    Attributes:
        module: path of the calling predictor.
        flow: where it runs.
        segment: odd for a call of the rollout's own thread, even for calls that race between two of those.
        digest: of the prompt.
        ordinal: how many calls of this module with this prompt started earlier.
        order: start order in the rollout, as the scheduler made it.
        key: orders requests independently of the scheduler.
        seed: of the call's own random generator.
        started: clock, in seconds.
    """

    module: str
    flow: Flow
    segment: int
    digest: str
    ordinal: int
    order: int
    key: tuple[int | str, ...]
    seed: int
    started: float


@dataclass(slots=True)
class _Record:
    ticket: Ticket
    call: Call
    parsing: bool = False


@final
class Recorder:
    """Collects the calls of one rollout, from any of its threads.

    A call of the rollout's own thread is numbered in order. Calls that race, as under `dspy.Parallel`, are ordered by
    prompt and by ordinal among equal prompts, between the calls of the own thread that surround them; so are the calls
    of asyncio tasks, unless one task alone made them. Seeds come from the run's seed, the rollout, the module, the
    prompt and that ordinal.

    Args:
        run_seed, step, example, sample: which rollout this is.
        temperature: sampling temperature of every policy call; None leaves it to the program.
        sampler: answers instead of the policy's own sampler.
        ledger: counts every call, and is asked before a policy's.
    """

    def __init__(
        self,
        *,
        run_seed: int = 0,
        step: int = -1,
        example: int = 0,
        sample: int = 0,
        temperature: float | None = None,
        sampler: Sampler | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.temperature = temperature
        self.sampler = sampler
        self.fatal: ModpoError | None = None
        self.rollout = (step, example, sample)
        self._run_seed = run_seed
        self._lock = threading.Lock()
        self._records: list[_Record] = []
        self._equals: Counter[tuple[str, str]] = Counter()
        self._main: Flow | None = None
        self._main_calls = 0
        self._closed = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record what this thread, and threads DSPy starts for it, ask of LMs; one try per call, no fallback."""
        self._main = current_flow()
        callbacks = [*dspy.settings.callbacks, _Listener(self)]
        adapter = plain_adapter(dspy.settings.adapter)
        with dspy.context(callbacks=callbacks, adapter=adapter, trace=[], **{SETTING: [self]}):
            yield

    def start(self, module: str, prompt: bytes, flow: Flow) -> Ticket:
        """Register that a call starts; raises `RolloutTimeoutError` when the rollout was given up."""
        digest = hashlib.blake2b(prompt, digest_size=16).hexdigest()
        with self._lock:
            self._check_open()
            ordinal = self._equals[module, digest]
            self._equals[module, digest] += 1
            segment = 2 * self._main_calls
            if flow == self._main:
                segment, self._main_calls = segment + 1, self._main_calls + 1
            order = self._equals.total()
        key = (*self.rollout, module, digest, ordinal)
        seed = hashlib.blake2b(repr((self._run_seed, *key)).encode(), digest_size=8).digest()
        bits = int.from_bytes(seed, "big") >> 1
        return Ticket(module, flow, segment, digest, ordinal, order, key, bits, time.perf_counter())

    def add(self, ticket: Ticket, call: Call) -> None:
        """Keep a call that ended; raises `RolloutTimeoutError` when the rollout was given up meanwhile."""
        call = replace(call, seconds=time.perf_counter() - ticket.started)
        self.ledger.add(call)  # what was used counts, also when nobody waits for it any more
        with self._lock:
            self._check_open()
            self._records.append(_Record(ticket, call))

    def fail(self, error: ModpoError) -> None:
        """Note an error that must stop the run, whatever the program makes of it."""
        self.fatal = self.fatal or error

    def close(self) -> None:
        """Give the rollout up: from now on each of its calls is refused."""
        with self._lock:
            self._closed = True

    @property
    def closed(self) -> bool:
        """Whether the rollout was given up."""
        return self._closed

    def calls(self) -> tuple[Call, ...]:
        """The calls that ended, by module and occurrence."""
        with self._lock:
            records = list(self._records)
        flows: dict[int, set[Flow]] = {}
        for record in records:
            flows.setdefault(record.ticket.segment, set()).add(record.ticket.flow)

        def place(record: _Record) -> tuple[Any, ...]:
            ticket = record.ticket
            alone = len(flows[ticket.segment]) == 1 and ticket.flow[1] != 0
            # One task alone is a sequence; anything else that shares a segment raced.
            racing = (ticket.order,) if alone else (record.call.prompt_ids, ticket.digest, ticket.ordinal)
            return (ticket.segment, *racing, ticket.module)

        seen: Counter[str] = Counter()
        numbered = []
        for position, record in enumerate(sorted(records, key=place)):
            module = record.ticket.module
            numbered.append(replace(record.call, occurrence=seen[module], position=position))
            seen[module] += 1
        return tuple(sorted(numbered, key=lambda call: (call.module, call.occurrence)))

    def parse_started(self, text: str) -> _Record | None:
        """Find the latest unparsed call of this flow that gave this text."""
        flow = current_flow()
        with self._lock:
            for record in self._records:
                if record.ticket.flow == flow and record.call.text == text and not record.parsing:
                    record.parsing = True
                    return record
        return None

    def parse_ended(self, record: _Record, error: BaseException | None) -> None:
        """Mark whether a call's text could be parsed."""
        with self._lock:
            message = record.call.error if error is None else describe(error)
            record.call = replace(record.call, parsed=error is None, error=message)

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutTimeoutError("the rollout ran past its time-out; no further call is made for it")


def describe(error: BaseException, limit: int = 2000) -> str:
    """An error as one text of bounded length."""
    return f"{type(error).__name__}: {error}"[:limit]


@final
class _Listener(BaseCallback):
    """Sees the calls of frozen modules and the parse results of all; policies report their own calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: dict[str, tuple[Ticket, Any]] = {}
        self._parses: dict[str, _Record] = {}

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if reports_calls(instance):
            return
        prompt = repr((instance.model, inputs.get("prompt"), inputs.get("messages"))).encode()
        try:
            ticket = self._recorder.start(calling_path(), prompt, current_flow())
        except RolloutTimeoutError as error:
            # DSPy swallows exceptions of callbacks, and a given-up rollout must not spend money.
            raise SystemExit(str(error)) from error
        self._calls[call_id] = (ticket, instance)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        started = self._calls.pop(call_id, None)
        if started is None:
            return
        ticket, instance = started
        told, used, dollars = usage_of(instance, calling_predictor(), outputs)
        texts = [text.get("text") or "" if isinstance(text, dict) else str(text) for text in outputs or [""]]
        for index, text in enumerate(texts):
            first = index == 0  # usage and cost are told once for all outputs of a call
            call = Call(
                module=ticket.module,
                occurrence=0,
                model=str(instance.model),
                finish="stop" if exception is None else "error",
                text=text,
                error=None if exception is None else describe(exception),
                input_tokens=told if first else 0,
                output_tokens=used if first else 0,
                dollars=dollars if first else None,
            )
            with suppress(RolloutTimeoutError):  # given up meanwhile: counted, but no part of the rollout
                self._recorder.add(ticket, call)

    def on_adapter_parse_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        # DSPy wraps a method that an adapter's subclass inherits once more: only the inner call names its arguments.
        record = self._recorder.parse_started(inputs["completion"]) if "completion" in inputs else None
        if record is not None:
            self._parses[call_id] = record

    def on_adapter_parse_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        record = self._parses.pop(call_id, None)
        if record is not None:
            self._recorder.parse_ended(record, exception)
