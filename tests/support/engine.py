"""A LLaMA checkpoint as vLLM reads it: what is fused, which target counts for a layer, which
layers may be quantized, and what is shared by fused layers.

Source: vllm/model_executor/layers/quantization/compressed_tensors, July to November 2026, of
which this repeats the rules and none of the code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Scheme = dict[str, Any]


class Engine:
    """Reads the linear layers of a folder.

    Args:
        folder: of the checkpoint.
        names_first: whether the names of fused layers come before classes, as since July 2026.
    """

    def __init__(self, folder: Path, *, names_first: bool = True) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config = config["quantization_config"]
        self.tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= load_file(file)
        self.names_first = names_first
        self.schemes: dict[str, Scheme] = {}
        for group in self.config["config_groups"].values():
            self.schemes |= dict.fromkeys(group["targets"], group)

    def load(self, model: Any) -> None:
        """Put the weights into a float model of transformers, with its inputs quantized."""
        read = set()
        for path, module in list(model.named_modules()):
            parent, _, name = path.rpartition(".")
            fused = next((key for key, parts in FUSED.items() if name in parts), name)
            if isinstance(module, nn.Linear):
                shards = [f"{parent}.{part}" for part in FUSED.get(fused, ())] or [path]
                read |= self._load_linear(path, module, f"{parent}.{fused}".lstrip("."), shards)
        for name, value in self.tensors.items():
            parent, _, part = name.rpartition(".")
            if name in read:
                continue
            if name not in model.state_dict():
                raise ValueError(f"there is no module or parameter named {name!r}")
            setattr(model.get_submodule(parent), part, nn.Parameter(value, requires_grad=False))

    def _load_linear(
        self, path: str, module: nn.Linear, layer: str, shards: list[str]
    ) -> set[str]:
        scheme = self.scheme(layer, shards)
        if scheme is None:
            return set()
        words, inputs = scheme["weights"], scheme["input_activations"]
        weight = self._weight(path, scheme["format"], words, shards)
        module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
        if inputs is not None and inputs["dynamic"] == "local":
            factors = [self.tensors[f"{shard}.input_global_scale"] for shard in shards]
            factor = torch.stack(factors).amax()
            module.register_forward_pre_hook(lambda _, args: (nvfp4_input(args[0], factor),))
        elif inputs is not None:
            scales = [self.tensors.get(f"{shard}.input_scale") for shard in shards]
            zero = self.tensors.get(f"{path}.input_zero_point")
            static = None if inputs["dynamic"] else torch.stack(scales).amax()  # type: ignore[arg-type]
            module.register_forward_pre_hook(
                lambda _, args: (quantized_input(args[0], inputs, static, zero),)
            )
        return {name for name in self.tensors if name.rpartition(".")[0] == path} - {
            f"{path}.bias"
        }

    def scheme(self, layer: str, shards: list[str]) -> Scheme | None:
        """The group that counts for a layer, None if it stays float."""
        ignored = [self._is_ignored(shard) for shard in shards]
        if len(set(ignored)) > 1:
            raise ValueError(f"Found a different quantization schemes for {shards} in {layer}.")
        name = layer.rpartition(".")[2]
        kind = CLASSES[name]
        if ignored[0]:
            return None
        if kind == "ParallelLMHead" and not self._named(layer):
            # It is built without quantization
            return None
        tries = [self._named(layer), self._of_class(kind), self._of_shards(shards)]
        if self.names_first:
            tries = [tries[0], tries[2], tries[1]]
        matched = next((target for target in tries if target), None)
        if matched is None:
            raise ValueError(f"Unable to find matching target for {layer}")
        return self.schemes[matched]

    def _is_ignored(self, path: str) -> bool:
        return any(matches(path, target) for target in self.config["ignore"])

    def _named(self, path: str) -> str | None:
        return next((target for target in self.schemes if matches(path, target)), None)

    def _of_class(self, kind: str) -> str | None:
        for target in self.schemes:
            if target.lower() in kind.lower():
                return target
        return None

    def _of_shards(self, shards: list[str]) -> str | None:
        named = [self._named(shard) for shard in shards]
        return None if None in named else named[0]

    def _weight(self, path: str, layout: str, words: Scheme, shards: list[str]) -> Tensor:
        if layout == "nvfp4-pack-quantized":
            factors = [self.tensors[f"{shard}.weight_global_scale"] for shard in shards]
            scale = self.tensors[f"{path}.weight_scale"].float() / torch.stack(factors).amax()
            return by_groups(fp4_values(self.tensors[f"{path}.weight_packed"]), scale)
        if layout == "mxfp4-pack-quantized":
            exponents = self.tensors[f"{path}.weight_scale"].float() - 127
            return by_groups(
                fp4_values(self.tensors[f"{path}.weight_packed"]), exponents.exp2()
            )
        scale = self.tensors[f"{path}.weight_scale"].float()
        if layout == "pack-quantized":
            _, columns = self.tensors[f"{path}.weight_shape"].tolist()
            codes = unpacked(self.tensors[f"{path}.weight_packed"], words["num_bits"], columns)
            return by_groups(codes, scale)
        codes = self.tensors[f"{path}.weight"].float()
        if words["strategy"] == "tensor":
            # Requantized with the largest scale of the fused parts
            scales = [self.tensors[f"{shard}.weight_scale"] for shard in shards]
            largest = torch.stack(scales).amax()
            codes = (codes * scale / largest).to(torch.float8_e4m3fn).float()
            return codes * largest
        return by_groups(codes, scale)


def matches(path: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), path) is not None
    return path == target


def by_groups(values: Tensor, scale: Tensor) -> Tensor:
    """Rows of values times a scale for each group of columns."""
    groups = values.view(len(values), scale.shape[-1], -1)
    return (groups * scale.view(-1, scale.shape[-1], 1)).view_as(values)


def nvfp4_input(x: Tensor, factor: Tensor) -> Tensor:
    """Groups of 16 values in fp4, ties to even, with scales in fp8 that are found in float32."""
    groups = x.float().unflatten(-1, (-1, 16))
    step = groups.abs().amax(-1, keepdim=True) / 6 * factor
    scale = step.clamp(max=448).to(torch.float8_e4m3fn).float() / factor
    scaled = torch.where(scale > 0, groups / scale, 0.0)
    distances = (scaled.abs().unsqueeze(-1) - FP4).abs() + (torch.arange(8) % 2) * 1e-7
    return (FP4[distances.argmin(-1)].copysign(groups) * scale).flatten(-2).to(x.dtype)


def fp4_values(packed: Tensor) -> Tensor:
    """The values of two codes in each byte, the first in the low bits."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return FP4[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """The signed codes in a stream of bits."""
    if words.shape[1] != -(-columns * bits // 32):
        raise ValueError(f"{tuple(words.shape)} does not hold {columns} codes of {bits} bits")
    shifts = torch.arange(32)
    stream = (words.long()[..., None] >> shifts & 1).flatten(1)[:, : columns * bits]
    powers = 1 << torch.arange(bits)
    codes = (stream.view(len(words), columns, bits) * powers).sum(-1)
    return (codes - (1 << (bits - 1))).float()


def quantized_input(
    x: Tensor, words: Scheme, static: Tensor | None, zero: Tensor | None
) -> Tensor:
    """The input of a layer, rounded as its scheme says."""
    is_int = words["type"] == "int"
    values = x.float()
    scale, zero_point = static, torch.zeros(()) if zero is None else zero.float()
    if static is None and words["symmetric"]:
        largest = 127.5 if is_int else 448.0
        scale = values.abs().amax(-1, keepdim=True) / largest
    elif static is None:
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / 255
        zero_point = (-128 - low / scale).round().clamp(-128, 127)
    assert scale is not None
    if is_int:
        codes = (values / scale + zero_point).round().clamp(-128, 127)
        return ((codes - zero_point) * scale).to(x.dtype)
    return ((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(
        x.dtype
    )
