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

// MANY numbers side by side, read and written at once: one, or an even number of them.
#if HALF
template <int MANY>
struct alignas(sizeof(Real) * MANY) Several {
    unsigned pairs[MANY / 2];  // two share a register for as long as they are kept

    __device__ inline float get(int j) const {
        return __uint_as_float(j % 2 ? pairs[j / 2] & 0xffff0000u : pairs[j / 2] << 16);
    }
    template <typename Value>
    __device__ inline void set(Value value) {
#pragma unroll
        for (int j = 0; j < MANY; j += 2) pairs[j / 2] = pair(value(j), value(j + 1));
    }
    __device__ static inline unsigned pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#endif
        return narrow(low) | unsigned(narrow(high)) << 16;
    }
};
template <>
struct Several<1> {
    Real v;

    __device__ inline float get(int) const { return wide(v); }
    template <typename Value>
    __device__ inline void set(Value value) { v = narrow(value(0)); }
};
#else
template <int MANY>
struct alignas(sizeof(Real) * MANY) Several {
    float v[MANY];

    __device__ inline float get(int j) const { return v[j]; }
    template <typename Value>
    __device__ inline void set(Value value) {
#pragma unroll
        for (int j = 0; j < MANY; ++j) v[j] = value(j);
    }
};
#endif
