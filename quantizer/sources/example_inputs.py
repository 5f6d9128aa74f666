"""Make inputs of the right shape for models of transformers, as their configs state it."""

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import DataError

DEFAULT_SEQ_LEN = 512
"""Tokens of a sample of text."""


def example_input(module: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """Return one sample of the right shape: token ids 0, 1, 2, … or black pixels.

    Args:
        module: the model.
        seq_len: the number of tokens. It is limited to the positions of the model.

    Raises:
        DataError: the model takes neither tokens nor pixels.
    """
    config: Any = getattr(module, "config", None)
    name = getattr(module, "main_input_name", "input_ids")
    if name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        length = min(seq_len, longest_window(module) or seq_len)
        ids = torch.arange(length)[None] % config.vocab_size
        inputs = {name: ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return inputs
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        dtype = next(module.parameters()).dtype
        return {name: torch.zeros(1, channels, height, width, dtype=dtype)}
    raise DataError(
        f"{type(module).__name__} does not state the shape of its input", help="give <--data>"
    )


def longest_window(module: nn.Module) -> int | None:
    """Return the number of positions of a Hugging Face model, if its config has it."""
    config = getattr(module, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    return None
