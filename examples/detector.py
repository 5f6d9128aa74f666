"""A small detector in the style of YOLO: it finds digits in pictures of 64 by 64 pixels.

    quantizer run examples/detector.py --to onnx --gate 'map50_drop<=0.01'

The pictures are the digits of `digits.py`, drawn in random places and sizes from a seed: those
that it was trained and calibrated on, and others of the held-out digits. `train_detector.py`
wrote the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from digits import TRAINING_IMAGES, digits
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = Path(__file__).with_suffix(".safetensors")
SIDE = 64
"""Pixels of a picture in each direction."""
CELL = 8
"""Pixels of a cell in each direction: each cell proposes one box."""
CLASSES = 10
MOST_DIGITS = 4
MIN_SCORE = 0.05
MAX_OVERLAP = 0.5
"""Of two proposals of a class that overlap more, the one with the lower score is left out."""
Truth = tuple[Tensor, Tensor]
"""Boxes [digits, 4] as left, top, right and bottom in pixels, and classes [digits]."""
Batch = tuple[Tensor, list[Truth]]
Network = Callable[[Tensor], dict[str, Tensor]]


class Block(nn.Module):
    """Two convolutions with SiLU and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(channels, channels, 1), *convolution(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        features: Tensor = x + self.layers(x)
        return features


class Detector(nn.Module):
    """A box and ten scores for each cell of a picture, before they are decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(1, 16, 2),
            *convolution(16, 32, 2),
            Block(32),
            *convolution(32, 64, 2),
            Block(64),
            Block(64),
        )
        self.boxes = nn.Conv2d(64, 4, 1)
        self.scores = nn.Conv2d(64, CLASSES, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Return maps of pictures [batch, 1, 64, 64]: boxes [batch, 4, 8, 8], scores [batch,
        10, 8, 8].
        """
        features = self.features(image)
        return {"boxes": self.boxes(features), "scores": self.scores(features)}


def convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """Return a convolution of 3 by 3 with batch norm and SiLU."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.SiLU()]


def model() -> Detector:
    """Return the trained network."""
    network = Detector()
    network.load_state_dict(load_file(WEIGHTS))
    return network


def calibration_data() -> list[Tensor]:
    """Return 256 pictures of training digits in batches of 32."""
    return [images for images, _ in pictures(8, 32, held_out=False, seed=1)]


def evaluation_data() -> list[Batch]:
    """Return 500 pictures of held-out digits in batches of 100."""
    return pictures(5, 100, held_out=True, seed=2)


def pictures(batches: int, size: int, *, held_out: bool, seed: int) -> list[Batch]:
    """Return batches of pictures with the boxes and classes of their digits."""
    images, labels = digits()
    chosen = slice(TRAINING_IMAGES, None) if held_out else slice(TRAINING_IMAGES)
    source = (images[chosen], labels[chosen])
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(batches):
        drawn = [picture(source, generator) for _ in range(size)]
        result.append(
            (torch.stack([image for image, _ in drawn]), [truth for _, truth in drawn])
        )
    return result


def picture(source: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Truth]:
    """Return a picture [1, 64, 64] with one to four digits that do not overlap, and noise."""
    images, labels = source

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    canvas = 0.1 * torch.rand(1, SIDE, SIDE, generator=generator)
    boxes: list[Tensor] = []
    classes: list[int] = []
    for _ in range(number(1, MOST_DIGITS + 1)):
        index, side = number(0, len(images)), number(14, 25)
        left, top = number(0, SIDE - side + 1), number(0, SIDE - side + 1)
        box = torch.tensor([left, top, left + side, top + side], dtype=torch.float32)
        if boxes and overlaps(box[None], torch.stack(boxes)).max() > 0:
            continue
        digit = F.interpolate(images[index][None], (side, side), mode="bilinear")[0]
        canvas[:, top : top + side, left : left + side] += digit
        boxes.append(box)
        classes.append(int(labels[index]))
    return canvas, (torch.stack(boxes), torch.tensor(classes))


def decode(maps: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return boxes, classes and scores of each picture: what runs after the network, in
    float.
    """
    cells = torch.arange(SIDE // CELL, dtype=torch.float32)
    rows, columns = torch.meshgrid(cells, cells, indexing="ij")
    x, y, width, height = maps["boxes"].unbind(1)
    middle = torch.stack([columns + x.sigmoid(), rows + y.sigmoid()], dim=-1) * CELL
    half = torch.stack([width, height], dim=-1).exp() * CELL / 2
    boxes = torch.cat([middle - half, middle + half], dim=-1).flatten(1, 2)
    scores, classes = maps["scores"].sigmoid().flatten(2).max(1)
    found = []
    for each in zip(boxes, classes, scores, strict=True):
        kept = suppressed(*each)
        found.append((each[0][kept], each[1][kept], each[2][kept]))
    return found


def suppressed(boxes: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
    """Return the indices of the boxes that remain (NMS), the highest scores first."""
    order = scores.argsort(descending=True, stable=True)
    kept: list[int] = []
    for index in order[scores[order] >= MIN_SCORE].tolist():
        rivals = [other for other in kept if classes[other] == classes[index]]
        if not rivals or overlaps(boxes[index][None], boxes[rivals]).max() <= MAX_OVERLAP:
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of each pair of boxes."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def evaluate(network: Network, data: Iterable[Batch]) -> dict[str, float]:
    """Return the mean average precision of boxes that overlap a true one by half (mAP50)."""
    matches: list[list[tuple[float, bool]]] = [[] for _ in range(CLASSES)]
    counts = [0] * CLASSES
    for images, truths in data:
        for proposals, truth in zip(decode(network(images)), truths, strict=True):
            for label in truth[1].tolist():
                counts[label] += 1
            for label, score, is_right in matched(proposals, truth):
                matches[label].append((score, is_right))
    precisions = [average_precision(*each) for each in zip(matches, counts, strict=True)]
    return {"map50": sum(precisions) / CLASSES}


def matched(
    proposals: tuple[Tensor, Tensor, Tensor], truth: Truth
) -> Iterable[tuple[int, float, bool]]:
    """Yield class and score of each proposal, and whether it finds a digit that none before it
    found.
    """
    boxes, classes, scores = proposals
    taken: set[int] = set()
    shared = overlaps(boxes, truth[0])
    for index, label in enumerate(classes.tolist()):
        rivals = shared[index] * (truth[1] == label)
        best = int(rivals.argmax())
        is_right = float(rivals[best]) >= 0.5 and best not in taken
        if is_right:
            taken.add(best)
        yield label, float(scores[index]), is_right


def average_precision(matches: list[tuple[float, bool]], count: int) -> float:
    """Return the area below precision as a function of recall."""
    ordered = sorted(matches, key=lambda match: -match[0])
    right = torch.tensor([is_right for _, is_right in ordered], dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(ordered) + 1)
    best_from_here = precision.flip(0).cummax(0).values.flip(0)
    steps = torch.diff(right, prepend=right.new_zeros(1))
    return float((best_from_here * steps).sum() / count)
