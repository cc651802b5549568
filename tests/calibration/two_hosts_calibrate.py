"""Measures two hosts, of which only the first really measures itself: `two_hosts_calibrate.py FOLDER`."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tutti.calibration import cluster_links
from tutti.planning import hardware_files
from tutti.planning.hardware_files import Measured

PEAK = 2e8  # FLOP/s of the second host: slower than any processor


def given(per_host: int, seconds: float) -> Measured:
    """The second host."""
    figures = {"launch": 1e-6, "call": 1e-3, "start": 0.0, "rate": 1e9, "message": 1e9}
    peaks = dict.fromkeys(("float32", "float64", "bfloat16"), PEAK)
    return Measured("given", per_host, peaks, memory=1e9, bandwidth=1e10, **figures)


if __name__ == "__main__":
    host = int(os.environ["GROUP_RANK"])
    # The process that measures need not import torch: it is copied before this one joins the other host.
    copied = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(1, mp_context=copied, initializer=cluster_links._forget_ranks)
    pool.submit(os.getpid).result()
    cluster_links.ProcessPoolExecutor = lambda *_, **__: pool
    if host == 1:
        cluster_links._alone = given
    found, between = cluster_links.measured_together(0.02)
    if cluster_links.leads_host():
        hardware_files.write(found, Path(sys.argv[1]) / str(host), between)
