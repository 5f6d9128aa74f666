"""The kinds of data that a file holds, by its suffix. Reads no file."""

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")
TENSOR_SUFFIXES = (*WEIGHT_SUFFIXES, ".npy", ".npz")
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
