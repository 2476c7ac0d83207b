"""Sampler and trainer must mean the same before a run starts: the same numbers, adapters, versions and text.

Completions are sampled from the base and from random adapters, and scored by the trainer. Where the two disagree, the
trainer's other hypotheses (base instead of adapter, old version instead of new, logprobs before temperature) are held
against the same numbers, so that the message can name the cause.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modpo.config import VLLM
from modpo.errors import ConfigError, SamplerError, nearest
from modpo.lm.policy import Policy
from modpo.lm.sampler import Completion, SampleRequest
from modpo.lm.versions import adapter_folder
from modpo.train.checkpoint import write_folder
from modpo.train.trie import Row

BOUND = 0.01  # mean k3 per token; kernels that round differently stay well below, any other weights far above
COLD = 0.5  # a temperature at which logprobs before and after it differ plainly
SAMPLES, TOKENS = 2, 12
WORST = 8
ASKED = ("Name three colours.", "What is 12 plus 30?", "Write a short sentence about the sea.")
OLD, NEW, OTHER = "probe@v1", "probe@v2", "other@v1"
PROBES = {OLD: ("probe", 1), NEW: ("probe", 2), OTHER: ("other", 1)}


@dataclass(frozen=True, slots=True)
class Token:
    """A token that sampler and trainer give different logprobs (nats)."""

    subject: str
    token: int
    text: str
    sampler: float
    trainer: float


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold: whether it does, the measured mean k3 per token where it is a number, and why not."""

    name: str
    ok: bool
    k3: float | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a preflight found."""

    sampler: str
    checks: tuple[Check, ...]
    worst: tuple[Token, ...]

    @property
    def agree(self) -> bool:
        """Whether a run may start."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "agree": self.agree}

    def require(self) -> None:
        """Raise a `SamplerError` that names the causes unless all agrees."""
        causes = list(dict.fromkeys(check.cause for check in self.checks if not check.ok))
        if causes:
            raise SamplerError(f"sampler and trainer disagree, so the run does not start: {'; '.join(causes)}")


@dataclass(frozen=True, slots=True)
class _Scored:
    """Completions of one subject at one temperature."""

    subject: str
    temperature: float
    rows: list[Row]
    completions: list[Completion]


def preflight(policy: Policy, folder: Path, *, bound: float = BOUND) -> Report:
    """Hold the policy's sampler against its trainer; the policy's trainer is made anew after it.

    Args:
        policy: base, adapters' shape, and the sampler to check.
        folder: gets the random adapters, in ``adapters/``; the sampler must be able to read it.
        bound: most k3 (r - 1 - log r, r = trainer / sampler) per token, on average, that counts as agreement.

    Raises:
        SamplerError: the sampler does not work at all.
    """
    return _Preflight(policy, folder, bound).run()


def require_agreement(policy: Policy, run: Path) -> None:
    """Check before a run, and keep what was found in its folder, as ``preflight.json``.

    Raises:
        SamplerError: sampler and trainer disagree; the message names the causes.
    """
    work = run / "preflight"
    try:
        report = preflight(policy, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    (run / "preflight.json").write_text(json.dumps(report.as_dict(), indent=1), encoding="utf-8")
    report.require()


def examine(sampler: str, base: str, *, url: str | None = None, python: Path | None = None) -> dict[str, Any]:
    """A preflight without a run, for `modpo doctor`.

    Args:
        sampler: ``local`` or ``vllm``.
        base: the base model.
        url: of a running vLLM server; None starts one.
        python: the interpreter that has vllm, for that.

    Returns:
        The report's values, with ``base`` in its number format, ``url`` and ``seconds``.
    """
    if sampler not in ("local", "vllm"):
        raise ConfigError(f"unknown sampler {sampler!r}; {nearest(sampler, ('local', 'vllm'))}")
    started = time.monotonic()
    policy = Policy(base, sampler=VLLM.of(url=url, python=python)) if sampler == "vllm" else Policy(base)
    with TemporaryDirectory(prefix="modpo-doctor-") as folder:
        try:
            policy.sampler.open(Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
            found = preflight(policy, Path(folder)).as_dict()
        finally:
            policy.sampler.close()
    return {"base": policy.describe(), "url": url, **found, "seconds": round(time.monotonic() - started, 1)}


class _Preflight:
    def __init__(self, policy: Policy, folder: Path, bound: float) -> None:
        self.policy = policy
        self.folder = folder
        self.bound = bound
        self.sampler = policy.sampler
        self.trainer = policy.trainer(tuple(PROBES))
        self.prompts = [self._render(asked) for asked in ASKED]
        self.worst: list[Token] = []

    def run(self) -> Report:
        """See `preflight`."""
        base = self._sample(None, 1.0)
        same = self._agreement("base", base, None, "another base model, or the same in another number format")
        if not same.ok:
            # whatever adapters do on another base would hide the cause
            return self._report(same, self._template(), self._ends([base]))
        cold = self._sample(None, COLD)
        self._make_probes(base.rows)
        self.sampler.prepare({probe: self._home(probe) for probe in (OLD, OTHER)})
        old, other = self._sample(OLD, 1.0), self._sample(OTHER, 1.0)
        self.sampler.prepare({probe: self._home(probe) for probe in (NEW, OTHER)})
        new = self._sample(NEW, 1.0)
        self.sampler.prepare({})
        return self._report(
            same,
            self._cold(cold),
            self._adapter("adapter", old, OLD),
            self._adapter("second adapter", other, OTHER),
            self._swap(new),
            self._template(),
            self._ends([base, cold, old, other, new]),
        )

    def _report(self, *checks: Check) -> Report:
        worst = sorted(self.worst, key=lambda token: -abs(token.sampler - token.trainer))[:WORST]
        return Report(self.sampler.name, checks, tuple(worst))

    def _render(self, asked: str) -> tuple[int, ...]:
        message = [{"role": "user", "content": asked}]
        text = self.policy.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(self.policy.tokenizer.encode(text, add_special_tokens=False))

    def _home(self, probe: str) -> Path:
        return adapter_folder(self.folder, *PROBES[probe])

    def _make_probes(self, rows: Sequence[Row]) -> None:
        """Random adapters, strong enough that the trainer itself sees each of them change the base's answers."""
        plain = self.trainer.logprobs(None, rows)
        for seed, probe in enumerate(PROBES, start=1):
            for doubling in range(12):
                self.trainer.adapter(probe).scatter(seed, 0.005 * 2**doubling)
                if _mean_k3(_flat(plain), _flat(self.trainer.logprobs(probe, rows))) > 20 * self.bound:
                    break
            write_folder(self._home(probe), lambda work, probe=probe: self.trainer.save(probe, self.policy.base, work))  # type: ignore[misc]

    def _sample(self, probe: str | None, temperature: float) -> _Scored:
        request = SampleRequest(prompt_ids=(), max_tokens=TOKENS, temperature=temperature)
        if probe is not None:
            name, version = PROBES[probe]
            request = replace(request, adapter=name, version=version, folder=self._home(probe))
        requests = [
            replace(request, prompt_ids=prompt, seed=1000 * at + sample)
            for at, prompt in enumerate(self.prompts)
            for sample in range(SAMPLES)
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            completions = list(pool.map(self.sampler.sample, requests))
        rows = [Row(one.prompt_ids, made.ids) for one, made in zip(requests, completions, strict=True)]
        return _Scored(probe or "base", temperature, rows, completions)

    def _k3(self, scored: _Scored, adapter: str | None, temperature: float | None = None) -> float:
        """Mean k3 per token between the sampler's logprobs and the trainer's under a hypothesis."""
        return _mean_k3(*self._pairs(scored, adapter, temperature))

    def _pairs(
        self, scored: _Scored, adapter: str | None, temperature: float | None = None
    ) -> tuple[list[float], list[float]]:
        trainer = self.trainer.logprobs(adapter, scored.rows, temperature or scored.temperature)
        return [value for made in scored.completions for value in made.logprobs], _flat(trainer)

    def _agreement(self, name: str, scored: _Scored, adapter: str | None, cause: str) -> Check:
        sampler, trainer = self._pairs(scored, adapter)
        ids = [token for row in scored.rows for token in row.completion]
        self.worst += [
            Token(scored.subject, token, self.policy.tokenizer.decode([token]), ours, theirs)
            for token, ours, theirs in zip(ids, sampler, trainer, strict=True)
        ]
        found = _mean_k3(sampler, trainer)
        ok = found <= self.bound
        return Check(name, ok, found, "" if ok else f"{name}: {cause} (k3 {found:.3g} a token, {self.bound:g} allowed)")

    def _cold(self, scored: _Scored) -> Check:
        cause = "its logprobs do not fit the temperature"
        if self._k3(scored, None, 1.0) <= self.bound < self._k3(scored, None):
            cause = "its logprobs are raw, before temperature: start it with --logprobs-mode processed_logprobs"
        return self._agreement("temperature", scored, None, cause)

    def _adapter(self, name: str, scored: _Scored, probe: str) -> Check:
        cause = "it answers with other weights than the adapter's"
        if self._k3(scored, None) <= self.bound:
            cause = "the adapter is ignored: the base answers; start the server with --enable-lora"
        return self._agreement(name, scored, probe, cause)

    def _swap(self, scored: _Scored) -> Check:
        cause = "the new version answers with other weights"
        if self._k3(scored, OLD) <= self.bound:
            cause = "a swap has no effect: the old version still answers (stale adapter)"
        elif self._k3(scored, None) <= self.bound:
            cause = "a swap has no effect: the base answers"
        return self._agreement("swap", scored, NEW, cause)

    def _template(self) -> Check:
        theirs = self.sampler.render([{"role": "user", "content": ASKED[0]}])
        ok = theirs is None or theirs == self.prompts[0]
        return Check("chat template", ok, cause="" if ok else "chat template: it renders messages into other tokens")

    def _ends(self, all_scored: Sequence[_Scored]) -> Check:
        ends = self.policy.ends
        for scored in all_scored:
            for made in scored.completions:
                if any(token in ends for token in made.ids[:-1]):
                    return Check("end of text", False, cause="end of text: it goes on after an end-of-text token")
                if (made.finish == "stop") != (made.ids[-1] in ends):
                    return Check("end of text", False, cause=f"end of text: it stops after token {made.ids[-1]}")
        return Check("end of text", True)


def _flat(logprobs: Sequence[Any]) -> list[float]:
    return [float(value) for row in logprobs for value in row.tolist()]


def _mean_k3(sampler: Sequence[float], trainer: Sequence[float]) -> float:
    """Mean of r - 1 - log r, r = exp(trainer - sampler) (k3 of Schulman's note on approximating KL)."""
    gaps = [theirs - ours for ours, theirs in zip(sampler, trainer, strict=True)]
    return sum(math.expm1(min(gap, 50.0)) - gap for gap in gaps) / len(gaps)
