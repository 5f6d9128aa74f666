"""Cleans a model of what shows where it was made, and stores it as a file, with its tensors in
another one if a protobuf message cannot hold them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import ModelProto

import quantizer
from quantizer.errors import VerificationError, first_line
from quantizer.export.onnx.marks import MARK_DOMAIN
from quantizer.export.onnx.weights import PACKED_DOMAIN
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.lengths import Length
from quantizer.storage.files import cannot_write, write_bytes

# torch's name for an open size, alone or in a formula.
_SYMBOL = re.compile(r"\b[su]\d+\b")
_INVALID_HELP = "the pt2 target writes the same network for torch"
LARGEST_MESSAGE = 2**31 - 2**20
"""Bytes of tensors that fit one message."""


def clean_proto(model: ModelProto, graph: Graph, input_names: Sequence[str]) -> None:
    """Remove metadata and value shapes, and name producer, graph, domains and open sizes."""
    model.producer_name = "quantizer"
    model.producer_version = quantizer.__version__
    _set_domains(model)
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.graph.value_info[:]
    model.graph.name = graph.model
    model.graph.doc_string = ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    names = _size_names(model, graph, input_names)
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                size = dimension.dim_param
                dimension.dim_param = names.get(size) or _SYMBOL.sub(
                    lambda symbol: names[symbol[0]], size
                )


def _set_domains(model: ModelProto) -> None:
    domains = {
        entry.domain: entry.version
        for entry in model.opset_import
        if entry.domain not in (MARK_DOMAIN, PACKED_DOMAIN)
    }
    if any(node.domain == PACKED_DOMAIN for node in model.graph.node):
        domains[PACKED_DOMAIN] = 1
    del model.opset_import[:]
    for domain, version in domains.items():
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


def _names_of_size(size: str, length: Length | None) -> dict[str, str]:
    """Return the name of an input's open size, and of torch's symbol in it.

    Args:
        size: what torch calls it, such as "s5" or "4*s5".
        length: which sizes are accepted; None for the batch.
    """
    if length is None:
        return {size: "batch"}
    names = {size: length.name}
    if length.step > 1:
        [symbol] = _SYMBOL.findall(size)
        offset = length.least % length.step
        first = f"({length.name} - {offset})" if offset else length.name
        names[symbol] = f"({first}/{length.step})"
    return names


def _size_names(
    model: ModelProto, graph: Graph, input_names: Sequence[str]
) -> Mapping[str, str]:
    """Return what torch's symbols stand for: the batch, a length, or a size from values.

    The latter are called "size_1" and so on. A length that is accepted in steps is a formula:
    its symbol stands for the number of steps.
    """
    shapes = [node.shape for node in graph.nodes if node.op == "input"]
    tensors = [index for index, shape in enumerate(shapes) if shape is not None]
    lengths: dict[tuple[int, int], Length] = {}
    for length in graph.lengths:
        lengths |= dict.fromkeys(length.axes, length)
    names: dict[str, str] = {}
    for value in model.graph.input:
        index = tensors[input_names.index(value.name)]
        for axis_number, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_param"):
                size = dimension.dim_param
                open_length = lengths.get((index, axis_number))
                names |= _names_of_size(size, open_length)
    count = 0
    for value in model.graph.output:
        for dimension in value.type.tensor_type.shape.dim:
            for symbol in _SYMBOL.findall(dimension.dim_param):
                if symbol not in names:
                    count += 1
                    names[symbol] = f"size_{count}"
    return names


@contextmanager
def stored_model(model: ModelProto, path: Path) -> Iterator[bytes | str]:
    """Yield what a session loads, and write it to `path`, in a new folder.

    That is the serialized model, or its file. Tensors of 2 GB and more go to `<path>.data`.

    Raises:
        ResultError: the file cannot be written.
        VerificationError: it is not valid ONNX.
    """
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_MESSAGE:
        _check(model, path.name)
        content = model.SerializeToString(deterministic=True)
        yield content
        write_bytes(path, content)
        return
    try:
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=1024,
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    _check(str(path), path.name)
    yield str(path)


def _check(model: ModelProto | str, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        why = first_line(error)
        raise VerificationError(
            f"{name} is not written: it would be no valid ONNX: {why}", help=_INVALID_HELP
        ) from error
