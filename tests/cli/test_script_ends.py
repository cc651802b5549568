"""Commands that look at a script: whatever it would do after its first training step does not happen."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import forked

BEGIN = """\
import atexit, io, os, sys, tempfile, threading, time
import torch
import tutti

def train_step(model, optimizer, x):
    print("within the step")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

model = torch.nn.Linear(4, 4)
step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.ones(4, 4)
"""
SWALLOWED = """
try:
    step(x)
except:
    sys.exit(3)
"""
GOES_ON = """
for _ in range(3):
    try:
        loss = step(x)
    except:
        continue
print(loss)
"""
SAVED = """
kept = tempfile.TemporaryDirectory(dir=".", prefix="kept")
atexit.register(lambda: open("left", "w"))
try:
    loss = step(x)
finally:
    torch.save(model.state_dict(), "final.pt")
    print(loss.item())
"""
THREADS = """
stop = threading.Event()
threading.Thread(target=stop.wait).start()
step(x)
"""
IN_A_THREAD = """
threading.Thread(target=lambda: (time.sleep(0.2), step(x))).start()
"""
STREAMS = """
import faulthandler
faulthandler.enable(file=sys.stdout)
sys.stdout.reconfigure(line_buffering=True)
os.write(sys.stdout.fileno(), b"noise")
os.system("echo noise")
sys.__stdout__.write("noise")
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
print("noise")
step(x)
"""
WORKERS = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, k):
        return torch.ones(4)

for x in torch.utils.data.DataLoader(Numbers(), 4, num_workers=2):
    step(x)
"""
CHDIR = """
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
step(x)
"""
MAIN = """
def main():
    for _ in range(0 if "--eval" in sys.argv else 1):
        step(x)
    return 0
sys.exit(main())
"""


def tutti(folder: Path, end: str, *words: str) -> Any:
    (folder / "train.py").write_text(BEGIN + end)
    return forked.run(["-m", "tutti", *words], env=dict(os.environ), cwd=folder, timeout=90)


@pytest.mark.parametrize(
    "end",
    [SWALLOWED, GOES_ON, SAVED, THREADS, IN_A_THREAD, STREAMS, WORKERS, MAIN],
    ids=["swallowed", "goes on", "saved", "threads", "in a thread", "streams", "workers", "main"],
)
def test_the_answer_is_that_of_the_first_step(end: str, tmp_path: Path) -> None:
    made = tutti(tmp_path, end, "verify", "--layout", "data=2", "train.py")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith('verify "data=2": ok') and "noise" not in made.stdout
    assert "Traceback" not in made.stderr and "leaked" not in made.stderr
    left = {path.name for path in tmp_path.iterdir()} - {"train.py", "__pycache__"}
    assert not left


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit()"])
def test_no_step(end: str, tmp_path: Path) -> None:
    made = tutti(tmp_path, end, "explain", "train.py")
    assert made.returncode == 2
    assert "train.py ended without calling a training step" in made.stderr


def test_no_step_in_main(tmp_path: Path) -> None:
    made = tutti(tmp_path, MAIN, "explain", "train.py", "--eval")
    assert made.returncode == 2
    assert "train.py ended without calling a training step" in made.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(7)", 7, "train.py ended with exit code 7 before its first training step"),
        ("sys.exit('no data')", 1, "no data\nCaptureError: train.py ended with exit code 1 before"),
        ("{}['key']", 1, "KeyError: 'key'\nCaptureError: train.py ended with exit code 1 before"),
        ("lambda: (", 1, "SyntaxError: '(' was never closed\n"),
        ("tutti.Layout.parse('dta=2')", 2, "LayoutError: unknown word"),
    ],
)
def test_a_failure_before_the_step(end: str, code: int, said: str, tmp_path: Path) -> None:
    stuck = "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    made = tutti(tmp_path, stuck + end, "explain", "train.py")
    assert made.returncode == code and not made.stdout
    assert said in made.stderr
    frames = re.findall(r'File "(.*?)"', made.stderr)
    assert all(path.endswith("train.py") for path in frames)


def test_paths_are_those_of_the_folder_of_the_command(tmp_path: Path) -> None:
    words = "--layout", "data=2", "train.py"
    made = [
        tutti(tmp_path, CHDIR, "verify", "--report", "verdict", *words),
        tutti(tmp_path, CHDIR, "plan", "--devices", "2 x h100", "--save", "plan.json", *words),
        tutti(tmp_path, CHDIR, "simulate", "--devices", "2 x h100", "--trace", "traces", *words),
    ]
    assert [one.returncode for one in made] == [0, 0, 0], [one.stderr for one in made]
    assert list((tmp_path / "verdict").iterdir()) and list((tmp_path / "traces").iterdir())
    assert (tmp_path / "plan.json").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())


MODULE = """
from .net import model
import pickle, sys
import torch
import tutti

class Mine:
    pass

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()

step = tutti.distribute(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1))
step(torch.ones(4, 4))
pickle.loads(pickle.dumps(Mine()))
print(sys.argv, __name__, __package__, __spec__.name)
"""


@pytest.mark.parametrize("command", ["run", "verify", "explain", "plan", "simulate"])
def test_a_module(command: str, tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("import torch\nmodel = torch.nn.Linear(4, 4)\n")
    (package / "train.py").write_text(MODULE)
    words = ["--layout", "data=2"]
    words += ["--devices", "2 x h100"] if command in ("plan", "simulate") else []
    words += ["-m", "project.train", "-m", "own"]
    made = forked.run(
        ["-m", "tutti", command, *words], env=dict(os.environ), cwd=tmp_path, timeout=90
    )
    assert made.returncode == 0 and "stands behind" not in made.stderr, made.stderr
    if command == "run":
        said = [str(package / "train.py"), "-m", "own"]
        assert made.stdout == f"{said} __main__ project project.train\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("project/train.py", "try '-m project.train'"),
        ("project", "there is no module project to run"),
        ("nothing.at.all", "there is no module nothing.at.all to run"),
        ("project.broken", "No module named 'something_else'"),
    ],
)
def test_what_is_no_module(name: str, said: str, tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("import something_else\n")
    words = ["-m", "tutti", "explain", "-m", name]
    made = forked.run(words, env=dict(os.environ), cwd=tmp_path, timeout=90)
    assert made.returncode and said in re.sub(r"[\s│]+", " ", made.stderr)
    assert "runpy" not in made.stderr and "launch/script" not in made.stderr
