#pragma once
// __host__ and __device__, which mean nothing on a machine without CUDA: plans compile there too.

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#else
#define __host__
#define __device__
#endif
