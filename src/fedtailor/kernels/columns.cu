// The patches that a convolution's filters look at, as rows of a matrix: [images, rows, columns, K1, K2, channels].
//
// Images may lie in any order (stride_*), their gradient has channels last. Every thread handles V channels of one place,
// which lie together where V > 1. All in capitals is set by the compiler: channels C, height H and width W, filters of
// K1 x K2, stride S1 and S2, padding P1 and P2, rows R and columns Q of the output.

struct alignas(4 * V) Some {
    float v[V];
};

#define G (C / V)

extern "C" __global__ void __launch_bounds__(T)
    patches(const float* __restrict__ x, float* __restrict__ out, int total, int stride_n, int stride_c, int stride_h,
            int stride_w) {
    for (int i = blockIdx.x * T + threadIdx.x; i < total; i += gridDim.x * T) {
        const int c = i % G * V, j2 = i / G % K2, j1 = i / (G * K2) % K1, at = i / (G * K1 * K2);
        const int q = at % Q, r = at / Q % R, h = r * S1 + j1 - P1, w = q * S2 + j2 - P2;
        Some found;
        if (h >= 0 && h < H && w >= 0 && w < W) {
            const long first = long(at / (Q * R)) * stride_n + long(c) * stride_c;
            found = *reinterpret_cast<const Some*>(x + first + long(h) * stride_h + long(w) * stride_w);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) found.v[v] = 0.f;
        }
        *reinterpret_cast<Some*>(out + long(i) * V) = found;
    }
}

// The gradient of the images: every place collects from the patches that it is part of.
extern "C" __global__ void __launch_bounds__(T)
    collect(const float* __restrict__ dy, float* __restrict__ dx, int total) {
    for (int i = blockIdx.x * T + threadIdx.x; i < total; i += gridDim.x * T) {
        const int g = i % G, w = i / G % W, h = i / (G * W) % H, n = i / (G * W * H);
        Some sum;
#pragma unroll
        for (int v = 0; v < V; ++v) sum.v[v] = 0.f;
        for (int j1 = 0; j1 < K1; ++j1) {
            const int down = h + P1 - j1, r = down / S1;
            if (down < 0 || down % S1 || r >= R) continue;
            for (int j2 = 0; j2 < K2; ++j2) {
                const int along = w + P2 - j2, q = along / S2;
                if (along < 0 || along % S2 || q >= Q) continue;
                const long at = (((long(n) * R + r) * Q + q) * K1 + j1) * K2 + j2;
                const Some more = *reinterpret_cast<const Some*>(dy + (at * G + g) * V);
#pragma unroll
                for (int v = 0; v < V; ++v) sum.v[v] += more.v[v];
            }
        }
        *reinterpret_cast<Some*>(dx + long(i) * V) = sum;
    }
}
