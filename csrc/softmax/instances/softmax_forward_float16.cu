#include "../dispatch.cuh"

template megasoftmax::ForwardInstance megasoftmax::softmax_forward_instance<__half>;
