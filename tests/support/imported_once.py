"""What every rank and command of a test would import for itself, which takes most of its start.

Where a process can be forked safely, one imports this module for all, and the ranks are its copies. What is
missing here a rank imports when it needs it.
"""

import gc
import inspect
import os

import matplotlib.figure  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import tutti.api
import tutti.cli.main
import tutti.launch.launch
import tutti.launch.ranks
import tutti.launch.supervise  # noqa: F401
from tutti.execution import collector

inspect.stack()  # torch's elastic agent asks for it, and the first call reads where every module lies
gc.collect()
gc.freeze()  # a collector that visits an object copies its page
collector._is_frozen()  # a copy knows it, and counts no objects
# Its own path was put before the path of the test.
_, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)
