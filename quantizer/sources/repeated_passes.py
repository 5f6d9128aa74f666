"""Watches the passes over evaluation data. Each pass has to give the same batches, and they may
be those that the network was calibrated on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.config.wording import counted
from quantizer.errors import DataError
from quantizer.sources.batches import Batch, Fingerprint

_REPEATED_HELP = "draw random crops and orders from a fixed seed in each pass"


@dataclass
class RepeatedPasses:
    """The batches of the first pass, which all later ones have to give.

    Args:
        label: names the data in messages.
        calibrated: the fingerprint of the calibration data; None if none were needed.
        has_same_source: whether they are read from where the calibration data come from. They
            need not be cut into the same batches.
        digests: of the batches up to each one.
        is_complete: whether a pass has come to its end.
        has_calibrated: whether the batches begin with those of the calibration.
    """

    label: str
    calibrated: Mapping[str, Any] | None = None
    has_same_source: bool = False
    digests: list[str] = field(default_factory=list)
    is_complete: bool = False
    has_calibrated: bool = False

    def see(self, seen: Fingerprint, batch: Batch) -> None:
        """Add a batch to those that were seen in this pass.

        Raises:
            DataError: it is not the batch of an earlier pass.
        """
        if self.calibrated is not None:
            missing = self.calibrated["samples"] - seen.samples
            if 0 < missing <= batch.size:
                # The calibration may end within a batch
                prefix = seen.with_batch(batch.first(missing))
                self.has_calibrated = prefix.to_json() == self.calibrated
        number = seen.batches
        seen.update(batch)
        digest = seen.digest
        if number >= len(self.digests) and not self.is_complete:
            self.digests.append(digest)
        elif self.digests[number : number + 1] != [digest]:
            raise DataError(
                f"batch {number} of {self.label} is another one when the data are read again, "
                "and the networks are compared on the same batches",
                help=_REPEATED_HELP,
            )

    def end(self, seen: Fingerprint) -> None:
        """End a pass.

        Raises:
            DataError: an earlier pass had more batches.
        """
        if self.is_complete and seen.batches < len(self.digests):
            raise DataError(
                f"{self.label} gives {counted(seen.batches, 'batch')} when the data are read "
                f"again, and {len(self.digests)} before",
                help=_REPEATED_HELP,
            )
        self.is_complete = True

    def judged_on(self, samples: int, skipped: int) -> dict[str, Any]:
        """Return which samples have judged, as report.json has it; empty if nothing is known
        of them.

        Args:
            samples: of a pass.
            skipped: how many samples were left out before them.
        """
        if self.calibrated is None:
            return {}
        calibrated = self.calibrated["samples"]
        common = 0
        if self.has_calibrated:
            common = calibrated
        elif self.has_same_source:
            common = min(max(calibrated - skipped, 0), samples)
        if common:
            text = "on the calibration data"
            if common < samples:
                text = f"partly {text}: the first {common} of {samples} samples"
        elif 0 < calibrated <= skipped:
            last = skipped + samples
            text = f"on samples {skipped + 1} to {last}, which did not calibrate"
        else:
            return {}
        return {"samples": samples, "skipped": skipped, "text": text}
