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
Row = tuple[tuple[int, ...], tuple[int, ...]]  # ids of a prompt and of an answer
Rows = dict[str, list[Row]]  # by role
QUESTIONS_SEED = 7_001  # the base's own questions; runs take small seeds
WORDS = Regex(r"\p{N}{1,2}|\p{L}+|\s|[^\s\p{L}\p{N}]")  # a number of two digits is one token: copying is easy to learn


def tiny_task(folder: Path | str, seed: int = 0) -> Task:
    """The task with short prompts, on a policy over a base of `make_base`."""
    task = gym.task(seed)
    program = gym.program(TersePredict)
    program.set_lm(modpo.Policy(str(folder), lora=modpo.LoRA(rank=8, alpha=16), dtype="float32").lm(max_tokens=40))
    return replace(task, program=program, traces=None)


def make_base(folder: Path, *, traces: int = 500, steps: int = 1500, batch: int = 32, seed: int = 0) -> Path:
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
    _train(model, rows, rng, steps, batch, tokenizer)
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


def _rows(folder: Path, shown: dict[str, list]) -> Rows:
    """Prompt and answer ids, through the path that sampling takes."""
    program = tiny_task(folder).program
    policy = program.planner.lm.policy
    calls = {role: [replay(program, role, one, policy) for one in examples] for role, examples in shown.items()}
    return {role: [(call.prompt_ids, call.completion_ids) for call in made] for role, made in calls.items()}


def _train(
    model: LlamaForCausalLM, rows: Rows, rng: random.Random, steps: int, batch: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Cross-entropy of the answers, among rows of random ids said twice, from which copying is learnt soonest."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    roles = list(rows)
    for step in range(steps):
        copies = 0.5 if step < steps // 2 else 0.1
        drawn = [
            _said_twice(rng, len(tokenizer)) if rng.random() < copies else rng.choice(rows[roles[at % len(roles)]])
            for at in range(batch)
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in drawn)
        ids = torch.full((batch, width), int(tokenizer.eos_token_id))
        answers = torch.zeros(batch, width, dtype=torch.bool)
        for at, (prompt, answer) in enumerate(drawn):
            end = len(prompt) + len(answer)
            ids[at, :end] = torch.tensor([*prompt, *answer])
            answers[at, len(prompt) : end] = True
        optimizer.zero_grad()
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[answers[:, 1:]]
        functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][answers[:, 1:]]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _said_twice(rng: random.Random, vocabulary: int) -> Row:
    ids = tuple(rng.randrange(2, vocabulary) for _ in range(rng.randrange(8, 28)))
    return ids, ids
