"""The key-value cache of a compressed-tensors checkpoint: `kv_cache_scheme`, and the scales of
each attention.

Source: the package compressed-tensors, 0.15 to 0.20. It quantizes what the attentions of a
model of transformers write to their cache, whether a call uses that or not.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import compressed_tensors
import torch
import transformers
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.export.compressed_tensors.schemes import scale_difference
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import HALF_EVEN, Limit, beyond, is_symmetric
from quantizer.export.model_tensors import cannot_store
from quantizer.graph.ir import Graph
from quantizer.graph.structure.attention import CachedValue, Part, cached_values
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import Key, TensorSpecs

_PROJECTIONS = frozenset({"k_proj", "v_proj", "qkv_proj", "kv_b_proj"})
"""The layers by which readers recognize an attention."""
_SCALE_NAMES: Mapping[Part, str] = {"key": "k_scale", "value": "v_scale"}
_ALIKE_HELP = "give *.k_proj and *.v_proj the same entry in kv_cache_quant_config"
_NO_CACHE = "leave kv_cache_quant_config out, or use <--deploy pt2>"
_OTHER_READER = (
    "run `pip install 'transformers<5.24'`: compressed-tensors 0.20 finds the caches of these "
    f"versions; or {_NO_CACHE}"
)
_INT8_REMARK = "the key-value cache is int8, and vLLM and SGLang have only fp8 there"
_LIMITS = (
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

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return a sentence on engines that do not load it, if there are any."""
        return (_INT8_REMARK,) if self.spec.dtype == "int" else ()


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
    reason = beyond(_LIMITS, spec)
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
    with suppress(ImportError, AttributeError):
        forward = getattr(import_module(module_name), name).forward
        reader = import_module("compressed_tensors.quantization.lifecycle.initialize")
        attention = type(name, (nn.Module,), {"forward": forward})()
        attention.k_proj = nn.Identity()
        if not reader.is_cached_attention_module(attention):
            return (
                f"belongs to a {name}, of which compressed-tensors "
                f"{compressed_tensors.__version__} quantizes no cache with transformers "
                f"{transformers.__version__}",
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
