// Channel gates (squeeze and excite): y = x * hard_sigmoid(W2 relu(W1 mean(x) + b1) + b2), and its gradients.
//
// In kernels over planes (one channel of one image) LANES threads share a plane and read V values each. V and T are set
// by the compiler. W1 is [few, many], W2 [many, few]; what stands between the kernels are products of matrices.

struct alignas(4 * V) Some {
    float v[V];
};

__device__ inline Some at(const float* from, long place) { return *reinterpret_cast<const Some*>(from + place); }

__device__ inline float gate(float z) { return z < -3.f ? 0.f : z > 3.f ? 1.f : z / 6.f + 0.5f; }

__device__ inline float summed(float v, int lanes) {
    for (int lane = lanes / 2; lane; lane /= 2) v += __shfl_xor_sync(0xffffffff, v, lane);
    return v;
}

#define PLANE                                                                   \
    const int lane = threadIdx.x % lanes;                                       \
    const int plane = blockIdx.x * (T / lanes) + threadIdx.x / lanes;           \
    const bool there = plane < planes;                                          \
    const long first = long(plane) * size, last = there ? first + size : first;

extern "C" __global__ void __launch_bounds__(T)
    means(const float* __restrict__ x, float* __restrict__ mean, int planes, int size, int lanes) {
    PLANE
    float sum = 0.f;
    for (long i = first + lane * V; i < last; i += lanes * V) {
        const Some s = at(x, i);
#pragma unroll
        for (int j = 0; j < V; ++j) sum += s.v[j];
    }
    sum = summed(sum, lanes);
    if (there && lane == 0) mean[plane] = sum / size;
}

extern "C" __global__ void __launch_bounds__(T)
    scaled(const float* __restrict__ x, const float* __restrict__ z, float* __restrict__ y, int planes, int size,
           int lanes) {
    PLANE
    if (!there) return;
    const float g = gate(z[plane]);
    for (long i = first + lane * V; i < last; i += lanes * V) {
        Some s = at(x, i);
#pragma unroll
        for (int j = 0; j < V; ++j) s.v[j] *= g;
        *reinterpret_cast<Some*>(y + i) = s;
    }
}

// The gradient of z.
extern "C" __global__ void __launch_bounds__(T)
    slopes(const float* __restrict__ dy, const float* __restrict__ x, const float* __restrict__ z,
           float* __restrict__ dz, int planes, int size, int lanes) {
    PLANE
    float sum = 0.f;
    for (long i = first + lane * V; i < last; i += lanes * V) {
        const Some s = at(x, i), g = at(dy, i);
#pragma unroll
        for (int j = 0; j < V; ++j) sum += s.v[j] * g.v[j];
    }
    sum = summed(sum, lanes);
    if (there && lane == 0) dz[plane] = z[plane] > -3.f && z[plane] < 3.f ? sum / 6.f : 0.f;
}

extern "C" __global__ void __launch_bounds__(T)
    images(const float* __restrict__ dy, const float* __restrict__ z, const float* __restrict__ dmean,
           float* __restrict__ dx, int planes, int size, int lanes) {
    PLANE
    if (!there) return;
    const float g = gate(z[plane]), more = dmean[plane] / size;
    for (long i = first + lane * V; i < last; i += lanes * V) {
        Some s = at(dy, i);
#pragma unroll
        for (int j = 0; j < V; ++j) s.v[j] = s.v[j] * g + more;
        *reinterpret_cast<Some*>(dx + i) = s;
    }
}

// Gradients of W1, W2, b1, b2, one after the other in one block of memory.
extern "C" __global__ void __launch_bounds__(T)
    weights(const float* __restrict__ dz, const float* __restrict__ hidden, const float* __restrict__ dhidden,
            const float* __restrict__ mean, float* __restrict__ out, int batch, int many, int few) {
    const int i = blockIdx.x * T + threadIdx.x, size = many * few;
    if (i >= 2 * size + few + many) return;
    float sum = 0.f;
    if (i < size) {
        const float *a = dhidden + i / many, *b = mean + i % many;
        for (int n = 0; n < batch; ++n) sum += a[n * few] * b[n * many];
    } else if (i < 2 * size) {
        const float *a = dz + (i - size) / few, *b = hidden + (i - size) % few;
        for (int n = 0; n < batch; ++n) sum += a[n * many] * b[n * few];
    } else if (i < 2 * size + few) {
        for (int n = 0; n < batch; ++n) sum += dhidden[n * few + i - 2 * size];
    } else {
        for (int n = 0; n < batch; ++n) sum += dz[n * many + i - 2 * size - few];
    }
    out[i] = sum;
}
