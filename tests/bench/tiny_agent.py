"""A tiny model that speaks the four roles of `programs.agentflow.gym`, trained from scratch on its written traces.

What the traces leave open (which tool, which form of a command) it leaves open as well: it is the warm start's model,
small enough that a whole run takes minutes, for questions that need many seeds.
"""

import random
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import modpo
from modpo.lm.policy_lm import replay
from modpo.programs.agentflow import gym
from modpo.task import Task
from tests.e2e.model import TersePredict
from tests.tiny import CHATML

CONTEXT = 512
QUESTIONS_SEED = 7_001  # the base's own questions; runs take small seeds
WORDS = Regex(r"\p{N}{1,2}|\p{L}+|\s|[^\s\p{L}\p{N}]")  # a number of two digits is one token: copying is easy to learn


def tiny_task(folder: Path | str, seed: int = 0) -> Task:
    """The task with short prompts, on a policy over a base of `make_base`."""
    task = gym.task(seed)
    program = gym.program(TersePredict)
    program.set_lm(modpo.Policy(str(folder), lora=modpo.LoRA(rank=8, alpha=16), dtype="float32").lm(max_tokens=40))
    return replace(task, program=program, traces=None)


def make_base(folder: Path, *, traces: int = 800, steps: int = 1200, batch: int = 32, seed: int = 0) -> Path:
    """Train the base from scratch and save it with its tokenizer.

    Args:
        folder: where to.
        traces: answers of each role to learn from.
        steps: updates.
        batch: answers an update.
        seed: of traces, weights and batches.
    """
    rng = random.Random(seed)
    shown = gym.traces(gym.draw_questions(QUESTIONS_SEED + seed), rng, traces)
    tokenizer = _tokenizer([str(value) for examples in shown.values() for one in examples for value in one.values()])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    rows = _rows(folder, shown)
    _train(model, rows, rng, steps, batch, int(tokenizer.eos_token_id))
    model.save_pretrained(folder)
    return folder


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Whole words, numbers of up to two digits and single signs; bytes for what was never seen."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(WORDS, behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    words = " system user assistant Choose the tool calculator gcd lcm or primes Write command Has memory a result "
    numbers = " ".join(str(number) for number in range(100))
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, words * 9, numbers], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _rows(folder: Path, shown: dict[str, list]) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Prompt and answer ids, through the path that sampling takes."""
    program = tiny_task(folder).program
    policy = program.planner.lm.policy
    calls = {role: [replay(program, role, one, policy) for one in examples] for role, examples in shown.items()}
    return {role: [(call.prompt_ids, call.completion_ids) for call in made] for role, made in calls.items()}


def _train(model, rows, rng, steps, batch, pad) -> None:
    """Cross-entropy of all tokens, answers tenfold: what is asked is worth knowing too, while copying is learnt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    roles = list(rows)
    for _ in range(steps):
        drawn = [rng.choice(rows[roles[at % len(roles)]]) for at in range(batch)]
        width = max(len(prompt) + len(answer) for prompt, answer in drawn)
        ids = torch.full((batch, width), pad)
        weights = torch.zeros(batch, width)
        for at, (prompt, answer) in enumerate(drawn):
            row = torch.tensor([*prompt, *answer])
            ids[at, : len(row)] = row
            weights[at, : len(row)] = 0.1
            weights[at, len(prompt) : len(row)] = 1.0
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1]).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
