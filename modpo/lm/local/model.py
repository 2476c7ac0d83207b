"""Loading a base model for training and sampling, in the number format that is fastest on this machine."""

import copy
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from modpo.errors import PolicyError
from modpo.lm.local.pull import resolve

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Base:
    """A base model: its tokenizer, the ids that end a completion, and its weights, which are read when first needed.

    A program that only asks a server needs no weights here.
    """

    name: str
    where: str
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    context_length: int
    dtype: str
    device: str

    @cached_property
    def model(self) -> nn.Module:
        """The model, in evaluation mode; raises a `PolicyError` when its weights cannot be read."""
        with _readable(self.name):
            model: nn.Module = AutoModelForCausalLM.from_pretrained(self.where, dtype=getattr(torch, self.dtype))
        return model.to(self.device).eval()


def load_base(name: str, dtype: Dtype, device: str | None) -> Base:
    """Find a hub id, a folder, or a model that `modpo model pull` knows, and read all of it but the weights.

    Raises:
        PolicyError: the model cannot be found or read.
    """
    where = str(resolve(name))
    disable_progress_bar()  # of transformers: ours is the only one
    chosen = fastest_dtype(device) if dtype == "auto" else dtype
    with _readable(name):
        tokenizer = AutoTokenizer.from_pretrained(where)
        config = AutoConfig.from_pretrained(where)
    if tokenizer.chat_template is None:
        raise PolicyError(f"{name!r} has no chat template; use an instruction-tuned model")
    ends = _ends(where, config, tokenizer)
    return Base(name, where, tokenizer, ends, int(config.max_position_embeddings), chosen, device or default_device())


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise PolicyError(
            f"cannot load the base model {name!r}: {str(error).splitlines()[0]}; give a folder, a hub id, "
            "or a name that `modpo model pull` knows"
        ) from None


def _ends(where: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that the generation config, or the model's where there is none, or the tokenizer calls an end."""
    try:
        named = GenerationConfig.from_pretrained(where).eos_token_id
    except OSError:  # optional
        named = config.eos_token_id
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return frozenset(int(at) for at in ids if at is not None)


def default_device() -> str:
    """CUDA when there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def clone_sharing(model: nn.Module) -> nn.Module:
    """A second model over the same weight tensors, whose weights may be swapped without touching the first's."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def fastest_dtype(device: str | None = None) -> str:
    """`bfloat16` or `float32`, whichever multiplies matrices faster; measured once per machine and kept."""
    if (device or default_device()) != "cpu":
        return "bfloat16"
    rates = machine_rates()
    return "bfloat16" if rates["bfloat16"] > rates["float32"] else "float32"


def fix_threads(wanted: int | None) -> int:
    """Set torch's number of CPU threads where one is wanted; returns the number in use."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def machine_rates() -> dict[str, float]:
    """Matrix-product rates of this machine's CPU in GFLOP/s by dtype, measured once and kept in the user cache."""
    file = user_cache_path("modpo") / "machine.json"
    key = f"{platform.node()} {platform.processor()} {_cpu()} torch {torch.__version__} x{torch.get_num_threads()}"
    known: dict[str, dict[str, float]] = {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        known = {}  # not measured yet, or written by half: measure again
    if key not in known:
        known[key] = {name: matmul_rate(getattr(torch, name)) for name in ("float32", "bfloat16")}
        _keep(file, known)
    return known[key]


def _keep(file: Path, rates: dict[str, dict[str, float]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rates, indent=1), encoding="utf-8")
    except OSError:
        return  # a cache that cannot be written only costs the measurement next time


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name} {'amx' if 'amx_bf16' in flags else ''}"


def matmul_rate(dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Rate of a product of the shapes a small model has, in GFLOP/s."""
    left: Tensor = torch.randn(512, 1024).to(dtype)
    right: Tensor = torch.randn(1024, 1024).to(dtype)
    _ = left @ right.t()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        _ = left @ right.t()
        count += 1
    return 2 * 512 * 1024 * 1024 * count / (time.perf_counter() - start) / 1e9
