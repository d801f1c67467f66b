#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_biased_forward_instance<float>;
