"""What is saved, gradients, vmap and double backward of the operations, whoever computes them."""

from megasoftmax.autograd import attention as attention
from megasoftmax.autograd import dropout as dropout
from megasoftmax.autograd import sdpa as sdpa
from megasoftmax.autograd import softmax as softmax
from megasoftmax.autograd import topk as topk
from megasoftmax.autograd import torch_softmax as torch_softmax
