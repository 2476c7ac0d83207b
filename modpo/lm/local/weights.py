"""The weights that sampling uses: base weights with one adapter version folded into a scratch copy."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

from modpo.errors import SamplerError
from modpo.train.lora import load_factors

SCRATCH_BYTES = 4 << 30  # bound on folded copies kept at once; one is always kept

Version = tuple[str, int]


class FoldedWeights:
    """Swaps folded copies W + scale * B A into a model of its own; the original tensors are never written.

    Args:
        model: a model whose parameters may be replaced (they may share tensors with another model).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.folders: dict[Version, Path] = {}
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._originals = {name: layer.weight for name, layer in self._layers.items()}
        self._copies: OrderedDict[Version, dict[str, nn.Parameter]] = OrderedDict()
        self._current: Version | None = None

    def publish(self, adapter: str, version: int, folder: Path) -> None:
        """Say where a version is kept."""
        self.folders[(adapter, version)] = folder

    def use(self, adapter: str | None, version: int | None) -> None:
        """Make the model answer with an adapter's version; None, or version 0 (untrained), is the base."""
        wanted = None if adapter is None or not version else (adapter, version)
        if wanted == self._current:
            return
        folded = {} if wanted is None else self._folded(wanted)
        for name, layer in self._layers.items():
            layer.weight = folded.get(name, self._originals[name])
        self._current = wanted

    def _folded(self, wanted: Version) -> dict[str, nn.Parameter]:
        if wanted in self._copies:
            self._copies.move_to_end(wanted)
            return self._copies[wanted]
        if wanted not in self.folders:
            raise SamplerError(f"adapter {wanted[0]}@v{wanted[1]} was never published to this sampler")
        factors, scale = load_factors(self.folders[wanted])
        copies = {name: self._fold(name, down, up, scale) for name, (down, up) in factors.items()}
        self._copies[wanted] = copies
        size = sum(weight.numel() * weight.element_size() for weight in copies.values())
        while len(self._copies) > 1 and len(self._copies) * size > SCRATCH_BYTES:
            self._copies.popitem(last=False)
        return copies

    @torch.no_grad()
    def _fold(self, name: str, down: Tensor, up: Tensor, scale: float) -> nn.Parameter:
        if name not in self._originals:
            raise SamplerError(f"the adapter acts on {name!r}, which the base model does not have; check the base")
        weight = self._originals[name]
        device = weight.device
        folded = torch.addmm(weight.float(), up.to(device), down.to(device), alpha=scale)
        return nn.Parameter(folded.to(weight.dtype), requires_grad=False)

    def forget(self, adapter: str, before: int) -> None:
        """Drop folded copies of an adapter's versions older than `before`."""
        for key in [key for key in self._copies if key[0] == adapter and key[1] < before and key != self._current]:
            del self._copies[key]
