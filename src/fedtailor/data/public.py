"""The public set: unlabelled images that the server and every client may read, and that no client holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import UserError
from ..seeds import rng_of
from .batches import Split
from .dataset import Dataset
from .federation import Store
from .partition import Partition
from .pixels import Reading
from .sources import load

if TYPE_CHECKING:
    from ..config import Public

REST = "rest"


def public_images(
    wanted: Public, data: Dataset, deal: Partition, folder: Path | None, reading: Reading, seed: int
) -> np.ndarray | None:
    """The images of the public set, uint8 [N, H, W, C]; None where the config asks for none. Picture files are read as
    the clients' are."""
    if not wanted.name:
        return None
    held = _prints(data.images[deal.owner >= 0])
    if wanted.name == REST:
        found = data.images[deal.owner < 0]
        if not len(found):
            raise UserError("public.name = 'rest': the partition deals every image. Lower partition.samples.")
        found = found[~np.isin(_prints(found), held)]  # sets hold a few images twice
    else:
        found = load(wanted.name, folder, reading).images
        if found.shape[1:] != data.images.shape[1:]:
            raise UserError(
                f"public.name = '{wanted.name}': its images have shape {found.shape[1:]}, the clients' have "
                f"{data.images.shape[1:]} (height, width, channels). They have to be the same."
            )
        if shared := int(np.isin(_prints(found), held).sum()):
            raise UserError(
                f"public.name = '{wanted.name}': {shared} of its {len(found)} images are clients' own. What clients "
                "hold is never public: give another set, or public.name = 'rest'."
            )
    return _chosen(wanted, found, seed)


def given_images(
    wanted: Public, folder: Path | None, reading: Reading, seed: int, dealt: Callable[[], tuple[Dataset, Partition]]
) -> np.ndarray | None:
    """The same for who has no client's images: clients look whether their own are among them. The run's data and its
    partition are asked for only where the set is their rest."""
    if wanted.name == REST:
        return public_images(wanted, *dealt(), folder, reading, seed)
    return _chosen(wanted, load(wanted.name, folder, reading).images, seed) if wanted.name else None


def require_foreign(images: np.ndarray, own: np.ndarray) -> None:
    """Raises where a client that is given a public set holds some of it, or has images of another shape."""
    if images.dtype != np.uint8 or images.shape[1:] != own.shape[1:]:
        raise UserError(
            f"the run's public images have shape {images.shape[1:]}, this client's {own.shape[1:]} "
            "(height, width, channels). They have to be the same."
        )
    if shared := int(np.isin(_prints(images), _prints(own)).sum()):
        raise UserError(
            f"{shared} of the run's {len(images)} public images are this client's own. What clients hold is never "
            "public: the server has to give another set."
        )


def _chosen(wanted: Public, found: np.ndarray, seed: int) -> np.ndarray:
    if wanted.images > len(found):
        raise UserError(f"public.images = {wanted.images}: there are only {len(found)}.")
    if wanted.images:
        found = found[np.sort(rng_of(seed, "public").choice(len(found), wanted.images, replace=False))]
    return found


def with_public(store: Store, images: np.ndarray | None) -> Store:
    """The clients' store with the public set, normalised like theirs. An image's label is its number in the set."""
    if images is None:
        return store
    own = next(iter(store.ranges.values()))
    device = own.labels.device
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).to(device)
    numbers = torch.arange(len(images), device=device)
    return replace(store, public=Split(pixels, numbers, 0, len(images), own.mean, own.std))


def _prints(images: np.ndarray) -> np.ndarray:
    """The images as one comparable value each."""
    flat = np.ascontiguousarray(images).reshape(len(images), -1)
    return flat.view(np.dtype((np.void, flat.shape[1]))).ravel()
