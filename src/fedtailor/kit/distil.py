"""Learning from another network's predictions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of two networks' logits: summed over classes, mean over images.

    The teacher is taken as it is: the gradient is the student's alone.
    """
    return F.kl_div(student.log_softmax(1), teacher.detach().log_softmax(1), reduction="batchmean", log_target=True)
