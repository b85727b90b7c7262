// Channel gates (squeeze and excite): y = x * hard_sigmoid(W2 relu(W1 mean(x) + b1) + b2), and its gradients.
//
// A block of threads takes one image from end to end: its planes (one channel each) are small enough to be read twice. In
// loops over planes `lanes` threads share one and read V values each. V, T and MOST, the most channels, are set by the
// compiler. W1 is [few, many], W2 [many, few].

struct alignas(4 * V) Some {
    float v[V];
};

__device__ inline Some at(const float* from, long place) { return *reinterpret_cast<const Some*>(from + place); }

__device__ inline float gate(float z) { return z < -3.f ? 0.f : z > 3.f ? 1.f : z / 6.f + 0.5f; }

__device__ inline float summed(float v, int lanes) {
    for (int lane = lanes / 2; lane; lane /= 2) v += __shfl_xor_sync(0xffffffff, v, lane);
    return v;
}

// All threads of a warp stay in the loop, so that they can add up: those without a plane add nothing.
#define PLANES                                                            \
    for (int first = 0; first < many; first += T / lanes) {               \
        const int c = first + threadIdx.x / lanes, lane = threadIdx.x % lanes; \
        const bool there = c < many;                                      \
        const long begin = (long(blockIdx.x) * many + c) * size, end = there ? begin + size : begin;

// The product of a row of weights with a vector, by `share` threads; the sum is all of theirs.
__device__ inline float product(const float* row, const float* vector, int count, int share) {
    float sum = 0.f;
    for (int i = threadIdx.x % share; i < count; i += share) sum += row[i] * vector[i];
    return summed(sum, share);
}

extern "C" __global__ void __launch_bounds__(T)
    gates(const float* __restrict__ x, const float* __restrict__ w1, const float* __restrict__ b1,
          const float* __restrict__ w2, const float* __restrict__ b2, float* __restrict__ y, float* __restrict__ means,
          float* __restrict__ hiddens, float* __restrict__ zs, int many, int few, int size, int lanes, int share) {
    __shared__ float mean[MOST];
    __shared__ float hidden[MOST];
    PLANES
        float sum = 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            const Some s = at(x, i);
#pragma unroll
            for (int j = 0; j < V; ++j) sum += s.v[j];
        }
        sum = summed(sum, lanes);
        if (there && lane == 0) means[blockIdx.x * many + c] = mean[c] = sum / size;
    }
    __syncthreads();
    for (int first = 0; first < few; first += T / 32) {
        const int f = first + threadIdx.x / 32;
        const float sum = product(w1 + long(f < few ? f : 0) * many, mean, many, 32);
        if (f < few && threadIdx.x % 32 == 0) {
            const float z = sum + b1[f];
            hiddens[blockIdx.x * few + f] = hidden[f] = z > 0.f ? z : 0.f;
        }
    }
    __syncthreads();
    for (int first = 0; first < many; first += T / share) {
        const int c = first + threadIdx.x / share;
        const float sum = product(w2 + long(c < many ? c : 0) * few, hidden, few, share);
        if (c < many && threadIdx.x % share == 0) {
            const float z = sum + b2[c];
            zs[blockIdx.x * many + c] = z;
            mean[c] = gate(z);
        }
    }
    __syncthreads();
    PLANES
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            Some s = at(x, i);
#pragma unroll
            for (int j = 0; j < V; ++j) s.v[j] *= mean[c];
            *reinterpret_cast<Some*>(y + i) = s;
        }
    }
}

// Gradients of the images, of z and of what is under the ReLU.
extern "C" __global__ void __launch_bounds__(T)
    images(const float* __restrict__ dy, const float* __restrict__ x, const float* __restrict__ w1,
           const float* __restrict__ w2, const float* __restrict__ hiddens, const float* __restrict__ zs,
           float* __restrict__ dx, float* __restrict__ dzs, float* __restrict__ dhiddens, int many, int few, int size,
           int lanes) {
    __shared__ float dz[MOST];
    __shared__ float dhidden[MOST];
    __shared__ float part[T];
    PLANES
        float sum = 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            const Some s = at(x, i), g = at(dy, i);
#pragma unroll
            for (int j = 0; j < V; ++j) sum += s.v[j] * g.v[j];
        }
        sum = summed(sum, lanes);
        if (there && lane == 0) {
            const float z = zs[blockIdx.x * many + c];
            dzs[blockIdx.x * many + c] = dz[c] = z > -3.f && z < 3.f ? sum / 6.f : 0.f;
        }
    }
    __syncthreads();
    for (int first = 0; first < few; first += 32) {  // a warp adds up some channels of 32 columns of W2
        const int f = first + threadIdx.x % 32;
        float sum = 0.f;
        if (f < few)
            for (int c = threadIdx.x / 32; c < many; c += T / 32) sum += dz[c] * w2[long(c) * few + f];
        part[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x < 32 && f < few) {
            for (int i = threadIdx.x + 32; i < T; i += 32) sum += part[i];
            const float slope = hiddens[blockIdx.x * few + f] > 0.f ? sum : 0.f;
            dhiddens[blockIdx.x * few + f] = dhidden[f] = slope;
        }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < many; c += T) {
        float sum = 0.f;
        for (int f = 0; f < few; ++f) sum += dhidden[f] * w1[long(f) * many + c];
        dz[c] = sum / size;  // the gradient of every value that the mean is of
    }
    __syncthreads();
    PLANES
        const float g = there ? gate(zs[blockIdx.x * many + c]) : 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            Some s = at(dy, i);
#pragma unroll
            for (int j = 0; j < V; ++j) s.v[j] = s.v[j] * g + dz[c];
            *reinterpret_cast<Some*>(dx + i) = s;
        }
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
