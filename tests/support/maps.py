"""Small networks on maps of any size, and on maps of one size, for `--dynamic`."""

import torch
from torch import Tensor, nn

SIDE = 16


class Joined(nn.Module):
    """Halves a map twice, doubles it again and joins it with the map before: it takes sizes
    that 4 divides.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.second = nn.Conv2d(4, 4, 3, 2, 1)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return a map [b, 2, height / 2, width / 2]."""
        x = torch.relu(self.first(image))
        y = self.up(torch.relu(self.second(x)))
        return self.last(torch.cat([y, x], 1))


class Pooled(nn.Module):
    """A convolution, a gate as in squeeze-and-excitation, and a layer behind a global mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.gate = nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        """Return scores [b, 3]."""
        x = torch.relu(self.first(image))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(x.mean((2, 3)))


class Sound(nn.Module):
    """Doubles the length of a sound."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(3, 4, 3, padding=1)
        self.up = nn.ConvTranspose1d(4, 1, 2, 2)

    def forward(self, sound: Tensor) -> Tensor:
        """Return a sound [b, 1, 2 * length]."""
        return self.up(torch.relu(self.first(sound)))


class Fixed(nn.Module):
    """A convolution and what `done` does to its map [b, 4, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.head = nn.Linear(256, 3)
        self.up = nn.Upsample(size=(SIDE, SIDE))
        self.pool = nn.AvgPool2d(8)
        self.places = nn.Parameter(torch.zeros(1, 4, 64))

    def forward(self, image: Tensor) -> Tensor:
        """Return what `done` returns."""
        return self.done(self.first(image), image)

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return the map."""
        return x


class Flat(Fixed):
    """A linear layer on all values of the map."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return scores [b, 3]."""
        return self.head(x.flatten(1))


class Placed(Fixed):
    """A parameter with a value for each place."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return tokens [b, 4, 64]."""
        return x.flatten(2) + self.places


class Resized(Fixed):
    """A map of constant size, added to the image."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return a map [b, 3, 16, 16]."""
        return self.up(x)[:, :3] + image


class Windowed(Fixed):
    """A pooling over the whole map."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return [b, 4]."""
        return self.pool(x).flatten(1) * 2


class Viewed(Fixed):
    """A shape with a size as a Python number."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return tokens [b, 4, 64]."""
        return x.view(-1, 4, int(x.shape[2]) * int(x.shape[3]))


class Square(Fixed):
    """A map and its transpose, which need equal sizes."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return a map [b, 4, 8, 8]."""
        return x + x.transpose(2, 3)


class AdaptivelyPooled(Fixed):
    """A pooling to 2 x 2 values, which ONNX lacks for maps of any size."""

    def done(self, x: Tensor, image: Tensor) -> Tensor:
        """Return a map [b, 4, 2, 2]."""
        return nn.functional.adaptive_avg_pool2d(x, 2)


def images(height: int = SIDE, width: int = SIDE, samples: int = 2) -> Tensor:
    """Return images [samples, 3, height, width]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, height, width, generator=generator)
