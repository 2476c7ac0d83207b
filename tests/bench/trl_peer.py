"""Runs in an environment of its own, with trl: one GRPOTrainer, a step for each line on stdin."""

import json
import sys
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

REQUEST = json.loads(sys.argv[1])
STDOUT = sys.stdout
sys.stdout = sys.stderr  # the trainer prints; the pipe carries only our words


def say(*words: object) -> None:
    print("PEER", *words, file=STDOUT, flush=True)


class InStep(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sys.stdin.readline()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        say("done")


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(at % 2) for at in range(len(completions))]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(REQUEST["model"])
    model = AutoModelForCausalLM.from_pretrained(REQUEST["model"], dtype=getattr(torch, REQUEST["dtype"]))
    texts = [tokenizer.decode(prompt) for prompt in REQUEST["prompts"]]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=REQUEST["micro"], max_steps=100,
        gradient_accumulation_steps=32 // REQUEST["micro"], num_generations=8,
        max_completion_length=REQUEST["new"], generation_kwargs={"min_new_tokens": REQUEST["new"]},
        learning_rate=1e-4, beta=0.0, logging_steps=1000, save_strategy="no", report_to=[], use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]), callbacks=[InStep()],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    say("ready", trl.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
