"""The semantics of megasoftmax in plain torch, without autograd."""

from megasoftmax.reference import attention as attention
from megasoftmax.reference import dropout as dropout
from megasoftmax.reference import softmax as softmax
from megasoftmax.reference import topk as topk
