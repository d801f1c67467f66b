#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_capped_forward_instance<float>;
