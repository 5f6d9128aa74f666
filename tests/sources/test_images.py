"""Image folders as data: labels, order, preprocessing to the pixel, and images that cannot be
used.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantizer.errors import DataError, UsageError
from quantizer.installation import pip_line
from quantizer.sources.data import load_batches
from quantizer.sources.images.images import parse_preprocess, read_image

Image = pytest.importorskip("PIL.Image", reason="needs quantizer-torch[images]")

PLAIN = {"mean": [0, 0, 0], "std": [1, 1, 1]}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def paint(
    path: str, colour: tuple[int, int, int] = (255, 0, 51), size: tuple[int, int] = (6, 4)
) -> None:
    """Write an image of one colour."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def only(preprocess: dict[str, Any], spec: str = "d", **options: Any) -> Any:
    """The only batch of an image folder."""
    told = {"preprocess": json.dumps(preprocess)}
    (batch,) = load_batches(spec, options=told, **options)
    return batch


def refusal(preprocess: str | None, spec: str = "d") -> DataError | UsageError:
    with pytest.raises((DataError, UsageError)) as caught:
        list(load_batches(spec, options=preprocess and {"preprocess": preprocess}))
    return caught.value


def test_pixels_are_scaled_then_normalised() -> None:
    paint("d/a.png")
    x: Tensor = only({"mean": [0.5, 0.5, 0.1], "std": [0.5, 0.25, 0.1]}).args[0]
    assert x.shape == (1, 3, 4, 6)
    assert torch.allclose(x[0, :, 0, 0], torch.tensor([1.0, -2.0, 1.0]))


def test_resize_takes_the_shorter_side_and_crop_the_centre() -> None:
    Path("d").mkdir()
    image = Image.new("RGB", (8, 4))
    image.putdata([(x * 10, y * 10, 0) for y in range(4) for x in range(8)])
    image.save("d/a.png")
    x = only({**PLAIN, "crop": 2}).args[0][0] * 255
    assert x[0].round().tolist() == [[30, 40], [30, 40]]
    assert x[1].round().tolist() == [[10, 10], [20, 20]]
    assert only({**PLAIN, "resize": 2}).args[0].shape == (1, 3, 2, 4)
    assert only({**PLAIN, "resize": 6, "crop": 5, "interpolation": "nearest"}).args[
        0
    ].shape == (1, 3, 5, 5)


def test_one_mean_reads_grey_images() -> None:
    paint("d/a.png", (51, 51, 51))
    assert only({"mean": [0.0], "std": [0.2]}).args[0].unique().tolist() == pytest.approx([1.0])


def test_class_folders_give_labels_in_sorted_order() -> None:
    for number, name in enumerate(["zebra", "ant", "newt"]):
        for copy in range(3):
            paint(f"d/{name}/{copy}.png", (number, 0, 0))
    Path("d/notes").mkdir()
    batch = only(PLAIN)
    colours = (batch.args[0][:, 0, 0, 0] * 255).round().int().tolist()
    assert batch.target.tolist() == [{1: 0, 2: 1, 0: 2}[colour] for colour in colours]
    assert torch.equal(batch.raw[1], batch.target)


def test_a_subset_is_drawn_over_the_classes_by_the_seed() -> None:
    for label in range(10):
        paint(f"d/{label}/a.png", (label, 0, 0))
    drawn = [only(PLAIN, subset_len=5, seed=seed).target.tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert max(drawn[0]) > 4


def test_flat_folders_and_globs_have_no_labels() -> None:
    paint("d/a.png")
    paint("d/b.JPG")
    assert only(PLAIN).target is None
    assert only(PLAIN, "d/*").size == 2
    assert only(PLAIN, "d/a.png").size == 1


def test_preprocessing_is_never_guessed() -> None:
    paint("d/a.png")
    error = refusal(None)
    assert isinstance(error, UsageError)
    assert error.help is not None
    assert parse_preprocess(error.help.split("'")[1]).crop == 224


def test_preprocessing_may_stand_in_a_file() -> None:
    Path("p.json").write_text(json.dumps({**PLAIN, "resize": 2}))
    assert parse_preprocess("p.json").resize == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("missing.json", "--preprocess missing.json cannot be read"),
        ("{", "--preprocess:1:2 is not JSON"),
        ("{" * 100_000, "--preprocess:1"),
        ("{}", "'mean' is missing"),
        (f'{{"mean": [1{"0" * 400}], "std": [1]}}', "'mean' must be a list of one or three"),
        (f'{{"mean": [1], "std": [1{"0" * 60}]}}', "'std' must be a list of one or three"),
        ('{"mean": [0], "std": [1], "crops": 3}', "unknown key 'crops'"),
        ('{"mean": [0], "std": [1], "crop": 0}', "'crop' must be a number of pixels, not 0"),
        ('{"mean": [0], "std": [1], "resize": true}', "'resize' must be a number of pixels"),
        ('{"mean": [0], "std": [0]}', "'std' must be a list of one or three positive numbers"),
        ('{"mean": [NaN], "std": [1]}', "'mean' must be"),
        ('{"mean": [0, 0], "std": [1, 1]}', "'mean' must be a list of one or three numbers"),
        ('{"mean": [0], "std": [1, 1, 1]}', "must have the same length"),
        (
            '{"mean": [0], "std": [1], "interpolation": "cubic"}',
            "'interpolation' must be one of nearest, bilinear",
        ),
    ],
)
def test_preprocessing_that_makes_no_sense(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_preprocess(text)
    assert sentence in caught.value.message


def test_images_that_cannot_be_used_are_named() -> None:
    Path("d").mkdir()
    Path("d/a.png").write_bytes(b"no image")
    assert "a.png cannot be read as an image" in refusal(json.dumps(PLAIN)).message
    paint("whole.png", size=(200, 200))
    Path("d/a.png").write_bytes(Path("whole.png").read_bytes()[:100])
    assert "a.png cannot be read as an image" in refusal(json.dumps(PLAIN)).message
    paint("d/a.png", size=(6, 4))
    assert (
        "a.png is 6x4, smaller than the crop of 5"
        in refusal(json.dumps({**PLAIN, "crop": 5})).message
    )
    paint("d/b.png", size=(4, 6))
    assert "the images differ in size" in refusal(json.dumps(PLAIN)).message


def test_images_beside_class_folders_are_ambiguous() -> None:
    paint("d/a.png")
    paint("d/cat/a.png")
    assert "holds images and folders of images" in refusal(json.dumps(PLAIN)).message


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    paint("d/a.png")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    error = refusal(json.dumps(PLAIN))
    assert (error.message, error.help) == ("reading images needs pillow", pip_line("images"))


def test_stopping_early_ends_the_reading_thread() -> None:
    for number in range(20):
        paint(f"d/{number}.png")
    before = threading.active_count()
    reading = iter(load_batches("d", options={"preprocess": json.dumps(PLAIN)}, batch_size=1))
    next(reading)
    assert threading.active_count() == before + 1
    reading.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_file_that_is_no_raster_image_is_not_opened_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("d").mkdir()
    Path("d/a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    )
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen", lambda *args, **settings: started.append(args))
    assert "d/a.png cannot be read as an image" in refusal(json.dumps(PLAIN)).message
    assert not started


@pytest.mark.parametrize(
    ("size", "preprocess", "said"),
    [
        ((200, 1), {"resize": 32}, "d/a.png would have 6400 x 32 pixels, more than 100000"),
        ((401, 400), {}, "d/a.png would have 401 x 400 pixels, more than 100000"),
    ],
)
def test_a_small_file_cannot_ask_for_any_number_of_pixels(
    size: tuple[int, int], preprocess: dict[str, Any], said: str
) -> None:
    paint("d/a.png", size=size)
    settings = {**PLAIN, **preprocess, "max_pixels": 100_000}
    error = refusal(json.dumps(settings))
    assert (said, "max_pixels") == (
        error.message,
        "max_pixels" if "max_pixels" in (error.help or "") else "",
    )
    assert only({**settings, "max_pixels": 1_000_000}).args[0].numel() > 300_000
    before = Image.MAX_IMAGE_PIXELS
    assert only({**settings, "max_pixels": 1_000_000}) and before == Image.MAX_IMAGE_PIXELS


def grey(value: float, mode: str, name: str, **options: Any) -> float:
    """The pixel of a grey image of one value, as three channels have it."""
    Path("d").mkdir(exist_ok=True)
    for path in Path("d").iterdir():
        path.unlink()
    Image.new(mode, (4, 4), value).save(f"d/{name}", **options)
    x = only({**PLAIN, "resize": 2, "crop": 2}).args[0]
    assert x.shape == (1, 3, 2, 2)
    [pixel] = x.unique().tolist()
    return float(pixel)


@pytest.mark.parametrize(
    ("value", "mode", "name", "expected"),
    [
        (16384, "I;16", "a.png", 16384 / 65535),
        (16384, "I;16", "a.tif", 16384 / 65535),
        (16384, "I;16B", "a.tif", 16384 / 65535),
        (16384, "I;16", "a.pgm", 16384 / 65535),
        (0.25, "F", "a.tif", 0.25),
        (1, "1", "a.png", 1.0),
        ((51, 9), "LA", "a.png", 0.2),
        ((0, 0, 0, 204), "CMYK", "a.tif", 0.2),
    ],
)
def test_pixels_of_every_mode_keep_their_value(
    value: Any, mode: str, name: str, expected: float
) -> None:
    assert grey(value, mode, name) == pytest.approx(expected, abs=1e-6)


def test_white_may_be_zero_and_bits_may_be_fewer_than_sixteen() -> None:
    assert grey(16384, "I;16", "a.tif", tiffinfo={262: 0}) == pytest.approx(1 - 16384 / 65535)
    twelve = Image.new("I;16", (4, 4), 1024)
    twelve.format, twelve.tag_v2 = "TIFF", {258: (12,)}
    assert parse_preprocess(json.dumps(PLAIN))(twelve).unique().tolist() == pytest.approx(
        [1024 / 4095]
    )


@pytest.mark.filterwarnings("error")
def test_a_palette_with_transparency_has_its_colours() -> None:
    Path("d").mkdir()
    image = Image.new("P", (4, 4), 1)
    image.putpalette([9, 9, 9, 51, 102, 153])
    image.save("d/a.png", transparency=b"\x80\x00")
    image.convert("PA").save("d/b.tif")
    for pixels in only(PLAIN).args[0]:
        assert pixels[:, 0, 0].tolist() == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize(
    ("value", "mode", "said"),
    [
        (-3, "I", "d/a.tif has signed or 32-bit integers as pixels"),
        (213.5, "F", "d/a.tif has float pixels from 213.5 to 213.5"),
        (-0.25, "F", "d/a.tif has float pixels from -0.25 to -0.25"),
        (float("nan"), "F", "d/a.tif has float pixels from nan to nan"),
    ],
)
def test_pixels_without_a_known_white_are_refused(value: float, mode: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        grey(value, mode, "a.tif")
    assert caught.value.message.startswith(said)
    assert "8 or 16 bits" in (caught.value.help or "")


def test_images_of_rows_keep_their_values_and_are_not_too_large() -> None:
    Image.new("I;16", (4, 4), 16384).save("a.png")
    assert read_image(Path("a.png"), "a.png").getpixel((0, 0)) == (64, 64, 64)
    Image.new("1", (8001, 8000)).save("b.png")
    with pytest.raises(DataError, match=r"b.png would have 8001 x 8000 pixels"):
        read_image(Path("b.png"), "b.png")


def test_a_mean_of_pixels_up_to_255_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parse_preprocess('{"mean": [123.7, 116.3, 103.5], "std": [58.4, 57.1, 57.4]}')
    assert "a mean of 123.7 is for pixels from 0 to 255" in caplog.text
