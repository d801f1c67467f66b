"""Does a model train as before? `python -m megasoftmax regress`, as functions."""

from megasoftmax.regression.comparison import Check, Report, run
from megasoftmax.regression.models import RegressionError

__all__ = ["Check", "RegressionError", "Report", "run"]
