"""One thread: on shared cores, two spinning for each other are far slower."""

import torch

torch.set_num_threads(1)
