// Batch normalisation of a training step where channels lie last, with something added to it and what follows.
//
// A row is a place of an image with all its channels. A block has a slab of channels and an equal share of the rows;
// ACROSS threads side by side read a row's part in the slab, sixteen bytes each, the next ones another row's. What all
// shares need to know comes from two kernels: one writes the sums of each share, the other begins with adding them up,
// in every block the same way. ACT, PLUS (whether something is added), T and HALF are set by the compiler.

constexpr int SLAB = 64, SUMS = 2 * SLAB;  // channels of a block; the first sums of all of them, then the second ones
constexpr int V = 16 / sizeof(Real), ACROSS = SLAB / V, LANES = T / ACROSS, WARPS = T / 32;
constexpr int EACH = 4;  // rows that a thread reads at a time
constexpr bool MASKED = PLUS && ACT;  // the slope is known by the output: there is no other trace of the sum

static_assert(T >= SLAB, "a thread for each channel");
static_assert(SUMS == 4 * 32, "a warp reads a share's sums at once");
static_assert(!PLUS || ACT < 2, "of a sum only a ReLU's slope is known by its output");

using Some = Several<V>;
struct alignas(16) Numbers {  // one for each of a thread's channels
    float v[V];
};
struct alignas(16) Four {
    float v[4];
};

__device__ inline Some at(const Real* from, int place) { return *reinterpret_cast<const Some*>(from + place); }
template <typename Value>
__device__ inline void put(Real* to, int place, Value value) {
    Some some;
    some.set(value);
    *reinterpret_cast<Some*>(to + place) = some;
}
__device__ inline Numbers numbers(const float* from) { return *reinterpret_cast<const Numbers*>(from); }

// The first of a thread's channels in the slab.
__device__ inline int column() { return threadIdx.x % ACROSS * V; }

// Calls what is to be done at each of the thread's places in the block's share of the rows, with what some tensors have
// there. Several rows are read before anything is done with them, so that all are under way at once. Places are no
// longer than int: with long ones the compiler writes numbers one by one.
template <int MANY, typename Act>
__device__ inline void walk(const Real* const* tensors, int rows, int channels, Act act) {
    const int share = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
    const int end = (first + share < rows ? first + share : rows) * channels, step = LANES * channels;
    int place = (first + threadIdx.x / ACROSS) * channels + blockIdx.x * SLAB + column();
    for (; place < end; place += EACH * step) {
        Some found[EACH][MANY];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int k = 0; k < MANY; ++k)
                if (place + i * step < end) found[i][k] = at(tensors[k], place + i * step);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (place + i * step < end) act(place + i * step, found[i]);
    }
}

// The sum of a column of the block's table in shared memory, of which each warp has written a row.
__device__ inline float added(const float* table, int column) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += table[warp * SUMS + column];
    return sum;
}

// Writes the sums over a share of the rows.
__device__ inline void write_sums(float* table, Numbers a, Numbers b, float* parts) {
    float* row = table + threadIdx.x / 32 * SUMS + column();
#pragma unroll
    for (int j = 0; j < V; ++j) {
#pragma unroll
        for (int lane = 16; lane >= ACROSS; lane /= 2) {
            a.v[j] += __shfl_xor_sync(0xffffffff, a.v[j], lane);
            b.v[j] += __shfl_xor_sync(0xffffffff, b.v[j], lane);
        }
        if (threadIdx.x % 32 < ACROSS) {
            row[j] = a.v[j];
            row[SLAB + j] = b.v[j];
        }
    }
    __syncthreads();
    float* mine = parts + (blockIdx.x * gridDim.y + blockIdx.y) * SUMS;
    for (int i = threadIdx.x; i < SUMS; i += T) mine[i] = added(table, i);
}

// Adds the sums of all shares up and calls what is to be done with a channel's two, in one thread for each.
template <typename Act>
__device__ inline void read_sums(float* table, const float* parts, Act act) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, shares = gridDim.y;
    const Four* mine = reinterpret_cast<const Four*>(parts) + blockIdx.x * shares * 32 + lane;
    Four sum = {};
#pragma unroll 8
    for (int i = warp; i < shares; i += WARPS) {
        const Four s = mine[i * 32];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] += s.v[j];
    }
    reinterpret_cast<Four*>(table)[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < SLAB) act(threadIdx.x, added(table, threadIdx.x), added(table, SLAB + threadIdx.x));
    __syncthreads();
}

// The sums of differences to each channel's first value, which keep their digits, and of their squares.
extern "C" __global__ void __launch_bounds__(T)
    gather(const Real* __restrict__ x, float* __restrict__ parts, int channels, int rows) {
    __shared__ float table[WARPS * SUMS];
    const Some origin = at(x, blockIdx.x * SLAB + column());
    Numbers a = {}, b = {};
    const Real* const tensors[] = {x};
    walk<1>(tensors, rows, channels, [&](int, const Some* s) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float d = s[0].get(j) - origin.get(j);
            a.v[j] += d;
            b.v[j] += d * d;
        }
    });
    write_sums(table, a, b, parts);
}

// y, running statistics, and what is to be seen when going back: mean, slant, shift and scale of each channel.
extern "C" __global__ void __launch_bounds__(T)
    apply(const Real* __restrict__ x, const Real* __restrict__ plus, const float* __restrict__ weight,
          const float* __restrict__ bias, const float* __restrict__ parts, Real* __restrict__ y,
          float* __restrict__ seen, float* running_mean, float* running_var, int channels, int rows, int copies,
          float momentum, float eps) {
    __shared__ alignas(16) float table[WARPS * SUMS];
    __shared__ alignas(16) float known[3 * SLAB];
    read_sums(table, parts, [&](int i, float first, float second) {
        const int c = blockIdx.x * SLAB + i;
        const float off = first / rows, mean = wide(x[c]) + off;
        const float variance = fmaxf(second / rows - off * off, 0.f), scale = 1.f / sqrtf(variance + eps);
        const float slant = weight ? scale * weight[c] : scale, shift = bias ? bias[c] : 0.f;
        known[i] = mean;
        known[SLAB + i] = slant;
        known[2 * SLAB + i] = shift;
        if (blockIdx.y) return;
        seen[c] = mean;
        seen[channels + c] = slant;
        seen[2 * channels + c] = shift;
        seen[3 * channels + c] = scale;
        for (int k = c; k < copies * channels; k += channels) {
            running_mean[k] = (1.f - momentum) * running_mean[k] + momentum * mean;
            running_var[k] = (1.f - momentum) * running_var[k] + momentum * (variance * rows / (rows - 1));
        }
    });
    const Numbers mean = numbers(known + column()), slant = numbers(known + SLAB + column());
    const Numbers shift = numbers(known + 2 * SLAB + column());
    const Real* const tensors[] = {x, plus};
    walk<1 + PLUS>(tensors, rows, channels, [&](int place, const Some* s) {
        put(y, place, [&](int j) {
            const float z = (s[0].get(j) - mean.v[j]) * slant.v[j] + shift.v[j];
            return activated(PLUS ? z + s[PLUS].get(j) : z);
        });
    });
}

// The sums of d, the gradient before the activation, and of its products with differences to the mean. Where something
// was added, d is its gradient as well.
extern "C" __global__ void __launch_bounds__(T)
    gather_back(const Real* __restrict__ x, const Real* __restrict__ dy, const Real* __restrict__ y,
                const float* __restrict__ seen, float* __restrict__ parts, Real* __restrict__ dplus, int channels,
                int rows) {
    __shared__ float table[WARPS * SUMS];
    const float* of = seen + blockIdx.x * SLAB + column();
    const Numbers mean = numbers(of), slant = numbers(of + channels), shift = numbers(of + 2 * channels);
    Numbers a = {}, b = {};
    const Real* const tensors[] = {x, dy, y};
    walk<2 + MASKED>(tensors, rows, channels, [&](int place, const Some* s) {
        Numbers d;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float off = s[0].get(j) - mean.v[j];
            d.v[j] = s[1].get(j) * slope(MASKED ? s[1 + MASKED].get(j) : off * slant.v[j] + shift.v[j]);
            a.v[j] += d.v[j];
            b.v[j] += d.v[j] * off;
        }
        if (MASKED) put(dplus, place, [&](int j) { return d.v[j]; });
    });
    write_sums(table, a, b, parts);
}

// The gradients of x, weight and bias. Where the kernel before has written d, that is what comes in dy's place.
extern "C" __global__ void __launch_bounds__(T)
    apply_back(const Real* __restrict__ x, const Real* __restrict__ dy, const float* __restrict__ seen,
               const float* __restrict__ parts, Real* __restrict__ dx, float* __restrict__ dweight,
               float* __restrict__ dbias, int channels, int rows) {
    __shared__ alignas(16) float table[WARPS * SUMS];
    __shared__ alignas(16) float known[2 * SLAB];
    read_sums(table, parts, [&](int i, float first, float second) {
        const int c = blockIdx.x * SLAB + i;
        const float scale = seen[3 * channels + c];
        known[i] = first / rows;
        known[SLAB + i] = scale * scale * second / rows;
        if (blockIdx.y || !dweight) return;
        dbias[c] = first;
        dweight[c] = scale * second;
    });
    const float* of = seen + blockIdx.x * SLAB + column();
    const Numbers mean = numbers(of), slant = numbers(of + channels), shift = numbers(of + 2 * channels);
    const Numbers first = numbers(known + column()), second = numbers(known + SLAB + column());
    const Real* const tensors[] = {x, dy};
    walk<2>(tensors, rows, channels, [&](int place, const Some* s) {
        put(dx, place, [&](int j) {
            const float off = s[0].get(j) - mean.v[j];
            const float d = s[1].get(j) * (MASKED ? 1.f : slope(off * slant.v[j] + shift.v[j]));
            return slant.v[j] * (d - first.v[j] - off * second.v[j]);
        });
    });
}
