#include "../dispatch.cuh"

template megasoftmax::BackwardInstance
    megasoftmax::softmax_biased_dropout_backward_instance<__nv_bfloat16>;
