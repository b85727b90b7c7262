// Enough of CUDA to run the kernels' sources on a processor: one block after the other, its threads in turns, each until it
// has to wait for others. Shared memory starts as something that is no number.
#include <setjmp.h>
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
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

static Place threadIdx, blockIdx, gridDim;
static float exchanged[1024];

constexpr int STACK = 256 << 10;
struct Thread {
    ucontext_t first;  // where it begins, on a stack of its own
    jmp_buf at;        // and where it goes on; jumps are faster than contexts, which ask the system
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool begun, done;
};
static std::vector<Thread> threads_of_block;
static jmp_buf turns;  // who says whose turn it is
static std::function<void()> work;

static void next_turn() {
    if (_setjmp(threads_of_block[threadIdx.x].at) == 0) _longjmp(turns, 1);
}

static void take_turn(int i) {
    Thread& thread = threads_of_block[i];
    threadIdx = {i, 0};
    if (_setjmp(turns) != 0) return;
    if (thread.begun) _longjmp(thread.at, 1);
    thread.begun = true;
    setcontext(&thread.first);
}

// Those who arrive wait for all others that are still at work.
struct Barrier {
    int working, arrived = 0, times = 0;

    void check() {
        if (arrived < working) return;
        arrived = 0;
        ++times;
    }
    void wait() {
        const int now = times;
        ++arrived;
        check();
        while (times == now) next_turn();
    }
    void leave() {
        --working;
        if (working) check();
    }
};
static std::unique_ptr<Barrier> together;
static std::vector<Barrier> warps;

static unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

static void __threadfence() {}

static int atomicAdd(int* at, int value) {
    const int before = *at;
    *at += value;
    return before;
}

static void __syncthreads() { together->wait(); }

static float __shfl_xor_sync(unsigned, float value, int lane) {
    Barrier& warp = warps[threadIdx.x / 32];
    exchanged[threadIdx.x] = value;
    warp.wait();
    const float other = exchanged[threadIdx.x ^ lane];
    warp.wait();
    return other;
}

static float __shfl_sync(unsigned, float value, int from) {
    Barrier& warp = warps[threadIdx.x / 32];
    exchanged[threadIdx.x] = value;
    warp.wait();
    const float other = exchanged[threadIdx.x / 32 * 32 + from];
    warp.wait();
    return other;
}

static void __syncwarp() { warps[threadIdx.x / 32].wait(); }

static float* poisoned(int size) {
    auto* memory = new float[size];
    for (int i = 0; i < size; ++i) memory[i] = std::numeric_limits<float>::quiet_NaN();
    return memory;
}

static void begin_thread() {
    const int mine = threadIdx.x;
    work();
    threads_of_block[mine].done = true;
    together->leave();
    warps[mine / 32].leave();
    _longjmp(turns, 1);
}

template <typename Kernel>
static void run(int width, int height, int threads, Kernel kernel) {
    gridDim = {width, height};
    work = kernel;
    threads_of_block.resize(threads);
    for (int block = 0; block < width * height; ++block) {
        blockIdx = {block % width, block / width};
        together = std::make_unique<Barrier>(threads);
        warps.assign(threads / 32, Barrier{32});
        for (Thread& thread : threads_of_block) {
            getcontext(&thread.first);
            thread.first.uc_stack = {.ss_sp = thread.stack.get(), .ss_size = STACK};
            thread.begun = thread.done = false;
            makecontext(&thread.first, begin_thread, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (int i = 0; i < threads; ++i) {
                if (threads_of_block[i].done) continue;
                take_turn(i);
                left |= !threads_of_block[i].done;
            }
        }
    }
}
