// The end of a training step with SGD: gradients are pulled, pushed and clipped, momenta and weights move on.
//
// A row says where the tensors of one parameter lie; the entries of all of them follow each other in the same order. A
// row without weight is left out, one without gradient has a gradient of 0. A block of threads takes pieces of rows, of
// at most CHUNK entries, four of them to a thread at a time. Which thread adds what does not depend on where tensors
// lie: the same numbers give the same bits. T, CHUNK, ANCHORED, PUSHED and MOMENTUM are set by the compiler.

struct Row {
    float* weight;
    float* momentum;
    const float* gradient;
    const float* anchor;
    const float* push;
};

struct Piece {
    int row, begin, end;
};

struct alignas(16) Four {
    float v[4];
};

struct Spot {
    int at, left;  // the first of up to four entries, and how many there are from it on
    bool whole;    // whether four can be read and written at once
};

constexpr int STEPS = CHUNK / (4 * T);

// Calls what is to be done at this thread's spots of a piece, which are numbered.
template <typename Act>
__device__ inline void walk(const Row& row, const Piece& piece, Act act) {
    const long all = long(row.weight) | long(row.momentum) | long(row.gradient) | long(row.anchor) | long(row.push);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int at = piece.begin + 4 * (step * T + threadIdx.x), left = piece.end - at;
        if (left > 0) act(step, Spot{at, left, left >= 4 && all % 16 == 0});
    }
}

__device__ inline Four read(const float* from, const Spot& spot) {
    if (spot.whole) return *reinterpret_cast<const Four*>(from + spot.at);
    Four found;
#pragma unroll
    for (int j = 0; j < 4; ++j) found.v[j] = j < spot.left ? from[spot.at + j] : 0.f;
    return found;
}

__device__ inline void write(float* to, const Spot& spot, const Four& four) {
    if (spot.whole) {
        *reinterpret_cast<Four*>(to + spot.at) = four;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (j < spot.left) to[spot.at + j] = four.v[j];
}

// gradient + pull * (weight - anchor) + push; the weight is needed where there is an anchor only.
__device__ inline Four moved(const Row& row, const Spot& spot, const Four& weight, float pull) {
    Four found = {{0.f, 0.f, 0.f, 0.f}}, anchor, push;
    if (row.gradient) found = read(row.gradient, spot);
    if (ANCHORED) anchor = read(row.anchor, spot);
    if (PUSHED) push = read(row.push, spot);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (ANCHORED) found.v[j] += pull * (weight.v[j] - anchor.v[j]);
        if (PUSHED) found.v[j] += push.v[j];
    }
    return found;
}

// The sum of a number over the block, for everybody.
__device__ inline float summed(float a) {
    __shared__ float sums[T / 32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) a += __shfl_xor_sync(0xffffffff, a, lane);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = a;
    __syncthreads();
    float all = 0.f;
    for (int warp = 0; warp < T / 32; ++warp) all += sums[warp];
    return all;
}

// Every block's part of the sum of squares.
extern "C" __global__ void __launch_bounds__(T)
    squares(const Row* __restrict__ rows, const Piece* __restrict__ pieces, const float* __restrict__ pull,
            float* __restrict__ parts, int many) {
    const float strength = *pull;
    float sum = 0.f;
    for (int i = blockIdx.x; i < many; i += gridDim.x) {
        const Piece piece = pieces[i];
        const Row row = rows[piece.row];
        if (!row.weight) continue;
        Four found[STEPS];
        walk(row, piece, [&](int step, const Spot& spot) {
            Four weight;
            if (ANCHORED) weight = read(row.weight, spot);
            found[step] = moved(row, spot, weight, strength);
        });
        walk(row, piece, [&](int step, const Spot&) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += found[step].v[j] * found[step].v[j];
        });
    }
    sum = summed(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// What gradients are multiplied by so that their norm is at most `clip`. One that is not a number stays so.
__device__ inline float coefficient(const float* parts, int many, float clip) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < many; i += T) sum += parts[i];
    const float found = clip / (sqrtf(summed(sum)) + 1e-6f);
    return found > 1.f ? 1.f : found;
}

// `many` parts of the sum of squares; 0: nothing is clipped.
extern "C" __global__ void __launch_bounds__(T)
    update(const Row* __restrict__ rows, const Piece* __restrict__ pieces, const float* __restrict__ pull,
           const float* __restrict__ parts, const float* __restrict__ lr, int many, float clip, float momentum,
           float decay) {
    const Piece piece = pieces[blockIdx.x];
    const Row row = rows[piece.row];
    if (!row.weight) return;
    const float strength = *pull, rate = *lr;
    Four weight[STEPS], change[STEPS], before[STEPS];
    walk(row, piece, [&](int step, const Spot& spot) {
        weight[step] = read(row.weight, spot);
        change[step] = moved(row, spot, weight[step], strength);
        if (MOMENTUM) before[step] = read(row.momentum, spot);
    });
    const float share = many ? coefficient(parts, many, clip) : 1.f;
    walk(row, piece, [&](int step, const Spot& spot) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float& d = change[step].v[j];
            d *= share;
            if (decay != 0.f) d += decay * weight[step].v[j];
            if (MOMENTUM) d += momentum * before[step].v[j];
            weight[step].v[j] -= rate * d;
        }
        if (MOMENTUM) write(row.momentum, spot, change[step]);
        write(row.weight, spot, weight[step]);
    });
}
