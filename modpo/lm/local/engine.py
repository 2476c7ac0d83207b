"""The local sampler: a queue that turns concurrent calls into batches for the model in this process."""

import atexit
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from modpo.errors import ModpoError, SamplerError
from modpo.lm.local.decode import decode
from modpo.lm.local.linear import expect_few_rows
from modpo.lm.local.weights import FoldedWeights
from modpo.lm.sampler import Completion, Sampler, SampleRequest
from modpo.train.attention import register

LINGER_S = 0.1  # how long a part-filled batch waits for live rollouts after the last arrival

_Waiting = tuple[SampleRequest, "Future[Completion]"]


class LocalSampler(Sampler):
    """Samples in process, batch by batch.

    A batch starts when every live rollout waits for tokens or when it is full; a batch that is neither
    starts `LINGER_S` after its last request came. In deterministic mode only the first rule holds, and a
    batch is taken in the order of the requests' keys, so that two runs form the same batches.

    Args:
        model: a causal LM of the sampler's own (it may share weight tensors with another model).
        tokenizer: its tokenizer.
        ends: token ids that end a completion.
        max_batch: most completions that grow together.
        deterministic: form batches independently of thread scheduling.
    """

    name = "local"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        ends: frozenset[int],
        *,
        max_batch: int = 64,
        deterministic: bool = False,
    ) -> None:
        model.set_attn_implementation(register())  # type: ignore[operator]
        expect_few_rows(model)
        self.weights = FoldedWeights(model)
        self.tokenizer = tokenizer
        self.ends = ends
        self.max_batch = max_batch
        self.deterministic = deterministic
        self.sampled_tokens = 0
        self._model = model
        self._ready = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._live = 0
        self._closed = False
        self._arrived = 0.0
        self._thread: threading.Thread | None = None

    def sample(self, request: SampleRequest) -> Completion:
        """See `Sampler.sample`."""
        future: Future[Completion] = Future()
        with self._ready:
            if self._closed:
                raise SamplerError("the sampler is closed; make a new Policy")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="modpo-sampler", daemon=True)
                self._thread.start()
                atexit.register(self._end)
            self._waiting.append((request, future))
            self._arrived = time.monotonic()
            self._ready.notify_all()
        return future.result()

    def enter_rollout(self) -> None:
        """See `Sampler.enter_rollout`."""
        with self._ready:
            self._live += 1

    def leave_rollout(self) -> None:
        """See `Sampler.leave_rollout`."""
        with self._ready:
            self._live -= 1
            self._ready.notify_all()

    def close(self) -> None:
        """Refuse further requests and end the thread once the batch in work is done."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def _end(self) -> None:
        """Let the batch in work end before Python does: a thread inside torch at that time would abort the process."""
        with self._ready:
            self._waiting.clear()
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while batch := self._next_batch():
            try:
                self._answer(batch)
            except Exception as error:  # noqa: BLE001 - every caller of the batch must hear of it
                failure: ModpoError
                if isinstance(error, ModpoError):
                    failure = error
                else:
                    failure = SamplerError(f"sampling failed: {error!r}")
                    failure.__cause__ = error
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)

    def _next_batch(self) -> list[_Waiting]:
        with self._ready:
            while not self._due():
                if self._closed and not self._waiting:
                    return []
                self._ready.wait(self._patience())
            self._waiting.sort(key=lambda waiting: [(type(part).__name__, part) for part in waiting[0].key])
            size = len(self._waiting) if self.deterministic else self.max_batch
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            return batch

    def _due(self) -> bool:
        if not self._waiting:
            return False
        if self._closed or self._rollouts_waiting() >= self._live:
            return True
        if self.deterministic:
            return False
        return len(self._waiting) >= self.max_batch or time.monotonic() - self._arrived >= LINGER_S

    def _rollouts_waiting(self) -> int:
        """How many rollouts wait: one that has several requests (racing calls) counts once."""
        return len({waiting[0].rollout or id(waiting[1]) for waiting in self._waiting})

    def _patience(self) -> float | None:
        return None if self.deterministic or not self._waiting else LINGER_S

    def _answer(self, batch: list[_Waiting]) -> None:
        def weights(waiting: _Waiting) -> str:
            return str(waiting[0].folder or "")

        for folder, same in groupby(sorted(batch, key=weights), key=weights):
            members = list(same)
            self.weights.use(Path(folder) if folder else None)
            for start in range(0, len(members), self.max_batch):
                self._decode(members[start : start + self.max_batch])

    def _decode(self, members: Sequence[_Waiting]) -> None:
        requests = [request for request, _ in members]
        for (_, future), completion in zip(
            members, decode(self._model, self.tokenizer, self.ends, requests), strict=True
        ):
            self.sampled_tokens += len(completion.ids)
            future.set_result(completion)
