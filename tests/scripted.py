"""A policy whose sampler answers by a function, for tests of everything that is not the model."""

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy

from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import Recorder, stamp_paths
from modpo.lm.sampler import Completion, Sampler, SampleRequest
from modpo.lm.versions import adapter_folder
from modpo.rollout import Job
from tests.tiny import tiny_tokenizer

Answer = Callable[[SampleRequest, str], str]


def prompt_text(request: SampleRequest) -> str:
    return str(tiny_tokenizer().decode(list(request.prompt_ids)))


def asked_fields(prompt: str) -> list[str]:
    """Output fields that ChatAdapter's last message asks for."""
    last = prompt.rsplit("Respond with", 1)[1]
    return [name for name in re.findall(r"`\[\[ ## (\w+) ## \]\]`", last) if name != "completed"]


def chat_answer(**fields: Any) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


def kept_run(root: Path, name: str, *versions: tuple[str, int]) -> str:
    """A run folder with (empty) folders for these versions of adapters."""
    for adapter, version in versions:
        adapter_folder(root / name, adapter, version).mkdir(parents=True)
    return str(root / name)


class ScriptedSampler(Sampler):
    """Answers `answer(request, prompt text)`; keeps the requests and counts the live rollouts."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[SampleRequest] = []
        self.live = 0
        self.most_live = 0
        self._lock = threading.Lock()

    def sample(self, request: SampleRequest) -> Completion:
        with self._lock:
            self.requests.append(request)
        text = self.answer(request, prompt_text(request))
        ids = tuple(tiny_tokenizer().encode(text, add_special_tokens=False))[: request.max_tokens]
        text = str(tiny_tokenizer().decode(list(ids)))
        finish = "stop" if text.endswith(request.stop or ("",)) else "length"
        return Completion(ids, tuple(-0.25 for _ in ids), finish, text)

    def enter_rollout(self) -> None:
        with self._lock:
            self.live += 1
            self.most_live = max(self.live, self.most_live)

    def leave_rollout(self) -> None:
        with self._lock:
            self.live -= 1


class ScriptedPolicy:
    """The part of a policy that capture needs; each module has its own adapter unless `adapters` says otherwise."""

    def __init__(self, answer: Answer, *, context_length: int = 8192, adapters: dict[str, str] | None = None) -> None:
        self.name = "tiny"
        self.tokenizer = tiny_tokenizer()
        self.sampler = ScriptedSampler(answer)
        self.context_length = context_length
        self._adapters = adapters
        self._seed = 0

    def adapter_for(self, path: str) -> str | None:
        return path if self._adapters is None else self._adapters.get(path)

    def version(self, adapter: str) -> int:
        return 0

    def state(self, adapter: str | None, version: int | None, run: str | None) -> dict[str, Any]:
        return {"base": "tiny"}

    def draw_seed(self) -> int:
        self._seed += 1
        return self._seed


def echo(request, prompt):
    """Answer each asked field with the adapter that answers and the request's seed."""
    return chat_answer(**dict.fromkeys(asked_fields(prompt), f"{request.adapter} {request.seed}"))


class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.first = dspy.Predict("text -> out")
        self.inner = {"k": dspy.ChainOfThought("text -> out")}

    def forward(self, text):
        self.first(text=text)
        self.first(text=text)
        return self.inner["k"](text=text)


def played(program, policy, recorder=None, **inputs):
    program.set_lm(PolicyLM(policy))
    stamp_paths(program)
    recorder = recorder or Recorder()
    with recorder.active():
        program(**inputs)
    return recorder.calls()


def slow_echo(request, prompt):
    """Say who was asked what, after a moment that differs from call to call."""
    time.sleep(random.random() * 0.004)
    tag = re.search(r"tag=(\w+)", prompt.rsplit("## text ## ]]", 1)[1]).group(1)
    said = f"{request.adapter} tag={tag} rollout={request.rollout} seed={request.seed}"
    return chat_answer(**dict.fromkeys(asked_fields(prompt), said))


def jobs_for(examples, samples=1):
    data = [dspy.Example(tag=f"e{index}").with_inputs("tag") for index in range(examples)]
    return [
        Job(example_index=index, example=example, sample=sample, step=3)
        for index, example in enumerate(data)
        for sample in range(samples)
    ]


def as_policy(program, answer, **options):
    policy = ScriptedPolicy(answer, **options)
    program.set_lm(PolicyLM(policy))
    return policy


def one(example, prediction, trace=None):
    return 1.0


class Simple(dspy.Module):
    def __init__(self, fail=None):
        super().__init__()
        self.say = dspy.Predict("text -> said")
        self.act = dspy.Predict("text -> acted")
        self.fail = fail

    def forward(self, tag):
        said = self.say(text=f"tag={tag} x").said
        if self.fail is not None:
            self.fail(tag)
        return self.act(text=f"tag={tag} {said}")
