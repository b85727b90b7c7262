"""Every test process computes with one thread: two cores are shared by pytest's workers. No decoded picture is kept."""

import os

import torch

torch.set_num_threads(1)
os.environ["FEDTAILOR_CACHE"] = "off"
