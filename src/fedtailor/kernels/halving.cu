// What two convolutions of stride 2, one pixel apart, read of some planes after a ReLU, and its gradient.
//
// The first half has every second pixel of every second row; the second half starts one pixel further down and to the
// right, with zeros beyond the edge. H and W are the planes' size, T threads; the compiler sets them and HALF.

constexpr int OH = (H + 1) / 2, OW = (W + 1) / 2;

__device__ inline float clipped(float v) { return v < 0.f ? 0.f : v; }

extern "C" __global__ void __launch_bounds__(T)
    forward(const Real* __restrict__ x, Real* __restrict__ y, int planes) {
    const int i = blockIdx.x * T + threadIdx.x, count = planes * (OH * OW);
    if (i >= count) return;
    const int r = i / OW % OH * 2, c = i % OW * 2;
    const Real* from = x + (i / (OH * OW) * H + r) * W + c;
    y[i] = narrow(clipped(wide(*from)));
    y[count + i] = r + 1 < H && c + 1 < W ? narrow(clipped(wide(from[W + 1]))) : narrow(0.f);
}

extern "C" __global__ void __launch_bounds__(T)
    backward(const Real* __restrict__ dy, const Real* __restrict__ x, Real* __restrict__ dx, int planes) {
    const int i = blockIdx.x * T + threadIdx.x;
    if (i >= planes * (H * W)) return;
    const int r = i / W % H, c = i % W, half = r % 2;
    const int from = ((half * planes + i / (H * W)) * OH + r / 2) * OW + c / 2;
    dx[i] = half != c % 2 || wide(x[i]) <= 0.f ? narrow(0.f) : dy[from];
}
