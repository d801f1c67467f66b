"""The GPU that an explanation is about."""

import dataclasses
import re
from dataclasses import dataclass

import torch

from megasoftmax.limits import GpuLimits, kernel_limits

MEASURED_SHARE = 0.88  # of a GPU's nominal bandwidth that a copy reaches
LAUNCH_MICROSECONDS = 2.0  # of a small kernel among others in a CUDA graph, roughly


@dataclass(frozen=True)
class Gpu:
    """What kernels and expected times depend on, besides the call."""

    name: str
    major: int  # of its compute capability
    multiprocessors: int
    max_cluster: int  # blocks of a cluster; 1: there are no clusters
    shared_bytes: int  # of shared memory, that a block may have
    bytes_per_second: float  # of a copy, read and written
    bandwidth_source: str
    flops_per_second: float  # nominal, of dense 16-bit matrix products
    flops_source: str
    is_measured: bool = False  # the project timed its kernels on such a GPU

    def with_rates(self, terabytes: float | None, teraflops: float | None) -> "Gpu":
        """This GPU with rates that the caller knows, in TB/s and TFLOP/s."""
        changes: dict[str, float | str] = {}
        if terabytes is not None:
            changes |= {"bytes_per_second": 1e12 * terabytes, "bandwidth_source": "as given"}
        if teraflops is not None:
            changes |= {"flops_per_second": 1e12 * teraflops, "flops_source": "as given"}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Known:
    """A GPU by its data sheet."""

    words: str  # all are in the name that torch gives
    capability: tuple[int, int]
    multiprocessors: int
    terabytes: float  # nominal bandwidth, TB/s
    teraflops: float  # nominal, of dense 16-bit products with sums in float32
    copied_terabytes: float | None = None  # what a copy reached, if that was measured
    is_measured: bool = False


# From NVIDIA's data sheets of the products; of GeForce RTX from the white papers of their
# architectures: Ampere GA102, Ada and Blackwell. The first with all words in a name is taken.
_KNOWN = (
    _Known("T4", (7, 5), 40, 0.320, 65),
    _Known("A100 40GB", (8, 0), 108, 1.555, 312),
    _Known("A100 PCIe", (8, 0), 108, 1.935, 312),
    _Known("A100", (8, 0), 108, 2.039, 312),
    _Known("A800", (8, 0), 108, 2.039, 312),
    _Known("A10", (8, 6), 72, 0.600, 125),
    _Known("A40", (8, 6), 84, 0.696, 149.7),
    _Known("3090", (8, 6), 82, 0.936, 71),
    _Known("4090", (8, 9), 128, 1.008, 165.2),
    _Known("L4", (8, 9), 58, 0.300, 121),
    _Known("L40S", (8, 9), 142, 0.864, 362),
    _Known("H200", (9, 0), 132, 4.8, 989, copied_terabytes=4.27, is_measured=True),
    _Known("H100 PCIe", (9, 0), 114, 2.0, 756),
    _Known("H100", (9, 0), 132, 3.35, 989, is_measured=True),
    _Known("H800", (9, 0), 132, 3.35, 989),
    _Known("B200", (10, 0), 148, 8.0, 2250),
    _Known("5090", (12, 0), 170, 1.792, 209.5),
)
GPU_NAMES = tuple(known.words for known in _KNOWN)
_VARIANTS = {"D", "LAPTOP", "NVL", "SUPER", "TI"}  # other products than without such a word


def gpu_named(name: str) -> Gpu:
    """A GPU that this machine need not have.

    Args:
        name: one of `GPU_NAMES`, such as "L4" or "H100 PCIe", or a name with such words in it, such
            as "NVIDIA GeForce RTX 4090".

    Raises:
        ValueError: no such GPU is known.
    """
    known = _find(name)
    if known is None:
        raise ValueError(f"gpu: expected one of {', '.join(GPU_NAMES)}, got {name!r}")
    limits = _limits(known.capability)
    bandwidth = 1e12 * MEASURED_SHARE * known.terabytes
    source = f"{MEASURED_SHARE:.0%} of its nominal {known.terabytes:g} TB/s"
    if known.copied_terabytes is not None:
        bandwidth = 1e12 * known.copied_terabytes
        source = f"measured copy bandwidth of {_of(known.words)}"
    series = "GeForce RTX " if known.words.isdigit() else ""
    return Gpu(
        f"NVIDIA {series}{known.words}",
        known.capability[0],
        known.multiprocessors,
        limits.max_cluster,
        limits.shared_bytes,
        bandwidth,
        source,
        1e12 * known.teraflops,
        f"nominal rate of {_of(known.words)}",
        known.is_measured,
    )


def current_gpu() -> Gpu:
    """The current GPU; an H200 where torch sees none.

    Where torch does not tell its memory's clock and width, the bandwidth is that of the data sheet,
    or of an H200 for a GPU without one here. So is the rate of its matrix products.
    """
    if not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = _find(properties.name)
    found = H200 if known is None else gpu_named(known.words)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    nominal = 2 * 1e3 * kilohertz * bits / 8  # two transfers per clock
    share = f"{MEASURED_SHARE:.0%} of its nominal one"
    return Gpu(
        properties.name,
        properties.major,
        properties.multi_processor_count,
        _limits((properties.major, properties.minor)).max_cluster,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # by stubs
        MEASURED_SHARE * nominal if nominal else found.bytes_per_second,
        share if nominal else found.bandwidth_source,
        found.flops_per_second,
        H200.flops_source if known is None else "its nominal rate",
        known is not None and known.is_measured,
    )


def _find(name: str) -> _Known | None:
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    if words & _VARIANTS:
        return None
    return next((gpu for gpu in _KNOWN if {*gpu.words.upper().split()} <= words), None)


def _limits(capability: tuple[int, int]) -> GpuLimits:
    """Of the last compute capability of common/limits.h that is not later."""
    found = [gpu for gpu in kernel_limits().gpus if (gpu.major, gpu.minor) <= capability]
    return (found or kernel_limits().gpus)[-1]


def device_of(gpu: Gpu | str, **given: int | None) -> Gpu:
    """A GPU or the one of a name, with the numbers that are not None in place of its own."""
    found = gpu_named(gpu) if isinstance(gpu, str) else gpu
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def _of(words: str) -> str:
    return f"an {words}" if words[0] in "AHL" else f"a {words}"


H200 = gpu_named("H200")
