"""Edits a .tflite file: operators, tensors, inputs, outputs, batch, and what it says of itself.
Gives its operators the form for which LiteRT has fast kernels.

It needs `ai_edge_litert`, which is imported where it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_METADATA = "quantizer"


@dataclass
class TfliteFile:
    """A file as tables that can be changed.

    Attributes:
        model: the table of the file.
        schema: the classes of all tables.
        operators: the names of operators by their numbers.
    """

    model: Any
    schema: Any
    operators: dict[int, str]

    @classmethod
    def of(cls, content: bytes) -> "TfliteFile":
        """Return the tables of a file."""
        from ai_edge_litert import schema_py_generated
        from ai_edge_litert.tools import flatbuffer_utils

        model = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
        numbers = vars(schema_py_generated.BuiltinOperator)
        operators = {code: name for name, code in numbers.items() if isinstance(code, int)}
        return cls(model, schema_py_generated, operators)

    def content(self) -> bytes:
        """Return the bytes of the file."""
        from ai_edge_litert.tools import flatbuffer_utils

        return bytes(flatbuffer_utils.convert_object_to_bytearray(self.model))

    @property
    def graph(self) -> Any:
        """Return the table of the network."""
        return self.model.subgraphs[0]

    def name(self, row: Any) -> str:
        """Return the name of an operator."""
        return self._name_of_code(self.model.operatorCodes[row.opcodeIndex])

    def _name_of_code(self, code: Any) -> str:
        return self.operators[max(code.builtinCode, code.deprecatedBuiltinCode)]

    def is_int8(self, place: int) -> bool:
        """Return whether a tensor is int8."""
        return bool(self.graph.tensors[place].type == self.schema.TensorType.INT8)

    def is_float(self, place: int) -> bool:
        """Return whether a tensor is float32."""
        return bool(self.graph.tensors[place].type == self.schema.TensorType.FLOAT32)

    def data(self, place: int) -> bytes:
        """Return the values of a tensor that has them in the file; none for other tensors."""
        buffer = self.model.buffers[self.graph.tensors[place].buffer]
        return b"" if buffer.data is None else bytes(buffer.data)

    def makers(self) -> dict[int, Any]:
        """Return the operator that makes each tensor."""
        return {place: row for row in self.graph.operators for place in row.outputs}

    def readers(self, place: int) -> list[Any]:
        """Return the operators that read a tensor."""
        return [row for row in self.graph.operators if place in row.inputs]

    def has_one_reader(self, place: int) -> bool:
        """Return whether one operator reads a tensor, and the network does not return it."""
        is_returned = place in self.graph.outputs
        return len(self.readers(place)) == 1 and not is_returned

    def tensor(self, kind: str, shape: Sequence[int]) -> int:
        """Add a tensor of a kind, a name of `schema.TensorType`, and return its place."""
        tensor = self.schema.TensorT()
        tensor.type = getattr(self.schema.TensorType, kind)
        tensor.shape = np.array(shape, np.int32)
        tensors = self.graph.tensors
        tensor.name = f"added_{len(tensors)}"
        tensors.append(tensor)
        return len(tensors) - 1

    def constant(self, kind: str, values: NDArray[Any]) -> int:
        """Add a tensor with values, and return its place."""
        place = self.tensor(kind, values.shape)
        self.graph.tensors[place].buffer = self.buffer(values.tobytes())
        return place

    def buffer(self, data: bytes) -> int:
        """Add bytes to the file, and return their place."""
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(data, np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def float_of(self, place: int) -> int:
        """Add a float tensor of the same shape, and return its place."""
        tensor = self.graph.tensors[place]
        added = self.tensor("FLOAT32", tensor.shape)
        self.graph.tensors[added].shapeSignature = tensor.shapeSignature
        return added

    def operator(self, name: str, inputs: Sequence[int], result: int) -> Any:
        """Return an operator with one output, and no options."""
        codes = self.model.operatorCodes
        places = {self._name_of_code(code): index for index, code in enumerate(codes)}
        if name not in places:
            places[name] = len(codes)
            code = self.schema.OperatorCodeT()
            code.builtinCode = getattr(self.schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = code.builtinCode
            code.version = 1
            codes.append(code)
        row = self.schema.OperatorT()
        row.opcodeIndex = places[name]
        row.inputs = [*inputs]
        row.outputs = [result]
        return row

    def add_options(self, row: Any, kind: str) -> Any:
        """Give an operator options of a kind, and return them."""
        row.builtinOptionsType = getattr(self.schema.BuiltinOptions, kind)
        row.builtinOptions = getattr(self.schema, f"{kind}T")()
        return row.builtinOptions

    def open_batch(self) -> None:
        """Let the batch, which is one, follow the inputs. Reshapes would fix it.

        Values are stored sample by sample, so the first size of what a reshape makes may become
        -1, unless the batch has been moved from the first axis.
        """
        tensors = self.graph.tensors
        for row in self.graph.operators:
            if self.name(row) != "RESHAPE" or len(row.inputs) < 2:
                continue
            sizes = list(tensors[row.outputs[0]].shape)
            if not sizes or self.data(row.inputs[0]):
                continue
            sizes[0] = -1
            # Other reshapes may read the same constant.
            row.inputs[1] = self.constant("INT32", np.array(sizes, np.int32))
            if row.builtinOptions is not None:
                row.builtinOptions.newShape = sizes
        for place in [*self.graph.inputs, *self.graph.outputs]:
            sizes = list(tensors[place].shape)
            if sizes[:1] == [1]:
                tensors[place].shapeSignature = [-1, *sizes[1:]]

    def give_float_ends(self) -> None:
        """Give int8 inputs a QUANTIZE and int8 outputs a DEQUANTIZE, so that they are float."""
        graph = self.graph
        for index, place in enumerate(graph.inputs):
            if self.is_int8(place):
                graph.inputs[index] = self.float_of(place)
                row = self.operator("QUANTIZE", [graph.inputs[index]], place)
                graph.operators.insert(0, row)
        for index, place in enumerate(graph.outputs):
            if self.is_int8(place):
                graph.outputs[index] = self.float_of(place)
                row = self.operator("DEQUANTIZE", [place], graph.outputs[index])
                graph.operators.append(row)

    def describe(self, inputs: Sequence[str], outputs: Sequence[str], origin: str) -> None:
        """Name inputs and outputs, and add how the file was made."""
        (signature,) = self.model.signatureDefs
        signature.inputs = self._named(inputs, self.graph.inputs)
        signature.outputs = self._named(outputs, self.graph.outputs)
        entry = self.schema.MetadataT()
        entry.name = _METADATA
        entry.buffer = self.buffer(origin.encode())
        self.model.metadata = [*(self.model.metadata or []), entry]

    def _named(self, names: Sequence[str], places: Sequence[int]) -> list[Any]:
        """Return the tensors of a signature."""
        rows: list[Any] = []
        for name, place in zip(names, places, strict=True):
            row = self.schema.TensorMapT()
            row.name = name
            row.tensorIndex = place
            self.graph.tensors[place].name = name
            rows.append(row)
        return rows


_VALUE_OF_PRODUCTS = {
    "CONV_2D": 0,
    "DEPTHWISE_CONV_2D": 0,
    "CONV_3D": 0,
    "FULLY_CONNECTED": 0,
    "TRANSPOSE_CONV": 2,
}
"""The argument with the input, by the operators with int8 kernels. The second is the weight."""
_SLOW_IN_INT8 = (
    "ABS",
    "EXP",
    "GELU",
    "HARD_SWISH",
    "LOG",
    "RELU",
    "RELU6",
    "RELU_N1_TO_1",
    "RSQRT",
    "SQRT",
    "SQUARED_DIFFERENCE",
)
"""XNNPACK of LiteRT 2.3.0 computes these in float only. LiteRT's own int8 kernels take 0.3 to
8 ns for a value. By way of floats it is 0.1 to 0.2 ns.
"""
_HOMOGENEOUS = (
    "AVERAGE_POOL_2D",
    "CONCATENATION",
    "LEAKY_RELU",
    "MAXIMUM",
    "MEAN",
    "MINIMUM",
    "PACK",
    "RESIZE_BILINEAR",
)
"""Operators whose results are twice as large if all their values are."""
_MOVES = ("RESHAPE", "TRANSPOSE")
_WITH_FLOAT_OUTPUTS = ("CONV_2D", "FULLY_CONNECTED")
"""Operators with a kernel for int8 weights and inputs and outputs in float."""
_CODES = (-128, 127)


def integer_scales(file: TfliteFile) -> Iterator[tuple[float, ...]]:
    """Yield the scales of each weight that is multiplied in int8."""
    for row in file.graph.operators:
        if file.name(row) not in _VALUE_OF_PRODUCTS:
            continue
        value = row.inputs[_VALUE_OF_PRODUCTS[file.name(row)]]
        weight = row.inputs[1]
        is_static = file.is_int8(value) and file.is_int8(row.outputs[0])
        # It rounds its input in float to int8.
        is_dynamic = file.is_float(value) and file.name(row) in _WITH_FLOAT_OUTPUTS
        if file.is_int8(weight) and (is_static or is_dynamic):
            yield tuple(file.graph.tensors[weight].quantization.scale)


def drop_factors(file: TfliteFile) -> None:
    """Drop products with 2 and 0.5 before and after operators that they do not change. They
    have kept the converter from int8 kernels.
    """
    graph = file.graph
    makers = file.makers()
    for half in graph.operators:
        row = makers.get(half.inputs[0])
        if row is None or not _is_product(file, half, 0.5):
            continue
        (result,) = half.outputs
        if _is_product(file, row, 2.0) and result not in graph.outputs:
            for reader in file.readers(result):
                _replace(reader, result, row.inputs[0])
        elif _is_homogeneous(file, row) and file.has_one_reader(row.outputs[0]):
            _join(file, makers, row, half)
    _drop_unread(file)


def _join(file: TfliteFile, makers: dict[int, Any], row: Any, half: Any) -> None:
    """Let an operator read values before they are doubled, and make what was halved."""
    doubled: list[tuple[Any, int, int]] = []
    for place in row.inputs:
        # Axes and the like are no floats.
        if not file.is_float(place):
            continue
        reader = row
        maker = makers.get(place)
        while maker is not None and file.name(maker) in _MOVES:
            if not file.has_one_reader(place):
                return
            reader = maker
            place = maker.inputs[0]
            maker = makers.get(place)
        if maker is None or not _is_product(file, maker, 2.0):
            return
        doubled.append((reader, place, maker.inputs[0]))
    for reader, place, value in doubled:
        _replace(reader, place, value)
    row.outputs, half.outputs = half.outputs, row.outputs
    makers[row.outputs[0]] = row


def _replace(row: Any, place: int, other: int) -> None:
    """Let an operator read another tensor."""
    inputs = np.array(row.inputs)
    row.inputs = np.where(inputs == place, other, inputs).tolist()


def _is_product(file: TfliteFile, row: Any, factor: float) -> bool:
    """Return whether an operator multiplies floats by a number, and does nothing else."""
    if file.name(row) != "MUL" or row.builtinOptions.fusedActivationFunction:
        return False
    _, number = row.inputs
    return file.is_float(number) and file.data(number) == np.float32(factor).tobytes()


def _is_homogeneous(file: TfliteFile, row: Any) -> bool:
    """Return whether factors before an operator of floats may as well come after it."""
    functions = file.schema.ActivationFunctionType
    function = getattr(row.builtinOptions, "fusedActivationFunction", functions.NONE)
    has_no_bounds = function in (functions.NONE, functions.RELU)
    return file.name(row) in _HOMOGENEOUS and has_no_bounds and file.is_float(row.outputs[0])


def _drop_unread(file: TfliteFile) -> None:
    """Drop products and dequantizations that nothing reads."""
    graph = file.graph
    read = {*graph.outputs}
    rows: list[Any] = []
    for row in reversed(graph.operators):
        if file.name(row) in ("MUL", "DEQUANTIZE") and read.isdisjoint(row.outputs):
            continue
        read.update(row.inputs)
        rows.append(row)
    graph.operators = rows[::-1]


def compute_in_float(file: TfliteFile) -> None:
    """Compute in float what has no fast or no exact int8 kernel, and round to the same codes.

    XNNPACK gives values another scale with a factor of 8 bits, so that codes are a step off.
    """
    rows: list[Any] = []
    for row in file.graph.operators:
        codes = row.outputs[0]
        is_rounding = file.name(row) == "QUANTIZE" and file.is_int8(row.inputs[0])
        is_slow = _is_slow(file, row)
        if is_rounding or is_slow:
            floats = [*map(file.float_of, row.inputs)]
            for place, decoded in zip(row.inputs, floats, strict=True):
                rows.append(file.operator("DEQUANTIZE", [place], decoded))
            row.inputs = floats
        rows.append(row)
        if is_slow and not is_rounding:
            row.outputs = [file.float_of(codes)]
            rows.append(file.operator("QUANTIZE", row.outputs, codes))
    file.graph.operators = rows


def _is_slow(file: TfliteFile, row: Any) -> bool:
    """Return whether an operator has int8 values and no fast int8 kernel."""
    if not all(map(file.is_int8, [*row.inputs, *row.outputs])):
        return False
    if file.name(row) == "BATCH_MATMUL":
        # XNNPACK has a kernel for a second value with the zero point 0.
        second = file.graph.tensors[row.inputs[1]]
        return any(second.quantization.zeroPoint)
    return file.name(row) in _SLOW_IN_INT8


def code_weights(file: TfliteFile, scales: Sequence[Sequence[float]]) -> None:
    """Multiply codes in the layers that read codes and make floats.

    LiteRT's kernels for float inputs and int8 weights round each row or image with its own
    range. With two more channels, the ends of the codes, it is the range of the codes.

    Args:
        scales: of the weights that may be multiplied in int8, one for each output. Weights in
            float that have no such scales stay as they are.
    """
    graph = file.graph
    makers = file.makers()
    rows: list[Any] = []
    for row in graph.operators:
        maker = makers.get(row.inputs[0])
        has_kernel = file.name(row) in _WITH_FLOAT_OUTPUTS
        if maker is not None and has_kernel and file.name(maker) == "DEQUANTIZE":
            weights = _coded(file, makers, row.inputs[1], scales)
            if weights is not None:
                rows += _with_ends(file, row, maker.inputs[0])
                row.inputs[1] = weights
        rows.append(row)
    graph.operators = rows


def _coded(
    file: TfliteFile, makers: dict[int, Any], place: int, scales: Sequence[Sequence[float]]
) -> int | None:
    """Return the place of the codes of a weight in float; None if it has other scales."""
    tensors = file.graph.tensors
    shape = tensors[place].shape
    maker = makers.get(place)
    source = place if maker is None else maker.inputs[0]
    data = file.data(source)
    if not data:
        return None
    if file.is_int8(source):
        steps = np.array(tensors[source].quantization.scale, np.float32)
        return _weights(file, np.frombuffer(data, np.int8).reshape(shape), steps)
    weights = np.frombuffer(data, np.float32).reshape(shape)
    for of_outputs in scales:
        if len(of_outputs) != len(weights):
            continue
        steps = np.array(of_outputs, np.float32)
        by_output = steps.reshape(-1, *[1] * (weights.ndim - 1))
        codes = np.rint(weights / by_output).clip(*_CODES).astype(np.int8)
        if np.array_equal(codes * by_output, weights):
            return _weights(file, codes, steps)
    return None


def _weights(file: TfliteFile, codes: NDArray[np.int8], steps: NDArray[np.float32]) -> int:
    """Add codes with a scale for each output, and zeros for the two ends of the inputs."""
    sizes = [*[(0, 0)] * (codes.ndim - 1), (0, 2)]
    place = file.constant("INT8", np.pad(codes, sizes))
    quantization = file.schema.QuantizationParametersT()
    quantization.scale = steps
    quantization.zeroPoint = np.zeros(len(steps), np.int64)
    file.graph.tensors[place].quantization = quantization
    return place


def _with_ends(file: TfliteFile, row: Any, codes: int) -> list[Any]:
    """Give the input of a layer the ends of its codes; return the operators for that."""
    value = row.inputs[0]
    tensors = file.graph.tensors
    *sizes, channels = tensors[value].shape
    quantization = tensors[codes].quantization
    axes = file.constant("INT32", np.array([len(sizes)], np.int32))
    column = file.tensor("FLOAT32", [*sizes, 1])
    reduction = file.operator("REDUCE_MAX", [value, axes], column)
    file.add_options(reduction, "ReducerOptions").keepDims = True
    rows = [reduction]
    parts = [value]
    for name, code in zip(("MINIMUM", "MAXIMUM"), _CODES, strict=True):
        steps = np.float32(code - quantization.zeroPoint[0])
        end = file.constant("FLOAT32", steps * np.float32(quantization.scale))
        # No value lies beyond the ends.
        parts.append(file.tensor("FLOAT32", [*sizes, 1]))
        rows.append(file.operator(name, [column, end], parts[-1]))
    wide = file.tensor("FLOAT32", [*sizes, channels + 2])
    join = file.operator("CONCATENATION", parts, wide)
    file.add_options(join, "ConcatenationOptions").axis = len(sizes)
    row.inputs[0] = wide
    return [*rows, join]
