// What follows a norm, by the number ACT, and its slope.
__device__ inline float activated(float z) {
    if (ACT == 1) return z < 0.f ? 0.f : z;
    if (ACT == 2) return z < 0.f ? 0.f : z > 6.f ? 6.f : z;
    if (ACT == 3) return z < -3.f ? 0.f : z > 3.f ? z : z * (z + 3.f) / 6.f;
    return z;
}

__device__ inline float slope(float z) {
    if (ACT == 1) return z <= 0.f ? 0.f : 1.f;
    if (ACT == 2) return z <= 0.f || z >= 6.f ? 0.f : 1.f;
    if (ACT == 3) return z < -3.f ? 0.f : z <= 3.f ? z / 3.f + 0.5f : 1.f;
    return 1.f;
}
