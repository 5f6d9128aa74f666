"""The table of operators: their names, how they behave towards quantization, and where channels
go in them.

An operator without a row is allowed. It runs as in torch and stays float, and `inspect` lists
it.
"""

import logging

from quantizer.graph.channels.axis_rules import (
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
    over_last,
)
from quantizer.graph.op_row import (
    AFFINE,
    ALL,
    LINEAR,
    SCALING,
    Op,
    activation_op,
    join_op,
    layer_op,
    make_op,
    move_op,
    norm_op,
    pool_op,
    pool_ops,
    torch_ops,
)
from quantizer.plugins import loaded, plugins

_logger = logging.getLogger(__name__)
OPS: dict[str, Op] = {}
"""The rows by name."""
PACKETS: dict[str, Op] = {}
"""The rows by what torch traces."""


def register_op(row: Op) -> Op:
    """Register a row, which every pass, algorithm and plan then reads.

    Raises:
        ValueError: there is a row of this name, or for one of its packets.
    """
    if _is_known(row):
        raise ValueError(f"the table of operators has a row for {row.name}")
    OPS[row.name] = row
    PACKETS.update(dict.fromkeys(row.aten, row))
    return row


def _is_known(row: Op) -> bool:
    """Return whether there is a row of this name, or for one of its packets."""
    return row.name in OPS or any(packet in PACKETS for packet in row.aten)


def find_op(packet: str) -> Op:
    """Return the row of a packet as `targets.packet` names it (`conv2d`; `relu_` is `relu`), an
    "unknown" row for others.
    """
    row = PACKETS.get(packet) or PACKETS.get(packet.removesuffix("_"))
    return row or unknown(packet.removesuffix("_") or packet)


def unknown(name: str) -> Op:
    """Return a row for an operator that is not in the table."""
    return Op(name, "unknown", aten=(name,))


_F = "torch.nn.functional."
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
    *(
        layer_op(f"conv{dims}d", dims, f"torch.nn.Conv{dims}d", f"{_F}conv{dims}d")
        for dims in (1, 2, 3)
    ),
    *(
        layer_op(
            f"conv_transpose{dims}d", dims, f"torch.nn.ConvTranspose{dims}d", transposed=True
        )
        for dims in (1, 2, 3)
    ),
    layer_op("linear", 0, "torch.nn.Linear", _F + "linear"),
    make_op("expert_linear", "mac", aten=(), weight=True, channels=-1, spatial=0, experts=True),
    make_op("lstm", "mac", "torch.nn.LSTM", weight=True),
    make_op("gru", "mac", "torch.nn.GRU", weight=True),
    make_op("rnn_tanh", "mac", "torch.nn.RNN", weight=True),
    make_op("rnn_relu", "mac", "torch.nn.RNN", weight=True),
    make_op("lstm_cell", "mac", "torch.nn.LSTMCell"),
    make_op("gru_cell", "mac", "torch.nn.GRUCell"),
    make_op("rnn_tanh_cell", "mac", "torch.nn.RNNCell"),
    make_op("rnn_relu_cell", "mac", "torch.nn.RNNCell"),
    make_op(
        "embedding", "compute", "torch.nn.Embedding", _F + "embedding", weight=True, channels=-1
    ),
    make_op("embedding_bag", "compute", "torch.nn.EmbeddingBag", _F + "embedding_bag"),
    norm_op(
        "batch_norm",
        1,
        "torch.nn.BatchNorm1d",
        "torch.nn.BatchNorm2d",
        "torch.nn.BatchNorm3d",
        any_layout=True,
    ),
    # A batch norm that could not fold
    make_op("channel_scale", "mac", aten=(), weight=True, channels=1),
    norm_op("layer_norm", -1, "torch.nn.LayerNorm", _F + "layer_norm", normalizes=True),
    norm_op("group_norm", 1, "torch.nn.GroupNorm", _F + "group_norm", any_layout=True),
    norm_op("instance_norm", 1, "torch.nn.InstanceNorm1d", "torch.nn.InstanceNorm2d"),
    norm_op("rms_norm", -1, "torch.nn.RMSNorm", _F + "rms_norm", normalizes=True),
    make_op("matmul", "mac", "torch.matmul", "torch.mm", axes=MATRIX_PRODUCT, commutes=SCALING),
    make_op("mm", "mac", "torch.mm", axes=PLAIN_MATRIX_PRODUCT, commutes=LINEAR),
    make_op("bmm", "mac", "torch.bmm", axes=PLAIN_MATRIX_PRODUCT, commutes=SCALING),
    make_op("addmm", "mac", "torch.addmm"),
    make_op("baddbmm", "mac", "torch.baddbmm"),
    make_op("bilinear", "mac", "torch.nn.Bilinear", _F + "bilinear"),
    make_op("einsum", "mac", "torch.einsum", axes=EINSUM, commutes=SCALING),
    make_op(
        "scaled_dot_product_attention",
        "mac",
        _F + "scaled_dot_product_attention",
        axes=ATTENTION,
        commutes=AFFINE,
    ),
    *torch_ops("compute", "add", "sub", axes=ALIKE, commutes=LINEAR),
    *torch_ops("compute", "maximum", "minimum", axes=ALIKE, commutes=AFFINE),
    make_op("rsub", "compute", "torch.rsub"),
    make_op("mul", "compute", "torch.mul", axes=PRODUCT, commutes=SCALING),
    make_op("div", "compute", "torch.div", axes=QUOTIENT, commutes=SCALING, nonzero="other"),
    make_op("mean", "compute", "torch.mean", axes=REDUCED, commutes=ALL, any_layout=True),
    make_op("sum", "compute", "torch.sum", axes=REDUCED, commutes=LINEAR, any_layout=True),
    make_op("grid_sampler", "compute", _F + "grid_sample", exact=("grid",)),
    make_op("col2im", "compute", "torch.nn.Fold", _F + "fold"),
    *pool_ops("avg_pool", "AvgPool", "compute", ALL),
    *pool_ops("adaptive_avg_pool", "AdaptiveAvgPool", "compute", ALL),
    make_op(
        "interpolate",
        "compute",
        *_RESIZED,
        aten=_SMOOTH,
        axes=over_last(),
        commutes=ALL,
        any_layout=True,
    ),
    move_op("upsample_nearest", *_RESIZED, aten=_NEAREST, axes=over_last(), any_layout=True),
    activation_op(
        "relu",
        "fusable",
        "torch.nn.ReLU",
        _F + "relu",
        "torch.relu",
        commutes=SCALING,
        rectifies=True,
    ),
    activation_op("relu6", "fusable", "torch.nn.ReLU6", _F + "relu6", cuts=True),
    activation_op(
        "leaky_relu", "fusable", "torch.nn.LeakyReLU", _F + "leaky_relu", commutes=SCALING
    ),
    # A pass makes it of the former, where it reads codes
    activation_op("apart_leaky_relu", "nonlinear", aten=(), commutes=SCALING),
    activation_op("hardtanh", "fusable", "torch.nn.Hardtanh", _F + "hardtanh", cuts=True),
    activation_op("clamp", "fusable", "torch.clamp", cuts=True),
    activation_op("clamp_min", "fusable", "torch.clamp", cuts=True),
    activation_op("threshold", "fusable", "torch.nn.Threshold", _F + "threshold"),
    activation_op(
        "prelu", "nonlinear", "torch.nn.PReLU", _F + "prelu", owns=True, commutes=SCALING
    ),
    activation_op("elu", "nonlinear", "torch.nn.ELU", _F + "elu"),
    activation_op("celu", "nonlinear", "torch.nn.CELU", _F + "celu"),
    activation_op("selu", "nonlinear", "torch.nn.SELU", _F + "selu"),
    make_op("glu", "nonlinear", "torch.nn.GLU", _F + "glu", any_layout=True),
    activation_op("log_sigmoid", "nonlinear", "torch.nn.LogSigmoid", _F + "logsigmoid"),
    activation_op("erf", "nonlinear", "torch.erf"),
    activation_op("gelu", "nonlinear", "torch.nn.GELU", _F + "gelu"),
    activation_op("silu", "nonlinear", "torch.nn.SiLU", _F + "silu"),
    activation_op("mish", "nonlinear", "torch.nn.Mish", _F + "mish"),
    activation_op(
        "sigmoid",
        "nonlinear",
        "torch.nn.Sigmoid",
        "torch.sigmoid",
        _F + "sigmoid",
        saturates=127 / 16,
    ),
    activation_op(
        "tanh", "nonlinear", "torch.nn.Tanh", "torch.tanh", _F + "tanh", saturates=127 / 32
    ),
    activation_op("softplus", "nonlinear", "torch.nn.Softplus", _F + "softplus"),
    activation_op("hardswish", "nonlinear", "torch.nn.Hardswish", _F + "hardswish"),
    activation_op(
        "hardsigmoid",
        "nonlinear",
        "torch.nn.Hardsigmoid",
        _F + "hardsigmoid",
        saturates=127 / 32,
    ),
    make_op("softmax", "nonlinear", "torch.nn.Softmax", "torch.softmax", _F + "softmax"),
    make_op(
        "log_softmax",
        "nonlinear",
        "torch.nn.LogSoftmax",
        "torch.log_softmax",
        _F + "log_softmax",
    ),
    join_op("cat", "tensors", axes=JOINED, commutes=ALL, any_layout=True, aten=_CATS),
    *(join_op(name, "tensors", axes=JOINED, commutes=ALL) for name in _STACKS),
    *(join_op(name, "input", "src", axes=WRITTEN, commutes=AFFINE) for name in _WRITES),
    join_op("where", "input", "other"),
    join_op("masked_fill", "input", "value"),
    join_op("masked_scatter", "input", "source"),
    join_op("scatter", "input", "src", "value"),
    join_op("index_put", "input", "values"),
    join_op("index_copy", "input", "source"),
    join_op("index_fill", "input", "value"),
    # Of several tensors: each is quantized as it comes out
    *torch_ops("compute", "meshgrid", "broadcast_tensors"),
    *pool_ops("max_pool", "MaxPool", "passthrough", AFFINE),
    pool_op(
        "max_pool2d_with_indices",
        2,
        "passthrough",
        AFFINE,
        "torch.nn.MaxPool2d",
        _F + "max_pool2d",
    ),
    *pool_ops("adaptive_max_pool", "AdaptiveMaxPool", "passthrough", AFFINE),
    move_op("flatten", "torch.nn.Flatten", "torch.flatten", axes=RESHAPED),
    move_op("unflatten", "torch.nn.Unflatten", "torch.unflatten", axes=RESHAPED),
    move_op(
        "reshape", "torch.reshape", axes=RESHAPED, aten=("reshape", "view", "_unsafe_view")
    ),
    move_op("view_as", "torch.Tensor.view_as", axes=RESHAPED, shape_of="other"),
    move_op("reshape_as", "torch.Tensor.reshape_as", axes=RESHAPED, shape_of="other"),
    move_op("transpose", "torch.transpose", aten=("transpose", "t")),
    move_op("mT", "torch.Tensor.mT"),
    move_op("mH", "torch.Tensor.mH"),
    move_op("numpy_T", "torch.Tensor.T"),
    move_op("squeeze", "torch.squeeze", axes=RESHAPED),
    move_op("unsqueeze", "torch.unsqueeze", axes=RESHAPED),
    move_op("contiguous", axes=SAME),
    move_op("to", aten=("to", "_to_copy", "type_as"), axes=SAME),
    make_op("im2col", "passthrough", "torch.nn.Unfold", _F + "unfold"),
    make_op("unfold", "passthrough", "torch.Tensor.unfold"),
    make_op("max_unpool2d", "passthrough", "torch.nn.MaxUnpool2d"),
    move_op("clone", "torch.clone", axes=SAME),
    move_op("slice", any_layout=True),
    move_op("index", axes=INDEXED),
    move_op("expand", aten=("expand", "expand_as"), shape_of="other"),
    move_op("repeat"),
    move_op("split", "torch.split", aten=("split", "split_with_sizes"), any_layout=True),
    move_op("pixel_shuffle", "torch.nn.PixelShuffle", any_layout=True),
    move_op("pixel_unshuffle", "torch.nn.PixelUnshuffle", any_layout=True),
    move_op("channel_shuffle", "torch.nn.ChannelShuffle", any_layout=True),
    make_op(
        "pad",
        "passthrough",
        _F + "pad",
        "torch.nn.ZeroPad2d",
        axes=PADDED,
        commutes=LINEAR,
        any_layout=True,
    ),
    move_op("dropout", "torch.nn.Dropout", _F + "dropout", aten=_DROPOUTS, axes=SAME),
    move_op("getitem", any_layout=True),
    move_op("ravel", "torch.ravel", axes=RESHAPED),
    *(
        move_op(f"atleast_{dims}d", f"torch.atleast_{dims}d", axes=RESHAPED)
        for dims in (1, 2, 3)
    ),
    make_op("neg", "compute", "torch.neg", axes=SAME, commutes=LINEAR),
    make_op("abs", "compute", "torch.abs", axes=SAME, commutes=SCALING),
    *torch_ops("compute", "lerp", "addcmul", "scatter_add", "index_add"),
    *torch_ops("passthrough", "amax", "amin", axes=REDUCED, commutes=AFFINE, any_layout=True),
    *torch_ops("passthrough", "max", "min", any_layout=True),
    *torch_ops("passthrough", "sort", "topk", orders=True),
    *torch_ops("passthrough", "median", "triu", "tril", "take", "diag_embed", "as_strided"),
    *torch_ops("passthrough", "gather", "take_along_dim", axes=PICKED, commutes=AFFINE),
    *torch_ops("passthrough", "index_select", axes=PICKED, commutes=ALL),
    *torch_ops(
        "passthrough",
        "permute",
        "narrow",
        "chunk",
        "flip",
        "fliplr",
        "flipud",
        "rot90",
        "roll",
        axes=MOVED,
        commutes=ALL,
        any_layout=True,
    ),
    *torch_ops("passthrough", "diagonal", axes=MOVED, commutes=AFFINE),
    *torch_ops(
        "passthrough",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "adjoint",
        "select",
        "unbind",
        "hsplit",
        "vsplit",
        "dsplit",
        "tensor_split",
        "repeat_interleave",
        "tile",
        "broadcast_to",
        axes=MOVED,
        commutes=ALL,
    ),
    # Inserted by algorithms, see `nn.rare_layers`
    make_op("input_scale", "float", aten=(), axes=SAME, commutes=SCALING),
    make_op("rotation", "float", aten=()),
    *torch_ops("float", "rsqrt", "reciprocal", "log", "log2", nonzero="input", any_layout=True),
    *torch_ops("float", "pow", "square", "sqrt", "exp", "expm1", "log1p", any_layout=True),
    *torch_ops(
        "float",
        "sin",
        "cos",
        "tan",
        "floor",
        "ceil",
        "round",
        "trunc",
        "fix",
        "frac",
        exact=("input",),
        any_layout=True,
    ),
    *torch_ops(
        "float", "remainder", "fmod", "floor_divide", exact=("input", "other"), any_layout=True
    ),
    *torch_ops(
        "float", "bucketize", "searchsorted", exact=("input", "boundaries", "sorted_sequence")
    ),
    make_op(
        "sinc",
        "float",
        "torch.sinc",
        aten=("sinc", "special_sinc"),
        exact=("input",),
        any_layout=True,
    ),
    make_op("polar", "float", "torch.polar", exact=("angle",)),
    *torch_ops(
        "float", "var", "std", "var_mean", "norm", "linalg_vector_norm", any_layout=True
    ),
    *torch_ops("float", "cumsum", "histc", "prod"),
    *torch_ops("float", "argsort", orders=True),
    make_op("nms", "float", "torchvision.ops.nms", aten=("torchvision_nms",), orders=True),
    make_op(
        "quant_stub",
        "compute",
        "torch.ao.quantization.QuantStub",
        aten=(),
        axes=SAME,
        commutes=ALL,
    ),
    make_op(
        "dequant_stub",
        "structural",
        "torch.ao.quantization.DeQuantStub",
        aten=(),
        axes=SAME,
        commutes=ALL,
    ),
    make_op("input", "structural"),
    # A module without quantizable weights, where nothing is traced
    make_op("module", "structural", aten=()),
    # What a module is called with, where nothing is traced
    make_op("module_input", "structural", aten=()),
    make_op("parameter", "structural", weight=True),
    make_op("constant", "structural"),
    make_op("size", "structural", aten=("sym_size", "size"), any_layout=True),
    *torch_ops(
        "structural",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
        "scalar_tensor",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "tril_indices",
        "triu_indices",
    ),
    *torch_ops(
        "structural",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        unwritten=True,
    ),
)
for _each in _ROWS:
    register_op(_each)
for _plugin in plugins():
    _added = loaded(_plugin.operators) if _plugin.operators else ()
    _twice = [_each.name for _each in _added if _is_known(_each)]
    if _twice:
        _logger.warning(
            "the operators of the plug-in %s are left out: there are rows for %s already",
            _plugin.name,
            ", ".join(_twice),
        )
        continue
    for _each in _added:
        register_op(_each)
