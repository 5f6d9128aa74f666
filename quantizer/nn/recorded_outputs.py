"""Keep the outputs of a network, so that a call with inputs that it has run on returns them
without another run.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.storage.deferred_tensor import CPU, DeferredTensor, bytes_of

_MOST_BYTES = 1 << 26
"""Bytes of the outputs that are kept."""


class RecordedOutputs:
    """Outputs by the digests of the inputs.

    They are those of a network with its present parameters, on the CPU.

    Args:
        network: what was run.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._versions = _versions(network)
        self._outputs: dict[bytes, Any] = {}
        self._bytes_left = _MOST_BYTES

    def record(self, digest: bytes | None, output: Any) -> None:
        """Keep an output, if there is room and a digest.

        Args:
            digest: of the inputs.
            output: of the network for them.
        """
        size = 0
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                size += leaf.nbytes
        if digest is not None and size <= self._bytes_left:
            self._bytes_left -= size
            self._outputs[digest] = _copied(output)

    def output(self, inputs: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Return a copy of the output for these inputs, or what `run` returns.

        The network has to run if its parameters have changed, or if hooks wait for its layers.
        """
        is_same = not _has_hooks(self._network) and _versions(self._network) == self._versions
        if self._outputs and is_same:
            digest = digest_of(inputs)
            if digest in self._outputs:
                return _copied(self._outputs[digest])
        return run()


def digest_of(inputs: Iterable[Any]) -> bytes | None:
    """Return a digest of a network's inputs; None if they are on another device than the CPU,
    or a gradient is wanted.
    """
    sha256 = hashlib.sha256()
    for value in inputs:
        if not isinstance(value, Tensor):
            sha256.update(repr(value).encode())
            continue
        if value.device != CPU or value.requires_grad:
            return None
        header = f"{value.dtype} {tuple(value.shape)} "
        sha256.update(header.encode())
        sha256.update(bytes_of(value))
    return sha256.digest()


def _copied(output: Any) -> Any:
    """Return a nested output with copies of its tensors."""
    return pytree.tree_map_only(Tensor, Tensor.clone, output)


def _versions(network: nn.Module) -> list[tuple[int, ...]]:
    """Return what changes if a parameter or buffer is replaced or changed in place."""
    versions: list[tuple[int, ...]] = []
    for tensor in (*network.parameters(), *network.buffers()):
        version: tuple[int, ...] = (id(tensor),)
        # A tensor in a file cannot be changed in place
        if not isinstance(tensor, DeferredTensor):
            version += (tensor._version, tensor.data_ptr())
        versions.append(version)
    return versions


def _has_hooks(network: nn.Module) -> bool:
    """Return whether a layer has hooks, which only a run calls."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())
