// Uniform numbers that are a function of a counter and a place: see random.py. T is set by the compiler.

// Signed shifts and multiplication modulo 2^64, as torch's integers have them.
__device__ inline long mixed(long counter) {
    long x = long((unsigned long)counter * (unsigned long)MIX1);
    x = long((unsigned long)(x ^ (x >> 32)) * (unsigned long)MIX2);
    x = long((unsigned long)(x ^ (x >> 29)) * (unsigned long)MIX1);
    return (x ^ (x >> 32)) & ((1l << 62) - 1);
}

extern "C" __global__ void __launch_bounds__(T)
    uniforms(const long* __restrict__ counters, float* __restrict__ out, int many, int count) {
    const long total = long(many) * count;
    for (long i = long(blockIdx.x) * T + threadIdx.x; i < total; i += long(gridDim.x) * T)
        out[i] = float(mixed(mixed(mixed(counters[i / count])) + i % count) >> 38) / 16777216.f;
}
