// The numbers of images: in single precision, or where HALF is set in bfloat16. Arithmetic is always in single precision.
#if HALF
using Real = unsigned short;
__device__ inline float wide(Real v) { return __uint_as_float(unsigned(v) << 16); }
__device__ inline Real narrow(float v) {
    const unsigned bits = __float_as_uint(v);  // to the nearest, of two as near to the even one
    return v != v ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
using Real = float;
__device__ inline float wide(Real v) { return v; }
__device__ inline Real narrow(float v) { return v; }
#endif
