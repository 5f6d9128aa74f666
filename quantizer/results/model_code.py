"""The digest of a model's code: of everything besides weights that decides what a trace of the
model gives. With another digest the graph in a result folder is not used.
"""

import hashlib
import logging
import re
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

import quantizer
from quantizer.calibration import fingerprint
from quantizer.graph.ir import Call, Graph
from quantizer.graph.tracing.parameters import without_values
from quantizer.sources.arguments import call_with_shapes
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state
from quantizer.sources.user_code import is_file_of_user
from quantizer.torch_state import seed_everything

_logger = logging.getLogger(__name__)

_SAMPLES = 2
"""The samples of the call in which a model shows what it calls, if its batch size is open."""
_SHORTER = 32
"""Open lengths are so many times shorter in that call than in the trace."""
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class ModelCode:
    """What a trace of a model depends on besides its weights.

    Attributes:
        digest: of the code. It does not depend on the place of files, the device or the data.
        output: how torch's pytree describes the output of the model.
    """

    digest: str
    output: Any


def model_code(module: nn.Module, graph: Graph, batch: Batch) -> ModelCode | None:
    """Return the code of a model, or None if it is not known, as for a class of a notebook.

    Three things are digested: the versions of the packages that define the classes of the
    modules, all files of Python that are loaded and not installed, and the functions of torch
    that the model calls for a small batch of zeros, with their arguments.

    Args:
        module: the user's model, whose state is restored afterwards.
        graph: says which sizes the small batch has.
        batch: says how the model is called.
    """
    with torch.no_grad(), preserve_module_state(module):
        try:
            calls = _Calls()
            returned = calls.of(module, _small_call(graph, batch))
            # Functions of the model have imported their modules by now
            parts = [_versions(module), _file_digests(module), calls.digest()]
            digest = fingerprint.value_digest(parts)
            return ModelCode(digest, pytree.tree_structure(returned))
        except KeyboardInterrupt:
            raise
        # Code of the user's may raise anything
        except BaseException as error:  # noqa: BLE001
            _logger.debug("the code of the model is not known: %s", error)
            return None


def _small_call(graph: Graph, batch: Batch) -> Call:
    """Return a call with zeros, of few samples and of short lengths where these are open.

    Raises:
        ValueError: the batch has other arguments than the graph.
    """
    shapes: list[list[int | None] | None] = []
    for shape in fingerprint.input_shapes(graph):
        if shape is not None:
            shape = [_SAMPLES if size is None else size for size in shape]
        shapes.append(shape)
    for length in graph.lengths:
        for index, axis in length.axes:
            sizes = shapes[index]
            if sizes is not None:
                sizes[axis] = length.nearest(length.traced // _SHORTER)
    call = call_with_shapes(batch.args, batch.kwargs, shapes)
    if call is None:
        raise ValueError("the call has other arguments")
    return call


def _versions(module: nn.Module) -> dict[str, str]:
    """Return the versions of the packages with the classes of the modules, of torch, and of
    this package, which traces.
    """
    versions = {"torch": str(torch.__version__), "quantizer": quantizer.__version__}
    for part in module.modules():
        package = type(part).__module__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "")
        if version:
            versions[package] = str(version)
    return versions


def _file_digests(module: nn.Module) -> list[str]:
    """Return the sha256 of the files of the user's that are loaded, and of those with classes
    of the modules.

    Raises:
        OSError, ValueError: a file cannot be read, or the code of a class is in no file.
    """
    with_classes = {type(part).__module__ for part in module.modules()}
    main = sys.modules.get("__main__")
    files: set[str] = set()
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__dict__", {}).get("__file__")
        if name in with_classes:
            with_classes.remove(name)
            # A notebook has none, and that of standard input is not on the disk
            if file is None or not Path(file).is_file():
                raise ValueError(f"{name} has no file")
            files.add(file)
        # The main program, which has two names, may be another one each time
        elif file is not None and loaded is not main and is_file_of_user(file):
            files.add(file)
    if with_classes:
        raise ValueError(f"{with_classes.pop()} is not loaded")
    digests: set[str] = set()
    for file in files:
        # What was loaded from a file that is gone cannot be loaded again
        with suppress(FileNotFoundError):
            content = Path(file).read_bytes()
            digests.add(hashlib.sha256(content).hexdigest())
    return sorted(digests)


class _Calls(TorchFunctionMode):
    """Digests the functions of torch that are called, with their arguments.

    Tensors are called by where they come from: parameters and buffers by their path, results
    by their number, and all others by their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sha256 = hashlib.sha256()
        self._names = WeakTensorKeyDictionary()
        self._count = 0

    def of(self, module: nn.Module, call: Call) -> Any:
        """Run a call of a module, and return what it returns. Weights in files are not read."""
        mode: Any = nullcontext()
        with without_values(module) as deferred:
            if deferred:
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                call = pytree.tree_map_only(Tensor, mode.from_tensor, call)
            tensors = (*module.named_parameters(), *module.named_buffers())
            for path, tensor in tensors:
                self._names[tensor] = path
            self._add(call)
            args, kwargs = call
            seed_everything(0)
            with mode, self:
                returned = module(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(returned)
        self._add(leaves)
        self._write(str(structure))
        return returned

    def digest(self) -> str:
        """Return the digest of all calls."""
        return self._sha256.hexdigest()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._write(_function_name(func))
        # Before the call, which may write into its arguments
        self._write(repr(pytree.tree_map(self._word, (args, kwargs))))
        value = func(*args, **kwargs)
        self._add(value)
        return value

    def _write(self, text: str) -> None:
        text = _ADDRESS.sub("", text) + "\n"
        self._sha256.update(text.encode())

    def _add(self, results: Any) -> None:
        """Give the tensors of a nested result their numbers, and digest their kinds."""
        for value in pytree.tree_leaves(results):
            if not isinstance(value, Tensor):
                continue
            if value not in self._names:
                self._names[value] = f"%{self._count}"
                self._count += 1
            self._write(f"{self._names[value]} {value.dtype} {list(value.shape)}")

    def _word(self, value: Any) -> Any:
        """Return what stands for an argument."""
        if isinstance(value, torch.device):
            return "device"
        if not isinstance(value, Tensor):
            return repr(value)
        if value not in self._names:
            # Such as a tensor that is an attribute or a global variable
            with unset_fake_temporarily():
                self._names[value] = fingerprint.tensor_digest(value.detach())
        return self._names[value]


def _function_name(function: Any) -> str:
    """Return the name of a function of torch. That of an attribute is the attribute's."""
    name: str = getattr(function, "__qualname__", str(function))
    if name.endswith(("__get__", "__set__")):
        name += repr(function.__self__)
    return name
