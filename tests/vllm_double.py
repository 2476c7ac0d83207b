"""A server that speaks vLLM's protocol over a local sampler, with the faults that a preflight must find.

The real server is tested in `tests/vllm/`; this one answers in milliseconds and can be made wrong on purpose.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from modpo.config import LoRA
from modpo.lm.local.engine import LocalSampler
from modpo.lm.sampler import Completion, SampleRequest
from modpo.train.trainer import Trainer
from modpo.train.trie import Row
from tests.loopback import serving
from tests.tiny import EOS, tiny_model, tiny_tokenizer

BASE = "tiny"
ROOT = Path(__file__).resolve().parents[1]


class Double:
    """State of the server.

    Attributes:
        fault: None, or one of "ignores adapters", "stale", "raw logprobs", "no ids", "slow", "full cache",
            "other template", "runs on".
        log: (path, body) of every POST.
    """

    def __init__(
        self, model_seed: int = 0, fault: str | None = None, context: int = 2048, folder: str | None = None
    ) -> None:
        self.fault = fault
        self.context = context
        models = [
            tiny_model("llama", model_seed) if folder is None else LlamaForCausalLM.from_pretrained(folder).eval()
            for _ in range(2)
        ]
        self.sampler = LocalSampler(models[0], tiny_tokenizer(), frozenset({EOS}))
        self.plain = Trainer(models[1], LoRA.of(), ())
        self.adapters: dict[str, Path] = {}
        self.first: dict[str, Path] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.most_adapters = 0
        self.url = ""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and JSON of a request."""
        if body is None:
            return 200, self._models() if path == "/v1/models" else {}
        self.log.append((path, body))
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            found = self.adapters.pop(body["lora_name"], None)
            return (200, "ok") if found else (404, _error("The lora adapter cannot be found."))
        if path == "/tokenize":
            text = tiny_tokenizer().apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            text = text if self.fault != "other template" else "You are helpful.\n" + text
            return 200, {"tokens": tiny_tokenizer().encode(text, add_special_tokens=False)}
        return self._complete(body)

    def _models(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": BASE} for name in self.adapters]
        return {"data": [{"id": BASE, "parent": None}, *adapters]}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_config.json").is_file():
            return 404, _error(f"No adapter found for {name}")
        self.adapters[name] = folder
        self.first.setdefault(name.split("@")[0], folder)
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return 200, "ok"

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return 400, _error(f"This model's maximum context length is {self.context} tokens.")
        if self.fault == "full cache":
            return 500, _error("No available memory for the cache blocks.")
        if body["model"] not in (BASE, *self.adapters):
            return 404, _error(f"The model `{body['model']}` does not exist.")
        time.sleep(1.0 if self.fault == "slow" else 0.0)
        made = self._sample(body)
        ids, logprobs = list(made.ids), list(made.logprobs)
        if self.fault == "raw logprobs":
            logprobs = self.plain.logprobs(None, [Row(tuple(body["prompt"]), made.ids)], 1.0)[0].tolist()
        if self.fault == "runs on":
            ids, logprobs = [EOS, *ids], [-1.0, *logprobs]
        choice = {"text": made.text, "logprobs": {"token_logprobs": logprobs}, "finish_reason": made.finish}
        if self.fault != "no ids":
            choice["token_ids"] = ids
        return 200, {"choices": [choice]}

    def _sample(self, body: dict[str, Any]) -> Completion:
        folder = self.adapters.get(body["model"])
        if self.fault == "stale" and folder is not None:
            folder = self.first[body["model"].split("@")[0]]
        if self.fault == "ignores adapters":
            folder = None
        return self.sampler.sample(
            SampleRequest(
                prompt_ids=tuple(body["prompt"]),
                adapter=None if folder is None else body["model"],
                folder=folder,
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                seed=body["seed"],
                stop=tuple(body["stop"]),
            )
        )


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


@contextmanager
def running(double: Double, port: int = 0) -> Iterator[Double]:
    """Serve until the block ends."""
    try:
        with serving(double.answer, port) as double.url:
            yield double
    finally:
        double.sampler.close()


def python_that_runs_it(folder: Path) -> Path:
    """A stand-in for an interpreter that has vllm: started as vLLM's server is, it runs the double."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\ncd {ROOT}\nexec {sys.executable} -m tests.vllm_double "$@"\n')
    script.chmod(0o755)
    return script


def main() -> None:
    """Serve the model of a folder, as vLLM's command line says it, until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    with running(Double(folder=options.model), options.port):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
