"""The one table of operators: canonical name, how it behaves towards quantization, and what users call it.

An operator without a row is legal: it runs as torch runs it, stays float, and `inspect` lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["mac", "compute", "fusable", "nonlinear", "concat", "passthrough", "structural", "float", "unknown"]
# mac          multiplies and accumulates; on integer hardware its inputs must be integers as well as its output
# compute      makes new values; its output is quantized
# fusable      an activation that hardware applies before writing the producer's output: one quantization for both
# nonlinear    an activation of its own: quantized unless it is what the network returns
# concat       joins tensors: they are quantized once, at its output
# passthrough  moves or selects values, so a quantized input stays on its grid
# structural   inputs, parameters, constants, sizes and integers: nothing to quantize
# float        known, and computed in float on purpose: few bits of what it makes say too little (roots, exponentials)


@dataclass(frozen=True)
class Op:
    """One row: `name` is canonical, `types` the classes and functions users may name, `aten` the packets torch traces
    it as.

    `weight` marks layers with a weight to quantize; `fresh` says that the output shares no memory with an input.
    """

    name: str
    kind: Kind
    types: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    weight: bool = False
    fresh: bool = True


def _row(name: str, kind: Kind, *types: str, aten: tuple[str, ...] = (), weight: bool = False) -> Op:
    """A row; what computes makes fresh memory, but an einsum that only permutes returns a view."""
    fresh = kind not in ("passthrough", "structural", "float", "unknown") and name not in _SEVERAL
    return Op(name, kind, types, aten or (name,), weight, fresh)


def _rows(kind: Kind, *names: str) -> tuple[Op, ...]:
    """Rows of functions that have no module and one name."""
    return tuple(_row(name, kind, f"torch.{name}") for name in names)


_F = "torch.nn.functional."
# They may return a view, or several tensors.
_SEVERAL = ("einsum", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "quant_stub")
_ROWS = (
    _row("conv1d", "mac", "torch.nn.Conv1d", _F + "conv1d", weight=True),
    _row("conv2d", "mac", "torch.nn.Conv2d", _F + "conv2d", weight=True),
    _row("conv3d", "mac", "torch.nn.Conv3d", _F + "conv3d", weight=True),
    _row("conv_transpose1d", "mac", "torch.nn.ConvTranspose1d", weight=True),
    _row("conv_transpose2d", "mac", "torch.nn.ConvTranspose2d", weight=True),
    _row("conv_transpose3d", "mac", "torch.nn.ConvTranspose3d", weight=True),
    _row("linear", "mac", "torch.nn.Linear", _F + "linear", weight=True),
    _row("lstm", "mac", "torch.nn.LSTM", weight=True),
    _row("gru", "mac", "torch.nn.GRU", weight=True),
    _row("rnn_tanh", "mac", "torch.nn.RNN", weight=True),
    _row("rnn_relu", "mac", "torch.nn.RNN", weight=True),
    _row("lstm_cell", "mac", "torch.nn.LSTMCell"),
    _row("gru_cell", "mac", "torch.nn.GRUCell"),
    _row("rnn_tanh_cell", "mac", "torch.nn.RNNCell"),
    _row("rnn_relu_cell", "mac", "torch.nn.RNNCell"),
    _row("embedding", "compute", "torch.nn.Embedding", _F + "embedding", weight=True),
    _row("embedding_bag", "compute", "torch.nn.EmbeddingBag", _F + "embedding_bag"),
    _row("batch_norm", "compute", "torch.nn.BatchNorm1d", "torch.nn.BatchNorm2d", "torch.nn.BatchNorm3d"),
    _row("channel_scale", "mac", weight=True),  # a batch norm that could not fold
    _row("layer_norm", "compute", "torch.nn.LayerNorm", _F + "layer_norm"),
    _row("group_norm", "compute", "torch.nn.GroupNorm", _F + "group_norm"),
    _row("instance_norm", "compute", "torch.nn.InstanceNorm1d", "torch.nn.InstanceNorm2d"),
    _row("rms_norm", "compute", "torch.nn.RMSNorm", _F + "rms_norm"),
    _row("matmul", "mac", "torch.matmul", "torch.mm"),
    _row("mm", "mac", "torch.mm"),
    _row("bmm", "mac", "torch.bmm"),
    _row("addmm", "mac", "torch.addmm"),
    _row("baddbmm", "mac", "torch.baddbmm"),
    _row("bilinear", "mac", "torch.nn.Bilinear", _F + "bilinear"),
    _row("einsum", "mac", "torch.einsum"),
    _row("scaled_dot_product_attention", "mac", _F + "scaled_dot_product_attention"),
    _row("add", "compute", "torch.add"),
    _row("sub", "compute", "torch.sub"),
    _row("rsub", "compute", "torch.rsub"),
    _row("mul", "compute", "torch.mul"),
    _row("div", "compute", "torch.div"),
    _row("mean", "compute", "torch.mean"),
    _row("sum", "compute", "torch.sum"),
    _row("grid_sampler", "compute", _F + "grid_sample"),
    _row("col2im", "compute", "torch.nn.Fold", _F + "fold"),
    _row("avg_pool1d", "compute", "torch.nn.AvgPool1d"),
    _row("avg_pool2d", "compute", "torch.nn.AvgPool2d", _F + "avg_pool2d"),
    _row("avg_pool3d", "compute", "torch.nn.AvgPool3d"),
    _row("adaptive_avg_pool1d", "compute", "torch.nn.AdaptiveAvgPool1d"),
    _row("adaptive_avg_pool2d", "compute", "torch.nn.AdaptiveAvgPool2d", _F + "adaptive_avg_pool2d"),
    _row("adaptive_avg_pool3d", "compute", "torch.nn.AdaptiveAvgPool3d"),
    _row(
        "interpolate",
        "compute",
        "torch.nn.Upsample",
        _F + "interpolate",
        aten=(
            *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        ),
    ),
    _row(
        "upsample_nearest",
        "passthrough",
        "torch.nn.Upsample",
        _F + "interpolate",
        aten=("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    ),
    _row("relu", "fusable", "torch.nn.ReLU", _F + "relu", "torch.relu"),
    _row("relu6", "fusable", "torch.nn.ReLU6", _F + "relu6"),
    _row("leaky_relu", "fusable", "torch.nn.LeakyReLU", _F + "leaky_relu"),
    _row("hardtanh", "fusable", "torch.nn.Hardtanh", _F + "hardtanh"),
    _row("clamp", "fusable", "torch.clamp"),
    _row("clamp_min", "fusable", "torch.clamp"),
    _row("threshold", "fusable", "torch.nn.Threshold", _F + "threshold"),
    _row("prelu", "nonlinear", "torch.nn.PReLU", _F + "prelu"),
    _row("elu", "nonlinear", "torch.nn.ELU", _F + "elu"),
    _row("celu", "nonlinear", "torch.nn.CELU", _F + "celu"),
    _row("selu", "nonlinear", "torch.nn.SELU", _F + "selu"),
    _row("glu", "nonlinear", "torch.nn.GLU", _F + "glu"),
    _row("log_sigmoid", "nonlinear", "torch.nn.LogSigmoid", _F + "logsigmoid"),
    _row("erf", "nonlinear", "torch.erf"),
    _row("gelu", "nonlinear", "torch.nn.GELU", _F + "gelu"),
    _row("silu", "nonlinear", "torch.nn.SiLU", _F + "silu"),
    _row("mish", "nonlinear", "torch.nn.Mish", _F + "mish"),
    _row("sigmoid", "nonlinear", "torch.nn.Sigmoid", "torch.sigmoid", _F + "sigmoid"),
    _row("tanh", "nonlinear", "torch.nn.Tanh", "torch.tanh", _F + "tanh"),
    _row("softplus", "nonlinear", "torch.nn.Softplus", _F + "softplus"),
    _row("hardswish", "nonlinear", "torch.nn.Hardswish", _F + "hardswish"),
    _row("hardsigmoid", "nonlinear", "torch.nn.Hardsigmoid", _F + "hardsigmoid"),
    _row("softmax", "nonlinear", "torch.nn.Softmax", "torch.softmax", _F + "softmax"),
    _row("log_softmax", "nonlinear", "torch.nn.LogSoftmax", "torch.log_softmax", _F + "log_softmax"),
    _row("cat", "concat", "torch.cat"),
    _row("stack", "concat", "torch.stack"),
    _row("max_pool1d", "passthrough", "torch.nn.MaxPool1d"),
    _row("max_pool2d", "passthrough", "torch.nn.MaxPool2d", _F + "max_pool2d"),
    _row("max_pool3d", "passthrough", "torch.nn.MaxPool3d"),
    _row("max_pool2d_with_indices", "passthrough", "torch.nn.MaxPool2d", _F + "max_pool2d"),
    _row("adaptive_max_pool1d", "passthrough", "torch.nn.AdaptiveMaxPool1d"),
    _row("adaptive_max_pool2d", "passthrough", "torch.nn.AdaptiveMaxPool2d"),
    _row("adaptive_max_pool3d", "passthrough", "torch.nn.AdaptiveMaxPool3d"),
    _row("flatten", "passthrough", "torch.nn.Flatten", "torch.flatten"),
    _row("unflatten", "passthrough", "torch.nn.Unflatten", "torch.unflatten"),
    _row("reshape", "passthrough", "torch.reshape", aten=("reshape", "view", "_unsafe_view")),
    _row("permute", "passthrough", "torch.permute"),
    _row("transpose", "passthrough", "torch.transpose", aten=("transpose", "t")),
    _row("squeeze", "passthrough", "torch.squeeze"),
    _row("unsqueeze", "passthrough", "torch.unsqueeze"),
    _row("contiguous", "passthrough"),
    _row("to", "passthrough", aten=("to", "_to_copy", "type_as")),
    _row("im2col", "passthrough", "torch.nn.Unfold", _F + "unfold"),
    _row("unfold", "passthrough", "torch.Tensor.unfold"),
    _row("max_unpool2d", "passthrough", "torch.nn.MaxUnpool2d"),
    _row("clone", "passthrough", "torch.clone"),
    _row("slice", "passthrough"),
    _row("select", "passthrough", "torch.select"),
    _row("index", "passthrough"),
    _row("expand", "passthrough", aten=("expand", "expand_as")),
    _row("repeat", "passthrough"),
    _row("repeat_interleave", "passthrough", "torch.repeat_interleave"),
    _row("chunk", "passthrough", "torch.chunk"),
    _row("split", "passthrough", "torch.split", aten=("split", "split_with_sizes")),
    _row("unbind", "passthrough", "torch.unbind"),
    _row("roll", "passthrough", "torch.roll"),
    _row("pixel_shuffle", "passthrough", "torch.nn.PixelShuffle"),
    _row("pixel_unshuffle", "passthrough", "torch.nn.PixelUnshuffle"),
    _row("channel_shuffle", "passthrough", "torch.nn.ChannelShuffle"),
    _row("pad", "passthrough", _F + "pad", "torch.nn.ZeroPad2d"),
    _row(
        "dropout",
        "passthrough",
        "torch.nn.Dropout",
        _F + "dropout",
        aten=("dropout", "feature_dropout", "alpha_dropout"),
    ),
    _row("getitem", "passthrough"),
    *_rows("compute", "neg", "abs", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul"),
    *_rows("compute", "scatter", "scatter_add", "index_add", "index_put"),
    *_rows("passthrough", "amax", "amin", "max", "min", "sort", "topk", "median", "triu", "tril", "flip", "gather"),
    *_rows("passthrough", "index_select", "narrow", "movedim", "swapaxes"),
    _row("input_scale", "float", aten=()),  # inserted by algorithms, as `nn.rescale` says
    _row("rotation", "float", aten=()),
    *_rows("float", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log2", "log1p"),
    *_rows("float", "sin", "cos", "cumsum", "prod", "var", "std", "var_mean", "norm", "linalg_vector_norm"),
    _row("quant_stub", "compute", "torch.ao.quantization.QuantStub", aten=()),
    _row("dequant_stub", "structural", "torch.ao.quantization.DeQuantStub", aten=()),
    _row("input", "structural"),
    _row("module", "structural", aten=()),  # a module without quantizable weights, where nothing is traced
    _row("module_input", "structural", aten=()),  # what a module is called with, where nothing is traced
    _row("parameter", "structural", weight=True),
    _row("constant", "structural"),
    _row("size", "structural", aten=("sym_size", "size")),
    *_rows("structural", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    *_rows("structural", "full", "full_like", "new_full", "scalar_tensor", "arange", "linspace", "eye"),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}
_BY_ATEN: dict[str, Op] = {aten: row for row in _ROWS for aten in row.aten}


def find_op(packet: str) -> Op:
    """The row of an aten packet name (`conv2d`; `relu_` is `relu`); an "unknown" row for what has none."""
    row = _BY_ATEN.get(packet) or _BY_ATEN.get(packet.removesuffix("_"))
    return row or Op(packet.removesuffix("_") or packet, "unknown", fresh=False)
