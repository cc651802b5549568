"""Freed memory is kept: later steps touch no fresh pages; and left alone when that is asked for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

import forked
from tutti.execution.allocator import Fragments

# Training steps with activations of 8 to 32 MB and gradients of other sizes; prints how many pages a step
# touches for the first time, once it is warm. A block of them may grow once: that is why the median.
SCRIPT = """
import resource, statistics, torch, tutti
torch.set_num_threads(1)
widths = (64, 128, 256, 128, 64)
layers = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
model = torch.nn.Sequential(*layers)

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

step = tutti.distribute(train, model, torch.optim.SGD(model.parameters(), 0.01))
x = torch.randn(131072, 64)  # glibc may keep blocks of up to 32 MiB by itself
touched = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x)
    touched.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(touched[3:])))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_later_steps_touch_few_fresh_pages(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)
    touched = []
    for word in ("1", "0"):
        environment = _environment() | {"TUTTI_KEEP_MEMORY": word}
        done = forked.run([script], env=environment, cwd=tmp_path, timeout=270)
        assert done.returncode == 0, done.stderr
        touched.append(int(done.stdout))
    kept, given_back = touched
    assert kept < 0.3 * given_back


def _environment() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}


def test_memory_in_pieces_is_given_back_once_it_is_a_quarter_more() -> None:
    held, given_back = [100.0], list[float]()

    def give_back() -> None:
        given_back.append(held[0])
        held[0] = 80.0  # what the next step takes again is not in memory at this moment

    fragments = Fragments(give_back, lambda: held[0])
    assert not fragments.before_new_program()
    for held[0], is_more in ((124, False), (125, False), (126, True), (104, False), (131, True)):
        assert fragments.before_new_program() == is_more, held
    assert given_back == [126, 131]


def test_lengths_share_the_memory_of_their_steps(tmp_path: Path) -> None:
    """Of many lengths each keeps its program: far less than the gradients, of which all need as much."""
    script = tmp_path / "lengths.py"
    script.write_text(LENGTHS)
    done = forked.run([script], env=_environment(), cwd=tmp_path, timeout=270)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.6


# A model of 64 MB whose steps have a batch of another length each; prints what they take at most, by what
# three lengths took.
LENGTHS = """
import resource, torch, tutti
torch.set_num_threads(1)

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = held()
model = torch.nn.Sequential(torch.nn.Embedding(30_000, 256), torch.nn.Linear(256, 30_000))

def train(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

step = tutti.distribute(train, model, torch.optim.AdamW(model.parameters()))
for length in range(8, 16):
    step(torch.randint(30_000, (1, length)))
    if length == 10:
        first = held()
print((held() - before) / (first - before))
"""
