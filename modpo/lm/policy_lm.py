"""`PolicyLM`: a policy as a `dspy.LM`, and the replay of written answers through the same path."""

from pathlib import Path
from typing import Any, Self, final

import dspy

from modpo.errors import PolicyError, TaskError, nearest
from modpo.lm.capture import DEFAULT_MAX_TOKENS, AsyncPolicyEngine, PolicyEngine, PolicyLike
from modpo.lm.recorder import Recorder, current_recorder, describe, stamp_paths
from modpo.lm.render import assistant_text, completion_ids, end_markers, plain_adapter
from modpo.lm.sampler import Completion, Sampler, SampleRequest
from modpo.records import Call


def model_name(policy: PolicyLike, adapter: str | None, version: int | None, run: str | None = None) -> str:
    """Name that tells apart every set of weights: policy, adapter, version, and the run that trained it."""
    trained = "latest" if version is None else f"v{version}" if run is None else f"v{version}#{Path(run).name}"
    return f"modpo/{policy.name}/{adapter or 'by-module'}@{trained}"


class PolicyLM(dspy.LM):
    """A DSPy LM that answers from a policy, one adapter version for all its calls or one per calling module.

    Copies, also deep ones, share the weights. Saving keeps where the weights lie and not the weights.

    Args:
        policy: base model and adapters.
        adapter: the adapter that answers; None finds it by the calling module's path.
        version: its version; None is the current one at each call.
        run: the run folder that holds it, so that a saved program finds it.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: most tokens of one answer.
        cache: whether DSPy may keep answers; not used in a rollout, nor without a version and the run it is from.
        options: further request options, see `PolicyEngine.supported_params`.
    """

    def __init__(
        self,
        policy: PolicyLike,
        adapter: str | None = None,
        version: int | None = None,
        *,
        run: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        cache: bool = False,
        **options: Any,
    ) -> None:
        if version is not None and adapter is None:
            raise PolicyError(f"version {version} of which adapter? give adapter= too")
        engine = PolicyEngine(policy, adapter, version, run)
        super().__init__(
            model_name(policy, adapter, version, run),
            engine=engine,
            async_engine=AsyncPolicyEngine(engine),
            temperature=temperature,
            max_tokens=max_tokens,
            cache=cache,
            num_retries=0,
            **options,
        )

    @property
    def policy(self) -> PolicyLike:
        """The policy that answers."""
        return self.engine.policy  # type: ignore[no-any-return]

    @property
    def adapter(self) -> str | None:
        """The adapter that answers; None when it is found by the calling module's path."""
        return self.engine.adapter  # type: ignore[no-any-return]

    @property
    def version(self) -> int | None:
        """The version that answers; None for the current one."""
        return self.engine.version  # type: ignore[no-any-return]

    def count_tokens(self, text: str) -> int:
        """How many tokens the policy's tokenizer makes of a text, special ones aside."""
        return len(self.policy.tokenizer.encode(text, add_special_tokens=False))

    @property
    def _cache_responses(self) -> bool:
        # DSPy's cache knows the model name only: an answer from it would not be captured, or be another version's.
        return self.version is not None and self.engine.run is not None and current_recorder() is None

    def copy(self, **changes: Any) -> Self:
        """A copy with other request options, or with another `policy`, or `adapter`, `version` and `run` of it."""
        if changes.keys() & {"policy", "adapter", "version", "run"}:
            policy = changes.pop("policy", self.policy)
            # A version belongs to its adapter: another adapter starts at its current one.
            version = changes.pop("version", None if "adapter" in changes else self.version)
            adapter = changes.pop("adapter", self.adapter)
            run = changes.pop("run", self.engine.run)
            engine = PolicyEngine(policy, adapter, version, run)
            changes |= {"engine": engine, "async_engine": AsyncPolicyEngine(engine)}
            changes["model"] = model_name(policy, adapter, version, run)
        return super().copy(**changes)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @classmethod
    def load_state(cls, state: dict[str, Any], *, allow_custom_lm_class: bool = False) -> Self:
        """Rebuild from `dump_state`; DSPy asks for `allow_unsafe_lm_state=True` when loading such a program.

        Raises:
            PolicyError: the state was not written by a `PolicyLM`, or loading custom classes is not allowed.
        """
        if not allow_custom_lm_class:
            raise PolicyError("pass allow_unsafe_lm_state=True to load a program whose modules answer from a policy")
        known = ("temperature", "max_tokens", "cache")
        skipped = {*known, "model", "model_type", "num_retries", "engine", "async_engine", "finetuning_model"}
        skipped |= {"launch_kwargs", "train_kwargs", "_dspy_lm_class"}
        engine = PolicyEngine.load_state(state["engine"]["state"])
        options = {name: value for name, value in state.items() if name not in skipped}
        kept = {name: state[name] for name in known if state.get(name) is not None}
        return cls(engine.policy, engine.adapter, engine.version, run=engine.run, **kept, **options)


@final
class _Written(Sampler):
    """Gives one written answer instead of sampling, in the form of the adapter that made the prompt."""

    def __init__(self, signature: type[dspy.Signature], outputs: dict[str, Any], tokenizer: Any) -> None:
        self._signature, self._outputs, self._tokenizer = signature, outputs, tokenizer

    def sample(self, request: SampleRequest) -> Completion:
        # Read here, inside the module's call: a module may have an adapter of its own.
        adapter = plain_adapter(dspy.settings.adapter)
        text = assistant_text(adapter, self._signature, self._outputs)
        ids = completion_ids(text, end_markers(adapter, self._signature), self._tokenizer)
        return Completion(ids, (0.0,) * len(ids), "stop", text)


def replay(program: dspy.Module, module: str, example: dspy.Example, policy: PolicyLike) -> Call:
    """The call that a module would have made, had the policy answered with an example's outputs.

    The prompt is made by the module itself, demos and adapter included, exactly as in a rollout; only the answer is
    written. Its ids count as sampled with logprob 0.

    Args:
        program: holds the module; it is not changed beyond the paths written into its predictors.
        module: path of the predictor.
        example: the module's own inputs and outputs.
        policy: tokenizer, adapter and version.

    Raises:
        TaskError: no such module, a field is missing, or the adapter cannot parse what it wrote.
        PolicyError: the prompt leaves no room for the answer.
    """
    predictors = stamp_paths(program)
    if module not in predictors:
        raise TaskError(f"traces name the module {module!r}; {nearest(module, predictors)}")
    predictor = predictors[module]
    signature = predictor.signature
    missing = [name for name in signature.fields if name not in example]
    if missing:
        raise TaskError(f"a trace of module {module!r} lacks {', '.join(missing)}; it has {', '.join(example.keys())}")
    outputs = {name: example[name] for name in signature.output_fields}
    recorder = Recorder(sampler=_Written(signature, outputs, policy.tokenizer), temperature=1.0)
    inputs = {name: example[name] for name in signature.input_fields}
    with recorder.active():
        try:
            predictor(**inputs, lm=PolicyLM(policy))
        except Exception as error:
            raise recorder.fatal or TaskError(f"a trace of module {module!r} fails: {describe(error)}") from error
    call = recorder.calls()[0]
    total = call.input_tokens + len(call.completion_ids)
    if total > policy.context_length:
        raise PolicyError(f"a trace of module {module!r} has {total} tokens, the context {policy.context_length}")
    return call
