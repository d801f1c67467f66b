#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_dropout_forward_instance<float>;
