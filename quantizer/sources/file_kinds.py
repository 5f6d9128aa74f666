"""The kinds of data that a file holds, by its suffix. Reads no file."""

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")
TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")


IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".webp",
    ".ppm",
    ".pgm",
    ".gif",
    ".tif",
    ".tiff",
)
