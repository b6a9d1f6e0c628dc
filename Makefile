# Every target sets up .venv by itself; nothing is installed again until the requirements change.

PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
RUNS := .venv/runs.stamp
INSTALLED := .venv/installed.stamp

# Tests start many processes, which compile the package again where none of them may keep that.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo fit-page test test-all test-cuda-fake newest families bench lint sanitize browser wheels clean

demo: $(RUNS)
	$(BIN)/twinstream demo

# What 20 cards can do with 30 models, as one page (docs/seeing.md): some 50 CPU minutes; it goes on where it was stopped.
FIT_PAGE ?= fit.html

fit-page: $(INSTALLED)
	$(BIN)/python -m benchmarks.fit_page $(FIT_PAGE)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--durations=0 --durations-min=5

# Those of tests/slow.txt, too.
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not bench"

# The newest versions that pyproject.toml allows, without torch: planning and simulating need none.
newest:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet .
	rm -rf build twinstream.egg-info
	.venv-newest/bin/python -I tests/newest_versions.py

# The CUDA path on a CUDA build of torch above a device that is host memory (tests/cuda_fake/README.md):
# 4 to 6 GB of wheels in a virtual environment of their own, gcc, and nvcc's headers of CUDA 13.0.
CUDA_TORCH ?= torch==2.11.0  # the oldest that is allowed; 2.14.1 has been run, too

test-cuda-fake: .venv-cuda/installed.stamp
	.venv-cuda/bin/python -m tests.cuda_fake

.venv-cuda/installed.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	{ grep -v -E '^(torch|triton|setuptools)==' constraints.txt; echo '$(CUDA_TORCH)'; } >.venv-cuda/constraints.txt
	.venv-cuda/bin/python -m pip install '$(CUDA_TORCH)'
	.venv-cuda/bin/python -m pip install --constraint .venv-cuda/constraints.txt --editable '.[dev,train]'
	touch $@

# Families of decoders under another transformers, in a folder before .venv's packages: twelve with the
# newest that is allowed; TRANSFORMERS=4.57.0 is the oldest, FAMILIES= all of them, and a page of them.
TRANSFORMERS ?=
FAMILIES ?= --few

families: $(INSTALLED)
	rm -rf .venv-families
	mkdir .venv-families
	grep -v -E '^(transformers|tokenizers|huggingface.hub|safetensors)==' constraints.txt \
		>.venv-families/constraints.txt
	$(BIN)/python -m pip install --quiet --target .venv-families/packages \
		--constraint .venv-families/constraints.txt \
		'transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))'
	PYTHONPATH=.venv-families/packages $(BIN)/python -m tests.traced.families_page $(FAMILIES)

bench: $(INSTALLED)
	$(BIN)/python -m pytest -m bench -o faulthandler_timeout=3600

# The small GPU tests under compute-sanitizer; says so where there is none, or no GPU.
sanitize: $(INSTALLED)
	$(BIN)/python -m tests.executor.sanitize

# A browser for the tests that look at pages; without one they are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		command -v google-chrome >/dev/null || \
		{ command -v apt-get >/dev/null && apt-get update -q && \
		apt-get install -qy --no-install-recommends chromium; }

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "" tests/contract/test_types.py

# What a lent GPU machine lacks, for its Python; benchmarks/gpu/README.md says how they travel. Other
# folders have cuDNN's frontend, and flash-attn 4 in two parts, each for a call of 64 MiB.
WHEELS := annotated-types highspy pydantic pydantic-core simpy typing-extensions typing-inspection
FLASH4 := flash-attn-4==4.0.0b36 quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 \
	torch-c-dlpack-ext==0.1.5 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 \
	nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1
WHEELS_PYTHON ?= 3.12
DOWNLOAD := -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
	--python-version $(WHEELS_PYTHON) --platform manylinux_2_28_x86_64 \
	--platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
	--platform manylinux2014_x86_64

wheels:
	rm -rf .whl .carry/cudnn .carry/flash4-1 .carry/flash4-2
	$(PYTHON) $(DOWNLOAD) --dest .whl nvidia-ml-py \
		$$(for name in $(WHEELS); do grep "^$$name==" constraints.txt; done)
	$(PYTHON) $(DOWNLOAD) --dest .carry/cudnn nvidia-cudnn-frontend==1.18.0
	mkdir -p .carry/flash4-2
	$(PYTHON) $(DOWNLOAD) --pre --dest .carry/flash4-1 $(FLASH4)
	cd .carry/flash4-1 && sha256sum *.whl >SHA256SUMS && for wheel in *_libs_cu13-*.whl; do \
		test ! -e $$wheel || { split -b 36M $$wheel $$wheel.part- && rm $$wheel && \
		mv $$wheel.part-a[b-z] ../flash4-2/; }; done

clean:
	rm -rf .venv .venv-cuda .venv-newest .venv-families .whl build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What runs need and no more. torch goes in first, by its exact pin, so that no other package asks for
# another torch. Without build isolation the build uses the pinned setuptools too.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "twinstream needs Python 3.11 or newer, and '$(PYTHON)' is not;" \
			"name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "installing torch and what twinstream needs into .venv; this takes some minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)" "$$(grep '^setuptools==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable '.[executor]'
	touch $@

$(INSTALLED): $(RUNS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable '.[executor,dev]'
	touch $@
