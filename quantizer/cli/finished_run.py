"""Holds what `quantizer run` has done, for its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantizer.cli.climbing import Tuning
from quantizer.cli.divided_data import DividedData
from quantizer.cli.gates import Gate, failed_gates, gate_lines
from quantizer.cli.options import Options
from quantizer.cli.outcome import Outcome
from quantizer.cli.reproduction import data_words
from quantizer.cli.session import OpenedRun
from quantizer.graph.untraced import Untraced
from quantizer.plan.model import Key, Plan
from quantizer.report.verdict import VerdictFacts


@dataclass(frozen=True)
class FinishedRun:
    """A run after its last step.

    Attributes:
        destination: what its user calls the target.
        test_options: the options of its test.
        opened: the model and its data.
        calibrated, tested: the results of both modes.
        plan: of the calibration.
        data: that calibrate and judge; None on modules, whose weights need no data.
        tuning: the ladder, if it was climbed.
        remedy: what to do if a gate does not hold; empty to name the page of the report.
        untraced: what the file holds besides the layers of the plan.
    """

    destination: str
    test_options: Options
    opened: OpenedRun
    calibrated: Outcome
    tested: Outcome
    plan: Plan
    data: DividedData | None = None
    tuning: Tuning | None = None
    remedy: str = ""
    untraced: Untraced = field(default_factory=Untraced)

    def facts(self, gates: Sequence[Gate]) -> VerdictFacts:
        """Return what the verdict is about."""
        tested = self.tested
        options = self.test_options
        path: str | None = None
        size = 0
        runtime = ""
        floating: Mapping[str, str] | None = None
        float_activations: tuple[Key, ...] = ()
        activation_codes = ""
        uint8_weights: tuple[str, ...] = ()
        notes: tuple[str, ...] = ()
        for written, verified in tested.deployed.items():
            path = str(written)
            size = tested.exports[-1]["bytes"]
            runtime, floating = verified.in_runtime
            float_activations = verified.float_activations
            activation_codes = verified.activation_codes
            uint8_weights = verified.uint8_weights
            notes = verified.limits
        data_options = options
        if self.data is not None:
            # As the page joins the options of both modes
            calibrated_samples = self.data.calib_options.subset_len
            data_options = replace(options, subset_len=calibrated_samples)
        return VerdictFacts.of(
            self.plan,
            floating=floating,
            float_activations=float_activations,
            activation_codes=activation_codes,
            uint8_weights=uint8_weights,
            untraced=self.untraced,
            path=path,
            size=size,
            tested=tested.report,
            config=options.config_file or "",
            model_option=options.model or "",
            data_options=data_words(data_options),
            runtime=runtime,
            gates=gate_lines(gates, tested.metrics),
            not_met=failed_gates(gates, tested.metrics),
            improvement=self.opened.improvement,
            notes=notes,
        )
