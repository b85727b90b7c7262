"""CIFAR from the Hugging Face hub: parquet files with one encoded image per row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError, unknown
from .cifar import OFFICIAL
from .dataset import Dataset

LABELS = {"cifar10": "label", "cifar100": "fine_label"}


def load(name: str) -> Dataset:
    """Downloads (once; the hub library keeps its own cache) and reads the set. Where the hub's order of images is not
    the official archive's, the two have different hashes and do not share saved partitions."""
    if name not in LABELS:
        raise unknown("data set on the hub", name, LABELS)
    try:
        import pyarrow  # noqa: F401 - asked for here so that nothing is downloaded that cannot be read
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"data.name = 'hub:{name}' needs the 'hub' extra ({error}). Install it: pip install 'fedtailor[hub]'."
        ) from error
    repo = f"uoft-cs/{name}"
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:  # the library's own errors, its HTTP client's and the system's have no common parent
        raise UserError(
            f"data.name = 'hub:{name}': {repo} could not be downloaded ({error}). Check the network, or use the "
            f"official archive with data.name = '{name}'."
        ) from error
    splits = [sorted(folder.rglob(f"{split}-*.parquet")) for split in ("train", "test")]
    if not all(splits):
        raise UserError(f"{repo}: no parquet files called train-* and test-* in the download ({folder}).")
    parts = [read_parquet(paths, LABELS[name]) for paths in splits]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    official_test = np.repeat([False, True], [len(part[1]) for part in parts])
    return Dataset(f"hub:{name}", images, labels, OFFICIAL[name].classes, official_test)


def read_parquet(paths: Sequence[Path], label: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8 [N, H, W, 3]) and labels of the files in order; the image column is a struct with `bytes`."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    images, labels = [], []
    for path in paths:
        try:
            table = pyarrow.parquet.read_table(path)
            column = "img" if "img" in table.column_names else "image"
            labels.append(table.column(label).to_numpy())
            for row in table.column(column).to_pylist():
                with Image.open(io.BytesIO(row["bytes"])) as image:
                    images.append(np.asarray(image.convert("RGB")))
        except (OSError, KeyError, TypeError, ValueError, SyntaxError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{path}: not a parquet file with encoded images and a column '{label}', or damaged ({error}). "
                "Remove it and download again."
            ) from error
    sizes = {image.shape for image in images}
    if len(sizes) != 1:
        raise UserError(f"{paths[0]}: images of sizes {sorted(sizes)}; all images need one size.")
    return np.stack(images), np.concatenate(labels)
