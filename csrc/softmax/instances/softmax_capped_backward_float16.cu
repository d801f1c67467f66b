#include "../dispatch.cuh"

template megasoftmax::BackwardInstance megasoftmax::softmax_capped_backward_instance<__half>;
