"""Runs `model-compressed-tensors` or `model.gguf` in transformers.

A folder in GPTQ's form is dequantized by the quantizer's own reader, because transformers has
none without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from case_folders import NEW_TOKENS, Call, run_folders
from transformers import CompressedTensorsConfig

MODEL = "model-compressed-tensors"
TEMPLATES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


def main() -> None:
    """Run all folders."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run_folders("transformers", run, transformers.__version__)


@torch.no_grad()
def run(folder: Path, call: Call) -> dict[str, Any]:
    """Return the logits of prompts, and the tokens that follow."""
    model = opened(folder)
    tensors = {name: torch.from_numpy(value) for name, value in call.items()}
    logits = model(**tensors).logits
    outputs = {"logits": logits.float().numpy()}
    if "decoder_input_ids" not in call:
        ids = tensors["input_ids"]
        for _ in range(NEW_TOKENS):
            following = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, following], 1)
        outputs["tokens"] = ids[:, -NEW_TOKENS:].numpy()
    return outputs


def opened(folder: Path) -> Any:
    """Return the model of a folder, by the class that its config asks for."""
    if (folder / "model-gptq").exists():
        from quantizer.sources.hugging_face.loader import load_hugging_face

        return load_hugging_face(folder / "model-gptq")
    if (folder / "model.gguf").exists():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", dtype=torch.float32
        )
    options: dict[str, Any] = {"dtype": "auto"}
    if (folder / "dequantized").exists():
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    config = transformers.AutoConfig.from_pretrained(folder / MODEL)
    kind = TEMPLATES[1] if config.is_encoder_decoder else TEMPLATES[0]
    return getattr(transformers, kind).from_pretrained(folder / MODEL, **options)


if __name__ == "__main__":
    main()
