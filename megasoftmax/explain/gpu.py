"""The GPU that an explanation is about."""

import dataclasses
import re
from dataclasses import dataclass

import torch

MEASURED_SHARE = 0.88  # of a GPU's nominal bandwidth that a copy reaches
LAUNCH_MICROSECONDS = 2.0  # of a small kernel among others in a CUDA graph, roughly

# Nominal rates of dense 16-bit matrix products, in TFLOP/s, by the first of these words in the name
# of a GPU.
NOMINAL_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
}


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

    def with_rates(self, terabytes: float | None, teraflops: float | None) -> "Gpu":
        """This GPU with rates that the caller knows, in TB/s and TFLOP/s."""
        changes: dict[str, float | str] = {}
        if terabytes is not None:
            changes |= {"bytes_per_second": 1e12 * terabytes, "bandwidth_source": "as given"}
        if teraflops is not None:
            changes |= {"flops_per_second": 1e12 * teraflops, "flops_source": "as given"}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


H200 = Gpu(
    "NVIDIA H200",
    9,
    132,
    16,
    232448,
    4.27e12,
    "measured copy bandwidth of an H200",
    1e12 * NOMINAL_TFLOPS["H200"],
    "nominal rate of an H200",
)


def current_gpu() -> Gpu:
    """The current GPU; an H200 where torch sees none.

    Where torch does not tell its memory's clock and width, the bandwidth is that of an H200 too. So
    is the rate of matrix products of a GPU that NOMINAL_TFLOPS does not name.
    """
    if not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    max_cluster = 16 if properties.major in (9, 10) else 8 if properties.major > 8 else 1
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    nominal = 2 * 1e3 * kilohertz * bits / 8  # two transfers per clock
    if nominal:
        bandwidth, source = MEASURED_SHARE * nominal, f"{MEASURED_SHARE:.0%} of its nominal one"
    else:
        bandwidth, source = H200.bytes_per_second, H200.bandwidth_source
    teraflops = nominal_tflops(properties.name)
    return Gpu(
        properties.name,
        properties.major,
        properties.multi_processor_count,
        max_cluster,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # by stubs
        bandwidth,
        source,
        H200.flops_per_second if teraflops is None else 1e12 * teraflops,
        H200.flops_source if teraflops is None else "its nominal rate",
    )


def nominal_tflops(name: str) -> float | None:
    """By the name of a GPU, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    for words, rate in NOMINAL_TFLOPS.items():
        if all(re.search(rf"\b{word}\b", name) for word in words.split()):
            return rate
    return None
