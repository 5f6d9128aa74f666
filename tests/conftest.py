"""What holds for all tests: one thread for each worker, and one trace for models that differ
only in their values.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest
from support.quick_logs import catch_logs_at_the_root
from support.work_here import work_here

if TYPE_CHECKING:
    from support.deployments import Written

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in each run, however slow
    settings.register_profile("suite", derandomize=True, deadline=None)
    settings.load_profile("suite")

# Compiling the tests takes a third of their collection, and modules most of the start of a
# subprocess: each is compiled once, also where Python is told to keep no compiled files
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers share the cores; set before torch is imported, and for subprocesses
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_LASTING_MODULES: set[str] = set()
"""Names of loaded modules that no test has written."""
_WITHOUT_MODELS: set[tuple[int, str]] = set()
"""What `_last_loaded` returned when no module was left that a test has written."""

MARKS_TO_NAME = ("large", "real", "extended")
"""Marks of tests that run only where `-m` names them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with long tests begin first, so that no worker is left with one at the end, and
    those on real models together. A file stays in one piece: its tests share traces. Large, real
    and extended tests run where `-m` names them.
    """
    named = [mark for mark in MARKS_TO_NAME if mark in config.option.markexpr]
    run: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marks = [mark for mark in MARKS_TO_NAME if item.get_closest_marker(mark)]
        # "-m extended" runs the extended cases of real models, too
        is_run = "extended" in named if "extended" in marks else set(marks) <= set(named)
        (run if is_run else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = run
    slow_files = {
        item.path for item in items if "slow" in item.keywords or "real" in item.keywords
    }
    items.sort(
        key=lambda item: (item.path not in slow_files, "examples" not in item.path.parts)
    )


def pytest_collection() -> None:
    """Collection makes no garbage, and what it makes stays to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, and seldom: a trace makes a million
    objects, and a tenth of the suite's time went to looking at them again and again.
    """
    gc.freeze()
    gc.set_threshold(400_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _seeds_of_the_cpu() -> Iterator[None]:
    """Without an accelerator, torch formats the whole stack for each kind that it was built for,
    whenever it is seeded. The second device of tests, which computes on the CPU, is none.
    """
    torch = sys.modules.get("torch")
    accelerator = torch and torch.accelerator.current_accelerator()
    if torch is None or (accelerator is not None and accelerator.type != "strict"):
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers whichever tests ran before it in its process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the terminal that tests are started from."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _logs_at_the_root() -> Iterator[None]:
    """Loggers of packages are not looked through for each test."""
    with pytest.MonkeyPatch.context() as patched:
        catch_logs_at_the_root(patched)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_power_failure() -> Iterator[None]:
    """Files are not flushed to the disk one by one: no test looks after a loss of power."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _work_here() -> Iterator[None]:
    """Files of others are read without a fork of a large process."""
    with pytest.MonkeyPatch.context() as patched:
        work_here(patched)
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_traces() -> Iterator[None]:
    """Tests that do not collect torch do not pay for it."""
    if "torch" not in sys.modules:
        yield
        return
    from support.quick_sizes import quicken_sizes
    from support.quick_traces import keep_the_class_of_modules
    from support.shared_traces import SharedTraces

    from quantizer.graph.tracing import trace

    with pytest.MonkeyPatch.context() as patched:
        quicken_sizes(patched)
        keep_the_class_of_modules(patched)
        patched.setattr(trace, "_export", SharedTraces(trace._export))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_exports(_shared_traces: None) -> Iterator[None]:
    """Networks that differ only in their values are exported once."""
    if "torch" not in sys.modules:
        yield
        return
    from support.shared_exports import (
        measure_single_runs,
        run_on_one_thread,
        share_exports,
        share_translations,
    )

    with pytest.MonkeyPatch.context() as patched:
        share_exports(patched)
        if "onnxscript" in sys.modules:
            share_translations(patched)
        if "onnxruntime" in sys.modules:
            measure_single_runs(patched)
            run_on_one_thread(patched)
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_distributions() -> Iterator[None]:
    """A report computes the figures of equal values once for all tests."""
    if "torch" not in sys.modules or importlib.util.find_spec("numpy") is None:
        yield
        return
    from support.shared_distributions import SharedDistributions

    from quantizer.report import content

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(content, "_distribution", SharedDistributions(content._distribution))
        yield


@pytest.fixture(scope="session", autouse=True)
def _tests_are_no_code_of_models() -> Iterator[None]:
    """The digest of a model's code has all files that a process has loaded, as the process of a
    user has only the model's. Here files of the tests count only if a class of the model is in
    them, and models of other tests not at all.
    """
    if "torch" not in sys.modules:
        yield
        return
    from support.users_modules import look_at_modules_of_users

    from quantizer.results import model_code

    plain = model_code.is_file_of_user
    tests = os.path.join(os.path.dirname(__file__), "")

    def is_file_of_user(name: str) -> bool:
        return plain(name) and not name.startswith(tests)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_code, "is_file_of_user", is_file_of_user)
        look_at_modules_of_users(patched, is_file_of_user)
        yield


@pytest.fixture(autouse=True)
def _forgotten_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process begins without the models that earlier tests have written and loaded."""
    yield
    if _last_loaded() in _WITHOUT_MODELS:
        return
    written = str(tmp_path_factory.getbasetemp())
    # To look at all thousands again would take longer than most tests
    for name in sys.modules.keys() - _LASTING_MODULES:
        file = getattr(sys.modules[name], "__dict__", {}).get("__file__")
        if file is not None and file.startswith(written):
            del sys.modules[name]
        else:
            _LASTING_MODULES.add(name)
    _WITHOUT_MODELS.clear()
    _WITHOUT_MODELS.add(_last_loaded())


def _last_loaded() -> tuple[int, str]:
    """Return how many modules are loaded, and which is the last one."""
    return len(sys.modules), next(reversed(sys.modules))


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of tracing itself."""
    from quantizer.graph.tracing import trace

    monkeypatch.setattr(trace, "_export", getattr(trace._export, "export", trace._export))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """By target and toy: its file, which is written once and must stay as it is."""
    from support.deployments import written

    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda target, name: written(target, name, folder))


@pytest.fixture(autouse=True)
def _no_other_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines take a second for each file; tests that are about them ask for
    `other_engines`, and those of real models have them.
    """
    asks = "other_engines" in request.fixturenames or "real" in request.keywords
    if asks or "onnxruntime" not in sys.modules:
        return
    from quantizer.export.onnx import exporter as onnx_exporter

    monkeypatch.setattr(onnx_exporter, "installed_openvino", lambda: None)


@pytest.fixture
def other_engines() -> None:
    """Engines that are installed run each file, as they do for users."""
