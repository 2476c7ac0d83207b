"""What a call of a known model costs."""

import os


def price(model: str, input_tokens: int, output_tokens: int) -> float | None:
    """Dollars by litellm's table (`litellm.register_model` adds to it); None for a model that it does not know."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its own copy: no request is made for a newer one
    import litellm

    try:
        dollars = litellm.cost_per_token(model=model, prompt_tokens=input_tokens, completion_tokens=output_tokens)
    except Exception:  # noqa: BLE001 - it raises bare exceptions for a model that it does not know
        return None
    return float(sum(dollars))
