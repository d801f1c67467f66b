"""The ops torch.ops.megasoftmax.*: schemas, and all their implementations but CUDA's.

The compiled part adds those when it is loaded, for the first CUDA tensor (see `build.library`).
Arguments and results are explained in `reference`, whose functions are the other implementations.
"""

from megasoftmax.ops import attention as attention
from megasoftmax.ops import columns as columns
from megasoftmax.ops import softmax as softmax
from megasoftmax.ops import topk as topk
