"""What reading files of images adds."""

from quantizer.declarations import DataKind, Plugin

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")

PLUGIN = Plugin(
    "images",
    rank=22,
    data=(
        DataKind(
            "images",
            "image",
            "quantizer.sources.images.images:open_images",
            SUFFIXES,
            form="a folder of images",
            options={
                "preprocess": "How images are resized and normalized: JSON text or a file."
            },
            refusal=("the data is not images", "leave out the option"),
            has_class_folders=True,
        ),
    ),
    packages={"images": ("PIL",)},
)
