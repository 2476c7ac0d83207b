"""A policy: one base model and named, versioned LoRA adapters that the modules of a program answer with."""

import json
import secrets
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from modpo.config import VLLM, LoRA
from modpo.errors import ConfigError, PolicyError, nearest
from modpo.lm.sampler import Sampler

if TYPE_CHECKING:
    from modpo.lm.local.model import Base, Dtype
    from modpo.lm.policy_lm import PolicyLM
    from modpo.train.trainer import Trainer

Adapters = Literal["per-module", "shared"] | Mapping[str, str]

_attached: dict[str, "Policy"] = {}
_attach_lock = threading.Lock()


class Policy:
    """Base model plus adapters; nothing is loaded until something needs it.

    Args:
        base: hub id, folder, or a name that `modpo model pull` knows, e.g. ``"smollm2-135m"``.
        adapters: ``"per-module"`` (each module its own, named by its path), ``"shared"`` (one for
            all), or a mapping from module paths to adapter names (modules it leaves out answer with
            the base and are not trained).
        lora: shape of every adapter.
        dtype: ``"auto"`` measures once per machine whether bf16 or fp32 matrix products are faster.
        device: torch device; None takes CUDA when there is one.
        sampler: ``"local"``; ``"vllm"`` or a `modpo.VLLM`, a server; or an object of your own behind
            `modpo.lm.sampler.Sampler`.
        max_batch: most completions that the local sampler grows together.

    Raises:
        ConfigError: `adapters` is none of the allowed forms.
    """

    def __init__(
        self,
        base: str,
        *,
        adapters: Adapters = "per-module",
        lora: LoRA | None = None,
        dtype: "Dtype" = "auto",
        device: str | None = None,
        sampler: Literal["local", "vllm"] | VLLM | Sampler = "local",
        max_batch: int = 64,
    ) -> None:
        if adapters not in ("per-module", "shared") and not isinstance(adapters, Mapping):
            raise ConfigError(
                f"adapters={adapters!r}; allowed: 'per-module', 'shared', or a mapping from module paths to names"
            )
        if dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype={dtype!r}; allowed: 'auto', 'float32', 'bfloat16'")
        if isinstance(sampler, str) and sampler not in ("local", "vllm"):
            raise ConfigError(f"sampler={sampler!r}; allowed: 'local', 'vllm', a modpo.VLLM, or a Sampler")
        self.base = str(base)
        self.adapters = adapters if isinstance(adapters, str) else dict(adapters)
        self.lora = lora or LoRA.of()
        self.dtype: Dtype = dtype
        self.device = device
        self.max_batch = max_batch
        self.deterministic = False
        self._sampler: Literal["local"] | VLLM | Sampler = VLLM.of() if sampler == "vllm" else sampler
        self._lock = threading.RLock()

    def lm(self, **options: Any) -> "PolicyLM":
        """A `dspy.LM` that answers from this policy; see `PolicyLM` for the options."""
        from modpo.lm.policy_lm import PolicyLM

        return PolicyLM(self, **options)

    def with_sampler(self, sampler: Literal["local", "vllm"] | VLLM | Sampler) -> "Policy":
        """The same base and adapters behind another sampler."""
        return Policy(
            self.base,
            adapters=self.adapters,
            lora=self.lora,
            dtype=self.dtype,
            device=self.device,
            sampler=sampler,
            max_batch=self.max_batch,
        )

    @property
    def name(self) -> str:
        """Short name of the base model."""
        return Path(self.base).name

    def adapter_for(self, path: str) -> str | None:
        """Name of the adapter that the module at `path` answers with; None for the bare base."""
        if self.adapters == "per-module":
            return path
        if self.adapters == "shared":
            return "shared"
        return dict(self.adapters).get(path)

    def version(self, adapter: str) -> int:
        """The version an adapter starts from when none is named: 0, which answers like the base."""
        if isinstance(self.adapters, dict) and adapter not in self.adapters.values():
            raise PolicyError(f"unknown adapter {adapter!r}; {nearest(adapter, self.adapters.values())}")
        return 0

    def draw_seed(self) -> int:
        """A fresh seed for a call outside of a rollout."""
        return secrets.randbits(63)

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer."""
        return self._loaded[0].tokenizer

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a completion."""
        return self._loaded[0].ends

    @property
    def context_length(self) -> int:
        """Most tokens a prompt and its completion may have together."""
        return self._loaded[0].context_length

    @property
    def sampler(self) -> Sampler:
        """What makes the tokens."""
        return self._sampler if isinstance(self._sampler, Sampler) else self._loaded[1]

    def make_deterministic(self, cpu_threads: int | None = None) -> int:
        """Compute in fp32 and form batches independently of thread scheduling, from now on.

        Args:
            cpu_threads: torch's number of threads; sums depend on it. None keeps the present one.

        Returns:
            The number of threads in use.
        """
        from modpo.lm.local.model import fix_threads

        with self._lock:
            if "_loaded" in self.__dict__ and self._loaded[0].dtype != "float32":
                raise PolicyError("deterministic mode needs fp32: make the Policy with dtype='float32'")
            if self._sampler != "local":
                raise PolicyError("deterministic mode needs the local sampler")
            self.dtype, self.deterministic = "float32", True
            if "_loaded" in self.__dict__:
                local: Any = self._loaded[1]
                local.deterministic = True
            return fix_threads(cpu_threads)

    @cached_property
    def _loaded(self) -> "tuple[Base, Sampler]":
        from modpo.lm.local.model import load_base

        with self._lock:
            if "_loaded" in self.__dict__:  # another thread was first
                loaded: tuple[Base, Sampler] = self.__dict__["_loaded"]
                return loaded
            base = load_base(self.base, self.dtype, self.device)
            self.__dict__["_loaded"] = made = (base, self._make_sampler(base))
            return made

    def _make_sampler(self, base: "Base") -> Sampler:
        """The sampler, made while the base is as it was loaded."""
        if isinstance(self._sampler, Sampler):
            return self._sampler
        if isinstance(self._sampler, VLLM):
            from modpo.lm.vllm.sampler import VLLMSampler

            about = {"model": base.where, "dtype": base.dtype, "lora_rank": self.lora.rank}
            return VLLMSampler(self._sampler, tokenizer=base.tokenizer, ends=base.ends, **about)  # type: ignore[arg-type]
        from modpo.lm.local.engine import LocalSampler
        from modpo.lm.local.model import clone_sharing

        return LocalSampler(
            clone_sharing(base.model),
            base.tokenizer,
            base.ends,
            max_batch=self.max_batch,
            deterministic=self.deterministic,
        )

    def describe(self) -> str:
        """One line for people: the base, the number format in use, and why."""
        base = self._loaded[0]
        why = "measured to be the faster here" if self.dtype == "auto" else "as asked"
        return f"{self.name} in {base.dtype} ({why})"

    def trainer(self, adapters: tuple[str, ...], seed: int = 0) -> "Trainer":
        """A trainer with fresh adapters of these names on the base model, in place of any before it."""
        from modpo.train.trainer import Trainer

        base = self._loaded[0]  # before the lock: loading takes a lock of its own first
        with self._lock:
            trainer = Trainer(base.model, self.lora, adapters, seed=seed)
            trainer.deterministic = self.deterministic
            return trainer

    def state(self, adapter: str | None, version: int | None, run: str | None) -> dict[str, Any]:
        """What a saved program needs to answer with this adapter version in another process."""
        return {
            "base": self.base,
            "dtype": self._loaded[0].dtype if "_loaded" in self.__dict__ else self.dtype,
            "adapters": self.adapters,
            "lora": self.lora.model_dump(mode="json"),
            "adapter": adapter,
            "version": version,
            "run": run,
        }

    @classmethod
    def attach(cls, state: Mapping[str, Any]) -> Self:
        """The policy of a saved state, one per base, dtype and mapping in this process."""
        key = json.dumps([state[name] for name in ("base", "dtype", "adapters", "lora")], sort_keys=True)
        with _attach_lock:
            if key not in _attached:
                _attached[key] = cls(
                    state["base"], adapters=state["adapters"], lora=LoRA.of(**state["lora"]), dtype=state["dtype"]
                )
            policy = _attached[key]
        assert isinstance(policy, cls)
        return policy
