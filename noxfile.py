"""Tests what adapts transformers and Megatron-core: on the oldest supported version and the newest.

`families` goes over all classes of the newest, and writes docs/families.md. `kernels` compiles for
all architectures. `environments` runs only when it is asked for: it has 12 environments, which take
up to 6 GB each with a CUDA build of torch. So does `folding`, which installs Boltz, OpenFold-3 and
Protenix.

Elsewhere torch is what pip finds; set PIP_CONSTRAINT to a file with `torch==...` for another build.
"""

import nox

ADAPTERS = [f"tests/test_{name}.py" for name in ("transformers", "patching", "families", "routers")]


@nox.session
@nox.parametrize("version", ["==5.17.0", "==5.21.1", ">=5.23"])
def transformers(session: nox.Session, version: str) -> None:
    session.install(".[test]", f"transformers{version}")
    session.run("pytest", *ADAPTERS, *session.posargs)


@nox.session(python="3.12")
@nox.parametrize("version", ["==0.16.0", ">=0.19"])
def megatron(session: nox.Session, version: str) -> None:
    session.install(".[test]", f"megatron-core{version}")
    session.run("pytest", "tests/test_megatron.py", *session.posargs)


@nox.session(default=False, python="3.11")
def folding(session: nox.Session) -> None:
    """Attention of packages for structure prediction, without most of what they require."""
    packages = "boltz==2.2.1", "openfold3==0.5.0", "protenix==2.0.0", "cuequivariance-torch==0.13.0"
    imported = "biotite", "biotraj", "cuequivariance", "gemmi", "ml-collections", "optree", "pandas"
    session.install(".[test]", "absl-py", "opt-einsum", "scipy")
    session.install("--no-deps", *packages, *imported)
    tests = (f"tests/test_{name}.py" for name in ("cuequivariance", "evoformer", "folding"))
    session.run("pytest", *tests, *session.posargs)


@nox.session(default=False, python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["==2.11.0", ">=2.15"])
@nox.parametrize("version", ["==5.17.0", ">=5.23"])
def environments(session: nox.Session, torch: str, version: str) -> None:
    """README's first command and example, then the tests of docs/install.md's table."""
    versions = f"torch{torch}", f"transformers{version}"
    session.install(".[examples]", *versions)
    session.run("python", "examples/train_gpt.py")
    session.install(".[test]", *versions)
    functions = [f"tests/test_{name}.py" for name in ("softmax", "attention", "host")]
    session.run("pytest", "-m", "not gpu", *functions, *ADAPTERS, *session.posargs)


@nox.session
def families(session: nox.Session) -> None:
    session.install(".[test]", "--upgrade", "transformers")
    session.run("python", "benchmarks/sweep_families.py", *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """All kernels for all architectures, and what they spill; the tests take 9.0a alone."""
    session.install("torch", ".[test]")
    environment = {"TORCH_CUDA_ARCH_LIST": "7.5 8.0 9.0a 10.0 12.0"}
    tests = "tests/test_build.py", "-k", "no_kernel_spills", *session.posargs
    session.run("pytest", *tests, env=environment)
