"""Find the layers of a language model that read images or audio only: vision and audio towers,
and the projectors behind them.
"""

import re
from collections.abc import Set

from quantizer.graph.ir import Graph, Node
from quantizer.graph.language_parts import vocabulary_embeddings

_ENTRY = "module_input"
"""The input of a layer in the graph of a module tree, which shows no values between layers."""
_NO_MEDIA = re.compile("mask|embeds")
"""Parts of the names of other floating-point inputs."""
_DECODER_INPUT = "decoder_"
"""The beginning of a name of token ids that a model writes about what its encoder reads, as a
speech recognizer does. Its encoder does not only serve a language model.
"""
_MEDIA_NAMES = {
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vision_embed_tokens",
    "visual",
    "image_tower",
    "video_tower",
    "image_encoder",
    "image_embed",
    "audio_tower",
    "audio_encoder",
    "audio_embed",
    "multi_modal_projector",
    "mm_projector",
    "connector",
    "aligner",
    "qformer",
    "language_projection",
    "visual_projection",
    "image_to_text_projection",
    "perceiver_resampler",
    "embed_vision",
    "embed_audio",
}
"""The modules of these layers in the families of transformers."""
_LEAST_AXES = 2
"""Axes of an image that was cut into patches, as Qwen2-VL takes it."""


def media_layers(graph: Graph) -> list[str]:
    """Return the layers of a language model that serve its images or audio, in execution order.

    On a trace they depend on such inputs, or on no input, and no token reaches them. Layers
    beside some that read tokens are not among them, as in an attention of tokens to an image.
    The graph of a module tree shows no inputs. There, the names of modules count.
    """
    embeddings = {node.name for node in vocabulary_embeddings(graph)}
    if not embeddings:
        return []
    layers = [node for node in graph.nodes if node.params and not node.is_tensor]
    if any(node.op == _ENTRY for node in graph.nodes):
        return [node.name for node in layers if _has_media_name(node)]
    media, decoder_inputs = _inputs(graph)
    if not embeddings.isdisjoint(_reached(graph, decoder_inputs)):
        return []
    of_text = _reached(graph, embeddings)
    of_media = _reached(graph, media) - of_text
    for node in reversed(graph.nodes):
        readers = graph.consumers[node.name]
        if node.op == "input" or node.name in of_text:
            continue
        if readers and of_media.issuperset(readers):
            of_media.add(node.name)
    modules_of_text: set[str] = set()
    for node in layers:
        if node.is_multiplying and node.name in of_text:
            modules_of_text.add(_parent(node))
    # The root has layers of all kinds
    modules_of_text.discard("")
    names: list[str] = []
    for node in layers:
        is_beside_text = _parent(node) in modules_of_text
        if node.name in of_media and not is_beside_text:
            names.append(node.name)
    return names


def _has_media_name(node: Node) -> bool:
    parts = node.scope.split(".")
    return not _MEDIA_NAMES.isdisjoint(parts)


def _parent(node: Node) -> str:
    return node.scope.rpartition(".")[0]


def _inputs(graph: Graph) -> tuple[set[str], set[str]]:
    """Return the inputs that may be images or audio, and those of a decoder."""
    media: set[str] = set()
    of_decoder: set[str] = set()
    nodes = [node for node in graph.nodes if node.op == "input"]
    for node, path in zip(nodes, graph.input_paths, strict=True):
        name = str(path[1])
        if name.startswith(_DECODER_INPUT):
            of_decoder.add(node.name)
        elif node.is_float and node.rank >= _LEAST_AXES and not _NO_MEDIA.search(name):
            media.add(node.name)
    return media, of_decoder


def _reached(graph: Graph, start: Set[str]) -> set[str]:
    """Return the nodes whose values depend on those of some nodes, and these."""
    reached = {*start}
    for node in graph.nodes:
        if not reached.isdisjoint(node.refs()):
            reached.add(node.name)
    return reached
