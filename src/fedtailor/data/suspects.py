"""Labels that look wrong: pictures that a simple classifier, trained on the others, confidently calls something else.

The rule is that of confident learning (Northcutt et al., JAIR 2021): a picture is suspect where another class is at
least as likely as pictures of that class usually are. The classifier sees small pixels only, so it says how good it is,
and where it is not good it accuses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .dataset import Dataset

PICTURES = 3000  # that are judged; more take long and tell little more
SIDE = 16  # pixels that the classifier sees
FEWEST = 6  # pictures of a class
GOOD_ENOUGH = 0.6  # accuracy below which its word counts nothing
MOST = 20  # suspects told


@dataclass(frozen=True)
class Suspect:
    place: int
    label: int
    looks: int
    margin: float  # by how much the other class is more likely


@dataclass(frozen=True)
class Judge:
    """What the classifier found, and how good it is."""

    accuracy: float
    suspects: tuple[Suspect, ...]
    reason: str = ""  # why nobody was judged


def judge(data: Dataset) -> Judge:
    """The most suspect labels of a data set."""
    counts = np.bincount(data.labels, minlength=len(data.classes))
    usable = np.flatnonzero((counts >= FEWEST)[data.labels])
    if (counts >= FEWEST).sum() < 2:
        return Judge(0.0, (), f"labels were not checked: fewer than two classes have {FEWEST} pictures")
    if len(usable) > PICTURES:
        usable = np.sort(np.random.default_rng(0).choice(usable, PICTURES, replace=False))
    labels = data.labels[usable]
    usable = usable[np.bincount(labels, minlength=len(data.classes))[labels] >= 3]  # one for each fold
    classes, own = np.unique(data.labels[usable], return_inverse=True)
    chances = _chances(_features(data.images[usable]), own)
    accuracy = float((chances.argmax(1) == own).mean())
    if accuracy < GOOD_ENOUGH:
        told = f"labels were not checked: the simple classifier is right on {100 * accuracy:.0f} % of the pictures only"
        return Judge(accuracy, (), told)
    usual = np.array([chances[own == k, k].mean() for k in range(len(classes))])
    rows = np.arange(len(own))
    others = np.where(chances >= usual, chances, 0.0)
    others[rows, own] = 0
    looks = others.argmax(1)
    margin = others[rows, looks] - chances[rows, own]
    order = [i for i in np.argsort(-margin, kind="stable")[:MOST] if others[i, looks[i]] > 0 and margin[i] > 0]
    found = [Suspect(int(usable[i]), int(classes[own[i]]), int(classes[looks[i]]), float(margin[i])) for i in order]
    return Judge(accuracy, tuple(found))


def _features(images: np.ndarray) -> np.ndarray:
    """Small pictures as rows: blocks of pixels averaged down to at most SIDE by SIDE."""
    _, height, width, _ = images.shape
    down, across = max(1, height // SIDE), max(1, width // SIDE)
    x = images[:, : height // down * down, : width // across * across].astype(np.float32) / 255
    x = x.reshape(len(x), height // down, down, width // across, across, -1).mean((2, 4))
    return x.reshape(len(x), -1)


def _chances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Probabilities of every class for each picture, from a classifier that did not see it."""
    import warnings

    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits

    model = make_pipeline(PCA(min(50, x.shape[1], len(x) // 2), random_state=0), LinearDiscriminantAnalysis())
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # pictures that are all alike divide by nothing, which is of no weight here
        folds = StratifiedKFold(3, shuffle=True, random_state=0)
        return np.asarray(cross_val_predict(model, x, y, cv=folds, method="predict_proba"))
