"""SQLModel tables of a run and the column types that carry token arrays; rows never leave this package.

Every row names its run, so that one database may hold many runs. Keys are short strings and integers, long values
are JSON text or compressed blobs, so that any SQLAlchemy database can hold them.
"""

import json
import zlib
from typing import Any

import numpy as np
from sqlalchemy import Dialect, Double, LargeBinary, String, Text
from sqlalchemy.orm import registry
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

BLOB_BYTES = 2**24 - 1


class SafeText(TypeDecorator[str]):
    """Text of models and providers: NUL and lone surrogates, which databases refuse, become U+FFFD."""

    impl = Text(2**24 - 1)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replace what cannot be stored."""
        if value is None:
            return None
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Packed(TypeDecorator[tuple[Any, ...]]):
    """A tuple of numbers as a zlib-compressed little-endian array."""

    impl = LargeBinary(BLOB_BYTES)
    cache_ok = True
    dtype = ""

    def process_bind_param(self, value: tuple[Any, ...] | None, dialect: Dialect) -> bytes | None:
        """Pack and compress."""
        return None if value is None else zlib.compress(np.asarray(value, dtype=self.dtype).tobytes())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        """Decompress and unpack."""
        return None if value is None else tuple(np.frombuffer(zlib.decompress(value), dtype=self.dtype).tolist())


class Ids(_Packed):
    """Token ids, int32."""

    cache_ok = True
    dtype = "<i4"


class Logprobs(_Packed):
    """Logprobs in nats, float32: the precision samplers compute in and the trainer reads them with."""

    cache_ok = True
    dtype = "<f4"


class Json(TypeDecorator[Any]):
    """A value as JSON text in ASCII, which any database takes."""

    impl = Text(2**24 - 1)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Write."""
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Read."""
        return None if value is None else json.loads(value)


class Texts(Json):
    """A tuple of texts."""

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Read; JSON knows no tuples."""
        return None if value is None else tuple(json.loads(value))


class Scores(_Packed):
    """Scores, float64, exact."""

    cache_ok = True
    dtype = "<f8"


KEY: Any = String(32)
NAME: Any = String(200)


class Table(SQLModel, registry=registry()):
    """Base of the tables; a registry of its own keeps them apart from SQLModel tables of the user's program."""


class RunRow(Table, table=True):
    """One run: what was asked for and how it stands; `settings`, `program` and `estimates` are JSON."""

    __tablename__ = "modpo_run"
    id: str = Field(primary_key=True, sa_type=KEY)
    layout: int
    modpo_version: str = Field(sa_type=NAME)
    created: float = Field(sa_type=Double)
    name: str = Field(sa_type=SafeText)
    target: str | None = Field(sa_type=SafeText)
    optimizer: str = Field(sa_type=SafeText)
    settings: str = Field(sa_type=SafeText)
    program: str = Field(sa_type=SafeText)
    status: str = Field(sa_type=KEY)
    message: str = Field(sa_type=SafeText)
    estimates: str = Field(sa_type=SafeText)


class StepRow(Table, table=True):
    """One update; `done` once its adapters are saved; `metrics` and `groups` (module -> [all, silent]) are JSON."""

    __tablename__ = "modpo_step"
    run: str = Field(primary_key=True, sa_type=KEY)
    phase: str = Field(primary_key=True, sa_type=KEY)
    step: int = Field(primary_key=True)
    done: bool
    created: float = Field(sa_type=Double)
    reward: float | None = Field(sa_type=Double)
    metrics: str = Field(sa_type=SafeText)
    groups: str = Field(sa_type=SafeText)


class RolloutRow(Table, table=True):
    """One rollout of a step; `rollout` is its index within the step."""

    __tablename__ = "modpo_rollout"
    run: str = Field(primary_key=True, sa_type=KEY)
    phase: str = Field(primary_key=True, sa_type=KEY)
    step: int = Field(primary_key=True)
    rollout: int = Field(primary_key=True)
    own_step: int
    example: int
    sample: int
    reward: float = Field(sa_type=Double)
    failure: str | None = Field(sa_type=KEY)
    error: str | None = Field(sa_type=SafeText)
    feedback: str | None = Field(sa_type=SafeText)
    turn_scores: tuple[float, ...] | None = Field(sa_type=Scores)
    turn_states: tuple[str, ...] | None = Field(sa_type=Texts)
    measures: dict[str, float] | None = Field(sa_type=Json)
    prediction: str | None = Field(sa_type=SafeText)
    seconds: float = Field(sa_type=Double)


class CallRow(Table, table=True):
    """One call of a rollout; `call` is its index within the rollout, `reward` that of its rollout."""

    __tablename__ = "modpo_call"
    run: str = Field(primary_key=True, sa_type=KEY)
    phase: str = Field(primary_key=True, sa_type=KEY)
    step: int = Field(primary_key=True)
    rollout: int = Field(primary_key=True)
    call: int = Field(primary_key=True)
    module: str = Field(sa_type=NAME)
    occurrence: int
    position: int
    model: str = Field(sa_type=SafeText)
    adapter: str | None = Field(sa_type=NAME)
    version: int | None
    prompt_ids: tuple[int, ...] = Field(sa_type=Ids)
    completion_ids: tuple[int, ...] = Field(sa_type=Ids)
    logprobs: tuple[float, ...] = Field(sa_type=Logprobs)
    temperature: float = Field(sa_type=Double)
    finish: str = Field(sa_type=KEY)
    text: str = Field(sa_type=SafeText)
    parsed: bool | None
    error: str | None = Field(sa_type=SafeText)
    input_tokens: int
    output_tokens: int
    dollars: float | None = Field(sa_type=Double)
    seconds: float = Field(sa_type=Double)
    reward: float = Field(sa_type=Double)
    advantage: float | None = Field(sa_type=Double)


class AdapterRow(Table, table=True):
    """The version of one adapter after one step; `folder` is relative to the run folder where it lies in it."""

    __tablename__ = "modpo_adapter"
    run: str = Field(primary_key=True, sa_type=KEY)
    phase: str = Field(primary_key=True, sa_type=KEY)
    step: int = Field(primary_key=True)
    name: str = Field(primary_key=True, sa_type=NAME)
    version: int
    folder: str = Field(sa_type=SafeText)
    sha256: str = Field(sa_type=String(64))


class ValidationRow(Table, table=True):
    """Scores of one validation; `adapters` (name -> version) is JSON."""

    __tablename__ = "modpo_validation"
    run: str = Field(primary_key=True, sa_type=KEY)
    label: str = Field(primary_key=True, sa_type=KEY)
    step: int = Field(primary_key=True)
    mean: float = Field(sa_type=Double)
    n: int
    scores: tuple[float, ...] = Field(sa_type=Scores)
    measures: dict[str, float] = Field(sa_type=Json)
    adapters: str = Field(sa_type=SafeText)
    seconds: float = Field(sa_type=Double)


class CostRow(Table, table=True):
    """What one model has cost the run so far."""

    __tablename__ = "modpo_cost"
    run: str = Field(primary_key=True, sa_type=KEY)
    model: str = Field(primary_key=True, sa_type=NAME)
    calls: int
    input_tokens: int
    output_tokens: int
    dollars: float = Field(sa_type=Double)
    seconds: float = Field(sa_type=Double)
