"""Holds what `quantizer run` has done, for its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.reproduction import data_options
from quantizer.cli.modes.gates import Gate, failed_gates, gate_lines
from quantizer.cli.opening.session import OpenedRun
from quantizer.cli.terminal.output import Outcome
from quantizer.commands.searching.divided_data import DividedData
from quantizer.commands.searching.tuned_run import TunedRun
from quantizer.export.agreement import Verification
from quantizer.graph.untraced import Untraced
from quantizer.plan.model import Plan
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
        tuning: the search for a better config, if there was one.
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
    tuning: TunedRun | None = None
    remedy: str = ""
    untraced: Untraced = field(default_factory=Untraced)

    def facts(self, gates: Sequence[Gate]) -> VerdictFacts:
        """Return what the verdict is about."""
        tested = self.tested
        options = self.test_options
        path: str | None = None
        size = 0
        verified: Verification | None = None
        for written, verification in tested.deployed.items():
            verified = verification
            path = str(written)
            size = tested.exports[-1]["bytes"]
        of_data = options
        if self.data is not None:
            # As the page joins the options of both modes
            calibrated_samples = self.data.calib_options.subset_len
            of_data = replace(options, subset_len=calibrated_samples)
        return VerdictFacts.of(
            self.plan,
            verified,
            untraced=self.untraced,
            path=path,
            size=size,
            tested=tested.report,
            config=options.config_file or "",
            model_option=options.model or "",
            data_options=data_options(of_data),
            gates=gate_lines(gates, tested.metrics),
            not_met=failed_gates(gates, tested.metrics),
            improvement=self.opened.improvement,
        )
