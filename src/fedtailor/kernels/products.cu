// Products of small matrices with long ones: 1x1 convolutions of few channels, whose planes lie channel by channel.
//
// y[g] = w[g] x[g] for CO x CI filters and `many` positions, of which there are many more than channels, so that what
// counts is to read and to write everything once. Matrices are in bfloat16, sums in single precision. CO, CI, T and into
// how many BLOCKS with how many TILES each a gradient's positions are divided are set by the compiler. CO and CI are
// multiples of 8, and so many positions one of TILE.

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

// How a block computes ROWS out of INNER for its TILE positions: so many of the instruction's rows at a time. Results go
// through shared memory, to be written in wide pieces; where all are there at once, in place of what was read.
template <int ROWS, int INNER>
struct Plan {
    static constexpr int DOWN = in_pieces(ROWS, 16), DEEP = in_pieces(INNER, 16), AT_ONCE = DOWN < 4 ? DOWN : 4;
    static constexpr int FILTER = DEEP * 16 + 8;  // a row of the filters in shared memory
    static constexpr int ASIDE = DOWN > AT_ONCE ? 16 * PITCH : 0;
    static constexpr int ROOM = DEEP * 16 * PITCH + ASIDE + DOWN * 16 * FILTER;
};

// A block's positions of one product. TURNED, the filters are read the other way round.
template <int ROWS, int INNER, bool TURNED>
__device__ inline void product(const Real* w, const Real* x, Real* y, int many, float* memory) {
    using P = Plan<ROWS, INNER>;
    constexpr int PIECES = TILE / 8, READS = in_pieces(P::DEEP * 16 * PIECES, T);
    Real* const tile = reinterpret_cast<Real*>(memory);
    Real* const filter = tile + P::DEEP * 16 * PITCH + P::ASIDE;
    const int first = blockIdx.x * TILE, mine = threadIdx.x / 32 * EACH;
    w += blockIdx.y * (ROWS * INNER);
    x += long(blockIdx.y) * INNER * many + first;
    y += long(blockIdx.y) * ROWS * many + first + mine;
    Eight coming[READS];  // all under way at once
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        const int at = i * T + threadIdx.x, row = at / PIECES;
        coming[i] = row < INNER ? eight(x + long(row) * many + at % PIECES * 8) : Eight{};
    }
    for (int at = threadIdx.x; at < P::DOWN * P::DEEP * 256; at += T) {
        const int row = at / (P::DEEP * 16), k = at % (P::DEEP * 16);
        filter[row * P::FILTER + k] = row < ROWS && k < INNER ? w[TURNED ? k * ROWS + row : row * INNER + k] : Real(0);
    }
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        const int at = i * T + threadIdx.x;
        if (at < P::DEEP * 16 * PIECES) eight(tile + at / PIECES * PITCH + at % PIECES * 8) = coming[i];
    }
    __syncthreads();  // from here on a warp has its own positions, and nobody else reads or writes there
    Real* const own = tile + mine;
    Real* const out = own + (P::ASIDE ? P::DEEP * 16 * PITCH : 0);
    const int group = lane() / 4, two = lane() % 4 * 2;
#pragma unroll 1
    for (int top = 0; top < P::DOWN; top += P::AT_ONCE) {
        float sum[P::AT_ONCE][EACH / 8][4] = {};
#pragma unroll
        for (int k = 0; k < P::DEEP; ++k) {
            unsigned b[EACH / 16][4];
#pragma unroll
            for (int j = 0; j < EACH / 16; ++j) four<true>(own + k * 16 * PITCH + j * 16, PITCH, b[j]);
#pragma unroll
            for (int i = 0; i < P::AT_ONCE; ++i) {
                if (P::DOWN % P::AT_ONCE && top + i >= P::DOWN) break;
                unsigned a[4];
                four<false>(filter + (top + i) * 16 * P::FILTER + k * 16, P::FILTER, a);
#pragma unroll
                for (int j = 0; j < EACH / 8; ++j)
                    multiply(sum[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < P::AT_ONCE; ++i) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < EACH / 8; ++j)
#pragma unroll
                for (int low = 0; low < 2; ++low)
                    *reinterpret_cast<unsigned*>(out + (low * 8 + group) * PITCH + j * 8 + two) =
                        Several<2>::pair(sum[i][j][2 * low], sum[i][j][2 * low + 1]);
            __syncwarp();
#pragma unroll
            for (int j = 0; j < EACH / 16; ++j) {
                const int at = j * 32 + lane(), row = at / (EACH / 8), place = at % (EACH / 8) * 8;
                const int whole = (top + i) * 16 + row;
                if (whole < ROWS) eight(y + long(whole) * many + place) = eight(out + row * PITCH + place);
            }
        }
    }
}

// The sums of a gradient's blocks are added up in groups of IN_GROUP, which is set by the compiler too, and those of the
// groups then.
constexpr int GROUP = BLOCKS < IN_GROUP ? BLOCKS : IN_GROUP, GROUPS = BLOCKS / GROUP, COUNTERS = 1 + GROUPS;

// y = w x. Before anything arrives for the gradients of its filters, a product has 0 in all of its counters.
extern "C" __global__ void __launch_bounds__(T) forward(const Real* w, const Real* x, Real* y, int* arrived, int many) {
    __shared__ alignas(16) float memory[Plan<CO, CI>::ROOM / 2];
    if (arrived && blockIdx.x == 0 && threadIdx.x < COUNTERS) arrived[blockIdx.y * COUNTERS + threadIdx.x] = 0;
    product<CO, CI, false>(w, x, y, many, memory);
}

// The gradient of x.
extern "C" __global__ void __launch_bounds__(T) images(const Real* w, const Real* dy, Real* dx, int many) {
    __shared__ alignas(16) float memory[Plan<CI, CO>::ROOM / 2];
    product<CI, CO, true>(w, dy, dx, many, memory);
}

// Four sums of a thread of the instruction's 16 x 8: of two rows, two columns each.
struct alignas(16) Sums {
    float v[4];
    __device__ void operator+=(const Sums& other) {
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] += other.v[k];
    }
};

// What another block has written: not from a cache that may not know of it.
__device__ inline Sums written(const Sums* at) {
#if __CUDA_ARCH__ >= 800
    Sums found;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.v[0]), "=f"(found.v[1]), "=f"(found.v[2]), "=f"(found.v[3]) : "l"(at));
    return found;
#else
    return *at;
#endif
}

// The gradient's rows and columns as the instruction has them, which computes whole sixteens of rows: TURNED if that
// is less.
constexpr bool TURNED = in_pieces(CI, 16) * 16 * CO < in_pieces(CO, 16) * 16 * CI;
constexpr int UP = TURNED ? CI : CO, ALONG = TURNED ? CO : CI;
constexpr int HIGH = in_pieces(UP, 16), WIDE = ALONG / 8, PARTS = HIGH * WIDE * 32;  // sums, in fours

// Whether a block is the last of so many to arrive. What the others have written it can read then.
__device__ inline bool is_last(int* arrived, int of) {
    __shared__ bool last;
    __threadfence();  // others see what was written before they see that it has arrived
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == of - 1;
    __syncthreads();
    if (last && threadIdx.x == 0) *arrived = 0;  // somebody may ask for the gradient again
    return last;
}

// Adds up the sums of MANY blocks, in their order, and puts the totals somewhere. Where there are more threads than sums,
// several share one, each with every SHARE-th block.
template <int MANY, int STEP, typename Put>
__device__ inline void add_up(const Sums* from, Sums* shared, Put put) {
    constexpr int SHARE = PARTS >= T ? 1 : T / PARTS < MANY ? T / PARTS : MANY;
    const int first = PARTS < T ? threadIdx.x / PARTS : 0;
#pragma unroll 2
    for (int i = PARTS < T ? threadIdx.x % PARTS : threadIdx.x; i < PARTS; i += PARTS < T ? PARTS : T) {
        Sums total = {};
        if (first < SHARE)
#pragma unroll
            for (int block = 0; block < MANY / SHARE; ++block)
                total += written(from + (block * SHARE + first) * STEP * PARTS + i);
        if (SHARE > 1) {
            __syncthreads();  // who shared something before has read it
            shared[threadIdx.x] = total;
            __syncthreads();
            for (int other = 1; first == 0 && other < SHARE; ++other) total += shared[other * PARTS + i];
        }
        if (first == 0) put(i, total);
        if (PARTS < T) break;
    }
}

// The gradient of the filters, dy times x turned. A block has TILES tiles of one product, a warp its positions of these;
// which position a thread takes for which of the instruction's columns is the same in both. `parts` has the sums of all
// BLOCKS, which the last ones to arrive add up.
extern "C" __global__ void __launch_bounds__(T) filters(const Real* dy, const Real* x, Real* dw, float* parts,
                                                         int* arrived, int many) {
    constexpr int AT_ONCE = TILES < 8 / (HIGH * 2 + WIDE) + 1 ? TILES : 8 / (HIGH * 2 + WIDE) + 1;  // tiles under way
    __shared__ alignas(16) float memory[larger(WARPS / 2 * PARTS, T) * 4];
    const int group = lane() / 4, two = lane() % 4 * 2, warp = threadIdx.x / 32;
    const Real* const up = (TURNED ? x : dy) + long(blockIdx.y) * UP * many;
    const Real* const along = (TURNED ? dy : x) + long(blockIdx.y) * ALONG * many;
    Sums sum[HIGH][WIDE] = {};
#pragma unroll AT_ONCE
    for (int tile = 0; tile < TILES; ++tile) {
        const int place = (tile * BLOCKS + blockIdx.x) * TILE + warp * EACH + lane() % 4 * 8;
        Eight a[HIGH * 2], b[WIDE];
#pragma unroll
        for (int i = 0; i < HIGH * 2; ++i)
            a[i] = i * 8 < UP ? eight(up + long(i * 8 + group) * many + place) : Eight{};
#pragma unroll
        for (int j = 0; j < WIDE; ++j) b[j] = eight(along + long(j * 8 + group) * many + place);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < HIGH; ++i) {
                const unsigned(&upper)[4] = a[2 * i].pairs, (&lower)[4] = a[2 * i + 1].pairs;
                const unsigned rows[4] = {upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1]};
#pragma unroll
                for (int j = 0; j < WIDE; ++j)
                    multiply(sum[i][j].v, rows, b[j].pairs[2 * half], b[j].pairs[2 * half + 1]);
            }
    }
    Sums* const shared = reinterpret_cast<Sums*>(memory);
#pragma unroll
    for (int left = WARPS / 2; left; left /= 2) {  // half of the warps give the others what they have
        Sums* const given = shared + warp % left * PARTS + lane();
        if (warp >= left && warp < 2 * left)
#pragma unroll
            for (int i = 0; i < HIGH * WIDE; ++i) given[i * 32] = sum[i / WIDE][i % WIDE];
        __syncthreads();
        if (warp < left)
#pragma unroll
            for (int i = 0; i < HIGH * WIDE; ++i) sum[i / WIDE][i % WIDE] += given[i * 32];
        __syncthreads();
    }
    Sums* const all = reinterpret_cast<Sums*>(parts) + long(blockIdx.y) * BLOCKS * PARTS;
    if (warp == 0)
#pragma unroll
        for (int i = 0; i < HIGH * WIDE; ++i) all[blockIdx.x * PARTS + i * 32 + lane()] = sum[i / WIDE][i % WIDE];
    int* const counters = arrived + blockIdx.y * COUNTERS;
    Sums* const in_group = all + blockIdx.x / GROUP * GROUP * PARTS;
    const auto put = [&](int i, const Sums& total) {
        const int row = i / 32 / WIDE * 16 + i % 32 / 4, column = i / 32 % WIDE * 8 + i % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int r = row + k / 2 * 8, c = column + k % 2;
            if (r < UP) dw[blockIdx.y * (CO * CI) + (TURNED ? c * CI + r : r * CI + c)] = narrow(total.v[k]);
        }
    };
    if (!is_last(counters + 1 + blockIdx.x / GROUP, GROUP)) return;
    if (GROUPS == 1) return add_up<GROUP, 1>(in_group, shared, put);
    add_up<GROUP, 1>(in_group, shared, [&](int i, const Sums& total) { in_group[i] = total; });
    if (is_last(counters, GROUPS)) add_up<GROUPS, GROUP>(all, shared, put);
}
