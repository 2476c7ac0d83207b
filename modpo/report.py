"""What a run did, for people (tables, a curve) and for programs (a JSON-able dict), with honest intervals."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from modpo.errors import ConfigError
from modpo.store import RunSummary, Store, Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Interval = tuple[float, float]


def mean_interval(scores: Sequence[float], *, level: float = 0.95, resamples: int = 9999, seed: int = 0) -> Interval:
    """Bootstrap interval of a mean: bias-corrected and accelerated (Efron 1987), as in `scipy.stats.bootstrap`.

    Args:
        scores: one score per example.
        level: confidence, 0 to 1.
        resamples: bootstrap resamples.
        seed: seed of the resampling.

    Returns:
        Lower and upper end; both the mean where the scores have no spread, NaN for no scores.
    """
    values = np.asarray(scores, dtype=float)
    if values.size == 0:
        return math.nan, math.nan
    if np.ptp(values) < 1e-12:  # nothing to resample: the method would divide by zero
        return float(values.mean()), float(values.mean())
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,), np.mean, confidence_level=level, n_resamples=resamples, batch=500, rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


def gain_interval(before: Sequence[float], after: Sequence[float], **options: Any) -> Interval:
    """Paired bootstrap interval of the mean of ``after - before``; options as for `mean_interval`.

    Raises:
        ConfigError: the scores are not of the same examples.
    """
    if len(before) != len(after):
        raise ConfigError(f"a paired interval needs scores of the same examples, got {len(before)} and {len(after)}")
    return mean_interval([new - old for old, new in zip(before, after, strict=True)], **options)


def summary(store: Store) -> dict[str, Any]:
    """All that is shown of a run, JSON-able: its description, steps, validations, modules, failures and costs."""
    info = store.run()
    return {
        "run": str(store.folder),
        **asdict(info),
        "steps": [asdict(step) for step in store.steps()],
        "validations": [_validation(made) for made in store.validations()],
        "gain": _gain(store.validations()),
        "modules": [asdict(module) for module in store.module_table()],
        "adapters": [{**made._asdict(), "folder": str(made.folder)} for made in store.latest_adapters()],
        "failures": store.failures(),
        "costs": [asdict(usage) for usage in store.costs()],
    }


def preflight_tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of a preflight: what must hold, and the tokens on which sampler and trainer differ most."""
    checks = Table("check", "holds", "k3 a token", "cause", title="sampler against trainer", title_justify="left")
    for check in found["checks"]:
        k3 = "" if check["k3"] is None else f"{check['k3']:.2e}"
        checks.add_row(check["name"], "yes" if check["ok"] else "NO", k3, check["cause"])
    worst = Table("of", "token", "text", "sampler", "trainer", title="worst tokens (nats)", title_justify="left")
    for token in found["worst"]:
        row = (token["subject"], str(token["token"]), repr(token["text"]), token["sampler"], token["trainer"])
        worst.add_row(*(f"{part:.5f}" if isinstance(part, float) else part for part in row))
    verdict = "they agree" if found["agree"] else "they disagree: a run would not start"
    return [Text(f"{found['sampler']}, {found['base']}"), checks, worst, Text(f"{verdict} ({found['seconds']} s)")]


def to_json(value: Any) -> str:
    """Write a value as one line of strict JSON; dataclasses and settings are objects, NaN and infinities null."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    """Only what JSON knows."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _validation(made: Validation) -> dict[str, Any]:
    return {
        "label": made.label,
        "step": made.step,
        "mean": made.mean,
        "ci95": list(mean_interval(made.scores)),
        "n": len(made.scores),
        "measures": dict(made.measures),
        "adapters": dict(made.adapters),
        "seconds": made.seconds,
    }


def _gain(validations: Sequence[Validation]) -> dict[str, Any] | None:
    """What RL added: the last validation against the one before its first step, where both have the same examples."""
    start = next((made for made in reversed(validations) if made.label in ("warm", "before")), None)
    end = validations[-1] if validations else None
    if start is None or end is None or end.label in ("warm", "before") or len(start.scores) != len(end.scores):
        return None
    interval = gain_interval(start.scores, end.scores)
    return {"from": start.label, "to": end.label, "mean": end.mean - start.mean, "ci95": list(interval)}


def tables(known: Mapping[str, Any]) -> list[RenderableType]:
    """Show a `summary`: how the run stands, its modules, validations, failures and costs."""
    shown: list[RenderableType] = [_head(known), _modules(known["modules"])]
    if known["validations"]:
        shown.append(_validations(known["validations"]))
    if known["gain"]:
        low, high = known["gain"]["ci95"]
        text = f"gain {_signed(known['gain']['mean'])} points, 95 % interval {_signed(low)} to {_signed(high)}"
        shown.append(Text(f"{text} (paired, {known['gain']['from']} to {known['gain']['to']})"))
    failed = {kind: count for kind, count in known["failures"].items() if kind != "none"}
    if failed:
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(failed.items()))
        shown.append(Text(f"failed rollouts: {parts}, of {sum(known['failures'].values())}"))
    if known["costs"]:
        shown.append(_costs(known["costs"]))
    return shown


def _head(known: Mapping[str, Any]) -> Table:
    """Name, standing and progress of a run."""
    done = [step for step in known["steps"] if step["done"]]
    trained = [step for step in done if step["phase"] == "train"]
    lines = {
        "run": known["run"],
        "task": known["name"],
        "target": known["target"],
        "optimizer": known["optimizer"],
        "policy": (known["program"] or {}).get("policy"),
        "status": f"{known['status']}: {known['message']}" if known["message"] else known["status"],
        "steps": f"{len(trained)} of {known['settings'].get('steps', '?')}, warm start {len(done) - len(trained)}",
        "reward": f"{trained[0]['reward']:.3f} → {trained[-1]['reward']:.3f}" if _rewarded(trained) else None,
        "adapters": ", ".join(f"{one['name']}@v{one['version']}" for one in known["adapters"]) or None,
        **{key.replace("_", " "): str(value) for key, value in known["estimates"].items()},
    }
    table = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        if value is not None:
            table.add_row(name, Text(str(value)))
    return table


def _rewarded(steps: Sequence[dict[str, Any]]) -> bool:
    return bool(steps) and steps[0]["reward"] is not None and steps[-1]["reward"] is not None


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _modules(modules: Sequence[dict[str, Any]]) -> Table:
    """One line per module."""
    table = _table(
        "modules", "module", "adapter", "calls", "reward", "parse failures", "groups", "spread-less", "tokens out"
    )
    for one in modules:
        table.add_row(
            Text(one["module"]),
            Text(one["adapter"] or "frozen"),
            str(one["calls"]),
            f"{one['reward']:.3f}",
            f"{one['parse_failures']} ({one['parse_failures'] / one['calls']:.0%})",
            str(one["groups"]),
            f"{one['silent']} ({one['silent'] / max(one['groups'], 1):.0%})",
            str(one["output_tokens"]),
        )
    return table


def _validations(validations: Sequence[dict[str, Any]]) -> Table:
    """One line per validation, scores in percent, with what else the metric measured."""
    measured = dict.fromkeys(name for one in validations for name in one["measures"])
    columns = (name.replace("_", " ") for name in measured)
    table = _table("validations", "when", "step", "score %", "95 % interval", "examples", *columns)
    for one in validations:
        low, high = (100 * end for end in one["ci95"])
        step = str(one["step"]) if one["step"] >= 0 else ""
        more = (f"{one['measures'][name]:.2f}" if name in one["measures"] else "" for name in measured)
        score, interval = f"{100 * one['mean']:.1f}", f"{low:.1f} to {high:.1f}"
        table.add_row(one["label"], step, score, interval, str(one["n"]), *more)
    return table


def _costs(costs: Sequence[dict[str, Any]]) -> Table:
    """One line per model."""
    table = _table("costs", "model", "calls", "tokens in", "tokens out", "dollars", "call seconds")
    for one in costs:
        numbers = (one["calls"], one["input_tokens"], one["output_tokens"])
        table.add_row(Text(one["model"]), *map(str, numbers), f"{one['dollars']:.4f}", f"{one['seconds']:.1f}")
    return table


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


def runs_table(runs: Sequence[RunSummary]) -> Table:
    """One line per run."""
    table = _table("runs", "run", "task", "optimizer", "status", "steps", "score %")
    for run in runs:
        score = "" if run.score is None else f"{100 * run.score:.1f}"
        status = f"{run.info.status}: {run.info.message}" if run.info.message else run.info.status
        table.add_row(
            Text(str(run.folder)), Text(run.info.name), run.info.optimizer, Text(status), str(run.steps), score
        )
    return table


def plot(store: Store, path: Path) -> Path:
    """Draw mean reward per step and validation scores with their 95 % intervals as a PNG.

    Args:
        store: the run.
        path: the file to write.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib; install it with: pip install 'modpo[demo]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    _draw(figure, store)
    figure.savefig(path, format="png", dpi=120)
    return path


def _draw(figure: "Figure", store: Store) -> None:
    """Both curves on one pair of axes; step k's update lies between k and k + 1."""
    axes = figure.add_subplot()
    steps = [(step.step + 1, step.reward) for step in store.steps("train") if step.done and step.reward is not None]
    axes.plot([at for at, _ in steps], [reward for _, reward in steps], label="reward, sampled", alpha=0.6)
    made = [one for one in store.validations() if one.scores]
    for label, marker in (("before", "x"), ("warm", "s"), ("step", "o"), ("after", "D")):
        points = [one for one in made if one.label == label]
        ends = [mean_interval(one.scores) for one in points]
        spread = [[p.mean - e[0] for p, e in zip(points, ends, strict=True)]]
        spread.append([e[1] - p.mean for p, e in zip(points, ends, strict=True)])
        if points:
            at = [max(one.step + 1, 0) for one in points]
            name = f"held out, {label}" if label != "step" else "held out"
            means = [one.mean for one in points]
            axes.errorbar(at, means, yerr=np.maximum(spread, 0), fmt=marker, capsize=3, label=name)
    axes.set(xlabel="step", ylabel="score", title=store.run().name)
    if made or steps:
        axes.legend()
