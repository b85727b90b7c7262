// Products of small matrices with long ones: 1x1 convolutions of few channels, whose planes lie channel by channel.
//
// y[g] = w[g] x[g] for CO x CI filters and `many` positions, of which there are many more than channels, so that what
// counts is to read and to write everything once. Matrices are in bfloat16, sums in single precision. CO, CI and T are
// set by the compiler; both are multiples of 8, and the number of positions one of TILE.

constexpr int WARPS = T / 32, EACH = 32, TILE = WARPS * EACH;  // positions of a warp, of a block
constexpr int PITCH = TILE + 8;                                // rows of shared memory begin in other banks

__device__ constexpr int in_pieces(int channels, int of) { return (channels + of - 1) / of; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ inline int lane() { return threadIdx.x % 32; }

struct alignas(16) Eight {
    unsigned pairs[4];
};
__device__ inline Eight eight(const Real* at) { return *reinterpret_cast<const Eight*>(at); }
__device__ inline Eight& eight(Real* at) { return *reinterpret_cast<Eight*>(at); }
__device__ inline unsigned both(Real low, Real high) { return low | unsigned(high) << 16; }

// Four 8 x 8 matrices out of shared memory: rows 0 and 8, then the same of the columns from 8 on. A thread gets two
// values of row lane / 4 of each, or TURNED two of that column.
template <bool TURNED>
__device__ inline void four(const Real* corner, int pitch, unsigned (&found)[4]) {
#if __CUDA_ARCH__ >= 800
    const unsigned from = unsigned(__cvta_generic_to_shared(corner + lane() % 16 * pitch + lane() / 16 * 8));
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3]) : "r"(from) : "memory");
#else
    const int group = lane() / 4, two = lane() % 4 * 2;
    for (int m = 0; m < 4; ++m) {
        const Real* matrix = corner + m % 2 * 8 * pitch + m / 2 * 8;
        found[m] = TURNED ? both(matrix[two * pitch + group], matrix[(two + 1) * pitch + group])
                          : both(matrix[group * pitch + two], matrix[group * pitch + two + 1]);
    }
#endif
}

// d += a b of a 16 x 16 and a 16 x 8 matrix, which lie in a warp's registers as its instruction has them.
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int group = lane() / 4, two = lane() % 4 * 2;
    for (int k = 0; k < 16; ++k) {
        const auto half_of = [&](unsigned pair, int from) {
            const unsigned found = __float_as_uint(__shfl_sync(0xffffffff, __uint_as_float(pair), from));
            return __uint_as_float(k % 2 ? found & 0xffff0000u : found << 16);
        };
        const float above = half_of(a[k / 8 * 2], group * 4 + k % 8 / 2);
        const float below = half_of(a[k / 8 * 2 + 1], group * 4 + k % 8 / 2);
        for (int j = 0; j < 2; ++j) {
            const float right = half_of(k < 8 ? b0 : b1, (two + j) * 4 + k % 8 / 2);
            d[j] += above * right;
            d[2 + j] += below * right;
        }
    }
#endif
}

// A block has TILE positions of one product. ROWS come out of INNER; TURNED the filters are read the other way round.
template <int ROWS, int INNER, bool TURNED>
__device__ inline void product(const Real* w, const Real* x, Real* y, int many, float* memory) {
    constexpr int DOWN = in_pieces(ROWS, 16), DEEP = in_pieces(INNER, 16), FILTER = DEEP * 16 + 8;
    constexpr int PIECES = TILE / 8, READS = in_pieces(DEEP * 16 * PIECES, T);
    Real* tile = reinterpret_cast<Real*>(memory);
    Real* filter = tile + larger(DOWN, DEEP) * 16 * PITCH;
    const int first = blockIdx.x * TILE;
    w += blockIdx.y * (ROWS * INNER);
    x += long(blockIdx.y) * INNER * many + first;
    y += long(blockIdx.y) * ROWS * many + first;
    Eight coming[READS];  // all under way at once
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        const int at = i * T + threadIdx.x, row = at / PIECES;
        coming[i] = row < INNER ? eight(x + long(row) * many + at % PIECES * 8) : Eight{};
    }
    for (int at = threadIdx.x; at < DOWN * DEEP * 256; at += T) {
        const int row = at / (DEEP * 16), k = at % (DEEP * 16);
        filter[row * FILTER + k] = row < ROWS && k < INNER ? w[TURNED ? k * ROWS + row : row * INNER + k] : Real(0);
    }
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        const int at = i * T + threadIdx.x;
        if (at < DEEP * 16 * PIECES) eight(tile + at / PIECES * PITCH + at % PIECES * 8) = coming[i];
    }
    __syncthreads();
    Real* own = tile + threadIdx.x / 32 * EACH;
    float sum[DOWN][EACH / 8][4] = {};
#pragma unroll
    for (int k = 0; k < DEEP; ++k) {
        unsigned b[EACH / 16][4];
#pragma unroll
        for (int j = 0; j < EACH / 16; ++j) four<true>(own + k * 16 * PITCH + j * 16, PITCH, b[j]);
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            unsigned a[4];
            four<false>(filter + i * 16 * FILTER + k * 16, FILTER, a);
#pragma unroll
            for (int j = 0; j < EACH / 8; ++j) multiply(sum[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    __syncwarp();  // nobody else reads this warp's positions
    const int group = lane() / 4, two = lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < EACH / 8; ++j)
#pragma unroll
            for (int low = 0; low < 2; ++low)
                *reinterpret_cast<unsigned*>(own + (i * 16 + low * 8 + group) * PITCH + j * 8 + two) =
                    Several<2>::pair(sum[i][j][2 * low], sum[i][j][2 * low + 1]);
    __syncwarp();
    constexpr int ACROSS = EACH / 8;
#pragma unroll
    for (int i = 0; i < in_pieces(ROWS * ACROSS, 32); ++i) {
        const int at = i * 32 + lane(), row = at / ACROSS, place = at % ACROSS * 8;
        if (row < ROWS) eight(y + long(row) * many + threadIdx.x / 32 * EACH + place) = eight(own + row * PITCH + place);
    }
}

constexpr int TALL = larger(in_pieces(CO, 16), in_pieces(CI, 16)) * 16;
constexpr int WHOLE = larger(in_pieces(CO, 16) * (in_pieces(CI, 16) * 16 + 8), in_pieces(CI, 16) * (in_pieces(CO, 16) * 16 + 8));
constexpr int ROOM = (TALL * PITCH + WHOLE * 16) / 2;

// y = w x. Before anything arrives for the gradients of its filters, a product has 0 in `arrived`.
extern "C" __global__ void __launch_bounds__(T) forward(const Real* w, const Real* x, Real* y, int* arrived, int many) {
    __shared__ alignas(16) float memory[ROOM];
    if (arrived && blockIdx.x == 0 && threadIdx.x == 0) arrived[blockIdx.y] = 0;
    product<CO, CI, false>(w, x, y, many, memory);
}

// The gradient of x.
extern "C" __global__ void __launch_bounds__(T) images(const Real* w, const Real* dy, Real* dx, int many) {
    __shared__ alignas(16) float memory[ROOM];
    product<CI, CO, true>(w, dy, dx, many, memory);
}

// The gradient of the filters, dy times x turned. A block has every gridDim.x-th tile of one product, a warp its
// positions of these; which position a thread takes for which of the instruction's columns is the same in both. `parts`
// has the sums of every block; the last block of a product to arrive adds them up, in their order.
extern "C" __global__ void __launch_bounds__(T) filters(const Real* dy, const Real* x, Real* dw, volatile float* parts,
                                                         int* arrived, int many) {
    constexpr int DOWN = in_pieces(CO, 16), ACROSS = CI / 8;
    __shared__ alignas(16) float memory[CO * CI];
    const int group = lane() / 4, two = lane() % 4 * 2, warp = threadIdx.x / 32;
    dy += long(blockIdx.y) * CO * many;
    x += long(blockIdx.y) * CI * many;
    float sum[DOWN][ACROSS][4] = {};
    for (int tile = blockIdx.x; tile * TILE < many; tile += gridDim.x) {
        const int place = tile * TILE + warp * EACH + lane() % 4 * 8;
        Eight a[DOWN * 2], b[ACROSS];
#pragma unroll
        for (int i = 0; i < DOWN * 2; ++i)
            a[i] = i * 8 < CO ? eight(dy + long(i * 8 + group) * many + place) : Eight{};
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) b[j] = eight(x + long(j * 8 + group) * many + place);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                const unsigned(&up)[4] = a[2 * i].pairs, (&down)[4] = a[2 * i + 1].pairs;
                const unsigned rows[4] = {up[2 * half], down[2 * half], up[2 * half + 1], down[2 * half + 1]};
#pragma unroll
                for (int j = 0; j < ACROSS; ++j)
                    multiply(sum[i][j], rows, b[j].pairs[2 * half], b[j].pairs[2 * half + 1]);
            }
    }
#pragma unroll 1
    for (int turn = 0; turn < WARPS; ++turn) {
        if (warp == turn)
#pragma unroll
            for (int i = 0; i < DOWN; ++i)
#pragma unroll
                for (int j = 0; j < ACROSS; ++j)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int row = i * 16 + k / 2 * 8 + group;
                        float& at = memory[row * CI + j * 8 + two + k % 2];
                        if (row < CO) at = turn ? at + sum[i][j][k] : sum[i][j][k];
                    }
        __syncthreads();
    }
    dw += blockIdx.y * (CO * CI);
    if (gridDim.x == 1) {
        for (int i = threadIdx.x; i < CO * CI; i += T) dw[i] = narrow(memory[i]);
        return;
    }
    parts += long(blockIdx.y) * gridDim.x * (CO * CI);
    for (int i = threadIdx.x; i < CO * CI; i += T) parts[blockIdx.x * (CO * CI) + i] = memory[i];
    __shared__ bool last;
    __threadfence();  // others see the sums before they see that these have arrived
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived + blockIdx.y, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    for (int i = threadIdx.x; i < CO * CI; i += T) {
        float all = 0.f;
#pragma unroll 8
        for (int block = 0; block < gridDim.x; ++block) all += parts[block * (CO * CI) + i];
        dw[i] = narrow(all);
    }
    if (threadIdx.x == 0) arrived[blockIdx.y] = 0;  // somebody may ask for the gradient again
}
