"""Whether the compiled kernels of this machine compute what the reference computes."""

from megasoftmax.check.cases import SUITE
from megasoftmax.check.run import CheckReport, check

__all__ = ["SUITE", "CheckReport", "check"]
