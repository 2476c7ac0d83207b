"""LoRA adapters (arXiv 2106.09685): low-rank updates of linear layers, kept apart from the base weights."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modpo.config import LoRA
from modpo.errors import PolicyError, nearest

_PREFIX = "base_model.model."  # PEFT's names start with its wrapper's


class LoRALinear(nn.Module):
    """A frozen linear layer that adds the active adapter's low-rank update, if one is active."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.active: tuple[Tensor, Tensor, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]: W x + b + scale * B A x."""
        out: Tensor = self.base(x)
        if self.active is None:
            return out
        down, up, scale = self.active
        low = nn.functional.linear(x, down.to(x.dtype))
        flat = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), up.to(x.dtype).t(), alpha=scale)
        return flat.view(out.shape)


class Adapter(nn.Module):
    """One named LoRA: fp32 factors A [r, in] and B [out, r] for each target layer; B starts at zero."""

    def __init__(self, layers: dict[str, nn.Linear], lora: LoRA, seed: int) -> None:
        super().__init__()
        self.lora = lora
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name, layer in layers.items():
            bound = 1 / math.sqrt(layer.in_features)  # kaiming_uniform(a=sqrt(5)), as PEFT starts A
            start = torch.rand(lora.rank, layer.in_features, generator=generator).mul_(2 * bound).sub_(bound)
            key = _key(name)
            self.down[key] = nn.Parameter(start.to(layer.weight.device))
            self.up[key] = nn.Parameter(torch.zeros(layer.out_features, lora.rank, device=layer.weight.device))

    @torch.no_grad()
    def scatter(self, seed: int, size: float) -> None:
        """Draw B at random, normal with standard deviation `size`: an adapter that changes answers without training."""
        generator = torch.Generator().manual_seed(seed)
        for up in self.up.values():
            up.copy_(torch.randn(up.shape, generator=generator) * size)

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of the layer at path `name`."""
        return self.down[_key(name)], self.up[_key(name)]


def _key(name: str) -> str:
    return name.replace(".", "/")  # ParameterDict keys may hold no dots


def target_layers(model: nn.Module, lora: LoRA) -> dict[str, nn.Linear]:
    """Linear layers that adapters act on, by path: those named, or all but the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if lora.targets == "all-linear":
        return linear
    names = {name.rsplit(".", 1)[-1] for name in linear}
    for target in lora.targets:
        if target not in names:
            raise PolicyError(f"no linear layer is named {target!r}; {nearest(target, names)}")
    return {name: layer for name, layer in linear.items() if name.rsplit(".", 1)[-1] in lora.targets}


def wrap(model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, LoRALinear]:
    """Put a `LoRALinear` in place of each target layer; the weights themselves are not touched."""
    wrapped = {}
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        wrapped[name] = LoRALinear(layer)
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def unwrap(model: nn.Module) -> None:
    """Put the linear layers back that `wrap` replaced."""
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, LoRALinear)]:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.base)


@contextmanager
def activated(wrapped: dict[str, LoRALinear], adapter: Adapter | None) -> Iterator[None]:
    """Within the block, the wrapped layers answer with `adapter` (None: with the base alone)."""
    for name, layer in wrapped.items():
        layer.active = None if adapter is None else (*adapter.factors(name), adapter.lora.scale)
    try:
        yield
    finally:
        for layer in wrapped.values():
            layer.active = None


def save_adapter(adapter: Adapter, base: str, folder: Path) -> None:
    """Write an adapter in PEFT's form: `adapter_model.safetensors` and `adapter_config.json`."""
    tensors = {}
    for key in adapter.down:
        path = _PREFIX + key.replace("/", ".")
        tensors[f"{path}.lora_A.weight"] = adapter.down[key].detach().cpu().contiguous()
        tensors[f"{path}.lora_B.weight"] = adapter.up[key].detach().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    leaves = sorted({key.rsplit("/", 1)[-1] for key in adapter.down})
    config = LoraConfig(
        r=adapter.lora.rank,
        lora_alpha=adapter.lora.alpha,
        target_modules=leaves,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).to_dict()
    text = json.dumps(config, indent=2, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def read_config(folder: Path) -> tuple[str, int, float]:
    """Base model, rank and alpha of an adapter saved in PEFT's form."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return str(config["base_model_name_or_path"]), int(config["r"]), float(config["lora_alpha"])
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise PolicyError(
            f"no readable adapter in {folder} ({error}); give a folder written by modpo or PEFT"
        ) from None


def load_factors(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Read an adapter saved in PEFT's form: A and B by layer path, and the factor alpha / rank."""
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise PolicyError(
            f"no readable adapter in {folder} ({error}); give a folder written by modpo or PEFT"
        ) from None
    _, rank, alpha = read_config(folder)
    factors = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            path = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            factors[path] = (tensors[name], tensors[name.replace("lora_A", "lora_B")])
        elif not name.endswith(".lora_B.weight"):
            raise PolicyError(f"{folder} holds {name!r}; only LoRA factors are supported, no modules_to_save")
    return factors, alpha / rank


def load_adapter(adapter: Adapter, folder: Path) -> None:
    """Copy saved factors into an adapter of the same shape."""
    factors, scale = load_factors(folder)
    if scale != adapter.lora.scale:
        raise PolicyError(
            f"the adapter in {folder} has alpha / rank = {scale}, this policy {adapter.lora.scale}; "
            "set lora=LoRA(rank=..., alpha=...) to match"
        )
    if {_key(path) for path in factors} != set(adapter.down):
        raise PolicyError(f"the adapter in {folder} acts on other layers than this policy's; check `lora` and the base")
    with torch.no_grad():
        for path, (down, up) in factors.items():
            mine = adapter.factors(path)
            if mine[0].shape != down.shape or mine[1].shape != up.shape:
                raise PolicyError(
                    f"the adapter in {folder} has rank {down.shape[0]}, this policy {adapter.lora.rank}; "
                    "set lora=LoRA(rank=...) to match"
                )
            mine[0].copy_(down)
            mine[1].copy_(up)
