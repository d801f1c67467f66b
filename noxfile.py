"""Tests what adapts transformers: on the oldest supported version, one between and the newest.

`families` goes over all classes of the newest, and writes docs/families.md. `kernels` compiles for
all architectures.

torch is what pip finds; set PIP_CONSTRAINT to a file with `torch==...` for another build.
"""

import nox


@nox.session
@nox.parametrize("version", ["==5.17.0", "==5.21.1", ">=5.23"])
def transformers(session: nox.Session, version: str) -> None:
    session.install(".[test]", f"transformers{version}")
    tests = ("test_transformers.py", "test_patching.py", "test_families.py", "test_routers.py")
    session.run("pytest", *(f"tests/{name}" for name in tests), *session.posargs)


@nox.session
def families(session: nox.Session) -> None:
    session.install(".[test]", "--upgrade", "transformers")
    session.run("python", "benchmarks/sweep_families.py", *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """All kernels for all architectures, and what they spill; the tests take 9.0a alone."""
    session.install("torch", ".[test]")
    environment = {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a 10.0 12.0"}
    tests = "tests/test_build.py", "-k", "no_kernel_spills", *session.posargs
    session.run("pytest", *tests, env=environment)
