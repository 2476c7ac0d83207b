"""The weights that sampling uses: base weights with one adapter version folded into a scratch copy."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

from modpo.errors import SamplerError
from modpo.train.lora import load_factors

SCRATCH_BYTES = 4 << 30  # bound on folded copies kept at once; one is always kept


class FoldedWeights:
    """Swaps folded copies W + scale * B A into a model of its own; the original tensors are never written.

    Args:
        model: a model whose parameters may be replaced (they may share tensors with another model).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._originals = {name: layer.weight for name, layer in self._layers.items()}
        self._copies: OrderedDict[Path, dict[str, nn.Parameter]] = OrderedDict()
        self._current: Path | None = None

    def use(self, folder: Path | None) -> None:
        """Make the model answer with the adapter version kept in a folder; None is the base alone."""
        if folder == self._current:
            return
        folded = {} if folder is None else self._folded(folder)
        for name, layer in self._layers.items():
            layer.weight = folded.get(name, self._originals[name])
        self._current = folder

    def _folded(self, folder: Path) -> dict[str, nn.Parameter]:
        if folder in self._copies:
            self._copies.move_to_end(folder)
            return self._copies[folder]
        factors, scale = load_factors(folder)
        copies = {name: self._fold(name, down, up, scale) for name, (down, up) in factors.items()}
        size = sum(weight.numel() * weight.element_size() for weight in copies.values())
        self._copies[folder] = copies
        while len(self._copies) > 1 and len(self._copies) * size > SCRATCH_BYTES:
            self._copies.popitem(last=False)
        return copies

    @torch.no_grad()
    def _fold(self, name: str, down: Tensor, up: Tensor, scale: float) -> nn.Parameter:
        weight = self._originals.get(name)
        shape = (up.shape[0], down.shape[1])
        if weight is None or weight.shape != shape:
            raise SamplerError(
                f"the adapter acts on {name!r} of shape {shape}, which the base model does not have; check the base"
            )
        device = weight.device
        folded = torch.addmm(weight.float(), up.to(device), down.to(device), alpha=scale)
        return nn.Parameter(folded.to(weight.dtype), requires_grad=False)
