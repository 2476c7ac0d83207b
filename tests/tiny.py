"""Tiny parts that stand in for large ones: a byte-level tokenizer with a ChatML template, and random models."""

from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 258
EOS = 1
Kind = Literal["llama", "qwen3"]
KINDS: tuple[Kind, ...] = ("llama", "qwen3")


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 2 to 257) plus <|im_start|> (0) and <|im_end|> (1, end of text)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_model(kind: Kind = "llama", seed: int = 0) -> PreTrainedModel:
    """A random fp32 model over `tiny_tokenizer`'s ids, sharp enough that its tokens differ in probability.

    Llama: 2 layers, 4 heads of 12 on 2 keys, tied head. Qwen3: 3 layers, 4 heads of 16 on 1 key, norms on
    queries and keys, a head of its own.
    """
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            config = LlamaConfig(**options, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True)
            model = LlamaForCausalLM(config)
        else:
            config = Qwen3Config(
                **options, num_hidden_layers=3, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False
            )
            model = Qwen3ForCausalLM(config)
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones hide a norm that is left out
                nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def save_tiny(folder: Path, kind: Kind = "llama", seed: int = 0) -> str:
    """Save a tiny model with its tokenizer; the folder's name, usable as `Policy(base=...)`."""
    tiny_model(kind, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
