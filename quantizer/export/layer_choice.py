"""Holds which layers of a file stay in float, as deploy.json has it, to repeat the choice."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from quantizer.calibration.fingerprint import layer_digests, value_digest
from quantizer.calibration.solution import Solution
from quantizer.config.json_types import JsonMapping
from quantizer.config.wording import counted, first_names
from quantizer.errors import ResultError, UsageError
from quantizer.export.agreement import Verification
from quantizer.graph.ir import Graph
from quantizer.option_words import Sentence
from quantizer.plan.model import Key
from quantizer.results.validation import check_result_file
from quantizer.storage.files import read_json

DEPLOY_FILE = "deploy.json"
"""The name of the file in the folder of an .onnx."""
DEPLOY_FORMAT = 1
"""The version of its layout."""
_HELP = "remove it, or give no <--deploy_file>, to measure again"


@dataclass(frozen=True)
class LayerChoice:
    """What stays in float in a file.

    Attributes:
        solution: the calibration without the activations that stay in float.
        content: of deploy.json.
    """

    solution: Solution
    content: JsonMapping

    @property
    def float_layers(self) -> Collection[str]:
        """Return the layers that stay in float."""
        layers: JsonMapping = self.content["float_layers"]
        return layers.keys()

    @property
    def float_activations(self) -> tuple[Key, ...]:
        """Return the activations that stay in float."""
        return tuple((layer, role) for layer, role in self.content["float_activations"])

    @property
    def line(self) -> str:
        """Return a sentence about the choice."""
        measured = self.content["measured"]
        left = f"{counted(len(self.float_layers), 'layer')} in float"
        if not self.float_layers:
            left = "all layers in integers"
        batches = " and ".join(str(size) for size in measured["batches"])
        line = (
            f"{left}, chosen for batches of {batches} on "
            f"{counted(measured['threads'], 'thread')} of {measured['processor']}; "
            f"{DEPLOY_FILE} has the times"
        )
        if self.content.get("float_is_faster") is True:
            line += ". In float, it would be faster: <--onnx_profile tuned>"
        return Sentence(line)


def asks_for_floats(verifications: Iterable[Verification]) -> bool:
    """Return whether one of the files is slower than float, so that some of its layers may be
    faster in float.
    """
    for verification in verifications:
        session = verification.default_session
        if session is not None and session.speed is not None and session.speed.asks_for_floats:
            return True
    return False


def network_digest(graph: Graph, solution: Solution) -> str:
    """Return a digest of all that decides the speed of a file: layers, and how each tensor is
    quantized.

    Scales are left out. Their last bits differ between processors, and change no speed.
    """
    rows = [[*key, solution.tensors[key].spec.to_json()] for key in sorted(solution.tensors)]
    return value_digest([layer_digests(graph), rows])


def read_choice(path: Path, digest: str, weights: str, keys: Collection[Key]) -> JsonMapping:
    """Return the content of a deploy.json that fits a network.

    Args:
        path: of the file.
        digest: of the network, as `network_digest` returns it.
        weights: the value of --onnx_weights.
        keys: the quantized activations.

    Raises:
        ResultError: it is damaged, or was written for something else.
        UsageError: it was measured with other weights.
    """
    content: JsonMapping = read_json(path)
    try:
        check_result_file(content, path, DEPLOY_FILE)
    except ResultError as error:
        raise ResultError(
            f"{path} is not a deploy.json of format {DEPLOY_FORMAT}", help=_HELP
        ) from error
    if content["network"] != digest:
        raise ResultError(
            f"{path} was measured for another network, or for another config of it", help=_HELP
        )
    if content["weights"] != weights:
        raise UsageError(
            f"{path} was measured with <--onnx_weights {content['weights']}>, and this run has "
            f"<--onnx_weights {weights}>",
            help=f"give <--onnx_weights {content['weights']}>, or {_HELP}",
        )
    unknown = [
        f"{role} of {layer}"
        for layer, role in content["float_activations"]
        if (layer, role) not in keys
    ]
    if unknown:
        raise ResultError(
            f"{path} leaves {first_names(unknown)} in float, which this network does not "
            "quantize",
            help=_HELP,
        )
    return content
