// Channel gates (squeeze and excite): y = x * hard_sigmoid(W2 relu(W1 mean(x) + b1) + b2), and its gradients.
//
// A block of threads takes G images from end to end: their planes (one channel each) are small enough to be read twice, and
// the weights, which are most of what is read where channels are many, are read once for all G. In loops over planes
// `lanes` threads share one and read V values each; of weights a thread reads U values at a time, and many reads are under
// way at once. V, U, T, G, MOST, the most channels, and BY_CHANNEL, how planes lie, and HALF are set by the compiler. W1 is
// [few, many], W2 [many, few].

template <typename Value, int SIZE>
struct alignas(sizeof(Value) * SIZE) Values {
    Value v[SIZE];
};
using Some = Values<Real, V>;
using Weights = Values<float, U>;

__device__ inline Some at(const Real* from, long place) { return *reinterpret_cast<const Some*>(from + place); }
__device__ inline Weights of(const float* from) { return *reinterpret_cast<const Weights*>(from); }

__device__ inline float gate(float z) { return z < -3.f ? 0.f : z > 3.f ? 1.f : z / 6.f + 0.5f; }

__device__ inline float summed(float v, int lanes) {
    for (int lane = lanes / 2; lane; lane /= 2) v += __shfl_xor_sync(0xffffffff, v, lane);
    return v;
}

// All threads of a warp stay in the loop, so that they can add up: those without a plane add nothing.
#define PLANES                                                                                     \
    for (int first = 0; first < G * many; first += T / lanes) {                                    \
        const int plane = first + threadIdx.x / lanes, lane = threadIdx.x % lanes;                 \
        const int g = BY_CHANNEL ? plane % G : plane / many, c = BY_CHANNEL ? plane / G : plane % many; \
        const int image = blockIdx.x * G + g;                                                      \
        const bool there = plane < G * many && image < batch;                                      \
        const long begin = (BY_CHANNEL ? long(c) * batch + image : long(image) * many + c) * size; \
        const long end = there ? begin + size : begin;

// take(g, r, sum over i of w[r, i] * vectors[g][i]) for all rows and images. `share` threads take a row, R rows at a time.
template <typename Take>
__device__ inline void each_row(const float* w, const float* vectors, int rows, int count, int share, Take take) {
    constexpr int R = 4;
    const int abreast = T / share, lane = threadIdx.x % share;
    for (int first = 0; first < rows; first += R * abreast) {  // all threads stay in the loop, so that they can add up
        const int row = first + threadIdx.x / share;
        float sum[R][G] = {};
        for (int i = lane * U; i < count; i += share * U) {
            Weights values[G];
#pragma unroll
            for (int g = 0; g < G; ++g) values[g] = of(vectors + g * MOST + i);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int there = row + r * abreast < rows ? row + r * abreast : 0;
                const Weights weights = of(w + long(there) * count + i);
#pragma unroll
                for (int g = 0; g < G; ++g)
#pragma unroll
                    for (int j = 0; j < U; ++j) sum[r][g] += weights.v[j] * values[g].v[j];
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float total = summed(sum[r][g], share);
                if (row + r * abreast < rows && lane == 0) take(g, row + r * abreast, total);
            }
    }
}

// take(g, i, sum over r of vectors[g][r] * w[r, i]) for all columns and images. Groups of threads, as long as a row, have
// some rows each.
template <typename Take>
__device__ inline void each_column(const float* w, const float* vectors, float* part, int rows, int count, Take take) {
    const int across = count / U, width = across < T ? across : T, groups = T / width, group = threadIdx.x / width;
    for (int first = 0; first < across; first += width) {
        const int column = first + threadIdx.x % width;
        Weights sum[G] = {};
        if (group < groups && column < across) {
#pragma unroll 4
            for (int r = group; r < rows; r += groups) {
                const Weights weights = of(w + long(r) * count + column * U);
#pragma unroll
                for (int g = 0; g < G; ++g)
#pragma unroll
                    for (int j = 0; j < U; ++j) sum[g].v[j] += vectors[g * MOST + r] * weights.v[j];
            }
        }
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
            for (int j = 0; j < U; ++j) part[j * T + threadIdx.x] = sum[g].v[j];
            __syncthreads();
            if (group == 0 && column < across)
#pragma unroll
                for (int j = 0; j < U; ++j) {
                    float total = sum[g].v[j];
                    for (int other = threadIdx.x + width; other < groups * width; other += width)
                        total += part[j * T + other];
                    take(g, column * U + j, total);
                }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(T)
    gates(const Real* __restrict__ x, const float* __restrict__ w1, const float* __restrict__ b1,
          const float* __restrict__ w2, const float* __restrict__ b2, Real* __restrict__ y, float* __restrict__ means,
          float* __restrict__ hiddens, float* __restrict__ zs, int batch, int many, int few, int size, int lanes,
          int share) {
    __shared__ alignas(16) float mean[G * MOST];
    __shared__ alignas(16) float hidden[G * MOST];
    PLANES
        float sum = 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            const Some s = at(x, i);
#pragma unroll
            for (int j = 0; j < V; ++j) sum += wide(s.v[j]);
        }
        sum = summed(sum, lanes);
        if (there && lane == 0) means[image * many + c] = mean[g * MOST + c] = sum / size;
    }
    __syncthreads();
    each_row(w1, mean, few, many, 32, [&](int g, int f, float sum) {
        const float z = sum + b1[f];
        hidden[g * MOST + f] = z > 0.f ? z : 0.f;
        if (blockIdx.x * G + g < batch) hiddens[(blockIdx.x * G + g) * few + f] = hidden[g * MOST + f];
    });
    __syncthreads();
    each_row(w2, hidden, many, few, share, [&](int g, int c, float sum) {
        const float z = sum + b2[c];
        if (blockIdx.x * G + g < batch) zs[(blockIdx.x * G + g) * many + c] = z;
        mean[g * MOST + c] = gate(z);
    });
    __syncthreads();
    PLANES
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            Some s = at(x, i);
#pragma unroll
            for (int j = 0; j < V; ++j) s.v[j] = narrow(wide(s.v[j]) * mean[g * MOST + c]);
            *reinterpret_cast<Some*>(y + i) = s;
        }
    }
}

// Gradients of the images, of z and of what is under the ReLU.
extern "C" __global__ void __launch_bounds__(T)
    images(const Real* __restrict__ dy, const Real* __restrict__ x, const float* __restrict__ w1,
           const float* __restrict__ w2, const float* __restrict__ hiddens, const float* __restrict__ zs,
           Real* __restrict__ dx, float* __restrict__ dzs, float* __restrict__ dhiddens, int batch, int many, int few,
           int size, int lanes) {
    __shared__ float dz[G * MOST];
    __shared__ float dhidden[G * MOST];
    __shared__ float part[U * T];
    PLANES
        float sum = 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            const Some s = at(x, i), d = at(dy, i);
#pragma unroll
            for (int j = 0; j < V; ++j) sum += wide(s.v[j]) * wide(d.v[j]);
        }
        sum = summed(sum, lanes);
        if (there && lane == 0) {
            const float z = zs[image * many + c];
            dzs[image * many + c] = dz[g * MOST + c] = z > -3.f && z < 3.f ? sum / 6.f : 0.f;
        }
    }
    __syncthreads();
    each_column(w2, dz, part, many, few, [&](int g, int f, float sum) {
        const int image = blockIdx.x * G + g;
        if (image < batch) dhiddens[image * few + f] = dhidden[g * MOST + f] = hiddens[image * few + f] > 0.f ? sum : 0.f;
    });
    each_column(w1, dhidden, part, few, many, [&](int g, int c, float sum) {
        dz[g * MOST + c] = sum / size;  // the gradient of every value that the mean is of
    });
    PLANES
        const float opened = there ? gate(zs[image * many + c]) : 0.f;
        for (long i = begin + lane * V; i < end; i += lanes * V) {
            Some s = at(dy, i);
#pragma unroll
            for (int j = 0; j < V; ++j) s.v[j] = narrow(wide(s.v[j]) * opened + dz[g * MOST + c]);
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
