"""One rollout, turn by turn, with what each call was asked, said, and was credited with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from modpo.credit.turns import spans_of
from modpo.errors import PolicyError, StoreError
from modpo.records import Call, Rollout
from modpo.store import Store


def transcript(store: Store, name: str) -> dict[str, Any]:
    """Read a rollout of a train step.

    Args:
        store: the run.
        name: ``"12:3"`` is the rollout with index 3 of step 12, ``"3"`` that of the last step done.

    Returns:
        JSON-able: what the rollout came to, and `turns`, each with its score and its `calls`. A call's `asked` is the
        end of its prompt: from the first line that differs among its module's prompts in the step. It is None for
        frozen modules, whose prompts are not kept, and where the base model's tokenizer cannot be read.

    Raises:
        StoreError: there is no such rollout.
    """
    step, index, rollouts = _find(store, name)
    rollout, advantages = rollouts[index], store.advantages(step)
    asked = _asked(store, rollouts)
    spans = spans_of(rollout, store.run().settings.get("recipe_options", {}).get("turn_opener"))
    return {
        "run": str(store.folder),
        "rollout": f"{step}:{index}",
        "example": rollout.example,
        "sample": rollout.sample,
        "reward": rollout.reward,
        "failure": rollout.failure,
        "error": rollout.error,
        "feedback": rollout.feedback,
        "measures": dict(rollout.measures or {}),
        "turns": [
            {
                "turn": k + 1,
                "score": _at(rollout.turn_scores, k),
                "state": _at(rollout.turn_states, k),
                "calls": [
                    _call(rollout, rollout.calls[at], advantages.get((index, at)), asked(rollout.calls[at]))
                    for at in span
                ],
            }
            for k, span in enumerate(spans)
        ],
        "prediction": rollout.prediction,
        "seconds": rollout.seconds,
    }


def as_text(known: Mapping[str, Any]) -> list[RenderableType]:
    """Show a `transcript`: what was asked and said, call by call, with reward and advantage."""
    outcome = f"failed ({known['failure']}): {known['error']}" if known["failure"] else f"reward {known['reward']:.3f}"
    where = f"{known['run']}, rollout {known['rollout']}, example {known['example']}, sample {known['sample']}"
    shown: list[RenderableType] = [Text(where), Text(outcome, style="bold")]
    for turn in known["turns"]:
        score = "" if turn["score"] is None else f", score {turn['score']:g}"
        shown.append(Rule(f"turn {turn['turn']}{score}", align="left"))
        for call in turn["calls"]:
            credit = "not trained" if call["advantage"] is None else f"advantage {call['advantage']:+.3f}"
            head = f"{call['module']} ({call['model']}), reward {call['reward']:.3f}, {credit}"
            shown.append(Text(head, style="bold"))
            if call["asked"]:
                shown.append(Padding(Text(call["asked"], style="dim"), (0, 0, 0, 4)))
            shown.append(Padding(Text(f"→ {call['said'].strip()}"), (0, 0, 0, 2)))
            if call["error"]:
                shown.append(Padding(Text(f"! {call['error']}"), (0, 0, 0, 2)))
    shown.append(Rule("outcome", align="left"))
    lines = {"prediction": known["prediction"], "feedback": known["feedback"], **known["measures"]}
    shown += [Text(f"{name}: {value}") for name, value in lines.items() if value is not None]
    return shown


def _call(rollout: Rollout, call: Call, advantage: float | None, asked: str | None) -> dict[str, Any]:
    return {
        "module": call.module,
        "occurrence": call.occurrence,
        "model": call.model if call.adapter is None else f"{call.adapter}@v{call.version}",
        "asked": asked,
        "said": call.text,
        "parsed": call.parsed,
        "error": call.error,
        "reward": rollout.reward,
        "advantage": advantage,
        "tokens": len(call.completion_ids) or call.output_tokens,
    }


def _at(values: Sequence[Any] | None, k: int) -> Any:
    return values[k] if values is not None and k < len(values) else None


def _find(store: Store, name: str) -> tuple[int, int, list[Rollout]]:
    """Step, index and the rollouts of that step."""
    last = store.last_done_step("train")
    if last is None:
        raise StoreError(f"no train step of the run in {store.folder} is done: it has no rollout to show yet")
    told, _, number = name.rpartition(":")
    if not number.isdigit() or not (told or str(last)).isdigit():
        raise StoreError(f"rollout {name!r} is neither STEP:INDEX, such as {last}:0, nor an index in the last step")
    step, index = int(told or last), int(number)
    rollouts = store.rollouts(step) or []
    if index >= len(rollouts):
        there = f"indices 0 to {len(rollouts) - 1}" if rollouts else f"no such step: the last one done is {last}"
        raise StoreError(f"no rollout {name!r} in {store.folder}; step {step} has {there}")
    return step, index, rollouts


def _asked(store: Store, rollouts: Sequence[Rollout]) -> Callable[[Call], str | None]:
    """Tells what is a prompt's own: all from the first line that not every prompt of its module has in common."""
    decode = _decoder(store)
    shared: dict[str, int] = {}
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for rollout in rollouts:
        for call in rollout.calls:
            prompts.setdefault(call.module, []).append(call.prompt_ids)
    for module, found in prompts.items():
        low, high = min(found), max(found)  # what these share, all share
        shared[module] = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), 0)

    def own(call: Call) -> str | None:
        if decode is None or not call.prompt_ids:
            return None
        cut = shared[call.module]
        started = decode(call.prompt_ids[:cut]).rpartition("\n")[2]
        return (started + decode(call.prompt_ids[cut:])).strip()

    return own


def _decoder(store: Store) -> Callable[[Sequence[int]], str] | None:
    """The base model's tokenizer, by the name that the adapters keep."""
    from modpo.lm.local.model import load_base
    from modpo.train.lora import read_config

    folders = [made.folder for made in store.latest_adapters() if made.folder.is_dir()]
    try:
        base = load_base(read_config(folders[0])[0], "float32", "cpu") if folders else None
    except PolicyError:
        return None
    return None if base is None else lambda ids: str(base.tokenizer.decode(list(ids), skip_special_tokens=True))
