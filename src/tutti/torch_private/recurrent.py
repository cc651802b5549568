"""Recurrent layers: PyTorch's entries to its kernels."""

from types import ModuleType

import torch

# The module whose functions `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells call, to patch.
# Why: on a GPU they call cuDNN, which wants the weights in one piece of memory. Public: none; PyTorch's
# decompositions (`torch.export`) drop the dropout between layers.
ENTRIES: ModuleType = torch._VF
