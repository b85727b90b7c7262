"""Batch normalisation as a layer that chooses its kernels: channel by channel, channels last, or torch's."""

from __future__ import annotations

from torch import Tensor, nn

from .compiling import takes
from .norm import ACTS_OF_TORCH, Rule, batch_norm
from .norm_last import batch_norm_last


class BatchNorm(nn.BatchNorm2d):
    """torch's layer, with the kernels in training. What is added to it and an activation come along."""

    def forward(self, input: Tensor, act: str = "", plus: Tensor | None = None) -> Tensor:
        if takes(input) and self.training and self.momentum is not None and self.num_batches_tracked is None:
            rule = Rule((self.running_mean, self.running_var), self.momentum, self.eps, act)
            y = batch_norm_last(input, self.weight, self.bias, rule, plus)
            if y is not None:
                return y
            if plus is None:
                return batch_norm(input, self.weight, self.bias, rule)
            y = batch_norm(input, self.weight, self.bias, rule._replace(act=""))
        else:
            y = super().forward(input)
        return ACTS_OF_TORCH[act](y if plus is None else plus + y)
