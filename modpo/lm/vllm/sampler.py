"""The sampler `vllm`: requests go to a server as token ids; sampled ids and their logprobs come back."""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

from platformdirs import user_cache_path

from modpo.config import VLLM
from modpo.errors import SamplerError
from modpo.lm.sampler import Completion, Sampler, SampleRequest
from modpo.lm.vllm.client import Client
from modpo.lm.vllm.process import ENVIRONMENT, ServerProcess, command_of, free_port
from modpo.lm.vllm.slots import AdapterSlots

WEIGHTS = "adapter_model.safetensors"


@final
class VLLMSampler(Sampler):
    """Samples from a vLLM server that it attaches to, or starts when it is first needed.

    Every version of an adapter is loaded under a name of its own, ``planner@v17-<hash of its weights>``: under a name
    used before, vLLM may answer from the old version's prefix cache (vllm#42125).

    Args:
        settings: which server.
        model: folder of the base model, for a server to start.
        dtype: number format of the base, likewise.
        lora_rank: rank of the adapters, likewise.
        tokenizer: turns ids into text.
        ends: token ids that end a completion.
    """

    name = "vllm"

    def __init__(
        self, settings: VLLM, *, model: str, dtype: str, lora_rank: int, tokenizer: Any, ends: Iterable[int]
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.ends = sorted(ends)
        self.sampled_tokens = 0
        self.process: ServerProcess | None = None
        self._start: dict[str, Any] = {"model": model, "dtype": dtype, "lora_rank": lora_rank}
        self._lock = threading.Lock()
        self._opened: tuple[Client, AdapterSlots, str] | None = None
        self._folders: dict[str, Path] = {}

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self._server()[0].url

    @property
    def slots(self) -> AdapterSlots:
        """The adapters that the server holds."""
        return self._server()[1]

    def open(self, folder: Path | None = None, tell: Callable[[str], None] = lambda _: None) -> None:
        """See `Sampler.open`."""
        with self._lock:
            if self._opened is not None:
                return
            client = self._begin(folder, tell) if self.settings.url is None else self._client(self.settings.url)
            try:
                base = self._base(client)
            except BaseException:
                client.close()
                self._stop()
                raise
            self._opened = client, AdapterSlots(self.settings.max_loras, self._load, client.unload), base

    def prepare(self, folders: Mapping[str, Path]) -> None:
        """See `Sampler.prepare`."""
        slots = self._server()[1]
        slots.prepare([self._served(*part) for part in folders.items()])

    def sample(self, request: SampleRequest) -> Completion:
        """See `Sampler.sample`."""
        client, slots, base = self._server()
        name = None
        if request.adapter is not None and request.folder is not None:
            name = self._served(f"{request.adapter}@v{request.version}", request.folder)
        with slots.using(name):
            choice = client.complete(self._body(request, name or base))
        completion = self._completion(choice)
        with self._lock:
            self.sampled_tokens += len(completion.ids)
        return completion

    def render(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...] | None:
        """See `Sampler.render`."""
        client, _, base = self._server()
        return client.render(base, messages)

    def close(self) -> None:
        """Close the connections, and stop the server if it was started here."""
        with self._lock:
            if self._opened is not None:
                self._opened[0].close()
            self._opened = None
            self._stop()

    def _stop(self) -> None:
        if self.process is not None:
            self.process.stop()
        self.process = None

    def _server(self) -> tuple[Client, AdapterSlots, str]:
        if self._opened is None:
            self.open()
        assert self._opened is not None
        return self._opened

    def _client(self, url: str, condition: Callable[[], str] = str) -> Client:
        return Client(url, timeout_s=self.settings.timeout_s, condition=condition)

    def _base(self, client: Client) -> str:
        """The name that the base model is served under."""
        if not client.healthy():
            raise SamplerError(f"no vLLM server answers at {client.url}; start it, or give another URL")
        base = [str(model["id"]) for model in client.models() if not model.get("parent")]
        if not base:
            raise SamplerError(f"the server at {client.url} serves no model; start it with --model")
        return base[0]

    def _begin(self, folder: Path | None, tell: Callable[[str], None]) -> Client:
        """Start a server and wait until it is ready."""
        port = self.settings.port or free_port()
        log = (folder or user_cache_path("modpo") / "logs" / f"{os.getpid()}") / "vllm.log"
        command = command_of(self.settings, port=port, **self._start)
        self.process = process = ServerProcess(command, log, ENVIRONMENT)
        client = self._client(f"http://127.0.0.1:{port}", process.condition)
        try:
            process.wait_ready(client.healthy, self.settings.ready_timeout_s, tell)
        except BaseException:
            client.close()
            process.stop()
            raise
        return client

    def _served(self, version: str, folder: Path) -> str:
        """The name that a version is served under; the hash tells apart runs that both have a ``planner@v1``."""
        weights = folder / WEIGHTS
        name = f"{version}-{_digest(weights, weights.stat().st_mtime_ns)}"
        self._folders[name] = folder
        return name

    def _load(self, name: str) -> None:
        self._server()[0].load(name, str(self._folders[name].resolve()))

    def _body(self, request: SampleRequest, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(request.stop),
            "stop_token_ids": self.ends,
            "include_stop_str_in_output": True,
            # the whole distribution is sampled from, whatever the model's generation_config says
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

    def _completion(self, choice: Mapping[str, Any]) -> Completion:
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or logprobs is None or len(ids) != len(logprobs):
            raise SamplerError(
                "the server's answer lacks the sampled token ids or their logprobs; modpo needs a vLLM that knows "
                "return_token_ids (0.10.2 or newer)"
            )
        broken = [value for value in logprobs if value is None or not math.isfinite(value)]
        if broken:
            raise SamplerError(f"the server's logprobs hold {broken[0]}; its weights or its number format are broken")
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(tuple(ids), tuple(map(float, logprobs)), finish, text)  # type: ignore[arg-type]


@cache
def _digest(weights: Path, changed: int) -> str:  # noqa: ARG001 - a rewritten file is another one
    return hashlib.blake2b(weights.read_bytes(), digest_size=6).hexdigest()
