#include "parallel.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace {

// Both GNU's and LLVM's runtime have these entries.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Number = int (*)();
Parallel gomp_parallel = nullptr;
Number thread_number = nullptr, thread_count = nullptr;

struct Region {
    Task task;
    void* data;
    int64_t threads;
};

// The runtime may give fewer threads than asked for: each then takes several parts.
void inside(void* at) {
    const Region& region = *static_cast<Region*>(at);
    for (int64_t part = thread_number(); part < region.threads; part += thread_count())
        region.task(region.data, part, region.threads);
}

}  // namespace

void find_threads() {
#if defined(__unix__) || defined(__APPLE__)
    gomp_parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_number = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    thread_count = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
    if (!thread_number || !thread_count) gomp_parallel = nullptr;
#endif
}

void run_on_threads(int64_t threads, Task task, void* data) {
    if (threads > 1 && gomp_parallel) {
        Region region{task, data, threads};
        gomp_parallel(inside, &region, static_cast<unsigned>(threads), 0);
        return;
    }
    for (int64_t part = 0; part < threads; part++) task(data, part, threads);
}
