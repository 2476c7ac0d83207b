"""What a call used and what it costs."""

import os
from typing import Any


def price(model: str, input_tokens: int, output_tokens: int) -> float | None:
    """Dollars by litellm's table (`litellm.register_model` adds to it); None for a model that it does not know."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its own copy: no request is made for a newer one
    import litellm

    try:
        dollars = litellm.cost_per_token(model=model, prompt_tokens=input_tokens, completion_tokens=output_tokens)
    except Exception:  # noqa: BLE001 - it raises bare exceptions for a model that it does not know
        return None
    return float(sum(dollars))


def usage_of(lm: Any, predictor: Any, outputs: Any) -> tuple[int, int, float | None]:
    """Prompt tokens, completion tokens and dollars (None where unknown) of the call that gave exactly these outputs."""
    entry = _history_entry((predictor, lm), outputs)
    usage = entry.get("usage") or {}
    told, used = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
    dollars = entry.get("cost")
    if dollars is None and told + used:
        dollars = price(str(lm.model), told, used)
    return told, used, dollars


def _history_entry(owners: tuple[Any, ...], outputs: Any) -> dict[str, Any]:
    """DSPy's history entry of a call (usage and cost are told nowhere else); empty when it keeps none."""
    for owner in owners:
        for entry in reversed(getattr(owner, "history", [])[-64:]):
            if outputs is not None and entry.get("outputs") is outputs:
                return dict(entry)
    return {}
