"""Rollouts for the tests of the store, and the run they are saved in."""

from dataclasses import replace
from pathlib import Path

from modpo.records import Call, Rollout
from modpo.store import RunInfo, Store


def a_call(module: str = "plan", occurrence: int = 0, parsed: bool = True, adapter: str | None = "plan") -> Call:
    return Call(
        module=module,
        occurrence=occurrence,
        model="modpo/tiny",
        adapter=adapter,
        version=None if adapter is None else 3,
        prompt_ids=(1, 2, 2**31 - 1),
        completion_ids=(7, 0),
        logprobs=(-0.5, -1.25),
        temperature=0.7,
        finish="length",
        text="spider 8\ud800\0",
        parsed=parsed,
        error=None if parsed else "no field",
        input_tokens=3,
        output_tokens=2,
        dollars=None,
        seconds=0.25,
    )


def a_rollout(sample: int = 0, reward: float = 1.0, calls: tuple[Call, ...] | None = None) -> Rollout:
    return Rollout(
        step=4,
        example=9,
        sample=sample,
        calls=(a_call(), a_call(occurrence=1)) if calls is None else calls,
        reward=reward,
        feedback="right",
        turn_scores=(0.1, 1 / 3),
        measures={"turns": 1.5},
        turn_states=("start", "\u00e9\ud800"),
        prediction='{"answer": "8"}',
        seconds=1.5,
    )


def stored(rollout: Rollout) -> Rollout:
    """What a rollout of `a_rollout` looks like after the database."""
    calls = tuple(replace(call, text=call.text.replace("\ud800\0", "\ufffd\ufffd")) for call in rollout.calls)
    return replace(rollout, calls=calls)


def a_store(folder: Path) -> Store:
    made = Store.create(folder)
    made.save_run(RunInfo(name="legs", optimizer="MMGRPO", settings={"steps": 3, "seed": 0}, target="x.py:task"))
    return made
