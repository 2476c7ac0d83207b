"""A base model with an adapter added to its weights, as a model folder of its own."""

import json
from pathlib import Path

from modpo.lm.local.model import load_base
from modpo.lm.local.weights import FoldedWeights


def write_merged(source: Path, out: Path) -> None:
    """Write base + adapter (saved in PEFT's form in `source`) and the tokenizer into a folder."""
    config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
    base = load_base(config["base_model_name_or_path"], "bfloat16", "cpu")
    FoldedWeights(base.model).use(source)
    base.model.save_pretrained(out)  # type: ignore[operator]
    base.tokenizer.save_pretrained(out)
