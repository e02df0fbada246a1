# Every target works as the first command on a clean machine: what it needs, it sets up.
# The network is used by pip only.

VENV  ?= .venv
PY    := $(VENV)/bin/python
PYTHONS := python3 python3.13 python3.12 python3.11
STAMP := $(VENV)/.setup-done
# Linux: PyPI's torch may be a large CUDA build. For the small one:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP_INSTALL  = $(PY) -m pip install -qq --disable-pip-version-check \
               $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
say          = @printf '\n== %s\n'

.DEFAULT_GOAL := help
.PHONY: help setup lab demo test test-long test-browser train lint format notebooks site bench gpu-check tune accuracy clean distclean

help:  ## print this list
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## make .venv and install the course in it (quick the second time)

$(STAMP): pyproject.toml constraints.txt
	@for python in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found=$$python; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python 3.11 or newer found as $(if $(PYTHON),$(PYTHON),$(PYTHONS)). Install one, or: make setup PYTHON=/path/to/python3.12"; \
	  exit 1; \
	fi; \
	if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  printf '\n== %s\n' "making $(VENV) with $$("$$found" --version)"; \
	  if ! "$$found" -m venv --clear $(VENV) >/dev/null 2>&1; then \
	    rm -rf $(VENV); \
	    echo "'$$found -m venv' failed. On Debian or Ubuntu: sudo apt install python3-venv (then run make again)."; \
	    exit 1; \
	  fi; \
	fi
	$(say) "installing mamba_teach and what it needs into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev]' -c constraints.txt
	@touch $(STAMP)

lab: setup  ## open the course in JupyterLab (LAB_ARGS=--no-browser, ... for its options)
	$(say) "starting JupyterLab (stop it with Ctrl-C)"
	@$(PY) -m jupyterlab notebooks/00_start_here.ipynb $(LAB_ARGS)

demo: setup  ## the engine in the terminal, in under a minute
	@$(PY) -m mamba_teach demo

test: setup lint  ## lint, types, tests, and every notebook against its committed outputs
	$(say) "tests"
	@$(PY) -m pytest tests/
	$(say) "notebooks: run again, outputs compared"
	@$(PY) -m pytest --nbval --nbval-cell-timeout 120 --nbval-current-env \
	  --nbval-sanitize-with tests/notebooks/sanitize.cfg notebooks/

test-long: setup  ## the state machines for about ten minutes, on new examples each time
	@$(PY) -m pytest tests/cache/test_ghost_machine.py --hypothesis-profile=long

test-browser: setup  ## the players in a real browser (Debian: chromium and chromium-driver)
	@$(PIP_INSTALL) -e '.[dev,browser]' -c constraints.txt
	$(say) "tests in Chromium"
	@$(PY) -m pytest tests/viz/test_browser.py

train: setup  ## train the small wordmath model again (TRAIN_ARGS=... for its options)
	$(say) "training wordmath"
	@$(PY) -m mamba_teach.wordmath.train $(TRAIN_ARGS)

lint: setup  ## ruff and mypy
	$(say) "ruff"
	@$(PY) -m ruff check .
	$(say) "mypy"
	@$(PY) -m mypy

format: setup  ## let ruff sort imports and lay out the code (notebooks' layout is left alone)
	@$(PY) -m ruff check --fix-only --quiet . && $(PY) -m ruff format .

notebooks: setup  ## run notebooks from clean kernels and save their outputs (NB=notebooks/03_x.ipynb for one)
	$(say) "running notebooks"
	@$(PY) tools/run_notebooks.py $(NB)

site: setup  ## the course as web pages in site/: no server, no network (SITE_ARGS=... for its options)
	@$(PIP_INSTALL) -e '.[dev,site]' -c constraints.txt
	$(say) "building the pages"
	@$(PY) tools/build_site.py $(SITE_ARGS)
	$(say) "checking them"
	@$(PY) -m pytest -q tests/site

accuracy: setup  ## 500 problems in every mode, with and without drafts and graphs: the same tokens?
	$(say) "comparing modes on held-out problems"
	@$(PY) benchmarks/accuracy_matrix.py $(ACCURACY_ARGS)

bench: setup  ## the engine on a CPU against transformers and a minimal model (BENCH_ARGS=... for its options)
	$(say) "measuring on the CPU; some ten minutes"
	@$(PY) benchmarks/cpu_bench.py $(BENCH_ARGS)

gpu-check: setup  ## kernels and engine checked and timed on a GPU (GPU_CHECK_ARGS=... for its options)
	$(say) "checking on the GPU"
	@$(PY) benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

tune: setup  ## measure launch configurations on a GPU and rewrite the tuning table (TUNE_ARGS=...)
	$(say) "tuning"
	@$(PY) tools/tune.py $(TUNE_ARGS)

clean:  ## remove caches and build output
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	@find . -path './$(VENV)' -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	  -prune -exec rm -rf {} +

distclean: clean  ## remove the virtual environment too
	@rm -rf $(VENV)
