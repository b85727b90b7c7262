// Batch normalisation of a training step, with the activation that follows it.
//
// A block has a channel; LANES threads at a time walk along a plane (one channel of one image), reading V values each.
// Where planes lie channel by channel, all of a channel's are walked along as one. The gradient comes in PARTS tensors with
// an equal share of the channels each. ACT, V, T, PARTS and HALF are set by the compiler; a size is that of a plane.

struct alignas(sizeof(Real) * V) Some {
    Real v[V];
};

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

struct Parts {
    const Real* at[PARTS];
};

// Calls what is to be done at every place of the channel, V at a time; places in the channel's part are given as well.
template <typename Act>
__device__ inline void walk(int channels, int batch, int size, int lanes, Act act) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = T / lanes;
    const int share = channels / PARTS, own = PARTS > 1 ? blockIdx.x % share : blockIdx.x;
    for (int image = group; image < batch; image += groups) {
        const long plane = (long(image) * channels + blockIdx.x) * size;
        const long in_part = (long(image) * share + own) * size;
#pragma unroll 4
        for (int i = lane * V; i < size; i += lanes * V) act(plane + i, in_part + i);
    }
}

__device__ inline Some at(const Real* from, long place) { return *reinterpret_cast<const Some*>(from + place); }

// The sums of two numbers over the block, for everybody.
__device__ inline float2 summed(float a, float b) {
    __shared__ float2 parts[T / 32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) {
        a += __shfl_xor_sync(0xffffffff, a, lane);
        b += __shfl_xor_sync(0xffffffff, b, lane);
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = {a, b};
    __syncthreads();
    float2 all = {0.f, 0.f};
    for (int warp = 0; warp < T / 32; ++warp) {
        all.x += parts[warp].x;
        all.y += parts[warp].y;
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(T)
    forward(const Real* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
            Real* __restrict__ y, float* __restrict__ seen, float* running_mean, float* running_var, int channels,
            int batch, int size, int lanes, int copies, float momentum, float eps) {
    const int c = blockIdx.x, count = batch * size;
    const float origin = wide(x[long(c) * size]);  // sums of differences keep their digits
    float a = 0.f, b = 0.f;
    walk(channels, batch, size, lanes, [&](long place, long) {
        const Some s = at(x, place);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float d = wide(s.v[j]) - origin;
            a += d;
            b += d * d;
        }
    });
    const float2 sums = summed(a, b);
    const float off = sums.x / count, mean = origin + off;
    const float variance = fmaxf(sums.y / count - off * off, 0.f), scale = 1.f / sqrtf(variance + eps);
    if (threadIdx.x == 0) {
        seen[c] = mean;
        seen[channels + c] = scale;
        for (int i = c; i < copies * channels; i += channels) {
            running_mean[i] = (1.f - momentum) * running_mean[i] + momentum * mean;
            running_var[i] = (1.f - momentum) * running_var[i] + momentum * (variance * count / (count - 1));
        }
    }
    const float w = weight ? weight[c] : 1.f, shift = bias ? bias[c] : 0.f;
    walk(channels, batch, size, lanes, [&](long place, long) {
        Some s = at(x, place);
#pragma unroll
        for (int j = 0; j < V; ++j) s.v[j] = narrow(activated((wide(s.v[j]) - mean) * scale * w + shift));
        *reinterpret_cast<Some*>(y + place) = s;
    });
}

extern "C" __global__ void __launch_bounds__(T)
    backward(const Real* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             const float* __restrict__ seen, Real* __restrict__ dx, float* __restrict__ dweight,
             float* __restrict__ dbias, Parts parts, int channels, int batch, int size, int lanes) {
    const int c = blockIdx.x, count = batch * size;
    const float mean = seen[c], scale = seen[channels + c];
    const Real* dy = parts.at[0];
#pragma unroll
    for (int part = 1; part < PARTS; ++part)
        if (c / (channels / PARTS) == part) dy = parts.at[part];
    const float w = weight ? weight[c] : 1.f, shift = bias ? bias[c] : 0.f;
    float a = 0.f, b = 0.f;
    walk(channels, batch, size, lanes, [&](long place, long in_part) {
        const Some s = at(x, place), g = at(dy, in_part);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float h = (wide(s.v[j]) - mean) * scale, d = wide(g.v[j]) * slope(h * w + shift);
            a += d;
            b += d * h;
        }
    });
    const float2 sums = summed(a, b);
    if (threadIdx.x == 0 && dweight) {
        dbias[c] = sums.x;
        dweight[c] = sums.y;
    }
    const float first = sums.x / count, second = sums.y / count;
    walk(channels, batch, size, lanes, [&](long place, long in_part) {
        const Some s = at(x, place), g = at(dy, in_part);
        Some out;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float h = (wide(s.v[j]) - mean) * scale, d = wide(g.v[j]) * slope(h * w + shift);
            out.v[j] = narrow(w * scale * (d - first - h * second));
        }
        *reinterpret_cast<Some*>(dx + place) = out;
    });
}
