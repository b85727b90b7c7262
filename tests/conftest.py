"""Every test process computes with one thread: two cores are shared by pytest's workers."""

import torch

torch.set_num_threads(1)
