// The tensors of a part as blocks of larger ones: copied out, and averaged back in.
//
// A row describes one tensor: entry i of the part, in its own order, lies at `place(row, i)` of the large tensor. Every
// block of threads takes one piece of a row, of at most CHUNK entries; `pieces` holds the row and the first entry of
// each. Pointers come as numbers. T and CHUNK are set by the compiler.

struct Row {
    long sizes[3];    // of the three inner axes; how long the outer one is, nobody needs to know
    long strides[4];  // in the large tensor
    long first, count, start;  // the first entry's place, entries, and where they begin in `out`
};

__device__ inline long place(const Row& row, int i) {
    const int z = row.sizes[2], y = row.sizes[1], x = row.sizes[0];  // dividing short numbers is several times faster
    const int a = i % z, b = i / z % y, c = i / z / y % x, d = i / z / y / x;
    return row.first + d * row.strides[0] + c * row.strides[1] + b * row.strides[2] + a * row.strides[3];
}

#define PIECE                                                                   \
    const int which = pieces[2 * blockIdx.x], begin = pieces[2 * blockIdx.x + 1]; \
    const Row row = rows[which];                                                \
    const int end = row.count < begin + CHUNK ? row.count : begin + CHUNK;

extern "C" __global__ void __launch_bounds__(T)
    take(const long* __restrict__ from, const Row* __restrict__ rows, const int* __restrict__ pieces,
         float* __restrict__ out) {
    PIECE
    const float* large = reinterpret_cast<const float*>(from[which]);
    for (int i = begin + threadIdx.x; i < end; i += T) out[row.start + i] = large[place(row, i)];
}

// change += mass * (part - old), masses += mass. Where part and old are equal, a change of -0 stays -0.
extern "C" __global__ void __launch_bounds__(T)
    add(const long* __restrict__ pointers, const Row* __restrict__ rows, const int* __restrict__ pieces, int many,
        float mass) {
    PIECE
    const float* part = reinterpret_cast<const float*>(pointers[which]);
    const float* old = reinterpret_cast<const float*>(pointers[many + which]);
    float* change = reinterpret_cast<float*>(pointers[2 * many + which]);
    float* masses = reinterpret_cast<float*>(pointers[3 * many + which]);
    for (int i = begin + threadIdx.x; i < end; i += T) {
        const long at = place(row, i);
        change[at] += -mass * (old[at] - part[i]);
        masses[at] += mass;
    }
}

// out = old + sum over parts of share * (part - old). Where all are equal, old stays as it is, -0 too.
extern "C" __global__ void __launch_bounds__(T)
    average(const long* __restrict__ pointers, const Row* __restrict__ rows, const int* __restrict__ pieces,
            const float* __restrict__ shares, float* __restrict__ out, int parts, int many) {
    PIECE
    const float* old = reinterpret_cast<const float*>(pointers[which]);
    for (int i = begin + threadIdx.x; i < end; i += T) {
        const float before = old[i];
        float change = -0.f;
        for (int part = 1; part <= parts; ++part)
            change += -shares[part - 1] * (before - reinterpret_cast<const float*>(pointers[part * many + which])[i]);
        out[row.start + i] = before + change;
    }
}
