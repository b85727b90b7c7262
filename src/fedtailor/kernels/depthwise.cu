// Depthwise convolutions of small images.
//
// A block reads whole planes (one channel of one image) into shared memory once, in the widest pieces that fit; a
// thread has a patch of Q x Q places of the input, and O x O of the output, so that it uses every value that it reads
// for many products. H and W are the input's size, OH and OW the output's, K the side of the filters, S the stride, D
// the dilation, M how many filters read each plane, P planes in a block at a time, T threads, and BY_CHANNEL says
// whether planes lie channel by channel or image by image. All of them are set by the compiler, and so is HALF.
//
// What a thread reads before a barrier is not __restrict__: of such the compiler knows that nobody writes to it, and
// puts the reading off until after the barrier, where everybody waits for it.

constexpr int PAD = D * (K / 2);
constexpr int O = S < 4 ? 4 / S : 1, Q = O * S;
constexpr int DOWN = (H + Q - 1) / Q, ACROSS = (W + Q - 1) / Q, PATCHES = DOWN * ACROSS;  // of a plane
// How often all threads take a patch until each has had its turn: once, or for each of the filters that read it.
constexpr int ROUNDS = (P * PATCHES + T - 1) / T, ROUNDS_OF_ALL = (P * M * PATCHES + T - 1) / T;

template <typename Value, int N>
struct alignas(sizeof(Value) * N) Piece {
    Value v[N];
};
template <int N, typename Value>
__device__ inline Piece<Value, N>& piece(Value* at) { return *reinterpret_cast<Piece<Value, N>*>(at); }
template <int N, typename Value>
__device__ inline Piece<Value, N> piece(const Value* at) { return *reinterpret_cast<const Piece<Value, N>*>(at); }

// Into how large a piece both can be cut: a power of two.
__device__ constexpr int common(int a, int b, int most) {
    while (a % most || b % most) most /= 2;
    return most;
}
__device__ constexpr int rounded_up(int value, int to) { return (value + to - 1) / to * to; }

__device__ inline int at_most(int most, int value) { return value < most ? value : most; }

// Which plane of the output the m-th filter makes of one of the input.
__device__ inline int made_of(int plane, int m, int channels, int batch) {
    if (BY_CHANNEL) return m * channels * batch + plane;
    return M == 1 ? plane : plane + (plane / channels * (M - 1) + m) * channels;
}
__device__ inline int plane_of(int image, int channel, int channels, int batch) {
    return BY_CHANNEL ? channel * batch + image : image * channels + channel;
}
__device__ inline int channel_of(unsigned plane, unsigned channels, unsigned batch) {
    return BY_CHANNEL ? plane / batch : plane % channels;
}

__device__ inline void copy(const float* from, float (&to)[K * K]) {
#pragma unroll
    for (int k = 0; k < K * K; ++k) to[k] = from[k];
}

// Where a thread's patch lies: its plane, and its place in that, counted in patches.
struct Patch {
    int p, r, c;
    __device__ Patch(int round) {
        const unsigned i = threadIdx.x + round * T;
        p = i / PATCHES, r = i % PATCHES / ACROSS, c = i % ACROSS;
    }
};

// A patch of SIDE x SIDE values of a plane in memory. Images that it does not fit into leave some of them out.
template <int SIDE, int HEIGHT, int WIDTH>
struct Square {
    static constexpr int N = common(WIDTH, SIDE, 4);
    Real v[SIDE][SIDE];

    template <typename Act>
    __device__ static void each(const Patch& patch, Act act) {
        const int r = patch.r * SIDE, c = patch.c * SIDE;
#pragma unroll
        for (int y = 0; y < SIDE; ++y)
#pragma unroll
            for (int x = 0; x < SIDE; x += N)
                act(y, x, (r + y) * WIDTH + c + x,
                    (HEIGHT % SIDE == 0 || r + y < HEIGHT) && (WIDTH % SIDE == 0 || c + x < WIDTH));
    }
    __device__ void read(const Real* plane, const Patch& patch) {
        each(patch, [&](int y, int x, int at, bool there) {
            Piece<Real, N> some = {};
            if (there) some = piece<N>(plane + at);
#pragma unroll
            for (int j = 0; j < N; ++j) v[y][x + j] = some.v[j];
        });
    }
    __device__ void write(Real* plane, const Patch& patch) const {
        each(patch, [&](int y, int x, int at, bool there) {
            Piece<Real, N> some;
#pragma unroll
            for (int j = 0; j < N; ++j) some.v[j] = v[y][x + j];
            if (there) piece<N>(plane + at) = some;
        });
    }
};

// P planes in shared memory, with zeros around them: those left of a row are also those right of the row before, those
// above a plane also those below the plane before. A patch has SIDE x SIDE places here, and reads up to EDGE beside
// them. A patch may reach further than its image: what it finds there is used nowhere, but has to be a number.
template <int HEIGHT, int WIDTH, int SIDE, int EDGE>
struct Tile {
    static constexpr int V = common(WIDTH, WIDTH, 16 / sizeof(Real)), N = common(WIDTH, SIDE, 4);
    static constexpr int LEFT = rounded_up(EDGE, N), PITCH = LEFT + WIDTH;
    // Odd multiples of the width: planes that are read at a time lie in other banks of the memory.
    static constexpr int PLANE = ((HEIGHT + EDGE) * PITCH + WIDTH - 1) / WIDTH / 2 * 2 * WIDTH + WIDTH;
    static constexpr int ROWS = DOWN * SIDE + 2 * EDGE, RIGHT = rounded_up(ACROSS * SIDE + EDGE - WIDTH, N);
    static constexpr int SIZE = rounded_up((P - 1) * PLANE + ROWS * PITCH + RIGHT, 4);
    static constexpr int PIECES = HEIGHT * WIDTH / V, EACH = (P * PIECES + T - 1) / T;

    float* at;
    Piece<Real, V> coming[EACH];

    __device__ void clear() {
#pragma unroll
        for (int j = 0; j < (SIZE / 4 + T - 1) / T; ++j) {
            const int i = (threadIdx.x + j * T) * 4;
            if (i < SIZE) piece<4>(at + i) = {};
        }
    }
    // Which piece a thread has; those for whom none is left all have the last one.
    __device__ static unsigned mine(int j) {
        const unsigned i = threadIdx.x + j * T;
        return P * PIECES % T == 0 || i < P * PIECES ? i : P * PIECES - 1;
    }
    // Has planes come from memory, `plane` says which. No piece depends on a condition: all are under way at once.
    template <typename Which>
    __device__ void read(const Real* from, Which plane) {
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            coming[j] = piece<V>(from + (plane(mine(j) / PIECES) * PIECES + mine(j) % PIECES) * V);
    }
    template <bool CLIP>
    __device__ void put() {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const unsigned place = mine(j) % PIECES * V;
            float* to = at + mine(j) / PIECES * PLANE + (EDGE + place / WIDTH) * PITCH + LEFT + place % WIDTH;
#pragma unroll
            for (int first = 0; first < V; first += N) {
                Piece<float, N> some;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const float v = wide(coming[j].v[first + k]);
                    some.v[k] = CLIP && v < 0.f ? 0.f : v;
                }
                piece<N>(to + first) = some;
            }
        }
    }
    // Reads the rows around a patch, from BEFORE above its first to AFTER below that, with as much to their sides, and
    // calls what is to be done with each: `row(y, values)`, where values[x] is x places right of the patch's first.
    template <int BEFORE, int AFTER, typename Act>
    __device__ void rows(const Patch& patch, Act row) const {
        constexpr int FROM = rounded_up(BEFORE, N);
        const float* corner = at + patch.p * PLANE + (EDGE + patch.r * SIDE) * PITCH + LEFT + patch.c * SIDE;
#pragma unroll
        for (int y = -BEFORE; y <= AFTER; ++y) {
            float values[FROM + rounded_up(AFTER + 1, N)];
#pragma unroll
            for (int x = 0; x < FROM + AFTER + 1; x += N) {
                const Piece<float, N> some = piece<N>(static_cast<const float*>(corner) + y * PITCH + x - FROM);
#pragma unroll
                for (int j = 0; j < N; ++j) values[x + j] = some.v[j];
            }
            row(y, values + FROM);
        }
    }
};

using Inputs = Tile<H, W, Q, PAD>;
using Gradients = Tile<OH, OW, O, (PAD + S - 1) / S>;

// Calls what is to be done with every product of an output patch, by the places in filter and patch, and the input.
template <typename Act>
__device__ inline void products(const Inputs& tile, const Patch& patch, Act act) {
    tile.rows<PAD, (O - 1) * S + PAD>(patch, [&](int y, const float* values) {
#pragma unroll
        for (int oy = 0; oy < O; ++oy) {
            const int ky = y + PAD - oy * S;
            if (ky < 0 || ky % D || ky / D >= K) continue;
#pragma unroll
            for (int kx = 0; kx < K; ++kx)
#pragma unroll
                for (int ox = 0; ox < O; ++ox) act(ky / D * K + kx, oy, ox, values[ox * S + kx * D - PAD]);
        }
    });
}

// y[n, m * C + c] = x[n, c] * w[m * C + c]. Before anything arrives for their gradients, filters have 0 in `arrived`.
extern "C" __global__ void __launch_bounds__(T) forward(const Real* x, const float* w, Real* y, int* arrived,
                                                         int channels, int batch) {
    __shared__ alignas(16) float memory[Inputs::SIZE];
    if (arrived)
        for (int i = blockIdx.x * T + threadIdx.x; i < M * channels; i += gridDim.x * T) arrived[i] = 0;
    const int first = blockIdx.x * P, planes = channels * batch;
    Inputs tile{memory};
    tile.read(x, [&](int p) { return at_most(planes - 1, first + p); });
    float filter[K * K];
    const auto read_filter = [&](const Patch& patch) {
        const int plane = at_most(planes - 1, first + patch.p / M);
        copy(w + (patch.p % M * channels + channel_of(plane, channels, batch)) * (K * K), filter);
    };
    read_filter(Patch(0));
    tile.clear();
    __syncthreads();
    tile.put<RELU>();
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round < ROUNDS_OF_ALL; ++round) {
        Patch patch(round);
        if (round) read_filter(patch);
        const int m = patch.p % M;
        patch.p /= M;
        const int plane = first + patch.p;
        if (patch.p >= P || plane >= planes) break;
        float sum[O][O] = {};
        products(tile, patch, [&](int k, int oy, int ox, float v) { sum[oy][ox] += filter[k] * v; });
        Square<O, OH, OW> out;
#pragma unroll
        for (int i = 0; i < O * O; ++i) out.v[i / O][i % O] = narrow(sum[i / O][i % O]);
        out.write(y + made_of(plane, m, channels, batch) * (OH * OW), patch);
    }
}

// The gradient of x: an input's place has part in those outputs that a place of the filter leads to from it.
extern "C" __global__ void __launch_bounds__(T) images(const Real* dy, const float* w, const Real* x, Real* dx,
                                                        int channels, int batch) {
    __shared__ alignas(16) float memory[Gradients::SIZE];
    const int first = blockIdx.x * P, planes = channels * batch;
    Gradients tile{memory};
    float sum[ROUNDS][Q][Q] = {};
#pragma unroll 1
    for (int m = 0; m < M; ++m) {
        tile.read(dy, [&](int p) { return made_of(at_most(planes - 1, first + p), m, channels, batch); });
        float filter[K * K];
        const auto read_filter = [&](const Patch& patch) {
            const int plane = at_most(planes - 1, first + patch.p);
            copy(w + (m * channels + channel_of(plane, channels, batch)) * (K * K), filter);
        };
        read_filter(Patch(0));
        if (m == 0) tile.clear();
        __syncthreads();
        tile.put<false>();
        __syncthreads();
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const Patch patch(round);
            if (patch.p >= P || first + patch.p >= planes) break;
            if (round) read_filter(patch);
            tile.rows<PAD / S, (Q - 1 + PAD) / S>(patch, [&](int oy, const float* values) {
#pragma unroll
                for (int r = 0; r < Q; ++r) {
                    const int ky = r + PAD - oy * S;
                    if (ky < 0 || ky % D || ky / D >= K) continue;
#pragma unroll
                    for (int kx = 0; kx < K; ++kx)
#pragma unroll
                        for (int c = 0; c < Q; ++c)
                            if ((c + PAD - kx * D) % S == 0)
                                sum[round][r][c] += filter[ky / D * K + kx] * values[(c + PAD - kx * D) / S];
                }
            });
        }
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const Patch patch(round);
        if (patch.p >= P || first + patch.p >= planes) break;
        const int place = (first + patch.p) * (H * W);
        Square<Q, H, W> out, seen;
        if (RELU) seen.read(x + place, patch);
#pragma unroll
        for (int i = 0; i < Q * Q; ++i) {
            const bool stopped = RELU && wide(seen.v[i / Q][i % Q]) <= 0.f;
            out.v[i / Q][i % Q] = narrow(stopped ? 0.f : sum[round][i / Q][i % Q]);
        }
        out.write(dx + place, patch);
    }
}

// The gradient of the filters. A block has one filter and every gridDim.y-th group of P images; dw has a row for each.
// The last block of a filter to arrive adds the rows up, in their order, and leaves the sum in the first.
extern "C" __global__ void __launch_bounds__(T) filters(const Real* dy, const Real* x, volatile float* dw,
                                                         int* arrived, int channels, int batch) {
    __shared__ alignas(16) float memory[Inputs::SIZE];
    __shared__ float parts[T / 32][K * K];
    const int filter = blockIdx.x, channel = M == 1 ? filter : filter % channels;
    Inputs tile{memory};
    tile.clear();
    float sum[K * K] = {};
#pragma unroll 1
    for (int first = blockIdx.y * P; first < batch; first += gridDim.y * P) {
        tile.read(x, [&](int p) { return plane_of(at_most(batch - 1, first + p), channel, channels, batch); });
        Square<O, OH, OW> gradient[ROUNDS];  // under way with the planes
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const Patch patch(round);
            const int image = at_most(batch - 1, first + at_most(P - 1, patch.p));
            gradient[round].read(dy + plane_of(image, filter, M * channels, batch) * (OH * OW), patch);
        }
        __syncthreads();
        tile.put<RELU>();
        __syncthreads();
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const Patch patch(round);
            if (patch.p >= P || first + patch.p >= batch) break;
            const auto& g = gradient[round].v;
            products(tile, patch, [&](int k, int oy, int ox, float v) { sum[k] += wide(g[oy][ox]) * v; });
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
