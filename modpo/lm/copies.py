"""Copies of a program for rollouts that run side by side."""

from typing import Any, final

import dspy

from modpo.ledger import Ledger
from modpo.lm.frozen import guarded, is_frozen
from modpo.lm.recorder import PATH


@final
class Copies:
    """Makes copies of a program whose predictors share the LMs of the original; frozen ones ask the ledger first."""

    def __init__(self, program: dspy.Module, ledger: Ledger) -> None:
        lms = {each.__dict__[PATH]: each.lm or dspy.settings.lm for _, each in program.named_sub_modules(dspy.Predict)}
        guards = {id(lm): guarded(lm, ledger) for lm in lms.values() if is_frozen(lm)}
        self._lms = {path: guards.get(id(lm), lm) for path, lm in lms.items()}
        self._template = self._with_lms(program.deepcopy(), {})

    def make(self) -> dspy.Module:
        """A fresh copy."""
        return self._with_lms(self._template.deepcopy(), self._lms)

    @staticmethod
    def _with_lms(program: dspy.Module, lms: dict[str, Any]) -> dspy.Module:
        for _, predictor in program.named_sub_modules(dspy.Predict):
            predictor.lm = lms.get(predictor.__dict__[PATH])
        return program
