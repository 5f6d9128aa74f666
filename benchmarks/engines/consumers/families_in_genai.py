"""Makes a model of ONNX Runtime GenAI from `model-gptq`, and runs it there."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
from case_folders import Call, run_folders
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def main() -> None:
    """Run all folders."""
    run_folders("genai", run, version("onnxruntime-genai"), is_forked=True)


def run(folder: Path, call: Call) -> dict[str, Any]:
    """Return the logits of the token that follows each prompt."""
    built = folder / "genai"
    write_tokenizer(folder / "model-gptq")
    options = ["-i", str(folder / "model-gptq"), "-o", str(built), "-p", "int4", "-e", "cpu"]
    options += ["-c", str(folder / "cache"), "--extra_options"]
    # By itself, the builder rounds inputs to int8, and the head to int4
    options += ["int4_accuracy_level=1", "nodes_to_exclude=/lm_head/MatMul"]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
    done = subprocess.run(builder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    model = onnxruntime_genai.Model(str(built))
    rows = [logits(model, prompt) for prompt in call["input_ids"]]
    return {"next_token": np.stack(rows)}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer, which the builder copies; prompts are tokens already."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


def logits(model: Any, prompt: Any) -> Any:
    """Return the logits of the token that follows a prompt, with a mean of 0."""
    settings = onnxruntime_genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(prompt) + 1)
    generator = onnxruntime_genai.Generator(model, settings)
    generator.append_tokens(prompt.astype(np.int32))
    values = np.array(generator.get_logits()).reshape(-1)
    return values - values.mean()


if __name__ == "__main__":
    main()
