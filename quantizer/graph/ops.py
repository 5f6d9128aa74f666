"""The one table of operators: what each is called, how it behaves towards quantization, and
what channels do in it.

An operator without a row is legal: it runs as torch runs it, stays float, and `inspect` lists
it.
"""

from typing import Any

from quantizer.graph.axis_rules import (
    ALIKE,
    ATTENTION,
    EINSUM,
    INDEXED,
    JOINED,
    MATRIX_PRODUCT,
    MOVED,
    PADDED,
    PICKED,
    PLAIN_MATRIX_PRODUCT,
    PRODUCT,
    QUOTIENT,
    REDUCED,
    RESHAPED,
    SAME,
    WRITTEN,
    AxisRule,
    Commutes,
    over_last,
)
from quantizer.graph.op_row import Kind, Op

OPS: dict[str, Op] = {}
"""The rows by name."""
PACKETS: dict[str, Op] = {}
"""The rows by what torch traces."""


def register(row: Op) -> Op:
    """Add a row: from then on every pass, algorithm and plan reads it.

    Raises:
        ValueError: there is a row of this name, or for one of its packets.
    """
    if row.name in OPS or any(packet in PACKETS for packet in row.aten):
        raise ValueError(f"the table of operators has a row for {row.name}")
    OPS[row.name] = row
    PACKETS.update(dict.fromkeys(row.aten, row))
    return row


def find_op(packet: str) -> Op:
    """The row of a packet as `arguments.packet` names it (`conv2d`; `relu_` is `relu`), an
    "unknown" row for others.
    """
    row = PACKETS.get(packet) or PACKETS.get(packet.removesuffix("_"))
    return row or unknown(packet.removesuffix("_") or packet)


def unknown(name: str) -> Op:
    """The row of an operator that has none."""
    return Op(name, "unknown", aten=(name,))


def _row(
    name: str, kind: Kind, *types: str, aten: tuple[str, ...] | None = None, **columns: Any
) -> Op:
    """A row; what computes makes fresh memory, but an einsum that only permutes returns a
    view.
    """
    fresh = (
        kind not in ("passthrough", "structural", "float", "unknown") and name not in _SEVERAL
    )
    derived = {"fresh": fresh, "any_layout": columns.get("axes") in _ELEMENTWISE}
    return Op(name, kind, types, (name,) if aten is None else aten, **derived | columns)


def _rows(kind: Kind, *names: str, **columns: Any) -> tuple[Op, ...]:
    """Rows of functions that have no module and one name."""
    return tuple(_row(name, kind, f"torch.{name}", **columns) for name in names)


def _layer(name: str, spatial: int, *types: str, transposed: bool = False) -> Op:
    """A linear or convolution layer."""
    return _row(
        name,
        "mac",
        *types,
        weight=True,
        channels=-1 - spatial,
        spatial=spatial,
        transposed=transposed,
    )


def _norm(name: str, channels: int, *types: str, **columns: Any) -> Op:
    """A normalization whose weight and bias stay float."""
    return _row(name, "compute", *types, owns=True, channels=channels, **columns)


def _activation(name: str, kind: Kind, *types: str, **columns: Any) -> Op:
    """A function of each element."""
    return _row(name, kind, *types, axes=SAME, **columns)


def _pool(name: str, dims: int, kind: Kind, commutes: Commutes, *types: str) -> Op:
    """Windows over the last axes."""
    return _row(
        name,
        kind,
        *types,
        axes=over_last(dims),
        commutes=commutes,
        fresh=True,
        any_layout=dims == 2,
    )


def _move(name: str, *types: str, axes: AxisRule = MOVED, **columns: Any) -> Op:
    """Moves values and computes nothing."""
    return _row(name, "passthrough", *types, axes=axes, commutes=ALL, **columns)


def _join(name: str, *joins: str, **columns: Any) -> Op:
    """Puts the values of these arguments into one tensor."""
    return _row(name, "join", f"torch.{name}", joins=joins, **columns)


ALL, AFFINE, LINEAR, SCALING = Commutes.ALL, Commutes.AFFINE, Commutes.LINEAR, Commutes.SCALING
_F = "torch.nn.functional."
_ELEMENTWISE = (SAME, ALIKE, PRODUCT, QUOTIENT)
# They may return a view, or several tensors.
_SEVERAL = (
    "einsum",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "quant_stub",
    "meshgrid",
    "broadcast_tensors",
)
_RESIZED = ("torch.nn.Upsample", _F + "interpolate")
_SMOOTH = (
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
_CATS = ("cat", "concat", "concatenate")
_STACKS = ("stack", "hstack", "vstack", "dstack", "column_stack")
_WRITES = ("slice_scatter", "select_scatter", "diagonal_scatter")
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout")
_ROWS = (
    _layer("conv1d", 1, "torch.nn.Conv1d", _F + "conv1d"),
    _layer("conv2d", 2, "torch.nn.Conv2d", _F + "conv2d"),
    _layer("conv3d", 3, "torch.nn.Conv3d", _F + "conv3d"),
    _layer("conv_transpose1d", 1, "torch.nn.ConvTranspose1d", transposed=True),
    _layer("conv_transpose2d", 2, "torch.nn.ConvTranspose2d", transposed=True),
    _layer("conv_transpose3d", 3, "torch.nn.ConvTranspose3d", transposed=True),
    _layer("linear", 0, "torch.nn.Linear", _F + "linear"),
    _row("expert_linear", "mac", aten=(), weight=True, channels=-1, spatial=0, experts=True),
    _row("lstm", "mac", "torch.nn.LSTM", weight=True),
    _row("gru", "mac", "torch.nn.GRU", weight=True),
    _row("rnn_tanh", "mac", "torch.nn.RNN", weight=True),
    _row("rnn_relu", "mac", "torch.nn.RNN", weight=True),
    _row("lstm_cell", "mac", "torch.nn.LSTMCell"),
    _row("gru_cell", "mac", "torch.nn.GRUCell"),
    _row("rnn_tanh_cell", "mac", "torch.nn.RNNCell"),
    _row("rnn_relu_cell", "mac", "torch.nn.RNNCell"),
    _row(
        "embedding", "compute", "torch.nn.Embedding", _F + "embedding", weight=True, channels=-1
    ),
    _row("embedding_bag", "compute", "torch.nn.EmbeddingBag", _F + "embedding_bag"),
    _norm(
        "batch_norm",
        1,
        "torch.nn.BatchNorm1d",
        "torch.nn.BatchNorm2d",
        "torch.nn.BatchNorm3d",
        any_layout=True,
    ),
    # A batch norm that could not fold
    _row("channel_scale", "mac", aten=(), weight=True, channels=1),
    _norm("layer_norm", -1, "torch.nn.LayerNorm", _F + "layer_norm", normalizes=True),
    _norm("group_norm", 1, "torch.nn.GroupNorm", _F + "group_norm", any_layout=True),
    _norm("instance_norm", 1, "torch.nn.InstanceNorm1d", "torch.nn.InstanceNorm2d"),
    _norm("rms_norm", -1, "torch.nn.RMSNorm", _F + "rms_norm", normalizes=True),
    _row("matmul", "mac", "torch.matmul", "torch.mm", axes=MATRIX_PRODUCT, commutes=SCALING),
    _row("mm", "mac", "torch.mm", axes=PLAIN_MATRIX_PRODUCT, commutes=LINEAR),
    _row("bmm", "mac", "torch.bmm", axes=PLAIN_MATRIX_PRODUCT, commutes=SCALING),
    _row("addmm", "mac", "torch.addmm"),
    _row("baddbmm", "mac", "torch.baddbmm"),
    _row("bilinear", "mac", "torch.nn.Bilinear", _F + "bilinear"),
    _row("einsum", "mac", "torch.einsum", axes=EINSUM, commutes=SCALING),
    _row(
        "scaled_dot_product_attention",
        "mac",
        _F + "scaled_dot_product_attention",
        axes=ATTENTION,
        commutes=AFFINE,
    ),
    *_rows("compute", "add", "sub", axes=ALIKE, commutes=LINEAR),
    *_rows("compute", "maximum", "minimum", axes=ALIKE, commutes=AFFINE),
    _row("rsub", "compute", "torch.rsub"),
    _row("mul", "compute", "torch.mul", axes=PRODUCT, commutes=SCALING),
    _row("div", "compute", "torch.div", axes=QUOTIENT, commutes=SCALING, nonzero="other"),
    _row("mean", "compute", "torch.mean", axes=REDUCED, commutes=ALL, any_layout=True),
    _row("sum", "compute", "torch.sum", axes=REDUCED, commutes=LINEAR, any_layout=True),
    _row("grid_sampler", "compute", _F + "grid_sample", exact=("grid",)),
    _row("col2im", "compute", "torch.nn.Fold", _F + "fold"),
    _pool("avg_pool1d", 1, "compute", ALL, "torch.nn.AvgPool1d"),
    _pool("avg_pool2d", 2, "compute", ALL, "torch.nn.AvgPool2d", _F + "avg_pool2d"),
    _pool("avg_pool3d", 3, "compute", ALL, "torch.nn.AvgPool3d"),
    _pool("adaptive_avg_pool1d", 1, "compute", ALL, "torch.nn.AdaptiveAvgPool1d"),
    _pool(
        "adaptive_avg_pool2d",
        2,
        "compute",
        ALL,
        "torch.nn.AdaptiveAvgPool2d",
        _F + "adaptive_avg_pool2d",
    ),
    _pool("adaptive_avg_pool3d", 3, "compute", ALL, "torch.nn.AdaptiveAvgPool3d"),
    _row(
        "interpolate",
        "compute",
        *_RESIZED,
        aten=_SMOOTH,
        axes=over_last(),
        commutes=ALL,
        any_layout=True,
    ),
    _move("upsample_nearest", *_RESIZED, aten=_NEAREST, axes=over_last(), any_layout=True),
    _activation(
        "relu",
        "fusable",
        "torch.nn.ReLU",
        _F + "relu",
        "torch.relu",
        commutes=SCALING,
        rectifies=True,
    ),
    _activation("relu6", "fusable", "torch.nn.ReLU6", _F + "relu6", cuts=True),
    _activation(
        "leaky_relu", "fusable", "torch.nn.LeakyReLU", _F + "leaky_relu", commutes=SCALING
    ),
    _activation("hardtanh", "fusable", "torch.nn.Hardtanh", _F + "hardtanh", cuts=True),
    _activation("clamp", "fusable", "torch.clamp", cuts=True),
    _activation("clamp_min", "fusable", "torch.clamp", cuts=True),
    _activation("threshold", "fusable", "torch.nn.Threshold", _F + "threshold"),
    _activation(
        "prelu", "nonlinear", "torch.nn.PReLU", _F + "prelu", owns=True, commutes=SCALING
    ),
    _activation("elu", "nonlinear", "torch.nn.ELU", _F + "elu"),
    _activation("celu", "nonlinear", "torch.nn.CELU", _F + "celu"),
    _activation("selu", "nonlinear", "torch.nn.SELU", _F + "selu"),
    _row("glu", "nonlinear", "torch.nn.GLU", _F + "glu", any_layout=True),
    _activation("log_sigmoid", "nonlinear", "torch.nn.LogSigmoid", _F + "logsigmoid"),
    _activation("erf", "nonlinear", "torch.erf"),
    _activation("gelu", "nonlinear", "torch.nn.GELU", _F + "gelu"),
    _activation("silu", "nonlinear", "torch.nn.SiLU", _F + "silu"),
    _activation("mish", "nonlinear", "torch.nn.Mish", _F + "mish"),
    _activation("sigmoid", "nonlinear", "torch.nn.Sigmoid", "torch.sigmoid", _F + "sigmoid"),
    _activation("tanh", "nonlinear", "torch.nn.Tanh", "torch.tanh", _F + "tanh"),
    _activation("softplus", "nonlinear", "torch.nn.Softplus", _F + "softplus"),
    _activation("hardswish", "nonlinear", "torch.nn.Hardswish", _F + "hardswish"),
    _activation("hardsigmoid", "nonlinear", "torch.nn.Hardsigmoid", _F + "hardsigmoid"),
    _row("softmax", "nonlinear", "torch.nn.Softmax", "torch.softmax", _F + "softmax"),
    _row(
        "log_softmax",
        "nonlinear",
        "torch.nn.LogSoftmax",
        "torch.log_softmax",
        _F + "log_softmax",
    ),
    _join("cat", "tensors", axes=JOINED, commutes=ALL, any_layout=True, aten=_CATS),
    *(_join(name, "tensors", axes=JOINED, commutes=ALL) for name in _STACKS),
    *(_join(name, "input", "src", axes=WRITTEN, commutes=AFFINE) for name in _WRITES),
    _join("where", "input", "other"),
    _join("masked_fill", "input", "value"),
    _join("masked_scatter", "input", "source"),
    _join("scatter", "input", "src", "value"),
    _join("index_put", "input", "values"),
    _join("index_copy", "input", "source"),
    _join("index_fill", "input", "value"),
    # Of several tensors: each is quantized as it comes out
    *_rows("compute", "meshgrid", "broadcast_tensors"),
    _pool("max_pool1d", 1, "passthrough", AFFINE, "torch.nn.MaxPool1d"),
    _pool("max_pool2d", 2, "passthrough", AFFINE, "torch.nn.MaxPool2d", _F + "max_pool2d"),
    _pool("max_pool3d", 3, "passthrough", AFFINE, "torch.nn.MaxPool3d"),
    _pool(
        "max_pool2d_with_indices",
        2,
        "passthrough",
        AFFINE,
        "torch.nn.MaxPool2d",
        _F + "max_pool2d",
    ),
    _pool("adaptive_max_pool1d", 1, "passthrough", AFFINE, "torch.nn.AdaptiveMaxPool1d"),
    _pool("adaptive_max_pool2d", 2, "passthrough", AFFINE, "torch.nn.AdaptiveMaxPool2d"),
    _pool("adaptive_max_pool3d", 3, "passthrough", AFFINE, "torch.nn.AdaptiveMaxPool3d"),
    _move("flatten", "torch.nn.Flatten", "torch.flatten", axes=RESHAPED),
    _move("unflatten", "torch.nn.Unflatten", "torch.unflatten", axes=RESHAPED),
    _move("reshape", "torch.reshape", axes=RESHAPED, aten=("reshape", "view", "_unsafe_view")),
    _move("view_as", "torch.Tensor.view_as", axes=RESHAPED, shape_of="other"),
    _move("reshape_as", "torch.Tensor.reshape_as", axes=RESHAPED, shape_of="other"),
    _move("transpose", "torch.transpose", aten=("transpose", "t")),
    _move("mT", "torch.Tensor.mT"),
    _move("mH", "torch.Tensor.mH"),
    _move("numpy_T", "torch.Tensor.T"),
    _move("squeeze", "torch.squeeze", axes=RESHAPED),
    _move("unsqueeze", "torch.unsqueeze", axes=RESHAPED),
    _move("contiguous", axes=SAME),
    _move("to", aten=("to", "_to_copy", "type_as"), axes=SAME),
    _row("im2col", "passthrough", "torch.nn.Unfold", _F + "unfold"),
    _row("unfold", "passthrough", "torch.Tensor.unfold"),
    _row("max_unpool2d", "passthrough", "torch.nn.MaxUnpool2d"),
    _move("clone", "torch.clone", axes=SAME),
    _move("slice", any_layout=True),
    _move("index", axes=INDEXED),
    _move("expand", aten=("expand", "expand_as"), shape_of="other"),
    _move("repeat"),
    _move("split", "torch.split", aten=("split", "split_with_sizes"), any_layout=True),
    _move("pixel_shuffle", "torch.nn.PixelShuffle", any_layout=True),
    _move("pixel_unshuffle", "torch.nn.PixelUnshuffle", any_layout=True),
    _move("channel_shuffle", "torch.nn.ChannelShuffle", any_layout=True),
    _row(
        "pad",
        "passthrough",
        _F + "pad",
        "torch.nn.ZeroPad2d",
        axes=PADDED,
        commutes=LINEAR,
        any_layout=True,
    ),
    _move("dropout", "torch.nn.Dropout", _F + "dropout", aten=_DROPOUTS, axes=SAME),
    _move("getitem", any_layout=True),
    _move("ravel", "torch.ravel", axes=RESHAPED),
    *(_move(f"atleast_{dims}d", f"torch.atleast_{dims}d", axes=RESHAPED) for dims in (1, 2, 3)),
    _row("neg", "compute", "torch.neg", axes=SAME, commutes=LINEAR),
    _row("abs", "compute", "torch.abs", axes=SAME, commutes=SCALING),
    *_rows("compute", "lerp", "addcmul", "scatter_add", "index_add"),
    *_rows("passthrough", "amax", "amin", axes=REDUCED, commutes=AFFINE, any_layout=True),
    *_rows("passthrough", "max", "min", any_layout=True),
    *_rows("passthrough", "sort", "topk", orders=True),
    *_rows("passthrough", "median", "triu", "tril"),
    *_rows("passthrough", "take", "diag_embed", "as_strided"),
    *_rows("passthrough", "gather", "take_along_dim", axes=PICKED, commutes=AFFINE),
    *_rows("passthrough", "index_select", axes=PICKED, commutes=ALL),
    *_rows(
        "passthrough", "permute", "narrow", "chunk", axes=MOVED, commutes=ALL, any_layout=True
    ),
    *_rows(
        "passthrough",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "adjoint",
        axes=MOVED,
        commutes=ALL,
    ),
    *_rows(
        "passthrough",
        "flip",
        "fliplr",
        "flipud",
        "rot90",
        "roll",
        axes=MOVED,
        commutes=ALL,
        any_layout=True,
    ),
    *_rows("passthrough", "diagonal", axes=MOVED, commutes=AFFINE),
    *_rows(
        "passthrough",
        "select",
        "unbind",
        "hsplit",
        "vsplit",
        "dsplit",
        "tensor_split",
        axes=MOVED,
        commutes=ALL,
    ),
    *_rows(
        "passthrough", "repeat_interleave", "tile", "broadcast_to", axes=MOVED, commutes=ALL
    ),
    # Inserted by algorithms, see `nn.rescale`
    _row("input_scale", "float", aten=(), axes=SAME, commutes=SCALING),
    _row("rotation", "float", aten=()),
    *_rows("float", "rsqrt", "reciprocal", "log", "log2", nonzero="input", any_layout=True),
    *_rows("float", "pow", "square", "sqrt", "exp", "expm1", "log1p", any_layout=True),
    *_rows("float", "sin", "cos", "tan", exact=("input",), any_layout=True),
    *_rows(
        "float",
        "floor",
        "ceil",
        "round",
        "trunc",
        "fix",
        "frac",
        exact=("input",),
        any_layout=True,
    ),
    *_rows(
        "float", "remainder", "fmod", "floor_divide", exact=("input", "other"), any_layout=True
    ),
    *_rows(
        "float", "bucketize", "searchsorted", exact=("input", "boundaries", "sorted_sequence")
    ),
    _row(
        "sinc",
        "float",
        "torch.sinc",
        aten=("sinc", "special_sinc"),
        exact=("input",),
        any_layout=True,
    ),
    _row("polar", "float", "torch.polar", exact=("angle",)),
    *_rows("float", "var", "std", "var_mean", "norm", "linalg_vector_norm", any_layout=True),
    *_rows("float", "cumsum", "histc", "prod"),
    *_rows("float", "argsort", orders=True),
    _row("nms", "float", "torchvision.ops.nms", aten=("torchvision_nms",), orders=True),
    _row(
        "quant_stub",
        "compute",
        "torch.ao.quantization.QuantStub",
        aten=(),
        axes=SAME,
        commutes=ALL,
    ),
    _row(
        "dequant_stub",
        "structural",
        "torch.ao.quantization.DeQuantStub",
        aten=(),
        axes=SAME,
        commutes=ALL,
    ),
    _row("input", "structural"),
    # A module without quantizable weights, where nothing is traced
    _row("module", "structural", aten=()),
    # What a module is called with, where nothing is traced
    _row("module_input", "structural", aten=()),
    _row("parameter", "structural", weight=True),
    _row("constant", "structural"),
    _row("size", "structural", aten=("sym_size", "size"), any_layout=True),
    *_rows("structural", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    *_rows(
        "structural",
        "full",
        "full_like",
        "new_full",
        "scalar_tensor",
        "arange",
        "linspace",
        "logspace",
        "eye",
    ),
    *_rows("structural", "empty", "empty_like", "new_empty", unwritten=True),
    *_rows("structural", "empty_strided", "new_empty_strided", unwritten=True),
    *_rows("structural", "tril_indices", "triu_indices"),
)
for _each in _ROWS:
    register(_each)
