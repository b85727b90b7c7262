// The numbers of images: in single precision, or where HALF is set in bfloat16. Arithmetic is always in single precision.
#if HALF
using Real = unsigned short;
__device__ inline float wide(Real v) { return __uint_as_float(unsigned(v) << 16); }
__device__ inline Real narrow(float v) {
#if __CUDA_ARCH__ >= 800
    Real found;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(v));
    return found;
#endif
    const unsigned bits = __float_as_uint(v);  // to the nearest, of two as near to the even one
    return v != v ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
using Real = float;
__device__ inline float wide(Real v) { return v; }
__device__ inline Real narrow(float v) { return v; }
#endif

// MANY numbers side by side, read and written at once.
template <int MANY>
struct alignas(sizeof(Real) * MANY) Several {
    Real v[MANY];

    __device__ inline float get(int j) const { return wide(v[j]); }
    template <typename Value>
    __device__ inline void set(Value value) {
#pragma unroll
        for (int j = 0; j < MANY; ++j) v[j] = narrow(value(j));
    }
};

#if HALF
// Two share a register for as long as they are kept.
struct Pairs {
    __device__ static inline float get(const unsigned* pairs, int j) {
        return __uint_as_float(j % 2 ? pairs[j / 2] & 0xffff0000u : pairs[j / 2] << 16);
    }
    __device__ static inline unsigned pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#endif
        return narrow(low) | unsigned(narrow(high)) << 16;
    }
    template <typename Value>
    __device__ static inline void set(unsigned* pairs, int many, Value value) {
#pragma unroll
        for (int j = 0; j < many; j += 2) pairs[j / 2] = pair(value(j), value(j + 1));
    }
};
template <>
struct alignas(8) Several<4> {
    unsigned pairs[2];
    __device__ inline float get(int j) const { return Pairs::get(pairs, j); }
    template <typename Value>
    __device__ inline void set(Value value) { Pairs::set(pairs, 4, value); }
};
template <>
struct alignas(16) Several<8> {
    unsigned pairs[4];
    __device__ inline float get(int j) const { return Pairs::get(pairs, j); }
    template <typename Value>
    __device__ inline void set(Value value) { Pairs::set(pairs, 8, value); }
};
#endif
