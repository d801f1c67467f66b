#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_masked_forward_instance<float>;
