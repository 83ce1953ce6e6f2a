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

#if defined(__unix__) || defined(__APPLE__)
bool found_in(void* handle) {
    const auto parallel = reinterpret_cast<Parallel>(dlsym(handle, "GOMP_parallel"));
    const auto number = reinterpret_cast<Number>(dlsym(handle, "omp_get_thread_num"));
    const auto count = reinterpret_cast<Number>(dlsym(handle, "omp_get_num_threads"));
    if (!parallel || !number || !count) return false;
    gomp_parallel = parallel, thread_number = number, thread_count = count;
    return true;
}
#endif

}  // namespace

bool find_threads(const char* library) {
#if defined(__unix__) || defined(__APPLE__)
    if (gomp_parallel || found_in(RTLD_DEFAULT)) return true;
    // Not closed: the entries have to stay.
    void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    return handle && found_in(handle);
#else
    (void)library;
    return false;
#endif
}

int64_t count_threads(int64_t wanted) {
    int64_t found = 1;
    run_on_threads(wanted, [](void* at, int64_t part, int64_t) {
        if (part == 0 && gomp_parallel) *static_cast<int64_t*>(at) = thread_count();
    }, &found);
    return found;
}

void run_on_threads(int64_t threads, Task task, void* data) {
    if (threads > 1 && gomp_parallel) {
        Region region{task, data, threads};
        gomp_parallel(inside, &region, static_cast<unsigned>(threads), 0);
        return;
    }
    for (int64_t part = 0; part < threads; part++) task(data, part, threads);
}
