"""What goes wrong in a run: one sentence, the exit code of the table, and never a half-written
result.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import fresh_processes
from support.fresh_processes import QUANTIZER
from support.runs import DIGITS, EXAMPLE, calibrate, check
from torch import Tensor

import quantizer
from quantizer.cli import session
from quantizer.cli.main import run_command
from quantizer.results.result_set import locked, mark_result_folder
from quantizer.storage import system_calls
from quantizer.storage.folder_list import LIST_FILE, parse_list

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]


def one_sentence(capture: Capture) -> str:
    """What stderr says, which must be an error line and at most a help line, and no
    traceback.
    """
    said = capture.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "Traceback" not in said
    assert "internal error" not in said
    return said


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ("return []", 4, "gives no batch"),
        ("return [torch.ones(4, 3), torch.full((4, 3), float('nan'))]", 4, "batch 1"),
        (
            "return [torch.ones(4, 3), torch.ones(4, 5)]",
            4,
            "expected [b, 3] torch.float32, got [4, 5]",
        ),
        ("return [torch.ones(4, 3), torch.ones(4, 3).long()]", 4, "torch.int64"),
        ("return [torch.ones(0, 3)]", 4, "batch 0"),
        ("yield torch.ones(4, 3)\n    raise OSError('disk gone')", 4, "disk gone"),
        ("raise ValueError('no such split')", 4, "no such split"),
        ("return 7", 4, "int"),
    ],
)
def test_bad_data(
    toy: Toy, tmp_path: Path, capsys: Capture, data: str, code: int, said: str
) -> None:
    assert calibrate(tmp_path / "out", model=toy(data)) == code
    assert said in one_sentence(capsys)
    assert not (tmp_path / "out" / "quant_info.json").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("raise RuntimeError('no weights here')", "no weights here"),
        ("return 3", "not a torch.nn.Module"),
        ("m = torch.nn.Linear(3, 2); m.weight.data[0] = float('inf'); return m", "weight"),
        (
            "return type('M', (torch.nn.Module,), {'forward': lambda self, x: x if x.sum() > "
            "0 else -x})()",
            "M cannot be traced: its control flow depends on the values of a tensor",
        ),
    ],
)
def test_bad_models(toy: Toy, tmp_path: Path, capsys: Capture, model: str, said: str) -> None:
    assert calibrate(tmp_path / "out", model=toy(model=model)) == 3
    assert said in one_sentence(capsys)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (
            "return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(4))",
            "return [torch.ones(4, 3, 2)] * 2",
        ),
        ("return torch.nn.Unflatten(0, (2, 2))", "return [torch.ones(4, 3)] * 2"),
        ("return Chosen()", "return [torch.randn(4, 3)] * 2"),
    ],
    ids=["lazy layers", "a fixed batch size", "torch.where"],
)
def test_models_that_need_a_hand(toy: Toy, tmp_path: Path, model: str, data: str) -> None:
    path = toy(data, model)
    chosen = (
        "class Chosen(torch.nn.Module):\n    def forward(self, x):\n        return "
        "torch.where(x > 0, x * 2, x - 1)\n"
    )
    Path(path).write_text(Path(path).read_text() + chosen)
    assert calibrate(tmp_path / "out", model=path, config=None) == 0
    assert check(tmp_path / "out", model=path) == 0


def test_a_float_run_with_nothing_to_measure(toy: Toy, capsys: Capture) -> None:
    assert run_command(["--quant_mode", "float", "--model", toy()]) == 2
    assert "nothing to measure" in one_sentence(capsys)


def test_a_config_that_cannot_be_is_told_before_the_model_is_imported(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "fp8.json"
    config.write_text(
        '{"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "symmetric": false}}}'
    )
    model = Path(toy())
    model.write_text("raise RuntimeError('imported')")
    assert calibrate(tmp_path / "out", model=str(model), config=str(config)) == 2
    said = capsys.readouterr().err
    assert "fp8.json:1:71: error QZ311" in said
    assert "imported" not in said


def test_integers_into_a_linear_layer(toy: Toy, tmp_path: Path, capsys: Capture) -> None:
    assert calibrate(tmp_path / "out", model=toy("return [torch.ones(4, 3).long()] * 2")) in (
        3,
        4,
    )
    assert "Linear" in one_sentence(capsys)


def test_infinite_activations_name_the_layer_and_the_batch(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    data = "return [torch.ones(4, 3), torch.full((4, 3), 3e38)]"
    model = "m = torch.nn.Linear(3, 2); m.weight.data.fill_(9.0); return m"
    assert calibrate(tmp_path / "out", model=toy(data, model)) == 4
    said = one_sentence(capsys)
    assert "batch 1: activation of Linear::Linear/linear" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quant_mode", "calib"], "--model"),
        (["--quant_mode", "guess", "--model", "x.py"], "guess"),
        (
            ["--quant_mode", "calib", "--model", DIGITS, "--config_file", "nowhere.json"],
            "nowhere.json",
        ),
        (
            ["--quant_mode", "float", "--model", DIGITS, "--device", "cuda:99"],
            "--device cuda:99",
        ),
        (["--quant_mode", "float", "--model", DIGITS, "--subset_len", "0"], "subset_len"),
        (
            ["--quant_mode", "test", "--model", DIGITS, "--memory", "1GB"],
            "--memory needs calib mode",
        ),
        (
            ["--quant_mode", "calib", "--model", DIGITS, "--memory", "lots"],
            "'lots' is not a size of memory",
        ),
    ],
)
def test_usage(arguments: list[str], said: str, capsys: Capture) -> None:
    assert run_command(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_selector_that_matches_nothing(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    config = json.loads(Path(EXAMPLE).read_text())
    config["layer_quantize_config"][1]["layer_name"] = "ResNet::ResNet/Conv2d[conv7]/input.2"
    path = tmp_path / "typo.json"
    path.write_text(json.dumps(config, indent=2))
    assert calibrate(tmp_path / "out", config=str(path)) == 2
    said = capsys.readouterr().err
    assert "error QZ402" in said
    assert "Conv2d[conv1]" in said
    assert (
        f"typo.json:{path.read_text()[: path.read_text().index('conv7')].count(chr(10)) + 1}:"
        in said
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "checksums.json").unlink(), "checksums.json does not exist"),
        (lambda f: (f / "checksums.json").write_text("{"), "not a readable JSON file"),
        (lambda f: (f / "checksums.json").write_text("{}"), "is not a list of files"),
        (
            lambda f: (f / "checksums.json").write_text(
                '{"files": {"../a": "", "quant_info.json": ""}}'
            ),
            "has no sha256",
        ),
        (lambda f: (f / "quant_info.json").unlink(), "quant_info.json is missing"),
        (lambda f: (f / "quant_info.json").write_text("{}"), "was changed after calibration"),
        (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors is missing"),
        (
            lambda f: (f / "weights.safetensors").write_bytes(b"x"),
            "was changed after calibration",
        ),
        (lambda f: (f / "ResNet.py").write_text("print()"), "was changed after calibration"),
    ],
)
def test_damaged_results(
    calibrated: Path, damage: Callable[[Path], None], said: str, capsys: Capture
) -> None:
    damage(calibrated)
    assert check(calibrated) == 5
    assert said in one_sentence(capsys)


def test_an_edited_number_in_quant_info(calibrated: Path, capsys: Capture) -> None:
    path = calibrated / "quant_info.json"
    content = json.loads(path.read_text())
    for value in ("wide", 0, [1, 2, 3]):
        content["tensors"]["ResNet::input_0"]["input"]["scale"] = value
        path.write_text(json.dumps(content))
        assert check(calibrated) == 5
        assert "quant_info.json was changed after calibration" in one_sentence(capsys)
    del content["tensors"]["ResNet::input_0"]
    path.write_text(json.dumps(content))
    assert check(calibrated) == 5


def test_another_version_of_torch_is_told(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    model = toy()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.9.1+cu128")
        assert calibrate(tmp_path / "out", model=model, config=None) == 0
    capsys.readouterr()
    assert check(tmp_path / "out", model=model) == 0
    now = torch.__version__.partition("+")[0]
    assert f"calibrated with torch 2.9.1, and this is {now}:" in capsys.readouterr().err


def test_other_weights_are_refused_by_name(
    calibrated: Path, tmp_path: Path, capsys: Capture
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(Path(DIGITS).with_suffix(".safetensors"))
    weights["layer2.0.conv1.weight"][0, 0, 0, 0] += 1e-6
    save_file(weights, tmp_path / "other.safetensors")
    assert check(calibrated, "--weights", str(tmp_path / "other.safetensors")) == 5
    assert "layer2.0.conv1.weight of layer ResNet::ResNet/Sequential[layer2]" in one_sentence(
        capsys
    )


def test_another_model_is_refused_by_layer(calibrated: Path, toy: Toy, capsys: Capture) -> None:
    assert check(calibrated, model=toy()) == 5
    assert "layer Linear::input_0 differs" in one_sentence(capsys)


def test_another_config_is_refused_by_layer(
    calibrated: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = json.loads(Path(EXAMPLE).read_text())
    config["layer_quantize_config"][1]["overall_quantize_config"]["bit_width"] = 7
    path = tmp_path / "other.json"
    path.write_text(json.dumps(config))
    assert check(calibrated, "--config_file", str(path)) == 5
    assert "layer ResNet::ResNet/Conv2d[conv1]/conv2d differs" in one_sentence(capsys)
    path.write_text(
        json.dumps({**json.loads(Path(EXAMPLE).read_text()), "convert_relu6_to_relu": True})
    )
    assert check(calibrated, "--config_file", str(path)) == 5
    assert "convert_relu6_to_relu is True, calibrated with False" in one_sentence(capsys)


def test_a_second_run_in_one_folder_waits_its_turn(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with locked(folder):
        assert calibrate(folder) == 5
        owner = f"process {os.getpid()} on {platform.node()}"
        assert f"out is in use by another run, {owner}\n" in one_sentence(capsys)
        assert calibrate(folder) == 5, "the refused run must not free the folder"


@pytest.mark.parametrize("text", [b"", b"\x1b[2J", b"\xff\n" * 1000])
def test_what_a_lock_holds_is_not_shown_if_it_is_no_line(
    text: bytes, tmp_path: Path, capsys: Capture
) -> None:
    mark_result_folder(tmp_path)
    listed = parse_list((tmp_path / LIST_FILE).read_bytes(), tmp_path)
    work = tmp_path / listed.work_folder
    work.mkdir()
    (work / "lock").write_bytes(text)
    with open(work / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert calibrate(tmp_path) == 5
        assert "is in use by another run\n" in one_sentence(capsys)


def test_the_output_folder_is_a_file(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").write_text("")
    assert calibrate(tmp_path / "out") == 2
    assert "out is not a folder" in one_sentence(capsys)


ONE_CHANNEL = "return torch.nn.Linear(1, 2)"
"""A model whose input has one channel: there are none to compare before the calibration."""
INTERRUPTED = """
state = torch.Generator().manual_seed(0)
batches = [torch.randn(4, 1, generator=state) for _ in range(6)]
for i, batch in enumerate(batches):
    if i == 4 and not __import__("os").path.exists({flag!r}):
        open({flag!r}, "w").close()
        raise KeyboardInterrupt
    yield batch
"""


def test_interrupted_then_resumed_equals_undisturbed(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    flag = tmp_path / "interrupted"
    data = INTERRUPTED.format(flag=str(flag)).strip().replace("\n", "\n    ")
    model, folder = toy(data, ONE_CHANNEL), tmp_path / "out"
    assert calibrate(folder, model=model, config=None) == 130
    assert (
        "calib stopped after 4 batches; --resume continues from there"
        in capsys.readouterr().err
    )
    assert not (folder / "quant_info.json").exists()
    assert calibrate(folder, "--resume", model=model, config=None) == 0
    assert calibrate(tmp_path / "undisturbed", model=model, config=None) == 0
    for name in ("quant_info.json", "statistics.safetensors", "weights.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    assert not list(folder.glob("checkpoint*"))


def test_data_that_could_not_be_loaded_are_gone_on_with(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    failing = INTERRUPTED.replace("KeyboardInterrupt", "OSError('disk gone')").format(
        flag=str(tmp_path / "failed")
    )
    data = failing.strip().replace("\n", "\n    ")
    model, folder = toy(data, ONE_CHANNEL), tmp_path / "out"
    assert calibrate(folder, model=model, config=None) == 4
    said = one_sentence(capsys)
    assert "loading batch 4 of the data of the model's file raised OSError: disk gone" in said
    assert "calib stopped after 4 batches; --resume continues from there" in said
    assert calibrate(folder, "--resume", model=model, config=None) == 0
    assert calibrate(tmp_path / "undisturbed", model=model, config=None) == 0
    assert (folder / "quant_info.json").read_bytes() == (
        tmp_path / "undisturbed" / "quant_info.json"
    ).read_bytes()


def interrupted(toy: Toy, folder: Path, flag: Path) -> str:
    """The model file of a calibration that was interrupted after four batches."""
    data = INTERRUPTED.format(flag=str(flag)).strip().replace("\n", "\n    ")
    model = toy(data, ONE_CHANNEL)
    assert calibrate(folder, model=model, config=None) == 130
    return model


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("checkpoint.calibration.*.safetensors", b"x", "is damaged"),
        ("checkpoint.calibration.json", b"[]", "is damaged"),
        ("checkpoint.calibration.json", b"{", "not a readable JSON file"),
    ],
)
def test_a_damaged_checkpoint(
    toy: Toy, tmp_path: Path, capsys: Capture, name: str, content: bytes, said: str
) -> None:
    model = interrupted(toy, tmp_path / "out", tmp_path / "flag")
    capsys.readouterr()
    for path in (tmp_path / "out").glob(name):
        path.write_bytes(content)
    more = ("--resume", "--overwrite")
    assert calibrate(tmp_path / "out", *more, model=model, config=None) == 5
    assert said in one_sentence(capsys)
    assert calibrate(tmp_path / "out", "--overwrite", model=model, config=None) == 0


@pytest.mark.parametrize("data", ["return [torch.ones(4, 1)] * 9", "return [torch.ones(4, 1)]"])
def test_other_data_than_the_checkpoints(
    toy: Toy, tmp_path: Path, capsys: Capture, data: str
) -> None:
    interrupted(toy, tmp_path / "out", tmp_path / "flag")
    capsys.readouterr()
    assert (
        calibrate(tmp_path / "out", "--resume", model=toy(data, ONE_CHANNEL), config=None) == 5
    )
    assert "the data differ" in one_sentence(capsys)


@pytest.mark.parametrize("mode", ["test", "float"])
def test_resuming_goes_with_calibration(
    toy: Toy, tmp_path: Path, capsys: Capture, mode: str
) -> None:
    run = [
        "--quant_mode",
        mode,
        "--model",
        toy(),
        "--output_dir",
        str(tmp_path / "out"),
        "--resume",
    ]
    assert run_command(run) == 2
    assert "--resume needs calib mode" in one_sentence(capsys)


def test_resume_without_a_checkpoint_says_so(toy: Toy, tmp_path: Path, capsys: Capture) -> None:
    assert calibrate(tmp_path / "out", "--resume", model=toy(), config=None) == 0
    assert "there is no checkpoint" in capsys.readouterr().err


def test_interrupted_inside_a_batch(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that only some observers saw counts for none."""
    from quantizer.observers import Observer

    model = toy(
        "g = torch.Generator().manual_seed(0); return [torch.randn(4, 3, generator=g) for _ "
        "in range(4)]"
    )
    original, seen = Observer.observe, []

    def broken_off(self: Observer, x: Tensor, companion: Observer | None = None) -> None:
        seen.append(x)
        # Weights, bias, then input and output of two batches, the input of the third
        if len(seen) == 7:
            raise KeyboardInterrupt
        original(self, x, companion)

    monkeypatch.setattr(Observer, "observe", broken_off)
    assert calibrate(tmp_path / "out", model=model, config=None) == 130
    monkeypatch.setattr(Observer, "observe", original)
    assert calibrate(tmp_path / "out", "--resume", model=model, config=None) == 0
    assert calibrate(tmp_path / "undisturbed", model=model, config=None) == 0
    for name in ("quant_info.json", "statistics.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (
            tmp_path / "undisturbed" / name
        ).read_bytes()


def test_a_checkpoint_of_another_run_is_refused(
    toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    flag = tmp_path / "interrupted"
    data = INTERRUPTED.format(flag=str(flag)).strip().replace("\n", "\n    ")
    assert calibrate(tmp_path / "out", model=toy(data, ONE_CHANNEL), config=None) == 130
    capsys.readouterr()
    other = toy(data, "return torch.nn.Sequential(torch.nn.Linear(1, 4))")
    assert calibrate(tmp_path / "out", "--resume", model=other, config=None) == 5
    assert "run without --resume" in one_sentence(capsys)


def test_killed_at_every_write(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Old results stay until new ones are whole."""
    model, folder = toy(), tmp_path / "out"
    assert calibrate(folder, model=model, config=None) == 0
    names = ["weights", "statistics", "plan.json", "config.resolved", "Linear.py", "quant_info"]
    for name in names:
        original = os.replace

        def killed(
            source: str,
            target: Path,
            name: str = name,
            original: Callable[..., None] = original,
        ) -> None:
            if Path(target).name.startswith(name):
                raise KeyboardInterrupt
            original(source, target)

        monkeypatch.setattr(system_calls.os, "replace", killed)
        assert calibrate(folder, model=model, config=None) == 130
        monkeypatch.setattr(system_calls.os, "replace", original)
        capsys.readouterr()
        assert check(folder, model=model) == 0, name
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == [LIST_FILE], "no temporary file stays"
    assert calibrate(folder, model=model, config=None) == 0
    assert check(folder, model=model) == 0


@pytest.mark.slow
def test_disk_full(toy: Toy, tmp_path: Path) -> None:
    """A file size limit stands for a full disk: the write fails with an OSError in the
    middle. What the process prints is shorter.
    """
    model = toy(model="return torch.nn.Linear(3, 300)")
    command = ["--quant_mode", "calib", "--model", model, "--output_dir", str(tmp_path / "out")]
    done = fresh_processes.run(QUANTIZER, *command, cwd=tmp_path, file_size=2000)
    assert done.returncode == 5, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "quant_info.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_in_a_real_process(
    toy: Toy, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    # Tracing reads one batch, so ten are read in the calibration
    started = tmp_path / "started"
    data = (
        "import time, pathlib\n    for i in range(1200):\n        time.sleep(0.05)\n        "
        "yield torch.ones(4, 1)\n"
        f"        if i == 9: pathlib.Path({str(started)!r}).touch()"
    )
    command = ["--quant_mode", "calib", "--model", toy(data, ONE_CHANNEL)]
    process = fresh_processes.FreshProcess(
        QUANTIZER, *command, "--output_dir", str(tmp_path / "out"), cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(sent)
    done = process.finished(30)
    said = done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert "--resume continues from there" in said
    assert not (tmp_path / "out" / "quant_info.json").exists()


SLOW = """import pathlib, time
try:
    pathlib.Path("imported").touch()
    time.sleep(20)
except BaseException:  # as some packages do
    pass
"""


@pytest.mark.parametrize("package", ["click", "torch"])
def test_an_interrupt_while_packages_are_imported(package: str, tmp_path: Path) -> None:
    """An exception may be swallowed there, or become another one."""
    (tmp_path / f"{package}.py").write_text(SLOW)
    paths = os.pathsep.join([str(tmp_path), str(Path(quantizer.__file__).parents[1])])
    command = [sys.executable, "-m", "quantizer", "--quant_mode", "calib", "--model", "net.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "imported").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=15)
    assert (process.returncode, said) == (130, "interrupted\n")


WORKER = """
    import os, signal
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 40:
                END
            return torch.ones(3)

    return DataLoader(Samples(), batch_size=4, num_workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_a_worker_of_the_loader_that_ends_is_told(end: str, toy: Toy, tmp_path: Path) -> None:
    """torch raises that by a signal, wherever this process is just then."""
    model = toy(WORKER.strip().replace("END", end))
    command = ["--quant_mode", "calib", "--model", model, "--output_dir", str(tmp_path / "out")]
    done = fresh_processes.run(QUANTIZER, *command, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "DataLoader worker" in done.stderr
    assert "help: the worker may have run out of memory" in done.stderr
    assert "internal error" not in done.stderr


BROKEN_CONNECTION = """
    from multiprocessing import connection
    from torch.utils.data import DataLoader

    def fails(*_):
        raise ERROR

    fails.__code__ = fails.__code__.replace(co_filename=connection.__file__)

    class Loader(DataLoader):
        def __iter__(self):
            batches = super().__iter__()
            batches._next_data = fails
            return batches

    return Loader(torch.ones(8, 3), batch_size=4)
"""


@pytest.mark.parametrize(
    "error", ["ConnectionResetError", "EOFError", "ConnectionRefusedError"]
)
def test_a_connection_to_a_worker_that_breaks_is_told(
    error: str, toy: Toy, tmp_path: Path, capsys: Capture
) -> None:
    """The connection can break before torch's signal arrives."""
    model = toy(BROKEN_CONNECTION.strip().replace("ERROR", error))
    out = ["--output_dir", str(tmp_path / "out")]
    assert run_command(["--quant_mode", "calib", "--model", model, *out]) == 4
    messages = capsys.readouterr().err
    assert "a DataLoader worker ended before its batch was read" in messages
    assert "help: the worker may have run out of memory" in messages


def test_the_end_of_a_worker_is_told_wherever_it_is_raised(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise RuntimeError(
            "DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost."
        )

    monkeypatch.setattr(session, "open_model", raises)
    assert run_command(["inspect", "--model", toy()]) == 4
    assert (
        "error: DataLoader worker (pid 7) exited unexpectedly with exit code 3\nhelp:"
        in capsys.readouterr().err
    )


def test_a_width_that_is_no_number_is_none(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "x")
    assert run_command(["inspect", "--model", toy(), "--names", "exact"]) == 0
    assert "Linear::Linear/linear" in capsys.readouterr().out


@pytest.mark.slow
def test_a_pattern_that_would_never_end_is_refused(
    toy: Toy, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two seconds in earnest
    monkeypatch.setattr("quantizer.plan.selected.MATCHING_S", 0.2)
    assert run_command(["inspect", "--model", toy(), "--filter", "re:(.*)*(.*)*(a+)+$"]) == 2
    assert "takes more than 0.2 s to match names of layers" in one_sentence(capsys)
