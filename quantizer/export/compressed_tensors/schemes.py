"""How compressed-tensors describes and stores a quantized linear layer, and the key-value
cache: `kv_cache_scheme`, and the scales of each attention.

Source: the package compressed-tensors, 0.15 to 0.20. It quantizes what the attentions of a
model of transformers write to their cache, whether a call uses that or not.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import HALF_EVEN, Limit, beyond, is_symmetric
from quantizer.export.transformers_models import cannot_store, scales_by_row
from quantizer.graph.ir import Graph
from quantizer.graph.structure.transformer_parts import CachedValue, Part, cached_values
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import pack, pack_bits
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.two_level import global_scale_of, pack_scales
from quantizer.observers import code_range_of
from quantizer.plan.model import Key, TensorSpecs

PACKED_FORMAT = "pack-quantized"
_INT8_FORMAT = "int-quantized"
_FP8_FORMAT = "float-quantized"
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP8_FORMAT = "mxfp8-quantized"
NVFP4_FORMAT = "nvfp4-pack-quantized"
# The format of fp4 weights, by their group size and scale type.
FP4_FORMATS = {(32, "e8m0"): MXFP4_FORMAT, (16, "e4m3"): NVFP4_FORMAT}
# Codes are packed into words of 4 bytes.
_WORD_BYTES = 4
_SCALE_DTYPES = {
    "e8m0": "torch.uint8",
    "poweroftwo": "torch.uint8",
    "e4m3": "torch.float8_e4m3fn",
}
_LARGEST_GROUP = 128
"""The largest group that engines have kernels for. A larger one is a channel if it is a row."""
_INPUT_STRATEGIES = {"per_tensor": "tensor", "per_token": "token", "per_group": "group"}


@dataclass(frozen=True)
class CompressedLayer:
    """A quantized linear layer: its weight with codes, and its input, which may stay float.

    Attributes:
        global_scale: the factor of nvfp4 scales that fused layers share; None for its own.
    """

    weight: QuantizedTensor
    input: QuantizedTensor | None = None
    global_scale: Tensor | None = None

    @property
    def format(self) -> str:
        """Return the layout of its tensors."""
        spec = self.weight.spec
        if spec.dtype == "fp8_e4m3":
            return MXFP8_FORMAT if spec.scale_type == "e8m0" else _FP8_FORMAT
        if spec.dtype != "int":
            return FP4_FORMATS[spec.group_size or 0, spec.scale_type]
        if spec.bit_width == 8 and self.input is not None:
            return _INT8_FORMAT
        return PACKED_FORMAT

    @property
    def scheme(self) -> dict[str, Any]:
        """Return its group in `config_groups`, without the targets."""
        inputs = self.input
        return {
            "weights": _weight_scheme(self.weight.spec, self.weight.scale),
            "input_activations": None if inputs is None else _input_scheme(inputs.spec),
            "format": self.format,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what the file holds of it, by the names that follow its path.

        Raises:
            ValueError: its weight has no codes.
        """
        weight = self.weight
        if weight.codes is None:
            raise ValueError("Only a weight that was encoded can be packed.")
        if self.format in FP4_FORMATS.values():
            tensors = _fp4_layout(weight, weight.codes, self.global_scale)
        else:
            tensors = _LAYOUTS[self.format](weight, weight.codes)
        inputs = self.input
        if inputs is not None and inputs.spec.is_dynamic == "local":
            tensors["input_global_scale"] = global_scale_of(inputs.scale).reshape(1)
        if inputs is not None and not inputs.spec.is_dynamic:
            tensors["input_scale"] = inputs.scale.reshape(1)
            if not is_symmetric(inputs.spec):
                zero_point = _as_signed(inputs.zero_point, inputs.spec)
                tensors["input_zero_point"] = zero_point.reshape(1)
        return tensors


def _weight_scheme(spec: QuantizationSpec, scale: Tensor) -> dict[str, Any]:
    """Return the entry of the config that says how a weight is quantized."""
    is_usual = 0 < (spec.group_size or 0) <= _LARGEST_GROUP
    has_groups = spec.qscheme == "per_group" and (is_usual or scale.shape[-1] > 1)
    scheme = _common_scheme(spec)
    scheme["dynamic"] = False
    scheme["strategy"] = "channel"
    scheme["group_size"] = None
    if has_groups:
        is_nvfp4 = spec.dtype == "fp4" and spec.scale_type == "e4m3"
        scheme["strategy"] = "tensor_group" if is_nvfp4 else "group"
        scheme["group_size"] = spec.group_size
    elif spec.qscheme == "per_block":
        scheme["strategy"] = "block"
        scheme["block_structure"] = [spec.group_size, spec.group_size]
    elif spec.qscheme == "per_tensor" and spec.dtype != "int":
        scheme["strategy"] = "tensor"
    return scheme


def _input_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    scheme = _common_scheme(spec) | {"dynamic": spec.is_dynamic}
    scheme["strategy"] = _INPUT_STRATEGIES[spec.qscheme]
    if spec.is_dynamic == "local":
        scheme["strategy"] = "tensor_group"
    if spec.qscheme == "per_group":
        scheme["group_size"] = spec.group_size
    return scheme


def _common_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    bits = {"int": spec.bit_width, "fp8_e4m3": 8, "fp4": 4}[spec.dtype]
    kind = "int" if spec.dtype == "int" else "float"
    scheme = {"num_bits": bits, "type": kind, "symmetric": is_symmetric(spec)}
    # Of scales that a group has in few bits
    dtype = _SCALE_DTYPES.get(spec.scale_type)
    if dtype is not None and spec.dtype != "int" and spec.qscheme == "per_group":
        scheme |= {"scale_dtype": dtype, "zp_dtype": dtype}
    return scheme


def _packed_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Return codes from 0 on, each row a stream of bits in words.

    Zero points are packed likewise, but along the rows.
    """
    spec = weight.spec
    tensors = {
        "weight_packed": pack_words(as_unsigned(codes, spec), spec.bit_width),
        "weight_scale": scales_by_row(weight.scale, codes),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not is_symmetric(spec):
        columns = scales_by_row(weight.zero_point, codes).t()
        words = pack_words(as_unsigned(columns, spec), spec.bit_width)
        tensors["weight_zero_point"] = words.t()
    return tensors


def _int8_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "weight": _as_signed(codes, weight.spec),
        "weight_scale": scales_by_row(weight.scale, codes),
    }
    if not is_symmetric(weight.spec):
        zero_point = scales_by_row(weight.zero_point, codes)
        tensors["weight_zero_point"] = _as_signed(zero_point, weight.spec)
    return tensors


def _fp8_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Return codes with scales, of mxfp8 as exponents plus 127."""
    if weight.spec.scale_type == "e8m0":
        scale = pack_scales(weight.scale, "e8m0")["scale"]
    elif weight.spec.qscheme == "per_tensor":
        scale = weight.scale.reshape(1)
    elif weight.spec.qscheme == "per_block":
        scale = weight.scale
    else:
        scale = scales_by_row(weight.scale, codes)
    return {"weight": codes, "weight_scale": scale}


def _fp4_layout(
    weight: QuantizedTensor, codes: Tensor, global_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return codes with scales that are exponents plus 127, or fp8 numbers.

    fp8 numbers are divided by `weight_global_scale`.
    """
    tensors = {"weight_packed": pack(codes, weight.spec).view(len(codes), -1)}
    parts = pack_scales(weight.scale, weight.spec.scale_type, global_scale)
    if "global_scale" in parts:
        tensors["weight_global_scale"] = parts["global_scale"].reshape(1)
    tensors["weight_scale"] = parts["scale"]
    return tensors


_LAYOUTS = {
    PACKED_FORMAT: _packed_layout,
    _INT8_FORMAT: _int8_layout,
    _FP8_FORMAT: _fp8_layout,
    MXFP8_FORMAT: _fp8_layout,
}


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return rows of codes as int32, the first code in the lowest bits, padded with zeros."""
    stream = pack_bits(codes.contiguous(), bits)
    padded = pad(stream, (0, -stream.shape[-1] % _WORD_BYTES))
    # Flattened first: with one row, any stride counts as contiguous, but `view` needs stride 1.
    return padded.reshape(-1).view(torch.int32).view(len(codes), -1)


def as_unsigned(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return integer codes from 0 on, as uint8."""
    if is_symmetric(spec):
        codes = codes.int() + _middle(spec)
    return codes.to(torch.uint8)


def _as_signed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    if not is_symmetric(spec):
        codes = codes.int() - _middle(spec)
    return codes.to(torch.int8)


def _middle(spec: QuantizationSpec) -> int:
    return 1 << (spec.bit_width - 1)


def scale_difference(spec: QuantizationSpec) -> str | None:
    """Return how the dynamic scale of a spec differs from the reader's, None if it does not.

    The reader divides half the range by half the number of codes, or by the largest fp8.
    """
    low, high = torch.tensor(-1.0), torch.tensor(1.0)
    scale = qparams_from_range(low, high, code_range_of(spec)).scale
    reader_divisor = 127.5 if spec.dtype == "int" else 448.0
    if scale == torch.tensor(1 / reader_divisor):
        return None
    return (
        f"is dynamic with the scale absmax / {1 / float(scale):g}, and readers have absmax / "
        f"{reader_divisor:g}"
    )


_PROJECTIONS = frozenset({"k_proj", "v_proj", "qkv_proj", "kv_b_proj"})
"""The layers by which readers recognize an attention."""
_SCALE_NAMES: Mapping[Part, str] = {"key": "k_scale", "value": "v_scale"}
_ALIKE_HELP = "give *.k_proj and *.v_proj the same entry in kv_cache_quant_config"
_NO_CACHE = "leave kv_cache_quant_config out, or use <--deploy pt2>"
_OTHER_READER = (
    "run `pip install 'transformers<5.24'`: compressed-tensors 0.20 finds the caches of these "
    f"versions; or {_NO_CACHE}"
)
INT8_CACHE_REMARK = "the key-value cache is int8, and vLLM and SGLang have only fp8 there"
_CACHE_LIMITS = (
    Limit(
        lambda spec: spec.dtype in ("int", "fp8_e4m3") and spec.bit_width == 8,
        "is not int8 or fp8_e4m3, and readers cache nothing else",
        _NO_CACHE,
    ),
    Limit(
        is_symmetric, "is asymmetric, and caches have no zero points", 'set "symmetric" to true'
    ),
    HALF_EVEN,
    Limit(
        lambda spec: not spec.is_dynamic or spec.qscheme == "per_tensor",
        "has a scale for each token, and readers have none for the tokens of a cache",
        "set its qscheme to per_tensor, or use <--deploy pt2>",
    ),
)


@dataclass(frozen=True)
class CompressedCache:
    """The quantized key-value cache of a checkpoint.

    Attributes:
        spec: of all keys and values.
        scales: the tensors of the files, by name; none if ranges are dynamic.
    """

    spec: QuantizationSpec
    scales: Mapping[str, Tensor]

    @property
    def scheme(self) -> dict[str, Any]:
        """Return the field `kv_cache_scheme` of the quantization config."""
        strategy = "attn_head" if self.spec.qscheme == "per_channel" else "tensor"
        return {
            "num_bits": 8,
            "type": "int" if self.spec.dtype == "int" else "float",
            "symmetric": True,
            "strategy": strategy,
            "dynamic": self.spec.is_dynamic,
        }


def cached_keys(graph: Graph, specs: TensorSpecs) -> dict[Key, CachedValue]:
    """Return the keys and values of attentions that are quantized, by layer and role."""
    keys = {(cached.layer, cached.role): cached for cached in cached_values(graph)}
    return {key: cached for key, cached in keys.items() if key in specs}


def cache_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield a refusal for each quantized tensor of the cache that readers cannot quantize as
    test mode does, and for each other one that they would quantize.
    """
    keys = cached_keys(graph, specs)
    if not keys:
        return
    first = specs[next(iter(keys))]
    for cached in cached_values(graph):
        key = (cached.layer, cached.role)
        reason: Reason | None
        if key not in keys:
            reason = (
                "stays float, and the cache of a checkpoint is quantized in all attentions",
                _ALIKE_HELP,
            )
        elif _words(specs[key]) != _words(first):
            reason = (
                "is quantized otherwise than other keys and values, and a checkpoint has one "
                "scheme for all",
                _ALIKE_HELP,
            )
        else:
            reason = _spec_refusal(specs[key]) or _module_refusal(graph, cached)
        if reason is not None:
            yield Refusal(*reason, *key)


def compressed_cache(
    graph: Graph, tensors: Mapping[Key, QuantizedTensor], model: nn.Module
) -> CompressedCache | None:
    """Return the quantized cache of a network without refusals; None if it is float."""
    specs = {key: tensor.spec for key, tensor in tensors.items()}
    scales: dict[str, Tensor] = {}
    spec: QuantizationSpec | None = None
    for key, cached in cached_keys(graph, specs).items():
        spec = specs[key]
        if spec.is_dynamic:
            continue
        path = graph.by_name[cached.layer].scope
        name = f"{path}.{_SCALE_NAMES[cached.part]}"
        scales[name] = _stored_scale(tensors[key], model, path)
    return None if spec is None else CompressedCache(spec, scales)


def _words(spec: QuantizationSpec) -> tuple[object, ...]:
    """Return what is the same in specs that one scheme describes."""
    return spec.dtype, spec.qscheme, spec.is_dynamic


def _spec_refusal(spec: QuantizationSpec) -> Reason | None:
    """Return why readers cannot quantize keys or values by a spec."""
    reason = beyond(_CACHE_LIMITS, spec)
    difference = scale_difference(spec) if spec.is_dynamic else None
    if reason is not None or difference is None:
        return reason
    return difference, 'set its symmetric_scale to "half_range", or is_dynamic to false'


def _module_refusal(graph: Graph, cached: CachedValue) -> Reason | None:
    """Return why readers do not find the attention that a value belongs to."""
    node = graph.by_name[cached.layer]
    scopes = [child.scope.rpartition(".") for child in graph.nodes]
    names = {name for parent, _, name in scopes if parent == node.scope}
    class_name = node.classes[0].rpartition(".")[2] if node.classes else ""
    is_attention = "attention" in class_name.lower()
    if is_attention and not names.isdisjoint(_PROJECTIONS):
        return _reader_refusal(node.classes[0])
    words = ", ".join(sorted(_PROJECTIONS))
    return (
        f"belongs to {node.scope or graph.model}, and readers recognize attentions by the name "
        f"of the class and by one of the layers {words}",
        _NO_CACHE,
    )


def _reader_refusal(class_path: str) -> Reason | None:
    """Return why the reader that is installed quantizes no cache of a class of attentions.

    It looks for an argument of `forward`, whose name changes between versions of transformers.
    """
    module_name, _, name = class_path.rpartition(".")
    if not module_name.startswith("transformers."):
        return None
    with suppress(ImportError, AttributeError):
        forward = getattr(import_module(module_name), name).forward
        reader = import_module("compressed_tensors.quantization.lifecycle.initialize")
        attention = type(name, (nn.Module,), {"forward": forward})()
        attention.k_proj = nn.Identity()
        if not reader.is_cached_attention_module(attention):
            return (
                f"belongs to a {name}, of which compressed-tensors "
                f"{version('compressed-tensors')} quantizes no cache with transformers "
                f"{version('transformers')}",
                _OTHER_READER,
            )
    return None


def _stored_scale(tensor: QuantizedTensor, model: nn.Module, path: str) -> Tensor:
    """Return the scale in the shape of files: [1], or [heads, 1, 1].

    Attentions of grouped queries read each head several times, and files have it once.
    """
    scale = tensor.scale.flatten()
    if tensor.spec.qscheme != "per_channel":
        return scale
    config: Any = model.config
    text_config = config.get_text_config(decoder=True)
    heads = getattr(text_config, "num_key_value_heads", None)
    heads = heads or text_config.num_attention_heads
    why = f"{path} has {len(scale)} heads, and the config of the model {heads}"
    if not len(scale) % heads:
        by_head = scale.view(heads, -1)
        if torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
            return by_head[:, 0].reshape(-1, 1, 1).contiguous()
        why = f"the heads of {path} are not in the order of the model's config"
    raise cannot_store("compressed-tensors", why, _NO_CACHE)
