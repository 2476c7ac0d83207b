"""One whole step, sampled and trained, against the same step by rows and (where given) TRL's GRPOTrainer.

    python -m tests.bench.step --json [--rounds 3] [--peer-python /path/to/venv/bin/python]

Reference shape: 4 prompts x 8 samples, prompts of 430 tokens of which all share 330, 32 new tokens, LoRA r=16
on all linear layers. The sides take turns in one process run; the figures are medians.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from modpo.credit import recipe
from modpo.lm.local.decode import decode
from modpo.lm.local.model import fastest_dtype, machine_rates
from modpo.lm.local.pull import resolve
from modpo.lm.policy import Policy
from modpo.lm.sampler import SampleRequest
from modpo.records import Call
from modpo.train.policy_gradient import Lesson, Step, reinforce
from modpo.train.trie import Row, trie_tokens

PROMPTS, SAMPLES, SHARED, OWN, NEW = 4, 8, 330, 100, 32
RATE = 1e-4
MICRO = 4  # rows per forward pass of the other sides: with 8, two of them together need more than 24 GB


@dataclass(frozen=True)
class Shape:
    """The prompts of the reference shape, and made-up rewards with spread."""

    prompts: list[tuple[int, ...]]
    rewards: list[float]

    @classmethod
    def make(cls, seed: int = 0) -> "Shape":
        rng = random.Random(seed)
        shared = [rng.randrange(1000, 40000) for _ in range(SHARED)]
        prompts = [tuple(shared + [rng.randrange(1000, 40000) for _ in range(OWN)]) for _ in range(PROMPTS)]
        return cls(prompts, [float(rng.random() < 0.5) for _ in range(PROMPTS * SAMPLES)])

    def advantages(self) -> list[float]:
        found = []
        for at in range(0, len(self.rewards), SAMPLES):
            group = torch.tensor(self.rewards[at : at + SAMPLES])
            found += ((group - group.mean()) / (group.std() + 1e-6)).tolist()
        return found


def modpo_side(dtype: str, shape: Shape) -> Callable[[int], int]:
    """A step by modpo: trie prefill, tiered decoding, trie training. Returns the step, which returns trie tokens."""
    policy = Policy("smollm2-135m", dtype=dtype)  # type: ignore[arg-type]
    sampler: Any = policy.sampler
    trainer = policy.trainer(("module",))
    advantages = shape.advantages()

    def step(seed: int) -> int:
        requests = [
            SampleRequest(prompt_ids=prompt, max_tokens=NEW, seed=seed * 1000 + at * SAMPLES + g)
            for at, prompt in enumerate(shape.prompts)
            for g in range(SAMPLES)
        ]
        made = decode(sampler._model, policy.tokenizer, frozenset(), requests)
        calls = [
            Call(
                module="module", occurrence=0, model="", adapter="module", version=0,
                prompt_ids=request.prompt_ids, completion_ids=one.ids, logprobs=one.logprobs,
            )
            for request, one in zip(requests, made, strict=True)
        ]  # fmt: skip
        lessons = [Lesson(call, advantages[at], at) for at, call in enumerate(calls)]
        reinforce(trainer, "module", lessons, recipe("mmgrpo"), Step(learning_rate=RATE))
        return trie_tokens([Row(call.prompt_ids, call.completion_ids) for call in calls])

    return step


def rows_side(dtype: str, shape: Shape) -> Callable[[int], int]:
    """The ordinary way: generate() on the whole batch, then all rows, padded, through the model."""
    base = AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m"), dtype=getattr(torch, dtype))
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    if dtype == "bfloat16":  # as modpo: fp32 factors on a bf16 base
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.float() if "lora_" in name else parameter.data
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    advantages = torch.tensor(shape.advantages())

    def step(seed: int) -> int:
        torch.manual_seed(seed)
        prompts = torch.tensor([prompt for prompt in shape.prompts for _ in range(SAMPLES)])
        with torch.no_grad():
            ids: Tensor = model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
                max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip
        for part in range(0, len(ids), MICRO):  # all rows at once would need some 20 GB in fp32
            rows, taught = ids[part : part + MICRO], advantages[part : part + MICRO]
            logits = model(input_ids=rows, logits_to_keep=NEW + 1).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, rows[:, -NEW:, None]).squeeze(2)
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * taught[:, None]).mean(1).sum() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return ids.numel()

    return step


class Peer:
    """TRL's trainer in another environment, stepped through a pipe."""

    def __init__(self, python: str, dtype: str, shape: Shape) -> None:
        script = Path(__file__).with_name("trl_peer.py")
        request = json.dumps(
            {"model": resolve("smollm2-135m"), "dtype": dtype, "prompts": shape.prompts, "new": NEW, "micro": MICRO}
        )
        self.process = subprocess.Popen(
            [python, str(script), request], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        self.read("ready")

    def read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(f"PEER {word}"):
                return line
        raise SystemExit(f"the peer stopped (exit {self.process.wait()}); see its messages above")

    def step(self, seed: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.read("done")
        return seed

    def version(self) -> str:
        return self.read("version").split()[-1]


def bandwidth() -> float:
    """Bytes per second that a matrix-vector product reads."""
    weights, vector = torch.randn(64, 1024, 1024), torch.randn(64, 1024, 1)
    torch.bmm(weights, vector)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.bmm(weights, vector)
        times.append(time.perf_counter() - start)
    return weights.numel() * 4 / min(times)


def floor_seconds(dtype: str, tokens: int, parameters: int) -> float:
    """Least time of the step's matrix products on this machine, as measured in this run."""
    from modpo.lm.local.model import matmul_rate

    width = 2 if dtype == "bfloat16" else 4
    rate = matmul_rate(getattr(torch, dtype), seconds=1.0) * 1e9
    return tokens * 4 * parameters / rate + NEW * parameters * width / bandwidth()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="python of an environment with trl")
    options = parser.parse_args()
    dtype, shape = fastest_dtype("cpu"), Shape.make()
    sides: dict[str, Callable[[int], int]] = {"modpo": modpo_side(dtype, shape), "rows": rows_side(dtype, shape)}
    peer = Peer(options.peer_python, dtype, shape) if options.peer_python else None
    if peer is not None:
        sides["trl"] = peer.step
    times: dict[str, list[float]] = {name: [] for name in sides}
    tokens = 0
    for turn in range(options.rounds + 1):  # the first round warms up
        for name, step in sides.items():
            start = time.perf_counter()
            counted = step(turn)
            seconds = time.perf_counter() - start
            tokens = counted if name == "modpo" else tokens
            print(f"round {turn} {name} {seconds:.1f} s", file=sys.stderr)
            if turn:
                times[name].append(seconds)
    if peer is not None:
        peer.process.kill()
    medians = {name: statistics.median(found) for name, found in times.items()}
    result = {
        "seconds": medians["modpo"],
        "vs_rows": medians["rows"] / medians["modpo"],
        "vs_trl": medians["trl"] / medians["modpo"] if "trl" in medians else None,
        "floor_ratio": medians["modpo"] / floor_seconds(dtype, tokens, 134_515_008),
        "trie_tokens": tokens,
        "dtype": dtype,
        "gflops": machine_rates(),
        "threads": torch.get_num_threads(),
        "all_seconds": times,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
