"""One dimension, three dimensions, points, tables and recurrence: WaveNet, C3D, PointNet, DLRM,
LSTM and GRU models.
"""

from __future__ import annotations

import torch
from harness import Case, architecture, images, prepared, tokens
from torch import Tensor, nn
from torch.nn import functional as F


class WaveNet(nn.Module):
    """Dilated causal convolutions, a gate of tanh and sigmoid, skips summed (van den Oord et
    al. 2016).
    """

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 8, 1)
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.outs = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.end = nn.Conv1d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), torch.zeros(())
        for index, (conv, out) in enumerate(zip(self.filters, self.outs, strict=True)):
            a, b = conv(F.pad(x, (2**index, 0))).chunk(2, 1)
            y = out(torch.tanh(a) * torch.sigmoid(b))
            x, skips = x + y, skips + y
        return self.end(F.relu(skips))


@architecture
def wavenet() -> Case:
    return Case(prepared(WaveNet()), images(2, 1, 64))


@architecture
def temporal_convolutions() -> Case:
    """Bai et al. 2018, with the weight norm of its convolutions."""
    conv = torch.nn.utils.parametrizations.weight_norm(
        nn.Conv1d(4, 8, 3, padding=2, dilation=2)
    )
    layers = (
        conv,
        nn.Hardtanh(-2, 2),
        nn.Conv1d(8, 8, 3),
        nn.GLU(1),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
    )
    return Case(prepared(nn.Sequential(*layers, nn.Linear(16, 10))), images(4, 4, 32))


@architecture
def c3d() -> Case:
    """Tran et al. 2014."""
    layers = (
        nn.Conv3d(3, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
    )
    more = (
        nn.Conv3d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool3d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return Case(prepared(nn.Sequential(*layers, *more)), images(2, 3, 4, 16, 16))


class PointNet(nn.Module):
    """Points turned by a predicted matrix, then their maximum (Qi et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix, self.features = (
            nn.Linear(16, 9),
            nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(x).max(2)[0]).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
        return F.log_softmax(self.head(self.features(x).max(dim=2).values), 1)


@architecture
def pointnet() -> Case:
    return Case(prepared(PointNet()), images(4, 3, 24), floors=(15.0, 20.0))


class DLRM(nn.Module):
    """Tables looked up, numbers through layers, all pairs multiplied (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(3))
        self.bottom, self.top = (
            nn.Linear(4, 8),
            nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1)),
        )

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = F.relu(self.bottom(numbers))
        vectors = torch.stack(
            [dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat([dense, products[:, rows, columns]], 1)))


@architecture
def dlrm() -> Case:
    numbers, ids = (
        torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(0)),
        tokens(8, 3, 50),
    )
    return Case(
        prepared(DLRM()),
        tuple((number, id_[0]) for number, id_ in zip(numbers, ids, strict=True)),
    )


class Tagger(nn.Module):
    """A tag for each word, from an LSTM in both directions of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 12)
        self.lstm = nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.tags = nn.Linear(32, 9)

    def forward(self, words: Tensor) -> Tensor:
        return self.tags(self.lstm(self.embed(words))[0])


@architecture
def lstm_tagger() -> Case:
    return Case(prepared(Tagger()), tokens(4, 10, 60))


class Translator(nn.Module):
    """A GRU encodes, another decodes from its last state and attends to its outputs (Bahdanau
    et al. 2014).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 12)
        self.encoder, self.decoder = (
            nn.GRU(12, 16, batch_first=True),
            nn.GRU(12, 16, batch_first=True),
        )
        self.query, self.key, self.score = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 1, bias=False),
        )
        self.out = nn.Linear(32, 60)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded, state = self.encoder(self.embed(source))
        decoded, _ = self.decoder(self.embed(target), state)
        energy = torch.tanh(self.query(decoded).unsqueeze(2) + self.key(encoded).unsqueeze(1))
        scores = (
            self.score(energy)
            .squeeze(-1)
            .masked_fill((source == 0).unsqueeze(1), float("-inf"))
        )
        context = torch.einsum("bts,bsh->bth", scores.softmax(-1), encoded)
        return self.out(torch.cat([decoded, context], -1))


@architecture
def gru_with_attention() -> Case:
    pairs = zip(tokens(4, 9, 60), tokens(4, 7, 60), strict=True)
    return Case(
        prepared(Translator()), tuple((source[0], target[0]) for source, target in pairs)
    )


class Elman(nn.Module):
    """A plain recurrent layer from a given first state; a cell written out step by step beside
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.cell = (
            nn.RNN(6, 8, nonlinearity="relu", batch_first=True),
            nn.LSTMCell(8, 8),
        )
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y, _ = self.rnn(x, state.transpose(0, 1).contiguous())
        h, c = torch.zeros_like(y[:, 0]), torch.zeros_like(y[:, 0])
        for step in range(3):
            h, c = self.cell(y[:, step], (h, c))
        return self.out(h)


@architecture
def elman() -> Case:
    generator = torch.Generator().manual_seed(0)
    batches = tuple(
        (torch.randn(4, 5, 6, generator=generator), torch.randn(4, 1, 8, generator=generator))
        for _ in range(2)
    )
    return Case(prepared(Elman()), batches)
