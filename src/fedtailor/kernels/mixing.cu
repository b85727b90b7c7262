// The sum of some tensors, each times its gate, and its gradients.
//
// The N tensors are described in the kernels' arguments; an image of each lies in one piece of `size` values. A block's
// row is an image, its column T * V of the image's values. N, V, T and HALF are set by the compiler.

struct Terms {
    const Real* at[N];
    long stride[N];  // from image to image
    int gate[N];     // the place of its gate; below 0: it has none, and in `backward` it is not among them
};

struct alignas(sizeof(Real) * V) Some {
    Real v[V];
};

__device__ inline Some some(const Real* from, long place) { return *reinterpret_cast<const Some*>(from + place); }

extern "C" __global__ void __launch_bounds__(T)
    forward(Real* __restrict__ y, const float* __restrict__ gates, Terms terms, int size) {
    const int i = (blockIdx.x * T + threadIdx.x) * V;
    if (i >= size) return;
    float sum[V] = {};
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const Some x = some(terms.at[k], blockIdx.y * terms.stride[k] + i);
        const float gate = gates && terms.gate[k] >= 0 ? gates[terms.gate[k]] : 1.f;
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += gate * wide(x.v[j]);
    }
    Some out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.v[j] = narrow(sum[j]);
    *reinterpret_cast<Some*>(y + long(blockIdx.y) * size + i) = out;
}

// Gradients of the tensors, one after another in `dx`; and this block's share of the gates' gradients, if wanted.
extern "C" __global__ void __launch_bounds__(T)
    backward(const Real* __restrict__ dy, const float* __restrict__ gates, Terms terms, Real* __restrict__ dx,
             float* __restrict__ shares, int size, int stride) {
    const int i = (blockIdx.x * T + threadIdx.x) * V, warp = threadIdx.x / 32;
    const bool inside = i < size;
    const Some d = inside ? some(dy, long(blockIdx.y) * stride + i) : Some{};
    __shared__ float parts[N * (T / 32)];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if (inside) {
            const float gate = gates[terms.gate[k]];
            Some out;
#pragma unroll
            for (int j = 0; j < V; ++j) out.v[j] = narrow(gate * wide(d.v[j]));
            *reinterpret_cast<Some*>(dx + (long(k) * gridDim.y + blockIdx.y) * size + i) = out;
        }
        if (shares) {
            float sum = 0.f;
            if (inside) {
                const Some x = some(terms.at[k], blockIdx.y * terms.stride[k] + i);
#pragma unroll
                for (int j = 0; j < V; ++j) sum += wide(d.v[j]) * wide(x.v[j]);
            }
#pragma unroll
            for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
            if (threadIdx.x % 32 == 0) parts[k * (T / 32) + warp] = sum;
        }
    }
    if (!shares) return;
    __syncthreads();
    const long blocks = long(gridDim.x) * gridDim.y, block = long(blockIdx.y) * gridDim.x + blockIdx.x;
    for (int k = threadIdx.x; k < N; k += T) {
        float sum = 0.f;
        for (int w = 0; w < T / 32; ++w) sum += parts[k * (T / 32) + w];
        shares[k * blocks + block] = sum;
    }
}

// The gates' gradients out of the blocks' shares; 0 for a gate that weighs none of the tensors. A block has a gate.
extern "C" __global__ void __launch_bounds__(T)
    gather(const float* __restrict__ shares, Terms terms, float* __restrict__ dgates, int blocks) {
    int mine = -1;
    for (int k = 0; k < N; ++k)
        if (terms.gate[k] == blockIdx.x) mine = k;
    float sum = 0.f;
    if (mine >= 0)
        for (int b = threadIdx.x; b < blocks; b += T) sum += shares[long(mine) * blocks + b];
    __shared__ float parts[T / 32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.f;
        for (int w = 0; w < T / 32; ++w) sum += parts[w];
        dgates[blockIdx.x] = sum;
    }
}
