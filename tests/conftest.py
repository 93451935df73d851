"""One thread per process: the models here are tiny, and threads that wait for each other cost more than they add."""

import torch

torch.set_num_threads(1)
