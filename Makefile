# make train               verify a layout of examples/gpt.py, then train it on two local ranks
# make train ARGS=--resume ... and go on where it stopped
# make bench               tutti next to its peers, side by side (ARGS="--quick": a minute or two)
# make test, make lint     the whole suite; ruff and pyright
# make test-fast           the part of it to run before each commit, in about a minute
# make test-kernels        the tests whose numbers depend on the processor, with the kernels of two others
# make test-oldest         the contracts with PyTorch and a core of the suite, with the oldest PyTorch supported
# make docs                the documentation as a site in site/, every link checked
# make wheel               build the wheel, check it for publication, import and run it from an empty folder
# make venv, make clean    the environment that all of them use; remove it and every cache

PYTHON ?= $(shell python3 .ci/choose_python.py || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Modules are compiled once for every worker, rank and command that a test starts, whatever the environment says.
TESTS := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1
LAYOUT ?= data=2 zero=3
RANKS ?= 2
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: train test test-oldest test-fast test-kernels test-kernels-avx2 test-kernels-plain bench lint style types docs wheel venv clean

train: $(STAMP)
	$(BIN)/tutti verify --layout "$(LAYOUT)" examples/gpt.py
	$(BIN)/tutti run -n $(RANKS) --layout "$(LAYOUT)" examples/gpt.py $(ARGS)

# Four workers for two cores: many tests of runs wait for a time-out, a kill or a rank that is late.
test: $(STAMP)
	$(TESTS) $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# Before each commit: the structure, layouts, graphs, errors, small steps under every layout, and real ranks.
FAST_TESTS := $(addprefix tests/,test_layers.py test_docs.py test_environment.py test_errors.py test_api.py \
    test_zoo.py torch_private layout graph cli checkpoint serving verification/test_small_steps.py)
test-fast: $(STAMP)
	$(TESTS) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(FAST_TESTS) $(ARGS)

# One processor plays others: an x86 of 2013, and one without vectors. What chooses kernels, and whole steps
# in float32 and bf16: in float64 no kernel is chosen, and all of them agree to more digits than a test asks.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
PLAIN := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
# The tests of the choice of kernels run with both; whole steps run with those of AVX2.
CHOOSING_TESTS := tests/graph/ops/test_matmul.py tests/passes/test_onednn.py tests/execution/test_generate.py
KERNEL_TESTS := $(CHOOSING_TESTS) tests/execution/test_precision.py::test_ranks_take_the_steps_of_one_device \
    tests/execution/test_precision.py::test_the_example_trains_as_in_float32 \
    tests/execution/test_training.py::test_a_few_steps_in_float32 \
    tests/execution/test_training.py::test_one_device_trains_as_plain_pytorch

# Side by side, each in one process: a few long tests would leave the second worker of a run without work.
test-kernels: $(STAMP)
	+$(MAKE) --no-print-directory -j 2 test-kernels-avx2 test-kernels-plain

test-kernels-avx2: $(STAMP)
	$(TESTS) $(AVX2) $(BIN)/python -m pytest $(KERNEL_TESTS) $(ARGS)

test-kernels-plain: $(STAMP)
	$(TESTS) $(PLAIN) $(BIN)/python -m pytest $(CHOOSING_TESTS) $(ARGS)

# The oldest PyTorch that pyproject.toml allows, in an environment of its own. On x86 the package index has builds
# with CUDA alone, which take 4.5 GB there; PyTorch's own index has one for CPUs (pytorch.org names it):
#
#     make test-oldest OLDEST_TORCH="torch==2.11.0 --index-url <that index>"
OLDEST_TORCH ?= torch==2.11.0
OLDEST := .venv-oldest
OLDEST_TESTS := tests/torch_private tests/test_api.py tests/state/test_shards.py tests/state/test_whole.py \
    tests/saving/test_checkpoint.py tests/checkpoint/test_allow_list.py tests/capture/test_step.py \
    tests/capture/test_compounds.py tests/capture/test_sorted_rows.py tests/calls/test_read_values.py \
    tests/calls/test_signature.py tests/graph/test_text.py tests/execution/test_direct.py

test-oldest: $(OLDEST)/.installed
	$(TESTS) $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(OLDEST_TESTS) $(ARGS)

$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==\|^setuptools==' constraints.txt >$(OLDEST)/constraints.txt # it wants an older setuptools
	echo $(firstword $(OLDEST_TORCH)) >>$(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet $(OLDEST_TORCH)
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e '.[examples,dev]'
	$(OLDEST)/bin/python -m pip freeze | grep -x '$(firstword $(OLDEST_TORCH))\(+.*\)\?'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.bench $(ARGS)

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

# Pages open from the disk; the search needs a server, such as `python -m http.server -d site`.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# As a user gets it: without the source tree, from a folder that holds nothing.
wheel: $(STAMP)
	rm -rf build/wheel build/installed build/empty
	$(BIN)/python -m pip wheel --quiet --no-deps -w build/wheel .
	$(BIN)/python -m twine check --strict build/wheel/*.whl
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed build/wheel/*.whl
	mkdir build/empty && cd build/empty && export PYTHONPATH=$(CURDIR)/build/installed && \
	    python=$(CURDIR)/$(BIN)/python && $$python -m tutti simulate --help >/dev/null && \
	    $$python -c "import tutti; assert tutti.__file__.startswith('$(CURDIR)/build/'), tutti.__file__; tutti.distribute"

venv: $(STAMP)

# torch first and alone: otherwise another package may choose its build, and that one can be gigabytes.
# What nobody imports is not compiled: most of transformers, half of the time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e '.[examples,dev]'
	touch $@

# The peers that nothing else needs.
$(VENV)/.bench: $(STAMP)
	$(INSTALL) -e '.[bench]'
	touch $@

# What the site needs, and nothing else does.
$(VENV)/.docs: $(STAMP)
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist site .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
