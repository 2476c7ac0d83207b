from types import SimpleNamespace

import pytest

from modpo.optimizers import MMGRPO
from tests.e2e.model import calls_of, heldout, make_base, policy, program, right, trainset


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder of the base model that half-knows the task."""
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def trained(base, tmp_path_factory):
    """A student of two modules on adapters of their own, and what mmGRPO made of it."""
    student = program(policy(base))
    before = calls_of(student, heldout())
    run = tmp_path_factory.mktemp("trained") / "run"
    optimizer = MMGRPO(
        right, run_folder=run, steps=12, examples_per_step=8, rollouts_per_example=8, learning_rate=5e-3,
        validate_every=4, seed=1, quiet=True,
    )  # fmt: skip
    compiled = optimizer.compile(student, trainset=trainset(), valset=heldout())
    return SimpleNamespace(student=student, before=before, compiled=compiled, optimizer=optimizer, run=run)
