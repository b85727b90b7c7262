// Batch normalisation of a training step, with the activation that follows it.
//
// A block has a channel; LANES threads at a time walk along a plane (one channel of one image), reading V values each.
// Where planes lie channel by channel, all of a channel's are walked along as one, and of each thread's first KEEP
// steps the values stay in registers until they are needed again: with many networks on a card, what is read a second
// time comes from memory. The gradient comes in PARTS tensors with an equal share of the channels each. ACT, V, T, KEEP,
// REST (whether there are more steps), PARTS and HALF are set by the compiler; a size is that of a plane.

constexpr int KEEP_BOTH = KEEP < 8 ? KEEP : 8;  // of two tensors, for which a thread has registers
constexpr bool REST_BOTH = REST || KEEP_BOTH < KEEP;

using Some = Several<V>;

struct Parts {
    const Real* at[PARTS];
};

// Calls what is to be done at the first MANY steps of the channel, which are numbered, V values at a time.
template <int MANY, typename Act>
__device__ inline void walk_kept(int size, Act act) {
#pragma unroll
    for (int j = 0; j < MANY; ++j) {
        const int i = (j * T + threadIdx.x) * V;
        if (i < size) act(j, i);
    }
}

// The same at all places after those, in the order of memory or BACK again: what was read last is the nearest. A place
// is given in the tensor, and in the channel's part.
template <int KEPT, bool MORE, bool BACK, typename Act>
__device__ inline void walk(int channels, int batch, int size, int lanes, Act act) {
    if (!MORE) return;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = T / lanes;
    const int share = channels / PARTS, own = PARTS > 1 ? blockIdx.x % share : blockIdx.x;
    const int first = KEPT * T * V + lane * V, step = lanes * V;
    for (int image = group; image < batch; image += groups) {
        const long plane = (long(image) * channels + blockIdx.x) * size;
        const long in_part = (long(image) * share + own) * size;
        const int last = first + (size - 1 - first) / step * step;
#pragma unroll 4
        for (int i = first; i < size; i += step) {
            const int at = BACK ? first + last - i : i;
            act(plane + at, in_part + at);
        }
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
    const auto add = [&](const Some& s) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float d = s.get(j) - origin;
            a += d;
            b += d * d;
        }
    };
    Some kept[KEEP + 1];  // one more, as there is no array of none
    const long begin = long(c) * size;
    walk_kept<KEEP>(size, [&](int j, int i) { kept[j] = at(x, begin + i); });
    walk_kept<KEEP>(size, [&](int j, int) { add(kept[j]); });
    walk<KEEP, REST, false>(channels, batch, size, lanes, [&](long place, long) { add(at(x, place)); });
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
    const auto put = [&](const Some& s, long place) {
        Some out;
        out.set([&](int j) { return activated((s.get(j) - mean) * scale * w + shift); });
        *reinterpret_cast<Some*>(y + place) = out;
    };
    walk<KEEP, REST, true>(channels, batch, size, lanes, [&](long place, long) { put(at(x, place), place); });
    walk_kept<KEEP>(size, [&](int j, int i) { put(kept[j], begin + i); });
}

extern "C" __global__ void __launch_bounds__(T)
    backward(const Real* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             const float* __restrict__ seen, Real* __restrict__ dx, float* __restrict__ dweight,
             float* __restrict__ dbias, Parts parts, int channels, int batch, int size, int lanes) {
    const int c = blockIdx.x, count = batch * size, share = channels / PARTS;
    const float mean = seen[c], scale = seen[channels + c];
    const Real* dy = parts.at[0];
#pragma unroll
    for (int part = 1; part < PARTS; ++part)
        if (c / share == part) dy = parts.at[part];
    const float w = weight ? weight[c] : 1.f, shift = bias ? bias[c] : 0.f;
    float a = 0.f, b = 0.f;
    const auto add = [&](const Some& s, const Some& g) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float h = (s.get(j) - mean) * scale, d = g.get(j) * slope(h * w + shift);
            a += d;
            b += d * h;
        }
    };
    Some kept[KEEP_BOTH + 1], kept_dy[KEEP_BOTH + 1];
    const long begin = long(c) * size, begin_dy = long(PARTS > 1 ? c % share : c) * size;
    walk_kept<KEEP_BOTH>(size, [&](int j, int i) {
        kept[j] = at(x, begin + i);
        kept_dy[j] = at(dy, begin_dy + i);
    });
    walk_kept<KEEP_BOTH>(size, [&](int j, int) { add(kept[j], kept_dy[j]); });
    walk<KEEP_BOTH, REST_BOTH, false>(channels, batch, size, lanes,
                           [&](long place, long in_part) { add(at(x, place), at(dy, in_part)); });
    const float2 sums = summed(a, b);
    if (threadIdx.x == 0 && dweight) {
        dbias[c] = sums.x;
        dweight[c] = sums.y;
    }
    const float first = sums.x / count, second = sums.y / count;
    const auto put = [&](const Some& s, const Some& g, long place) {
        Some out;
        out.set([&](int j) {
            const float h = (s.get(j) - mean) * scale, d = g.get(j) * slope(h * w + shift);
            return w * scale * (d - first - h * second);
        });
        *reinterpret_cast<Some*>(dx + place) = out;
    };
    walk<KEEP_BOTH, REST_BOTH, true>(channels, batch, size, lanes,
                          [&](long place, long in_part) { put(at(x, place), at(dy, in_part), place); });
    walk_kept<KEEP_BOTH>(size, [&](int j, int i) { put(kept[j], kept_dy[j], begin + i); });
}
