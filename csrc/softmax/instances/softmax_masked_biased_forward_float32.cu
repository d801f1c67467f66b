#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_masked_biased_forward_instance<float>;
