#include "../dispatch.cuh"

template megasoftmax::BackwardInstance megasoftmax::softmax_backward_instance<__nv_bfloat16>;
