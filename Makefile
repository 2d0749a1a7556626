# vllm-ray-operator. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
export PYTHONPATH := operator:.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE :=

SHELL_SCRIPTS := $(shell git ls-files '*.sh' .ci/run)
DOCKERFILES := $(shell git ls-files 'images/*/Dockerfile')

COMPILE := uv pip compile --quiet --generate-hashes --no-annotate --no-header --no-emit-find-links --python-version 3.11
LINUX := --python-platform x86_64-unknown-linux-gnu
ENGINE_LOCK := $(LINUX) --overrides requirements/engine-cpu.overrides.txt

##@ Use it
.PHONY: demo
demo: $(VENV)/.ready ## Bring up Kubernetes, KubeRay and the operator; end with a chat answer (CONTEXT=name: an existing cluster)
	$(PY) -m e2e.demo $(if $(CONTEXT),--context '$(CONTEXT)')

.PHONY: demo-down
demo-down: $(VENV)/.ready ## Take down what the demo brought up
	$(PY) -m e2e.cluster down

##@ Test it
.PHONY: test
test: lint test-unit test-integration test-engine test-e2e ## Run all tests, set-up included

.PHONY: test-unit
test-unit: $(VENV)/.ready ## Pure tests, seconds
	$(PY) -m pytest tests -m 'not integration and not engine and not cluster'

.PHONY: soak-plan
soak-plan: $(VENV)/.ready ## Many random schedules of the planner (SEEDS=20000, FIRST=1000); some 8 a second
	$(PY) -m tests.unit.plan.soak --seeds $(or $(SEEDS),20000) --first $(or $(FIRST),1000)

.PHONY: test-integration
test-integration: $(VENV)/.ready ## A real control plane with KubeRay; no node
	$(PY) -m e2e.run_tests integration

.PHONY: test-engine
test-engine: $(VENV)/.ready ## Real vLLM on real Ray, inside the engine image
	$(PY) -m e2e.run_tests engine

.PHONY: test-e2e
test-e2e: $(VENV)/.ready ## The whole path on a real one-machine cluster
	$(PY) -m e2e.run_tests e2e

.PHONY: matrix
matrix: $(VENV)/.ready ## Real vLLM and Ray in all versions of the matrix; writes docs/compatibility.md (ONLY=vllm=0.32.0: some)
	$(PY) -m e2e.matrix $(if $(ONLY),--only '$(ONLY)')

##@ Keep it clean
.PHONY: lint
lint: $(VENV)/.ready ## Formatting, types, import walls, Dockerfiles, shell, charts, generated files
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy operator/vllm_ray_operator operator/vllm_ray_engine e2e
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint --config .hadolint.yaml $(DOCKERFILES)
	$(VENV)/bin/shellcheck $(SHELL_SCRIPTS)
	$(VENV)/bin/yamllint --strict -c .yamllint.yaml crds examples charts/*/values.yaml charts/*/Chart.yaml
	$(PY) -m e2e.run_tests helm-lint
	$(PY) -m vllm_ray_operator.api.crd --check

.PHONY: generate
generate: $(VENV)/.ready ## Write the generated files: CRDs, chart templates, API docs
	$(PY) -m vllm_ray_operator.api.crd

.PHONY: format
format: $(VENV)/.ready ## Format the code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

.PHONY: lock
lock: $(VENV)/.ready ## Pin the dependencies anew
	$(COMPILE) pyproject.toml -o requirements/operator.txt
	$(COMPILE) pyproject.toml --group dev -o requirements/dev.txt
	$(COMPILE) images/build-tools.in -o images/build-tools.txt
	$(COMPILE) requirements/engine-cpu.in $(ENGINE_LOCK) --find-links ../shared/wheels -o requirements/engine-cpu.txt
	$(COMPILE) requirements/engine-cpu.in $(ENGINE_LOCK) --overrides requirements/engine-cpu-fallback.overrides.txt -o requirements/engine-cpu-fallback.txt
	$(COMPILE) requirements/engine-test.in $(LINUX) -c requirements/engine-cpu.txt -c requirements/dev.txt --find-links ../shared/wheels -o requirements/engine-test.txt

##@ Measure it
.PHONY: bench
bench: $(VENV)/.ready ## Start-up time and memory of the operator
	$(PY) -m e2e.run_tests bench

.PHONY: kill-campaign
kill-campaign: $(VENV)/.ready ## Kill every process of an engine at every moment, write docs/ownership.md (PHASES="serving loading": only these)
	$(PY) -m e2e.run_tests kill-campaign -- $(PHASES)

.PHONY: chaos
chaos: $(VENV)/.ready ## Break what can break on two nodes, write docs/healing.md (FAULTS="job-stopped gcs-killed": only these)
	$(PY) -m e2e.chaos $(FAULTS)

.PHONY: bench-handover
bench-handover: $(VENV)/.ready ## Hand-over to a standby against a cold start: real vLLM on real Ray
	$(PY) -m e2e.run_tests bench-handover

.PHONY: bench-roll
bench-roll: $(VENV)/.ready ## A roll of four replicas under load, and a bare delete-and-recreate under the same
	$(PY) -m bench.roll_under_load

.PHONY: bench-restart
bench-restart: $(VENV)/.ready ## From a worker's death to out of the traffic; a restart on demand against a cold start
	$(PY) -m bench.restart

.PHONY: venv
venv: $(VENV)/.ready ## The development environment

$(VENV)/.ready: requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: PYTHON=python3.x make ...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	touch $@

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
