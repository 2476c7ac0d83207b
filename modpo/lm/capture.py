"""The DSPy engine behind a policy: prompts become ids here, and each call is recorded as it was sampled.

A call is `complete(Request) -> Response`, DSPy's custom-engine interface. The engine finds out which predictor is
calling, which adapter answers for it, and which rollout it belongs to; nothing else in the project knows.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self, final

import dspy
from dspy import lm15

from modpo.errors import ModpoError, PolicyError, PromptTooLongError, RolloutFailure, SamplerError
from modpo.lm.recorder import (
    UNNAMED,
    Flow,
    Recorder,
    calling_path,
    calling_predictor,
    current_flow,
    current_recorder,
    describe,
)
from modpo.lm.render import end_markers, render
from modpo.lm.sampler import Completion, Sampler, SampleRequest
from modpo.lm.versions import find_version
from modpo.records import Call

DEFAULT_MAX_TOKENS = 256
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None,),
    "tool_choice": (None,),
    "reasoning": (None,),
}


class PolicyLike(Protocol):
    """What an engine needs of a policy."""

    @property
    def name(self) -> str:
        """Name of the policy, part of its LMs' model names."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer with a chat template."""

    @property
    def sampler(self) -> Sampler:
        """Makes the tokens."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""

    def adapter_for(self, path: str) -> str | None:
        """Name of the adapter that answers for a module; None for the base model."""

    def version(self, adapter: str) -> int:
        """Current version of an adapter."""

    def state(self, adapter: str | None, version: int | None, run: str | None) -> dict[str, Any]:
        """JSON data from which `Policy.attach` finds base, adapter and version again, in that run folder."""

    def draw_seed(self) -> int:
        """A seed for a call outside of a rollout."""


@final
class PolicyEngine:
    """Answers DSPy's requests from a policy.

    Args:
        policy: base model and adapters; shared by all copies of the engine.
        adapter: the adapter that answers; None finds it by the calling module's path.
        version: its version; None is the current one at each call.
        run: the run folder that holds it, kept for saved programs.
    """

    reports_calls: ClassVar[bool] = True
    supports_function_calling: ClassVar[bool] = False
    supports_reasoning: ClassVar[bool] = False
    supports_response_schema: ClassVar[bool] = False
    supported_params: ClassVar[frozenset[str]] = frozenset({"max_tokens", "temperature", "stop", "seed", "logprobs"})

    def __init__(
        self, policy: PolicyLike, adapter: str | None = None, version: int | None = None, run: str | None = None
    ) -> None:
        self.policy = policy
        self.adapter = adapter
        self.version = version
        self.run = run

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Sample one completion for a request.

        Raises:
            lm15.ContextLengthError: the prompt leaves no room (DSPy shows it as ContextWindowExceededError).
            PolicyError: the request asks for something a policy does not do.
            SamplerError: the sampler broke.
            RolloutTimeoutError: the rollout that asks was given up.
        """
        return self.answer(request, current_flow())

    def answer(self, request: lm15.Request, flow: Flow) -> lm15.Response:
        """`complete`, for a call that was made in the given thread and task."""
        recorder = current_recorder()
        try:
            refuse_unsupported(request)
            return self._answer(request, flow, recorder)
        except ModpoError as error:
            if recorder is not None:
                recorder.fail(error)
            raise

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """The completion as DSPy's stream events, all at once."""
        yield from lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Keep the policy: it is shared, and its owner closes it."""

    def dump_state(self) -> dict[str, Any]:
        """JSON data that `load_state` takes."""
        state = self.policy.state(self.adapter, self.version, self.run)
        return {**state, "adapter": self.adapter, "version": self.version, "run": self.run}

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> Self:
        """Find the policy again, one per process, and answer with the saved adapter version.

        Raises:
            PolicyError: the run folder, or that version in it, is gone.
        """
        from modpo.lm.policy import Policy

        find_version(state["run"], state["adapter"], state["version"])
        return cls(Policy.attach(state), state["adapter"], state["version"], state["run"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Deep copies of programs share the weights.
        return self

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        # Pickled programs name their weights and do not hold them.
        return type(self).load_state, (self.dump_state(),)

    def _answer(self, request: lm15.Request, flow: Flow, recorder: Recorder | None) -> lm15.Response:
        sampling = self._sampling(request, recorder)
        call = Call(
            module=calling_path(),
            occurrence=0,
            model=request.model,
            adapter=sampling.adapter,
            version=sampling.version,
            prompt_ids=sampling.prompt_ids,
            temperature=sampling.temperature,
            input_tokens=len(sampling.prompt_ids),
        )
        if recorder is None:
            return self._response(request, call, self._sample(sampling, self.policy.sampler))
        recorder.ledger.check(tokens=len(sampling.prompt_ids) + sampling.max_tokens)
        ticket = recorder.start(call.module, repr(sampling.prompt_ids).encode(), flow)
        sampling = replace(sampling, key=ticket.key, rollout=recorder.rollout, seed=ticket.seed)
        try:
            completion = self._sample(sampling, recorder.sampler or self.policy.sampler)
        except (ModpoError, lm15.LM15Error) as error:
            recorder.add(ticket, replace(call, finish="error", error=describe(error.__cause__ or error)))
            raise
        empty = not completion.text.strip()
        done = replace(
            call,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            text=completion.text,
            output_tokens=len(completion.ids),
            # DSPy does not even try to parse an answer without text.
            parsed=False if not completion.text else None,
            error="the answer is empty" if empty else None,
        )
        recorder.add(ticket, done)
        return self._response(request, done, completion)

    def _sampling(self, request: lm15.Request, recorder: Recorder | None) -> SampleRequest:
        config, predictor = request.config, calling_predictor()
        path = calling_path()
        # A bare call, or one of a predictor made on the fly, belongs to no module: the base answers.
        by_module = None if path == UNNAMED else self.policy.adapter_for(path)
        adapter = self.adapter or by_module
        version = None
        if adapter is not None:
            version = self.policy.version(adapter) if self.version is None else self.version
        forced = None if recorder is None else recorder.temperature
        markers: tuple[str, ...] = ()
        if predictor is not None:
            markers = end_markers(dspy.settings.adapter or dspy.ChatAdapter(), predictor.signature)
        return SampleRequest(
            prompt_ids=render(request, self.policy.tokenizer),
            adapter=adapter,
            version=version,
            folder=find_version(self.run, adapter, version),
            max_tokens=config.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=float(config.temperature or 0.0) if forced is None else forced,
            # In a rollout the seed follows from the call's place; a fixed one would make all samples equal.
            seed=0 if recorder is not None else self._outside_seed(config.seed),
            stop=(*config.stop, *markers),
        )

    def _outside_seed(self, given: int | None) -> int:
        return self.policy.draw_seed() if given is None else given

    def _sample(self, sampling: SampleRequest, sampler: Sampler) -> Completion:
        length, room = len(sampling.prompt_ids), self.policy.context_length - len(sampling.prompt_ids)
        if room < 1:
            message = f"the prompt has {length} tokens and the model's context {self.policy.context_length}"
            raise lm15.ContextLengthError(message) from PromptTooLongError(message)
        try:
            return sampler.sample(replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        except PromptTooLongError as error:  # a server's context may be smaller than the model's
            raise lm15.ContextLengthError(str(error)) from error
        except (ModpoError, RolloutFailure):
            raise
        except Exception as error:
            # Whatever a sampler raises is its fault and not the program's.
            raise SamplerError(f"the sampler failed: {describe(error)}") from error

    def _response(self, request: lm15.Request, call: Call, completion: Completion) -> lm15.Response:
        inputs, outputs = call.input_tokens, len(completion.ids)
        logprobs = None
        if request.config.logprobs is not None:
            tokens = self.policy.tokenizer.convert_ids_to_tokens(list(completion.ids))
            scored = zip(tokens, completion.logprobs, completion.ids, strict=True)
            logprobs = tuple(lm15.TokenLogprob(token, logprob, token_id=each) for token, logprob, each in scored)
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(completion.text)]),
            finish_reason="length" if completion.finish == "length" else "stop",
            usage=lm15.Usage(input_tokens=inputs, output_tokens=outputs, total_tokens=inputs + outputs),
            logprobs=logprobs,
            provider_data={"adapter": call.adapter, "version": call.version},
        )


@final
class AsyncPolicyEngine:
    """The same engine for `acall`: the sampler blocks, so it runs in a thread."""

    def __init__(self, engine: PolicyEngine) -> None:
        self.engine = engine

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """Sample one completion for a request; raises what `PolicyEngine.complete` raises."""
        return await asyncio.to_thread(self.engine.answer, request, current_flow())

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        """The completion as DSPy's stream events, all at once."""
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Keep the policy: it is shared, and its owner closes it."""

    def dump_state(self) -> dict[str, Any]:
        """JSON data that `load_state` takes."""
        return self.engine.dump_state()

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> Self:
        """Find the policy again and answer with the saved adapter version."""
        return cls(PolicyEngine.load_state(state))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return type(self).load_state, (self.dump_state(),)


def refuse_unsupported(request: lm15.Request) -> None:
    """Refuse options that would change the distribution sampled from, or that a text policy cannot honour.

    Raises:
        PolicyError: naming the option.
    """
    wanted = [name for name, neutral in _NEUTRAL.items() if getattr(request.config, name) not in neutral]
    wanted += [f"extensions.{name}" for name in request.config.extensions or ()]
    wanted += ["tools"] if request.tools else []
    if wanted:
        allowed = ", ".join(sorted(PolicyEngine.supported_params))
        raise PolicyError(f"a policy does not take {', '.join(wanted)}; it takes {allowed}")
