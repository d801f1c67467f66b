#include "../dispatch.cuh"

template megasoftmax::BackwardInstance megasoftmax::softmax_dropout_backward_instance<float>;
