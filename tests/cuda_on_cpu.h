// Enough of CUDA to run the kernels' sources on a processor: a thread for every thread, one block after the other.
// Shared memory starts as something that is no number.
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct Place {
    int x, y;
};
struct float2 {
    float x, y;
};

static thread_local Place threadIdx;
static Place blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> together;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static float exchanged[1024];

static unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

static void __threadfence() {}

static int atomicAdd(int* at, int value) { return std::atomic_ref<int>(*at).fetch_add(value); }

static void __syncthreads() { together->arrive_and_wait(); }

static float __shfl_xor_sync(unsigned, float value, int lane) {
    auto& warp = *warps[threadIdx.x / 32];
    exchanged[threadIdx.x] = value;
    warp.arrive_and_wait();
    const float other = exchanged[threadIdx.x ^ lane];
    warp.arrive_and_wait();
    return other;
}

static float* poisoned(int size) {
    auto* memory = new float[size];
    for (int i = 0; i < size; ++i) memory[i] = std::numeric_limits<float>::quiet_NaN();
    return memory;
}

template <typename Kernel>
static void run(int width, int height, int threads, Kernel kernel) {
    gridDim = {width, height};
    for (int block = 0; block < width * height; ++block) {
        blockIdx = {block % width, block / width};
        together = std::make_unique<std::barrier<>>(threads);
        warps.clear();
        for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
        std::vector<std::thread> all;
        for (int i = 0; i < threads; ++i)
            all.emplace_back([&, i] {
                threadIdx = {i, 0};
                kernel();
                together->arrive_and_drop();
                warps[i / 32]->arrive_and_drop();
            });
        for (auto& thread : all) thread.join();
    }
}
