"""Specs, configs and models that the API's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerTensorMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    RoundType,
    ScaleType,
)


def spec(dtype: Dtype = Dtype.int8, **fields: Any) -> QuantizationSpec:
    """A static symmetric spec per tensor, but for `fields`."""
    defaults: dict[str, Any] = {
        "observer_cls": PerTensorMinMaxObserver,
        "qscheme": QSchemeType.per_tensor,
        "symmetric": True,
        "scale_type": ScaleType.float,
        "round_method": RoundType.half_even,
        "is_dynamic": False,
    }
    return QuantizationSpec(dtype=dtype, **defaults | fields)


def per_token(dtype: Dtype = Dtype.int8) -> QuantizationSpec:
    """A dynamic spec with a scale for each row."""
    return spec(dtype, qscheme=QSchemeType.per_token, observer_cls=None, is_dynamic=True)


def quantized(
    model: nn.Module,
    data: Any = None,
    /,
    exclude: tuple[str, ...] = (),
    **tensors: QuantizationSpec,
) -> Any:
    """The model, quantized by one global config."""
    config = Config(QuantizationConfig(**tensors), exclude=list(exclude))
    return ModelQuantizer(config).quantize_model(model, data)


class TinyLM(nn.Module):
    """A causal language model of one block, its head tied to its embedding; `generate` takes
    the likeliest token.
    """

    def __init__(self, vocabulary: int = 40, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        heads = (
            projection(x).unsqueeze(1) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + nn.functional.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1)
        x = x + self.fc2(torch.relu(self.fc1(self.norm(x))))
        return self.lm_head(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            input_ids = torch.cat([input_ids, self(input_ids)[:, -1:].argmax(-1)], dim=1)
        return input_ids


def tiny_lm() -> TinyLM:
    """Seeded, in evaluation mode."""
    torch.manual_seed(0)
    return TinyLM().eval()


def tokens(rows: int = 2, length: int = 7) -> Tensor:
    """Token ids, the same in each call."""
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(rows))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, in dtype as well."""
    return a.dtype == b.dtype and torch.equal(a, b)
