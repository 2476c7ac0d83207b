"""What happened, as frozen values: calls, rollouts, groups and the advantages given to them.

No torch and no dspy here: these values cross threads, processes and the database.
Axis suffixes used throughout the project: `_E` example, `_G` rollout, `_C` call, `_T` token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length", "error"]
Failure = Literal["parse", "program", "timeout", "metric", "prompt"]
NO_SPREAD = 1e-9  # rewards that differ by less than this are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One invocation of one module: what went in, what was sampled, and how it ended.

    Attributes:
        module: path of the predictor in its program, e.g. ``"react.extract.predict"``.
        occurrence: how many earlier calls this rollout made to the same module (0 is the first).
            Calls that race are numbered by prompt ids, so that the number does not depend on
            the scheduler.
        position: place among all calls of the rollout (0 is the first), numbered likewise.
        model: name of the LM that answered.
        adapter: name of the adapter that answered; None when the module is frozen.
        version: version of that adapter; None when the module is frozen.
        prompt_ids: exact prompt token ids (empty when frozen).
        completion_ids: exact sampled token ids, eos included when it was sampled (empty when frozen).
        logprobs: the sampler's logprob of each sampled id, in nats, at `temperature`.
        temperature: sampling temperature, 0 for greedy.
        finish: ``stop`` (eos or end marker), ``length`` (token limit) or ``error`` (no completion).
        text: the completion as text.
        parsed: whether the adapter could parse the completion; None when nothing was parsed.
        error: why there is no completion, or why it did not parse.
        input_tokens: prompt length in tokens, also for frozen modules when the provider tells it.
        output_tokens: completion length in tokens.
        dollars: cost of the call, None when unknown.
        seconds: wall time of the call, waiting for the batch included.
    """

    module: str
    occurrence: int
    position: int = 0
    model: str
    adapter: str | None = None
    version: int | None = None
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    temperature: float = 1.0
    finish: Finish = "stop"
    text: str = ""
    parsed: bool | None = None
    error: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float | None = None
    seconds: float = 0.0

    @property
    def trainable(self) -> bool:
        """Whether there are sampled tokens of a policy to train on."""
        return self.adapter is not None and len(self.completion_ids) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One run of the program on one example, however it ended.

    Attributes:
        step: training step the rollout belongs to (-1 outside of training).
        example: index of the example in its data set.
        sample: which of the example's rollouts this is (0 .. G-1).
        calls: the calls made, by module and occurrence, kept also when the run died; `position` tells their sequence.
        reward: the metric's score, or the failure reward.
        failure: what kind of failure gave the failure reward; None for a rollout that was scored.
        error: the exception of that failure as text.
        feedback: textual feedback of the metric, if it gave any.
        turn_scores: what each turn earned, if the metric said so.
        turn_states: a name for what each turn started from, if the metric gave any: turns of equal states compare.
        measures: further numbers of the metric, to report and not to train on.
        prediction: the program's outputs as JSON text, for people to read.
        seconds: wall time.
    """

    step: int
    example: int
    sample: int
    calls: tuple[Call, ...]
    reward: float
    failure: Failure | None = None
    error: str | None = None
    feedback: str | None = None
    turn_scores: tuple[float, ...] | None = None
    turn_states: tuple[str, ...] | None = None
    measures: Mapping[str, float] | None = None
    prediction: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Member:
    """A call within a list of rollouts: ``rollouts[rollout].calls[call]``."""

    rollout: int
    call: int


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that may be compared, with the reward each is compared by.

    Attributes:
        key: what the members have in common, e.g. ``(example, module, k)``.
        members: the compared calls.
        rewards: the compared rewards; one per member unless `owners` says otherwise.
        owners: for each member, which of `rewards` it earned (several calls of a trajectory share
            one); empty when every member has its own.
    """

    key: tuple[str | int, ...]
    members: tuple[Member, ...]
    rewards: tuple[float, ...]
    owners: tuple[int, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether all compared rewards are the same, so that nothing can be learnt from them."""
        return len(self.rewards) < 2 or max(self.rewards) - min(self.rewards) < NO_SPREAD


@dataclass(frozen=True, slots=True)
class Credited:
    """One call with the advantage it earned.

    Attributes:
        member: the call.
        advantage: its advantage (dimensionless).
    """

    member: Member
    advantage: float
