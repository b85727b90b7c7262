// Depthwise convolutions of small images.
//
// A block reads whole planes (one channel of one image) into shared memory once, with their border of zeros; a thread
// computes a strip of Q values below each other, so that neighbouring threads touch neighbouring columns.
// H and W are the input's size, OH and OW the output's, K the side of the filters, S the stride, D the dilation,
// M how many filters read each plane, P planes in a block at a time, T threads, and BY_CHANNEL says whether planes lie
// channel by channel or image by image. All of them are set by the compiler, and so is HALF.

constexpr int Q = 4;
constexpr int PAD = D * (K / 2);
constexpr int PH = H + 2 * PAD, PW = W + 2 * PAD, PLANE = PH * PW;
constexpr int TILE = P * PLANE + Q * S * PW;

// Planes of a tensor with so many channels, and what they are planes of.
__device__ inline int plane_of(int image, int channel, int channels, int batch) {
    return BY_CHANNEL ? channel * batch + image : image * channels + channel;
}
__device__ inline int image_of(int plane, int channels, int batch) {
    return BY_CHANNEL ? plane % batch : plane / channels;
}
__device__ inline int channel_of(int plane, int channels, int batch) {
    return BY_CHANNEL ? plane / batch : plane % channels;
}

__device__ inline float clipped(float v) { return RELU && v < 0.f ? 0.f : v; }

// The plane's value at a place of the tile, zero outside of it.
__device__ inline float padded(const Real* plane, int place) {
    const int r = place / PW - PAD, c = place % PW - PAD;
    return r >= 0 && r < H && c >= 0 && c < W ? clipped(wide(plane[r * W + c])) : 0.f;
}

// The same for the gradient of an output, spread over the input's size where the stride leaves places out.
__device__ inline float spread(const Real* plane, int place) {
    const int r = place / PW - PAD, c = place % PW - PAD;
    const bool there = r >= 0 && c >= 0 && r % S == 0 && c % S == 0 && r / S < OH && c / S < OW;
    return there ? wide(plane[r / S * OW + c / S]) : 0.f;
}

// Reads a tile's values, all of them under way at once, and puts them where the block sees them. A strip may reach
// below the last plane: what it finds there is used nowhere, but has to be a number.
template <typename Value>
__device__ inline void fill(float* tile, Value value) {
    constexpr int EACH = (TILE + T - 1) / T;
    float read[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = threadIdx.x + j * T;
        read[j] = i < P * PLANE ? value(i / PLANE, i % PLANE) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = threadIdx.x + j * T;
        if (i < TILE) tile[i] = read[j];
    }
    __syncthreads();
}

template <int SIZE>
__device__ inline void read_column(const float* from, float (&column)[SIZE]) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) column[j] = from[j * PW];
}

// Adds a filter's product with what lies below and right of a corner of the tile to a strip; TURNED: of the filter
// turned around.
template <int STRIDE, bool TURNED>
__device__ inline void convolve(const float* filter, const float* corner, float (&sum)[Q]) {
#pragma unroll
    for (int kx = 0; kx < K; ++kx) {
        float column[(Q - 1) * STRIDE + (K - 1) * D + 1];
        read_column(corner + kx * D, column);
#pragma unroll
        for (int ky = 0; ky < K; ++ky) {
            const float v = filter[TURNED ? K * K - 1 - ky * K - kx : ky * K + kx];
#pragma unroll
            for (int q = 0; q < Q; ++q) sum[q] += v * column[q * STRIDE + ky * D];
        }
    }
}

// y[n, m * C + c] = x[n, c] * w[m * C + c]. Before anything arrives for their gradients, filters have 0 in `arrived`.
extern "C" __global__ void __launch_bounds__(T) forward(const Real* __restrict__ x, const float* __restrict__ w,
                                                         Real* __restrict__ y, int* arrived, int channels, int batch) {
    constexpr int STRIPS = (OH + Q - 1) / Q, ITEMS = STRIPS * OW;
    __shared__ float tile[TILE];
    if (arrived)
        for (int i = blockIdx.x * T + threadIdx.x; i < M * channels; i += gridDim.x * T) arrived[i] = 0;
    const int first = blockIdx.x * P, planes = channels * batch;
    fill(tile, [&](int p, int place) { return first + p < planes ? padded(x + (first + p) * (H * W), place) : 0.f; });
    for (int i = threadIdx.x; i < P * M * ITEMS; i += T) {
        const int p = i / (M * ITEMS), m = i / ITEMS % M, r = i % ITEMS / OW * Q, c = i % OW;
        if (first + p >= planes) break;
        const int channel = m * channels + channel_of(first + p, channels, batch);
        const int to_plane = plane_of(image_of(first + p, channels, batch), channel, M * channels, batch);
        float sum[Q] = {};
        convolve<S, false>(w + channel * (K * K), tile + p * PLANE + r * S * PW + c * S, sum);
        Real* to = y + (to_plane * OH + r) * OW + c;
#pragma unroll
        for (int q = 0; q < Q; ++q)
            if (r + q < OH) to[q * OW] = narrow(sum[q]);
    }
}

// The gradient of x: that of y, spread over the input's size, with the filters turned around; summed over filters.
extern "C" __global__ void __launch_bounds__(T) images(const Real* __restrict__ dy, const float* __restrict__ w,
                                                        const Real* __restrict__ x, Real* __restrict__ dx,
                                                        int channels, int batch) {
    constexpr int STRIPS = (H + Q - 1) / Q, ITEMS = STRIPS * W;
    constexpr int ROUNDS = (P * ITEMS + T - 1) / T;
    __shared__ float tile[TILE];
    const int first = blockIdx.x * P, planes = channels * batch;
    float sum[ROUNDS][Q] = {};
    for (int m = 0; m < M; ++m) {
        if (m) __syncthreads();
        fill(tile, [&](int p, int place) {
            const int image = image_of(first + p, channels, batch), channel = channel_of(first + p, channels, batch);
            const int from = plane_of(image, m * channels + channel, M * channels, batch);
            return first + p < planes ? spread(dy + from * (OH * OW), place) : 0.f;
        });
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int i = threadIdx.x + round * T;
            const int p = i / ITEMS, r = i % ITEMS / W * Q, c = i % W;
            if (p >= P || first + p >= planes) break;
            const float* filter = w + (m * channels + channel_of(first + p, channels, batch)) * (K * K);
            convolve<1, true>(filter, tile + p * PLANE + r * PW + c, sum[round]);
        }
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int i = threadIdx.x + round * T;
        const int p = i / ITEMS, r = i % ITEMS / W * Q, c = i % W;
        if (p >= P || first + p >= planes) break;
        const int at = ((first + p) * H + r) * W + c;
#pragma unroll
        for (int q = 0; q < Q; ++q)
            if (r + q < H) dx[at + q * W] = narrow(RELU && wide(x[at + q * W]) <= 0.f ? 0.f : sum[round][q]);
    }
}

// The gradient of the filters. A block has one filter and every gridDim.y-th group of P images; dw has a row for each.
// The last block of a filter to arrive adds the rows up, in their order, and leaves the sum in the first.
extern "C" __global__ void __launch_bounds__(T) filters(const Real* __restrict__ dy, const Real* __restrict__ x,
                                                         volatile float* dw, int* arrived, int channels, int batch) {
    constexpr int STRIPS = (OH + Q - 1) / Q, ITEMS = STRIPS * OW;
    __shared__ float tile[TILE];
    __shared__ float parts[T / 32][K * K];
    const int filter = blockIdx.x, channel = filter % channels;
    float sum[K * K] = {};
    for (int first = blockIdx.y * P; first < batch; first += gridDim.y * P) {
        __syncthreads();
        fill(tile, [&](int p, int place) {
            const int from = plane_of(first + p, channel, channels, batch);
            return first + p < batch ? padded(x + from * (H * W), place) : 0.f;
        });
        for (int i = threadIdx.x; i < P * ITEMS; i += T) {
            const int p = i / ITEMS, r = i % ITEMS / OW * Q, c = i % OW;
            if (first + p >= batch) break;
            const Real* from = dy + (plane_of(first + p, filter, M * channels, batch) * OH + r) * OW + c;
            float g[Q];
#pragma unroll
            for (int q = 0; q < Q; ++q) g[q] = r + q < OH ? wide(from[q * OW]) : 0.f;
#pragma unroll
            for (int kx = 0; kx < K; ++kx) {
                float column[(Q - 1) * S + (K - 1) * D + 1];
                read_column(tile + p * PLANE + r * S * PW + c * S + kx * D, column);
#pragma unroll
                for (int ky = 0; ky < K; ++ky)
#pragma unroll
                    for (int q = 0; q < Q; ++q) sum[ky * K + kx] += g[q] * column[q * S + ky * D];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < K * K; ++k) {
        float v = sum[k];
#pragma unroll
        for (int lane = 16; lane; lane /= 2) v += __shfl_xor_sync(0xffffffff, v, lane);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][k] = v;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < K * K; k += T) {
        float v = 0.f;
        for (int warp = 0; warp < T / 32; ++warp) v += parts[warp][k];
        dw[(blockIdx.y * gridDim.x + filter) * (K * K) + k] = v;
    }
    if (gridDim.y == 1) return;
    __shared__ bool last;
    __threadfence();  // others see the row before they see that it has arrived
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived + filter, 1) == gridDim.y - 1;
    __syncthreads();
    if (!last) return;
    for (int k = threadIdx.x; k < K * K; k += T) {
        float v = 0.f;
        for (int row = 0; row < gridDim.y; ++row) v += dw[(row * gridDim.x + filter) * (K * K) + k];
        dw[filter * (K * K) + k] = v;
    }
    if (threadIdx.x == 0) arrived[filter] = 0;  // somebody may ask for the gradient again
}
